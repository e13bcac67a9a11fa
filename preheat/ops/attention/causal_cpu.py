"""Causal attention on a CPU by the C++ kernel `causal_cpu.cpp`, forward and backward, as operators for dry runs."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from preheat.hardware.cpp_build import find_compiler, load_native_library

__all__ = ["RATE", "UP_TO", "causal_backward", "causal_forward", "matmul_dtype", "scratch_bytes", "is_supported"]

UP_TO = 4096
"""Tokens up to which the kernel beats torch's, with AVX2 too: the scores of a block of queries fit in the cache."""
RATE = 0.6
"""Fraction of the matmul rate that the kernel reaches, counting causal work only: 0.5 to 0.9 measured
(benchmarks/results/attention_cpu.md). The planner's time model uses it."""
_WIDEST, _MULTIPLE = 256, 16  # head widths
_QUERIES = 48  # of a block, as in the C++ file


def is_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the kernel computes causal attention of these tensors, [rows, heads, length, width] each."""
    width = q.shape[-1]
    fits = width % _MULTIPLE == 0 and width <= _WIDEST and k.shape == v.shape and k.shape[-1] == width
    fits = fits and q.shape[2] == k.shape[2] <= UP_TO and q.dtype in (torch.bfloat16, torch.float32)
    if not fits or any(t.device.type != "cpu" or t.dtype != q.dtype for t in (q, k, v)):
        return False
    # A dry run builds nothing: it asks whether the library could be built.
    return find_compiler() is not None and (detect_fake_mode((q, k, v)) is not None or _load_library() is not None)


def matmul_dtype(dtype: str) -> str:
    """Returns the dtype of the kernel's products: fp32 on a CPU that cannot multiply in bf16."""
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "bf16" if dtype == "bf16" and avx512 and torch.cpu._is_avx512_bf16_supported() else "fp32"


def scratch_bytes(q: Tensor) -> int:
    """Returns the memory that the backward pass takes while it runs, for q [rows, heads, length, width].

    Each thread holds the scores of a block and their gradients in fp32 and three times in q's dtype, and keys, values
    and their gradients.
    """
    length, width, size = q.shape[2], q.shape[3], q.element_size()
    return torch.get_num_threads() * length * (_QUERIES * (2 * 4 + 3 * size) + width * (2 * 4 + 3 * size))


def causal_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns attention [rows, heads, length, width], stored as [rows, length, heads, width]."""
    return _forward(q, k, v, scale).transpose(1, 2)


def causal_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients by q, k and v, stored like the result of `causal_forward`; computes the scores again."""
    by_q, by_k, by_v = _backward(grad, q, k, v, scale)
    return by_q.transpose(1, 2), by_k.transpose(1, 2), by_v.transpose(1, 2)


@torch.library.custom_op("preheat::causal_attention", mutates_args=(), device_types="cpu")
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = map(_make_heads_contiguous, (q, k, v))
    out = _empty_like(q)
    _call("preheat_causal_forward", (q, k, v, out.transpose(1, 2)), q, k, scale)
    return out


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return _empty_like(q)


@torch.library.custom_op("preheat::causal_attention_backward", mutates_args=(), device_types="cpu")
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = map(_make_heads_contiguous, (grad, q, k, v))
    grads = _empty_like(q), _empty_like(k), _empty_like(v)
    _call("preheat_causal_backward", (grad, q, k, v, *(g.transpose(1, 2) for g in grads)), q, k, scale)
    return grads


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(q), _empty_like(k), _empty_like(v)


def _empty_like(x: Tensor) -> Tensor:
    """Returns an empty tensor [rows, length, heads, width] for x [rows, heads, length, width]."""
    rows, heads, length, width = x.shape
    return x.new_empty(rows, length, heads, width)


def _make_heads_contiguous(x: Tensor) -> Tensor:
    """Copies only if the numbers of a head are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(name: str, tensors: tuple[Tensor, ...], q: Tensor, k: Tensor, scale: float) -> None:
    library = _load_library()
    if library is None:
        raise RuntimeError(f"{name}: `is_supported` was not asked first")
    strides = [n for t in tensors for n in t.stride()[:3]]
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3]
    getattr(library, name)(
        *(ctypes.c_void_p(t.data_ptr()) for t in tensors),
        (ctypes.c_int64 * len(strides))(*strides),
        *map(ctypes.c_int64, sizes),
        ctypes.c_float(scale),
        int(q.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )


@functools.cache
def _load_library() -> ctypes.CDLL | None:
    return load_native_library(Path(__file__).with_suffix(".cpp"), "attention on the CPU takes about twice as long")
