"""Quantization-aware training: what is trained with is what converting gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat import recipe as recipes
from preheat.compress import save_load
from preheat.compress.compress import find_trained_variants
from preheat.compress.methods.int4 import Int4
from preheat.core import Batch, MaskSpec
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.inference.load import load_model
from preheat.models.hf import compute_reference_logits
from preheat.ops.adapters.peft_layers import merge
from preheat.ops.quantization.fake_quant import Grid, _multiply, round_weight, unfake_
from preheat.ops.quantization.linear import Int4Linear, Int8Linear
from preheat.techniques.lora import add_lora
from preheat.techniques.quantization_aware import QuantizationAware, round_weights

from ...conftest import DEVICE, tiny

TOKENS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))


def model(techniques: str = "{}", family: str = "llama") -> Any:
    return build(tiny(techniques, family=family), vocabulary=96, device=DEVICE).trained[0]


def converted(trained: Any, settings: Int4) -> Any:
    """Merged and converted; embedding and head, which training does not round, as they were."""
    made = copy.deepcopy(trained)
    if hasattr(made, "peft_config"):
        merge(made)
    unfake_(made)
    made.requires_grad_(False)
    ends = made.get_input_embeddings(), made.lm_head
    settings.apply(made, [])
    made.set_input_embeddings(ends[0])
    made.lm_head = ends[1]
    return made


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("symmetric", "inputs"), [(True, "full"), (False, "int8")])
def test_converting_gives_the_weights_and_logits_of_training(family: str, symmetric: bool, inputs: Any) -> None:
    trained = model(family=family)
    four, eight = round_weights(trained, QuantizationAware(symmetric=symmetric, inputs=inputs, group_size=16))
    assert (four, eight) == ((4, 8) if family == "gpt2" else (7, 14))
    made = converted(trained, Int4(symmetric=symmetric, inputs=inputs, group=16))
    assert sum(isinstance(m, Int4Linear) for m in made.modules()) == four
    wanted, found = compute_reference_logits(trained, TOKENS), compute_reference_logits(made, TOKENS)
    assert float((wanted - found).norm() / wanted.norm()) < 2e-6
    unfake_(trained)
    plain = compute_reference_logits(trained, TOKENS)
    assert float((wanted - plain).norm() / wanted.norm()) > 1e-2, "rounding is seen"


def test_under_lora_base_and_adapter_are_rounded_together() -> None:
    trained = model()
    add_lora(trained, rank=4)
    round_weights(trained, QuantizationAware(group_size=16))
    torch.manual_seed(1)
    for name, p in trained.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.05)
    wanted = compute_reference_logits(trained, TOKENS)
    made = converted(trained, Int4(group=16))
    assert float((compute_reference_logits(made, TOKENS) - wanted).norm() / wanted.norm()) < 2e-6
    layer = trained.model.layers[1].mlp.up_proj
    together = round_weight(layer.base_layer.weight + layer.get_delta_weight("default"), Grid(4, 16))
    assert torch.equal(made.model.layers[1].mlp.up_proj.weight, together)


def test_gradients_pass_as_if_nothing_was_rounded() -> None:
    x = torch.randn(3, 16)
    w = torch.randn(4, 16, requires_grad=True)
    _multiply(x, w, None, Grid(4, 16)).square().sum().backward()
    out = x @ round_weight(w, Grid(4, 16)).t()
    assert w.grad is not None
    assert torch.allclose(w.grad, (2 * out).t() @ x, atol=1e-4)


def test_it_learns_what_rounding_after_training_loses(data_folder: Path) -> None:
    """From one model, the same steps with and without, both converted alike; on text that neither was trained on."""
    stories = data_folder / "stories260K-hf"
    text = (data_folder / "text" / "tinystories_train_excerpt.txt").read_text(encoding="utf-8")[:60_000]
    ids = torch.tensor(load_model(stories).tokenizer.encode(text))[: 26 * 4 * 97].view(26, 4, 97)
    found = {}
    for techniques in ("{}", "{quantization_aware: {keep: [embedding, head]}}"):
        b = build(
            recipes.parse(
                f"model: {{path: {stories}}}\nbatch: {{size: 4, seq_len: 96}}\nstop: {{max_steps: 20}}\n"
                f"optimizer: {{lr: 0.0005, weight_decay: 0}}\ntechniques: {techniques}"
            ),
            vocabulary=512,
            device=DEVICE,
        )
        for rows in ids[:20]:
            accumulate_gradients(b, [batch_of(rows)])
            update(b, 5e-4)
        made = converted(b.trained[0], Int4(keep=("embedding", "head")))
        logits = torch.cat([compute_reference_logits(made, rows[:, :-1]) for rows in ids[20:]])
        found[techniques] = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[20:, :, 1:].flatten()))
    plain, aware = found.values()
    assert aware < plain - 0.03


def batch_of(rows: Tensor) -> Batch:
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    documents = ((tokens.shape[1],),) * len(rows)
    return Batch(
        tokens, labels, positions, MaskSpec(documents=documents), labels.numel(), tuple(range(len(rows))), 1, ()
    )


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        (
            "{quantization_aware: {group_size: 24}}",
            r"quantization_aware\.group: 24 does not divide the 32 inputs of model\.layers\.1",
        ),
        ("{quantization_aware: {keep: [lyers]}}", "keep: 'lyers' matches no linear map"),
        ("{quantization_aware: {keep: '.*proj'}}", "leaves no linear map for four bits"),
        ("{quantization_aware: {}, lora: {variant: dora}}", "only a plain LoRA"),
        ("{quantization_aware: {}, lora: {dropout: 0.1}}", "set its dropout to 0"),
        ("{quantization_aware: {}, lora: {}, nf4: {}}", "cannot go with nf4"),
    ],
)
def test_what_cannot_be_is_refused(techniques: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        model(techniques)


def test_a_run_names_the_method_that_it_was_trained_for(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        recipes.dump(tiny("{quantization_aware: {group_size: 16, inputs: int8}}")), encoding="utf-8"
    )
    (variant,) = find_trained_variants(tmp_path)
    assert variant.method == Int4(group=16, inputs="int8")
    assert find_trained_variants(tmp_path / "none") == []


def test_what_was_trained_with_is_what_a_folder_gives(data_folder: Path, tmp_path: Path) -> None:
    """bf16 for what is not rounded in training is all that comes between."""
    stories = data_folder / "stories260K-hf"
    opened = load_model(stories)
    taught: Any = opened.build.trained[0].requires_grad_(False)
    round_weights(taught)
    row = torch.tensor([opened.tokenizer.encode("Once upon a time, there was a little girl named Lily.")])
    wanted = compute_reference_logits(taught, row)
    unfake_(taught)
    Int4().apply(taught, [])
    save_load.write_model(taught, opened, tmp_path, method="int4", dtype=torch.float32)
    again: Any = load_model(tmp_path).build.trained[0]
    assert sum(isinstance(m, Int8Linear) for m in again.modules()) == 15
    found = compute_reference_logits(again, row)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02
    assert bool((found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9)
