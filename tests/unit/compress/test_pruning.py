"""Pruning against slow references: masks by loops, cut models against the whole one with the removed parts at zero."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from preheat.compress import shape_sampling, structured_pruning
from preheat.compress.methods.depth import prune_depth
from preheat.compress.methods.lottery import prune_by_shape_search
from preheat.compress.methods.magnitude import prune_by_magnitude
from preheat.compress.methods.wanda import prune_by_wanda
from preheat.compress.methods.width import prune_width
from preheat.compress.registry import methods
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.models.conversions import slicing
from preheat.models.conversions.slicing import KeptIndices, Sizes
from preheat.models.hf import PATTERN, compute_reference_logits, find_anatomy, read_facts
from preheat.models.layerwise import compute_loss, linear_maps, matrix, plain_forward
from preheat.ops import pruning_scores as ops
from preheat.recipe import parse
from preheat.techniques.sliding_window import add_sliding_window

from ...conftest import DEVICE, uneven

GATED: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 8}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64}),
}
TOKENS = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(0))
ROWS = [torch.randint(96, (1, n), generator=torch.Generator().manual_seed(n)) for n in (12, 20, 16)]


def made(family: str, **more: Any) -> Any:
    """A model with every parameter at random, biases and norms too, so that nothing is 0 or 1 by chance."""
    kind, settings = MODELS[family]
    config = getattr(transformers, f"{kind}Config")(**({} if family == "gpt2" else GATED) | settings | more)
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return model


def built(folder: Path) -> Any:
    """The folder's model as a run builds it."""
    recipe = parse(f"model: {{path: {folder}}}\nstop: {{max_steps: 1}}\nbatch: {{seq_len: 16}}")
    return build(recipe, vocabulary=96, device=DEVICE).trained[0]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


def some(count: int, of: int) -> torch.Tensor:
    return torch.randperm(of)[:count].sort().values


# --- scores and masks ---------------------------------------------------------------------------------------------


def test_masks_are_those_of_loops() -> None:
    torch.manual_seed(0)
    weight, squares = torch.randn(6, 8), torch.rand(8) * 9
    scores = ops.score_wanda(weight, squares)
    slow = torch.tensor([[abs(float(weight[i, j])) * float(squares[j]) ** 0.5 for j in range(8)] for i in range(6)])
    assert torch.allclose(scores, slow)
    rows = torch.zeros(6, 8, dtype=torch.bool)
    fours = torch.zeros(6, 8, dtype=torch.bool)
    for i in range(6):
        for j in sorted(range(8), key=lambda j: float(scores[i, j]))[:3]:
            rows[i, j] = True
        for start in (0, 4):
            for j in sorted(range(start, start + 4), key=lambda j: float(scores[i, j]))[:2]:
                fours[i, j] = True
    assert torch.equal(ops.mask_lowest(scores, 0.375, by_row=True), rows)
    assert torch.equal(ops.mask_two_of_four(scores), fours)
    lowest = sorted(scores.flatten().tolist())[:17]
    assert torch.equal(ops.mask_lowest(scores, 17 / 48, by_row=False), scores <= lowest[-1])
    assert ops.mask_lowest(torch.ones(2, 4), 0.5, by_row=True).sum() == 4, "ties do not make more zeros"


def test_what_a_unit_adds_is_the_size_of_its_part() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 12, dtype=torch.float64), torch.randn(7, 12, dtype=torch.float64)
    for units in (4, 12):
        size = 12 // units
        slow = [
            (x[..., u * size : u * size + size] @ weight[:, u * size : u * size + size].t()).square().sum()
            for u in range(units)
        ]
        assert torch.allclose(ops.score_contribution(weight, ops.sum_moments(x, units)), torch.stack(slow))
        assert torch.allclose(ops.extract_blocks(ops.sum_moments(x, 1)[0], units), ops.sum_moments(x, units))
    turned = ops.score_influence(torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([[0.0, 2], [3, 0]]))
    assert float(turned) == pytest.approx(0.5), "one token is turned by a right angle, one not at all"


