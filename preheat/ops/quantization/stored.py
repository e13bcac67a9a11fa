"""Frozen linear layers in the formats of published quantized checkpoints (GPTQ, AWQ, compressed-tensors, FP8).

All formats are brought into one form: codes of 2, 4 or 8 bits per weight, [out, in], and a scale per block of outputs
and inputs: w = (code - zero) scale, or w = code scale with codes in float8_e4m3fn. The product is computed in fp32 and
rounded once to the dtype of the matmul, so that the layer has the values that the checkpoint states; kernels for
inference round them to half precision first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preheat.ops.distributed.dtensor_utils import full_tensor, local, local_shard
from preheat.ops.quantization.packed import FrozenPackedMap

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext

__all__ = [
    "Form",
    "StoredLinear",
    "Tensors",
    "dequantize",
    "pack_",
    "pack_codes",
    "require_shapes",
    "unpack_codes",
]

_CHUNK = 1 << 22  # weights per iteration, which bounds the scratch memory


class Form(NamedTuple):
    """Describes how the weight of a layer is packed.

    Attributes:
        shape: [out, in] of the weight.
        bits: of a code.
        is_float: codes are float8_e4m3fn; else unsigned integers.
        rows, columns: outputs and inputs that share a scale.
        has_zeros: there is a zero point per scale; else it is the middle of the codes' range.
        has_order: an index gives each input its scale; else successive inputs share one.
        scale_dtype: of the scales.
    """

    shape: tuple[int, int]
    bits: int
    is_float: bool
    rows: int
    columns: int
    has_zeros: bool
    has_order: bool
    scale_dtype: torch.dtype

    @property
    def blocks(self) -> tuple[int, int]:
        """The shape of the scales."""
        return -(-self.shape[0] // self.rows), -(-self.shape[1] // self.columns)

    @property
    def codes_shape(self) -> tuple[int, int]:
        """The shape of the bytes of the codes."""
        return self.shape[0], -(-self.shape[1] * self.bits // 8)


class Tensors(NamedTuple):
    """A packed weight.

    Attributes:
        codes: uint8 [out, ceil(in * bits / 8)], the first of the codes of a byte in its lowest bits.
        scales: [row blocks, column blocks]; held as uint8, their bytes, so that casting a model's floats does not
            round them, and every backend can gather them.
        zeros: uint8, of the scales' shape.
        order: int32 [in], the column block of each input.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks uint8 codes [..., count] from bytes [..., ceil(count * bits / 8)], the lowest bits first.

    Example:
        >>> unpack_codes(torch.tensor([[0x10, 0x32]], dtype=torch.uint8), 4, 4).tolist()
        [[0, 1, 2, 3]]
    """
    if bits == 8:
        return packed[..., :count]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)  # [..., bytes, codes of a byte]
    return codes.flatten(-2)[..., :count]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 codes into bytes: the inverse of `unpack_codes`.

    Example:
        >>> pack_codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist()
        [[33, 3]]
    """
    each = 8 // bits
    codes = F.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    packed = codes[..., 0].clone()
    for n in range(1, each):
        packed |= codes[..., n] << (n * bits)
    return packed


def require_shapes(tensors: Tensors, form: Form) -> None:
    """Raises ValueError if a tensor of a packed weight is missing, superfluous or of another shape."""
    expected = (
        form.codes_shape,
        form.blocks,
        form.blocks if form.has_zeros else None,
        (form.shape[1],) if form.has_order else None,
    )
    for name, value, shape in zip(Tensors._fields, tensors, expected, strict=True):
        if (value is None) != (shape is None):
            raise ValueError(f"{name} {'is missing' if value is None else 'is superfluous'}")
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} {tuple(value.shape)} for {shape}")


def dequantize(tensors: Tensors, form: Form, dtype: torch.dtype) -> Tensor:
    """Dequantizes a weight to [out, in]; multiplies in fp32 and rounds once to `dtype`."""
    return _dequantize_values(
        *tensors, form.shape[1], form.bits, form.is_float, form.rows, form.columns, form.scale_dtype, dtype
    )


