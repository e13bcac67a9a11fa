"""Attention that stands alone: the module, torch's MultiheadAttention and transformers models converted, against torch's and theirs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preheat.core import MaskSpec
from preheat.ops.attention.multihead import attend_any, attend_in_chunks
from preheat.techniques.efficient_attention import (
    EfficientAttention,
    convert_model_to_efficient_attention,
    efficient_attention,
)


def apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=0.1))  # a gradient may be 0: of a window of one token


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_module_gives_what_torchs_own_gives(causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    x = torch.randn(2, 200, 16, requires_grad=True)
    padding = torch.zeros(2, 200, dtype=torch.bool)
    padding[0, 150:] = True
    hidden = nn.Transformer.generate_square_subsequent_mask(200) if causal else None
    wanted = theirs(
        x, x, x, key_padding_mask=padding.float() * -1e9 if padded else None, attn_mask=hidden, need_weights=False
    )[0]
    grad = torch.autograd.grad(wanted.square().sum(), x)[0]
    for memory_efficient in (True, False):
        ours = EfficientAttention(dim=16, num_heads=4, dropout=0.0, causal=causal, memory_efficient=memory_efficient)
        ours.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias})
        ours.out.load_state_dict(theirs.out_proj.state_dict())
        got = ours(x, key_padding_mask=padding if padded else None)
        assert apart(got, wanted) < 1e-6
        assert apart(torch.autograd.grad(got.square().sum(), x)[0], grad) < 2e-6


def test_dropout_of_the_module_keeps_the_mean_and_its_gradient_belongs_to_its_draw() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, 1, 150, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(1)
        return attend_any(*tensors, MaskSpec(), 0.5, dropout=0.3)

    grads = torch.autograd.grad(run(*tensors).sum(), tensors)
    steps = [torch.randn_like(t) * 1e-6 for t in tensors]
    with torch.no_grad():
        ahead, behind = (run(*(t + way * s for t, s in zip(tensors, steps, strict=True))).sum() for way in (1, -1))
    slope = sum(float((g * s).sum()) for g, s in zip(grads, steps, strict=True))
    assert float(ahead - behind) / 2 == pytest.approx(slope, rel=1e-6)
    layer = EfficientAttention(8, 2, dropout=0.5)
    x = torch.randn(64, 10, 8)
    with torch.no_grad():
        mean = torch.stack([layer(x) for _ in range(200)]).mean(0)
        assert not torch.equal(layer(x), layer(x))
        assert apart(mean, layer.eval()(x)) < 0.1


def test_the_module_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="num_heads: 3"):
        EfficientAttention(16, 3)
    with pytest.raises(ValueError, match="dropout"):
        EfficientAttention(16, 4, dropout=1.0)


@pytest.mark.parametrize("settings", [{}, {"batch_first": True}, {"bias": False, "kdim": 12, "vdim": 20}], ids=str)
def test_converted_multihead_attention_gives_the_same(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    before = nn.Sequential(nn.MultiheadAttention(16, 4, **settings))
    after = copy.deepcopy(before)
    names = list(after.state_dict())
    assert convert_model_to_efficient_attention(after) is after
    assert list(after.state_dict()) == names
    q, k, v = (
        torch.randn(2, 30, 16),
        torch.randn(2, 40, settings.get("kdim", 16)),
        torch.randn(2, 40, settings.get("vdim", 16)),
    )
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1, 33:] = True
    first = settings.get("batch_first", False)
    q, k, v = (t if first else t.transpose(0, 1) for t in (q, k, v))
    hidden = torch.rand(30, 40) < 0.3
    hidden[:, 0] = False
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": hidden},
        {"attn_mask": torch.randn(8, 30, 40)},
        {"attn_mask": hidden, "key_padding_mask": padding},
        {"attn_mask": torch.randn(30, 40), "key_padding_mask": padding.float().masked_fill(padding, float("-inf"))},
    ):
        wanted = before[0](q, k, v, need_weights=False, **masks)[0]
        got, weights = after[0](q, k, v, **masks)
        assert weights is None
        assert apart(got, wanted) < 1e-6
        both = [m[0](q, k, v, need_weights=True, **masks) for m in (before, after)]
        assert torch.equal(both[0][1], both[1][1])
    if first:
        layer = nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
        x, causal = torch.randn(2, 30, 16), nn.Transformer.generate_square_subsequent_mask(30)
        wanted = layer(x, src_mask=causal, is_causal=True)
        assert apart(efficient_attention(layer)(x, src_mask=causal, is_causal=True), wanted) < 1e-6


def test_what_cannot_be_converted_says_so() -> None:
    with pytest.raises(ValueError, match="holds no"):
        convert_model_to_efficient_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="bias_k"):
        convert_model_to_efficient_attention(nn.Sequential(nn.MultiheadAttention(4, 2, add_bias_kv=True)))


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "pad_token_id": 0}
GATED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}


def transformers_models() -> dict[str, Any]:
    import transformers as t

    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GATED)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**GATED, sliding_window=7)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        ),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**SIZES, intermediate_size=48)),
    }


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert"])
def test_a_converted_transformers_model_gives_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = transformers_models()[name]().eval()
    model.set_attn_implementation("eager")
    tokens = torch.randint(1, 96, (3, 20))
    left, right = torch.ones(2, 3, 20, dtype=torch.int64)
    left[0, :6], right[0, -6:] = 0, 0
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None].expand(3, -1)
    calls: list[dict[str, Any]] = [{}, {"attention_mask": left}, {"attention_mask": right}]
    if name in ("llama", "mistral"):
        calls.append({"position_ids": packed, "use_cache": False})
    wanted = [model(tokens, **call).logits for call in calls]
    convert_model_to_efficient_attention(model)
    for call, logits in zip(calls, wanted, strict=True):
        real = call.get("attention_mask", torch.ones(3, 20)).bool()
        assert apart(model(tokens, **call).logits[real], logits[real]) < 2e-6
    model(tokens, **calls[0]).logits.sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_converted_model_generates_the_same() -> None:
    torch.manual_seed(0)
    model = transformers_models()["mistral"]().eval()
    tokens, mask = torch.randint(1, 96, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(tokens, **settings)
    assert torch.equal(convert_model_to_efficient_attention(model).generate(tokens, **settings), wanted)
    assert torch.equal(model.generate(tokens, **settings, cache_implementation="static", disable_compile=True), wanted)


def test_an_encoder_with_a_decoder_is_refused() -> None:
    import transformers as t

    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    with pytest.raises(ValueError, match="encoder, a decoder"):
        convert_model_to_efficient_attention(
            t.BartForConditionalGeneration(t.BartConfig(**sizes, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=64))
        )


@pytest.mark.parametrize("shape", [(1, 4, 300, 300), (3, 1, 1, 300)], ids=str)
def test_a_learned_bias_has_its_gradient(shape: tuple[int, ...]) -> None:
    """In chunks as in one piece, which autograd differentiates by itself; with heads that share keys."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, h, 300, 8, requires_grad=True) for h in (4, 2, 2)]
    bias = torch.randn(shape, requires_grad=True)
    mask, grads = MaskSpec(window=90, documents=((300,), (150, 150), (1, 299))), []
    for queries in (128, 300):
        out = attend_in_chunks(*tensors, mask, 0.3, bias=bias, queries=queries)
        grads.append(torch.autograd.grad(out.square().sum(), [*tensors, bias]))
    assert max(apart(a, b) for a, b in zip(*grads, strict=True)) < 2e-6


@pytest.mark.parametrize("queries", [4, 16])
def test_chunks_compute_outside_of_autocast(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.ops.attention import multihead

    seen, chunk = [], multihead._attend_chunk

    def recorded(*tensors: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return chunk(*tensors, **settings)

    monkeypatch.setattr(multihead, "_attend_chunk", recorded)
    q = torch.randn(1, 2, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend_in_chunks(q, q, q, MaskSpec(), 0.3, queries=queries).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False] * (16 // queries)
