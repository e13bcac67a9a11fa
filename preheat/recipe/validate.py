"""Validation: converts plain values to a Recipe and reports every problem with its line and the closest known name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from preheat.core import Recipe, Technique, registry
from preheat.core.field_types import Bound, Seed
from preheat.core.schema import Clean, Data, field_docs
from preheat.errors import RecipeError, suggest_nearest
from preheat.recipe.consistency import find_problems
from preheat.recipe.synonyms import VALUES, describe_unknown_key
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

    from preheat.core.json_types import JsonObject

__all__ = ["RecipeReader", "build_json_schema", "read_clean"]


@functools.cache
def _build_adapter(cls: type) -> type[BaseModel]:
    """Returns a pydantic model of a flat dataclass, with strict JSON types and bounds, and without unknown keys."""
    import pydantic

    # The messages of `Bound`, not those of pydantic's own constraints.
    def build_bound_validator(bound: Bound) -> pydantic.AfterValidator:
        def check(value: object) -> object:
            problem = bound.problem(value) if isinstance(value, int | float) else None
            if problem and not isinstance(value, bool):
                raise ValueError(problem)
            return value

        return pydantic.AfterValidator(check)

    def convert(kind: Any) -> Any:
        import types
        import typing

        origin = typing.get_origin(kind)
        if origin is Annotated:
            base, *extra = typing.get_args(kind)
            return Annotated[(base, *(build_bound_validator(e) if isinstance(e, Bound) else e for e in extra))]
        if origin in (typing.Union, types.UnionType):
            return typing.Union[tuple(convert(a) for a in typing.get_args(kind))]  # noqa: UP007
        if origin is tuple:
            return tuple[  # type: ignore[misc]
                tuple(convert(a) if a is not Ellipsis else a for a in typing.get_args(kind))
            ]
        # Numbers without a range still must be finite and within the largest range of all.
        return Annotated[kind, build_bound_validator(Bound())] if kind in (int, float) else kind

    import typing

    hints = typing.get_type_hints(cls, include_extras=True)
    fields: dict[str, Any] = {
        f.name: (convert(hints[f.name]), f.default if f.default is not dataclasses.MISSING else ...)
        if f.default_factory is dataclasses.MISSING
        else (convert(hints[f.name]), pydantic.Field(default_factory=f.default_factory))
        for f in dataclasses.fields(cls)
    }
    # protected_namespaces: a technique may have a field called model_…
    return pydantic.create_model(
        cls.__name__, __config__=pydantic.ConfigDict(extra="forbid", strict=True, protected_namespaces=()), **fields
    )


def _describe_error(error: ErrorDetails) -> str:
    """Returns pydantic's error as one short clause."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "missing":
        return "is needed"
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_type" and isinstance(error.get("input"), int | float):
        return "must be text (a number with its unit, or in quotes)"
    # pydantic's types of errors -> the same in words of YAML.
    texts = {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "tuple_type": "must be a list",
        "dict_type": "must be a mapping",
    }
    return str(texts.get(kind, error["msg"][0].lower() + error["msg"][1:]))


_NOTHING: Any = object()


def _find_key(values: Mapping[str, Any], place: Sequence[str | int]) -> tuple[str, ...]:
    """Returns the path of the innermost key that pydantic's location of an error leads to.

    Locations end with alternatives of unions and positions in lists, which are no keys.

    Example:
        >>> _find_key({"groups": {"head": {"lr_scale": "x"}}}, ("groups", "head", "lr_scale", "float"))
        ('groups', 'head', 'lr_scale')
    """
    keys: list[str] = []
    value: object = values
    for part in place:
        inner = {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}  # as JSON's keys
        if keys and str(part) not in inner:
            break
        keys.append(str(part))
        value = inner.get(str(part))
    return tuple(keys)


_MOST_PROBLEMS = 10
"""Problems of one recipe that are reported; the others are counted."""


