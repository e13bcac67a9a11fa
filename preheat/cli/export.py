"""The `preheat export` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from preheat.cli.views.console import Base, Checkpoint, Json
from preheat.core.export import ExportResult

__all__ = ["export"]

To = Literal["hf", "peft", "gguf", "onnx", "executorch", "aoti", "vllm", "torchchat"]


def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run, of a Hugging Face model, or of a PEFT adapter."),
    ],
    to: Annotated[
        To,
        typer.Option(
            "--to",
            help="hf: a Hugging Face folder, adapters merged. peft: only the adapter. gguf: one file for llama.cpp. "
            "onnx: for ONNX Runtime. executorch: a .pte for devices, with a cache. aoti: a compiled .pt2 for "
            "PyTorch. vllm: a quantized folder in the compressed-tensors format. torchchat: its checkpoint and "
            "settings.",
        ),
    ] = "hf",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The output folder; default: RUN/export-hf, -gguf-q8_0 and so on."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Precision of the weights. hf: float32, bfloat16, float16 (the run's). gguf: f32, f16 (default), "
            "bf16, q8_0, q4_0, and with llama-quantize on the PATH q4_k_m, q5_k_m, q6_k. onnx: float32, int8. "
            "executorch: float32, 8da4w. aoti: float32, bfloat16. vllm: int8, int4. torchchat: float32, bfloat16 "
            "(default), float16.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            help=(
                "Largest accepted difference of a logit, as a fraction of the largest logit; replaces the format's "
                "own bounds."
            ),
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", min=2, help="executorch: positions of the KV cache; default: the model's, up to 2,048."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    base: Base = None,
    json: Json = False,
) -> None:
    """Write a run's model, or only its adapter, in another tool's format, read it back there, and compare logits.

    Example: `preheat export runs/demo --to gguf --dtype q8_0`, `preheat export runs/mine --to peft`
    """
    from transformers.utils.logging import disable_progress_bar

    from preheat.cli.views.console import console, emit
    from preheat.compress.export import registry
    from preheat.engine.checkpoint import at_checkpoint

    run = at_checkpoint(run, checkpoint)
    # transformers shows a bar for each file that it loads.
    disable_progress_bar()
    # By format and precision, so that exports do not overwrite each other.
    target = out or registry.default_output(run, to, dtype)
    result = registry.write(to, run, target, dtype=dtype, tolerance=tolerance, base=base, length=length)
    if json:
        emit(result)
        return
    what = result.dtype or f"{result.adapted} maps' adapters, for {result.base}"
    what += f", {result.merged} adapters merged" if result.merged else ""
    console().print(
        f"wrote {result.path} ({result.bytes / 2**20:.1f} MiB; {what}); read back by {result.read_by}, its logits "
        f"differ by at most {result.max_logit_difference:.2g} over {result.tokens} tokens "
        f"(largest logit {result.largest_logit:.3g}; accepted: {result.tolerance:g} times that), by "
        f"{result.mean_logit_difference:.2g} in the mean; "
        f"same most likely token at {result.top1_agreement:.1%}" + _perplexity(result),
        soft_wrap=True,
    )
    # A second check, if llama.cpp itself is installed.
    if other := result.llama_cpp:
        console().print(
            f"run by llama.cpp ({other.version}): logarithms of probabilities differ by at most "
            f"{other.max_logprob_difference:.2g}; same most "
            f"likely token at {other.top1_agreement:.1%} of {other.places} positions",
            soft_wrap=True,
        )
    if result.note:
        console().print(f"note: {result.note}", soft_wrap=True)


def _perplexity(result: ExportResult) -> str:
    from preheat.compress.model_card import before_and_after

    if result.before.perplexity is None:
        return ""
    return f"; perplexity {before_and_after(result)}, on {result.perplexity_of}"
