"""Improves another trainer's file: the changes that help its run most, in its own keys, and the file with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.cli.views.output import print_progress
from preheat.core import Numerics
from preheat.core.plan import SAFE, Improvement, Improvements, Plan
from preheat.errors import RecipeError
from preheat.interop.changes import Change, list_changes
from preheat.interop.editing import PACKING, edit_text, find_changed_keys, find_writer
from preheat.recipe.differences import describe_differences
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.cli.options.subject import Subject
    from preheat.interop.reading import ForeignConfig
    from preheat.planning.request import Request
    from preheat.recipe import Recipe

__all__ = ["describe_keys", "find_file_improvements", "require_writable", "write_improved"]

_MARK = "# written by preheat plan --write"
_NUMERICS: tuple[Numerics, ...] = ("exact", "rounding", "different")
_PACKED = "packing"

Keys = dict[tuple[str, ...], object]


class _Editor:
    """Makes changes of a recipe in the keys of the file that it was read from."""

    def __init__(
        self, subject: Subject, config: ForeignConfig, read: Callable[[Mapping[tuple[str, ...], object]], Subject]
    ):
        self.subject, self.config, self.read = subject, config, read
        self.has_keys = find_writer(config.file) is not None

    def apply(self, changes: Sequence[Change], recipe: Recipe) -> Recipe:
        for change in changes:
            recipe = change.apply(recipe)
        return recipe

    def find_keys(self, changes: Sequence[Change]) -> Keys | None:
        """Returns the keys of the file for some changes; None if it has none for them."""
        keys: Keys = {}
        as_read = self.config.recipe
        if (changed := self.apply(changes, as_read)) != as_read:
            changed_keys = find_changed_keys(self.config.file, as_read, changed)
            if changed_keys is None:
                return None
            keys |= changed_keys
        if any(change.kind == _PACKED for change in changes):
            keys |= PACKING[self.config.file.format.name]
        return keys

    def build(self, changes: Sequence[Change]) -> Recipe | None:
        """Returns the changed recipe; None if the file cannot say it, or would then be read as something else."""
        changed = self.apply(changes, self.subject.recipe)
        if not self.has_keys:
            return changed
        keys = self.find_keys(changes)
        if keys is None:
            return None
        try:
            recipe = self.read(keys).recipe
        except RecipeError:  # a key does not go with another one of the file
            return None
        # Texts that are padded are planned whole, and packed they are a stream.
        alike = replace(changed, data=replace(changed.data, packing=recipe.data.packing))
        return recipe if recipe == alike else None


def find_file_improvements(
    subject: Subject,
    config: ForeignConfig,
    request: Request,
    planned: Plan,
    read: Callable[[Mapping[tuple[str, ...], object]], Subject],
    *,
    quiet: bool,
) -> Improvements:
    """Finds the changes of another trainer's file that help its run most.

    Args:
        planned: the plan of the file as it is.
        read: reads the file with other values of some keys.
        quiet: do not print progress.
    """
    from preheat.planning.search.improvements import compute_speedup, find_improvements

    editor = _Editor(subject, config, read)
    smaller, growth = not planned.fits_safely, _estimate_growth(planned)
    changes = _merge_kernels(list_changes(subject.recipe, smaller=smaller, growth=growth), editor)
    gains, note = _estimate_packing(subject, config, request, planned)
    if gains:
        changes.append(Change(_PACKED, {}, numerics="different"))

    def tell(done: int, total: int) -> None:
        if not quiet:
            print_progress(f"dry run: {done + 1} of at most {total} changes of {config.file.path.name}")

    helpful = find_improvements(request, planned, changes, editor.build, gains, tell)
    if not quiet:
        print_progress()

    def describe(made: Sequence[Change], after: Plan) -> Improvement:
        gain = gains.get(_PACKED, 1.0) if any(change.kind == _PACKED for change in made) else 1.0
        keys = editor.find_keys(made) if editor.has_keys else None
        return Improvement(
            kinds=tuple(change.kind for change in made),
            keys={".".join(path): value for path, value in (keys or {}).items()},
            ours=tuple(describe_differences(subject.recipe, editor.apply(made, subject.recipe))),
            fits_safely=after.fits_safely,
            peak_gib=after.peak_gib,
            tokens_per_second=after.tokens_per_second,
            speedup=compute_speedup(planned, after, gain),
            numerics=max((change.numerics for change in made), key=_NUMERICS.index),
        )

    return Improvements(
        singles=tuple(describe([change], after) for change, after in helpful.singles),
        together=None if helpful.plan is None else describe(helpful.together, helpful.plan),
        note=note,
    )


def _estimate_growth(planned: Plan) -> float:
    """Returns how many times the memory that grows with the micro-batch fits into the device."""
    grows = sum(planned.memory.get(category, 0.0) for category in ("activations", "temporary"))
    return max(SAFE * planned.available_gib - (planned.peak_gib - grows), 0.0) / max(grows, 1e-9)


def _merge_kernels(changes: list[Change], editor: _Editor) -> list[Change]:
    """Returns the changes without fused kernels and chunked loss in one, if the file can say each alone."""
    fused = [change for change in changes if "fused_operators" in change.add]
    if len(fused) == 2 and editor.build(fused[:1]) is not None:
        changes.remove(fused[1])
    return changes


def _estimate_packing(
    subject: Subject, config: ForeignConfig, request: Request, planned: Plan
) -> tuple[dict[str, float], str]:
    """Returns how many times as fast the tokens of the data are trained in packed rows, or why that is not known."""
    file, recipe = config.file, subject.recipe
    if not file.padded or file.format.name not in PACKING or "preference" in recipe.techniques:
        return {}, ""
    key = ", ".join(f"{'.'.join(path)}: {_format(value)}" for path, value in PACKING[file.format.name].items())
    # Only data that the plan has read already: reading it may take minutes.
    if request.rows is None:
        return {}, f"`{key}` saves the padding of shorter rows; how much depends on the data, which was not read"
    from preheat.data.packing import Rows
    from preheat.planning.packing_gain import estimate_packing_gain
    from preheat.planning.plan_request import data_of

    rows = data_of(recipe, request.source_config).train
    if not isinstance(rows, Rows) or rows.packing != "whole":
        return {}, ""
    return {_PACKED: estimate_packing_gain(request, planned, rows)}, ""


def describe_keys(improvement: Improvement) -> str:
    """Returns the changed keys of the file as its lines, or those of the recipe.

    Example:
        >>> base = {"kinds": (), "ours": ("batch.size=8",), "fits_safely": True, "peak_gib": 1.0}
        >>> base |= {"tokens_per_second": 1.0, "speedup": 1.0, "numerics": "exact"}
        >>> describe_keys(Improvement(keys={"bf16": True, "optim": None}, **base))
        '`bf16: true`, without `optim`'
        >>> describe_keys(Improvement(keys={}, **base))
        "batch.size=8 (preheat's keys)"
    """
    if not improvement.keys:
        return f"{', '.join(shorten(item) for item in improvement.ours)} (preheat's keys)"
    return ", ".join(
        f"without `{key}`" if value is None else f"`{key}: {_format(value)}`" for key, value in improvement.keys.items()
    )


def _format(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def require_writable(file: Path, config: ForeignConfig | None) -> None:
    """Checks, before a plan, that its improved file can be written.

    Raises:
        RecipeError: the plan is not of another trainer's file.
        RunError: the path holds a foreign file.
    """
    from preheat.files import require_overwritable

    if config is None:
        raise RecipeError(
            "--write: writes the improved file of another trainer, and this is none; --out FILE writes a recipe"
        )
    require_overwritable(file, [_MARK])


def write_improved(
    file: Path,
    config: ForeignConfig,
    improvement: Improvement,
    read: Callable[[Path, str, Mapping[tuple[str, ...], object]], Recipe],
) -> None:
    """Writes the file with its improvements, after reading it back.

    Args:
        read: returns the recipe of a text as the file of that name, with other values of some keys.

    Raises:
        RecipeError: the file is a script, its format is only read, or it would be another run in this folder.
        RunError: the file cannot be written.
    """
    from preheat.files import write_generated, write_user_file

    source, changes = config.file, describe_keys(improvement)
    if source.is_script:
        raise RecipeError(f"--write: {source.path} is a script, which is not rewritten; change there: {changes}")
    if not improvement.keys:
        raise RecipeError(f"--write: files of {source.format.title} are only read; what helps: {changes}")
    keys = {tuple(key.split(".")): value for key, value in improvement.keys.items()}
    text = edit_text(source, keys)
    planned = read(source.path, source.text, keys)
    if replace(read(file, text, {}), name=planned.name) != planned:
        raise RecipeError(
            f"--write: {file}: would be another run, because paths in it start from its folder; name a file in "
            f"{source.path.parent}"
        )
    if file.suffix == ".json":
        write_user_file(file, text)
    else:
        write_generated(file, text, _MARK)
