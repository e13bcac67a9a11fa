"""Stored answers of `preheat plan`: used only while everything that they depend on is unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from preheat import remote_code
from preheat.core.plan import Candidate, PlanFigures, RooflineFigure, Timeline
from preheat.planning import answer_cache
from preheat.recipe import override
from tests.unit.plans import plan_of, values_of

from ...conftest import tiny

PLAN = plan_of(values_of(1.0, 8.0))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.txt").write_text("a b c")
    return tmp_path / "rows"


def test_an_answer_is_read_as_it_was_stored(cache: Path) -> None:
    key = answer_cache.compute_key(tiny(), {"gpu": "H100"})
    assert key is not None
    assert answer_cache.load(key) is None
    timeline = Timeline(((0, "forward"),), ((0, 0.1 + 0.2), (1, 0.5)))
    figures = PlanFigures(timeline, RooflineFigure(1e12, 1e9, ()), (Candidate("w", "t", 0.1, 2.0),), ())
    answer = answer_cache.Answer(replace(PLAN, settled={"ä": 0.1 + 0.2}), "name: ä", figures)
    answer_cache.store(key, answer)
    assert answer_cache.load(key) == answer


@pytest.mark.parametrize("value", [float("inf"), {1, 2}, "a file \udc80"])
def test_an_answer_that_json_would_change_is_not_stored(cache: Path, value: object) -> None:
    answer_cache.store("key", answer_cache.Answer(replace(PLAN, settled={"a": value}), "", None))
    assert answer_cache.load("key") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"answer": {"fits": true}, "sha256": "0"}', '{"answer": 1}'])
def test_a_damaged_answer_is_computed_again(cache: Path, text: str) -> None:
    answer_cache.store("key", answer_cache.Answer(PLAN, "", None))
    [path] = (cache / "answers").iterdir()
    path.write_text(text)
    assert answer_cache.load("key") is None


def test_an_answer_of_another_form_is_computed_again(cache: Path) -> None:
    answer_cache.store("key", answer_cache.Answer(PLAN, "", None))
    [path] = (cache / "answers").iterdir()
    answer = json.loads(path.read_text())["answer"]
    del answer["plan"]["memory"]
    path.write_text(json.dumps({"answer": answer, "sha256": answer_cache._compute_checksum(answer)}))
    assert answer_cache.load("key") is None


def test_a_folder_that_cannot_be_written_loses_no_plan(cache: Path) -> None:
    (cache / "answers").write_text("a file")
    answer_cache.store("key", answer_cache.Answer(PLAN, "", None))
    assert answer_cache.load("key") is None


CHANGES: dict[str, Callable[[Path, Path, pytest.MonkeyPatch], object]] = {
    "a file of the data": lambda rows, cache, patch: (rows / "a.txt").write_text("longer text"),
    "the time of a file": lambda rows, cache, patch: os.utime(rows / "a.txt", ns=(1, 1)),
    "another file": lambda rows, cache, patch: (rows / "b.txt").write_text("new"),
    "a removed file": lambda rows, cache, patch: (rows / "a.txt").unlink(),
    "a calibration": lambda rows, cache, patch: (cache / "links-1.json").write_text("{}"),
    "a setting of the environment": lambda rows, cache, patch: patch.setenv("PREHEAT_X", "1"),
    "consent": lambda rows, cache, patch: patch.setenv(remote_code.VARIABLE, "1"),
    "preheat": lambda rows, cache, patch: patch.setattr(answer_cache, "compute_source_digest", lambda: "other"),
    "a package": lambda rows, cache, patch: patch.setattr(
        answer_cache, "_list_packages", lambda: ["torch-99.dist-info"]
    ),
    "python": lambda rows, cache, patch: patch.setattr("sys.version", "4.0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_changes_with(change: str, rows: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = override(tiny(), f"data.source={rows}")
    before = answer_cache.compute_key(recipe, {})
    assert before is not None
    assert before == answer_cache.compute_key(recipe, {})
    CHANGES[change](rows, cache, monkeypatch)
    assert answer_cache.compute_key(recipe, {}) != before


def test_the_key_covers_recipe_and_question(cache: Path) -> None:
    questions = ({"gpu": "H100"}, {"gpu": "A100"}, {"gpu": "H100", "price": 2.0})
    recipes = (tiny(), override(tiny(), "batch.size=3"), tiny("{lora: {rank: 4}}"), tiny("{lora: {rank: 8}}"))
    keys = {answer_cache.compute_key(recipe, question) for recipe in recipes for question in questions}
    assert len(keys) == 12
    assert None not in keys


def test_observations_and_processes_do_not_matter(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer_cache.compute_key(tiny(), {})
    (cache / "observations").mkdir()
    (cache / "observations" / "1.json").write_text("{}")
    monkeypatch.setenv("PREHEAT_PROCESSES", "1")
    assert answer_cache.compute_key(tiny(), {}) == before


def test_an_import_of_setuptools_does_not_matter(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = answer_cache.compute_key(tiny(), {})
    (tmp_path / "_vendor" / "wheel-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "_vendor"))
    assert answer_cache.compute_key(tiny(), {}) == key


@pytest.mark.parametrize("change", ["model={path: someone/some-model}", "data.source=someone/rows"])
def test_what_may_be_on_the_hub_is_planned_anew(change: str, cache: Path) -> None:
    assert answer_cache.compute_key(override(tiny(), change), {}) is None


def test_a_folder_of_too_many_files_is_planned_anew(rows: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = override(tiny(), f"data.source={rows}")
    assert answer_cache.compute_key(recipe, {}) is not None
    monkeypatch.setattr(answer_cache, "_FILES", 0)
    assert answer_cache.compute_key(recipe, {}) is None
