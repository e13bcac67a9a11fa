"""Reads another trainer's configuration to a recipe, and accounts for every key of it. No torch.

A trainer is a `Format`: one file of this package with one table of keys. A key of the table has a handler, which fills
in `Settings` and says what became of the key; a key that is not in the table is not understood.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import recipe as recipes
from preheat.core.config_reading import (
    AssumedDefault,
    ConfigReading,
    KeyNotUnderstood,
    KeyTaken,
    KeyWithoutEffect,
)
from preheat.errors import RecipeError
from preheat.interop.deepspeed import find_file
from preheat.interop.keys import Assumed, Computed, Entry, Handler, Ignore, NoEffect, Reference, Takes, iterate_entries
from preheat.interop.script import ARGUMENT_CALLS, read_script
from preheat.interop.settings import OURS, Settings, build_values
from preheat.interop.trainer_defaults import Default, TrainerDefaults
from preheat.recipe import Recipe
from preheat.recipe.yaml_io import compose, read_text
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["ForeignConfig", "Format", "find_format", "read_config"]

_log = logging.getLogger("preheat.interop")  # shown by the command line

_RECIPE_ONLY = ("batch", "data", "stop", "techniques")
"""Sections that only a recipe has: a file with one of them is a recipe, whatever else is in it."""

_CLASS = "class_path"
"""With this key, a section names a Python class, as in files of jsonargparse: no recipe does."""


_FOUR_BIT = re.compile(r"[-_](awq|gptq|nf4|bnb-4bit|4bit|int4)\b", re.IGNORECASE)
"""Ends of the names of checkpoints in 4 bits."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """The configuration format of a trainer.

    Attributes:
        name: as in `--from`.
        title: the trainer's own spelling.
        requires: a file of the format has all of these keys.
        unique: it has at least one of these, which no other format has; empty: `requires` are unique.
        defaults: what the trainer does that the file leaves out.
        table: dotted key -> handler; an item of a list is a `*`, and a `*` at the end stands for any key.
        without: a file with one of these keys is not of the format.
        general: other trainers' files have its keys too: it is meant only if no other format is.
        variants: top-level key of the file -> defaults that hold in its presence.
        renamed: old key -> the key that replaced it, which handles it.
        removed: key of an earlier version -> what to write instead.
        finish: applies the trainer's own rules once all keys are read; takes the keys by name, to blame.
    """

    name: str
    title: str
    requires: frozenset[str]
    unique: frozenset[str]
    defaults: TrainerDefaults
    table: Mapping[str, Handler]
    without: frozenset[str] = frozenset()
    general: bool = False
    variants: Mapping[str, Mapping[str, Default]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    finish: Callable[[Settings, Mapping[str, Entry]], Sequence[str]] = lambda settings, entries: ()

    def find_own_key(self, values: Mapping[str, object]) -> str | None:
        """Returns a key by which a file is of this format; None if it is not."""
        if not self.requires <= values.keys() or self.without & values.keys():
            return None
        own = self.unique or self.requires
        return next((key for key in values if key in own), None)

    def choose_defaults(self, values: Mapping[str, object]) -> Mapping[str, Default]:
        """Returns the defaults that hold for a file."""
        defaults = dict(self.defaults.settings)
        for key, others in self.variants.items():
            defaults |= others if key in values else {}
        return defaults


@dataclass(frozen=True)
class ForeignConfig:
    """A recipe that was read from another trainer's configuration.

    Attributes:
        reads_data: True if the data is on this machine, and can be read for a plan.
        names_data: False if neither the file nor an override names the data: it cannot be trained on.
    """

    recipe: Recipe
    reading: ConfigReading
    reads_data: bool
    names_data: bool = True


def find_format(text: str, where: str, formats: Mapping[str, Format], name: str | None = None) -> Format | None:
    """Returns the format of a file, by its keys; None if it is none of these, as a recipe is not.

    Args:
        name: the format that the user states.

    Raises:
        RecipeError: the file has keys of two formats, or is not YAML.
    """
    if name is not None:
        return formats[name]
    values, lines = _parse(text, where)
    if not isinstance(values, Mapping) or any(_is_section(values.get(key)) for key in _RECIPE_ONLY):
        return None
    candidates = [(format, key) for format in formats.values() if (key := format.find_own_key(values)) is not None]
    candidates = [pair for pair in candidates if not pair[0].general] or candidates
    if len(candidates) > 1:
        (first, key), (second, other) = sorted(candidates[:2], key=lambda pair: lines[(pair[1],)])
        raise RecipeError(
            f"{where}:{lines[(other,)]}: {other}: is a key of {second.title}, and {key} (line {lines[(key,)]}) of "
            f"{first.title}; leave one format out, or name it: --from {first.name}"
        )
    if not candidates and where.endswith(".py"):
        raise RecipeError(
            f"{where}: calls none of {', '.join(ARGUMENT_CALLS)} with its arguments, which preheat reads from a script "
            "without running it"
        )
    if not candidates:
        _refuse_companion(values, lines, where)
    return candidates[0][0] if candidates else None


def _parse(text: str, where: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Returns the values of a YAML or JSON file, or of the calls of a script, with the line of each key."""
    return read_script(text, where) if where.endswith(".py") else compose(text, where)


