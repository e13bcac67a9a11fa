"""A job for Kubernetes: the recipe as a ConfigMap, and a PyTorchJob of Kubeflow's training operator or a TrainJob of Kubeflow Trainer 2.

The run's folder stands on a PersistentVolumeClaim that all pods mount (ReadWriteMany where they are on several hosts). A pod that is told to go
has `save_within` seconds to save; its container is started again and goes on.
"""

from __future__ import annotations

from typing import Any

from preheat import recipe as recipes
from preheat.errors import RecipeError
from preheat.training.launch.job import Job
from preheat.training.launch.k8s_yaml import manifest
from preheat.training.launch.torchrun_command import END, FINISHED, agent, exports, quoted

__all__ = ["SUBMIT", "TAKES", "objects", "write"]

TAKES = frozenset({"time", "image", "namespace", "kind", "storage", "memory"})
SUBMIT = "kubectl apply -f {path}"
_PORT = 29400


def write(job: Job) -> str:
    """The manifests."""
    return "---\n".join(manifest(one) for one in objects(job))


def objects(job: Job) -> list[dict[str, Any]]:
    """The manifests as values.

    Raises:
        RecipeError: without an image, without a claim, or with a folder that is no place for one.
    """
    if job.image is None:
        raise RecipeError("--image: pods run one; name an image that has preheat in it")
    if job.storage is None:
        raise RecipeError(
            "--storage: name the PersistentVolumeClaim that keeps the run's folder; a pod's own disk goes with it"
        )
    folder = job.folder("/runs")
    if not folder.is_absolute() or len(folder.parts) < 3:
        raise RecipeError(f"--out: {folder} must be a folder in the mounted one, such as /runs/{job.recipe.name}")
    port = job.port or _PORT
    if job.kind == "TrainJob":
        if job.port is not None:
            raise RecipeError("--port: Kubeflow Trainer chooses it for a TrainJob; leave it out")
        script = _script(job, '"$PET_NODE_RANK" = 0', '"$PET_MASTER_ADDR:$PET_MASTER_PORT"')
        runs = _train_job(job)
    else:
        first = f"{job.label}-worker-0"
        script = _script(job, f'"$(hostname)" = {first}', f"{first}:{port}")
        runs = [_pytorch_job(job, port)]
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.label}-files"),
        "data": {"recipe.yaml": recipes.dump(job.recipe), "run.sh": script},
    }
    return [files, *runs]


def _pytorch_job(job: Job, port: int) -> dict[str, Any]:
    worker = {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": {"spec": _pod(job, "pytorch", port)}}
    # So many as the mesh needs, neither fewer nor more; with this policy worker 0 is like the others, and no master is asked for.
    elastic = {"minReplicas": job.nodes, "maxReplicas": job.nodes, "rdzvBackend": "c10d", "rdzvPort": port}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job, job.label),
        "spec": {
            "nprocPerNode": str(job.processes),
            "elasticPolicy": elastic | {"maxRestarts": job.restarts},
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": job.restarts} | _limit(job),
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def _train_job(job: Job) -> list[dict[str, Any]]:
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": job.restarts,
                "template": {"spec": _pod(job, "node") | {"restartPolicy": "OnFailure"}},
            },
        },
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, job.label),
        "spec": {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}},
    }
    wanted = {
        "runtimeRef": {"kind": "TrainingRuntime", "name": job.label},
        "trainer": {"numNodes": job.nodes, "numProcPerNode": job.processes},
    }
    run = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, job.label),
        "spec": wanted | _limit(job),
    }
    return [runtime, run]


def _limit(job: Job) -> dict[str, Any]:
    return {"activeDeadlineSeconds": job.seconds} if job.time else {}


def _metadata(job: Job, name: str) -> dict[str, Any]:
    return {"name": name} | ({"namespace": job.namespace} if job.namespace else {})


def _script(job: Job, is_first: str, endpoint: str) -> str:
    command = agent(
        job, endpoint=endpoint, first="$first", identity=job.label, recipe="/preheat/recipe.yaml", out='"$run"'
    )
    return "\n".join([
        "#!/bin/bash",
        f"run={quoted(str(job.folder('/runs')))}",
        'export PREHEAT_CACHE="${PREHEAT_CACHE:-$(dirname "$run")/.cache}"  # a pod has no home that lasts',
        *exports(job),
        FINISHED,
        f"first=$([ {is_first} ] && echo 1 || echo 0)",
        *command[:-1],
        command[-1] + " &",
        END,
        "",
    ])  # fmt: skip


def _pod(job: Job, container: str, port: int | None = None) -> dict[str, Any]:
    has: dict[str, Any] = {}
    if job.gpus_per_node:
        has["nvidia.com/gpu"] = job.gpus_per_node
    if job.cpus_per_node:
        has["cpu"] = str(job.cpus_per_node)
    if job.memory:
        has["memory"] = f"{job.memory}i"
    mounts = {"runs": str(job.folder("/runs").parent), "files": "/preheat", "memory": "/dev/shm"}
    one: dict[str, Any] = {
        "name": container,
        "image": job.image,
        "command": ["bash", "/preheat/run.sh"],
        "resources": {"limits": has, "requests": has},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    if port:
        one["ports"] = [{"name": "pytorchjob-port", "containerPort": port}]
    return {
        "terminationGracePeriodSeconds": job.save_within + 30,
        "containers": [one],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.storage}},
            {"name": "files", "configMap": {"name": f"{job.label}-files"}},
            {
                "name": "memory",
                "emptyDir": {"medium": "Memory"},
            },  # NCCL and loaders share memory; a container has 64 MiB of it
        ],
    }
