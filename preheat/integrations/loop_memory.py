"""Memory that the loops of other trainers take and preheat's own does not: it plans and trains rows of full length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from preheat.core import Phase
from preheat.core.plan import Interval, Plan
from preheat.integrations.applied import applied_to

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["TILE", "LoopMemory", "add_loop_memory", "count_mask_bytes", "count_tile_bytes"]

TILE = (4096, 32768)
"""Tokens and vocabulary of a tile of logits of TRL 1.16 (trl/kernels/chunked_logprob.py, trl/trainer/utils.py)."""
_PAGE = 4096
_COPIES = 5
"""Copies of a tile in fp32 that its operators make on devices without Triton (chunked_logprob.py, _backward_tile)."""


@dataclass(frozen=True)
class LoopMemory:
    """Bytes of a loop beyond those of its recipe.

    Attributes:
        masks: of padding masks, while activations are there.
        loss: while the loss is computed; negative if it takes less than the recipe's.
        sparse: a buffer of the loss is used in part, and preheat's heap would make all of it resident.
    """

    masks: int = 0
    loss: int = 0
    sparse: bool = False


def count_mask_bytes(
    model: nn.Module, core: PreTrainedModel, *, rows: int, length: int, itemsize: int, recomputes: bool
) -> int:
    """Returns the bytes that transformers' attention keeps for padded rows beyond those of rows of full length.

    torch's fused attention takes a mask [rows, 1, length, length] as numbers, and each layer keeps its own copy for the
    backward pass. With a mask it does not take grouped keys and values either, so those are repeated for all heads.

    Args:
        model: the loop's model, to which `accelerate_trainer` may have been applied.
        core: the transformers model in it.
        rows: sequences of a micro-batch.
        itemsize: bytes of an element that attention computes with.
        recomputes: layers are recomputed, so one layer's are there at a time.
    """
    text: Any = core.config.get_text_config()
    if core.config._attn_implementation != "sdpa" or applied_to(model).drops_padding_masks:
        return 0
    layers = 1 if recomputes else text.num_hidden_layers
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    # The mask as booleans is there once.
    mask = rows * length * length
    repeated = 2 * rows * length * (heads - shared) * width * itemsize
    return mask + layers * (mask * itemsize + repeated)


def count_tile_bytes(tokens: int, vocabulary: int, *, itemsize: int, cuda: bool, narrow: bool) -> int:
    """Returns the bytes of TRL's loss beyond those of the technique `chunked_loss`, with which it is planned.

    TRL's buffer has 32,768 columns, also for a smaller vocabulary: a GPU holds all, a CPU the pages that are used.

    Args:
        narrow: the buffer is as wide as the vocabulary, by `accelerate_trainer`.

    Example:
        >>> count_tile_bytes(4096, 32768, itemsize=2, cuda=True, narrow=False)
        0
    """
    rows, columns = min(tokens, TILE[0]), TILE[1]
    used = min(vocabulary, columns) * itemsize
    width = columns * itemsize
    if narrow:
        width = used
    elif not cuda:
        width = min(width, math.ceil(used / _PAGE) * _PAGE)
    planned = min(tokens, 4096 if cuda else 512) * vocabulary * itemsize
    copies = 0 if cuda else _COPIES * rows * min(vocabulary, columns) * 4
    return rows * width + copies - planned


def add_loop_memory(plan: Plan, extra: LoopMemory) -> Plan:
    """Returns a plan with the memory that its loop takes beyond the recipe's."""
    gib = 2**30
    added: dict[str, dict[str, float]] = {
        Phase.FORWARD: {"activations": extra.masks / gib},
        Phase.HEAD_AND_LOSS: {"activations": extra.masks / gib, "temporary": extra.loss / gib},
        Phase.BACKWARD: {"activations": extra.masks / gib},
    }
    memories = {
        phase: {name: max(size + added.get(phase, {}).get(name, 0.0), 0.0) for name, size in memory.items()}
        for phase, memory in plan.phase_memory.items()
    }
    phases = {phase: peak + sum(added.get(phase, {}).values()) for phase, peak in plan.phases.items()}
    peak_phase = max(phases, key=lambda phase: phases[phase])
    peak = phases[peak_phase]
    more = peak - plan.peak_gib
    low, high = (bound * peak / plan.peak_gib for bound in plan.peak_gib_interval)
    return replace(
        plan,
        peak_gib=peak,
        peak_gib_interval=Interval(low, high),
        allocated_gib=plan.allocated_gib + more,
        reserved_gib=plan.reserved_gib + more,
        memory=memories[peak_phase],
        phases=phases,
        phase_memory=memories,
        peak_phase=peak_phase,
    )
