"""Presets are the published models: their parameters by count, planned at their real size without a download."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from preheat import recipe as recipes
from preheat.cli.models import next_commands
from preheat.cli.options.subject import find_subject
from preheat.core import Device
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.hardware.catalogue import resolve_accelerator
from preheat.models import configs, hf
from preheat.models.presets import PRESETS, needs, published, require_weights, resolve_hub_name
from preheat.models.presets.preset import NOT_TRAINED
from preheat.planning.analytic import count_model_parameters
from preheat.planning.dry_run import observe
from preheat.planning.observation import Observation
from preheat.planning.request import Request
from preheat.recipe import Recipe, parse

from ...conftest import DEVICE

GIB = 2**30
GPU = Device("cuda", "a GPU of 24 GiB", 24 * GIB, (8, 9))
QLORA = "{nf4: {}, lora: {}, mixed_precision: {mode: bf16}, activation_checkpointing: {}, efficient_attention: {}, chunked_loss: {}}"
LORA = "{lora: {}, mixed_precision: {mode: bf16}, efficient_attention: {}, chunked_loss: {}}"
ALL = os.environ.get("PREHEAT_PRESETS") == "all"
FITTING = [
    n
    for n, p in PRESETS.items()
    if p.parameters < 10e9 and p.config["model_type"] in ("gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")
]
WHOLE = FITTING if ALL else ["llama-3.2-1b"]
"""Dry-run with all their layers, about a second each; PREHEAT_PRESETS=all (`make test-presets`) takes every one that fits."""


def _recipe(name: str, techniques: str = QLORA, model: str = "", length: int = 2048) -> Recipe:
    return parse(
        f"model: {{preset: {name}{model}}}\nbatch: {{size: 2, seq_len: {length}}}\nstop: {{max_steps: 1}}\ntechniques: {techniques}"
    )


TABLES = [name for name in PRESETS if name not in published.models()]
TRAINED = [name for name in TABLES if PRESETS[name].config["model_type"] not in NOT_TRAINED]
FIRST = {p.config["model_type"]: name for name, p in reversed(list(PRESETS.items())) if "text_config" not in p.config}
"""One preset of each family that is text alone."""
FEW = [
    name
    for name in ("gemma-2-2b", "gemma-3-1b", "gpt2", "llama-3.2-1b", "phi-4-mini", "pythia-70m", "qwen2.5-0.5b")
    if not ALL
]
"""One of a family; with PREHEAT_PRESETS=all every preset is dry-run."""


DEEP = [name for name in PRESETS if name not in TABLES and PRESETS[name].text["num_hidden_layers"] > 60]
"""Half of the time for a sixth of the presets."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEEP else name for name in PRESETS]
)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    preset = PRESETS[name]
    config = configs.preset_config(name)
    reads = "vision_config" in preset.config
    with torch.device("meta"):
        factory = transformers.AutoModelForImageTextToText if reads else transformers.AutoModelForCausalLM
        model: Any = factory.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == preset.parameters
    assert preset.stored is None or (preset.stored > preset.parameters and preset.stored_more)
    said = needs(preset)
    text = config.get_text_config()
    found = {n: p for n, p in model.named_parameters() if not re.search(r"vision|visual|audio|indexer", n)}
    experts = {n: p for n, p in found.items() if re.search(r"(^|\.)experts\.", n)}
    if name != "minimax-m1":  # some of its layers have them in one matrix
        together = any(re.search(r"(?<!in_proj_)qkv_proj|c_attn|query_key_value", n) for n in found)
        assert (said["projections"] != "each its own") == together
    biased = any(re.search(r"(q_proj|c_attn|query_key_value)\.bias$", n) for n in found)
    assert (said["attention biases"] != "none") == biased
    normed = any(re.search(r"(q|query)_(layer)?norm\.", n) for n in found)
    assert (said["q and k norms"] not in ("none", "L2 norm of each head, without weights")) == normed
    assert (said["head"] == "tied to the embedding") == (
        model.get_input_embeddings().weight is model.get_output_embeddings().weight
    )
    assert (said["images"] != "not read") == reads
    assert (said["experts"] != "none") == bool(experts)
    if experts:  # stacked: their number is the first size
        count, chosen, *_ = map(int, re.findall(r"\d+", re.sub(r"of width [\d,]+", "", said["experts"])))
        idle = sum(p.numel() // count * (count - chosen) for p in experts.values())
        assert {p.shape[0] for p in experts.values()} == {count}
        assert preset.active == preset.parameters - idle
    else:
        assert preset.active is None
    rotates = any("rotary" in type(m).__name__.lower() and "vision" not in n for n, m in model.named_modules())
    assert said["rotary positions"].startswith("base") == rotates
    if rotates and isinstance(base := (text.rope_parameters or {}).get("rope_theta"), int | float):
        assert said["rotary positions"].startswith(f"base {base:,.0f}")
    kinds = Counter(getattr(text, "layer_types", None) or ())
    if len(kinds) > 1 and "in a window" in said["layers"]:
        assert sorted(map(int, re.findall(r"(\d+) with", said["layers"]))) == sorted(kinds.values())
    if name in TRAINED or (name in FIRST.values() and config.model_type not in NOT_TRAINED):
        built: Any = hf.build_on_meta(config)
        assert (said["soft caps"] != "none") == (hf.softcap(built) is not None)
        window = hf.read_facts(built.config).window
        assert (said["sliding window"] != "none") == bool(window and window < built.config.max_position_embeddings)


def _kind(name: str) -> tuple[object, ...]:
    """What decides whether a model is refused: its family, its part and its kinds of layers."""
    config = configs.preset_config(name)
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return type(config), PRESETS[name].text["model_type"], *sorted(set(kinds))


SMALLEST = {
    _kind(name): name for name in sorted(PRESETS, key=lambda n: (PRESETS[n].text["num_hidden_layers"], n), reverse=True)
}
"""The preset with the fewest layers of each kind of model: those of a kind are refused alike."""


@pytest.mark.parametrize("name", SMALLEST.values())
def test_the_commands_that_are_shown_for_a_model_are_accepted(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    shown = next_commands(name, preset)
    (words,) = re.findall(r"^  preheat plan (.*)$", shown, re.MULTILINE)
    subject, *options = words.split()
    resolve_accelerator(options[options.index("--gpu") + 1])
    recipe = find_subject(subject, []).recipe
    if preset.not_trained is None:
        assert "--inference" not in options
        hf.build_on_meta(config := hf.configure(recipe))
        (train,) = re.findall(r"^train it:\n  (.*)$", shown, re.MULTILINE)
        assert yaml.safe_load(train) == {"model": {"path": preset.chat}}
        # As the hub's folder: its config.json is that of the preset.
        (tmp_path / "config.json").write_text(json.dumps(preset.config))
        alone = parse(f"model: {{path: {tmp_path}}}\nbatch: {{seq_len: 64}}\nstop: {{max_steps: 1}}")
        assert type(hf.configure(alone)) is type(config)
    else:
        assert "--inference" in options
        assert "train it" not in shown
        assert f"it cannot be trained here: {preset.text['model_type']} {preset.not_trained}\n" in shown
        with pytest.raises(RecipeError, match=re.escape(preset.not_trained)):
            hf.configure(recipe)
        assert count_model_parameters(recipe).parameters == preset.parameters


@pytest.mark.parametrize(
    ("hub", "name", "parameters"),
    [
        ("google/gemma-4-12B-it", "gemma-4-12b", 11_959_730_176),
        ("Qwen/Qwen3.5-9B", "qwen3.5-9b", 9_409_813_744),
        ("openai/gpt-oss-20b", "gpt-oss-20b", 20_914_757_184),
        ("zai-org/GLM-4.7-Flash", "glm-4.7-flash", 29_943_390_976),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b", 31_577_937_344),
        ("tiiuae/Falcon-H1-7B-Base", "falcon-h1-7b", 7_585_648_736),
    ],
)
def test_a_model_of_2026_is_found_by_its_name_on_the_hub(hub: str, name: str, parameters: int) -> None:
    assert resolve_hub_name(hub) == resolve_hub_name(hub.upper()) == (name, hub)
    assert resolve_hub_name(name)[0] == name
    assert PRESETS[name].parameters == parameters


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen/Qwen3.5-9B-FP8", "Qwen/Qwen3.5-9B"),
        ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b"),
        ("LiquidAI/LFM2.5-1.2B-Instruct", "LiquidAI/LFM2.5-1.2B-Base"),
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B"),
        ("qwem3-8b", "Qwen/Qwen3-8B"),
        ("Hermes-4-14B", ""),  # like gemma-4-E4B by its letters alone
        ("a" * 5000, ""),
    ],
)
def test_an_unknown_name_leads_to_the_model_that_it_is_a_variant_of(name: str, near: str) -> None:
    with pytest.raises(RecipeError, match="not a known model") as refused:
        resolve_hub_name(name)
    assert (f"did you mean {near}?" if near else "`preheat models` lists them") in str(refused.value)
    assert len(str(refused.value)) < 600


