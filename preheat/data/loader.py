"""Data loader: batches of torch tensors in an order that depends only on the seed and the committed samples.

Sample n is position n % len(rows) of epoch n // len(rows), and each epoch has its own permutation. So one number
resumes a run, and another batch size or micro-batch changes how samples are grouped, but not which come next.

A step consumes whole rows of the data. If its shape is shorter than the rows, these are concatenated and cut, and the
last sequence of the step may end in padding. So every token is trained once whatever the lengths, and a resumed run can
count samples.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from preheat.core import Batch, MaskSpec, Shape
from preheat.data.packing import IGNORED, RowData, Rows, cut, permutation
from preheat.data.streaming import StreamRows
from preheat.data.vision_inputs import find_runs, read_images
from preheat.errors import DataError, RunError
from preheat.hardware.child_processes import describe_exit

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from preheat.core.json_types import JsonObject
    from preheat.data.packing import EvaluationRows

PATIENCE = 300.0
"""Seconds without a micro-batch after which workers are killed: only a hanging network file system takes as long."""

Item = TypeVar("Item")

__all__ = [
    "batches",
    "collate",
    "evaluation_batches",
    "choose_evaluation_rows",
    "sample_order",
    "sample_rows",
    "count_consumed_rows",
    "count_weight",
]


def batches(
    rows: Rows | StreamRows,
    *,
    seed: int,
    committed: int,
    shape: Callable[[int], Shape],
    step: int = 0,
    order: Iterator[int] | None = None,
    workers: int = 0,
    prefetch: int = 2,
    pin: bool = False,
    share: tuple[int, int] = (0, 1),
    left_out: Sequence[tuple[int, int]] = (),
) -> Generator[list[Batch], None, None]:
    """Yields global batches without end, each as a list of micro-batches.

    Close the iterator to end the workers (`close()`, or drop the last reference). They are forked from a server process
    that has imported torch once: forking this process would copy the locks of its threads, and spawning would import
    torch in each worker. A streamed source uses at most one worker, since the tokenizer has threads of its own.

    Args:
        rows: the training rows.
        seed: seed of the order.
        committed: samples trained on so far; 0 at the beginning.
        shape: step, from 0 -> shape of its global batch; a pure function. The length is at most that of `rows`.
        step: steps taken so far.
        order: row numbers from sample `committed` on, by default `sample_order`; ignored for a streamed source.
        workers: loader processes; 0 makes the batches in this process on demand.
        prefetch: micro-batches that each worker makes ahead.
        pin: put tensors into page-locked memory, for faster copies to a GPU.
        left_out: of a streamed source, ranges of samples to leave out; any other source leaves them out of `order`.
        share: (rank, devices); each global batch is split across the devices, and only the rows of this rank are read.

    Raises:
        DataError: a row is invalid.
        RunError: a worker was killed, or returned nothing for `PATIENCE`.

    Yields:
        ceil(rows / shape.micro) micro-batches for the device's part of `shape.rows`, the last perhaps smaller. All
        devices get the same number; a device with fewer rows may get a micro-batch of padding.

    Example:
        >>> step = next(batches(rows, seed=0, committed=0, shape=lambda step: Shape(32, 256, 8)))  # doctest: +SKIP
        >>> len(step), step[0].tokens.shape  # doctest: +SKIP
        (4, torch.Size([8, 256]))
    """

    # Called twice, to request micro-batches and to receive them: both must see the same shapes, so `shape` is pure.
    def shapes() -> Iterator[Shape]:
        return map(shape, itertools.count(step))

    if isinstance(rows, StreamRows):
        # A stream has no random access: workers send rows in order, and this process makes the micro-batches.
        with closing(_Loader(_Stream(rows, committed, left_out), None, min(workers, 1), prefetch, False)) as stream:
            for current in shapes():
                read = [_raise_error(stream.next()) for _ in range(count_consumed_rows(current, rows.length))]
                by_number = dict(read)
                parts = _iterate_parts(list(by_number), current, rows.length, share)
                micro_batches = [
                    _read_part(part, by_number.__getitem__, rows.length, rows.encoder.pad) for part in parts
                ]
                yield [b.pin_memory() for b in micro_batches] if pin else list(micro_batches)
        return
    order = sample_order(rows, seed, committed) if order is None else order
    # Lazy, and ahead of training: workers request up to `prefetch` micro-batches each before a step needs them.
    parts = (
        part
        for current in shapes()
        for part in _iterate_parts(
            list(itertools.islice(order, count_consumed_rows(current, rows.length))), current, rows.length, share
        )
    )
    requested = deque[_Part]()  # from the workers, not received yet

    # The sampler of the DataLoader; each key is one micro-batch.
    def iterate_keys() -> Iterator[_Part]:
        for part in parts:
            requested.append(part)
            yield part

    def micro_batch() -> Batch:
        # Micro-batches arrive in the order of their keys, so an error belongs to the oldest request.
        batch = _raise_error(loaded.next(lambda: requested[0].rows))
        requested.popleft()
        return batch

    # The generator may be closed between two batches: `closing` then ends the workers.
    with closing(_Loader(_Keyed(rows), iterate_keys(), workers, prefetch, pin)) as loaded:
        for current in shapes():
            yield [micro_batch() for _ in range(_count_micro_batches(current, share[1]))]


def choose_evaluation_rows(total: int, limit: int) -> list[int]:
    """Returns at most `limit` of `total` row numbers, spread evenly: the first rows come from the first files alone.

    Example:
        >>> choose_evaluation_rows(10, 4), choose_evaluation_rows(3, 4)
        ([0, 2, 5, 7], [0, 1, 2])
    """
    count = min(limit, total)
    return [n * total // count for n in range(count)]


def evaluation_batches(rows: EvaluationRows, *, micro: int, limit: int) -> Iterator[Batch]:
    """Yields at most `limit` rows, spread evenly over all and in order, `micro` per batch."""
    numbers = choose_evaluation_rows(len(rows), limit)
    for first in range(0, len(numbers), micro):
        yield collate([(n, rows.row(n)) for n in numbers[first : first + micro]])


def sample_rows(total: int, seed: int, first: int, count: int) -> tuple[int, ...]:
    """Returns the row numbers of samples `first` to `first + count`, for epochs of `total` rows."""
    return tuple(int(_permute_epoch(total, seed, n // total)[n % total]) for n in range(first, first + count))


@functools.lru_cache(maxsize=2)  # two, since a batch may span two epochs
def _permute_epoch(total: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(total, seed, epoch)


def sample_order(rows: Rows, seed: int, committed: int = 0) -> Iterator[int]:
    """Yields row numbers without end from sample `committed` on, with a new permutation for each epoch."""
    total = len(rows)
    for n in itertools.count(committed):
        yield int(_permute_epoch(total, seed, n // total)[n % total])


def count_consumed_rows(shape: Shape, length: int) -> int:
    """Returns the number of rows of `length` tokens that a global batch of this shape consumes.

    Example:
        >>> count_consumed_rows(Shape(8, 256, 8), 256), count_consumed_rows(Shape(11, 192, 8), 256)
        (8, 8)
    """
    count = shape.rows * shape.length // length
    wanted = f"{shape.rows} sequences of {shape.length}"
    assert shape.length <= length, f"the sequences have {length} tokens, the batch's shape asks for {wanted}"
    assert count, f"{wanted} are less than a sequence of {length}"
    # `rows` is the ceiling: at most the last sequence of the step ends in padding.
    assert shape.rows == -(-count * length // shape.length), f"{wanted} cannot be cut from whole sequences of {length}"
    return count


class _Part(NamedTuple):
    """A micro-batch: the rows that it is cut from, the tokens to skip in them, and the number of its sequences."""

    rows: tuple[int, ...]
    length: int
    skip: int
    pieces: int


def _count_micro_batches(shape: Shape, devices: int) -> int:
    # The largest part decides for all, since collectives need as many micro-batches on every device.
    most = -(-shape.rows // devices)
    return -(-most // shape.micro)


def _iterate_parts(
    numbers: Sequence[int], shape: Shape, length: int, share: tuple[int, int] = (0, 1)
) -> Iterator[_Part]:
    """Yields the micro-batches of one device, for a global batch cut from these rows of `length` tokens."""
    number, devices = share
    # The sequences of this device; the numbers of two devices differ by one at most.
    low, high = (shape.rows * n // devices for n in (number, number + 1))
    for n in range(_count_micro_batches(shape, devices)):
        # First sequence of this micro-batch in the global batch, and its number of sequences, 0 if none is left.
        piece = low + n * shape.micro
        pieces = max(min(shape.micro, high - piece), 0)
        # In tokens of the concatenated rows. Without a sequence of its own the device reads the last one, to blank it.
        start = min(piece, shape.rows - 1) * shape.length
        # The rows that these tokens lie in, without `end`.
        first, end = start // length, -(-(start + max(pieces, 1) * shape.length) // length)
        yield _Part(tuple(numbers[first:end]), shape.length, start - first * length, pieces)


def _read_part(part: _Part, row: Callable[[int], RowData], length: int, pad: int) -> _Pinnable:
    if not part.pieces:  # this device has no rows left: a row without labels, so that all ranks run the same steps
        blank = _read_part(part._replace(pieces=1), row, length, pad)
        nothing = torch.ones_like(blank.labels, dtype=torch.bool)
        return replace(blank, labels=torch.full_like(blank.labels, IGNORED), weight=0, padding=nothing)
    rows = [row(n) for n in part.rows]
    # At full length the rows are used unchanged; only a shorter shape (of a length curriculum, say) cuts them.
    if part.length == length:
        return collate(list(zip(part.rows, rows, strict=True)))
    sequences = cut(rows, part.length, skip=part.skip, pieces=part.pieces, pad=pad)
    # For messages: the row that each sequence begins in.
    begins = [part.rows[(part.skip + n * part.length) // length] for n in range(len(sequences))]
    return collate(list(zip(begins, sequences, strict=True)))


@dataclass
class _Pinnable(Batch):
    """A batch with the method that DataLoader's pinning thread calls."""

    def pin_memory(self) -> _Pinnable:
        self.tokens, self.labels, self.positions = (
            self.tokens.pin_memory(),
            self.labels.pin_memory(),
            self.positions.pin_memory(),
        )
        if self.images is not None:
            self.images = self.images.pin_memory()
        if self.padding is not None:
            self.padding = self.padding.pin_memory()
        if self.sources is not None:
            self.sources = self.sources.pin_memory()
        return self


