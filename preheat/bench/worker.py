"""One contender's turn: `python -m preheat.bench.worker JOB.json RESULT.json` trains a few steps.

The job is a `TurnJob`, the result a `Turn`, or {failed: the reason} after an expected error.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

_BEGUN = time.perf_counter()  # before anything heavy is imported: start-up is measured from here

from collections.abc import Iterator  # noqa: E402
from contextlib import closing  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from preheat.bench.messages import Turn, TurnJob
    from preheat.core.technique import Build

__all__ = ["SAMPLE", "main", "take_steps"]

SAMPLE = 1 << 16
"""Maximum elements of each parameter's gradient to store for the comparison, evenly spaced."""


def take_steps(job: TurnJob) -> Turn:
    """Trains `job.steps` steps as `train` does, without evaluating, saving or reporting."""
    import torch

    from preheat import recipe as recipes
    from preheat.bench.messages import Turn
    from preheat.core import Searchable, Slot
    from preheat.core.run_records import Notice
    from preheat.data import batches
    from preheat.data.rows.example_kinds import require_examples
    from preheat.engine.builder import build, find_peak_learning_rate
    from preheat.engine.device import resolve_device
    from preheat.engine.step import accumulate_gradients, update
    from preheat.hardware.gpu_memory import read_memory_peak
    from preheat.model_folder import count_embedding_rows
    from preheat.planning.dry_run import observe
    from preheat.planning.plan import resolve_auto
    from preheat.planning.plan_request import choose_run_rates, count_rows, data_of, read_bytes_in_use
    from preheat.planning.request import Request
    from preheat.training.session import reset_memory_baseline

    # As `preheat train` does up to the first step, so that a turn measures the same work.
    recipe = recipes.parse(job.recipe)
    device, threads = resolve_device(recipe)
    data = data_of(recipe)
    require_examples(recipe, data)
    # Planning is not part of a contender's start-up: `paused` is subtracted from it.
    pause = time.perf_counter()
    request = Request(recipe, device, vocabulary=count_embedding_rows(data.tokenizer))
    # Settings left open are resolved as in a run, which needs this machine's measured rates.
    if any(isinstance(t, Searchable) and t.left_open(device) for t in recipe.techniques.values()):
        request = replace(request, rows=count_rows(data), in_use=read_bytes_in_use(device))
        request = replace(request, rates=choose_run_rates(request, threads))
        request = resolve_auto(request)
        recipe = request.recipe
    # The dry run imports the modules of the techniques, so that their memory is not attributed to the steps.
    observe(request)
    paused = time.perf_counter() - pause
    # Peaks are reported above the memory of the imports, which every contender has.
    imports = reset_memory_baseline(device)
    model_build = build(recipe, vocabulary=request.vocabulary, device=device, source_config=request.source_config)
    lr = find_peak_learning_rate(model_build)
    shape = model_build.slot(Slot.BATCH_SHAPE)
    # The order of the samples covers the steps of the turn, not those of the recipe.
    samples = job.steps * recipe.batch.size

    def order() -> Iterator[int]:
        rows_in_order: Iterator[int] = model_build.slot(Slot.SAMPLE_ORDER)(data.train, recipe.seed, 0, samples)
        return rows_in_order

    # Techniques may need to see the data first (calibration, teacher caches), as before a run.
    model_build.run_dataset_passes(data.train, itertools.islice(order(), samples), lambda what, done, total: None)
    seconds, losses, tokens, startup = [], [], [], 0.0
    stream = batches(
        data.train,
        seed=recipe.seed,
        committed=0,
        shape=lambda step: shape(step / job.steps),  # as in a full run
        order=order(),
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        pin=device.kind == "cuda",
    )
    with closing(stream):
        for step in range(job.steps):
            begun = time.perf_counter()
            # Waiting for data counts: a loader that is too slow slows the run down, too.
            batch = next(stream)
            loss = accumulate_gradients(model_build, batch, lr)
            # Gradients of step 0 are of equal weights in all contenders; later ones differ by the updates.
            if step == 0 and job.gradient:
                pause = time.perf_counter()
                _keep_gradients(model_build, Path(job.gradient))
                pause = time.perf_counter() - pause
                begun, paused = begun + pause, paused + pause
            stats = update(model_build, lr)
            # One `tolist` for all figures, which waits for the device: the step's time includes its work.
            mean, _, finite = torch.cat([(loss.total / max(loss.weight, 1)).float().reshape(1), stats]).tolist()
            seconds.append(time.perf_counter() - begun)
            losses.append(mean if finite else float("nan"))
            tokens.append(sum(b.tokens.numel() for b in batch))
            startup = startup or time.perf_counter() - _BEGUN - paused
            if step and job.seconds and sum(seconds) > job.seconds:  # after at least two steps
                break
    return Turn(
        seconds=seconds,
        losses=losses,
        startup_seconds=startup,
        memory=read_memory_peak(device.kind, imports).figures(),
        tokens=tokens,
        changes={name: [c.what for c in changes] for name, changes in model_build.changes.items()},
        notices=[event.message for event in model_build.state.events if isinstance(event, Notice)],
    )


def _keep_gradients(build: Build, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {
            # A stride over the whole tensor: the first elements would be those of a few rows.
            name: p.grad.flatten()[:: max(1, p.numel() // SAMPLE)].float().cpu().contiguous()
            for name, p in build.parameters()
            if p.grad is not None
        },
        path,
    )


def main() -> None:
    from preheat.bench.messages import TurnJob, encode
    from preheat.errors import PreheatError

    job, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        text = encode(take_steps(TurnJob(**json.loads(job.read_text(encoding="utf-8")))))
    except PreheatError as error:
        # An expected error is a result; anything else ends the process with a traceback, whose last line is reported.
        text = json.dumps({"failed": str(error).splitlines()[0]})
    result.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