def _is_section(value: object) -> bool:
    """Returns True for a section of a recipe."""
    return isinstance(value, Mapping) and _CLASS not in value


_COMPANIONS = {
    "distributed_type": ("accelerate", "--accelerate"),
    "zero_optimization": ("DeepSpeed", "--deepspeed"),
    "train_micro_batch_size_per_gpu": ("DeepSpeed", "--deepspeed"),
}
"""Keys of files that stand beside a trainer's, with the option that names them."""


def _refuse_companion(values: Mapping[str, object], lines: Mapping[tuple[str, ...], int], where: str) -> None:
    """Raises RecipeError if a file has neither a model nor data, since it stands beside a trainer's file."""
    for key, (owner, option) in _COMPANIONS.items():
        if key in values:
            raise RecipeError(
                f"{where}:{lines[(key,)]}: {key}: is a key of {owner}'s file, which has no model, data and learning "
                f"rate; name it beside the trainer's: preheat plan TRAINER.yaml {option} {where}"
            )


def read_config(
    text: str,
    file: Path,
    format: Format,
    *,
    where: str | None = None,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    deepspeed: Path | None = None,
    accelerate: Path | None = None,
    warn: bool = False,
) -> ForeignConfig:
    """Reads a configuration to a recipe.

    Args:
        text: of the file.
        file: relative paths in it may start from its folder.
        where: name of the file in errors.
        overrides: `key=value` of the recipe.
        devices: number of devices; None: as many as the file's degrees of parallelism need.
        deepspeed: DeepSpeed's JSON; by default the file that the configuration names.
        accelerate: accelerate's YAML.
        warn: log keys that are not understood.

    Raises:
        RecipeError: a key has the wrong type, belongs to a feature that cannot be planned, or contradicts another; with
            file, line and key.
    """
    where = where or str(file)
    values, lines = _parse(text, where)
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: must be a mapping of keys, got {quote_value(values)}")
    defaults = format.choose_defaults(values)
    stated: dict[str, Any] = {"lora_dropout": format.defaults.adapter_dropout}
    stated |= {key: default.value for key, default in defaults.items()}
    settings = Settings(name=file.stem, home=file.parent, devices=devices, **stated)
    entries = list(iterate_entries(values, lines, where))
    entries += _read_companions(format, entries, settings.home, deepspeed, accelerate)
    outcomes = [(entry, _handle(format, settings, entry)) for entry in entries]
    by_name = {entry.name: entry for entry in entries}
    assumptions = [*format.finish(settings, by_name), *_describe_assumptions(settings)]
    named = settings.model is not None or settings.family is not None
    if not named and not any(item.startswith(_MODEL) for item in overrides):
        missing = " or ".join(sorted(format.requires)) or "model_name_or_path"
        raise RecipeError(f"{where}: {missing}: names no model; add it, or --set model.path=PATH")
    if settings.adapter and not settings.quantized and _FOUR_BIT.search(settings.model or ""):
        settings.quantized = True
        assumptions.append(f"{settings.model} is in 4 bits by its name: its base is planned as NF4")
    built = build_values(settings)
    sources = _find_blame(outcomes)
    recipe = recipes.read_values(built, where=where, sources=sources, overrides=overrides, warn=False)
    reads_data = _is_data_here(recipe)
    if not reads_data and (text := _describe_absent_data(recipe, named=bool(settings.sources))):
        assumptions.append(text)
    reading = _build_reading(format, where, outcomes, defaults, built, assumptions)
    if warn:
        for key in reading.not_understood:
            _log.warning("%s:%d: %s: not understood; %s", key.file or where, key.line, key.key, key.assumed)
    names_data = bool(settings.sources) or any(item.startswith("data.") for item in overrides)
    return ForeignConfig(recipe, reading, reads_data, names_data)


