"""Reads small files of other trainers, and looks up what became of their keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preheat.interop.formats import FORMATS
from preheat.interop.reading import ForeignConfig, find_format, read_config
from preheat.recipe import to_values


def read(
    text: str, file: Path = Path("f.yaml"), overrides: Sequence[str] = (), where: str = "f.yaml", **options: Any
) -> ForeignConfig:
    format = find_format(text, where, FORMATS)
    assert format is not None
    return read_config(text, file, format, where=where, overrides=overrides, **options)


def read_script(text: str, **options: Any) -> ForeignConfig:
    return read(text, Path("f.py"), where="f.py", **options)


def read_notebook(*cells: str, **options: Any) -> ForeignConfig:
    """Reads a notebook of these code cells, behind one of text."""
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    text = json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown", "source": "# Title"}, *code]})
    return read(text, Path("f.ipynb"), where="f.ipynb", **options)


def look_up(config: ForeignConfig, key: str) -> object:
    """The value of a dotted key of the recipe; None if the recipe is without its section."""
    value: Any = to_values(config.recipe)
    for step in key.split("."):
        if step not in value:
            return None
        value = value[step]
    return value
