"""Segments of torch's CUDA allocator (`hardware.segments`): fixed sizes, or one expandable segment per stream.

Expandable segments map pages on demand (CUDA virtual memory management), so that freed blocks of any size can be
reused. torch supports them on Linux. Not every driver does: virtual GPUs may not, and they are known to fail on WSL.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys

from preheat.sanitize import quote_value

__all__ = ["grows_segments", "set_segments"]

_MAPS_PAGES = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of cuda.h."""


def grows_segments(setting: str, *, amd: bool = False) -> bool:
    """True if segments are expandable on a device that is planned for but not present.

    Args:
        setting: value of `hardware.segments`.
        amd: True for AMD devices, for which torch supports them only since ROCm 7.
    """
    return setting == "expandable" or (setting == "auto" and not amd)


def set_segments(setting: str) -> tuple[bool, str]:
    """Configures torch's allocator as `hardware.segments` asks; call it before the first allocation on the device.

    Args:
        setting: auto, fixed or expandable; `PYTORCH_ALLOC_CONF` in the environment has precedence.

    Returns:
        Whether segments are expandable, and the reason if something other than the recipe decided it; else "".
    """
    # As torch has it.
    variable = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in os.environ else "PYTORCH_CUDA_ALLOC_CONF"
    environment = os.environ.get(variable, "")
    expandable = re.search(r"expandable_segments\s*:\s*(\w+)", environment)
    # The driver's own allocator has no segments.
    if expandable or re.search(r"backend\s*:\s*cudaMallocAsync", environment):
        grow = expandable is not None and "cudaMallocAsync" not in environment and expandable[1].lower() == "true"
        stated = quote_value(environment)
        before = f"{variable} of the environment takes precedence over hardware.segments ({setting}): {stated}"
        # No notice if the environment asks for the same.
        return grow, "" if grow == (setting != "fixed") else before
    if setting == "auto" and (why := _unsupported_reason()):
        return False, f"segments of the GPU's allocator have fixed sizes (hardware.segments: auto): {why}"
    import torch

    from preheat.torch_compat import has_expandable_segments

    grow = setting != "fixed"
    # An earlier run in this process.
    if grow or has_expandable_segments():
        # The call gets the environment's other settings too, so that they stay in force.
        settings = f"expandable_segments:{grow}"
        torch._C._accelerator_setAllocatorSettings(f"{environment},{settings}" if environment else settings)
    return grow, ""


def _unsupported_reason() -> str:
    """Returns why `auto` does not use expandable segments here; else ""."""
    import torch

    if sys.platform != "linux":
        return "torch has expandable ones on Linux"
    if torch.version.hip:
        return "torch has expandable ones on AMD's devices only since ROCm 7"
    if "microsoft" in platform.release().lower():
        return "expandable ones are known to fail on Windows' subsystem for Linux"
    return "" if _maps_pages(torch.cuda.current_device()) else "this GPU's driver does not map memory page by page"


def _maps_pages(index: int) -> bool:
    """True if the driver supports CUDA virtual memory management for a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, answer = ctypes.c_int(), ctypes.c_int()
    # Driver functions return 0 on success, so `or` stops at the first failure.
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(answer), _MAPS_PAGES, device)
    return not failed and bool(answer.value)
