"""Compresses a trained model by one or several methods, and compares each result with the original."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.compress import model_card, save_load
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.before_after import Baseline, Untimed, compute_held_out_logits
from preheat.compress.calibration import require_rows
from preheat.compress.calibration_text import Texts, find_texts
from preheat.compress.export import verify
from preheat.compress.registry import Method, methods
from preheat.compress.unfinished_run import note_unfinished
from preheat.core.compression import CompressedVariant, CompressionResult
from preheat.core.export import ExportResult
from preheat.errors import RecipeError, RunError, suggest_nearest
from preheat.files import to_json
from preheat.inference.load import LoadedModel, load_model
from preheat.models.hf import require_decoder_only
from preheat.recipe.validate import RecipeReader
from preheat.run.reader import Reader
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Variant",
    "compress",
    "build_variant",
    "remove_duplicates",
    "read_variant",
    "read_variants",
    "require_modules",
    "summarize_variants",
    "find_trained_variants",
]

Say = Callable[[str], None]
Page = Callable[[Path], object]


@dataclass(frozen=True)
class Variant:
    """A method with its settings, and a unique name for it."""

    name: str
    method: Method


def read_variants(texts: Sequence[str], bits: float | None, overrides: Sequence[str]) -> list[Variant]:
    """Parses methods and settings from the command line.

    Args:
        texts: `NAME[,key=value...]` each.
        bits: adds the method bit_budget with this budget; None: does not.
        overrides: `key=value` for every method with that setting, or `NAME.key=value` for one method.

    Raises:
        RecipeError: unknown method or setting, an invalid value, or a setting that no chosen method has.

    Example:
        >>> [v.method.group for v in read_variants(["int4", "awq"], None, ["awq.group=64"])]
        ['auto', 64]
    """
    split = [_parse_method(text) for text in texts]
    if bits is not None:
        split.append(("bit_budget", {"bits": bits}))
    known = methods()
    keys = {name: [field.name for field in dataclasses.fields(known[name])] for name, _ in split if name in known}
    # Without a known method, `build_variant` reports the unknown name instead.
    for item in overrides if keys else ():
        key, value = _parse_setting(item, f"--set {item}")
        owner, _, own = key.rpartition(".")
        if owner and owner not in keys:
            raise RecipeError(
                f"--set {shorten(item)}: {quote_value(owner, 40)} is not one of the chosen methods; "
                f"{suggest_nearest(owner, list(keys))}"
            )
        # A setting without an owner applies to every chosen method that has it.
        having = [name for name in keys if own in keys[name] and owner in ("", name)]
        if not having:
            known_keys = sorted({key for name in keys for key in keys[name] if owner in ("", name)})
            of = owner or ", ".join(keys)
            raise RecipeError(
                f"--set {shorten(item)}: {of}: no setting {quote_value(own, 40)} there; "
                f"{suggest_nearest(own, known_keys)}"
            )
        for name, values in split:
            if name in having:
                values[own] = value
    return [build_variant(name, values) for name, values in split]


def read_variant(text: str, overrides: Sequence[str] = ()) -> Variant:
    """Parses one method from `NAME[,key=value...]` and further `key=value`s; a list is written key=[a, b].

    Raises:
        RecipeError: as `read_variants`.

    Example:
        >>> read_variant("int4,group=64").method.group
        64
    """
    return read_variants([text], None, overrides)[0]


def _parse_method(text: str) -> tuple[str, dict[str, object]]:
    name, *pairs = re.split(r",(?![^\[]*\])", text)  # commas inside a list do not separate
    return name, dict(_parse_setting(pair, f"--method {text}") for pair in pairs)


def _parse_setting(pair: str, where: str) -> tuple[str, object]:
    from preheat.recipe.yaml_io import compose

    key, equals, raw = pair.partition("=")
    if not equals:
        raise RecipeError(
            f"{shorten(where)}: write settings as key=value, e.g. --method int4,group=64 or --set group=64"
        )
    return key.strip(), compose(raw, f"--set {shorten(pair)}", numbered=False)[0]


def build_variant(name: str, values: Mapping[str, object]) -> Variant:
    """Builds a method from its name and settings.

    Raises:
        RecipeError: unknown method or setting, or an invalid value.
    """
    known = methods()
    if name not in known:
        raise RecipeError(f"--method {shorten(name)}: no such method; {suggest_nearest(name, list(known))}")
    reader = RecipeReader("--method", {}, hints={})
    method = reader.flat(known[name], values, (name,))
    reader.refuse()
    # The label is also the name of the variant's folder.
    label = "-".join([name, *(f"{key}-{_format_plainly(value)}" for key, value in sorted(values.items()))])
    return Variant(label, method)


def _format_plainly(value: object) -> str:
    return "".join(
        c if c.isalnum() or c in "._" else "-" for c in (",".join(value) if isinstance(value, list) else str(value))
    )


def find_trained_variants(source: str | Path) -> list[Variant]:
    """Returns the variant that a run with quantization-aware training was trained for; empty for other runs."""
    from preheat import recipe as recipes

    file = Path(source) / "recipe.yaml"
    if not file.is_file():
        return []
    technique: Any = recipes.parse(Reader(source).recipe_text, where=str(file)).techniques.get("quantization_aware")
    if technique is None:
        return []
    settings = dataclasses.asdict(technique)
    # The weights were trained for this rounding: int4 in groups of the technique's size.
    settings["group"] = settings.pop("group_size")
    return [Variant("int4", methods()["int4"](**settings))]


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
    say: Say = lambda message: None,
) -> CompressionResult:
    """Compresses a model by each of the variants; starts from fp32 weights with adapters merged.

    One variant is written to the folder `out`, several to subfolders by name. Each is written under a temporary name,
    renamed, reopened by `load_model`, and must reproduce its in-memory logits exactly. `compress.json` is written to
    `out` (`preheat.report.compress_page` renders it).

    Args:
        source: a run, a checkpoint, or a model's folder.
        data: a text to split into calibration and held-out rows; default: a run's own training and validation rows.
        texts: rows that were found before, instead of `data`, `rows` and `length`.
        rows: maximum number of calibration sequences.
        length: tokens per row; default: the run's, or 512.
        measured: maximum number of held-out rows.
        within: the smallest variant whose perplexity rises by at most this fraction is chosen.
        turns: timed turns per model.
        notes: further notes for `notes`.
        page: called with the folder before it is renamed, to write a page from its compress.json.
        say: progress callback.

    Raises:
        RecipeError, DataError, RunError: as the methods; `out` exists; the folder does not reproduce the model's
            logits.
    """
    out = Path(out)
    require_new(out, source)
    if not variants:
        raise RecipeError(f"--method: none is named; {', '.join(methods())}")
    if len({v.name for v in variants}) < len(variants):
        raise RecipeError("--method: the same method with the same settings is given twice; leave one out")
    say("opening")
    opened = load_model(source)
    require_decoder_only(opened.build.trained[0], "preheat compress")  # type: ignore[arg-type]
    # Before the texts, which may take minutes to tokenize.
    _require(opened, variants, source)
    texts = texts or find_texts(opened, data, rows=rows, length=length)
    if any(v.method.reads_rows for v in variants):
        require_rows(texts.calibration)
    say("measuring the original model")
    before = Baseline.of(opened, texts, measured=measured)
    # All models stay in memory until the timing, which takes turns between them.
    untimed, models = [], {"before": before.plain}
    with NewFolder(out) as root:
        folders = [root if len(variants) == 1 else root / variant.name for variant in variants]
        for variant, folder in zip(variants, folders, strict=True):
            folder.mkdir(exist_ok=True)
            figures, models[variant.name] = _compress_variant(variant, opened, before, folder, say)
            untimed.append(figures)
        say("timing")
        # In turns at the end, so that a change of the machine's load affects all models alike.
        speeds = before.time(models, turns=turns)
        compressed = [figures.timed(speeds) for figures in untimed]
        warning = note_unfinished(source, opened.step)
        # The cards contain the times, so they come after the timing.
        for row, variant, folder in zip(compressed, variants, folders, strict=True):
            text = model_card.render_compressed_card(
                row,
                source=str(source),
                texts=texts,
                reads=variant.method.reads_rows,
                said=remove_duplicates([warning, *(row.notes or ())]),
            )
            (folder / "README.md").write_text(text, encoding="utf-8")
        choice = _choose_variant(compressed, within)
        all_notes = remove_duplicates([warning, *(note for row in compressed for note in row.notes or ()), *notes])
        chosen_folder = out if len(variants) == 1 else out / choice[0]
        summary = summarize_variants(chosen_folder, compressed, choice, str(source), texts, all_notes)
        (root / "compress.json").write_text(to_json(summary, indent=1), encoding="utf-8")
        # Before the rename, so that the folder appears complete or not at all.
        page(root)
    return summary


def remove_duplicates(notes: Iterable[str]) -> list[str]:
    """Removes duplicates and empty notes."""
    return list(dict.fromkeys(filter(None, notes)))


def _require(opened: LoadedModel, variants: Sequence[Variant], source: str | Path) -> None:
    from preheat.models.conversions.architecture import describe_unsupported_modules
    from preheat.models.hf import head
    from preheat.ops.adapters.peft_layers import names_of
    from preheat.ops.classification_head import ClassHead
    from preheat.ops.quantization.serialization import is_compressed

    model: PreTrainedModel = opened.build.trained[0]
    if isinstance(head(model), ClassHead):
        raise RecipeError(
            f"{source}: has a head over classes, for which there is no perplexity to measure; compress the original "
            "model"
        )
    if beyond := describe_unsupported_modules(model):
        raise RecipeError(
            f"{source}: has {' and '.join(beyond)}, which no class of transformers can load; compress the "
            "model before that"
        )
    if is_compressed(model):
        raise RecipeError(f"{source}: is compressed already; name the original model")
    if (stored := opened.build.weights.packed_method) and not names_of(model):
        raise RecipeError(f"{source}: is stored in {stored} already; name the original model")
    if opened.build.model.vision:
        raise RecipeError(
            f"{source}: reads images, and only text is measured here; compressing such models is not supported yet"
        )
    problems = [f"--method {v.name}: {problem}" for v in variants for problem in v.method.check(opened.build.model)]
    if problems:
        raise RecipeError("\n".join(problems))
    require_modules(model, [variant.method for variant in variants])


def require_modules(model: PreTrainedModel, chosen: Sequence[Method]) -> None:
    """Checks methods against a model's modules as they will be once adapters and rounding are merged (`Baseline.of`).

    Raises:
        RecipeError: as `Method.require`.
    """
    import torch

    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    for method in chosen:
        method.require(plain)


def _compress_variant(
    variant: Variant, opened: LoadedModel, before: Baseline, folder: Path, say: Say
) -> tuple[Untimed, PreTrainedModel]:
    """Applies one variant, writes and reopens it, and compares; returns its figures, and the model to time."""
    from preheat.ops.quantization.serialization import find_quantized_modules

    name, method = variant.name, variant.method
    say(f"{name}: compressing")
    # Methods change the model in place, and the next variant starts from the original.
    model: PreTrainedModel = copy.deepcopy(opened.build.trained[0])
    change = method.apply(model, before.texts.calibration if method.reads_rows else [])
    notes = save_load.write_model(model, opened, folder, method=name, dtype=before.dtype)
    notes += verify.note_code(folder)
    logits = compute_held_out_logits(model, opened)
    # Frees a copy before the next one is opened.
    del model
    say(f"{name}: reading back the written folder")
    reopened = load_model(folder)
    # Exactly equal: both are computed from the same stored weights, by the same code.
    if (
        difference := verify.compare(logits, compute_held_out_logits(reopened.build.trained[0], reopened)).largest
    ) != 0:
        raise RunError(
            f"{folder.name}: read back, its logits differ by up to {difference:.2g} from those of the model that was "
            "written; nothing was written; please report it"
        )
    say(f"{name}: measuring")
    comparison, timed = before.against(reopened)
    row = Untimed(
        name=name,
        method=method.name(),
        settings=dataclasses.asdict(method),
        what=change.what,
        bytes=save_load.count_weight_bytes(folder),
        comparison=comparison,
        detail=change.detail,
        notes=tuple(notes),
        quantized=bool(find_quantized_modules(reopened.build.trained[0])),
    )
    return row, timed


def _choose_variant(variants: Sequence[CompressedVariant], within: float) -> tuple[str, str]:
    """Returns the name of the variant to use, and why."""
    # Within the limit the smallest wins; beyond it only quality counts.
    near = [v for v in variants if v.perplexity_rise <= within]
    if near:
        best = min(near, key=lambda v: v.after.bytes)
        return best.name, f"the smallest whose perplexity is at most {within:.0%} higher"
    best = min(variants, key=lambda v: v.perplexity_rise)
    return best.name, f"none is within {within:.0%}: the one with the lowest perplexity"


def summarize_variants(
    path: Path,
    variants: Sequence[CompressedVariant],
    choice: tuple[str, str],
    source: str,
    texts: Texts,
    notes: Sequence[str],
    exports: Sequence[ExportResult] | None = None,
) -> CompressionResult:
    """Summarizes the results: the figures of the chosen variant at the top level, then all variants.

    Args:
        path: folder of the chosen variant.
        choice: its name, and why it was chosen.
        exports: of a chain.
    """
    chosen = next(v for v in variants if v.name == choice[0])
    return CompressionResult(
        path=str(path),
        bytes=chosen.bytes,
        before=chosen.before,
        after=chosen.after,
        max_logit_difference=chosen.max_logit_difference,
        chosen=chosen.name,
        chosen_because=choice[1],
        source=source,
        texts=texts.description,
        calibration_rows=len(texts.calibration),
        variants=tuple(variants),
        notes=tuple(notes),
        exports=None if exports is None else tuple(exports),
    )