class RecipeReader:
    """Converts plain values to dataclasses and collects problems.

    Args:
        where: name of the text in errors.
        lines: line of each key.
        assigned: keys set by `--set` -> what errors name in place of the line.
        hints: as in `describe_unknown_key`: None for a recipe, whose sections and synonyms are suggested
            for unknown keys.
    """

    def __init__(
        self,
        where: str,
        lines: Mapping[tuple[str, ...], int],
        assigned: Mapping[tuple[str, ...], str] | None = None,
        hints: Mapping[str, str] | None = None,
    ):
        self.where, self.lines, self.assigned, self.hints = where, dict(lines), assigned or {}, hints
        self.found: dict[tuple[tuple[str, ...], str], None] = {}
        self.more = 0

    def report(self, at: Sequence[object], problem: str | Callable[[], str]) -> None:
        """Records a problem of the key at this path. A callable is called only if its text will be shown."""
        # A mutated or foreign file may have thousands of problems, each with a search for the closest name.
        if len(self.found) >= _MOST_PROBLEMS:
            self.more += 1
            return
        self.found[tuple(str(a) for a in at), problem if isinstance(problem, str) else problem()] = None

    def location(self, at: tuple[str, ...]) -> str:
        """Returns the file and line, or the override, that set a key or its closest parent."""
        for n in range(len(at), 0, -1):
            if override := self.assigned.get(at[:n]):
                return override
            if at[:n] in self.lines:
                return f"{self.where}:{self.lines[at[:n]]}"
        return self.where

    def refuse(self) -> None:
        """Raises the collected problems.

        Raises:
            RecipeError: there are problems; one line each.
        """
        if self.found:
            # One override may cause several equal messages: print each once.
            lines = dict.fromkeys(f"{self.location(at)}: {text}" for at, text in self.found)
            more = [f"{self.where}: and {self.more:,} more problems"] if self.more else []
            raise RecipeError("\n".join([*lines, *more]))

    def flat(self, cls: type, values: object, at: tuple[str, ...]) -> Any:
        """Reads a dataclass without nested ones; returns None after recording problems."""
        import pydantic

        values = {} if values is None else values
        name = ".".join(at)
        if not isinstance(values, Mapping):
            self.report(at, f"{name}: must be a mapping of settings, got {quote_value(values)}")
            return None
        same = {key: VALUES.get(f"{name}.{key}", {}) for key in values}
        values = {key: same[key].get(v, v) if isinstance(v, str) else v for key, v in values.items()}
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in known]
        for key in unknown:
            path = (*at, str(key))
            self.report(path, lambda path=path: describe_unknown_key(path, known, self.hints))  # type: ignore[misc]
        try:
            # As JSON: pydantic's strict mode then takes lists for tuples and objects
            # for mappings, but converts no text to numbers.
            read = _build_adapter(cls).model_validate_json(
                json.dumps({key: value for key, value in values.items() if key in known}, default=str)
            )
        except pydantic.ValidationError as problem:
            # A union gives one error per alternative: join them to one line per key.
            by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
            for error in problem.errors():
                by_key.setdefault(_find_key(values, error["loc"]), []).append(error)
            for key, errors in by_key.items():
                here, value = (*at, *key), values
                for part in key:
                    value = {str(k): v for k, v in value.items()}.get(part, _NOTHING)
                reasons = " or ".join(dict.fromkeys(_describe_error(e) for e in errors))
                self.report(
                    here,
                    f"{'.'.join(here)}: {shorten(reasons, 300)}, got "
                    f"{'nothing' if value is _NOTHING else quote_value(value)}",
                )
            return None
        if unknown:
            return None
        try:
            # The dataclass itself, so that its own __post_init__ runs.
            return cls(**{k: getattr(read, k) for k in known})
        except ValueError as problem:  # a technique's own __post_init__
            self.report(at, f"{name}: {shorten(str(problem), 400)}")
            return None

    def recipe(self, values: object) -> Recipe:
        # The mistakes that concern the whole file come first, with a remedy each.
        if values is None or values == {}:
            raise RecipeError(
                f"{self.where}: is empty; write at least a model and a stopping condition, e.g. {{model: {{size: "
                "15M}, stop: {max_steps: 100}}, or begin with a copy: preheat init demo"
            )
        if not isinstance(values, Mapping):
            raise RecipeError(f"{self.where}: a recipe is a mapping of keys, got {quote_value(values)}")
        if "chain" in values:
            raise RecipeError(
                f"{self.where}: is a chain of steps over a trained model; run it with: preheat compress "
                f"RUN --recipe {self.where}"
            )
        parts = {f.name: f for f in dataclasses.fields(Recipe)}
        top = _build_top_scalars()
        settings: dict[str, Any] = {}
        # `build_flat_schema` reads one level, so the two scalars at the top are a section of their own.
        scalars = self.flat(top, {k: v for k, v in values.items() if k in ("name", "seed")}, ())
        if scalars is not None:
            settings.update(dataclasses.asdict(scalars))
        for key, value in values.items():
            if key not in parts:
                self.report((key,), lambda key=key: describe_unknown_key((str(key),), list(parts)))  # type: ignore[misc]
            elif key == "techniques":
                settings[key] = self.techniques(value)
            elif key not in ("name", "seed"):
                cls = parts[key].default_factory
                assert dataclasses.is_dataclass(cls)
                settings[key] = self.flat(cls, value, (key,))  # type: ignore[arg-type]
        self.refuse()
        # Each key is valid by itself; the keys together are checked next.
        recipe = Recipe(**settings)
        self.clean(recipe.data.clean, ("data", "clean"))
        for key, text in find_problems(recipe):
            self.report(key.split("."), f"{key}: {text}")
        self.refuse()
        return recipe

    def clean(self, values: object, at: tuple[str, ...]) -> Clean | None:
        """Reads the keys of `data.clean`; returns None after recording problems."""
        clean: Clean | None = self.flat(Clean, values, at)
        for key, text in clean.problems() if clean is not None else ():
            self.report((*at, key), f"{'.'.join((*at, key))}: {text}")
        return clean

    def techniques(self, values: object, at: tuple[str, ...] = ("techniques",)) -> dict[str, Technique]:
        known, name = registry(), ".".join(at)
        if isinstance(values, list) and all(isinstance(v, str) for v in values):  # a list of names means their defaults
            for one, times in sorted(Counter(values).items()):
                if times > 1:
                    self.report(at, f"{name}: {quote_value(one)} is given twice")
            values = dict.fromkeys(values)
        if values is None:
            return {}
        if not isinstance(values, Mapping):
            self.report(at, f"{name}: must be names with their settings, got {quote_value(values)}")
            return {}
        techniques = {}
        for one, settings in values.items():
            if one not in known:
                self.report(
                    (*at, one),
                    lambda one=one: (  # type: ignore[misc]
                        f"unknown technique {quote_value(str(one))}; {suggest_nearest(str(one), list(known))}"
                    ),
                )
                continue
            techniques[one] = self.flat(known[one], settings, (*at, one))
        return techniques


