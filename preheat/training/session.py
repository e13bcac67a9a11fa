"""From a recipe to a run that is ready to step: data, plan, folder, build, and where an earlier session stopped."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import recipe as recipes
from preheat import remote_code
from preheat.core import DATA, Batch, Build, Device, Shape, Slot
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saving
from preheat.engine.builder import build, peak_learning_rate
from preheat.engine.device import resolve_device
from preheat.errors import DoesNotFit, RecipeError
from preheat.evaluation.run_evaluator import RunEvaluator
from preheat.hardware.cpu_allocator import install_heap, release_unused
from preheat.hardware.deterministic import repeats
from preheat.hardware.gpu_memory import limit_memory, taken_bytes
from preheat.hardware.interrupts import check
from preheat.hardware.oom import held_bytes
from preheat.hardware.probe import reset_peak, resident_bytes
from preheat.inference.text_generation import chat_template
from preheat.models import configs, hf, presets
from preheat.models.vision import reading
from preheat.planning.fallback_ladder import PlanContext
from preheat.planning.plan import plan, settled, steps_of
from preheat.planning.search.result import falls_short, fragmentation_hint
from preheat.recipe import Recipe
from preheat.recipe.paths import anchored
from preheat.run_dir import Reader, Silent, Writer, check_folder
from preheat.training.image_counts import with_images
from preheat.training.observer import Watch
from preheat.training.process_group import Ranks, meet
from preheat.training.provenance import digest, environment, versions
from preheat.training.recovery.fallback_log import apply_fallbacks
from preheat.training.resume import Looked, compare, fingerprints, resumed, summary_of_finished
from preheat.training.sample_generation import Samples

if TYPE_CHECKING:
    from preheat.data import PreparedData

__all__ = [
    "Finished",
    "Session",
    "data_of",
    "in_use",
    "open_session",
    "plan_here",
    "read_data",
    "rows_of",
    "reset_memory_baseline",
    "vocabulary_of",
]


@dataclass(frozen=True)
class Finished:
    """A run that was to be resumed and has no step left to take. Nothing was written."""

    summary: dict[str, Any]
    """As `train` returns it."""


@dataclass
class Session:
    """A run that is ready to step, once it is `assemble`d."""

    recipe: Recipe
    """As it was written."""
    settled: Recipe
    """With values for what its techniques leave to a dry run."""
    effective: Recipe
    """And with the rungs that were taken: what is built."""
    device: Device
    threads: int
    data: Any
    """preheat.data.PreparedData."""
    probes: RunEvaluator
    """What is measured beside the steps."""
    samples: Samples
    writer: Writer
    watch: Watch
    ranks: Ranks
    """Which process of the run this is."""
    plan: dict[str, Any]
    planner: PlanContext | None
    """Plans other recipes for this run; in the first process."""
    looked: Looked | None
    """The checkpoint to go on from, where there is one; in the first process."""
    imports: int
    """Bytes that the process held before the build."""
    claimed: int
    """Bytes that it had claimed by then, touched or not."""
    build: Build = field(init=False)
    saving: Saving = field(init=False)
    progress: checkpoint.Progress = field(init=False)
    shape: Callable[[int], Shape] = field(init=False)
    """What a step, counted from 0, reads: a pure function, so that any session reads the same."""
    order: Iterator[int] = field(init=False)
    """Rows of the data, by number, from where the run stands."""
    peak_lr: float = field(init=False)
    assembled: bool = False
    """Whether there is a build."""

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run; None: until the clock says so."""
        return steps_of(self.recipe, _length(self.data))

    def assemble(self, *, resume: bool) -> None:
        """Builds the effective recipe, and puts the checkpoint into it that the run goes on from.

        Raises:
            RecipeError, RunError: it cannot be built; the checkpoint is not of this run.
        """
        import torch

        self.watch.stage("building")
        check()
        made = build(self.effective, vocabulary=len(self.data.tokenizer), device=self.device)
        # Dropout: other masks for other rows, the same in each run.
        torch.manual_seed(self.recipe.seed * 65537 + made.mesh.index(*DATA))
        for change in made.changes.get("dropout", ()):
            self.watch.notice(change.what)
        progress = checkpoint.Progress(
            recipe=recipes.dump(self.effective), fingerprints=fingerprints(made, self.data), run=self.writer.id
        )
        folder = self.writer.path
        if resume:
            progress = resumed(made, folder, progress, self.looked, self.writer, self.watch, self.threads)
        self.build, self.progress, self.assembled = made, progress, True
        self.peak_lr = peak_learning_rate(made)
        self.saving = Saving(made, folder / "checkpoints", at=progress.step or -1)
        check()
        self.writer.json("changes.json", {name: [asdict(c) for c in changes] for name, changes in made.changes.items()})
        self.read()

    def read(self) -> None:
        """Rows come from where the run stands."""
        made, total = self.build, self.total
        self.shape = lambda step: made.slot(Slot.BATCH_SHAPE)(step / total if total else 0.0)
        self.order = _order(self.build, self.data.train, self.progress.samples, self.shape, self.total)
        if self.build.hooks.dataset_passes:
            from preheat.data.loader import rows_consumed

            steps = range(self.progress.step, self.total or 0)
            left = sum(rows_consumed(self.shape(step), self.recipe.batch.length) for step in steps)
            order = _order(self.build, self.data.train, self.progress.samples, self.shape, self.total)
            ahead = (
                itertools.islice(order, left) if self.total else range(_length(self.data) or 0)
            )  # all, where only the clock ends it
            self.build.run_dataset_passes(self.data.train, ahead, self.watch.progress)

    def rows(self) -> Generator[list[Batch], None, None]:
        """Global batches from where the run stands, without end; to be closed."""
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
            share=(mesh.index(*DATA), mesh.size(*DATA)),
        )

    def let_go(self) -> None:
        """Lets go of the build and its memory; what it stands at stays known."""
        del self.build, self.saving, self.shape, self.order
        self.assembled = False
        gc.collect()
        release_unused(self.device.kind)


