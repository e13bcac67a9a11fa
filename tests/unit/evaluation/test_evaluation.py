"""Metrics against values worked out by hand, intervals against closed forms, likelihoods against a slow loop by plain transformers."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preheat.core.run_records import Estimate, EvaluationMetrics, StoredResult
from preheat.data import Rows, evaluation_batches, prepare
from preheat.data.tokenizer import load_tokenizer, train_tokenizer
from preheat.engine.builder import build
from preheat.engine.evaluate import evaluate
from preheat.errors import DataError, PreheatError, RecipeError
from preheat.evaluation import bootstrap, metrics
from preheat.evaluation.best import Criterion, Evaluated, Verdict, criterion_of, judge
from preheat.evaluation.perplexity import count_token_bytes, measure_text
from preheat.evaluation.prompts import read_items, read_rows
from preheat.evaluation.results import compare_results, describe_result, deserialize, serialize
from preheat.evaluation.run_task import measure_task
from preheat.evaluation.scoring import CLASSES, Scorer
from preheat.evaluation.tasks import Task, find_built_in, find_tasks, load_task
from preheat.evaluation.variants import compare_variants, find_variants, replace_prompts
from preheat.files import read_record, to_plain_data
from preheat.models.hf import compute_reference_logits
from preheat.recipe import Data, parse

from ...conftest import DEVICE

TEXT = "the cat sat on the mat and the dog ran to the red house by the river while seven wizards wrote quiet spells. "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([("0a", TEXT * 20), ("0b", "Question: what is it?\nAnswer: a cat\n" * 9)], vocabulary=300)


def opened(techniques: str = "{}") -> Any:
    recipe = parse(
        "model: {num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2, vocab_size: 320, max_positions: 64}\nbatch: {size: 4, seq_len: 32}\n"
        f"stop: {{max_steps: 1}}\ntechniques: {techniques}"
    )
    made = build(recipe, vocabulary=300, device=DEVICE)
    with torch.no_grad():  # a new model's choices are all but equal
        for p in made.trained[0].parameters():
            p.mul_(3.0)
    return made


# --- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "answer", "golds", "expected"),
    [
        (metrics.score_exact_match, "The  Eiffel Tower!", ["eiffel tower", "x"], 1),
        (metrics.score_exact_match, "an eiffel", ["eiffel tower"], 0),
        (metrics.score_exact_match, "", [""], 1),
        (metrics.score_token_f1, "red red hat", ["a red hat"], 2 * 2 / (3 + 2)),  # two of three words, both found
        (metrics.score_token_f1, "blue", ["red"], 0),
        (metrics.score_token_f1, "", ["the"], 1),  # nothing is left of either
        (metrics.score_token_f1, "", ["red"], 0),
        (metrics.score_token_f1, "one two", ["two three four", "one"], 2 / 3),  # the better gold
    ],
)
def test_answers_are_scored_as_squad_does(score: Any, answer: str, golds: list[str], expected: float) -> None:
    assert score(answer, golds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "scale", "expected"),
    [
        ("$1,452.4", "million", 1452.4e6),
        ("$ 1,452.4 million", "", 1452.4e6),
        ("1.5bn", "", 1.5e9),
        ("(12.6)", "", -12.6),
        ("-12.6", "", -12.6),
        ("−3 %", "", -0.03),
        ("12.5%", "percent", 0.125),
        ("12.5", "percent", 0.125),
        ("+7", "", 7),
        (".5", "", 0.5),
        ("2019", "", 2019),
        ("2019-2020", "", None),
        ("about 5", "", None),
        ("5 apples", "", None),
        ("(5", "", None),
        ("", "", None),
    ],
)
def test_numbers_are_read_with_sign_and_scale(text: str, scale: str, expected: float | None) -> None:
    found = metrics.parse_number(text, scale)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("answer", "golds", "scale", "match", "f1"),
    [
        ("-12.6 million", ["-12.6"], "million", 1, 1),
        ("(12,600,000)", ["-12.6"], "million", 1, 1),
        ("-12.6", ["-12.6"], "million", 0, 0),
        ("-22.22%", ["-22.22"], "percent", 1, 1),
        ("-22%", ["-22.22"], "percent", 0, 0),
        ("the cost-plus type; fixed-price type", ["fixed-price type", "cost-plus type"], "", 1, 1),
        ("fixed-price type", ["fixed-price type", "cost-plus type"], "", 0, 1 / 2),
        ("costs plus profit in 2019", ["costs plus a profit in 2018"], "", 0, 0),  # the numbers differ
        ("costs in 2019", ["profit in 2019"], "", 0, 2 * 2 / (3 + 3)),
        ("", ["5"], "", 0, 0),
    ],
)
def test_numbers_count_by_their_value(answer: str, golds: list[str], scale: str, match: float, f1: float) -> None:
    assert metrics.score_numeric_match(answer, golds, scale) == match
    assert metrics.score_numeric_f1(answer, golds, scale) == pytest.approx(f1)


def test_macro_f1_by_hand() -> None:
    # Class 0: 2 hits, 3 predicted, 2 gold: 4/5. Class 1: 1, 1, 3: 1/2. Class 2: 0, 1, 0: 0. Class 3: neither: it does not count.
    gold, predicted = [0, 0, 1, 1, 1], [0, 0, 1, 0, 2]
    assert bootstrap.macro_f1(gold, predicted, 4).value == pytest.approx((4 / 5 + 1 / 2 + 0) / 3)
    assert bootstrap.macro_f1([0, 1], [-1, 1], 2).value == pytest.approx((0 + 1) / 2)  # -1: no class


# --- intervals ----------------------------------------------------------------------------------------------------


def test_an_interval_is_that_of_the_binomial() -> None:
    n, p = 400, 0.3
    metric = bootstrap.mean_metric([1.0] * int(n * p) + [0.0] * int(n * (1 - p)))
    found = bootstrap.compute_interval(metric, resamples=4000)
    assert found is not None
    half = 1.96 * math.sqrt(p * (1 - p) / n)
    assert found == (pytest.approx(p - half, abs=0.1 * half), pytest.approx(p + half, abs=0.1 * half))
    assert found == bootstrap.compute_interval(metric, resamples=4000), "seeded"
    assert bootstrap.compute_interval(bootstrap.mean_metric([1.0])) is None


def test_draws_of_three_rows_have_the_multinomial_distribution() -> None:
    drawn = bootstrap.draw_metrics(bootstrap.mean_metric([0.0, 0.0, 1.0]), resamples=20000)
    for hits in range(4):  # each draw takes the third row with probability 1/3
        expected = math.comb(3, hits) * (1 / 3) ** hits * (2 / 3) ** (3 - hits)
        assert np.isclose(drawn, hits / 3).mean() == pytest.approx(expected, abs=0.015)


def test_a_paired_difference_leaves_out_what_both_share() -> None:
    rows = np.random.Generator(np.random.PCG64(1)).normal(size=200)
    before, after = bootstrap.mean_metric(rows.tolist()), bootstrap.mean_metric((rows + 0.25).tolist())
    value, paired = bootstrap.compute_difference(before, after)
    assert value == pytest.approx(0.25)
    assert paired == (pytest.approx(0.25), pytest.approx(0.25))
    _, apart = bootstrap.compute_difference(before, after, paired=False)
    assert apart is not None
    assert (apart[1] - apart[0]) / 2 == pytest.approx(1.96 * math.sqrt(2 * rows.var() / 200), rel=0.12)
    with pytest.raises(ValueError, match="row by row"):
        bootstrap.compute_difference(before, bootstrap.mean_metric([1.0, 2.0]))


# --- likelihoods and answers --------------------------------------------------------------------------------------


def _slow(made: Any, context: list[int], continuation: list[int], length: int) -> tuple[float, bool]:
    read = torch.tensor([(context + continuation)[-(length + 1) :][:-1]])
    logits = torch.log_softmax(compute_reference_logits(made.trained[0], read)[0], dim=-1)[-len(continuation) :]
    wanted = torch.tensor(continuation)
    return float(logits.gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("techniques", ["{}", "{efficient_attention: {}, chunked_loss: {rows: 64}}"])
def test_likelihoods_are_those_of_plain_transformers_one_by_one(tokenizer: Any, techniques: str) -> None:
    made = opened(techniques)
    scorer = Scorer(made, tokenizer, micro=3, length=40)
    pairs = [
        scorer.pair("the cat", " sat on the mat"),
        scorer.pair("the cat", " ran"),
        scorer.pair("the dog ", "sat"),
        scorer.pair("", "the"),
    ]
    pairs.append(scorer.pair(TEXT * 2, " red house"))  # loses its beginning
    head = scorer.encode("the red")
    pairs += [(head, [n]) for n in (5, 77, 200)]  # read the same tokens: one row
    likeliest = int(compute_reference_logits(made.trained[0], torch.tensor([head]))[0, -1].argmax())
    pairs.append((head, [likeliest]))
    scores = scorer.score(pairs)
    assert scorer.truncated == 1
    for (context, continuation), score in zip(pairs, scores, strict=True):
        total, greedy = _slow(made, list(context), list(continuation), 40)
        assert score.loglikelihood == pytest.approx(total, abs=1e-3)
        assert (score.greedy, score.tokens) == (greedy, len(continuation))
    assert scores[-1].greedy
    assert made.trained[0].training  # left as it was found
    with pytest.raises(DataError, match="a sequence only 40"):
        scorer.score([(head, [1] * 41)], ["f:3"])
    with pytest.raises(DataError, match="f:4: the text to be scored has no token"):
        scorer.score([(head, [])], ["f:4"])


def test_a_head_over_classes_is_asked_at_the_end_of_the_text(tokenizer: Any, tmp_path: Path) -> None:
    made = opened()
    model: Any = made.trained[0]
    model.set_output_embeddings(torch.nn.Linear(32, 3, bias=False))
    made.tags = made.tags | {CLASSES}
    texts = ["the cat", "the dog ran to the red house by the river", "seven wizards", "quiet spells sat"]
    scorer = Scorer(made, tokenizer, micro=3, length=32)
    slow = [
        int(compute_reference_logits(model, torch.tensor([[*scorer.encode(t), scorer.encoder.end]]))[0, -1].argmax())
        for t in texts
    ]
    file = _jsonl(tmp_path / "r.jsonl", [{"t": t, "c": "abc"[n % 3]} for n, t in enumerate(texts)])
    task = Task(name="t", kind="classification", prompt="{{t}}", gold="c", choices=("a", "b", "c"), data=str(file))
    found = measure_task(task, scorer)
    assert found.metrics["accuracy"].value == sum(s == n % 3 for n, s in enumerate(slow)) / 4
    assert scorer.predict_classes([scorer.encode(t) for t in texts]) == slow
    # By the names that it was trained on, in whatever order the task has them; and by the text that it was trained on.
    named = Scorer(made, tokenizer, micro=3, length=32, classes=("c", "a"))
    asked = replace(task, prompt="What is {{t}}?", text="{{t}}")
    by_name = {0: "c", 1: "a", 2: "none"}  # the head's last row stands for no class of the data
    wanted = sum(by_name[s] == "abc"[n % 3] for n, s in enumerate(slow)) / 4
    assert measure_task(asked, named).metrics["accuracy"].value == wanted
    assert [item.context for item in read_items(asked, tokenizer, head=True)] == texts
    assert read_items(asked, tokenizer)[0].context == "What is the cat?"
    named.classes = ("c", "aa")
    with pytest.raises(RecipeError, match="trained on the class 'aa', which the task does not have"):
        measure_task(asked, named)
    for other, words in (
        (replace(task, choices=("a", "b", "c", "d")), "4 classes and the run's head 3"),
        (replace(task, kind="cloze", choices=None), "not cloze"),
    ):
        with pytest.raises(RecipeError, match=words):
            measure_task(other, scorer)


def test_pairs_are_cut_from_the_tokens_of_both(tokenizer: Any) -> None:
    scorer = Scorer(opened(), tokenizer, micro=2, length=40)
    head, tail = scorer.pair("the cat \n", "sat on")
    assert tokenizer.decode(head) == "the cat"
    assert tokenizer.decode(tail) == " \nsat on"
    assert scorer.pair("", "the")[0] == [scorer.encoder.end]  # something must be read first


def test_choices_are_scored_raw_and_by_length(tokenizer: Any, tmp_path: Path) -> None:
    made = opened()
    rows = [{"q": f"the cat {n}", "choices": ["sat", "ran to the red house", "wrote"], "gold": n % 3} for n in range(7)]
    file = _jsonl(tmp_path / "rows.jsonl", rows)
    task = Task(name="t", kind="multiple_choice", prompt="{{q}}", choices="choices", gold="gold", data=str(file))
    scorer = Scorer(made, tokenizer, micro=4, length=32)
    found = measure_task(task, scorer, samples=tmp_path / "samples.jsonl")
    raw, normed = [], []
    for row in rows:
        lls = [_slow(made, *map(list, scorer.pair(str(row["q"]), f" {c}")), 32)[0] for c in row["choices"]]  # type: ignore[attr-defined]
        raw.append(float(np.argmax(lls) == row["gold"]))
        normed.append(float(np.argmax([v / len(c) for v, c in zip(lls, row["choices"], strict=True)]) == row["gold"]))  # type: ignore[arg-type]
    assert found.metrics["accuracy"].rows[:, 0].tolist() == raw
    assert found.metrics["accuracy_norm"].rows[:, 0].tolist() == normed
    told = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [len(line["loglikelihoods"]) for line in told] == [3] * 7
    assert told[1]["gold"] == "ran to the red house"


def test_what_the_model_writes_is_compared(tokenizer: Any, tmp_path: Path) -> None:
    made = opened()
    scorer = Scorer(made, tokenizer, micro=4, length=32)
    written = scorer.write([scorer.encode("the cat")], tokens=6, stop=["\n"])[0]
    ids = scorer.encode("the cat")
    for _ in range(6):
        ids.append(int(compute_reference_logits(made.trained[0], torch.tensor([ids]))[0, -1].argmax()))
    slow = (
        tokenizer.decode(ids[len(scorer.encode("the cat")) :], skip_special_tokens=True)
        .lstrip()
        .split("\n")[0]
        .rstrip()
    )
    assert written == slow
    file = _jsonl(
        tmp_path / "rows.jsonl",
        [{"q": "the cat", "a": [written or "x", "y"]}, {"q": "the cat", "a": "surely not this"}],
    )
    task = Task(name="t", kind="exact_match", prompt="{{q}}", gold="a", data=str(file), tokens=6)
    assert measure_task(task, scorer).metrics["exact_match"].value == (0.5 if written else 0.0)


def test_a_text_is_measured_in_nats_and_in_bits_a_byte(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT * 60)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    made = opened()
    data = Data(source=str(tmp_path / "t.txt"), validation=0.0)
    rows = prepare(data, length=32, seed=0, tokenizer=str(tmp_path / "tokenizer"), cache=tmp_path / "cache").train
    assert isinstance(rows, Rows)
    found = measure_text(made, rows, micro=4, limit=10_000, sizes=count_token_bytes(tokenizer))
    loss, tokens = evaluate(made, evaluation_batches(rows, micro=4, limit=10_000))
    assert found.tokens == tokens
    assert found.metrics["loss"].value == pytest.approx(loss, rel=1e-6)
    assert found.metrics["perplexity"].value == pytest.approx(math.exp(loss), rel=1e-6)
    # Rows begin with tokens that are no label, and the last part of the text fills no row.
    scored = sum(len(tokenizer.decode(row.labels[row.labels >= 0])) for row in map(rows.row, range(len(rows))))
    assert found.metrics["bits_per_byte"].value == pytest.approx(loss * tokens / math.log(2) / scored, rel=1e-6)
    found = replace(found, unread_rows=3)
    assert describe_result(deserialize(read_record(StoredResult, to_plain_data(serialize(found))))) == describe_result(
        found
    )
    other = compare_results(replace(found, identity="other rows"), found)  # another tokenizer: only bits a byte compare
    assert (other.paired, set(other.metrics)) == (False, {"bits_per_byte"})
    same = compare_results(found, found)
    assert same.paired is True
    assert same.metrics["loss"] == Estimate(0.0, 0.0, 0.0)


def test_tokens_stand_for_as_many_bytes_as_the_text_has(tokenizer: Any, data_folder: Path) -> None:
    text = 'Lily said: "Ümläuts — naïve 漢字 😀!"\n\n  two  blanks\tand 12,345.6 numbers\n'
    for own in (
        tokenizer,
        *(
            load_tokenizer(str(data_folder / name))
            for name in ("tokenizers/gpt2", "tokenizers/llama2", "stories260K-hf")
        ),
    ):
        ids = own(text, add_special_tokens=True)["input_ids"]
        begins = int(own.convert_ids_to_tokens(own("a", add_special_tokens=False)["input_ids"])[0].startswith("▁"))
        assert (
            count_token_bytes(own)[ids].sum() == len(text.encode()) + begins
        )  # sentencepiece puts a blank before a text


# --- rows and tasks -----------------------------------------------------------------------------------------------


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"q": "a, b", "gold": "0"}, {"q": 'c "d"', "gold": "1"}]
    _jsonl(tmp_path / "r.jsonl", rows)
    (tmp_path / "r.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    with (tmp_path / "r.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["q", "gold"])
        writer.writeheader()
        writer.writerows(rows)
    for name in ("r.jsonl", "r.json", "r.parquet", "r.csv"):
        assert [row.values for row in read_rows(str(tmp_path / name))] == rows
    (tmp_path / "o.json").write_text(json.dumps({"7": {"q": 1}, "8": {"q": 2}}))
    assert [row.values for row in read_rows(str(tmp_path / "o.json"))] == [{"key": "7", "q": 1}, {"key": "8", "q": 2}]
    (tmp_path / "n.json").write_text(json.dumps([{"t": "T", "qs": [{"q": 1}, {"q": 2}]}]))
    found = read_rows(str(tmp_path / "n.json"), each="qs")
    assert [row.values for row in found] == [{"t": "T", "q": 1}, {"t": "T", "q": 2}]
    assert found[1].where.endswith("row 1, qs 2")


def test_answered_rows_stand_before_and_are_not_asked(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"key": str(n), "q": f"q{n}", "a": f"a{n}", "keep": n != 3} for n in range(6)]
    file = _jsonl(tmp_path / "r.jsonl", rows)
    (tmp_path / "keys.json").write_text(json.dumps({"0": 1, "1": 1, "2": 1, "3": 1, "4": 1}))
    task = Task(
        name="t",
        kind="exact_match",
        prompt="Q: {{q}}\nA:",
        gold="a",
        data=str(file),
        shots=2,
        where="keep",
        keys=str(tmp_path / "keys.json"),
    )
    items = read_items(task, tokenizer)
    assert len(items) == 2  # of 0, 1, 2 and 4 two are shown
    asked = {item.context.rsplit("Q: ", 1)[1][:2] for item in items}
    shown = {part[:2] for part in items[0].context.split("Q: ")[1:-1]}
    assert len(shown) == 2
    assert asked | shown == {"q0", "q1", "q2", "q4"}
    first = sorted(shown)[0]
    assert f"Q: {first}\nA: {first.replace('q', 'a')}\n\n" in items[0].context


def test_numbers_of_examples_ask_the_same_questions(tokenizer: Any, tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "r.jsonl", [{"query": f"q{n}", "choices": ["a", "b"], "gold": 0} for n in range(9)])
    tasks = find_tasks([f"multiple_choice={file},shots=1..3"])
    items = [read_items(task, tokenizer) for task in tasks if isinstance(task, Task)]
    assert [len(of) for of in items] == [6, 6, 6], "three are set aside for all"
    assert len({tuple(item.where for item in of) for of in items}) == 1
    # Fewer examples are the first of more.
    assert items[1][0].context.startswith(items[0][0].context.split("\n\n")[0])
    assert [group[0].name for group in find_variants(tasks)] == ["multiple_choice, 1 shots"]
    with pytest.raises(RecipeError, match="is not a range"):
        find_tasks([f"multiple_choice={file},shots=3..3"])
    with pytest.raises(RecipeError, match="is an evaluation for each number; name 100 at most"):
        find_tasks([f"multiple_choice={file},shots=0..100"])
    # Another number of rows set aside asks other questions.
    assert not find_variants([*find_tasks([f"multiple_choice={file},shots=2"]), tasks[0]])


def test_prompts_are_compared_row_by_row(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"query": f"q{n}", "choices": ["a", "bcd"], "gold": n % 2} for n in range(8)]
    (tmp_path / "short.jinja").write_text("{{query}}\n")
    (tmp_path / "long.jinja").write_text("Question: {{query}}\nAnswer:\n")
    (tmp_path / "question.jinja").write_text("{{query}} question\n\n")
    files = [tmp_path / "short.jinja", tmp_path / "long.jinja"]
    tasks = replace_prompts(find_tasks([f"multiple_choice={_jsonl(tmp_path / 'r.jsonl', rows)}"]), files)
    assert [task.prompt for task in tasks if isinstance(task, Task)] == ["{{query}}", "Question: {{query}}\nAnswer:"]
    (question,) = replace_prompts(tasks[:1], [tmp_path / "question.jinja"])
    assert isinstance(question, Task)
    assert question.prompt == "{{query}} question\n"
    scorer = Scorer(opened(), tokenizer, micro=4, length=32)
    results = {task.name: measure_task(task, scorer) for task in tasks if isinstance(task, Task)}
    (name, found), *none = compare_variants(find_variants(tasks), results).items()
    assert not none
    assert (name, found.against, found.difference.paired) == (
        "multiple_choice, long",
        "multiple_choice, short",
        True,
    )
    short, long = (np.mean(result.metrics["accuracy"].rows) for result in results.values())
    assert found.difference.metrics["accuracy"].value == pytest.approx(long - short)
    crowded = next(replace(task, shots=6) for task in tasks if isinstance(task, Task))
    with pytest.raises(RecipeError, match=r"with 6 examples has .* tokens, and a row 32; use fewer examples"):
        measure_task(crowded, scorer)
    with pytest.raises(RecipeError, match="is a folder; name the file of a prompt"):
        replace_prompts(tasks, [tmp_path])
    with pytest.raises(RecipeError, match="has no prompt"):
        replace_prompts(["piqa"], files)


def test_a_chat_template_is_asked(tokenizer: Any, tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "r.jsonl", [{"q": "hi", "a": "ho"}])
    task = Task(name="t", kind="cloze", prompt="{{q}}", gold="a", data=str(file), chat=True, system="be brief")
    with pytest.raises(RecipeError, match="no chat template"):
        read_items(task, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    try:
        (item,) = read_items(task, tokenizer)
    finally:
        tokenizer.chat_template = None
    assert (item.context, item.choices, item.complete) == ("<system>be brief<user>hi<assistant>", ("ho",), True)


GOOD = {"kind": "multiple_choice", "prompt": "{{q}}", "choices": "c", "gold": "g", "data": "r.jsonl"}
ROW = {"q": "a", "c": ["x", "y"], "g": 0}


@pytest.mark.parametrize(
    ("change", "rows", "kind", "words"),
    [
        ({"promt": "x"}, [ROW], RecipeError, "did you mean 'prompt'"),
        ({"kind": "quiz"}, [ROW], RecipeError, "multiple_choice"),
        ({"choices": None}, [ROW], RecipeError, "choices: is needed"),
        ({"kind": "cloze"}, [ROW], RecipeError, "means nothing for cloze"),
        ({"prompt": "{{q"}, [ROW], RecipeError, "prompt: line 1"),
        ({"gold": "g ++"}, [ROW], RecipeError, "gold: line 1"),
        ({"prompt": "{{qq}}"}, [ROW], DataError, "r.jsonl:1: no field 'qq'; did you mean 'q'"),
        ({}, [ROW, {"q": "a", "c": ["x", "y"]}], DataError, "r.jsonl:2: no field 'g'"),
        ({}, [ROW, ROW, {**ROW, "g": 2}], DataError, "r.jsonl:3: gold 2 is none of the 2 choices: 'x', 'y'"),
        ({}, [{**ROW, "g": "z"}], DataError, "gold 'z' is none"),
        ({}, [{**ROW, "g": None}], DataError, "r.jsonl:1: has no gold"),
        ({}, [{**ROW, "c": "xy"}], DataError, "not a list of two or more"),
        ({}, [{**ROW, "c": ["", "y"]}], DataError, "choice 0 is empty"),
        ({}, [], DataError, "holds no row"),
        ({"where": "g > 5"}, [ROW], DataError, "leave none of 1 rows"),
        ({"each": "parts"}, [ROW], DataError, "no field 'parts'"),
        ({"shots": 1}, [ROW], DataError, "leave none of 1 to ask"),
        ({"data": "nowhere.jsonl"}, [ROW], DataError, "rows nowhere.jsonl: does not exist"),
        ({"kind": "classification", "choices": ["x", "x"]}, [ROW], RecipeError, "each once"),
        ({"text": "{{query}}"}, [ROW], RecipeError, "text: means nothing for multiple_choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_tasks_and_rows_are_named(
    tokenizer: Any, tmp_path: Path, change: dict[str, Any], rows: list[Any], kind: type[PreheatError], words: str
) -> None:
    _jsonl(tmp_path / "r.jsonl", rows)
    values = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    (tmp_path / "t.yaml").write_text(json.dumps(values))
    with pytest.raises(kind) as error:
        read_items(load_task(tmp_path / "t.yaml"), tokenizer)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_broken_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "b.csv").write_text("a,b\n1,2\n1,2,3\n")
    (tmp_path / "c.jsonl").write_text('{"a": 1}\n[2]\n')
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "e.json").write_text("3")
    (tmp_path / "f.jsonl").write_bytes(b'{"a": "\xff"}\n')
    (tmp_path / "g.json").write_text('{"x": {"a": 1}, "y": 2}')
    (tmp_path / "h.csvv").write_text("a")
    (tmp_path / "i.json").write_text('{"x": ')
    for name, words in {
        "a.jsonl": "a.jsonl:2: not JSON",
        "b.csv": "b.csv:3: has 3 fields where the first line names 2; quote commas",
        "c.jsonl": "c.jsonl:2: is a list",
        "d.parquet": "not a readable Parquet",
        "e.json": "holds a number",
        "f.jsonl": "not text in UTF-8",
        "g.json": "g.json: row 2: is a number",
        "h.csvv": "tasks read rows from .jsonl",
        "i.json": "i.json:1: not JSON",
    }.items():
        with pytest.raises(DataError) as error:
            read_rows(str(tmp_path / name))
        assert words in str(error.value)


def test_tasks_are_found_by_name_file_and_further_keys(tmp_path: Path) -> None:
    (task,) = find_tasks(["cloze=rows.jsonl,limit=5,name=last words"])
    assert isinstance(task, Task)
    assert (task.data, task.limit, task.name, task.kind) == ("rows.jsonl", 5, "last words", "cloze")
    for name, words in {
        "claws": "did you mean 'clauses'",
        "clauses": "names no rows; give them: clauses=FILE",
        "no.yaml": "no such file",
        "cloze=r.jsonl,limt=3": "--tasks cloze,limt=3: unknown key 'limt'; did you mean 'limit'",
        "cloze=r.jsonl,learning_rate=3": "known: chat, choices",
        "recall,limit=4": "here it is 'each'",
        "cloze=r.jsonl,limit=many": "whole number",
        "cloze=r.jsonl,limit": "is not KEY=VALUE",
    }.items():
        with pytest.raises(RecipeError) as error:
            find_tasks([name])
        assert words in str(error.value), name
    with pytest.raises(RecipeError, match="is given twice"):
        find_tasks(["cloze=a.jsonl", "cloze=b.jsonl"])


# --- the built-in tasks, and lm-eval ------------------------------------------------------------------------------

REAL = {
    "multiple_choice": ("eval/arc_easy.jsonl", 2376),
    "cloze": ("eval/lambada_openai.jsonl", 5153),
    "question_answer": ("math/gsm8k_test.jsonl", 1319),
    "clauses": ("legal/cuad_clauses.jsonl", 11072),
    "pubmedqa": ("medical/pubmedqa_ori_pqal.json", 1000),
    "humaneval": ("code/HumanEval.jsonl", 164),
    "tatqa": ("finance/tatqa_dataset_dev.json", 1668),
}


def test_built_in_tasks_read_the_published_files(tokenizer: Any, data_folder: Path) -> None:
    assert {*REAL, "mbpp"} == set(find_built_in()), "each is tried here or in test_execution.py"
    for name, (file, count) in REAL.items():
        (task,) = find_tasks([f"{name}={data_folder / file}"])
        assert isinstance(task, Task)
        items = read_items(task, tokenizer)
        assert len(items) == count, name
        assert all(item.context.strip() for item in items)
    # Every published answer of TAT-QA is right by its own measure, with its scale said as people do.
    for item in items:
        words = {"percent": "%"}.get(item.scale, f" {item.scale}")
        said = "; ".join(
            a + words
            if metrics.parse_number(a, item.scale) is not None and metrics.parse_number(a + words) is not None
            else a
            for a in item.answers
        )
        assert metrics.score_numeric_match(said, item.answers, item.scale) == 1, (item.where, item.answers, item.scale)
        assert metrics.score_numeric_f1(said, item.answers, item.scale) == 1


def test_accuracy_is_that_of_lm_eval_on_the_same_rows(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'preheat[lm-eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM

    from preheat.evaluation.lm_eval import measure_by_harness
    from preheat.inference.load import load_model

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, file = data_folder / "stories260K-hf", data_folder / "eval/arc_easy.jsonl"
    metric = [
        "{metric: acc, aggregation: mean, higher_is_better: true}",
        "{metric: acc_norm, aggregation: mean, higher_is_better: true}",
    ]
    (tmp_path / "local.yaml").write_text(
        f"task: local\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\noutput_type: multiple_choice\n"
        f'doc_to_text: "{{{{query}}}}\\nAnswer:"\ndoc_to_choice: choices\ndoc_to_target: gold\nmetric_list: [{", ".join(metric)}]\n'
    )
    made = load_model(folder)
    scorer = Scorer(made.build, made.tokenizer, micro=8, length=512)
    (task,) = find_tasks([f"multiple_choice={file},limit=40"])
    assert isinstance(task, Task)
    ours = describe_result(measure_task(task, scorer)).metrics
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = simple_evaluate(
        model=HFLM(pretrained=plain, tokenizer=made.tokenizer, batch_size=8, max_length=512), tasks=["local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), limit=40, bootstrap_iters=0,
    )["results"]["local"]  # fmt: skip
    assert ours["accuracy"].value == pytest.approx(theirs["acc,none"])
    assert ours["accuracy_norm"].value == pytest.approx(theirs["acc_norm,none"])
    wrapped = describe_result(measure_by_harness(str(tmp_path / "local.yaml"), scorer, limit=40)["local"]).metrics
    assert (wrapped["acc"], wrapped["acc_norm"]) == (ours["accuracy"], ours["accuracy_norm"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [" + "x, " * 9 + "]\n" + "".join(f"{c}: &{c} [{f'*{b}, ' * 9}]\n" for b, c in ("ab", "bc", "cd", "de", "ef", "fg")), r":\d+: holds more than 10,000 values"),
        ("task: &a [*a]", r":1: is nested more than 32 levels deep"),
        ("task: " + "[" * 5000, r":1: is nested more than 32 levels deep"),
        ("task: 'x", r":1: not YAML"),
        ("output_type: multiple_choice", r"has no key 'task'"),
    ],
    ids=["aliases", "itself", "deep", "cut", "no name"],
)  # fmt: skip
def test_a_task_of_lm_eval_that_is_no_task_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    from preheat.evaluation.lm_eval import _name_task

    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(RecipeError, match=words) as told:
        _name_task(tmp_path / "t.yaml")
    assert str(told.value).startswith("--tasks lm-eval:")
    assert "\n" not in str(told.value)
    (tmp_path / "t.yaml").write_text("task: [a, b]\ngroup: 2024_q1\n")  # as text, whatever YAML takes it for
    assert _name_task(tmp_path / "t.yaml") == "2024_q1"


def test_lm_eval_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from preheat.evaluation.lm_eval import require_harness

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(RecipeError, match=r"pip install 'preheat\[lm-eval\]'"):
        require_harness()


LITTLE = """
import resource
import numpy
from preheat.evaluation import bootstrap
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 16 * 2**20,) * 2)
print(bootstrap.compute_interval(bootstrap.ratio_metric(list(numpy.linspace(1, 2, 500)), [1.0] * 500)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interval_needs_little_memory_and_no_threads() -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "8"}
    done = subprocess.run([sys.executable, "-c", LITTLE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    metric = bootstrap.ratio_metric(list(np.linspace(1, 2, 500)), [1.0] * 500)
    assert done.stdout == f"{bootstrap.compute_interval(metric)}\n"


def test_draws_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).random((37, 3))
    whole = np.concatenate(list(bootstrap.resample_sums(rows)))
    monkeypatch.setattr(bootstrap, "ROOM", 500)
    parts = list(bootstrap.resample_sums(rows))
    assert len(parts) > 50
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_evaluations_are_judged_by_their_improvement() -> None:
    def verdict(*scores: float | None, **settings: Any) -> Verdict:
        return judge([Evaluated(n, score, score) for n, score in enumerate(scores)], Criterion("s", **settings))

    # The evaluation of step 0 does not count.
    assert verdict(1.0, higher=False) == Verdict()
    assert verdict(1.0, 3.0, 2.0, 4.0, higher=False) == Verdict(2, 2.0, 1, 3)
    assert verdict(9.0, 3.0, 2.0, 4.0, 4.0, higher=True) == Verdict(3, 4.0, 1, 4)
    # Small improvements add up, since the best one so far stays the reference.
    assert verdict(0.0, 3.0, 2.75, 2.5, 2.25, higher=False, min_delta=0.5) == Verdict(4, 2.25, 0, 4)
    # Values that are missing or not finite are no improvements.
    missing = verdict(0.0, 3.0, None, math.nan, -math.inf, higher=False, patience=3)
    assert missing == Verdict(1, 3.0, 3, 4, "patience")
    assert verdict(0.0, 3.0, 2.0, higher=False, target_loss=2.0).ends == "target_loss"
    # Only the last evaluation ends a run: an earlier one counted under other settings.
    assert verdict(0.0, 3.0, 2.0, 2.5, higher=False, target_loss=2.0).ends is None


def test_a_criterion_knows_its_direction_and_finds_its_score() -> None:
    values = {
        "model": {"size": "1M"},
        "stop": {"max_steps": 2},
        "evaluate": {"every": 1, "tasks": ["recall", "lm-eval:x"]},
    }
    line = EvaluationMetrics(
        3, 2.5, scores={"validation_accuracy": 0.75}, tasks={"recall": {"accuracy": 0.5}, "x": {"acc": 1.0}}
    )
    for name, higher, value in (
        ("validation_loss", False, 2.5), ("recall/accuracy", True, 0.5), ("x/acc", True, 1.0), ("x/word_perplexity", False, None),
    ):  # fmt: skip
        criterion = criterion_of(parse(json.dumps({**values, "checkpoint": {"best": name}})))
        assert criterion is not None
        assert (criterion.higher, criterion.evaluated(line)) == (higher, Evaluated(3, value, 2.5))
    classes = {
        **values,
        "techniques": {"classification": {"classes": 3}},
        "checkpoint": {"best": "validation_accuracy"},
    }
    criterion = criterion_of(parse(json.dumps(classes)))
    assert criterion is not None
    assert (criterion.higher, criterion.evaluated(line).score) == (True, 0.75)
