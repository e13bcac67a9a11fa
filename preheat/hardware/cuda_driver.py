"""Checks for a usable CUDA device, and explains a missing one."""

from __future__ import annotations

import ctypes
import re
import warnings
from pathlib import Path

from preheat.sanitize import shorten

__all__ = ["cuda_of_driver", "driver_version", "has_cuda", "has_gpu", "is_slice", "why_no_cuda"]

_PCI, _NVIDIA, _DISPLAY = Path("/sys/bus/pci/devices"), "0x10de", "0x03"  # vendor and class of NVIDIA's GPUs
_MODULE = Path("/proc/driver/nvidia/version")
_warning: list[str] = []
"""Warnings of torch's first count of devices; it counts, and warns, once per process."""


def has_cuda() -> bool:
    """`torch.cuda.is_available()` without its warning of many lines, which `why_no_cuda` says in one."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    _warning.extend(str(entry.message) for entry in caught)
    return available


def why_no_cuda() -> tuple[str, bool]:
    """Returns why torch finds no CUDA device, with the fix, and if users expect a GPU to work here."""
    import torch

    if torch.backends.mps.is_available():  # not yet run there
        return "training on Apple's GPUs (MPS) is not supported; `preheat plan --gpu` plans for an NVIDIA GPU", True
    gpu, driver = has_gpu(), cuda_of_driver()
    if torch.version.hip is not None:
        return "torch finds no AMD device here", False
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one with it (pytorch.org)", gpu
    if driver is None:
        return "no NVIDIA driver is installed here (libcuda.so.1); install it", gpu
    built = str(torch.version.cuda)
    needs = tuple(map(int, built.split(".")[:2]))
    # Any driver of a major version of CUDA runs what is built for that version or an older one.
    if driver[0] < needs[0]:
        supported = ".".join(map(str, driver))
        return (
            f"the NVIDIA driver is too old: found version {driver_version()} for CUDA {supported}, and torch "
            f"{torch.__version__} needs CUDA {torch.version.cuda}; update the driver, or install a torch for CUDA "
            f"{supported} (pytorch.org)",
            True,
        )
    if _warning:
        return f"torch says: {shorten(_warning[0], 200)}", True
    return "torch finds no CUDA device here (is CUDA_VISIBLE_DEVICES empty?)", gpu


def driver_version() -> str:
    """Returns the version of the NVIDIA driver, or of CUDA that it supports; "" if there is none."""
    if _MODULE.is_file() and (match := re.search(r"\b\d+\.\d+(?:\.\d+)?\b", _MODULE.read_text(encoding="utf-8"))):
        return match[0]
    return ".".join(map(str, cuda_of_driver() or ()))


def is_slice(name: str) -> bool:
    """True if the driver's name of a device is that of a slice of a GPU (MIG).

    Example:
        >>> is_slice("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), is_slice("NVIDIA H100 80GB HBM3")
        (True, False)
    """
    return re.search(r"\bMIG \d+[gc]\.", name) is not None


def cuda_of_driver() -> tuple[int, int] | None:
    """Returns the version of CUDA that the driver supports; None without a driver. Needs no working GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10  # 12040 is CUDA 12.4


def has_gpu() -> bool:
    """True if the PCI bus has a display or compute device of NVIDIA."""
    return any(
        (device / "vendor").read_text(encoding="ascii").strip() == _NVIDIA
        and (device / "class").read_text(encoding="ascii").startswith(_DISPLAY)
        for device in (_PCI.iterdir() if _PCI.is_dir() else ())
    )
