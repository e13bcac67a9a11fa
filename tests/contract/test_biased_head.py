"""Techniques over a model whose head has a bias (Phi): those that read the head's tensors must read all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from preheat import recipe as recipes
from preheat.core import Slot, registry
from preheat.engine.builder import build
from preheat.engine.step import update

from ..architectures.tiny import create_model, tiny_config
from ..conftest import DEVICE, difference, uneven
from .settings import FAMILY, asked
from .test_techniques import BOUND, SETTINGS, complete, fitting, step

LOSSES = {Slot.OVER_LOGITS, Slot.ROW_LOSS, Slot.OBJECTIVE}
TRIED = [
    (name, settings)
    for name, settings in SETTINGS
    if FAMILY.get(name, "llama") == "llama"
    and (registry()[name].numerics != "different" or registry()[name].owns & LOSSES or name == "lora")
    and name not in ("compile", "fused_operators")  # takes a minute; is for other families
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi")
    create_model(tiny_config("phi")).save_pretrained(folder)
    return folder


def recipe_of(folder: Path, techniques: dict[str, dict[str, Any]]) -> recipes.Recipe:
    plain = recipes.parse(
        f"model: {{path: {folder}}}\nbatch: {{size: 4, seq_len: 32}}\noptimizer: {{lr: 0.01}}\nstop: {{max_steps: 20}}"
    )
    more = [setting for name in techniques for setting in asked(name)]
    return recipes.override(plain, f"techniques={complete(techniques)}", *more)


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers, one document at a time."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    batch, total = uneven(), torch.zeros(())
    for row, documents in enumerate(batch.mask.documents):
        for tokens, labels in zip(batch.tokens[row].split(documents), batch.labels[row].split(documents), strict=True):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    (total / batch.weight).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert float(grads["lm_head.bias"].norm()) > 0.01
    return float(total.detach() / batch.weight), grads


@pytest.mark.parametrize(("name", "settings"), TRIED, ids=str)
def test_a_technique_takes_the_bias_of_the_head(name: str, settings: dict[str, Any], folder: Path, plain: Any) -> None:
    b = build(recipe_of(folder, {name: settings}), vocabulary=96, device=DEVICE)
    loss, grads = step(b, fitting(b))
    cls = registry()[name]
    if cls.numerics == "different":
        assert torch.isfinite(torch.tensor(loss))
    else:
        bound = BOUND["exact"] if settings.get("mode") == "fp32" else BOUND[cls.numerics]
        # Against another implementation, and not against the plain build.
        assert loss == pytest.approx(plain[0], rel=max(bound, 1e-5))
        assert difference(grads, plain[1]) < max(bound, 2e-5)
    assert update(b, 0.01).tolist()[1] == 1
