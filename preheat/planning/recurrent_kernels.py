"""Fused kernels of recurrent layers in a dry run: their tensors and FLOPs, in place of the kernels themselves.

On a GPU transformers computes recurrent layers by the kernels of flash-linear-attention, mamba-ssm and causal-conv1d,
which cannot run on fake tensors; its own PyTorch code keeps several times as much for the backward pass. So a dry run
for a device with these packages allocates what the kernels allocate, by their sources of 2026: what is saved for the
backward pass, what lives during a pass only, and the results.

None of it has been compared with a GPU yet.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preheat.models import hf
from preheat.models.token_mixers import find_recurrent_mixers
from preheat.planning.speed.flop_formulas import FUSED

if TYPE_CHECKING:
    from torch import nn

    from preheat.core import Device
    from preheat.ops.autograd_context import AutogradContext
    from preheat.planning.observation import Observation

__all__ = ["fused_recurrent_kernels", "list_packages"]

_Tensors = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of tensors."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
_CHUNK = 64
"""Tokens that flash-linear-attention computes at once."""
_SCANNED = 2048
"""Tokens after which the scan of Mamba 1 saves its state (mamba-ssm's selective_scan_fwd)."""

_PACKAGES = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}
"""The packages of such kernels, by their modules."""


def _allocate(
    inputs: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], dtypes: Sequence[int], flops: int
) -> list[Tensor]:
    dimensions = iter(sizes)
    shapes = [[next(dimensions) for _ in range(rank)] for rank in ranks]
    return [inputs[0].new_empty(shape, dtype=_DTYPES[code]) for shape, code in zip(shapes, dtypes, strict=True)]


_LIBRARY = torch.library.Library("preheat", "FRAGMENT")
for _module in _PACKAGES:
    # A plain operator with results, which selective checkpointing can keep as it keeps those of a matmul. It has no
    # implementation: only fake tensors reach it.
    _LIBRARY.define(f"fused_{_module}(Tensor[] inputs, int[] sizes, int[] ranks, int[] dtypes, int flops) -> Tensor[]")
    torch.library.register_fake(f"{FUSED}{_module}", _allocate)


@dataclass(frozen=True)
class _Kernel:
    """The allocations and FLOPs of a kernel.

    Attributes:
        package: its module.
        out: the result. saved: tensors that it computes and keeps for the backward pass.
        kept: indices of the inputs that it keeps for the backward pass.
        forward, backward: tensors that live during that pass only.
        flops: of the forward pass; backward_flops: of the backward pass.
    """

    package: str
    out: tuple[tuple[int, ...], torch.dtype]
    kept: Sequence[int]
    flops: int
    backward_flops: int
    saved: _Tensors = ()
    forward: _Tensors = ()
    backward: _Tensors = ()


def _run(package: str, inputs: Sequence[Tensor], outputs: _Tensors, flops: int) -> list[Tensor]:
    sizes = [n for shape, _ in outputs for n in shape]
    codes = [_DTYPES.index(dtype) for _, dtype in outputs]
    operator = getattr(torch.ops.preheat, f"fused_{package}")
    tensors: list[Tensor] = operator(inputs, sizes, [len(shape) for shape, _ in outputs], codes, flops)
    return tensors


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, kernel: _Kernel, *inputs: Tensor) -> Tensor:
        out, *rest = _run(kernel.package, inputs, [kernel.out, *kernel.saved, *kernel.forward], kernel.flops)
        ctx.save_for_backward(*(inputs[n] for n in kernel.kept), *rest[: len(kernel.saved)])
        ctx.kernel = kernel
        ctx.like = [(tuple(t.shape), t.dtype) for t in inputs]
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        kernel: _Kernel = ctx.kernel
        outputs = [*(ctx.like[n] for n in wanted), *kernel.backward]
        tensors = _run(kernel.package, [grad, *ctx.saved_tensors], outputs, kernel.backward_flops)
        grads = dict(zip(wanted, tensors, strict=False))  # the others live during the pass only
        return (None, *(grads.get(n) for n in range(len(ctx.like))))


def _apply(kernel: _Kernel, *inputs: Tensor) -> Tensor:
    return _Planned.apply(kernel, *inputs)  # type: ignore[no-any-return,no-untyped-call]