def test_a_refit_map_is_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    x, weight, kept = torch.randn(40, 9) @ torch.randn(9, 9), torch.randn(5, 9), torch.tensor([0, 2, 3, 7])
    found = ops.refit(weight, x.t() @ x, kept, ridge=0.1)
    part, root = x[:, kept], (0.1 * x[:, kept].square().sum(0).mean()).sqrt()
    rows = torch.cat([part, root * torch.eye(4)])
    wanted = torch.cat([x @ weight.t(), root * weight[:, kept].t()])
    assert off(found, torch.linalg.lstsq(rows, wanted).solution.t()) < 1e-4
    gone = torch.tensor([1, 4, 5, 6, 8])
    assert torch.equal(ops.refit(weight.index_fill(1, gone, 0), x.t() @ x, kept), weight[:, kept])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_magnitude_takes_the_smallest_of_each_map(family: str, pattern: str) -> None:
    model, whole = made(family), made(family)
    before = {name: matrix(m) for name, m in linear_maps(whole).items()}
    words, count = prune_by_magnitude(model, pattern=pattern, keep=r".*layers\.0.*|.*h\.0\..*")
    assert count == len(before) * 2 // 3
    assert "50.0%" in words
    for name, module in linear_maps(model).items():
        weight = matrix(module)
        if ".0." in name:
            assert torch.equal(weight, before[name])
            continue
        gone = weight == 0
        assert torch.equal(weight[~gone], before[name][~gone])
        sizes = before[name].abs()
        if pattern == "2:4":
            fours, gone = sizes.reshape(-1, 4), gone.reshape(-1, 4)
            assert all(a[g].max() <= a[~g].min() for a, g in zip(fours, gone, strict=True))
        else:
            assert sizes[gone].max() <= sizes[~gone].min()


@pytest.mark.parametrize(("family", "pattern"), [("qwen3", "unstructured"), ("qwen3", "2:4"), ("gpt2", "unstructured")])
def test_wanda_is_the_paper_in_loops(family: str, pattern: str) -> None:
    """Reference: for each layer anew the rows through the whole model, whose layers before it are pruned already."""
    model, slow = made(family), made(family)
    prune_by_wanda(model, ROWS, sparsity=0.5 if pattern == "2:4" else 0.4, pattern=pattern)
    for number in range(3):
        layer = find_anatomy(slow).layers[number]
        for module in [m for m in layer.modules() if m in set(linear_maps(slow).values())]:
            seen: list[torch.Tensor] = []
            handle = module.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].flatten(0, -2)))
            with torch.no_grad():
                for row in ROWS:
                    slow(input_ids=row)
            handle.remove()
            module.norms = torch.cat(seen).double().norm(dim=0)
        for module in [m for m in layer.modules() if m in set(linear_maps(slow).values())]:
            weight = matrix(module)
            scores = weight.double().abs() * module.norms
            for i, row_scores in enumerate(scores):
                fours = row_scores.split(4) if pattern == "2:4" else (row_scores,)
                for start, part in enumerate(fours):
                    number_out = 2 if pattern == "2:4" else round(0.4 * len(part))
                    for j in part.argsort()[:number_out].tolist():
                        weight[i, start * 4 + j] = 0
    for name, module in linear_maps(model).items():
        assert torch.equal(matrix(module), matrix(slow.get_submodule(name))), name


# --- cutting ------------------------------------------------------------------------------------------------------


def wanted_of(model: Any, family: str) -> Sizes:
    """Fewer heads and channels; of one key-value head for all, fewer query heads."""
    now = slicing.sizes_of(model.config)
    if family == "gpt2":
        return replace(now, heads=3, kv_heads=3, hidden=24, channels=80)
    if family == "mistral":
        return replace(now, heads=5, channels=24)
    return replace(now, heads=4, kv_heads=2, channels=24)


