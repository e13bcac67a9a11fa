"""`preheat eval` and evaluation during a run, as a user types them: before, after, the difference, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preheat.cli import main

from .conftest import Command

TASK = """\
kind: multiple_choice
data: rows.jsonl
prompt: "{{start}}"
choices: ends
gold: gold
"""


@pytest.fixture
def asked(preheat: Command) -> Command:
    """The folder with a task (t.yaml) that the text answers, and a second text."""
    rows = [
        {"start": f"the quick brown {n}", "ends": ["fox", "zzqx kkvv", "jackdaws %%%"], "gold": "fox"}
        for n in range(12)
    ]
    (preheat.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (preheat.folder / "t.yaml").write_text(TASK)
    (preheat.folder / "other.txt").write_text("Something else altogether stands here, line after line.\n" * 60)
    return preheat


def test_a_run_measures_tasks_and_forgetting_before_and_after(
    asked: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "evaluate={every: 6, rows: 40, tasks: [t.yaml], forgetting: other.txt}"
    made = asked.json("train", "r.yaml", "--set", settings)
    run = asked.folder / "runs" / "small"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "loss" not in line]
    assert [line["step"] for line in evaluated] == [0, 6, 12]
    assert all(set(line) == {"step", "validation_loss", "forgetting_loss", "tokens", "tasks"} for line in evaluated)
    assert evaluated[-1]["validation_loss"] == made["validation_loss"] < evaluated[0]["validation_loss"]
    assert set(evaluated[0]["tasks"]["t"]) == {"accuracy", "accuracy_norm"}
    found = json.loads((run / "evaluation.json").read_text())
    assert found["step"] == 12
    for part, name, metric in (
        ("texts", "validation", "loss"),
        ("texts", "forgetting", "bits_per_byte"),
        ("tasks", "t", "accuracy"),
    ):
        before, after, off = (found[k][part][name]["metrics"][metric] for k in ("before", "after", "difference"))
        assert off["value"] == pytest.approx(after["value"] - before["value"])
        for values in (before, after, off):
            assert values["low"] <= values["value"] + 1e-9
            assert values["value"] <= values["high"] + 1e-9
    page = (run / "report.html").read_text()
    assert "Before and after" in page
    assert "forgetting: loss" in page

    # The command finds the same, from the checkpoint and from what the run began from.
    inside(asked, monkeypatch)
    again = json.loads(
        printed(
            [
                "eval",
                "runs/small",
                "--before",
                "--tasks",
                "t.yaml",
                "--forgetting",
                "other.txt",
                "--rows",
                "40",
                "--length",
                "32",
                "--json",
            ],
            capsys,
        )
    )
    assert again["loss"] == pytest.approx(made["validation_loss"], rel=1e-4)
    assert again["texts"]["validation"]["metrics"]["loss"]["value"] == again["loss"]
    assert again["before"]["loss"] == pytest.approx(evaluated[0]["validation_loss"], rel=1e-4)
    assert again["difference"]["texts"]["other.txt"]["paired"] is True
    ran, typed = (of["difference"]["tasks"]["t"]["metrics"]["accuracy"] for of in (found, again))
    assert typed == pytest.approx(ran)
    assert set(again) >= {
        "model",
        "loss",
        "perplexity",
        "bits_per_byte",
        "tokens",
        "texts",
        "tasks",
        "before",
        "difference",
    }

    # Two side by side, as a table.
    texts = ["--data", "train", "--data", "other.txt", "--rows", "40"]
    table = printed(["eval", "runs/small", "runs/small", *texts, "--tasks", "t.yaml", "--samples", "out.jsonl"], capsys)
    words = ("before", "difference", "bits_per_byte", "accuracy_norm", "bootstrap", "+0 [+0, +0]")
    assert [word for word in words if word not in table] == []
    samples = [json.loads(line) for line in (asked.folder / "out.jsonl").read_text().splitlines()]
    assert [line["gold"] for line in samples] == ["fox"] * 12


def inside(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process from here on: importing torch for each would take longer than the rest."""
    monkeypatch.chdir(command.folder)
    for name in ("PREHEAT_CACHE", "COLUMNS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, command.environment[name])


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out = capsys.readouterr()
    assert end.value.code == 0, out.err
    return out.out


def refused(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that ends with `code`."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == code, error
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["m", "--tasks", "claws=rows.jsonl"], 2, "did you mean 'clauses'"),
        (["m", "--tasks", "cloze"], 2, "give them: cloze=FILE"),
        (["m", "--tasks", "humaneval=rows.jsonl,k=[9]"], 2, "k: 9 is more than samples (1); set samples=9 or more"),
        (["m", "--tasks", "cloze=rows.jsonl"], 4, "rows.jsonl:1: no field 'context'"),
        (["m", "--tasks", "cloze=empty.jsonl"], 4, "holds no row"),
        (["m", "--tasks", "multiple_choice=wrong.jsonl"], 4, "wrong.jsonl:2: gold 7 is none of the 2 choices"),
        (["m", "--data", "~nobody-of-this-name/a.txt"], 4, "there is no such home folder"),
        (["m", "--data", "empty.txt"], 4, "empty"),
        (["m"], 2, "--data: is needed"),
        (["m", "--forgetting", "other.txt", "--data", "other.txt"], 2, "add --before"),
        (["m", "--before", "--data", "other.txt"], 1, "is not a run"),
        (["m", "m", "m", "--data", "other.txt"], 2, "3 models"),
        (["m", "--tasks", "t.yaml", "--samples", "no/where.jsonl"], 2, "--samples no/where.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_evaluated_is_one_line(
    asked: Command,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    folder = asked.folder
    inside(asked, monkeypatch)
    (folder / "m").symlink_to((data_folder / "stories260K-hf").resolve())
    (folder / "empty.txt").write_text("")
    (folder / "empty.jsonl").write_text("\n")
    good = {"query": "a", "choices": ["x", "y"], "gold": 1}
    (folder / "wrong.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, "gold": 7}))
    assert words in refused(["eval", *arguments], code, capsys)


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ("evaluate.tasks=[claws]", 2, "evaluate.tasks claws: no such task"),
        ("evaluate.tasks=[cloze=rows.jsonl]", 4, "no field 'context'"),
        ("evaluate.tasks=[multiple_choice=long.jsonl]", 4, "long.jsonl:1: the text to be scored has"),
        ("evaluate.forgetting=nowhere.txt", 4, "evaluate.forgetting nowhere.txt"),
        ("evaluate.forgetting=empty.txt", 4, "evaluate.forgetting"),
    ],
)
def test_a_run_whose_evaluation_is_wrong_does_not_begin(
    asked: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: str,
    code: int,
    words: str,
) -> None:
    inside(asked, monkeypatch)
    (asked.folder / "empty.txt").touch()
    long = {"query": "a", "choices": ["x", "many words " * 40], "gold": 0}
    (asked.folder / "long.jsonl").write_text(json.dumps(long))
    assert words in refused(["train", "r.yaml", "--set", settings], code, capsys)
    assert not list(asked.folder.glob("runs/*/*"))
