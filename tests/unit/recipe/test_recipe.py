"""The recipe at its boundary: every mistake is located and the nearest right name given; YAML goes both ways."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preheat import recipe as recipes
from preheat.core import registry
from preheat.errors import RecipeError
from preheat.recipe import Recipe, Stop, build_json_schema, dump, load, override, parse, synonyms
from preheat.recipe.paths import shorten_paths

BASE = "model: {size: 15M}\nstop: {max_steps: 10}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: {}", ["r.yaml:1", "unknown key 'modle'", "did you mean 'model'"]),
        (
            BASE + "techniques: {optimizer_in_backward: {on: true}}",
            ["'techniques.optimizer_in_backward.on'", "there are none here"],
        ),
        (BASE + "batch:\n  lenght: 8", ["r.yaml:4", "unknown key 'batch.lenght'", "'seq_len'"]),
        (BASE + "batch: {size: big}", ["r.yaml:3", "batch.size", "whole number", "'big'"]),
        (BASE + "batch: {size: 2.5}", ["batch.size", "whole number", "2.5"]),
        (BASE + "batch: {size: 0}", ["batch.size", "at least 1", "got 0"]),
        (BASE + "hardware: {memory: 16}", ["hardware.memory", "a number with its unit", "got 16"]),
        (BASE + "optimizer: {lr: -1.0}", ["optimizer.lr", "above 0"]),
        (BASE + "optimizer: {lr: off}", ["optimizer.lr", "'auto'", "number", "'off'"]),
        (BASE + "data: {packing: strem}", ["data.packing", "'stream'"]),
        (BASE + "data: {streaming: 1}", ["data.streaming", "true or false"]),
        (BASE + "techniques: {chunked_los: {}}", ["r.yaml:3", "unknown technique 'chunked_los'", "'chunked_loss'"]),
        (BASE + "techniques: {chunked_loss: {row: 5}}", ["techniques.chunked_loss.row", "did you mean 'rows'"]),
        (BASE + "techniques: [lora, lora]", ["'lora' is given twice"]),
        (BASE + "techniques:\n  lora: {}\n  lora: {}", ["r.yaml:5", "is given twice", "line 4"]),
        (BASE + "model: {}", ["'model' is given twice"]),
        ("model: {size: 15}\nstop: {max_steps: 1}", ["model.size", "text"]),
        ("model: {size: 15X}\nstop: {max_steps: 1}", ["model.size", "15M or 1.1B"]),
        ("model: {path: x, num_layers: 2}\nstop: {max_steps: 1}", ["model.path", "remove num_layers"]),
        (
            "model: {hidden_size: 30, num_heads: 4}\nstop: {max_steps: 1}",
            ["model.hidden_size", "multiple of num_heads"],
        ),
        ("model: {size: 15M}", ["stop", "no stopping condition"]),
        ("model: {size: 15M}\nstop: {hours: 1}", ["stop.hours", "schedule.kind: constant"]),
        ("model: 3\nstop: {max_steps: 1}", ["r.yaml:1", "model", "mapping"]),
        ("a: [", ["r.yaml", "not YAML"]),
        ("- 1", ["mapping of keys"]),
    ],
)
def test_each_mistake_is_located(text: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text, where="r.yaml")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "data: {source: 'https://me:hunter2@host/a.jsonl'}",
        "data: {source: [{source: 's3://bucket/a?X-Amz-Signature=hunter2hunter2hunter2'}]}",
        "model: {path: hf_hunter2ABCDEFGHIJKLMNOPQRSTUVWXYZabcd}",
        "techniques: {distillation: {teacher: 'https://me:hunter2@host/teacher'}}",
        "tracking: {project: ghp_hunter2ABCDEFGHIJKLMNOPQRSTUVWXYZ0123}",
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(RecipeError, match="holds a password or token") as error:
        parse(text + "\nstop: {max_steps: 1}")
    assert "hunter2" not in str(error.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        parse("modle: {}\nbatch: {size: 0, seq_len: x}\nstop: {max_steps: 1}")
    assert len(str(caught.value).splitlines()) == 3


def test_yaml_goes_both_ways_with_the_scalars_of_yaml_1_2() -> None:
    r = parse(BASE + "name: off\noptimizer: {lr: 1e-4, betas: [0, 0.5]}\nmodel_note: x".replace("\nmodel_note: x", ""))
    assert (r.name, r.optimizer.lr, r.optimizer.betas) == ("off", 1e-4, (0, 0.5))
    assert parse(dump(r)) == r
    assert parse(dump(override(r, "data.text='1e3'"))).data.text == "1e3", "text that looks like a number stays text"


def test_set_overrides_and_says_what_it_cannot() -> None:
    r = parse(BASE, overrides=["batch.size=64", "techniques.lora.rank=4", "model.config={rope_theta: 5e5}"])
    assert (r.batch.size, r.techniques["lora"].rank, r.model.config) == (64, 4, {"rope_theta": 5e5})  # type: ignore[attr-defined]
    for bad, words in (
        ("batch.size", "key=value"),
        ("batch.sise=3", "did you mean 'size'"),
        ("name.x=3", "no settings inside"),
    ):
        with pytest.raises(RecipeError, match=words):
            parse(BASE + "name: n\n", overrides=[bad])


def test_built_in_recipes_load_and_rerun_from_their_dump(tmp_path: Path) -> None:
    for file in (Path(recipes.__file__).parents[1] / "recipes").glob("*.yaml"):
        r = load(file.stem)
        (tmp_path / "again.yaml").write_text(dump(r))
        assert load(tmp_path / "again.yaml") == r


def test_schema_knows_every_key_and_says_what_it_is() -> None:
    schema = build_json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == set(Recipe.__dataclass_fields__)
    for part in (
        "model",
        "data",
        "batch",
        "optimizer",
        "schedule",
        "stop",
        "evaluate",
        "checkpoint",
        "sample",
        "hardware",
    ):
        for key, entry in schema["properties"][part]["properties"].items():
            assert entry.get("description"), f"{part}.{key} has no text"


def test_recipe_and_cli_import_no_torch_and_fast_help() -> None:
    code = "import sys, preheat.recipe, preheat.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Recipe(stop=Stop(max_steps=1)).seed = 3  # type: ignore[misc]


def test_a_folder_does_not_hide_a_built_in_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "other").mkdir()
    assert recipes.load("demo").name == "demo"
    with pytest.raises(RecipeError, match="is a folder"):
        recipes.load("other")


def test_another_recipe_is_refused_with_few_of_its_differences() -> None:
    from preheat.errors import RunError
    from preheat.training.resume import compare

    before = recipes.dump(recipes.load("demo"))
    assert not compare(recipes.load("demo", ["stop.max_steps=5"]), before)
    with pytest.raises(RunError) as refused:
        compare(recipes.load("multi-gpu"), before)
    words = str(refused.value)
    assert words.count("(was ") == 6
    assert " more keys; put back what was, or start another run with --out" in words
    assert len(words) < 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch: {length: 8}", "unknown key 'batch.length'; here it is 'batch.seq_len'"),
        (
            "techniques: {lora: {targets: [a]}}",
            "'techniques.lora.targets'; here it is 'techniques.lora.target_modules'",
        ),
        ("batch: {lenght: 2}", "unknown key 'batch.lenght'; did you mean 'seq_len'?"),
        ("clip: 1", "unknown key 'clip'; it belongs to optimizer: 'optimizer.max_grad_norm'"),
    ],
)
def test_a_short_name_leads_to_the_key(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse(f"stop: {{max_steps: 1}}\n{text}")


def test_each_short_name_leads_to_a_field_and_is_none_itself() -> None:
    sections = {part.name: part.default_factory for part in dataclasses.fields(Recipe)}
    for short, key in synonyms._SHORT.items():
        section = short.split(".")[:-1]
        cls: Any = registry()[section[1]] if section[0] == "techniques" else sections[section[0]]
        fields = {f"{'.'.join(section)}.{field.name}" for field in dataclasses.fields(cls)}
        assert key in fields, short
        assert short not in fields, short


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("hub_model_id", "a run is pushed to the hub when it is exported: preheat export RUN --push OWNER/NAME"),
        ("push_to_hub", "a run is pushed to the hub when it is exported: preheat export RUN --push OWNER/NAME"),
        ("logging_steps", "every step is logged"),
        ("save_total_limit", "here it is 'checkpoint.keep'"),
        ("save_strategy", "here it is 'checkpoint.every'"),
        ("metric_for_best_model", "here it is 'checkpoint.best'"),
        ("load_best_model_at_end", "here it is 'checkpoint.best'"),
        ("early_stopping_patience", "here it is 'stop.patience'"),
        ("report_to", "here it is 'tracking.to'"),
    ],
)
def test_a_key_of_transformers_leads_to_ours_wherever_it_is_written(key: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"'{key}'; {hint}")):
        parse(f"{BASE}{key}: 1")
    # The section that it belongs to, and another one.
    for section in ("checkpoint", "optimizer"):
        with pytest.raises(RecipeError, match=re.escape(f"'{section}.{key}'; {hint}")):
            parse(f"{BASE}{section}: {{{key}: 1}}")
    with pytest.raises(RecipeError, match=re.escape(hint)):
        load("demo", [f"{key}=1"])


def test_a_value_of_another_trainer_is_read_as_ours() -> None:
    recipe = parse("stop: {max_steps: 1}\ntechniques: {preference: {loss: apo_zero_unpaired}}")
    assert recipe.techniques["preference"].loss == "apo_zero"  # type: ignore[attr-defined]


def test_a_published_recipe_names_no_folder_and_no_credentials() -> None:
    # Not parsed, which refuses credentials.
    recipe = Recipe(
        model=recipes.Model(path="/home/me/base"),
        data=recipes.Data(
            source=("s3://key:secret@bucket/a.jsonl", {"source": "file:///home/me/b.jsonl", "weight": 2}, "me/c")
        ),
        tracking=recipes.Tracking(folder="/home/me/trackers"),
        stop=Stop(max_steps=1),
    )
    sent = shorten_paths(recipe)
    assert (sent.model.path, sent.tracking.folder) == ("base", "trackers")
    assert sent.data.source == ("s3://bucket/a.jsonl", {"source": "b.jsonl", "weight": 2}, "me/c")
    signed = recipes.Data(source="https://me:secret@host/rows.jsonl?signature=1")
    assert shorten_paths(dataclasses.replace(recipe, data=signed)).data.source == "https://host/rows.jsonl"
