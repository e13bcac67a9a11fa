"""Attention as one custom operator that is opaque to torch.compile, with the mask as a tensor.

Document lengths change with every batch. Traced, they would be graph constants and every batch would recompile; as
data, one graph serves all batches. The kernel itself runs uncompiled.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from preheat.core import MaskSpec
from preheat.hardware.transfers import cache_tensors
from preheat.ops.attention.blockwise import attend_blockwise, blocked_passes
from preheat.ops.attention.per_document import Documents, Passes, compute_gradients, forward
from preheat.ops.attention.sdpa import has_sdpa_passes, sdpa_attention, sdpa_passes

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext


__all__ = ["OpaqueAttention", "OpaqueMask"]


class _Known(NamedTuple):
    """How to call a kernel's forward and backward below autograd."""

    passes: Callable[..., tuple[Passes, Documents | None]]
    statistics: bool
    """True if backward needs the result and its log-sum-exp."""
    serves: Callable[..., bool]
    """(q, the kernel's keywords) -> True if the passes are available."""


# All other kernels rerun forward in the backward pass.
_KNOWN: dict[Callable[..., Tensor], _Known] = {
    attend_blockwise: _Known(blocked_passes, False, lambda *_, **__: True),
    sdpa_attention: _Known(sdpa_passes, True, has_sdpa_passes),
}
# Graphs refer to kernels by number.
_ALIVE: weakref.WeakValueDictionary[int, OpaqueAttention] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class OpaqueMask(MaskSpec):
    """A mask whose documents are a host tensor [rows, length] int64: lengths, then zeros."""

    # Typed Any: it replaces the tuples of the base class.
    documents: Any = None

    @staticmethod
    def of(mask: MaskSpec, rows: int, length: int) -> OpaqueMask:
        # A row of one document too, so that packed and plain batches share a graph.
        documents = mask.documents if mask.documents is not None else ((length,),) * rows
        return OpaqueMask(mask.causal, mask.window, _encode_lengths(documents, length), mask.global_tokens)


@cache_tensors(maxsize=16)  # called by every layer with the same arguments
def _encode_lengths(documents: tuple[tuple[int, ...], ...], length: int) -> Tensor:
    # As many columns as tokens: a row has no more documents than that, and the shape never changes.
    return torch.tensor([[*row, *(0 for _ in range(length - len(row)))] for row in documents], dtype=torch.int64)


def _decode_mask(documents: Tensor, causal: bool, window: int, shared: int) -> MaskSpec:
    # On the host, so reading the lengths waits for no device.
    rows = documents.numpy()
    return MaskSpec(causal, window or None, tuple(tuple(row[row > 0].tolist()) for row in rows), shared)


def _softcap_arguments(softcap: float) -> dict[str, float]:
    """Returns the softcap keyword; empty without a cap, since not every kernel supports it."""
    return {"softcap": softcap} if softcap else {}


