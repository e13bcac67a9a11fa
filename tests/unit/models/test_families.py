"""Model families: loss and gradients of a whole build with our techniques are those of plain transformers, document by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from preheat.core import MaskSpec
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.models import hf
from preheat.ops.adapters.peft_layers import merge
from preheat.ops.attention.sdpa import reference_attention
from preheat.ops.losses.cross_entropy import CrossEntropy, RegularizedCrossEntropy, Softcapped
from preheat.recipe import Recipe, parse

from ...conftest import DEVICE, difference, uneven
from ...contract.waits import waits_of

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 4.0],
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 6}
FAMILIES: dict[str, Any] = {
    "llama, llama3 rope, tied": lambda: transformers.LlamaConfig(
        **TINY, num_hidden_layers=2, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "qwen2, biases, tied": lambda: transformers.Qwen2Config(**TINY, num_hidden_layers=2, tie_word_embeddings=True),
    "qwen2, yarn": lambda: transformers.Qwen2Config(**TINY, num_hidden_layers=2, rope_parameters=YARN),
    "qwen2, windows in its upper layers": lambda: transformers.Qwen2Config(
        **TINY, num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3, q and k norms": lambda: transformers.Qwen3Config(**TINY, num_hidden_layers=2, head_dim=16),
    "mistral, window": lambda: transformers.MistralConfig(**TINY, num_hidden_layers=2, sliding_window=6),
    "gemma": lambda: transformers.GemmaConfig(**TINY, num_hidden_layers=2, head_dim=8),
    "gemma2, both softcaps": lambda: transformers.Gemma2Config(
        **TINY, **GEMMA, num_hidden_layers=2, final_logit_softcapping=0.3, attn_logit_softcapping=0.5
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **TINY, **GEMMA, num_hidden_layers=3, sliding_window_pattern=3
    ),
    "phi3, partial rotary, long rope": lambda: transformers.Phi3Config(
        **TINY, num_hidden_layers=2, original_max_position_embeddings=32, rope_parameters=dict(LONG)
    ),
    "phi, a biased head": lambda: transformers.PhiConfig(**TINY, num_hidden_layers=2),
    "phi, a biased head that is tied": lambda: transformers.PhiConfig(
        **TINY, num_hidden_layers=2, tie_word_embeddings=True
    ),
    "phi3, window": lambda: transformers.Phi3Config(**TINY, num_hidden_layers=2, sliding_window=6),
}
TECHNIQUES = "{efficient_attention: {}, chunked_loss: {rows: 40}, activation_checkpointing: {}, lora: {rank: 4}}"


def _lively(model: Any) -> None:
    """Draws what begins at zero or one too, biases and norms, so that leaving one out is seen; scores wide enough for a softcap."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.ndim == 1 or "lora_B" in name:
                p.add_(torch.randn(p.shape, generator=g) * 0.2)
            else:
                p.mul_(4)


def _folder(tmp_path: Path, config: Any) -> tuple[Path, Any]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _lively(model)
    model.save_pretrained(tmp_path / "m")
    return tmp_path / "m", model


def _recipe(folder: Path, techniques: str) -> Recipe:
    return parse(
        f"model: {{path: {folder}}}\nbatch: {{size: 4, seq_len: 32}}\noptimizer: {{lr: 0.01}}\nstop: {{max_steps: 4}}\ntechniques: {techniques}"
    )


def _alone(model: Any, batch: Any) -> Any:
    """The loss that transformers' own eager forward gives, each document a call of its own."""
    total = torch.zeros(())
    for row, documents in enumerate(batch.mask.documents):
        start = 0
        for n in documents:
            place = slice(start, start + n)
            logits = model(input_ids=batch.tokens[row : row + 1, place], use_cache=False).logits[0].float()
            total = total + functional.cross_entropy(
                logits, batch.labels[row, place], ignore_index=-100, reduction="sum"
            )
            start += n
    return total / batch.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_a_build_with_our_techniques_is_plain_transformers(family: str, tmp_path: Path) -> None:
    folder, plain = _folder(tmp_path, FAMILIES[family]())
    batch = uneven()
    full = "{efficient_attention: {}, chunked_loss: {rows: 40}, activation_checkpointing: {}}"
    made = build(_recipe(folder, full), vocabulary=96, device=DEVICE)
    expected = _alone(plain.train(), batch)
    expected.backward()
    loss = accumulate_gradients(made, [batch])
    assert float(loss.total.detach() / loss.weight) == pytest.approx(float(expected.detach()), rel=1e-5)
    ours = {name: p.grad for name, p in made.trained[0].named_parameters()}
    theirs: dict[str, Any] = {name: p.grad for name, p in plain.named_parameters()}
    assert difference(ours, theirs) < 1e-5  # type: ignore[arg-type]
    # An adapter W + s B A with B = 0 has the same loss, and dL/dB = s dL/dW A'.
    made = build(_recipe(folder, TECHNIQUES), vocabulary=96, device=DEVICE)
    loss = accumulate_gradients(made, [batch])
    assert float(loss.total.detach() / loss.weight) == pytest.approx(float(expected.detach()), rel=1e-5)
    by_name = dict(made.trained[0].named_parameters())
    adapted = [name for name in by_name if ".lora_B." in name]
    assert len(adapted) == made.changes["lora"][0].count
    found = {name: by_name[name].grad for name in adapted}
    wanted = {
        name: 8.0
        * theirs[name.partition(".lora_B")[0] + ".weight"]
        @ by_name[name.replace("lora_B", "lora_A")].detach().T
        for name in adapted
    }
    assert difference(found, wanted) < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_waits_for_the_device(family: str, tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path, FAMILIES[family]())
    b = build(_recipe(folder, "{lora: {}, mixed_precision: {}}"), vocabulary=96, device=DEVICE)
    assert waits_of(b, [uneven()]) == []


