"""Architectures of today: the loss and gradients of packed rows are transformers' own, one document at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from preheat.core import MaskSpec
from preheat.core.registry import problems_of
from preheat.engine.builder import build, context_of
from preheat.engine.step import gradients
from preheat.errors import RecipeError
from preheat.models import configs, hf, moe
from preheat.models.sinks import in_chunks, with_sinks
from preheat.models.token_mixers import attentions_of, recurrent_mixers, split_documents
from preheat.ops.attention.sdpa import reference_attention
from preheat.recipe import parse

from ...architectures import ARCHITECTURES, create_model, tiny_config
from ...conftest import DEVICE, difference, uneven

# One of each kind: delta net, Mamba 2 with experts, sinks with windows, convolution, shared keys, chunks.
KINDS = ["qwen3_5_text", "granitemoehybrid", "gpt_oss", "lfm2", "gemma4_text", "llama4_text"]
REFUSED = {"phi": "the head of PhiForCausalLM has a bias", "stablelm": "does not let its layers use preheat"}
BALANCED = ("mixtral", "qwen3_moe")  # their routers' loss is on by default here
TECHNIQUES = "{efficient_attention: {}, chunked_loss: {rows: 40}, activation_checkpointing: {}}"


def _alone(model: Any, batch: Any) -> Any:
    """The mean loss by transformers' own eager forward, each document a call of its own."""
    total = torch.zeros(())
    for row, documents in enumerate(batch.mask.documents):
        start = 0
        for n in documents:
            span = slice(start, start + n)
            logits = model(input_ids=batch.tokens[row : row + 1, span], use_cache=False).logits[0].float()
            total = total + functional.cross_entropy(
                logits, batch.labels[row, span], ignore_index=-100, reduction="sum"
            )
            start += n
    return total / batch.weight


def _check(name: str, folder: Path) -> None:
    config = tiny_config(name)
    configs.without_dropout(config)
    plain = create_model(config)
    plain.save_pretrained(folder)
    batch = uneven()
    expected = _alone(plain.train(), batch)
    expected.backward()
    recipe = parse(
        f"model: {{path: {folder}}}\nbatch: {{size: 4, length: 32}}\noptimizer: {{lr: 0.01}}\nstop: {{steps: 4}}\n"
        f"techniques: {TECHNIQUES}\n"
    )
    ours = build(recipe, vocabulary=96, device=DEVICE)
    loss = gradients(ours, [batch])
    assert float(loss.total.detach() / loss.weight) == pytest.approx(float(expected.detach()), rel=1e-5)
    theirs: dict[str, Any] = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    found: dict[str, Any] = {key: p.grad for key, p in ours.trained[0].named_parameters() if p.grad is not None}
    # The chunks of a delta rule sum exponentials in another order for other lengths.
    assert difference(found, theirs) < (2e-4 if "linear_num_key_heads" in ARCHITECTURES[name] else 2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_packed_rows_are_their_documents(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*KINDS, *REFUSED, *BALANCED)])
def test_packed_rows_are_their_documents_in_every_architecture(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_be_trained_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=REFUSED[name]):
        _check(name, tmp_path)


def test_layers_and_experts_are_read_from_modules_and_configurations_alike() -> None:
    recurrent = {"linear_attention", "conv", "mamba", "hybrid"}
    for name in ARCHITECTURES:
        config = tiny_config(name)
        with torch.device("meta"):
            model = create_model(config)
        layers = hf.anatomy(model).layers if name != "phi" else model.model.layers
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        assert len(layers) == config.num_hidden_layers
        for kind, layer in zip(kinds, layers, strict=True):
            assert bool(recurrent_mixers(layer)) == (kind in recurrent), (name, kind)
            assert bool(attentions_of(layer)) == (
                (kind.endswith("attention") and kind != "linear_attention") or kind == "hybrid"
            ), (name, kind)
        assert len(moe.routers(model)) == moe.expert_layers(config), name
        recurrent_layers = any(recurrent_mixers(layer) for layer in layers)
        assert (hf.facts(config).special_mixers == "recurrent layers") == recurrent_layers, name
        assert hf.facts(config).sinks == any("sinks" in m._parameters for m in model.modules()), name


def test_a_document_reaches_a_recurrent_mixer_alone() -> None:
    hidden = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    mixed = split_documents(hidden, ((2, 6, 1), (9,)), lambda x: x.cumsum(1))
    parts = [*hidden[0].split([2, 6, 1]), hidden[1]]
    expected = torch.cat([part.cumsum(0) for part in parts]).view(2, 9, 3)
    assert torch.equal(mixed, expected)
    weights = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (ours,) = torch.autograd.grad((mixed * weights).sum(), hidden, retain_graph=True)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), hidden)
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_sinks_take_part_in_the_softmax(window: int | None) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 7, 8, dtype=torch.float64, generator=g) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=g, requires_grad=True)
    mask = MaskSpec(window=window, documents=((3, 4), (7,)))
    out = with_sinks(reference_attention, q, k, v, mask, 0.3, sinks)
    place = torch.arange(7)
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0] * 7])
    seen = (place[:, None] >= place) & (place[:, None] - place < (window or 7))
    seen = (seen & (document[:, :, None] == document[:, None]))[:, None]
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3).masked_fill(~seen, float("-inf"))
    column = sinks[None, :, None, None].expand(2, 4, 7, 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    assert torch.allclose(out, expected, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.square().sum(), sinks, retain_graph=True)[0] for x in (out, expected))
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_chunks_are_documents_cut_from_their_start() -> None:
    assert in_chunks(MaskSpec(), 3, 2, 7).documents == ((3, 3, 1), (3, 3, 1))


@pytest.mark.parametrize(
    ("name", "reason"), [("lfm2", "recurrent layers"), ("gpt_oss", "attention sinks"), ("llama4_text", "in chunks")]
)
def test_what_needs_whole_documents_is_not_split_or_compiled(name: str, reason: str) -> None:
    for technique in ("compile: {}", "tensor_parallel: {degree: 2}", "context_parallel: {degree: 2}"):
        recipe = parse(f"batch: {{size: 4}}\nstop: {{max_steps: 1}}\ntechniques: {{data_parallel: {{}}, {technique}}}")
        context = context_of(recipe, tiny_config(name), DEVICE, world=2)
        problems = [problem.text for t in recipe.techniques.values() for problem in problems_of(t, context)]
        assert any(reason in problem for problem in problems), technique
