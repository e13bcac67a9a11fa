"""Data preparation from sources to packed rows: tokenizer, tokens (cached by content), packing, checks and counts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from preheat.cache_folder import cache_folder
from preheat.core import Vision
from preheat.core.run_records import DataRecord
from preheat.core.schema import Clean
from preheat.data.cache import open_entry
from preheat.data.chat.template import Template, load_template
from preheat.data.cleaning.corpus import RowCleaner, clean_sources
from preheat.data.document import Document
from preheat.data.packing import Rows, Tokens
from preheat.data.preflight import Findings, Verdict, judge, merge_findings, refuse_unknown
from preheat.data.preflight_corpus import (
    check_prompts,
    check_template,
    check_tokens,
    cut_answers,
    find_longer_than_row,
    refuse_longer,
)
from preheat.data.row_account import LeftOut, RowAccount
from preheat.data.rows.formats import Layout
from preheat.data.sources import Source, compute_digest, open_source
from preheat.data.split import Side, Split, hash_content, iterate_chunks
from preheat.data.streaming import StreamedSource, StreamRows, encode_all
from preheat.data.tokenize_corpus import SIDES, Progress, Stream, choose_streams, copies_file, tokenize
from preheat.data.tokenizer import Encoder, load_tokenizer, read_as_it_is, save_tokenizer, train_tokenizer
from preheat.data.vision_inputs import ImageProcessor
from preheat.errors import DataError
from preheat.recipe import Data
from preheat.recipe.validate import read_clean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from preheat.core.data_record import CleaningRecord, DataCounts, SideRecord
    from preheat.core.json_types import JsonObject
    from preheat.data.tokenize_corpus import TokenCounts

__all__ = ["PreparedData", "prepare"]

FORMAT = 4
"""Version of the cache entries: raised when the tokens of equal documents, or their storage, change."""

COUNTS = 1
"""Version of the counts beside the tokens. Not part of the fingerprint: runs of an earlier version can be resumed."""

STREAM_LOOK = 1000
"""Documents at the beginning of a streamed source that are checked before training."""


_COPIES = tuple(map(copies_file, SIDES))
_IN_A_ROW, _IN_NO_ROW, _NOT_DRAWN = range(3)


@dataclass
class PreparedData:
    """Data that is ready to train on.

    Attributes:
        tokenizer: tokenizer of transformers, with the chat template that was used.
        train, validation: packed rows. With data.validation 0 there are no validation rows.
        source: description of the sources.
        counts: {"read", "dropped": {reason: documents}, "train": {...}, "validation": {...}, "sources": counts of each
            and the keys of `RowAccount.record`, "repeated": a source's weight repeats its documents}. Each side has
            documents (in rows; repeated ones count once), the tokens in its rows, rows, trained (labels), efficiency
            (fraction of positions that are not padding), truncated and no_room (examples), longer (than a row), cut
            (examples in rows that lose trained tokens) and duplicates. With `data.clean`: "cleaning". Of a streamed
            source only "validation", and "beginning": the `RowAccount` of its first rows.
        fingerprint: content hash of everything that decides the rows; checkpoints carry it.
        layout: layout of the rows, of the first source if there are several.
        classes: names of the classes, in order; empty without classes.
        warnings: warnings of the checks, one line each.
        blocked: errors of the checks, if `prepare` was called with `refuse=False`.
        streams: the sources, to read them again.
        sources: a short name of each source of a mixture; () if there is only one source.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Rows | StreamRows
    validation: Rows
    source: str
    counts: DataCounts
    fingerprint: str
    layout: Layout
    classes: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    sources: tuple[str, ...] = ()

    @property
    def stops(self) -> tuple[str, ...]:
        """The model's stop tokens that end turns of the template; they are saved with the tokenizer."""
        templates = (stream.source.layout.template for stream in self.streams)
        return next((template.stops for template in templates if template is not None and template.stops), ())

    @property
    def account(self) -> RowAccount:
        """The account of the rows; for a streamed source, of its first rows only."""
        if isinstance(self.train, StreamRows):
            return RowAccount.of(self.counts["beginning"])
        return RowAccount.of_counts(self.counts)

    def text(self) -> str:
        """Returns what became of the rows, and the sequences that training reads, in one line."""
        length, account = f"{self.train.length:,} tokens", self.account.text()
        if isinstance(self.train, StreamRows):
            return f"first rows: {account}; a stream of sequences of {length}"
        return f"rows: {account}; {len(self.train):,} sequences of {length}"

    def record(self) -> DataRecord:
        """Returns the content of the run's data.json."""
        template = self.layout.template
        return DataRecord(
            source=self.source,
            layout=self.layout.description,
            layout_kind=self.layout.kind,
            layout_reason=self.layout.reason,
            template=template.name.removeprefix("template ") if template else None,
            classes=tuple(self.classes),
            counts=dict(self.counts),
            preflight=tuple(self.warnings),
            fingerprint=self.fingerprint,
        )


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
    processor: JsonObject | None = None,
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
        RecipeError: `data.preflight` names an unknown check, or `data.clean` has an unknown key or a wrong value.

    Example:
        >>> prepared = prepare(Data(source="stdlib"), length=256, seed=0)  # doctest: +SKIP
        >>> prepared.train.row(0).tokens.shape  # doctest: +SKIP
        (256,)
    """
    # Errors of the recipe first: everything else reads files.
    refuse_unknown(data.preflight)
    clean = read_clean(data)
    # From sources to rows: open, decide how to encode, tokenize and pack, check.
    root, say = cache or cache_folder(), progress or (lambda what, done, total: None)
    opened = _open_sources(data, tokenizer, add_tokens, vision, processor, knob)
    say("reading validation" if opened.validation else "reading", 0, None)
    cleaning = _clean(opened, clean, root, say, streaming=data.streaming)
    encoding = _prepare_encoding(data, opened, root, say)
    # A streamed source is too large or too remote to tokenize first: training does that as it reads.
    if data.streaming:
        return _stream(data, opened, encoding, length=length, seed=seed)
    packed = _tokenize_and_pack(opened, encoding, root, say, length=length, partial=partial)
    verdict, cut = _check_rows(data, opened, encoding, packed, embedding=embedding, refuse=refuse, knob=knob)
    values, layout = packed.values, opened.sources[0].layout
    used = {side: rows.examples_used() for side, rows in packed.rows.items()}
    accounts = _build_accounts(packed, used)
    total = sum(accounts, RowAccount(0, 0, 0)).record()
    counts: DataCounts = {
        "read": total["read"],
        "dropped": total["dropped"],
        "sources": [
            {
                "source": source["source"],
                "layout": source["layout"],
                "weight": source["weight"],
                "side": source["side"],
                "documents": source["documents"],
                "tokens": source["tokens"],
                **account.record(),
            }
            for source, account in zip(values["sources"], accounts, strict=True)
        ],
        "repeated": any(source.weight > 1 for source in opened.sources),
    }
    if cleaning is not None:
        counts["cleaning"] = cleaning
    for side, rows in packed.rows.items():
        lost = int(used[side][cut[side]].sum())
        documents = total["trained_on"] if side == "train" else total["held_out"]
        counts[side] = {**_count_side(rows, documents), "cut": lost, "duplicates": values["duplicates"][side]}
    description = "; ".join(source.description for source in opened.sources) + (
        f"; validation: {opened.validation.description}" if opened.validation else ""
    )
    # `seed` is not part of it: the loader, not the rows, decides the order of samples.
    files = sorted((name, checksum) for name, checksum in packed.files.items() if name not in _COPIES)
    fingerprint = compute_digest(FORMAT, files, length, opened.packing, encoding.encoder.pad)
    return PreparedData(
        encoding.tokenizer,
        packed.rows["train"],
        packed.rows["validation"],
        description,
        counts,
        fingerprint,
        layout,
        layout.classes,
        warnings=[*opened.notes, *verdict.warnings],
        blocked=verdict.blocked,
        streams=packed.streams,
        sources=_name_sources(data),
    )


@dataclass
class _Opened:
    """The opened sources, and what the settings mean for them.

    Attributes:
        tokenizer: None if one is to be trained on the sources.
        images: the model's image processor; None for a text-only model.
        share: fraction of the documents that goes to validation; 0 if validation has a source of its own.
        cleaner: cleans rows of streamed sources as they are read; None if nothing is cleaned, or it is done already.
    """

    sources: list[Source]
    validation: Source | None
    tokenizer: PreTrainedTokenizerFast | None
    images: ImageProcessor | None
    packing: Literal["stream", "whole"]
    share: float
    notes: list[str]
    cleaner: RowCleaner | None = None


@dataclass
class _Encoding:
    """The way from documents to tokens.

    Attributes:
        ends: tokens that end a text or a turn.
        content: content hash of the sources and their split.
        findings: findings of the checks that need no tokens.
    """

    tokenizer: PreTrainedTokenizerFast
    encoder: Encoder
    ends: list[int]
    split: Split
    content: str
    findings: Findings


@dataclass
class _Packed:
    """Tokens of all documents, from the cache, packed into rows.

    Attributes:
        folder: the cache entry.
        values, files: counts of the cache entry, and the checksums of its files.
        rows: {"train": rows, "validation": rows}.
    """

    folder: Path
    values: TokenCounts
    files: dict[str, str]
    streams: list[Stream]
    findings: Findings
    rows: dict[Side, Rows]

    def copies(self, side: Side) -> np.ndarray | None:
        """Returns how often each row is in the tokens, [rows]; None without weights: once each."""
        file = self.folder / copies_file(side)
        return np.load(file) if file.exists() else None

    def source_ends(self, side: Side) -> tuple[int, ...]:
        """Returns the number of sequences of a side up to the end of each source, as in `Tokens`."""
        mixed = [number for number, stream in enumerate(self.streams) if not stream.held]
        # The rows of a side are stored source after source; those of a validation source are of none of the mixture.
        if len(mixed) == 1 or (side == "validation" and len(mixed) < len(self.streams)):
            return ()
        copies = self.copies(side)
        ends = np.cumsum([self.values["sources"][number]["sides"][side] for number in mixed])
        if copies is not None:
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(copies, dtype=np.int64)])[ends]
        return tuple((ends * self.values["group"]).tolist())


def _open_sources(
    data: Data,
    model_tokenizer: str | None,
    add_tokens: Sequence[str],
    vision: Vision | None,
    processor: JsonObject | None,
    knob: str,
) -> _Opened:
    """Opens the tokenizer and all sources, and rejects settings that do not suit their layouts.

    This comes first, so that a setting that cannot work fails before the documents are read.
    """
    # The recipe's tokenizer takes precedence over the model's own.
    name, key = (data.tokenizer, "data.tokenizer") if data.tokenizer else (model_tokenizer, "the model's tokenizer")
    if data.streaming and name is None:
        raise DataError(
            "data.streaming: a tokenizer cannot be trained on streamed data; set data.tokenizer to a folder"
        )
    tokenizer = load_tokenizer(name, knob=key, add_tokens=add_tokens) if name is not None else None
    # `load_tokenizer` has already avoided the class that would split text differently, so a note suffices.
    notes = [f"{key} {name}: {why}; tokenizer.json is read as it is"] if name and (why := read_as_it_is(name)) else []
    images = _load_image_processor(data, tokenizer, vision, processor) if vision is not None else None
    sources = _open_with_common_classes(data, tokenizer, images, knob)
    notes += [f"{source.description}: not read: {source.left}" for source in sources if source.left]
    validation, share = None, 0.0
    if isinstance(data.validation, str):
        # Validation files are read by the settings (layout, columns) of the first source.
        validation = open_source(data.parts()[0][0], validation=True, tokenizer=tokenizer, eye=images)
        # A class must have the same number on both sides, even if validation lacks some of the classes.
        validation = replace(validation, layout=replace(validation.layout, classes=sources[0].layout.classes))
    else:
        share = float(data.validation)
    packing = _choose_packing(data, sources, images)
    return _Opened(sources, validation, tokenizer, images, packing, share, notes)


def _clean(opened: _Opened, clean: Clean, root: Path, say: Progress, *, streaming: bool) -> CleaningRecord | None:
    """Applies `data.clean` to the sources in place; returns its counts, which a stream does not have beforehand."""
    if not clean.is_active:
        return None
    if not streaming:
        opened.sources, record = clean_sources(opened.sources, opened.validation, opened.share, clean, root, say)
        return record
    cleaner = RowCleaner.of(clean)
    if opened.validation and clean.duplicates != "keep":
        cleaner = replace(cleaner, known=_hash_all(opened.validation))
    opened.cleaner, key = cleaner, cleaner.key()
    opened.sources = [
        replace(source, key=lambda of=source.key: compute_digest(of(), key))  # type: ignore[misc]
        for source in opened.sources
    ]
    return None


def _hash_all(source: Source) -> frozenset[str]:
    return frozenset(hash_content(document) for document in source.read() if document.sequences)


def _load_image_processor(
    data: Data, tokenizer: PreTrainedTokenizerFast | None, vision: Vision, processor: JsonObject | None
) -> ImageProcessor:
    if tokenizer is None:
        raise DataError("data.tokenizer: a model that reads images has tokens for them; use its own tokenizer")
    if data.streaming:
        raise DataError(
            "data.streaming: supports only text so far; set data.streaming: false for a model that reads images"
        )
    return ImageProcessor.of(vision, processor or {}, data.image_pixels, tokenizer)


def _choose_packing(data: Data, sources: Sequence[Source], images: ImageProcessor | None) -> Literal["stream", "whole"]:
    """Returns the packing: `auto` keeps prompts with their answers in one row, and cuts plain text at row ends."""
    paired, kind = any(source.paired for source in sources), sources[0].layout.kind
    # One packing for all sources: a single source of examples makes running text whole too.
    packing: Literal["stream", "whole"] = ("whole" if paired else "stream") if data.packing == "auto" else data.packing
    if packing == "stream" and images is not None and paired:
        raise DataError("data.packing: stream cuts examples, and those with images must stay whole; use whole or auto")
    # Their label or comparison is about the whole example, which a row end would cut in two.
    if packing == "stream" and kind in ("preference", "kto", "classes"):
        raise DataError(
            f"data.packing: stream cuts examples, and rows of the layout {kind} must stay whole; use whole or auto"
        )
    return packing


def _prepare_encoding(data: Data, opened: _Opened, root: Path, say: Progress) -> _Encoding:
    """Decides the split and the tokenizer, which it trains if there is none, and checks template and prompts."""
    sources, validation = opened.sources, opened.validation
    # Documents of the validation source are left out of training by their content.
    held_out = _hash_all(validation) if validation else frozenset[str]()
    split = Split(opened.share, held_out)
    # Everything that decides the documents and their side; the key of the tokens adds the tokenizer.
    content = compute_digest(
        FORMAT, [source.key() for source in sources], opened.share, validation.key() if validation else ""
    )
    # After the split: a tokenizer is trained on the training side only, so that validation stays unseen.
    tokenizer = opened.tokenizer or _train_tokenizer(root, content, sources, split, data.vocab_size, say)
    encoder = Encoder(tokenizer)
    # The template of rows that it renders, which has the `stops`, before that of plain text beside them.
    templates = (*(s.layout.chat_template for s in sources), *(s.layout.template for s in sources))
    template = next(filter(None, templates), None)
    ends, findings = _find_end_tokens(tokenizer, template), Findings()
    check_template(sources, template, findings)
    check_prompts(sources, encoder, findings)
    # The tokenizer's own may be several named templates, among which `load_template` chooses; these stay as they are.
    own = load_template(None, tokenizer) if tokenizer.chat_template else None
    if template is not None and (own is None or (own.text, own.with_tools) != (template.text, template.with_tools)):
        tokenizer.chat_template = template.text  # so that generation renders prompts as in training
    return _Encoding(tokenizer, encoder, ends, split, content, findings)


def _tokenize_and_pack(
    opened: _Opened, encoding: _Encoding, root: Path, say: Progress, *, length: int, partial: bool
) -> _Packed:
    """Tokenizes all documents, or finds their tokens in the cache, and packs them into rows of `length` tokens.

    Only tokens are cached, not rows, so that another `length` needs no second tokenizing.
    """
    encoder, ends = encoding.encoder, encoding.ends
    streams = choose_streams(opened.sources, opened.validation, encoding.split)
    entry_name = f"tokens-{compute_digest(COUNTS, encoding.content, encoder.key, ends)}"

    def build(folder: Path) -> TokenCounts:
        # The work folder bears the name of the entry, so that the next start finds and resumes unfinished work.
        return tokenize(folder, root / f".partial-{entry_name}", streams, encoder, ends, say, opened.images)

    folder, content_entry = open_entry(root, entry_name, build)
    values = content_entry["values"]
    findings = Findings(merge_findings(encoding.findings.by_check, values["found"]))
    packed = _Packed(folder, values, content_entry["files"], streams, findings, {})
    for side in SIDES:
        if values["documents"][side]:
            tokens = Tokens.open(folder, side, values["group"], packed.source_ends(side))
            packed.rows[side] = Rows(tokens, length, opened.packing, encoder.pad, partial=partial)
        else:
            packed.rows[side] = _build_empty_rows(length)
    return packed


def _check_rows(
    data: Data,
    opened: _Opened,
    encoding: _Encoding,
    packed: _Packed,
    *,
    embedding: int | None,
    refuse: bool,
    knob: str,
) -> tuple[Verdict, dict[Side, np.ndarray]]:
    """Judges the tokens by `data.preflight`; returns the verdict and each side's examples that lose trained tokens.

    Raises:
        DataError: a check found an error (unless `refuse` is False), or a side that is needed has no row.
    """
    train, validation, values, findings = (
        packed.rows["train"],
        packed.rows["validation"],
        packed.values,
        packed.findings,
    )
    cut = {side: cut_answers(rows) for side, rows in packed.rows.items()}
    check_tokens(
        values,
        findings,
        encoding.encoder,
        packed.streams,
        opened.sources,
        packed.folder,
        train,
        cut["train"],
        embedding,
    )
    # One verdict over all checks, so that one start reports every fault of the data.
    verdict = judge(findings.by_check, data.preflight, values["read"])
    # Without a document to train on `_refuse_empty` would raise in any case; the findings say why none is left.
    if refuse or not values["documents"]["train"]:
        verdict.refuse()
    _refuse_empty(opened.sources, opened.validation, opened.share, values)
    _require_rows(
        train, "training data" if knob == "data.source" else knob, "add text, or use shorter sequences (batch.seq_len)"
    )
    if opened.share or opened.validation:
        _require_rows(validation, "validation data", "raise data.validation or lower batch.seq_len")
    # Last, since naming the document reads the sources again.
    if data.overlong == "refuse":
        refuse_longer(packed.rows, packed.folder, packed.streams)
    return verdict, cut


def _open_with_common_classes(
    data: Data, tokenizer: PreTrainedTokenizerFast | None, images: ImageProcessor | None, knob: str
) -> list[Source]:
    """Opens all sources and gives them the same classes."""
    sources = [
        open_source(part, tokenizer=tokenizer, weight=weight, eye=images, knob=knob) for part, weight in data.parts()
    ]
    # A class must have the same number in all sources, even if some of them lack it.
    first = sources[0].layout
    names = sorted({name for source in sources for name in source.layout.classes})
    for n, source in enumerate(sources):
        special = {"preference", "kto", "classes"}
        if source.layout.kind != first.kind and special & {source.layout.kind, first.kind}:
            raise DataError(
                f"data.source.{n}: {source.description} has the layout {source.layout.description}, the first source "
                f"{first.description}; these cannot be mixed"
            )
        # The sources have different classes: number them by the union.
        if first.kind == "classes" and not data.classes and set(source.layout.classes) != set(first.classes):
            sources[n] = replace(source, layout=replace(source.layout, classes=tuple(names)))
    # Sources that have all classes may still have them in another order.
    if first.kind == "classes" and len({s.layout.classes for s in sources}) > 1:
        sources = [replace(s, layout=replace(s.layout, classes=tuple(names))) for s in sources]
    return sources


def _find_end_tokens(tokenizer: PreTrainedTokenizerFast, template: Template | None) -> list[int]:
    """Returns the tokens that end a text or a turn."""
    # Many chat templates end a turn with another token than the end of text.
    end = template.end_of_turn if template else None
    return sorted({tokenizer.eos_token_id, *([tokenizer.convert_tokens_to_ids(end)] if end else [])})


def _build_empty_rows(length: int) -> Rows:
    return Rows(Tokens(np.zeros(0, np.uint16), np.zeros(0, np.int64)), length)


def _train_tokenizer(
    root: Path, content: str, sources: Sequence[Source], split: Split, vocabulary: int, say: Progress
) -> PreTrainedTokenizerFast:
    import tokenizers

    def iterate_documents() -> Iterator[tuple[str, str]]:
        every = itertools.chain.from_iterable(source.read() for source in sources)
        for n, (side, mark, document) in enumerate(split.apply(every, Counter())):
            if n % 100 == 0:
                say("reading for the tokenizer", n, sources[0].count)
            if side == "train":
                yield mark, document.text
        # Reached when the generator is exhausted: only then does the trainer begin.
        say("training the tokenizer", 0, None)

    def build(folder: Path) -> dict[str, int]:
        save_tokenizer(train_tokenizer(iterate_documents(), vocabulary=vocabulary), folder)
        return {}

    # The library's version is part of the key: another one may learn other merges from the same text.
    folder, _ = open_entry(root, f"tokenizer-{compute_digest(content, vocabulary, tokenizers.__version__)}", build)
    return load_tokenizer(str(folder))


def _refuse_empty(
    sources: Sequence[Source], validation_source: Source | None, share: float, values: TokenCounts
) -> None:
    # The message names the first cause that applies: nothing left, nothing to train on, nothing to validate on.
    documents, dropped = values["documents"], values["dropped"]
    description = "; ".join(source.description for source in sources)
    remaining = documents["train"] + documents["validation"]
    # The reasons why rows were dropped, with their numbers; also those that a weight below 1 does not draw.
    undrawn = max(values["read"] - remaining - sum(dropped.values()), 0)
    left_out = Counter(dropped) + Counter({LeftOut.NOT_DRAWN: undrawn})
    reasons = ", ".join(f"{n} {reason}" for reason, n in left_out.items()) or "the source is empty"
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
        raise DataError(f"data.validation: {validation_source.description}: no document left ({reasons})")
    if documents["validation"] == 0 and share:
        raise DataError(
            f"data.validation {share:g}: none of {remaining} documents is held out for validation (chosen by content "
            "hash); raise it, add documents, or name a file to validate on"
        )


def _require_rows(rows: Rows, what: str, fix: str) -> None:
    # Documents exist, but each loses its whole answer: raising the length helps, adding text does not.
    if len(rows) == 0 and rows.no_room:
        raise DataError(
            f"{what}: the prompt alone fills a sequence of {rows.length} tokens in each of {rows.no_room} "
            "examples; raise batch.seq_len"
        )
    if len(rows) == 0:
        documents, tokens = len(rows.tokens.offsets), len(rows.tokens.ids)
        raise DataError(
            f"{what}: {tokens:,} tokens in {documents:,} documents do not fill one sequence of {rows.length}; {fix}"
        )


def _build_accounts(packed: _Packed, used: Mapping[Side, np.ndarray]) -> list[RowAccount]:
    """Returns what became of the rows of each source.

    Args:
        used: {side: [examples] bool}, True for those with a label in a row.
    """
    accounts, done = [], dict.fromkeys(SIDES, 0)
    fates = {side: _classify_rows(packed, side, used[side]) for side in SIDES}
    for source in packed.values["sources"]:
        left_out, remaining = Counter[str](source["dropped"]), {}
        for side in SIDES:
            # The rows of a side are stored source after source.
            fate = fates[side][done[side] : done[side] + source["sides"][side]]
            done[side] += len(fate)
            remaining[side] = int((fate == _IN_A_ROW).sum())
            left_out[LeftOut.NOT_DRAWN] += int((fate == _NOT_DRAWN).sum())
            whole = packed.rows[side].packing == "whole"
            left_out[LeftOut.NO_ROOM if whole else LeftOut.INCOMPLETE_SEQUENCE] += int((fate == _IN_NO_ROW).sum())
        # `+` removes the reasons without a row.
        accounts.append(RowAccount(source["read"], remaining["train"], remaining["validation"], dict(+left_out)))
    return accounts


def _classify_rows(packed: _Packed, side: Side, used: np.ndarray) -> np.ndarray:
    """Returns what became of each row of a side that was tokenized, [rows]; copies of a row count once."""
    if (copies := packed.copies(side)) is None:
        return np.where(used, _IN_A_ROW, _IN_NO_ROW)
    ends = np.cumsum(copies, dtype=np.int64)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(used)])
    in_a_row = total[ends] > total[ends - copies]
    return np.where(in_a_row, _IN_A_ROW, np.where(copies == 0, _NOT_DRAWN, _IN_NO_ROW))


def _count_side(rows: Rows, documents: int) -> SideRecord:
    counts: SideRecord = {
        "documents": documents,
        "tokens": rows.tokens_total,
        "rows": len(rows),
        "trained": rows.trained_total,
        "efficiency": rows.tokens_total / (len(rows) * rows.length) if len(rows) else 0.0,
        "truncated": rows.truncated,
        "no_room": rows.no_room,
        "longer": len(find_longer_than_row(rows)),
    }
    if rows.tokens.images is not None:
        counts["images"] = len(rows.tokens.images.of)
    return counts


def _stream(data: Data, opened: _Opened, encoding: _Encoding, *, length: int, seed: int) -> PreparedData:
    """Checks the beginning of streamed sources, and leaves tokenizing and packing of the rest to training."""
    sources, validation_source, packing = opened.sources, opened.validation, opened.packing
    encoder, split, findings = encoding.encoder, encoding.split, encoding.findings
    notes, account = list(opened.notes), RowAccount(0, 0, 0)
    for source in sources:
        # `apply` counts the dropped rows in it and the loop the others: the sum is the number of rows read.
        dropped = Counter[str]()
        # Rows behind these are checked one by one as they are read (`StreamRows`).
        documents = opened.cleaner.stream(source.read()) if opened.cleaner is not None else source.read()
        beginning = list(split.apply(itertools.islice(documents, STREAM_LOOK), dropped, findings))
        own = _account_streamed_rows(beginning, dropped, encoder, length, packing)
        if no_room := own.left_out.get(LeftOut.NO_ROOM):
            notes.append(
                f"{source.description}: {no_room:,} of the first {own.read:,} rows are left out, as are all rows whose "
                "prompt leaves no room for an answer; raise batch.seq_len to train on them"
            )
        account += own
    verdict = judge(findings.by_check, data.preflight, account.read)
    verdict.refuse()
    # Opened again by the process that reads them, so only settings are stored.
    streamed = tuple(
        StreamedSource(part, source.layout, weight, opened.cleaner)
        for (part, weight), source in zip(data.parts(), sources, strict=True)
    )
    train = StreamRows(streamed, split, encoder, length, packing, seed)
    tokens = (
        encode_all(iterate_chunks(Split().apply(validation_source.read(), Counter())), encoder)
        if validation_source
        # With the same split as the training rows, which leaves these documents out.
        else train.held_out()
    )
    validation = Rows(tokens, length, packing, encoder.pad)
    if validation_source or split.share:
        _require_rows(validation, "validation data", "raise data.validation or lower batch.seq_len")
    # Unlike for stored data, the seed belongs to it: rows are shuffled within blocks of the stream.
    fingerprint = compute_digest(FORMAT, encoding.content, encoder.key, length, packing, seed, data.limit)
    return PreparedData(
        encoding.tokenizer,
        train,
        validation,
        f"{'; '.join(source.description for source in sources)}, streamed",
        {"validation": _count_side(validation, int(validation.examples_used().sum())), "beginning": account.record()},
        fingerprint,
        sources[0].layout,
        sources[0].layout.classes,
        warnings=[*notes, *verdict.warnings],
        streams=choose_streams(sources, validation_source, split),
        sources=_name_sources(data),
    )


def _name_sources(data: Data) -> tuple[str, ...]:
    """Returns the last component of the name of each source of a mixture, with a number if it is not unique."""
    names = [Path(str(part.source)).name or str(part.source) for part, _ in data.parts()]
    if len(names) == 1:
        return ()
    return tuple(name if names.count(name) == 1 else f"{name}-{n}" for n, name in enumerate(names, 1))


def _account_streamed_rows(
    documents: list[tuple[Side, str, Document]],
    dropped: Counter[str],
    encoder: Encoder,
    length: int,
    packing: Literal["stream", "whole"],
) -> RowAccount:
    """Returns what becomes of the first rows of a streamed source.

    Args:
        documents: the documents that the split left.
        dropped: {reason: rows} of the others.
    """
    remaining = Counter(side for side, _, _ in documents)
    left_out = Counter(dropped)
    if packing == "whole":
        for side in SIDES:
            rows = Rows(encode_all([[d for d in documents if d[0] == side]], encoder), length, packing, encoder.pad)
            left_out[LeftOut.NO_ROOM] += rows.no_room
            remaining[side] -= rows.no_room
    read = len(documents) + sum(dropped.values())
    return RowAccount(read, remaining["train"], remaining["validation"], dict(+left_out))
