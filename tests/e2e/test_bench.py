"""`preheat bench`, and what its verdicts say."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from preheat.bench.compare import judge_techniques
from preheat.bench.messages import ProfileJob, TurnJob
from preheat.bench.worker import take_steps
from preheat.core.bench import BenchResult, FailedRow, Machine, MeasuredRow, profile_folder
from preheat.core.plan import StepSeconds
from preheat.core.step_profile import StepProfile
from preheat.files import read_record, to_json
from preheat.recipe import dump, load, override
from preheat.report import write_bench
from preheat.report.bench_page import _render_waterfalls

from .conftest import Command


def row(name: str, speeds: list[float], peak: float) -> MeasuredRow:
    ends = (min(speeds), max(speeds))
    return MeasuredRow(
        name=name,
        techniques=("idle", "large"),
        predicted=None,
        tokens_per_second=speeds[0],
        speeds=tuple(speeds),
        spread=ends,
        ratio=1.0,
        ratio_spread=ends,
        mfu=None,
        peak_gib=peak,
        startup_seconds=1.0,
        loss=5.0,
        gradient_cosine=None,
        changes={},
        notices=(),
    )


def said(rows: list[MeasuredRow | FailedRow], *names: str) -> dict[str, str]:
    return {v.technique: v.message for v in judge_techniques(rows, names, 16.0, {})}


def test_verdicts_say_what_is_gained_and_what_is_noise() -> None:
    whole = row("all", [100.0, 104.0, 102.0], 4.0)
    rows = [
        whole,
        row("without slow", [130.0, 135.0, 133.0], 7.0),
        row("without fast", [50.0, 52.0, 51.0], 4.0),
        row("without idle", [101.0, 103.0, 103.0], 4.01),
        row("without small", [100.0, 106.0, 101.0], 6.0),
        FailedRow(
            name="without needed",
            techniques=(),
            failed="does not fit: needs 20.00 GiB, has 16.00 GiB",
            fits=False,
            predicted=None,
        ),
    ]
    words = said(rows, "slow", "fast", "idle", "small", "needed")
    assert words["slow"] == "slow costs 23 % speed and frees 3.00 GiB: not needed here, 9.00 GiB are free without it"
    assert words["fast"] == "fast gives 100 % speed; memory stays as it is"
    assert words["idle"] == "idle: no difference in speed seen; no difference in memory seen: nothing gained here"
    assert words["small"] == "small: no difference in speed seen; frees 2.00 GiB"
    assert words["needed"] == "needed is needed: without it the recipe does not fit: needs 20.00 GiB, has 16.00 GiB"


def test_there_is_no_verdict_on_speed_without_repeats_or_where_intervals_overlap() -> None:
    once = [row("all", [100.0], 4.0), row("without idle", [233.0], 4.0), row("without small", [100.0], 6.0)]
    words = said(once, "idle", "small")
    assert (
        words["idle"] == "idle: no verdict on speed from one turn (--repeats 3 gives one); no difference in memory seen"
    )
    assert words["small"] == "small: no verdict on speed from one turn (--repeats 3 gives one); frees 2.00 GiB"
    # 20 % slower in each round, but the machine's pace changed by more from round to round
    noisy = [
        row("all", [80.0, 100.0, 160.0], 4.0),
        row("without idle", [100.0, 125.0, 200.0], 4.0),
        row("without x", [1.0], 4.0),
    ]
    (verdict, _) = judge_techniques(noisy, ["idle", "x"], 16.0, {})
    assert verdict.within_noise is True
    assert "no difference in speed seen" in verdict.message


def test_a_difference_that_cannot_be_measured_is_drawn_as_none() -> None:
    rows = [
        row("plain", [100.0] * 2, 0.5),
        row("all", [200.0] * 2, 0.3),
        row("without idle", [201.0] * 2, 0.3 + 1.5e-5),
        row("without large", [101.0] * 2, 0.5),
    ]
    judged = tuple(judge_techniques(rows, ["idle", "large"], 16.0, {}))
    page = _render_waterfalls(BenchResult("n", Machine("m", "cpu", 1, "2"), 3, 2, 16.0, tuple(rows), judged, {}))
    assert "Peak memory in MiB: from 512 plain to 307 with all; idle no difference seen, large \u2212205" in page
    assert "idle no difference seen, large +0.099" in page
    assert "overlap no difference seen" in page
    assert "e-05" not in page


@pytest.mark.slow
def test_an_ablation_has_every_contender_and_its_agreement(preheat: Command) -> None:
    techniques = "techniques={chunked_loss: {rows: 64}, mixed_precision: {mode: bf16}}"
    made = preheat.here.json(
        "bench", "r.yaml", "--ablate", "--steps", "4", "--repeats", "1", "--set", techniques, "--out", "b"
    )
    rows = {r["name"]: r for r in made["rows"]}
    assert list(rows) == [
        "plain",
        "all",
        "without chunked_loss",
        "without mixed_precision",
        "only chunked_loss",
        "only mixed_precision",
    ]
    assert rows["plain"]["gradient_cosine"] == pytest.approx(1, abs=1e-9)
    assert rows["only chunked_loss"]["gradient_cosine"] == pytest.approx(1, abs=1e-6)
    assert 0.99 < rows["all"]["gradient_cosine"] < 1 - 1e-9, "bf16 rounds"
    assert rows["only chunked_loss"]["loss"] == pytest.approx(rows["plain"]["loss"], abs=1e-4)
    assert all(len(r["speeds"]) == 1 and r["startup_seconds"] > 0 and r["peak_gib"] >= 0 for r in made["rows"])
    assert {v["technique"] for v in made["verdicts"]} == {"chunked_loss", "mixed_precision"}
    page = (preheat.folder / "b" / "bench.html").read_text()
    assert "without chunked_loss" in page
    assert "<svg" in page
    kept = json.loads((preheat.folder / "b" / "bench.json").read_text())
    assert [r["name"] for r in kept["rows"]] == list(rows)
    (sent,) = preheat.here.json("track", "b", "--to", "tensorboard")["sent"]
    assert sent["url"] == "tensorboard --logdir b/tracking/tensorboard"
    events = b"".join(file.read_bytes() for file in (preheat.folder / "b/tracking/tensorboard").iterdir())
    assert b"without mixed_precision/tokens_per_second" in events


def test_a_turn_has_the_notices_of_its_techniques(preheat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters the first layer has a graph of its own: then there are as many as the limit."""
    monkeypatch.chdir(preheat.folder)
    recipe = override(load("r.yaml"), "techniques={lora: {}, compile: {limit: 2}}")
    with torch.compiler.set_stance("default", force_backend="eager"):
        turn = take_steps(TurnJob(dump(recipe), 1))
    (notice,) = turn.notices
    assert notice.startswith("techniques.compile.limit: 2 graphs are compiled")


