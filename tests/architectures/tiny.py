"""Tiny, randomly initialized models of today's architectures, from transformers' own configuration classes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["ARCHITECTURES", "create_model", "tiny_config"]

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_LATENT: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 24},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 12},
    "gemma3n_text": {
        **_SLIDING,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        **_SLIDING,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "global_head_dim": 16,
    },
    "gpt_oss": {**_SLIDING, **_LOCAL},
    "llama4_text": {
        **_LOCAL,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "glm4_moe": {**_ROUTED, **_GROUPS, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_ROUTED, **_GROUPS, **_LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**_ROUTED, **_GROUPS, **_LATENT, "first_k_dense_replace": 1},
    "mistral": {"sliding_window": 6},
    "ministral3": {},
    "mixtral": _LOCAL,
    "phi": {"rotary_dim": 4},
    "phi3": {},
    "olmo2": {},
    "olmo3": _SLIDING,
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25},
    "granitemoehybrid": {
        **_LOCAL,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 24,
        "logits_scaling": 4.0,
    },
    "nemotron_h": {
        **_ROUTED,
        "n_groups": 2,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_hidden_layers": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 24,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 0,
        "expert_layer_period": 2,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "minimax": {**_LOCAL, **_HYBRID, "block_size": 8},
    "minimax_m2": {**_LOCAL},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_SLIDING, "logit_scale": 0.25},
    "seed_oss": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "exaone4": {**_SLIDING, "sliding_window_pattern": 2},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {**_EXPERTS, "moe_topk": 2},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    "dots1": {**_ROUTED, **_GROUPS, "num_key_value_heads": 2, "first_k_dense_replace": 1},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    "kimi_linear": {
        **_LATENT,
        "q_lora_rank": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
    },
    "apertus": {},
    "starcoder2": {},
    "bloom": {},
    "mpt": {"max_seq_len": 64, "num_attention_heads": 4},
    "stablelm": {},
}
"""Architecture (model_type) -> the values of its tiny configuration that the architecture needs besides `_SIZES`."""


def tiny_config(name: str, **more: Any) -> Any:
    """Returns the configuration of a tiny model of the architecture; `more` overrides its values."""
    values = {**_SIZES, **ARCHITECTURES.get(name, {}), **more}
    return AutoConfig.for_model(name, **{key: value for key, value in values.items() if value is not None})


def create_model(config: Any) -> Any:
    """Creates the model with random weights in fp32, wide enough that leaving out any part changes the loss."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            if p.ndim == 1:  # biases and norms start at zero or one
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
            else:
                p.mul_(4)
    return model
