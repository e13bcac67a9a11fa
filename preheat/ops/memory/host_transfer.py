"""Copies between the device and the host's memory, as operators of their own, so that a dry run sees what moves.

Under fake tensors everything lies on one fake device, and a plain copy to the host would look like another tensor there. What
`preheat::to_host` and `preheat::host_zeros` return is known to lie on the host, and so is what is computed of such tensors alone; of
what others move there (FSDP2 its weights and gradients) `preheat::lies_on_host` tells.

`HostCopy` makes the copies at once, on any device; `AsyncHostCopy` makes them beside the computation on CUDA. Memory of the device is
taken and given back in the order of the computing stream, which waits for a copy's event before it forgets the copy's other
end. So no allocation depends on when a copy happens to end, and the peak is the one that a dry run sees. `AsyncHostCopy` has not
been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Copy",
    "HostCopy",
    "AsyncHostCopy",
    "copy_to_device_",
    "copy_to_host_",
    "host_zeros",
    "lies_on_host",
    "link_for",
    "to_device",
    "to_host",
]


def _host(t: Tensor) -> Tensor:
    """Memory on the host for a tensor like `t`, pinned where the device needs that for copies beside the computation."""
    return torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)


@torch.library.custom_op("preheat::to_host", mutates_args=())
def to_host(t: Tensor) -> Tensor:
    """A copy of `t` in the host's memory, begun on the current stream."""
    return _host(t).copy_(t, non_blocking=True)


@to_host.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="cpu")


@torch.library.custom_op("preheat::host_zeros", mutates_args=())
def host_zeros(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Zeros in the host's memory."""
    return torch.zeros(tuple(shape), dtype=dtype, pin_memory=pinned)


@host_zeros.register_fake
def _(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


@torch.library.custom_op("preheat::lies_on_host", mutates_args=())
def lies_on_host(t: Tensor) -> None:
    """Does nothing: says to a dry run that what holds `t` lies on the host from here on."""


@lies_on_host.register_fake
def _(t: Tensor) -> None: ...


@torch.library.custom_op("preheat::copy_to_host_", mutates_args={"host"})
def copy_to_host_(host: Tensor, t: Tensor) -> None:
    """Copies `t` of the device into `host`, begun on the current stream."""
    host.copy_(t, non_blocking=True)


@torch.library.custom_op("preheat::copy_to_device_", mutates_args={"t"})
def copy_to_device_(t: Tensor, host: Tensor) -> None:
    """Copies `host` into `t` of the device, begun on the current stream."""
    t.copy_(host, non_blocking=True)


@copy_to_host_.register_fake
def _(host: Tensor, t: Tensor) -> None:
    return None


@copy_to_device_.register_fake
def _(t: Tensor, host: Tensor) -> None:
    return None


def to_device(host: Tensor, like: Tensor) -> Tensor:
    """A copy of `host` beside `like`, begun on the current stream."""
    t = torch.empty_like(host, device=like.device)
    copy_to_device_(t, host)
    return t


@dataclass
class Copy:
    """A copy that was begun.

    Attributes:
        value: where it goes to; not to be read before one of the methods below returned.
        source: what it reads, kept until then.
    """

    value: Tensor
    source: Tensor | None = None
    event: Any = None

    def for_device(self) -> Tensor:
        """The copy's target; what the computing stream does from now on finds it whole. The host does not wait."""
        if self.event is not None:
            self.event.wait()  # the current stream does
        self.source = None
        return self.value

    def for_host(self) -> Tensor:
        """The copy's target, whole: the host waits for it."""
        if self.event is not None:
            self.event.synchronize()
        self.source = None
        return self.value


class HostCopy:
    """Copies at once: for tests on a CPU, and under fake tensors."""

    def out(self, t: Tensor, into: Tensor | None = None) -> Copy:
        """Begins to copy `t` to the host, into `into` where that is given."""
        if into is None:
            return Copy(to_host(t), t)
        copy_to_host_(into, t)
        return Copy(into, t)

    def back(self, sent: Tensor, into: Tensor) -> Copy:
        """Begins to copy `sent` into `into` on the device.

        `sent` lies whole on the host: whoever sent it there has waited for that copy, on the host or in the computing
        stream. No other copy is waited for.
        """
        copy_to_device_(into, sent)
        return Copy(into, sent)


class AsyncHostCopy(HostCopy):
    """Copies on two streams of their own, one for each direction."""

    def __init__(self, device: torch.device):
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, t: Tensor, into: Tensor | None = None) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream())  # `t` is computed by then
        with torch.cuda.stream(self._out):
            copy = super().out(t, into)
            copy.event = self._out.record_event()
        return copy

    def back(self, sent: Tensor, into: Tensor) -> Copy:
        # The computing stream is done with what lay in `into` before, and by then `sent` has arrived. What else is on
        # its way out is not waited for: weights come back while gradients still go.
        self._back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._back):
            copy = super().back(sent, into)
            copy.event = self._back.record_event()
        return copy


def link_for(device: torch.device) -> HostCopy:
    """The link to a device."""
    return AsyncHostCopy(device) if device.type == "cuda" else HostCopy()