def test_a_profile_comes_after_the_measured_steps_and_changes_none(
    preheat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(preheat.folder)
    job = TurnJob(dump(load("r.yaml")), 3)
    plain = take_steps(job)
    folder = preheat.folder / profile_folder("without lora")
    planned = StepSeconds({"matmul": 1.0}, 1.0, 0.0)
    profiled = take_steps(replace(job, profile=ProfileJob(str(folder), 2, planned, 1.0)))
    assert (profiled.losses, profiled.tokens) == (plain.losses, plain.tokens)
    assert plain.finding is None
    figures = read_record(StepProfile, json.loads((folder / "profile.json").read_text()))
    assert profiled.finding == figures.findings[0].text
    # In step 4 tracing is set up.
    assert (figures.first_step, figures.steps, figures.seconds_planned) == (5, 2, 1.0)
    assert all(part.seconds > 0 for part in figures.phases)
    assert figures.seconds_unprofiled == pytest.approx(sum(profiled.seconds[1:]) / 2)

    row_profiled = replace(row("without lora", [1.0], 4.0), finding=profiled.finding)
    result = BenchResult("n", Machine("m", "cpu", 1, "2"), 3, 1, 16.0, (row("plain", [1.0], 4.0), row_profiled), (), {})
    (preheat.folder / "bench.json").write_text(to_json(result))
    page = write_bench(preheat.folder).read_text()
    assert profiled.finding in page.replace("\u00a0", " ")
    (link,) = re.findall(r'href="([^"]+)"', page)
    assert "n, without lora" in (preheat.folder / link).read_text()


@pytest.mark.slow
def test_techniques_by_name_and_one_that_cannot_serve(preheat: Command) -> None:
    made = preheat.here.json("bench", "r.yaml", "--techniques", "lora,efficient_attention", "--steps", "3", "--repeats", "1",
                        "--set", "techniques={efficient_attention: {kernel: cudnn}}")  # fmt: skip
    rows = {r["name"]: r for r in made["rows"]}
    assert rows["lora"]["tokens_per_second"] > 0
    assert rows["lora"]["gradient_cosine"] is None, "no parameter is trained in both"
    assert "needs a CUDA device" in rows["efficient_attention"]["failed"]
    read = preheat("bench", "r.yaml", "--techniques", "efficient_attention", "--steps", "3", "--repeats", "1",
                   "--set", "techniques={efficient_attention: {kernel: cudnn}}")[0]  # fmt: skip
    assert "efficient_attention was not run: techniques.efficient_attention: kernel: cudnn needs a CUDA device" in read
    assert {"tokens/s", "peak", "loss"} <= set(
        next(line for line in read.splitlines() if line.startswith("contender")).split()
    )


def test_what_cannot_be_compared_is_said(preheat: Command) -> None:
    for arguments, words in (
        ((), "name what to compare"),
        (("--techniques", "lorra"), "'lorra' is unknown"),
        (("--ablate", "--set", "techniques={}"), "nothing to leave out"),
        (("--ablate", "--profile", "0"), "--profile 0: must be at least 1, the number of steps to profile"),
    ):
        assert words in preheat("bench", "r.yaml", *arguments, code=2)[1]
