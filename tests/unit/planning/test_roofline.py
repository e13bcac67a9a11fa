"""Predictions for accelerators that are not here: the allocator's segments, times by what limits them, loops that are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.cli.views.plan_answer import list_warnings
from preheat.core import Axis
from preheat.core.plan import HostLaunches, Plan
from preheat.hardware.gpu_memory import CONTEXT
from preheat.hardware.rates import LAYOUTS, MOVERS, AttentionRate, MatrixRate, MovedRate, Rates
from preheat.ops.dry_run_loops import count_turns, fold_identical
from preheat.planning.dispatch_recorder import Kernel, Recorder
from preheat.planning.dry_run import observe
from preheat.planning.layer_extrapolation import observe_few_layers
from preheat.planning.memory.cpu_heap import hold
from preheat.planning.memory.cuda_caching_allocator import Caching, replay_caching
from preheat.planning.memory.free_list import Holes
from preheat.planning.memory.overhead import needs_allocator_retries, observe_process_overhead
from preheat.planning.observation import Observation
from preheat.planning.plan import describe, plan
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline
from preheat.planning.speed.step_time import estimate_kernel_seconds, estimate_step_seconds, find_limiting_host
from preheat.recipe import override

from ...conftest import tiny

MIB = 2**20


def test_free_pieces_join_their_neighbours() -> None:
    holes = Holes()
    for start, size in ((0, 100), (200, 50), (300, 10)):
        assert holes.give(start, size) == (start, size)
    assert holes.give(100, 100) == (0, 250)  # between two
    assert holes.take(11) == (0, 250)
    assert holes.take(11) is None
    assert holes.take(10) == (300, 10)


def test_segments_of_the_caching_allocator_are_those_that_torch_documents() -> None:
    held = Caching()
    sizes = [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (12 * MIB + 3, 12 * MIB + 512, 14 * MIB),
    ]
    before = 0
    for block, (size, rounded, segment) in enumerate(sizes):
        allocated = held.allocated
        held.allocate(block, size, stream=str(block))  # each on a stream of its own: nothing is shared
        assert (held.allocated - allocated, held.reserved - before) == (rounded, segment)
        before = held.reserved
    held.free(3)
    held.allocate(4, 8 * MIB, stream="other")
    assert held.reserved == before + 20 * MIB  # what is free on one stream serves no other
    held.allocate(5, 13 * MIB, stream="3")
    assert held.reserved == before + 20 * MIB


def test_fragments_are_reserved_beyond_what_is_alive_and_expandable_segments_have_few() -> None:
    # pieces of growing sizes: no freed one is large enough for the next
    log = [entry for n in range(1, 9) for entry in ((n, n * 30 * MIB, "forward"), (n, -n * 30 * MIB, "forward"))]
    fixed, grown = (replay_caching(log, expandable=expandable) for expandable in (False, True))
    assert fixed.allocated == grown.allocated == 240 * MIB
    assert fixed.reserved == sum(range(1, 9)) * 30 * MIB
    assert grown.reserved == 240 * MIB
    device = Roofline.of("H100").as_device
    assert [hold(log, {}, replace(device, expandable=grows)) for grows in (False, True)] == [
        fixed.reserved,
        grown.reserved,
    ]
    limited = replay_caching(log, limit=300 * MIB)  # segments in which nothing lives are given back
    assert limited.fits
    assert limited.reserved <= 300 * MIB
    assert not replay_caching(log, limit=200 * MIB).fits
    assert [replay_caching(log, expandable=True, limit=n * MIB).fits for n in (240, 239)] == [True, False]


RISING = [
    (n, sign * n * 30, "forward") for n in range(1, 9) for sign in (1, -1)
]  # MiB; each freed before the next: 240 alive, 1,080 in segments
IN_THE_WAY = [
    (0, 100, "forward"),
    (0, -100, "forward"),
    (1, 20, "forward"),
    (2, 40, "forward"),
    (3, 170, "forward"),
]  # 20 and 40 live where 100 did
APART = [
    (0, 100, "forward"),
    (1, 40, "forward"),
    (0, -100, "forward"),
    (3, 170, "forward"),
]  # 100 free before 40, and 170 behind


@pytest.mark.parametrize(
    ("log", "alive", "room", "expandable", "back", "fits"),
    [
        (RISING, 240, 1080, False, False, True),
        (RISING, 240, 1079, False, True, True),  # freed segments are given back
        (RISING, 240, 239, False, False, False),
        (RISING, 240, 240, True, False, True),
        (
            IN_THE_WAY,
            230,
            240,
            False,
            True,
            False,
        ),  # half of the first segment is free, and none of it can be given back
        (IN_THE_WAY, 230, 240, True, False, True),
        (APART, 210, 250, True, True, True),  # free pages are given back
    ],
)
def test_a_gpu_has_room_if_what_the_allocator_gives_back_before_it_fails_makes_it(
    log: list[tuple[int, int, str]], alive: int, room: int, expandable: bool, back: bool, fits: bool
) -> None:
    context = CONTEXT // MIB + 32  # with workspaces
    device = replace(Roofline.of("H100").as_device, expandable=expandable, memory=(context + room) * MIB)
    phases: Any = [(block, size * MIB, phase) for block, size, phase in log]
    seen = Observation({"forward": alive * MIB}, {}, Counter(), {}, 0, 0, 0, 0, log=phases)
    recipe = tiny()
    assert needs_allocator_retries(seen, device) == back
    needs = alive * MIB + sum(observe_process_overhead(recipe, seen, device).values())
    assert (needs <= device.memory) == fits
    seen.log.clear()  # as by few layers: fixed segments are then taken to stay
    needs = alive * MIB + sum(observe_process_overhead(recipe, seen, device).values())
    assert (needs <= device.memory) == (fits and (expandable or not back))


def kernel(operator: str, **more: object) -> Kernel:
    settings = {"dtype": "bf16", "flops": 0, "bytes_read": 0, "bytes_written": 0, "shapes": ()}
    return Kernel(operator, **settings | more)  # type: ignore[arg-type]


def test_a_product_is_limited_by_flops_or_by_bytes() -> None:
    h100 = Roofline.of("H100")

    def seconds(n: int, k: int, m: int) -> float:
        moved = {"bytes_read": 2 * (n * k + k * m), "bytes_written": 2 * n * m}
        return h100._time_matmul(kernel("mm", flops=2 * n * k * m, shapes=((n, k), (k, m)), **moved))

    large, narrow = seconds(8192, 8192, 8448), seconds(8192, 16, 8448)
    assert 2 * 8192 * 8192 * 8448 / large == pytest.approx(
        h100.device.sustained()["bf16"], rel=0.02
    )  # whole waves of 132 units
    moving = (2 * (8192 * 16 + 16 * 8448) + 2 * 8192 * 8448) / (3.35e12 * 0.85)
    assert narrow == pytest.approx(moving + 2 * 8192 * 16 * 8448 / h100.device.sustained()["bf16"], rel=0.01)
    assert seconds(128, 8192, 128) > large / 64 / 66 * 50  # one tile leaves 131 of 132 units idle


def test_half_precision_rows_that_are_not_aligned_are_slower_on_gpus_that_were_measured() -> None:
    def seconds(gpu: str, columns: int, dtype: str = "bf16", transposed: tuple[bool, ...] = (False, True)) -> float:
        size = {"flops": 2 * 8192 * 4096 * columns, "shapes": ((8192, 4096), (4096, columns))}
        return Roofline.of(gpu)._time_matmul(kernel("mm", dtype=dtype, transposed=transposed, **size))

    # 393 tiles of 128 columns hold both.
    assert seconds("A100", 50304) / seconds("A100", 50257) == pytest.approx(0.71, rel=1e-3)
    assert seconds("RTX-4090", 2040) / seconds("RTX-4090", 2055) < 0.85
    assert seconds("H100", 50304) == pytest.approx(seconds("H100", 50257))
    assert seconds("A100", 50304, "fp32") == pytest.approx(seconds("A100", 50257, "fp32"))


def test_a_plan_names_sizes_that_are_slower_than_the_next_multiple_of_64() -> None:
    a100 = Roofline.of("A100")

    def planned(model: str, vocabulary: int) -> Plan:
        recipe = override(
            tiny(rows=16, length=1024),
            f"model={{{model}, num_layers: 2, hidden_size: 512, num_heads: 8, vocab_size: {vocabulary}}}",
            "techniques={mixed_precision: {}, efficient_attention: {}}",
        )
        return plan(Request(recipe, a100.as_device, vocabulary=96, rates=a100))

    slow = planned("family: llama", 50257)
    (faster,) = slow.faster_sizes
    assert (faster.key, faster.size, faster.better) == ("model.vocab_size", 50257, 50304)
    # The gain is that of a plan with the larger size, less what the loss takes for 47 more columns.
    better = planned("family: llama", 50304)
    assert faster.gain == pytest.approx(better.tokens_per_second / slow.tokens_per_second - 1, rel=0.1)
    assert faster.gain > 0.05
    assert any(
        line.startswith("model.vocab_size: 50,257 is not a multiple of 64: 50,304 is ") for line in list_warnings(slow)
    )
    assert better.faster_sizes == ()


@pytest.mark.parametrize(
    ("operator", "flops", "moved", "cudnn", "milliseconds"),
    [
        ("mm", 2 * 8192 * 4096 * 14336, 2 * (8192 * 4096 + 4096 * 14336 + 8192 * 14336), False, 1.33),
        ("attention", 4 * 32 * 8192**2 * 128, 0, True, 1.03),
        ("attention_backward", 10 * 32 * 8192**2 * 128, 0, True, 3.06),
        ("preheat::varlen_attention", 4 * 32 * 8192**2 * 128, 0, True, 1.70),
        ("preheat::gated_silu", 0, 6 * 8192 * 14336, False, 0.23),
    ],
)
def test_one_h100_takes_about_what_was_measured(
    operator: str, flops: int, moved: int, cudnn: bool, milliseconds: float
) -> None:
    """Kernels of an 8B LoRA step on one (benchmarks/results/gpu_layer.md); flash attention alone, by itself."""
    sizes = {"shapes": ((8192, 4096), (4096, 14336)), "bytes_read": moved}
    only = Counter({kernel(operator, flops=flops, **sizes): 1})
    one = Observation({}, {}, only, {}, 0, 0, 0, 0, cudnn=cudnn)
    spent = replace(Roofline.of("H100"), alone=True).seconds(one)
    assert (spent.total - spent.host) * 1e3 == pytest.approx(milliseconds, rel=0.15)


def test_few_layers_know_which_attention_all_have() -> None:
    h100 = Roofline.of("H100")
    recipe = recipes.parse(
        "model: {num_layers: 5, hidden_size: 256, num_heads: 4, vocab_size: 96}\nbatch: {size: 1, seq_len: 512}\n"
        "stop: {max_steps: 9}\ntechniques: {mixed_precision: {}, efficient_attention: {}}"
    )
    request = Request(recipe, h100.as_device, vocabulary=96, rates=h100)
    attention = [h100.seconds(seen).attention for seen in (observe(request), observe_few_layers(request))]
    assert attention[0] > 0
    assert attention[1] == pytest.approx(attention[0])


def test_deepspeed_is_planned_for_another_machine_without_the_package_and_a_rate() -> None:
    stated = "batch: {{size: 8, seq_len: 64}}\nstop: {{max_steps: 9}}\ncheckpoint: {{every: 0}}\n{}"
    h100 = Roofline.of("H100")
    memory = []
    for sharding in (
        "parallel: {engine: deepspeed, zero_stage: 3, devices: 2}",
        "parallel: {devices: 2}\ntechniques: {fsdp: {}}",
    ):
        text = stated.format(sharding) + "\nmodel: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 96}"
        recipe = recipes.parse(text)
        assert recipe.optimizer.lr == "auto"
        memory.append(plan(Request(recipe, h100.as_device, world=2, rates=h100)).allocated_gib)
    assert memory[0] == memory[1]


def measured(gpu: Roofline, launch: float = 4.5e-6) -> Rates:
    """What measuring an accelerator of the catalogue would give, if it does what its roofline says."""
    flops, moved = gpu.device.sustained(), 0.85 * (gpu.device.bandwidth or 0)
    dtypes = ("bf16", "fp32")
    shares = {"forward": 0.38, "backward": 0.33}  # of what is counted as if it were not causal, twice as much
    return Rates(
        hardware=gpu.device.name,
        torch="2.13.0",
        threads=8,
        peak_matrix_rate={d: gpu.peak_matrix_rate[d] for d in dtypes},
        bandwidth=moved,
        launch=launch,
        adamw={d: size / moved for d, size in (("bf16", 14), ("fp32", 28))},
        matrix=tuple(MatrixRate(d, layout, 4096, 4096, 4096, flops[d]) for d in dtypes for layout in LAYOUTS),
        moved=tuple(MovedRate(name, d, 2**20, moved) for name in MOVERS for d in dtypes),
        attention=tuple(
            AttentionRate(d, way, 2048, 32, 128, 2 * share * gpu.peak_matrix_rate["bf16"])  # type: ignore[arg-type]
            for d in dtypes
            for way, share in shares.items()
        ),
        contended=False,
        seconds=1.0,
        to_host=50e9,
        to_device=40e9,
    )


def test_a_gpu_s_step_takes_the_longer_of_device_and_host() -> None:
    h100 = Roofline.of("H100")
    rates = measured(h100)
    product = kernel("mm", flops=2 * 4096**3, shapes=((4096, 4096), (4096, 4096)), transposed=(False, True))
    seconds = product.flops / h100.device.sustained()["bf16"]
    tiny_one = kernel("add", bytes_read=64, bytes_written=32, shapes=((8,), (8,)))

    def step(**kernels: Any) -> float:
        return estimate_step_seconds(seen(kernels), rates)

    def seen(kernels: dict[str, Any], **more: Any) -> Any:
        known = {"big": product, "small": tiny_one, "out": kernel("preheat::to_host", where="out", bytes_written=10**9)}
        return SimpleNamespace(
            kernels=Counter({known[name]: n for name, n in kernels.items()}),
            compiled=False,
            slowed=1.0,
            idle=0.0,
            **more,
        )

    assert step(big=1000) == pytest.approx(1000 * seconds)  # the host's 9 ms run beside
    assert step(small=1000) == pytest.approx(1000 * 2.5 * 4.5e-6)  # the host decides
    assert step(big=100, small=10) == pytest.approx(100 * seconds, rel=1e-3)
    assert step(big=1000, out=1) == pytest.approx(1000 * seconds)  # a copy that the forward pass hides
    assert step(big=1, out=1) == pytest.approx(seconds * 2 / 3 + 1e9 / 50e9)


def test_the_host_s_measured_time_per_operator_decides_a_step_of_small_kernels() -> None:
    rates = replace(measured(Roofline.of("H100"), launch=13.6e-6), host_operator=28e-6, host_custom=90e-6)
    small, ours = (kernel(name, bytes_read=64, bytes_written=32, shapes=((8,),)) for name in ("add", "preheat::norm"))
    seen = Observation({}, {}, Counter({small: 900, ours: 100}), {}, 0, 0, 0, 0)
    host = 900 * 28e-6 * 1.4 + 100 * 90e-6
    assert estimate_step_seconds(seen, rates) == pytest.approx(host)
    assert find_limiting_host(seen, rates) == HostLaunches(1000, pytest.approx(host / 1000))
    assert estimate_step_seconds(replace(seen, slowed=1.8), rates) == pytest.approx(
        900 * 28e-6 * 1.4 * 1.8 + 100 * 90e-6
    )
    # On a CPU the kernels' own time is added, and a bare launch is part of both.
    cpu = replace(rates, near=1e11, launch=1e-6)
    own = estimate_kernel_seconds(small, cpu) - 1e-6, estimate_kernel_seconds(ours, cpu) - 1e-6
    assert estimate_step_seconds(seen, cpu) == pytest.approx(host + 900 * own[0] + 100 * own[1])
    large = kernel("mm", flops=2 * 8192**3, shapes=((8192, 8192), (8192, 8192)), transposed=(False, True))
    assert find_limiting_host(replace(seen, kernels=Counter({large: 10})), rates) is None


def test_a_plan_says_when_an_unknown_host_decides_and_how_little_it_knows() -> None:
    h100 = Roofline.of("H100")
    small = plan(Request(tiny(), h100.as_device, vocabulary=96, rates=h100))
    assert small.host is not None
    assert small.host.seconds_each == 9e-6
    assert small.tokens_per_second_interval.low == pytest.approx(0.2 * small.tokens_per_second)
    assert any(f"{small.host.operators:,} operators at 9 µs" in line for line in list_warnings(small))


def test_the_split_of_a_step_adds_up_by_the_catalogue_and_by_measured_rates() -> None:
    h100 = Roofline.of("H100")
    recipe = tiny("{efficient_attention: {}, chunked_loss: {rows: 16}}", rows=4, length=32)
    for rates in (h100, measured(h100)):
        step = plan(Request(recipe, h100.as_device, vocabulary=96, rates=rates))
        assert step.split is not None
        assert sum(step.split.kinds.values()) == pytest.approx(step.seconds_per_step)
        assert step.split.gradients + step.split.update == pytest.approx(step.seconds_per_step)
        assert {"matmul", "attention", "elementwise", "optimizer", "host only"} <= step.split.kinds.keys()
        # All but the host's part of the update is what the kernels of the update take.
        assert step.split.kinds["optimizer"] < step.split.update < step.split.gradients


def test_kernels_read_what_was_just_written_from_the_cache() -> None:
    l40s = Roofline.of("L40S")
    memory, cache = 0.85 * 864e9, 4590e9

    def seconds(read: int, written: int, rates: Roofline = l40s, **more: Any) -> float:
        only = Counter({kernel("silu", bytes_read=read, bytes_written=written, **more): 1})
        return rates.seconds(Observation({}, {}, only, {}, 0, 0, 0, 0)).moved - 3e-6

    assert seconds(10**7, 10**7) == pytest.approx(10**7 / memory)  # what is written leaves the cache
    assert seconds(4 * 10**7, 10**6) == pytest.approx(4.1e7 / cache)
    both = ((5, 10**6), (5, 10**6))
    assert seconds(2 * 10**7, 10**7, shapes=both) == pytest.approx(2e7 / memory)  # one of two operands is older
    assert seconds(4 * 10**7, 4 * 10**7) == pytest.approx(8e7 / memory)  # more than three quarters of it
    assert seconds(10**7, 10**7, alone=True) == pytest.approx(2e7 / memory)  # weights of the last step
    l4 = Roofline.of("L4")  # no rate of its cache is known
    assert seconds(10**7, 10**7, l4) == pytest.approx(2e7 / (0.85 * 300e9))


@pytest.mark.parametrize(
    ("dtype", "shapes", "microseconds"),
    [
        ("fp32", ((16384, 4096), (4096, 16)), 152),
        ("fp32", ((16, 16384), (16384, 4096)), 146),
        ("fp32", ((8192, 16), (16, 4096)), 67),
        ("bf16", ((16384, 4096), (4096, 16)), 50),
        ("bf16", ((16, 16384), (16384, 4096)), 52),
    ],
)
def test_an_adapter_s_matmuls_take_what_an_h100_was_calibrated_to(
    dtype: str, shapes: tuple[tuple[int, int], ...], microseconds: float
) -> None:
    (n, k), (_, m) = shapes
    size = 2 if dtype == "bf16" else 4
    moved = {"bytes_read": size * (n * k + k * m), "bytes_written": size * n * m}
    product = kernel("mm", dtype=dtype, flops=2 * n * k * m, shapes=shapes, **moved)
    seconds = replace(Roofline.of("H100"), alone=True)._time_matmul(product)
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.25)


def test_what_is_measured_on_a_gpu_plans_as_its_roofline_does() -> None:
    h100 = Roofline.of("H100")
    recipe = recipes.parse(
        "name: x\nmodel: {preset: llama-3.1-8b}\nbatch: {size: 2, seq_len: 4096}\nstop: {max_steps: 1}\n"
        "techniques: {lora: {}, mixed_precision: {mode: bf16_weights}, efficient_attention: {}, chunked_loss: {rows: 4096}}"
    )
    seen = observe_few_layers(Request(recipe, h100.as_device), quick=True)
    roofline, by_rates = h100.seconds(seen).total, estimate_step_seconds(seen, measured(h100))
    assert by_rates == pytest.approx(roofline, rel=0.15)


def calibrated(gpu: Roofline, seconds: Callable[[float, float], float]) -> Rates:
    """A calibration in which a kernel that takes t by the roofline took `seconds(t, part)`; part: 0 to 1 of the order."""
    rates = measured(gpu)
    shapes = [(n, k, m) for k, m in ((4096, 4096), (4096, 14336), (16, 4096)) for n in (64, 1024, 4096, 16384)]
    order = [(dtype, layout, *shape) for dtype in rates.adamw for shape in shapes for layout in LAYOUTS]

    def matmul(dtype: str, layout: Any, n: int, k: int, m: int) -> MatrixRate:
        flops, size = 2 * n * k * m, 2 if dtype == "bf16" else 4
        moved = {"bytes_read": size * (n * k + k * m), "bytes_written": size * n * m}
        true = gpu._time_matmul(kernel("mm", dtype=dtype, flops=flops, shapes=((n, k), (k, m)), **moved))
        part = order.index((dtype, layout, n, k, m)) / len(order)
        return MatrixRate(dtype, layout, n, k, m, flops / seconds(true, part))

    size = 2**30
    copies = [
        MovedRate(name, d, size, size / seconds(size / rates.bandwidth, 1)) for name in MOVERS for d in rates.adamw
    ]
    attention = [replace(r, flops=1e12 / seconds(1e12 / r.flops, 1)) for r in rates.attention]
    return replace(
        rates,
        bandwidth=size / seconds(size / rates.bandwidth, 0),
        matrix=tuple(matmul(*each) for each in order),
        moved=tuple(copies),
        attention=tuple(attention),
        adamw={d: seconds(each * 2**26, 1) / 2**26 for d, each in rates.adamw.items()},
    )


@pytest.mark.parametrize(
    ("seconds", "why", "alone"),
    [
        (lambda true, part: 5e-6, "faster than the data sheet", "do not grow with their work"),
        (lambda true, part: true * (1 if part < 0.3 else 2.5), "slower than", "slower than others"),
        (lambda true, part: 11 * true, "11 times slower than the data sheet of H100", None),
        (lambda true, part: true, None, None),
    ],
    ids=["launches", "throttled", "busy", "right"],
)
def test_a_calibration_that_cannot_be_true_gives_way_to_the_data_sheet(
    seconds: Callable[[float, float], float], why: str | None, alone: str | None
) -> None:
    """`alone`: what can be told of a card without a data sheet."""
    h100 = replace(Roofline.of("H100"), alone=True)
    recipe = recipes.parse(
        "name: x\nmodel: {preset: llama-3.1-8b}\nbatch: {size: 2, seq_len: 4096}\nstop: {max_steps: 1}\n"
        "techniques: {lora: {}, mixed_precision: {mode: bf16_weights}, efficient_attention: {}, chunked_loss: {rows: 4096}}"
    )
    request = Request(recipe, h100.as_device, rates=h100)
    seen = observe_few_layers(request, quick=True)
    true, rates = describe(request, seen), calibrated(h100, seconds)
    planned = describe(replace(request, rates=rates), seen)
    assert planned.seconds_per_step == pytest.approx(true.seconds_per_step, rel=0.25)
    if why is None:
        assert planned.doubt is None
    else:
        assert planned.doubt is not None
        assert why in planned.doubt
        assert planned.doubt in list_warnings(planned)
    assert planned.watts == 700
    unknown = describe(replace(request, rates=replace(rates, hardware="a new card")), seen)
    assert unknown.watts is None
    if alone is None:
        assert unknown.doubt is None
    else:
        assert unknown.doubt is not None
        assert alone in unknown.doubt


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            lambda rates: {"attention": tuple(replace(r, flops=r.flops / 10) for r in rates.attention)},
            "attention in bf16",
        ),
        (lambda rates: {"attention": tuple(replace(r, flops=r.flops * 10) for r in rates.attention)}, "matmuls can be"),
        (
            lambda rates: {"adamw": {name: 10 * each for name, each in rates.adamw.items()}},
            "AdamW in bf16 takes 10 times",
        ),
        (lambda rates: {"adamw": {name: each / 10 for name, each in rates.adamw.items()}}, "its bytes can be"),
        (lambda rates: {"host_operator": 10 * rates.host_operator}, "take the host 20 times as long"),
        (
            lambda rates: {"moved": tuple(replace(r, rate=r.rate / 10) for r in rates.moved)},
            "memory bandwidth (in bf16)",
        ),
    ],
    ids=["attention", "attention's launches", "optimizer", "optimizer's launches", "host", "copies"],
)
def test_one_wrong_part_of_a_calibration_is_told(wrong: Callable[[Rates], dict[str, Any]], why: str) -> None:
    h100 = replace(Roofline.of("H100"), alone=True)
    right = replace(calibrated(h100, lambda true, part: true), host_operator=9e-6, host_custom=40e-6)
    recipe = recipes.parse(
        "name: x\nmodel: {preset: llama-3.2-1b}\nbatch: {size: 2, seq_len: 2048}\nstop: {max_steps: 1}\n"
        "techniques: {mixed_precision: {}, efficient_attention: {}, chunked_loss: {rows: 4096}}"
    )
    request = Request(recipe, h100.as_device, rates=h100)
    seen = observe_few_layers(request, quick=True)
    true = describe(request, seen).seconds_per_step
    for rates in (right, replace(right, **wrong(right))):
        planned = describe(replace(request, rates=rates), seen)
        assert planned.seconds_per_step == pytest.approx(true, rel=0.25)
        assert (planned.doubt is None) == (rates is right)
    assert planned.doubt is not None
    assert why in planned.doubt


def test_collectives_take_their_bytes_over_the_link_or_the_network() -> None:
    h100 = Roofline.of("H100", per_host=8)
    size = 1 << 30
    gather = {"bytes_read": size // 8, "bytes_written": size}
    within = h100.collective(kernel("c10d::_allgather_base_", group=(8, 1), **gather))
    assert within == pytest.approx(size * 7 / 8 / (450e9 * 0.8), rel=0.01)
    across = h100.collective(kernel("c10d::_allgather_base_", group=(8, 8), **gather))  # one of each host
    assert across == pytest.approx(size * 7 / 8 / (50e9 * 0.8), rel=0.02)
    assert h100.collective(kernel("c10d::allreduce_", group=(8, 1), bytes_read=size)) == pytest.approx(
        2 * within, rel=0.01
    )


def test_a_plan_for_an_accelerator_that_is_not_here() -> None:
    recipe = recipes.override(
        tiny("{mixed_precision: {}, efficient_attention: {}, fsdp: {gather: bf16}}", rows=16, length=64),
        "parallel.devices=8",
    )
    h100, a10 = Roofline.of("H100"), Roofline.of("A10G")
    fast, slow = (plan(Request(recipe, r.as_device, vocabulary=96, world=8, rates=r)) for r in (h100, a10))
    assert fast.seconds_per_step < slow.seconds_per_step or fast.seconds_per_step == pytest.approx(
        slow.seconds_per_step
    )  # both wait for the host
    assert fast.reserved_gib >= fast.allocated_gib
    assert fast.overhead["context"] > 0


def test_a_gather_across_hosts_passes_every_device_in_turn_and_an_all_reduce_a_tree() -> None:
    """By NCCL's tuning constants: a start of 14 us, steps of 1.9 and 4 us in a ring, of 1.25 and 8.5 in a tree."""
    rates = Roofline.of("H100")

    def microseconds(kind: str, devices: int, stride: int = 1) -> float:
        return rates.collective(Kernel(kind, "bf16", 0, 2, 2, (), group=(devices, stride))) * 1e6

    assert microseconds("c10d::_allgather_base_", 512) == pytest.approx(14 + 448 * 1.9 + 63 * 4, rel=1e-3)
    assert microseconds("c10d::_reduce_scatter_base_", 16) == pytest.approx(14 + 14 * 1.9 + 1 * 4, rel=1e-3)
    assert microseconds("c10d::allreduce_", 512) == pytest.approx(14 + 2 * (7 * 1.25 + 6 * 8.5), rel=1e-3)
    assert microseconds("c10d::send", 16, 1024) == pytest.approx(14 + 4, rel=1e-3)
    # One device of each host: a tree gathers, too, if it is quicker.
    assert microseconds("c10d::_allgather_base_", 64, 8) == pytest.approx(14 + 6 * 8.5, rel=1e-3)


