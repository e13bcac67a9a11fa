"""Writes a recipe as a person would: without defaults, and with a comment above each key. No torch."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from preheat.core import Recipe, registry
from preheat.core.schema import field_docs
from preheat.recipe.yaml_io import write

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["render_brief"]

_WIDTH = 110
"""Characters of a line of a comment."""


def render_brief(values: JsonObject) -> str:
    """Returns the YAML of a recipe's values (`recipe.to_values`) without defaults, for `recipe.parse` to read back.

    Example:
        >>> from preheat.recipe import parse, to_values
        >>> print(render_brief(to_values(parse("{name: a, stop: {max_steps: 5}, techniques: {lora: {}}}"))), end="")
        # A short name, used for the run's folder.
        name: a
        stop:
          # Optimizer steps.
          max_steps: 5
        techniques:
          lora: {}
    """
    lines = []
    for part in dataclasses.fields(Recipe):
        if part.name == "techniques":
            inside = [
                line for name, settings in values["techniques"].items() for line in _render_technique(name, settings)
            ]
        elif part.default_factory is not dataclasses.MISSING:
            inside = _render_keys(part.default_factory, values[part.name])  # type: ignore[arg-type]
        else:
            # The name is written even if it is the default, since it names the run's folder.
            if part.name == "name" or values[part.name] != part.default:
                lines += _render_key(part.name, values[part.name], field_docs(Recipe)[part.name])
            continue
        lines += [f"{part.name}:", *(f"  {line}" for line in inside)] if inside else []
    return "\n".join(lines) + "\n"


def _render_technique(name: str, settings: Mapping[str, object]) -> list[str]:
    inside = _render_keys(registry()[name], settings)
    return [f"{name}:", *(f"  {line}" for line in inside)] if inside else [f"{name}: {{}}"]


def _render_keys(cls: type, values: Mapping[str, object]) -> list[str]:
    docs = field_docs(cls)
    lines = []
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        # Compared as YAML, in which a tuple of the dataclass equals a list of the values.
        if write(values[field.name]) != (None if default is dataclasses.MISSING else write(default)):
            lines += _render_key(field.name, values[field.name], docs.get(field.name, ""))
    return lines


def _render_key(name: str, value: object, doc: str) -> list[str]:
    # The first paragraph of the help text is its summary.
    about = textwrap.wrap(doc.split("\n\n")[0], _WIDTH)
    return [*(f"# {line}" for line in about), *write({name: value}).rstrip("\n").split("\n")]
