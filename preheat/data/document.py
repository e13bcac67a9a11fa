"""Documents: text spans that are trained on or only read, as the step between a row of a file and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from preheat.data.vision_inputs import ImageRef

__all__ = ["END", "PAD", "Document", "TextSpan"]

END, PAD = "<|end|>", "<|pad|>"
"""Special tokens of the tokenizers that preheat trains."""


class TextSpan(NamedTuple):
    """Text whose tokens are either all trained on or all only read."""

    text: str
    trained: bool = True


class Document(NamedTuple):
    """One example, which is split, shuffled and packed as a whole.

    Attributes:
        sequences: one, or two that are compared, the preferred one first; each is read on its own.
        complete: the text already has its special tokens, from a chat template; no beginning or end is added.
        label: class of the example, or 1 for a liked and 0 for a disliked answer; None for neither.
        where: file and row, for messages.
        images: images of the document, in order.
        removed: reason for which `data.clean` leaves the row out; it then has no sequences.
        notes: (check, message) pairs for `preflight`. A row that cannot be read has notes and no sequences.
    """

    sequences: tuple[tuple[TextSpan, ...], ...]
    complete: bool = False
    label: int | None = None
    where: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    images: tuple[ImageRef, ...] = ()
    removed: str = ""

    @classmethod
    def of(cls, text: str, prompt: str | None = None, where: str = "") -> Document:
        """Returns a document of text to train on, after a prompt that is only read.

        Example:
            >>> Document.of("4", prompt="2 + 2 = ").text
            '2 + 2 = 4'
        """
        # A prompt is context: the model reads it, but its tokens are no labels.
        read = () if prompt is None else (TextSpan(prompt, False),)
        return cls(((*read, TextSpan(text)),), where=where)

    @property
    def text(self) -> str:
        """The text of all spans, in order."""
        return "".join(piece.text for sequence in self.sequences for piece in sequence)

    @property
    def trained_text(self) -> str:
        """The text of the trained spans."""
        return "".join(piece.text for sequence in self.sequences for piece in sequence if piece.trained)

    @property
    def has_target(self) -> bool:
        """True if there is text to train on, or a label: documents of classes have no trained text."""
        return bool(self.trained_text.strip()) or self.label is not None
