"""Preference and classification against slow references: each document alone through the plain model, whole logits, autograd."""

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy, logsigmoid

from preheat import recipe as recipes
from preheat.core import Batch, ExampleKind, MaskSpec
from preheat.data.loader import collate, evaluation_batches
from preheat.data.packing import Rows, Tokens, cut
from preheat.data.preparation import PreparedData
from preheat.data.rows.example_kinds import require_examples
from preheat.data.rows.formats import Layout
from preheat.engine.builder import build
from preheat.engine.evaluate import evaluate, measure
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import DataError, RecipeError, RunError
from preheat.models.generation.generate import generate
from preheat.recipe import Sample
from preheat.run.reader import Reader
from preheat.techniques.classification import compute_accuracy_and_f1, confusion_matrix, replace_head
from preheat.techniques.dynamic_batch import regroup_batches
from preheat.techniques.preference import preference_loss

from ...conftest import DEVICE, difference, split, tiny, uneven

_LAYOUT = Layout("text", {}, "text")
PAIRS, LIKED, CLASSES = ExampleKind("pairs"), ExampleKind("desirable"), ExampleKind("classes", 5)
TOGETHER = "chunked_loss: {rows: 7}, gradient_accumulation: {steps: 3}, activation_checkpointing: {}"


def moved(techniques: str, **more: Any) -> Any:
    """A build whose trained weights are away from where they began."""
    made = build(tiny(techniques, **more), vocabulary=96, device=DEVICE)
    torch.manual_seed(3)
    with torch.no_grad():
        for _, p in made.parameters():
            p += 0.03 * torch.randn_like(p)
    return made


