"""The plain functions of compile, fused_operators and liger, in a loop written by hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from ..conftest import difference
from .by_hand import by_hand, plain_backward

LIGER_BY_INTERPRETER = """
import torch
from preheat.techniques.chunked_loss import chunked_cross_entropy
from preheat.techniques.liger import use_liger
from tests.contract.by_hand import by_hand, plain_backward
from tests.conftest import difference

model, tokens = by_hand()
hidden = torch.randn(40, 32)
labels = torch.randint(96, (40,)).index_fill(0, torch.arange(5), -100)
found = []
for kernel in ("ours", "liger"):
    leaf = hidden.clone().requires_grad_()
    loss = chunked_cross_entropy(leaf, model.lm_head, labels, rows=16, kernel=kernel)
    (loss / 35).backward()
    found.append({"loss": loss.detach(), "hidden": leaf.grad, "head": model.lm_head.weight.grad})
    model.lm_head.weight.grad = None
assert difference(found[1], found[0]) < 1e-5, difference(found[1], found[0])

plain_backward(model, tokens)
whole = {n: p.grad.clone() for n, p in model.named_parameters()}
model.zero_grad()
assert use_liger(model, norm=False, gate=False) == {"rotary embeddings": 3}
plain_backward(model, tokens)
found = difference({n: p.grad for n, p in model.named_parameters()}, whole)
assert found < 1e-5, found
print("liger agrees")
"""


def test_alone_compile() -> None:
    from preheat.techniques.compile import compile_layers

    model, tokens = by_hand()
    plain_backward(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    compiled = compile_layers(model.model.layers, backend="aot_eager")  # code is made where the registry is tested
    for _ in range(2):
        model.zero_grad()
        plain_backward(model, tokens)
        assert difference({n: p.grad for n, p in model.named_parameters()}, whole) < 1e-6
    assert compiled.graphs == 1, "three layers and two steps share one graph"


def test_alone_fused_operators() -> None:
    from preheat.techniques.fused_operators import fuse_operators

    model, tokens = by_hand()
    plain_backward(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    assert fuse_operators(model) == {"norms": 7, "gated activations": 3}
    plain_backward(model, tokens)
    assert difference({n: p.grad for n, p in model.named_parameters()}, whole) < 1e-6


def test_alone_liger() -> None:
    """Liger's kernels by Triton's interpreter, where both are installed; its RMSNorm and SwiGLU do not run there."""
    if importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None:
        pytest.skip(
            "liger-kernel and triton are not installed; tests/unit/models/test_kernel_swap.py tests what calls them"
        )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIGER_BY_INTERPRETER]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert "liger agrees" in done.stdout, done.stderr[-2000:]
