"""Chat templates: renders conversations and finds the assistant's text, by the template's marks or by rendering.

The mask is never found by searching for the answer, whose text may occur elsewhere too. If a template marks the
assistant's text with `{% generation %}`, the marks count. Otherwise a turn begins at the end of the rendering of all
messages before it, including the generation prompt, and ends at the end of the rendering up to it; both must be
prefixes of the full text. Some templates render history differently from the last turn (they drop earlier reasoning, or
move the system message into the last question). For these a seal is inserted into the turn's own text and the
conversation is rendered again; if nothing but the seal changes, its position is the boundary. Anything else is
rejected.

The end of a turn is found in its own rendering, in which it is the last one, since generation ends it like that.

- If history ends it with another token (gpt-oss: `<|end|>`, while the model generates `<|return|>`), it is trained up
  to this token, as in ms-swift: a model that learned to generate it would not stop.
- If no token ends a turn, but the model stops at the mark of the next role (GLM 4.5's generation_config.json names
  `<|user|>` and `<|observation|>`), the mark ends the turn and is trained. It is added behind the last turn, as in TRL
  and ms-swift; rendering the conversation with another message shows which one follows.
- If history leaves out the generation prompt of a turn (Qwen3.5 and Nemotron 3 cut reasoning), or replaces a part of
  its text (GLM 4.5), the turn can only be trained as the last one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from preheat.data.chat.builtin_templates import FORMATS, SUGGESTIONS
from preheat.data.chat.messages import PLACE
from preheat.data.chat.render_limits import limit_rendering, require_small, require_template
from preheat.data.document import END, PAD, TextSpan
from preheat.data.rows.file_readers import describe_missing_path, display_path, expand_path
from preheat.errors import DataError, suggest_nearest
from preheat.model_folder import beginning_tokens, find_stop_tokens
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from preheat.data.chat.messages import Message, Tools

__all__ = ["Template", "TrainOn", "load_template", "special_tokens", "load_layout_template"]

TrainOn = Literal["assistant", "last", "all"]
Span = tuple[int, int]

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_RULES = 2
"""Version of the rules that find the assistant's text in templates without marks; part of cache keys."""
_SEAL = "zqSEALqz"
"""Text inserted into a turn to find its boundary: letters only, which no template trims, escapes or splits."""
_SHORTEST: Sequence[Message] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _SEAL})


def load_template(setting: str | None, tokenizer: PreTrainedTokenizerFast, *, knob: str = "data.template") -> Template:
    """Loads the chat template that a recipe names.

    Args:
        setting: name of a built-in template (`builtin_templates.FORMATS`) or path of a Jinja file; None for the
            tokenizer's own.
        tokenizer: tokenizer whose special tokens the template uses.
        knob: the setting, for messages.

    Raises:
        DataError: there is no such template.

    Example:
        >>> load_template("chatml", tokenizer).prompt([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
        '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """
    # Values that are lists (additional special tokens) are no variables of templates.
    variables = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    special = special_tokens(tokenizer)
    with_tools = None
    if setting is None:
        own = tokenizer.chat_template
        if not own:
            raise DataError(
                f"{knob}: the tokenizer has no chat template of its own; name one ({SUGGESTIONS}) or a .jinja file"
            )
        name = "the tokenizer's own template"
        # Several named templates, such as Command R's.
        if isinstance(own, dict):
            text, with_tools = own.get("default") or next(iter(own.values())), own.get("tool_use")
        else:
            text = own
    else:
        text, name = _read(setting, knob)
        if setting in FORMATS:
            # Rendered text is encoded as it is (`Document.complete`), so the
            # template must write the beginning-of-text token.
            text = text.replace("BEGIN", "{{- bos_token }}" if beginning_tokens(tokenizer) else "", 1)
    return Template(text, name, variables, special, with_tools)


