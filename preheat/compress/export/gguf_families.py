"""Families of transformers in llama.cpp: architecture, metadata, changes of parameters, and limits.

Keys are written without the architecture in front. Values that a family's loader or graph in llama.cpp fixes (the
pattern of windows, the normalization of the experts' weights, the scale of scores) are compared with the model's
configuration; a model that llama.cpp would compute differently is refused.
Source: llama.cpp's loaders and graphs (src/models) and its converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from preheat.compress.export.gguf_layout import (
    ADD_ONE,
    COLUMN,
    HALVES,
    NEGATIVE_EXPONENTIAL,
    SAME,
    SQUEEZE,
    TRANSPOSE,
    Rule,
    Step,
    build_grouping,
    build_interleaving,
    build_row_split,
    build_tiling,
    chain,
)
from preheat.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "Family",
    "build_factors",
    "build_keys",
    "collect_notes",
    "count_parts",
    "find_family",
    "require_supported",
]

Keys = dict[str, Any]
"""Metadata: numbers, strings, truth values, and lists of them."""

_SIGMOID = 2  # gguf.ExpertGatingFuncType
_NEVER_ROTATED = 1e30  # divisor of a frequency, which leaves an angle of 0


@dataclass(frozen=True)
class Family:
    """A family of transformers in llama.cpp.

    Attributes:
        architecture: llama.cpp's name, by the configuration.
        keys: metadata besides sizes and rotary embedding, which it may replace.
        rules: changes of parameters.
        refuse: reasons that llama.cpp computes this configuration differently.
        notes: small differences for the user.
        activation: llama.cpp's, of the feed-forward layers.
        partial: True if llama.cpp rotates a part of each head.
        windows: True if llama.cpp has the family's layers with windows.
        rotary: False for families without positions.
        scalings: supported kinds of rotary scaling.
        begins: True if llama.cpp puts the BOS token before a text, even if the tokenizer does not.
        read_by_transformers: True if transformers reads such a file with all its keys.
    """

    architecture: Callable[[PretrainedConfig], str]
    keys: Callable[[PretrainedConfig], Keys] = lambda config: {}
    rules: Callable[[PretrainedConfig], tuple[Rule, ...]] = lambda config: ()
    refuse: Callable[[PretrainedConfig], Iterator[str]] = lambda config: iter(())
    notes: Callable[[PretrainedConfig], Iterator[str]] = lambda config: iter(())
    activation: str = "silu"
    partial: bool = False
    windows: bool = False
    rotary: bool = True
    scalings: tuple[str, ...] = ("linear", "yarn")
    begins: bool = False
    read_by_transformers: bool = False


def _call(name: str) -> Callable[[PretrainedConfig], str]:
    return lambda config: name


def _get_layer(config: PretrainedConfig, n: int) -> PretrainedConfig:
    """Returns the configuration of one layer; only Gemma 4's layers differ."""
    layers = getattr(config, "per_layer_config", None)
    return layers[n] if layers else config


