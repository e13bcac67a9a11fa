"""What writers share: real tokens to compare logits over, and the comparison with its threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat.errors import RunError
from preheat.models.hf import plain_logits
from preheat.ops.adapters.peft_layers import shares
from preheat.ops.quantization.nf4 import PackedMap

__all__ = [
    "BOUNDS",
    "EXACT",
    "TEXTS",
    "TOLERANCE",
    "Bound",
    "Difference",
    "bound_of",
    "compare",
    "figures",
    "logits",
    "refuse_beyond",
    "rows",
    "size",
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Accepted by default: the largest difference of a logit as a share of the largest logit (or of 1, where that is smaller), by the
precision of the weights that are written. Both sides multiply in fp64 or fp32 (`logits`), so this is what merging and rounding did."""


@dataclass(frozen=True)
class Bound:
    """How far an export may be from the model that it came from.

    Attributes:
        largest: difference of a logit, as a share of the largest logit (of 1, where that is smaller).
        mean: difference of the logits, as the same share.
        agreement: share of positions, at least, whose most likely token is the same.
        perplexity: change either way over the compared rows, as a share of the perplexity before.
    """

    largest: float
    mean: float = math.inf
    agreement: float = 0.0
    perplexity: float = math.inf


BOUNDS: dict[str, dict[str, Bound]] = {
    # Weights rounded, products in fp32 or fp64. A block of 32 normal values has its largest at 2.2 standard deviations, so rounding in
    # steps of largest / 127 (q8_0) leaves 0.5 % of a weight, in steps of largest / 8 (q4_0) 8 %; a bfloat16 has 0.17 %.
    "gguf": {
        "f32": Bound(1e-5, 1e-6, 0.99, 1e-4),
        "f16": Bound(1e-2, 1e-3, 0.97, 2e-3),
        "bf16": Bound(5e-2, 1e-2, 0.9, 1e-2),
        "q8_0": Bound(0.1, 0.02, 0.85, 0.02),
        "q6_k": Bound(0.2, 0.04, 0.8, 0.04),
        "q5_k_m": Bound(0.4, 0.06, 0.7, 0.1),
        "q4_k_m": Bound(0.6, 0.08, 0.6, 0.2),
        "q4_0": Bound(0.75, 0.1, 0.5, 0.3),
    },
    # llama.cpp itself: a cache of keys and values in f16 whatever the file's type, and with q8_0 and q4_0 activations in 8 bits. Over
    # logarithms of probabilities.
    "llama.cpp": {
        "f32": Bound(2e-2, 4e-3, 0.95),
        "f16": Bound(2e-2, 4e-3, 0.95),
        "bf16": Bound(8e-2, 2e-2, 0.85),
        "q8_0": Bound(0.15, 0.03, 0.8),
        "q6_k": Bound(0.25, 0.05, 0.75),
        "q5_k_m": Bound(0.45, 0.07, 0.65),
        "q4_k_m": Bound(0.65, 0.1, 0.55),
        "q4_0": Bound(0.8, 0.12, 0.45),
    },
    # Another runtime's products in fp32: a few units in the seventh place, summed over layers. int8: weights by row, activations by tensor.
    "onnx": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "int8": Bound(0.4, 0.05, 0.75, 0.1),
    },
    # 8da4w: weights in 4 bits by groups of 32, activations in 8 bits by token.
    "executorch": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "8da4w": Bound(0.75, 0.1, 0.5, 0.3),
    },
    # bfloat16: activations are rounded, too.
    "aoti": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "bfloat16": Bound(0.1, 0.02, 0.85, 0.02),
    },
    # Plain weights with symmetric scales by group of 32 (int4) or by row (int8), as vLLM reads them.
    "vllm": {
        "int8": Bound(0.1, 0.02, 0.85, 0.02),
        "int4": Bound(0.75, 0.1, 0.5, 0.3),
    },
    # Weights rounded, products in fp32.
    "torchchat": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "bfloat16": Bound(5e-2, 1e-2, 0.9, 1e-2),
        "float16": Bound(1e-2, 1e-3, 0.97, 2e-3),
    },
    # Image classifiers, over calibration images: weights by channel and activations by tensor in 8 bits, whose ranges are calibrated.
    "vision": {
        "float32": Bound(1e-4, 1e-5, 0.99),
        "int8": Bound(0.5, 0.1, 0.8),
    },
}
"""What is accepted by default, by format and `--dtype`; set before the writers were written. `--tolerance` takes the place of all four."""

