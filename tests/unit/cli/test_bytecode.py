"""Compiled modules are kept in preheat's cache if the environment forbids them beside the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import subprocess, sys
from preheat.cli.bytecode import keep_bytecode
keep_bytecode("slow")
import slow
print(sys.pycache_prefix, sys.dont_write_bytecode)
print(subprocess.check_output([sys.executable, "-c", "import sys; print(sys.pycache_prefix)"], text=True).strip())
"""


def printed(folder: Path, *options: str, **variables: str) -> list[str]:
    """What a process prints that keeps the compiled form of the package `slow`, and a child of it."""
    (folder / "slow").mkdir(exist_ok=True)
    (folder / "slow/__init__.py").write_text("a = 1\n")
    mine = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[3])])
    environment = mine | {"PREHEAT_CACHE": str(folder / "cache"), "PYTHONPATH": path} | variables
    run = [sys.executable, *options, "-c", SCRIPT]
    return subprocess.check_output(run, env=environment, text=True, cwd=folder).splitlines()


def test_they_are_kept_for_this_process_and_its_children(tmp_path: Path) -> None:
    kept = tmp_path / "cache/pycache"
    assert printed(tmp_path, PYTHONDONTWRITEBYTECODE="1") == [f"{kept} False", str(kept)]
    assert [path.name.partition(".")[0] for path in kept.rglob("slow/*.pyc")] == ["__init__"]
    assert not list(tmp_path.glob("slow/__pycache__")), "the sources may be read-only, or an image's"
    assert kept.stat().st_mode & 0o077 == 0, "they are executed"


@pytest.mark.parametrize(
    "case", ["not asked", "an option", "a place of the user's", "compiled already", "no folder", "shared"]
)
def test_nothing_changes_otherwise(tmp_path: Path, case: str) -> None:
    options = ["-B"] if case == "an option" else []
    variables = {} if case in ("not asked", "an option") else {"PYTHONDONTWRITEBYTECODE": "1"}
    prefix = "None"
    if case == "a place of the user's":
        prefix = variables["PYTHONPYCACHEPREFIX"] = str(tmp_path / "elsewhere")
    if case == "compiled already":
        printed(tmp_path)
        assert list(tmp_path.glob("slow/__pycache__/*.pyc"))
    if case == "no folder":
        (tmp_path / "cache").write_text("a file")
    if case == "shared":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache/pycache").symlink_to(tmp_path / "elsewhere")
    assert printed(tmp_path, *options, **variables)[0] == f"{prefix} {bool(options or variables)}"
