"""Our kernel for few tokens over a cache: against fp64, and what is written with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from preheat.errors import RunError
from preheat.inference.load import load_model
from preheat.models.generation import decode_attention as ops
from preheat.models.generation.decode_attention import attend_cache, is_supported
from preheat.models.generation.generate import generate
from preheat.recipe import Sample

SCALE = 0.2


def given(
    rows: int, heads: int, pairs: int, queries: int, keys: int, width: int, values: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As models have them: queries of a transposed projection, keys and values the beginning of a longer cache."""
    torch.manual_seed(0)
    q = torch.randn(rows, queries, heads, width).bfloat16().transpose(1, 2)
    k, v = (torch.randn(rows, pairs, keys + 5, size).bfloat16()[:, :, :keys] for size in (width, values))
    return q, k, v


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask, scale=SCALE).transpose(1, 2)


@pytest.mark.parametrize(
    "sizes", [(1, 4, 4, 1, 1, 64, 64), (2, 6, 2, 1, 33, 64, 64), (1, 4, 1, 7, 250, 128, 128), (3, 3, 3, 16, 40, 80, 48)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_attention_in_fp64_but_for_the_last_rounding(sizes: tuple[int, ...], masked: bool) -> None:
    q, k, v = given(*sizes)
    rows, queries, keys = sizes[0], sizes[3], sizes[4]
    mask = None
    if masked:
        mask = torch.rand(rows, 1, queries, keys) < 0.7
        mask[..., 0] = True
    found, wanted = attend_cache(q, k, v, mask, SCALE), reference(q, k, v, mask)
    assert found.dtype == torch.bfloat16
    assert bool(((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all())
    if masked and rows > 1:  # one mask for all rows
        shared = mask[:1]  # type: ignore[index]
        assert bool(((attend_cache(q, k, v, shared, SCALE).double() - reference(q, k, v, shared)).abs() <= 2e-2).all())


@pytest.mark.parametrize("masked", [False, True])
def test_a_compiler_gets_operators_alone(masked: bool) -> None:
    from preheat.models.generation.kv_cache import _attend_cache

    q, k, v = given(2, 6, 2, 1, 33, 64, 48)
    mask = torch.arange(33)[None, None, None] < torch.tensor([20, 33])[:, None, None, None] if masked else None
    whole = torch.compile(lambda *given: _attend_cache(None, *given, scaling=SCALE)[0], backend="eager", fullgraph=True)
    found, wanted = whole(q, k, v, mask), reference(q, k, v, mask)
    assert found.shape == wanted.shape
    assert bool(((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all())


def test_a_token_is_the_same_alone_and_among_others() -> None:
    q, k, v = given(2, 4, 2, 5, 90, 64, 64)
    mask = torch.ones(5, 90, dtype=torch.bool).tril(85)[None, None]
    together = attend_cache(q, k, v, mask, SCALE)
    for n in range(5):
        alone = attend_cache(q[:, :, n : n + 1], k[:, :, : 86 + n], v[:, :, : 86 + n], None, SCALE)
        assert torch.equal(together[:, n : n + 1], alone)


def test_scores_far_apart_equal_unseen_and_not_finite() -> None:
    q, k, v = given(1, 1, 1, 4, 20, 16, 16)
    k[0, 0, 3], k[0, 0, 4] = 300.0, -300.0
    mask = torch.ones(1, 1, 4, 20, dtype=torch.bool)
    mask[0, 0, 1] = False
    q[0, 0, 2] = 0
    q[0, 0, 3, 0] = float("nan")
    found = attend_cache(q, k, v, mask, 1.0)[0, :, 0]
    nearest = v[0, 0, int((k[0, 0].double() @ q[0, 0, 0].double()).argmax())]
    assert torch.equal(found[0], nearest)
    assert not found[1].any()  # a token that sees nothing
    assert torch.allclose(found[2].float(), v[0, 0].float().mean(0), rtol=2**-8, atol=1e-6)
    assert found[3].isnan().all()


def test_what_it_does_not_take_goes_to_torch() -> None:
    q, k, v = given(1, 4, 2, 1, 9, 64, 64)
    assert is_supported(q, k, v, None)
    assert not is_supported(q.float(), k, v, None)
    assert not is_supported(q[..., :40], k[..., :40], v, None)
    assert not is_supported(q, k, v, torch.zeros(1, 1, 1, 9))  # added to scores
    assert not is_supported(q, k, v, torch.ones(1, 4, 1, 9, dtype=torch.bool))  # one a head
    assert not is_supported(q.expand(1, 4, 17, 64), k, v, torch.ones(1, 1, 17, 9, dtype=torch.bool))
    assert not is_supported(q.expand(1, 4, 3, 64), k, v, None)  # which of them see what is not said
    assert not is_supported(q.clone().requires_grad_(), k, v, None)


def test_without_a_compiler_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise RunError("no C++ compiler was found")

    monkeypatch.setattr("preheat.hardware.cpp_build.load_library", none)
    ops._load_library.cache_clear()
    with pytest.warns(UserWarning, match="several times as long: no C"):
        assert not is_supported(*given(1, 4, 2, 1, 9, 64, 64), None)
    ops._load_library.cache_clear()


@pytest.fixture(scope="module")
def folder(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with heads of 16 that share keys; the stories' have 8, which the kernel does not take."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(made)
    AutoTokenizer.from_pretrained(data_folder / "stories260K-hf").save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("settings", "queries"),
    [
        (Sample(max_new_tokens=8), {1}),
        (Sample(max_new_tokens=8, cache="static"), {1}),
        (Sample(max_new_tokens=8, window=4), {1}),
        (Sample(max_new_tokens=8, cache="int8"), {1}),
        (Sample(max_new_tokens=8, prompt_lookup_tokens=3), {1, 2, 3, 4}),
    ],
)
def test_every_cache_is_attended_to_by_it(
    folder: Path, settings: Sample, queries: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each time with what torch's attention gives."""
    opened = load_model(folder)
    kernel, seen = ops.attend_cache, set()

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        seen.add(q.shape[2])
        found, wanted = (
            kernel(q, k, v, mask, scale),
            F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True),
        )
        assert torch.allclose(found.float(), wanted.transpose(1, 2).float(), rtol=2e-2, atol=2e-3)
        return found

    monkeypatch.setattr(ops, "attend_cache", watched)
    text = "Tom had a red ball. Tom had a red ball. Tom had a red"
    prompts = [[1, *opened.tokenizer.encode(one, add_special_tokens=False)] for one in (text, "The cat")]
    generate(opened.build.trained[0], opened.tokenizer, prompts, settings)
    assert seen
    assert seen <= queries
    assert 1 in seen
