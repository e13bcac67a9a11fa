"""Resolves the device and CPU threads of a recipe on this machine."""

from __future__ import annotations

import os
from dataclasses import replace

from preheat.core import Device, Recipe
from preheat.errors import RecipeError
from preheat.hardware.deterministic import set_deterministic

__all__ = ["resolve_device"]

_THREADS_A_CORE = 4  # oversubscription beyond this only slows training down


def resolve_device(recipe: Recipe, on_host: int = 1) -> tuple[Device, int]:
    """Returns the device and the number of CPU threads of a recipe; sets the threads and the determinism of kernels.

    Args:
        on_host: processes on this host: they share its cores and, on CPUs, its memory.

    Raises:
        RecipeError: too many threads for the cores; the environment prevents cuBLAS from being deterministic.
    """
    cores, threads = os.cpu_count() or 1, recipe.hardware.threads or 1
    if threads > _THREADS_A_CORE * cores:  # measuring the rates with thousands of threads takes hours
        raise RecipeError(f"hardware.threads: {threads:,} are more than the {cores} cores here; use at most {cores}")
    # Before CUDA starts: cuBLAS reads its workspace setting once.
    set_deterministic(recipe.hardware.deterministic)
    import torch

    from preheat.hardware.probe import count_cores, probe

    device = probe(recipe.hardware.device, recipe.hardware.memory, recipe.hardware.segments)
    if device.kind == "cpu" and on_host > 1:
        # A GPU is one per process, but host memory is common to all processes here.
        device = replace(device, memory=device.memory // on_host)
    if recipe.hardware.threads:
        torch.set_num_threads(recipe.hardware.threads)
    elif on_host > 1:
        # With a thread per core in each of two processes, a small step took 4.4 s instead of 0.16 s.
        torch.set_num_threads(max(1, count_cores() // on_host))
    return device, torch.get_num_threads()