def mute(model: Any, kept: KeptIndices, now: Sizes) -> None:
    """Sets to zero what the heads and channels that go write to the stream, in place."""
    with torch.no_grad():
        for layer, _, module in slicing.find_readers(model, "heads"):
            gone = torch.ones(now.heads, dtype=torch.bool)
            gone[kept.heads[layer]] = False  # type: ignore[index]
            matrix(module)[:, gone.repeat_interleave(now.head_dim)] = 0
        for layer, _, module in slicing.find_readers(model, "channels"):
            gone = torch.ones(now.channels, dtype=torch.bool)
            gone[kept.channels[layer]] = False  # type: ignore[index]
            matrix(module)[:, gone] = 0


class OverSome(torch.nn.Module):
    """A norm over some of the dimensions; the others are nothing behind it. The reference for a norm that was cut."""

    def __init__(self, norm: Any, kept: torch.Tensor):
        super().__init__()
        self.norm, self.kept = norm, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, out = x[..., self.kept], torch.zeros_like(x)
        weight = self.norm.weight[self.kept]
        if isinstance(self.norm, torch.nn.LayerNorm):
            out[..., self.kept] = torch.nn.functional.layer_norm(
                part, part.shape[-1:], weight, self.norm.bias[self.kept], self.norm.eps
            )
        else:
            out[..., self.kept] = torch.nn.functional.rms_norm(
                part, part.shape[-1:], weight, self.norm.variance_epsilon
            )
        return out


