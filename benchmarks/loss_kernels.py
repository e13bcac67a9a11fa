"""Head and loss together: the plain loss, our chunks and torch's linear_cross_entropy; forward and backward, in alternation.

    python benchmarks/loss_kernels.py [--repeats 7] [--device cpu] [--shared] [--out benchmarks/results/loss_kernels.md]

`--shared` is for a machine that others use meanwhile: one thread, and its seconds of CPU instead of the clock's.

Time in one process that keeps its heap, as training does. Memory in a fresh process each: the high-water mark of one pass above what
stood before it, gradients included. Error: relative norm of the gradients of hidden states and head together, against fp64.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from preheat.hardware import probe
from preheat.hardware.cpu_allocator import install_heap
from preheat.ops.losses.cross_entropy import (
    CrossEntropy,
    sum_chunked_loss,
    sum_full_loss,
    sum_liger_loss,
    sum_torch_loss,
)

ROWS, PIECES, WIDTHS = 2048, 32_000, (288, 768)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": sum_full_loss,
    "ours 512": functools.partial(sum_chunked_loss, rows=512),
    "ours 256": functools.partial(sum_chunked_loss, rows=256),
    "torch 512": functools.partial(sum_torch_loss, rows=512),
    "torch 256": functools.partial(sum_torch_loss, rows=256),
    "liger": sum_liger_loss,
}


def draw_inputs(width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(width, PIECES, bias=False)
    torch.nn.init.normal_(head.weight, std=width**-0.5)
    hidden, labels = torch.randn(1, ROWS, width), torch.randint(PIECES, (1, ROWS))
    return hidden.to(device, dtype), head.to(device, dtype), labels.to(device)


def time_once(
    kernel: str, hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Seconds of forward and backward, and the gradient of the hidden states; the head's stands in `.grad`."""
    leaf = hidden.detach().requires_grad_()
    head.weight.grad = None
    settle(hidden)
    clock = time.process_time if torch.get_num_threads() == 1 and hidden.device.type == "cpu" else time.perf_counter
    begun = clock()
    (KERNELS[kernel](leaf, head, CrossEntropy(), labels) / ROWS).backward()
    settle(hidden)
    seconds = clock() - begun
    assert leaf.grad is not None
    return seconds, leaf.grad


def settle(t: torch.Tensor) -> None:
    if t.device.type == "cuda":
        torch.cuda.synchronize()


def compute_exact_gradients(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    """Gradients of the plain loss in fp64, 512 rows at a time."""
    weight = head.weight.detach().double().requires_grad_()
    grads = []
    for x, y in zip(hidden[0].split(512), labels[0].split(512), strict=True):
        leaf = x.detach().double().requires_grad_()
        (cross_entropy(leaf @ weight.t(), y, reduction="sum") / ROWS).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.flatten())
    assert weight.grad is not None
    return torch.cat([*grads, weight.grad.flatten()])


def measure_extra_memory(kernel: str, width: int, dtype: str, device: str) -> float:
    """MiB of one pass at its peak, in a process of its own."""
    command = [sys.executable, __file__, "--device", device, "--memory", json.dumps([kernel, width, dtype])]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure_memory_here(kernel: str, width: int, dtype: str, device: str) -> float:
    hidden, head, labels = draw_inputs(width, DTYPES[dtype], device)
    time_once(kernel, hidden[:, :8], head, labels[:, :8])  # libraries load and threads start
    head.weight.grad = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = probe.resident_bytes()
        probe.reset_peak()
    time_once(kernel, hidden, head, labels)
    after = torch.cuda.max_memory_allocated() if device == "cuda" else probe.peak_resident_bytes()
    return (after - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=[k for k in KERNELS if k != "liger"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loss_kernels.md"))
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shared:
        torch.set_num_threads(1)
    if options.memory:
        kernel, width, dtype = json.loads(options.memory)
        print(measure_memory_here(kernel, width, dtype, options.device))
        return
    if options.device == "cpu":
        install_heap()
    if options.device == "cuda" and "liger" not in options.kernels:
        options.kernels.append("liger")
    lines: list[str] = [
        f"# Head and loss at {ROWS:,} rows x {PIECES:,} tokens of vocabulary",
        "",
        f"`python {shlex.join(sys.argv)}`: forward and backward, milliseconds: median (least to most), in alternation; MiB at the peak",
        "of one pass in a fresh process, the gradients' own in brackets; error: relative norm of all gradients against fp64.",
        f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads"
        + (", of CPU time: the machine was used by others." if options.shared else "."),
        "",
        "| dtype | width | kernel | ms | MiB | of plain: time, memory beside gradients | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        for width in options.widths:
            lines += render_table(dtype, width, options.kernels, options)
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def render_table(dtype: str, width: int, kernels: list[str], options: Any) -> list[str]:
    given = draw_inputs(width, DTYPES[dtype], options.device)
    truth, error = compute_exact_gradients(*given), {}
    for k in kernels:
        grad = time_once(k, *given)[1]
        assert given[1].weight.grad is not None
        found = torch.cat([grad.flatten(), given[1].weight.grad.flatten()]).double()
        error[k] = float((found - truth).norm() / truth.norm())
    del truth, found, grad
    times: dict[str, list[float]] = {k: [] for k in kernels}
    for turn in range(options.repeats + 1):
        for k in kernels:
            seconds = time_once(k, *given)[0]
            if turn:
                times[k].append(seconds * 1e3)
    memory = {k: measure_extra_memory(k, width, dtype, options.device) for k in kernels}
    own = (ROWS + PIECES) * width * DTYPES[dtype].itemsize / 2**20
    middle = {k: statistics.median(each) for k, each in times.items()}
    lines = []
    for k in kernels:
        share = f"{middle[k] / middle['plain']:.2f}, {(memory[k] - own) / (memory['plain'] - own):.3f}"
        cells = f"{middle[k]:.0f} ({min(times[k]):.0f} to {max(times[k]):.0f}) | {memory[k]:.0f} ({own:.0f}) | {share} | {error[k]:.1e}"
        lines.append(f"| {dtype} | {width} | {k} | {cells} |")
        print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
