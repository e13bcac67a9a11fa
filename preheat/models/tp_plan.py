"""The tensor-parallel style of each module of a model: transformers' own plan of the family, completed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from preheat.core import ModelFacts
from preheat.core.tp_style import TpStyle
from preheat.models.hf import find_anatomy
from preheat.models.moe import all_experts, experts_of
from preheat.models.token_mixers import find_attentions, find_recurrent_mixers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["count_coverage", "read_plan", "find_problems", "tp_styles"]


_STYLES = {  # by transformers' names
    "colwise": TpStyle.COLUMNS,
    "colwise_gather_output": TpStyle.COLUMNS_GATHERED,
    "rowwise": TpStyle.ROWS,
    "rowwise_split_input": TpStyle.ROWS_SPLIT,
    "replicated_with_grad_allreduce": TpStyle.HEADS,
    "local_params": TpStyle.BLOCK_OF_HEADS,
}


# LoRA's two small matrices, into the rank and out of it, by the style of the linear map that they adapt.
_LORA = {
    # The output is split: A is small and whole on each device, B is split like the weight that it adapts.
    TpStyle.COLUMNS: (TpStyle.REPLICATED, TpStyle.COLUMNS),
    TpStyle.COLUMNS_GATHERED: (TpStyle.REPLICATED, TpStyle.COLUMNS_GATHERED),
    # The input is split: each device's A gives a partial sum, which is added up before B.
    TpStyle.ROWS: (TpStyle.ROWS_SUMMED, TpStyle.REPLICATED_THEN_SPLIT),
    TpStyle.ROWS_SPLIT: (TpStyle.REPLICATED, TpStyle.REPLICATED_THEN_SPLIT),
}


_EXPERTS = re.compile(r"\.experts|\.shared_expert")
"""Names in a plan of what `_style_block_of_experts` styles, whether a plan has them or not."""
_SHARED = {"gate_proj": TpStyle.PARTIAL_COLUMNS, "up_proj": TpStyle.PARTIAL_COLUMNS, "down_proj": TpStyle.PARTIAL_ROWS}
"""Styles of the linear layers of shared experts, by name."""


def read_plan(family: str) -> Mapping[str, str]:
    """transformers' plan for the layers of a family: module names (`layers.*.mlp.up_proj`) -> style, or {}."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plan = CONFIG_MAPPING[family].base_model_tp_plan if family in CONFIG_MAPPING else None
    return {name: style for name, style in (plan or {}).items() if name.startswith("layers.")}


def _read_known_plan(family: str) -> dict[str, str]:
    """The plan without experts, and without attention if it has a style that is not supported (latent attention)."""
    # The plan of a family with experts covers them, though a model may have none.
    plan = {name: style for name, style in read_plan(family).items() if not _EXPERTS.search(name)}
    attention = {name: style for name, style in plan.items() if _is_attention(name)}
    if all(style in _STYLES for style in attention.values()):
        return plan
    return {name: style for name, style in plan.items() if name not in attention}


def _is_attention(name: str) -> bool:
    return "attn" in name or "attention" in name


def find_problems(model: ModelFacts, degree: int) -> list[str]:
    """Why the layers of a model cannot be sharded across `degree` devices; messages begin with the knob."""
    family = model.family
    plan = _read_known_plan(family)
    if not plan and not model.experts:
        return [f"degree: transformers has no tensor parallel plan for {family}; use fsdp, or a llama or qwen3"]
    if strange := sorted({style for style in plan.values() if style not in _STYLES}):
        return [f"degree: the plan of {family} has {', '.join(strange)}, which is not supported; use fsdp"]
    if model.experts:
        if model.foreign_experts:
            return [f"degree: cannot split the experts of {family}, which its own code computes; use fsdp"]
        if model.expert_width % degree:
            return [
                f"degree: experts of width {model.expert_width} do not divide by {degree} devices; use a degree that "
                f"divides {model.expert_width}"
            ]
    # The numbers of heads matter only if the plan splits attention.
    if not any(style == "colwise" for name, style in plan.items() if _is_attention(name)):
        return []  # attention is replicated
    return [
        f"degree: {count} {what} do not divide by {degree} devices; use a degree that divides {count}"
        for what, count in (("heads", model.heads), ("key-value heads", model.kv_heads))
        if count % degree
    ][:1]


