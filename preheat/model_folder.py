"""Readers for foreign model folders: JSON objects, safetensors files, the beginning-of-text token and stop tokens.

torch is imported with the first tensor.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.errors import RecipeError
from preheat.files import BadJson, read_value
from preheat.sanitize import escape_control_characters, quote_value, shorten

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "DEQUANTIZED",
    "FAULTS",
    "INDEX",
    "PACKED",
    "STORED",
    "WEIGHTS",
    "Weights",
    "beginning_tokens",
    "describe_fault",
    "check_finite",
    "format_names",
    "describe_missing_weights",
    "find_stop_tokens",
    "open_tensors",
    "keeps_quantization",
    "quantization_of",
    "silence_transformers",
    "read_object",
    "find_repository_file",
    "count_embedding_rows",
    "find_weight_files",
]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

DEQUANTIZED = ("fp8", "mxfp4")
"""`quant_method` of the published checkpoints (DeepSeek-V3, gpt-oss) that are read in full precision, dequantized."""

PACKED = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4")
"""`quant_method` of the published checkpoints whose linear layers, or experts, can stay packed in memory, frozen."""

STORED = "preheat"
"""`quant_method` of the models that preheat writes."""

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that libraries raise for inconsistent or incomplete settings, which they validate only in part."""

# Files in which torch stores tensors as pickles, which can run any code when they are opened.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Shards that torch's distributed checkpoint writes: each may hold only parts of its tensors.
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def describe_fault(error: BaseException, limit: int = 240) -> str:
    """Returns a library's error as one line, with the exception's type if the message alone is unclear.

    Example:
        >>> describe_fault(KeyError("factor")), describe_fault(ValueError("no such thing\\nat all"))
        ("KeyError: 'factor'", 'no such thing')
    """
    from huggingface_hub.errors import StrictDataclassError

    # huggingface_hub's strict dataclasses wrap the errors of a configuration's own checks.
    while error.__cause__ is not None and isinstance(error, ValueError | StrictDataclassError):
        # The validator's own text names its rule; the original error names the setting.
        error = error.__cause__  # a validator that wraps the original error
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    # A heading that ends with a colon: the fault itself is in the next line.
    if len(lines) > 1 and first.rstrip().endswith(":"):
        first = f"{first} {lines[1].strip()}"
    message = shorten(first, limit)
    # A KeyError's message is the key alone, which says nothing without the type.
    return message if message and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {message}"


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Silences transformers' warnings within the block; our own messages cover them."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def beginning_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Returns [beginning-of-text token] if a fast tokenizer's own rules prepend one, as in training; else [].

    Example:
        >>> beginning_tokens(AutoTokenizer.from_pretrained("hf-internal-testing/llama-tokenizer"))  # doctest: +SKIP
        [1]
    """
    # The first token of a text with and without special tokens: if both are the same, no rule adds it.
    firsts = []
    for own in (True, False):
        # by the Rust library: transformers' encode would turn the tokenizer's truncation and padding off
        # `attention_mask` is 0 at padding, which a tokenizer's own settings may add on the left.
        encoding = tokenizer.backend_tokenizer.encode("a", add_special_tokens=own)
        firsts.append([token for token, read in zip(encoding.ids, encoding.attention_mask, strict=True) if read][:1])
    return firsts[0] if firsts[0] == [tokenizer.bos_token_id] != firsts[1] else []


def find_repository_file(name: str, file: str) -> Path | None:
    """Returns a file of a folder or of a hub repository, which is downloaded; None without such a file.

    Args:
        name: folder or hub name.

    Raises:
        RecipeError: the hub does not let it be read.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    from transformers.utils import cached_file

    try:
        # None rather than an error, so that callers can name the missing file.
        cached = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise RecipeError(
            f"data.tokenizer: {file} of {quote_value(name)} cannot be read: {describe_fault(error, 200)}"
        ) from None
    return Path(cached) if cached else None


