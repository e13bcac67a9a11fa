"""Writes a recipe as another trainer's configuration, and accounts for every key of the recipe. No torch.

A trainer's writer says what its file can say, key by key, in a `Draft`. What the trainer would then do is compared with
the recipe: each key that differs is left out, and listed with the reason. Nothing is dropped in silence.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import normpath
from pathlib import Path
from typing import Any, Protocol

from preheat.core import Slot, Stage, Tag, Technique, registry
from preheat.core.schema import Data
from preheat.errors import RecipeError
from preheat.interop.deepspeed import add_masters
from preheat.interop.recipe_settings import SOURCE_KEYS, name_layers, read_recipe, resolve_recipe
from preheat.interop.settings import Settings, build_values
from preheat.interop.trainer_defaults import Default
from preheat.recipe import Recipe, parse, to_values
from preheat.recipe.unused_keys import find_unused_keys
from preheat.sanitize import shorten

__all__ = ["Draft", "LeftOut", "Write", "Written", "compare"]

_MISSING = object()
_OWN_SECTIONS = ("tracking", "sample", "hardware", "evaluate", "checkpoint")
"""Sections about watching a run, which change no weight that it ends with."""
_OWN_KEYS = ("data.preflight", "data.prefetch", "data.workers", "parallel.timeout", "techniques.gradient_accumulation")
_SPLIT = frozenset({Stage.SHARD, Stage.PARALLEL, Stage.PIPELINE_SPLIT})
_FASTER = frozenset({Tag.FUSED_OPERATORS, Tag.FUSED_LAYERS})


@dataclass(frozen=True)
class LeftOut:
    """A key of the recipe that the trainer's file does not say.

    Attributes:
        key: dotted key of the recipe.
        value: as in the recipe; None if the trainer adds what the recipe is without.
        why: for people.
        same_result: the run without it has the same losses but for rounding, with more memory or time.
    """

    key: str
    value: object
    why: str
    same_result: bool

    def describe(self) -> str:
        """Returns `key: value: why` for people."""
        shown = (
            "" if self.value is None else f" {shorten(json.dumps(self.value, ensure_ascii=False, default=str), 80)}:"
        )
        return f"{self.key}:{shown} {self.why}"


class Write(Protocol):
    """Writes a recipe as a trainer's configuration."""

    def __call__(self, recipe: Recipe, folder: Path = Path()) -> Written:
        """Returns the configuration.

        Args:
            folder: of the file, from where the run is started.

        Raises:
            RecipeError: the recipe has no such form at all.
        """


@dataclass(frozen=True)
class Written:
    """A recipe as another trainer's configuration.

    Attributes:
        values: the trainer's keys in the order of the file, with nested sections.
        defaults: dotted keys of `values` that are the trainer's own defaults: a file is the same run without them.
        left_out: what the file does not say.
        start: the commands that start the run, with `{file}` for the name of the file.
        beside: name of a file beside it -> its text.
        notes: what else a user should know.
    """

    values: Mapping[str, Any]
    defaults: frozenset[str]
    left_out: tuple[LeftOut, ...]
    start: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def brief(self) -> dict[str, Any]:
        """Returns the keys without the trainer's own defaults."""
        return _without(self.values, self.defaults, "")

    @property
    def lost(self) -> tuple[LeftOut, ...]:
        """Keys left out that change the result."""
        return tuple(item for item in self.left_out if not item.same_result)


def _without(values: Mapping[str, Any], keys: frozenset[str], prefix: str) -> dict[str, Any]:
    brief = {}
    for key, value in values.items():
        if (name := f"{prefix}{key}") in keys:
            continue
        if isinstance(value, Mapping) and value:
            if value := _without(value, keys, f"{name}."):
                brief[key] = value
        else:
            brief[key] = value
    return brief