TEXTS = (  # of several kinds, so that no token of common use is left out
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
    found = [tokenizer.encode(text)[:limit] for text in TEXTS]
    if extra:
        found.append([token for pair in zip(extra, found[0], strict=False) for token in pair][:limit])
    return [torch.tensor([row]) for row in found if row]


def code_in(folder: Path) -> list[str]:
    """What there is to say of Python code in a folder that was written: transformers copies that of the model it came from."""
    names = sorted(file.name for file in folder.glob("*.py"))
    return (
        [
            f"the folder carries Python code of the model it came from ({', '.join(names)}), which runs for whoever opens it with trust_remote_code=True"
        ]
        if names
        else []
    )


def logits(model: Any, tokens: list[Tensor], seen: Sequence[Mapping[str, Tensor]] = ()) -> list[Tensor]:
    """By transformers' own attention, on the CPU; the model stays behind in fp32, in place.

    Models of up to `EXACT` weights multiply in fp64, larger ones in fp32, where each product's own rounding shows too: at a logit
    of 16 that is about 2e-5, ten times what merging does.

    Args:
        seen: further rows with images in them: arguments of transformers' forward.
    """
    exact = shares(model)[1] <= EXACT
    model.to(torch.float64 if exact else torch.float32)
    for module in model.modules():
        if isinstance(module, PackedMap):  # what 4 bits stand for is defined in fp32
            module.nf4_pairs, module.nf4_levels = module.nf4_pairs.float(), module.nf4_levels.float()
    found = [plain_logits(model, row).cpu() for row in tokens]
    found += [
        plain_logits(model, row["input_ids"], {k: v for k, v in row.items() if k != "input_ids"}).cpu() for row in seen
    ]
    model.to(torch.float32)
    return found


@dataclass(frozen=True)
class Difference:
    """How far two models' logits are apart.

    Attributes:
        largest: difference of a logit.
        scale: the largest logit of the first.
        tokens: over so many.
        mean: difference of a logit.
        agreement: share of positions whose most likely token is the same.
        perplexity: of the first and of the second; None where rows were not given, or have no next token.
        predicted: tokens that it is of.
    """

    largest: float
    scale: float
    tokens: int
    mean: float
    agreement: float
    perplexity: tuple[float, float] | None = None
    predicted: int = 0

    def share(self) -> float:
        return self.largest / max(self.scale, 1.0)

    def beyond(self, bound: Bound) -> str:
        """What exceeds the bound, in words; empty when nothing does. What is no number exceeds it."""
        unit, those = max(self.scale, 1.0), "from those of the trained model"
        if not self.share() <= bound.largest:
            return f"by up to {self.largest:.2g} {those} (largest logit {self.scale:.3g}), more than the {bound.largest:g} of it that is accepted"
        if not self.mean / unit <= bound.mean:
            return f"by {self.mean:.2g} in the mean {those} (largest logit {self.scale:.3g}), more than the {bound.mean:g} of it that is accepted"
        if not self.agreement >= bound.agreement:
            return f"{those} so that {self.agreement:.1%} of positions have the same most likely token, less than the {bound.agreement:.0%} that is accepted"
        if self.perplexity is not None:
            before, after = self.perplexity
            if not abs(after / before - 1) <= bound.perplexity:
                return f"{those} so that perplexity goes from {before:.4g} to {after:.4g}, by more than the {bound.perplexity:.2g} of it that is accepted"
        return ""


def compare(wanted: list[Tensor], found: list[Tensor], tokens: Sequence[Tensor] | None = None) -> Difference:
    """Compares logits [rows, length, vocabulary], list by list; where one has more pieces (padding of a vocabulary), the rest is left out.

    Args:
        tokens: what the logits were made from, [rows, length] each, for the perplexity.
    """
    pairs = [
        (a[..., : b.shape[-1]].double(), b[..., : a.shape[-1]].double()) for a, b in zip(wanted, found, strict=True)
    ]
    apart = [(a - b).abs() for a, b in pairs]
    places = sum(a[..., 0].numel() for a in apart)
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    return Difference(
        largest=max(float(a.max()) for a in apart),
        scale=max(float(row.abs().max()) for row in wanted),
        tokens=places,
        mean=sum(float(a.sum()) for a in apart) / sum(a.numel() for a in apart),
        agreement=same / places,
        perplexity=None if tokens is None else _perplexities(pairs, tokens),
        predicted=sum(row[:, 1:].numel() for row in tokens or ()),
    )


def _perplexities(pairs: list[tuple[Tensor, Tensor]], tokens: Sequence[Tensor]) -> tuple[float, float] | None:
    count = sum(row[:, 1:].numel() for row in tokens)
    if not count:
        return None
    sums = [0.0, 0.0]
    for both, row in zip(pairs, tokens, strict=True):
        for side, logits in enumerate(both):
            sums[side] += float(
                torch.nn.functional.cross_entropy(
                    logits[:, :-1].transpose(1, 2), row[:, 1:].to(logits.device), reduction="sum"
                )
            )
    return math.exp(sums[0] / count), math.exp(sums[1] / count)


def bound_of(format: str, dtype: str, tolerance: float | None) -> Bound:
    """The format's bound for a dtype; with `--tolerance`, that one alone."""
    return BOUNDS[format][dtype] if tolerance is None else Bound(tolerance)


def figures(difference: Difference, bound: Bound) -> dict[str, Any]:
    """What a writer says of its comparison; `Held.told` has the perplexities."""
    return {
        "max_logit_difference": difference.largest,
        "mean_logit_difference": difference.mean,
        "largest_logit": difference.scale,
        "top1_agreement": difference.agreement,
        "tolerance": bound.largest,
        "tokens": difference.tokens,
    }


def refuse_beyond(difference: Difference, bound: Bound, what: str, hint: str) -> None:
    """Raises RunError where the difference exceeds the bound, or is no number."""
    if words := difference.beyond(bound):
        raise RunError(f"{what}: its logits differ {words}; nothing was written; {hint}")


def size(folder: Path, name: str = "") -> int:
    """Bytes of the files of a folder whose names begin so."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith(name))
