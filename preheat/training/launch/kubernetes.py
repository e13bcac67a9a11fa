"""Kubernetes manifests: a ConfigMap with the recipe, and a PyTorchJob (training operator) or TrainJob (Trainer 2).

The run's folder is on a PersistentVolumeClaim that all pods mount (ReadWriteMany if they are on several hosts). A pod
that is evicted has `save_within` seconds to save; its container is restarted and resumes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.errors import RecipeError
from preheat.training.launch.job import Job
from preheat.training.launch.k8s_yaml import dump_manifest
from preheat.training.launch.torchrun_command import END, FINISHED, build_agent_command, build_exports, quoted

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["SUBMIT", "TAKES", "build_objects", "write"]

TAKES = frozenset({"time", "image", "namespace", "kind", "storage", "memory"})
SUBMIT = "kubectl apply -f {path}"
_PORT = 29400  # of the rendezvous: torchrun's own default


def write(job: Job) -> str:
    """Returns the manifests as YAML."""
    return "---\n".join(dump_manifest(value) for value in build_objects(job))


def build_objects(job: Job) -> list[JsonObject]:
    """Returns the manifests as values.

    Raises:
        RecipeError: there is no image or no claim, or the folder is not inside the mounted one.
    """
    if job.image is None:
        raise RecipeError("--image: pods run one; name an image that has preheat in it")
    if job.storage is None:
        raise RecipeError(
            "--storage: name the PersistentVolumeClaim that keeps the run's folder; a pod's own disk is deleted with it"
        )
    folder = job.folder("/runs")
    # The claim is mounted at the folder's parent, which must not be the root of the container.
    if not folder.is_absolute() or len(folder.parts) < 3:
        raise RecipeError(f"--out: {folder} must be a folder in the mounted one, such as /runs/{job.recipe.name}")
    port = job.port or _PORT
    if job.kind == "TrainJob":
        if job.port is not None:
            raise RecipeError("--port: Kubeflow Trainer chooses it for a TrainJob; leave it out")
        # Kubeflow Trainer sets torchrun's PET_* variables in each pod of a TrainJob.
        script = _build_script(job, '"$PET_NODE_RANK" = 0', '"$PET_MASTER_ADDR:$PET_MASTER_PORT"')
        runs = _train_job(job)
    else:
        # The training operator gives each pod its own name as host name, and a service of that name.
        first = f"{job.label}-worker-0"
        script = _build_script(job, f'"$(hostname)" = {first}', f"{first}:{port}")
        runs = [_build_pytorch_job(job, port)]
    # The recipe travels in a ConfigMap, so that the image needs no rebuild for another recipe.
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _build_metadata(job, f"{job.label}-files"),
        "data": {"recipe.yaml": recipes.dump(job.recipe), "run.sh": script},
    }
    return [files, *runs]


def _build_pytorch_job(job: Job, port: int) -> JsonObject:
    worker = {
        "replicas": job.nodes,
        "restartPolicy": "OnFailure",
        "template": {"spec": _build_pod(job, "pytorch", port)},
    }
    # A fixed number of replicas, as the mesh requires. With an elastic policy, worker 0 hosts the rendezvous and no
    # master replica is needed.
    elastic = {"minReplicas": job.nodes, "maxReplicas": job.nodes, "rdzvBackend": "c10d", "rdzvPort": port}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _build_metadata(job, job.label),
        "spec": {
            "nprocPerNode": str(job.processes),
            "elasticPolicy": elastic | {"maxRestarts": job.restarts},
            # Pods remain after the job, so that their logs can still be read.
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": job.restarts} | _build_limit(job),
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def _train_job(job: Job) -> list[JsonObject]:
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": job.restarts,
                "template": {"spec": _build_pod(job, "node") | {"restartPolicy": "OnFailure"}},
            },
        },
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _build_metadata(job, job.label),
        "spec": {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}},
    }
    wanted = {
        "runtimeRef": {"kind": "TrainingRuntime", "name": job.label},
        "trainer": {"numNodes": job.nodes, "numProcPerNode": job.processes},
    }
    run = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _build_metadata(job, job.label),
        "spec": wanted | _build_limit(job),
    }
    return [runtime, run]


def _build_limit(job: Job) -> JsonObject:
    return {"activeDeadlineSeconds": job.seconds} if job.time else {}


def _build_metadata(job: Job, name: str) -> JsonObject:
    return {"name": name} | ({"namespace": job.namespace} if job.namespace else {})


def _build_script(job: Job, is_first: str, endpoint: str) -> str:
    command = build_agent_command(
        job, endpoint=endpoint, first="$first", identity=job.label, recipe="/preheat/recipe.yaml", out='"$run"'
    )
    return "\n".join([
        "#!/bin/bash",
        f"run={quoted(str(job.folder('/runs')))}",
        'export PREHEAT_CACHE="${PREHEAT_CACHE:-$(dirname "$run")/.cache}"  # a pod has no home that lasts',
        *build_exports(job),
        FINISHED,
        f"first=$([ {is_first} ] && echo 1 || echo 0)",
        *command[:-1],
        command[-1] + " &",
        END,
        "",
    ])  # fmt: skip


def _build_pod(job: Job, container: str, port: int | None = None) -> JsonObject:
    resources: JsonObject = {}
    if job.gpus_per_node:
        resources["nvidia.com/gpu"] = job.gpus_per_node
    if job.cpus_per_node:
        resources["cpu"] = str(job.cpus_per_node)
    if job.memory:
        # 64G becomes 64Gi: the suffixes of Kubernetes without i are powers of ten.
        resources["memory"] = f"{job.memory}i"
    mounts = {"runs": str(job.folder("/runs").parent), "files": "/preheat", "memory": "/dev/shm"}
    spec: JsonObject = {
        "name": container,
        "image": job.image,
        "command": ["bash", "/preheat/run.sh"],
        # Requests equal to limits: with CPU and memory given, the pod is of class Guaranteed, which is evicted last.
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    if port:
        spec["ports"] = [{"name": "pytorchjob-port", "containerPort": port}]
    return {
        # torchrun waits `save_within` for its processes, so the pod needs a margin on top.
        "terminationGracePeriodSeconds": job.save_within + 30,
        "containers": [spec],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.storage}},
            {"name": "files", "configMap": {"name": f"{job.label}-files"}},
            # NCCL and data loaders use /dev/shm, of which a container has only 64 MiB by default.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
