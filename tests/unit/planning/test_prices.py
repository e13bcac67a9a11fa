"""Prices of devices, and the cheapest of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from preheat.cli.plan_cheapest import FEWER, build_prices_table, choose_offers, describe_priced, find_cheapest
from preheat.core.plan import Plan
from preheat.errors import RecipeError
from preheat.planning.explain import estimate_cost
from preheat.planning.prices import Offer, read_prices

from ..plans import plan_of, values_of

PRICES = """
currency: usd
date: 2026-11-28
prices:
  H100: 3
  L40S: {price: 1.5, source: a cloud, date: 2026-10-01}
"""


def test_prices_have_a_currency_and_a_date(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(PRICES)
    h100, l40s = read_prices(file)
    assert (h100.device.name, h100.price.per_hour, h100.price.currency, h100.date) == ("H100", 3, "USD", "2026-11-28")
    assert (l40s.source, l40s.date, l40s.count) == ("a cloud", "2026-10-01", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date: 2026-11-28\nprices: {H100: 3}", "prices.H100: has no currency; write currency: USD"),
        ("currency: USD\nprices: {H100: 3}", "prices.H100: has no date; write date: "),
        (
            "currency: USD\ndate: soon\nprices: {H100: 3}",
            "date: 'soon' is not written as a date; write date: ",
        ),
        ("currency: USD\ndate: 2999-01-01\nprices: {H100: 3}", "date: 2999-01-01 is in the future"),
        ("currency: dollars\ndate: 2026-11-28\nprices: {H100: 3}", "currency: 'dollars' must be three letters"),
        (PRICES.replace("H100: 3", "H100: free"), "prices.H100: 'free' must be a number above 0"),
        (PRICES.replace("H100: 3", "H100: -3"), "must be a number above 0"),
        (PRICES.replace("H100", "H1000"), "prices.H1000: no accelerator 'H1000' in the catalogue; did you mean"),
        (PRICES.replace("source", "sorce"), "prices.L40S.sorce: is unknown; did you mean 'source'"),
        (PRICES.replace("date: 2026-10-01", "currency: EUR"), "has prices in EUR and USD, which cannot be compared"),
        ("currency: USD", "prices: is missing"),
        (PRICES.replace("L40S", "H100-SXM"), "prices.H100-SXM: is the same device as H100; keep one of the two prices"),
    ],
)
def test_wrong_prices_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_prices(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_catalogue_of_skypilot_has_the_lowest_price_of_each_host(tmp_path: Path) -> None:
    folder = tmp_path / "nebius"
    folder.mkdir()
    (folder / "vms.csv").write_text(
        "InstanceType,AcceleratorName,AcceleratorCount,Price,Region\n"
        "cpu,,0,0.1,eu\na,H100,8.0,24,eu\nb,H100,8,16,us\nc,H100,1,2.95,eu\nd,Unknown9,1,1,eu\n"
        "e,H100,nan,1,eu\nf,H100,inf,1,eu\ng,H100,1,nan,eu\nh,H100\n"
    )
    offers = {offer.count: offer for offer in read_prices(folder / "vms.csv")}
    assert {count: offer.price.per_hour for count, offer in offers.items()} == {8: 2.0, 1: 2.95}
    assert offers[8].source == "nebius, us"
    chosen = choose_offers(folder / "vms.csv", "H100", None)
    assert [counts for _, counts in chosen] == [[1], [8]]
    with pytest.raises(RecipeError, match="has no price of L40S"):
        choose_offers(folder / "vms.csv", "H100,L40S", None)
    with pytest.raises(RecipeError, match="has no host with 4 devices"):
        choose_offers(folder / "vms.csv", None, 4)


def test_the_cheapest_is_first_and_dearer_numbers_are_not_planned(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(PRICES)
    # Tokens per second by number of devices; one L40S lacks memory.
    speeds = {"H100": {1: 1000.0, 2: 1800.0}, "L40S": {1: 0.0, 2: 1200.0, 4: 2500.0, 8: 4000.0}}
    planned = list[tuple[str, int]]()

    def plan(offer: Offer, count: int) -> Plan:
        planned.append((offer.device.name, count))
        speed = speeds[offer.device.name][count]
        of = plan_of(values_of(*((10, 80) if speed else (90, 80))))
        of = replace(of, tokens_per_second=speed or 1.0)
        return replace(of, cost=estimate_cost(of, count, offer.price.per_hour))

    entries = find_cheapest(choose_offers(file, None, None), plan, lambda message: None)
    ranked = [(e.offer.device.name, e.count) for e in entries if not e.problem]
    # Dollars per million tokens: 3 / 3600 / speed * 1e6 times devices.
    assert ranked == [("L40S", 4), ("L40S", 2), ("H100", 1), ("L40S", 8), ("H100", 2)]
    assert entries[0].cost == pytest.approx(4 * 1.5 / 3600 / 2500 * 1e6)
    assert ("H100", 4) not in planned, "two are dearer than one"
    assert {e.count for e in entries if e.problem == FEWER} == {4, 8}
    assert [e.count for e in entries if e.plan is not None and e.problem] == [1]
    table = build_prices_table([describe_priced(entry) for entry in entries])
    assert table.row_count == 6
