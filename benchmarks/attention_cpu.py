"""Attention on this machine's CPU: its plain form, torch's flash kernel and `attend_blockwise`, forward and backward, in alternation.

    python benchmarks/attention_cpu.py [--repeats 9] [--out benchmarks/results/attention_cpu.md]

Also the error of each in bf16 against the plain form in fp64, so that speed is not bought with digits unseen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from preheat.core import MaskSpec
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.sdpa import reference_attention, sdpa_attention

SHAPES = (  # rows, heads, heads of keys and values, length, head_dim
    (16, 6, 6, 256, 48),
    (4, 12, 12, 512, 64),
    (4, 12, 4, 512, 64),
    (2, 12, 12, 1024, 64),
    (1, 12, 12, 2048, 64),
    (1, 8, 8, 4096, 64),
)
KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": reference_attention,  # scores in memory
    "flash": sdpa_attention,
    "blocks": attend_blockwise,
}


def time_once(kernel: str, tensors: list[torch.Tensor], slope: torch.Tensor) -> float:
    begun = time.process_time()
    q, k, v = tensors
    out = KERNELS[kernel](q, k, v, MaskSpec(), tensors[0].shape[-1] ** -0.5)
    torch.autograd.grad(out, tensors, slope)
    return time.process_time() - begun


def compute_errors(shape: tuple[int, ...]) -> dict[str, float]:
    """Relative norm of the error of the output and of the gradients together, bf16 against fp64."""
    _, heads, shared, length, dim = shape
    exact = [
        torch.randn(1, h, min(length, 512), dim, dtype=torch.float64).requires_grad_() for h in (heads, shared, shared)
    ]
    q, k, v = exact
    out = reference_attention(q, k, v, MaskSpec(), dim**-0.5)
    slope = torch.randn_like(out)
    truth = torch.cat([t.flatten() for t in (out, *torch.autograd.grad(out, exact, slope))])
    found = {}
    for kernel, function in KERNELS.items():
        rounded = [t.detach().bfloat16().requires_grad_() for t in exact]
        got = function(*rounded, MaskSpec(), dim**-0.5)
        parts = (got, *torch.autograd.grad(got, rounded, slope.bfloat16()))
        flat = torch.cat([t.double().flatten() for t in parts])
        found[kernel] = float((flat - truth).detach().norm() / truth.detach().norm())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention_cpu.md"))
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "# Attention kernels on a CPU",
        "",
        "`python benchmarks/attention_cpu.py`: forward and backward, causal, milliseconds of CPU: median (least to most), in alternation.",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads.",
        "",
        "| dtype | rows x heads / shared x length x head_dim | plain | flash | blocks | plain / blocks | flash / blocks | error against fp64: plain, flash, blocks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            rows, heads, shared, length, dim = shape
            tensors = [
                torch.randn(rows, length, h, dim).to(dtype).transpose(1, 2).requires_grad_()
                for h in (heads, shared, shared)
            ]
            slope = torch.randn(rows, length, heads, dim).to(dtype).transpose(1, 2)
            times: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
            for turn in range(options.repeats + 2):
                for kernel in KERNELS:
                    seconds = time_once(kernel, tensors, slope)
                    if turn >= 2:
                        times[kernel].append(seconds * 1e3)
            middle = {kernel: statistics.median(found) for kernel, found in times.items()}
            cells = [f"{middle[k]:.1f} ({min(times[k]):.1f} to {max(times[k]):.1f})" for k in KERNELS]
            off = ", ".join(f"{e:.2%}" for e in compute_errors(shape).values()) if dtype is torch.bfloat16 else ""
            name = f"{rows} x {heads} / {shared} x {length} x {dim}"
            lines.append(
                f"| {str(dtype)[6:]} | {name} | {' | '.join(cells)} | {middle['plain'] / middle['blocks']:.2f} | {middle['flash'] / middle['blocks']:.2f} | {off} |"
            )
            print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
