"""Dynamic micro-batch: adapts the micro-batch to the memory during training; the global batch is unchanged.

What: micro-batches start at the size that the dry run says will fit. Every few steps the peak memory of a step is
measured: the number of sequences is doubled if the prediction fits, and halved if memory gets short. Gradients are
divided by the trained tokens of the whole global batch, so they are the same for any micro-batch, up to the order of
sums. The memory of a larger size is predicted by the straight line through two measurements: memory before the first
step, and the peak of a step at the current size. In each phase of a step, memory is at least the former plus a part
that grows with the rows, so no phase exceeds that line at twice the number.
Helps: larger matmuls on a device that has room, without a manual search.
Hurts: nothing is gained once matmuls are large; runs that change size at different steps agree up to rounding only. A
resumed run continues at its checkpoint's size.
Source: normalized sums, Ott et al. 2018 (arXiv:1806.00187), section 3; batch size by memory as in Lightning's batch
size finder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import (
    DATA,
    Batch,
    Build,
    Change,
    Context,
    MaskSpec,
    Numerics,
    Searchable,
    Slot,
    Stage,
    Tag,
    Technique,
    Trials,
)
from preheat.core.run_records import MicroBatchSize
from preheat.core.units import format_memory
from preheat.recipe import Bound, Count

if TYPE_CHECKING:
    from torch import nn

    from preheat.core import LossSum
    from preheat.core.json_types import StateDict
    from preheat.core.plan import Plan


__all__ = ["DynamicBatch", "MicroBatch", "predict_peak", "regroup_batches", "candidate_sizes"]


def regroup_batches(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """Yields the same rows in order, `rows` at a time, the last batch possibly smaller.

    A batch that already has this size is not copied.

    Args:
        batches: micro-batches whose rows have one length.

    Example:
        >>> import torch
        >>> row = torch.zeros(3, 4, dtype=torch.long)
        >>> b = Batch(row, row, row, MaskSpec(), 12, (7, 8, 9))
        >>> [(part.tokens.shape[0], part.weight, part.rows) for part in regroup_batches([b, b], 4)]
        [(4, 16, (7, 8, 9, 7)), (2, 8, (8, 9))]
    """
    # Batches that wait to be joined, and the number of their rows.
    pending: list[Batch] = []
    count = 0
    for batch in batches:
        pending.append(batch)
        count += batch.tokens.shape[0]
        while count >= rows:
            joined = _join_batches(pending)
            yield _slice_rows(joined, 0, rows)
            pending, count = ([_slice_rows(joined, rows, count)], count - rows) if count > rows else ([], 0)
    if pending:
        yield _join_batches(pending)


def _join_batches(parts: Sequence[Batch]) -> Batch:
    import torch

    if len(parts) == 1:
        return parts[0]
    # [rows, length] each; all parts have one length.
    tokens, labels, positions = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("tokens", "labels", "positions")
    )
    documents = None
    if any(p.mask.documents is not None for p in parts):
        # In a part without documents, each row is one document.
        documents = tuple(row for p in parts for row in p.mask.documents or ((p.tokens.shape[1],),) * p.tokens.shape[0])
    mask = replace(parts[0].mask, documents=documents)
    weight, rows = sum(p.weight for p in parts), tuple(n for p in parts for n in p.rows)
    desirable = tuple(row for p in parts for row in p.desirable)
    padding = None
    if any(p.padding is not None for p in parts):
        padding = torch.cat(
            [torch.zeros_like(p.labels, dtype=torch.bool) if p.padding is None else p.padding for p in parts]
        )
    # Every part has them, or none.
    mixed = [p.sources for p in parts if p.sources is not None]
    sources = torch.cat(mixed) if mixed else None
    return Batch(
        tokens, labels, positions, mask, weight, rows, parts[0].group, desirable, padding=padding, sources=sources
    )


def _slice_rows(batch: Batch, first: int, end: int) -> Batch:
    # The common case: the loader's micro-batch has the size already.
    if first == 0 and end == batch.tokens.shape[0]:
        return batch
    from preheat.data.loader import count_weight

    labels, documents = batch.labels[first:end], batch.mask.documents
    mask: MaskSpec = replace(batch.mask, documents=documents[first:end] if documents is not None else None)
    desirable = batch.desirable[first:end]
    # Computed on the host: batches are moved by the step.
    weight = count_weight(labels, mask.documents, batch.group, desirable)
    tokens, positions, rows = batch.tokens[first:end], batch.positions[first:end], batch.rows[first:end]
    padding = batch.padding[first:end] if batch.padding is not None else None
    sources = batch.sources[first:end] if batch.sources is not None else None
    return Batch(
        tokens, labels, positions, mask, weight, rows, batch.group, desirable, padding=padding, sources=sources
    )


def predict_peak(floor: float, peak: float, rows: int, more: int) -> float:
    """Predicts the peak memory at `more` rows: the line through `floor` at no rows and `peak` at `rows`, in their unit.

    This never underestimates if each phase of a step takes a + b rows with a >= `floor`.

    Example:
        >>> predict_peak(floor=2.0, peak=3.0, rows=4, more=8)
        4.0
    """
    return floor + (peak - floor) * more / rows


def candidate_sizes(rows: int) -> list[int]:
    """Returns the micro-batch sizes to try, largest first: each is half of the previous one, rounded up.

    Example:
        >>> candidate_sizes(12)
        [12, 6, 3, 2, 1]
    """
    candidates = [rows]
    while candidates[-1] > 1:
        candidates.append(-(-candidates[-1] // 2))
    return candidates


@dataclass
class MicroBatch:
    """The current micro-batch size and the rule that adapts it. Checkpoints store the sizes.

    Attributes:
        rows: of a micro-batch, at full length.
        most: upper limit for further sizes.
        limit: bytes that the prediction for a larger size must stay below.
        alarm: bytes above which the rows are halved.
        floor: bytes allocated before the first step.
    """

    rows: int
    most: int
    limit: float
    alarm: float
    floor: int = 0
    begun: bool = field(default=False, repr=False)

    def decide(self, peak: int) -> str | None:
        """Updates the size after a step with this peak, in bytes. Returns the reason, or None if it is unchanged."""
        if peak > self.alarm and self.rows > 1:
            # A size that was too large once is never tried again in this run.
            self.rows = self.most = self.rows // 2
            return f"{format_memory(peak / 2**30)} is above {format_memory(self.alarm / 2**30)}"
        if self.rows >= self.most:
            return None
        more = min(2 * self.rows, self.most)
        # From the measured peak of this size, not from the plan.
        prediction = predict_peak(self.floor, peak, self.rows, more)
        if prediction > self.limit:
            self.most = self.rows  # decided once; checkpoints keep it for the rest of the run
            return None
        self.rows = more
        return f"{format_memory(prediction / 2**30)} predicted of {format_memory(self.limit / 2**30)}"

    def state_dict(self) -> StateDict:
        return {"rows": self.rows, "most": self.most}

    def load_state_dict(self, state: StateDict) -> None:
        self.rows, self.most = int(state["rows"]), int(state["most"])


@dataclass(frozen=True, kw_only=True)
class DynamicBatch(Searchable):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(settings=({"start": 1, "every": 2},))
    unsupported_for_images: ClassVar[str] = "regroups sequences without the images in them; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.FORWARD_BACKWARD})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.MICRO_BATCH_SIZE})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.MICRO_BATCH_SIZE})

    start: Literal["auto"] | Count = "auto"
    """Sequences of the first micro-batches; auto: the largest size that the dry run says will fit (the global batch,
    halved repeatedly)."""
    target: Annotated[float, Bound(0, 1, open_low=True)] = 0.85
    """Fraction of the memory (`hardware.memory`, or the device's memory) that a larger micro-batch is allowed to fill
    by prediction. Sequences are halved if a step fills more than half of the rest too."""
    every: Count = 10
    """Steps between measurements; the first step, which warms up, is skipped."""

    def check(self, context: Context) -> list[str]:
        from preheat.hardware.probe import can_begin_peak

        devices = math.prod(context.sizes[axis] for axis in DATA)
        rows, problems = context.recipe.batch.size // devices, []
        if self.start != "auto" and self.start > rows:
            shared = f" over {devices} devices" if devices > 1 else ""
            problems.append(
                f"start: {self.start} sequences are more than batch.size "
                f"{rows * devices}{shared}; use at most {rows}, or auto"
            )
        if not can_begin_peak(context.device.kind):
            problems.append(
                "target: this system does not let the memory of one step be measured; use gradient_accumulation"
            )
        return problems

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Plan]) -> Technique:
        if self.start != "auto":
            return self

        def share(other: Technique) -> float:
            prediction = plan(other)
            return float(prediction.peak_gib / prediction.available_gib)

        candidates = candidate_sizes(context.recipe.batch.size // math.prod(context.sizes[axis] for axis in DATA))
        # A generator: planning ends with the first size that fits, the largest.
        fits = (size for size in candidates if share(replace(self, start=size)) <= self.target)
        return replace(self, start=next(fits, candidates[-1]))

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.hardware.cpu_allocator import release_unused
        from preheat.hardware.gpu_memory import CONTEXT
        from preheat.hardware.probe import peak_bytes, resident_bytes, start_peak

        rows, kind = build.recipe.batch.size // build.mesh.size(*DATA), build.device.kind
        first = rows if self.start == "auto" else int(self.start)
        # Rounded up: the last micro-batch may have fewer rows.
        build.state.accumulation = -(-rows // first)
        # On a GPU only tensors are measured; the CUDA context takes memory too.
        memory = build.device.memory - (CONTEXT if kind == "cuda" else 0)
        state = MicroBatch(
            -(-rows // build.state.accumulation),
            rows,
            limit=self.target * memory,
            # Halfway between the target and all of the memory.
            alarm=(1 + self.target) / 2 * memory,
        )
        build.state.saved[self.name()] = state
        inner = build.slot(Slot.FORWARD_BACKWARD)
        measuring = False

        def forward_backward(build: Build, batches: Sequence[Batch], global_weight: float) -> LossSum:
            nonlocal measuring
            length, full = batches[0].tokens.shape[1], build.recipe.batch.seq_len
            if not state.begun:
                # Optimizer states are still missing from this floor; a floor that is too low only makes the prediction
                # larger.
                state.begun, state.floor = True, resident_bytes() if kind == "cpu" else _read_allocated()
            # Only full-length steps show what full rows need; the first step warms up.
            measuring = build.state.step > 0 and build.state.step % self.every == 0 and length == full
            if measuring:
                start_peak(kind)
            # Shorter rows are joined to as many tokens as full rows have.
            parts = regroup_batches(batches, max(1, state.rows * full // length))
            # With several devices the engine must know which micro-batch is the last, so count them first.
            return inner(build, list(parts) if build.hooks.before_backward else parts, global_weight)

        def after_update(build: Build) -> None:
            if not measuring:
                return
            # The device with the highest peak decides, because all ranks must run the same number of micro-batches.
            peak, before = build.mesh.max_over_ranks(peak_bytes(kind, since_begun=True), build.torch_device), state.rows
            # The floor too: `decide` must come to the same size everywhere.
            state.floor = build.mesh.max_over_ranks(state.floor, build.torch_device)
            why = state.decide(peak)
            if why:
                # Cached blocks of the former size fit the new one badly.
                release_unused(kind)
                build.state.events.append(
                    MicroBatchSize(step=build.state.step + 1, rows=state.rows, was=before, why=why)
                )

        build.claim(Slot.FORWARD_BACKWARD, forward_backward, self.name())
        build.hooks.after_update.append(after_update)
        return Change(
            f"micro-batches from {state.rows} sequences up to {rows}, while a step is predicted to fill at most "
            f"{self.target:.0%} of the memory; the plan is for the first size",
            build.state.accumulation,
        )


def _read_allocated() -> int:
    import torch

    return torch.cuda.memory_allocated()
