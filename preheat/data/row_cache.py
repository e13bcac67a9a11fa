"""On-disk, row-indexed cache of a model's outputs, for example of a teacher. Importing this imports no torch.

<folder>/kept.json   header: the settings that decide the outputs, and their shapes
<folder>/rows.bin    one record per row: hash of its tokens, hash of the record (0: not cached yet), then the arrays

A record is written once; records that a killed process left without a hash are computed again. The file is sparse, so
missing rows take no disk space.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from preheat.errors import RunError
from preheat.files import to_json

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.core import Batch
    from preheat.data.packing import Rows

__all__ = ["RowCache", "hash_rows"]

_MARK = 8


def _mark(*parts: np.ndarray) -> np.ndarray:
    digest = hashlib.blake2b(digest_size=_MARK)
    for part in parts:
        digest.update(np.ascontiguousarray(part).view(np.uint8))
    mark = np.frombuffer(digest.digest(), np.uint8)
    return mark if mark.any() else np.ones(_MARK, np.uint8)  # all zeros mark a missing record


def hash_rows(rows: Rows) -> str:
    """Returns a hash of the tokens of rows and of their packing."""
    # The settings and tokens that decide what each row holds.
    digest = hashlib.blake2b(repr((rows.length, rows.packing, rows.pad)).encode(), digest_size=16)
    for array in (rows.tokens.ids, rows.tokens.offsets):
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


class RowCache:
    """Cache of arrays of equal shapes for each row.

    Args:
        folder: folder of the cache; created if missing.
        rows: number of rows.
        of: settings that decide the outputs; stored in the header and compared when the cache is opened.
        arrays: name -> (shape of a row, dtype).
        knob: setting that errors name.

    Raises:
        RunError: the folder holds a cache with other settings, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rows: int,
        of: Mapping[str, object],
        arrays: Mapping[str, tuple[tuple[int, ...], str]],
        knob: str,
    ):
        self.folder, self.knob = folder, knob
        self._arrays = {name: (shape, np.dtype(kind)) for name, (shape, kind) in arrays.items()}
        self._sizes = {name: int(np.prod(shape)) * kind.itemsize for name, (shape, kind) in self._arrays.items()}
        # Bytes of a record.
        self.record = 2 * _MARK + sum(self._sizes.values())
        header = {
            "rows": rows,
            "of": dict(of),
            "arrays": {name: [list(shape), str(np.dtype(k))] for name, (shape, k) in arrays.items()},
        }
        file, header_file = folder / "rows.bin", folder / "kept.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A rows.bin of the right size is ours: another process just made it, or was killed before the header.
            foreign = not header_file.exists() and file.exists() and file.stat().st_size not in (0, rows * self.record)
            if not header_file.exists() and not foreign:
                with file.open("ab") as opened:
                    opened.truncate(rows * self.record)  # sparse: missing rows take no space
                # By rename, so that the header is complete or absent. Its
                # presence means that rows.bin has its full size.
                temporary = header_file.with_suffix(f".{os.getpid()}")
                temporary.write_text(to_json(header, indent=1), encoding="utf-8")
                temporary.rename(header_file)
            stored = None if foreign else json.loads(header_file.read_bytes())
        except ValueError:
            raise self._describe_mismatch("kept.json is incomplete") from None
        except OSError as error:
            raise RunError(
                f"{knob}: {folder}: cannot be written ({error.strerror or error}); name a folder with room"
            ) from None
        if foreign:
            raise RunError(f"{knob}: {folder}: holds a rows.bin that preheat did not write; name another folder")
        # Rows of another model or text must never be used: name the settings that differ.
        if stored != header:
            was = stored.get("of", {}) if isinstance(stored, dict) else {}
            other = [
                f"{key} (was {was.get(key)!r}, is {value!r})" for key, value in of.items() if was.get(key) != value
            ]
            raise self._describe_mismatch(f"was made with other settings: {', '.join(other) or 'other shapes'}")
        if not file.is_file() or file.stat().st_size != rows * self.record:
            raise self._describe_mismatch("rows.bin is missing or incomplete")
        self._file = np.memmap(file, np.uint8, mode="r+", shape=(rows, self.record))

    def _describe_mismatch(self, why: str) -> RunError:
        return RunError(
            f"{self.knob}: {self.folder}: {why}; remove the folder (its contents are recomputed) or name another one"
        )

    def find_missing(self, rows: Iterable[int]) -> list[int]:
        """Returns the rows that are not cached yet, sorted and without duplicates."""
        wanted = np.unique(np.fromiter(rows, np.int64))
        # Records that were never written read as zeros in a sparse file.
        return [int(n) for n in wanted[~self._file[wanted, _MARK : 2 * _MARK].any(axis=1)]]

    def write(self, row: int, tokens: np.ndarray, *arrays: np.ndarray) -> None:
        """Writes the arrays of a row in their order, and the hash of the record last."""
        content = np.concatenate(
            [
                np.ascontiguousarray(a, kind).reshape(shape).reshape(-1).view(np.uint8)
                for a, (shape, kind) in zip(arrays, self._arrays.values(), strict=True)
            ]
        )
        record, own = self._file[row], _mark(tokens)
        # The hash comes last, so that a process killed before leaves a record that `find_missing` or `read` rejects.
        record[:_MARK], record[2 * _MARK :] = own, content
        record[_MARK : 2 * _MARK] = _mark(own, content)

    def read(self, row: int, tokens: np.ndarray) -> list[np.ndarray]:
        """Returns copies of the arrays of a row, in their order.

        Args:
            tokens: [length] int64, the caller's tokens of this row, to check against the record.

        Raises:
            RunError: the row is missing, has other tokens, or is damaged.
        """
        # An unwritten record reads as zeros.
        if not 0 <= row < len(self._file) or not self._file[row, _MARK : 2 * _MARK].any():
            raise RunError(
                f"{self.knob}: {self.folder}: sequence {row} is not in the cache; start the run again, which fills it"
            )
        # One copy: the bytes that are checked are those that are returned.
        record = np.array(self._file[row])
        if (record[_MARK : 2 * _MARK] != _mark(record[:_MARK], record[2 * _MARK :])).any():
            raise self._describe_mismatch(f"sequence {row} is damaged")
        if (record[:_MARK] != _mark(tokens)).any():
            raise self._describe_mismatch(f"sequence {row} belongs to another text")
        parts, at = [], 2 * _MARK
        for name, (shape, kind) in self._arrays.items():
            parts.append(record[at : at + self._sizes[name]].copy().view(kind).reshape(shape))
            at += self._sizes[name]
        return parts

    def fill(
        self,
        rows: Rows,
        numbers: Sequence[int],
        forward: Callable[[Batch], Sequence[Tensor]],
        *,
        micro: int,
        progress: Callable[[str, float, float], None],
    ) -> None:
        """Caches `forward`'s outputs for these rows, `micro` at a time: tensors [rows, ...] in the arrays' order."""
        # Here, since the loader imports torch and this module must not.
        from preheat.data.loader import collate

        for start in range(0, len(numbers), micro):
            progress("the teacher reads", start, len(numbers))
            chunk = numbers[start : start + micro]
            batch = collate([(n, rows.row(n)) for n in chunk])
            for n, tokens, *arrays in zip(chunk, batch.tokens, *forward(batch), strict=True):
                self.write(n, tokens.numpy(), *(a.cpu().numpy() for a in arrays))
        self._file.flush()

    def tensors_for(self, batch: Batch) -> tuple[Tensor, ...]:
        """Returns the arrays of a batch's rows as tensors [rows, ...] on the host."""
        import torch

        # Every read checks the tokens, so a changed order of rows cannot mix up outputs.
        cached = [self.read(n, tokens.numpy()) for n, tokens in zip(batch.rows, batch.tokens, strict=True)]
        return tuple(torch.stack([torch.from_numpy(a) for a in arrays]) for arrays in zip(*cached, strict=True))
