"""Cleaning: each rule against a value worked out by hand, duplicates against all pairs compared one by one."""

import itertools
import json
import pickle
import random
from collections import Counter

import numpy as np
import pytest

from preheat.core.schema import Clean
from preheat.data import prepare
from preheat.data.cleaning.corpus import RowCleaner
from preheat.data.cleaning.duplicates import Duplicates, make_shingles
from preheat.data.cleaning.overlap import OverlapIndex
from preheat.data.cleaning.personal import find_personal_data, is_luhn_valid, mask_personal_data
from preheat.data.cleaning.quality import FILTERS, TextMeasures, choose_thresholds, find_failed_rule
from preheat.data.document import Document
from preheat.data.streaming import StreamRows
from preheat.data.tokenizer import train_tokenizer
from preheat.errors import DataError, RecipeError
from preheat.recipe import Data, parse

WORDS = [
    f"{a}{b}" for a in ("ka", "lo", "mi", "ru", "se", "ti", "vo") for b in ("ban", "del", "fir", "gon", "hus", "pet")
]


def sentence(number, length=60):
    draw = random.Random(number)
    return " ".join(draw.choice(WORDS) for _ in range(length)) + "."


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([(f"{n:032x}", sentence(n)) for n in range(20)], vocabulary=300).save_pretrained(folder)
    return str(folder)


def run(tmp_path, rows, tokenizer, clean, length=32, **settings):
    source = rows if isinstance(rows, str) else write(tmp_path / "rows.jsonl", rows)
    data = Data(source=source, clean=clean, **{"validation": 0.0, **settings})
    return prepare(data, length=length, seed=0, tokenizer=tokenizer, cache=tmp_path / "cache")


def texts(prepared, side="train"):
    rows = getattr(prepared, side)
    decoded = prepared.tokenizer.decode(rows.tokens.ids.astype(int))
    return [text for text in decoded.split(prepared.tokenizer.eos_token) if text]


# --- quality ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "text", "expected"),
    [
        ("words", "one two  three\nfour", 4),
        ("mean_word_length", "ab abcd", 3),
        ("symbols", "# a # b", 2 / 4),
        ("symbols", "so ... well… yes", 2 / 4),
        ("bullet_lines", "- a\n• b\n\nc\nd", 2 / 4),
        ("ellipsis_lines", "a...\nb…\nc", 2 / 3),
        ("alphabetic_words", "a1 22 b -- c", 3 / 5),
        ("stop_words", "The the of cats", 2),
        ("repeated_lines", "a\nb\na\na", 2 / 4),
        ("repeated_line_chars", "aaaa\nb\naaaa", 4 / 9),
        ("repeated_paragraphs", "a\nb\n\na\nb\n\nc", 1 / 3),
        ("repeated_paragraph_chars", "aa\n\naa\n\nc", 2 / 5),
        ("top_2gram", "a b c a b d", 4 / 6),
        ("top_2gram", "a b c d", 0),
        ("top_2gram", "aa bb aa bb c d c d", 8 / 12),  # the longer of two equally frequent ones
        ("top_3gram", "x a b c a b c y", 6 / 8),
        ("repeated_5gram", "a b c d e a b c d e", 5 / 10),
        ("repeated_5gram", "a a a a a a a", 6 / 7),  # overlapping repetitions count once
        ("repeated_10gram", "a b c d e a b c d e", 0),
        ("sentences", 'He said "no!" Then 3.5 left... Why?', 3),
    ],
)
def test_measures_are_those_worked_out_by_hand(measure, text, expected):
    assert TextMeasures(text).measure(measure) == pytest.approx(expected)


def test_every_rule_has_a_key_and_a_threshold_of_its_own():
    rules = {rule for part in FILTERS.values() for rule in part}
    keys = {name for name in Clean.__dataclass_fields__ if name.startswith(("min_", "max_", "banned"))}
    assert rules == keys
    for rule in rules - {"banned_texts"}:
        low = rule.startswith("min_")
        text = "a " * 9 if low else "# a a a a a a a a a a a\n" * 8 + "...\n- ...\n- ...\n\n# a\n\n# a"
        assert find_failed_rule(text, {rule: 1e9 if low else 0.0}).rule == rule
        assert find_failed_rule(text, {rule: 0.0 if low else 1e9}) is None


