"""Model folders are read as transformers reads them: which files, which names; what is left over is named, what is missing or not finite refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from preheat import remote_code
from preheat.core import Build, MaskSpec
from preheat.engine.builder import build
from preheat.errors import PreheatError, RecipeError
from preheat.model_folder import check_finite
from preheat.models import hf
from preheat.ops.attention.sdpa import reference_attention
from preheat.recipe import parse

from ...architectures.tiny import create_model, tiny_config
from ...conftest import DEVICE, difference

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def opened(path: Path, **model: Any) -> Build:
    return build(
        parse(f"model: {json.dumps({'path': str(path), **model})}\nstop: {{max_steps: 1}}\nbatch: {{seq_len: 16}}"),
        vocabulary=96,
        device=DEVICE,
    )


def logits_of(made: Build, tokens: torch.Tensor) -> torch.Tensor:
    model: Any = made.trained[0].eval()
    places = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
    with torch.no_grad():
        return hf.compute_logits(model, hf.hidden_states(model, tokens, places, MaskSpec(), reference_attention))


def saved(model: Any, path: Path, **how: Any) -> Path:
    model.save_pretrained(path, **how)
    return path


def small(path: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    return saved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | settings)), path)


def changed(path: Path, change: Callable[[dict[str, Any]], Any], name: str = "model.safetensors") -> Path:
    weights = load_file(path / "model.safetensors")
    save_file(change(weights) or weights, path / name, metadata={"format": "pt"})
    return path


def configured(path: Path, **settings: Any) -> Path:
    file = path / "config.json"
    file.write_text(
        json.dumps({k: v for k, v in (json.loads(file.read_text()) | settings).items() if v != "leave out"})
    )
    return path


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TINY)), "embed_out.weight"),
        (lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, **EXPERTS, num_local_experts=4)), "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        (lambda: transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**TINY, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0, router_aux_loss_coef=0.0)), "model.layers.1.mlp.experts.3.up_proj.weight"),
        (lambda: transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**TINY, **EXPERTS, num_experts=4)), "model.layers.0.mlp.experts.0.gate_proj.weight"),
        (lambda: transformers.GPT2Model(transformers.GPT2Config(**GPT2)), "h.0.attn.c_attn.weight"),  # without the head's prefix
    ],
    ids=["gpt_neox", "mixtral", "ernie4_5_moe", "olmoe", "gpt2 without its head"],
)  # fmt: skip
def test_weights_under_other_names_give_the_logits_of_transformers(
    make: Callable[[], Any], named: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    path = saved(make(), tmp_path / "m")
    assert named in load_file(path / "model.safetensors")
    tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = plain(input_ids=tokens, use_cache=False).logits
    made = opened(path)
    assert torch.allclose(logits_of(made, tokens), wanted, atol=1e-5 * float(wanted.abs().max()))
    assert made.weights.notes == []


def test_only_the_files_that_transformers_reads_are_read(tmp_path: Path) -> None:
    path = small(tmp_path / "m")
    right = load_file(path / "model.safetensors")["model.norm.weight"]

    def doubled(weights: dict[str, Any]) -> dict[str, Any]:
        return {key: 2 * value for key, value in weights.items()}

    changed(path, doubled, "old_model.safetensors")
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "old_model.safetensors"}})
    )
    made = opened(path)
    assert torch.equal(made.trained[0].model.norm.weight.detach(), right)  # type: ignore[union-attr]
    assert made.weights.notes == [f"{path}: old_model.safetensors not read; transformers reads model.safetensors"]
    configured(path, transformers_weights="old_model.safetensors")
    assert torch.equal(opened(path).trained[0].model.norm.weight.detach(), 2 * right)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: (m / "model.safetensors").rename(m / "model.fp16.safetensors"), r"only model.fp16.safetensors, which transformers reads as a variant; rename it"),
        (lambda m: (m / "model.safetensors").rename(m / "weights.safetensors"), r"has neither model.safetensors nor model.safetensors.index.json.* but weights.safetensors"),
        (lambda m: (m / "model.safetensors").rename(m / "shard-00000-model-00001-of-00001.safetensors"), r"a distributed checkpoint"),
        (lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"), r"pytorch_model.bin is a pickle, which preheat does not open"),
        (lambda m: index(m, {"a": "../other.safetensors"}), r"names '../other.safetensors', which is outside the folder"),
        (lambda m: index(m, {"a": 5}), r"names 5, which is not a file name"),
        (lambda m: index(m, {str(n): f"model-{n}.safetensors" for n in range(5)}), r"names model-0.safetensors, model-1.safetensors, model-2.safetensors and 2 more, not in the folder"),
        (lambda m: index(m, []), r"has no weight_map"),
        (lambda m: configured(m, transformers_weights="/etc/model.safetensors"), r"is outside the folder"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\x08"), r"not a complete safetensors file"),
        (lambda m: changed(m, lambda w: {k: v for k, v in w.items() if "norm" not in k}), r"lacks model.layers.0.input_layernorm.weight, .* and 2 more \(5 of the model's parameters\)"),
        (lambda m: changed(m, lambda w: w | {"model.norm.weight": torch.ones(31)}), r"model.norm.weight is \(31,\) in model.safetensors but \(32,\) by config.json"),
        (lambda m: changed(m, lambda w: w | {"model.norm.weight": torch.full((32,), float("nan"))}), r"model.norm.weight holds 32 values that are not finite"),
        (lambda m: changed(m, lambda w: w | {"lm_head.weight": (w["lm_head.weight"] / 0).half()}), r"lm_head.weight holds .* not finite"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_read_whole_is_refused(
    change: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    path = small(tmp_path / "m")
    change(path)
    with pytest.raises(RecipeError, match=words) as found:
        opened(path)
    assert len(str(found.value)) < 600
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_head_that_differs_from_the_embedding_is_read_though_the_configuration_ties_them(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(**TINY) if family == "llama" else transformers.GPT2Config(**GPT2)
    config.tie_word_embeddings = False
    path = saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "m")
    configured(path, tie_word_embeddings=True)
    tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = plain(input_ids=tokens, use_cache=False).logits
    made = opened(path)
    assert difference({"logits": logits_of(made, tokens)}, {"logits": wanted}) < 1e-6
    assert not hf.read_facts(made.trained[0].config).tied  # type: ignore[arg-type]  # so plans count both
    assert caplog.text.count("which its config.json ties; both are read") == 1
    same = changed(path, lambda w: w | {"lm_head.weight": w[next(k for k in w if k.endswith(("embed_tokens.weight", "wte.weight")))].clone()})  # fmt: skip
    assert hf.read_facts(opened(same).trained[0].config).tied  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"other values of lm_head.weight than of"):
        opened(
            changed(same, lambda w: w | {"lm_head.weight": 2 * w["lm_head.weight"]}),
            config={"tie_word_embeddings": True},
        )


def index(path: Path, places: Any) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_what_the_model_does_not_have_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = changed(small(tmp_path / "m"), lambda w: w | {f"model.layers.{n}.self_attn.q_proj.bias": torch.ones(32) for n in (0, 1)} | {"model.rotary_emb.inv_freq": torch.ones(4)})  # fmt: skip
    configured(path, num_hidden_layers=1)
    (note,) = opened(path).weights.notes
    assert "model.layers.0.self_attn.q_proj.bias, model.layers.1.input_layernorm.weight" in note
    assert "and 8 more not used (11 tensors)" in note
    assert note in caplog.text  # which the command line shows
    tied = changed(small(tmp_path / "tied", tie_word_embeddings=True), lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()})  # fmt: skip
    assert opened(tied).weights.notes == []  # the same values twice are no fault
    headed = changed(tied, lambda w: {k: v for k, v in w.items() if "embed_tokens" not in k})
    assert opened(headed).weights.notes == []  # transformers ties from whichever is there


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float64"])
def test_values_of_any_dtype_are_looked_at(dtype: str) -> None:
    good = torch.tensor([0.5, 1.0, 2.0]).to(getattr(torch, dtype))
    assert check_finite(good, "a", Path("f"), "model.path") is good
    bad = good.float()
    bad[1] = float("nan")
    with pytest.raises(RecipeError, match="holds 1 values that are not finite"):
        check_finite(bad.to(getattr(torch, dtype)), "a", Path("f"), "model.path")
    huge = torch.tensor([3e38, -3e38])
    assert check_finite(huge, "a", Path("f"), "model.path") is huge


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "leave out"}, r"config.json has no model_type"),
        ({"model_type": ["llama"]}, r"has model_type \['llama'\]"),
        ({"hidden_size": None}, r"hidden_size: must be a whole number above 0, got None"),
        ({"num_attention_heads": "8"}, r"num_attention_heads: must be a whole number above 0, got '8'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers: 1000.* is more than any model has"),
        ({"intermediate_size": "wide"}, r"intermediate_size"),
        ({"hidden_act": "nope"}, r"nope"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}}, r"rope"),
        ({"rope_parameters": [1]}, r"config.json: "),
        ({"layer_types": ["full_attentoin"] * 2}, r"layer_types: 'full_attentoin' .* did you mean 'full_attention'"),
        ({"quantization_config": ["fp8"]}, r"quantization_config: must be an object, got \['fp8'\]"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": "x"}}, r"quantization_config: .*weight_block_size"),
        ({"no_rope_layers": [1, 0, 1]}, r"no_rope_layers: has 3 entries for 2 layers"),
        ({"layer_types": ["full_attention"]}, r"config.json: `num_hidden_layers` \(2\) must be equal to"),
    ],
)  # fmt: skip
def test_a_configuration_that_contradicts_itself_ends_in_one_line(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PreheatError, match=words) as found:
        opened(configured(small(tmp_path / "m"), **settings))
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("text", [b"", b"[1]", b"null", b"\xff\xfe", b'{"model_type": "lla', b'{"a":' * 9000])
def test_a_configuration_that_is_no_object_ends_in_one_line(text: bytes, tmp_path: Path) -> None:
    path = small(tmp_path / "m")
    (path / "config.json").write_bytes(text)
    with pytest.raises(RecipeError, match=r"config.json: (is not JSON|holds .*, not a JSON object)"):
        opened(path)


def test_dropout_of_published_configurations_is_off_and_said(tmp_path: Path) -> None:
    path = saved(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), tmp_path / "m")
    made = opened(path)
    (change,) = made.changes["dropout"]
    assert "attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1" in change.what
    assert not any(module.p for module in made.trained[0].modules() if isinstance(module, torch.nn.Dropout))
    again = opened(path, config={"resid_pdrop": 0.1})
    assert {module.p for module in again.trained[0].modules() if isinstance(module, torch.nn.Dropout)} == {0.0, 0.1}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("FalconForCausalLM", lambda: transformers.FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)),
        ("GPTNeoXJapaneseForCausalLM", lambda: transformers.GPTNeoXJapaneseConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)),
        ("OpenAIGPTLMHeadModel", lambda: transformers.OpenAIGPTConfig(**GPT2)),
    ],
)  # fmt: skip
def test_models_that_attend_by_themselves_are_refused(kind: str, config: Callable[[], Any]) -> None:
    with pytest.raises(RecipeError, match=rf"{kind} of transformers attends inside its own layers"):
        hf.build_on_meta(config())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, r"adapter_model.safetensors: .*lora_A.weight holds 64 values that are not finite"),
        ({"r": "eight"}, r"adapter: .*r|cannot be put into this model"),
        ({"base_model_name_or_path": 5}, r"base_model_name_or_path: must be text, got 5"),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks
def test_an_adapters_folder_is_read_as_carefully(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    import peft

    from preheat.ops.adapters.peft_io import put_in, read_folder

    path = small(tmp_path / "m")
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({key: value / 0 if "lora_A" in key else value for key, value in weights.items()}, file)
    stated = tmp_path / "a" / "adapter_config.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | settings))
    with pytest.raises(PreheatError, match=words) as found:
        put_in(opened(path).trained[0], read_folder(tmp_path / "a", "adapter"))
    assert "\n" not in str(found.value)


def test_code_runs_by_consent_alone(tmp_path: Path) -> None:
    path = configured(small(tmp_path / "m"), model_type="strange", auto_map={"AutoConfig": "configuration_strange.C", "AutoModelForCausalLM": "modeling_strange.M"})  # fmt: skip
    mark = tmp_path / "ran"
    text = (
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    )
    text += 'class C(LlamaConfig):\n    model_type = "strange"\nclass M(LlamaForCausalLM):\n    config_class = C\n'
    for name in ("configuration_strange", "modeling_strange"):
        (path / f"{name}.py").write_text(text)
    for asks in (False, True):
        with pytest.raises(RecipeError, match=r"model.path: .* wants to run its own code.*--trust-remote-code"):
            opened(path, trust_remote_code=asks)
    assert not mark.exists()
    with remote_code.trust_remote_code(True):
        opened(path)
    assert mark.exists()
    assert not remote_code.is_allowed()
    # Where transformers has a class, a folder's code is wanted by a recipe alone.
    mark.unlink()
    configured(path, model_type="llama")
    opened(path)
    with pytest.raises(RecipeError, match=r"wants to run its own code"):
        opened(path, trust_remote_code=True)
    assert not mark.exists()


def _in_fp8(name: str, value: Any) -> dict[str, Any]:
    if not name.endswith("proj.weight"):
        return {name: value}
    scale = value.abs().max() / 448  # one block: a side is at most 128
    return {name: (value / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}


def _in_mxfp4(name: str, value: Any) -> dict[str, Any]:
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: value}
    experts, inner, outer = value.shape
    draw = torch.Generator().manual_seed(inner)
    blocks = torch.randint(256, (experts, outer, inner // 32, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(116, 124, (experts, outer, inner // 32), generator=draw, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


@pytest.mark.parametrize(
    ("name", "stored", "kind"),
    [
        ("llama", _in_fp8, transformers.FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)),
        ("deepseek_v3", _in_fp8, transformers.FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)),
        ("gpt_oss", _in_mxfp4, transformers.Mxfp4Config(dequantize=True)),
    ],
)
@pytest.mark.parametrize("adapter", [False, True])
def test_published_weights_in_few_bits_are_read_dequantized(
    name: str, stored: Any, kind: Any, adapter: bool, tmp_path: Path
) -> None:
    """As gpt-oss and DeepSeek-V3 are published. An adapter on a 4-bit base reads the same values."""
    path = saved(create_model(tiny_config(name, intermediate_size=64)), tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    changed(path, lambda w: {k: v for key, value in w.items() for k, v in stored(key, value).items()})
    assert weights.keys() != load_file(path / "model.safetensors").keys()
    configured(path, quantization_config={k: v for k, v in kind.to_dict().items() if k != "dequantize"})
    tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=kind)
    loaded = opened(path)
    model: Any = loaded.trained[0]
    assert getattr(model.config, "quantization_config", None) is None  # nor is an export of it
    (note,) = loaded.weights.notes
    assert f"stored in {kind.quant_method.value}; its weights are dequantized" in note
    if adapter:  # packed weights have another dtype than the values that are read
        recipe = f"model: {{path: {path}}}\nstop: {{max_steps: 1}}\nbatch: {{seq_len: 16}}\ntechniques: {{lora: {{}}}}"
        model = build(parse(recipe), vocabulary=96, device=DEVICE).trained[0]
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=tokens, use_cache=False).logits
    assert difference({"": hf.compute_reference_logits(model, tokens)}, {"": wanted}) < 1e-5


def test_a_table_that_transformers_computes_is_not_read(tmp_path: Path) -> None:
    """Old files hold rotary tables, which transformers leaves unread: a recipe's rope scaling would be lost."""
    path = small(tmp_path / "m")
    changed(path, lambda weights: weights | {"model.rotary_emb.inv_freq": torch.full((4,), 7.0)})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq
    assert torch.equal(dict(opened(path).trained[0].named_buffers())["model.rotary_emb.inv_freq"], theirs)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
