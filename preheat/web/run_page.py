"""The page of one run, live: its state and judgement, curves, memory, events, ranks and texts, and its buttons.

What changes with each step comes from the index of runs. The sections of the report that read whole files are rendered
once, and again when one of these files changes.
"""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.routing import Route

from preheat.core.run_records import Fallback, Measured
from preheat.core.step_profile import StepProfile
from preheat.errors import RunError
from preheat.files import parse_json, read_bytes, read_record
from preheat.report import page, run_page
from preheat.report.formatting import format_sizes, read_number
from preheat.report.report_data import collect
from preheat.report.run_charts import CATEGORY_COLOURS
from preheat.run.layout import PROFILE
from preheat.run.reader import Reader
from preheat.web.index import list_keys, read_marks, summarize
from preheat.web.judgement import Evidence, Judgement, judge
from preheat.web.labels import add_labels
from preheat.web.limits import LARGEST_FILE
from preheat.web.settings import state_of
from preheat.web.start_page import create_empty_folder
from preheat.web.stop import explain_unreachable, send_request
from preheat.web.templating import render

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from preheat.core.plan import Plan
    from preheat.core.run_records import ProcessStatus
    from preheat.report.report_data import RunFigures
    from preheat.web.catalogue import RunEntry
    from preheat.web.index import Mark, RunSummary
    from preheat.web.jobs import Training
    from preheat.web.settings import State

__all__ = ["routes"]

_MOST_EVENTS = 200
"""Events in the list; charts mark them all."""
_SILENT_S = 20.0
"""Seconds without a status after which a rank counts as silent; it publishes one every 5 s."""
_COMMANDS = ("preheat", "__main__.py")
"""First words of the command of a run that `preheat train` resumes."""
_MOST_KEPT = 16
"""Runs whose rendered sections and records stay in memory."""
_SAMPLES = 6
"""Newest samples of the machine that are judged: those of a minute."""
_CURVES = {
    "loss": "Training loss",
    "validation_loss": "Validation loss",
    "tokens_per_second": "Tokens per second",
    "gradient_norm": "Gradient norm, before clipping",
    "lr": "Learning rate",
    "memory": "Memory after each step",
}
"""Keys of the curves that the page shows at first -> title."""
_FILES = (
    "events.jsonl",
    "evaluation.json",
    "plan.json",
    "changes.json",
    "environment.json",
    "recipe.yaml",
    "data.json",
)
"""Files from which the sections of `_Details` are rendered."""


def routes() -> list[Route]:
    return [
        Route("/runs/{id}", _show),
        Route("/runs/{id}/live", _show_live),
        Route("/runs/{id}/timeline", _show_timeline),
        Route("/runs/{id}/details", _show_details),
        Route("/runs/{id}/stop", _stop, methods=["POST"]),
        Route("/runs/{id}/save", _save, methods=["POST"]),
        Route("/runs/{id}/resume", _resume, methods=["POST"]),
    ]


@dataclass(frozen=True)
class _Rank:
    """A row of the table of ranks."""

    rank: int
    step: int
    phase: str
    seconds: float
    line: str
    is_silent: bool


@dataclass(frozen=True)
class _Live:
    """The part of the page that changes with each step.

    Attributes:
        unreachable: the reason why the run cannot be stopped from here; None: it can.
        resume_arguments: those of preheat that resume it; none while it runs, once it has finished, and for the run of
            another program's loop.
        resume_command: the same as a shell command.
        obstacle: the reason why the dashboard cannot resume it; None: it can.
    """

    run: RunSummary
    judgement: Judgement
    ranks: Sequence[_Rank]
    unreachable: str | None
    resume_arguments: Sequence[str]
    resume_command: str
    obstacle: str | None
    share: float | None


@dataclass(frozen=True)
class _EventRow:
    """Events of one kind in a row of the list."""

    time: float | None
    kind: str
    step: int | None
    text: str
    is_bad: bool


@dataclass(frozen=True)
class _Section:
    name: str
    title: str
    content: Markup


@dataclass(frozen=True)
class _Details:
    """The sections that follow from whole files, and the sizes and times of these files."""

    signature: tuple[tuple[int, int], ...]
    setup: Markup
    sections: Sequence[_Section]
    damaged: Sequence[str]