def test_keys_override_the_published_thresholds():
    assert choose_thresholds(Clean()) == {}
    assert choose_thresholds(Clean(filters=("gopher",))) == FILTERS["gopher"]
    chosen = choose_thresholds(Clean(filters=("gopher", "c4"), min_words=0, max_top_2gram=0.5))
    assert chosen == FILTERS["gopher"] | FILTERS["c4"] | {"min_words": 0, "max_top_2gram": 0.5}
    assert find_failed_rule("Say Lorem IPSUM now", choose_thresholds(Clean(filters=("c4",)))).rule == "min_sentences"
    assert find_failed_rule("Say Lorem IPSUM now", {"banned_texts": ("lorem ipsum",)}).rule == "banned_texts"


def test_rows_are_left_out_by_rule_with_counts(tmp_path, tokenizer):
    rows = [*(sentence(n) for n in range(8)), "too short", "also short", sentence(9) + " {", ""]
    made = run(tmp_path, [{"text": text} for text in rows], tokenizer, {"min_words": 5, "banned_texts": ["{"]})
    assert texts(made) == [sentence(n) for n in range(8)]
    assert made.counts["dropped"] == {"min_words": 2, "banned_texts": 1, "empty": 1}
    removed = made.counts["cleaning"]["removed"]
    assert [(entry["reason"], entry["threshold"], entry["rows"]) for entry in removed] == [
        ("min_words", "5", 2),
        ("banned_texts", "{", 1),
    ]
    assert removed[0]["examples"][0][1] == "words: 2 is below 5"
    assert removed[0]["examples"][0][0].endswith("rows.jsonl:9")


def test_answers_of_a_pair_are_judged_each_for_itself(tmp_path, tokenizer):
    rows = [{"prompt": "?", "chosen": sentence(n, 20), "rejected": sentence(n, 19)} for n in range(4)]
    rows += [{"prompt": "?", "chosen": sentence(9, 20), "rejected": sentence(8, 5) * 4}]
    made = run(tmp_path, rows, tokenizer, {"filters": ["gopher_repetition"]}, length=128)
    assert (made.counts["train"]["documents"], list(made.counts["dropped"].values())) == (4, [1])


def test_equal_answers_with_different_labels_are_no_duplicates(tmp_path, tokenizer):
    rows = [
        {"prompt": "?", "completion": sentence(n, 20), "label": label}
        for n in range(4)
        for label in (True, False, True)
    ]
    for duplicates in ("exact", "near"):
        made = run(tmp_path, rows, tokenizer, {"duplicates": duplicates}, length=128)
        assert (made.counts["train"]["documents"], made.counts["dropped"]) == (8, {"duplicate": 4})
    streamed = run(tmp_path, rows, tokenizer, {"duplicates": "exact"}, length=128, streaming=True)
    assert streamed.counts["beginning"]["dropped"] == {"duplicate": 4}


def test_quality_is_that_of_the_answer(tmp_path, tokenizer):
    rows = [{"prompt": "?", "completion": sentence(n, 6)} for n in range(4)] + [
        {"prompt": sentence(9, 6), "completion": "no"}
    ]
    made = run(tmp_path, rows, tokenizer, {"min_words": 5})
    assert made.counts["dropped"]["min_words"] == 1


# --- duplicates -------------------------------------------------------------------------------------------------------


def jaccard(one, other):
    a, b = make_shingles(one), make_shingles(other)
    return len(a & b) / len(a | b)


def test_equal_rows_stay_once_and_validation_comes_first(tmp_path, tokenizer):
    rows = [sentence(n, 12) for n in range(150)]
    doubled = [*rows, *(row.replace(" ", "\n ") for row in rows[:50])]
    made = run(tmp_path, [{"text": row} for row in doubled], tokenizer, {"duplicates": "exact"}, validation=0.2)
    assert sorted([*texts(made), *texts(made, "validation")]) == sorted(rows)
    assert made.counts["dropped"] == {"duplicate": 50}
    assert made.counts["train"]["duplicates"] == made.counts["validation"]["duplicates"] == 0
    # A file to validate on stays as it is, and its rows are left out of training, which is no fault then.
    held = write(tmp_path / "held.jsonl", [{"text": row} for row in [*rows[:3], rows[0]]])
    made = run(tmp_path, [{"text": row} for row in rows], tokenizer, {"duplicates": "exact"}, validation=held)
    assert texts(made) == rows[3:]
    assert len(texts(made, "validation")) == 4
    assert not made.blocked


