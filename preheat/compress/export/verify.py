"""Verification of exports: token rows to compare logits over, and the comparison with its bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.core.export import Comparison
from preheat.errors import RunError
from preheat.models.hf import compute_reference_logits
from preheat.ops.adapters.peft_layers import count_parameters
from preheat.ops.quantization.nf4 import PackedMap
from preheat.ops.quantization.packed_experts import Nf4Experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


__all__ = [
    "BOUNDS",
    "EXACT",
    "TEXTS",
    "TOLERANCE",
    "Bound",
    "Difference",
    "choose_bound",
    "compare",
    "build_comparison",
    "compute_logits",
    "needs_host",
    "refuse_beyond",
    "tokenize_samples",
    "count_bytes",
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Default tolerance: the maximum logit difference relative to the largest logit (or 1 if that is smaller), by the
dtype of the saved weights. Both sides compute in fp64 or fp32 (`compute_logits`), so only merging and rounding of the
weights contribute."""


@dataclass(frozen=True)
class Bound:
    """Maximum difference of an export from the original model.

    Attributes:
        largest: maximum logit difference, relative to the largest logit (or 1 if that is smaller).
        mean: mean logit difference, relative to the same.
        agreement: minimum fraction of positions with the same most likely token.
        perplexity: maximum relative change of perplexity over the compared rows, in either direction.
    """

    largest: float
    mean: float = math.inf
    agreement: float = 0.0
    perplexity: float = math.inf


# Bound(largest, mean, agreement, perplexity), as fractions.
BOUNDS: dict[str, dict[str, Bound]] = {
    # Rounded weights, matmuls in fp32 or fp64. The largest of 32 normal values is at 2.2 standard deviations on
    # average, so rounding in steps of largest / 127 (q8_0) has an error of 0.5 % of a weight, of largest / 8 (q4_0)
    # 8 %; bfloat16 has 0.17 %.
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
    # Logprobs by llama.cpp itself: GELU is a table in f16; activations have the weights' dtype, and 8 bits for blocks.
    "llama.cpp": {
        "f32": Bound(5e-3, 1e-3, 0.95),
        "f16": Bound(2e-2, 4e-3, 0.95),
        "bf16": Bound(8e-2, 2e-2, 0.85),
        "q8_0": Bound(0.15, 0.03, 0.8),
        "q6_k": Bound(0.25, 0.05, 0.75),
        "q5_k_m": Bound(0.45, 0.07, 0.65),
        "q4_k_m": Bound(0.65, 0.1, 0.55),
        "q4_0": Bound(0.8, 0.12, 0.45),
    },
    # Another runtime's fp32 matmuls: errors of about 1e-7 per layer. int8: weights per row, activations per tensor.
    "onnx": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "int8": Bound(0.4, 0.05, 0.75, 0.1),
    },
    # 8da4w: weights in 4 bits in groups of 32, activations in 8 bits per token.
    "executorch": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "8da4w": Bound(0.75, 0.1, 0.5, 0.3),
    },
    # bfloat16: activations are rounded as well.
    "aoti": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "bfloat16": Bound(0.1, 0.02, 0.85, 0.02),
    },
    # Symmetric scales per group of 32 (int4) or per row (int8), as vLLM reads them.
    "vllm": {
        "int8": Bound(0.1, 0.02, 0.85, 0.02),
        "int4": Bound(0.75, 0.1, 0.5, 0.3),
    },
    # Rounded weights, matmuls in fp32.
    "torchchat": {
        "float32": Bound(1e-4, 1e-5, 0.99, 1e-4),
        "bfloat16": Bound(5e-2, 1e-2, 0.9, 1e-2),
        "float16": Bound(1e-2, 1e-3, 0.97, 2e-3),
    },
    # Image classifiers, over calibration images: 8-bit weights per channel, calibrated 8-bit activations per tensor.
    "vision": {
        "float32": Bound(1e-4, 1e-5, 0.99),
        "int8": Bound(0.5, 0.1, 0.8),
    },
}
"""Default bounds by format and `--dtype`; set before the writers were implemented. `--tolerance` replaces all four."""

