"""Compares the verdicts of plans with published outcomes: runs that went through, and runs that ran out of memory.

    python benchmarks/verdicts_published.py --runs IN.csv --gpus GPUS.csv --out OUT.csv [--jobs 2] [--only PREFIX ...]

A row becomes a recipe as in published.py. Nothing is added to it to save memory, and nothing is clamped to the device, so
that the verdict does not know the outcome. Rows of which neither memory nor speed was measured have no outcome and are left
out, unless their notes begin with "OOM". "OOM at the next length for FA2 (N)" is a row of its own with that length.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import re
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from published import HELD_BY_OTHERS, MORE, estimate_our_memory, find_roofline, plan_row
from published_rows import build_recipe, fill_defaults, parse_integer
from trainers import Row

if TYPE_CHECKING:  # the import of preheat takes seconds
    from preheat.core import Recipe
    from preheat.core.plan import Plan
    from preheat.planning.speed.roofline import Roofline

COLUMNS = (
    "id",
    "outcome",
    "verdict",
    "peak_gib",
    "tensors_gib",
    "available_gib",
    "open",
    "fits_with",
    "seconds",
    "reason",
)
RAN, FAILED = "ran", "out of memory"
FITS, TOO_LARGE = "fits", "does not fit"
# Columns that decide memory. What a row leaves open is its trainer's default, or a guess.
DECISIVE = ("micro_batch", "seq_len", "precision", "activation_checkpointing", "optimizer", "n_gpus")
_NEXT_LENGTH = re.compile(r"OOM at the next length for FA2 \((\d+)\)")


def list_outcomes(rows: Iterable[Row]) -> Iterator[tuple[Row, str]]:
    """Yields the rows with a known outcome, each with the outcome."""
    failed_next = set()
    for row in rows:
        if row["notes"].startswith("OOM"):
            yield row, FAILED
        elif row["peak_mem_gib"] or row["tokens_per_s_per_gpu"]:
            yield row, RAN
        following = _NEXT_LENGTH.search(row["notes"])
        if following and following[1] not in failed_next:
            failed_next.add(following[1])
            yield {**row, "id": f"{row['id']} at {following[1]}", "seq_len": following[1]}, FAILED


def judge(row: Row, recipe: Recipe, roofline: Roofline) -> tuple[Plan, float, bool]:
    """Plans a row on its device.

    Returns:
        The plan, the GiB that the row's trainer holds beyond ours, and the verdict: True if the run fits.
    """
    plan, used = plan_row(row, recipe, roofline)
    beyond = sum(hold(row, plan, used) for hold in HELD_BY_OTHERS) - estimate_our_memory(row, plan, used)
    fits = plan.peak_gib + beyond <= plan.available_gib
    if fits != plan.fits:
        # The allocator frees cached segments only when the device is full, so the plan must know how much room is left.
        memory = roofline.as_device.memory - round(beyond * 2**30)
        fits = (
            memory > 0
            and plan_row(row, used, replace(roofline, device=replace(roofline.device, memory=memory)))[0].fits
        )
    return plan, beyond, fits


def find_saving(row: Row, recipe: Recipe, roofline: Roofline) -> str:
    """Returns the memory savings, among those that the row leaves open, with which its plan fits; empty if none does."""
    from preheat.recipe import override

    names: list[str] = []
    for saving in MORE:
        if saving.keys() & recipe.techniques.keys() - {"gradient_accumulation"}:
            continue
        if "activation_checkpointing" in saving and row["activation_checkpointing"]:
            continue
        if "activation_checkpointing" not in saving and row["optimizer"]:
            continue
        others = ["optimizer.max_grad_norm=0"] if "optimizer_in_backward" in saving else []
        if "activation_checkpointing" in saving and "tensor_parallel" in recipe.techniques:
            others.append("techniques.tensor_parallel.regather=false")
        recipe = override(recipe, *others, *(f"techniques.{name}={value}" for name, value in saving.items() if value))
        techniques = {name: t for name, t in recipe.techniques.items() if saving.get(name, "") is not None}
        recipe = replace(recipe, techniques=techniques)
        names += [name for name, value in saving.items() if value]
        if judge(row, recipe, roofline)[2]:
            return " + ".join(names)
    return ""


def judge_row(job: tuple[Row, str, Mapping[str, Row]]) -> dict[str, str | float]:
    """Returns a line of the output; `reason` says why there is no verdict."""
    from preheat.errors import PreheatError

    row, outcome, gpus = job
    start = time.monotonic()
    line: dict[str, str | float] = {**dict.fromkeys(COLUMNS, ""), "id": row["id"], "outcome": outcome}
    line["open"] = " ".join(key for key in DECISIVE if not row[key])
    try:
        roofline = replace(find_roofline(row["gpu"], gpus)[0], alone=parse_integer(row, "n_gpus") == 1)
        row = fill_defaults(row)
        recipe = build_recipe(row)
        plan, beyond, fits = judge(row, recipe, roofline)
        line |= {
            "verdict": FITS if fits else TOO_LARGE,
            "peak_gib": round(plan.peak_gib + beyond, 2),
            "tensors_gib": round(plan.allocated_gib + beyond, 2),
            "available_gib": round(plan.available_gib, 2),
        }
        if not fits and outcome == RAN:
            line["fits_with"] = find_saving(row, recipe, roofline)
    except (PreheatError, ValueError) as error:
        line["reason"] = str(error).replace("\n", "; ")
    except Exception as error:  # noqa: BLE001 - ours, or a library's, to be mended; a row must not take the others with it
        traceback.print_exc()
        line["reason"] = f"failed: {type(error).__name__}: {error}".replace("\n", "; ")
    line["seconds"] = round(time.monotonic() - start, 1)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--gpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="how ids of the rows to plan begin")
    options = parser.parse_args()
    with options.runs.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with options.gpus.open(encoding="utf-8") as file:
        gpus = {row["gpu"]: row for row in csv.DictReader(file)}
    lines: list[dict[str, str | float]] = []
    if options.out.exists():
        with options.out.open(encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    done = {line["id"] for line in lines}
    jobs = [(row, outcome, gpus) for row, outcome in list_outcomes(rows)]
    jobs = [job for job in jobs if job[0]["id"] not in done and job[0]["id"].startswith(tuple(options.only))]
    # Failed runs first: they are few, and the ones that matter most.
    jobs.sort(key=lambda job: job[1] == RAN)
    with (
        multiprocessing.get_context("spawn").Pool(options.jobs) as pool,
        options.out.open("a", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        if not lines:
            writer.writeheader()
        for line in pool.imap_unordered(judge_row, jobs):
            writer.writerow(line)
            file.flush()


if __name__ == "__main__":
    main()