@pytest.mark.parametrize("family", MODELS)
def test_a_cut_model_is_the_whole_one_with_the_rest_at_zero(family: str, tmp_path: Path) -> None:
    """Heads, channels, dimensions and a layer at once; loaded by plain transformers and by preheat."""
    model = made(family)
    now = slicing.sizes_of(model.config)
    wanted = wanted_of(model, family)
    units = wanted.heads // wanted.kv_heads
    groups = [some(wanted.kv_heads, now.kv_heads) for _ in range(3)]
    kept = KeptIndices(
        layers=torch.tensor([0, 2]),
        hidden=some(24, 32),
        kv_heads=groups,
        heads=[
            torch.cat(
                [g * (now.heads // now.kv_heads) + some(units, now.heads // now.kv_heads) for g in layer.tolist()]
            )
            for layer in groups
        ],
        channels=[some(wanted.channels, now.channels) for _ in range(3)],
    )
    cut = slicing.build_smaller(model, kept)
    assert cut.num_parameters() == slicing.build_parameter_counter(model)(replace(wanted, layers=2, hidden=24))
    mute(model, kept, now)
    found = find_anatomy(model)
    del found.layers[1]
    model.config.num_hidden_layers = 2
    for name in slicing.find_stream_norms(model):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, OverSome(model.get_submodule(name), kept.hidden))  # type: ignore[arg-type]
    wanted_logits = compute_reference_logits(model, TOKENS)
    assert off(compute_reference_logits(cut, TOKENS), wanted_logits) < 1e-5
    assert read_facts(cut.config).head_dim == now.head_dim
    cut.save_pretrained(tmp_path / "m")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert torch.equal(compute_reference_logits(again, TOKENS), compute_reference_logits(cut, TOKENS))
    tied = model.config.tie_word_embeddings
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied
    assert off(compute_reference_logits(built(tmp_path / "m"), TOKENS), wanted_logits) < 1e-5


@pytest.mark.parametrize("family", MODELS)
def test_parts_that_write_nothing_count_nothing_and_go_first(family: str) -> None:
    model = made(family)
    now, wanted = slicing.sizes_of(model.config), replace(wanted_of(model, family), hidden=32)
    kept = structured_pruning.choose_kept(structured_pruning.measure(made(family), ROWS), now, wanted)
    mute(model, kept, now)
    before, importance = compute_reference_logits(model, TOKENS), structured_pruning.measure(model, ROWS)
    assert [int((scores == 0).sum()) for scores in importance.channels] == [now.channels - wanted.channels] * 3
    again = structured_pruning.choose_kept(importance, now, wanted)
    for mine, other in zip((*kept.heads, *kept.channels), (*again.heads, *again.channels), strict=True):  # type: ignore[misc]
        assert torch.equal(mine, other)
    if family == "gpt2":  # which cannot have fewer heads at the same width
        again = replace(again, heads=None, kv_heads=None)
    slicing.replace_in_place(model, slicing.build_smaller(model, again))
    assert off(compute_reference_logits(model, TOKENS), before) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dimensions_that_are_zero_everywhere_go_without_a_change(family: str) -> None:
    """A norm over 24 of 32 dimensions divides by their own mean square, which its new weight makes good exactly."""
    model = made(family, rms_norm_eps=1e-12)
    gone = torch.tensor([1, 2, 5, 11, 12, 20, 21, 30])
    with torch.no_grad():
        model.get_input_embeddings().weight[:, gone] = 0
        for _, _, module in (*slicing.find_readers(model, "heads"), *slicing.find_readers(model, "channels")):
            module.weight[gone] = 0
            if module.bias is not None:
                module.bias[gone] = 0
    before = compute_reference_logits(model, TOKENS)
    importance = structured_pruning.measure(model, ROWS)
    assert (importance.hidden == 0).nonzero().flatten().tolist() == gone.tolist()
    prune_width(model, ROWS, hidden=0.75)
    assert model.config.hidden_size == 24
    assert off(compute_reference_logits(model, TOKENS), before) < 1e-5


def test_a_head_counts_by_what_attention_lacks_without_it() -> None:
    model = made("qwen2")
    importance = structured_pruning.measure(model, ROWS)
    for number, (layer, _, module) in enumerate(slicing.find_readers(model, "heads")):
        seen: list[torch.Tensor] = []
        handle = module.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            for row in ROWS:
                model(input_ids=row)
        handle.remove()
        for head, columns in itertools.product(range(8), [torch.arange(4)]):
            weight = torch.zeros_like(module.weight)
            weight[:, head * 4 + columns] = module.weight[:, head * 4 + columns]
            slow = sum(float((x @ weight.t()).detach().square().sum()) for x in seen)
            assert float(importance.heads[layer][head]) == pytest.approx(slow, rel=1e-4)
        assert number == layer


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Gemma3Text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}),
        ("Mixtral", EXPERTS),
    ],
)
@pytest.mark.parametrize("by", ["influence", "loss"])
def test_layers_are_taken_out_of_any_family(kind: str, more: dict[str, Any], by: Any, tmp_path: Path) -> None:
    settings = GATED | more | {"num_hidden_layers": 4}
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    layers = list(find_anatomy(model).layers)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
        for name, p in layers[1].named_parameters():  # the second layer passes on what it is given, and must go first
            if "o_proj" in name or "down_proj" in name:
                p.zero_()
    before = compute_reference_logits(model, TOKENS)
    slow = []  # the loss with what one layer adds at zero
    for n in range(4):
        without = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in find_anatomy(without).layers[n].named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    p.zero_()
            losses = [without(input_ids=row, labels=row).loss * (row.numel() - 1) for row in ROWS]
        slow.append(float(sum(losses)))
    words, count = prune_depth(model, ROWS, layers=0.75, by=by)
    first = 1 if by == "influence" else slow.index(min(slow))
    assert count == 1
    assert f"without {first}, by {by}" in words
    if by == "loss":
        with plain_forward(model):
            assert compute_loss(model, ROWS) * sum(row.numel() - 1 for row in ROWS) == pytest.approx(
                min(slow), rel=1e-4
            )
        return
    assert off(compute_reference_logits(model, TOKENS), before) < 1e-5
    model.save_pretrained(tmp_path / "m")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert off(compute_reference_logits(again, TOKENS), before) < 1e-5


def test_a_built_model_is_pruned_and_attends_as_before(tmp_path: Path) -> None:
    """The model of a build goes through preheat's slots, where its plain forward cannot be called."""
    plain = made("qwen3")
    plain.save_pretrained(tmp_path / "m")
    model = built(tmp_path / "m")
    for one in (model, plain):
        prune_width(one, ROWS, heads=0.5, channels=0.5)
    assert model.training
    assert model.config._attn_implementation == "preheat"
    assert torch.equal(compute_reference_logits(model, TOKENS), compute_reference_logits(plain, TOKENS))


