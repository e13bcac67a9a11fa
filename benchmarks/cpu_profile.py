"""Profiles a training step on this machine's CPU by kind of work, and compares each with the time that its FLOPs need.

    python benchmarks/cpu_profile.py [--size 15M|110M] [--precision bf16|fp32] [--compile] [--threads N] [--steps 5]

Prints one Markdown table. The step, the model and the rows are those of cpu_vs_peers.py. Times are CPU seconds, so that
other processes disturb them little: shares come from the profiler, and the time of a step from steps without it. The rate
is that of a large matrix product, measured in the same process before and after. For an AVX2 machine on one with AVX512, set
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 and take --precision fp32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks" / "_peers"), str(ROOT / "benchmarks")]

from contract import Job  # noqa: E402
from cpu_vs_peers import BF16, COMPILED, EXACT, FUSED, SHAPES, Shape, parse_options  # noqa: E402

if TYPE_CHECKING:
    import torch
    from torch.autograd.profiler_util import FunctionEvent

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::matmul", "aten::linear")
# The innermost of these names around an operator says what it is for.
INSIDE = {
    "_Chunked": "loss",
    "_ChunkedBackward": "loss",
    "preheat::cross_entropy_": "loss",
    "_Attend": "attention",
    "_AttendBackward": "attention",
    "update": "update",
}
KINDS = ("products of the layers", "products of the head", "attention", "loss", "elementwise", "update", "rest")
EXPLAINED = {
    "loss": "cross entropy and its gradient without the products",
    "elementwise": "norms, rotary embedding, activation, residuals, copies",
    "update": "clipping and optimizer",
    "rest": "embedding, Python and the dispatcher",
}


def count_needed_flops(shape: Shape) -> dict[str, float]:
    """FLOPs of a step by kind, as `Shape.flops_per_token` counts them."""
    tokens = shape.batch * shape.length
    layer = 4 * shape.width**2 + 3 * shape.width * shape.feed_forward
    return {
        "products of the layers": 6 * tokens * shape.layers * layer,
        "products of the head": 6 * tokens * shape.width * shape.vocabulary,
        "attention": 12 * tokens * shape.layers * shape.width * (shape.length + 1) / 2,
    }


def find_kind(event: FunctionEvent) -> str | None:
    """The kind of work of an operator by its own name and the names around it; None for the step itself."""
    name, around, above = event.name, None, event.cpu_parent
    if name == "step":
        return None
    names = [name]
    while above is not None:
        names.append(above.name)
        above = above.cpu_parent
    for outer in names:
        if outer in INSIDE or "attention" in outer:
            around = INSIDE.get(outer, "attention")
            break
    if name in PRODUCTS and around in (None, "loss"):
        return "products of the head" if around == "loss" else "products of the layers"
    if around is not None:
        return around
    return "rest" if "embedding" in name else "elementwise"


def measure_matrix_rate(dtype: torch.dtype, size: int = 2048, repeats: int = 7) -> float:
    """FLOP/s of [size, size] x [size, size], by the median of the CPU time that the threads need together."""
    import torch

    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    out, times = torch.empty(size, size, dtype=dtype), []
    for _ in range(repeats + 1):
        start = time.process_time()
        torch.mm(a, b, out=out)
        times.append((time.process_time() - start) / torch.get_num_threads())
    return 2 * size**3 / statistics.median(times[1:])  # the first prepares the kernel


def prepare_step(folder: Path, shape: Shape, rows: int) -> None:
    import prepare

    values = {**vars(shape), "rows": rows, "seed": 0, "tokenizer": parse_options([]).tokenizer}
    prepare.write_tokens(folder, values)
    prepare.write_model(folder, values)


def profile_step(options: argparse.Namespace, folder: Path) -> tuple[Counter[str], float]:
    """Milliseconds of a step by kind, and those of a whole step without the profiler."""
    import preheat_worker
    import torch
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as profiler

    from preheat.core import Slot
    from preheat.engine.builder import build
    from preheat.engine.step import accumulate_gradients, update
    from preheat.hardware.cpu_allocator import install_heap
    from preheat.hardware.probe import probe

    shape = SHAPES[options.size]
    techniques = {**(BF16 if options.precision == "bf16" else EXACT), **(COMPILED if options.compile else FUSED)}
    job = Job(
        name="profile",
        model=str(folder / "model"),
        litgpt_model="",
        tokens=str(folder / "tokens.npy"),
        scratch="",
        batch=shape.batch,
        length=shape.length,
        steps=2 * options.steps,
        lr=shape.lr,
        settings={"techniques": techniques},
    )
    install_heap()
    model_build = build(preheat_worker.build_recipe(job), vocabulary=None, device=probe("cpu"))
    rows = preheat_worker.iterate_batches(job, model_build.slot(Slot.BATCH_SHAPE)(0.0).micro)

    def iterate_steps(count: int) -> Iterator[float]:
        for _ in range(count):
            batch, start = next(rows), time.process_time()
            with record_function("step"):
                loss = accumulate_gradients(model_build, batch)
                with record_function("update"):
                    stats = update(model_build, job.lr)
                torch.cat([(loss.total / loss.weight).float().reshape(1), stats]).tolist()
            yield time.process_time() - start

    threads = torch.get_num_threads()
    whole = statistics.median(list(iterate_steps(options.steps))[2:]) * 1e3 / threads
    with profiler(activities=[ProfilerActivity.CPU]) as recorded:
        list(iterate_steps(options.steps))
    times: Counter[str] = Counter()
    for event in recorded.events():
        kind = find_kind(event)
        if kind is None:
            times["rest"] += event.self_cpu_time_total / 1e3 / options.steps
        else:
            times[kind] += event.self_cpu_time_total / 1e3 / options.steps
    return times, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="15M")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--compile", action="store_true", help="with compile instead of fused_operators")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's choice")
    parser.add_argument("--steps", type=int, default=5, help="steps without and then with the profiler (default 5)")
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(f"--steps {options.steps}: take at least 3; the first 2 are not timed")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    before = measure_matrix_rate(dtype)
    with tempfile.TemporaryDirectory() as folder:
        prepare_step(Path(folder), SHAPES[options.size], 2 * options.steps * SHAPES[options.size].batch)
        times, whole = profile_step(options, Path(folder))
    after = measure_matrix_rate(dtype)
    rate, flops = max(before, after), count_needed_flops(SHAPES[options.size])
    stretch = whole / sum(times.values())
    print(
        f"\n{options.size}, {options.precision}{', compiled' if options.compile else ''}, {torch.get_num_threads()} "
        f"threads, {torch.backends.cpu.get_cpu_capability()}: {whole:,.0f} ms of CPU a step; "
        f"products at {before / 1e9:,.0f} GFLOP/s before and {after / 1e9:,.0f} after.\n"
    )
    print("| kind of work | ms | of the step | its FLOPs need |\n|---|---|---|---|")
    for name in KINDS:
        label = f"{name} ({EXPLAINED[name]})" if name in EXPLAINED else name
        need = f"{flops[name] / rate * 1e3 / whole:.1%}" if name in flops else ""
        print(f"| {label} | {times[name] * stretch:,.1f} | {times[name] * stretch / whole:.1%} | {need} |")
    print(f"| all | {whole:,.1f} | 100% | {sum(flops.values()) / rate * 1e3 / whole:.1%} |")


if __name__ == "__main__":
    main()
