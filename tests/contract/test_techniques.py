"""What holds for every technique of the registry. A new technique is tested here without an edit.

Its plain functions, in a loop written by hand, are tested in test_alone*.py. PREHEAT_PAIRS=all (`make test-pairs`) tries all pairs
and not only those that meet in a stage, a slot or a tag.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import STEP, Build, Phase, ProblemCode, Searchable, Slot, Tag, Technique, conflicts_of, registry
from preheat.data.rows.example_kinds import examples_of
from preheat.engine import checkpoint
from preheat.engine.builder import build, build_context
from preheat.engine.evaluate import evaluate
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.models.hf import configure
from preheat.planning import dispatch_recorder
from preheat.planning import dry_run as observing
from preheat.planning.phases import build_fake_batch, track_phases
from preheat.planning.request import Request
from preheat.recipe import field_docs

from ..conftest import DEVICE, difference, split, tiny, uneven
from .settings import BEGINS, BRINGS, CANNOT_RUN_HERE, FAILED_ONCE, FAMILY, FIRST, FURTHER, REFUSED_PAIRS, asked

# Relative norm of each gradient against the plain model, by what a technique says of its numerics.
BOUND = {"exact": 5e-6, "rounding": 0.05}
NAMES = sorted(registry())
RUNS_HERE = [name for name in NAMES if name not in CANNOT_RUN_HERE]
# Each technique at its defaults, and at settings that take other paths.
SETTINGS = [*((name, {}) for name in RUNS_HERE), *FURTHER]


def families(names: Iterable[str]) -> set[str]:
    """The families that techniques ask for."""
    return {FAMILY[name] for name in names if name in FAMILY}


def complete(techniques: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With what brings the tags that these techniques need."""
    chosen = [registry()[name](**settings) for name, settings in techniques.items()]
    missing = {tag for t in chosen for tag in t.needs} - {tag for t in chosen for tag in t.provided()} - {DEVICE.kind}
    return techniques | {BRINGS[tag]: {} for tag in sorted(missing)}


def recipe_of(techniques: dict[str, dict[str, Any]], **more: Any) -> recipes.Recipe:
    """The tiny model's recipe with techniques, of the family that serves them and with what they ask of the rest."""
    family = next(iter(families(techniques)), "llama")
    more_asked = [words for name in techniques for words in asked(name)]
    return recipes.override(tiny(family=family, **more), f"techniques={complete(techniques)}", *more_asked)


def made(techniques: dict[str, dict[str, Any]], **more: Any) -> Build:
    return build(recipe_of(techniques, **more), vocabulary=96, device=DEVICE)


