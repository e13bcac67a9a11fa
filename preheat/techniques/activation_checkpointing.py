"""Activation checkpointing: saves fewer activations in the forward pass and recomputes them in the backward pass.

What: a layer saves only its input (`full`); or its input and the results of attention and of every `products`-th matmul
(`selective`); or as many results as a fraction of its activations allows, the most expensive to recompute first
(`budget`). The rest is recomputed when its gradient is due. One forward pass of the layer under fake tensors shows
which results can be saved, and which no gradient needs (the last matmul of most layers). Bit-identical with
deterministic kernels.
Helps: activation memory no longer grows with everything inside a layer.
Hurts: `full` costs another forward pass of the wrapped layers (a third more FLOPs there); `selective` recomputes only
the cheap operators; `budget` is between the two.
Source: Chen et al. 2016 (arXiv:1604.06174); selective: Korthikanti et al. 2022 (arXiv:2205.05198); choice under a
budget as a knapsack problem: Jain et al. 2020 (Checkmate, arXiv:1910.02653).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, ParamSpec, TypeVar

from preheat.core import (
    Build,
    Change,
    Context,
    Device,
    Numerics,
    Searchable,
    Stage,
    Tag,
    Technique,
    Trials,
    conflicts_of,
)
from preheat.recipe import Bound, Fraction

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import nn

    from preheat.core.plan import Plan
    from preheat.ops.memory.selective_checkpoint import CheckpointPolicyCache

__all__ = ["ActivationCheckpointing", "Checkpointed", "checkpoint_layers"]

P = ParamSpec("P")
T = TypeVar("T")


def checkpoint_layers(
    layers: Iterable[nn.Module],
    *,
    every: int = 1,
    keep: Literal["inputs", "products"] | float = "inputs",
    products: int = 1,
) -> int:
    """Makes every `every`-th module recompute its forward pass in the backward pass, in place.

    Args:
        layers: e.g. `model.model.layers`.
        every: 1: all of them; 2: every second one.
        keep: `inputs` saves a layer's input only, `products` also the results of matmuls and attention; a number is the
            fraction of the layer's saved bytes that may be kept for the results that are most expensive to recompute.
        products: keep every `products`-th matmul of a layer, in execution order.

    Returns:
        The number of wrapped modules.

    Raises:
        ValueError: in the forward pass, if the model fills a KV cache while it trains.

    Example:
        >>> import torch
        >>> stack = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        >>> checkpoint_layers(stack, every=2)
        2
    """
    from preheat.ops.memory.selective_checkpoint import CheckpointPolicyCache, keep_matmuls, solve_knapsack

    planner = None
    if keep != "inputs":
        planner = CheckpointPolicyCache(
            lambda trace: keep_matmuls(trace, products) if keep == "products" else solve_knapsack(trace, float(keep))
        )
    # The last of each `every` layers: with 4, layers 4, 8, ...
    chosen = [layer for index, layer in enumerate(layers) if (index + 1) % every == 0]
    for layer in chosen:
        kind = (type(layer), tuple(p.shape for p in layer.parameters()))  # equal layers reuse one policy
        layer.forward = Checkpointed(layer, layer.forward, kind, planner)  # type: ignore[method-assign]
    return len(chosen)


class Checkpointed(Generic[P, T]):
    """A layer's forward pass that is recomputed in the backward pass; created by `checkpoint_layers`.

    Args:
        layer: the layer.
        forward: its own forward.
        kind: key under which equal layers reuse one policy.
        planner: chooses what to keep besides the layer's input; None: nothing.
    """

    def __init__(
        self, layer: nn.Module, forward: Callable[P, T], kind: Hashable, planner: CheckpointPolicyCache | None
    ):
        self.layer, self.forward, self.kind, self.planner = layer, forward, kind, planner
        # None: to be chosen at the first call; {}: torch's checkpoint keeps only the inputs.
        self.checkpoint_kwargs: dict[str, Any] | None = None if planner else {}

    def prepare(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Chooses what to keep for inputs of these shapes.

        Callers that trace the layer must call this first, because it runs the layer under fake tensors.
        """
        import torch

        if self.planner is not None and torch.is_grad_enabled():
            self.checkpoint_kwargs = {"context_fn": self.planner(self.kind, self._run_traced, args, dict(kwargs))}

    def _run_traced(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The forward pass, for a trace that leaves no mark on the layer."""
        from torch import distributed

        from preheat.models.moe import pause_router_records

        with contextlib.ExitStack() as stack:
            stack.enter_context(pause_router_records(self.layer))
            if distributed.is_available() and distributed.is_initialized():
                from preheat.ops.distributed.fully_shard import trace_unsharded

                stack.enter_context(trace_unsharded(self.layer))
            return self.forward(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        import torch
        from torch.utils.checkpoint import checkpoint

        from preheat.models.token_mixers import find_cache

        if not torch.is_grad_enabled():  # evaluation and generation have no backward pass
            return self.forward(*args, **kwargs)
        if find_cache(kwargs) is not None:
            raise ValueError(
                "a layer that is computed twice would fill the KV cache twice; call the model with use_cache=False"
            )
        # While tracing, `CompiledLayers` has called `prepare` already.
        if self.checkpoint_kwargs is None or not torch.compiler.is_compiling():
            self.prepare(args, kwargs)
        # torch's reentrant form takes no keyword arguments, which transformers passes to its layers.
        result: T = checkpoint(self.forward, *args, use_reentrant=False, **(self.checkpoint_kwargs or {}), **kwargs)
        return result


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Searchable):
    stage: ClassVar[Stage] = Stage.CHECKPOINT
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"mode": "budget", "budget": 0.6},
            {"mode": "selective", "every": 2},
        )
    )
    supports_encoder_decoder: ClassVar[bool] = True
    memory_saving: ClassVar[bool] = True
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.RECOMPUTATION})

    mode: Literal["full", "selective", "budget", "none"] = "full"
    """full: keep a layer's input only; selective: also the results of matmuls and attention; budget: as much as
    `budget` allows; none: keep everything."""
    on_gpu: Literal["mode", "auto"] = "mode"
    """auto: on a GPU the fastest of none, selective and full that fits in 90 % of the memory according to the dry run;
    on a CPU `mode`. The run records the choice."""
    budget: Fraction | None = None
    """With mode budget: fraction of a layer's activations, beyond its input, that may be kept; 0 is full, 1 would keep
    all."""
    products: Annotated[int, Bound(1)] = 1
    """With mode selective: keep the results of every n-th matmul; 2 keeps half as much and recomputes half the
    matmuls, as torchtitan does."""
    every: Annotated[int, Bound(1)] = 1
    """Every n-th layer; the others keep everything."""

    def acts(self) -> bool:
        return self.mode != "none"

    def left_open(self, device: Device) -> bool:
        return self.on_gpu == "auto" and device.kind == "cuda"

    def provided(self) -> frozenset[Tag]:
        return self.provides if self.acts() else frozenset()

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Plan]) -> Technique:
        fixed = replace(self, on_gpu="mode")
        if not self.left_open(context.device):
            return fixed
        fitting: list[tuple[float, ActivationCheckpointing]] = []
        # From no recomputation to most; each candidate is planned with this recipe's other techniques.
        for mode in ("none", "selective", "full"):
            candidate = replace(fixed, mode=mode, budget=None, products=1, every=1)
            # The recipe's tags contain those of the current settings: replace them by the candidate's.
            tags = (context.tags - self.provides) | candidate.provided()
            if conflicts_of(
                {**context.recipe.techniques, self.name(): candidate}.values(), replace(context, tags=tags)
            ):
                continue
            prediction = plan(candidate)
            if prediction.has_room:
                fitting.append((prediction.seconds_per_step, candidate))
            if mode == "none" and fitting:
                break  # nothing is computed twice
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else fixed  # nothing fits: the recipe's own mode

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        if self.every > context.model.layers:
            return [
                f"every: {self.every} of {context.model.layers} layers wraps none; use at most {context.model.layers}"
            ]
        if (self.mode == "budget") != (self.budget is not None):
            return [f"budget: {self.budget} with mode: {self.mode}; only mode: budget has a budget, and it needs one"]
        if self.products > 1 and self.mode != "selective":
            return [f"products: {self.products} with mode: {self.mode}; only mode: selective keeps matmuls"]
        if self.mode == "none" and self.every > 1:
            return [f"every: {self.every} with mode: none, which recomputes no layer; leave it out"]
        if self.budget == 1:
            return ["budget: 1 keeps everything; leave activation_checkpointing out, or set budget below 1"]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models.hf import find_anatomy

        layers = find_anatomy(part).blocks
        if self.mode == "none":
            return Change(f"{len(layers)} layers keep everything, and nothing is recomputed", len(layers))
        keep: Any = {"full": "inputs", "selective": "products", "budget": self.budget}[self.mode]
        count = checkpoint_layers(layers, every=self.every, keep=keep, products=self.products)
        policy = {
            "full": "inputs kept",
            "selective": "inputs and matmuls kept"
            if self.products == 1
            else f"inputs, attention and one in {self.products} matmuls kept",
            "budget": f"inputs and at most {self.budget or 0:.0%} of the rest kept",
        }[self.mode]
        return Change(f"{count} of {len(layers)} layers recomputed in backward, {policy}", count)

    def options(self, context: Context) -> Iterable[Technique]:
        # From the least recomputation to the most.
        yield from (ActivationCheckpointing(mode="selective", products=n) for n in (1, 2))
        yield from (ActivationCheckpointing(mode="budget", budget=share) for share in (0.75, 0.5, 0.25))
        yield from (ActivationCheckpointing(every=n) for n in (4, 2, 1) if n <= context.model.layers)

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        if self.mode == "none":
            return [ActivationCheckpointing(mode="selective"), *replace(self, mode="selective").fallbacks(context)]
        if self.mode != "full":
            # Every second matmul is the milder step, if every one is kept so far.
            half = self.mode == "selective" and self.products == 1
            return [
                *([ActivationCheckpointing(mode="selective", products=2)] if half else []),
                ActivationCheckpointing(),
            ]
        return [ActivationCheckpointing(every=n) for n in (4, 2, 1) if n < self.every]

    def period(self) -> int:
        # Only each n-th layer differs, so memory repeats with this period over the depth.
        return self.every

    def host_overhead(self) -> float:
        # Measured on host-bound steps of 8 small Llama and GPT-2 layers on a CPU, in us per kernel: 9 to 12 and 14 to
        # 16 without checkpointing, 13 to 16 and 18 to 22 with `full` (hooks, one graph per layer), 22 to 24 and 28 to
        # 31 if each operator asks Python whether to keep its result.
        if self.mode == "none":
            return 1.0
        return 1 + (0.8 if self.mode == "full" else 2.2) / self.every
