"""The transformers configuration that a recipe starts from: of a preset, a folder, the hub, or a new model."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from preheat import remote_code
from preheat.core.schema import TOKENIZER_FILES
from preheat.errors import RecipeError, suggest_nearest
from preheat.hardware.connectivity import find_cached_folder, is_hub_offline, is_hub_reachable
from preheat.model_folder import FAULTS, describe_fault, keeps_quantization, quantization_of, read_object
from preheat.models import moe, presets, size_dial, text_part, vision
from preheat.models.hub_config import is_hub_name
from preheat.models.layer_sizes import max_over_layers
from preheat.models.untie import untie
from preheat.recipe.consistency import MOST_PARAMETERS
from preheat.sanitize import quote_value
from preheat.storage import is_url

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.core.json_types import JsonObject
    from preheat.recipe import Recipe

__all__ = [
    "apply_changes",
    "has_tokenizer",
    "new",
    "of",
    "preset_config",
    "read",
    "refuse_unknown_rotary",
    "require_in_reach",
    "is_remote_code",
    "find_tokenizer_folder",
    "disable_dropout",
    "wrapper_config",
]


def has_tokenizer(folder: Path) -> bool:
    """True if a model's folder holds a tokenizer."""
    return any((folder / name).exists() for name in ("tokenizer_config.json", *TOKENIZER_FILES))


def find_tokenizer_folder(recipe: Recipe) -> str | None:
    """The model's own tokenizer, if its folder has one.

    Raises:
        RecipeError: the model was trained with one, and neither its folder nor the recipe names it; or it is on the hub
            alone, and there is no network.
    """
    path = recipe.model.path
    if path is None:
        return None
    folder = Path(path)
    if not folder.is_dir():
        if (
            recipe.data.tokenizer is None
            and is_hub_name(path)
            and find_cached_folder(path, TOKENIZER_FILES) is None
            and is_hub_offline()
        ):
            raise RecipeError(
                f"model.path: {path}: the hub's cache holds no tokenizer of it, and there is no network; run: hf "
                f"download {path} with a network, or set data.tokenizer to a folder that has it"
            )
        return path
    # A folder with only a config.json is a shape for new weights, which may get a new tokenizer.
    if not has_tokenizer(folder):
        if recipe.data.tokenizer is None and recipe.model.weights == "pretrained" and any(folder.glob("*.safetensors")):
            raise RecipeError(
                f"model.path {path}: has weights and no tokenizer, and a new one would give them tokens that they "
                "were not trained on; copy the model's tokenizer.json there, or set data.tokenizer to the folder "
                "that has it"
            )
        return None
    return path


_HIGHEST = {
    "hidden_size": 2**20,
    "num_hidden_layers": 4096,
    "num_decoder_layers": 4096,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**26,
    "intermediate_size": 2**24,
    "moe_intermediate_size": 2**24,
    "max_position_embeddings": 2**40,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "n_routed_experts": 2**14,
    "num_experts_per_tok": 2**14,
    "d_ff": 2**24,
    "decoder_sparse_step": 2**14,
    "first_k_dense_replace": 2**14,
    "n_group": 2**14,
    "topk_group": 2**14,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**20,
    "qk_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "qk_nope_head_dim": 2**16,
    "v_head_dim": 2**16,
}
"""Upper bounds by transformers' names, the same as a recipe's own (`core.schema.Model`)."""
_MAYBE_NONE = (
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
)
"""Settings that are 0 in some families to say that there are none."""
_OF_EXPERTS = ("num_experts_per_tok", "decoder_sparse_step", "first_k_dense_replace", "n_group", "topk_group")
_NOT_BELOW_ZERO = (
    "initializer_range",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "norm_eps",
)
_OF_ROPE = (
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
)


