"""What the hub reads at the top of a model card: the base and its relation, library, licence, task, data; one writer for all cards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.compress.atomic_folder import home_of
from preheat.recipe import Recipe

__all__ = ["Front", "front_matter", "pipeline_of"]

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Front:
    """The block of YAML between two lines of dashes, and what is left out of it, as a sentence."""

    yaml: str
    left_out: str


def front_matter(
    source: str | Path, *, library: str, pipeline: str, relation: str = "quantized", tags: Sequence[str] = ()
) -> Front:
    """The front matter of what was made of a model.

    Args:
        source: a run, one of its checkpoints, a model's folder or an adapter's.
        library: what loads it: transformers, peft, gguf …
        pipeline: the hub's name of the task.
        relation: to the base, of what was only converted or compressed; what was trained is a finetune, or an adapter where this says so.
        tags: beside preheat.
    """
    import yaml

    home = home_of(source)[0]
    recipe = recipes.load(home / "recipe.yaml", warn=False) if (home / "recipe.yaml").is_file() else None
    base: str | None = str(Path(source).resolve())
    if recipe is not None:
        pretrained = recipe.model.path is not None and recipe.model.weights == "pretrained"
        base, relation = recipe.model.path if pretrained else None, "adapter" if relation == "adapter" else "finetune"
    values: dict[str, Any] = {"library_name": library, "pipeline_tag": pipeline}
    left, note = [], ""
    if base is None:
        left.append("base_model: it was trained from new weights")
    else:
        name = _hub_name(base)
        if name is None:
            note = "  # a folder, not a name on the hub: put the hub's name here"
        values |= {"base_model": name or Path(base).resolve().name, "base_model_relation": relation}
    licence = _license_of(base)
    values |= licence
    if not licence:
        left.append("license: " + ("nobody stated one" if base is None else "the base's own card states none here"))
    if names := _datasets(recipe):
        values["datasets"] = names
    values["tags"] = list(dict.fromkeys(["preheat", *tags]))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
    text = re.sub(r"^(base_model: .*)$", lambda found: found[1] + note, text, count=1, flags=re.MULTILINE)
    return Front(f"---\n{text}---", f"Left out above: {'; '.join(left)}." if left else "")


def pipeline_of(config: Any) -> str:
    """The hub's name of the task of a language model's configuration."""
    if any(name.endswith("SequenceClassification") for name in config.architectures or ()):
        return "text-classification"
    if getattr(config, "vision_config", None) is not None:
        return "image-text-to-text"
    return "text2text-generation" if config.is_encoder_decoder else "text-generation"


def _hub_name(base: str) -> str | None:
    """The name on the hub of a base; of a folder in the hub's cache, too."""
    if found := re.search(r"models--([\w.-]+)--([\w.-]+)/snapshots/", base):
        return f"{found[1]}/{found[2]}"
    return base if _HUB.fullmatch(base) and not Path(base).exists() else None


def _license_of(base: str | None) -> dict[str, Any]:
    """What the card in the base's folder says of its licence."""
    import yaml

    card = Path(base) / "README.md" if base is not None else None
    if card is None or not card.is_file():
        return {}
    with card.open(encoding="utf-8", errors="replace") as opened:
        text = opened.read(1 << 16)
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|\Z)", text, re.DOTALL)
    try:
        values = yaml.safe_load(found[1]) if found and "&" not in found[1] else None
    except (yaml.YAMLError, ValueError, RecursionError):  # somebody else's file, which nothing depends on
        return {}
    known = values if isinstance(values, dict) else {}
    return {key: known[key] for key in _LICENSE if isinstance(known.get(key), str)}


def _datasets(recipe: Recipe | None) -> list[str]:
    """Names on the hub of the data."""
    if recipe is None:
        return []
    names = [str(part.source) for part, _ in recipe.data.parts()]
    return [name for name in names if _HUB.fullmatch(name) and not Path(name).exists() and not Path(name).suffix]
