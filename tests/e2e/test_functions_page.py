"""The scripts of the page on functions run as they are printed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINER, ZERO = re.findall(
    r"```python\n(.*?)\n```", (ROOT / "docs/pages/functions.md").read_text(encoding="utf-8"), re.DOTALL
)


def run(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PREHEAT_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_trainer_script_has_the_losses_of_the_plain_trainer(tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_text(TRAINER)
    # The same adapters, with transformers' attention, its loss, and nothing recomputed.
    plain = TRAINER.replace("trainer = ChunkedLossTrainer(", "trainer = Trainer(")
    plain = "\n".join(
        line for line in plain.splitlines() if not line.startswith(("convert_model", "checkpoint_layers("))
    )
    assert plain != TRAINER
    (tmp_path / "plain.py").write_text(plain)
    printed = [run(tmp_path, name) for name in ("changed.py", "plain.py")]
    losses = [[float(loss) for loss in re.findall(r"\d\.\d+", text.splitlines()[-1])] for text in printed]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert "14 matrices" in printed[0]


def test_the_loop_shards_its_states(tmp_path: Path) -> None:
    (tmp_path / "zero.py").write_text(ZERO)
    printed = run(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "zero.py")
    lines = re.findall(r"rank (\d), step (\d): loss ([\d.]+), ([\d,]+) bytes", printed)
    states = {rank: int(size.replace(",", "")) for rank, step, _, size in lines if step == "2"}
    parameters = 256 * 64 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256)
    assert len(lines) == 6
    assert set(states) == {"0", "1"}
    # Two moments of 4 bytes for each parameter, divided among the ranks, and a counter for each parameter tensor.
    assert sum(states.values()) == pytest.approx(8 * parameters, rel=0.01)
    assert max(states.values()) < 0.7 * sum(states.values())
