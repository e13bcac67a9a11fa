"""The dry run against closed forms."""

from __future__ import annotations

import pytest

from preheat.planning import allocator
from preheat.planning.allocator import Heap, replay
from preheat.planning.observe import observe
from preheat.planning.plan import steps_of
from preheat.recipe import override

from ..conftest import DEVICE, tiny

LAYERS, WIDTH, FEED_FORWARD, VOCABULARY, HEADS, KV = 3, 32, 64, 96, 4, 2


def parameters() -> int:
    head_dim = WIDTH // HEADS
    attention = WIDTH * HEADS * head_dim * 2 + WIDTH * KV * head_dim * 2
    layer = attention + 3 * WIDTH * FEED_FORWARD + 2 * WIDTH
    return 2 * VOCABULARY * WIDTH + LAYERS * layer + WIDTH


@pytest.mark.parametrize(("mode", "weight", "moments"), [("fp32", 4, 8), ("bf16", 4, 8), ("bf16_weights", 2, 8)])
def test_states_are_the_closed_form(mode: str, weight: int, moments: int) -> None:
    seen = observe(override(tiny(), f"techniques.mixed_precision.mode={mode}"), vocabulary=96, device=DEVICE)
    assert seen.parameters == seen.trained == parameters()
    at = seen.categories["update"]
    slack = 64 * 64  # each tensor is rounded up to 64 bytes; step counters and rotary tables
    assert weight * parameters() <= at["parameters"] <= weight * parameters() + slack
    assert weight * parameters() <= at["gradients"] <= weight * parameters() + slack
    assert moments * parameters() <= at["optimizer"] <= moments * parameters() + slack


def test_flops_are_six_a_parameter_and_token_plus_attention() -> None:
    seen = observe(tiny(rows=4, length=32), vocabulary=96, device=DEVICE)
    tokens = 4 * 32
    matrices = parameters() - VOCABULARY * WIDTH - (2 * LAYERS + 1) * WIDTH  # the embedding is looked up, norms are no products
    attention = 2 * 2 * 4 * 32 * 32 * WIDTH * LAYERS  # scores and values, forward
    assert seen.model_flops == 6 * matrices * tokens + 3 * attention


def test_checkpointing_computes_one_forward_of_the_layers_again_and_selective_less() -> None:
    none, full, selective = (
        observe(override(tiny("{efficient_attention: {}}"), *more), vocabulary=96, device=DEVICE)
        for more in (
            [],
            ["techniques.activation_checkpointing.mode=full"],
            ["techniques.activation_checkpointing.mode=selective"],
        )
    )
    again = sum(full.flops.values()) - sum(none.flops.values())
    head = 2 * VOCABULARY * WIDTH * 4 * 32
    forward = (none.model_flops - 3 * head) / 3.17  # attention's backward is 2.5 times its forward, products' twice
    assert 0.8 * forward < again <= 1.05 * forward
    assert sum(none.flops.values()) <= sum(selective.flops.values()) < sum(full.flops.values())
    assert full.peak["backward"] < selective.peak["backward"] < none.peak["backward"]
    assert full.model_flops == none.model_flops, "what is computed again is no work of the model"


def test_lora_keeps_state_for_the_adapters_alone() -> None:
    seen = observe(tiny("{lora: {rank: 2}}"), vocabulary=96, device=DEVICE)
    assert seen.trained < seen.parameters / 4
    assert seen.categories["update"]["optimizer"] < seen.categories["update"]["parameters"] / 2


def test_accumulation_lowers_activations_and_keeps_the_work() -> None:
    whole = observe(tiny(rows=12, length=64), vocabulary=96, device=DEVICE)
    parts = observe(tiny("{gradient_accumulation: {steps: 6}}", rows=12, length=64), vocabulary=96, device=DEVICE)
    assert parts.model_flops == whole.model_flops
    assert parts.tokens == whole.tokens == 12 * 64
    assert parts.peak["backward"] < 0.6 * whole.peak["backward"]


@pytest.mark.parametrize(
    ("stop", "rows", "steps"),
    [("{steps: 7}", None, 7), ("{tokens: 1000}", None, 8), ("{epochs: 1.5}", 10, 4), ("{steps: 9, epochs: 1}", 10, 3)],
)
def test_the_length_of_a_run(stop: str, rows: int | None, steps: int) -> None:
    assert steps_of(override(tiny(), f"stop={stop}"), rows) == steps


def test_the_heap_joins_and_reuses_what_is_freed_and_maps_what_is_large() -> None:
    heap = Heap()
    for block in range(3):
        heap.allocate(block, 64 << 10)
    grown = heap.end
    heap.free(0)
    heap.free(1)  # joined with its neighbour: room for one block of the two sizes together
    heap.allocate(3, 120 << 10)
    assert (heap.end, heap.mapped) == (grown, 0)
    heap.allocate(4, 8 << 20)
    heap.free(4)
    assert (heap.end, heap.mapped) == (grown, 0)
    assert heap.resident > 8 << 20  # the heap does not shrink
    heap.allocate(5, 64 << 20)
    assert heap.mapped >= 64 << 20
    heap.free(5)
    assert heap.mapped == 0


@pytest.mark.parametrize(("taken", "grows"), [(0.0, False), (1.0, True)])
def test_a_hole_heals_unless_the_rest_beside_a_block_is_taken(
    monkeypatch: pytest.MonkeyPatch, taken: float, grows: bool
) -> None:
    monkeypatch.setattr(allocator, "_TAKEN", taken)
    heap = Heap()
    for block in range(2):
        heap.allocate(block, 100 << 10)
    end = heap.end
    heap.free(0)
    heap.allocate(2, 60 << 10)  # in the hole
    heap.free(2)
    heap.allocate(3, 99 << 10)
    assert (heap.end > end) is grows


def test_a_block_from_the_heaps_end_leaves_a_hole_too_short_for_its_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_TAKEN", 0.0)
    heap = Heap()
    for block in range(2):
        heap.allocate(block, 64 << 10)
    end = heap.end
    heap.free(0)
    heap.allocate(2, 64 << 10)
    assert heap.end > end


def test_what_is_mapped_is_fresh_in_every_step_and_what_the_heap_holds_in_the_first_only() -> None:
    step = [(1, 64 << 20, "forward"), (2, 1 << 16, "forward"), (2, -(1 << 16), "backward"), (1, -(64 << 20), "update")]
    use = replay([(0, 1 << 16, "load"), *step, (3, 1 << 30, "evaluation")])
    assert 64 << 20 <= use.fresh < 65 << 20
    assert 64 << 20 <= use.peak < 65 << 20
