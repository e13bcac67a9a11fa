"""KV caches: 8 bits within their bound and their memory, and every kind of cache by what a pass over the whole text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from preheat.inference.load import LoadedModel, load_model
from preheat.models.generation.generate import PrefixCache, Timed, generate
from preheat.models.generation.kv_cache import Int8Layer, dequantize, make_cache, quantize
from preheat.models.token_mixers import pass_cache
from preheat.planning.kv_cache_size import CACHES, count_cache_bytes
from preheat.recipe import Sample


@pytest.fixture(scope="module")
def stories(data_folder: Path) -> LoadedModel:
    return load_model(data_folder / "stories260K-hf")


def _ids(stories: LoadedModel, *texts: str) -> list[list[int]]:
    return [[1, *stories.tokenizer.encode(text, add_special_tokens=False)] for text in texts]


def _write(stories: LoadedModel, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    model: Any = stories.build.trained[0]
    return [w.tokens for w in generate(model, stories.tokenizer, prompts, Sample(**settings), stop=frozenset({2}))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_off_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 2, 50, 16, generator=g) * torch.logspace(-6, 6, 50)[:, None]).to(dtype)
    x[0, 0, 0] = 0
    x[0, 0, 1, 3] = 1e4
    codes, scale = quantize(x)
    assert codes.dtype == torch.int8
    assert codes.abs().max() == 127
    assert scale.shape == (3, 2, 50, 1)
    back = dequantize(codes, scale, torch.float32)
    assert ((back - x.float()).abs() <= scale / 2 * (1 + 1e-5)).all()
    assert (back[0, 0, 0] == 0).all()
    assert (back - x.float()).norm() / x.float().norm() < 0.01


@pytest.mark.parametrize("window", [None, 5])
def test_a_layer_in_eight_bits_shows_what_the_plain_layer_shows(window: int | None) -> None:
    """Whatever the pieces in which it is read, and when tokens are taken back."""
    g = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 3, 24, 8, generator=g) for _ in range(2))
    plain: Any = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    ours = Int8Layer(window)
    at = 0
    for count, back in ((7, 0), (1, 0), (1, 0), (4, 2), (3, 3), (5, 0), (1, 1)):
        if at >= 9 and not ours.record_past:
            ours.activate_past_recording()
            if window is not None:
                plain.activate_past_recording()
        piece = slice(at, at + count)
        assert ours.get_mask_sizes(count) == plain.get_mask_sizes(count)
        shown = ours.update(keys[:, :, piece], values[:, :, piece])
        wanted = plain.update(keys[:, :, piece], values[:, :, piece])
        for a, b in zip(shown, wanted, strict=True):
            assert a.shape == b.shape
            assert ((a - b).abs() <= b.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()
        at += count
        if ours.record_past:
            ours.crop(-back)
            plain.crop(-back)
            at -= back
        assert ours.get_seq_length() == plain.get_seq_length() == at
        if window is not None:
            assert ours.parts[0].shape[-2] == min(at, window - 1)


def test_the_cache_takes_what_the_closed_form_says(stories: LoadedModel) -> None:
    model: Any = stories.build.trained[0]
    prompts = _ids(stories, "Once upon a time there was", "Tom had a red ball and a big dog", "The")
    longest = max(map(len, prompts))
    for settings, (size, scale) in (
        (Sample(max_new_tokens=20), (4.0, 0.0)),
        (Sample(max_new_tokens=20, cache="static"), (4.0, 0.0)),
        (Sample(max_new_tokens=20, cache="int8"), CACHES["int8"]),
        (Sample(max_new_tokens=20, window=8), (4.0, 0.0)),
        (Sample(max_new_tokens=20, window=8, cache="static"), (4.0, 0.0)),
    ):
        timed = Timed()
        made = generate(model, stories.tokenizer, prompts, settings, timed=timed)
        kept = longest + 20 - 1  # the last token is not read
        assert timed.cache_bytes == count_cache_bytes(model.config, kept, 3, size, scale=scale, window=settings.window)
        assert timed.tokens == [3] * 20
        assert [len(m.tokens) for m in made] == [20] * 3
        assert timed.begun < timed.at[0] < timed.at[-1]
    assert 3 * 12 / 32 > 1, "heads of 8: 12 bytes where fp32 has 32"


def test_a_static_cache_writes_what_the_growing_one_writes(stories: LoadedModel) -> None:
    """Rows of different lengths, padded; and with windows."""
    prompts = _ids(stories, "", "Tom had a red ball", "Once upon a time, in a big forest, there lived a rhinoceros")
    assert _write(stories, prompts, max_new_tokens=40, cache="static") == _write(stories, prompts, max_new_tokens=40)
    assert _write(stories, prompts, max_new_tokens=40, cache="static", window=12) == _write(
        stories, prompts, max_new_tokens=40, window=12
    )


def test_eight_bits_change_the_loss_by_little_and_the_text_not_by_pieces(stories: LoadedModel) -> None:
    model: Any = stories.build.trained[0]
    (ids,) = _ids(
        stories,
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big dog.",
    )
    tokens = torch.tensor([ids])
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    model.eval()
    try:
        with torch.no_grad():
            plain = model(input_ids=tokens, use_cache=False).logits
            cache = pass_cache(model, make_cache(model.config, Sample(cache="int8"), 0))
            whole = model(input_ids=tokens, use_cache=True, **cache).logits
            cache, parts = pass_cache(model, make_cache(model.config, Sample(cache="int8"), 0)), []
            for piece in tokens.split(5, dim=1):
                parts.append(model(input_ids=piece, use_cache=True, **cache).logits)
    finally:
        model.set_attn_implementation(before)
        model.train()
    # fp32 rounds otherwise for other shapes, which now and then changes a code by one: still far below what 8 bits change.
    assert (torch.cat(parts, 1) - whole).norm() / whole.norm() < 1e-3
    error = (whole - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.02
    losses = [torch.nn.functional.cross_entropy(x[0, :-1], tokens[0, 1:]).item() for x in (plain, whole)]
    assert losses[1] == pytest.approx(losses[0], abs=0.005)


def test_a_window_is_that_of_a_pass_over_the_whole_text(stories: LoadedModel) -> None:
    """Every token is the likeliest by preheat's own attention with that window, though the prompt is longer than it."""
    from preheat.core import MaskSpec
    from preheat.models import hf
    from preheat.ops.attention.sdpa import reference_attention

    model: Any = stories.build.trained[0]
    prompts = _ids(stories, "Once upon a time there was a cat who had a ball.", "Tom")
    texts = _write(stories, prompts, max_new_tokens=24, window=6)
    for prompt, text in zip(prompts, texts, strict=True):
        whole = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            positions = torch.arange(whole.shape[1])[None]
            hidden = hf.hidden_states(model, whole, positions, MaskSpec(window=6), reference_attention)
            logits = hf.head(model)(hidden)[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen < 1e-4).all()
    assert texts != _write(stories, prompts, max_new_tokens=24)


