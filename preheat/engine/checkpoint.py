"""Checkpoints: written to a temporary folder, synced and renamed, so that only complete ones are read.

    checkpoints/step-N/
        *.safetensors     parameters, optimizer state and generators (torch distributed checkpoint, safetensors files);
                          each rank writes its shards, and any number of ranks reads them in any layout
        model.safetensors.index.json (single process)
        state.json        identity of the run, step, samples, tokens, elapsed, effective recipe, fingerprints,
                          host generators, `Build.state`
        manifest.json     size and SHA-256 of each file: written last
    checkpoints/best      with `checkpoint.best`: the name of the best one, step-N

Only files that the manifest names are read or removed. Checkpoints of other runs are ignored. No pickle is
written or read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from preheat.core import Build, Device
from preheat.errors import RunError
from preheat.files import compute_sha256, parse_json, read_bytes, to_json, write_atomic
from preheat.hardware.oom import is_oom, require_room
from preheat.models.moe import biases
from preheat.recipe import Recipe
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import StorageReader

    from preheat.core.json_types import JsonObject

# Resuming refuses any other number; it does not convert.
FORMAT = 4
"""Version of state.json: increased when the contents of a checkpoint change."""
BEST = "best"
"""File of the folder `checkpoints` with the name of the best checkpoint."""

__all__ = [
    "Progress",
    "Snapshot",
    "is_async",
    "all_gather_object",
    "at_checkpoint",
    "best_step",
    "chosen_step",
    "find",
    "collect_host_generators",
    "load",
    "load_weights",
    "mark_best",
    "prune",
    "put_back",
    "read_progress",
    "restore_host_generators",
    "restore_torch_generators",
    "save",
    "set_aside",
    "steps_after",
    "parse_step",
    "steps_of",
    "snapshot",
    "collect_torch_generators",
    "write",
]

T = TypeVar("T")


@dataclass
class Progress:
    """Progress of a run: what the loop needs to resume."""

    # Counts of the whole run so far, over all devices. `elapsed` is seconds of training, earlier processes included.
    step: int = 0
    samples: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    # Steps that changed no weight because fp16 gradients overflowed: of all steps, and of the last ones in a row.
    skipped: int = 0
    skipped_in_a_row: int = 0
    recipe: str = ""
    """The effective recipe as YAML."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of data, model and weights: a resumed run must have the same."""
    run: str = ""
    """Identity of the run (preheat.run): checkpoints of other runs are not read."""

    @property
    def updates(self) -> int:
        """Steps that changed the weights: the learning rate's schedule counts these."""
        return self.step - self.skipped


