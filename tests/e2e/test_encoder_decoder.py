"""An encoder-decoder as a user trains it: prompts with answers, a template of the family, then evaluation, text and export."""

from __future__ import annotations

import json

import transformers

from .conftest import Command

RECIPE = """
name: t5
model: {family: t5, num_layers: 2, hidden_size: 32, num_heads: 2}
data: {source: rows.jsonl, template: t5, vocab_size: 320, validation: 0.1}
batch: {size: 8, seq_len: 96}
optimizer: {lr: 1.0e-2}
stop: {max_steps: 24}
sample: {prompts: ["What is the colour of grass?"], max_new_tokens: 8}
techniques: {chunked_loss: {}, activation_checkpointing: {}}
"""


def test_prompts_and_answers_train_an_encoder_decoder(preheat: Command) -> None:
    colours = {"grass": "green", "snow": "white", "coal": "black", "the sea": "blue", "blood": "red"}
    rows = [
        {
            "prompt": f"What is the colour of {thing}{'?' * (1 + n % 3)}",
            "completion": f"It is {colour}, as {n} people say.",
        }
        for n in range(20)
        for thing, colour in colours.items()
    ]
    (preheat.folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (preheat.folder / "r.yaml").write_text(RECIPE)
    made = preheat.here.json("train", "r.yaml", "--out", "run")
    assert made["validation_loss"] < 5.0  # 320 pieces at random are 5.8
    assert preheat.here.json("eval", "run")
    told = preheat.here.json("generate", "run", "--prompt", "What is the colour of snow?", "--tokens", "4")
    assert len(told["texts"]) == 1
    preheat.here("export", "run", "--to", "hf", "--out", "exported")
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(preheat.folder / "exported")
    assert again.config.decoder_start_token_id == 0
    for command, words in (
        (("compress", "run", "--method", "int8"), "preheat compress: t5 is an encoder-decoder"),
        (
            ("export", "run", "--to", "onnx"),
            "is an encoder-decoder, and this format is for decoder-only models; use --to hf",
        ),
    ):
        assert words in preheat.here(*command, code=1 if "onnx" in command else 2)[1]


def test_text_to_continue_is_refused(preheat: Command) -> None:
    (preheat.folder / "t5.yaml").write_text(RECIPE.replace("source: rows.jsonl, template: t5", "source: text"))
    error = preheat.here("train", "t5.yaml", "--out", "run", code=4)[1]
    assert "(.txt): is text to continue, all of it trained on, and an encoder-decoder reads a prompt" in error
    assert not (preheat.folder / "run").exists()
