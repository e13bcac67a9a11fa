"""What is trained on is what the assistant wrote, in every template and over any conversation: compared as text."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from preheat.data.chat.builtin_templates import FORMATS
from preheat.data.chat.template import Template, load_layout_template, load_template
from preheat.data.document import Document
from preheat.data.tokenizer import Encoder, load_tokenizer, train_tokenizer, write_tokenizer
from preheat.errors import DataError, RecipeError
from preheat.inference.text_generation import find_turn_ends

from ..chats import (
    ALPACA,
    CHATML,
    DEEPSEEK31,
    EMPTIED,
    GLM45,
    HARMONY,
    KINDS,
    NEMOTRON3,
    QWEN35,
    SPECIAL,
    TALKS,
    TOOLS,
    Message,
    call,
    json_of,
    said,
)


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer trained here, with the special tokens of every template."""
    words = [(f"{n:032x}", json_of(talk)) for n, talk in enumerate(TALKS.values())]
    return special(train_tokenizer(words, vocabulary=600))


def special(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    if tokenizer.bos_token is None:
        tokenizer.bos_token = "<|begin_of_text|>"
    return tokenizer


def template(kind: str, tokenizer: Any) -> Template:
    tokenizer.chat_template = KINDS[kind].text
    return load_template(None, tokenizer)


@functools.cache
def encoder_of(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer)


@functools.cache
def real(folder: Path) -> Any:
    return special(load_tokenizer(str(folder)))


def trained(tokenizer: Any, pieces: Sequence[Any]) -> str:
    """The text of the tokens that are trained on, found by where each token stands in the whole."""
    encoder = encoder_of(tokenizer)
    whole = "".join(p.text for p in pieces)
    (made,) = encoder([Document((tuple(pieces),), complete=True)])[0]
    marks = made.loss_mask or b"\1" * len(made.tokens)
    encoding = encoder.backend.encode(whole, add_special_tokens=False)
    if encoding.ids == made.tokens:  # offsets, since decoding a part drops or adds blanks in some tokenizers
        covered = sorted({n for (a, b), m in zip(encoding.offsets, marks, strict=True) if m for n in range(a, b)})
        return "".join(whole[n] for n in covered)
    return str(tokenizer.decode([t for t, m in zip(made.tokens, marks, strict=True) if m]))


def expected(kind: str, talk: Sequence[Message], end: str) -> str:
    """What the assistant wrote, turn by turn, as the template writes it."""
    turns = [n for n, m in enumerate(talk) if m["role"] == "assistant"]
    return "".join(KINDS[kind].written(talk[n], n == turns[-1], end) for n in turns)


def fits(kind: str, name: str) -> bool:
    return KINDS[kind].tools or name != "tools"


CASES = [(kind, name) for kind in KINDS for name in TALKS if fits(kind, name)]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda v: str(v))
def test_what_is_trained_is_what_the_assistant_wrote(own: Any, kind: str, name: str) -> None:
    talk, tools = TALKS[name], TOOLS if name == "tools" else None
    used = template(kind, own)
    pieces = used.spans(talk, tools)
    whole = own.apply_chat_template(talk, tools=tools, tokenize=False)
    assert "".join(p.text for p in pieces) == whole
    assert trained(own, pieces) == expected(kind, talk, own.eos_token)
    assert used.answers
    assert used.end_of_turn in expected(kind, talk, own.eos_token)
    last = used.spans(talk, tools, "last")
    assert trained(own, last) == KINDS[kind].written(talk[-1], True, own.eos_token)
    assert used.spans(talk, tools, "all") == ((whole, True),)
    if (kind, name) != ("mistral", "system"):  # it leaves the system message out where an answer follows
        assert whole.startswith(used.prompt(talk[:-1], tools))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_on_real_tokenizers(data_folder: Any, name: str, kind: str) -> None:
    tokenizer = real(data_folder / "tokenizers" / name)
    used = template(kind, tokenizer)
    for title in (t for t in TALKS if fits(kind, t)):
        pieces = used.spans(TALKS[title], TOOLS if title == "tools" else None)
        assert trained(tokenizer, pieces) == expected(kind, TALKS[title], tokenizer.eos_token), title


