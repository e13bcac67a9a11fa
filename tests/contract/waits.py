"""What would make the host wait for a GPU, seen on a CPU: operators whose result's size or value the host reads, and copies that block.

On CUDA a step is queued while the device still works at what was queued before. One read of a value, and the device stands idle until
the host has caught up. `torch.cuda.set_sync_debug_mode` tells of it on a GPU; this does on a CPU, where all tensors lie on the
host: tensors that the host makes for itself (factories without a device, and what is computed of such alone) are told apart from
those that would lie on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from preheat.core import Batch, Build, Order
from preheat.engine.step import accumulate_gradients, update
from preheat.ops import grouped_mm

__all__ = ["ALLOWED", "Waits", "waits_of", "watched"]

# Operators of which the host reads a value or a size.
READING = {
    "_local_scalar_dense",
    "allclose",
    "argwhere",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "isin",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Methods by which Python reads a tensor; on a CPU some call no operator.
METHODS = {
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
}
MAKING = {"tensor", "as_tensor", "asarray", "scalar_tensor"}
COPIES = {"preheat::to_host", "preheat::copy_to_host_", "preheat::copy_to_device_", "preheat::host_zeros"}
"""Begun on the current stream, from pinned memory: see ops/memory/host_transfer.py."""
HOST = "_mark_on_host"


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _on_host(value: Any) -> bool:
    """Whether all tensors are the host's own; single numbers decide nothing beside others."""
    found = _tensors(value)
    found = [t for t in found if t.ndim] or found
    return bool(found) and all(getattr(t, HOST, False) for t in found)


def _mark(value: Any) -> Any:
    for t in _tensors(value):
        setattr(t, HOST, True)
    return value


def _place() -> str:
    """The line of the package that runs, or of whoever calls torch where none does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/preheat/" in name or name.endswith("test_waits.py"):
            return f"{name.rpartition('/preheat/')[2] if '/preheat/' in name else 'test_waits.py'}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class _Calls(TorchFunctionMode):
    """Python's calls: what the host makes, and copies that torch leaves out where everything lies on a CPU."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = (getattr(func, "__name__", None) or resolve_name(func) or "").rpartition(".")[2]
        if name in METHODS and args and isinstance(args[0], Tensor) and not _on_host(args[0]):
            self.waits.note(f"Tensor.{name}")
        if name in MAKING and kwargs.get("device") is not None and not _tensors(args):
            self.waits.note(f"torch.{name} with a device")
        if name in ("to", "cuda", "copy_") and self._blocks(name, args, kwargs):
            self.waits.note(f"Tensor.{name} without non_blocking")
        out = func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        moved = name in ("to", "cuda", "copy_") and not self._stays(name, args, kwargs)
        if not moved and (_on_host(inputs) if inputs else kwargs.get("device") is None):
            _mark(out)
        return out

    def _stays(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether what a copy reads is the host's and goes nowhere else."""
        if name == "copy_":
            return _on_host(args[0])
        rest = (*args[1:], *kwargs.values())
        return name == "to" and not any(isinstance(a, Tensor | torch.device | str) for a in rest)

    def _blocks(self, name: str, args: Any, kwargs: Any) -> bool:
        source = args[1] if name == "copy_" and len(args) > 1 else args[0]
        moves = _on_host(source) and not self._stays(name, args, kwargs)
        return moves and not kwargs.get("non_blocking") and not (name == "copy_" and len(args) > 2 and args[2])


class Waits(TorchDispatchMode):
    """The operators of a step; see `watched`.

    Attributes:
        found: (what, file:line), in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str]] = []

    def note(self, what: str) -> None:
        place = _place()
        if not self.found or self.found[-1][1] != place:  # a method and the operator that it calls are one read
            self.found.append((what, place))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in OPDEFS and name not in COPIES:
            with self, _Calls(self):
                return OPDEFS[name]._init_fn(*args, **kwargs)  # torch would run it without any mode
        bare = name.rpartition("::")[2]
        if _reads(bare, func, args, kwargs) and not _on_host((args, kwargs)):
            self.note(name)
        return func(*args, **kwargs)


def _reads(bare: str, func: Any, args: Any, kwargs: Any) -> bool:
    if bare == "repeat_interleave" and func._overloadname in ("Tensor", "self_Tensor"):
        return kwargs.get("output_size") is None
    if bare in INDEXING:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if bare == "_grouped_mm":
        return bool(args[0].dtype != torch.bfloat16)
    return bare in READING


@contextmanager
def watched() -> Iterator[Waits]:
    """Writes down where what runs within would wait for a GPU.

    Example:
        >>> with watched() as waits:
        ...     _ = torch.ones(3, device="cpu").sum().item()
        >>> waits.found[0][0]
        'Tensor.item'
    """
    plain: Callable[..., Any] = torch.from_numpy
    native = grouped_mm._has_native_kernel

    def from_numpy(array: Any) -> Tensor:
        made: Tensor = plain(array)
        # `to_device` makes a pinned copy, for which nobody waits.
        return made if sys._getframe(1).f_code.co_name == "to_device" else _mark(made)

    with (
        patch.object(torch, "from_numpy", from_numpy),
        # As on CUDA: torch's grouped product takes bf16 alone, and the host does not know where an expert's rows end.
        patch.object(grouped_mm, "_has_native_kernel", lambda *ts: ts[0].dtype == torch.bfloat16 and native(*ts)),
        patch.object(grouped_mm, "_can_read_bounds", lambda ends: False),
        Waits() as waits,
        _Calls(waits),
    ):
        yield waits


ALLOWED: dict[str, str] = {
    "models/distillation/on_policy.py": "the student writes texts, and each of its tokens is read to be the next input",
    "models/distillation/tokenizer_alignment.py": "the teacher's tokenizer reads the text of the rows, on the host",
}
"""File of the package -> why the host must wait there."""


def waits_of(b: Build, batches: list[Batch]) -> list[tuple[str, str]]:
    """Where a step waits, from when its batches are on the device until its numbers are read. The second one: in the first optimizers make their state."""
    on_host = sorted((pair for pair in b.hooks.transforms if pair[0] < Order.MOVE), key=lambda pair: pair[0])
    b.hooks.transforms = [pair for pair in b.hooks.transforms if pair not in on_host]
    for _, change in on_host:
        batches = [change(batch) for batch in batches]
    accumulate_gradients(b, batches, 0.01)
    update(b, 0.01)
    with watched() as seen:
        accumulate_gradients(b, batches, 0.01)
        update(b, 0.01)
    return [(what, place) for what, place in seen.found if place.rpartition(":")[0] not in ALLOWED]
