"""Upcycling: turns the feed-forward blocks of a dense model into experts, in its configuration and its weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["BECOMES", "EXPERTS", "expert_config", "expert_matrices", "upcycle"]

BECOMES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense family -> the family that differs from it by its experts only."""
EXPERTS = r"\.mlp\.experts\.(gate_up_proj|down_proj)$"
"""Names of the experts' parameters."""
# fmt: off
_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "rope_parameters", "sliding_window", "attention_dropout", "tie_word_embeddings", "pad_token_id", "bos_token_id",
    "eos_token_id", "dtype",
)
# fmt: on


def expert_config(config: PretrainedConfig, experts: int, chosen: int) -> PretrainedConfig:
    """The configuration of a dense model with experts in place of each feed-forward block, each as wide as the block.

    Args:
        config: of a llama, mistral or qwen3.
        experts: per layer. chosen: experts per token; their weights sum to 1, so that equal experts compute what one
            does.

    Raises:
        ValueError: another family, or a setting that the family with experts lacks; the message begins with the knob.
    """
    from transformers import AutoConfig

    family = config.model_type
    if family not in BECOMES:
        raise ValueError(
            f"makes experts of the feed-forward block of a {', '.join(BECOMES)}, and the model is a {family}"
        )
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok: {chosen} is more than the {experts} experts of a layer; lower it")
    # A bias without a counterpart would be dropped, and the model would compute something else.
    strange = [key for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    if strange:
        raise ValueError(f"makes a {BECOMES[family]}, which has no {strange[0]} as this {family} has")
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise ValueError(
            f"makes a {BECOMES[family]}, whose layers are all alike, and this {family} has layers of "
            f"{' and '.join(sorted(kinds))}"
        )
    values = {key: getattr(config, key) for key in _COPIED if hasattr(config, key)}
    values |= {"num_experts_per_tok": chosen}
    if BECOMES[family] == "mixtral":
        return AutoConfig.for_model("mixtral", **values, num_local_experts=experts)
    # Qwen3's configurations ignore a window unless this key is true.
    values["use_sliding_window"] = values.get("sliding_window") is not None
    return AutoConfig.for_model(
        "qwen3_moe", **values, num_experts=experts, moe_intermediate_size=config.intermediate_size, norm_topk_prob=True
    )


def expert_matrices(name: str, read: Callable[[str], Tensor], experts: int, redrawn: float, seed: int) -> Tensor:
    """The value of an experts' parameter: copies of the dense block's matrices.

    Args:
        name: of the parameter, such as `model.layers.0.mlp.experts.down_proj`.
        read: returns the value of a parameter of the dense model by name.
        redrawn: share of each expert's inner channels with newly drawn weights, of the matrix's mean and deviation;
            other channels in each expert.
        seed: of the drawn weights.

    Returns:
        [experts, 2 inner, width] or [experts, width, inner]; a view of one copy if nothing is drawn.
    """
    import torch

    layer, _, leaf = name.partition(".experts.")
    # transformers stacks gate and up of an expert in one matrix, gate first.
    parts = [
        read(f"{layer}.{part}.weight")
        for part in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[leaf]
    ]
    block = torch.cat(parts)  # [2 inner, width] or [width, inner]
    stack = block.expand(experts, *block.shape)
    # A channel is a row of gate and up, and a column of down.
    inner = parts[0].shape[0 if leaf == "gate_up_proj" else 1]
    count = round(redrawn * inner)
    # An expanded view needs no memory per expert: the copy into the parameter reads the one block.
    if not count:
        return stack
    stack = stack.clone()
    for expert, matrix in enumerate(stack):
        # Seeded by layer: the same channels for both parameters in any order, and the same values on every device.
        g = torch.Generator().manual_seed(zlib.crc32(f"{seed} {layer} {expert}".encode()))
        channels = torch.randperm(inner, generator=g)[:count]
        # Gate and up have the same channels redrawn, [count, width] each; down gets [count, width], transposed.
        for begin, part in enumerate(parts):
            values = torch.randn(count, part.shape[1 if leaf == "gate_up_proj" else 0], generator=g)
            values = (values * part.float().std().cpu() + part.float().mean().cpu()).to(matrix)
            if leaf == "gate_up_proj":
                matrix[begin * inner + channels] = values
            else:
                matrix[:, channels] = values.t()
    return stack


def upcycle(model: PreTrainedModel, experts: int, chosen: int, redrawn: float, seed: int) -> PreTrainedModel:
    """Builds a model with experts from a dense one; arguments as of `expert_config` and `expert_matrices`."""
    import re

    import torch
    from transformers import AutoModelForCausalLM

    # Attention, norms and embeddings have the same names in both; routers keep their own initialization.
    dense = dict(model.named_parameters())
    sparse = AutoModelForCausalLM.from_config(expert_config(model.config, experts, chosen), dtype=model.dtype).to(
        model.device
    )
    with torch.no_grad():
        for name, parameter in sparse.named_parameters():
            if name in dense:
                parameter.copy_(dense[name])
            elif re.search(EXPERTS, name):
                parameter.copy_(expert_matrices(name, dense.__getitem__, experts, redrawn, seed))
    return sparse
