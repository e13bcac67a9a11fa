"""The wheel and the source archive, as `make dist` builds them, installed in an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_wheel_has_all_files_and_runs_without_a_compiler(tmp_path: Path) -> None:
    # Of the tracked files alone: a build of the working folder would take what lies around in it.
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if not name.startswith(("tests/", "benchmarks/", "docs/", "notebooks/")):
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", tmp_path / "source")
    run(sys.executable, "-m", "twine", "check", "--strict", *(tmp_path / "dist").iterdir())
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    package = {name for name in tracked.split("\0") if name.startswith("preheat/")}
    with zipfile.ZipFile(wheel) as opened_wheel:
        assert {name for name in opened_wheel.namelist() if ".dist-info/" not in name} == package
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert package <= inside
    assert not [name for name in inside if name.startswith("tests")]
    # An environment with the wheel, and the packages of this one.
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty/bin/python"
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel, env=alone)
    (site,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {
        "PATH": "/nowhere",  # no compiler
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    where = run(python, "-c", "import preheat; print(preheat.__file__)", cwd=tmp_path, env=environment)
    assert where.startswith(str(site))
    command = tmp_path / "empty/bin/preheat"
    assert "demo" in run(command, "recipes", cwd=tmp_path, env=environment)
    limits = ("--set", "stop.max_steps=2", "--set", "data.limit=40", "--set", "evaluate.rows=4")
    printed = run(command, "train", "demo", *limits, "--out", "run", cwd=tmp_path, env=environment)
    assert "compiler" in printed, "it says what is slower without one"
    assert (tmp_path / "run/report.html").is_file()
