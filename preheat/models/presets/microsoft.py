"""Microsoft's Phi: 1.5 (arXiv:2309.05463), 2, 3 and 3.5 (arXiv:2404.14219), 4 (arXiv:2412.08905), 4-mini
(arXiv:2503.01743).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.presets.preset import MIT, OWN, TIED, Preset, sizes

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.models.presets.preset import ConfigValue


__all__ = ["MODELS"]

# As trained; the hub's file has these decimals rounded to fp32 (1.0800000429153442).
# fmt: off
_PHI35_SHORT = (
    1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29, 1.34, 1.68, 1.79,
    1.82, 1.85, 1.88, 1.91, 1.94, 1.99, 2.02, 2.02, 2.02, 2.02, 2.02, 2.02, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03,
    2.03, 2.03, 2.03, 2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84,
)
_PHI35_LONG = (
    1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67, 24.46, 28.57,
    30.42, 30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61, 62.62, 62.71, 63.14,
    63.14, 63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84,
)
_PHI4_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
# fmt: on


def _phi3(hub: str, parameters: int, template: str, *shape: int, positions: int, **more: ConfigValue) -> Preset:
    config = {
        "model_type": "phi3",
        **sizes(*shape),
        "max_position_embeddings": positions,
        # longrope switches from the short to the long factors beyond this length.
        "original_max_position_embeddings": min(positions, 4096),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **more,
    }
    return Preset(f"microsoft/{hub}", f"microsoft/{hub}", parameters, template, MIT, config)


def _long_context_rope(short: tuple[float, ...], long: tuple[float, ...]) -> JsonObject:
    factors = {"type": "longrope", "short_factor": list(short), "long_factor": list(long)}
    return {"positions": 131072, "sliding_window": 262144, "rope_scaling": factors}


_PHI2 = {
    "model_type": "phi",
    "vocab_size": 51200,
    **sizes(2560, 10240, 32, 32, 32),
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.4,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
_PHI3: JsonObject = {"vocab_size": 32064, "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000}
_SHORT: JsonObject = {"positions": 4096, "sliding_window": 2047}
_PHI4: JsonObject = {
    "vocab_size": 100352,
    "rope_theta": 250000.0,
    "sliding_window": None,
    "original_max_position_embeddings": 16384,
}
_PHI4_MINI: JsonObject = {
    "vocab_size": 200064,
    "partial_rotary_factor": 0.75,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
}

_PHI15 = _PHI2 | sizes(2048, 8192, 24, 32, 32) | {"partial_rotary_factor": 0.5}

MODELS = {
    "phi-1.5": Preset("microsoft/phi-1_5", "microsoft/phi-1_5", 1_418_270_720, "none", MIT, _PHI15),
    "phi-2": Preset("microsoft/phi-2", "microsoft/phi-2", 2_779_683_840, "none", MIT, _PHI2),
    "phi-3-mini": _phi3("Phi-3-mini-4k-instruct", 3_821_079_552, "phi3", 3072, 8192, 32, 32, 32, **_SHORT, **_PHI3),
    "phi-3-medium": _phi3(
        "Phi-3-medium-4k-instruct", 13_960_238_080, "phi3", 5120, 17920, 40, 40, 10, **_SHORT, **_PHI3
    ),
    "phi-3.5-mini": _phi3(
        "Phi-3.5-mini-instruct",
        3_821_079_552,
        "phi3",
        3072,
        8192,
        32,
        32,
        32,
        **_long_context_rope(_PHI35_SHORT, _PHI35_LONG),
        **_PHI3,
    ),
    "phi-4": _phi3(
        "phi-4",
        14_659_507_200,
        "phi4",
        *(5120, 17920, 40, 40, 10),
        positions=16384,
        bos_token_id=100257,
        eos_token_id=100265,
        pad_token_id=100349,
        **_PHI4,
    ),
    "phi-4-mini": _phi3(
        "Phi-4-mini-instruct",
        3_836_021_760,
        OWN,
        *(3072, 8192, 32, 24, 8),
        pad_token_id=199999,
        **_long_context_rope((1.0,) * 48, _PHI4_LONG),
        **_PHI4_MINI,
        **TIED,
    ),
}
