"""The page *Plan*: a form, the plan as a child process, its candidates as points, and what they lead to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from preheat.core.plan import Candidate, PlanFigures, Verdict
from preheat.core.units import format_memory
from preheat.errors import PreheatError, RecipeError
from preheat.files import parse_json, read_bytes, read_record, to_json
from preheat.sanitize import quote_value
from preheat.web.choices import load_choices
from preheat.web.forms import Choice, Field, clean_values, describe_key, fill, read_number, read_values
from preheat.web.job_routes import build_job_routes
from preheat.web.jobs import JobState, read_answer
from preheat.web.scatter import Point, Scatter, arrange
from preheat.web.settings import state_of
from preheat.web.templating import build_url, render

if TYPE_CHECKING:
    from starlette.requests import Request

    from preheat.web.choices import Choices
    from preheat.web.jobs import Job
    from preheat.web.settings import State

__all__ = [
    "build_data_field",
    "choose_recipe",
    "find_file",
    "read_page_body",
    "read_recipe",
    "routes",
]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(/[A-Za-z0-9][A-Za-z0-9._+-]*)?")
"""A preset, a size, a built-in recipe or a name on the hub; no path of this machine."""
_BUILT_IN_DATA = (
    Choice("stdlib", "Python's standard library"),
    Choice("docstrings", "docstrings and their functions"),
)
_THIS_MACHINE = "this"
_SCROLL = '<div class="scroll" tabindex="0">'
_RECIPE, _PAGE, _FIGURES = "recipe.yaml", "plan.html", "figures.json"
"""Files that a plan writes into its folder."""


def routes() -> list[Route]:
    return [
        Route("/plan", _show, methods=["GET"]),
        Route("/plan", _start, methods=["POST"]),
        *build_job_routes("/plan/jobs", _render_job),
        Route("/plan/jobs/{id}/candidates/{number}", _show_candidate),
        Route("/plan/jobs/{id}/recipe.yaml", _send_recipe),
    ]


def _list_model_fields(choices: Choices, state: State) -> list[Field]:
    """Returns the fields that choose a model or recipe: by name, and from the folders."""
    files = state.files
    local = {
        "Recipes": [Choice(file.id, file.name) for file in files.list_files("recipe")],
        "Models": [Choice(file.id, file.name) for file in files.list_files("model")],
    }
    sizes = [Choice(size, "a new Llama of this size") for size in ("1M", "15M", "60M", "350M", "1.1B", "7B")]
    groups = {"Sizes": sizes, "Recipes": choices.recipes, "Models": choices.models}
    return [
        Field(
            "model",
            "Model or recipe",
            "A public model by its name on the hub, a size such as 15M for a new model, or a built-in recipe. "
            + f"A size: {describe_key('model.size')}",
            "suggest",
            groups,
            placeholder="qwen2.5-0.5b",
        ),
        Field(
            "local",
            "... or from your folders",
            "Recipes and folders of models below the folders that this server shows; takes the place of the name.",
            "select",
            {name: group for name, group in local.items() if group},
            placeholder="none",
        ),
    ]


def build_data_field(state: State, more: str = "") -> Field:
    """Returns the field that chooses built-in data or a file below the folders; `more` is added to its help."""
    files = [Choice(file.id, file.name) for file in state.files.list_files("data")]
    choices: dict[str, Sequence[Choice]] = {"Built in": _BUILT_IN_DATA, **({"Your files": files} if files else {})}
    help = "Built in, or a file below the folders that this server shows."
    return Field("data", "Data", f"{help} {more}".strip(), "select", choices, placeholder="as in the recipe")


def find_file(state: State, data: str) -> str:
    """Returns `data.source` for a value of `build_data_field`."""
    if data in {choice.value for choice in _BUILT_IN_DATA}:
        return data
    return str(state.files.find(data, "data").path)


def choose_recipe(state: State, choices: Choices, value: str) -> tuple[str, Path | None]:
    """Returns the argument of a recipe or run, and its working folder; None: an empty one.

    Args:
        value: of a field: a built-in recipe's name, or the id of a file or run.
    """
    if value in {choice.value for choice in choices.recipes}:
        return value, None
    for entry in state.catalogue.list_runs():
        if entry.id == value:
            return str(entry.path / "recipe.yaml"), None
    # Relative paths of a recipe are meant from where the server was started.
    return str(state.files.find(value, "recipe").path), Path.cwd()


def _list_fields(choices: Choices, state: State) -> list[Field]:
    return [
        *_list_model_fields(choices, state),
        build_data_field(state, "A model without data or recipe trains on Python's standard library."),
        Field(
            "device",
            "Device",
            "The device to plan for. This machine is measured once: about a minute, and several on "
            "a slow or busy machine.",
            "select",
            {"": [Choice(_THIS_MACHINE, "this machine")], "Catalogue": choices.devices},
            value=_THIS_MACHINE,
        ),
        Field("count", "Devices", "How many of them train together.", "number", placeholder="1", minimum=1),
        Field(
            "method",
            "Method",
            "For a model: train all weights, an adapter, or an adapter on a 4-bit base. A recipe says it itself.",
            "select",
            {"Methods": [Choice("full", "full"), Choice("lora", "LoRA"), Choice("qlora", "QLoRA")]},
            placeholder="full, or as in the recipe",
        ),
        Field("length", "Length", describe_key("batch.seq_len"), "number", placeholder="2048", minimum=2),
        Field("batch", "Batch", describe_key("batch.size"), "number", placeholder="16", minimum=1),
        Field("steps", "Steps", describe_key("stop.max_steps"), "number", placeholder="one epoch", minimum=1),
        Field(
            "find",
            "Question",
            "A plan of these settings, the largest value with which it fits, or the same model in serving.",
            "select",
            {
                "": [
                    Choice("fastest", "fastest way to train it"),
                    Choice("length", "largest length that fits"),
                    Choice("batch", "largest batch that fits"),
                    Choice("serving", "serve it: what fits, and speed"),
                ]
            },
            value="fastest",
        ),
    ]


async def _show(request: Request) -> Response:
    state = state_of(request)
    choices = await run_in_threadpool(load_choices, state.jobs)
    fields = await run_in_threadpool(_list_fields, choices, state)
    values = _read_query(request, fields)
    return render(request, "plan.html", fields=fill(fields, values), asks=bool(values))


def _read_query(request: Request, fields: Sequence[Field]) -> dict[str, str]:
    """Returns the form's state from the URL; what no field has is left out."""
    names = {field.name for field in fields}
    return {name: value for name, value in clean_values(request.query_params.multi_items()).items() if name in names}


