"""Published configurations of public models, by name: enough for planning without a download. Does not import torch.

The values are those of each model's config.json on the Hugging Face hub; `parameters` is the published number. Models
up to early 2025 are in one module per publisher, later ones in one JSON file per publisher (`published/`).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from preheat.errors import RecipeError, suggest_nearest
from preheat.models.presets import alibaba, google, meta, microsoft, others, published
from preheat.models.presets.describe import needs
from preheat.models.presets.preset import Preset
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.core import Recipe


__all__ = [
    "FREE",
    "PRESETS",
    "Preset",
    "find",
    "find_variant",
    "needs",
    "resolve_hub_name",
    "is_plan_only",
    "require_weights",
]

# Keys that may differ between checkpoints of one model (base and instruct), or that do not change the computation.
FREE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "attn_pdrop",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)


class _Presets(Mapping[str, Preset]):
    """All presets by name, sorted; reads the published files at first use."""

    @functools.cached_property
    def _models(self) -> dict[str, Preset]:
        tables = meta.MODELS | alibaba.MODELS | google.MODELS | microsoft.MODELS | others.MODELS
        return dict(sorted((tables | published.models()).items()))

    def __getitem__(self, name: str) -> Preset:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


PRESETS: Mapping[str, Preset] = _Presets()


def find(name: str) -> Preset:
    """Returns the preset of a name.

    Raises:
        RecipeError: there is none.

    Example:
        >>> find("qwen2.5-0.5b").parameters
        494032768
    """
    if name not in PRESETS:
        raise RecipeError(
            f"model.preset: {name!r} is not a known preset; {suggest_nearest(name.lower(), list(PRESETS))}"
        )
    return PRESETS[name]


def resolve_hub_name(name: str) -> tuple[str, str]:
    """Resolves a model's name, of a preset or on the hub (publisher optional, any case), to (preset, checkpoint).

    Raises:
        RecipeError: no such model; the closest is suggested.

    Example:
        >>> resolve_hub_name("qwen/QWEN3-8B"), resolve_hub_name("Llama-3.1-8B-Instruct")
        (('qwen3-8b', 'Qwen/Qwen3-8B'), ('llama-3.1-8b', 'meta-llama/Llama-3.1-8B-Instruct'))
    """
    # The first preset in order wins a name that several share.
    known: dict[str, tuple[str, str]] = {}
    for preset, p in PRESETS.items():
        for hub in p.checkpoints:
            known.setdefault(hub.lower(), (preset, hub))
            known.setdefault(_strip_maker(hub), (preset, hub))
        known.setdefault(preset, (preset, p.hub))
    if match := known.get(name.lower()) or known.get(_strip_maker(name)):
        return match
    likeness, _, near = max((*_compare_names(name, other), other) for other in known)
    raise RecipeError(
        f"{shorten(name)}: not a known model; "
        + (f"did you mean {known[near][1]}?" if likeness > 0.6 else "`preheat models` lists them;")
        + " `preheat plan` also takes a folder with a config.json, a recipe, or with a network the name of any model "
        "on the hub (owner/name)"
    )


# Variants of one model, which have its sizes.
_VARIANT = re.compile(
    r"[-_](instruct|it|chat|base|pt|hf|think|thinking|reasoning|qat|gguf|awq|gptq|mlx|bnb|unsloth|dynamic|unquantized|"
    r"bf16|fp16|fp8|fp4|nf4|nvfp4|mxfp4|dequantized|q4_0|w4a16|int[48]|[48]bits?)(?![a-z0-9])"
)


def _strip_name(name: str) -> str:
    """A model's name without what differs between copies of it: maker, variant, number format, separators."""
    plain = _VARIANT.sub("", _strip_maker(name)[:200])
    return re.sub(r"[-_: ]+", "", plain)


def find_variant(name: str) -> str | None:
    """Returns the preset of which a hub name is a copy of the same sizes: another maker's, format's or tuning's.

    Returns:
        None if there is none, or several.

    Example:
        >>> find_variant("owner/llama-3-70b-fp16"), find_variant("owner/something-7B")
        ('llama-3-70b', None)
    """
    plain = _strip_name(name)
    alike = {preset for preset, p in PRESETS.items() if plain in map(_strip_name, p.checkpoints)}
    return alike.pop() if len(alike) == 1 else None


def _compare_names(name: str, other: str) -> tuple[float, float]:
    """How alike two models are by their names, from 0 to 1, then the names; other families are not alike."""
    cores = _strip_name(name), _strip_name(other)
    families = [re.split(r"\d", core)[0] for core in cores]
    if difflib.SequenceMatcher(None, families[0], families[1]).ratio() < 0.7:
        return 0.0, 0.0
    names = _strip_maker(name)[:200], _strip_maker(other)
    return difflib.SequenceMatcher(None, *cores).ratio(), difflib.SequenceMatcher(None, *names).ratio()


def _strip_maker(hub: str) -> str:
    return hub.lower().rpartition("/")[2].removeprefix("meta-")


def is_plan_only(recipe: Recipe) -> bool:
    """True if the recipe's model is only a configuration, without weights or tokenizer."""
    model = recipe.model
    # Random weights need no checkpoint: such a model is trained from its configuration.
    return model.preset is not None and model.path is None and model.weights != "random"


def require_weights(recipe: Recipe) -> None:
    """Rejects training a preset without weights: silently starting from random ones would not be fine-tuning.

    Raises:
        RecipeError: `model.preset` without `path`, and `weights` is not random.
    """
    model = recipe.model
    if is_plan_only(recipe):
        assert model.preset is not None
        raise RecipeError(
            f"model.preset: {model.preset} is a configuration without weights: it can be planned, not trained; "
            f"add model.path: {find(model.preset).hub} "
            "(or a folder that holds it), or model.weights: random for a new model of that shape"
        )
