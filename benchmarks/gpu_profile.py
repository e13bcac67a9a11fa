"""Profiles a training step on a GPU: milliseconds and number of kernels by kind of work.

    python benchmarks/gpu_profile.py RECIPE.yaml [--set KEY=VALUE ...] [--steps 9] [--out FOLDER]

Takes the steps as `preheat train` does, and one more under torch's profiler. FOLDER gets NAME.json with the figures, and NAME.kernels.json.gz
with every kernel in order: begin and duration in ns, name.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

KINDS = {  # the first kind with a pattern in the kernel's name
    "matmuls": ("nvjet", "splitKreduce", "gemm", "cutlass_80"),
    "attention": ("flash_", "cudnn", "fmha"),
    "gate": ("silu", "_fg_kernel", "DWf_DW"),
    "rotary embedding": ("rotary", "rope", "neg_kernel", "CatArrayBatchedCopy<"),
    "norms": ("layer_norm", "GammaBeta", "rms"),
    "dequantization": ("nf4", "kDequant"),
    "loss": ("oftMax", "_fl_", "cross"),
    "optimizer": ("multi_tensor",),
}
UNTIMED = 4


def find_kind(kernel: str) -> str:
    """The kind of work of a kernel of torch, Triton, cuBLAS, cuDNN, bitsandbytes or unsloth, by its name."""
    return next((kind for kind, patterns in KINDS.items() if any(pattern in kernel for pattern in patterns)), "other")


def sum_by_kind(kernels: list[tuple[int, int, str]]) -> dict[str, tuple[float, int]]:
    """Returns {kind: (milliseconds, number of kernels)}, the longest first."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for _, nanoseconds, name in kernels:
        sums[find_kind(name)][0] += nanoseconds
        sums[find_kind(name)][1] += 1
    return {kind: (time / 1e6, count) for kind, (time, count) in sorted(sums.items(), key=lambda item: -item[1][0])}


def profile_step(text: str, steps: int) -> tuple[dict[str, Any], list[tuple[int, int, str]]]:
    """Trains the steps of a recipe and one more, which is profiled. Returns figures and kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    from preheat.bench.messages import TurnJob
    from preheat.bench.worker import take_steps
    from preheat.engine import step as verbs

    gradients, update = verbs.accumulate_gradients, verbs.update
    begun: dict[str, Any] = {"steps": 0}

    # Dry runs, whose tensors are fake, take steps too.
    def is_profiled() -> bool:
        return not is_in_torch_dispatch_mode() and bool(begun["steps"] == steps)

    def watch_gradients(*args: Any, **kwargs: Any) -> Any:
        if is_profiled():
            torch.cuda.synchronize()
            begun["allocated"] = torch.cuda.max_memory_allocated() / 2**30
            begun["reserved"] = torch.cuda.max_memory_reserved() / 2**30
            begun["profile"] = profile(activities=[ProfilerActivity.CUDA])
            begun["profile"].__enter__()
        return gradients(*args, **kwargs)

    def watch_update(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        if is_profiled():
            torch.cuda.synchronize()
            begun["profile"].__exit__(None, None, None)
        begun["steps"] += not is_in_torch_dispatch_mode()
        return result

    verbs.accumulate_gradients, verbs.update = watch_gradients, watch_update  # type: ignore[assignment]
    try:
        run = take_steps(TurnJob(text, steps + 1))
    finally:
        verbs.accumulate_gradients, verbs.update = gradients, update
    events = begun["profile"].profiler.kineto_results.events()
    kernels = sorted((e.start_ns(), e.duration_ns(), e.name()) for e in events if "CUDA" in str(e.device_type()))
    timed = sorted(run.seconds[UNTIMED:steps])
    median = statistics.median(timed)
    figures = {
        "tokens/s": run.tokens[-1] / median,
        "spread": (timed[-1] - timed[0]) / median,
        "step seconds": run.seconds[:steps],
        "losses": run.losses[:steps],
        "allocated GiB": begun["allocated"],
        "reserved GiB": begun["reserved"],
        "milliseconds and kernels": sum_by_kind(kernels),
    }
    return figures, kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_profile"))
    options = parser.parse_args()
    import torch

    from preheat import recipe as recipes

    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    recipe = recipes.override(recipes.parse(options.recipe.read_text(encoding="utf-8")), *options.set)
    figures, kernels = profile_step(recipes.dump(recipe), options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.recipe.stem
    (options.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    with gzip.open(options.out / f"{name}.kernels.json.gz", "wt", encoding="utf-8") as file:
        json.dump([[begin - kernels[0][0], duration, kernel] for begin, duration, kernel in kernels], file)
    print(
        f"{figures['tokens/s']:,.0f} tokens/s, {figures['allocated GiB']:.2f} GiB allocated\n\n| kind | ms | kernels |\n|---|---|---|"
    )
    for kind, (milliseconds, count) in figures["milliseconds and kernels"].items():
        print(f"| {kind} | {milliseconds:.1f} | {count} |")


if __name__ == "__main__":
    main()