def documents(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each document that has a label."""
    found = []
    for tokens, labels, sizes in zip(batch.tokens, batch.labels, batch.mask.documents or (), strict=True):
        for t, n in zip(tokens.split(sizes), labels.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            if (n >= 0).any():
                found.append((t, n))
    return found


def slow_logp(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over each document alone, and numbers of labels. Checkpointed layers run again in backward: the kernel is put back after it."""
    model.set_attn_implementation("eager")
    losses = [
        cross_entropy(model(t[None], use_cache=False).logits[0].float(), n, reduction="sum")
        for t, n in documents(batch)
    ]
    return -torch.stack(losses), torch.tensor([float((n >= 0).sum()) for _, n in documents(batch)])


def slow_loss(
    settings: dict[str, Any], batch: Batch, now: torch.Tensor, before: torch.Tensor, n: torch.Tensor
) -> torch.Tensor:
    """The papers' formulas, pair by pair; the mean."""
    loss, beta = settings.get("loss", "dpo"), settings.get("beta", 0.1)
    liked = [k for row in batch.desirable for k in row]
    if loss == "kto":  # TRL's formula, with a row in place of its batch
        divergences = [max(float(d), 0.0) for d in settings["divergences"] for _ in range(2)]
        terms = []
        for a, b, k, kl in zip(now, before, liked, divergences, strict=True):
            chosen = settings["desirable_weight"] * (1 - torch.sigmoid(beta * ((a - b) - kl)))
            rejected = settings["undesirable_weight"] * (1 - torch.sigmoid(beta * (kl - (a - b))))
            terms.append(chosen if k else rejected)
        return torch.stack(terms).mean()
    if loss == "apo_zero":
        terms = [
            (1 - torch.sigmoid(beta * (a - b))) if k else torch.sigmoid(beta * (a - b))
            for a, b, k in zip(now, before, liked, strict=True)
        ]
        return torch.stack(terms).mean()
    if settings.get("length_normalized"):
        now, before = now / n, before / n
    terms = []
    for w in range(0, len(now), 2):
        chosen, rejected = now[w], now[w + 1]
        ratio = (chosen - before[w]) - (rejected - before[w + 1])
        means = now[w] / n[w], now[w + 1] / n[w + 1]
        if loss == "dpo":
            e = settings.get("label_smoothing", 0.0)
            term = -(1 - e) * logsigmoid(beta * ratio) - e * logsigmoid(-beta * ratio)
        elif loss == "ipo":
            term = (ratio - 1 / (2 * beta)) ** 2
        elif loss == "hinge":
            term = torch.relu(1 - beta * ratio)
        elif loss == "simpo":
            term = -logsigmoid(beta * (means[0] - means[1]) - settings["gamma"])
        elif loss == "cpo":
            term = -logsigmoid(beta * (chosen - rejected)) - means[0]
        else:
            odds = [torch.log(torch.exp(m) / (1 - torch.exp(m))) for m in means]
            term = -means[0] - beta * logsigmoid(odds[0] - odds[1])
        if settings.get("nll"):
            term = term - settings["nll"] * (chosen if settings.get("length_normalized") else means[0])
        terms.append(term)
    return torch.stack(terms).mean()


def exchanged(batch: Batch) -> Batch:
    """Each prompt with the answer of the other document of its row, in rows of any length."""
    rows = []
    for row, sizes in enumerate(batch.mask.documents or ()):
        texts = []
        for n in range(2):
            span = slice(sum(sizes[:n]), sum(sizes[: n + 1]))
            tokens, labels = batch.tokens[row, span].tolist(), batch.labels[row, span].tolist()
            prompt = next(i for i, label in enumerate(labels) if label >= 0) + 1
            texts.append((tokens[:prompt], tokens[prompt:], labels[prompt - 1 :]))
        for (prompt_tokens, *_), (_, answer, labels) in ((texts[0], texts[1]), (texts[1], texts[0])):
            rows.append((prompt_tokens + answer, [-100] * (len(prompt_tokens) - 1) + labels))
    length = max(len(tokens) for tokens, _ in rows)
    padded = [(t + [0] * (length - len(t)), n + [-100] * (length - len(n))) for t, n in rows]
    tokens, labels = (torch.tensor(part) for part in zip(*padded, strict=True))
    documents = tuple((len(t), *([length - len(t)] if len(t) < length else [])) for t, _ in rows)
    mask = MaskSpec(documents=documents)
    return replace(batch, tokens=tokens, labels=labels, mask=mask, desirable=((1,),) * len(rows))


@pytest.mark.parametrize("beside", ["", TOGETHER, f"lora: {{rank: 4}}, {TOGETHER}"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.3, "label_smoothing": 0.1, "nll": 0.2},
        {"loss": "ipo", "length_normalized": True},
        {"loss": "hinge", "beta": 0.05},
        {"loss": "simpo", "beta": 2.0, "gamma": 0.3},
        {"loss": "cpo"},
        {"loss": "orpo", "beta": 0.2},
        {"loss": "apo_zero"},
        {"loss": "kto", "beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ],
    ids=str,
)
def test_losses_and_gradients_equal_the_slow_reference(settings: dict[str, Any], beside: str) -> None:
    techniques = f"{{preference: {settings}, {beside}}}".replace("'", "").replace("True", "true")
    made = moved(techniques)
    single = settings.get("loss") in ("apo_zero", "kto")
    batch = uneven(examples=LIKED if single else PAIRS)
    model: Any = made.trained[0]
    with torch.no_grad():
        first = build(tiny(), vocabulary=96, device=DEVICE).trained[0]
        before, _ = slow_logp(first, batch)
        if settings.get("loss") == "kto":
            other = exchanged(batch)
            ratios = slow_logp(model, other)[0] - slow_logp(first, other)[0]
            settings = settings | {"divergences": ratios.view(4, 2).mean(dim=1)}
            assert (settings["divergences"] > 0).any()
    now, n = slow_logp(model, batch)
    wanted = slow_loss(settings, batch, now, before, n)
    wanted.backward()
    model.set_attn_implementation("preheat")
    expected = {name: p.grad.clone() for name, p in made.parameters()}
    for _, p in made.parameters():
        p.grad = None
    found = accumulate_gradients(made, split(batch, [2, 2] if made.state.accumulation > 1 else [4]))
    assert found.weight == (8 if single else 4)
    assert float(found.total / found.weight) == pytest.approx(wanted.item(), rel=1e-6)
    assert difference({name: p.grad for name, p in made.parameters()}, expected) < 3e-6


def test_the_reference_stays_as_the_model_was() -> None:
    made, batch = build(tiny("{preference: {}}"), vocabulary=96, device=DEVICE), uneven(examples=PAIRS)
    first = {name: p.clone() for name, p in made.trained[0].named_parameters()}
    for _ in range(2):
        accumulate_gradients(made, [batch])
        update(made, 0.01)
    kept = dict(made.parts["reference"][0].named_parameters())
    assert all(torch.equal(kept[name], value) for name, value in first.items())
    assert not any(p.requires_grad or p.grad is not None for p in kept.values())
    assert any(not torch.equal(p, first[name]) for name, p in made.trained[0].named_parameters())


def test_under_an_adapter_there_is_no_second_copy_and_metrics_say_what_was_learnt() -> None:
    made, batch = build(tiny("{preference: {}, lora: {}}"), vocabulary=96, device=DEVICE), uneven(examples=PAIRS)
    assert set(made.parts) == {"trained"}
    loss, weight, scores = measure(made, split(batch, [1, 3]))
    assert (loss, weight) == (pytest.approx(math.log(2)), 4)
    assert scores["reward_margin"] == 0
    for _ in range(8):
        seen = accumulate_gradients(made, split(batch, [3, 1]))
        update(made, 0.01)
    scores = made.loss.scores(seen.metrics, seen.weight)
    assert scores["reward_accuracy"] == 1
    assert scores["reward_margin"] > 0.5
    assert scores["chosen_logp"] > scores["rejected_logp"]
    after = measure(made, [batch])
    assert after.scores["reward_accuracy"] == 1
    assert after.loss < math.log(2) - 0.2
    assert evaluate(made, [batch]) == after[:2]
    assert all(p.requires_grad for n, p in made.trained[0].named_parameters() if "lora_" in n)


def test_dropout_moves_the_policy_but_not_the_reference() -> None:
    made, batch = (
        build(tiny("{preference: {}, lora: {dropout: 0.5}}"), vocabulary=96, device=DEVICE),
        uneven(examples=PAIRS),
    )
    loss = accumulate_gradients(made, [batch])
    assert float(loss.total / 4) == pytest.approx(math.log(2))  # B is zero, and the base has no dropout
    assert made.trained[0].training


def test_preference_loss_of_a_pair() -> None:
    one, two = torch.tensor([-3.0]), torch.tensor([-9.0])
    assert float(preference_loss(one, two, beta=0.5)) == pytest.approx(math.log(1 + math.exp(-3)))
    assert float(preference_loss(one, two, one, two, loss="ipo", beta=0.25)) == 4.0
    certain = torch.tensor([0.0], requires_grad=True)  # an answer of probability 1
    preference_loss(certain, two, loss="orpo").sum().backward()
    assert certain.grad is not None
    assert torch.isfinite(certain.grad).all()
    with pytest.raises(ValueError, match="loss: dpoo is none of dpo"):
        preference_loss(one, two, loss="dpoo")


@pytest.mark.parametrize("beside", ["", f"lora: {{rank: 4}}, nf4: {{}}, {TOGETHER}"])
def test_classification_equals_the_slow_reference(beside: str) -> None:
    made, batch = moved(f"{{classification: {{classes: 5}}, {beside}}}"), uneven(examples=CLASSES)
    model: Any = made.trained[0]
    assert model.lm_head.weight.shape == (5, 32)
    assert model.lm_head.weight.requires_grad
    logp, _ = slow_logp(model, batch)
    logp.mean().neg().backward()
    model.set_attn_implementation("preheat")
    expected = {name: p.grad.clone() for name, p in made.parameters()}
    assert "lm_head.weight" in expected
    for _, p in made.parameters():
        p.grad = None
    found = accumulate_gradients(made, split(batch, [2, 2] if made.state.accumulation > 1 else [4]))
    assert found.weight == len(documents(batch))
    assert float(found.total / found.weight) == pytest.approx(-logp.mean().item(), rel=1e-6)
    assert difference({name: p.grad for name, p in made.parameters()}, expected) < 3e-6
    with torch.no_grad():
        model.set_attn_implementation("eager")
        predicted = [int(model(t[None], use_cache=False).logits[0, -1].argmax()) for t, _ in documents(batch)]
    truth = [int(n[-1]) for _, n in documents(batch)]
    model.set_attn_implementation("preheat")
    scores = measure(made, split(batch, [1, 3])).scores
    assert scores["accuracy"] == pytest.approx(np.mean(np.equal(predicted, truth)))
    assert scores["macro_f1"] == pytest.approx(slow_f1(predicted, truth))


def slow_f1(predicted: list[int], truth: list[int]) -> float:
    found = []
    for k in sorted({*predicted, *truth}):
        tp = sum(p == t == k for p, t in zip(predicted, truth, strict=True))
        wrong = sum((p == k) != (t == k) for p, t in zip(predicted, truth, strict=True))
        found.append(2 * tp / (2 * tp + wrong))
    return sum(found) / len(found)


def test_confusion_and_f1() -> None:
    draw = np.random.default_rng(0)
    predicted, truth = draw.integers(0, 4, 50), draw.integers(0, 4, 50)
    table = confusion_matrix(torch.tensor(predicted), torch.tensor(truth), 6)
    assert table.sum() == 50
    assert compute_accuracy_and_f1(table)["macro_f1"] == pytest.approx(slow_f1(predicted.tolist(), truth.tolist()))


def test_drawing_a_head_leaves_the_generators_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=16, **sizes))
    before = torch.get_rng_state()
    replace_head(model, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded


def test_a_tied_head_is_not_replaced_by_hand() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=16,
        tie_word_embeddings=True,
    )
    with pytest.raises(ValueError, match="tied to the embedding"):
        replace_head(LlamaForCausalLM(config), 3)