def test_a_kept_cache_in_eight_bits_goes_on(stories: LoadedModel) -> None:
    model: Any = stories.build.trained[0]
    settings = Sample(max_new_tokens=10, cache="int8")
    (first,) = _ids(stories, "Once upon a time")
    kept = PrefixCache()
    made = generate(model, stories.tokenizer, [first], settings, kept=kept)[0]
    second = [*first, *made.tokens, *_ids(stories, "Then he said")[0][1:]]
    went_on = generate(model, stories.tokenizer, [second], settings, kept=kept)[0]
    assert kept.reused == len(first) + 9
    assert went_on.tokens == generate(model, stories.tokenizer, [second], settings)[0].tokens
    generate(model, stories.tokenizer, [second], Sample(max_new_tokens=4), kept=kept)
    assert kept.reused == 0, "another kind of cache is not taken for this one"


@pytest.mark.slow
def test_a_compiled_model_writes_the_same_and_is_compiled_once(stories: LoadedModel) -> None:
    """For prompts and texts of other lengths, too."""
    from torch._dynamo.utils import counters

    from preheat.engine.builder import build
    from preheat.recipe import parse

    from ...conftest import DEVICE

    sizes = "{num_layers: 1, hidden_size: 32, num_heads: 4, num_kv_heads: 2, vocab_size: 512, max_positions: 256}"
    made = build(
        parse(f"model: {sizes}\nbatch: {{size: 2, seq_len: 16}}\nstop: {{max_steps: 1}}"), vocabulary=512, device=DEVICE
    )
    model: Any = made.trained[0]
    torch.nn.init.normal_(model.get_input_embeddings().weight, generator=torch.Generator().manual_seed(0))
    before = counters["stats"]["unique_graphs"]
    for prompt, tokens in (([5, 9, 77, 4], 12), ([8, 2, 6, 4, 300, 12, 7], 20)):
        wanted = generate(model, stories.tokenizer, [prompt], Sample(max_new_tokens=tokens))
        timed = Timed()
        settings = Sample(max_new_tokens=tokens, cache="static", compile=True)
        assert generate(model, stories.tokenizer, [prompt], settings, timed=timed) == wanted
        assert timed.cache_bytes == count_cache_bytes(model.config, 128, size=4), (
            "room for 128 tokens, whatever the length"
        )
    assert counters["stats"]["unique_graphs"] == before + 1


def test_layers_with_windows_of_their_own_keep_and_forget_alike(stories: LoadedModel) -> None:
    """Every sixth layer full, as Gemma 3 has them: every cache, with proposals taken back or without."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=512,
        max_position_embeddings=256,
        sliding_window=8,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    prompts = [list(range(5, 25)), [7, 8, 9, 7, 8]]

    def write(timed: Timed | None = None, smaller: Any = None, **settings: Any) -> list[list[int]]:
        made = generate(
            model, stories.tokenizer, prompts, Sample(max_new_tokens=24, **settings), draft=smaller, timed=timed
        )
        return [m.tokens for m in made]

    assert count_cache_bytes(config, 43, 2, 4) == 2 * (5 * 8 + 43) * 2 * 2 * 16 * 4
    for kind, (size, scale) in (("dynamic", (4.0, 0.0)), ("static", (4.0, 0.0)), ("int8", CACHES["int8"])):
        timed = Timed()
        wanted = write(timed, cache=kind)
        assert timed.cache_bytes == count_cache_bytes(config, 20 + 23, 2, size, scale=scale)
        if kind == "static":
            assert wanted == write()
        else:
            assert (
                write(cache=kind, prompt_lookup_tokens=3)
                == write(cache=kind, draft_model="itself", smaller=model)
                == wanted
            )