def require_in_reach(config: PretrainedConfig) -> None:
    """Rejects sizes that are too large or not sizes, before anything is built: a folder may contain anything.

    Raises:
        RecipeError: names the first such size.
    """
    text = config.get_text_config()
    sizes_found = {key: max_over_layers(text, key) for key in _HIGHEST}
    for key, value in sizes_found.items():
        if value is None or isinstance(value, list | tuple | dict):
            continue  # a value per layer, in some families
        least = 0 if key in _MAYBE_NONE else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _HIGHEST[key]:
            raise RecipeError(
                f"model: {config.model_type} has {key} {quote_value(value)}; it must be a whole number from {least} to "
                f"{_HIGHEST[key]}"
            )
    # Absent sizes count as 1, so that the estimate errs on the low side.
    count = {key: value if isinstance(value, int) and value else 1 for key, value in sizes_found.items()}
    # The inner width over all experts of a layer, under any family's name for their number.
    many = max(count["num_experts"], count["num_local_experts"], count["n_routed_experts"])
    inner = many * count["moe_intermediate_size"] if many > 1 else count["intermediate_size"]
    _require_numbers(config, text, many)
    width = count["hidden_size"]
    # N ~ width * (layers * (2 * width + 3 * inner) + vocabulary): enough to reject
    # sizes that are off by orders of magnitude.
    about = width * (count["num_hidden_layers"] * (2 * width + 3 * inner) + count["vocab_size"])
    if about > MOST_PARAMETERS:
        raise RecipeError(
            f"model: {config.model_type} has about {about:.0e} parameters, more than {MOST_PARAMETERS:.0e}"
        )


def _require_numbers(config: PretrainedConfig, text: PretrainedConfig, experts_there: int) -> None:
    """Rejects numbers with which a model fails in its first pass, or silently computes NaN."""

    def refuse(key: str, value: object, rule: str) -> NoReturn:
        raise RecipeError(
            f"model: {config.model_type} has {key} {quote_value(value)}; it must be {rule}, as the model's own is"
        )

    if wrong := _find_wrong_number(text.to_dict()):
        refuse(*wrong)
    window, layers = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    # A window that none of the `layer_types` uses may have any value.
    limited = window is not None and (not layers or "sliding_attention" in layers)
    if limited and not (type(window) is int and 1 <= window <= _HIGHEST["max_position_embeddings"]):
        refuse("sliding_window", window, f"a whole number from 1 to {_HIGHEST['max_position_embeddings']}")
    if text.model_type in moe.FAMILIES:
        for key in _OF_EXPERTS:
            value: Any = getattr(text, key, 1)
            if value is None or (key == "num_experts_per_tok" and not 1 <= value <= max(experts_there, 1)):
                refuse(key, value, "a whole number" + (f" from 1 to {experts_there}" if value is not None else ""))
        # Group-limited routers view their scores as [tokens, groups, experts / groups].
        groups = getattr(text, "n_group", 1)
        if experts_there % groups or getattr(text, "topk_group", 1) > groups:
            refuse("n_group", groups, f"a divisor of the {experts_there} experts, and topk_group at most as many")


def _find_wrong_number(values: JsonObject) -> tuple[str, object, str] | None:
    """The first key whose value is invalid in any model, its value, and the rule it breaks; None if there is none."""

    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    # Python's json reads the literal NaN, which would only show up as a loss of NaN.
    if (key := _find_nan(values)) is not None:
        return key, math.nan, "a number"
    for key in _NOT_BELOW_ZERO:
        value = values.get(key)
        if value is not None and not (is_number(value) and 0 <= value < 2**63):
            return key, value, "a number from 0"
    # transformers 5 writes rope_parameters; files of earlier versions have rope_scaling.
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        rope = rope if isinstance(rope, dict) else {}
        # One dictionary for all layers, or one per layer type.
        for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            for key in _OF_ROPE:
                value = part.get(key)
                # longrope has a factor per rotary frequency; every other key has one number.
                listed = (
                    value if key in ("short_factor", "long_factor") and isinstance(value, list | tuple) else [value]
                )
                most, rule = (
                    (1, "a number above 0 and at most 1")
                    if key == "partial_rotary_factor"
                    else (2**63, "a number above 0")
                )
                for one in listed if value is not None else ():
                    number: Any = one
                    if not (is_number(number) and 0 < number <= most):
                        return f"{name}.{key}", number, rule
    return None


