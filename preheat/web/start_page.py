"""The page *Start*: trains a recipe on this machine, one after the other, or writes the job file for elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from preheat.cache_folder import cache_folder, make_private
from preheat.errors import PreheatError, RecipeError, RunError
from preheat.files import parse_json, to_json, write_user_file
from preheat.run.layout import MARK
from preheat.sanitize import quote_value
from preheat.web.choices import load_choices
from preheat.web.forms import Choice, Field, clean_values, describe_key, fill, read_number, read_values
from preheat.web.job_routes import build_job_routes
from preheat.web.jobs import JobState, read_answer
from preheat.web.plan_page import build_data_field, find_file, read_recipe
from preheat.web.settings import state_of
from preheat.web.templating import build_url, render

if TYPE_CHECKING:
    from starlette.requests import Request

    from preheat.web.jobs import Job, Training
    from preheat.web.settings import State

__all__ = ["create_empty_folder", "routes"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_SCHEDULERS = {"slurm": "Slurm", "kubernetes": "Kubernetes (Kubeflow)", "skypilot": "SkyPilot", "ray": "Ray"}
_LAUNCH_FIELDS = (
    Field(
        "scheduler",
        "Scheduler",
        "An sbatch script, Kubeflow manifests, a SkyPilot task, or an entry script for Ray.",
        "select",
        {"": [Choice(name, label) for name, label in _SCHEDULERS.items()]},
        value="slurm",
    ),
    Field("nodes", "Hosts", "Hosts of the job.", "number", placeholder="1", minimum=1),
    Field("gpus_per_node", "GPUs of a host", "One process runs on each.", "number", placeholder="0"),
    Field("time", "Time", "Limit of the job, such as 4:00:00.", placeholder="4:00:00"),
    Field("out", "Run folder", "Folder of the run on storage that all hosts share, or a URL.", placeholder="runs/mine"),
    Field("storage", "Storage", "Shared storage of the cluster, such as a Kubernetes volume claim or a bucket."),
    Field("image", "Image", "Container image with preheat and torch; Kubernetes needs it."),
    Field("accelerator", "Accelerator", "Kind of GPU by the scheduler's name; SkyPilot needs it.", placeholder="H100"),
    Field("partition", "Partition", "Slurm's partition."),
    Field("account", "Account", "Slurm's account."),
)


def routes() -> list[Route]:
    return [
        Route("/start", _show, methods=["GET"]),
        Route("/start", _train, methods=["POST"]),
        Route("/start/queue", _show_queue),
        Route("/start/launch", _launch, methods=["POST"]),
        *build_job_routes("/start/launch", _render_launch),
        Route("/start/trainings/{id}", _show_training),
        Route("/start/trainings/{id}/state", _show_training_state),
        Route("/start/trainings/{id}/cancel", _cancel_training, methods=["POST"]),
    ]


def _list_fields(state: State, recipes: tuple[Choice, ...], name: str, *, is_planned: bool) -> list[Field]:
    steps = Field(
        "steps",
        "Steps",
        describe_key("stop.max_steps"),
        "number",
        placeholder="as planned" if is_planned else "as in the recipe",
        minimum=1,
    )
    naming = Field(
        "name",
        "Name of the run",
        f"Its folder in {state.settings.folders[0]}; letters, digits, dots and dashes.",
        value=name,
        placeholder="" if is_planned else "as the recipe",
    )
    if is_planned:
        return [naming, steps]
    groups = {
        "Built in": [Choice(choice.value, f"{choice.value}: {choice.label}") for choice in recipes],
        "Your recipes": [Choice(file.id, file.name) for file in state.files.list_files("recipe")],
    }
    return [
        Field(
            "recipe",
            "Recipe",
            "Built-in recipes, and the YAML files below the folders that this server shows.",
            "select",
            {heading: choices for heading, choices in groups.items() if choices},
            placeholder="choose one",
        ),
        naming,
        build_data_field(state),
        steps,
    ]


async def _show(request: Request) -> Response:
    state = state_of(request)
    values = clean_values(request.query_params.multi_items())
    choices = await run_in_threadpool(load_choices, state.jobs)
    plan = values.get("plan")
    recipe, planned, device, name = None, None, None, ""
    if plan is not None:
        job = state.jobs.find(plan)
        recipe = await run_in_threadpool(read_recipe, job)
        planned = await run_in_threadpool(read_answer, job)
        device = _read_question(job).get("device")
        assert isinstance(planned, dict)
        name = await run_in_threadpool(_choose_name, state, str(planned["recipe"]["name"]))
    fields = await run_in_threadpool(lambda: _list_fields(state, choices.recipes, name, is_planned=plan is not None))
    return render(
        request,
        "start.html",
        plan_id=plan,
        recipe=recipe,
        planned=planned,
        device=device,
        fields=fill(fields, values),
        launch_fields=_LAUNCH_FIELDS,
        trainings=await run_in_threadpool(_describe_queue, state),
    )


def _read_question(job: Job) -> Mapping[str, str]:
    """Returns the form that a plan answers."""
    question = parse_json(job.key or "{}")
    assert isinstance(question, dict)
    return question


def _choose_name(state: State, name: str) -> str:
    """Returns a name for a run that no folder has."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"
    folder = state.settings.folders[0]
    names = [base, *(f"{base}-{n}" for n in range(2, 1000))]
    queued = {training.run.name for training in state.jobs.list_trainings() if training.state is JobState.WAITING}
    return next((n for n in names if n not in queued and not _is_taken(folder / n)), base)


