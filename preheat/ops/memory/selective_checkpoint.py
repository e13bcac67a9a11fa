"""Selective activation checkpointing: chooses which results of a layer to save within a memory budget."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch.utils.checkpoint import SelectiveCheckpointContext


__all__ = [
    "Call",
    "CheckpointPolicyCache",
    "LayerTrace",
    "solve_knapsack",
    "build_contexts",
    "keep_matmuls",
    "can_keep_results",
    "trace_layer",
    "pause_observation",
]

Key = tuple[OpOverload | str, int]
"""An operator and the index of its call in the layer's forward pass. (`ATTENTION`, -1) is all of attention, whose
number of calls varies with the documents.
"""

Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]
"""Contexts of a layer's forward pass and of its recomputation, as `torch.utils.checkpoint` takes them."""

ATTENTION = "attention"
_OURS = {"preheat::attention", "preheat::causal_attention", "preheat::varlen_attention"}

_FLOPS_A_BYTE = 50
"""Cost of moving a byte, in FLOPs: roughly the ratio of matmul rate to memory bandwidth, about 10 on a CPU and 200 on a
GPU.
"""


@dataclass(frozen=True)
class Call:
    """An operator call whose result can be saved: its bytes, and the cost of recomputing it in FLOPs."""

    key: Key
    bytes: int
    cost: int


@dataclass(frozen=True)
class LayerTrace:
    """A layer's forward pass: its calls in order, and the bytes that autograd saves without recomputation.

    Calls after the last saved tensor are left out: recomputation ends there, so saving their results would be useless
    (in most layers the last matmul, the most expensive for its size).
    """

    calls: tuple[Call, ...]
    saved: int


def _count_cost(func: OpOverload, args: tuple[Any, ...], out: object, tensors: list[Tensor]) -> int:
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func._overloadpacket)
    torchs = "_scaled_dot_product" in func._schema.name  # torch's formula rejects grouped-query attention
    flops = int(formula(*args, out_val=out)) if formula is not None and not torchs else 0
    if torchs or (formula is None and _is_attention(func)):  # two matmuls over all pairs
        # [..., queries, head_dim]; 2 n keys width FLOPs for the scores, as many for the weighted sum of values.
        (*rows, n, width), keys = args[0].shape, args[1].shape[-2]
        flops = int(4 * torch.Size(rows).numel() * n * keys * width)
    # Every operator also pays for the bytes that it moves: for elementwise ones that is all of their time.
    return flops + _FLOPS_A_BYTE * sum(t.numel() * t.element_size() for t in tensors)


def _is_attention(func: OpOverload) -> bool:
    """True for torch's attention operators, our variable-length one, and the opaque one of compiled layers."""
    return "_scaled_dot_product" in func._schema.name or func._schema.name in _OURS


