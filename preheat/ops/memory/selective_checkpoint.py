"""Which results of a layer to keep for the backward pass, within a budget of memory, and which to compute again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

__all__ = [
    "Call",
    "CheckpointPolicyCache",
    "LayerTrace",
    "knapsack",
    "contexts",
    "keep_matmuls",
    "keeps_results",
    "trace_layer",
]

Key = tuple[Any, int]
"""An operator, and which of its calls in the layer's forward pass; (`ATTENTION`, -1): all of attention, whose calls vary with the documents."""

ATTENTION = "attention"
_OURS = {"preheat::attention", "preheat::varlen_attention"}

_FLOPS_A_BYTE = 50
"""What moving a byte costs in FLOPs: about the ratio of a device's matrix rate to its memory's bandwidth, some 10 on a CPU and some 200 on a GPU."""


@dataclass(frozen=True)
class Call:
    """One operator call whose result can be kept: the bytes that it takes, and what computing it again costs, in FLOPs."""

    key: Key
    bytes: int
    cost: int


@dataclass(frozen=True)
class LayerTrace:
    """A layer's forward pass: its calls in order, and the bytes that autograd keeps of it when nothing is computed again.

    Calls after the last tensor that autograd keeps are not among them: computing again ends there, and what was kept of them would be for nothing (the last
    product of most layers, which is the dearest for its size).
    """

    calls: tuple[Call, ...]
    saved: int


def _cost(func: Any, args: Any, out: Any, tensors: list[Tensor]) -> int:
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func._overloadpacket)
    torchs = "_scaled_dot_product" in func._schema.name  # whose formula refuses keys that heads share
    flops = int(formula(*args, out_val=out)) if formula is not None and not torchs else 0
    if torchs or (formula is None and _is_attention(func)):  # two products of all with all
        (*rows, n, width), keys = args[0].shape, args[1].shape[-2]
        flops = int(4 * torch.Size(rows).numel() * n * keys * width)
    return flops + _FLOPS_A_BYTE * sum(t.numel() * t.element_size() for t in tensors)


def _is_attention(func: Any) -> bool:
    """Torch's operators, the one for packed documents, and the one that compiled layers have for any kernel of ours."""
    return "_scaled_dot_product" in func._schema.name or func._schema.name in _OURS