def test_near_duplicates_are_those_of_all_pairs(tmp_path, tokenizer):
    pytest.importorskip("datasketch")
    draw = random.Random(1)
    rows = [sentence(n, 100) for n in range(40)]
    for n in range(40):
        words = rows[n].split()
        # One word changes five shingles; ten scattered ones change about half.
        for place in draw.sample(range(100), 1 if n % 2 else 10):
            words[place] = "changed"
        rows.append(" ".join(words))
    # All pairs, exactly: those near the threshold could go either way.
    pairs = [(a, b) for a, b in itertools.combinations(range(80), 2) if jaccard(rows[a], rows[b]) > 0.05]
    assert all(not 0.6 < jaccard(rows[a], rows[b]) < 0.85 for a, b in pairs)
    expected = {b for a, b in pairs if jaccard(rows[a], rows[b]) >= 0.85}
    assert len(expected) == 20
    made = run(tmp_path, [{"text": row} for row in rows], tokenizer, {"duplicates": "near", "similarity": 0.75})
    assert texts(made) == [row for n, row in enumerate(rows) if n not in expected]
    assert made.counts["dropped"] == {"near duplicate": 20}
    again = run(tmp_path, [{"text": row} for row in rows], tokenizer, {"duplicates": "near", "similarity": 0.75})
    assert again.fingerprint == made.fingerprint
    assert again.counts == made.counts
    # A similar pair on both sides of the split: the row of training is left out.
    split = run(
        tmp_path, [{"text": row} for row in rows], tokenizer, {"duplicates": "near", "similarity": 0.75}, validation=0.3
    )
    sides = texts(split), texts(split, "validation")
    assert max(jaccard(a, b) for a in sides[0] for b in sides[1]) < 0.85
    plain = run(tmp_path, [{"text": row} for row in rows], tokenizer, {}, validation=0.3)
    crossing = [(a, b) for a in texts(plain) for b in texts(plain, "validation") if jaccard(a, b) >= 0.85]
    assert crossing
    assert all(a not in sides[0] and b in sides[1] for a, b in crossing)


def test_rows_of_other_prompts_or_images_are_no_near_duplicates():
    pytest.importorskip("datasketch")
    duplicates, signed = Duplicates(0.8), Document.of(sentence(1))
    assert duplicates.sign(signed._replace(images=("a.png",))) is None
    signature = duplicates.sign(signed)
    assert duplicates.add("a", 1, signature, "row 1") is None
    assert duplicates.add("b", 2, signature, "row 2") is None
    assert str(duplicates.add("c", 1, signature, "row 3")) == "is similar to row 1 (estimated similarity 1.00)"
    assert str(duplicates.add("a", 1, signature, "row 4")) == "equals row 1"


def test_the_estimated_similarity_is_that_of_the_sets():
    pytest.importorskip("datasketch")
    duplicates = Duplicates(0.8)
    for shared in (20, 60, 95):
        words = [f"w{n}" for n in range(400)]
        one, other = words[:200], [*words[: 2 * shared], *words[200 : 400 - 2 * shared]]
        signatures = [duplicates.sign(Document.of(" ".join(text))) for text in (one, other)]
        estimate = float(np.mean(signatures[0] == signatures[1]))
        exact = jaccard(" ".join(one), " ".join(other))
        assert abs(estimate - exact) < 4 * (exact * (1 - exact) / 128) ** 0.5 + 0.01


# --- evaluation data --------------------------------------------------------------------------------------------------


def test_overlaps_are_those_of_all_sequences():
    draw = random.Random(3)
    evaluation = [sentence(1000 + n, draw.choice((5, 9, 20))) for n in range(20)]
    rows = [sentence(n, 30) for n in range(60)]
    for n in range(0, 60, 3):
        part = evaluation[n % 20].upper().split()
        rows[n] += " " + ", ".join(part[: 8 if n % 2 else 13])
    index = OverlapIndex(13)
    for number, text in enumerate(evaluation):
        index.add(str(number), text)

    def sequences(text, size):
        words = text.lower().replace(",", " ").replace(".", " ").split()
        return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}

    sizes = {text: min(13, len(text.split())) for text in evaluation}
    expected = [
        any(sequences(text, size) & sequences(row, size) for text, size in sizes.items() if size >= 8) for row in rows
    ]
    assert [index.find(row) is not None for row in rows] == expected
    assert 0 < sum(expected) < 20
    assert (index.texts, index.short) == (20, sum(size < 8 for size in sizes.values()))


