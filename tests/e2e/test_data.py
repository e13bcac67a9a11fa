"""`preheat data` as a user types it, and a `train` that is refused for its data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from preheat.run.reader import Reader

from ..unit.row_faults import GOOD, TALK, VARIANTS, lines
from .conftest import Command, losses

CHAT = """\
name: chat
model: {num_layers: 2, hidden_size: 32, num_heads: 2}
data: {source: rows.jsonl, vocab_size: 400, validation: 0.2}
batch: {size: 4, seq_len: 128}
optimizer: {lr: 0.01}
stop: {max_steps: 3}
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
    assert (
        trained.count("<|end|>") == sum(len(row["documents"]) for row in made["examples"]) == trained.count("It is <b>")
    )
    assert (
        sum(bar["count"] for bar in made["lengths"]["bars"])
        == made["lengths"]["examples"]
        == made["packing"]["documents"]
    )
    assert "Example" in preheat.here("data", "--help")[0]


def test_cleaned_rows_are_counted_and_overlaps_are_shown(preheat: Command) -> None:
    write(preheat, output="Write to <b>a@example.org</b> now.")
    rows = (preheat.folder / "rows.jsonl").read_text().splitlines()
    words = "seven wizards of <i>Cernunnos</i> wrote quiet spells by the river"
    extra = {"instruction": "Tell me.", "input": "", "output": words}
    (preheat.folder / "rows.jsonl").write_text("\n".join([*rows, rows[0], rows[1], json.dumps(extra)]))
    (preheat.folder / "questions.jsonl").write_text(json.dumps({"question": words, "answer": "yes"}))
    changes = [
        "--set",
        "data.clean={duplicates: exact, min_words: 6, personal_data: count, against: [questions.jsonl]}",
    ]
    out, _ = preheat.here("data", "chat.yaml", *changes, "--html", "data.html")
    assert "; left out: 1 min_words, 2 duplicate, 1 in evaluation data" in " ".join(out.split())
    page = (preheat.folder / "data.html").read_text()
    assert "email, counted" in out
    assert "a@example.org" not in page.partition('id="cleaning"')[2]
    assert "seven wizards of i cernunnos i wrote" in page
    made = preheat.here.json("data", "chat.yaml", *changes)
    cleaning = made["counts"]["cleaning"]
    assert cleaning["read"] == made["counts"]["read"] == 63
    assert [(entry["reason"], entry["rows"]) for entry in cleaning["removed"]] == [
        ("min_words", 1),
        ("in evaluation data", 1),
        ("duplicate", 2),
    ]
    assert cleaning["personal"] == {"email": {"rows": 1, "count": 1, "examples": ["rows.jsonl:7"]}}
    assert cleaning["evaluation_texts"] == 2
    assert cleaning["short_texts"] == 1
    # Without the key the rows are counted and stay.
    (overlap,) = preheat.here.json("data", "chat.yaml", "--set", "data.validation=0", "--against", "questions.jsonl")[
        "overlaps"
    ]
    assert (overlap["rows"], overlap["read"], overlap["texts"], overlap["short"]) == (1, 63, 2, 1)
    assert overlap["examples"][0][:2] == ["rows.jsonl:63", "questions.jsonl:1"]
    _, error = preheat.here("data", "chat.yaml", "--against", "question.jsonl", code=4)
    assert "--against question.jsonl: does not exist" in error
    assert "did you mean 'questions.jsonl'?" in error
    assert error.count("\n") == 1


def test_broken_rows_are_refused_before_anything_is_written_and_a_warning_trains(preheat: Command) -> None:
    write(preheat, output="", input=None)
    for command in (["train", "chat.yaml"], ["data", "chat.yaml"]):
        _, error = preheat(*command, code=4)
        assert error.strip() == (
            "error: rows.jsonl:7: field 'output' is empty (check fields; 1 of 60); fix the rows, or data.preflight.fields: warn "
            "leaves such rows out"
        )
        assert not (preheat.folder / "runs").exists()
    made = preheat.here.json("train", "chat.yaml", "--set", "data.preflight={fields: warn}")
    record = json.loads((preheat.folder / made["run"] / "data.json").read_text())
    assert record["counts"]["dropped"] == {"fields": 1}
    assert (
        record["counts"]["read"]
        == 60
        == sum(record["counts"][side]["documents"] for side in ("train", "validation")) + 1
    )
    assert "rows.jsonl:7" in record["preflight"][0]
    tokenizer = json.loads((preheat.folder / made["run"] / "tokenizer" / "tokenizer_config.json").read_text())
    template = preheat.folder / made["run"] / "tokenizer" / "chat_template.jinja"
    assert "### Response" in (template.read_text() if template.exists() else tokenizer["chat_template"])
    assert (
        preheat.here("train", "chat.yaml", "--set", "data.preflight={feilds: warn}", "--out", "x", code=2)[1]
        .strip()
        .endswith("did you mean 'fields'?")
    )


