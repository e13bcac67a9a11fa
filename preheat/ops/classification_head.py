"""Classification head, and export as a transformers sequence classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = ["ClassHead", "convert_to_sequence_classifier", "give_classes", "pad_for"]


class ClassHead(nn.Linear):
    """Newly initialized head [width -> classes]. Adapters leave it trainable, since no checkpoint contains it."""


def give_classes(model: PreTrainedModel, classes: int) -> str:
    """Replaces a model's head by one over `classes`, in place and also on meta. Returns its name.

    `draw_head` initializes it.
    """
    old = model.get_output_embeddings()
    # Families name their head differently (lm_head, embed_out).
    name = next(name for name, module in model.named_modules() if module is old)
    head = ClassHead(old.in_features, classes, bias=False, device=old.weight.device, dtype=old.weight.dtype)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, head)
    # The new attribute must be the one that the family returns as its head.
    assert model.get_output_embeddings() is head
    model.config.num_labels = classes
    return name


def draw_head(head: nn.Module, std: float) -> None:
    """Initializes a head's weights as transformers initializes its classifiers."""
    assert isinstance(head, ClassHead)
    with torch.no_grad():
        # Drawn on the CPU, so that the values do not depend on the device.
        head.weight.copy_(torch.randn(head.weight.shape) * std)


def pad_for(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns a padding token that no sequence ends with: transformers' classifiers read the last non-padding token.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id):
        if token is not None and token != tokenizer.eos_token_id:
            return int(token)
    raise ValueError("the tokenizer has no padding token other than its end-of-text token; add pad_token to it")


def convert_to_sequence_classifier(model: PreTrainedModel, *, pad: int) -> PreTrainedModel:
    """Returns transformers' ...ForSequenceClassification of the model with the same weights, for `save_pretrained`.

    Args:
        model: has a `ClassHead`; adapters are merged.
        pad: the padding token (`pad_for`).

    Raises:
        ValueError: transformers has no classifier for this family.
    """
    import copy

    from transformers import AutoModelForSequenceClassification

    head = model.get_output_embeddings()
    assert isinstance(head, ClassHead)
    name = next(name for name, module in model.named_modules() if module is head)
    config = copy.deepcopy(model.config)
    config.pad_token_id, config.num_labels = pad, head.out_features
    # No memory for weights that `assign` replaces.
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    state: dict[str, Tensor] = {
        # transformers' classifiers name their head `score`.
        f"score{key.removeprefix(name)}" if key.startswith(f"{name}.") else key: v
        for key, v in model.state_dict().items()
    }
    # `assign`: takes the tensors themselves, without a copy.
    missing, unexpected = classifier.load_state_dict(state, assign=True, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"{type(classifier).__name__} has other weights than {type(model).__name__}: {[*missing, *unexpected][0]}"
        )
    # non-persistent buffers (rotary tables) are not in the state dict
    for key, buffer in model.named_buffers():
        parent, _, last = key.rpartition(".")
        if classifier.get_submodule(parent)._buffers.get(last) is not None:
            classifier.get_submodule(parent)._buffers[last] = buffer
    return classifier.eval()
