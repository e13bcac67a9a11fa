"""Names and layout of a model's parameters in a GGUF file, and the way back.

A rule says in which tensors a parameter is stored, and which steps change its values: llama.cpp has other orders of
rows, norms with the one already added, the decay rates of recurrent layers instead of their logarithms, and gate and up
projections of experts in two tensors. Each step can be undone, so that a file is read back into the model's own class.
Source: llama.cpp's converter and loaders; names of tensors without a rule: the `gguf` package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ADD_ONE",
    "COLUMN",
    "COMMON",
    "HALVES",
    "NEGATIVE_EXPONENTIAL",
    "SAME",
    "SQUEEZE",
    "TRANSPOSE",
    "Rule",
    "Step",
    "build_grouping",
    "build_interleaving",
    "build_row_split",
    "build_tiling",
    "chain",
    "iterate_tensors",
    "join_tensors",
]


@dataclass(frozen=True)
class Step:
    """A change of values or layout, which may split a parameter into several tensors.

    Attributes:
        split: from the parameter to the tensors.
        join: from the tensors to the parameter.
    """

    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Rule:
    """The tensors of the parameters whose names match.

    Attributes:
        pattern: searched for in the parameter's name.
        names: names of the tensors, after `blk.N.` in a layer; (): the `gguf` package's.
        step: the change of the values.
    """

    pattern: str
    names: tuple[str, ...]
    step: Step


def _build_step(apply: Callable[[Tensor], Tensor], undo: Callable[[Tensor], Tensor]) -> Step:
    return Step(lambda value: (apply(value),), lambda parts: undo(parts[0]))


def chain(*steps: Step) -> Step:
    """Applies several steps; only the last may split."""
    *first, last = steps

    def split(value: Tensor) -> tuple[Tensor, ...]:
        for step in first:
            (value,) = step.split(value)
        return last.split(value)

    def join(parts: Sequence[Tensor]) -> Tensor:
        value = last.join(parts)
        for step in reversed(first):
            value = step.join([value])
        return value

    return Step(split, join)


SAME = _build_step(lambda value: value, lambda value: value)
ADD_ONE = _build_step(lambda value: value + 1, lambda value: value - 1)
"""transformers' Gemma and Qwen3-Next multiply by 1 + weight, llama.cpp by the weight."""
NEGATIVE_EXPONENTIAL = _build_step(lambda value: -value.exp(), lambda value: (-value).log())
"""llama.cpp stores the decay rates, transformers the logarithms of their magnitudes."""
SQUEEZE = _build_step(lambda value: value.squeeze(1), lambda value: value.unsqueeze(1))
"""A depthwise convolution's weight [channels, 1, taps] becomes a matrix."""
COLUMN = _build_step(lambda value: value.unsqueeze(-1), lambda value: value.squeeze(-1))
TRANSPOSE = _build_step(lambda value: value.transpose(-1, -2), lambda value: value.transpose(-1, -2))
HALVES = Step(lambda value: tuple(value.chunk(2, dim=-2)), lambda parts: torch.cat(list(parts), dim=-2))
"""Gate and up projections in one parameter, [..., 2 * width, hidden]."""


def build_interleaving(heads: int) -> Step:
    """Permutes rows of q or k, [heads * head_dim, ...]: rotary pairs (i, i + head_dim / 2) become (2 i, 2 i + 1).

    llama.cpp rotates neighbouring dimensions in some families, transformers the two halves of a head.
    """

    def apply(rows: Tensor) -> Tensor:
        # (heads, 2, head_dim / 2, ...) -> (heads, head_dim / 2, 2, ...)
        return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def undo(rows: Tensor) -> Tensor:
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    return _build_step(apply, undo)


def build_grouping(groups: int) -> Step:
    """Turns the weight of a gated norm, [width], into one row per group."""
    return _build_step(lambda value: value.reshape(groups, -1), lambda value: value.reshape(-1))


