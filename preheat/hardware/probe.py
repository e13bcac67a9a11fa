"""Devices and memory of this machine, and the memory of this process. Imports torch only to query a device.

Memory is read from /proc on Linux, which alone tells the peak of a part of a run, and elsewhere by psutil (not yet run
on macOS and Windows).
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core import Device
from preheat.errors import RecipeError, RunError
from preheat.hardware.segments import set_segments
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    import torch

__all__ = [
    "start_peak",
    "can_begin_peak",
    "claimed_bytes",
    "count_cores",
    "parse_memory",
    "peak_bytes",
    "peak_reserved_bytes",
    "peak_resident_bytes",
    "probe",
    "read_cpu_quota",
    "fastest_half_dtype",
    "reset_peak",
    "resident_bytes",
    "system_memory",
    "total_memory",
]

# kb, mb, gb and tb are powers of 1000; kib, mib, gib and tib of 1024.
_UNITS = {"b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for suffix, base in (("b", 1000), ("ib", 1024))
}


_MOST_MEMORY = 2**60
_CLEAR, _MEMINFO = Path("/proc/self/clear_refs"), Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
# Kind of device, or `reserved` on CUDA -> high-water mark before the last reset.
_highest: dict[str, int] = {}


def parse_memory(text: str, what: str = "hardware.memory") -> int:
    """Parses an amount of memory into bytes: 12GiB (2**30 each), 12GB (10**9 each), 800MiB.

    Args:
        what: name of the setting, for the error message.

    Raises:
        RecipeError: the text is not a number with a unit, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    # Zero, which fails the range check, for text without a known unit.
    size = float(match[1]) * unit if match and unit else 0
    if not 1 <= size < _MOST_MEMORY:
        raise RecipeError(
            f"{what}: {quote_value(text)} is not an amount of memory; write a number and a unit, such as 12GiB or "
            "800MiB"
        )
    return int(size)


def probe(device: str = "auto", memory: str | None = None, segments: str | None = None) -> Device:
    """Returns the device of `hardware.device` and `hardware.memory`.

    Args:
        device: `cpu`, `cuda`, or `auto` (cuda if available).
        memory: memory limit of the run, such as `12GiB`; all of the device by default. On a CPU that is the lesser of
            the machine's memory and its control group's limit.
        segments: segments of torch's CUDA allocator, as for `set_segments`; None leaves them unchanged.

    Raises:
        RecipeError: the device is not available, or `memory` cannot be parsed.

    Example:
        >>> probe("cpu", memory="12GiB").memory == 12 * 2**30
        True
    """
    if device not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"hardware.device: '{device}' is not known; write auto, cpu or cuda")
    limit = None if memory is None else parse_memory(memory)
    if device != "cpu":
        import torch

        from preheat.core.units import format_memory as memory_text
        from preheat.hardware.cuda_driver import driver_version, has_cuda, is_slice, why_no_cuda

        if has_cuda():
            facts = torch.cuda.get_device_properties(torch.cuda.current_device())
            size = limit or facts.total_memory
            # Here, because the allocator's segments must be set before the first allocation on the device.
            grow, why = set_segments(segments) if segments else (False, "")
            if is_slice(facts.name):
                slice_ = (
                    f"{facts.name} is a slice of a GPU (MIG): its {memory_text(facts.total_memory / 2**30)} are all "
                    "that a run has, and rates are measured on it, since the catalogue has none of slices"
                )
                why = "; ".join(filter(None, (slice_, why)))
            capability, driver = (facts.major, facts.minor), driver_version()
            return Device("cuda", facts.name, size, capability, expandable=grow, notice=why, driver=driver)
        reason, expected = why_no_cuda()
        if device == "cuda":
            raise RecipeError(f"hardware.device: cuda: {reason}, or set it to auto or cpu")
        # On a machine without a GPU, a CPU is what everybody expects.
        notice = f"runs on the CPU (hardware.device: auto): {reason}" if expected else ""
        return Device("cpu", _read_processor_name(), limit or total_memory(), notice=notice)
    return Device("cpu", _read_processor_name(), limit or total_memory())


def _read_processor_name() -> str:
    # platform.processor() returns the architecture or nothing on most Linux systems.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(
            r"^model name\s*:\s*(\S.*?)\s*$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        if named:
            return named[1]
    return platform.processor() or platform.machine()  # cpuinfo on ARM has no model name


def count_cores() -> int:
    """Returns the number of cores that this process may use; containers and job schedulers limit it on Linux."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Returns the memory of the machine, or the tightest limit of this process's control groups."""
    groups = Path("/proc/self/cgroup")
    if not groups.exists():
        import psutil

        return int(psutil.virtual_memory().total)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_read_group_limits(groups.read_text(encoding="utf-8"), _GROUPS)])