class _Watch(TorchDispatchMode):
    """Records operator calls whose results are new tensors that are not modified in place later."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Key, tuple[set[int], Call]] = {}
        self.made: set[int] = set()
        self.counts: Counter[OpOverload] = Counter()
        self.needed: set[Key] = set()  # calls before the last tensor that autograd saved
        self.held: list[Tensor | torch.UntypedStorage] = []  # keeps storages alive, so that their addresses stay unique

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        # Views own no memory, and torch's checkpoint never asks about the others.
        if func in SAC_IGNORED_OPS or func.is_view:
            return out
        # `choose_policy` below counts the calls in the same way: the two must agree on the index of each.
        key: Key = (func, self.counts[func])
        self.counts[func] += 1
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        # Storages, not tensors: an operator may return one of its inputs, which is no new result.
        before = {_next_number(t) for t in inputs}
        # From the schema: arguments that it declares as written, and all results of an in-place operator.
        written = {
            _next_number(t)
            for a, arg in zip(args, func._schema.arguments, strict=False)
            if arg.alias_info and arg.alias_info.is_write
            for t in tree_leaves(a)
            if isinstance(t, Tensor)
        } | {_next_number(t) for t in outputs if func._schema.is_mutable}
        # A result that is modified in place later would be saved in its modified state: recompute it instead.
        self.found = {k: v for k, v in self.found.items() if not v[0] & written}
        new = {_next_number(t): t.untyped_storage() for t in outputs if _next_number(t) not in before}
        self.made |= new.keys()
        self.held += new.values()
        # Each rank chooses by itself, but a collective must be recomputed by all or none: so by all.
        local = func.namespace != "_c10d_functional"
        # `empty`: memory without a value is no result yet.
        if new and not written and local and len(new) == len(outputs) and "empty" not in func._schema.name:
            size, cost = (
                sum(storage.nbytes() for storage in new.values()),
                _count_cost(func, args, out, inputs + outputs),
            )
            numbers = set(new)
            # All calls of attention become one choice: their number depends on the documents of the rows.
            if _is_attention(func):
                key = (ATTENTION, -1)
                others, call = self.found.get(key, (set(), Call(key, 0, 0)))
                numbers, size, cost = numbers | others, size + call.bytes, cost + call.cost
            self.found[key] = (numbers, Call(key, size, cost))
        return out


def _next_number(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def trace_layer(forward: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> LayerTrace:
    """Traces a layer's forward pass on fake tensors, outside active modes: what it computes and saves.

    Allocates and computes nothing. Autocast stays on, but its weight cache is disabled: it would keep fake tensors.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    # In a dry run the inputs are fake already, and tensors of two fake modes cannot meet.
    mode = detect_fake_mode(list(tree_leaves((args, kwargs)))) or FakeTensorMode(allow_non_fake_inputs=True)

    def make_fake(t: Tensor) -> Tensor:
        # No values, but the same layout: whether an operator copies depends on the strides.
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)

    saved: dict[int, int] = {}
    watched = _Watch()

    def pack(t: Tensor) -> Tensor:
        # Everything recorded so far precedes this saved tensor, so recomputation passes through it.
        watched.needed.update(watched.found)
        saved[_next_number(t)] = t.untyped_storage().nbytes()
        # Keeps the storage's address from being reused during the trace.
        watched.held.append(t)
        return t

    # Outside of active modes: a recorder must not count the trace as part of the step.
    with _disable_current_modes(), mode, _disable_autocast_cache():
        args, kwargs = tree_map_only(Tensor, make_fake, (args, kwargs))
        # The layer's inputs are saved in any case and cost nothing more.
        given = {_next_number(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t), watched:
            forward(*args, **kwargs)
    # Storages that the layer itself computed: weights and inputs are in memory anyway.
    saved_bytes = sum(size for number, size in saved.items() if number in watched.made - given)
    return LayerTrace(tuple(call for key, (_, call) in watched.found.items() if key in watched.needed), saved_bytes)


@contextlib.contextmanager
def _disable_autocast_cache() -> Iterator[None]:
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


_GRAINS = 1000  # resolution of the knapsack: a layer's saved bytes are divided into this many units


def solve_knapsack(trace: LayerTrace, budget: float) -> frozenset[Key]:
    """Chooses the results to save that avoid most recomputation within a memory budget (exact knapsack).

    Args:
        budget: fraction of the layer's saved bytes, from 0 (only the input) to 1 (no recomputation).

    Example:
        >>> dear, cheap = Call(("mm", 0), 60, 100), Call(("mul", 0), 60, 1)
        >>> solve_knapsack(LayerTrace((cheap, dear), 120), 0.5)
        frozenset({('mm', 0)})
    """
    # At most 1,000 units: the table has calls x units entries, whatever the layer's size.
    grain = max(1, trace.saved // _GRAINS)
    room = int(budget * trace.saved) // grain
    # Dynamic programming: best[m] = max(best[m], best[m - size] + cost) for each call.
    best = [0] * (room + 1)  # the highest cost saved with each number of units
    choices = []
    for call in trace.calls:
        # Rounded up, so that the chosen results never exceed the budget.
        size = -(-call.bytes // grain)
        better = bytearray(room + 1)
        # Downwards, so that each call is chosen at most once.
        for have in range(room, size - 1, -1):
            if best[have - size] + call.cost > best[have]:
                best[have], better[have] = best[have - size] + call.cost, 1
        choices.append((call, size, better))
    keys = set()
    # The table holds costs only; the choice is recovered from the last call back to the first.
    for call, size, better in reversed(choices):
        if better[room]:
            keys.add(call.key)
            room -= size
    return frozenset(keys)


def build_contexts(keys: frozenset[Key]) -> Contexts:
    """Returns the contexts of torch's checkpoint for forward and recomputation; results in `keys` are saved."""
    # One count for the forward pass, one for the recomputation, which runs the same calls again.
    counts: dict[bool, Counter[OpOverload]] = {False: Counter(), True: Counter()}

    def choose_policy(
        context: SelectiveCheckpointContext, func: OpOverload, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        count = counts[context.is_recompute]
        key = (ATTENTION, -1) if _is_attention(func) else (func, count[func])
        count[func] += 1
        # PREFER, not MUST: torch.compile's partitioner may still save a result if that is cheaper.
        return CheckpointPolicy.MUST_SAVE if key in keys else CheckpointPolicy.PREFER_RECOMPUTE

    pair: Contexts = create_selective_checkpoint_contexts(choose_policy)
    return pair


_OBSERVERS = (_Watch, _CachingTorchDispatchMode, _CachedTorchDispatchMode)


def can_keep_results() -> bool:
    """True if results of operators may be saved for recomputation, so that they must not be modified in place."""
    return any(isinstance(mode, _OBSERVERS) for mode in _modes())


@contextlib.contextmanager
def pause_observation() -> Iterator[None]:
    """Context manager for operators within a layer that are no part of its computation, such as gathers of weights.

    Forward pass and recomputation may run different ones: counted, they would shift the results that are kept.
    """
    with contextlib.ExitStack() as stack:
        # The innermost modes, since a layer enters them last.
        while (modes := _modes()) and isinstance(modes[-1], _OBSERVERS):
            stack.enter_context(_pop_mode_temporarily())
        yield


def keep_matmuls(trace: LayerTrace, every: int) -> frozenset[Key]:
    """Returns attention and every `every`-th matmul in execution order: expensive to recompute for their size.

    Example:
        >>> product = torch.ops.aten.mm.default
        >>> keys = keep_matmuls(LayerTrace(tuple(Call((product, i), 8, 100) for i in range(3)), 24), 2)
        >>> sorted(i for _, i in keys)
        [-1, 1]
    """
    products = [call.key for call in trace.calls if call.key[0] in _find_products()]
    return frozenset({*products[every - 1 :: every], (ATTENTION, -1)})


def _find_products() -> frozenset[OpOverload]:
    aten = torch.ops.aten
    return frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})


class CheckpointPolicyCache:
    """Caches the chosen policy by layer kind and input shapes. `choose`: layer trace -> keys of the results to save."""

    def __init__(self, choose: Callable[[LayerTrace], frozenset[Key]]):
        self.choose = choose
        self._chosen: dict[Hashable, Callable[[], Contexts]] = {}

    def __call__(
        self, kind: Hashable, forward: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Callable[[], Contexts]:
        """Returns the cached function that makes `build_contexts` for `forward(*args, **kwargs)`.

        Args:
            kind: distinguishes layers that compute differently.
        """
        # Values do not matter: the trace sees shapes and dtypes only.
        shapes = tuple((t.shape, t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        key = (kind, shapes, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        if key not in self._chosen:
            keys = self.choose(trace_layer(forward, args, kwargs))
            # Fresh contexts for each call: they hold the counts and the saved results of one pass.
            self._chosen[key] = lambda: build_contexts(keys)
        return self._chosen[key]
