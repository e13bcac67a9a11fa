"""Meta's Llama: 2 (arXiv:2307.09288), 3, 3.1, 3.2, 3.3 (arXiv:2407.21783)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.presets.preset import OWN, TIED, Licence, Preset, sizes

if TYPE_CHECKING:
    from preheat.models.presets.preset import ConfigValue

__all__ = ["MODELS"]


def _licence(release: str) -> Licence:
    return Licence(f"Llama {release} Community License", "accept it on the model's page, then `hf auth login`")


_SMALL = (4096, 14336, 32, 32, 8)
_LARGE = (8192, 28672, 80, 64, 8)


def _llama2(size: str, parameters: int, *shape: int) -> Preset:
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        **sizes(*shape),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    hub = f"meta-llama/Llama-2-{size}"
    return Preset(f"{hub}-hf", f"{hub}-chat-hf", parameters, OWN, _licence("2"), config)


def _llama3(release: str, size: str, parameters: int, factor: float | None, *shape: int, **more: ConfigValue) -> Preset:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    # From 3.1 on, rotary frequencies are scaled from the 8,192 positions of pretraining to 131,072.
    longer = {"rope_scaling": {**rope, "original_max_position_embeddings": 8192}} if factor else {}
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        **sizes(*shape, **more),  # type: ignore[arg-type]
        "max_position_embeddings": 131072 if factor else 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        **longer,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
    hub = f"meta-llama/{'Llama' if factor else 'Meta-Llama'}-{release}-{size}"
    base = f"{hub}-Instruct" if release == "3.3" else hub  # 3.3 has no base checkpoint
    return Preset(base, f"{hub}-Instruct", parameters, "llama3", _licence(release), config)


MODELS = {
    "llama-2-7b": _llama2("7b", 6_738_415_616, 4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama2("13b", 13_015_864_320, 5120, 13824, 40, 40, 40),
    "llama-2-70b": _llama2("70b", 68_976_648_192, *_LARGE),
    "llama-3-8b": _llama3("3", "8B", 8_030_261_248, None, *_SMALL),
    "llama-3-70b": _llama3("3", "70B", 70_553_706_496, None, *_LARGE),
    "llama-3.1-8b": _llama3("3.1", "8B", 8_030_261_248, 8.0, *_SMALL),
    "llama-3.1-70b": _llama3("3.1", "70B", 70_553_706_496, 8.0, *_LARGE),
    "llama-3.1-405b": _llama3("3.1", "405B", 405_853_388_800, 8.0, 16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _llama3("3.2", "1B", 1_235_814_400, 32.0, 2048, 8192, 16, 32, 8, head_dim=64, **TIED),
    "llama-3.2-3b": _llama3("3.2", "3B", 3_212_749_824, 32.0, 3072, 8192, 28, 24, 8, head_dim=128, **TIED),
    "llama-3.3-70b": _llama3("3.3", "70B", 70_553_706_496, 8.0, *_LARGE),
}