@pytest.mark.parametrize("name", FORMATS)
def test_formats_by_name_mark_what_proof_finds(own: Any, name: str) -> None:
    import re

    used = load_template(name, own)
    proven = Template(
        re.sub(r"\{%-? *(end)?generation *%\}", "{%- if true %}{%- endif %}", used.text),
        "bare",
        used.variables,
        used.special,
    )
    for title, talk in TALKS.items():
        if title == "tools" and name not in ("chatml", "llama3", "mistral", "qwen"):
            with pytest.raises(
                DataError, match=r"line \d+: does not render the row: this format has no tools|no role|no tool calls"
            ):
                used.spans(talk, TOOLS)
            continue
        tools = TOOLS if title == "tools" else None
        assert used.spans(talk, tools) == proven.spans(talk, tools), title


def random_talk(draw: random.Random, tools: bool) -> list[Message]:
    words = [
        "yes",
        "no.",
        "Four.",
        "assistant",
        "user\n",
        "\n\n",
        " ",
        "<think>",
        "model\n",
        "ü🙂",
        "### Response:\n",
        "{",
        "}",
        "%}",
        "0",
    ]

    def text() -> str:
        return "x" + "".join(draw.choice(words) for _ in range(draw.randrange(6))) + draw.choice(["y", "y\n", "y "])

    talk: list[Message] = [said("system", text())] if draw.random() < 0.5 else []
    for _ in range(draw.randrange(1, 5)):
        talk.append(said("user", text()))
        if tools and draw.random() < 0.4:
            talk += [said("assistant", "", tool_calls=[call("f", a=text())]), said("tool", text())]
        talk.append(said("assistant", text()))
    return talk


@pytest.mark.parametrize("kind", KINDS)
def test_over_random_conversations(own: Any, kind: str) -> None:
    used, draw = template(kind, own), random.Random(kind)
    for _ in range(40):
        talk = random_talk(draw, KINDS[kind].tools)
        tools = TOOLS if any(m["role"] == "tool" for m in talk) else None
        pieces = used.spans(talk, tools)
        assert "".join(p.text for p in pieces) == own.apply_chat_template(talk, tools=tools, tokenize=False)
        assert "".join(p.text for p in pieces if p.trained) == expected(kind, talk, own.eos_token), talk
        assert trained(own, pieces) == expected(kind, talk, own.eos_token), talk


def test_reasoning_in_history_is_found_by_a_seal(own: Any) -> None:
    talk = [
        *(
            said("user", "Weather?"),
            said("assistant", "<think>\nhm\n</think>\n\nOne moment.", tool_calls=[call("weather")]),
        ),
        *(
            said("tool", "12"),
            said("assistant", "<think>\nah\n</think>\n\nTwelve."),
            said("user", "Sure?"),
            said("assistant", "Yes."),
        ),
    ]
    pieces = template("qwen3", own).spans(talk, TOOLS)
    assert trained(own, pieces) == expected("qwen3", talk, "")


def thought(content: str, reasoning: str, **more: Any) -> Message:
    """An answer with reasoning, by the keys of every template."""
    return said("assistant", content, reasoning_content=reasoning, thinking=reasoning, **more)


PLAIN = [said("user", "Two and two?"), said("assistant", "Four."), said("user", "Sure?"), said("assistant", "Yes.")]
REASONED = [PLAIN[0], thought("Four.", "sum"), PLAIN[2], thought("Yes.", "hm")]
CALLED = [
    *(said("user", "Weather?"), said("assistant", "", tool_calls=[call("weather", city="Ulm")])),
    *(
        said("tool", "12", name="weather"),
        said("assistant", "Twelve."),
        said("user", "Sure?"),
        said("assistant", "Yes."),
    ),
]
FINAL = "<|channel|>final<|message|>"
ULM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>"
CUT = r"message 2, of the assistant, {} cannot be determined: .* set data\.train_on: last, "