def build_tiling(keys: int, repeats: int, size: int, *, dim: int = 0, start: int = 0) -> Step:
    """Reorders value heads: those of one key head are neighbours in transformers, `keys` heads apart in llama.cpp.

    Args:
        keys: number of key heads.
        repeats: value heads per key head.
        size: rows per value head.
        dim: dimension that is reordered.
        start: first row that is reordered.
    """

    def reorder(value: Tensor, outer: int, inner: int) -> Tensor:
        before, heads = value.split([start, value.shape[dim] - start], dim=dim)
        shape = (*heads.shape[:dim], outer, inner, size, *heads.shape[dim + 1 :])
        return torch.cat([before, heads.reshape(shape).transpose(dim, dim + 1).reshape(heads.shape)], dim=dim)

    return _build_step(lambda value: reorder(value, keys, repeats), lambda value: reorder(value, repeats, keys))


def build_row_split(order: Sequence[int], sizes: Sequence[int]) -> Step:
    """Takes the rows of a matrix in another order, and splits them into tensors of these numbers of rows."""
    rows = torch.tensor(order)

    def split(value: Tensor) -> tuple[Tensor, ...]:
        return value.index_select(0, rows.to(value.device)).split(list(sizes))

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).index_select(0, rows.argsort())

    return Step(split, join)


COMMON = (
    Rule(r"experts\.gate_up_proj$", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), HALVES),
    Rule(r"experts\.down_proj$", ("ffn_down_exps.weight",), SAME),
    Rule(r"e_score_correction_bias$", ("exp_probs_b.bias",), SAME),
    Rule(r"\.dt_bias$", ("ssm_dt.bias",), SAME),
)
"""Rules that apply after those of a family."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class _Places:
    """Finds the rule and the tensors of each parameter of a model."""

    def __init__(self, model: PreTrainedModel, architecture: str, rules: Sequence[Rule]) -> None:
        import gguf

        self._architecture, self._rules = architecture, (*rules, *COMMON)
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        self._names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)

    def find(self, name: str) -> tuple[tuple[str, ...], Step]:
        """Returns the names of the parameter's tensors, and the change of its values."""
        rule = next((rule for rule in self._rules if re.search(rule.pattern, name)), Rule("", (), SAME))
        if rule.names:
            layer = _LAYER.search(name)
            return tuple(f"blk.{layer[1]}.{part}" if layer else part for part in rule.names), rule.step
        # gguf maps module names, so the parameter's last component is split off.
        stem, _, last = name.rpartition(".")
        title = self._names.get_name(stem)
        if title is None:
            raise RunError(f"--to gguf: llama.cpp's {self._architecture} has no field for {name}; use --to hf")
        return (f"{title}.{last}",), rule.step


def _list_parameters(model: PreTrainedModel) -> list[str]:
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # llama.cpp uses the embedding if there is no head.
    return [name for name in model.state_dict() if not (tied and name == "lm_head.weight")]


def iterate_tensors(
    model: PreTrainedModel, architecture: str, rules: Sequence[Rule], *, shapes: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the file in fp32, with llama.cpp's names and layout.

    Args:
        shapes: yields tensors without data, for their shapes.

    Raises:
        RunError: llama.cpp has no tensor for a parameter.
    """
    places, state = _Places(model, architecture, rules), model.state_dict()
    for name in _list_parameters(model):
        titles, step = places.find(name)
        value = state[name].detach()
        parts = step.split(value.to("meta") if shapes else value.float())
        for title, part in zip(titles, parts, strict=True):
            yield title, part.contiguous()


def join_tensors(
    model: PreTrainedModel, architecture: str, rules: Sequence[Rule], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the model's parameters from the tensors of a file; `model` is only read for names and shapes."""
    places = _Places(model, architecture, rules)
    parameters = {}
    for name in _list_parameters(model):
        titles, step = places.find(name)
        parameters[name] = step.join([tensors[title] for title in titles])
    return parameters
