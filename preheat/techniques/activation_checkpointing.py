"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass.

What: a layer keeps only its input (`full`), or its input and the results of matrix products and attention (`selective`),
and the rest is computed again when its gradient is due. Same numbers, bit for bit, with deterministic kernels.
Helps: activations no longer grow with everything inside a layer. Hurts: `full` costs a further forward pass of the
wrapped layers (a third more FLOPs there); `selective` only the cheap operators.
Source: Chen et al. 2016 (arXiv:1604.06174); selective: Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.recipe import Bound
from preheat.technique import Build, Change, Context, Stage, Tag, Technique

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ActivationCheckpointing", "checkpoint_layers"]


def _saved_operators() -> list[Any]:
    """Operators dear to compute for what they weigh: matrix products and fused attention."""
    import torch

    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]


def checkpoint_layers(layers: Iterable[nn.Module], *, every: int = 1, keep: Literal["inputs", "products"] = "inputs") -> int:
    """Makes every `every`-th module compute its forward pass again in the backward pass. In place.

    Args:
        layers: e.g. `model.model.layers`.
        every: 1: all of them; 2: every second one.
        keep: `inputs` of a layer only, or also the results of its matrix `products` and attention.

    Returns:
        How many were wrapped.

    Raises:
        ValueError: in the forward pass, when the model fills a KV cache while it trains.

    Example:
        >>> import torch
        >>> stack = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        >>> checkpoint_layers(stack, every=2)
        2
    """
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def wrapped(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # evaluation and generation have no backward pass to compute it again in
            return forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            raise ValueError(
                "a layer that is computed twice would fill the KV cache twice; call the model with use_cache=False"
            )
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    contexts: dict[str, Any] = (
        {"context_fn": functools.partial(create_selective_checkpoint_contexts, _saved_operators())}
        if keep == "products"
        else {}
    )
    chosen = [layer for index, layer in enumerate(layers) if (index + 1) % every == 0]
    for layer in chosen:
        layer.forward = functools.partial(wrapped, layer.forward)  # type: ignore[method-assign]
    return len(chosen)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Technique):
    stage: ClassVar[Stage] = Stage.CHECKPOINT
    numerics: ClassVar[Any] = "exact"
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag("recomputes")})

    mode: Literal["full", "selective"] = "full"
    """full: keep a layer's input only; selective: also the results of matrix products and attention."""
    every: Annotated[int, Bound(1)] = 1
    """Every n-th layer; the others keep everything."""

    def check(self, context: Context) -> list[str]:
        if self.every > context.model.layers:
            return [f"every: {self.every} of {context.model.layers} layers wraps none; use at most {context.model.layers}"]
        return []

    def apply(self, build: Build, part: Any) -> Change:
        from preheat.models.adapter import anatomy

        layers = anatomy(part).layers
        count = checkpoint_layers(layers, every=self.every, keep="products" if self.mode == "selective" else "inputs")
        kept = "inputs and matrix products kept" if self.mode == "selective" else "inputs kept"
        return Change(f"{count} of {len(layers)} layers computed again in backward, {kept}", count)

    def options(self, context: Context) -> Iterable[Technique]:
        yield ActivationCheckpointing(mode="selective")
        yield from (ActivationCheckpointing(every=n) for n in (4, 2, 1) if n <= context.model.layers)

    def rungs(self, context: Context) -> Iterable[Technique]:
        if self.mode == "selective":
            return [ActivationCheckpointing()]
        return [ActivationCheckpointing(every=n) for n in (4, 2, 1) if n < self.every]

    def period(self) -> int:
        return self.every