_MODEL = ("model.path=", "model.size=", "model.preset=")
"""Overrides that name the model of a file that names none, such as `TrainingArguments` alone."""


def _read_companions(
    format: Format, entries: Sequence[Entry], home: Path, deepspeed: Path | None, accelerate: Path | None
) -> list[Entry]:
    """Returns the keys of the files beside a configuration: those that the user names, or that it names itself.

    Raises:
        RecipeError: the trainer has no such file, or it cannot be read.
    """
    for option, file in (("deepspeed", deepspeed), ("accelerate", accelerate)):
        if file is not None and not any(key.startswith(f"{option}.") for key in format.table):
            raise RecipeError(f"--{option}: {file}: {format.title} takes no such file; leave it out")
    beside = [] if accelerate is None else _read_companion(accelerate, "accelerate")
    if deepspeed is None:
        named = (entry for entry in [*entries, *beside] if entry.path[-1] in ("deepspeed", "deepspeed_config_file"))
        names = [entry.value for entry in named if isinstance(entry.value, str)]
        deepspeed = next((found for name in names if (found := find_file(name, home)) is not None), None)
    return beside + ([] if deepspeed is None else _read_companion(deepspeed, "deepspeed"))


def _read_companion(file: Path, section: str) -> list[Entry]:
    where = shorten(str(file), 200)
    values, lines = compose(read_text(file, where), where)
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: must be a mapping of keys, got {quote_value(values)}")
    return [replace(entry, path=(section, *entry.path)) for entry in iterate_entries(values, lines, where)]


def _handle(format: Format, settings: Settings, entry: Entry) -> Takes | NoEffect | Assumed:
    key = ".".join("*" if step.isdigit() else step for step in entry.path)
    if entry.value is None:
        return NoEffect("null: the trainer's default")
    if key in format.removed:
        raise entry.error(f"{format.title} {format.defaults.version} has no such key; {format.removed[key]}")
    renamed = format.renamed.get(key)
    handler = format.table.get(renamed or key) or _find_pattern(format.table, key)
    if isinstance(entry.value, Reference):
        return NoEffect(f"the call of {entry.value} is read")
    if isinstance(entry.value, Computed) and not isinstance(handler, Ignore):
        return Assumed("the script computes it, and is not run; the trainer's default is taken")
    if handler:
        outcome = handler(settings, entry)
        if renamed and isinstance(outcome, Takes):
            note = f"{format.title} calls it {renamed} today"
            return Takes(outcome.fields, f"{note}; {outcome.note}" if outcome.note else note)
        return outcome
    near = difflib.get_close_matches(key, list(format.table), n=1, cutoff=0.85)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Assumed(f"the plan is without it{hint}")


def _find_pattern(table: Mapping[str, Handler], key: str) -> Handler | None:
    """Returns the handler of the closest section of which all keys are handled alike (`section.*`)."""
    steps = key.split(".")
    return next((table[name] for n in range(len(steps), 0, -1) if (name := ".".join([*steps[:n], "*"])) in table), None)


