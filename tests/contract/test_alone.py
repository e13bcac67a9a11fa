"""The plain functions of each technique, in a loop written by hand."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.core import registry

from ..conftest import difference
from .by_hand import by_hand, falls, falls_by, plain_backward


def test_alone_gradient_accumulation() -> None:
    from preheat.techniques.gradient_accumulation import accumulate

    model, tokens = by_hand()
    model.zero_grad()
    plain_backward(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    accumulate(tokens.split(1), lambda part: model(part, labels=part).loss * part[:, 1:].numel(), tokens[:, 1:].numel())
    assert difference({n: p.grad for n, p in model.named_parameters()}, whole) < 1e-6


def test_alone_activation_checkpointing() -> None:
    from preheat import checkpoint_layers

    model, tokens = by_hand()
    plain_backward(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    assert checkpoint_layers(model.model.layers, keep="products") == 3
    plain_backward(model, tokens)
    assert difference({n: p.grad for n, p in model.named_parameters()}, whole) == 0
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens, use_cache=True)
    with torch.no_grad():
        model(tokens, use_cache=True)


def test_alone_chunked_loss() -> None:
    from preheat.techniques.chunked_loss import chunked_cross_entropy

    model, tokens = by_hand()

    def backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.model(tokens).last_hidden_state
        loss = chunked_cross_entropy(hidden[:, :-1], model.lm_head, tokens[:, 1:], rows=10) / tokens[:, 1:].numel()
        loss.backward()
        return loss.detach()

    assert float(backward(model, tokens)) == pytest.approx(float(model(tokens, labels=tokens).loss.detach()), rel=1e-6)
    model.zero_grad()
    falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), backward)


def test_alone_mixed_precision() -> None:
    from preheat.techniques.mixed_precision import autocast, cast_to_bf16, stochastic_adamw

    model, tokens = by_hand()
    with autocast("cpu"):
        assert model(tokens).logits.dtype == torch.bfloat16
    cast_to_bf16(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    falls(model, tokens, stochastic_adamw(model.parameters(), lr=0.01), plain_backward)


def test_alone_lora() -> None:
    from preheat import add_lora
    from preheat.techniques.lora import merge_lora

    model, tokens = by_hand()
    base = model(tokens).logits.detach()
    names = add_lora(model, rank=4)
    assert len(names) == 21
    assert torch.equal(model(tokens).logits, base), "B is zero: the adapted model starts as the base"
    trained = [p for p in model.parameters() if p.requires_grad]
    falls(model, tokens, torch.optim.AdamW(trained, lr=0.01), plain_backward)
    tuned = model(tokens).logits.detach()
    assert merge_lora(model) == 21
    assert float((model(tokens).logits - tuned).abs().max()) < 1e-5


def test_alone_efficient_attention() -> None:
    from preheat.core import MaskSpec
    from preheat.ops.attention.sdpa import reference_attention
    from preheat.techniques.efficient_attention import attend

    q, k, v = torch.randn(2, 8, 40, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    for mask in (MaskSpec(), MaskSpec(causal=False), MaskSpec(documents=((10, 30), (40,)))):
        for kernel in ("flash", "blocks"):
            a, b = attend(q, k, v, mask=mask, kernel=kernel), reference_attention(q, k, v, mask, 0.25)
            assert float((a - b).norm() / b.norm()) < 1e-6


def test_alone_lion() -> None:
    from preheat.techniques.lion import lion_optimizer

    falls_by(lambda model: lion_optimizer(model.parameters(), lr=0.003))


def test_alone_muon() -> None:
    from preheat.techniques.muon import muon_optimizer

    def make(model: Any) -> Any:
        ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        return muon_optimizer(model.parameters(), by_adamw=ends, lr=0.01)

    falls_by(make)


def test_alone_adafactor() -> None:
    from preheat.techniques.adafactor import adafactor_optimizer

    falls_by(lambda model: adafactor_optimizer(model.parameters(), lr=0.01))


def test_alone_regularized_loss() -> None:
    from preheat.techniques.regularized_loss import regularized_cross_entropy

    model, tokens = by_hand()

    def backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = regularized_cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.1, z=1e-3).mean()
        loss.backward()
        return loss.detach()

    falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), backward)


def test_every_technique_is_tested_alone() -> None:
    """In this folder's test_alone*.py, or by an example in its own file, which test_public runs."""
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_alone*.py"))
    ours = [n for n, cls in registry().items() if cls.__module__.startswith("preheat.techniques.")]  # not an engine's
    finder = doctest.DocTestFinder(exclude_empty=True)

    def has_example(name: str) -> bool:
        return any(test.examples for test in finder.find(sys.modules[f"preheat.techniques.{name}"]))

    assert [n for n in ours if f"def test_alone_{n}(" not in here and not has_example(n)] == []
