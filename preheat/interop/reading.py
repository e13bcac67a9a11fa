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
from preheat.interop.deepspeed import find_file, keep_masters
from preheat.interop.keys import (
    Assumed,
    Computed,
    Entry,
    Handler,
    Ignore,
    NoEffect,
    Reference,
    Takes,
    iterate_entries,
    replace_value,
)
from preheat.interop.notebook import Cell, find_cell, read_notebook
from preheat.interop.script import ARGUMENT_CALLS, read_script
from preheat.interop.settings import OURS, Settings, build_values
from preheat.interop.shell import PROGRAMS, find_command, is_shell, read_shell
from preheat.interop.toml_files import read_toml
from preheat.interop.torchtitan_registry import is_registry, read_registry, split_name
from preheat.interop.trainer_defaults import Default, TrainerDefaults
from preheat.recipe import Recipe
from preheat.recipe.yaml_io import compose, read_text
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.interop.writing import Write

__all__ = ["ForeignConfig", "ForeignFile", "Format", "find_format", "read_arguments", "read_config"]

_log = logging.getLogger("preheat.interop")  # shown by the command line

_RECIPE_ONLY = ("batch", "data", "stop", "techniques")
"""Sections that only a recipe has: a file with one of them is a recipe, unless a format has it too (`sections`)."""

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
        sections: sections that recipes have too.
        toml: its files may be TOML; by `requires` alone, since no other TOML has them.
        general: other trainers' files have its keys too: it is meant only if no other format is.
        names_model: the key of the model, in the error without it; empty: one of `requires`.
        variants: key of the file, top-level or dotted -> defaults that hold in its presence.
        renamed: old key -> the key that replaced it, which handles it.
        removed: key of an earlier version -> what to write instead.
        finish: applies the trainer's own rules once all keys are read; takes the keys by name, to blame.
        write: writes a recipe as such a file (`writing.Draft`); None: the format is only read.
    """

    name: str
    title: str
    requires: frozenset[str]
    unique: frozenset[str]
    defaults: TrainerDefaults
    table: Mapping[str, Handler]
    without: frozenset[str] = frozenset()
    sections: frozenset[str] = frozenset()
    toml: bool = False
    general: bool = False
    names_model: str = ""
    variants: Mapping[str, Mapping[str, Default]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    finish: Callable[[Settings, Mapping[str, Entry]], Sequence[str]] = lambda settings, entries: ()
    write: Write | None = None

    def find_own_key(self, values: Mapping[str, object], *, toml: bool = False) -> str | None:
        """Returns a key by which a file is of this format; None if it is not."""
        if not self.requires <= values.keys() or self.without & values.keys() or (toml and not self.toml):
            return None
        own = self.requires if toml else self.unique or self.requires
        return next((key for key in values if key in own), None)

    def choose_defaults(self, values: Mapping[str, object]) -> Mapping[str, Default]:
        """Returns the defaults that hold for a file."""
        defaults = dict(self.defaults.settings)
        for key, others in self.variants.items():
            defaults |= others if key in values else {}
        return defaults


@dataclass(frozen=True)
class ForeignFile:
    """The text of another trainer's configuration, as it was read.

    Attributes:
        values: of the text, with the changes that were asked for; none of a shell script.
        padded: rows of the data are padded, not packed.
    """

    path: Path
    text: str
    format: Format
    values: Mapping[str, Any]
    padded: bool = True

    @property
    def is_script(self) -> bool:
        """True for Python, notebooks and shell scripts, which are read but not rewritten."""
        return self.path.suffix in _SCRIPTS or is_shell(self.path.name)


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
    file: ForeignFile
    names_data: bool = True


def find_format(text: str, where: str, formats: Mapping[str, Format], name: str | None = None) -> Format | None:
    """Returns the format of a file, by its keys; None if it is none of these, as a recipe is not.

    Args:
        name: the format that the user states.

    Raises:
        RecipeError: the file has keys of two formats, or is not YAML.
    """
    if is_shell(where):
        return _find_shell_format(text, where, formats, name)
    if name is not None:
        return formats[name]
    source = _parse(text, where)
    where, _ = split_name(where)
    values, lines = source.values, source.lines
    if not isinstance(values, Mapping):
        return None
    # A recipe is YAML.
    toml = where.endswith(".toml")
    own = set() if toml or where.endswith(_SCRIPTS) else {k for k in _RECIPE_ONLY if _is_section(values.get(k))}
    known = [format for format in formats.values() if own <= format.sections]
    candidates = [(format, key) for format in known if (key := format.find_own_key(values, toml=toml)) is not None]
    candidates = [pair for pair in candidates if not pair[0].general] or candidates
    if own and not candidates:
        return None
    if len(candidates) > 1:
        (first, key), (second, other) = sorted(candidates[:2], key=lambda pair: lines[(pair[1],)])
        (file, line), (_, before) = source.find_place(lines[(other,)]), source.find_place(lines[(key,)])
        raise RecipeError(
            f"{file}:{line}: {other}: is a key of {second.title}, and {key} (line {before}) of "
            f"{first.title}; leave one format out, or name it: --from {first.name}"
        )
    if not candidates and where.endswith(_SCRIPTS):
        raise RecipeError(
            f"{where}: calls none of {', '.join(ARGUMENT_CALLS)} with its arguments, nor torchtitan's Trainer.Config; "
            "preheat reads these from a script without running it"
        )
    if not candidates and toml:
        raise RecipeError(f"{where}: has no section of another trainer's TOML, such as torchtitan's training")
    if not candidates:
        _refuse_companion(values, lines, where)
    return candidates[0][0] if candidates else None


def _find_shell_format(text: str, where: str, formats: Mapping[str, Format], name: str | None) -> Format:
    """Returns the format of the flags of a shell script's command.

    Raises:
        RecipeError: the user states the format of another trainer.
    """
    command, line = find_command(text, where)
    format = formats[PROGRAMS[command].format]
    if name is not None and formats[name].title != format.title:
        raise RecipeError(f"{where}:{line}: {command}: is a command of {format.title}; leave --from {name} out")
    return format if name is None else formats[name]


_SCRIPTS = (".py", ".ipynb")


@dataclass(frozen=True)
class _Source:
    """The values of a file, with the line of each key; in a notebook, the line of its joined cells."""

    where: str
    values: Any
    lines: Mapping[tuple[str, ...], int]
    cells: Sequence[Cell] = ()

    def find_place(self, line: int) -> tuple[str, int]:
        """Returns the file of a line and its number there; of a notebook, the cell too."""
        if not self.cells:
            return self.where, line
        number, line = find_cell(self.cells, line)
        return f"{self.where}:cell {number}", line

    def list_entries(self) -> list[Entry]:
        """Returns the keys with a value of their own, each with its place."""
        entries = list(iterate_entries(self.values, self.lines, self.where))
        if not self.cells:
            return entries
        places = [self.find_place(entry.line) for entry in entries]
        return [replace(entry, where=where, line=line) for entry, (where, line) in zip(entries, places, strict=True)]


def _parse(text: str, where: str) -> _Source:
    """Returns the values of a YAML, JSON or TOML file, or of the calls of a script or notebook."""
    where, name = split_name(where)
    if where.endswith(".ipynb"):
        return _Source(where, *read_notebook(text, where))
    if where.endswith(".toml"):
        return _Source(where, *read_toml(text, where))
    if not where.endswith(".py"):
        return _Source(where, *compose(text, where))
    return _Source(where, *(read_registry(text, where, name) if is_registry(text, where) else read_script(text, where)))


def _is_section(value: object) -> bool:
    """Returns True for a section of a recipe."""
    return isinstance(value, Mapping) and _CLASS not in value


_COMPANIONS = {
    "distributed_type": ("accelerate", "--accelerate"),
    "zero_optimization": ("DeepSpeed", "--deepspeed"),
    "train_micro_batch_size_per_gpu": ("DeepSpeed", "--deepspeed"),
}
"""Keys of files that are used beside a trainer's -> the tool, and the option that names such a file."""