_details: dict[Path, _Details] = {}
_evidence: dict[Path, tuple[tuple[tuple[int, int], ...], Evidence]] = {}
_Value = TypeVar("_Value")


async def _show(request: Request) -> Response:
    entry = await _find(request)
    jobs = state_of(request).jobs
    live, keys, trainings = await run_in_threadpool(
        lambda: (_read_live(entry), list_keys(entry), jobs.list_trainings_of(entry.path))
    )
    curves = [(key, title) for key, title in _CURVES.items() if key in keys or key == "loss"]
    more = [key for key in keys if key not in _CURVES]
    return render(
        request,
        "run.html",
        entry=entry,
        curves=curves,
        more=more,
        training=trainings[-1] if trainings else None,
        unfinished=next((training for training in trainings if training.is_unfinished), None),
        **vars(live),
    )


async def _show_live(request: Request) -> Response:
    entry = await _find(request)
    jobs = state_of(request).jobs
    live, unfinished = await run_in_threadpool(lambda: (_read_live(entry), jobs.find_unfinished(entry.path)))
    return render(request, "_run_live.html", entry=entry, unfinished=unfinished, **vars(live))


async def _show_timeline(request: Request) -> Response:
    entry = await _find(request)
    rows = await run_in_threadpool(lambda: _group_marks(read_marks(entry)))
    left_out = max(0, len(rows) - _MOST_EVENTS)
    begin = next((row.time for row in rows if row.time is not None), None)
    shown = rows[-_MOST_EVENTS:][::-1]
    return render(request, "_run_timeline.html", entry=entry, rows=shown, begin=begin, left_out=left_out)


async def _show_details(request: Request) -> Response:
    entry = await _find(request)
    details = await run_in_threadpool(_read_details, entry)
    return render(request, "_run_details.html", details=details)


async def _stop(request: Request) -> Response:
    return await _request(request, "stop")


async def _save(request: Request) -> Response:
    return await _request(request, "save")


async def _resume(request: Request) -> Response:
    entry = await _find(request)
    try:
        training = await run_in_threadpool(_queue_resume, state_of(request), entry)
    except RunError as error:
        return render(request, "_run_message.html", message=str(error), is_bad=True)
    message = f"It goes on in this folder as soon as no other training runs; its output is in {training.log.name}."
    return render(request, "_run_message.html", message=message, is_bad=False)


def _queue_resume(state: State, entry: RunEntry) -> Training:
    """Queues the training that resumes a run.

    Raises:
        RunError: it has an obstacle, waits or trains already, or the queue cannot be stored.
    """
    live = _read_live(entry)
    if live.obstacle is not None:
        raise RunError(live.obstacle)
    if state.jobs.find_unfinished(entry.path) is not None:  # of another server, too
        raise RunError("This run waits or trains already.")
    logs = (entry.path.with_name(f"{entry.path.name}-resumed-{n}.log") for n in itertools.count(1))
    return state.jobs.queue_training(
        live.run.name,
        live.resume_arguments,
        entry.path,
        cwd=create_empty_folder(),  # the paths of a run's recipe are absolute
        log=next(log for log in logs if not os.path.lexists(log)),
    )


async def _request(request: Request, what: str) -> Response:
    entry = await _find(request)
    if entry.url:  # its status names a process of another machine
        message = "The run is in object storage: stop it on the machine that trains it."
        return render(request, "_run_message.html", message=message, is_bad=True)
    try:
        message, is_bad = await run_in_threadpool(send_request, entry.path, "stop" if what == "stop" else "save"), False
    except RunError as error:
        message, is_bad = str(error), True
    return render(request, "_run_message.html", message=message, is_bad=is_bad)


async def _find(request: Request) -> RunEntry:
    return await run_in_threadpool(state_of(request).catalogue.find, request.path_params["id"])


def _read_live(entry: RunEntry) -> _Live:
    try:
        run = add_labels(summarize(entry))
        reader = Reader(entry.path, largest=LARGEST_FILE)
        status = reader.status()
        is_live = run.state == "running"
        judgement = judge(_collect_evidence(reader, run, is_live=is_live))
        unreachable = explain_unreachable(entry.path) if is_live else None
    except FileNotFoundError:  # deleted while it was read
        raise HTTPException(
            404, "This run does not exist any more: its folder was deleted, moved or renamed."
        ) from None
    share = min(1.0, run.step / run.steps) if run.step is not None and run.steps else None
    has_ended_early = run.state not in ("running", "finished", "elsewhere")
    arguments = _list_resume_arguments(reader, entry.url) if has_ended_early else ()
    return _Live(
        run,
        judgement,
        _list_ranks(status, time.time()),
        unreachable,
        arguments,
        shlex.join(("preheat", *arguments)),
        _find_obstacle(reader, entry, run.state, arguments),
        share,
    )


