"""One step on a CUDA device, through the same build: agrees with the CPU, and what the dry run saw is what was allocated."""

from __future__ import annotations

import pytest
import torch

from preheat.data.rows.example_kinds import examples_of
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update

from ..conftest import DEVICE, difference, split, tiny, uneven
from .conftest import copy_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    "techniques",
    [
        "{}",
        "{efficient_attention: {}, mixed_precision: {mode: bf16_weights}, chunked_loss: {rows: 50}}",
        "{activation_checkpointing: {}, mixed_precision: {}, efficient_attention: {}, lora: {}}",
        "{preference: {}, chunked_loss: {rows: 50}, efficient_attention: {}}",
        "{classification: {classes: 5}, lora: {}}",
    ],
)
def test_a_step_agrees_with_the_cpu(techniques: str) -> None:
    from preheat.hardware.probe import probe

    cuda, cpu = (build(tiny(techniques), vocabulary=96, device=d) for d in (probe("cuda"), DEVICE))
    copy_weights(cpu, cuda)
    for b in (cuda, cpu):
        accumulate_gradients(b, [uneven(examples=examples_of(b.recipe))])
    bound = 0.05 if "mixed" in techniques else 1e-3  # TF32 is off by default; bf16 kernels round differently
    assert difference({n: p.grad.cpu() for n, p in cuda.parameters()}, {n: p.grad for n, p in cpu.parameters()}) < bound
    assert update(cuda, 0.01).tolist()[1] == 1


def test_micro_batches_copied_ahead_give_the_same() -> None:
    from preheat.hardware.probe import probe

    found = []
    for ahead in (True, False):
        torch.manual_seed(0)
        b = build(tiny("{gradient_accumulation: {steps: 4}}"), vocabulary=96, device=probe("cuda"))
        if not found:
            first = b
        copy_weights(first, b)
        if not ahead:
            b.hooks.transfer = None  # the transform copies each when it is due
        losses = []
        for n in range(3):
            batches = split(uneven(seed=n), [1] * 4)
            b.begin(batches[0])
            losses.append(float(accumulate_gradients(b, batches).total))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
