"""What a checkpoint costs the steps, written between them and beside them: the same build, in alternation.

python benchmarks/saving.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from preheat import recipe as recipes
from preheat.core import Batch, Build, MaskSpec
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saving
from preheat.engine.builder import build
from preheat.engine.device import resolve_device
from preheat.engine.step import accumulate_gradients, update

RECIPE = """
model: {num_layers: 6, hidden_size: 288, num_heads: 6, vocab_size: 32000, tie_embeddings: true}
batch: {size: 4, seq_len: 128}
stop: {max_steps: 100}
checkpoint: {every: 3, keep: 1, asynchronous: false}
hardware: {threads: 1}
techniques: {chunked_loss: {rows: 512}, efficient_attention: {}}
"""
STEPS = 3


def run_step(b: Build) -> None:
    tokens = torch.randint(32000, (4, 129), generator=torch.Generator().manual_seed(0)).to(b.torch_device)
    batch = Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=torch.arange(128).repeat(4, 1),
        mask=MaskSpec(),
        weight=512,
        rows=(0, 1, 2, 3),
    )
    accumulate_gradients(b, [batch], 1e-3)
    float(update(b, 1e-3)[0])


def round_of(b: Build, saving: Saving | None, number: int) -> tuple[float, float]:
    """Seconds of some steps after a checkpoint was begun, with that; and how long it held them."""
    start = time.perf_counter()
    if saving is not None:
        saving.save(checkpoint.Progress(step=number))
    held = time.perf_counter() - start
    for _ in range(STEPS):
        run_step(b)
    return time.perf_counter() - start, held


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    plain = recipes.parse(RECIPE, where="benchmark")
    device, _ = resolve_device(plain)
    b = build(plain, vocabulary=32000, device=device)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        between = Saving(b, Path(folder) / "between")
        b.recipe = recipes.override(plain, "checkpoint.asynchronous=true")
        beside = Saving(b, Path(folder) / "beside")
        ways = {"no checkpoint": None, "between the steps": between, "beside the steps": beside}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        run_step(b)
        for number in range(rounds + 1):
            for name, saving in ways.items():
                made = round_of(b, saving, number + 1)
                if saving is not None:
                    saving.wait()
                if number:  # the first warms up
                    found[name].append(made)
        size = sum(f.stat().st_size for f in next((Path(folder) / "beside").iterdir()).iterdir())
    count = sum(p.numel() for _, p in b.parameters())
    print(
        f"{count / 1e6:.1f} M parameters, checkpoint of {size / 2**20:.0f} MiB, {STEPS} steps a round, median (least to most) of {rounds} rounds, seconds"
    )
    for name, seconds in found.items():
        whole, held = ([s[k] for s in seconds] for k in (0, 1))
        print(
            f"| {name} | {median(whole):.2f} ({min(whole):.2f} to {max(whole):.2f}) | {median(held):.3f} ({min(held):.3f} to {max(held):.3f}) |"
        )


if __name__ == "__main__":
    main()
