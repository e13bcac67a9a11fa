"""Compiled decoding: the same texts as without, how often it is compiled, and who is compiled unasked.

The compiler's front end traces and its guards decide; what it would generate runs as PyTorch has it (backend eager), but in the test that is marked slow.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preheat.errors import RecipeError, RunError
from preheat.hardware import cpp_build
from preheat.inference.load import LoadedModel, load_model
from preheat.models.generation import generate as generating
from preheat.models.generation.generate import Timed, generate, resolve_auto
from preheat.recipe import Sample

PROMPTS = ("Once upon a time", "The dog", "Lily wanted to go to the park because she", "One day a big", "Tom")


@pytest.fixture(scope="module")
def stories(data_folder: Path) -> LoadedModel:
    return load_model(data_folder / "stories260K-hf")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Compiles by tracing alone; returns what torch.compile was asked for."""
    asked: list[dict[str, Any]] = []
    compile_ = torch.compile

    def trace(function: Any, **settings: Any) -> Any:
        asked.append(settings)
        return compile_(function, backend="eager")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", trace)
    return asked


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _write(opened: Any, prompts: list[list[int]], batch: int = 8, **settings: Any) -> list[Any]:
    return generate(opened.model, opened.tokenizer, prompts, Sample(**settings), stop=frozenset({2}), batch=batch)


def _opened(stories: LoadedModel, model: Any = None) -> Any:
    model = model or stories.build.trained[0]
    model.__dict__.pop("_compiled_call", None)
    return SimpleNamespace(model=model, tokenizer=stories.tokenizer)


def test_the_texts_are_those_of_the_model_as_it_is(
    stories: LoadedModel, traced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts of different lengths, two batches of two sizes; drawn by a seed, and within a window."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    opened, before = _opened(stories), _graphs()
    prompts = [[1, *stories.tokenizer.encode(text, add_special_tokens=False)] for text in PROMPTS]
    for settings in (
        {},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.0, "repetition_penalty": 1.2},
        {"window": 8},
    ):
        plain = _write(opened, prompts, 3, max_new_tokens=12, compile=False, **settings)
        compiled = _write(opened, prompts, 3, max_new_tokens=12, compile=True, **settings)
        assert plain == compiled
        assert all(text.compiled for text in compiled)
        assert not any(text.compiled for text in plain)
        if "window" not in settings:
            assert _graphs() == before + 2, "one for each size of a batch, whatever the prompts' lengths"
    assert [(asked["mode"], asked["backend"]) for asked in traced] == [("default", "inductor")]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true", "as it was"


