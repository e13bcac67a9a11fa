"""Finds the token mixers of a model's layers, and keeps the state of recurrent ones within documents.

A token mixer is a module of a layer that moves information between positions: softmax attention, latent attention, a
gated delta net, Mamba, a short convolution. transformers has no common class for them, but all of them take a cache,
and softmax attention calls the function that the configuration names: both are in the signature and the code of
`forward`, so that no list of families is needed.

A recurrent mixer carries its state from token to token, also from one document of a packed row into the next. The
kernels that take document boundaries exist on GPUs only and disagree on the argument, so a mixer is given each document
of a row as a sequence of its own: the same computation, exact for every mixer that is causal.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from preheat.core import SplitAttention
from preheat.errors import RecipeError
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from types import FunctionType

    from torch import Tensor, nn
    from transformers import Cache, PretrainedConfig, PreTrainedModel

    from preheat.core import MaskSpec

__all__ = [
    "ATTENDS",
    "ATTENTION",
    "CACHE_ARGUMENTS",
    "find_attentions",
    "find_compilable_parts",
    "require_document_boundaries",
    "find_cache",
    "keep_within_documents",
    "kernel_packages",
    "missing_kernels",
    "pass_cache",
    "find_recurrent_mixers",
    "require_known_mixers",
    "count_recurrent_layers",
    "has_special_mixers",
    "split_documents",
]

T = TypeVar("T")
MixerOutput: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""Result of a token mixer: hidden states, or a tuple that begins with them."""

CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")
"""Names under which models of transformers and their token mixers take the cache of earlier tokens.

`cache` is the name since transformers 5.24, where the older ones are deprecated, and so the first to look up.
"""
ATTENTION = "preheat"
"""preheat's attention function in transformers' registry."""
ATTENDS = "preheat_attends"
"""Attribute of the classes of attention modules whose `forward` is preheat's own (`models.alibi`)."""
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""transformers' types of layers with a recurrent mixer, with or without attention beside it."""
_DOCUMENTS = "preheat_documents"
"""Attribute of a recurrent mixer while its layer runs: the document lengths of each row, None: a row is a document."""
_SPLIT = "preheat_split"
"""Attribute of a recurrent mixer while its layer runs: the attention of rows that are split across devices, or None."""
_HANDED: contextvars.ContextVar[bool] = contextvars.ContextVar("_HANDED", default=False)
"""True while a model's layers must be handed the documents of its rows."""
_CHANNELS = frozenset({"moe", "mlp"})
"""transformers' names of layers that have no token mixer (Nemotron-H)."""
_KNOWN = _CHANNELS | _RECURRENT | {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""transformers' names of layer kinds whose token mixers preheat keeps within documents."""


def _forward(module: nn.Module) -> FunctionType:
    return inspect.unwrap(type(module).forward)


def pass_cache(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """Returns a cache as the keyword argument that the model's forward and `generate` take."""
    name = _cache_parameter(type(model).forward)
    assert name is not None, f"{type(model).__name__} takes no cache"
    return {name: cache}


def find_cache(values: Mapping[str, Cache | None]) -> Cache | None:
    """Returns the cache in the keyword arguments or the output of a model or layer; None if there is none."""
    return next((values[name] for name in CACHE_ARGUMENTS if values.get(name) is not None), None)


def _takes_cache(module: nn.Module) -> bool:
    return _cache_parameter(type(module).forward) is not None


@functools.cache  # a model has many modules of few classes
def _cache_parameter(forward: FunctionType) -> str | None:
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def _is_attention(module: nn.Module) -> bool:
    """True if it calls the attention function that the configuration names, and thereby preheat's kernels."""
    return "ALL_ATTENTION_FUNCTIONS" in _forward(module).__code__.co_names or getattr(type(module), ATTENDS, False)


def _find_mixers(layer: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of a layer that take a cache."""
    for child in layer.children():
        if _takes_cache(child):
            yield child
        else:
            yield from _find_mixers(child)


def find_attentions(layer: nn.Module) -> list[nn.Module]:
    """Returns the softmax attention modules of a layer: one, none, or one of several mixers."""
    return [mixer for mixer in _find_mixers(layer) if _is_attention(mixer)]


def find_recurrent_mixers(layer: nn.Module) -> list[nn.Module]:
    """Returns the other token mixers of a layer: state space models, linear attention, convolutions."""
    return [mixer for mixer in _find_mixers(layer) if not _is_attention(mixer)]


def find_compilable_parts(layer: nn.Module) -> list[nn.Module]:
    """Returns what of a layer a compiler can trace: all of it, or its parts beside mixers that cut rows by documents.

    Recurrent mixers, attention in chunks and attention with sinks compute indices from the lengths of the documents,
    which differ in each batch.
    """
    from torch import nn

    from preheat.models.sinks import CHUNK

    cutting = [m for m in find_attentions(layer) if "sinks" in m._parameters or hasattr(m, CHUNK)]
    apart = {id(m) for m in (*find_recurrent_mixers(layer), *cutting)}

    def iterate_parts(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            # A list of modules is never called itself; a module without parameters is not worth a graph of its own.
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or any(id(m) in apart for m in child.modules()):
                yield from () if id(child) in apart else iterate_parts(child)
            elif any(True for _ in child.parameters()):
                yield child

    return list(iterate_parts(layer)) if apart else [layer]


def keep_within_documents(layers: Sequence[nn.Module]) -> int:
    """Makes recurrent mixers start anew at each document of a packed row, in place.

    Returns:
        The number of recurrent mixers.
    """
    count = 0
    for layer in layers:
        if mixers := find_recurrent_mixers(layer):
            # The layer is handed the mask and gives it to its mixers: not every layer hands on what it does not know.
            layer.forward = functools.partial(_call_with_documents, layer.forward, mixers)  # type: ignore[method-assign]
            for mixer in mixers:
                _hand(mixer, None, None)
                mixer.forward = functools.partial(_mix_by_document, mixer, mixer.forward)  # type: ignore[method-assign]
            count += len(mixers)
    return count


def require_known_mixers(model: PreTrainedModel, base: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises for a model whose tokens would see other documents of a packed sequence, or be placed as if they did.

    Raises:
        RecipeError: a kind of layer that is not known, no token mixer that is, or attention without a place for each
            document's own positions.
    """
    import torch

    family, name = model.config.model_type, type(base).__name__
    text = model.config.get_text_config()
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or []
    if odd := [kind for kind in kinds if kind not in _KNOWN]:
        raise RecipeError(
            f"model: {family} has layers of kind {quote_value(odd[0])}, which preheat does not know, so it cannot be "
            "trained or evaluated here"
        )
    attentions = [attention for layer in layers for attention in find_attentions(layer)]
    for number, layer in enumerate(layers):
        kind = kinds[number] if number < len(kinds) else ""
        mixers, recurrent = list(_find_mixers(layer)), find_recurrent_mixers(layer)
        # Zaya's attention convolves its queries and keys; Zamba's shared layers are mixers with attention inside.
        convolves = any(isinstance(m, torch.nn.Conv1d) for a in find_attentions(layer) for m in a.modules())
        nested = any(_takes_cache(m) and _is_attention(m) for mixer in recurrent for m in mixer.modules())
        # Only layers of a kind without mixers may have none, and a recurrent kind needs a recurrent mixer.
        missing = kind not in _CHANNELS if not mixers else kind in _RECURRENT and not recurrent
        if missing or convolves or nested:
            raise RecipeError(
                f"model: {family}: layer {number} of {name} has no token mixer that preheat can keep within the "
                "documents of a packed sequence, so it cannot be trained or evaluated here"
            )
    # Positions restart at each document of a row, so the model has to accept them.
    if attentions and "position_ids" not in inspect.signature(_forward(base)).parameters:
        raise RecipeError(
            f"model: {family}: {name} of transformers numbers positions by itself (no position_ids), across the "
            "documents of a packed sequence, so it cannot be trained or evaluated here"
        )


@contextlib.contextmanager
def require_document_boundaries() -> Iterator[None]:
    """Context manager in which a recurrent layer raises RecipeError if its model does not hand it the documents."""
    token = _HANDED.set(True)
    try:
        yield
    finally:
        _HANDED.reset(token)


def kernel_packages(layers: Sequence[nn.Module]) -> dict[str, str]:
    """Returns the packages whose fused kernels the recurrent mixers use on a GPU, and the modules that they install."""
    packages = {}
    for mixer in (mixer for layer in layers for mixer in find_recurrent_mixers(layer)):
        packages["causal-conv1d"] = "causal_conv1d"
        if "D" in mixer._parameters:  # Mamba's skip connection
            packages["mamba-ssm"] = "mamba_ssm"
        elif "A_log" in mixer._parameters:  # the decay of a gated delta rule
            packages["flash-linear-attention"] = "fla"
    return dict(sorted(packages.items()))


def missing_kernels(layers: Sequence[nn.Module]) -> list[str]:
    """Returns those of `kernel_packages` that are not installed.

    Without them, and without the package `kernels`, which gets them from the hub, transformers runs its PyTorch code.
    """
    if importlib.util.find_spec("kernels") is not None:
        return []
    packages = kernel_packages(layers)
    return [package for package, module in packages.items() if importlib.util.find_spec(module) is None]


def count_recurrent_layers(text: PretrainedConfig) -> int:
    """Returns the number of a configuration's layers that have a recurrent mixer."""
    return sum(kind in _RECURRENT for kind in getattr(text, "layer_types", None) or ())


def has_special_mixers(text: PretrainedConfig, sinks: bool) -> bool:
    """True if layers have more than plain attention: recurrent mixers, sinks or chunks."""
    kinds = {*(getattr(text, "layer_types", None) or ())}
    return sinks or bool(kinds & (_RECURRENT | {"chunked_attention"}))


def _call_with_documents(
    forward: Callable[..., T],
    mixers: Sequence[nn.Module],
    *args: Any,
    preheat_mask: MaskSpec | None = None,
    **kwargs: Any,
) -> T:
    if preheat_mask is None:  # transformers' own forward, with or without a cache: each row is one document
        if _HANDED.get():
            raise RecipeError(
                f"model: {type(mixers[0]).__name__} of transformers is not told where documents begin, because its "
                "model hands its layers nothing on, so it cannot be trained or evaluated here"
            )
        return forward(*args, **kwargs)
    attention = kwargs.get("preheat_attention")
    for mixer in mixers:
        _hand(mixer, preheat_mask.documents, attention if isinstance(attention, SplitAttention) else None)
    try:
        return forward(*args, preheat_mask=preheat_mask, **kwargs)
    finally:
        for mixer in mixers:
            _hand(mixer, None, None)


def _hand(mixer: nn.Module, documents: Sequence[Sequence[int]] | None, split: SplitAttention | None) -> None:
    setattr(mixer, _DOCUMENTS, documents)
    setattr(mixer, _SPLIT, split)


def _mix_by_document(mixer: nn.Module, forward: Callable[..., MixerOutput], *args: Any, **kwargs: Any) -> MixerOutput:
    documents, split = getattr(mixer, _DOCUMENTS, None), getattr(mixer, _SPLIT, None)
    # Mixers hand unknown arguments on to their kernels; preheat's own are for attention.
    kwargs = {key: value for key, value in kwargs.items() if not key.startswith("preheat_")}
    # One document per row: the row itself is the sequence.
    single = documents is None or all(len(row) == 1 for row in documents)
    if single and split is None:
        return forward(*args, **kwargs)
    hidden = args[0] if args else kwargs.pop("hidden_states")
    if kwargs.get("attention_mask") is not None:
        raise RecipeError(f"model: {type(mixer).__name__} takes a mask of its own in addition to packed documents")

    def mix(rows: Tensor) -> MixerOutput:
        import torch

        more = {}
        if kwargs.get("position_ids") is not None:  # Recurrent Gemma starts anew at position 0
            more["position_ids"] = torch.arange(rows.shape[1], device=rows.device)[None]
        return forward(rows, *args[1:], **kwargs | more)

    def mix_documents(rows: Tensor, mix: Callable[[Tensor], MixerOutput]) -> MixerOutput:
        return mix(rows) if single or documents is None else split_documents(rows, documents, mix)

    return mix_documents(hidden, mix) if split is None else _mix_split_rows(mixer, split, hidden, mix, mix_documents)


def _mix_split_rows(
    mixer: nn.Module,
    attention: SplitAttention,
    hidden: Tensor,
    mix: Callable[[Tensor], MixerOutput],
    mix_documents: Callable[[Tensor, Callable[[Tensor], MixerOutput]], MixerOutput],
) -> MixerOutput:
    """Computes a mixer for rows that are split across devices: some heads on each, or all of it on each.

    Args:
        hidden: [rows, positions, width], this device's positions.
        mix: computes the mixer for sequences.
        mix_documents: (rows, mix) -> out: applies a function of sequences to the documents of whole rows.
    """
    from preheat.models.split_mixers import find_head_split, mix_heads

    if find_head_split(mixer, attention.degree, attention.rank) is not None:
        return mix_heads(mixer, hidden, attention, mix_documents)
    mixed = mix_documents(attention.gather_positions(hidden), mix)
    first, rest = (mixed[0], mixed[1:]) if isinstance(mixed, tuple) else (mixed, None)
    # Each device keeps its own positions; the weights' gradients of all devices are summed like those of other layers.
    own = first.unflatten(1, (attention.degree, -1))[:, attention.rank]
    return own if rest is None else (own, *rest)


def split_documents(
    hidden: Tensor, documents: Sequence[Sequence[int]], mix: Callable[[Tensor], MixerOutput]
) -> MixerOutput:
    """Applies a causal function of sequences to each document of packed rows.

    Documents of similar length are computed together, padded at their ends, which a causal function does not see: at
    most twice the tokens, in a few calls.

    Args:
        hidden: [rows, length, width].
        documents: the lengths of each row's documents; they sum to `length`.
        mix: [documents, longest, width] -> the same shape, or a tuple that begins with it.

    Returns:
        What `mix` returns, for [rows, length, width].
    """
    import torch

    from preheat.hardware.transfers import to_device

    # Rows and positions in one dimension, so that a document is a range [start, start + n).
    rows, length = hidden.shape[:2]
    flat = hidden.flatten(0, 1)
    by_size: dict[int, list[tuple[int, int]]] = {}
    for row, lengths in enumerate(documents):
        start = row * length
        for n in lengths:
            # Lengths from 2 ** (k - 1) + 1 to 2 ** k share a call: padding at most doubles the tokens.
            by_size.setdefault((n - 1).bit_length(), []).append((start, n))
            start += n
    parts: list[Tensor] = []
    order: list[Tensor] = []
    rest: tuple[Tensor, ...] | None = None
    for group in by_size.values():
        # The indices are made on the host, from lengths that are there: nothing waits for the device.
        starts, sizes = torch.tensor(group).unbind(1)
        steps = torch.arange(int(sizes.max()))
        # Padding repeats a document's last token, and its results are dropped.
        index = starts[:, None] + torch.minimum(steps, sizes[:, None] - 1)  # [documents, longest]
        valid = steps < sizes[:, None]
        mixed = mix(flat[to_device(index, hidden.device)])
        if isinstance(mixed, tuple):
            first, rest = mixed[0], mixed[1:]
        else:
            first = mixed
        parts.append(first.flatten(0, 1)[to_device(valid.flatten().nonzero()[:, 0], hidden.device)])
        order.append(index[valid])
    # `order` lists flat positions in the order of the results; its argsort restores the order of the rows.
    place = torch.cat(order).argsort()
    result = torch.cat(parts)[to_device(place, hidden.device)].unflatten(0, (rows, length))
    return result if rest is None else (result, *rest)
