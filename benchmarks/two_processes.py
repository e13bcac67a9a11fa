"""Two processes against one on this machine, one thread each, and preheat's step against bare FSDP2 code; gloo; in turns.

    python benchmarks/two_processes.py [--rounds 3] [--steps 10] [--turns 11] [--rows 16 64] [--out benchmarks/results/two_processes.md]

Scaling   `preheat train` of a 15M-like Llama on one process, and with `data_parallel` and `fsdp` on two: each a run of its own. And two runs
          at once that share nothing but the machine, each with half of the rows: what two cores can give at most.
Overhead  two processes hold two copies of that model, both sharded by FSDP2, and take turns: three steps as preheat's loop takes
          them (gradients, update, the numbers read once), three as one would write them by hand on the same rows: forward, cross entropy, backward,
          clip, AdamW, the loss read once. Both in fp32 by torch's own fused attention, with whole logits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from preheat.hardware.child_processes import tie_to_parent

MODEL = "{family: llama, num_layers: 6, hidden_size: 288, num_heads: 6, intermediate_size: 768, tie_embeddings: true}"
FAST = "{mixed_precision: {mode: bf16}, chunked_loss: {rows: 512}, efficient_attention: {}}"
RECIPE = """name: m15
model: {model}
data: {{source: stdlib, vocab_size: 4096}}
batch: {{size: {rows}, seq_len: 256}}
stop: {{max_steps: {steps}}}
evaluate: {{}}
techniques: {techniques}
hardware: {{device: cpu, threads: 1}}
"""
APART = "two that share nothing"
MANY: dict[str, tuple[str, ...]] = {  # techniques of each; two processes if there are any
    "one process": (),
    "data_parallel": ("data_parallel={}",),
    "data_parallel, zero1": ("data_parallel={}", "zero1={}"),
    "fsdp, reshard_after_forward: false": ("fsdp={reshard_after_forward: false}",),
    "fsdp": ("fsdp={}",),
    APART: (),
}


def measure_scaling(folder: Path, rounds: int, steps: int, rows: int) -> dict[str, list[dict[str, Any]]]:
    recipe = folder / "m15.yaml"
    recipe.write_text(RECIPE.format(model=MODEL, steps=steps, techniques=FAST, rows=rows), encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in MANY}
    for n in range(rounds):
        for turn, name in enumerate([*list(MANY)[n % len(MANY) :], *list(MANY)[: n % len(MANY)]]):
            out = folder / f"{rows}-{n}-{turn}"
            more = [*list_overrides(MANY[name]), "--nproc", "2"] if MANY[name] else []
            if name == APART:
                other = threading.Thread(
                    target=run, args=(recipe, folder / f"{out.name}-other", ["--set", f"batch.size={rows // 2}"])
                )
                other.start()
                one = run(recipe, out, ["--set", f"batch.size={rows // 2}"])
                other.join()
                one["speed"] *= 2
            else:
                one = run(recipe, out, more)
            found[name].append(one)
            print(rows, name, one, flush=True)
    return found


def list_overrides(techniques: tuple[str, ...]) -> list[str]:
    """Options of `preheat train` that add techniques (`fsdp={}`)."""
    return [part for technique in techniques for part in ("--set", f"techniques.{technique}")]


def run(recipe: Path, out: Path, more: list[str]) -> dict[str, Any]:
    """One training: tokens/s, peak memory, and the loss of the last step."""
    command = [sys.executable, "-m", "preheat", "train", str(recipe), "--out", str(out), "--json", *more]
    done = subprocess.run(
        tie_to_parent(command), capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    made = [line for line in lines if "loss" in line][2:]  # the first ones warm up
    speed = statistics.median(line["tokens_per_second"] for line in made)
    return {"speed": speed, "peak": json.loads(done.stdout)["peak_gib"], "loss": made[-1]["loss"]}


def measure_overhead(folder: Path, turns: int) -> list[dict[str, float]]:
    """Seconds of three steps of both, of each turn."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        tie_to_parent([*command, "--work", str(folder), "--turns", str(turns)]),
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads((folder / "overhead.json").read_text(encoding="utf-8"))


