"""How torch's CUDA allocator takes memory from the driver, as `hardware.segments` asks for it: in segments of fixed sizes, or in one a stream that grows.

Growing segments map pages of memory as they are needed (CUDA's virtual memory management), so that freed pieces of any
size serve again. torch has them on Linux. Not every driver maps pages: virtual GPUs may not, and on Windows' subsystem
for Linux mapping is known to fail.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys

from preheat.sanitize import quoted

__all__ = ["grows", "set_segments"]

_MAPS_PAGES = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of cuda.h."""


def grows(setting: str, *, amd: bool = False) -> bool:
    """Whether segments of a device that is planned for from elsewhere grow, as the recipe asks and its driver most likely can.

    Args:
        asked: `hardware.segments`.
        amd: it is AMD's, for which torch has them only since ROCm 7.
    """
    return setting == "expandable" or (setting == "auto" and not amd)


def set_segments(setting: str) -> tuple[bool, str]:
    """Tells torch's allocator of this process what `hardware.segments` asks for. To be called before anything is on the device.

    Args:
        asked: auto, fixed or expandable; `PYTORCH_ALLOC_CONF` of the environment goes before it.

    Returns:
        Whether segments grow, and why if something else than the recipe or torch's abilities decided it; else "".
    """
    # As torch has it.
    variable = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in os.environ else "PYTORCH_CUDA_ALLOC_CONF"
    environment = os.environ.get(variable, "")
    expandable = re.search(r"expandable_segments\s*:\s*(\w+)", environment)
    # The driver's own allocator has no segments.
    if expandable or re.search(r"backend\s*:\s*cudaMallocAsync", environment):
        grow = expandable is not None and "cudaMallocAsync" not in environment and expandable[1].lower() == "true"
        before = f"{variable} of the environment goes before hardware.segments ({setting}): {quoted(environment)}"
        return grow, "" if grow == (setting != "fixed") else before
    if setting == "auto" and (why := _unsupported()):
        return False, f"segments of the GPU's allocator have fixed sizes (hardware.segments: auto): {why}"
    import torch

    grow = setting != "fixed"
    # An earlier run in this process.
    if grow or "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings():
        settings = f"expandable_segments:{grow}"
        torch._C._accelerator_setAllocatorSettings(f"{environment},{settings}" if environment else settings)
    return grow, ""


def _unsupported() -> str:
    """Why growing segments are not taken unasked here; else ""."""
    import torch

    if sys.platform != "linux":
        return "torch has growing ones on Linux"
    if torch.version.hip:
        return "torch has growing ones on AMD's devices only since ROCm 7"
    if "microsoft" in platform.release().lower():
        return "growing ones are known to fail on Windows' subsystem for Linux"
    return "" if _maps_pages(torch.cuda.current_device()) else "this GPU's driver does not map memory page by page"


def _maps_pages(index: int) -> bool:
    """Whether the driver has CUDA's virtual memory management for a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, answer = ctypes.c_int(), ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(answer), _MAPS_PAGES, device)
    return not failed and bool(answer.value)
