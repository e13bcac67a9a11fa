"""NF4 weights: 4-bit quantization of frozen linear layers (Dettmers et al. 2023, arXiv:2305.14314).

Each block of 64 weights is divided by its largest magnitude and rounded to the nearest of 16 levels. Double
quantization also stores the block scales, less their mean, in 8 bits in blocks of 256: 0.516 bytes per weight in total.
The results equal bitsandbytes', but plain torch runs on any device and under fake tensors. On CUDA one Triton kernel
dequantizes the same bytes: on an H100 in 0.056 ms for 58.7 million weights, where bitsandbytes' three take 0.079.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from preheat.ops.cuda_kernels import is_plain, name_failures
from preheat.ops.distributed.dtensor_utils import full_tensor, local, local_shard
from preheat.ops.quantization.packed import FrozenPackedMap

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext


__all__ = [
    "BLOCK",
    "LEVELS",
    "SCALES",
    "Packed",
    "PackedConv1D",
    "PackedLinear",
    "PackedMap",
    "Tables",
    "dequantize",
    "dynamic_levels",
    "fill",
    "pack_",
    "pack_parameter",
    "quantize",
    "build_tables",
    "unpack_",
]

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)  # arXiv:2305.14314, appendix E
BLOCK, SCALES = 64, 256  # weights per scale; scales per range
_CHUNK = 1 << 16  # blocks per iteration, which bounds the scratch memory


class Packed(NamedTuple):
    """A weight in NF4. `scales` and `ranges` store fp32 bits as int32, so that casting a model's floats does not round
    them.

    Attributes:
        codes: uint8 [blocks * 32], two weights per byte, the first in the high half.
        scales: one per block: uint8 with double quantization, else fp32 bits.
        ranges: fp32 bits [blocks of scales + 1], the scales' mean last; None without double quantization.
    """

    codes: Tensor
    scales: Tensor
    ranges: Tensor | None


class Tables(NamedTuple):
    """Lookup tables. pairs: fp32 [256, 2], two weights per byte; scales: fp32 [256], the levels of an 8-bit scale."""

    pairs: Tensor
    scales: Tensor


def dynamic_levels() -> Tensor:
    """Returns the 256 levels of dynamic tree quantization, ascending (arXiv:2110.02861, section 2.2).

    Each is a sign, a power of ten and a linear fraction.
    """
    # Seven decades from 1e-7 to 1, each with twice the levels of the one below: 127 positive levels, as many negative
    # ones, 0 and 1.
    positive = []
    for exponent in range(7):
        # Levels are the midpoints of equal steps from 0.1 to 1, times the power of ten.
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6))
    levels = torch.cat(positive)
    return torch.cat([levels, -levels, torch.tensor([0.0, 1.0])]).sort().values


def build_tables(device: torch.device | str | None = None) -> Tables:
    """Returns the lookup tables of `dequantize`."""
    levels = torch.tensor(LEVELS)
    # A lookup per byte gives two weights at once: [256, 2], the high half first.
    byte = torch.arange(256)
    on_host = Tables(torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1), dynamic_levels())
    return Tables(*(t.to(device) for t in on_host))


def _find_nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """Returns the int32 index of the nearest level."""
    # The nearest of sorted levels changes at the midpoints between neighbors.
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2, out_int32=True)


def _split_blocks(flat: Tensor, size: int) -> Tensor:
    """Reshapes to [n, size], padding the last row with zeros."""
    if flat.numel() % size == 0:  # padding copies, also by nothing
        return flat.view(-1, size)
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def quantize(value: Tensor, *, double: bool = True, device: torch.device | None = None) -> Packed:
    """Quantizes a weight to NF4.

    Args:
        device: of the result; the value is moved there in parts. Default: the value's.

    Example:
        >>> packed = quantize(torch.randn(64, 64))
        >>> packed.codes.numel(), packed.scales.dtype
        (2048, torch.uint8)
    """
    device = device or value.device
    levels = torch.tensor(LEVELS, device=device)
    codes, scales = [], []
    for part in _split_blocks(value.detach().float().reshape(-1), BLOCK).split(_CHUNK):  # [blocks, 64]
        blocks = part.to(device)
        scale = blocks.abs().amax(dim=1)  # [blocks]
        # A block of zeros has scale 0: `tiny` avoids 0 / 0, and its weights get the level 0.
        indices = _find_nearest_level(blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None], levels).to(
            torch.uint8
        )
        codes.append(indices[:, 0::2] << 4 | indices[:, 1::2])  # [blocks, 32]
        scales.append(scale)
    scale = torch.cat(scales)
    packed = torch.cat(codes).view(-1)
    if not double:
        return Packed(packed, scale.view(torch.int32), None)
    # Scales are all positive; less their mean, they use the negative levels too.
    mean = scale.mean()
    centred = _split_blocks(scale - mean, SCALES)  # [ranges, 256]
    largest = centred.abs().amax(dim=1)
    small = _find_nearest_level(
        centred / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None], dynamic_levels().to(device)
    )
    return Packed(
        packed,
        # Cloned, so that the padding of the last range is not kept alive.
        small.to(torch.uint8).view(-1)[: scale.numel()].clone(),
        torch.cat([largest, mean[None]]).view(torch.int32),
    )


def dequantize(packed: Packed, shape: tuple[int, ...], dtype: torch.dtype, look: Tables) -> Tensor:
    """Dequantizes an NF4 weight to `shape`; multiplies in fp32 and rounds once to `dtype`."""
    values = _dequantize_values(packed.codes, packed.scales, packed.ranges, look.pairs, look.scales, dtype)
    # The last block may be padded with zeros.
    return values[: prod(shape)].view(shape)


# A custom operator, so that a dry run sees a single kernel, as on CUDA, and does not iterate over the chunks.
@torch.library.custom_op("preheat::nf4_values", mutates_args=())
def _dequantize_values(
    codes: Tensor, scales: Tensor, ranges: Tensor | None, pairs: Tensor, levels: Tensor, dtype: torch.dtype
) -> Tensor:
    if codes.is_cuda and not is_plain("nf4_values"):
        with name_failures("nf4_values"):
            return dequantize_by_triton(codes, scales, ranges, pairs, levels, dtype)
    codes = codes.view(-1, BLOCK // 2)  # [blocks, 32]
    out = torch.empty(codes.shape[0], BLOCK, dtype=dtype, device=codes.device)
    for start in range(0, codes.shape[0], _CHUNK):
        rows = slice(start, start + _CHUNK)
        # [chunk, 32] bytes -> [chunk, 32, 2] levels -> [chunk, 64] weights
        values = F.embedding(codes[rows].int(), pairs).view(-1, BLOCK)
        out[rows] = values.mul_(_dequantize_scales(scales, ranges, levels, rows)[:, None])
    return out.view(-1)


@_dequantize_values.register_fake
def _(
    codes: Tensor, scales: Tensor, ranges: Tensor | None, pairs: Tensor, levels: Tensor, dtype: torch.dtype
) -> Tensor:
    # The plain loop's scratch is left out: on CUDA one kernel writes the result alone.
    return codes.new_empty(codes.numel() * 2, dtype=dtype)


def _dequantize_scales(scales: Tensor, ranges: Tensor | None, levels: Tensor, rows: slice) -> Tensor:
    """Returns the fp32 scales of the blocks `rows`, which must start at a range boundary."""
    if ranges is None:
        return scales.view(torch.float32)[rows]
    largest, small = ranges.view(torch.float32), scales[rows]
    first = rows.start // SCALES
    # Range maxima, repeated for each of the 256 scales that they cover.
    each = largest[first : first + -(-small.numel() // SCALES), None].expand(-1, SCALES).reshape(-1)[: small.numel()]
    return levels.index_select(0, small.int()) * each + largest[-1]  # the mean is stored last


def dequantize_by_triton(
    codes: Tensor, scales: Tensor, ranges: Tensor | None, pairs: Tensor, levels: Tensor, dtype: torch.dtype
) -> Tensor:
    """Dequantizes with our Triton kernel. Without fused multiply-add the result is bit-identical to the CPU's."""
    from preheat.ops.triton_kernels import nf4_kernel

    out, count, step = codes.new_empty(codes.numel() * 2, dtype=dtype), codes.numel(), 1024
    # Exactly one of them holds fp32 bits: scales, or ranges with double quantization.
    fp32 = scales.view(torch.float32) if ranges is None else ranges.view(torch.float32)
    with torch.cuda.device_of(codes):
        nf4_kernel[(-(-count // step),)](
            *(codes, fp32 if ranges is None else scales, fp32, pairs, levels, out, count, fp32.numel() - 1),
            DOUBLE=ranges is not None,
            BYTES=step,
            enable_fp_fusion=False,
        )
    return out


class _Product(torch.autograd.Function):
    """x W^T (or x W) with W in NF4; forward and backward each dequantize W temporarily."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, shape: tuple[int, int], transposed: bool, *tensors: Tensor | None
    ) -> Tensor:  # type: ignore[override]
        # The packed bytes are saved, never the dequantized weight, which is four times as large in bf16.
        ctx.save_for_backward(*tensors)
        ctx.shape, ctx.transposed = shape, transposed
        # Three packed tensors and two tables.
        weight = dequantize(Packed(*tensors[:3]), shape, x.dtype, Tables(*tensors[3:]))  # type: ignore[arg-type]
        return F.linear(x, weight.t() if transposed else weight)

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors
        weight = dequantize(Packed(*tensors[:3]), ctx.shape, slope.dtype, Tables(*tensors[3:]))
        # The base is frozen: only x has a gradient, slope W. Conv1D stores W transposed.
        return F.linear(slope, weight if ctx.transposed else weight.t()), *(None,) * 7


class PackedMap(FrozenPackedMap):
    """Base of the NF4 linear layers."""

    packed_names = ("nf4_codes", "nf4_scales", "nf4_ranges")
    nf4_codes: Tensor
    nf4_scales: Tensor
    nf4_ranges: Tensor | None
    nf4_pairs: Tensor
    nf4_levels: Tensor
    nf4_shape: tuple[int, int]
    nf4_draft: Tensor | None

    @property
    def full_shape(self) -> tuple[int, int]:
        return self.nf4_shape

    @property
    def weight(self) -> Tensor:
        # While `written` is open, reads see the values that are being written.
        if self.nf4_draft is not None:
            return self.nf4_draft
        if self.nf4_codes.is_meta:  # no values: peft reads it often while it adds adapters
            weight = torch.empty(self.nf4_shape, dtype=torch.float32, device="meta")
            weight._is_hf_initialized = True  # type: ignore[attr-defined]
            return weight
        packed = Packed(*(None if t is None else full_tensor(t) for t in self._packed()))  # type: ignore[arg-type]
        weight = dequantize(packed, self.nf4_shape, torch.float32, self._tables())
        if not torch.compiler.is_compiling():
            # Keeps transformers from reinitializing this copy.
            weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    def _packed(self) -> Packed:
        return Packed(self.nf4_codes, self.nf4_scales, self.nf4_ranges)

    def _tables(self) -> Tables:
        return Tables(self.nf4_pairs, self.nf4_levels)

    weight_names = ("weight",)

    @contextmanager
    def written(self, name: str = "weight") -> Iterator[Tensor]:
        """Context manager that yields the full weight for writing and quantizes it on exit."""
        self.nf4_draft = torch.empty(self.nf4_shape, dtype=torch.float32, device=self.nf4_codes.device)
        try:
            yield self.nf4_draft
            new = quantize(self.nf4_draft, double=self.nf4_ranges is not None)
        finally:
            self.nf4_draft = None
        # Not reached after an error, so that a failed write leaves the old codes.
        self.fill_(new)

    def fill_(self, packed: Packed) -> None:
        """Copies a packed weight into the layer; sharded parameters take their part.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype.
        """
        for name, old, value in zip(Packed._fields, self._packed(), packed, strict=True):
            if old is not None and (value is None or (value.shape, value.dtype) != (old.shape, old.dtype)):
                shape = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(f"{name}: {shape} for {old.dtype} {tuple(old.shape)}")
        fill(self._packed(), packed)
        # They are uninitialized in a module that was built on meta.
        fill(self._tables(), build_tables(self.nf4_codes.device))

    def multiply(self, x: Tensor) -> Tensor:
        return _Product.apply(  # type: ignore[no-any-return]
            x, self.nf4_shape, isinstance(self, Conv1D), *self._packed(), *self._tables()
        )

    def unpack_(self) -> None:
        unpack_(self)


class PackedLinear(PackedMap, nn.Linear):  # type: ignore[misc,override]
    """A Linear in NF4. It stays a Linear, so that peft can adapt it."""


class PackedConv1D(PackedMap, Conv1D):  # type: ignore[misc]
    """GPT-2's Conv1D, [in, out], in NF4."""


def fill(old: Packed | Tables, new: Packed | Tables) -> None:
    """Copies the tensors of a packed weight, or tables, into those of a module; sharded ones take their part."""
    with torch.no_grad():
        for target, value in zip(old, new, strict=True):
            if target is not None and value is not None:
                local(target).copy_(local_shard(value, target))


def pack_parameter(weight: Tensor, *, double: bool) -> Packed:
    """Returns a weight of any shape in NF4; of one on meta, tensors on meta."""
    if weight.device.type != "meta":
        return quantize(weight, double=double)
    blocks = -(-weight.numel() // BLOCK)
    ranges = torch.empty(-(-blocks // SCALES) + 1, dtype=torch.int32, device="meta") if double else None
    scales = torch.empty(blocks, dtype=torch.uint8 if double else torch.int32, device="meta")
    return Packed(torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device="meta"), scales, ranges)


_CLASSES: dict[type[nn.Module], type[PackedMap]] = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}


def pack_(maps: list[nn.Module], *, double: bool = True) -> int:
    """Quantizes the weights of linear layers to NF4 in place (on meta, only the shapes). Returns the number of weights.

    Args:
        maps: modules of exactly the types nn.Linear and Conv1D.
    """
    # Shared by all layers.
    look = build_tables(next((m._parameters["weight"].device for m in maps), None))  # type: ignore[union-attr]
    count = 0
    for module in maps:
        weight: Tensor = module._parameters.pop("weight")  # type: ignore[assignment]
        count += weight.numel()
        new = pack_parameter(weight, double=double)
        # Only the class changes, so that references and names stay valid.
        module.__class__ = _CLASSES[type(module)]
        assert isinstance(module, PackedMap)
        module.nf4_shape, module.nf4_draft = tuple(weight.shape), None  # type: ignore[assignment]
        for name, value in zip(PackedMap.packed_names, new, strict=True):
            module.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))
        # Not saved, since the tables are constants.
        module.register_buffer("nf4_pairs", look.pairs, persistent=False)
        module.register_buffer("nf4_levels", look.scales, persistent=False)
    return count


def unpack_(module: PackedMap) -> None:
    """Turns an NF4 layer back into a plain one with an fp32 weight, in place."""
    # Read first, since the property needs all that is deleted below.
    weight = module.weight
    for name in PackedMap.packed_names:
        del module._parameters[name]
    for name in ("nf4_pairs", "nf4_levels"):
        del module._buffers[name]
        # `del` of the buffer leaves its name in this set.
        module._non_persistent_buffers_set.discard(name)
    del module.nf4_shape, module.nf4_draft
    module.__class__ = nn.Linear if type(module) is PackedLinear else Conv1D  # type: ignore[assignment]
    module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
