"""Keys that nothing reads beside the other keys of a recipe are refused or named."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import yaml

from preheat.core import registry
from preheat.data.rows.schemas import LAYOUTS
from preheat.errors import RecipeError
from preheat.recipe import Recipe, built_in, load, parse
from preheat.recipe.unused_keys import RULES, find_unused_keys, non_default_keys

PATH = {"model": {"path": "somewhere"}}
FILE = {"data": {"source": "rows.jsonl"}}

# Of each key: a value, the recipe in which nothing reads it, and one in which something does.
CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("model.family", "qwen3", PATH, {}),
    ("model.part", "text", {}, PATH),
    ("model.max_positions", 512, PATH, {}),
    ("model.max_positions", 512, {"model": {"preset": "llama-3.1-8b"}}, {}),
    ("model.max_positions", 512, {"model": {"size": "15M", "family": "t5"}}, {}),
    ("model.vocab_size", 512, PATH, {}),
    ("model.tie_embeddings", True, PATH, {"model": {"path": "x"}, "techniques": {"tied_embeddings": {}}}),
    ("model.num_experts_per_tok", 1, {"model": {"path": "x", "family": "mixtral"}}, {"model": {"size": "15M", "family": "mixtral"}}),
    ("model.size", "15M", {"model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2}}, {"model": {"num_layers": 2}}),
    ("model.trust_remote_code", True, {}, PATH),
    ("model.quantized_weights", "packed", {}, PATH),
    ("data.layout", "alpaca", {}, FILE),
    ("data.columns", {"text": "body"}, {}, FILE),
    ("data.text", "body", {"data": {"source": "docstrings"}}, FILE),
    ("data.text", "body", {"data": {"source": "rows.jsonl", "layout": "alpaca"}}, {"data": {"source": "rows.jsonl", "layout": "classes"}}),
    ("data.prompt", "q", {"data": {"source": "docstrings", "completion": "a"}}, {"data": {"source": "rows.jsonl", "completion": "a"}}),
    ("data.completion", "a", {"data": {"prompt": "q"}}, {"data": {"source": "rows.jsonl", "prompt": "q"}}),
    ("data.template", "chatml", {}, {"data": {"source": "docstrings"}}),
    ("data.template", "chatml", {"data": {"source": "rows.jsonl", "layout": "text"}}, FILE),
    ("data.train_on", "all", {"data": {"source": "rows.jsonl", "layout": "classes"}}, {"data": {"source": "docstrings", "template": "chatml"}}),
    ("data.classes", ["a", "b"], {"data": {"source": "rows.jsonl", "layout": "messages"}}, FILE),
    ("data.subset", "en", FILE, {"data": {"source": "someone/rows"}}),
    ("data.split", "test", {"data": {"source": "a.txt"}}, {"data": {"source": "folder"}}),
    ("data.vocab_size", 512, {"data": {"tokenizer": "folder"}}, {}),
    ("data.vocab_size", 512, PATH, {"model": {"path": "somewhere", "weights": "random"}}),
    ("data.image_pixels", 4096, {}, PATH),
    ("data.images", 2.0, {}, PATH),
    ("data.text_files", "whole", FILE, {"data": {"source": "a.txt"}}),
    ("data.prefetch", 8, {}, {"data": {"workers": 1}}),
    ("optimizer.betas", [0.8, 0.9], {"techniques": {"adafactor": {}}}, {"techniques": {"lion": {}}}),
    ("optimizer.eps", 1e-6, {"techniques": {"lion": {}}}, {"techniques": {"muon": {}}}),
    ("schedule.warmup_ratio", 0.1, {"stop": {"hours": 1, "max_steps": None}, "schedule": {"kind": "constant"}}, {}),
    ("schedule.decay_ratio", 0.1, {}, {"schedule": {"kind": "wsd"}}),
    ("schedule.min_lr_ratio", 0.0, {"schedule": {"kind": "constant"}}, {}),
    *(
        (key, value, {}, {"evaluate": {"every": 2}})
        for key, value in {"checkpoint.best": "validation_loss", "stop.patience": 2, "stop.target_loss": 2.0}.items()
    ),
    ("checkpoint.rewinds", 2, {}, {"checkpoint": {"every": 2}}),
    ("stop.min_delta", 0.1, {"stop": {"patience": 2}}, {"stop": {"patience": 2}, "evaluate": {"every": 2}}),
    ("stop.min_delta", 0.1, {"evaluate": {"every": 2}}, {"checkpoint": {"best": "validation_loss"}, "evaluate": {"every": 2}}),
    *((f"evaluate.{key}", 4, {"data": {"validation": 0}}, {"data": {"validation": "held.txt"}}) for key in ("every", "rows", "micro_batch_size")),
    ("evaluate.baselines", True, {"data": {"validation": 0.0}}, {}),
    *((f"sample.{key}", value, {}, {"sample": {"prompts": ["a"]}}) for key, value in {"max_new_tokens": 5, "temperature": 1.0, "repetition_penalty": 1.1, "stop": ["x"], "cache": "int8", "window": 9, "draft_model": "x", "prompt_lookup_tokens": 3}.items()),
    ("sample.compile", True, {"sample": {"cache": "static"}}, {"sample": {"cache": "static", "rows": 2}}),
    ("hardware.segments", "expandable", {"hardware": {"device": "cpu"}}, {}),
    ("parallel.zero_stage", 3, {}, {"parallel": {"engine": "deepspeed"}}),
    ("parallel.timeout", 60.0, {"parallel": {"devices": 1}}, {}),
    ("techniques.lora.pissa_iterations", 4, {}, {"techniques": {"lora": {"variant": "pissa"}}}),
    ("techniques.mixed_precision.loss_scale", 4.0, {}, {"techniques": {"mixed_precision": {"mode": "fp16"}}}),
    ("techniques.mixed_precision.growth_interval", 4, {}, {"techniques": {"mixed_precision": {"mode": "fp16_master"}}}),
    ("techniques.preference.gamma", 1.0, {}, {"techniques": {"preference": {"loss": "simpo"}}}),
    *((f"techniques.preference.{kind}_weight", 2.0, {}, {"techniques": {"preference": {"loss": "kto"}}}) for kind in ("desirable", "undesirable")),
    ("techniques.length_curriculum.root_degree", 3.0, {}, {"techniques": {"length_curriculum": {"schedule": "root"}}}),
    ("techniques.length_curriculum.multiple", 16, {"techniques": {"length_curriculum": {"lengths": [16]}}}, {}),
    ("techniques.expert_balancing.rate", 0.01, {"techniques": {"expert_balancing": {"method": "loss"}}}, {}),
    ("techniques.distillation.top_k", 8, {}, {"techniques": {"distillation": {"cache": "x"}}}),
    ("techniques.chunked_loss.rows", 8, {"techniques": {"chunked_loss": {"kernel": "liger"}}}, {}),
    ("techniques.tensor_parallel.rows", 8, {"techniques": {"tensor_parallel": {"loss_parallel": False}}}, {}),
]  # fmt: skip

# Keys that are read whatever the others say, or that what reads them refuses by itself.
ALWAYS = {
    "name", "seed",
    *(f"model.{k}" for k in ("preset", "path", "weights", "shape", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "num_experts", "add_tokens", "config")),
    *(f"data.{k}" for k in ("source", "preflight", "clean", "streaming", "tokenizer", "packing", "overlong", "validation", "limit", "workers")),
    "batch.size", "batch.seq_len", "optimizer.lr", "optimizer.weight_decay", "optimizer.groups", "optimizer.layer_decay", "optimizer.max_grad_norm", "schedule.kind",
    "stop.max_steps", "stop.tokens", "stop.epochs", "stop.hours", "evaluate.tasks", "evaluate.forgetting",
    "checkpoint.every", "checkpoint.keep", "checkpoint.asynchronous", "hardware.device", "hardware.threads", "hardware.memory", "hardware.deterministic",
    "parallel.devices", "parallel.engine",
    *(f"sample.{k}" for k in ("prompts", "rows", "top_p", "top_k", "min_p", "draft_tokens")),
    *(f"tracking.{k}" for k in ("to", "project", "name", "tags", "folder", "wait")),
}  # fmt: skip


def recipe_of(key: str, value: Any, more: dict[str, Any]) -> str:
    values: dict[str, Any] = {"model": {"size": "15M"}, "stop": {"max_steps": 5}}
    for part, inner in more.items():
        same = part != "model" or "size" in inner or key == "model.size" or not {"path", "preset"} & inner.keys()
        values[part] = {**(values.get(part, {}) if same else {}), **inner}
    *path, last = key.split(".")
    at = values
    for step in path:
        at = at.setdefault(step, {})
    at[last] = value
    return yaml.safe_dump(values)


@pytest.mark.parametrize(
    ("key", "value", "unread", "read"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_key_that_nothing_reads_is_named(key: str, value: Any, unread: dict[str, Any], read: dict[str, Any]) -> None:
    def told(more: dict[str, Any]) -> list[str]:
        try:
            return [f"{k}: {words}" for k, words in find_unused_keys(parse(recipe_of(key, value, more)))]
        except RecipeError as error:
            return [line.partition(": ")[2] for line in str(error).splitlines()]

    lines = [line for line in told(unread) if line.startswith(f"{key}: ")]
    assert len(lines) == 1
    assert "changes nothing: " in lines[0]
    assert len(lines[0]) < 300
    assert "{" not in lines[0].partition("changes nothing")[2]
    assert not [line for line in told(read) if line.startswith(f"{key}: ")]


def test_every_key_is_in_the_table_or_always_read() -> None:
    ruled = {rule.key for rule in RULES}
    assert ruled == {case[0] for case in CASES}
    known = {"name", "seed"}
    for part in dataclasses.fields(Recipe):
        if part.name not in ("name", "seed", "techniques"):
            known |= {f"{part.name}.{field.name}" for field in dataclasses.fields(part.default_factory)}  # type: ignore[arg-type]
    assert {key for key in ruled if not key.startswith("techniques.")} | ALWAYS == known
    assert not ruled & ALWAYS
    for key in ruled - known:
        _, technique, name = key.split(".")
        assert name in {field.name for field in dataclasses.fields(registry()[technique])}
    # The rules of data.text and data.prompt name the layouts that have these fields.
    assert {name for name, (needs, reads) in LAYOUTS.items() if "text" in (*needs, *reads)} == {"text", "classes"}
    assert {name for name, (needs, reads) in LAYOUTS.items() if "prompt" in (*needs, *reads)} == {
        "prompt",
        "preference",
        "kto",
    }


@pytest.mark.parametrize("name", [name for name, path in built_in().items() if path.parent.name != "chains"])
def test_shipped_recipes_state_nothing_in_vain(name: str, caplog: pytest.LogCaptureFixture) -> None:
    load(name)
    assert not caplog.records


def test_a_file_is_named_with_its_line_and_a_default_is_not(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: {size: 15M}\nstop: {max_steps: 5}\nschedule:\n  decay_ratio: 0.1\noptimizer: {eps: 1.0e-8}\n"
    )
    with caplog.at_level(logging.WARNING):
        recipe = load(file, ["techniques.lion={}", "optimizer.eps=1e-6"])
    first, second = [record.getMessage() for record in caplog.records]
    assert (
        first == "--set optimizer.eps=1e-6: optimizer.eps: 1e-06 changes nothing: lion has no such term; leave it out"
    )
    assert second.startswith(f"{file}:4: schedule.decay_ratio: 0.1 changes nothing: it is for schedule.kind: wsd")
    assert non_default_keys(recipe) == {
        "model.size": "15M", "optimizer.eps": 1e-6, "schedule.decay_ratio": 0.1, "stop.max_steps": 5, "techniques.lion": {},
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n", "{}\n", "---\n"])
def test_an_empty_recipe_is_told_as_that(text: str) -> None:
    with pytest.raises(
        RecipeError,
        match=r"^r\.yaml: is empty; write at least a model and a stopping condition, e\.g\. .*preheat init demo$",
    ):
        parse(text, where="r.yaml")
    parse("{model: {size: 15M}, stop: {max_steps: 100}}")  # which the message names
