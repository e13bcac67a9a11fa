"""One verb: a trained model, one or several methods -> folders, each measured against what it came from, and a page about them."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat.compress import model_card, save_load
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.before_after import Baseline, held_logits
from preheat.compress.calibration import require_rows
from preheat.compress.calibration_text import Texts, find_texts
from preheat.compress.export import verify
from preheat.compress.registry import Method, methods
from preheat.compress.unfinished_run import unfinished
from preheat.errors import RecipeError, RunError, nearest
from preheat.inference.load import LoadedModel, load_model
from preheat.models.hf import require_decoder_only
from preheat.recipe.validate import RecipeReader
from preheat.run_dir import Reader, to_json
from preheat.sanitize import quoted, shorten

__all__ = ["Variant", "compress", "made_of", "once", "read_variant", "read_variants", "summed", "trained_for"]

Say = Callable[[str], None]
Page = Callable[[Path], object]


@dataclass(frozen=True)
class Variant:
    """A method with its settings, and what it is called among several."""

    name: str
    method: Method


def read_variants(texts: Sequence[str], bits: float | None, overrides: Sequence[str]) -> list[Variant]:
    """Methods, a budget of bits besides, and settings that go to every method that has them.

    Args:
        texts: `NAME[,key=value...]` each.
        bits: of the method bit_budget; None: it is not asked for.
        overrides: `key=value`, or `NAME.key=value` for that method alone.

    Raises:
        RecipeError: no such method or setting, a value that it cannot have, or a setting that no chosen method has.

    Example:
        >>> [v.method.group for v in read_variants(["int4", "awq"], None, ["awq.group=64"])]
        ['auto', 64]
    """
    split = [_parsed(text) for text in texts]
    if bits is not None:
        split.append(("bit_budget", {"bits": bits}))
    known = methods()
    keys = {name: [field.name for field in dataclasses.fields(known[name])] for name, _ in split if name in known}
    for item in overrides if keys else ():
        key, value = _setting(item, f"--set {item}")
        owner, _, own = key.rpartition(".")
        if owner and owner not in keys:
            raise RecipeError(
                f"--set {shorten(item)}: {quoted(owner, 40)} is none of the chosen methods; {nearest(owner, list(keys))}"
            )
        having = [name for name in keys if own in keys[name] and owner in ("", name)]
        if not having:
            known_keys = sorted({key for name in keys for key in keys[name] if owner in ("", name)})
            of = owner or ", ".join(keys)
            raise RecipeError(
                f"--set {shorten(item)}: {of}: no setting {quoted(own, 40)} there; {nearest(own, known_keys)}"
            )
        for name, values in split:
            if name in having:
                values[own] = value
    return [made_of(name, values) for name, values in split]


def read_variant(text: str, overrides: Sequence[str] = ()) -> Variant:
    """One method from `NAME[,key=value...]` and further `key=value`s; a list is written key=[a, b].

    Raises:
        RecipeError: as `read_variants`.

    Example:
        >>> read_variant("int4,group=64").method.group
        64
    """
    return read_variants([text], None, overrides)[0]


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    name, *pairs = re.split(r",(?![^\[]*\])", text)  # not at those inside a list
    return name, dict(_setting(pair, f"--method {text}") for pair in pairs)


def _setting(pair: str, where: str) -> tuple[str, Any]:
    from preheat.recipe.yaml_io import compose

    key, equals, raw = pair.partition("=")
    if not equals:
        raise RecipeError(
            f"{shorten(where)}: write settings as key=value, e.g. --method int4,group=64 or --set group=64"
        )
    return key.strip(), compose(raw, f"--set {shorten(pair)}", numbered=False)[0]


def made_of(name: str, values: Mapping[str, Any]) -> Variant:
    """A method by its name with settings.

    Raises:
        RecipeError: no such method or setting, or a value that it cannot have.
    """
    known = methods()
    if name not in known:
        raise RecipeError(f"--method {shorten(name)}: no such method; {nearest(name, list(known))}")
    reader = RecipeReader("--method", {})
    method = reader.flat(known[name], values, (name,))
    reader.refuse()
    label = "-".join([name, *(f"{key}-{_plain(value)}" for key, value in sorted(values.items()))])
    return Variant(label, method)


def _plain(value: Any) -> str:
    return "".join(
        c if c.isalnum() or c in "._" else "-" for c in (",".join(value) if isinstance(value, list) else str(value))
    )


def trained_for(source: str | Path) -> list[Variant]:
    """The method that a run with quantization-aware training was trained for, with its settings; nothing for any other."""
    from preheat import recipe as recipes

    file = Path(source) / "recipe.yaml"
    if not file.is_file():
        return []
    technique: Any = recipes.parse(Reader(source).recipe_text, where=str(file)).techniques.get("quantization_aware")
    if technique is None:
        return []
    return [Variant("int4", methods()["int4"](**dataclasses.asdict(technique)))]


def compress(
    source: str | Path,
    variants: Sequence[Variant],
    out: str | Path,
    *,
    data: str | None = None,
    texts: Texts | None = None,
    rows: int = 128,
    length: int | None = None,
    measured: int = 64,
    within: float = 0.02,
    turns: int = 5,
    notes: Sequence[str] = (),
    page: Page = lambda folder: None,
    say: Say = lambda words: None,
) -> dict[str, Any]:
    """Compresses a model by each of the variants, from its weights in fp32 with adapters merged.

    One variant becomes the folder `out`; several become folders in it, by name. Each is written beside and renamed, opened again by
    `open_model`, and must then give the very logits that it gave in memory. `compress.json` stands in `out` (`preheat.report.compress_page` makes the page of it).

    Args:
        source: a run, a checkpoint, or a model's folder.
        data: a text to calibrate with and to measure on, by parts; a run's own training and validation rows when not given.
        texts: what was found of them before, in place of `data`, `rows` and `length`.
        rows: calibration rows, at most.
        length: tokens a row; the run's, or 512, when not given.
        measured: held-out rows, at most.
        within: the variant that is chosen is the smallest whose perplexity is higher by this share at most.
        turns: of the timing.
        notes: what is to be said beside what is found here.
        page: given the folder with its compress.json before it takes its name, to put a page there.
        say: told what is being done.

    Returns:
        {path, bytes, before, after, max_logit_difference, chosen, variants: [...], said: [what there is to know]}; the first of the chosen variant. `bytes` is the size
        of its files of weights; `before` and `after` have the bytes of weights with what is not quantized in bf16.

    Raises:
        RecipeError, DataError, RunError: see the methods; `out` stands already; the folder does not give what was compressed.
    """
    out = Path(out)
    require_new(out, source)
    if not variants:
        raise RecipeError(f"--method: none is named; {', '.join(methods())}")
    if len({v.name for v in variants}) < len(variants):
        raise RecipeError("--method: the same method with the same settings stands twice; leave one out")
    say("opening")
    opened = load_model(source)
    require_decoder_only(opened.build.trained[0], "preheat compress")  # type: ignore[arg-type]
    _require(opened, variants, source)
    texts = texts or find_texts(opened, data, rows=rows, length=length)
    if any(v.method.reads_rows for v in variants):
        require_rows(texts.calibration)
    say("measuring the model as it is")
    before = Baseline.of(opened, texts, measured=measured)
    found, timed = [], {"before": before.plain}
    with NewFolder(out) as beside:
        places = [beside if len(variants) == 1 else beside / variant.name for variant in variants]
        for variant, place in zip(variants, places, strict=True):
            place.mkdir(exist_ok=True)
            told, timed[variant.name] = _one(variant, opened, before, place, say)
            found.append(told)
        say("timing")
        before.time(found, timed, turns=turns)
        middle = unfinished(source, opened.step)
        for told, variant, place in zip(found, variants, places, strict=True):
            text = model_card.write(
                told,
                source=str(source),
                texts=texts,
                reads=variant.method.reads_rows,
                quantized=told["quantized"],
                said=once([middle, *told["notes"]]),
            )
            (place / "README.md").write_text(text, encoding="utf-8")
        choice = _chosen(found, within)
        made = summed(out if len(found) == 1 else out / choice[0], found, choice, str(source), texts)
        made["said"] = once([middle, *(note for told in found for note in told["notes"]), *notes])
        (beside / "compress.json").write_text(to_json(made, indent=1), encoding="utf-8")
        page(beside)
    return made


def once(words: Iterable[str]) -> list[str]:
    """Each that says something, once."""
    return list(dict.fromkeys(filter(None, words)))


def _require(opened: LoadedModel, variants: Sequence[Variant], source: Any) -> None:
    from preheat.models.conversions.architecture import beyond_transformers
    from preheat.models.hf import head
    from preheat.ops.classification_head import ClassHead
    from preheat.ops.quantization.serialization import is_compressed

    model: Any = opened.build.trained[0]
    if isinstance(head(model), ClassHead):
        raise RecipeError(
            f"{source}: has a head over classes, for which there is no perplexity to measure; compress the model it was made from"
        )
    if beyond := beyond_transformers(model):
        raise RecipeError(
            f"{source}: has {' and '.join(beyond)}, which no class of transformers can load; compress the model before that"
        )
    if is_compressed(model):
        raise RecipeError(f"{source}: is compressed already; name the model it was made from")
    if opened.build.model.vision:
        raise RecipeError(
            f"{source}: reads images, and what is measured here is text alone; compressing such models is not done yet"
        )
    problems = [f"--method {v.name}: {words}" for v in variants for words in v.method.check(opened.build.model)]
    if problems:
        raise RecipeError("\n".join(problems))


def _one(variant: Variant, opened: LoadedModel, before: Baseline, place: Path, say: Say) -> tuple[dict[str, Any], Any]:
    """One variant applied, written, opened again, compared and measured: what is told of it, and the model, to be timed."""
    from preheat.ops.quantization.serialization import quantized_modules

    name, method = variant.name, variant.method
    say(f"{name}: compressing")
    model: Any = copy.deepcopy(opened.build.trained[0])
    change = method.apply(model, before.texts.calibration if method.reads_rows else [])
    notes = save_load.write_model(model, opened, place, method=name, dtype=before.dtype)
    notes += verify.code_in(place)
    held = held_logits(model, opened)
    del model
    say(f"{name}: opening what was written")
    again = load_model(place)
    if (off := verify.compare(held, held_logits(again.build.trained[0], again)).largest) != 0:
        raise RunError(
            f"{place.name}: opened again, its logits differ by up to {off:.2g} from those of the model that was written; nothing was written; please report it"
        )
    say(f"{name}: measuring")
    told, timed = before.against(again)
    quantized = bool(quantized_modules(again.build.trained[0]))
    told = {
        "name": name,
        "method": method.name(),
        "settings": dataclasses.asdict(method),
        "what": change.what,
        "detail": change.detail,
        "notes": notes,
        "quantized": quantized,
        "bytes": sum(p.stat().st_size for p in place.glob("*.safetensors")),
        **told,
    }
    return told, timed


def _chosen(found: Sequence[dict[str, Any]], within: float) -> tuple[str, str]:
    """Name of the variant to take, and why."""
    near = [v for v in found if v["perplexity_rise"] <= within]
    if near:
        best = min(near, key=lambda v: v["after"]["bytes"])
        return best["name"], f"the smallest whose perplexity is at most {within:.0%} higher"
    best = min(found, key=lambda v: v["perplexity_rise"])
    return best["name"], f"none is within {within:.0%}: the one with the least perplexity"


def summed(
    path: Path, found: Sequence[dict[str, Any]], choice: tuple[str, str], source: str, texts: Texts
) -> dict[str, Any]:
    """The whole as data: the chosen variant first, then all of them.

    Args:
        path: of the chosen one.
        choice: its name, and why.
    """
    chosen = next(v for v in found if v["name"] == choice[0])
    return {
        "path": str(path),
        "bytes": chosen["bytes"],
        "before": chosen["before"],
        "after": chosen["after"],
        "max_logit_difference": chosen["max_logit_difference"],
        "chosen": chosen["name"],
        "chosen_because": choice[1],
        "source": source,
        "texts": texts.words,
        "calibration_rows": len(texts.calibration),
        "variants": list(found),
    }
