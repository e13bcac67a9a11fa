"""Cache of fake tensor outputs: a pure operator returns outputs of the same layout for inputs of the same layout.

torch's `FakeTensorMode` has a cache too, but it handles every kind of tensor and mode, which takes most of a dry run's
time, and it does not cache operators that return several views. This cache handles plain tensors and pure operators
only; torch executes everything else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from preheat.ops.distributed.fully_shard import OPERATORS
from preheat.torch_compat import fake_device

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["Outputs", "run", "collect_tensors"]


_Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""Shape, strides, storage offset, dtype and device."""


class _Result(NamedTuple):
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
        itself, shares, what = self
        if itself is not None:
            return inputs[itself]
        assert what is not None
        shape, stride, offset, dtype, device = what
        # As torch makes fake tensors: a meta tensor inside, allocated without the modes that are active.
        with torch._C._DisableTorchDispatch():
            plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if shares is not None:
                plain.set_(inputs[shares].untyped_storage(), offset, shape, stride)
        return _build_fake(mode, plain, device)


_attributes: dict[torch.device, dict[str, object]] = {}  # of a fake tensor on a device, without its mode


def _build_fake(mode: FakeTensorMode, plain: Tensor, device: torch.device) -> Tensor:
    """Returns `FakeTensor(mode, plain, device)`, in a third of the time: its attributes are those of an earlier one."""
    if (attributes := _attributes.get(device)) is None:
        first = FakeTensor(mode, plain, device)
        _attributes[device] = {name: value for name, value in vars(first).items() if name != "fake_mode"}
        return first
    fake = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
    vars(fake).update(attributes, fake_mode=mode)
    return fake


@dataclass(eq=False)
class Outputs:
    """All outputs of an operator call, and what else is known of all calls with the same layouts.

    Attributes:
        kind: type of the collection of outputs; None for a single tensor.
        notes: for the caller, which may store here what follows from the layouts alone.
    """

    kind: type | None
    results: tuple[_Result | None, ...]
    notes: dict[Hashable, Any] = field(default_factory=dict)

    def rebuild(self, inputs: Sequence[Tensor], mode: FakeTensorMode) -> object:
        if self.kind is None and (only := self.results[0]) is not None:
            return only.make(inputs, mode)
        tensors = [None if result is None else result.make(inputs, mode) for result in self.results]
        return tensors[0] if self.kind is None else self.kind(tensors)


class _Unknown(Exception):
    """Raised for an argument whose effect on the outputs is unknown, so that the call cannot be cached."""


_operators: dict[int, _Operator] = {}  # by id
_made: dict[Hashable, Outputs | None] = {}  # None: not cacheable, torch executes it
_PLAIN = frozenset((int, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format))
# They replace the storage or the shape of an argument, or make the output a constant (lift).
_CHANGING = {"aten::set_", "aten::set_data", "aten::resize_", "aten::resize_as_", "aten::lift_fresh", "aten::lift"}
# The layout of the outputs depends on values, or that of an argument changes.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
# They make a new tensor, also of one that is not fake: a parameter on meta.
_LIKE = {"aten::empty_like", "aten::zeros_like"}
# Namespaces whose operators are functions of their arguments. Collectives of c10d also return an object to wait for.
_OURS = ("aten", "preheat", "_c10d_functional", OPERATORS)