def _find_blame(outcomes: Sequence[tuple[Entry, object]]) -> dict[tuple[str, ...], str]:
    """Returns the key of the recipe -> the file, line and foreign key that set it, for errors."""
    return {
        tuple(ours.split(".")): f"{entry.where}:{entry.line}: {entry.name}"
        for entry, outcome in outcomes
        if isinstance(outcome, Takes)
        for name in outcome.fields
        for ours in OURS[name]
    }


def _build_reading(
    format: Format,
    where: str,
    outcomes: Sequence[tuple[Entry, Takes | NoEffect | Assumed]],
    defaults: Mapping[str, Default],
    built: JsonObject,
    assumptions: Sequence[str],
) -> ConfigReading:
    taken, without, unknown = [], [], []
    stated: set[str] = set()
    for entry, outcome in outcomes:
        place = {"key": entry.name, "value": entry.shown, "line": entry.line}
        key: Any = place | {"file": entry.where if entry.where != where else ""}
        if isinstance(outcome, Takes):
            stated |= set(outcome.fields)
            ours = tuple(dict.fromkeys(text for name in outcome.fields for text in _show_ours(name, built)))
            taken.append(KeyTaken(**key, ours=ours, note=outcome.note))
        elif isinstance(outcome, NoEffect):
            without.append(KeyWithoutEffect(**key, why=outcome.why))
        else:
            unknown.append(KeyNotUnderstood(**key, assumed=outcome.text))
    assumed = [
        AssumedDefault(ours=tuple(_show_ours(name, built)), what=default.what, source=default.source)
        for name, default in defaults.items()
        if name not in stated
    ]
    return ConfigReading(
        trainer=format.name,
        version=format.defaults.version,
        file=where,
        taken=tuple(taken),
        without_effect=tuple(without),
        not_understood=tuple(unknown),
        defaults=tuple(assumed),
        assumptions=tuple(assumptions),
    )


def _show_ours(name: str, built: JsonObject) -> list[str]:
    """Returns `key: value` of the recipe's keys that follow from a field of `Settings`."""
    shown = []
    for key in OURS[name]:
        value: object = built
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None:
            shown.append(f"{key}: {shorten(json.dumps(value, ensure_ascii=False), 100)}")
    return shown[:1] if name.startswith("sources.") else shown


def _describe_assumptions(settings: Settings) -> list[str]:
    """Returns what a plan assumes of the lengths of the rows, and of offloading."""
    notes = []
    if settings.offload and (settings.world == 1 or settings.sharding not in ("full", "gradients")):
        notes.append("offloading is planned with sharded weights on several devices only: the device keeps all states")
    if settings.warmup_steps and not settings.max_steps:
        notes.append(
            f"the warmup of {settings.warmup_steps:,} steps is a share of a run whose steps are not known here: "
            f"planned with {settings.warmup_ratio:g} of the run (--set schedule.warmup_ratio=R)"
        )
    if settings.packing:
        return notes
    return [
        *notes,
        f"rows are padded, not packed: every one is planned at the full {settings.length:,} tokens, so shorter ones "
        "take less memory and time",
    ]


def _describe_absent_data(recipe: Recipe, *, named: bool) -> str:
    """Returns what a plan lacks without the data, of which the file may name none; empty if nothing."""
    names = ", ".join(str(part.source) for part, _ in recipe.data.parts())
    absent = f"{shorten(names)} is not on this machine" if named else ""
    steps = "" if recipe.stop.max_steps else "the steps of an epoch are not known (--set stop.max_steps=N)"
    return ": ".join(filter(None, (absent, steps)))


def _is_data_here(recipe: Recipe) -> bool:
    """Returns True if all sources of the data are files or folders of this machine."""
    return all(isinstance(part.source, str) and Path(part.source).exists() for part, _ in recipe.data.parts())
