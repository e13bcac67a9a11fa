"""Alibaba's Qwen: 2.5 (arXiv:2412.15115), 3 and its mixtures of experts (arXiv:2505.09388), 3-VL (arXiv:2511.21631)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.presets.preset import APACHE, OWN, TIED, Licence, Preset, sizes

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.models.presets.preset import ConfigValue


__all__ = ["MODELS"]

_RESEARCH = Licence("Qwen RESEARCH LICENSE, not for commercial use")
_QWEN = Licence("Qwen LICENSE")


def _qwen(kind: str, positions: int, *shape: int, **more: ConfigValue) -> JsonObject:
    return {
        "model_type": kind,
        "vocab_size": 151936,
        **sizes(*shape),
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        **more,
    }


def _qwen2(
    size: str,
    parameters: int,
    positions: int,
    *shape: int,
    licence: Licence = APACHE,
    also: tuple[str, ...] = (),
    **more: ConfigValue,
) -> Preset:
    """Its sizes of 0.5B, 1.5B, 7B and 72B are those of Qwen2 (arXiv:2407.10671)."""
    hub = f"Qwen/Qwen2.5-{size}"
    if size in ("0.5B", "1.5B", "7B", "72B"):
        also += (f"Qwen/Qwen2-{size}", f"Qwen/Qwen2-{size}-Instruct")
    config = _qwen("qwen2", positions, *shape, **more)
    return Preset(hub, f"{hub}-Instruct", parameters, "qwen", licence, config, also=also)


def _qwen3(
    size: str,
    parameters: int,
    *shape: int,
    kind: str = "qwen3",
    base: bool = True,
    active: int | None = None,
    **more: ConfigValue,
) -> Preset:
    """Its chat template is its own, with sections for reasoning."""
    hub = f"Qwen/Qwen3-{size}"
    # 40,960 positions are 32,768 of output and 8,192 of prompt, as the model cards say.
    config = _qwen(kind, 32768 if base else 40960, *shape, head_dim=128, **more)
    return Preset(f"{hub}-Base" if base else hub, hub, parameters, OWN, APACHE, config, active=active)


_LARGE: JsonObject = {"vocab_size": 152064, "rms_norm_eps": 1e-5}
_EXPERTS: JsonObject = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
    "kind": "qwen3_moe",
}


def _qwen3_vl(
    size: str,
    parameters: int,
    *shape: int,
    large: bool = True,
    kind: str = "qwen3_vl",
    tied: bool = False,
    active: int | None = None,
    **more: ConfigValue,
) -> Preset:
    """Its vision tower is one of two: SigLIP-2's large or so400m."""
    hub = f"Qwen/Qwen3-VL-{size}-Instruct"
    text = _qwen(f"{kind}_text", 262144, *shape, head_dim=128, rope_theta=5000000.0, eos_token_id=151645, **more)
    text.pop("use_sliding_window")
    # mrope: of the rotary frequencies 24 are turned by time, 20 by height and 20 by width.
    text["rope_scaling"] = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    depth, width, inner, deep = (27, 1152, 4304, [8, 16, 24]) if large else (24, 1024, 4096, [5, 11, 17])
    vision = {
        "model_type": kind,
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        # A grid of 48 x 48, interpolated to each image's size.
        "num_position_embeddings": 2304,
        "out_hidden_size": shape[0],
        "deepstack_visual_indexes": deep,
    }
    marks = {
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }
    config = {"model_type": kind, "tie_word_embeddings": tied, "text_config": text, "vision_config": vision, **marks}
    return Preset(hub, hub, parameters, OWN, APACHE, config, active=active)


_SEEING_EXPERTS: JsonObject = {**_EXPERTS, "kind": "qwen3_vl_moe"}

MODELS = {
    "qwen2.5-0.5b": _qwen2("0.5B", 494_032_768, 32768, 896, 4864, 24, 14, 2, **TIED),
    "qwen2.5-1.5b": _qwen2("1.5B", 1_543_714_304, 131072, 1536, 8960, 28, 12, 2, **TIED),
    "qwen2.5-3b": _qwen2("3B", 3_085_938_688, 32768, 2048, 11008, 36, 16, 2, licence=_RESEARCH, **TIED),
    "qwen2.5-7b": _qwen2("7B", 7_615_616_512, 131072, 3584, 18944, 28, 28, 4, vocab_size=152064),
    "qwen2.5-14b": _qwen2("14B", 14_770_033_664, 131072, 5120, 13824, 48, 40, 8, **_LARGE),
    "qwen2.5-32b": _qwen2(*("32B", 32_763_876_352, 131072, 5120, 27648, 64, 40, 8), also=("Qwen/QwQ-32B",), **_LARGE),
    "qwen2.5-72b": _qwen2("72B", 72_706_203_648, 131072, 8192, 29568, 80, 64, 8, licence=_QWEN, **_LARGE),
    "qwen3-0.6b": _qwen3("0.6B", 596_049_920, 1024, 3072, 28, 16, 8, **TIED),
    "qwen3-1.7b": _qwen3("1.7B", 1_720_574_976, 2048, 6144, 28, 16, 8, **TIED),
    "qwen3-4b": _qwen3("4B", 4_022_468_096, 2560, 9728, 36, 32, 8, **TIED),
    "qwen3-8b": _qwen3("8B", 8_190_735_360, 4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3("14B", 14_768_307_200, 5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3("32B", 32_762_123_264, 5120, 25600, 64, 64, 8, base=False),
    "qwen3-30b-a3b": _qwen3(
        "30B-A3B", 30_532_122_624, 2048, 6144, 48, 32, 4, active=3_353_032_704, moe_intermediate_size=768, **_EXPERTS
    ),
    "qwen3-235b-a22b": _qwen3(
        "235B-A22B",
        235_093_634_560,
        4096,
        12288,
        94,
        64,
        4,
        base=False,
        active=22_190_763_520,
        moe_intermediate_size=1536,
        **_EXPERTS,
    ),
    "qwen3-vl-2b": _qwen3_vl("2B", 2_127_532_032, 2048, 6144, 28, 16, 8, large=False, tied=True),
    "qwen3-vl-4b": _qwen3_vl("4B", 4_437_815_808, 2560, 9728, 36, 32, 8, large=False, tied=True),
    "qwen3-vl-8b": _qwen3_vl("8B", 8_767_123_696, 4096, 12288, 36, 32, 8),
    "qwen3-vl-30b-a3b": _qwen3_vl(
        "30B-A3B",
        31_070_754_032,
        2048,
        6144,
        48,
        32,
        4,
        active=3_891_664_112,
        moe_intermediate_size=768,
        **_SEEING_EXPERTS,
    ),
}
