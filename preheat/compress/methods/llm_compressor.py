"""llm-compressor: the quantizer of the vLLM project, in an environment of its own, called as a process.

What: the model and the calibration rows are written to a folder, llm-compressor chooses codes of four or eight bits there by GPTQ, AWQ (alone or with GPTQ
behind it), or to the nearest, in bf16; its codes, scales and whatever else it changed (AWQ moves factors into norms) are taken over as they
are. Helps: the same algorithms as vLLM's own checkpoints come from, to compare ours with, and those that only it has. Hurts: an environment with a torch of
its own (gigabytes), a copy of the model on disk, minutes for what `gptq` and `awq` do in process.
Its place is told by `python`, or by $PREHEAT_LLM_COMPRESSOR: python3 -m venv lc && lc/bin/pip install llmcompressor.
Source: https://github.com/vllm-project/llm-compressor, 0.14; Frantar et al. 2022 (arXiv:2210.17323), Lin et al. 2023 (arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.compress.quantize import High, chosen_maps, group_for, keep_high, told
from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["LlmCompressor", "by_llm_compressor"]


def by_llm_compressor(model: PreTrainedModel, rows: Sequence[Tensor], settings: LlmCompressor | None = None) -> Change:
    """Puts the linear maps of a transformers model into few bits as llm-compressor chooses them, in place; the rest into eight.

    Args:
        rows: calibration rows, [1, length] tokens each.

    Raises:
        RecipeError: a group that does not divide a map's inputs.
        RunError: no environment with llm-compressor, or it fails.

    Example:
        >>> by_llm_compressor(model, rows, LlmCompressor(python="lc/bin/python"))                   # doctest: +SKIP
    """
    from preheat.compress.llm_compressor import run
    from preheat.ops.quantization.linear import Int4Linear, Int8Linear
    from preheat.ops.quantization.serialization import put_in

    chosen = settings or LlmCompressor()
    maps, kept = chosen_maps(model, chosen, "llm_compressor")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    groups = {n: group_for(n, m, chosen.group, "llm_compressor") if chosen.bits == 4 else None for n, m in maps.items()}
    asked = {"by": chosen.by, "bits": chosen.bits, "maps": groups}
    found = run(model, rows, asked, chosen.python)
    for name, module in maps.items():
        made: Any = found.maps[name]
        put_in(model, name, Int4Linear.of(module, made) if chosen.bits == 4 else Int8Linear.of(module, made))
    keep_high(model, kept, chosen.high, tied=tied)
    words = f"int{chosen.bits}, symmetric, by llm-compressor {found.version} ({chosen.by.replace('_', ' and ')})"
    return told(model, list(maps), f"{words}; {len(rows)} rows of {rows[0].shape[1]} tokens looked at")


@dataclass(frozen=True, kw_only=True)
class LlmCompressor(High, Method):
    reads_rows: ClassVar[bool] = True

    by: Literal["gptq", "awq", "awq_gptq", "nearest"] = "gptq"
    """What chooses the codes; awq_gptq: GPTQ for the weights that AWQ has scaled."""
    bits: Literal[4, 8] = 4
    """4, by groups, or 8, with a scale for each output."""
    group: int | Literal["auto"] = "auto"
    """Of 4 bits: inputs that share a scale; auto: of each map the divisor nearest to 32."""
    python: str | None = None
    """Of the environment in which llm-compressor is installed; $PREHEAT_LLM_COMPRESSOR when not stated."""

    def check(self, model: ModelFacts) -> list[str]:
        from preheat.compress.llm_compressor import python_of

        why = python_of(self.python)[1]  # before minutes are spent on other methods
        return [*super().check(model), *([why] if why else [])]

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return by_llm_compressor(model, rows, self)
