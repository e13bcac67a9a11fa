"""llm-compressor: the quantizer of the vLLM project, run as a subprocess in its own environment.

What: the model and the calibration sequences are written to a folder, llm-compressor quantizes to four or eight bits
there by GPTQ, AWQ (alone or followed by GPTQ), or to the nearest, in bf16; its codes, scales and all other weights it
changed (AWQ moves factors into norms) are read back unchanged. Helps: the algorithms that produce vLLM's own
checkpoints, for comparison with ours, and those that only it has. Hurts: an environment with its own torch (gigabytes),
a copy of the model on disk, minutes for what `gptq` and `awq` do in process. The environment is set by `python`, or by
$PREHEAT_LLM_COMPRESSOR: python3 -m venv lc && lc/bin/pip install llmcompressor.
Source: https://github.com/vllm-project/llm-compressor, 0.14; Frantar et al. 2022 (arXiv:2210.17323), Lin et al. 2023
(arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.compress.quantize import High, choose_group_size, choose_maps, describe_precision, keep_high
from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["LlmCompressor", "quantize_by_llm_compressor"]


def quantize_by_llm_compressor(
    model: PreTrainedModel, rows: Sequence[Tensor], settings: LlmCompressor | None = None
) -> Change:
    """Quantizes the linear maps of a transformers model by llm-compressor, in place; the rest to eight bits.

    Args:
        rows: calibration sequences, [1, length] tokens each.

    Raises:
        RecipeError: a group size that does not divide a map's inputs.
        RunError: no environment with llm-compressor, or it fails.

    Example:
        >>> quantize_by_llm_compressor(model, rows, LlmCompressor(python="lc/bin/python"))  # doctest: +SKIP
    """
    from preheat.compress.calibration import describe
    from preheat.compress.llm_compressor import QuantizationRequest, run
    from preheat.ops.quantization.linear import Int4Linear, Int8Linear
    from preheat.ops.quantization.serialization import put_in

    chosen = settings or LlmCompressor()
    maps, excluded = choose_maps(model, chosen, "llm_compressor")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # None: one scale per output.
    groups = {
        n: choose_group_size(n, m, chosen.group, "llm_compressor") if chosen.bits == 4 else None
        for n, m in maps.items()
    }
    request: QuantizationRequest = {"by": chosen.by, "bits": chosen.bits, "maps": groups}
    result = run(model, rows, request, chosen.python)
    # All maps are present, or `run` has raised.
    for name, module in maps.items():
        codes: Any = result.maps[name]
        put_in(model, name, Int4Linear.of(module, codes) if chosen.bits == 4 else Int8Linear.of(module, codes))
    keep_high(model, excluded, chosen.high, tied=tied)
    description = f"int{chosen.bits}, symmetric, by llm-compressor {result.version} ({chosen.by.replace('_', ' and ')})"
    return describe_precision(model, list(maps), f"{description}; calibrated on {describe(rows)}")


@dataclass(frozen=True, kw_only=True)
class LlmCompressor(High, Method):
    reads_rows: ClassVar[bool] = True

    by: Literal["gptq", "awq", "awq_gptq", "nearest"] = "gptq"
    """Algorithm; awq_gptq: GPTQ on the weights scaled by AWQ."""
    bits: Literal[4, 8] = 4
    """4, in groups, or 8, with one scale per output."""
    group: int | Literal["auto"] = "auto"
    """With 4 bits: number of inputs that share a scale; auto: for each map the divisor nearest to 32."""
    python: str | None = None
    """Python of the environment with llm-compressor; default: $PREHEAT_LLM_COMPRESSOR."""

    def check(self, model: ModelFacts) -> list[str]:
        from preheat.compress.llm_compressor import find_python

        why = find_python(self.python)[1]  # fail before other methods have run for minutes
        return [*super().check(model), *([why] if why else [])]

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_by_llm_compressor(model, rows, self)
