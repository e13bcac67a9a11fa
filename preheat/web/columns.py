"""Numbers of a run's lines as columns on disk, with an outline of long ones, so that any part is drawn at once.

A table is a set of files of 64-bit floats, one per key, whose n-th number belongs to the n-th row; NaN is a missing
number, infinity one that was not finite. A long table also has an outline: of every 256 rows of a key the minimum,
maximum, sum, number of finite and of other values.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BLOCK", "Items", "Table", "TableShape"]

BLOCK = 256
"""Rows that one entry of an outline covers."""
_LONG = 1 << 16
"""Rows from which a table has an outline: half a MiB per key is read in a millisecond."""
_MOST_KEYS = 300
"""Keys of a table; a damaged file may have any number."""
_FIGURES = 5
"""Numbers of an entry of an outline."""


@dataclass(frozen=True)
class TableShape:
    """The part of a table's files that counts: what lies beyond was left by a process that ended.

    Attributes:
        keys: in the order of the files' numbers.
        blocks: entries of the outline.
    """

    keys: tuple[str, ...] = ()
    rows: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Items:
    """Consecutive rows or blocks of rows of a key: float64 arrays of one length.

    Attributes:
        first_x, last_x: range of the rows of an item.
        low, high, total: of the finite values.
        finite, broken: number of values, and of those that were not finite.
    """

    first_x: NDArray[np.float64]
    last_x: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    total: NDArray[np.float64]
    finite: NDArray[np.float64]
    broken: NDArray[np.float64]


class Table:
    """Rows of numbers with ascending steps; the key "step" is in each.

    Args:
        is_strict: a step has one row; otherwise it may have several.
    """

    def __init__(self, folder: Path, name: str, shape: TableShape, *, is_strict: bool = True):
        self._folder, self._name, self._is_strict = folder, name, is_strict
        self._numbers = {key: number for number, key in enumerate(shape.keys)}
        self._rows, self._blocks = shape.rows, shape.blocks
        self._buffer: dict[str, array[float]] = {key: array("d") for key in ("step", *shape.keys)}
        self._last_step = self.read_last("step") if shape.rows and self.is_intact() else -math.inf

    @property
    def shape(self) -> TableShape:
        return TableShape(tuple(self._numbers), self._rows, self._blocks)

    @property
    def keys(self) -> list[str]:
        return [*self._numbers]

    @property
    def rows(self) -> int:
        """Number of rows on disk."""
        return self._rows

    def is_intact(self) -> bool:
        """Returns False if a file is shorter than its part of the table, or missing."""
        try:
            return all(self._file(key).stat().st_size >= 8 * self._rows for key in self._numbers)
        except OSError:
            return False

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a row; it is on disk after `flush`. Rows of later steps are dropped first, and those of this step."""
        self.drop_from(step if self._is_strict else step + 1)
        rows = len(self._buffer["step"])
        self._buffer["step"].append(step)
        self._last_step = step
        missing = self._buffer.keys() - values.keys()
        for key in values:
            column = self._buffer.get(key)
            if column is None:
                if len(self._buffer) >= _MOST_KEYS:
                    continue
                column = self._buffer[key] = array("d", [math.nan]) * rows
            column.append(values[key])
        for key in missing:
            if key != "step":
                self._buffer[key].append(math.nan)

    def drop_from(self, step: int) -> None:
        """Drops the rows of a step and later: the run went back, and they are not of this model."""
        if self._last_step < step:
            return
        steps = self._buffer["step"]
        while steps and steps[-1] >= step:
            for column in self._buffer.values():
                column.pop()
        if steps:
            self._last_step = steps[-1]
            return
        if self._rows and self.read_last("step") >= step:
            self._rows = self._bisect("step", step)
            self._blocks = min(self._blocks, self._rows // BLOCK)
        self._last_step = self.read_last("step") if self._rows else -math.inf

    def flush(self) -> None:
        """Writes the new rows.

        Raises:
            OSError: they cannot be written.
        """
        new = len(self._buffer["step"])
        if not new:
            return
        for key, column in self._buffer.items():
            self._numbers.setdefault(key, len(self._numbers))
            # NaN: the key is missing in all rows before.
            _write_at(self._file(key), 8 * self._rows, column, array("d", [math.nan]))
            del column[:]
        self._rows += new
        if self._rows >= _LONG:
            self._extend_outline()

    def _extend_outline(self) -> None:
        import numpy as np

        end = self._rows // BLOCK
        if end == self._blocks:
            return
        nothing = array("d", [math.inf, -math.inf, 0.0, 0.0, 0.0])
        for key in self._numbers:
            values = self.read(key, self._blocks * BLOCK, end * BLOCK).reshape(-1, BLOCK)
            finite, broken = np.isfinite(values), np.isinf(values)
            entries = np.stack(
                [
                    np.where(finite, values, np.inf).min(axis=1),
                    np.where(finite, values, -np.inf).max(axis=1),
                    np.where(finite, values, 0.0).sum(axis=1),
                    finite.sum(axis=1),
                    broken.sum(axis=1),
                ],
                axis=1,
            )
            offset = 8 * _FIGURES * self._blocks
            _write_at(self._file(key, "outline"), offset, array("d", entries.tobytes()), nothing)
        self._blocks = end

    def read(self, key: str, first: int, last: int) -> NDArray[np.float64]:
        """Returns the values of the rows from `first` up to, and without, `last`."""
        import numpy as np

        count = max(0, min(last, self._rows) - first)
        return np.fromfile(self._file(key), dtype=np.float64, count=count, offset=8 * first)

    def read_last(self, key: str) -> float:
        """Returns the value of the last row on disk; NaN without one."""
        return self._read_row(key, self._rows - 1) if key in self._numbers and self._rows else math.nan

    def read_first(self, key: str) -> float:
        """Returns the value of the first row on disk; NaN without one."""
        return self._read_row(key, 0) if key in self._numbers and self._rows else math.nan

    def read_row(self, row: int, keys: Sequence[str]) -> list[float]:
        """Returns the values of a row on disk."""
        return [self._read_row(key, row) for key in keys]

    def read_newest(self, key: str, count: int) -> list[float]:
        """Returns the finite values of the last rows on disk."""
        if key not in self._numbers:
            return []
        first = max(0, self._rows - count)
        values = array("d")
        with self._file(key).open("rb") as file:
            file.seek(8 * first)
            values.frombytes(file.read(8 * (self._rows - first)))
        return [value for value in values if math.isfinite(value)]

    def _read_row(self, key: str, row: int) -> float:
        with self._file(key).open("rb", buffering=0) as file:
            return _read_number(file, row)

    def _bisect(self, key: str, value: float) -> int:
        """Returns the number of rows whose values are smaller, of a key whose values ascend."""
        low, high = 0, self._rows
        with self._file(key).open("rb", buffering=0) as file:
            while low < high:
                middle = (low + high) // 2
                if _read_number(file, middle) < value:
                    low = middle + 1
                else:
                    high = middle
        return low

    def read_items(self, key: str, x: str, first: float | None, last: float | None) -> Items:
        """Returns the rows whose x lies in a range, as blocks if they are many; the last one is never in a block.

        Args:
            x: key whose values ascend.
        """
        import numpy as np

        start = 0 if first is None else self._bisect(x, first)
        end = self._rows if last is None else self._bisect(x, math.nextafter(last, math.inf))
        whole = range(0) if end - start < _LONG else range(-(-start // BLOCK), min((end - 1) // BLOCK, self._blocks))
        if not whole:
            return self._read_rows(key, x, start, end)
        blocks, x_blocks = (self._read_blocks(name, whole.start, whole.stop) for name in (key, x))
        parts = (
            self._read_rows(key, x, start, whole.start * BLOCK),
            Items(x_blocks[:, 0], x_blocks[:, 1], *(blocks[:, column] for column in range(_FIGURES))),
            self._read_rows(key, x, whole.stop * BLOCK, end),
        )
        return Items(*(np.concatenate([getattr(part, name) for part in parts]) for name in Items.__dataclass_fields__))

    def _read_blocks(self, key: str, first: int, last: int) -> NDArray[np.float64]:
        import numpy as np

        width = 8 * _FIGURES
        numbers = np.fromfile(
            self._file(key, "outline"), dtype=np.float64, count=(last - first) * _FIGURES, offset=width * first
        )
        return numbers.reshape(-1, _FIGURES)

    def _read_rows(self, key: str, x: str, first: int, last: int) -> Items:
        import numpy as np

        values, positions = self.read(key, first, last), self.read(x, first, last)
        finite, broken = np.isfinite(values), np.isinf(values)
        low, high, total = (np.where(finite, values, other) for other in (np.inf, -np.inf, 0.0))
        return Items(positions, positions, low, high, total, finite.astype(np.float64), broken.astype(np.float64))

    def _file(self, key: str, kind: str = "column") -> Path:
        # Numbered: a key is text of a file.
        return self._folder / f"{self._name}-{self._numbers[key]}.{kind}"


def _read_number(file: BinaryIO, row: int) -> float:
    file.seek(8 * row)
    number = array("d", file.read(8))
    return number[0] if number else math.inf


def _write_at(path: Path, offset: int, numbers: array[float], padding: array[float]) -> None:
    """Writes numbers at an offset and ends the file there; a shorter file is filled up with `padding`."""
    with path.open("ab") as file:
        if file.tell() > offset:
            file.truncate(offset)
            file.seek(offset)
        missing = (offset - file.tell()) // (8 * len(padding))
        while missing > 0:
            count = min(missing, 1 << 14)
            file.write((padding * count).tobytes())
            missing -= count
        numbers.tofile(file)