def _read(setting: str, knob: str) -> tuple[str, str]:
    """Returns the Jinja of a built-in template or of a file, and its name for messages."""
    if setting in FORMATS:
        return FORMATS[setting], f"template {setting}"
    path = expand_path(knob, setting)
    if not path.is_file():
        if path.is_dir():
            raise DataError(f"{knob} {display_path(path)}: is a folder; name a .jinja file")
        if path.suffix not in (".jinja", ".j2", ".txt") and "/" not in setting:
            raise DataError(
                f"{knob} {display_path(setting)}: no template of that name; "
                f"{suggest_nearest(setting[:40], list(FORMATS))}"
            )
        raise describe_missing_path(knob, path)
    try:
        # utf-8-sig drops a byte order mark, which would be rendered into every row.
        return path.read_text(encoding="utf-8-sig"), display_path(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{knob} {display_path(path)}: cannot be read ({shorten(str(error), 120)})") from None


def special_tokens(tokenizer: PreTrainedTokenizerFast | None) -> tuple[str, ...]:
    """Returns the special tokens of a tokenizer, the longest first; None is a tokenizer still to be trained."""
    if tokenizer is None:
        return (END, PAD)
    tokens = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    return tuple(sorted(tokens, key=lambda t: (-len(t), t)))


def load_layout_template(setting: str | None, tokenizer: PreTrainedTokenizerFast | None, layout: str) -> Template:
    """Loads the template to train on rows of a layout by `load_template`; for instructions, the default is alpaca.

    If it ends turns with no token of its own, it gets the `stops` of the tokenizer's model.

    Args:
        tokenizer: None for a tokenizer still to be trained, which will have no special tokens but end of text and
            padding.
    """
    if setting is None and layout == "alpaca" and (tokenizer is None or not tokenizer.chat_template):
        setting = "alpaca"
    if tokenizer is not None:
        template = load_template(setting, tokenizer)
        # Rows of these layouts are not rendered, so that even a broken template does no harm.
        unused = layout in ("text", "classes") or (layout == "prompt" and setting is None)
        if unused or template.end_of_turn is not None:
            return template
        return replace(template, stops=find_stop_tokens(tokenizer))
    if setting is None:
        raise DataError(
            f"data.template: there is no tokenizer with a template; name one ({SUGGESTIONS}) or a .jinja file"
        )
    text, name = _read(setting, "data.template")
    return Template(text.replace("BEGIN", "", 1) if setting in FORMATS else text, name, {"eos_token": END}, (END, PAD))


@dataclass(frozen=True)
class Template:
    """A chat template with the special tokens of a tokenizer.

    Attributes:
        text: the Jinja.
        name: its origin, for messages.
        variables: variables of the template apart from the messages: bos_token, eos_token, ...
        special: the tokenizer's special tokens, the longest first; one of them ends a turn.
        with_tools: the Jinja for conversations with tools, if the tokenizer has another one for these.
        image: the token that it writes for an image, for messages with `PLACE` in their text; "": there are none.
        stops: the tokens at which the model's generation stops, if the template itself ends turns with no token.
    """

    text: str
    name: str = "template"
    variables: Mapping[str, str] = field(default_factory=dict)
    special: tuple[str, ...] = ()
    with_tools: str | None = None
    image: str = ""
    stops: tuple[str, ...] = ()

    def key(self) -> tuple[object, ...]:
        """Returns everything that decides the spans of a conversation, as part of a cache key."""
        own = (self.text, self.with_tools, dict(self.variables))
        marked = all(_MARKED.search(text) for text in (self.text, self.with_tools) if text)
        return own if marked else (*own, _RULES, self.stops)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Renders a prompt for the assistant's next turn, which ends with the generation prompt.

        Raises:
            DataError: the template does not render these messages.
        """
        return self._render(messages, tools, asks=True)

    def text_of(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Renders the conversation for training, without a generation prompt.

        Raises:
            DataError: the template does not render these messages.
        """
        return self._render(messages, tools)

    def spans(
        self, messages: Sequence[Message], tools: Tools = None, train_on: TrainOn = "assistant"
    ) -> tuple[TextSpan, ...]:
        """Renders the conversation as spans that are read or trained on.

        Joined they are the rendered text, and behind it the token that stops the last turn if the template ends turns
        by the next role's mark.

        Args:
            messages: the conversation. An assistant's message with `weight: 0` is not trained on.
            tools: JSON schemas of functions that may be called.
            train_on: every turn of the `assistant`, the `last` of them, or `all` of the text.

        Raises:
            DataError: the template does not render the messages, or the assistant's text cannot be proven.
        """
        # The spans of the assistant: by the template's marks if it has any, else proven by rendering.
        text, marks = self._render_marked(messages, tools)
        if train_on == "all":
            # All that is rendered; an end that cannot be determined is none of it.
            with contextlib.suppress(DataError):
                text += self._stop_behind(messages, tools) if marks is None else ""
            return (TextSpan(text),)
        if marks is None:
            text += self._stop_behind(messages, tools)
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [n for n in (turns[-1:] if train_on == "last" else turns) if messages[n].get("weight") != 0]
        if marks is None:
            # Only trained turns need a proof.
            spans = {n: self._prove_turn(text, messages, tools, n) for n in wanted}
        else:
            spans = dict(
                zip(turns, self._merge_by_turn([m for m in marks if m[0] < m[1]], messages, tools, turns), strict=True)
            )
        # Cutting the text into spans needs them in order and disjoint.
        for (one, before), (other, after) in itertools.pairwise(spans.items()):
            if before[1] > after[0]:
                raise DataError(
                    f"{self.name}: messages {one + 1} and {other + 1}, of the assistant, overlap in what it renders; "
                    "use another data.template"
                )
        return tuple(_cut_up(text, [spans[n] for n in wanted]))

    @functools.cached_property
    def answers(self) -> bool:
        """True if the template renders the assistant's messages."""
        return self._probe is None or _SEAL in self._probe

    @functools.cached_property
    def end_of_turn(self) -> str | None:
        """The special token that ends an assistant's turn, or None."""
        if not self._probe or _SEAL not in self._probe:
            return None
        # The special token directly after the answer, apart from white space.
        match = re.match(rf"\s*({self._any})", self._probe[self._probe.rindex(_SEAL) + len(_SEAL) :])
        if match:
            return match[1]
        return self.next_role if self.next_role in self.stops else None

    @functools.cached_property
    def next_role(self) -> str | None:
        """The special token that begins the question after an answer, if no other one ends the answer; else None."""
        if self._probe is None or not self._probe.rstrip().endswith(_SEAL):
            return None
        try:
            text = self._render([*_SHORTEST, _SHORTEST[0]], None)
        except DataError:
            return None
        match = re.match(rf"\s*({self._any})", text.rpartition(_SEAL)[2])
        return match[1] if match else None

    @functools.cached_property
    def _probe(self) -> str | None:
        """The shortest conversation, rendered; None if the template requires more."""
        try:
            return self._render(_SHORTEST, None)
        except DataError:
            return None

    @functools.cached_property
    def _ends_by_role(self) -> bool:
        """True if the mark of the next role ends an assistant's turn."""
        return self.end_of_turn is not None and self.end_of_turn == self.next_role

    @functools.cached_property
    def _any(self) -> str:
        # (?!) never matches: without special tokens an empty pattern would match everywhere.
        return "|".join(map(re.escape, self.special)) or "(?!)"

    # --- rendering

    def _render(self, messages: Sequence[Message], tools: Tools, *, asks: bool = False) -> str:
        return self._render_with_spans(messages, tools, asks, False)[0]

    def _render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span] | None]:
        """Returns the text and its marked spans, or None if the template has no marks."""
        if not _MARKED.search(self._choose_template(tools)):
            return self._render(messages, tools), None
        self._marks_hold  # noqa: B018  # computed once
        return self._render_with_spans(messages, tools, False, True)

    def _choose_template(self, tools: Tools) -> str:
        return self.with_tools if tools and self.with_tools else self.text

    def _render_with_spans(
        self, messages: Sequence[Message], tools: Tools, asks: bool, marked: bool
    ) -> tuple[str, list[Span]]:
        return self._render_unchanged([self._split_content(m) for m in messages], tools, asks, marked)

    def _split_content(self, message: Message) -> Message:
        """Returns a message as the template reads it: with parts for an image, and for text if it renders no others."""
        content = message.get("content")
        if not isinstance(content, str):
            return message
        if PLACE in content and self.image and not self._reads_parts:
            return {**message, "content": content.replace(PLACE, self.image)}
        if not (PLACE in content and self.image) and not self._needs_parts:
            return message
        texts = content.split(PLACE) if self.image else [content]
        parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
        return {**message, "content": [p for p in parts if p.get("text") != ""] or [{"type": "text", "text": ""}]}

    def _try_content(self, content: object) -> str:
        """The rendering of a question with this content; "" if the template does not render it."""
        try:
            return self._render_unchanged([{"role": "user", "content": content}], None, False, False)[0]
        except DataError:
            return ""

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """True if the template writes the image's token for a part of type image, and the text of the others."""
        text = self._try_content([{"type": "image"}, {"type": "text", "text": _SEAL}])
        return text.count(self.image) == 1 and _SEAL in text and "'type'" not in text

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """True if the template renders messages of parts and not those of text (SmolVLM)."""
        if "type" not in self.text or _SEAL in self._try_content(_SEAL):
            return False
        text = self._try_content([{"type": "text", "text": _SEAL}])
        return _SEAL in text and "'type'" not in text

    def _render_unchanged(
        self, messages: Sequence[Message], tools: Tools, asks: bool, marked: bool
    ) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        # Before rendering: the time limit cannot interrupt a huge power.
        require_template(self.name, self._choose_template(tools))
        with limit_rendering(self.name):
            try:
                texts, marks = render_jinja_template(
                    [list(messages)],
                    tools=list(tools) if tools else None,  # type: ignore[arg-type]
                    chat_template=self._choose_template(tools),
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=asks,
                    **self.variables,
                )
            except jinja2.TemplateSyntaxError as error:
                reason = shorten(error.message or "", 200)
                raise DataError(f"{self.name}, line {error.lineno}: not a Jinja template: {reason}") from None
            except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                # The sandbox still raises the errors of Python's own operators.
                reason = shorten(str(error), 200) or type(error).__name__
                raise DataError(f"{self.name}{_describe_line(error)}: does not render the row: {reason}") from None
        require_small(self.name, texts[0], messages)
        return texts[0], marks[0] if marked else []

    # --- marks

    @functools.cached_property
    def _marks_hold(self) -> None:
        """Checks the marks in a known conversation: inside a Jinja macro or `set` block their offsets are wrong."""
        answers = ("zqONEqz", "zqTWOqz")
        talk = [m for a in answers for m in ({"role": "user", "content": "?"}, {"role": "assistant", "content": a})]
        try:
            text, marks = self._render_with_spans(talk, None, False, True)
        except DataError:
            return
        inside = "\0".join(text[a:b] for a, b in marks)
        # Each answer that is rendered must lie within a mark, and no question may.
        if any(a in text and a not in inside for a in answers) or "?" in inside:
            raise DataError(
                f"{self.name}: its {{% generation %}} marks do not enclose the assistant's text (marks inside a macro "
                "or a set block have no effect); remove them, so that the mask is found by rendering, or move them"
            )

    def _merge_by_turn(
        self, marks: list[Span], messages: Sequence[Message], tools: Tools, turns: list[int]
    ) -> list[Span]:
        """Merges marks to one span per turn, for templates that mark a turn in several blocks."""
        if len(marks) == len(turns):
            return marks
        spans, before = [], 0
        for n in turns:
            # The non-empty marks of the conversation up to this turn; each turn must add one at least.
            upto = len([1 for a, b in self._render_with_spans(messages[: n + 1], tools, False, True)[1] if a < b])
            if not before < upto <= len(marks):
                raise DataError(
                    f"{self.name}: message {n + 1} has no {{% generation %}} mark; mark every assistant turn, or none"
                )
            spans.append((marks[before][0], marks[upto - 1][1]))
            before = upto
        return spans

    # --- proof by rendering

    def _prove_turn(self, text: str, messages: Sequence[Message], tools: Tools, n: int) -> Span:
        """Returns the start and end of the turn of message `n` in the rendered text."""
        # The prompt of generation for this turn: if the text begins with it, the turn begins at its end.
        before = self._render(messages[:n], tools, asks=True)
        # Its own rendering: it is the last turn, as in generation.
        talk = messages[: n + 1]
        upto = text if n == len(messages) - 1 else self._render(talk, tools) + self._stop_behind(talk, tools)
        own_start = len(before) if upto.startswith(before) else None
        start = len(before) if text.startswith(before) else self._find_beginning(text, messages, tools, n)
        if start is None:
            # Two causes with different advice: a generation prompt that even its own rendering lacks, or a history
            # that changes.
            history = self._render(messages[:n], tools)
            if own_start is None and before.startswith(history) and text.startswith(history):
                raise DataError(
                    f"{self.name}: its generation prompt {quote_value(before[len(history) :][-60:])} is not the "
                    "beginning "
                    f"of message {n + 1} as it renders it, {quote_value(text[len(history) :][:60])}: training and "
                    "generation would differ; begin the answers as the prompt does (with an open <think> or "
                    "reasoning_content, say), mark the assistant's text with {% generation %}, or use another "
                    "data.template"
                )
            raise self._describe_unproven(messages, n, "begins")
        if text.startswith(upto):
            end: int | None = self._cut(text, start, len(upto))
        else:
            end = self._end(text, upto, start, own_start, messages, tools, n)
        if end is None:
            raise self._describe_unproven(messages, n, "ends")
        return start, max(start, end)

    def _describe_unproven(self, messages: Sequence[Message], n: int, what: str) -> DataError:
        later = any(message["role"] == "assistant" for message in messages[n + 1 :])
        return DataError(
            f"{self.name}: where message {n + 1}, of the assistant, {what} cannot be determined: it renders history "
            f"differently from the last turn; {'set data.train_on: last, ' if later else ''}mark the assistant's text "
            f"in it with {{% generation %}}, use another data.template ({SUGGESTIONS}), or data.train_on: all"
        )

    def _cut(self, text: str, start: int, stop: int) -> int:
        """Returns the end of a turn, after its end-of-turn token; text behind that belongs to no turn."""
        turn = text[start:stop]
        run = re.search(rf"(?:(?:{self._any})\s*)+\Z", turn)
        # No special token ends the turn: the white space at its end is the template's.
        if run is None:
            return start + len(turn.rstrip())
        if self.end_of_turn and self.end_of_turn in run[0]:
            return start + run.start() + run[0].index(self.end_of_turn) + len(self.end_of_turn)
        # Another token than in the probe ends this turn, such as <|eom_id|> after a tool call of Llama 3.1.
        first = re.match(self._any, run[0])
        assert first
        return start + run.start() + first.end()

    def _end(
        self,
        text: str,
        upto: str,
        start: int,
        own_start: int | None,
        messages: Sequence[Message],
        tools: Tools,
        n: int,
    ) -> int | None:
        """Returns the end of a turn that history renders differently from `upto`, its own rendering, or None.

        Args:
            start, own_start: where the turn begins in `text` and in `upto`; None: `upto` lacks its generation prompt.
        """
        for changed in _seal_at_end(messages[n]):
            place = self._find_seal(text, messages, tools, n, changed)
            own = self._find_seal(upto, messages[: n + 1], tools, n, changed)
            if place is None or own is None or place < start:
                continue
            # History may leave out the beginning of what the model generates, but not replace it.
            generated = own_start is not None and upto[own_start:own].endswith(text[start:place])
            replaced = own_start is not None and not generated
            if replaced or (self._ends_by_role and not generated):
                return None
            ending = upto[own : self._cut(upto, own, len(upto))].strip()
            if not ending:
                return place
            if match := re.compile(r"\s*" + re.escape(ending)).match(text, place):
                return match.end()
            # History ends the turn in another token than generation, which must not be learned. A seal in a call's
            # name is not at the end of the turn.
            if not generated or messages[n].get("tool_calls"):
                return None
            blank = re.match(r"\s*", upto[own:])
            assert blank
            return place + len(blank[0]) if text.startswith(blank[0], place) else place
        return None

    def _stop_behind(self, messages: Sequence[Message], tools: Tools) -> str:
        """Returns the token that stops the last turn if the template ends turns by the next role's mark; else ""."""
        last = messages[-1]
        if not self._ends_by_role or last["role"] != "assistant" or last.get("weight") == 0:
            return ""
        following = {"role": "tool" if last.get("tool_calls") else "user", "content": "?"}
        for sealed in _seal_at_end(last):
            # The text behind the seal, if this turn is the last one, and if another message follows.
            own, followed = (
                self._render([*messages[:-1], sealed, *more], tools).partition(_SEAL)[2] for more in ([], [following])
            )
            mark = re.match(self._any, followed[len(own) :]) if followed.startswith(own) else None
            if mark and mark[0] in self.stops:
                return mark[0]
        raise self._describe_unproven(messages, len(messages) - 1, "ends")

    def _find_beginning(self, text: str, messages: Sequence[Message], tools: Tools, n: int) -> int | None:
        message = messages[n]
        history, before = self._render(messages[:n], tools), self._render(messages[:n], tools, asks=True)
        # The generation prompt alone.
        opening = before[len(history) :] if before.startswith(history) else ""
        for changed in _seal_at_beginning(message):
            place = self._find_seal(text, messages, tools, n, changed)
            if place is None:
                continue
            # Find the text of the turn before the seal by rendering it as the last one, after its history or a short
            # question.
            for talk in (messages[:n], [{"role": "user", "content": "?"}]):
                prompt, answered = self._render(talk, tools, asks=True), self._render([*talk, message], tools)
                alone = self._find_seal(answered, [*talk, message], tools, len(talk), changed)
                if alone is None or not answered.startswith(prompt):
                    continue
                # The text of the turn before the seal: reasoning, or the opening of a call.
                lead = answered[len(prompt) : alone]
                if text.endswith(opening + lead, 0, place):
                    return place - len(lead)
                # History leaves out the lead, so the turn begins at the seal.
                if opening and text.endswith(opening, 0, place):
                    return place
        return None

    def _find_seal(self, text: str, messages: Sequence[Message], tools: Tools, n: int, changed: Message) -> int | None:
        """Returns the position of the seal of a changed message, or None if more than the seal changes."""
        sealed = self._render([*messages[:n], changed, *messages[n + 1 :]], tools)
        place = sealed.find(_SEAL)
        # Templates may repeat the name of a call with the tool's result; the first one is in the turn.
        rest = sealed.replace(_SEAL, "", -1 if changed.get("tool_calls") else 1)
        # `_stop_behind` may have added a token.
        same = text.startswith(rest) and text[len(rest) :] in ("", *self.stops)
        return place if place >= 0 and same else None


