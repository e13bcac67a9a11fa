"""`preheat data` as a user types it, and a `train` that is refused for its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .conftest import Command

CHAT = """\
name: chat
model: {layers: 2, width: 32, heads: 2}
data: {source: rows.jsonl, vocabulary: 400, validation: 0.2}
batch: {size: 4, length: 128}
optimizer: {lr: 0.01}
stop: {steps: 3}
"""


def write(preheat: Command, **seventh: Any) -> None:
    rows = [
        {"instruction": f"What is {n} and {n}?", "input": "", "output": f"It is <b>{2 * n}</b>, of number {n}."}
        for n in range(60)
    ]
    rows[6] |= seventh
    (preheat.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (preheat.folder / "chat.yaml").write_text(CHAT)


def test_data_is_shown_as_the_model_will_see_it(preheat: Command) -> None:
    write(preheat)
    out, _ = preheat.here("data", "chat.yaml", "--rows", "1", "--html", "data.html")
    for words in (
        "### Instruction:\nWhat is ",
        "### Response:\n«It is <b>",
        "</b>, of number ",
        "<|end|>»",
        "alpaca, recognised by the fields instruction and output",
        "60 read, ",
        "the checks before training found nothing",
        "page: data.html",
    ):
        assert words in out, words
    page = (preheat.folder / "data.html").read_text()
    assert "<mark>It is &lt;b&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    made = preheat.here.json("data", "chat.yaml", "--rows", "2")
    assert len(made["examples"]) == 2
    trained = "".join(text for row in made["examples"] for d in row["documents"] for text, on, _ in d["spans"] if on)
    assert trained.count("<|end|>") == sum(len(row["documents"]) for row in made["examples"]) == trained.count("It is <b>")
    assert sum(bar["count"] for bar in made["lengths"]["bars"]) == made["lengths"]["examples"] == made["packing"]["documents"]
    assert "Example" in preheat.here("data", "--help")[0]


def test_broken_rows_are_refused_before_anything_is_written_and_a_warning_trains(preheat: Command) -> None:
    write(preheat, output="", input=None)
    for command in (["train", "chat.yaml"], ["data", "chat.yaml"]):
        _, error = preheat(*command, code=4)
        assert error.strip() == (
            "error: rows.jsonl:7: field 'output' is empty (check fields; 1 of 60); mend the rows, or data.preflight.fields: warn "
            "leaves such rows out"
        )
        assert not (preheat.folder / "runs").exists()
    made = preheat.here.json("train", "chat.yaml", "--set", "data.preflight={fields: warn}")
    record = json.loads((preheat.folder / made["run"] / "data.json").read_text())
    assert record["counts"]["dropped"] == {"fields": 1}
    assert record["counts"]["read"] == 60 == sum(record["counts"][side]["documents"] for side in ("train", "validation")) + 1
    assert "rows.jsonl:7" in record["preflight"][0]
    tokenizer = json.loads((preheat.folder / made["run"] / "tokenizer" / "tokenizer_config.json").read_text())
    template = preheat.folder / made["run"] / "tokenizer" / "chat_template.jinja"
    assert "### Response" in (template.read_text() if template.exists() else tokenizer["chat_template"])
    assert (
        preheat.here("train", "chat.yaml", "--set", "data.preflight={feilds: warn}", "--out", "x", code=2)[1]
        .strip()
        .endswith("did you mean 'fields'?")
    )


def test_rows_that_no_technique_trains_on_are_refused(preheat: Command) -> None:
    write(preheat)
    (preheat.folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}", "chosen": f"yes {n}", "rejected": f"no {n}"}) + "\n" for n in range(60))
    )
    _, error = preheat.here("train", "chat.yaml", code=4)
    assert "holds pairs of answers, of which one is preferred, but next-token training reads text" in error
    assert not (preheat.folder / "runs").exists()


def test_data_shows_tokens_that_the_recipe_adds_and_a_missing_model_is_told_as_one(preheat: Command, data_folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a cat."}]}
    (preheat.folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 40)
    recipe = (
        "name: added\nmodel: {path: %s, add_tokens: ['<|im_start|>', '<|im_end|>']}\n"
        "data: {source: rows.jsonl, template: chatml, validation: 0}\nbatch: {size: 4, length: 64}\nstop: {steps: 1}\n"
    )
    (preheat.folder / "added.yaml").write_text(recipe % (data_folder / "stories260K-hf"))
    out, _ = preheat.here("data", "added.yaml", "--rows", "1")  # without these tokens chatml ends no turn, and is refused
    assert "«It is a cat.<|im_end|>»" in out
    _, error = preheat.here("train", "added.yaml", "--set", "model.path=nowhere/there", code=2)
    assert error.strip().splitlines()[-1].startswith("error: model.path: nowhere/there: no such folder")
    assert "thrown while requesting" not in error
    assert not (preheat.folder / "runs").exists()
