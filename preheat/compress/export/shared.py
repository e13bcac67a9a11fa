"""What writers share: real tokens to compare logits over, the comparison with its threshold, and a folder that is whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat.errors import RunError
from preheat.models.adapter import plain_logits
from preheat.ops.adapters import shares
from preheat.ops.nf4 import PackedMap

__all__ = ["EXACT", "TOLERANCE", "Difference", "beside", "compare", "logits", "must_be_new", "refuse_beyond", "rows"]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Accepted by default: the largest difference of a logit as a share of the largest logit (or of 1, where that is smaller), by the
precision of the weights that are written. Both sides multiply in fp64 or fp32 (`logits`), so this is what merging and rounding did."""

_TEXTS = (  # of several kinds, so that no token of common use is left out
    "The ferry left at seven. By the time the fog lifted, nobody on deck could say which of the two islands lay behind us, and the "
    "captain, who had made the crossing for thirty years, kept looking at his watch rather than at the water.",
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n    return sum(values) / len(values)\n",
    "Question: A box holds 48 screws in rows of 6. How many rows are there after 3 boxes are opened?\nAnswer: 48 / 6 = 8, and 3 * 8 = 24.",
    '{"name": "Zoë", "städte": ["Köln", "Łódź", "東京"], "price": 1234.50, "done": false, "note": "naïve café, 50 % off…"}',
)
_LENGTH = 128
EXACT = 1 << 29
"""Weights that are held in fp64 for a moment: 4 GiB."""


def rows(tokenizer: Any, positions: int, extra: list[int]) -> list[Tensor]:
    """Real text as tokens, a row [1, n] each; `extra` tokens (those added to the model) follow in a row of their own."""
    limit = min(_LENGTH, positions or _LENGTH)
    found = [tokenizer.encode(text)[:limit] for text in _TEXTS]
    if extra:
        found.append([token for pair in zip(extra, found[0], strict=False) for token in pair][:limit])
    return [torch.tensor([row]) for row in found if row]


def logits(model: Any, tokens: list[Tensor]) -> list[Tensor]:
    """By transformers' own attention, on the CPU; the model stays behind in fp32, in place.

    Models of up to `EXACT` weights multiply in fp64, larger ones in fp32, where each product's own rounding shows too: at a logit
    of 16 that is about 2e-5, ten times what merging does.
    """
    exact = shares(model)[1] <= EXACT
    model.to(torch.float64 if exact else torch.float32)
    for module in model.modules():
        if isinstance(module, PackedMap):  # what 4 bits stand for is defined in fp32
            module.nf4_pairs, module.nf4_levels = module.nf4_pairs.float(), module.nf4_levels.float()
    found = [plain_logits(model, row).cpu() for row in tokens]
    model.float()
    return found


@dataclass(frozen=True)
class Difference:
    """How far two models' logits are apart.

    Attributes:
        largest: difference of a logit.
        scale: the largest logit of the first.
        tokens: over so many.
    """

    largest: float
    scale: float
    tokens: int

    def share(self) -> float:
        return self.largest / max(self.scale, 1.0)


def compare(wanted: list[Tensor], found: list[Tensor]) -> Difference:
    largest = max(
        float((a[..., : b.shape[-1]] - b[..., : a.shape[-1]]).abs().max()) for a, b in zip(wanted, found, strict=True)
    )
    return Difference(largest, max(float(row.abs().max()) for row in wanted), sum(row.shape[1] for row in wanted))


def refuse_beyond(difference: Difference, tolerance: float, what: str, hint: str) -> None:
    """Raises RunError where the difference exceeds the tolerance, or is no number."""
    if not difference.share() <= tolerance:
        raise RunError(
            f"{what}: its logits differ by up to {difference.largest:.2g} from those of the trained model (largest logit {difference.scale:.3g}), "
            f"more than the {tolerance:g} of it that is accepted; nothing was written; {hint}"
        )


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` only when all went well.

    Raises:
        RunError: `out` stands already, or cannot be written.
    """
    made = out.with_name(out.name + ".writing")
    try:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        yield made
        made.rename(out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def must_be_new(out: Path) -> None:
    if out.exists():
        raise RunError(f"{out}: stands there already; name another folder with --out")
