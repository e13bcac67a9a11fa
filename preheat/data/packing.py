"""Packs tokenized documents into rows of one length.

`stream` concatenates all documents and cuts the stream at row ends; `whole` never cuts an example: best-fit decreasing
packing, with padding at the end of a row. Attention never crosses document boundaries, so a row has the length of each
document; padding counts as a document without labels.
"""

from __future__ import annotations

import bisect
import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from preheat.core import ExampleKind
from preheat.data.vision_inputs import ImageProcessor, ImageRef, ImageTable, compute_mrope_positions

__all__ = ["EvaluationRows", "IGNORED", "RowData", "Rows", "Tokens", "pack_best_fit", "cut", "permutation"]

IGNORED = -100
"""Label of positions without a loss."""


class RowData(NamedTuple):
    """One packed row.

    Attributes:
        tokens: [length] int64.
        labels: [length] int64; label t is the token at t + 1, or -100 at the end of a document, in prompts and padding.
        positions: [length] int64, from 0 in each document of the row; [length, 3] with M-RoPE.
        documents: lengths of the documents in the row; their sum is `length`.
        group, desirable: as in `preheat.core.Batch`, for this row.
        images: images of the row, in order.
        eye: image processor; None for text-only models.
        padding: [length] bool, true at positions of no document; None: there are none.
        sources: [length] int16, as in `preheat.core.Batch`, for this row.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    documents: tuple[int, ...]
    group: int = 1
    desirable: tuple[int, ...] = ()
    images: tuple[ImageRef, ...] = ()
    eye: ImageProcessor | None = None
    padding: np.ndarray | None = None
    sources: np.ndarray | None = None


class EvaluationRows(Protocol):
    """The part of `Rows` that an evaluation reads."""

    @property
    def truncated(self) -> int: ...

    @property
    def no_room(self) -> int: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> RowData: ...


def _map_file(file: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)


@dataclass
class Tokens:
    """Documents as one array of tokens.

    Attributes:
        ids: [tokens] unsigned integers.
        offsets: [sequences] int64, end of each sequence in `ids`.
        loss_mask: [tokens] uint8, 1 for tokens that are trained on; None for all.
        labels: [sequences] int64; if no token is trained, the class of each sequence, trained at its last position;
            else 1 for desirable and 0 for undesirable answers. None without labels.
        group: sequences per example, which are adjacent in a row: 2 if they are compared.
        images: images of the documents; None for text-only models.
        folder, side: place on disk, if stored: worker processes open the files instead of receiving a copy.
        source_ends: number of sequences up to the end of each source of a mixture; (): one source, or unknown ones.
    """

    ids: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray | None = None
    labels: np.ndarray | None = None
    group: int = 1
    images: ImageTable | None = None
    folder: Path | None = None
    side: str = ""
    source_ends: tuple[int, ...] = ()

    @classmethod
    def open(cls, folder: Path, side: str, group: int = 1, source_ends: tuple[int, ...] = ()) -> Tokens:
        """Opens tokens that `preparation` stored, mapped into memory."""
        # The suffix is the dtype: uint16 for at most 65,536 tokens, else uint32.
        file = next(folder.glob(f"{side}.uint*"))
        marks, labels = folder / f"{side}.trained", folder / f"{side}-labels.npy"
        return cls(
            _map_file(file, np.dtype(file.suffix[1:])),
            np.load(folder / f"{side}-ends.npy"),
            _map_file(marks, np.dtype(np.uint8)) if marks.exists() else None,
            np.load(labels) if labels.exists() else None,
            group,
            ImageTable.open(folder, side),
            folder,
            side,
            source_ends,
        )

    def unmap_pages(self) -> None:
        """Unmaps the files' pages that were read; they stay in the system's page cache.

        Otherwise every row that is read adds to the process's resident memory, up to the size of the data set.
        """
        for array in (self.ids, self.loss_mask):
            if array is not None and isinstance(array.base, mmap.mmap):
                array.base.madvise(mmap.MADV_DONTNEED)

    def __reduce__(self) -> tuple[object, ...]:
        # Pickled as a path: a worker maps the same files instead of receiving gigabytes through a pipe.
        if self.folder is not None:
            return Tokens.open, (self.folder, self.side, self.group, self.source_ends)
        arrays = (self.ids, self.offsets, self.loss_mask, self.labels)
        return Tokens, (*arrays, self.group, self.images, None, "", self.source_ends)

    @functools.cached_property
    def examples(self) -> ExampleKind:
        """Kind of the examples."""
        if self.group == 2:
            return ExampleKind("pairs")
        if self.labels is None or not len(self.labels):
            return ExampleKind()
        # Labels of answers that are trained on judge them (KTO); labels of texts that are only read are classes.
        if self.loss_mask is not None and self.loss_mask.any():
            return ExampleKind("desirable")
        return ExampleKind("classes", int(self.labels.max()) + 1)

    def targets(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the number of labels in each tokens[start:stop].

        The spans are in order and start where a sequence does, whose first token is no label.
        """
        if self.examples.kind == "classes":
            return np.ones(len(starts), np.int64)
        if self.loss_mask is None or not len(starts):
            return np.maximum(stops - starts - 1, 0)
        # [2 spans]: start + 1, stop, start + 1, stop, ... `reduceat` sums
        # between neighbors; every second sum is a span's.
        bounds = np.stack([np.minimum(starts + 1, stops), stops], axis=1).ravel()
        inside = bounds[bounds < len(self.loss_mask)]  # reduceat sums to the end after the last bound
        sums: np.ndarray = np.zeros(len(bounds), np.int64)
        sums[: len(inside)] = np.add.reduceat(self.loss_mask, inside, dtype=np.int64)
        # For equal bounds `reduceat` returns the element itself instead of 0.
        return np.where(stops > starts + 1, sums[::2], 0)

    def starts(self) -> np.ndarray:
        return np.concatenate([np.zeros(1, np.int64), self.offsets[:-1]]) if len(self.offsets) else self.offsets


