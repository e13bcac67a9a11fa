"""Recurrent mixers of rows that are split across devices: some heads of whole rows each, or whole rows on each.

The projections of a mixer are per position, and its convolution and scan are per head. So each device projects its own
positions, an all-to-all gives it all positions of its heads, a copy of the mixer with these heads' weights computes
them, and a second all-to-all returns the positions to their devices, which apply norm and output projection. This is
done for mixers whose parts are known: Mamba-2, gated delta rules and short convolutions, by their parts and not by
family. Any other mixer gets all positions and computes all of them on each device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from preheat.core import SplitAttention
from preheat.models.shallow_copy import copy_shallow

__all__ = ["count_split_mixers", "HeadSplit", "find_head_split", "mix_heads"]

Columns = tuple[tuple[int, int], ...]
"""Ranges (start, stop) of channels, in order."""


@dataclass(frozen=True)
class HeadSplit:
    """The heads of a mixer that one device computes.

    Attributes:
        projected: for each input projection, the outputs that the device gets.
        convolution: the name of the convolution.
        channels: the channels of the convolution.
        heads: for each parameter with a number per head, the heads.
        sizes: the attributes of the mixer that count heads and channels.
        gate: leading outputs of the first projection that stay on their device, as the gate of its norm.
        output: the name of the output projection.
    """

    projected: Mapping[str, Columns]
    convolution: str
    channels: Columns
    heads: Mapping[str, Columns] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    gate: int = 0
    output: str = "out_proj"


_DELTA_RULES = (
    "in_proj_qkvz in_proj_ba norm out_proj",
    "in_proj_qkv in_proj_z in_proj_b in_proj_a norm out_proj",
    "q_proj k_proj v_proj a_proj b_proj g_proj o_norm o_proj",
)
"""The modules of gated delta rules besides their convolution. Their norm is of each head by itself."""


def count_split_mixers(mixers: Sequence[nn.Module], degree: int) -> tuple[int, int]:
    """Returns the number of mixers whose heads are split across devices, and of those that each computes whole."""
    split = sum(find_head_split(mixer, degree, 0) is not None for mixer in mixers)
    return split, len(mixers) - split


def find_head_split(mixer: nn.Module, degree: int, rank: int) -> HeadSplit | None:
    """Returns the heads of a mixer that a device computes; None: they cannot be split, so each computes all of them."""
    return next(
        (
            split
            for find in (_split_mamba, _split_delta_rule, _split_convolution)
            if (split := find(mixer, degree, rank)) is not None
        ),
        None,
    )


def _has_parts(mixer: nn.Module, children: str, parameters: str = "") -> bool:
    """True if a mixer consists of these modules and parameters, and of nothing else that has a state."""
    modules = {name for name, module in mixer.named_children() if name != "act"}
    return (
        modules == set(children.split())
        and set(mixer._parameters) == set(parameters.split())
        and set(mixer._buffers) <= {"mup_vector"}
    )


def _own(start: int, size: int, degree: int, rank: int) -> tuple[int, int]:
    """This device's range of `size` channels that begin at `start`."""
    part = size // degree
    return start + rank * part, start + (rank + 1) * part