class OpaqueAttention:
    """Wraps a kernel (q, k, v, mask, scale) -> Tensor for compiled code; `kernel` may be changed at any time.

    Gradients are the kernel's own: flash attention saves its result and log-sum-exp, blockwise attention recomputes its
    scores. Kernels that only autograd can differentiate rerun forward in the backward pass.

    Example:
        >>> attend = OpaqueAttention(attend_blockwise)
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> attend(q, k, v, OpaqueMask.of(MaskSpec(), 1, 4), 1.0).shape
        torch.Size([1, 2, 4, 8])
    """

    def __init__(self, kernel: Callable[..., Tensor]):
        self.kernel = kernel
        # The smallest free number, so that the next build reuses the graphs of a deleted one.
        self.number = next(n for n in itertools.count() if n not in _ALIVE)
        _ALIVE[self.number] = self

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: OpaqueMask, scale: float, *, softcap: float | None = None
    ) -> Tensor:
        if torch.is_autocast_enabled(q.device.type):  # as autocast does for torch's own attention
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        # Decided before the operator: its fake version must know how much it saves.
        known, _ = self._find_known_passes(q)
        keeps = known is not None and known.statistics
        # Operators take no None: 0 means no window and no cap.
        settings = (self.number, mask.causal, mask.window or 0, mask.global_tokens, scale, softcap or 0.0, keeps)
        # Back to [rows, heads, length, dim], a view.
        return _attend(q, k, v, mask.documents, *settings)[0].transpose(1, 2)

    def _find_known_passes(self, q: Tensor) -> tuple[_Known | None, dict[str, Any]]:
        """Returns how to call the passes for tensors like `q`, and the kernel's keywords."""
        # A kernel with settings is a partial of one of `_KNOWN`.
        bound = self.kernel if isinstance(self.kernel, functools.partial) else None
        known, more = _KNOWN.get(bound.func if bound else self.kernel), bound.keywords if bound else {}
        return (known if known is not None and known.serves(q, **more) else None), more

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, softcap: float, keeps: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the result and its log-sum-exp, which is empty unless `keeps` is set."""
        known, more = self._find_known_passes(q)
        # An operator has a fixed number of results, hence the empty one.
        if known is None or not keeps:
            return self.kernel(q, k, v, mask, scale, **_softcap_arguments(softcap)), q.new_empty(0)
        passes, documents = known.passes(q, k, v, mask, scale, **more, **_softcap_arguments(softcap))
        out, lse = forward(passes, q, k, v, documents)
        return out, lse

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskSpec,
        scale: float,
        grad: Tensor,
        softcap: float,
        saved: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, ...]:
        """Returns gradients by q, k and v from the gradient of the result.

        Args:
            saved: the result and its log-sum-exp, if the operator saves them.
        """
        known, more = self._find_known_passes(q)
        if known is not None:
            passes, documents = known.passes(q, k, v, mask, scale, **more, **_softcap_arguments(softcap))
            return compute_gradients(passes, grad, q, k, v, *saved, documents=documents)
        # An operator runs below autograd, so the kernel is run again here to differentiate it.
        with torch.enable_grad():
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
            return torch.autograd.grad(
                self.kernel(q, k, v, mask, scale, **_softcap_arguments(softcap)), (q, k, v), grad
            )


@contextmanager
def _enable_autograd() -> Iterator[None]:
    """Enables autograd inside an operator, where the dispatcher excludes it below `enable_grad`."""
    off = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        off = off.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off):
        yield


# Results are stored as [rows, length, heads, dim], which the adjacent projections read without a copy.


@torch.library.custom_op("preheat::attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    number: int,
    causal: bool,
    window: int,
    shared: int,
    scale: float,
    softcap: float,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    mask = _decode_mask(documents, causal, window, shared)
    # Looked up by number, because an operator takes tensors and numbers but no Python objects.
    out, lse = _ALIVE[number].forward(q, k, v, mask, scale, softcap, keeps)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    number: int,
    causal: bool,
    window: int,
    shared: int,
    scale: float,
    softcap: float,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])  # [rows, length, heads, dim]
    if not keeps:
        return out, q.new_empty(0)
    return out, q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@torch.library.custom_op("preheat::attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    saved: list[Tensor],
    number: int,
    causal: bool,
    window: int,
    shared: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _decode_mask(documents, causal, window, shared)
    # The saved result is stored as [rows, length, heads, dim]; kernels read [rows, heads, length, dim].
    pair = (saved[0].transpose(1, 2), saved[1]) if saved else ()
    with _enable_autograd():
        grads = _ALIVE[number].gradients(q, k, v, mask, scale, grad.transpose(1, 2), softcap, pair)
    a, b, c = (g.transpose(1, 2).contiguous() for g in grads)
    return a, b, c


@_attend_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    saved: list[Tensor],
    number: int,
    causal: bool,
    window: int,
    shared: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]) for t in (q, k, v))
    return a, b, c


def _keep(ctx: AutogradContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # The log-sum-exp has no gradient, and none is allocated for it.
    ctx.set_materialize_grads(False)
    # Inputs: q, k, v, documents, then plain values, of which backward needs all but the last.
    *settings, keeps = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *(output if keeps else ()))
    ctx.settings = settings


def _backward(ctx: AutogradContext, grad: Tensor | None, of_lse: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    q, k, v, documents, *saved = ctx.saved_tensors
    grads = _attend_backward(grad, q, k, v, documents, saved, *ctx.settings)
    # Eleven inputs, of which q, k and v have gradients.
    return (*(g.transpose(1, 2) for g in grads), *[None] * 8)


_attend.register_autograd(_backward, setup_context=_keep)