async def _start(request: Request) -> Response:
    state = state_of(request)
    form = await read_values(request)
    choices = await run_in_threadpool(load_choices, state.jobs)
    fields = await run_in_threadpool(_list_fields, choices, state)
    values = {field.name: form[field.name] for field in fields if form.get(field.name, field.value) != field.value}
    try:
        job = await run_in_threadpool(_plan, state, values, fields)
    except (PreheatError, HTTPException) as error:
        message = error.detail if isinstance(error, HTTPException) else str(error)
        response: Response = render(request, "_problem.html", message=message)
    else:
        response = await _render_job(request, job)
    response.headers["hx-push-url"] = build_url(request, "/plan", **values)
    return response


def _plan(state: State, values: Mapping[str, str], fields: Sequence[Field]) -> Job:
    """Starts the plan of a form, or returns that of the same form."""
    title = "Plan of " + values.get("model", "a file")
    with state.jobs.create_folder() as folder:
        arguments = _build_arguments(state, values, {field.name: field for field in fields}, folder)
        key = to_json(dict(values))
        return state.jobs.start(title, arguments, folder=folder, cwd=_choose_cwd(values, folder), key=key)


def _choose_cwd(values: Mapping[str, str], folder: Path) -> Path:
    """Returns the working folder of a command: the server's for a file, in which its relative paths are meant."""
    # A name of the hub must not lead to a folder of that name.
    return Path.cwd() if "local" in values else folder


