"""Results of `preheat export`. No torch.

The writers return them; the command and the model cards read them. Their JSON is what `preheat export --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from preheat.core.json_types import Omitted, Record

__all__ = ["Comparison", "ExportResult", "FolderResult", "HeldOutPerplexity", "LlamaCppComparison", "Perplexity"]


@dataclass(frozen=True)
class Comparison:
    """Logits of an export, read back, compared with those of the original model.

    Attributes:
        tolerance: accepted difference, as a fraction of the largest logit.
        tokens: compared positions.
    """

    max_logit_difference: float
    mean_logit_difference: float
    largest_logit: float
    top1_agreement: float
    tolerance: float
    tokens: int


@dataclass(frozen=True)
class Perplexity(Record):
    """A perplexity; None for a classifier.

    Attributes:
        computes_in: precision of the run, if its own evaluation measured it; None: that of the exported file.
    """

    perplexity: float | None
    computes_in: Omitted[str] = None


@dataclass(frozen=True)
class HeldOutPerplexity:
    """Perplexities before and after an export.

    Attributes:
        perplexity_of: description of the text.
        unfinished: a note if the model is not the end of its run; else ''.
        step: of the run's checkpoint; None of a folder.
    """

    before: Perplexity
    after: Perplexity
    perplexity_of: str
    unfinished: str
    step: int | None


@dataclass(frozen=True)
class LlamaCppComparison:
    """Logarithms of probabilities by llama.cpp, compared with those of the original model.

    Attributes:
        version: the package and its version.
        places: compared positions.
    """

    version: str
    max_logprob_difference: float
    mean_logprob_difference: float
    top1_agreement: float
    places: int


@dataclass(frozen=True, kw_only=True)
class _ExportFiles(Record):
    """The files of an export. Keys of other formats are left out.

    Attributes:
        path: folder of the export.
        file: gguf: name of the file.
        bytes: size of its weights; of a Hugging Face or vLLM folder and of an adapter, of all files.
        dtype: precision of the weights; None for an adapter.
        types: gguf: {type: number of tensors}.
        length: executorch: positions of the cache.
        base: peft: the model that the adapter belongs to.
        adapted: peft: number of adapted maps.
        merged: number of merged adapters; None for an adapter.
        read_by: the library that read it back.
        llama_cpp: gguf: None if llama.cpp is not installed.
    """

    path: str
    file: Omitted[str] = None
    bytes: int
    dtype: Omitted[str] = None
    types: Omitted[Mapping[str, int]] = None
    length: Omitted[int] = None
    base: Omitted[str] = None
    adapted: Omitted[int] = None
    merged: Omitted[int] = None
    read_by: str
    llama_cpp: Omitted[LlamaCppComparison] = None


@dataclass(frozen=True, kw_only=True)
class ExportResult(HeldOutPerplexity, Comparison, _ExportFiles):
    """An export and its comparison with the original model.

    Attributes:
        note: messages for the user.
    """

    note: str


@dataclass(frozen=True, kw_only=True)
class FolderResult(ExportResult):
    """A written Hugging Face folder.

    Attributes:
        tokens_that_end: tokens that end a text.
        turn_ends: the token that ends an assistant's turn, if there is one.
        chats: True if the model was trained on chats.
        string_ends: the string that ends an answer if no token does; else ''.
    """

    tokens_that_end: tuple[int, ...]
    turn_ends: int | None
    chats: bool
    string_ends: str
