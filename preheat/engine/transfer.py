"""Prefetches micro-batches to the device: one is copied while the device computes with the previous one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from preheat.core import Batch
from preheat.hardware.transfers import to_device
from preheat.ops.memory.host_transfer import Copy, HostCopy, choose_link

__all__ = ["Transfer"]


@dataclass
class _Begun:
    """A prefetched micro-batch: the host batch, the device batch, and the copies that must finish first."""

    # The batch before its transforms: what the step will ask for.
    read: Batch
    moved: Batch
    copies: list[Copy]


class Transfer:
    """Moves micro-batches to a device, and prefetches one at a time during the computation.

    Memory is allocated in the order of the compute stream, and the copy waits for the work queued there before it: so a
    prefetch must begin before the computation that it overlaps.

    Args:
        device: the target device.
        link: performs the copies.
    """

    def __init__(self, device: torch.device, link: HostCopy | None = None):
        self.device, self.link = device, link or choose_link(device)
        self._begun: _Begun | None = None

    def begin(self, read: Batch, host: Batch) -> None:
        """Begins to copy a micro-batch.

        Args:
            read: identifies the micro-batch; host: the batch to copy.
        """
        # One prefetched micro-batch at a time: the plan counts memory for two, this one and the one that computes.
        self._drop()
        copies: list[Copy] = []

        def send(t: Tensor) -> Tensor:
            # Only copies from pinned memory are asynchronous.
            # The loader pins its batches; transforms may have replaced some of their tensors.
            pinned = t if self.device.type == "cpu" or t.is_pinned() else t.pin_memory()
            copies.append(self.link.back(pinned, torch.empty_like(t, device=self.device)))
            return copies[-1].value

        self._begun = _Begun(read, _map_tensors(host, send), copies)

    def begun(self, read: Batch) -> Batch | None:
        """The micro-batch on the device if it is the prefetched one; the compute stream waits for its copies."""
        # Compared by identity: a batch that was read again, after recovery for example, is not the prefetched one.
        # Also if it is another batch: `_drop` then frees the device memory before the right one is copied.
        prefetched = self._begun
        self._drop()
        return prefetched.moved if prefetched is not None and prefetched.read is read else None

    def __call__(self, host: Batch) -> Batch:
        """Copies a micro-batch in the order of the compute stream."""
        return _map_tensors(host, lambda t: to_device(t, self.device))

    def _drop(self) -> None:
        # Also if the prefetched batch is not wanted any more: its memory returns to the compute stream.
        if self._begun is not None:
            for copy in self._begun.copies:
                copy.for_device()
        self._begun = None


def _map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    # Tensors that every batch has, then those of techniques; `hidden` is made on the device and never moves.
    tokens, labels, positions, *extras = (
        change(t) for t in (batch.tokens, batch.labels, batch.positions, *batch.aligned)
    )
    images = batch.images.each(change) if batch.images is not None else None
    padding = change(batch.padding) if batch.padding is not None else None
    sources = change(batch.sources) if batch.sources is not None else None
    return replace(
        batch,
        tokens=tokens,
        labels=labels,
        positions=positions,
        aligned=tuple(extras),
        images=images,
        padding=padding,
        sources=sources,
        exchanged=_map_tensors(batch.exchanged, change) if batch.exchanged is not None else None,
    )