def read_cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = _GROUPS) -> float | None:
    """Returns the cores whose time the control groups of this process grant it; None if they do not limit it.

    A container with `docker run --cpus 2` sees all cores of its host, and `count_cores` counts them.
    """
    if not groups.exists():
        return None
    text = groups.read_text(encoding="utf-8")
    quotas = []
    for file in _find_group_files(text, root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        if file.name == "cpu.max":  # "max 100000", or the quota and its period
            quota, _, period = file.read_text(encoding="utf-8").strip().partition(" ")
        else:  # -1: no limit
            quota = file.read_text(encoding="utf-8").strip()
            period = file.with_name("cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def system_memory() -> int:
    """Returns the memory that this process can use: resident plus available memory, up to the control groups' limit."""
    limit = total_memory()
    if not _MEMINFO.exists():
        import psutil

        return min(limit, resident_bytes() + int(psutil.virtual_memory().available))
    # MemAvailable includes page cache that the kernel can drop, unlike MemFree.
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _MEMINFO.read_text(encoding="utf-8"), re.MULTILINE)
    # MemAvailable excludes the memory of this process.
    return min(limit, resident_bytes() + int(available[1]) * 1024) if available else limit


def _read_group_limits(groups: str, root: Path) -> list[int]:
    """Returns the memory limits of the control groups in /proc/self/cgroup and their parents (cgroup v1 and v2).

    In a container the paths are those of the host while `root` is the container's, so missing files are skipped.
    """
    # cgroup v2 writes "max" for no limit.
    # v1 writes a number near 2**63 instead, which loses against the machine's memory in the minimum.
    texts = [
        file.read_text(encoding="utf-8").strip()
        for file in _find_group_files(groups, root, "memory", "memory.max", "memory.limit_in_bytes")
    ]
    return [int(text) for text in texts if text.isdigit()]


def _find_group_files(groups: str, root: Path, controller: str, name: str, name_v1: str) -> Iterator[Path]:
    """Yields the files of a controller in the control groups of /proc/self/cgroup and their parents.

    Args:
        name: of the file in cgroup v2.
        name_v1: of the file in cgroup v1.
    """
    # Lines are "hierarchy:controllers:path"; the one of cgroup v2 has no controllers.
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, file_name = root, name
        elif controller in controllers.split(","):
            folder, file_name = root / controller, name_v1
        else:
            continue
        parts = Path(path).parts[1:]
        # The limits of all ancestors apply too.
        for depth in range(len(parts) + 1):
            if (file := folder.joinpath(*parts[:depth], file_name)).is_file():
                yield file


def _read_status(key: str) -> int | None:
    """Reads a value of /proc/self/status in bytes; returns None if there is no such file."""
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    match = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    size = _read_status("VmRSS")
    if size is not None:
        return size
    import psutil

    return int(psutil.Process().memory_info().rss)


def claimed_bytes() -> int:
    """Returns the private virtual memory of this process in bytes, which RLIMIT_DATA limits.

    Raises:
        RunError: not on Linux.
    """
    size = _read_status("VmData")
    if size is None:
        raise RunError("claimed memory is read from /proc/self/status, which this system lacks; train on Linux")
    return size


def peak_resident_bytes() -> int:
    """Returns the peak of `resident_bytes` since the process started, or since `reset_peak`."""
    size = _read_status("VmHWM")
    if size is not None:
        return size
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    # macOS counts bytes, other systems KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(kind: str = "cpu") -> bool:
    """Resets the high-water mark to the current usage; returns False if the system does not permit it."""
    _highest.pop(kind, None)
    if kind == "cuda":
        import torch

        _highest.pop("reserved", None)
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        # Writing 5 resets VmHWM to VmRSS (proc(5), clear_refs).
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def can_begin_peak(kind: str) -> bool:
    """True if `start_peak` works for this kind of device."""
    return kind == "cuda" or os.access(_CLEAR, os.W_OK)


def start_peak(kind: str) -> None:
    """Resets the high-water mark of a device's memory; `peak_bytes` still returns the highest.

    Args:
        kind: `cpu` or `cuda`.

    Raises:
        RunError: the system does not permit it.
    """
    # Read before the reset, which also forgets the earlier marks.
    before = {kind: peak_bytes(kind)} | ({"reserved": peak_reserved_bytes()} if kind == "cuda" else {})
    if not reset_peak(kind):
        raise RunError(
            f"{_CLEAR}: cannot be written, so the memory of one step cannot be separated from that of another"
        )
    _highest.update(before)


def peak_bytes(kind: str, *, since_begun: bool = False) -> int:
    """Returns the peak memory of this process on a device: resident on a CPU, allocated by torch on CUDA.

    Args:
        kind: `cpu` or `cuda`.
        since_begun: count only since the last `start_peak`.
    """
    # The allocator's own mark on CUDA; the kernel's mark on a CPU, which includes everything but swap.
    if kind == "cuda":
        import torch

        now = torch.cuda.max_memory_allocated()
    else:
        now = peak_resident_bytes()
    return now if since_begun else max(now, _highest.get(kind, 0))


def peak_reserved_bytes() -> int:
    """Returns the peak memory that torch's CUDA allocator has reserved."""
    import torch

    return max(torch.cuda.max_memory_reserved(), _highest.get("reserved", 0))


def fastest_half_dtype() -> torch.dtype:
    """Returns bf16, or fp32 on CPUs without bf16 kernels: below AVX512 bf16 matmuls take 10 to 20 times as long."""
    import torch

    return torch.float32 if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2") else torch.bfloat16
