"""Comparing runs: recipes key by key, and differences of evaluations with intervals."""

from __future__ import annotations

import random
import re
import shutil
import statistics
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from preheat.core.run_records import Estimate, Evaluation, ResultFigures, Results, StepMetrics
from preheat.run.writer import Writer
from preheat.web import index
from preheat.web.comparison import compare_runs, estimate_difference

from .test_runs_page import connect


def write_run(folder: Path, recipe: str, loss: Estimate | None, rows: int = 100) -> Path:
    writer = Writer(folder)
    writer.write_text("recipe.yaml", recipe)
    writer.write_metric(StepMetrics(1, tokens=10, loss=2.0, tokens_per_second=5.0))
    if loss is not None:
        results = Results(texts={"validation": ResultFigures(rows=rows, tokens=rows, metrics={"loss": loss})})
        writer.write_json("evaluation.json", Evaluation(step=1, after=results))
    writer.close()
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "_INLINE_S", 1e6)
    folder = tmp_path / "runs"
    recipe = "model: {size: 10M, tie: null}\nbatch: {size: 8}\ntechniques: {}\n"
    write_run(folder / "a", recipe, Estimate(2.0, 1.9, 2.1))
    other = "model: {size: 10M, tie: true}\nbatch: {size: 8}\ntechniques: {lora: {rank: 4, targets: [q, v]}}\n"
    write_run(folder / "b", other, Estimate(1.5, 1.45, 1.55), rows=50)
    write_run(folder / "c", "[broken", None)
    return folder


def test_keys_and_results_are_compared(runs: Path) -> None:
    comparison = compare_runs([runs / "a", runs / "b"], ["a", "b"])
    assert [(row.key, row.values) for row in comparison.keys] == [
        ("model.tie", ("null", "yes")),
        ("techniques.lora.rank", ("not set", "4")),
        ("techniques.lora.targets", ("not set", "q v")),
    ]
    assert comparison.same_keys == 2
    (row,) = comparison.metrics
    assert row.differences[0] is None
    assert row.differences[1] == estimate_difference(Estimate(2.0, 1.9, 2.1), Estimate(1.5, 1.45, 1.55))
    assert not row.has_same_rows
    assert compare_runs([runs / "a", runs / "c"], ["a", "c"]).problems[0].startswith("c: recipe.yaml: left out")


def test_the_interval_of_a_difference_covers_it() -> None:
    """19 of 20 intervals hold the difference of the means, if the intervals of both samples hold theirs so often."""
    draw = random.Random(0)

    def estimate(mean: float, size: int) -> Estimate:
        sample = [draw.gauss(mean, 1) for _ in range(size)]
        half = 1.96 * statistics.stdev(sample) / size**0.5
        return Estimate(statistics.mean(sample), statistics.mean(sample) - half, statistics.mean(sample) + half)

    differences = [estimate_difference(estimate(2.0, 400), estimate(1.5, 100)) for _ in range(1000)]
    covered = sum(d.low <= -0.5 <= d.high for d in differences if d.low is not None and d.high is not None)
    assert 925 <= covered <= 970
    # Equal half-widths add as the sides of a square.
    same = estimate_difference(Estimate(0.0, -1.0, 1.0), Estimate(0.0, -1.0, 1.0))
    assert same.high == pytest.approx(2**0.5)
    assert estimate_difference(Estimate(1.0), Estimate(3.0, 2.0, 4.0)) == Estimate(2.0)


def list_ids(client: TestClient) -> dict[str, str]:
    return {name: id for id, name in re.findall(r'<a id="open-(\w+)" href="[^"]+">(\w)</a>', client.get("/").text)}


def test_the_page_shows_curves_and_says_what_is_missing(runs: Path) -> None:
    client = connect(runs)
    ids = list_ids(client)
    page = client.get(f"/compare?run={ids['a']}&run={ids['b']}&x=tokens&key=tokens_per_second")
    assert page.status_code == 200
    chart = f'data-runs="{ids["a"]},{ids["b"]}" data-names="[&#34;a&#34;, &#34;b&#34;]" data-key="tokens_per_second"'
    assert page.text.count('<figure class="chart"') == 1
    assert chart in page.text
    assert "−0.500 [−0.612, −0.388]" in page.text
    assert "measured on different rows" in page.text
    assert "c: recipe.yaml: left out" in client.get(f"/compare?run={ids['a']}&run={ids['c']}").text
    shutil.rmtree(runs / "b")
    gone = client.get(f"/compare?run={ids['a']}&run={ids['b']}").text
    assert "does not exist any more" in gone
    assert client.get("/compare").status_code == 400
    assert client.get("/compare?run=../../etc").status_code == 404
    assert (
        "the first 8 are compared"
        in client.get("/compare?run=x&" + f"run={ids['a']}&" + "&".join(f"run={n}" for n in range(9))).text
    )
