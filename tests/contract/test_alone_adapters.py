"""The plain functions of adapters and of NF4, in a loop written by hand."""

from __future__ import annotations

import pytest
import torch

from .by_hand import by_hand, falls, plain_backward


@pytest.mark.parametrize("variant", ["rslora", "dora", "pissa"])
def test_alone_lora_variants(variant: str) -> None:
    from preheat import add_lora
    from preheat.techniques.lora import merge_lora

    model, tokens = by_hand()
    base = model(tokens).logits.detach()
    assert len(add_lora(model, rank=4, variant=variant)) == 21
    first = model(tokens).logits.detach()
    assert float((first - base).norm() / base.norm()) < 1e-6
    falls(model, tokens, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), plain_backward)
    tuned = model(tokens).logits.detach()
    assert merge_lora(model) == 21
    assert float((model(tokens).logits - tuned).norm() / tuned.norm()) < 1e-5


def test_alone_nf4() -> None:
    from preheat import add_lora
    from preheat.techniques.lora import merge_lora
    from preheat.techniques.nf4 import from_nf4, to_nf4

    model, tokens = by_hand()
    base = model(tokens).logits.detach()
    assert len(to_nf4(model)) == 21
    rounded = model(tokens).logits.detach()
    assert 0.01 < float((rounded - base).norm() / base.norm()) < 0.3
    add_lora(model, rank=8)
    assert torch.equal(model(tokens).logits, rounded)
    falls(model, tokens, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), plain_backward)
    tuned = model(tokens).logits.detach()
    assert merge_lora(model) == 21
    assert from_nf4(model) == 0, "merging made them full"
    assert float((model(tokens).logits - tuned).norm() / tuned.norm()) < 1e-5
    other, _ = by_hand()
    to_nf4(other, double_quantization=False, keep=r".*mlp.*")
    assert from_nf4(other) == 12
    assert all(p.dtype == torch.float32 for p in other.parameters())


def test_alone_peft_adapter() -> None:
    from preheat.techniques.peft_adapter import add_peft_adapter, merge_peft_adapter

    model, tokens = by_hand()
    base = model(tokens).logits.detach()
    assert len(add_peft_adapter(model, "lokr", r=4, alpha=8)) == 21
    assert torch.equal(model(tokens).logits, base)
    falls(model, tokens, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), plain_backward)
    tuned = model(tokens).logits.detach()
    assert merge_peft_adapter(model) == 21
    assert float((model(tokens).logits - tuned).norm() / tuned.norm()) < 1e-5
