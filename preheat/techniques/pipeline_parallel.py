"""Pipeline parallel: splits the layers across devices and streams micro-batches through the stages.

What: splits the model into stages so that each device has the same cost by the FLOPs that a dry run counts (including
the head and experts, which a split by number of layers ignores), and runs them with torch's schedules. `gpipe`: all
forward, then all backward. `1f1b`: alternates forward and backward, so that at most as many micro-batches as stages are
in flight. `interleaved`: several stages per device, a smaller bubble, more messages. `zero_bubble` and `zbv`: compute
weight gradients separately from input gradients to fill the bubble; `zbv` folds the pipeline into a V.
Helps: weights, gradients, optimizer and activations shrink with the number of devices, and only hidden states travel,
between neighbours: the most tolerant of slow links.
Hurts: devices idle while the pipeline fills and drains, (devices - 1) / micro-batches of the time with `1f1b`; needs
many micro-batches. Recurrent layers, attention sinks, chunked attention and experts are split like others; a
load-balancing loss of experts (engine/moe_aux_loss.py) costs a pass through the pipeline before each step. Refused:
families that change hidden states outside of their modules (Granite's factor on the embeddings) or pass more than
hidden states from layer to layer (Gemma 3n and 4).
Source: Huang et al. 2019, GPipe (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473); Qi et al. 2024, zero
bubble (arXiv:2401.10241).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import (
    DATA,
    Axis,
    Batch,
    Build,
    Change,
    Context,
    Finish,
    LossSum,
    Numerics,
    Recipe,
    Searchable,
    Slot,
    Stage,
    Tag,
    Technique,
    Trials,
)
from preheat.errors import RecipeError
from preheat.recipe import Bound, Count

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.core import SlotFunction
    from preheat.models.pipeline_split import ModelProfile
    from preheat.ops.distributed.pipelining import Span

__all__ = ["PipelineParallel", "record_timeline", "split_into_stages"]

# Schedules that compute the gradients of inputs first, and those of weights later, in a second pass.
SPLIT_BACKWARD = ("zero_bubble", "zbv")
_ONE_PASS = {  # techniques whose backward passes modify or free the tensors that they read
    Tag.RECOMPUTATION: "recomputed layers",
    Tag.COMPILED_LAYERS: "compiled layers",
    Tag.FUSED_LAYERS: "fused layers",
    Tag.FUSED_OPERATORS: "fused operators",
    Tag.FP8_COMPUTE: "fp8 products",
}


def split_into_stages(
    model: PreTrainedModel, count: int, *, length: int, recompute: bool = False
) -> list[PreTrainedModel]:
    """Splits a transformers model into stages of equal cost, each an ordinary model with a part of the layers.

    The stages share their modules with the model, which is unchanged. All but the first take `inputs_embeds`, the
    hidden states of the previous stage.

    Args:
        length: tokens of a row, which determine the cost of attention.
        recompute: layers run forward twice, under activation checkpointing.

    Raises:
        ValueError: fewer layers than stages, or a model that cannot be split between layers.

    Example:
        >>> stages = split_into_stages(model, 4, length=4096)  # doctest: +SKIP
        >>> hidden = stages[1].model(
        ...     inputs_embeds=stages[0].model(input_ids=tokens).last_hidden_state
        ... )  # doctest: +SKIP
    """
    from preheat.models import pipeline_split

    course = pipeline_split.observe(model.config, length)
    # With recomputation a layer costs four forward passes, the head and loss still three.
    cuts = pipeline_split.balance_stages(
        course.each, count, before=course.before, after=course.after * (0.75 if recompute else 1)
    )
    return [pipeline_split.cut(model, course, cuts, number) for number in range(count)]


@contextmanager
def record_timeline(build: Build) -> Iterator[list[Span]]:
    """Records what each device of a build's pipeline computes and when; yields a list that is filled on exit.

    The list has the spans of all devices of the pipeline, by start. While it records, a GPU's queue is drained before
    and after each span, which costs some speed. All processes must enter it.

    Example:
        >>> with record_timeline(build) as spans:  # doctest: +SKIP
        ...     gradients(build, batches)
        >>> spans[0]  # doctest: +SKIP
        Span(device=0, stage=0, micro=0, what='forward', start=0.0003, end=0.0121)
    """
    # The slot holds a bound method of `_Runner`.
    pipeline = build.slot(Slot.MODEL_LOSS).__self__.pipeline  # type: ignore[attr-defined]
    with pipeline.recorded() as spans:
        yield spans


@dataclass(frozen=True)
class _Split:
    """The stages of a model: the model's profile, and the layers, cost (FLOPs) and device of each stage."""

    course: ModelProfile
    cuts: list[range]
    costs: list[float]
    devices: list[int]

    def cost(self, device: int) -> float:
        """Returns the FLOPs of a device's stages."""
        return sum(cost for cost, d in zip(self.costs, self.devices, strict=True) if d == device)

    def layers(self, device: int) -> list[int]:
        """Returns the layers of a device's stages."""
        return [layer for cut, d in zip(self.cuts, self.devices, strict=True) if d == device for layer in cut]