@dataclass
class Rows:
    """Packed rows with random access; cheap to pickle.

    Attributes:
        tokens: the documents.
        length: tokens in a row.
        packing: `stream` or `whole`.
        pad: the token that fills rows of `whole` packing.
        truncated: examples longer than a row, cut to its length; compared sequences to half of it each (`whole`).
        no_room: examples left out because they have no trained token within the length of a row (`whole`).
        partial: pad the last row instead of dropping its tokens (`stream`), to evaluate each token once.

    Example:
        >>> rows = Rows(Tokens(np.arange(10), np.array([4, 10])), 5)
        >>> len(rows), rows.row(0).documents, rows.row(0).labels.tolist()
        (2, (4, 1), [1, 2, 3, -100, 5])
    """

    tokens: Tokens
    length: int
    packing: Literal["stream", "whole"] = "stream"
    pad: int = 0
    truncated: int = 0
    no_room: int = 0
    partial: bool = False
    _order: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    """`whole`: sequences in the order in which they fill the rows."""
    _bounds: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64), repr=False)
    """`whole`: row i has the sequences _order[_bounds[i]:_bounds[i + 1]]."""
    _used: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    """`whole`: number of tokens of each sequence, from its beginning, that are in a row."""

    def __post_init__(self) -> None:
        assert self.packing == "whole" or (self.tokens.group == 1 and self.tokens.labels is None), (
            "only whole examples have these"
        )
        # Rows of a stream are computed on access; rows made with their bounds are packed already.
        if self.packing == "stream" or len(self._bounds) > 1:
            return
        group = self.tokens.group
        # sizes: [sequences]. together: [examples], the tokens of all their sequences.
        sizes = np.diff(self.tokens.offsets, prepend=0)
        together = sizes.reshape(-1, group).sum(axis=1)
        # If a pair does not fit, each answer gets half a row, so that both are compared up to the same length.
        used = np.minimum(sizes, np.repeat(np.where(together > self.length, self.length // group, self.length), group))
        starts = self.tokens.starts()
        if self.tokens.images is not None:
            # A cut within an image would leave patches without tokens: move it before the image.
            for n in np.intersect1d(np.flatnonzero(used < sizes), self.tokens.images.of):
                used[n], _ = self.tokens.images.room(n, self.tokens.ids[starts[n] : starts[n] + sizes[n]], int(used[n]))
        # [examples], True if every sequence keeps a trained token within its room.
        room = (self.tokens.targets(starts, starts + used).reshape(-1, group) > 0).all(axis=1)
        # Without a mask no prompt can fill the row, so every example stays.
        usable = np.flatnonzero(room) if self.tokens.loss_mask is not None else np.arange(len(together))
        self.no_room = len(together) - len(usable)
        self.truncated = int((together[usable] > self.length).sum())
        self._used = used
        # `bins` index `usable`; translate them to examples, and these to their adjacent sequences.
        bins = pack_best_fit(used.reshape(-1, group).sum(axis=1)[usable], self.length)
        examples = usable[np.array([n for b in bins for n in b], np.int64)]
        self._order = (examples[:, None] * group + np.arange(group)).ravel()
        self._bounds = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum([len(b) * group for b in bins], dtype=np.int64)]
        )

    def __len__(self) -> int:
        if self.packing == "whole":
            return len(self._bounds) - 1
        # A last token on its own makes no row: it is the label of the row before it.
        return (
            -(-max(len(self.tokens.ids) - 1, 0) // self.length) if self.partial else len(self.tokens.ids) // self.length
        )

    def examples_used(self) -> np.ndarray:
        """Returns [examples] bool, True for those with a label in a row; the others are left out."""
        starts, ends, group = self.tokens.starts(), self.tokens.offsets, self.tokens.group
        if self.packing == "whole":
            used: np.ndarray = np.zeros(len(ends) // group, bool)
            used[self._order[::group] // group] = True
            return used
        # The token after the last position is its label.
        last = min(len(self) * self.length + 1, len(self.tokens.ids))
        used = starts < last
        used[used] = self.tokens.targets(starts[used], np.minimum(ends[used], last)) > 0
        return used

    @property
    def example_lengths(self) -> np.ndarray:
        """[examples] number of tokens of each sequence in the rows of `whole` packing."""
        return self._used[self._order]

    @property
    def tokens_total(self) -> int:
        """Number of tokens in all rows, without padding."""
        if self.packing == "stream":
            return min(len(self) * self.length, len(self.tokens.ids))
        return int(self._used[self._order].sum())

    @property
    def trained_total(self) -> int:
        """Number of labels in all rows."""
        starts, ends = self.tokens.starts(), self.tokens.offsets
        if self.packing == "stream":
            last = len(self) * self.length  # the token after the last position is its label
            inside = starts < last
            return int(self.tokens.targets(starts[inside], np.minimum(ends, last + 1)[inside]).sum())
        return int(self.tokens.targets(starts, starts + self._used)[self._order].sum())

    def most_images(self) -> tuple[int, int]:
        """Returns (images, patches) of the row with the most patches; (0, 0) without images."""
        table = self.tokens.images
        if table is None or not len(table.of) or not len(self) or self.packing == "stream":
            return 0, 0
        total = len(self.tokens.offsets)
        # [sequences in rows]: images, and patches.
        per = [np.bincount(table.of, weights, total)[self._order] for weights in (None, table.grids.prod(axis=1))]
        # Sums per row. No row is empty, so the bounds rise strictly, as `reduceat` requires.
        images, patches = (np.add.reduceat(counts, self._bounds[:-1]) for counts in per)
        row = int(np.argmax(patches))
        return int(images[row]), int(patches[row])

    def contents(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the documents in a row and the number of tokens of each."""
        if self.packing == "whole":
            sequences = self._order[self._bounds[index] : self._bounds[index + 1]]
            return sequences, self._used[sequences]
        start, stop = index * self.length, min((index + 1) * self.length, len(self.tokens.ids))
        # Offsets are exclusive ends: the first one above `start` ends the document of position `start`.
        first = int(np.searchsorted(self.tokens.offsets, start, side="right"))
        last = int(np.searchsorted(self.tokens.offsets, stop, side="left"))
        ends = np.minimum(self.tokens.offsets[first : last + 1], stop)
        return np.arange(first, last + 1), np.diff(ends, prepend=start)

    def row(self, index: int) -> RowData:
        """Returns row `index`, from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        packed = self._stream_row(index) if self.packing == "stream" else self._read_whole_row(index)
        self.tokens.unmap_pages()
        return packed._replace(sources=self._find_sources(index)) if self.tokens.source_ends else packed

    def _find_sources(self, index: int) -> np.ndarray:
        """Returns the source of each token of a row, [length] int16; 0 at padding, which has no label."""
        sequences, sizes = self.contents(index)
        numbers = np.searchsorted(self.tokens.source_ends, sequences, side="right")
        sources: np.ndarray = np.zeros(self.length, np.int16)
        sources[: sizes.sum()] = np.repeat(numbers, sizes)
        return sources

    def _stream_row(self, index: int) -> RowData:
        start = index * self.length
        stop = min(start + self.length, len(self.tokens.ids))
        size = stop - start
        # One token more than the row has: the label of its last position.
        span = np.asarray(self.tokens.ids[start : stop + 1]).astype(np.int64)
        tokens: np.ndarray = np.full(self.length, self.pad, np.int64)
        tokens[:size] = span[:size]
        labels: np.ndarray = np.full(self.length, IGNORED, np.int64)
        # The label of a position is the next token, for the last position the first token of the next row.
        labels[: len(span) - 1] = span[1:]
        first = int(np.searchsorted(self.tokens.offsets, start, side="right"))  # the document of position `start`
        last = int(np.searchsorted(self.tokens.offsets, stop, side="left"))  # the document of position `stop - 1`
        ends = np.asarray(self.tokens.offsets[first : last + 1])
        # Ends within this row. A document that continues in the next row keeps the label of its last position here.
        inside = ends[ends <= stop] - start
        # The next token of a document's last one belongs to another document.
        labels[inside - 1] = IGNORED
        # The mask is of tokens and a label is the token after its position, hence the shift by one.
        if self.tokens.loss_mask is not None:
            labels[: len(span) - 1][self.tokens.loss_mask[start + 1 : start + len(span)] == 0] = IGNORED
        # Without duplicates: a document may end where the tokens or the row do, and none has length 0.
        cuts = dict.fromkeys([*inside.tolist(), size, self.length])
        return _build_row(tokens, labels, np.diff(list(cuts), prepend=0))._replace(
            padding=_padding_after(size, self.length)
        )

    def _read_whole_row(self, index: int) -> RowData:
        tokens: np.ndarray = np.full(self.length, self.pad, np.int64)
        labels: np.ndarray = np.full(self.length, IGNORED, np.int64)
        sizes, at, kind = [], 0, self.tokens.examples.kind
        desirable, images, table = [], list[ImageRef](), self.tokens.images
        mrope: np.ndarray = np.empty((self.length, 3), np.int64)
        for n in self._order[self._bounds[index] : self._bounds[index + 1]]:
            # `_used`, not the whole sequence: a long one is cut at its end.
            start, size = int(self.tokens.offsets[n - 1]) if n else 0, int(self._used[n])
            ids = np.asarray(self.tokens.ids[start : start + size]).astype(np.int64)
            tokens[at : at + size] = ids
            if kind == "desirable":
                desirable.append(int(self.tokens.labels[n]))  # type: ignore[index]
            if kind == "classes":
                # The class is read at the last token, the only one that has seen the whole text.
                labels[at + size - 1] = self.tokens.labels[n]  # type: ignore[index]
            else:
                labels[at : at + size - 1] = ids[1:]
                if self.tokens.loss_mask is not None:
                    labels[at : at + size - 1][self.tokens.loss_mask[start + 1 : start + size] == 0] = IGNORED
            if table is not None:
                # Images behind the cut are left out together with their tokens.
                _, image_count = table.room(n, np.asarray(self.tokens.ids[start : self.tokens.offsets[n]]), size)
                images += table.within(n)[:image_count]
                if table.eye.vision.mrope:
                    mrope[at : at + size] = compute_mrope_positions(
                        ids, table.within(n)[:image_count], table.eye.vision
                    )
            sizes.append(size)
            at += size
        # Padding is one more document, so that no example attends to it.
        if at < self.length:
            sizes.append(self.length - at)
            mrope[at:] = np.arange(self.length - at)[:, None]
        packed = _build_row(tokens, labels, np.array(sizes))._replace(
            group=self.tokens.group, desirable=tuple(desirable), padding=_padding_after(at, self.length)
        )
        if table is None:
            return packed
        if table.eye.vision.mrope:
            packed = packed._replace(positions=mrope)
        return packed._replace(images=tuple(images), eye=table.eye)


def _padding_after(end: int, length: int) -> np.ndarray | None:
    """Returns the padding of a row whose documents end at `end`, as in `RowData`."""
    return np.arange(length) >= end if end < length else None


def _build_row(tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> RowData:
    # Positions restart at 0 in each document.
    starts = np.cumsum(documents) - documents
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts, documents)
    return RowData(tokens, labels, positions, tuple(documents.tolist()))


def cut(
    rows: Sequence[RowData], length: int, *, skip: int = 0, pieces: int | None = None, pad: int = 0
) -> list[RowData]:
    """Cuts concatenated rows into shorter ones; each token keeps its label.

    Positions restart in each new row, and a document that is cut becomes two. The last row is padded.

    Args:
        length: tokens of a new row.
        skip: tokens to leave out at the beginning.
        pieces: maximum number of new rows; None for all.
        pad: padding token of the last row.

    Example:
        >>> row = Rows(Tokens(np.arange(10), np.array([4, 10])), 10).row(0)
        >>> [(p.tokens.tolist(), p.documents) for p in cut([row], 4)]
        [([0, 1, 2, 3], (4,)), ([4, 5, 6, 7], (4,)), ([8, 9, 0, 0], (2, 2))]
    """
    assert not any(row.group > 1 or row.desirable or row.eye for row in rows), (
        "answers that are judged as a whole, and images, are not cut"
    )
    tokens, labels = (np.concatenate([row[part] for row in rows])[skip:] for part in (0, 1))
    blank = np.concatenate([np.zeros(len(r.tokens), bool) if r.padding is None else r.padding for r in rows])[skip:]
    mixed = [r.sources for r in rows if r.sources is not None]
    sources = np.concatenate(mixed)[skip:] if mixed else None
    # Ends of documents, counted from the first token that is kept; those before it are at 0 or below.
    ends = np.cumsum(np.concatenate([row.documents for row in rows])) - skip
    sequences = []
    for start in range(0, len(tokens), length)[:pieces]:
        stop = min(start + length, len(tokens))
        padding = start + length - stop
        inside = ends[(ends > start) & (ends < stop)] - start
        bounds = [0, *inside.tolist(), stop - start, *([length] if padding else [])]
        sequence = _build_row(
            np.concatenate([tokens[start:stop], np.full(padding, pad, np.int64)]),
            # Labels are copied, so the last position still has its label although that token is in the next row.
            np.concatenate([labels[start:stop], np.full(padding, IGNORED, np.int64)]),
            np.diff(bounds),
        )
        within = np.concatenate([blank[start:stop], np.ones(padding, bool)])
        if sources is not None:
            own = np.concatenate([sources[start:stop], np.zeros(padding, np.int16)])
            sequence = sequence._replace(sources=own)
        sequences.append(sequence._replace(padding=within if within.any() else None))
    return sequences


def pack_best_fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Packs by best-fit decreasing: the largest first, each into the fullest bin with enough room. Deterministic.

    Args:
        sizes: [n], each at most `room`.

    Returns:
        The indices in each bin.

    Example:
        >>> pack_best_fit(np.array([3, 6, 4, 5]), 9)
        [[1, 0], [3, 2]]
    """
    bins: list[list[int]] = []
    # Bins by their room: the search costs a bisection over at most `room` numbers, however many bins there are.
    by_room: dict[int, list[int]] = {}  # room left -> bins
    rooms: list[int] = []  # the keys of by_room, sorted
    for n in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[n])
        # The smallest room that suffices is that of the fullest bin.
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            left, chosen = room, len(bins)
            bins.append([])
        else:
            left = rooms[place]
            chosen = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[place]
        bins[chosen].append(n)
        left -= size
        if left:
            if left not in by_room:
                by_room[left] = []
                bisect.insort(rooms, left)
            by_room[left].append(chosen)
    return bins


def permutation(count: int, *key: int) -> np.ndarray:
    """Returns a permutation of range(count) that depends only on `key` (a seed, an epoch, ...).

    Sorts the raw output of a counter-based generator: NumPy guarantees that this is stable across versions, unlike
    `Generator.permutation`, and a run must resume exactly after an update too.
    """
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(count), kind="stable")