# --- from tokens to batches ----------------------------------------------------------------------------------------


def tokens(count: int, *, group: int = 1, labels: int = 0, trained: bool = True, seed: int = 0) -> Tokens:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(4, 12, count * group)
    marks = np.zeros(sizes.sum(), np.uint8)
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        marks[end - size // 2 : end] = trained
    ids = draw.integers(0, 96, sizes.sum()).astype(np.uint16)
    kinds = np.arange(count, dtype=np.int64) % labels if labels else None
    return Tokens(ids, np.cumsum(sizes), marks, kinds, group)


KINDS = {
    "text": tokens(40),
    "pairs": tokens(40, group=2),
    "desirable": tokens(40, labels=2),
    "classes": tokens(40, labels=5, trained=False),
}


def test_tokens_say_what_they_hold() -> None:
    for kind, found in KINDS.items():
        assert (
            pickle.loads(pickle.dumps(found)).examples == found.examples == ExampleKind(kind, 5 * (kind == "classes"))
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pairs", "desirable", "classes"])
def test_batches_have_every_example_once(kind: str) -> None:
    rows = Rows(KINDS[kind], 32, "whole", pad=95)
    batches = list(evaluation_batches(rows, micro=3, limit=99))
    assert sum(b.weight for b in batches) == 40
    assert sum(b.weight for b in regroup_batches(batches, 2)) == 40
    judged = [n for b in regroup_batches(batches, 2) for row in b.desirable for n in row]
    assert sorted(judged) == ([0] * 20 + [1] * 20 if kind == "desirable" else [])
    assert all(b.group == (2 if kind == "pairs" else 1) for b in regroup_batches(batches, 2))
    if kind == "pairs":  # chosen and rejected of one example stand side by side
        found = {tuple(t.tolist()) for b in batches for t, _ in documents(b)}
        assert len(found) == 80
        whole = [a.tolist() for a in np.split(KINDS[kind].ids, KINDS[kind].offsets[:-1])]
        places = [whole.index(t.tolist()) for b in batches for t, _ in documents(b)]
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(places[0::2], places[1::2], strict=True))
    if kind != "classes":
        with pytest.raises(AssertionError, match="not cut"):
            cut([rows.row(0)], 8)


def test_pairs_through_rows_have_the_loss_of_the_plain_model() -> None:
    rows = Rows(KINDS["pairs"], 32, "whole", pad=95)
    made = moved("{preference: {}}")
    batch = collate([(n, rows.row(n)) for n in range(4)])
    with torch.no_grad():
        before, _ = slow_logp(made.parts["reference"][0], batch)
        now, n = slow_logp(made.trained[0], batch)
    for part in (made.trained[0], made.parts["reference"][0]):
        part.set_attn_implementation("preheat")
    assert measure(made, [batch]).loss == pytest.approx(float(slow_loss({}, batch, now, before, n)), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "techniques", "words", "error"),
    [
        (
            "text",
            "preference: {}",
            "holds text to continue, but techniques.preference reads pairs.*; leave techniques.preference out",
            DataError,
        ),
        ("pairs", "", "but next-token training reads text to continue; add techniques.preference", DataError),
        ("classes", "", "add techniques.classification", DataError),
        ("desirable", "preference: {}", "loss: kto", DataError),
        ("pairs", "preference: {loss: apo_zero}", r"add techniques.preference \(loss: dpo", DataError),
        ("desirable", "classification: {}", "reads documents of a class each", DataError),
        (
            "classes",
            "classification: {classes: 4}",
            r"classification.classes: 4, but the data has class 4 .*set it to 5",
            RecipeError,
        ),
    ],
)
def test_data_of_another_kind_is_refused(kind: str, techniques: str, words: str, error: type[Exception]) -> None:
    rows = Rows(KINDS[kind], 32, "whole")
    data = PreparedData(None, rows, rows, "my.jsonl", {}, "", _LAYOUT)  # type: ignore[arg-type]
    with pytest.raises(error, match=words) as refused:
        require_examples(tiny(f"{{{techniques}}}"), data)
    assert "\n" not in str(refused.value)


