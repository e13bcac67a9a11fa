"""Describes the architecture of a public model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.presets.preset import Preset

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject


__all__ = ["needs"]

_RMS_AROUND = "RMSNorm with 1 + weight, before and after each block"
_LAYER_NORM = ("bloom", "gpt2", "gpt_neox", "phi")
_TOGETHER = "queries, keys and values in one matrix"
_PROJECTIONS = dict.fromkeys(("bloom", "gpt2", "gpt_neox"), _TOGETHER) | {
    "phi3": f"{_TOGETHER}, gate and up in another"
}
_CAPS = {"attn_logit_softcapping": "attention scores", "final_logit_softcapping": "logits"}


def needs(preset: Preset) -> dict[str, str]:
    """Descriptions of a model's architecture, by aspect."""
    c = preset.text
    kind, width = c["model_type"], c["hidden_size"]
    window, positions = c.get("sliding_window"), c.get("max_position_embeddings")
    windows = "none"
    if window and window < positions:
        every = c.get("sliding_window_pattern", 2 if kind == "gemma2" else 0)
        but = f" but every {'second' if every == 2 else f'{every}th'}" if every else ""
        windows = f"{window:,} tokens in all layers{but}"
    capped = [f"{scores} {c[key]:g}" for key, scores in _CAPS.items() if c.get(key)]
    biased = kind in _LAYER_NORM
    # transformers ties these two families by default.
    tied = preset.config.get("tie_word_embeddings", kind in ("gpt2", "bloom"))
    return {
        "shape": (
            f"{c['num_hidden_layers']} layers of width {width:,}, {_heads(c)}, feed-forward {_inner(c):,}, "
            f"vocabulary {c['vocab_size']:,}"
        ),
        "experts": _experts(c),
        "images": _images(preset.config.get("vision_config")),
        "positions": f"{positions:,}" if positions else "any number",
        "rotary positions": _rotary(c),
        "attention biases": "on queries, keys and values" if kind == "qwen2" or biased else "none",
        "q and k norms": "RMSNorm of each head"
        if kind in ("qwen3", "qwen3_moe", "gemma3_text") or "qwen3_vl" in kind
        else "none",
        "norms": _RMS_AROUND if kind.startswith("gemma") else "LayerNorm" if biased else "RMSNorm",
        "projections": _PROJECTIONS.get(kind, "each its own"),
        "sliding window": windows,
        "embedding": f"scaled by the square root of {width:,}" if kind.startswith("gemma") else "as it is",
        "head": "tied to the embedding" if tied else "a matrix of its own",
        "soft caps": ", ".join(capped) or "none",
    }


def _images(v: JsonObject | None) -> str:
    if v is None:
        return "not read"
    side = v["patch_size"] * v["spatial_merge_size"]
    return f"read by a tower of {v['depth']} blocks of width {v['hidden_size']:,}, a token for {side} x {side} pixels"


def _heads(c: JsonObject) -> str:
    heads = c["num_attention_heads"]
    if "kv_lora_rank" in c:
        return (
            f"{heads} heads of {c['qk_nope_head_dim'] + c['qk_rope_head_dim']}, "
            f"keys and values from {c['kv_lora_rank']} latent ones"
        )
    size = c.get("head_dim") or c["hidden_size"] // heads
    return f"{heads} heads of {size} on {c.get('num_key_value_heads', heads)} key-value heads"


def _inner(c: JsonObject) -> int:
    return int(c.get("intermediate_size") or 4 * c["hidden_size"])


def _experts(c: JsonObject) -> str:
    count = c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts")
    if not count:
        return "none"
    shared = f", and {c['n_shared_experts']} shared by all tokens" if "n_shared_experts" in c else ""
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    return f"{count} in a layer, of width {width:,}, {c['num_experts_per_tok']} for a token{shared}"


def _rotary(c: JsonObject) -> str:
    if c["model_type"] in ("gpt2", "bloom"):
        return "none: learned positions" if c["model_type"] == "gpt2" else "none: added to the scores (ALiBi)"
    rope = c.get("rope_scaling") or {}
    turned = (
        f"base {c.get('rope_theta') or c['rotary_emb_base']:,.0f}"
        if "rope_theta" in c or "rotary_emb_base" in c
        else "base 10,000"
    )
    if rope.get("rope_type") == "llama3":
        turned += f", llama3 scaling by {rope['factor']:g} from {rope['original_max_position_embeddings']:,} positions"
    if rope.get("rope_type") == "linear":
        turned += f", scaled by {rope['factor']:g}"
    if rope.get("type") == "longrope":
        turned += f", longrope: other factors beyond {c['original_max_position_embeddings']:,} positions"
    if share := c.get("partial_rotary_factor") or c.get("rotary_pct"):
        turned += f", on {share:.0%} of each head"
    if "rope_local_base_freq" in c:
        turned += f" in full layers, {c['rope_local_base_freq']:,.0f} in those with a window"
    return turned
