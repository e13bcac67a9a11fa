"""No step of any technique makes the host wait for the device between its batch and its numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import Build
from preheat.data.rows.example_kinds import examples_of
from preheat.engine.builder import build
from preheat.errors import RecipeError

from ..conftest import DEVICE, split, tiny, uneven
from .settings import CANNOT_RUN_HERE, FAMILY
from .test_techniques import SETTINGS, fitting, made
from .waits import waits_of, watched


def waits(b: Build, batch: Any) -> list[tuple[str, str]]:
    rows = b.recipe.batch.size
    micro = -(-rows // b.state.accumulation)
    return waits_of(b, split(batch, [micro] * (rows // micro) + ([rows % micro] if rows % micro else [])))


@pytest.mark.parametrize(
    ("name", "settings"), [(name, settings) for name, settings in SETTINGS if name != "compile"], ids=str
)
def test_a_step_never_waits_for_the_device(name: str, settings: dict[str, Any]) -> None:
    b = made({name: settings})
    assert waits(b, fitting(b)) == []


def _recipes() -> dict[str, dict[str, Any]]:
    """The techniques of each shipped recipe, for batches of four rows and without those that cannot run here."""
    found = {}
    for name in recipes.built_in():
        try:
            values = recipes.to_values(recipes.load(name))["techniques"]
        except RecipeError:
            continue  # a chain of `compress`
        found[name] = {key: settings for key, settings in values.items() if key not in CANNOT_RUN_HERE}
        if "gradient_accumulation" in values:
            found[name]["gradient_accumulation"] = {"steps": 2}
        for key in ("rope_scaling", "length_curriculum"):  # of longer rows than the tiny model's
            found[name].pop(key, None)
    return found


RECIPES = _recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_nor_does_one_of_a_shipped_recipe(name: str) -> None:
    family = next((FAMILY[key] for key in RECIPES[name] if key in FAMILY), "llama")
    recipe = recipes.override(tiny(family=family), f"techniques={json.dumps(RECIPES[name])}")
    b = build(recipe, vocabulary=96, device=DEVICE)
    assert waits(b, uneven(examples=examples_of(recipe))) == []


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral", "t5"])
def test_nor_does_one_of_another_family(family: str) -> None:
    b = build(tiny(family=family), vocabulary=96, device=DEVICE)
    assert waits(b, fitting(b)) == []


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda x: x.sum().item(), "Tensor.item"),
        (lambda x: x.tolist(), "Tensor.tolist"),
        (lambda x: bool((x > 0).any()), "Tensor.__bool__"),
        (lambda x: float(x.sum()), "Tensor.__float__"),
        (lambda x: x.cpu(), "Tensor.cpu"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: x.masked_select(x > 0), "aten::masked_select"),
        (lambda x: (x > 0).nonzero(), "aten::nonzero"),
        (lambda x: torch.where(x > 0), "aten::nonzero"),
        (lambda x: x.unique(), "aten::_unique2"),
        (lambda x: torch.equal(x, x), "aten::equal"),
        (lambda x: x.long().repeat_interleave(x.long()), "aten::repeat_interleave"),
        (lambda x: torch.bincount(x.long()), "aten::bincount"),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), "torch.tensor with a device"),
        (lambda x: torch.tensor([1.0, 2.0]).to(x.device), "Tensor.to without non_blocking"),
        (lambda x: torch.zeros(3).to(x), "Tensor.to without non_blocking"),
        (lambda x: x.copy_(torch.zeros(3)), "Tensor.copy_ without non_blocking"),
    ],
)
def test_every_kind_of_read_is_seen(read: Any, what: str) -> None:
    x = torch.ones(3)
    with watched() as seen:
        read(x)
    assert [found for found, _ in seen.found] == [what]


@pytest.mark.parametrize(
    "unread",
    [
        lambda x: torch.tensor([1, 2]).tolist(),
        lambda x: torch.tensor([1.0, 2.0]).to(x.device, non_blocking=True),
        lambda x: torch.full((), 2.0, device=x.device) * x,
        lambda x: torch.where(x > 0, x, 0.0)[x.long()],
        lambda x: x.long().repeat_interleave(x.long(), output_size=3),
    ],
)
def test_what_the_host_has_itself_is_no_read(unread: Any) -> None:
    x = torch.ones(3)
    with watched() as seen:
        unread(x)
    assert seen.found == []