def _collect_tensors(build: Build, rank: int | None = None) -> dict[str, Tensor]:
    """Name -> tensor of all device state that a resumed run needs. Loading copies into these tensors in place.

    Args:
        rank: whose generators; this process's by default.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    # Frozen weights that a folder on disk already has are not written again.
    frozen_too = build.weights.folder is None
    # Gradual unfreezing trains some of them later: `requires_grad` alone would depend on the step.
    optimized = {id(p) for group in build.optimizer.param_groups for p in group["params"]}
    for part in build.trained:  # several for a pipeline; names are those of the full model
        for name, p in part.named_parameters():
            if p.requires_grad or frozen_too or id(p) in optimized:
                tensors[f"model.{name}"] = build.parallel.full_parameter(p)
                # An optimizer without state yet (or DeepSpeed's, which keeps its own) contributes nothing.
                for key, value in build.optimizer.state.get(p, {}).items():
                    if torch.is_tensor(value):
                        tensors[f"optimizer.{name}.{key}"] = value
        # Training moves these buffers of routers without gradients, so they are neither parameters nor constants.
        tensors |= {f"model.{name}": bias for name, bias in biases(part).items()}
    # A state of a parameter that was replaced would be lost here without a word.
    known = {id(p) for part in build.trained for p in part.parameters()}
    assert all(id(p) in known for p in build.optimizer.state), (
        "the optimizer's state is of parameters that the model does not have now"
    )
    # Other roles (the reference of preference tuning) begin as copies of the model: a folder has their values, but
    # random weights exist only here. A role with a source of its own (a teacher) is read from its own folder.
    for role in sorted(build.parts.keys() - {"trained"} - build.sources.keys()) if frozen_too else ():
        for index, part in enumerate(build.parts[role]):
            tensors |= {f"{role}.{index}.{name}": p.detach() for name, p in part.named_parameters()}
    return tensors | collect_torch_generators(build, build.mesh.rank if rank is None else rank)


def _find_masters(build: Build) -> dict[str, Tensor]:
    """Name of each master of an fp32 parameter -> the parameter."""
    import torch

    from preheat.ops.optim.optimizers import Guarded

    if not isinstance(build.optimizer, Guarded) or not build.optimizer.masters:
        return {}
    return {
        f"optimizer.{name}.{build.optimizer.masters}": p
        for part in build.trained
        for name, p in part.named_parameters()
        if p in build.optimizer.state and p.dtype == torch.float32
    }


_FILE_BYTES = 64 << 20
"""Upper limit of a file: it is assembled in memory, so large files would need as much host memory."""
_COPIES = 3
"""Copies of a file while it is assembled: safetensors' buffer (aborts without memory), Python's bytes, a margin."""


def _assign_files(sizes: dict[str, int], *, file_per_tensor: bool = False) -> dict[str, int]:
    """Name -> number of its file, from 1; `file_per_tensor`: one file per tensor.

    A file is assembled in memory before it is written, so files are small, and smaller still for small models: writing
    a checkpoint must not set the peak memory of a run.

    Args:
        sizes: name -> bytes.
    """
    # A 32nd of the checkpoint, within 8 and 64 MiB: the three copies of such a file are a tenth of what is saved.
    limit = 0 if file_per_tensor else min(_FILE_BYTES, max(8 << 20, sum(sizes.values()) // 32))
    numbers, number, size = {}, 1, 0
    for name, bytes in sizes.items():
        # A tensor above the limit gets a file of its own: `size` is 0 only before the first tensor of a file.
        if size and size + bytes > limit:
            number, size = number + 1, 0
        numbers[name] = number
        size += bytes
    return numbers


def all_gather_object(build: Build, value: T, group: ProcessGroup | None = None) -> list[T]:
    """Gathers one value from each rank, in the order of ranks. All ranks must call it.

    Args:
        group: of all ranks; the default one if not given.
    """
    if build.mesh.world == 1:
        return [value]
    import torch.distributed as dist

    # By pickle, but only between the processes of this run and never on disk.
    values = [value] * build.mesh.world
    dist.all_gather_object(values, value, group=group)
    return values


def collect_torch_generators(build: Build, rank: int) -> dict[str, Tensor]:
    """The states of torch's random generators by name, as tensors."""
    import torch

    # The rank in the name: each rank saves its own state, and names must differ within a checkpoint.
    states = {f"generator.cpu.{rank}": torch.get_rng_state()}
    if build.torch_device.type == "cuda":
        states[f"generator.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def restore_torch_generators(states: dict[str, Tensor], rank: int) -> None:
    """Restores torch's generators."""
    import torch

    torch.set_rng_state(states[f"generator.cpu.{rank}"])
    if f"generator.cuda.{rank}" in states:
        torch.cuda.set_rng_state(states[f"generator.cuda.{rank}"])


class HostGenerators(TypedDict):
    """The states of Python's and numpy's random generators, as their `getstate` returns them; JSON has lists."""

    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]


def collect_host_generators() -> HostGenerators:
    import numpy

    # As lists, because JSON has no arrays. `legacy`: the tuple, not a dictionary of arrays.
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "python": (version, list(state), gauss),
        "numpy": (kind, keys.tolist(), int(position), int(has_gauss), float(cached)),  # type: ignore[union-attr]
    }


