"""A really pretrained model: its published text and loss are reproduced, and it is tuned to another domain."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.recipe import parse
from preheat.training.loop import train

from .conftest import Command


@pytest.fixture
def stories(data_folder: Path) -> Path:
    return data_folder / "stories260K-hf"


def test_its_greedy_text_and_its_loss_are_reproduced(preheat: Command, stories: Path, data_folder: Path) -> None:
    text = preheat.json("generate", str(stories), "--tokens", "40")["text"]
    assert text.strip().startswith("Once upon a time, there was a little girl named Lily")
    found = preheat.json(
        "eval", str(stories), "--data", str(data_folder / "text/tinystories_train_excerpt.txt"), "--rows", "300"
    )
    assert found["loss"] == pytest.approx(1.788, abs=0.05)  # chunks are cut elsewhere than where the figure was taken


def _tuned(stories: Path, data_folder: Path, out: Path, techniques: str, lr: float) -> float:
    recipe = parse(
        f"name: tune\nmodel: {{path: {stories}}}\ndata: {{source: {data_folder}/text/tinyshakespeare.txt, validation: 0.05}}\n"
        f"batch: {{size: 16, length: 256}}\noptimizer: {{lr: {lr}, weight_decay: 0.0}}\nstop: {{steps: 120}}\n"
        f"evaluate: {{rows: 64}}\ntechniques: {techniques}"
    )
    return float(train(recipe, out=out)["validation_loss"])


def test_lora_and_full_tuning_lower_the_held_out_loss_of_shakespeare(
    preheat: Command, stories: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", preheat.environment["PREHEAT_CACHE"])
    before = preheat.json("eval", str(stories), "--data", str(data_folder / "text/tinyshakespeare.txt"), "--rows", "64")["loss"]
    assert before == pytest.approx(4.73, abs=0.15)
    full = _tuned(stories, data_folder, tmp_path / "full", "{efficient_attention: {}, chunked_loss: {}}", 5e-3)
    lora = _tuned(
        stories, data_folder, tmp_path / "lora", "{efficient_attention: {}, chunked_loss: {}, lora: {rank: 8, alpha: 32}}", 1e-2
    )
    assert full < before - 1.5
    assert lora < before - 0.5
