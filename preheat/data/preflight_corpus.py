"""Checks that need the whole corpus: the template, the tokens, and overlap of training and validation."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from preheat.data.chat.template import Template, TrainOn
from preheat.data.document import Document, TextSpan
from preheat.data.packing import Rows
from preheat.data.preflight import Findings
from preheat.data.sources import Source
from preheat.data.split import Side, iterate_chunks
from preheat.data.tokenize_corpus import Stream
from preheat.data.tokenizer import Encoder
from preheat.errors import DataError
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from preheat.data.chat.messages import Message, Tools
    from preheat.data.tokenize_corpus import TokenCounts

__all__ = [
    "cut_answers",
    "find_longer_than_row",
    "check_prompts",
    "check_template",
    "check_tokens",
    "locate_documents",
    "refuse_longer",
]


def check_template(sources: Sequence[Source], template: Template | None, findings: Findings) -> None:
    """Checks a template for faults that are independent of the rows, if conversations are rendered with it."""
    if template is None or not any(source.layout.chat_template for source in sources):
        return
    if not template.answers:
        findings.add("template", template.name, "leaves out the assistant's text", of=1)
    elif template.end_of_turn is None:
        findings.add(
            "template_end", template.name, "ends the assistant's turn with no special token of this tokenizer", of=1
        )


LOOKED_AT = 8
"""Rows of each source whose prompts are compared with generation: a template treats all rows of a kind alike."""


LONG = 100_000
"""Characters above which `check_prompts` skips a row, which it would tokenize twice more."""


def check_prompts(sources: Sequence[Source], encoder: Encoder, findings: Findings) -> None:
    """Checks that answers, and the tokens before them, are the same in training and in generation."""
    # One finding of any source is enough for each, since these only warn.
    missing = {"generation_prompt", "earlier_turns"}
    for source in sources:
        layout, template = source.layout, source.layout.chat_template
        # Rows that end in an open turn make the comparison of prompts below meaningless.
        if template is not None and (opening := _open_turn(template)):
            message = f"always adds a generation prompt, so that each row ends in an open turn ({quote_value(opening)})"
            findings.add("open_turn", template.name, message, of=1)
            continue
        # The layout converts rows to messages, so note which messages reach the template.
        noting = _Noting.of(template) if template is not None else None
        layout = replace(layout, template=noting) if noting is not None else layout
        for where, row in itertools.islice(source.rows(), LOOKED_AT):
            if not missing:
                break
            if noting is not None:
                noting.given.clear()
            document = layout.document(row, where)
            # Unreadable rows are findings of another check.
            if not document.sequences or len(document.text) > LONG:
                continue
            if noting is not None and noting.given:
                messages = {
                    "generation_prompt": _describe_gap(noting, encoder, document),
                    "earlier_turns": _describe_left_out(noting),
                }
            else:  # a row without a question does not use the template
                messages = {"generation_prompt": _cut_otherwise(encoder, document)}
            for check in sorted(missing & {name for name, message in messages.items() if message}):
                findings.add(check, noting.name if noting and noting.given else where, messages[check], of=1)
                missing.remove(check)


@dataclass(frozen=True)
class _Noting(Template):
    """A template that records the conversations it renders as training rows."""

    given: list[tuple[Sequence[Message], Tools, TrainOn]] = field(default_factory=list)

    @classmethod
    def of(cls, template: Template) -> _Noting:
        return cls(**{item.name: getattr(template, item.name) for item in fields(Template)})

    def spans(
        self, messages: Sequence[Message], tools: Tools = None, train_on: TrainOn = "assistant"
    ) -> tuple[TextSpan, ...]:
        self.given.append((messages, tools, train_on))
        return super().spans(messages, tools, train_on)


_ANSWER = "zqANSWERqz"


def _open_turn(template: Template) -> str:
    """Returns the text after a complete conversation that opens another turn of the assistant, or ''."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text, prompt = template.text_of(talk), template.prompt(talk)
    except DataError:  # it may require more than a question and an answer; faults then show in the rows
        return ""
    # A generation prompt after the answer repeats the text before it: compare both from their ends.
    before, answer, behind = text.rpartition(_ANSWER)
    opening = before[len(before) - _common_prefix_length(before[::-1], behind[::-1]) :]
    opening_text = functools.reduce(
        lambda rest, token: rest.replace(token, " "), template.special, opening
    )  # more than an end of turn
    return opening.strip() if answer and text == prompt and re.search(r"\w", opening_text) else ""


