"""Recipes of installed packages: found by name, listed with their package, and never in place of another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import preheat

HOUSE = Path(preheat.__file__).parents[1]
RECIPE = "# Trains a small model.\nmodel: {size: 15M}\ndata: {source: stdlib}\nstop: {max_steps: 3}\n"


def install(folder: Path, files: dict[str, str], point: str = "my_package.recipes") -> None:
    """Creates a package as pip installs it: its modules, and the metadata with its entry points."""
    for name, text in files.items():
        file = folder / "my_package/recipes" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    facts = folder / "my_package-1.0.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text(f"[preheat.recipes]\nmine = {point}\n", encoding="utf-8")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), str(HOUSE)]
    code = f"import sys; sys.path[:0] = {paths!r}; from preheat.cli import main; main({list(arguments)!r})"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_recipes_of_a_package_are_listed_and_used_by_name(tmp_path: Path) -> None:
    chain = "chain:\n  - compress: int8\n"
    install(tmp_path, {"small-one.yaml": RECIPE, "chains/short.yaml": chain})
    listed = json.loads(run(tmp_path, "recipes", "--json").stdout)
    assert listed["recipes"]["small-one"] == "Trains a small model."
    assert listed["packages"] == {"small-one": "my-package", "short": "my-package"}
    assert run(tmp_path, "recipes", "show", "small-one").stdout == RECIPE
    assert "preheat compress RUN --recipe short.yaml" in run(tmp_path, "init", "short").stdout
    planned = run(tmp_path, "plan", "small-one", "--gpu", "H100", "--json")
    assert json.loads(planned.stdout)["verdict"] == "fits", planned.stderr


@pytest.mark.parametrize(
    ("files", "point", "arguments", "message"),
    [
        ({"demo.yaml": RECIPE}, "my_package.recipes", "recipes", "my-package: recipe demo: preheat has a recipe of this name already; rename "),
        ({"x.yaml": RECIPE, "chains/x.yaml": RECIPE}, "my_package.recipes", "recipes", "my-package: recipe x: my-package has a recipe of this name already; rename "),
        ({"a/x.yaml": RECIPE, "llama-3.1-8b.yaml": RECIPE}, "my_package.recipes", "plan llama-3.1-8b --gpu H100", "llama-3.1-8b: is a model, and a recipe of the package my-package; name the file: "),
        ({"15M.yaml": RECIPE}, "my_package.recipes", "recipes", "my-package: recipe '15M': a name has letters"),
        ({"x.yaml": RECIPE}, "my_package.other", "recipes", "my-package: entry point preheat.recipes: 'my_package.other' is no folder with .yaml files"),
        ({"x.yaml": RECIPE}, "absent.recipes", "plan demo", "my-package: entry point preheat.recipes: 'absent.recipes' cannot be imported"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_told_apart_or_read_are_refused(
    tmp_path: Path, files: dict[str, str], point: str, arguments: str, message: str
) -> None:
    install(tmp_path, files, point)
    refused = run(tmp_path, *arguments.split())
    lines = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode == 2, refused.stderr
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {message}"), lines


def test_a_file_is_read_although_a_package_is_broken(tmp_path: Path) -> None:
    install(tmp_path, {"demo.yaml": RECIPE})
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert run(tmp_path, "plan", "r.yaml", "--gpu", "H100").returncode == 0