def step(b: Build, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    rows = b.recipe.batch.size
    micro = -(-rows // b.state.accumulation)
    kept: dict[str, torch.Tensor] = {}
    freed = b.parameters() if Tag.STEP_IN_BACKWARD in b.tags else []
    hooks = [p.register_hook(lambda g, name=name: kept.update({name: g.clone()})) for name, p in freed]
    loss = accumulate_gradients(b, split(batch, [micro] * (rows // micro) + ([rows % micro] if rows % micro else [])))
    for hook in hooks:
        hook.remove()
    return float(loss.total / loss.weight), kept or {n: p.grad.clone() for n, p in b.parameters() if p.grad is not None}


def fitting(b: Build) -> Any:
    """A batch of what the build's objective reads."""
    return uneven(examples=examples_of(b.recipe))


def begins(techniques: dict[str, dict[str, Any]], plain: float) -> float:
    """What the first loss is near to."""
    keys = [(name, found.get("loss", found.get("classes"))) for name, found in techniques.items()]
    return next((BEGINS[key] for key in keys if key in BEGINS), plain)


@pytest.fixture(scope="module")
def plain() -> tuple[float, dict[str, torch.Tensor]]:
    return step(made({}), uneven())


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_first_loss_and_gradients_agree_with_the_plain_model(name: str, settings: dict[str, Any], plain: Any) -> None:
    b = made({name: settings})
    loss, grads = step(b, fitting(b))
    cls = registry()[name]
    if cls.numerics == "different":
        shapes, plain_shapes = ({k: g.shape for k, g in found.items()} for found in (grads, plain[1]))
        assert shapes != plain_shapes or difference(grads, plain[1]) > 0
        assert loss == pytest.approx(begins({name: settings}, plain[0]), rel=0.2), (
            "even another model begins near the plain one"
        )
        return
    bound = BOUND["exact"] if settings.get("mode") == "fp32" else BOUND[cls.numerics]
    assert difference(grads, plain[1]) < bound
    assert loss == pytest.approx(plain[0], rel=bound)
    assert all(c.count > 0 and c.what for c in b.changes[name])


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_the_loss_falls(name: str, settings: dict[str, Any]) -> None:
    b = made({name: settings})
    batch = fitting(b)
    losses = []
    for _ in range(12):
        # The loss that evaluation reports: -p log p rises at first.
        measured = evaluate(b, [batch])[0] if name == "dft" else None
        loss = step(b, batch)[0]
        losses.append(loss if measured is None else measured)
        norm, finite = update(b, 0.01).tolist()
        assert finite == 1
        assert norm > 0
    assert losses[-1] < losses[0] - 0.15, losses


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_what_the_dry_run_sees_is_what_a_real_step_does(name: str, settings: dict[str, Any]) -> None:
    """FLOPs equal kernel for kernel, peak memory equal to the byte: the recorder is laid over a real step as well."""
    r = recipe_of({name: settings})
    seen = observing.observe(Request(r, DEVICE, vocabulary=96))
    recorder = dispatch_recorder.Recorder(rounding=64)
    with torch.random.fork_rng():
        real = build(r, vocabulary=96, device=DEVICE)
        for t in [
            *(t for parts in real.parts.values() for part in parts for t in (*part.parameters(), *part.buffers())),
            *(t for s in real.optimizer.state.values() for t in s.values()),
        ]:
            recorder.follow(t)
        track_phases(real, recorder)
        with recorder:
            recorder.phase = Phase.FORWARD
            rows, micro = 4, -(-4 // real.state.accumulation)
            shapes = [micro] * (rows // micro) + ([rows % micro] if rows % micro else [])
            batches = [build_fake_batch(r, n) for n in shapes]
            for batch in batches:
                for t in (batch.tokens, batch.labels, batch.positions):
                    t.zero_()
            recorder.kernels.clear()
            accumulate_gradients(real, batches)
            recorder.begin(Phase.UPDATE)
            update(real, 1e-3)
    peak = observing.peak_by_phase(recorder)
    assert {phase: seen.peak[phase] for phase in STEP} == {phase: peak[phase] for phase in STEP}
    assert sum(seen.flops.values()) == sum(k.flops * n for k, n in recorder.kernels.items())


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_saved_and_loaded_it_goes_on_alike(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    a = made({name: settings})
    batch = fitting(a)
    for _ in range(2):
        step(a, batch)
        update(a, 0.01)
    checkpoint.save(a, checkpoint.Progress(step=2), tmp_path, keep=1)
    b = made({name: settings}, more="seed: 5")
    found, damaged = checkpoint.find(tmp_path)
    assert found is not None
    assert damaged == []
    # One after the other: some draw from the process's generator, which loading puts back.
    went_on = [(step(a, batch)[0], update(a, 0.01).tolist()) for _ in range(2)]
    checkpoint.load(b, found)
    assert [(step(b, batch)[0], update(b, 0.01).tolist()) for _ in range(2)] == went_on


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_yaml_round_trip(name: str, settings: dict[str, Any]) -> None:
    r = recipes.override(tiny(), f"techniques={ {name: settings} }")
    assert recipes.parse(recipes.dump(r)) == r
    assert settings.items() <= dataclasses.asdict(r.techniques[name]).items()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_documented_and_declared(name: str) -> None:
    cls = registry()[name]
    module = sys.modules[cls.__module__]
    for word in ("What:", "Helps:", "Hurts:", "Source:"):
        assert word in (module.__doc__ or ""), f"{name} does not say {word}"
    assert set(field_docs(cls)) >= {f.name for f in dataclasses.fields(cls)}
    assert cls.__module__ == f"preheat.techniques.{name}"


@pytest.mark.parametrize("name", sorted(CANNOT_RUN_HERE))
def test_what_cannot_run_here_says_so_and_why(name: str) -> None:
    with pytest.raises(RecipeError, match=CANNOT_RUN_HERE[name]):
        made({name: {}})


@pytest.mark.parametrize("name", [name for name in RUNS_HERE if issubclass(registry()[name], Searchable)])
def test_its_options_and_fallbacks_are_settings_of_it(name: str) -> None:
    r = tiny()
    context = build_context(r, configure(r, 96), DEVICE)
    technique = registry()[name]()
    assert isinstance(technique, Searchable)
    for other in (*technique.options(context), *technique.fallbacks(context)):
        assert type(other) is type(technique)
    assert all(other != technique for other in technique.fallbacks(context))


def _compatible(a: Technique, b: Technique) -> bool:
    return not (a.claimed() & b.claimed() or a.conflicts & b.provided() or b.conflicts & a.provided())


def _meet(a: type[Technique], b: type[Technique]) -> bool:
    """They act in one stage or on one slot, or speak of the same capability, or one is an objective: where a clash would show."""
    tags = [cls.provides | cls.needs | cls.conflicts for cls in (a, b)]
    return a.stage == b.stage or bool(a.owns & b.owns or tags[0] & tags[1]) or Slot.OBJECTIVE in a.owns | b.owns


PAIRS = [
    (a, b)
    for a, b in itertools.combinations(RUNS_HERE, 2)
    if _compatible(registry()[a](), registry()[b]())
    and len(families((a, b))) < 2
    and (a, b) not in REFUSED_PAIRS
    and (os.environ.get("PREHEAT_PAIRS") == "all" or (a, b) in FAILED_ONCE or _meet(registry()[a], registry()[b]))
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pairs_compose(a: str, b: str, plain: Any) -> None:
    both = made({a: {}, b: {}})
    loss, grads = step(both, fitting(both))
    kinds = {registry()[a].numerics, registry()[b].numerics}
    if "different" not in kinds:
        bound = BOUND["rounding"] if "rounding" in kinds else BOUND["exact"]
        assert difference(grads, plain[1]) < bound
    assert loss == pytest.approx(
        begins({a: {}, b: {}}, plain[0]), rel=0.05 if examples_of(both.recipe).kind == "text" else 0.2
    )
    assert set(both.changes) - {"experts", "dropout"} == set(
        complete({a: {}, b: {}})
    )  # the engine itself tells of those


@pytest.mark.parametrize(("pair", "words"), REFUSED_PAIRS.items(), ids=str)
def test_pairs_that_no_model_serves_are_refused(pair: tuple[str, str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        made({name: {} for name in pair})


def test_in_bf16_checkpointing_gives_the_very_gradients_of_the_blocks_kernel() -> None:
    bf16 = {"mixed_precision": {"mode": "bf16"}, "efficient_attention": {}}
    whole = made(bf16)
    assert whole.changes["efficient_attention"][0].kernel == "blocks"
    loss, grads = step(whole, uneven())
    for mode in ("full", "selective"):
        again = step(made(bf16 | {"activation_checkpointing": {"mode": mode}}), uneven())
        assert again[0] == loss
        assert difference(again[1], grads) == 0


def test_settings_that_bring_no_bf16_say_so() -> None:
    b = made({"mixed_precision": {"mode": "fp32"}, "efficient_attention": {}})
    assert b.changes["efficient_attention"][0].kernel == "flash"
    assert b.slots()["optimizer"] == "plain"


OBJECTIVES = {name for name in NAMES if Slot.OBJECTIVE in registry()[name].owns}


@pytest.mark.parametrize("objective", [None, *sorted(OBJECTIVES)])
def test_all_together(objective: str | None) -> None:
    chosen: list[str] = [objective] if objective else []
    # Its loss is weighted by each token's probability, and rises at first.
    others = set(RUNS_HERE) - OBJECTIVES - {"dft"}
    if objective or os.environ.get("PREHEAT_PAIRS") != "all":
        others -= {"compile"}  # minutes
    for name in sorted(others, key=lambda n: (n not in FIRST, n)):
        fits = all(_compatible(registry()[name](), registry()[other]()) for other in chosen)
        if fits and len(families((*chosen, name))) < 2:
            chosen.append(name)
    assert set(chosen) >= FIRST
    b = made({name: {} for name in chosen})
    # NEFTune's noise moves the loss of one batch, most where a row has one label: means of several are compared.
    count = 8 if objective == "classification" else 4
    losses = []
    for rate in [0.0] * count + [0.01] * (3 * count):
        losses.append(step(b, fitting(b))[0])
        update(b, rate)
    assert fmean(losses[-count:]) < fmean(losses[:count])


# --- check says no where it must ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ("{gradient_accumulation: {steps: 5}}", "at most 4"),
        ("{activation_checkpointing: {every: 9}}", "use at most 3"),
        ("{efficient_attention: {kernel: efficient}}", "needs a CUDA device"),
        ("{lora: {target_modules: [no_such]}}", "matches no linear map"),
        ("{nf4: {}}", "needs frozen-base"),
        ("{peft_adapter: {method: lohaa}}", "did you mean 'loha'"),
        ("{preference: {loss: ipo, label_smoothing: 0.1}}", "ipo has no variant with it"),
        ("{preference: {}, lora: {variant: pissa, rank: 4}}", "is not the original model"),
        ("{preference: {loss: apo_zero, reference: none}}", "leave it out with loss: apo_zero"),
        ("{preference: {}, classification: {}}", "'objective', which classification owns already"),
        ("{preference: {}, regularized_loss: {}}", "'row_loss'"),
        ("{preference: {}, chunked_loss: {kernel: torch}}", "plain cross entropy only"),
        ("{preference: {}, length_curriculum: {}}", "whole-examples"),
        ("{distillation: {}}", "teacher: is not stated"),
        ("{distillation: {}, preference: {}}", "'objective', which distillation owns already"),
        ("{distillation: {}, classification: {}}", "'objective', which classification owns already"),
        ("{classification: {}, tied_embeddings: {}}", "classification-head"),
    ],
)
def test_check_says_no(techniques: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(tiny(techniques), vocabulary=96, device=DEVICE)


def test_two_owners_of_a_slot_are_both_named() -> None:
    chunked, attention = registry()["chunked_loss"](), registry()["efficient_attention"]()
    r = tiny()
    context = build_context(r, configure(r, 96), DEVICE)
    other = dataclasses.make_dataclass(
        "Other",
        [],
        bases=(Technique,),
        frozen=True,
        namespace={
            **{k: getattr(type(chunked), k) for k in ("stage", "numerics", "owns")},
            "apply": lambda *_: None,
            "__module__": "tests.other_loss",
        },
    )
    try:
        found = conflicts_of([chunked, other(), attention], context)
    finally:
        from preheat.core import technique

        technique._REGISTRY.pop("other_loss")
    (problem,) = found
    assert problem.code is ProblemCode.SLOT_TAKEN
    assert "over_logits" in problem.text
    assert {problem.technique, *problem.text.replace(",", "").split()} >= {"chunked_loss", "other_loss"}