def _describe_gap(template: _Noting, encoder: Encoder, document: Document) -> str:
    """Returns how the text before an answer differs between training and generation, or ''."""
    messages, tools, train_on = template.given[-1]
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight") != 0]
    # The first and the last trained turn: templates may render history differently.
    for n in dict.fromkeys((*turns[:1], *turns[-1:])):
        try:
            prompt = template.prompt(messages[:n], tools)
            # The method of the base class, which does not note this conversation too.
            pieces = Template.spans(template, messages[: n + 1], tools, train_on)
        except DataError:
            continue  # the template requires more; faults then show in the row
        text = "".join(piece.text for piece in pieces)
        if not text:
            continue
        if not text.startswith(prompt):
            at = _common_prefix_length(text, prompt)
            return (
                f"message {n + 1}: generation produces it after {quote_value(prompt[max(0, at - 12) :][:60])}, "
                "training "
                f"has it after {quote_value(text[max(0, at - 12) :][:60])}: the generation prompt is not the "
                "beginning of "
                "the row"
            )
        # Text between the prompt and the first trained token: in generation nobody writes it.
        between = text[len(prompt) : _find_first_trained(pieces, len(prompt))]
        content = (messages[n].get("content") or "").strip()
        if not between.strip() and content and prompt == template.text_of(messages[:n], tools):
            between = text[len(prompt) :].partition(content)[0]  # trained on, as if the model had to generate it
        if between.strip():
            return (
                f"message {n + 1}: {quote_value(between)} precedes the answer in training, and the generation prompt "
                "lacks "
                "it"
            )
        # Equal text may still differ in tokens if one of them crosses the border of prompt and answer.
        ids = encoder.first_of(document._replace(sequences=(pieces,), images=()))
        if difference := _describe_difference(encoder, encoder.alone(prompt), ids):
            return f"message {n + 1}: {difference}"
    return ""


def _describe_left_out(template: _Noting) -> str:
    """Returns how an earlier turn is trained differently from its generation, or ''."""
    messages, tools, train_on = template.given[-1]
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight") != 0]
    # As in `_describe_gap`; the last message has no later ones that could change it.
    for n in dict.fromkeys((*turns[:1], *turns[-1:])):
        if train_on != "assistant" or n == len(messages) - 1:
            continue
        alone = [message if at == n else {**message, "weight": 0} for at, message in enumerate(messages)]
        try:
            trained, generated = (
                "".join(span.text for span in Template.spans(template, talk, tools) if span.trained)
                for talk in (alone, alone[: n + 1])
            )
        except DataError:
            continue  # the template requires more; faults then show in the row
        if not generated.startswith(trained):
            return (
                f"message {n + 1}: training has {quote_value(trained[:60])}, generation {quote_value(generated[:60])}; "
                "data.train_on: last trains only turns that nothing is left out of"
            )
    return ""


def _common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _find_first_trained(pieces: Sequence[TextSpan], start: int) -> int:
    """Returns the first trained position from `start` on, or `start` if there is none."""
    at = 0
    for piece in pieces:
        if piece.trained and at + len(piece.text) > start:
            return max(at, start)
        at += len(piece.text)
    return start


def _cut_otherwise(encoder: Encoder, document: Document) -> str:
    """As `_describe_gap`, for prompts that are plain text."""
    pieces = document.sequences[0]
    # Without a prompt that is only read, there is nothing to compare.
    if document.complete or len(pieces) < 2 or pieces[0].trained or document.label is not None:
        return ""
    ids = encoder.first_of(document)
    return _describe_difference(encoder, [*encoder.begin, *encoder.alone(pieces[0].text)], ids)


def _describe_difference(encoder: Encoder, prompt: Sequence[int], ids: Sequence[int]) -> str:
    at = _common_prefix_length(prompt, ids)
    if at == len(prompt):
        return ""
    one, other = (quote_value([encoder.backend.id_to_token(t) for t in part[at : at + 3]]) for part in (prompt, ids))
    return f"the tokens of its prompt end in {one} in generation, and are {other} in training"


def check_tokens(
    values: TokenCounts,
    findings: Findings,
    encoder: Encoder,
    streams: Sequence[Stream],
    sources: Sequence[Source],
    folder: Path,
    train: Rows,
    cut: np.ndarray,
    embedding: int | None,
) -> None:
    """Checks the counts and tokens of the whole corpus.

    Args:
        cut: indices of the training examples that lose trained tokens.
    """
    documents, source = values["documents"], sources[0].description
    kind = sources[0].layout.kind
    # No row has a label: one finding about the whole replaces those of the rows.
    if not values["labels"] and values["dropped"].get("untrained"):
        findings.by_check.pop("untrained", None)
        findings.add("masked", source, "no token of all rows is trained on", of=1)
    # A model for classes writes nothing, so it needs no end.
    elif not values["ends"] and values["labels"] and kind not in ("classes",):
        if encoder.pad == encoder.end:
            findings.add(
                "pad_is_end",
                source,
                f"token {encoder.end} is padding and end of text at once, and never trained on",
                of=1,
            )
        else:
            findings.add("end_token", source, "no token that ends a text or turn is trained on", of=1)
    if embedding is not None and values["largest"] >= embedding:
        where, token = _find_large_token(streams, encoder, embedding)
        findings.add("embedding", where, f"holds token {token:,}, the model's embedding has {embedding:,} rows", of=1)
    if values["near_count"]:
        # At most five samples are searched for, with a count of 0: the true count is set below.
        for where in _locate_hashes(streams, {int(mark) for mark in values["near"]}, held=True):
            findings.add(
                "near_validation", where, "equals training data except for case, punctuation or spaces", count=0
            )
        finding = findings.by_check.get("near_validation")
        if finding:
            finding |= {"count": values["near_count"], "of": documents["validation"]}
    if len(cut):
        marks, used = np.load(folder / "train-marks.npy"), train.examples_used()
        left_out = {int(mark) for mark in marks[cut[~used[cut]]]}
        also = ""
        if 0 < (count := int((~used[cut]).sum())) < len(cut):
            also = f"; {count:,} of these examples have no room for an answer and are left out"
        for where, mark in _locate_documents(streams, {int(mark) for mark in marks[cut[:5]]}, held=False):
            what = (
                "its prompt leaves no room for an answer: it is left out" if mark in left_out else "its answer is cut"
            )
            message = f"is longer than a sequence of {train.length} tokens, so that {what}{also}"
            findings.add("truncated", where, message, count=0)
        finding = findings.by_check.get("truncated")
        if finding:
            finding |= {"count": len(cut), "of": documents["train"]}


