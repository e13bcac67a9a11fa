"""Encoder-decoder models: loss and gradients of packed rows are transformers' own of each prompt with its answer; what composes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from preheat.core import Batch, MaskSpec, registry
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import DataError, RecipeError
from preheat.models.encoder_decoder import split_documents
from preheat.recipe import Recipe, parse

from ...conftest import DEVICE, difference

SIZES: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 96,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
FAMILIES: dict[str, Any] = {
    "t5, relu, scaled head": lambda: transformers.T5Config(**SIZES),
    "t5 1.1, gated": lambda: transformers.T5Config(**SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": lambda: transformers.MT5Config(**SIZES),
}
DOCUMENTS = (((9, 5), (20, 6), (6, 3)), ((30, 12),))
"""Of each row (length, prompt) of its documents; what is left is padding."""


def folder(config: Any, path: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(path)
    return path


def recipe_of(path: Path, techniques: str = "{}") -> Recipe:
    return parse(
        f"model: {{path: {path}}}\nbatch: {{size: 2, seq_len: 40}}\noptimizer: {{lr: 0.01, max_grad_norm: 0}}\nstop: {{max_steps: 5}}\ntechniques: {techniques}"
    )


def packed(length: int = 40) -> Batch:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 96, (2, length), generator=g)
    labels = torch.full_like(tokens, -100)
    rows = []
    for row, documents in enumerate(DOCUMENTS):
        begin = 0
        for size, prompt in documents:
            labels[row, begin + prompt - 1 : begin + size - 1] = tokens[row, begin + prompt : begin + size]
            begin += size
        rows.append((*(size for size, _ in documents), *([length - begin] if begin < length else [])))
    return Batch(
        tokens, labels, torch.zeros_like(tokens), MaskSpec(documents=tuple(rows)), int((labels != -100).sum()), (0, 1)
    )


def theirs(path: Path, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and gradients of transformers' own forward, one prompt with its answer after the other."""
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, attn_implementation="eager")
    total = 0.0
    for row, documents in enumerate(DOCUMENTS):
        begin = 0
        for size, prompt in documents:
            text = batch.tokens[row, begin : begin + size]
            loss = (
                model(input_ids=text[None, :prompt], labels=text[None, prompt:]).loss * (size - prompt) / batch.weight
            )
            loss.backward()
            total += float(loss.detach())
            begin += size
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_prompts_and_answers_one_by_one(family: str, tmp_path: Path) -> None:
    path, batch = folder(FAMILIES[family](), tmp_path / "m"), packed()
    made = build(recipe_of(path), vocabulary=96, device=DEVICE)
    loss = accumulate_gradients(made, [batch])
    wanted, grads = theirs(path, batch)
    assert float(loss.total) / batch.weight == pytest.approx(wanted, rel=1e-6)
    assert difference({name: p.grad for name, p in made.parameters()}, grads) < 1e-5
    assert made.model.layers == 5


COMPOSED = (
    "activation_checkpointing: {}",
    "activation_checkpointing: {mode: selective}",
    "chunked_loss: {rows: 8}",
    "gradient_accumulation: {steps: 2}",
    "muon: {}",
    "optimizer_in_backward: {}",
)


def test_those_that_serve_with_an_encoder_are_those_that_were_tried() -> None:
    serving = {name for name, t in registry().items() if t.supports_encoder_decoder}
    tried = {part.split(":")[0] for part in COMPOSED} | {
        "lora",
        "mixed_precision",
        "lion",
        "adafactor",
        "regularized_loss",
    }
    assert serving <= tried | {"fsdp", "data_parallel"}  # these on two processes, tests/distributed


@pytest.mark.parametrize("technique", COMPOSED)
def test_exact_techniques_leave_the_gradients_as_they_are(technique: str, tmp_path: Path) -> None:
    path, batch = folder(FAMILIES["t5 1.1, gated"](), tmp_path / "m"), packed()
    plain = build(recipe_of(path), vocabulary=96, device=DEVICE)
    other = build(recipe_of(path, f"{{{technique}}}"), vocabulary=96, device=DEVICE)
    losses = [float(accumulate_gradients(made, [batch], 1e-3).total) for made in (plain, other)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    if "optimizer_in_backward" not in technique:
        grads = [{name: p.grad for name, p in made.parameters()} for made in (plain, other)]
        assert difference(*grads) < 1e-5


@pytest.mark.parametrize(
    "technique",
    [
        "lora: {rank: 4}",
        "mixed_precision: {mode: bf16}",
        "lion: {}",
        "adafactor: {}",
        "regularized_loss: {z: 1.0e-4}",
        "muon: {}",
    ],
)
def test_others_learn_an_answer(technique: str, tmp_path: Path) -> None:
    path, batch = folder(FAMILIES["t5 1.1, gated"](), tmp_path / "m"), packed()
    made = build(recipe_of(path, f"{{{technique}}}"), vocabulary=96, device=DEVICE)
    losses = []
    for _ in range(12):
        losses.append(float(accumulate_gradients(made, [batch], 1e-2).total) / batch.weight)
        update(made, 1e-2)
    assert losses[-1] < losses[0] - 0.3, losses


def test_what_cannot_be_read_or_written_is_refused(tmp_path: Path) -> None:
    path, batch = folder(FAMILIES["mt5"](), tmp_path / "m"), packed()
    text = replace(batch, labels=batch.tokens, weight=80, rows=(7, 8))
    with pytest.raises(
        DataError, match=r"sequences 7, 8: all documents are trained from their first token on.*prompt_completion"
    ):
        split_documents(text)
    with pytest.raises(
        RecipeError, match=r"sliding_window: was made for decoder-only models, and mt5 has an encoder; leave it out"
    ):
        build(recipe_of(path, "{sliding_window: {window: 8}}"), vocabulary=96, device=DEVICE)
    told = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(told | {"dropout_rate": 0.1}))
    (change,) = build(recipe_of(path), vocabulary=96, device=DEVICE).changes["dropout"]
    assert "dropout_rate 0.1" in change.what


def test_padding_alone_takes_part_and_weighs_nothing(tmp_path: Path) -> None:
    made = build(recipe_of(folder(FAMILIES["mt5"](), tmp_path / "m")), vocabulary=96, device=DEVICE)
    batch = packed()
    blank = replace(batch, labels=torch.full_like(batch.labels, -100), weight=0)
    loss = accumulate_gradients(made, [batch, blank])
    alone = build(recipe_of(tmp_path / "m"), vocabulary=96, device=DEVICE)
    assert float(loss.total) == pytest.approx(float(accumulate_gradients(alone, [batch]).total), rel=1e-6)
