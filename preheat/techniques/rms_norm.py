"""RMSNorm for LayerNorm: a GPT-2 whose norms neither centre nor shift.

What: each LayerNorm becomes an RMSNorm. Pretrained weights are folded so that the logits are unchanged at first:
everything that writes into the residual stream (position embedding, output projections) is centred over the width, so
that the mean which LayerNorm would subtract is zero, and each norm's bias is folded into the bias of the linear layer
behind it. Two things cannot be folded and stay as operations: the last norm keeps its bias, because the head has none;
and an embedding tied to the head is centred at lookup, because the head needs the original matrix. From the first
update on it is a different model: the stream's mean is free.
Helps: a norm reads its input once less, and pruning and rotation of the residual stream, which LayerNorm prevents,
become exact.
Hurts: no transformers class implements it, so a Hugging Face folder contains the code of the class and is opened with
trust_remote_code=True, and exports to other formats are rejected; dropout on the residual stream would break the
centring (preheat's own GPT-2s have none).
Source: Zhang and Sennrich 2019 (arXiv:1910.07467); folding: Ashkboos et al. 2024 (SliceGPT, arXiv:2401.15024), section
3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from preheat.core import Build, Change, Context, Numerics, Stage, Technique, Trials

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["RmsNorm", "layer_norm_to_rms_norm"]


def layer_norm_to_rms_norm(model: nn.Module) -> list[str]:
    """Converts the LayerNorms of a transformers GPT-2 into RMSNorms that give the same logits, in place.

    Returns:
        Names of the norms.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> layer_norm_to_rms_norm(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=96)))
        ['transformer.h.0.ln_1', 'transformer.h.0.ln_2', 'transformer.ln_f']
    """
    import torch

    from preheat.models.conversions import architecture

    # Copies: folding a bias reads other parameters, which may have been changed already.
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = architecture.replace_layer_norms(model, fold=True)
    tied = "lm_head.weight" not in before  # a shared parameter has one name, its first
    with torch.no_grad():
        for name, p in model.named_parameters():
            # The same function as for weights that are read from a folder.
            p.copy_(architecture.fold_layer_norms(name, before[name], before.__getitem__, tied=tied))
    return names


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Technique):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    numerics: ClassVar[Numerics] = (
        "different"  # the first loss of pretrained weights is the same; new models and updates differ
    )
    trials: ClassVar[Trials] = Trials(family="gpt2")
    unsupported_for_images: ClassVar[str] = "supports only text models so far; leave it out"

    def check(self, context: Context) -> list[str]:
        family = context.model.family
        return (
            [] if family == "gpt2" else [f"supports only the LayerNorms of gpt2, and this is a {family}; leave it out"]
        )

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models.conversions import architecture

        # A new model has nothing to fold: its norms begin as plain RMSNorms.
        read = build.weights.folder is not None
        names = architecture.replace_layer_norms(part, fold=read)
        if not read:
            return Change(f"{len(names)} LayerNorms are RMSNorms", len(names))

        def fold(name: str, value: Tensor) -> Tensor:
            return architecture.fold_layer_norms(name, value, build.weights.read, tied=build.model.tied)

        # An empty pattern matches every parameter; `fold` returns most of them unchanged.
        build.weights.map("", fold)
        suffix = ", the embedding centred as it is looked up" if build.model.tied else ""
        return Change(
            f"{len(names)} LayerNorms are RMSNorms, centring and biases folded, the last bias kept{suffix}", len(names)
        )
