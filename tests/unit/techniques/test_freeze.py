"""Frozen weights, gradual unfreezing, and rates of groups of weights: against torch's optimizer on transformers' model."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from preheat import recipe as recipes
from preheat.core import Build, MaskSpec, Slot, registry
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.hardware.probe import probe
from preheat.planning.plan import plan
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline

from ...conftest import tiny, uneven

OPTIMIZERS = sorted(
    name
    for name, cls in registry().items()
    if (Slot.OPTIMIZER in cls.owns or name == "optimizer_in_backward")
    and name not in ("mixed_precision", "optimizer_offload")  # of its own below; needs a GPU
)


def made(techniques: str = "{}", *overrides: str) -> Build:
    recipe = recipes.override(tiny(techniques), "optimizer.max_grad_norm=0", *overrides)
    return build(recipe, vocabulary=96, device=probe("cpu"))


def weights(b: Build) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in b.trained[0].named_parameters()}


def steps(b: Build, count: int, first: int = 0) -> None:
    for n in range(first, first + count):
        accumulate_gradients(b, [plain_batch(n)], 0.01)
        update(b, 0.01)


def plain_batch(seed: int) -> Any:
    """Rows that are one document each and trained as a whole, as transformers' own loss takes them."""
    batch = uneven(seed=seed)
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    labels = torch.roll(batch.tokens, -1, 1)
    return dataclasses.replace(batch, labels=labels, positions=positions, mask=MaskSpec(), weight=float(labels.numel()))


def by_hand(b: Build, groups: Any, count: int) -> dict[str, torch.Tensor]:
    """The weights after as many steps of torch's AdamW; `groups` makes its groups of the model in each step."""
    source = b.trained[0]
    model = AutoModelForCausalLM.from_config(copy.deepcopy(source.config), attn_implementation="eager")
    model.load_state_dict(source.state_dict())
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for n in range(count):
        batch = plain_batch(n)
        logits = model(input_ids=batch.tokens).logits
        F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [
        ("{layers: 1}", lambda name: ".layers.2." in name),
        ("{train: [head, norms]}", lambda name: "lm_head" in name or "norm" in name),
        ("{layers: 2, train: [embeddings], frozen: [mlp]}", lambda name: "embed" in name or "2.self" in name or "1.self" in name or ("layernorm" in name and ".0." not in name)),
        ("{frozen: [embeddings, biases]}", lambda name: "embed" not in name),
    ],
)  # fmt: skip
def test_only_the_named_weights_are_trained(freeze: str, trained: Any) -> None:
    if "biases" in freeze:
        with pytest.raises(RecipeError, match="'biases' matches no parameter"):
            made(f"{{freeze: {freeze}}}", "model.tie_embeddings=false")
        freeze = freeze.replace(", biases", "")
    b = made(f"{{freeze: {freeze}}}", "model.tie_embeddings=false", "optimizer.weight_decay=0")
    before = weights(b)
    names = {name for name in before if trained(name)}
    assert {name for name, p in b.trained[0].named_parameters() if p.requires_grad} == names
    expected = by_hand(
        b, lambda model: [{"params": [p for n, p in model.named_parameters() if n in names], "weight_decay": 0}], 3
    )
    steps(b, 3)
    after = weights(b)
    assert {name for name in after if not torch.equal(after[name], before[name])} == names
    assert_close(after, expected)


@pytest.mark.parametrize("optimizer", ["{}", *(name for name in OPTIMIZERS if name != "optimizer_in_backward")])
def test_layers_join_one_by_one_and_a_resumed_run_goes_on(optimizer: str, tmp_path: Path) -> None:
    techniques = "{freeze: {layers: all, train: [head, embeddings], gradual: 2}" + (
        "}" if optimizer == "{}" else f", {optimizer}: {{}}}}"
    )
    b = made(techniques, "optimizer.weight_decay=0")
    for step in range(5):
        before = weights(b)
        steps(b, 1, step)
        moved = {
            name.split(".layers.")[1][0]
            for name, p in weights(b).items()
            if ".layers." in name and not torch.equal(p, before[name])
        }
        assert moved == {"2", "1", "0"} - ({"0", "1"} if step < 2 else {"0"} if step < 4 else set())
        if step == 2:
            checkpoint.save(b, checkpoint.Progress(step=3), tmp_path, keep=1)
    again = made(techniques, "optimizer.weight_decay=0", "seed=5")
    found, _ = checkpoint.find(tmp_path)
    assert found is not None
    checkpoint.load(again, found)
    steps(again, 2, 3)
    for name, value in weights(b).items():
        assert torch.equal(weights(again)[name], value), name


def test_a_run_from_a_folder_resumes_before_all_layers_have_joined(tmp_path: Path) -> None:
    made().trained[0].save_pretrained(tmp_path / "base")
    recipe = recipes.override(
        tiny("{freeze: {layers: 3, gradual: 2}}"), f"model={{path: {tmp_path / 'base'}}}", "optimizer.max_grad_norm=0"
    )
    b, again = (build(recipe, vocabulary=96, device=probe("cpu")) for _ in range(2))
    steps(b, 3)
    checkpoint.save(b, checkpoint.Progress(step=3), tmp_path, keep=1)
    found, _ = checkpoint.find(tmp_path)
    assert found is not None
    checkpoint.load_weights(again, found)  # as eval and export do
    checkpoint.load(again, found)
    for one in (b, again):
        steps(one, 3, 3)
    for name, value in weights(b).items():
        assert torch.equal(weights(again)[name], value), name