def restore_host_generators(states: HostGenerators) -> None:
    import numpy

    version, state, gauss = states["python"]
    # `setstate` accepts a tuple of tuples only, and JSON returns lists.
    random.setstate((version, tuple(state), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))


def _sync(path: Path) -> None:
    # fsync works on any handle of a file, also one opened for reading, and this way on folders too.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _silence_one_process() -> Iterator[None]:
    """Silences torch's warning about saving without torch.distributed, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def is_async(recipe: Recipe, device: Device) -> bool:
    """True if checkpoints are written while training continues."""
    settings = recipe.checkpoint
    if not (settings.every or settings.best):
        return False
    return device.kind != "cpu" if settings.asynchronous is None else settings.asynchronous


@dataclass
class Snapshot:
    """The content of a checkpoint at a step."""

    step: int
    tensors: dict[str, Tensor]
    state: str
    """Of state.json, all but the generators of other ranks."""
    generators: HostGenerators
    run: str = ""


def snapshot(build: Build, progress: Progress, *, copied: bool) -> Snapshot:
    """Collects the content of a checkpoint.

    Args:
        copied: copies tensors to host memory, so that training may continue during the write; otherwise they are the
            build's own.
    """
    import torch

    tensors = _collect_tensors(build)
    if copied:
        # `copy`: on a CPU, `to` would return the same tensor, which the next step changes.
        tensors = {name: t.to("cpu", copy=True) for name, t in tensors.items()}
    state = {
        "format": FORMAT,
        **{key: getattr(progress, key) for key in Progress.__dataclass_fields__},
        "build": {name: thing.state_dict() for name, thing in build.state.saved.items()},
        # Threads and kernels decide the order of sums, and with it the last digits of a resumed run.
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "world": build.mesh.world,
        "slots": build.slots(),
        "kernels": {name: [c.kernel for c in changes] for name, changes in build.changes.items()},
    }
    # Not `to_json`: a resumed run must read back the exact values, so a value that is not finite is a bug.
    return Snapshot(progress.step, tensors, json.dumps(state, allow_nan=False), collect_host_generators(), progress.run)


def save(build: Build, progress: Progress, folder: Path, *, keep: int, file_per_tensor: bool = False) -> Path:
    """Writes `folder/step-N` and removes all but the `keep` newest and the best.

    Args:
        file_per_tensor: one file per tensor, which needs the least memory.

    Raises:
        RunError: it cannot be written (a full disk, for example); earlier checkpoints stay complete.
        MemoryError: not enough memory to write it; the same holds.
    """
    with _silence_one_process():
        return write(build, snapshot(build, progress, copied=False), folder, keep=keep, file_per_tensor=file_per_tensor)


def write(
    build: Build,
    content: Snapshot,
    folder: Path,
    *,
    keep: int,
    file_per_tensor: bool = False,
    group: ProcessGroup | None = None,
) -> Path:
    """Writes a snapshot as `folder/step-N`; arguments and errors as of `save`. Reads nothing that steps change.

    Args:
        group: of all ranks, for the collectives of the write.
    """
    import torch.distributed.checkpoint as dcp

    from preheat.engine import packed_shards

    final = folder / f"step-{content.step}"
    temporary = folder / f"step-{content.step}.writing"
    # The content goes to a name that no reader looks for; the last act is the rename.
    lead, many = build.mesh.rank == 0, build.mesh.world > 1
    try:
        if lead:
            # Leftovers of an earlier write whose process was killed.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        # Each rank needs the names of all tensors, including those of other ranks. This also waits for the folder.
        own = {name: t.nbytes for name, t in content.tensors.items()}
        # Merged in the order of ranks, so that every rank derives the same file numbers.
        packed = {name for name, t in content.tensors.items() if packed_shards.is_packed(t)}
        gathered = all_gather_object(build, (own, packed), group)
        sizes = {name: bytes for part, _ in gathered for name, bytes in part.items()}
        numbers = _assign_files(sizes, file_per_tensor=file_per_tensor)
        # safetensors aborts the process if it gets no memory, so the room is tested where an error can be raised.
        require_room(
            _COPIES * max(sum(n for name, n in own.items() if numbers[name] == file) for file in numbers.values())
        )
        numbers = packed_shards.assign_parts(numbers, sorted(set().union(*(names for _, names in gathered))))
        writer = packed_shards.Writer(str(temporary), fqn_to_index_mapping=numbers, save_distributed=many)
        # A collective: torch's planner makes each rank write its shards, and one rank what all of them hold.
        dcp.save(packed_shards.as_boxes(content.tensors), storage_writer=writer, process_group=group, no_dist=not many)
        # Random generators differ by rank, and each rank resumes with its own.
        generators = all_gather_object(build, content.generators, group)
        # Each rank hashes and syncs the files that it wrote, in parallel with the others.
        mine = temporary.glob(f"shard-{build.mesh.rank + 1:05d}-*" if many else "*")
        files = {p.name: {"bytes": p.stat().st_size, "sha256": compute_sha256(p)} for p in sorted(mine) if p.is_file()}
        # Content before names: after a crash, a renamed folder whose files were not synced could hold empty files.
        for name in files:
            _sync(temporary / name)
        # This gather also waits until every rank has synced its files.
        manifest = {name: entry for part in all_gather_object(build, files, group) for name, entry in part.items()}
        if lead:
            file = temporary / "state.json"
            file.write_text(json.dumps({**json.loads(content.state), "generators": generators}, allow_nan=False))
            manifest[file.name] = {"bytes": file.stat().st_size, "sha256": compute_sha256(file)}
            # Last of the files: a folder without it is incomplete, whatever else it has.
            (temporary / "manifest.json").write_text(to_json(manifest, indent=1))
            for p in (file, temporary / "manifest.json", temporary):
                _sync(p)
            if os.path.lexists(final):  # a damaged checkpoint that the run resumed before, or one of another run
                _clear_path(final, content.run)
            # The rename is atomic, so a reader sees the whole checkpoint or none.
            temporary.rename(final)
            # The new name is an entry of the parent folder, which must be synced for it to survive a crash.
            _sync(folder)
        all_gather_object(build, None, group)  # barrier: no rank continues before the checkpoint is complete
    # torch reports a full disk as OSError, RuntimeError or CheckpointException, by the layer that noticed it.
    except (OSError, RuntimeError, MemoryError, dcp.CheckpointException) as error:  # type: ignore[attr-defined]
        shutil.rmtree(temporary, ignore_errors=True)
        # MemoryError: the loop tries again with one file per tensor before it gives up on this checkpoint.
        if is_oom(error):
            raise MemoryError(f"{final}: out of memory while writing it: {str(error).splitlines()[-1]}") from None
        # Anything else (a broken collective, a bug) keeps its type and its traceback.
        if not isinstance(error, OSError) and "No space left" not in str(error) and "write" not in str(error).lower():
            raise
        reason = "no space left on the device" if "space left" in str(error) else str(error).strip().splitlines()[-1]
        raise RunError(
            f"{final}: cannot be written ({reason}); earlier checkpoints are intact: free disk space and continue "
            "with --resume"
        ) from None
    if lead:
        prune(folder, content.step, keep=keep, run=content.run)
    return final


def prune(folder: Path, step: int, *, keep: int, run: str) -> None:
    """Removes checkpoints of a run up to a step, all but the `keep` newest and the one that `best` names."""
    # Later checkpoints belong to steps that the run went back from; they are replaced when it reaches those steps.
    past = [p for p in _find_checkpoints(folder) if (parse_step(p.name) or 0) <= step and _is_of(p, run)]
    try:
        best = best_step(folder)
    except RunError:
        return  # which one is the best is unknown: all stay
    for old in past[keep:]:
        if parse_step(old.name) != best:
            _remove(old)


def best_step(folder: Path) -> int | None:
    """Returns the step that the file `best` names; None if there is none.

    Raises:
        RunError: the file does not name a checkpoint.
    """
    file = folder / BEST
    if not os.path.lexists(file):
        return None
    try:
        name = read_bytes(file).decode("utf-8", errors="replace").strip()
    except ValueError as error:
        raise RunError(f"{file}: cannot be read ({error}); name a checkpoint by its step") from None
    step = parse_step(name)
    if step is None:
        raise RunError(f"{file}: holds {quote_value(name, 40)} instead of a checkpoint's name; name one by its step")
    return step


def mark_best(folder: Path, step: int) -> None:
    """Makes the file `best` name a complete checkpoint, atomically.

    Raises:
        RunError: it cannot be written.
    """
    try:
        write_atomic(folder / BEST, f"step-{step}\n")
        # The new name must survive a crash before the former best checkpoint is removed.
        _sync(folder)
    except OSError as error:
        raise RunError(f"{folder / BEST}: cannot be written ({error.strerror})") from None


def steps_of(folder: Path, run: str) -> set[int]:
    """Returns the steps of a run's checkpoints, whose contents are not verified."""
    return {step for p in _find_checkpoints(folder) if (step := parse_step(p.name)) is not None and _is_of(p, run)}


