"""The student's own texts in a batch: drawn by its own probabilities, weighed as what they replace, and judged by the teacher alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from preheat import recipe as recipes
from preheat.core import Batch
from preheat.engine.builder import build
from preheat.engine.evaluate import measure
from preheat.engine.step import accumulate_gradients, transform
from preheat.errors import RecipeError
from preheat.models.distillation.on_policy import read_answers
from preheat.models.hf import compute_reference_logits
from preheat.ops.losses.cross_entropy import sum_chunked_loss, sum_full_loss
from preheat.ops.losses.distillation import Distilled, TeacherHead
from preheat.planning.dry_run import observe
from preheat.planning.request import Request

from ...conftest import DEVICE, difference, split, tiny, uneven
from ...contract.settings import teacher
from ..techniques.test_distillation import slow_divergence

TOGETHER = (
    "chunked_loss: {rows: 7}, gradient_accumulation: {steps: 2}, efficient_attention: {}, activation_checkpointing: {}"
)


def made(settings: str = "on_policy: 1.0", beside: str = "") -> Any:
    """A build whose tiny teacher is sure of what it says, and its student too."""
    folder = teacher()
    recipe = recipes.override(
        tiny(f"{{distillation: {{teacher: {folder}, {settings}}}, {beside}}}"), f"data.tokenizer={folder}"
    )
    b = build(recipe, vocabulary=96, device=DEVICE)
    with torch.no_grad():
        for parts in b.parts.values():
            for p in parts[0].parameters():
                p.mul_(2.0)
    return b


def slow_text(model: Any, prompt: list[int], room: int, seed: int) -> list[int]:
    """Drawn token by token from the whole text's logits, until token 0 ends it."""
    torch.manual_seed(seed)
    ids = list(prompt)
    while len(ids) < len(prompt) + room and (len(ids) == len(prompt) or ids[-1]):
        ids.append(int(torch.multinomial(compute_reference_logits(model, torch.tensor([ids]))[0, -1].softmax(-1), 1)))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("labels", "documents", "wanted"),
    [
        ([5, 6, 7, 8, 9, 1], [6], [(0, 6, 3, 6, 6)]),  # plain text: the second half
        (
            [-100, -100, 7, 8, -100, 1],
            [6],
            [(0, 6, 3, 5, 3)],
        ),  # the first answer; what follows it was an answer to other words
        ([-100, 6, 7, -100, 9, 1], [3, 3], [(0, 3, 2, 3, 2), (3, 6, 5, 6, 2)]),
        ([-100] * 6, [4, 2], []),  # padding
        ([4, 1, 2, 3, 4, -100], [1, 5], [(1, 6, 3, 6, 4)]),  # a document of one token has no answer
        ([-100, 5, -100, 5, 6, 7], [2, 4], [(2, 6, 4, 6, 3)]),  # its only trained label is in the next document
    ],
)
def test_what_is_written_anew_is_an_answer_or_a_second_half(labels: Any, documents: Any, wanted: Any) -> None:
    found = read_answers(torch.tensor([labels]), [documents], [0])
    assert [(a.start, a.end, a.first, a.last, a.trained) for a in found] == wanted


def test_texts_are_drawn_from_the_students_probabilities_and_stand_where_the_datas_stood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b, seen = made(), {}
    from preheat.models.generation import generate as module

    plain = module.generate
    monkeypatch.setattr(module, "generate", lambda *given, **how: seen.update(how) or plain(*given, **how))
    row = uneven(1)
    found = transform(b, row)
    (answer,) = read_answers(row.labels, row.mask.documents, [0])
    first = answer.first
    wanted = slow_text(b.trained[0], row.tokens[0, :first].tolist(), 32 - first, seen["seed"])
    assert 0 < len(wanted) <= 16
    upto = first + len(wanted)
    assert found.tokens[0, first:upto].tolist() == wanted != row.tokens[0, first:upto].tolist()
    assert torch.equal(found.tokens[0, :first], row.tokens[0, :first])
    assert found.labels[0, first - 1 : upto - 1].tolist() == wanted
    assert (found.labels[0] != -100).sum() == len(wanted)
    assert float(found.aligned[0].sum()) == pytest.approx(row.weight), "a document counts as much as it did"
    assert found.weight == row.weight
    assert torch.equal(transform(b, row).tokens, found.tokens), "a step that is taken again writes the same"
    b.state.step += 1
    assert not torch.equal(transform(b, row).tokens, found.tokens)
    before = torch.random.get_rng_state()
    transform(b, row)
    assert torch.equal(torch.random.get_rng_state(), before), "training's own draws go on as if nothing was written"
    assert b.trained[0].training


def test_the_share_of_the_rows_is_drawn_and_the_others_are_left_alone() -> None:
    b = made("on_policy: 0.25")
    written = 0
    for b.state.step in range(40):
        batch = uneven()
        rows = b.hooks.transforms[-1][1]._draw_rows(batch.rows)
        written += len(rows)
        if b.state.step < 3:
            found = transform(b, batch)
            others = [n for n in range(4) if n not in rows]
            assert torch.equal(found.tokens[others], batch.tokens[others])
            assert torch.equal(found.labels[others], batch.labels[others])
            assert not found.aligned[0][others].any()
    assert 25 <= written <= 55