# Template, conversation, trained spans of `assistant` or the error, trained spans of `last`.
ENDS: dict[str, tuple[str, list[Message], list[str] | str, list[str] | str]] = {
    # History ends in a token that generation does not stop at, so it is not learned.
    "harmony": (HARMONY, PLAIN, [f"{FINAL}Four.", f"{FINAL}Yes.<|return|>"], [f"{FINAL}Yes.<|return|>"]),
    "harmony, reasoning": (
        *(HARMONY, REASONED),
        [f"{FINAL}Four.", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}Yes.<|return|>"],
        [f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}Yes.<|return|>"],
    ),
    "harmony, tools": (
        *(HARMONY, CALLED),
        [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>',
            *(f"{FINAL}Twelve.", f"{FINAL}Yes.<|return|>"),
        ],
        [f"{FINAL}Yes.<|return|>"],
    ),
    "glm": (
        *(GLM45, PLAIN, ["\n<think></think>\nFour.<|user|>", "\n<think></think>\nYes.<|user|>"]),
        ["\n<think></think>\nYes.<|user|>"],
    ),
    # The model generates its reasoning, not the empty block that history has.
    "glm, reasoning": (GLM45, REASONED, CUT.format("ends"), ["\n<think>hm</think>\nYes.<|user|>"]),
    "glm, tools": (
        *(GLM45, CALLED),
        [
            f"\n<think></think>\n{ULM}<|observation|>",
            *("\n<think></think>\nTwelve.<|user|>", "\n<think></think>\nYes.<|user|>"),
        ],
        ["\n<think></think>\nYes.<|user|>"],
    ),
    "qwen3.5": (QWEN35, PLAIN, CUT.format("begins"), ["\n</think>\n\nYes.<|im_end|>"]),
    "qwen3.5, reasoning": (QWEN35, REASONED, CUT.format("begins"), ["hm\n</think>\n\nYes.<|im_end|>"]),
    # Without reasoning even the last answer lacks the generation prompt.
    "nemotron": (NEMOTRON3, PLAIN, "beginning of message 2 as", "beginning of message 4 as .*reasoning_content"),
    "nemotron, reasoning": (NEMOTRON3, REASONED, CUT.format("begins"), ["hm\n</think>\nYes.<|im_end|>"]),
    "emptied reasoning": (EMPTIED, REASONED, CUT.format("ends"), ["<think>hm</think>Yes.<|im_end|>"]),
    "deepseek": (
        DEEPSEEK31,
        PLAIN,
        ["Four.<|end_of_sentence|>", "Yes.<|end_of_sentence|>"],
        ["Yes.<|end_of_sentence|>"],
    ),
    "deepseek, tools": (
        *(DEEPSEEK31, CALLED),
        [
            '<|tool_calls_begin|>weather{"city": "Ulm"}<|tool_calls_end|><|end_of_sentence|>',
            *("Twelve.<|end_of_sentence|>", "Yes.<|end_of_sentence|>"),
        ],
        ["Yes.<|end_of_sentence|>"],
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_turns_that_end_differently_by_position(case: str) -> None:
    import re

    text, talk, *expected_of = ENDS[case]
    marks = sorted({*re.findall(r"<\|\w+\|>", text), *("<|user|>", "<|observation|>")}, key=len, reverse=True)
    # `stops`: as GLM's generation_config.json; other templates end turns themselves.
    used = Template(text, "own", {"bos_token": "<s>"}, tuple(marks), stops=("<|user|>", "<|observation|>"))
    for train_on, spans in zip(("assistant", "last"), expected_of, strict=True):
        if isinstance(spans, str):
            with pytest.raises(DataError, match=spans) as caught:
                used.spans(talk, None, train_on)  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)
        else:
            pieces = used.spans(talk, None, train_on)  # type: ignore[arg-type]
            assert [piece.text for piece in pieces if piece.trained] == spans
            # The text is the template's; the mark that stops the last turn is the only addition.
            added = "<|user|>" if text == GLM45 else ""
            assert "".join(piece.text for piece in pieces) == used.text_of(talk) + added


def test_the_next_roles_mark_ends_turns_only_if_the_model_stops_there(own: Any, tmp_path: Path) -> None:
    own.chat_template = GLM45
    own.save_pretrained(tmp_path)
    talk = [said("user", "Two and two?"), said("assistant", "Four.")]

    def opened(**files: str) -> Template:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(content)
        return load_layout_template(None, load_tokenizer(str(tmp_path)), "messages")

    plain = opened()
    assert (plain.end_of_turn, plain.spans(talk)[-1].text) == (None, "\n<think></think>\nFour.")
    user = own.convert_tokens_to_ids("<|user|>")
    # generation_config.json has precedence, as in transformers.
    used = opened(config=json_of({"eos_token_id": [own.eos_token_id, user]}))
    assert (used.end_of_turn, used.spans(talk)[-1].text) == ("<|user|>", "\n<think></think>\nFour.<|user|>")
    assert used.spans(talk, train_on="all")[0].text.endswith("Four.<|user|>")
    assert used.key() != plain.key()
    # A run's folder keeps the tokens with the tokenizer, so that other commands read its data alike.
    write_tokenizer(own, tmp_path / "run", used.stops)
    assert load_layout_template(None, load_tokenizer(str(tmp_path / "run")), "messages").spans(talk) == used.spans(talk)
    assert opened(generation_config=json_of({"eos_token_id": own.eos_token_id})).end_of_turn is None
    # Generation, which does not read the file, stops there too.
    assert find_turn_ends(plain, own) == (frozenset({user}), ())
    with pytest.raises(RecipeError, match=r"generation_config\.json: eos_token_id is '<\|user\|>', not a token ID"):
        opened(generation_config=json_of({"eos_token_id": "<|user|>"}))


def test_weight_0_is_not_trained(own: Any) -> None:
    talk = [*TALKS["one turn"], said("user", "and"), said("assistant", "Bad.", weight=0)]
    assert trained(own, template("chatml", own).spans(talk)) == "Four.<|im_end|>"


BROKEN = {
    "syntax": ("{% for m in messages %}\n{{ m.content }", r"line 2: not a Jinja template"),
    "raises": (
        "{{ bos_token }}\n{{ raise_exception('no such thing') }}",
        r"line 2: does not render the row: no such thing",
    ),
    "key": ("\n\n{{ messages[0].content + 1 }}", r"line 3: does not render the row: can only concatenate str"),
    "mark in a macro": (
        "{% macro w(m) %}He says: {% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ w(m) }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        r"marks do not enclose the assistant's text",
    ),
    "unproven": (
        "{{ messages | length }}{% for m in messages %}{{ m.role }}:{{ m.content[::-1] }}{% endfor %}",
        r"where message 2, of the assistant, begins cannot be determined",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_template_that_fails_is_told_with_its_line(own: Any, case: str) -> None:
    text, words = BROKEN[case]
    with pytest.raises(DataError, match=words) as caught:
        Template(text, "mine.jinja", {"bos_token": "<s>"}, ("<s>",)).spans(TALKS["one turn"])
    assert str(caught.value).startswith("mine.jinja")
    assert "\n" not in str(caught.value)


def test_templates_by_name_and_file(own: Any, tmp_path: Any) -> None:
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert load_template(str(tmp_path / "mine.jinja"), own).text == CHATML
    own.chat_template = None
    for setting, words in (
        (None, r"has no chat template of its own; name one \(alpaca, chatml"),
        ("chatlm", r"data\.template chatlm: no template of that name; did you mean 'chatml'"),
        (str(tmp_path / "mien.jinja"), r"does not exist; .* did you mean 'mine\.jinja'"),
    ):
        with pytest.raises(DataError, match=words):
            load_template(setting, own)
    own.chat_template = {"default": ALPACA, "tool_use": KINDS["qwen2.5"].text}
    both = load_template(None, own)
    assert "<tools>" in both.prompt(TALKS["tools"][:1], TOOLS)
    assert "### Response" in both.prompt(TALKS["tools"][:1])


def test_a_template_without_end_of_turn_or_answer_says_so(own: Any) -> None:
    bare = Template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", special=tuple(SPECIAL))
    assert (bare.answers, bare.end_of_turn) == (True, None)
    deaf = Template(
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", special=tuple(SPECIAL)
    )
    assert (deaf.answers, deaf.end_of_turn) == (False, None)
