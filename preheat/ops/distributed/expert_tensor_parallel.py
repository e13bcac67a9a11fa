"""Tensor parallelism of blocks with experts: each rank computes a part of every expert's width, for all tokens.

Nothing inside of such a block knows DTensor. Router and gates are replicated, the stacks of experts and the shared
experts are split like a feed-forward block, and every rank's result is a partial sum, which is added up over the ranks
once, at the end of the block. So the gradients of everything that is replicated are partial sums too: that of a routing
weight is the product of the gradient by the output with this rank's part of the expert's output.

gate and up are one stack: a rank has its rows of both (`_StridedShard` with the factor 2), or its pairs of columns if
the family interleaves them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from preheat.core import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ExpertBlock", "LocalWeights", "Stacks"]


class LocalWeights(ParallelStyle):
    """A module inside a block with experts, whose weight is placed and whose forward pass stays as it is.

    Args:
        weight: placement of a matrix [out, in]; a bias is split with the outputs.
    """

    def __init__(self, weight: Placement):
        self.weight = weight

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, p in [*module.named_parameters(recurse=False)]:
            by_input = self.weight == Shard(1) and key == "bias"
            _place(module, key, p, device_mesh, Replicate() if by_input else self.weight)
        return module


class Stacks(ParallelStyle):
    """A layer's experts as stacks of weights, each split along the experts' width."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, p in [*module.named_parameters(recurse=False)]:
            _place(module, key, p, device_mesh, _place_stack(module, key))
        return module


def _place_stack(experts: Any, key: str) -> Placement:
    """Returns the placement of a parameter of a layer's experts.

    Weights are [experts, out, in], or [experts, in, out] if transposed; biases [experts, out]; the matrices of LoRA are
    never transposed.
    """
    name, _, part = key.partition("_proj")
    before, after = (2, 1) if experts.is_transposed and not part else (1, 2)
    if name in ("gate_up", "up"):
        if part == "_lora_A":
            return Replicate()
        dim = before if part != "_bias" else 1
        return _StridedShard(dim, split_factor=2) if name == "gate_up" and experts.is_concatenated else Shard(dim)
    assert name == "down", key
    # A bias and the second matrix of LoRA come after the sum over the width.
    return Shard(after) if part in ("", "_lora_A") else Replicate()


def _place(module: nn.Module, key: str, p: Tensor, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces a parameter by its part. Experts that `expert_parallel` has split are split once more."""
    # Each rank slices its own copy, without a broadcast.
    if not isinstance(p, DTensor):
        part = distribute_tensor(p, mesh, [placement], src_data_rank=None)
    else:
        own: Any = p.detach()
        cut = distribute_tensor(own.to_local(), mesh, [placement], src_data_rank=None).to_local()
        both = Mesh.combine_meshes(p.device_mesh, mesh)
        part = DTensor.from_local(
            cut, both, [*p.placements, placement], run_check=False, shape=p.shape, stride=p.stride()
        )
    module.register_parameter(key, nn.Parameter(part, requires_grad=p.requires_grad))


class ExpertBlock(ParallelStyle):
    """Router, experts and shared experts of a layer; the modules inside have their local parts of parameters.

    All ranks see the same tokens, so that their routers choose alike. A rank's part of the experts' width gives partial
    outputs, which are summed into the stream between blocks: one all-reduce, or one reduce-scatter if it is split along
    the sequence.

    Args:
        stream: placement of activations between blocks.
    """

    def __init__(self, stream: Placement):
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, p in [*module.named_parameters(recurse=False)]:
            _place(module, key, p, device_mesh, Replicate())
        plain = module.forward

        def gathered(x: Tensor) -> Tensor:
            spread = DTensor.from_local(x, device_mesh, [self.stream], run_check=False)
            # This rank's gradient is that of its part of the experts.
            return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def summed(x: Tensor) -> Tensor:
            spread = DTensor.from_local(x, device_mesh, [Partial()], run_check=False)
            return spread.redistribute(placements=[self.stream]).to_local()

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Families differ in whether a block gets its input by position or by name.
            if args:
                args = (gathered(args[0]), *args[1:])
            else:
                kwargs["hidden_states"] = gathered(kwargs["hidden_states"])
            with _use_partial_parameters(module, device_mesh.size()):
                out = plain(*args, **kwargs)
            return (summed(out[0]), *out[1:]) if isinstance(out, tuple) else summed(out)

        module.forward = forward  # type: ignore[method-assign]
        return module


@contextlib.contextmanager
def _use_partial_parameters(block: nn.Module, degree: int) -> Iterator[None]:
    """Context manager in which the modules of a block have their local parts as parameters.

    The gradient of a replicated parameter is then a partial sum.
    """
    stores: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in block.modules():
            store: dict[str, Any] = module._parameters
            stores.append((store, dict(store)))
            split = any(_is_split(p) for p in store.values())
            for key, p in store.items():
                if isinstance(p, DTensor):
                    ours = p.placements[-1]  # the tensor axis is the innermost
                    partial = Partial() if ours.is_replicate() else ours
                    value = p.to_local(grad_placements=[*p.placements[:-1], partial])
                    # A bias behind a sum over the ranks is added by each of them.
                    once = split and key.endswith("bias") and ours.is_replicate()
                    store[key] = value / degree if once else value
        yield
    finally:
        for store, before in stores:
            store |= before


def _is_split(p: Tensor | None) -> bool:
    return isinstance(p, DTensor) and not p.placements[-1].is_replicate()
