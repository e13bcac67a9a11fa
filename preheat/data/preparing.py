"""From a source to rows: the tokenizer, the tokens (cached by content), the packing, and what was counted."""

from __future__ import annotations

import array
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from preheat.data.cache import default_root, entry
from preheat.data.examples import Document
from preheat.data.packing import Rows, Tokens
from preheat.data.sources import Source, digest, open_source
from preheat.data.split import Side, Split, chunks, content_hash
from preheat.data.streaming import StreamRows, encode_all
from preheat.data.tokenizer import Encoder, load_tokenizer, train_tokenizer
from preheat.errors import DataError
from preheat.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Prepared", "prepare"]

FORMAT = 2
"""Counted up when the tokens of equal documents, or the way they are stored, change: older entries are then not used."""

Progress = Callable[[str, int, int | None], None]

SIDES: tuple[Side, Side] = ("train", "validation")


@dataclass
class Prepared:
    """Data that is ready to train on.

    Attributes:
        tokenizer: of transformers.
        train, validation: rows. With data.validation 0 there are no validation rows.
        source: what was read, in words.
        counts: {"read", "dropped": {reason: documents}, "train": {...}, "validation": {...}}; each side has documents, tokens,
            rows, trained (labels), efficiency (share of the rows' places that are not padding), truncated and no_room (examples).
            Of a streamed source only what is known before training.
        fingerprint: content hash of everything that decides the rows; a checkpoint keeps it.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Rows | StreamRows
    validation: Rows
    source: str
    counts: dict[str, Any]
    fingerprint: str


def prepare(
    data: Data,
    *,
    length: int,
    seed: int,
    tokenizer: str | None = None,
    add_tokens: Sequence[str] = (),
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Reads, tokenizes and packs what `data` names.

    Args:
        data: the recipe's settings.
        length: tokens in a row; no part of the cache's key.
        seed: for streamed sources, whose rows are shuffled block by block.
        tokenizer: folder of the model's own tokenizer, used when `data.tokenizer` is not stated. With neither, a byte-level
            BPE of `data.vocabulary` pieces is trained on the training documents.
        add_tokens: special tokens that the tokenizer is given besides.
        cache: folder for tokens and trained tokenizers; $PREHEAT_CACHE or ~/.cache/preheat when not stated.
        progress: called now and then with what is done, how much of it, and of how much (None: not known).

    Raises:
        DataError: something in the data is wrong; the message has the file and the row.

    Example:
        >>> prepared = prepare(Data(source="stdlib"), length=256, seed=0)  # doctest: +SKIP
        >>> prepared.train.row(0).tokens.shape  # doctest: +SKIP
        (256,)
    """
    root, say = cache or default_root(), progress or (lambda what, done, total: None)
    source = open_source(data)
    held = open_source(data, validation=True) if isinstance(data.validation, str) else None
    share = 0.0 if isinstance(data.validation, str) else float(data.validation)
    name, knob = (data.tokenizer, "data.tokenizer") if data.tokenizer else (tokenizer, "the model's tokenizer")
    packing: Literal["stream", "whole"] = ("whole" if source.paired else "stream") if data.packing == "auto" else data.packing
    if data.streaming and name is None:
        raise DataError(
            "data.streaming: a tokenizer cannot be trained on data that is read while training; set data.tokenizer to a folder"
        )

    say("reading validation" if held else "reading", 0, None)
    split = Split(share, frozenset(map(content_hash, held.read())) if held else frozenset())
    content = digest(FORMAT, source.key(), share, held.key() if held else "", data.text, data.prompt, data.completion)
    own = (
        load_tokenizer(name, knob=knob, add_tokens=add_tokens)
        if name is not None
        else _trained(root, content, source, split, data.vocabulary, say)
    )
    encoder = Encoder(own)

    if data.streaming:
        return _stream(data, source, held, split, encoder, own, length, seed, packing, content)

    def build(folder: Path) -> dict[str, Any]:
        values = _tokenize(folder, source, held, split, encoder, say)
        _refuse_empty(source, held, share, values)
        return values

    folder, found = entry(root, f"tokens-{digest(content, encoder.key)}", build)
    values = found["values"]
    train, validation = (Rows(Tokens.open(folder, side, values["group"]), length, packing, encoder.pad) for side in SIDES)
    _require_rows(train, "training data", "add documents or lower batch.length")
    if share or held:
        _require_rows(validation, "validation data", "raise data.validation or lower batch.length")
    counts = {"read": values["read"], "dropped": values["dropped"], "train": _counts(train), "validation": _counts(validation)}
    fingerprint = digest(FORMAT, sorted(found["files"].items()), length, packing, encoder.pad)
    return Prepared(own, train, validation, source.words + (f"; validation: {held.words}" if held else ""), counts, fingerprint)


def _trained(root: Path, content: str, source: Source, split: Split, vocabulary: int, say: Progress) -> PreTrainedTokenizerFast:
    import tokenizers

    def documents() -> Iterator[tuple[str, str]]:
        for n, (side, mark, document) in enumerate(split.apply(source.read(), Counter())):
            if n % 100 == 0:
                say("reading for the tokenizer", n, source.count)
            if side == "train":
                yield mark, document.text
        say("training the tokenizer", 0, None)

    def build(folder: Path) -> dict[str, Any]:
        train_tokenizer(documents(), vocabulary=vocabulary).save_pretrained(folder)
        return {}

    folder, _ = entry(root, f"tokenizer-{digest(content, vocabulary, tokenizers.__version__)}", build)
    return load_tokenizer(str(folder))


