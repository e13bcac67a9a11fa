"""Frozen MoE experts in 4 bits: each layer's stacks of matrices in NF4, or in MXFP4 as a folder has them.

A grouped matmul dequantizes a stack, uses it and drops it; the backward pass dequantizes it again. So one stack at a
time is in full precision: 0.8 GB in bf16 for the 128 experts of a layer of Qwen3 30B-A3B.

MXFP4 (OCP Microscaling Formats 1.0): 32 successive inputs share a scale, a power of two in 8 bits; each is one of 16
values of e2m1 (sign, 2 bits of exponent, 1 of mantissa).
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from preheat.ops.distributed.dtensor_utils import full_tensor, local, local_shard
from preheat.ops.grouped_mm import grouped_back, grouped_linear, stacks_of
from preheat.ops.quantization import nf4
from preheat.ops.quantization.packed import FrozenPacked

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext

__all__ = [
    "MXFP4_BLOCK",
    "Mxfp4Experts",
    "Nf4Experts",
    "PackedExperts",
    "dequantize_mxfp4",
    "pack_experts_",
    "pack_modules_",
    "pack_mxfp4_",
]

MXFP4_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CHUNK = 1 << 16  # blocks of MXFP4 per iteration, which bounds the scratch memory


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantizes MXFP4.

    Args:
        blocks: uint8 [..., blocks, 16], two values in a byte, the first in the low half.
        scales: uint8 [..., blocks], exponents of 2 plus 127.

    Returns:
        [..., blocks * 32]

    Example:
        >>> dequantize_mxfp4(torch.full((1, 16), 0x91, dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8),
        ...                  torch.float32)[:4].tolist()
        [1.0, -1.0, 1.0, -1.0]
    """
    return _dequantize_blocks(blocks, scales, dtype).flatten(-2)


@functools.cache
def _build_pairs(device: str) -> Tensor:
    """Returns the two values of each byte, fp32 [256, 2]; once for a device, as a copy there waits for it."""
    levels = torch.tensor([*_E2M1, *(-level for level in _E2M1)])
    byte = torch.arange(256)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1).to(device)


