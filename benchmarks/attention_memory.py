"""Memory of attention, forward and backward, from 1,024 to 16,384 tokens on this machine's CPU: counted, and the process's high water.

    python benchmarks/attention_memory.py [--most 16384] [--out benchmarks/results/attention_memory.md]

Counted: the recorder of the dry run (preheat/planning/dry_run.py) laid over the real run; every byte that torch allocates, inputs and
gradients included. High water: what the kernel says that a process of its own held at most, less what it held before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from preheat.core import MaskSpec, Phase
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.multihead import EfficientAttention, attend_in_chunks
from preheat.ops.attention.patterns import limit_to_shifted_groups
from preheat.ops.attention.sdpa import reference_attention, sdpa_attention
from preheat.planning.dispatch_recorder import Recorder
from preheat.planning.dry_run import peak_by_phase

HEADS, DIM = 2, 64
WINDOW = MaskSpec(window=512)


def list_kernels(length: int) -> dict[str, tuple[Callable[..., Any], MaskSpec]]:
    return {
        "plain form (scores in memory)": (reference_attention, MaskSpec()),
        "flash (torch)": (sdpa_attention, MaskSpec()),
        "flash, documents of 512": (sdpa_attention, MaskSpec(documents=((512,) * (length // 512),))),
        "flash, shifted groups of a quarter": (limit_to_shifted_groups(sdpa_attention, length // 4), MaskSpec()),
        "blocks": (attend_blockwise, MaskSpec()),
        "blocks, window of 512": (attend_blockwise, WINDOW),
        "blocks, window of 512, 64 global": (attend_blockwise, MaskSpec(window=512, global_tokens=64)),
        "chunks (any bias, dropout)": (attend_in_chunks, MaskSpec()),
        "module, memory_efficient": (_run_module, MaskSpec()),
    }


def _run_module(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskSpec, scale: float) -> torch.Tensor:
    layer = EfficientAttention(HEADS * DIM, HEADS, dropout=0.0, causal=True, memory_efficient=True)
    return layer((q + k + v).transpose(1, 2).flatten(2))


def read_high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_once(name: str, length: int) -> None:
    function, mask = list_kernels(length)[name]
    tensors = [torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3)]
    function(*tensors, mask, DIM**-0.5).sum().backward()


def measure(name: str, length: int, send: Any) -> None:
    """Sends bytes at most in one forward and backward pass: (counted, growth of this process's high-water mark)."""
    torch.manual_seed(0)
    run_once(name, 512)  # what is made once by the first call, whatever the length
    before = read_high_water()
    run_once(name, length)
    grown = read_high_water() - before
    recorder = Recorder(rounding=64)
    with recorder:
        recorder.phase = Phase.FORWARD
        run_once(name, length)
    send.send((max(peak_by_phase(recorder).values()), grown))


def measure_in_process(name: str, length: int) -> tuple[int, int]:
    """`measure` in a process of its own, forked so that imports are not repeated (nothing was computed before, so no thread is lost)."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(name, length, send))
    process.start()
    send.close()
    found = receive.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=16384)
    parser.add_argument("--plain-most", type=int, default=4096, help="the plain form stops here: it is quadratic")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention_memory.md"))
    options = parser.parse_args()
    lengths = [n for n in (1024, 2048, 4096, 8192, 16384) if n <= options.most]
    lines = [
        "# Memory of attention by length",
        "",
        f"`python benchmarks/attention_memory.py`: peak MiB of one forward and backward pass, 1 x {HEADS} heads x length x {DIM}, fp32,",
        f"causal, inputs and gradients included. torch {torch.__version__} on a CPU. Counted byte by byte (left) and the growth of the",
        "process's high-water mark (right), each cell in a process of its own. Last column: the counted bytes of the longest over those of the",
        "shortest, divided by the ratio of their lengths: 1 is linear.",
        "",
        "| kernel | " + " | ".join(f"{n:,}" for n in lengths) + " | growth / length |",
        "|---|" + "---|" * (len(lengths) + 1),
    ]
    for name in list_kernels(1024):
        taken, cells = [], []
        for length in lengths:
            if name.startswith("plain") and length > options.plain_most:
                cells.append("")
                continue
            measurement = measure_in_process(name, length)
            taken.append((length, measurement[0]))
            cells.append(f"{measurement[0] / 2**20:.1f} / {measurement[1] / 2**20:.1f}")
        growth = (taken[-1][1] / taken[0][1]) / (taken[-1][0] / taken[0][0])
        lines.append(f"| {name} | {' | '.join(cells)} | {growth:.2f} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        "FlexAttention has no backward pass on a CPU, and FlashAttention's packages need CUDA, so they are not measured.",
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
