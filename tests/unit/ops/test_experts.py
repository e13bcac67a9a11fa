"""Mixture-of-experts models on one device: against transformers' own forward pass, over micro-batches, from folders, in a dry run."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import Batch, Build, MaskSpec
from preheat.engine.builder import build
from preheat.engine.moe_aux_loss import compute_balance_part
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.models.moe import biases, routers
from preheat.ops.grouped_mm import (
    _multiply,
    _multiply_blocks,
    _sum_outer,
    _sum_outer_blocks,
    compute_experts,
    grouped_linear,
)
from preheat.ops.optim.optimizers import Adafactor
from preheat.planning.dry_run import observe
from preheat.planning.request import Request

from ...conftest import DEVICE, difference, split, tiny, uneven
from ...contract.waits import waits_of

FAMILIES = ["qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3"]
BY_SIGMOID = ["glm4_moe", "deepseek_v3"]  # with a bias, and without a balance loss
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
SIZES |= {"intermediate_size": 64, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6}
# Families that a recipe does not make new: with a layer without experts, and something that all tokens go to.
OF_FOLDERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**SIZES, "num_experts": 8, "mlp_only_layers": [1], "shared_expert_intermediate_size": 40},
    "glm4_moe": {**SIZES, **GROUPS, "head_dim": 8, "use_qk_norm": True},
    "deepseek_v3": {**SIZES, **GROUPS, **LATENT, "num_key_value_heads": 4},
}
STRONG = "model.config={router_aux_loss_coef: 0.5}"  # so that the balance loss is no rounding error of the whole


@functools.cache
def folder(family: str) -> Path:
    """A folder with the configuration alone."""
    from transformers import AutoConfig

    made = Path(tempfile.mkdtemp(prefix="preheat-experts-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    AutoConfig.for_model(family, **OF_FOLDERS[family]).save_pretrained(made)
    return made


def recipe_of(family: str, techniques: str = "{}") -> recipes.Recipe:
    if family not in OF_FOLDERS:
        return tiny(techniques, family=family)
    where = f"model={{path: {folder(family)}, weights: random}}"
    return recipes.override(
        recipes.parse("stop: {max_steps: 20}\nbatch: {size: 4, seq_len: 32}"), where, f"techniques={techniques}"
    )


def made(family: str, techniques: str = "{}", *, strong: bool = True) -> Build:
    recipe = recipe_of(family, techniques)
    strong = strong and family not in BY_SIGMOID
    return build(recipes.override(recipe, STRONG) if strong else recipe, vocabulary=96, device=DEVICE)


def uneven_biases(model: Any) -> None:
    """So that a bias, where the model has one, matters."""
    for n, bias in enumerate(biases(model).values()):
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(n)) * 0.3)


def grads(b: Build, batches: list[Batch]) -> tuple[float, dict[str, Any], dict[str, float]]:
    b.optimizer.zero_grad()
    loss = accumulate_gradients(b, batches, 0.01)
    return (
        float(loss.total) / float(loss.weight),
        {n: p.grad.clone() for n, p in b.parameters() if p.grad is not None},
        b.loss.scores(loss.metrics, float(loss.weight)),
    )


def padded_rows(more: int = 0) -> Batch:
    """Rows of one document each, of 32, 29, 26 and 23 tokens, and padding; the last label, which transformers has not,
    is left out.
    """
    batch = uneven()
    rows, length = batch.tokens.shape
    ends = [length - 3 * row for row in range(rows)]
    padding = torch.arange(length + more) >= torch.tensor(ends)[:, None]
    tokens, labels = (torch.cat([t, t[:, :more]], dim=1) for t in (batch.tokens, batch.labels))
    labels[torch.arange(length + more) >= torch.tensor(ends)[:, None] - 1] = -100
    positions = torch.arange(length + more).expand(rows, -1).contiguous()
    weight = int((labels != -100).sum())
    return replace(
        batch, tokens=tokens, labels=labels, positions=positions, mask=MaskSpec(), weight=weight, padding=padding
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    b, batch = made(family), padded_rows()
    assert batch.padding is not None
    uneven_biases(b.trained[0])
    b.trained[0].save_pretrained(tmp_path)  # type: ignore[operator]
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    ).train()
    labels = torch.cat([torch.full((4, 1), -100), batch.labels[:, :-1]], dim=1)  # theirs are shifted in the model
    has_loss = family not in BY_SIGMOID
    router = {"output_router_logits": True} if has_loss else {}
    real = ~batch.padding
    out = theirs(input_ids=batch.tokens, attention_mask=real.long(), labels=labels, use_cache=False, **router)
    out.loss.backward()
    loss, ours, scores = grads(b, [batch])
    assert loss == pytest.approx(float(out.loss.detach()), abs=2e-6)
    assert not has_loss or scores["balance_loss"] == pytest.approx(float(out.aux_loss.detach()), rel=1e-6)
    assert difference(ours, {n: p.grad for n, p in theirs.named_parameters()}) < 1e-5
    assert 1 < scores["expert_load"] <= 4  # 8 experts, 2 a token: 1 is even, 4 is all tokens to the same two
    counts = b.loss.metrics["expert_tokens"]
    assert counts.sum(1).tolist() == [int(real.sum()) * 2] * b.model.expert_layers  # none is dropped, and no padding
    assert scores["expert_loads"] == pytest.approx((counts.max(1).values / counts.mean(1)).tolist(), abs=1e-3)
    assert scores["experts_idle"] == int((counts == 0).sum())


@pytest.mark.parametrize("techniques", ["{}", "{activation_checkpointing: {mode: selective}}"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_more_padding_changes_nothing(family: str, techniques: str) -> None:
    short, long = (grads(made(family, techniques), split(padded_rows(more), [2, 2])) for more in (0, 17))
    assert long[0] == pytest.approx(short[0], abs=2e-6)
    assert difference(long[1], short[1]) < 1e-5
    assert long[2].pop("expert_loads") == short[2].pop("expert_loads")
    assert long[2] == pytest.approx(short[2], rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_load_is_measured_over_the_layers_that_have_experts(family: str) -> None:
    model = made(family)
    assert model.model.expert_layers == len(routers(model.trained[0])) == (2 if family in OF_FOLDERS else 3)
    assert model.model.experts == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_give_the_loss_and_gradients_of_the_whole(family: str) -> None:
    b, batch = made(family), uneven(padded=True)
    loss, whole, scores = grads(b, [batch])
    for sizes in ([2, 2], [1, 2, 1]):
        again, parts, same = grads(b, split(batch, sizes))
        assert again == pytest.approx(loss, abs=2e-6)
        assert difference(parts, whole) < 1e-5
        assert same.pop("expert_loads") == scores["expert_loads"]
        assert same == pytest.approx({k: v for k, v in scores.items() if k != "expert_loads"}, rel=1e-6)


def test_the_pass_that_counts_routes_as_the_one_that_trains() -> None:
    """With dropout in adapters: the same draws, so the balance loss is that of the choices that were trained on."""
    b = made("qwen3_moe", "{lora: {target_modules: [v_proj, o_proj], dropout: 0.5}}")
    with torch.no_grad():
        for n, p in b.parameters():
            p.normal_(generator=torch.Generator().manual_seed(len(n)))  # so that what is dropped matters
    torch.manual_seed(0)
    b.optimizer.zero_grad()
    metrics = accumulate_gradients(b, split(uneven(), [2, 2]), 0.01).metrics
    counts, weight = metrics["expert_tokens"].sum(0), uneven().weight
    assert int(counts.sum()) == 3 * 4 * 32 * 2
    sums = None
    torch.manual_seed(0)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # the same step with the probabilities written down, by what was trained on
        held = []
        patch.setattr(
            "preheat.engine.moe_aux_loss.compute_balance_part",
            lambda c, s, k: held.append((c, s)) or compute_balance_part(c, s, k),
        )
        accumulate_gradients(b, split(uneven(), [2, 2]), 0.01)
        sums = sum(s.detach() for _, s in held)
        assert all(torch.equal(c, counts) for c, _ in held)
    assert float(metrics["balance"]) == pytest.approx(float(compute_balance_part(counts, sums, 2)) * weight, rel=1e-5)


def test_a_coefficient_of_zero_leaves_the_loss_out_and_the_evaluation_always_does() -> None:
    from preheat.engine.evaluate import evaluate

    batch = uneven()
    strong, none = (
        made("mixtral"),
        build(
            recipes.override(tiny(family="mixtral"), "model.config={router_aux_loss_coef: 0}"),
            vocabulary=96,
            device=DEVICE,
        ),
    )
    (a, _, scores), (c, _, bare) = grads(strong, [batch]), grads(none, [batch])
    assert a == pytest.approx(c + 0.5 * scores["balance_loss"], abs=2e-6)
    assert "balance_loss" not in bare
    assert bare["expert_load"] == scores["expert_load"]
    assert evaluate(strong, [batch])[0] == pytest.approx(c, abs=2e-6)


def test_an_even_load_costs_the_number_of_chosen_experts() -> None:
    assert float(compute_balance_part(torch.full((4,), 6.0), torch.full((4,), 3.0), 2)) == pytest.approx(
        2.0
    )  # 12 tokens, 2 of 4 experts


@pytest.mark.parametrize(("width", "inner"), [(16, 8), (6, 5)])  # whole 16-byte rows, and others
@pytest.mark.parametrize(("counts", "dtype"), [((3, 0, 4), torch.float32), ((0, 0, 2), torch.float64)])
def test_grouped_products_against_one_product_an_expert(
    width: int, inner: int, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), width, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, inner, width, generator=g, dtype=dtype, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    out = grouped_linear(rows, weight, ends)
    wanted = torch.cat([part @ matrix.t() for part, matrix in zip(rows.split(counts), weight, strict=True)])
    seed = torch.randn(out.shape, generator=g, dtype=dtype)
    ours, theirs = torch.autograd.grad(out, (rows, weight), seed), torch.autograd.grad(wanted, (rows, weight), seed)
    for a, c in zip((out, *ours), (wanted, *theirs), strict=True):
        torch.testing.assert_close(a, c)
    torch.library.opcheck(torch.ops.preheat.grouped_linear.default, (rows, weight, ends))


@pytest.mark.parametrize(
    "counts", [[3, 0, 300, 5], [0, 0, 1, 0], [600, 0, 0, 0], [257, 256, 255, 1], [0, 7, 0, 0]], ids=str
)
def test_blocks_of_rows_give_the_products_without_reading_where_an_expert_ends(counts: list[int]) -> None:
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    rows, weight, grad = (
        torch.randn(shape, dtype=torch.float64) for shape in ((sum(counts), 7), (4, 7, 5), (sum(counts), 5))
    )
    expected, outer = _multiply(rows, weight, ends, False), _sum_outer(rows, grad, ends)
    torch.testing.assert_close(_multiply_blocks(rows, weight, ends), expected)
    torch.testing.assert_close(_sum_outer_blocks(rows, grad, ends), outer)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_waits_for_the_device(family: str) -> None:
    assert waits_of(made(family), [uneven()]) == []
    assert waits_of(made(family, "{mixed_precision: {}}"), split(uneven(), [2, 2])) == []


def test_rows_that_are_filled_up_change_nothing() -> None:
    torch.manual_seed(0)
    experts: Any = types.SimpleNamespace(
        num_experts=5,
        gate_up_proj=torch.randn(5, 32, 16, requires_grad=True),
        down_proj=torch.randn(5, 16, 16, requires_grad=True),
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        _apply_gate=lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    )
    hidden = torch.randn(161, 16, requires_grad=True)
    chosen = torch.randint(4, (161, 2))  # nobody chooses the last
    weights = torch.rand(161, 2, requires_grad=True)
    inputs = (hidden, weights, experts.gate_up_proj, experts.down_proj)
    found = []
    for stepped in (False, True):
        sizes: list[tuple[int, ...]] = []
        with torch.autocast("cpu", torch.bfloat16), patch("preheat.ops.grouped_mm._multiply", _noting(sizes)):
            out = compute_experts(experts, hidden, chosen, weights, stepped=stepped)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        assert all(n % 16 == 0 for counts in sizes for n in counts) == stepped
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-2 * one.norm()
        assert other.isfinite().all()


def _noting(sizes: list[tuple[int, ...]]) -> Any:
    """`_multiply`, that notes how many rows each expert has."""

    def multiply(rows: Any, weight: Any, ends: Any, flip: bool) -> Any:
        sizes.append(tuple(ends.diff(prepend=ends.new_zeros(1)).tolist()))
        assert int(ends[-1]) == len(rows)
        return _multiply(rows, weight, ends, flip)

    return multiply


def test_the_router_is_in_fp32_under_autocast() -> None:
    b = made("qwen3_moe", "{mixed_precision: {}}")
    router: Any = routers(b.trained[0])[0]
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, weights, _ = router(hidden)
    assert scores.dtype == weights.dtype == torch.float32
    assert torch.equal(scores, torch.nn.functional.linear(hidden.float(), router.weight))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_with_a_matrix_for_each_expert_is_read(family: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    b = made(family)
    uneven_biases(b.trained[0])
    b.trained[0].save_pretrained(tmp_path)  # type: ignore[operator]
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as opened:
        keys = list(opened.keys())
    assert any(".experts.7." in key for key in keys)
    recipe = recipes.override(
        recipes.parse("stop: {max_steps: 1}\nbatch: {seq_len: 32}"), f"model={{path: {tmp_path}}}"
    )
    again = build(recipe, vocabulary=96, device=DEVICE)
    assert difference(dict(again.trained[0].state_dict()), dict(b.trained[0].state_dict())) == 0


def test_a_dry_run_counts_the_products_of_experts_and_the_pass_that_counts_tokens() -> None:
    base = observe(Request(tiny(family="qwen3"), DEVICE, vocabulary=96))
    whole = observe(Request(tiny(family="qwen3_moe"), DEVICE, vocabulary=96))
    tokens, layers = 4 * 32, 3
    block, router = 6 * tokens * 3 * 32 * 64, 6 * tokens * 32 * 8  # forward and twice that in backward
    assert whole.model_flops - base.model_flops == layers * (2 * block + router - block)
    parts = observe(Request(tiny("{gradient_accumulation: {steps: 4}}", family="qwen3_moe"), DEVICE, vocabulary=96))
    assert parts.model_flops == whole.model_flops
    head = 2 * tokens * 32 * 96
    assert (
        sum(parts.flops.values()) - parts.model_flops == whole.model_flops // 3 - head
    )  # a forward pass without the head


def test_adafactor_takes_a_stack_as_matrices() -> None:
    g = torch.Generator().manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 4, 5, generator=g))
    parts = [torch.nn.Parameter(m.clone()) for m in stack.detach()]
    together, apart = Adafactor([stack], lr=0.1), Adafactor(parts, lr=0.1)
    for _ in range(3):
        stack.grad = torch.randn(stack.shape, generator=g)
        for p, grad in zip(parts, stack.grad, strict=True):
            p.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in parts]))


def test_what_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model.num_experts: 4: llama has no experts"):
        recipes.override(tiny(), "model.num_experts=4")
    with pytest.raises(RecipeError, match=r"model.num_experts_per_tok: 9 is more than the 8 experts"):
        recipes.override(tiny(family="mixtral"), "model.num_experts_per_tok=9")
    with pytest.raises(RecipeError, match=r"router_jitter_noise = 0\.1, which preheat does not handle"):
        build(
            recipes.override(tiny(family="mixtral"), "model.config={router_jitter_noise: 0.1}"),
            vocabulary=96,
            device=DEVICE,
        )
    with pytest.raises(
        RecipeError, match="matches no linear map of the model; its experts hold theirs in one parameter"
    ):
        made("qwen3_moe", "{lora: {target_modules: [gate_proj, up_proj, down_proj]}}")
    with pytest.raises(RecipeError, match=r"expert_balancing: cannot go with lora \(frozen-base\)"):
        made("qwen3_moe", "{lora: {}, expert_balancing: {}}", strong=False)


def test_adapters_go_onto_shared_experts_and_leave_router_and_experts_as_they_are() -> None:
    b = made("glm4_moe", "{lora: {}}")
    model: Any = b.trained[0]
    kept = {n: p.clone() for n, p in model.named_parameters() if ".mlp." in n and "lora" not in n}
    assert b.changes["lora"][0].count == 3 * (4 + 3)  # attention, and the dense block or the shared expert
    assert all(".self_attn." in n or ".mlp.shared_experts." in n or ".layers.0.mlp." in n for n, _ in b.parameters())
    accumulate_gradients(b, [uneven()], 0.01)
    update(b, 0.01)
    assert difference({n: p for n, p in model.named_parameters() if n in kept}, kept) == 0


def test_a_copy_of_a_model_routes_by_its_own_weights() -> None:
    model: Any = made("qwen3_moe").trained[0]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        routers(twin)[0].weight.zero_()
    scores = [routers(m)[0](torch.ones(1, 32))[0].detach().abs().max() for m in (twin, model)]
    assert scores[0] == 0 < scores[1]


def test_adapters_on_experts_begin_as_the_base_and_are_those_of_peft(tmp_path: Path) -> None:
    """The loss and gradients of the pairs are those of the matrices that they stand for; merged, the logits stay."""
    from preheat.engine.evaluate import evaluate
    from preheat.models import hf
    from preheat.ops.adapters.moe_lora import adapted_experts
    from preheat.ops.adapters.peft_layers import disable_adapters, merge

    settings = "{target_modules: [q_proj, v_proj], rank: 4, expert_rank: 4, alpha: 8}"
    plain, b = made("qwen3_moe", strong=False), made("qwen3_moe", f"{{lora: {settings}}}", strong=False)
    batch = padded_rows()
    assert grads(b, [batch])[0] == pytest.approx(grads(plain, [batch])[0], abs=1e-6)
    model: Any = b.trained[0]
    names = {n for n, _ in b.parameters()}
    assert sum(".experts." in n for n in names) == 3 * 4
    assert not any("mlp.gate." in n for n in names)  # routers are frozen
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in b.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    loss, ours, _ = grads(b, [batch])
    with disable_adapters(model):
        assert evaluate(b, [batch])[0] == pytest.approx(evaluate(plain, [batch])[0], abs=1e-6)
    before = hf.compute_reference_logits(model, batch.tokens)
    # The same with the sum of each expert's matrix and its addition written out, for the gradients.
    kept = {n: p for n, p in model.named_parameters() if ".experts." in n}
    assert len(adapted_experts(model)) == 3
    whole = copy.deepcopy(model)
    assert merge(whole) == 3 * 2 + 3
    assert not adapted_experts(whole)
    after = hf.compute_reference_logits(whole, batch.tokens)
    assert float((after - before).norm() / before.norm()) < 1e-5
    plain.trained[0].load_state_dict(whole.state_dict())
    again, full, _ = grads(plain, [batch])
    assert again == pytest.approx(loss, abs=1e-6)
    for name, grad in full.items():
        if ".experts." in name:
            first, second = kept[f"{name}_lora_A"].detach(), kept[f"{name}_lora_B"].detach()
            wanted = {"A": 2.0 * second.transpose(1, 2) @ grad, "B": 2.0 * grad @ first.transpose(1, 2)}
            assert difference({k: ours[f"{name}_lora_{k}"] for k in "AB"}, wanted) < 1e-5


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("llama", "expert_rank: 4", "expert_rank: 4 is for experts, and llama has none"),
        (
            "qwen3_moe",
            "expert_rank: 4, variant: dora, target_modules: [q_proj]",
            "goes with lora and rslora, and variant is dora",
        ),
        ("qwen3_moe", "expert_rank: 4, dropout: 0.1, target_modules: [q_proj]", "does not go with dropout"),
        (
            "qwen3_moe",
            "expert_rank: 99, target_modules: [q_proj]",
            "lora.expert_rank: 99 is more than the 32 directions",
        ),
    ],
)
def test_adapters_on_experts_are_refused_in_words(family: str, lora: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        made(family, f"{{lora: {{{lora}}}}}", strong=False)
