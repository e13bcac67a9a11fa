"""`preheat export` to other tools' formats, as a user types it."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.integrations.gguf import read_gguf_metadata

from preheat.compress.export import gguf_reader, llama_cpp

from .conftest import Command

LORA = "techniques={lora: {rank: 4}}"


def test_a_model_with_the_rows_of_its_tokenizer_becomes_gguf(preheat: Command) -> None:
    recipe = ("r.yaml", "--set", "model.vocab_size=null", "--set", "stop.max_steps=2", "--set", "evaluate.rows=3")
    run = preheat.here.json("train", *recipe)["run"]
    exported = preheat.here.json("export", run, "--to", "gguf", "--dtype", "f32")
    assert (Path(preheat.folder) / exported["path"]).is_dir()


def test_a_run_becomes_gguf_with_a_card(preheat: Command) -> None:
    run = preheat.here.json("train", "r.yaml", "--set", LORA, "--set", "stop.max_steps=6", "--set", "evaluate.rows=3")[
        "run"
    ]
    made = preheat.here.json("export", run, "--to", "gguf", "--dtype", "q8_0")
    held = preheat.here.json("eval", run)["texts"]["validation"]
    assert held["rows"] > 3
    assert made["perplexity_of"] == f"the run's own data, 3 of its {held['rows']} validation sequences: {3 * 32} tokens"
    assert made["path"] == f"{run}/export-gguf-q8_0"
    assert made.keys() >= {
        "bytes",
        "before",
        "after",
        "max_logit_difference",
        "mean_logit_difference",
        "top1_agreement",
    }
    assert made["merged"] == 14
    assert made["types"]["Q8_0"] > made["types"].get("F16", 0)
    assert made["after"]["perplexity"] == pytest.approx(made["before"]["perplexity"], rel=0.02)
    card = (preheat.folder / made["path"] / "README.md").read_text()
    for words in (
        "small: GGUF, q8_0",
        "from the run `small`, 14 adapters merged",
        "- lora: ",
        "- data: ",
        "after 6 steps",
        "validation loss",
        "rank: 4",
        f"{made['top1_agreement']:.1%} of positions",
        "llama-cli -m small-q8_0.gguf",
    ):
        assert words in card, words
    said, _ = preheat.here("export", f"{run}/checkpoints/step-6", "--to", "gguf", "--dtype", "f32", "--out", "whole")
    assert "read back by transformers" in said
    assert ("run by llama.cpp (" in said) == llama_cpp.is_installed()
    alone = "alone: llama.cpp did not run the file, since its wheel is not installed here (pip install 'preheat[llama-cpp]')"
    assert (alone in said) != llama_cpp.is_installed()
    assert "perplexity" in said
    assert "from the run `small`" in (preheat.folder / "whole/README.md").read_text()

    for arguments, words, code in (
        (
            ("--to", "gguf", "--dtype", "int8"),
            "--dtype int8: --to gguf has f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, q4_0",
            2,
        ),
        (("--to", "onnx", "--dtype", "q8_0"), "--dtype q8_0: --to onnx has float32, int8", 2),
        (("--to", "hf", "--dtype", "int4"), "--dtype int4: --to hf has float32, float16, bfloat16", 2),
        (("--to", "onnx", "--length", "64"), "--length: is for executorch's KV cache; --to onnx has none", 2),
        (("--to", "gguf", "--dtype", "q8_0"), "already exists; name another folder with --out", 1),
        (("--to", "gguf", "--dtype", "q4_0", "--tolerance", "1e-6"), "more than the 1e-06 of it that is accepted", 1),
    ):
        _, error = preheat.here("export", run, *arguments, code=code)
        assert words in error
        assert error.count("\n") == 1
    assert not (preheat.folder / run / "export-gguf-q4_0").exists(), "what is beyond the bound is not left there"


CHATS = """\
name: x
model: {path: base, add_tokens: ["<|im_start|>", "<|im_end|>"]}
data: {source: rows.jsonl, validation: 0.2, template: chatml}
batch: {size: 4, seq_len: 64}
optimizer: {lr: 5.0e-3}
stop: {max_steps: 120}
checkpoint: {every: 60}
hardware: {threads: 1}
"""


def base_of(folder: Path) -> None:
    """A model whose tokenizer knows bytes and one end of text, and merges nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(["<end>", *alphabet])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.LlamaConfig(
        vocab_size=257, bos_token_id=0, eos_token_id=0, max_position_embeddings=64, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder)


