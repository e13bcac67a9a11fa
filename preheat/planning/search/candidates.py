"""Search space: techniques with their settings, parallel layouts and micro-batch sizes.

The module names no technique. A technique that states its `search_numerics` may be added; the recipe's own techniques
stay as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

from preheat.core import (
    DATA,
    Axis,
    Context,
    Device,
    ModelFacts,
    Numerics,
    Problem,
    ProblemCode,
    Searchable,
    Technique,
    conflicts_of,
    parallel_tags,
    problems_of,
    registry,
    single_device,
    sizes_of,
)
from preheat.engine.builder import build_context, list_techniques
from preheat.errors import RecipeError
from preheat.models import hf
from preheat.planning.plan import count_steps
from preheat.planning.request import Request
from preheat.recipe import Recipe

__all__ = ["NUMERICS", "Settings", "Space", "find_candidate_problems", "describe_techniques", "worst_numerics"]

NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
"""Effects on the numbers, smallest first."""
Settings = tuple[Technique, ...]


def worst_numerics(techniques: Iterable[Technique]) -> Numerics:
    """Returns the largest change of numerics among these techniques."""
    given_up = (t.search_numerics() for t in techniques if isinstance(t, Searchable))
    return max((numerics for numerics in given_up if numerics), key=NUMERICS.index, default="exact")


def describe_techniques(added: Iterable[Technique], micro: int | None = None) -> str:
    """Describes techniques in a line: their names and the settings that differ from the defaults."""
    parts = []
    for t in added:
        # Accumulation shows as the rows of a micro-batch at the end of the line.
        if t.micro_batch_count() > 1 and not t.is_parallel():
            continue
        plain = type(t)()
        changed = [f"{key} {value}" for key, value in vars(t).items() if value != getattr(plain, key)]
        parts.append(t.name() + (f" ({', '.join(changed)})" if changed else ""))
    return ", ".join(parts or ["nothing added"]) + (
        f"; {micro} sequence{'s' if micro > 1 else ''} at a time" if micro else ""
    )


@dataclass(frozen=True)
class Space:
    """The techniques that may be added to a recipe on a number of devices.

    Attributes:
        request: what to plan. Its recipe lacks the techniques of `left_open`.
        allow: largest change of numerics that is allowed.
        left_open: techniques of the recipe with settings left to the planner; the search decides on them, regardless of
            `allow`.
    """

    request: Request
    allow: Numerics = "exact"
    left_open: Mapping[str, Searchable] = field(init=False)

    def __post_init__(self) -> None:
        own, device = self.request.recipe.techniques, self.request.device
        # The dataclass is frozen, so derived fields are set through `object`.
        open_here = {name: t for name, t in own.items() if isinstance(t, Searchable) and t.left_open(device)}
        object.__setattr__(self, "left_open", open_here)
        decided = {name: t for name, t in own.items() if name not in self.left_open}
        recipe = replace(self.request.recipe, techniques=decided)
        object.__setattr__(self, "request", replace(self.request, recipe=recipe))

    @property
    def recipe(self) -> Recipe:
        return self.request.recipe

    @property
    def device(self) -> Device:
        return self.request.device

    @property
    def world(self) -> int:
        return self.request.devices

    @cached_property
    def model(self) -> ModelFacts:
        return hf.read_facts(self.request.config)

    def context(self, recipe: Recipe, world: int | None = None) -> Context:
        """Returns the context of a recipe; raises RecipeError if the mesh does not match the number of devices."""
        context = build_context(recipe, self.request.config, self.device, world or self.world, facts=self.model)
        return replace(context, per_host=self.request.per_host)

    def is_allowed(self, technique: Technique) -> bool:
        if technique.name() in self.left_open:
            return True
        # None: a search never adds this technique.
        gives_up = technique.search_numerics() if isinstance(technique, Searchable) else None
        return gives_up is not None and NUMERICS.index(gives_up) <= NUMERICS.index(self.allow)

    def searched(self) -> list[type[Searchable]]:
        """Returns the techniques that may be added, in the order in which they are applied."""
        free = [
            cls
            for name, cls in registry().items()
            if name not in self.recipe.techniques
            and issubclass(cls, Searchable)
            and self.device.kind in cls.searched_on
            and cls().search_numerics() is not None
        ]
        return sorted(free, key=lambda cls: (cls.stage, cls.name()))

    def over_run(self, speed: float, added: Iterable[Technique]) -> float:
        """Returns the tokens/s of the whole run, given those of its steps and the startup time of the techniques."""
        start = sum(t.startup_seconds(self.device) for t in added)
        stop, batch = self.recipe.stop, self.recipe.batch
        steps = count_steps(self.recipe, self.request.rows)
        # Seconds of the run by its steps and by its time limit: the shorter one ends it.
        ends = [steps * batch.size * batch.seq_len / speed] if steps else []
        ends += [stop.hours * 3600] if stop.hours else []
        # Start-up (a compilation, for example) is spread over the run: it matters in short runs only.
        return speed / (1 + start / min(ends)) if ends else speed

    def single_device_techniques(self) -> list[type[Searchable]]:
        """Returns the techniques that also work on a single device, without gradient accumulation."""
        shared = parallel_tags()
        return [
            cls
            for cls in self.searched()
            if not cls.is_parallel() and not cls.needs & shared and cls().micro_batch_count() == 1
        ]

    def layouts(self) -> Iterator[Settings]:
        """Yields the parallel layouts, each a set of techniques; () for a single device."""
        if self.world == 1:
            yield ()
            return
        alone = set(self.single_device_techniques())
        # Parallel techniques, and those that build on the tags of one.
        spread = [cls for cls in self.searched() if cls not in alone and cls().micro_batch_count() == 1]
        given = list(self.recipe.techniques.values())
        # Degree 0 takes all devices that the other axes leave, so there may be one such technique only.
        is_open = any(0 in t.degrees().values() for t in given)
        open_ended = [cls for cls in spread if 0 in cls().degrees().values() and not _is_inner_parallel(cls)]
        extras = [t for cls in spread if not cls.is_parallel() for t in self._list_options(cls)]
        inner = [[None, *self._list_options(cls)] for cls in spread if cls.is_parallel() and _is_inner_parallel(cls)]
        for cut in itertools.product(*inner):
            chosen = tuple(t for t in cut if t is not None)
            used = math.prod(size for t in (*given, *chosen) for size in t.degrees().values() if size)
            # Tensor parallelism across hosts is not tried: its collectives are exposed in every layer.
            if self.world % used or any(t.degrees().get(Axis.TENSOR, 1) > self.request.per_host for t in chosen):
                continue
            if used == self.world or is_open:
                yield chosen
                continue
            for t in (t for cls in open_ended for t in self._list_options(cls, (*given, *chosen))):
                yield (*chosen, t)
                # Techniques that build on the tags of a parallel one, one at a time.
                yield from ((*chosen, t, also) for also in extras if self._is_useful(also, (*chosen, t)))

    def _is_useful(self, t: Technique, layout: Settings) -> bool:
        """True if a technique that is not parallel by itself can be added to a layout."""
        tags = frozenset(tag for other in (*self.recipe.techniques.values(), *layout) for tag in other.provided())
        sizes = self.sizes((*self.recipe.techniques.values(), *layout))
        if sizes is None or not t.needs <= tags:
            return False
        return not problems_of(t, Context(self.recipe, self.model, self.device, tags | self.model.storage_tags, sizes))

    def settings_of(self, cls: type[Searchable]) -> Searchable:
        """Returns a technique as the recipe has it if that leaves settings open, else with its defaults."""
        return self.left_open.get(cls.name()) or cls()

    def _list_options(self, cls: type[Searchable], others: Iterable[Technique] = ()) -> list[Technique]:
        """Returns the allowed settings of a technique, for a mesh with the degrees of others and the rest sharded."""
        sizes = dict.fromkeys(Axis, 1)
        for t in others:
            sizes |= {axis: size for axis, size in t.degrees().items() if size > 1}
        sizes[Axis.SHARD] *= self.world // math.prod(sizes.values())
        tags = frozenset(tag for t in list_techniques(self.recipe) for tag in t.provided()) | self.model.storage_tags
        context = Context(self.recipe, self.model, self.device, tags, sizes, self.request.per_host)
        return [t for t in self.settings_of(cls).options(context) if self.is_allowed(t)]

    def add_techniques(self, added: Iterable[Technique]) -> Request:
        """Returns the request with these techniques added to its recipe, on all devices."""
        techniques = {**self.recipe.techniques, **{t.name(): t for t in added}}
        parallel = replace(self.recipe.parallel, devices=self.world)
        return replace(self.request, recipe=replace(self.recipe, techniques=techniques, parallel=parallel))

    def to_single_device(self, added: Iterable[Technique]) -> Request:
        """Returns the request for one device and batch size 1: without parallelism and gradient accumulation."""
        recipe = self.add_techniques(added).recipe
        techniques = {name: t for name, t in single_device(recipe.techniques).items() if t.micro_batch_count() == 1}
        parallel = replace(recipe.parallel, devices=1)
        model = recipe.model
        # A model of one layer must contain experts.
        if getattr(self.request.config.get_text_config(), "first_k_dense_replace", None):
            model = replace(model, config={**model.config, "first_k_dense_replace": 0})
        batch = replace(recipe.batch, size=1)
        recipe = replace(recipe, model=model, techniques=techniques, parallel=parallel, batch=batch)
        return replace(self.request, recipe=recipe, world=1)

    def to_two_devices(self, spread: Technique) -> Request:
        """Returns the request for two devices that share rows by a parallel technique, with a row each."""
        request = self.to_single_device(())
        recipe = request.recipe
        recipe = replace(
            recipe,
            techniques={**recipe.techniques, spread.name(): spread},
            parallel=replace(recipe.parallel, devices=2),
            batch=replace(recipe.batch, size=2),
        )
        return replace(request, recipe=recipe, world=2)

    def divides_evenly(self, sizes: Mapping[Axis, int]) -> bool:
        """True if the batch divides evenly across the data-parallel ranks."""
        return self.recipe.batch.size % math.prod(sizes[axis] for axis in DATA) == 0

    def sizes(self, techniques: Iterable[Technique]) -> dict[Axis, int] | None:
        """Returns the mesh of these techniques; None if their degrees do not multiply to the number of devices."""
        try:
            return sizes_of(techniques, self.world)
        except ValueError:
            return None

    def sizes_of(self, recipe: Recipe) -> Mapping[Axis, int]:
        """Returns the mesh of a valid recipe."""
        return self.context(recipe).sizes


def _is_inner_parallel(cls: type[Technique]) -> bool:
    """True if the technique splits something other than the batch (layers, tensors, sequences)."""
    return not set(cls().degrees()) & set(DATA)


def find_candidate_problems(space: Space, candidate: Request) -> list[Problem]:
    """Returns why a candidate cannot be used; empty if it can."""
    try:
        context = space.context(candidate.recipe, candidate.world)
    except RecipeError as error:
        return [Problem("", ProblemCode.DEVICES, str(error))]
    return conflicts_of(list_techniques(candidate.recipe), context)
