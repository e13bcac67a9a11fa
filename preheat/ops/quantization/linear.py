"""Linear layers and embeddings with int8, int4 or fp8 weights.

They are plain modules with integer parameters rather than torchao tensor subclasses, for three measured reasons:
torchao's int4 cannot be saved through transformers (its codes are packed in the order of one kind of CPU), its int8
beats bf16 only under torch.compile, and neither accepts precomputed codes (GPTQ, AWQ, a bit budget). Codes are stored
in a neutral order, so that a model opens on any machine.

Few rows (decoding) use aten's kernels for packed weights; on CUDA, int8 uses our Triton kernel, because aten's computes
in fp32 element by element. Many rows (prefill, beyond `FEW`) use a weight that is dequantized to the input's dtype for
the call, which is faster. CPUs without AVX512 have no fast bf16 matmul: there few rows use our AVX2 kernels
(`ops/quantization/cpu_gemv.cpp`) and many rows an fp32 weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from preheat.hardware.probe import fastest_half_dtype
from preheat.ops.cuda_kernels import Operator, is_plain, name_failures
from preheat.ops.quantization.cpu_gemv import is_supported, multiply_int4, multiply_int8
from preheat.ops.quantization.grids import (
    HALF,
    Groups,
    dequantize_groups,
    pack,
    quantize_groups,
    quantize_rows,
    round_inputs,
    unpack,
)
from preheat.ops.quantization.int4_unpack import unpack4

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject


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
"""Maximum rows for the packed-weight kernels. Beyond it, dequantizing for the matrix units is faster (int4 takes longer
to unpack). Measured on one core with bf16 matmuls on AMX, 768 x 768.
"""
_KERNEL_INPUTS = 16  # aten's int8 kernel reads past the end of rows that are not a multiple of it
_KERNEL_GROUPS = (32, 64, 128, 256)  # group sizes of aten's int4 kernel
# torch._int_mm on CUDA requires inputs and outputs that are multiples of 8, and at least 17 rows.
_INTEGERS, _INTEGER_ROWS = 8, 17
_FP8 = torch.float8_e4m3fn
Form: TypeAlias = "JsonObject"


def map_weight(module: nn.Module) -> Tensor:
    """Returns a layer's weight as [out, in], also for Conv1D."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


class QuantizedMap(nn.Module):
    """A linear layer [tokens, in] -> [tokens, out] with a quantized weight.

    Attributes:
        input_scales: bf16 [in], factors on the inputs (AWQ, SmoothQuant), or None.
        input_scale: bf16 [], static scale of int8 inputs, or None.
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
        # Parameters, though nothing trains them, so that they are saved and moved with the model. None is registered
        # too: every layer has the same attributes.
        for name, value in tensors.items():
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    @property
    def weight(self) -> Tensor:
        """Returns the effective fp32 weight [out, in], input factors included."""
        weight = self.values(torch.float32)
        return weight if self.input_scales is None else weight * self.input_scales.float()

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantizes the codes to [out, in]."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Multiplies x [tokens, in] by the weight; returns [tokens, out] in the dtype of x."""
        # The dequantized weight [out, in] lives for this call alone.
        quick = _matmul_dtype(x)
        return F.linear(x.to(quick), self.values(x.dtype).to(quick)).to(x.dtype)

    def _has_few_rows(self, x: Tensor, device: str = "cpu") -> bool:
        """True if the packed-weight kernels apply: few rows and no gradients, which they lack."""
        return (
            x.device.type == device
            and x.shape[0] <= FEW[self.kind]
            and not (x.requires_grad and torch.is_grad_enabled())
        )

    def _uses_cuda_kernel(self, x: Tensor, operator: Operator) -> bool:
        """True if few rows use a CUDA kernel. torch.compile generates faster code without it."""
        return self._has_few_rows(x, "cuda") and not torch.compiler.is_compiling() and not is_plain(operator)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        rows = x.reshape(-1, self.in_features)  # [tokens, in]
        if self.input_scales is not None:
            # The weight was divided by these factors before rounding.
            rows = rows * self.input_scales.to(rows.dtype)
        rounded = self.form.get("inputs")
        out = self.product(rows) if rounded is None else self.rounded_product(rows)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def rounded_product(self, x: Tensor) -> Tensor:
        codes, scale = round_inputs(x, self.input_scale)
        # Without integer matmuls: the same rounded inputs in floating point.
        return self.product((codes * scale).to(x.dtype))