def test_no_two_presets_have_a_name_in_common() -> None:
    for name, preset in PRESETS.items():
        assert resolve_hub_name(name)[0] == name
        for checkpoint in preset.checkpoints:
            assert resolve_hub_name(checkpoint) == (name, checkpoint)


def test_the_dense_first_layer_of_a_model_with_experts_is_dry_run_alone() -> None:
    seen = observe(Request(_recipe("glm-4.7-flash", "{chunked_loss: {}}", ", config: {num_hidden_layers: 1}", 64), GPU))
    assert "experts" not in seen.changes
    # Embedding and head, latent attention of 20 heads, the dense block, three norms.
    attention = 768 * (2048 + 20 * 256 + 1) + 2048 * (512 + 64) + 512 * (1 + 20 * (192 + 256)) + 20 * 256 * 2048
    assert seen.parameters == 2 * 154880 * 2048 + attention + 3 * 2048 * 10240 + 3 * 2048


def test_a_model_is_found_by_its_name_on_the_hub_in_any_case() -> None:
    assert resolve_hub_name("qwen/qwen3-8b") == ("qwen3-8b", "Qwen/Qwen3-8B")
    assert resolve_hub_name("Meta-Llama-3.1-8B-Instruct") == ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct")
    with pytest.raises(RecipeError, match=r"did you mean Qwen/Qwen3\.5-9B"):
        resolve_hub_name("Qwen/Qwen3-9B")