class Draft:
    """A trainer's file in the making.

    Attributes:
        recipe: with the values that preheat would find by itself (`resolve_recipe`).
        settings: of the recipe.
        said: the settings of the trainer's run, by its defaults and by the keys so far.
        spelling: the name in `say` and `put` -> the trainer's own.
        start: commands that start the run.
        beside: name of a file beside it -> its text.
    """

    def __init__(
        self,
        recipe: Recipe,
        title: str,
        defaults: Mapping[str, Default],
        *,
        adapter_dropout: float = 0.0,
        spelling: Mapping[str, str] | None = None,
        companion: bool = False,
        checkpoint: bool = True,
    ) -> None:
        """Begins a file.

        Args:
            title: the trainer's name.
            defaults: what the trainer does that the file leaves out.
            adapter_dropout: its default.
            companion: the file goes beside a trainer's, which has the model and the data.
            checkpoint: the trainer takes its model from a checkpoint.

        Raises:
            RecipeError: the recipe names no checkpoint, does not say what batch a device has, or names a kind of layers
                of a model that is not known here.
            DataError: the rows of a file have no known layout.
        """
        self.recipe = resolve_recipe(recipe) if companion else name_layers(resolve_recipe(recipe))
        self.title = title
        self.settings = read_recipe(self.recipe)
        stated: dict[str, Any] = {"lora_dropout": adapter_dropout}
        stated |= {name: default.value for name, default in defaults.items()}
        self.said = Settings(name=self.settings.name, devices=self.settings.devices, **stated)
        self.spelling = spelling or {}
        self.start: list[str] = []
        self.beside: dict[str, str] = {}
        self._notes: list[str] = []
        self._values: dict[str, Any] = {}
        self._defaults: set[str] = set()
        self._covered: set[str] = set()
        self._why = dict.fromkeys(
            _OWN_SECTIONS, "has no effect on the trained weights; the trainer has keys of its own"
        )
        self._why["batch.size"] = "no whole micro-batch makes it on these devices with this accumulation"
        self._refused: list[LeftOut] = []
        if not companion:
            self._check_task(checkpoint)
        self._check_devices()

    def _check_task(self, checkpoint: bool) -> None:
        recipe, settings = self.recipe, self.settings
        if checkpoint and settings.model is None:
            raise RecipeError(f"model.path: names no checkpoint, which {self.title} needs; add --set model.path=PATH")
        if recipe.optimizer.lr == "auto":
            self.refuse("optimizer.lr", "auto", "state the number that `preheat plan` shows: --set optimizer.lr=NUMBER")
        for source in settings.sources:
            if source["source"] in ("stdlib", "docstrings"):
                raise RecipeError(
                    f"data.source: {source['source']}: is preheat's own text, which {self.title} has not; name the "
                    "data: --set data.source=PATH"
                )

    def _check_devices(self) -> None:
        recipe, settings = self.recipe, self.settings
        splits = [name for name, technique in recipe.techniques.items() if _splits_work(type(technique))]
        if splits and settings.world == 1:
            raise RecipeError(
                f"parallel.devices: {recipe.parallel.devices or 'null'}: {self.title}'s file is for a number of "
                f"devices, and techniques.{splits[0]} for several; add --set parallel.devices=N"
            )

    def put(self, key: str, value: object, *, default: bool = False) -> None:
        """Writes a key that the recipe has no counterpart of.

        Args:
            key: dotted; as the shared names are, before `spelling`.
            default: it is the trainer's own default.
        """
        *sections, last = self.spelling.get(key, key).split(".")
        at = self._values
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
        if default:
            self._defaults.add(self.spelling.get(key, key))

    def say(self, key: str, *names: str, value: object = _MISSING, always: bool = False) -> None:
        """Writes a key for fields of the settings.

        Args:
            names: fields of `Settings`, which the trainer then has as the recipe does.
            value: of the key; by default that of the first field.
            always: the key is no default even if its value is.
        """
        same = all(getattr(self.said, name) == getattr(self.settings, name) for name in names)
        plain = all(getattr(_plain_settings(), name) == getattr(self.settings, name) for name in names)
        self.agree(*names)
        if value is _MISSING:
            value = getattr(self.settings, names[0])
        self.put(key, value, default=same and plain and not always)

    def agree(self, *names: str) -> None:
        """Records that the trainer has these fields of the settings as the recipe does."""
        for name in names:
            setattr(self.said, name, getattr(self.settings, name))

    def cover(self, key: str) -> None:
        """Records that a key of the recipe is said, though no field of the settings holds it."""
        self._covered.add(key)

    def explain(self, key: str, why: str) -> None:
        """States the reason if a key of the recipe, or one inside it, is left out."""
        self._why[key] = why

    def note(self, text: str) -> None:
        """Adds a note for the user."""
        self._notes.append(text)

    def refuse_layout(self, source: Mapping[str, object], why: str) -> None:
        """Leaves the layout of one source of the data out."""
        several, number = len(self.settings.sources) > 1, self.settings.sources.index(dict(source))
        self.refuse(f"data.source.{number}.layout" if several else "data.layout", source.get("layout", "auto"), why)

    def refuse(self, key: str, value: object, why: str) -> None:
        """Leaves a key of the recipe out."""
        self._refused.append(LeftOut(key, value, why, same_result=False))
        self.cover(key)

    def finish(self, scope: tuple[str, ...] = ()) -> Written:
        """Returns what was written, and what was left out.

        Args:
            scope: sections and keys of the recipe that such a file is about; empty: all.
        """
        if "deepspeed" in self._values and add_masters(self.said) and not self.settings.masters:
            self.explain(_PRECISION, f"DeepSpeed, by which {self.title} shards, keeps fp32 copies of the weights")
        unused = {name for name, _ in find_unused_keys(self.recipe)}
        left_out = list(self._refused)
        for key, value in compare(self.recipe, build_values(self.said)):
            inside = not scope or any(f"{key}.".startswith(f"{part}.") for part in scope)
            if key in self._covered or key in unused or not inside:
                continue
            same_result = _keeps_result(key)
            if value is None and same_result:
                self.note(f"{key}: {self.title} has it in any case: the same result")
                continue
            without = "does it in any case" if value is None else "has no key for it"
            left_out.append(LeftOut(key, value, self._find_reason(key) or f"{self.title} {without}", same_result))
        return Written(
            self._values,
            frozenset(self._defaults),
            tuple(left_out),
            tuple(self.start),
            dict(self.beside),
            tuple(self._notes),
        )

    def _find_reason(self, key: str) -> str | None:
        steps = re.sub(r"^data\.source\.\d+\.", "data.", key).split(".")
        names = [".".join(steps[:n]) for n in range(len(steps), 0, -1)]
        return next((self._why[name] for name in names if name in self._why), None)


