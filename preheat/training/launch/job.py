"""A cluster job: a recipe and the hosts that run it, independent of the scheduler. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from preheat.core import DATA, Axis, sizes_of
from preheat.errors import RecipeError
from preheat.recipe import Recipe
from preheat.storage import is_url

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["Job"]

Kind = Literal["PyTorchJob", "TrainJob"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of `preheat launch`. Options that the target does not support are rejected, never ignored."""

    recipe: Recipe
    nodes: int = 1
    """Hosts."""
    gpus_per_node: int = 0
    """GPUs of each host; 0: the recipe runs on CPUs."""
    processes_per_node: int | None = None
    """Processes of each host; default one per GPU."""
    cpus_per_node: int | None = None
    """Cores of each host that the job may use."""
    memory: str | None = None
    """Memory of each host, e.g. 64G."""
    out: str | None = None
    """The run's folder, on storage that every host sees; default runs/NAME, or /runs/NAME in a container."""
    storage: str | None = None
    """Storage that holds the run's folder: a PersistentVolumeClaim (kubernetes) or a volume (skypilot)."""
    time: str | None = None
    """Time limit, hours:minutes:seconds or 2-00:00:00 with days (slurm, kubernetes)."""
    save_within: int = 300
    """Seconds before the time limit or eviction at which the run is signalled to save and end."""
    restarts: int = 3
    """How often torchrun restarts all processes after a failure."""
    port: int | None = None
    """Port of the rendezvous on the first host; default 29400, or derived from the job ID (slurm)."""
    interface: str | None = None
    """Network interface for NCCL and gloo; by default they choose."""
    env: tuple[str, ...] = ()
    """KEY=VALUE for every process."""
    setup: tuple[str, ...] = ()
    """Shell lines before the training, such as `module load cuda` or `source venv/bin/activate`."""
    image: str | None = None
    """Container image with preheat installed (kubernetes, skypilot, slurm with Pyxis)."""
    accelerator: str | None = None
    """GPU type as the cluster names it, e.g. H100 (skypilot, slurm, ray)."""
    partition: str | None = None
    """Partition (slurm)."""
    account: str | None = None
    """Account that is charged (slurm)."""
    namespace: str | None = None
    """Namespace (kubernetes)."""
    kind: Kind | None = None
    """PyTorchJob (Kubeflow's training operator) or TrainJob (Kubeflow Trainer 2) (kubernetes); default PyTorchJob."""

    @property
    def processes(self) -> int:
        """Processes per host."""
        return self.processes_per_node or self.gpus_per_node

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds."""
        if self.time is None:
            return None
        match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", self.time)
        assert match is not None, "problems() has looked"
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def label(self) -> str:
        """The recipe's name as an RFC 1035 label: a letter, then lower-case letters, digits and '-'.

        At most 40 of the 63 characters allowed, because clusters append suffixes.
        """
        # Labels name objects and hosts in clusters, so everything else becomes a hyphen.
        plain = re.sub(r"[^a-z0-9]+", "-", self.recipe.name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")

    def mesh(self) -> dict[Axis, int]:
        """Returns the devices along each mesh axis, according to the recipe's techniques."""
        return sizes_of(self.recipe.techniques.values(), self.world)

    def require(self, target: str, takes: frozenset[str]) -> None:
        """Rejects contradictory options and those that the target does not support.

        Args:
            takes: the optional fields that this target supports.

        Raises:
            RecipeError: one line with the option, its value and the fix.
        """
        # An option that differs from its default was set by the user: ignoring it silently would start another job.
        for field in fields(self):
            if field.name in _SOME and field.name not in takes and getattr(self, field.name) != field.default:
                raise RecipeError(
                    f"{name_option(field.name)}: --scheduler {target} has no such setting; "
                    f"{_INSTEAD.get(field.name, 'leave it out')}"
                )
        problem = self._find_problem()
        if problem:
            raise RecipeError(problem)

    def _find_problem(self) -> str | None:
        recipe = self.recipe
        if self.processes == 0:
            return "--gpus-per-node: 0, so state how many processes a host runs on its CPUs with --processes-per-node"
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
        return self._find_mesh_problem() or self._find_form_problem()

    def _find_mesh_problem(self) -> str | None:
        per = "--gpus-per-node" if self.processes_per_node is None else "--processes-per-node"
        started = f"--nodes {self.nodes} x {per} {self.processes}"
        devices = self.recipe.parallel.devices
        if devices is not None and devices != self.world:
            return (
                f"parallel.devices: {devices}, but {started} is {self.world}; a mesh that does not multiply: "
                "change one of them"
            )
        # The recipe's degrees must multiply to the processes of all hosts; the error names those that do not.
        try:
            sizes = self.mesh()
        except ValueError as error:
            return f"{started}: a mesh that does not multiply: {error}"
        shares = sizes[DATA[0]] * sizes[DATA[1]]
        if self.recipe.batch.size < shares:
            return (
                f"batch.size: {self.recipe.batch.size} sequences cannot be split across {shares} devices; use {shares} "
                "or more"
            )
        return None

    def _find_form_problem(self) -> str | None:
        if self.time is not None:
            if not re.fullmatch(r"(\d+-)?\d+:\d\d(:\d\d)?", self.time):
                return (
                    f"--time: '{self.time}' is not a time; write hours:minutes:seconds, such as 4:00:00 or 2-00:00:00"
                )
            if (self.seconds or 0) <= self.save_within:
                return f"--time: {self.time} is over before --save-within {self.save_within} s; allow more time"
        if self.out is not None and is_url(self.out):
            return (
                f"--out: {self.out} is a URL, and a restarted job looks for its checkpoints in a folder; name a folder "
                "that every host sees, and send it with preheat upload afterwards"
            )
        # The texts below end up in shell scripts and manifests, so only harmless characters are accepted.
        for item in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=[^\n]*", item):
                return f"--env {item}: write it as KEY=VALUE, such as --env NCCL_DEBUG=WARN"
        if self.memory is not None and not re.fullmatch(r"\d+[MGT]", self.memory):
            return f"--memory: '{self.memory}' is not an amount of memory; write it like 64G"
        if self.port is not None and not 1024 <= self.port < 65536:
            return f"--port: {self.port} is not a port that a user may take; use 1024 to 65535"
        for name in ("partition", "account", "namespace", "storage", "interface", "accelerator"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.:/-]+", value):
                return f"{name_option(name)}: '{value}' is not a name; use letters, digits, '.', '_' and '-'"
        if self.image is not None and not re.fullmatch(r"[\w.:/@#+-]+", self.image):
            return f"--image: '{self.image}' is not the name of an image"
        return None

    def folder(self, root: str) -> PurePosixPath:
        """Returns the run's folder; below `root` if `out` is not set."""
        return PurePosixPath(self.out or f"{root}/{self.recipe.name}")

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of every process."""
        chosen = {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        # torchrun forwards SIGTERM and kills the processes after this timeout; its default of 30 s is too short for
        # saving a large checkpoint.
        waits = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.save_within), "PYTHONUNBUFFERED": "1"}
        # Workaround for torch 2.13: with a shared rendezvous store, an agent that replaces a lost one is not told the
        # address of the surviving agent's store, and both wait forever.
        if self.nodes > 1:
            waits["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # The user's variables last, so that they win over the defaults.
        return waits | {k: v for k, v in chosen.items() if v} | dict(item.split("=", 1) for item in self.env)

    def described(self) -> JsonObject:
        """Returns a summary to show before submitting."""
        return {
            "nodes": self.nodes,
            "processes_per_node": self.processes,
            "devices": self.world,
            "mesh": {str(axis): size for axis, size in self.mesh().items() if size > 1},
        }


def name_option(field: str) -> str:
    """Returns the command-line option of a field."""
    return "--" + field.replace("_", "-")


# Fields that only some targets support, and what to do instead.
_SOME = frozenset({"storage", "time", "image", "accelerator", "partition", "account", "namespace", "kind", "memory"})
_INSTEAD = {
    "time": "let the recipe end itself with stop.hours",
    "storage": "name a folder that every host sees with --out",
    "image": "the processes run in the cluster's own environment",
}