class Int8Linear(QuantizedMap):
    """int8 weight with one scale per output; inputs unquantized, or int8 too (`inputs`: dynamic or static)."""

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
        """Quantizes a linear layer to int8.

        Args:
            chosen: precomputed codes int8 [out, in] and scales [out]; None: rounds to nearest.
            inputs: None, dynamic (one scale per token) or static (`input_scale` for all).
            input_scales: [in], factors on the inputs; the weight is divided by them before rounding.
        """
        weight = map_weight(module).detach().float()
        factors = None if input_scales is None else input_scales.to(HALF)
        # Divided by the bf16 factors that are stored, not by the exact ones: forward multiplies by the stored ones.
        codes, scales = chosen or quantize_rows(weight if factors is None else weight / factors.float())
        tensors = {"codes": codes, "scales": scales, "input_scales": factors, "bias": _copy_bias(module)}
        tensors["input_scale"] = None if input_scale is None else input_scale.to(HALF)
        return cls(weight.shape[1], weight.shape[0], {"inputs": inputs, "input_scales": factors is not None}, tensors)

    @classmethod
    def on_meta(cls, inputs: int, outputs: int, bias: bool, form: Form) -> Int8Linear:
        tensors = _common_buffers(inputs, outputs, bias, form)
        tensors |= {"codes": _allocate_empty((outputs, inputs), torch.int8), "scales": _allocate_empty((outputs,))}
        return cls(inputs, outputs, form, tensors)

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.codes.to(dtype) * self.scales.to(dtype)[:, None]

    def product(self, x: Tensor) -> Tensor:
        # Few rows: our AVX2 kernel, else aten's; on CUDA our Triton kernel. Many rows: codes cast for the call.
        few = self._has_few_rows(x)
        if few and self.in_features % 32 == 0 and x.dtype == HALF and is_supported():
            return multiply_int8(x, self.codes, self.scales.to(HALF))
        if few and self.in_features % _KERNEL_INPUTS == 0 and x.dtype == HALF:
            return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales.to(HALF))
        if x.dtype in (HALF, torch.float16) and self._uses_cuda_kernel(x, "int8_product"):
            with name_failures("int8_product"), torch.cuda.device_of(x):
                return multiply_int8_codes(x, self.codes, self.scales)
        quick = _matmul_dtype(x)
        # One scale per output, so it multiplies the result [tokens, out] instead of the weight.
        # Codes are exact in bf16.
        return F.linear(x.to(quick), self.codes.to(quick)).mul_(self.scales.to(quick)).to(x.dtype)

    def rounded_product(self, x: Tensor) -> Tensor:
        cuda = x.device.type == "cuda"
        wide = self.in_features % _INTEGERS == 0 == self.out_features % _INTEGERS  # both are multiples of 8
        if x.device.type != "cpu" and not (cuda and wide and not is_plain("int8_product")):
            return super().rounded_product(x)
        codes, scale = round_inputs(x, self.input_scale)
        with name_failures("int8_product") if cuda else nullcontext():
            sums = multiply_integers(codes.to(torch.int8), self.codes, least=_INTEGER_ROWS if cuda else 0)
        # int32 sums are exact; one fp32 multiplication applies both scales: [tokens, 1] or [] times [out].
        return (sums.float() * (scale * self.scales.float())).to(x.dtype)