def _tokenize(
    folder: Path, source: Source, held: Source | None, split: Split, encoder: Encoder, say: Progress
) -> dict[str, Any]:
    """Writes the tokens of both sides into a folder, as `Tokens.open` reads them; gives what was counted."""
    dropped: Counter[str] = Counter()
    documents: Iterable[tuple[Side, str, Document]] = split.apply(source.read(), dropped)
    if held is not None:
        alone = (("validation", mark, d) for _, mark, d in Split().apply(held.read(), dropped))
        documents = itertools.chain(alone, documents)  # type: ignore[arg-type]
    dtype = "uint16" if encoder.pieces <= 2**16 else "uint32"
    ends: dict[Side, array.array[int]] = {side: array.array("q") for side in SIDES}
    labels: dict[Side, array.array[int]] = {side: array.array("q") for side in SIDES}
    done, group, masked = 0, 1, False
    files = {side: (folder / f"{side}.{dtype}").open("wb") for side in SIDES}
    marks = {side: (folder / f"{side}.trained").open("wb") for side in SIDES}
    try:
        for chunk in chunks(documents):
            say("tokenizing", done, source.count)
            done += len(chunk)
            for (side, _), sequences in zip(chunk, encoder([d for _, d in chunk]), strict=True):
                group = len(sequences)
                for tokens, trained, label in sequences:
                    files[side].write(np.array(tokens, dtype).tobytes())
                    marks[side].write(trained or b"\1" * len(tokens))
                    masked = masked or trained is not None
                    ends[side].append((ends[side][-1] if ends[side] else 0) + len(tokens))
                    if label is not None:
                        labels[side].append(label)
    finally:
        for file in (*files.values(), *marks.values()):
            file.close()
    for side in SIDES:
        np.save(folder / f"{side}-ends.npy", np.array(ends[side], np.int64))
        if labels[side]:
            np.save(folder / f"{side}-labels.npy", np.array(labels[side], np.int64))
        if not masked:
            (folder / f"{side}.trained").unlink()
    say("tokenizing", done, done)
    return {
        "read": done + sum(dropped.values()),
        "dropped": dict(dropped),
        "documents": {side: len(ends[side]) // group for side in SIDES},
        "group": group,
    }


def _refuse_empty(source: Source, held: Source | None, share: float, values: dict[str, Any]) -> None:
    documents, dropped = values["documents"], values["dropped"]
    kept = documents["train"] + documents["validation"]
    reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.items()) or "the source is empty"
    if kept == 0:
        raise DataError(f"{source.words}: no document left of {values['read']} read ({reasons})")
    if documents["train"] == 0 and held:
        raise DataError(
            f"{source.words}: no document left to train on ({reasons}); name another data.source or data.validation"
        )
    if documents["train"] == 0:
        raise DataError(f"data.validation {share:g}: leaves none of {kept} documents to train on; lower it or add documents")
    if documents["validation"] == 0 and held:
        raise DataError(f"data.validation: {held.words}: no document left ({reasons})")
    if documents["validation"] == 0 and share:
        raise DataError(
            f"data.validation {share:g}: none of {kept} documents falls on the validation side (their content decides); "
            "raise it, add documents, or name a file to validate on"
        )


def _require_rows(rows: Rows, what: str, fix: str) -> None:
    if len(rows) == 0 and rows.no_room:
        raise DataError(
            f"{what}: the prompt alone fills a row of {rows.length} tokens in each of {rows.no_room} examples; raise batch.length"
        )
    if len(rows) == 0:
        documents, tokens = len(rows.tokens.ends), len(rows.tokens.ids)
        raise DataError(f"{what}: {tokens:,} tokens in {documents:,} documents do not fill one row of {rows.length}; {fix}")


def _counts(rows: Rows) -> dict[str, Any]:
    return {
        "documents": len(rows.tokens.ends) // rows.tokens.group,
        "tokens": len(rows.tokens.ids),
        "rows": len(rows),
        "trained": rows.trained_total,
        "efficiency": rows.tokens_total / (len(rows) * rows.length) if len(rows) else 0.0,
        "truncated": rows.truncated,
        "no_room": rows.no_room,
    }


def _stream(
    data: Data,
    source: Source,
    held: Source | None,
    split: Split,
    encoder: Encoder,
    own: PreTrainedTokenizerFast,
    length: int,
    seed: int,
    packing: Literal["stream", "whole"],
    content: str,
) -> Prepared:
    train = StreamRows(data, split, encoder, length, packing, seed)
    tokens = encode_all(chunks(Split().apply(held.read(), Counter())), encoder) if held else train.held_out()
    validation = Rows(tokens, length, packing, encoder.pad)
    if held or split.share:
        _require_rows(validation, "validation data", "raise data.validation or lower batch.length")
    fingerprint = digest(FORMAT, content, encoder.key, length, packing, seed, data.limit)
    return Prepared(own, train, validation, f"{source.words}, streamed", {"validation": _counts(validation)}, fingerprint)