def find_stop_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Returns the tokens at which generation stops by the settings of the model that a tokenizer was loaded with.

    These are in generation_config.json, or in config.json without it. A tokenizer that was trained here has none.

    Raises:
        RecipeError: the file is damaged.
    """
    name = tokenizer.name_or_path
    for file in ("generation_config.json", "config.json"):
        if name and (found := find_repository_file(name, file)):
            value = read_object(found, "data.tokenizer").get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(n) is int and n >= 0 for n in ids):
                raise RecipeError(
                    f"data.tokenizer: {found}: eos_token_id is {quote_value(value)}, not a token ID; fix it or "
                    "remove it"
                )
            # A tokenizer with fewer tokens than the model lacks some of them.
            tokens = tokenizer.convert_ids_to_tokens([n for n in ids if n < count_embedding_rows(tokenizer)])
            return tuple(token for token in tokens if token is not None)
    return ()


def count_embedding_rows(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns the number of embedding rows that the tokens need: the largest id + 1.

    `len(tokenizer)` counts the tokens, which are fewer if the ids have gaps.
    """
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def format_names(names: Iterable[str]) -> str:
    """Returns the first three names and the number of the others.

    Example:
        >>> format_names(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    shortened = [shorten(name, 120) for name in names]
    more = f" and {len(shortened) - 3:,} more" if len(shortened) > 3 else ""
    return ", ".join(shortened[:3]) + more


def read_object(file: Path, knob: str) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        RecipeError: the file cannot be read or holds no object; the message begins with `knob` and names the file.
    """
    try:
        value = read_value(file.read_bytes())
    except OSError as error:
        raise RecipeError(f"{knob}: {escape_control_characters(file)}: cannot be read ({error.strerror})") from None
    except BadJson as error:
        line = f", line {error.line:,}" if error.line else ""
        raise RecipeError(
            f"{knob}: {escape_control_characters(file)}: is not JSON ({error.message}{line}); restore the model's own"
        ) from None
    if not isinstance(value, dict):
        raise RecipeError(
            f"{knob}: {escape_control_characters(file)}: holds {quote_value(value, 60)}, not a JSON object; restore "
            "the model's own"
        )
    return value


