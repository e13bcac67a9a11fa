"""Dry run: executes the recipe's build and one step on fake tensors and records every allocation and kernel.

Techniques declare no costs; the dry run observes what the program does. Fake tensors have shapes but no data, so a
model of any size is observed on any machine in seconds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from preheat.core import DATA, STEP, Axis, Batch, Build, Phase, Shape, Slot, Tag
from preheat.core.mesh import fake_process_group
from preheat.engine import builder
from preheat.engine.step import accumulate_gradients, update
from preheat.models import moe
from preheat.models.hf import find_anatomy
from preheat.ops.adapters.peft_layers import count_parameters
from preheat.ops.distributed.fully_shard import shard_lazily, watch_gathers, watch_reductions
from preheat.ops.distributed.pipelining import watch_micro_batches
from preheat.ops.dry_run_loops import count_turns
from preheat.planning.dispatch_recorder import Kernel, Mark, Recorder
from preheat.planning.observation import BESIDE, CATEGORIES, Observation
from preheat.planning.phases import (
    build_fake_batch,
    run_dataset_passes,
    run_evaluation,
    run_generation,
    run_load,
    run_saving,
    track_phases,
)
from preheat.planning.recurrent_kernels import fused_recurrent_kernels
from preheat.planning.request import Request

if TYPE_CHECKING:
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from preheat.core import Device

__all__ = ["allocator_rounding", "build_dry", "peak_by_phase", "observe", "categorize_peaks"]

_SENT = ("c10d::send", "c10d::recv_")
"""Operators between the passes of a pipeline's micro-batches, which `Recorder.later` lacks."""
_PASSING = (Phase.BACKWARD, Phase.UPDATE, Phase.SAVING)
"""Phases that save nothing for a backward pass: allocations other than gradients and optimizer states are temporary."""


def build_dry(request: Request) -> None:
    """Builds the recipe as the first rank does, on fake tensors.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with fake_process_group(request.devices), shard_lazily():
        builder.build(
            request.recipe,
            vocabulary=request.vocabulary,
            device=request.device,
            source_config=request.source_config,
            dry=FakeTensorMode(allow_non_fake_inputs=True),
        )


def observe(request: Request, *, rank: int = 0, by_layer: bool = False, evaluated: bool = True) -> Observation:
    """Dry-runs the recipe's build, one optimizer step and an evaluation, as one rank executes them.

    Fake tensors always live on the CPU; only the choice of kernels depends on the request's device.

    Args:
        rank: rank to observe.
        by_layer: record in `build_hook` which layer runs; not supported for compiled layers.
        evaluated: False skips checkpointing, evaluation and sample generation.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    # A fake process group of that many ranks: collectives have shapes, and send nothing.
    with fake_process_group(request.devices, rank), shard_lazily():
        return _observe(request, by_layer, evaluated)


def allocator_rounding(device: Device) -> int:
    """Returns the bytes to which the device's allocator rounds sizes: torch's on a CPU aligns to 64, CUDA's to 512."""
    return 64 if device.kind == "cpu" else 512


