"""The text part of vision-language checkpoints: read, and written back, as transformers' whole model computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from preheat.compress.export.published_layout import find_published_layout
from preheat.core import Build
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.hardware.probe import probe
from preheat.inference.load import LoadedModel
from preheat.models import configs
from preheat.models.hf import compute_reference_logits
from preheat.models.text_part import name_in_text
from preheat.recipe import parse

TEXT: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {**_TOWER, "image_size": 16, "patch_size": 8}
_QWEN = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [0],
    },
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LLAMA4 = {
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0],
}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": _SLIDING, "vision_config": {**_PATCHES, "model_type": "siglip_vision_model"}}
    | {"mm_tokens_per_image": 1, "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252},
    "gemma4": {
        "text_config": {**_SLIDING, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 260, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"},
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
        "image_token_id": 250,
    },
    "gemma4_unified": {"text_config": {**_SLIDING, "global_head_dim": 16}, "image_token_id": 250},
    "llama4": {
        "text_config": _LLAMA4,
        "vision_config": _PATCHES | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {**_PATCHES, "model_type": "pixtral"}},
    "qwen3_5": {"text_config": _LINEAR, **_QWEN},
    "qwen3_5_moe": {"text_config": {**_LINEAR, **_EXPERTS}, **_QWEN},
    "qwen3_vl": {"text_config": {"rope_parameters": _MROPE}, **_QWEN},
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_config": {**_QWEN["vision_config"], "window_size": 16, "fullatt_block_indexes": [0]},
        **{key: value for key, value in _QWEN.items() if key != "vision_config"},
    },
}
TOKENS = torch.arange(3, 83).view(2, 40)


def whole_model(family: str, folder: Path, **more: Any) -> Any:
    """A tiny random checkpoint with all parts; it is saved in the folder."""
    torch.manual_seed(0)
    values = WHOLE[family] | more
    config = transformers.CONFIG_MAPPING[family](**{**values, "text_config": TEXT | values["text_config"]})
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def logits_of(whole: Any) -> torch.Tensor:
    # transformers 5.24 cannot run its class for all of Llama 4; its language model computes the logits of text.
    return compute_reference_logits(whole.language_model if whole.config.model_type == "llama4" else whole, TOKENS)


def built(folder: Path, **model: Any) -> Build:
    settings = json.dumps({"path": str(folder), **model})
    recipe = parse(f"model: {settings}\nstop: {{max_steps: 1}}\nbatch: {{seq_len: 40, size: 2}}")
    return build(recipe, vocabulary=None, device=probe("cpu"))


def part_of(family: str) -> dict[str, str]:
    return {"part": "text"} if family in ("qwen3_vl", "qwen2_5_vl") else {}


@pytest.mark.parametrize("family", ["gemma3n", "gemma4_unified", "llama4"])
def test_a_vision_part_that_is_not_trained_is_refused(family: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=rf"does not train {family} with images; set model.part: text") as caught:
        built(tmp_path, part="whole")
    assert "\n" not in str(caught.value)


def test_a_text_model_has_no_whole(tmp_path: Path) -> None:
    transformers.LlamaConfig(**TEXT).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"part: whole: llama is a text model already and has no parts"):
        built(tmp_path, part="whole", weights="random")
    with pytest.raises(RecipeError, match=r"built-in configuration of gemma-3-4b is of its text part alone"):
        configs.source_config(parse("model: {preset: gemma-3-4b, part: whole}\nstop: {max_steps: 1}"))


@pytest.mark.parametrize("family", list(WHOLE))
def test_the_text_part_computes_the_logits_of_the_whole(family: str, tmp_path: Path) -> None:
    whole = whole_model(family, tmp_path)
    result = built(tmp_path, **part_of(family))
    assert not any("vis" in name for name, _ in result.trained[0].named_parameters())
    torch.testing.assert_close(compute_reference_logits(result.trained[0], TOKENS), logits_of(whole))
    assert f"the text part of {family} alone" in result.changes["text_part"][0].what
    assert not result.weights.notes


@pytest.mark.parametrize("family", list(WHOLE))
def test_a_changed_text_part_is_written_back_in_its_layout(family: str, tmp_path: Path) -> None:
    whole_model(family, tmp_path / "in")
    result = built(tmp_path / "in", **part_of(family))
    model = result.trained[0]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    layout, note = find_published_layout(LoadedModel(result.recipe, result, None, None, ""))
    assert layout is not None, note
    (tmp_path / "out").mkdir()
    assert layout.write(model, tmp_path / "out", "float32") == ""
    reloaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(reloaded), compute_reference_logits(model, TOKENS))
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("in", "out"))
    assert before.keys() == after.keys()
    others = [key for key in before if name_in_text(key) is None]
    assert all(torch.equal(before[key], after[key]) for key in others)
    assert json.loads((tmp_path / "in/config.json").read_text()) == json.loads(
        (tmp_path / "out/config.json").read_text()
    )


def test_old_names_shards_and_an_untied_head_are_read_and_written(tmp_path: Path) -> None:
    whole = whole_model("mistral3", tmp_path / "in", tie_word_embeddings=False)
    whole.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    (tmp_path / "in/model.safetensors").unlink()
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    result = built(tmp_path / "in")
    model = result.trained[0]
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    torch.testing.assert_close(compute_reference_logits(model, TOKENS), compute_reference_logits(whole, TOKENS))
    layout, _ = find_published_layout(LoadedModel(result.recipe, result, None, None, ""))
    assert layout is not None
    (tmp_path / "out").mkdir()
    assert layout.write(model, tmp_path / "out", "float32") == ""
    reloaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(compute_reference_logits(reloaded, TOKENS), compute_reference_logits(whole, TOKENS))


def test_fused_experts_are_read_and_written_as_they_were_published(tmp_path: Path) -> None:
    whole = whole_model("qwen3_5_moe", tmp_path / "in")
    fused = {key: value.clone() for key, value in whole.state_dict().items()}
    assert fused["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    save_file(fused, tmp_path / "in/model.safetensors", {"format": "pt"})
    result = built(tmp_path / "in")
    torch.testing.assert_close(
        compute_reference_logits(result.trained[0], TOKENS), compute_reference_logits(whole, TOKENS)
    )
    layout, _ = find_published_layout(LoadedModel(result.recipe, result, None, None, ""))
    assert layout is not None
    (tmp_path / "out").mkdir()
    assert layout.write(result.trained[0], tmp_path / "out", "float32") == ""
    after = load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == fused.keys()
    assert all(torch.equal(after[key], fused[key]) for key in fused)


def test_gemma3n_is_read_without_the_packages_of_its_vision_part(tmp_path: Path) -> None:
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260, "num_kv_shared_layers": 0}
    more |= {"laurel_rank": 4, "altup_num_inputs": 2, "intermediate_size": [48, 48]}
    text = transformers.Gemma3nTextConfig(**TEXT | _SLIDING | more | {"activation_sparsity_pattern": [0.0, 0.0]})
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(text).eval()
    tensors = {
        key.replace("model.", "model.language_model."): value.clone()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"
    }
    save_file({**tensors, "model.vision_tower.x": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    whole = transformers.Gemma3nConfig(text_config=text.to_dict())
    whole.save_pretrained(tmp_path)
    result = built(tmp_path)
    torch.testing.assert_close(
        compute_reference_logits(result.trained[0], TOKENS), compute_reference_logits(model, TOKENS)
    )


def test_bad_wrappers_are_refused_in_one_line(tmp_path: Path) -> None:
    whole_model("gemma3", tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def message(values: dict[str, Any], **model: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(RecipeError) as caught:
            built(tmp_path, **model)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has no text_config" in message({key: v for key, v in good.items() if key != "text_config"})
    wider = {**good, "text_config": {**good["text_config"], "intermediate_size": 64}}
    assert "mlp" in message(wider)
    deeper = {
        **good["text_config"],
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    assert "lacks model.layers.2." in message({**good, "text_config": deeper})
    plain = {**TEXT, "model_type": "llama"}
    assert "model.part: text: llama is a text model already" in message(plain, part="text")


def test_token_ids_of_the_wrapper_are_those_of_the_text_part(tmp_path: Path) -> None:
    whole_model("gemma3", tmp_path, eos_token_id=[2, 7])
    config = configs.of(parse(f"model: {{path: {tmp_path}}}\nstop: {{max_steps: 1}}"), None)
    assert (config.model_type, config.eos_token_id, config.tie_word_embeddings) == ("gemma3_text", [2, 7], True)
