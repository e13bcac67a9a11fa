"""Out of memory: which errors say so, what was held and asked for, and a limit at which allocations fail before the system would kill.

torch is imported only in functions.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from preheat.hardware.probe import claimed_bytes, resident_bytes, system_memory

__all__ = ["asked_bytes", "memory_limit", "held_bytes", "is_oom", "require_room"]

# What says so in a RuntimeError, which torch.OutOfMemoryError, torch.AcceleratorError and torch.distributed.DistBackendError are too.
_WORDS = re.compile(
    "|".join(
        [
            # torch's allocators ("CUDA out of memory", "HIP out of memory", "CUDA error: out of memory", of pinned memory too) and NCCL
            # ("Cuda failure 2 'out of memory'"); on a CPU torch's, oneDNN's, the C library's and those of Rust's bindings
            r"out of memory",
            r"DefaultCPUAllocator|can't allocate memory|cannot allocate memory|bad_alloc|MemoryError|PyObject pointer is null",
            r"can't start new thread",
            # CUBLAS_, CUDNN_, CUSOLVER_, CUSPARSE_, CUSPARSELT_, HIPBLAS_ and HIPSOLVER_STATUS_ALLOC_FAILED, CUFFT_ALLOC_FAILED, miopenStatusAllocFailed
            r"ALLOC_?FAILED",
            # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and _HOST_; CURAND_STATUS_ALLOCATION_FAILED
            r"ALLOCATION_FAILED",
            r"OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|hipErrorMemoryAllocation|rocblas_status_memory_error",
        ]
    ),
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:tried to|unable to) allocate (\d+(?:\.\d+)?) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}
_KEPT = 0.95  # of what is left: the rest is for what is no private data (pages of files, kernel structures) and for other processes


def is_oom(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had.

    Example:
        >>> is_exhaustion(MemoryError()), is_exhaustion(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    from torch.distributed.checkpoint import CheckpointException  # carries the words of what it wraps

    return isinstance(error, RuntimeError | CheckpointException) and bool(_WORDS.search(str(error)))


def asked_bytes(message: str) -> int | None:
    """Bytes of the allocation that failed, as the error's words have it; None where they do not say.

    Example:
        >>> asked_bytes("you tried to allocate 4096 bytes"), asked_bytes("Tried to allocate 1.50 GiB.")
        (4096, 1610612736)
    """
    match = _ASKED.search(message)
    return int(float(match[1]) * 2 ** _UNITS[match[2].lower()]) if match else None


def held_bytes(kind: str) -> int:
    """Memory that this process has claimed on a device and not given back: on a CPU touched or not, on CUDA with torch's cache."""
    if kind == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return claimed_bytes()


def require_room(size: int) -> None:
    """Raises where so many bytes cannot be had now: ahead of code that would end the process.

    Raises:
        RuntimeError: torch's, of an allocation that failed.
    """
    import torch

    torch.empty(size, dtype=torch.uint8)


@contextmanager
def memory_limit(processes: int = 1) -> Iterator[None]:
    """Within, an allocation fails where the machine or the control group would soon kill the process: a failure can be undone.

    The process's own limit of private data (RLIMIT_DATA, Linux) is set to what it has plus 95 % of what is left, and put back on leaving.

    Args:
        processes: that share this host's memory.
    """
    import resource

    left = system_memory() // processes - resident_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = claimed_bytes() + max(int(_KEPT * left), 0)
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([wanted, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
