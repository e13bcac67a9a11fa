"""Aligns a teacher and a student with different tokenizers, by the bytes of the text that each token ends at.

If a student token and a teacher token end at the same byte, both have read the same text and predict what comes next.
Of the teacher's prediction the tokens of both vocabularies are compared, by their bytes; the end-of-text token is one
of them. All others count as one class, as do the student's. At other positions the teacher has no prediction.
The student's special tokens, including those of a chat template, are not shown to the teacher, which reads plain text.
Source: alignment by text and comparison over common tokens: Patino et al. 2025, GOLD
(huggingface.co/spaces/HuggingFaceH4/on-policy-distillation); that teachers with other tokenizers help:
Boizard et al. 2024 (arXiv:2402.12030).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from preheat.core import Batch, MaskSpec
from preheat.model_folder import beginning_tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenizerView", "Matched", "TokenAligner", "find_common_tokens"]

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNIT = 64
"""Rows of a teacher's batch are padded to a multiple of this, so that few shapes occur."""


@dataclass(frozen=True)
class TokenizerView:
    """A tokenizer with the bytes of its tokens.

    Attributes:
        tokenizer: a fast one of transformers.
        token_bytes: bytes of text of each token (`preheat.data.tokenizer.token_bytes`).
        end: the end-of-text token.
    """

    tokenizer: PreTrainedTokenizerBase
    token_bytes: Sequence[bytes]
    end: int

    @property
    def begins(self) -> int | None:
        """The token that it puts before every text, or None."""
        return next(iter(beginning_tokens(self.tokenizer)), None)

    @property
    def spaced(self) -> bool:
        """True if it puts a space before every text, as SentencePiece does."""
        numbers = self.tokenizer("a", add_special_tokens=False).input_ids
        return b"".join(self.token_bytes[n] for n in numbers).startswith(b" ")

    def ends(self, numbers: Sequence[int]) -> tuple[bytes, list[int]]:
        """The text of tokens, and the byte offset of each token's end, without the space that is put before a text."""
        text = b"".join(self.token_bytes[n] for n in numbers)
        # SentencePiece puts a space before every text, which is in the tokens but not in the text.
        skip = int(self.spaced and text.startswith(b" "))
        return text[skip:], [
            max(end - skip, 0) for end in itertools.accumulate(len(self.token_bytes[n]) for n in numbers)
        ]

    def by_bytes(self) -> dict[bytes, int]:
        """Bytes -> token. If a letter also exists as a byte token (`a` and `<0x61>`), the letter wins."""
        tokens: dict[bytes, int] = {}
        names = self.tokenizer.convert_ids_to_tokens(range(len(self.token_bytes)))
        for number, (name, piece) in enumerate(zip(names, self.token_bytes, strict=True)):
            if piece and (piece not in tokens or not _BYTE.fullmatch(name or "")):
                tokens[piece] = number
        return tokens


def find_common_tokens(student: TokenizerView, teacher: TokenizerView) -> tuple[list[int], list[int]]:
    """Token ids of the common vocabulary, of student and teacher in the same order; the end of text comes last."""
    mine, theirs = student.by_bytes(), teacher.by_bytes()
    shared = [piece for piece in mine if piece in theirs]
    # The end-of-text tokens correspond by their role, whatever their names.
    return [mine[piece] for piece in shared] + [student.end], [theirs[piece] for piece in shared] + [teacher.end]


class Matched(NamedTuple):
    """A batch for the teacher.

    Attributes:
        batch: the same rows and documents in the teacher's tokens, padded at their ends.
        at: [rows, length] int64, for each student position the teacher's that has read the same text; 0 if there is
            none.
        known: [rows, length] fp32, 1 if there is one.
    """

    batch: Batch
    at: Tensor
    known: Tensor


@dataclass(frozen=True)
class TokenAligner:
    """Converts batches of student tokens to batches of teacher tokens.

    Attributes:
        positions: context length of the teacher: longer texts are truncated.
    """

    student: TokenizerView
    teacher: TokenizerView
    positions: int

    @functools.cached_property
    def common(self) -> tuple[list[int], list[int]]:
        """The common vocabulary, as of `find_common_tokens`."""
        return find_common_tokens(self.student, self.teacher)

    def __call__(self, batch: Batch) -> Matched:
        """Aligns a batch, whose tokens are read on the host; the result is on the batch's device."""
        import torch
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        if is_in_torch_dispatch_mode():  # a dry run's rows are empty: assume as many tokens as the student's
            return Matched(batch, torch.zeros_like(batch.tokens), torch.zeros_like(batch.tokens, dtype=torch.float32))
        (rows, length), device = batch.tokens.shape, batch.tokens.device
        tokens, trained = batch.tokens.tolist(), (batch.labels != -100).tolist()
        cut: list[list[list[int]]] = []
        at, aligned = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length)
        # begin: the document's first position in the student's row; filled: tokens in the teacher's row before it.
        for row, documents in enumerate(batch.mask.documents or ((length,),) * rows):
            begin, filled, here = 0, 0, list[list[int]]()
            for size in documents:
                # The teacher reads only documents in which something is trained.
                if any(trained[row][begin : begin + size]):
                    numbers, places = self._align_document(tokens[row][begin : begin + size])
                    for place, of in places:
                        at[row, begin + place], aligned[row, begin + place] = filled + of, 1.0
                    here.append(numbers)
                    filled += len(numbers)
                begin += size
            cut.append([numbers for numbers in here if numbers])
        return Matched(self._align_batch(batch, cut), at.to(device), aligned.to(device))

    def _align_document(self, numbers: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """A document in the teacher's tokens, and (position, teacher position) pairs; empty if it alters the text."""
        text, own = self.student.ends(numbers)
        # Characters that the row cuts off at either end are not shown to the teacher.
        plain = text.decode("utf-8", errors="ignore")
        begun = [self.teacher.begins] if self.teacher.begins is not None else []
        cut = (begun + self.teacher.tokenizer(plain, add_special_tokens=False, verbose=False).input_ids)[
            : self.positions
        ]
        read, ends = self.teacher.ends(cut)
        # A tokenizer may normalize the text (Unicode forms, spaces): its byte
        # offsets would then be those of another text.
        if not text.startswith(read):
            return [], []
        # Tokens without text end where the token before them does: the last one has read the most.
        of = {end: place for place, end in enumerate(ends)}
        special = [not self.student.token_bytes[n] for n in numbers]
        return cut, [
            (place, of[end]) for place, end in enumerate(own) if end in of and (place == 0 or not special[place])
        ]

    def _align_batch(self, batch: Batch, cut: Sequence[Sequence[Sequence[int]]]) -> Batch:
        import torch

        sizes = [sum(map(len, documents)) for documents in cut]
        length = -(-max(*sizes, 1) // _UNIT) * _UNIT
        tokens = torch.full((len(cut), length), self.teacher.end)
        positions, documents = torch.zeros_like(tokens), list[tuple[int, ...]]()
        for row, (parts, size) in enumerate(zip(cut, sizes, strict=True)):
            # Padding is a document of its own, whose results nobody reads.
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
            aligned=(),
            padding=None,
        )
