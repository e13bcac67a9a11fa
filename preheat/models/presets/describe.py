"""Describes the architecture of a public model."""

from __future__ import annotations

from collections import Counter

from preheat.models.presets.preset import ModelConfig, Preset, TextConfig

__all__ = ["needs"]

_LAYER_NORM = ("bloom", "gpt2", "gpt_neox", "phi", "starcoder2")
_ONE_PLUS_WEIGHT = ("gemma2", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
_NORMS_AROUND = ("gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_unified")
_NORMS_AFTER = ("exaone4", "olmo2", "olmo3")
_NORMS_OF_HEADS = (
    *("apertus", "dots1", "exaone4", "gemma3", "gemma3n", "gemma4", "gemma4_unified"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "lfm2_moe"),
    *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
)
_NORMS_OF_ALL_HEADS = ("minimax_m2", "olmo2", "olmo3")
_BIASED = ("bloom", "gpt2", "gpt_neox", "phi", "qwen2", "qwen2_5_vl")
_TOGETHER = "queries, keys and values in one matrix"
_PROJECTIONS = dict.fromkeys(("bloom", "gpt2", "gpt_neox"), _TOGETHER) | {
    "phi3": f"{_TOGETHER}, gate and up in another",
    "minimax": f"{_TOGETHER} in layers of lightning attention",
}
_TIED = ("bloom", "gpt2", "gemma3", "gemma3n")  # transformers ties these families by default
_NO_ROTATION = {
    "bloom": "none: added to the scores (ALiBi)",
    "gpt2": "none: learned positions",
    **dict.fromkeys(("jamba", "kimi_linear", "nemotron_h"), "none: no positions in attention"),
}
_LINEAR = {"minimax": "lightning attention"} | dict.fromkeys(
    ("bailing_hybrid", "kimi_linear"), "Kimi delta attention (linear)"
)
_DELTA_NET = "a gated delta net (linear)"
_MIXERS = {
    "attention": "attention",
    "full_attention": "attention",
    "sliding_attention": "attention in a window",
    "conv": "a short convolution",
    "mamba": "Mamba-2",
    "M": "Mamba-2",
    "*": "attention",
    "-": "a feed-forward block alone",
    "E": "experts alone",
    "moe": "experts alone",
}


def needs(preset: Preset) -> dict[str, str]:
    """Descriptions of a model's architecture, by aspect."""
    c, whole = preset.text, preset.whole
    kind, width = _describe_kind(c), c["hidden_size"]
    positions = c.get("max_position_embeddings")
    caps = (("attention scores", c.get("attn_logit_softcapping")), ("logits", c.get("final_logit_softcapping")))
    capped = [f"{scores} {cap:g}" for scores, cap in caps if cap]
    tied = whole.get("tie_word_embeddings", kind in _TIED)
    inner = _find_inner_width(c)
    scale = c.get("embedding_multiplier")
    aspects = {
        "shape": (
            f"{c['num_hidden_layers']} layers of width {width:,}, {_describe_heads(c)}, "
            + (f"feed-forward {inner:,}, " if inner else "")
            + f"vocabulary {c['vocab_size']:,}"
        ),
        "layers": _describe_layers(c),
        "experts": _describe_experts(c),
        "images": _describe_images(whole),
        "positions": f"{positions:,}" if positions else "any number",
        "rotary positions": _describe_rotary(c),
        "attention biases": "on queries, keys and values" if _has_bias(c) else "none",
        "q and k norms": _describe_head_norms(c),
        "norms": _describe_norms(kind),
        "projections": _PROJECTIONS.get(kind, "each its own"),
        "sliding window": _describe_window(c),
        "embedding": f"scaled by the square root of {width:,}"
        if kind.startswith("gemma")
        else f"scaled by {scale:g}"
        if scale
        else "as it is",
        "head": "tied to the embedding" if tied else "a matrix of its own",
        "soft caps": ", ".join(capped) or "none",
    }
    if audio := whole.get("audio_config"):
        layers = audio.get("num_hidden_layers")
        aspects["sound"] = f"read by a tower of {layers} blocks" if layers else "read by a projection of its samples"
    return aspects


def _describe_kind(c: TextConfig) -> str:
    return str(c["model_type"]).removesuffix("_text")


def _describe_mixers(c: TextConfig) -> list[str]:
    """Returns the token mixer of each layer, as text; empty if all layers have full attention."""
    kind, count = _describe_kind(c), c["num_hidden_layers"]
    # Nemotron-H: a letter or a name per layer.
    if pattern := c.get("hybrid_override_pattern") or c.get("layers_block_type"):
        return [_MIXERS[layer] for layer in pattern]
    # Jamba: attention in one layer of each period.
    if period := c.get("attn_layer_period"):
        return ["attention" if n % period == c["attn_layer_offset"] else "Mamba" for n in range(count)]
    if kinds := c.get("layer_types"):
        if kind == "granitemoehybrid" or set(kinds) != {"full_attention"}:
            return [_MIXERS.get(layer) or _LINEAR.get(kind, _DELTA_NET) for layer in kinds]
        return []
    # Qwen3-Next, Qwen 3.5 and Ling state a period: its last layer has full attention.
    if every := c.get("full_attention_interval") or c.get("layer_group_size"):
        linear = _LINEAR.get(kind, _DELTA_NET)
        return ["attention" if (n + 1) % every == 0 else linear for n in range(count)]
    return []


def _describe_layers(c: TextConfig) -> str:
    kind, count = _describe_kind(c), c["num_hidden_layers"]
    if kind == "falcon_h1":
        return f"{count} with attention and Mamba-2 side by side"
    # DeepSeek-V4 states a ratio per layer; 0 is a layer with a window only.
    if ratios := c.get("compress_ratios"):
        few = Counter(ratios[:count])
        return ", ".join(
            f"{n} with attention " + (f"to every {ratio} positions compressed into one" if ratio else "in a window")
            for ratio, n in sorted(few.items())
        )
    # DeepSeek-V3.2 and GLM-5: sparse attention by an indexer.
    if "index_topk" in c:
        return f"{count} with attention to the {c['index_topk']:,} positions that an indexer chooses"
    return (
        ", ".join(f"{n} with {mixer}" for mixer, n in Counter(_describe_mixers(c)).items()) or f"{count} with attention"
    )


def _describe_window(c: TextConfig) -> str:
    kind, count = _describe_kind(c), c["num_hidden_layers"]
    if kind == "llama4":
        # Layers without rotary positions see everything, all others a chunk.
        chunked = count - count // c.get("no_rope_layer_interval", 4)
        return f"chunks of {c.get('attention_chunk_size', 8192):,} tokens in {chunked} of {count} layers"
    window, positions = c.get("sliding_window"), c.get("max_position_embeddings")
    # A window that is not shorter than the context has no effect.
    if not window or not positions or window >= positions or c.get("use_sliding_window") is False:
        return "none"
    windowed = _describe_mixers(c).count("attention in a window")
    if windowed:
        return f"{window:,} tokens in {windowed} of {count} layers"
    every = c.get("sliding_window_pattern", 2 if kind == "gemma2" else 0)
    but = f" but every {'second' if every == 2 else f'{every}th'}" if every else ""
    return f"{window:,} tokens in all layers{but}"


def _has_bias(c: TextConfig) -> bool:
    return bool(_describe_kind(c) in _BIASED or c.get("attention_bias") or c.get("use_bias"))


def _describe_head_norms(c: TextConfig) -> str:
    kind = _describe_kind(c)
    if kind in _NORMS_OF_ALL_HEADS:
        return "RMSNorm of all heads together"
    if kind in _NORMS_OF_HEADS or (kind == "glm4_moe" and c.get("use_qk_norm")):
        return "RMSNorm of each head"
    return "L2 norm of each head, without weights" if kind == "llama4" and c.get("use_qk_norm", True) else "none"


def _describe_norms(kind: str) -> str:
    norm = "LayerNorm" if kind in _LAYER_NORM else "RMSNorm"
    if kind in _ONE_PLUS_WEIGHT:
        norm += " with 1 + weight"
    if kind in _NORMS_AROUND:
        return f"{norm}, before and after each block"
    return f"{norm}, after each block" if kind in _NORMS_AFTER else norm


def _describe_images(config: ModelConfig) -> str:
    v = config.get("vision_config")
    if v is None:
        return "not read"
    # Patches per side of one image token, by each family's name for it.
    merged = (
        v.get("spatial_merge_size")
        or config.get("spatial_merge_size")
        or config.get("scale_factor")
        or v.get("pooling_kernel_size")
        or round(1 / v.get("pixel_shuffle_ratio", 1))
    )
    side = v["patch_size"] * merged
    depth = v.get("depth") or v.get("num_hidden_layers")
    by = f"a tower of {depth} blocks of width {v['hidden_size']:,}" if depth else "a projection of their pixels"
    return f"read by {by}, a token for {side} x {side} pixels"


def _describe_heads(c: TextConfig) -> str:
    heads = c["num_attention_heads"]
    # Multi-head latent attention (DeepSeek-V2): keys and values are projected from a latent vector.
    if "kv_lora_rank" in c:
        return (
            f"{heads} heads of {c['qk_nope_head_dim'] + c['qk_rope_head_dim']}, "
            f"keys and values from {c['kv_lora_rank']} latent ones"
        )
    size = c.get("head_dim") or c["hidden_size"] // heads
    shape = f"{heads} heads of {size} on {c.get('num_key_value_heads', heads)} key-value heads"
    if wide := c.get("global_head_dim"):
        shape += f" (of {wide} on {c.get('num_global_key_value_heads') or c['num_key_value_heads']} in full layers)"
    return shape


def _find_inner_width(c: TextConfig) -> int | None:
    if c.get("block_auto_adjust_ff_dim"):  # LFM2 states the width before a gate takes its third
        multiple = c["block_multiple_of"]
        return int(-(-int(c["block_ffn_dim_multiplier"] * int(2 * c["block_ff_dim"] / 3)) // multiple) * multiple)
    if c["model_type"] in ("bloom", "gpt2"):
        return int(4 * c["hidden_size"])
    return _first_set_value(c.get("intermediate_size"), c.get("block_ff_dim"))


def _first_set_value(*values: int | list[int] | None) -> int | None:
    """The first of these values that is set; of a value per layer, the largest."""
    value = next((value for value in values if value), None)
    return max(value) if isinstance(value, list) else value


def _describe_experts(c: TextConfig) -> str:
    count = _first_set_value(
        c.get("num_experts"), c.get("num_local_experts"), c.get("n_routed_experts"), c.get("moe_num_experts")
    )
    if not count:
        return "none"
    number = _first_set_value(c.get("n_shared_experts"), c.get("moe_num_shared_experts"), c.get("num_shared_expert"))
    # Llama 4 always has one shared expert; Qwen2-MoE and Granite state its width instead of a number.
    if not number and (
        _describe_kind(c) == "llama4"
        or _first_set_value(c.get("shared_expert_intermediate_size"), c.get("shared_intermediate_size"))
    ):
        number = 1
    shared = f", and {number} shared by all tokens" if number else ""
    width = _first_set_value(c.get("moe_intermediate_size"), c.get("intermediate_size"))
    chosen = _first_set_value(c.get("num_experts_per_tok"), c.get("top_k_experts"), c.get("moe_k"), c.get("moe_topk"))
    return f"{count} in a layer, of width {width:,}, {chosen} for a token{shared}"


def _describe_rotary(c: TextConfig) -> str:
    kind = _describe_kind(c)
    if kind in _NO_ROTATION:
        return _NO_ROTATION[kind]
    if c.get("position_embedding_type") == "nope":
        return _NO_ROTATION["nemotron_h"]
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    local = c.get("rope_local_base_freq")
    # A dictionary per layer type: the text describes full layers and adds the base of those with a window.
    if "full_attention" in rope:
        local, rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
    base = c.get("rope_theta") or rope.get("rope_theta") or c.get("rotary_emb_base") or 10_000
    turned = f"base {base:,.0f}"
    form = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings")
    if form in ("llama3", "yarn"):
        turned += f", {'YaRN' if form == 'yarn' else form} scaling by {rope['factor']:g} from {original:,} positions"
    if form == "linear":
        turned += f", scaled by {rope['factor']:g}"
    if form == "dynamic":
        turned += ", scaled beyond the trained length (dynamic NTK)"
    if form == "longrope":
        turned += f", longrope: other factors beyond {c['original_max_position_embeddings']:,} positions"
    # Each family's name for the rotated share of a head's dimensions.
    share = c.get("partial_rotary_factor") or c.get("rotary_pct") or rope.get("partial_rotary_factor") or 1
    if "rotary_dim" in c:
        share = c["rotary_dim"] / c["head_dim"]
    if share != 1:
        turned += f", on {share:.0%} of each head"
    if local:
        turned += f" in full layers, {local:,.0f} in those with a window"
    if every := c.get("no_rope_layer_interval") or (4 if kind == "llama4" else 0):
        turned += f", none in every {every}th layer"
    if kind == "exaone4" and _describe_window(c) != "none":
        turned += " in layers with a window, none in full ones"
    return turned
