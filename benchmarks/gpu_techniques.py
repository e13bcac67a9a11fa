"""The ladder of techniques on a CUDA device, from plain eager fp32 to all of them: Llama shapes with random weights, real text.

    python benchmarks/gpu_techniques.py [--shape 1B 8B] [--steps 8] [--repeats 2] [--out benchmarks/results]

Each rung adds one technique to those above it and runs in a process of its own, in alternation (preheat/bench). Writes
gpu_techniques-SHAPE.json and .md: tokens/s with spread, MFU against the matrix rate measured on the device, peak memory predicted and
measured, the cosine of the first gradients with those of plain eager. `--shape tiny --device cpu` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)  # preheat, installed or not
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [ROOT, os.environ.get("PYTHONPATH")])
)  # and for the processes that it starts

from preheat import recipe as recipes  # noqa: E402
from preheat.bench.compare import Contender, run_bench  # noqa: E402
from preheat.core import Technique, registry  # noqa: E402
from preheat.core.bench import BenchResult, FailedRow  # noqa: E402

# name: model, rows, length. 8B: as many of its layers as fit with everything in fp32.
SHAPES: dict[str, tuple[str, int, int]] = {
    "1B": (
        "{num_layers: 16, hidden_size: 2048, num_heads: 32, num_kv_heads: 8, intermediate_size: 8192, vocab_size: 128256, tie_embeddings: true}",
        4,
        2048,
    ),
    "8B": (
        "{num_layers: 6, hidden_size: 4096, num_heads: 32, num_kv_heads: 8, intermediate_size: 14336, vocab_size: 128256}",
        2,
        4096,
    ),
    "tiny": (
        "{num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, intermediate_size: 128, vocab_size: 4096}",
        4,
        128,
    ),
}
# In this order; a rung may change the settings of one above it.
LADDER: tuple[dict[str, dict[str, Any]], ...] = (
    {"mixed_precision": {"mode": "bf16"}},
    {"efficient_attention": {}},
    {"chunked_loss": {"rows": 2048}},
    {"mixed_precision": {"mode": "bf16_weights"}},
    {"compile": {}},
    {"liger": {}},
    {"activation_checkpointing": {"mode": "selective"}},
    {"activation_checkpointing": {"mode": "full"}},
)


def list_contenders(recipe: recipes.Recipe) -> list[Contender]:
    """The plain recipe and one contender a rung."""
    known = registry()
    chosen: dict[str, Technique] = {}
    found = [Contender("plain", replace(recipe, techniques={}))]
    for rung in LADDER:
        ((name, settings),) = rung.items()
        chosen = {**chosen, name: known[name](**settings)}
        words = " ".join(map(str, settings.values()))
        found.append(Contender(f"+ {name} {words}".strip(), replace(recipe, techniques=chosen)))
    return found


def render_markdown(result: BenchResult, command: str) -> str:
    machine = result.machine
    lines = [
        f"# {result.name}: the ladder of techniques",
        "",
        f"`{command}`, {machine.name}, torch {machine.torch}, {result.repeats} turns of {result.steps} steps.",
        "",
        "| rung | tokens/s | low to high | times plain | MFU | peak GiB | predicted | start-up s | cosine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        if isinstance(row, FailedRow):
            lines.append(f"| {row.name} | {row.failed} | | | | | | | |")
            continue
        assert row.predicted, "only a rejected recipe has no plan, and does not run"
        cosine = "-" if row.gradient_cosine is None else f"{row.gradient_cosine:.5f}"
        lines.append(
            f"| {row.name} | {row.tokens_per_second:,.0f} | {row.spread[0]:,.0f} to {row.spread[1]:,.0f} | {row.ratio:.2f} | "
            f"{row.mfu:.0%} | {row.peak_gib:.2f} | {row.predicted.peak_gib:.2f} | {row.startup_seconds:.0f} | {cosine} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1B", "8B"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    failed = False
    for shape in options.shape:
        model, rows, length = SHAPES[shape]
        recipe = recipes.parse(
            f"name: gpu-{shape}\nmodel: {model}\nbatch: {{size: {rows}, seq_len: {length}}}\nstop: {{max_steps: {options.steps}}}\n"
            f"hardware: {{device: {options.device}}}"
        )
        with tempfile.TemporaryDirectory() as folder:
            result = run_bench(
                recipe,
                list_contenders(recipe),
                steps=options.steps,
                repeats=options.repeats,
                out=Path(folder),
                say=lambda what, done, total: print(f"{done}/{total} {what}", flush=True),
            )
            target = options.out / f"gpu_techniques-{shape}.json"
            shutil.copy(Path(folder) / "bench.json", target)
        table = render_markdown(result, "python " + shlex.join(sys.argv))
        target.with_suffix(".md").write_text(table, encoding="utf-8")
        print(table)
        failed |= any(row.failed for row in result.rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
