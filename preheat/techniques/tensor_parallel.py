"""Tensor parallel: splits the rows or columns of every matrix, and thus the attention heads, across devices.

What: follows transformers' plan of the model with torch's DTensor styles: input projections of attention and
feed-forward are split by outputs, output projections by inputs, so that each layer needs two all-reduces forward and
two backward. `sequence_parallel` splits the activations between blocks along the sequence: the all-reduces become
reduce-scatters and all-gathers of the same bytes, and norms and saved activations are sharded too; `regather` gathers a
block's input again in backward instead of keeping it unsharded. `loss_parallel` computes each device's shard of the
vocabulary, some positions at a time: two numbers per position are sent, and no logits. In a block with experts each
device routes all tokens alike and computes its part of every expert's width, and of the shared experts'; the partial
results are summed as in a dense block. `expert_parallel` may split the experts among other devices at the same time.
Helps: weights, gradients, optimizer and most activations shrink with the degree, at any batch size.
Hurts: communication blocks every layer and grows with the batch, so it needs the fastest links (within a host) and few
devices; small matmuls run slower, above all those of narrow experts, and each device holds a copy of a block's tokens
for each of their experts (`expert_parallel` alone sends them instead). Routers and norms are replicated, and so is
attention if the plan of a family gathers fused or normalized projections (Phi-3, OLMo 2). Recurrent layers, latent
attention and attention that the plan leaves out are computed whole on each device, with all their weights, gradients
and optimizer states. Before each update the devices take the first one's gradients of replicated weights: those of a
GPU's kernels differ by rounding, and copies would drift apart. chunked_loss and liger's loss require
`loss_parallel: false`.
Source: Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053); sequence parallel: Korthikanti et al. 2022
(arXiv:2205.05198).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Axis, Build, Change, Context, Finish, Numerics, Searchable, Slot, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError
from preheat.recipe import NonNegativeInt

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

__all__ = ["TensorParallel", "parallelize"]


def parallelize(
    model: PreTrainedModel, mesh: DeviceMesh, *, sequence: bool = False, vocabulary: bool = True, regather: bool = False
) -> int:
    """Shards a transformers model's matrices across a mesh as DTensors, in place; works on meta too.

    Before each update, two functions of `preheat.ops.distributed.tensor_parallel` finish the gradients:
    `broadcast_replicated(model.parameters(), mesh)` makes those of replicated weights equal on all ranks, then
    `sum_partial(model.parameters())` all-reduces the partial ones.

    Args:
        mesh: torch's one-dimensional mesh.
        sequence: shard activations between blocks along the sequence, whose length must be divisible. transformers
            would derive position ids and masks from the length of one device's shard: pass position ids, and use
            attention kernels that create no mask.
        vocabulary: shard the rows of embedding and head too.
        regather: with `sequence`, save only each device's shard of a block's input, and gather it again in backward.

    Returns:
        The number of sharded matrices.

    Raises:
        ValueError: the model has no plan, or a size is not divisible; the message names it.

    Example:
        >>> parallelize(model, init_device_mesh("cuda", (8,)))  # doctest: +SKIP
    """
    from preheat.models import hf, tp_plan
    from preheat.ops.distributed import tensor_parallel

    if problems := tp_plan.find_problems(hf.read_facts(model.config), mesh.size()):
        raise ValueError(problems[0])
    return tensor_parallel.parallelize(
        model, tp_plan.tp_styles(model), mesh, sequence=sequence, vocabulary=vocabulary, regather=regather
    )


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Searchable):
    stage: ClassVar[Stage] = Stage.PARALLEL
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="shards matrices across devices, and there is one")
    unsupported_for_images: ClassVar[str] = "has no plan for a vision tower; use fsdp"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OVER_LOGITS})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.TENSOR_PARALLEL, Tag.SEQUENCE_PARALLEL})
    conflicts: ClassVar[frozenset[Tag]] = frozenset(
        {
            Tag.MODIFIED_BASE,  # needs full matrices, and each device has a shard
            Tag.QUANTIZED_BASE,  # packed weights cannot be sharded
            Tag.FP8_COMPUTE,  # uses scales of full matrices
            Tag.COMPILED_LAYERS,  # torch 2.13 loses the DTensor's layout between compiled layers: backward fails
            Tag.FUSED_LAYERS,  # kernels without DTensor support
            Tag.STEP_IN_BACKWARD,  # an update in backward would come before partial gradients are summed
            Tag.PER_HEAD_PATTERN,  # a per-head pattern would take a device's heads for all heads
        }
    )
    roles: ClassVar[frozenset[str]] = frozenset({"trained", "reference"})

    degree: NonNegativeInt = 0
    """Devices that each matrix is split across; 0: all that other techniques leave. It must divide the heads, the
    key-value heads and the width of experts, and should not exceed the devices of a host."""
    sequence_parallel: bool = False
    """Shard activations between attention and feed-forward along the sequence: the same communication, less memory. The
    length must divide by the degree."""
    regather: bool = False
    """With sequence_parallel and without checkpointing: save each device's shard of the inputs of attention and
    feed-forward, and gather it again in backward, while their gradients are computed. A quarter more is sent. Blocks
    with experts save their gathered input."""
    loss_parallel: bool = True
    """Each device computes the logits of its shard of the vocabulary only; false gathers logits (or, for chunked_loss
    and liger, the head) on each device."""
    rows: NonNegativeInt = 512
    """With loss_parallel: positions of logits in memory at a time; 0: all, in fp32 until their gradient is computed, as
    torch's own loss_parallel does. 0 needs the most memory."""

    def claimed(self) -> frozenset[Slot]:
        return self.owns if self.loss_parallel else frozenset()

    def provided(self) -> frozenset[Tag]:
        return self.provides if self.sequence_parallel else self.provides - {Tag.SEQUENCE_PARALLEL}

    def degrees(self) -> Mapping[Axis, int]:
        return {Axis.TENSOR: self.degree}

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        from preheat.models import tp_plan

        model, recipe = context.model, context.recipe
        # After the mesh is formed: a degree of 0 has become a number.
        degree = context.sizes[Axis.TENSOR]
        if degree < 2:
            return [
                "shards matrices across devices, and there is one; start several with --nproc (or plan with --count)"
            ]
        problems = tp_plan.find_problems(model, degree)
        split = model.expert_width // degree
        if context.device.kind == "cuda" and not problems and model.expert_width % 8 == 0 and split % 8:
            problems.append(
                f"degree: leaves {split} of an expert's width of {model.expert_width} on each device, and a GPU's "
                "grouped matmul needs a multiple of 8; use a lower degree"
            )
        if self.regather and not self.sequence_parallel:
            problems.append(
                "regather: nothing is gathered without sequence_parallel; set that to true, or leave regather out"
            )
        if self.regather and Tag.FROZEN_BASE in context.tags:
            problems.append("regather: frozen maps save no input, and adapters save all of theirs; leave it out")
        if self.regather and Tag.RECOMPUTATION in context.tags:
            problems.append(
                "regather: recomputed layers gather again anyway, and would keep the shards too; leave it out"
            )
        if self.sequence_parallel and recipe.batch.seq_len % degree:
            problems.append(
                f"sequence_parallel: batch.seq_len {recipe.batch.seq_len} does not divide by "
                f"degree {degree}; use {recipe.batch.seq_len // degree * degree}"
            )
        if self.sequence_parallel and Tag.GROWING_LENGTH in context.tags:
            problems.append(
                "sequence_parallel: the length changes from step to step, and "
                "each must divide by the degree; set it to false"
            )
        others = [t.name() for t in recipe.techniques.values() if t is not self and Slot.OVER_LOGITS in t.claimed()]
        # Both compute the logits, and there is one such slot.
        if self.loss_parallel and others:
            problems.append(
                "loss_parallel: makes logits some positions at a time by itself; "
                f"leave {others[0]} out, or set loss_parallel: false"
            )
        losses = [t.name() for t in recipe.techniques.values() if Slot.ROW_LOSS in t.claimed()]
        if self.loss_parallel and not self.rows and losses:
            problems.append(f"rows: 0 supports plain cross entropy only; leave {losses[0]} or rows out")
        if self.loss_parallel and Tag.CLASSIFICATION_HEAD in context.tags:
            problems.append("loss_parallel: the head is over a few classes, which are not sharded; set it to false")
        elif self.loss_parallel and model.vocabulary % degree:
            problems.append(
                f"loss_parallel: a vocabulary of {model.vocabulary:,} rows does not divide by degree {degree}; set it "
                "to false, which keeps embedding and head whole, or state model.vocab_size for a new model"
            )
        # Optimizers that update element by element work on shards; others need full rows, blocks or matrices.
        optimizers = [
            t.name()
            for t in recipe.techniques.values()
            if Slot.OPTIMIZER in t.claimed() and Tag.ELEMENTWISE_UPDATE not in t.provided()
        ]
        problems += [
            f"{name} brings an optimizer that does not support sharded weights; use plain AdamW" for name in optimizers
        ]
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models import hf, tp_plan
        from preheat.ops.distributed import tensor_parallel

        degree = build.mesh.size(Axis.TENSOR)
        # Embedding and head are split by rows of the vocabulary, both or neither.
        divides = all(weight.shape[0] % degree == 0 for weight in hf.end_weights(part))
        vocabulary = divides and Tag.CLASSIFICATION_HEAD not in build.tags
        _reject_dropout(part)
        try:
            layers, whole_mixers = tp_plan.count_coverage(part, tp_plan.tp_styles(part))
            count = parallelize(
                part,
                build.mesh.submesh(Axis.TENSOR),
                sequence=self.sequence_parallel,
                vocabulary=vocabulary,
                regather=self.regather,
            )
        except ValueError as error:
            raise RecipeError(f"techniques.{self.name()}: {error}") from None
        if self.loss_parallel:
            # The loss multiplies by the head's shard itself, so an adapter on the head would be ignored.
            hf.require_plain_head(part, self.name())
            if not self.rows and hf.read_facts(part.config).logit_softcap is not None:
                raise RecipeError(f"techniques.{self.name()}: rows: 0 does not support capped logits; leave it out")
            build.claim(
                Slot.OVER_LOGITS, functools.partial(tensor_parallel.sum_sharded_loss, rows=self.rows), self.name()
            )
        # The hook covers all parameters; the technique applies once for each part.
        finish = (Finish.REDUCE, _finish)
        if finish not in build.hooks.finish_gradients:
            build.hooks.finish_gradients.append(finish)
        parts = [f"{count} matrices sharded across {degree} devices"]
        if whole_mixers:
            total = len(hf.find_anatomy(part).layers)
            parts.append(f"{layers} of {total} layers split, {whole_mixers} token mixers computed whole on each device")
        parts += ["activations between blocks split along the sequence"] * self.sequence_parallel
        parts += ["gathered again in backward"] * self.regather
        at_once = f"{self.rows} positions at a time" if self.rows else "all positions at once"
        parts += [f"logits of 1/{degree} of the vocabulary each, {at_once}"] * self.loss_parallel
        parts += ["embedding and head whole"] * (not vocabulary)
        return Change("; ".join(parts), count)

    def options(self, context: Context) -> Iterable[Technique]:
        world = math.prod(context.sizes.values())
        # 8: the devices of a usual host; beyond it, links are slower.
        degrees = [n for n in (2, 4, 8) if world % n == 0] or [self.degree]
        return [replace(self, degree=n, sequence_parallel=cut) for n in degrees for cut in (False, True)]

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        milder = [replace(self, sequence_parallel=True), replace(self, sequence_parallel=True, regather=True)]
        # Steps that these settings have taken already are skipped.
        return [rung for rung in milder[self.sequence_parallel + self.regather :] if not rung.check(context)]


def _finish(build: Build) -> None:
    from preheat.ops.distributed.tensor_parallel import broadcast_replicated, sum_partial

    # In this order: sums are equal on all ranks, and replicated from then on.
    broadcast_replicated((p for _, p in build.parameters()), build.mesh.submesh(Axis.TENSOR))
    sum_partial(p for _, p in build.parameters())


def _reject_dropout(model: PreTrainedModel) -> None:
    """Raises an error if a module uses dropout: the ranks would drop different elements than one device would."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise RecipeError(
                f"techniques.tensor_parallel: {name} drops {module.p:g} of its input at random, at other positions on "
                "each device; set dropout to 0 under model.config"
            )