def steps_after(folder: Path, step: int) -> list[int]:
    """Returns the steps of the later checkpoints, which `set_aside` renames."""
    return [later for path in _find_checkpoints(folder) if (later := parse_step(path.name) or 0) > step]


def set_aside(folder: Path, after: int) -> list[str]:
    """Renames the checkpoints of later steps, so that a run continues from an earlier one; returns their new names.

    Raises:
        RunError: one cannot be renamed.
    """
    names = []
    # The latest first: if this is interrupted, the run still has no gap.
    for path in _find_checkpoints(folder):
        if (parse_step(path.name) or 0) > after:
            try:
                names.append(_move_aside(path).name)
            except OSError as error:
                raise RunError(f"{path}: cannot be renamed ({error.strerror})") from None
    _sync(folder)
    return names


def put_back(folder: Path, steps: Iterable[int]) -> list[str]:
    """Gives checkpoints that `set_aside` renamed their names again; returns the names of those that it renames.

    Raises:
        RunError: one cannot be renamed.
    """
    names = []
    # The earliest first: if this is interrupted, the run has no gap.
    for step in sorted(steps):
        path = folder / f"step-{step}"
        numbers = {p: p.name.rpartition("-")[2] for p in folder.glob(f"{path.name}.aside-*")}
        aside = sorted((p for p, number in numbers.items() if number.isdecimal()), key=lambda p: int(numbers[p]))
        if aside and not os.path.lexists(path):
            try:
                aside[-1].rename(path)
            except OSError as error:
                raise RunError(f"{aside[-1]}: cannot be renamed ({error.strerror})") from None
            names.append(path.name)
    _sync(folder)
    return names