TEXTS = (  # prose, code, arithmetic and JSON, to cover common tokens
    "The ferry left at seven. By the time the fog lifted, nobody on deck could say which of the two islands "
    "lay behind us, and the "
    "captain, who had made the crossing for thirty years, kept looking at his watch rather than at the water.",
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n    "
    "return sum(values) / len(values)\n",
    "Question: A box holds 48 screws in rows of 6. How many rows are there after 3 boxes are "
    "opened?\nAnswer: 48 / 6 = 8, and 3 * 8 = 24.",
    '{"name": "Zoë", "städte": ["Köln", "Łódź", "東京"], "price": 1234.50, "done": false, "note": "naïve café, '
    '50 % off…"}',
)
_LENGTH = 128  # maximum length of a row
EXACT = 1 << 29
"""Largest number of weights that are cast to fp64: 4 GiB."""


def tokenize_samples(tokenizer: PreTrainedTokenizerFast, positions: int, extra: list[int]) -> list[Tensor]:
    """Tokenizes the sample texts, one row [1, n] each; `extra` tokens (added to the model) get their own row."""
    # Models without a limit of positions have 0.
    limit = min(_LENGTH, positions or _LENGTH)
    encoded = [tokenizer.encode(text)[:limit] for text in TEXTS]
    if extra:
        # Alternating with ordinary tokens, so that each added token is read and predicted in a text.
        encoded.append([token for pair in zip(extra, encoded[0], strict=False) for token in pair][:limit])
    return [torch.tensor([row]) for row in encoded if row]


def note_code(folder: Path) -> list[str]:
    """Returns a note if a written folder contains Python code: of the original model, or of a converted GPT-2."""
    names = sorted(file.name for file in folder.glob("*.py"))
    return (
        [
            f"the folder contains Python code of the model ({', '.join(names)}), which runs if it is opened with "
            "trust_remote_code=True"
        ]
        if names
        else []
    )


