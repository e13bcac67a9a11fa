"""Memory and speed that a search estimates for parallel layouts, against dry runs of the same recipes.

    python benchmarks/estimates.py [--model llama-3.1-70b] [--gpu H100] [--devices 64] [--rows 2] [--out benchmarks/results/estimates.md]

A search orders its candidates by these estimates (`planning/search/cost_model.py`), and dry-runs few of them: one that is estimated too low is
dry-run for nothing, one that is estimated too high is never seen. Allocated bytes are compared, because estimates know nothing of the allocator.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from preheat import recipe as recipes
from preheat.cli.options.subject import find_subject
from preheat.core import STEP, Technique
from preheat.hardware.catalogue import resolve_accelerator
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import GIB, describe
from preheat.planning.plan_request import request_of
from preheat.planning.search.candidates import Space, find_candidate_problems
from preheat.planning.search.cost_model import observe_layer
from preheat.planning.search.search import _Search
from preheat.planning.search.technique_combinations import Combination

CHECKPOINTING = {
    "none": "",
    "selective": "activation_checkpointing: {mode: selective}",
    "full": "activation_checkpointing: {mode: full}",
}
"""Activation checkpointing by its mode."""
LAYOUTS = (
    ("fsdp: {}", 1),
    ("fsdp: {reshard_after_forward: false}", 1),
    ("tensor_parallel: {degree: 2}, fsdp: {}", 1),
    ("tensor_parallel: {degree: 8}, fsdp: {}", 1),
    ("tensor_parallel: {degree: 8, sequence_parallel: true}, fsdp: {}", 1),
    ("context_parallel: {degree: 2}, fsdp: {}", 1),
    ("pipeline_parallel: {degree: 4}, fsdp: {reduce: last}", 8),
    ("pipeline_parallel: {degree: 4, schedule: interleaved}, fsdp: {reduce: last}", 8),
    (
        "pipeline_parallel: {degree: 4, schedule: interleaved}, tensor_parallel: {degree: 4, sequence_parallel: true}, "
        "fsdp: {reduce: last}",
        8,
    ),
)
"""Parallel techniques, and micro-batches per step."""


def parse_techniques(text: str) -> tuple[Technique, ...]:
    """Parses techniques as a recipe writes them."""
    values = f"model: {{preset: llama-3.2-1b}}\nstop: {{max_steps: 1}}\ntechniques: {{{text}}}"
    return tuple(recipes.parse(values).techniques.values())


def iterate_rows(space: Space) -> Iterator[str]:
    """Yields a row of the table for each compatible pair of checkpointing and layout."""
    search = _Search(space, "fastest", 0, lambda message: None)
    for mode, checkpointing in CHECKPOINTING.items():
        alone = parse_techniques(
            f"efficient_attention: {{}}, mixed_precision: {{mode: bf16_weights}}, fused_operators: {{}}, {checkpointing}"
        )
        kind = Combination(alone, observe_layer(space.to_single_device(alone)), frozenset())
        for layout, micros in LAYOUTS:
            added = parse_techniques(layout)
            sizes = space.sizes(added)
            assert sizes is not None, "these layouts divide the devices"
            candidate = next(
                c
                for c in search._list_layout_candidates(added, sizes, [kind])
                if (c.cuts.micro_batch_count() if c.cuts else 1) == micros
            )
            request = space.add_techniques(candidate.added)
            if find_candidate_problems(space, request):
                continue
            observation = observe_cached(request, how="few")
            allocated = max(size for phase, size in observation.peak.items() if phase in STEP)
            speed = candidate.guess.tokens_per_second / describe(request, observation).tokens_per_second
            guess = candidate.guess.bytes
            what = f"`{layout}`" + (f", {micros} micro-batches" if micros > 1 else "")
            print(f"{mode}: {what}: {guess / allocated:.2f}", flush=True)
            yield (
                f"| {mode} | {what} | {guess / GIB:.1f} | {allocated / GIB:.1f} | {guess / allocated:.2f} "
                f"| {speed:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="of a step and device")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "estimates.md")
    options = parser.parse_args()
    batch = [f"batch.size={options.rows * options.devices}"]
    subject = find_subject(options.model, batch, method="full", length=None, batch_tokens=None, devices=options.devices)
    request = request_of(
        subject.recipe, resolve_accelerator(options.gpu), world=options.devices, per_host=8, count_rows=False
    )
    space = Space(replace(request, recipe=replace(request.recipe, techniques={})), "rounding")
    table = "\n".join(iterate_rows(space))
    title = f"## {options.model} on {options.devices} {options.gpu}, {options.rows} rows a step and device"
    head = "| activation checkpointing | layout | estimated, GiB | dry run, GiB | memory, ratio | speed, ratio |\n|---|---|---|---|---|---|"
    options.out.write_text(
        f"# Estimates of a search against dry runs\n\n{title}\n\n{head}\n{table}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
