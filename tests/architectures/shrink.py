"""Tiny configurations of any causal architecture of transformers: sizes are shrunk by the names of their keys."""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .tiny import ARCHITECTURES, tiny_config

__all__ = ["CAUSAL", "NOT_TRIED", "shrunk"]

CAUSAL: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every model type with a causal language model in transformers."""
NOT_TRIED: dict[str, str] = {
    "gemma3": "trains as its text part, gemma3_text, whose parameters have other names; test_text_part compares them",
    "gemma4": "as gemma3",
    "gemma4_unified": "as gemma3",
    "gemma3n": "needs the package timm; gemma3n_text is tried",
    "cohere_compass_text": "its default configuration has no rotary parameters for its kinds of layers",
    "dbrx": "transformers' own class fails on its default configuration (no rope_theta)",
    "dots3_note": "sizes per layer depend on each other; another model with indexed attention is tried",
    "dots3_note_text": "sizes per layer depend on each other; another model with indexed attention is tried",
    "gemma4_assistant": "continues the hidden states of another model",
    "gemma4_unified_assistant": "continues the hidden states of another model",
    "musicgen": "an audio decoder under two other models",
    "musicgen_melody": "an audio decoder under two other models",
    "qwen4_exp": "its text part is tried: qwen4_exp_text",
    "xmod": "needs a language that is set by a method",
}
"""Model types that are not tried -> why."""
VOCABULARY = 320
_RULES: list[tuple[str, int]] = [
    (r"vocab_size(_per_layer_input)?|n_vocab", VOCABULARY),
    (r"pad_token_id", 0),
    (r"(bos|decoder_start)_token_id", 1),
    (r"eos_token_id|sep_token_id", 2),
    (r"num_hidden_layers|num_layers|n_layers?|(num_)?(encoder|decoder)_layers|depth|num_blocks", 2),
    (r"num_(key_value|kv|global_key_value|swa_key_value)_heads|n_kv_heads?|multi_query_group_num|num_kv_heads", 2),
    (r"(num_)?(encoder|decoder)?_?(attention_)?heads|num_attention_heads|n_heads?|num_heads|n_head", 4),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length|context_length", 64),
    (r"hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|embedding_size|dim|d_embed|embedding_dim", 32),
    (r"(dense_|ffn_|shared_|expert_|moe_|feed_forward_|shared_expert_)*intermediate_size(_mlp)?|ffn_dim|d_ff", 48),
    (r"(encoder|decoder)_ffn_dim|n_inner|ffn_hidden_size|moe_shared_expert_intermediate_size|d_inner", 48),
    (r"head_dim|global_head_dim|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|attention_head_dim|kv_channels", 8),
    (r"kv_lora_rank|q_lora_rank|lora_rank", 16),
    (r"n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts|num_moe_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_experts_per_token|experts_per_token|moe_top_k", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"sliding_window|window_size|local_attention_window|attention_window_size|attention_chunk_size", 6),
    (
        r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers|mamba_n_groups|n_groups|num_nextn_predict_layers",
        1,
    ),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_dt_rank|time_step_rank|mamba_d_conv_rank", 8),
    (r"linear_head_dim|linear_key_head_dim|linear_value_head_dim|index_head_dim|d_head|dim_head|n_mamba_heads", 8),
    (r"linear_num_heads|linear_num_value_heads|heads_per_ngram|index_topk|hc_lowrank", 4),
    (r"linear_num_key_heads|index_n_heads|zero_expert_num|num_expert_group", 2),
    (r"router_hidden_size|gated_norm_rank", 16),
    (r"lru_width|emb_dim|dim_ff|ple_embed_dim|(pronunciation|shape)_embed_dim|expert_ffn_hidden_size", 32),
    (r"(pronunciation|shape)_vocab_size|ngram_vocab_size_base", 96),
    (r"image_size|chunk_size|mamba_chunk_size|block_size", 16),
    (r"patch_size", 8),
]

_MORE: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 8},
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
}
"""Model type -> values that its configuration needs besides."""


def _small(key: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, type(None))):
        for pattern, size in _RULES:
            if re.fullmatch(pattern, key):
                # Absent stays absent; only token ids may be anything.
                return value if value is None or (value == 0 and not key.endswith("_id")) else size
        return value
    if isinstance(value, list) and key.endswith("_token_id"):
        return 2
    return value


def _shrink(values: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for key, value in values.items():
        if key == "per_layer_config" and isinstance(value, dict):
            small[key] = {1: _shrink(next(iter(value.values())))} if value else value
        elif isinstance(value, dict) and key.endswith("_config"):
            small[key] = _shrink(value)
        elif key in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            small[key] = (kinds * 2)[:2]
        elif isinstance(value, list) and len(value) == values.get("num_hidden_layers"):
            small[key] = value[:2]
        else:
            small[key] = _small(key, value)
    heads = small.get("num_attention_heads")
    groups = values.get("num_key_value_heads")
    if heads and groups and (small.get("kv_lora_rank") or groups == values["num_attention_heads"]):
        small["num_key_value_heads"] = heads
    return small


def shrunk(name: str) -> Any:
    """Returns the configuration of a tiny model of any causal architecture."""
    if name in ARCHITECTURES:
        config = tiny_config(name, vocab_size=VOCABULARY)
        if getattr(config, "vocab_size_per_layer_input", 0):
            config = tiny_config(name, vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY)
        return config
    kind = CONFIG_MAPPING[name]
    values = kind().to_dict()
    for key in ("transformers_version", "model_type", "architectures", "auto_map"):
        values.pop(key, None)
    return kind(**{**_shrink(values), **_MORE.get(name, {})})
