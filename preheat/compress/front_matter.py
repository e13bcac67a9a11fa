"""YAML front matter of model cards (base model, license, task, datasets), shared by all card writers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.compress.atomic_folder import choose_home
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.core.json_types import JsonObject

__all__ = ["FOLDER_NOTE", "Front", "build_front_matter", "hub_name", "find_pipeline_tag"]

FOLDER_NOTE = "  # a folder, not a name on the hub: put the hub's name here"
"""Comment behind a `base_model` that is the name of a folder."""

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Front:
    """The YAML block, and a sentence about the fields left out of it."""

    yaml: str
    left_out: str


def build_front_matter(
    source: str | Path, *, library: str, pipeline: str, relation: str = "quantized", tags: Sequence[str] = ()
) -> Front:
    """Builds the front matter of a model made from `source`.

    Args:
        source: a run, one of its checkpoints, a model's folder or an adapter's.
        library: the library that loads it: transformers, peft, gguf …
        pipeline: the hub's name of the task.
        relation: to the base, for models that were only converted or compressed. A trained model is a finetune, or an
            adapter if this says so.
        tags: in addition to preheat.
    """
    import yaml

    home = choose_home(source)[0]
    recipe = recipes.load(home / "recipe.yaml", warn=False) if (home / "recipe.yaml").is_file() else None
    # A converted or compressed model has its source as base; a trained one has the source of its run.
    base: str | None = str(Path(source).resolve())
    if recipe is not None:
        pretrained = recipe.model.path is not None and recipe.model.weights == "pretrained"
        base, relation = recipe.model.path if pretrained else None, "adapter" if relation == "adapter" else "finetune"
    values: JsonObject = {"library_name": library, "pipeline_tag": pipeline}
    omitted, note = [], ""
    if base is None:
        omitted.append("base_model: it was trained from new weights")
    # Base known: a name on the hub, or a folder whose name has to be replaced by hand.
    else:
        name = hub_name(base)
        if name is None:
            note = FOLDER_NOTE
        values |= {"base_model": name or Path(base).resolve().name, "base_model_relation": relation}
    license_fields = _read_license(base)
    values |= license_fields
    if not license_fields:
        omitted.append("license: " + ("none is stated" if base is None else "the base's own card states none here"))
    if names := _list_datasets(recipe):
        values["datasets"] = names
    values["tags"] = list(dict.fromkeys(["preheat", *tags]))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
    # safe_dump writes no comments, so the note is added to the line afterwards.
    text = re.sub(r"^(base_model: .*)$", lambda match: match[1] + note, text, count=1, flags=re.MULTILINE)
    return Front(f"---\n{text}---", f"Left out above: {'; '.join(omitted)}." if omitted else "")


def find_pipeline_tag(config: PretrainedConfig) -> str:
    """Returns the hub's name of the task for a language model's configuration."""
    if any(name.endswith("SequenceClassification") for name in config.architectures or ()):
        return "text-classification"
    if getattr(config, "vision_config", None) is not None:
        return "image-text-to-text"
    return "text2text-generation" if config.is_encoder_decoder else "text-generation"


def hub_name(base: str) -> str | None:
    """Returns the hub's name of a base, also of a folder in the hub's cache; None if it has none."""
    # The hub's cache has folders models--OWNER--NAME/snapshots/REVISION.
    if match := re.search(r"models--([\w.-]+)--([\w.-]+)/snapshots/", base):
        return f"{match[1]}/{match[2]}"
    return base if _HUB.fullmatch(base) and not Path(base).exists() else None


def _read_license(base: str | None) -> JsonObject:
    """Returns the license fields of the card in the base's folder."""
    import yaml

    card = Path(base) / "README.md" if base is not None else None
    if card is None or not card.is_file():
        return {}
    with card.open(encoding="utf-8", errors="replace") as opened:
        # The front matter is at the beginning; a huge card is not read whole.
        text = opened.read(1 << 16)
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|\Z)", text, re.DOTALL)
    try:
        # Without "&": nested YAML aliases can expand to gigabytes.
        values = yaml.safe_load(match[1]) if match and "&" not in match[1] else None
    except (yaml.YAMLError, ValueError, RecursionError):  # the base's card is not ours, and its license is optional
        return {}
    known = values if isinstance(values, dict) else {}
    return {key: known[key] for key in _LICENSE if isinstance(known.get(key), str)}


def _list_datasets(recipe: Recipe | None) -> list[str]:
    """Returns the hub's names of the datasets."""
    if recipe is None:
        return []
    names = [str(part.source) for part, _ in recipe.data.parts()]
    # "data/train.txt" looks like a hub name; its suffix shows a file of another machine.
    return [name for name in names if _HUB.fullmatch(name) and not Path(name).exists() and not Path(name).suffix]
