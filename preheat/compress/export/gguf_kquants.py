"""K-quants by llama.cpp's own code: the type of each tensor, and ggml's quantizer of blocks in the package xllamacpp.

The types are those of llama.cpp's tool `llama-quantize` without an importance matrix, but for rows that are not whole
blocks: the head, and in q4_k_m and q5_k_m half of the value and down projections, have more bits than the rest.
Source: llama.cpp's llama-quant.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TypeChoice", "encode", "load_quantizer"]

_TYPES = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
_FALLBACK = "Q8_0"  # for rows that are not whole blocks of 256; llama-quantize's Q5_0 and Q5_1 cannot be read back
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
_MIXTRAL = 8  # number of experts whose attention has more bits
_BLOCK, _K_BLOCK = 32, 256  # weights per block of the other types and of K-quants


class TypeChoice:
    """Chooses the type of each tensor of a file, as `llama-quantize` does.

    Args:
        dtype: q4_k_m, q5_k_m or q6_k.
        titles: all tensors of the file, in the order of layers.
        layers: number of layers.
        experts: number of experts per layer.

    Example:
        >>> choose = TypeChoice("q4_k_m", ["output.weight", "blk.0.attn_q.weight"], 1, 0)
        >>> choose("output.weight", 256), choose("blk.0.attn_q.weight", 256), choose("blk.0.attn_q.weight", 96)
        ('Q6_K', 'Q4_K', 'Q8_0')
    """

    def __init__(self, dtype: str, titles: Sequence[str], layers: int, experts: int) -> None:
        self._dtype, self._layers, self._experts = dtype, layers, experts
        self._values = [title for title in titles if title.endswith(_VALUES)]
        self._tied = "output.weight" not in titles

    def __call__(self, title: str, width: int) -> str:
        """Returns the type of a matrix whose rows have `width` weights."""
        if width % _K_BLOCK:
            return "F16" if width % _BLOCK else _FALLBACK
        kind = _TYPES[self._dtype]
        if title == "output.weight" or (self._tied and title in _EMBEDDINGS):
            return "Q6_K"
        mixed = self._dtype != "q6_k"
        if title in self._values:
            if self._experts == _MIXTRAL:
                return "Q8_0"
            return "Q6_K" if mixed and _has_more_bits(self._values.index(title), len(self._values)) else kind
        if title.endswith("attn_k.weight") and self._experts == _MIXTRAL:
            return "Q8_0"
        if title.endswith("attn_output.weight") and self._experts == _MIXTRAL and self._dtype == "q4_k_m":
            return "Q5_K"
        if "ffn_down" in title and mixed and _has_more_bits(int(title.split(".")[1]), self._layers):
            return "Q6_K"
        return kind


def _has_more_bits(n: int, count: int) -> bool:
    """Returns True for the first and last eighth of `count` layers, and each third between them."""
    return n < count // 8 or n >= 7 * count // 8 or (n - count // 8) % 3 == 2


@functools.cache
def load_quantizer() -> Callable[..., int] | None:
    """Returns ggml's function that quantizes rows; None if no installed xllamacpp exports it."""
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    import xllamacpp.xllamacpp

    function = getattr(ctypes.CDLL(xllamacpp.xllamacpp.__file__), "ggml_quantize_chunk", None)
    if function is None:
        return None
    function.restype = ctypes.c_size_t
    # Type, values, blocks, first value, rows, values per row, importance of the columns.
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    quantize: Callable[..., int] = function
    return quantize


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Quantizes fp32 values [..., width] into blocks, [..., bytes per row]."""
    import gguf
    import numpy as np

    values = np.ascontiguousarray(values, dtype=np.float32)
    number = gguf.GGMLQuantizationType[kind]
    size, bytes_per_block = gguf.GGML_QUANT_SIZES[number]
    width = values.shape[-1]
    blocks = np.empty((*values.shape[:-1], width // size * bytes_per_block), dtype=np.uint8)
    quantize = load_quantizer()
    assert quantize is not None
    written = quantize(int(number), values.ctypes.data, blocks.ctypes.data, 0, values.size // width, width, None)
    assert written == blocks.nbytes
    return blocks
