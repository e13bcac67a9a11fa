"""Matmuls of few rows with int8 and int4 weights on CPUs limited to AVX2, by the C++ kernels of `cpu_gemv.cpp`.

These are plain function calls, not torch operators, whose dispatch would take as long as a small matmul. Tracers and
dry runs get aten's operators.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from preheat.hardware.cpp_build import load_native_library

__all__ = ["multiply_int8", "multiply_int4", "is_supported"]


def is_supported() -> bool:
    """True if the AVX2 kernels compile here and no tracer or dispatch mode is active.

    aten's own kernels target AVX512 and ARM and are slower with AVX2 alone.
    """
    # A tracer would miss a call through ctypes, and a fake tensor has no memory to point to.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return _has_only_avx2() and _load_library() is not None


@functools.cache
def _has_only_avx2() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def multiply_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiplies x bf16 [rows, in] by codes int8 [out, in] * scales bf16 [out]: bf16 [rows, out]; `in` % 32 == 0."""
    out = x.new_empty(x.shape[0], codes.shape[0])
    _call("preheat_eight_bits", (x, codes, scales), out, *codes.shape)
    return out


def multiply_int4(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Multiplies x bf16 [rows, in] by (code - 8) * scale + zero: bf16 [rows, out].

    Args:
        codes: uint8 [out, in / 2], two per byte, as packed by `ops.quantization.grids.pack`.
        scales, zeros: bf16 [out, in / group], with a group that is a multiple of 32; zeros None: symmetric.
    """
    out = x.new_empty(x.shape[0], codes.shape[0])
    _call(
        "preheat_four_bits", (x, codes, scales, zeros), out, codes.shape[0], x.shape[1], x.shape[1] // scales.shape[1]
    )
    return out


def _call(name: str, given: tuple[Tensor | None, ...], out: Tensor, *sizes: int) -> None:
    library = _load_library()
    assert library is not None, "of_use() comes first"
    # Kept in a list until the call returns: the kernel reads raw pointers, and a freed copy would be garbage.
    inputs = [None if t is None else t.contiguous() for t in given]
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (*inputs, out)]
    # int64 explicitly, because ctypes passes Python numbers as 32-bit ints.
    getattr(library, name)(*pointers, *map(ctypes.c_int64, (out.shape[0], *sizes)), torch.get_num_threads())


@functools.cache
def _load_library() -> ctypes.CDLL | None:
    return load_native_library(
        Path(__file__).with_suffix(".cpp"),
        "maps in eight and four bits are computed by aten, which takes two to three times as long",
    )
