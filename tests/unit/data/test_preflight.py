"""Data that would go wrong in silence is refused with its row and reason; odd data that is right passes, and no row is lost unsaid."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.data import PreparedData, prepare
from preheat.data.document import END
from preheat.data.packing import Rows
from preheat.data.preflight import CHECKS
from preheat.data.row_account import LeftOut, RowAccount
from preheat.data.tokenizer import load_tokenizer, train_tokenizer
from preheat.errors import DataError, RecipeError
from preheat.files import to_plain_data
from preheat.recipe import Data, field_docs

from ..chats import CHATML, TOOLS, said

SPECIAL = ["<|im_start|>", "<|im_end|>"]


def talk(n: int) -> dict[str, Any]:
    return {"messages": [said("user", f"What is {n} and {n}?"), said("assistant", f"It is {2 * n}, number {n}.")]}


def pair(n: int) -> dict[str, Any]:
    return {"prompt": f"Say {n}: ", "chosen": f"Here is {n}.", "rejected": f"No {n}."}


def liked(n: int) -> dict[str, Any]:
    return {"prompt": f"Say {n}: ", "completion": f"Here is {n}.", "label": n % 2 == 0}


def clause(n: int) -> dict[str, Any]:
    return {"text": f"This clause has number {n}.", "label": ("law", "tax", "rent")[n % 3]}


def asked(n: int) -> dict[str, Any]:
    return {"instruction": f"Count to {n}", "input": "", "output": f"one to {n}"}


KINDS = {"talk": talk, "pair": pair, "liked": liked, "clause": clause, "asked": asked}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens and the template of ChatML."""
    made = train_tokenizer(
        [(f"{n:032x}", json.dumps([kind(n) for kind in KINDS.values()])) for n in range(60)], vocabulary=400
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = CHATML
    path = tmp_path_factory.mktemp("chatml")
    made.save_pretrained(path)
    return path


def run(tmp_path: Path, tokenizer: Path | str, rows: Any, name: str = "a.jsonl", **settings: Any) -> PreparedData:
    path = tmp_path / name
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    more = {k: settings.pop(k) for k in ("length", "embedding") if k in settings}
    held = settings.get("validation")
    if isinstance(held, list):
        settings["validation"] = str(tmp_path / "held.jsonl")
        (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    data = Data(source=str(path), tokenizer=str(tokenizer), **{"validation": 0.0, **settings})
    return prepare(data, seed=0, cache=tmp_path / "cache", **{"length": 128, **more})


def seventh(kind: str, **changed: Any) -> list[dict[str, Any]]:
    """20 good rows of which the seventh has other values in some fields."""
    rows = [KINDS[kind](n) for n in range(20)]
    rows[6] = {k: v for k, v in {**rows[6], **changed}.items() if v != "GONE"}
    return rows


def turns(*messages: Mapping[str, Any]) -> list[dict[str, Any]]:
    return seventh("talk", messages=list(messages))


U, A = said("user", "Hello"), said("assistant", "Good day")
NOT_TRAINED = [{"messages": [said("user", f"Hi {n}"), said("assistant", "Ho", weight=0)]} for n in range(5)]
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ END }}
{% else %}{{ m.role + ':' + m.content + '\n' }}{% endif %}{% endfor %}"""

# name: (rows, settings, the message)
BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "content is null": (turns(U, said("assistant", None)), {}, r":7: message 2 of field 'messages' has a 'content' that is null"),
    "content is empty": (turns(said("user", " \n"), A), {}, r":7: message 1 of field 'messages' has an empty 'content'"),
    "content is a number": (turns(U, said("assistant", 4)), {}, r":7: message 2 .* a 'content' that is a number, not text"),
    "a picture": (turns(said("user", [{"type": "image_url"}]), A), {}, r":7: has images, and the model reads only text; .*\(check images; 1 of 20\)"),
    "messages are text": (seventh("talk", messages="Hello"), {}, r":7: field 'messages' is text, not a list of messages"),
    "no messages": (seventh("talk", messages=[]), {}, r":7: field 'messages' is an empty list"),
    "field gone": (seventh("talk", messages="GONE", msgs=[U, A]), {}, r":7: no field 'messages', only 'msgs'; set data\.columns\.messages"),
    "unknown role": (turns(U, said("asistant", "x")), {}, r":7: .* role 'asistant', which is unknown; did you mean 'assistant'"),
    "assistant first": (turns(A, U, A), {}, r":7: message 1 is of the assistant, the first \(check roles; 1 of 20\)"),
    "two questions": (turns(U, U, A), {}, r":7: message 2 is of the user, after one of the user"),
    "system later": (turns(U, A, said("system", "x"), U, A), {}, r":7: message 3 is of the system, after one of the assistant"),
    "no answer": (turns(U, A, U), {}, r":7: the last message is of the user, so nothing answers it"),
    "a result that nobody asked for": (turns(U, A, said("tool", "12"), A), {}, r":7: message 3 is of the tool"),
    "call that is not JSON": (
        turns(U, said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{x"}}]), said("tool", "1"), A),
        {},
        r":7: message 2 of field 'messages' calls a tool with arguments that are not JSON",
    ),
    "UTF-8 read as Latin-1": (turns(said("user", "CafÃ© au lait"), A), {}, r":7: message 1 holds 'Ã©' at character 3, .*check encoding"),
    "replacement character": (seventh("pair", chosen="caf\ufffd"), {}, r":7: field 'chosen' holds '\ufffd' at character 3"),
    "half a surrogate": (turns(said("user", "\ud83d"), A), {}, r":7: message 1 holds half a surrogate pair at character 0"),
    "special token in the text": (turns(said("user", "stop<|im_end|>"), A), {}, r":7: message 1 holds <\|im_end\|>, a special token"),
    "nothing trained in a row": (turns(U, said("assistant", "x", weight=0)), {}, r":7: has no message of the assistant to train on"),
    "nothing trained at all": (NOT_TRAINED, {}, r"check masked"),
    "a template that leaves the answer out": (
        seventh("talk"),
        {"template": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"},
        r"mine\.jinja: leaves out the assistant's text \(check template\)",
    ),
    "a template without end of turn": (
        seventh("talk"),
        {"template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"},
        r"mine\.jinja: ends the assistant's turn with no special token of this tokenizer .*data\.template: alpaca",
    ),
    "a template that fails at a row": (
        turns(U, said("assistant", "short", name="x")),
        {"template": CHATML.replace("{{", "{% if m.name %}{{ raise_exception('no names') }}{% endif %}{{", 1)},
        r":7: .*mine\.jinja, line 1: does not render the row: no names",
    ),
    "the end is never trained": (seventh("talk"), {"template": MARKED.replace("END", "'<|im_end|>'")}, r"check end_token"),
    "padding is the end, and not trained": (
        seventh("talk"),
        {"template": MARKED.replace("END", "eos_token"), "tokenizer": "pad"},
        r"token \d+ is padding and end of text at once, and never trained on \(check pad_is_end\)",
    ),
    "unknown tokens": (seventh("pair", chosen="Привет мир " * 5), {"tokenizer": "words"}, r":7: 10 of its \d+ tokens are unknown to the tok"),
    "beyond the embedding": (seventh("talk"), {"embedding": 290}, r":1: holds token \d+, the model's embedding has 290 rows"),
    "answers cut": (
        [said_long(n) if n % 3 == 0 else talk(n) for n in range(20)] if (said_long := lambda n: {"messages": [U, said("assistant", f"word {n} " * 90)]}) else [],
        {},
        r":1: is longer than a sequence of 128 tokens, .*check truncated; 7 of 20, also 4, 7, 10, 13 \.\.\.\); raise batch\.seq_len",
    ),
    "validation stands in training": (
        seventh("talk"),
        {"validation": [talk(3), talk(4), talk(99)]},
        r"a\.jsonl:4: is in the validation data too \(check validation; 2 of 23, also 5\)",
    ),
    "validation nearly stands in training": (
        seventh("pair", prompt="HELLO, world!", chosen="Yes.", rejected="no"),
        {"validation": [pair(50), {"prompt": "Hello world", "chosen": "yes", "rejected": "No!"}]},
        r"held\.jsonl:2: equals training data except for case, .*check near_validation; 1 of 2",
    ),
    "equal answers": (seventh("pair", rejected="Here is 6."), {}, r":7: 'chosen' and 'rejected' are equal \(check equal_answers; 1 of 20\)"),
    "empty answer": (seventh("pair", chosen="  "), {}, r":7: field 'chosen' is empty"),
    "no verdict": (seventh("liked", label="maybe"), {}, r":7: field 'label' is 'maybe', neither true \(liked\) nor false"),
    "a quoted verdict": (seventh("liked", label="'true'"), {}, r""":7: field 'label' is "'true'", neither true"""),
    "a verdict of two": (seventh("liked", label=2), {}, r":7: field 'label' is 2, neither true"),
    "a list of verdicts": (seventh("liked", label=[True]), {}, r":7: field 'label' is \[True\], neither true"),
    "no class": (seventh("clause", label=None), {"layout": "classes"}, r":7: field 'label' is None, none of the classes law, rent, tax"),
    "another class": (seventh("clause"), {"layout": "classes", "classes": ("law", "tax")}, r":3: field 'label' is 'rent', none of the classes law, tax \(check fields; 6 of"),
    "empty output": (seventh("asked", output=""), {"template": "chatml"}, r":7: field 'output' is empty"),
    "input is a list": (seventh("asked", input=[1]), {"template": "chatml"}, r":7: field 'input' is a list, not text"),
    "CSV of too many fields": ("text,id\nhello,1\nhello, you,2\n", {"name": "a.csv"}, r"a\.csv:3: has 3 fields where the first line names 2"),
}  # fmt: skip


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    """A tokenizer that pads with its end, and one of words, of which many are unknown."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = load_tokenizer(str(folder))
    made.pad_token = made.eos_token
    made.save_pretrained(pad := tmp_path_factory.mktemp("pad"))
    known = ["<unk>", "<end>", "Say", "Here", "is", "No", ":", ".", *map(str, range(20))]
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")
    own.save_pretrained(path := tmp_path_factory.mktemp("words"))
    return {"pad": pad, "words": path}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_data_is_refused_with_row_and_reason(
    tmp_path: Path, folder: Path, others: dict[str, Path], case: str
) -> None:
    rows, given, message = BROKEN[case]
    settings = dict(given)
    tokenizer = others.get(settings.pop("tokenizer", ""), folder)
    if "{" in settings.get("template", ""):
        (tmp_path / "mine.jinja").write_text(settings["template"])
        settings["template"] = str(tmp_path / "mine.jinja")
    with pytest.raises(DataError, match=message) as caught:
        run(tmp_path, tokenizer, rows, **settings)
    lines = str(caught.value).splitlines()
    assert sum(bool(re.search(message, line)) for line in lines) == 1
    assert len(lines) <= 2


PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
CALLS = [
    *(said("developer", "Be brief."), said("user", "Weather?")),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"c": 1}'}}],
    },
    *(
        {"role": "tool", "tool_call_id": "1", "content": "12"},
        {"role": "tool", "tool_call_id": "2", "content": "13"},
        A,
    ),
]
WITH_CALLS = CHATML.replace("m['content'] +", "m['content'] + (m.tool_calls | tojson if m.tool_calls else '') +")
GPT = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
FUNCTION = [
    GPT[0],
    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "7"},
    GPT[1],
]

GOOD: dict[str, tuple[Any, dict[str, Any], str, int]] = {
    "other scripts": (turns(said("user", "日本語 🙂‍↕️ \u202e عربى"), A), {}, "messages", 20),
    "capitals with accents": (seventh("pair", chosen="NÃO, ÂGE, façade, naïve, 10 °C, £5"), {}, "preference", 20),
    "fields that nobody reads": (seventh("talk", id=7, source={"a": [1]}, text="x"), {}, "messages", 20),
    "calls as the API sends them": (seventh("talk", messages=CALLS, tools=json.dumps(TOOLS)), {"template": WITH_CALLS}, "messages", 20),
    "text in parts, an empty system message": (turns(said("system", ""), said("user", PARTS), A), {}, "messages", 20),
    "ShareGPT under another name": ([{"dialog": GPT, "system": "s"}, {"dialog": FUNCTION}], {"columns": {"conversations": "dialog"}, "template": WITH_CALLS}, "sharegpt", 2),
    "roles and contents in conversations": ([{"conversations": [U, A]}] * 3, {}, "messages", 3),
    "pairs of whole conversations": ([{"chosen": [U, A], "rejected": [U, said("assistant", "no")]}] * 2, {}, "preference", 2),
    "pairs of whole texts": ([{"chosen": "Q: x A: yes sir", "rejected": "Q: x A: no sir"}], {}, "preference", 1),
    "pairs of ShareGPT": ([{"conversations": GPT[:1], "chosen": GPT[1], "rejected": {"from": "gpt", "value": "Ho"}}], {}, "preference", 1),
    "prompts that are messages": ([{"prompt": [U], "completion": [A]}] * 2, {}, "prompt", 2),
    "one turn of weight 0": (turns(U, said("assistant", "x", weight=0), U, A), {}, "messages", 20),
    "equal rows": ([talk(1)] * 9, {}, "messages", 9),
    "CSV over several lines": ('text,label\n"a, ""b""\nc",1\nd,0\n', {"name": "a.csv", "layout": "classes"}, "classes", 2),
    "blank lines, a mark of byte order": ("\ufeff" + "\r\n\n".join(json.dumps(talk(n)) for n in range(3)) + "\r\n", {}, "messages", 3),
    "text like a special token of others": (turns(said("user", "</s> <|endoftext|> [INST]"), A), {}, "messages", 20),
    "Alpaca with a history": (seventh("asked", history=[["a", "b"]], system="s"), {"template": "chatml"}, "alpaca", 20),
    "classes by number": (seventh("clause", label="law") , {"columns": {"label": "label"}}, "classes", 20),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_odd_data_that_is_right_passes_whole(tmp_path: Path, folder: Path, case: str) -> None:
    rows, given, layout, count = GOOD[case]
    settings = dict(given)
    if "{" in settings.get("template", ""):
        (tmp_path / "mine.jinja").write_text(settings["template"])
        settings["template"] = str(tmp_path / "mine.jinja")
    made = run(tmp_path, folder, rows, **settings)
    assert made.layout.kind == layout
    assert (made.warnings, made.counts["dropped"]) == ([], {})
    assert made.counts["read"] == made.counts["train"]["documents"] == count


def test_a_warned_check_leaves_rows_out_and_counts_them(tmp_path: Path, folder: Path) -> None:
    rows = seventh("pair", rejected="Here is 6.")
    rows[8]["chosen"] = 4
    with pytest.raises(DataError) as caught:
        run(tmp_path, folder, rows)
    assert len(str(caught.value).splitlines()) == 2
    made = run(tmp_path, folder, rows, preflight={"equal_answers": "warn", "fields": "warn"})
    assert made.counts["dropped"] == {"equal_answers": 1, "fields": 1}
    assert made.counts["read"] == 20
    assert made.counts["train"]["documents"] == 18
    assert len(made.warnings) == 2
    assert "such rows are left out" in made.warnings[0]
    assert to_plain_data(made.record())["counts"]["sources"][0]["dropped"] == {"equal_answers": 1, "fields": 1}


def test_few_rows_in_a_broken_encoding_are_told_only(tmp_path: Path, folder: Path) -> None:
    rows = [talk(n) for n in range(200)]
    rows[5]["messages"][0] = said("user", "CafÃ©")
    assert "1 of 200" in run(tmp_path, folder, rows).warnings[0]


def test_settings_of_checks_are_looked_at(tmp_path: Path, folder: Path) -> None:
    for settings, words in (
        ({"truncatd": "warn"}, r"did you mean 'truncated'"),
        ({"embedding": "warn"}, "cannot be a warning"),
    ):
        with pytest.raises(RecipeError, match=words):
            run(tmp_path, folder, [talk(1)], preflight=settings)
    help_ = field_docs(Data)["preflight"]
    assert all(f"{CHECKS[name].above:.0%}".replace("%", " %") in help_ for name in CHECKS if 0 < CHECKS[name].above < 1)


def test_what_a_preference_row_becomes(tmp_path: Path, folder: Path) -> None:
    made = run(tmp_path, folder, [{"chosen": [U, A, U, A], "rejected": [U, A, U, said("assistant", "no")]}])
    tokens = made.train.tokens
    assert tokens.group == 2
    text = [made.tokenizer.decode(np.asarray(ids).astype(int)) for ids in np.split(tokens.ids, tokens.offsets[:-1])]
    marks = np.split(np.asarray(tokens.loss_mask), tokens.offsets[:-1])
    ids = np.split(np.asarray(tokens.ids).astype(int), tokens.offsets[:-1])
    assert text[0].count("Good day<|im_end|>") == 2
    assert [made.tokenizer.decode(i[m == 1]) for i, m in zip(ids, marks, strict=True)] == [
        "Good day<|im_end|>",
        "no<|im_end|>",
    ]


def test_what_a_classes_row_becomes(tmp_path: Path, folder: Path) -> None:
    made = run(tmp_path, folder, [clause(n) for n in range(9)], layout="classes")
    assert made.classes == ("law", "rent", "tax")
    assert made.train.tokens.labels.tolist() == [0, 2, 1] * 3
    assert made.record().classes == ("law", "rent", "tax")
    numbers = run(
        tmp_path,
        folder,
        [{"text": f"t {n}", "label": 10 * (n % 3)} for n in range(9)],
        name="b.jsonl",
        layout="classes",
    )
    assert numbers.classes == ("0", "10", "20")


def long_prompt(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with a prompt of more than 128 tokens."""
    words = "What is 7 and 7? " * 40
    if kind == "talk":
        return {"messages": [said("user", words), *row["messages"][1:]]}
    return {**row, "instruction" if kind == "asked" else "prompt": words}


@pytest.mark.parametrize("kind", ["talk", "pair", "liked", "asked"])
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_without_room_for_an_answer_are_accounted_for(
    tmp_path: Path, folder: Path, kind: str, streaming: bool
) -> None:
    rows = [KINDS[kind](n) for n in range(20)]
    for n in (1, 4, 9):
        rows[n] = long_prompt(kind, rows[n])
    made = run(tmp_path, folder, rows, preflight={"truncated": "warn"}, streaming=streaming, template="chatml")
    assert made.account == RowAccount(20, 17, 0, {"no room for an answer": 3})
    if streaming:
        assert "a.jsonl: 3 of the first 20 rows are left out" in made.warnings[-1]
        return
    assert isinstance(made.train, Rows)
    assert sum(len(made.train.contents(n)[0]) for n in range(len(made.train))) == 17 * made.train.tokens.group
    counts = to_plain_data(made.record())["counts"]
    assert [counts["train"][key] for key in ("documents", "no_room", "cut")] == [17, 3, 0]
    assert RowAccount.of(counts["sources"][0]) == made.account
    assert made.text().startswith("rows: 20 read, 17 to train on, 0 to validate on; left out: 3 no room for an answer;")
    assert "a.jsonl:2: is longer than a sequence of 128 tokens, so that its prompt leaves no room" in made.warnings[-1]
    assert "(check truncated; 3 of 20, also 5, 10)" in made.warnings[-1]


def test_cut_answers_and_rows_without_room_are_told_apart(tmp_path: Path, folder: Path) -> None:
    rows = [pair(n) for n in range(20)]
    rows[2]["chosen"] *= 40
    rows[4] = long_prompt("pair", rows[4])
    made = run(tmp_path, folder, rows, preflight={"truncated": "warn"})
    assert made.account == RowAccount(20, 19, 0, {LeftOut.NO_ROOM: 1})
    assert (made.counts["train"]["cut"], made.counts["train"]["no_room"]) == (1, 1)
    assert "so that its answer is cut; 1 of these examples have no room" in made.warnings[0]


def test_every_row_is_accounted_for_once_whatever_its_weight_and_side(tmp_path: Path, folder: Path) -> None:
    for name, first in (("half", 0), ("more", 100)):
        rows = [pair(first + n) for n in range(40)]
        rows[5] = long_prompt("pair", rows[5])
        rows[7]["chosen"] = rows[7]["rejected"]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = tuple(
        {"source": str(tmp_path / f"{name}.jsonl"), "weight": w} for name, w in (("half", 0.5), ("more", 2.5))
    )
    preflight = {"truncated": "warn", "equal_answers": "warn"}
    data = Data(source=sources, tokenizer=str(folder), validation=0.25, preflight=preflight)
    made = prepare(data, length=128, seed=0, cache=tmp_path / "cache")
    half, more = (RowAccount.of(source) for source in made.counts["sources"])
    assert half + more == made.account
    assert half.left_out["equal_answers"] == more.left_out["equal_answers"] == more.left_out[LeftOut.NO_ROOM] == 1
    text = made.tokenizer.decode(np.asarray(made.train.tokens.ids).astype(int))  # type: ignore[union-attr]
    numbers = {n for n in range(140) if f"Here is {n}." in text}
    # The rows without room are among the tokens, at most, but in no sequence.
    assert half.trained_on == len({n for n in numbers if n < 100} - {5})
    assert more.trained_on == len({n for n in numbers if n >= 100} - {105})
    assert half.left_out[LeftOut.NOT_DRAWN] > 0 == more.left_out.get(LeftOut.NOT_DRAWN, 0)
    assert made.account.held_out == sum(made.validation.examples_used())


def test_running_text_beyond_the_last_full_sequence_is_left_out(tmp_path: Path, folder: Path) -> None:
    made = run(tmp_path, folder, [{"text": f"This clause has number {n}."} for n in range(30)], packing="stream")
    assert isinstance(made.train, Rows)
    ends, beyond = made.train.tokens.offsets, len(made.train) * 128
    left = int((ends - np.diff(ends, prepend=0) >= beyond).sum())
    assert left > 0
    assert made.account == RowAccount(30, 30 - left, 0, {LeftOut.INCOMPLETE_SEQUENCE: left})


def test_an_account_adds_up() -> None:
    with pytest.raises(AssertionError, match="4 rows were read, 3 are accounted for"):
        RowAccount(4, trained_on=2, held_out=0, left_out={LeftOut.EMPTY: 1})


def test_weights_repeat_documents_and_are_counted(tmp_path: Path, folder: Path) -> None:
    for name, first in (("one", 0), ("two", 100)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(talk(first + n)) + "\n" for n in range(40)))
    two = {"source": str(tmp_path / "two.jsonl"), "weight": 2.5}
    data = Data(source=(str(tmp_path / "one.jsonl"), two), tokenizer=str(folder), validation=0.0)
    made = prepare(data, length=128, seed=0, cache=tmp_path / "cache")
    one, more = made.counts["sources"]
    assert (one["documents"], one["read"], more["read"]) == (40, 40, 40)
    assert 85 < more["documents"] < 115
    text = made.tokenizer.decode(np.asarray(made.train.tokens.ids).astype(int))
    assert {text.count(f"What is {n} and") for n in range(100, 140)} == {2, 3}
    assert made.counts["train"]["duplicates"] == 0


def test_an_interrupted_start_goes_on_where_it_stopped(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.data import tokenize_corpus
    from preheat.data.rows import formats
    from preheat.data.tokenizer import Encoder

    monkeypatch.setattr(tokenize_corpus, "JOURNAL_EVERY", 0.0)
    monkeypatch.setattr("preheat.data.split.CHUNK_DOCUMENTS", 16)
    rows = [talk(n) for n in range(200)]
    rows[3]["messages"][1]["weight"] = 0
    settings: dict[str, Any] = {"preflight": {"untrained": "warn"}, "validation": 0.1}
    whole = run(tmp_path, folder, rows, **settings)
    again = tmp_path / "again"
    again.mkdir()
    calls, encode = [], Encoder.__call__

    def dies(self: Any, documents: Any) -> Any:
        calls.append(len(documents))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return encode(self, documents)

    monkeypatch.setattr(Encoder, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        run(again, folder, rows, **settings)
    assert list((again / "cache").glob(".partial-tokens-*/journal.json"))
    calls, rendered, document = [0] * 7, [], formats.Layout.document
    monkeypatch.setattr(
        formats.Layout, "document", lambda self, row, where: rendered.append(where) or document(self, row, where)
    )
    made = run(again, folder, rows, **settings)
    assert 0 < len(rendered) <= 200 - 3 * 16
    assert (made.train.tokens.ids == whole.train.tokens.ids).all()
    assert made.fingerprint == whole.fingerprint
    assert [made.counts[k] for k in ("read", "dropped", "train")] == [
        whole.counts[k] for k in ("read", "dropped", "train")
    ]
    assert not list((again / "cache").glob(".partial*"))


def test_real_sets_of_the_field(tmp_path: Path, data_folder: Path, folder: Path) -> None:
    expected = {"alpaca_en_demo": "alpaca", "dpo_en_demo": "preference", "glaive_toolcall_en_demo": "sharegpt"}
    preflight = {"encoding": "warn", "truncated": "warn"}
    for name, layout in expected.items():
        data = Data(
            source=str(data_folder / "instruct" / f"{name}.json"),
            tokenizer=str(folder),
            limit=100,
            template="qwen",
            validation=0.0,
            preflight=preflight,
        )
        made = prepare(data, length=4096, seed=0, cache=tmp_path / "cache")
        assert made.layout.kind == layout
        # The prompts of many pairs take more than 2,048 tokens of this small tokenizer.
        assert made.counts["dropped"] == ({LeftOut.NO_ROOM: 30} if name == "dpo_en_demo" else {})
        assert ("check encoding; 1 of 100" in str(made.warnings)) == (
            name == "dpo_en_demo"
        )  # its row 16 was read as Latin-1
        assert END not in made.tokenizer.decode(np.asarray(made.train.tokens.ids[:4000]).astype(int))
