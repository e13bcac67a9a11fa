"""AdamW with 8-bit or 4-bit moments: code book indices and one scale per block of elements."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from preheat.ops.distributed.dtensor_utils import local
from preheat.ops.optim.optimizers import StochasticAdamW, adamw_state, keep_

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from preheat.ops.optim.param_groups import ParamGroup


__all__ = ["LowBitAdamW", "code_book", "dequantize", "quantize"]

Bits = Literal[8, 4]


@functools.cache
def code_book(bits: Bits, *, signed: bool) -> tuple[float, ...]:
    """Returns the values of the codes in ascending order, in [-1, 1].

    Dynamic: each decade below 1 has half as many values as the one above, which gives small numbers relative precision
    (Dettmers et al. 2021, arXiv:2110.02861, section 2). 4-bit second moments: evenly spaced without zero, because a
    second moment of 0 makes the update explode (Li et al. 2023, arXiv:2309.01507, section 4).

    Example:
        >>> len(code_book(8, signed=True)), code_book(4, signed=False)[:2]
        (256, (0.0625, 0.125))
    """
    # 1/16 to 1: the smallest code is not 0.
    if bits == 4 and not signed:
        return tuple((i + 1) / 16 for i in range(16))
    # 8 bits reach down to about 3e-7 of a block's largest magnitude, 4 bits to about 5e-3.
    decades = 7 if bits == 8 else 3
    values = [0.0, 1.0]
    for decade in range(decades):
        # A sign costs one bit: half as many magnitudes per decade.
        count = 2 ** (decades - decade - signed)
        # Midpoints of equal intervals between 0.1 and 1, scaled to the decade.
        middles = [0.1 + 0.9 * (i + 0.5) / count for i in range(count)]
        values += [sign * middle * 10**-decade for middle in middles for sign in ((1, -1) if signed else (1,))]
    return tuple(sorted(values))


@functools.cache
def _find_nearest_codes(bits: Bits, *, signed: bool) -> tuple[int, ...]:
    """Returns the nearest code of every fp16 number, indexed by its bits: about 15 times as fast as searching the code
    book.
    """
    import numpy

    book = numpy.array(code_book(bits, signed=signed))
    # Every bit pattern of fp16 once; the index is the pattern read as an unsigned integer.
    numbers: numpy.ndarray = numpy.arange(1 << 16, dtype=numpy.uint16).view(numpy.float16).astype(numpy.float64)
    # Borders are halfway between neighbouring values. NaN becomes 0: its step is skipped by `found_inf`.
    codes: Any = numpy.searchsorted((book[1:] + book[:-1]) / 2, numpy.nan_to_num(numbers))
    return tuple(codes.tolist())


class _Tables:
    """Lookup tables of one moment on a device: the code book and the nearest codes."""

    def __init__(self, bits: Bits, *, signed: bool, device: torch.device):
        self.bits = bits
        book = code_book(bits, signed=signed)
        # 4 bits: a byte holds two codes, the first in the low half; one lookup returns both values.
        values = book if bits == 8 else [(book[i & 15], book[i >> 4]) for i in range(256)]
        self.values = torch.tensor(values, dtype=torch.float32, device=device)
        self.codes = torch.tensor(_find_nearest_codes(bits, signed=signed), dtype=torch.uint8, device=device)


def quantize(x: Tensor, tables: _Tables, block: int) -> tuple[Tensor, Tensor]:
    """Quantizes fp32 `x` [n]; each block is scaled by its largest magnitude.

    Returns:
        codes: uint8 [n], in 4 bits [n / 2]; scales: fp32 [n / block, rounded up].
    """
    count = x.numel()
    # The last block may be shorter; zeros do not change its largest magnitude.
    if rest := -count % block:
        x = torch.nn.functional.pad(x, (0, rest))
    # [blocks, block]
    blocks = x.view(-1, block)
    # Not the infinity norm: torch takes 20 times as long for it on a CPU.
    scales = torch.maximum(blocks.amax(1), blocks.amin(1).neg_())
    # In [-1, 1]; a block of zeros would divide by 0.
    shares = (blocks / scales.clamp(min=1e-38).unsqueeze(1)).view(-1)[:count]
    # int16 is signed: the mask turns the bits of an fp16 number into an index from 0 to 65535.
    codes = tables.codes.index_select(0, shares.half().view(torch.int16).to(torch.int32) & 0xFFFF)
    # Two codes per byte, the first in the low half, as `_Tables` expects.
    return (codes if tables.bits == 8 else codes[::2] | (codes[1::2] << 4)), scales


def dequantize(codes: Tensor, scales: Tensor, tables: _Tables, block: int) -> Tensor:
    """Returns fp32 [n] from the codes and scales of `quantize`."""
    # 4 bits: rows of two values each, [bytes, 2], flat in the order of elements.
    values = tables.values.index_select(0, codes.to(torch.int32)).view(-1)
    # Whole blocks by broadcasting, then the shorter last one.
    full = values.numel() // block
    values[: full * block].view(full, block).mul_(scales[:full].unsqueeze(1))
    if full < scales.numel():
        values[full * block :].mul_(scales[full:])
    return values


def _join_state(share: Tensor, devices: int, like: DTensor) -> Tensor:
    """Wraps this rank's part of a state vector as a DTensor with the placements of `like`."""
    shape = torch.Size([share.numel() * devices])
    return DTensor.from_local(share, like.device_mesh, like.placements, run_check=False, shape=shape, stride=(1,))