def _find_head_dim(config: PretrainedConfig) -> int:
    config = _get_layer(config, 0)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _get_layer_types(config: PretrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _count_experts(config: PretrainedConfig) -> int:
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        if count := getattr(config, name, None):
            return int(count)
    return 0


# --- rotary embedding -------------------------------------------------------------------------------------------------


def _get_rope(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the rotary settings of layers with full attention."""
    rope = config.rope_parameters
    return dict(rope.get("full_attention", rope))


def _count_rotated(config: PretrainedConfig) -> int:
    return int(_find_head_dim(config) * _get_rope(config).get("partial_rotary_factor", 1.0))


def _build_rope_keys(config: PretrainedConfig) -> Keys:
    rope = _get_rope(config)
    keys: Keys = {"rope.dimension_count": _count_rotated(config), "rope.freq_base": float(rope["rope_theta"])}
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
        }
    if kind == "longrope":
        original, longest = rope["original_max_position_embeddings"], config.max_position_embeddings
        factor = rope.get("factor") or longest / original
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        keys |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": float(rope.get("attention_factor") or scale),
        }
    return keys


def build_factors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns divisors of rotary frequencies, [rotated / 2] each, by the name of their tensor."""
    config = model.config
    if not find_family(config).rotary:
        return {}
    rope = _get_rope(config)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        size = _count_rotated(config)
        # llama3's scaling is a divisor per frequency: theta^(-2 i / d) over the scaled frequencies of the model.
        base = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        return {"rope_freqs.weight": (base / model.model.rotary_emb.inv_freq.double()).float()}
    if kind == "longrope":
        return {f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"]) for name in ("long", "short")}
    if kind == "proportional":
        pairs = _find_full_head_dim(config) // 2
        rotated = int(pairs * rope.get("partial_rotary_factor", 1.0))
        return {"rope_freqs.weight": torch.tensor([1.0] * rotated + [_NEVER_ROTATED] * (pairs - rotated))}
    return {}


# --- parts of rules, keys and reasons ---------------------------------------------------------------------------------


def _build_llama_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    return (
        Rule(r"self_attn\.q_proj\.", (), build_interleaving(config.num_attention_heads)),
        Rule(r"self_attn\.k_proj\.", (), build_interleaving(config.num_key_value_heads)),
    )


def _build_gemma_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    return (Rule(r"norm\.weight$", (), ADD_ONE),)


def _build_expert_keys(config: PretrainedConfig) -> Keys:
    keys: Keys = {"expert_count": _count_experts(config), "expert_used_count": config.num_experts_per_tok}
    if width := getattr(config, "moe_intermediate_size", None):
        keys["expert_feed_forward_length"] = width
    if width := getattr(config, "shared_expert_intermediate_size", None):
        keys["expert_shared_feed_forward_length"] = width
    return keys


def _build_routed_keys(config: PretrainedConfig) -> Keys:
    """Returns the keys of DeepSeek's routing: sigmoid, groups, shared experts, and dense layers first."""
    return _build_expert_keys(config) | {
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": _SIGMOID,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _build_mamba2_rules(groups: int) -> tuple[Rule, ...]:
    part = r"\.(?:mamba|mixer)\."
    return (
        Rule(part + r"A_log$", ("ssm_a",), chain(NEGATIVE_EXPONENTIAL, COLUMN)),
        Rule(part + r"D$", ("ssm_d",), COLUMN),
        Rule(part + r"conv1d\.weight$", ("ssm_conv1d.weight",), SQUEEZE),
        Rule(part + r"conv1d\.bias$", ("ssm_conv1d.bias",), SAME),
        Rule(part + r"norm\.weight$", ("ssm_norm.weight",), build_grouping(groups)),
        Rule(part + r"in_proj\.weight$", ("ssm_in.weight",), SAME),
        Rule(part + r"out_proj\.weight$", ("ssm_out.weight",), SAME),
    )


def _refuse_other_period(config: PretrainedConfig, family: str, period: int) -> Iterator[str]:
    """Yields a reason if windows are not in all layers but each `period`-th."""
    kinds = _get_layer_types(config)
    if any((kind == "sliding_attention") == ((n + 1) % period == 0) for n, kind in enumerate(kinds)):
        yield f"llama.cpp's {family} has full attention in layers {period}, {2 * period}, ..., and this model in others"


def _refuse_other_norm(config: PretrainedConfig, family: str, *, normalized: bool) -> Iterator[str]:
    if bool(config.norm_topk_prob) != normalized:
        does = "normalizes" if normalized else "does not normalize"
        yield f"llama.cpp's {family} {does} the experts' weights (norm_topk_prob: {config.norm_topk_prob})"


def _refuse_dense_layers(config: PretrainedConfig, family: str) -> Iterator[str]:
    if getattr(config, "decoder_sparse_step", 1) != 1 or getattr(config, "mlp_only_layers", None):
        yield f"llama.cpp's {family} has experts in every layer, and this model in some (mlp_only_layers)"


def _refuse_other_steps(limits: Sequence[float], lowest: float) -> Iterator[str]:
    if not (limits[0] <= lowest and math.isinf(limits[1])):
        yield f"llama.cpp does not limit the time step of recurrent layers (time_step_limit: {list(limits)})"


def _note_window(config: PretrainedConfig) -> Iterator[str]:
    if window := config.sliding_window:
        yield f"llama.cpp attends in full where the model has a window of {window:,} positions"


# --- families ---------------------------------------------------------------------------------------------------------


def _build_gemma2_keys(config: PretrainedConfig) -> Keys:
    caps = {
        "attn_logit_softcapping": float(config.attn_logit_softcapping),
        "final_logit_softcapping": float(config.final_logit_softcapping),
    }
    return {"attention.sliding_window": config.sliding_window} | caps


def _refuse_other_scale(config: PretrainedConfig, family: str, size: float) -> Iterator[str]:
    if config.query_pre_attn_scalar != size:
        yield (
            f"llama.cpp scales {family}'s scores by its head size {size:g}, and this model by "
            f"{config.query_pre_attn_scalar}"
        )


def _refuse_gemma2(config: PretrainedConfig) -> Iterator[str]:
    yield from _refuse_other_scale(config, "gemma2", config.head_dim)
    yield from _refuse_other_period(config, "gemma2", 2)
    if not config.attn_logit_softcapping or not config.final_logit_softcapping:
        yield "llama.cpp's gemma2 caps scores and logits (attn_logit_softcapping, final_logit_softcapping)"


def _get_cap(config: PretrainedConfig) -> float:
    # llama.cpp's default is 30, and 0 turns the cap off.
    return float(config.final_logit_softcapping or 0.0)


def _build_gemma3_keys(config: PretrainedConfig) -> Keys:
    return {
        "attention.sliding_window": config.sliding_window,
        "final_logit_softcapping": _get_cap(config),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }


def _refuse_gemma3(config: PretrainedConfig) -> Iterator[str]:
    # The 27B model has another scale, which llama.cpp knows by the number of its layers.
    largest = config.num_hidden_layers == 62
    size = config.hidden_size / config.num_attention_heads if largest else config.head_dim
    yield from _refuse_other_scale(config, "gemma3", size)
    yield from _refuse_other_period(config, "gemma3", 6)
    if config.use_bidirectional_attention:
        yield "the model attends in both directions, and this format is for generation"
    if config.attn_logit_softcapping:
        yield "llama.cpp's gemma3 does not cap the scores (attn_logit_softcapping)"
    if config.rope_parameters["sliding_attention"].get("rope_type", "default") != "default":
        yield "llama.cpp's gemma3 does not scale the rotary embedding of layers with a window"


def _find_full_head_dim(config: PretrainedConfig) -> int:
    """Returns the size of Gemma 4's heads in layers with full attention."""
    return _find_head_dim(_get_layer(config, _get_layer_types(config).index("full_attention")))


def _build_gemma4_keys(config: PretrainedConfig) -> Keys:
    windows = [kind == "sliding_attention" for kind in _get_layer_types(config)]
    layers = [_get_layer(config, n) for n in range(config.num_hidden_layers)]
    local = _find_head_dim(layers[windows.index(True)])
    full, shared = _find_full_head_dim(config), config.num_kv_shared_layers or 0
    widths = [
        config.intermediate_size * (2 if config.use_double_wide_mlp and n >= len(layers) - shared else 1)
        for n in range(len(layers))
    ]
    keys: Keys = {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": shared,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "feed_forward_length": widths,
        "final_logit_softcapping": _get_cap(config),
        "rope.dimension_count": full,
        "rope.dimension_count_swa": local,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }
    if config.enable_moe_block:
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return keys


def _build_gemma4_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    return (
        Rule(r"\.layer_scalar$", ("layer_output_scale.weight",), SAME),
        Rule(r"router\.per_expert_scale$", ("ffn_down_exps.scale",), SAME),
        Rule(r"router\.scale$", ("ffn_gate_inp.scale",), SAME),
        Rule(r"router\.proj\.weight$", ("ffn_gate_inp.weight",), SAME),
    )


def _refuse_gemma4(config: PretrainedConfig) -> Iterator[str]:
    if config.use_bidirectional_attention == "all":
        yield "the model attends in both directions, and this format is for generation"
    if set(_get_layer_types(config)) != {"full_attention", "sliding_attention"}:
        yield "llama.cpp's gemma4 has layers with full attention and with a window, and this model one kind"


def _refuse_qwen2_moe(config: PretrainedConfig) -> Iterator[str]:
    yield from _refuse_dense_layers(config, "qwen2moe")
    yield from _refuse_other_norm(config, "qwen2moe", normalized=False)


def _refuse_qwen3_moe(config: PretrainedConfig) -> Iterator[str]:
    yield from _refuse_dense_layers(config, "qwen3moe")
    yield from _refuse_other_norm(config, "qwen3moe", normalized=True)


def _find_interval(config: PretrainedConfig) -> int:
    """Returns the distance of layers with full attention, or of the layers' number plus one if there is none."""
    kinds = _get_layer_types(config)
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1


def _build_delta_net_keys(config: PretrainedConfig) -> Keys:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": _find_interval(config),
    }


def _refuse_delta_net(config: PretrainedConfig) -> Iterator[str]:
    interval = _find_interval(config)
    if any((kind == "full_attention") != ((n + 1) % interval == 0) for n, kind in enumerate(_get_layer_types(config))):
        yield f"llama.cpp has full attention in layers {interval}, {2 * interval}, ..., and this model in others"
    if config.linear_key_head_dim != config.linear_value_head_dim:
        yield (
            "llama.cpp's delta net has keys and values of one head size, and this model "
            f"{config.linear_key_head_dim} and {config.linear_value_head_dim}"
        )


_DELTA_NET_NORM = Rule(r"linear_attn\.norm\.weight$", (), SAME)  # the one norm without a one added
_PLUS_ONE = Rule(r"norm\.weight$", (), ADD_ONE)


def _build_qwen3_next_keys(config: PretrainedConfig) -> Keys:
    return _build_delta_net_keys(config) | _build_expert_keys(config)


def _build_qwen3_next_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    keys, repeats = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [repeats * config.linear_value_head_dim] * 2
    # transformers: q, k, v and z of each key head; llama.cpp: q, k and v of all heads, and z apart.
    parts = torch.arange(keys * sum(sizes)).reshape(keys, -1).split(sizes, dim=1)
    order = torch.cat([part.reshape(-1) for part in parts])
    split = build_row_split(order.tolist(), [keys * sum(sizes[:3]), keys * sizes[3]])
    return (
        Rule(r"in_proj_qkvz\.weight$", ("attn_qkv.weight", "attn_gate.weight"), split),
        Rule(r"\.A_log$", ("ssm_a",), NEGATIVE_EXPONENTIAL),
        Rule(r"conv1d\.weight$", (), SQUEEZE),
        _DELTA_NET_NORM,
        _PLUS_ONE,
    )


def _refuse_qwen3_next(config: PretrainedConfig) -> Iterator[str]:
    yield from _refuse_delta_net(config)
    yield from _refuse_dense_layers(config, "qwen3next")
    yield from _refuse_other_norm(config, "qwen3next", normalized=True)


def _build_qwen35_keys(config: PretrainedConfig) -> Keys:
    # Pair n belongs to axis n % 3. Text has one position on all axes; llama.cpp does not rotate a pair without an axis.
    pairs = _count_rotated(config) // 2
    return _build_delta_net_keys(config) | {
        "rope.dimension_sections": [(pairs + 2 - axis) // 3 for axis in range(3)] + [0]
    }


def _build_qwen35_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    repeats = config.linear_num_value_heads // keys
    after = 2 * keys * config.linear_key_head_dim  # rows of q and k

    def tile(size: int, **more: int) -> Step:
        return build_tiling(keys, repeats, size, **more)

    return (
        Rule(r"\.A_log$", ("ssm_a",), chain(NEGATIVE_EXPONENTIAL, tile(1))),
        Rule(r"\.dt_bias$", ("ssm_dt.bias",), tile(1)),
        Rule(r"in_proj_[ab]\.weight$", (), tile(1)),
        Rule(r"in_proj_z\.weight$", (), tile(size)),
        Rule(r"in_proj_qkv\.weight$", (), tile(size, start=after)),
        Rule(r"conv1d\.weight$", (), chain(SQUEEZE, tile(size, start=after))),
        Rule(r"linear_attn\.out_proj\.weight$", (), tile(size, dim=1)),
        _DELTA_NET_NORM,
        _PLUS_ONE,
    )


def _build_qwen35_moe_keys(config: PretrainedConfig) -> Keys:
    return _build_qwen35_keys(config) | _build_expert_keys(config)


def _build_mixtral_keys(config: PretrainedConfig) -> Keys:
    return _build_expert_keys(config)


def _build_gpt_oss_keys(config: PretrainedConfig) -> Keys:
    return _build_expert_keys(config) | {
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    }


def _build_gpt_oss_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    # Rows of gate and up alternate, and transformers multiplies by the transposed matrices.
    width = config.intermediate_size
    order = [*range(0, 2 * width, 2), *range(1, 2 * width, 2)]
    back = torch.tensor(order).argsort()
    apart = Step(
        lambda value: tuple(value[..., order].split(width, dim=-1)),
        lambda parts: torch.cat(list(parts), dim=-1).index_select(-1, back),
    )
    rows = Step(
        lambda value: tuple(part.transpose(-1, -2) for part in apart.split(value)),
        lambda parts: apart.join([part.transpose(-1, -2) for part in parts]),
    )
    return (
        Rule(r"experts\.gate_up_proj$", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), rows),
        Rule(r"experts\.gate_up_proj_bias$", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), apart),
        Rule(r"experts\.down_proj$", ("ffn_down_exps.weight",), TRANSPOSE),
        Rule(r"experts\.down_proj_bias$", ("ffn_down_exps.bias",), SAME),
        Rule(r"\.sinks$", ("attn_sinks.weight",), SAME),
    )


def _refuse_gpt_oss(config: PretrainedConfig) -> Iterator[str]:
    yield from _refuse_other_period(config, "gpt-oss", 2)
    limits = (getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0))
    if limits != (1.702, 7.0):
        yield f"llama.cpp's gpt-oss has swiglu_alpha 1.702 and swiglu_limit 7, and this model {limits}"


def _note_gpt_oss(config: PretrainedConfig) -> Iterator[str]:
    if _get_rope(config).get("truncate") is False:
        yield "llama.cpp rounds the ends of YaRN's ramp to whole dimensions, which the model does not"


def _refuse_glm4_moe(config: PretrainedConfig) -> Iterator[str]:
    if not config.n_shared_experts:
        yield "llama.cpp's glm4moe has a shared expert, and this model none"


def _build_deepseek_keys(config: PretrainedConfig) -> Keys:
    rank, rope = config.kv_lora_rank, _get_rope(config)
    keys = _build_routed_keys(config) | {
        # llama.cpp computes multi-head latent attention as attention with one key head.
        "attention.head_count_kv": 1,
        "attention.key_length": rank + config.qk_rope_head_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if config.q_lora_rank:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if rope.get("rope_type") == "yarn":
        # llama.cpp's files of this architecture store a tenth of it.
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * (rope.get("mscale_all_dim") or 0.0)
    return keys


def _build_deepseek_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    heads, keys, values = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim

    def split(value: Tensor) -> tuple[Tensor, ...]:
        k, v = value.reshape(heads, keys + values, -1).split([keys, values], dim=1)
        return k.transpose(1, 2), v

    def join(parts: Sequence[Tensor]) -> Tensor:
        k, v = parts
        return torch.cat([k.transpose(1, 2), v], dim=1).flatten(0, 1)

    return (Rule(r"kv_b_proj\.weight$", ("attn_k_b.weight", "attn_v_b.weight"), Step(split, join)),)


def _refuse_deepseek(config: PretrainedConfig) -> Iterator[str]:
    if not getattr(config, "rope_interleave", True):
        yield "llama.cpp's deepseek2 rotates neighbouring dimensions, and this model halves (rope_interleave: false)"
    rope = _get_rope(config)
    if rope.get("rope_type") == "yarn" and rope.get("mscale") != rope.get("mscale_all_dim"):
        yield f"YaRN with mscale {rope.get('mscale')} and mscale_all_dim {rope.get('mscale_all_dim')} is not supported"


def _build_ministral3_keys(config: PretrainedConfig) -> Keys:
    rope = _get_rope(config)
    return {
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }


def _refuse_ministral3(config: PretrainedConfig) -> Iterator[str]:
    rope = _get_rope(config)
    if rope.get("rope_type") != "yarn":
        yield f"llama.cpp's mistral3 has YaRN, and this model {rope.get('rope_type', 'default')} (rope_type)"
    elif (rope.get("mscale"), rope.get("mscale_all_dim")) != (1.0, 1.0):
        yield "llama.cpp's mistral3 has YaRN with mscale 1 and mscale_all_dim 1"


def _build_phi_keys(config: PretrainedConfig) -> Keys:
    return {"attention.layer_norm_epsilon": config.layer_norm_eps}


def _refuse_phi(config: PretrainedConfig) -> Iterator[str]:
    if config.qk_layernorm:
        yield "llama.cpp's phi2 has no norms of queries and keys (qk_layernorm)"


def _build_phi3_keys(config: PretrainedConfig) -> Keys:
    # Required by the loader; 0: none.
    return {
        "attention.sliding_window": config.sliding_window or 0,
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
    }


def _note_phi3(config: PretrainedConfig) -> Iterator[str]:
    yield from _note_window(config)
    if _get_rope(config).get("rope_type") == "longrope":
        yield (
            "llama.cpp chooses LongRoPE's factors by its context's size (-c), and the model by the text's length; both "
            f"have those for short texts up to {config.original_max_position_embeddings:,} positions"
        )


def _refuse_olmo3(config: PretrainedConfig) -> Iterator[str]:
    yield from _refuse_other_period(config, "olmo2", 4)
    rope = config.rope_parameters
    local = rope.get("sliding_attention", rope)
    if local.get("rope_type", "default") != "default" or local["rope_theta"] != _get_rope(config)["rope_theta"]:
        yield "llama.cpp's olmo2 has one rope_theta, without scaling in layers with a window"


def _build_window_keys(config: PretrainedConfig) -> Keys:
    return {"attention.sliding_window": config.sliding_window}


def _refuse_smollm3(config: PretrainedConfig) -> Iterator[str]:
    if any(bool(rotated) != ((n + 1) % 4 != 0) for n, rotated in enumerate(config.no_rope_layers)):
        yield "llama.cpp's smollm3 rotates all layers but 4, 8, ..., and this model others (no_rope_layers)"


def _build_granite_keys(config: PretrainedConfig) -> Keys:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


def _build_granite_moe_keys(config: PretrainedConfig) -> Keys:
    return _build_granite_keys(config) | _build_expert_keys(config)


def _build_granite_moe_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    return (
        *_build_llama_rules(config),
        Rule(r"router\.(?:layer\.)?weight$", ("ffn_gate_inp.weight",), SAME),
        Rule(r"input_linear\.weight$", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), HALVES),
        Rule(r"output_linear\.weight$", ("ffn_down_exps.weight",), SAME),
    )


def _is_hybrid(config: PretrainedConfig) -> bool:
    return "linear_attention" in _get_layer_types(config)


def _choose_granite(config: PretrainedConfig) -> str:
    # Granite 4 models without recurrent layers are Granite's dense or mixture of experts.
    return "granitehybrid" if _is_hybrid(config) else "granitemoe" if _count_experts(config) else "granite"


def _build_granite_hybrid_keys(config: PretrainedConfig) -> Keys:
    keys = _build_granite_keys(config)
    if _count_experts(config):
        keys |= _build_expert_keys(config) | {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    else:
        keys["feed_forward_length"] = config.shared_intermediate_size
    if _is_hybrid(config):
        keys |= {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
            "ssm.time_step_rank": config.mamba_n_heads,
            "attention.head_count_kv": [
                0 if kind == "linear_attention" else config.num_key_value_heads for kind in _get_layer_types(config)
            ],
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        }
    return keys


def _build_granite_hybrid_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    shared = "_shexp" if _count_experts(config) else ""
    return (
        *_build_llama_rules(config),
        *_build_mamba2_rules(config.mamba_n_groups),
        Rule(r"router\.(?:layer\.)?weight$", ("ffn_gate_inp.weight",), SAME),
        Rule(r"shared_mlp\.input_linear\.weight$", (f"ffn_gate{shared}.weight", f"ffn_up{shared}.weight"), HALVES),
        Rule(r"shared_mlp\.output_linear\.weight$", (f"ffn_down{shared}.weight",), SAME),
    )


def _refuse_granite_hybrid(config: PretrainedConfig) -> Iterator[str]:
    if not _is_hybrid(config) and config.position_embedding_type != "rope":
        yield "llama.cpp's granite rotates queries and keys, and this model does not (position_embedding_type)"
    if _is_hybrid(config):
        yield from _refuse_other_steps(config.time_step_limit, 0.0)
        if config.mamba_proj_bias:
            yield "llama.cpp's granitehybrid has no biases of recurrent projections (mamba_proj_bias)"


_NEMOTRON_KINDS = {"linear_attention", "full_attention", "mlp", "moe"}


def _choose_nemotron(config: PretrainedConfig) -> str:
    return "nemotron_h_moe" if "moe" in config.layers_block_type else "nemotron_h"


def _build_nemotron_keys(config: PretrainedConfig) -> Keys:
    kinds = config.layers_block_type
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    keys: Keys = {
        "block_count": len(kinds),
        "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "attention.head_count_kv": [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        "rope.scaling.finetuned": False,
    }
    if "moe" in kinds:
        keys |= _build_expert_keys(config) | {
            "expert_shared_count": config.n_shared_experts,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_gating_func": _SIGMOID,
            "expert_weights_norm": bool(config.norm_topk_prob),
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    return keys


def _build_nemotron_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    attention = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    return (
        *_build_mamba2_rules(config.n_groups),
        Rule(r"experts\.up_proj$", ("ffn_up_exps.weight",), SAME),
        Rule(r"shared_experts\.up_proj\.weight$", ("ffn_up_shexp.weight",), SAME),
        Rule(r"shared_experts\.down_proj\.weight$", ("ffn_down_shexp.weight",), SAME),
        Rule(r"mixer\.gate\.weight$", ("ffn_gate_inp.weight",), SAME),
        *(
            Rule(rf"mixer\.{name}\.{last}$", (f"{title}.{last}",), SAME)
            for name, title in (attention | {"up_proj": "ffn_up", "down_proj": "ffn_down"}).items()
            for last in ("weight", "bias")
        ),
    )


def _refuse_nemotron(config: PretrainedConfig) -> Iterator[str]:
    kinds = set(config.layers_block_type)
    if kinds >= {"mlp", "moe"} or not kinds <= _NEMOTRON_KINDS:
        yield f"llama.cpp's nemotron_h has no mixture of {', '.join(sorted(kinds))} layers"
    if config.mlp_hidden_act != "relu2":
        yield f"llama.cpp's nemotron_h has relu2, and this model {config.mlp_hidden_act}"
    if getattr(config, "moe_latent_size", None):
        yield "the gguf package has no tensors for experts in a smaller space (moe_latent_size)"
    if config.mamba_proj_bias or config.use_bias:
        yield "llama.cpp's nemotron_h has no biases of recurrent projections (mamba_proj_bias, use_bias)"
    if "linear_attention" not in kinds or "full_attention" not in kinds:
        yield "llama.cpp's nemotron_h has recurrent and attention layers, and this model one kind"


def _note_nemotron(config: PretrainedConfig) -> Iterator[str]:
    if config.time_step_min:
        yield (
            f"llama.cpp does not limit the time step of recurrent layers, which the model keeps above "
            f"{config.time_step_min:g}"
        )


def _build_lfm2_keys(config: PretrainedConfig) -> Keys:
    keys: Keys = {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in _get_layer_types(config)
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
    }
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = int(2 * config.intermediate_size / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
        multiple = config.block_multiple_of
        keys["feed_forward_length"] = multiple * ((width + multiple - 1) // multiple)
    return keys


def _build_lfm2_moe_keys(config: PretrainedConfig) -> Keys:
    return (
        _build_lfm2_keys(config)
        | _build_expert_keys(config)
        | {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": _SIGMOID}
    )


def _build_lfm2_rules(config: PretrainedConfig) -> tuple[Rule, ...]:
    return (
        Rule(r"conv\.conv\.weight$", (), SQUEEZE),
        Rule(r"\.expert_bias$", ("exp_probs_b.bias",), SAME),
    )


def _refuse_lfm2(config: PretrainedConfig) -> Iterator[str]:
    if config.conv_bias:
        yield "llama.cpp's lfm2 has no biases of convolutions (conv_bias)"


def _refuse_lfm2_moe(config: PretrainedConfig) -> Iterator[str]:
    yield from _refuse_lfm2(config)
    yield from _refuse_other_norm(config, "lfm2moe", normalized=True)
    if not config.use_expert_bias:
        yield "llama.cpp's lfm2moe needs a bias on the choice of experts (use_expert_bias)"
    if config.routed_scaling_factor != 1.0:
        yield f"llama.cpp's lfm2moe does not scale the experts' outputs ({config.routed_scaling_factor})"


FAMILIES: dict[str, Family] = {
    "llama": Family(
        _call("llama"),
        rules=_build_llama_rules,
        scalings=("linear", "yarn", "llama3"),
        read_by_transformers=True,
    ),
    # Mistral's layers compute the same as llama's.
    "mistral": Family(
        _call("llama"),
        rules=_build_llama_rules,
        notes=_note_window,
        scalings=("linear", "yarn", "llama3"),
        read_by_transformers=True,
    ),
    "qwen2": Family(_call("qwen2"), read_by_transformers=True),
    "qwen3": Family(_call("qwen3"), read_by_transformers=True),
    "gemma2": Family(
        _call("gemma2"),
        _build_gemma2_keys,
        _build_gemma_rules,
        _refuse_gemma2,
        activation="gelu_pytorch_tanh",
        windows=True,
        read_by_transformers=True,
    ),
    "gemma3_text": Family(
        _call("gemma3"),
        _build_gemma3_keys,
        _build_gemma_rules,
        _refuse_gemma3,
        activation="gelu_pytorch_tanh",
        windows=True,
        scalings=("linear",),
    ),
    "gemma4_text": Family(
        _call("gemma4"),
        _build_gemma4_keys,
        _build_gemma4_rules,
        _refuse_gemma4,
        activation="gelu_pytorch_tanh",
        partial=True,
        windows=True,
        scalings=("proportional",),
        begins=True,
    ),
    "mixtral": Family(_call("llama"), _build_mixtral_keys, _build_llama_rules, notes=_note_window),
    "ministral3": Family(
        _call("mistral3"),
        _build_ministral3_keys,
        _build_llama_rules,
        _refuse_ministral3,
        _note_window,
    ),
    "qwen2_moe": Family(_call("qwen2moe"), _build_expert_keys, refuse=_refuse_qwen2_moe),
    "qwen3_moe": Family(_call("qwen3moe"), _build_expert_keys, refuse=_refuse_qwen3_moe),
    "qwen3_next": Family(
        _call("qwen3next"),
        _build_qwen3_next_keys,
        _build_qwen3_next_rules,
        _refuse_qwen3_next,
        partial=True,
    ),
    "qwen3_5_text": Family(_call("qwen35"), _build_qwen35_keys, _build_qwen35_rules, _refuse_delta_net, partial=True),
    "qwen3_5_moe_text": Family(
        _call("qwen35moe"), _build_qwen35_moe_keys, _build_qwen35_rules, _refuse_delta_net, partial=True
    ),
    "gpt_oss": Family(
        _call("gpt-oss"),
        _build_gpt_oss_keys,
        _build_gpt_oss_rules,
        _refuse_gpt_oss,
        _note_gpt_oss,
        windows=True,
    ),
    "glm4_moe": Family(_call("glm4moe"), _build_routed_keys, refuse=_refuse_glm4_moe, partial=True),
    "deepseek_v3": Family(_call("deepseek2"), _build_deepseek_keys, _build_deepseek_rules, _refuse_deepseek),
    "phi": Family(_call("phi2"), _build_phi_keys, refuse=_refuse_phi, activation="gelu_new", partial=True),
    "phi3": Family(_call("phi3"), _build_phi3_keys, notes=_note_phi3, partial=True, scalings=("longrope",)),
    "olmo2": Family(_call("olmo2")),
    "olmo3": Family(_call("olmo2"), _build_window_keys, refuse=_refuse_olmo3, windows=True),
    "smollm3": Family(_call("smollm3"), rules=_build_llama_rules, refuse=_refuse_smollm3),
    "granite": Family(_call("granite"), _build_granite_keys, _build_llama_rules),
    "granitemoe": Family(_call("granitemoe"), _build_granite_moe_keys, _build_granite_moe_rules),
    "granitemoehybrid": Family(
        _choose_granite, _build_granite_hybrid_keys, _build_granite_hybrid_rules, _refuse_granite_hybrid
    ),
    "nemotron_h": Family(
        _choose_nemotron,
        _build_nemotron_keys,
        _build_nemotron_rules,
        _refuse_nemotron,
        _note_nemotron,
        rotary=False,
    ),
    "lfm2": Family(_call("lfm2"), _build_lfm2_keys, _build_lfm2_rules, _refuse_lfm2),
    "lfm2_moe": Family(_call("lfm2moe"), _build_lfm2_moe_keys, _build_lfm2_rules, _refuse_lfm2_moe),
}
"""model_type -> family."""


def find_family(config: PretrainedConfig) -> Family:
    """Returns the configuration's family, which `require_supported` has accepted."""
    return FAMILIES[config.model_type]


def build_keys(config: PretrainedConfig) -> Keys:
    """Returns the metadata of sizes, rotary embedding and the family."""
    keys: Keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _get_layer(config, 0).num_key_value_heads,
        # Explicit, because some families have heads that are not hidden_size / heads wide.
        "attention.key_length": _find_head_dim(config),
        "attention.value_length": _find_head_dim(config),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "vocab_size": config.vocab_size,
    }
    family = find_family(config)
    if family.rotary:
        keys |= _build_rope_keys(config)
    return {key: value for key, value in (keys | family.keys(config)).items() if value is not None}


def count_parts(config: PretrainedConfig) -> dict[str, int]:
    """Returns the numbers of layers and of experts per layer."""
    return {"layers": config.num_hidden_layers, "experts": _count_experts(config)}


def collect_notes(config: PretrainedConfig) -> list[str]:
    """Returns notes on parts that the file leaves out and on small differences of llama.cpp."""
    notes = list(find_family(config).notes(config))
    further = getattr(config, "num_nextn_predict_layers", 0) or getattr(config, "mtp_num_hidden_layers", 0)
    if further:
        notes.append("layers that predict further tokens (MTP) are left out: transformers loads none")
    return notes


def require_supported(config: PretrainedConfig) -> None:
    """Raises RunError for a model that cannot be written, from its configuration alone: before any work."""
    if reason := next(_find_reasons(config), ""):
        raise RunError(f"--to gguf: {reason}; use --to hf")


def _find_reasons(config: PretrainedConfig) -> Iterator[str]:
    name = config.model_type
    if name not in FAMILIES:
        written = ", ".join(family.removesuffix("_text") for family in FAMILIES)
        yield f"no mapping to llama.cpp's tensors is known for {name} (it is for {written})"
        return
    family = FAMILIES[name]
    # Gemma's config uses the second name.
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation is not None and activation != family.activation:
        yield f"llama.cpp's {family.architecture(config)} has {family.activation}, and this model {activation}"
    yield from family.refuse(config)
    # transformers' Qwen models may mix full and windowed layers.
    if not family.windows and "sliding_attention" in _get_layer_types(config):
        yield f"some layers attend in a window, which llama.cpp's {family.architecture(config)} does not"
    if not family.rotary:
        return
    rope = _get_rope(config)
    kind = rope.get("rope_type", "default")
    if not family.partial and rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "a part of each head is rotated, which llama.cpp's model of the family does not"
    own_factor = any(rope.get(key) is not None for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if kind == "yarn" and own_factor and name not in ("deepseek_v3", "ministral3"):
        kind = "yarn with an attention factor of its own"
    if kind not in ("default", *family.scalings):
        known = " and ".join(filter(None, (", ".join(family.scalings[:-1]), family.scalings[-1])))
        yield f"rotary scaling {kind} is not supported there; {known} {'are' if ' and ' in known else 'is'}"
