"""What rows of data hold and objectives read. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["ExampleKind"]


class ExampleKind(NamedTuple):
    """What rows of data hold, and what an objective reads. The default is text, for next-token prediction.

    Attributes:
        kind: `text`; `pairs`: two sequences side by side, of which the first is preferred; `liked`: a sequence with an
            answer that was liked or not; `classes`: a sequence that is of one class.
        classes: how many of these there are.
    """

    kind: Literal["text", "pairs", "liked", "classes"] = "text"
    classes: int = 0
