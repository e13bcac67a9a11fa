"""Micro-batches copied to the device ahead: one is on its way while the device computes with the one before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from preheat.core import Batch
from preheat.hardware.transfers import to_device
from preheat.ops.memory.host_transfer import Copy, HostCopy, link_for

__all__ = ["Transfer"]


@dataclass
class _Begun:
    """A micro-batch on its way: as it was read, as it will lie on the device, and the copies that must end first."""

    read: Batch
    moved: Batch
    copies: list[Copy]


class Transfer:
    """Moves micro-batches to a device. One at a time may be on its way ahead, beside the computation.

    Its memory is taken in the order of the computing stream, and the copy waits for what was queued there before: so it must be
    begun before the computation that it is to run beside.

    Args:
        device: where to.
        link: what copies.
    """

    def __init__(self, device: torch.device, link: HostCopy | None = None):
        self.device, self.link = device, link or link_for(device)
        self._begun: _Begun | None = None

    def begin(self, read: Batch, host: Batch) -> None:
        """Begins to copy a micro-batch.

        Args:
            read: by which it is known; host: what is copied.
        """
        self._drop()
        copies: list[Copy] = []

        def send(t: Tensor) -> Tensor:
            pinned = t if self.device.type == "cpu" or t.is_pinned() else t.pin_memory()
            copies.append(self.link.back(pinned, torch.empty_like(t, device=self.device)))
            return copies[-1].value

        self._begun = _Begun(read, _each(host, send), copies)

    def begun(self, read: Batch) -> Batch | None:
        """The micro-batch on the device, if this is the one that was begun; the computing stream waits for its copies."""
        found = self._begun
        self._drop()
        return found.moved if found is not None and found.read is read else None

    def __call__(self, host: Batch) -> Batch:
        """A micro-batch copied in the order of the computing stream."""
        return _each(host, lambda t: to_device(t, self.device))

    def _drop(self) -> None:
        # Also of what nobody wants any more: its memory is given back to the computing stream.
        if self._begun is not None:
            for copy in self._begun.copies:
                copy.for_device()
        self._begun = None


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    tokens, labels, positions, *beside = (
        change(t) for t in (batch.tokens, batch.labels, batch.positions, *batch.beside)
    )
    images = batch.images.each(change) if batch.images is not None else None
    return replace(batch, tokens=tokens, labels=labels, positions=positions, beside=tuple(beside), images=images)
