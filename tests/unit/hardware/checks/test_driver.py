"""Findings about the NVIDIA driver and its GPUs, by made-up answers of NVML."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from preheat.core.finding import Finding, Severity
from preheat.hardware.checks import driver as checks
from preheat.hardware.checks.driver import describe_driver, read_driver

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


class Nvml:
    """NVML of a machine with GPUs: each a dictionary of what its functions return; absent ones are not supported."""

    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 2, 3
    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self, *cards: dict[str, Any], driver: str = "580.65.06", cuda: int = 13000) -> None:
        self.cards, self.driver, self.cuda = cards, driver, cuda

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:
        return handle.get("name", H100)

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIB, used=int(handle.get("used", 0.5) * GIB))

    def _answer(self, handle: dict[str, Any], key: str) -> Any:
        if key not in handle:
            raise self.NVMLError("Not Supported")
        return handle[key]

    def nvmlDeviceGetComputeMode(self, handle: dict[str, Any]) -> int:
        return self._answer(handle, "mode")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self._answer(handle, "processes")]

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:
        return [self._answer(handle, "mig"), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], index: int) -> dict[str, Any]:
        slices = handle["slices"]
        if index >= len(slices):
            raise self.NVMLError("Not Found")
        return {"name": slices[index]}


@pytest.fixture(autouse=True)
def no_driver_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of this machine's own driver and bus, which a test with NVML must not need."""
    monkeypatch.setattr(checks, "has_gpu", lambda: False)
    monkeypatch.setattr(checks, "cuda_of_driver", lambda: None)
    monkeypatch.setattr(checks, "driver_version", lambda: "")


def diagnose(nvml: Nvml | None, cuda_of_torch: str | None = "13.0") -> list[Finding]:
    @contextlib.contextmanager
    def open_nvml() -> Iterator[Any]:
        yield nvml

    return describe_driver(read_driver(open_nvml), cuda_of_torch)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = diagnose(None)
    assert (finding.severity, finding.fix) == (Severity.OK, None)
    monkeypatch.setattr(checks, "has_gpu", lambda: True)
    (finding,) = diagnose(None)
    assert finding.severity is Severity.STOPS
    assert "without its driver" in finding.message
    monkeypatch.setattr(checks, "cuda_of_driver", lambda: (13, 0))
    monkeypatch.setattr(checks, "driver_version", lambda: "580.65.06")
    (finding,) = diagnose(None)
    assert (finding.severity, finding.message) == (Severity.RISKS, "the driver 580.65.06 does not answer (NVML)")


def test_a_driver_without_gpus_as_in_a_container_that_was_given_none() -> None:
    (finding,) = diagnose(Nvml())
    assert finding.severity is Severity.STOPS
    assert finding.fix is not None
    assert "--gpus all" in finding.fix.command


@pytest.mark.parametrize(
    ("cuda", "cuda_of_torch", "too_old"), [(12040, "13.0", True), (13000, "13.2", False), (13000, None, False)]
)
def test_a_driver_is_too_old_by_its_major_version_of_cuda(cuda: int, cuda_of_torch: str | None, too_old: bool) -> None:
    first = diagnose(Nvml({}, driver="550.54.14", cuda=cuda), cuda_of_torch)[0]
    assert (first.severity is Severity.STOPS) == too_old
    if too_old:
        assert first.message == ("the driver is too old: 550.54.14 supports CUDA 12.4, and torch is built for 13.0")


@pytest.mark.parametrize(
    ("card", "severity", "message", "fix"),
    [
        ({}, Severity.OK, f"GPU 0 ({H100}): 79.50 GiB of 80.00 GiB are free", ""),
        (
            {"used": 60, "processes": [(4711, 58 * GIB), (os.getpid(), GIB)]},
            Severity.RISKS,
            f"GPU 0 ({H100}): 20.00 GiB of 80.00 GiB are free; the rest is in use by process 4711 (58.00 GiB)",
            "kill 4711  # if it is yours",
        ),
        (
            {"used": 79, "processes": [(4711, None)]},
            Severity.STOPS,
            f"GPU 0 ({H100}): 1.00 GiB of 80.00 GiB are free; the rest is in use by process 4711",
            "kill 4711  # if it is yours",
        ),
        (
            {"used": 79, "processes": []},
            Severity.STOPS,
            f"GPU 0 ({H100}): 1.00 GiB of 80.00 GiB are free; the rest is in use by processes that the driver does not "
            "list (another container)",
            "nvidia-smi",
        ),
        (
            {"mig": 1, "slices": ["MIG 1g.10gb", "MIG 1g.10gb", "MIG 3g.40gb"]},
            Severity.NOTE,
            f"GPU 0 ({H100}) is cut into 3 slices (MIG): MIG 1g.10gb, MIG 3g.40gb",
            "export CUDA_VISIBLE_DEVICES=MIG-UUID  # nvidia-smi -L lists the slices",
        ),
        (
            {"mig": 1, "slices": []},
            Severity.STOPS,
            f"GPU 0 ({H100}) is in MIG mode and has no slice",
            "sudo nvidia-smi -i 0 -mig 0  # or create a slice: nvidia-smi mig -cgi ID -C",
        ),
        (
            {"mode": 2},
            Severity.STOPS,
            f"GPU 0 ({H100}): its compute mode forbids all processes",
            "sudo nvidia-smi -i 0 -c DEFAULT",
        ),
        (
            {"mode": 3, "processes": [(4711, GIB)]},
            Severity.STOPS,
            f"GPU 0 ({H100}): its compute mode allows one process, and another one has it",
            "sudo nvidia-smi -i 0 -c DEFAULT",
        ),
        ({"mode": 3, "processes": []}, Severity.OK, f"GPU 0 ({H100}): 79.50 GiB of 80.00 GiB are free", ""),
    ],
)
def test_each_state_of_a_gpu(card: dict[str, Any], severity: Severity, message: str, fix: str) -> None:
    finding = diagnose(Nvml(card))[-1]
    assert (finding.severity, finding.message, finding.fix.command if finding.fix else "") == (severity, message, fix)


def test_a_free_gpu_is_proposed_beside_a_busy_one() -> None:
    busy, free = diagnose(Nvml({"used": 40, "processes": [(4711, 39 * GIB)]}, {}))
    assert busy.fix is not None
    assert busy.fix.command == "export CUDA_VISIBLE_DEVICES=1"
    assert free.severity is Severity.OK


def test_a_driver_that_fails_within_a_call_is_one_finding() -> None:
    nvml = Nvml({})

    def fail() -> int:
        raise Nvml.NVMLError("GPU is lost")

    nvml.nvmlDeviceGetCount = fail  # type: ignore[method-assign]
    assert [finding.severity for finding in diagnose(nvml)] == [Severity.OK], (
        "no driver answers, and no GPU is on the bus"
    )
