"""peft adapters: peft's other methods for linear layers, by name: (IA)3, LoHa, LoKr, OFT, HRA, VeRA, RandLoRA, ...

What: freezes the model and lets peft add the adapter that `method` names to the targeted linear layers: `ia3` trains
one factor per output (or input), `loha` and `lokr` add Hadamard or Kronecker products of small matrices, `oft`, `hra`
and `road` rotate a weight or an output by an orthogonal matrix, `vera` and `randlora` scale fixed random matrices,
`deft` replaces what a weight does in a learned subspace, `glora` scales and shifts a weight, `peanut` computes its
update from the weight by a small network, `supertuning` trains the largest entries of a weight.
Helps: fewer trained parameters than LoRA at the same quality on some tasks; makes the methods comparable in one recipe.
Hurts: most are slower than LoRA or save more for the backward pass (the plan shows it); the lesser-known ones are
little tested; good learning rates and settings differ by orders of magnitude between methods.
Source: https://huggingface.co/docs/peft, which names the paper of each method. (IA)3: Liu et al. 2022
(arXiv:2205.05638); LoHa: Hyeon-Woo et al. 2021 (arXiv:2108.06098); LoKr: Yeh et al. 2023 (arXiv:2309.14859); OFT: Qiu
et al. 2023 (arXiv:2306.07280); HRA: Yuan et al. 2024 (arXiv:2405.17484); VeRA: Kopiczko et al. 2023 (arXiv:2310.11454);
RandLoRA: Albert et al. 2025 (arXiv:2502.00987); PEANuT: arXiv:2410.01870; Super-Tuning: arXiv:2607.09287.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique, Trials
from preheat.errors import SettingError
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import PeftConfig
    from torch import nn

__all__ = ["METHODS", "PeftAdapter", "add_peft_adapter", "merge_peft_adapter"]

METHODS = (
    *("deft", "delora", "glora", "gralora", "hira", "hra", "ia3", "loha", "lokr", "miss", "oft", "peanut", "randlora"),
    *("road", "supertuning", "vera"),
)
"""Methods that can be built on meta, start as the base, and can be trained, saved and merged."""
_LORA = "is a technique of its own: use lora"
_PROMPT = "trains extra tokens or keys, not linear maps"
_BASE_VALUES = "computes with the base's weights while it is built, which a dry run does not have"
_NOT_THE_BASE = "does not start as the base"
# Methods of peft that cannot be used here, with the reason that an error states.
_REFUSED = {
    "adalora": (
        "needs a schedule of ranks and a term of the loss within the training loop, which preheat does not support yet"
    ),
    "adamss": _BASE_VALUES,
    "adaption_prompt": _PROMPT,
    "beft": "trains biases alone, which many linear maps do not have",
    "boft": "reads values back while it is built, which a dry run does not have",
    "c3a": _NOT_THE_BASE,
    "cartridge": _PROMPT,
    "cpt": _PROMPT,
    "fourierft": "keeps its indices outside of what a checkpoint or a dry run sees",
    "frod": _BASE_VALUES,
    "lily": "cannot be merged",
    "ln_tuning": "trains norms, not linear maps",
    "lora": _LORA,
    "multitask_prompt_tuning": _PROMPT,
    "osf": "projects gradients in hooks, which sharded parameters lose",
    "p_tuning": _PROMPT,
    "poly": "needs the task of each row, which data here does not state",
    "prefix_tuning": _PROMPT,
    "prompt_tuning": _PROMPT,
    "psoft": "leaves matrices out of its files that are computed from the base again, which rounding changes",
    "pvera": "draws its outputs at random during training, so that a dry run or a resumed run computes others",
    "shadow": "trains a second network next to the layers, which cannot be merged",
    "shira": "reads values back while it is built, which a dry run does not have",
    "tinylora": "trains vectors that layers share, which sharding would take apart",
    "trainable_tokens": "trains rows of the embedding, not linear maps",
    "unilora": "reads values back while it is built, which a dry run does not have",
    "vblora": _NOT_THE_BASE,
    "waveft": "keeps its indices outside of what a checkpoint or a dry run sees",
    "xlora": "mixes adapters that must be trained first",
}
# Settings that preheat decides itself: targets, task and the kind of model.
_RESERVED = (
    "target_modules",
    "modules_to_save",
    "task_type",
    "peft_type",
    "inference_mode",
    "auto_mapping",
    "peft_version",
)


def configure(
    method: str, settings: Mapping[str, object], targets: str | Sequence[str], exclude: str | None = None
) -> PeftConfig:
    """Returns peft's configuration of a method; `exclude` is a regular expression for modules that are not adapted.

    Raises:
        ValueError: unknown method or setting, or a value that peft rejects.
    """
    from peft import PeftConfig, __version__
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    from preheat.errors import suggest_nearest

    # peft's own registry, so that a method needs no import here.
    classes = {kind.value.lower(): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if method not in METHODS:
        if method in _REFUSED or method in classes:
            reason = _REFUSED.get(method, f"is new in peft {__version__} and has not been tested")
            why = f"preheat does not train this method of peft: it {reason}"
        else:
            why = f"no such method; {suggest_nearest(method, list(METHODS))}"
        raise ValueError(f"method: {method}: {why}; there are {', '.join(METHODS)}")
    if method not in classes:
        raise ValueError(f"method: {method}: peft {__version__} does not have it; pip install --upgrade peft")
    cls = classes[method]

    # The base class's fields concern loading and saving, not the method.
    inherited = {f.name for f in dataclasses.fields(PeftConfig)} | set(_RESERVED)
    known = [f.name for f in dataclasses.fields(cls) if f.init and f.name not in inherited]
    for key in settings:
        if key not in known:
            hint = "set target_modules next to settings" if key == "target_modules" else suggest_nearest(key, known)
            raise ValueError(f"settings.{key}: {method} has no such setting; {hint}")
        # LoHa and LoKr draw one random number per layer and read it back.
        if key == "module_dropout" and settings[key]:
            raise ValueError(
                f"settings.module_dropout: {settings[key]}: reads a random value back, which a dry run does not have; "
                "leave it at 0"
            )
    try:
        more = {"exclude_modules": exclude} if exclude else {}
        return cls(target_modules=targets if isinstance(targets, str) else list(targets), **more, **settings)
    # peft checks values in its constructors; the first line of its message suffices.
    except (TypeError, ValueError) as error:
        raise ValueError(f"settings: {str(error).splitlines()[0][:200]}") from None


def add_peft_adapter(
    model: nn.Module,
    method: str,
    *,
    targets: str | tuple[str, ...] = "all-linear",
    exclude: str | None = None,
    **settings: object,
) -> list[str]:
    """Adds a peft adapter to a transformers model and freezes the rest, in place.

    Args:
        method: one of METHODS.
        targets: `all-linear` (as in peft, all but the head), a kind of layer (attention, recurrent, feed-forward), a
            regular expression for module names, or a list of kinds and last parts of names.
        exclude: a regular expression for names of modules that are not adapted.
        settings: the method's own configuration in peft, e.g. `r=8`.

    Returns:
        Names of the adapted modules.

    Raises:
        ValueError: unknown method or setting, or no module matches `targets`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16
        ... )
        >>> len(add_peft_adapter(LlamaForCausalLM(config), "loha", r=2))
        7
    """
    return _add(model, method, settings, targets, exclude)[1]


def _add(
    model: nn.Module, method: str, settings: Mapping[str, object], targets: str | Sequence[str], exclude: str | None
) -> tuple[PeftConfig, list[str]]:
    from preheat.models.adapter_targets import EXPERTS, require_adaptable, resolve
    from preheat.ops.adapters.peft_layers import inject

    modules, experts = resolve(model, targets)
    if experts:
        raise SettingError("target_modules", f"{EXPERTS}: {method} adapts linear layers; use lora for experts")
    config = configure(method, settings, modules, exclude)
    require_adaptable(model, config)
    return config, inject(model, copy.copy(config))


def merge_peft_adapter(model: nn.Module) -> int:
    """Merges each adapter into its base weight in fp32 and removes the adapters, in place. Returns their number."""
    from preheat.ops.adapters.peft_layers import merge

    return merge(model)


@dataclass(frozen=True, kw_only=True)
class PeftAdapter(Technique):
    stage: ClassVar[Stage] = Stage.ADAPT
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"method": "loha", "settings": {"alpha": 64}},), family="llama")
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.ADAPTER, Tag.FROZEN_BASE, Tag.NON_LORA_ADAPTER})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.ADAPTER})

    method: str = "oft"
    """peft's name of the method: deft, delora, glora, gralora, hira, hra, ia3, loha, lokr, miss, oft, peanut, randlora,
    road, supertuning or vera."""
    # Plain values: peft's configuration class checks them.
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The method's own settings in peft, e.g. {r: 8, alpha: 16} for loha."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """all-linear (as in peft, all but the head), a kind of layer (attention, recurrent, feed-forward), a regular
    expression for module names, or a list of kinds and last parts of names."""
    start: str | None = None
    """A peft folder (adapter_config.json, adapter_model.safetensors) whose adapter training starts from; settings and
    base must match."""

    def check(self, context: Context) -> list[str]:
        try:
            configure(self.method, self.settings, self.target_modules)
        except ValueError as error:
            return [str(error)]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.errors import RecipeError
        from preheat.models import configs
        from preheat.models.adapter_targets import describe
        from preheat.models.text_part import name_in_text
        from preheat.models.vision import exclude_adapters_pattern
        from preheat.ops.adapters.peft_io import register_initial_values, register_start
        from preheat.ops.adapters.peft_layers import count_parameters

        # With `vision_tower` in the recipe, the tower gets no adapters.
        exclude = exclude_adapters_pattern(part, tower=Tag.NO_TOWER_ADAPTERS in build.tags)
        try:
            config, names = _add(part, self.method, self.settings, self.target_modules, exclude)
        except ValueError as error:
            on = f"{self.method} on {quote_value(self.target_modules)}"
            raise RecipeError(f"techniques.peft_adapter: {on}: {str(error).splitlines()[0][:200]}") from None
        register_initial_values(build.weights, part, config, names)
        start_note = register_start(
            build.weights,
            part,
            config,
            names,
            start=self.start,
            path=build.recipe.model.path,
            knob="techniques.peft_adapter.start",
            called={},
            rename=name_in_text if configs.wrapper_config(build.recipe) is not None else None,
        )
        trained, total = count_parameters(part)
        return Change(
            f"{self.method} on {describe(part, names)}{start_note}: {trained:,} of "
            f"{total:,} parameters trained ({trained / total:.1%})",
            len(names),
        )