def _collect_evidence(reader: Reader, run: RunSummary, *, is_live: bool) -> Evidence:
    return replace(
        _read_evidence(reader),
        tokens_per_second=run.tokens_per_second,
        system=reader.newest_system()[-_SAMPLES:],
        is_live=is_live,
        has_steps_left=run.state != "finished",
    )


def _read_evidence(reader: Reader) -> Evidence:
    """Returns what the files of a run say that do not change with each step; they are read again when they change."""
    run = reader.path
    signature = tuple(_read_signature(run / name) for name in ("plan.json", "events.jsonl", f"{PROFILE}/profile.json"))
    known = _evidence.get(run)
    if known is not None and known[0] == signature:
        return known[1]
    events = reader.events()
    evidence = Evidence(
        plan=reader.plan,
        measured=next((event for event in reversed(events) if isinstance(event, Measured)), None),
        profile=_read_profile(run),
        fallbacks=[event for event in events if isinstance(event, Fallback) and event.changed],
    )
    _store(_evidence, run, (signature, evidence))
    return evidence


def _store(cache: dict[Path, _Value], run: Path, value: _Value) -> None:
    """Stores what was read of a run, and drops the oldest entry of a full cache."""
    cache.pop(run, None)
    cache[run] = value
    while len(cache) > _MOST_KEPT:
        cache.pop(next(iter(cache)), None)


def _read_profile(run: Path) -> StepProfile | None:
    """Returns the profile of a run; None without an intact one, which the report's page of it explains."""
    try:
        return read_record(StepProfile, parse_json(read_bytes(run / PROFILE / "profile.json", LARGEST_FILE)))
    except (ValueError, OSError):
        return None


def _list_ranks(status: ProcessStatus | None, now: float) -> list[_Rank]:
    if status is None:
        return []
    return [
        _Rank(
            state.rank,
            state.step,
            state.phase,
            max(0.0, state.time - state.since),
            state.line,
            is_silent=now - state.time > _SILENT_S,
        )
        for state in status.ranks
    ]


def _list_resume_arguments(reader: Reader, url: str) -> Sequence[str]:
    """Returns the arguments of preheat that resume a run with its own recipe; none for another program's loop."""
    environment = reader.environment
    argv = (environment.command or "").split()
    if argv and argv[0] not in _COMMANDS:
        return ()
    arguments = ["train", str(reader.path / "recipe.yaml"), "--out", str(reader.path), "--resume"]
    if url:  # its recipe is there
        arguments = ["train", "--resume", url]
    if (processes := environment.processes or 1) > 1:
        arguments += ["--nproc", str(processes)]
    if "--trust-remote-code" in argv:
        arguments.append("--trust-remote-code")
    plugins = [value for option, value in itertools.pairwise(argv) if option == "--plugin"]
    plugins += [argument.removeprefix("--plugin=") for argument in argv if argument.startswith("--plugin=")]
    return [*(f"--plugin={name}" for name in plugins), *arguments]


def _find_obstacle(reader: Reader, entry: RunEntry, state: str, arguments: Sequence[str]) -> str | None:
    """Returns the reason why the dashboard cannot resume a run; None: it can."""
    argv = (reader.environment.command or "").split()
    if not arguments:
        return f"The run is {state}, so there is nothing to resume here."
    if entry.url:
        return "The run is in object storage: resume it in a terminal, on a machine that reaches the storage."
    if any(argument.startswith(("--trust-remote-code", "--plugin=")) for argument in arguments):
        return "The run executes code that is not preheat's: resume it in a terminal, where you agree to that."
    if (reader.environment.processes or 1) > 1 and not any(part.startswith("--nproc") for part in argv):
        return "Another launcher started its processes: resume it with the same launcher."
    if (reader.path / "checkpoints").is_symlink():
        return "Its folder checkpoints is a link: resume it in a terminal."
    return None


