"""Converts architectures: a configuration before the model is built, a model in place, weights as they are read.

Modules that transformers does not have are in `modules`; `describe_unsupported_modules` finds them again at export.
User errors raise ValueError that begins with the knob, such as `num_kv_heads: 3 does not divide ...`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from preheat.models.conversions.modules import CentredEmbedding, FeedForward, RMSNorm
from preheat.models.hf import find_anatomy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.core.json_types import JsonObject

__all__ = [
    "KEYS_AND_VALUES",
    "describe_unsupported_modules",
    "feed_forward_draw",
    "fold_layer_norms",
    "has_rotary",
    "key_value_projections",
    "pool_heads",
    "pool_key_value_heads",
    "replace_feed_forward",
    "find_longest_rope",
    "scale_rope",
    "set_feed_forward",
    "set_kv_heads",
    "tie_embeddings",
    "merge_tied_value",
    "replace_layer_norms",
]


# --- grouped queries ----------------------------------------------------------------------------------------------

KEYS_AND_VALUES = r"\.[kv]_proj\.(weight|bias)$"
"""Names of the parameters whose rows are key-value heads."""


def set_kv_heads(config: PretrainedConfig, kv_heads: int) -> None:
    """Sets the number of key-value heads of a configuration, in place.

    Raises:
        ValueError: the model has no such setting, not more heads than that, or not a multiple of them.
    """
    text = config.get_text_config()
    now = getattr(text, "num_key_value_heads", None)
    if now is None:
        raise ValueError(
            f"{config.model_type} has no key-value heads of its own (its projections are fused); use a llama or qwen3"
        )
    if kv_heads >= now:
        raise ValueError(
            f"num_kv_heads: {kv_heads} is not fewer than the {now} that the model has; pooling only removes heads"
        )
    if now % kv_heads:
        fits = [n for n in range(1, now) if now % n == 0]
        raise ValueError(
            f"num_kv_heads: {kv_heads} does not divide the model's {now} key-value heads; use one of {fits}"
        )
    text.num_key_value_heads = kv_heads


def key_value_projections(model: PreTrainedModel) -> list[str]:
    """Names of the key and value projections.

    Raises:
        ValueError: a layer's attention has no `k_proj` and `v_proj` of its own.
    """
    attentions = {id(m) for m in find_anatomy(model).attentions}
    owners = [name for name, module in model.named_modules() if id(module) in attentions]
    projections = [f"{owner}.{kind}_proj" for owner in owners for kind in "kv"]
    modules = dict(model.named_modules())
    for name in projections:
        if not isinstance(modules.get(name), nn.Linear):
            raise ValueError(
                f"{type(model).__name__} has no {name}: its projections are fused, which preheat cannot pool"
            )
    return projections


def pool_heads(value: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """The mean of each group of heads. value: [heads * head_dim, ...] -> [kv_heads * head_dim, ...], in its dtype."""
    # [kv_heads, heads per group, head_dim, ...]; the mean of each group as in GQA
    # (Ainslie et al. 2023, arXiv:2305.13245).
    grouped = value.float().reshape(kv_heads, -1, head_dim, *value.shape[1:])
    return grouped.mean(1).flatten(0, 1).to(value.dtype)


def pool_key_value_heads(model: PreTrainedModel, kv_heads: int) -> int:
    """Mean-pools the key-value heads of a model, in place. Returns the number of matrices."""
    names = key_value_projections(model)
    set_kv_heads(model.config, kv_heads)
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in names:
        linear = model.get_submodule(name)
        for kind, old in list(linear.named_parameters(recurse=False)):
            pooled = pool_heads(old.detach(), kv_heads, head_dim)
            setattr(linear, kind, nn.Parameter(pooled, requires_grad=old.requires_grad))
        linear.out_features = linear.weight.shape[0]
    # Attention modules keep the group size that they were built with, in an attribute of their own.
    for attention in find_anatomy(model).attentions:
        cast(Any, attention).num_key_value_groups = text.num_attention_heads // kv_heads
    return len(names)


# --- LayerNorm to RMSNorm -----------------------------------------------------------------------------------------


def replace_layer_norms(model: PreTrainedModel, *, fold: bool) -> list[str]:
    """Replaces each LayerNorm of a GPT-2 by RMSNorm, in place; values are changed by `fold_layer_norms`.

    Args:
        fold: the model must compute the same with folded values: the last norm keeps its bias (the head has none to
            fold it into), and an embedding tied to the head is centred at lookup.

    Returns:
        Names of the norms.
    """
    names = [name for name, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    # Modules are named in the order of their registration, so the last LayerNorm is the one before the head.
    last = names[-1]
    for name in names:
        old = model.get_submodule(name)
        # On the old norm's device, which is meta while a build has no values yet.
        with torch.device(old.weight.device):
            new = RMSNorm(old.weight.shape[0], old.eps, bias=fold and name == last).to(old.weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    embedding = model.get_input_embeddings()
    if fold and model.get_output_embeddings().weight is embedding.weight:
        rows, width = embedding.weight.shape
        # On meta, because its weight is replaced at once by the matrix that the head is tied to.
        centred = CentredEmbedding(rows, width, device="meta")
        centred.weight = embedding.weight
        model.set_input_embeddings(centred)
    return names


def fold_layer_norms(name: str, value: Tensor, read: Callable[[str], Tensor], *, tied: bool) -> Tensor:
    """The value of a GPT-2's parameter after `replace_layer_norms(fold=True)`, from the values of the original model.

    Weights that write into the residual stream are centred over the width, so that the stream's mean is zero and its
    root mean square equals LayerNorm's deviation; biases of the norms are folded into the maps that read them.

    Args:
        read: returns the original value of a parameter.
        tied: embedding and head are one matrix.
    """
    # LayerNorm(x) = RMSNorm(x - mean(x)), and the mean over the width is linear: each map that writes into the stream
    # subtracts it from its own output (SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024).
    if re.search(r"\.c_proj\.(weight|bias)$|\bwpe\.weight$", name) or (name.endswith("wte.weight") and not tied):
        return (value.double() - value.double().mean(-1, keepdim=True)).to(value.dtype)
    reads = re.fullmatch(r"(.*\.)(attn\.c_attn|mlp\.c_fc)\.bias", name)
    if reads:
        # (norm(x) * g + b) W + c = (norm(x) * g) W + (b W + c); Conv1D stores W as [in, out].
        norm = read(f"{reads[1]}{'ln_1' if reads[2] == 'attn.c_attn' else 'ln_2'}.bias").double()
        return (value.double() + norm @ read(f"{reads[1]}{reads[2]}.weight").double()).to(value.dtype)
    return value


# --- feed-forward -------------------------------------------------------------------------------------------------

_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "gelu": "gelu", "relu": "relu"}
_GATED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def _is_gated(activation: str) -> bool:
    return activation.endswith("glu")


def _round_width(width: float) -> int:
    """Rounds a width to a multiple of 64 (8 for small models), for fast matmuls."""
    multiple = 64 if width >= 1024 else 8
    return max(round(width / multiple) * multiple, multiple)


def set_feed_forward(config: PretrainedConfig, activation: str) -> None:
    """Sets activation and inner width of a configuration for a feed-forward block with as many parameters, in place.

    A gated block has three matrices and a plain one two, so its inner width is two thirds.

    Raises:
        ValueError: the family's block is unknown, or has this activation already.
    """
    family, function = config.model_type, _ACTIVATIONS[activation]
    if family not in (*_GATED_FAMILIES, "gpt2"):
        raise ValueError(f"{family}: its feed-forward block is not known to preheat; use llama, qwen3 or gpt2")
    was_gated = family != "gpt2"
    now = config.hidden_act if was_gated else config.activation_function
    # A block of the same kind is another one if its function differs.
    same = now == function or (function == "gelu" and now.startswith("gelu"))  # gpt2's gelu_new is its tanh form
    if _is_gated(activation) == was_gated and same:
        raise ValueError(
            f"activation: {activation} is already the {family} model's activation; leave the technique out"
        )
    inner = config.intermediate_size if was_gated else (config.n_inner or 4 * config.n_embd)
    # 3 matrices of 2/3 of the width have the parameters of 2 matrices of all of it.
    if _is_gated(activation) != was_gated:
        inner = _round_width(inner * (3 / 2 if was_gated else 2 / 3))
    if was_gated:
        config.hidden_act, config.intermediate_size = function, inner
    else:
        config.activation_function, config.n_inner = function, inner


def replace_feed_forward(model: PreTrainedModel, activation: str) -> int:
    """Puts the block that `set_feed_forward` has sized into each layer if transformers has no such block, in place.

    New weights are initialized like the model's others (on meta: not at all).

    Returns:
        The number of replaced blocks: 0 if the configuration is enough.
    """
    config = model.config
    # The family's own block follows the configuration as long as it stays gated, or stays plain.
    if _is_gated(activation) == (config.model_type != "gpt2"):
        return 0
    layers = find_anatomy(model).layers
    inner = config.intermediate_size if _is_gated(activation) is False else config.n_inner
    for layer in cast("list[Any]", list(layers)):
        weight = next(layer.mlp.parameters())
        with torch.device(weight.device):
            block = FeedForward(
                config.hidden_size,
                inner,
                _ACTIVATIONS[activation],
                gated=_is_gated(activation),
                dropout=getattr(config, "resid_pdrop", 0.0),
            ).to(weight.dtype)
        layer.mlp = block
        if weight.device.type != "meta":
            for module in block.modules():
                model._init_weights(module)
            if draw := feed_forward_draw(config):
                draw(block)
    return len(layers)


def feed_forward_draw(config: PretrainedConfig) -> Callable[[nn.Module], None] | None:
    """The family's own initialization of a feed-forward block's output projection; None: like all other weights.

    GPT-2 scales it down with depth, and transformers only does so for its own block.
    """
    if config.model_type != "gpt2":
        return None
    # Two maps per layer add to the residual stream: 1 / sqrt(2 n_layer) keeps its variance independent of depth.
    deviation = config.initializer_range / math.sqrt(2 * config.n_layer)

    def draw(block: Any) -> None:
        with torch.no_grad():
            weight = block.down_proj.weight
            weight.copy_(torch.empty_like(weight, dtype=torch.float32).normal_(0, deviation))

    return draw


# --- tied embeddings ----------------------------------------------------------------------------------------------


def merge_tied_value(embedding: Tensor, head: Tensor, keep: str) -> Tensor:
    """Returns the one matrix that replaces embedding and head, in the embedding's dtype.

    Args:
        keep: "mean" of the two, "head", or "embedding".
    """
    if keep == "mean":
        return ((embedding.float() + head.float()) / 2).to(embedding.dtype)
    return head.to(embedding.dtype) if keep == "head" else embedding


def tie_embeddings(model: PreTrainedModel, keep: str) -> int:
    """Ties all embeddings and the head of a model to one parameter, in place; for T5 those of encoder and decoder.

    Returns:
        Number of removed elements.

    Raises:
        ValueError: they are tied already, or differ in shape.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no head that could be tied")
    # The stacks of a T5 look tokens up through embedding modules of their own.
    modules = [embedding, head]
    if model.config.is_encoder_decoder:
        stacks = [stack.get_input_embeddings() for stack in (model.get_encoder(), model.get_decoder())]
        modules += stacks
    before = {id(m.weight): m.weight for m in modules}
    if len(before) == 1:
        raise ValueError("embedding and head are one matrix already")
    shapes = {tuple(weight.shape) for weight in before.values()}
    if len(shapes) > 1:
        raise ValueError(f"embedding and head differ in shape ({sorted(shapes)}) and cannot be one matrix")
    with torch.no_grad():
        embedding.weight.copy_(merge_tied_value(embedding.weight, head.weight, keep))
    for module in modules:
        module.weight = embedding.weight
    model.config.tie_word_embeddings = True
    if keep == "embedding" and hasattr(model.config, "scale_decoder_outputs"):
        # T5 initializes its embedding with deviation 1: as a head, its input must be scaled by width ** -0.5.
        model.config.scale_decoder_outputs = True
    return sum(weight.numel() for weight in before.values()) - embedding.weight.numel()