def test_rows_with_evaluation_data_are_left_out(tmp_path, tokenizer):
    question = sentence(77, 20)
    rows = [{"text": sentence(n)} for n in range(6)] + [{"text": f"{sentence(8)} {question.upper()}"}]
    held = write(tmp_path / "q.jsonl", [{"question": question, "choices": [sentence(88, 15), "b"]}])
    (tmp_path / "task.yaml").write_text("kind: cloze\ndata: q.jsonl\nprompt: a\ngold: b\n")
    names = [held, f"cloze={held},limit=3", str(tmp_path / "task.yaml")]
    for name in names:
        made = run(tmp_path, rows, tokenizer, {"against": [name]})
        assert made.counts["dropped"] == {"in evaluation data": 1}
    assert "q.jsonl:1" in made.counts["cleaning"]["removed"][0]["examples"][0][1]
    assert made.counts["cleaning"]["short_texts"] == 1
    # Other words in the same file are another cache entry.
    write(tmp_path / "q.jsonl", [{"question": sentence(78, 20)}])
    assert run(tmp_path, rows, tokenizer, {"against": [held]}).counts["dropped"] == {}
    with pytest.raises(RecipeError, match=r"data\.clean\.against 'cloze=': names no file; write cloze=FILE"):
        run(tmp_path, rows, tokenizer, {"against": ["cloze="]})
    write(tmp_path / "q.jsonl", [{"question": "no room"}])
    with pytest.raises(DataError, match="none of its 1 texts has 8 words or more"):
        run(tmp_path, rows, tokenizer, {"against": [held]})


# --- personal data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Mail a.b+c@mail.example.org.", {"email": "a.b+c@mail.example.org"}),
        ("at 8.8.8.8, or 2001:4860:4860::8888", {"ip": "8.8.8.8 2001:4860:4860::8888"}),
        ("192.168.0.1, 127.0.0.1, 300.1.1.1 and std::string a::b", {}),
        ("version 1.2.3.4.5 of 10:20:30", {}),
        ("Card 4111 1111 1111 1111!", {"card": "4111 1111 1111 1111"}),
        ("4111 1111 1111 1111 12/25, 7 5500-0000-0000-0004 and 3782 822463 10005", {"card": "4111 1111 1111 1111 5500-0000-0000-0004 3782 822463 10005"}),
        ("请联系john@example.org或拨打+49 30 1234567，卡号4111111111111111。", {"email": "john@example.org", "phone": "+49 30 1234567", "card": "4111111111111111"}),
        ("Card 4111 1111 1111 1112, id 0000 0000 0000 0000", {}),
        ("to DE89 3704 0044 0532 0130 00 AND GB82WEST12345698765432", {"iban": "DE89 3704 0044 0532 0130 00 GB82WEST12345698765432"}),
        ("BE68 5390 0754 7034 TEXT", {"iban": "BE68 5390 0754 7034"}),
        ("DE89 3704 0044 0532 0130 02", {}),
        ("call +49 30 1234567 or (212) 555-0187.", {"phone": "+49 30 1234567 (212) 555-0187"}),
        ("in 1999-2004, 3.14159265, 2024-01-15, 12345678", {}),
    ],
)  # fmt: skip
def test_personal_data_is_found_by_pattern_and_checksum(text, expected):
    found: dict[str, str] = {}
    for kind, start, end in find_personal_data(text):
        found[kind] = f"{found[kind]} {text[start:end]}" if kind in found else text[start:end]
    assert found == expected


def test_luhn_accepts_one_digit_of_ten():
    numbers = ["".join(random.Random(n).choices("0123456789", k=15)) for n in range(20)]
    assert all(sum(is_luhn_valid(number + digit) for digit in "0123456789") == 1 for number in numbers)


def test_search_is_linear_in_hostile_texts():
    for text in (
        "a@example.org " * 50_000,
        "." * 200_000 + "a",
        "a" * 200_000,
        "a." * 100_000,
        "1 " * 100_000,
        "DE12 " * 40_000,
        "1.1." * 50_000,
        "2001:" * 40_000,
    ):
        assert len(mask_personal_data(text, find_personal_data(text))) <= len(text)
        TextMeasures(text).measure("sentences")


def test_personal_data_is_counted_masked_or_left_out(tmp_path, tokenizer):
    rows = [
        {"text": f"{sentence(n)} to u{n}@example.org and v@example.org" if n % 2 else sentence(n)} for n in range(8)
    ]
    plain = run(tmp_path, rows, tokenizer, {"personal_data": "count"})
    assert texts(plain) == [row["text"] for row in rows]
    assert {kind: (e["rows"], e["count"]) for kind, e in plain.counts["cleaning"]["personal"].items()} == {
        "email": (4, 8)
    }
    masked = run(tmp_path, rows, tokenizer, {"personal_data": "mask"})
    assert "@" not in "".join(texts(masked))
    assert "".join(texts(masked)).count("to <EMAIL> and <EMAIL>") == 4
    dropped = run(tmp_path, rows, tokenizer, {"personal_data": "drop"})
    assert dropped.counts["dropped"] == {"personal data": 4}
    # Messages do not repeat the values: the run's folder keeps them.
    assert "@" not in json.dumps(dropped.counts)
    other = run(tmp_path, rows, tokenizer, {"personal_data": "drop", "personal_kinds": ["card"]})
    assert other.counts["dropped"] == {}


