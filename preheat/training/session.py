"""Prepares a run for training: data, plan, run folder, build, and the checkpoint to resume from."""

from __future__ import annotations

import atexit
import gc
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.core import DATA, Batch, Build, Device, Shape, Slot
from preheat.core.plan import Plan, Price
from preheat.core.run_records import Event, RemovedRows, Resumed, Rewound, Started
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saving
from preheat.engine.builder import build, find_peak_learning_rate, require_model
from preheat.engine.device import resolve_device
from preheat.engine.step import record_sources
from preheat.errors import DoesNotFit, RecipeError, RunError
from preheat.evaluation.best import criterion_of
from preheat.evaluation.run_evaluator import RunEvaluator
from preheat.files import read_record, to_plain_data
from preheat.hardware.cpu_allocator import install_heap, release_small, release_unused
from preheat.hardware.deterministic import describe_exactness
from preheat.hardware.gpu_memory import limit_memory
from preheat.hardware.interrupts import check
from preheat.hardware.oom import read_reserved_bytes
from preheat.hardware.probe import reset_peak, resident_bytes
from preheat.inference.text_generation import load_chat_template
from preheat.model_folder import count_embedding_rows
from preheat.models import configs, hf, presets
from preheat.planning.explain import add_cost
from preheat.planning.image_counts import add_image_counts
from preheat.planning.plan import count_steps, find_settled, plan, resolve_auto
from preheat.planning.plan_request import choose_run_rates, count_rows, data_of, read_bytes_in_use
from preheat.planning.request import Request
from preheat.planning.search.result import describe_held_memory, describe_shortfall, hint_fragmentation
from preheat.recipe import Recipe
from preheat.recipe.paths import anchor_paths
from preheat.run.reader import Reader
from preheat.run.writer import Silent, Writer, check_folder
from preheat.tracking import follower as tracking
from preheat.training.observer import Watch
from preheat.training.process_group import Ranks, join_process_group
from preheat.training.provenance import compute_digest, list_versions, record_environment
from preheat.training.recovery.fallback_log import apply_fallbacks
from preheat.training.resume import Looked, compare, compute_fingerprints, read_finished_summary, resume_build
from preheat.training.sample_generation import Samples
from preheat.training.spikes import Range, iterate_around

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.core.json_types import JsonObject
    from preheat.data import PreparedData
    from preheat.data.packing import Rows
    from preheat.data.streaming import StreamRows
    from preheat.hardware.rates import Rates

__all__ = [
    "WARM_UP",
    "Finished",
    "Session",
    "open_session",
    "read_data",
    "reset_memory_baseline",
]

_MOSTLY_TEXT = 0.9
"""With a smaller share of positions that are not padding, a run says so."""
WARM_UP = 3
"""Steps before those that are profiled: the first may compile, and the last is the first within the profiler."""


@dataclass(frozen=True)
class Finished:
    """A resumed run that has no steps left. Nothing was written."""

    summary: JsonObject
    """The return value of `train`."""


