"""Data that goes wrong ends in one line, soon; nothing is dropped in silence, and tokens are those of tokenizer.json."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from preheat.cache_folder import store_json
from preheat.data import PreparedData, prepare
from preheat.data.cache import open_entry, read_entry
from preheat.data.chat import render_limits as limits
from preheat.data.chat.render_limits import TemplateLimit
from preheat.data.chat.template import Template
from preheat.data.packing import IGNORED, Rows, Tokens
from preheat.data.preview import _summarize_lengths, build_preview
from preheat.data.rows.file_readers import expand_path, find_files
from preheat.data.rows.prompt_files import read_prompts
from preheat.data.tokenizer import (
    Encoder,
    describe_rebuild,
    load_tokenizer,
    save_tokenizer,
    token_bytes,
    train_tokenizer,
)
from preheat.errors import DataError, PreheatError, RecipeError, RunError
from preheat.evaluation.prompts import read_rows
from preheat.files import read_value
from preheat.model_folder import beginning_tokens, count_embedding_rows
from preheat.models.configs import find_tokenizer_folder
from preheat.planning.plan_request import find_vocabulary_size
from preheat.recipe import Data, parse

from ...conftest import TooLong, within
from ..chats import CHATML, SPECIAL
from ..row_faults import GOOD, TALK, VARIANTS, drawn, lines

TEXTS = [
    "Hello world, in 2023 we had 1234567 birds.",
    "  two  spaces\n\nand\ttabs ",
    "once upon a time",
    "été 東京 x = [1, 2]",
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = train_tokenizer([(f"{n:032x}", json.dumps(GOOD)) for n in range(3)], vocabulary=320)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = CHATML
    path = tmp_path_factory.mktemp("own")
    made.save_pretrained(path)
    return path


def run(tmp_path: Path, folder: Path, source: Path | tuple[str, ...], **settings: Any) -> PreparedData:
    data = Data(
        source=source if isinstance(source, tuple) else str(source),
        tokenizer=str(folder),
        **{"validation": 0.0, **settings},
    )
    return prepare(data, length=64, seed=0, cache=tmp_path / "cache")


# --- rows


def answer(tmp_path: Path, folder: Path, name: str, content: bytes) -> str | None:
    """What a file of rows is refused with; None: it is read."""
    (tmp_path / name).write_bytes(content)
    try:
        with within(30):
            run(tmp_path, folder, tmp_path / name)
    except PreheatError as error:
        words = str(error)
        assert all(len(line) < 900 for line in words.splitlines()), words
        assert words.isprintable() or words.replace("\n", "").isprintable(), repr(words)
        assert len(words.splitlines()) <= 4, words
        return words
    return None


@pytest.mark.parametrize("case", VARIANTS)
def test_rows_end_in_one_line_with_file_and_row(tmp_path: Path, folder: Path, case: str) -> None:
    name, content, expected = VARIANTS[case]
    words = answer(tmp_path, folder, name, content)
    if case == "a history of numbers":  # an optional field: whether it is read decides the first row
        assert words is None
    elif expected is None:
        assert words is None, words
    else:
        assert re.search(expected, words or ""), words


@pytest.mark.slow
def test_a_thousand_files_of_rows(tmp_path: Path, folder: Path) -> None:
    read = 0
    for seed in range(1000):
        read += answer(tmp_path, folder, *drawn(seed)) is None
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert 20 < read < 900


def test_some_files_of_rows_by_seed(tmp_path: Path, folder: Path) -> None:
    found = [answer(tmp_path, folder, *drawn(seed)) for seed in range(5000, 5040)]
    assert any(found)
    assert not all(found)


def test_a_line_of_50_mb_is_refused_soon(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        lines(GOOD) + b'{"instruction": "a", "output": "' + b"hello " * (50 * 2**20 // 6) + b'"}\n'
    )
    begun = time.process_time()
    with pytest.raises(DataError, match=r"a\.jsonl:13: the line has more than 16 MiB"):
        run(tmp_path, folder, tmp_path / "a.jsonl")
    assert time.process_time() - begun < 5


def test_all_readers_of_json_lines_refuse_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for bad, words in {
        '{"a": ' + "9" * 5000 + "}": "digits",
        "[" * 50_000: "nested too deeply",
        '{"prompt": "a", "prompt": "b"}': "twice",
        '{"prompt": "\x00"}': "is 0",
        "[3]": ".",
    }.items():
        path.write_bytes(lines([{"prompt": "a"}], bad))
        for read in (lambda: read_prompts(path), lambda: read_rows(str(path))):
            with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{words}"):
                read()
    assert read_value('{"a": [1.5, "b", null]}') == {"a": [1.5, "b", None]}


# --- files and folders


def test_what_a_folder_does_not_give_is_named_by_suffix(tmp_path: Path, folder: Path) -> None:
    own = tmp_path / "rows"
    (own / "more").mkdir(parents=True)
    for name in ("a.jsonl", "more/b.jsonl"):
        (own / name).write_bytes(lines(GOOD))
    for name in ("notes.txt", "more/read.me", ".hidden.jsonl", "LICENSE", "c.json"):
        (own / name).write_text("text that is not read")
    (own / "empty.jsonl").touch()
    (own / "gone.jsonl").symlink_to(own / "nowhere")
    os.mkfifo(own / "pipe.jsonl")
    (own / "folder.jsonl").mkdir()
    made = run(tmp_path, folder, own)
    assert made.counts["read"] == 24
    (line,) = [line for line in made.warnings if "not read" in line]
    for words in (
        "1 .txt",
        "1 .json",
        "1 .me",
        "1 hidden",
        "1 without suffix",
        "1 empty .jsonl",
        "1 link to nothing",
        "1 pipe",
    ):
        assert words in line
    assert not [line for line in run(tmp_path, folder, own / "more" / "b.jsonl").warnings if "not read" in line]


def test_paths_that_cannot_be_read_are_told_in_a_line(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name, words in {
        "pipe.jsonl": "is a pipe",
        "gone.jsonl": "is a link to nowhere, which does not exist",
        "loop.jsonl": "cannot be accessed",
        "folder.jsonl": "the folder has no file that preheat reads",
        "x" * 300 + ".jsonl": "cannot be accessed",
        "a\x1b[31m.jsonl": "does not exist",
    }.items():
        with pytest.raises(DataError, match=words) as caught:
            run(tmp_path, folder, tmp_path / name)
        assert str(caught.value).isprintable()
    with pytest.raises(DataError, match="no such home folder"):
        expand_path("data.source", "~nobody-of-this-name/a.jsonl")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid")))
    with pytest.raises(DataError, match="no such home folder"):
        expand_path("data.source", "~/a.jsonl")
    (tmp_path / "locked.jsonl").write_bytes(lines(GOOD))
    real = Path.open

    def locked(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == "locked.jsonl":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", locked)
    with pytest.raises(DataError, match=r"locked\.jsonl: cannot be read \(Permission denied\)"):
        run(tmp_path, folder, tmp_path / "locked.jsonl")


def test_a_saved_data_set_with_parts_missing(tmp_path: Path, folder: Path) -> None:
    import datasets

    whole = tmp_path / "whole"
    datasets.Dataset.from_list(GOOD).save_to_disk(whole)
    assert run(tmp_path, folder, whole).counts["read"] == 12

    def cut(file: Path) -> None:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    (part,) = (p.name for p in whole.glob("*.arrow"))
    for name, change in {part: Path.unlink, "dataset_info.json": cut, "state.json": Path.unlink}.items():
        for damage in {change, cut}:
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            damage(copy / name)
            with contextlib.suppress(DataError):
                found = run(tmp_path, folder, copy)
                assert found.counts["read"] == 12, (name, damage)
    (whole / "state.json").unlink()
    with pytest.raises(DataError, match=r"has \.arrow files without the state\.json"):
        find_files("data.source", whole)


# --- tokens


@pytest.mark.parametrize(
    "name", ["Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizerFast", "T5Tokenizer", "BertTokenizer"]
)
def test_the_tokens_are_those_of_tokenizer_json(tmp_path: Path, data_folder: Path, name: str) -> None:
    source = data_folder / "stories260K-hf"
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    own = tmp_path / "model"
    own.mkdir()
    (own / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    (own / "config.json").write_text(json.dumps({"model_type": "qwen2" if name == "Qwen2Tokenizer" else "llama"}))
    right, found = Tokenizer.from_file(str(own / "tokenizer.json")), load_tokenizer(str(own))
    for text in TEXTS:
        assert found.encode(text, add_special_tokens=False) == right.encode(text, add_special_tokens=False).ids
    assert (found.eos_token, found.bos_token, found.model_max_length) == ("</s>", "<s>", 512)
    saved = tmp_path / "saved"
    assert save_tokenizer(found, saved) is None
    for text in TEXTS:
        ids = right.encode(text, add_special_tokens=False).ids
        assert transformers.AutoTokenizer.from_pretrained(saved).encode(text, add_special_tokens=False) == ids
    if name == "Qwen2Tokenizer":  # beside such a configuration transformers builds its own, whatever is stated
        assert "Qwen2Tokenizer" in str(describe_rebuild(own))


def test_the_beginning_of_a_text_is_that_of_tokenizer_json(tmp_path: Path) -> None:
    from tokenizers import normalizers, processors

    made = train_tokenizer([("00", "once upon a time there was one who didn't " * 40)], vocabulary=300)
    made.backend_tokenizer.normalizer = normalizers.NFC()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", pair="<|pad|> $A $B", special_tokens=[("<|pad|>", made.pad_token_id)]
    )
    made.save_pretrained(tmp_path)
    settings = {"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|end|>", "bos_token": "<|pad|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode("once")[:1] != [made.pad_token_id]
    found = load_tokenizer(str(tmp_path))
    assert found.encode("once") == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("once").ids
    assert beginning_tokens(found) == Encoder(found).begin == [made.pad_token_id]
    assert save_tokenizer(found, tmp_path / "saved") is None
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").encode("once") == found.encode("once")
    assert beginning_tokens(made) == []  # which names no token that begins a text


def test_a_tokenizer_without_tokenizer_json_is_read_as_transformers_does(tmp_path: Path) -> None:
    own = tmp_path / "gpt2"
    own.mkdir()
    letters = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ġa", "he"]
    (own / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(letters)}))
    (own / "merges.txt").write_text("#version: 0.2\nh e\nĠ a\n")
    (own / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    found = load_tokenizer(str(own))
    assert found.convert_ids_to_tokens(found.encode("he had a hen")) == ["he", "Ġ", "h", "a", "d", "Ġa", "Ġ", "he", "n"]


def test_damaged_tokenizers_end_in_a_line(tmp_path: Path, folder: Path) -> None:
    for name, content in {
        "tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        "tokenizer_config.json": b"[1]",
        "special_tokens_map.json": b"\xff",
    }.items():
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{re.escape(name)}: ") as caught:
            load_tokenizer(str(copy))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model_max_length", "abc", "must be a number above 0, got 'abc'"),
        ("model_max_length", -1, "must be a number above 0"),
        ("model_max_length", [], "must be a number above 0"),
        ("chat_template", 3, "must be a template's text, got 3"),
        ("chat_template", {"default": 3}, "must be a template's text, got 3"),
        ("unk_token", {}, "must be a token's text, got {}"),
        ("eos_token", [1], "must be a token's text"),
    ],
)
def test_wrong_types_in_a_tokenizers_settings_end_in_a_line(
    tmp_path: Path, folder: Path, key: str, value: Any, words: str
) -> None:
    shutil.copytree(folder, tmp_path / "t")
    file = tmp_path / "t/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(DataError, match=rf"tokenizer_config\.json: {key}: ") as caught:
        load_tokenizer(str(tmp_path / "t"))
    assert words in str(caught.value)


def test_a_tokenizer_beside_a_broken_configuration_ends_in_a_line(tmp_path: Path, folder: Path) -> None:
    for name, value in (("auto_map", [1]), ("config", {"model_type": "llama", "num_attention_heads": 0})):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        if name == "config":
            (copy / "config.json").write_text(json.dumps(value))
        else:
            file = copy / "tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
        with contextlib.suppress(DataError):  # read by the other of the two ways, or refused
            load_tokenizer(str(copy))


def test_a_pretrained_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    recipe = parse(f"model: {{path: {tmp_path}}}\nstop: {{max_steps: 1}}")
    with pytest.raises(RecipeError, match=r"has weights and no tokenizer.* set data\.tokenizer"):
        find_tokenizer_folder(recipe)
    anew = parse(f"model: {{path: {tmp_path}, weights: random}}\nstop: {{max_steps: 1}}")
    assert find_tokenizer_folder(anew) is None
    (tmp_path / "tokenizer.json").touch()
    assert find_tokenizer_folder(recipe) == str(tmp_path)


# --- chat templates

HEAD = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("text", "settings", "blocked", "told"),
    [
        (f"{{% for m in messages %}}{HEAD}{{% endfor %}}{ASK}", {}, "", ""),
        (f"{{% for m in messages %}}{HEAD}{{% endfor %}}{{{{ '<|im_start|>assistant\\n' }}}}", {}, "ends in an open turn", ""),
        (f"{{% for m in messages %}}{HEAD}{{% endfor %}}", {}, "", "the generation prompt lacks it"),
        (
            f"{{% for m in messages %}}{HEAD}{{% endfor %}}{ASK.replace('assistant', 'assistant' + chr(92) + 'n<think>')}",
            {"train_on": "all"},
            "",
            "is not the beginning of the row",
        ),
        (
            f"{{% for m in messages %}}{HEAD}{{% endfor %}}{ASK.replace('assistant', 'assistant' + chr(92) + 'n<think>')}",
            {},
            "with an open <think>",
            "",
        ),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            {"train_on": "all"},
            "",
            "the tokens of its prompt end in",
        ),
    ],
)  # fmt: skip
def test_where_training_and_generation_meet(
    tmp_path: Path, folder: Path, text: str, settings: dict[str, Any], blocked: str, told: str
) -> None:
    (tmp_path / "a.jinja").write_text(text)
    rows = [json.loads(json.dumps(row).replace("It is", "is")) for row in TALK]  # ' is' is one token
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    settings = {"template": str(tmp_path / "a.jinja"), **settings}
    if blocked:
        with pytest.raises(DataError, match=blocked):
            run(tmp_path, folder, tmp_path / "a.jsonl", **settings)
        return
    notes = run(tmp_path, folder, tmp_path / "a.jsonl", **settings).warnings
    assert [told in note for note in notes if "generation_prompt" in note] == ([True] if told else [])


def test_reasoning_that_history_leaves_out_is_told(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if loop.last and m.thinking %}"
        "{{ '<think>' + m.thinking + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}" + ASK
    )
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Heat.", "thinking": "hm"}]
    (tmp_path / "a.jsonl").write_bytes(
        lines([{"messages": [{"role": "user", "content": f"And {n}?"}, said[1], *said]} for n in range(20)])
    )
    settings = {"template": str(tmp_path / "a.jinja"), "preflight": {"truncated": "warn"}}
    for train_on, told in (("assistant", 1), ("last", 0)):
        notes = run(tmp_path, folder, tmp_path / "a.jsonl", train_on=train_on, **settings).warnings
        found = "message 2: training has 'Heat.<|im_end|>', generation '<think>hm</think>Heat.<|im_end|>'"
        assert [found in note for note in notes if "earlier_turns" in note] == [True] * told


def test_rows_of_text_beside_a_template_are_not_asked(tmp_path: Path, folder: Path) -> None:
    """They are laid out without it, so there is nothing to compare; two sources that differ still only warn."""
    (tmp_path / "text.jsonl").write_bytes(lines([{"text": f"A kettle is warm, {n}."} for n in range(20)]))
    assert run(tmp_path, folder, tmp_path / "text.jsonl", template="chatml").train.tokens.ids.size
    (tmp_path / "a.jinja").write_text(f"{{% for m in messages %}}{HEAD}{{% endfor %}}")
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(
            lines([json.loads(json.dumps(row).replace("?", name)) for row in TALK])
        )
    both = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    notes = run(tmp_path, folder, both, template=str(tmp_path / "a.jinja")).warnings
    assert sum("generation_prompt" in note for note in notes) == 1, notes


NEVER = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x", "it loops"),
    "wide": ("{{ ('a' * 1000000) | center(10000000000) }}", "memory"),
    "indent": ("{{ messages | tojson(indent=999999999) }}", "memory"),
    "recursive": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "doubled": ("{% set n = namespace(t='aa') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}", "memory|loops"),
    "power": ("{{ 9 ** 99999999 }}", "computes a power"),
    "long": ("{% for i in range(3000) %}{{ 'a' * 9000 }}{% endfor %}", "characters of a conversation"),
    "parentheses": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "nested too deeply"),
    "large": ("{# " + "x" * 2**21 + " #}", "characters, and no chat template more"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER)
def test_templates_that_never_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.5)
    text, words = NEVER[name]
    begun = time.monotonic()
    with within(60), pytest.raises(TemplateLimit, match=words):
        Template(text, "mine.jinja").spans(TALK[0]["messages"])
    assert time.monotonic() - begun < 30
    assert Template(CHATML, "own").prompt(TALK[0]["messages"][:1]).endswith("assistant\n"), (
        "the limits are lifted again"
    )


def test_the_limits_hold_in_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.5)
    before = resource.getrlimit(resource.RLIMIT_AS)
    question = TALK[0]["messages"][:1]

    def render(name: str) -> str:
        with pytest.raises(TemplateLimit) as caught:
            Template(NEVER[name][0], "mine.jinja").spans(TALK[0]["messages"])
        # The thread goes on: nothing is left that would end it later.
        assert Template(CHATML, "own").prompt(question).endswith("assistant\n")
        time.sleep(0.8)
        return str(caught.value)

    names = ["loops", "wide", "recursive"]
    started = threading.Barrier(
        len(names)
    )  # a thread that starts takes address space, which is limited while another renders
    begun = time.monotonic()
    with within(60), concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda _: started.wait(), names))
        for name, message in zip(names, pool.map(render, names), strict=True):
            assert re.search(f"^mine.jinja: .*{NEVER[name][1]}", message)
    assert time.monotonic() - begun < 30
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert not limits._threads.watched


def test_an_alarm_that_was_set_before_still_rings() -> None:
    template, question = Template(CHATML, "own"), TALK[0]["messages"][:1]
    with pytest.raises(TooLong), within(1):
        assert not (template.prompt(question) and time.sleep(30))


@pytest.mark.parametrize(
    "text",
    ["{{ nowhere.x }}", "{{ raise_exception('\x1b[31mno\nway') }}", "{% if %}", "{{ 1 / 0 }}", "\x1b{% bad \x07 %}"],
)
def test_templates_that_fail_do_so_in_one_line(text: str) -> None:
    with pytest.raises(DataError, match="mine") as caught:
        Template(text, "mine").spans(TALK[0]["messages"])
    assert str(caught.value).isprintable()


# --- the cache


def test_the_cache_is_private_and_what_is_damaged_is_made_anew(tmp_path: Path) -> None:
    root, calls = tmp_path / "new" / "own" / "cache", []

    def build(folder: Path) -> dict[str, Any]:
        calls.append(1)
        (folder / "a.bin").write_bytes(b"content")
        return {"rows": 3}

    folder, made = open_entry(root, "x-1", build)
    store_json(tmp_path / "rates" / "of" / "a.json", {})
    every = (root.parents[1], root.parent, root, folder, tmp_path / "rates", tmp_path / "rates" / "of")
    assert [path.stat().st_mode & 0o777 for path in every] == [0o700] * 6
    for damage in (
        lambda: (folder / "a.bin").write_bytes(b"contenT"),
        lambda: (folder / "a.bin").unlink(),
        lambda: (folder / "entry.json").write_text("[" * 100_000),
        lambda: (folder / "entry.json").write_text(json.dumps(made | {"values": {"rows": 4}})),
        lambda: (folder / "entry.json").write_text(json.dumps(made | {"values": {}})),
        lambda: (folder / "entry.json").write_text("null"),
    ):
        damage()
        assert read_entry(folder) is None
        assert open_entry(root, "x-1", build)[1]["values"] == {"rows": 3}
    assert len(calls) == 7

    def full(folder: Path) -> dict[str, Any]:
        (folder / "a.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); set PREHEAT_CACHE"):
        open_entry(root, "x-2", full)
    assert sorted(path.name for path in root.iterdir()) == ["x-1"]


def test_a_tokenizer_on_a_full_disk_is_one_line(tmp_path: Path, folder: Path) -> None:
    import resource

    found, before = load_tokenizer(str(folder)), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(RunError, match="the tokenizer cannot be saved"):
            save_tokenizer(found, tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


# --- what is shown and evaluated


def test_the_preview_names_the_file_s_own_rows(tmp_path: Path, folder: Path) -> None:
    rows = [*GOOD[:4], GOOD[0], GOOD[0], *GOOD[4:]]  # three that are equal
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    made = run(tmp_path, folder, tmp_path / "a.jsonl", template="alpaca")
    seen = {}
    for example in build_preview(made, "n", rows=99, seed=0)["examples"]:
        for document in example["documents"]:
            seen[int(document["where"].rpartition(":")[2])] = "".join(text for text, *_ in document["spans"])
    assert sorted(seen) == list(range(1, 15))
    assert all(f"Say {rows[n - 1]['instruction'][4:]}\n" in text for n, text in seen.items())


def test_the_bars_of_a_preview_count_the_lengths_that_they_name() -> None:
    for sizes in (np.array([3, 3, 4, 5, 90]), np.arange(1, 200), np.array([7, 7, 7]), np.array([2, 300, 301, 9000])):
        for bar in _summarize_lengths(sizes, 64)["bars"]:
            inside = (sizes >= bar["from"]) & (sizes <= (bar["to"] or sizes.max()))
            assert bar["count"] == inside.sum(), bar


def test_both_answers_of_a_plain_pair_are_checked(tmp_path: Path, folder: Path) -> None:
    pairs = [{"prompt": "Say: ", "chosen": f"good {n}", "rejected": f"bad {n}<|im_end|>"} for n in range(4)]
    (tmp_path / "a.jsonl").write_bytes(lines(pairs))
    with pytest.raises(DataError, match=r"a.jsonl:1: field 'rejected' holds <\|im_end\|>, a special token"):
        run(tmp_path, folder, tmp_path / "a.jsonl")


def test_a_tokenizer_with_several_templates_gets_the_one_that_was_trained(tmp_path: Path, folder: Path) -> None:
    own = load_tokenizer(str(folder))
    own.chat_template = {"default": CHATML, "tool_use": CHATML + "{{ tools }}"}
    own.save_pretrained(tmp_path / "several")
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD))
    plain = run(tmp_path, tmp_path / "several", tmp_path / "a.jsonl")
    assert plain.tokenizer.chat_template == own.chat_template
    other = run(tmp_path, tmp_path / "several", tmp_path / "a.jsonl", template="alpaca")
    assert other.layout.template is not None
    assert other.tokenizer.chat_template == other.layout.template.text != CHATML


def test_ids_of_a_tokenizer_may_have_gaps(tmp_path: Path) -> None:
    vocabulary = {"<end>": 0, "a": 1, "b": 70_000}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    own.save_pretrained(tmp_path / "gaps")
    assert count_embedding_rows(own) == len(token_bytes(own)) == 70_001
    assert token_bytes(own)[70_000] == b"b"
    (tmp_path / "a.txt").write_text("a b " * 100)
    made = run(tmp_path, tmp_path / "gaps", tmp_path / "a.txt")
    assert set(made.train.row(0).tokens.tolist()) == {1, 70_000}
    recipe = parse(f"data: {{source: x, tokenizer: {tmp_path / 'gaps'}}}\nstop: {{epochs: 1}}", where="r")
    assert find_vocabulary_size(recipe) == 70_001


def test_a_last_partial_row_has_each_token_once() -> None:
    draw = np.random.default_rng(0)
    for total in (2, 3, 9, 10, 16, 17, 23):
        for length in (4, 5, 8):
            ends = np.unique(np.append(draw.integers(1, total + 1, 3), total))
            rows = Rows(Tokens(np.arange(100, 100 + total), ends), length, partial=True, pad=7)
            read = [rows.row(n) for n in range(len(rows))]
            assert all(sum(row.documents) == length == len(row.tokens) for row in read)
            labels = [int(label) for row in read for label in row.labels if label != IGNORED]
            firsts = {100, *(100 + ends).tolist()}
            assert labels == [n for n in range(100, 100 + total) if n not in firsts]
            assert rows.trained_total == len(labels)


def test_encoding_one_document_is_encoding_it_among_others(folder: Path) -> None:
    own = load_tokenizer(str(folder))
    encoder, template = Encoder(own), Template(CHATML, "own", {}, tuple(SPECIAL))
    from preheat.data.document import Document

    documents = [Document((template.spans(row["messages"]),), complete=True) for row in TALK]
    assert [encoder.first_of(document) for document in documents] == [e[0].tokens for e in encoder(documents)]


@pytest.mark.parametrize("name", ["text", "json", "csv"])
def test_the_name_of_a_format_reads_no_files_of_this_folder(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"mine.{name}").write_text('{"text": "private"}\n')
    with pytest.raises(DataError, match=f"data.source {name}: no such file or folder here, and {name} is a format"):
        run(tmp_path, folder, (name,))