class Int4Linear(QuantizedMap):
    """int4 weight with one scale (and zero) per group of inputs of an output."""

    kind = "int4"
    zeros: nn.Parameter | None
    # The weight in the order of this machine's kernel, made at the first decode step; not a parameter, so never saved.
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
        """Quantizes a linear layer to int4.

        Args:
            groups: precomputed codes; None: rounds to nearest.
            inputs: None, or dynamic: int8 with one scale per token.
            input_scales: [in], factors on the inputs; `groups` must be those of the weight divided by them.
        """
        weight = map_weight(module).detach().float()
        factors = None if input_scales is None else input_scales.to(HALF)
        if groups is None:
            wide = weight if factors is None else weight / factors.float()
            groups = quantize_groups(wide, group, symmetric=symmetric)
        form = {
            # Read from the grid, because precomputed groups bring their own size.
            "group": weight.shape[1] // groups.scales.shape[1],
            "zeros": groups.zeros is not None,
            "inputs": inputs,
            "input_scales": factors is not None,
        }
        tensors = {"codes": pack(groups.codes), "scales": groups.scales, "zeros": groups.zeros, "input_scales": factors}
        return cls(weight.shape[1], weight.shape[0], form, tensors | {"bias": _copy_bias(module), "input_scale": None})

    @classmethod
    def on_meta(cls, inputs: int, outputs: int, bias: bool, form: Form) -> Int4Linear:
        grid = (outputs, inputs // form["group"])
        tensors = _common_buffers(inputs, outputs, bias, form)
        # Two codes per byte; a last odd input has its own byte.
        tensors |= {"codes": _allocate_empty((outputs, -(-inputs // 2)), torch.uint8), "scales": _allocate_empty(grid)}
        return cls(inputs, outputs, form, tensors | {"zeros": _allocate_empty(grid) if form["zeros"] else None})

    def groups(self) -> Groups:
        """Returns codes and grid, for exports to other formats."""
        zeros = None if self.zeros is None else self.zeros.to(HALF)
        return Groups(unpack(self.codes, self.in_features), self.scales.to(HALF), zeros)

    def values(self, dtype: torch.dtype) -> Tensor:
        # The C++ kernel reads whole bytes, so it has no odd number of inputs.
        if dtype == HALF and self.codes.device.type == "cpu" and self.in_features % 2 == 0:
            return unpack4(self.codes, self.scales, self.zeros)
        return dequantize_groups(self.groups(), dtype)

    def product(self, x: Tensor) -> Tensor:
        # Few rows: our AVX2 kernel, aten's tiles on CUDA, or last aten's CPU kernel. Others: a dequantized weight.
        few = self._has_few_rows(x)
        if few and self.form["group"] % 32 == 0 and x.dtype == HALF and is_supported():
            return multiply_int4(
                x, self.codes, self.scales.to(HALF), None if self.zeros is None else self.zeros.to(HALF)
            )
        if (
            self._uses_cuda_kernel(x, "int4_product")
            and x.dtype == HALF
            and fits_int4_kernel(self)
            and _has_tiles(x.device)
        ):
            with name_failures("int4_product"):
                if self._ready is None:
                    self._ready = tile_codes(self)
                return torch.ops.aten._weight_int4pack_mm(
                    x.contiguous(), self._ready[0], self.form["group"], self._ready[1]
                )
        if not few or self.form["group"] not in _KERNEL_GROUPS or self.out_features % 16 or x.dtype != HALF:
            return super().product(x)
        if self._ready is None:  # repacked in this CPU's order; prefill uses the neutral one
            groups = self.groups()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.codes.int(), 1)
            self._ready = packed, _aten_grid(groups.scales, groups.zeros)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._ready[0], self.form["group"], self._ready[1]
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4Linear:
        self._ready = None  # parameters may move or change dtype
        return super()._apply(fn, recurse)  # type: ignore[return-value]

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._ready = None  # other codes
        super()._load_from_state_dict(*arguments)


class Fp8Linear(QuantizedMap):
    """fp8 (e4m3) weight with one scale per output; inputs with one scale per token."""

    kind = "fp8"

    @classmethod
    def of(cls, module: nn.Module) -> Fp8Linear:
        weight = map_weight(module).detach().float()
        most = torch.finfo(_FP8).max  # 448
        scales = (weight.abs().amax(dim=1) / most).clamp(min=1e-30).to(HALF)
        # Clamped, because a scale that bf16 rounds down puts the largest value above 448, which torch may cast to NaN.
        codes = (weight / scales.float()[:, None]).clamp(-most, most).to(_FP8)
        codes = codes.view(torch.uint8)  # as bytes, so that casting a model's floats does not change them
        tensors = {
            "codes": codes,
            "scales": scales,
            "bias": _copy_bias(module),
            "input_scales": None,
            "input_scale": None,
        }
        return cls(weight.shape[1], weight.shape[0], {"inputs": "dynamic"}, tensors)

    @classmethod
    def on_meta(cls, inputs: int, outputs: int, bias: bool, form: Form) -> Fp8Linear:
        tensors = _common_buffers(inputs, outputs, bias, form)
        tensors |= {"codes": _allocate_empty((outputs, inputs), torch.uint8), "scales": _allocate_empty((outputs,))}
        return cls(inputs, outputs, form, tensors)

    def values(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.view(_FP8).float() * self.scales.float()[:, None]).to(dtype)

    def rounded_product(self, x: Tensor) -> Tensor:
        scale = (x.float().abs().amax(dim=1, keepdim=True) / torch.finfo(_FP8).max).clamp(min=1e-30)
        codes = (x.float() / scale).to(_FP8)
        # A CPU has no fp8 matmul: the rounded inputs are multiplied in the dtype of x.
        if x.device.type == "cpu":
            return F.linear((codes.float() * scale).to(x.dtype), self.values(x.dtype))
        scales = self.scales.float()[None]
        # Row-wise scales: [tokens, 1] for the inputs, [1, out] for the weight. The second operand must be column-major,
        # which the transposed view is.
        return torch._scaled_mm(codes, self.codes.view(_FP8).t(), scale_a=scale, scale_b=scales, out_dtype=x.dtype)


class Int8Embedding(nn.Module):
    """An int8 embedding with one scale per row; a tied head shares its codes.

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
        return cls(_allocate_empty((rows, width), torch.int8), _allocate_empty((rows,)))

    @property
    def weight(self) -> Tensor:
        """[rows, width] in fp32."""
        return self.codes.float() * self.scales.float()[:, None]

    def forward(self, tokens: Tensor) -> Tensor:
        # Only the rows of these tokens are dequantized.
        return F.embedding(tokens, self.codes).to(self.scales.dtype) * self.scales[tokens][..., None]


def multiply_int8_codes(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiplies x [rows, in] in half precision by int8 codes [out, in] * scales [out] with Triton; sums in fp32."""
    from preheat.ops.triton_kernels import eight_bits_kernel

    (rows, inputs), outputs = x.shape, codes.shape[0]
    # Rows, outputs and inputs per program; Triton's dot takes at least 16 rows.
    out, (row, output, place) = x.new_empty(rows, outputs), (16, 32, 128)
    if rows:
        eight_bits_kernel[(-(-outputs // output), -(-rows // row))](
            *(x.contiguous(), codes, scales, out, rows, outputs, inputs), ROWS=row, OUTPUTS=output, INPUTS=place
        )
    return out


def multiply_integers(x: Tensor, codes: Tensor, *, least: int = 0) -> Tensor:
    """Multiplies x int8 [rows, in] by codes int8 [out, in]: int32 [rows, out].

    Args:
        least: minimum rows of the matmul (CUDA requires more than 16); fewer are padded with zeros.

    Example:
        >>> multiply_integers(torch.ones(1, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8), least=17).shape
        torch.Size([1, 8])
    """
    rows = x.shape[0]
    return torch._int_mm(F.pad(x, (0, 0, 0, max(least - rows, 0))), codes.t())[:rows]


def fits_int4_kernel(module: Int4Linear) -> bool:
    """True if a layer's sizes suit aten's int4 kernel on CUDA: tiles of 8 outputs by 32 inputs."""
    return module.form["group"] in _KERNEL_GROUPS and module.out_features % 8 == 0 and module.in_features % 32 == 0


def tile_codes(module: Int4Linear) -> tuple[Tensor, Tensor]:
    """Returns codes tiled for tensor cores and interleaved scales and zeros, as aten's int4 kernel reads them."""
    # Inner k tiles of 16 inputs; in_features is a multiple of 32, so 2 always fits.
    inner = next(n for n in (8, 4, 2) if module.in_features % (16 * n) == 0)
    swapped = module.codes << 4 | module.codes >> 4  # aten expects the even position in the high half
    packed = torch.ops.aten._convert_weight_to_int4pack(swapped, inner)
    return packed, _aten_grid(module.scales, module.zeros)


def _aten_grid(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Returns scales and zeros as aten's kernels expect them: bf16 [in / group, out, 2]."""
    zeros = torch.zeros_like(scales) if zeros is None else zeros
    return torch.stack([scales.to(HALF).t(), zeros.to(HALF).t()], dim=2).contiguous()


@functools.cache
def _has_tiles(device: torch.device) -> bool:
    """True if the GPU has the tensor cores of aten's int4 kernel (Ampere and later)."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _matmul_dtype(x: Tensor) -> torch.dtype:
    """Returns the matmul dtype of x: fp32 for bf16 on a CPU that is slow in bf16, else its own."""
    return fastest_half_dtype() if x.dtype == HALF and x.device.type == "cpu" else x.dtype


def _allocate_empty(shape: tuple[int, ...], dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _copy_bias(module: nn.Module) -> Tensor | None:
    bias: Any = module.bias
    return None if bias is None else bias.detach().clone()


def _common_buffers(inputs: int, outputs: int, bias: bool, form: Form) -> dict[str, Tensor | None]:
    return {
        "bias": _allocate_empty((outputs,)) if bias else None,
        "input_scales": _allocate_empty((inputs,)) if form.get("input_scales") else None,
        "input_scale": _allocate_empty(()) if form.get("inputs") == "static" else None,
    }