def needs_host(model: PreTrainedModel) -> bool:
    """Returns True if a GPU cannot hold the model in the precision of `compute_logits`."""
    parameters = list(model.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        return False
    count = count_parameters(model)[1]
    # It replaces the weights as they are now.
    room = torch.cuda.mem_get_info(device)[0] + sum(p.numel() * p.element_size() for p in parameters)
    return count * (8 if count <= EXACT else 4) > room


def compute_logits(
    model: PreTrainedModel, tokens: list[Tensor], image_rows: Sequence[Mapping[str, Tensor]] = ()
) -> list[Tensor]:
    """Computes logits with transformers' own attention; the logits are on the CPU, the model is left in fp32, in place.

    Models of up to `EXACT` weights compute in fp64, larger ones in fp32 with its rounding errors: at a logit of 16
    these are about 2e-5, ten times the effect of merging.

    Args:
        image_rows: further rows with images: arguments of transformers' forward.
    """
    # fp64 leaves no rounding of the matmuls, so that any difference is one of the weights.
    exact = count_parameters(model)[1] <= EXACT
    model.to(torch.float64 if exact else torch.float32)
    for module in model.modules():
        if isinstance(module, (PackedMap, Nf4Experts)):  # NF4's levels are defined in fp32
            module.nf4_pairs, module.nf4_levels = module.nf4_pairs.float(), module.nf4_levels.float()
    outputs = [compute_reference_logits(model, row).cpu() for row in tokens]
    outputs += [
        compute_reference_logits(model, row["input_ids"], {k: v for k, v in row.items() if k != "input_ids"}).cpu()
        for row in image_rows
    ]
    # In fp32 again, because fp64 would double the memory for the rest of the export.
    model.to(torch.float32)
    return outputs


@dataclass(frozen=True)
class Difference:
    """Difference of two models' logits.

    Attributes:
        largest: maximum logit difference.
        scale: largest logit of the first model.
        tokens: number of compared positions.
        mean: mean logit difference.
        agreement: fraction of positions with the same most likely token.
        perplexity: of both models; None if no tokens were given, or no row has a next token.
        predicted: number of tokens in the perplexity.
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
        """Describes how the difference exceeds the bound; '' if it does not. NaN exceeds it."""
        unit, those = max(self.scale, 1.0), "from those of the trained model"
        # Negated comparisons, because every comparison with NaN is false.
        if not self.share() <= bound.largest:
            return (
                f"by up to {self.largest:.2g} {those} (largest logit {self.scale:.3g}), more than the "
                f"{bound.largest:g} of it that is accepted"
            )
        if not self.mean / unit <= bound.mean:
            return (
                f"by {self.mean:.2g} in the mean {those} (largest logit {self.scale:.3g}), more than the "
                f"{bound.mean:g} of it that is accepted"
            )
        if not self.agreement >= bound.agreement:
            return (
                f"{those} so that {self.agreement:.1%} of positions have the same most likely token, less than "
                f"the {bound.agreement:.0%} that is accepted"
            )
        if self.perplexity is not None:
            before, after = self.perplexity
            if not abs(after / before - 1) <= bound.perplexity:
                return (
                    f"{those} so that perplexity goes from {before:.4g} to {after:.4g}, by more than the "
                    f"{bound.perplexity:.2g} of it that is accepted"
                )
        return ""


def compare(wanted: list[Tensor], computed: list[Tensor], tokens: Sequence[Tensor] | None = None) -> Difference:
    """Compares logits [rows, length, vocabulary], list by list; if one vocabulary is padded, the padding is ignored.

    Args:
        tokens: inputs of the logits, [rows, length] each, for the perplexity.
    """
    # Each is cut to the other's vocabulary, (rows, length, vocabulary).
    pairs = [
        (a[..., : b.shape[-1]].double(), b[..., : a.shape[-1]].double()) for a, b in zip(wanted, computed, strict=True)
    ]
    differences = [(a - b).abs() for a, b in pairs]
    positions = sum(a[..., 0].numel() for a in differences)
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    return Difference(
        largest=max(float(a.max()) for a in differences),
        # Of the trained model alone: the bounds are relative to it.
        scale=max(float(row.abs().max()) for row in wanted),
        tokens=positions,
        mean=sum(float(a.sum()) for a in differences) / sum(a.numel() for a in differences),
        agreement=same / positions,
        perplexity=None if tokens is None else _compute_perplexities(pairs, tokens),
        predicted=sum(row[:, 1:].numel() for row in tokens or ()),
    )


def _compute_perplexities(pairs: list[tuple[Tensor, Tensor]], tokens: Sequence[Tensor]) -> tuple[float, float] | None:
    count = sum(row[:, 1:].numel() for row in tokens)
    if not count:
        return None
    sums = [0.0, 0.0]
    for both, row in zip(pairs, tokens, strict=True):
        for side, logits in enumerate(both):
            # Position n predicts token n + 1; cross_entropy expects the classes in dimension 1.
            sums[side] += float(
                torch.nn.functional.cross_entropy(
                    logits[:, :-1].transpose(1, 2), row[:, 1:].to(logits.device), reduction="sum"
                )
            )
    return math.exp(sums[0] / count), math.exp(sums[1] / count)


def choose_bound(format: str, dtype: str, tolerance: float | None) -> Bound:
    """Returns the format's bound for a dtype, or one with the given tolerance only."""
    return BOUNDS[format][dtype] if tolerance is None else Bound(tolerance)


def build_comparison(difference: Difference, bound: Bound) -> Comparison:
    """Returns a comparison's figures for a writer's result; `HeldOutText.perplexities` returns the perplexities."""
    return Comparison(
        max_logit_difference=difference.largest,
        mean_logit_difference=difference.mean,
        largest_logit=difference.scale,
        top1_agreement=difference.agreement,
        tolerance=bound.largest,
        tokens=difference.tokens,
    )


def refuse_beyond(difference: Difference, bound: Bound, what: str, hint: str) -> None:
    """Raises RunError if the difference exceeds the bound, or is NaN."""
    if excess := difference.beyond(bound):
        raise RunError(f"{what}: its logits differ {excess}; nothing was written; {hint}")


def count_bytes(folder: Path, name: str = "") -> int:
    """Returns the bytes of the files of a folder whose names have this prefix."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith(name))
