"""Linear maps and embeddings whose weights stand in eight or four bits.

Held as plain modules with their integers as parameters, and not as torchao's tensor subclasses, for three reasons found by trying:
torchao's real four bits cannot be saved through transformers (its codes are packed in the order of one kind of CPU), its eight bits beat
bf16 only under torch.compile, and neither takes codes that were chosen elsewhere (GPTQ, AWQ, a bit budget). Here the codes lie in a
neutral order, so that a folder opens on any machine; few rows (decoding) go through aten's own kernels for packed weights, on CUDA through one
of ours for eight bits (aten's there computes in fp32, number by number), and many (a prompt) through a weight that is made in the input's precision for the moment, which is faster beyond `FEW` rows. A CPU without AVX512
has no quick products in bf16: few rows go through kernels of ours there (`ops/quantization/cpu_gemv.cpp`), and many through a weight in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from preheat.hardware.probe import quick_half
from preheat.ops.cuda_kernels import Operator, is_plain, named_failures
from preheat.ops.quantization.cpu_gemv import eight_bits, four_bits, of_use
from preheat.ops.quantization.grids import (
    HALF,
    Groups,
    group_values,
    pack,
    quantize_groups,
    quantize_rows,
    round_inputs,
    unpack,
)
from preheat.ops.quantization.int4_unpack import unpack4

__all__ = [
    "FEW",
    "Fp8Linear",
    "Int4Linear",
    "Int8Embedding",
    "Int8Linear",
    "QuantizedMap",
    "map_weight",
]

FEW = {"int8": 16, "int4": 64}
"""Rows up to which the kernels for packed weights are used: beyond, the matrix units are worth unpacking the weight for (four bits take
longer to unpack). Seen on one core with bf16 products on AMX, 768 x 768."""
_KERNEL_INPUTS = 16  # aten's eight-bit kernel reads beyond the end of rows that are no multiple of it
_KERNEL_GROUPS = (32, 64, 128, 256)  # what aten's four-bit kernel takes
_INTEGERS, _INTEGER_ROWS = (
    8,
    17,
)  # CUDA's product of integers takes multiples of 8 inputs and outputs, and so many rows at least
_FP8 = torch.float8_e4m3fn
Form = dict[str, Any]


def map_weight(module: nn.Module) -> Tensor:
    """The weight of a linear map as [out, in], whichever way the module holds it."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


