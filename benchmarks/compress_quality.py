"""What each method of compression costs: perplexity before and after, bits a weight, bytes; as a table in Markdown.

    python benchmarks/compress_quality.py MODEL --data TEXT [--train-steps 400] [--only int8,gptq] > quality.md
    python benchmarks/compress_quality.py RUN --only "int8;int4;awq;gptq" --aware int4 --train-steps 100 --fold 2/2 > quality.md

MODEL is a run or a model's folder (stories260K). Every variant begins from the same weights and is measured on the same rows, which were
not calibrated with: losses are compared row by row, with 95 % of paired bootstrap resamples. With --train-steps a copy of the model is
trained on the text it was calibrated from (a run's own training rows where no text is named), for equal steps with quantization-aware
training and without, and both are converted alike. What is chosen by results (the rate, the steps) is chosen on one fold of the held-out
rows, and told of another. Nothing is timed: `preheat compress` does that, in turns.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from preheat import recipe as recipes
from preheat.compress.before_after import evaluate_quality
from preheat.compress.calibration_text import RowSubset, Texts, find_texts
from preheat.compress.compress import read_variant
from preheat.compress.save_load import finish, write_model
from preheat.data import prepare
from preheat.data.loader import collate
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.evaluation.results import Result, compare_results
from preheat.hardware.probe import probe
from preheat.inference.load import LoadedModel, load_model
from preheat.ops.adapters.peft_layers import merge, names_of
from preheat.ops.quantization.fake_quant import unfake_

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
CONVERTED = "int4;awq;gptq"
AWARE = "int4;int4,inputs=int8"
_PLAIN = "efficient_attention: {}, chunked_loss: {rows: 512}"


class Bench:
    """A model, and what its variants are trained, calibrated and measured with.

    Attributes:
        before: the model as it was, measured.
        results: by the variant's name, of all that were measured.
    """

    def __init__(self, a: argparse.Namespace):
        self.opened = load_model(a.model)
        self.texts = find_texts(self.opened, a.data, rows=a.rows, length=a.length)
        self.rows, self.limit, self.wide = (
            choose_training_rows(self.opened, self.texts),
            a.measured,
            a.precision == "fp32",
        )
        if a.fold:
            fold, count = (int(part) for part in a.fold.split("/"))
            held = self.texts.held_out
            self.texts = replace(self.texts, held_out=RowSubset(held, range(fold - 1, len(held), count)))
        self.plain: Any = self.opened.build.trained[0]
        if names_of(self.plain):
            merge(self.plain)
        unfake_(self.plain)
        self.plain.float().requires_grad_(False)
        self.results: dict[str, Result] = {}
        self.before, self.size = self.measured(self.plain)

    def measured(self, model: Any) -> tuple[Result, int]:
        """Of a model in the place of the opened one; what is quantized has the rest in bf16. And the bytes of its weights."""
        finish(model)
        unique = {id(p): p for p in model.parameters()}
        half = not any(p.dtype == torch.uint8 or p.dtype == torch.int8 for p in unique.values())
        size = sum(2 * p.numel() if half else p.nbytes for p in unique.values())
        if self.wide:  # the same values
            model.float()
        self.opened.build.parts["trained"] = [model]
        return evaluate_quality(self.opened, self.texts, self.limit), size

    def variant(self, text: str, model: Any, against: Result, name: str) -> str:
        """Converts a model in place, measures it, and prints its line; returns what was done, in words."""
        method = read_variant(text).method
        what = method.apply(model, self.texts.calibration if method.reads_rows else []).what
        self.results[name], size = self.measured(model)
        print(format_line(name, against, self.results[name], size, what), flush=True)
        return what

    def trained(self, techniques: str, steps: int, lr: float, batch: int, taught: bool = False) -> Any:
        """A copy of the model after some steps, with techniques; `taught`: by the model as it was alone, without labels."""
        length = self.texts.calibration[0].shape[1]
        with tempfile.TemporaryDirectory() as folder:
            write_model(copy.deepcopy(self.plain), self.opened, Path(folder), method="none", dtype=torch.float32)
            if taught:
                techniques += f", distillation: {{teacher: {folder}, mixture: 1.0}}"
            recipe = recipes.parse(
                f"model: {{path: {folder}}}\nbatch: {{size: {batch}, seq_len: {length}}}\nstop: {{max_steps: {steps}}}\n"
                f"optimizer: {{lr: {lr}, weight_decay: 0}}\ntechniques: {{{_PLAIN}{techniques}}}"
            )
            made = build(recipe, vocabulary=None, device=probe("cpu"))
        for step in range(steps):
            numbers = [(batch * step + n) % len(self.rows) for n in range(batch)]
            accumulate_gradients(made, [collate([(n, self.rows.row(n)) for n in numbers])])
            update(made, lr * min(1.0, (step + 1) / 20) * (1 - step / steps))
        model: Any = made.trained[0]
        unfake_(model)
        return model.requires_grad_(False)


def choose_training_rows(opened: LoadedModel, texts: Texts) -> RowSubset:
    """A run's training rows, in a drawn order; of a text that is named, the rows that are not held out, in its order."""
    held = texts.held_out
    if isinstance(held, RowSubset):
        taken = set(held.numbers)
        return RowSubset(held.rows, [n for n in range(len(held.rows)) if n not in taken])
    recipe = opened.recipe
    data = replace(recipe.data, tokenizer=opened.tokenizer_folder)
    length = texts.calibration[0].shape[1]
    train: Any = prepare(data, length=length, seed=recipe.seed, add_tokens=recipe.model.add_tokens).train
    return RowSubset(train, torch.randperm(len(train), generator=torch.Generator().manual_seed(recipe.seed)).tolist())