def test_a_dry_run_knows_whom_collectives_are_among_and_how_long_a_pipeline_idles() -> None:
    spread = "{tensor_parallel: {degree: 2}, fsdp: {}}"
    seen = observe(
        Request(
            recipes.override(tiny(spread, rows=8), "model.vocab_size=96", "parallel.devices=8"),
            Roofline.of("H100").as_device,
            vocabulary=96,
        )
    )
    assert seen.groups[4, 2] == (Axis.SHARD,)
    assert seen.groups[2, 1] == (Axis.TENSOR,)
    piped = recipes.override(tiny("{pipeline_parallel: {degree: 2, micro_batches: 8}}", rows=8), "parallel.devices=2")
    waits = observe(Request(piped, Roofline.of("H100").as_device, vocabulary=96))
    assert waits.idle == 1 / 8
    cut = recipes.override(
        tiny("{pipeline_parallel: {degree: 2}, gradient_accumulation: {steps: 8}}", rows=8), "parallel.devices=2"
    )
    assert observe(Request(cut, Roofline.of("H100").as_device, vocabulary=96)).idle == 1 / 8


def test_turns_that_are_alike_are_counted_not_taken() -> None:
    recorder = Recorder(rounding=64)
    a = torch.ones(4)
    taken = []

    def loop() -> None:
        for n in fold_identical(range(100)):
            taken.append(n)
            a.add(1)

    with recorder, count_turns(recorder):
        loop()
    assert taken == [0, 1, 99]
    assert sum(count for k, count in recorder.kernels.items() if k.operator == "add") == 100
    taken.clear()
    loop()
    assert taken == list(range(100))