def test_long_positions_take_the_long_factors_as_in_transformers(tmp_path: Path) -> None:
    config = FAMILIES["phi3, partial rotary, long rope"]()
    config.rope_parameters["original_max_position_embeddings"] = config.original_max_position_embeddings = 16
    folder, plain = _folder(tmp_path, config)
    made: Any = build(_recipe(folder, "{}"), vocabulary=96, device=DEVICE).trained[0]
    for length in (16, 17):  # the last that is near, the first that is far
        tokens, places = torch.arange(length)[None] + 3, torch.arange(length)[None]
        with torch.no_grad():
            states = hf.hidden_states(made, tokens, places, MaskSpec(), reference_attention)
            ours, theirs = hf.compute_logits(made, states), plain(input_ids=tokens, use_cache=False).logits
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6


def test_logits_that_are_more_than_a_linear_head_are_refused() -> None:
    config = transformers.PhiConfig(**TINY, num_hidden_layers=2)
    config.logit_scale = 0.5  # applied to hidden states, it would leave the bias out
    with pytest.raises(RecipeError, match="PhiForCausalLM of transformers multiplies the logits of a head with a bias"):
        hf.build_on_meta(config)
    between = transformers.ModernBertDecoderConfig(**TINY, num_hidden_layers=2)
    with pytest.raises(RecipeError, match=r"has lm_head.dense.weight between its hidden states and its head"):
        hf.build_on_meta(between)


def test_kernels_that_would_leave_out_a_softcap_are_refused(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path, FAMILIES["gemma2, both softcaps"]())
    for techniques, words in (
        ("{chunked_loss: {kernel: torch}}", "would leave out the cap on the logits of gemma2; use ours"),
        ("{efficient_attention: {kernel: flash}}", "cannot cap its scores, as gemma2 does; use blocks, flex or auto"),
    ):
        with pytest.raises(RecipeError, match=words):
            build(_recipe(folder, techniques), vocabulary=96, device=DEVICE)


@pytest.mark.parametrize("inner", [CrossEntropy(), RegularizedCrossEntropy(0.1, 1e-2)], ids=["plain", "regularized"])
def test_a_capped_loss_makes_its_own_gradient_in_place(inner: Any) -> None:
    loss, labels = Softcapped(inner, 0.7), torch.tensor([3, -100, 0])
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = loss(logits, labels)
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    in_place = logits.detach().clone()
    made, factor = loss.value_and_grad_(in_place, labels)  # type: ignore[misc]
    assert torch.allclose(made, expected.detach(), atol=1e-6)
    assert torch.allclose(in_place * factor[:, None], slope, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_and_the_exported_folder_is_the_trained_model(family: str, tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path, FAMILIES[family]())
    made = build(_recipe(folder, TECHNIQUES), vocabulary=96, device=DEVICE)
    model: Any = made.trained[0]
    batch = uneven()
    first = accumulate_gradients(made, [batch]).total.detach()
    update(made, 0.01)
    for _ in range(5):
        last = accumulate_gradients(made, [batch]).total.detach()
        update(made, 0.01)
    assert last < first
    tokens = torch.arange(3, 35)[None]
    before = hf.compute_reference_logits(model, tokens)
    assert merge(model) > 0
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert float((hf.compute_reference_logits(again, tokens) - before).norm() / before.norm()) < 1e-5
    ours: Any = build(_recipe(tmp_path / "out", "{}"), vocabulary=96, device=DEVICE).trained[0]
    assert torch.equal(hf.compute_reference_logits(ours, tokens), hf.compute_reference_logits(again, tokens))