def collect_tensors(values: object) -> list[Tensor]:
    """Returns the tensors among an operator's arguments or outputs, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    leaves: list[Tensor] = []
    for value in values:
        if type(value) is FakeTensor:
            leaves.append(value)
        elif type(value) not in _PLAIN:
            leaves += collect_tensors(value)
    return leaves


def run(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], inputs: Sequence[Tensor]
) -> tuple[object, Outputs | None]:
    """Returns `func(*args, **kwargs)` under a `FakeTensorMode`, from the cache if possible, and its cache entry.

    Args:
        inputs: `collect_tensors` of the arguments.
    """
    operator = _describe_operator(func)
    if operator.how is None:
        return func(*args, **kwargs), None
    first = inputs[0] if inputs else None
    if type(first) is FakeTensor:
        mode = first.fake_mode
    elif first is None or operator.how == "like":
        # A factory: the mode that will make its result.
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is None:
            return func(*args, **kwargs), None
    else:
        return func(*args, **kwargs), None
    # The default dtype decides that of results that mix integers and Python floats.
    key: list[Hashable] = [operator, torch.get_default_dtype()]
    try:
        _append_signature(args, mode, key, operator.how == "like")
        for name, value in kwargs.items():
            key.append(name)
            _append_signature((value,), mode, key, False)
    except _Unknown:
        return func(*args, **kwargs), None
    # Three cases: stored outputs, None (not cacheable), and `_Unknown` for a call that was not seen yet.
    entry = tuple(key)
    cached = _made.get(entry, _Unknown)
    if type(cached) is Outputs:
        return cached.rebuild(inputs, mode), cached
    out = func(*args, **kwargs)
    if cached is not None:
        _made[entry] = _describe(out, inputs)
    return out, None


@dataclass(frozen=True, eq=False)
class _Operator:
    """An operator as part of a key: its hash is that of the object, while torch computes the one of an `OpOverload`.

    Attributes:
        how: None for an operator that torch must execute; `like` for one that may take a tensor that is not fake.
    """

    func: OpOverload
    how: str | None


def _describe_operator(func: OpOverload) -> _Operator:
    operator = _operators.get(id(func))
    if operator is None:
        name = func._schema.name
        how: str | None = "like" if name in _LIKE else "pure"
        if func.namespace not in _OURS or name in _CHANGING or _TAGS & set(func.tags):
            how = None
        # It holds the operator, so no other one can get its id.
        operator = _operators[id(func)] = _Operator(func, how)
    return operator


def _append_signature(values: Iterable[Any], mode: FakeTensorMode, key: list[Hashable], like: bool) -> None:
    """Appends everything about the arguments that determines the layout of the outputs; raises _Unknown if it cannot.

    Args:
        like: accept a parameter on meta, which is not fake.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if (
                value.fake_mode is not mode
                or value.constant is not None
                or value.layout is not torch.strided
                or value.dtype.is_complex
            ):
                raise _Unknown
            key.append((value.shape, value.stride(), value.storage_offset(), value.dtype, fake_device(value)))
        elif kind in _PLAIN:
            key.append(value)
        elif kind is float or kind is bool:
            key.append((kind, value))  # 1.0 and True equal 1 as keys, but give another dtype
        elif kind is torch.Generator:
            key.append(None)  # fake tensors have no values
        elif isinstance(value, list | tuple):
            # Brackets, so that nested arguments differ from the same ones side by side.
            key.append(("list", len(value)))
            _append_signature(value, mode, key, False)
        elif like and isinstance(value, Tensor) and value.is_meta and kind in (Tensor, torch.nn.Parameter):
            if value.layout is not torch.strided or value.dtype.is_complex:
                raise _Unknown
            key.append(("plain", value.shape, value.stride(), value.dtype))
        else:
            raise _Unknown


def _describe(out: object, inputs: Sequence[Tensor]) -> Outputs | None:
    outputs, kind = (out, type(out)) if isinstance(out, list | tuple) else ([out], None)
    try:
        return Outputs(kind, tuple(_build_result(t, inputs) for t in outputs))
    except _Unknown:
        return None


def _build_result(t: object, inputs: Sequence[Tensor]) -> _Result | None:
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
    what: _Layout = (tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype, fake_device(t))
    for n, each in enumerate(inputs):
        # A view must share the storage, because the recorder follows memory by storages.
        if each.untyped_storage()._cdata == storage._cdata:
            return _Result(None, n, what)
    with torch._C._DisableTorchDispatch():
        alone = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    if t.storage_offset() or alone.untyped_storage().nbytes() != storage.nbytes():
        raise _Unknown  # part of a larger storage
    return _Result(None, None, what)