def _find_nan(values: object, name: str = "") -> str | None:
    """The key of the first NaN in nested values; None if there is none."""
    inner = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list | tuple) else ()
    )
    for key, value in inner:
        here = f"{name}.{key}" if name else str(key)
        if isinstance(value, float) and math.isnan(value):
            return here
        if (nan_key := _find_nan(value, here)) is not None:
            return nan_key
    return None


def of(recipe: Recipe, vocabulary: int | None) -> PretrainedConfig:
    """The configuration before `model.config` and techniques change it; arguments and errors as in `hf.configure`."""
    config = _read_config(recipe, vocabulary)
    require_in_reach(config)
    if recipe.model.path is not None and recipe.model.weights == "pretrained":
        untie(config, Path(recipe.model.path))
    return config


def source_config(recipe: Recipe) -> PretrainedConfig | None:
    """The configuration that the recipe's model is read from; None for a new model, which is made for its vocabulary.

    Read it once, and hand it to each `hf.configure` of recipes that differ in techniques, batch or `model.config` only.
    """
    return of(recipe, None) if recipe.model.preset or recipe.model.path else None


def apply_changes(config: PretrainedConfig, settings: Mapping[str, object]) -> None:
    """Applies `model.config` to a configuration, in place.

    Raises:
        RecipeError: an unknown key, or an invalid value.
    """
    from huggingface_hub.errors import StrictDataclassError

    text = config.get_text_config()
    before = text.num_hidden_layers
    # `attribute_map` adds common names, such as hidden_size for GPT-2's n_embd. Keys of the text part win.
    known = {key: part for part in (config, text) for key in (*part.to_dict(), *getattr(part, "attribute_map", {}))}
    for key, value in settings.items():
        if key == "num_hidden_layers" and key not in known and isinstance(value, int) and 0 < value < before:
            _cut_layers(text, before, value)  # the number follows from the lists (Nemotron-H)
            continue
        if key not in known:
            raise RecipeError(
                f"model.config.{key}: {config.model_type} has no such setting; {suggest_nearest(key, sorted(known))}"
            )
        # transformers' strict dataclasses reject an int for a float, and YAML reads 1 as an int.
        part = known[key]
        try:
            setattr(
                part, key, float(value) if type(value) is int and type(getattr(part, key, None)) is float else value
            )
        except StrictDataclassError as error:
            raise RecipeError(f"model.config.{key}: {str(error.__cause__ or error).splitlines()[0]}") from None
    require_in_reach(config)
    # A list that the recipe sets itself already has the new length.
    if (layers := text.num_hidden_layers) < before:
        _cut_layers(text, before, layers, but=settings)


def _cut_layers(text: PretrainedConfig, before: int, layers: int, but: Container[str] = ()) -> None:
    """Shortens the lists that have an entry for each of `before` layers to the first `layers`, except those `but`."""
    for key, value in list(vars(text).items()):
        if key not in but and isinstance(value, list | tuple) and len(value) == before:
            setattr(text, key, value[:layers])
    # The last layers take the keys and values of earlier ones (Gemma 3n and 4): a layer that is left stays what it is.
    if (shared := getattr(text, "num_kv_shared_layers", None) or 0) and "num_kv_shared_layers" not in but:
        text.num_kv_shared_layers = max(shared - (before - layers), 0)


def _read_config(recipe: Recipe, vocabulary: int | None) -> PretrainedConfig:
    model = recipe.model
    if model.preset is None:
        return (
            text_part.text_config(whole, model.part)
            if (whole := _full_config(recipe)) is not None
            else new(recipe, vocabulary)
        )
    preset = preset_config(model.preset)
    # Presets of some families hold the text part alone.
    if model.part == "whole" and preset.get_text_config() is preset and model.path is None:
        raise RecipeError(
            f"model.part: whole: the built-in configuration of {model.preset} is of its text part alone; name the "
            "model's folder in model.path"
        )
    preset = text_part.text_config(preset, model.part if preset.get_text_config() is not preset else "auto")
    # With a path, too, the folder is read, and the preset has to describe the same model.
    if model.path is None:
        return preset
    config = text_part.text_config(_read_of(recipe, model.path), model.part)
    if config.model_type != preset.model_type:
        raise RecipeError(
            f"model.preset: {model.preset} is a {preset.model_type}, but {model.path} holds a {config.model_type}; "
            "remove one of the two"
        )
    there = config.to_dict()
    free = presets.FREE.union(presets.find(model.preset).unconfirmed)
    for key, value in preset.to_dict().items():
        other = there.get(key, getattr(config, key, None))
        if key not in free and not _is_close(value, other):
            raise RecipeError(
                f"model.preset: {model.preset} has {key} {value}, but {model.path} has {other}; remove the preset, "
                "or name a folder of that model"
            )
    return config


