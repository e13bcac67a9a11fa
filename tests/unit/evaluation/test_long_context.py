"""Questions of length against what their words say, scores against a loop by plain transformers; refusals; the drawings."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preheat.cli.views.long_context_table import build_grids
from preheat.core import Phase, Slot
from preheat.core.run_records import ResultFigures, Results, StoredResult
from preheat.data.packing import Tokens
from preheat.data.tokenizer import train_tokenizer
from preheat.engine.builder import build
from preheat.errors import DataError, PreheatError, RecipeError
from preheat.evaluation.long_context import draw_questions, measure_length, reach_of
from preheat.evaluation.needle import CUE, HIDDEN, draw_key_value_prompt, draw_phrase_prompt, find_word_tokens
from preheat.evaluation.results import compare_results, describe_result, deserialize, serialize
from preheat.evaluation.scoring import Scorer
from preheat.evaluation.tasks import LengthTask, find_tasks
from preheat.files import read_record, to_plain_data
from preheat.models.hf import compute_reference_logits
from preheat.recipe import parse
from preheat.report.long_context_charts import render_lengths

from ...conftest import DEVICE

TEXT = "the cat sat on the mat and the dog ran to the red house by the river while seven wizards wrote quiet spells. "
PIECES = range(10, 110)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([("0a", TEXT * 20), ("0b", "Question: what is it?\nAnswer: a cat\n" * 9)], vocabulary=400)


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> Tokens:
    ids = tokenizer(TEXT * 60)["input_ids"]
    return Tokens(np.array([*ids, *ids[:90]], np.uint16), np.array([len(ids), len(ids) + 90]))


def opened(techniques: str = "{}", family: str = "llama") -> Any:
    made = build(
        parse(
            f"model: {{family: {family}, num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 448, max_positions: 64}}\nbatch: {{size: 4, seq_len: 64}}\n"
            f"stop: {{max_steps: 1}}\ntechniques: {techniques}"
        ),
        vocabulary=400,
        device=DEVICE,
    )
    with torch.no_grad():  # a new model's choices are all but equal
        for p in made.trained[0].parameters():
            p.mul_(3.0)
    return made


def questions(words: str, made: Any, tokenizer: Any, text: Tokens, **limits: Any) -> Any:
    (task,) = find_tasks([words])
    assert isinstance(task, LengthTask)
    scorer = Scorer(made, tokenizer, micro=3, length=64)
    how = {"longest": 64, "reach": reach_of(made)} | limits
    return draw_questions(task, scorer, texts=lambda source, knob: text, **how), scorer


# --- what is asked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "size"), [(30, 1), (200, 2)]
)  # fifty keys: of two pieces where more pairs are asked than half of that
def test_a_list_has_each_key_once_and_asks_for_the_one_at_its_depth(length: int, size: int) -> None:
    for n, depth in enumerate((0.0, 0.4, 1.0)):
        asked = draw_key_value_prompt(PIECES, length, depth, np.random.default_rng(n), [1, 2])
        assert length - size - 1 < len(asked.context) + len(asked.answer) <= length
        assert asked.context[:2] == [1, 2]
        told, last = asked.context[2:-size], asked.context[-size:]
        pairs = [(told[i : i + size], told[i + size]) for i in range(0, len(told), size + 1)]
        assert len({tuple(key) for key, _ in pairs}) == len(pairs)
        assert all(token % 2 == 0 for key, _ in pairs for token in key)
        assert all(value % 2 == 1 for _, value in pairs)
        assert (last, *asked.answer) == (
            pairs[round(depth * (len(pairs) - 1))][0],
            pairs[round(depth * (len(pairs) - 1))][1],
        )


@pytest.mark.parametrize("needles", [1, 3])
def test_a_needle_stands_at_its_depth_among_others_and_the_text_is_whole(needles: int) -> None:
    hay = list(range(1000, 1100))
    for depth in (0.0, 0.5, 1.0):
        asked = draw_phrase_prompt(hay, PIECES, depth, np.random.default_rng(3), needles=needles, begin=[7])
        assert len(asked.context) + len(asked.answer) == 1 + len(hay)
        body, cue = asked.context[1:-CUE], asked.context[-CUE:]
        assert len(asked.answer) == HIDDEN
        whole = [*cue, *asked.answer]
        (at,) = [i for i in range(len(body)) if body[i : i + len(whole)] == whole]
        read = [t for t in body[:at] if t >= 1000]
        assert len(read) == round(depth * (len(hay) - (needles + 1) * len(whole)))
        assert [t for t in body if t >= 1000] == hay[: len(hay) - (needles + 1) * len(whole)]
        hidden = [t for t in body if t < 1000]
        assert len(hidden) == len(set(hidden)) == needles * len(whole)


def test_questions_follow_their_seed_and_passages_do_not_overlap(tokenizer: Any, text: Tokens) -> None:
    made = opened()
    for words in ("recall", "needle=x,depths=3", "positions=x", "continuation=x"):
        one, again, other = (questions(f"{words},seed={seed}", made, tokenizer, text)[0] for seed in (1, 1, 2))
        assert one == again
        assert one.questions != other.questions
        assert all(len(q.context) + len(q.answer) <= 64 for cell in one.questions for q in cell)
    asked = questions("positions=x", made, tokenizer, text)[0].questions[0]
    assert len(asked) == 16
    long = questions("positions=x,lengths=[400],each=50", made, tokenizer, text)[0].questions[0]
    assert 1 < len(long) < 50  # as many as there are: what is left over of a document, and the short one, give none
    everything = np.asarray(text.ids).tolist()
    starts = sorted(
        next(i for i in range(0, len(everything), 400) if everything[i : i + 400] == q.context) for q in long
    )
    assert len(set(starts)) == len(starts)


def test_words_are_found_in_the_real_vocabulary_of_512(data_folder: Path) -> None:
    from preheat.data.tokenizer import load_tokenizer

    real = load_tokenizer(str(data_folder / "stories260K-hf"))
    words = find_word_tokens(real)
    assert 200 < len(words) < 512
    assert not set(words) & set(real.all_special_ids)
    assert all(real.decode([n]).strip().isalnum() for n in words)


# --- what is scored -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("techniques", ["{}", "{efficient_attention: {}}"])
def test_scores_are_those_of_plain_logits_one_by_one(tokenizer: Any, text: Tokens, techniques: str) -> None:
    made = opened(techniques)
    model = made.trained[0]

    def slow(context: list[int], answer: list[int]) -> tuple[float, bool]:
        logits = compute_reference_logits(model, torch.tensor([[*context, *answer]]))[0].double().log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(answer) - 1)
        return (
            -sum(float(logits[at, token]) for at, token in zip(places, answer, strict=True)),
            all(int(logits[at].argmax()) == token for at, token in zip(places, answer, strict=True)),
        )

    asked, scorer = questions("recall,lengths=[16, 60],depths=2,each=3", made, tokenizer, text)
    found = measure_length(asked, scorer)
    expected = [[slow(*q) for q in cell] for cell in asked.questions]
    assert found.rows == 12
    assert [part.metric.value for part in found.parts] == pytest.approx(
        [np.mean([right for _, right in c]) for c in expected]
    )
    assert found.metrics["loss"].value == pytest.approx(np.mean([lost for c in expected for lost, _ in c]), rel=1e-5)
    assert [part.subset for part in found.parts] == [{"length": n, "depth": d} for n in (16, 60) for d in (0.0, 1.0)]

    asked, scorer = questions("positions=x,lengths=[50],each=4", made, tokenizer, text)
    found = measure_length(asked, scorer)
    rows = [q.context for q in asked.questions[0]]
    by_place = np.array([[slow(row[:n], row[n : n + 1])[0] for n in range(1, 50)] for row in rows])
    assert [(p.subset["start"], p.subset["end"]) for p in found.parts] == [(0, 16), (16, 32), (32, 49)]
    assert [p.metric.value for p in found.parts] == pytest.approx(
        [by_place[:, a:b].mean() for a, b in ((0, 16), (16, 32), (32, 49))], rel=1e-5
    )
    assert found.tokens == 4 * 49

    asked, scorer = questions("continuation=x,lengths=[48],each=3", made, tokenizer, text)
    found = measure_length(asked, scorer)
    assert [len(cell[0].context) for cell in asked.questions] == [
        1,
        *(1 + round((48 - 6 - 1) * s) for s in (0.25, 0.5, 1)),
    ]
    expected_loss = [np.mean([slow(*q)[0] / 6 for q in cell]) for cell in asked.questions]
    assert [found.metrics[f"loss_{n}"].value for n in ("none", "quarter", "half", "all")] == pytest.approx(
        expected_loss, rel=1e-5
    )


def test_a_layer_of_a_window_sees_no_further_than_in_training(tokenizer: Any, text: Tokens) -> None:
    made = opened("{sliding_window: {window: 9, every: 2}}")
    asked, scorer = questions("recall,lengths=[60],depths=2,each=3", made, tokenizer, text)
    expected = (
        -sum(s.loglikelihood for s in scorer.score([q for cell in asked.questions for q in cell])) / 6
    )  # by the plain kernel
    assert measure_length(asked, scorer).metrics["loss"].value == pytest.approx(expected, rel=1e-5)
    full = measure_length(asked, Scorer(opened(), tokenizer, micro=3, length=64)).metrics["loss"].value
    assert abs(full - expected) > 1e-3


def test_a_task_that_can_be_solved_is_solved_and_one_that_cannot_is_not(
    tokenizer: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that looks for the last tokens where they stood before, in place of the trained one: recall and needles are 100 %, of the others' heat map 0 %."""
    from preheat.evaluation import scoring

    made = opened()

    def looks_back(back: int) -> Any:
        def token_scores(build: Any, batch: Any, places: Any, targets: Any) -> Any:
            best = []
            for place, target in zip(places.tolist(), targets.tolist(), strict=True):
                row = batch.tokens[place // batch.tokens.shape[1]].tolist()[: place % batch.tokens.shape[1] + 1]
                key = row[-back:]
                before = next((row[i + back] for i in range(len(row) - back) if row[i : i + back] == key), -1)
                best.append(before == target)
            return torch.zeros(len(best)), torch.tensor(best)

        return token_scores

    for words in ("recall,lengths=[20, 40],each=2", "needle=x,lengths=[48, 64],each=2,needles=2"):
        asked, scorer = questions(words, made, tokenizer, text)
        for back, right in ((1, 1.0), (40, 0.0)):
            monkeypatch.setattr(scoring, "score_tokens", looks_back(back if "recall" in words else min(back + 1, 40)))
            found = measure_length(asked, scorer)
            assert found.metrics["accuracy"].value == right
            assert {part.metric.value for part in found.parts} == {right}


def test_reading_takes_no_scores_of_all_places(tokenizer: Any, text: Tokens) -> None:
    from preheat.planning.dispatch_recorder import Recorder
    from preheat.planning.dry_run import peak_by_phase

    made = opened()
    plain = made.slot(Slot.ATTENTION_KERNEL)
    peaks = []
    for length in (300, 600):
        asked, scorer = questions(f"recall,lengths=[{length}],depths=2,each=1", made, tokenizer, text)
        with (recorder := Recorder(rounding=64)):
            recorder.phase = Phase.FORWARD
            measure_length(asked, scorer)
        peaks.append(max(peak_by_phase(recorder).values()))
    assert peaks[1] < 2.6 * peaks[0]  # four times with them
    assert made.slot(Slot.ATTENTION_KERNEL) is plain


# --- kept, compared, shown ----------------------------------------------------------------------------------------


def test_parts_travel_and_are_compared_row_by_row(tokenizer: Any, text: Tokens) -> None:
    one, other = opened(), opened("{sliding_window: {window: 2}}")
    asked, scorer = questions("positions=x,lengths=[64],each=6", one, tokenizer, text)
    before = measure_length(asked, scorer)
    after = measure_length(asked, Scorer(other, tokenizer, micro=2, length=64))
    back = deserialize(read_record(StoredResult, to_plain_data(serialize(before))))
    assert describe_result(back) == describe_result(before)
    off = compare_results(back, after)
    assert off.paired
    assert [part.value for part in off.parts or ()] == pytest.approx(
        [b.metric.value - a.metric.value for a, b in zip(before.parts, after.parts, strict=True)]
    )
    assert compare_results(before, replace(after, identity="another")).parts is None


def test_a_report_draws_before_and_after_and_a_terminal_has_both_in_a_cell() -> None:
    def task(*values: float) -> dict[str, Any]:
        cells = [(n, d) for n in (64, 128) for d in (0.0, 1.0)]
        return {
            "metrics": {},
            "parts": [
                {"length": n, "depth": d, "value": v, "low": None, "high": None}
                for (n, d), v in zip(cells, values, strict=True)
            ],
        }

    curve = {
        "metrics": {},
        "parts": [
            {"start": a, "end": b, "value": v, "low": v - 1, "high": v + 1}
            for a, b, v in ((0, 16, 4.0), (16, 64, 3.0), (64, 128, 3.5))
        ],
    }
    shares = [{"length": 64, "share": s, "value": 3 - s, "low": None, "high": None} for s in (0.0, 0.25, 0.5, 1.0)]
    book = {"metrics": {}, "parts": shares}
    after = {"tasks": {"recall": task(1, 0.5, 0.25, 0), "<b>pos": curve, "book": book, "cloze": {"metrics": {}}}}
    page = render_lengths(read_record(Results, after), read_record(Results, {"tasks": {"recall": task(0, 0, 0, 0)}}))
    assert page.count("<svg") == 4
    assert "44 % right, the least at 128 tokens and depth 100 %: 0 %." in page.replace("\u00a0", " ")
    assert "it falls up to position 64." in page
    assert "3.000 with nothing before them, 2.000 with all" in page
    assert "<b>pos" not in page
    assert render_lengths(Results(tasks={"cloze": ResultFigures(metrics={})}), Results()) == ""
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    for grid in build_grids({"tasks": after["tasks"], "before": {"tasks": {"recall": task(0, 0, 0, 0)}}}):
        console.print(grid)
    shown = console.export_text()
    assert "0.00 → 0.25" in shown
    assert "16 to 63" in shown


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "family", "said"),
    [
        ("recal", "llama", "did you mean 'recall'"),
        ("needle", "llama", "names no text; give one: needle=FILE"),
        ("recall=x", "llama", "whose lists are drawn"),
        ("recall,lengths=[64, 32]", "llama", "must rise"),
        ("recall,depths=1", "llama", "two or more"),
        ("recall,needles=2", "llama", "means nothing for recall"),
        ("recall,lengths=[5]", "llama", "5 tokens have no room for two pairs"),
        ("recall,lengths=[65]", "gpt2", "65 is beyond the 64 tokens that are read here"),
        ("needle=x,needles=60,lengths=[500]", "llama", "use fewer needles"),
        ("needle=x,lengths=[12]", "llama", "have no room for 1 phrases"),
        ("positions=x,lengths=[4000]", "llama", "no document of x has 4,000 tokens, the longest has"),
        ("positions=x,lengths=[20,30]", "llama", "state one"),
        ("recall,legths=[64]", "llama", "did you mean 'lengths'"),
    ],
)
def test_what_cannot_be_asked_is_one_line(words: str, family: str, said: str, tokenizer: Any, text: Tokens) -> None:
    with pytest.raises(PreheatError) as caught:
        questions(words, opened(family=family), tokenizer, text)
    assert said in str(caught.value)
    assert isinstance(caught.value, DataError if "no document" in said else RecipeError)
    assert "\n" not in str(caught.value)


def test_a_model_with_rotary_positions_is_read_beyond_them(tokenizer: Any, text: Tokens) -> None:
    made = opened()
    assert made.model.positions == 64
    found = measure_length(*questions("recall,lengths=[100],depths=2,each=2", made, tokenizer, text))
    assert math.isfinite(found.metrics["loss"].value)
