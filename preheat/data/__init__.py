"""What the model reads: source -> documents -> tokens (cached) -> packed rows -> batches. Importing this imports no torch.

sources.py    where documents come from: standard library, files, folders, `datasets`
files.py      text, JSONL, JSON and Parquet, with the file and the row in every error
tokenizer.py  the model's tokenizer, or a byte-level BPE trained here
cache.py      folders keyed by content; a damaged one is built again
split.py      training or validation: a document's content decides
preparing.py  the token cache, and what was counted
packing.py    rows: tokens, labels, positions and document lengths
streaming.py  rows packed while the source is read
loader.py     the order of rows, and batches of torch tensors
kinds.py      what rows hold and objectives read: text, pairs, liked answers or classes
difficulty.py scores of rows, and the order that begins with the easy ones
ngrams.py     unigram and bigram losses to compare a model with
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preheat.data.loader import batches, evaluation_batches
    from preheat.data.ngrams import baselines
    from preheat.data.packing import RowData, Rows
    from preheat.data.preparing import Prepared, prepare
    from preheat.data.streaming import StreamRows

__all__ = ["Prepared", "RowData", "Rows", "StreamRows", "baselines", "batches", "evaluation_batches", "prepare"]

_HOME = {
    "Prepared": "preparing",
    "prepare": "preparing",
    "RowData": "packing",
    "Rows": "packing",
    "StreamRows": "streaming",
    "batches": "loader",
    "evaluation_batches": "loader",
    "baselines": "ngrams",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