@dataclass
class Session:
    """A run that is ready to train after `assemble`."""

    recipe: Recipe
    """The recipe as written."""
    resolved: Recipe
    """The recipe with values for the settings that a dry run chooses."""
    request: Request
    """The effective recipe (with fallbacks applied) on this rank's device, which is planned and built. Rates: on rank 0
    only."""
    threads: int
    data: PreparedData
    probes: RunEvaluator
    """Runs the evaluations of the run."""
    samples: Samples
    writer: Writer
    watch: Watch
    ranks: Ranks
    """Rank of this process and the store."""
    plan: Plan
    scan: Looked | None
    """The checkpoint to resume from, if any; on rank 0 only."""
    imports: int
    """Resident bytes of the process before the build."""
    claimed: int
    """Bytes allocated by the process before the build, touched or not."""
    price: Price | None = None
    """Of a device-hour; on rank 0 only."""
    left_out: tuple[Range, ...] = ()
    """Samples that the run does not train on: around spikes, and those that the user removed."""
    build: Build = field(init=False)
    saving: Saving = field(init=False)
    progress: checkpoint.Progress = field(init=False)
    shape: Callable[[int], Shape] = field(init=False)
    """Batch shape of a step (from 0): a pure function, so that every session reads the same."""
    order: Iterator[int] = field(init=False)
    """Sequence numbers of the data, from the current progress on."""
    peak_lr: float = field(init=False)
    assembled: bool = False
    """True if there is a build."""

    @property
    def effective(self) -> Recipe:
        """The resolved recipe with fallbacks applied."""
        return self.request.recipe

    @property
    def device(self) -> Device:
        return self.request.device

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run; None if only time limits it."""
        return count_steps(self.recipe, count_rows(self.data))

    def assemble(self, *, resume: bool) -> None:
        """Builds the effective recipe and loads the checkpoint that the run resumes from.

        Raises:
            RecipeError, RunError: the recipe cannot be built, or the checkpoint belongs to another run.
        """
        import torch

        self.watch.stage("building")
        check()
        request = self.request
        # The build must come first: the seed below depends on the mesh, and the checkpoint loads into the build.
        new_build = build(
            request.recipe,
            vocabulary=request.vocabulary,
            device=request.device,
            source_config=request.source_config,
        )
        # Seeds dropout: different masks on each data-parallel rank, the same in every run.
        torch.manual_seed(self.recipe.seed * 65537 + new_build.mesh.index(*DATA))
        if self.data.sources and (why := record_sources(new_build, self.data.sources)):
            self.watch.notice(f"the loss by source of the data is not recorded: {why}")
        for kind in ("text_part", "dropout", "recurrent_kernels"):
            for change in new_build.changes.get(kind, ()):
                self.watch.notice(change.what)
        # The progress of a new run; a checkpoint replaces it if its fingerprints agree.
        progress = checkpoint.Progress(
            recipe=recipes.dump(self.effective),
            fingerprints=compute_fingerprints(new_build, self.data),
            run=self.writer.id,
        )
        folder = self.writer.path
        if resume:
            progress = resume_build(new_build, folder, progress, self.scan, self.writer, self.watch, self.threads)
        # Assigned only after loading succeeded: recovery and the failure handler look at `assembled`.
        self.build, self.progress, self.assembled = new_build, progress, True
        self.peak_lr = find_peak_learning_rate(new_build)
        # -1: step 0 has no checkpoint, although the progress says 0.
        self.saving = Saving(new_build, folder / "checkpoints", last_step=progress.step or -1)
        check()
        self.writer.write_json("changes.json", new_build.changes)
        # Last, because the row order depends on the loaded progress, and dataset passes on the loaded weights.
        self.read()

    def read(self) -> None:
        """Sets the batch shapes and the row order from the current progress on, and runs the dataset passes."""
        current, total = self.build, self.total
        # The slot takes the fraction of the run that is done, from 0 to 1; without a known end it is always 0.
        self.shape = lambda step: current.slot(Slot.BATCH_SHAPE)(step / total if total else 0.0)
        self.order = self._choose_order()
        if self.build.hooks.dataset_passes:
            from preheat.data.loader import count_consumed_rows

            steps = range(self.progress.step, self.total or 0)
            left = sum(count_consumed_rows(self.shape(step), self.recipe.batch.seq_len) for step in steps)
            # A second iterator of the same order: the passes must not consume the one that training reads.
            order = self._choose_order()
            # A run that only time limits may read every row.
            remaining = itertools.islice(order, left) if self.total else range(count_rows(self.data) or 0)
            self.build.run_dataset_passes(self.data.train, remaining, self.watch.progress)

    def _choose_order(self) -> Iterator[int]:
        """Returns the row numbers from the current progress on, without those that are left out."""
        current, rows, shape, total = self.build, self.data.train, self.shape, self.total
        return iterate_around(
            lambda position: _choose_order(current, rows, position, shape, total),
            self.progress.samples,
            self.left_out,
        )

    def rows(self) -> Generator[list[Batch], None, None]:
        """Yields global batches from the current progress on, without end; close the generator after use."""
        from preheat.data import batches

        mesh, settings = self.build.mesh, self.recipe.data
        return batches(
            self.data.train,
            seed=self.recipe.seed,
            committed=self.progress.samples,
            shape=self.shape,
            step=self.progress.step,
            order=self.order,
            workers=settings.workers,
            prefetch=settings.prefetch,
            pin=self.device.kind == "cuda",
            # Each data-parallel rank reads its own rows of every global batch; tensor-parallel ranks read the same
            # ones.
            share=(mesh.index(*DATA), mesh.size(*DATA)),
            left_out=self.left_out,
        )

    def free_build(self) -> None:
        """Frees the build and its memory; keeps the progress."""
        # All four hold the build, directly or through closures: one that stayed would keep all its tensors alive.
        del self.build, self.saving, self.shape, self.order
        self.assembled = False
        # Modules and hooks form reference cycles, which only the collector frees.
        gc.collect()
        release_unused(self.device.kind)


def open_session(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool,
    watch: Watch,
    force: bool = False,
    rates: Rates | None = None,
    profile: int | None = None,
    price: Price | None = None,
    record: bool = True,
    remove: Sequence[Range] = (),
) -> Session | Finished:
    """Prepares data, plans, opens the folder and builds.

    Args:
        force: train even if the plan says that it does not fit.
        rates: measured rates to plan with; by default those of this machine, measured if there are none.
        profile: number of steps to profile, for which the run must be long enough.
        price: of a device-hour; by default that of the run's last session.
        remove: samples to leave out, as in `Session.left_out`, in addition to those of earlier sessions.
        record: write the run into its folder; False for work that only needs a build and its data.

    Returns:
        `Finished` if the run to resume has ended already.

    Raises:
        RecipeError, DataError, DoesNotFit, RunError: nothing is left behind in the folder then.
    """
    # 1. Find the other processes. The process group follows in `join`, after the slow work, so that no collective
    # waits.
    ranks = join_process_group(recipe)
    device, threads = resolve_device(recipe, ranks.on_host)
    # Before planning, which counts the resident memory of this process as in use.
    _free_earlier_run(device)
    ready: _Ready | None = None
    # 2. Rank 0 reads, benchmarks and plans; the others wait for its decisions and read the cached data afterwards.
    if ranks.lead:
        prepared = _prepare(
            recipe,
            out,
            ranks,
            device,
            threads,
            rates,
            resume=resume,
            watch=watch,
            force=force,
            profile=profile,
            price=price,
            record=record,
            remove=remove,
        )
        if isinstance(prepared, Finished):
            ranks.publish("prepared", {"finished": prepared.summary})
            ranks.gather("read")  # this process may hold the store: wait until the others have read it
            return prepared
        ready = prepared
        # The others build the recipe that rank 0 chose: a dry run on their side might resolve other settings.
        request, expected = ready.request, ready.expected
        left_out = ready.left_out
        ranks.publish(
            "prepared",
            {"recipe": recipes.dump(request.recipe), "plan": to_plain_data(expected), "left_out": left_out},
        )
        data, probes, samples = ready.data, ready.probes, ready.samples
    else:
        message = ranks.fetch("prepared")
        if "finished" in message:
            ranks.gather("read")
            return Finished(message["finished"])
        built = recipes.parse(message["recipe"], where="the recipe of rank 0")
        expected = read_record(Plan, message["plan"])
        left_out = tuple((first, end) for first, end in message["left_out"])
        source_config = configs.source_config(recipe)
        data, probes, samples = read_data(recipe, source_config, watch)  # rank 0 has checked the recipe
        vocabulary = count_embedding_rows(data.tokenizer)
        request = Request(built, device, vocabulary=vocabulary, world=ranks.world, source_config=source_config)
    # 3. All ranks must train the same thing: versions decide kernels, and the data's fingerprint decides the rows.
    ranks.require_equal({"recipe": compute_digest(recipes.dump(recipe)), "data": data.fingerprint, **list_versions()})
    # Modules that the first save imports: their memory counts as that of imports, not of the build.
    import numpy.ctypeslib  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    ranks.join(recipe, device.kind)
    # 4. Open the folder. Only rank 0 writes; the others have a writer that discards everything.
    writer = Writer(out, resume=resume) if ranks.lead and record else Silent(out)
    try:
        # Taken just before the build, so that the run's memory is counted without that of imports, data and plan.
        imports, claimed = reset_memory_baseline(device), read_reserved_bytes(device.kind)
        session = Session(
            recipe=recipe,
            resolved=ready.resolved if ready else request.recipe,
            request=request,
            threads=threads,
            data=data,
            probes=probes,
            samples=samples,
            writer=writer,
            watch=watch,
            ranks=ranks,
            plan=expected,
            scan=ready.scan if ready else None,
            imports=imports,
            claimed=claimed,
            price=ready.price if ready else None,
            left_out=left_out,
        )
        if device.kind == "cpu" and (why := install_heap()):
            watch.notice(
                f"{why}; torch's own allocator is used, and the run takes more memory than planned, often a third"
            )
        for notice in filter(None, (device.notice, describe_held_memory(expected))):
            watch.notice(notice)
        # Events of fallbacks that `_prepare` chose; they were held back until the folder was open.
        for event in ready.events if ready else ():
            writer.write_event(event)
        # 5. Build, and load the checkpoint.
        session.assemble(resume=resume)
        # 6. Record what is needed to inspect and resume the run.
        if ranks.lead and not resume:
            writer.write_folder("tokenizer", lambda folder: _save_tokenizer(data, folder, watch))
        if ranks.lead:
            writer.write_json("data.json", replace(data.record(), chat=samples.template is not None))
        writer.write_json("plan.json", expected)
        writer.write_json(
            "environment.json",
            record_environment(
                device, threads, ranks.world, describe_exactness(device.kind, recipe.hardware.deterministic)
            ),
        )
        writer.write_text("recipe.yaml", recipes.dump(anchor_paths(recipe)))  # last: a folder with a recipe is a run
        step = session.progress.step
        writer.write_event(Resumed(step=step) if resume else Started(step=step))
        # Writing the tokenizer takes several times its size, which would stay resident beside every step.
        release_small(device.kind)
    except BaseException:
        # A new run leaves no folder without a recipe behind, so that the same command can simply be repeated.
        writer.close() if resume else writer.remove_unstarted()
        raise
    return session


def _save_tokenizer(data: PreparedData, folder: Path, watch: Watch) -> None:
    from preheat.data.tokenizer import save_tokenizer

    if line := save_tokenizer(data.tokenizer, folder, data.stops):
        watch.notice(f"tokenizer: {line}")


@dataclass
class _Ready:
    """The preparation of rank 0, before the others join it."""

    data: PreparedData
    probes: RunEvaluator
    samples: Samples
    resolved: Recipe
    request: Request
    expected: Plan
    scan: Looked | None
    events: list[Event]
    price: Price | None
    left_out: tuple[Range, ...]


def read_data(
    recipe: Recipe,
    source_config: PretrainedConfig | None,
    watch: Watch,
    *,
    device: Device | None = None,
    world: int | None = None,
) -> tuple[PreparedData, RunEvaluator, Samples]:
    """Reads the data and prepares the evaluations and samples of the run, if its model can be trained there.

    Args:
        source_config: what `configs.source_config` gave for the recipe's model.
        device: the device that the recipe is for: before the data is read, which may take minutes, its folder is
            compared with its model, and its techniques are tried on the model without values. None: they are not.
        world: as in `data_of`.
    """
    from preheat.data.rows.example_kinds import require_examples

    if device is not None:
        require_model(recipe, source_config)
    data = data_of(recipe, source_config, device=device, world=world, progress=watch.progress)
    if data.layout.kind != "text":
        watch.notice(f"layout: {data.layout.description}")
    for line in data.warnings:
        watch.notice(line)
    # Of a stream it is not known beforehand.
    if (text := data.counts.get("train", {}).get("efficiency", 1.0)) < _MOSTLY_TEXT:
        watch.notice(
            f"padding: {1 - text:.0%} of the positions hold none of the data, and tokens/s and MFU count them; lower "
            "batch.seq_len if few examples need it"
        )
    model = hf.read_facts(hf.configure(recipe, count_embedding_rows(data.tokenizer), source_config))
    require_examples(recipe, data, encoder=model.encoder)
    if recipe.sample.rows and model.encoder:
        raise RecipeError("sample.rows: is for decoders; give an encoder-decoder its questions in sample.prompts")
    samples = Samples(
        recipe,
        data.tokenizer,
        template=load_chat_template(data.layout),
        positions=model.positions,
        validation=data.validation,
    )
    return data, RunEvaluator(recipe, data, watch.progress), samples


def _prepare(
    recipe: Recipe,
    out: Path,
    ranks: Ranks,
    device: Device,
    threads: int,
    rates: Rates | None,
    *,
    resume: bool,
    watch: Watch,
    force: bool,
    profile: int | None,
    price: Price | None,
    record: bool,
    remove: Sequence[Range],
) -> _Ready | Finished:
    # Cheap checks come first: a user should not wait for data and benchmarks to read about a wrong folder.
    if record:
        check_folder(out, resume=resume)
    tracking.check(recipe, out)
    criterion_of(recipe)  # raises if no evaluation gives the score
    looked: Looked | None = None
    events: list[Event] = []
    run = Reader(out) if resume else None
    price = _choose_price(price, run)
    changed = run is not None and compare(recipe, run.recipe_text)
    if run is not None:
        looked = checkpoint.find(out / "checkpoints", run=run.id)
        # Without epochs the number of steps is known before the data is read, so a finished run answers at once.
        if not recipe.stop.epochs and (
            summary := read_finished_summary(run, looked, recipe, count_steps(recipe, None))
        ):
            return Finished(summary)
    left_out = tuple(event.rows for event in run.events() if isinstance(event, Rewound | RemovedRows)) if run else ()
    # A restarted process has its command's ranges on record already.
    remove = [part for part in dict.fromkeys(remove) if part not in left_out]
    if remove:
        _require_untrained(remove, None if looked is None else looked[0])
    if changed:
        watch.notice(
            "other settings of techniques that spare memory: losses will agree up to rounding, not bit for bit"
        )
    # Weights that are missing are reported before the data is read.
    presets.require_weights(recipe)
    watch.stage("reading data")
    source_config = configs.source_config(recipe)
    data, probes, samples = read_data(recipe, source_config, watch, device=device, world=ranks.world)
    if data.account.left_out:
        watch.notice(data.text())
    # Again for epochs, whose steps depend on the number of rows.
    total = count_steps(recipe, count_rows(data))
    if run is not None and looked is not None and (summary := read_finished_summary(run, looked, recipe, total)):
        return Finished(summary)
    if profile is not None and total is not None:
        before = checkpoint.read_progress(looked[0]).step if looked is not None and looked[0] is not None else 0
        _require_steps(profile, total - before)
    # A library may swallow the exception of a signal: ask between the long stages.
    check()
    request = Request(
        add_image_counts(recipe, data, source_config),
        device=device,
        vocabulary=count_embedding_rows(data.tokenizer),
        world=ranks.world,
        rows=count_rows(data),
        in_use=read_bytes_in_use(device),
        source_config=source_config,
    )
    rates = rates or choose_run_rates(request, threads, _Measuring(watch))
    check()
    watch.stage("planning")
    request = resolve_auto(replace(request, rates=rates))
    if settled := find_settled(recipe, request.recipe):
        watch.notice("settings that were auto: " + ", ".join(f"{key}: {value}" for key, value in settled.items()))
    # The run stores the recipe as written: a dry run may choose other settings on the machine where it is resumed.
    resolved = request.recipe
    if run is not None and looked is not None:
        # Fallbacks of earlier out-of-memory errors are part of the plan of a resumed run.
        built, events = apply_fallbacks(request, out, looked[0], afresh=changed)
        request = replace(request, recipe=built)
        for line in run.find_damage():
            watch.notice(line)
    step = 0 if looked is None or looked[0] is None else checkpoint.parse_step(looked[0].name) or 0
    events = [*events, *(RemovedRows(step=step, rows=part) for part in remove)]
    expected = add_cost(plan(request), ranks.world, price)
    watch.planned(expected)
    if not expected.fits and not force:
        hint = (
            hint_fragmentation(expected)
            or "use smaller micro-batches or techniques that save memory (preheat techniques lists them)"
        )
        raise DoesNotFit(f"{describe_shortfall(expected)}; {hint}, or train all the same with --force")
    return _Ready(data, probes, samples, resolved, request, expected, looked, events, price, (*left_out, *remove))


def _require_untrained(remove: Sequence[Range], newest: Path | None) -> None:
    """Refuses to leave out samples that the run has trained on at the checkpoint that it resumes from."""
    if newest is None:
        return
    progress = checkpoint.read_progress(newest)
    for first, end in remove:
        if first < progress.samples:
            raise RunError(
                f"--skip-rows {first}..{end}: the run has read the rows up to {progress.samples} by step "
                f"{progress.step:,}, from which it resumes; begin at {progress.samples}, or go back with --checkpoint"
            )


def _choose_price(price: Price | None, run: Reader | None) -> Price | None:
    """Returns the price of a session: the given one, else that of the run's last session.

    Raises:
        RecipeError: it has another currency than the run's earlier sessions.
    """
    usage = run.usage() if run is not None else None
    if usage is None or usage.currency is None or usage.price_per_hour is None:
        return price
    if price is not None and price.currency != usage.currency:
        raise RecipeError(
            f"--price {price.per_hour:g}{price.currency}/h: the earlier sessions of the run are priced in "
            f"{usage.currency}; give the price in {usage.currency}"
        )
    return price or Price(usage.price_per_hour, usage.currency)


def _require_steps(profile: int, left: int) -> None:
    if left < WARM_UP + profile:
        raise RecipeError(
            f"--profile {profile}: takes {WARM_UP + profile:,} steps, {WARM_UP} of them to warm up, and the run has "
            f"{left:,}; profile fewer, or let it end later with --set stop.max_steps=..., stop.tokens or stop.epochs"
        )


class _Measuring:
    """Progress callback that announces the stage at its first call, i.e. only if the machine is benchmarked."""

    def __init__(self, watch: Watch):
        self.watch, self.begun = watch, False

    def __call__(self, what: str, done: float) -> None:
        # Cached rates are read without a call, and then no stage is announced.
        if not self.begun:
            self.watch.stage("measuring this machine (once)")
            self.begun = True
        self.watch.progress(what, done, 1.0)


def _choose_order(
    current: Build, rows: Rows | StreamRows, committed: int, shape: Callable[[int], Shape], total: int | None
) -> Iterator[int]:
    """Returns the row order of the build's slot.

    Called before the folder becomes a run, because the scores that some orders read may be invalid.
    """
    from preheat.data.loader import count_consumed_rows

    def iterate_samples(step: int) -> int:
        return count_consumed_rows(shape(step), current.recipe.batch.seq_len)

    all_samples = None
    if total is not None:  # with a constant shape, one multiplication replaces the sum over all steps
        all_samples = (
            iterate_samples(0) * total
            if iterate_samples(0) == iterate_samples(total)
            else sum(map(iterate_samples, range(total)))
        )
    # Orders that depend on the whole run (a curriculum, for example) need the number of all its samples.
    return current.slot(Slot.SAMPLE_ORDER)(rows, current.recipe.seed, committed, all_samples)


def reset_memory_baseline(device: Device) -> int:
    """Prepares the process for a run: frees memory, limits a GPU to `hardware.memory`, resets the peak counter.

    Excludes all objects that exist now from garbage collection until the next run: torch and transformers create
    400,000, and scanning them adds 0.3 s to a step.

    Returns:
        Bytes not available to the run: those of this process before the build (CPU) or of other processes (GPU).
    """
    if device.kind == "cpu":
        install_heap()
    _free_earlier_run(device)
    gc.freeze()
    # At the end of the process extensions report what is not collected as leaks.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
    if device.kind == "cuda":
        limit_memory(device)
        reset_peak("cuda")
        return read_bytes_in_use(device)
    reset_peak()
    return resident_bytes()


def _free_earlier_run(device: Device) -> None:
    """Frees the memory of an earlier run in this process; else it would be in the baseline, and be reused uncounted."""
    gc.unfreeze()  # so that the garbage of the earlier run is collected
    gc.collect()
    release_unused(device.kind)
