"""Changes to an architecture against slow references, and the refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from preheat.core import Build
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.models import size_dial
from preheat.models.conversions import architecture
from preheat.models.conversions.modules import FeedForward, RMSNorm
from preheat.models.hf import build_on_meta, compute_reference_logits, configure, read_facts
from preheat.recipe import parse
from preheat.techniques.rms_norm import layer_norm_to_rms_norm
from preheat.techniques.tied_embeddings import tie_embeddings

from ...conftest import DEVICE, tiny

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
TOKENS = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(0))


def from_folder(model: Any, folder: Path, techniques: str, more: str = "batch: {seq_len: 16}") -> Build:
    model.save_pretrained(folder)
    r = parse(f"model: {{path: {folder}}}\nstop: {{max_steps: 1}}\ntechniques: {techniques}\n{more}")
    return build(r, vocabulary=96, device=DEVICE)


def shaken(model: Any) -> Any:
    """Every parameter at random, biases and norms too, so that nothing is 0 or 1 by chance."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model.eval()


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


# --- grouped queries ----------------------------------------------------------------------------------------------


def test_pooled_heads_are_the_means_of_their_groups() -> None:
    value = torch.randn(12, 5)  # 4 heads of 3
    slow = torch.stack([(value[6 * g + d] + value[6 * g + 3 + d]) / 2 for g in range(2) for d in range(3)])
    assert torch.allclose(architecture.pool_heads(value, 2, 3), slow)
    assert torch.allclose(architecture.pool_heads(slow, 1, 3), architecture.pool_heads(value, 1, 3), atol=1e-6)
    assert architecture.pool_heads(value[:, 0].bfloat16(), 2, 3).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_heads_that_are_alike_are_pooled_without_a_change(family: str, tmp_path: Path) -> None:
    """Attention in which both heads of each group are the same is what one head for both computes: logits must be equal."""
    more = {"head_dim": 4} if family != "Qwen2" else {}
    torch.manual_seed(0)
    model = shaken(
        getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SMALL, **more))
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "k_proj" in name or "v_proj" in name:
                heads = p.view(2, 2, 4, *p.shape[1:])
                heads[:, 1] = heads[:, 0]
    before = compute_reference_logits(model, TOKENS)
    made = from_folder(model, tmp_path / "m", "{grouped_queries: {num_kv_heads: 2}}")
    assert made.model.kv_heads == 2
    assert off(compute_reference_logits(made.trained[0], TOKENS), before) < 1e-5  # type: ignore[arg-type]
    architecture.pool_key_value_heads(model, 2)
    assert off(compute_reference_logits(model, TOKENS), before) < 1e-5
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.num_key_value_heads == 2
    assert off(compute_reference_logits(again, TOKENS), before) < 1e-5


def test_a_new_model_is_built_with_fewer_heads() -> None:
    made = build(tiny("{grouped_queries: {}}"), vocabulary=96, device=DEVICE)
    assert made.trained[0].model.layers[0].self_attn.k_proj.weight.shape == (8, 32)  # type: ignore[union-attr,index]
    assert "new weights" in made.changes["grouped_queries"][0].what


# --- RMSNorm ------------------------------------------------------------------------------------------------------


def test_rms_norm_is_torchs_and_on_centred_input_layer_norm() -> None:
    x, norm = torch.randn(3, 16), RMSNorm(16, 1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    assert torch.allclose(norm(x), torch.nn.functional.rms_norm(x, (16,), norm.weight, 1e-5), atol=1e-6)
    centred = x - x.mean(-1, keepdim=True)
    assert torch.allclose(norm(centred), torch.nn.functional.layer_norm(x, (16,), norm.weight, None, 1e-5), atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folded_gpt2_gives_the_same_logits_without_layer_norm(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = shaken(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, tie_word_embeddings=tied)))
    before = compute_reference_logits(model, TOKENS)
    made = from_folder(model, tmp_path / "m", "{rms_norm: {}}").trained[0]
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in made.modules())
    assert (made.get_input_embeddings().weight is made.get_output_embeddings().weight) == tied  # type: ignore[operator,union-attr]
    assert off(compute_reference_logits(made, TOKENS), before) < 1e-5  # type: ignore[arg-type]
    layer_norm_to_rms_norm(model)
    assert off(compute_reference_logits(model, TOKENS), before) < 1e-5
    assert architecture.describe_unsupported_modules(model)


