"""Published configurations of public models, by name: enough to plan with, nothing is downloaded. No torch.

The values are those of each model's config.json on the Hugging Face hub; `parameters` is what is published there of its weights
(a tied head counted once). Meta's Llama 3: arXiv:2407.21783; Qwen2.5: 2412.15115; Qwen3: 2505.09388; Mistral 7B: 2310.06825; Gemma 2:
2408.00118; Gemma 3: 2503.19786; Phi-3: 2404.14219; Phi-4-mini: 2503.01743.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preheat.errors import RecipeError, nearest

__all__ = ["FREE", "PRESETS", "Preset", "find", "needs", "only_planned", "require_weights"]

# What may differ between checkpoints of one model (base and instruct), or does not change what is computed.
FREE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True)
class Preset:
    """A public model.

    Attributes:
        hub: the checkpoint whose configuration this is; chat: its sibling that was tuned to converse.
        parameters: as published.
        template: chat template of `chat` by its name in recipes (`data.template`), or that only its tokenizer brings it.
        licence: in words, with what the hub asks before a download.
        config: as in config.json.
    """

    hub: str
    chat: str
    parameters: int
    template: str
    licence: str
    config: Mapping[str, Any]


def _sizes(width: int, feed_forward: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def _llama(factor: float, *sizes: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        **_sizes(*sizes, **more),  # type: ignore[arg-type]
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def _qwen(kind: str, positions: int, *sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": 151936,
        **_sizes(*sizes, **more),  # type: ignore[arg-type]
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    }


def _gemma(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        **_sizes(*sizes),  # type: ignore[arg-type]
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **more,
    }


_GEMMA2 = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def _phi(*sizes: int, short: tuple[float, ...], long: tuple[float, ...], **more: Any) -> dict[str, Any]:
    return {
        "model_type": "phi3",
        **_sizes(*sizes),  # type: ignore[arg-type]
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": list(short), "long_factor": list(long)},
        "sliding_window": 262144,
        **more,
    }


# As trained; the hub's file has what fp32 made of these decimals (1.0800000429153442).
_PHI35_SHORT = (
    *(1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29, 1.34, 1.68, 1.79, 1.82),
    *(1.85, 1.88, 1.91, 1.94, 1.99, 2.02, 2.02, 2.02, 2.02, 2.02, 2.02, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03),
    *(2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84),
)
_PHI35_LONG = (
    *(1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67, 24.46, 28.57, 30.42, 30.84),
    *(32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61, 62.62, 62.71, 63.14, 63.14, 63.77, 63.93),
    *(63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84),
)
_PHI4_LONG = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826),
    *(3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894),
    *(8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807),
    *(22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97),
    *(33.28, 33.49, 33.5, 44.16, 47.77),
)

_META = "Llama {} Community License; gated: accept it on the model's page, then `hf auth login`"
_GOOGLE = "Gemma Terms of Use; gated: accept them on the model's page, then `hf auth login`"
_APACHE = "Apache 2.0; not gated"
_MIT = "MIT; not gated"
_OWN = "its tokenizer's own"


def _google(hub: str, chat: str, parameters: int, config: Mapping[str, Any]) -> Preset:
    return Preset(f"google/{hub}", f"google/{chat}", parameters, "gemma", _GOOGLE, config)


def _meta(release: str, size: str, parameters: int, config: Mapping[str, Any]) -> Preset:
    hub = f"meta-llama/Llama-{release}-{size}"
    return Preset(hub, f"{hub}-Instruct", parameters, "llama3", _META.format(release), config)


def _alibaba(hub: str, chat: str, parameters: int, config: Mapping[str, Any]) -> Preset:
    template = "qwen" if config["model_type"] == "qwen2" else _OWN  # Qwen3's has places to think in
    return Preset(f"Qwen/{hub}", f"Qwen/{chat}", parameters, template, _APACHE, config)


def _microsoft(hub: str, parameters: int, template: str, config: Mapping[str, Any]) -> Preset:
    return Preset(f"microsoft/{hub}", f"microsoft/{hub}", parameters, template, _MIT, config)


_TIED = {"tie_word_embeddings": True}
_MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32768,
    **_sizes(4096, 14336, 32, 32, 8),
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA3 = {
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
_PHI35 = {"vocab_size": 32064, "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000}
_PHI4 = {"vocab_size": 200064, "partial_rotary_factor": 0.75, "bos_token_id": 199999, "eos_token_id": 199999}

PRESETS: dict[str, Preset] = {
    "gemma-2-2b": _google("gemma-2-2b", "gemma-2-2b-it", 2_614_341_888, _gemma("gemma2", 2304, 9216, 26, 8, 4, **_GEMMA2)),
    "gemma-2-9b": _google("gemma-2-9b", "gemma-2-9b-it", 9_241_705_984, _gemma("gemma2", 3584, 14336, 42, 16, 8, **_GEMMA2)),
    "gemma-3-1b": _google(
        "gemma-3-1b-pt", "gemma-3-1b-it", 999_885_952, _gemma("gemma3_text", 1152, 6912, 26, 4, 1, **_GEMMA3)
    ),
    "llama-3.1-8b": _meta("3.1", "8B", 8_030_261_248, _llama(8.0, 4096, 14336, 32, 32, 8)),
    "llama-3.2-1b": _meta("3.2", "1B", 1_235_814_400, _llama(32.0, 2048, 8192, 16, 32, 8, head_dim=64, **_TIED)),
    "llama-3.2-3b": _meta("3.2", "3B", 3_212_749_824, _llama(32.0, 3072, 8192, 28, 24, 8, head_dim=128, **_TIED)),
    "mistral-7b-v0.3": Preset(
        "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, "mistral", _APACHE, _MISTRAL
    ),
    "phi-3.5-mini": _microsoft(
        "Phi-3.5-mini-instruct",
        3_821_079_552,
        "phi3",
        _phi(3072, 8192, 32, 32, 32, short=_PHI35_SHORT, long=_PHI35_LONG, **_PHI35),
    ),
    "phi-4-mini": _microsoft(
        "Phi-4-mini-instruct",
        3_836_021_760,
        _OWN,
        _phi(3072, 8192, 32, 24, 8, short=(1.0,) * 48, long=_PHI4_LONG, pad_token_id=199999, **_PHI4, **_TIED),
    ),
    "qwen2.5-0.5b": _alibaba(
        "Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct", 494_032_768, _qwen("qwen2", 32768, 896, 4864, 24, 14, 2, **_TIED)
    ),
    "qwen2.5-1.5b": _alibaba(
        "Qwen2.5-1.5B", "Qwen2.5-1.5B-Instruct", 1_543_714_304, _qwen("qwen2", 131072, 1536, 8960, 28, 12, 2, **_TIED)
    ),
    "qwen2.5-7b": _alibaba(
        "Qwen2.5-7B",
        "Qwen2.5-7B-Instruct",
        7_615_616_512,
        _qwen("qwen2", 131072, 3584, 18944, 28, 28, 4, vocab_size=152064),
    ),
    "qwen3-0.6b": _alibaba(
        "Qwen3-0.6B-Base", "Qwen3-0.6B", 596_049_920, _qwen("qwen3", 32768, 1024, 3072, 28, 16, 8, head_dim=128, **_TIED)
    ),
    "qwen3-1.7b": _alibaba(
        "Qwen3-1.7B-Base", "Qwen3-1.7B", 1_720_574_976, _qwen("qwen3", 32768, 2048, 6144, 28, 16, 8, head_dim=128, **_TIED)
    ),
    "qwen3-8b": _alibaba(
        "Qwen3-8B-Base", "Qwen3-8B", 8_190_735_360, _qwen("qwen3", 32768, 4096, 12288, 36, 32, 8, head_dim=128)
    ),
}


def find(name: str) -> Preset:
    """The preset of a name.

    Raises:
        RecipeError: there is none.

    Example:
        >>> find("qwen2.5-0.5b").parameters
        494032768
    """
    if name not in PRESETS:
        raise RecipeError(f"model.preset: {name!r} is none that preheat knows; {nearest(name.lower(), list(PRESETS))}")
    return PRESETS[name]


def only_planned(recipe: Any) -> bool:
    """Whether the recipe's model is a configuration alone, without weights or tokenizer."""
    model = recipe.model
    return model.preset is not None and model.path is None and model.weights != "random"


