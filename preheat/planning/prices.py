"""Dated prices of devices, from a user's file. Does not import torch.

No prices are built in: they differ by cloud, region and contract, and change from month to month.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from preheat.core.plan import Price
from preheat.errors import RecipeError, suggest_nearest
from preheat.hardware.catalogue import Accelerator, find_accelerator
from preheat.recipe.yaml_io import read
from preheat.sanitize import quote_value

__all__ = ["Offer", "read_prices"]

_KEYS = ("currency", "date", "source", "prices")
_OFFER_KEYS = ("price", "currency", "date", "source")
_CSV_COLUMNS = ("AcceleratorName", "AcceleratorCount", "Price", "Region")


@dataclass(frozen=True)
class Offer:
    """A price of a device.

    Attributes:
        count: devices of the host that has this price; None: any number.
        price: of one device for an hour.
        date: day on which it was valid, as YYYY-MM-DD.
        source: cloud or list that it is from; "" if not stated.
    """

    device: Accelerator
    count: int | None
    price: Price
    date: str
    source: str


def read_prices(path: Path) -> list[Offer]:
    """Reads a file of prices: YAML, or a `vms.csv` of SkyPilot's catalogue (in ~/.sky/catalogs once it has run).

    A YAML file has `currency`, `date` and `prices`, by the device's name in the catalogue: a number (of one device for
    an hour) or `{price: ..., source: ..., date: ..., currency: ...}`. A CSV file of SkyPilot is in US dollars and as
    old as the file; of several regions the lowest price is taken, and devices that are not in the catalogue are left
    out.

    Raises:
        RecipeError: a price has no currency or no date, a device is unknown, or the file has another form.
    """
    offers = _read_csv(path) if path.suffix == ".csv" else _read_yaml(path)
    if not offers:
        raise RecipeError(f"--prices {path}: has no price of a device of the catalogue (--gpu list prints them)")
    currencies = sorted({offer.price.currency for offer in offers})
    if len(currencies) > 1:
        raise RecipeError(
            f"--prices {path}: has prices in {' and '.join(currencies)}, which cannot be compared; convert them"
        )
    return offers


def _read_yaml(path: Path) -> list[Offer]:
    where = f"--prices {path}"
    values, _ = read(path, where)
    if not isinstance(values, Mapping) or not isinstance(values.get("prices"), Mapping):
        raise RecipeError(f"{where}: prices: is missing; write currency, date, and prices: {{H100: 2.95}}")
    for key in values:
        if key not in _KEYS:
            raise RecipeError(f"{where}: {key}: is unknown; {suggest_nearest(str(key), list(_KEYS))}")
    names: dict[str, str] = {}
    offers = []
    for name, entry in values["prices"].items():
        offer = _read_offer(where, str(name), entry, values)
        if (earlier := names.setdefault(offer.device.name, str(name))) != str(name):
            raise RecipeError(f"{where}: prices.{name}: is the same device as {earlier}; keep one of the two prices")
        offers.append(offer)
    return offers


def _read_offer(where: str, name: str, entry: object, common: Mapping[str, object]) -> Offer:
    """Returns the offer of an entry; `common` has the currency, date and source of entries that state none."""
    place = f"{where}: prices.{name}"
    own = entry if isinstance(entry, Mapping) else {"price": entry}
    for key in own:
        if key not in _OFFER_KEYS:
            raise RecipeError(f"{place}.{key}: is unknown; {suggest_nearest(str(key), list(_OFFER_KEYS))}")
    values = {**common, **own}
    price = values.get("price")
    if isinstance(price, bool) or not isinstance(price, int | float) or not math.isfinite(price) or price <= 0:
        raise RecipeError(
            f"{place}: {quote_value(price)} must be a number above 0, the price of one device for an hour"
        )
    currency = values.get("currency")
    if not isinstance(currency, str) or len(currency) != 3 or not currency.isalpha():
        problem = "has no currency" if currency is None else f"currency: {quote_value(currency)} must be three letters"
        raise RecipeError(f"{place}: {problem}; write currency: USD in the file or in the entry")
    try:
        device = find_accelerator(name)
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None
    source = str(values.get("source") or "")
    return Offer(device, None, Price(float(price), currency.upper()), _read_date(place, values.get("date")), source)


def _read_date(place: str, value: object) -> str:
    today = datetime.date.today()
    fix = f"write date: {today}, or the day on which it was valid"
    if value is None:
        raise RecipeError(f"{place}: has no date; {fix}")
    try:
        date = datetime.date.fromisoformat(str(value)[:10] if isinstance(value, datetime.date) else str(value))
    except ValueError:
        raise RecipeError(f"{place}: date: {quote_value(value)} is not written as a date; {fix}") from None
    # A day later, for other time zones.
    if date > today + datetime.timedelta(days=1):
        raise RecipeError(f"{place}: date: {date} is in the future; {fix}")
    return date.isoformat()


def _read_csv(path: Path) -> list[Offer]:
    where = f"--prices {path}"
    try:
        date = datetime.datetime.fromtimestamp(path.stat().st_mtime).date().isoformat()
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, restval=""))  # a cut-off last line lacks columns
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecipeError(f"{where}: cannot be read ({error})") from None
    if not rows or any(column not in rows[0] for column in _CSV_COLUMNS):
        raise RecipeError(f"{where}: lacks the columns {', '.join(_CSV_COLUMNS)} of a catalogue of SkyPilot")
    cloud, lowest = path.parent.name, dict[tuple[str, int], Offer]()
    for row in rows:
        name, count, price = row["AcceleratorName"], _read_number(row["AcceleratorCount"]), _read_number(row["Price"])
        if not name or count < 1 or price <= 0:
            continue
        try:
            device = find_accelerator(name)
        except RecipeError:  # a device that plans do not know, among hundreds that they do
            continue
        offer = Offer(device, int(count), Price(price / count, "USD"), date, cloud)
        key = (device.name, int(count))
        if key not in lowest or offer.price.per_hour < lowest[key].price.per_hour:
            lowest[key] = replace(offer, source=f"{cloud}, {row['Region']}")
    return list(lowest.values())


def _read_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
