"""CPU allocator for tensors: replaces torch's by the heap of `cpu_allocator.cpp`, compiled once per torch version.

glibc's malloc, torch's default, cuts each aligned block out of a larger one and gives the remainder to small objects.
These stay alive, and freed tensors leave holes that equal tensors do not fit into (before glibc 2.38), so the resident
memory of a run exceeds its tensors by 10 to 67 %, unpredictably. Blocks of 32 MiB and more are mapped anew each time,
with a page fault per 4 KiB.

This heap separates tensors from small objects, reuses freed blocks by best fit with coalescing, and uses huge pages;
after the first step no new page is touched. It is deterministic in the order of allocations, so the log of a dry run
predicts the memory (`planning/memory/cpu_heap.py`).
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path

from preheat.errors import RunError
from preheat.hardware.cpp_build import NO_COMPILER, find_compiler, is_built, load_library

__all__ = ["install_heap", "release_small", "release_unused", "unavailable_reason"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_NO_GLIBC = "the heap of preheat is for Linux with glibc"
_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")


@functools.cache
def install_heap() -> str | None:
    """Allocates CPU tensors from our heap for the rest of the process; idempotent.

    The first call also releases unused memory; after it, `release_unused` does. The high-water mark and the tensors
    allocated before are unaffected. glibc keeps all other freed memory.

    Returns:
        None, or why the heap is not used: the system is not Linux with glibc, or there is no C++ compiler. Without the
        heap training is the same but needs more memory than planned.
    """
    if not _is_glibc():
        return _NO_GLIBC
    # The C library of this process.
    libc = ctypes.CDLL(None)
    # Before trimming is turned off below, or the memory that imports freed would stay resident.
    libc.malloc_trim(0)
    # For memory other than tensors, such as oneDNN's scratch: by default malloc trims the top of its heap and faults it
    # in again page by page.
    never = -1
    # Setting a threshold also ends glibc's dynamic adjustment of it.
    libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc's maximum
    libc.mallopt(_M_TRIM_THRESHOLD, never)
    try:
        _load_library().preheat_install()
    except RunError as error:
        return str(error)
    return None


def unavailable_reason() -> str | None:
    """Returns why `install_heap` would not work here, without importing torch or compiling; None if it should."""
    if not _is_glibc():
        return _NO_GLIBC
    return None if is_built(_SOURCE) or find_compiler() else NO_COMPILER


def release_unused(kind: str) -> bool:
    """Releases unused memory to the system; returns False on a CPU without glibc. `kind` is cpu or cuda.

    Call it when the shapes of tensors change, because new tensors may not fit into the holes of freed ones.
    """
    if kind == "cuda":
        import torch

        torch.cuda.empty_cache()
        return True
    if not _is_glibc():
        return False
    ctypes.CDLL(None).malloc_trim(0)
    # Does not build the library only to trim it.
    if _load_library.cache_info().currsize:  # the heap is in use
        _load_library().preheat_trim()
    return True


def release_small(kind: str) -> None:
    """Releases the unused memory of malloc, which holds everything but tensors; does nothing on a GPU or without glibc.

    Call it after work that is not part of a step: `install_heap` turns off malloc's own trimming, so what an evaluation
    or a checkpoint has freed (5 to 20 MiB) would stay resident beside the tensors of every later step.
    """
    if kind == "cpu" and _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


@functools.cache
def _load_library() -> ctypes.CDLL:
    heap = load_library(_SOURCE)
    # ctypes assumes a C int, which has 32 bits.
    heap.preheat_furthest.restype = ctypes.c_size_t
    return heap
