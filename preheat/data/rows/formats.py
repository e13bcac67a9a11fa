"""Detects the layout of rows from their fields, or takes it from the recipe, and converts rows to documents."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from preheat.data.chat.messages import (
    PLACE,
    Unreadable,
    find_order_problem,
    iterate_texts,
    parse_messages,
    parse_tools,
    serialize_answer,
)
from preheat.data.chat.template import Template, TrainOn
from preheat.data.document import Document, TextSpan
from preheat.data.rows.file_readers import LONGEST, describe_json_type, format_names, suggest_name
from preheat.data.rows.schemas import LAYOUTS, advise_columns, class_name, class_names
from preheat.data.vision_inputs import ImageProcessor, resolve_images
from preheat.errors import DataError, suggest_nearest
from preheat.recipe import Data
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.data.chat.messages import Message, Tools
    from preheat.data.rows.schemas import Fields

__all__ = ["Layout", "class_names", "detect_layout"]

# True and False also match the numbers 1 and 0, which are equal keys.
_DESIRABLE = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0, True: 1, False: 0}
_BROKEN = re.compile("[ÂÃ][\x80-\xbf]|â€[\x80-\xff\u0152-\u2122]|ï»¿|ðŸ|[\ufffd\x80-\x9f]")
"""Signs of a wrong encoding: UTF-8 read as Latin-1 or Windows-1252, replacement characters, C1 controls."""


@dataclass(frozen=True)
class Layout:
    """The layout of rows: the meaning of their fields and how they become documents.

    Attributes:
        kind: key of `LAYOUTS`.
        columns: role -> name of the field in the file.
        reason: how the layout was detected, for users.
        template: the chat template; None if there is none, or if it failed with the message in `lacking`.
        lacking: error message for rows that need a template.
        wraps: apply the template to prompts and completions that are plain text.
        train_on: turns of a conversation to train on.
        classes: names of the classes, in order.
        special: special tokens of the tokenizer, searched for in the text of rows.
        eye: image processor; None for text-only models.
        folder: base of relative paths of images.
        strange: the fields of the first row match no layout.
    """

    kind: str
    columns: Mapping[str, str]
    reason: str
    template: Template | None = None
    lacking: str = ""
    wraps: bool = False
    train_on: TrainOn = "assistant"
    classes: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    eye: ImageProcessor | None = None
    folder: Path = Path()
    strange: bool = False
    _firsts: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def chat_template(self) -> Template | None:
        """The template that renders the rows; None for plain text, even if the tokenizer has a template."""
        # Prompts, pairs and judged answers are often plain text: they become chats only if data.template is set.
        chats = self.kind in ("alpaca", "messages", "sharegpt") or (self.wraps and self.kind not in ("classes", "text"))
        return self.template if chats else None

    def names(self) -> list[str]:
        """Returns the fields of the file that are read."""
        return list(dict.fromkeys(self.columns.values()))

    @property
    def description(self) -> str:
        """The layout and how it was detected, for users."""
        return f"{self.kind}, {self.reason}"

    def key(self) -> tuple[object, ...]:
        """Returns everything that decides the document of a row, as a cache key."""
        template = self.template.key() if self.template else None
        # Relative image paths depend on the folder.
        images = (self.eye.key(), str(self.folder)) if self.eye else None
        return self.kind, dict(self.columns), template, self.wraps, self.train_on, self.classes, self.special, images

    def require(self, names: Sequence[str], where: str) -> None:
        """Raises DataError if a required field is missing."""
        for role in LAYOUTS[self.kind][0]:
            if self.columns[role] not in names:
                raise DataError(f"{where}: {self._describe_absent(role, names)}")

    def document(self, row: object, where: str) -> Document:
        """Converts a row to a document; an unreadable row gives one without sequences, with the reason in its notes.

        Raises:
            DataError: the layout needs a chat template and there is none.
        """
        # The source `docstrings` yields documents.
        if isinstance(row, Document):
            return row
        notes: list[tuple[str, str]] = []
        try:
            # A file without fields: its text takes the role of the field.
            if isinstance(row, str):
                row = {self.columns.get("text", "text"): row}
            if not isinstance(row, Mapping):
                raise Unreadable("fields", f"is {describe_json_type(row)}, not an object with fields")
            document = self._build_document(row, notes)
            if (size := sum(len(piece.text) for sequence in document.sequences for piece in sequence)) > LONGEST:
                raise Unreadable(
                    "fields", f"has {size:,} characters of text, and a row at most {LONGEST:,}; cut it into several"
                )
        # Not an error yet: `preflight` counts such rows, and the recipe decides if they block the run.
        except Unreadable as problem:
            return Document((), where=where, notes=((problem.check, problem.message),))
        return document._replace(
            where=where, notes=tuple(dict(reversed(notes)).items())
        )  # the first of each check: rows are counted

    def _build_document(self, row: Fields, notes: list[tuple[str, str]]) -> Document:
        if self.eye and self.kind not in ("sharegpt", "messages") and self._read_images(row):
            raise Unreadable(
                "images", f"has images, which the layout {self.kind} does not read; use sharegpt or messages"
            )
        # Plain text: all of it is trained on.
        if self.kind == "text":
            return Document.of(self._read_text(row, "text", notes, empty=True))
        # The text is only read; the label is its class.
        if self.kind == "classes":
            text = self._read_text(row, "text", notes, empty=False)
            return Document(((TextSpan(text, False),),), label=self._read_class(row))
        if self.kind in ("sharegpt", "messages"):
            role = "conversations" if self.kind == "sharegpt" else "messages"
            return self._render_chat(self._talk(row, role), self._read_tools(row), notes, images=self._read_images(row))
        if self.kind == "alpaca":
            return self._render_chat(self._build_instruction(row), None, notes)
        if self.kind == "preference":
            return self._build_pair(row, notes)
        # The layouts prompt and kto.
        before, answers = self._read_prompt_and_answer(row, "completion", notes)
        label = self._read_desirable(row) if self.kind == "kto" else None
        if isinstance(answers, str):
            # Both are plain text: the prompt is read and the answer trained on.
            prompt = before if isinstance(before, str) else ""
            return Document(((*([TextSpan(prompt, False)] if prompt else []), TextSpan(answers)),), label=label)
        # Both are messages, rendered together: all before the answer is only read.
        chat = self._render_chat([*before, *answers], self._read_tools(row), notes, read=len(before))
        return self._build_judged(chat)._replace(label=label) if self.kind == "kto" else chat

    # --- fields

    def _read_value(self, row: Fields, role: str) -> object:
        if self.columns[role] not in row:
            raise Unreadable("fields", self._describe_absent(role, [str(k) for k in row]))
        return row[self.columns[role]]

    def _describe_absent(self, role: str, known: Sequence[str]) -> str:
        name, only = self.columns[role], format_names(known) or "none"
        if self.strange and known:
            return f"no field 'text', only {only}, which no layout has; {advise_columns(known)}"
        knob = f"data.{role}" if role in ("text", "prompt", "completion") else f"data.columns.{role}"
        return f"no field '{name}', only {only}; set {knob}: {suggest_name(name, list(known)) if known else name}"

    def _read_text(self, row: Fields, role: str, notes: list[tuple[str, str]], *, empty: bool) -> str:
        value, name = self._read_value(row, role), self.columns[role]
        if not isinstance(value, str):
            raise Unreadable(
                "fields", f"field '{name}' is {describe_json_type(value)}, not text; fix the row or name another field"
            )
        if not empty and not value.strip():
            raise Unreadable("fields", f"field '{name}' is empty")
        self._check_text(f"field '{name}'", value, notes)
        return value

    def _check_text(self, where: str, text: str, notes: list[tuple[str, str]]) -> None:
        """Checks a text for a wrong encoding and for special tokens, and notes the findings."""
        # ASCII text, the usual case, has none of these faults and skips the search.
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise Unreadable(
                    "encoding", f"{where} holds half a surrogate pair at character {error.start}, which is not text"
                ) from None
            if match := _BROKEN.search(text):
                message = (
                    f"{where} holds {match[0]!r} at character {match.start()}, as text read in a wrong encoding has"
                )
                notes.append(("encoding", message))
        # Most texts lack even the first character of all special tokens, such as `<`.
        if any(first in text for first in self._firsts):
            token = next((t for t in self.special if t in text), None)
            if token is not None:
                notes.append(("special_tokens", f"{where} holds {token}, a special token of the tokenizer"))

    def _read_optional(self, row: Fields, role: str) -> object:
        return row.get(self.columns[role]) if role in self.columns else None

    def _read_tools(self, row: Fields) -> list[JsonObject] | None:
        return parse_tools(self._read_optional(row, "tools"), self.columns.get("tools", "tools"))

    def _read_class(self, row: Fields) -> int:
        value = self._read_value(row, "label")
        # A number is first taken for the name of a class, then for its index.
        if isinstance(value, int) and not isinstance(value, bool) and str(value) not in self.classes:
            if 0 <= value < len(self.classes):  # the index of a class with a given name
                return value
        elif value is not None and class_name(value) in self.classes:
            return self.classes.index(class_name(value))
        raise Unreadable(
            "fields",
            f"field '{self.columns['label']}' is {quote_value(value)}, none of the classes "
            f"{', '.join(shorten(c, 40) for c in self.classes[:12])}",
        )

    def _read_desirable(self, row: Fields) -> int:
        value = self._read_value(row, "label")
        plain = value.lower() if isinstance(value, str) else value
        known = _DESIRABLE.get(plain) if isinstance(plain, str | bool | int | float) else None
        if known is None:
            raise Unreadable(
                "fields", f"field '{self.columns['label']}' is {quote_value(value)}, neither true (liked) nor false"
            )
        return known

    # --- conversations

    def _talk(self, row: Fields, role: str) -> list[Message]:
        messages: list[Message] = list(parse_messages(self._read_value(row, role), self.columns[role]))
        system = self._read_optional(row, "system")
        # A system message in the conversation itself takes precedence over the field.
        if isinstance(system, str) and system.strip() and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": system}, *messages]
        return messages

    def _build_instruction(self, row: Fields) -> list[Message]:
        needed = {
            role: self._read_value(row, role) for role in ("instruction", "output")
        }  # a missing one is reported first
        # Their notes are dropped: `_render_chat` checks the texts again.
        values = {role: self._read_text(row, role, [], empty=False) for role in needed}
        extra = self._read_optional(row, "input")
        if extra is not None and not isinstance(extra, str):
            raise Unreadable("fields", f"field '{self.columns['input']}' is {describe_json_type(extra)}, not text")
        # As in Alpaca's data, the optional input is context that follows the instruction.
        question = values["instruction"] + (f"\n\n{extra}" if extra and extra.strip() else "")
        talk: list[Message] = []
        if isinstance(system := self._read_optional(row, "system"), str) and system.strip():
            talk.append({"role": "system", "content": system})
        history = self._read_optional(row, "history") or []
        # Anything but a list becomes [None], which the check of pairs rejects.
        for pair in history if isinstance(history, Sequence) and not isinstance(history, str) else [None]:
            if (
                not isinstance(pair, Sequence)
                or len(pair) != 2
                or not all(isinstance(t, str) and t.strip() for t in pair)
            ):
                raise Unreadable("fields", f"field '{self.columns['history']}' is not a list of pairs of texts")
            talk += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        return [*talk, {"role": "user", "content": question}, {"role": "assistant", "content": values["output"]}]

    def _render_chat(
        self,
        talk: Sequence[Message],
        tools: Tools,
        notes: list[tuple[str, str]],
        read: int = 0,
        images: Sequence[object] | None = None,
    ) -> Document:
        """Renders a conversation; the first `read` messages are not trained on.

        Args:
            images: files of the row's image field; None without such a field.
        """
        if self.template is None:
            raise DataError(self.lacking)
        if self.eye and images is not None:  # SmolVLM's tokenizer has a token of that name too
            talk = [{**m, "content": m["content"].replace("<image>", PLACE)} for m in talk]
        for where, text in iterate_texts(talk):
            self._check_text(where, text, notes)
        if problem := find_order_problem(talk):
            notes.append(("roles", problem))
        talk, pictures, later = resolve_images(talk, images, self.eye, self.folder)
        if pictures and self.train_on == "all":
            raise Unreadable(
                "images", ("has images, and data.train_on: all would train on their positions; use assistant")
            )
        if read:
            # `Template.spans` renders turns of weight 0 without training on them.
            talk = [{**m, "weight": 0} if n < read else m for n, m in enumerate(talk)]
        if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in talk) and self.train_on != "all":
            raise Unreadable("untrained", "has no message of the assistant to train on")
        try:
            spans = self._template.spans(talk, tools, self.train_on)  # type: ignore[union-attr]
            if later:
                spans = _expand_images(spans, self.eye.placeholder, later)  # type: ignore[union-attr]
            return Document((spans,), complete=True, images=pictures)
        except DataError as error:
            raise Unreadable("template", str(error)) from None

    # --- images

    @functools.cached_property
    def _template(self) -> Template | None:
        """The chat template, which knows the placeholder that it writes for an image."""
        if self.template is None or self.eye is None:
            return self.template
        return replace(self.template, image=self.eye.placeholder)

    def _read_images(self, row: Fields) -> Sequence[object] | None:
        """Returns the files in a row's image field, or None if the layout has no such field."""
        names = (self.columns.get("images", "images"), "image")  # which may be missing in the first row
        value = next((row[name] for name in names if row.get(name) is not None), None)
        if value is None:
            return [] if "images" in self.columns else None
        return value if isinstance(value, list | tuple) else [value]

    # --- answers that are compared or judged

    def _read_prompt_and_answer(self, row: Fields, role: str, notes: list[tuple[str, str]]) -> tuple[Any, Any]:
        """Returns the prompt and the answer, either both as text or both as messages."""
        answer: Any = self._read_value(row, role)
        if isinstance(answer, str):
            answer = self._read_text(row, role, notes, empty=False)
        else:
            answer = list(parse_messages(answer, self.columns[role]))
        before: Any = None
        # The first of these fields that the row has. A required one must exist.
        for asks in ("messages", "conversations", "prompt"):
            needed = asks in LAYOUTS[self.kind][0]
            if (
                value := self._read_value(row, asks) if needed else self._read_optional(row, asks)
            ) is not None or needed:
                chat = isinstance(value, list | Mapping)
                before = self._talk(row, asks) if chat else self._read_text(row, asks, notes, empty=True)
                break
        # All is plain text and no template is asked for: no messages are made.
        if isinstance(answer, str) and (before is None or isinstance(before, str)) and not (self.wraps and before):
            return before or "", answer
        # Text and messages are mixed, or text is to be rendered: turn the text into a message of its role.
        if isinstance(before, str):
            before = [{"role": "user", "content": before}] if before.strip() else []
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        system = self._read_optional(row, "system")
        if isinstance(system, str) and system.strip() and not any(m["role"] == "system" for m in before or []):
            before = [{"role": "system", "content": system}, *(before or [])]
        return before or [], answer

    def _build_pair(self, row: Fields, notes: list[tuple[str, str]]) -> Document:
        (before, good), (_, bad) = (
            self._read_prompt_and_answer(row, "chosen", notes),
            self._read_prompt_and_answer(row, "rejected", []),
        )
        if isinstance(good, str) != isinstance(bad, str):
            raise Unreadable("fields", "one of the two answers is text, the other a list of messages")
        same = good == bad if isinstance(good, str) else serialize_answer(good) == serialize_answer(bad)
        if same:
            raise Unreadable("equal_answers", f"'{self.columns['chosen']}' and '{self.columns['rejected']}' are equal")
        if isinstance(good, str):
            # Conversations are checked as they are rendered.
            self._check_text(f"field '{self.columns['rejected']}'", bad, notes)
            # Without a prompt, the beginning that both texts share is the prompt, as in Anthropic's HH data.
            shared = before or _common_text(good, bad)
            cut = 0 if before else len(shared)
            if not good[cut:].strip() or not bad[cut:].strip():
                raise Unreadable("fields", "one of the two answers is the beginning of the other")
            prompt = (TextSpan(shared, False),) if shared else ()
            return Document(((*prompt, TextSpan(good[cut:])), (*prompt, TextSpan(bad[cut:]))))
        # The messages that both conversations begin with are read, not compared.
        shared = _common_prefix_length(*([serialize_answer([m]) + m["role"] for m in talk] for talk in (good, bad)))
        chats = [
            self._render_chat([*before, *talk], self._read_tools(row), notes, len(before) + shared)
            for talk in (good, bad)
        ]
        return Document(tuple(self._build_judged(chat).sequences[0] for chat in chats), complete=True)

    def _build_judged(self, chat: Document) -> Document:
        if chat.images:
            raise Unreadable(
                "images", f"has images, which the layout {self.kind} does not read; use sharegpt or messages"
            )
        return chat