def test_rows_without_room_are_told_alike_everywhere(preheat: Command) -> None:
    write(preheat, instruction="What is it? " * 60)
    warn = ("--set", "data.preflight={truncated: warn}")
    made = preheat.here.json("data", "chat.yaml", *warn, "--html", "data.html")
    assert made["counts"]["dropped"] == {"no room for an answer": 1}
    split = [made["counts"][side]["documents"] for side in ("train", "validation")]
    assert sum(split) == 59
    out, _ = preheat.here("data", "chat.yaml", *warn)
    account = f"60 read, {split[0]} to train on, {split[1]} to validate on; left out: 1 no room for an answer"
    assert account in " ".join(out.split())
    assert "1 no room for an answer" in (preheat.folder / "data.html").read_text()
    out, error = preheat("train", "chat.yaml", *warn)
    assert account in " ".join((out + error).split())
    (record,) = preheat.folder.glob("runs/*/data.json")
    assert json.loads(record.read_text())["counts"]["dropped"] == {"no room for an answer": 1}


def test_rows_that_no_technique_trains_on_are_refused(preheat: Command) -> None:
    write(preheat)
    (preheat.folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"Say {n}", "chosen": f"yes {n}", "rejected": f"no {n}"}) + "\n" for n in range(60)
        )
    )
    _, error = preheat.here("train", "chat.yaml", code=4)
    assert "holds pairs of answers, of which one is preferred, but next-token training reads text" in error
    assert not (preheat.folder / "runs").exists()


def test_data_shows_tokens_that_the_recipe_adds_and_a_missing_model_is_told_as_one(
    preheat: Command, data_folder: Path
) -> None:
    row = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a cat."}]}
    (preheat.folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 40)
    recipe = (
        "name: added\nmodel: {path: %s, add_tokens: ['<|im_start|>', '<|im_end|>']}\n"
        "data: {source: rows.jsonl, template: chatml, validation: 0}\nbatch: {size: 4, seq_len: 64}\nstop: {max_steps: 1}\n"
    )
    (preheat.folder / "added.yaml").write_text(recipe % (data_folder / "stories260K-hf"))
    out, _ = preheat.here(
        "data", "added.yaml", "--rows", "1"
    )  # without these tokens chatml ends no turn, and is refused
    assert "«It is a cat.<|im_end|>»" in out
    _, error = preheat.here("train", "added.yaml", "--set", "model.path=nowhere/there", code=2)
    assert error.strip().splitlines()[-1].startswith("error: model.path: nowhere/there: no such folder")
    assert "thrown while requesting" not in error
    assert not (preheat.folder / "runs").exists()