def chosen_step(folder: Path, choice: str) -> int | None:
    """Returns the step that `best`, `last` or a number names; None for the newest intact one.

    Raises:
        RunError: there is no best checkpoint, or the choice is none of these.
    """
    if choice == "last":
        return None
    if choice == "best":
        if (step := best_step(folder)) is None:
            raise RunError(
                f"{folder}: has no best checkpoint; a run keeps it if its recipe sets checkpoint.best, e.g. to "
                "validation_loss"
            )
        return step
    if (step := parse_step(f"step-{choice}")) is None:
        raise RunError(f"--checkpoint {quote_value(choice, 40)}: write best, last or a step")
    return step


def at_checkpoint(path: Path, choice: str | int | None) -> Path:
    """Returns the folder of a run's checkpoint, or the path itself for the newest intact one.

    Args:
        path: of a run.
        choice: best, last or a step; None: last.

    Raises:
        RunError: the path is not a run, or there is no such checkpoint.
    """
    if choice is None:
        return path
    own = parse_step(path.name)
    if own is not None and (path.parent.parent / "recipe.yaml").is_file():
        if str(choice) == str(own):
            return path
        raise RunError(f"{path}: is the checkpoint of step {own}, not {choice}; name the run")
    if not (path / "recipe.yaml").is_file():
        raise RunError(f"{path}: is not a run, so it has no checkpoint {choice}; leave --checkpoint out")
    folder = path / "checkpoints"
    step = chosen_step(folder, str(choice))
    if step is None:
        return path
    _require_step(folder, step)
    return folder / f"step-{step}"


