"""A run as a Hugging Face folder: adapters merged, tokenizer beside, loaded again by plain transformers and compared."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from preheat.errors import RunError
from preheat.models.adapter import head, plain_logits
from preheat.models.surgery import beyond_transformers
from preheat.ops.adapters import merge
from preheat.ops.class_head import ClassHead, as_sequence_classifier, pad_for
from preheat.technique import Tag
from preheat.training.opened import open_model

__all__ = ["write"]

_NO_WINDOW = "the run limited its attention by a technique; the folder's configuration has no place for that, so plain transformers attends in full"


def write(run: str | Path, out: str | Path) -> dict[str, Any]:
    """Writes `out` from the newest whole checkpoint of a run.

    Returns:
        {path, bytes, max_logit_difference, merged, note}: the largest difference between the logits of the trained model and
        those of the folder read back, over 64 tokens with full attention; what the folder cannot say, or "".

    Raises:
        RunError: no run or checkpoint there; `out` stands already or cannot be written; the model's architecture is one that
            transformers has not.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    out = Path(out)
    if out.exists():
        raise RunError(f"{out}: stands there already; name another folder with --out")
    opened = open_model(run)
    model = opened.build.trained[0]
    if beyond := beyond_transformers(model):
        raise RunError(
            f"{run}: has {' and '.join(beyond)}, which no class of transformers can load; evaluate and generate from the run itself"
        )
    rows = min(64, opened.build.model.positions or 64)
    tokens = torch.arange(rows).remainder(opened.build.model.vocabulary)[None] * 7 % opened.build.model.vocabulary
    reader: Any = AutoModelForCausalLM
    merged = 0
    try:
        if classifies := isinstance(head(model), ClassHead):  # type: ignore[arg-type]
            reader, pad = AutoModelForSequenceClassification, pad_for(opened.tokenizer)
            opened.tokenizer.pad_token_id = pad
            tokens[tokens == pad] += 1 if pad == 0 else -1
        before = plain_logits(model, tokens)  # type: ignore[arg-type]
        merged = merge(model) if Tag("adapter") in opened.build.tags else 0
        if classifies:
            model, before = as_sequence_classifier(model, pad=pad), before[:, -1]
    except ValueError as error:
        raise RunError(f"{run}: cannot be exported: {error}") from None
    beside = out.with_name(out.name + ".writing")
    try:
        model.set_attn_implementation("eager")  # type: ignore[operator]  # the folder must not name our own attention
        model.config.use_cache = True  # type: ignore[union-attr,assignment]
        model.save_pretrained(beside)  # type: ignore[operator]
        opened.tokenizer.save_pretrained(beside)
        again = reader.from_pretrained(beside, dtype=next(model.parameters()).dtype, local_files_only=True)
        difference = float((plain_logits(again, tokens) - before).abs().max())
        beside.rename(out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    size = sum(p.stat().st_size for p in out.iterdir())
    note = _NO_WINDOW if Tag("window") in opened.build.tags else ""
    return {"path": str(out), "bytes": size, "max_logit_difference": difference, "merged": merged, "note": note}
