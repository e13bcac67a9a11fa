"""Copies to the host and back on streams of their own: the same numbers, and less memory on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, ROWS = 1024, 16384


def stack(count: int = 8) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = (
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(count)
    )
    return torch.nn.Sequential(*layers).cuda()


def run(model: torch.nn.Sequential, x: Tensor) -> tuple[list[Tensor], int]:
    """The gradients of three passes, each alike, and the bytes that were allocated at most beyond what stood before."""
    kept: list[Tensor] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert not kept or all(torch.equal(a, b) for a, b in zip(kept, grads, strict=True))
        kept = grads
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated() - before


def test_offloaded_activations_give_the_same_gradients_in_less_memory() -> None:
    from preheat.techniques.activation_offload import offload_activations

    model, x = stack(), torch.randn(ROWS, WIDTH, device="cuda")
    plain, whole = run(model, x)
    assert offload_activations(model) == 7
    offloaded, less = run(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    layer = ROWS * WIDTH * 5 * 4
    assert whole - less > 3 * layer, "activations of eight layers before, of three or four at most now"


def test_the_hosts_adamw_is_the_devices() -> None:
    from preheat.techniques.optimizer_offload import host_adamw

    x, weights = torch.randn(64, WIDTH, device="cuda"), []
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    for make in (host_adamw, lambda p, **s: torch.optim.AdamW(p, fused=True, **s)):
        model = stack(2)
        optimizer = make(model.parameters(), **settings)
        for step in range(4):
            optimizer.found_inf = torch.tensor(float(step == 2), device="cuda")
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        # Weights that differ in their last bits have gradients that do; a missing decay or moment would be 1e-4.
        assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.parametrize("techniques", ["{activation_offload: {least_kib: 0}}", "{optimizer_offload: {weights: bf16}}"])
def test_a_recipe_trains_with_it(techniques: str) -> None:
    from preheat.engine.builder import build
    from preheat.engine.step import accumulate_gradients, update
    from preheat.hardware.probe import probe

    from ..conftest import tiny, uneven

    made, losses = build(tiny(techniques), vocabulary=96, device=probe("cuda")), []
    for _ in range(12):
        loss = accumulate_gradients(made, [uneven()], 0.01)
        losses.append(float(loss.total / loss.weight))
        assert update(made, 0.01).tolist()[1] == 1
    assert losses[-1] < losses[0] - 0.15