def _full_config(recipe: Recipe) -> PretrainedConfig | None:
    """The configuration as published, with all parts; None for a new model."""
    model = recipe.model
    if model.path is not None:
        return _read_of(recipe, model.path)
    return preset_config(model.preset) if model.preset is not None else None


def _read_of(recipe: Recipe, path: str) -> PretrainedConfig:
    """Reads the configuration of a recipe's folder; new weights are not quantized."""
    choice = "dequantized" if recipe.model.weights == "random" else recipe.model.quantized_weights
    return read(path, recipe.model.trust_remote_code, choice=choice)


def wrapper_config(recipe: Recipe) -> PretrainedConfig | None:
    """The configuration of the checkpoint whose text part the recipe's model is; None if it is the whole."""
    whole = _full_config(recipe)
    return whole if whole is not None and text_part.is_taken(whole, recipe.model.part) else None


def _is_close(a: object, b: object) -> bool:
    """Equality up to rounding: some checkpoints store decimals rounded to fp32."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = (a.keys() | b.keys()) - presets.FREE
        return all(_is_close(a.get(key), b.get(key)) for key in keys)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def preset_config(name: str) -> PretrainedConfig:
    """The published configuration of a preset as transformers reads it."""
    from transformers import AutoConfig

    values = dict(presets.find(name).config)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def read(path: str, asks: bool = False, *, choice: str = "auto") -> PretrainedConfig:
    """The configuration of a folder, or of a name on the hub (only from its cache if HF_HUB_OFFLINE is set).

    Args:
        asks: the recipe asks for the folder's own code (`model.trust_remote_code`), even if transformers has a class
            for it.
        choice: `model.quantized_weights`. The configuration keeps the folder's `quantization_config` only if the
            weights stay quantized in memory.

    Raises:
        RecipeError: there is none, it contradicts itself, or it needs code of its own that was not allowed to run.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if is_url(path):
        raise RecipeError(
            f"model.path: {path}: is a URL; models are read from folders and from the hub: download it, and name the "
            "folder"
        )
    folder, file = Path(path), Path(path) / "config.json"
    if folder.exists() and not file.is_file():
        raise RecipeError(f"model.path: {path} has no config.json; name a Hugging Face model folder")
    # The hub's client retries for half a minute without a network.
    local = folder.exists() or _is_offline() or not is_hub_reachable()
    try:
        values = (
            read_object(file, "model.path")
            if folder.exists()
            else PretrainedConfig.get_config_dict(path, local_files_only=local)[0]
        )
        if folder.exists():
            _require_sound(values, file)
        # transformers' class is preferred over the folder's own code, unless the recipe asks for the latter.
        code = remote_code.find_code_classes(values) if asks or values.get("model_type") not in CONFIG_MAPPING else []
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=remote_code.may_run("model.path", path, code), local_files_only=local
        )
    except RecipeError:
        raise
    except (*FAULTS, StrictDataclassError) as error:
        if folder.exists():
            raise RecipeError(f"model.path: {file}: {describe_fault(error, 300)}") from None
        # A name on the hub is `owner/name`; anything else was meant as a folder.
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise RecipeError(f"model.path: {path}: no such folder; {_suggest_models(folder)}") from None
        raise RecipeError(
            f"model.path: {path}: no such folder, and it cannot be loaded from the Hugging Face hub "
            f"({describe_fault(error, 160)}); download it on a machine with a network and name the folder"
        ) from None
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "head_dim", 0) is None:
        config.head_dim = config.qk_rope_head_dim  # transformers derives it, but a null in the file overwrites it
    if folder.exists():
        _require_sizes(config, file, values)
    if (stored := quantization_of(values)) and not keeps_quantization(stored.get("quant_method"), choice):
        # The weights are read dequantized, so that the model, and what is saved of it, is not quantized.
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            vars(part).pop("quantization_config", None)
    return config


