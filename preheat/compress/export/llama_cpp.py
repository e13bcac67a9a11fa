"""A GGUF file run by llama.cpp itself, where its Python package xllamacpp is installed: logarithms of probabilities, and tokens of a text."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat.compress.export import verify
from preheat.errors import RunError

__all__ = ["compare", "installed"]

_PLACES = 6
"""Positions of a row that are looked at: llama.cpp tells the probabilities of a text's next token alone."""
_PIECES = 512
"""The most likely pieces at each, which it tells as text."""


def installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def compare(file: Path, tokenizer: Any, rows: list[Tensor], wanted: list[Tensor]) -> verify.Difference:
    """Runs the file on the CPU and compares.

    Args:
        tokenizer: of the model; llama.cpp must cut the compared texts in the same way.
        rows: tokens, [1, length] each.
        wanted: logits, [1, length, vocabulary] each.

    Returns:
        Of logarithms of probabilities, at a few positions of each row, over llama.cpp's most likely pieces there.

    Raises:
        RunError: llama.cpp does not load the file, or cuts a text into other tokens.
    """
    with _silent():
        pairs = _run(file, tokenizer, rows, wanted)  # and its server is gone, which says so, too
    return verify.compare([own for own, _ in pairs], [found for _, found in pairs])


def _run(file: Path, tokenizer: Any, rows: list[Tensor], wanted: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Logarithms of probabilities of the same pieces by the model and by llama.cpp, [1, 1, pieces] each."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup = max(row.shape[1] for row in rows) + 8, 1, False
    settings.cpuparams.n_threads = torch.get_num_threads()
    try:
        server = xllamacpp.Server(settings)
    except RuntimeError as error:
        raise RunError(f"{file.name}: llama.cpp does not load it ({error}); nothing was written") from None
    _same_tokens(server, tokenizer, file)
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    pairs = []
    for row, logits in zip(rows, wanted, strict=True):
        length = (
            row.shape[1] - 1
        )  # a text as long as all the model's positions leaves llama.cpp no room for a next piece
        for end in sorted({max(1, length * n // _PLACES) for n in range(1, _PLACES + 1)}):
            told = _next(server, row[0, :end].tolist(), letter)
            own = logits[0, end - 1].double().log_softmax(-1)[list(told)]
            pairs.append((own[None, None], torch.tensor(list(told.values()), dtype=torch.float64)[None, None]))
    return pairs


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """llama.cpp writes its log past Python, to the process's own standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(n) for n in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for n in (1, 2):
            os.dup2(nowhere, n)
        yield
    finally:
        for n, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, n)
            os.close(descriptor)
        os.close(nowhere)


def _next(server: Any, ids: list[int], letter: int) -> dict[int, float]:
    """Logarithm of the probability of each of the most likely next pieces.

    Args:
        letter: a piece of ASCII text that is made to come next: after an end or a part of a letter no probabilities are told. Those that
            are told are from before this.
    """
    asked = {"prompt": ids, "max_tokens": 1, "n_probs": _PIECES, "logit_bias": [[letter, 1000]], "temperature": 0.0}
    told = server.handle_completions({**asked, "cache_prompt": False})
    if "choices" not in told:
        raise RunError(f"llama.cpp does not go on after {len(ids)} tokens: {json.dumps(told)[:200]}")
    pieces = told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {piece["id"]: piece["logprob"] for piece in pieces}


def _same_tokens(server: Any, tokenizer: Any, file: Path) -> None:
    for text in verify.TEXTS:
        body = json.dumps({"content": text, "add_special": True}).encode()
        asked = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            ids = json.load(answer)["tokens"]
        if ids != tokenizer.encode(text):
            raise RunError(
                f"{file.name}: llama.cpp cuts {text[:24]!r}… into other tokens than the model; nothing was written"
            )
