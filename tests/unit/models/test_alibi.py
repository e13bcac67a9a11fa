"""ALiBi as dimensions of queries and keys: exact in half precision, and without effect on transformers' own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.core import MaskSpec
from preheat.data.tokenizer import load_tokenizer
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.models import alibi, hf
from preheat.models.generation.generate import generate
from preheat.ops.attention.sdpa import reference_attention
from preheat.recipe import Sample, parse

from ...architectures.columns import VOCABULARY, Subject, write_data
from ...architectures.tiny import tiny_config
from ...conftest import DEVICE

HEADS = {"num_attention_heads": 6, "hidden_size": 48, "vocab_size": VOCABULARY}
"""A number of heads that is no power of two, for which the families have different slopes."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alibi")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", alibi.FAMILIES)
def test_any_kernel_computes_the_bias_of_any_number_of_heads(name: str, parent: Path) -> None:
    subject = Subject(name, parent, tiny_config(name, **HEADS))
    for kernel in ("flash", "blocks"):
        subject.compare(f"efficient_attention: {{kernel: {kernel}}}")
    built: Any = build(subject.recipe("efficient_attention: {}"), vocabulary=VOCABULARY, device=DEVICE).trained[0]
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    tokenizer = load_tokenizer(str(parent / "tokenizer"))
    model = subject.model.eval()
    model.generation_config.eos_token_id = None
    for cache in ("dynamic", "static"):
        texts = generate(built, tokenizer, prompts, Sample(temperature=0, max_new_tokens=12, cache=cache))
        for prompt, text in zip(prompts, texts, strict=True):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
            assert [*prompt, *text.tokens] == expected[0].tolist(), cache


@pytest.mark.parametrize("start", [0, alibi.LONGEST - 64])
def test_distances_are_exact_in_bf16(start: int) -> None:
    slopes, scale, length = (0.7071, 0.0039, 0.25), 0.3, 64
    hidden, positions = torch.zeros(1, length, 8, dtype=torch.bfloat16), torch.arange(start, start + length)[None]
    queries, keys = alibi._build_dimensions(tuple(s / scale for s in slopes), hidden, positions)
    assert queries.dtype == keys.dtype == torch.bfloat16
    # As a kernel does: products of bf16 numbers, summed in higher precision.
    scores = torch.einsum("hd,nd->hn", queries.double(), keys[0].double()) * scale
    assert torch.allclose(scores, torch.tensor(slopes).double()[:, None] * positions, rtol=1e-6, atol=0)
    # Softmax over them, against the bias by distance.
    v = torch.eye(length, dtype=torch.float64)[None, None].expand(1, 3, -1, -1)
    q, k = (t.double() for t in (queries[None, :, None].expand(1, 3, length, -1), keys[:, None].expand(1, 3, -1, -1)))
    bias = -torch.tensor(slopes).double()[:, None, None] * (positions.mT - positions)
    expected = bias.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    assert torch.allclose(reference_attention(q, k, v, MaskSpec(), scale)[0], expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_config": {"alibi": False}}, r"mpt has attn_config.alibi False, which transformers ignores; only True"),
        ({"attn_config": {"alibi_bias_max": 16}}, r"attn_config.alibi_bias_max 16"),
        ({"logit_scale": 2.0}, r"logit_scale 2.0"),
    ],
)
def test_variants_that_transformers_does_not_compute_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        hf.build_on_meta(tiny_config("mpt", **settings))


def test_positions_beyond_the_digits_are_refused() -> None:
    recipe = parse(
        f"model: {{preset: bloom-560m}}\nbatch: {{size: 1, seq_len: {2 * alibi.LONGEST}}}\nstop: {{max_steps: 1}}"
    )
    with pytest.raises(RecipeError, match=r"batch.seq_len: 131072 is longer than the model's 65536 positions"):
        hf.configure(recipe)