def locate_documents(
    streams: Sequence[Stream], wanted: Sequence[tuple[int, int]], *, held: bool
) -> dict[tuple[int, int], str]:
    """Returns the file and row of documents, by reading the sources again until all are found.

    Args:
        wanted: (64-bit content hash, number of earlier documents with equal content) of each document.
        held: search the validation documents, else the training documents.
    """
    # `read` counts the documents of each hash so far: equal documents differ by their number.
    marks, read, places = {mark for mark, _ in wanted}, Counter[int](), dict[tuple[int, int], str]()
    missing = set(wanted)
    for stream in streams:
        for side, content, document in stream.read(Counter(), Findings()):
            mark = int(content[:16], 16)
            if (side == "validation") == held and mark in marks:
                places[mark, read[mark]] = document.where
                missing.discard((mark, read[mark]))
                read[mark] += 1
                if not missing:
                    return places
    for mark, number in missing:  # repeated by the weight of its source
        places[mark, number] = places.get((mark, max(read[mark] - 1, 0)), "")
    return places


def _locate_hashes(streams: Sequence[Stream], marks: set[int], *, held: bool) -> Iterator[str]:
    """Yields the file and row of the documents with these 64-bit content hashes, by reading the sources again."""
    yield from (where for where, _ in _locate_documents(streams, marks, held=held))


def _locate_documents(streams: Sequence[Stream], marks: set[int], *, held: bool) -> Iterator[tuple[str, int]]:
    """As `_locate_hashes`, with the content hash of each document."""
    for stream in streams:
        for side, content, document in stream.read(Counter(), Findings()):
            mark = int(content[:16], 16)
            if (side == "validation") == held and mark in marks:
                marks.discard(mark)
                yield document.where, mark
            if not marks:
                return


def _find_large_token(streams: Sequence[Stream], encoder: Encoder, embedding: int) -> tuple[str, int]:
    """Returns the file and row of the first document with a token beyond the embedding, and the token."""
    for stream in streams:
        for portion in iterate_chunks(stream.read(Counter(), Findings())):
            documents = [document for _, _, document in portion]
            for document, sequences in zip(documents, encoder(documents), strict=True):
                beyond = [token for e in sequences for token in e.tokens if token >= embedding]
                if beyond:
                    return document.where, beyond[0]
    raise AssertionError("the largest token stands in no document")


def refuse_longer(rows: Mapping[Side, Rows], folder: Path, streams: Sequence[Stream]) -> None:
    """Raises DataError if documents are longer than a row, with the first one and their number.

    Args:
        rows: train and validation rows.
        folder: folder of their stored tokens.
    """
    for side, of in rows.items():
        longer = find_longer_than_row(of)
        if len(longer):
            sizes, marks = np.diff(of.tokens.offsets, prepend=0), np.load(folder / f"{side}-marks.npy")
            (where,) = _locate_hashes(streams, {int(marks[longer[0] // of.tokens.group])}, held=side == "validation")
            raise DataError(
                f"{where}: has {int(sizes[longer[0]]):,} tokens and batch.seq_len is {of.length:,} "
                f"({len(longer):,} of {len(sizes):,} documents are longer; "
                "data.overlong: refuse); raise batch.seq_len, shorten them, or set data.overlong: split"
            )


def find_longer_than_row(rows: Rows) -> np.ndarray:
    """Returns the indices of sequences longer than a row."""
    return np.flatnonzero(np.diff(rows.tokens.offsets, prepend=0) > rows.length)


def cut_answers(rows: Rows) -> np.ndarray:
    """Returns the indices of examples that lose trained tokens, since they are longer than a row (`whole`)."""
    tokens = rows.tokens
    if rows.packing == "stream" or not len(tokens.offsets):
        return np.zeros(0, np.int64)
    # [sequences]: the labels of the whole sequence, and of its part in a row.
    starts = tokens.starts()
    wanted, used = tokens.targets(starts, tokens.offsets), tokens.targets(starts, starts + rows._used)
    return np.flatnonzero((wanted > used).reshape(-1, tokens.group).any(axis=1))
