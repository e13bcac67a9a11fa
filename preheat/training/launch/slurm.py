"""Slurm job: an sbatch script.

Before the time limit, Slurm signals the batch script (`--signal=B:USR1`), which signals the training processes and not
torchrun, which would kill them at once. They save and end, and the job is requeued, as after a failure; but only if a
checkpoint was saved since it started, so that a persistent fault does not requeue it forever.
"""

from __future__ import annotations

from preheat import recipe as recipes
from preheat.training.launch.job import Job
from preheat.training.launch.torchrun_command import (
    FINISHED,
    build_agent_command,
    build_exports,
    build_recipe_lines,
    quoted,
)

__all__ = ["SUBMIT", "TAKES", "write"]

TAKES = frozenset({"time", "image", "accelerator", "partition", "account", "memory"})
SUBMIT = "sbatch {path}"


def write(job: Job) -> str:
    """Returns the script."""
    command = build_agent_command(
        job, endpoint='"$host:$port"', first="$first", identity='"$id"', recipe='"$recipe"', out='"$run"'
    )
    work = [
        *build_exports(job),
        "trap '' USR1  # torchrun would die of it; the processes of the run save and end",
        'first=$([ "$SLURM_NODEID" = 0 ] && echo 1 || echo 0)',
        "exec " + command[0],
        *command[1:],
    ]
    # By job ID, because several jobs may share a host; the range is below Linux's ephemeral ports (from 32768).
    port = str(job.port) if job.port else "$((20000 + SLURM_JOB_ID % 10000))"
    return "\n".join([
        "#!/bin/bash",
        f"# {job.recipe.name}: {job.nodes} hosts of {job.processes} processes. Paths are seen from the folder of "
        "`sbatch`, which all hosts see.",
        *_build_directives(job),
        "set -euo pipefail",
        "",
        f"run={quoted(str(job.folder('runs')))}",
        'mkdir -p "$(dirname "$run")"',
        "recipe=$run.yaml",
        *build_recipe_lines(recipes.dump(job.recipe), "recipe"),
        "",
        'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"port={port}",
        # The restart count makes a requeued job another rendezvous than the one that failed.
        'id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "export run recipe host port id",
        "newest() {",
        "  find \"$run/checkpoints\" -maxdepth 1 -name 'step-*' ! -name '*.writing' 2>/dev/null | sort -V | tail "
        "-n 1 || true",
        "}",
        FINISHED,
        "before=$(newest)",
        "",
        "# What each host runs.",
        "work=$(cat <<'PREHEAT_WORK'",
        *work,
        "PREHEAT_WORK",
        ")",
        "",
        "trap 'scancel --signal=USR1 \"$SLURM_JOB_ID\"' USR1  # to the processes of the step",
        f'srun --kill-on-bad-exit=1{_build_step_options(job)} bash -c "$work" &',
        "step=$!",
        "code=0",
        'wait "$step" || code=$?',
        'while kill -0 "$step" 2>/dev/null; do  # the wait ends with the signal, before the run does',
        "  code=0",
        '  wait "$step" || code=$?',
        "done",
        "if finished; then exit 0; fi",
        'if [ "$(newest)" = "$before" ]; then',
        '  echo "the run ended (code $code) without a new checkpoint: not queued again" >&2',
        '  exit "$((code > 0 ? code : 75))"',
        "fi",
        'echo "the run ended (code $code) before it was finished: queued again to resume from its last checkpoint" >&2',
        'scontrol requeue "$SLURM_JOB_ID"',
        "",
    ])  # fmt: skip


def _build_directives(job: Job) -> list[str]:
    gpus = f"{job.accelerator}:{job.gpus_per_node}" if job.accelerator else str(job.gpus_per_node)
    settings = {
        "job-name": job.label,
        "nodes": job.nodes,
        # One task per host: torchrun starts the processes of its host itself.
        "ntasks-per-node": 1,
        "gpus-per-node": gpus if job.gpus_per_node else None,
        "cpus-per-task": job.cpus_per_node,
        "mem": job.memory,
        "time": job.time,
        "signal": f"B:USR1@{job.save_within}",
        # A requeued job must not overwrite the log of the start before.
        "open-mode": "append",
        "output": "%x-%j.log",
        "partition": job.partition,
        "account": job.account,
    }
    return [f"#SBATCH --{key}={value}" for key, value in settings.items() if value is not None] + ["#SBATCH --requeue"]


def _build_step_options(job: Job) -> str:
    """Returns the options of srun; it does not inherit `--cpus-per-task` from sbatch."""
    cores = f" --cpus-per-task={job.cpus_per_node}" if job.cpus_per_node else ""
    return cores + (
        f' --container-image={quoted(job.image)} --container-mounts="$PWD" --container-workdir="$PWD"'
        if job.image
        else ""
    )
