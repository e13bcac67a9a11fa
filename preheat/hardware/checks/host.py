"""Checks of the host: memory, shared memory, threads against cores, the C++ compiler, huge pages. No torch."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from preheat.core.finding import Finding, Fix, FixKind, Severity
from preheat.core.units import format_memory
from preheat.hardware.cpp_build import NO_COMPILER, compile_probe, find_compiler
from preheat.hardware.probe import count_cores, read_cpu_quota, system_memory, total_memory
from preheat.sanitize import shorten

__all__ = [
    "check_compiler",
    "check_huge_pages",
    "check_memory",
    "check_shared_memory",
    "check_threads",
    "describe_memory",
    "describe_threads",
]

_SHM, _HUGE = Path("/dev/shm"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEAST_MEMORY = 1 << 30
"""Bytes with which the smallest runs start: torch and transformers alone take 0.4 GiB."""
_LEAST_SHM = 1 << 30
"""Bytes: NCCL takes about 10 MiB for each pair of ranks, and containers start with 64 MiB."""


def check_memory() -> list[Finding]:
    """Checks the memory that a run could have now."""
    return describe_memory(total_memory(), system_memory())


def describe_memory(total: int, available: int) -> list[Finding]:
    """Returns the finding about the host's memory, in bytes; `total` is the machine's, or its control group's limit."""
    shown = f"{format_memory(available / 2**30)} of {format_memory(total / 2**30)} are available"
    if available < _LEAST_MEMORY:
        fix = Fix(FixKind.MANUAL, "ps -eo pid,rss,args --sort -rss | head  # shows what uses it")
        return [Finding("memory", Severity.STOPS, shown, "torch and a small model take 1 GiB", fix)]
    if available < total / 2:
        fix = Fix(FixKind.MANUAL, "ps -eo pid,rss,args --sort -rss | head  # shows what uses it")
        return [Finding("memory", Severity.NOTE, f"{shown}; other processes use the rest", fix=fix)]
    return [Finding("memory", Severity.OK, shown)]


def check_shared_memory(folder: Path = _SHM) -> list[Finding]:
    """Checks the size of shared memory, which NCCL uses between the GPUs of a host; nothing on systems without it."""
    if not folder.is_dir():
        return []
    usage = shutil.disk_usage(folder)
    shown = f"{folder} has {format_memory(usage.free / 2**30)} free of {format_memory(usage.total / 2**30)}"
    if usage.free >= _LEAST_SHM:
        return [Finding("memory", Severity.OK, shown)]
    # A container's is set when it starts.
    contained = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    command = "docker run --shm-size 8g ..." if contained else f"sudo mount -o remount,size=8G {folder}"
    cost = "NCCL fails between the GPUs of a host (No space left on device)"
    return [Finding("memory", Severity.RISKS, shown, cost, Fix(FixKind.MANUAL, command))]


def check_threads() -> list[Finding]:
    """Compares the threads that torch will start with the cores that this process may use."""
    return describe_threads(count_cores(), read_cpu_quota(), os.environ)


def describe_threads(cores: int, quota: float | None, environment: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about threads.

    Args:
        cores: on which this process may run.
        quota: cores whose time its control groups grant; None: no limit.
        environment: with OMP_NUM_THREADS, if the user has chosen.
    """
    usable = cores if quota is None else min(cores, max(1, math.floor(quota)))
    stated = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if stated and not (stated.isdecimal() and int(stated)):
        fix = Fix(FixKind.MANUAL, f"export OMP_NUM_THREADS={usable}")
        message = f"OMP_NUM_THREADS={shorten(stated, 40)} is not a number of threads, and OpenMP ignores it"
        return [Finding("threads", Severity.SLOWS, message, fix=fix)]
    threads = int(stated) if stated else cores
    fix = Fix(FixKind.MANUAL, f"export OMP_NUM_THREADS={usable}")
    if threads > usable:
        limit = f"{cores} cores" if usable == cores else f"the {quota:g} cores that the control group grants"
        message = f"{threads} threads on {limit}"
        cost = "threads wait for each other's cores: a small step took 4.4 s instead of 0.16 s on two cores"
        return [Finding("threads", Severity.SLOWS, message, cost, fix)]
    if threads < usable:
        message = f"OMP_NUM_THREADS={threads} on {usable} usable cores"
        cost = f"CPU training uses {threads} of {usable} cores; right for each of several processes"
        return [Finding("threads", Severity.SLOWS, message, cost, Fix(FixKind.MANUAL, "unset OMP_NUM_THREADS"))]
    return [Finding("threads", Severity.OK, f"{threads} threads on {usable} usable cores")]


def check_huge_pages(file: Path = _HUGE) -> list[Finding]:
    """Checks that the kernel grants huge pages to the heap that CPU runs allocate tensors from."""
    try:
        match = re.search(r"\[(\w+)\]", file.read_text(encoding="ascii"))
    except OSError:  # another system, or a kernel without them
        return []
    if match is None or match[1] != "never":
        return [Finding("memory", Severity.OK, f"transparent huge pages: {match[1] if match else 'on'}")]
    fix = Fix(FixKind.MANUAL, f"echo madvise | sudo tee {file}")
    cost = "tensors of CPU runs cost a page fault per 4 KiB instead of per 2 MiB"
    return [Finding("memory", Severity.SLOWS, "transparent huge pages are off", cost, fix)]


def check_compiler() -> list[Finding]:
    """Looks for a C++ compiler, and compiles a program with the options of preheat's kernels."""
    # The docstrings of `load_native_library`'s callers and of `cpu_allocator` have these figures.
    cost = (
        "on CPUs attention and the loss take up to twice as long, eight- and four-bit weights two to three times, a "
        "run takes 10 to 67 % more memory than planned, and torch.compile does not work"
    )
    compiler = find_compiler()
    if compiler is None:
        return [
            Finding(
                "compiler",
                Severity.SLOWS,
                NO_COMPILER.partition(";")[0],
                cost,
                Fix(FixKind.MANUAL, _find_install_command()),
            )
        ]
    try:
        why = compile_probe(compiler)
    except OSError as error:  # the temporary folder: `storage` reports it too
        why = f"its temporary files cannot be written ({error.strerror})"
    if why:
        fix = Fix(
            FixKind.MANUAL,
            f"export CXX=ANOTHER_COMPILER  # or, if no finding names the disk: {_find_install_command()}",
        )
        message = f"{compiler} does not work: {shorten(why, 200)}"
        return [Finding("compiler", Severity.SLOWS, message, cost, fix)]
    return [Finding("compiler", Severity.OK, f"{compiler} builds the C++ kernels")]


def _find_install_command() -> str:
    """Returns the command that installs a compiler with the package manager that is here."""
    for manager, command in (
        ("apt-get", "sudo apt-get install g++"),
        ("dnf", "sudo dnf install gcc-c++"),
        ("conda", "conda install -c conda-forge gxx"),
        ("brew", "brew install llvm libomp"),
    ):
        if shutil.which(manager):
            return command
    return "export CXX=PATH_OF_A_COMPILER  # after g++ or clang++ is installed"