# --- streams and settings ---------------------------------------------------------------------------------------------


def test_a_stream_is_cleaned_as_stored_data_is(tmp_path, tokenizer):
    rows = [
        {"text": text}
        for n in range(30)
        for text in (sentence(n), sentence(n), "short", f"{sentence(n)} a@example.org")
    ]
    clean = {"duplicates": "exact", "min_words": 5, "personal_data": "drop"}
    stored = run(tmp_path, rows, tokenizer, clean)
    streamed = run(tmp_path, rows, tokenizer, clean, streaming=True)
    assert isinstance(streamed.train, StreamRows)
    train = pickle.loads(pickle.dumps(streamed.train))  # as a worker process receives it

    def sequences(read):
        return Counter(row.tokens.tobytes() for row in read)

    one_epoch = itertools.islice((row for _, row in train.read()), len(stored.train))
    assert sequences(one_epoch) == sequences(stored.train.row(n) for n in range(len(stored.train)))
    assert streamed.counts["beginning"]["dropped"] == stored.counts["dropped"]
    held = write(tmp_path / "held.jsonl", [{"text": sentence(n)} for n in range(5)])
    without = run(tmp_path, rows, tokenizer, clean, streaming=True, validation=held)
    assert without.counts["beginning"]["dropped"]["duplicate"] == 30 + 5
    other = run(tmp_path, rows, tokenizer, {**clean, "min_words": 4}, streaming=True)
    assert other.fingerprint != streamed.fingerprint


def test_without_settings_nothing_changes(tmp_path, tokenizer):
    rows = [{"text": sentence(n % 9)} for n in range(20)]
    made = run(tmp_path, rows, tokenizer, {})
    assert "cleaning" not in made.counts
    assert not list((tmp_path / "cache").glob("clean-*"))
    assert RowCleaner.of(Clean()).inspect(Document.of("a"), []) is None


@pytest.mark.parametrize(
    ("clean", "message"),
    [
        ("{min_wrds: 3}", "unknown key 'data.clean.min_wrds'; did you mean 'min_words'?"),
        ("{similarity: 2, duplicates: near}", "data.clean.similarity: must be at most 1, got 2"),
        ("{similarity: 0.5}", "data.clean.similarity: 0.5 is for duplicates: near; set it, or leave it out"),
        ("{filters: [gophr]}", "data.clean.filters: must be 'gopher', 'gopher_repetition' or 'c4', got ['gophr']"),
        ("{min_words: 9, max_words: 3}", "data.clean.min_words: 9 is above max_words 3, so that no row is left; lower it"),
        ("{overlap_words: 9}", "data.clean.overlap_words: 9 needs against: [FILE]; add it, or leave it out"),
        ("{max_symbols: -1}", "data.clean.max_symbols: must be at least 0, got -1"),
        ("{banned_texts: ['']}", "data.clean.banned_texts: has an empty text, which is in every row; remove it"),
        ("{personal_kinds: [card]}", "data.clean.personal_kinds: needs personal_data: count, drop or mask; add it, or leave it out"),
        ("[a]", "data.clean: must be a mapping, got ['a']"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line_each(clean, message):
    recipe = f"model: {{size: 15M}}\nstop: {{max_steps: 1}}\ndata:\n  clean: {clean}\n"
    with pytest.raises(RecipeError) as error:
        parse(recipe, where="r.yaml")
    assert str(error.value).startswith("r.yaml:4: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_near_duplicates_of_a_stream_are_refused():
    recipe = "model: {size: 15M}\nstop: {max_steps: 1}\ndata: {streaming: true, clean: {duplicates: near}}\n"
    with pytest.raises(RecipeError, match=r"data\.clean\.duplicates: near compares rows read beforehand; use exact"):
        parse(recipe)


def test_near_duplicates_need_their_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasketch", None)
    with pytest.raises(RecipeError, match=r"pip install 'preheat\[clean\]', or use exact"):
        Duplicates(0.8)
