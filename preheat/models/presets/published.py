"""Presets read from `published/`: one JSON file per publisher, with the models of 2025 and 2026.

A file maps each preset's name to the fields of `Preset`, in which `config` is the hub's config.json without keys that
change nothing (`presets.FREE`). `parameters` and `active` are counts of the model that transformers builds from it.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING

from preheat.models.presets.preset import Licence, Preset

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["models"]


def models() -> dict[str, Preset]:
    """Returns the presets of all publishers by name."""
    files = sorted(resources.files(__package__).joinpath("published").iterdir(), key=lambda file: file.name)
    return {
        name: _preset(values)
        for file in files
        if file.name.endswith(".json")
        for name, values in json.loads(file.read_text(encoding="utf-8")).items()
    }


def _preset(values: JsonObject) -> Preset:
    # No gate in the file means that it is not known, unlike an empty one.
    licence = Licence(values.pop("licence"), values.pop("gate", None))
    also, unconfirmed = tuple(values.pop("also", ())), tuple(values.pop("unconfirmed", ()))
    return Preset(**values, licence=licence, also=also, unconfirmed=unconfirmed)
