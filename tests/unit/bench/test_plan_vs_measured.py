"""The summary of planned against measured runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_speeds_beside_other_work_are_left_out_and_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    bench: Any = importlib.import_module("plan_vs_measured")

    def row(alone: bool | None, speed: float, peak: float = 1.0) -> dict[str, Any]:
        return bench.build_row(
            "a",
            [],
            {
                "peak_gib": peak,
                "tokens_per_second": speed,
                "predicted": {"peak_gib": 1.1, "tokens_per_second": 100.0},
                "intervals": {"peak_gib": [0.99, 1.21], "tokens_per_second": [65.0, 120.0]},
                "machine": None if alone is None else {"alone": alone},
            },
        )

    rows = [row(True, 80.0), row(False, 10.0, peak=0.5), row(None, 125.0), {"name": "b", "failed": "no memory"}]
    assert rows[0]["tokens_per_second"] == {
        "predicted": 100.0, "measured": 80.0, "error": 0.25, "interval": [65.0, 120.0], "within": True,
    }  # fmt: skip
    speed, memory = bench.compute_coverage(rows, "tokens_per_second"), bench.compute_coverage(rows, "peak_gib")
    assert (speed["within_interval"], speed["rows"]) == (1, 2)
    assert speed["nine_in_ten_within"] == 0.25
    assert speed["median_error"] == pytest.approx((0.25 + 0.2) / 2)
    assert (memory["within_interval"], memory["rows"]) == (2, 3)
    assert bench.compute_coverage(rows[1:2], "tokens_per_second") is None
    assert bench.compute_coverage(rows[3:], "peak_gib") is None
