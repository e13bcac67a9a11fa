"""Reads the `quantization_config` of published folders (GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8, MXFP4) and
their layers' tensors.

Sources: gptqmodel and autoawq for the order of the codes in their words, bitsandbytes and the compressed-tensors
package for the names of their tensors, and transformers' quantizers for the keys of the configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from preheat.errors import RecipeError
from preheat.files import BadJson, parse_json
from preheat.model_folder import DEQUANTIZED, PACKED
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from preheat.core.json_types import JsonObject
    from preheat.ops.quantization.nf4 import Packed, PackedMap
    from preheat.ops.quantization.packed_experts import Mxfp4Experts
    from preheat.ops.quantization.stored import Form, StoredLinear, Tensors

__all__ = ["LayerFormat", "Mxfp4Format", "Nf4Format", "QuantizedFolder", "read_folder_format"]

_T = TypeVar("_T")
_FULL = "name the original model, and add techniques.nf4 for a 4-bit base"
# Column of the output that autoawq's gemm packing stores in each position of a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3fn")


@dataclass(frozen=True)
class LayerFormat:
    """The format of one quantized linear layer.

    Attributes:
        layout: of the tensors in the files.
        bits: of a code.
        rows, columns: outputs and inputs that share a scale; 0: all.
        has_zeros, has_order: as in `Form`.
        offset: of stored zero points, which GPTQ's first format writes less 1.
        scale_dtype: name of the scales' dtype, if the files do not tell.
    """

    layout: Literal["gptq", "awq", "words", "integers", "fp8", "int8_rows"]
    bits: int
    rows: int = 1
    columns: int = 0
    has_zeros: bool = False
    has_order: bool = False
    offset: int = 0
    scale_dtype: str = "float16"
    raw_key: ClassVar[str] = ""

    @property
    def codes_key(self) -> str:
        """The last part of the name of the tensor that holds the codes."""
        return {"gptq": "qweight", "awq": "qweight", "words": "weight_packed"}.get(self.layout, "weight")

    @property
    def scale_keys(self) -> tuple[str, ...]:
        """Names under which the scales may be stored; the first that is there is read."""
        if self.layout in ("gptq", "awq"):
            return ("scales",)
        if self.layout == "int8_rows":
            return ("SCB",)
        return ("weight_scale_inv", "weight_scale") if self.layout == "fp8" else ("weight_scale",)

    @property
    def zeros_key(self) -> str:
        return "qzeros" if self.layout in ("gptq", "awq") else "weight_zero_point"

    @property
    def order_key(self) -> str:
        return "g_idx" if self.layout == "gptq" else "weight_g_idx"

    def form(self, shape: tuple[int, int], scale_dtype: torch.dtype | None = None) -> Form:
        """Returns how a layer of this shape is packed."""
        import torch

        from preheat.ops.quantization.stored import Form

        return Form(
            shape,
            self.bits,
            self.layout == "fp8",
            self.rows or shape[0],
            min(self.columns or shape[1], shape[1]),
            self.has_zeros,
            self.has_order,
            scale_dtype or getattr(torch, self.scale_dtype),
        )

    def pack_(self, module: nn.Linear) -> StoredLinear:
        """Replaces the weight of a layer by empty parameters of this format, in place."""
        from preheat.ops.quantization.stored import pack_

        return pack_(module, self.form((module.out_features, module.in_features)))

    def convert(self, read: Callable[[str], Tensor | None], shape: tuple[int, int]) -> Tensors:
        """Brings the tensors of a layer into the packed form.

        Args:
            read: a tensor of the layer by the last part of its name; None if the files do not have it.

        Raises:
            ValueError: one is missing, or has another dtype or order than the configuration says.
        """
        from preheat.ops.quantization.stored import Tensors

        codes = _require(read(self.codes_key), self.codes_key)
        scales = _require(
            next((t for key in self.scale_keys if (t := read(key)) is not None), None), self.scale_keys[0]
        )
        zeros = _require(read(self.zeros_key), self.zeros_key) if self.has_zeros else None
        order = read(self.order_key)
        if self.layout == "int8_rows" and (tiles := read("weight_format")) is not None and tiles.any():
            raise ValueError("weight_format: its weight is in the order of a kernel")
        form = self.form(shape, scales.dtype)
        unpack = {"gptq": _from_gptq, "awq": _from_awq, "words": _from_words, "int8_rows": _from_int8_rows}.get(
            self.layout, _from_elements
        )
        tensors = unpack(self, form, codes, _to_float(scales), zeros)
        return Tensors(*tensors, self._read_order(order, form))

    def dequantize(self, read: Callable[[str], Tensor | None], shape: tuple[int, int]) -> Tensor:
        """Returns the weight of a layer in fp32; arguments and errors as of `convert` and `require_shapes`."""
        import torch

        from preheat.ops.quantization.stored import dequantize, require_shapes

        tensors = self.convert(read, shape)
        form = self.form(shape, tensors.scales.dtype)
        require_shapes(tensors, form)
        return dequantize(tensors, form, torch.float32)

    def with_scales_in(self, dtype: str) -> LayerFormat:
        """Returns the same format with another dtype of the scales, by its name in torch."""
        return replace(self, scale_dtype=dtype)

    def _read_order(self, order: Tensor | None, form: Form) -> Tensor | None:
        import torch

        if order is not None and order.numel() and bool((order < 0).any()):
            order = None  # compressed-tensors marks an index that is not in use by -1
        plain = torch.arange(form.shape[1], dtype=torch.int32) // form.columns
        if not self.has_order:
            if order is not None and not torch.equal(order.to(torch.int32), plain):
                setting = "desc_act" if self.layout == "gptq" else "actorder"
                raise ValueError(f"{self.order_key} reorders the inputs, and {setting} says that they are in order")
            return None
        return plain if order is None else order.to(torch.int32)


@dataclass(frozen=True)
class Nf4Format:
    """The format of a linear layer in bitsandbytes' NF4: it holds the bytes of `ops.quantization.nf4`.

    Attributes:
        double: the scales are quantized too.
    """

    double: bool
    codes_key: ClassVar[str] = "weight"
    scale_keys: ClassVar[tuple[str, ...]] = ("weight.absmax",)
    raw_key: ClassVar[str] = "weight"
    """The tensor that holds bytes, of whatever dtype it is."""

    def with_scales_in(self, dtype: str) -> Nf4Format:
        """Returns this format: its scales have one dtype."""
        return self

    def pack_(self, module: nn.Linear) -> PackedMap:
        """Replaces the weight of a layer on meta by empty parameters of this format, in place."""
        from preheat.ops.quantization.nf4 import PackedMap, pack_

        pack_([module], double=self.double)
        assert isinstance(module, PackedMap)
        return module

    def convert(self, read: Callable[[str], Tensor | None], shape: tuple[int, int]) -> Packed:
        """Returns the weight of a layer from its tensors in the files; arguments as of `LayerFormat.convert`.

        Raises:
            ValueError: a tensor is missing, or the layer has other blocks, levels or another shape.
        """
        import torch
        from torch.nn import functional as F

        from preheat.ops.quantization.nf4 import BLOCK, LEVELS, SCALES, Packed, dynamic_levels

        expected = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape)}
        state = _read_state(_require(read(_NF4_STATE), _NF4_STATE))
        for key, value in expected.items():
            if state.get(key) != value:
                raise ValueError(f"{_NF4_STATE}: {key}: {quote_value(state.get(key), 60)} for {value}")
        blocks = -(-shape[0] * shape[1] // BLOCK)
        # Other dtypes than uint8 hold the same bytes, for trainers that shard floats only.
        stored = _require(read("weight"), "weight").contiguous().reshape(-1)
        codes, length = stored.view(torch.uint8), -(-shape[0] * shape[1] // 2)
        if not length <= codes.numel() < length + stored.element_size():
            raise ValueError(f"weight: {codes.numel()} bytes for {length}")
        codes = codes[:length]
        codes = F.pad(codes, (0, blocks * BLOCK // 2 - codes.numel()))
        _require_levels(read("weight.quant_map"), torch.tensor(LEVELS), "weight.quant_map")
        scales = _require(read("weight.absmax"), "weight.absmax")
        if self.double != (scales.dtype == torch.uint8):
            raise ValueError(f"weight.absmax is in {str(scales.dtype).removeprefix('torch.')}")
        if not self.double:
            return Packed(codes, scales.float().view(torch.int32), None)
        _require_levels(read("weight.nested_quant_map"), dynamic_levels(), "weight.nested_quant_map")
        ranges = _require(read("weight.nested_absmax"), "weight.nested_absmax").float()
        offset = state.get("nested_offset")
        if state.get("nested_blocksize") != SCALES or not isinstance(offset, (int, float)):
            raise ValueError(f"{_NF4_STATE}: nested_blocksize, nested_offset: must be {SCALES} and a number")
        return Packed(codes, scales, torch.cat([ranges, ranges.new_tensor([offset])]).view(torch.int32))

    def dequantize(self, read: Callable[[str], Tensor | None], shape: tuple[int, int]) -> Tensor:
        """Returns the weight of a layer in fp32; arguments and errors as of `convert`."""
        import torch

        from preheat.ops.quantization.nf4 import build_tables, dequantize

        return dequantize(self.convert(read, shape), shape, torch.float32, build_tables())


@dataclass(frozen=True)
class Mxfp4Format:
    """The format of a layer's experts in MXFP4, as gpt-oss is published."""

    codes_key: ClassVar[str] = "down_proj_blocks"
    scale_keys: ClassVar[tuple[str, ...]] = ("down_proj_scales",)
    raw_key: ClassVar[str] = ""

    def with_scales_in(self, dtype: str) -> Mxfp4Format:
        """Returns this format: its scales have one dtype."""
        return self

    def pack_(self, module: nn.Module) -> Mxfp4Experts:
        """Replaces the weights of a layer's experts by empty parameters of this format, in place."""
        from preheat.ops.quantization.packed_experts import pack_mxfp4_

        return pack_mxfp4_(module)

    def convert(
        self, read: Callable[[str], Tensor | None], shapes: Mapping[str, tuple[int, int, int]]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the blocks and scales of each stack from the tensors in the files.

        Raises:
            ValueError: one is missing.
        """
        parts = {name: (f"{name}_blocks", f"{name}_scales") for name in shapes}
        return {name: tuple(_require(read(part), part) for part in pair) for name, pair in parts.items()}  # type: ignore[misc]

    def dequantize(self, read: Callable[[str], Tensor | None], shape: tuple[int, int]) -> Tensor:
        raise NotImplementedError("transformers' own rules read MXFP4 in full precision")


_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


def _read_state(encoded: Tensor) -> JsonObject:
    """Returns the JSON object that bitsandbytes writes as a tensor of bytes."""
    try:
        state = parse_json(bytes(encoded.tolist()).decode())
    except (BadJson, ValueError, TypeError) as error:
        raise ValueError(f"{_NF4_STATE}: is not JSON ({error})") from None
    if not isinstance(state, dict):
        raise ValueError(f"{_NF4_STATE}: must be a JSON object")
    return state


def _require_levels(stored: Tensor | None, levels: Tensor, key: str) -> None:
    import torch

    if stored is not None and not torch.allclose(stored.float(), levels, rtol=0, atol=1e-6):
        raise ValueError(f"{key}: has other levels than NF4")


def _require(value: Tensor | None, key: str) -> Tensor:
    if value is None:
        raise ValueError(f"{key} is missing")
    return value


def _to_float(scales: Tensor) -> Tensor:
    """Scales in a dtype with arithmetic: some are powers of two in 8 bits."""
    return scales if scales.element_size() > 1 else scales.float()


def _to_bytes(words: Tensor) -> Tensor:
    """Views int32 words [..., n] as bytes [..., 4 n], the lowest first."""
    import torch

    if words.dtype != torch.int32:
        raise ValueError(f"words of {str(words.dtype).removeprefix('torch.')} instead of int32")
    return words.contiguous().view(torch.uint8)


def _from_gptq(
    stored: LayerFormat, form: Form, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """qweight [in / 8, out] has successive inputs in a word, qzeros [groups, out / 8] successive outputs."""
    from preheat.ops.quantization.stored import unpack_codes

    assert zeros is not None
    zero = unpack_codes(_to_bytes(zeros), form.bits, form.shape[0]) + stored.offset & (1 << form.bits) - 1
    return _to_bytes(codes.t()), scales.t(), zero.t()


def _from_awq(
    stored: LayerFormat, form: Form, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """qweight [in, out / 8] and qzeros [groups, out / 8] have 8 outputs in a word, in an order of their own."""
    from preheat.ops.quantization.stored import pack_codes, unpack_codes

    assert zeros is not None

    def unpack(words: Tensor) -> Tensor:
        stored_order = unpack_codes(_to_bytes(words), 4, form.shape[0]).unflatten(1, (-1, 8))
        plain = stored_order.clone()
        plain[..., list(_AWQ_ORDER)] = stored_order
        return plain.flatten(1).t()

    return pack_codes(unpack(codes), 4), scales.t(), unpack(zeros)


def _from_words(
    stored: LayerFormat, form: Form, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight_packed [out, in / 8] has successive inputs in a word; weight_zero_point successive outputs."""
    from preheat.ops.quantization.stored import unpack_codes

    outputs, inputs = form.shape
    if codes.shape[-1] != (words := -(-inputs * form.bits // 32)):
        raise ValueError(f"weight_packed has {codes.shape[-1]} words per row instead of {words}")
    packed = _to_bytes(codes)[:, : -(-inputs * form.bits // 8)]
    zero = None if zeros is None else unpack_codes(_to_bytes(zeros.t()), form.bits, outputs).t()
    return packed, _to_blocks(scales, form), zero


def _from_elements(
    stored: LayerFormat, form: Form, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight [out, in] in int8 or float8, an element per weight."""
    import torch

    wanted = torch.float8_e4m3fn if form.is_float else torch.int8
    if codes.dtype != wanted:
        actual, expected = (str(dtype).removeprefix("torch.") for dtype in (codes.dtype, wanted))
        raise ValueError(f"weight is in {actual}, not in {expected}")
    if form.is_float:
        return codes.view(torch.uint8), _to_blocks(scales, form), None
    zero = None if zeros is None else _to_blocks(_to_unsigned(zeros), form)
    return _to_unsigned(codes), _to_blocks(scales, form), zero


def _from_int8_rows(
    stored: LayerFormat, form: Form, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight [out, in] in int8, and SCB [out], the largest magnitude of each row."""
    return _from_elements(stored, form, codes, scales.float() / 127, zeros)


def _to_unsigned(values: Tensor) -> Tensor:
    """int8 -> uint8 with 128 added."""
    import torch

    return values.to(torch.int8).view(torch.uint8) ^ 128


def _to_blocks(scales: Tensor, form: Form) -> Tensor:
    """Scales of a row or of a tensor, which may be stored as a vector or a number, as [row blocks, column blocks]."""
    return scales.reshape(form.blocks) if scales.numel() == form.blocks[0] * form.blocks[1] else scales


@dataclass(frozen=True)
class QuantizedFolder:
    """The quantization that a folder's config.json describes.

    Attributes:
        method: `quant_method`.
        label: for the run's summary, such as "4 bits in groups of 128".
        format_of: the format of a layer by its name; None: it is not quantized.
        ignored: tensors of the layers that training does not need: a regular expression.
        note: for the run's summary, or "".
        experts: the format of each layer's experts, if they are quantized as one parameter.
    """

    method: str
    label: str
    format_of: Callable[[str], LayerFormat | Nf4Format | None]
    ignored: ClassVar[str] = r"\.(input|output|activation)_(scale|zero_point|scale_inv)$|\.[kv]_scale$|\.weight_shape$"
    note: str = ""
    experts: Mxfp4Format | None = None


def read_folder_format(path: str | None, stored: JsonObject) -> QuantizedFolder:
    """Returns the quantization of a folder whose linear layers preheat keeps packed or dequantizes.

    Args:
        path: of the folder, for messages.
        stored: its `quantization_config`.

    Raises:
        RecipeError: another format, or a setting of it that is not supported.
    """
    if not isinstance(method := stored.get("quant_method"), str):
        raise RecipeError(
            f"model.path: {path}: config.json: quantization_config.quant_method: must be a name such as gptq, got "
            f"{quote_value(method, 60)}; restore the model's own, or delete quantization_config if nothing is quantized"
        )
    readers = {
        "awq": _read_awq,
        "bitsandbytes": _read_bitsandbytes,
        "compressed-tensors": _read_compressed_tensors,
        "fp8": _read_fp8,
        "gptq": _read_gptq,
        "mxfp4": _read_mxfp4,
    }
    reader = readers.get(method)
    if reader is None:
        raise RecipeError(
            f"model.path: {path} is stored quantized ({shorten(method)}), which preheat does not read (it reads "
            f"{', '.join(sorted({*PACKED, *DEQUANTIZED}))}); {_FULL}"
        )
    try:
        return reader(stored)
    except _UnsupportedError as error:
        raise RecipeError(
            f"model.path: {path}: config.json: quantization_config.{error.key}: {quote_value(error.value, 60)}: "
            f"{error.why}; {_FULL}"
        ) from None


class _UnsupportedError(Exception):
    def __init__(self, key: str, value: object, why: str):
        self.key, self.value, self.why = key, value, why


def _choose(stored: JsonObject, key: str, supported: Sequence[_T], default: object = None) -> _T:
    """Returns a setting, which must be one of those that are supported."""
    value: Any = stored.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if isinstance(value, bool) is not isinstance(supported[0], bool) or value not in supported:
        raise _UnsupportedError(key, value, f"preheat reads {' and '.join(map(str, supported))}")
    return value  # type: ignore[no-any-return]


def _read_group(stored: JsonObject, key: str = "group_size", where: str = "") -> int:
    """Returns the inputs per scale; 0: all of a row, which is written as -1."""
    value = stored.get(key)
    if type(value) is not int or not (value == -1 or value > 0):
        raise _UnsupportedError(f"{where}{key}", value, "must be a positive number, or -1 for whole rows")
    return max(value, 0)


def _describe(bits: int, columns: int) -> str:
    return f"{bits} bits in groups of {columns}" if columns else f"{bits} bits with a scale per row"


def _read_names(stored: JsonObject, key: str) -> list[str]:
    value = stored.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _UnsupportedError(key, value, "must be a list of module names")
    return value


def _is_named(name: str, names: Sequence[str]) -> bool:
    """True if a module or one around it is in a list of names, which may be parts of full names."""
    return any(name == part or f".{part}." in f".{name}." for part in names)


def _find_key(stored: JsonObject, older: str) -> str:
    """Returns the key of the layout: the older name, which transformers prefers, or `format`."""
    return older if stored.get(older) is not None or "format" not in stored else "format"


def _read_gptq(stored: JsonObject) -> QuantizedFolder:
    bits, group = _choose(stored, "bits", (2, 4, 8)), _read_group(stored)
    kind = _choose(stored, _find_key(stored, "checkpoint_format"), ("gptq", "gptq_v2"), "gptq")
    if stored.get("is_marlin_format"):
        raise _UnsupportedError("is_marlin_format", True, "its words are in the order of a kernel")
    rules = stored.get("dynamic") or {}
    if not isinstance(rules, dict) or any(not str(rule).startswith("-:") for rule in rules):
        raise _UnsupportedError("dynamic", rules, "preheat reads one number of bits for all layers")
    ordered = stored.get("desc_act", False)
    if not isinstance(ordered, bool):
        raise _UnsupportedError("desc_act", ordered, "must be true or false")
    layer = LayerFormat(
        "gptq", bits, columns=group, has_zeros=True, has_order=ordered and group > 0, offset=int(kind == "gptq")
    )
    skipped = [_compile("dynamic", rule.removeprefix("-:")) for rule in rules]
    return QuantizedFolder(
        "gptq",
        _describe(bits, group) + (", reordered by activations" if ordered else ""),
        lambda name: None if any(pattern.match(name) for pattern in skipped) else layer,
    )


def _read_awq(stored: JsonObject) -> QuantizedFolder:
    bits, group = _choose(stored, "bits", (4,)), _read_group(stored)
    _choose(stored, _find_key(stored, "version"), ("gemm",), "gemm")
    layer = LayerFormat("awq", bits, columns=group, has_zeros=True)
    names = _read_names(stored, "modules_to_not_convert")
    return QuantizedFolder("awq", _describe(bits, group), lambda name: None if _is_named(name, names) else layer)


def _read_bitsandbytes(stored: JsonObject) -> QuantizedFolder:
    layer: LayerFormat | Nf4Format
    note = ""
    if _choose(stored, "load_in_4bit", (True, False), False):
        # Without the key bitsandbytes means FP4.
        _choose(stored, "bnb_4bit_quant_type", ("nf4",), "fp4")
        double = _choose(stored, "bnb_4bit_use_double_quant", (True, False), False)
        layer, label = Nf4Format(double), "NF4 with scales in 8 bits" if double else "NF4"
    elif _choose(stored, "load_in_8bit", (True, False), False):
        layer, label = LayerFormat("int8_rows", 8, scale_dtype="float32"), _describe(8, 0)
        note = "activations, which bitsandbytes quantizes too, stay in the precision of training"
    else:
        raise _UnsupportedError("load_in_4bit", False, "load_in_4bit or load_in_8bit must be true")
    names = _read_names(stored, "llm_int8_skip_modules")
    return QuantizedFolder("bitsandbytes", label, lambda name: None if _is_named(name, names) else layer, note=note)


def _read_fp8(stored: JsonObject) -> QuantizedFolder:
    block = stored.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise _UnsupportedError("weight_block_size", block, "must be two positive numbers, or null")
    _choose(stored, "fmt", _E4M3, "e4m3")
    rows, columns = block or (0, 0)
    layer = LayerFormat("fp8", 8, rows=rows, columns=columns, scale_dtype="float32")
    names = _read_names(stored, "modules_to_not_convert")
    label = f"float8 in blocks of {rows} x {columns}" if block else "float8 with a scale per matrix"
    return QuantizedFolder("fp8", label, lambda name: None if _is_named(name, names) else layer)


def _read_mxfp4(stored: JsonObject) -> QuantizedFolder:
    return QuantizedFolder("mxfp4", "4 bits in blocks of 32", lambda name: None, experts=Mxfp4Format())


def _compile(key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise _UnsupportedError(key, pattern, f"is not a regular expression ({error})") from None


def _read_compressed_tensors(stored: JsonObject) -> QuantizedFolder:
    _choose(stored, "quantization_status", ("compressed",), "compressed")
    sparsity = stored.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _UnsupportedError("sparsity_config.format", sparsity["format"], "preheat reads dense weights")
    if stored.get("transform_config"):
        raise _UnsupportedError("transform_config", stored["transform_config"], "preheat does not rotate inputs")
    groups = stored.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise _UnsupportedError("config_groups", groups, "must be an object of groups")
    kinds, note = [], ""
    for name, group in groups.items():
        where = f"config_groups.{name}."
        if group.get("weights") is None:
            continue
        layer, label = _read_scheme(group.get("format") or stored.get("format"), group["weights"], where)
        kinds.append((_read_matchers(group, "targets"), layer, label))
        if group.get("input_activations") or group.get("output_activations"):
            note = "activations, which its config.json quantizes too, stay in the precision of training"
    if not kinds:
        raise _UnsupportedError("config_groups", groups, "no group has weights")
    ignored = _read_matchers(stored, "ignore")

    def format_of(name: str) -> LayerFormat | None:
        if any(matches(name) for matches in ignored):
            return None
        return next((layer for targets, layer, _ in kinds if any(matches(name) for matches in targets)), None)

    return QuantizedFolder(
        "compressed-tensors",
        " and ".join(dict.fromkeys(label for _, _, label in kinds)),
        format_of,
        note=note,
    )


def _read_matchers(settings: JsonObject, key: str) -> list[Callable[[str], bool]]:
    """Returns predicates for a list of targets: the class Linear, a module's name, or a regular expression (re:...)."""

    def matcher(target: str) -> Callable[[str], bool]:
        if target == "Linear":
            return lambda name: True
        if not target.startswith("re:"):
            return lambda name: name == target
        pattern = _compile(key, target.removeprefix("re:"))
        return lambda name: pattern.match(name) is not None

    return [matcher(target) for target in _read_names(settings, key)]


_LAYOUTS: Mapping[object, dict[str, Literal["words", "integers", "fp8"]]] = {
    "pack-quantized": {"int": "words"},
    "int-quantized": {"int": "integers"},
    "float-quantized": {"float": "fp8"},
    "naive-quantized": {"int": "integers", "float": "fp8"},
}


def _read_scheme(layout: object, weights: JsonObject, where: str) -> tuple[LayerFormat, str]:
    """Returns the format of a group's weights, and its label."""
    if layout not in _LAYOUTS:
        raise _UnsupportedError("format", layout, f"preheat reads {', '.join(map(str, _LAYOUTS))}")
    within = f"{where}weights."
    try:
        kind = _choose(weights, "type", tuple(_LAYOUTS[layout]), "int")
        bits = _choose(weights, "num_bits", (2, 4, 8) if layout == "pack-quantized" else (8,))
        strategy = _choose(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
        symmetric = _choose(weights, "symmetric", (True, False), True)
        columns = _read_group(weights) if strategy == "group" else 0
    except _UnsupportedError as error:
        raise _UnsupportedError(f"{within}{error.key}", error.value, error.why) from None
    rows = 0 if strategy == "tensor" else 1
    if strategy == "block":
        rows, columns = _read_block(weights.get("block_structure"), within)
    if not symmetric and (kind == "float" or rows != 1):
        raise _UnsupportedError(f"{within}symmetric", False, "preheat reads zero points of integers in rows and groups")
    # Names of compressed-tensors for an index; "weight" and "static" store the inputs in order.
    ordered = weights.get("actorder") in ("group", "dynamic", True)
    layer = LayerFormat(
        _LAYOUTS[layout][kind],
        bits,
        rows=rows,
        columns=columns,
        has_zeros=not symmetric,
        has_order=ordered and columns > 0,
    )
    if rows == 1:
        return layer, _describe(bits, columns) if kind == "int" else "float8 with a scale per row"
    number = "float8" if kind == "float" else f"{bits} bits"
    return layer, f"{number} in blocks of {rows} x {columns}" if rows else f"{number} with a scale per matrix"


def _read_block(value: Any, where: str) -> tuple[int, int]:
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise _UnsupportedError(f"{where}block_structure", value, "must be two positive numbers")
    return rows, columns
