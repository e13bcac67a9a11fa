"""`preheat serve`: servers of other projects answer as `preheat generate` does."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path

import pytest

from preheat.inference.serving import build_command

from .conftest import Command

PROMPT = "Once upon a time"


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "package", "dtype"), [("llama.cpp", "xllamacpp", "f32"), ("transformers", "openai", "")]
)
def test_a_server_answers_as_generate_does(
    preheat: Command, data_folder: Path, engine: str, package: str, dtype: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    shutil.copytree(data_folder / "stories260K-hf", preheat.folder / "stories", dirs_exist_ok=True)
    (generated,) = preheat.here.json("generate", "stories", "--prompt", PROMPT, "--tokens", "32")["texts"]
    precision = ("--dtype", dtype) if dtype else ()
    arguments = ("serve", "stories", "--engine", engine, *precision, "--port", str(find_free_port()), "--check")
    served = preheat.json(*arguments, "--prompt", PROMPT)
    assert served["answer"].strip() == generated["text"].strip()
    assert served["engine"] == engine
    measured, predicted = served["measured"], served["predicted"]
    # A server cannot hold less than the weights, nor write faster than the memory is read.
    assert measured["process_gib"] > predicted["weights_gib"]
    assert 0 < measured["tokens_per_second"] < predicted["tokens_per_second"]
    assert measured["seconds_to_first_token"] > predicted["seconds_to_first_token"]


def test_what_cannot_be_served_is_one_line(preheat: Command) -> None:
    for arguments, message in (
        (("serve", ".", "--engine", "triton"), "--engine triton: is unknown; use llama.cpp, transformers, vllm"),
        (("serve", ".", "--engine", "vllm"), "--engine vllm: needs vllm, which is not installed: pip install vllm"),
    ):
        error = preheat.here(*arguments, code=2)[1]
        assert error.strip() == f"error: {message}"


def test_vllm_is_given_the_export_and_the_address() -> None:
    command = build_command("vllm", Path("x/serving/hf"), name="mine", host="127.0.0.1", port=9000, length=2048)
    assert command == [
        *("vllm", "serve", "x/serving/hf", "--host", "127.0.0.1", "--port", "9000"),
        *("--served-model-name", "mine", "--max-model-len", "2048"),
    ]
