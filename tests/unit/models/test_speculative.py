"""Speculative decoding writes the greedy text, token for token, in fewer passes; and says what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.errors import RecipeError, RunError
from preheat.inference.load import LoadedModel, load_draft_model, load_model
from preheat.models.generation.generate import PrefixCache, Timed, generate
from preheat.models.generation.speculative import PromptLookup
from preheat.recipe import Sample, parse

BEGINNINGS = (
    "",
    "Tom had a red ball",
    "Once upon a time, there was a little girl named Lily. Once upon a time, there was",
    "The cat sat. The dog sat. The bird",
    "One day, a boy found a big box. He opened the box and",
    '"Hello," said the',
)


@pytest.fixture(scope="module")
def folder(data_folder: Path) -> Path:
    return data_folder / "stories260K-hf"


@pytest.fixture(scope="module")
def stories(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def prompts(stories: LoadedModel) -> list[list[int]]:
    return [[1, *stories.tokenizer.encode(text, add_special_tokens=False)] for text in BEGINNINGS]


@pytest.fixture(scope="module")
def smaller(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its last two layers: right now and then."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    del model.model.layers[3:]
    model.config.num_hidden_layers = 3
    path = tmp_path_factory.mktemp("draft")
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(path)
    return path


def _write(
    stories: LoadedModel, prompts: list[list[int]], smaller: Any = None, **settings: Any
) -> tuple[list[Any], int]:
    """Texts, and how many passes they took."""
    model: Any = stories.build.trained[0]
    made, passes = [], 0
    for prompt in prompts:
        timed = Timed()
        made += generate(
            model,
            stories.tokenizer,
            [prompt],
            Sample(**settings),
            stop=frozenset({2}),
            positions=512,
            draft=smaller,
            timed=timed,
        )
        assert sum(timed.tokens) >= len(made[-1].tokens)
        passes += len(timed.at)
    return made, passes


@pytest.mark.parametrize(
    "more",
    [
        {"max_new_tokens": 48},
        {"max_new_tokens": 40, "stop": (" named", "!", ". T")},
        {"max_new_tokens": 40, "repetition_penalty": 1.3},
        {"max_new_tokens": 40, "cache": "int8"},
        {"max_new_tokens": 40, "window": 12},
        {"max_new_tokens": 40, "window": 12, "cache": "int8"},
    ],
    ids=lambda more: " ".join(f"{k}={v}" for k, v in more.items()),
)
def test_the_text_is_the_greedy_one(
    stories: LoadedModel, prompts: list[list[int]], smaller: Path, more: dict[str, Any]
) -> None:
    prompts = prompts if more == {"max_new_tokens": 48} else prompts[2:5]
    wanted, passes = _write(stories, prompts, **more)
    draft = load_draft_model(str(smaller), stories.tokenizer)
    for how, model in (({"prompt_lookup_tokens": 4}, None), ({"draft_model": str(smaller)}, draft)):
        made, fewer = _write(stories, prompts, model, **how, **more)
        assert made == wanted
        assert fewer < passes or "repetition_penalty" in more, (
            "with a penalty nothing repeats, and there is nothing to look up"
        )


def test_a_draft_that_is_always_right_saves_all_but_one_pass_in_five(stories: LoadedModel, folder: Path) -> None:
    ids = [[1, *stories.tokenizer.encode("Once", add_special_tokens=False)]]
    draft = load_draft_model(str(folder), stories.tokenizer)
    made, passes = _write(stories, ids, draft, max_new_tokens=41, draft_model=str(folder), draft_tokens=4)
    assert made == _write(stories, ids, max_new_tokens=41)[0]
    assert passes == 1 + 40 / 5


def test_what_followed_last_is_proposed() -> None:
    lookup = PromptLookup(3)
    text = [1, 2, 3, 4, 9, 2, 3, 5, 7]
    assert lookup.propose(text, 9) == []
    text += [2, 3]
    assert lookup.propose(text, 9) == [5, 7, 2], "the newer place, as the last three tokens stood nowhere"
    assert lookup.propose(text, 1) == [5]
    assert lookup.propose([*text, 4, 9, 2, 3], 2) == [5, 7], "the longer match: 9 2 3"


def test_a_chat_goes_on_after_proposals_behind_its_end(stories: LoadedModel, prompts: list[list[int]]) -> None:
    """A stop string ends a text in the middle of a pass: what was read behind it is not part of the next turn."""
    model: Any = stories.build.trained[0]
    kept, settings = PrefixCache(), Sample(max_new_tokens=40, prompt_lookup_tokens=6, stop=(" Lily",))
    first = prompts[2]
    made = generate(model, stories.tokenizer, [first], settings, kept=kept)[0]
    assert made.finish_reason == "stop string"
    assert kept.tokens == [*first, *made.tokens][: len(kept.tokens)]
    assert kept.cache.get_seq_length() == len(kept.tokens)
    second = [*first, *made.tokens, *prompts[1][1:]]
    went_on = generate(model, stories.tokenizer, [second], settings, kept=kept)[0]
    assert kept.reused >= len(first) + len(made.tokens) - 1
    assert went_on == generate(model, stories.tokenizer, [second], Sample(max_new_tokens=40, stop=(" Lily",)))[0]


def test_the_end_of_the_positions_ends_a_text_with_proposals(stories: LoadedModel) -> None:
    prompt = [1, *stories.tokenizer.encode("Once upon " * 240, add_special_tokens=False)]
    room = 512 - len(prompt)
    made, _ = _write(stories, [prompt], max_new_tokens=64, prompt_lookup_tokens=8)
    assert (len(made[0].tokens), made[0].finish_reason) == (room, "context")
    assert made == _write(stories, [prompt], max_new_tokens=64)[0]


def test_a_draft_with_another_tokenizer_is_refused(folder: Path, data_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(data_folder / "tokenizers" / "gpt2", local_files_only=True)
    with pytest.raises(
        RecipeError,
        match=r"^sample.draft_model: .*another tokenizer \(512 tokens, the model 50,257; .*sample.prompt_lookup_tokens",
    ):
        load_draft_model(str(folder), other)
    with pytest.raises(RunError, match=r"^sample.draft_model: .*neither a run"):
        load_draft_model(str(tmp_path), other)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ("{prompt_lookup_tokens: 0}", "sample.prompt_lookup_tokens: must be at least 1, got 0"),
        ("{window: 0}", "sample.window: must be at least 2, got 0"),
        ("{cache: int4}", "sample.cache: must be 'auto', 'dynamic', 'static' or 'int8', got 'int4'"),
        (
            "{prompt_lookup_tokens: 4, draft_model: there}",
            "sample.prompt_lookup_tokens: proposes tokens, and so does the draft model",
        ),
        (
            "{prompt_lookup_tokens: 4, temperature: 0.5}",
            "sample.prompt_lookup_tokens: proposes tokens for greedy decoding",
        ),
        ("{draft_model: there, cache: static}", "sample.cache: static cannot forget"),
        ("{compile: true, cache: int8}", "sample.compile: needs a cache that does not grow, and this one is int8"),
        (
            "{compile: true, cache: dynamic}",
            "sample.compile: needs a cache that does not grow, and this one is dynamic",
        ),
        (
            "{compile: true, prompt_lookup_tokens: 3}",
            "sample.compile: decodes one token at a time, and prompt_lookup_tokens reads several",
        ),
        (
            "{compile: true, draft_model: there}",
            "sample.compile: decodes one token at a time, and draft_model reads several",
        ),
        ("{compile: maybe}", "sample.compile: must be"),
    ],
)
def test_settings_that_cannot_be_are_said(sample: str, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse(f"stop: {{max_steps: 1}}\nsample: {sample}")
    assert words in str(error.value)


def test_models_that_read_whole_texts_keep_no_cache(stories: LoadedModel) -> None:
    from preheat.engine.builder import build

    from ...conftest import DEVICE

    made = build(parse("model: {num_layers: 1, hidden_size: 32, num_heads: 4, vocab_size: 512}\nbatch: {size: 2, seq_len: 16}\nstop: {max_steps: 1}\n"
                       "techniques: {sliding_window: {window: 4}}"), vocabulary=512, device=DEVICE)  # fmt: skip
    model: Any = made.trained[0]
    for settings in (Sample(cache="int8"), Sample(prompt_lookup_tokens=2), Sample(window=4), Sample(compile=True)):
        with pytest.raises(
            RecipeError, match=r"^sample\.(cache|prompt_lookup_tokens|window|compile): .*attention patterns"
        ):
            generate(model, stories.tokenizer, [[1, 2]], settings)
    with pytest.raises(RecipeError, match=r"^sample.cache: static has room for one text"):
        generate(stories.build.trained[0], stories.tokenizer, [[1, 2]], Sample(cache="static"), kept=PrefixCache())  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"^sample.compile: needs a static cache, which has room for one text"):
        generate(stories.build.trained[0], stories.tokenizer, [[1, 2]], Sample(compile=True), kept=PrefixCache())  # type: ignore[arg-type]
    assert torch.is_grad_enabled()
