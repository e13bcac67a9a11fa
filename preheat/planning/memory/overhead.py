"""What a device holds beside weights, gradients, optimizer states and activations: each by its name, and where the figure is from."""

from __future__ import annotations

from preheat.core import STEP, Device, Phase
from preheat.engine.checkpoint import is_async
from preheat.hardware.gpu_memory import CONTEXT
from preheat.planning.dry_run import Observation
from preheat.planning.memory.cpu_heap import hold
from preheat.planning.memory.cuda_caching_allocator import replay_caching
from preheat.recipe import Recipe

__all__ = ["EXACT", "SOURCES", "process_overhead", "exporting", "gives_back"]

_MIB = 2**20
# Stacks and scratch of the threads, autograd's objects. By least squares over sixty recipes drawn at random: 16 MiB, and 1.3 for each product in bf16
# (benchmarks/results/plan_vs_measured-drawn.md); 24 and 1.4 were chosen before, on thirty of them and eleven mostly larger ones.
_CPU_BASE = 16 * _MIB
# oneDNN compiles a product in bf16 for each shape and keeps it, and documents bring shapes that the dry run does not see: 0.2 to 3.0 MiB measured.
_CPU_PRODUCT = round(1.3 * _MIB)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_CUBLAS = 32 * _MIB  # torch takes it from its own allocator

SOURCES = {
    "rounding": "the allocator rounds every tensor up, to 512 bytes on a GPU and 64 on a CPU: summed over the tensors alive at the peak",
    "gathered weights": "other devices' shares of the weights, while a layer uses them or they are fetched ahead for the next one: seen by the dry run",
    "communication buffers": "what weights and gradients are packed into to be sent and received: seen by the dry run; what the library of collectives has of its own is not",
    "allocator": "freed memory that is kept, and too scattered for what comes: the dry run's allocations replayed through a model of torch's caching allocator, or of our heap on a CPU",
    "process": "threads' stacks and scratch, autograd's objects: 16 MiB, measured on CPUs",
    "kernels": "products in bf16, compiled for each shape: 1.3 MiB for each that the dry run sees, measured on CPUs",
    "context": "the driver's context and loaded kernels: 527 MiB, measured on an H200",
    "workspaces": "scratch of cuBLAS: 32 MiB at most, torch's setting for Hopper (8 MiB before it)",
    "saving": "a copy of what a checkpoint holds while it is written beside the steps: sizes from the dry run",
}
"""Name of a line of `overhead` -> where its figure is from."""


def process_overhead(recipe: Recipe, observation: Observation, device: Device) -> dict[str, int]:
    """Bytes that a process holds beside what the dry run saw, {what: bytes}."""
    cached = max(_held(observation, device) - _alive(observation), 0)
    if device.kind == "cpu":
        products = sum(
            kernel.dtype == "bf16" and kernel.operator.startswith(_PRODUCTS) for kernel in observation.kernels
        )
        kernels = _CPU_PRODUCT * products
        return {
            "process": _CPU_BASE,
            "kernels": kernels,
            "allocator": cached,
            "saving": _copy_to_save(recipe, observation, device),
        }
    return {"context": CONTEXT, "workspaces": _CUBLAS, "allocator": cached}


def gives_back(observation: Observation, device: Device) -> bool:
    """Whether a GPU has room for the tensors and not for all that its allocator would keep beside them.

    Before an allocation fails torch gives back what is free, segments of fixed sizes that are free as a whole, single pages of those that grow; that takes time,
    step after step. Source: `release_cached_blocks` in torch's CUDACachingAllocator.cpp.
    """
    return device.kind != "cpu" and _alive(observation) <= _room(device) < _kept_at_will(observation, device)


def _room(device: Device) -> int:
    return device.memory - CONTEXT - _CUBLAS


def _alive(observation: Observation) -> int:
    """Bytes of tensors, at most."""
    return max(size for phase, size in observation.peak.items() if phase in (Phase.LOAD, *STEP))


def _kept_at_will(observation: Observation, device: Device) -> int:
    """Bytes had from the system, at most, on a device that is large enough."""
    if observation.held is None:
        observation.held = hold(observation.log, observation.streams, device)
    return observation.held


def _held(observation: Observation, device: Device) -> int:
    """Bytes had from the system, at most. Whether segments of fixed sizes can be given back in time only a log tells."""
    if gives_back(observation, device):
        limited = (
            replay_caching(observation.log, observation.streams, expandable=device.expandable, limit=_room(device))
            if observation.log
            else None
        )
        if limited.fits if limited else device.expandable:
            return limited.reserved if limited else _room(device)
    return _kept_at_will(observation, device)


EXACT = 1 << 29  # weights up to which an export compares in fp64, as compress/export/verify.py has it


def exporting(recipe: Recipe, observation: Observation, device: Device) -> dict[str, int] | None:
    """Categories at the peak of `preheat export` of the run, a command of its own that builds the recipe anew on one device.

    The trained model is compared with what was written in fp64 (large ones in fp32). On a CPU what was written stands there too: read again, and its
    file's pages. None for a run on several devices, whose whole model no dry run saw.
    """
    if any(t.is_parallel() for t in recipe.techniques.values()) or (recipe.parallel.devices or 1) > 1:
        return None
    sizes = dict.fromkeys(observation.categories[Phase.SAVING], 0) | {
        k: observation.categories[Phase.SAVING][k] for k in ("parameters", "optimizer")
    }
    compared = observation.parameters * (8 if observation.parameters <= EXACT else 4)
    if device.kind == "cpu":
        return {**sizes, "temporary": compared + sizes["parameters"]}
    return {**sizes, "temporary": max(compared - sizes["parameters"], 0)}  # it takes the place of the model


def _copy_to_save(recipe: Recipe, observation: Observation, device: Device) -> int:
    """On a CPU, where the host's memory is the device's; a GPU's copy is on the host."""
    if not is_async(recipe, device):
        return 0
    sizes = observation.categories[Phase.SAVING]
    # Frozen weights that stand in a folder already are not saved again.
    share = (
        observation.trained / observation.parameters
        if recipe.model.path and recipe.model.weights == "pretrained"
        else 1.0
    )
    return sizes["optimizer"] + round(sizes["parameters"] * share)