def _group_marks(marks: Sequence[Mark]) -> list[_EventRow]:
    """Joins four and more checkpoints or skipped steps in a row: they would bury all other events."""
    groups: list[list[Mark]] = []
    for mark in marks:
        if groups and mark.kind in ("checkpoint", "overflow") and groups[-1][0].kind == mark.kind:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    rows = []
    for group in groups:
        if len(group) < 4:
            rows += [_EventRow(mark.time, mark.kind, mark.step, mark.text, mark.is_bad) for mark in group]
            continue
        first, last = group[0], group[-1]
        text = f"steps {first.step:,} to {last.step:,}" if first.step is not None and last.step is not None else ""
        rows.append(_EventRow(last.time, f"{last.kind} × {len(group):,}", last.step, text, last.is_bad))
    return rows


def _read_details(entry: RunEntry) -> _Details:
    run = entry.path
    signature = tuple(_read_signature(run / name) for name in _FILES)
    known = _details.get(run)
    if known is not None and known.signature == signature:
        return known
    figures = collect(run, with_curves=False, largest=LARGEST_FILE)
    if entry.url:
        command = ["preheat", "train", str(run / "recipe.yaml"), "--out", f"{entry.url}-again"]
        figures = replace(figures, again=shlex.join(command))
    plan = Reader(run, largest=LARGEST_FILE).plan
    parts = (
        ("memory", "Memory by phase", _render_memory(plan, figures) + run_page.render_fallbacks(figures.events)),
        ("evaluation", "Before and after" if figures.evaluation.before else "Evaluation", _render_evaluation(figures)),
        ("samples", "Samples", run_page.render_samples(figures.samples)),
        ("techniques", "Techniques", run_page.render_techniques(figures.changes)),
        ("environment", "Environment", run_page.render_environment(figures.environment)),
        ("recipe", "Recipe", run_page.render_recipe(figures)),
    )
    # The report escapes all texts of the run.
    sections = [_Section(name, title, Markup(content)) for name, title, content in parts if content]
    details = _Details(signature, Markup(run_page.render_setup(figures.setup)), sections, figures.damaged)
    _store(_details, run, details)
    return details


def _read_signature(file: Path) -> tuple[int, int]:
    try:
        facts = file.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def _render_evaluation(figures: RunFigures) -> str:
    # Without any result it is only a note that nothing was measured.
    return run_page.render_evaluation(figures) if figures.evaluation.after is not None else ""


def _render_memory(plan: Plan | None, figures: RunFigures) -> str:
    """Returns a table of the planned peak of each phase by category, as stacked bars, and the measured peak."""
    if plan is None:
        return ""
    measured = read_number(figures.measured.peak_gib)
    phases = plan.phase_memory or {}
    names = [name for name in CATEGORY_COLOURS if any(name in sizes for sizes in phases.values())]
    most = max([*plan.phases.values(), measured or 0.0]) or 1.0
    unit, texts = format_sizes([*map(read_number, plan.phases.values()), measured])
    rows = []
    for (phase, _), text in zip(plan.phases.items(), texts, strict=False):
        sizes = {name: read_number(phases.get(phase, {}).get(name)) or 0.0 for name in names}
        bars = "".join(
            f'<span style="width: {100 * size / most:.2f}%; background: var(--{CATEGORY_COLOURS[name]})"></span>'
            for name, size in sizes.items()
            if size > 0
        )
        rows.append(
            page.named_row(phase, page.number_cell(text), page.cell(f'<span class="stack">{bars}</span>', "track"))
        )
    if measured is not None:
        bar = f'<span style="width: {100 * measured / most:.2f}%; background: var(--ink)"></span>'
        stack = page.cell(f'<span class="stack">{bar}</span>', "track")
        rows.append(page.row(page.cell("measured peak"), page.number_cell(texts[-1]), stack, kind="sum"))
    legend = "".join(f"<li>{page.colour_key(CATEGORY_COLOURS[name])}{page.escape(name)}</li>" for name in names)
    return (
        page.small(f"Planned; the highest is {plan.peak_phase}.")
        + f'<ul class="keys">{legend}</ul>'
        + page.table(("phase", f"planned peak, {unit}", ""), rows, text=(0, 2))
        + run_page.render_gpu_memory(figures)
    )
