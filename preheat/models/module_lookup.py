"""Where things are in a Hugging Face model: layers, head and what caps its logits, norms, attention. `models.hf` gives all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.models import encoder_decoder, vision

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = [
    "SOFTCAP",
    "WHOLE",
    "Anatomy",
    "anatomy",
    "embedding",
    "ends",
    "head",
    "logits",
    "require_decoder_only",
    "require_plain_head",
    "softcap",
    "whole",
]

SOFTCAP = "preheat_softcap"  # attribute of a head whose logits are capped
WHOLE = "preheat_whole"  # attribute of a pipeline's stage: the model that it was cut from, in a tuple (models/pipeline_split.py sets it)


@dataclass(frozen=True)
class Anatomy:
    """Where things are in a model.

    Attributes:
        base: the module that gives hidden states.
        embedding: token embedding.
        layers: the transformer layers, in order; of a pipeline's stage its own; of an encoder-decoder the encoder's, then the decoder's.
        head: the output projection, [width -> vocabulary].
        norms: every normalisation, by name.
        attentions: one per layer (self-attention, where a decoder's layer attends to an encoder too).
        tower: the blocks of the vision tower of a model that reads images, in order; else none.
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
        """All that repeats, in the order in which it runs: the tower's blocks and the layers."""
        return (*self.tower, *self.layers)


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Finds layers, head, norms and attention in any decoder-only transformers model, or in the text part of one that reads images.

    Raises:
        RecipeError: something cannot be found; the message names it.
    """
    from torch import nn

    if model.config.is_encoder_decoder:
        return _both_stacks(model)
    kind, count = type(model).__name__, model.config.get_text_config().num_hidden_layers
    base = model.base_model
    if base is model:
        raise RecipeError(f"model: {kind} has no base model under its head, so hidden states cannot be had")
    within = base if vision.tower(model) is None else base.language_model
    stacks = [m for m in within.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        raise RecipeError(f"model: found no list of {count} layers in {kind}")
    layers = max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if whole(model) is not model:
        from preheat.models.conversions.modules import Passthrough

        layers = nn.ModuleList(layer for layer in layers if not isinstance(layer, Passthrough))
    elif head is None or embedding is None:
        raise RecipeError(
            f"model: {kind} has no {'output head' if head is None else 'token embedding'} that transformers can name"
        )
    if getattr(head, "bias", None) is not None:
        raise RecipeError(f"model: the head of {kind} has a bias, which preheat's losses do not handle yet")
    attentions = []
    for layer in layers:
        found = [m for m in layer.children() if type(m).__name__.lower().endswith("attention")]
        if len(found) != 1:
            raise RecipeError(f"model: found {len(found)} attention modules in a layer of {kind}, expected one")
        attentions.append(found[0])
    return Anatomy(base, embedding, layers, head, _norms(model), tuple(attentions), tuple(vision.tower_blocks(model)))


def _both_stacks(model: Any) -> Anatomy:
    from torch import nn

    layers = nn.ModuleList(layer for stack in encoder_decoder.stacks(model) for layer in stack.block)  # type: ignore[union-attr]
    attentions = tuple(layer.layer[0].SelfAttention for layer in layers)  # type: ignore[index,union-attr]
    return Anatomy(model, embedding(model), layers, head(model), _norms(model), attentions)


def _norms(model: Any) -> dict[str, nn.Module]:
    """All but those of a vision tower."""
    of_tower = {id(m) for block in (vision.tower(model),) if block is not None for m in block.modules()}
    return {
        name: m
        for name, m in model.named_modules()
        if id(m) not in of_tower and type(m).__name__.lower().endswith("norm")
    }


def head(model: PreTrainedModel) -> nn.Module:
    """The output projection, [width -> vocabulary]; None in a stage of a pipeline that is not the last."""
    return model.get_output_embeddings()


def embedding(model: PreTrainedModel) -> nn.Module:
    """The token embedding; None in a stage of a pipeline that has none."""
    return model.get_input_embeddings()


def whole(model: PreTrainedModel) -> PreTrainedModel:
    """The model that a stage of a pipeline was cut from, of which other stages' modules stay on meta; any other model itself."""
    return getattr(model, WHOLE, (model,))[0]


def softcap(model: PreTrainedModel) -> float | None:
    """The cap on the logits that the head gives, which are then cap * tanh(logits / cap) (Gemma 2); None: they are as they are."""
    found: Any = head(model)
    base = found.get_base_layer() if hasattr(found, "get_base_layer") else found  # under an adapter
    return getattr(base, SOFTCAP, None)


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the model says of hidden states [..., width]: fp32 [..., vocabulary], all of them in memory at once."""
    made, cap = head(model)(hidden).float(), softcap(model)
    return made if cap is None else (made / cap).tanh() * cap


def require_plain_head(model: PreTrainedModel, who: str, *, tied: bool = False) -> None:
    """Raises RecipeError where the head carries an adapter, which what reads its weight alone would leave out without a word.

    Args:
        tied: `who` knows the adapter of an embedding that the head is tied to (`ops.adapters.tied_head`).
    """
    if hasattr(head(model), "pair") and not tied:
        raise RecipeError(
            f"techniques.{who}: makes logits from the head's weight alone, and lora's embedding_rank adds to it; set embedding_rank: 0, or leave {who} out"
        )
    if hasattr(head(model), "get_base_layer"):
        raise RecipeError(
            f"techniques.{who}: makes logits from the head's weight alone, and an adapter stands on it; take the head out of the adapter's targets, or leave {who} out"
        )


def require_decoder_only(model: PreTrainedModel, who: str) -> None:
    """Raises RecipeError for an encoder-decoder, which `who` (a command, as it is typed) does not serve."""
    if model.config.is_encoder_decoder:
        raise RecipeError(
            f"{who}: {model.config.model_type} is an encoder-decoder, which can be trained, evaluated and written with, and exported by --to hf alone"
        )


def ends(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """The weights of embedding and head, which optimizers made for matrices leave to AdamW; of a pipeline's stage what it has of them."""
    held: list[Any] = [module for module in (embedding(model), head(model)) if module is not None]
    return tuple(module.weight for module in held)