def parse_step(name: str) -> int | None:
    """The step in the name of a checkpoint folder, or None.

    Example:
        >>> parse_step("step-12"), parse_step("step-012"), parse_step("step-²")
        (12, None, None)
    """
    # No leading zeros, so that each step has one name; not \d, which matches the digits of every script.
    match = re.fullmatch(r"step-(0|[1-9][0-9]{0,14})", name)
    return int(match[1]) if match else None


def _find_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    folders = [p for p in folder.glob("step-*") if parse_step(p.name) is not None and p.is_dir()]
    return sorted(folders, key=lambda p: -(parse_step(p.name) or 0))


def _is_of(path: Path, run: str) -> bool:
    """True if a checkpoint states this run and the step in its name; an unreadable one belongs to no run."""
    try:
        state = _read_state(path)
        return (state.run, state.step) == (run, parse_step(path.name))
    except ValueError:
        return False


def _remove(path: Path) -> None:
    """Removes the files that a checkpoint's manifest names, and its folder if it is then empty."""
    try:
        # Without a readable manifest nothing shows that preheat wrote the folder: it stays.
        names = [name for name in _read_manifest(path) if name != "state.json"]
    except ValueError:
        return
    # A link's target belongs to the user, and so does the link.
    if path.is_symlink():
        return
    with contextlib.suppress(OSError):  # files that cannot be removed stay
        for name in (*names, "state.json", "manifest.json"):  # last: what identifies the run
            (path / name).unlink(missing_ok=True)
        # Fails, and is suppressed, if the user has put other files into the folder.
        path.rmdir()


def _clear_path(path: Path, run: str) -> None:
    """Removes a checkpoint of this run; moves anything else of that name aside."""
    if not path.is_symlink() and _is_of(path, run):
        _remove(path)
    # Also after `_remove`, which leaves files that it does not know.
    if os.path.lexists(path):
        _move_aside(path)


def _move_aside(path: Path) -> Path:
    """Renames a path to the first free of `NAME.aside-1`, `-2`, ..., so that nothing is overwritten."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.aside-{number}")):
        number += 1
    return path.rename(aside)


def _read_manifest(path: Path) -> dict[str, JsonObject]:
    """The files of a checkpoint with their sizes and checksums.

    Raises:
        ValueError: the manifest is missing or incomplete, or names something that is not a file of the folder.
    """
    try:
        manifest = parse_json((path / "manifest.json").read_bytes())
    except OSError:
        raise ValueError("manifest.json is missing or incomplete") from None
    except ValueError as error:
        raise ValueError(f"manifest.json is missing or incomplete: {error}") from None
    if not isinstance(manifest, dict) or "state.json" not in manifest:
        raise ValueError("manifest.json is not a list of its files")
    for name, entry in manifest.items():
        # These names are read and deleted later: one that leads out of the folder could reach any file.
        if name in ("", ".", "..", "manifest.json") or "/" in name or "\0" in name:
            raise ValueError(f"manifest.json names {quote_value(name)}, which is not a file next to it")
        size, mark = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        # Not isinstance: True is an int too.
        if type(size) is not int or not isinstance(mark, str):
            raise ValueError(f"manifest.json does not have the size and checksum of {quote_value(name)}")
    return manifest


def _find_damage(path: Path, run: str = "") -> str | None:
    """Returns what is wrong with a checkpoint of a run, or None."""
    try:
        manifest = _read_manifest(path)
        for name, entry in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{shorten(name)} is missing"
            # The size first: a truncated file, the usual damage, is found without hashing gigabytes.
            if file.stat().st_size != entry["bytes"]:
                return f"{shorten(name)} has {file.stat().st_size:,} of {entry['bytes']:,} bytes"
            if compute_sha256(file) != entry["sha256"]:
                return f"{shorten(name)} was altered (its checksum differs)"
        state = _read_state(path)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    # After the files: a checkpoint of another run is reported as such only if it is intact.
    if state.run != run:
        return "it belongs to another run"
    if state.step != parse_step(path.name):
        return f"it holds step {state.step}"
    return None


def find(folder: Path, step: int | None = None, *, run: str = "") -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest complete checkpoint of a run (or that of `step`), and the skipped ones, each with its problem.

    Args:
        run: identity of the run, as in `Progress.run`.

    Raises:
        RunError: there is no checkpoint of `step`.
    """
    damaged: list[tuple[Path, str]] = []
    if step is not None:
        _require_step(folder, step)
    # Checksums of every file: a resumed run falls back to an older checkpoint rather than train on a damaged one.
    for path in _find_checkpoints(folder) if step is None else [folder / f"step-{step}"]:
        problem = _find_damage(path, run)
        if problem is None:
            return path, damaged
        damaged.append((path, problem))
    return None, damaged


