"""Finds the cheapest device and number of devices for a run, by `preheat plan --aim cheapest --prices FILE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.errors import RecipeError

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.core.json_types import JsonObject
    from preheat.core.plan import Plan
    from preheat.planning.prices import Offer

__all__ = ["Priced", "build_prices_table", "choose_offers", "describe_priced", "find_cheapest"]

FEWER = "fewer of them are cheaper"
"""Problem of numbers of devices that were not planned."""
_COUNTS = (1, 2, 4, 8)
"""Numbers of devices to plan for, those of usual hosts."""


@dataclass(frozen=True)
class Priced:
    """An offer with a number of devices, and its plan.

    Attributes:
        plan: None if it was not planned.
        problem: the reason why there is no plan, or why it is no candidate; "" for a candidate.
    """

    offer: Offer
    count: int
    plan: Plan | None
    problem: str = ""

    @property
    def cost(self) -> float:
        """Price of a million tokens."""
        assert self.plan is not None
        assert self.plan.cost is not None
        return self.plan.cost.million_tokens


def choose_offers(prices: Path, gpus: str | None, count: int | None) -> list[tuple[Offer, list[int]]]:
    """Returns the offers of a file with the numbers of devices to plan for, in rising order.

    Args:
        gpus: names of devices, separated by commas; None: all of the file.
        count: the only number of devices; None: those of usual hosts, or those that an offer is for.

    Raises:
        RecipeError: the file is no list of prices, or lacks a named device.
    """
    from preheat.hardware.catalogue import resolve_accelerator
    from preheat.planning.prices import read_prices

    offers = read_prices(prices)
    if gpus is not None:
        wanted = [resolve_accelerator(name.strip()).name for name in gpus.split(",")]
        known = {offer.device.name for offer in offers}
        if missing := [name for name in wanted if name not in known]:
            raise RecipeError(f"--prices {prices}: has no price of {missing[0]} (--gpu); add it to the file")
        offers = [offer for offer in offers if offer.device.name in wanted]
    chosen = [
        (offer, [n for n in ([count] if count else _COUNTS) if offer.count in (None, n)])
        for offer in sorted(offers, key=lambda offer: (offer.device.name, offer.count or 0))
    ]
    if not any(counts for _, counts in chosen):
        raise RecipeError(f"--prices {prices}: has no host with {count or 'up to 8'} devices; change --count")
    return chosen


def find_cheapest(
    offers: Sequence[tuple[Offer, list[int]]], plan: Callable[[Offer, int], Plan], tell: Callable[[str], None]
) -> list[Priced]:
    """Plans for each offer and number of devices; returns the candidates, the cheapest million tokens first, and the
    rest.

    More devices of one kind are planned until a million tokens become dearer: beyond, communication only adds.

    Args:
        plan: returns the plan with its cost.
        tell: progress callback.

    Raises:
        RecipeError: the recipe can be planned on no device.
    """
    entries: list[Priced] = []
    best: dict[str, float] = {}  # lowest cost so far, by device
    dearer: set[str] = set()
    for offer, counts in offers:
        device = offer.device.name
        for count in counts:
            if device in dearer:
                entries.append(Priced(offer, count, None, FEWER))
                continue
            tell(f"{count} x {device}")
            try:
                planned = plan(offer, count)
            except RecipeError as error:
                entries.append(Priced(offer, count, None, str(error).splitlines()[0]))
                continue
            if not planned.fits_safely:
                entries.append(Priced(offer, count, planned, planned.verdict))
                continue
            entry = Priced(offer, count, planned)
            entries.append(entry)
            if entry.cost > best.get(device, entry.cost):
                dearer.add(device)
            best[device] = min(best.get(device, entry.cost), entry.cost)
    if all(entry.plan is None for entry in entries):
        raise RecipeError(f"--aim cheapest: nothing could be planned: {entries[0].problem}")
    return sorted(entries, key=lambda entry: (bool(entry.problem), 0.0 if entry.problem else entry.cost))


def describe_priced(entry: Priced) -> JsonObject:
    """Returns the figures of an entry as JSON data."""
    plan, candidate = entry.plan, not entry.problem
    return {
        "device": entry.offer.device.name,
        "count": entry.count,
        "price_per_hour": entry.offer.price.per_hour,
        "currency": entry.offer.price.currency,
        "date": entry.offer.date,
        "source": entry.offer.source,
        "tokens_per_second": plan.tokens_per_second if plan and candidate else None,
        "million_tokens": entry.cost if candidate else None,
        "run": plan.cost.run if plan and plan.cost and candidate else None,
        "problem": entry.problem,
    }


def build_prices_table(entries: Sequence[Mapping[str, object]]) -> Table:
    """Returns the table of `describe_priced`'s figures."""
    from rich.table import Table

    currency = entries[0]["currency"]
    titles = ("devices", "tokens/s", f"{currency}/h", f"{currency}/M tokens", f"{currency} of the run", "price of")
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if 0 < number < 5 else "left")

    def show(value: object, form: str) -> str:
        return format(value, form) if isinstance(value, int | float) else "-"

    for entry in entries:
        if entry["problem"] == FEWER:
            continue
        hourly = float(str(entry["price_per_hour"])) * int(str(entry["count"]))
        problem = str(entry["problem"])
        table.add_row(
            f"{entry['count']} x {entry['device']}",
            show(entry["tokens_per_second"], ",.0f"),
            f"{hourly:,.2f}",
            show(entry["million_tokens"], ".3g"),
            show(entry["run"], ",.2f"),
            problem or ", ".join(filter(None, (str(entry["date"]), str(entry["source"])))),
        )
    return table
