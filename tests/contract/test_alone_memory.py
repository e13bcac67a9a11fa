"""The plain functions of techniques that save memory, in a loop written by hand."""

from __future__ import annotations

from typing import Any

import torch

from ..conftest import difference
from .by_hand import by_hand, falls, falls_by, plain_backward


def test_alone_low_bit_adamw() -> None:
    from preheat.techniques.low_bit_adamw import low_bit_adamw

    falls_by(lambda model: low_bit_adamw(model.parameters(), bits=4, block=64, least=0, lr=0.01))
    falls_by(lambda model: low_bit_adamw(model.bfloat16().parameters(), least=0, lr=0.01))


def test_alone_apollo() -> None:
    from preheat.techniques.apollo import apollo_optimizer

    def make(model: Any) -> Any:
        ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        return apollo_optimizer(model.parameters(), by_adamw=ends, lr=0.01)

    falls_by(make)


def test_alone_optimizer_in_backward() -> None:
    from preheat.techniques.optimizer_in_backward import update_in_backward

    model, tokens = by_hand()
    updates = update_in_backward(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))

    class Done:
        def step(self) -> None:
            assert all(p.grad is None for p in model.parameters())
            assert 0 < float(updates.norm()) < 10

        def zero_grad(self) -> None:
            pass

    falls(model, tokens, Done(), plain_backward)  # type: ignore[arg-type]
    before = model.lm_head.weight.detach().clone()
    updates.remove()
    plain_backward(model, tokens)
    assert torch.equal(model.lm_head.weight, before)


def test_alone_activation_offload() -> None:
    from preheat.techniques.activation_offload import offload_activations

    model, tokens = by_hand()
    plain_backward(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    assert offload_activations(model.model.layers, least=0) == 2
    plain_backward(model, tokens)
    assert difference({n: p.grad for n, p in model.named_parameters()}, whole) == 0


def test_alone_optimizer_offload() -> None:
    from preheat.techniques.optimizer_offload import host_adamw

    falls_by(lambda model: host_adamw(model.parameters(), lr=0.01))
