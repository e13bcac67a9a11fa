"""A GPU's memory: allocated, reserved and the context apart, what others hold, and `hardware.memory` as a limit. The device is made up."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import Device
from preheat.errors import DoesNotFit
from preheat.hardware import gpu_memory, probe
from preheat.hardware.benchmark_rates import limit_to_free_memory
from preheat.hardware.gpu_memory import CONTEXT, limit_memory, other_processes_bytes, read_memory_peak
from preheat.hardware.probe import start_peak
from preheat.planning.plan import plan
from preheat.planning.plan_request import read_bytes_in_use
from preheat.planning.request import Request
from preheat.planning.search.result import describe_held_memory, describe_shortfall
from preheat.planning.speed.roofline import Roofline
from preheat.report.report_data import Differences, MeasuredFigures
from preheat.report.run_page import render_gpu_memory
from preheat.training.session import reset_memory_baseline
from tests.unit.plans import plan_of, values_of

GIB = 2**30
WHOLE = Device("cuda", "a GPU", 80 * GIB)


class Gpu:
    """What torch and the driver say of a device."""

    def __init__(self) -> None:
        self.free, self.total = 70 * GIB, 80 * GIB
        self.allocated, self.reserved = 5 * GIB, 6 * GIB
        self.most = [20 * GIB, 24 * GIB]
        self.fractions: list[float] = []
        self.name = "a GPU"

    def reset(self) -> None:
        self.most = [self.allocated, self.reserved]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    fakes = {
        "mem_get_info": lambda: (made.free, made.total),
        "memory_allocated": lambda: made.allocated,
        "memory_reserved": lambda: made.reserved,
        "max_memory_allocated": lambda: made.most[0],
        "max_memory_reserved": lambda: made.most[1],
        "reset_peak_memory_stats": made.reset,
        "set_per_process_memory_fraction": made.fractions.append,
        "current_device": lambda: 0,
        "get_device_properties": lambda number: SimpleNamespace(uuid="1234", name=made.name),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    monkeypatch.setattr(probe, "_highest", {})
    monkeypatch.setattr(gpu_memory, "_limited", set())
    return made


def driver(monkeypatch: pytest.MonkeyPatch, *processes: tuple[int, int | None], lost: bool = False) -> None:
    """Installs a made-up NVML that knows these processes, (id, bytes)."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})

    def handle(uuid: str) -> str:
        if lost:
            raise module.NVMLError("Insufficient Permissions")
        assert uuid in ("GPU-1234", "MIG-1234")
        return "handle"

    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetHandleByUUID = handle
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes
    ]
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_each_figure_has_its_own(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_memory_peak("cuda").figures() == {
        "peak_gib": 24 + CONTEXT / GIB,  # a plan's context stands in for one that is not known
        "allocated_gib": 20.0,
        "reserved_gib": 24.0,
    }
    driver(monkeypatch, (1, 3 * GIB), (os.getpid(), 7 * GIB))
    assert read_memory_peak("cuda").figures() == {
        "peak_gib": 25.0,
        "allocated_gib": 20.0,
        "reserved_gib": 24.0,
        "context_gib": 1.0,  # of the 7 GiB that the driver knows of this process, 6 are torch's
    }
    start_peak("cuda")  # a look at one step does not make the run forget its peak
    assert gpu.most == [5 * GIB, 6 * GIB]
    assert read_memory_peak("cuda").figures()["reserved_gib"] == 24.0
    figures = read_memory_peak("cpu", imports=0).figures()
    assert list(figures) == ["peak_gib"]


@pytest.mark.parametrize(
    ("processes", "lost"),
    [((), False), (((os.getpid(), None),), False), (((os.getpid(), GIB),), False), ((), True)],
    ids=["unknown", "not told", "another's number", "no driver"],
)
def test_what_the_driver_does_not_tell_is_as_planned(
    processes: tuple[Any, ...], lost: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch, *processes, lost=lost)
    assert read_memory_peak("cuda").context is None
    assert read_memory_peak("cuda").total == 24 * GIB + CONTEXT


def test_what_others_hold_is_not_there_for_a_run(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.reserved = 0
    assert (
        other_processes_bytes(WHOLE) == 10 * GIB - CONTEXT
    )  # 10 are taken, and of these one context is this process's
    driver(monkeypatch, (os.getpid(), GIB))
    assert read_bytes_in_use(WHOLE) == 9 * GIB
    assert other_processes_bytes(Device("cuda", "a GPU", 60 * GIB)) == 0  # of 60 GiB that the run may use, all are free
    assert other_processes_bytes(Device("cuda", "a GPU", 75 * GIB)) == 4 * GIB


def test_too_little_left_by_others_is_one_line(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.reserved, gpu.free = 0, 3 * GIB
    driver(monkeypatch, (os.getpid(), GIB))
    assert limit_to_free_memory(WHOLE).memory == 4 * GIB  # with what this process holds
    gpu.free = GIB // 2
    with pytest.raises(
        DoesNotFit, match=r"1\.50 GiB of 80\.00 GiB are left, .*other processes hold 78\.50 GiB; end them"
    ):
        limit_to_free_memory(WHOLE)

    def full() -> tuple[int, int]:
        raise torch.cuda.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(DoesNotFit, match=r"other processes use all of a GPU's 80\.00 GiB: no room is left for a CUDA"):
        read_bytes_in_use(WHOLE)


def test_a_slice_is_asked_for_by_its_own_id(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    driver(monkeypatch, (os.getpid(), 7 * GIB))
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetHandleByUUID", lambda uuid: {"MIG-1234": "handle"}[uuid])
    assert read_memory_peak("cuda").context == GIB


def test_what_others_hold_is_in_the_plan_and_its_refusal() -> None:
    recipe = recipes.parse(
        "model: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 96}\nstop: {max_steps: 1}\n"
        "batch: {size: 4, seq_len: 64}"
    )
    rates = Roofline.of("H100")
    request = Request(recipe, rates.as_device, vocabulary=96, rates=rates)
    free, busy = (plan(dataclasses.replace(request, in_use=size)) for size in (0, 79 * GIB - 300 * 2**20))
    assert free.fits
    assert free.in_use_gib == 0
    assert describe_held_memory(free) == ""
    # The same step does not fit beside others.
    assert not busy.fits
    assert busy.peak_gib == free.peak_gib
    assert re.search(r"has 300 MiB: other processes hold 78\.71 GiB of H100; end them", describe_shortfall(busy))


def test_stated_memory_limits_the_allocator(gpu: Gpu) -> None:
    reset_memory_baseline(WHOLE)
    assert gpu.fractions == []  # a limit that a user set stays
    reset_memory_baseline(Device("cuda", "a GPU", 20 * GIB))
    assert gpu.fractions == [(20 * GIB - CONTEXT) / (80 * GIB)]
    limit_memory(WHOLE)
    limit_memory(WHOLE)
    assert gpu.fractions[1:] == [1.0]
    limit_memory(Device("cuda", "a GPU", 1))
    assert 0 < gpu.fractions[-1] < 1e-9


def test_predictions_of_the_same_figures() -> None:
    on_gpu = values_of(25.0, 80.0, allocated_gib=20.0, reserved_gib=24.0, overhead={"context": 0.5, "workspaces": 0.25})
    predicted = plan_of(on_gpu).predicted
    sizes = {"peak_gib": 25.0, "allocated_gib": 20.25, "reserved_gib": 24.25, "context_gib": 0.5}
    assert predicted.known() == {**sizes, "tokens_per_second": on_gpu["tokens_per_second"]}
    on_cpu = plan_of(values_of(2.0, 8.0, allocated_gib=1.0, overhead={"process": 0.1})).predicted
    assert (on_cpu.peak_gib, on_cpu.allocated_gib, on_cpu.context_gib) == (2.0, None, None)
    unknown = dict.fromkeys(("tokens_per_second", "seconds_per_step", "mfu"))
    measured = MeasuredFigures(peak_gib=20.0, allocated_gib=20.0, reserved_gib=30.0, **unknown)
    difference = Differences(peak_gib=None, allocated_gib=0.0125, reserved_gib=-0.19, context_gib=None, **unknown)
    page = render_gpu_memory(SimpleNamespace(predicted=predicted, measured=measured, difference=difference))
    assert "24.25" in page
    assert "−19\u00a0%" in page
    assert "context" not in page
    nothing = SimpleNamespace(
        predicted=predicted, measured=MeasuredFigures(peak_gib=1.0, **unknown), difference=difference
    )
    assert render_gpu_memory(nothing) == ""
