"""Every attention kernel against fp64, forward and backward: by mask, with and without shared keys, by head size.

    for case in cases("cuda"):
        print(case, run(case, "cuda"))

On a CPU, `cases` names what a CPU has: flash, blocks, and the variable-length operator, which attends document by
document there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from preheat.core import MaskSpec
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.flex import compiled_flex_attention
from preheat.ops.attention.sdpa import build_dense_mask, sdpa_attention
from preheat.ops.attention.varlen import attend_varlen

__all__ = ["Case", "cases", "run"]

Kernel = Literal["flash", "cudnn", "efficient", "blocks", "flex", "varlen"]
Mask = Literal["causal", "window", "documents", "documents within a window"]

_WINDOWS: tuple[Kernel, ...] = ("blocks", "flex", "varlen")
_ON_CPU: tuple[Kernel, ...] = ("flash", "blocks", "varlen")
_DIMS: dict[Kernel, tuple[int, ...]] = {
    "flash": (64, 80, 128, 256),
    "cudnn": (64, 128),
    "efficient": (64, 80, 128),
    "blocks": (64, 128),
    "flex": (64, 128),
    "varlen": (64, 80, 128, 256),
}
# Relative norms: results in bf16 are rounded to 8 bits, and `blocks` rounds scores to them too; fp32 on tensor cores
# takes three products of TF32.
_BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}


@dataclass(frozen=True)
class Case:
    """One kernel, mask and shape.

    Attributes:
        grouped: four query heads share a key head.
        bound: what no relative norm of `run` should exceed.
    """

    kernel: Kernel
    mask: Mask
    grouped: bool
    head_dim: int
    dtype: torch.dtype

    @property
    def bound(self) -> float:
        return _BOUNDS[self.dtype]

    def __str__(self) -> str:
        heads = "grouped" if self.grouped else "not grouped"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel}, {self.mask}, {heads}, heads of {self.head_dim}, {dtype}"


def cases(device: str = "cuda") -> list[Case]:
    """The cases that a device's kernels support. On a CPU only heads of 16, so that all of them take seconds."""
    selected = []
    for kernel, dims in _DIMS.items():
        if device == "cpu" and kernel not in _ON_CPU:
            continue
        dtypes = [torch.bfloat16]
        if kernel in ("efficient", "blocks") or device == "cpu":
            dtypes.append(torch.float32)
        if kernel in ("flash", "varlen") and device != "cpu":
            dtypes.append(torch.float16)
        masks: list[Mask] = ["causal", "documents"]
        if kernel in _WINDOWS:
            masks += ["window", "documents within a window"]
        selected += [
            Case(kernel, mask, grouped, dim, dtype)
            for mask in masks
            for grouped in (False, True)
            for dim in (dims if device != "cpu" else (16,))
            for dtype in dtypes
        ]
    return selected


def run(case: Case, device: str = "cuda") -> dict[str, float]:
    """{"out", "q", "k", "v"}: the relative norm ‖ours - truth‖ / ‖truth‖ of the result and of the gradients.

    Both begin from the same rounded inputs.

    Raises:
        RuntimeError: from torch, when the device has no such kernel.
    """
    mask, length = _build_mask(case.mask, small=device == "cpu")
    torch.manual_seed(0)
    heads = 8
    # Laid out as projections make them: [rows, length, heads, dim] in memory.
    tensors = [
        torch.randn(3, length, n, case.head_dim).to(device, case.dtype).transpose(1, 2).requires_grad_()
        for n in (heads, *[heads // 4 if case.grouped else heads] * 2)
    ]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    scale = case.head_dim**-0.5
    kernel: Callable[..., Tensor] = _choose_kernel(case.kernel)
    ours, truth = kernel(*tensors, mask, scale), _compute_truth(exact, mask, scale)
    slope = torch.randn(truth.shape).to(device, case.dtype)
    grads = torch.autograd.grad(ours, tensors, slope)
    wanted = torch.autograd.grad(truth, exact, slope.double())
    pairs = zip(("out", "q", "k", "v"), (ours, *grads), (truth, *wanted), strict=True)
    return {name: float(((a.double() - b).norm() / b.norm()).detach()) for name, a, b in pairs}


def _build_mask(kind: Mask, *, small: bool) -> tuple[MaskSpec, int]:
    """The mask and the length of its rows: documents of one token, of the whole row, of lengths that fill no block."""
    length, window = (100, 30) if small else (1000, 130)
    documents = ((length,), (length // 2, length // 10, length - length // 2 - length // 10), (1, length - 1))
    within = window if kind.endswith("window") else None
    return MaskSpec(window=within, documents=documents if kind.startswith("documents") else None), length


def _choose_kernel(name: Kernel) -> Callable[..., Tensor]:
    if name == "varlen":
        return attend_varlen
    if name == "blocks":
        return attend_blockwise
    if name == "flex":
        return compiled_flex_attention
    return functools.partial(sdpa_attention, kernel=name, varlen=False)


def _compute_truth(tensors: list[Tensor], mask: MaskSpec, scale: float) -> Tensor:
    """All scores in memory, all in fp64."""
    q, k, v = tensors
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    may = build_dense_mask(mask, q.shape[0], q.shape[2], q.device)
    return (q @ k.transpose(-2, -1) * scale).masked_fill(~may, float("-inf")).softmax(-1) @ v
