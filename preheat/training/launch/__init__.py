"""A recipe as a job of a cluster: what `preheat launch` writes. One module a target; no torch.

    Job ──check──▶ slurm: sbatch script · kubernetes: manifests · skypilot: task · ray: entry script

Each starts torchrun on every host with one rendezvous, sets what the processes need, keeps the run's folder on storage that all hosts see, and starts
again after a failure. Whether a start begins the run or goes on with it is decided by that folder alone.
"""

from __future__ import annotations

from preheat.training.launch import kubernetes, ray, skypilot, slurm
from preheat.training.launch.job import Job

__all__ = ["TARGETS", "Job", "submit", "written"]

TARGETS = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot, "ray": ray}


def written(job: Job, target: str) -> str:
    """The job's file.

    Raises:
        RecipeError: the mesh does not multiply to the devices, or an option is wrong or has no place in this target.
    """
    module = TARGETS[target]
    job.require(target, module.TAKES)
    return module.write(job)


def submit(target: str, path: str) -> str:
    """The command that submits a file."""
    return TARGETS[target].SUBMIT.format(path=path)
