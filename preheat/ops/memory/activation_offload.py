"""Activations on the host between a layer's forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from preheat.ops.memory.host_transfer import Copy, HostCopy, link_for

__all__ = ["ActivationOffload", "Saved"]


class Saved:
    """A tensor that autograd asked to be kept: on the device, or on its way to the host and back.

    Attributes:
        uses: places of the graph that will ask for it; after the last one the device's copy is let go.
    """

    def __init__(self, layer: _Pass, value: Tensor, *, moved: bool):
        self.layer, self.uses = layer, 0
        self.here: Tensor | None = value
        self.host: Tensor | None = None
        self.leaving: Copy | None = None
        self.coming: Copy | None = None
        self._device = value.device
        if moved:
            self.leaving = layer.link.out(value)
            self.host, self.here = self.leaving.value, None

    def settle(self) -> None:
        """The device's memory may be used again by what comes after this in the computing stream."""
        if self.leaving is not None:
            self.leaving.for_device()
            self.leaving = None

    def fetch(self) -> None:
        """Begins to bring it back."""
        if self.here is None and self.coming is None:
            assert self.host is not None
            self.settle()
            self.coming = self.layer.link.back(self.host, torch.empty_like(self.host, device=self._device))

    def take(self) -> Tensor:
        """The tensor, for one of its uses."""
        if self.here is None:
            self.fetch()
            assert self.coming is not None
            self.here, self.coming = self.coming.for_device(), None
        value, self.uses = self.here, self.uses - 1
        if self.uses <= 0 and self.host is not None:
            self.here = None
        return value


class _Stays:
    """What a layer saves that is no activation: weights, buffers, what all layers are given, and autocast's copies.

    Autocast keeps its copies of trained weights on the device until the whole forward pass is done, so that a copy on
    the host would spare nothing there.
    """

    def __init__(self, layer: nn.Module, alike: Iterable[Tensor]):
        own = [*layer.parameters(), *layer.buffers()]
        self.storages = {t.untyped_storage()._cdata for t in (*own, *alike)}
        self.weights = {id(p) for p in own}
        self.frozen = {(t.shape, t.dtype) for t in own if not t.requires_grad}

    def __contains__(self, t: Tensor) -> bool:
        return t.untyped_storage()._cdata in self.storages or self._cast(t)

    def _cast(self, t: Tensor) -> bool:
        """Whether it is a weight in another dtype, or a view of that."""
        if not t.requires_grad:  # of a frozen one: nothing else that needs no gradient has its shape in another dtype
            base = t if t._base is None else t._base
            return any(shape == base.shape and dtype != base.dtype for shape, dtype in self.frozen)
        node, cast = t.grad_fn, False
        while node is not None and node.name().removesuffix("0") in _RESHAPES:
            cast = cast or node.name().startswith("ToCopy")
            node = node.next_functions[0][0]
        return cast and id(getattr(node, "variable", None)) in self.weights


_RESHAPES = {
    "ToCopyBackward",
    "TBackward",
    "TransposeBackward",
    "ViewBackward",
    "UnsafeViewBackward",
    "PermuteBackward",
}
"""Nodes of autograd that only cast a weight or lay it out otherwise."""


class _Pass:
    """One layer's forward pass: what it saved, and the layer that ran before it."""

    def __init__(self, link: HostCopy, before: _Pass | None, *, moves: bool, least: int, stays: _Stays):
        self.link, self.before, self.moves, self.least, self.kept = link, before, moves, least, stays
        self._saved: list[weakref.ref[Saved]] = []  # autograd owns them: what it dropped need not come back
        self._same: dict[Any, Saved] = {}  # saved by several operators, moved once
        self._begun = self._fetched = False

    def pack(self, t: Tensor) -> Saved:
        """Autograd's hook for a tensor that it saves."""
        storage = t.untyped_storage()._cdata
        key = (storage, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version)
        if key not in self._same:
            moved = self.moves and t.nbytes >= self.least and t not in self.kept
            self._same[key] = Saved(self, t, moved=moved)
            self._saved.append(weakref.ref(self._same[key]))
        saved = self._same[key]
        saved.uses += 1
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Autograd's hook for when it needs it. The first one of a layer begins to bring back those of the layer before."""
        if not self._begun:
            self._begun = True
            self.fetch()
            if self.before is not None:
                self.before.fetch()
        return saved.take()

    def fetch(self) -> None:
        """Begins to bring back all that is still wanted."""
        if not self._fetched:
            self._fetched = True
            for reference in reversed(self._saved):  # what was saved last is wanted first
                if (saved := reference()) is not None:
                    saved.fetch()

    def settle(self) -> None:
        """Gives back the device's memory of what was sent. The computing stream waits for the copies, the host does not."""
        for saved in self._same.values():
            saved.settle()
        self._same.clear()


class ActivationOffload:
    """Sends what layers save for the backward pass to the host and brings it back one layer ahead. Wraps layers' `forward`.

    Args:
        layers: in the order in which they run.
        stay: last layers whose tensors stay on the device, since the backward pass begins with them.
        least: bytes below which a tensor stays.
        link: makes the copies; by the layers' device, when a layer first runs, where not given.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, stay: int = 1, least: int = 1 << 16, link: HostCopy | None = None
    ):
        assert stay >= 1, "a layer's copies are settled when the next one has run"
        self.link, self.least, self.count = link, least, len(layers) - stay
        self._last: _Pass | None = None
        for index, layer in enumerate(layers):
            layer.forward = self._wrapped(layer, layer.forward, index)  # type: ignore[method-assign]

    def _wrapped(self, layer: nn.Module, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if self.link is None:
                self.link = link_for(next(layer.parameters()).device)
            # What is there anyway: weights, and what all layers are given alike (rotary tables).
            alike = (t for t in tree_leaves(kwargs) if isinstance(t, Tensor) and not t.requires_grad)
            stays = _Stays(layer, alike)
            before = self._last if index else None
            run = _Pass(self.link, before, moves=index < self.count, least=self.least, stays=stays)
            with saved_tensors_hooks(run.pack, run.unpack):
                out = forward(*args, **kwargs)
            # A whole layer was computed since the one before sent its last tensor: by now the copies have mostly arrived.
            if before is not None:
                before.settle()
            if not run.moves:
                run.settle()
            self._last = run
            return out

        return wrapped
