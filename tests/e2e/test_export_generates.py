"""Whoever opens an export with the format's own tools, by the lines of its card, gets what `preheat generate` gives: the tokens, and where they end."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from preheat.compress.export import torchchat

from .conftest import Command

TEMPLATE = """{{- bos_token }}
{#- as models of 2025 write theirs: over several lines, whose white space transformers cuts -#}
{%- for m in messages %}
    {% if m['role'] == 'system' %}
{{- '<|turn|>system:' + m['content'] + '<|eot|>' }}
    {% elif m['role'] == 'user' %}
<|turn|>user:
{{ m['content'] }}<|eot|>
    {% else %}
<|turn|>assistant:
        {% generation %}
{{ m['content'] }}<|eot|>
        {% endgeneration %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|turn|>assistant:
{% endif %}"""
IN_WORDS = """{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}##
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
RECIPE = """\
model: {path: base}
data: {source: rows.jsonl, validation: 0.2, preflight: {template_end: warn, pad_is_end: warn}}
batch: {size: 4, seq_len: 64}
optimizer: {lr: 2.0e-2}
stop: {max_steps: 60}
hardware: {threads: 1}
techniques: {lora: {rank: 16}}
"""
ASKED = "Hello 3"


def write_base(folder: Path, template: str) -> None:
    """A model with tokens for bytes, one that begins each text and two that end one, of which its own settings name the first alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<end>", "<s>", "<|turn|>", "<|eot|>", *alphabet]
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        bos_token_id=1, eos_token_id=0, max_position_embeddings=96, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    names = {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=["<|turn|>", "<|eot|>"], **names
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


class Run:
    """A base tuned on chats, and what is answered there."""

    def __init__(self, folder: Path, cache: Path, template: str):
        self.preheat = Command(folder, cache)
        write_base(folder / "base", template)
        rows = [[("user", f"Hello {n}"), ("assistant", "Yes.")] for n in range(30)]
        messages = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in messages))
        (folder / "r.yaml").write_text(RECIPE)
        self.preheat.here.json("train", "r.yaml", "--out", "run")
        self.ours = self.preheat.here.json("generate", "run", "--prompt", ASKED, "--tokens", "20")
        assert self.ours["text"] == "Yes."
        self.perplexity = self.preheat.here.json("eval", "run")["perplexity"]

    def export(self, to: str, *arguments: str) -> Path:
        made = self.preheat.here.json("export", "run", "--to", to, "--out", to, *arguments)
        assert made["after"]["perplexity"] == pytest.approx(self.perplexity, rel=1e-4), "what eval says"
        return self.preheat.folder / to

    def by_card(self, folder: Path) -> tuple[str, dict[str, Any]]:
        """What the lines of a card print, asked the same, and their variables."""
        card = (folder / "README.md").read_text(encoding="utf-8")
        lines = card.partition("## Use\n\n```\n")[2].partition("\n```")[0]
        assert lines.count('"Hello"') == 1
        names: dict[str, Any] = {}
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
            exec(lines.replace('"Hello"', repr(ASKED)), names)
        return out.getvalue().rstrip("\n"), names

    def check(self, folder: Path) -> dict[str, Any]:
        text, names = self.by_card(folder)
        assert text == self.ours["text"]
        assert len(names["answer"]) == self.ours["tokens"]
        return names


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    made = Run(tmp_path_factory.mktemp("chats"), cache, TEMPLATE)
    assert made.ours["finish_reason"] == "stop token"
    return made


def test_onnx_runtime_answers_as_the_run_does(run: Run) -> None:
    names = run.check(run.export("onnx"))
    assert names["answer"][-1] == 3
    assert names["ends"] == {3, 0}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks
def test_answers_that_end_in_words_end_there(tmp_path: Path, cache: Path) -> None:
    made = Run(tmp_path, cache, IN_WORDS)
    assert made.ours["finish_reason"] == "stop string"
    made.check(made.export("onnx"))
    made.check(made.export("peft"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks
def test_peft_answers_as_the_run_does_merged_and_not(run: Run) -> None:
    names = run.check(run.export("peft"))
    assert names["answer"].tolist()[-1] == 3
    merged = names["model"].merge_and_unload()
    answer = merged.generate(**names["ids"], max_new_tokens=64, do_sample=False)[
        0, names["ids"]["input_ids"].shape[1] :
    ]
    assert answer.tolist() == names["answer"].tolist(), "a merged model has the settings, too"


def test_torchchat_asks_and_stops_as_the_run_does(run: Run) -> None:
    """By its files as torchchat's HFTokenizer and its loop of generation read them: it is no package that could be installed."""
    folder = run.export("torchchat", "--dtype", "float32")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = backend.token_to_id(settings["eos_token"])
    asked = [{"role": "user", "content": ASKED}]
    text = jinja2.Template(settings["chat_template"]).render(messages=asked, add_generation_prompt=True)
    ids = backend.encode(text, add_special_tokens=False).ids
    plain = transformers.AutoTokenizer.from_pretrained(run.preheat.folder / "base")
    assert ids == plain.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    start = len(ids)
    while len(ids) < 96 and ids[-1] != end:
        ids.append(int(torchchat.read(folder, [torch.tensor([ids])])[0][0, -1].argmax()))
    assert backend.decode(ids[start:]) == run.ours["text"]
    assert len(ids) - start == run.ours["tokens"]
    assert "torchchat.py chat --checkpoint-path" in (folder / "README.md").read_text()


@pytest.fixture
def _no_cache_of_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_cache_of_compiled_code")
def test_a_compiled_package_answers_as_the_run_does(run: Run) -> None:
    assert run.check(run.export("aoti"))["answer"][-1] == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # ExecuTorch's own, of many kinds
def test_an_executorch_program_answers_as_the_run_does(run: Run) -> None:
    pytest.importorskip("executorch", reason="ExecuTorch is not installed here (pip install 'preheat[executorch]')")
    assert run.check(run.export("executorch"))["answer"][-1] == 3


@pytest.mark.filterwarnings("ignore")  # compressed-tensors' own
def test_a_folder_for_vllm_answers_as_the_run_does(run: Run) -> None:
    pytest.importorskip("compressed_tensors", reason="not installed here (pip install 'preheat[compressed-tensors]')")
    made = run.preheat.here.json("export", "run", "--to", "vllm", "--out", "vllm", "--tolerance", "0.5")
    folder = run.preheat.folder / made["path"]
    packed = transformers.CompressedTensorsConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": ASKED}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == f"{run.ours['text']}<|eot|>"