def test_whoever_opens_an_export_of_a_chat_stops_where_generate_stops(preheat: Command) -> None:
    base_of(preheat.folder / "base")
    chats = [[("user", f"Hello {n}"), ("assistant", "Yes.")] for n in range(30)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (preheat.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (preheat.folder / "chats.yaml").write_text(CHATS)
    run = preheat.here.json("train", "chats.yaml", "--out", "run")["run"]
    ours = preheat.here.json("generate", run, "--prompt", "Hello 3", "--tokens", "20")
    assert (ours["text"], ours["finish_reason"]) == ("Yes.", "stop token")
    loss = preheat.here.json("eval", run)["perplexity"]

    made = preheat.here.json("export", run, "--to", "hf", "--out", "hf")
    assert made["before"]["perplexity"] == pytest.approx(loss, rel=1e-6), "what eval says, on what eval reads"
    assert made["after"]["perplexity"] == pytest.approx(loss, rel=1e-4)
    evaluated = preheat.here.json("eval", run)["texts"]["validation"]
    assert (
        made["perplexity_of"]
        == f"the run's own data, all of its {evaluated['rows']} validation sequences: {evaluated['tokens']} tokens"
    )
    assert not made["unfinished"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(preheat.folder / "hf")
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked = [{"role": "user", "content": "Hello 3"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def written(model: Any, **more: Any) -> str:
        ids = model.generate(**prompt, max_new_tokens=20, do_sample=False, **more)[0, prompt["input_ids"].shape[1] :]
        return str(tokenizer.decode(ids))

    model = transformers.AutoModelForCausalLM.from_pretrained(preheat.folder / "hf")
    assert written(model) == "Yes.<|im_end|>"
    assert model.generation_config.eos_token_id == [turn, 0]
    assert (tokenizer.eos_token_id, model.config.eos_token_id, tokenizer.pad_token_id) == (turn, turn, 0)
    again = preheat.here.json("generate", "hf", "--chat", "--prompt", "Hello 3", "--tokens", "20")
    assert (again["text"], again["finish_reason"]) == (ours["text"], ours["finish_reason"])

    file = (
        preheat.folder
        / "gguf"
        / preheat.here.json("export", run, "--to", "gguf", "--dtype", "f32", "--out", "gguf")["file"]
    )
    told, _ = read_gguf_metadata(str(file))
    named = [told[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert named == [turn, turn, 0]
    by_gguf, its_own = gguf_reader.load(file)
    assert its_own.eos_token_id == turn
    assert written(by_gguf) == "Yes.<|im_end|>"

    compressed = preheat.here.json("compress", f"{run}/checkpoints/step-60", "--method", "int8", "--measured", "2")
    assert compressed["path"] == f"{run}/compressed-int8-step-60", "a checkpoint is no place for anything else"
    assert "step 60 of 120" in compressed["notes"][0]
    short = preheat.here.json("generate", compressed["path"], "--chat", "--prompt", "Hello 3", "--tokens", "20")
    assert (short["text"], short["finish_reason"]) == ("Yes.", "stop token")
    card = (preheat.folder / compressed["path"] / "README.md").read_text()
    assert "library_name: preheat\npipeline_tag: text-generation\nbase_model: base" in card
    assert f"Note: {compressed['notes'][0]}." in card
    page = (preheat.folder / compressed["path"] / "compress.html").read_text()
    assert html.escape(compressed["notes"][0]) in page
    (preheat.folder / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    middle = preheat.here.json("export", f"{run}/checkpoints/step-60")
    assert middle["path"] == f"{run}/export-hf-step-60"
    assert "step 60 of 120" in middle["unfinished"]
    card = (preheat.folder / middle["path"] / "README.md").read_text()
    assert "# run: Hugging Face folder, float32\n" in card
    assert "after 60 steps" in card
    assert "after step" not in card, "the evaluation is of step 120"
    values = yaml.safe_load(card.split("---")[1])
    assert values == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "base",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "tags": ["preheat"],
    }
