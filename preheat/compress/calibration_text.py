"""Text for compression: rows to calibrate with, and held-out rows to measure on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.errors import DataError, RecipeError
from preheat.inference.load import LoadedModel

if TYPE_CHECKING:
    from preheat.data import Rows
    from preheat.data.packing import EvaluationRows, RowData

__all__ = ["RowSubset", "Texts", "find_texts"]

_SHARE = 5
"""Every fifth row of a text given by --data is held out for measuring."""


@dataclass
class Texts:
    """Calibration rows and held-out rows.

    Attributes:
        calibration: [1, length] tokens each, without padding: it would count in the statistics of activations.
        held_out: rows for an evaluation.
        description: a description of their source.
    """

    calibration: list[Tensor]
    held_out: EvaluationRows
    description: str


def find_texts(opened: LoadedModel, data: str | None, *, rows: int, length: int | None) -> Texts:
    """Returns rows of a run's own data, or of a given text.

    Args:
        data: a file, folder or source. None: calibrates on the run's training rows and measures on its validation rows.
        rows: maximum number of calibration sequences, spread evenly over the text.
        length: tokens per row; None: the run's, or 512.

    Raises:
        RecipeError: no text is given for a model's folder, or for a run whose data is a stream.
        DataError: the text cannot be read, or is too short to hold rows out.
    """
    from preheat.data import Rows, prepare
    from preheat.evaluation.perplexity import read_text_rows

    recipe, positions = opened.recipe, opened.build.model.positions
    # A model without a limit of positions has 0.
    cut = min(length or recipe.batch.seq_len, positions or (1 << 30))
    if data is not None:
        all_of = read_text_rows(
            recipe.data, data, knob="--data", length=cut, seed=recipe.seed, tokenizer=opened.tokenizer_folder
        )
        return _split_texts(all_of, rows, cut, f"{Path(data).name}: every {_SHARE}th sequence held out")
    if opened.step is None:
        raise RecipeError("--data: is needed with a model's folder: name the text to calibrate with and to measure on")
    # The run's own preparation, so that validation rows are those that it never trained on.
    prepared = prepare(
        replace(recipe.data, tokenizer=opened.tokenizer_folder),
        length=cut,
        seed=recipe.seed,
        add_tokens=recipe.model.add_tokens,
    )
    # A stream has no rows by number to choose from.
    if not isinstance(prepared.train, Rows):
        raise RecipeError("--data: is needed, since the run's data is read as a stream: name a text to calibrate with")
    description = f"the run's own data ({', '.join(Path(str(part.source)).name for part, _ in recipe.data.parts())})"
    if prepared.validation is None or not len(prepared.validation):
        return _split_texts(
            prepared.train,
            rows,
            cut,
            f"{description}, which has no validation data: every {_SHARE}th training sequence held out",
        )
    chosen = _spread_indices(len(prepared.train), rows)
    return Texts(
        _cut_tokens(prepared.train, chosen),
        prepared.validation,
        f"{description}: training sequences, measured on validation sequences",
    )


def _split_texts(all_of: Rows, rows: int, cut: int, description: str) -> Texts:
    # Spread over the text, because its end may differ from its beginning.
    held_out = [n for n in range(len(all_of)) if n % _SHARE == _SHARE - 1]
    others = [n for n in range(len(all_of)) if n % _SHARE != _SHARE - 1]
    if not held_out:
        raise DataError(
            f"--data: is {len(all_of)} sequences of {cut} tokens, of which none can be held out; name more text, "
            "or lower --length"
        )
    return Texts(
        _cut_tokens(all_of, [others[n] for n in _spread_indices(len(others), rows)]),
        RowSubset(all_of, held_out),
        description,
    )


class RowSubset:
    """A subset of rows by index, with the part of the interface of `Rows` that an evaluation reads."""

    def __init__(self, rows: EvaluationRows, numbers: Sequence[int]):
        self.rows, self.numbers, self.truncated, self.no_room = rows, numbers, rows.truncated, rows.no_room

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, index: int) -> RowData:
        return self.rows.row(self.numbers[index])


def _spread_indices(total: int, limit: int) -> list[int]:
    from preheat.data.loader import choose_evaluation_rows

    return list(choose_evaluation_rows(total, limit))


def _cut_tokens(rows: Rows, numbers: Sequence[int]) -> list[Tensor]:
    read = [rows.row(n) for n in numbers]
    real = [row.tokens if row.padding is None else row.tokens[~row.padding] for row in read]
    # (1, length); rows of one length follow each other, since they are computed as batches.
    return [torch.from_numpy(tokens)[None] for tokens in sorted(real, key=len, reverse=True)]