def _find_model_argument(state: State, values: Mapping[str, str]) -> str:
    """Returns the argument that names the model or recipe of a form.

    Raises:
        RecipeError: none is named, or it is a path.
    """
    if (id := values.get("local")) is not None:
        for kind in ("recipe", "model"):
            for file in state.files.list_files(kind):
                if file.id == id:
                    return str(file.path)
        raise HTTPException(404, "The chosen recipe or model does not exist any more; choose another one.")
    name = values.get("model")
    if name is None:
        raise RecipeError("Model or recipe: is empty; name a model, a size such as 15M, or a recipe, such as demo")
    if not _MODEL_NAME.fullmatch(name):
        raise RecipeError(
            f"Model or recipe: {quote_value(name)}: must be a name such as qwen2.5-0.5b, Qwen/Qwen3-8B, 15M or demo; a "
            "folder is chosen in the field beside it"
        )
    return name


def _build_arguments(
    state: State, values: Mapping[str, str], fields: Mapping[str, Field], folder: Path
) -> Sequence[str]:
    """Returns the command of a form; each value is a part of one argument, so none of them can be an option."""
    what = _find_model_argument(state, values)
    arguments = ["plan", "--json"]
    device = values.get("device", _THIS_MACHINE)
    if device != _THIS_MACHINE:
        if device not in fields["device"].list_values():
            raise RecipeError(f"Device: {quote_value(device)}: is not in the catalogue; choose another one")
        arguments.append(f"--gpu={device}")
    count, length, batch, steps = (read_number(values, fields[n]) for n in ("count", "length", "batch", "steps"))
    find = values.get("find", "fastest")
    if find not in fields["find"].list_values():
        raise RecipeError(f"Question: {quote_value(find)}: is not in the list; choose another one")
    if count is not None:
        arguments.append(f"--count={count}")
    if length is not None and find != "length":
        arguments.append(f"--length={length}")
    if find == "serving":
        if batch is not None:
            arguments.append(f"--batch={batch}")
        return [*arguments, "--inference", "--", what]
    if batch is not None and find != "batch":
        arguments.append(f"--set=batch.size={batch}")
    if steps is not None:
        arguments.append(f"--set=stop.max_steps={steps}")
    if "data" in values:
        arguments.append(f"--set=data.source={to_json(find_file(state, values['data']))}")
    if "method" in values:
        arguments.append(f"--method={values['method']}")
    if find in ("length", "batch"):
        arguments.append(f"--solve={'batch.seq_len' if find == 'length' else 'batch.size'}")
    files = [f"--out={folder / _RECIPE}", f"--html={folder / _PAGE}", f"--figures={folder / _FIGURES}"]
    return [*arguments, *files, "--", what]


async def _render_job(request: Request, job: Job) -> Response:
    if job.is_running:
        return render(request, "_job.html", job=job, place=f"/plan/jobs/{job.id}")
    # Exit code 3 is an answer as well: it does not fit, and the page says what would.
    if job.state is JobState.DONE or job.exit_code == 3:
        answer = await run_in_threadpool(read_answer, job)
        if isinstance(answer, dict) and "formats" in answer:
            return render(request, "_serving.html", serving=answer)
        if isinstance(answer, dict) and "verdict" in answer:
            shown = await run_in_threadpool(_read_shown, job)
            return render(request, "_plan.html", job=job, plan=answer, shown=shown)
    if job.state is JobState.CANCELLED:
        return render(request, "_problem.html", message="The plan was cancelled.")
    return render(request, "_problem.html", message=job.problem or "the command printed no plan")


@dataclass(frozen=True)
class _ShownPlan:
    """The page of a plan, before and after the place of its candidates as points."""

    head: Markup
    body: Markup
    scatter: Scatter | None