def _seal_at_end(message: Message) -> Iterator[Message]:
    """Yields the message with the seal at its end, in the last tool call or behind the text."""
    if message.get("tool_calls"):
        yield _seal_call(message, -1)
        return
    content = message.get("content") or ""
    # Before trailing white space, which templates may trim.
    text = content.rstrip()
    yield {**message, "content": text + _SEAL + content[len(text) :]}


def _seal_at_beginning(message: Message) -> Iterator[Message]:
    """Yields the message with the seal at its beginning: in the first call, before the text, or after reasoning."""
    if message.get("tool_calls"):
        yield _seal_call(message, 0)
    content = message.get("content") or ""
    # After leading white space, which templates may trim, or after reasoning, which they may drop.
    begins = [len(content) - len(content.lstrip()), *(m.end() for m in re.finditer(r"</think>\s*", content))]
    for at in begins:
        yield {**message, "content": content[:at] + _SEAL + content[at:]}


def _seal_call(message: Message, which: int) -> Message:
    calls = list(message["tool_calls"])
    function = calls[which]["function"]
    calls[which] = {**calls[which], "function": {**function, "name": function["name"] + _SEAL}}
    return {**message, "tool_calls": calls}


def _cut_up(text: str, spans: Sequence[Span]) -> Iterator[TextSpan]:
    at = 0
    for start, end in spans:
        if start > at:
            yield TextSpan(text[at:start], False)
        if end > start:
            yield TextSpan(text[start:end])
        at = end
    if at < len(text):
        yield TextSpan(text[at:], False)


def _describe_line(error: BaseException) -> str:
    """Returns ', line N' for the line of the template that raised an error, or ''."""
    line, trace = None, error.__traceback__
    while trace is not None:
        # Jinja rewrites tracebacks: frames of a template have its own line numbers.
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line else ""