def test_layers_with_windows_of_their_own(stories: LoadedModel, traced: list[dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=512,
        max_position_embeddings=256,
        sliding_window=8,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    opened = _opened(stories, model)
    for prompts in ([list(range(5, 25)), [7, 8, 9, 7, 8]], [[7, 8, 9]]):  # longer than the window, and growing into it
        assert _write(opened, prompts, max_new_tokens=14, compile=True) == _write(
            opened, prompts, max_new_tokens=14, compile=False
        )


def test_batches_of_one_size_share_a_cache(
    stories: LoadedModel, traced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.models.generation import kv_cache

    made: list[Any] = []
    make = kv_cache.make_cache
    monkeypatch.setattr(kv_cache, "make_cache", lambda *how: made.append(make(*how)) or made[-1])
    opened, prompts = _opened(stories), [[1, 5 + n] * (n + 1) for n in range(5)]
    compiled = _write(opened, prompts, 2, max_new_tokens=8, compile=True)
    used = [cache for cache in made if cache.layers[0].is_initialized]
    assert [cache.layers[0].keys.shape[0] for cache in used] == [2, 1], "one for two batches of two, one for the last"
    assert {cache.layers[0].max_cache_len for cache in used} == {128}
    assert compiled == _write(opened, prompts, 2, max_new_tokens=8)


def test_running_out_of_graphs_is_an_error(
    stories: LoadedModel, traced: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would go on uncompiled, and say so in a log alone."""
    monkeypatch.setattr(generating, "_GRAPHS", 1)
    opened, limit = _opened(stories), torch._dynamo.config.recompile_limit
    with pytest.raises(
        RunError, match=r"^sample\.compile: 1 graphs are compiled, and this model and batch need another; "
    ) as caught:
        _write(opened, [[1, 5], [1, 6], [1, 7]], 2, max_new_tokens=4, compile=True)
    assert "\n" not in str(caught.value)
    assert torch._dynamo.config.recompile_limit == limit
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("kind", "passes", "settings", "compiled"),
    [
        ("cuda", 2000, {}, True),
        ("cuda", 1999, {}, False),
        ("cpu", 10**6, {}, False),
        ("cpu", 1, {"compile": True}, True),
        ("cuda", 10**6, {"compile": False}, False),
        ("cuda", 10**6, {"cache": "static"}, True),
        ("cuda", 10**6, {"cache": "dynamic"}, False),
        ("cuda", 10**6, {"cache": "int8"}, False),
        ("cuda", 10**6, {"prompt_lookup_tokens": 3}, False),
        ("cuda", 10**6, {"draft_model": "there"}, False),
        ("cuda", 10**6, {"window": 64}, True),
    ],
)
def test_who_is_compiled_unasked(
    kind: str,
    passes: int,
    settings: dict[str, Any],
    compiled: bool,
    stories: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpp_build, "describe_missing_compiler", lambda kind: "")
    model: Any = SimpleNamespace(
        device=torch.device(kind), config=stories.build.trained[0].config, _can_compile_fullgraph=True
    )
    made = resolve_auto(Sample(**settings), model, passes)
    assert made.compile is compiled
    assert made.cache_kind == settings.get("cache", "static" if compiled else "dynamic")
    model._can_compile_fullgraph = False
    assert resolve_auto(Sample(**settings), model, passes).compile is settings.get("compile", False)


def test_without_a_compiler_it_is_refused_if_asked_for(stories: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        RecipeError, match=r"^sample\.compile: needs a C\+\+ compiler on a CPU and found no 'no-such-compiler'; "
    ):
        _write(_opened(stories), [[1, 5]], max_new_tokens=2, compile=True)
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), config=stories.build.trained[0].config, _can_compile_fullgraph=True
    )
    monkeypatch.setattr(cpp_build.importlib.util, "find_spec", lambda name: None)
    assert resolve_auto(Sample(), model, 10**6).compile is False
    with pytest.raises(RecipeError, match=r"^sample\.compile: needs Triton on a CUDA device; pip install triton$"):
        resolve_auto(Sample(compile=True), model, 1)


def test_a_run_does_not_compile_unasked(stories: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiling keeps of a device's memory is not in its plan."""
    from preheat.evaluation import scoring
    from preheat.recipe import parse
    from preheat.training import sample_generation

    heard: list[Any] = []

    def stop(*args: Any, **how: Any) -> Any:
        heard.append(args[3].compile)
        return [SimpleNamespace(text="", finish_reason="length") for _ in args[2]]

    monkeypatch.setattr(sample_generation, "write_texts", stop)
    monkeypatch.setattr(scoring, "generate", stop)
    writer: Any = SimpleNamespace(write_json=lambda *a: None, write_event=lambda *a, **k: None, path=Path("."))
    for asked in ("auto", "true", "false"):
        recipe = parse(f"stop: {{max_steps: 1}}\nsample: {{prompts: [a], compile: {asked}}}")
        monkeypatch.setattr(sample_generation, "Reader", lambda path: SimpleNamespace(samples=list))
        sample_generation.Samples(recipe, stories.tokenizer).write(stories.build, writer, step=0)
    for compiles in (False, True):
        scoring.Scorer(stories.build, stories.tokenizer, micro=2, length=64, compiles=compiles).write(
            [], tokens=4, stop=()
        )
    assert heard == [False, True, False, False, "auto"]


def test_timed_says_what_the_cache_takes(stories: LoadedModel, traced: list[dict[str, Any]]) -> None:
    opened, timed = _opened(stories), Timed()
    generate(opened.model, opened.tokenizer, [[1, 5, 9]], Sample(max_new_tokens=3, compile=True), timed=timed)
    layer = 2 * 128 * 4 * opened.model.config.num_key_value_heads * opened.model.config.head_dim
    assert timed.cache_bytes == layer * opened.model.config.num_hidden_layers
