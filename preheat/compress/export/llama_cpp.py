"""Runs a GGUF file with llama.cpp, if its package xllamacpp is installed, and compares logprobs and tokenization."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.compress.export import verify
from preheat.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
    from xllamacpp import Server

__all__ = ["compare", "is_installed"]

_POSITIONS = 6
"""Positions compared per row: llama.cpp returns the probabilities of only the next token after a prompt."""
_TOP = 512
"""Most likely tokens compared at each position."""


def is_installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def compare(
    file: Path, tokenizer: PreTrainedTokenizerFast, rows: list[Tensor], wanted: list[Tensor]
) -> verify.Difference:
    """Runs the file on the CPU and compares logprobs.

    Args:
        tokenizer: of the model; llama.cpp must tokenize the compared texts identically.
        rows: tokens, [1, length] each.
        wanted: logits, [1, length, vocabulary] each.

    Returns:
        Difference of logprobs at a few positions of each row, over llama.cpp's most likely tokens.

    Raises:
        RunError: llama.cpp cannot load the file, or tokenizes a text differently.
    """
    with _silence_output():
        pairs = _run(file, tokenizer, rows, wanted)  # inside, since the server also logs when it stops
    return verify.compare([expected for expected, _ in pairs], [computed for _, computed in pairs])


def _run(
    file: Path, tokenizer: PreTrainedTokenizerFast, rows: list[Tensor], wanted: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Returns logprobs of the same tokens by the model and by llama.cpp, [1, 1, tokens] each."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    # One sequence at a time, with a little room for the forced token; warm-up would only take time.
    settings.n_ctx, settings.n_parallel, settings.warmup = max(row.shape[1] for row in rows) + 8, 1, False
    settings.cpuparams.n_threads = torch.get_num_threads()
    try:
        server = xllamacpp.Server(settings)
    except RuntimeError as error:
        raise RunError(f"{file.name}: llama.cpp does not load it ({error}); nothing was written") from None
    _require_same_tokens(server, tokenizer, file)
    # The last token, because a tokenizer may put a space token in front.
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    pairs = []
    for row, logits in zip(rows, wanted, strict=True):
        length = row.shape[1] - 1  # leaves llama.cpp room for a next token in a full context
        # Evenly spaced over the row; a set, because short rows give equal positions.
        for end in sorted({max(1, length * n // _POSITIONS) for n in range(1, _POSITIONS + 1)}):
            logprobs = _compute_next_logprobs(server, row[0, :end].tolist(), letter)
            # Normalized over the whole vocabulary, then taken at llama.cpp's tokens.
            expected = logits[0, end - 1].double().log_softmax(-1)[list(logprobs)]
            pairs.append((expected[None, None], torch.tensor(list(logprobs.values()), dtype=torch.float64)[None, None]))
    return pairs


@contextlib.contextmanager
def _silence_output() -> Iterator[None]:
    """Context manager that redirects the process's stdout and stderr, to which llama.cpp logs directly."""
    # Buffered output of Python must not end up in the null device.
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(n) for n in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Descriptors instead of sys.stdout: llama.cpp is C++ and does not know Python's objects.
    try:
        for n in (1, 2):
            os.dup2(nowhere, n)
        yield
    finally:
        for n, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, n)
            os.close(descriptor)
        os.close(nowhere)


def _compute_next_logprobs(server: Server, ids: list[int], letter: int) -> dict[int, float]:
    """Returns the logprobs of the most likely next tokens.

    Args:
        letter: an ASCII token that is forced as the next one: llama.cpp returns no probabilities after an end token or
            an incomplete character. The probabilities are those before this bias.
    """
    request = {"prompt": ids, "max_tokens": 1, "n_probs": _TOP, "logit_bias": [[letter, 1000]], "temperature": 0.0}
    # Without the prompt's cache, so that each position is computed from the tokens alone.
    response = server.handle_completions({**request, "cache_prompt": False})
    if "choices" not in response:
        raise RunError(f"llama.cpp does not continue after {len(ids)} tokens: {json.dumps(response)[:200]}")
    tokens = response["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in tokens}


def _require_same_tokens(server: Server, tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    for text in verify.TEXTS:
        body = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            ids = json.load(answer)["tokens"]
        if ids != tokenizer.encode(text):
            raise RunError(
                f"{file.name}: llama.cpp splits {text[:24]!r}… into other tokens than the model; nothing was written"
            )
