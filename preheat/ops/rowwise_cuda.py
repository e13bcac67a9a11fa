"""Gated SiLU and rotary embedding on CUDA, each pass one Triton kernel.

torch's operators are 8 kernels for the gate and about 30 for the rotary embedding of one layer. On an H100, at 8,192
tokens of a model of 8 billion parameters, they take 1.25 and 1.34 ms (benchmarks/results/gpu_layer.md).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from preheat.ops import rowwise_cpu
from preheat.ops.cuda_kernels import Operator, is_plain, name_failures
from preheat.ops.plain_tensors import is_plain_tensor

__all__ = ["gated_silu", "gated_silu_backward_", "launch_gate", "launch_gate_backward", "launch_rotary", "rotary"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LANES = 2048  # elements of a program of the gate: 16 a thread, 16 bytes a load


def _is_supported(operator: Operator, *tensors: Tensor) -> bool:
    """True if the kernels support these tensors: unsharded CUDA tensors, or the fake tensors of a dry run."""
    if torch.compiler.is_compiling() or not is_plain_tensor(*tensors) or any(t.dtype not in _DTYPES for t in tensors):
        return False
    if detect_fake_mode(tensors) is not None:
        return True
    return all(t.is_cuda for t in tensors) and not is_plain(operator) and importlib.util.find_spec("triton") is not None


def gated_silu(a: Tensor, b: Tensor) -> Tensor:
    """Computes silu(a) * b [...] in fp32 and rounds once; saves a and b for backward.

    By torch's operators for tensors that the kernel does not take: those of other devices, sharded ones, under a
    compiler, or if `PREHEAT_PLAIN` names `gated_silu`.

    Example:
        >>> gated_silu(torch.tensor([1.0]), torch.tensor([2.0]))
        tensor([1.4621])
    """
    from preheat.ops.fused_norm_gate import gated_silu as plain

    if a.dtype != b.dtype or not _is_supported("gated_silu", a, b):
        return plain(a, b)
    return rowwise_cpu.gated_silu(a, b)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the halves of each head of q and k [rows, heads, length, width] against each other, as Llama does.

    Results have the dtype of q and k, also where the angles are in fp32. By torch's operators for tensors that the
    kernel does not take.

    Args:
        cos, sin: [rows or 1, length, width]; their gradients are not computed.
    """
    if cos.requires_grad or sin.requires_grad or not _is_supported("rotary", q, k, cos, sin):
        return rowwise_cpu.rotary(q, k, cos, sin)
    return rowwise_cpu.Rotary.apply(q, cos, sin), rowwise_cpu.Rotary.apply(k, cos, sin)  # type: ignore[no-untyped-call]


@torch.library.custom_op("preheat::gated_silu_backward_", mutates_args=("grad",))
def gated_silu_backward_(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of silu(a) * b by a and b, and overwrites that of the result with silu(a) * b.

    For a linear layer behind the gate whose adapter needs its input: computed again for one more write, not saved.

    Args:
        grad: contiguous, [...].
    """
    if grad.is_cuda and not is_plain("gated_silu"):
        with name_failures("gated_silu"):
            return launch_gate_backward(grad, a, b, overwrite=True)
    silu = torch.nn.functional.silu(a)
    by_a, by_b = torch.ops.aten.silu_backward(grad * b, a), grad * silu
    torch.mul(silu, b, out=grad)
    return by_a, by_b


@gated_silu_backward_.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape)


@rowwise_cpu.gate_op.register_kernel("cuda")
def _(a: Tensor, b: Tensor) -> Tensor:
    with name_failures("gated_silu"):
        return launch_gate(a, b)


@rowwise_cpu.gate_backward_op.register_kernel("cuda")
def _(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    with name_failures("gated_silu"):
        return launch_gate_backward(grad, a, b, overwrite=False)


@rowwise_cpu.rotate_op.register_kernel("cuda")
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    with name_failures("rotary"):
        return launch_rotary(x, cos, sin, back)


def launch_gate(a: Tensor, b: Tensor) -> Tensor:
    """Launches the kernel of silu(a) * b."""
    from preheat.ops.triton_kernels import gated_silu_kernel

    a, b = a.contiguous(), b.contiguous()
    out, count = torch.empty_like(a), a.numel()
    with torch.cuda.device_of(a):
        gated_silu_kernel[(-(-count // _LANES),)](a, b, out, count, LANES=_LANES)
    return out


def launch_gate_backward(grad: Tensor, a: Tensor, b: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor]:
    """Launches the kernel of both gradients; `overwrite`: writes silu(a) * b over `grad`, which must be contiguous."""
    from preheat.ops.triton_kernels import gated_silu_backward_kernel

    assert not overwrite or grad.is_contiguous()
    grad, a, b = grad.contiguous(), a.contiguous(), b.contiguous()
    by_a, by_b, count = torch.empty_like(a), torch.empty_like(b), a.numel()
    with torch.cuda.device_of(a):
        gated_silu_backward_kernel[(-(-count // _LANES),)](
            grad, a, b, by_a, by_b, count, OVERWRITE=overwrite, LANES=_LANES
        )
    return by_a, by_b


def launch_rotary(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Launches the kernel of one rotation. Returns [rows, length, heads, width], as projections store it."""
    from preheat.ops.triton_kernels import rotary_kernel

    rows, heads, length, width = x.shape
    x, cos, sin = x if x.stride(-1) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    out = x.new_empty(rows, length, heads, width)
    angle_stride = 0 if cos.shape[0] == 1 else length * width
    with torch.cuda.device_of(x):
        rotary_kernel[(rows * length,)](
            *(x, cos, sin, out, *x.stride()[:3], angle_stride, length, heads, width),
            BACK=back,
            HEADS=1 << (heads - 1).bit_length(),
            HALF=max(1, 1 << (width // 2 - 1).bit_length()),
        )
    return out
