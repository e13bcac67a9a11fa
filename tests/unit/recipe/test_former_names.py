"""Former names of recipe keys and values are accepted, and written under their names of today."""

import dataclasses

import pytest

from preheat.core import registry
from preheat.core.schema import Sample
from preheat.errors import RecipeError
from preheat.recipe import Recipe, dump, load, override, parse
from preheat.recipe.former_names import FORMER_KEYS, FORMER_VALUES

FORMER = """
model: {layers: 2, width: 32, heads: 2, kv_heads: 1, feed_forward: 64, positions: 64, vocabulary: 300}
data:
  source: [{source: a.jsonl, layout: unpaired}, {source: b.jsonl}]
  longer: refuse
batch: {size: 4, length: 64}
optimizer: {clip: 0.5}
schedule: {kind: wsd, warmup: 0.1, decay: 0.3, floor: 0.2}
stop: {steps: 5}
evaluate: {micro: 2}
sample: {prompts: [a], tokens: 8, lookup: 3}
techniques: {lora: {targets: [q_proj]}, preference: {loss: unpaired}}
"""
TODAY = """
model: {num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 1, intermediate_size: 64, max_positions: 64, vocab_size: 300}
data:
  source: [{source: a.jsonl, layout: kto}, {source: b.jsonl}]
  overlong: refuse
batch: {size: 4, seq_len: 64}
optimizer: {max_grad_norm: 0.5}
schedule: {kind: wsd, warmup_ratio: 0.1, decay_ratio: 0.3, min_lr_ratio: 0.2}
stop: {max_steps: 5}
evaluate: {micro_batch_size: 2}
sample: {prompts: [a], max_new_tokens: 8, prompt_lookup_tokens: 3}
techniques: {lora: {target_modules: [q_proj]}, preference: {loss: apo_zero}}
"""  # fmt: skip


def test_a_recipe_under_former_names_is_the_same_recipe():
    recipe = parse(FORMER)
    assert recipe == parse(TODAY)
    assert dump(recipe) == dump(parse(TODAY))


def test_each_former_name_leads_to_a_field_and_is_none_itself():
    sections = {part.name: part.default_factory for part in dataclasses.fields(Recipe)}
    for former, today in FORMER_KEYS.items():
        *at, name = former.split(".")
        cls = registry()[at[1]] if at[0] == "techniques" else sections[at[0]]
        fields = {field.name for field in dataclasses.fields(cls)}
        assert today in fields, former
        assert name not in fields, former
    assert all(today not in values for values in FORMER_VALUES.values() for today in values.values())


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("batch:\n  length: 8\n  seq_len: 9", (), "r.yaml:3: batch.length: is the former name of batch.seq_len, which"),
        (
            "techniques:\n  lora:\n    targets: [a]\n    target_modules: [b]",
            (),
            "r.yaml:4: techniques.lora.targets: is",
        ),
        ("batch:\n  length: x", (), "r.yaml:3: batch.seq_len: must be a whole number, got 'x'"),
        ("batch: {size: 2}", ("batch.length=x",), "--set batch.length=x: batch.seq_len: must be a whole number"),
        ("batch: {size: 2}", ("batch={length: 8, seq_len: 9}",), "which is given too; remove one of them"),
        ("batch: {lenght: 2}", (), "unknown key 'batch.lenght'; did you mean 'seq_len'?"),
        ("clip: 1", (), "unknown key 'clip'; it belongs to optimizer: 'optimizer.max_grad_norm'"),
    ],
)
def test_problems_are_located_and_name_the_key(text, overrides, message):
    with pytest.raises(RecipeError) as error:
        parse(f"stop: {{max_steps: 1}}\n{text}", where="r.yaml", overrides=overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_setting_replaces_the_key_under_either_name():
    assert load("demo", ["batch.length=64"], warn=False) == load("demo", ["batch.seq_len=64"], warn=False)
    recipe = parse(FORMER, overrides=["batch.seq_len=32", "stop.steps=7", "model={layers: 3}", "model.num_layers=4"])
    assert (recipe.batch.seq_len, recipe.stop.max_steps, recipe.model.num_layers) == (32, 7, 4)
    assert override(recipe, "techniques.lora={targets: [v_proj]}").techniques["lora"].target_modules == ("v_proj",)
    assert override(recipe, "data={source: a.jsonl, layout: unpaired}").data.layout == "kto"


def test_generation_takes_former_names_too():
    from preheat.cli.options.generation import sampling

    assert sampling(["sample.lookup=3", "sample.tokens=9"], max_new_tokens=5) == Sample(
        max_new_tokens=9, prompt_lookup_tokens=3
    )
