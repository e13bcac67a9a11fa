"""Commands as a user types them, in a temporary folder."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ..conftest import SMALL
from ..fork_server import Fork

RECIPE = """\
name: small
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 320}
data: {source: text, vocab_size: 300, validation: 0.2}
batch: {size: 4, seq_len: 32}
optimizer: {lr: 0.01}
stop: {max_steps: 12}
checkpoint: {every: 5}
techniques: {mixed_precision: {mode: bf16_weights}, chunked_loss: {rows: 64}, efficient_attention: {}}
"""


class Command:
    """Runs `preheat` in a folder with a cache that all tests share, so that the machine is measured once."""

    def __init__(self, folder: Path, cache: Path):
        self.folder = folder
        self.environment = {
            **os.environ,
            "PREHEAT_CACHE": str(cache),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def start(self, *arguments: str, **options: Any) -> Fork:
        """Starts the command in a process of its own, which need not import torch and the rest again."""
        return Fork(arguments, folder=self.folder, environment=self.environment, **options)

    def start_alone(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts the command as a user does, and not as a fork."""
        return subprocess.Popen(
            [sys.executable, "-m", "preheat", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        process = self.start(*arguments)
        out, error = process.communicate(timeout=300)
        assert process.returncode == code, f"exit {process.returncode}, expected {code}\n{out}\n{error}"
        return out, error

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        return json.loads(self(*arguments, "--json", code=code)[0])

    @property
    def here(self) -> InThisProcess:
        """The same commands in this process: a process for each takes longer than most of them."""
        return InThisProcess(self.folder, self.environment)


class InThisProcess:
    """Runs `preheat` as its entry point does, but without a process of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder, self.environment = folder, environment

    def __call__(self, *arguments: str, code: int = 0, said: str = "") -> tuple[str, str]:
        from preheat.cli import main

        out, error = io.StringIO(), io.StringIO()
        # A run's curves take a third of a second to draw; runs in processes of their own and the unit tests draw them.
        drawn = (
            mock.patch("preheat.report.svg.render_plot", return_value="") if arguments[0] == "train" else nullcontext()
        )
        with (
            drawn,
            chdir(self.folder),
            mock.patch.dict(os.environ, self.environment),
            mock.patch.object(sys, "stdin", io.StringIO(said)),
            redirect_stdout(out),
            redirect_stderr(error),
            pytest.raises(SystemExit) as ended,
        ):
            main(list(arguments))
        ended_with = ended.value.code or 0
        assert ended_with == code, f"exit {ended_with}, expected {code}\n{out.getvalue()}\n{error.getvalue()}"
        return out.getvalue(), error.getvalue()

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        return json.loads(self(*arguments, "--json", code=code)[0])


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rates of this machine by a few small sizes: `preheat calibrate` takes a minute or more, and again if others kept the cores busy.

    Without a note of the machine's use, so that no plan doubts them.
    """
    from preheat.hardware.benchmark_rates import calibrate
    from preheat.hardware.probe import probe

    folder = tmp_path_factory.mktemp("cache")
    with mock.patch.dict(os.environ, {"PREHEAT_CACHE": str(folder)}):
        dataclasses.replace(calibrate(probe("cpu"), 1, grid=SMALL), contended=False, machine=None).store()
    return folder


def write_text(folder: Path) -> None:
    """Writes the text of the small recipe: 40 files."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog",
        "while",
        "seven",
        "wizards",
        "box",
        "with",
        "quiet",
        "jackdaws",
        "by",
        "night",
    ]
    (folder / "text").mkdir()
    for n in range(40):
        lines = [" ".join(words[(n * k + k) % len(words)] for k in range(1, 12)) + f" {n} {i}." for i in range(30)]
        (folder / "text" / f"{n:02}.txt").write_text("\n".join(lines))


@pytest.fixture
def preheat(tmp_path: Path, cache: Path) -> Command:
    """A folder with a small recipe (r.yaml) and the text it reads."""
    write_text(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return Command(tmp_path, cache)


def losses(run: Path) -> dict[int, float]:
    """Step -> loss, as last logged."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


Losses = Callable[[Path], dict[int, float]]