def tp_styles(model: PreTrainedModel) -> dict[str, TpStyle]:
    """The style of each module with weights, and of each block, by name.

    Raises:
        ValueError: the plan omits a module that needs a style; the message names it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=16, num_hidden_layers=1)
        >>> names = ("", ".gate_proj", ".up_proj", ".down_proj")
        >>> styles = tp_styles(LlamaForCausalLM(LlamaConfig(**sizes)))
        >>> [str(styles[f"model.layers.0.mlp{name}"]) for name in names]
        ['block', 'columns', 'columns', 'rows']
    """
    parts, plan = find_anatomy(model), _read_known_plan(model.config.model_type)
    names = {id(module): name for name, module in model.named_modules()}
    # "model.layers." of "model.layers.0": plans name layers by a star.
    start, styles = names[id(parts.layers[0])].rpartition(".")[0] + ".", dict[str, TpStyle]()

    def find_style(name: str) -> TpStyle | None:
        style = plan.get("layers." + re.sub(r"^\d+\.", "*.", name.removeprefix(start)))
        return _STYLES[style] if style is not None else None

    covered: set[str] = set()  # modules in blocks that have one style for all
    for layer in parts.layers:
        recurrent, attentions = ({id(m) for m in mixers(layer)} for mixers in (find_recurrent_mixers, find_attentions))
        for child in layer.children():
            # Attention that the plan leaves out needs all positions, unlike a norm. Plans gather what they split of a
            # recurrent mixer, projection by projection: if each device computes all of it, nothing is sent.
            modules = {id(m) for m in child.modules()}
            if all_experts(child):
                styles |= _style_block_of_experts(child, names)
                covered |= {names[id(m)] for m in child.modules()}
                continue
            unplanned = not any(find_style(names[number]) for number in modules)
            if modules & recurrent or (modules & attentions and unplanned):
                styles[names[id(child)]] = TpStyle.BLOCK_WHOLE
                covered |= {names[id(m)] for m in child.modules()}
                continue
            inside = {names[id(m)]: find_style(names[id(m)]) for m in child.modules()}
            for module in [m for m in child.modules() if hasattr(m, "get_base_layer")]:
                inside |= _style_adapter_layers(names[id(module)], module, inside[names[id(module)]])
            # A norm between blocks computes on the whole width; under sequence parallelism, on a part of the positions.
            if not any(inside.values()):
                styles |= {names[id(m)]: TpStyle.BETWEEN for m in _modules_with_parameters(child)}
                continue
            styles[names[id(child)]] = TpStyle.BLOCK
            # In a block with split activations an unplanned module would get one device's heads, and its gradient would
            # have to be summed over devices (q and k norms): no default is right.
            split = any(style is TpStyle.COLUMNS for style in inside.values())
            for module in _modules_with_parameters(child):
                name = names[id(module)]
                style = inside[name]
                if style is None and split:
                    raise ValueError(f"transformers' plan of {model.config.model_type} does not cover {name}")
                if style is TpStyle.BLOCK_OF_HEADS:
                    for key, _ in module.named_parameters(recurse=False):
                        if find_style(f"{name}.{key}") is not TpStyle.COLUMNS:
                            raise ValueError(
                                f"{model.config.model_type}: transformers' plan does not split {name}.{key}"
                            )
                styles[name] = style or TpStyle.REPLICATED
    ends = ((parts.embedding, TpStyle.EMBEDDING), (parts.head, TpStyle.HEAD))  # a pipeline stage may have none
    styles |= {names[id(module)]: style for module, style in ends if module is not None}
    # Only the last pipeline stage has a head and the norm before it.
    last = [name for name in parts.norms if not name.startswith(start)]
    strange = [names[id(m)] for m in _modules_with_parameters(model) if names[id(m)] not in {*styles, *covered, *last}]
    if strange or len(last) != (parts.head is not None):
        extra = ", ".join([*last, *strange]) or "no norm"
        raise ValueError(
            f"{model.config.model_type} has {extra} besides its layers; only a norm after them is supported"
        )
    return styles | dict.fromkeys(last, TpStyle.LAST)