def test_rows_are_read_with_capped_scores_and_with_preheats_patterns() -> None:
    torch.manual_seed(0)
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GATED, attn_logit_softcapping=0.05)).eval()
    limited = made("qwen3")
    add_sliding_window(limited, window=3)
    for model, attention in ((capped, "eager"), (limited, limited.config._attn_implementation)):
        with plain_forward(model):
            found = compute_loss(model, ROWS[:1])
        model.set_attn_implementation(attention)
        with torch.no_grad():
            assert found == pytest.approx(float(model(input_ids=ROWS[0], labels=ROWS[0]).loss), rel=1e-5)
    prune_width(limited, ROWS, channels=0.5)
    assert all(hasattr(m, PATTERN) for m in find_anatomy(limited).attentions)


# --- shapes under a budget ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MODELS)
def test_drawn_shapes_meet_the_budget_and_can_be_built(family: str) -> None:
    model = made(family)
    whole = model.num_parameters()
    drawn = shape_sampling.draw(model, parameters=0.7, draws=3, smallest=0.3, multiple=4, seed=3)
    assert len(set(drawn)) == 3
    assert drawn == shape_sampling.draw(model, parameters=0.7, draws=3, smallest=0.3, multiple=4, seed=3)
    assert family == "gpt2" or drawn != shape_sampling.draw(
        model, parameters=0.7, draws=3, smallest=0.3, multiple=4, seed=4
    )
    importance = structured_pruning.measure(model, ROWS)
    for sizes in drawn:
        cut = structured_pruning.build_pruned(model, importance, sizes)
        assert slicing.sizes_of(cut.config) == sizes
        assert cut.num_parameters() == slicing.build_parameter_counter(model)(sizes)
        assert 0.9 * 0.7 * whole <= cut.num_parameters() <= 0.7 * whole
        type(cut.config)(**cut.config.to_dict())  # transformers' own checks, which reading a folder runs


def test_fewer_channels_than_a_multiple_stay() -> None:
    model = made("qwen3")
    channels = slicing.sizes_of(model.config).channels
    drawn = shape_sampling.draw(model, parameters=None, draws=4, smallest=0.3, multiple=channels + 1, seed=0)
    assert drawn
    assert {sizes.channels for sizes in drawn} == {channels}


def test_the_lottery_keeps_the_shape_of_the_lowest_loss() -> None:
    settings: dict[str, Any] = {"draws": 5, "smallest": 0.3, "multiple": 4, "seed": 1}
    model, whole = made("qwen3"), made("qwen3")
    words, gone = prune_by_shape_search(model, ROWS, parameters=0.7, **settings)
    importance = structured_pruning.measure(whole, ROWS, products=True)
    losses = []
    for sizes in shape_sampling.draw(whole, parameters=0.7, **settings):
        cut = structured_pruning.build_pruned(whole, importance, sizes, refit=True)
        with plain_forward(cut):
            losses.append(compute_loss(cut, ROWS))
    with plain_forward(model):
        assert compute_loss(model, ROWS) == pytest.approx(min(losses), rel=1e-6)
    assert len(set(losses)) == 5
    assert whole.num_parameters() - model.num_parameters() == gone
    assert "the best of 5 shapes" in words
    late = made("qwen3")
    words, _ = prune_by_shape_search(late, ROWS, parameters=0, latency=0.99, **settings | {"draws": 6})
    assert late.num_parameters() < whole.num_parameters()
    assert "of 6 shapes" in words or "took more than 0.99" in words


# --- the real model -------------------------------------------------------------------------------------------------


