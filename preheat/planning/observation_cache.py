"""Content-addressed cache of observations, in memory and on disk.

The key covers everything that a dry run depends on: the recipe except name, seed, schedule, stop, checkpoint and
hardware; the model's configuration; kind and number of devices; the versions of torch and transformers; and preheat's
own source. The log of allocations is not stored on disk, only the memory that the allocator reserves for it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import recipe as recipes
from preheat.cache_folder import cache_folder, store_json
from preheat.core import Axis
from preheat.errors import RecipeError
from preheat.hardware.stored_values import Damaged, read_json
from preheat.planning.answer_cache import compute_source_digest
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.dry_run import observe
from preheat.planning.layer_extrapolation import extrapolate_all_layers, find_fullest_ranks, observe_few_layers
from preheat.planning.memory.cpu_heap import hold
from preheat.planning.observation import Observation
from preheat.planning.request import Request
from preheat.planning.worker_pool import freeze_garbage, run_tasks

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.planning.worker_pool import Task

__all__ = ["clear", "is_cached", "observe_cached", "prefetch"]

_FORMAT = 7
# Sections of a recipe that no dry run depends on.
_IRRELEVANT = (
    "name",
    "seed",
    "schedule",
    "stop",
    "checkpoint",
    "hardware",
)
_known: dict[str, Observation] = {}
_fullest: dict[str, list[int]] = {}  # key of a request -> its `find_fullest_ranks`


def observe_cached(request: Request, *, how: str = "few", rank: int | None = None, logged: bool = False) -> Observation:
    """Returns an observation of the recipe, from the cache or from a new dry run.

    Args:
        how: kind of dry run. `few`: extrapolated from few layers if possible; `whole`: all layers, with their log,
            which is extrapolated if possible; `enough`: as `whole`, or if that needs a dry run of all layers from
            twice the layers of `few`, for the GPU allocator's overhead; `marked`: a dry run of all layers,
            distinguished in `at`; `step`: no evaluation.
        rank: rank to observe; by default the one that needs the most memory, and the first of a `step`.
        logged: include the log of allocations, which is not on disk.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    ranks = _find_ranks(request, how, rank)
    if len(ranks) > 1:
        tasks: list[Task] = [{"request": request, "how": how, "rank": each} for each in ranks]
        prefetch(tasks)
        peaks = [max(observe_cached(**each).peak.values()) for each in tasks]
        ranks = [ranks[peaks.index(max(peaks))]]
    # Memory, then disk, then a dry run.
    path = _entry_path(request, how, ranks[0])
    observation = _known.get(path.stem)
    if observation is None and not logged:
        observation = _load(path)
    if observation is None or (logged and not observation.log):
        # Otherwise garbage collection takes a third of the time.
        with freeze_garbage():
            observation = _DRY_RUNS[how](request, rank=ranks[0])
        # Before it is stored, because a replay needs the log, which is not.
        # Estimates do not ask for it.
        if observation.log and observation.reserved is None and how != "step":
            observation.reserved = hold(observation.log, observation.streams, request.device)
        # As one string, which is encoded and compared in a fraction of the time of its thousands of values.
        text = json.dumps(_to_json(observation), allow_nan=False)
        # The digest detects files that another process was writing or that were damaged.
        store_json(path, {"sha256": _compute_digest(text), "observation": text})
    _known[path.stem] = observation
    return observation


def prefetch(calls: Iterable[Task]) -> None:
    """Fills the cache for all these argument sets of `observe_cached`, in the processes of `planning.worker_pool`.

    Recipes that cannot be built are skipped; `observe_cached` raises the reason later.
    """

    def mark_here(kwargs: Task) -> None:
        with suppress(RecipeError):
            observe_cached(**kwargs)

    run_tasks([dict(kwargs) for kwargs in calls if not is_cached(**kwargs)], mark_here)


def observe_for_others(task: Task) -> None:
    """Stores the observation of one worker task on disk; ignores recipes that cannot be built, as `prefetch` does."""
    with suppress(RecipeError):
        observe_cached(**task)
    # The parent reads it from disk; a worker that kept logs would grow with every task.
    clear()


def clear() -> None:
    """Clears the in-memory cache; the disk cache remains."""
    _known.clear()


def is_cached(request: Request, *, how: str, rank: int | None = None) -> bool:
    """True if `observe_cached` would find the observation in the cache."""
    try:
        ranks = _find_ranks(request, how, rank)
    except RecipeError:  # raised by `observe_cached`
        return False
    paths = [_entry_path(request, how, each) for each in ranks]
    return all(path.stem in _known or path.exists() for path in paths)