def _allocate_causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
    """causal-conv1d: x, [rows, channels, tokens], by [channels, taps]; the activation is computed again."""
    inputs = [x, weight, *([] if bias is None else [bias])]
    flops = 2 * x.numel() * weight.shape[-1]
    out = (tuple(x.shape), x.dtype)
    return _apply(_Kernel("causal_conv1d", out, range(len(inputs)), flops, 3 * flops), *inputs)


def _allocate_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, per_channel: bool, **_: object
) -> tuple[Tensor, None]:
    """flash-linear-attention's chunked delta rules: queries and keys are normalized in the kernel.

    query, key: [rows, tokens, heads, width]; value: [rows, tokens, value heads, value width].
    """
    rows, tokens, heads, width = value.shape[0], value.shape[1], value.shape[2], key.shape[-1]
    deep, dtype, fp32 = value.shape[3], value.dtype, torch.float32
    by_token = (rows, tokens, heads)
    chunks = math.ceil(tokens / _CHUNK)
    norms = [((*t.shape[:3],), fp32) for t in (query, key)]
    normalized = [(tuple(t.shape), t.dtype) for t in (query, key)]
    decay = ((*by_token, width) if per_channel else by_token, fp32)
    within = ((*by_token, _CHUNK), dtype)  # a chunk's tokens against each other
    transformed = [((*by_token, width), dtype), ((*by_token, deep), dtype)]  # w and u of the WY representation
    states = ((rows, chunks, heads, width, deep), dtype)
    new_values = ((*by_token, deep), dtype)
    # Products of a chunk within itself, with its state, and the state's update.
    pairs = 2 * _CHUNK * (2 * width + width + 2 * deep)
    flops = rows * tokens * heads * (pairs + 6 * width * deep)
    kernel = _Kernel(
        package="fla",
        out=((*by_token, deep), dtype),
        kept=(2, 4),  # values and beta
        saved=[*normalized, *norms, decay, *[within] * (2 if per_channel else 1)],
        forward=[*transformed, states, new_values],
        # The forward pass's are computed again; gradients of states, values and w, partial sums of the decay's.
        backward=[*transformed, states, new_values, states, new_values, *transformed, (by_token, fp32)],
        flops=flops,
        backward_flops=3 * flops,
    )
    return _apply(kernel, query, key, value, g, beta), None


def _allocate_chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, **more: Any
) -> Tensor | tuple[Tensor, None]:
    """mamba-ssm's scan of Mamba 2: x, [rows, tokens, heads, width]; B and C, [rows, tokens, groups, state]."""
    inputs = [x, dt, A, B, C, *([] if D is None else [D])]
    kernel = _build_ssd_kernel(tuple(x.shape), B.shape[2], B.shape[3], chunk_size, x.dtype, (tuple(x.shape), x.dtype))
    out = _apply(
        # The result is kept for the decay's gradient.
        replace(kernel, kept=range(len(inputs)), saved=[*kernel.saved, kernel.out]),
        *inputs,
    )
    return (out, None) if more.get("return_final_states") else out


def _build_ssd_kernel(
    x: tuple[int, ...],
    groups: int,
    state: int,
    chunk: int,
    dtype: torch.dtype,
    out: tuple[tuple[int, ...], torch.dtype],
) -> _Kernel:
    """The state space dual of Mamba 2 (arXiv:2405.21060): products within chunks, and states between them."""
    rows, tokens, heads, width = x
    chunks, fp32 = math.ceil(tokens / chunk), torch.float32
    by_chunk = ((rows, heads, chunks, chunk), fp32)
    states = ((rows, chunks, heads, width, state), fp32)
    products = ((rows, chunks, groups, chunk, chunk), fp32)  # C B^T
    flops = rows * tokens * (2 * chunk * groups * state + heads * width * (2 * chunk + 4 * state))
    return _Kernel(
        package="mamba_ssm",
        out=out,
        kept=(),
        saved=[by_chunk],  # the cumulative decay
        forward=[by_chunk, states, ((rows, chunks, heads, width, state), dtype), products],
        # States again, their gradients, those of B and C by head, and of the products.
        backward=[states, states, products, products, *[((rows, tokens, heads, state), fp32)] * 2],
        flops=flops,
        backward_flops=3 * flops,
    )


