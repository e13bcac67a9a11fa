"""Runs a model over calibration sequences with transformers' own forward: completely, by layer, or skipping layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from preheat.errors import RecipeError
from preheat.models.generation.generate import has_attention_pattern
from preheat.models.hf import STANDALONE, find_anatomy, head
from preheat.models.module_lookup import find_base
from preheat.models.vision import set_attention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = [
    "hook_hidden_states",
    "join_rows",
    "iterate_layers",
    "linear_maps",
    "compute_loss",
    "matrix",
    "plain_forward",
    "require_rows",
    "run",
    "skip_layers",
]

Arguments = dict[str, Any]
"""A layer's keyword arguments: masks, positions, caches and flags."""
Output: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A layer's result: hidden states, alone or first."""


_AT_ONCE = 8
"""Rows per forward pass."""


def require_rows(rows: Sequence[Tensor], who: str) -> None:
    """Raises RecipeError if there is nothing to calibrate on."""
    if not any(row.shape[-1] > 1 for row in rows):
        raise RecipeError(
            f"{who}: needs calibration sequences, and there are none of two tokens or more; name text with --data"
        )


@contextmanager
def plain_forward(model: PreTrainedModel) -> Iterator[None]:
    """Context manager for the model's plain forward: eval mode, no gradients, transformers' own attention function.

    Layers with one of preheat's patterns use preheat's function; capped scores the eager one, since sdpa ignores the
    cap.
    """
    training, attention, cached = model.training, model.config._attn_implementation, model.config.use_cache
    model.eval()
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    plain = "eager" if capped or not model._supports_sdpa else "sdpa"
    # preheat's slot-based attention needs a mask that only a build's forward hands to the layers.
    set_attention(model, STANDALONE if has_attention_pattern(model) else plain)
    model.config.use_cache = False
    try:
        with torch.no_grad():
            yield
    finally:
        model.config.use_cache = cached
        set_attention(model, attention)
        model.train(training)


@contextmanager
def hook_hidden_states(hooks: Sequence[tuple[nn.Module, Callable[[Tensor, Tensor], None]]]) -> Iterator[None]:
    """Context manager that calls `tell(input, output)` with the hidden states of each module."""

    def hook(tell: Callable[[Tensor, Tensor], None]) -> Callable[..., None]:
        def report(module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments, out: Output) -> None:
            # Returns nothing: torch would replace the output by a returned value.
            tell(*_find_hidden_states(args, kwargs, out))

        return report

    handles = [module.register_forward_hook(hook(tell), with_kwargs=True) for module, tell in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _find_hidden_states(args: tuple[Tensor, ...], kwargs: Arguments, out: Output) -> tuple[Tensor, Tensor]:
    """The hidden states that enter and leave a module."""
    return (args[0] if args else kwargs["hidden_states"]), (out[0] if isinstance(out, tuple) else out)


def run(model: PreTrainedModel, rows: Sequence[Tensor]) -> None:
    """Passes the rows through the layers, for hooks to observe, without logits. Call within `plain_forward`."""
    for row in rows:
        find_base(model)(input_ids=row.to(model.device))


def join_rows(rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields consecutive rows of one length together, [rows, length]: such batches need no padding."""
    for _, alike in itertools.groupby(rows, key=lambda row: row.shape[-1]):
        yield torch.cat(list(alike))


def compute_loss(model: PreTrainedModel, rows: Sequence[Tensor]) -> float:
    """Mean cross entropy of the rows' next tokens, in nats. Call within `plain_forward`."""
    total, tokens = 0.0, 0
    for alike in join_rows(rows):
        for some in alike.split(_AT_ONCE):
            some = some.to(model.device)
            logits = model(input_ids=some).logits[:, :-1].flatten(0, 1).float()  # [rows * (length - 1), vocabulary]
            total += float(nn.functional.cross_entropy(logits, some[:, 1:].flatten(), reduction="sum"))
            tokens += some[:, 1:].numel()
    return total / tokens


@contextmanager
def skip_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager that bypasses the given layers."""

    def pass_through(module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments, out: Output) -> Output:
        # The layer runs, and torch replaces its output by what the hook returns: its input.
        before, _ = _find_hidden_states(args, kwargs, out)
        return (before, *out[1:]) if isinstance(out, tuple) else before

    handles = [layer.register_forward_hook(pass_through, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def iterate_layers(
    model: PreTrainedModel, rows: Sequence[Tensor]
) -> Iterator[tuple[str, nn.Module, Callable[[], list[Tensor]]]]:
    """Iterates over the layers in order: (name, layer, run); `run()` passes the rows through this layer alone.

    The next layer's inputs are computed by the layer as it is when the iteration continues, including changes made to
    it. Call within `plain_forward`.

    Example:
        >>> with plain_forward(model):  # doctest: +SKIP
        ...     for name, layer, run in iterate_layers(model, rows):
        ...         with hook_hidden_states([(layer.mlp.down_proj, look)]):
        ...             run()
        ...         change(layer)
    """
    parts = find_anatomy(model)
    # One pass of the whole model records what each layer is called with (masks,
    # rotary tables), and the first layer's input.
    names = {id(m): name for name, m in model.named_modules()}
    # Per layer and row, the arguments other than hidden states.
    calls: list[list[tuple[tuple[object, ...], Arguments]]] = [[] for _ in parts.layers]
    states: list[Tensor] = []

    def note(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
            assert args, "layers are given their hidden states first"
            calls[number].append((args[1:], kwargs))
            if number == 0:
                states.append(args[0])

        return hook

    handles = [layer.register_forward_pre_hook(note(n), with_kwargs=True) for n, layer in enumerate(parts.layers)]
    try:
        run(model, rows)
    finally:
        for handle in handles:
            handle.remove()

    for number, layer in enumerate(parts.layers):
        # Defaults bind this iteration's layer; a closure would see a later one if the caller kept the function.
        def run_layer(number: int = number, layer: nn.Module = layer) -> list[Tensor]:
            outs = [
                layer(hidden, *args, **kwargs) for hidden, (args, kwargs) in zip(states, calls[number], strict=True)
            ]
            return [out[0] if isinstance(out, tuple) else out for out in outs]

        yield names[id(layer)], layer, run_layer
        # Once more, after the caller's changes: later layers are calibrated on the outputs of the changed ones.
        states[:] = run_layer()


def linear_maps(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear maps of the layers, by name, without embedding and head.

    Raises:
        RecipeError: a layer has its experts in one parameter.
    """
    from transformers.pytorch_utils import Conv1D

    last = head(model)
    for name, p in model.named_parameters():
        if p.ndim > 2:
            raise RecipeError(
                f"model: {name} holds all experts of a layer in one parameter, from which single weights cannot be "
                "pruned; remove whole layers by the method depth"
            )
    return {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D) and m is not last}


def matrix(module: nn.Module) -> Tensor:
    """The weight of a linear map as [out, in], sharing its memory, also for GPT-2's transposed Conv1D."""
    from transformers.pytorch_utils import Conv1D

    weight: Tensor = module.weight.detach()  # type: ignore[union-attr,operator,assignment]
    return weight.t() if isinstance(module, Conv1D) else weight