def slow(b: Any, batch: Batch, *, direction: str, temperature: float, mixture: float) -> float:
    """The mean loss of a batch with the student's texts in it by transformers' own attention, each document alone."""
    (student,), (other,), total = b.parts["trained"], b.parts["teacher"], 0.0
    for row, sizes in enumerate(batch.mask.documents or ()):
        parts = (t[row].split(sizes) for t in (batch.tokens, batch.labels, batch.aligned[0]))
        for tokens, labels, counts in zip(*parts, strict=True):
            mine, theirs = (compute_reference_logits(model, tokens[None])[0, :, :96] for model in (student, other))
            apart = temperature**2 * slow_divergence(mine / temperature, theirs / temperature, direction, None)
            plain = functional.cross_entropy(mine, labels, ignore_index=-100, reduction="none")
            own, data = counts > 0, (counts == 0) & (labels >= 0)
            total += float((counts * apart)[own].sum())
            total += float(((1 - mixture) * plain + mixture * apart)[data].sum())
    return total / batch.weight


@pytest.mark.parametrize(
    ("settings", "beside"), [("", ""), ("divergence: reverse, temperature: 2.0, mixture: 0.7", TOGETHER)]
)
def test_the_loss_is_the_divergence_on_its_own_texts_and_as_ever_on_the_data(settings: str, beside: str) -> None:
    b, batch = made(f"on_policy: 0.5, {settings}", beside), uneven()
    while len(b.hooks.transforms[-1][1]._draw_rows(batch.rows)) != 2:
        b.state.step += 1
    parts = split(batch, [2, 2] if beside else [4])
    changed = [transform(b, part) for part in parts]
    how: dict[str, Any] = {"direction": "reverse", "temperature": 2.0, "mixture": 0.7}
    how = how if settings else {"direction": "forward", "temperature": 1.0, "mixture": 0.5}
    wanted = sum(slow(b, part, **how) * part.weight for part in changed) / batch.weight
    loss = accumulate_gradients(b, parts)
    assert float(loss.total / loss.weight) == pytest.approx(wanted, rel=2e-5)
    told = b.loss.scores(loss.metrics, loss.weight)
    own = sum(int((part.aligned[0] > 0).sum()) for part in changed)
    places = sum(int((part.labels != -100).sum()) for part in changed)
    assert told["on_policy"] == pytest.approx(own / places)
    plain = made(settings, beside)
    assert measure(b, [batch]).loss == pytest.approx(measure(plain, [batch]).loss, rel=1e-6), (
        "an evaluation reads the data"
    )


def test_the_gradient_in_chunks_is_that_of_the_plain_form() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 9, 8, requires_grad=True), torch.nn.Linear(8, 40, bias=False)
    theirs, over, labels = torch.randn(2, 9, 6), torch.randn(43, 6), torch.randint(40, (2, 9))
    counts = torch.where(torch.rand(2, 9) < 0.4, 1.7, 0.0)
    labels[0, :4] = -100
    for mixture in (0.4, 1.0):
        found = []
        for by in (sum_full_loss, lambda *given: sum_chunked_loss(*given, rows=7)):
            row_loss = Distilled(
                TeacherHead(over, 40), direction="reverse", temperature=1.5, mixture=mixture, written=True
            )
            total = by(hidden, head, row_loss, labels, theirs, counts)
            found.append((total.detach(), row_loss.sums, torch.autograd.grad(total, [hidden, head.weight])))
        (one, sums, grads), (other, others, wanted) = found
        assert float(one) == pytest.approx(float(other), rel=1e-5)
        assert difference(dict(enumerate(grads)), dict(enumerate(wanted))) < 2e-6  # type: ignore[arg-type]
        for name, value in sums.items():
            assert float(value) == pytest.approx(float(others[name]), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "beside", "words"),
    [
        ("on_policy: 0.5, cache: kept", "", "on_policy: the student generates new text in every step"),
        (
            "on_policy: 0.5",
            "fsdp: {}",
            "on_policy: the student generates a different number of tokens .* use data_parallel",
        ),
        ("on_policy: 0.5", "context_parallel: {}", "on_policy: sequences that are split across devices"),
    ],
)
def test_where_the_student_cannot_write_it_is_refused(settings: str, beside: str, words: str, tmp_path: Path) -> None:
    folder = teacher()
    recipe = recipes.override(
        tiny(f"{{distillation: {{teacher: {folder}, {settings}}}, {beside}}}"),
        f"data.tokenizer={folder}",
        f"parallel.devices={2 if beside else 1}",
    )
    with pytest.raises(RecipeError, match=words):
        build(recipe, vocabulary=96, device=DEVICE)


def test_a_dry_run_sees_the_losses_of_it_and_nothing_of_the_writing() -> None:
    folder = teacher()
    peaks = []
    for settings in ("", "on_policy: 0.5"):
        recipe = recipes.override(
            tiny(f"{{distillation: {{teacher: {folder}, {settings}}}}}"), f"data.tokenizer={folder}"
        )
        seen = observe(Request(recipe, DEVICE, vocabulary=96), evaluated=False)
        peaks.append((max(seen.peak.values()), sum(seen.flops.values())))
    assert peaks[0][0] <= peaks[1][0] < 1.1 * peaks[0][0]
    assert peaks[0][1] == peaks[1][1]
