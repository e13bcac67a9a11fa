"""The losses of preheat's objectives beside TRL's trainers on the same rows, weights and settings, step by step, in fp32.

    pip install trl          # in an environment of its own: preheat does not need it
    python benchmarks/trl_equal.py [--steps 30] [--out benchmarks/results/trl_equal.md]

stories260K on the preference pairs of $PREHEAT_DATA (default ../shared/data). Both are given the same token ids, so that only the
training is compared. preheat packs several pairs into a row and takes the head in chunks; TRL pads each answer to a row.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from preheat import recipe as recipes
from preheat.data.loader import collate
from preheat.data.packing import Rows, Tokens
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.hardware.probe import probe

LENGTH, PAIRS, LR = 256, 4, 5e-4  # tokens of prompt and answer at most; pairs (or answers) a step
PROMPT = LENGTH // 2
Row = tuple[list[int], list[int], list[int]]


def read_pairs(folder: Path, tokenizer: Any, count: int) -> list[Row]:
    """Prompt, preferred and other answer as token ids, cut to fit."""
    found: list[Row] = []
    for row in json.loads((folder / "instruct/dpo_en_demo.json").read_text(encoding="utf-8")):
        prompt = "\n".join(turn["value"] for turn in row["conversations"]) + "\n"
        ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)][:PROMPT]
        answers = [
            [*tokenizer.encode(row[kind]["value"], add_special_tokens=False), tokenizer.eos_token_id][
                : LENGTH - len(ids)
            ]
            for kind in ("chosen", "rejected")
        ]
        found.append((ids, answers[0], answers[1]))
    return (found * -(-count // len(found)))[:count]


def tokens(rows: list[Row], *, paired: bool) -> Tokens:
    """Of one step."""
    sequences = [(prompt, answer) for prompt, *answers in rows for answer in (answers if paired else answers[:1])]
    ids = np.array([n for prompt, answer in sequences for n in (*prompt, *answer)], np.uint16)
    marks = np.array([n for prompt, answer in sequences for n in (*[0] * len(prompt), *[1] * len(answer))], np.uint8)
    ends = np.cumsum([len(prompt) + len(answer) for prompt, answer in sequences])
    return Tokens(ids, ends, marks, group=2 if paired else 1)


def train_ours(
    model: Path, rows: list[Row], techniques: str, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss of each step, and the adapter's first values."""
    recipe = recipes.parse(
        f"model: {{path: {model}}}\nbatch: {{size: {PAIRS}, seq_len: {LENGTH}}}\nstop: {{max_steps: {steps}}}\n"
        f"optimizer: {{lr: {LR}, betas: [0.9, 0.999], eps: 1.0e-8, weight_decay: 0, max_grad_norm: 1.0}}\n"
        f"techniques: {{chunked_loss: {{rows: 200}}, {techniques}}}"
    )
    made = build(recipe, vocabulary=512, device=probe("cpu"))
    first = {name: p.detach().clone() for name, p in made.parameters()}
    paired, losses = "preference" in recipe.techniques, []
    for step in range(steps):
        packed = Rows(tokens(rows[step * PAIRS : (step + 1) * PAIRS], paired=paired), 2 * LENGTH, "whole")
        batch = collate([(n, packed.row(n)) for n in range(len(packed))])
        loss = accumulate_gradients(made, [batch])
        losses.append(float(loss.total / loss.weight))
        update(made, LR)
    return losses, first


def train_theirs(
    model: Path,
    rows: list[Row],
    tokenizer: Any,
    kind: str,
    steps: int,
    folder: str,
    lora: dict[str, torch.Tensor] | None,
) -> list[float]:
    """Loss of each step of TRL's trainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    losses: list[float] = []

    class InOrder:
        """The rows in their order and as they are; each step's loss unrounded."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)  # type: ignore[misc]
            losses.append(float(loss))
            return loss

    class DPO(InOrder, DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # tokens already

    class SFT(InOrder, SFTTrainer):  # type: ignore[misc]
        pass

    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.unk_token  # masked everywhere
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": PAIRS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": steps,
        "max_length": LENGTH,
    }
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if lora else None
    if kind == "sft":
        columns = {
            "input_ids": [prompt + chosen for prompt, chosen, _ in rows],
            "completion_mask": [[0] * len(prompt) + [1] * len(chosen) for prompt, chosen, _ in rows],
        }
        config = SFTConfig(**settings, completion_only_loss=True, packing=False)
        trainer: Any = SFT(
            policy, config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer, peft_config=adapter
        )
    else:
        columns = {
            name: [row[n] for row in rows] for n, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids"))
        }
        config = DPOConfig(**settings, beta=0.1, loss_type=[kind])
        trainer = DPO(
            policy,
            args=config,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            peft_config=adapter,
        )
    if lora:
        wrapped = dict(trainer.model.named_parameters())
        with torch.no_grad():
            for name, value in lora.items():
                wrapped[f"base_model.model.{name}"].copy_(value)
        assert {n for n, p in wrapped.items() if p.requires_grad} == {f"base_model.model.{name}" for name in lora}
    trainer.train()
    return losses


CASES = (  # words, preheat's techniques, TRL's loss, adapter
    ("SFT, full, loss on the answers", "", "sft", False),
    ("SFT, LoRA", "lora: {rank: 8, alpha: 16}", "sft", True),
    ("DPO, full, a frozen copy as reference", "preference: {}", "sigmoid", False),
    ("DPO, LoRA, the base as reference", "preference: {}, lora: {rank: 8, alpha: 16}", "sigmoid", True),
    ("IPO (mean a token), full", "preference: {loss: ipo, length_normalized: true}", "ipo", False),
    ("hinge, full", "preference: {loss: hinge}", "hinge", False),
)


def main() -> None:
    import transformers
    import trl

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", help="Cases whose words hold this.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trl_equal.md"))
    options = parser.parse_args()
    data = Path(os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data")
    model = data / "stories260K-hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = read_pairs(data, tokenizer, options.steps * PAIRS)
    lines = [
        "# The same losses as TRL's trainers",
        "",
        f"`python benchmarks/trl_equal.py --steps {options.steps}`: stories260K, fp32, {options.steps} steps of {PAIRS} pairs (SFT: of their "
        f"preferred answers) of dpo_en_demo, at most {LENGTH} tokens each, AdamW at {LR:g}, gradients clipped at 1; the same token ids, weights "
        f"and order. trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}. preheat: rows packed, head in chunks of 200.",
        "",
        "| what | first loss | last loss | TRL's last | largest difference of a step |",
        "|---|---|---|---|---|",
    ]
    for words, techniques, kind, adapted in CASES:
        if options.only not in words:
            continue
        mine, first = train_ours(model, rows, techniques, options.steps)
        with tempfile.TemporaryDirectory() as folder:
            other = train_theirs(model, rows, tokenizer, kind, options.steps, folder, first if adapted else None)
        assert len(mine) == len(other) == options.steps
        worst = max(abs(a - b) for a, b in zip(mine, other, strict=True))
        lines.append(f"| {words} | {mine[0]:.5f} | {mine[-1]:.5f} | {other[-1]:.5f} | {worst:.1e} |")
        print(lines[-1], flush=True)
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
