"""`convert` as a user types it."""

from __future__ import annotations

import json

import pytest
import yaml

from .conftest import Command

RECIPE = """\
name: mine
model: {path: base}
data: {source: rows.json, layout: messages}
batch: {size: 8, seq_len: 64}
optimizer: {lr: 1.0e-4}
stop: {max_steps: 100}
techniques: {lora: {}, mixed_precision: {mode: bf16}, efficient_attention: {}, gradient_accumulation: {steps: 4}}
"""


@pytest.fixture(autouse=True)
def recipe(preheat: Command) -> None:
    (preheat.folder / "mine.yaml").write_text(RECIPE)
    (preheat.folder / "rows.json").write_text(json.dumps([{"x": 1}]))


def test_a_file_is_written_beside_what_it_needs_and_never_over_an_edited_one(preheat: Command) -> None:
    text, error = preheat.here("convert", "mine.yaml", "--to", "trl")
    assert text.startswith("# for TRL 1.16; start: trl sft --config mine.yaml\n")
    assert error == "note: techniques.chunked_loss: TRL has it in any case: the same result\n"
    assert yaml.safe_load(text)["per_device_train_batch_size"] == 2
    out, _ = preheat.here("convert", "mine.yaml", "--to", "llamafactory", "--out", "files")
    assert out.splitlines()[0] == "wrote files/mine.yaml, files/dataset_info.json for LLaMA-Factory 0.9.5"
    assert out.splitlines()[-1] == "start: llamafactory-cli train files/mine.yaml"
    info = json.loads((preheat.folder / "files/dataset_info.json").read_text())
    assert info["rows"]["file_name"] == "../rows.json"
    preheat.here("convert", "mine.yaml", "--to", "llamafactory", "--out", "files")  # again: the same
    # From trainer to trainer: the file that was written is read.
    again = preheat.here("convert", "files/mine.yaml", "--to", "trl")[0]
    assert yaml.safe_load(again)["datasets"] == [{"path": "json", "data_files": "rows.json"}]
    file = preheat.folder / "files/mine.yaml"
    file.write_text(file.read_text() + "seed: 3\n")
    error = preheat.here("convert", "mine.yaml", "--to", "llamafactory", "--out", "files", code=1)[1]
    assert error == "error: files/mine.yaml: was edited since preheat wrote it; name another file, or remove this one\n"
    (preheat.folder / "d.json").write_text("{}")
    error = preheat.here("convert", "mine.yaml", "--to", "deepspeed", "--out", "d.json", code=1)[1]
    assert error.startswith("error: d.json: exists, and has another text")


def test_what_a_file_cannot_say_is_refused_or_listed(preheat: Command) -> None:
    lossy = (
        "convert",
        "mine.yaml",
        "--to",
        "trl",
        "--set",
        "techniques.lora.embedding_rank=4",
        "--set",
        "stop.hours=3",
    )
    out, error = preheat.here(*lossy, code=2)
    assert out == ""
    assert error.splitlines() == [
        "error: stop.hours: 3.0: TRL has no key for it",
        "error: techniques.lora.embedding_rank: 4: TRL has no key for it",
        "error: --partial writes the file without these keys, and lists them",
    ]
    out, error = preheat.here(*lossy, "--partial")
    assert "# not said: stop.hours: 3.0: TRL has no key for it\n" in out
    assert "not said: techniques.lora.embedding_rank: 4: TRL has no key for it\n" in error
    written = preheat.here.json(*lossy, "--partial", "--out", "t.yaml")
    assert written["files"] == ["t.yaml"]
    assert [(item["key"], item["same_result"]) for item in written["left_out"]] == [
        ("stop.hours", False),
        ("techniques.lora.embedding_rank", False),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.yaml", "--to", "trl"), "nothing.yaml: no such file, and no recipe of that name"),
        (("mine.yaml", "--to", "trll"), "Invalid value for '--to': 'trll' is not one of "),
        (("mine.yaml", "--to", "llamafactory"), "--out: LLaMA-Factory needs dataset_info.json beside its file"),
        (
            ("demo", "--to", "axolotl"),
            "model.path: names no checkpoint, which axolotl needs; add --set model.path=PATH",
        ),
        (("mine.yaml", "--to", "megatron"), "data.layout: messages: Megatron-LM's pretrain_gpt.py reads plain text"),
        (
            ("mine.yaml", "--to", "trl", "--set", "techniques.fsdp={}"),
            "parallel.devices: null: TRL's file is for a",
        ),
        (
            ("mine.yaml", "--to", "trl", "--deepspeed", "d.json"),
            "--deepspeed: d.json: belongs beside another trainer's",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], message: str, preheat: Command) -> None:
    out, error = preheat.here("convert", *arguments, code=2)
    assert (out, error.count("\n")) == ("", 1)
    assert message in error