# --- feed-forward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "gelu", "relu"])
def test_blocks_have_equal_parameters(family: str, activation: str) -> None:
    r = parse(
        f"model: {{family: {family}, num_layers: 2, hidden_size: 192, num_heads: 4, vocab_size: 96}}\nbatch: {{seq_len: 8}}\nstop: {{max_steps: 1}}"
    )
    plain = build_on_meta(configure(r, 96))
    config = configure(r, 96)
    if (family, activation) in (("llama", "swiglu"), ("gpt2", "gelu")):
        with pytest.raises(ValueError, match="is already the"):
            architecture.set_feed_forward(config, activation)
        return
    architecture.set_feed_forward(config, activation)
    changed = build_on_meta(config)
    replaced = architecture.replace_feed_forward(changed, activation)
    assert (
        (replaced == 2)
        == (activation.endswith("glu") == (family == "gpt2"))
        == bool(architecture.describe_unsupported_modules(changed))
    )
    matrices = [sum(p.numel() for n, p in m.named_parameters() if "mlp" in n and p.ndim == 2) for m in (plain, changed)]
    assert matrices[1] == pytest.approx(matrices[0], rel=0.01)


def test_a_block_is_its_formula() -> None:
    x = torch.randn(3, 8)
    for gated in (True, False):
        block = FeedForward(8, 12, "gelu", gated=gated)
        up = x @ block.up_proj.weight.T
        wide = x @ block.gate_proj.weight.T if block.gate_proj is not None else up
        active = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2))) * (up if gated else 1)
        assert torch.allclose(block(x), active @ block.down_proj.weight.T, atol=1e-6)


def test_a_gated_gpt2_draws_its_outputs_as_gpt2_does() -> None:
    made = build(tiny("{feed_forward: {activation: swiglu}}", family="gpt2"), vocabulary=96, device=DEVICE).trained[0]
    blocks = [layer.mlp for layer in made.transformer.h]  # type: ignore[union-attr]
    assert float(blocks[0].up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)  # type: ignore[union-attr]
    assert float(blocks[0].down_proj.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.1)  # type: ignore[union-attr]


# --- tied embeddings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["embedding", "head", "mean"])
def test_what_is_kept_of_a_folder_is_what_was_asked(keep: str, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    expected = {"embedding": embedding, "head": head, "mean": (embedding + head) / 2}[keep].clone()
    made = from_folder(model, tmp_path / "m", f"{{tied_embeddings: {{keep: {keep}}}}}")
    part: Any = made.trained[0]
    assert torch.equal(part.lm_head.weight, expected)
    assert part.lm_head.weight is part.model.embed_tokens.weight
    assert made.model.tied
    part.set_attn_implementation("eager")
    part.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert off(compute_reference_logits(again, TOKENS), compute_reference_logits(part, TOKENS)) < 1e-6


def test_a_t5_ties_encoder_decoder_and_head() -> None:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, vocab_size=96, decoder_start_token_id=0
        )
    )
    for module in (model.lm_head, model.encoder.embed_tokens, model.decoder.embed_tokens):
        module.weight = torch.nn.Parameter(torch.randn(96, 16))
    head = model.lm_head.weight.detach().clone()
    assert tie_embeddings(model, "head") == 3 * 96 * 16
    ends = [model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head]
    assert len({id(m.weight) for m in ends}) == 1
    assert torch.equal(model.shared.weight, head)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert model.shared.weight.grad is not None
    with pytest.raises(ValueError, match="one matrix already"):
        tie_embeddings(model, "head")


# --- rotary scaling -----------------------------------------------------------------------------------------------

LENGTH, FACTOR, DIM, THETA = 256, 4.0, 64, 10000.0


def yarn_share(rotations: float) -> float:
    """How much of a frequency stays, by the paper's equation 17 (alpha 1, beta 32): 0, 1 or between."""
    return min(max((rotations - 1) / (32 - 1), 0), 1)