# --- rotary scaling -----------------------------------------------------------------------------------------------


def scale_rope(
    config: PretrainedConfig, kind: str, factor: float, original: int | None, **yarn: float
) -> tuple[int, int]:
    """Sets the rotary scaling of a configuration, in place.

    Args:
        kind: linear, dynamic or yarn, as in transformers; or base: a larger base, with which the slowest frequency
            turns `factor` times slower.
        original: positions that the model was trained on; by default its `max_position_embeddings`.
        yarn: beta_fast, beta_slow, attention_factor.

    Returns:
        Positions before and after.

    Raises:
        ValueError: the model has no unscaled rotary positions.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise ValueError(
            f"{config.model_type} has no rotary positions that are the same in all layers; use a llama or qwen"
        )
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"the model's rotary positions are scaled already ({rope['rope_type']}); leave the technique out"
        )
    original = original or text.max_position_embeddings
    scaled: JsonObject = {**rope, "rope_type": kind, "factor": float(factor)}
    if kind == "base":
        turned = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        turned = int(turned * rope.get("partial_rotary_factor", 1.0))
        # The slowest frequency is theta ** -((d - 2) / d): theta * factor ** (d / (d - 2)) divides it by `factor`.
        scaled = {**rope, "rope_theta": rope["rope_theta"] * factor ** (turned / (turned - 2))}
    if kind == "yarn":
        scaled |= {"original_max_position_embeddings": original, **yarn}
    text.rope_parameters = scaled
    reach = int(original * factor)
    # transformers' dynamic scaling counts from max_position_embeddings, so it stays; hf._positions accounts for it.
    text.max_position_embeddings = original if kind == "dynamic" else reach
    return original, reach


def has_rotary(model: PreTrainedModel) -> bool:
    """True if a model has rotary positions, whose number is not limited by a table."""
    return bool(getattr(model.config.get_text_config(), "rope_parameters", None))


def find_longest_rope(config: PretrainedConfig) -> str:
    """The rotary scaling whose frequencies depend on the longest position of a call; "" if they do not."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # One dictionary for all layers, or one per layer type.
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    return next((kind for kind in ("dynamic", "longrope") if any(part.get("rope_type") == kind for part in parts)), "")


# --- export -------------------------------------------------------------------------------------------------------


def describe_unsupported_modules(model: PreTrainedModel) -> list[str]:
    """Descriptions of a model's modules that no transformers configuration can express; empty if there are none."""
    descriptions = {
        RMSNorm: "RMSNorm in a GPT-2",
        CentredEmbedding: "an embedding centred as it is looked up",
        FeedForward: "another kind of feed-forward block than its family's",
    }
    kinds = {type(module) for module in model.modules()}
    return [text for kind, text in descriptions.items() if kind in kinds]
