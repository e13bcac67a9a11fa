"""Checks of the NVIDIA driver, and of GPUs by what it reports: slices, other processes, compute mode. No torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from preheat.core.finding import Finding, Fix, FixKind, Severity
from preheat.core.units import format_memory
from preheat.hardware.cuda_driver import cuda_of_driver, driver_version, has_gpu
from preheat.hardware.system_metrics import open_nvml

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "Card",
    "Driver",
    "GpuProcess",
    "OpenNvml",
    "check_driver",
    "describe_driver",
    "find_cuda_of_torch",
    "read_driver",
]

OpenNvml: TypeAlias = Callable[[], AbstractContextManager["ModuleType | None"]]

_LEAST_FREE = 2 << 30
"""Bytes of a GPU below which no run starts: its context, and the operands with which rates are measured."""
_CONTEXT = 1 << 30
"""Bytes in use by a display or an idle driver, which disturb no run."""
_UPDATE = Fix(FixKind.MANUAL, "sudo ubuntu-drivers install  # or the driver of your system's package manager")


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU; `bytes` is None if the driver does not report it, as in containers."""

    pid: int
    bytes: int | None


@dataclass(frozen=True)
class Card:
    """A GPU as the driver reports it.

    Attributes:
        used: bytes in use by all processes.
        processes: other processes than this one.
        sliced: MIG is on: the GPU as a whole is not usable.
        slices: names of its slices.
        prohibited: its compute mode forbids all processes.
        exclusive: its compute mode allows one process.
    """

    index: int
    name: str
    memory: int
    used: int
    processes: tuple[GpuProcess, ...] = ()
    sliced: bool = False
    slices: tuple[str, ...] = ()
    prohibited: bool = False
    exclusive: bool = False


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this machine.

    Attributes:
        version: "" without a driver.
        cuda: newest CUDA that it supports; None without a driver.
        on_bus: a GPU of NVIDIA is on the PCI bus, with or without a driver.
        cards: None if NVML does not answer.
    """

    version: str
    cuda: tuple[int, int] | None
    on_bus: bool
    cards: tuple[Card, ...] | None


def check_driver() -> list[Finding]:
    """Checks this machine's driver and GPUs."""
    return describe_driver(read_driver(), find_cuda_of_torch())


