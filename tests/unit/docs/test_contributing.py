"""The example of CONTRIBUTING.md is a technique that works."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy

from preheat.core import technique
from preheat.core.registry import _declaration_fault
from preheat.engine.builder import build
from preheat.engine.step import forward
from preheat.hardware.probe import probe
from tests.conftest import tiny, uneven

PAGE = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAME = "smoothing_of_contributing"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (code,) = re.findall(r"```python\n(.*?)\n```", PAGE, re.S)
    (tmp_path / f"{NAME}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        yield importlib.import_module(NAME)
    finally:
        technique._REGISTRY.pop(NAME, None)
        sys.modules.pop(NAME, None)


@torch.no_grad()
def test_the_example_changes_the_loss_as_it_says(example: ModuleType) -> None:
    settings = example.LabelSmoothing(amount=0.3)
    assert settings.name() == NAME
    assert not _declaration_fault(example.LabelSmoothing)
    batch, device = uneven(), probe("cpu")
    torch.manual_seed(0)
    trained = build(tiny(), vocabulary=96, device=device)
    (model,) = trained.parts["trained"]
    model.lm_head.weight.mul_(20)  # logits of a new model are so small that smoothing hardly counts
    before = float(forward(trained, batch).total)

    assert settings.apply(trained, model).what == "targets smoothed by 0.3"

    logits = model.lm_head(trained.slot(technique.Slot.HIDDEN)(model, batch)).flatten(0, 1).float()
    smoothed = cross_entropy(logits, batch.labels.flatten(), label_smoothing=0.3, ignore_index=-100, reduction="sum")
    assert float(forward(trained, batch).total) == pytest.approx(float(smoothed), rel=1e-5)
    assert float(smoothed) != pytest.approx(before, rel=1e-3)
    assert trained.slots()["row_loss"] == NAME


@pytest.mark.parametrize(("amount", "problems"), [(0.1, 0), (1.0, 1)])
def test_the_example_refuses_noise(example: ModuleType, amount: float, problems: int) -> None:
    assert len(example.LabelSmoothing(amount=amount).check(None)) == problems
