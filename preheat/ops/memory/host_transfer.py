"""Copies between device and host memory as custom operators, which a dry run can observe.

Under fake tensors everything is on one fake device, and a plain copy to the host would look like one more tensor there.
The results of `preheat::to_host` and `preheat::host_zeros` are known to be on the host, as is anything computed only
from them; `preheat::lies_on_host` marks tensors that others move there (FSDP2's weights and gradients).

`HostCopy` copies synchronously on any device; `AsyncHostCopy` overlaps copies with compute on CUDA. Device memory is
allocated and freed in the order of the compute stream, which waits for a copy's event before it drops the source.
Allocations therefore do not depend on when a copy finishes, and the peak equals that of the dry run.
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
    "choose_link",
    "to_device",
    "to_host",
]


def _allocate_host(t: Tensor) -> Tensor:
    """Allocates host memory for a tensor like `t`, pinned if `t` is on CUDA, for asynchronous copies."""
    return torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)


# Custom operators, because a dry run recognizes a copy over the link by the operator's name.
@torch.library.custom_op("preheat::to_host", mutates_args=())
def to_host(t: Tensor) -> Tensor:
    """Copies `t` to new host memory on the current stream."""
    # Asynchronous only into pinned memory, which `_allocate_host` allocates; the caller synchronizes (`Copy`).
    return _allocate_host(t).copy_(t, non_blocking=True)


@to_host.register_fake
def _(t: Tensor) -> Tensor:
    # Under fake tensors, one more tensor on the fake device; the recorder knows the result by the operator's name.
    return torch.empty_like(t, device="cpu")


@torch.library.custom_op("preheat::host_zeros", mutates_args=())
def host_zeros(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Allocates zeros in host memory."""
    return torch.zeros(tuple(shape), dtype=dtype, pin_memory=pinned)


@host_zeros.register_fake
def _(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


@torch.library.custom_op("preheat::lies_on_host", mutates_args=())
def lies_on_host(t: Tensor) -> None:
    """Does nothing, but marks for a dry run that the storage of `t` is on the host from here on."""


@lies_on_host.register_fake
def _(t: Tensor) -> None: ...


@torch.library.custom_op("preheat::copy_to_host_", mutates_args={"host"})
def copy_to_host_(host: Tensor, t: Tensor) -> None:
    """Copies device tensor `t` into `host` on the current stream."""
    host.copy_(t, non_blocking=True)


@torch.library.custom_op("preheat::copy_to_device_", mutates_args={"t"})
def copy_to_device_(t: Tensor, host: Tensor) -> None:
    """Copies `host` into device tensor `t` on the current stream."""
    t.copy_(host, non_blocking=True)


@copy_to_host_.register_fake
def _(host: Tensor, t: Tensor) -> None:
    return None


@copy_to_device_.register_fake
def _(t: Tensor, host: Tensor) -> None:
    return None


def to_device(host: Tensor, like: Tensor) -> Tensor:
    """Copies `host` to the device of `like` on the current stream."""
    t = torch.empty_like(host, device=like.device)
    copy_to_device_(t, host)
    return t


@dataclass
class Copy:
    """A copy in progress.

    Attributes:
        value: the target; do not read it before one of the methods below has returned.
        source: the source tensor, kept alive until then.
    """

    value: Tensor
    source: Tensor | None = None
    event: Any = None

    def for_device(self) -> Tensor:
        """Returns the target after making the compute stream wait for the copy. The host does not wait."""
        if self.event is not None:
            # Kernels that are queued later, and may reuse the source's memory, then run after the copy.
            self.event.wait()  # makes the current stream wait, not the host
        self.source = None
        return self.value

    def for_host(self) -> Tensor:
        """Returns the target after the host has waited for the copy."""
        if self.event is not None:
            self.event.synchronize()
        self.source = None
        return self.value


class HostCopy:
    """Synchronous copies: for CPUs, and under fake tensors."""

    def out(self, t: Tensor, into: Tensor | None = None) -> Copy:
        """Starts copying `t` to the host, into `into` if given."""
        if into is None:
            return Copy(to_host(t), t)
        copy_to_host_(into, t)
        return Copy(into, t)

    def back(self, sent: Tensor, into: Tensor) -> Copy:
        """Starts copying `sent` into `into` on the device.

        `sent` must be complete on the host: the caller has waited for its copy, on the host or in the compute stream.
        This waits for no other copy.
        """
        copy_to_device_(into, sent)
        return Copy(into, sent)


class AsyncHostCopy(HostCopy):
    """Asynchronous copies on two dedicated streams, one per direction."""

    def __init__(self, device: torch.device):
        # One per direction, because a GPU has a copy engine for each: both directions run at once.
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, t: Tensor, into: Tensor | None = None) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream())  # waits until `t` is computed
        with torch.cuda.stream(self._out):
            copy = super().out(t, into)
            copy.event = self._out.record_event()
        return copy

    def back(self, sent: Tensor, into: Tensor) -> Copy:
        # Waits for the compute stream, which has finished with the old contents of `into` and waited for `sent`, but
        # not for other copies out: weights return while gradients are still being sent.
        self._back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._back):
            copy = super().back(sent, into)
            copy.event = self._back.record_event()
        return copy


def choose_link(device: torch.device) -> HostCopy:
    """Returns the copy engine of a device."""
    return AsyncHostCopy(device) if device.type == "cuda" else HostCopy()
