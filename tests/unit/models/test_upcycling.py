"""Dense models that become ones with experts, through recipes: what is read, refused, and opened by transformers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preheat import recipe as recipes
from preheat.engine.builder import build
from preheat.engine.evaluate import evaluate
from preheat.engine.step import accumulate_gradients
from preheat.errors import RecipeError
from preheat.planning.dry_run import observe
from preheat.planning.request import Request

from ...conftest import DEVICE, tiny, uneven


def of_folder(folder: Path, techniques: str, *more: str) -> recipes.Recipe:
    recipe = recipes.parse(f"stop: {{max_steps: 1}}\nbatch: {{size: 4, seq_len: 64}}\nmodel: {{path: {folder}}}")
    return recipes.override(recipe, f"techniques={techniques}", *more)


def test_the_first_loss_is_that_of_the_dense_model_and_transformers_opens_what_is_saved(
    data_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, batch = data_folder / "stories260K-hf", uneven(length=64, vocabulary=512)
    dense = build(of_folder(folder, "{}"), vocabulary=512, device=DEVICE)
    b = build(of_folder(folder, "{upcycling: {num_experts: 4}}"), vocabulary=512, device=DEVICE)
    assert b.changes["upcycling"][0].count == 5
    wanted = evaluate(dense, [batch])[0]
    assert evaluate(b, [batch])[0] == pytest.approx(wanted, rel=1e-5)
    loss = accumulate_gradients(b, [batch], 0.01)
    balance = 0.001 * float(loss.metrics["balance"]) / batch.weight
    assert float(loss.total) / batch.weight == pytest.approx(wanted + balance, rel=1e-5)
    model: Any = b.trained[0]
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    old = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.config.model_type == "mixtral"
    a, c = (m(batch.tokens).logits.detach() for m in (theirs, old))
    assert float((a - c).norm() / c.norm()) < 1e-5
    redrawn = build(of_folder(folder, "{upcycling: {num_experts: 4, redrawn: 0.5}}"), vocabulary=512, device=DEVICE)
    assert abs(evaluate(redrawn, [batch])[0] - wanted) > 0.1


def test_the_plan_counts_the_experts() -> None:
    dense, made = (
        observe(Request(tiny(t), DEVICE, vocabulary=96))
        for t in ("{}", "{upcycling: {num_experts: 8, num_experts_per_tok: 2}}")
    )
    block, router = 3 * 32 * 64, 8 * 32
    assert made.parameters - dense.parameters == 3 * (7 * block + router)
    assert made.model_flops - dense.model_flops == 3 * 6 * 4 * 32 * (block + router)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            tiny("{upcycling: {}}", family="gpt2"),
            "makes experts of the feed-forward block of a llama, mistral, qwen3, and the model is a gpt2",
        ),
        (tiny("{upcycling: {}}", family="mixtral"), "and the model is a mixtral"),
        (
            tiny("{upcycling: {num_experts: 4, num_experts_per_tok: 5}}"),
            "num_experts_per_tok: 5 is more than the 4 experts",
        ),
        (
            recipes.override(tiny("{upcycling: {}}"), "model.config={mlp_bias: true}"),
            "which has no mlp_bias as this llama has",
        ),
        (tiny("{expert_balancing: {}}"), "balances experts, and llama has none"),
        (tiny("{upcycling: {}, lora: {}}"), "upcycling: cannot go with lora"),
        (
            tiny("{upcycling: {}, feed_forward: {activation: relu}}"),
            "upcycling: cannot go with feed_forward .ungated-mlp.",
        ),
        (
            recipes.override(
                tiny("{expert_balancing: {}}", family="mixtral"), "model.config={router_aux_loss_coef: 0.1}"
            ),
            "sets the same",
        ),
    ],
)
def test_what_is_refused(recipe: recipes.Recipe, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(recipe, vocabulary=96, device=DEVICE)