def test_what_the_adapter_cannot_train_says_why() -> None:
    with pytest.raises(RecipeError, match=r"cannot be trained here; preheat plan --inference"):
        hf.configure(_recipe("deepseek-v2-lite"))


def _peak(seen: Observation) -> float:
    return max(seen.peak.values()) / GIB


@pytest.mark.parametrize("name", FEW or TRAINED)
def test_a_preset_is_dry_run_with_a_few_layers(name: str) -> None:
    config = configs.preset_config(name)
    recipe = _recipe(name, LORA, ", config: {num_hidden_layers: 2}", 1024)
    seen = observe(Request(recipe, GPU))
    if config.model_type not in ("gpt2", "gpt_neox", "mixtral", "qwen3_moe"):
        # Each adapter is rank times (rows + columns) of its map: the published shapes.
        assert seen.trained == _adapters(config, 2)
    assert seen.slots["attention_kernel"] == "efficient_attention"
    kernel = seen.changes["efficient_attention"][0].kernel
    assert kernel == ("flex" if name.startswith("gemma-2") else "flash")  # capped scores


def _adapters(config: Any, layers: int, rank: int = 16) -> int:
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    q, kv = head * config.num_attention_heads, head * config.num_key_value_heads
    maps = [(width, q), (width, kv), (width, kv), (q, width), (width, inner), (width, inner), (inner, width)]
    if config.model_type == "phi3":
        maps = [(width, q + 2 * kv), (q, width), (width, 2 * inner), (inner, width)]
    return layers * rank * sum(a + b for a, b in maps)


@pytest.mark.parametrize("name", WHOLE)
def test_a_preset_at_its_real_size_fits_a_gpu_of_24_gib(name: str) -> None:
    seen = observe(Request(_recipe(name), GPU))
    assert seen.trained == _adapters(configs.preset_config(name), configs.preset_config(name).num_hidden_layers)
    assert _peak(seen) < 24
    # The base stands in 4 bits but for embedding, head and norms.
    assert (
        seen.categories["update"]["parameters"] / GIB
        < 0.55 * PRESETS[name].parameters / GIB + 4 * _kept(name) / GIB + 0.5
    )


def _kept(name: str) -> int:
    config = configs.preset_config(name)
    return config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)


