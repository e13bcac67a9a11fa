"""Dequantizes int4 weights to bf16 for prefill with the C++ kernel `int4_unpack.cpp`, as a traceable torch operator."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from preheat.hardware.cpp_build import load_native_library
from preheat.ops.quantization.grids import HALF, Groups, dequantize_groups, unpack

__all__ = ["unpack4"]


@torch.library.custom_op("preheat::unpack4", mutates_args=(), device_types="cpu")
def unpack4(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Dequantizes packed codes on a CPU. Without a C++ compiler the result is the same but takes several times as long.

    Args:
        codes: uint8 [out, in / 2], two per byte.
        scales, zeros: bf16 [out, in / group]; zeros None: symmetric.

    Returns:
        bf16 [out, in]: (code - 8) * scale + zero, rounded once.
    """
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    group = columns // scales.shape[1]
    # The kernel reads whole bytes, and an odd group would end within one.
    library = _load_library() if group % 2 == 0 else None
    if library is None:
        return dequantize_groups(Groups(unpack(codes, columns), scales, zeros)).to(HALF)
    out = torch.empty(rows, columns, dtype=HALF)
    # A list that lives until the call returns, because the kernel gets raw pointers.
    tensors = [
        codes.contiguous(),
        scales.to(HALF).contiguous(),
        None if zeros is None else zeros.to(HALF).contiguous(),
        out,
    ]
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    library.preheat_unpack(*pointers, *map(ctypes.c_int64, (rows, columns, group)), torch.get_num_threads())
    return out


@unpack4.register_fake
def _(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    return codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=HALF)


@functools.cache
def _load_library() -> ctypes.CDLL | None:
    return load_native_library(
        Path(__file__).with_suffix(".cpp"), "four-bit weights are unpacked by torch, which takes several times as long"
    )