# A custom operator, so that a dry run sees a single kernel and does not iterate over the chunks.
@torch.library.custom_op("preheat::mxfp4_values", mutates_args=())
def _dequantize_blocks(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = _build_pairs(str(blocks.device))
    flat, exponents = blocks.reshape(-1, MXFP4_BLOCK // 2), scales.reshape(-1)
    out = torch.empty(len(flat), MXFP4_BLOCK, dtype=dtype, device=blocks.device)
    for start in range(0, len(flat), _CHUNK):
        part = slice(start, start + _CHUNK)
        values = nn.functional.embedding(flat[part].int(), pairs).view(-1, MXFP4_BLOCK)
        out[part] = torch.ldexp(values, exponents[part].int()[:, None] - 127)
    return out.view(*scales.shape, MXFP4_BLOCK)


@_dequantize_blocks.register_fake
def _(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    # The scratch of a chunk is left out.
    return blocks.new_empty(*scales.shape, MXFP4_BLOCK, dtype=dtype)


class _Form(NamedTuple):
    """Describes how a stack of matrices is packed.

    Attributes:
        is_nf4: in NF4; else in MXFP4.
        shape: of the stack as the model has it.
        is_transposed: the model has [experts, in, out]; else [experts, out, in].
    """

    is_nf4: bool
    shape: tuple[int, int, int]
    is_transposed: bool


def _unpack(form: _Form, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Returns the stack [experts, out, in]."""
    if not form.is_nf4:
        blocks, scales = tensors
        assert blocks is not None
        assert scales is not None
        return dequantize_mxfp4(blocks, scales, dtype)
    codes, exponents, ranges, *tables = tensors
    stack = nf4.dequantize(nf4.Packed(codes, exponents, ranges), form.shape, dtype, nf4.Tables(*tables))  # type: ignore[arg-type]
    return stack.transpose(1, 2) if form.is_transposed else stack


def _unpack_rows(form: _Form, tensors: Sequence[Tensor | None], expert: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrices of some experts, [n, out, in].

    Args:
        expert: [n], the expert of each.
    """
    experts, *sides = form.shape
    if not form.is_nf4:
        blocks, scales = (t.index_select(0, expert) for t in tensors if t is not None)
        return dequantize_mxfp4(blocks, scales, dtype)
    codes, small, ranges, *tables = tensors
    assert codes is not None
    assert small is not None
    each = prod(sides) // nf4.BLOCK  # blocks of an expert
    block = expert[:, None] * each + torch.arange(each, device=expert.device)
    scales = small[block]
    if ranges is not None:
        # A range may hold scales of two experts, so that the scales are dequantized here.
        largest, levels = ranges.view(torch.float32), tables[1]
        assert levels is not None
        scales = (levels[scales.int()] * largest[block // nf4.SCALES] + largest[-1]).view(torch.int32)
    packed = nf4.Packed(codes.view(experts, -1).index_select(0, expert).view(-1), scales.view(-1), None)
    matrices = nf4.dequantize(packed, (len(expert), *sides), dtype, nf4.Tables(*tables))  # type: ignore[arg-type]
    return matrices.transpose(1, 2) if form.is_transposed else matrices


class _Product(torch.autograd.Function):
    """The rows of each expert times its matrix; forward and backward each dequantize the stack temporarily."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, ends: Tensor, form: _Form, *tensors: Tensor | None) -> Tensor:  # type: ignore[override]
        # The packed bytes are saved, never the stack.
        ctx.save_for_backward(ends, *tensors)
        ctx.form = form
        return grouped_linear(rows, _unpack(form, tensors, rows.dtype), ends)

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ends, *tensors = ctx.saved_tensors
        # The experts are frozen: only the rows have a gradient.
        back = grouped_back(slope, _unpack(ctx.form, tensors, slope.dtype), ends)
        return back, None, None, *(None,) * len(tensors)


class PackedExperts(FrozenPacked):
    """A layer's experts with packed weight stacks; each class is a subclass of one of these and of the model's own.

    Attributes:
        parts: of the packed tensors of a stack, by which their parameters are named: `mxfp4_down_proj_scales`.
        packed_shapes: the shape of each stack, by its name.
    """

    kind: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    packed_shapes: dict[str, tuple[int, int, int]]
    is_transposed: bool

    @property
    def gate_up_proj(self) -> Tensor:
        return self._read("gate_up_proj")

    @property
    def up_proj(self) -> Tensor:
        return self._read("up_proj")

    @property
    def down_proj(self) -> Tensor:
        return self._read("down_proj")

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the packed stacks."""
        return tuple(self.packed_shapes)

    @abstractmethod
    def tensors(self, name: str) -> tuple[Tensor | None, ...]:
        """Returns the packed tensors of a stack."""

    def parameters_of(self, name: str) -> tuple[Tensor | None, ...]:
        """Returns the parameters of a stack, in the order of `parts`."""
        return tuple(self._parameters[f"{self.kind}_{name}_{part}"] for part in self.parts)

    def _form(self, name: str) -> _Form:
        return _Form(self.kind == "nf4", self.packed_shapes[name], self.is_transposed)

    def _read(self, name: str) -> Tensor:
        if name not in self.packed_shapes:
            raise AttributeError(name)
        tensors = tuple(None if t is None else full_tensor(t) for t in self.tensors(name))
        if tensors[0].is_meta:  # type: ignore[union-attr]
            stack = torch.empty(self.packed_shapes[name], dtype=torch.float32, device="meta")
        else:
            stack = _unpack(self._form(name), tensors, torch.float32)
            stack = stack.transpose(1, 2).contiguous() if self.is_transposed else stack
        if not torch.compiler.is_compiling():
            # Keeps transformers from reinitializing this copy.
            stack._is_hf_initialized = True  # type: ignore[attr-defined]
        return stack

    def multiply_packed(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiplies rows by their experts' matrices of a stack; arguments as of `grouped_mm.grouped_linear`."""
        experts, *sides = self.packed_shapes[name]
        # The few rows of a generated token: only the matrices that they meet.
        if len(rows) < experts and not torch.is_grad_enabled() and prod(sides) % nf4.BLOCK == 0:
            expert = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)
            matrices = _unpack_rows(self._form(name), self.tensors(name), expert, rows.dtype)
            return torch.bmm(matrices, rows[:, :, None])[..., 0]
        return _Product.apply(rows, ends, self._form(name), *self.tensors(name))  # type: ignore[no-any-return]

    def count_weights(self) -> int:
        return sum(map(prod, self.packed_shapes.values()))

    def unpack_(self) -> None:
        stacks = {name: getattr(self, name) for name in self.packed_shapes}
        for name in self.packed_names:
            del self._parameters[name]
        del self.packed_shapes, self.packed_names
        self.__class__ = type(self).__bases__[1]
        for name, stack in stacks.items():
            self.register_parameter(name, nn.Parameter(stack, requires_grad=False))


class Nf4Experts(PackedExperts):
    """A layer's experts in NF4."""

    kind, parts = "nf4", nf4.Packed._fields
    nf4_pairs: Tensor
    nf4_levels: Tensor
    nf4_drafts: dict[str, Tensor]

    def tensors(self, name: str) -> tuple[Tensor | None, ...]:
        return *self.parameters_of(name), self.nf4_pairs, self.nf4_levels

    def _read(self, name: str) -> Tensor:
        # While `written` is open, reads see the values that are being written.
        draft = self.nf4_drafts.get(name)
        return super()._read(name) if draft is None else draft

    @contextmanager
    def written(self, name: str) -> Iterator[Tensor]:
        """Context manager that yields a full stack in host memory for writing, and quantizes it on exit.

        A stack in fp32 can be larger than all packed layers: 1.6 GB for Qwen3 30B-A3B.
        """
        device = self.nf4_pairs.device
        draft = self.nf4_drafts[name] = torch.empty(self.packed_shapes[name], dtype=torch.float32)
        packed = nf4.Packed(*self.parameters_of(name))  # type: ignore[arg-type]
        try:
            yield draft
            new = nf4.quantize(draft, double=packed.ranges is not None, device=device)
        finally:
            del self.nf4_drafts[name]
        nf4.fill(packed, new)
        nf4.fill(nf4.Tables(self.nf4_pairs, self.nf4_levels), nf4.build_tables(device))

    def unpack_(self) -> None:
        super().unpack_()
        for name in ("nf4_pairs", "nf4_levels"):
            del self._buffers[name]
            self._non_persistent_buffers_set.discard(name)
        del self.nf4_drafts


class Mxfp4Experts(PackedExperts):
    """A layer's experts in MXFP4, by rows of outputs: blocks [experts, out, in / 32, 16] and scales."""

    kind, parts = "mxfp4", ("blocks", "scales")

    @property
    def full_shape(self) -> dict[str, tuple[int, int, int]]:
        return self.packed_shapes

    def tensors(self, name: str) -> tuple[Tensor | None, ...]:
        return self.parameters_of(name)

    def fill_(self, stacks: Mapping[str, Sequence[Tensor]]) -> None:
        """Copies packed stacks into the layer; sharded parameters take their part.

        Args:
            stacks: blocks and scales of each stack, by its name.

        Raises:
            ValueError: one has another shape or dtype.
        """
        for name, values in stacks.items():
            for part, old, value in zip(self.parts, self.parameters_of(name), values, strict=True):
                assert old is not None
                if (value.shape, value.dtype) != (old.shape, old.dtype):
                    raise ValueError(
                        f"{name}_{part}: {value.dtype} {tuple(value.shape)} for {old.dtype} {tuple(old.shape)}"
                    )
                with torch.no_grad():
                    local(old).copy_(local_shard(value, old))


_classes: dict[tuple[type[PackedExperts], type[nn.Module]], type[PackedExperts]] = {}


def _make_class(packed: type[PackedExperts], kind: type[nn.Module]) -> type[PackedExperts]:
    """Returns the class of packed experts of a model's class, the same one for all layers."""
    name = f"{packed.kind.title()}{kind.__name__}"
    return _classes.setdefault((packed, kind), type(name, (packed, kind), {}))


def _replace_stacks(
    module: nn.Module,
    packed: type[PackedExperts],
    stacks: Mapping[str, tuple[tuple[int, ...], Sequence[Tensor | None]]],
) -> PackedExperts:
    """Replaces the stacks of a layer's experts, in place.

    Args:
        stacks: the shape and the packed tensors of each stack, by its name.
    """
    for name in stacks:
        del module._parameters[name]
    # Only the class changes, so that references and names stay valid.
    module.__class__ = _make_class(packed, type(module))
    assert isinstance(module, packed)
    experts: Any = module
    experts.packed_shapes = {name: tuple(shape) for name, (shape, _) in stacks.items()}
    experts.packed_names = tuple(f"{packed.kind}_{name}_{part}" for name in stacks for part in packed.parts)
    values = [value for _, tensors in stacks.values() for value in tensors]
    for name, value in zip(experts.packed_names, values, strict=True):
        module.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))
    return module


def pack_experts_(experts: Sequence[nn.Module], *, double: bool = True) -> None:
    """Quantizes the weight stacks of layers' experts to NF4, in place; on meta only their shapes.

    Args:
        experts: experts of each layer, from `preheat.models.moe.experts_of`.
        double: quantize the scales too.

    Example:
        >>> from transformers import Qwen3MoeConfig
        >>> from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
        >>> experts = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=4, hidden_size=64, moe_intermediate_size=32))
        >>> _ = nn.init.normal_(experts.gate_up_proj), nn.init.normal_(experts.down_proj)
        >>> pack_experts_([experts])
        >>> experts.nf4_down_proj_codes.shape, experts.down_proj.shape
        (torch.Size([4096]), torch.Size([4, 64, 32]))
    """
    for module in experts:
        stacks = {name: module.get_parameter(name) for name in stacks_of(module)}
        device = next(iter(stacks.values())).device
        new = {name: (tuple(s.shape), nf4.pack_parameter(s.detach(), double=double)) for name, s in stacks.items()}
        packed: Any = _replace_stacks(module, Nf4Experts, new)
        packed.nf4_drafts = {}
        # Not saved, since the tables are constants.
        tables = nf4.build_tables(device)
        packed.register_buffer("nf4_pairs", tables.pairs, persistent=False)
        packed.register_buffer("nf4_levels", tables.scales, persistent=False)


def pack_modules_(modules: Sequence[nn.Module], *, double: bool = True) -> None:
    """Quantizes linear layers and layers' experts to NF4, in place; on meta only their shapes."""
    experts = [module for module in modules if stacks_of(module)]
    pack_experts_(experts, double=double)
    expert_ids = {id(module) for module in experts}
    nf4.pack_([module for module in modules if id(module) not in expert_ids], double=double)


def pack_mxfp4_(module: nn.Module) -> Mxfp4Experts:
    """Replaces the weight stacks of a layer's experts by empty ones in MXFP4, in place, on their device."""
    new: dict[str, tuple[tuple[int, ...], tuple[Tensor, Tensor]]] = {}
    for name in stacks_of(module):
        stack: Any = module.get_parameter(name)
        count, out, into = stack.mT.shape if module.is_transposed else stack.shape
        blocks = into // MXFP4_BLOCK
        codes = torch.empty(count, out, blocks, MXFP4_BLOCK // 2, dtype=torch.uint8, device=stack.device)
        new[name] = tuple(stack.shape), (codes, codes.new_empty(count, out, blocks))
    packed = _replace_stacks(module, Mxfp4Experts, new)
    assert isinstance(packed, Mxfp4Experts)
    return packed