def quantization_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `quantization_config` of a config.json, which a composite model may state in its text part; or {}.

    Example:
        >>> quantization_of({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
        {'quant_method': 'fp8'}
    """
    text = values.get("text_config")
    for part in (values, text if isinstance(text, dict) else {}):
        if isinstance(settings := part.get("quantization_config"), dict):
            return settings
    return {}


def keeps_quantization(method: object, choice: str) -> bool:
    """True if the model of a folder of this `quant_method` is quantized in memory too, or cannot be read at all.

    Args:
        choice: `model.quantized_weights`.

    Example:
        >>> keeps_quantization("gptq", "auto"), keeps_quantization("fp8", "auto"), keeps_quantization("fp8", "packed")
        (True, False, True)
    """
    if method not in (*PACKED, *DEQUANTIZED):
        return True
    # FP8 and MXFP4 have always been read in full precision: `auto` does not change these recipes.
    return choice == "packed" or (choice == "auto" and method not in DEQUANTIZED)


class Weights(NamedTuple):
    """The files that hold a model's weights.

    Attributes:
        files: in reading order; if two files have a tensor of one name, the later one wins.
        notes: messages for the user about files that are not read.
    """

    files: list[Path]
    notes: list[str]


def find_weight_files(folder: Path, knob: str, *, stated: Any = None) -> Weights:
    """Returns the weight files that transformers reads: `model.safetensors`, else the shards of its index.

    Args:
        stated: `transformers_weights` of config.json, which names another file of the folder.

    Raises:
        RecipeError: there are no weights, or the index names a missing file; the message begins with `knob`.
    """
    # Sorted, so that messages name the same files on every machine.
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    if any(_SHARD.fullmatch(name) for name in present):
        raise RecipeError(
            f"{knob}: {folder} holds a distributed checkpoint of transformers "
            f"({next(filter(_SHARD.fullmatch, present))}); load it there "
            f"and write it again by save_pretrained, which makes {WEIGHTS}"
        )
    if stated is not None:
        main = _resolve_inside(folder, stated, f"{knob}: {folder / 'config.json'}: transformers_weights")
        if not main.is_file() or not main.name.endswith((".safetensors", ".safetensors.index.json")):
            raise RecipeError(
                f"{knob}: {folder / 'config.json'} names {quote_value(stated)} as transformers_weights, which is not a "
                "safetensors file of the folder"
            )
    elif (folder / WEIGHTS).is_file():
        main = folder / WEIGHTS
    elif (folder / INDEX).is_file():
        main = folder / INDEX
    else:
        raise RecipeError(f"{knob}: {folder} {_describe_missing(folder, present)}")
    files = _list_shards(folder, main, knob) if main.name.endswith(".json") else [main]
    # Many published folders also have the same weights in Mistral's own layout (consolidated*.safetensors).
    unread = [name for name in present if folder / name not in files and not name.startswith("consolidated")]
    notes = [f"{folder}: {format_names(unread)} not read; transformers reads {main.name}"] if unread else []
    return Weights(files, notes)


def describe_missing_weights(folder: Path) -> str:
    """Returns the weights that a download has not brought into a folder, as part of a sentence; "" if all are there."""
    if not any(folder.glob("*.safetensors")):
        return "its weights"
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return ""
    places = read_object(folder / INDEX, "model.path").get("weight_map")
    names = set(places.values()) if isinstance(places, dict) else set()
    return format_names(sorted(str(name) for name in names if not (folder / str(name)).is_file()))


def _resolve_inside(folder: Path, name: Any, what: str) -> Path:
    """Returns the path of a file that the folder's settings name; it must lie inside the folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise RecipeError(f"{what} names {quote_value(name)}, which is not a file name")
    # abspath rather than resolve: the hub's cache holds links, whose targets are outside of the folder.
    file, root = Path(os.path.abspath(folder / name)), Path(os.path.abspath(folder))
    if root not in file.parents:
        raise RecipeError(f"{what} names {quote_value(name)}, which is outside the folder and is not read")
    return folder / name


def _list_shards(folder: Path, index: Path, knob: str) -> list[Path]:
    places = read_object(index, knob).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise RecipeError(f"{knob}: {index} has no weight_map that maps tensors to files; restore the model's own")
    # Each shard once, though it holds many tensors.
    files = sorted({_resolve_inside(folder, name, f"{knob}: {index}") for name in places.values()})
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise RecipeError(
            f"{knob}: {index} names {format_names(absent)}, not in the folder ({len(absent)} of {len(files)} "
            "files); download the rest"
        )
    return files


def _describe_missing(folder: Path, present: list[str]) -> str:
    """Explains why transformers finds no weights in a folder, and what to do."""
    if variant := next((name for name in present if re.fullmatch(r"model\.[\w-]+\.safetensors", name)), None):
        return (
            f"has no {WEIGHTS}, only {variant}, which transformers reads as a variant; rename it to {WEIGHTS}, "
            "or set model.weights: random"
        )
    if present:
        return (
            f"has neither {WEIGHTS} nor {INDEX}, which transformers reads, but {format_names(present)}; rename the "
            "file, or "
            "restore the index (or set model.weights: random)"
        )
    others = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    hint = (
        f"; {others[0]} is a pickle, which preheat does not open: if you trust it, load it with transformers' "
        "AutoModelForCausalLM.from_pretrained and write it again by save_pretrained, which makes safetensors"
        if others
        else ""
    )
    return f"has no *.safetensors{hint}; or set model.weights: random"


def open_tensors(file: Path, knob: str) -> Any:
    """Opens a safetensors file by `safe_open`.

    Raises:
        RecipeError: the file is truncated, of another format, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise RecipeError(
            f"{knob}: {file}: not a complete safetensors file ({describe_fault(error, 160)}); download it again"
        ) from None
    except OSError as error:
        raise RecipeError(f"{knob}: {file}: cannot be read ({describe_fault(error, 160)})") from None


def check_finite(value: Tensor, name: str, file: Path, knob: str, *, limit: bool = False) -> Tensor:
    """Returns the tensor after checking that all of its values are finite.

    Args:
        limit: it is a limit on other values, which may be infinite.

    Raises:
        RecipeError: the tensor holds NaN or infinity.
    """
    import torch

    if limit and not bool(value.isnan().any()):
        return value
    if value.is_floating_point() and value.numel():
        values = value if value.element_size() > 1 else value.float()  # torch has no reductions for 8-bit floats
        low, high = torch.aminmax(values)  # propagates NaN, in a fortieth of the time of isfinite().all()
        if not bool(
            # The difference is finite only if both ends are. In 8 or 16 bits it could overflow by itself, hence fp32;
            # if it still does, the exact check decides.
            torch.isfinite(high - low if values.element_size() > 2 else high.float() - low.float())
        ) and not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            raise RecipeError(
                f"{knob}: {file}: {shorten(name, 120)} holds {count:,} values that are not finite (NaN or "
                f"infinity) of {value.numel():,}; "
                "the file is damaged, or the model diverged: use another copy"
            )
    return value