def _require_step(folder: Path, step: int) -> None:
    folders = _find_checkpoints(folder)
    if folder / f"step-{step}" not in folders:
        there = ", ".join(path.name.removeprefix("step-") for path in reversed(folders))
        raise RunError(
            f"{folder}: has no checkpoint of step {step}; " + (f"there are: {there}" if there else "there is none yet")
        )


@dataclass
class State(Progress):
    """The content of state.json."""

    build: JsonObject = field(default_factory=dict)
    threads: int = 1
    world: int = 1
    generators: list[HostGenerators] = field(default_factory=list)


def _read_state(path: Path) -> State:
    """Reads the state.json of a checkpoint.

    Raises:
        ValueError: it is incomplete, or has another format.
    """
    try:
        values = parse_json((path / "state.json").read_bytes())
    except OSError as error:
        raise ValueError(f"state.json cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"state.json is incomplete: {error}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError("state.json is not one of a checkpoint")
    # Before the fields: another format may have other ones.
    if values["format"] != FORMAT:
        raise ValueError(
            f"it was written in format {quote_value(values['format'], 20)} by another version of preheat, and this one "
            f"reads {FORMAT}; resume with the version that started the run"
        )
    # The expected types are those of the dataclass's defaults; fields with a factory have none there and follow below.
    kinds: dict[str, Any] = {
        name: (int, float) if name == "elapsed" else type(f.default)
        for name, f in State.__dataclass_fields__.items()
        if f.default is not dataclasses.MISSING
    }
    kinds |= {"fingerprints": dict, "build": dict, "generators": list}
    for name, kind in kinds.items():
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int | float) and value < 0):
            raise ValueError(f"state.json has an invalid {name} ({quote_value(value, 40)})")
    if not 0 < values["world"] == len(values["generators"]) or not all(map(_is_x, values["generators"])):
        raise ValueError("state.json does not hold the generators of each process")
    return State(**{name: values[name] for name in kinds})


def _is_x(value: Any) -> bool:
    """True if a value could be the result of `collect_host_generators`."""
    try:
        (version, state, gauss), (kind, keys, position, has_gauss, cached) = value["python"], value["numpy"]
        # A throwaway generator validates Python's state; numpy's would be changed by a test, so its form is checked.
        random.Random().setstate((version, tuple(state), gauss))
        numbers = [*keys, position, has_gauss, cached]
        # 624 words of 32 bits are the state of the Mersenne Twister.
        return kind == "MT19937" and len(keys) == 624 and all(isinstance(n, int | float) for n in numbers)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def read_progress(path: Path) -> State:
    """The progress recorded in a checkpoint, without its tensors.

    Raises:
        RunError: it is incomplete, or has another format.
    """
    try:
        return _read_state(path)
    except ValueError as error:
        raise RunError(f"{path}: {error}") from None


