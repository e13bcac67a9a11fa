"""A run's measured peak does not depend on the runs before it in the same process."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest

from preheat import train
from preheat.hardware.cpu_allocator import unavailable_reason
from preheat.integrations import PlanCallback
from preheat.recipe import parse
from preheat.run.reader import Reader

from ..fork_server import Fork
from .conftest import Command
from .test_trainer_integration import create_model, create_trainer

RECIPE = """\
name: wide
model: {{num_layers: 2, hidden_size: 64, num_heads: 2, vocab_size: 8192}}
data: {{source: text, vocab_size: 300, validation: 0.1}}
batch: {{size: {rows}, seq_len: 128}}
stop: {{max_steps: 2}}
evaluate: {{rows: 4}}
"""  # logits of 4 MiB a row: most of the memory


def train_here(*row_counts: str) -> None:
    """Trains with each number of rows, and prints the measured peaks in GiB."""
    for rows in row_counts:
        result = train(parse(RECIPE.format(rows=rows)), out=Path(tempfile.mkdtemp(dir=".")) / "run", progress=False)
        print(result["peak_gib"])


def train_trainers_here(*row_counts: str) -> None:
    """As `train_here`, with transformers' Trainer."""
    logging.disable()
    for rows in row_counts:
        trainer = create_trainer(
            Path(tempfile.mkdtemp(dir=".")),
            steps=2,
            model=create_model(vocab_size=8192),
            per_device_train_batch_size=int(rows),
            logging_strategy="no",
        )
        callback = PlanCallback()
        trainer.add_callback(callback)
        trainer.train()
        print(Reader(callback.run).measured().peak_gib)


@pytest.mark.skipif(unavailable_reason() is not None, reason="needs a C++ compiler, for preheat's heap")
@pytest.mark.parametrize("function", [train_here, train_trainers_here])
def test_a_second_run_in_a_process_measures_the_peak_that_it_measures_alone(preheat: Command, function) -> None:
    def measure(*row_counts: str) -> list[float]:
        process = Fork(
            row_counts,
            function=f"{__name__}:{function.__name__}",
            folder=preheat.folder,
            environment=preheat.environment,
        )
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return [float(line) for line in printed.splitlines() if line[:1].isdigit()]

    (alone,) = measure("24")
    first, second = measure("32", "24")
    assert first > 1.2 * alone
    # Code and modules that a process loads in its first step stay resident: about 12 MiB.
    assert alone > 0.25
    assert second == pytest.approx(alone, rel=0.05)
