"""Generated text is that of plain transformers, however it is written: cached or not, alone or padded, in pieces or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.engine.builder import build
from preheat.inference.load import LoadedModel, load_model
from preheat.models.generation.generate import PrefixCache, generate, has_attention_pattern
from preheat.recipe import Recipe, Sample, parse
from tests.conftest import DEVICE

BEGIN = "Once upon a time, there was a little girl named Lily"


@pytest.fixture(scope="module")
def folder(data_folder: Path) -> Path:
    return data_folder / "stories260K-hf"


@pytest.fixture(scope="module")
def stories(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def _ids(stories: LoadedModel, *texts: str) -> list[list[int]]:
    return [[1, *stories.tokenizer.encode(text, add_special_tokens=False)] for text in texts]


def _plain(plain: Any, ids: list[int], count: int, **more: Any) -> list[int]:
    tokens = torch.tensor([ids])
    out = plain.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count, **more)
    return out[0, len(ids) :].tolist()


def test_greedy_text_is_that_of_plain_transformers_alone_and_in_a_padded_batch(
    stories: LoadedModel, plain: Any
) -> None:
    prompts = _ids(
        stories, "", "Tom had a red ball", "The cat", "Once upon a time, in a big forest, there lived a rhinoceros"
    )
    wanted = [_plain(plain, p, 48) for p in prompts]
    assert wanted == [_plain(plain, p, 48, use_cache=False) for p in prompts]
    model, settings = stories.build.trained[0], Sample(max_new_tokens=48)
    for batch, cached in ((1, True), (3, True), (1, False), (4, False)):
        made = generate(model, stories.tokenizer, prompts, settings, stop=frozenset({2}), batch=batch, cached=cached)
        assert [m.tokens for m in made] == wanted
    assert made[0].text.startswith(BEGIN)
    for prompt, m in zip(prompts, made, strict=True):
        whole = stories.tokenizer.decode([*prompt, *m.tokens], skip_special_tokens=True)
        assert whole.endswith(m.text)
        assert m.finish_reason == "length"


def test_told_text_is_the_whole_text_and_never_taken_back(stories: LoadedModel) -> None:
    told: dict[int, str] = {0: "", 1: ""}
    steps, ended = 0, list[int]()

    def hear(row: int, text: str | None) -> None:
        nonlocal steps
        steps += 1
        assert row not in ended, "nothing is told after the end"
        if text is None:
            ended.append(row)
        else:
            told[row] += text

    prompts = _ids(stories, "Once", "Lily saw a dog. ")
    stop = (" named", "!")
    made = generate(
        stories.build.trained[0], stories.tokenizer, prompts, Sample(max_new_tokens=40, stop=stop), on_text=hear
    )
    assert [told[0], told[1]] == [m.text for m in made]
    assert steps > 10
    assert sorted(ended) == [0, 1]
    assert (made[0].text, made[0].finish_reason) == (" upon a time, there was a little girl", "stop string")
    free = generate(stories.build.trained[0], stories.tokenizer, prompts, Sample(max_new_tokens=40))
    assert free[0].text.startswith(made[0].text + " named")
    assert all(s not in made[1].text for s in stop)


def test_characters_of_several_tokens_are_told_whole(stories: LoadedModel) -> None:
    """The model's 512 pieces spell most characters byte by byte: told text holds no half of one."""
    from preheat.models.generation.detokenizer import IncrementalDetokenizer

    said: list[str] = []

    def hear(part: str | None) -> None:
        said.append(part or "")

    text = IncrementalDetokenizer(stories.tokenizer, [1], (), hear)
    for token in stories.tokenizer.encode("é 日本 🙂", add_special_tokens=False):
        text.add(token, False)
    assert "".join(said).strip() == "é 日本 🙂"
    assert not any("\ufffd" in part for part in said)
    cut = stories.tokenizer.encode("🙂", add_special_tokens=False)[:-1]
    text = IncrementalDetokenizer(stories.tokenizer, [1], (), hear)
    for token in cut:
        text.add(token, False)
    made = text.finish("length")
    assert made.text == stories.tokenizer.decode([1, *cut], skip_special_tokens=True), (
        "what is left at the end is told as it is"
    )
    said.clear()
    text = IncrementalDetokenizer(stories.tokenizer, [1], (), hear)
    for token in [
        *stories.tokenizer.encode("日", add_special_tokens=False),
        cut[0],
        *stories.tokenizer.encode("go", add_special_tokens=False),
    ]:
        text.add(token, False)
    assert text.finish("length").text == "".join(said)
    assert "日" in "".join(said), "bytes that are no character do not take back what was told"


def test_draws_are_decided_by_the_seed_and_by_nothing_else(stories: LoadedModel) -> None:
    model, tokenizer, prompts = stories.build.trained[0], stories.tokenizer, _ids(stories, "Once")

    def draw(seed: int, **how: Any) -> list[int]:
        return generate(model, tokenizer, prompts, Sample(max_new_tokens=24, temperature=1.5, **how), seed=seed)[
            0
        ].tokens

    before = torch.get_rng_state()
    first = draw(3)
    assert torch.equal(torch.get_rng_state(), before), "a run that writes samples goes on as one that does not"
    assert draw(3) == first != draw(4)
    greedy = generate(model, tokenizer, prompts, Sample(max_new_tokens=24))[0].tokens
    assert draw(5, top_k=1) == draw(5, top_p=1e-6) == draw(5, min_p=1.0) == greedy
    assert len({tuple(draw(6, **how)) for how in ({}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.2})}) == 4
    assert generate(model, tokenizer, prompts, Sample(max_new_tokens=24, repetition_penalty=5.0))[0].tokens != greedy