_PRECISION = "techniques.mixed_precision.mode"


@functools.cache
def _plain_settings() -> Settings:
    """Returns the settings of a recipe that states nothing."""
    settings = read_recipe(parse("{model: {path: a}, stop: {epochs: 1}}"))
    settings.learning_rate = math.nan
    return settings


def _splits_work(technique: type[Technique]) -> bool:
    """Returns True for a technique that splits the work across devices; preferences have the same stage."""
    return technique.stage in _SPLIT and technique.numerics == "exact"


def _keeps_result(key: str) -> bool:
    """Returns True if a run without a key of the recipe has the same losses but for rounding."""
    section, _, rest = key.partition(".")
    if section in _OWN_SECTIONS or (key.startswith(_OWN_KEYS) and not key.endswith(".steps")):
        return True
    if section != "techniques":
        return False
    technique = registry()[rest.partition(".")[0]]
    if _splits_work(technique):
        # How the work is split across devices decides which of them it fits; its settings only how fast it is.
        return "." in rest and not rest.endswith(".degree")
    exact = technique.numerics == "exact" and Slot.OPTIMIZER not in technique.owns
    return exact or bool(technique.provides & _FASTER)


def compare(recipe: Recipe, values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yields the keys of a resolved recipe that another run lacks or has otherwise, with the recipe's values.

    A technique that only the other run has is yielded with None.

    Args:
        values: of the other run, as plain values of a recipe, which may leave out defaults.
    """
    ours, theirs = to_values(recipe), _complete(values)
    for section, inside in ours.items():
        if section == "name":
            continue
        if section == "techniques":
            yield from _compare_techniques(inside, theirs[section])
        elif section == "data":
            yield from _compare_data(inside, theirs[section])
        elif isinstance(inside, Mapping):
            for key, value in inside.items():
                if not _is_alike(value, theirs[section][key]) and not _is_implied(f"{section}.{key}", ours, theirs):
                    yield f"{section}.{key}", value
        elif not _is_alike(inside, theirs[section]):
            yield section, inside


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a recipe with all defaults, unchecked."""
    whole: dict[str, Any] = {}
    for part in dataclasses.fields(Recipe):
        if part.name == "techniques":
            known = registry()
            whole[part.name] = {
                name: _defaults_of(known[name]) | dict(settings) for name, settings in values[part.name].items()
            }
        elif part.default_factory is not dataclasses.MISSING:
            whole[part.name] = _defaults_of(part.default_factory) | dict(values.get(part.name, {}))  # type: ignore[arg-type]
        else:
            whole[part.name] = values.get(part.name, part.default)
    return whole


def _defaults_of(cls: type) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(cls)
    }


