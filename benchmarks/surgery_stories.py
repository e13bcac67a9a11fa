"""What changing a trained model's architecture costs, and what training gives back: loss before, right after, and after uptraining.

    python benchmarks/surgery_stories.py [--data FOLDER] [--steps 200] [--out benchmarks/results/surgery_stories.md]

Key-value heads of stories260K pooled from 4 to 2 and 1; LayerNorm to RMSNorm on a small GPT-2 that is trained here first. Each is
trained on for the same steps on the same rows as the unchanged model. Held-out TinyStories; nats a token. The part of
the norms also times a wider GPT-2 with either norm, exported and loaded by transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from preheat.compress.export import huggingface
from preheat.data import Rows, evaluation_batches, prepare
from preheat.engine.builder import build
from preheat.engine.evaluate import evaluate
from preheat.errors import RunError
from preheat.hardware.probe import probe
from preheat.recipe import Recipe, parse
from preheat.training.loop import train

LENGTH, ROWS, BATCH = 128, 128, 8
TURNS = 40


def build_recipe(
    model: str, source: Path, techniques: str, *, steps: int, lr: float, tokenizer: Path, seed: int
) -> Recipe:
    return parse(
        f"name: surgery\nseed: {seed}\nmodel: {model}\ndata: {{source: {source}, validation: 0.1, tokenizer: {tokenizer}, preflight: {{encoding: warn}}}}\n"
        f"batch: {{size: {BATCH}, seq_len: {LENGTH}}}\noptimizer: {{lr: {lr}, weight_decay: 0.0}}\nstop: {{max_steps: {steps}}}\n"
        f"evaluate: {{rows: {ROWS}}}\ntechniques: {{efficient_attention: {{}}, chunked_loss: {{}}, {techniques}}}"
    )


def evaluate_held_out(recipe: Recipe, tokenizer: Path) -> float:
    """Loss of the recipe's model as it is built, before any step."""
    data = prepare(recipe.data, length=LENGTH, seed=recipe.seed, tokenizer=str(tokenizer))
    assert isinstance(data.validation, Rows)
    made = build(recipe, vocabulary=len(data.tokenizer), device=probe("cpu"))
    return evaluate(made, evaluation_batches(data.validation, micro=8, limit=ROWS))[0]


def time_exported(folders: Mapping[str, Path]) -> dict[str, tuple[float, float, float]]:
    """Returns the milliseconds (median, quartiles) of a forward pass of each exported model, in alternation."""
    models = {
        name: transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        for name, folder in folders.items()
    }
    tokens = torch.randint(0, 512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for turn in range(TURNS + 3):
            for name, model in models.items():
                begin = time.perf_counter()
                model(tokens)
                if turn >= 3:
                    times[name].append(1e3 * (time.perf_counter() - begin))
    quartiles = {name: statistics.quantiles(ms) for name, ms in times.items()}
    return {name: (middle, low, high) for name, (low, middle, high) in quartiles.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=400, help="steps of the GPT-2 before its norms are changed")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--part", choices=("all", "heads", "norms"), default="all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/surgery_stories.md"))
    options = parser.parse_args()
    stories = options.data / "stories260K-hf"
    lines = [
        "# Changing the architecture of a trained model",
        "",
        f"`python benchmarks/surgery_stories.py --steps {options.steps} --first {options.first} --lr {options.lr:g} --seeds {options.seeds}`: "
        f"held-out TinyStories, {ROWS} rows of {LENGTH} tokens, nats a token; trained on for {options.steps} steps of {BATCH} rows at "
        f"lr {options.lr:g}, "
        + (f"mean (least to most) of {options.seeds} seeds." if options.seeds > 1 else "one seed."),
        f"The GPT-2 (4 layers of width 64) was trained for {options.first} steps first. torch {torch.__version__}.",
        "",
        "| model | before | right after | trained on | exported, largest difference of logits |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "stories.jsonl"
        text = (options.data / "text/tinystories_train_excerpt.txt").read_text()
        source.write_text("\n".join(json.dumps({"text": part}) for part in re.split(r"\n(?=Once upon a time)", text)))

        def measure_row(what: str, model: Path, techniques: str, before: float | None = None) -> Path:
            """Loss right after the change, and after training on, over the seeds; returns the last run."""
            ends, run = [], folder / "none"
            for seed in range(options.seeds):
                recipe = build_recipe(
                    f"{{path: {model}}}",
                    source,
                    techniques,
                    steps=options.steps,
                    lr=options.lr,
                    tokenizer=stories,
                    seed=seed,
                )
                if seed == 0:
                    plain = build_recipe(f"{{path: {model}}}", source, "", steps=1, lr=1e-3, tokenizer=stories, seed=0)
                    starts = [
                        evaluate_held_out(plain, stories) if before is None else before,
                        evaluate_held_out(recipe, stories),
                    ]
                run = folder / re.sub(r"\W+", "-", f"{what} {seed}")
                ends.append(float(train(recipe, out=run)["validation_loss"]))
            try:
                exported = f"{huggingface.write(run, run / 'hf').max_logit_difference:.1g}"
            except RunError:
                exported = "refused"
            spread = f" ({min(ends):.4f} to {max(ends):.4f})" if len(ends) > 1 else ""
            lines.append(
                f"| {what} | {starts[0]:.4f} | {starts[1]:.4f} | {sum(ends) / len(ends):.4f}{spread} | {exported} |"
            )
            print(lines[-1], flush=True)
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
            return run

        if options.part != "norms":
            measure_row("stories260K, 4 key-value heads, unchanged", stories, "")
            two = measure_row("stories260K, 4 -> 2", stories, "grouped_queries: {num_kv_heads: 2}")
            measure_row("stories260K, 4 -> 1", stories, "grouped_queries: {num_kv_heads: 1}")
            measure_row("the model of the row 4 -> 2, 2 -> 1", two / "hf", "grouped_queries: {num_kv_heads: 1}")
        if options.part != "heads":
            sizes = "{family: gpt2, num_layers: 4, hidden_size: 64, num_heads: 4, vocab_size: 512, max_positions: 256}"
            first = build_recipe(sizes, source, "", steps=options.first, lr=3e-3, tokenizer=stories, seed=0)
            train(first, out=folder / "gpt2")
            huggingface.write(folder / "gpt2", folder / "gpt2" / "hf")
            measure_row("GPT-2, LayerNorm, unchanged", folder / "gpt2/hf", "")
            measure_row("GPT-2, LayerNorm -> RMSNorm", folder / "gpt2/hf", "rms_norm: {}")
            wide = sizes.replace("hidden_size: 64", "hidden_size: 512")
            exported = {}
            for name, techniques in (("LayerNorm", ""), ("RMSNorm", "rms_norm: {}")):
                recipe = build_recipe(wide, source, techniques, steps=1, lr=1e-3, tokenizer=stories, seed=0)
                train(recipe, out=folder / name)
                exported[name] = Path(huggingface.write(folder / name, folder / name / "hf").path)
            lines += [
                "",
                f"A GPT-2 of 4 layers of width 512 with either norm, exported and loaded by transformers: a forward pass of "
                f"{BATCH} rows of {LENGTH} tokens, {TURNS} in alternation, fp32, threads: {torch.get_num_threads()}.",
                "",
                "| norm | milliseconds (quartiles) |",
                "|---|---|",
                *(
                    f"| {name} | {middle:.1f} ({low:.1f} to {high:.1f}) |"
                    for name, (middle, low, high) in time_exported(exported).items()
                ),
            ]
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