def test_draws_reach_tokens_beyond_the_likeliest_fifty(stories: LoadedModel) -> None:
    """transformers keeps 50 tokens where nothing is said; top_k 0 is all of them."""
    tokens = generate(
        stories.build.trained[0],
        stories.tokenizer,
        _ids(stories, "Once") * 64,
        Sample(max_new_tokens=1, temperature=50.0),
        batch=64,
    )
    assert len({m.tokens[0] for m in tokens}) > 50


def test_a_kept_cache_gives_the_same_text_and_reads_only_what_is_new(stories: LoadedModel) -> None:
    model: Any = stories.build.trained[0]
    (first,) = _ids(stories, "Once upon a time")
    kept, settings = PrefixCache(), Sample(max_new_tokens=12)
    made = generate(model, stories.tokenizer, [first], settings, kept=kept)[0]
    assert kept.tokens == [*first, *made.tokens[:-1]]
    second = [*first, *made.tokens, *_ids(stories, "Then he said")[0][1:]]
    other = [*second[: len(first) + 4], *_ids(stories, "But the bird")[0][1:]]
    read: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda m, args, out: read.append(args[0].shape[1]))
    try:
        for prompt, fresh in (
            (second, len(second) - len(kept.tokens)),
            (other, len(other) - len(first) - 4),
            (other, 1),
        ):
            read.clear()
            went_on = generate(model, stories.tokenizer, [prompt], settings, kept=kept)[0]
            assert read[0] == fresh
            assert went_on == generate(model, stories.tokenizer, [prompt], settings)[0]
    finally:
        hook.remove()

    def break_off(row: int, text: str | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, stories.tokenizer, [second], settings, kept=kept, on_text=break_off)
    assert kept.cache is None


def test_the_end_of_the_positions_ends_a_text_and_no_other(stories: LoadedModel) -> None:
    prompts = _ids(stories, "Once", "Once upon " * 240, "Tom")
    assert len(prompts[1]) > 480
    model, room = stories.build.trained[0], 512 - len(prompts[1])
    made = generate(model, stories.tokenizer, prompts, Sample(max_new_tokens=48), stop=frozenset({2}), positions=512)
    assert [(len(m.tokens), m.finish_reason) for m in made] == [(48, "length"), (room, "context"), (48, "length")]


def _model(techniques: str, more: str = "") -> Recipe:
    return parse(
        f"model: {{num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2, vocab_size: 512, max_positions: 64{more}}}\n"
        f"batch: {{size: 2, seq_len: 16}}\nstop: {{max_steps: 1}}\ntechniques: {techniques}"
    )


@pytest.mark.parametrize(
    "techniques",
    [
        "{lora: {rank: 4}}",
        "{nf4: {}, lora: {rank: 4}}",
        "{mixed_precision: {mode: bf16_weights}, efficient_attention: {}, chunked_loss: {}}",
        "{sliding_window: {window: 4, every: 2}}",
        "{activation_checkpointing: {}}",
    ],
)
def test_every_build_writes_what_its_own_logits_say(stories: LoadedModel, techniques: str) -> None:
    """Each token is the likeliest by the build's own pass over the whole text."""
    from preheat.core import MaskSpec
    from preheat.models import hf
    from preheat.ops.attention.sdpa import reference_attention

    made = build(_model(techniques), vocabulary=512, device=DEVICE)
    model: Any = made.trained[0]
    for _, p in made.parameters():  # adapters begin at zero
        torch.nn.init.normal_(p, std=0.3)
    prompts = [[5, 9, 77, 4, 8, 120], [300, 2, 6]]
    for prompt, text in zip(
        prompts, generate(model, stories.tokenizer, prompts, Sample(max_new_tokens=6)), strict=True
    ):
        whole = torch.tensor([[*prompt, *text.tokens]])
        with torch.no_grad():
            hidden = hf.hidden_states(model, whole, torch.arange(whole.shape[1])[None], MaskSpec(), reference_attention)
            logits = hf.head(model)(hidden)[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(text.tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen < 1e-4 + 0.02 * ("bf16" in techniques) * logits.abs().max()).all()
    assert has_attention_pattern(model) == ("window" in techniques)
    assert model.training


@pytest.mark.parametrize("name", ["stories260K-hf", "tokenizers/gpt2", "tokenizers/llama2"])
def test_told_pieces_join_to_what_the_tokenizer_decodes(data_folder: Path, name: str) -> None:
    """Leading spaces, line ends, characters of several tokens: whatever the decoder, after whatever prompt."""
    from transformers import AutoTokenizer

    from preheat.models.generation.detokenizer import IncrementalDetokenizer

    tokenizer = AutoTokenizer.from_pretrained(data_folder / name, local_files_only=True)
    text = "Once upon  a time,\n\n\tHéllo 日本語 🙂 — it's done. def f(x):\n    return x\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in (1, 3, 5):
        said: list[str] = []
        grown = IncrementalDetokenizer(
            tokenizer, ids[:cut], ("never there",), lambda part, said=said: said.append(part or "")
        )  # type: ignore[misc]
        for token in ids[cut:]:
            grown.add(token, False)
        whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:cut]))
        assert grown.finish("length").text == "".join(said) == whole[len(before) :]