def _split_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    rmsnorm_weight: Tensor | None = None,
    outproj_weight: Tensor | None = None,
    headdim: int = 0,
    ngroups: int = 1,
    **_: object,
) -> Tensor:
    """mamba-ssm's layer of Mamba 2 between its projections, the output projection included."""
    rows, tokens, _width = zxbcdt.shape
    heads, channels = D.shape[0], conv1d_weight.shape[0]
    inner = heads * headdim
    state = (channels - inner) // ngroups // 2
    dtype, token = zxbcdt.dtype, (rows, tokens)
    inputs = [zxbcdt, conv1d_weight, dt_bias, A, D, *(t for t in (conv1d_bias, rmsnorm_weight) if t is not None)]
    mixed = ((*token, inner), dtype)
    convolved = ((*token, channels), dtype)
    norm = [((rows * tokens * ngroups,), torch.float32)] if rmsnorm_weight is not None else []
    scan = _build_ssd_kernel((rows, tokens, heads, headdim), ngroups, state, chunk_size, dtype, mixed)
    flops = scan.flops + 2 * rows * tokens * channels * conv1d_weight.shape[1]
    gated = _apply(
        _Kernel(
            package="mamba_ssm",
            out=mixed,
            kept=range(len(inputs)),
            saved=[mixed, *norm],  # before the gate
            forward=[convolved, *scan.saved, *scan.forward],
            # The convolution and the gated result again, and the gradients of the convolution's.
            backward=[convolved, convolved, mixed, *scan.saved, *scan.backward],
            flops=flops,
            backward_flops=scan.backward_flops + 4 * (flops - scan.flops),
        ),
        *inputs,
    )
    # The kernel computes its input of this product again for the weight's gradient, and does not keep it.
    return gated if outproj_weight is None else torch.nn.functional.linear(gated, outproj_weight)


def _allocate_selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    **more: Any,
) -> Tensor | tuple[Tensor, None]:
    """mamba-ssm's scan of Mamba 1: u and delta, [rows, channels, tokens]; A, [channels, state]."""
    rows, channels, tokens = u.shape
    state = A.shape[1]
    inputs = [u, delta, A, B, C, *(t for t in (D, z) if t is not None)]
    out = (tuple(u.shape), u.dtype)
    flops = 9 * rows * channels * tokens * state  # by mamba-ssm's own count (ops/selective_scan_interface.py)
    kernel = _Kernel(
        package="mamba_ssm",
        out=out,
        kept=range(len(inputs)),
        saved=[((rows, channels, math.ceil(tokens / _SCANNED), 2 * state), torch.float32), out],
        flops=flops,
        backward_flops=3 * flops,
    )
    result = _apply(kernel, *inputs)
    return (result, None) if more.get("return_last_state") else result


_KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": ("causal_conv1d", _allocate_causal_conv1d),
    "torch_chunk_gated_delta_rule": ("fla", functools.partial(_allocate_delta_rule, per_channel=False)),
    "chunk_kimi_delta_attention": ("fla", functools.partial(_allocate_delta_rule, per_channel=True)),
    "mamba2_chunk_scan": ("mamba_ssm", _allocate_chunk_scan),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm", _split_scan),
    "mamba_selective_scan": ("mamba_ssm", _allocate_selective_scan),
}
"""transformers' name of a function that such a kernel computes -> the kernel's package, and what it allocates."""


@contextlib.contextmanager
def fused_recurrent_kernels(models: Sequence[nn.Module], device: Device) -> Iterator[None]:
    """Context manager in which recurrent layers allocate what the fused kernels of a device do.

    A device at hand has the packages that are installed; of another it is assumed that it has them all.
    """
    modules = set()
    if device.kind == "cuda":
        layers = [layer for model in models for layer in hf.find_anatomy(model).layers]
        mixers = (mixer for layer in layers for mixer in find_recurrent_mixers(layer))
        modules = {sys.modules[type(mixer).__module__] for mixer in mixers}
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, (package, planned) in _KERNELS.items():
                present = not device.at_hand or importlib.util.find_spec(package) is not None
                if present and hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, planned)
        yield


def list_packages(observation: Observation) -> list[str]:
    """Returns the packages whose fused kernels a dry run planned with."""
    operators = {kernel.operator for kernel in observation.kernels}
    return [package for module, package in _PACKAGES.items() if f"{FUSED}{module}" in operators]