class _Runner:
    """Connects a build's stages and slots with torch's schedule."""

    def __init__(self, build: Build, schedule: str, stages: Mapping[int, nn.Module], count: int, dtype: Any):
        from preheat.models.moe import BALANCE, TOKENS
        from preheat.ops.distributed.pipelining import Pipeline

        self.build = build
        self.metrics: dict[str, Tensor] = {}

        def forward(part: nn.Module, batch: Batch) -> Tensor:
            output, metrics = build.slot(Slot.UNSHARD_SCOPE)(part, lambda: build.slot(Slot.STAGE_LOSS)(part, batch))
            assert metrics.keys() <= {TOKENS, BALANCE}, (
                "check refuses objectives with metrics: only the last stage's device would have them"
            )
            for name, value in metrics.items():
                self.metrics[name] = self.metrics[name] + value if name in self.metrics else value
            # Only the last stage has a loss to scale; the others return hidden states.
            for change in build.loss.scaling if part is stages.get(count - 1) else ():
                output = change(output)
            return output

        # With sequence parallelism each device sends its shard of the hidden states to its counterpart in the next
        # stage.
        # (rows, length / cut, width) is sent.
        self.cut = build.mesh.size(Axis.TENSOR) if Tag.SEQUENCE_PARALLEL in build.tags else 1
        group = build.mesh.group(Axis.PIPELINE)
        self.pipeline = Pipeline(
            stages,
            count,
            group,
            schedule,
            forward,
            width=build.model.width,
            dtype=dtype,
            device=build.torch_device,
            before_backward=self._tell_backward,
        )

    def _tell_backward(self, batch: Batch) -> None:
        for tell in self.build.hooks.before_recompute:
            tell(batch)

    def forward_backward(self, build: Build, batches: Sequence[Batch], global_weight: Tensor | float) -> LossSum:
        self.metrics = {}
        # At least 1: a global batch without labels must not divide by zero.
        weight = max(global_weight, 1) if isinstance(global_weight, int | float) else global_weight
        total = self.pipeline.step(self._prepare(batches), weight, cut=self.cut)
        return LossSum(total, global_weight, self.metrics)

    def _prepare(self, batches: Sequence[Batch]) -> list[Batch]:
        """Returns transformed micro-batches of one shape, as many as were announced: torch's schedules need both."""
        from preheat.ops.distributed.pipelining import pad_micro_batches

        moved = [self.build.transform_batch(batch) for batch in batches]
        return pad_micro_batches(moved, self.build.state.accumulation)

    def pass_forward(self, batches: Sequence[Batch], compute: Callable[[nn.Module, Batch], Tensor]) -> None:
        """Runs `compute`, which returns hidden states, on all micro-batches of a step through all stages."""

        def forward(part: nn.Module, batch: Batch) -> Tensor:
            hidden: Tensor = self.build.slot(Slot.UNSHARD_SCOPE)(part, lambda: compute(part, batch))
            return hidden

        self.pipeline.pass_forward(self._prepare(batches), forward, self.cut)

    def forward(self, build: Build, batch: Batch) -> LossSum:
        """Computes the loss of a transformed batch without gradients. It is the same on all devices of the pipeline."""
        return LossSum(self.pipeline.read(batch, cut=self.cut), batch.weight)


