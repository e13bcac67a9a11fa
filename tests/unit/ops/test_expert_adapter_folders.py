"""Adapters of experts in peft's folders: peft's own logits, training that starts from them, and unsupported ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from preheat.core import Build
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.models import hf
from preheat.ops.adapters.peft_io import put_in, read_folder
from preheat.recipe import override, parse

from ...conftest import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # read by peft

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "head_dim": 8,
}
FAMILIES = {
    "mixtral": SIZES,
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 24, "num_experts": 4},
    "gpt_oss": {**SIZES, "layer_types": ["full_attention"] * 2},  # stacks are [experts, in, out]
}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]
TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))


def write_base(family: str, path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def write_adapter(base: Path, path: Path, **settings: Any) -> torch.Tensor:
    """Writes a folder by peft, with values that change the model, and returns peft's logits."""
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following rank_pattern keys")  # which peft applies all the same
        model = peft.get_peft_model(plain, peft.LoraConfig(lora_dropout=0.0, **settings))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=draw) * 0.2)
        model.save_pretrained(path)
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


def build_model(base: Path, *settings: str) -> Build:
    recipe = parse(f"model: {{path: {base}}}\nstop: {{max_steps: 1}}\nbatch: {{size: 2, seq_len: 16}}")
    return build(override(recipe, *settings), vocabulary=96, device=DEVICE)


def compute_logits(built: Build) -> torch.Tensor:
    return hf.compute_reference_logits(built.trained[0].eval(), TOKENS)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "target_parameters": BOTH},
        {"r": 4, "use_rslora": True, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
        {
            "r": 8,
            "lora_alpha": 8,
            "target_modules": ATTENTION,
            "target_parameters": BOTH,
            "rank_pattern": {r".*\.experts\..*": 2},
        },
        {"r": 4, "target_modules": ATTENTION, "target_parameters": ["model.layers.1.mlp.experts.gate_up_proj"]},
    ],
    ids=["both", "experts alone", "another rank", "one layer"],
)
def test_a_folder_of_peft_gives_its_logits(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = write_base(family, tmp_path / "base")
    wanted = write_adapter(base, tmp_path / "adapter", **settings)
    built = build_model(base)
    before = compute_logits(built)
    put_in(built.trained[0], read_folder(tmp_path / "adapter", "adapter"))
    assert (before - wanted).abs().max() > 0.01
    torch.testing.assert_close(compute_logits(built), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("more", [(), ("techniques.nf4={}",)], ids=["plain", "nf4"])
def test_training_starts_from_a_folder(more: tuple[str, ...], tmp_path: Path) -> None:
    base, adapter = write_base("qwen3_moe", tmp_path / "base"), tmp_path / "adapter"
    write_adapter(base, adapter, r=4, lora_alpha=8, target_modules=ATTENTION, target_parameters=BOTH)
    lora = f"{{target_modules: [q_proj, v_proj], rank: 4, alpha: 8, expert_rank: 4, start: {adapter}}}"
    begun = build_model(base, f"techniques.lora={lora}", *more)
    read = build_model(base)
    put_in(read.trained[0], read_folder(adapter, "adapter"))
    ours, theirs = dict(begun.trained[0].named_parameters()), dict(read.trained[0].named_parameters())
    pairs = [name for name in ours if "lora_" in name]
    assert len(pairs) == 2 * (2 * 2 + 2 * 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in pairs)
    assert all(ours[name].requires_grad for name in pairs)


@pytest.mark.parametrize(
    ("settings", "recipe", "message"),
    [
        (
            {"target_parameters": BOTH},
            "rank: 4, expert_rank: 2",
            r"experts.* of shape .16, 24., the model needs .8, 24.",
        ),
        ({"target_parameters": BOTH}, "rank: 4", "also adapts experts, and the recipe does not; set expert_rank"),
        ({"target_parameters": BOTH[:1]}, "rank: 4, expert_rank: 4", "has no adapters for all expert matrices of"),
        (
            {"target_parameters": ["gate.weight"]},
            "rank: 4",
            "mlp.gate",
        ),
    ],
    ids=["rank", "no experts", "one matrix", "router"],
)
def test_a_start_that_differs_from_the_recipe_is_an_error(
    settings: dict[str, Any], recipe: str, message: str, tmp_path: Path
) -> None:
    base, adapter = write_base("qwen3_moe", tmp_path / "base"), tmp_path / "adapter"
    write_adapter(base, adapter, r=4, lora_alpha=8, target_modules=ATTENTION, **settings)
    with pytest.raises(RecipeError, match=message) as error:
        build_model(base, f"techniques.lora={{target_modules: [q_proj, v_proj], alpha: 8, {recipe}, start: {adapter}}}")
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_computed_is_an_error(tmp_path: Path) -> None:
    base, adapter = write_base("qwen3_moe", tmp_path / "base"), tmp_path / "adapter"
    write_adapter(base, adapter, r=4, target_modules=ATTENTION, target_parameters=BOTH)
    settings = adapter / "adapter_config.json"
    written = json.loads(settings.read_text())
    changes = {
        "rank 4, scale 2 for gate_up_proj and rank 4, scale 4 for down_proj": {"alpha_pattern": {".*down_proj": 16}},
        "changes lm_head.bias .target_parameters.": {"target_parameters": ["lm_head.bias"]},
        "has rank 64 at .*, more than an expert's matrices have": {"rank_pattern": {".*experts.*": 64}},
    }
    for message, change in changes.items():
        settings.write_text(json.dumps(written | change))
        with pytest.raises(RecipeError, match=message):
            put_in(build_model(base).trained[0], read_folder(adapter, "adapter"))
    settings.write_text(json.dumps(written))
    dense = tmp_path / "dense"
    config = transformers.LlamaConfig(**{key: SIZES[key] for key in list(SIZES)[:6]})
    transformers.LlamaForCausalLM(config).save_pretrained(dense)
    with pytest.raises(RecipeError, match="changes parameters of experts, which this model does not have"):
        put_in(build_model(dense).trained[0], read_folder(adapter, "adapter"))
