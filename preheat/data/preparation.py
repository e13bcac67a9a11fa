"""Data preparation from sources to packed rows: tokenizer, tokens (cached by content), packing, checks and counts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from preheat.core import Vision
from preheat.data.cache import entry
from preheat.data.chat.template import Template
from preheat.data.packing import Rows, Tokens
from preheat.data.preflight import Findings, Verdict, judge, merged, refuse_unknown
from preheat.data.preflight_corpus import (
    check_prompts,
    check_template,
    check_tokens,
    cut_answers,
    longer_than_a_row,
    refuse_longer,
)
from preheat.data.rows.formats import Layout
from preheat.data.sources import Source, digest, open_source
from preheat.data.split import Split, chunks, content_hash
from preheat.data.streaming import StreamRows, encode_all
from preheat.data.tokenize_corpus import SIDES, Progress, Stream, streams_of, tokenize
from preheat.data.tokenizer import Encoder, load_tokenizer, read_as_it_is, save_tokenizer, train_tokenizer
from preheat.data.vision_inputs import ImageProcessor
from preheat.errors import DataError
from preheat.hardware.link_rates import cache_folder
from preheat.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["PreparedData", "prepare"]

FORMAT = 4
"""Version of the cache entries: raised when the tokens of equal documents, or their storage, change."""

STREAM_LOOK = 1000
"""Documents at the beginning of a streamed source that are checked before training."""


@dataclass
class PreparedData:
    """Data that is ready to train on.

    Attributes:
        tokenizer: tokenizer of transformers, with the chat template that was used.
        train, validation: packed rows. With data.validation 0 there are no validation rows.
        source: description of the sources.
        counts: {"read", "dropped": {reason: documents}, "train": {...}, "validation": {...}, "sources": counts of each,
            "repeated": a source's weight repeats its documents}. Each side has documents, tokens, rows, trained
            (labels), efficiency (fraction of positions that are not padding), truncated and no_room (examples), longer
            (than a row), cut (examples that lose trained tokens) and duplicates. Of a streamed source only what is
            known before training.
        fingerprint: content hash of everything that decides the rows; checkpoints carry it.
        layout: layout of the rows, of the first source if there are several.
        classes: names of the classes, in order; empty without classes.
        told: warnings of the checks, one line each.
        blocked: errors of the checks, if `prepare` was called with `refuse=False`.
        streams: the sources, to read them again.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Rows | StreamRows
    validation: Rows
    source: str
    counts: dict[str, Any]
    fingerprint: str
    layout: Layout
    classes: tuple[str, ...] = ()
    told: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Returns the content of the run's data.json."""
        template = self.layout.template
        return {
            "source": self.source,
            "layout": self.layout.words,
            "layout_kind": self.layout.kind,
            "layout_reason": self.layout.reason,
            "template": template.name.removeprefix("template ") if template else None,
            "classes": list(self.classes),
            "counts": self.counts,
            "preflight": self.told,
            "fingerprint": self.fingerprint,
        }


def prepare(
    data: Data,
    *,
    length: int,
    seed: int,
    tokenizer: str | None = None,
    add_tokens: Sequence[str] = (),
    cache: Path | None = None,
    progress: Progress | None = None,
    embedding: int | None = None,
    refuse: bool = True,
    partial: bool = False,
    knob: str = "data.source",
    vision: Vision | None = None,
    processor: Mapping[str, Any] | None = None,
) -> PreparedData:
    """Reads, tokenizes, checks and packs the data of a recipe.

    Args:
        data: the recipe's settings.
        length: tokens in a row; not part of the cache key.
        seed: seed of streamed sources, whose rows are shuffled block by block.
        tokenizer: folder of the model's own tokenizer, used if `data.tokenizer` is not set. Without either, a
            byte-level BPE of `data.vocab_size` tokens is trained on the training documents.
        add_tokens: special tokens to add to the tokenizer.
        cache: folder for tokens and trained tokenizers; by default $PREHEAT_CACHE or ~/.cache/preheat.
        progress: called regularly with the current activity, the items done, and their total (None if unknown).
        embedding: rows of the model's embedding, if known.
        refuse: raise errors of the checks; else return them as `blocked`.
        partial: make a row of the tokens that do not fill the last row of running text (`Rows.partial`).
        knob: setting that names the data, for messages.
        vision, processor: the model's vision settings and those of its image processor; None for a text-only model.

    Raises:
        DataError: the data has an error; the message names the file and the row.
        RecipeError: `data.preflight` names an unknown check.

    Example:
        >>> prepared = prepare(Data(source="stdlib"), length=256, seed=0)  # doctest: +SKIP
        >>> prepared.train.row(0).tokens.shape  # doctest: +SKIP
        (256,)
    """
    refuse_unknown(data.preflight)
    root, say = cache or cache_folder(), progress or (lambda what, done, total: None)
    name, key = (data.tokenizer, "data.tokenizer") if data.tokenizer else (tokenizer, "the model's tokenizer")
    if data.streaming and name is None:
        raise DataError(
            "data.streaming: a tokenizer cannot be trained on data that is read while training; set "
            "data.tokenizer to a folder"
        )
    own = load_tokenizer(name, knob=key, add_tokens=add_tokens) if name is not None else None
    notes = [f"{key} {name}: {why}; tokenizer.json is read as it is"] if name and (why := read_as_it_is(name)) else []
    eye = None
    if vision is not None:
        if own is None:
            raise DataError("data.tokenizer: a model that reads images has tokens for them; use its own tokenizer")
        if data.streaming:
            raise DataError(
                "data.streaming: is for text alone so far; set data.streaming: false for a model that reads images"
            )
        eye = ImageProcessor.of(vision, processor or {}, data.image_pixels, own)
    sources = _open(data, own, eye, knob)
    notes += [f"{source.words}: not read: {source.left}" for source in sources if source.left]
    validation_source = (
        open_source(data.parts()[0][0], validation=True, tokenizer=own, eye=eye)
        if isinstance(data.validation, str)
        else None
    )
    if validation_source is not None:
        validation_source = replace(
            validation_source, layout=replace(validation_source.layout, classes=sources[0].layout.classes)
        )
    share = 0.0 if isinstance(data.validation, str) else float(data.validation)
    paired = any(source.paired for source in sources)
    packing: Literal["stream", "whole"] = ("whole" if paired else "stream") if data.packing == "auto" else data.packing
    if packing == "stream" and eye is not None and any(s.paired for s in sources):
        raise DataError("data.packing: stream cuts examples, and those with images must stay whole; use whole or auto")
    if packing == "stream" and sources[0].layout.kind in ("preference", "kto", "classes"):
        raise DataError(
            f"data.packing: stream cuts examples, and rows of the layout {sources[0].layout.kind} must "
            "stay whole; use whole or auto"
        )

    say("reading validation" if validation_source else "reading", 0, None)
    split = Split(
        share,
        frozenset(content_hash(d) for d in validation_source.read() if d.sequences)
        if validation_source
        else frozenset(),
    )
    content = digest(
        FORMAT, [source.key() for source in sources], share, validation_source.key() if validation_source else ""
    )
    if own is None:
        own = _trained(root, content, sources, split, data.vocab_size, say)
    encoder = Encoder(own)
    template = next((s.layout.template for s in sources if s.layout.template), None)
    ends, findings = _ends(own, template), Findings()
    check_template(sources, template, findings)
    check_prompts(sources, encoder, findings)
    if template is not None and own.chat_template != template.text and not isinstance(own.chat_template, dict):
        own.chat_template = template.text  # so that generation renders prompts as in training

    if data.streaming:
        return _stream(
            data, sources[0], validation_source, split, encoder, own, length, seed, packing, content, findings, notes
        )

    streams = streams_of(sources, validation_source, split)
    entry_name = f"tokens-{digest(content, encoder.key, ends)}"

    def build(folder: Path) -> dict[str, Any]:
        return tokenize(folder, root / f".partial-{entry_name}", streams, encoder, ends, say, eye)

    folder, content_entry = entry(root, entry_name, build)
    values = content_entry["values"]
    findings = Findings(merged(findings.found, values["found"]))
    train, validation = (
        Rows(Tokens.open(folder, side, values["group"]), length, packing, encoder.pad, partial=partial)
        if values["documents"][side]
        else _none(length)
        for side in SIDES
    )
    cut = {"train": cut_answers(train), "validation": cut_answers(validation)}
    check_tokens(values, findings, encoder, streams, sources, folder, cut["train"], embedding, length)
    verdict = judge(findings.found, data.preflight, values["read"])
    if refuse or not values["documents"]["train"]:
        verdict.refuse()
    _refuse_empty(sources, validation_source, share, values)
    _require_rows(
        train, "training data" if knob == "data.source" else knob, "add text, or use shorter rows (batch.seq_len)"
    )
    if share or validation_source:
        _require_rows(validation, "validation data", "raise data.validation or lower batch.seq_len")
    if data.overlong == "refuse":
        refuse_longer({"train": train, "validation": validation}, folder, streams)
    counts = {
        "read": values["read"],
        "dropped": values["dropped"],
        "sources": values["sources"],
        "repeated": any(source.weight > 1 for source in sources),
    } | {
        side: _counts(rows) | {"cut": len(cut[side]), "duplicates": values["duplicates"][side]}  # type: ignore[index]
        for side, rows in (("train", train), ("validation", validation))
    }
    fingerprint = digest(FORMAT, sorted(content_entry["files"].items()), length, packing, encoder.pad)
    description = "; ".join(source.words for source in sources) + (
        f"; validation: {validation_source.words}" if validation_source else ""
    )
    layout = sources[0].layout
    verdicts = {"told": [*notes, *verdict.told], "blocked": verdict.blocked}
    return PreparedData(
        own, train, validation, description, counts, fingerprint, layout, layout.classes, streams=streams, **verdicts
    )


def _open(data: Data, own: PreTrainedTokenizerFast | None, eye: ImageProcessor | None, knob: str) -> list[Source]:
    """Opens all sources and gives them the same classes."""
    sources = [open_source(part, tokenizer=own, weight=weight, eye=eye, knob=knob) for part, weight in data.parts()]
    first = sources[0].layout
    names = sorted({name for source in sources for name in source.layout.classes})
    for n, source in enumerate(sources):
        special = {"preference", "kto", "classes"}
        if source.layout.kind != first.kind and special & {source.layout.kind, first.kind}:
            raise DataError(
                f"data.source.{n}: {source.words} has the layout {source.layout.words}, the first source "
                f"{first.words}; these cannot be mixed"
            )
        if first.kind == "classes" and not data.classes and set(source.layout.classes) != set(first.classes):
            sources[n] = replace(source, layout=replace(source.layout, classes=tuple(names)))
    if first.kind == "classes" and len({s.layout.classes for s in sources}) > 1:
        sources = [replace(s, layout=replace(s.layout, classes=tuple(names))) for s in sources]
    return sources


def _ends(own: PreTrainedTokenizerFast, template: Template | None) -> list[int]:
    """Returns the tokens that end a text or a turn."""
    end = template.end_of_turn if template else None
    return sorted({own.eos_token_id, *([own.convert_tokens_to_ids(end)] if end else [])})


def _none(length: int) -> Rows:
    return Rows(Tokens(np.zeros(0, np.uint16), np.zeros(0, np.int64)), length)


def _trained(
    root: Path, content: str, sources: Sequence[Source], split: Split, vocabulary: int, say: Progress
) -> PreTrainedTokenizerFast:
    import tokenizers

    def documents() -> Iterator[tuple[str, str]]:
        every = itertools.chain.from_iterable(source.read() for source in sources)
        for n, (side, mark, document) in enumerate(split.apply(every, Counter())):
            if n % 100 == 0:
                say("reading for the tokenizer", n, sources[0].count)
            if side == "train":
                yield mark, document.text
        say("training the tokenizer", 0, None)

    def build(folder: Path) -> dict[str, Any]:
        save_tokenizer(train_tokenizer(documents(), vocabulary=vocabulary), folder)
        return {}

    folder, _ = entry(root, f"tokenizer-{digest(content, vocabulary, tokenizers.__version__)}", build)
    return load_tokenizer(str(folder))


def _refuse_empty(
    sources: Sequence[Source], validation_source: Source | None, share: float, values: dict[str, Any]
) -> None:
    documents, dropped = values["documents"], values["dropped"]
    description = "; ".join(source.words for source in sources)
    remaining = documents["train"] + documents["validation"]
    reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.items()) or "the source is empty"
    if remaining == 0:
        raise DataError(f"{description}: no document left of {values['read']} read ({reasons})")
    if documents["train"] == 0 and validation_source:
        raise DataError(
            f"{description}: no document left to train on ({reasons}); name another data.source or data.validation"
        )
    if documents["train"] == 0:
        raise DataError(
            f"data.validation {share:g}: leaves none of {remaining} documents to train on; lower it or add documents"
        )
    if documents["validation"] == 0 and validation_source:
        raise DataError(f"data.validation: {validation_source.words}: no document left ({reasons})")
    if documents["validation"] == 0 and share:
        raise DataError(
            f"data.validation {share:g}: none of {remaining} documents falls on the validation side (their "
            "content decides); "
            "raise it, add documents, or name a file to validate on"
        )


