"""The heap that a run's CPU tensors live in: torch's allocator replaced by `cpu_allocator.cpp`, built here once for each torch.

Why: glibc's malloc, which torch calls, cuts each aligned block out of a larger piece and hands the rest to small
objects; these stay, and freed tensors leave holes that their like do not fit into (before glibc 2.38), so a run comes
to hold a tenth to two thirds more than its tensors take, by chance. Blocks of 32 MiB and more are mapped anew each
time, a page fault for every 4 KiB. Here tensors stand apart from small objects, freed ones are joined and used again by
the best fit, pages are huge where the system has them, and a step after the first touches no new page. It is all
determined by the order of allocations, so a dry run's log tells what the run will hold (`planning/memory/cpu_heap.py`).
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path

from preheat.errors import RunError
from preheat.hardware.cpp_build import NO_COMPILER, compiler, is_built, library

__all__ = ["release_unused", "install_heap", "unavailable_reason"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_NO_GLIBC = "the heap of preheat is for Linux with glibc"
_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")


@functools.cache
def install_heap() -> str | None:
    """Gives back what is free now, and has CPU tensors live in our heap from here on; glibc keeps the rest of what is freed.

    A run's high-water mark stays what it was. Tensors made before stay where they are. For the rest of the process; a
    second call does nothing.

    Returns:
        None, or why the heap is not used: another system than Linux with glibc, or no C++ compiler. Training is the
            same without
        it, and takes more memory than planned.
    """
    if not _is_glibc():
        return _NO_GLIBC
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    # What is not a tensor, as oneDNN's scratch: by default the heap's free end goes to the system and comes back page
    # by page.
    never = -1
    libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc's own limit
    libc.mallopt(_M_TRIM_THRESHOLD, never)
    try:
        _library().preheat_install()
    except RunError as error:
        return str(error)
    return None


def unavailable_reason() -> str | None:
    """Why `install_heap` would not serve here, as far as can be told without torch and without building anything; None where nothing is in its way."""
    if not _is_glibc():
        return _NO_GLIBC
    return None if is_built(_SOURCE) or compiler() else NO_COMPILER


def release_unused(kind: str) -> bool:
    """Gives what this process holds but does not use back to the system; `kind` is cpu or cuda. False with another C library than glibc.

    For when the shapes of tensors change: what is free lies in holes that the new ones do not fit into.
    """
    if kind == "cuda":
        import torch

        torch.cuda.empty_cache()
        return True
    if not _is_glibc():
        return False
    ctypes.CDLL(None).malloc_trim(0)
    if _library.cache_info().currsize:  # the heap is in use
        _library().preheat_trim()
    return True


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


@functools.cache
def _library() -> ctypes.CDLL:
    heap = library(_SOURCE)
    heap.preheat_furthest.restype = ctypes.c_size_t
    return heap
