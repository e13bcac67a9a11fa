"""Supervised fine-tuning beside TRL's SFTTrainer on this machine's CPU: speed, memory, loss; one run, in turns.

    pip install trl          # in an environment of its own that has preheat too
    python benchmarks/sft_vs_trl.py [--steps 20] [--repeats 2] [--out benchmarks/results/sft_vs_trl.md]

A 15M Llama (random weights, 32,000 pieces) on instructions with their answers, loss on the answers. All get the same token ids,
the same examples in the same order, EXAMPLES of them a step, AdamW at the same rate, and are judged by the same function: the loss of what they
have become on examples held out, in fp32 by plain transformers. Speed counts real tokens, not padding. Memory is the high-water
mark less what the imports took. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "_peers"))

from contract import UNTIMED, Clock

EXAMPLES, HELD_OUT, LENGTH, LR = 16, 64, 256, 5e-4
TRL: dict[str, dict[str, Any]] = {
    "trl, bf16": {"bf16": True},
    "trl, bf16, rows of like length": {"bf16": True, "train_sampling_strategy": "group_by_length"},
    "trl, bf16, checkpointing (its default)": {"bf16": True, "gradient_checkpointing": True},
}
OURS = {
    "preheat": "{mixed_precision: {mode: bf16_weights}, chunked_loss: {rows: 512}, efficient_attention: {}}",
    "preheat, checkpointing": "{mixed_precision: {mode: bf16_weights}, chunked_loss: {rows: 512}, efficient_attention: {}, activation_checkpointing: {}}",
}


def prepare(folder: Path, steps: int) -> None:
    """The model, and the examples as (ids, where the answer begins): those of `steps`, then those held out."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    data = Path(os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data")
    tokenizer = Tokenizer.from_file(str(data / "tokenizers" / "llama2" / "tokenizer.json"))
    found = []
    for row in json.loads((data / "instruct" / "alpaca_en_demo.json").read_text(encoding="utf-8")):
        prompt = tokenizer.encode(f"{row['instruction']}\n{row['input']}\n### Answer:\n").ids[: LENGTH // 2]
        answer = [*tokenizer.encode(row["output"], add_special_tokens=False).ids, 2][: LENGTH - len(prompt)]
        found.append(([*prompt, *answer], len(prompt)))
    assert len(found) >= steps * EXAMPLES + HELD_OUT, f"--steps {steps}: there are {len(found)} examples"
    (folder / "examples.json").write_text(json.dumps(found[: steps * EXAMPLES] + found[-HELD_OUT:]))
    torch.manual_seed(0)
    shape = {"hidden_size": 288, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 768}
    config = LlamaConfig(**shape, vocab_size=32000, max_position_embeddings=LENGTH, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def train_ours(
    name: str, folder: Path, examples: list[tuple[list[int], int]], steps: int, clock: Clock
) -> dict[str, Any]:
    import numpy as np

    from preheat import recipe as recipes
    from preheat.data.loader import collate
    from preheat.data.packing import Rows, Tokens
    from preheat.engine.builder import build
    from preheat.engine.step import accumulate_gradients, update
    from preheat.hardware.cpu_allocator import install_heap
    from preheat.hardware.probe import probe

    install_heap()  # as before every run of `preheat train`
    recipe = recipes.parse(
        f"model: {{path: {folder / 'model'}}}\nbatch: {{size: 4, seq_len: {LENGTH}}}\nstop: {{max_steps: {steps}}}\n"
        f"optimizer: {{lr: {LR}, betas: [0.9, 0.999], eps: 1.0e-8, weight_decay: 0, max_grad_norm: 1.0}}\ntechniques: {OURS[name]}"
    )
    made = build(recipe, vocabulary=32000, device=probe("cpu"))
    clock.tick()
    losses = []
    for step in range(steps):
        mine = examples[step * EXAMPLES : (step + 1) * EXAMPLES]
        ids = np.array([n for row, _ in mine for n in row], np.uint16)
        marks = np.array([n for row, start in mine for n in (*[0] * start, *[1] * (len(row) - start))], np.uint8)
        packed = Rows(Tokens(ids, np.cumsum([len(row) for row, _ in mine]), marks), LENGTH, "whole")
        loss = accumulate_gradients(made, [collate([(n, packed.row(n)) for n in range(len(packed))])])
        stats = update(made, LR)
        losses.append(float(loss.total / loss.weight))
        assert stats[1] > 0, "gradients are not finite"
        clock.tick()
    return {"losses": losses, "weights": {n: p.detach().float() for n, p in made.parameters()}}


def train_theirs(
    name: str, folder: Path, examples: list[tuple[list[int], int]], steps: int, clock: Clock
) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    class SFT(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *arguments: Any) -> Any:
            if self.args.train_sampling_strategy == "random":
                return SequentialSampler(self.train_dataset)
            return super()._get_train_sampler(*arguments)

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            losses.append(float(loss))
            return loss

    chosen = examples[: steps * EXAMPLES]
    columns = {
        "input_ids": [row for row, _ in chosen],
        "completion_mask": [[0] * start + [1] * (len(row) - start) for row, start in chosen],
    }
    tokenizer = AutoTokenizer.from_pretrained(
        Path(os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data") / "tokenizers" / "llama2"
    )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token  # masked everywhere
    settings: dict[str, Any] = {
        "output_dir": str(folder / "scratch"),
        "max_steps": steps,
        "per_device_train_batch_size": EXAMPLES,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": steps,
        "max_length": LENGTH,
        "completion_only_loss": True,
    }
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = SFT(
        model,
        SFTConfig(**settings | TRL[name]),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    return {"losses": losses, "weights": {n: p.detach().float() for n, p in model.named_parameters()}}


def run_training(name: str, folder: Path, steps: int) -> None:
    """One training in this process; prints what it found."""
    examples = json.loads((folder / "examples.json").read_text())
    if name in TRL:
        from trl import SFTTrainer  # noqa: F401  # what counts as imports
    else:
        for needed in ("transformers.models.llama.modeling_llama", "preheat.engine.builder", "preheat.engine.step"):
            importlib.import_module(needed)
    clock = Clock()
    result = (train_theirs if name in TRL else train_ours)(name, folder, examples, steps, clock)
    tokens = [sum(len(row) for row, _ in examples[n * EXAMPLES : (n + 1) * EXAMPLES]) for n in range(steps)]
    seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    peak = clock.peak - clock.after_imports
    after = evaluate_held_out(folder, result["weights"], examples[-HELD_OUT:])
    speed = sum(tokens[UNTIMED:]) / sum(seconds[UNTIMED:])
    print("\n" + json.dumps({"speed": speed, "peak": peak, "after": after, "losses": result["losses"]}), flush=True)


def evaluate_held_out(folder: Path, weights: dict[str, Any], examples: list[tuple[list[int], int]]) -> float:
    """Nats a token of the answers, one example at a time, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    known = dict(model.named_parameters())
    assert known.keys() == weights.keys(), known.keys() ^ weights.keys()
    total, count = 0.0, 0
    with torch.no_grad():
        for name, value in weights.items():
            known[name].copy_(value)
        for row, start in examples:
            logits = model(torch.tensor([row])).logits[0, start - 1 : -1]
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[start:]), reduction="sum"))
            count += len(row) - start
    return total / count


def iterate_turns(names: list[str], repeats: int) -> Iterator[str]:
    for n in range(repeats):
        yield from names[n % len(names) :] + names[: n % len(names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--work", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sft_vs_trl.md"))
    options = parser.parse_args()
    if options.work:
        run_training(options.work[0], Path(options.work[1]), options.steps)
        return
    names = [*TRL, *OURS]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.steps)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        for name in iterate_turns(names, options.repeats):
            command = [sys.executable, __file__, "--steps", str(options.steps), "--work", name, folder]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            runs[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(name, {k: v for k, v in runs[name][-1].items() if k != "losses"}, flush=True)
    import torch
    import transformers
    import trl

    lines = [
        "# Supervised fine-tuning beside TRL",
        "",
        f"`python benchmarks/sft_vs_trl.py --steps {options.steps} --repeats {options.repeats}`: a 15M Llama, {options.steps} steps of {EXAMPLES} examples of at "
        f"most {LENGTH} tokens, loss on the answers, {torch.get_num_threads()} threads. trl {trl.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}. Median of {options.repeats} rounds (least to most); ratios to `trl, bf16` within a round. preheat packs the examples of a step into rows and "
        "takes the head in chunks; TRL pads them (its packing asks for FlashAttention, without which documents see each other).",
        "",
        "| | real tokens/s | to trl, bf16 | memory, MiB | to trl, bf16 | held-out loss | loss of the last 5 steps |",
        "|---|---|---|---|---|---|---|",
    ]
    base = runs["trl, bf16"]
    for name, found in runs.items():
        fast = [a["speed"] / b["speed"] for a, b in zip(found, base, strict=True)]
        small = [a["peak"] / b["peak"] for a, b in zip(found, base, strict=True)]
        middle = {key: statistics.median(one[key] for one in found) for key in ("speed", "peak", "after")}
        last = statistics.fmean(found[0]["losses"][-5:])
        lines.append(
            f"| {name} | {middle['speed']:,.0f} | {_format_spread(fast)} | {middle['peak'] / 2**20:,.0f} | {_format_spread(small)} | {middle['after']:.4f} | {last:.4f} |"
        )
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def _format_spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} x ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
