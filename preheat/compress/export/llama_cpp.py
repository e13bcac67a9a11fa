"""Compares logprobs and tokenization of a GGUF file, run by llama.cpp, with the model's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.compress.export import llama_cpp_run, verify
from preheat.errors import RunError
from preheat.hardware.child_processes import tie_to_parent
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from preheat.core.json_types import JsonObject

__all__ = ["compare", "is_installed"]

_POSITIONS = 6
"""Positions compared per row: llama.cpp returns the probabilities of only the next token after a prompt."""
_TOP = 512
"""Most likely tokens compared at each position."""


def is_installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def compare(
    file: Path,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Tensor],
    wanted: list[Tensor],
    *,
    begins: bool = False,
) -> verify.Difference:
    """Runs the file on the CPU and compares logprobs.

    Args:
        tokenizer: of the model; llama.cpp must tokenize the compared texts identically.
        rows: tokens, [1, length] each.
        wanted: logits, [1, length, vocabulary] each.
        begins: True if llama.cpp may put the BOS token before a text.

    Returns:
        Difference of logprobs at a few positions of each row, over llama.cpp's most likely tokens.

    Raises:
        RunError: llama.cpp cannot run the file, or tokenizes a text differently.
    """
    # Leaves llama.cpp room for a next token in a full context; short rows give equal positions.
    ends = [sorted({max(1, (row.shape[1] - 1) * n // _POSITIONS) for n in range(1, _POSITIONS + 1)}) for row in rows]
    answer = _run(
        file,
        {
            # With a little room for the forced token.
            "context": max(row.shape[1] for row in rows) + 8,
            "threads": torch.get_num_threads(),
            # The last token, because a tokenizer may put a space token in front.
            "letter": tokenizer.encode("a", add_special_tokens=False)[-1],
            "top": _TOP,
            "texts": list(verify.TEXTS),
            "prompts": [row[0, :end].tolist() for row, places in zip(rows, ends, strict=True) for end in places],
        },
    )
    for text, ids in zip(verify.TEXTS, answer["tokens"], strict=True):
        expected_ids = tokenizer.encode(text)
        if ids != expected_ids and not (begins and ids == [tokenizer.bos_token_id, *expected_ids]):
            raise RunError(
                f"{file.name}: llama.cpp splits {text[:24]!r}… into other tokens than the model; nothing was written"
            )
    places = [(logits, end) for logits, places in zip(wanted, ends, strict=True) for end in places]
    expected, computed = [], []
    for (logits, end), logprobs in zip(places, answer["logprobs"], strict=True):
        tokens, values = zip(*logprobs, strict=True)
        # Normalized over the whole vocabulary, then taken at llama.cpp's tokens.
        expected.append(logits[0, end - 1].double().log_softmax(-1)[list(tokens)][None, None])
        computed.append(torch.tensor(values, dtype=torch.float64)[None, None])
    return verify.compare(expected, computed)


def _run(file: Path, request: JsonObject) -> JsonObject:
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request, allow_nan=False), encoding="utf-8")
        command = [sys.executable, "-m", llama_cpp_run.__name__, str(file), str(asked), str(answer)]
        process = subprocess.run(tie_to_parent(command), capture_output=True, text=True, errors="replace")
        if not answer.is_file():
            raise RunError(
                f"{file.name}: llama.cpp does not run it ({_find_reason(process.stdout + process.stderr)}); nothing "
                "was written"
            )
        answered: JsonObject = json.loads(answer.read_text(encoding="utf-8"))
    return answered


def _find_reason(log: str) -> str:
    """Returns the first line of llama.cpp's log that says what failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reasons = [line for line in lines if "GGML_ASSERT" in line or "error" in line.lower()]
    return shorten((reasons or lines[-1:] or ["no output"])[0], 200)