@dataclass(frozen=True, kw_only=True)
class PipelineParallel(Searchable):
    stage: ClassVar[Stage] = Stage.PIPELINE_SPLIT
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="pipeline 2 does not multiply to 1 device")
    unsupported_for_images: ClassVar[str] = (
        "cuts a chain of layers into stages, and a vision tower feeds several of them; use fsdp"
    )
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.FORWARD_BACKWARD, Slot.MODEL_LOSS})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.PIPELINE_STAGES})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.WHOLE_EXAMPLES})  # only the last stage would have their scores

    degree: Annotated[int, Bound(2)] = 2
    """Devices of the pipeline, each with a part of the layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    """Order of computation: 1f1b keeps the fewest activations, interleaved idles less, zero_bubble and zbv least."""
    stages: Count | None = None
    """Stages per device; by default 2 with interleaved and zbv, 1 with the others. Only interleaved and zero_bubble
    accept other values."""
    micro_batches: Annotated[int, Bound(2)] | None = None
    """Micro-batches per global batch; by default those of gradient_accumulation. With 4 per device, devices idle a
    fifth of the time (1f1b)."""

    @property
    def _each(self) -> int:
        return self.stages or (2 if self.schedule in ("interleaved", "zbv") else 1)

    def degrees(self) -> Mapping[Axis, int]:
        return {Axis.PIPELINE: self.degree}

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        recipe, tags = context.recipe, context.tags
        count, problems = self.degree * self._each, list[str]()
        allowed = {"interleaved": "2 or more", "zero_bubble": "any", "zbv": "2"}.get(self.schedule, "1")
        fits = {"1": self._each == 1, "2": self._each == 2, "2 or more": self._each > 1, "any": True}
        if not fits[allowed]:
            problems.append(
                f"stages: {self._each} a device with schedule: {self.schedule}, which "
                f"takes {allowed}; leave it out, or use interleaved"
            )
        if count > context.model.layers:
            problems.append(
                f"degree: {self.degree} devices with {self._each} stages each are {count} "
                f"stages, and the model has {context.model.layers} layers; use fewer"
            )
        problems += self._find_batch_problems(context)
        if self.schedule == "zbv" and context.model.tied:
            problems.append(
                "schedule: zbv puts first and last stage on one device, which would hold a tied embedding twice; use "
                "another schedule, or set model.config.tie_word_embeddings: false for a new model"
            )
        if Tag.REDUCE_EACH_MICRO_BATCH in tags:
            problems.append(
                "fsdp reduces gradients once per step here, after the last micro-batch of the pipeline; set "
                "fsdp.reduce: last"
            )
        if self.schedule in SPLIT_BACKWARD:
            problems += self._split_backward_problems(context)
        if recipe.evaluate.tasks:
            problems.append(
                "evaluate.tasks: reads logits of single tokens, which only the "
                "last device makes; run `preheat eval` on the checkpoint"
            )
        if recipe.sample.is_active:
            problems.append("sample: no device has the whole model; run `preheat generate` on the checkpoint")
        return problems

    def _split_backward_problems(self, context: Context) -> list[str]:
        """Returns what does not support computing weight gradients in a second backward pass."""
        problems = []
        if Tag.RESHARD_AFTER_FORWARD in context.tags:
            problems.append(
                f"schedule: {self.schedule} computes the gradients of weights later, when fsdp has freed these; set "
                "fsdp.reshard_after_forward: false"
            )
        problems += [
            f"schedule: {self.schedule} passes backward twice through "
            f"{what}, which allow one pass; use 1f1b or interleaved"
            for tag, what in _ONE_PASS.items()
            if tag in context.tags
        ]
        losses = [t.name() for t in context.recipe.techniques.values() if Slot.OVER_LOGITS in t.claimed()]
        problems += [
            f"schedule: {self.schedule} passes backward twice through the loss, "
            f"and that of {name} allows one; use 1f1b or interleaved"
            for name in losses
        ]
        return problems

    def _find_batch_problems(self, context: Context) -> list[str]:
        """Returns what is wrong with the number of micro-batches."""
        accumulation: Any = context.recipe.techniques.get("gradient_accumulation")
        if accumulation is not None and self.micro_batches is not None:
            return [
                f"micro_batches: {self.micro_batches}, and gradient_accumulation.steps is {accumulation.steps}; leave "
                "one out"
            ]
        micro = self.micro_batches or (accumulation.steps if accumulation is not None else 1)
        count = self.degree * self._each
        # Rows of one data-parallel device, rounded up.
        rows = -(-context.recipe.batch.size // math.prod(context.sizes[axis] for axis in DATA))
        least = count if self.schedule in ("gpipe", "1f1b", "zero_bubble") else self.degree
        if micro < least:
            return [
                f"micro_batches: {micro} for {count} stages would leave devices without work; use at least "
                f"{least}, better {4 * self.degree} (micro_batches, or gradient_accumulation.steps)"
            ]
        # torch's interleaved schedules work in rounds of about `degree` micro-batches, and raise if these do not
        # divide.
        rounds = max(1, micro // self.degree)
        if self.schedule in ("interleaved", "zero_bubble") and micro % rounds:
            return [
                f"micro_batches: {micro} do not divide into {rounds} rounds over {self.degree} devices; use "
                f"{micro // self.degree * self.degree}"
            ]
        if rows < micro:
            return [
                f"micro_batches: {micro} are more than the {rows} sequences of a device (batch.size "
                f"{context.recipe.batch.size}); use a larger batch.size"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        import torch

        from preheat.models import hf, pipeline_split

        count, stage_rank = self.degree * self._each, build.mesh.index(Axis.PIPELINE)
        split = self._split(build.recipe, part.config, build.tags)
        course, cuts, costs = split.course, split.cuts, split.costs
        # The stages of this device, e.g. 1 and 3 of four on the second of two devices.
        numbers = [number for number, device in enumerate(split.devices) if device == stage_rank]
        # Later techniques of the build apply to each of these parts.
        build.parts["trained"] = [pipeline_split.cut(part, course, cuts, number) for number in numbers]
        if self.micro_batches is not None:
            build.state.accumulation = self.micro_batches
        if hf.embedding(part).weight is hf.head(part).weight:
            self._tie(build, stage_rank)
        # Hidden states have the embedding's dtype, which residual connections keep; or the dtype in which it is
        # gathered, or to which trained weights are cast later.
        cast = Tag.BF16_WEIGHTS in build.tags and Tag.FROZEN_BASE not in build.tags
        half = cast or Tag.BF16_ALL_GATHER in build.tags
        dtype = torch.bfloat16 if half else hf.embedding(part).weight.dtype
        runner = _Runner(build, self.schedule, dict(zip(numbers, build.trained, strict=True)), count, dtype)
        forward_backward: SlotFunction = runner.forward_backward
        for wrap in build.hooks.around_batches:
            forward_backward = wrap(forward_backward)
        build.claim(Slot.FORWARD_BACKWARD, forward_backward, self.name())
        build.parallel.pass_forward = runner.pass_forward
        build.claim(Slot.MODEL_LOSS, runner.forward, self.name())
        # How far the most expensive stage exceeds the mean.
        share = max(costs) * count / sum(costs) - 1
        # Stages differ in layers: the last also computes the head and the loss.
        layer_counts = ", ".join(str(len(cut)) for cut in cuts)
        # In a full pipeline, all devices wait for the busiest one.
        slowdown = max(map(split.cost, range(self.degree))) / split.cost(stage_rank)
        build.parallel.bubble_fraction = lambda micro_batches: slowdown * (1 + self.bubble_fraction(micro_batches)) - 1
        return Change(
            f"{len(course.each)} layers in {count} stages of {layer_counts}; the most expensive costs {share:.0%} "
            "more than the mean",
            count,
        )

    def _split(self, recipe: Recipe, config: PretrainedConfig, tags: frozenset[Tag]) -> _Split:
        """Splits the layers of a model into stages.

        Raises:
            RecipeError: the model cannot be split.
        """
        from preheat.models import moe, pipeline_split
        from preheat.ops.distributed.pipelining import ranks_of

        count = self.degree * self._each
        try:
            # The plain configuration is profiled: cuts must be the same on all devices and before anything is
            # allocated.
            course = pipeline_split.observe(config, recipe.batch.seq_len, trust=recipe.model.trust_remote_code)
            # A backward pass costs two forward passes. Recomputation repeats that of the layers, and so does the pass
            # that counts the tokens of experts for their balance loss.
            passes = 3 + (Tag.RECOMPUTATION in tags) + (moe.coefficient(config.get_text_config()) > 0)
            after = course.after * 3 / passes
            devices = ranks_of(count, self.degree, self.schedule)
            cuts = pipeline_split.balance_stages(course.each, count, before=course.before, after=after, devices=devices)
        except ValueError as error:
            raise RecipeError(f"techniques.{self.name()}: {error}") from None
        costs = [sum(course.each[layer] for layer in cut) + (course.before if cut.start == 0 else 0) for cut in cuts]
        costs[-1] += after
        return _Split(course, cuts, costs, devices)

    def micro_batches_in_flight(self, micro_batches: int) -> float:
        return self._count_in_flight(0, micro_batches)

    def _count_in_flight(self, device: int, micro_batches: int) -> float:
        """Returns the micro-batches whose activations a device holds at most.

        With interleaved as many as its forward passes before the first backward pass, each of one of its stages
        (Narayanan et al. 2021, section 2.2).
        """
        each = self._each
        most: float = self.degree - device
        if self.schedule == "gpipe":
            most = micro_batches
        elif self.schedule == "interleaved":
            most = ((each - 1) * self.degree + 2 * (self.degree - device - 1) + 1) / each
        elif self.schedule == "zero_bubble":
            most = (each * self.degree - device) / each
        elif self.schedule == "zbv":  # a V of two stages on each device: one fills while the other drains
            most = self.degree
        return min(most, micro_batches)

    def fullest_devices(self, context: Context, config: PretrainedConfig) -> set[int]:
        split = self._split(context.recipe, config, context.tags)
        micros = math.prod(t.micro_batch_count() for t in context.recipe.techniques.values())
        layers = [split.layers(device) for device in range(self.degree)]
        # Activations, in those of a layer and micro-batch.
        activations = [len(own) * self._count_in_flight(device, micros) for device, own in enumerate(layers)]
        # A layer with experts has many times the weights of one without.
        weights = [sum(split.course.weights[layer] for layer in own) for own in layers]
        embedding = context.model.vocabulary * context.model.width
        # Later devices with more activations or more weights than the first one, which has the embedding.
        most = {activations.index(max(activations)), weights.index(max(weights))}
        later = {d for d in most if activations[d] > activations[0] or weights[d] - weights[0] > embedding}
        needs_more = any(activations[d] >= activations[0] and weights[d] - weights[0] >= embedding for d in later)
        # The head has logits, which count more in small models.
        head = split.devices[-1]
        return later | {head} if needs_more else later | {head, 0}

    def stages_per_device(self) -> int:
        return self._each

    def bubble_fraction(self, micro_batches: int) -> float:
        """Returns the idle time of a device relative to its compute time.

        (degree - 1) / (micro-batches x stages per device), Narayanan et al. 2021 section 2.2; a third of it if weight
        gradients, a third of the work, fill the bubble (Qi et al. 2024, table 2: zbv, at half the memory, leaves about
        as much).
        """
        share = (self.degree - 1) / (micro_batches * self._each)
        return share / 3 if self.schedule in SPLIT_BACKWARD else share

    def _tie(self, build: Build, stage_rank: int) -> None:
        """Ties the first stage's embedding to the last stage's head: sums their gradients, counts their norm once."""
        from preheat.models import hf
        from preheat.ops.distributed.dtensor_utils import local
        from preheat.ops.distributed.pipelining import add_copies

        # The stages in between have neither embedding nor head.
        if stage_rank not in (0, self.degree - 1):
            return
        part: nn.Module = build.trained[0 if stage_rank == 0 else -1]
        if stage_rank != 0:
            # The norm counts a shared matrix once, on the first stage.
            weight = hf.embedding(part).weight
            build.parallel.duplicated_params |= {name for name, p in part.named_parameters() if p is weight}

        def add(build: Build) -> None:
            # On the last stage, too, the shared matrix is found under the embedding's name.
            embedding: Any = hf.embedding(part)
            grad = embedding.weight.grad
            if grad is not None:
                add_copies([local(grad)], self.degree - 1 - stage_rank, build.mesh.group(Axis.PIPELINE))

        # At TIE, after REDUCE: each copy has been summed over its data-parallel devices before.
        build.hooks.finish_gradients.append((Finish.TIE, add))

    def period(self) -> int:
        # One more layer for each stage.
        return self.degree * self._each

    def micro_batch_count(self) -> int:
        return self.micro_batches or 1  # without it, gradient accumulation states them

    def options(self, context: Context) -> Iterable[Technique]:
        world = math.prod(context.sizes.values())
        # Two stages on a device, as in interleaved and zbv, need two layers.
        degrees = [n for n in (2, 4, 8, 16, 32) if world % n == 0 and 2 * n <= context.model.layers] or [self.degree]
        schedules: tuple[Literal["1f1b", "interleaved", "zero_bubble", "zbv"], ...] = (
            "1f1b",
            "interleaved",
            "zero_bubble",
            "zbv",
        )
        return [replace(self, degree=n, schedule=schedule, stages=None) for n in degrees for schedule in schedules]
