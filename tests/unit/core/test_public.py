"""preheat from Python: its names, what importing prints, and what a run tells."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import preheat
from preheat.training.observer import Logged


def test_dir_lists_the_public_names():
    assert set(preheat.__all__) <= set(dir(preheat))
    assert all(callable(getattr(preheat, name)) for name in preheat.__all__)


def test_a_plan_and_a_run_from_python(tmp_path: Path):
    """In a process of its own: nothing but the run's own lines is printed, importing included."""
    code = """
import preheat
recipe = preheat.load_recipe("r.yaml")
preheat.plan(recipe)
print("planned")
preheat.train(recipe, out="told")
preheat.train(recipe, out="silent", progress=False)
"""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"This is text {number}, of a few short words. " * 20)
    (tmp_path / "r.yaml").write_text(
        "{name: r, model: {num_layers: 1, hidden_size: 32, num_heads: 2}, data: {source: text, vocab_size: 300, validation: 0.2}, "
        "batch: {size: 2, seq_len: 32}, stop: {max_steps: 3}, hardware: {threads: 1}}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    assert done.stdout == "planned\n"
    lines = [line for line in done.stderr.splitlines() if "measuring this machine" not in line]
    assert lines[0] == "reading data"
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == ["step 1 of 3", "step 3 of 3", "step 3"]
    assert all(
        line.startswith(("reading", "planning", "planned: ", "building", "training", "step ")) for line in lines
    ), lines


def test_a_logger_of_the_users_own_gets_the_lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "preheat.run")
    watch = Logged()
    watch.stage("reading data")
    watch.step({"step": 1, "loss": 2.0, "tokens_per_second": 1234.0}, 9)
    watch.alarm("look here")
    assert caplog.messages == ["reading data", "step 1 of 9: loss 2.0000, 1,234 tokens/s", "look here"]


def test_the_stated_versions_of_torch_and_transformers_are_those_that_are_tested() -> None:
    house = Path(preheat.__file__).parents[1]
    if not (house / "requirements.lock").is_file():
        pytest.skip("installed without its sources")
    stated = tomllib.loads((house / "pyproject.toml").read_text())["project"]["dependencies"]
    locked = dict(
        line.split("==") for line in (house / "requirements.lock").read_text().split() if line.count("==") == 1
    )
    # A newer major release is refused.
    assert f"transformers>={'.'.join(locked['transformers'].split('.')[:2])},<6" in stated
    # make test-torch tests the oldest torch.
    oldest = re.search(r"^TORCH \?= (\d+\.\d+)\.", (house / "Makefile").read_text(), re.MULTILINE)
    assert oldest is not None
    assert f"torch>={oldest[1]}" in stated
