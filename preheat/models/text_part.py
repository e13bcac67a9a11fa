"""The text part of a published vision-language checkpoint: its configuration, and the names of its tensors.

The text part is built by the family's own class for text (`Gemma3ForCausalLM` of a `Gemma3ForConditionalGeneration`),
and read from the checkpoint's files; the tensors of the vision part are never read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from preheat.errors import RecipeError
from preheat.models import vision

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["FAMILIES", "describe", "has_text", "is_taken", "name_in_text", "text_config"]

Part = Literal["auto", "text", "whole"]

FAMILIES = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
"""Families whose text part is known to compute on text alone what the whole model does."""
_PLAIN = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text parts that transformers builds with images only, and families that compute the same on text."""
_OF_WRAPPER = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "quantization_config")
"""Settings that published checkpoints state on the wrapper, for its text part."""


def is_taken(config: PretrainedConfig, part: Part) -> bool:
    """True if a model of this configuration, as published, is trained by its text part alone."""
    if config.is_encoder_decoder or config.get_text_config() is config:
        return False
    return part == "text" or (part == "auto" and config.model_type in FAMILIES)


def text_config(config: PretrainedConfig, part: Part) -> PretrainedConfig:
    """The configuration of the text part if that is trained; else the configuration itself.

    Whether head and embedding are tied is the wrapper's setting, as in transformers; of token ids, dtype and
    quantization the wrapper's are taken where it states them.

    Raises:
        RecipeError: `part` names a part and the model has none, or preheat cannot train that part.
    """
    text = config.get_text_config()
    if part != "auto" and (config.is_encoder_decoder or text is config):
        kind = "is an encoder-decoder" if config.is_encoder_decoder else "is a text model already"
        raise RecipeError(f"model.part: {part}: {config.model_type} {kind} and has no parts; leave model.part out")
    if part == "whole" and config.model_type not in vision.FAMILIES:
        instead = "set model.part: text" if has_text(config) else "name another checkpoint"
        raise RecipeError(
            f"model.part: whole: preheat does not train {config.model_type} with images; {instead} "
            f"(with images it trains {', '.join(vision.FAMILIES)})"
        )
    if not is_taken(config, part):
        return config
    if text.model_type in _PLAIN:
        text = _convert_to_plain(text)
    elif config.model_type not in FAMILIES:
        raise RecipeError(
            f"model.part: text: preheat cannot build {text.model_type}, the text part of {config.model_type}, without "
            f"the rest; it can for {', '.join((*FAMILIES, *(n.removesuffix('_text') for n in _PLAIN)))}"
        )
    # The text part's own value is transformers' default, since published files state it on the wrapper.
    text.tie_word_embeddings = config.tie_word_embeddings
    for key in _OF_WRAPPER:
        if (value := getattr(config, key, None)) is not None:
            setattr(text, key, value)
    return text


def has_text(config: PretrainedConfig) -> bool:
    """True if the text part of a model of this configuration can be trained alone."""
    return config.model_type in FAMILIES or config.get_text_config().model_type in _PLAIN


def describe(family: str) -> str:
    """The sentence that a plan and a run say of such a model."""
    return f"the text part of {family} alone: its vision part is not loaded, since no images are read"


def _convert_to_plain(text: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the same layers in a family for text alone."""
    from transformers import AutoConfig

    values = text.to_dict()
    # On text the three multimodal positions are equal, which is plain rotary embedding.
    rope = {key: value for key, value in values.pop("rope_parameters").items() if not key.startswith("mrope_")}
    family = _PLAIN[values.pop("model_type")]
    return AutoConfig.for_model(family, **values, rope_parameters=rope)


_TEXT = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?|^model\.(?=(?:embed_tokens|layers|norm)\.)")
_HEAD = re.compile(r"^(?:(?:model\.)?language_model\.)?(?=lm_head\.)")


def name_in_text(key: str) -> str | None:
    """The name, in the text model, of a tensor of the whole checkpoint; None for those of other parts.

    Checkpoints of all ages: `model.language_model.*` today, `language_model.model.*` and `language_model.lm_head.*`
    before transformers 4.52, of Qwen2.5-VL `model.*` beside `visual.*`.

    Example:
        >>> name_in_text("language_model.model.norm.weight"), name_in_text("model.language_model.norm.weight")
        ('model.norm.weight', 'model.norm.weight')
        >>> name_in_text("language_model.lm_head.weight"), name_in_text("model.visual.pos_embed.weight")
        ('lm_head.weight', None)
        >>> name_in_text("model.layers.0.mlp.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    # The head is outside of the base model, so its name has no prefix in the text model.
    if (match := _HEAD.match(key)) is not None:
        return key[match.end() :]
    name, count = _TEXT.subn("model.", key)
    return name if count else None