def test_streamed_rows_are_trained_planned_and_resumed_exactly(preheat: Command) -> None:
    from preheat.data.tokenizer import train_tokenizer

    texts = [f"Row number {n} says that the kettle was warm and the tea was good." for n in range(40)]
    train_tokenizer([(f"{n:032x}", text) for n, text in enumerate(texts)], vocabulary=300).save_pretrained(
        preheat.folder / "own"
    )
    for name, some in (("rows", texts[:30]), ("more", texts[30:])):
        (preheat.folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    recipe = (preheat.folder / "r.yaml").read_text()
    source = "[rows.jsonl, {source: more.jsonl, weight: 0.5}]"
    data = f"data: {{source: {source}, tokenizer: own, streaming: true, validation: 0.2}}"
    (preheat.folder / "s.yaml").write_text(
        recipe.replace("data: {source: text, vocab_size: 300, validation: 0.2}", data)
    )
    assert preheat.here.json("plan", "s.yaml")["fits"]
    made = preheat.here.json("train", "s.yaml", "--out", "whole")
    whole = losses(preheat.folder / "whole")
    assert made["steps"] == 12
    assert made["validation_loss"] < 6
    run = Reader(preheat.folder / "whole")
    for line in run.metrics():
        assert [*line.loss_by_source] == ["rows.jsonl", "more.jsonl"], "two of three sequences, and one"
        assert min(line.loss_by_source.values()) <= line.loss <= max(line.loss_by_source.values())
    assert run.evaluations()[-1].validation_loss_by_source["rows.jsonl"] < 6
    assert "Loss by source" in (preheat.folder / "whole/report.html").read_text()
    shutil.copytree(preheat.folder / "whole", preheat.folder / "again")
    shutil.rmtree(preheat.folder / "again/checkpoints/step-12")
    preheat.here("train", "s.yaml", "--out", "again", "--resume")
    assert losses(preheat.folder / "again") == whole
    assert len(whole) == 12
    _, error = preheat.here("train", "s.yaml", "--set", "stop.epochs=1", "--out", "no", code=2)
    assert "stop.epochs: a streamed source has no known length" in error


def test_what_of_a_folder_is_not_read_is_said(preheat: Command) -> None:
    write(preheat)
    (preheat.folder / "mixed").mkdir()
    shutil.copy(preheat.folder / "rows.jsonl", preheat.folder / "mixed")
    (preheat.folder / "mixed" / "notes.txt").write_text("text that is not read")
    out, error = preheat.here("train", "chat.yaml", "--set", "data.source=mixed", "--out", "o")
    assert "not read: 1 .txt" in out + error
    out, _ = preheat.here("data", "chat.yaml", "--set", "data.source=mixed", "--html", "data.html")
    assert "not read: 1 .txt" in out
    titles = re.findall(r"rows\.jsonl:(\d+): \d+ tokens", out)
    assert len(set(titles)) == len(titles) > 2, "each document with its own row of the file"
    assert re.findall(r"rows\.jsonl:(\d+): \d+ tokens", (preheat.folder / "data.html").read_text()) == titles


def test_every_token_of_a_short_text_is_evaluated(preheat: Command, data_folder: Path) -> None:
    import torch
    import transformers

    own = str(data_folder / "stories260K-hf")
    model, tokenizer = (c.from_pretrained(own) for c in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    texts = {
        "short.txt": "Once upon a time, there was a dog.",
        "long.txt": "Lily and Tom went to the park. They saw a cat. " * 9,
    }
    for name, text in texts.items():
        (preheat.folder / name).write_text(text)
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        lost = 0.0
        for start in range(0, len(ids) - 1, 64):
            labels = torch.tensor(ids[start + 1 : start + 65])
            logits = model(torch.tensor([ids[start : start + 64]])).logits[0, : len(labels)].float()
            lost += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum").detach())
        found = preheat.here.json("eval", own, "--data", name, "--length", "64")
        assert found["tokens"] == len(ids) - 1
        assert abs(found["loss"] - lost / (len(ids) - 1)) < 1e-3


COMMANDS = {
    "train": (
        "5,000 digits",
        "many fields",
        "controls in a name",
        "NUL in JSON",
        "gzip",
        "UTF-16",
        "Latin-1",
        "two objects",
    ),
    "data": (
        "nested very deeply",
        "named twice",
        "a list",
        "cut",
        "half a surrogate in a name",
        "null",
        "empty text",
        "single quotes",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, names in COMMANDS.items() for name in names]
)
def test_rows_that_no_reader_survives_as_commands(preheat: Command, command: str, name: str) -> None:
    write(preheat)
    (preheat.folder / "rows.jsonl").write_bytes(VARIANTS[name][1])
    out, error = preheat(command, "chat.yaml", *(("--out", "o") if command == "train" else ()), code=4)
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert re.search("rows.jsonl:1", line)
    assert len(line) < 700
    assert "Traceback" not in error
    assert "\x1b[31m" not in out + error


def test_a_template_that_always_asks_is_refused(preheat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write(preheat)
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}{{ 'assistant: ' }}"
    (preheat.folder / "always.jinja").write_text(text)
    (preheat.folder / "rows.jsonl").write_bytes(lines(TALK))
    _, error = preheat.here("train", "chat.yaml", "--set", "data.template=always.jinja", "--out", "o", code=4)
    assert "always.jinja: always adds a generation prompt" in error
    assert not (preheat.folder / "o").exists()
    monkeypatch.setattr("preheat.data.chat.render_limits.SECONDS", 0.5)
    (preheat.folder / "never.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    )
    (preheat.folder / "rows.jsonl").write_bytes(lines(GOOD))
    _, error = preheat.here("data", "chat.yaml", "--set", "data.template=never.jinja", code=4)
    assert "never.jinja: is not finished after 0.5 s" in error
