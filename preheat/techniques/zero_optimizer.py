"""ZeRO: AdamW with states, gradients and weights sharded across processes, as an optimizer for any training loop.

What: stage 1 keeps each parameter's AdamW states on one process only; stage 2 also its gradient; stage 3 also the
weights (FSDP2). Every process computes on its shard of the batch, gradients are averaged, and after the update all have
the same weights.
Helps: 8 bytes per parameter of states (and 4 of gradients, 4 of weights, in fp32) are divided by the number of
processes.
Hurts: weights are sent after each update (stages 1 and 2) or for each layer (stage 3); on one process there is nothing
to shard.
Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054); PyTorch FSDP: Zhao et al. 2023 (arXiv:2304.11277).

This is the optimizer for custom training loops; recipes shard with the techniques `zero1` and `fsdp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from preheat.ops.optim.zero import ZeROAdamW

__all__ = ["ZeROAdamW"]


def __getattr__(name: str) -> type[torch.optim.Optimizer]:
    """Imports `ZeROAdamW` on first access: it subclasses torch's Optimizer."""
    # Importing the techniques must not import torch.
    if name != "ZeROAdamW":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from preheat.ops.optim.zero import ZeROAdamW

    return ZeROAdamW