def _compare_techniques(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, settings in ours.items():
        if name not in theirs:
            plain = _defaults_of(registry()[name])
            yield f"techniques.{name}", {k: v for k, v in settings.items() if not _is_alike(v, plain[k])}
            continue
        mine, other = _resolve_technique(name, settings), _resolve_technique(name, theirs[name])
        for key, value in settings.items():
            if not _is_alike(mine[key], other[key]):
                yield f"techniques.{name}.{key}", value
    for name in theirs:
        # Data parallelism is what several devices do without any other technique.
        if name not in ours and name not in ("data_parallel", "gradient_accumulation"):
            yield f"techniques.{name}", None


def _resolve_technique(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a technique with the values that `auto` has on a GPU."""
    settings = dict(settings)
    if name == "preference":
        loss = settings["loss"]
        if settings["beta"] == "auto":
            settings["beta"] = 2.0 if loss == "simpo" else 0.1
        if settings["nll"] == "auto":
            settings["nll"] = float(loss in ("cpo", "orpo"))
    if name == "mixed_precision" and settings["frozen"] == "half":
        settings["frozen"] = "auto"
    return settings


def _compare_data(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    mine, other = Data(**ours).parts(), Data(**theirs).parts()
    several = len(mine) > 1
    if len(mine) != len(other):
        yield "data.source", ours["source"]
    for number, ((part, weight), (their_part, their_weight)) in enumerate(zip(mine, other, strict=False)):
        name = f"data.source.{number}" if several else "data"
        for key in SOURCE_KEYS:
            value = getattr(part, key)
            if key == "text" and part.layout not in ("text", "auto"):
                continue
            if key == "layout" and their_part.layout == "auto":
                continue  # recognized by the rows' fields
            other_value = getattr(their_part, key)
            if key == "source" and isinstance(value, str) and isinstance(other_value, str):
                value, other_value = normpath(value), normpath(other_value)
            if key in ("prompt", "completion") and value == key and other_value is None:
                continue  # its own name
            if not _is_alike(value, other_value):
                yield f"{name}.{key}", value
        if weight != their_weight:
            yield f"{name}.weight", weight
    layouts = {part.layout for part, _ in mine}
    for key, value in ours.items():
        if key in SOURCE_KEYS or _is_alike(value, theirs[key]):
            continue
        if key == "packing" and value == "auto":
            continue
        # Of texts, pairs, and prompts with completions, the trained part is known.
        if key == "train_on" and not layouts & {"auto", "messages", "sharegpt"}:
            continue
        yield f"data.{key}", value


def _is_implied(key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Returns True for a difference without effect, given the other keys."""
    if key == "model.preset":
        return theirs["model"]["path"] is not None
    kind = ours["schedule"]["kind"]
    if key == "schedule.decay_ratio":
        return kind != "wsd"
    if key == "schedule.min_lr_ratio":
        return kind == "constant"
    if key in ("parallel.engine", "parallel.zero_stage"):
        return theirs["techniques"].keys() & {"fsdp", "zero1"} != set()
    return key == "parallel.devices" and ours["parallel"]["devices"] in (None, 1)


def _is_alike(value: object, other: object) -> bool:
    if isinstance(value, float | int) and isinstance(other, float | int) and not isinstance(value, bool):
        return math.isclose(value, other, rel_tol=1e-9)
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
        return json.dumps(value, default=str) == json.dumps(other, default=str)
    return value == other
