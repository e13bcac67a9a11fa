"""The use of all runs below a folder: device-hours, energy, cost and emissions, with sums."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.core.run_records import Usage
from preheat.errors import RunError
from preheat.run.layout import read_mark
from preheat.run.reader import Reader

__all__ = ["FolderUsage", "RunUsage", "UsageSum", "find_runs", "sum_usage"]


@dataclass(frozen=True)
class RunUsage:
    """The usage of a run.

    Attributes:
        run: its folder.
        device: name of the device, of the last session.
        usage: None: not recorded, as by earlier versions.
        co2_kg: emissions of its energy; None without a carbon intensity or a known energy.
    """

    run: str
    device: str | None
    usage: Usage | None
    co2_kg: float | None


@dataclass(frozen=True)
class UsageSum:
    """The sums over the runs, each over those whose figure is known; None if it is known for none.

    Attributes:
        cost: by currency.
        without_hours, without_energy, without_cost: numbers of runs whose figures are unknown.
    """

    runs: int
    device_hours: float | None
    energy_kwh: float | None
    cost: Mapping[str, float]
    co2_kg: float | None
    without_hours: int
    without_energy: int
    without_cost: int


@dataclass(frozen=True)
class FolderUsage:
    """The usage of the runs below a folder.

    Attributes:
        carbon: grams of CO2 per kWh, as given.
        damaged: files of runs of which a part is left out.
    """

    folder: str
    carbon: float | None
    runs: Sequence[RunUsage]
    total: UsageSum
    damaged: Sequence[str]


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the runs below a folder in order of their paths; symbolic links are not followed."""
    for place, folders, files in os.walk(folder):
        path = Path(place)
        if "recipe.yaml" in files and (mark := read_mark(path)) is not None and mark.kind == "run":
            folders.clear()  # a run holds no others, and its checkpoints may hold many files
            yield path
        folders.sort()


def sum_usage(folder: Path, carbon: float | None = None) -> FolderUsage:
    """Returns the usage of the runs below a folder.

    Args:
        carbon: grams of CO2 per kWh of the local electricity; None: emissions are not estimated.

    Raises:
        RunError: the folder holds no runs.
    """
    runs, damaged = [], []
    for path in find_runs(folder):
        reader = Reader(path)
        usage, environment = reader.usage(), reader.environment
        energy = usage.energy_kwh if usage is not None else None
        runs.append(
            RunUsage(
                run=str(path),
                device=(environment.machine and environment.machine.device) or environment.device,
                usage=usage,
                co2_kg=_estimate_emissions(energy, carbon),
            )
        )
        damaged += [f"{path}: {note}" for note in reader.damage_notes]
    if not runs:
        raise RunError(
            f"{folder}: is not a run (it has no recipe.yaml), and holds none; name a run, or a folder of runs"
        )
    return FolderUsage(str(folder), carbon, runs, _sum(runs, carbon), damaged)


def _estimate_emissions(kwh: float | None, carbon: float | None) -> float | None:
    """Returns kg of CO2."""
    return None if kwh is None or carbon is None else kwh * carbon / 1000


def _sum_known(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _sum(runs: Sequence[RunUsage], carbon: float | None) -> UsageSum:
    usages = [run.usage for run in runs if run.usage is not None]
    energies = [usage.energy_kwh for usage in usages if usage.energy_kwh is not None]
    energy = _sum_known(energies)
    cost: dict[str, float] = {}
    for usage in usages:
        if usage.cost is not None and usage.currency is not None:
            cost[usage.currency] = cost.get(usage.currency, 0.0) + usage.cost
    return UsageSum(
        runs=len(runs),
        device_hours=_sum_known([usage.device_hours for usage in usages]),
        energy_kwh=energy,
        cost=cost,
        co2_kg=_estimate_emissions(energy, carbon),
        without_hours=len(runs) - len(usages),
        without_energy=len(runs) - len(energies),
        without_cost=sum(run.usage is None or run.usage.cost is None for run in runs),
    )
