"""Finds the parts of a Hugging Face model: layers, head, logit cap, norms, attention. `models.hf` re-exports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.models import encoder_decoder, vision
from preheat.models.token_mixers import find_attentions

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = [
    "SOFTCAP",
    "WHOLE",
    "Anatomy",
    "find_anatomy",
    "find_base",
    "embedding",
    "end_weights",
    "head",
    "compute_logits",
    "require_decoder_only",
    "require_plain_head",
    "softcap",
    "full_model",
]

SOFTCAP = "preheat_softcap"  # attribute of a head with capped logits
WHOLE = "preheat_whole"  # attribute of a pipeline stage, set by models/pipeline_split.py: the full model, in a tuple


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model.

    Attributes:
        base: the module that computes hidden states.
        embedding: token embedding.
        layers: the transformer layers, in order; a pipeline stage has its own, an encoder-decoder the encoder's, then
            the decoder's.
        head: the output projection, [width -> vocabulary].
        norms: all normalization modules, by name.
        attentions: the softmax attention modules of all layers, in order (of decoder layers with cross-attention, the
            self-attention); a layer whose token mixer is recurrent has none.
        tower: the blocks of a vision tower, in order; empty without one.
    """

    base: nn.Module
    embedding: nn.Module
    layers: nn.ModuleList
    head: nn.Module
    norms: Mapping[str, nn.Module]
    attentions: tuple[nn.Module, ...]
    tower: tuple[nn.Module, ...] = ()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """All repeated blocks in execution order: the tower's blocks and the layers."""
        return (*self.tower, *self.layers)


def find_anatomy(model: PreTrainedModel) -> Anatomy:
    """Finds the parts of any decoder-only transformers model, or of the text part of a vision model.

    Raises:
        RecipeError: a part cannot be found; the message names it.
    """
    from torch import nn

    if model.config.is_encoder_decoder:
        return _find_both_stacks(model)
    kind, count = type(model).__name__, model.config.get_text_config().num_hidden_layers
    base = find_base(model)
    if base is model:
        raise RecipeError(f"model: {kind} has no base model under its head, so hidden states are not accessible")
    within = base if vision.find_tower(model) is None else model.get_decoder()
    stacks = [m for m in within.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        raise RecipeError(f"model: found no list of {count} layers in {kind}")
    # Other lists may have an entry per layer, too (norms, routers); the layers hold most parameters.
    layers = stacks[0]
    if len(stacks) > 1:
        layers = max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # A pipeline stage has placeholders in the other stages' layers, and may have neither head nor embedding.
    if full_model(model) is not model:
        from preheat.models.conversions.modules import Passthrough

        layers = nn.ModuleList(layer for layer in layers if not isinstance(layer, Passthrough))
    elif head is None or embedding is None:
        raise RecipeError(
            f"model: {kind} has no {'output head' if head is None else 'token embedding'} that transformers can name"
        )
    attentions = [attention for layer in layers for attention in find_attentions(layer)]
    return Anatomy(
        base, embedding, layers, head, _find_norms(model), tuple(attentions), tuple(vision.tower_blocks(model))
    )


def find_base(model: PreTrainedModel) -> PreTrainedModel:
    """The model under the output head, which computes hidden states; the model itself if there is none."""
    from transformers import PreTrainedModel

    if model.base_model is not model:
        return model.base_model
    # Llama 4's text model names its base by the attribute that it has in the model with images.
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def _find_both_stacks(model: PreTrainedModel) -> Anatomy:
    from torch import nn

    layers = nn.ModuleList(
        layer
        for stack in encoder_decoder.stacks(model)
        for layer in stack.block  # type: ignore[union-attr]
    )
    attentions = tuple(layer.layer[0].SelfAttention for layer in layers)  # type: ignore[index,union-attr]
    return Anatomy(model, embedding(model), layers, head(model), _find_norms(model), attentions)


def _find_norms(model: PreTrainedModel) -> dict[str, nn.Module]:
    """All norms except those of a vision tower."""
    of_tower = {id(m) for part in vision.find_vision_modules(model)[0].values() for m in part.modules()}
    return {
        name: m
        for name, m in model.named_modules()
        if id(m) not in of_tower and type(m).__name__.lower().endswith("norm")
    }


def head(model: PreTrainedModel) -> nn.Module:
    """The output projection, [width -> vocabulary]; None in a pipeline stage that is not the last."""
    return model.get_output_embeddings()


def embedding(model: PreTrainedModel) -> nn.Module:
    """The token embedding; None in a pipeline stage without one."""
    return model.get_input_embeddings()


def full_model(model: PreTrainedModel) -> PreTrainedModel:
    """The full model of a pipeline stage, with other stages' modules on meta; any other model itself."""
    return getattr(model, WHOLE, (model,))[0]


def softcap(model: PreTrainedModel) -> float | None:
    """The cap on the head's logits, which become cap * tanh(logits / cap) (Gemma 2); None: they are not capped."""
    output: Any = head(model)
    base = output.get_base_layer() if hasattr(output, "get_base_layer") else output  # under an adapter
    return getattr(base, SOFTCAP, None)


def compute_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits of hidden states [..., width]: fp32 [..., vocabulary], all in memory at once."""
    # In fp32 before the cap: tanh saturates, and bf16 has 8 bits for what is left.
    uncapped, cap = head(model)(hidden).float(), softcap(model)
    return uncapped if cap is None else (uncapped / cap).tanh() * cap


def require_plain_head(model: PreTrainedModel, who: str, *, tied: bool = False) -> None:
    """Raises RecipeError if the head has an adapter, which code that uses only the head's weight would silently ignore.

    Args:
        tied: `who` handles the adapter of a tied embedding (`ops.adapters.tied_head`).
    """
    if hasattr(head(model), "pair") and not tied:
        raise RecipeError(
            f"techniques.{who}: makes logits from the head's weight alone, and lora's embedding_rank adds to it; set "
            f"embedding_rank: 0, or leave {who} out"
        )
    if hasattr(head(model), "get_base_layer"):
        raise RecipeError(
            f"techniques.{who}: makes logits from the head's weight alone, and it has an adapter; remove the head "
            f"from the adapter's targets, or leave {who} out"
        )


def require_decoder_only(model: PreTrainedModel, who: str) -> None:
    """Raises RecipeError for an encoder-decoder, which `who` (a command as the user types it) does not support."""
    if model.config.is_encoder_decoder:
        raise RecipeError(
            f"{who}: {model.config.model_type} is an encoder-decoder, which can be trained, evaluated, used to "
            "generate, and exported by --to hf only"
        )


def end_weights(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """The weights of embedding and head that the model or pipeline stage has; matrix optimizers leave them to AdamW."""
    modules: list[Any] = [module for module in (embedding(model), head(model)) if module is not None]
    return tuple(module.weight for module in modules)
