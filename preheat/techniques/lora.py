"""LoRA and its variants rsLoRA, DoRA and PiSSA: train low-rank updates of a frozen model's linear layers, by peft.

What: each targeted weight W becomes W + s B A with A and B of `rank`; only A and B are trained. `lora`: s = alpha /
rank, B starts at zero. `rslora`: s = alpha / sqrt(rank), so that updates do not shrink as the rank grows. `dora`: the
norm of each output's row of W + s B A is a trained magnitude. `pissa`: A and B start as W's largest singular directions
and W keeps the residual. On a 4-bit base (`nf4`) this is QLoRA, with `dora` QDoRA. `target_modules` takes kinds of
layers too: attention, recurrent (Mamba, delta nets, short convolutions), feed-forward (dense blocks and shared experts)
and experts, each of which gets its own pair of `expert_rank`; routers stay frozen. `embedding_rank` adapts the
embedding, and with it a tied head.
Helps: gradients and optimizer state for a small fraction of the parameters; adapters of a few megabytes; merged for
inference. Adapting the embedding helps when the task gives tokens new meanings: a rank of 2 took a small tied model
from 86 to 96 % of full fine-tuning's gain on questions with numbers (benchmarks/results/tuning_stories.md). rsLoRA
helps at ranks of 64 and more, DoRA at small ones, PiSSA reaches the same loss in fewer steps.
Hurts: less capacity than full fine-tuning for large domain shifts; the base is still in memory; DoRA materializes W + s
B A in every forward pass (slower, and as much memory as a weight); PiSSA computes singular values when the model is
built and changes the base.
Source: Hu et al. 2021 (arXiv:2106.09685); all linear layers: Dettmers et al. 2023 (arXiv:2305.14314); rsLoRA:
Kalajdzievski 2023 (arXiv:2312.03732); DoRA: Liu et al. 2024 (arXiv:2402.09353); PiSSA: Meng et al. 2024
(arXiv:2404.02948).
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique, Trials
from preheat.errors import SettingError
from preheat.recipe import Bound, Fraction, NonNegativeInt, Positive
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import LoraConfig
    from torch import nn

__all__ = ["Lora", "add_lora", "merge_lora"]


def add_lora(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    targets: str | tuple[str, ...] = "all-linear",
    variant: str = "lora",
    pissa_iterations: int = 0,
    expert_rank: int = 0,
    embedding_rank: int = 0,
    exclude: str | None = None,
) -> list[str]:
    """Adds LoRA to a transformers model and freezes the rest, in place; on meta nothing is initialized.

    Args:
        targets: `all-linear` (as in peft, all but the head), a kind of layer (attention, recurrent, feed-forward,
            experts), a regular expression for module names, or a list of kinds and last parts of names
            (`("attention", "down_proj")`).
        variant: lora, rslora, dora or pissa.
        pissa_iterations: iterations of a randomized singular value decomposition; 0: the exact one.
        expert_rank: rank of an adapter for each expert, in models that have experts; 0: none, or `rank` if `targets`
            names the experts.
            `preheat.ops.grouped_mm.compute_experts` applies them; `preheat.ops.adapters.moe_lora.draw_pairs`
            initializes them if the model is on meta.
        embedding_rank: rank of an adapter on the embedding, which a tied head uses too; 0: none.
        exclude: a regular expression for names of modules that are not adapted.

    Returns:
        Names of the adapted modules.

    Raises:
        ValueError: no module matches `targets`, or one that does is tied to another; `expert_rank` in a model without
            experts, or too large for them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16
        ... )
        >>> len(add_lora(LlamaForCausalLM(config), rank=4, variant="dora"))
        7
    """
    from preheat.models.adapter_targets import resolve

    start = _choose_initialization(variant, pissa_iterations)
    modules, experts = resolve(model, targets)
    config = _build_config(model, rank, alpha, dropout, modules, variant, start, exclude, embedding_rank)
    return _add(model, config, expert_rank or rank * experts)


def _add(model: nn.Module, config: LoraConfig, expert_rank: int) -> list[str]:
    from preheat.models.adapter_targets import require_adaptable
    from preheat.ops.adapters.peft_layers import base_layer_of, inject

    rank, on_meta = config.r, next(model.parameters()).device.type == "meta"
    plain = copy.copy(config)
    # PiSSA decomposes the base's weights, which have no values on meta: `draw` does it once they are loaded.
    if on_meta:
        plain.init_lora_weights = True
    require_adaptable(model, config)
    names = inject(model, plain)
    for name in names if str(config.init_lora_weights).startswith("pissa") else ():
        if min(base_layer_of(model, name).weight.shape) < rank:
            raise ValueError(f"{name} has no {rank} singular directions to start from; lower the rank")
    if expert_rank:
        # s = alpha / r, for rsLoRA alpha / sqrt(r).
        scale = config.lora_alpha / (math.sqrt(expert_rank) if config.use_rslora else expert_rank)
        _add_to_experts(model, expert_rank, scale, drawn=not on_meta)
    return names


def _add_to_experts(model: nn.Module, rank: int, scale: float, *, drawn: bool) -> None:
    from preheat.models.moe import experts_of, routers
    from preheat.ops.adapters.moe_lora import add_pairs, draw_pairs

    modules = experts_of(model)
    if not modules:
        reason = (
            "transformers computes this model's experts in a way that leaves no place for adapters"
            if routers(model)
            else "is for experts, and the model has none"
        )
        raise SettingError("expert_rank", f"{rank}: {reason}; leave it out")
    add_pairs(modules, rank, scale)
    for experts in modules if drawn else ():
        draw_pairs(experts)


def _choose_initialization(variant: str, pissa_iterations: int) -> bool | str:
    """Returns peft's name for the initialization of A and B; True: random A and zero B, which starts as the base."""
    return True if variant != "pissa" else f"pissa_niter_{pissa_iterations}" if pissa_iterations else "pissa"