def is_remote_code(config: PretrainedConfig, asks: bool) -> bool:
    """True if a model of this configuration, already read, is to be built by the code in its folder."""
    if not getattr(config, "auto_map", None):
        return False
    return remote_code.is_allowed() and (asks or type(config).__module__.startswith("transformers_modules"))


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_PER_LAYER = ("attn_type_list", "layer_types", "mlp_layer_types", "no_rope_layers")
"""Lists with an entry per layer, of which transformers checks the length for some families only."""
_NAMED = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
}
"""Other names of the sizes in some families."""


def _max_size(key: str) -> int:
    """The upper bound of a size, by any of its names."""
    return _HIGHEST[next((size for size, names in _NAMED.items() if key in names), key)]


def _require_sound(values: JsonObject, file: Path) -> None:
    """Rejects values in a config.json for which transformers fails with a traceback, or which it misreads."""
    if not isinstance(values.get("model_type"), str):
        problem = (
            "has no model_type" if "model_type" not in values else f"has model_type {quote_value(values['model_type'])}"
        )
        raise RecipeError(
            f"model.path: {file} {problem}, so transformers has no class for it; write the architecture's name "
            "there, e.g. llama"
        )
    text = values.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise RecipeError(f"model.path: {file}: text_config: must be an object, got {quote_value(text)}")
    if wrong := _find_wrong_number(values) or _find_wrong_number(text or {}):
        key, value, rule = wrong
        raise RecipeError(
            f"model.path: {file}: {key}: must be {rule}, got {quote_value(value)}; restore the model's own"
        )
    # Sizes under each family's names, in the file itself and in its text part.
    for part in (values, text or {}):
        stored = part.get("quantization_config")
        if stored is not None and not isinstance(stored, dict):
            raise RecipeError(f"model.path: {file}: quantization_config: must be an object, got {quote_value(stored)}")
        _require_known_layers(part.get("layer_types"), file)
        counts = {key: part[key] for size in _SIZES for key in (size, *_NAMED.get(size, ())) if key in part}
        for key, value in (counts | {"num_key_value_heads": part.get("num_key_value_heads") or 1}).items():
            if type(value) is not int or value < 1:
                raise RecipeError(
                    f"model.path: {file}: {key}: must be a whole number above 0, got {quote_value(value)}"
                )
            if value > _max_size(key):
                raise RecipeError(
                    f"model.path: {file}: {key}: {quote_value(value)} is more than any model has; restore the "
                    "model's own"
                )


