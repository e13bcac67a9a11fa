"""The micro-batches of a trainer: the largest that its data gives, and one in parts that fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

__all__ = ["MicroBatch", "find_largest_micro_batch", "is_preference", "split_micro_batch"]

_SAMPLED = 2000
"""Rows whose lengths are read of a dataset that cannot list them all at once."""
_UNKNOWN = 1024
"""Tokens of a sequence of streamed rows without a stated length, as for a file without one."""


def is_preference(trainer: Trainer) -> bool:
    """Returns True for TRL's DPOTrainer, whose rows are pairs."""
    return any(kind.__name__ == "DPOTrainer" for kind in type(trainer).__mro__)


@dataclass(frozen=True)
class MicroBatch:
    """The size of a micro-batch.

    Attributes:
        rows: sequences; with preferences pairs, of two sequences each.
        length: tokens of a sequence.
        padded: shorter sequences are padded, and masked.
    """

    rows: int
    length: int
    padded: bool


def find_largest_micro_batch(trainer: Trainer, loader: Any = None) -> MicroBatch:
    """Returns the size of a micro-batch of the trainer's longest rows, as its collator makes it.

    Args:
        loader: the trainer's dataloader; made here if there is none yet.

    Raises:
        RecipeError: its batches have no token ids.
    """
    size = trainer.args.train_batch_size
    if loader is None:
        loader = trainer.get_train_dataloader()
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):  # a stream
        return MicroBatch(size, getattr(trainer.args, "max_length", None) or _UNKNOWN, padded=size > 1)
    lengths = _read_lengths(dataset)
    chosen = sorted(lengths, key=lambda number: -lengths[number])[:size]
    chosen += chosen[:1] * (size - len(chosen))
    # Collators may draw random numbers, as for masks.
    with torch.random.fork_rng(devices=[]):
        batch = loader.collate_fn([dataset[number] for number in chosen])
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if tokens is None:
        raise RecipeError(f"{type(trainer).__name__}: its batches have no input_ids; language models are planned")
    rows, length = tokens.shape
    varied = rows > 1 and min(lengths.values()) < max(lengths.values())
    return MicroBatch(rows // 2 if is_preference(trainer) else rows, length, varied and "attention_mask" in batch)


def _read_lengths(dataset: Any) -> dict[int, int]:
    """Returns the lengths of the rows of a tokenized dataset, or of a sample of them; by the row's number."""
    from datasets import Dataset

    if isinstance(dataset, Dataset):
        import pyarrow.compute as pc

        table = dataset.with_format("arrow")[:]
        names = [name for name in table.column_names if name.endswith("_ids")]
        sizes = {name: pc.list_value_length(table[name]).to_pylist() for name in names}
        if sizes:
            return {n: _add_lengths({name: size[n] or 0 for name, size in sizes.items()}) for n in range(len(table))}
    step = max(len(dataset) // _SAMPLED, 1)
    return {number: _measure_row(dataset[number]) for number in range(0, len(dataset), step)}


def _measure_row(row: object) -> int:
    """Returns the length of a row: of its tokens, or of what its collator makes tokens of."""
    if not isinstance(row, Mapping):
        return len(row) if isinstance(row, Sized) else 0
    sizes = {name: len(value) for name, value in row.items() if isinstance(value, Sized)}
    tokens = {name: size for name, size in sizes.items() if name.endswith("_ids")}
    return _add_lengths(tokens) if tokens else sum(sizes.values())


def _add_lengths(sizes: Mapping[str, int]) -> int:
    """Returns the length of a row's sequence: its tokens, or its prompt's and the longer answer's."""
    if "input_ids" in sizes:
        return sizes["input_ids"]
    answers = [size for name, size in sizes.items() if not name.startswith("prompt")]
    return sizes.get("prompt_ids", 0) + max(answers, default=0)


def split_micro_batch(
    inputs: Mapping[str, Any], parts: int, *, pairs: bool
) -> Iterator[tuple[dict[str, Any], float]] | None:
    """Returns a micro-batch in parts of its rows, each with its share of the rows; None if it has too few.

    Args:
        inputs: tensors with rows first; others go into each part.
        pairs: the first half of the rows are the chosen answers, the second half the rejected ones.
    """
    rows = inputs["input_ids"].shape[0]
    units = rows // 2 if pairs else rows
    if units < parts:
        return None
    bounds = [units * part // parts for part in range(parts + 1)]
    return _iterate_parts(inputs, rows, bounds, pairs)


def _iterate_parts(
    inputs: Mapping[str, Any], rows: int, bounds: Sequence[int], pairs: bool
) -> Iterator[tuple[dict[str, Any], float]]:
    for first, end in itertools.pairwise(bounds):

        def cut(value: Any, first: int = first, end: int = end) -> Any:
            if not torch.is_tensor(value) or value.ndim == 0:
                return value
            if value.shape[0] == rows:
                return _cut_rows(value, first, end, pairs)
            # Log-probabilities of the reference have one entry a pair.
            return value[first:end] if pairs and value.shape[0] == rows // 2 else value

        yield {name: cut(value) for name, value in inputs.items()}, (end - first) / bounds[-1]


def _cut_rows(value: Tensor, first: int, end: int, pairs: bool) -> Tensor:
    if not pairs:
        return value[first:end]
    chosen, rejected = value.chunk(2)
    return torch.cat([chosen[first:end], rejected[first:end]])
