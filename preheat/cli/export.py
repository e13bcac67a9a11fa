"""The `preheat export` command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.console import Base, Checkpoint, Json
from preheat.cli.views.output import say
from preheat.core.export import ExportResult
from preheat.core.json_types import JsonObject
from preheat.core.units import format_bytes
from preheat.errors import RecipeError, RunError
from preheat.storage import StorageError, is_url, require_scheme

if TYPE_CHECKING:
    from preheat.compress.export.hub import Push

__all__ = ["export"]

To = Literal["hf", "peft", "gguf", "onnx", "executorch", "aoti", "vllm", "torchchat"]


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The folder or URL of a run; the folder of a Hugging Face model or of a PEFT adapter; with --push "
            "alone, of an export.",
        ),
    ],
    to: Annotated[
        To | None,
        typer.Option(
            "--to",
            help="hf (default): a Hugging Face folder, adapters merged. peft: only the adapter. gguf: one file for "
            "llama.cpp. onnx: for ONNX Runtime. executorch: a .pte for devices, with a cache. aoti: a compiled .pt2 "
            "for PyTorch. vllm: a quantized folder in the compressed-tensors format. torchchat: its checkpoint and "
            "settings.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FOLDER|URL",
            help="The output folder; default: RUN/export-hf, -gguf-q8_0 and so on. With s3://, gs://, az:// or "
            "hf://BUCKET/FOLDER, the export is uploaded there.",
        ),
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
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Push the export with its model card to this repository on the Hugging Face hub, which is created if "
            "necessary. If RUN is the folder of an export, that is pushed as it is. Needs HF_TOKEN or `hf auth login`.",
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: into a private repository.")] = False,
    push_dry_run: Annotated[
        bool,
        typer.Option(
            "--push-dry-run", help="With --push: write the export and list what would be pushed; needs no network."
        ),
    ] = False,
    checkpoint: Checkpoint = None,
    base: Base = None,
    json: Json = False,
) -> None:
    """Write a run's model, or only its adapter, in another tool's format, read it back there, and compare logits.

    Example: `preheat export runs/demo --to gguf --dtype q8_0`, `preheat export runs/mine --to peft --push me/mine`
    """
    from preheat.cli.views.console import emit
    from preheat.compress.export import hub
    from preheat.engine.checkpoint import at_checkpoint
    from preheat.files import to_plain_data

    written = (to, out, dtype, tolerance, length, base)
    if push is None:
        if private or push_dry_run:
            option = "--private" if private else "--push-dry-run"
            raise RecipeError(f"{option}: would change nothing without --push OWNER/NAME; add it or leave {option} out")
    else:
        hub.require_name(push)
        hub.require_format(to or "hf")
        if not push_dry_run:
            hub.require_access()
    source = at_checkpoint(Path(find_local_folder(run)), checkpoint)
    # An export that is pushed with no option that writes another is complete.
    as_it_is = push is not None and hub.is_export(source) and all(option is None for option in written)
    result: JsonObject = {"path": str(source)}
    if not as_it_is:
        with _open_output(out) as target:
            result = to_plain_data(
                _write(source, to or "hf", target, dtype, tolerance, length, base, push, show=not json)
            )
        if is_url(out):
            result["url"] = out
    if push is not None:
        sent = hub.push(result["path"], push, private=private, dry_run=push_dry_run)
        result["push"] = asdict(sent)
        if not json:
            _show_push(sent)
    if json:
        emit(result)


@contextmanager
def _open_output(out: str | None) -> Iterator[Path | None]:
    """Yields the output folder; that of a URL is uploaded when the block ends."""
    require_scheme("--out", out or "")
    if out is None or not is_url(out):
        yield None if out is None else Path(out)
        return
    from preheat.run.remote_copy import RemoteCopy

    def tell(message: str) -> None:
        say(message, error=True)

    copy = RemoteCopy(out, kind="export")
    with copy.session(), copy.sending(tell):
        # Before the work: a URL that cannot be written to is an error at once.
        copy.claim(resume=False, say=tell)
        try:
            yield copy.folder
        except BaseException:
            copy.release()
            raise
        try:
            copy.send(active=False)
        except StorageError as error:
            raise RunError(
                f"{error}; the export is in {copy.folder}; send it with: preheat upload {copy.folder} {copy.url}"
            ) from None
        tell(f"uploaded to {copy.url}")


def _write(
    run: Path,
    to: To,
    out: Path | None,
    dtype: str | None,
    tolerance: float | None,
    length: int | None,
    base: str | None,
    push: str | None,
    *,
    show: bool,
) -> ExportResult:
    """Writes the export, and prints its figures if `show`."""
    from transformers.utils.logging import disable_progress_bar

    from preheat.compress.export import hub, registry

    # transformers shows a bar for each file that it loads.
    disable_progress_bar()
    # By format and precision, so that exports do not overwrite each other.
    target = out or registry.choose_default_output(run, to, dtype)
    if push is not None and hub.is_export(target):
        raise RunError(
            f"{target}: already exists; push it as it is: {hub.command(target, push)}; or name another folder with "
            "--out"
        )
    result = registry.write(to, run, target, dtype=dtype, tolerance=tolerance, base=base, length=length)
    if show:
        _show(result)
    return result


def _show_push(sent: Push) -> None:
    from preheat.cli.views.console import build_console

    kind = "private" if sent.private else "public" if sent.url else "not private"
    size = f"{len(sent.files)} files, {format_bytes(sent.bytes)}"
    if sent.url is None:
        build_console().print(
            f"would push to {sent.repository} ({kind}; {size}), with the card {sent.card}: {sent.message}",
            soft_wrap=True,
        )
        for file in sent.files:
            build_console().print(f"  {file.path}  {file.bytes:,} bytes", soft_wrap=True)
    else:
        build_console().print(f"pushed to {sent.url} ({kind}; {size}): {sent.message}", soft_wrap=True)
    if sent.note:
        build_console().print(f"note: {sent.note}", soft_wrap=True)


def _show(result: ExportResult) -> None:
    from preheat.cli.views.console import build_console

    what = result.dtype or f"{result.adapted} maps' adapters, for {result.base}"
    what += f", {result.merged} adapters merged" if result.merged else ""
    build_console().print(
        f"wrote {result.path} ({format_bytes(result.bytes)}; {what}); read back by {result.read_by}, its logits "
        f"differ by at most {result.max_logit_difference:.2g} over {result.tokens} tokens "
        f"(largest logit {result.largest_logit:.3g}; accepted: {result.tolerance:g} times that), by "
        f"{result.mean_logit_difference:.2g} in the mean; "
        f"same most likely token at {result.top1_agreement:.1%}" + _format_perplexity(result),
        soft_wrap=True,
    )
    # A second check, if llama.cpp itself is installed.
    if other := result.llama_cpp:
        build_console().print(
            f"run by llama.cpp ({other.version}): logarithms of probabilities differ by at most "
            f"{other.max_logprob_difference:.2g}; same most "
            f"likely token at {other.top1_agreement:.1%} of {other.places} positions",
            soft_wrap=True,
        )
    if result.note:
        build_console().print(f"note: {result.note}", soft_wrap=True)


def _format_perplexity(result: ExportResult) -> str:
    from preheat.compress.model_card import format_before_and_after

    if result.before.perplexity is None:
        return ""
    return f"; perplexity {format_before_and_after(result)}, on {result.perplexity_of}"
