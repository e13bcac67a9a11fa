"""A really pretrained model with another architecture: its loss jumps, comes back with training, and plain transformers loads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from preheat.compress.export import huggingface
from preheat.core import Device
from preheat.data import Rows, evaluation_batches, prepare
from preheat.engine.builder import build
from preheat.engine.evaluate import evaluate
from preheat.errors import RunError
from preheat.inference.load import load_model
from preheat.models.hf import compute_reference_logits
from preheat.recipe import Recipe, parse
from preheat.training.loop import train

from .conftest import Command

DEVICE = Device("cpu", "test", 8 << 30)


def _recipe(model: str, source: str, techniques: str, *, steps: int, length: int = 128) -> Recipe:
    return parse(
        f"name: surgery\nmodel: {model}\ndata: {{source: {source}, validation: 0.1, preflight: {{encoding: warn}}}}\n"
        f"batch: {{size: 8, seq_len: {length}}}\noptimizer: {{lr: 4e-3, weight_decay: 0.0}}\nstop: {{max_steps: {steps}}}\n"
        f"evaluate: {{rows: 32}}\ntechniques: {techniques}"
    )


def _untrained(recipe: Recipe, tokenizer: Path, cache: Path) -> float:
    data = prepare(recipe.data, length=recipe.batch.seq_len, seed=0, tokenizer=str(tokenizer), cache=cache)
    assert isinstance(data.validation, Rows)
    made = build(recipe, vocabulary=len(data.tokenizer), device=DEVICE)
    return evaluate(made, evaluation_batches(data.validation, micro=8, limit=32))[0]


def test_pooled_heads_recover_and_the_export_is_a_plain_llama(
    preheat: Command, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", preheat.environment["PREHEAT_CACHE"])
    stories = data_folder / "stories260K-hf"
    text = (data_folder / "text/tinystories_train_excerpt.txt").read_text()[:300_000]
    parts = re.split(r"\n(?=Once upon a time)", text)
    (tmp_path / "stories.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in parts))
    source, model = str(tmp_path / "stories.jsonl"), f"{{path: {stories}}}"
    before = _untrained(_recipe(model, source, "{}", steps=1), stories, tmp_path / "cache")
    # One head of four, and twice the positions: both must stand in the exported folder's configuration.
    surgery = "{grouped_queries: {num_kv_heads: 1}, rope_scaling: {factor: 2}}"
    recipe = _recipe(model, source, surgery, steps=60)
    jumped = _untrained(recipe, stories, tmp_path / "cache")
    assert jumped > before + 0.3
    after = train(recipe, out=tmp_path / "run")["validation_loss"]
    assert after < before + 0.5 * (jumped - before)
    assert huggingface.write(tmp_path / "run", tmp_path / "hf").max_logit_difference == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    config = loaded.config
    assert (config.num_key_value_heads, config.max_position_embeddings, config.rope_parameters["rope_type"]) == (
        1,
        1024,
        "yarn",
    )
    tokens = torch.randint(512, (1, 900), generator=torch.Generator().manual_seed(0))
    ours = load_model(tmp_path / "run").build.trained[0]
    assert torch.equal(compute_reference_logits(loaded, tokens), compute_reference_logits(ours, tokens))  # type: ignore[arg-type]


def test_a_gpt2_of_rms_norms_goes_on_and_is_exported_with_its_class(
    preheat: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", preheat.environment["PREHEAT_CACHE"])
    source = str(tmp_path / "text")
    new = "{family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 320}"
    first = _recipe(new, f"{source}, vocab_size: 300", "{}", steps=40, length=32)
    trained = train(first, out=tmp_path / "first")["validation_loss"]
    huggingface.write(tmp_path / "first", tmp_path / "hf")
    changed = _recipe(f"{{path: {tmp_path / 'hf'}}}", source, "{rms_norm: {}}", steps=20, length=32)
    assert _untrained(changed, tmp_path / "hf", tmp_path / "cache") == pytest.approx(trained, rel=1e-5)
    assert train(changed, out=tmp_path / "second")["validation_loss"] < trained
    summary = huggingface.write(tmp_path / "second", tmp_path / "own")
    assert summary.max_logit_difference == 0
    assert "modeling_gpt2_rms_norm.py), which runs if it is opened with trust_remote_code=True" in summary.note
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", trust_remote_code=True)
    tokens = torch.randint(300, (1, 24), generator=torch.Generator().manual_seed(0))
    ours = load_model(tmp_path / "second").build.trained[0]
    assert torch.equal(compute_reference_logits(loaded, tokens), compute_reference_logits(ours, tokens))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", trust_remote_code=False)
    # Other formats have no place for a class.
    with pytest.raises(RunError, match="RMSNorm in a GPT-2"):
        huggingface.write_held(tmp_path / "second", tmp_path / "never", final=False)
    assert not (tmp_path / "never").exists()