def _find_ranks(request: Request, how: str, rank: int | None) -> list[int]:
    """Returns the ranks that `observe_cached` observes, to choose one of them."""
    if rank is not None:
        return [rank]
    if how not in ("whole", "marked"):
        return [0]  # `few` and `enough` choose the rank themselves, and a `step` has no pipeline
    # Known per recipe, because the layers of a pipeline's stages follow from a dry run of the model.
    key = _compute_key(request, how, 0)
    if key not in _fullest:
        _fullest[key] = find_fullest_ranks(request)
    return _fullest[key]


def _entry_path(request: Request, how: str, rank: int) -> Path:
    return cache_folder() / "observations" / f"{_compute_key(request, how, rank)}.json"


def _observe_few_layers(request: Request, *, rank: int, quick: bool = True) -> Observation:
    del rank  # chosen by `observe_few_layers` itself
    return observe_few_layers(request, heap=request.device.kind == "cpu", quick=quick, observe_all=_observe_all)


def _observe_enough_micro_batches(request: Request, *, rank: int) -> Observation:
    return _extrapolate_observation(request) or _observe_few_layers(request, rank=rank, quick=False)


def _observe_whole(request: Request, *, rank: int) -> Observation:
    return _extrapolate_observation(request) or observe(request, rank=rank)


def _extrapolate_observation(request: Request) -> Observation | None:
    return extrapolate_all_layers(request, lambda few: observe_cached(few, how="marked", logged=True))


_DRY_RUNS: dict[str, Callable[..., Observation]] = {
    "few": _observe_few_layers,
    "enough": _observe_enough_micro_batches,
    "whole": _observe_whole,
    "marked": functools.partial(observe, by_layer=True),
    "step": functools.partial(observe, evaluated=False),
}


def _observe_all(calls: list[Task]) -> list[Observation]:
    tasks = [{"how": "marked" if kwargs.pop("by_layer", False) else "whole", **kwargs} for kwargs in calls]
    prefetch(tasks)
    return [observe_cached(**kwargs) for kwargs in tasks]


def _compute_key(request: Request, how: str, rank: int) -> str:
    values = {key: value for key, value in recipes.to_values(request.observed).items() if key not in _IRRELEVANT}
    # The name of the device is not part of the key: kind and capability decide which kernels run.
    parts = [
        _FORMAT,
        how,
        rank,
        values,
        request.config.to_dict(),
        request.vocabulary,
        request.device.kind,
        request.device.capability,
        request.device.expandable,
        request.world,
        _list_versions(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


@functools.cache
def _list_versions() -> list[str]:
    return [compute_source_digest(), *(importlib.metadata.version(name) for name in ("torch", "transformers"))]


def _to_json(observation: Observation) -> JsonObject:
    """Returns an observation as JSON values, without its log and the changes of techniques."""
    plain = (
        "peak",
        "categories",
        "flops",
        "model_flops",
        "parameters",
        "experts",
        "trained",
        "tokens",
        "passing",
        "slots",
        "compiled",
        "cudnn",
        "slowed",
        "idle",
        "reserved",
    )
    return {
        **{key: getattr(observation, key) for key in plain},
        "kernels": _to_rows(observation.kernels),
        "at": [[*key, sizes] for key, sizes in observation.at.items()],
        "groups": [[key, axes] for key, axes in observation.groups.items()],
    }


def _to_rows(kernels: Counter[Kernel]) -> list[list[object]]:
    return [
        [*(getattr(kernel, f.name) for f in dataclasses.fields(kernel)), count] for kernel, count in kernels.items()
    ]


def _to_counter(rows: list[list[Any]]) -> Counter[Kernel]:
    # JSON has lists only, and kernels are keys, which must be hashable.
    return Counter({Kernel(*map(_to_tuples, row[:-1])): row[-1] for row in rows})


def _load(path: Path) -> Observation | None:
    """Returns the stored observation; None if it is missing or damaged, since a new dry run takes seconds."""
    try:
        stored = read_json(path) or {}
    except Damaged:
        return None
    text = stored.get("observation")
    if not isinstance(text, str) or stored.get("sha256") != _compute_digest(text):
        return None
    values = json.loads(text)
    kernels = _to_counter(values.pop("kernels"))
    at = {(phase, place): sizes for phase, place, sizes in values.pop("at")}
    groups = {_to_tuples(key): tuple(map(Axis, axes)) for key, axes in values.pop("groups")}
    return Observation(**values, kernels=kernels, at=at, groups=groups)


def _compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
