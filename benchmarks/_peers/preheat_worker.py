"""preheat's build and step, the two verbs that `preheat train` runs, over our token rows.

preheat reads text, not token files, so the rows are handed to the engine here, as `preheat.training.loop` does with its own:
batch, gradients, update, then one read of the numbers. Model, optimizer and techniques come from a recipe.

settings: {"techniques": {name: settings, ...}} as in a recipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import torch
from contract import Clock, Job, read_job, report

from preheat.core import Batch, MaskSpec, Slot
from preheat.engine.builder import build, find_peak_learning_rate
from preheat.engine.step import accumulate_gradients, update
from preheat.hardware.cpu_allocator import install_heap
from preheat.hardware.probe import probe
from preheat.recipe import Recipe, parse
from preheat.training.lr_schedule import compute_lr_factor


def build_recipe(job: Job) -> Recipe:
    """The job as a recipe. JSON is YAML, so that no value is written twice."""
    parts = {
        "name": "cpu-vs-peers",
        "seed": job.seed,
        "model": {"path": job.model},
        "batch": {"size": job.batch, "seq_len": job.length},
        "optimizer": {
            "lr": job.lr,
            "betas": list(job.betas),
            "eps": job.eps,
            "weight_decay": job.weight_decay,
            "max_grad_norm": job.clip,
        },
        "schedule": {"kind": "constant", "warmup_ratio": 0},
        "stop": {"max_steps": job.steps},
        "hardware": {"device": "cpu"},
        "techniques": job.settings["techniques"],
    }
    return parse(json.dumps(parts), where=job.name)


def iterate_batches(job: Job, micro: int) -> Iterator[list[Batch]]:
    """The rows of each step in micro-batches. Labels stand at their place: the last of a row has none, as with the Trainer."""
    tokens = torch.from_numpy(np.load(job.tokens)).long()
    labels = torch.cat([tokens[:, 1:], torch.full((len(tokens), 1), -100)], dim=1)
    positions = torch.arange(job.length)
    for first in range(0, len(tokens), job.batch):
        step = range(first, first + job.batch)
        cuts = (step[i : i + micro] for i in range(0, job.batch, micro))
        yield [
            Batch(
                tokens[c.start : c.stop],
                labels[c.start : c.stop],
                positions.expand(len(c), -1),
                MaskSpec(),
                len(c) * (job.length - 1),
                tuple(c),
            )
            for c in cuts
        ]


def main() -> None:
    job, clock = read_job(), Clock()
    recipe = build_recipe(job)
    install_heap()  # as before every run of `preheat train`
    made = build(recipe, vocabulary=None, device=probe("cpu"))
    shape = made.slot(Slot.BATCH_SHAPE)(0.0)
    losses: list[float] = []
    clock.tick()
    for step, batch in enumerate(iterate_batches(job, shape.micro)):
        lr = find_peak_learning_rate(made) * compute_lr_factor(recipe.schedule, step, job.steps)
        if lr != job.lr:
            raise RuntimeError(f"step {step}: learning rate {lr:g}, the job says {job.lr:g}")
        loss = accumulate_gradients(made, batch)
        stats = update(made, lr)
        # One read of the device a step, as in preheat's own loop.
        mean, _, finite = torch.cat([(loss.total / loss.weight).float().reshape(1), stats]).tolist()
        if not finite:
            raise RuntimeError(f"step {step}: gradients are not finite")
        losses.append(mean)
        clock.tick()
    report(job, clock, losses, ("preheat", "transformers", "torch"))


if __name__ == "__main__":
    main()
