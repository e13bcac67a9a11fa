"""What holds for every technique of the registry. A new technique is tested here without an edit, but for its plain function."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.engine import checkpoint
from preheat.engine.build import build, context_of
from preheat.engine.step import gradients, update
from preheat.errors import RecipeError
from preheat.models.adapter import configure
from preheat.planning import observe as observing
from preheat.recipe import field_docs
from preheat.technique import Build, Technique, conflicts_of, registry

from ..conftest import DEVICE, difference, split, tiny, uneven

# Relative norm of each gradient against the plain model, by what a technique says of its numerics.
BOUND = {"exact": 5e-6, "rounding": 0.05}
# What cannot run on a CPU stands here with its reason; any other skip fails.
CANNOT_RUN_HERE: dict[str, str] = {}

NAMES = sorted(registry())
# Each technique at its defaults, and at settings that take other paths.
SETTINGS = [
    *((name, {}) for name in NAMES),
    ("activation_checkpointing", {"mode": "selective", "every": 2}),
    ("chunked_loss", {"rows": 7}),
    ("efficient_attention", {"kernel": "blocks"}),
    ("gradient_accumulation", {"steps": 3}),
    ("regularized_loss", {"label_smoothing": 0.1, "z": 0.0}),
    ("mixed_precision", {"mode": "bf16_weights"}),
    ("mixed_precision", {"mode": "fp32"}),
]


def made(techniques: dict[str, dict[str, Any]], **more: Any) -> Build:
    return build(recipes.override(tiny(**more), f"techniques={techniques}"), vocabulary=96, device=DEVICE)


def step(b: Build, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    rows = b.recipe.batch.size
    micro = -(-rows // b.accumulation)
    loss = gradients(b, split(batch, [micro] * (rows // micro) + ([rows % micro] if rows % micro else [])))
    return float(loss.total / loss.weight), {name: p.grad.clone() for name, p in b.parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def plain() -> tuple[float, dict[str, torch.Tensor]]:
    return step(made({}), uneven())


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_first_loss_and_gradients_agree_with_the_plain_model(name: str, settings: dict[str, Any], plain: Any) -> None:
    b = made({name: settings})
    loss, grads = step(b, uneven())
    cls = registry()[name]
    if cls.numerics == "different":
        assert grads.keys() != plain[1].keys() or difference(grads, plain[1]) > 0
        assert loss == pytest.approx(plain[0], rel=0.2), "even another model begins near the plain one"
        return
    bound = BOUND["exact"] if settings.get("mode") == "fp32" else BOUND[cls.numerics]
    assert difference(grads, plain[1]) < bound
    assert loss == pytest.approx(plain[0], rel=bound)
    assert all(c.count > 0 and c.what for c in b.changes[name])


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_the_loss_falls(name: str, settings: dict[str, Any]) -> None:
    b, batch = made({name: settings}), uneven()
    losses = []
    for _ in range(12):
        losses.append(step(b, batch)[0])
        norm, finite = update(b, 0.01).tolist()
        assert finite == 1
        assert norm > 0
    assert losses[-1] < losses[0] - 0.15, losses


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_what_the_dry_run_sees_is_what_a_real_step_does(name: str, settings: dict[str, Any]) -> None:
    """FLOPs equal kernel for kernel, peak memory equal to the byte: the recorder is laid over a real step as well."""
    r = recipes.override(tiny(), f"techniques={ {name: settings} }")
    seen = observing.observe(r, vocabulary=96, device=DEVICE)
    recorder = observing.Recorder(rounding=64)
    with torch.random.fork_rng():
        real = build(r, vocabulary=96, device=DEVICE)
        for t in [
            *(t for part in real.trained for t in (*part.parameters(), *part.buffers())),
            *(t for s in real.optimizer.state.values() for t in s.values()),
        ]:
            recorder.follow(t)
        with recorder:
            recorder.phase = "forward"
            rows, micro = 4, -(-4 // real.accumulation)
            shapes = [micro] * (rows // micro) + ([rows % micro] if rows % micro else [])
            batches = [observing._fake_batch(r, n) for n in shapes]
            for batch in batches:
                for t in (batch.tokens, batch.labels, batch.positions):
                    t.zero_()
            recorder.kernels.clear()
            gradients(real, batches)
            recorder.phase = "update"
            update(real, 1e-3)
    peak, _ = observing._replay(recorder.log, {}, set())
    assert {k: seen.peak[k] for k in ("forward", "backward", "update")} == {
        k: peak[k] for k in ("forward", "backward", "update")
    }
    assert sum(seen.flops.values()) == sum(k.flops * n for k, n in recorder.kernels.items())


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_saved_and_loaded_it_goes_on_alike(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    a, batch = made({name: settings}), uneven()
    for _ in range(2):
        step(a, batch)
        update(a, 0.01)
    checkpoint.save(a, checkpoint.Progress(step=2), tmp_path, keep=1)
    b = made({name: settings}, more="seed: 5")
    found, damaged = checkpoint.find(tmp_path)
    assert found is not None
    assert damaged == []
    checkpoint.load(b, found)
    for _ in range(2):
        assert step(a, batch)[0] == step(b, batch)[0]
        assert update(a, 0.01).tolist() == update(b, 0.01).tolist()


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
    assert name not in CANNOT_RUN_HERE


@pytest.mark.parametrize("name", NAMES)
def test_its_options_and_rungs_are_settings_of_it(name: str) -> None:
    r = tiny()
    context = context_of(r, configure(r, 96), DEVICE)
    technique = registry()[name]()
    for other in (*technique.options(context), *technique.rungs(context)):
        assert type(other) is type(technique)
    assert all(other != technique for other in technique.rungs(context))


def _compatible(a: Technique, b: Technique) -> bool:
    return not (a.owned() & b.owned() or a.conflicts & b.provided() or b.conflicts & a.provided())


# Of techniques that exclude each other, those that are tried together with everything else.
FIRST = {"activation_checkpointing", "chunked_loss", "efficient_attention", "gradient_accumulation", "lora", "mixed_precision"}
PAIRS = [(a, b) for a, b in itertools.combinations(NAMES, 2) if _compatible(registry()[a](), registry()[b]())]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pairs_compose(a: str, b: str, plain: Any) -> None:
    both = made({a: {}, b: {}})
    loss, grads = step(both, uneven())
    kinds = {registry()[a].numerics, registry()[b].numerics}
    if "different" not in kinds:
        bound = BOUND["rounding"] if "rounding" in kinds else BOUND["exact"]
        assert difference(grads, plain[1]) < bound
    assert loss == pytest.approx(plain[0], rel=0.05)
    assert set(both.changes) == {a, b}


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


def test_all_together() -> None:
    chosen: list[str] = []
    for name in sorted(NAMES, key=lambda n: (n not in FIRST, n)):
        if all(_compatible(registry()[name](), registry()[other]()) for other in chosen):
            chosen.append(name)
    assert set(chosen) >= FIRST
    b = made({name: {} for name in chosen})
    first = step(b, uneven())[0]
    for _ in range(8):
        update(b, 0.01)
        last = step(b, uneven())[0]
    assert last < first


# --- check says no where it must ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ("{gradient_accumulation: {steps: 5}}", "at most 4"),
        ("{activation_checkpointing: {every: 9}}", "use at most 3"),
        ("{efficient_attention: {kernel: efficient}}", "needs a CUDA device"),
        ("{lora: {targets: [no_such]}}", "matches no linear map"),
    ],
)
def test_check_says_no(techniques: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(tiny(techniques), vocabulary=96, device=DEVICE)


def test_two_owners_of_a_slot_are_both_named() -> None:
    chunked, attention = registry()["chunked_loss"](), registry()["efficient_attention"]()
    r = tiny()
    context = context_of(r, configure(r, 96), DEVICE)
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
        from preheat import technique

        technique._REGISTRY.pop("other_loss")
    assert len(found) == 1
    assert "over_logits" in found[0][1]
    assert {found[0][0], *found[0][1].replace(",", "").split()} >= {"chunked_loss", "other_loss"}


# --- the plain functions, in a loop written by hand -----------------------------------------------------------------


def _by_hand() -> tuple[Any, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=96
    )
    return LlamaForCausalLM(config), torch.randint(96, (4, 16))


def _falls(model: Any, tokens: torch.Tensor, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    losses = []
    for _ in range(15):
        losses.append(float(backward(model, tokens)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.15, losses


def _plain_backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def test_alone_gradient_accumulation() -> None:
    from preheat.techniques.gradient_accumulation import accumulate

    model, tokens = _by_hand()
    model.zero_grad()
    _plain_backward(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    accumulate(tokens.split(1), lambda part: model(part, labels=part).loss * part[:, 1:].numel(), tokens[:, 1:].numel())
    assert difference({n: p.grad for n, p in model.named_parameters()}, whole) < 1e-6


def test_alone_activation_checkpointing() -> None:
    from preheat import checkpoint_layers

    model, tokens = _by_hand()
    _plain_backward(model, tokens)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    assert checkpoint_layers(model.model.layers, keep="products") == 3
    _plain_backward(model, tokens)
    assert difference({n: p.grad for n, p in model.named_parameters()}, whole) == 0
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens, use_cache=True)
    with torch.no_grad():
        model(tokens, use_cache=True)


def test_alone_chunked_loss() -> None:
    from preheat.techniques.chunked_loss import chunked_cross_entropy

    model, tokens = _by_hand()

    def backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.model(tokens).last_hidden_state
        loss = chunked_cross_entropy(hidden[:, :-1], model.lm_head, tokens[:, 1:], rows=10) / tokens[:, 1:].numel()
        loss.backward()
        return loss.detach()

    assert float(backward(model, tokens)) == pytest.approx(float(model(tokens, labels=tokens).loss.detach()), rel=1e-6)
    model.zero_grad()
    _falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), backward)


def test_alone_mixed_precision() -> None:
    from preheat.techniques.mixed_precision import autocast, stochastic_adamw, to_bf16

    model, tokens = _by_hand()
    with autocast("cpu"):
        assert model(tokens).logits.dtype == torch.bfloat16
    to_bf16(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    _falls(model, tokens, stochastic_adamw(model.parameters(), lr=0.01), _plain_backward)


def test_alone_lora() -> None:
    from preheat import add_lora
    from preheat.techniques.lora import merge_lora

    model, tokens = _by_hand()
    base = model(tokens).logits.detach()
    names = add_lora(model, rank=4)
    assert len(names) == 21
    assert torch.equal(model(tokens).logits, base), "B is zero: the adapted model starts as the base"
    trained = [p for p in model.parameters() if p.requires_grad]
    _falls(model, tokens, torch.optim.AdamW(trained, lr=0.05), _plain_backward)
    tuned = model(tokens).logits.detach()
    assert merge_lora(model) == 21
    assert float((model(tokens).logits - tuned).abs().max()) < 1e-5


def test_alone_efficient_attention() -> None:
    from preheat.ops.attention import reference_attention
    from preheat.technique import MaskSpec
    from preheat.techniques.efficient_attention import attend

    q, k, v = torch.randn(2, 8, 40, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    for mask in (MaskSpec(), MaskSpec(causal=False), MaskSpec(documents=((10, 30), (40,)))):
        for kernel in ("flash", "blocks"):
            a, b = attend(q, k, v, mask=mask, kernel=kernel), reference_attention(q, k, v, mask, 0.25)
            assert float((a - b).norm() / b.norm()) < 1e-6


def _by(optimizer: Any) -> None:
    model, tokens = _by_hand()
    _falls(model, tokens, optimizer(model), _plain_backward)


def test_alone_lion() -> None:
    from preheat.techniques.lion import lion_optimizer

    _by(lambda model: lion_optimizer(model.parameters(), lr=0.003))


def test_alone_muon() -> None:
    from preheat.techniques.muon import muon_optimizer

    def make(model: Any) -> Any:
        ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        return muon_optimizer(model.parameters(), by_adamw=ends, lr=0.01)

    _by(make)


def test_alone_adafactor() -> None:
    from preheat.techniques.adafactor import adafactor_optimizer

    _by(lambda model: adafactor_optimizer(model.parameters(), lr=0.01))


def test_alone_regularized_loss() -> None:
    from preheat.techniques.regularized_loss import regularized_cross_entropy

    model, tokens = _by_hand()

    def backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = regularized_cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.1, z=1e-3).mean()
        loss.backward()
        return loss.detach()

    _falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), backward)


def test_every_technique_is_tested_alone() -> None:
    here = globals()
    assert [n for n in NAMES if f"test_alone_{n}" not in here] == []
