"""`preheat serve`: servers of other projects answer as `preheat generate` does."""

from __future__ import annotations

import http.server
import importlib.util
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from preheat.errors import RunError
from preheat.inference.serving import ask, build_command

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


def test_options_that_a_server_cannot_follow_are_refused(preheat: Command, data_folder: Path) -> None:
    shutil.copytree(data_folder / "stories260K-hf", preheat.folder / "stories", dirs_exist_ok=True)
    stories = ("serve", "stories", "--engine", "transformers", "--dry-run")
    for arguments, message in (
        ((*stories, "--length", "64"), "--length 64: transformers' server has no limit; leave it out, or use"),
        ((*stories, "--base", "x"), "--base x: stories is served as it is; leave it out, or name a run"),
    ):
        assert message in preheat.here(*arguments, code=2)[1]
    # A command line needs no server.
    printed, _ = preheat.here("serve", "stories", "--engine", "vllm", "--dry-run")
    assert printed.splitlines()[-1].startswith("vllm serve ")
    assert "nosuch: is neither a run" in preheat.here("serve", "nosuch", "--engine", "llama.cpp", code=1)[1]
    assert not (preheat.folder / "nosuch").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_served_by_its_base(preheat: Command, data_folder: Path) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    base = transformers.AutoModelForCausalLM.from_pretrained(data_folder / "stories260K-hf")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(preheat.folder / "adapter")
    served = preheat.json("serve", "adapter", "--engine", "llama.cpp", "--dry-run")
    assert served["model"].endswith("adapter-f16.gguf")
    assert served["predicted"]["cache_gib"] > 0


RECIPE = """\
model: {path: stories}
data: {source: text.txt, validation: 0.2}
batch: {size: 4, seq_len: 64}
stop: {max_steps: 1}
techniques: {lora: {}}
"""


def train(preheat: Command, data_folder: Path, name: str, *settings: str) -> None:
    shutil.copytree(data_folder / "stories260K-hf", preheat.folder / "stories", dirs_exist_ok=True)
    shutil.copy(data_folder / "text" / "tinyshakespeare.txt", preheat.folder / "text.txt")
    (preheat.folder / "r.yaml").write_text(RECIPE)
    preheat.here("train", "r.yaml", "--out", name, *(part for setting in settings for part in ("--set", setting)))


def test_a_run_is_served_by_a_base_that_moved(preheat: Command, data_folder: Path) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    train(preheat, data_folder, "tuned", f"model.path={preheat.folder / 'stories'}")
    (preheat.folder / "stories").rename(preheat.folder / "elsewhere")
    serve = ("serve", "tuned", "--engine", "llama.cpp", "--dry-run")
    assert preheat.json(*serve, "--base", "elsewhere")["predicted"]["cache_gib"] > 0
    error = preheat.here("serve", "tuned", "--engine", "transformers", "--dry-run", "--base", "tuned", code=2)[1]
    assert "--base: tuned: not a model's folder (no config.json)" in error


def test_a_model_with_a_class_of_its_own_is_refused_before_the_export(preheat: Command, data_folder: Path) -> None:
    model = "model={family: gpt2, num_layers: 1, hidden_size: 32, num_heads: 2}"
    train(preheat, data_folder, "normed", model, "techniques={rms_norm: {}}", "data.vocab_size=300")
    error = preheat.here("serve", "normed", "--engine", "transformers", code=2)[1]
    assert error.startswith("error: --engine transformers: normed needs the Python code of its class")
    assert not (preheat.folder / "normed" / "serving").exists()


def test_a_server_is_asked_without_the_proxy_and_may_end_within_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            lines = [b'data: {"choices": [{"text": "Hi"}]}\n\n']
            lines += [b'data: {"choices": [{"finish_reason": "length"}]}\n\n'] if self.path == "/v1/completions" else []
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"" if self.path.startswith("/cut") else b"0\r\n\r\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{find_free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert ask(url, "m", "", tokens=2, chat=False).text == "Hi"
        for path in ("/cut", "/incomplete"):
            with pytest.raises(RunError, match=r"the server (does not answer|ended within)"):
                ask(f"{url}{path}", "m", "", tokens=2, chat=False)
        server.shutdown()


def test_vllm_is_given_the_export_and_the_address() -> None:
    options: dict[str, Any] = {"name": "mine", "host": "127.0.0.1", "port": 9000, "length": 2048}
    command = build_command("vllm", Path("x/serving/hf"), **options)
    assert command == [
        *("vllm", "serve", "x/serving/hf", "--host", "127.0.0.1", "--port", "9000"),
        *("--served-model-name", "mine", "--max-model-len", "2048"),
    ]
    # Only the caller's consent lets the server run the code of a folder.
    assert build_command("vllm", Path("x/serving/hf"), **options, trusted=True) == [*command, "--trust-remote-code"]