def angles_by_the_papers(kind: str, positions: int) -> tuple[list[list[float]], float]:
    """Angle of each position and frequency, one by one, and the scale of the tables."""
    base, stretch, scale = THETA, [1.0] * (DIM // 2), 1.0
    if kind == "base":  # 2309.00071, equation 9, for all lengths
        base = THETA * FACTOR ** (DIM / (DIM - 2))
    if kind == "linear":  # 2306.15595, equation 4: position m becomes m / factor
        stretch = [1 / FACTOR] * (DIM // 2)
    if (
        kind == "dynamic"
    ):  # 2309.00071, equations 9 and 10 by the length at hand; transformers puts factor * s - (factor - 1) for s
        s = max(positions, LENGTH) / LENGTH
        base = THETA * (FACTOR * s - (FACTOR - 1)) ** (DIM / (DIM - 2))
    if (
        kind == "yarn"
    ):  # section 3.2 and 3.4; the authors' code, which transformers follows, lays the ramp over the index of the frequency
        low, high = (DIM / 2 * math.log(LENGTH / (2 * math.pi * turns)) / math.log(THETA) for turns in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), DIM - 1)
        for i in range(DIM // 2):
            stays = 1 - min(max((i - low) / (high - low), 0), 1)
            stretch[i] = stays + (1 - stays) / FACTOR
            if not low < i < high:  # beyond the ramp the paper's own words hold
                turns = LENGTH * THETA ** (-2 * i / DIM) / (2 * math.pi)
                assert stays == yarn_share(turns)
        scale = 0.1 * math.log(FACTOR) + 1
    return [[m * stretch[i] * base ** (-2 * i / DIM) for i in range(DIM // 2)] for m in range(positions)], scale


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "base"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_rotary_tables_are_those_of_transformers_and_of_the_papers(family: str, kind: str) -> None:
    sizes = {**SMALL, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": DIM}
    Config = getattr(transformers, f"{family}Config")
    r = parse(
        f"model: {{family: {family.lower()}, num_layers: 1, hidden_size: 128, num_heads: 2, vocab_size: 96, max_positions: {LENGTH}}}\n"
        f"batch: {{seq_len: 900}}\nstop: {{max_steps: 1}}\ntechniques: {{rope_scaling: {{kind: {kind}, factor: {FACTOR}}}}}"
    )
    ours = build(r, vocabulary=96, device=DEVICE).trained[0].model.rotary_emb  # type: ignore[union-attr]
    # What a user of transformers would write by hand.
    by_hand: dict[str, Any] = {"rope_type": kind, "factor": FACTOR, "rope_theta": THETA}
    if kind == "base":
        by_hand = {"rope_type": "default", "rope_theta": THETA * FACTOR ** (DIM / (DIM - 2))}
    by_hand |= {"original_max_position_embeddings": LENGTH} if kind == "yarn" else {}
    positions = LENGTH if kind == "dynamic" else int(LENGTH * FACTOR)
    theirs_config = Config(**(sizes | {"max_position_embeddings": positions}), rope_parameters=by_hand)
    assert configure(r, 96).rope_parameters == theirs_config.rope_parameters
    for length in (100, 900):
        places, x = torch.arange(length)[None], torch.zeros(1, length, DIM)
        theirs = type(transformers.AutoModelForCausalLM.from_config(theirs_config).model.rotary_emb)(theirs_config)
        cos, sin = ours(x, places)  # type: ignore[operator]
        assert all(torch.equal(a, b) for a, b in zip((cos, sin), theirs(x, places), strict=True))
        angles, scale = angles_by_the_papers(kind, length)
        slow = torch.tensor(angles, dtype=torch.float64)
        for table, wave in ((cos, slow.cos()), (sin, slow.sin())):
            expected = torch.cat((wave, wave), dim=-1) * scale
            assert off(table[0].double(), expected) < 1e-4  # fp32 angles of up to 900 radians


def test_dynamic_scaling_leaves_short_texts_alone_and_reaches_further_than_transformers_states() -> None:
    r = tiny("{rope_scaling: {kind: dynamic, original_length: 16, factor: 4}}")
    config = configure(r, 96)
    assert (config.max_position_embeddings, read_facts(config).positions) == (16, 64)
    scaled, plain = (build(recipe, vocabulary=96, device=DEVICE).trained[0] for recipe in (r, tiny()))
    assert off(compute_reference_logits(scaled, TOKENS[:, :16]), compute_reference_logits(plain, TOKENS[:, :16])) < 1e-6  # type: ignore[arg-type]
    assert off(compute_reference_logits(scaled, TOKENS), compute_reference_logits(plain, TOKENS)) > 1e-5  # type: ignore[arg-type]


def test_a_factor_larger_than_needed_is_said() -> None:
    r = tiny("{rope_scaling: {factor: 8, original_length: 16}}")
    words = build(r, vocabulary=96, device=DEVICE).changes["rope_scaling"][0].what
    assert "16 positions reach 128; batch.seq_len 32 needs only 2" in words


@pytest.mark.parametrize(
    ("length", "words"),
    [(48, "yarn by 3: 16 positions reach 48 (yarn suits"), (640, "base by 40: 16 positions reach 640 (base suits")],
)
def test_auto_reaches_what_is_wanted_and_says_by_what(length: int, words: str) -> None:
    r = parse(
        f"model: {{num_layers: 1, hidden_size: 32, num_heads: 4, vocab_size: 96, max_positions: 16}}\nbatch: {{seq_len: {length}}}\nstop: {{max_steps: 1}}\n"
        "techniques: {rope_scaling: {kind: auto, factor: auto}}"
    )
    made = build(r, vocabulary=96, device=DEVICE)
    assert made.changes["rope_scaling"][0].what.startswith(words)
    assert made.model.positions == length


# --- refusals and sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("techniques", "family", "words"),
    [
        ("{grouped_queries: {num_kv_heads: 2}}", "llama", "not fewer than the 2"),
        ("{grouped_queries: {}}", "gpt2", "fused"),
        ("{rms_norm: {}}", "llama", "of gpt2"),
        ("{feed_forward: {activation: swiglu}}", "llama", "is already the"),
        ("{tied_embeddings: {}}", "gpt2", "one matrix already"),
        ("{rope_scaling: {}}", "gpt2", "no rotary positions"),
        ("{rope_scaling: {original_length: 12}}", "llama", "batch.seq_len is 32; use factor: 2.67"),
        ("{rope_scaling: {kind: linear, beta_fast: 16}}", "llama", "beta_fast: is yarn's"),
        ("{rope_scaling: {factor: 0.5}}", "llama", "above 1"),
        ("{rope_scaling: {factor: auto}}", "llama", "hold batch.seq_len 32 already"),
        ("{rope_scaling: {kind: longrope}}", "llama", "must be 'auto', 'linear', 'dynamic', 'base' or 'yarn'"),
    ],
)
def test_what_cannot_be_is_refused(techniques: str, family: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(tiny(techniques, family=family), vocabulary=96, device=DEVICE)


def test_what_cannot_be_with_read_weights_is_refused(tmp_path: Path) -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with pytest.raises(RecipeError, match="use one of"):
        from_folder(llama, tmp_path / "llama", "{grouped_queries: {num_kv_heads: 3}}")
    with pytest.raises(RecipeError, match="is for new models"):
        from_folder(llama, tmp_path / "llama", "{feed_forward: {}}")
    with pytest.raises(RecipeError, match=r"64 positions to 128, but batch\.seq_len is 200; use factor: 3\.13"):
        from_folder(llama, tmp_path / "llama", "{rope_scaling: {}}", "batch: {seq_len: 200}")
    phi = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    with pytest.raises(RecipeError, match="projections are fused"):
        from_folder(phi, tmp_path / "phi", "{grouped_queries: {}}")


@pytest.mark.parametrize("size", ["5M", "15M", "125M", "350M", "1.1B"])
def test_the_deep_dial_meets_its_size_with_more_layers(size: str) -> None:
    deep, balanced = size_dial.choose_dimensions(size, shape="deep"), size_dial.choose_dimensions(size)
    parameters = deep.layers * (4 * deep.width**2 + 3 * deep.width * deep.feed_forward)
    assert parameters == pytest.approx(size_dial.parse_size(size), rel=0.15)
    assert deep.layers > 1.7 * balanced.layers
    assert deep.width < balanced.width


def test_the_deep_dial_is_near_mobilellm() -> None:
    # MobileLLM-125M: 30 layers of width 576 (106M outside the embedding).
    d = size_dial.choose_dimensions("106M", shape="deep")
    assert (d.layers, d.width) == (pytest.approx(30, abs=4), pytest.approx(576, abs=64))


def test_a_shape_needs_the_dial() -> None:
    with pytest.raises(RecipeError, match=r"model\.shape"):
        parse("model: {shape: deep, num_layers: 2, hidden_size: 32, num_heads: 2}\nstop: {max_steps: 1}")
