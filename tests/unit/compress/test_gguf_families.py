"""Each family that becomes GGUF: its tensors read back, and llama.cpp's probabilities, tokens and K-quants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from preheat.compress.export import gguf, gguf_families, gguf_kquants, gguf_layout, gguf_tokenizer, llama_cpp
from preheat.data.tokenizer import train_tokenizer
from preheat.errors import RunError
from preheat.models.hf import compute_reference_logits

from ...architectures.tiny import tiny_config

with_llama_cpp = pytest.mark.skipif(not llama_cpp.is_installed(), reason="needs xllamacpp")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DELTA_NET = {"head_dim": 32, "rope_parameters": PARTIAL}
LONG = {"long_factor": [2.0, 2.2, 2.4, 2.6], "short_factor": [1.0, 1.1, 1.2, 1.3]}
ATTENTION = {"layer_types": ["attention", "attention"], "position_embedding_type": "rope"}
WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> family and the values of its configuration
    "mixtral": ("mixtral", {}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "rope_parameters": YARN}),
    "qwen3_next": ("qwen3_next", DELTA_NET),
    "qwen3_5": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_NET),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "layer_types": WINDOWS, "query_pre_attn_scalar": 8}),
    "gemma4": ("gemma4_text", {"vocab_size_per_layer_input": 304}),
    "gemma4-experts": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": True}}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.0}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": {**YARN, **MSCALE}}),
    "deepseek_v3-q": ("deepseek_v3", {"q_lora_rank": None, "norm_topk_prob": False}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"rope_parameters": PARTIAL}),
    "phi3-longrope": (
        "phi3",
        {
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 256,
                **LONG,
            },
        },
    ),
    "olmo2": ("olmo2", {"rope_parameters": YARN}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "layer_types": WINDOWS[-4:]}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.0}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite4-hybrid": ("granitemoehybrid", {}),
    "granite4-dense": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "granite4-attention": ("granitemoehybrid", {**ATTENTION, "num_local_experts": 0}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"], "time_step_min": 1e-30}),
    "nemotron_h-experts": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "moe"], "time_step_min": 1e-30}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
}
GELU = {"gemma3", "gemma4", "gemma4-experts", "phi"}  # llama.cpp computes it from a table in fp16


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "wizards", "at", "night"]
    texts = [(f"{n:032x}", " ".join(words[(n * k) % len(words)] for k in range(1, 90))) for n in range(40)]
    return train_tokenizer(texts, vocabulary=300)


def create_model(family: str, **values: Any) -> Any:
    """A tiny model whose weights are large enough that a wrong one shows."""
    ends = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 0}
    config = tiny_config(family, **{"vocab_size": 304, "max_position_embeddings": 128, **ends, **values})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, value in sorted(model.state_dict().items()):
            if value.ndim == 1:  # norms, biases, sinks and decay rates
                value.add_(torch.randn(value.shape, generator=generator) * 0.2)
            else:
                value.mul_(4)
    return model


def write_folder(out: Path, tokenizer: Any, family: str, **values: Any) -> Path:
    create_model(family, **values).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_found_again_in_the_tensors(case: str) -> None:
    family, values = CASES[case]
    model = create_model(family, **values)
    place = gguf_families.find_family(model.config)
    architecture, rules = place.architecture(model.config), place.rules(model.config)
    tensors = list(gguf_layout.iterate_tensors(model, architecture, rules))
    assert len({title for title, _ in tensors}) == len(tensors)
    joined = gguf_layout.join_tensors(model, architecture, rules, dict(tensors))
    for name, value in model.state_dict().items():
        if name in joined:  # a tied head is not in the file
            torch.testing.assert_close(joined[name], value, rtol=1e-6, atol=1e-6, msg=name)
    shapes = gguf_layout.iterate_tensors(model, architecture, rules, shapes=True)
    assert [(title, value.shape) for title, value in shapes] == [(title, value.shape) for title, value in tensors]


def test_orders_of_rows() -> None:
    rows = torch.arange(8)[:, None]
    (pairs,) = gguf_layout.build_interleaving(2).split(rows)
    assert pairs[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    # Two key heads of two value heads of one row each, after two rows of q and k.
    (tiled,) = gguf_layout.build_tiling(2, 2, 1, start=2).split(rows[:6])
    assert tiled[:, 0].tolist() == [0, 1, 2, 4, 3, 5]


def test_pairs_of_qwen35_have_axes() -> None:
    # Of published models: head size 256, a quarter rotated, mrope_section [11, 11, 10].
    keys = gguf_families.build_keys(tiny_config("qwen3_5_text", head_dim=256))
    assert keys["rope.dimension_sections"] == [11, 11, 10, 0]
    assert keys["rope.dimension_count"] == 64


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@with_llama_cpp
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_gives_the_same_probabilities_and_tokens(case: str, tokenizer: Any, tmp_path: Path) -> None:
    family, values = CASES[case]
    source = write_folder(tmp_path / "model", tokenizer, family, **values)
    made = gguf.write(source, tmp_path / "out", dtype="f32")
    assert made.llama_cpp is not None
    assert made.llama_cpp.max_logprob_difference < (0.03 if case in GELU else 2e-5)
    assert made.llama_cpp.mean_logprob_difference < (2e-3 if case in GELU else 2e-6)
    assert made.max_logit_difference < 1e-5 * made.largest_logit
    # A bias of the family's own routers is saved, and was not added by training.
    assert "balanced its experts" not in made.note
    # Greedy tokens: each is llama.cpp's likeliest after those before it.
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    prompt = tokenizer.encode("the quick brown fox")
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(compute_reference_logits(model, torch.tensor([ids]))[0, -1].argmax()))
    request = {"context": 64, "threads": 1, "letter": tokenizer.encode("a")[-1], "top": 1, "texts": []}
    prompts = [ids[:n] for n in range(len(prompt), len(ids))]
    answer = llama_cpp._run(tmp_path / "out" / made.file, {**request, "prompts": prompts})
    assert [logprobs[0][0] for logprobs in answer["logprobs"]] == ids[len(prompt) :]


@with_llama_cpp
@pytest.mark.parametrize("case", ["mixtral", "qwen3_next", "qwen3_5_moe", "gpt_oss", "nemotron_h-experts", "lfm2"])
def test_an_f16_file_generates_the_text_of_the_fp16_folder(case: str, tokenizer: Any, tmp_path: Path) -> None:
    family, values = CASES[case]
    # Weights in fp16, so that the file has them exactly; else rounding may send a token to other experts.
    create_model(family, **values).half().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made = gguf.write(tmp_path / "model", tmp_path / "out", dtype="f16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float16)
    prompt = tokenizer.encode("the quick brown fox")
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(compute_reference_logits(model, torch.tensor([ids]))[0, -1].argmax()))
    request = {"context": 64, "threads": 1, "letter": tokenizer.encode("a")[-1], "top": 1, "texts": []}
    prompts = [ids[:n] for n in range(len(prompt), len(ids))]
    answer = llama_cpp._run(tmp_path / "out" / made.file, {**request, "prompts": prompts})
    assert [logprobs[0][0] for logprobs in answer["logprobs"]] == ids[len(prompt) :]


@with_llama_cpp
def test_a_wrong_key_is_refused(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_folder(tmp_path / "model", tokenizer, "granite", attention_multiplier=1.0)
    build = gguf_families.build_keys
    monkeypatch.setattr(gguf_families, "build_keys", lambda config: build(config) | {"residual_scale": 1.5})
    with pytest.raises(RunError, match=r"run by llama\.cpp: its logits differ"):
        gguf.write(source, tmp_path / "out", dtype="f32")
    monkeypatch.setattr(
        gguf_families, "build_keys", lambda config: {k: v for k, v in build(config).items() if k != "embedding_length"}
    )
    with pytest.raises(RunError, match=r"llama.cpp does not run it \(.*key not found in model: granite.embedding_len"):
        gguf.write(source, tmp_path / "out", dtype="f32")
    assert not (tmp_path / "out").exists()


# --- tokenizers -------------------------------------------------------------------------------------------------------

TEXT = [
    "In 1812 the army's 600,000 men crossed the river; 'we'll see', he'd said.\n\n  Then it snowed, and 3.5 weeks later…",
    "def f(x):\n    return x ** 2  # naïve café ÜBER Łódź 東京 12345",
]


def split_by(*steps: Any, ignore_merges: bool = False) -> Any:
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(list(steps)), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    backend.train_from_iterator(TEXT * 20, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


def split_by_patterns(patterns: tuple[str, ...], *, ignore_merges: bool = False) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return split_by(*steps, level, ignore_merges=ignore_merges)


def train_gemma() -> Any:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    # As in Gemma's vocabulary, no token joins a line break with other characters.
    backend.train_from_iterator([line for text in TEXT * 20 for line in text.splitlines()], trainer)
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.mark.parametrize(
    ("patterns", "ignores"), [key for key in gguf_tokenizer._PRE_TOKENIZERS if key[0] != ("gpt-2",)]
)
@with_llama_cpp
def test_llama_cpp_splits_text_alike(patterns: tuple[str, ...], ignores: bool, tmp_path: Path) -> None:
    if patterns[-1] == "gpt-2":
        own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer = split_by(pre_tokenizers.Digits(individual_digits=True), own)
    else:
        tokenizer = split_by_patterns(patterns, ignore_merges=ignores)
    sizes = {"vocab_size": len(tokenizer) + 2, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    source = write_folder(tmp_path / "model", tokenizer, "llama", **sizes)
    assert gguf.write(source, tmp_path / "out", dtype="f32").llama_cpp is not None


def test_a_wrong_name_of_the_splitting_is_noticed_without_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name: patterns for (patterns, _), name in gguf_tokenizer._PRE_TOKENIZERS.items()}
    # Of the names that transformers does not know; smollm splits numbers into digits.
    tokenizer = split_by_patterns(names["deepseek-v3"])
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    source = write_folder(tmp_path / "model", tokenizer, "llama", **sizes)
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    assert "llama.cpp did not run the file" in gguf.write(source, tmp_path / "right", dtype="f32").note
    monkeypatch.setattr(gguf_tokenizer, "_find_rule", lambda serialized: "smollm")
    with pytest.raises(RunError, match=r"the file's tokenizer splits .* differently"):
        gguf.write(source, tmp_path / "wrong", dtype="f32")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
@with_llama_cpp
def test_llama_cpp_joins_characters_as_gemma(family: str, tmp_path: Path) -> None:
    tokenizer = train_gemma()
    rows = len(tokenizer)
    name, values = CASES[family]
    if family == "gemma4":
        values = {**values, "vocab_size_per_layer_input": rows}
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    source = write_folder(tmp_path / "model", tokenizer, name, **values, vocab_size=rows, **ids)
    made = gguf.write(source, tmp_path / "out", dtype="f32")
    assert ("llama.cpp puts the BOS token before a text" in made.note) == (family == "gemma4")


def test_other_ways_to_split_are_refused() -> None:
    tokenizer = split_by(pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False))
    writer = gguf_package.GGUFWriter(None, "llama")
    with pytest.raises(RunError, match=r"splits text into words \(Punctuation, ByteLevel\) is none of deepseek-v3, "):
        gguf_tokenizer.add_vocabulary(writer, tokenizer, len(tokenizer), [0])


# --- K-quants ---------------------------------------------------------------------------------------------------------


def test_types_of_k_quants() -> None:
    layers = range(32)
    titles = ["output.weight", *(f"blk.{n}.{part}.weight" for n in layers for part in ("attn_q", "attn_v", "ffn_down"))]
    choose = gguf_kquants.TypeChoice("q4_k_m", titles, 32, 0)
    kinds = {title: choose(title, 512) for title in titles}
    # The first and last four layers, and each third of the 24 between them.
    more = [n for n in layers if kinds[f"blk.{n}.ffn_down.weight"] == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [n for n in layers if kinds[f"blk.{n}.attn_v.weight"] == "Q6_K"] == more
    assert {kinds[f"blk.{n}.attn_q.weight"] for n in layers} == {"Q4_K"}
    assert kinds["output.weight"] == "Q6_K"
    assert gguf_kquants.TypeChoice("q6_k", titles, 32, 0)("token_embd.weight", 512) == "Q6_K"
    assert gguf_kquants.TypeChoice("q5_k_m", titles, 32, 8)("blk.1.attn_v.weight", 512) == "Q8_0", "Mixtral"
    assert [choose("blk.1.attn_q.weight", width) for width in (256, 96, 40)] == ["Q4_K", "Q8_0", "F16"]


@pytest.mark.skipif(gguf_kquants.load_quantizer() is None, reason="needs xllamacpp")
@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4), ("Q5_K", 5), ("Q6_K", 6)])
def test_blocks_of_k_quants_are_as_fine_as_their_bits(kind: str, bits: int) -> None:
    values = torch.randn(3, 4, 512, generator=torch.Generator().manual_seed(0)).numpy()
    blocks = gguf_kquants.encode(values, kind)
    number = gguf_package.GGMLQuantizationType[kind]
    again = torch.from_numpy(gguf_package.quants.dequantize(blocks, number)).reshape(3, 4, 512)
    error = float((again - torch.from_numpy(values)).norm() / torch.from_numpy(values).norm())
    # Uniform rounding of normal values in 2^bits steps over about 2 * 2.2 standard deviations.
    assert error == pytest.approx(4.4 / 2**bits / 12**0.5, rel=0.35)


@pytest.mark.skipif(gguf_kquants.load_quantizer() is None, reason="needs xllamacpp")
def test_a_file_of_k_quants_runs(tokenizer: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    source = write_folder(tmp_path / "model", tokenizer, "llama", **sizes)
    made = gguf.write(source, tmp_path / "out", dtype="q5_k_m")
    # Seven matrices of each of two layers, embedding and head; more bits in both projections of the last layer.
    assert made.types == {"Q5_K": 13, "Q6_K": 3, "F32": 5}
    assert made.llama_cpp is not None
    full = gguf.write(source, tmp_path / "full", dtype="f32")
    assert made.bytes < 0.2 * full.bytes


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "values", "reason"),
    [
        ("gemma3_text", {**CASES["gemma3"][1], "layer_types": WINDOWS[::-1]}, "full attention in layers 6, 12, ..."),
        (
            "gemma3_text",
            {**CASES["gemma3"][1], "query_pre_attn_scalar": 12},
            "scales gemma3's scores by its head size 8",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, r"normalizes the experts' weights \(norm_topk_prob: False\)"),
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}, "experts in every layer"),
        ("qwen3_next", {"linear_value_head_dim": 16}, "keys and values of one head size, and this model 8 and 16"),
        ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit 7, and this model \(1.702, 5.0\)"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "full attention in layers 2, 4, ..."),
        ("smollm3", {"no_rope_layers": [1, 0]}, "rotates all layers but 4, 8, ..."),
        ("nemotron_h", {}, "no mixture of .* layers"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 2}, r"does not \(position_embedding_type\)"),
        ("phi", {"qk_layernorm": True}, "no norms of queries and keys"),
        ("lfm2_moe", {"use_expert_bias": False}, "needs a bias on the choice of experts"),
        ("olmo2", {"rope_parameters": {**YARN, "attention_factor": 1.3}}, "yarn with an attention factor of its own"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "scaling dynamic is",
        ),
    ],
)
def test_models_that_llama_cpp_computes_differently_are_refused(
    family: str, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunError, match=rf"^--to gguf: .*{reason}.*; use --to hf$") as caught:
        gguf_families.require_supported(tiny_config(family, **values))
    assert "\n" not in str(caught.value)