def _require_known_layers(kinds: object, file: Path) -> None:
    """Rejects a kind of layer that transformers does not know; its own message lists all kinds, and not which it is."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES, remap_legacy_layer_types

    # Published files may have former names of kinds, which transformers still reads (Granite 4: mamba, attention).
    def is_known(kind: object) -> bool:
        return isinstance(kind, str) and remap_legacy_layer_types([kind])[0] in ALLOWED_LAYER_TYPES

    if unknown := [kind for kind in kinds if not is_known(kind)] if isinstance(kinds, list) else []:
        raise RecipeError(
            f"model.path: {file}: layer_types: {quote_value(unknown[0])} is no kind of layer that transformers knows; "
            f"{suggest_nearest(str(unknown[0]), ALLOWED_LAYER_TYPES)}"
        )


def _require_sizes(config: PretrainedConfig, file: Path, values: JsonObject) -> None:
    """Rejects a configuration without a size: transformers would silently use that of some model of the family."""
    try:
        text = config.get_text_config()
    except ValueError:  # transformers names several text models (MusicGen)
        raise RecipeError(
            f"model.path: {file}: {config.model_type} is several models in one, and preheat trains text models; name "
            "a text-only checkpoint"
        ) from None
    # A composite configuration states the sizes in its text part.
    if text is not config:
        known = config.model_type in text_part.FAMILIES
        if not known and config.model_type not in vision.FAMILIES:
            return  # other composite models are rejected elsewhere
        if not values.get("text_config"):
            raise RecipeError(
                f"model.path: {file} is of a {config.model_type} and has no text_config, which holds the sizes of its "
                "text part; put back the model's own"
            )
        # Google's published files leave out the sizes that are transformers' defaults for the family.
        config, values = text, text.to_dict() if known else values["text_config"]
    names = getattr(config, "attribute_map", {})
    stated = {field.name for field in dataclasses.fields(config)}  # others are computed, or the family has none
    for key in _SIZES:
        if names.get(key, key) in stated and not {key, names.get(key, key)} & values.keys():
            raise RecipeError(f"model.path: {file} has no {names.get(key, key)}, which has no default; add it")
    # A model of several stacks may have no such count (BLT).
    layers: Any = getattr(config, "num_hidden_layers", None)
    for key in () if layers is None else _PER_LAYER:
        entries = values.get(key)
        # Layers that predict further tokens may have entries too.
        most = layers + (getattr(config, "num_nextn_predict_layers", None) or 0)
        if isinstance(entries, list) and entries and not layers <= len(entries) <= most:
            raise RecipeError(
                f"model.path: {file}: {key}: has {len(entries)} entries for {layers} layers; restore the model's own"
            )
    # Divisors: groups of query heads share a key-value head, and without a
    # head_dim the width is split between the heads.
    heads, width = max_over_layers(config, "num_attention_heads"), max_over_layers(config, "hidden_size")
    if not width:
        raise RecipeError(
            f"model.path: {file}: {config.model_type} has no hidden_size that transformers names, so it is not a "
            "decoder-only model that preheat can train"
        )
    groups = max_over_layers(config, "num_key_value_heads") or heads
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise RecipeError(
            f"model.path: {file}: num_key_value_heads: {groups} does not divide num_attention_heads {heads}; restore "
            "the model's own"
        )
    if (
        isinstance(heads, int)
        and width % heads
        and not any(values.get(key) for key in ("head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "v_head_dim"))
    ):
        raise RecipeError(
            f"model.path: {file}: {names.get('num_attention_heads', 'num_attention_heads')}: {heads} does not divide "
            f"{names.get('hidden_size', 'hidden_size')} {width}; restore the model's own"
        )


def _suggest_models(folder: Path) -> str:
    """Suggests the closest name of a model folder in the parent directory."""
    parent = folder.expanduser().parent
    names = sorted(file.parent.name for file in parent.glob("*/config.json")) if parent.is_dir() else []
    return (
        suggest_nearest(folder.name, names[:20])
        if names
        else (f"in {parent} is not a model's folder (one that holds config.json)")
    )


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "TRUE")


def new(recipe: Recipe, vocabulary: int | None) -> PretrainedConfig:
    """The configuration of a new model, by family and sizes, or by the size dial."""
    from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig, T5Config

    model = recipe.model
    gated = model.family != "gpt2"
    if model.size is None and not (model.num_layers and model.hidden_size and model.num_heads):
        raise RecipeError("model: state a path, a size (e.g. 15M), or layers, width and heads")
    d = size_dial.choose_dimensions(model.size, gated=gated, shape=model.shape) if model.size else None
    # Sizes that the recipe states win over those of the dial.
    layers, width, heads = (
        (model.num_layers or (d and d.layers)),
        (model.hidden_size or (d and d.width)),
        (model.num_heads or (d and d.heads)),
    )
    assert layers
    assert width
    assert heads
    if d and model.hidden_size and not model.num_heads:
        # Keeps the dial's head dimension at the width that the recipe states.
        heads = max(1, width // (d.width // d.heads))
    # 8/3 of the width in three matrices has as many parameters as 4 times the width in two.
    feed_forward = model.intermediate_size or (
        d.feed_forward
        if d and not model.hidden_size
        else (round(width * 8 / 3 / 64) * 64 or 64)
        if gated
        else 4 * width
    )
    if model.vocab_size is None and vocabulary is None:
        raise RecipeError("model.vocab_size: is needed if no tokenizer determines it")
    # A multiple of 64 keeps the head's matmuls fast.
    rows = model.vocab_size or -(-vocabulary // 64) * 64  # type: ignore[operator]
    common: JsonObject = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": rows,
        "max_position_embeddings": model.max_positions or recipe.batch.seq_len,
        # The classes' defaults are ids of a published tokenizer, and this model has another.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.tie_embeddings is not None:
        common["tie_word_embeddings"] = model.tie_embeddings
    if model.family == "gpt2":
        if model.num_kv_heads not in (None, heads):
            raise RecipeError(
                f"model.num_kv_heads: {model.num_kv_heads}: gpt2 has no grouped queries; remove it or use family: llama"
            )
        # Dropout 0: pretraining sees each token about once (GPT-2's 0.1 is for many epochs).
        return GPT2Config(**common, n_inner=feed_forward, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    if model.family == "t5":  # version 1.1: gated, with an untied head unless the recipe ties it
        if model.num_kv_heads not in (None, heads):
            raise RecipeError(
                f"model.num_kv_heads: {model.num_kv_heads}: t5 has no grouped queries; remove it or use family: llama"
            )
        # T5's decoder starts from the padding token. Its positions are distances, without a limit.
        special = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}
        sizes_of = {"d_ff": feed_forward, "d_kv": width // heads, "num_decoder_layers": layers}
        common.pop("max_position_embeddings")
        return T5Config(**common | special | sizes_of, feed_forward_proj="gated-gelu")
    common |= {
        "num_key_value_heads": model.num_kv_heads or heads,
        "intermediate_size": feed_forward,
        "head_dim": width // heads,
    }
    if model.family in moe.FAMILIES:
        chosen = model.num_experts_per_tok or 2
        if not model.intermediate_size:  # so that a token uses as many parameters as in the dense model
            common["intermediate_size"] = round(feed_forward / chosen / 64) * 64 or 64
        common |= {"num_experts": model.num_experts or 8, "num_experts_per_tok": chosen}
        if model.family == "mixtral":
            return MixtralConfig(**common)
        # Weights of the chosen experts sum to 1, as in the published Qwen3 models and in Mixtral.
        return Qwen3MoeConfig(**common, moe_intermediate_size=common["intermediate_size"], norm_topk_prob=True)
    return LlamaConfig(**common) if model.family == "llama" else Qwen3Config(**common)


def disable_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Sets every dropout of a configuration to 0, in place. Returns the values that were not 0, by key.

    Published configurations keep their pretraining's (0.1 for GPT-2 and T5). Fine-tuning does without today, most
    kernels have no dropout, and recomputed layers would need the same draws; `model.config` can enable dropout outside
    of attention.
    """
    nonzero = {}
    # Parts by identity: the text part of a text model is the configuration itself.
    parts = {
        id(part): part
        for part in (
            config,
            config.get_text_config(),
            getattr(config, "vision_config", None),
            getattr(config, "attn_config", None),  # MPT
        )
        if part
    }
    for part in parts.values():
        for key, value in vars(part).items():
            if _DROPOUT.search(key) and isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
                nonzero[key] = float(value)
        for key in nonzero:
            if hasattr(part, key):
                setattr(part, key, 0.0)
    return nonzero


# Names of all families: attention_dropout, resid_pdrop, dropout_rate, drop_path_rate and others.
_DROPOUT = re.compile(r"(drop|dropout|pdrop|layerdrop|drop_path)(_rate|_prob)?$")


def refuse_unknown_rotary(config: PretrainedConfig) -> None:
    """Raises RecipeError for a rope_type that transformers does not implement."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # One dictionary for all layers, or one per layer type.
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = part.get("rope_type", "default")
        if kind not in (known := ["default", *ROPE_INIT_FUNCTIONS]):
            raise RecipeError(
                f"model.config.rope_parameters: {config.model_type} knows no rope_type {quote_value(kind)}; "
                f"{suggest_nearest(str(kind), known)}"
            )
