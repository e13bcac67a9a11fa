"""Incremental detokenization: yields complete characters only, and holds back text that may begin a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Ended", "IncrementalDetokenizer", "Written", "common_prefix_length"]

_CONTEXT = 8
"""Prompt tokens that precede the generated ones when decoding, since decoders treat the start of a text differently."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte-fallback token."""

Ended = Literal["stop token", "stop string", "length", "context"]


@dataclass
class Written:
    """Text generated for one prompt.

    Attributes:
        text: without special tokens, and without the stop string that ended it.
        tokens: as sampled, with the stop token that ended it.
        finish_reason: by a stop token, a stop string, the requested length, or the end of the model's context.
        compiled: decoding steps were compiled.
    """

    text: str
    tokens: list[int]
    finish_reason: Ended
    compiled: bool = field(default=False, compare=False)


class IncrementalDetokenizer:
    """Decodes one growing text; holds back incomplete characters and possible beginnings of stop strings."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        prompt: Sequence[int],
        stops: Sequence[str],
        tell: Callable[[str | None], None],
    ):
        self.tokenizer, self.stops, self.tell = tokenizer, stops, tell
        self.tokens: list[int] = []
        self.text, self.said = "", 0
        self.ended: Ended | None = None
        # Tokens are decoded together with preceding ones, since decoders treat the first word of a text differently.
        self._before, self._fresh = list(prompt[-_CONTEXT:]), list[int]()

    def add(self, token: int, last: bool) -> None:
        if self.ended is not None:  # finished rows are padded until all are finished
            return
        self.tokens.append(token)
        if last:
            self._end("stop token")
            return
        self._fresh.append(token)
        more = self._decode()
        # U+FFFD at the end marks bytes that are not a whole character yet; they wait for the next token.
        if not more.endswith("\ufffd"):
            self._before, self._fresh = self._fresh, []
            self._grow(more)

    def _decode(self) -> str:
        if self._before and all(map(self._is_byte, (self._before[-1], self._fresh[0]))):
            # Decoders drop a run of byte tokens if its end is not a character, so bytes are decoded without context.
            return self.tokenizer.decode(self._fresh, skip_special_tokens=True)
        # The new text is what the new tokens add to the decoding of the context: spaces depend on the token before.
        before, text = (
            self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (self._before, self._before + self._fresh)
        )
        return text[common_prefix_length(before, text) :]

    def _grow(self, more: str) -> None:
        # A stop string may begin in text that is already there, at most its own length before the end.
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += more
        # Of several stop strings the one that begins first ends the text.
        at = min((i for stop in self.stops if (i := self.text.find(stop, searched)) >= 0), default=None)
        if at is not None:
            self.text, self._fresh = self.text[:at], []
            self._end("stop string")
        else:
            self._say(len(self.text) - max((_count_begun(self.text, stop) for stop in self.stops), default=0))

    def _say(self, upto: int) -> None:
        if upto > self.said:
            self.tell(self.text[self.said : upto])
            self.said = upto

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "") is not None

    def _end(self, ended: Ended) -> None:
        self.ended = ended
        if self._fresh:  # bytes that are not a complete character
            self.text += self._decode()
        self._say(len(self.text))
        self.tell(None)

    def finish(self, cut: Ended) -> Written:
        """Flushes held-back text and returns the result."""
        if self.ended is None:
            self._end(cut)
        assert self.ended is not None
        return Written(self.text, self.tokens, self.ended)


def common_prefix_length(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _count_begun(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that begin `stop`.

    >>> _count_begun("one\\nUs", "\\nUser:"), _count_begun("one", "\\nUser:")
    (3, 0)
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
