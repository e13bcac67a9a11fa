"""The kind of examples that data rows contain and objectives require. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["ExampleKind"]


class ExampleKind(NamedTuple):
    """The kind of examples in the data rows or required by an objective. Default: text, for next-token prediction.

    Attributes:
        kind: `text`; `pairs`: two consecutive sequences, the first one preferred; `desirable`: a sequence with an
            answer that was liked or not; `classes`: a sequence with a class label.
        classes: number of classes.
    """

    kind: Literal["text", "pairs", "desirable", "classes"] = "text"
    classes: int = 0