def test_data_that_fits_passes_and_a_stream_without_pairs_is_refused_at_its_first_batch() -> None:
    for kind, techniques in [("text", ""), ("pairs", "preference: {}"), ("classes", "classification: {classes: 6}")]:
        rows = Rows(KINDS[kind], 32, "whole")
        require_examples(tiny(f"{{{techniques}}}"), PreparedData(None, rows, rows, "", {}, "", _LAYOUT))  # type: ignore[arg-type]
    made = build(tiny("{preference: {}}"), vocabulary=96, device=DEVICE)
    with pytest.raises(DataError, match="loss dpo finds no pairs in the sequences"):
        accumulate_gradients(made, [uneven()])


@pytest.mark.slow
def test_scores_stand_in_the_run_and_a_resumed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import preheat.data
    from preheat.training.loop import train

    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 200)
    prepare = preheat.data.prepare

    def with_pairs(*a: Any, **k: Any) -> Any:
        made = prepare(*a, **k)
        made.train, made.validation = (Rows(tokens(n, group=2, seed=n), 32, "whole") for n in (80, 20))
        return made

    monkeypatch.setattr(preheat.data, "prepare", with_pairs)
    recipe = tiny(
        "{preference: {}, chunked_loss: {}}",
        more=f"data: {{source: {tmp_path}/text.txt, vocab_size: 270, validation: 0}}\ncheckpoint: {{every: 2}}\n",
    )
    recipe = recipes.override(
        recipe, "model.vocab_size=320", "stop.max_steps=4", "schedule={kind: constant, warmup_ratio: 0}"
    )
    whole = train(recipe, out=tmp_path / "whole")
    train(recipes.override(recipe, "stop.max_steps=2"), out=tmp_path / "parts")
    parts = train(recipe, out=tmp_path / "parts", resume=True)
    assert parts["validation_loss"] == whole["validation_loss"]
    assert parts["scores"] == whole["scores"]
    assert {"reward_accuracy", "reward_margin", "chosen_logp", "rejected_logp"} == whole["scores"].keys()
    run = Reader(tmp_path / "whole")
    assert run.metrics()[-1].loss == whole["loss"]
    assert 0 <= run.metrics()[-1].scores["reward_accuracy"] <= 1
    assert run.evaluations()[-1].scores["validation_reward_margin"] == whole["scores"]["reward_margin"]
    assert run.evaluations()[-1].tokens == 20


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_classifier_becomes_that_of_transformers(family: str) -> None:
    from preheat.ops.classification_head import convert_to_sequence_classifier

    made = moved("{classification: {classes: 3}}", family=family)
    with pytest.raises(RunError, match="over 3 classes: it generates no text"):
        generate(made.trained[0], None, [[0]], Sample(max_new_tokens=2))  # type: ignore[arg-type]
    theirs = convert_to_sequence_classifier(made.trained[0], pad=95)
    assert theirs.config.num_labels == 3
    for found, _ in documents(uneven(examples=CLASSES)):
        found = found[:24].clamp(max=94)
        padded = torch.cat([found, torch.full((3,), 95)])[None]
        with torch.no_grad():
            made.trained[0].set_attn_implementation("eager")  # type: ignore[operator]
            ours = made.trained[0](found[None], use_cache=False).logits[0, -1]
            assert torch.allclose(theirs(padded, attention_mask=(padded != 95).long()).logits[0], ours, atol=1e-6)
