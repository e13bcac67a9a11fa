"""A teacher that cuts text into other pieces than its student: the same text in its own, and the places at which both have read as much.

Where a piece of the student and one of the teacher end at the same byte, both have read the same text and say what comes next. Of what the
teacher says there the pieces that the student has too are kept, by their bytes; the end of a text is one of them. All others count together, as do the
student's. Elsewhere the teacher says nothing.
Special tokens of the student's, those of a conversation's template among them, are not shown to the teacher, which reads the plain text.
Source: alignment by the text read and comparison over common pieces: Patino et al. 2025, GOLD (huggingface.co/spaces/HuggingFaceH4/on-policy-distillation);
that tokens need not be the same for a teacher to be of use: Boizard et al. 2024 (arXiv:2402.12030).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.core import Batch, MaskSpec
from preheat.model_folder import beginning

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TokenizerView", "Matched", "TokenAligner", "common"]

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNIT = 64
"""Rows of a teacher's batch are as long as the longest of them in multiples of this, so that few lengths occur."""


@dataclass(frozen=True)
class TokenizerView:
    """How a tokenizer cuts text.

    Attributes:
        tokenizer: a fast one of transformers.
        pieces: bytes of text that each token stands for (`preheat.data.tokenizer.pieces_of`).
        end: the number of the token that ends a text.
    """

    tokenizer: Any
    pieces: Sequence[bytes]
    end: int

    @property
    def begins(self) -> int | None:
        """The token that it puts before every text; None: there is none."""
        return next(iter(beginning(self.tokenizer)), None)

    @property
    def spaced(self) -> bool:
        """Whether it puts a space before every text, as SentencePiece does."""
        numbers = self.tokenizer("a", add_special_tokens=False).input_ids
        return b"".join(self.pieces[n] for n in numbers).startswith(b" ")

    def ends(self, numbers: Sequence[int]) -> tuple[bytes, list[int]]:
        """The text of tokens, and after how many of its bytes each ends; the space that is put before a text is none of it."""
        text = b"".join(self.pieces[n] for n in numbers)
        skip = int(self.spaced and text.startswith(b" "))
        return text[skip:], [max(end - skip, 0) for end in itertools.accumulate(len(self.pieces[n]) for n in numbers)]

    def by_bytes(self) -> dict[bytes, int]:
        """The token of each piece of text. Of a letter and the same one as a byte (`a` and `<0x61>`) the letter."""
        found: dict[bytes, int] = {}
        names = self.tokenizer.convert_ids_to_tokens(range(len(self.pieces)))
        for number, (name, piece) in enumerate(zip(names, self.pieces, strict=True)):
            if piece and (piece not in found or not _BYTE.fullmatch(name or "")):
                found[piece] = number
        return found


def common(student: TokenizerView, teacher: TokenizerView) -> tuple[list[int], list[int]]:
    """Numbers of the pieces that both have, of the student and of the teacher in the same order; the end of a text comes last."""
    mine, theirs = student.by_bytes(), teacher.by_bytes()
    kept = [piece for piece in mine if piece in theirs]
    return [mine[piece] for piece in kept] + [student.end], [theirs[piece] for piece in kept] + [teacher.end]


class Matched(NamedTuple):
    """A batch as the teacher reads it.

    Attributes:
        batch: the same rows and documents in the teacher's pieces, filled up behind their ends.
        at: [rows, length] int64, for each place of the student's rows the teacher's that has read the same; 0 where there is none.
        said: [rows, length] fp32, 1 where there is one.
    """

    batch: Batch
    at: Tensor
    said: Tensor


@dataclass(frozen=True)
class TokenAligner:
    """Batches of a student's pieces in its teacher's.

    Attributes:
        positions: of the teacher: of a longer text it reads the beginning.
    """

    student: TokenizerView
    teacher: TokenizerView
    positions: int

    @functools.cached_property
    def common(self) -> tuple[list[int], list[int]]:
        """`common` of the two."""
        return common(self.student, self.teacher)

    def __call__(self, batch: Batch) -> Matched:
        """On the device of the batch, whose tokens are read on the host."""
        import torch
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        if is_in_torch_dispatch_mode():  # a dry run's rows hold nothing: as many pieces as the student's
            return Matched(batch, torch.zeros_like(batch.tokens), torch.zeros_like(batch.tokens, dtype=torch.float32))
        (rows, length), device = batch.tokens.shape, batch.tokens.device
        tokens, trained = batch.tokens.tolist(), (batch.labels != -100).tolist()
        cut: list[list[list[int]]] = []
        at, said = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length)
        for row, documents in enumerate(batch.mask.documents or ((length,),) * rows):
            begin, filled, here = 0, 0, list[list[int]]()
            for size in documents:
                if any(trained[row][begin : begin + size]):
                    numbers, places = self._document(tokens[row][begin : begin + size])
                    for place, of in places:
                        at[row, begin + place], said[row, begin + place] = filled + of, 1.0
                    here.append(numbers)
                    filled += len(numbers)
                begin += size
            cut.append([numbers for numbers in here if numbers])
        return Matched(self._batch(batch, cut), at.to(device), said.to(device))

    def _document(self, numbers: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """A document in the teacher's pieces, and (place, the teacher's place) where both have read as much. None where its tokenizer changes the text."""
        text, own = self.student.ends(numbers)
        # What is cut off within a letter, at either end of a row, the teacher does not read.
        words = text.decode("utf-8", errors="ignore")
        begun = [self.teacher.begins] if self.teacher.begins is not None else []
        cut = (begun + self.teacher.tokenizer(words, add_special_tokens=False, verbose=False).input_ids)[
            : self.positions
        ]
        read, ends = self.teacher.ends(cut)
        if not text.startswith(read):
            return [], []
        of = {end: place for place, end in enumerate(ends)}
        special = [not self.student.pieces[n] for n in numbers]
        return cut, [
            (place, of[end]) for place, end in enumerate(own) if end in of and (place == 0 or not special[place])
        ]

    def _batch(self, batch: Batch, cut: Sequence[Sequence[Sequence[int]]]) -> Batch:
        import torch

        sizes = [sum(map(len, documents)) for documents in cut]
        length = -(-max(*sizes, 1) // _UNIT) * _UNIT
        tokens = torch.full((len(cut), length), self.teacher.end)
        positions, documents = torch.zeros_like(tokens), list[tuple[int, ...]]()
        for row, (parts, size) in enumerate(zip(cut, sizes, strict=True)):
            lengths = [*map(len, parts), *([length - size] if size < length else [])]
            tokens[row, :size] = torch.tensor([n for part in parts for n in part], dtype=torch.int64)
            positions[row] = torch.cat([torch.arange(n) for n in lengths])
            documents.append(tuple(lengths))
        device = batch.tokens.device
        return replace(
            batch,
            tokens=tokens.to(device),
            labels=torch.full_like(tokens, -100).to(device),
            positions=positions.to(device),
            mask=MaskSpec(documents=tuple(documents)),
            beside=(),
        )
