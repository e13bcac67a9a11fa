"""Ticks of the chart of candidates."""

from __future__ import annotations

import pytest

from preheat.web.scatter import Point, arrange


@pytest.mark.parametrize(("low", "high", "least"), [(1.4, 16.0, 3), (0.2, 100.0, 6), (0.001, 100.0, 5)])
def test_wide_ranges_of_memory_have_several_labels(low: float, high: float, least: int) -> None:
    points = [Point(n, gib, 100.0, "", "tried") for n, gib in enumerate((low, high))]
    ticks = arrange(points, available_gib=1e6).x_ticks
    assert least <= len(ticks) <= 10
    assert [tick.place for tick in ticks] == sorted(tick.place for tick in ticks)
