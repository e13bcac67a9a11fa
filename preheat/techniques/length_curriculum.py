"""Length curriculum: starts with short sequences and grows them to the full length over the first part of the run.

What: splits the packed sequences of the data into shorter ones whose length grows to `batch.seq_len`; every token is
still trained once, with the context within its shorter sequence. By default a step keeps its tokens and has more
sequences instead.
Helps: attention is cheaper on short sequences, so early steps are faster; early training is more stable, which allows
large batches and learning rates (most of the paper's gain).
Hurts: early steps learn nothing about long contexts; kernels that are compiled per shape compile each length. If
lengths do not divide each other (linear, root), the last sequence of a step is padded, and on a CPU freed blocks fit
the next length badly and the kernels of each length are kept: the demo used 0.22 GiB instead of 0.15, and 0.16 with
doubling. The plan assumes the full length throughout, so early steps should be faster than planned.
Source: Li et al. 2021 (arXiv:2108.06084), linear and root as in DeepSpeed; by doubling: Jin et al. 2023
(arXiv:2310.00576).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Shape, Slot, Stage, Tag, Technique, Trials
from preheat.recipe import Bound, Count, Fraction, Positive

if TYPE_CHECKING:
    from torch import nn

    from preheat.recipe import Recipe

__all__ = ["LengthCurriculum", "length_at", "shape_at"]

Schedule = Literal["linear", "root", "steps"]


def length_at(
    progress: float,
    *,
    start: int,
    full: int,
    until: float,
    schedule: Schedule = "steps",
    root_degree: float = 2.0,
    multiple: int = 64,
    lengths: Sequence[int] = (),
) -> int:
    """Returns the tokens of a row at this fraction of the run.

    Args:
        progress: from 0 to 1.
        start, full: the first and the last length, in tokens.
        until: the progress after which rows are full.
        schedule: steps: `start` doubled repeatedly, each length for the same time; linear; root: fast first, then
            slower.
        multiple: lengths below the full one are multiples of this.
        lengths: explicit lengths below the full one, each for the same time; only `full` and `until` are used besides.

    Example:
        >>> [length_at(n / 10, start=64, full=256, until=0.8) for n in range(10)]
        [64, 64, 64, 64, 128, 128, 128, 128, 256, 256]
        >>> [length_at(n / 10, start=64, full=256, until=0.8, schedule="linear") for n in range(10)]
        [64, 64, 64, 128, 128, 128, 192, 192, 256, 256]
    """
    if progress >= until:
        return full
    # Progress within the curriculum, from 0 to below 1.
    share = progress / until
    # `share` is below 1, so the index stays in range.
    if lengths:
        return lengths[int(share * len(lengths))]
    if schedule == "steps":
        # Doubles below the full length, which follows as the last stage.
        lengths = [start]
        while lengths[-1] * 2 < full:
            lengths.append(lengths[-1] * 2)
        return lengths[int(share * len(lengths))]
    if schedule == "root":
        # share^(1 / d) is above share, so the length grows fast first.
        share = share ** (1 / root_degree)
    # Rounded down to a multiple, but not below the start.
    return max(start, int(start + (full - start) * share) // multiple * multiple)


def shape_at(length: int, *, rows: int, micro: int, full: int, keep: Literal["rows", "tokens"] = "tokens") -> Shape:
    """Returns the shape of a step whose rows have `length` tokens.

    A step is cut from whole rows of the data, so with `keep: rows` its number of rows is the nearest that can be cut
    from them.

    Args:
        rows, micro, full: rows of the global batch and of a micro-batch, and their length, at the end of the
            curriculum.

    Example:
        >>> shape_at(64, rows=8, micro=4, full=256), shape_at(64, rows=8, micro=4, full=256, keep="rows")
        (Shape(rows=32, length=64, micro=16), Shape(rows=8, length=64, micro=4))
    """
    # Rows of the data that this step reads, at full length: fewer if it keeps its number of (shorter) rows.
    full_rows = rows if keep == "tokens" else max(1, round(rows * length / full))
    # Shorter rows that hold all of their tokens, rounded up: the last may be padded.
    cut = -(-full_rows * full // length)
    # By tokens, a micro-batch has more of the shorter rows, and its activations take as much memory.
    return Shape(cut, length, min(cut, micro if keep == "rows" else max(1, micro * full // length)))


@dataclass(frozen=True, kw_only=True)
class LengthCurriculum(Technique):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[Numerics] = "exact"  # for a given batch; the batches differ
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"schedule": "root", "keep": "rows"},
            {"schedule": "linear"},
        )
    )
    unsupported_for_images: ClassVar[str] = "splits sequences, and would split the images in them; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.BATCH_SHAPE})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.GROWING_LENGTH})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.WHOLE_EXAMPLES})  # shorter rows would cut examples

    schedule: Schedule = "steps"
    """How the length grows: steps (it doubles, and each length lasts equally long: few shapes, no padding); linear;
    root (fast first)."""
    start: Literal["auto"] | Count = "auto"
    """Tokens of a sequence at the beginning; auto: a quarter of `batch.seq_len`."""
    lengths: tuple[Annotated[int, Bound(2)], ...] = ()
    """Explicit stages instead of `start` and `schedule`: increasing lengths below `batch.seq_len`, each for the same
    time."""
    until: Fraction = 0.3
    """Fraction of the run's steps after which sequences have the full length."""
    root_degree: Positive = 2.0
    """With `schedule: root`: 2 is the square root; larger values grow faster at first."""
    multiple: Literal["auto"] | Count = "auto"
    """Lengths are multiples of this, so that there are few of them; auto: an eighth of `batch.seq_len`, rounded down to
    a multiple of 8."""
    keep: Literal["tokens", "rows"] = "tokens"
    """tokens: a step has more, shorter sequences, so steps, tokens and learning rate mean the same as without the
    curriculum, and the device stays busy; rows: a step keeps its number of sequences, so early steps read fewer tokens
    (as in DeepSpeed)."""

    def _round_lengths(self, recipe: Recipe) -> tuple[int, int]:
        """Returns `start` and `multiple` in tokens."""
        full = recipe.batch.seq_len
        # An eighth (a quarter) of the length, rounded down to multiples: few different lengths, each a shape to
        # compile.
        multiple = max(8, full // 8 // 8 * 8) if self.multiple == "auto" else int(self.multiple)
        start = max(multiple, full // 4 // multiple * multiple) if self.start == "auto" else int(self.start)
        return start, multiple

    def check(self, context: Context) -> list[str]:
        recipe = context.recipe
        data, stop, full = recipe.data, recipe.stop, recipe.batch.seq_len
        start, multiple = self._round_lengths(recipe)
        problems = []
        if self.lengths:
            stages = [*self.lengths, full]
            shorter = next(((a, b) for a, b in itertools.pairwise(stages) if b <= a), None)
            if shorter:
                named = " (batch.seq_len)" if shorter[1] == full else ""
                problems.append(
                    f"lengths: a stage of {shorter[1]:,} tokens{named} follows one of "
                    f"{shorter[0]:,}; they must rise up to batch.seq_len {full:,}"
                )
            if self.start != "auto" or self.schedule != "steps":
                problems.append("lengths: define the stages; leave start and schedule out")
        elif start >= full:
            problems.append(
                f"start: {start} is not below batch.seq_len {full}; use {full // 4} or so, or longer sequences"
            )
        if start % multiple and not self.lengths:
            problems.append(
                f"start: {start} is no multiple of {multiple}; use start: "
                f"{-(-start // multiple) * multiple}, or set multiple"
            )
        if start < 2:
            problems.append("start: a sequence of 1 token has nothing to predict from; use 8 or more")
        # Progress at the last step: a curriculum that ends later never trains at full length.
        last = (stop.max_steps - 1) / stop.max_steps if stop.max_steps else 1.0
        if not 0 < self.until < 1 or self.until > last:
            end = (
                f"the last of {stop.max_steps} steps begins at {last:g} of the run"
                if stop.max_steps
                else "the run ends at 1"
            )
            problems.append(
                f"until: at {self.until:g} the full length is never reached, or from the start ({end}); use 0.3 or so"
            )
        if not (stop.max_steps or stop.tokens or stop.epochs):
            problems.append(
                "until: is a fraction of the run, whose length stop.hours alone does not determine; add "
                "stop.max_steps, tokens or epochs"
            )
        if self.keep == "rows" and (stop.tokens or stop.epochs):
            problems.append(
                "keep: rows reads fewer tokens a step, so stop.tokens and "
                "stop.epochs give no number of steps; use stop.max_steps"
            )
        # Completions need their prompts in the same row.
        paired = data.prompt is not None or data.source == "docstrings" or data.layout not in ("auto", "text")
        if data.packing == "whole" or (data.packing == "auto" and paired):
            problems.append(
                "start: shorter sequences would separate completions from their prompts; set data.packing: stream, or "
                "leave this out"
            )
        return problems

    def length(self, recipe: Recipe, progress: float) -> int:
        """Returns the tokens of a row at this fraction of a run of the recipe."""
        start, multiple = self._round_lengths(recipe)
        return length_at(
            progress,
            start=start,
            full=recipe.batch.seq_len,
            until=self.until,
            schedule=self.schedule,
            root_degree=self.root_degree,
            multiple=multiple,
            lengths=self.lengths,
        )

    def apply(self, build: Build, part: nn.Module) -> Change:
        recipe = build.recipe

        def shape(progress: float) -> Shape:
            rows = recipe.batch.size
            # Read at run time: another technique of this stage may set it after us.
            micro = -(-rows // build.state.accumulation)
            length = self.length(recipe, progress)
            return shape_at(length, rows=rows, micro=micro, full=recipe.batch.seq_len, keep=self.keep)

        build.claim(Slot.BATCH_SHAPE, shape, self.name())
        # The lengths of a run, by sampling its progress.
        lengths = list(dict.fromkeys(self.length(recipe, n / 1000) for n in range(1001)))
        shown = lengths if len(lengths) < 9 else [*lengths[:3], "...", *lengths[-2:]]
        summary = (
            f"sequences of {', '.join(map(str, shown))} tokens, full after "
            f"{self.until:.0%} of the steps; {self.keep} a step kept"
        )
        summary += ". The plan is for full sequences throughout"
        # Freed blocks of one length fit the next badly; doubled lengths divide each other.
        if build.device.kind == "cpu" and self.schedule != "steps":
            summary += "; the heap may hold up to half more than planned; schedule: steps avoids this"
        return Change(summary, len(lengths))
