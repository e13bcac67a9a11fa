"""Kernels given to one model: the model computes by them, and no other model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from preheat.core import Device, registry
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.models.kernel_swap import use_kernels

from ...conftest import DEVICE, difference, tiny, uneven


def _grads(b: Any) -> dict[str, torch.Tensor]:
    from preheat.engine.step import accumulate_gradients

    accumulate_gradients(b, [uneven()])
    return {n: p.grad.clone() for n, p in b.parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_computes_by_the_kernels_it_was_given_and_others_do_not(family: str) -> None:
    calls = {"norm": 0, "rotary": 0, "gate": 0}

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        calls["norm"] += 1
        return rms_norm(x, weight.shape, weight, eps)

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls["rotary"] += 1
        turn = torch.view_as_complex(torch.stack([cos, sin], -1)[..., : cos.shape[-1] // 2, :].contiguous()).unsqueeze(
            1
        )

        def turned(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * turn
            return torch.cat([pairs.real, pairs.imag], -1)

        return turned(q), turned(k)

    def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls["gate"] += 1
        return silu(a) * b

    plain, other = (build(tiny(family=family), vocabulary=96, device=DEVICE) for _ in range(2))
    norms = 7 if family == "llama" else 13  # two a layer and one at the end; Qwen3 also of queries and keys
    expected = {"norms": norms, "rotary embeddings": 3, "gated activations": 3}
    assert use_kernels(other.trained[0], norm=norm, rotary=rotary, gate=gate) == expected
    whole = _grads(plain)
    assert calls == {"norm": 0, "rotary": 0, "gate": 0}
    assert difference(_grads(other), whole) < 1e-5
    assert calls == {"norm": norms, "rotary": 3, "gate": 3}


@pytest.mark.parametrize(
    ("techniques", "installed", "words"),
    [
        ("{liger: {}}", False, "pip install liger-kernel"),
        ("{chunked_loss: {kernel: liger}}", False, "pip install liger-kernel"),
        ("{liger: {loss: true}, regularized_loss: {}}", True, "without the terms of regularized_loss"),
        ("{liger: {norm: false, rotary: false, gate: false}}", True, "leave liger out"),
        ("{liger: {loss: true}, chunked_loss: {}}", True, "owns the slot 'over_logits'"),
        ("{liger: {}, compile: {}}", True, "fused-layers"),
    ],
)
def test_liger_says_what_it_needs_on_a_gpu(
    techniques: str, installed: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks alone: they need no device."""
    import importlib.util

    from preheat.core import conflicts_of
    from preheat.engine.builder import build_context
    from preheat.models.hf import configure

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if installed else None) if name == "liger_kernel" else found(name),
    )
    r = tiny(techniques)
    context = build_context(r, configure(r, 96), Device("cuda", "a card", 8 << 30, (9, 0)))
    assert any(words in problem.text for problem in conflicts_of(r.techniques.values(), context)), conflicts_of(
        r.techniques.values(), context
    )


def test_a_family_without_such_operators_is_refused() -> None:
    from preheat.engine.builder import build_context
    from preheat.models.hf import configure

    r = tiny("{liger: {}}", family="gpt2")
    context = build_context(r, configure(r, 96), Device("cuda", "a card", 8 << 30, (9, 0)))
    assert any("not gpt2" in why for why in registry()["liger"]().check(context))
    with pytest.raises(RecipeError, match="not gpt2"):
        use_kernels(build(tiny(family="gpt2"), vocabulary=96, device=DEVICE).trained[0], norm=rms_norm)
