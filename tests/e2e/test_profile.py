"""`train --profile`: the steps stay as they are, and the run gets a trace, its figures and a page."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from preheat import load_recipe, train
from preheat.core.step_profile import StepProfile
from preheat.errors import RecipeError
from preheat.files import read_record
from preheat.recipe import dump
from preheat.report import write
from preheat.run.reader import Reader

from .conftest import Command


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    rows = [json.dumps({"text": f"Document {n}: {'word ' * (n % 17)}and so on, number {n * n}."}) for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return [
        f"data.source={tmp_path / 'rows.jsonl'}",
        "data.vocab_size=300",
        "model={num_layers: 1, hidden_size: 32, num_heads: 2, intermediate_size: 64}",
        "batch={size: 4, seq_len: 32}",
        "techniques={gradient_accumulation: {steps: 2}}",
        "evaluate={every: 0, baselines: false, rows: 2}",
        "sample={rows: 0, prompts: []}",
        "hardware={device: cpu, threads: 1}",
    ]


def test_a_profiled_run_has_the_same_losses_and_a_page(sets: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("demo", [*sets, "stop.max_steps=6"])
    train(recipe, out=tmp_path / "plain", progress=False)
    train(recipe, out=tmp_path / "profiled", progress=False, profile=2)
    plain, profiled = ([line.loss for line in Reader(tmp_path / name).metrics()] for name in ("plain", "profiled"))
    assert plain == profiled
    assert not (tmp_path / "plain" / "profile").exists()

    folder = tmp_path / "profiled" / "profile"
    with gzip.open(folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("preheat step")] == ["preheat step 4", "preheat step 5"]
    assert names.count("preheat: forward") == 4  # two micro-batches each

    figures = read_record(StepProfile, json.loads((folder / "profile.json").read_text()))
    assert (figures.first_step, figures.steps, figures.rank) == (4, 2, 0)
    assert sum(part.share for part in figures.phases) == pytest.approx(1)
    assert sum(part.share for part in figures.kinds) == pytest.approx(1)
    assert all(part.seconds > 0 for part in figures.phases)
    # The plan knows all kinds, and they add up to its step.
    assert sum(part.planned or 0.0 for part in figures.kinds) == pytest.approx(figures.seconds_planned)
    assert figures.stores_scores  # no efficient_attention

    write(tmp_path / "profiled")
    page = (folder / "profile.html").read_text()
    assert figures.findings[0].text in page.replace("\u00a0", " ")
    assert "aten::mm" in page


def test_a_run_without_it_never_starts_the_profiler(sets: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("demo", [*sets, "stop.max_steps=2"])
    (tmp_path / "r.yaml").write_text(dump(recipe))
    # torch itself imports its profiler; a call of it would end this run.
    code = (
        "import sys, torch, preheat\n"
        "torch.autograd.profiler._prepare_profiler = torch.autograd.profiler._enable_profiler = None\n"
        "preheat.train(preheat.load_recipe('r.yaml'), out='run', progress=False)\n"
        "ours = {'preheat.training.profiler', 'preheat.training.step_tracer', 'preheat.training.profile_figures'}\n"
        "print(sorted(ours & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_too_short_says_how_many_steps_are_needed(sets: list[str], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^--profile 5: takes 8 steps, 3 of them to warm up, and the run has 7;"):
        train(load_recipe("demo", [*sets, "stop.max_steps=7"]), out=tmp_path / "run", progress=False, profile=5)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--profile", "0"], "--profile 0: must be at least 1, the number of steps to profile\n"),
        (
            ["--profile", "5", "--dry-run"],
            "--profile 5: would change nothing: --dry-run trains nothing; leave one of them out\n",
        ),
    ],
)
def test_options_that_profile_nothing_are_one_line(preheat: Command, options: list[str], says: str) -> None:
    assert preheat.here("train", "demo", *options, code=2)[1].endswith(says)
