"""Hardware: the catalogue, the probe of this machine, and its measured rates."""

import dataclasses
import functools
import io
import json
import mmap
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from preheat import torch_compat
from preheat.core import Device, MachineUse
from preheat.errors import RecipeError, RunError
from preheat.files import to_plain_data
from preheat.hardware import cuda_driver, openmp, segments
from preheat.hardware import probe as probing
from preheat.hardware.benchmark_rates import FULL, GPU, _Cycle, _measure_host_link, _Parts, calibrate, grid_of, rates
from preheat.hardware.catalogue import accelerators, find_accelerator, resolve_accelerator
from preheat.hardware.host_time import HostTime
from preheat.hardware.link_rates import link_rates_path, load_links
from preheat.hardware.oom import is_oom, parse_requested_bytes
from preheat.hardware.rates import (
    LAYOUTS,
    MOVERS,
    AttentionRate,
    MatrixRate,
    MovedRate,
    Rates,
    _read_runs,
    calibration_path,
    describe_unusable_rates,
    load,
    note_run,
    parse,
)
from preheat.hardware.timing import Random, Stopwatch, limit_threads
from preheat.planning.request import Request
from tests.unit.plans import plan_of, values_of

from ...conftest import SMALL, tiny


def made_up(**changes: object) -> Rates:
    values: dict = {
        "hardware": "made up",
        "torch": "2.13.0",
        "threads": 2,
        "peak_matrix_rate": {"fp32": 2e11},
        "bandwidth": 2e10,
        "launch": 1e-6,
        "adamw": {"fp32": 1e-9},
        "matrix": (
            MatrixRate("fp32", "forward", 100, 100, 100, 1e9),
            MatrixRate("fp32", "forward", 10000, 100, 100, 4e9),
            MatrixRate("fp32", "grad_input", 100, 100, 100, 1e9),
            MatrixRate("fp32", "grad_weight", 100, 100, 100, 1e9),
        ),
        "moved": (MovedRate("mul", "fp32", 1000, 1e9), MovedRate("mul", "fp32", 100_000, 4e9)),
        "attention": (
            AttentionRate("fp32", "forward", 256, 6, 48, 1e9),
            AttentionRate("fp32", "backward", 256, 6, 48, 1e9),
        ),
        "contended": False,
        "seconds": 1.0,
        "near": 5e10,
    }
    return Rates(**(values | changes))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("H100", "H100"),
        ("h100 sxm", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX-5070Ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA L4", "L4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_catalogue_knows_what_people_and_drivers_say(said: str, meant: str) -> None:
    assert find_accelerator(said) == accelerators()[meant]


def test_catalogue_is_in_si_units_and_consistent() -> None:
    h100 = find_accelerator("H100")
    assert (h100.memory, h100.bandwidth, h100.bf16) == (79 * 2**30, 3.35e12, 989e12)
    assert find_accelerator("T4").bf16 is None
    for one in accelerators().values():
        assert one.achieved_bf16 is None or one.achieved_bf16 < one.bf16, one.name
        assert one.achieved_fp8 is None or one.achieved_fp8 < one.fp8, one.name
        assert one.bf16 is None or one.fp32 is None or one.fp32 < one.bf16, one.name
        # A column that slipped shows here: rates, links and powers of these devices differ by orders of magnitude.
        assert one.units is None or 20 < one.units < 400, one.name
        assert one.watts is None or 60 < one.watts < 1500, one.name
        assert one.host is None or 10e9 < one.host < 500e9, one.name
        assert one.fp8 is None or one.bf16 <= one.fp8 < 2.1 * one.bf16, one.name


def test_catalogue_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"no accelerator 'gaudi-4' in the catalogue; did you mean 'Gaudi[23]'"):
        find_accelerator("gaudi-4")
    with pytest.raises(RecipeError, match=r"known: A10, A100-40GB, .* and \d+ more"):
        find_accelerator("abacus")


@pytest.mark.parametrize(
    ("text", "size"), [("12GiB", 12 * 2**30), ("12 GB", 12 * 10**9), ("1.5gib", 3 * 2**29), ("800MiB", 800 * 2**20)]
)
def test_probe_takes_the_stated_memory(text: str, size: int) -> None:
    assert probing.probe("cpu", memory=text).memory == size


@pytest.mark.parametrize("text", ["12", "GiB", "-1GiB", "0GiB", "12 gigs", ""])
def test_bad_memory_is_one_clear_line(text: str) -> None:
    with pytest.raises(RecipeError, match=f"hardware.memory: '{text}' is not an amount of memory; write") as caught:
        probing.probe("cpu", memory=text)
    assert "\n" not in str(caught.value)