def collate(numbered: Sequence[tuple[int, RowData]]) -> _Pinnable:
    """Stacks numbered rows into a micro-batch; its tensors are [rows, length] int64."""
    numbers, rows = zip(*numbered, strict=True)
    # [rows, length] each; positions have a last axis of 3 if rows may hold images.
    tokens, labels, positions = (torch.stack([torch.from_numpy(row[part]) for row in rows]) for part in range(3))
    documents, group = tuple(row.documents for row in rows), rows[0].group
    desirable = tuple(row.desirable for row in rows) if rows[0].desirable else ()
    weight = count_weight(labels, documents, group, desirable)
    mask = MaskSpec(documents=documents)
    if rows[0].eye is not None and rows[0].eye.vision.bidirectional:
        mask = replace(mask, blocks=tuple(find_runs(row.tokens == rows[0].eye.vision.image) for row in rows))
    batch = _Pinnable(tokens, labels, positions, mask, weight, numbers, group, desirable)
    if rows[0].eye is not None:
        batch.images = read_images(rows[0].eye, [image for row in rows for image in row.images], tokens)
    if any(row.padding is not None for row in rows):
        none: np.ndarray = np.zeros(tokens.shape[1], bool)
        batch.padding = torch.from_numpy(np.stack([none if row.padding is None else row.padding for row in rows]))
    # Of a mixture every row has its sources.
    if sources := [row.sources for row in rows if row.sources is not None]:
        batch.sources = torch.from_numpy(np.stack(sources))
    return batch