def test_groups_have_the_rates_of_torchs_groups() -> None:
    b = made(
        "{}",
        "model.tie_embeddings=false",
        "optimizer.groups={embeddings: {lr_scale: 0.1, weight_decay: 0}, 'q_proj|k_proj': {lr_scale: 2}, norms: {weight_decay: 0.3}}",
    )

    def groups(model: Any) -> Any:
        for name, p in model.named_parameters():
            if "embed" in name:
                yield {"params": [p], "lr": 0.001, "weight_decay": 0.0}
            elif "q_proj" in name or "k_proj" in name:
                yield {"params": [p], "lr": 0.02, "weight_decay": 0.1}
            else:
                yield {"params": [p], "weight_decay": 0.3 if "norm" in name else 0.1}

    expected = by_hand(b, lambda model: list(groups(model)), 3)
    steps(b, 3)
    assert_close(weights(b), expected)
    assert {change.what for change in b.changes["optimizer.groups"]} == {
        "embeddings: lr_scale 0.1, weight_decay 0",
        "q_proj|k_proj: lr_scale 2",
        "norms: weight_decay 0.3",
    }


def test_rates_fall_by_layer() -> None:
    b = made(
        "{}", "optimizer.layer_decay=0.5", "optimizer.groups={q_proj: {lr_scale: 3}}", "model.tie_embeddings=false"
    )
    names = {id(p): name for name, p in b.parameters()}
    scales = {names[id(p)]: group.get("lr_scale", 1.0) for group in b.optimizer.param_groups for p in group["params"]}
    assert scales["lm_head.weight"] == scales["model.norm.weight"] == 1
    assert [scales[f"model.layers.{n}.mlp.up_proj.weight"] for n in range(3)] == [1 / 8, 1 / 4, 1 / 2]
    assert scales["model.layers.1.self_attn.q_proj.weight"] == 3 / 4
    assert scales["model.embed_tokens.weight"] == 1 / 16


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "mixed_precision"])
def test_every_optimizer_has_the_rates_of_groups(optimizer: str) -> None:
    settings = "{mode: bf16_master}" if optimizer == "mixed_precision" else "{}"
    moved = []
    for scale in (2, 8):  # neither 1, so that both runs have the same groups, by whose order APOLLO draws
        group = f"optimizer.groups={{o_proj: {{lr_scale: {scale}}}, up_proj: {{lr_scale: 1}}}}"
        b = made(f"{{{optimizer}: {settings}}}", group, "optimizer.weight_decay=0", "optimizer.lr=0.001")
        before = weights(b)
        for n in range(1):
            accumulate_gradients(b, [uneven(seed=n)], 0.001)
            update(b, 0.001)
        after = weights(b)
        moved.append({name: float((after[name] - before[name]).float().norm()) for name in after})
    for name, distance in moved[0].items():
        if "o_proj" in name or "up_proj" in name:
            ratio = 4 if "o_proj" in name else 1
            assert moved[1][name] == pytest.approx(ratio * distance, rel=0.05), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["techniques.freeze.layers=9"], r"layers: 9 is more than the 3 layers"),
        (["techniques.freeze.train=[nothing]"], r"freeze.train: 'nothing' matches no parameter; names are such as model"),
        (["techniques.freeze.train=['(']"], r"freeze.train: '\(' is not a regular expression"),
        (["techniques.freeze.frozen=[.]"], r"freeze.frozen: \['.'\] leaves nothing to train"),
        (["techniques.freeze.train=[.]"], r"freeze.train: \['.'\] trains all weights; leave the technique out"),
        (["techniques.freeze.train=[head]"], r"lm_head.weight and model.embed_tokens.weight are one weight"),
        (["techniques.freeze.frozen=[embed_tokens]"], r"are one weight \(they are tied\), and only the first is named"),
        (["techniques.freeze.train=[norms]", "techniques.freeze.gradual=3"], r"gradual: 3 is for layers"),
        (["techniques.freeze.layers=1", "techniques.lora={}"], r"freeze"),
        (["techniques.freeze.layers=1", "optimizer.groups={embeddings: {lr_scale: 2}}"], r"'embeddings' matches only frozen weights"),
        (["optimizer.groups={nothing: {lr_scale: 2}}"], r"'nothing' matches no weight of the model and its techniques; names are such as model"),
        (["optimizer.groups={.: {lr_scale: 2}}"], r"'.' matches all trained weights"),
        (["optimizer.groups={q_proj: {lr_scale: 2}, _proj: {lr_scale: 3}}"], r"q_proj.weight is in two groups"),
        (["optimizer.groups={q_proj: {lr_scale: 0}}"], r"lr_scale 0 must be above 0; .* use techniques.freeze"),
        (["optimizer.groups={q_proj: {lr: 2}}"], r"unknown setting 'lr'; "),
        (["optimizer.groups={q_proj: {}}"], r"'q_proj' has no settings"),
    ],
)  # fmt: skip
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        made("{}", "model.tie_embeddings=true", *overrides)


def test_a_plan_counts_the_trained_layers_of_a_deep_model() -> None:
    """Layers that are not alike cannot be extrapolated from a few."""
    recipe = recipes.override(tiny("{freeze: {layers: 3}}"), "model.num_layers=30")
    rates = Roofline.of("H100")
    planned = plan(Request(recipe, rates.as_device, vocabulary=96, rates=rates))
    layer = build(tiny(), vocabulary=96, device=probe("cpu")).trained[0].model.layers[0]
    assert planned.parameters.trained == 3 * sum(p.numel() for p in layer.parameters())
    recipe = recipes.override(recipe, "techniques={}")
    everything = plan(Request(recipe, rates.as_device, vocabulary=96, rates=rates))
    assert planned.memory["optimizer"] < everything.memory["optimizer"] / 8
