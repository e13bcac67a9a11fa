"""The account of a source's rows: trained on, held out for validation, or left out for a reason. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.core.data_record import AccountRecord, DataCounts

__all__ = ["LeftOut", "RowAccount"]


class LeftOut(StrEnum):
    """Reasons to leave out a row, besides the checks of `preflight.CHECKS` and the rules of `data.clean`."""

    EMPTY = "empty"
    UNTRAINED = "untrained"
    IN_VALIDATION = "also in validation"
    NO_ROOM = "no room for an answer"
    """The example has no trained token within `batch.seq_len`: its prompt fills a sequence."""
    INCOMPLETE_SEQUENCE = "in the last, incomplete sequence"
    """Running text whose tokens do not fill the last sequence."""
    NOT_DRAWN = "not drawn (weight below 1)"


@dataclass(frozen=True)
class RowAccount:
    """Counts the rows that were read by their use: every row counts once, also if a weight repeats it or it is a pair.

    Attributes:
        read: rows that were read.
        trained_on, held_out: rows of the training and of the validation sequences.
        left_out: {reason: rows}; a reason is a `LeftOut`, the name of a check, or a rule of `data.clean`.

    Example:
        >>> account = RowAccount(4, trained_on=2, held_out=0, left_out={LeftOut.NO_ROOM: 2})
        >>> account.text()
        '4 read, 2 to train on, 0 to validate on; left out: 2 no room for an answer'
    """

    read: int
    trained_on: int
    held_out: int
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        accounted = self.trained_on + self.held_out + sum(self.left_out.values())
        assert accounted == self.read, f"{self.read} rows were read, {accounted} are accounted for: {self}"

    def __add__(self, other: RowAccount) -> RowAccount:
        return RowAccount(
            self.read + other.read,
            self.trained_on + other.trained_on,
            self.held_out + other.held_out,
            dict(Counter(self.left_out) + Counter(other.left_out)),
        )

    @classmethod
    def of(cls, values: AccountRecord) -> RowAccount:
        """Returns the account that `record` wrote into `values`."""
        return cls(values["read"], values["trained_on"], values["held_out"], values["dropped"])

    @classmethod
    def of_counts(cls, counts: DataCounts) -> RowAccount:
        """Returns the account of all sources in the counts of `preparation.PreparedData`."""
        train, validation = counts["train"]["documents"], counts["validation"]["documents"]
        return cls(counts["read"], train, validation, counts["dropped"])

    def record(self) -> AccountRecord:
        """Returns the account as plain values, for data.json and `preheat data --json`."""
        dropped = {str(reason): count for reason, count in self.left_out.items()}
        return {"read": self.read, "trained_on": self.trained_on, "held_out": self.held_out, "dropped": dropped}

    def text(self) -> str:
        """Returns the account in one line."""
        left = self.left_out_text()
        split = f"{self.trained_on:,} to train on, {self.held_out:,} to validate on"
        return f"{self.read:,} read, {split}; " + (f"left out: {left}" if left else "none left out")

    def left_out_text(self) -> str:
        """Returns the rows left out by reason; '' if there are none."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
