"""The page *Data*: rows as the model sees them, with the findings of the checks and the lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from preheat.errors import PreheatError, RecipeError
from preheat.files import to_json
from preheat.web.choices import load_choices
from preheat.web.forms import Choice, Field, clean_values, fill, read_number, read_values
from preheat.web.job_routes import build_job_routes
from preheat.web.jobs import JobState, read_answer
from preheat.web.labels import name_run
from preheat.web.plan_page import build_data_field, choose_recipe, find_file, read_page_body
from preheat.web.settings import state_of
from preheat.web.templating import build_url, render

if TYPE_CHECKING:
    from starlette.requests import Request

    from preheat.web.choices import Choices
    from preheat.web.jobs import Job
    from preheat.web.settings import State

__all__ = ["routes"]

_PAGE = "data.html"


def routes() -> list[Route]:
    return [
        Route("/data", _show, methods=["GET"]),
        Route("/data", _start, methods=["POST"]),
        *build_job_routes("/data/jobs", _render_job),
    ]


def _list_fields(state: State, choices: Choices) -> list[Field]:
    recipes = {
        "Built in": [Choice(choice.value, f"{choice.value}: {choice.label}") for choice in choices.recipes],
        "Your recipes": [Choice(file.id, file.name) for file in state.files.list_files("recipe")],
        "Runs": [Choice(entry.id, name_run(entry)) for entry in state.catalogue.list_runs()],
    }
    return [
        Field(
            "recipe",
            "Recipe or run",
            "It names the data, the tokenizer and the length of sequences.",
            "select",
            {heading: group for heading, group in recipes.items() if group},
            placeholder="choose one",
        ),
        build_data_field(state),
        Field("rows", "Sequences", "Packed sequences to show.", "number", placeholder="3", minimum=1),
    ]


async def _show(request: Request) -> Response:
    state = state_of(request)
    choices = await run_in_threadpool(load_choices, state.jobs)
    values = clean_values(request.query_params.multi_items())
    await run_in_threadpool(state.catalogue.update_for, values.get("recipe", ""))
    fields = await run_in_threadpool(_list_fields, state, choices)
    return render(request, "data.html", fields=fill(fields, values), asks="recipe" in values)


async def _start(request: Request) -> Response:
    state = state_of(request)
    form = await read_values(request)
    choices = await run_in_threadpool(load_choices, state.jobs)
    fields = await run_in_threadpool(_list_fields, state, choices)
    values = {field.name: form[field.name] for field in fields if field.name in form}
    try:
        job = await run_in_threadpool(_preview, state, values, {field.name: field for field in fields}, choices)
    except (PreheatError, HTTPException) as error:
        message = error.detail if isinstance(error, HTTPException) else str(error)
        response: Response = render(request, "_problem.html", message=message)
    else:
        response = await _render_job(request, job)
    response.headers["hx-push-url"] = build_url(request, "/data", **values)
    return response


def _preview(state: State, values: Mapping[str, str], fields: Mapping[str, Field], choices: Choices) -> Job:
    if "recipe" not in values:
        raise RecipeError("Recipe or run: is empty; choose one, such as demo")
    rows = read_number(values, fields["rows"]) or 3
    if rows > 50:
        raise RecipeError(f"Sequences: {rows:,}: a page shows up to 50; use preheat data --rows for more")
    recipe, cwd = choose_recipe(state, choices, values["recipe"])
    with state.jobs.create_folder() as folder:
        options = [f"--rows={rows}", f"--html={folder / _PAGE}"]
        if "data" in values:
            options.append(f"--set=data.source={to_json(find_file(state, values['data']))}")
        command = ["data", "--json", *options, "--", recipe]
        title = f"Data of {values['recipe'] if cwd is None else recipe}"
        return state.jobs.start(title, command, folder=folder, cwd=cwd)


async def _render_job(request: Request, job: Job) -> Response:
    if job.is_running:
        return render(request, "_job.html", job=job, place=f"/data/jobs/{job.id}")
    body = await run_in_threadpool(read_page_body, job.folder / _PAGE)
    # Data that training refuses, exit code 4, is shown all the same, with the findings on top.
    if body and job.state is not JobState.CANCELLED:
        answer = await run_in_threadpool(read_answer, job)
        examples = answer.get("examples", []) if isinstance(answer, dict) else []
        return render(request, "_data.html", body=body, problem=job.problem, examples=examples)
    return render(request, "_problem.html", message=job.problem or "The command was cancelled.")
