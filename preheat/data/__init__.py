"""Data pipeline: sources -> documents -> tokens (cached) -> packed rows -> batches. Importing this imports no torch.

sources.py                 sources of documents: standard library, files, folders, `datasets`
rows/file_readers.py       text, JSONL, JSON, CSV and Parquet, with the file and the row in every error
rows/example_kinds.py      kinds of examples (text, pairs, liked answers, classes) and the check against the objective
rows/schemas.py            the layouts by name, and their fields
rows/formats.py            detects the layout of rows and turns each row into a document
chat/messages.py           reads the common formats of conversations as messages
chat/template.py           renders messages with chat templates and finds the assistant's text
chat/builtin_templates.py  the built-in chat templates
tokenizer.py               the model's tokenizer, or a byte-level BPE trained here
cache.py                   folders keyed by content; damaged ones are rebuilt
split.py                   train/validation split by content hash
cleaning/                  duplicates, quality rules, overlap with evaluation data, personal data
row_account.py             what became of each row: trained on, held out, left out for a reason
preflight.py               named checks of the data, which block training or warn
preflight_corpus.py        checks that need the whole corpus
tokenize_corpus.py         tokenizes documents into files; resumes after a kill
preparation.py             runs the pipeline: token cache, packed rows, counts
preview.py                 statistics and examples of prepared data, for `preheat data`
packing.py                 rows: tokens, labels, positions and document lengths
streaming.py               packs rows while the source is read
loader.py                  order of rows, and batches of torch tensors
difficulty.py              difficulty scores of rows, and the easy-to-hard order
ngram_baselines.py         unigram and bigram losses as baselines
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.data.loader import batches, evaluation_batches
    from preheat.data.ngram_baselines import compute_baselines
    from preheat.data.packing import RowData, Rows
    from preheat.data.preparation import PreparedData, prepare
    from preheat.data.streaming import StreamRows

__all__ = [
    "PreparedData",
    "RowData",
    "Rows",
    "StreamRows",
    "compute_baselines",
    "batches",
    "evaluation_batches",
    "prepare",
]

_HOME = {
    "PreparedData": "preparation",
    "prepare": "preparation",
    "RowData": "packing",
    "Rows": "packing",
    "StreamRows": "streaming",
    "batches": "loader",
    "evaluation_batches": "loader",
    "compute_baselines": "ngram_baselines",
}


# PEP 562: a submodule, and torch with the loader, is imported only once one of its names is used.
def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    # The next use finds the name without this function.
    globals()[name] = value
    return value
