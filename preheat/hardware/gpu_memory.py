"""Memory of the current CUDA device: what torch's allocator holds, what this process holds beside it, and what others hold.

Three figures are told apart, and each is compared with its own prediction: tensors (allocated), what the allocator has
from the driver for them (reserved), and the context, which is the driver's state, loaded kernels and buffers of
libraries. torch counts the first two. Of the third only the driver knows (NVML, by `pip install nvidia-ml-py`); without
it a plan's figure stands in for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from preheat.core import Device
from preheat.hardware.probe import peak_bytes, peak_reserved_bytes

__all__ = ["CONTEXT", "MemoryPeak", "limit_memory", "memory_peak", "taken_bytes"]

CONTEXT = 527 << 20
"""Bytes of a context, as plans have it: measured on an H200 with torch 2.11 (benchmarks/results/gpu_check-memory.md)."""
_limited: set[int] = set()  # devices whose allocator `limit_memory` limits


@dataclass(frozen=True)
class MemoryPeak:
    """The most memory that this process held on a device. Bytes.

    Attributes:
        total: on a GPU the reserved memory and the context; on a CPU what was resident.
        allocated: on a GPU, of tensors, with cuBLAS's workspaces.
        reserved: on a GPU, what torch's allocator had from the driver at most.
        context: on a GPU, beside that, by the driver; None where it does not tell.
    """

    total: int
    allocated: int | None = None
    reserved: int | None = None
    context: int | None = None

    def figures(self) -> dict[str, float]:
        """GiB by the keys of a run's event `measured`, as far as they are known."""
        sizes = {
            "peak_gib": self.total,
            "allocated_gib": self.allocated,
            "reserved_gib": self.reserved,
            "context_gib": self.context,
        }
        return {key: size / 2**30 for key, size in sizes.items() if size is not None}


def memory_peak(kind: str, imports: int = 0) -> MemoryPeak:
    """Since the high-water mark was begun last (`preheat.hardware.probe.reset_peak`).

    Args:
        kind: `cpu` or `cuda`.
        imports: on a CPU, bytes that are not to count.
    """
    if kind == "cpu":
        return MemoryPeak(max(peak_bytes("cpu") - imports, 0))
    import torch

    reserved, own = peak_reserved_bytes(), _bytes_by_driver()
    context = None if own is None else own - torch.cuda.memory_reserved()
    return MemoryPeak(reserved + (CONTEXT if context is None else context), peak_bytes("cuda"), reserved, context)


def taken_bytes(device: Device) -> int:
    """Bytes of a GPU's `memory` that are not there for a run, since other processes hold them."""
    import torch

    free, total = torch.cuda.mem_get_info()
    own = _bytes_by_driver()
    others = max(total - free - (torch.cuda.memory_reserved() + CONTEXT if own is None else own), 0)
    return max(device.memory - (total - others), 0)


def limit_memory(device: Device) -> None:
    """Lets allocations fail above `hardware.memory`, where it is less than the GPU has; the context is left out of that limit.

    A limit of an earlier run of this process is lifted.
    """
    import torch

    number, total = torch.cuda.current_device(), torch.cuda.mem_get_info()[1]
    if device.memory < total:
        torch.cuda.set_per_process_memory_fraction(max(device.memory - CONTEXT, 1) / total)
        _limited.add(number)
    elif number in _limited:
        torch.cuda.set_per_process_memory_fraction(1.0)
        _limited.remove(number)


def _bytes_by_driver() -> int | None:
    """Bytes of the device that this process holds, by NVML; None without its package, or where it does not know this process, as in many containers."""
    import torch

    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            usage = [
                p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()
            ]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    # In a container another process of the host may have this number: what torch holds must be in it.
    return int(usage[0]) if usage and usage[0] is not None and usage[0] > torch.cuda.memory_reserved() else None
