"""Memory overhead of a process (allocator, context, workspaces, ...), itemized, each item with its source."""

from __future__ import annotations

from collections.abc import Iterable

from preheat.core import STEP, Device, Phase
from preheat.engine.checkpoint import is_async
from preheat.hardware.gpu_memory import CONTEXT
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.memory.cpu_heap import hold
from preheat.planning.memory.cuda_caching_allocator import replay_caching
from preheat.planning.observation import Observation
from preheat.recipe import Recipe

__all__ = ["EXACT", "SOURCES", "observe_process_overhead", "estimate_export", "needs_allocator_retries"]

_MIB = 2**20
# Thread stacks, autograd's and the build's objects, and what every step loads of torch and MKL: tiny models in fp32,
# less their operators' code (benchmarks/results/plan_vs_measured-mixers.md).
_CPU_BASE = round(7.5 * _MIB)
# The first call of an operator maps its machine code, and Linux maps 64 KiB around a page fault (fault_around_bytes).
_OPERATOR_CODE = 64 << 10
# The code of oneDNN that chooses and generates kernels is resident from the first call on: a part that all share, and
# one for each kind of operator. The same within 0.7 MiB for AVX2, AVX512 and AMX.
_ONEDNN_CODE = 4 * _MIB
_ONEDNN_OPERATORS = {"convolution": 3 * _MIB, "convolution_backward": round(4.3 * _MIB)}
# oneDNN compiles and caches a kernel for each shape of a bf16 matmul, and packed documents bring shapes that the dry
# run does not see: 0.2 to 3.0 MiB measured. With `_CPU_BASE` and the code it agrees with least squares over 60 random
# recipes (16 MiB plus 1.3 MiB per matmul, benchmarks/results/plan_vs_measured-drawn.md).
_CPU_PRODUCT = round(1.3 * _MIB)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# MKL copies blocks of the operands of an fp32 matmul into buffers that it keeps: 256 rows of the right operand, and a
# block of the left one; nothing for up to 128 rows or columns. Measured for 25 shapes: 0 to 6.6 MiB, for one 15.
_PACKED_ROWS, _PACKED_COLUMNS, _NOT_PACKED = 256, 512, 128
_CPU_PACKING = 7 * _MIB
_CUBLAS = 32 * _MIB  # allocated by torch's caching allocator

SOURCES = {
    "rounding": (
        "the allocator rounds every tensor up, to 512 bytes on a GPU and 64 on a CPU: "
        "summed over the tensors alive at the peak"
    ),
    "allocator": (
        "cached free memory, and fragmentation: the dry run's allocations replayed through a model of torch's "
        "caching allocator, or of our heap on a CPU"
    ),
    "process": "threads' stacks, autograd's objects, what every step loads of torch: 7.5 MiB, measured on CPUs",
    "code": (
        "machine code of the operators in the dry run, which becomes resident at their first call: 64 KiB each, and "
        "4 to 11 MiB of oneDNN for convolutions and bf16 matmuls, measured on CPUs"
    ),
    "packing": "buffers of MKL for the operands of its largest matmul: at most 7 MiB, measured on CPUs",
    "kernels": "bf16 matmuls, compiled for each shape: 1.3 MiB for each in the dry run, measured on CPUs",
    "context": "the driver's context and the kernels that a run loads: 805 MiB, measured on an H100",
    "workspaces": "scratch of cuBLAS: 32 MiB at most, torch's setting for Hopper (8 MiB before it)",
    "saving": "a copy of a checkpoint's contents while it is written during the next steps: sizes from the dry run",
}
"""Item of a plan's `overhead` -> source of its figure."""


def observe_process_overhead(recipe: Recipe, observation: Observation, device: Device) -> dict[str, int]:
    """Returns {item: bytes} of the memory that a process holds in addition to the tensors of the dry run."""
    # What the allocator holds beyond the tensors; the tensors themselves are counted by the dry run.
    cached = max(_replay_with_limit(observation, device) - _peak_allocated(observation), 0)
    if device.kind == "cpu":
        products = [kernel for kernel in observation.kernels if kernel.operator.startswith(_PRODUCTS)]
        # Distinct kernels, because each shape is compiled once, however often it runs.
        compiled = sum(kernel.dtype == "bf16" for kernel in products)
        return {
            "process": _CPU_BASE,
            "code": _estimate_code_bytes(observation.kernels, compiles=compiled > 0),
            "packing": max(
                (_estimate_packing_bytes(kernel) for kernel in products if kernel.dtype == "fp32"), default=0
            ),
            "kernels": _CPU_PRODUCT * compiled,
            "allocator": cached,
            "saving": _copy_to_save(recipe, observation, device),
        }
    # An asynchronous copy for a checkpoint is in host memory here, so it takes none of the GPU's.
    return {"context": CONTEXT, "workspaces": _CUBLAS, "allocator": cached}


