"""LoRA and its variants rsLoRA, DoRA and PiSSA: freeze the model, train low-rank additions to its linear maps. By peft.

What: each chosen linear map W becomes W + s B A with A and B of `rank`; only A and B are trained. `lora`: s = alpha /
rank, B begins at zero. `rslora`: s = alpha / sqrt(rank), so that the additions do not shrink as the rank grows. `dora`:
each output's row of W + s B A is brought to a length that is trained besides. `pissa`: A and B begin as W's largest
singular directions and W keeps the rest. On a base in 4 bits (`nf4`) this is QLoRA, with `dora` QDoRA. In a model with
experts all-linear is attention's maps, and `expert_rank` gives each expert a pair of its own; routers stay frozen.
`embedding_rank` gives the embedding a pair, and with it a head that is tied to it.
Helps: gradients and optimizer state for a small share of the parameters; adapters of a few megabytes; merged away for
inference. A pair on the embedding lets words be used anew: a rank of 2 took a small tied model from 86 to 96 % of full
tuning's gain on questions with numbers (benchmarks/results/tuning_stories.md). rsLoRA gains at ranks of 64 and more,
DoRA at small ones, PiSSA in fewer steps to the same loss. Hurts: less capacity than full tuning for large shifts of
domain; the base still stands in memory; DoRA makes W + s B A in every forward pass (slower, and as much memory as a
weight); PiSSA takes singular values when the model is built and no longer leaves the base as it was.
Source: Hu et al. 2021 (arXiv:2106.09685); all linear maps: Dettmers et al. 2023 (arXiv:2305.14314); rsLoRA:
Kalajdzievski 2023 (arXiv:2312.03732); DoRA: Liu et al. 2024 (arXiv:2402.09353); PiSSA: Meng et al. 2024
(arXiv:2404.02948).
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import Build, Change, Context, Stage, Tag, Technique, Trials
from preheat.errors import SettingError
from preheat.recipe import Bound, Positive, Share, Whole

if TYPE_CHECKING:
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
    """Adds LoRA to a transformers model and freezes the rest, in place; works on meta too, where nothing is drawn.

    Args:
        targets: `all-linear` (all but the head; with experts, attention's), a regular expression for module names, or
            their last parts (`("q_proj", "v_proj")`).
        variant: lora, rslora, dora or pissa.
        pissa_iterations: of a randomized singular value decomposition; 0: the exact one.
        expert_rank: of a pair for each expert, in models that have experts; 0: none. They are computed where the
            experts are, by `preheat.ops.grouped_mm.compute_experts`; `preheat.ops.adapters.moe_lora.draw_pairs` gives
            them values where the model is on meta.
        embedding_rank: of a pair on the embedding, which a head that is tied to it has too; 0: none.
        exclude: a regular expression for names of modules that are left as they are.

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
    start = _start(variant, pissa_iterations)
    return _add(
        model, _config(model, rank, alpha, dropout, targets, variant, start, exclude, embedding_rank), expert_rank
    )


def _add(model: nn.Module, config: Any, expert_rank: int) -> list[str]:
    from preheat.ops.adapters.peft_layers import base_of, inject

    rank, on_meta = config.r, next(model.parameters()).device.type == "meta"
    plain = copy.copy(config)
    if on_meta:
        plain.init_lora_weights = True
    names = inject(model, plain)
    for name in names if str(config.init_lora_weights).startswith("pissa") else ():
        if min(base_of(model, name).weight.shape) < rank:
            raise ValueError(f"{name} has no {rank} singular directions to begin from; lower the rank")
    if expert_rank:
        scale = config.lora_alpha / (math.sqrt(expert_rank) if config.use_rslora else expert_rank)
        _add_to_experts(model, expert_rank, scale, drawn=not on_meta)
    return names


def _add_to_experts(model: nn.Module, rank: int, scale: float, *, drawn: bool) -> None:
    from preheat.models.moe import experts_of
    from preheat.ops.adapters.moe_lora import add_pairs, draw_pairs

    modules = experts_of(model)
    if not modules:
        raise SettingError("expert_rank", f"{rank} is for experts, and the model has none; leave it out")
    add_pairs(modules, rank, scale)
    for experts in modules if drawn else ():
        draw_pairs(experts)


def _start(variant: str, pissa_iterations: int) -> bool | str:
    """peft's name for what A and B begin as; True: A at random, B zero, so that the adapted model starts as the
    base."""
    return True if variant != "pissa" else f"pissa_niter_{pissa_iterations}" if pissa_iterations else "pissa"


def _config(
    model: nn.Module,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Any,
    variant: str,
    start: bool | str,
    exclude: str | None = None,
    embedding_rank: int = 0,
) -> Any:
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    from preheat.models.moe import adapted

    targets, ranks, tied = adapted(model, targets), {}, False
    if embedding_rank:
        embedding, head = _ends(model)
        targets = _and(model, targets, embedding)
        tied = model.get_submodule(head).weight is model.get_submodule(embedding).weight
        ranks = dict.fromkeys((embedding, head) if tied else (embedding,), embedding_rank)

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # GPT-2 stores its matrices transposed
        use_rslora=variant == "rslora",
        use_dora=variant == "dora",
        init_lora_weights=start,  # type: ignore[arg-type]
        exclude_modules=exclude,
        rank_pattern=ranks,
        ensure_weight_tying=tied,
    )


