"""Attention over packed documents: each separately, with documents of similar length in one kernel call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from preheat.hardware.transfers import cache_tensors, to_device

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext


__all__ = ["Documents", "Passes", "attend", "attend_by_document", "forward", "compute_gradients"]

Documents = tuple[tuple[int, ...], ...]
"""Lengths of the documents of each row."""

_BLOCK = 64  # lengths are padded to multiples of this


class Passes(NamedTuple):
    """An attention kernel as forward and backward over [n, heads, length, dim]; the caller saves the tensors between
    them.
    """

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """(q, k, v) -> the result and, with `statistics`, its log-sum-exp."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(gradient, q, k, v and, with `statistics`, the result and its log-sum-exp) -> gradients by q, k and v."""
    statistics: bool = False
    """True if `forward` also returns the log-sum-exp [n, heads, length] for `backward`."""


def attend(kernel: Passes, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
    """Computes attention over [rows, heads, length, dim], of full rows or causally within each document.

    Saves q, k and v as they are, and what the kernel needs. Backward rearranges the documents again, so that rows of
    many documents save no more than rows of one.
    """
    out: Tensor = _Attend.apply(q, k, v, kernel, documents)  # type: ignore[no-untyped-call]
    return out


def forward(kernel: Passes, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> tuple[Tensor, ...]:
    """Runs the forward pass of `attend` below autograd; returns the result and the log-sum-exp, if any."""
    if documents is None:
        return kernel.forward(q, k, v)
    layout = _Layout(documents, q.device)
    # One call per group of equal padded length.
    parts = [kernel.forward(*piece) for piece in layout.pieces(q, k, v)]
    out, *lse = zip(*parts, strict=True)
    # The log-sum-exp has no last dimension; it gets one to be rearranged like the results.
    return layout.rows(out), *(layout.rows([t.unsqueeze(-1) for t in each]).squeeze(-1) for each in lse)


def compute_gradients(
    kernel: Passes, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor, documents: Documents | None
) -> tuple[Tensor, ...]:
    """Returns gradients of `attend` by q, k and v. `saved`: the outputs of `forward`, with statistics."""
    if documents is None:
        return kernel.backward(grad, q, k, v, *saved)
    layout, grads = _Layout(documents, q.device), []
    if not saved:
        pieces = layout.pieces(grad, q, k, v)
    else:  # the padding's log-sum-exp is 0, as are its gradients
        *results, lse = saved
        pieces = (
            (*piece, lse.squeeze(-1)) for *piece, lse in layout.pieces(grad, q, k, v, *results, lse.unsqueeze(-1))
        )
    grads = [kernel.backward(*piece) for piece in pieces]
    return tuple(layout.rows(parts) for parts in zip(*grads, strict=True))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, kernel: Passes, documents: Documents | None
    ) -> Tensor:
        ctx.kernel, ctx.documents = kernel, documents
        results = forward(kernel, q, k, v, documents)
        # In row order: padded groups would take more memory.
        ctx.save_for_backward(q, k, v, *(results if kernel.statistics else ()))
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *compute_gradients(ctx.kernel, grads[0], *ctx.saved_tensors, documents=ctx.documents), None, None


def attend_by_document(
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> Tensor:
    """As `attend`, for kernels that only autograd can differentiate; it also saves the rearranged inputs."""
    layout = _Layout(documents, q.device)
    return layout.rows([kernel(*piece) for piece in layout.pieces(q, k, v)])


class _Layout:
    """Groups documents by padded length, so that each group is one kernel call; differentiable.

    Lengths are padded at the end to multiples of 64: causal attention never sees the padding, and few distinct lengths
    mean few kernels to generate (oneDNN caches one per shape).
    """

    def __init__(self, documents: Documents, device: torch.device):
        self.shape = len(documents), sum(documents[0])  # rows, length
        self.groups, self.there, self.back = _arrange_on_device(documents, device)

    def pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Splits tensors [rows, heads, length, dim] into groups: [documents, heads, padded length, dim]."""
        sizes = [count * padded for count, padded in self.groups]
        # Rearranges [tokens, heads, dim], of which [rows, heads, length, dim] is a view.
        flat = (t.transpose(1, 2).reshape(-1, *t.shape[1::2]) for t in tensors)
        parts = [_Arrange.apply(t, self.there, self.back).split(sizes) for t in flat]  # type: ignore[no-untyped-call]
        for (count, padded), *piece in zip(self.groups, *parts, strict=True):
            yield tuple(t.view(count, padded, *t.shape[1:]).transpose(1, 2) for t in piece)

    def rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of `pieces`: [rows, heads, length, dim] from one tensor per group."""
        flat = [t.transpose(1, 2).reshape(-1, *t.shape[1::2]) for t in parts]
        # The inverse permutation, so gather and its gradient swap their indices.
        out = _Arrange.apply(torch.cat(flat), self.back, self.there)  # type: ignore[no-untyped-call]
        return out.view(*self.shape, *out.shape[1:]).transpose(1, 2)  # type: ignore[no-any-return]


class _Arrange(torch.autograd.Function):
    """Gathers rows of x [n, ...] by `there` (-1: zeros); the gradient gathers by the inverse `back`."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(there, back)
        return _take(x, there)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, back = ctx.saved_tensors
        # Every token has exactly one position in the groups, so its gradient is one row: a gather suffices, and a
        # scatter would add in an undefined order on a GPU.
        return _take(grads[0].contiguous(), back), None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    empty = index < 0
    # Reads token 0 for padding and multiplies it by 0: selecting rows by a mask would wait for the device.
    out = x.index_select(0, index.clamp(min=0))
    return out.mul_((~empty).to(out.dtype).view(-1, *[1] * (x.ndim - 1)))


@cache_tensors(maxsize=16)  # called by every layer, forward and backward
@torch.inference_mode(False)  # the cached tensors must also serve training if inference calls first
def _arrange_on_device(documents: Documents, device: torch.device) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    groups, there, back = _arrange_documents(documents)
    return groups, to_device(there, device), to_device(back, device)


def _arrange_documents(documents: Documents) -> tuple[list[tuple[int, int]], numpy.ndarray, numpy.ndarray]:
    """Groups documents by padded length.

    Returns:
        groups: (number of documents, padded length) each.
        there: for each position of the concatenated groups its token, or -1 for padding.
        back: for each token its position in the groups.
    """
    # All rows have the same length, whatever their documents.
    length = sum(documents[0])
    by_length: dict[int, list[numpy.ndarray]] = {}
    for row, cuts in enumerate(documents):
        start = row * length
        for n in cuts:
            # Never longer than the row, so that a row of one document is not padded.
            padded = min(-(-n // _BLOCK) * _BLOCK, length)
            place: numpy.ndarray = numpy.full(padded, -1, dtype=numpy.int64)
            place[:n] = numpy.arange(start, start + n)
            by_length.setdefault(padded, []).append(place)
            start += n
    groups = [(len(places), padded) for padded, places in sorted(by_length.items())]
    there = numpy.concatenate([place for _, places in sorted(by_length.items()) for place in places])
    back: numpy.ndarray = numpy.empty(len(documents) * length, dtype=numpy.int64)
    filled = there >= 0
    # Inverse of `there` over its real positions.
    back[there[filled]] = numpy.nonzero(filled)[0]
    return groups, there, back
