"""Sizes of a model whose matmuls are faster at the next multiple of 64, by the roofline of a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.core.plan import FasterSize
from preheat.planning.speed.flop_formulas import FUSED
from preheat.planning.speed.roofline import parse_output

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.planning.dispatch_recorder import Kernel
    from preheat.planning.observation import Observation
    from preheat.planning.speed.roofline import Roofline
    from preheat.recipe import Recipe

__all__ = ["find_faster_sizes", "list_free_sizes"]

_MULTIPLE = 64
_LEAST = 0.01
"""The least gain that is reported."""


def list_free_sizes(recipe: Recipe, config: PretrainedConfig) -> dict[str, int]:
    """Returns the sizes that the recipe may change, by its keys for them: those of a model without stored weights."""
    model, text = recipe.model, config.get_text_config()
    if model.path is not None:
        return {}
    sizes = {key: getattr(text, key, None) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    # A preset's sizes are changed in its configuration.
    start = "model." if model.preset is None else "model.config."
    return {start + key: size for key, size in sizes.items() if isinstance(size, int)}


def find_faster_sizes(
    observation: Observation, rates: Roofline, seconds: float, sizes: Mapping[str, int]
) -> tuple[FasterSize, ...]:
    """Returns the sizes that are no multiple of 64, if a step is at least 1 % faster at the next multiple.

    The matmuls of the dry run are timed again with the larger size in place of each dimension that is as large.

    Args:
        seconds: of a step.
        sizes: {key: size}.
    """
    faster = []
    for key, size in sizes.items():
        if not size % _MULTIPLE:
            continue
        better = -(-size // _MULTIPLE) * _MULTIPLE
        saved = 0.0
        for kernel, count in observation.kernels.items():
            if _is_matmul(kernel) and any(size in shape for shape in kernel.shapes):
                wider = _widen(kernel, size, better)
                before, after = (rates.kernel_seconds(k, observation) for k in (kernel, wider))
                saved += (before - after) * count
        if saved < seconds and (gain := seconds / (seconds - saved) - 1) >= _LEAST:
            faster.append(FasterSize(key, size, better, gain))
    return tuple(faster)


def _is_matmul(kernel: Kernel) -> bool:
    attends = "attention" in kernel.operator or kernel.operator.startswith(FUSED)
    return bool(kernel.flops) and kernel.where == "device" and not attends


def _widen(kernel: Kernel, size: int, better: int) -> Kernel:
    """Returns the matmul with `better` in place of each dimension of `size`; its bytes grow with its operands."""
    wider = replace(kernel, shapes=tuple(tuple(better if n == size else n for n in shape) for shape in kernel.shapes))
    (rows, columns), inner, _ = parse_output(kernel)
    (more_rows, more_columns), more_inner, _ = parse_output(wider)
    operands = sum(map(math.prod, wider.shapes)) / sum(map(math.prod, kernel.shapes))
    return replace(
        wider,
        flops=kernel.flops * more_rows * more_columns * more_inner // (rows * columns * inner),
        bytes_read=round(kernel.bytes_read * operands),
        bytes_written=kernel.bytes_written * more_rows * more_columns // (rows * columns),
    )
