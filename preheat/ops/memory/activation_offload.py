"""Activation offload: saved activations move to host memory and return before the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from preheat.ops.memory.host_transfer import Copy, HostCopy, choose_link

__all__ = ["ActivationOffload", "Saved"]

P = ParamSpec("P")
T = TypeVar("T")


class Saved:
    """A tensor saved for backward: on the device, on the host, or being copied.

    Attributes:
        uses: remaining uses in the graph; after the last one the device copy is freed.
    """

    def __init__(self, layer: _Pass, value: Tensor, *, moved: bool):
        # Uses are counted by `pack`: several operators of a layer may save the same tensor.
        self.layer, self.uses = layer, 0
        self.here: Tensor | None = value
        self.host: Tensor | None = None
        self.leaving: Copy | None = None
        self.coming: Copy | None = None
        self._device = value.device
        if moved:
            self.leaving = layer.link.out(value)
            # The copy in progress keeps the source alive, so the device memory is not reused before it is done.
            self.host, self.here = self.leaving.value, None

    def settle(self) -> None:
        """Releases the device memory for later work on the compute stream, once the copy out is done."""
        if self.leaving is not None:
            self.leaving.for_device()
            self.leaving = None

    def fetch(self) -> None:
        """Starts the copy back to the device."""
        if self.here is None and self.coming is None:
            assert self.host is not None
            # The copy out must be complete before the copy back reads the host's memory.
            self.settle()
            self.coming = self.layer.link.back(self.host, torch.empty_like(self.host, device=self._device))

    def take(self) -> Tensor:
        """Returns the tensor for one of its uses."""
        if self.here is None:
            self.fetch()
            assert self.coming is not None
            self.here, self.coming = self.coming.for_device(), None
        # Several operators may have saved this tensor; the device copy is freed after the last of them.
        # The local reference outlives `here`: autograd holds the tensor until the operator's backward has run.
        value, self.uses = self.here, self.uses - 1
        if self.uses <= 0 and self.host is not None:
            self.here = None
        return value


class _OnDevice:
    """Saved tensors that are not activations: weights, buffers, inputs common to all layers, and autocast's copies.

    Autocast caches its casts of trained weights on the device until the end of the forward pass, so offloading them
    would save nothing.
    """

    def __init__(self, layer: nn.Module, alike: Iterable[Tensor]):
        own = [*layer.parameters(), *layer.buffers()]
        # By storage, because autograd saves views (transposed weights) too.
        self.storages = {t.untyped_storage()._cdata for t in (*own, *alike)}
        self.weights = {id(p) for p in own}
        self.frozen = {(t.shape, t.dtype) for t in own if not t.requires_grad}

    def __contains__(self, t: Tensor) -> bool:
        # The cheap test first: most saved weights are the layer's own tensors or views of them.
        return t.untyped_storage()._cdata in self.storages or self._cast(t)

    def _cast(self, t: Tensor) -> bool:
        """True for a weight in another dtype, or a view of one."""
        if not t.requires_grad:  # a tensor without gradients with a frozen weight's shape and another dtype is its cast
            # A transposed cast has another shape than its weight, but its base has the same.
            base = t if t._base is None else t._base
            return any(shape == base.shape and dtype != base.dtype for shape, dtype in self.frozen)
        node, cast = t.grad_fn, False
        # Back through casts and reshapes to the parameter's gradient accumulator, whose `variable` is the parameter.
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
"""Autograd nodes that only cast or reshape a weight."""


class _Pass:
    """One layer's forward pass: its saved tensors, and the pass of the previous layer."""

    def __init__(self, link: HostCopy, before: _Pass | None, *, moves: bool, least: int, stays: _OnDevice):
        self.link, self.before, self.moves, self.least, self.kept = link, before, moves, least, stays
        self._saved: list[weakref.ref[Saved]] = []  # autograd owns them: tensors that it freed are not fetched
        self._same: dict[tuple[object, ...], Saved] = {}  # tensors saved by several operators move once
        self._begun = self._fetched = False

    def pack(self, t: Tensor) -> Saved:
        """Pack hook: called when autograd saves a tensor."""
        storage = t.untyped_storage()._cdata
        # With `_version`: a tensor that was modified in place since is another value in the same storage.
        # Equal keys are the same values, so one copy serves all operators that saved them.
        key = (storage, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version)
        if key not in self._same:
            moved = self.moves and t.nbytes >= self.least and t not in self.kept
            self._same[key] = Saved(self, t, moved=moved)
            self._saved.append(weakref.ref(self._same[key]))
        saved = self._same[key]
        saved.uses += 1
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Unpack hook: the first call of a layer also prefetches the tensors of the previous layer."""
        # The backward pass has reached this layer: while it computes, the layer before it arrives.
        if not self._begun:
            self._begun = True
            self.fetch()
            if self.before is not None:
                self.before.fetch()
        return saved.take()

    def fetch(self) -> None:
        """Starts copying back all tensors that are still needed."""
        # A layer is fetched by the layer after it, and by itself if there was none.
        if not self._fetched:
            self._fetched = True
            for reference in reversed(self._saved):  # backward needs the last saved tensors first
                if (saved := reference()) is not None:
                    saved.fetch()

    def settle(self) -> None:
        """Frees the device memory of offloaded tensors. The compute stream waits for the copies, the host does not."""
        for saved in self._same.values():
            saved.settle()
        # Ends the strong references: autograd's are the only ones then.
        self._same.clear()


class ActivationOffload:
    """Offloads activations to the host and prefetches them one layer ahead in backward. Wraps the layers' `forward`.

    Args:
        layers: layers in execution order.
        stay: number of last layers that are not offloaded, since backward starts with them.
        least: minimum bytes of a tensor to offload.
        link: makes the copies; if None, chosen by the layers' device when a layer first runs.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, stay: int = 1, least: int = 1 << 16, link: HostCopy | None = None
    ):
        assert stay >= 1, "a layer's copies are settled when the next one has run"
        self.link, self.least, self.count = link, least, len(layers) - stay
        self._last: _Pass | None = None
        for index, layer in enumerate(layers):
            # `forward` rather than hooks of the module, because the saved-tensor hooks must surround it.
            layer.forward = self._wrapped(layer, layer.forward, index)  # type: ignore[method-assign]

    def _wrapped(self, layer: nn.Module, forward: Callable[P, T], index: int) -> Callable[P, T]:
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            # Nothing is saved for a backward pass in evaluation, so there is nothing to offload.
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if self.link is None:
                self.link = choose_link(next(layer.parameters()).device)
            # Weights, and tensors that all layers receive (rotary tables), stay on the device anyway.
            alike = (t for t in tree_leaves(kwargs) if isinstance(t, Tensor) and not t.requires_grad)
            stays = _OnDevice(layer, alike)
            # The first layer has none before it: `_last` is then a layer of the previous forward pass.
            before = self._last if index else None
            run = _Pass(self.link, before, moves=index < self.count, least=self.least, stays=stays)
            # Backward calls `unpack` of this pass, also if another micro-batch has run the layer since.
            with saved_tensors_hooks(run.pack, run.unpack):
                out = forward(*args, **kwargs)
            # By now a full layer has run since the previous one sent its last tensor, so its copies are mostly done.
            if before is not None:
                before.settle()
            # The last layers move nothing, so there is no copy to wait for.
            if not run.moves:
                run.settle()
            self._last = run
            return out

        return wrapped