def run_steps(folder: Path, turns: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy
    from transformers import LlamaForCausalLM

    from preheat import recipe as recipes
    from preheat.core import Batch, MaskSpec
    from preheat.engine.builder import build
    from preheat.engine.step import accumulate_gradients, update
    from preheat.hardware.cpu_allocator import install_heap
    from preheat.hardware.probe import probe
    from preheat.models.hf import configure

    torch.set_num_threads(1)
    install_heap()
    dist.init_process_group("gloo")
    rank, rows, length = dist.get_rank(), 8, 256
    text = RECIPE.format(model=MODEL, steps=100, techniques="{fsdp: {}, efficient_attention: {}}", rows=16)
    recipe = recipes.override(recipes.parse(text), "parallel.devices=2", "optimizer.max_grad_norm=1.0")
    ours = build(recipe, vocabulary=4096, device=probe("cpu"))
    bare = LlamaForCausalLM(configure(recipe, 4096))
    for layer in bare.model.layers:
        fully_shard(layer)
    fully_shard(bare)
    o = recipe.optimizer
    optimizer = torch.optim.AdamW(
        bare.parameters(), lr=1e-3, betas=(o.betas[0], o.betas[1]), eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    tokens = torch.randint(4096, (rows, length), generator=torch.Generator().manual_seed(rank))
    labels = torch.cat([tokens[:, 1:], torch.full((rows, 1), -100)], dim=1)
    positions = torch.arange(length).expand(rows, -1)

    def time_preheat() -> float:
        batch = Batch(tokens, labels, positions, MaskSpec(), 2 * rows * (length - 1), tuple(range(rows)))
        loss = accumulate_gradients(ours, [batch])
        stats = update(ours, 1e-3)
        mean, *_ = torch.cat([(loss.total / loss.weight).float().reshape(1), stats]).tolist()
        return mean

    def time_by_hand() -> float:
        logits = bare(tokens, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    found = []
    for turn in range(-1, turns):  # the first warms up
        seconds = {}
        for name, step in (("preheat", time_preheat), ("hand", time_by_hand))[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(3):
                step()
            dist.barrier()
            seconds[name] = time.perf_counter() - start
        found.append(seconds)
    if rank == 0:
        (folder / "overhead.json").write_text(json.dumps(found[1:]), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="of 256 tokens, a step")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/two_processes.md"))
    options = parser.parse_args()
    if options.work:
        run_steps(options.work, options.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        both = measure_overhead(Path(folder), options.turns)
        scaling = {rows: measure_scaling(Path(folder), options.rounds, options.steps, rows) for rows in options.rows}
    import torch

    ratios = sorted(one["preheat"] / one["hand"] for one in both)
    lines = [
        "# Two processes against one, one thread each, and preheat's step against bare FSDP2",
        "",
        f"`python benchmarks/two_processes.py --rounds {options.rounds} --steps {options.steps} --turns {options.turns} --rows {' '.join(map(str, options.rows))}`: Llama, 6 layers, width 288, 4,096 pieces, tied; rows of 256",
        f"tokens; gloo, two cores, torch {torch.__version__}. Scaling: bf16 autocast, chunked loss, efficient attention; median of the steps after the second; median (least to",
        f"most) over {options.rounds} rounds; ratios within a round.",
        "",
        "| rows a step | | tokens/s | times one | peak memory a process | loss of the last step |",
        "|---|---|---|---|---|---|",
    ]
    for rows, name, runs in ((rows, name, runs) for rows, made in scaling.items() for name, runs in made.items()):
        times = [a["speed"] / b["speed"] for a, b in zip(runs, scaling[rows]["one process"], strict=True)]
        speed, peak = (statistics.median(one[key] for one in runs) for key in ("speed", "peak"))
        lines.append(
            f"| {rows} | {name} | {speed:,.0f} | {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) | {peak:.3f} GiB | {runs[0]['loss']:.5f} |"
        )
    lines += [
        "",
        f"Overhead, {options.turns} turns of three steps each, fp32, torch's fused attention, whole logits: preheat's step takes {statistics.median(ratios):.3f} x the time of FSDP2 by hand "
        f"(quarters {ratios[len(ratios) // 4]:.3f} and {ratios[-1 - len(ratios) // 4]:.3f}, all {ratios[0]:.3f} to {ratios[-1]:.3f}).",
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
