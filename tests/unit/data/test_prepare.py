"""From files to rows: sources, the split, the tokenizer, the cache, and one clear line for each kind of bad data."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from preheat.core import Shape
from preheat.data import Rows, batches, compute_baselines, prepare, sources
from preheat.data.cache import read_entry
from preheat.data.document import Document
from preheat.data.rows.file_readers import CUT_AT_ANY_LINE, read_file
from preheat.data.sources import open_source
from preheat.data.streaming import interleave
from preheat.data.tokenizer import Encoder, load_tokenizer, train_tokenizer
from preheat.errors import DataError, RecipeError
from preheat.recipe import Data, parse

LINES = [f"line {n}: the {'quick brown fox ' * (n % 5)}jumps over {n * n}" for n in range(120)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([(f"{n:032x}", line) for n, line in enumerate(LINES)], vocabulary=300).save_pretrained(folder)
    return str(folder)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tmp_path, source, *, length=16, tokenizer=None, **settings):
    data = Data(source=str(source), vocab_size=300, **{"validation": 0.2, **settings})
    return prepare(data, length=length, seed=0, tokenizer=tokenizer, cache=tmp_path / "cache")


def texts(prepared, rows):
    end = prepared.tokenizer.eos_token
    return [t for t in prepared.tokenizer.decode(rows.tokens.ids.astype(int)).split(end) if t]


def test_importing_the_package_imports_no_torch():
    code = "import sys, preheat.data; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- tokenizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", " ", "\t\n\r\n  x", "naïve 日本語 🙂‍↕️ \u202e\x00\x7f", "a" * 1000, "def f():\n    return 1\n", "\ufffd\u0301"],
)
def test_bpe_gives_back_what_it_was_given(tokenizer, text):
    own = load_tokenizer(tokenizer)
    assert own.decode(own.encode(text)) == text
    assert len(own) == 300
    assert own.eos_token_id != own.pad_token_id


def test_a_tokenizers_own_truncation_is_not_applied(tokenizer):
    own = load_tokenizer(tokenizer)
    own.backend_tokenizer.enable_truncation(3)
    assert len(Encoder(own)([Document.of("many words in one document")])[0][0].tokens) > 4
    assert own.backend_tokenizer.truncation is not None


# --- rows from files ------------------------------------------------------------------------------------------------


def test_only_completions_are_trained(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"q": f"{line} = ", "a": f"{n}!"} for n, line in enumerate(LINES)])
    made = run(tmp_path, source, prompt="q", completion="a", tokenizer=tokenizer, length=96)
    assert made.train.packing == "whole"
    answers = []
    for n in range(len(made.train)):
        row, at = made.train.row(n), 0
        for size in row.documents:
            labels = row.labels[at : at + size]
            answers.append(made.tokenizer.decode(labels[labels >= 0]))
            at += size
    answers = [a for a in answers if a]
    assert set(answers) <= {f"{n}!<|end|>" for n in range(120)}
    assert len(set(answers)) == len(answers) == made.counts["train"]["documents"]


def test_equal_documents_stand_on_one_side(tmp_path, tokenizer):
    copies = [line.replace(" ", "  ") for line in LINES] + LINES + [f"\n{line}" for line in LINES]
    made = run(tmp_path, write(tmp_path / "a.jsonl", [{"text": t} for t in copies]), tokenizer=tokenizer)
    train, validation = ([" ".join(t.split()) for t in texts(made, rows)] for rows in (made.train, made.validation))
    assert len(train) + len(validation) == 360
    assert not set(train) & set(validation)
    assert 0.1 < len(validation) / 360 < 0.3


def test_validation_documents_are_dropped_from_training(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"text": t} for t in LINES])
    held = write(tmp_path / "b.jsonl", [{"text": f" {t}\n"} for t in LINES[:30]])
    made = run(tmp_path, source, validation=held, tokenizer=tokenizer, preflight={"validation": "warn"})
    assert made.counts["dropped"] == {"also in validation": 30}
    assert texts(made, made.train) == LINES[30:]
    assert texts(made, made.validation) == [f" {t}\n" for t in LINES[:30]]


def test_every_format_gives_the_same_rows(tmp_path, tokenizer):
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": t, "id": n} for n, t in enumerate(LINES)]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    for n, line in enumerate(LINES):
        (tmp_path / "folder" / f"{n:03}.txt").write_text(line)
    made = [
        run(tmp_path, tmp_path / name, tokenizer=tokenizer)
        for name in ("a.jsonl", "a.json", "a.parquet", "saved", "folder")
    ]
    assert len({m.fingerprint for m in made}) == 1
    assert (
        len(
            {
                run(tmp_path, tmp_path / "a.json", tokenizer=tokenizer, **other).fingerprint
                for other in ({"validation": 0.3}, {"length": 8}, {"limit": 50})
            }
            - {made[0].fingerprint}
        )
        == 3
    )


def test_the_documents_of_a_cut_file_bear_the_line_that_they_begin_in(tmp_path):
    long = "x" * (2 * CUT_AT_ANY_LINE + 5)
    lines = ["first\n", long + "\n", "then\n", "y" * CUT_AT_ANY_LINE + "\n", "\n", *["z" * 99 + "\n"] * 600]
    (tmp_path / "a.txt").write_text("".join(lines))
    found = [(int(where.rsplit(":", 1)[1]), text) for where, text in read_file(tmp_path / "a.txt")]
    assert "".join(text for _, text in found) == "".join(lines)
    at = 0
    for number, text in found:
        assert number == "".join(lines)[:at].count("\n") + 1
        at += len(text)
    assert [number for number, _ in found][:4] == [1, 2, 2, 4]


def test_a_long_text_file_is_cut_at_blank_lines_without_loss(tmp_path):
    text = "".join(f"{line}\n" + "\n" * (n % 3 == 0) for n, line in enumerate(LINES * 30))
    (tmp_path / "a.txt").write_text(text)
    pieces = [text for _, text in read_file(tmp_path / "a.txt")]
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert all(p.endswith("\n\n") and len(p) < 5000 for p in pieces[:-1])
    cut, whole = (
        Data(source=({"source": str(tmp_path / "a.txt"), **more},)).parts()[0][0]
        for more in ({}, {"text_files": "whole"})
    )
    assert [d.text for d in open_source(whole).read()] == [text]
    assert open_source(whole).key() != open_source(cut).key()


def test_the_standard_library_is_its_sources_without_packages_and_tests(tmp_path, monkeypatch):
    for name in ("b.py", "a.py", "json/c.py", "json/x.txt", "site-packages/p.py", "test/t.py", "json/tests/u.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "_sysconfigdata_here.py").touch()
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    assert sources._find_stdlib_files() == [tmp_path / name for name in ("a.py", "b.py", "json/c.py")]


def test_built_in_sources_are_real_and_repeatable(monkeypatch):
    library = [d.text for d in open_source(Data()).read()]
    assert len(library) > 300
    assert sum(map(len, library)) > 5_000_000
    files = sources._find_stdlib_files()[:100]  # parsing them all takes seconds
    monkeypatch.setattr(sources, "_find_stdlib_files", lambda: files)
    source = open_source(Data(source="docstrings"))
    pairs = list(source.read())
    assert len(pairs) == len(set(pairs)) > 300
    assert all(
        d.text.startswith("# ") and "def " in d.sequences[0][0].text and d.trained_text.startswith("    ")
        for d in pairs
    )
    assert source.key() == open_source(Data(source="docstrings")).key() != open_source(Data()).key()


def test_counting_baselines_are_between_nothing_and_the_truth(tmp_path, tokenizer):
    made = run(
        tmp_path, write(tmp_path / "a.jsonl", [{"text": "ab ba ab ba " * 9 + t} for t in LINES]), tokenizer=tokenizer
    )
    losses = compute_baselines(made, range(len(made.validation)))
    assert 0 < losses["bigram"] < losses["unigram"] < 5.71  # ln 300: every piece alike


def test_streamed_rows_are_resumed_exactly_and_leave_validation_out(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"text": t} for t in LINES])
    made = run(tmp_path, source, tokenizer=tokenizer, streaming=True)

    def take(committed, workers, count):
        steps = batches(made.train, seed=0, committed=committed, shape=lambda _: Shape(6, 16, 4), workers=workers)
        found = [[(b.rows, b.tokens.tolist(), b.labels.tolist()) for b in next(steps)] for _ in range(count)]
        steps.close()
        return found

    whole = take(0, 0, 40)
    assert take(60, 0, 30) == whole[10:]
    assert take(60, 4, 30) == whole[10:]
    short = batches(made.train, seed=0, committed=6, step=1, shape=lambda step: Shape(20, 5, 3), workers=1)
    for step in whole[1:4]:
        pieces = [token for b in next(short) for token in b.tokens.flatten().tolist()]
        assert pieces[:96] == [token for _, tokens, _ in step for row in tokens for token in row]
    short.close()
    plain = run(tmp_path, source, tokenizer=tokenizer)
    assert isinstance(plain.train, Rows)
    first = sorted(row for step in whole for _, tokens, _ in step for row in tokens)
    known = {tuple(plain.train.row(n).tokens.tolist()) for n in range(len(plain.train))}
    assert {tuple(row) for row in first} == known
    assert (made.validation.tokens.ids == plain.validation.tokens.ids).all()
    with pytest.raises(RecipeError, match=r"stop\.epochs: a streamed source has no known length"):
        parse(f"data: {{source: {source}, streaming: true}}\nstop: {{epochs: 1}}")


def test_streamed_mixtures_keep_their_shares_and_are_resumed_exactly(tmp_path, tokenizer):
    sources = [
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {t}"} for t in LINES[:n]])
        for name, n in (("p", 120), ("q", 20))
    ]
    listed = tuple({"source": source, "weight": weight} for source, weight in zip(sources, (1, 0.5), strict=True))

    def mixture(**settings):
        data = Data(**{"source": listed, "validation": 0.2, "streaming": True, **settings})
        return prepare(data, length=16, seed=3, tokenizer=tokenizer, cache=tmp_path / "cache")

    def take(made, committed, count, workers=0, rank=(0, 1)):
        steps = batches(
            made.train, seed=3, committed=committed, shape=lambda _: Shape(6, 16, 3), workers=workers, share=rank
        )
        found = [[row for b in next(steps) for row in b.tokens.tolist()] for _ in range(count)]
        steps.close()
        return found

    made = mixture()
    # Rows of each source alone: the small one, at its end, begins again while the large one is still read.
    alone = [replace(made.train, sources=(source,)).read() for source in made.train.sources]
    expected = [next(alone[n % 3 == 1])[1].tokens.tolist() for n in range(60 * 6)]
    whole = take(made, 0, 60)
    assert [row for step in whole for row in step] == expected
    of_small = expected[1::3]
    assert len({tuple(row) for row in of_small}) < len(of_small) / 2, "it was read more than twice"
    assert take(made, 7 * 6, 20) == take(made, 7 * 6, 20, workers=1) == whole[7:27]
    by_rank = [take(made, 0, 9, rank=(n, 2)) for n in range(2)]
    assert [a + b for a, b in zip(*by_rank, strict=True)] == whole[:9]
    # Validation rows come from all sources, each document once whatever its weight, and are not trained on.
    stored = mixture(streaming=False)
    assert texts(made, made.validation) == texts(stored, stored.validation)
    assert not {*texts(made, made.validation)} & {made.tokenizer.decode(row) for row in expected}
    # Texts begin with the name of their source.
    assert made.sources == stored.sources == ("p.jsonl", "q.jsonl")
    for rows in (made.validation, stored.validation, stored.train):
        owners = [
            made.sources[n] for n in np.searchsorted(rows.tokens.source_ends, range(len(rows.tokens.offsets)), "right")
        ]
        assert [text.split()[0] for text in texts(made, rows)] == [owner.removesuffix(".jsonl") for owner in owners]
        assert {*owners} == {*made.sources}
    own = mixture(streaming=False, validation=sources[1], source=(sources[0], sources[0]))
    assert own.validation.tokens.source_ends == ()
    assert own.sources == ("p.jsonl-1", "p.jsonl-2")
    steps = batches(made.train, seed=3, committed=0, shape=lambda _: Shape(6, 16, 3))
    assert [int(row[0]) for b in next(steps) for row in b.sources] == [0, 1, 0, 0, 1, 0]
    assert next(batches(stored.train, seed=3, committed=0, shape=lambda _: Shape(6, 16, 3)))[0].sources.shape == (3, 16)
    assert made.counts["beginning"]["read"] == 140
    assert sources[1] in made.source
    assert made.fingerprint != mixture(source=listed[::-1]).fingerprint


def test_interleaved_sources_are_never_a_sample_away_from_their_shares():
    weights = [0.7, 0.2, 0.05, 0.05]
    counts = np.zeros(4)
    for number, source in enumerate(itertools.islice(interleave(weights), 5000), 1):
        counts[source] += 1
        assert (abs(counts - number * np.array(weights)) < 1 + 1e-9).all()


def test_bad_streamed_mixtures_are_one_clear_line(tmp_path, tokenizer):
    plain, other = write(tmp_path / "a.jsonl", [{"text": t} for t in LINES]), tmp_path / "b.jsonl"
    for rows, error in (
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], r"data\.source\.1: .*b\.jsonl.* these cannot be mixed"),
        ([{"text": "a"}, {"txt": "b"}], r"b\.jsonl:2: no field 'text'"),
    ):
        write(other, rows)
        with pytest.raises(DataError, match=error):
            prepare(Data(source=(plain, str(other)), streaming=True), length=16, seed=0, tokenizer=tokenizer)
    write(other, [{"text": "a"}])
    made = prepare(Data(source=(plain, str(other)), streaming=True), length=16, seed=0, tokenizer=tokenizer)
    with pytest.raises(
        DataError, match=r"data\.source .*b\.jsonl: the training documents do not fill one sequence of 16"
    ):
        next(batches(made.train, seed=0, committed=0, shape=lambda _: Shape(6, 16, 3)))
    with pytest.raises(RecipeError, match=r"data\.source\.1\.weight: must be a number above 0 .* got 0"):
        parse(f"data: {{source: [{plain}, {{source: {other}, weight: 0}}], streaming: true}}\nstop: {{max_steps: 1}}")


# --- cache ----------------------------------------------------------------------------------------------------------


def test_the_cache_is_hit_and_a_damaged_entry_is_built_again(tmp_path, monkeypatch):
    source = write(tmp_path / "a.jsonl", [{"text": t} for t in LINES])
    before = run(tmp_path, source)
    calls = []
    encode = Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda self, documents: calls.append(1) or encode(self, documents))
    assert run(tmp_path, source, length=8).fingerprint != before.fingerprint
    assert run(tmp_path, source).fingerprint == before.fingerprint
    assert not calls
    for damage in (
        lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\7"),
        lambda f: f.unlink(),
        lambda f: (f.parent / "entry.json").write_text("{"),
    ):
        damage(next((tmp_path / "cache").glob("tokens-*/train.uint16")))
        assert run(tmp_path, source).fingerprint == before.fingerprint
        assert calls
        calls.clear()
    assert len(list((tmp_path / "cache").iterdir())) == 2
    write(tmp_path / "a.jsonl", [{"text": t} for t in LINES[1:]])
    assert run(tmp_path, source).fingerprint != before.fingerprint


# --- bad data -------------------------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'

BAD = {
    "missing": (
        None,
        {"source": "{dir}/corpis.jsonl"},
        r"data\.source .*corpis\.jsonl: does not exist; .* did you mean 'corpus\.jsonl'\?",
    ),
    "empty": (b"", {}, r"corpus\.jsonl: the file is empty"),
    "blank": (b'{"text": " "}\n', {}, r"no document left of 1 read \(1 empty\)"),
    "binary": (GOOD + b'{"text": "\xff"}\n', {}, r"corpus\.jsonl:2: byte 27 \(0xff\) is not text in UTF-8"),
    "nul": (b"\x7fELF\0\0", {}, r"corpus\.jsonl:1: byte 4 is 0: a binary file"),
    "broken line": (GOOD * 2 + b'{"text": "cut\n', {}, r"corpus\.jsonl:3: not JSON: .* at column 10"),
    "not an object": (GOOD + b"[1]\n", {}, r"corpus\.jsonl:2: is a list, not an object"),
    "no field": (
        GOOD + b'{"txt": "a", "id": 1}\n',
        {},
        r"corpus\.jsonl:2: no field 'text', only 'txt', 'id'; set data\.text: did you mean 'txt'\?",
    ),
    "no layout": (
        b'{"question": "a", "reply": "b"}\n' * 9,
        {},
        r"corpus\.jsonl:1: no field 'text', only 'question', 'reply', which no layout has; set data\.columns="
        r"\{prompt: question, completion: reply\} if .*data\.text: question for plain text",
    ),
    "a layout misspelt": (b'{"mesages": [], "id": 1}\n' * 9, {}, r"set data\.columns=\{messages: mesages\} \(check"),
    "no prompt": (
        GOOD,
        {"prompt": "q", "completion": "text"},
        r"corpus\.jsonl:1: no field 'q', only 'text'; set data\.prompt",
    ),
    "a number": (GOOD + b'{"text": 7}\n', {}, r"corpus\.jsonl:2: field 'text' is a number, not text"),
    "null": (b'{"text": null}\n', {}, r"corpus\.jsonl:1: field 'text' is null"),
    "half a pair": (b'{"text": "\\ud800"}\n', {}, r"corpus\.jsonl:1: .*surrogate"),
    "too little": (
        GOOD,
        {"validation": 0},
        r"training data: \d+ tokens in 1 documents do not fill one sequence of 16; .*batch\.seq_len",
    ),
    "no validation": (GOOD, {"validation": 0.0001}, r"data\.validation 0\.0001: none of 1 documents"),
    "no training": (GOOD, {"validation": 0.9999}, r"data\.validation 0\.9999: leaves none of 1 documents"),
    "all held out": (
        GOOD,
        {"validation": "{dir}/corpus.jsonl"},
        r"corpus\.jsonl:1: is in the validation data too \(check validation; 1 of 2\)",
    ),
    "no tokenizer": (GOOD, {"tokenizer": "{dir}/tokeniser"}, r"data\.tokenizer .*tokeniser: does not exist"),
    "a file": (GOOD, {"tokenizer": "{dir}/corpus.jsonl"}, r"is a file; name the folder that holds tokenizer\.json"),
    "not a tokenizer": (GOOD, {"tokenizer": "{dir}"}, r"not a tokenizer folder: it has no tokenizer\.json"),
    "streaming": (GOOD, {"streaming": True, "tokenizer": None}, r"data\.streaming: .* set data\.tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_clear_line_and_leaves_nothing_behind(tmp_path, tokenizer, case):
    content, settings, message = BAD[case]
    (tmp_path / "corpus.jsonl").write_bytes(GOOD if content is None else content)
    settings = {k: v.format(dir=tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    data = replace(Data(source=str(tmp_path / "corpus.jsonl"), validation=0.2, tokenizer=tokenizer), **settings)
    with pytest.raises(DataError, match=message) as caught:
        prepare(data, length=16, seed=0, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob(".partial*"))
    for folder in (tmp_path / "cache").glob("*"):  # what was read may stay, if it is whole
        assert read_entry(folder) is not None


def test_other_files_that_cannot_be_read_are_named(tmp_path):
    for name, content, message in (
        ("a.json", b'[{"text": "a"},\n {"text"}]', r"a\.json:2: not JSON"),
        ("a.json", b'{"text": "a"}', r"a\.json: holds an object; a \.json file must hold a list"),
        ("a.json", b'[{"text": "a"}, {"no": 1}]', r"a\.json: row 2: no field 'text'"),
        ("a.parquet", b"PAR1 not really", r"a\.parquet: not a readable Parquet file"),
        ("a.txt", b"one\ntwo \xe9\n", r"a\.txt:2: byte 8 \(0xe9\)"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            run(tmp_path, tmp_path / name)
    (tmp_path / "a.tsv").write_text("text\n")
    with pytest.raises(DataError, match=r"a\.tsv: preheat reads \.txt"):
        open_source(Data(source=str(tmp_path / "a.tsv")))


def test_a_dataset_name_without_network_is_one_line(monkeypatch):
    monkeypatch.setattr("preheat.data.sources.is_hub_reachable", lambda: False)
    with pytest.raises(
        DataError, match=r"data\.source stdlb: no such file or folder here; did you mean 'stdlib'\?, and no network"
    ):
        open_source(Data(source="stdlb"))


def test_a_prompt_that_fills_the_row_is_counted_or_refused(tmp_path, tokenizer):
    long, short = {"q": "word " * 90, "a": "x"}, {"q": "w", "a": "x"}
    made = run(
        tmp_path,
        write(tmp_path / "a.jsonl", [long, short]),
        prompt="q",
        completion="a",
        validation=0,
        tokenizer=tokenizer,
        preflight={"truncated": "warn"},
    )
    assert made.counts["train"]["no_room"] == 1
    with pytest.raises(
        DataError, match=r"the prompt alone fills a sequence of 16 tokens in each of 1 examples; raise batch\.seq_len"
    ):
        run(
            tmp_path,
            write(tmp_path / "a.jsonl", [long]),
            prompt="q",
            completion="a",
            validation=0,
            tokenizer=tokenizer,
            preflight={"truncated": "warn"},
        )


def test_a_document_longer_than_a_row_is_split_and_counted_or_refused(tmp_path, tokenizer):
    rows = [{"text": line} for line in LINES]
    rows[40]["text"] = "a long one: " + "quick brown fox " * 60
    source = write(tmp_path / "t.jsonl", rows)
    split = run(tmp_path, source, length=100, tokenizer=tokenizer)
    sizes = [
        int(n) for side in ("train", "validation") for n in np.diff(getattr(split, side).tokens.offsets, prepend=0)
    ]
    longer = sum(n > 100 for n in sizes)
    assert 1 == longer == sum(split.counts[side]["longer"] for side in ("train", "validation"))
    assert split.train.tokens_total == len(split.train) * 100
    with pytest.raises(
        DataError,
        match=rf"t\.jsonl:41: has {max(sizes)} tokens and batch\.seq_len is 100 \(1 of \d+ documents are longer; data\.overlong: refuse\)",
    ):
        run(tmp_path, source, length=100, tokenizer=tokenizer, overlong="refuse")
    run(tmp_path, source, length=max(sizes), tokenizer=tokenizer, overlong="refuse")
    with pytest.raises(RecipeError, match=r"data\.overlong: refuse needs all documents read beforehand"):
        parse(f"data: {{source: {source}, overlong: refuse, streaming: true}}\nstop: {{max_steps: 1}}")
