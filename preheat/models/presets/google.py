"""Google's Gemma: 1 (arXiv:2403.08295), 2 (arXiv:2408.00118), 3 (arXiv:2503.19786); of 3 from 4B on the text part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.presets.preset import Licence, Preset, sizes

if TYPE_CHECKING:
    from preheat.models.presets.preset import ConfigValue

__all__ = ["MODELS"]

_LICENCE = Licence("Gemma Terms of Use", "accept them on the model's page, then `hf auth login`")


def _gemma(release: str, size: str, parameters: int, *shape: int, **more: ConfigValue) -> Preset:
    config = {
        "model_type": "gemma2" if release == "2" else "gemma3_text",
        **sizes(*shape),
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
    hub = f"google/gemma-{release}-{size}"
    return Preset(hub if release == "2" else f"{hub}-pt", f"{hub}-it", parameters, "gemma", _LICENCE, config)


def _gemma1(size: str, parameters: int, *shape: int) -> Preset:
    config = {
        "model_type": "gemma",
        "vocab_size": 256000,
        **sizes(*shape),
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    hub = f"google/gemma-{size}"
    return Preset(hub, f"{hub}-it", parameters, "gemma", _LICENCE, config)


_GEMMA2: dict[str, ConfigValue] = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: dict[str, ConfigValue] = {
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    # Every sixth layer has full attention.
    "sliding_window_pattern": 6,
}
_SEEING: dict[str, ConfigValue] = {
    **_GEMMA3,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
# 27B models scale scores by width / heads instead of the head dimension.
_WIDE2: dict[str, ConfigValue] = {"head_dim": 128, "query_pre_attn_scalar": 144}
_WIDE3: dict[str, ConfigValue] = {"head_dim": 128, "query_pre_attn_scalar": 168}

MODELS = {
    "gemma-2b": _gemma1("2b", 2_506_172_416, 2048, 16384, 18, 8, 1),
    "gemma-7b": _gemma1("7b", 8_537_680_896, 3072, 24576, 28, 16, 16),
    "gemma-2-2b": _gemma("2", "2b", 2_614_341_888, 2304, 9216, 26, 8, 4, **_GEMMA2),
    "gemma-2-9b": _gemma("2", "9b", 9_241_705_984, 3584, 14336, 42, 16, 8, **_GEMMA2),
    "gemma-2-27b": _gemma("2", "27b", 27_227_128_320, 4608, 36864, 46, 32, 16, **_GEMMA2, **_WIDE2),
    "gemma-3-1b": _gemma("3", "1b", 999_885_952, 1152, 6912, 26, 4, 1, **_GEMMA3),
    "gemma-3-4b": _gemma("3", "4b", 3_880_263_168, 2560, 10240, 34, 8, 4, **_SEEING),
    "gemma-3-12b": _gemma("3", "12b", 11_766_034_176, 3840, 15360, 48, 16, 8, **_SEEING),
    "gemma-3-27b": _gemma("3", "27b", 27_009_346_304, 5376, 21504, 62, 32, 16, **_SEEING, **_WIDE3),
}