def find_cuda_of_torch() -> str | None:
    """Returns the version of CUDA that the torch on the import path is built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    code = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b.*= '([\d.]+)'", code.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def read_driver(open_nvml: OpenNvml = open_nvml) -> Driver:
    """Reads the driver.

    Args:
        open_nvml: opens NVIDIA's management library; None without a driver.
    """
    with open_nvml() as nvml:
        if nvml is None:
            return Driver(driver_version(), cuda_of_driver(), has_gpu(), None)
        try:
            version, number = str(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
            cards = tuple(_read_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError:
            return Driver(driver_version(), cuda_of_driver(), has_gpu(), None)
    return Driver(version, (number // 1000, number % 1000 // 10), has_gpu() or bool(cards), cards)


def _read_card(nvml: ModuleType, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    mode: int = nvml.NVML_COMPUTEMODE_DEFAULT
    processes: list[GpuProcess] = []
    slices: list[str] = []
    sliced = False
    # Cards without MIG, slices and containers do not support some of these.
    with contextlib.suppress(nvml.NVMLError):
        mode = nvml.nvmlDeviceGetComputeMode(handle)
    with contextlib.suppress(nvml.NVMLError):
        processes = [
            GpuProcess(process.pid, process.usedGpuMemory)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if process.pid != os.getpid()
        ]
    with contextlib.suppress(nvml.NVMLError):
        sliced = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if sliced else 0):
        with contextlib.suppress(nvml.NVMLError):  # an instance that is not created
            slices.append(str(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))))
    return Card(
        index,
        str(nvml.nvmlDeviceGetName(handle)),
        memory.total,
        memory.used,
        tuple(processes),
        sliced,
        tuple(slices),
        prohibited=mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
        exclusive=mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    )


def describe_driver(driver: Driver, cuda_of_torch: str | None) -> list[Finding]:
    """Returns the findings about a driver and its GPUs.

    Args:
        cuda_of_torch: version of CUDA that torch is built for; None: none.
    """
    if driver.cuda is None:
        if driver.on_bus:
            message = "a GPU of NVIDIA is here without its driver (libcuda.so.1)"
            return [Finding("driver", Severity.STOPS, message, "runs take the CPU", _UPDATE)]
        return [Finding("driver", Severity.OK, "no GPU of NVIDIA is here: runs take the CPU")]
    supported = ".".join(map(str, driver.cuda))
    findings = []
    # Any driver of a major version of CUDA runs what is built for that version or an older one.
    if cuda_of_torch is not None and driver.cuda[0] < int(cuda_of_torch.partition(".")[0]):
        message = (
            f"the driver is too old: {driver.version} supports CUDA {supported}, and torch is built for {cuda_of_torch}"
        )
        findings.append(Finding("driver", Severity.STOPS, message, "runs take the CPU", _UPDATE))
    if driver.cards is None:
        fix = Fix(FixKind.MANUAL, "nvidia-smi  # says why; after an update of the driver: sudo reboot")
        message = f"the driver {driver.version} does not answer (NVML)"
        findings.append(Finding("driver", Severity.RISKS, message, "its memory and processes are not known", fix))
    elif not driver.cards:
        message = f"the driver {driver.version} reports no GPU"
        fix = Fix(FixKind.MANUAL, "nvidia-smi -L  # in a container: docker run --gpus all")
        findings.append(Finding("driver", Severity.STOPS, message, "runs take the CPU", fix))
    free = [card.index for card in driver.cards or () if not card.sliced and card.used < _CONTEXT]
    for card in driver.cards or ():
        findings += _describe_slices(card) if card.sliced else _describe_use(card, free)
    return findings or [Finding("driver", Severity.OK, f"{driver.version}, for CUDA {supported}")]


def _describe_slices(card: Card) -> list[Finding]:
    label = f"GPU {card.index} ({card.name})"
    if not card.slices:
        fix = Fix(
            FixKind.MANUAL, f"sudo nvidia-smi -i {card.index} -mig 0  # or create a slice: nvidia-smi mig -cgi ID -C"
        )
        return [Finding("gpu", Severity.STOPS, f"{label} is in MIG mode and has no slice", "no run gets it", fix)]
    fix = Fix(FixKind.MANUAL, "export CUDA_VISIBLE_DEVICES=MIG-UUID  # nvidia-smi -L lists the slices")
    names = ", ".join(dict.fromkeys(card.slices))
    message = f"{label} is cut into {len(card.slices)} slices (MIG): {names}"
    return [
        Finding("gpu", Severity.NOTE, message, "a run gets one slice and its memory, and no NCCL across slices", fix)
    ]


def _describe_use(card: Card, free: list[int]) -> list[Finding]:
    label = f"GPU {card.index} ({card.name})"
    if card.prohibited or (card.exclusive and card.processes):
        mode = "forbids all processes" if card.prohibited else "allows one process, and another one has it"
        fix = Fix(FixKind.MANUAL, f"sudo nvidia-smi -i {card.index} -c DEFAULT")
        return [Finding("gpu", Severity.STOPS, f"{label}: its compute mode {mode}", "no run gets it", fix)]
    left, total = format_memory((card.memory - card.used) / 2**30), format_memory(card.memory / 2**30)
    if card.used < _CONTEXT:
        return [Finding("gpu", Severity.OK, f"{label}: {left} of {total} are free")]
    listed = ", ".join(
        f"{process.pid}" + (f" ({format_memory(process.bytes / 2**30)})" if process.bytes is not None else "")
        for process in card.processes
    )
    users = f"process {listed}" if listed else "processes that the driver does not list (another container)"
    fix = (
        Fix(FixKind.MANUAL, f"export CUDA_VISIBLE_DEVICES={free[0]}")
        if free
        else Fix(FixKind.MANUAL, f"kill {card.processes[0].pid}  # if it is yours" if listed else "nvidia-smi")
    )
    severity = Severity.STOPS if card.memory - card.used < _LEAST_FREE else Severity.RISKS
    message = f"{label}: {left} of {total} are free; the rest is in use by {users}"
    return [Finding("gpu", severity, message, "plans and runs get only what is free", fix)]
