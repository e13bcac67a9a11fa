"""A recipe with a teacher, as a user types it: planned, trained, resumed, exported without the teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command, losses

RECIPE = """\
name: student
model: {{num_layers: 2, hidden_size: 48, num_heads: 4}}
data: {{source: stories.txt, tokenizer: {teacher}, validation: 0.1, preflight: {{encoding: warn}}}}
batch: {{size: 8, seq_len: 64}}
optimizer: {{lr: 0.02}}
stop: {{max_steps: 12}}
checkpoint: {{every: 6}}
evaluate: {{rows: 16}}
techniques:
  chunked_loss: {{rows: 128}}
  efficient_attention: {{}}
  gradient_accumulation: {{steps: 2}}
  distillation: {{teacher: {teacher}}}
"""


@pytest.fixture
def teacher(preheat: Command, data_folder: Path) -> Path:
    """A copy of a really trained model that a test may take away, beside a recipe (d.yaml) and stories."""
    folder = preheat.folder / "teacher"
    shutil.copytree(data_folder / "stories260K-hf", folder)
    text = (data_folder / "text/tinystories_train_excerpt.txt").read_text()[:80_000]
    (preheat.folder / "stories.txt").write_text(text)
    (preheat.folder / "d.yaml").write_text(RECIPE.format(teacher=folder))
    return folder


def logged(run: Path) -> list[dict[str, Any]]:
    return [
        found
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "divergence" in (found := json.loads(line))
    ]


def test_a_student_learns_from_its_teacher_and_is_exported_without_it(preheat: Command, teacher: Path) -> None:
    from transformers import AutoModelForCausalLM

    told = preheat.here.json("train", "d.yaml", "--out", "run")
    run = preheat.folder / "run"
    assert told["predicted"]["peak_gib"] > 0
    steps = logged(run)
    assert len(steps) == 12
    assert steps[-1]["divergence"] < 0.8 * steps[0]["divergence"]
    assert "a teacher of 260,032 parameters" in (run / "changes.json").read_text()
    shutil.rmtree(teacher)  # it is not needed any more
    made = preheat.here.json("export", "run", "--out", "small")
    model = AutoModelForCausalLM.from_pretrained(preheat.folder / "small")
    assert model.config.num_hidden_layers == 2
    assert made["max_logit_difference"] < 1e-4
    again = preheat.here.json("eval", "run", "--rows", "16")
    assert again["loss"] == pytest.approx(told["validation_loss"], rel=1e-3)


@pytest.mark.parametrize(
    "cache",
    [
        "",
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ("cache: kept, top_k: 16, mixture: 0.7", "on_policy: 0.5")
        ),
    ],
)
def test_resumed_every_loss_is_the_same(preheat: Command, teacher: Path, cache: str) -> None:
    more = ["--set", f"techniques.distillation={{teacher: {teacher}, {cache or 'hidden: 0.1'}}}"]
    preheat.here("train", "d.yaml", "--out", "whole", *more)
    whole, part = preheat.folder / "whole", preheat.folder / "part"
    wanted = losses(whole)
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step-12")
    preheat.here("train", "d.yaml", "--out", "part", "--resume", *more)
    assert [step for step in wanted if losses(part)[step] != wanted[step]] == []
    if "on_policy" in cache:
        assert all(0 < line["on_policy"] < 1 for line in logged(whole))
    elif cache:
        assert "the teacher read" in (whole / "events.jsonl").read_text()
        assert (part / "events.jsonl").read_text().count("the teacher read") == 1  # of the run that it is a copy of
    else:
        file = teacher / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 64 * 32 + 7] ^= 1
        file.write_bytes(content)
        shutil.rmtree(part / "checkpoints" / "step-12")
        _, error = preheat.here("train", "d.yaml", "--out", "part", "--resume", *more, code=1)
        assert "teacher's weights changed" in error


def test_a_teacher_of_other_tokens_is_refused_in_a_line(preheat: Command, teacher: Path) -> None:
    _, error = preheat.here("train", "d.yaml", "--out", "run", "--set", "data.tokenizer=null", code=2)
    assert f"set data.tokenizer: {teacher}" in error
    assert "Traceback" not in error