def _is_taken(run: Path) -> bool:
    # A link that leads nowhere yet is a name as well: what is written under it would be written elsewhere.
    return any(map(os.path.lexists, (run, run.with_name(f"{run.name}.yaml"), run.with_name(f"{run.name}.log"))))


async def _train(request: Request) -> Response:
    form = await read_values(request)
    try:
        training = await run_in_threadpool(_queue, state_of(request), form)
    except (PreheatError, HTTPException) as error:
        return render(request, "_problem.html", message=_describe(error))
    return Response(status_code=204, headers={"hx-redirect": build_url(request, f"/start/trainings/{training.id}")})


def _describe(error: PreheatError | HTTPException) -> str:
    return error.detail if isinstance(error, HTTPException) else str(error)


def _queue(state: State, form: Mapping[str, str]) -> Training:
    """Queues the training of a form.

    Raises:
        RecipeError: its name is taken or no name, or it names no recipe.
        RunError: the folder cannot be written.
    """
    is_planned = "plan" in form
    choices = load_choices(state.jobs)
    fields = {field.name: field for field in _list_fields(state, choices.recipes, "", is_planned=is_planned)}
    steps = read_number(form, fields["steps"])
    arguments = []
    cwd = create_empty_folder()
    text = None
    if is_planned:
        text, recipe, name = read_recipe(state.jobs.find(form["plan"])), "", form.get("name", "")
    else:
        if "recipe" not in form:
            raise RecipeError("Recipe: is empty; choose one, or plan a model first")
        recipe = form["recipe"]
        default = recipe
        if recipe not in {choice.value for choice in choices.recipes}:
            file = state.files.find(recipe, "recipe")
            # Relative paths of a recipe are meant from where the server was started.
            recipe, default, cwd = str(file.path), file.path.stem, Path.cwd()
        name = form.get("name") or _choose_name(state, default)
        if "data" in form:
            arguments.append(f"--set=data.source={to_json(find_file(state, form['data']))}")
    if not _NAME.fullmatch(name):
        raise RecipeError(f"Name of the run: {quote_value(name)}: use up to 80 letters, digits, dots and dashes")
    run = state.settings.folders[0].resolve() / name
    if _is_taken(run):
        raise RecipeError(f"Name of the run: {name}: is taken in {run.parent}; choose another name")
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{run.parent}: cannot be created ({error.strerror}); start the server with a folder of yours"
        ) from None
    if text is not None:
        recipe = str(write_user_file(run.with_name(f"{name}.yaml"), text))
    if steps is not None:
        arguments.append(f"--set=stop.max_steps={steps}")
    command = ["train", f"--out={run}", *arguments, "--", recipe]
    return state.jobs.queue_training(name, command, run, cwd=cwd)


