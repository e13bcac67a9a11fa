"""A recipe as `preheat plan --out` writes it: only what differs from the defaults, and it reads back to the same recipe."""

from __future__ import annotations

import pytest

from preheat import recipe as recipes
from preheat.recipe.commented_yaml import render_brief


@pytest.mark.parametrize("name", [name for name, path in recipes.built_in().items() if path.parent.name != "chains"])
def test_every_built_in_recipe_reads_back(name: str):
    recipe = recipes.load(name)
    text = render_brief(recipes.to_values(recipe))
    assert recipes.parse(text) == recipe
    assert "null" not in text
    assert "…" not in text
    assert all(len(line) <= 120 for line in text.splitlines() if line.strip().startswith("#"))


def test_what_is_unusual_reads_back():
    text = """
name: odd
seed: 3
model: {path: "a: b # c", add_tokens: ["<x>", "- y"], config: {rope: {factor: 2.0, kind: 'yes'}}}
data: {source: [a.txt, {source: b, weight: 2.0}], columns: {a: "b\\nc"}}
optimizer: {lr: 1e-5, betas: [0.9, 0.99]}
stop: {epochs: 0.5}
sample: {prompts: ["one\\ntwo", [{role: user, content: hi}]]}
techniques: {lora: {rank: 4}, chunked_loss: {}}
"""
    recipe = recipes.parse(text)
    assert recipes.parse(render_brief(recipes.to_values(recipe))) == recipe


def test_only_what_differs_is_written_and_explained():
    written = render_brief(
        recipes.to_values(recipes.parse("{name: a, batch: {size: 8}, stop: {max_steps: 5}, techniques: {lora: {}}}"))
    )
    keys = [line.split(":")[0].strip() for line in written.splitlines() if not line.strip().startswith("#")]
    assert keys == ["name", "batch", "size", "stop", "max_steps", "techniques", "lora"]
    assert f"  # {recipes.field_docs(recipes.Batch)['size'].splitlines()[0]}\n  size: 8\n" in written
