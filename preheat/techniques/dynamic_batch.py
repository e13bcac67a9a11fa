"""Dynamic micro-batch: as many rows at a time as memory holds, found out while training; the global batch stays as it
is.

What: micro-batches begin at the size that the dry run says will fit. Every few steps the memory of a step is measured:
where twice the rows would fit they are taken, where memory gets short the rows are halved. Gradients are divided by the
trained tokens of the whole global batch, so they are the same for any micro-batch, up to the order of sums. Before a
size is taken its memory is foreseen by the straight line through two measurements: what stood before the first step,
and the peak of a step at the present size. In each phase of a step memory is at least the former plus a part that grows
with the rows, so no phase lies above that line at twice the rows.
Helps: larger products on a device that has room, without a search by hand. Hurts: nothing is gained once products are
large; a run that takes another size at another step agrees with its twin up to rounding only. A resumed run goes on at
its checkpoint's size.
Source: normalised sums, Ott et al. 2018 (arXiv:1806.00187), section 3; batch size by memory as in Lightning's batch
size finder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from preheat.core import DATA, Batch, Build, Change, Context, MaskSpec, Searchable, Slot, Stage, Tag, Technique, Trials
from preheat.recipe import Bound, Count

__all__ = ["DynamicBatch", "MicroBatch", "foreseen", "regrouped", "sizes"]


def regrouped(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """The same rows in their order, `rows` at a time, the last perhaps fewer. A batch that has this size passes as it
    is.

    Args:
        batches: micro-batches whose rows have one length.

    Example:
        >>> import torch
        >>> row = torch.zeros(3, 4, dtype=torch.long)
        >>> b = Batch(row, row, row, MaskSpec(), 12, (7, 8, 9))
        >>> [(part.tokens.shape[0], part.weight, part.rows) for part in regrouped([b, b], 4)]
        [(4, 16, (7, 8, 9, 7)), (2, 8, (8, 9))]
    """
    pending: list[Batch] = []
    count = 0
    for batch in batches:
        pending.append(batch)
        count += batch.tokens.shape[0]
        while count >= rows:
            joined = _joined(pending)
            yield _rows_of(joined, 0, rows)
            pending, count = ([_rows_of(joined, rows, count)], count - rows) if count > rows else ([], 0)
    if pending:
        yield _joined(pending)


def _joined(parts: Sequence[Batch]) -> Batch:
    import torch

    if len(parts) == 1:
        return parts[0]
    tokens, labels, positions = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("tokens", "labels", "positions")
    )
    documents = None
    if any(p.mask.documents is not None for p in parts):
        documents = tuple(row for p in parts for row in p.mask.documents or ((p.tokens.shape[1],),) * p.tokens.shape[0])
    mask = replace(parts[0].mask, documents=documents)
    weight, rows = sum(p.weight for p in parts), tuple(n for p in parts for n in p.rows)
    liked = tuple(row for p in parts for row in p.liked)
    return Batch(tokens, labels, positions, mask, weight, rows, parts[0].group, liked)


def _rows_of(batch: Batch, first: int, end: int) -> Batch:
    if first == 0 and end == batch.tokens.shape[0]:
        return batch
    from preheat.data.loader import weight_of

    labels, documents = batch.labels[first:end], batch.mask.documents
    mask: MaskSpec = replace(batch.mask, documents=documents[first:end] if documents is not None else None)
    liked = batch.liked[first:end]
    weight = weight_of(
        labels, mask.documents, batch.group, liked
    )  # on the host, where batches are until the step moves them
    rows = batch.rows[first:end]
    return Batch(batch.tokens[first:end], labels, batch.positions[first:end], mask, weight, rows, batch.group, liked)


def foreseen(floor: float, peak: float, rows: int, more: int) -> float:
    """Peak memory at `more` rows: the line through `floor` at no rows and `peak` at `rows`. In the unit of both.

    Where each phase of a step takes a + b rows with a not below `floor`, this is never too little.

    Example:
        >>> foreseen(floor=2.0, peak=3.0, rows=4, more=8)
        4.0
    """
    return floor + (peak - floor) * more / rows


def sizes(rows: int) -> list[int]:
    """Micro-batches worth trying for a global batch, largest first: each is half of the one before, rounded up.

    Example:
        >>> sizes(12)
        [12, 6, 3, 2, 1]
    """
    candidates = [rows]
    while candidates[-1] > 1:
        candidates.append(-(-candidates[-1] // 2))
    return candidates


@dataclass
class MicroBatch:
    """The present size, and what decides on the next. A checkpoint keeps the sizes.

    Attributes:
        rows: of a micro-batch, of full length.
        most: no more than this is tried again.
        limit: bytes that a size must be foreseen to stay below; above `alarm` the rows are halved.
        floor: bytes held before the first step.
    """

    rows: int
    most: int
    limit: float
    alarm: float
    floor: int = 0
    begun: bool = field(default=False, repr=False)

    def decide(self, peak: int) -> str | None:
        """Takes the next size after a step with this peak, in bytes; returns why, or None where the size stays."""
        if peak > self.alarm and self.rows > 1:
            self.rows = self.most = self.rows // 2
            return f"{peak / 2**30:.2f} GiB is above {self.alarm / 2**30:.2f}"
        if self.rows >= self.most:
            return None
        more = min(2 * self.rows, self.most)
        prediction = foreseen(self.floor, peak, self.rows, more)
        if prediction > self.limit:
            self.most = self.rows  # asked once: what a checkpoint keeps then decides the rest of the run
            return None
        self.rows = more
        return f"{prediction / 2**30:.2f} GiB foreseen of {self.limit / 2**30:.2f}"

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "most": self.most}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.most = int(state["rows"]), int(state["most"])


@dataclass(frozen=True, kw_only=True)
class DynamicBatch(Searchable):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[Any] = "exact"
    trials: ClassVar[Trials] = Trials(settings=({"start": 1, "every": 2},))
    unsupported_for_images: ClassVar[str] = "regroups rows without the images in them; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.FORWARD_BACKWARD})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.MICRO_BATCH_SIZE})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.MICRO_BATCH_SIZE})

    start: Literal["auto"] | Count = "auto"
    """Rows of the first micro-batches; auto: the most (of the global batch halved again and again) that the dry run
    says will fit."""
    target: Annotated[float, Bound(0, 1, open_low=True)] = 0.85
    """Share of the memory (`hardware.memory`, or what the device has) that a larger micro-batch may be foreseen to
    fill. Rows are halved where a step fills more than half of the rest too."""
    every: Count = 10
    """Steps between looks at the memory; the first step, which warms up, is passed over."""

    def check(self, context: Context) -> list[str]:
        from preheat.hardware.probe import can_begin_peak

        devices = math.prod(context.sizes[axis] for axis in DATA)
        rows, problems = context.recipe.batch.size // devices, []
        if self.start != "auto" and self.start > rows:
            shared = f" over {devices} devices" if devices > 1 else ""
            problems.append(
                f"start: {self.start} rows are more than batch.size {rows * devices}{shared}; use at most {rows}, or "
                "auto"
            )
        if not can_begin_peak(context.device.kind):
            problems.append(
                "target: this system does not let the memory of one step be measured; use gradient_accumulation"
            )
        return problems

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Mapping[str, Any]]) -> Technique:
        if self.start != "auto":
            return self

        def share(other: Technique) -> float:
            prediction = plan(other)
            return float(prediction["peak_gib"] / prediction["available_gib"])

        candidates = sizes(context.recipe.batch.size // math.prod(context.sizes[axis] for axis in DATA))
        fits = (size for size in candidates if share(replace(self, start=size)) <= self.target)
        return replace(self, start=next(fits, candidates[-1]))

    def apply(self, build: Build, part: Any) -> Change:
        from preheat.hardware.cpu_allocator import release_unused
        from preheat.hardware.gpu_memory import CONTEXT
        from preheat.hardware.probe import begin_peak, peak_bytes, resident_bytes

        rows, kind = build.recipe.batch.size // build.mesh.size(*DATA), build.device.kind
        first = rows if self.start == "auto" else int(self.start)
        build.state.accumulation = -(-rows // first)
        # On a GPU tensors are measured, and the context takes its share of the memory too.
        memory = build.device.memory - (CONTEXT if kind == "cuda" else 0)
        state = MicroBatch(
            -(-rows // build.state.accumulation),
            rows,
            limit=self.target * memory,
            alarm=(1 + self.target) / 2 * memory,
        )
        build.state.saved[self.name()] = state
        inner = build.slot(Slot.FORWARD_BACKWARD)
        measuring = False

        def forward_backward(build: Build, batches: Sequence[Batch], global_weight: float) -> Any:
            nonlocal measuring
            length, full = batches[0].tokens.shape[1], build.recipe.batch.length
            if not state.begun:
                state.begun, state.floor = True, resident_bytes() if kind == "cpu" else _allocated()
            # Only steps of full rows tell what full rows need; the first one of a run warms up.
            measuring = build.state.step > 0 and build.state.step % self.every == 0 and length == full
            if measuring:
                begin_peak(kind)
            parts = regrouped(batches, max(1, state.rows * full // length))
            # Of several devices the engine tells which is the last, so they are counted first.
            return inner(build, list(parts) if build.hooks.before_backward else parts, global_weight)

        def after_update(build: Build) -> None:
            if not measuring:
                return
            # Of several devices that which needs most decides for all, as they must take equally many micro-batches.
            peak, before = build.mesh.most(peak_bytes(kind, since_begun=True), build.torch_device), state.rows
            state.floor = build.mesh.most(state.floor, build.torch_device)
            why = state.decide(peak)
            if why:
                release_unused(kind)
                build.state.events.append(
                    {"kind": "micro_batch", "step": build.state.step + 1, "rows": state.rows, "was": before, "why": why}
                )

        build.own(Slot.FORWARD_BACKWARD, forward_backward, self.name())
        build.hooks.after_update.append(after_update)
        return Change(
            f"micro-batches from {state.rows} rows up to {rows}, while a step is foreseen to fill at most "
            f"{self.target:.0%} of the memory; the plan is for the first size",
            build.state.accumulation,
        )


def _allocated() -> int:
    import torch

    return torch.cuda.memory_allocated()
