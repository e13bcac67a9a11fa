"""A job: a recipe and the hosts that run it, whatever the cluster. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any, Literal

from preheat.core import DATA, Axis, sizes_of
from preheat.errors import RecipeError
from preheat.recipe import Recipe

__all__ = ["Job"]

Kind = Literal["PyTorchJob", "TrainJob"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `launch` was asked for. A field that the target has no use for is refused, never left out in silence."""

    recipe: Recipe
    nodes: int = 1
    """Hosts."""
    gpus_per_node: int = 0
    """GPUs of each host; 0: the recipe runs on CPUs."""
    processes_per_node: int | None = None
    """Processes of each host; one a GPU when not stated."""
    cpus_per_node: int | None = None
    """Cores of each host that the job may use."""
    memory: str | None = None
    """Memory of each host, e.g. 64G."""
    out: str | None = None
    """The run's folder, on storage that every host sees; runs/NAME, or /runs/NAME in a container, when not stated."""
    storage: str | None = None
    """What is mounted where the run's folder stands: a PersistentVolumeClaim (kubernetes) or a volume (skypilot)."""
    time: str | None = None
    """Time limit, hours:minutes:seconds or 2-00:00:00 with days (slurm, kubernetes)."""
    save_within: int = 300
    """Seconds before its end, by time limit or eviction, that the run is told to save and end."""
    restarts: int = 3
    """How often torchrun starts all processes anew after one failed."""
    port: int | None = None
    """Port of the rendezvous on the first host; 29400, or one by the job's number (slurm), when not stated."""
    interface: str | None = None
    """Network interface for NCCL and gloo; they choose when not stated."""
    env: tuple[str, ...] = ()
    """KEY=VALUE for every process."""
    setup: tuple[str, ...] = ()
    """A shell line before the training, such as `module load cuda` or `source venv/bin/activate`."""
    image: str | None = None
    """Container image with preheat in it (kubernetes, skypilot, slurm with Pyxis)."""
    accelerator: str | None = None
    """Kind of GPU as the cluster names it, e.g. H100 (skypilot, slurm, ray)."""
    partition: str | None = None
    """Partition (slurm)."""
    account: str | None = None
    """Account that is charged (slurm)."""
    namespace: str | None = None
    """Namespace (kubernetes)."""
    kind: Kind | None = None
    """PyTorchJob, of Kubeflow's training operator, or TrainJob, of Kubeflow Trainer 2 (kubernetes); PyTorchJob when not stated."""

    @property
    def processes(self) -> int:
        """Of each host."""
        return self.processes_per_node or self.gpus_per_node

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def seconds(self) -> int | None:
        """The time limit."""
        if self.time is None:
            return None
        found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", self.time)
        assert found is not None, "problems() has looked"
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest

    @property
    def label(self) -> str:
        """The recipe's name as clusters take names (RFC 1035): a letter, then lower case, digits and '-', short enough for what they append."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.recipe.name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")

    def mesh(self) -> dict[Axis, int]:
        """Devices along each axis, as the recipe's techniques share them out."""
        return sizes_of(self.recipe.techniques.values(), self.world)

    def require(self, target: str, takes: frozenset[str]) -> None:
        """Refuses what contradicts itself, and what the target has no place for.

        Args:
            takes: those of the fields that not every target has which this one has.

        Raises:
            RecipeError: one line with the option, its value and the fix.
        """
        for field in fields(self):
            if field.name in _SOME and field.name not in takes and getattr(self, field.name) != field.default:
                raise RecipeError(
                    f"{option(field.name)}: --scheduler {target} has no such setting; "
                    f"{_INSTEAD.get(field.name, 'leave it out')}"
                )
        problem = self._problem()
        if problem:
            raise RecipeError(problem)

    def _problem(self) -> str | None:
        recipe = self.recipe
        if self.processes == 0:
            return "--gpus-per-node: 0, so say how many processes a host runs on its CPUs: --processes-per-node"
        if self.gpus_per_node and self.processes > self.gpus_per_node:
            return (
                f"--processes-per-node: {self.processes} on {self.gpus_per_node} GPUs; a process needs a GPU of its own"
            )
        if recipe.hardware.device == "cpu" and self.gpus_per_node:
            return (
                f"hardware.device: the recipe runs on CPUs, and --gpus-per-node is {self.gpus_per_node}; use "
                "0 with --processes-per-node"
            )
        if recipe.hardware.device == "cuda" and not self.gpus_per_node:
            return "hardware.device: the recipe needs GPUs, and --gpus-per-node is 0"
        if self.cpus_per_node is not None and self.cpus_per_node < self.processes:
            return f"--cpus-per-node: {self.cpus_per_node} for {self.processes} processes; each needs one at least"
        return self._mesh_problem() or self._form_problem()

    def _mesh_problem(self) -> str | None:
        per = "--gpus-per-node" if self.processes_per_node is None else "--processes-per-node"
        started = f"--nodes {self.nodes} x {per} {self.processes}"
        devices = self.recipe.parallel.devices
        if devices is not None and devices != self.world:
            return (
                f"parallel.devices: {devices}, but {started} is {self.world}; a mesh that does not multiply: "
                "change one of them"
            )
        try:
            sizes = self.mesh()
        except ValueError as error:
            return f"{started}: a mesh that does not multiply: {error}"
        shares = sizes[DATA[0]] * sizes[DATA[1]]
        if self.recipe.batch.size < shares:
            return (
                f"batch.size: {self.recipe.batch.size} rows for {shares} devices that share them out; use "
                f"{shares} or more"
            )
        return None

    def _form_problem(self) -> str | None:
        if self.time is not None:
            if not re.fullmatch(r"(\d+-)?\d+:\d\d(:\d\d)?", self.time):
                return f"--time: '{self.time}' is no time; write hours:minutes:seconds, such as 4:00:00 or 2-00:00:00"
            if (self.seconds or 0) <= self.save_within:
                return f"--time: {self.time} is over before --save-within {self.save_within} s; allow more time"
        for item in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=[^\n]*", item):
                return f"--env {item}: write it as KEY=VALUE, such as --env NCCL_DEBUG=WARN"
        if self.memory is not None and not re.fullmatch(r"\d+[MGT]", self.memory):
            return f"--memory: '{self.memory}' is no amount of memory; write it like 64G"
        if self.port is not None and not 1024 <= self.port < 65536:
            return f"--port: {self.port} is not a port that a user may take; use 1024 to 65535"
        for name in ("partition", "account", "namespace", "storage", "interface", "accelerator"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.:/-]+", value):
                return f"{option(name)}: '{value}' is no name; use letters, digits, '.', '_' and '-'"
        if self.image is not None and not re.fullmatch(r"[\w.:/@#+-]+", self.image):
            return f"--image: '{self.image}' is no name of an image"
        return None

    def folder(self, root: str) -> PurePosixPath:
        """The run's folder; `root` holds runs where nothing was stated."""
        return PurePosixPath(self.out or f"{root}/{self.recipe.name}")

    def environment(self) -> dict[str, str]:
        """What every process gets."""
        chosen = {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        # torchrun passes a SIGTERM on and kills what has not ended by then; 30 s when not stated, too little for a large checkpoint.
        waits = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.save_within), "PYTHONUNBUFFERED": "1"}
        # An agent that outlives another host's tells the one that takes its place nothing of a store that it keeps: both wait for ever (torch 2.13).
        if self.nodes > 1:
            waits["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return waits | {k: v for k, v in chosen.items() if v} | dict(item.split("=", 1) for item in self.env)

    def described(self) -> dict[str, Any]:
        """What a user wants to see before submitting."""
        return {
            "nodes": self.nodes,
            "processes_per_node": self.processes,
            "devices": self.world,
            "mesh": {str(axis): size for axis, size in self.mesh().items() if size > 1},
        }


def option(field: str) -> str:
    """A field as the command line spells it."""
    return "--" + field.replace("_", "-")


_SOME = frozenset({"storage", "time", "image", "accelerator", "partition", "account", "namespace", "kind", "memory"})
_INSTEAD = {
    "time": "let the recipe end itself with stop.hours",
    "storage": "name a folder that every host sees with --out",
    "image": "the processes run in the cluster's own environment",
}
