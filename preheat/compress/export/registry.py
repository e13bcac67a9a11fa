"""Export formats and the dispatch to their writers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.compress.atomic_folder import choose_home
from preheat.errors import RecipeError, RunError, suggest_nearest
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.export import ExportResult

__all__ = ["FORMATS", "choose_default_output", "require_settings", "write"]

FORMATS: dict[str, str | None] = {  # -> default dtype; None: the run's
    "hf": None,
    "peft": None,
    "gguf": "f16",
    "onnx": "float32",
    "executorch": "float32",
    "aoti": "float32",
    "vllm": "int8",
    "torchchat": "bfloat16",
}


def _choose_dtype(to: str, dtype: str | None) -> str | None:
    """Returns the dtype to write.

    Raises:
        RecipeError: unknown format, or a dtype that it does not support.
    """
    from preheat.compress.export import verify

    if to not in FORMATS:
        raise RecipeError(f"--to {shorten(str(to))}: no such format; {suggest_nearest(to, list(FORMATS))}")
    if to == "peft":
        if dtype is not None:
            raise RecipeError("--dtype: is not for --to peft; an adapter is written as it was trained")
        return None
    # The bounds of a format list its dtypes.
    known = [str(kind).removeprefix("torch.") for kind in verify.TOLERANCE] if to == "hf" else list(verify.BOUNDS[to])
    if dtype is not None and dtype not in known:
        raise RecipeError(f"--dtype {shorten(str(dtype))}: --to {to} has {', '.join(known)}")
    return dtype or FORMATS[to]


def require_settings(to: str, settings: Mapping[str, object]) -> None:
    """Raises RecipeError for invalid settings of an export step: wrong type, or not supported by the format."""
    tolerance, length = settings.get("tolerance"), settings.get("length")
    # `not >= 0` rejects NaN too; bool is a subclass of int.
    if tolerance is not None and (
        isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0
    ):
        raise RecipeError(
            f"tolerance: {quote_value(tolerance)} is not a fraction of the largest logit; write a number such as 0.01"
        )
    if length is None:
        return
    if to != "executorch":
        raise RecipeError(f"length: is for executorch's KV cache; {to} has none")
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise RecipeError(
            f"length: {quote_value(length)} is not a number of positions; write a whole number of at least 2"
        )


def choose_default_output(run: Path, to: str, dtype: str | None) -> Path:
    """Returns the default output folder of an export."""
    kind = _choose_dtype(to, dtype)
    home, step = choose_home(run)
    return home / ((f"export-{to}" if to in ("hf", "peft") else f"export-{to}-{kind}") + step)


def _has_image_input(run: str | Path, base: str | None) -> bool:
    """Returns True if the model of a run or a folder reads images; an adapter's folder is checked by its writer."""
    from preheat.inference.load import read_recipe
    from preheat.models import configs, hf, text_part
    from preheat.models.vision import read_vision

    # From the configuration alone, because loading the model takes long.
    path = Path(run)
    if (path / "recipe.yaml").is_file():
        return hf.read_facts(hf.configure(read_recipe(path, base), 1)).vision is not None
    if not (path / "config.json").is_file():
        return False
    config = configs.read(str(path), False)
    return read_vision(config) is not None and not text_part.is_taken(config, "auto")


def write(
    to: str,
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    tolerance: float | None = None,
    base: str | None = None,
    length: int | None = None,
) -> ExportResult:
    """Writes a model in a format, reads it back and compares the logits: see the writers.

    Args:
        to: of `FORMATS`.
        run: a run, a model's folder, or an adapter's.
        dtype: of the weights; None: the format's default.
        length: executorch: size of the cache in positions.

    Raises:
        RecipeError: unknown format or dtype, or a setting of another format.
        RunError: as the writer's.
    """
    import torch

    # Imported late: with every format's libraries the command line would start slowly.
    from preheat.compress.export import aoti, executorch, gguf, huggingface, onnx, peft, torchchat, vllm

    kind = _choose_dtype(to, dtype)
    if length is not None and to != "executorch":
        raise RecipeError(f"--length: is for executorch's KV cache; --to {to} has none")
    if to != "hf" and _has_image_input(run, base):
        raise RunError(
            f"--to {to}: {run} reads images, which only --to hf supports so far; write that, and convert it by the "
            "format's own tools"
        )
    if to == "peft":
        if base is not None:
            raise RecipeError("--base: is not for --to peft; an adapter is written as it was trained")
        return peft.write(run, out, tolerance=tolerance)
    if to == "hf":
        # None keeps the run's dtype.
        return huggingface.write(run, out, dtype=getattr(torch, kind) if kind else None, tolerance=tolerance, base=base)
    assert kind is not None
    if to == "executorch":
        return executorch.write(run, out, dtype=kind, length=length, tolerance=tolerance, base=base)
    writers = {
        "gguf": gguf.write,
        "onnx": onnx.write,
        "aoti": aoti.write,
        "vllm": vllm.write,
        "torchchat": torchchat.write,
    }
    return writers[to](run, out, dtype=kind, tolerance=tolerance, base=base)
