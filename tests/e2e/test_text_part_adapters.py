"""Adapters of the text part of vision-language checkpoints: for the published class, read by peft and by preheat."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from preheat.inference.load import load_model
from preheat.models import hf

from ..architectures.columns import RECIPE, write_data
from ..unit.models.test_text_part import TEXT, WHOLE, part_of, whole_model
from .conftest import Command


@pytest.mark.filterwarnings("ignore")  # peft's and transformers' own
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "gemma3" else pytest.mark.slow) for f in WHOLE if f != "gemma4_unified"]
)
def test_an_adapter_of_a_text_part_is_for_the_published_class(
    family: str, preheat: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path)
    home = tmp_path / "home"
    shutil.copytree(tmp_path / "tokenizer", home / "model")
    monkeypatch.setitem(TEXT, "vocab_size", 320)
    text = WHOLE[family]["text_config"]
    more = {"vocab_size_per_layer_input": 320} if "vocab_size_per_layer_input" in text else {}
    whole = whole_model(family, home / "model", text_config={**text, **more})
    with torch.no_grad():
        for p in whole.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    whole.save_pretrained(home / "model")
    path = json.dumps({"path": str(home / "model"), **part_of(family)})
    recipe, run, out = home / "r.yaml", home / "run", home / "adapter"
    recipe.write_text(RECIPE.replace("{path: model}", path).replace("../rows", str(tmp_path / "rows")))
    settings = "{expert_rank: 4}" if family == "qwen3_5_moe" else "{}"
    preheat.here("train", str(recipe), "--out", str(run), "--set", f"techniques.lora={settings}")
    preheat.here("export", str(run), "--to", "peft", "--out", str(out))

    tokens = torch.arange(3, 35)[None]
    ours: Any = load_model(run).build.trained[0]
    wanted = hf.compute_reference_logits(ours, tokens)
    (kind,) = json.loads((home / "model/config.json").read_text())["architectures"]
    published = getattr(transformers, kind).from_pretrained(home / "model", dtype=torch.float32)
    before = hf.compute_reference_logits(published, tokens)
    adapted = peft.PeftModel.from_pretrained(published, out)
    logits = hf.compute_reference_logits(adapted.get_base_model(), tokens)  # type: ignore[arg-type]
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-5
    assert float((logits - before).norm() / before.norm()) > 1e-2, "the adapter does nothing"
    if settings != "{}":  # preheat reads no adapters of experts
        return
    again: Any = load_model(out).build.trained[0]
    assert float((hf.compute_reference_logits(again, tokens) - wanted).norm() / wanted.norm()) < 1e-5
    with contextlib.chdir(home):
        preheat.here("train", str(recipe), "--out", "more", "--set", f"techniques.lora={{start: {out}}}")
