"""Adapters of every architecture: which projections they go onto, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from transformers import AutoModelForCausalLM

from preheat.engine.builder import build
from preheat.errors import SettingError
from preheat.models import adapter_targets, alibi, hf, moe
from preheat.ops.adapters.peft_layers import merge
from preheat.techniques.lora import add_lora

from ...architectures.columns import VOCABULARY, Subject, write_data
from ...architectures.tiny import ARCHITECTURES, create_model, tiny_config
from ...conftest import DEVICE, difference

# Delta net with shared experts; Mamba-2 with experts without a gate; transposed experts with biases; convolutions with
# experts; shared experts beside a dense layer.
KINDS = ("qwen3_next", "nemotron_h", "gpt_oss", "lfm2_moe", "glm4_moe")


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    alibi.replace_alibi(model)
    return model


# The difference to peft's all-linear -> why.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("granitemoehybrid", "nemotron_h", "falcon_h1", "bamba", "mamba2"), ("out_proj",)),  # fused kernel
    "jamba": ("dt_proj",),  # its weight is multiplied by hand, also on a CPU
    "llama4_text": ("router",),
    "hunyuan_v1_moe": ("wg",),  # a router
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_linear_is_that_of_peft(name: str) -> None:
    model = on_meta(name)
    peft_config: Any = _maybe_include_all_linear_layers(LoraConfig(target_modules="all-linear"), model)
    names, _ = adapter_targets.resolve(model, "all-linear")
    missing = {name.rpartition(".")[2] for name in peft_config.target_modules - {*names}}
    assert missing == {*LEFT_OUT.get(name, ())}
    assert {*names} <= peft_config.target_modules


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "8 attention and 6 feed-forward projections"),
        ("qwen3_next", "4 attention, 3 recurrent and 8 feed-forward projections"),
        ("gpt_oss", "8 attention projections"),
        ("glm4_moe_lite", "10 attention and 6 feed-forward projections"),
        ("gemma3n_text", "12 attention, 12 feed-forward and 35 other projections"),
        ("nemotron_h", "4 attention, 1 recurrent and 4 feed-forward projections"),
        ("lfm2_moe", "4 attention, 2 recurrent and 3 feed-forward projections"),
        ("falcon_h1", "8 attention, 2 recurrent and 6 feed-forward projections"),
        ("kimi_linear", "4 attention, 9 recurrent and 6 feed-forward projections"),
        ("gpt2", "4 attention and 4 feed-forward projections"),
    ],
)
def test_projections_are_counted_by_kind_of_layer(name: str, text: str) -> None:
    model = on_meta(name)
    names, _ = adapter_targets.resolve(model, "all-linear")
    assert adapter_targets.describe(model, names) == text


@pytest.mark.parametrize(
    ("targets", "count", "parts"),
    [
        ("attention", 4, {"q_proj", "k_proj", "v_proj", "out_proj"}),
        ("recurrent", 2, {"in_proj", "out_proj"}),
        (("feed-forward", "k_proj"), 4, {"w1", "w2", "w3", "k_proj"}),
        ("all-linear", 9, {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"}),
    ],
)
def test_targets_name_kinds_of_layers(targets: Any, count: int, parts: set[str]) -> None:
    names = add_lora(create_model(tiny_config("lfm2_moe")), rank=2, targets=targets)
    assert (len(names), {name.rpartition(".")[2] for name in names}) == (count, parts)


def test_experts_are_targets_of_the_same_rank() -> None:
    model = create_model(tiny_config("gpt_oss"))
    add_lora(model, rank=3, targets=("attention", "experts"))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if ".0.mlp.experts." in n and "lora" in n}
    assert shapes == {
        "model.layers.0.mlp.experts.gate_up_proj_lora_A": (4, 3, 32),
        "model.layers.0.mlp.experts.gate_up_proj_lora_B": (4, 96, 3),
        "model.layers.0.mlp.experts.down_proj_lora_A": (4, 3, 48),
        "model.layers.0.mlp.experts.down_proj_lora_B": (4, 32, 3),
    }


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        (
            "bamba",
            ("in_proj", "out_proj"),
            r"out_proj: BambaMixer computes with the weight of model.layers.0.mamba.out",
        ),
        ("mamba2", ".*(in_proj|out_proj)", r"out_proj: Mamba2Mixer computes with the weight"),
        ("jamba", ("dt_proj",), r"dt_proj: JambaMambaMixer computes with the weight"),
        ("qwen3_next", ("conv1d", "q_proj"), r"conv1d: Qwen3NextGatedDeltaNet computes with the weight"),
        ("lfm2", ("conv.conv",), r"conv: Lfm2ShortConv computes with the weight"),
        ("llama", "recurrent", r"'recurrent': the model has no such layers .* it has attention and feed-forward$"),
        ("gpt_oss", ("attention", "feed-forward"), r"'feed-forward': .* it has attention and experts$"),
        ("gpt_oss", "experts", r"experts: adapters on experts alone are not supported; write \[attention, experts\]"),
    ],
)
def test_targets_without_effect_are_refused(name: str, targets: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        add_lora(on_meta(name), rank=2, targets=targets)


def test_experts_of_another_kind_are_refused() -> None:
    with pytest.raises(SettingError, match="expert_rank: 2: transformers computes this model's experts in a way"):
        add_lora(on_meta("llama4_text"), rank=2, expert_rank=2)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    write_data(folder)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.slow) for n in ARCHITECTURES if n != "stablelm"]
)
def test_merged_and_saved_every_kind_computes_what_it_did_with_its_adapters(
    name: str, parent: Path, tmp_path: Path
) -> None:
    subject = Subject(name, parent)
    experts = len(moe.experts_of(subject.model))
    settings = "rank: 4, expert_rank: 3" if experts else "rank: 4"
    adapted = build(subject.recipe(f"lora: {{{settings}}}"), vocabulary=VOCABULARY, device=DEVICE)
    model: Any = adapted.trained[0]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, p in adapted.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    tokens = torch.arange(3, 35)[None]
    wanted = hf.compute_reference_logits(model, tokens)
    base = {key: p.detach().clone() for key, p in subject.model.named_parameters()}
    assert merge(model) == adapted.changes["lora"][0].count
    assert bool(
        torch.isclose(
            hf.compute_reference_logits(model, tokens), wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max()
        ).all()
    )
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits = hf.compute_reference_logits(loaded, tokens)
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-5
    # Every adapter did something: each weight that it is for has changed, of all experts too.
    stacks = {key for key, p in base.items() if ".experts." in key and p.ndim == 3} if experts else set()
    names, _ = adapter_targets.resolve(subject.model, "all-linear")
    for key in {f"{name}.weight" for name in names} | stacks:
        assert difference({key: loaded.get_parameter(key).detach()}, {key: base[key]}) > 1e-3, key
