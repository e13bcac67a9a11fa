"""Memory of the current CUDA device: allocated, reserved and context memory of this process, and other processes.

Each of the three figures has its own prediction: tensors (allocated), the allocator's segments (reserved), and the
context, which is the driver's state, loaded kernels and library buffers. torch counts the first two. Only the driver
knows the context (NVML, `pip install nvidia-ml-py`); without NVML the planner's constant is used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from preheat.core import Device
from preheat.core.units import format_memory
from preheat.errors import DoesNotFit
from preheat.hardware.cuda_driver import is_slice
from preheat.hardware.oom import is_oom
from preheat.hardware.probe import peak_bytes, peak_reserved_bytes

__all__ = [
    "CONTEXT",
    "OTHERS",
    "MemoryPeak",
    "limit_memory",
    "other_processes_bytes",
    "read_memory_peak",
    "read_uuid",
]

OTHERS = "end them (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
"""Advice if other processes use a GPU."""
CONTEXT = 805 << 20
"""Bytes of a CUDA context in plans, with the kernels of cuBLAS, cuDNN and Triton that training loads.

Measured beyond reserved memory and 32 MiB of workspaces with torch 2.11: 805 MiB on an H100, 735 on an H200; the
context alone is 527 on both (benchmarks/results/gpu_layer.md).
"""
_limited: set[int] = set()  # devices with a limit set by `limit_memory`


@dataclass(frozen=True)
class MemoryPeak:
    """Peak memory of this process on a device, in bytes.

    Attributes:
        total: reserved memory plus context on a GPU; resident memory on a CPU.
        allocated: on a GPU, tensors including cuBLAS workspaces.
        reserved: on a GPU, the memory reserved by torch's allocator.
        context: on a GPU, the context as measured by the driver; None if unavailable.
    """

    total: int
    allocated: int | None = None
    reserved: int | None = None
    context: int | None = None

    def figures(self) -> dict[str, float]:
        """Returns the known figures in GiB, by the keys of a run's `measured` event."""
        sizes = {
            "peak_gib": self.total,
            "allocated_gib": self.allocated,
            "reserved_gib": self.reserved,
            "context_gib": self.context,
        }
        return {key: size / 2**30 for key, size in sizes.items() if size is not None}


def read_memory_peak(kind: str, imports: int = 0) -> MemoryPeak:
    """Returns the peak since the last reset (`preheat.hardware.probe.reset_peak`).

    Args:
        kind: `cpu` or `cuda`.
        imports: on a CPU, bytes to subtract.
    """
    if kind == "cpu":
        return MemoryPeak(max(peak_bytes("cpu") - imports, 0))
    import torch

    reserved, own = peak_reserved_bytes(), _read_driver_bytes()
    # Reserved memory of this moment, not its peak, because the driver's figure is of this moment too.
    context = None if own is None else own - torch.cuda.memory_reserved()
    return MemoryPeak(reserved + (CONTEXT if context is None else context), peak_bytes("cuda"), reserved, context)


def other_processes_bytes(device: Device) -> int:
    """Returns the bytes of a GPU's `memory` that other processes use."""
    import torch

    free, total = _free_and_total(device)
    own = _read_driver_bytes()
    # Without NVML, this process's share is what torch reserved and the usual context.
    others = max(total - free - (torch.cuda.memory_reserved() + CONTEXT if own is None else own), 0)
    # A limit below the GPU's memory leaves a margin, and others matter only beyond it.
    return max(device.memory - (total - others), 0)


def _free_and_total(device: Device) -> tuple[int, int]:
    """Returns the bytes of a GPU that no process uses, and all bytes. Creates the CUDA context.

    Raises:
        DoesNotFit: other processes leave no room for the context.
    """
    import torch

    try:
        return torch.cuda.mem_get_info()
    except RuntimeError as error:
        if not is_oom(error):
            raise
        raise DoesNotFit(
            f"hardware.device: other processes use all of {device.name}'s {format_memory(device.memory / 2**30)}: no "
            "room is "
            f"left for a CUDA context; {OTHERS}"
        ) from None


def limit_memory(device: Device) -> None:
    """Makes allocations fail above `hardware.memory` if the GPU has more; the context does not count towards the limit.

    Removes the limit of an earlier run of this process.
    """
    import torch

    number, total = torch.cuda.current_device(), _free_and_total(device)[1]
    if device.memory < total:
        # The limit covers the allocator only, so the context is subtracted.
        torch.cuda.set_per_process_memory_fraction(max(device.memory - CONTEXT, 1) / total)
        _limited.add(number)
    elif number in _limited:
        torch.cuda.set_per_process_memory_fraction(1.0)
        _limited.remove(number)


def read_uuid(number: int) -> str:
    """Returns the UUID of a CUDA device as NVML writes it: NVML ignores CUDA_VISIBLE_DEVICES and numbers all GPUs."""
    import torch

    facts = torch.cuda.get_device_properties(number)
    return f"{'MIG' if is_slice(facts.name) else 'GPU'}-{facts.uuid}"


def _read_driver_bytes() -> int | None:
    """Returns this process's memory on the device by NVML; None without pynvml or if NVML does not list it."""
    import torch

    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        # Initialization is reference-counted, so a shutdown does not disturb other users of NVML in this process.
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(read_uuid(torch.cuda.current_device()))
            usage = [
                p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()
            ]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    # In a container a different process of the host may have this PID, so check against torch's reserved memory.
    return int(usage[0]) if usage and usage[0] is not None and usage[0] > torch.cuda.memory_reserved() else None