class LowBitAdamW(StochasticAdamW):
    """AdamW with 8-bit or 4-bit moments for matrices with at least `least` elements (and an even number of them).

    Each step dequantizes the moments chunk by chunk, updates them with torch's fused kernel in fp32 and quantizes them
    again. bf16 weights are rounded stochastically.

    Args:
        bits: 8 or 4.
        block: elements per scale; must divide `chunk`.
        least: smaller parameters keep fp32 moments, and so do vectors: norms and biases are sensitive and need little
            memory.
        settings: lr, betas, eps, weight_decay, seed, number, chunk.

    Raises:
        ValueError: a parameter is sharded in parts that do not consist of complete blocks, so that its moments would
            differ from those on one device.
    """

    def __init__(
        self,
        groups: ParamsT,
        *,
        bits: Bits = 8,
        block: int = 256,
        least: int = 4096,
        chunk: int = 1 << 18,
        **settings: Any,
    ):
        assert chunk % block == 0
        assert block % 2 == 0
        # Before the base class, whose constructor calls `_state`.
        self.bits: Bits = bits
        self.block, self.least = block, least
        super().__init__(groups, chunk=chunk, **settings)
        device = self._generator.device
        self._tables = {
            "exp_avg": _Tables(bits, signed=True, device=device),
            "exp_avg_sq": _Tables(bits, signed=False, device=device),
        }

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        count = p.numel()
        if p.ndim < 2 or count < self.least or count % 2:
            return adamw_state(p, torch.float32)
        share = self._local_numel(p)
        state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            # The code of 0. The 4-bit second moment has none, but its scale of 0 makes any code 0.
            zero = code_book(self.bits, signed=signed).index(0.0) if signed or self.bits == 8 else 0
            # 17 is 0x11: the code in both halves of the byte.
            codes = torch.full(
                (share * self.bits // 8,), zero * (1 if self.bits == 8 else 17), dtype=torch.uint8, device=p.device
            )
            state |= {name: codes, f"{name}_scale": torch.zeros(-(-share // self.block), device=p.device)}
        if share == count or not isinstance(p, DTensor):
            return state
        return {key: t if key == "step" else _join_state(t, count // share, p) for key, t in state.items()}

    def _local_numel(self, p: Tensor) -> int:
        """Returns the number of a parameter's elements on this rank."""
        share, count = local(p).numel(), p.numel()
        # A replicated DTensor has all elements here.
        if not isinstance(p, DTensor) or share == count:
            return share
        cut = [place for place in p.placements if not place.is_replicate()]
        if all(type(place) is Shard and place.dim == 0 for place in cut) and len(cut) == 1 and share:
            # Only rows that divide equally: then blocks of shards are blocks of the full parameter.
            devices = -(-count // share)
            if p.shape[0] % devices == 0 and share % self.block == 0:
                return share
        raise ValueError(
            f"block_size: a parameter of {tuple(p.shape)} cannot be split into shards of whole blocks of {self.block} "
            f"elements; use a smaller block_size, or min_size: {count + 1}"
        )

    def _slices(self, part: slice) -> tuple[slice, slice]:
        """Returns the slices of the codes and of the scales for a slice of elements."""
        # Chunks begin at multiples of the block, which is even, so no byte is split.
        codes = slice(part.start * self.bits // 8, part.stop * self.bits // 8)
        return codes, slice(part.start // self.block, -(-part.stop // self.block))

    def _moments(self, state: dict[str, Tensor], part: slice) -> tuple[Tensor, Tensor]:
        # A small parameter: its moments are fp32.
        if "exp_avg_scale" not in state:
            return super()._moments(state, part)
        codes, scales = self._slices(part)
        mean, square = (
            dequantize(state[name][codes], state[f"{name}_scale"][scales], tables, self.block)
            for name, tables in self._tables.items()
        )
        return mean, square

    def _remember(self, state: dict[str, Tensor], part: slice, mean: Tensor, square: Tensor) -> None:
        if "exp_avg_scale" not in state:
            return
        codes, scales = self._slices(part)
        for (name, tables), moment in zip(self._tables.items(), (mean, square), strict=True):
            new_codes, scale = quantize(moment, tables, self.block)
            # Guarded by found_inf too: quantizing dequantized values need not reproduce the same codes.
            keep_(state[name][codes], new_codes, self.found_inf)
            keep_(state[f"{name}_scale"][scales], scale, self.found_inf)