def rows_of(recipe: Recipe) -> int | None:
    """Training rows, where `stop.epochs` makes them matter: then the data is read (and cached); a preset alone has no tokenizer to read by."""
    if not recipe.stop.epochs or presets.only_planned(recipe):
        return None
    return _length(data_of(recipe))


def data_of(recipe: Recipe, **how: Any) -> PreparedData:
    """The data of a recipe, read with its model's tokenizer and checked against its model's embedding; `how` is `prepare`'s progress and refuse."""
    from preheat.data import prepare

    config = hf.configure(recipe, vocabulary_of(recipe))  # a model that cannot be had is told before the data is read
    return prepare(
        recipe.data,
        length=recipe.batch.length,
        seed=recipe.seed,
        tokenizer=configs.tokenizer_folder(recipe),
        add_tokens=recipe.model.add_tokens,
        embedding=hf.facts(config).vocabulary,
        **reading(config, recipe.model.path),
        **how,
    )


def vocabulary_of(recipe: Recipe) -> int:
    """Pieces of the tokenizer without reading the data: for a plan.

    A tokenizer that is still to be trained will have `data.vocabulary` pieces (fewer only where the text is tiny).
    """
    folder = recipe.data.tokenizer or configs.tokenizer_folder(recipe)
    if folder is None:
        return recipe.data.vocabulary
    from preheat.data.tokenizer import load_tokenizer

    if recipe.data.tokenizer is None:
        hf.configure(recipe)  # a model that is not there is told as that, not as a tokenizer that is missing
    if recipe.model.add_tokens:
        # A token that the tokenizer had may be named only where the embedding ends before it: a trained row is not to be lost.
        rows = hf.configure(replace(recipe, model=replace(recipe.model, add_tokens=()))).get_text_config().vocab_size
        known = load_tokenizer(folder).get_vocab()
        if there := [token for token in recipe.model.add_tokens if known.get(token, rows) < rows]:
            raise RecipeError(
                f"model.add_tokens: the tokenizer has {there[0]!r} already and the model a row for it; leave it out"
            )
    return len(load_tokenizer(folder, add_tokens=recipe.model.add_tokens))


