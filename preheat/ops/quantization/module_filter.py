"""Selects the layers to quantize, those kept in high precision, and each layer's group size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from preheat.errors import suggest_nearest
from preheat.ops.quantization.grids import nearest_divisor

__all__ = ["AUTO", "GROUP", "group_of", "select_kept", "find_linear_maps"]

AUTO = "auto"
GROUP = 32
"""Group size of `auto` if it divides the inputs: that of llama.cpp's Q4_0 and ExecuTorch's 8da4w."""


def find_linear_maps(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the plain linear layers of a model by name."""
    # Exact types: a subclass may compute something else from its weight.
    return {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)}


def select_kept(names: Iterable[str], keep: str | Sequence[str], roles: Mapping[str, Sequence[str]]) -> set[str]:
    """Returns the `names` that `keep` selects.

    Args:
        names: names of the modules that could be quantized.
        keep: entries that are a role, a name suffix (`down_proj`, `mlp.down_proj`), or a regular expression for full
            names.
        roles: module names of the roles embedding, head, first and last in this model.

    Raises:
        ValueError: an entry matches nothing; the message suggests the closest match.

    Example:
        >>> sorted(select_kept(["a.up", "a.down", "b.up"], ["up"], {}))
        ['a.up', 'b.up']
    """
    names = list(names)
    matches: set[str] = set()
    for entry in (keep,) if isinstance(keep, str) else keep:
        matched = [name for name in names if name in roles[entry]] if entry in roles else _match_names(names, entry)
        # A role may select nothing in a model; a name that matches nothing is misspelled.
        if not matched and entry not in roles:
            known = sorted({name.rpartition(".")[2] for name in names} | set(roles))
            raise ValueError(
                f"keep: {entry!r} matches no linear map or embedding of the model; {suggest_nearest(entry, known)}"
            )
        matches.update(matched)
    return matches


def _match_names(names: Sequence[str], entry: str) -> list[str]:
    try:
        pattern = re.compile(entry)
    except re.error as error:
        raise ValueError(f"keep: {entry!r} is not a regular expression ({error})") from None
    # A suffix of whole name parts, so that `proj` does not select `q_proj`.
    return [name for name in names if name == entry or name.endswith(f".{entry}") or pattern.fullmatch(name)]


def group_of(name: str, inputs: int, group: int | str) -> int:
    """Returns the number of inputs per scale in one layer.

    Args:
        group: a divisor of `inputs`, or auto: the divisor nearest to 32.

    Raises:
        ValueError: `group` does not divide `inputs`; the message names the layer and the closest divisor.

    Example:
        >>> group_of("down_proj", 172, "auto")
        43
    """
    if group == AUTO:
        return nearest_divisor(inputs, GROUP)
    wanted = int(group)
    if inputs % wanted:
        raise ValueError(
            f"group: {wanted} does not divide the {inputs} inputs of {name}; the closest that does is "
            f"{nearest_divisor(inputs, wanted)}; "
            f"use group=auto for each map's own, or keep the map ({name.rpartition('.')[2]})"
        )
    return int(wanted)
