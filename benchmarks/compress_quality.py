"""What each method of compression costs: perplexity before and after, bits a weight, bytes; as a table in Markdown.

    python benchmarks/compress_quality.py MODEL --data TEXT [--train-steps 400] [--only int8,gptq] > quality.md

MODEL is a run or a model's folder (stories260K). Every variant begins from the same weights and is measured on the same rows, which were
not calibrated with: losses are compared row by row, with 95 % of paired bootstrap resamples. With --train-steps a copy of the model is
trained on the calibration text, for equal steps with quantization-aware training and without, and both are converted alike. Nothing is
timed: `preheat compress` does that, in turns.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from preheat import recipe as recipes
from preheat.compress.compressing import read_variant
from preheat.compress.folder import finish
from preheat.compress.measuring import quality
from preheat.compress.texts import Texts, find_texts
from preheat.data.loader import collate
from preheat.engine.build import build
from preheat.engine.step import gradients, update
from preheat.evaluation.results import Result, compared
from preheat.hardware.probe import probe
from preheat.ops.adapters import merge, names_of
from preheat.ops.quantized_training import unfake_
from preheat.training.opened import Opened, open_model

# Each with what it is held against in the lines below the table.
VARIANTS = (
    "int8",
    "int8_dynamic",
    "int8_static",
    "nf4",
    "int4",
    "awq",
    "gptq",
    "int4,symmetric=false",
    "awq,symmetric=false",
    "gptq,symmetric=false",
    # Uniform over the maps that a budget spends on, and the budgets.
    "int4,keep=[embedding, head]",
    "gptq,keep=[embedding, head]",
    "int4,symmetric=false,keep=[embedding, head]",
    "gptq,symmetric=false,keep=[embedding, head]",
    "bit_budget,bits=4.5",
    "bit_budget,bits=5,rounding=nearest",
    "bit_budget,bits=5",
    "bit_budget,bits=6",
)
AWARE = ("int4", "int4,inputs=int8")


def measured(opened: Opened, texts: Texts, rows: int, model: Any) -> tuple[Result, int]:
    """Of a model in the place of the opened one, in bf16 where it is quantized; and the bytes of its weights."""
    finish(model)
    opened.build.parts["trained"] = [model]
    unique = {id(p): p for p in model.parameters()}
    half = not any(p.dtype == torch.uint8 or p.dtype == torch.int8 for p in unique.values())
    return quality(opened, texts, rows), sum(2 * p.numel() if half else p.nbytes for p in unique.values())


def trained(source: str, techniques: str, calibration: Sequence[Tensor], rows: Any, steps: int, lr: float) -> Any:
    """The model after some steps on the calibration text, with techniques."""
    length = calibration[0].shape[1]
    recipe = recipes.parse(
        f"model: {{path: {source}}}\nbatch: {{size: 8, length: {length}}}\nstop: {{steps: {steps}}}\n"
        f"optimizer: {{lr: {lr}, weight_decay: 0}}\ntechniques: {techniques}"
    )
    made = build(recipe, vocabulary=None, device=probe("cpu"))
    for step in range(steps):
        numbers = [(8 * step + n) % len(rows) for n in range(8)]
        gradients(made, [collate([(n, rows.row(n)) for n in numbers])])
        update(made, lr * min(1.0, (step + 1) / 20) * (1 - step / steps))
    model: Any = made.trained[0]
    if names_of(model):
        merge(model)
    unfake_(model)
    return model.requires_grad_(False)


def line(name: str, before: Result, after: Result, size: int, what: str) -> str:
    loss = compared(before, after)["metrics"]["loss"]
    low, high = (math.expm1(loss[key]) for key in ("low", "high"))
    bits = what.partition(" bits a weight")[0].rpartition(" ")[2] if "bits a weight" in what else ""
    value = after.metrics["perplexity"].value
    return f"| {name} | {bits} | {size:,} | {value:.4f} | {math.expm1(loss['value']):+.2%} | {low:+.2%} to {high:+.2%} |"


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("model")
    parse.add_argument("--data", default=None)
    parse.add_argument("--rows", type=int, default=128)
    parse.add_argument("--measured", type=int, default=128)
    parse.add_argument("--length", type=int, default=None)
    parse.add_argument("--only", default="")
    parse.add_argument("--train-steps", type=int, default=0)
    parse.add_argument("--lr", type=float, default=3e-4)
    a = parse.parse_args()
    if a.train_steps and a.data is None:
        parse.error("--train-steps: needs --data, the text to train on")
    opened = open_model(a.model)
    texts = find_texts(opened, a.data, rows=a.rows, length=a.length)
    plain: Any = opened.build.trained[0]
    if names_of(plain):
        merge(plain)
    plain.float().requires_grad_(False)
    before, size = measured(opened, texts, a.measured, plain)
    print(
        f"{len(texts.calibration)} calibration rows of {texts.calibration[0].shape[1]} tokens, {before.tokens:,} held-out tokens in {before.rows} rows.\n"
    )
    print("| variant | bits a weight | bytes of weights | perplexity | rise | 95 % |\n|---|---|---|---|---|---|")
    print(f"| as it was | | {size:,} in bf16 | {before.metrics['perplexity'].value:.4f} | | |", flush=True)
    told = []
    for text in VARIANTS:
        if a.only and text.partition(",")[0] not in a.only.split(","):
            continue
        variant = read_variant(text)
        model = copy.deepcopy(plain)
        change = variant.method.apply(model, texts.calibration if variant.method.reads_rows else [])
        after, size = measured(opened, texts, a.measured, model)
        print(line(text, before, after, size, change.what), flush=True)
        if "(predicted)" in change.what:
            told.append(f"{text}: {change.what.partition('. By map')[0]}.")
    if a.train_steps:
        print(f"\nAfter {a.train_steps} steps of 8 rows on the calibration text, learning rate {a.lr:g}:\n")
        print("| variant | bits a weight | bytes of weights | perplexity | rise | 95 % |\n|---|---|---|---|---|---|")
        seen = _Others(texts.held_out.rows, set(texts.held_out.numbers))
        longer = trained(a.model, "{}", texts.calibration, seen, a.train_steps, a.lr)
        base, size = measured(opened, texts, a.measured, copy.deepcopy(longer))
        print(f"| trained, as it is | | {size:,} in bf16 | {base.metrics['perplexity'].value:.4f} | | |", flush=True)
        for text in ("int4", "awq", "gptq"):
            model = copy.deepcopy(longer)
            change = read_variant(text).method.apply(model, texts.calibration)
            after, size = measured(opened, texts, a.measured, model)
            print(line(f"trained, then {text}", base, after, size, change.what), flush=True)
        for text in AWARE:
            inputs = "int8" if "inputs" in text else "full"
            aware = trained(
                a.model, f"{{quantization_aware: {{inputs: {inputs}}}}}", texts.calibration, seen, a.train_steps, a.lr
            )
            change = read_variant(text).method.apply(aware, [])
            after, size = measured(opened, texts, a.measured, aware)
            print(line(f"trained with quantization_aware, then {text}", base, after, size, change.what), flush=True)
    print("\n" + "\n".join(told), file=sys.stdout)


class _Others:
    """The rows that are not held out."""

    def __init__(self, rows: Any, held: set[int]):
        self.rows, self.numbers = rows, [n for n in range(len(rows)) if n not in held]

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, index: int) -> Any:
        return self.rows.row(self.numbers[index])


if __name__ == "__main__":
    main()
