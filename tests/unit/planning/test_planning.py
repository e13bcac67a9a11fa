"""The dry run against closed forms."""

from __future__ import annotations

import platform
import random
import subprocess
import sys

import pytest

from preheat.planning.dry_run import observe
from preheat.planning.memory.cpu_heap import Heap, replay
from preheat.planning.plan import count_steps
from preheat.planning.request import Request
from preheat.recipe import override

from ...conftest import DEVICE, tiny

LAYERS, WIDTH, FEED_FORWARD, VOCABULARY, HEADS, KV = 3, 32, 64, 96, 4, 2


def parameters() -> int:
    head_dim = WIDTH // HEADS
    attention = WIDTH * HEADS * head_dim * 2 + WIDTH * KV * head_dim * 2
    layer = attention + 3 * WIDTH * FEED_FORWARD + 2 * WIDTH
    return 2 * VOCABULARY * WIDTH + LAYERS * layer + WIDTH


@pytest.mark.parametrize(("mode", "weight", "moments"), [("fp32", 4, 8), ("bf16", 4, 8), ("bf16_weights", 2, 8)])
def test_states_are_the_closed_form(mode: str, weight: int, moments: int) -> None:
    seen = observe(Request(override(tiny(), f"techniques.mixed_precision.mode={mode}"), DEVICE, vocabulary=96))
    assert seen.parameters == seen.trained == parameters()
    at = seen.categories["update"]
    slack = 64 * 64  # each tensor is rounded up to 64 bytes; step counters and rotary tables
    assert weight * parameters() <= at["parameters"] <= weight * parameters() + slack
    assert weight * parameters() <= at["gradients"] <= weight * parameters() + slack
    assert moments * parameters() <= at["optimizer"] <= moments * parameters() + slack


def test_flops_are_six_a_parameter_and_token_plus_attention() -> None:
    seen = observe(Request(tiny(rows=4, length=32), DEVICE, vocabulary=96))
    tokens = 4 * 32
    matrices = (
        parameters() - VOCABULARY * WIDTH - (2 * LAYERS + 1) * WIDTH
    )  # the embedding is looked up, norms are no products
    attention = 2 * 2 * 4 * 32 * 32 * WIDTH * LAYERS  # scores and values, forward
    assert seen.model_flops == 6 * matrices * tokens + 3 * attention