def _estimate_code_bytes(kernels: Iterable[Kernel], *, compiles: bool) -> int:
    """Returns the resident bytes of the operators' machine code on a CPU.

    Args:
        compiles: whether oneDNN computes matmuls, in bf16.
    """
    operators = {(kernel.operator, kernel.dtype) for kernel in kernels}
    names = {name for name, _ in operators}
    onednn = sum(size for name, size in _ONEDNN_OPERATORS.items() if name in names)
    return _OPERATOR_CODE * len(operators) + onednn + (_ONEDNN_CODE if onednn or compiles else 0)


def _estimate_packing_bytes(product: Kernel) -> int:
    """Returns the bytes of MKL's buffers for an fp32 matmul."""
    # The summand of addmm comes first.
    (rows, inner), columns = product.shapes[-2][-2:], product.shapes[-1][-1]
    if min(rows, columns) <= _NOT_PACKED:
        return 0
    return min(4 * min(inner, _PACKED_ROWS) * (columns + _PACKED_COLUMNS), _CPU_PACKING)


def needs_allocator_retries(observation: Observation, device: Device) -> bool:
    """True if a GPU has room for the tensors but not for all the memory that its allocator would cache.

    Before an allocation fails, torch releases cached memory: free segments of fixed size, or single pages of expandable
    segments. That takes time in every step. Source: `release_cached_blocks` in torch's
    CUDACachingAllocator.cpp.
    """
    return device.kind != "cpu" and _peak_allocated(observation) <= _estimate_workspace(device) < _replay_without_limit(
        observation, device
    )


def _estimate_workspace(device: Device) -> int:
    # The limit of the caching allocator is the device without the memory that it does not manage.
    return device.memory - CONTEXT - _CUBLAS


def _peak_allocated(observation: Observation) -> int:
    """Returns the peak of allocated bytes in training."""
    return max(size for phase, size in observation.peak.items() if phase in (Phase.LOAD, *STEP))


def _replay_without_limit(observation: Observation, device: Device) -> int:
    """Returns the peak of reserved bytes on a device that is large enough."""
    if observation.reserved is None:
        observation.reserved = hold(observation.log, observation.streams, device)
    return observation.reserved


def _replay_with_limit(observation: Observation, device: Device) -> int:
    """Returns the peak of reserved bytes on this device.

    Only a replay of the log shows if segments of fixed size can be released in time.
    """
    if needs_allocator_retries(observation, device):
        limited = (
            replay_caching(
                observation.log, observation.streams, expandable=device.expandable, limit=_estimate_workspace(device)
            )
            if observation.log
            else None
        )
        # Without a log there is no replay; expandable segments can always be released page by page.
        if limited.fits if limited else device.expandable:
            return limited.reserved if limited else _estimate_workspace(device)
    return _replay_without_limit(observation, device)


EXACT = 1 << 29  # parameters up to which an export is verified in fp64, as in compress/export/verify.py


def estimate_export(recipe: Recipe, observation: Observation, device: Device) -> dict[str, int] | None:
    """Returns the categories at the peak of `preheat export`, which builds the recipe again on one device.

    The export compares the trained model with the written file in fp64 (large models in fp32). On a CPU the written
    model is in memory too: loaded again, and as pages of its file. None for a run on several devices, because no dry
    run observed the full model.
    """
    if any(t.is_parallel() for t in recipe.techniques.values()) or (recipe.parallel.devices or 1) > 1:
        return None
    # Building the recipe again allocates the optimizer states as well, but no gradients or activations.
    sizes = dict.fromkeys(observation.categories[Phase.SAVING], 0) | {
        k: observation.categories[Phase.SAVING][k] for k in ("parameters", "optimizer")
    }
    # 8 bytes per parameter in fp64, 4 in fp32.
    compared = observation.parameters * (8 if observation.parameters <= EXACT else 4)
    if device.kind == "cpu":
        return {**sizes, "temporary": compared + sizes["parameters"]}
    return {**sizes, "temporary": max(compared - sizes["parameters"], 0)}  # it replaces the model


def _copy_to_save(recipe: Recipe, observation: Observation, device: Device) -> int:
    """Returns the bytes of the copy of async checkpointing, on a CPU; with a GPU the copy is in host memory."""
    if not is_async(recipe, device):
        return 0
    sizes = observation.categories[Phase.SAVING]
    # Frozen weights of a pretrained model are not saved again.
    share = (
        observation.trained / observation.parameters
        if recipe.model.path and recipe.model.weights == "pretrained"
        else 1.0
    )
    return sizes["optimizer"] + round(sizes["parameters"] * share)
