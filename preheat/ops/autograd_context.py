"""The type of the context of autograd functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AutogradContext"]


class AutogradContext(Protocol):
    """The `ctx` of `torch.autograd.Function` and of `register_autograd`.

    Torch's own `FunctionCtx` does not declare what backward passes read, nor that any attribute may be set.
    """

    saved_tensors: tuple[Any, ...]  # tensors, or None for an optional tensor that was None
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...