def test_checkpointing_computes_one_forward_of_the_layers_again_and_selective_less() -> None:
    none, full, selective = (
        observe(Request(override(tiny("{efficient_attention: {}}"), *more), DEVICE, vocabulary=96))
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
    seen = observe(Request(tiny("{lora: {rank: 2}}"), DEVICE, vocabulary=96))
    assert seen.trained < seen.parameters / 4
    assert seen.categories["update"]["optimizer"] < seen.categories["update"]["parameters"] / 2


def test_accumulation_lowers_activations_and_keeps_the_work() -> None:
    whole = observe(Request(tiny(rows=12, length=64), DEVICE, vocabulary=96))
    parts = observe(Request(tiny("{gradient_accumulation: {steps: 6}}", rows=12, length=64), DEVICE, vocabulary=96))
    assert parts.model_flops == whole.model_flops
    assert parts.tokens == whole.tokens == 12 * 64
    assert parts.peak["backward"] < 0.6 * whole.peak["backward"]


@pytest.mark.parametrize(
    ("stop", "rows", "steps"),
    [
        ("{max_steps: 7}", None, 7),
        ("{tokens: 1000}", None, 8),
        ("{epochs: 1.5}", 10, 4),
        ("{max_steps: 9, epochs: 1}", 10, 3),
    ],
)
def test_the_length_of_a_run(stop: str, rows: int | None, steps: int) -> None:
    assert count_steps(override(tiny(), f"stop={stop}"), rows) == steps


def test_the_heap_joins_and_reuses_what_is_freed() -> None:
    heap = Heap()
    for block in range(3):
        heap.allocate(block, 64 << 10)
    heap.free(0)
    heap.free(1)  # joined with its neighbour: room for one block of the two sizes together
    heap.allocate(3, 128 << 10)
    assert heap.end == 3 * (64 << 10)
    heap.allocate(4, 80 << 20)
    heap.free(4)
    assert (heap.end, heap.resident) == (3 * (64 << 10), 82 << 20)  # it does not shrink, and holds huge pages
    heap.allocate(5, 1 << 10)  # malloc's
    assert (heap.end, heap.resident) == (3 * (64 << 10), (82 << 20) + (1 << 10))


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="the heap is for Linux with glibc"
)
def test_the_heap_is_where_its_model_says_it_is() -> None:
    """A process that makes and frees tensors by chance spans exactly as many bytes as the model does."""
    code = """
import random, torch
from preheat.hardware import cpu_allocator
from preheat.planning.request import Request
assert cpu_allocator.install_heap() is None
draw, living = random.Random(0), {}
for block in range(4000):
    if living and draw.random() < 0.5:
        del living[draw.choice(list(living))]
    else:
        living[block] = torch.empty(64 * int(1024 * 2 ** draw.uniform(-1, 8)), dtype=torch.uint8)
print(cpu_allocator._load_library().preheat_furthest())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    draw, heap, living = random.Random(0), Heap(), dict[int, None]()
    for block in range(4000):
        if living and draw.random() < 0.5:
            heap.free(gone := draw.choice(list(living)))
            del living[gone]
        else:
            heap.allocate(block, 64 * int(1024 * 2 ** draw.uniform(-1, 8)))
            living[block] = None
    assert int(done.stdout) == heap.touched > 64 << 20


def test_a_step_is_held_once_however_often_it_is_taken() -> None:
    step = [(1, 64 << 20, "forward"), (2, 1 << 16, "forward"), (2, -(1 << 16), "backward"), (1, -(64 << 20), "update")]
    assert replay([(0, 1 << 21, "load"), *step, (3, 1 << 30, "evaluation")]) == 68 << 20


@pytest.mark.parametrize("operator", ["sum", "in place", "in place, below", "by a number", "alike", "copy"])
def test_casts_of_mixed_operands_are_seen_as_torch_makes_them(operator: str) -> None:
    """Bytes that an operator of single numbers makes on a CPU, by torch's own profiler and by the recorder."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from preheat.planning.dispatch_recorder import Recorder

    full, half = torch.ones(1 << 16), torch.ones(1 << 16, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return {
            "sum": lambda: full + half,
            "in place": lambda: full.add_(half),
            "in place, below": lambda: half.mul_(full),
            "by a number": lambda: half * torch.tensor(2.0),
            "alike": lambda: full * full,
            "copy": lambda: full.copy_(half),
        }[operator]()

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    memory = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    recorder = Recorder(rounding=64, casts=True)
    for operand in (full, half):
        recorder.follow(operand)
    there = len(recorder.log)
    with recorder:
        run()
    assert sum(size for _, size, _ in recorder.log[there:] if size > 64) == sum(size for size in memory if size > 64)


def test_deep_models_on_one_cpu_are_planned_by_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of thousands of layers takes no longer than one of ten, and says the same as all layers do."""
    from preheat.hardware.probe import probe
    from preheat.planning import layer_extrapolation
    from preheat.recipe import parse

    deep = parse(
        "model: {num_layers: 24, hidden_size: 16, num_heads: 2, vocab_size: 64}\nbatch: {size: 2, seq_len: 16}\nstop: {max_steps: 1}"
    )
    request = Request(deep, probe("cpu", "2GiB"), vocabulary=64)
    whole = layer_extrapolation.observe_few_layers(request)
    monkeypatch.setattr(layer_extrapolation, "_ALL", 8)
    few = layer_extrapolation.observe_few_layers(request)
    assert not few.log
    assert few.peak == pytest.approx(whole.peak, rel=1e-3)
    assert few.flops == whole.flops
