"""Reads a folder's generation_config.json so that transformers accepts it when it is written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.errors import RunError
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from preheat.core.json_types import JsonObject

__all__ = ["ends_of", "read_generation"]

_FILE = "generation_config.json"
_FIRST = ("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "num_beams")
# fmt: off
_GREEDY = (  # settings that change even greedy decoding; `preheat generate` applies only its own options
    "repetition_penalty", "no_repeat_ngram_size", "num_beams", "min_length", "min_new_tokens", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id",
)
# fmt: on
_NEUTRAL: tuple[float | None, ...] = (None, 0, 1, 1.0)  # values with which they change nothing


def read_generation(folder: Path | None) -> tuple[GenerationConfig | None, list[str]]:
    """The generation settings of a model's folder and notes about them; None if it has none.

    Contradictory settings, which transformers reads with a warning and refuses to write, are dropped one by one and
    named in the notes; the begin, end and pad tokens are kept first, then `do_sample`.

    Raises:
        RunError: the file is damaged.
    """
    from transformers import GenerationConfig

    if folder is None or not (folder / _FILE).is_file():
        return None, []
    file = folder / _FILE
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{file}: cannot be read ({shorten(str(error))}); fix it or remove it from the folder") from None
    if not isinstance(values, dict):
        raise RunError(
            f"{file}: is {quote_value(values)}, not a mapping of settings; fix it or remove it from the folder"
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(key)
        # Models with several end tokens (Llama 3) list them.
        numbers = value if isinstance(value, list) else [value]
        if not all(number is None or (type(number) is int and number >= 0) for number in numbers):
            raise RunError(
                f"{file}: {key} is {quote_value(value)}, not a token ID; fix it or remove it from the folder"
            )
    # Provenance of the file, not settings.
    for key in ("_from_model_config", "transformers_version"):
        values.pop(key, None)
    chosen: JsonObject = {}
    left = []
    # Adds one setting at a time and keeps it if the result is consistent, so the first ones win a contradiction.
    for key in sorted(values, key=lambda key: (key not in _FIRST, _FIRST.index(key) if key in _FIRST else 0)):
        try:
            GenerationConfig(**chosen, **{key: values[key]}).validate(strict=True)
        except (ValueError, TypeError, AttributeError):  # a value of the wrong type raises the last two
            left.append(key)
        else:
            chosen[key] = values[key]
    notes = []
    if left:
        names = ", ".join(f"{shorten(key, 40)} {quote_value(values[key], 30)}" for key in left[:6]) + (
            " …" if left[6:] else ""
        )
        notes.append(f"the base's {_FILE} contradicts itself, so these of its settings were left out: {names}")
    if greedy := [key for key in _GREEDY if chosen.get(key) not in _NEUTRAL]:
        names = ", ".join(f"{key} {quote_value(chosen[key], 30)}" for key in greedy)
        notes.append(
            f"the base's {_FILE} sets {names}: transformers follows it, preheat generate only its own settings"
        )
    return GenerationConfig(**chosen), notes


def ends_of(settings: GenerationConfig | None) -> list[int]:
    """The end-of-text tokens of generation settings."""
    tokens = None if settings is None else settings.eos_token_id
    return [tokens] if isinstance(tokens, int) else list(tokens or [])