def test_a_preset_is_planned_but_not_trained_without_weights(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"qwen2.5-0.5b is a configuration without weights.*path: Qwen/Qwen2.5-0.5B"):
        build(_recipe("qwen2.5-0.5b"), vocabulary=None, device=DEVICE)
    require_weights(_recipe("qwen2.5-0.5b", model=", weights: random"))
    small = ", weights: random, config: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64, vocab_size: 512}"
    made = build(_recipe("qwen2.5-0.5b", "{}", small, 64), vocabulary=None, device=DEVICE)
    assert made.model.heads == 14


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("{preset: qwen2.5-05b}", "did you mean 'qwen2.5-0.5b'"),
        ("{preset: GPT-5}", "not a known preset"),
        ("{preset: qwen2.5-0.5b, num_layers: 2}", "brings its sizes; remove num_layers"),
        ("{preset: qwen2.5-0.5b, size: 15M}", "brings its sizes; remove size"),
        ("{preset: qwen2.5-0.5b, config: {num_layers: 2}}", "has no such setting"),
    ],
)
def test_a_preset_that_cannot_be_is_refused(model: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        hf.configure(parse(f"model: {model}\nbatch: {{seq_len: 64}}\nstop: {{max_steps: 1}}"))


def test_a_folder_beside_a_preset_must_be_that_model(tmp_path: Path) -> None:
    config = configs.preset_config("phi-3.5-mini")
    values = config.to_dict() | {
        "eos_token_id": 32007,
        "max_position_embeddings": 4096,
    }  # as an instruct sibling may differ
    values["rope_parameters"] = {
        **values["rope_parameters"],
        "long_factor": [1.0800000429153442, *values["rope_parameters"]["long_factor"][1:]],  # as the hub's file has it
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    recipe = _recipe("phi-3.5-mini", model=f", path: {tmp_path}")
    assert hf.configure(recipe).eos_token_id == 32007
    (tmp_path / "config.json").write_text(json.dumps(values | {"intermediate_size": 8193}))
    with pytest.raises(
        RecipeError, match=r"phi-3.5-mini has intermediate_size 8192, but .* has 8193; remove the preset"
    ):
        hf.configure(recipe)
    transformers.LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"is a phi3, but .* holds a llama"):
        hf.configure(recipe)


def test_a_model_of_images_and_text_is_refused_in_one_line(tmp_path: Path) -> None:
    transformers.LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"llava is several models in one \(llama is its text part\)") as caught:
        hf.configure(parse(f"model: {{path: {tmp_path}}}\nbatch: {{seq_len: 64}}\nstop: {{max_steps: 1}}"))
    assert "\n" not in str(caught.value)


BUILT_IN = sorted(p.stem for p in (Path(recipes.__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, DEVICE) for name in BUILT_IN if name != "demo"), ("limited-hardware", GPU), ("fine-tune", GPU)],
    ids=lambda value: value.kind if isinstance(value, Device) else value,
)
def test_a_built_in_recipe_is_dry_run_with_its_preset(name: str, device: Device) -> None:
    rows = 4 if name == "multi-gpu" else 2  # of two data-parallel devices
    few = ["model.config={num_hidden_layers: 1}", f"batch.size={rows}", "techniques.gradient_accumulation.steps=2"]
    recipe = recipes.load(name, few)
    assert recipe.name == name
    assert recipe.model.preset in PRESETS
    seen = observe(Request(recipe, device, world=2 if name == "multi-gpu" else 1))
    assert seen.trained == seen.parameters if name == "long-sequences" else seen.trained < seen.parameters / 10
    if name == "multi-gpu":  # the bits of the base are sharded, and so are the adapters
        layer, embedding = 1536 * (1536 * 2 + 256 * 2 + 8960 * 3), 151936 * 1536
        wanted = (0.516 * layer + 2 * embedding + 4 * seen.trained) / 2
        assert seen.categories["update"]["parameters"] == pytest.approx(wanted, rel=0.02)
    if name == "fine-tune":  # the frozen base, adapters aside, in fp32 on a CPU and in bf16 on a GPU
        base = seen.categories["update"]["parameters"] - 4 * seen.trained
        assert base == pytest.approx((seen.parameters - seen.trained) * (2 if device is GPU else 4), rel=0.001)
    if name == "limited-hardware":  # one recipe for both kinds of device, and the run says which it was
        said = seen.changes["optimizer_offload"][0].what
        assert said.startswith("nothing to move" if device is DEVICE else "AdamW of")


@pytest.mark.parametrize("name", ["fine-tune", "limited-hardware"])
def test_a_frozen_base_of_8b_is_held_in_16_bits_on_a_gpu(name: str) -> None:
    settings = ["model={preset: llama-3.1-8b}", "batch.size=2", "techniques.gradient_accumulation.steps=2"]
    seen = observe(Request(recipes.load(name, settings), GPU))
    base = seen.parameters - seen.trained
    assert base == 8_030_261_248
    ends = 2 * 128256 * 4096  # embedding and head, which NF4 leaves as they are
    norms = (2 * 32 + 1) * 4096
    nf4 = 0.516 * (base - ends - norms) + 2 * (ends + norms)
    wanted = 2 * base if name == "fine-tune" else nf4
    for phase in ("forward", "update"):
        held = seen.categories[phase]["parameters"] - 4 * seen.trained
        assert held == pytest.approx(wanted, rel=0.002), phase
    assert wanted < 16.1e9
