"""Mistral 7B and Nemo, Mixtral, StableLM alpha, GPT-2, Pythia, BLOOM, DeepSeek V2 and V3 (V3 without its multi-token
prediction module).

Sources: arXiv:2310.06825, arXiv:2401.04088 (Mixtral), arXiv:2304.01373 (Pythia), arXiv:2211.05100 (BLOOM),
arXiv:2405.04434 and arXiv:2412.19437 (DeepSeek); litgpt's config.py (StableLM, Mistral v0.2, Pythia 14M and 31M).
DeepSeek V2 cannot be trained (`NOT_TRAINED` says why): only its weights and KV cache can be planned.
GPT-2's dropout is left out: its 0.1 is for many epochs over little text, and fused attention has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.presets.preset import APACHE, MIT, OWN, Licence, Preset, sizes

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.models.presets.preset import ConfigValue


__all__ = ["MODELS"]

_BIG = Licence("BigScience RAIL License")
_DEEPSEEK = Licence("DeepSeek Model License")


def _mistral(release: str, parameters: int, **more: ConfigValue) -> Preset:
    hub = "mistralai/Mistral-7B-"
    config = {
        "model_type": "mistral",
        **sizes(4096, 14336, 32, 32, 8),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    return Preset(f"{hub}{release}", f"{hub}Instruct-{release}", parameters, "mistral", APACHE, config)


def _mixtral(size: str, parameters: int, active: int, balance: float, positions: int, *shape: int) -> Preset:
    hub = f"mistralai/Mixtral-{size}-"
    config = {
        "model_type": "mixtral",
        "vocab_size": 32000,
        **sizes(*shape),
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": balance,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Preset(f"{hub}v0.1", f"{hub}Instruct-v0.1", parameters, "mistral", APACHE, config, active=active)


def _gpt2(name: str, parameters: int, width: int, layers: int, heads: int) -> Preset:
    hub = f"openai-community/{name}"
    config = {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 1024,
        # Explicit zeros, since 0.1 is the default of transformers' class.
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    }
    return Preset(hub, hub, parameters, "none", MIT, config)


def _pythia(
    size: str, parameters: int, width: int, layers: int, heads: int, vocabulary: int = 50304, positions: int = 2048
) -> Preset:
    config = _neox(width, layers, heads, vocabulary, positions)
    return Preset(f"EleutherAI/pythia-{size}", f"EleutherAI/pythia-{size}", parameters, "none", APACHE, config)


def _neox(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> JsonObject:
    return {
        "model_type": "gpt_neox",
        "vocab_size": vocabulary,
        **sizes(width, 4 * width, layers, heads),
        "max_position_embeddings": positions,
        # GPT-NeoX rotates a quarter of each head, and adds attention and feed-forward block in parallel.
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _bloom(hub: str, parameters: int, width: int, layers: int, heads: int) -> Preset:
    config = {
        "model_type": "bloom",
        "vocab_size": 250880,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return Preset(f"bigscience/{hub}", f"bigscience/{hub.replace('bloom', 'bloomz')}", parameters, "none", _BIG, config)


def _deepseek(
    hub: str, chat: str, parameters: int, active: int, *shape: int, kind: str = "deepseek_v2", **more: ConfigValue
) -> Preset:
    config = {
        "model_type": kind,
        **sizes(*shape),
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        # Keys and values come from 512 latent dimensions; 128 dimensions of a head are not rotated, and 64 are.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        **more,
    }
    licence = _DEEPSEEK if kind == "deepseek_v2" else MIT
    return Preset(f"deepseek-ai/{hub}", f"deepseek-ai/{chat}", parameters, OWN, licence, config, active=active)


def _experts(count: int, chosen: int, shared: int, width: int, dense: int) -> JsonObject:
    """`dense`: number of first layers without experts."""
    chosen_of = {"n_routed_experts": count, "num_experts_per_tok": chosen, "n_shared_experts": shared}
    return {**chosen_of, "moe_intermediate_size": width, "first_k_dense_replace": dense}


_V2: JsonObject = {"vocab_size": 102400, "rope_theta": 10000.0}
_LITE, _WHOLE, _V3 = _experts(64, 6, 2, 1408, 1), _experts(160, 6, 2, 1536, 1), _experts(256, 8, 1, 2048, 3)

_V02 = _mistral("v0.2", 0, vocab_size=32000, rope_theta=1000000.0, sliding_window=None).config
_NEMO: JsonObject = {
    **_V02,
    "vocab_size": 131072,
    **sizes(5120, 14336, 40, 32, 8),
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
_CC = Licence("CC BY-SA 4.0")

MODELS = {
    "mistral-7b-v0.1": _mistral("v0.1", 7_241_732_096, vocab_size=32000, rope_theta=10000.0, sliding_window=4096),
    "mistral-7b-v0.2": Preset(
        *("mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-Instruct-v0.2", 7_241_732_096, "mistral"),
        *(APACHE, _V02),
    ),
    "mistral-7b-v0.3": _mistral("v0.3", 7_248_023_552, vocab_size=32768, rope_theta=1000000.0, sliding_window=None),
    "mistral-nemo": Preset(
        *("mistralai/Mistral-Nemo-Base-2407", "mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400, OWN, APACHE),
        _NEMO,
        unconfirmed=("rope_theta", "sliding_window"),
    ),
    "stablelm-base-alpha-3b": Preset(
        *("stabilityai/stablelm-base-alpha-3b", "stabilityai/stablelm-tuned-alpha-3b", 3_637_321_728, "none"),
        _CC,
        _neox(4096, 16, 32, 50688, 4096),
    ),
    "mixtral-8x7b": _mixtral("8x7B", 46_702_792_704, 12_879_925_248, 0.02, 32768, 4096, 14336, 32, 32, 8),
    "mixtral-8x22b": _mixtral("8x22B", 140_620_634_112, 39_152_031_744, 0.001, 65536, 6144, 16384, 56, 48, 8),
    "gpt2": _gpt2("gpt2", 124_439_808, 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 354_823_168, 1024, 24, 16),
    "gpt2-large": _gpt2("gpt2-large", 774_030_080, 1280, 36, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 1_557_611_200, 1600, 48, 25),
    "pythia-14m": _pythia("14m", 14_067_712, 128, 6, 4, positions=512),
    "pythia-31m": _pythia("31m", 30_494_720, 256, 6, 8, positions=1024),
    "pythia-70m": _pythia("70m", 70_426_624, 512, 6, 8),
    "pythia-160m": _pythia("160m", 162_322_944, 768, 12, 12),
    "pythia-410m": _pythia("410m", 405_334_016, 1024, 24, 16),
    "pythia-1b": _pythia("1b", 1_011_781_632, 2048, 16, 8),
    "pythia-1.4b": _pythia("1.4b", 1_414_647_808, 2048, 24, 16),
    "pythia-2.8b": _pythia("2.8b", 2_775_208_960, 2560, 32, 32),
    "pythia-6.9b": _pythia("6.9b", 6_857_302_016, 4096, 32, 32, 50432),
    "pythia-12b": _pythia("12b", 11_846_072_320, 5120, 36, 40, 50688),
    "bloom-560m": _bloom("bloom-560m", 559_214_592, 1024, 24, 16),
    "bloom-1b1": _bloom("bloom-1b1", 1_065_314_304, 1536, 24, 16),
    "bloom-1b7": _bloom("bloom-1b7", 1_722_408_960, 2048, 24, 16),
    "bloom-3b": _bloom("bloom-3b", 3_002_557_440, 2560, 30, 32),
    "bloom-7b1": _bloom("bloom-7b1", 7_069_016_064, 4096, 30, 32),
    "bloom-176b": _bloom("bloom", 176_247_271_424, 14336, 70, 112),
    "deepseek-v2-lite": _deepseek(
        "DeepSeek-V2-Lite",
        "DeepSeek-V2-Lite-Chat",
        15_706_484_224,
        2_661_150_208,
        2048,
        10944,
        27,
        16,
        16,
        q_lora_rank=None,
        **_V2,
        **_LITE,
    ),
    "deepseek-v2": _deepseek(
        "DeepSeek-V2",
        "DeepSeek-V2-Chat",
        235_741_434_880,
        21_375_800_320,
        5120,
        12288,
        60,
        128,
        128,
        q_lora_rank=1536,
        **_V2,
        **_WHOLE,
    ),
    "deepseek-v3": _deepseek(
        "DeepSeek-V3-Base",
        "DeepSeek-V3",
        671_026_404_352,
        37_552_282_624,
        *(7168, 18432, 61, 128, 128),
        kind="deepseek_v3",
        vocab_size=129280,
        q_lora_rank=1536,
        n_group=8,
        topk_group=4,
        **_V3,
    ),
}
