"""SkyPilot task. As a managed job (`sky jobs launch`) it is restarted after a preemption and resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.errors import RecipeError
from preheat.training.launch.job import Job
from preheat.training.launch.k8s_yaml import dump_manifest
from preheat.training.launch.torchrun_command import (
    END,
    FINISHED,
    build_agent_command,
    build_exports,
    build_recipe_lines,
    quoted,
)

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["SUBMIT", "TAKES", "write"]

TAKES = frozenset({"image", "accelerator", "storage", "memory"})
SUBMIT = "sky jobs launch {path}"


def write(job: Job) -> str:
    """Returns the task as YAML.

    Raises:
        RecipeError: the GPU type is missing, or the run's folder would be lost with its machine.
    """
    if job.gpus_per_node and job.accelerator is None:
        raise RecipeError("--accelerator: SkyPilot looks for machines by it; name one, such as H100 (sky gpus list)")
    folder = job.folder("/runs")
    if job.storage is None and job.out is None:
        raise RecipeError(
            "--storage: name the volume that keeps the run's folder (sky volumes ls), or with --out a folder "
            "that every machine sees"
        )
    if job.storage is not None and "://" in job.storage:
        raise RecipeError(
            f"--storage: {job.storage} is a bucket; mounted as a folder it takes no appended lines and no "
            "renamed folders, which a run and its checkpoints need; name a volume (sky volumes ls)"
        )
    if not folder.is_absolute() or len(folder.parts) < 3:
        raise RecipeError(f"--out: {folder} must be an absolute folder inside another, such as /runs/{job.recipe.name}")
    resources: JsonObject = {"job_recovery": {"max_restarts_on_errors": job.restarts}}
    if job.gpus_per_node:
        resources["accelerators"] = {job.accelerator: job.gpus_per_node}
    if job.cpus_per_node:
        resources["cpus"] = f"{job.cpus_per_node}+"
    if job.memory:
        resources["memory"] = f"{_count_gigabytes(job.memory)}+"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    task: JsonObject = {"name": job.label, "num_nodes": job.nodes, "resources": resources}
    if job.storage:
        task["volumes"] = {str(folder.parent): job.storage}
    return dump_manifest(task | {"run": _build_script(job)})


def _count_gigabytes(memory: str) -> int:
    number, unit = int(memory[:-1]), memory[-1]
    # Rounded up to whole GB, SkyPilot's unit.
    return number * 1024 if unit == "T" else number if unit == "G" else -(-number // 1024)


def _build_script(job: Job) -> str:
    command = build_agent_command(
        job,
        endpoint=f'"$host:{job.port or 29400}"',
        first="$first",
        identity='"$SKYPILOT_TASK_ID"',
        recipe='"$recipe"',
        out='"$run"',
    )
    return "\n".join([
        f"run={quoted(str(job.folder('/runs')))}",
        *build_exports(job),
        "recipe=$(mktemp)  # each host its own: none reads what another is writing",
        *build_recipe_lines(recipes.dump(job.recipe), "recipe"),
        FINISHED,
        "host=$(head -n 1 <<< \"$SKYPILOT_NODE_IPS\")",
        'first=$([ "$SKYPILOT_NODE_RANK" = 0 ] && echo 1 || echo 0)',
        *command[:-1],
        command[-1] + " &",
        END,
        "",
    ])  # fmt: skip
