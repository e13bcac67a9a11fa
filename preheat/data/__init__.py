"""What the model reads: source -> documents -> tokens (cached) -> packed rows -> batches. Importing this imports no torch.

sources.py                 where documents come from: standard library, files, folders, `datasets`
rows/file_readers.py       text, JSONL, JSON, CSV and Parquet, with the file and the row in every error
rows/example_kinds.py      what rows hold and objectives read: text, pairs, liked answers or classes; whether the two fit
rows/schemas.py            the layouts by name, and their fields
rows/formats.py            what the fields of a row mean, recognised or stated, and the document that it becomes
chat/messages.py           the field's ways to write a conversation as messages
chat/template.py           chat templates: messages as text, and what of it the assistant wrote (marked, or proven by rendering)
chat/builtin_templates.py  the templates that are known by name
tokenizer.py               the model's tokenizer, or a byte-level BPE trained here
cache.py                   folders keyed by content; a damaged one is built again
split.py                   training or validation: a document's content decides
preflight.py               the checks, each with a name: what blocks and what is told
preflight_corpus.py        what the checks find once all is read
tokenize_corpus.py         documents to tokens in files; what is killed goes on where it stopped
preparation.py             all of it together: the token cache, the rows, and what was counted
preview.py                 prepared data as figures and text, for `preheat data`
packing.py                 rows: tokens, labels, positions and document lengths
streaming.py               rows packed while the source is read
loader.py                  the order of rows, and batches of torch tensors
difficulty.py              scores of rows, and the order that begins with the easy ones
ngram_baselines.py         unigram and bigram losses to compare a model with
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preheat.data.loader import batches, evaluation_batches
    from preheat.data.ngram_baselines import baselines
    from preheat.data.packing import RowData, Rows
    from preheat.data.preparation import PreparedData, prepare
    from preheat.data.streaming import StreamRows

__all__ = ["PreparedData", "RowData", "Rows", "StreamRows", "baselines", "batches", "evaluation_batches", "prepare"]

_HOME = {
    "PreparedData": "preparation",
    "prepare": "preparation",
    "RowData": "packing",
    "Rows": "packing",
    "StreamRows": "streaming",
    "batches": "loader",
    "evaluation_batches": "loader",
    "baselines": "ngram_baselines",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
