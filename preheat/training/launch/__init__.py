"""Job files for clusters, as `preheat launch` writes them. One module per target; imports no torch.

    Job ──check──▶ slurm: sbatch script · kubernetes: manifests · skypilot: task · ray: entry script

Each job starts torchrun on every host with one rendezvous, sets the environment, keeps the run's folder on storage that
all hosts see, and restarts after a failure. The folder alone decides if a start begins the run or resumes it.
"""

from __future__ import annotations

from preheat.training.launch import kubernetes, ray, skypilot, slurm
from preheat.training.launch.job import Job

__all__ = ["TARGETS", "Job", "submit", "render_job"]

TARGETS = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot, "ray": ray}


def render_job(job: Job, target: str) -> str:
    """Returns the text of the job file.

    Raises:
        RecipeError: the mesh does not match the devices, or an option is invalid or not supported by this target.
    """
    module = TARGETS[target]
    job.require(target, module.TAKES)
    return module.write(job)


def submit(target: str, path: str) -> str:
    """Returns the command that submits a job file."""
    return TARGETS[target].SUBMIT.format(path=path)
