"""Resuming a run: checks that recipe, data and model are unchanged, and loads the newest intact checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.core import Build, Searchable
from preheat.core.run_records import BestScore, Damaged
from preheat.engine import checkpoint
from preheat.engine.builder import to_single_device
from preheat.errors import RunError
from preheat.evaluation.best import criterion_of, judge
from preheat.files import to_plain_data
from preheat.hardware.deterministic import describe_exactness, is_exact
from preheat.recipe import Recipe
from preheat.recipe.differences import flatten_leaves
from preheat.recipe.paths import anchor_paths, shorten_paths
from preheat.run.layout import MEMORY_KEYS
from preheat.run.reader import Reader
from preheat.run.writer import Writer
from preheat.sanitize import quote_value
from preheat.training.observer import Watch

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.data.preparation import PreparedData

__all__ = ["Looked", "compare", "early_stopping", "compute_fingerprints", "resume_build", "read_finished_summary"]

Looked = tuple[Path | None, list[tuple[Path, str]]]
"""The newest intact checkpoint, and the damaged ones with the problem of each."""

# Keys that may differ between a run and its resumption; all others affect the losses.
_FREE = ("name", "stop", "evaluate", "checkpoint", "sample", "tracking", "hardware", "data.workers", "data.prefetch")


_NAMED = 6  # changed keys listed in an error message: an unrelated recipe differs in dozens


def compute_fingerprints(build: Build, data: PreparedData) -> dict[str, str]:
    """Returns digests of the data, the model configuration and the initial weights."""
    # Digests of contents rather than names, because files may move between two sessions.
    settings = build.trained[0].config.to_dict()  # type: ignore[operator,union-attr]
    settings.pop("_name_or_path", None)  # the path it was read from: the same folder has several spellings
    config = json.dumps(settings, sort_keys=True, default=str)
    return {
        "data": data.fingerprint,
        "model": hashlib.sha256(config.encode()).hexdigest()[:16],
        "weights": build.weights.fingerprint(),
    } | {role: source.fingerprint() for role, source in build.sources.items()}


def compare(recipe: Recipe, before: str) -> bool:
    """Rejects a recipe that would change the losses of the resumed run, and names the changed keys.

    Returns:
        True if memory-saving techniques changed, which keep the losses up to rounding.
    """
    # Files and folders may have moved: names are compared here, contents by the checkpoint's fingerprints.
    was_recipe = shorten_paths(anchor_paths(recipes.parse(before, where="recipe.yaml of the run")))
    recipe = shorten_paths(anchor_paths(recipe))
    # Compared apart: techniques that save memory may change, since they keep the losses up to rounding.
    milder, milder_before = (_select_techniques(r, memory_saving=True) for r in (recipe, was_recipe))
    # The number of devices and the parallel layout do not affect the losses.
    old, new = (
        recipes.to_values(_select_techniques(to_single_device(r), memory_saving=False)) for r in (was_recipe, recipe)
    )
    changed = [
        key
        for key in flatten_leaves(old).keys() | flatten_leaves(new).keys()
        if flatten_leaves(old).get(key) != flatten_leaves(new).get(key)
    ]
    # A free section frees all its keys: `data.workers` alone, but everything below `evaluate`.
    changed = sorted(key for key in changed if not any(key == free or key.startswith(free + ".") for free in _FREE))
    if changed:
        was, now = flatten_leaves(old), flatten_leaves(new)
        changes = ", ".join(
            f"{key} (was {quote_value(was.get(key))}, is {quote_value(now.get(key))})" for key in changed[:_NAMED]
        )
        changes += f" and {len(changed) - _NAMED} more keys" if len(changed) > _NAMED else ""
        raise RunError(
            f"--resume: the recipe is not that of the run: {changes}; put back what was, or start another run "
            "with --out"
        )
    return milder.techniques != milder_before.techniques


def _select_techniques(recipe: Recipe, *, memory_saving: bool) -> Recipe:
    chosen = {
        name: t
        for name, t in recipe.techniques.items()
        if (isinstance(t, Searchable) and t.is_memory_saving()) == memory_saving
    }
    return replace(recipe, techniques=chosen)


def resume_build(
    build: Build,
    out: Path,
    fresh: checkpoint.Progress,
    looked: Looked | None,
    writer: Writer,
    watch: Watch,
    threads: int,
) -> checkpoint.Progress:
    """Loads the newest intact checkpoint into a build and returns its progress.

    Args:
        fresh: the progress of a run without a checkpoint.
        looked: result of `checkpoint.find` on rank 0; its checksums cover all files, so the other ranks need none.

    Raises:
        RunError: data, model or weights changed, or no checkpoint is intact.
    """
    folder = out / "checkpoints"
    if build.mesh.rank == 0:
        for left in folder.glob("step-*.writing"):  # from a session that was killed while saving
            if re.fullmatch(r"step-[0-9]+\.writing", left.name):
                shutil.rmtree(left, ignore_errors=True)
    # All ranks must load the same checkpoint, even if shared storage shows them different files.
    of_rank_0 = checkpoint.all_gather_object(build, looked)[0]
    assert of_rank_0 is not None, "rank 0 has looked for checkpoints"
    newest, damaged = of_rank_0
    for path, problem in damaged:
        writer.write_event(Damaged(checkpoint=path.name, problem=problem))
        watch.notice(f"{path}: damaged ({problem}); it is passed over")
    # Starting anew over damaged checkpoints would silently discard the work of the run.
    if newest is None:
        if damaged:
            raise RunError(
                f"{folder}: no checkpoint is intact ({damaged[0][0].name}: {damaged[0][1]}); start another run with "
                "--out"
            )
        watch.notice("no checkpoint was saved yet: starting from step 0")
        return fresh
    saved = checkpoint.read_progress(newest)
    # Compared before loading: a checkpoint of another model must not get as far as its tensors.
    differs = [name for name, value in fresh.fingerprints.items() if saved.fingerprints.get(name) != value]
    if differs:
        labels = {role: f"{role}'s weights" for role in build.sources} | {
            "data": "data (the source, tokenizer or packing)",
            "model": "model's configuration",
            "weights": "model's weights",
        }
        raise RunError(
            f"--resume: the {', the '.join(labels[d] for d in differs)} changed since {newest.name} was saved; put "
            "back what was, or start another run with --out"
        )
    # The number of threads decides the order of sums in CPU kernels.
    if saved.threads != threads:
        watch.notice(
            f"resumed with {threads} threads where the run had {saved.threads}: losses will agree up to rounding, "
            "not bit for bit"
        )
    if not is_exact(build.device.kind, build.recipe.hardware.deterministic):
        watch.notice(
            "resumed, and losses will agree "
            f"{describe_exactness(build.device.kind, build.recipe.hardware.deterministic)}"
        )
    progress = checkpoint.load(build, newest)
    # The recipe of this session: it may have other fallbacks than the checkpoint's.
    progress.recipe = fresh.recipe
    return progress


def read_finished_summary(run: Reader, looked: Looked, recipe: Recipe, total: int | None) -> JsonObject | None:
    """Returns the summary that `train` returns if the run has finished, or None if it has not.

    Args:
        looked: result of `checkpoint.find`.
        total: steps of the whole run; None: limited by time only.
    """
    # Finished means: the run said so, its newest checkpoint is of that step, and the recipe asks for no more steps.
    end = run.finished()
    if looked[0] is None or end is None:
        return None
    progress = checkpoint.read_progress(looked[0])
    # With the present recipe, whose `stop` may have been extended to train longer.
    late = recipe.stop.hours is not None and progress.elapsed >= recipe.stop.hours * 3600
    done = late or (total is not None and progress.step >= total) or _ends_early(run, recipe, progress.step)
    if end.steps != progress.step or not done:
        return None
    measured, plan, page = to_plain_data(run.measured()), run.plan, run.path / "report.html"
    usage = run.usage()
    summary = {
        "run": str(run.path),
        "steps": progress.step,
        **({} if end.skipped_steps is None else {"skipped_steps": end.skipped_steps}),
        "loss": to_plain_data(end.loss),
        "validation_loss": to_plain_data(end.validation_loss),
        "tokens_per_second": measured.get("tokens_per_second"),
        **{key: measured.get(key) for key in MEMORY_KEYS if key == "peak_gib" or key in measured},
        **(to_plain_data(usage) if usage else {}),
        "predicted": plan.predicted.known() if plan else {"peak_gib": None, "tokens_per_second": None},
        "stopped": None,
        "reason": end.reason,
        "already_finished": True,
        "report": str(page) if page.is_file() else None,
    }
    return summary | early_stopping(recipe, summary, end.best, end.tokens, end.seconds)


def _ends_early(run: Reader, recipe: Recipe, step: int) -> bool:
    """Returns True if the evaluation of a step ends the run."""
    criterion = criterion_of(recipe)
    if criterion is None:
        return False
    verdict = judge([criterion.evaluated(line) for line in run.evaluations() if line.step <= step], criterion)
    return verdict.ends is not None and verdict.at == step


def early_stopping(
    recipe: Recipe, summary: JsonObject, best: BestScore | None, tokens: int | None, seconds: float | None
) -> JsonObject:
    """Returns the keys of a run's summary about its best evaluation and the time to its target loss.

    Args:
        tokens, seconds: of the whole run.
    """
    keys: JsonObject = {} if best is None else {"best": to_plain_data(best)}
    # The run ends where it reaches the target, so its own figures are those until then.
    if summary["reason"] == "target_loss":
        keys["target"] = {
            "loss": recipe.stop.target_loss,
            "steps": summary["steps"],
            "tokens": tokens,
            "seconds": to_plain_data(seconds),
        }
    return keys
