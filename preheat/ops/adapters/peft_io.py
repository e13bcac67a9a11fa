"""Loading of peft adapter folders, with checks against the model, its base weights and the recipe.

adapter_config.json         peft's settings, with base_model_name_or_path
adapter_model.safetensors   peft's names; a pickle (adapter_model.bin) is not opened
preheat_base.json           only from preheat: the base weights' fingerprint, and whether they were in NF4
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from preheat.errors import RecipeError, SettingError
from preheat.model_folder import FAULTS, check_finite, describe_fault
from preheat.ops.adapters.moe_lora import adapted_experts, add_pairs, view_as_peft
from preheat.ops.adapters.peft_layers import adapter_tensors, base_layer_of, draw, inject, names_of, parameters_of
from preheat.ops.adapters.tied_head import TiedHead, pair_of
from preheat.ops.distributed.dtensor_utils import local, local_shard
from preheat.ops.grouped_mm import stacks_of
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from peft import PeftConfig

    from preheat.core.json_types import JsonObject


__all__ = ["BASE", "AdapterFolder", "register_initial_values", "register_start", "put_in", "read_folder"]

T = TypeVar("T")

BASE = "preheat_base.json"
_EXPERTS = r"(^|\.)experts\.(gate_up_proj|up_proj|down_proj)$"
_FILE, _PICKLES = "adapter_model.safetensors", ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
# Settings of peft that train or change more than additions to linear maps, with the reason for the error message.
_NOT_ADDED = {
    "modules_to_save": "also trains whole modules",
    "trainable_token_indices": "also trains rows of the embedding",
    "layer_replication": "repeats layers of the base",
    "alora_invocation_tokens": "acts only after certain tokens",
}
# Values of init_lora_weights that leave the base unchanged.
_STARTS_AS_BASE = (True, False, "gaussian", "eva", "orthogonal")
_FREE = {  # settings that do not change the adapter's function, or that the tensors' shapes determine
    *(
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *(
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "init_weights",
    ),
    *("lora_dropout", "dropout", "rank_dropout", "module_dropout", "fan_in_fan_out", "runtime_config", "eva_config"),
    *(
        "loftq_config",
        "megatron_core",
        "projection_prng_key",
        "save_projection",
        "ensure_weight_tying",
        "rank_pattern",
        "qalora_group_size",
    ),
}


class Weights(Protocol):
    """The interface of models.weights.WeightSource that this module needs."""

    folder: Path | None

    def __init__(self, folder: Path | None = None): ...

    def fresh(self, pattern: str, modules: Sequence[str], draw: Callable[[nn.Module], None]) -> None: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class AdapterFolder:
    """A validated peft adapter folder.

    Attributes:
        path: the folder.
        config: its peft configuration.
        written: contents of preheat_base.json; {} for folders of other tools.
        knob: the user's setting, which starts every error message.
        rename: the name in the model of a module or tensor of the adapter's base; None if the model has no such part.
    """

    path: Path
    config: PeftConfig
    written: JsonObject
    knob: str
    rename: Callable[[str], str | None] = lambda name: name

    def on_text_part(self, rename: Callable[[str], str | None]) -> AdapterFolder:
        """Returns the same adapter for the text part of its base, whose modules have other names."""
        config = copy.copy(self.config)
        if not isinstance(targets := config.target_modules, str):
            config.target_modules = {rename(name) or name for name in targets}
        if self.has_experts:
            config.target_parameters = [rename(name) or name for name in self._parameters]  # type: ignore[attr-defined]
        for pattern in ("rank_pattern", "alpha_pattern"):
            values: dict[str, Any] = getattr(config, pattern, None) or {}
            if values:
                setattr(config, pattern, {rename(key) or key: value for key, value in values.items()})
        return dataclasses.replace(self, config=config, rename=rename)

    @property
    def base(self) -> str | None:
        """The base model named in adapter_config.json."""
        return self.config.base_model_name_or_path or None

    @property
    def has_experts(self) -> bool:
        return bool(self._parameters)

    @property
    def _parameters(self) -> Sequence[str]:
        return getattr(self.config, "target_parameters", None) or ()

    def list_stacks(self, name: str, experts: nn.Module) -> list[str]:
        """Returns the weight stacks of a layer's experts that the adapter changes, in the order of peft's wrappers.

        Args:
            name: of the experts' module.
        """
        keys = {stack: f".{name}.{stack}" for stack in stacks_of(experts)}
        return [stack for stack, key in keys.items() if any(key.endswith(f".{place}") for place in self._parameters)]

    def fault(self, problem: str) -> RecipeError:
        return RecipeError(f"{self.knob}: {self.path} {problem}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor in the file, keyed by the base's module names."""
        # Slices read the header alone, so that a wrong adapter is found without loading its values.
        with self._open_file() as file:
            return {self._map_name(key): tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118

    def tensors(self) -> dict[str, Tensor]:
        with self._open_file() as file:
            return {
                self._map_name(key): check_finite(file.get_tensor(key), key, self.path / _FILE, self.knob)
                for key in file.keys()  # noqa: SIM118
            }

    def _map_name(self, key: str) -> str:
        plain = key.removeprefix("base_model.model.").removeprefix("base_model.")
        return self.rename(plain) or plain

    def _open_file(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(str(self.path / _FILE), framework="pt")
        except SafetensorError as error:
            raise self.fault(f"has an {_FILE} that is incomplete ({error})") from None

    def on_base(self, path: str, weights: Weights, *, stated: bool = False) -> None:
        """Rejects a base other than the one that the adapter was trained on.

        Compares weight fingerprints if known (in preheat's folders, or if the named base exists locally), otherwise
        names.

        Args:
            path: path of the base that receives the adapter.
            weights: weights of that base.
            stated: the user confirms that it is the same model, whatever its name.

        Raises:
            RecipeError: it is another base, or one with newly initialized weights.
        """
        # Weights drawn for this run are no base that an adapter could have been trained on.
        if weights.folder is None:
            raise self.fault("fits the base that it was trained on; this model's weights are newly initialized")
        # Content decides if it can be compared; names are the last resort, since folders are copied and renamed.
        known = self.written.get("fingerprint")
        if known is None and self.base and Path(self.base).is_dir():
            known = type(weights)(Path(self.base)).fingerprint()
        if known is not None and known != weights.fingerprint():
            raise self.fault(
                f"is an adapter for {self.base}, whose weights are not those of {path}; name the base that it was "
                "trained on"
            )
        # `org/model` on a hub and `models/model` on disk agree in their last part.
        if known is None and not stated and self.base and _last_name_part(self.base) != _last_name_part(path):
            raise self.fault(
                f"is an adapter for {self.base}, not for {path}; if they are the same model, write {path!r} as "
                "base_model_name_or_path in its adapter_config.json"
            )

    def agrees(self, ours: PeftConfig, called: Mapping[str, str]) -> None:
        """Rejects an adapter whose settings differ from the recipe's.

        Args:
            ours: peft configuration of the recipe.
            called: peft's setting name -> the recipe's, if they differ.

        Raises:
            RecipeError: the kind of adapter or a setting differs; the message names both values.
        """
        if self.config.peft_type != ours.peft_type:
            raise self.fault(
                f"is a {self.config.peft_type.value.lower()} adapter, the recipe's is {ours.peft_type.value.lower()}"
            )
        # Projections that the file leaves out are drawn from the key (VeRA, RandLoRA), so it must be the same.
        drawn = not getattr(self.config, "save_projection", True)
        free = _FREE - {"projection_prng_key"} if drawn else _FREE
        for field in dataclasses.fields(ours):
            theirs, here = getattr(self.config, field.name, None), getattr(ours, field.name)
            # None, False, [] and {} all mean that a setting is unset.
            if field.init and field.name not in free and theirs != here and (theirs or here):
                name = called.get(field.name, f"settings.{field.name}")
                raise self.fault(f"has {field.name} {theirs}, the recipe {here}; change {name}, or leave the start out")

    def fits(self, model: nn.Module) -> None:
        """Rejects a model (also on meta) whose adapters differ from those of the folder."""
        # First, all that the model needs is there in the right shape; then, nothing is left over that it would ignore.
        theirs, wanted = self.shapes(), {tensor.key: tensor for tensor in self._iterate_own_tensors(model)}
        for key, tensor in wanted.items():
            shape = _find(theirs, key)
            # peft may leave out buffers that it draws again from a seed (VeRA's projections with save_projection off).
            if shape is None and tensor.is_parameter:
                raise self.fault(f"has no {key}, which the model needs; is it for other targets or another base?")
            if shape is not None and shape != tensor.shape:
                raise self.fault(
                    f"has {key} of shape {shape}, the model needs {tensor.shape}: another rank, or an adapter "
                    "for another base"
                )
        # Tensors that peft saves twice or together with the adapter; `load` compares those of the base.
        twice = {
            *_tied_names(model),
            *(f"{name}.base_layer.weight" for name in (*names_of(model), *_find_heads(model))),
        }
        left = [key for key in theirs if key not in twice and not any(_matches(key, ours) for ours in wanted)]
        if left:
            raise self.fault(f"has {left[0]}, which the model does not have; is it for other targets or another base?")
        for name in _find_heads(model):
            self._check_scale(name, model.get_submodule(name))

    def find_rank_and_scale(self, name: str) -> tuple[int, float]:
        """Returns the rank and the scale of a LoRA pair.

        Args:
            name: of the adapted module or parameter.
        """
        from peft.utils.other import get_pattern_key

        config = self.config
        # As peft computes it: a pattern that matches the name overrides the common rank and alpha.
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
        # rsLoRA: alpha / sqrt(r) (arXiv:2312.03732)
        return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)

    def _check_scale(self, name: str, head: nn.Module) -> None:
        """Checks a tied head's scale: peft uses the rank and alpha of the head's name, not its embedding's."""
        pair, (_, theirs) = pair_of(head), self.find_rank_and_scale(name)
        if pair is not None and not math.isclose(pair.scale, theirs):
            raise self.fault(
                f"scales its pair by {theirs:g} at {name} and by {pair.scale:g} at the embedding that it is tied to, "
                "which preheat scales alike; merge it with peft and name the merged model"
            )

    def load(self, model: nn.Module) -> None:
        """Copies the values into the adapters of a model that passed `fits`."""
        theirs = self.tensors()
        with torch.no_grad():
            for tensor in self._iterate_own_tensors(model):
                # `fits` has checked that only buffers may be missing.
                if (value := _find(theirs, tensor.key)) is not None:
                    tensor.values.copy_(value.view(tensor.values.shape))
        for name in names_of(model):  # peft saves an adapted embedding together with its adapter
            base: Any = base_layer_of(model, name)
            value = theirs.get(f"{name}.base_layer.weight")
            if value is not None and not torch.equal(
                local_shard(value, base.weight).to(base.weight), local(base.weight)
            ):
                raise self.fault(
                    f"holds other values of {name} than its base; merge it with peft and name the merged model"
                )

    def _iterate_own_tensors(self, model: nn.Module) -> Iterator[_OwnTensor]:
        """Yields the adapters' own tensors with their names in peft's files."""
        for name in names_of(model):
            for key, tensor in adapter_tensors(model.get_submodule(name)):
                # Files leave out the adapter's name `default`. peft keeps DoRA's magnitude in a module of its own, but
                # saves it as one tensor.
                short = re.sub(r"\.default(?=\.|$)", "", key)
                short = "lora_magnitude_vector" if short.startswith("lora_magnitude_vector") else short
                yield _OwnTensor(f"{name}.{short}", tensor, tuple(tensor.shape), isinstance(tensor, nn.Parameter))
        adapted = {id(module) for module in adapted_experts(model)}
        for name, module in model.named_modules():
            stacks = self.list_stacks(name, module) if id(module) in adapted else []
            for depth, stack in enumerate(reversed(stacks)):
                # Each wrapper holds those of the stacks before its own.
                place = ".".join((name, *["base_layer"] * depth))
                for part, values in view_as_peft(module, stack).items():
                    yield _OwnTensor(f"{place}.lora_{part}.weight", values, (values.shape[0], values[0].numel()), True)


class _OwnTensor(NamedTuple):
    """A tensor of an adapter.

    Attributes:
        key: its name in peft's files.
        values: the model's tensor, or a view of it.
        shape: in peft's files.
        is_parameter: it must be in the file.
    """

    key: str
    values: Tensor
    shape: tuple[int, ...]
    is_parameter: bool


def read_folder(path: str | Path, knob: str) -> AdapterFolder:
    """Reads and validates a peft folder, without its tensors.

    Raises:
        RecipeError: not an adapter, its weights are a pickle, or its kind is not supported.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    path = Path(path).expanduser()
    file = path / "adapter_config.json"
    # The checks run from the outside in: folder, files, JSON, settings, kind. Each message names what to do.
    if not path.is_dir():
        raise RecipeError(f"{knob}: {path}: no such folder; name one that holds adapter_config.json and {_FILE}")
    if not file.is_file():
        raise RecipeError(f"{knob}: {path} has no adapter_config.json, so it is not a PEFT adapter")
    if not (path / _FILE).is_file():
        pickled = next((name for name in _PICKLES if (path / name).is_file()), None)
        raise RecipeError(
            f"{knob}: {path} has no {_FILE}"
            + (
                f"; {pickled} is a pickle, which preheat does not open: if you trust it, load it with peft and write "
                "it again by save_pretrained"
                if pickled
                else ""
            )
        )
    try:
        values = json.loads(file.read_bytes())
        kind = values["peft_type"]
        written = json.loads((path / BASE).read_bytes()) if (path / BASE).is_file() else {}
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"{knob}: {path}: its configuration cannot be read ({type(error).__name__}: {error})"
        ) from None
    # peft's own table, so that a newer peft brings its kinds along.
    cls = next((cls for known, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if known.value == kind), None)
    if cls is None:
        raise RecipeError(
            f"{knob}: {path} is of the kind {kind!r}, which the installed peft does not know; update peft"
        )
    # An unknown setting with a value may change the adapter's function, so it is an error; an empty one is harmless.
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(key for key in values if key not in known and values[key]):
        raise RecipeError(f"{knob}: {path} sets {unknown[0]}, which the installed peft does not know; update peft")
    if not isinstance(values.get("base_model_name_or_path") or "", str):
        raise RecipeError(
            f"{knob}: {file}: base_model_name_or_path: must be text, got "
            f"{quote_value(values['base_model_name_or_path'])}"
        )
    try:
        config = cls(**{key: values[key] for key in values if key in known and key != "peft_type"})
    except FAULTS as error:
        raise RecipeError(f"{knob}: {file}: {describe_fault(error)}") from None
    _name_modules(config)
    folder = AdapterFolder(path, config, written, knob)
    if odd := [name for name in folder._parameters if not re.search(_EXPERTS, name)]:
        raise folder.fault(
            f"changes {odd[0]} (target_parameters), and preheat supports parameters of experts only; merge it with "
            "peft and name the merged model"
        )
    for key, effect in _NOT_ADDED.items():
        if getattr(config, key, None):
            raise folder.fault(
                f"{effect} ({key}), which preheat does not support; merge it with peft and name the merged model"
            )
    if getattr(config, "bias", "none") != "none" or getattr(config, "lora_bias", False):
        raise folder.fault(
            "also trains biases of the base, which preheat does not support; merge it with peft and name the merged "
            "model"
        )
    if config.is_prompt_learning:
        raise folder.fault(
            f"is of the kind {kind}, which trains extra tokens or keys; preheat supports adapters of linear maps"
        )
    # PiSSA, OLoRA, LoftQ and others change the base at the start, and their pairs fit only that changed base.
    if (begun := getattr(config, "init_lora_weights", True)) not in _STARTS_AS_BASE:
        raise folder.fault(
            f"belongs to a base that {begun} changed; save it again with peft's "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )
    return folder


def _name_modules(config: PeftConfig) -> None:
    """Names linear layers as modules that the folder names by their weights, as our export does if peft needs it."""
    parameters = list(getattr(config, "target_parameters", None) or ())
    modules = {name.removesuffix(".weight") for name in parameters if name.endswith(".weight")}
    if modules and not isinstance(config.target_modules, str):
        config.target_modules = {*(config.target_modules or ()), *modules}
        others = [name for name in parameters if not name.endswith(".weight")]
        config.target_parameters = others or None  # type: ignore[attr-defined]


def register_initial_values(weights: Weights, model: nn.Module, config: PeftConfig, names: list[str]) -> None:
    """Registers peft's initialization of injected adapters.

    Args:
        weights: source of the base's weights.
        names: of the adapted modules.
    """
    weights.fresh(parameters_of(model, names), [""], lambda model: draw(model, config, names))


def register_start(
    weights: Weights,
    model: nn.Module,
    config: PeftConfig,
    names: list[str],
    *,
    start: str | None,
    path: str | None,
    knob: str,
    called: Mapping[str, str],
    rename: Callable[[str], str | None] | None = None,
) -> str:
    """Registers the values of the folder `start`, if given, for injected adapters: after all their initial values.

    Values that the file leaves out keep their initialization.

    Args:
        weights: source of the base's weights.
        names: of the adapted modules.
        path: path of the base, as in the recipe.
        knob: the recipe's key of `start`.
        called: as in `AdapterFolder.agrees`.
        rename: as in `AdapterFolder`, if the model is the text part of the base.

    Returns:
        Text for the run's summary: '' or ', begun from ...'.

    Raises:
        RecipeError: the folder's adapter does not match this model, base or settings.
    """
    if not start:
        return ""
    folder = read_folder(start, knob)
    folder = folder if rename is None else folder.on_text_part(rename)
    folder.agrees(config, called)
    adapted = {id(module) for module in adapted_experts(model)}
    for name, module in model.named_modules():
        if id(module) in adapted and folder.list_stacks(name, module) != list(stacks_of(module)):
            raise folder.fault(
                f"has no adapters for all expert matrices of {name}, which the recipe adapts; set expert_rank: 0 or "
                "leave the start out"
            )
    if folder.has_experts and not adapted:
        raise folder.fault("also adapts experts, and the recipe does not; set expert_rank to their rank")
    folder.fits(model)
    # Last, since fingerprints open the weight files.
    folder.on_base(path or "", weights)
    weights.fresh(parameters_of(model, names), [""], folder.load)
    return f", begun from {start}"


def put_in(model: nn.Module, folder: AdapterFolder) -> list[str]:
    """Injects a folder's adapter into a model with loaded weights, in place. Returns the adapted modules' names."""
    config = copy.copy(folder.config)
    config.target_parameters = None  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft draws random values that are then overwritten, and would warn of patterns for the experts' parameters.
        if folder.has_experts:
            warnings.filterwarnings("ignore", message="The following .*_pattern keys", category=RuntimeWarning)
        try:
            # peft takes the family's usual targets if there are none.
            names = inject(model, config) if config.target_modules or not folder.has_experts else []
            names += _add_expert_pairs(model, folder)
        except RecipeError:  # has a text of its own
            raise
        except FAULTS as error:
            raise folder.fault(f"cannot be put into this model: {describe_fault(error, 200)}") from None
    # Checked before anything is copied, so that an error leaves no half-loaded adapter.
    folder.fits(model)
    folder.load(model)
    for p in model.parameters():
        p.requires_grad_(False)
    return names


def _add_expert_pairs(model: nn.Module, folder: AdapterFolder) -> list[str]:
    """Adds the pairs of the experts' parameters that a folder names; returns the names of the experts' modules.

    Raises:
        RecipeError: the model has no such experts, or the folder wants several ranks or scales in one layer.
    """
    names = []
    for name, module in list(model.named_modules()):
        if not (stacks := folder.list_stacks(name, module)):
            continue
        if not hasattr(module, "is_transposed"):
            raise folder.fault(
                f"adapts experts that transformers computes in a way that leaves no place for adapters ({name}); merge "
                "it with peft and name the merged model"
            )
        pairs = {stack: folder.find_rank_and_scale(f"{name}.{stack}") for stack in stacks}
        if len({*pairs.values()}) > 1:
            ranks = " and ".join(f"rank {rank}, scale {scale:g} for {s}" for s, (rank, scale) in pairs.items())
            raise folder.fault(
                f"has {ranks} at {name}, and preheat supports one rank and scale; merge it with peft and name the "
                "merged model"
            )
        rank, scale = pairs[stacks[0]]
        try:
            add_pairs([module], rank, scale)
        except SettingError:
            raise folder.fault(
                f"has rank {rank} at {name}, more than an expert's matrices have; merge it with peft and name the "
                "merged model"
            ) from None
        for stack in stacks_of(module):  # those that the adapter leaves alone get an addition of zero
            for part in "AB":
                module.get_parameter(f"{stack}_lora_{part}").data.zero_()
        names.append(name)
    if folder.has_experts and not names:
        raise folder.fault("changes parameters of experts, which this model does not have; is it for another base?")
    return names


def _last_name_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def _find_heads(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, TiedHead)]


def _tied_names(model: nn.Module) -> list[str]:
    """Returns peft's names of the tensors that a tied head shares with its embedding, which peft saves twice."""
    return [f"{name}.lora_{part}.weight" for name in _find_heads(model) for part in "AB"]


def _matches(theirs: str, ours: str) -> bool:
    """Compares names: peft saves tensors common to all layers (VeRA's projections) once, under the last name
    part.
    """
    return theirs == ours or ("." not in theirs and ours.endswith(f".{theirs}"))


def _find(theirs: Mapping[str, T], ours: str) -> T | None:
    # The full name first, then a tensor that all layers share.
    return theirs[ours] if ours in theirs else theirs.get(ours.rpartition(".")[2])