def create_empty_folder() -> Path:
    """Returns an empty working folder, in which no name of a model on the hub is a path."""
    folder = cache_folder().resolve() / "ui" / "empty"
    make_private(folder)
    return folder


def _describe_queue(state: State) -> list[tuple[Training, str | None]]:
    """Returns the trainings, the latest first, each with the id of its run, if that has begun."""
    return [(training, _find_run(state, training)) for training in reversed(state.jobs.list_trainings())]


def _find_run(state: State, training: Training) -> str | None:
    if not (training.run / MARK).exists():
        return None
    return next((entry.id for entry in state.catalogue.list_runs() if entry.path == training.run.resolve()), None)


async def _show_queue(request: Request) -> Response:
    trainings = await run_in_threadpool(_describe_queue, state_of(request))
    return render(request, "_queue.html", trainings=trainings)


async def _show_training(request: Request) -> Response:
    return await _render_training(request, "training.html")


async def _show_training_state(request: Request) -> Response:
    return await _render_training(request, "_training.html")


async def _render_training(request: Request, template: str) -> Response:
    state = state_of(request)
    training = await run_in_threadpool(state.jobs.find_training, request.path_params["id"])
    run = await run_in_threadpool(_find_run, state, training)
    if run is not None and training.state is JobState.RUNNING and template.startswith("_"):
        return Response(status_code=200, headers={"hx-redirect": build_url(request, f"/runs/{run}")})
    log = await run_in_threadpool(training.read_log)
    return render(request, template, training=training, run=run, log=log)


async def _cancel_training(request: Request) -> Response:
    id = request.path_params["id"]
    try:
        await run_in_threadpool(state_of(request).jobs.cancel_training, id)
    except RunError as error:
        return render(request, "_problem.html", message=str(error))
    return await _show_queue(request)


async def _launch(request: Request) -> Response:
    form = await read_values(request)
    try:
        job = await run_in_threadpool(_write_job, state_of(request), form)
    except (PreheatError, HTTPException) as error:
        return render(request, "_problem.html", message=_describe(error))
    return await _render_launch(request, job)


def _write_job(state: State, form: Mapping[str, str]) -> Job:
    """Starts `preheat launch`, which writes the job file of a plan or of a recipe."""
    scheduler = form.get("scheduler", "")
    if scheduler not in _SCHEDULERS:
        raise RecipeError(f"Scheduler: {quote_value(scheduler)}: must be one of {', '.join(_SCHEDULERS)}")
    with state.jobs.create_folder() as folder:
        cwd = folder
        if "plan" in form:
            recipe = "recipe.yaml"
            (folder / recipe).write_text(read_recipe(state.jobs.find(form["plan"])), encoding="utf-8")
        elif "recipe" in form:
            recipe = form["recipe"]
            if recipe not in {choice.value for choice in load_choices(state.jobs).recipes}:
                recipe, cwd = str(state.files.find(recipe, "recipe").path), Path.cwd()
        else:
            raise RecipeError("Recipe: is empty; choose one, or plan a model first")
        options = []
        for field in _LAUNCH_FIELDS[1:]:
            if field.kind == "number":
                read_number(form, field)
            if field.name in form:
                options.append(f"--{field.name.replace('_', '-')}={form[field.name]}")
        arguments = ["launch", "--json", f"--scheduler={scheduler}", *options, "--", recipe]
        return state.jobs.start(f"Job for {_SCHEDULERS[scheduler]}", arguments, folder=folder, cwd=cwd, limit_s=120.0)


async def _render_launch(request: Request, job: Job) -> Response:
    if job.is_running:
        return render(request, "_job.html", job=job, place=f"/start/launch/{job.id}")
    if job.state is not JobState.DONE:
        return render(request, "_problem.html", message=job.problem or "The command was cancelled.")
    return render(request, "_launch.html", launch=await run_in_threadpool(read_answer, job))
