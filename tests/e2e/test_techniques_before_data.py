"""Techniques and methods of compression that a model lacks the modules for are refused before the data is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Command

RECIPE = """\
model: {num_layers: 2, hidden_size: 32, num_heads: 2}
data: {source: missing.jsonl, tokenizer: tokenizer}
batch: {size: 4, seq_len: 32}
stop: {epochs: 1}
techniques: {TECHNIQUES}
"""
WRONG = {
    "{lora: {target_modules: [no_such]}}": "techniques.lora.target_modules: ('no_such',): matches no linear map",
    "{lora: {target_modules: '(q_proj'}}": "techniques.lora.target_modules: '(q_proj' is not a regular expression",
    "{lora: {target_modules: recurrent}}": "the model has no such layers",
    "{lora: {expert_rank: 2}}": "expert_rank: 2 is for experts, and llama has none",
    "{peft_adapter: {method: loha, target_modules: [nowhere]}}": "loha on ('nowhere',): matches no linear map",
    "{nf4: {keep: [nowhere]}, lora: {}}": "techniques.nf4.keep: ('nowhere',) matches no linear map",
    "{nf4: {keep: '(x'}, lora: {}}": "techniques.nf4.keep: '(x' is not a regular expression",
    "{quantization_aware: {keep: [lyers]}}": "quantization_aware.keep: 'lyers' matches no linear map",
    "{mixed_precision: {keep_fp32: nothing}}": "keep_fp32: 'nothing' matches no module of the model",
}


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["plan"]], ids=" ".join)
def test_a_recipe_is_refused_before_its_data_is_read(command: list[str], preheat: Command) -> None:
    _write_tokenizer(preheat.folder)
    for techniques, message in WRONG.items():
        (preheat.folder / "r.yaml").write_text(RECIPE.replace("{TECHNIQUES}", techniques))
        _, error = preheat.here(command[0], "r.yaml", *command[1:], code=2)
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, error
        assert message in lines[0], error
    # Otherwise the data is read, and here there is none.
    (preheat.folder / "r.yaml").write_text(RECIPE.replace("{TECHNIQUES}", "{lora: {}}"))
    _, error = preheat.here(command[0], "r.yaml", *command[1:], code=4)
    assert "missing.jsonl: does not exist" in error


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens = {"</s>": 0} | {f"w{n}": n for n in range(1, 96)}
    backend = Tokenizer(models.WordLevel(tokens, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder / "tokenizer")
