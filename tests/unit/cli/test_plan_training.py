"""The answer of `preheat plan` to the options that were typed: parsed once, and stored by what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preheat.cli import main, plan_training
from preheat.hardware import catalogue

RECIPE = "model: {size: 1M, config: {num_hidden_layers: 2}}\nbatch: {size: 4, seq_len: 64}\nstop: {max_steps: 3}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "r.yaml").write_text(RECIPE)
    return str(tmp_path / "r.yaml")


def plan_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments, "--json"])
    out, error = capsys.readouterr()
    assert ended.value.code == 0, error
    return json.loads(out)


def test_a_gpu_is_parsed_once_and_another_spelling_of_it_has_the_same_answer(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse = catalogue.resolve_accelerator
    monkeypatch.setattr(catalogue, "resolve_accelerator", lambda text: parsed.append(text) or parse(text))
    first = plan_of([recipe, "--gpu", "H100", "--price", "2USD/h"], capsys)
    assert parsed == ["H100"]
    monkeypatch.setattr(plan_training, "_plan_or_search", lambda question: pytest.fail("the answer was computed again"))
    assert plan_of([recipe, "--gpu", "h100", "--price", "$2/hour"], capsys) == first
    for other in (["--price", "3USD/h"], ["--price", "2EUR/h"], ["--price", "2USD/h", "--count", "2"]):
        with pytest.raises(pytest.fail.Exception, match="computed again"):
            main(["plan", recipe, "--gpu", "H100", *other])
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        main(["plan", recipe, "--gpu", "A100-80GB", "--price", "2USD/h"])