def count_coverage(model: PreTrainedModel, styles: Mapping[str, TpStyle]) -> tuple[int, int]:
    """Returns the number of layers that `tp_styles` splits, and the number of token mixers that it leaves whole."""
    names = {id(module): name for name, module in model.named_modules()}
    split = (TpStyle.COLUMNS, TpStyle.COLUMNS_GATHERED, TpStyle.ROWS, TpStyle.ROWS_SPLIT, TpStyle.EXPERTS)
    layers = sum(
        any(styles.get(names[id(module)]) in split for module in layer.modules())
        for layer in find_anatomy(model).layers
    )
    return layers, sum(style is TpStyle.BLOCK_WHOLE for style in styles.values())


def _style_block_of_experts(block: nn.Module, names: Mapping[int, str]) -> dict[str, TpStyle]:
    """The styles of a block with experts, and of all modules with weights inside.

    Raises:
        ValueError: something inside cannot be split.
    """
    stacks = experts_of(block)
    start = names[id(block)]
    if len(stacks) != len(all_experts(block)) or block in stacks:
        raise ValueError(f"{start} has experts that are not stacks of weights inside of a block; use fsdp")
    styles = {start: TpStyle.BLOCK_OF_EXPERTS} | {names[id(m)]: TpStyle.EXPERTS for m in stacks}
    within, count = {id(m) for stack in stacks for m in stack.modules()}, stacks[0].num_experts
    # Shared experts: split if they are a feed-forward part of linear layers with the usual names.
    shared = [m for m in block.modules() if id(m) not in within and "down_proj" in m._modules]
    split: dict[int, TpStyle] = {}
    for part in shared:
        for name, child in part.named_children():
            for key, module in child.named_modules() if name in _SHARED else ():
                split[id(module)] = _style_shared(name, key)
    for module in _modules_with_parameters(block):
        if id(module) in split:
            styles[names[id(module)]] = split[id(module)]
        elif id(module) not in within:
            # A router has a row for each expert, and a gate of shared experts has one. The result of anything else may
            # not be a sum over the ranks (a norm of the block's output, for example).
            if any(p.shape[0] not in (1, count) for p in module.parameters(recurse=False)):
                raise ValueError(f"{names[id(module)]} computes more than experts and their router; use fsdp")
            if module is not block:
                styles[names[id(module)]] = TpStyle.PARTIAL_WHOLE
    return styles


def _style_shared(name: str, key: str) -> TpStyle:
    """The style of a linear layer of shared experts; `key` names one of LoRA's inside of it."""
    if ".lora_A." in f".{key}.":
        return TpStyle.PARTIAL_ROWS if name == "down_proj" else TpStyle.PARTIAL_WHOLE
    if ".lora_B." in f".{key}.":
        return TpStyle.PARTIAL_WHOLE if name == "down_proj" else TpStyle.PARTIAL_COLUMNS
    return _SHARED[name]


def _style_adapter_layers(name: str, module: nn.Module, style: TpStyle | None) -> dict[str, TpStyle | None]:
    """The styles of the linear maps that an adapter puts in place of one."""
    small = {
        f"{name}.{key}": m
        for key, m in module.named_modules()
        if m in _modules_with_parameters(module) and key != "base_layer"
    }
    if style is None:
        raise ValueError(f"{name} has an adapter, and transformers' plan does not cover the linear map below it")
    if any(not re.search(r"\.lora_[AB]\.\w+$", key) for key in small):
        raise ValueError(
            f"{name} has an adapter with more than LoRA's two small matrices; use lora with variant: lora or rslora"
        )
    into, out = _LORA[style]
    styles: dict[str, TpStyle | None] = {key: into if ".lora_A." in key else out for key in small}
    return styles | {f"{name}.base_layer": style}


def _modules_with_parameters(module: nn.Module) -> list[nn.Module]:
    """The submodules that have parameters of their own."""
    return [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