def _observe(request: Request, by_layer: bool, evaluated: bool) -> Observation:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Constants that modules hold as real tensors (small tables, for example) may mix with fake ones.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recipe, cpu = request.observed, request.device.kind == "cpu"
    recorder = Recorder(
        rounding=allocator_rounding(request.device), spread=torch.distributed.is_initialized(), casts=cpu
    )
    # The builder enters `dry` around its own work, so that parameters and optimizer states are recorded too.
    build = builder.build(
        recipe,
        vocabulary=request.vocabulary,
        device=request.device,
        source_config=request.source_config,
        dry=_DryContext(mode, recorder),
    )
    # Known only after the build, whose techniques provide the tags.
    recorder.tf32 = Tag.TF32_PRODUCTS in build.tags
    with (
        mode,
        recorder,
        count_turns(recorder),
        watch_gathers(recorder.look_at_gathered, recorder.notice_resize, recorder.notice_gather_input),
        watch_reductions(recorder.sum_gradients),
        watch_micro_batches(recorder.notice_pass),
        fused_recurrent_kernels(build.trained, request.device),
    ):
        # Before the first step, while parameters and preallocated optimizer states are all that is alive.
        known = _name_known_storages(build, recorder)
        track_phases(build, recorder)
        if by_layer:
            _hook_layers(build, recorder)
        shape: Shape = build.slot(Slot.BATCH_SHAPE)(1.0)  # at the end of the run, when it needs the most memory
        # Rows of this data-parallel rank, rounded up: the rank with the most rows sets the peak.
        rows = -(-shape.rows // build.mesh.size(*DATA))
        micros = [shape.micro] * (rows // shape.micro) + ([rows % shape.micro] if rows % shape.micro else [])
        # The first micro-batch allocates the gradients, the second accumulates, and later ones repeat the second.
        # A CPU's heap needs a third one to settle.
        recorder.kernels.clear()
        recorder.phase = Phase.FORWARD
        enough = _count_needed_micro_batches(build, len(micros))
        # On a CPU the global batch is in the device's memory, and a pipeline moves all of it; a GPU holds only the
        # current micro-batch and the next.
        everything = cpu or build.mesh.size(Axis.PIPELINE) > 1
        all_batches = [
            build_fake_batch(recipe, rows, build.model.vision) for rows in (micros if everything else micros[:enough])
        ]
        batches = all_batches[:enough]
        marks: list[Mark] = []
        first_pass: list[Counter[Kernel]] = []  # kernels so far, at each batch of a first pass

        def mark_batches(batches: list[Batch]) -> Iterator[Batch]:
            for batch in batches:
                marks.append(recorder.mark())
                yield batch

        # The real step, on fake batches: everything else in this function is bookkeeping around it.
        accumulate_gradients(build, _RecordedBatches(mark_batches, batches, first_pass, recorder.kernels))
        if build.mesh.size(Axis.PIPELINE) > 1:  # micro-batches overlap, so `marks` cannot tell them apart
            _count_remaining(recorder, len(micros), len(batches))
            batches = all_batches
        if more := len(micros) - len(batches):
            # With that hook, only the last micro-batch reduces gradients, unless each of them does.
            each = not build.hooks.before_backward or Tag.REDUCE_EACH_MICRO_BATCH in build.tags
            recorder.repeat_kernels(marks[-1], more, sums=each)
        # The first pass is repeated for each one; a pipeline's is among the passes of `notice_pass`.
        if build.model.experts and len(first_pass) == len(batches) > 1:
            # The load-balancing loss of experts counts tokens in a first pass over all micro-batches
            # (engine/moe_aux_loss.py).
            first = Counter({k: n * more for k, n in (first_pass[-1] - first_pass[-2]).items()})
            recorder.kernels.update(first)
            recorder.recomputed += sum(k.flops * n for k, n in (marks[0].kernels - first_pass[0] + first).items())
        # Before `update`, which clears the gradients.
        grads = {recorder.number(p.grad) for _, p in build.parameters() if p.grad is not None}
        recorder.begin(Phase.UPDATE)
        # Any rate will do: fake tensors have no values.
        update(build, 1e-3)
        # Copied here: evaluation and saving below run kernels that are no part of a step.
        kernels = Counter(recorder.kernels)
        del all_batches
        # A search compares steps only, and skips the phases outside of them.
        if evaluated:
            run_saving(build, recorder)
            run_evaluation(build, recorder, recipe, shape)
            run_generation(build, recorder, recipe)
            run_dataset_passes(build, recorder, recipe, shape)
    for category, numbers in (
        ("communication buffers", set(recorder.streams)),
        ("gathered weights", recorder.gathered),
    ):
        # Gradients that a side stream allocated remain gradients.
        known.update(dict.fromkeys(numbers - known.keys() - grads, category))
    at, passing = _replay(recorder.log, recorder.places, known, grads, recorder.rounded)
    # A separate place, because each of the two is affine in the number of layers.
    at[Phase.LOAD, "values"] = run_load(build, at[Phase.LOAD, ""])
    categories = categorize_peaks(at)
    flops: dict[str, int] = defaultdict(int)
    for kernel, count in kernels.items():
        flops[kernel.dtype] += kernel.flops * count
    return Observation(
        peak={phase: sum(sizes.values()) for phase, sizes in categories.items()},
        categories=categories,
        kernels=kernels,
        flops={k: v for k, v in flops.items() if v},
        # MFU counts the FLOPs that the model needs, not those of recomputation.
        model_flops=sum(flops.values()) - recorder.recomputed,
        parameters=sum(count_parameters(part)[1] for part in build.trained),
        trained=sum(p.numel() for _, p in build.parameters()),
        experts=sum(count_parameters(m)[1] for part in build.trained for m in moe.all_experts(part)),
        tokens=shape.rows * shape.length,
        passing=passing,
        log=list(recorder.log),  # a copy: later garbage collection would append frees that are not part of the step
        slots=build.slots(),
        changes=build.changes,
        at=at,
        streams=recorder.streams,
        unrounded=recorder.unrounded,
        groups={key: build.mesh.axes_between(ranks) for key, ranks in recorder.groups.items()},
        compiled=Tag.COMPILED_LAYERS in build.tags,
        cudnn=any(change.kernel == "cudnn" for changes in build.changes.values() for change in changes),
        slowed=math.prod(t.host_overhead() for t in recipe.techniques.values()),
        idle=build.parallel.bubble_fraction(len(micros)),
    )


def _count_needed_micro_batches(build: Build, micros: int) -> int:
    """Returns the number of micro-batches to run; the remaining ones repeat the last, or of a pipeline the mean.

    A pipeline is full with one micro-batch per stage, and one more accumulates onto existing gradients.
    """
    if (stages := build.mesh.size(Axis.PIPELINE)) == 1:
        return 3 if build.device.kind == "cpu" else 2
    alone = len(build.trained) == 1
    enough = stages + 1 if alone else 2 * stages  # interleaved schedules run more forwards before the first backward
    # Interleaved schedules need a multiple of the stages, so an uneven number is run in full.
    if micros <= enough or (micros % stages and not alone):
        return micros
    # The schedule reads the number of micro-batches from the build.
    build.state.accumulation = enough
    return enough


def _count_remaining(recorder: Recorder, micros: int, run: int) -> None:
    """Adds the kernels of a pipeline's micro-batches that were not run: the mean of all but the first one.

    Which of them gather the weights of a stage varies, so the mean is used.
    """
    more, others = micros - run, run - 1
    if not more:
        return
    for kernel, count in list(recorder.kernels.items()):
        if kernel.operator in _SENT:
            recorder.kernels[kernel] += count * more // run
    recorder.kernels.update({kernel: round(count * more / others) for kernel, count in recorder.later.items()})
    recorder.recomputed += round(recorder.recomputed_later * more / others)


class _DryContext:
    """Enters the fake tensor mode and the recorder as one context."""

    def __init__(self, mode: FakeTensorMode, recorder: Recorder):
        self.mode, self.recorder = mode, recorder

    def __enter__(self) -> None:
        # The recorder is the inner mode, because the innermost mode sees each operator first.
        self.mode.__enter__()
        self.recorder.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.recorder.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self.mode.__exit__(kind, error, trace)


class _RecordedBatches(Sequence[Batch]):
    """A sequence of batches that records the kernel counts whenever one is read."""

    def __init__(
        self,
        iterate: Callable[[list[Batch]], Iterator[Batch]],
        batches: list[Batch],
        first_pass: list[Counter[Kernel]],
        kernels: Counter[Kernel],
    ):
        self._iterate, self._batches, self._first_pass, self._kernels = iterate, batches, first_pass, kernels
        self._counted = False

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        # Indexing reads batches in a first pass only; training iterates.
        self._first_pass.append(Counter(self._kernels))
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        if not self._counted:  # `gradients` iterates once to sum the loss weights before it trains
            self._counted = True
            return iter(self._batches)
        return self._iterate(self._batches)


def _name_known_storages(build: Build, recorder: Recorder) -> dict[int, str]:
    """Maps the log number of each storage that exists before the first step to its category."""
    known: dict[int, str] = {}
    tensors: Iterable[tuple[str, Tensor]] = [
        *(
            ("parameters", t)
            for parts in build.parts.values()
            for part in parts
            for t in (*part.parameters(), *part.buffers())
        ),
        *(
            ("optimizer", t)
            for state in build.optimizer.state.values()
            for t in state.values()
            if isinstance(t, Tensor)
        ),
    ]
    for category, t in tensors:
        # None: the tensor was allocated outside of the recorder, or lies in host memory.
        number = recorder.number(t)
        if number is not None:
            known[number] = category
    return known


def _replay(
    log: list[tuple[int, int, Phase]],
    places: list[str],
    known: Mapping[int, str],
    grads: set[int | None],
    rounded: Mapping[int, int],
) -> tuple[dict[tuple[str, str], dict[str, int]], int]:
    """Returns the categories at the peak of each (phase, place), and the step's peak of activations and temporaries."""
    # Bytes alive by category; their sum is the allocated memory at this point of the log.
    alive: dict[str, int] = dict.fromkeys((*CATEGORIES, *BESIDE), 0)
    category: dict[int, str] = {}
    peak: dict[tuple[str, str], int] = {}
    at_peak: dict[tuple[str, str], dict[str, int]] = {}
    passing = 0
    for (number, size, phase), place in zip(log, places, strict=True):
        if size >= 0:
            # Decided at the allocation and kept until the free, so that each category returns to its value.
            category[number] = known.get(number) or (
                "gradients" if number in grads else "temporary" if phase in _PASSING else "activations"
            )
        # Rounding is a category of its own: the tensors themselves are counted by their exact sizes.
        added = rounded[number] if size > 0 else -rounded[number] if size < 0 else 0
        alive[category[number]] += size - added
        alive["rounding"] += added
        total = sum(alive.values())
        # -1, so that an empty entry of 0 bytes also records the memory at the beginning of its phase.
        if total > peak.get((phase, place), -1):
            peak[phase, place] = total
            at_peak[phase, place] = dict(alive)
        # The update's temporaries do not grow with the batch, and estimates scale this figure by rows.
        if phase in STEP and phase != Phase.UPDATE:
            passing = max(passing, alive["activations"] + alive["temporary"])
    return at_peak, passing


def peak_by_phase(recorder: Recorder) -> dict[str, int]:
    """Returns the peak of allocated bytes in each recorded phase."""
    at, _ = _replay(recorder.log, recorder.places, {}, set(), recorder.rounded)
    return {phase: sum(categories.values()) for phase, categories in categorize_peaks(at).items()}


def categorize_peaks(at: Mapping[tuple[str, str], dict[str, int]]) -> dict[str, dict[str, int]]:
    """Returns the categories at the peak of each phase, from the peaks of its places."""
    by_phase: dict[str, dict[str, int]] = {}
    for (phase, _), categories in at.items():
        if sum(categories.values()) > sum(by_phase.get(phase, {}).values()) or phase not in by_phase:
            by_phase[phase] = categories
    return by_phase


def _hook_layers(build: Build, recorder: Recorder) -> None:
    """Hooks the layers so that the recorder knows which one runs; the first two and last two have their own place."""

    def build_hook(place: str) -> Callable[..., None]:
        def mark(*_: object) -> None:
            recorder.place = place

        return mark

    def leave(place: str, last: bool) -> Callable[..., None]:
        def mark_layer(module: nn.Module, args: tuple[Tensor, ...], out: object) -> None:
            for t in tree_leaves(out):
                # The gradient of a layer's output is computed just before the layer's own backward pass.
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(build_hook(place))
            if last:
                recorder.place = "after"

        return mark_layer

    for part in build.trained:
        layers = find_anatomy(part).layers  # type: ignore[arg-type]
        for n, layer in enumerate(layers):
            # The layers in between need the same memory, so one label is enough for them.
            place = str(n) if n < 2 else str(n - len(layers)) if n >= len(layers) - 2 else "between"
            layer.register_forward_pre_hook(build_hook(place))
            layer.register_forward_hook(leave(place, n == len(layers) - 1))
