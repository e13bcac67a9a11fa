"""The output of `preheat data`, and the counts of prepared data in a run's data.json. No torch."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

__all__ = [
    "AccountRecord",
    "Bar",
    "CleaningRecord",
    "DataCounts",
    "DataPreview",
    "DataSummary",
    "ExampleDocument",
    "ExampleSequence",
    "IN_EVALUATION_DATA",
    "Lengths",
    "OverlapRecord",
    "PackingRecord",
    "PersonalRecord",
    "RemovalRecord",
    "SideRecord",
    "SourceRecord",
]


IN_EVALUATION_DATA = "in evaluation data"
"""Reason of a row that shares words with evaluation data."""


class AccountRecord(TypedDict):
    """Rows by their use; see `preheat.data.row_account.RowAccount`."""

    read: int
    trained_on: int
    held_out: int
    dropped: dict[str, int]


class SourceRecord(AccountRecord):
    """A source: descriptions of it and of its layout, its weight, and its documents and tokens on its side."""

    source: str
    layout: str
    weight: float
    side: Literal["train", "validation"]
    documents: int
    tokens: int


class SideRecord(TypedDict):
    """The packed rows of training or validation.

    `trained`: labels; `efficiency`: fraction of the positions that hold text; `longer`: examples longer than a row;
    `cut`: examples that lose trained tokens. A streamed source has no `cut` and no `duplicates`.
    """

    documents: int
    tokens: int
    rows: int
    trained: int
    efficiency: float
    truncated: int
    no_room: int
    images: NotRequired[int]
    longer: int
    cut: NotRequired[int]
    duplicates: NotRequired[int]


class RemovalRecord(TypedDict):
    """A reason of `data.clean` to leave out rows, its threshold as text, and (place, message) of the first rows."""

    reason: str
    threshold: str
    rows: int
    examples: list[list[str]]


class PersonalRecord(TypedDict):
    """Rows with personal data of a kind, its occurrences, and the places of the first rows."""

    rows: int
    count: int
    examples: list[str]


class CleaningRecord(TypedDict):
    """Results of `data.clean`.

    `removed`: every active reason, with 0 rows too, in the order in which they are examined: a row counts for the first
    one. `personal`: by kind; None if it is not searched for. `short_texts`: texts of the evaluation data, of
    `evaluation_texts`, that are too short to be found.
    """

    read: int
    removed: list[RemovalRecord]
    personal: dict[str, PersonalRecord] | None
    personal_data: Literal["keep", "count", "drop", "mask"]
    short_texts: int
    evaluation_texts: int


class OverlapRecord(TypedDict):
    """Rows that share words with evaluation data, of those `read`; `texts`: its texts, `short`: too short to be found.

    `examples`: (place of the row, place in the evaluation data, shared words).
    """

    name: str
    texts: int
    short: int
    read: int
    rows: int
    examples: list[list[str]]


class DataCounts(TypedDict, total=False):
    """Counts of prepared data; of a streamed source only `validation` and `beginning`, the account of its first rows.

    `repeated`: a source has a weight above 1; `cleaning`: only with `data.clean`.
    """

    read: int
    dropped: dict[str, int]
    sources: list[SourceRecord]
    repeated: bool
    train: SideRecord
    validation: SideRecord
    beginning: AccountRecord
    cleaning: CleaningRecord


class DataSummary(TypedDict):
    """The keys of `run_records.DataRecord`, as `preheat data` prints them."""

    source: str
    layout: str
    layout_kind: str
    layout_reason: str
    template: str | None
    classes: list[str]
    counts: DataCounts
    preflight: list[str]
    fingerprint: str


Bar = TypedDict("Bar", {"from": int, "to": int | None, "count": int})
"""A bar of the histogram of lengths; `to` is None if it is open."""


class Lengths(TypedDict):
    """Statistics of the tokens per example."""

    examples: int
    mean: float
    median: float
    p95: float
    longest: int
    longer_than_a_row: int
    bars: list[Bar]


class PackingRecord(SideRecord):
    """The training rows, how they are packed, and their length."""

    how: Literal["stream", "whole"]
    length: int


class ExampleDocument(TypedDict):
    """A document of a packed row: its file and row, and (text, trained, tokens) of each of its spans."""

    where: str
    spans: list[tuple[str, bool, int]]
    tokens: int
    trained: int
    label: str | int | None


class ExampleSequence(TypedDict):
    """A packed row; `compared`: its documents alternate between chosen and rejected answers."""

    row: int
    documents: list[ExampleDocument]
    padding: int
    compared: bool


class DataPreview(DataSummary):
    """The output of `preheat data`; `name`: of the recipe."""

    blocked: list[str]
    lengths: Lengths
    packing: PackingRecord
    examples: list[ExampleSequence]
    name: str
    overlaps: NotRequired[list[OverlapRecord]]
