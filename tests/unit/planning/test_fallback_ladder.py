"""Fallbacks of an out-of-memory error on a GPU, planned without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from preheat import recipe as recipes
from preheat.core import Phase
from preheat.core.run_records import OutOfMemory
from preheat.errors import RunError
from preheat.planning.fallback_ladder import find_fallbacks
from preheat.planning.request import Request
from preheat.recipe import Recipe, override, parse
from preheat.training.recovery.fallback_log import choose_fallback
from preheat.training.resume import compare

from ...conftest import DEVICE
from .test_search import gpu

OFFLOAD = "techniques.optimizer_offload.weights=fp32"


def wide(techniques: str = "{}") -> Recipe:
    """13M parameters and few activations: most of the memory is the optimizer's."""
    return parse(
        "model: {num_layers: 2, hidden_size: 512, num_heads: 4, vocab_size: 2048}\nbatch: {size: 1, seq_len: 64}\n"
        f"stop: {{max_steps: 1}}\ntechniques: {techniques}"
    )


def on_gpu(recipe: Recipe) -> Request:
    rates = gpu(4096)
    return Request(recipe, rates.as_device, rates=rates)


def test_the_optimizer_moves_to_the_host_where_a_gpu_has_too_little_memory() -> None:
    request = on_gpu(wide())
    need = find_fallbacks(request, room=None).present.peak_gib
    failure = OutOfMemory(
        phase=Phase.GRADIENTS, step=3, rank=0, message="out of memory", requested=1 << 20, room=int((need - 0.03) * 2**30),
        overhead=0, in_use={}, allocator={},
    )  # fmt: skip
    ladder, fallback = choose_fallback(request, failure)
    assert ladder is not None
    assert fallback.set == (OFFLOAD,)
    # Weights that are rounded are no fallback, although they need less.
    assert not any("bf16" in change for f in [*ladder.fallbacks, *ladder.skipped] for change in f.set)
    # A run may be resumed with it and without it, but not with other weights.
    with_it = override(wide(), OFFLOAD)
    assert compare(with_it, recipes.dump(wide()))
    with pytest.raises(RunError, match=r"techniques\.optimizer_offload"):
        compare(override(wide(), "techniques.optimizer_offload.weights=bf16"), recipes.dump(wide()))


def test_another_optimizer_and_a_cpu_have_no_such_fallback() -> None:
    other = find_fallbacks(on_gpu(wide("{lion: {}}")), room=None)
    cpu = find_fallbacks(replace(on_gpu(wide()), device=DEVICE), room=None)
    for ladder, reason in ((other, "lion"), (cpu, "needs a CUDA device")):
        assert not any(OFFLOAD in fallback.set for fallback in ladder.fallbacks)
        assert reason in next(skipped.reason for skipped in ladder.skipped if OFFLOAD in skipped.set)
