"""Long sequences as a user types them: what is asked of a run about length, what a plan says of the longest rows, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Command

ASKED = [
    "recall,lengths=[16,32],depths=2,each=2",
    "positions=long.txt,each=3",
    "continuation=long.txt,lengths=[32],each=2",
]


@pytest.fixture
def folder(preheat: Command) -> Path:
    (preheat.folder / "long.txt").write_text("a long text goes on from line to line,\n" * 90)
    return preheat.folder


def test_a_run_is_asked_about_length_before_and_after_and_again_beyond_its_rows(preheat: Command, folder: Path) -> None:
    here = preheat.here
    here("train", "r.yaml", "--set", f"evaluate.tasks={json.dumps(ASKED)}", "--set", "stop.max_steps=4")
    found = json.loads((folder / "runs/small/evaluation.json").read_text())
    for name, count in (("recall", 4), ("positions", 2), ("continuation", 4)):
        parts = [found[when]["tasks"][name]["parts"] for when in ("before", "after", "difference")]
        assert [len(some) for some in parts] == [count] * 3
        assert all(off["value"] == pytest.approx(b["value"] - a["value"]) for a, b, off in zip(*parts, strict=True))
    page = (folder / "runs/small/report.html").read_text()
    assert "recall: right at depth and length, %, after" in page
    assert "positions: loss by position, nats a token" in page
    shown, _ = here(
        "eval",
        "runs/small",
        "--before",
        "--length",
        "64",
        "--rows",
        "8",
        "--tasks",
        "recall,depths=2,each=1",
        "--tasks",
        ASKED[1],
    )
    assert "48 to 62" not in shown
    assert "32 to 62" in shown
    assert "accuracy at depth, by length" in shown
    assert "→" in shown


@pytest.mark.slow
def test_a_plan_of_a_longer_context_says_the_longest_rows_and_what_limits_them(preheat: Command) -> None:
    scaled = [
        "--set",
        "model.max_positions=32",
        "--set",
        "techniques.rope_scaling={kind: auto, factor: auto}",
        "--set",
        "hardware.memory=600MiB",
    ]
    # In processes of their own: what this one holds already would count.
    shown, _ = preheat("plan", "r.yaml", "--set", "batch.seq_len=512", *scaled)
    assert "longest" in shown
    made = preheat.json("plan", "r.yaml", "--set", "batch.seq_len=512", *scaled)
    found = made["longest_context"]
    assert found["length"] >= 512
    assert f"sequences of {2 * found['length']:,} tokens" in found["limit"]
    assert preheat.here.json("plan", "r.yaml")["longest_context"] is None


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ("data.overlong=refuse", 4, "batch.seq_len is 32"),
        ("techniques.length_curriculum={lengths: [16, 8], until: 0.5}", 2, "a stage of 8 tokens follows one of 16"),
        ("techniques.rope_scaling={kind: ntk}", 2, "techniques.rope_scaling.kind"),
        ("model.config={rope_parameters: {rope_type: ntk, rope_theta: 10000.0}}", 2, "rope_type"),
        ("evaluate.tasks=['recall,lengths=[64]']", 2, "64 is beyond the 32 tokens that are read here"),
        ("evaluate.tasks=[needle]", 2, "needle=FILE"),
        ("evaluate.tasks=['positions=long.txt,lengths=[30000]']", 2, "30,000 is beyond"),
    ],
)
def test_what_is_wrong_with_lengths_is_one_line(
    preheat: Command, folder: Path, settings: str, code: int, words: str
) -> None:
    _, error = preheat.here("train", "r.yaml", "--set", settings, code=code)
    assert error.count("\n") == 1
    assert words in error
