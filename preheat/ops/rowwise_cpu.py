"""Cross entropy, RMSNorm, gated SiLU and rotary embedding on a CPU by the C++ kernels of `rowwise_cpu.cpp`.

Each is an operator that a dry run sees; `is_supported` says for which tensors the kernels are used.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from preheat.hardware.cpp_build import find_compiler, load_native_library
from preheat.ops.plain_tensors import is_plain_tensor

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext

__all__ = [
    "IN_CACHE",
    "Rotary",
    "cross_entropy_",
    "gate_backward_op",
    "gate_op",
    "gated_silu",
    "norm_backward",
    "norm_forward",
    "rotary",
    "rotate_op",
    "is_supported",
]

IN_CACHE = {
    "preheat::cross_entropy_": 65,
    "preheat::rms_norm": 36,
    "preheat::rms_norm_backward": 44,
    "preheat::gated_silu": 70,
    "preheat::gated_silu_backward": 105,
    "preheat::rotary": 40,
}
"""Operator -> bytes that a simple operator moves in the cache while one of these computes an element (measured: 0.2 to
0.8 ns at 140 GB/s, about alike in bf16 and fp32); the planner's time model uses it."""
_DTYPES = (torch.bfloat16, torch.float32)


def is_supported(*tensors: Tensor) -> bool:
    """True if the kernels take these tensors: of one dtype, on a CPU, with contiguous rows."""
    dtype = tensors[0].dtype
    if dtype not in _DTYPES or torch.compiler.is_compiling():
        return False
    if not is_plain_tensor(*tensors) or any(t.device.type != "cpu" or t.dtype != dtype for t in tensors):
        return False
    # A dry run builds nothing: it asks whether the library could be built.
    return find_compiler() is not None and (detect_fake_mode(tensors) is not None or _load_library() is not None)


@torch.library.custom_op("preheat::cross_entropy_", mutates_args=("logits",), device_types="cpu")
def cross_entropy_(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy of each row, fp32, and overwrites the logits with softmax(logits) - onehot(label).

    Rows of label -100 get a loss and a gradient of 0.

    Args:
        logits: contiguous [n, vocabulary]; labels: int64 [n].

    Raises:
        IndexError: a label is no column of the logits.
    """
    losses = logits.new_empty(labels.shape, dtype=torch.float32)
    labels = labels.contiguous()
    wrong = ctypes.c_int64(-1)
    _call("preheat_cross_entropy", logits, (logits, labels, losses), *logits.shape, after=(ctypes.byref(wrong),))
    if wrong.value >= 0:
        raise IndexError(f"label {int(labels[wrong.value])} is no column of {logits.shape[1]} logits")
    return losses


@cross_entropy_.register_fake
def _(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.new_empty(labels.shape, dtype=torch.float32)


def norm_forward(x: Tensor, weight: Tensor, out: Tensor, scale: Tensor, eps: float) -> None:
    """Writes RMSNorm of x [..., width] into `out`, and the reciprocal root mean square of each row into `scale`."""
    x, width = x.contiguous(), x.shape[-1]
    _call("preheat_norm", x, (x, weight, out, scale), x.numel() // width, width, number=eps)


def norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, by_x: Tensor, by_weight: Tensor) -> None:
    """Writes the gradients by x and, in fp32, by the weight."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    _call("preheat_norm_backward", x, (grad, x, scale, weight, by_x, by_weight), x.numel() // width, width)


@torch.library.custom_op("preheat::gated_silu", mutates_args=(), device_types="cpu")
def gate_op(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    _call("preheat_gate", a, (a, b, out), a.numel())
    return out


@gate_op.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape)


@torch.library.custom_op("preheat::gated_silu_backward", mutates_args=(), device_types="cpu")
def gate_backward_op(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    grad, a, b = grad.contiguous(), a.contiguous(), b.contiguous()
    by_a, by_b = torch.empty_like(a), torch.empty_like(b)
    _call("preheat_gate_backward", a, (grad, a, b, by_a, by_b), a.numel())
    return by_a, by_b


@gate_backward_op.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return gate_op(a, b)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gate_backward_op(grad, *ctx.saved_tensors)


def gated_silu(a: Tensor, b: Tensor) -> Tensor:
    """Computes silu(a) * b in fp32, rounded once; saves a and b."""
    out: Tensor = _Gate.apply(a, b)  # type: ignore[no-untyped-call]
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the halves of each head of q and k [rows, heads, length, width] against each other, as Llama does.

    Args:
        cos, sin: [rows or 1, length, width]; their gradients are not computed.
    """
    if is_supported(q, k, cos, sin) and not (cos.requires_grad or sin.requires_grad):
        return Rotary.apply(q, cos, sin), Rotary.apply(k, cos, sin)  # type: ignore[no-untyped-call]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate_half(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    return rotate_half(q), rotate_half(k)


class Rotary(torch.autograd.Function):
    """`rotary` of one tensor by the operator `preheat::rotary`; saves the angles."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_op(x, cos, sin, False).transpose(1, 2)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return rotate_op(grad, *ctx.saved_tensors, True).transpose(1, 2), None, None


@torch.library.custom_op("preheat::rotary", mutates_args=(), device_types="cpu")
def rotate_op(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Returns [rows, length, heads, width], as projections store it; `back`: the gradient of x from the result's."""
    rows, heads, length, width = x.shape
    x, cos, sin = x if x.stride(-1) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    out = x.new_empty(rows, length, heads, width)
    strides = (ctypes.c_int64 * 3)(*x.stride()[:3])
    _call(
        "preheat_rotate",
        x,
        (x, strides, cos, sin, 0 if cos.shape[0] == 1 else length * width, out),
        rows,
        heads,
        length,
        width,
        int(back),
    )
    return out


@rotate_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    rows, heads, length, width = x.shape
    return x.new_empty(rows, length, heads, width)


def _call(
    name: str,
    like: Tensor,
    operands: tuple[Tensor | int | ctypes.Array[ctypes.c_int64], ...],
    *sizes: int,
    number: float | None = None,
    after: tuple[object, ...] = (),
) -> None:
    library = _load_library()
    if library is None:
        raise RuntimeError(f"{name}: `is_supported` was not asked first")

    def argument(value: object) -> object:
        # int64 explicitly, because ctypes passes Python numbers as 32-bit ints.
        if isinstance(value, int):
            return ctypes.c_int64(value)
        return ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value

    numbers = () if number is None else (ctypes.c_float(number),)
    ends = int(like.dtype == torch.bfloat16), torch.get_num_threads()
    getattr(library, name)(*map(argument, (*operands, *sizes)), *numbers, *ends, *after)


@functools.cache
def _load_library() -> ctypes.CDLL | None:
    return load_native_library(
        Path(__file__).with_suffix(".cpp"), "the loss and the operators between products take up to twice as long"
    )
