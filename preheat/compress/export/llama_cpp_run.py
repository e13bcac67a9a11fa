"""Runs a GGUF file with llama.cpp (package xllamacpp): tokens of texts, and probabilities after prompts.

A process of its own (`python -m`): llama.cpp logs to stdout and stderr from its own threads, and ends the process on an
internal error.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xllamacpp import Server

    from preheat.core.json_types import JsonObject

__all__ = ["main"]


def main(file: str, request: str, answer: str) -> None:
    """Reads the request (`context`, `threads`, `letter`, `top`, `texts`, `prompts`) and writes the answer, as JSON.

    The answer has the tokens of each text, and the logprobs of the most likely next tokens after each prompt.
    """
    import xllamacpp

    asked: JsonObject = json.loads(Path(request).read_text(encoding="utf-8"))
    settings = xllamacpp.CommonParams()
    settings.model.path = file
    # One sequence at a time; warm-up would only take time.
    settings.n_ctx, settings.n_parallel, settings.warmup = asked["context"], 1, False
    settings.cpuparams.n_threads = asked["threads"]
    # The caches' default is f16, which flash attention uses in any case.
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)
    tokens = [_tokenize(server, text) for text in asked["texts"]]
    logprobs = [_compute_logprobs(server, prompt, asked["letter"], asked["top"]) for prompt in asked["prompts"]]
    Path(answer).write_text(json.dumps({"tokens": tokens, "logprobs": logprobs}, allow_nan=False), encoding="utf-8")


def _tokenize(server: Server, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    # Without the proxy of the environment: the server is on this machine.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        ids: list[int] = json.load(answer)["tokens"]
    return ids


def _compute_logprobs(server: Server, ids: list[int], letter: int, top: int) -> list[tuple[int, float]]:
    """Returns the most likely next tokens and their logprobs.

    Args:
        letter: an ASCII token that is forced as the next one: llama.cpp returns no probabilities after an end token or
            an incomplete character. The probabilities are those before this bias.
    """
    request = {"prompt": ids, "max_tokens": 1, "n_probs": top, "logit_bias": [[letter, 1000]], "temperature": 0.0}
    # Without the prompt's cache, so that each position is computed from the tokens alone.
    response = server.handle_completions({**request, "cache_prompt": False})
    if "choices" not in response:
        raise SystemExit(f"error: it does not continue after {len(ids)} tokens: {json.dumps(response)[:200]}")
    tokens = response["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [(token["id"], token["logprob"]) for token in tokens]


if __name__ == "__main__":
    main(*sys.argv[1:])
