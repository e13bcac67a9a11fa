"""What stands between a row of a file and its tokens: text in pieces that are trained on or only read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from preheat.data.vision_inputs import ImageRef

__all__ = ["END", "PAD", "Document", "TextSpan"]

END, PAD = "<|end|>", "<|pad|>"
"""The special tokens of a tokenizer that is trained here."""


class TextSpan(NamedTuple):
    """Text whose tokens are all trained on, or all only read."""

    text: str
    trained: bool = True


class Document(NamedTuple):
    """One example: what is split, shuffled and packed as a whole.

    Attributes:
        sequences: each is read by itself; one, or two that are compared (what is preferred stands first).
        complete: the text has its special tokens already, as a chat template writes them; no beginning or end is added.
        label: the class of the example, or whether an answer was liked (1) or not (0); None: it has neither.
        where: file and row, for messages.
        images: that stand in it, in order.
        notes: (check, words) each, what `preflight` is to know of the row. A row that cannot be read has these and no sequence.
    """

    sequences: tuple[tuple[TextSpan, ...], ...]
    complete: bool = False
    label: int | None = None
    where: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    images: tuple[ImageRef, ...] = ()

    @classmethod
    def of(cls, text: str, prompt: str | None = None, where: str = "") -> Document:
        """Text to train on, after a prompt that is only read.

        Example:
            >>> Document.of("4", prompt="2 + 2 = ").text
            '2 + 2 = 4'
        """
        read = () if prompt is None else (TextSpan(prompt, False),)
        return cls(((*read, TextSpan(text)),), where=where)

    @property
    def text(self) -> str:
        """All of it, in order."""
        return "".join(piece.text for sequence in self.sequences for piece in sequence)

    @property
    def trained_text(self) -> str:
        """What is trained on."""
        return "".join(piece.text for sequence in self.sequences for piece in sequence if piece.trained)
