"""Starts a server of another project on an export, and asks it through its OpenAI-style API. No torch."""

from __future__ import annotations

import http.client
import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from preheat.errors import RecipeError, RunError
from preheat.hardware.child_processes import describe_exit, tie_to_parent

__all__ = ["ENGINES", "FORMATS", "Engine", "Reply", "ask", "build_command", "choose_engine", "running_server"]

Engine = Literal["llama.cpp", "transformers", "vllm"]
ENGINES: tuple[Engine, ...] = ("llama.cpp", "transformers", "vllm")
FORMATS: Mapping[Engine, str] = {"llama.cpp": "gguf", "transformers": "hf", "vllm": "hf"}
"""The export that an engine reads."""
_NEEDS: Mapping[Engine, Sequence[str]] = {
    "llama.cpp": ("xllamacpp", "gguf"),
    "transformers": ("fastapi", "uvicorn", "openai"),
    "vllm": ("vllm",),
}
_INSTALL: Mapping[Engine, str] = {
    "llama.cpp": "pip install 'preheat[llama-cpp]'",
    "transformers": "pip install 'preheat[serve]'",
    "vllm": "pip install vllm",
}
_START = 300.0
"""Seconds within which a server must answer: large models load for minutes."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxy of the environment: the servers run on this machine."""
_FAULTS = (OSError, http.client.HTTPException)  # URLError is an OSError; a server that ends within an answer is not


@dataclass(frozen=True)
class Reply:
    """An answer of a server.

    Attributes:
        first_token: seconds until its first part arrived.
        seconds: until it was complete.
        tokens: of the answer, if the server counts them.
    """

    text: str
    first_token: float
    seconds: float
    tokens: int | None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token."""
        if not self.tokens or self.tokens < 2 or self.seconds <= self.first_token:
            return None
        return (self.tokens - 1) / (self.seconds - self.first_token)


def choose_engine(wanted: str, device: str, *, installed: bool = True) -> Engine:
    """Returns the server to start.

    Args:
        wanted: of `ENGINES`, or auto: the first that is installed; vllm on a GPU only.
        device: kind of the device.
        installed: False accepts a named engine that is not installed, for its command line.

    Raises:
        RecipeError: it is unknown or not installed.
    """
    if wanted != "auto":
        engine = next((name for name in ENGINES if name == wanted), None)
        if engine is None:
            raise RecipeError(f"--engine {wanted}: is unknown; use {', '.join(ENGINES)}")
        if installed and (missing := _find_missing(engine)):
            raise RecipeError(f"--engine {engine}: needs {missing[0]}, which is not installed: {_INSTALL[engine]}")
        return engine
    order: tuple[Engine, ...] = (
        ("llama.cpp", "transformers") if device == "cpu" else ("vllm", "transformers", "llama.cpp")
    )
    for engine in order:
        if not _find_missing(engine):
            return engine
    raise RecipeError(f"preheat serve: no server is installed: {_INSTALL[order[0]]}, or {_INSTALL[order[1]]}")


def _find_missing(engine: Engine) -> list[str]:
    return [name for name in _NEEDS[engine] if importlib.util.find_spec(name) is None]


def build_command(
    engine: Engine, model: Path, *, name: str, host: str, port: int, length: int, trusted: bool = False
) -> list[str]:
    """Returns the command that starts a server.

    Args:
        model: the exported file (llama.cpp) or folder.
        name: of the model in requests and answers.
        length: tokens of a sequence, prompt and answer together.
        trusted: True if the server may run the code of the model's folder, which transformers' cannot.

    Example:
        >>> build_command("vllm", Path("export-hf"), name="mine", host="127.0.0.1", port=8000, length=2048)[:3]
        ['vllm', 'serve', 'export-hf']
    """
    if engine == "llama.cpp":
        return [
            sys.executable,
            "-m",
            "preheat.inference.llama_cpp_server",
            str(model),
            name,
            host,
            str(port),
            str(length),
        ]
    if engine == "transformers":
        start = "from transformers.cli.transformers import app; app()"
        return [sys.executable, "-c", start, "serve", str(model), "--host", host, "--port", str(port)]
    options = ["--host", host, "--port", str(port), "--served-model-name", name, "--max-model-len", str(length)]
    return ["vllm", "serve", str(model), *options, *(["--trust-remote-code"] if trusted else [])]


@contextmanager
def running_server(command: Sequence[str], url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager that starts a server, waits until it answers, and ends it.

    Args:
        url: of the server: `http://127.0.0.1:8000`.
        log: file for its output.

    Raises:
        RunError: it ended, or did not answer in time; the message has the last line of its log.
    """
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(tie_to_parent(command), stdout=output, stderr=subprocess.STDOUT)
    except OSError as error:
        raise RunError(f"{error.filename}: {error.strerror}; the server's log is written there") from None
    try:
        until = time.monotonic() + _START
        while not _is_ready(url):
            code = process.poll()
            if code is not None or time.monotonic() > until:
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                last = f": {lines[-1][:200]}" if lines else ""
                what = f"the server {describe_exit(code)}" if code is not None else "the server did not answer in time"
                raise RunError(f"{what}{last} (see {log})")
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with _OPENER.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except _FAULTS:
        return False


def ask(url: str, model: str, prompt: str, *, tokens: int, chat: bool) -> Reply:
    """Asks a server for a greedy answer, as a stream.

    Args:
        model: its name in the request.
        prompt: a text to continue, or with `chat` the user's message.

    Raises:
        RunError: the server refuses or ends, or its answer is no stream of an OpenAI-style API.
    """
    body: dict[str, object] = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body["stream_options"] = {"include_usage": True}
    path = "chat/completions" if chat else "completions"
    request = urllib.request.Request(
        f"{url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun, first, parts, counted, is_complete = time.perf_counter(), 0.0, list[str](), None, False
    try:
        with _OPENER.open(request, timeout=_START) as response:
            for line in response:
                data = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                counted = (event.get("usage") or {}).get("completion_tokens", counted)
                for choice in event.get("choices") or ():
                    is_complete |= choice.get("finish_reason") is not None
                    text = (choice.get("delta") or {}).get("content") if chat else choice.get("text")
                    if text:
                        first = first or time.perf_counter() - begun
                        parts.append(text)
    except urllib.error.HTTPError as error:
        detail = error.read(300).decode("utf-8", errors="replace")
        raise RunError(f"the server refuses a request ({error.code}): {detail}") from None
    except (*_FAULTS, json.JSONDecodeError) as error:
        raise RunError(f"the server does not answer a request: {error}") from None
    if not is_complete:  # transformers' server sends no [DONE]
        raise RunError("the server ended within an answer")
    total = time.perf_counter() - begun
    return Reply("".join(parts), first or total, total, counted)
