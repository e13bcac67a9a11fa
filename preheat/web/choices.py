"""Models, recipes and devices to choose from, as the command line lists them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.core.units import format_memory
from preheat.report.formatting import count
from preheat.web.forms import Choice

if TYPE_CHECKING:
    from preheat.web.jobs import Jobs

__all__ = ["Choices", "load_choices"]


@dataclass(frozen=True)
class Choices:
    """Choices of the forms that do not depend on the folders."""

    models: tuple[Choice, ...]
    recipes: tuple[Choice, ...]
    devices: tuple[Choice, ...]


def load_choices(jobs: Jobs) -> Choices:
    """Returns the lists; the commands run once, which takes a second.

    Raises:
        RunError: a command failed.
    """
    commands = (["models", "--json"], ["recipes", "--json"], ["plan", "--gpu=list", "--json"])
    with ThreadPoolExecutor(len(commands)) as pool:
        models, recipes, devices = pool.map(jobs.ask_once, commands)
    return Choices(
        models=tuple(
            Choice(name, f"{count(model['parameters'])} parameters, {model['hub']}")
            for name, model in _read_table(models, "models").items()
        ),
        recipes=tuple(Choice(name, str(text)) for name, text in _read_table(recipes, "recipes").items()),
        devices=tuple(
            Choice(name, f"{name}, {format_memory(float(device['memory']) / 2**30)}")
            for name, device in _read_table(devices, "devices").items()
        ),
    )


def _read_table(answer: object, key: str) -> Mapping[str, Mapping[str, float | str]]:
    assert isinstance(answer, dict)
    table: Mapping[str, Mapping[str, float | str]] = answer[key]
    return table