def test_micro_batches_that_a_pipeline_does_not_run_are_counted() -> None:
    def flops(micro: int) -> Counter[str]:
        recipe = recipes.override(
            tiny(f"{{pipeline_parallel: {{degree: 2, micro_batches: {micro}}}}}", rows=micro), "parallel.devices=2"
        )
        return Counter(observe(Request(recipe, Roofline.of("H100").as_device, vocabulary=96)).flops)

    assert flops(8)["fp32"] == 4 * flops(2)["fp32"]


def test_what_shares_out_rows_hides_behind_computing_and_exchanges_within_a_layer_do_not() -> None:
    h100 = Roofline.of("H100")
    work = kernel("mm", flops=2 * 8192**3, shapes=((8192, 8192), (8192, 8192)))

    def waiting(operator: str, axis: Axis, **more: Any) -> float:
        sent = kernel(operator, group=(8, 1), bytes_read=1 << 20, bytes_written=1 << 20, **more)
        both = Counter({work: 1, sent: 1})
        return h100.seconds(Observation({}, {}, both, {}, 0, 0, 0, 0, groups={(8, 1): (axis,)})).waiting

    assert waiting("c10d::_allgather_base_", Axis.SHARD) == 0
    # ZeRO-1 gathers new weights in the update, after everything was computed.
    update = waiting("_c10d_functional::all_gather_into_tensor", Axis.REPLICATE, alone=True)
    assert update == pytest.approx(20e-6 + (1 << 20) * 7 / 8 / (450e9 * 0.8))
    assert waiting("c10d::alltoall_base_", Axis.SHARD) > 0  # experts
    assert waiting("_c10d_functional::all_reduce", Axis.TENSOR) > 0