def _common_text(one: str, other: str) -> str:
    """Returns the common prefix of two texts, up to its last white space."""
    same = one[: _common_prefix_length(one, other)]
    return same[: len(same) - len(re.split(r"\s", same)[-1])]


def _common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def detect_layout(data: Data, names: Sequence[str], first: object, where: str, **more: Any) -> Layout:
    """Returns the layout of a source, as set by the recipe or detected from its fields.

    Args:
        names: names of the fields.
        first: the first row.
        where: the source, for messages.
        more: other attributes of `Layout`.

    Raises:
        DataError: the recipe's layout or columns are invalid.
    """
    kinds = get_args(get_type_hints(Data)["layout"])
    if data.layout not in kinds:
        raise DataError(
            f"{where}: data.layout {data.layout}: no such layout; {suggest_nearest(str(data.layout), list(kinds))}"
        )
    # data.columns takes precedence over data.prompt and data.completion.
    named = {k: v for k in ("prompt", "completion") if (v := getattr(data, k))} | dict(data.columns)
    if data.text != "text":
        named.setdefault("text", data.text)
    for role in named:
        roles = sorted({r for needs, reads in LAYOUTS.values() for r in (*needs, *reads)})
        if role not in roles:
            raise DataError(f"data.columns.{role}: no layout has such a field; {suggest_nearest(role, roles)}")
    kind, why = (data.layout, "stated") if data.layout != "auto" else _recognize_fields(named, names, first)
    needs, reads = LAYOUTS[kind]
    for role in named:
        if data.columns.get(role) and role not in (*needs, *reads):
            raise DataError(
                f"data.columns.{role}: the layout {kind} ({why}) has no such field, only "
                f"{', '.join((*needs, *reads))}; state data.layout"
            )
    columns = {role: named.get(role, role) for role in needs}
    # Both formats occur under either field name.
    if kind == "sharegpt" and "conversations" not in names and "messages" in names and "conversations" not in named:
        columns["conversations"] = "messages"
    if kind == "messages" and "messages" not in names and "conversations" in names and "messages" not in named:
        columns["messages"] = "conversations"
    columns |= {role: named.get(role, role) for role in reads if role in named or role in names}
    if "images" in reads and "images" not in columns and "image" in names:
        columns["images"] = "image"  # the field's name in LLaVA's data
    special = tuple(more.pop("special", ()))
    # Text was only the last resort: the message about the missing field then lists all fields.
    strange = kind == "text" and data.layout == "auto" and isinstance(first, Mapping) and columns["text"] not in names
    return Layout(
        kind, columns, why, special=special, strange=strange, _firsts=frozenset(t[0] for t in special), **more
    )