def test_probe_of_this_cpu() -> None:
    found = probing.probe("cpu")
    assert found.kind == "cpu"
    assert found.name
    assert 2**28 < found.memory <= 2**46


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that torch has; returns what its allocator is told."""
    heard: list[str] = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", heard.append)
    monkeypatch.setattr(torch_compat, "has_expandable_segments", lambda: heard[-1:] == ["expandable_segments:True"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    facts = SimpleNamespace(name="a GPU", total_memory=1 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(segments, "_maps_pages", lambda index: True)
    return heard


@pytest.mark.parametrize(
    ("environment", "asked", "grows", "told", "says"),
    [
        ("", "fixed", False, [], False),
        ("", "auto", True, ["expandable_segments:True"], False),
        ("", "expandable", True, ["expandable_segments:True"], False),
        ("max_split_size_mb:64", "auto", True, ["max_split_size_mb:64,expandable_segments:True"], False),
        ("expandable_segments:True", "auto", True, [], False),
        ("expandable_segments:True", "fixed", True, [], True),  # the environment goes before the recipe
        ("expandable_segments:False", "expandable", False, [], True),
        ("expandable_segments:False", "auto", False, [], True),
        ("expandable_segments:False", "fixed", False, [], False),
        ("backend:cudaMallocAsync", "auto", False, [], True),  # it has no segments
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_a_gpu_s_allocator(
    variable: str,
    environment: str,
    asked: str,
    grows: bool,
    told: list[str],
    says: bool,
    a_gpu: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if environment:
        monkeypatch.setenv(variable, environment)
    device = probing.probe("cuda", segments=asked)
    assert (device.expandable, a_gpu) == (grows, told)
    assert (
        (f"{variable} of the environment takes precedence over hardware.segments ({asked}): '{environment}'")
        == device.notice
    ) == says
    assert says or not device.notice


@pytest.mark.parametrize(
    ("where", "attribute", "value", "why"),
    [
        ("preheat.hardware.segments.sys", "platform", "win32", "Linux"),
        ("torch.version", "hip", "6.4", "ROCm 7"),
        ("platform", "release", lambda: "5.15.167-Microsoft-standard-WSL2", "subsystem for Linux"),
        ("preheat.hardware.segments", "_maps_pages", lambda index: False, "page by page"),
    ],
)
def test_auto_keeps_fixed_segments_where_growing_ones_are_not_to_be_had(
    where: str, attribute: str, value: Any, why: str, a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{where}.{attribute}", value)
    device = probing.probe("cuda", segments="auto")
    assert (device.expandable, a_gpu) == (False, [])
    assert why in device.notice
    assert probing.probe("cuda", segments="expandable").expandable  # who asks for them has them


def test_fixed_segments_after_a_run_with_growing_ones(a_gpu: list[str]) -> None:
    assert probing.probe("cuda", segments="auto").expandable
    assert not probing.probe("cuda", segments="fixed").expandable
    assert a_gpu == ["expandable_segments:True", "expandable_segments:False"]


def test_a_driver_is_asked_whether_it_maps_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, name: str):
            assert name == "libcuda.so.1"

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGet(self, device: Any, index: int) -> int:
            return 0 if index < 2 else 101

        def cuDeviceGetAttribute(self, answer: Any, attribute: int, device: Any) -> int:
            answer._obj.value = attribute == 102
            return 0

    monkeypatch.setattr(segments.ctypes, "CDLL", Driver)
    assert [segments._maps_pages(index) for index in range(3)] == [True, True, False]
    monkeypatch.setattr(segments.ctypes, "CDLL", Mock(side_effect=OSError("no driver")))
    assert not segments._maps_pages(0)


@pytest.mark.parametrize(
    ("built_for", "driver", "gpu", "warning", "reason", "notices"),
    [
        (None, None, False, "", "torch 2.9+cu128 is built without CUDA", False),
        ("12.8", None, False, "", "no NVIDIA driver is installed here", False),
        ("12.8", None, True, "", "no NVIDIA driver is installed here", True),
        (
            "12.8",
            11040,
            True,
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).\nPlease update ...",
            "the NVIDIA driver is too old: found version 470.82.01 for CUDA 11.4, and torch 2.9+cu128 needs CUDA 12.8; "
            "update the driver",
            True,
        ),
        (
            "12.8",
            12020,
            True,
            "CUDA initialization: CUDA unknown error",
            "torch says: CUDA initialization: CUDA un",
            True,
        ),
        ("12.8", 12080, False, "", "torch finds no CUDA device here", False),
    ],
)
def test_cuda_that_torch_cannot_use_is_one_line(
    built_for: str | None,
    driver: int | None,
    gpu: bool,
    warning: str,
    reason: str,
    notices: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def is_available() -> bool:
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=2)
        return False

    def library(name: str) -> SimpleNamespace:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")

        def version(pointer: Any) -> int:
            pointer._obj.value = driver
            return 0

        return SimpleNamespace(cuDriverGetVersion=version)

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch, "__version__", "2.9+cu128")
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", library)
    monkeypatch.setattr(cuda_driver, "_warning", [])
    module, bus = tmp_path / "version", tmp_path / "pci"
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\nGCC version: 12.2.0\n")
    monkeypatch.setattr(cuda_driver, "_MODULE", module)
    (bus / "0").mkdir(parents=True)
    (bus / "0" / "vendor").write_text("0x10de\n" if gpu else "0x8086\n")
    (bus / "0" / "class").write_text("0x030200\n")
    monkeypatch.setattr(cuda_driver, "_PCI", bus)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device = probing.probe("auto")
        with pytest.raises(RecipeError) as raised:
            probing.probe("cuda")
    message = str(raised.value)
    assert message.startswith(f"hardware.device: cuda: {reason}")
    assert message.endswith("or set it to auto or cpu")
    assert "\n" not in message
    # Who did not ask for it reads once that the CPU is used, if there is a GPU.
    assert device.kind == "cpu"
    assert device.notice.startswith(f"runs on the CPU (hardware.device: auto): {reason}") is notices
    assert bool(device.notice) is notices
    assert probing.probe("cpu").notice == ""


@pytest.mark.usefixtures("a_gpu")
def test_a_slice_of_a_gpu_is_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    facts = SimpleNamespace(name=name, total_memory=10 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    device = probing.probe("auto", segments="fixed")
    assert (device.name, device.memory) == (name, 10 << 30)
    assert "is a slice of a GPU (MIG): its 10.00 GiB are all that a run has, and rates are measured" in device.notice
    with pytest.raises(RecipeError, match=r"--gpu: '.*MIG 1g\.10gb' is a slice of a GPU .*describe the device: --gpu"):
        resolve_accelerator(name)


def test_control_groups_limit_memory_also_through_their_parents(tmp_path: Path) -> None:
    for path, text in {
        "a/b/memory.max": "max\n",
        "a/memory.max": "3000\n",
        "memory/job/memory.limit_in_bytes": "2000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu/job/memory.limit_in_bytes": "1\n",  # another controller's folder
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert probing._read_group_limits("0::/a/b\n", tmp_path) == [3000]
    assert min(probing._read_group_limits("4:memory:/job\n3:cpu:/job\n", tmp_path)) == 2000
    assert probing._read_group_limits("4:cpu,memory:/elsewhere\n", tmp_path) == [9223372036854771712]


def test_resident_memory_follows_an_allocation() -> None:
    size = 64 * 2**20
    reset = probing.reset_peak()
    before, peak_before = probing.resident_bytes(), probing.peak_resident_bytes()
    block = mmap.mmap(-1, size)  # the system's own: whether malloc gives memory back depends on what ran before
    for start in range(0, size, 2**20):
        block[start : start + 2**20] = b"x" * 2**20
    assert probing.resident_bytes() - before > 0.9 * size
    assert probing.peak_resident_bytes() >= probing.resident_bytes() - 2**20
    block.close()
    assert probing.resident_bytes() - before < 0.5 * size
    if reset:
        assert probing.peak_resident_bytes() - peak_before > 0.9 * size
        assert probing.reset_peak()
        assert probing.peak_resident_bytes() - before < 0.5 * size


def test_rates_are_interpolated_between_the_measured_shapes() -> None:
    made = made_up()
    assert made.matrix_rate("fp32", "forward", 100, 100, 100) == 1e9
    assert made.matrix_rate("fp32", "forward", 1000, 100, 100) == pytest.approx(2e9)  # half way in logarithms
    assert made.moved_rate("mul", "fp32", 10_000) == pytest.approx(2e9)
    assert [made.moved_rate("mul", "fp32", size) for size in (100, 1000, 10**9)] == [
        1e9,
        1e9,
        4e9,
    ]  # the ends hold beyond
    with pytest.raises(RunError, match="no rate of matmuls in bf16 was measured on made up"):
        made.matrix_rate("bf16", "forward", 1, 1, 1)


def test_finished_runs_tell_plans_their_pace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    made = made_up()
    where = (made.hardware, made.torch, made.threads)
    made.store()

    def pace(*ratios: float) -> float:
        for ratio in ratios:
            note_run(*where, ratio)
        found = load(*where)
        assert found is not None
        return found.pace

    assert pace(1.2, 1.5) == 1.0  # too few
    assert pace(1.3) == 1.3
    assert pace(*[0.9] * 9) == 0.9  # the last nine
    (file,) = tmp_path.glob("runs-*.json")
    file.write_text("{")
    assert pace() == 1.0
    assert pace(2, 2, 2) == 2
    assert pace(1700, 1700, 1700, 0.01, 0.01) == 2  # wrong rates, not a slow machine
    file.write_text(json.dumps({"runs": [{"ratio": 1700.0, "machine": None}] * 6}))  # nothing checked it
    assert pace() == 1.0
    made.store()  # measured anew: they were beside other rates
    assert pace() == 1.0


def test_runs_beside_other_work_correct_no_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    made = made_up()
    where = (made.hardware, made.torch, made.threads)
    made.store()
    alone, unknown, shared = (MachineUse(60.0, 1.9, others, 2, 2) for others in (0.1, None, 0.9))

    def pace(ratio: float, machine: MachineUse) -> float:
        note_run(*where, ratio, machine)
        found = load(*where)
        assert found is not None
        return found.pace

    assert [pace(5.2, shared) for _ in range(9)] == [1.0] * 9
    assert [pace(1.1, alone), pace(1.2, unknown), pace(1.3, alone)] == [1.0, 1.0, 1.2]
    assert pace(5.2, shared) == 1.2
    (file,) = tmp_path.glob("runs-*.json")
    rows = json.loads(file.read_text())["runs"]
    assert [(row["ratio"], row["machine"]["alone"]) for row in rows] == [(1.1, True), (1.2, None), (1.3, True)]
    # Whoever wrote it into the file: the note decides.
    rows += [{"ratio": 9.0, "machine": to_plain_data(shared)}] * 6
    file.write_text(json.dumps({"runs": rows}))
    assert load(*where) == dataclasses.replace(made, pace=1.2)
    for damage in ({"ratio": 1.0}, 3, {"ratio": 1.0, "machine": {"alone": True}}, {"ratio": "1", "machine": None}):
        file.write_text(json.dumps({"runs": [*rows, damage]}))
        assert load(*where) == made


@pytest.mark.parametrize(
    ("speeds", "owner", "world", "told"),
    [
        (
            [1.0] + [20.0] * 4,
            "plain",
            1,
            [5.0],
        ),  # 20 s of steps, the first aside; the rates alone said 100 tokens a second
        ([1.0] + [20.0] * 3, "plain", 1, []),
        ([1.0] + [20.0] * 4, "length_curriculum", 1, []),
        ([1.0] + [20.0] * 4, "plain", 2, []),
    ],
)
def test_a_run_of_enough_steps_of_one_shape_is_noted(
    speeds: list[float], owner: str, world: int, told: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from preheat.training.throughput import ThroughputMeter

    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    device = {"kind": "cpu", "name": "made up", "memory": 1}
    plan = plan_of(values_of(1.0, 8.0, tokens_per_step=100, tokens_per_second=50.0, pace=2.0, device=device))
    monkeypatch.setattr(ThroughputMeter, "machine", lambda self: None)  # or else as busy as it is now
    session: Any = SimpleNamespace(
        plan=plan, build=SimpleNamespace(owner=lambda slot: owner), ranks=SimpleNamespace(world=world)
    )
    meter = ThroughputMeter(session)
    meter.speeds = speeds
    meter.store_speed_correction()
    runs = [json.loads(file.read_text())["runs"] for file in tmp_path.glob("runs-*.json")]
    assert [[run["ratio"] for run in rows] for rows in runs] == ([told] if told else [])


def test_what_checkpointing_costs_the_host_and_the_pace_are_in_a_step() -> None:
    from preheat.planning.dry_run import observe
    from preheat.planning.speed.step_time import estimate_step_seconds

    def seconds(mode: str, **changes: object) -> tuple[float, int]:
        measured = made_up(
            peak_matrix_rate={"fp32": 7e10},
            matrix=tuple(MatrixRate("fp32", layout, 100, 100, 100, 1e15) for layout in LAYOUTS),
            moved=tuple(MovedRate(mover, "fp32", 1000, 1e15) for mover in MOVERS),
            adamw={"fp32": 0.0},
            **changes,
        )
        seen = observe(
            Request(
                tiny(f"{{activation_checkpointing: {{mode: {mode}}}}}"), Device("cpu", "a CPU", 2**33), vocabulary=96
            )
        )
        return estimate_step_seconds(seen, measured), sum(seen.kernels.values())

    for mode, times in (("full", 1.8), ("selective", 3.2)):
        found, kernels = seconds(mode)
        assert found == pytest.approx(8 * times * 1e-6 * kernels, rel=0.02)  # kernels that take no time
    assert seconds("full", pace=1.5)[0] == pytest.approx(1.5 * seconds("full")[0])


def test_our_norm_and_what_low_bits_look_up_have_rates_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan took them for copies: recipes with `fused_operators` and `low_bit_adamw` were a fifth and more too quick."""
    from preheat.planning.dispatch_recorder import Kernel
    from preheat.planning.dry_run import observe
    from preheat.planning.speed.step_time import estimate_kernel_seconds

    rates = {"copy": 1e12, "look_up": 1e10, "where": 2e10, "embedding": 1e12, "mul": 1e12}
    moved = tuple(MovedRate(mover, "fp32", 1000, rate) for mover, rate in rates.items())

    def seconds(operator: str, dtype: str, shapes: tuple[tuple[int, ...], ...], near: float | None = 5e10) -> float:
        kernel = Kernel(operator, dtype, flops=0, bytes_read=8 * 10**6, bytes_written=4 * 10**6, shapes=shapes)
        return estimate_kernel_seconds(kernel, made_up(moved=moved, near=near)) - 1e-6

    rows = ((1000, 1000), (1000,))
    for compiler, forward, backward in (("g++", 36e6, 44e6), (None, 28e6, 84e6)):
        monkeypatch.setattr("preheat.planning.speed.step_time.find_compiler", lambda compiler=compiler: compiler)
        assert seconds("preheat::rms_norm", "bf16", rows) == pytest.approx(39e-6 + forward / 5e10)
        assert seconds("preheat::rms_norm_backward", "bf16", rows) == pytest.approx(39e-6 + backward / 5e10)
    assert seconds("preheat::rms_norm", "fp32", rows, near=None) == pytest.approx(
        12e6 / 1e12 - 1e-6
    )  # a GPU's is one kernel
    assert seconds("index_select", "int", ((256,), (10**6,))) == pytest.approx(8e6 / 1e10)
    assert seconds("index_select", "fp32", ((256, 64), (10**6,))) == pytest.approx(12e6 / 1e12)
    assert seconds("where", "int", ((), (10**6,), (10**6,))) == pytest.approx(12e6 / 2e10)
    seen = observe(Request(tiny("{fused_operators: {}}"), Device("cpu", "a CPU", 2**33), vocabulary=96))
    assert {"preheat::rms_norm", "preheat::rms_norm_backward"} <= {kernel.operator for kernel in seen.kernels}


