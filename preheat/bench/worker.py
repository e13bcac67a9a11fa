"""One contender's turn: `python -m preheat.bench.worker JOB.json RESULT.json` trains a few steps.

The job is a `TurnJob`, the result a `Turn`, or {failed: the reason} after an expected error.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time

_BEGUN = time.perf_counter()  # before anything heavy is imported: start-up is measured from here

import statistics  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from contextlib import closing  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.bench.messages import ProfileJob, Turn, TurnJob
    from preheat.core import Batch
    from preheat.core.technique import Build
    from preheat.engine.step import LossSum
    from preheat.planning.request import Request

__all__ = ["SAMPLE", "main", "take_steps"]

SAMPLE = 1 << 16
"""Maximum elements of each parameter's gradient to store for the comparison, evenly spaced."""


def take_steps(job: TurnJob) -> Turn:
    """Trains `job.steps` steps as `train` does, without evaluating, saving or reporting; then profiles if asked."""
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
    from preheat.hardware.machine_use import UseMeter
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
    profiled = (job.profile.steps + 1) * recipe.batch.size if job.profile else 0

    def order() -> Iterator[int]:
        rows_in_order: Iterator[int] = model_build.slot(Slot.SAMPLE_ORDER)(data.train, recipe.seed, 0, samples)
        return rows_in_order

    # Techniques may need to see the data first (calibration, teacher caches), as before a run.
    model_build.run_dataset_passes(
        data.train, itertools.islice(order(), samples + profiled), lambda what, done, total: None
    )
    seconds, losses, tokens, startup = [], [], [], 0.0
    stream = batches(
        data.train,
        seed=recipe.seed,
        committed=0,
        shape=lambda step: shape(min(step / job.steps, 1)),  # as in a full run
        order=order(),
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        pin=device.kind == "cuda",
    )
    meter = UseMeter()
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
            mean = _read_loss(loss, stats)
            seconds.append(time.perf_counter() - begun)
            losses.append(mean)
            tokens.append(sum(b.tokens.numel() for b in batch))
            startup = startup or time.perf_counter() - _BEGUN - paused
            if step and job.seconds and sum(seconds) > job.seconds:  # after at least two steps
                break
        use = meter.use(threads)
        memory = read_memory_peak(device.kind, imports).figures()
        # After all that is measured, as a profiled step takes longer and more memory.
        finding = _profile_steps(job.profile, request, model_build, stream, lr, seconds) if job.profile else None
    return Turn(
        seconds=seconds,
        losses=losses,
        startup_seconds=startup,
        memory=memory,
        tokens=tokens,
        changes={name: [c.what for c in changes] for name, changes in model_build.changes.items()},
        notices=[event.message for event in model_build.state.events if isinstance(event, Notice)],
        finding=finding,
        use=use,
    )


def _read_loss(loss: LossSum, stats: Tensor) -> float:
    """Returns the mean loss of a step, NaN if its gradients are not finite."""
    import torch

    # One `tolist` for all figures, which waits for the device: the step's time includes its work.
    mean, _, finite = torch.cat([(loss.total / max(loss.weight, 1)).float().reshape(1), stats]).tolist()
    return mean if finite else math.nan


def _profile_steps(
    job: ProfileJob, request: Request, build: Build, stream: Iterator[list[Batch]], lr: float, seconds: Sequence[float]
) -> str:
    """Profiles further steps, writes the files of the profile, and returns the sentence that names the largest gap.

    Args:
        seconds: of the steps before.
    """
    import torch

    from preheat.core import Phase
    from preheat.engine.step import accumulate_gradients, update
    from preheat.hardware.machine_use import UseMeter
    from preheat.training.profile_figures import Measured, Setting
    from preheat.training.step_tracer import StepTracer, write_profile

    tracer = StepTracer(job.steps, on_gpu=request.device.kind == "cuda")
    # In the step before the first profiled one tracing itself is set up.
    first = len(seconds) + 2
    for number in range(first - 1, first + job.steps):
        if number == first:
            use = UseMeter()
        with tracer.step(build, number):
            tracer.enter(Phase.DATA)
            batch = next(stream)
            tracer.enter(Phase.GRADIENTS)
            loss = accumulate_gradients(build, batch, lr)
            tracer.enter(Phase.UPDATE)
            stats = update(build, lr)
            tracer.enter(Phase.STEP_STATS)
            _read_loss(loss, stats)
    traced = tracer.stop()
    assert traced is not None, "steps were profiled"
    length, head = batch[0].tokens.shape[1], request.config.get_text_config().vocab_size
    figures = write_profile(
        Path(job.folder),
        traced,
        Setting(rank=0, ranks=1, device=request.device.name, length=length, vocabulary=head),
        Measured(first, statistics.median(seconds[1:]), use.use(torch.get_num_threads())),
        planned=job.planned,
        planned_seconds=job.planned_seconds,
    )
    return figures.findings[0].text


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
    from preheat.files import parse_json, read_record

    job, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        text = encode(take_steps(read_record(TurnJob, parse_json(job.read_bytes()))))
    except PreheatError as error:
        # An expected error is a result; anything else ends the process with a traceback, whose last line is reported.
        text = json.dumps({"failed": str(error).splitlines()[0]})
    result.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
