"""Context parallel: splits the sequence dimension across devices, for longer sequences or smaller activations.

What: each device holds a shard of every sequence, computes everything but attention locally, and exchanges data with
the other ranks for attention. `ulysses`: an all-to-all gives each device all positions of some heads, for any attention
kernel, and a second all-to-all returns its positions. `ring`: each device keeps its queries while keys and values
travel around the ring, overlapped with compute; sequences are sharded in zigzag order, which balances the work under a
causal mask. Both keep packed documents apart and send grouped keys and values without expanding them (ulysses repeats
them if there are fewer than devices). Attention sinks are split with their heads, or are the first term of the ring's
sums. Recurrent layers need `ulysses`: an all-to-all gives each device all positions of some heads of Mamba-2, gated
delta rules and short convolutions.
Helps: activations shrink by the number of devices when a sequence is too long for one device.
Hurts: sends more than data parallelism, in every layer, so prefer data parallelism while there are enough sequences.
Recurrent layers whose heads cannot be split (Jamba, Kimi Linear, MiniMax, or a degree that does not divide the heads)
get all positions by an all-gather and are computed whole on each device. The ring kernel computes attention block by
block: many short documents make it slow. The ring has not yet been run on CUDA.
Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509); Liu et al. 2023, Ring Attention (arXiv:2310.01889);
balanced for causal masks: Brandon et al. 2023, Striped Attention (arXiv:2311.09431), with zigzag sharding as in Llama 3
(arXiv:2407.21783).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import Axis, Build, Change, Context, Numerics, Order, Searchable, Slot, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError
from preheat.recipe import Bound

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig

    from preheat.core import Batch
    from preheat.recipe import Recipe

__all__ = ["ContextParallel", "cut_rows", "shard_attention"]


def cut_rows(batch: Batch, degree: int, rank: int, *, zigzag: bool) -> Batch:
    """Returns a device's shard of each sequence: tokens, labels and positions. Mask and weight are unchanged.

    Args:
        zigzag: True: two chunks, one from either end (`ring`); False: one chunk (`ulysses`).

    Example:
        >>> import torch
        >>> from preheat.core import Batch, MaskSpec
        >>> places = torch.arange(8)[None]
        >>> cut_rows(Batch(places, places, places, MaskSpec(), 8), 2, 0, zigzag=True).tokens
        tensor([[0, 1, 6, 7]])
    """
    from preheat.ops.distributed import context_parallel

    return context_parallel.cut_rows(batch, degree, rank, zigzag=zigzag)


def shard_attention(
    kernel: Callable[..., Tensor], group: ProcessGroup, *, kind: Literal["ulysses", "ring"]
) -> Callable[..., Tensor]:
    """Wraps an attention kernel for sequences sharded by `cut_rows` across a group: (q, k, v, mask, scale) -> out.

    Args:
        kernel: single-device attention.
        group: a torch.distributed process group; its ranks hold the shards in order.

    Raises:
        ValueError: `ring` with a kernel that returns no partial results.

    Example:
        >>> attend = shard_attention(sdpa_attention, mesh.get_group("context"), kind="ulysses")  # doctest: +SKIP
    """
    from preheat.models.sinks import attend_with_sinks
    from preheat.ops.distributed.context_parallel import UlyssesAttention
    from preheat.ops.distributed.ring_attention import RingAttention

    return RingAttention(kernel, group) if kind == "ring" else UlyssesAttention(kernel, group, attend_with_sinks)


_MIN_POSITIONS = 2048  # positions per device below which data parallelism is better
# Positions per device from which a ring's compute hides its communication
_RING_POSITIONS = 4096


@dataclass(frozen=True, kw_only=True)
class ContextParallel(Searchable):
    stage: ClassVar[Stage] = Stage.PARALLEL
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="context 2 does not multiply to 1 device")
    unsupported_for_images: ClassVar[str] = (
        "splits sequences, and would split the images in them; use fsdp with smaller micro-batches"
    )
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.ATTENTION_EXCHANGE})

    degree: Annotated[int, Bound(2)] = 2
    """Number of devices that each sequence is split across."""
    kind: Literal["auto", "ulysses", "ring"] = "auto"
    """How attention exchanges data; auto: ring if the heads do not divide by the degree, or if it sends less and each
    device has 4,096 positions or more; otherwise ulysses, as for all models with recurrent layers."""

    def degrees(self) -> Mapping[Axis, int]:
        return {Axis.CONTEXT: self.degree}

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> None:
        from preheat.models.conversions.architecture import find_longest_rope

        if kind := find_longest_rope(config):
            raise ValueError(
                f"degree: rotary positions of the kind {kind} depend on the longest position of a sequence, and each "
                "device has only a part of it; use rope_scaling with kind: yarn or linear, or leave this out"
            )

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        recipe, problems = context.recipe, list[str]()
        recurrent = context.model.recurrent_layers > 0
        if recurrent and self.kind == "ring":
            problems.append(
                "kind: ring gives each device an early and a late part of a sequence, and the recurrent layers of "
                f"{context.model.family} read sequences in order; use kind: ulysses"
            )
        if context.model.sinks and _has_shifted_groups(context):
            problems.append(
                f"attention sinks of {context.model.family} are not split between shifted groups of heads; leave "
                "shifted_groups out"
            )
        if Tag.REDUCED_GRADIENTS not in context.tags:
            problems.append(
                "each device has the gradients of its own positions, and nothing sums them; add data_parallel or fsdp"
            )
        if recipe.batch.seq_len < 2 * self.degree:
            problems.append(
                f"degree: {self.degree} devices cannot split sequences of {recipe.batch.seq_len} tokens; use at most "
                f"{recipe.batch.seq_len // 2}"
            )
        objectives = [t.name() for t in recipe.techniques.values() if Slot.OBJECTIVE in t.claimed()]
        if objectives:
            problems.append(
                f"the loss of {objectives[0]} is over whole sequences, and each device has a part of each; "
                "leave one out"
            )
        heads = self._count_heads(context)[0]
        if (self.kind == "ulysses" or (recurrent and self.kind == "auto")) and heads % self.degree:
            problems.append(
                f"kind: ulysses cannot split {heads} heads across {self.degree} devices; use a degree that divides "
                f"them{'' if recurrent else ', or kind: ring'}"
            )
        return problems

    def _count_heads(self, at: Context | Build) -> tuple[int, int]:
        """Returns the query heads and key-value heads that take part in one exchange."""
        # Tensor parallelism has split the heads before: an exchange is among its remaining ones.
        apart = (at.sizes if isinstance(at, Context) else at.mesh.sizes)[Axis.TENSOR]
        if _has_shifted_groups(at):
            apart *= 2  # shifted groups process the two halves of the heads separately
        # Fewer key-value heads than devices are repeated, so at least one takes part.
        return at.model.heads // apart, max(1, at.model.kv_heads // apart)

    def _choose_kind(self, build: Build) -> tuple[Literal["ulysses", "ring"], str]:
        """Returns the kind and the reason for it."""
        if self.kind != "auto":
            return self.kind, ""
        from preheat.ops.distributed.context_parallel import ulysses_bytes
        from preheat.ops.distributed.ring_attention import ring_bytes
        from preheat.ops.distributed.ring_attention_blocks import FlashTiles, choose_tiles

        if build.model.recurrent_layers:
            return "ulysses", "recurrent layers read sequences in order"
        heads, shared = self._count_heads(build)
        if heads % self.degree:
            return "ring", f"{heads} heads cannot be split across {self.degree} devices"
        # Per device, rounded up.
        positions = -(-build.recipe.batch.seq_len // self.degree)
        layer: dict[str, Any] = {
            "places": positions,
            "shared": shared,
            "head_dim": build.model.head_dim,
            "degree": self.degree,
        }
        # Elements that a device sends in one layer: the element size would multiply both.
        ulysses, ring = ulysses_bytes(heads=heads, size=1, **layer), ring_bytes(size=1, **layer)
        if positions < _RING_POSITIONS:
            return "ulysses", f"{positions:,} positions on a device are too few to overlap a ring's communication"
        try:
            # A ring combines partial results of blocks; only some kernels return these.
            fused = choose_tiles(build.slot(Slot.ATTENTION_KERNEL)) is FlashTiles
        except ValueError:
            fused = False
        if not fused:
            return "ulysses", "a ring has no fused kernel here"
        return ("ring", "it sends less") if ring < ulysses else ("ulysses", "a ring would send more")

    def apply(self, build: Build, part: nn.Module) -> Change:
        kind, reason = self._choose_kind(build)
        kernel, group = build.slot(Slot.ATTENTION_KERNEL), build.mesh.group(Axis.CONTEXT)
        try:
            # For its error: an unsupported kernel should be reported now, not in the first step.
            shard_attention(kernel, group, kind=kind)
        except ValueError as error:
            fix = (
                "; set efficient_attention.kernel, or a degree that divides "
                f"{self._count_heads(build)[0]} heads for kind: ulysses"
            )
            raise RecipeError(f"techniques.context_parallel.kind: {error}{fix}") from None
        build.claim(Slot.ATTENTION_EXCHANGE, functools.partial(shard_attention, group=group, kind=kind), self.name())
        # A zigzag gives each device an early and a late chunk, whose causal masks balance.
        rank, zigzag = build.mesh.index(Axis.CONTEXT), kind == "ring"
        # The labels are shifted already: the last label of a shard is the first token of the next one.
        if part is build.trained[0]:  # once, if a pipeline has several stages on a device
            cut = functools.partial(cut_rows, degree=self.degree, rank=rank, zigzag=zigzag)
            build.hooks.transforms.append((Order.SPLIT, cut))
        layers, mixers = _describe_mixers(build, part, self.degree)
        summary = f"each sequence split across {self.degree} devices, attention of {layers} layers by {kind}"
        return Change(summary + (f" ({reason})" if reason else "") + mixers, build.model.layers, kernel=kind)

    def options(self, context: Context) -> Iterable[Technique]:
        world, length = math.prod(context.sizes.values()), context.recipe.batch.seq_len
        # Only degrees that leave each device enough positions.
        degrees = [n for n in (2, 4, 8, 16) if world % n == 0 and length >= n * _MIN_POSITIONS] or [self.degree]
        return [replace(self, degree=n) for n in degrees]


def _has_shifted_groups(at: Context | Build) -> bool:
    return Tag.ATTENTION_PATTERN in at.tags and Tag.SLIDING_WINDOW not in at.tags


def _describe_mixers(build: Build, part: nn.Module, degree: int) -> tuple[int, str]:
    """Returns the number of layers with attention in a part of a model, and how the devices share recurrent mixers."""
    if not build.model.recurrent_layers:
        return build.model.layers, ""
    from preheat.models import hf, split_mixers
    from preheat.models.token_mixers import find_attentions, find_recurrent_mixers

    layers = list(hf.find_anatomy(part).layers)
    attentions = sum(bool(find_attentions(layer)) for layer in layers)
    mixers = [mixer for layer in layers for mixer in find_recurrent_mixers(layer)]
    split, whole = split_mixers.count_split_mixers(mixers, degree)
    counts = {"with their heads split": split, "computed whole on each device": whole}
    texts = [f"{count} {text}" for text, count in counts.items() if count]
    return attentions, f"; recurrent mixers: {', '.join(texts)}" if texts else ""