VALUES = (0, -1, float("nan"), "abc", [], {}, 2**70, True)
NUMBERS: list[dict[str, Any]] = [
    {"hidden_size": 0},
    {"num_attention_heads": 0},
    {"max_position_embeddings": 0},
    {"rms_norm_eps": 0},
    {"initializer_range": 0},
    {"rope_parameters": YARN | {"factor": 0}},
    {"rope_parameters": YARN | {"rope_theta": 0}},
    {"rope_parameters": YARN | {"beta_fast": 0}},
    {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
    {"model_type": "mistral", "sliding_window": 0},
    {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 0},
    {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 0},
]


@pytest.mark.parametrize("settings", NUMBERS, ids=str)
def test_no_number_of_a_configuration_ends_in_a_traceback(settings: dict[str, Any], tmp_path: Path) -> None:
    """The value 0 of its last key, and others, are refused in one line that names the key; transformers wants floats as 1.0."""
    stated = {"model_type": "llama", **TINY, **settings}
    key = list(settings)[-1]
    rope = isinstance(settings[key], dict)
    if rope:
        key = next(k for k, v in settings[key].items() if v == 0)
    for value in VALUES:
        wrong = stated | ({"rope_parameters": stated["rope_parameters"] | {key: value}} if rope else {key: value})
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(RecipeError, match=key) as caught:
            opened(tmp_path, weights="random")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("family", "nearest"),
    [
        *((name, "classification") for name in ("bert", "modernbert", "distilbert", "clip_text_model", "t5")),
        *((name, "compress") for name in ("vit", "siglip")),
    ],
)
def test_an_architecture_without_a_causal_language_model_is_refused_as_such(family: str, nearest: str) -> None:
    from transformers import AutoConfig

    from preheat.models import hf

    config = AutoConfig.for_model(family)
    config.is_encoder_decoder = False  # of T5 its encoder alone
    with pytest.raises(RecipeError, match=f"model: {family} of transformers has no causal language model.*{nearest}"):
        hf.build_on_meta(config)


def test_an_encoder_s_class_that_is_built_as_a_decoder_is_not_taken_for_an_encoder() -> None:
    from transformers import BertConfig

    from preheat.models import hf

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    with pytest.raises(RecipeError) as error:  # for another reason
        hf.build_on_meta(BertConfig(**sizes, is_decoder=True))
    assert "no causal language model" not in str(error.value)