def require_weights(recipe: Any) -> None:
    """Refuses to train a preset whose weights nobody named: fresh ones, taken in silence, would be no fine-tuning.

    Raises:
        RecipeError: `model.preset` without `path`, and `weights` is not random.
    """
    model = recipe.model
    if only_planned(recipe):
        raise RecipeError(
            f"model.preset: {model.preset} is a configuration without weights: it can be planned, not trained; add model.path: {find(model.preset).hub} "
            "(or a folder that holds it), or model.weights: random for a new model of that shape"
        )


_NORMS = {"gemma2": "RMSNorm with 1 + weight, before and after each block", "phi3": "RMSNorm"}
_NORMS["gemma3_text"] = _NORMS["gemma2"]


def needs(preset: Preset) -> dict[str, str]:
    """What is particular to a model, in words; every line is handled by the build."""
    c = preset.config
    kind, width, heads = c["model_type"], c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim") or width // heads
    rope = c.get("rope_scaling") or {}
    turned = f"base {c['rope_theta']:,.0f}"
    if rope.get("rope_type") == "llama3":
        turned += f", llama3 scaling by {rope['factor']:g} from {rope['original_max_position_embeddings']:,} positions"
    if rope.get("type") == "longrope":
        turned += f", longrope: other factors beyond {c['original_max_position_embeddings']:,} positions"
    if c.get("partial_rotary_factor"):
        turned += f", on {c['partial_rotary_factor']:.0%} of each head"
    if "rope_local_base_freq" in c:
        turned += f" in full layers, {c['rope_local_base_freq']:,.0f} in those with a window"
    window, positions = c.get("sliding_window"), c["max_position_embeddings"]
    windows = "none"
    if window and window < positions:
        every = c.get("sliding_window_pattern", 2)
        windows = f"{window:,} tokens in all layers but every {'second' if every == 2 else f'{every}th'}"
    capped = [f"{words} {c[key]:g}" for key, words in _CAPS.items() if c.get(key)]
    return {
        "shape": f"{c['num_hidden_layers']} layers of width {width:,}, {heads} heads of {head_dim} on {c['num_key_value_heads']} key-value heads, "
        f"feed-forward {c['intermediate_size']:,}, vocabulary {c['vocab_size']:,}",
        "positions": f"{positions:,}",
        "rotary positions": turned,
        "attention biases": "on queries, keys and values" if kind == "qwen2" else "none",
        "q and k norms": "RMSNorm of each head" if kind in ("qwen3", "gemma3_text") else "none",
        "norms": _NORMS.get(kind, "RMSNorm"),
        "projections": "queries, keys and values in one matrix, gate and up in another" if kind == "phi3" else "each its own",
        "sliding window": windows,
        "embedding": f"scaled by the square root of {width:,}" if kind.startswith("gemma") else "as it is",
        "head": "tied to the embedding" if c.get("tie_word_embeddings") else "a matrix of its own",
        "soft caps": ", ".join(capped) or "none",
    }


_CAPS = {"attn_logit_softcapping": "attention scores", "final_logit_softcapping": "logits"}
