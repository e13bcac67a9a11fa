"""Architectures of today: the loss and gradients of packed rows are transformers' own, one document at a time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preheat.core import Device, MaskSpec
from preheat.core.registry import problems_of
from preheat.engine import builder
from preheat.engine.builder import build_context
from preheat.errors import RecipeError
from preheat.models import alibi, hf, moe
from preheat.models.sinks import attend_with_sinks, cut_into_chunks
from preheat.models.split_mixers import count_split_mixers
from preheat.models.token_mixers import find_attentions, find_cache, find_recurrent_mixers, pass_cache, split_documents
from preheat.ops.attention.sdpa import reference_attention, sdpa_attention
from preheat.recipe import parse

from ...architectures.columns import Subject, write_data
from ...architectures.tiny import ARCHITECTURES, create_model, tiny_config
from ...conftest import DEVICE

# One of each kind: delta net, Mamba 2 with experts, sinks with windows, convolution, shared keys, chunks, ALiBi.
KINDS = ["qwen3_5_text", "granitemoehybrid", "gpt_oss", "lfm2", "gemma4_text", "llama4_text", "bloom", "mpt"]
REFUSED = {"stablelm": "does not let its layers use preheat"}

TECHNIQUES = "efficient_attention: {}, chunked_loss: {rows: 40}, activation_checkpointing: {}"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_packed_rows_are_their_documents(name: str, parent: Path) -> None:
    subject = Subject(name, parent)
    subject.compare(TECHNIQUES)
    subject.compare_in_double()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*KINDS, *REFUSED)])
def test_packed_rows_are_their_documents_in_every_architecture(name: str, parent: Path) -> None:
    test_packed_rows_are_their_documents(name, parent)


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_be_trained_says_why(name: str, parent: Path) -> None:
    with pytest.raises(RecipeError, match=REFUSED[name]):
        Subject(name, parent).compare(TECHNIQUES)


@pytest.mark.parametrize("name", ["gpt2", "qwen3_5_text", "mamba2"])
def test_a_cache_continues_a_text(name: str) -> None:
    model, tokens = create_model(tiny_config(name)).eval(), torch.arange(1, 13)[None]
    with torch.no_grad():
        cache = find_cache(model(tokens[:, :8], use_cache=True))
        assert cache is not None
        assert find_cache(pass_cache(model, cache)) is cache
        parts = [model(tokens[:, n : n + 1], use_cache=True, **pass_cache(model, cache)).logits for n in range(8, 12)]
        whole = model(tokens, use_cache=False).logits[:, 8:]
    assert (torch.cat(parts, 1) - whole).norm() / whole.norm() < 1e-5


def test_layers_and_experts_are_read_from_modules_and_configurations_alike() -> None:
    recurrent = {"linear_attention", "conv", "mamba", "hybrid"}
    for name in ARCHITECTURES:
        config = tiny_config(name)
        with torch.device("meta"):
            model = create_model(config)
        alibi.replace_alibi(model)
        layers = hf.find_anatomy(model).layers
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        assert len(layers) == config.num_hidden_layers
        for kind, layer in zip(kinds, layers, strict=True):
            assert bool(find_recurrent_mixers(layer)) == (kind in recurrent), (name, kind)
            assert bool(find_attentions(layer)) == (
                (kind.endswith("attention") and kind != "linear_attention") or kind == "hybrid"
            ), (name, kind)
        assert len(moe.routers(model)) == moe.expert_layers(config), name
        facts, chunked = hf.read_facts(config), "chunked_attention" in kinds
        assert facts.recurrent_layers == sum(bool(find_recurrent_mixers(layer)) for layer in layers), name
        assert facts.special_mixers == (facts.recurrent_layers > 0 or facts.sinks or chunked), name
        assert hf.read_facts(config).sinks == any("sinks" in m._parameters for m in model.modules()), name


def test_a_document_reaches_a_recurrent_mixer_alone() -> None:
    hidden = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    mixed = split_documents(hidden, ((2, 6, 1), (9,)), lambda x: x.cumsum(1))
    parts = [*hidden[0].split([2, 6, 1]), hidden[1]]
    expected = torch.cat([part.cumsum(0) for part in parts]).view(2, 9, 3)
    assert torch.equal(mixed, expected)
    weights = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (ours,) = torch.autograd.grad((mixed * weights).sum(), hidden, retain_graph=True)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), hidden)
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_sinks_take_part_in_the_softmax(window: int | None) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 7, 8, dtype=torch.float64, generator=g) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=g, requires_grad=True)
    mask = MaskSpec(window=window, documents=((3, 4), (7,)))
    out = attend_with_sinks(reference_attention, q, k, v, mask, 0.3, sinks)
    place = torch.arange(7)
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0] * 7])
    seen = (place[:, None] >= place) & (place[:, None] - place < (window or 7))
    seen = (seen & (document[:, :, None] == document[:, None]))[:, None]
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3).masked_fill(~seen, float("-inf"))
    column = sinks[None, :, None, None].expand(2, 4, 7, 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    assert torch.allclose(out, expected, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.square().sum(), sinks, retain_graph=True)[0] for x in (out, expected))
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_a_window_as_long_as_a_row_needs_no_kernel_with_windows() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).double()
    sinks = torch.tensor([0.5, -1.0]).double()
    full, windowed = (
        attend_with_sinks(kernel, q, k, v, MaskSpec(window=window), 0.5, sinks)
        for kernel, window in ((reference_attention, None), (sdpa_attention, 6))
    )
    assert torch.allclose(windowed, full, atol=1e-12)


def test_missing_kernels_are_named_with_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model = hf.build_on_meta(tiny_config("granitemoehybrid"))
    gpu: Any = SimpleNamespace(device=Device("cuda", "a GPU", 2**30, (9, 0)), changes={})
    builder._record_recurrent(gpu, model)
    (change,) = gpu.changes["recurrent_kernels"]
    assert change.what.startswith("causal-conv1d and mamba-ssm not installed, so PyTorch's operators compute")
    assert "slower, and with several times their activations; pip install causal-conv1d mamba-ssm" in change.what


def test_chunks_are_documents_cut_from_their_start() -> None:
    assert cut_into_chunks(MaskSpec(), 3, 2, 7).documents == ((3, 3, 1), (3, 3, 1))


def refusals(name: str, technique: str, **more: Any) -> list[str]:
    recipe = parse(f"batch: {{size: 4}}\nstop: {{max_steps: 1}}\ntechniques: {{{technique}}}")
    context = build_context(recipe, tiny_config(name, **more), DEVICE, world=2)
    return [problem.text for t in recipe.techniques.values() for problem in problems_of(t, context)]


@pytest.mark.parametrize("kind", ["auto", "ulysses", "ring"])
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "gpt_oss", "llama4_text"])
def test_rows_are_split_whatever_the_mixers_but_in_order_of_recurrent_ones(name: str, kind: str) -> None:
    problems = refusals(name, f"data_parallel: {{}}, context_parallel: {{kind: {kind}}}")
    ordered = kind == "ring" and name in ("lfm2", "mamba2")
    assert [problem.split(";")[1] for problem in problems] == [" use kind: ulysses"] * ordered


def test_heads_that_only_a_ring_could_leave_whole_are_refused() -> None:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    assert refusals("llama", "data_parallel: {}, context_parallel: {}", **heads) == []
    (problem,) = refusals("lfm2", "data_parallel: {}, context_parallel: {}", **heads)
    assert problem == "kind: ulysses cannot split 3 heads across 2 devices; use a degree that divides them"
    groups = "data_parallel: {}, context_parallel: {}, shifted_groups: {group_size: 8}"
    assert any("attention sinks of gpt_oss" in problem for problem in refusals("gpt_oss", groups))


def test_heads_of_recurrent_mixers_are_split_unless_a_device_needs_all_of_them() -> None:
    split, whole = set(), set()
    for name in ARCHITECTURES:
        layers = hf.find_anatomy(hf.build_on_meta(tiny_config(name))).layers
        mixers = [mixer for layer in layers for mixer in find_recurrent_mixers(layer)]
        counts = count_split_mixers(mixers, 2)
        assert sum(counts) == len(mixers)
        split |= {name} if counts[0] else set()
        whole |= {name} if counts[1] else set()
        assert count_split_mixers(mixers, 3) == (0, len(mixers)), name  # 3 divides no number of heads
    assert whole == {"jamba", "kimi_linear", "minimax"}
    assert {
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "lfm2",
        "mamba2",
        "nemotron_h",
        "qwen3_5_text",
        "qwen3_next",
    } <= split


def test_matrices_are_split_by_the_plan_whatever_the_mixers() -> None:
    tensor = "tensor_parallel: {degree: 2}"
    assert refusals("qwen3_5_text", tensor) == []
    assert refusals("llama4_text", tensor, moe_layers=[]) == []
    dense = {"layers_block_type": ["mamba", "attention", "mlp"]}
    for name, more in (("lfm2", {}), ("nemotron_h", dense)):
        (problem,) = refusals(name, tensor, **more)
        assert f"no tensor parallel plan for {name}" in problem
    # Experts are split without a plan of transformers, unless the model's own code computes them.
    assert refusals("gpt_oss", tensor) == refusals("nemotron_h", tensor) == refusals("minimax", tensor) == []
    (problem,) = refusals("llama4_text", tensor)
    assert "cannot split the experts of llama4_text, which its own code computes" in problem


def test_stages_take_every_mixer_and_experts() -> None:
    pipeline = "pipeline_parallel: {micro_batches: 2}"
    dense = {"layers_block_type": ["mamba", "attention", "mlp"]}
    assert refusals("nemotron_h", pipeline, **dense) == []
    for name in ("lfm2", "gpt_oss", "nemotron_h", "llama4_text"):
        assert refusals(name, pipeline) == [], name
