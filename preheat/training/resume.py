"""Going on with a run: what must be as it was, and the checkpoint that it goes on from."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.core import Build, Searchable
from preheat.engine import checkpoint
from preheat.engine.builder import alone
from preheat.errors import RunError
from preheat.hardware.deterministic import is_exact, repeats
from preheat.recipe import Recipe
from preheat.recipe.paths import anchored, published
from preheat.run_dir import MEMORY_KEYS, Reader, Writer, expected_memory
from preheat.sanitize import quoted
from preheat.training.observer import Watch

__all__ = ["Looked", "compare", "fingerprints", "resumed", "summary_of_finished"]

Looked = tuple[Path | None, list[tuple[Path, str]]]
"""The newest whole checkpoint, and the damaged ones with what is wrong with each."""

# What may differ between a run and its resumption; everything else decides the numbers.
_FREE = ("name", "stop", "evaluate", "checkpoint", "sample", "hardware", "data.workers", "data.prefetch")


_NAMED = 6  # keys that a message names: another recipe altogether differs in dozens


def fingerprints(made: Build, data: Any) -> dict[str, str]:
    settings = made.trained[0].config.to_dict()  # type: ignore[operator,union-attr]
    settings.pop("_name_or_path", None)  # where it was read from: the same folder may be named in several ways
    config = json.dumps(settings, sort_keys=True, default=str)
    return {
        "data": data.fingerprint,
        "model": hashlib.sha256(config.encode()).hexdigest()[:16],
        "weights": made.weights.fingerprint(),
    } | {role: source.fingerprint() for role, source in made.sources.items()}


def compare(recipe: Recipe, before: str) -> bool:
    """Refuses a resumption whose recipe would change the numbers, and names the keys.

    Returns:
        Whether techniques that spare memory and keep the numbers, up to rounding, are others than they were.
    """
    # Files and folders may have moved: their names are compared here, their contents by the checkpoint's fingerprints.
    was_recipe = published(anchored(recipes.parse(before, where="recipe.yaml of the run")))
    recipe = published(anchored(recipe))
    milder, milder_before = (_of_techniques(r, memory_saving=True) for r in (recipe, was_recipe))
    # Another number of devices, and another way to share the work among them, changes no number.
    old, new = (recipes.as_values(_of_techniques(alone(r), memory_saving=False)) for r in (was_recipe, recipe))
    changed = [
        key for key in _leaves(old).keys() | _leaves(new).keys() if _leaves(old).get(key) != _leaves(new).get(key)
    ]
    changed = sorted(key for key in changed if not any(key == free or key.startswith(free + ".") for free in _FREE))
    if changed:
        was, now = _leaves(old), _leaves(new)
        words = ", ".join(f"{key} (was {quoted(was.get(key))}, is {quoted(now.get(key))})" for key in changed[:_NAMED])
        words += f" and {len(changed) - _NAMED} more keys" if len(changed) > _NAMED else ""
        raise RunError(
            f"--resume: the recipe is not that of the run: {words}; put back what was, or start another run with --out"
        )
    return milder.techniques != milder_before.techniques


def _of_techniques(recipe: Recipe, *, memory_saving: bool) -> Recipe:
    chosen = {
        name: t
        for name, t in recipe.techniques.items()
        if (isinstance(t, Searchable) and t.memory_saving) == memory_saving
    }
    return replace(recipe, techniques=chosen)


def _leaves(values: Any, at: str = "") -> dict[str, Any]:
    if isinstance(values, dict) and values:
        return {
            k: v for key, value in values.items() for k, v in _leaves(value, f"{at}.{key}" if at else str(key)).items()
        }
    return {at: values}


def resumed(
    made: Build,
    out: Path,
    fresh: checkpoint.Progress,
    looked: Looked | None,
    writer: Writer,
    watch: Watch,
    threads: int,
) -> checkpoint.Progress:
    """Puts the newest whole checkpoint into a build, and returns where it stands.

    Args:
        fresh: where a run stands that has no checkpoint yet.
        looked: of `checkpoint.find`, where this process is the first: checksums are of all files, so once is enough.

    Raises:
        RunError: data, model or weights are others, or no checkpoint is whole.
    """
    folder = out / "checkpoints"
    if made.mesh.rank == 0:
        for left in folder.glob("step-*.writing"):  # of a session that was killed while it saved
            if re.fullmatch(r"step-[0-9]+\.writing", left.name):
                shutil.rmtree(left, ignore_errors=True)
    found, damaged = checkpoint.all_gather_object(made, looked)[0]
    for path, problem in damaged:
        writer.event("damaged", checkpoint=path.name, problem=problem)
        watch.notice(f"{path}: damaged ({problem}); it is passed over")
    if found is None:
        if damaged:
            raise RunError(
                f"{folder}: no checkpoint is whole ({damaged[0][0].name}: {damaged[0][1]}); start another run "
                "with --out"
            )
        watch.notice("no checkpoint was saved yet: starting from step 0")
        return fresh
    kept = checkpoint.read_progress(found)
    differs = [name for name, value in fresh.fingerprints.items() if kept.fingerprints.get(name) != value]
    if differs:
        words = {role: f"{role}'s weights" for role in made.sources} | {
            "data": "data (the source, tokenizer or packing)",
            "model": "model's configuration",
            "weights": "model's weights",
        }
        raise RunError(
            f"--resume: the {', the '.join(words[d] for d in differs)} changed since {found.name} was saved; put "
            "back what was, or start another run with --out"
        )
    if kept.threads != threads:
        watch.notice(
            f"resumed with {threads} threads where the run had {kept.threads}: losses will agree up to rounding, "
            "not bit for bit"
        )
    if not is_exact(made.device.kind, made.recipe.hardware.deterministic):
        watch.notice(f"resumed, and losses will agree {repeats(made.device.kind, made.recipe.hardware.deterministic)}")
    progress = checkpoint.load(made, found)
    progress.recipe = fresh.recipe
    return progress


def summary_of_finished(run: Reader, looked: Looked, recipe: Recipe, total: int | None) -> dict[str, Any] | None:
    """What `train` returns of a run that has taken all of its steps and written its end; None: there is more to do.

    Args:
        looked: of `checkpoint.find`.
        total: steps of the whole run; None: until the clock says so.
    """
    end = run.finished()
    if looked[0] is None or end is None:
        return None
    progress = checkpoint.read_progress(looked[0])
    late = recipe.stop.hours is not None and progress.elapsed >= recipe.stop.hours * 3600
    if end.get("steps") != progress.step or not (late or (total is not None and progress.step >= total)):
        return None
    measured, plan, page = run.measured(), run.plan, run.path / "report.html"
    return {
        "run": str(run.path),
        "steps": progress.step,
        "loss": end.get("loss"),
        "validation_loss": end.get("validation_loss"),
        "tokens_per_second": measured.get("tokens_per_second"),
        **{key: measured.get(key) for key in MEMORY_KEYS if key == "peak_gib" or key in measured},
        "predicted": {**expected_memory(plan), "tokens_per_second": plan.get("tokens_per_second")},
        "stopped": None,
        "already_finished": True,
        "report": str(page) if page.is_file() else None,
    }
