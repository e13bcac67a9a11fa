"""Rows read while a GPU computes the step before: the same rows in the same order, resumed too, and faults told when they are due."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat import load_recipe, train
from preheat.core import Build
from preheat.errors import RunError
from preheat.run.reader import Reader
from preheat.training import loop
from preheat.training.loop import _Loop
from preheat.training.session import Session

ROWS = "\n".join(
    json.dumps({"text": f"Document {n}: {'word ' * (n % 17)}and so on, number {n * n}."}) for n in range(400)
)


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return [
        f"data.source={tmp_path / 'rows.jsonl'}",
        "data.vocab_size=300",
        "model={num_layers: 1, hidden_size: 32, num_heads: 2, intermediate_size: 64}",
        "batch={size: 4, seq_len: 32}",
        "techniques={gradient_accumulation: {steps: 2}}",
        "checkpoint.every=2",
        "evaluate={every: 0, baselines: false, rows: 2}",
        "sample={rows: 0, prompts: []}",
        "hardware={device: cpu, threads: 1}",
    ]


def losses(run: Path) -> list[float]:
    return [line.loss for line in Reader(run).metrics()]


def test_the_rows_are_the_same_and_a_resumed_run_reads_on(
    sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, steps: int, **how: Any) -> list[float]:
        train(
            load_recipe("demo", [*sets, f"stop.max_steps={steps}", "schedule.kind=constant"]),
            out=tmp_path / name,
            progress=False,
            **how,
        )
        return losses(tmp_path / name)

    plain = run("plain", 6)
    reads: list[int] = []
    whole = Session.rows

    def counted(self: Session) -> Iterator[Any]:
        for batch in whole(self):
            reads.append(self.progress.step)
            yield batch

    monkeypatch.setattr(Session, "rows", counted)
    monkeypatch.setattr(_Loop, "_reads_ahead", property(lambda self: True))
    order: list[str] = []
    updated = loop.update
    monkeypatch.setattr(Build, "begin", lambda self, batch: order.append("copied"))
    monkeypatch.setattr(loop, "update", lambda *args: (order.append("updated"), updated(*args))[1])
    assert run("ahead", 6) == plain
    assert order == ["copied", "updated"] * 5 + [
        "updated"
    ]  # the next rows' way to the device is begun beside the update
    assert reads == [0, 0, 1, 2, 3, 4]  # each before the step before it is committed, and none that no step takes
    run("resumed", 4)
    assert run("resumed", 6, resume=True) == plain


def test_what_goes_wrong_in_reading_is_told_after_the_step_that_stands(
    sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Session.rows

    def broken(self: Session) -> Iterator[Any]:
        stream = whole(self)
        for _ in range(3):
            yield next(stream)
        raise RunError("a reader was killed")

    monkeypatch.setattr(Session, "rows", broken)
    monkeypatch.setattr(_Loop, "_reads_ahead", property(lambda self: True))
    with pytest.raises(RunError, match=r"a reader was killed; --resume continues from step 3"):
        train(load_recipe("demo", [*sets, "stop.max_steps=6"]), out=tmp_path / "run", progress=False)
    assert len(losses(tmp_path / "run")) == 3
