"""Cache of fake tensor outputs: a pure operator returns outputs of the same layout for inputs of the same layout.

torch's `FakeTensorMode` has a cache too, but it handles every kind of tensor and mode, which takes most of a dry run's
time, and it does not cache operators that return several views. This cache handles plain tensors and pure operators
only; torch executes everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["call", "tensors"]


_Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""Shape, strides, storage offset, dtype and device."""


@dataclass(frozen=True)
class _Result:
    """One output of an operator: an input itself, a view of an input, or a new tensor.

    Attributes:
        itself: index of the input that the output is.
        shares: index of the input whose storage the output shares.
        what: layout of an output that is not an input.
    """

    itself: int | None
    shares: int | None
    what: _Layout | None = None

    def make(self, inputs: Sequence[Tensor], mode: FakeTensorMode) -> Tensor:
        if self.itself is not None:
            return inputs[self.itself]
        assert self.what is not None
        shape, stride, offset, dtype, device = self.what
        # As torch makes fake tensors: a meta tensor inside, allocated without the modes that are active.
        with torch._C._DisableTorchDispatch():
            plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if self.shares is not None:
                plain.set_(inputs[self.shares].untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, plain, device)


@dataclass(frozen=True)
class _Output:
    """All outputs of an operator; `kind` is the type of their collection, or None for a single tensor."""

    kind: type | None
    results: tuple[_Result | None, ...]

    def rebuild(self, inputs: Sequence[Tensor], mode: FakeTensorMode) -> object:
        tensors = [None if result is None else result.make(inputs, mode) for result in self.results]
        return tensors[0] if self.kind is None else self.kind(tensors)


class _Unknown(Exception):
    """Raised for an argument whose effect on the outputs is unknown, so that the call cannot be cached."""


_made: dict[Hashable, _Output | None] = {}  # None: not cacheable, torch executes it
_PLAIN = (int, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)
# They replace the storage or the shape of an argument, or make the output a constant (lift).
_CHANGING = {"aten::set_", "aten::set_data", "aten::resize_", "aten::resize_as_", "aten::lift_fresh", "aten::lift"}
# The layout of the outputs depends on values, or that of an argument changes.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


def tensors(values: object) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments or outputs, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors(value)


def call(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], inputs: Sequence[Tensor]) -> object:
    """Returns `func(*args, **kwargs)` under a `FakeTensorMode`, from the cache if possible.

    Args:
        inputs: `tensors` of the arguments.
    """
    # Operators without tensor arguments (factories) are left to torch, which knows the mode.
    mode = inputs[0].fake_mode if inputs and type(inputs[0]) is FakeTensor else None
    if mode is None or not _pure(func):
        return func(*args, **kwargs)
    try:
        key = (
            func,
            # Decides the dtype of results that mix integers and Python floats.
            torch.get_default_dtype(),
            *_signature(args, mode),
            *(_signature(kwargs.items(), mode) if kwargs else ()),
        )
    except _Unknown:
        return func(*args, **kwargs)
    # Three cases: a stored output, None (not cacheable), and `_Unknown` for a call that was not seen yet.
    cached = _made.get(key, _Unknown)
    if isinstance(cached, _Output):
        return cached.rebuild(inputs, mode)
    out = func(*args, **kwargs)
    if cached is not None:
        _made[key] = _describe(out, inputs)
    return out


@functools.cache
def _pure(func: OpOverload) -> bool:
    return func.namespace == "aten" and func._schema.name not in _CHANGING and not _TAGS & set(func.tags)


def _signature(values: Iterable[Any], mode: FakeTensorMode) -> Iterator[Hashable]:
    """Yields everything about the arguments that determines the layout of the outputs; raises _Unknown if it cannot."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if (
                value.fake_mode is not mode
                or value.constant is not None
                or value.layout is not torch.strided
                or value.is_complex()
            ):
                raise _Unknown
            yield (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif kind in _PLAIN:
            yield value
        elif kind is float or kind is bool:
            yield (kind, value)  # 1.0 and True equal 1 as keys, but give another dtype
        elif kind is torch.Generator:
            yield None  # fake tensors have no values
        elif isinstance(value, list | tuple):
            yield (len(value), *_signature(value, mode))
        else:
            raise _Unknown


def _describe(out: object, inputs: Sequence[Tensor]) -> _Output | None:
    outputs, kind = (out, type(out)) if isinstance(out, list | tuple) else ([out], None)
    try:
        return _Output(kind, tuple(_result(t, inputs) for t in outputs))
    except _Unknown:
        return None


def _result(t: object, inputs: Sequence[Tensor]) -> _Result | None:
    if t is None:
        return None
    if (
        type(t) is not FakeTensor
        or t.constant is not None
        or t.layout is not torch.strided
        or t.requires_grad
        or t.is_complex()
    ):
        raise _Unknown
    for n, each in enumerate(inputs):
        # An operator that writes its argument returns it: the object itself matters, since autograd and modules refer
        # to it.
        if each is t:
            return _Result(n, None)
    storage = t.untyped_storage()
    what: _Layout = (tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype, t.fake_device)
    for n, each in enumerate(inputs):
        # A view must share the storage, because the recorder follows memory by storages.
        if each.untyped_storage()._cdata == storage._cdata:
            return _Result(None, n, what)
    with torch._C._DisableTorchDispatch():
        alone = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    if t.storage_offset() or alone.untyped_storage().nbytes() != storage.nbytes():
        raise _Unknown  # part of a larger storage
    return _Result(None, None, what)