# A custom operator, so that a dry run sees a single kernel and does not iterate over the chunks.
@torch.library.custom_op("preheat::stored_values", mutates_args=())
def _dequantize_values(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    inputs: int,
    bits: int,
    is_float: bool,
    rows: int,
    columns: int,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    outputs, floats = codes.shape[0], scales.view(scale_dtype)
    out = torch.empty(outputs, inputs, dtype=dtype, device=codes.device)
    is_even = order is None and inputs % columns == 0  # then a view has the inputs of a scale in a dimension
    step = max(_CHUNK // inputs, 1)
    for start in range(0, outputs, step):
        part = slice(start, min(start + step, outputs))
        row_blocks = torch.arange(part.start, part.stop, device=codes.device) // rows

        def spread(value: Tensor, part: slice = part, row_blocks: Tensor = row_blocks) -> Tensor:
            """Returns the value of each weight's block in fp32: [rows, blocks, 1], or [rows, in]."""
            value = (value[part] if rows == 1 else value.index_select(0, row_blocks)).float()
            if is_even:
                return value.unsqueeze(-1)
            if order is not None:
                return value.index_select(1, order)
            return value.repeat_interleave(columns, 1)[:, :inputs]

        if is_float:
            values = codes[part].view(torch.float8_e4m3fn).float()
        else:
            values = unpack_codes(codes[part], bits, inputs).float()
        blocks = values.unflatten(1, (-1, columns)) if is_even else values
        if not is_float:
            blocks -= 1 << (bits - 1) if zeros is None else spread(zeros)
        blocks *= spread(floats)
        out[part] = values
    return out


@_dequantize_values.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    inputs: int,
    bits: int,
    is_float: bool,
    rows: int,
    columns: int,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    # The scratch of a chunk is left out.
    return codes.new_empty(codes.shape[0], inputs, dtype=dtype)


class _Product(torch.autograd.Function):
    """x W^T with W packed; forward and backward each dequantize W temporarily."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, form: Form, *tensors: Tensor | None) -> Tensor:  # type: ignore[override]
        # The packed bytes are saved, never the dequantized weight.
        ctx.save_for_backward(*tensors)
        ctx.form = form
        return F.linear(x, dequantize(Tensors(*tensors), form, x.dtype))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight = dequantize(Tensors(*ctx.saved_tensors), ctx.form, slope.dtype)
        return slope @ weight, *(None,) * 5


class StoredLinear(FrozenPackedMap, nn.Linear):  # type: ignore[misc,override]
    """A Linear with the packed weight of a published checkpoint. It stays a Linear, so that peft can adapt it."""

    packed_names = ("packed_codes", "packed_scales", "packed_zeros", "packed_order")
    packed_form: Form

    @property
    def full_shape(self) -> tuple[int, int]:
        return self.packed_form.shape

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if self._parameters["packed_codes"].is_meta:  # type: ignore[union-attr]  # peft reads it while it adds adapters
            weight = torch.empty(self.full_shape, dtype=torch.float32, device="meta")
        else:
            tensors = Tensors(*(None if t is None else full_tensor(t) for t in self._tensors()))  # type: ignore[arg-type]
            weight = dequantize(tensors, self.packed_form, torch.float32)
        if not torch.compiler.is_compiling():
            # Keeps transformers from reinitializing this copy.
            weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    def _tensors(self) -> Tensors:
        return Tensors(*(self._parameters[name] for name in self.packed_names))  # type: ignore[arg-type]

    def multiply(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.packed_form, *self._tensors())  # type: ignore[no-any-return]

    def fill_(self, tensors: Tensors) -> None:
        """Copies a packed weight into the layer; sharded parameters take their part.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        if tensors.scales.dtype != self.packed_form.scale_dtype:
            raise ValueError(f"scales in {tensors.scales.dtype} for {self.packed_form.scale_dtype}")
        require_shapes(tensors, self.packed_form)
        bits = tensors._replace(scales=tensors.scales.clone(memory_format=torch.contiguous_format).view(torch.uint8))
        with torch.no_grad():
            for old, value in zip(self._tensors(), bits, strict=True):
                if old is not None and value is not None:
                    local(old).copy_(local_shard(value, old))

    def unpack_(self) -> None:
        weight = self.weight
        for name in self.packed_names:
            del self._parameters[name]
        del self.packed_form
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def pack_(module: nn.Linear, form: Form) -> StoredLinear:
    """Replaces the weight of a Linear by the empty parameters of a form, in place, on the weight's device."""
    assert type(module) is nn.Linear
    device = module._parameters.pop("weight").device  # type: ignore[union-attr]
    # Only the class changes, so that references and names stay valid.
    module.__class__ = StoredLinear
    packed: StoredLinear = module  # type: ignore[assignment]
    packed.packed_form = form
    rows, columns = form.blocks
    new = Tensors(
        torch.empty(form.codes_shape, dtype=torch.uint8, device=device),
        torch.empty(rows, columns * form.scale_dtype.itemsize, dtype=torch.uint8, device=device),
        torch.empty(form.blocks, dtype=torch.uint8, device=device) if form.has_zeros else None,
        torch.empty(form.shape[1], dtype=torch.int32, device=device) if form.has_order else None,
    )
    for name, value in zip(StoredLinear.packed_names, new, strict=True):
        packed.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))
    return packed
