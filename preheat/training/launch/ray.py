"""Entry script for `ray job submit`.

Ray Train places one worker per host and restarts all when one is lost; each worker runs torchrun.
"""

from __future__ import annotations

from preheat import recipe as recipes
from preheat import remote_code
from preheat.errors import RecipeError
from preheat.training.launch.job import Job

__all__ = ["SUBMIT", "TAKES", "write"]

TAKES = frozenset({"accelerator"})
SUBMIT = "ray job submit --working-dir . -- python {path}"


def write(job: Job) -> str:
    """Returns the script.

    Raises:
        RecipeError: `setup` is set, or the run's folder is not absolute (each worker has its own working directory).
    """
    if job.setup:
        raise RecipeError("--setup: --scheduler ray runs no shell; give the job its environment with ray's runtime_env")
    folder = job.folder("/runs")
    if job.out is None or not folder.is_absolute():
        raise RecipeError(
            "--out: name the run's folder by its absolute path, on storage that all hosts see; workers have folders "
            "of their own"
        )
    # Ray schedules by the resources that a worker asks for, so there must be a number of CPUs.
    cores = job.cpus_per_node or job.processes
    needs = {"CPU": cores} | ({"GPU": job.gpus_per_node} if job.gpus_per_node else {})
    values = {
        "RECIPE": recipes.dump(job.recipe),
        "RUN": str(folder),
        "NAME": job.label,
        "NODES": job.nodes,
        "PROCESSES": job.processes,
        "RESTARTS": job.restarts,
        "PORT": job.port or 29400,
        "NEEDS": needs,
        "ACCELERATOR": job.accelerator,
        "ENVIRONMENT": {"OMP_NUM_THREADS": str(max(1, cores // job.processes))}
        | job.environment()
        | ({remote_code.VARIABLE: "1"} if remote_code.is_allowed() else {}),
    }
    head = (
        f'"""{job.recipe.name} on {job.nodes} hosts of {job.processes} processes; preheat launch wrote this file."""\n'
    )
    settings = "\n".join(f"{name} = {_format_literal(value)}" for name, value in values.items())
    return f"{head}{_IMPORTS}\n{settings}\n{_WORK}"


def _format_literal(value: object) -> str:
    # The recipe as a readable block; texts with quotes or backslashes fall back to `repr`, which is always valid.
    if isinstance(value, str) and "\n" in value and '"""' not in value and "\\" not in value:
        return f'"""\\\n{value}"""'
    return repr(value)


_IMPORTS = """
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
"""

_WORK = '''

def finished() -> bool:
    """True if the last event in the run folder is `finished`."""
    events = Path(RUN) / "events.jsonl"
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    kinds = [json.loads(line)["kind"] for line in lines if line.endswith("}")]
    return [kind for kind in kinds if kind in ("started", "resumed", "finished")][-1:] == ["finished"]


def work() -> None:
    """Runs on each host. Ray chooses the first host (MASTER_ADDR); the rendezvous has a port of its own."""
    first = train.get_context().get_world_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE, encoding="utf-8")
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(NODES), "--nproc-per-node", str(PROCESSES), "--max-restarts", str(RESTARTS)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{os.environ['MASTER_ADDR']}:{PORT}", "--rdzv-id", NAME),
            *("--rdzv-conf", f"is_host={int(first)},join_timeout=900,read_timeout=300"),
            *("-m", "preheat", "train", str(recipe), "--out", RUN, "--auto-resume"),
        ]
        # Ray's process group must not reach torchrun, which sets its own.
        ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
        ours |= {"MASTER_ADDR", "MASTER_PORT"}
        environment = {key: value for key, value in os.environ.items() if key not in ours} | ENVIRONMENT
        agent = subprocess.Popen(command, env=environment)
        try:
            code = agent.wait()
        finally:
            agent.terminate()
    if code != 0:
        raise RuntimeError(f"torchrun ended with code {code}; see its last lines for the reason")
    if not finished():
        raise RuntimeError(f"{RUN}: the run was stopped before its end; it resumes when it is started again")


if __name__ == "__main__":
    TorchTrainer(
        work,
        torch_config=TorchConfig(backend="gloo"),  # for the address alone
        scaling_config=ScalingConfig(
            num_workers=NODES,
            use_gpu="GPU" in NEEDS,
            resources_per_worker=NEEDS,
            accelerator_type=ACCELERATOR,
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=f"{NAME}-ray", storage_path=str(Path(RUN).parent), failure_config=FailureConfig(max_failures=RESTARTS)
        ),
    ).fit()
'''