class QuantizedMap(nn.Module):
    """A linear map [tokens, in] -> [tokens, out] whose weight is made from codes.

    Attributes:
        input_scales: bf16 [in], what inputs are multiplied by (AWQ, SmoothQuant); None: nothing.
        input_scale: bf16 [], of inputs in eight bits, where it is known before; None otherwise.
    """

    kind: ClassVar[str]
    in_features: int
    out_features: int
    codes: nn.Parameter
    scales: nn.Parameter
    bias: nn.Parameter | None
    input_scales: nn.Parameter | None
    input_scale: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, form: Form, tensors: Mapping[str, Tensor | None]):
        super().__init__()
        self.in_features, self.out_features, self.form = inputs, outputs, {"kind": self.kind, **form}
        for name, value in tensors.items():
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] in fp32 that this map computes with, inputs' factors and all."""
        weight = self.values(torch.float32)
        return weight if self.input_scales is None else weight * self.input_scales.float()

    def values(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for, [out, in]."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x [tokens, in] times the values, [tokens, out] in the precision of x."""
        quick = _quick(x)
        return F.linear(x.to(quick), self.values(x.dtype).to(quick)).to(x.dtype)

    def _few(self, x: Tensor, device: str = "cpu") -> bool:
        """Whether the kernels for packed weights are of use, which have no gradients."""
        return (
            x.device.type == device
            and x.shape[0] <= FEW[self.kind]
            and not (x.requires_grad and torch.is_grad_enabled())
        )

    def _by_kernel(self, x: Tensor, operator: Operator) -> bool:
        """Whether few rows go through a kernel on CUDA; a compiler does better without."""
        return self._few(x, "cuda") and not torch.compiler.is_compiling() and not is_plain(operator)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        rows = x.reshape(-1, self.in_features)
        if self.input_scales is not None:
            rows = rows * self.input_scales.to(rows.dtype)
        rounded = self.form.get("inputs")
        out = self.product(rows) if rounded is None else self.rounded_product(rows)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def rounded_product(self, x: Tensor) -> Tensor:
        codes, scale = round_inputs(x, self.input_scale)
        return self.product((codes * scale).to(x.dtype))


class Int8Linear(QuantizedMap):
    """Eight bits, a scale for each output; inputs as they come, or in eight bits too (`inputs`: dynamic or static)."""

    kind = "int8"

    @classmethod
    def of(
        cls,
        module: nn.Module,
        chosen: tuple[Tensor, Tensor] | None = None,
        *,
        inputs: str | None = None,
        input_scales: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> Int8Linear:
        """A linear map in eight bits.

        Args:
            made: codes int8 [out, in] and scales [out] that were chosen before; the nearest when None.
            inputs: None, dynamic (a scale for each token) or static (`input_scale`, one for all).
            input_scales: [in], what inputs are multiplied by, and the weight divided by before it is rounded.
        """
        weight = map_weight(module).detach().float()
        factors = None if input_scales is None else input_scales.to(HALF)
        codes, scales = chosen or quantize_rows(weight if factors is None else weight / factors.float())
        tensors = {"codes": codes, "scales": scales, "input_scales": factors, "bias": _bias(module)}
        tensors["input_scale"] = None if input_scale is None else input_scale.to(HALF)
        return cls(weight.shape[1], weight.shape[0], {"inputs": inputs, "input_scales": factors is not None}, tensors)

    @classmethod
    def on_meta(cls, inputs: int, outputs: int, bias: bool, form: Form) -> Int8Linear:
        tensors = _common(inputs, outputs, bias, form)
        tensors |= {"codes": _empty((outputs, inputs), torch.int8), "scales": _empty((outputs,))}
        return cls(inputs, outputs, form, tensors)

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.codes.to(dtype) * self.scales.to(dtype)[:, None]

    def product(self, x: Tensor) -> Tensor:
        few = self._few(x)
        if few and self.in_features % 32 == 0 and x.dtype == HALF and of_use():
            return eight_bits(x, self.codes, self.scales.to(HALF))
        if few and self.in_features % _KERNEL_INPUTS == 0 and x.dtype == HALF:
            return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales.to(HALF))
        if x.dtype in (HALF, torch.float16) and self._by_kernel(x, "int8_product"):
            with named_failures("int8_product"), torch.cuda.device_of(x):
                return eight_bits_product(x, self.codes, self.scales)
        quick = _quick(x)
        return (
            F.linear(x.to(quick), self.codes.to(quick)).mul_(self.scales.to(quick)).to(x.dtype)
        )  # codes are exact in bf16

    def rounded_product(self, x: Tensor) -> Tensor:
        cuda = x.device.type == "cuda"
        wide = self.in_features % _INTEGERS == 0 == self.out_features % _INTEGERS
        if x.device.type != "cpu" and not (cuda and wide and not is_plain("int8_product")):
            return super().rounded_product(x)
        codes, scale = round_inputs(x, self.input_scale)
        with named_failures("int8_product") if cuda else nullcontext():
            sums = integer_product(codes.to(torch.int8), self.codes, least=_INTEGER_ROWS if cuda else 0)
        return (sums.float() * (scale * self.scales.float())).to(x.dtype)


class Int4Linear(QuantizedMap):
    """Four bits, a scale (and a zero) for each group of inputs of an output."""

    kind = "int4"
    zeros: nn.Parameter | None
    _ready: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        groups: Groups | None = None,
        *,
        group: int = 32,
        symmetric: bool = True,
        inputs: str | None = None,
        input_scales: Tensor | None = None,
    ) -> Int4Linear:
        """A linear map in four bits.

        Args:
            made: codes that were chosen before; the nearest when None.
            inputs: None, or dynamic: in eight bits, a scale for each token.
            input_scales: [in], what inputs are multiplied by; `made` was chosen for the weight divided by it.
        """
        weight = map_weight(module).detach().float()
        factors = None if input_scales is None else input_scales.to(HALF)
        if groups is None:
            wide = weight if factors is None else weight / factors.float()
            groups = quantize_groups(wide, group, symmetric=symmetric)
        form = {
            "group": weight.shape[1] // groups.scales.shape[1],
            "zeros": groups.zeros is not None,
            "inputs": inputs,
            "input_scales": factors is not None,
        }
        tensors = {"codes": pack(groups.codes), "scales": groups.scales, "zeros": groups.zeros, "input_scales": factors}
        return cls(weight.shape[1], weight.shape[0], form, tensors | {"bias": _bias(module), "input_scale": None})

    @classmethod
    def on_meta(cls, inputs: int, outputs: int, bias: bool, form: Form) -> Int4Linear:
        grid = (outputs, inputs // form["group"])
        tensors = _common(inputs, outputs, bias, form)
        tensors |= {"codes": _empty((outputs, -(-inputs // 2)), torch.uint8), "scales": _empty(grid)}
        return cls(inputs, outputs, form, tensors | {"zeros": _empty(grid) if form["zeros"] else None})

    def groups(self) -> Groups:
        """Codes and grid, for writers of other formats."""
        zeros = None if self.zeros is None else self.zeros.to(HALF)
        return Groups(unpack(self.codes, self.in_features), self.scales.to(HALF), zeros)

    def values(self, dtype: torch.dtype) -> Tensor:
        if dtype == HALF and self.codes.device.type == "cpu" and self.in_features % 2 == 0:
            return unpack4(self.codes, self.scales, self.zeros)
        return group_values(self.groups(), dtype)

    def product(self, x: Tensor) -> Tensor:
        few = self._few(x)
        if few and self.form["group"] % 32 == 0 and x.dtype == HALF and of_use():
            return four_bits(x, self.codes, self.scales.to(HALF), None if self.zeros is None else self.zeros.to(HALF))
        if self._by_kernel(x, "int4_product") and x.dtype == HALF and takes_four_bits(self) and _has_tiles(x.device):
            with named_failures("int4_product"):
                if self._ready is None:
                    self._ready = tiles(self)
                return torch.ops.aten._weight_int4pack_mm(
                    x.contiguous(), self._ready[0], self.form["group"], self._ready[1]
                )
        if not few or self.form["group"] not in _KERNEL_GROUPS or self.out_features % 16 or x.dtype != HALF:
            return super().product(x)
        if self._ready is None:  # in this CPU's order, beside the neutral one that a prompt is multiplied from
            groups = self.groups()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.codes.int(), 1)
            self._ready = packed, _grid(groups.scales, groups.zeros)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._ready[0], self.form["group"], self._ready[1]
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Int4Linear:
        self._ready = None  # parameters move or get another precision
        return super()._apply(fn, recurse)  # type: ignore[return-value]


class Fp8Linear(QuantizedMap):
    """Eight-bit floats (e4m3), a scale for each output and, of inputs, for each token."""

    kind = "fp8"

    @classmethod
    def of(cls, module: nn.Module) -> Fp8Linear:
        weight = map_weight(module).detach().float()
        most = torch.finfo(_FP8).max
        scales = (weight.abs().amax(dim=1) / most).clamp(min=1e-30).to(HALF)
        codes = (weight / scales.float()[:, None]).clamp(-most, most).to(_FP8)
        codes = codes.view(torch.uint8)  # as bytes: what casts a model's floats must not touch them
        tensors = {"codes": codes, "scales": scales, "bias": _bias(module), "input_scales": None, "input_scale": None}
        return cls(weight.shape[1], weight.shape[0], {"inputs": "dynamic"}, tensors)

    @classmethod
    def on_meta(cls, inputs: int, outputs: int, bias: bool, form: Form) -> Fp8Linear:
        tensors = _common(inputs, outputs, bias, form)
        tensors |= {"codes": _empty((outputs, inputs), torch.uint8), "scales": _empty((outputs,))}
        return cls(inputs, outputs, form, tensors)

    def values(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.view(_FP8).float() * self.scales.float()[:, None]).to(dtype)

    def rounded_product(self, x: Tensor) -> Tensor:
        scale = (x.float().abs().amax(dim=1, keepdim=True) / torch.finfo(_FP8).max).clamp(min=1e-30)
        codes = (x.float() / scale).to(_FP8)
        if x.device.type == "cpu":
            return F.linear((codes.float() * scale).to(x.dtype), self.values(x.dtype))
        scales = self.scales.float()[None]
        return torch._scaled_mm(codes, self.codes.view(_FP8).t(), scale_a=scale, scale_b=scales, out_dtype=x.dtype)


class Int8Embedding(nn.Module):
    """An embedding in eight bits, a scale for each row; a head that is tied to it holds the same codes.

    Attributes:
        codes: int8 [rows, width].
        scales: bf16 [rows].
    """

    kind: ClassVar[str] = "int8_embedding"

    def __init__(self, codes: Tensor, scales: Tensor):
        super().__init__()
        self.form: Form = {"kind": self.kind}
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.num_embeddings, self.embedding_dim = codes.shape

    @classmethod
    def of(cls, module: nn.Embedding) -> Int8Embedding:
        return cls(*quantize_rows(module.weight))

    @classmethod
    def on_meta(cls, rows: int, width: int) -> Int8Embedding:
        return cls(_empty((rows, width), torch.int8), _empty((rows,)))

    @property
    def weight(self) -> Tensor:
        """[rows, width] in fp32."""
        return self.codes.float() * self.scales.float()[:, None]

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.codes).to(self.scales.dtype) * self.scales[tokens][..., None]


def eight_bits_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x [rows, in] in half precision times codes int8 [out, in] and scales [out], by one Triton kernel: summed in fp32."""
    from preheat.ops.triton_kernels import eight_bits_kernel

    (rows, inputs), outputs = x.shape, codes.shape[0]
    out, (row, output, place) = x.new_empty(rows, outputs), (16, 32, 128)
    if rows:
        eight_bits_kernel[(-(-outputs // output), -(-rows // row))](
            *(x.contiguous(), codes, scales, out, rows, outputs, inputs), ROWS=row, OUTPUTS=output, INPUTS=place
        )
    return out


def integer_product(x: Tensor, codes: Tensor, *, least: int = 0) -> Tensor:
    """x int8 [rows, in] times codes int8 [out, in]: int32 [rows, out].

    Args:
        least: rows that the product takes at least (CUDA's takes more than 16): zeros are added to fewer.

    Example:
        >>> integer_product(torch.ones(1, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8), least=17).shape
        torch.Size([1, 8])
    """
    rows = x.shape[0]
    return torch._int_mm(F.pad(x, (0, 0, 0, max(least - rows, 0))), codes.t())[:rows]


def takes_four_bits(module: Int4Linear) -> bool:
    """Whether a map has the sizes that aten's four-bit kernel on CUDA takes: tiles of 8 outputs by 32 inputs or more."""
    return module.form["group"] in _KERNEL_GROUPS and module.out_features % 8 == 0 and module.in_features % 32 == 0


def tiles(module: Int4Linear) -> tuple[Tensor, Tensor]:
    """Codes in the order of CUDA's matrix units, and scales beside zeros: what aten's four-bit kernel there reads."""
    inner = next(n for n in (8, 4, 2) if module.in_features % (16 * n) == 0)
    swapped = module.codes << 4 | module.codes >> 4  # the even place in the high half
    packed = torch.ops.aten._convert_weight_to_int4pack(swapped, inner)
    return packed, _grid(module.scales, module.zeros)


def _grid(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """bf16 [in / group, out, 2]: scales and zeros as aten's kernels take them."""
    zeros = torch.zeros_like(scales) if zeros is None else zeros
    return torch.stack([scales.to(HALF).t(), zeros.to(HALF).t()], dim=2).contiguous()


@functools.cache
def _has_tiles(device: torch.device) -> bool:
    """Whether a GPU has the matrix units that the four-bit kernel is written for (Ampere and later)."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _quick(x: Tensor) -> torch.dtype:
    """What a product of x is computed in: fp32 for bf16 on a CPU that is slow in it."""
    return quick_half() if x.dtype == HALF and x.device.type == "cpu" else x.dtype


def _empty(shape: tuple[int, ...], dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bias(module: nn.Module) -> Tensor | None:
    bias: Any = module.bias
    return None if bias is None else bias.detach().clone()


def _common(inputs: int, outputs: int, bias: bool, form: Form) -> dict[str, Tensor | None]:
    return {
        "bias": _empty((outputs,)) if bias else None,
        "input_scales": _empty((inputs,)) if form.get("input_scales") else None,
        "input_scale": _empty(()) if form.get("inputs") == "static" else None,
    }
