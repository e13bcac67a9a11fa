"""One verb: a trained model, one or several methods -> folders, each measured against what it came from, and a page about them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preheat.compress import card, folder
from preheat.compress.export import shared
from preheat.compress.method import Method, methods
from preheat.compress.speed import Speed, speeds
from preheat.compress.texts import Texts, find_texts
from preheat.errors import RecipeError, RunError, nearest
from preheat.recipe.boundary import RecipeReader
from preheat.training.opened import Opened, open_model

if TYPE_CHECKING:
    from preheat.evaluation.results import Result

__all__ = ["Variant", "compress", "quality", "read_variant", "trained_for"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """A method with its settings, and what it is called among several."""

    name: str
    method: Method


def read_variant(text: str, overrides: Sequence[str] = ()) -> Variant:
    """A method from `NAME[,key=value...]` and further `key=value`s; a list is written key=[a, b].

    Raises:
        RecipeError: no such method or setting, or a value that it cannot have.

    Example:
        >>> read_variant("int4,group=64").method.group
        64
    """
    from preheat.recipe.text import compose

    name, *pairs = re.split(r",(?![^\[]*\])", text)  # not at those inside a list
    known = methods()
    if name not in known:
        raise RecipeError(f"--method {name}: no such method; {nearest(name, list(known))}")
    values: dict[str, Any] = {}
    for pair in (*pairs, *overrides):
        key, equals, raw = pair.partition("=")
        if not equals:
            raise RecipeError(f"--method {text}: write settings as key=value, e.g. --method int4,group=64")
        values[key.strip()] = compose(raw, f"--set {pair}")[0]
    reader = RecipeReader("--method", {})
    method = reader.flat(known[name], values, (name,))
    if reader.found:
        raise RecipeError("\n".join(reader.found))
    label = "-".join([name, *(f"{key}-{_plain(value)}" for key, value in sorted(values.items()))])
    return Variant(label, method)


def _plain(value: Any) -> str:
    return "".join(c if c.isalnum() or c in "._" else "-" for c in (",".join(value) if isinstance(value, list) else str(value)))


def trained_for(source: str | Path) -> list[Variant]:
    """The method that a run with quantization-aware training was trained for, with its settings; nothing for any other."""
    from preheat import recipe as recipes

    file = Path(source) / "recipe.yaml"
    technique: Any = recipes.load(file).techniques.get("quantization_aware") if file.is_file() else None
    if technique is None:
        return []
    return [Variant("int4", methods()["int4"](**dataclasses.asdict(technique)))]


def compress(
    source: str | Path,
    variants: Sequence[Variant],
    out: str | Path,
    *,
    data: str | None = None,
    rows: int = 128,
    length: int | None = None,
    measured: int = 64,
    within: float = 0.02,
    turns: int = 5,
    say: Say = lambda words: None,
) -> dict[str, Any]:
    """Compresses a model by each of the variants, from its weights in fp32 with adapters merged.

    One variant becomes the folder `out`; several become folders in it, by name. Each is written beside and renamed, opened again by
    `open_model`, and must then give the very logits that it gave in memory. `compress.json` stands in `out` (`preheat.report.compress_page` makes the page of it).

    Args:
        source: a run, a checkpoint, or a model's folder.
        data: a text to calibrate with and to measure on, by parts; a run's own training and validation rows when not given.
        rows: calibration rows, at most.
        length: tokens a row; the run's, or 512, when not given.
        measured: held-out rows, at most.
        within: the variant that is chosen is the smallest whose perplexity is higher by this share at most.
        turns: of the timing.
        say: told what is being done.

    Returns:
        {path, bytes, before, after, max_logit_difference, chosen, variants: [...]}; the first of the chosen variant. `bytes` is the size
        of its files of weights; `before` and `after` have the bytes of weights with what is not quantized in bf16.

    Raises:
        RecipeError, DataError, RunError: see the methods; `out` stands already; the folder does not give what was compressed.
    """
    out = Path(out)
    shared.must_be_new(out)
    if not variants:
        raise RecipeError(f"--method: none is named; {', '.join(methods())}")
    if len({v.name for v in variants}) < len(variants):
        raise RecipeError("--method: the same method with the same settings stands twice; leave one out")
    say("opening")
    opened = open_model(source)
    _require(opened, variants, source)
    texts = find_texts(opened, data, rows=rows, length=length)
    before = _plainly(opened, texts, measured, say)
    prompt = texts.calibration[0][:, : max(2, min(128, texts.calibration[0].shape[1] - 1))]
    found, timed = [], {"before": before.plain}
    with shared.beside(out) as beside:
        places = [beside if len(variants) == 1 else beside / variant.name for variant in variants]
        for variant, place in zip(variants, places, strict=True):
            place.mkdir(exist_ok=True)
            told, timed[variant.name] = _one(variant, opened, before, texts, place, measured, say)
            found.append(told)
        say("timing")
        for name, speed in speeds(timed, prompt, turns=turns).items():
            for told in found:
                if name in ("before", told["name"]):
                    told["before" if name == "before" else "after"] |= _timed(speed)
        for told, variant, place in zip(found, variants, places, strict=True):
            text = card.write(told, source=str(source), texts=texts, reads=variant.method.reads_rows)
            (place / "README.md").write_text(text, encoding="utf-8")
        made = _summed(out, found, within, str(source), texts)
        (beside / "compress.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    return made


def _require(opened: Opened, variants: Sequence[Variant], source: Any) -> None:
    from preheat.models.adapter import head
    from preheat.models.surgery import beyond_transformers
    from preheat.ops.class_head import ClassHead
    from preheat.ops.quantized_folder import quantized_modules

    model: Any = opened.build.trained[0]
    if isinstance(head(model), ClassHead):
        raise RecipeError(
            f"{source}: has a head over classes, for which there is no perplexity to measure; compress the model it was made from"
        )
    if beyond := beyond_transformers(model):
        raise RecipeError(
            f"{source}: has {' and '.join(beyond)}, which no class of transformers can load; compress the model before that"
        )
    if quantized_modules(model):
        raise RecipeError(f"{source}: is compressed already; name the model it was made from")
    problems = [f"--method {v.name}: {words}" for v in variants for words in v.method.check(opened.build.model)]
    if problems:
        raise RecipeError("\n".join(problems))


@dataclass
class _Before:
    """The model as it was: a copy in bf16, to be timed against; what was measured of it; its bytes in bf16; its own precision; its logits
    over rows of text."""

    plain: Any
    quality: Result
    bytes: int
    dtype: torch.dtype
    logits: list[Tensor]


def _plainly(opened: Opened, texts: Texts, measured: int, say: Say) -> _Before:
    """Measures the model as it is; then merges it, in fp32, for the methods to begin from."""
    from preheat.ops.adapters import merge, names_of
    from preheat.ops.quantized_training import unfake_

    say("measuring the model as it is")
    model: Any = opened.build.trained[0]
    before = quality(opened, texts, measured)
    wanted = _logits(model, _compared(opened))
    if names_of(model):
        merge(model)
    unfake_(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    model.float().requires_grad_(False)
    plain = _half(model)
    return _Before(plain, before, _bytes(plain), dtype, wanted)


def _half(model: Any) -> Any:
    """A copy in bf16: what compressed models are timed against."""
    from preheat.ops.quantized_folder import to_half

    made = copy.deepcopy(model)
    to_half(made)
    return made


def _bytes(model: Any) -> int:
    """Of the weights, those that modules share once."""
    return sum({id(p): p.nbytes for p in model.parameters()}.values())


def _compared(opened: Opened) -> list[Tensor]:
    return shared.rows(opened.tokenizer, opened.build.model.positions, [])


def _logits(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    from preheat.models.adapter import plain_logits

    return [plain_logits(model, row).cpu() for row in rows]


def quality(opened: Opened, texts: Texts, measured: int) -> Result:
    """Loss and perplexity of held-out text."""
    from preheat.evaluation.texts import bytes_of_tokens, measure_text

    micro = min(8, opened.recipe.batch.size)
    return measure_text(opened.build, texts.held_out, micro=micro, limit=measured, sizes=bytes_of_tokens(opened.tokenizer))


def _told(result: Result) -> dict[str, Any]:
    from preheat.evaluation.results import described

    found = described(result)
    loss, perplexity = (found["metrics"][key] for key in ("loss", "perplexity"))
    return {
        "loss": loss["value"],
        "perplexity": perplexity["value"],
        "perplexity_interval": [perplexity["low"], perplexity["high"]],
        "rows": found["rows"],
        "tokens": found["tokens"],
    }


def _rise(before: Result, after: Result) -> dict[str, Any]:
    """How much higher the perplexity is, as a share, and between what (95 % of paired bootstrap resamples of the rows)."""
    from preheat.evaluation.results import compared

    loss = compared(before, after)["metrics"]["loss"]
    low, high = (None if v is None else math.expm1(v) for v in (loss["low"], loss["high"]))
    return {"perplexity_rise": math.expm1(loss["value"]), "perplexity_rise_interval": [low, high]}


def _one(
    variant: Variant, opened: Opened, before: _Before, texts: Texts, place: Path, measured: int, say: Say
) -> tuple[dict[str, Any], Any]:
    """One variant applied, written, opened again, compared and measured: what is told of it, and the model, to be timed."""
    from preheat.ops.quantized_folder import quantized_modules

    name, method = variant.name, variant.method
    say(f"{name}: compressing")
    model = copy.deepcopy(opened.build.trained[0])
    change = method.apply(model, texts.calibration if method.reads_rows else [])
    folder.write_model(model, opened.tokenizer, place, method=name, base=opened.build.weights.folder, dtype=before.dtype)
    rows = _compared(opened)
    held = _logits(model, rows)
    del model
    say(f"{name}: opening what was written")
    again = open_model(place)
    new: Any = again.build.trained[0]
    found = _logits(new, rows)
    if (off := shared.compare(held, found).largest) != 0:
        raise RunError(
            f"{place.name}: opened again, its logits differ by up to {off:.2g} from those of the model that was written; nothing was written; please report it"
        )
    say(f"{name}: measuring")
    difference = shared.compare(before.logits, found)
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(before.logits, found, strict=True))
    after = quality(again, texts, measured)
    timed = new if quantized_modules(new) else _half(new)
    told = {
        "name": name,
        "method": method.name(),
        "settings": dataclasses.asdict(method),
        "what": change.what,
        "before": {**_told(before.quality), "bytes": before.bytes, "dtype": "bfloat16"},
        "after": {**_told(after), "bytes": _bytes(timed)},
        "bytes": sum(p.stat().st_size for p in place.glob("*.safetensors")),
        "max_logit_difference": difference.largest,
        "largest_logit": difference.scale,
        "top_1_agreement": same / difference.tokens,
        **_rise(before.quality, after),
    }
    return told, timed


def _timed(found: Speed) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt,
        "first_token_seconds": found.first_token,
        "decode_tokens_per_second": found.decode,
        "decode_interval": [found.low, found.high],
    }


def _summed(out: Path, found: list[dict[str, Any]], within: float, source: str, texts: Texts) -> dict[str, Any]:
    """The whole as data: the chosen variant first, then all of them."""
    near = [v for v in found if v["perplexity_rise"] <= within]
    chosen = min(near, key=lambda v: v["after"]["bytes"]) if near else min(found, key=lambda v: v["perplexity_rise"])
    path = out if len(found) == 1 else out / chosen["name"]
    words = (
        f"the smallest whose perplexity is at most {within:.0%} higher"
        if near
        else f"none is within {within:.0%}: the one with the least perplexity"
    )
    return {
        "path": str(path),
        "bytes": chosen["bytes"],
        "before": chosen["before"],
        "after": chosen["after"],
        "max_logit_difference": chosen["max_logit_difference"],
        "chosen": chosen["name"],
        "chosen_because": words,
        "source": source,
        "texts": texts.words,
        "calibration_rows": len(texts.calibration),
        "variants": found,
    }