def _refuse_companion(values: Mapping[str, object], lines: Mapping[tuple[str, ...], int], where: str) -> None:
    """Raises RecipeError if a file has neither a model nor data, since it belongs beside a trainer's file."""
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
    changes: Mapping[tuple[str, ...], object] | None = None,
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
        changes: path of a key of the file -> the value to read in place of the text's.
        devices: number of devices; None: as many as the file's degrees of parallelism need.
        deepspeed: DeepSpeed's JSON; by default the file that the configuration names.
        accelerate: accelerate's YAML.
        warn: log keys that are not understood.

    Raises:
        RecipeError: a key has the wrong type, belongs to a feature that cannot be planned, or contradicts another; with
            file, line and key.
    """
    where = where or str(file)
    values: Mapping[str, Any] = {}
    if is_shell(where):
        run = read_shell(text, where, file.parent)
        entries, accelerate = list(run.entries), accelerate or run.accelerate
        format = replace(format, table={**format.table, **run.table})
    else:
        source = _parse(text, where)
        where, _ = split_name(where)
        if not isinstance(source.values, Mapping):
            raise RecipeError(f"{where}: must be a mapping of keys, got {quote_value(source.values)}")
        values = source.values
        for path, value in (changes or {}).items():
            values = replace_value(values, path, value)
        entries = replace(source, values=values).list_entries()
    read = ForeignFile(file, text, format, values)
    return _read_entries(entries, read, where, overrides, devices, (deepspeed, accelerate), warn=warn)


def read_arguments(
    values: Mapping[str, Any],
    lines: Mapping[tuple[str, ...], int],
    file: Path,
    format: Format,
    *,
    where: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    deepspeed: Path | None = None,
    warn: bool = False,
) -> ForeignConfig:
    """Reads the arguments of a trainer in this process; the others are as those of `read_config`.

    Args:
        values: the configuration as plain values.
        lines: path of a key -> its line.
    """
    entries = list(iterate_entries(values, lines, where))
    source = ForeignFile(file, "", format, values)
    return _read_entries(entries, source, where, overrides, devices, (deepspeed, None), warn=warn)


def _read_entries(
    entries: list[Entry],
    source: ForeignFile,
    where: str,
    overrides: Sequence[str],
    devices: int | None,
    companions: tuple[Path | None, Path | None],
    *,
    warn: bool,
) -> ForeignConfig:
    """Reads the keys of a configuration, with the files of DeepSpeed and accelerate beside it."""
    file, format = source.path, source.format
    defaults = format.choose_defaults(dict.fromkeys(name for entry in entries for name in (entry.path[0], entry.name)))
    stated: dict[str, Any] = {"lora_dropout": format.defaults.adapter_dropout}
    stated |= {key: default.value for key, default in defaults.items()}
    settings = Settings(name=file.stem, home=file.parent, devices=devices, **stated)
    entries += _read_companions(format, entries, settings.home, *companions)
    by_name = {entry.name: entry for entry in entries}
    outcomes = [(entry, _handle(format, settings, entry, by_name)) for entry in entries]
    assumptions = [*format.finish(settings, by_name), *keep_masters(settings, entries)]
    assumptions += _describe_assumptions(settings)
    named = settings.model is not None or settings.family is not None
    if not named and not any(item.startswith(_MODEL) for item in overrides):
        missing = format.names_model or " or ".join(sorted(format.requires)) or "model_name_or_path"
        raise RecipeError(f"{where}: {missing}: names no model; add it, or --set model.path=PATH")
    if settings.adapter and not settings.quantized and _FOUR_BIT.search(settings.model or ""):
        settings.quantized = True
        assumptions.append(f"{settings.model} is in 4 bits by its name: its base is planned as NF4")
    built = build_values(settings)
    blame = _find_blame(outcomes)
    recipe = recipes.read_values(built, where=where, sources=blame, overrides=overrides, warn=False)
    reads_data = _is_data_here(recipe)
    if not reads_data and (absent := _describe_absent_data(recipe, named=bool(settings.sources))):
        assumptions.append(absent)
    reading = _build_reading(format, where, outcomes, defaults, built, assumptions)
    if warn:
        for key in reading.not_understood:
            _log.warning("%s:%d: %s: not understood; %s", key.file or where, key.line, key.key, key.assumed)
    names_data = bool(settings.sources) or any(item.startswith("data.") for item in overrides)
    source = replace(source, padded=not settings.packing)
    return ForeignConfig(recipe, reading, reads_data, source, names_data)


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


_REPEATED = re.compile(r"#\d+")
"""Marks the second call of a name in a script, and those after it."""


def _handle(
    format: Format, settings: Settings, entry: Entry, entries: Mapping[str, Entry]
) -> Takes | NoEffect | Assumed:
    key = ".".join("*" if step.isdigit() else step for step in entry.path)
    if entry.value is None:
        return NoEffect("null: the trainer's default")
    if key in format.removed:
        raise entry.error(f"{format.title} {format.defaults.version} has no such key; {format.removed[key]}")
    first, repeated = _REPEATED.sub("", key), bool(_REPEATED.search(key))
    renamed = format.renamed.get(first)
    handler = format.table.get(renamed or first) or _find_pattern(format.table, first)
    if isinstance(entry.value, Reference):
        return NoEffect(f"the call of {entry.value} is read")
    if isinstance(entry.value, Computed) and not isinstance(handler, Ignore):
        return Assumed("not known without running the script; the trainer's default is taken")
    if repeated and not isinstance(handler, Ignore):
        before = entries.get(_REPEATED.sub("", entry.name))
        if before is not None and before.value == entry.value:
            return NoEffect("as in the first call")
        return Assumed(f"the first call of {_REPEATED.sub('', entry.path[0])} is the run's")
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
    rows = "batches have no padding and rows are not packed" if settings.padding_free else "rows are padded, not packed"
    return [
        *notes,
        f"{rows}: every one is planned at the full {settings.length:,} tokens, so shorter ones take less memory "
        "and time",
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
