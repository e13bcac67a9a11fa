"""A really pretrained model: its published text and loss are reproduced, and it is tuned to another domain."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from preheat.data import Rows, evaluation_batches, prepare
from preheat.engine.evaluate import evaluate
from preheat.inference.load import load_model
from preheat.models.hf import compute_reference_logits
from preheat.recipe import Data, parse
from preheat.training.loop import train

from .conftest import Command


@pytest.fixture
def stories(data_folder: Path) -> Path:
    return data_folder / "stories260K-hf"


def test_its_greedy_text_is_reproduced(preheat: Command, stories: Path) -> None:
    text = preheat.here.json("generate", str(stories), "--tokens", "40")["text"]
    assert text.strip().startswith("Once upon a time, there was a little girl named Lily")


def test_its_loss_is_that_of_plain_transformers_and_near_the_published_one(
    stories: Path, data_folder: Path, tmp_path: Path
) -> None:
    text = (data_folder / "text/tinystories_train_excerpt.txt").read_text()
    parts = re.split(r"\n(?=Once upon a time)", text)[:100]
    (tmp_path / "stories.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in parts))
    opened = load_model(stories)
    # Rows of whole stories, cut at 512 tokens.
    data = Data(
        source=str(tmp_path / "stories.jsonl"),
        packing="whole",
        validation=0.0,
        preflight={"encoding": "warn", "truncated": "warn"},
    )
    rows = prepare(data, length=512, seed=0, tokenizer=str(stories), cache=tmp_path / "cache").train
    assert isinstance(rows, Rows)
    ours, tokens = evaluate(opened.build, evaluation_batches(rows, micro=8, limit=len(rows)))
    total, count = 0.0, 0
    for part in dict.fromkeys(parts):
        ids = torch.tensor([[*opened.tokenizer.encode(part), opened.tokenizer.eos_token_id][:512]])
        logits = compute_reference_logits(opened.build.trained[0], ids)  # type: ignore[arg-type]
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.numel() - 1
    assert tokens == pytest.approx(count, rel=0.005)
    assert ours == pytest.approx(total / count, rel=0.005)
    # 1.788 was taken over chunks cut in a way that is not recorded; ways of cutting range from 1.74 to 1.91.
    assert ours == pytest.approx(1.788, abs=0.12)


def _tuned(stories: Path, data_folder: Path, out: Path, techniques: str, lr: float) -> float:
    recipe = parse(
        f"name: tune\nmodel: {{path: {stories}}}\ndata: {{source: {data_folder}/text/tinyshakespeare.txt, validation: 0.05}}\n"
        f"batch: {{size: 16, seq_len: 256}}\noptimizer: {{lr: {lr}, weight_decay: 0.0}}\nstop: {{max_steps: 120}}\n"
        f"evaluate: {{rows: 64}}\ntechniques: {techniques}"
    )
    return float(train(recipe, out=out)["validation_loss"])


@pytest.mark.slow
def test_lora_and_full_tuning_lower_the_held_out_loss_of_shakespeare(
    preheat: Command, stories: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", preheat.environment["PREHEAT_CACHE"])
    before = preheat.here.json(
        "eval", str(stories), "--data", str(data_folder / "text/tinyshakespeare.txt"), "--rows", "64"
    )["loss"]
    assert before == pytest.approx(4.73, abs=0.15)
    full = _tuned(stories, data_folder, tmp_path / "full", "{efficient_attention: {}, chunked_loss: {}}", 5e-3)
    lora = _tuned(
        stories,
        data_folder,
        tmp_path / "lora",
        "{efficient_attention: {}, chunked_loss: {}, lora: {rank: 8, alpha: 32}}",
        1e-2,
    )
    assert full < before - 1.5
    assert lora < before - 0.5