def _recognize_fields(named: Mapping[str, str], names: Sequence[str], first: object) -> tuple[str, str]:
    """Detects the layout from field names; returns it and the reason."""
    if not isinstance(first, Mapping):
        return "text", "recognised by text without fields"

    def has(*roles: str) -> bool:
        return all(named.get(role, role) in names for role in roles)

    def format_fields(*roles: str) -> str:
        return f"recognised by the field{'s' * (len(roles) > 1)} " + " and ".join(
            named.get(role, role) for role in roles
        )

    # The most specific layouts first: a row of kto or preference may also have a prompt and a completion.
    for kind in ("preference", "kto", "classes", "prompt", "alpaca"):
        needs = LAYOUTS[kind][0]
        if kind == "classes" and "label" not in named:  # a field of this name may mean anything
            continue
        # A label that is no truth value may be a class or a score.
        if kind == "kto" and "label" not in named and not isinstance(first.get("label"), bool):
            continue
        if has(*needs):
            return kind, format_fields(*needs)
    if "text" in named:
        return "text", format_fields("text")
    for role in ("messages", "conversations"):
        value = first.get(named.get(role, role))
        if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            return "sharegpt" if "from" in value[0] else "messages", format_fields(role)
        # The first conversation is empty or broken, so only the name of the field decides.
        if has(role) and not isinstance(value, str):
            return {"messages": "messages", "conversations": "sharegpt"}[role], format_fields(role)
    if "prompt" in named or "completion" in named:
        return "prompt", "stated by data.prompt"
    return "text", format_fields("text")


def _expand_images(spans: Sequence[TextSpan], placeholder: str, texts: Sequence[str]) -> tuple[TextSpan, ...]:
    """Replaces the placeholders of a rendered conversation by the texts of its images' tokens, in order.

    Raises:
        Unreadable: the chat template does not write a placeholder for each image.
    """
    count = sum(span.text.count(placeholder) for span in spans)
    if count != len(texts):
        raise Unreadable(
            "images",
            f"the chat template writes {count} {placeholder} for {len(texts)} image{'s' * (len(texts) != 1)}; use the "
            "model's own template",
        )
    left = iter(texts)
    return tuple(span._replace(text=re.sub(re.escape(placeholder), lambda _: next(left), span.text)) for span in spans)
