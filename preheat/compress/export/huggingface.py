"""A run as a Hugging Face folder: adapters merged, tokenizer beside, loaded again by plain transformers and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import model_card, verify
from preheat.compress.export.held_out_text import Held, held_of
from preheat.compress.front_matter import pipeline_of
from preheat.compress.special_tokens import end_texts, name_ends, require_same_tokens
from preheat.core import Tag
from preheat.data.tokenizer import rebuilt_by_transformers
from preheat.errors import RunError
from preheat.inference.load import load_model
from preheat.models.configs import runs_code
from preheat.models.conversions.architecture import beyond_transformers
from preheat.models.hf import auto_class, head
from preheat.models.moe import biases, has_bias
from preheat.models.vision import copy_processor, drawn_image
from preheat.ops.adapters.peft_layers import merge, names_of
from preheat.ops.classification_head import ClassHead, as_sequence_classifier, pad_for
from preheat.ops.quantization.fake_quant import unfake_
from preheat.ops.quantization.serialization import is_compressed
from preheat.run_dir import Reader

__all__ = ["write", "write_held"]

_UNROUNDED = "the run was trained with rounded weights; the folder has them before rounding: preheat compress RUN writes them as they were rounded"
_NO_BIAS = "the run balanced its experts by a bias on the choice; its family's folders have no place for that, so the folder routes without it, as the run's evaluations did"
_NO_WINDOW = "the run limited its attention by a technique; the folder's configuration has no place for that, so plain transformers attends in full"


def write(
    run: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    base: str | None = None,
) -> dict[str, Any]:
    """`write_held`, without what its perplexity was measured on."""
    return write_held(run, out, dtype=dtype, tolerance=tolerance, base=base)[0]


def write_held(
    run: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    base: str | None = None,
    final: bool = True,
) -> tuple[dict[str, Any], Held]:
    """Writes `out` from the newest whole checkpoint of a run, or from an adapter's folder and its base.

    Adapters are merged in fp32 into the very base that was trained: one in 4 bits is made full first. What is written is read
    again by plain transformers, and both are compared over rows of real text and the added tokens.

    Args:
        dtype: of the weights that are written; that of the run's when None.
        tolerance: largest difference of a logit, as a share of the largest logit (at least of 1); `verify.TOLERANCE` when None.
        base: as in `open_model`.
        final: the folder is what was asked for. One on the way to another format is not measured, and nothing is said of its code.

    Returns:
        {path, bytes, dtype, merged, tokens_that_end, turn_ends, chats, string_ends, read_by, note} and `verify.figures`; turn_ends: the token that ends an answer, or None;
        chats: whether it was trained on them; string_ends: what ends an answer where no token does; note: what the folder cannot say, or "". And what perplexity was measured on.

    Raises:
        RunError: no run or checkpoint there; `out` stands already or cannot be written; the model's architecture is one that
            transformers has not; the folder does not hold what was trained, within the tolerance.
    """
    import transformers

    out = Path(out)
    require_new(out, run)
    opened = load_model(run, base=base)
    model: Any = opened.build.trained[0]
    if beyond := beyond_transformers(model):
        raise RunError(
            f"{run}: has {' and '.join(beyond)}, which no class of transformers can load; evaluate and generate from the run itself"
        )
    if is_compressed(model):
        raise RunError(
            f"{run}: is compressed, and what is rounded is not written as other formats' weights; export the model it was made from"
        )
    held = held_of(opened, run)
    rounded = unfake_(model)
    kept = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    accepted = verify.Bound(verify.TOLERANCE[kept] if tolerance is None else tolerance)
    first = len(opened.tokenizer) - len(opened.recipe.model.add_tokens)
    rows = verify.rows(opened.tokenizer, opened.build.model.positions, list(range(first, len(opened.tokenizer))))
    vision = opened.build.model.vision
    reader: Any = getattr(transformers, auto_class(model.config))
    classifies = isinstance(head(model), ClassHead)
    pad = _pad(opened.tokenizer, run) if classifies else None
    if pad is not None:  # transformers' classifiers read the last token that is no padding
        opened.tokenizer.pad_token_id = pad
        rows = [row[row != pad][None] for row in rows]
    drawn = [] if vision is None else [drawn_image(vision)]
    wanted = verify.logits(model, rows, drawn)
    merged = merge(model) if names_of(model) else 0
    if pad is not None:
        reader, wanted = transformers.AutoModelForSequenceClassification, [row[:, -1] for row in wanted]
        model = _classifier(model, pad, run)
    model.to(kept)
    tied = not classifies and model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.set_attn_implementation("eager")  # the folder must not name our own attention
    model.config.use_cache = True
    notes = [held.unfinished] if held.unfinished else []
    notes += [_NO_WINDOW] if Tag.SLIDING_WINDOW in opened.build.tags else []
    notes += [_UNROUNDED] if rounded else []
    notes += [_NO_BIAS] if biases(model) and not has_bias(model.config) else []
    ends = name_ends(model, opened)
    tokenizer = end_texts(opened.tokenizer) if classifies else ends.tokenizer
    notes += [] if classifies else ends.notes
    runs = runs_code(model.config, opened.recipe.model.trust_remote_code)
    name = str(kept).removeprefix("torch.")
    with NewFolder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        require_same_tokens(tokenizer, folder)
        notes += [words] if final and (words := rebuilt_by_transformers(folder)) else []
        if vision is not None and opened.build.weights.folder is not None:
            copy_processor(opened.build.weights.folder, folder)
        pipeline = pipeline_of(model.config)  # its architectures are set by now
        opened.build.parts.clear()
        del model
        notes += verify.code_in(folder) if final else []
        again = reader.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=runs)
        texts = None if classifies else [*rows, *(seen["input_ids"] for seen in drawn)]
        found = verify.compare(wanted, verify.logits(again, rows, drawn), texts)
        hint = (
            "raise --tolerance only if you know why"
            if kept == torch.float32
            else "use --dtype float32, or raise --tolerance"
        )
        verify.refuse_beyond(found, accepted, str(out), hint)
        if not classifies and tied != (again.get_input_embeddings().weight is again.get_output_embeddings().weight):
            raise RunError(
                f"{out}: embedding and head are {'one matrix' if tied else 'two matrices'} in the run, but not in the folder"
            )
        made = {
            "path": str(out),
            "bytes": verify.size(folder),
            "dtype": name,
            "merged": merged,
            "tokens_that_end": ends.tokens,
            "turn_ends": ends.turn,
            "chats": ends.chats,
            "string_ends": ends.string,
            "read_by": model_card.version_of("transformers"),
            **verify.figures(found, accepted),
            **(held.by(again, found) if final else held.told(found, None)),
            "note": "; ".join(notes),
        }
        use = f'import transformers\nmodel = transformers.{reader.__name__}.from_pretrained(".")'
        model_card.write(
            folder, run, made, title=f"Hugging Face folder, {name}", use=use, library="transformers", pipeline=pipeline
        )
    return made, held


def _pad(tokenizer: Any, run: str | Path) -> int:
    try:
        return pad_for(tokenizer)
    except ValueError as error:
        raise RunError(f"{run}: cannot be exported: {error}") from None


def _classifier(model: Any, pad: int, run: str | Path) -> Any:
    """transformers' classifier of the family, with the names of the run's classes."""
    try:
        made = as_sequence_classifier(model, pad=pad)
    except ValueError as error:
        raise RunError(f"{run}: cannot be exported: {error}") from None
    names = Reader(run).data.get("classes") if (Path(run) / "recipe.yaml").is_file() else None
    if names:
        made.config.id2label = dict(enumerate(map(str, names)))
        made.config.label2id = {name: n for n, name in made.config.id2label.items()}
    return made
