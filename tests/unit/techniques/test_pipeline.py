"""Cutting a model into stages: by cost, without changing what it computes; and what a pipeline refuses."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from preheat import recipe as recipes
from preheat.core import Axis, Context, MaskSpec, Tag, conflicts_of
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.models import hf, moe, pipeline_split
from preheat.models.weights import WeightSource, materialize
from preheat.ops.attention.sdpa import reference_attention
from preheat.ops.distributed.pipelining import pad_micro_batches, ranks_of
from preheat.ops.grouped_mm import compute_experts

from ...architectures.tiny import tiny_config
from ...conftest import DEVICE, split, tiny, uneven


def test_no_other_cut_has_a_cheaper_dearest_stage() -> None:
    draw = random.Random(0)
    for _ in range(50):
        costs = [draw.randint(1, 9) for _ in range(draw.randint(2, 8))]
        count, before, after = draw.randint(1, len(costs)), draw.randint(0, 9), draw.randint(0, 20)

        def dearest(starts: tuple[int, ...], costs: list[int] = costs, before: int = before, after: int = after) -> int:
            ends = (*starts[1:], len(costs))
            found = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
            found[0] += before
            found[-1] += after
            return max(found)

        made = pipeline_split.balance_stages(costs, count, before=before, after=after)
        assert [n for cut in made for n in cut] == list(range(len(costs)))
        cheapest = min(dearest((0, *inner)) for inner in itertools.combinations(range(1, len(costs)), count - 1))
        assert dearest(tuple(cut.start for cut in made)) == cheapest
    with pytest.raises(ValueError, match="use at most 2"):
        pipeline_split.balance_stages([1, 1], 3)


def test_the_devices_of_several_stages_have_even_costs() -> None:
    """By stage alone the first device of an interleaved pipeline may have all of the larger stages."""
    draw = random.Random(0)
    excess = []
    for number in range(40):
        devices = ranks_of(4, 2, "interleaved" if number % 2 else "zbv")
        costs = [draw.choice((3, 7)) for _ in range(draw.randint(4, 9))]
        after = draw.randint(0, 20)

        def dearest(starts: tuple[int, ...], costs: list[int] = costs, devices: list[int] = devices) -> int:
            ends = (*starts[1:], len(costs))
            of_devices = [0, 0]
            for device, first, end in zip(devices, starts, ends, strict=True):
                of_devices[device] += sum(costs[first:end])
            of_devices[devices[-1]] += after  # noqa: B023
            return max(of_devices)

        best = min(dearest((0, *inner)) for inner in itertools.combinations(range(1, len(costs)), 3))
        by_stage, by_device = (
            dearest(tuple(cut.start for cut in pipeline_split.balance_stages(costs, 4, after=after, devices=given)))
            for given in (None, devices)
        )
        assert by_device <= by_stage
        excess.append((by_stage / best, by_device / best))
    assert sum(by_stage for by_stage, _ in excess) > 1.05 * len(excess)
    assert sum(by_device for _, by_device in excess) < 1.01 * len(excess)


def config(family: str, **more: Any) -> Any:
    if family == "phi":  # has a head with a bias
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96}
        tied = more["tie_word_embeddings"] == "true"
        return transformers.PhiConfig(num_hidden_layers=4, **sizes, tie_word_embeddings=tied)
    return hf.configure(
        recipes.override(
            tiny(family=family), "model.num_layers=4", *(f"model.config={{{k}: {v}}}" for k, v in more.items())
        ),
        96,
    )


def test_the_dry_run_counts_what_a_layer_and_the_head_cost() -> None:
    length, width = 64, 32
    made = config("llama")
    seen = pipeline_split.observe(made, length)
    matrices = 2 * width * width + 2 * width * (width // 2) + 3 * width * made.intermediate_size
    keys = round(length - length * (length - 1) / (2 * length))  # a causal kernel reads half of them
    assert seen.each == [2 * length * matrices + 4 * length * keys * width] * 4
    assert (seen.before, seen.after) == (
        0,
        2 * length * width * 128 if made.vocab_size == 128 else 2 * length * width * made.vocab_size,
    )
    assert seen.entry == ["model.embed_tokens"]
    assert sorted(seen.exit) == ["lm_head", "model.norm"]


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "granitemoehybrid"]
)
def test_the_dry_run_counts_what_experts_cost(family: str) -> None:
    """A router, the experts of a token and the shared expert, wherever a layer has them: as in a pass with values."""
    settings = tiny_config(family)
    profile = pipeline_split.observe(settings, 32)
    model = hf.build_on_meta(settings).eval()
    moe.compute_by(model, compute_experts)
    materialize(model, torch.device("cpu"))
    WeightSource().fill(model, seed=0)
    tokens = torch.randint(96, (1, 32), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attend = pipeline_split._attend_mean_length
        hidden = hf.hidden_states(model, tokens, torch.arange(32)[None], MaskSpec(), attend)
        hf.compute_logits(model, hidden)
    assert profile.before + sum(profile.each) + profile.after == counter.get_total_flops()
    if family == "glm4_moe":  # the layer with experts is the second one
        routed, width = 2 + 1, settings.hidden_size  # of a token, and the shared one
        router = 2 * 32 * width * settings.n_routed_experts
        experts = 3 * routed * settings.moe_intermediate_size - 3 * settings.intermediate_size
        assert profile.each[1] - profile.each[0] == router + 2 * 32 * width * experts


# One architecture of each kind of token mixer, without experts, and some with experts.
MIXERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "mamba2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": {"mlp_only_layers": [2]},
    "glm4_moe": {"first_k_dense_replace": 2},
    "deepseek_v3": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "moe_layers": [],
        "no_rope_layers": [1, 0] * 2,
    },
    "granite_swa": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6},
}


@pytest.mark.parametrize("family", MIXERS)
def test_stages_with_every_kind_of_mixer_are_the_model(family: str, tmp_path: Path) -> None:
    stages_are_the_model(tiny_config(family, num_hidden_layers=4, **MIXERS[family]), tmp_path)


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi"])
def test_stages_one_behind_the_other_are_the_model(family: str, tied: str, tmp_path: Path) -> None:
    stages_are_the_model(config(family, tie_word_embeddings=tied), tmp_path)


def stages_are_the_model(settings: Any, tmp_path: Path) -> None:
    tied = "true" if settings.tie_word_embeddings else "false"
    model = hf.build_on_meta(settings).eval()
    course = pipeline_split.observe(model.config, 32)
    cuts = pipeline_split.balance_stages(course.each, 3)
    parts = [
        pipeline_split.cut(hf.build_on_meta(model.config).eval(), course, cuts, n) for n in range(3)
    ]  # a model for each device
    names = [set(dict(part.named_parameters())) for part in parts]
    assert set.union(*names) == set(dict(model.named_parameters()))
    shared = set.union(*(a & b for a, b in itertools.combinations(names, 2)))
    ends = {name for name, p in model.named_parameters() if p is hf.embedding(model).weight}
    assert shared == (ends if tied == "true" else set())

    twin = hf.build_on_meta(model.config).eval()
    materialize(twin, torch.device("cpu"))
    WeightSource().fill(twin, seed=3)
    values = dict(twin.named_parameters())
    twin.save_pretrained(tmp_path)
    batch, hidden = uneven(), None
    for part in parts:  # each draws for itself what the whole would have there
        materialize(part, torch.device("cpu"))
        for p in part.parameters():
            p.data.fill_(float("nan"))
        WeightSource().fill(part, seed=3)
        assert all(torch.equal(p, values[name]) for name, p in part.named_parameters())
        for p in part.parameters():
            p.data.zero_()
        WeightSource(tmp_path).fill(part, seed=4)  # and reads it
        assert all(torch.equal(p, values[name]) for name, p in part.named_parameters())
        with torch.no_grad():
            hidden = hf.hidden_states(part, batch.tokens, batch.positions, batch.mask, reference_attention, hidden)
    with torch.no_grad():
        whole = hf.hidden_states(twin, batch.tokens, batch.positions, batch.mask, reference_attention)
        assert torch.equal(hidden, whole)
        assert torch.equal(hf.compute_logits(parts[-1], hidden), hf.compute_logits(twin, whole))


def test_a_model_that_works_between_its_modules_is_not_cut() -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 96,
        "num_hidden_layers": 4,
    }
    with pytest.raises(ValueError, match="outside its modules"):  # its forward multiplies the embeddings
        pipeline_split.observe(transformers.GraniteConfig(**sizes, embedding_multiplier=12.0), 32)


def test_micro_batches_are_made_alike_with_rows_that_train_nothing() -> None:
    whole = uneven(5)
    made = pad_micro_batches(split(whole, [2, 2, 1]), 4)
    assert {tuple(batch.tokens.shape) for batch in made} == {(2, 32)}
    assert [batch.weight for batch in made] == [*(batch.weight for batch in split(whole, [2, 2, 1])), 0]
    assert sum(int((batch.labels >= 0).sum()) for batch in made) == int((whole.labels >= 0).sum())
    assert made[2].mask.documents == (whole.mask.documents[4],) * 2  # type: ignore[index]


def test_a_v_comes_back_to_the_first_device() -> None:
    assert ranks_of(6, 3, "zbv") == [0, 1, 2, 2, 1, 0]
    assert ranks_of(6, 3, "interleaved") == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("techniques", "sets", "words"),
    [
        ("{pipeline_parallel: {}}", [], "micro_batches: 1 for 2 stages"),
        ("{pipeline_parallel: {micro_batches: 8}}", [], "are more than the 4 sequences"),
        ("{pipeline_parallel: {degree: 4, micro_batches: 4}}", [], "the model has 3 layers"),
        ("{pipeline_parallel: {stages: 2, micro_batches: 4}}", ["model.num_layers=4"], "which takes 1"),
        ("{pipeline_parallel: {schedule: interleaved, micro_batches: 3}}", ["model.num_layers=4"], None),
        ("{pipeline_parallel: {micro_batches: 4}, gradient_accumulation: {steps: 4}}", [], "leave one out"),
        ("{pipeline_parallel: {micro_batches: 4}, fsdp: {}}", ["batch.size=8"], "set fsdp.reduce: last"),
        (
            "{pipeline_parallel: {micro_batches: 4, schedule: zero_bubble}, fsdp: {reduce: last}}",
            ["batch.size=8"],
            "set fsdp.reshard_after_forward: false",
        ),
        (
            "{pipeline_parallel: {micro_batches: 4, schedule: zero_bubble}, chunked_loss: {}}",
            [],
            "that of chunked_loss allows one",
        ),
        (
            "{pipeline_parallel: {micro_batches: 4, schedule: zero_bubble}, activation_checkpointing: {}}",
            [],
            "recomputed layers",
        ),
        ("{pipeline_parallel: {micro_batches: 4, schedule: zbv}}", ["model.num_layers=3"], "are 4 stages"),
        ("{pipeline_parallel: {micro_batches: 4}, classification: {}}", [], "whole-examples"),
        (
            "{pipeline_parallel: {micro_batches: 4}, optimizer_in_backward: {}}",
            ["optimizer.max_grad_norm=0"],
            "owns the slot 'forward_backward'",
        ),
        (
            "{pipeline_parallel: {micro_batches: 4, schedule: zbv}}",
            ["model.num_layers=4", "model.config={tie_word_embeddings: true}"],
            "hold a tied embedding twice",
        ),
        ("{pipeline_parallel: {micro_batches: 4}}", ["evaluate.tasks=[arc]"], "evaluate.tasks"),
    ],
)
def test_what_does_not_serve_is_refused_with_the_reason(techniques: str, sets: list[str], words: str | None) -> None:
    recipe = recipes.override(tiny(), f"techniques={techniques}", *sets)
    tags = frozenset(tag for t in recipe.techniques.values() for tag in t.provided()) | {Tag.CPU}
    sizes = dict.fromkeys(Axis, 1) | {Axis.PIPELINE: 2, Axis.SHARD: 2 if "fsdp" in techniques else 1}
    found = conflicts_of(
        recipe.techniques.values(), Context(recipe, hf.read_facts(hf.configure(recipe, 96)), DEVICE, tags, sizes)
    )
    if words is None:
        assert not found
    else:
        assert any(words in problem.text for problem in found), found


def test_one_device_is_no_pipeline() -> None:
    with pytest.raises(RecipeError, match="does not multiply to 1 device"):
        build(tiny("{pipeline_parallel: {micro_batches: 4}}"), vocabulary=96, device=DEVICE)