def count_weight(
    labels: torch.Tensor,
    documents: tuple[tuple[int, ...], ...] | None,
    group: int,
    desirable: tuple[tuple[int, ...], ...],
) -> int:
    """Returns the number of items that a batch's loss is averaged over; arguments as in `Batch`, on the host.

    Example:
        >>> count_weight(torch.zeros(1, 9), ((2, 3, 1, 2, 1),), 2, ())  # two pairs, and one position of padding
        2
    """
    # Compared answers: the loss is a mean over pairs. Documents of padding complete no group.
    if group > 1:
        assert documents is not None, "sequences that are compared have their lengths beside them"
        return sum(len(row) // group for row in documents)
    # Judged answers count once each; otherwise the loss is a mean over labels.
    return sum(map(len, desirable)) if desirable else int((labels != IGNORED).sum())


class _Keyed(Dataset[_Pinnable | DataError]):
    """Map-style dataset of micro-batches, indexed by their `_Part`."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def __getitem__(self, part: _Part) -> _Pinnable | DataError:
        try:
            return _read_part(part, self.rows.row, self.rows.length, self.rows.pad)
        except DataError as error:
            return error  # as a value: DataLoader would wrap an exception of a worker in its traceback


class _Stream(IterableDataset[tuple[int, RowData] | DataError]):
    def __init__(self, rows: StreamRows, committed: int, left_out: Sequence[tuple[int, int]]):
        self.rows, self.committed, self.left_out = rows, committed, left_out

    def __iter__(self) -> Iterator[tuple[int, RowData] | DataError]:
        try:
            for number, row in self.rows.read(self.committed):
                if not any(first <= number < end for first, end in self.left_out):
                    yield number, row
        except DataError as error:
            yield error  # as a value: DataLoader would wrap an exception of a worker in its traceback


class _Loader(Generic[Item]):
    """A DataLoader's iterator, with a watchdog for its workers."""

    def __init__(self, dataset: Dataset[Item], keys: Iterator[_Part] | None, workers: int, prefetch: int, pin: bool):
        settings: JsonObject = {}
        if workers:
            # Neither fork nor spawn: `batches` says why.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", __name__])
            multiprocessing.resource_tracker.ensure_running()  # first, since it unblocks signals
            # Workers inherit the blocked signals from the server: Ctrl-C reaches all processes of a terminal at once.
            with _block_signals():
                multiprocessing.forkserver.ensure_running()
            settings = {
                "multiprocessing_context": context,
                "prefetch_factor": prefetch,
                "worker_init_fn": _start_worker,
            }
        # DataLoader warns of more workers than cores; that is the user's choice.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            self.loader: DataLoader[Item] | None = DataLoader(
                dataset,
                # The dataset yields complete micro-batches.
                batch_size=None,
                sampler=keys,
                collate_fn=_return_unchanged,
                num_workers=workers,
                pin_memory=pin,
                generator=torch.Generator(),  # else each start would draw from the generator of the training
                **settings,
            )
            # Starts the workers. Any, since the iterator's class, which depends on `workers`, is private.
            self.iterator: Any = iter(self.loader)
        # torch has no public name for them, and none at all without workers.
        self.workers: list[BaseProcess] = list(getattr(self.iterator, "_workers", ()))
        self.waits: float | None = None  # time.monotonic() since which `next` waits
        self.hung = False
        self._over = threading.Event()
        if workers:
            threading.Thread(target=self._watch, daemon=True).start()

    def next(self, rows: Callable[[], Sequence[int]] = tuple) -> Item:
        """Returns the next item.

        Args:
            rows: gives the row numbers that the item is read from, for errors.
        """
        # The watchdog counts only time within this call: a slow training step is no hanging worker.
        self.waits = time.monotonic()
        try:
            return next(self.iterator)
        except (RuntimeError, OSError, EOFError):  # OSError: the process that shares the tensors is gone
            # All workers are alive, so the error is of another kind: pass it on.
            if (why := self._describe_failure()) is None:
                raise
            numbers = rows()
            where = f" while reading sequences {min(numbers)} to {max(numbers)} of the training data" if numbers else ""
            raise RunError(
                f"data.workers: a reader process {why}{where}; set data.workers=0 to read in this process"
            ) from None
        finally:
            self.waits = None

    def _describe_failure(self) -> str | None:
        """Returns how a worker ended, or None if all are alive."""
        if self.hung:
            return f"returned nothing for {PATIENCE:.0f} s, and was ended,"
        end = time.monotonic() + 1  # the fork server reports the end of a worker with a delay
        while self.workers:
            if ended := [worker for worker in self.workers if not worker.is_alive()]:
                return describe_exit(ended[0].exitcode or 0)
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return None

    def close(self) -> None:
        self._over.set()
        if self.workers:
            # An orderly shutdown waits for every worker, and these would not answer.
            if self.hung or not all(worker.is_alive() for worker in self.workers):
                for worker in self.workers:
                    worker.kill()
            self.iterator._shutdown_workers()
            for worker in self.workers:
                worker.kill()
        self.workers = []
        self.iterator = self.loader = None

    def _watch(self) -> None:
        """Kills the workers after `PATIENCE` seconds without an item, which torch then reports."""
        while not self._over.wait(min(5.0, PATIENCE / 4)):
            since = self.waits
            if since is not None and time.monotonic() - since > PATIENCE:
                # Before the kill, which wakes `next`: its message depends on this.
                self.hung = True
                for worker in self.workers:
                    worker.kill()
                return


@contextmanager
def _block_signals() -> Iterator[None]:
    """Blocks signals to the process group in processes started within the block; the main process ends them itself."""
    if sys.platform == "win32":  # Ctrl-C is the only one there
        yield
        return
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise_error(value: Item | DataError) -> Item:
    if isinstance(value, DataError):
        raise value
    return value


def _return_unchanged(value: Item) -> Item:
    return value


def _start_worker(_: int) -> None:
    # DataLoader's workers check that their parent is alive, but that is the fork server, which lives as long as they
    # do: after `kill -9` of the main process both would stay forever.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    main = multiprocessing.parent_process()
    assert main is not None
    # Returns when the main process ends, by whatever cause.
    main.join()
    # sys.exit would end only this thread.
    os._exit(1)
