"""What structured pruning costs and what recovery gives back: perplexity whole, cut and recovered; tokens/s of whole and cut.

    python benchmarks/pruning.py                                       # stories260K, recovered on 10 % of what --trained says
    python benchmarks/pruning.py --run runs/mine                       # a run's model, on the run's own data, 10 % of its tokens
    python benchmarks/pruning.py --run runs/mine --distil --speed      # recovered by distillation from the whole model; tokens/s, on a quiet machine

Every cut model is saved, read again by plain transformers and compared at the logits, recovered by an ordinary recipe (`model.path`), and
measured on held-out text that neither calibration nor recovery reads. Beside them: the whole model trained on for the same tokens, and the
cut model's shape trained from new weights for the same tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from preheat import recipe as recipes
from preheat.compress.export import huggingface
from preheat.compress.registry import Method, methods
from preheat.data import Rows, evaluation_batches, prepare
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.evaluate import evaluate
from preheat.hardware.probe import probe
from preheat.models.conversions.slicing import build_parameter_counter, sizes_of
from preheat.models.hf import compute_reference_logits
from preheat.recipe import Model, Recipe, Stop
from preheat.training.loop import train

CALIBRATION = 32  # rows
LENGTH, BATCH = 256, 8  # of stories260K's recovery
PROMPT, NEW, ROUNDS = 128, 64, 7  # of the speed


def build_stories_recipe(data: Path, folder: Path) -> Recipe:
    """stories260K with the text that it was trained on."""
    source = folder / "stories.jsonl"
    text = (data / "text/tinystories_train_excerpt.txt").read_text(encoding="utf-8")
    source.write_text("\n".join(json.dumps({"text": part}) for part in re.split(r"\n(?=Once upon a time)", text)))
    return recipes.parse(
        f"name: stories260K\nmodel: {{path: {data / 'stories260K-hf'}}}\n"
        f"data: {{source: {source}, validation: 0.1, preflight: {{encoding: warn}}}}\nbatch: {{size: {BATCH}, seq_len: {LENGTH}}}\n"
        "optimizer: {lr: 1.0e-3, weight_decay: 0.0}\nstop: {max_steps: 1}\n"
        "techniques: {efficient_attention: {}, chunked_loss: {}}"
    )


def load_run_recipe(run: Path, folder: Path) -> tuple[Recipe, int]:
    """A run's recipe over its model as a Hugging Face folder, and the tokens that it was trained on."""
    recipe = recipes.load(run / "recipe.yaml")
    found, _ = checkpoint.find(run / "checkpoints")
    assert found is not None, f"{run} has no whole checkpoint"
    steps = checkpoint.read_progress(found).step
    huggingface.write(run, folder / "whole")
    data = replace(recipe.data, tokenizer=str(run / "tokenizer"))
    tokens = steps * recipe.batch.size * recipe.batch.seq_len
    if recipe.optimizer.lr != "auto":  # what a new model learns fast by unlearns a trained one
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=recipe.optimizer.lr / 4))
    return replace(recipe, data=data, model=Model(path=str(folder / "whole")), parallel=recipes.Parallel()), tokens


def choose_shape(name: str, model: Any, share: float, seed: int) -> Method:
    """The method's settings that leave `share` of the parameters."""
    found = methods()
    if name == "lottery":
        return found[name](parameters=share, seed=seed)  # type: ignore[call-arg]
    now, whole = sizes_of(model.config), model.num_parameters()
    count = build_parameter_counter(model)
    if name == "depth":
        layers = max(n for n in range(1, now.layers + 1) if n == 1 or count(replace(now, layers=n)) <= share * whole)
        return found[name](layers=layers / now.layers)  # type: ignore[call-arg]
    assert name == "width"
    channels = [n for n in range(8, now.channels, 8) if count(replace(now, channels=n)) <= share * whole]
    return found[name](channels=max(channels) / now.channels)  # type: ignore[call-arg]


def evaluate_held_out(recipe: Recipe, vocabulary: int, rows: Rows) -> float:
    """Loss of the recipe's model as it is built, before any step, over `rows`."""
    made = build(recipe, vocabulary=vocabulary, device=probe())
    return float(evaluate(made, evaluation_batches(rows, micro=8, limit=len(rows)))[0])


