"""Out-of-memory errors: detection, sizes, and a limit that makes allocations fail before the OOM killer acts.

torch is imported only in functions.
"""

from __future__ import annotations

import errno
import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from preheat.hardware.probe import claimed_bytes, resident_bytes, system_memory

__all__ = ["parse_requested_bytes", "memory_limit", "read_reserved_bytes", "is_oom", "require_room"]

# Messages of RuntimeErrors that mean out of memory; torch.OutOfMemoryError, torch.AcceleratorError and
# torch.distributed.DistBackendError are RuntimeErrors too.
_MESSAGES = re.compile(
    "|".join(
        [
            # torch's allocators ("CUDA out of memory", "HIP out of memory", "CUDA error: out of memory", also for
            # pinned memory) and NCCL ("Cuda failure 2 'out of memory'"); on a CPU torch, oneDNN, the C library and PyO3
            r"out of memory",
            r"DefaultCPUAllocator|can't allocate memory|cannot allocate memory|bad_alloc|MemoryError|"
            r"PyObject pointer is null",
            r"can't start new thread",
            # CUBLAS_, CUDNN_, CUSOLVER_, CUSPARSE_, CUSPARSELT_, HIPBLAS_ and HIPSOLVER_STATUS_ALLOC_FAILED,
            # CUFFT_ALLOC_FAILED, miopenStatusAllocFailed
            r"ALLOC_?FAILED",
            # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and _HOST_; CURAND_STATUS_ALLOCATION_FAILED
            r"ALLOCATION_FAILED",
            r"OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|hipErrorMemoryAllocation|"
            r"rocblas_status_memory_error",
        ]
    ),
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:tried to|unable to) allocate (\d+(?:\.\d+)?) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}
_USABLE = 0.95  # of the available memory: the rest is for page cache, kernel structures and other processes


def is_oom(error: BaseException) -> bool:
    """True if an exception means out of memory.

    Example:
        >>> is_oom(MemoryError()), is_oom(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    # mmap and fork report it by errno.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    from torch.distributed.checkpoint import CheckpointException  # its message contains the wrapped error

    # CheckpointException derives from BaseException, so it is not a RuntimeError.
    return isinstance(error, RuntimeError | CheckpointException) and bool(_MESSAGES.search(str(error)))


def parse_requested_bytes(message: str) -> int | None:
    """Parses the size of the failed allocation from an error message; None if the message has none.

    Example:
        >>> parse_requested_bytes("you tried to allocate 4096 bytes")
        4096
        >>> parse_requested_bytes("Tried to allocate 1.50 GiB.")
        1610612736
    """
    match = _ASKED.search(message)
    return int(float(match[1]) * 2 ** _UNITS[match[2].lower()]) if match else None


def read_reserved_bytes(kind: str) -> int:
    """Returns the bytes that this process has reserved: private virtual memory on a CPU, with torch's cache on CUDA."""
    if kind == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return claimed_bytes()


def require_room(size: int) -> None:
    """Checks that an allocation of `size` bytes succeeds, before code that would crash the process.

    Raises:
        MemoryError: it does not.
    """
    # Claims address space, which the limit counts, without touching pages. From the system: such code does not allocate
    # from the heap of tensors (`cpu_allocator`), whose holes may be large enough.
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as refusal:
        if refusal.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"cannot allocate memory: tried to allocate {size} bytes") from None


@contextmanager
def memory_limit(processes: int = 1) -> Iterator[None]:
    """Context manager that makes allocations fail before the OOM killer would act, because a failure can be handled.

    Sets RLIMIT_DATA to the current usage plus 95 % of the available memory, and restores it on exit. Only Linux
    enforces this limit, so elsewhere allocations fail when the system says so.

    Args:
        processes: number of processes that share this host's memory.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    left = system_memory() // processes - resident_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # RLIMIT_DATA counts private virtual memory, which exceeds resident memory by what is claimed but not touched.
    wanted = claimed_bytes() + max(int(_USABLE * left), 0)
    # An existing limit may be tighter and must not be raised.
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    # The hard limit is unchanged, because a lowered one cannot be restored without privileges.
    resource.setrlimit(resource.RLIMIT_DATA, (min([wanted, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
