"""Activation offload: keeps saved activations in host memory until the backward pass needs them.

What: tensors that a layer saves for backward are copied to pinned memory on a separate stream while the next layer
runs, and prefetched one layer ahead of the backward pass. Tensors below `least_kib` and those of the last layers stay
on the device. Bit-identical with deterministic kernels.
Helps: activations of about two layers on the device instead of all, without recomputation; combined with activation
checkpointing, the layers' inputs are offloaded too.
Hurts: the device waits if a layer computes for less time than its activations take over the link (short sequences, slow
links); pinned memory cannot be swapped. The plan takes the link's bandwidth from its data sheet and counts the part of
the transfer that compute does not hide as waiting. On an H200 its gradients were those of a CPU; its
speed was not measured.
Source: Rhu et al. 2016, "vDNN" (arXiv:1602.08124); torch.autograd.graph.saved_tensors_hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Searchable, Stage, Trials
from preheat.recipe import Bound, NonNegativeInt

if TYPE_CHECKING:
    from torch import nn

    from preheat.ops.memory.host_transfer import HostCopy

__all__ = ["ActivationOffload", "offload_activations"]


def offload_activations(
    layers: Iterable[nn.Module], *, stay: int = 1, least: int = 1 << 16, link: HostCopy | None = None
) -> int:
    """Makes layers keep what they save for the backward pass on the host, in place.

    Args:
        layers: in execution order, e.g. `model.model.layers`.
        stay: number of last layers whose tensors stay on the device.
        least: tensors smaller than this many bytes stay on the device.
        link: makes the copies (preheat.ops.memory.host_transfer); chosen by the layers' device if not given.

    Returns:
        The number of layers that offload their activations.

    Example:
        >>> import torch
        >>> stack = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        >>> offload_activations(stack, least=0)
        2
    """
    from preheat.ops.memory.activation_offload import ActivationOffload

    return ActivationOffload(list(layers), stay=stay, least=least, link=link).count


@dataclass(frozen=True, kw_only=True)
class ActivationOffload(Searchable):
    # By its name after activation_checkpointing: the inputs that it keeps are offloaded too.
    stage: ClassVar[Stage] = Stage.CHECKPOINT
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="needs a CUDA device")
    last_resort: ClassVar[bool] = True
    training_only: ClassVar[bool] = True
    memory_saving: ClassVar[bool] = True

    stay: Annotated[int, Bound(1)] = 1
    """Last layers whose activations stay on the device: the backward pass begins with them."""
    least_kib: NonNegativeInt = 64
    """Tensors smaller than this many KiB stay: a small copy costs more than it frees."""

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        problems = []
        if context.device.kind != "cuda":
            problems.append(
                "needs a CUDA device: on a CPU activations are in the "
                "host's memory already; use activation_checkpointing"
            )
        # The last layers' activations are needed at once, so at least one layer stays.
        if self.stay >= context.model.layers:
            problems.append(
                f"stay: {self.stay} of {context.model.layers} layers offloads none; use at most "
                f"{context.model.layers - 1}"
            )
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.errors import RecipeError
        from preheat.models.hf import find_anatomy

        layers = find_anatomy(part).blocks
        if self.stay >= len(layers):  # of a pipeline's stage, which `check` does not know
            raise RecipeError(
                f"techniques.activation_offload.stay: {self.stay} of the {len(layers)} layers of a pipeline's stage "
                "offloads none; use fewer stages, or leave it out"
            )
        count = offload_activations(layers, stay=self.stay, least=self.least_kib << 10)
        return Change(f"activations of {count} of {len(layers)} layers are offloaded to the host", count)