def measure_speeds(folders: list[Path], vocabulary: int) -> list[tuple[float, float, float, float]]:
    """Prefill and decode tokens/s of each by plain transformers, in turns: medians over the rounds, and the ratios to the first within a round."""
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in folders]
    tokens = torch.randint(3, vocabulary, (4, PROMPT), generator=torch.Generator().manual_seed(0))
    seconds: list[list[tuple[float, float]]] = [[] for _ in models]
    with torch.no_grad():
        for number in range(ROUNDS + 1):
            for model, own in zip(models, seconds, strict=True):
                begun = time.perf_counter()
                model(input_ids=tokens)
                filled = time.perf_counter()
                model.generate(tokens[:1, :8], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
                if number:
                    own.append((filled - begun, time.perf_counter() - filled))
    first = seconds[0]
    return [
        (
            tokens.numel() / median(a for a, _ in own),
            NEW / median(b for _, b in own),
            median(f[0] / o[0] for f, o in zip(first, own, strict=True)),
            median(f[1] / o[1] for f, o in zip(first, own, strict=True)),
        )
        for own in seconds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--run", type=Path, help="a run whose model is pruned; stories260K when not given")
    parser.add_argument(
        "--trained", type=int, default=3_000_000, help="tokens that stories260K is taken to have been trained on"
    )
    parser.add_argument("--share", type=float, default=0.7, help="of the parameters that stays")
    parser.add_argument("--recover", type=float, default=0.1, help="share of the trained tokens that recovery reads")
    parser.add_argument(
        "--methods", nargs="+", default=["lottery", "width", "depth"], choices=["lottery", "width", "depth"]
    )
    parser.add_argument("--lr", type=float, help="of recovery; a quarter of the run's when not given")
    parser.add_argument(
        "--distil", action="store_true", help="recover by distillation from the whole model instead of by labels"
    )
    parser.add_argument(
        "--controls",
        action="store_true",
        help="train the whole model, and the first cut shape from new weights, for the same tokens",
    )
    parser.add_argument("--speed", action="store_true", help="measure tokens/s too; leave the machine alone meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pruning.md"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe, trained = (
            load_run_recipe(options.run, folder)
            if options.run
            else (build_stories_recipe(options.data, folder), options.trained)
        )
        whole = Path(str(recipe.model.path))
        tokens = int(options.recover * trained)
        recipe = replace(
            recipe,
            seed=options.seed,
            stop=Stop(tokens=tokens),
            evaluate=replace(recipe.evaluate, every=0, baselines=False),
            optimizer=replace(recipe.optimizer, lr=options.lr) if options.lr else recipe.optimizer,
        )
        prepared = prepare(
            recipe.data, length=recipe.batch.seq_len, seed=recipe.seed, tokenizer=str(recipe.data.tokenizer or whole)
        )
        rows, vocabulary = prepared.validation, len(prepared.tokenizer)
        assert isinstance(rows, Rows)
        assert isinstance(prepared.train, Rows)
        calibration = [torch.as_tensor(prepared.train.row(n).tokens)[None].long() for n in range(CALIBRATION)]
        before = evaluate_held_out(recipe, vocabulary, rows)
        lines = [
            f"# Structured pruning to {options.share:.0%} of the parameters, and recovery",
            "",
            f"`python benchmarks/pruning.py {'--run RUN ' if options.run else ''}--share {options.share:g} --recover {options.recover:g} "
            f"--seed {options.seed}{' --distil' if options.distil else ''}`: {recipe.name}, perplexity on {len(rows)} held-out rows of "
            f"{recipe.batch.seq_len} tokens; recovery reads {tokens:,} tokens ({options.recover:.0%} of {trained:,}) at lr {recipe.optimizer.lr}, by "
            f"{'distillation from the whole model' if options.distil else 'labels'}. Importance over {CALIBRATION} rows. torch {torch.__version__}.",
            "",
            "| model | parameters | perplexity | right after | recovered | against whole | plain transformers, difference of logits |",
            "|---|---|---|---|---|---|---|",
        ]

        def write(line: str) -> None:
            print(line, flush=True)
            lines.append(line)
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

        def recover_by_distillation(model: Model, what: str) -> Path:
            techniques = dict(recipe.techniques)
            if options.distil and model.weights != "random" and str(model.path) != str(whole):
                from preheat.core import registry

                techniques["distillation"] = registry()["distillation"](teacher=str(whole))  # type: ignore[call-arg]
            run = folder / f"run-{what}"
            train(replace(recipe, model=model, techniques=techniques), out=run)
            huggingface.write(run, run / "hf")
            return run / "hf"

        folders = [whole]
        count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(whole).parameters())
        write(f"| whole | {count:,} | {math.exp(before):.3f} | | | | |")
        for name in options.methods:
            model: Any = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
            change = choose_shape(name, model, options.share, options.seed).apply(model, calibration)
            cut = folder / name
            model.save_pretrained(cut)
            prepared.tokenizer.save_pretrained(cut)
            again: Any = AutoModelForCausalLM.from_pretrained(cut, dtype=torch.float32)
            off = float(
                (compute_reference_logits(again, calibration[0]) - compute_reference_logits(model, calibration[0]))
                .abs()
                .max()
            )
            after = evaluate_held_out(replace(recipe, model=Model(path=str(cut))), vocabulary, rows)
            folders.append(recover_by_distillation(Model(path=str(cut)), name))
            end = evaluate_held_out(replace(recipe, model=Model(path=str(folders[-1]))), vocabulary, rows)
            write(
                f"| {name}: {change.what} | {model.num_parameters():,} | | {math.exp(after):.3f} | {math.exp(end):.3f} | "
                f"{math.exp(end - before) - 1:+.1%} | {off:.1g} |"
            )
        if options.controls:
            for what, path, weights in (
                ("whole, trained on", whole, "pretrained"),
                ("the first shape from new weights", folders[1], "random"),
            ):
                recovered = recover_by_distillation(Model(path=str(path), weights=weights), re.sub(r"\W+", "-", what))  # type: ignore[arg-type]
                end = evaluate_held_out(replace(recipe, model=Model(path=str(recovered))), vocabulary, rows)
                write(f"| {what} | | | | {math.exp(end):.3f} | {math.exp(end - before) - 1:+.1%} | |")
        if options.speed:
            lines += [
                "",
                "| model | prefill, tokens/s | decode, tokens/s | prefill, ratio | decode, ratio |",
                "|---|---|---|---|---|",
            ]
            for name, (fill, decode, a, b) in zip(
                ["whole", *options.methods], measure_speeds(folders, vocabulary), strict=True
            ):
                write(f"| {name} | {fill:,.0f} | {decode:,.0f} | {a:.2f} | {b:.2f} |")


if __name__ == "__main__":
    main()
