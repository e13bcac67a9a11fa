"""`preheat doctor` on this machine, on a recipe, and in environments that are really broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import RECIPE, Command, InThisProcess


def parts(diagnosis: dict[str, Any], *severities: str) -> set[str]:
    return {finding["part"] for finding in diagnosis["findings"] if finding["severity"] in severities}


def test_this_machine_and_a_recipe(preheat: Command) -> None:
    (preheat.folder / "small.yaml").write_text(RECIPE.replace("source: text", "source: stdlib"))
    diagnosis = preheat.here.json("doctor", "small.yaml")
    assert diagnosis["recipe"] == "small"
    assert not diagnosis["stops"]
    assert {
        "python",
        "packages",
        "torch",
        "dtypes",
        "driver",
        "kernels",
        "threads",
        "memory",
        "disk",
        "cache",
        "hub",
    } <= {finding["part"] for finding in diagnosis["findings"]}
    ours = [finding["of_recipe"] for finding in diagnosis["findings"]]
    assert ours == sorted(ours, reverse=True), "what concerns the recipe comes first"
    assert any(ours)


def test_a_recipe_that_would_stop(preheat: Command) -> None:
    (preheat.folder / "small.yaml").write_text(RECIPE)
    out, _ = preheat.here(
        "doctor", "small.yaml", "--set", "data.source=none.txt", "--set", "techniques.fsdp={}", code=1
    )
    first = out.splitlines()[0]
    assert first.startswith("stops  data       data.source none.txt: does not exist")
    assert "would stop a run of small here" in out


def test_a_broken_environment(preheat: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another torch first on the path, whose libraries are missing; no compiler; a cache that nobody can write.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudnn.so.9: cannot open shared object file')"
    )
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.12.0+cu130'\ncuda: str | None = '13.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = {"PREHEAT_CACHE": "/sys/preheat", "PATH": str(tmp_path), "CXX": ""}
    here = InThisProcess(preheat.folder, preheat.environment | broken)
    out, error = here("doctor", code=1)
    assert "Traceback" not in out + error
    for line in (
        "stops  torch      torch cannot be imported (ImportError: libcudnn.so.9: cannot open shared object file)",
        "stops  cache      preheat's cache, /sys/preheat, cannot be written: ",
        f"risks  torch      two torch builds are on the import path: 2.12.0+cu130 in {tmp_path} is imported and hides",
        "slows  compiler   no C++ compiler was found",
        "note   hub        offline (HF_HUB_OFFLINE)",
        "2 findings would stop a run here",
    ):
        assert line in out, f"{line}\n\n{out}"