class _Watch(TorchDispatchMode):
    """Writes down operator calls whose results are tensors of their own and are not written to afterwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Key, tuple[set[int], Call]] = {}
        self.made: set[int] = set()
        self.counts: Counter[Any] = Counter()
        self.needed: set[Key] = set()  # called before the last tensor that autograd kept
        self.held: list[Any] = []  # storages stay alive, so that their numbers are their own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in SAC_IGNORED_OPS or func.is_view:
            return out
        key = (func, self.counts[func])
        self.counts[func] += 1
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        before = {_number(t) for t in inputs}
        written = {
            _number(t)
            for a, arg in zip(args, func._schema.arguments, strict=False)
            if arg.alias_info and arg.alias_info.is_write
            for t in tree_leaves(a)
            if isinstance(t, Tensor)
        } | {_number(t) for t in outputs if func._schema.is_mutable}
        self.found = {k: v for k, v in self.found.items() if not v[0] & written}
        new = {_number(t): t.untyped_storage() for t in outputs if _number(t) not in before}
        self.made |= new.keys()
        self.held += new.values()
        # What devices send each other is sent again by all or by none, and each chooses by itself: so by all.
        local = func.namespace != "_c10d_functional"
        if new and not written and local and len(new) == len(outputs) and "empty" not in func._schema.name:
            size, cost = sum(storage.nbytes() for storage in new.values()), _cost(func, args, out, inputs + outputs)
            numbers = set(new)
            if _is_attention(func):
                key = (ATTENTION, -1)
                others, call = self.found.get(key, (set(), Call(key, 0, 0)))
                numbers, size, cost = numbers | others, size + call.bytes, cost + call.cost
            self.found[key] = (numbers, Call(key, size, cost))
        return out


def _number(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def trace_layer(forward: Callable[..., Any], args: Any, kwargs: Any) -> LayerTrace:
    """Runs a layer's forward pass on fake tensors, apart from whatever modes are on, and says what it computed and saved.

    Nothing is allocated or computed; autocast stays as it is, but its cache of cast weights, which would keep fake ones.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = detect_fake_mode(list(tree_leaves((args, kwargs)))) or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)

    saved: dict[int, int] = {}
    watched = _Watch()

    def pack(t: Tensor) -> Tensor:
        watched.needed.update(watched.found)
        saved[_number(t)] = t.untyped_storage().nbytes()
        watched.held.append(t)
        return t

    with _disable_current_modes(), mode, _uncached_autocast():
        args, kwargs = tree_map(fake, (args, kwargs))
        given = {_number(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t), watched:
            forward(*args, **kwargs)
    saved_bytes = sum(size for number, size in saved.items() if number in watched.made - given)
    return LayerTrace(tuple(call for key, (_, call) in watched.found.items() if key in watched.needed), saved_bytes)


@contextlib.contextmanager
def _uncached_autocast() -> Iterator[None]:
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


_GRAINS = 1000  # what a layer saves is cut into so many pieces, of which results take whole ones


def knapsack(trace: LayerTrace, budget: float) -> frozenset[Key]:
    """Results to keep: those that spare most in `budget` of the bytes that the layer would save (a knapsack, solved exactly).

    Args:
        budget: share between 0 (nothing but the layer's input) and 1 (as much as without recomputing).

    Example:
        >>> dear, cheap = Call(("mm", 0), 60, 100), Call(("mul", 0), 60, 1)
        >>> choose(Seen((cheap, dear), 120), 0.5)
        frozenset({('mm', 0)})
    """
    grain = max(1, trace.saved // _GRAINS)
    room = int(budget * trace.saved) // grain
    best = [0] * (room + 1)  # the most that can be spared in so many grains
    choices = []
    for call in trace.calls:
        size = -(-call.bytes // grain)
        better = bytearray(room + 1)
        for have in range(room, size - 1, -1):
            if best[have - size] + call.cost > best[have]:
                best[have], better[have] = best[have - size] + call.cost, 1
        choices.append((call, size, better))
    keys = set()
    for call, size, better in reversed(choices):
        if better[room]:
            keys.add(call.key)
            room -= size
    return frozenset(keys)


def contexts(keys: frozenset[Key]) -> tuple[Any, Any]:
    """The contexts that torch's checkpoint enters in the forward pass and when it computes again: `kept` results are not computed again."""
    counts: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count = counts[context.is_recompute]
        key = (ATTENTION, -1) if _is_attention(func) else (func, count[func])
        count[func] += 1
        return CheckpointPolicy.MUST_SAVE if key in keys else CheckpointPolicy.PREFER_RECOMPUTE

    pair: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return pair


def keeps_results() -> bool:
    """Whether results of operators that run now may be kept for a second forward pass: what is written to afterwards could not be."""
    return any(isinstance(mode, (_Watch, _CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in _modes())


def keep_matmuls(trace: LayerTrace, every: int) -> frozenset[Key]:
    """The results of attention and of every so many matrix products, in the order in which they run: dear to compute for what they weigh.

    Example:
        >>> product = torch.ops.aten.mm.default
        >>> kept = dear(Seen(tuple(Call((product, i), 8, 100) for i in range(3)), 24), 2)
        >>> sorted(i for _, i in kept)
        [-1, 1]
    """
    products = [call.key for call in trace.calls if call.key[0] in _products()]
    return frozenset({*products[every - 1 :: every], (ATTENTION, -1)})


def _products() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})


class CheckpointPolicyCache:
    """Chooses once for each kind of layer and shape of input, and remembers. `knapsack`: of what was seen of a layer, the keys to keep."""

    def __init__(self, choose: Callable[[LayerTrace], frozenset[Key]]):
        self.choose = choose
        self._chosen: dict[Any, Callable[[], tuple[Any, Any]]] = {}

    def __call__(self, kind: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], tuple[Any, Any]]:
        """`contexts` of what to keep of `forward(*args, **kwargs)`, the same function each time. `kind`: what tells layers apart that compute otherwise."""
        shapes = tuple((t.shape, t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        key = (kind, shapes, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        if key not in self._chosen:
            keys = self.choose(trace_layer(forward, args, kwargs))
            self._chosen[key] = lambda: contexts(keys)
        return self._chosen[key]