def _read_shown(job: Job) -> _ShownPlan:
    page = read_page_body(job.folder / _PAGE)
    # The command below the verdict names files of ours, which are deleted with the server.
    page = Markup(re.sub(r'<div class="again small">.*?</div>', "", page))
    head, section, rest = page.partition('<section id="memory"')
    body = section + rest
    figures = _read_figures(job)
    if figures is None:
        return _ShownPlan(head, body, None)
    candidates = _list_candidates(figures)
    points = [
        Point(
            n,
            candidate.peak_gib,
            candidate.tokens_per_second,
            candidate.what,
            "best" if candidate.best else "guess" if candidate.verdict is None else "tried",
        )
        for n, candidate in enumerate(candidates)
    ]
    answer = read_answer(job)
    assert isinstance(answer, dict)
    return _ShownPlan(head, body, arrange(points, answer["available_gib"]) if len(points) > 1 else None)


def _list_candidates(figures: PlanFigures) -> list[Candidate]:
    """Returns the dry-run candidates, then the estimated ones that no dry run looked at."""
    known = {candidate.what for candidate in figures.tried}
    return [*figures.tried, *(candidate for candidate in figures.guesses if candidate.what not in known)]


def _read_figures(job: Job) -> PlanFigures | None:
    file = job.folder / _FIGURES
    return read_record(PlanFigures, parse_json(read_bytes(file))) if file.exists() else None


async def _show_candidate(request: Request) -> Response:
    job = state_of(request).jobs.find(request.path_params["id"])
    figures = await run_in_threadpool(_read_figures, job)
    candidates = _list_candidates(figures) if figures is not None else []
    candidate = {str(n): candidate for n, candidate in enumerate(candidates)}.get(request.path_params["number"])
    if candidate is None:
        raise HTTPException(404, "The plan has no such candidate; ask again.")
    answer = await run_in_threadpool(read_answer, job)
    assert isinstance(answer, dict)
    reasons = [r["reason"] for r in answer["rejected"] if r["recipe"] in (candidate.what, candidate.techniques)]
    missing = candidate.peak_gib - answer["available_gib"]
    if not reasons and candidate.verdict is Verdict.NO:
        reasons = [f"{format_memory(missing)} too much"]
    if candidate.verdict is None:
        reasons.append(
            "estimated, without a dry run: "
            + (f"{format_memory(missing)} too much" if missing > 0 else "slower than the chosen one")
        )
    slower = answer["tokens_per_second"] / candidate.tokens_per_second - 1
    if not reasons and not candidate.best and slower > 0:
        reasons.append(f"it fits, and a token takes {slower:.1%} longer than with the chosen one")
    return render(request, "_candidate.html", candidate=candidate, reasons=reasons)


async def _send_recipe(request: Request) -> Response:
    job = state_of(request).jobs.find(request.path_params["id"])
    text = await run_in_threadpool(read_recipe, job)
    return PlainTextResponse(text, headers={"content-disposition": 'attachment; filename="recipe.yaml"'})


def read_recipe(job: Job) -> str:
    """Returns the recipe that a plan wrote.

    Raises:
        HTTPException: 404, it wrote none.
    """
    file = job.folder / _RECIPE
    if not file.exists():
        raise HTTPException(404, "This plan has no recipe; ask for the fastest way to train it.")
    return file.read_text(encoding="utf-8")


def read_page_body(file: Path) -> Markup:
    """Returns the content of a page that a command of preheat wrote, in which everything is escaped already."""
    if not file.exists():
        return Markup()
    text = file.read_text(encoding="utf-8")
    body = text.partition("<main>")[2].rpartition("</main>")[0]
    # The dashboard's page has a heading of its own; what scrolls must be reached by the keyboard.
    for before, after in (("<h1>", "<h2>"), ("</h1>", "</h2>"), ('<div class="scroll">', _SCROLL)):
        body = body.replace(before, after)
    return Markup(body)