def plan_here(recipe: Recipe, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The plan of a recipe on this machine (measured first, where it was not yet); keys as in `preheat.run_dir.PLAN_KEYS`, and `recipe`.

    Args:
        trust_remote_code: as of `train`.
    """
    with remote_code.trusting(trust_remote_code):
        return _plan_here(recipe)


def _plan_here(recipe: Recipe) -> dict[str, Any]:
    from preheat.hardware.benchmark_rates import rates

    device, threads = resolve_device(recipe)
    how: dict[str, Any] = {
        "vocabulary": vocabulary_of(recipe),
        "device": device,
        "rates": rates(device, threads),
        "in_use": in_use(device),
    }
    rows = rows_of(recipe)
    recipe = settled(recipe, rows=rows, **how)
    return plan(recipe, rows=rows, **how) | {"recipe": recipes.as_values(recipe)}


def open_session(recipe: Recipe, out: Path, *, resume: bool, watch: Watch, force: bool = False) -> Session | Finished:
    """Prepares data, plans, opens the folder and builds.

    Args:
        force: train even where the plan says that it does not fit.

    Returns:
        `Finished` if the run was to be resumed and has ended already.

    Raises:
        RecipeError, DataError, DoesNotFit, RunError: before anything is written, but for a folder that cannot be.
    """
    ranks = meet(recipe)
    device, threads = resolve_device(recipe, ranks.on_host)
    ready: _Ready | None = None
    if ranks.lead:
        prepared = _prepare(recipe, out, ranks, device, threads, resume=resume, watch=watch, force=force)
        if isinstance(prepared, Finished):
            ranks.tell("prepared", {"finished": prepared.summary})
            ranks.gather("read")  # the store may end with this process
            return prepared
        ready = prepared
        built, expected = ready.effective, ready.expected
        ranks.tell("prepared", {"recipe": recipes.dump(built), "plan": expected})
        data, probes, samples = ready.data, ready.probes, ready.samples
    else:
        heard = ranks.hear("prepared")
        if "finished" in heard:
            ranks.gather("read")
            return Finished(heard["finished"])
        built, expected = recipes.parse(heard["recipe"], where="the recipe of rank 0"), heard["plan"]
        data, probes, samples = read_data(recipe, watch)
    ranks.agree({"recipe": digest(recipes.dump(recipe)), "data": data.fingerprint, **versions()})
    import torch.distributed.checkpoint  # noqa: F401  # so that the imports' memory is known before the build

    ranks.join(recipe, device.kind)
    writer = Writer(out, resume=resume) if ranks.lead else Silent(out)
    try:
        imports, claimed = reset_memory_baseline(device), held_bytes(device.kind)
        session = Session(
            recipe=recipe,
            settled=ready.settled if ready else built,
            effective=built,
            device=device,
            threads=threads,
            data=data,
            probes=probes,
            samples=samples,
            writer=writer,
            watch=watch,
            ranks=ranks,
            plan=expected,
            planner=ready.planner if ready else None,
            looked=ready.looked if ready else None,
            imports=imports,
            claimed=claimed,
        )
        if device.kind == "cpu" and (why := install_heap()):
            watch.notice(
                f"{why}; torch's own allocator is used, and the run takes more memory than planned, often a third"
            )
        if device.notice:
            watch.notice(device.notice)
        for event in ready.events if ready else ():
            writer.event(**event)
        session.assemble(resume=resume)
        if ranks.lead and not resume:
            writer.folder("tokenizer", lambda folder: _save_tokenizer(data.tokenizer, folder, watch))
        if ranks.lead:
            writer.json("data.json", data.record() | {"chat": samples.template is not None})
        writer.json("plan.json", expected)
        writer.json(
            "environment.json",
            environment(device, threads)
            | {"processes": ranks.world, "repeats": repeats(device.kind, recipe.hardware.deterministic)},
        )
        writer.text("recipe.yaml", recipes.dump(anchored(recipe)))  # last: a folder with a recipe is a run
        writer.event("resumed" if resume else "started", step=session.progress.step)
    except BaseException:
        writer.close() if resume else writer.take_back()
        raise
    return session


def _save_tokenizer(tokenizer: Any, folder: Path, watch: Watch) -> None:
    from preheat.data.tokenizer import save_tokenizer

    if line := save_tokenizer(tokenizer, folder):
        watch.notice(f"tokenizer: {line}")


@dataclass
class _Ready:
    """What the first process found out before the others join it."""

    data: Any
    probes: RunEvaluator
    samples: Samples
    settled: Recipe
    effective: Recipe
    expected: dict[str, Any]
    planner: PlanContext
    looked: Looked | None
    events: list[dict[str, Any]]


def read_data(recipe: Recipe, watch: Watch) -> tuple[Any, RunEvaluator, Samples]:
    """The data, and what is measured and written beside the steps."""
    from preheat.data.rows.example_kinds import require_examples

    data = data_of(recipe, progress=watch.progress)
    if data.layout.kind != "text":
        watch.notice(f"layout: {data.layout.words}")
    for line in data.told:
        watch.notice(line)
    model = hf.facts(hf.configure(recipe, len(data.tokenizer)))
    require_examples(recipe, data, encoder=model.encoder)
    if recipe.sample.rows and model.encoder:
        raise RecipeError("sample.rows: is for decoders; name what an encoder-decoder is asked with sample.prompts")
    samples = Samples(
        recipe,
        data.tokenizer,
        template=chat_template(data.layout),
        positions=model.positions,
        validation=data.validation,
    )
    return data, RunEvaluator(recipe, data, watch.progress), samples


def _length(data: Any) -> int | None:
    """Training rows, where they are counted."""
    return len(data.train) if hasattr(data.train, "__len__") else None


def _prepare(
    recipe: Recipe, out: Path, ranks: Ranks, device: Device, threads: int, *, resume: bool, watch: Watch, force: bool
) -> _Ready | Finished:
    from preheat.hardware.benchmark_rates import rates

    check_folder(out, resume=resume)
    looked: Looked | None = None
    events: list[dict[str, Any]] = []
    run = Reader(out) if resume else None
    other = run is not None and compare(recipe, run.recipe_text)
    if run is not None:
        looked = checkpoint.find(out / "checkpoints", run=run.id)
        if not recipe.stop.epochs and (summary := summary_of_finished(run, looked, recipe, steps_of(recipe, None))):
            return Finished(summary)
    if other:
        watch.notice(
            "other settings of techniques that spare memory: losses will agree up to rounding, not bit for bit"
        )
    presets.require_weights(recipe)
    watch.stage("reading data")
    data, probes, samples = read_data(recipe, watch)
    total = steps_of(recipe, _length(data))
    if run is not None and looked is not None and (summary := summary_of_finished(run, looked, recipe, total)):
        return Finished(summary)
    check()
    measured = rates(device, threads, progress=_Measuring(watch))
    check()
    watch.stage("planning")
    how: dict[str, Any] = {
        "vocabulary": len(data.tokenizer),
        "device": device,
        "rates": measured,
        "in_use": in_use(device),
    }
    # The run keeps the recipe as it was written: what a dry run chooses may differ where the run is resumed.
    chosen = built = settled(with_images(recipe, data), rows=_length(data), world=ranks.world, **how)
    planner = PlanContext(rows=_length(data), world=ranks.world, **how)
    if run is not None and looked is not None:
        built, events = apply_fallbacks(chosen, out, looked[0], planner, afresh=other)
        for line in run.all_damaged():
            watch.notice(line)
    expected = planner.plan(built)
    watch.planned(expected)
    if not expected["fits"] and not force:
        raise DoesNotFit(
            f"{falls_short(expected)}; "
            f"{fragmentation_hint(expected) or 'use smaller micro-batches or techniques that save memory (preheat techniques lists them)'}, or train all the same with --force"
        )
    return _Ready(data, probes, samples, chosen, built, expected, planner, looked, events)


class _Measuring:
    """A stage of its own, if this machine is measured: told when the first progress comes."""

    def __init__(self, watch: Watch):
        self.watch, self.begun = watch, False

    def __call__(self, what: str, done: float) -> None:
        if not self.begun:
            self.watch.stage("measuring this machine (once)")
            self.begun = True
        self.watch.progress(what, done, 1.0)


def _order(made: Build, rows: Any, committed: int, shape: Callable[[int], Shape], total: int | None) -> Iterator[int]:
    """The order of rows by the build's slot; made here, before the folder is a run, since scores may be wrong."""
    from preheat.data.loader import rows_consumed

    def samples(step: int) -> int:
        return rows_consumed(shape(step), made.recipe.batch.length)

    whole = None
    if total is not None:  # steps take as many samples each, but where the shape changes them: then they are added up
        whole = samples(0) * total if samples(0) == samples(total) else sum(map(samples, range(total)))
    return made.slot(Slot.SAMPLE_ORDER)(rows, made.recipe.seed, committed, whole)


def in_use(device: Device) -> int:
    """Bytes of a device that are taken before a run: on a CPU by this process, on a GPU by others."""
    return resident_bytes() if device.kind == "cpu" else taken_bytes(device)


def reset_memory_baseline(device: Device) -> int:
    """Readies the process for a run: memory settled and on a GPU limited to `hardware.memory`, the high-water mark begun anew.

    Returns:
        Bytes that the run cannot have: on a CPU what the process holds before the build, on a GPU what others hold.
    """
    gc.collect()
    if device.kind == "cuda":
        limit_memory(device)
        reset_peak("cuda")
        return in_use(device)
    install_heap()
    reset_peak()
    return resident_bytes()