def test_importance_knows_what_a_trained_model_needs(data_folder: Path) -> None:
    """Without what counts least stories260K loses far less than without what counts most."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(data_folder / "stories260K-hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(data_folder / "stories260K-hf")
    text = (data_folder / "text/tinystories_train_excerpt.txt").read_text(encoding="utf-8")[:12000]
    tokens = torch.tensor(tokenizer.encode(text))
    rows, held_out = [tokens[:1024].view(-1, 256), tokens[1024:2048].view(-1, 256)]
    calibration = list(rows.split(1))
    now, importance = slicing.sizes_of(model.config), structured_pruning.measure(model, calibration, products=True)
    turned = structured_pruning.Importance(
        heads=[-scores for scores in importance.heads],
        channels=[-scores for scores in importance.channels],
        hidden=-importance.hidden,
        layers=-importance.layers,
        streams=importance.streams,
        products={},
    )

    def after(importance: Any, refit: bool = False, **changed: int) -> float:
        cut = structured_pruning.build_pruned(model, importance, replace(now, **changed), refit=refit)
        with plain_forward(cut):
            return compute_loss(cut, [held_out])

    with plain_forward(model):
        before = compute_loss(model, [held_out])
    for changed in ({"heads": 4, "kv_heads": 2}, {"channels": 88}, {"hidden": 48}, {"layers": 4}):
        assert after(importance, **changed) < after(turned, **changed) - 0.1, changed
    assert after(importance, channels=152) < before + 0.4
    for changed in ({"heads": 4, "kv_heads": 2}, {"channels": 88}, {"channels": 128, "layers": 4, "hidden": 56}):
        assert after(importance, refit=True, **changed) < after(importance, **changed) - 0.1, changed
    zeros: Any = transformers.AutoModelForCausalLM.from_pretrained(data_folder / "stories260K-hf").eval()
    prune_by_wanda(model, calibration)
    prune_by_magnitude(zeros)
    with plain_forward(model), plain_forward(zeros):
        assert before < compute_loss(model, [held_out]) < compute_loss(zeros, [held_out])


# --- zeros kept in training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        "",
        "muon: {}",
        "mixed_precision: {mode: bf16_weights}",
        "low_bit_adamw: {bits: 4, block_size: 64, min_size: 0}",
        "lion: {}",
    ],
)
def test_zeros_that_were_loaded_stay_whatever_the_optimizer(more: str, tmp_path: Path) -> None:
    model = made("qwen3")
    prune_by_wanda(model, ROWS, pattern="2:4")
    model.save_pretrained(tmp_path / "m")
    recipe = parse(
        f"model: {{path: {tmp_path / 'm'}}}\nbatch: {{size: 4, seq_len: 32}}\noptimizer: {{lr: 0.01}}\nstop: {{max_steps: 3}}\n"
        f"techniques: {{sparse_weights: {{}}, {more}}}"
    )
    b = build(recipe, vocabulary=96, device=DEVICE)
    assert "(50.0%)" in b.changes["sparse_weights"][0].what
    maps: Any = linear_maps(b.trained[0])  # type: ignore[arg-type]
    before = {name: m.weight.detach().clone() for name, m in maps.items()}
    for _ in range(3):
        accumulate_gradients(b, [uneven()])
        assert all(bool((m.weight.grad[m.weight == 0] == 0).all()) for m in maps.values())
        update(b, 0.01)
    for name, m in maps.items():
        assert torch.equal(m.weight == 0, before[name] == 0), name
        assert not torch.equal(m.weight, before[name])


def test_weights_without_zeros_have_none_to_keep(tmp_path: Path) -> None:
    made("qwen3").save_pretrained(tmp_path / "m")
    recipe = parse(
        f"model: {{path: {tmp_path / 'm'}}}\nbatch: {{seq_len: 32}}\nstop: {{max_steps: 3}}\ntechniques: {{sparse_weights: {{}}}}"
    )
    with pytest.raises(RecipeError, match="have no zeros to keep"):
        build(recipe, vocabulary=96, device=DEVICE)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("magnitude", {"sparsity": 1.0}, "sparsity: 1.0 is not a fraction"),
        ("magnitude", {"sparsity": 0.7, "pattern": "2:4"}, "contradict each other"),
        ("wanda", {"sparsity": 0.0}, "sparsity: 0.0 is not a fraction"),
        ("width", {}, "prune nothing"),
        ("width", {"channels": 1.2}, "channels: 1.2 is not a fraction"),
        ("depth", {"layers": 1.0}, "layers: 1.0 must remove some layers"),
        ("lottery", {"parameters": 0.0}, "leave no budget"),
        ("lottery", {"parameters": 1.0}, "parameters: 1.0 is not a fraction"),
    ],
)
def test_settings_that_cannot_serve_are_told(method: str, settings: dict[str, Any], words: str) -> None:
    found = methods()[method](**settings).check(read_facts(made("llama").config))
    assert any(words in line for line in found), found


def test_settings_that_serve_are_silent() -> None:
    for name, settings in (
        ("magnitude", {}),
        ("wanda", {"pattern": "2:4"}),
        ("width", {"heads": 0.5}),
        ("depth", {}),
        ("lottery", {}),
    ):
        assert methods()[name](**settings).check(read_facts(made("llama").config)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "method", "settings", "words"),
    [
        (
            "llama",
            "width",
            {"heads": 0.1},
            r"heads: 0\.1 leaves none of the 4 groups of 2 query heads .* 3 layers; 0\.25 leaves 1",
        ),
        (
            "llama",
            "width",
            {"channels": 0.05},
            r"channels: 0\.05 leaves none of the 48 channels .*by multiples of 8; 0\.167 leaves 8",
        ),
        ("llama", "width", {"heads": 0.75}, "32 is not one of 6: with 6 heads use a width of 30"),
        ("gpt2", "width", {"heads": 0.5}, "2 heads of 8 need a width of 16 and not 32"),
        ("mistral", "width", {"channels": 0.99}, "leave the model unchanged"),
        ("llama", "depth", {"layers": 0.1}, r"layers: 0\.1 leaves none of the 3 layers; 0\.334 leaves 1"),
        ("llama", "depth", {"layers": 0.9}, "keeps all 3 layers; 0.667 removes one"),
        ("llama", "lottery", {"parameters": 0.05}, r"parameters: 0\.05 is met by no shape"),
        ("llama", "magnitude", {"keep": "no_such"}, "keep: 'no_such' matches no linear map"),
        ("llama", "wanda", {"keep": ".*"}, "leaves no linear map"),
        ("llama", "wanda", {"rows": []}, "wanda: needs calibration sequences"),
        ("llama", "width", {"rows": [], "channels": 0.5}, "width: needs calibration sequences"),
    ],
)
def test_what_a_model_cannot_do_is_told(family: str, method: str, settings: dict[str, Any], words: str) -> None:
    rows = settings.get("rows", ROWS)
    with pytest.raises(RecipeError, match=words):
        methods()[method](**{k: v for k, v in settings.items() if k != "rows"}).apply(made(family), rows)


def test_families_that_cannot_be_sliced_are_refused() -> None:
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**GATED | EXPERTS))
    for method, settings in (("width", {"channels": 0.5}), ("lottery", {}), ("magnitude", {}), ("wanda", {})):
        with pytest.raises(RecipeError, match=r"experts.* method depth"):
            methods()[method](**settings).apply(mixtral, ROWS)  # type: ignore[arg-type]
    odd = made("llama", intermediate_size=46)
    with pytest.raises(RecipeError, match=r"down_proj has 46"):
        prune_by_magnitude(odd, pattern="2:4")
    numbered = made("gpt2", scale_attn_by_inverse_layer_idx=True)
    with torch.no_grad():
        for name, p in (
            find_anatomy(numbered).layers[0].named_parameters()
        ):  # turns nothing, and goes first: the others get other numbers
            if "c_proj" in name:
                p.zero_()
    with pytest.raises(RecipeError, match="has layers that depend on their index"):
        prune_depth(numbered, ROWS, layers=0.67)


def test_the_width_method_hands_on_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: dict[str, Any] = {}
    monkeypatch.setattr(
        "preheat.compress.methods.width.prune_width", lambda *_, **given: handed.update(given) or ("cut", 1)
    )
    settings = {"heads": 0.5, "channels": 0.25, "hidden": 0.75, "multiple": 4, "refit": False}
    methods()["width"](**settings).apply(made("llama"), ROWS)
    assert handed == settings, "a setting that changes nothing"
