"""The plain functions of adapters and of NF4, in a loop written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..unit.seeing import tiny_folder
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
    from preheat.techniques.nf4 import dequantize_from_nf4, quantize_to_nf4

    model, tokens = by_hand()
    base = model(tokens).logits.detach()
    assert len(quantize_to_nf4(model)) == 21
    rounded = model(tokens).logits.detach()
    assert 0.01 < float((rounded - base).norm() / base.norm()) < 0.3
    add_lora(model, rank=8)
    assert torch.equal(model(tokens).logits, rounded)
    falls(model, tokens, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), plain_backward)
    tuned = model(tokens).logits.detach()
    assert merge_lora(model) == 21
    assert dequantize_from_nf4(model) == 0, "merging made them full"
    assert float((model(tokens).logits - tuned).norm() / tuned.norm()) < 1e-5
    other, _ = by_hand()
    quantize_to_nf4(other, double_quantization=False, keep=r".*mlp.*")
    assert dequantize_from_nf4(other) == 12
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


def test_alone_vision_tower(tmp_path: Path) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    from preheat.models.vision import PROJECTORS
    from preheat.techniques.vision_tower import train_tower

    model = Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder(tmp_path))
    tower, pieces = model.model.visual, torch.tensor([[1, 2, *[model.config.image_token_id] * 6, 7, 8, 9]])
    seen = {
        "input_ids": pieces,
        "mm_token_type_ids": (pieces == model.config.image_token_id).int(),
        "pixel_values": torch.randn(24, 96),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }
    whole = sum(p.numel() for p in tower.parameters())
    mergers = sum(p.numel() for p in (*tower.merger.parameters(), *tower.deepstack_merger_list.parameters()))
    for train, wanted in (("all", whole), ("frozen", 0), ("projectors", mergers)):
        assert train_tower(tower, train, PROJECTORS) == (wanted, whole)  # type: ignore[arg-type]
    before = {n: p.clone() for n, p in tower.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(8):
        loss = model(**seen, labels=pieces.where(pieces != model.config.image_token_id, -100)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.15, losses
    changed = {n.partition(".")[0] for n, p in tower.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(PROJECTORS)