def read_clean(data: Data) -> Clean:
    """Returns the keys of `data.clean` as their class.

    Raises:
        RecipeError: an unknown key, a value out of range, or a contradiction.
    """
    reader = RecipeReader("data.clean", {})
    clean = reader.clean(data.clean, ("data", "clean"))
    reader.refuse()
    assert clean is not None, "settings that were not read have a problem"
    return clean


@functools.cache
def _build_top_scalars() -> type:
    """Returns a dataclass of the top-level scalars, name and seed."""
    return dataclasses.make_dataclass(
        "Top", [("name", str, field(default="run")), ("seed", Seed, field(default=0))], frozen=True, kw_only=True
    )


def build_json_schema() -> JsonObject:
    """Returns the JSON schema of a recipe file, for editors (`preheat recipes schema`)."""

    def build_flat_schema(cls: type) -> JsonObject:
        schema: JsonObject = _build_adapter(cls).model_json_schema()
        hints = {f.name for f in dataclasses.fields(cls)}
        for name, text in field_docs(cls).items():
            if name in hints:
                schema["properties"][name]["description"] = text
        # The documentation of a technique is that of its module; its class has at most a generated signature.
        document = sys.modules[cls.__module__].__doc__ if issubclass(cls, Technique) else cls.__doc__
        schema["description"] = " ".join(inspect.cleandoc(document or "").partition("\n\n")[0].split())
        schema["additionalProperties"] = False
        return schema

    properties: JsonObject = {
        "name": {"type": "string", "description": field_docs(Recipe)["name"]},
        "seed": {"type": "integer", "minimum": 0, "description": field_docs(Recipe)["seed"]},
    }
    for f in dataclasses.fields(Recipe):
        if f.name not in ("name", "seed", "techniques"):
            properties[f.name] = build_flat_schema(f.default_factory)  # type: ignore[arg-type]
    properties["data"]["properties"]["clean"] |= build_flat_schema(Clean)
    # A technique without settings may be null: `lora:` with nothing after it.
    properties["techniques"] = {
        "type": "object",
        "description": field_docs(Recipe)["techniques"],
        "additionalProperties": False,
        "properties": {name: {"anyOf": [build_flat_schema(cls), {"type": "null"}]} for name, cls in registry().items()},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "preheat recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