def _ends(model: nn.Module) -> tuple[str, str]:
    """Names of embedding and head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    names = {id(module): name.removesuffix(".base_layer") for name, module in model.named_modules()}
    if ends[1] is None:
        raise SettingError("embedding_rank", "the model has no head over its vocabulary; set embedding_rank: 0")
    first, last = (names[id(module)] for module in ends)
    return first, last


def _and(model: nn.Module, targets: Any, name: str) -> Any:
    """Targets, and a module besides."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if targets == "all-linear":
        head = _ends(model)[1]
        maps = {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and n != head}
        return (*sorted({n.rpartition(".")[2] for n in maps}), name)
    return rf"(?:{targets})|{re.escape(name)}" if isinstance(targets, str) else (*targets, name)


def merge_lora(model: nn.Module) -> int:
    """Adds each adapter into its base weight in fp32 and takes the adapters out, in place. Returns how many.

    A base in 4 bits becomes a full one. What is merged is what was trained: DoRA's lengths, PiSSA's changed base.
    """
    from preheat.ops.adapters.peft_layers import merge

    return merge(model)


@dataclass(frozen=True, kw_only=True)
class Lora(Technique):
    stage: ClassVar[Stage] = Stage.ADAPT
    numerics: ClassVar[Any] = "different"
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
    """Rank of the additions."""
    alpha: Positive = 32.0
    """The additions are scaled by alpha / rank; with `rslora` by alpha / sqrt(rank)."""
    dropout: Share = 0.0
    """Dropout on the additions' input."""
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear (all but the head; with experts, attention's), a regular expression for module names, or a list of
    their last parts."""
    variant: Literal["lora", "rslora", "dora", "pissa"] = "lora"
    """lora; rslora: scaled for high ranks; dora: the outputs' lengths are trained besides; pissa: begins as the base's
    largest singular directions."""
    expert_rank: Whole = 0
    """Rank of an addition to each expert's matrices, in models with experts (lora and rslora); 0: the experts stay as
    they are."""
    embedding_rank: Whole = 0
    """Rank of an addition to the embedding, and to a head that is tied to it (lora and rslora); 0: they stay as they
    are."""
    pissa_iterations: Whole = 0
    """With `pissa`: iterations of a randomized decomposition (4 serve well, and take seconds where the exact one takes
    minutes); 0: exact."""
    start: str | None = None
    """A folder of peft's (adapter_config.json, adapter_model.safetensors) whose adapter training begins from; settings
    and base must agree."""

    def provided(self) -> frozenset[Tag]:
        return self.provides if self.variant == "pissa" else self.provides - {Tag.MODIFIED_BASE}

    def check(self, context: Context) -> list[str]:
        problems = []
        if self.variant == "pissa" and Tag.QUANTIZED_BASE in context.tags:
            problems.append(
                "variant: pissa changes the base's weights, which stand packed in few bits; use lora, rslora or dora"
            )
        if self.variant == "pissa" and self.start:
            problems.append(
                "start: pissa begins from the base's singular directions and not from an adapter; use variant: lora"
            )
        if self.expert_rank:
            if not context.model.experts:
                problems.append(
                    f"expert_rank: {self.expert_rank} is for experts, and {context.model.family} has none; leave it out"
                )
            if self.variant not in ("lora", "rslora"):
                problems.append(
                    f"expert_rank: goes with lora and rslora, and variant is {self.variant}; set expert_rank: 0"
                )
            if self.dropout or self.start:
                problems.append(
                    f"expert_rank: does not go with {'dropout' if self.dropout else 'start'}; leave one of them out"
                )
        if self.embedding_rank:
            if self.variant not in ("lora", "rslora"):
                problems.append(
                    f"embedding_rank: goes with lora and rslora, and variant is {self.variant}; set embedding_rank: 0"
                )
            split = sorted({Tag.PIPELINE_STAGES, Tag.TENSOR_PARALLEL} & context.tags)
            if split:
                problems.append(
                    f"embedding_rank: does not go with {split[0]}, which takes embedding and head apart; set "
                    "embedding_rank: 0"
                )
        return problems

    def apply(self, build: Build, part: Any) -> Change:
        from preheat.errors import RecipeError
        from preheat.models.vision import tower_modules
        from preheat.ops.adapters.peft_io import begin
        from preheat.ops.adapters.peft_layers import shares, under_autocast

        exclude = tower_modules(part) if Tag.NO_TOWER_ADAPTERS in build.tags else None
        try:
            start = _start(self.variant, self.pissa_iterations)
            config = _config(
                part,
                self.rank,
                self.alpha,
                self.dropout,
                self.targets,
                self.variant,
                start,
                exclude,
                self.embedding_rank,
            )
            names = _add(part, config, self.expert_rank)
        except SettingError as error:
            raise RecipeError(f"techniques.lora.{error}") from None
        except ValueError as error:
            raise RecipeError(
                f"techniques.lora.targets: {self.targets!r}: {str(error).splitlines()[0][:200]}"
            ) from None
        begun = begin(
            build.weights,
            part,
            config,
            names,
            start=self.start,
            path=build.recipe.model.path,
            knob="techniques.lora.start",
            called={"r": "rank", "lora_alpha": "alpha", "use_dora": "variant", "use_rslora": "variant"},
        )
        count = len(names)
        if self.expert_rank:
            count += self._begin_experts(build, part)
        half = {Tag.BF16_COMPUTE, Tag.FP16_COMPUTE} & build.tags
        if half and self.variant != "dora":  # whose lengths are taken in fp32
            under_autocast(part)
        trained, total = shares(part)
        extras = (
            f", of rank {self.expert_rank} on each of {build.model.experts} experts in {count - len(names)} layers"
            if self.expert_rank
            else ""
        )
        maps = len(names) - bool(self.embedding_rank)
        if self.embedding_rank:
            tied = " and the head that is tied to it" if config.ensure_weight_tying else ""
            extras += f", of rank {self.embedding_rank} on the embedding{tied}"
        return Change(
            f"{self.variant} of rank {self.rank} on {maps} linear maps{extras}{begun}: "
            f"{trained:,} of {total:,} parameters trained ({trained / total:.1%})",
            count,
        )

    def _begin_experts(self, build: Build, part: Any) -> int:
        from preheat.ops.adapters.moe_lora import OWN, adapted_experts, draw_pairs

        expert_ids = {id(experts) for experts in adapted_experts(part)}
        build.weights.fresh(
            OWN, [name for name, module in part.named_modules() if id(module) in expert_ids], draw_pairs
        )
        return len(expert_ids)