def format_rise(before: Result, after: Result) -> str:
    loss = compare_results(before, after).metrics["loss"]
    assert loss.low is not None
    assert loss.high is not None
    value, low, high = map(math.expm1, (loss.value, loss.low, loss.high))
    return f"{value:+.2%} | {low:+.2%} to {high:+.2%}"


def format_line(name: str, before: Result, after: Result, size: int, what: str) -> str:
    bits = what.partition(" bits a weight")[0].rpartition(" ")[2] if "bits a weight" in what else ""
    return f"| {name} | {bits} | {size:,} | {after.metrics['perplexity'].value:.4f} | {format_rise(before, after)} |"


def is_asked(text: str, only: str) -> bool:
    """Whether a variant is among those of --only: names, between commas, or whole variants, between semicolons."""
    return not only or text in only.split(";") or (";" not in only and text.partition(",")[0] in only.split(","))


def teach(bench: Bench, a: argparse.Namespace) -> None:
    """The table of quantization-aware training against the model's own probabilities, without labels: what is won is of the codes alone."""
    print(
        f"\nAfter {a.train_steps} steps of {a.train_rows} rows towards the model's own probabilities, learning rate {a.lr:g}:\n"
    )
    print("| variant | bits a weight | bytes of weights | perplexity | rise | 95 % |\n|---|---|---|---|---|---|")
    pairs = []
    for text in a.aware.split(";"):
        settings = text.partition(",")[1:]
        others = [] if "inputs" in text else [method + "".join(settings) for method in a.converted.split(";")]
        for name in others:
            if name not in bench.results:
                bench.variant(name, copy.deepcopy(bench.plain), bench.before, name)
        knobs = json.dumps(dataclasses.asdict(read_variant(text).method))
        own = f"trained with quantization_aware and distillation, then {text}"
        made = bench.trained(f", quantization_aware: {knobs}", a.train_steps, a.lr, a.train_rows, taught=True)
        bench.variant(text, made, bench.before, own)
        pairs += [(own, name) for name in others]
    compare_methods(bench, pairs)


def train(bench: Bench, a: argparse.Namespace) -> None:
    """The tables of equal steps with quantization-aware training and without, one for each grid."""
    where = "the run's training rows" if a.data is None else "the calibration text"
    print(f"\nAfter {a.train_steps} steps of {a.train_rows} rows of {where}, learning rate {a.lr:g}:\n")
    print("| variant | bits a weight | bytes of weights | perplexity | rise | 95 % |\n|---|---|---|---|---|---|")
    how = (a.train_steps, a.lr, a.train_rows)
    longer = bench.trained("", *how)
    base, size = bench.measured(copy.deepcopy(longer))
    print(
        f"| trained, as it is | | {size:,} in bf16 | {base.metrics['perplexity'].value:.4f} | {format_rise(bench.before, base)}, from before |",
        flush=True,
    )
    pairs = []
    for text in a.aware.split(";"):
        settings = text.partition(",")[1:]
        others = [] if "inputs" in text else a.converted.split(";")
        names = [f"trained, then {m}{''.join(settings)}" for m in others]
        for method, name in zip(others, names, strict=True):
            bench.variant(method + "".join(settings), copy.deepcopy(longer), base, name)
        knobs = json.dumps(dataclasses.asdict(read_variant(text).method))
        own = f"trained with quantization_aware, then {text}"
        bench.variant(text, bench.trained(f", quantization_aware: {knobs}", *how), base, own)
        pairs += [(own, name) for name in names]
    compare_methods(bench, pairs)


def compare_methods(bench: Bench, pairs: Sequence[tuple[str, str]]) -> None:
    print("\n| beside each other, on the same rows | | 95 % |\n|---|---|---|")
    for one, other in pairs:
        print(f"| {one}, from {other} | {format_rise(bench.results[other], bench.results[one])} |")


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("model")
    parse.add_argument("--data", default=None)
    parse.add_argument("--rows", type=int, default=128)
    parse.add_argument("--measured", type=int, default=128)
    parse.add_argument("--fold", default="", help="K/N: of the held-out rows every Nth, from the Kth")
    parse.add_argument("--length", type=int, default=None)
    parse.add_argument("--only", default="", help="names between commas, whole variants between semicolons, or none")
    parse.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16", help="that what is quantized computes in"
    )
    parse.add_argument("--train-steps", type=int, default=0)
    parse.add_argument("--train-rows", type=int, default=8, help="rows a step")
    parse.add_argument(
        "--converted", default=CONVERTED, help="methods for what was trained without, between semicolons"
    )
    parse.add_argument("--aware", default=AWARE, help="what is trained for and converted to, between semicolons")
    parse.add_argument("--taught", action="store_true", help="train towards the model's own probabilities, not labels")
    parse.add_argument("--lr", type=float, default=3e-4)
    a = parse.parse_args()
    bench = Bench(a)
    before, calibration = bench.before, bench.texts.calibration
    print(
        f"{len(calibration)} calibration rows of {calibration[0].shape[1]} tokens, {before.tokens:,} held-out tokens in {before.rows} rows.\n"
    )
    print("| variant | bits a weight | bytes of weights | perplexity | rise | 95 % |\n|---|---|---|---|---|---|")
    print(f"| as it was | | {bench.size:,} in bf16 | {before.metrics['perplexity'].value:.4f} | | |", flush=True)
    told = []
    for text in VARIANTS:
        if is_asked(text, a.only):
            what = bench.variant(text, copy.deepcopy(bench.plain), before, text)
            if "(predicted)" in what:
                told.append(f"{text}: {what.partition('. By map')[0]}.")
    if a.train_steps:
        (teach if a.taught else train)(bench, a)
    print("\n" + "\n".join(told))


if __name__ == "__main__":
    main()