def test_rates_come_back_as_stored_and_only_for_the_same_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    made = made_up()
    assert load("made up", "2.13.0", 2) is None
    path = made.store()
    assert [path] == list((tmp_path / "cache").iterdir())  # nothing is left beside it
    assert load("made up", "2.13.0", 2) == made
    assert load("made up", "2.13.0", 1) is None
    assert load("made up", "2.11.0", 2) is None
    # A file under this machine's name that is of another version, or that was cut, counts as none.
    for other in ({"torch": "2.11.0"}, {"threads": 4}, {"format": 0}):
        path.write_text(json.dumps({"format": 1, **dataclasses.asdict(made), **other}))
        assert load("made up", "2.13.0", 2) is None, other
    path.write_text(path.read_text()[:100])
    assert load("made up", "2.13.0", 2) is None
    assert describe_unusable_rates("made up", "2.13.0", 2) == ""
    path.write_text(json.dumps({"format": 1, **dataclasses.asdict(made), "hardware": "another"}))
    with pytest.raises(
        RecipeError, match=r"calibration-\w+\.json: was measured on another, and this is made up; delete it"
    ):
        load("made up", "2.13.0", 2)


def test_rates_of_another_torch_or_driver_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from preheat.hardware import benchmark_rates

    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    assert describe_unusable_rates("made up", "2.14.0", 2) == ""  # nothing is stored at all
    dataclasses.replace(made_up(), driver="550.1").store()
    assert describe_unusable_rates("another", "2.14.0", 2) == ""
    assert describe_unusable_rates("made up", "2.14.0", 4) == "", "other threads are other rates, and no surprise"
    torch_line = "made up was calibrated with torch 2.13.0, and this is 2.14.0"
    assert describe_unusable_rates("made up", "2.14.0", 2, "550.1") == torch_line
    driver_line = "made up was calibrated with driver 550.1, and this is 580.2"
    assert describe_unusable_rates("made up", "2.13.0", 2, "580.2") == driver_line
    # Both ways to rates say so, before they measure.
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(benchmark_rates, "remeasure_rates", lambda *more: made_up())
    monkeypatch.setattr(benchmark_rates, "_measure_in_process", lambda *more, **options: made_up())
    device = Device("cuda", "made up", 2**33, driver="580.2")
    benchmark_rates.rates(device, 2, progress=lambda *more: None)
    benchmark_rates.rates_for(device, 2, list)
    assert caplog.messages == [f"{driver_line}: it is measured again"] * 2


