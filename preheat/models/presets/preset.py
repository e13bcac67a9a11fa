"""The type of a preset, and helpers for the tables of models. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from preheat.core.json_types import JsonObject

    ConfigValue: TypeAlias = bool | int | float | str | Sequence["ConfigValue"] | Mapping[str, "ConfigValue"] | None
    """A value in config.json."""

__all__ = ["APACHE", "MIT", "NOT_TRAINED", "OWN", "TIED", "Licence", "ModelConfig", "Preset", "TextConfig", "sizes"]

OWN = "its tokenizer's own"
TIED: JsonObject = {"tie_word_embeddings": True}
_INDEXER = "attends to positions that an indexer chooses, which preheat's kernels do not support"
NOT_TRAINED = {
    "deepseek_v2": "has a router and rotary positions of its own, which preheat does not support",
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "attends to compressed positions, which preheat's kernels do not support",
    "glm_moe_dsa": _INDEXER,
}
"""Families (`model_type`) that can only be planned for inference -> the reason."""


@dataclass(frozen=True)
class Licence:
    """A model's licence.

    Attributes:
        name: as its publisher calls it.
        gate: what the hub requires before a download; empty: nothing; None: not known.
    """

    name: str
    gate: str | None = ""

    def __str__(self) -> str:
        if self.gate is None:
            return self.name
        return f"{self.name}; {f'gated: {self.gate}' if self.gate else 'not gated'}"


APACHE = Licence("Apache 2.0")
MIT = Licence("MIT")


class RotaryConfig(TypedDict, total=False):
    """Rotary positions in config.json; also a dictionary of these by type of layer."""

    rope_type: str
    type: str
    rope_theta: float
    factor: float
    original_max_position_embeddings: int
    partial_rotary_factor: float
    full_attention: RotaryConfig
    sliding_attention: RotaryConfig


class _RequiredTextConfig(TypedDict):
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int


class TextConfig(_RequiredTextConfig, total=False):
    """The keys of a text model's config.json that describe its architecture; each family has some of them."""

    tie_word_embeddings: bool
    max_position_embeddings: int
    original_max_position_embeddings: int
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    embedding_multiplier: float
    head_dim: int
    num_key_value_heads: int
    global_head_dim: int
    num_global_key_value_heads: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    attention_bias: bool
    use_bias: bool
    use_qk_norm: bool
    index_topk: int
    compress_ratios: list[int]
    # types of layers
    hybrid_override_pattern: str
    layers_block_type: list[str]
    layer_types: list[str]
    attn_layer_period: int
    attn_layer_offset: int
    full_attention_interval: int
    layer_group_size: int
    # windows
    sliding_window: int | None
    use_sliding_window: bool
    sliding_window_pattern: int
    attention_chunk_size: int
    no_rope_layer_interval: int
    # feed-forward blocks and experts
    intermediate_size: int | list[int]
    block_ff_dim: int
    block_auto_adjust_ff_dim: bool
    block_ffn_dim_multiplier: float
    block_multiple_of: int
    num_experts: int
    num_local_experts: int
    n_routed_experts: int
    moe_num_experts: int | list[int]
    n_shared_experts: int
    moe_num_shared_experts: int
    num_shared_expert: int | list[int]
    shared_expert_intermediate_size: int
    shared_intermediate_size: int
    moe_intermediate_size: int | list[int]
    num_experts_per_tok: int
    top_k_experts: int | None
    moe_k: int
    moe_topk: int | list[int]
    # rotary positions
    position_embedding_type: str
    rope_parameters: RotaryConfig | None
    rope_scaling: RotaryConfig | None
    rope_theta: float
    rope_local_base_freq: float
    rotary_emb_base: float
    partial_rotary_factor: float
    rotary_pct: float
    rotary_dim: int


class VisionConfig(TypedDict, total=False):
    """The keys of `vision_config` that describe an image tower."""

    depth: int
    num_hidden_layers: int
    hidden_size: int
    patch_size: int
    spatial_merge_size: int
    pooling_kernel_size: int
    pixel_shuffle_ratio: float


class AudioConfig(TypedDict, total=False):
    """The key of `audio_config` that describes an audio tower."""

    num_hidden_layers: int


class ModelConfig(TextConfig, total=False):
    """The keys of config.json that describe an architecture; of models with several parts also those of each part."""

    text_config: TextConfig
    vision_config: VisionConfig | None
    audio_config: AudioConfig | None
    spatial_merge_size: int
    scale_factor: int


@dataclass(frozen=True)
class Preset:
    """A public model.

    Attributes:
        hub: the checkpoint whose configuration this is; chat: its chat-tuned variant.
        parameters: of the model that transformers builds, a tied head counted once.
        template: name of the chat template of `chat` in recipes (`data.template`), or that only its tokenizer has it.
        licence: with the hub's requirements before a download.
        config: as in config.json.
        active: of a mixture of experts, the parameters that compute a token: all but the experts not chosen for it.
        stored: number of values in the hub's files, if they hold more than `parameters`; stored_more: what that is.
        also: other checkpoints with this configuration.
        unconfirmed: keys of the configuration, as transformers names them, that no public copy of the file confirms;
            never sizes.
    """

    hub: str
    chat: str
    parameters: int
    template: str
    licence: Licence
    config: JsonObject
    active: int | None = None
    stored: int | None = None
    stored_more: str = ""
    also: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Names on the hub of all checkpoints with this configuration."""
        # In order and once each: `hub` and `chat` are equal for models without a base checkpoint.
        return tuple(dict.fromkeys((self.hub, self.chat, *self.also)))

    @property
    def not_trained(self) -> str | None:
        """Why preheat cannot train the model; None: it can."""
        return NOT_TRAINED.get(self.text["model_type"])

    @property
    def whole(self) -> ModelConfig:
        return cast("ModelConfig", self.config)

    @property
    def text(self) -> TextConfig:
        """The text part of `config`; all of it for text models."""
        return self.whole.get("text_config", self.whole)


def sizes(
    width: int, feed_forward: int, layers: int, heads: int, kv_heads: int | None = None, **more: ConfigValue
) -> JsonObject:
    """Keys of config.json; `more` adds others. Families without grouped-query attention have no `kv_heads`."""
    grouped = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **grouped,
        **more,
    }