def _build_config(
    model: nn.Module,
    rank: int,
    alpha: float,
    dropout: float,
    targets: str | Sequence[str],
    variant: str,
    start: bool | str,
    exclude: str | None = None,
    embedding_rank: int = 0,
) -> LoraConfig:
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    ranks, tied = {}, False
    if embedding_rank:
        embedding, head = _end_names(model)
        targets = _add_target(targets, embedding)
        tied = model.get_submodule(head).weight is model.get_submodule(embedding).weight
        ranks = dict.fromkeys((embedding, head) if tied else (embedding,), embedding_rank)

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # GPT-2 stores its weights transposed
        use_rslora=variant == "rslora",
        use_dora=variant == "dora",
        init_lora_weights=start,  # type: ignore[arg-type]
        exclude_modules=exclude,
        rank_pattern=ranks,
        ensure_weight_tying=tied,
    )


def _end_names(model: nn.Module) -> tuple[str, str]:
    """Returns the names of embedding and head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    # Inside an adapter, the original module has the name `NAME.base_layer`.
    names = {id(module): name.removesuffix(".base_layer") for name, module in model.named_modules()}
    if ends[1] is None:
        raise SettingError("embedding_rank", "the model has no head over its vocabulary; set embedding_rank: 0")
    first, last = (names[id(module)] for module in ends)
    return first, last


def _add_target(targets: str | Sequence[str], name: str) -> str | Sequence[str]:
    """Adds a module to the targets."""
    return rf"(?:{targets})|{re.escape(name)}" if isinstance(targets, str) else (*targets, name)


def merge_lora(model: nn.Module) -> int:
    """Merges each adapter into its base weight in fp32 and removes the adapters, in place. Returns their number.

    A 4-bit base is dequantized. The merge includes DoRA's magnitudes and PiSSA's changed base.
    """
    from preheat.ops.adapters.peft_layers import merge

    return merge(model)


@dataclass(frozen=True, kw_only=True)
class Lora(Technique):
    stage: ClassVar[Stage] = Stage.ADAPT
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"variant": "dora", "rank": 4},
            {"variant": "pissa", "rank": 4},
            {"variant": "rslora"},
            {"embedding_rank": 3},
        )
    )
    supports_encoder_decoder: ClassVar[bool] = True
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.ADAPTER, Tag.FROZEN_BASE, Tag.MODIFIED_BASE})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.ADAPTER})

    rank: Annotated[int, Bound(1)] = 16
    """Rank of the updates."""
    alpha: Positive = 32.0
    """The updates are scaled by alpha / rank; with `rslora` by alpha / sqrt(rank)."""
    dropout: Fraction = 0.0
    """Dropout on the input of the adapters."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """all-linear (as in peft, all but the head), a kind of layer (attention, recurrent, feed-forward, experts), a
    regular expression for module names, or a list of kinds and last parts of names."""
    variant: Literal["lora", "rslora", "dora", "pissa"] = "lora"
    """lora; rslora: scaled for high ranks; dora: also trains the norms of the outputs' rows; pissa: starts from the
    base's largest singular directions."""
    expert_rank: NonNegativeInt = 0
    """Rank of an adapter on each expert's matrices, in models with experts (lora and rslora); 0: experts are not
    adapted, or with `rank` if target_modules names them."""
    embedding_rank: NonNegativeInt = 0
    """Rank of an adapter on the embedding, and on a head that is tied to it (lora and rslora); 0: they are not
    adapted."""
    pissa_iterations: NonNegativeInt = 0
    """With `pissa`: iterations of a randomized decomposition (4 suffice, and take seconds while the exact one takes
    minutes); 0: exact."""
    start: str | None = None
    """A peft folder (adapter_config.json, adapter_model.safetensors) whose adapter training starts from; settings and
    base must match."""

    def provided(self) -> frozenset[Tag]:
        # Only PiSSA takes its start out of the base's weights.
        return self.provides if self.variant == "pissa" else self.provides - {Tag.MODIFIED_BASE}

    def _has_expert_targets(self) -> bool:
        targets = self.target_modules
        return "experts" in ((targets,) if isinstance(targets, str) else targets)

    def check(self, context: Context) -> list[str]:
        problems = []
        if self.variant == "pissa" and Tag.QUANTIZED_BASE in context.tags:
            problems.append("variant: pissa changes the base's weights, which are quantized; use lora, rslora or dora")
        if self.variant == "pissa" and self.start:
            problems.append(
                "start: pissa starts from the base's singular directions, not from an adapter; use variant: lora"
            )
        if self._has_expert_targets() or self.expert_rank:
            key = "expert_rank" if self.expert_rank else "target_modules: experts"
            without = "set expert_rank: 0" if self.expert_rank else "leave experts out"
            if not context.model.experts:
                rank = f": {self.expert_rank}" if self.expert_rank else ""
                problems.append(f"{key}{rank} is for experts, and {context.model.family} has none; leave it out")
            if self.variant not in ("lora", "rslora"):
                problems.append(f"{key}: goes with lora and rslora, and variant is {self.variant}; {without}")
            if self.dropout:
                problems.append(f"{key}: does not go with dropout; leave one of them out")
        if self.embedding_rank:
            if self.variant not in ("lora", "rslora"):
                problems.append(
                    f"embedding_rank: goes with lora and rslora, and variant is {self.variant}; set embedding_rank: 0"
                )
            split = sorted({Tag.PIPELINE_STAGES, Tag.TENSOR_PARALLEL} & context.tags)
            if split:
                # Each of them splits the matrix that embedding and head share, or puts its users on different devices.
                problems.append(
                    f"embedding_rank: does not go with {split[0]}, which separates embedding and head; set "
                    "embedding_rank: 0"
                )
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.errors import RecipeError
        from preheat.models import configs
        from preheat.models.adapter_targets import describe, resolve
        from preheat.models.text_part import name_in_text
        from preheat.models.vision import exclude_adapters_pattern
        from preheat.ops.adapters.peft_io import register_initial_values, register_start
        from preheat.ops.adapters.peft_layers import count_parameters, prevent_fp32_cast

        # Under the tag of `vision_tower`, the tower gets no adapters.
        exclude = exclude_adapters_pattern(part, tower=Tag.NO_TOWER_ADAPTERS in build.tags)
        try:
            start = _choose_initialization(self.variant, self.pissa_iterations)
            targets, experts = resolve(part, self.target_modules)
            config = _build_config(
                part,
                self.rank,
                self.alpha,
                self.dropout,
                targets,
                self.variant,
                start,
                exclude,
                self.embedding_rank,
            )
            expert_rank = self.expert_rank or self.rank * experts
            names = _add(part, config, expert_rank)
        except SettingError as error:
            raise RecipeError(f"techniques.lora.{error}") from None
        except ValueError as error:
            reason = str(error).splitlines()[0][:200]
            raise RecipeError(f"techniques.lora.target_modules: {quote_value(self.target_modules)}: {reason}") from None
        # The adapter's values are drawn once the base is loaded, since some initializations depend on it.
        register_initial_values(build.weights, part, config, names)
        count = len(names)
        if expert_rank:
            count += self._initialize_experts(build, part)
        begun = register_start(
            build.weights,
            part,
            config,
            names,
            start=self.start,
            path=build.recipe.model.path,
            knob="techniques.lora.start",
            called={"r": "rank", "lora_alpha": "alpha", "use_dora": "variant", "use_rslora": "variant"},
            rename=name_in_text if configs.wrapper_config(build.recipe) is not None else None,
        )
        # peft would cast the adapters' inputs to fp32, and autocast cast them back at once, a copy each.
        half = {Tag.BF16_COMPUTE, Tag.FP16_COMPUTE} & build.tags
        if half and self.variant != "dora":  # DoRA's norms need fp32
            prevent_fp32_cast(part)
        trained, total = count_parameters(part)
        extras = ""
        if expert_rank:
            layers = f"{count - len(names)} layer{'' if count - len(names) == 1 else 's'}"
            extras = f", of rank {expert_rank} on each of {build.model.experts} experts in {layers}"
        end = _end_names(part)[0] if self.embedding_rank else None
        projections = describe(part, [name for name in names if name != end])
        if self.embedding_rank:
            tied = " and the head that is tied to it" if config.ensure_weight_tying else ""
            extras += f", of rank {self.embedding_rank} on the embedding{tied}"
        return Change(
            f"{self.variant} of rank {self.rank} on {projections}{extras}{begun}: "
            f"{trained:,} of {total:,} parameters trained ({trained / total:.1%})",
            count,
        )

    def _initialize_experts(self, build: Build, part: nn.Module) -> int:
        from preheat.ops.adapters.moe_lora import OWN, adapted_experts, draw_pairs

        expert_ids = {id(experts) for experts in adapted_experts(part)}
        # Pairs of A and B for all experts of a layer are one module's parameters, unknown to peft.
        build.weights.fresh(
            OWN, [name for name, module in part.named_modules() if id(module) in expert_ids], draw_pairs
        )
        return len(expert_ids)