@pytest.mark.parametrize(
    "damage",
    [
        {"zzz": 1},
        {"matrix": ["x"]},
        {"matrix": None},
        {"matrix": []},
        {"moved": [{"operator": "mul", "dtype": "fp32", "bytes": 0, "rate": 1e9}]},
        {"attention": {"dtype": "fp32"}},
        {"peak_matrix_rate": {"fp32": 0}},
        {"peak_matrix_rate": {}},
        {"peak_matrix_rate": 0},
        {"adamw": {"fp32": -1.0}},
        {"adamw": {}},
        {"launch": float("nan")},
        {"bandwidth": float("inf")},
        {"bandwidth": 10**400},
        {"near": "fast\x1b[31m"},
        {"contended": "no"},
        {"machine": "quiet"},
        {"machine": {"alone": True, "seconds": 1, "own_cores": 1, "other_cores": "few", "cpus": 2, "threads": 2}},
        {"seconds": True},
    ],
    ids=str,
)
def test_a_damaged_calibration_counts_as_none_and_is_named(
    damage: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    path = made_up().store()
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert load("made up", "2.13.0", 2) is None
    (line,) = caplog.messages
    assert line.startswith(f"{path}: is damaged (")
    assert "\x1b" not in line


@pytest.mark.parametrize(
    "text", ["null", "[" * 100_000, "3", '{"format', "9" * 5000, "\ud800"], ids=lambda text: text[:8]
)
def test_what_is_no_calibration_counts_as_none(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    for path in (made_up().store(), link_rates_path("made up", "2.13.0"), tmp_path / "runs.json"):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert load("made up", "2.13.0", 2) is None
    assert load_links("made up", "2.13.0") == ()
    assert _read_runs(tmp_path / "runs.json") == []


def test_a_damaged_calibration_is_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    whole = dataclasses.replace(made_up(), torch=torch.__version__, threads=1)
    whole.store().write_text("null")
    monkeypatch.setattr("preheat.hardware.benchmark_rates._measure_in_process", lambda *_: whole.store())
    assert rates(Device("cpu", "made up", 2**30), 1) == whole


def test_a_cache_that_cannot_be_written_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(RunError, match=r"cannot store the calibration there .*; set PREHEAT_CACHE"):
        made_up().store()


def test_rates_are_measured_once_and_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    device = Device("cpu", "made up", 2**30)
    with pytest.raises(
        RunError, match="made up with 1 threads are not measured yet; run: preheat calibrate --threads 1"
    ):
        rates(device, 1, measure=False)
    # If it is busy while this is tested, all sizes would be measured again.
    monkeypatch.setattr("preheat.hardware.benchmark_rates._is_quiet", lambda threads: False)
    told: list[float] = []
    first = rates(device, 1, progress=lambda what, done: told.append(done), grid=SMALL)
    assert told[-1] == 1.0
    assert rates(device, 1, measure=False) == rates(device, 1) == first  # a second measurement would not be equal
    # A file in place of a folder.
    monkeypatch.setenv("PREHEAT_CACHE", str(next(tmp_path.glob("calibration*.json"))))
    # Before anything is measured.
    monkeypatch.setattr("preheat.hardware.benchmark_rates.subprocess.Popen", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(RunError, match=r"cannot store the calibration there .*set PREHEAT_CACHE"):
        rates(device, 2, grid=SMALL)


def test_rates_of_a_busy_machine_are_measured_again_once_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    device, others = Device("cpu", "made up", 2**30), 9.0
    use = "preheat.hardware.machine_use.UseMeter.use"
    monkeypatch.setattr(use, lambda self, threads: MachineUse(0.5, 0.0, others, 2, threads))
    busy = dataclasses.replace(made_up(), torch=torch.__version__, threads=1, contended=True)
    busy.store()
    assert rates(device, 1, grid=SMALL) == busy  # it still is
    others = 0.0
    assert rates(device, 1, measure=False) == busy
    quiet = dataclasses.replace(busy, contended=False, bandwidth=9e10)
    monkeypatch.setattr("preheat.hardware.benchmark_rates._measure_in_process", lambda *_: quiet.store())
    assert rates(device, 1) == rates(device, 1, measure=False) == quiet


@pytest.mark.parametrize(
    ("own", "others", "shown"),
    [
        ({}, 1.6, "OMP_WAIT_POLICY = 'PASSIVE'"),
        ({}, 0.1, "GOMP_SPINCOUNT = '10000'"),
        ({"OMP_WAIT_POLICY": "active"}, 1.6, "OMP_WAIT_POLICY = 'ACTIVE'"),
    ],
)
def test_openmp_s_threads_wait_as_others_use_the_cores(own: dict[str, str], others: float, shown: str) -> None:
    script = f"""
from types import SimpleNamespace
from preheat.hardware import openmp
from preheat.core import MachineUse

openmp.UseMeter = lambda: SimpleNamespace(use=lambda threads: MachineUse(0.1, 0.0, {others}, 2, 2))
openmp.os.sched_getaffinity = lambda process: {{0, 1}}
openmp.choose_waiting()
import torch
"""
    kept = {name: text for name, text in os.environ.items() if name not in (*openmp.VARIABLES, "OMP_NUM_THREADS")}
    environment = kept | own | {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    # libgomp prints what it read when torch loaded it.
    assert shown in done.stderr


def test_a_calibration_without_time_left_has_a_rate_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preempted(Stopwatch):
        def __init__(self, cuda: bool, *, strict: bool):
            super().__init__(cuda, strict=strict)
            self.preempted = True

    monkeypatch.setattr("preheat.hardware.benchmark_rates.Stopwatch", Preempted)
    grid = dataclasses.replace(SMALL, limit=0.0, elements=(2**12, 2**14, 2**16), rows=(8, 64, 256), products=(64, 256))
    rushed = calibrate(Device("cpu", "here", 2**30), 1, grid=grid)
    stored = json.loads(json.dumps(rushed.values()))
    assert parse(stored).matrix == rushed.matrix  # it requires a rate of each kind for each dtype
    assert {rate.n for rate in rushed.matrix} == {8}
    assert rushed.contended  # so that a plan on a quiet machine measures again
    assert max(rate.bytes for rate in rushed.moved if rate.operator == "copy") == 2 * 4 * 2**16  # not the smallest
    assert len({rate.bytes for rate in rushed.moved if (rate.operator, rate.dtype) == ("copy", "fp32")}) == 1


def test_the_part_of_a_calibration_with_the_most_other_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(*others: float | None, seconds: float = 2.0) -> MachineUse:
        left = list(others)
        meter = "preheat.hardware.machine_use.UseMeter.use"
        monkeypatch.setattr(meter, lambda self, threads: MachineUse(seconds, 1.0, left.pop(0), 2, threads))
        parts = _Parts(2)
        assert [parts.measure(lambda n=n: n) for n in range(len(others))] == [*range(len(others))]
        return parts.most_disturbed

    use = disturbed(0.0, 0.1, 0.2)
    assert (use.alone, use.other_cores, use.seconds) == (True, 0.2, 2.0)
    use = disturbed(0.0, 0.5, 0.0)
    assert (use.alone, use.other_cores) == (False, 0.5)
    assert disturbed(None, None, None).alone is None  # unknown is not called quiet
    # A moment's work of another process is much of a short part, and little of all.
    use = disturbed(0.0, 0.5, 0.0, seconds=0.05)
    assert use.alone is True
    assert use.other_cores == pytest.approx(0.5 / 3)


def test_calibration_measures_every_operator_and_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, threads = torch.random.get_rng_state(), torch.get_num_threads()
    told: list[float] = []
    found = calibrate(Device("cpu", "here", 2**30), 1, lambda what, done: told.append(done), grid=SMALL)
    assert torch.equal(draws, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert {row.operator for row in found.moved} == set(MOVERS)
    assert {(row.dtype, row.layout) for row in found.matrix} == {
        (dtype, layout) for dtype in ("bf16", "fp32") for layout in LAYOUTS
    }
    rows = [row.flops for row in (*found.matrix, *found.attention)] + [row.rate for row in found.moved]
    scalars = [found.bandwidth, found.launch, *found.adamw.values(), *found.peak_matrix_rate.values()]
    assert min(rows + scalars) > 0
    assert calibration_path("here", found.torch, 1) != calibration_path("here", found.torch, 2)
    unlimited = calibration_path("here", found.torch, 1)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert calibration_path("here", found.torch, 1) != unlimited


def test_the_host_s_time_counts_operators_as_a_dry_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.hardware import host_time
    from preheat.planning.dispatch_recorder import Recorder

    operators = []
    for custom in (False, True):
        step = host_time._build_training_step("cpu", custom=custom)
        with Recorder(64) as recorder:
            step()
        counts = host_time._count_operators(step)
        operators.append(sum(counts.values()))
        assert operators[-1] == sum(recorder.kernels.values())
    ours = counts[host_time._NAME] + counts[f"{host_time._NAME}_back"]
    assert ours == 2 * 9  # two norms of each of four layers, and the last one
    # A step of 10 us an operator, and one of 10 and 90.
    seconds = iter([operators[0] * 1e-5, (operators[1] - ours) * 1e-5 + ours * 9e-5])
    monkeypatch.setattr(host_time, "_lower_quartile", lambda step, device: next(seconds))
    draws = torch.random.get_rng_state()
    assert host_time.measure_host_time("cpu") == pytest.approx((1e-5, 9e-5))
    assert torch.equal(draws, torch.random.get_rng_state())


def test_matrix_rate_is_that_of_a_direct_timing() -> None:
    found = calibrate(Device("cpu", "here", 2**30), 1, grid=SMALL)
    x, w = torch.randn(256, 256), torch.randn(256, 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(200):
            start = time.perf_counter()
            _ = x @ w.t()
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    direct = 2 * 256**3 / min(times)
    assert direct / 3 < found.matrix_rate("fp32", "forward", 256, 256, 256) < direct * 3


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_a_kept_heap_hands_freed_pages_out_again() -> None:
    """In a process of its own: 64 MiB in blocks below glibc's limit, made and freed again and again, cost no page fault anew."""
    code = """
import resource, sys, torch
from preheat.hardware.cpu_allocator import install_heap
from preheat.planning.request import Request
if sys.argv[1] == "keep":
    assert install_heap() is None
def step():
    return [torch.zeros(2 << 20) for _ in range(8)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    kept, default = (
        int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "default")
    )
    assert kept < max(default, 1000) / 10  # by default some thousands, where the system gives pages one by one


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="the heap is for Linux with glibc"
)
def test_without_a_compiler_the_reason_is_told_and_tensors_live_on(tmp_path: Path) -> None:
    code = "import torch; from preheat.hardware.cpu_allocator import *; print(unavailable_reason(), install_heap(), release_unused('cpu'), torch.ones(1 << 20).sum().item())"
    where = {**os.environ, "PATH": str(tmp_path), "PREHEAT_CACHE": str(tmp_path), "CXX": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=where)
    assert done.stdout.split("\n")[0] == " ".join(
        ["no C++ compiler was found; install g++, or name one in CXX"] * 2 + ["True", "1048576.0"]
    )


@pytest.mark.parametrize(
    ("bf16", "techniques", "warned"),
    [
        (8e9, "{mixed_precision: {mode: bf16}}", True),
        (8e9, "{}", False),
        (4e11, "{mixed_precision: {mode: bf16}}", False),
    ],
)
def test_a_plan_tells_of_a_cpu_that_is_slower_in_bf16(bf16: float, techniques: str, warned: bool) -> None:
    from rich.console import Console

    from preheat.cli.views.console import build_answer
    from preheat.planning.plan import plan

    dtypes = ("fp32", "bf16")
    measured = made_up(
        peak_matrix_rate={"fp32": 7e10, "bf16": bf16},
        adamw=dict.fromkeys(dtypes, 1e-9),
        matrix=tuple(MatrixRate(d, layout, 100, 100, 100, 1e9) for d in dtypes for layout in LAYOUTS),
        moved=tuple(MovedRate(mover, d, 1000, 1e9) for d in dtypes for mover in MOVERS),
    )
    made = plan(Request(tiny(techniques), Device("cpu", "a CPU", 2**33), vocabulary=96, rates=measured))
    assert made.fp32_rate == (7e10 if warned else None)
    screen = Console(width=200, file=io.StringIO())
    with screen.capture() as caught:
        screen.print(build_answer(made, "tiny"))
    assert ("a CPU is slow in bf16: 8 GFLOP/s, and 70 in fp32" in caught.get()) == warned


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory of Linux")
def test_what_an_evaluation_has_freed_is_given_back() -> None:
    # As `install_heap` does: malloc never gives memory back by itself.
    code = """
import ctypes
from preheat.hardware.cpu_allocator import release_small
from preheat.hardware.probe import resident_bytes
ctypes.CDLL(None).mallopt(-1, -1)
objects = [bytes(5000) for _ in range(6000)]
objects.append(last := bytes(5000))
full = resident_bytes()
del objects
freed = resident_bytes()
release_small("cuda")
on_gpu = resident_bytes()
release_small("cpu")
print(full - freed < 2**20, freed - on_gpu < 2**20, full - resident_bytes() > 20 * 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of Linux")
def test_a_hole_among_the_tensors_is_no_room_for_other_code() -> None:
    """safetensors allocates from the system, and aborts the process if it cannot."""
    code = """
import resource
from pathlib import Path
import torch
from preheat.hardware.cpu_allocator import install_heap
from preheat.hardware.oom import is_oom, require_room, parse_requested_bytes
assert install_heap() is None
below, above = torch.empty(256 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
del below
size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, ((int(size.split()[1]) << 10) + (32 << 20), resource.RLIM_INFINITY))
torch.empty(64 << 20, dtype=torch.uint8)
require_room(16 << 20)
try:
    require_room(64 << 20)
except MemoryError as error:
    print(is_oom(error), parse_requested_bytes(str(error)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(64 << 20)]


@pytest.mark.parametrize(("capability", "slow"), [("DEFAULT", True), ("AVX2", True), ("AVX512", False)])
def test_the_demo_computes_in_fp32_where_bf16_would_take_an_hour(
    capability: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.cli.demo import _is_slow_in_bf16

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert _is_slow_in_bf16() is slow


@pytest.mark.parametrize(("rate", "sizes"), [(3e8, [256]), (3e10, [256, 2048]), (1e12, [256, 2048, 4096])])
def test_a_large_product_that_would_take_too_long_is_left_out(rate: float, sizes: list[int]) -> None:
    from preheat.hardware.benchmark_rates import FULL, _measure_peak

    made: list[int] = []

    def random(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        made.append(shape[0])
        return torch.empty(0, dtype=dtype)

    class Clock(Stopwatch):
        def __call__(self, call: object, budget: float = 0.01) -> float:
            return 2 * made[-1] ** 3 / rate

    seconds = Clock(cuda=False)
    assert _measure_peak(seconds, random, torch.bfloat16, FULL) == pytest.approx(rate)  # type: ignore[arg-type]
    assert sorted(set(made)) == sizes


@pytest.mark.parametrize(
    "text", ["9" * 400 + "GiB", "1e5GiB", "0GiB", "-1GiB", "12", "12 parsecs", "x" * 5000, "\x1b[31m"]
)
def test_amounts_of_memory_that_are_none(text: str) -> None:
    with pytest.raises(RecipeError, match=r"hardware\.memory: ") as caught:
        probing.parse_memory(text)
    assert len(str(caught.value)) < 250
    assert "\x1b" not in str(caught.value)


def test_more_threads_than_serve_are_refused_before_they_are_measured() -> None:
    from preheat.engine.device import resolve_device
    from preheat.recipe import parse

    with pytest.raises(RecipeError, match=r"hardware.threads: 4,096 are more than"):
        resolve_device(parse("hardware: {threads: 4096}\nstop: {max_steps: 1}"))


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB"
            ),
            True,
        ),
        (
            torch.OutOfMemoryError(
                "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64 GiB"
            ),
            True,
        ),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
            True,
        ),
        (torch.AcceleratorError("HIP error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), False),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"), True),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: ../ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
                "NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            True,
        ),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1"), False),
        (ValueError("out of memory"), False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_says_that_a_gpu_is_out_of_memory(error: Exception, lacks: bool) -> None:
    assert is_oom(error) == lacks
    assert parse_requested_bytes(str(error)) == (20 << 20 if "Tried" in str(error) else None)


def test_a_gpu_s_times_are_its_own_and_not_those_of_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first GPU waiting took the host 0.6 ms; timed by the host's clock a launch of 9 microseconds became 185."""
    wall = device = 0.0

    def wait() -> None:
        nonlocal wall
        wall += 6e-4

    class Event:
        def __init__(self, enable_timing: bool):
            self.at = -1.0

        def record(self) -> None:
            self.at = device

        def synchronize(self) -> None:
            wait()

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1e3

    def call() -> None:
        nonlocal wall, device
        wall, device = wall + 9e-6, device + 9e-6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr("preheat.hardware.timing.time.perf_counter", lambda: wall)
    monkeypatch.setattr("preheat.hardware.timing.run_delays", lambda: {1: 0.0})
    assert Stopwatch(cuda=True)(call) == pytest.approx(9e-6)
    assert Stopwatch(cuda=False)(call) == pytest.approx(9e-6)


def test_a_slow_first_call_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the first backward pass after an installation, while Python compiles what torch imports for it, and the second
    # is slow, too.
    wall, calls = 0.0, iter([2.0, 0.2])

    def call() -> None:
        nonlocal wall
        wall += next(calls, 0.05)

    monkeypatch.setattr("preheat.hardware.timing.time.perf_counter", lambda: wall)
    monkeypatch.setattr("preheat.hardware.timing.run_delays", lambda: {1: 0.0})
    assert Stopwatch(cuda=False)(call) == pytest.approx(0.05)


class Clock:
    """Stands for the clocks of a process whose calls take 0.3 ms, and those that are preempted `wait` seconds more.

    Args:
        known: the kernel shows run delays; otherwise only CPU time tells.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, preempted: Container[int], wait: float, *, known: bool = True):
        self.wall, self.waited, self.used, self.number = 0.0, 0.0, 0.0, 0
        self.preempted, self.wait, self.seconds, self.known = preempted, wait, 3e-4, known
        timing = "preheat.hardware.timing"
        monkeypatch.setattr(f"{timing}.time.perf_counter", lambda: self.wall)
        monkeypatch.setattr(f"{timing}.time.process_time", lambda: self.used)
        monkeypatch.setattr(f"{timing}.time.sleep", self.sleep)
        monkeypatch.setattr(f"{timing}.run_delays", lambda: {1: self.waited, 2: 0.0} if known else None)

    def sleep(self, seconds: float) -> None:
        self.wall += seconds

    def call(self) -> None:
        late = self.wait if self.number in self.preempted else 0.0
        self.number += 1
        self.wall += self.seconds + late
        self.waited += late
        # A thread spins at a barrier while it waits for another one, which CPU time does not tell from work.
        self.used += self.seconds + (late if self.known else 0.0)


EVERY_OTHER = range(0, 300, 2)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("preempted", "wait"),
    [
        ([0, 1], 0.004),  # the warm-up
        ([1, 2, 3, 4, 6, 7], 0.004),
        (range(0, 300, 3), 0.004),
        ([n for n in range(300) if n % 10 not in (8, 9)], 0.004),  # the cores are free for moments
        ([0, 1], 0.04),  # so long that it seems a long call
        (range(1, 300, 3), 0.04),
    ],
)
def test_preempted_calls_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch, preempted: Container[int], wait: float, known: bool
) -> None:
    clock = Clock(monkeypatch, preempted, wait, known=known)
    with limit_threads(1):
        assert Stopwatch(cuda=False)(clock.call) == pytest.approx(3e-4)
    assert clock.wall < 0.3  # and they are not repeated for long


def test_cpu_time_alone_does_not_see_threads_that_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outliers are left out all the same, and no call is taken for one of a single thread."""
    clock = Clock(monkeypatch, EVERY_OTHER, 0.004)
    monkeypatch.setattr("preheat.hardware.timing.run_delays", lambda: None)
    with limit_threads(2):
        assert Stopwatch(cuda=False)(clock.call) < 5e-3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two threads need two CPUs")
def test_calls_whose_threads_wait_for_each_other_are_measured_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time slices of two threads can alternate, so that no call of both is ever without a wait."""
    clock = Clock(monkeypatch, range(10**9), 8e-3)
    several = clock.call

    def call() -> None:
        if torch.get_num_threads() > 1:
            return several()
        clock.wall += 6e-4
        return None

    with limit_threads(2):
        assert Stopwatch(cuda=False)(call) == pytest.approx(3e-4)
        begin = clock.wall
        assert Stopwatch(cuda=False, end=begin)(call) == pytest.approx(3e-4)
        assert clock.wall - begin < 0.05  # after the calibration's limit
        assert torch.get_num_threads() == 2
    # One thread has nothing to fall back on, and the shortest call is the nearest.
    with limit_threads(1):
        assert Stopwatch(cuda=False)(several) == pytest.approx(8.3e-3)
    # More threads than CPUs wait for each other in a run, too: that is their time.
    with limit_threads(len(os.sched_getaffinity(0)) + 1):
        assert Stopwatch(cuda=False)(several) == pytest.approx(8.3e-3)


def test_a_measurement_fills_its_memory_only_while_calls_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, calls = 0.0, 0

    def call(seconds: float) -> None:
        nonlocal wall, calls
        wall, calls = wall + seconds, calls + 1

    monkeypatch.setattr("preheat.hardware.benchmark_rates.time.perf_counter", lambda: wall)
    _Cycle([functools.partial(call, 1e-3)] * 16)
    assert calls == 17
    # As if another process took the core in each of them: a minute for all operators.
    calls = 0
    _Cycle([functools.partial(call, 0.03)] * 16)
    assert calls == 2


def test_a_gpu_is_measured_at_the_sizes_that_are_trained_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    large, small = (grid_of(Device("cuda", "a GPU", memory << 30)) for memory in (80, 12))
    hidden, channels, vocabulary, rank = 4096, 14336, 128256, 16  # of Llama 3 8B, with LoRA
    key_value = hidden // 4  # 8 heads of 32
    for shape in ((hidden, hidden), (hidden, key_value), (hidden, channels), (channels, hidden), (hidden, vocabulary)):
        assert shape in large.layers
    assert {(hidden, rank), (rank, hidden)} <= set(large.layers)
    assert {4096, 8192, 16384} <= set(large.rows)
    assert {head_dim for *_, head_dim in large.attention} == {128}
    assert {length for _, _, length, _ in large.attention} >= {4096, 8192, 16384}
    assert {rows * length for rows, _, length, _ in large.attention} == {8192, 16384}
    assert small.layers == GPU.layers
    assert (
        10 * 4 * max(small.elements) < 12 << 30 > 5 * small.most
    )  # ten tensors in fp32; a product's, and results that are kept
    assert grid_of(Device("cpu", "a processor", 80 << 30)) == FULL
    speeds = _measure_host_link(Stopwatch(cuda=False), torch.zeros(2**16))
    assert min(speeds) > 0
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    gpu = made_up(near=None, to_host=2e10, to_device=3e10)
    path = gpu.store()
    assert "host_operator" not in path.read_text()  # as files were before it was measured
    assert load("made up", "2.13.0", 2) == gpu
    dataclasses.replace(gpu, host_operator=1e-5, host_custom=1e-4).store()
    assert load("made up", "2.13.0", 2) == dataclasses.replace(gpu, host_operator=1e-5, host_custom=1e-4)
    gpu.store()
    stored = json.loads(path.read_text())
    assert stored["format"] == 10
    path.write_text(json.dumps(stored | {"to_host": -1}))
    assert load("made up", "2.13.0", 2) is None
    path.write_text(json.dumps(stored | {"format": 8}))  # measured at a CPU's sizes
    assert load("made up", "2.13.0", 2) is None
    made_up().store()
    assert json.loads(path.read_text())["format"] == 9
    assert "to_host" not in path.read_text()  # a CPU's file is what it was
    assert load("made up", "2.13.0", 2) == made_up()


def test_a_gpu_s_grid_is_measured_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU of 80 GiB on which nothing takes longer than a microsecond: which shapes are multiplied, in which order."""
    from preheat.hardware import benchmark_rates as calibrating

    device = Device("cuda", "a GPU", 80 << 30)
    measured: list[Any] = []
    moved: list[int] = []

    class Meta(Random):
        def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

    class Clock(Stopwatch):
        def __call__(self, call: Any, budget: float = 0.01) -> float:
            measured.append(call())
            return 1e-6

    def link(clock: Any, source: torch.Tensor) -> tuple[float, float]:
        moved.append(source.nbytes)
        return 2e10, 3e10

    ones = torch.ones
    monkeypatch.setattr(calibrating, "Random", lambda kind: Meta("cpu"))
    monkeypatch.setattr(calibrating, "Stopwatch", Clock)
    monkeypatch.setattr(calibrating, "_measure_host_link", link)
    monkeypatch.setattr(calibrating, "_measure_movers", lambda *args: [])
    monkeypatch.setattr(calibrating, "has_tf32", lambda device: False)
    monkeypatch.setattr(calibrating, "other_processes_bytes", lambda device: 0)
    monkeypatch.setattr(calibrating, "_measure_adamw", lambda *args: 1e-9)
    monkeypatch.setattr(calibrating, "_measure_attention", lambda *args: [])
    monkeypatch.setattr(calibrating, "measure_host_time", lambda kind: HostTime(1e-5, 1e-4))
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size, device="meta"))
    found = calibrate(device, 1)
    assert set(moved) == {GPU.large}  # more than once on a busy machine
    assert (found.to_host, found.to_device) == (2e10, 3e10)
    for dtype in ("bf16", "fp16"):
        rows = {(rate.n, rate.k, rate.m) for rate in found.matrix if rate.dtype == dtype}
        assert {(8192, 4096, 14336), (16384, 14336, 4096), (4096, 4096, 1024), (16384, 4096, 16)} <= rows
        # Larger than the limit of a product's memory: extrapolated from fewer rows.
        assert rows == {
            (n, k, m)
            for k, m in GPU.layers
            for n in GPU.rows
            if n == min(GPU.rows) or 2 * (n * k + n * m + k * m) <= GPU.most
        }


def test_tf32_is_measured_of_products_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU stands for the GPU, whose switch is on meanwhile and off behind."""
    from preheat.hardware import benchmark_rates as calibrating
    from preheat.planning.dispatch_recorder import Kernel
    from preheat.planning.speed.step_time import estimate_kernel_seconds

    products: Any = torch.backends.cuda.matmul
    before, seen = products.fp32_precision, []
    measure = calibrating._measure_matmuls

    def matrix(*args: Any) -> Any:
        seen.append((args[2], products.fp32_precision == "tf32"))
        return measure(*args)

    monkeypatch.setattr(calibrating, "_measure_matmuls", matrix)
    monkeypatch.setattr(calibrating, "has_tf32", lambda device: True)
    monkeypatch.setattr(calibrating, "_measure_movers", lambda *args: [])
    monkeypatch.setattr(calibrating, "_measure_attention", lambda *args: [])
    found = calibrate(Device("cpu", "here", 2**30), 1, grid=SMALL)
    assert seen == [("bf16", False), ("fp32", False), ("tf32", True)]
    assert products.fp32_precision == before
    rows = {(r.layout, r.n, r.k, r.m) for r in found.matrix if r.dtype == "tf32"}
    assert rows == {(r.layout, r.n, r.k, r.m) for r in found.matrix if r.dtype == "fp32"}
    assert found.peak_matrix_rate["tf32"] >= max(r.flops for r in found.matrix if r.dtype == "tf32")

    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    plain = made_up(near=None, to_host=2e10, to_device=3e10)
    ten = tuple(dataclasses.replace(row, dtype="tf32", flops=10 * row.flops) for row in plain.matrix)
    gpu = dataclasses.replace(plain, matrix=plain.matrix + ten, peak_matrix_rate={"fp32": 2e11, "tf32": 2e12})
    gpu.store()
    assert load("made up", "2.13.0", 2) == gpu
    kernel = Kernel("mm", "fp32", 2 * 100**3, 0, 0, ((100, 100), (100, 100)), (False, True))
    in_tf32 = dataclasses.replace(kernel, dtype="tf32")
    assert estimate_kernel_seconds(kernel, gpu) == pytest.approx(10 * estimate_kernel_seconds(in_tf32, gpu))
    assert estimate_kernel_seconds(in_tf32, plain) == estimate_kernel_seconds(
        kernel, plain
    )  # never measured: as if it were fp32
    dataclasses.replace(gpu, matrix=plain.matrix).store()
    assert load("made up", "2.13.0", 2) is None


def test_a_gpu_s_calibration_that_contradicts_itself_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import preheat.hardware.benchmark_rates as calibrating

    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    # A large copy at a tenth of the bandwidth beside another process, then at the bandwidth.
    copies = [MovedRate("copy", "fp32", 2**30, rate) for rate in (2e9, 2e10)]
    measured = [made_up(near=None, moved=(copy,), contended=False) for copy in copies]
    calls = iter(measured)
    monkeypatch.setattr(calibrating, "calibrate", lambda *args, **options: next(calls))
    device = Device("cuda", "made up", 2**34)
    assert calibrating.measure_sizes(device, 2, [SMALL], lambda *_: None) == measured[1]
    calls = iter(measured[1:])
    assert calibrating.measure_sizes(device, 2, [SMALL], lambda *_: None) == measured[1]
    # The matmuls of a small model, none longer than the shortest kernel: one measurement of its step, and no doubt.
    sizes = (128, 1024)
    matrix = tuple(MatrixRate("fp32", layout, n, n, n, 2 * n**3 / 5e-6) for layout in LAYOUTS for n in sizes)
    calls = iter([made_up(near=None, matrix=matrix, moved=())])
    assert calibrating.measure_sizes(device, 2, [SMALL], lambda *_: None, partial=True).partial
