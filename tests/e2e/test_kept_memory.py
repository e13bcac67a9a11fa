"""What evaluations and checkpoints leave in malloc is given back before the next step."""

from __future__ import annotations

import pytest

from .conftest import Command


def test_a_run_gives_back_what_evaluations_and_checkpoints_freed(
    preheat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr("preheat.training.loop.release_small", lambda kind: order.append(f"released on {kind}"))
    monkeypatch.setattr(
        "preheat.cli.views.console.Alarms.evaluated", lambda *_: order.append("evaluated"), raising=False
    )
    monkeypatch.setattr("preheat.cli.views.console.Alarms.step", lambda *_: order.append("step"), raising=False)
    settings = ("stop.max_steps=4", "evaluate.every=2", "checkpoint.every=3")
    preheat.here("train", "r.yaml", *(part for item in settings for part in ("--set", item)), "--json")
    saved, evaluated = ["released on cpu"], ["evaluated", "released on cpu"]
    # The first evaluation of a run saves before it; the last step is saved and evaluated.
    assert order == ["step", "step", *saved, *evaluated, "step", *saved, "step", *saved, *evaluated]