def _split_mamba(mixer: Any, degree: int, rank: int) -> HeadSplit | None:
    """Mamba-2: its input projection gives a gate, the heads' inputs, states B and C of each group, and time steps."""
    if not _has_parts(mixer, "in_proj conv1d norm out_proj", "dt_bias A_log D"):
        return None
    heads, groups, state, inner = mixer.num_heads, mixer.n_groups, mixer.ssm_state_size, mixer.intermediate_size
    # A group is cut out for each of the devices that share it.
    if heads % degree or (groups % degree and degree % groups) or inner != heads * mixer.head_dim:
        return None
    own_groups = max(groups // degree, 1)
    first = rank * groups // degree * state
    states = [(start + first, start + first + own_groups * state) for start in (inner, inner + groups * state)]
    channels = (_own(0, inner, degree, rank), *states)
    # Without a norm the gate is applied head by head (Falcon-H1).
    gate = 0 if isinstance(mixer.norm, nn.Identity) else inner
    end = inner + mixer.conv_dim
    sent = () if gate else (_own(0, inner, degree, rank),)
    own_heads = (_own(0, heads, degree, rank),)
    return HeadSplit(
        projected={"in_proj": (*sent, *((inner + a, inner + b) for a, b in channels), _own(end, heads, degree, rank))},
        convolution="conv1d",
        channels=channels,
        heads=dict.fromkeys(("dt_bias", "A_log", "D"), own_heads),
        sizes={
            "num_heads": heads // degree,
            "n_groups": own_groups,
            "intermediate_size": inner // degree,
            "conv_dim": _count(channels),
        },
        gate=gate,
    )


def _split_delta_rule(mixer: Any, degree: int, rank: int) -> HeadSplit | None:
    """Gated delta rules, whose families project in two, four or six maps: Qwen3-Next, Qwen3.5, OLMo Hybrid."""
    maps = next((names for names in _DELTA_RULES if _has_parts(mixer, f"{names} conv1d", "dt_bias A_log")), None)
    if maps is None or mixer.num_k_heads % degree or mixer.num_v_heads % mixer.num_k_heads:
        return None
    keys, values, heads = mixer.key_dim, mixer.value_dim, mixer.num_v_heads
    own_keys, own_values, own_heads = (_own(0, n, degree, rank) for n in (keys, values, heads))
    channels = (own_keys, _own(keys, keys, degree, rank), _own(2 * keys, values, degree, rank))
    columns: dict[str, Columns] = {
        # Qwen3-Next: all that belongs to a head of keys is in one block.
        "in_proj_qkvz": (_own(0, 2 * keys + 2 * values, degree, rank),),
        "in_proj_ba": (_own(0, 2 * heads, degree, rank),),
        "in_proj_qkv": channels,
        **dict.fromkeys(("q_proj", "k_proj"), (own_keys,)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (own_values,)),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj"), (own_heads,)),
    }
    sizes = ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim")
    return HeadSplit(
        projected={name: columns[name] for name in maps.split() if name in columns},
        convolution="conv1d",
        channels=channels,
        heads=dict.fromkeys(("dt_bias", "A_log"), (own_heads,)),
        sizes={name: getattr(mixer, name) // degree for name in sizes},
        output="o_proj" if "o_proj" in maps else "out_proj",
    )


def _split_convolution(mixer: Any, degree: int, rank: int) -> HeadSplit | None:
    """Short convolutions with a gate before and one after: each channel is a head."""
    if not _has_parts(mixer, "conv in_proj out_proj") or mixer.conv.in_channels % degree:
        return None
    width = mixer.conv.in_channels
    return HeadSplit(
        projected={"in_proj": tuple(_own(n * width, width, degree, rank) for n in range(3))},
        convolution="conv",
        channels=(_own(0, width, degree, rank),),
    )


def mix_heads(
    mixer: nn.Module,
    hidden: Tensor,
    attention: SplitAttention,
    mix_documents: Callable[[Tensor, Callable[[Tensor], Any]], Any],
) -> Tensor:
    """Computes a mixer whose heads are split across devices.

    Args:
        mixer: one of which `find_head_split` returns a part.
        hidden: [rows, positions, width], this device's positions.
        mix_documents: (x, mix) -> out: applies a function of sequences to each document of whole rows.

    Returns:
        [rows, positions, width].
    """
    splits = [find_head_split(mixer, attention.degree, rank) for rank in range(attention.degree)]
    own = splits[attention.rank]
    assert own is not None
    projected = _project(mixer, own.projected, hidden)
    # Contiguous: the norm keeps its gate for the backward pass, and a view would keep all that is projected.
    gate = next(iter(projected.values()))[..., : own.gate].contiguous() if own.gate else None
    # [rows, positions, devices * channels]: the channels of each device one after another, of all projections.
    sent = [_select(projected[name], split.projected[name], -1) for split in splits if split for name in own.projected]
    del projected
    received = attention.exchange_channels(torch.cat(sent, dim=-1))
    del sent
    mixed = mix_documents(received, functools.partial(type(mixer).forward, _copy_heads(mixer, own)))
    out = attention.exchange_positions(mixed)
    if gate is not None:
        out = mixer.get_submodule("norm")(out, gate)
    result: Tensor = getattr(mixer, own.output)(out.to(hidden.dtype))
    return result


def _project(mixer: Any, names: Iterable[str], hidden: Tensor) -> dict[str, Tensor]:
    """Applies the input projections of a mixer. Falcon-H1 scales what goes into and comes out of its only one."""
    if not hasattr(mixer, "mup_vector"):
        return {name: getattr(mixer, name)(hidden) for name in names}
    return {name: getattr(mixer, name)(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector for name in names}


class _Received(nn.Module):
    """Stands for an input projection of which the mixer gets the results."""

    def __init__(self, start: int, stop: int, gate: int):
        super().__init__()
        self.start, self.stop, self.gate = start, stop, gate

    def forward(self, x: Tensor) -> Tensor:
        own = x[..., self.start : self.stop]
        # The mixer splits a gate from the front, which only its norm would read.
        return nn.functional.pad(own, (self.gate, 0)) if self.gate else own


class _PassedOn(nn.Module):
    """Stands for the norm and the output projection, which the devices apply to their own positions."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x


def _copy_heads(mixer: nn.Module, own: HeadSplit) -> nn.Module:
    """Returns a mixer with the weights of one device's heads: slices of those of the whole mixer, with gradients."""
    part = copy_shallow(mixer)
    # With `training`, fused kernels of Mamba-2 would take the output projection's weight past its module.
    part.training = False
    start = 0
    for name, columns in own.projected.items():
        stop = start + _count(columns)
        part._modules[name] = _Received(start, stop, own.sizes["intermediate_size"] if own.gate else 0)
        start = stop
    convolution: Any = copy_shallow(part.get_submodule(own.convolution))
    convolution.groups = convolution.in_channels = convolution.out_channels = _count(own.channels)
    for name, value in convolution._parameters.items():
        convolution._parameters[name] = value if value is None else _select(value, own.channels, 0)
    for name, heads in own.heads.items():
        part._parameters[name] = _select(getattr(mixer, name), heads, 0)  # type: ignore[assignment]
    part._modules |= {own.convolution: convolution, own.output: _PassedOn()}
    if own.gate:
        part._modules["norm"] = _PassedOn()
    part._buffers.pop("mup_vector", None)
    part.__dict__ |= dict(own.sizes) | {"ssm_in_multiplier": 1.0, "mup_vector": 1.0}
    return part


def _count(columns: Columns) -> int:
    return sum(stop - start for start, stop in columns)


def _select(x: Tensor, columns: Columns, dim: int) -> Tensor:
    """Returns the channels of a tensor in these ranges."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in columns], dim=dim)