def _build_reader(path: Path) -> StorageReader:
    """A reader of the manifest's files: torch's own reads the whole folder, and the last copy of a tensor wins."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystem

    try:
        names = [name for name in _read_manifest(path) if name.endswith(".safetensors")]
    except ValueError as error:
        raise RunError(f"{path}: {error}") from None

    class Listed(FileSystem):
        def ls(self, folder: str | os.PathLike[str]) -> list[str]:
            return [os.path.join(folder, name) for name in names]

    reader = dcp.HuggingFaceStorageReader(str(path))
    reader.fs = Listed()
    return reader


@contextlib.contextmanager
def _convert_read_errors(path: Path) -> Iterator[None]:
    """Turns torch's errors when reading a checkpoint into ours."""
    import torch.distributed.checkpoint as dcp

    try:
        with _silence_one_process():
            yield
    except dcp.CheckpointException as error:  # type: ignore[attr-defined]
        message = str(error).splitlines()[-1]
        if is_oom(error):
            raise MemoryError(f"{path}: out of memory while reading it: {message}") from None
        raise RunError(
            f"{path}: cannot be read ({shorten(message, 200)}); it does not hold what this model needs"
        ) from None


def _require_kinds(path: Path, stored: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Raises RunError if integers would be read into floating-point tensors, or the other way: torch converts them."""
    for name, t in tensors.items():
        properties = getattr(stored.get(name), "properties", None)
        if properties is not None and properties.dtype.is_floating_point != t.dtype.is_floating_point:
            raise RunError(
                f"{path}: {shorten(name)} is stored as {properties.dtype} and needed as {t.dtype}: another "
                "version of preheat wrote it; continue with that version, or start a new run"
            )


def load(build: Build, path: Path) -> Progress:
    """Loads a complete checkpoint into a build, in place, and returns its progress.

    Raises:
        RunError: tensors that the build needs are missing, or of another kind.
        MemoryError: not enough memory to read it.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    from preheat.engine import packed_shards

    state = read_progress(path)
    # A rank beyond the world size of the saved run starts with the generators of rank 0.
    rank = build.mesh.rank if build.mesh.rank < state.world else 0
    # These are the build's own tensors, sharded as it is: torch reads each rank's part straight into them.
    tensors, reader = _collect_tensors(build, rank), _build_reader(path)
    with _convert_read_errors(path):
        stored = reader.read_metadata().state_dict_metadata
        _require_kinds(path, stored, tensors)
        # A run may move AdamW to the host: its weights in the checkpoint are fp32, and are the masters there.
        masters = {name: p for name, p in _find_masters(build).items() if name not in stored}
        read = {name: t for name, t in tensors.items() if name not in masters}
        dcp.load(packed_shards.as_boxes(read), storage_reader=reader, no_dist=build.mesh.world == 1)
        with torch.no_grad():
            for name, p in masters.items():
                tensors[name].copy_(p)
    # torch returned copies of the generators' states, so the loaded values must be handed back.
    restore_torch_generators(tensors, rank)
    restore_host_generators(state.generators[rank])
    for name, saved in state.build.items():
        build.state.saved[name].load_state_dict(saved)
    # Stochastic rounding draws its bits by these numbers (`Numbered` in ops/optim/optimizers.py).
    build.state.step, build.state.skipped = state.step, state.skipped
    return Progress(**{key: getattr(state, key) for key in Progress.__dataclass_fields__})


def load_weights(build: Build, path: Path) -> None:
    """Loads only the parameters of a checkpoint into a build, in place: for evaluation, generation and export.

    Raises:
        RunError: parameters are missing.
    """
    import torch.distributed.checkpoint as dcp

    from preheat.engine import packed_shards

    # A subset is enough: torch reads the requested names only and ignores the rest.
    tensors = {name: t for name, t in _collect_tensors(build).items() if name.startswith("model.")}
    with _convert_read_errors(path):
        dcp.load(packed_shards.as_boxes(tensors), storage_reader=_build_reader(path), no_dist=build.mesh.world == 1)
