"""The adapter: what transformers computes, we compute; what cannot be found is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from preheat.core import MaskSpec
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.models import hf, size_dial
from preheat.models.weights import WeightSource, materialize
from preheat.ops.attention.sdpa import reference_attention
from preheat.recipe import override, parse

from ...conftest import DEVICE, tiny

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=None),
    "gemma": lambda: transformers.GemmaConfig(**GROUPED),
    "phi3": lambda: transformers.Phi3Config(
        **{k: v for k, v in GROUPED.items() if k != "head_dim"}, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "gpt2": lambda: transformers.GPT2Config(
        **SMALL, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_head_give_the_logits_of_transformers(family: str) -> None:
    model = hf.build_on_meta(FAMILIES[family]())
    materialize(model, "cpu")
    WeightSource(None).fill(model, seed=3)
    model.eval()
    tokens = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(0))
    places = torch.arange(20).repeat(2, 1)
    found = hf.find_anatomy(model)
    assert (len(found.layers), len(found.attentions)) == (2, 2)
    with torch.no_grad():
        ours = hf.head(model)(hf.hidden_states(model, tokens, places, MaskSpec(), reference_attention))
    theirs = hf.compute_reference_logits(model, tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
    # Two documents in a row are what two rows of their own are.
    documents = MaskSpec(documents=((7, 13), (7, 13)))
    places = torch.cat([torch.arange(7), torch.arange(13)]).repeat(2, 1)
    with torch.no_grad():
        packed = hf.head(model)(hf.hidden_states(model, tokens, places, documents, reference_attention))
    alone = torch.cat(
        [hf.compute_reference_logits(model, tokens[:, :7]), hf.compute_reference_logits(model, tokens[:, 7:])], dim=1
    )
    assert float((packed - alone).norm() / alone.norm()) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_new_weights_are_drawn_as_transformers_draws_them(family: str) -> None:
    model = build(tiny(family=family), vocabulary=96, device=DEVICE).trained[0]
    half = build(tiny("{mixed_precision: {mode: bf16_weights}}", family=family), vocabulary=96, device=DEVICE).trained[
        0
    ]
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(model.parameters(), half.parameters(), strict=True))
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            wanted = (
                0.02 / (2 * 3) ** 0.5 if "c_proj" in name else 0.02
            )  # GPT-2's way back to the residual stream, 3 layers
            assert float(p.detach().std()) == pytest.approx(wanted, rel=0.25), name
        elif name.endswith("norm.weight") or ("ln_" in name and name.endswith("weight")):
            assert p.detach().unique().tolist() == [1.0]
    again = build(tiny(family=family), vocabulary=96, device=DEVICE).trained[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    other = build(override(tiny(family=family), "seed=1"), vocabulary=96, device=DEVICE).trained[0]
    assert not torch.equal(next(model.parameters()), next(other.parameters()))


def test_a_folder_is_read_and_a_tied_head_stays_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path / "m")
    r = parse(f"model: {{path: {tmp_path / 'm'}}}\nbatch: {{seq_len: 16}}\nstop: {{max_steps: 1}}")
    made = build(r, vocabulary=96, device=DEVICE).trained[0]
    tokens = torch.arange(16)[None]
    assert torch.equal(hf.compute_reference_logits(made, tokens), hf.compute_reference_logits(model, tokens))  # type: ignore[arg-type]
    assert made.get_input_embeddings().weight is made.get_output_embeddings().weight  # type: ignore[operator]


def _folder(tmp_path: Path) -> Path:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no .*safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
            "not a complete safetensors",
        ),
        (
            lambda f: (f / "config.json").write_text(
                (f / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
            ),
            "lacks .* parameters",
        ),
        (
            lambda f: (f / "config.json").write_text(
                (f / "config.json").read_text().replace('"intermediate_size": 48', '"intermediate_size": 50')
            ),
            "do not belong together",
        ),
    ],
)
def test_a_bad_model_folder_is_refused_in_one_line(tmp_path: Path, spoil: Any, words: str) -> None:
    folder = _folder(tmp_path)
    spoil(folder)
    with pytest.raises(RecipeError, match=words) as caught:
        build(
            parse(f"model: {{path: {folder}}}\nbatch: {{seq_len: 16}}\nstop: {{max_steps: 1}}"),
            vocabulary=96,
            device=DEVICE,
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "more", "vocabulary", "words"),
    [
        ("{path: ./nowhere}", "", 96, "no such folder"),
        (
            "{num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 50}",
            "",
            96,
            "data.vocab_size: 96: .* more tokens than the model's embedding has rows, 50",
        ),
        (
            "{num_layers: 2, hidden_size: 32, num_heads: 4, max_positions: 16}",
            "batch: {seq_len: 64}",
            96,
            "longer than the model's 16 positions",
        ),
        ("{num_layers: 2, hidden_size: 32, num_heads: 4, config: {rope_teta: 1}}", "", 96, "did you mean"),
        ("{family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2}", "", 96, "no grouped queries"),
        ("{}", "", 96, "state a path, a size"),
    ],
)
def test_a_model_that_cannot_be_is_refused(model: str, more: str, vocabulary: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(parse(f"model: {model}\nstop: {{max_steps: 1}}\n{more}"), vocabulary=vocabulary, device=DEVICE)


@pytest.mark.parametrize("size", ["300K", "1M", "5M", "15M", "60M", "125M", "350M", "1.1B", "7B", "70B"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_dial_meets_its_size(size: str, gated: bool) -> None:
    d = size_dial.choose_dimensions(size, gated=gated)
    parameters = d.layers * (4 * d.width**2 + (3 if gated else 2) * d.width * d.feed_forward)
    assert parameters == pytest.approx(
        size_dial.parse_size(size), rel=0.12 if size_dial.parse_size(size) > 2e6 else 0.6
    )
    assert d.width % d.heads == 0
    assert 20 <= d.width / d.layers <= 200


def test_the_learning_rate_of_the_dial_is_the_published_fit() -> None:
    # Kaplan et al. 2020 give 0.003239 - 0.0001395 ln N; at a billion parameters that is 3.5e-4.
    assert size_dial.learning_rate(10**9) == pytest.approx(3.48e-4, rel=0.01)


def test_training_begins_in_fp32_whatever_the_folder_stands_in_and_reading_keeps_it(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=96,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    recipe = f"model: {{path: {tmp_path}}}\nbatch: {{size: 1, seq_len: 16}}\nstop: {{max_steps: 1}}\n"
    for techniques, reading, wanted in (
        ("{}", False, torch.float32),
        ("{mixed_precision: {mode: bf16}}", False, torch.float32),
        ("{mixed_precision: {mode: bf16_weights}}", False, torch.bfloat16),
        ("{}", True, torch.bfloat16),
    ):
        made = build(parse(f"{recipe}techniques: {techniques}"), vocabulary=96, device=DEVICE, reading=reading)
        assert made.trained[0].get_input_embeddings().weight.dtype == wanted, (techniques, reading)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12),
        ("vocab_size", -5),
        ("num_key_value_heads", 2**40),
        ("intermediate_size", 2**22),  # alone in reach; with so many layers of such a width not
    ],
)
def test_sizes_that_no_machine_holds_are_refused_before_anything_is_built(tmp_path: Path, key: str, value: int) -> None:
    config = transformers.LlamaConfig(**GROUPED).to_dict() | {key: value}
    words = key
    if key == "intermediate_size":
        config |= {"num_hidden_layers": 4096, "hidden_size": 2**20}
        words = "parameters, more than"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=words) as caught:
        hf.configure(parse(f"model: {{path: {tmp_path}}}\nbatch: {{seq_len: 8}}\nstop: {{max_steps: 1}}"), 96)
    assert len(str(caught.value)) < 300


def test_sizes_of_model_config_are_refused_too() -> None:
    small = parse(
        "model: {num_layers: 1, hidden_size: 32, num_heads: 4, vocab_size: 96}\nbatch: {seq_len: 8}\nstop: {max_steps: 1}"
    )
    with pytest.raises(RecipeError, match="num_hidden_layers 1000000000"):
        hf.configure(override(small, "model.config.num_hidden_layers=1000000000"), 96)