def _require_rows(rows: Rows, what: str, fix: str) -> None:
    if len(rows) == 0 and rows.no_room:
        raise DataError(
            f"{what}: the prompt alone fills a row of {rows.length} tokens in each of {rows.no_room} "
            "examples; raise batch.seq_len"
        )
    if len(rows) == 0:
        documents, tokens = len(rows.tokens.ends), len(rows.tokens.ids)
        raise DataError(
            f"{what}: {tokens:,} tokens in {documents:,} documents do not fill one row of {rows.length}; {fix}"
        )


def _counts(rows: Rows) -> dict[str, Any]:
    return {
        "documents": len(rows.tokens.ends) // rows.tokens.group,
        "tokens": len(rows.tokens.ids),
        "rows": len(rows),
        "trained": rows.trained_total,
        "efficiency": rows.tokens_total / (len(rows) * rows.length) if len(rows) else 0.0,
        "truncated": rows.truncated,
        "no_room": rows.no_room,
        **({"images": len(rows.tokens.images.of)} if rows.tokens.images is not None else {}),
        "longer": len(longer_than_a_row(rows)),
    }


def _stream(
    data: Data,
    source: Source,
    validation_source: Source | None,
    split: Split,
    encoder: Encoder,
    own: PreTrainedTokenizerFast,
    length: int,
    seed: int,
    packing: Literal["stream", "whole"],
    content: str,
    findings: Findings,
    notes: list[str],
) -> PreparedData:
    seen_rows = Counter[str]()
    for _ in split.apply(itertools.islice(source.read(), STREAM_LOOK), seen_rows, findings):
        seen_rows["read"] += 1
    verdict: Verdict = judge(findings.found, data.preflight, sum(seen_rows.values()))
    verdict.refuse()
    train = StreamRows(data, source.layout, split, encoder, length, packing, seed)
    tokens = (
        encode_all(chunks(Split().apply(validation_source.read(), Counter())), encoder)
        if validation_source
        else train.held_out()
    )
    validation = Rows(tokens, length, packing, encoder.pad)
    if validation_source or split.share:
        _require_rows(validation, "validation data", "raise data.validation or lower batch.seq_len")
    fingerprint = digest(FORMAT, content, encoder.key, length, packing, seed, data.limit)
    counts = {"validation": _counts(validation)}
    streams = streams_of([source], validation_source, split)
    return PreparedData(
        *(
            own,
            train,
            validation,
            f"{source.words}, streamed",
            counts,
            fingerprint,
            source.layout,
            source.layout.classes,
        ),
        told=[*notes, *verdict.told],
        streams=streams,
    )
