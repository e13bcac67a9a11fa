"""Dispatch mode that records every allocation, release and kernel, of fake or real tensors."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from preheat.core import Phase
from preheat.ops.attention.causal_cpu import scratch_bytes
from preheat.ops.distributed.dtensor_utils import local
from preheat.planning.fake_tensor_cache import collect_tensors, run
from preheat.planning.speed.flop_formulas import count_kernel_flops, find_formula
from preheat.torch_compat import fake_device

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from preheat.planning.speed.flop_formulas import Formula

__all__ = ["Kernel", "Mark", "Recorder"]

Place = Literal["device", "host", "out", "back"]


@dataclass(frozen=True)
class Kernel:
    """FLOPs and bytes of an operator call; equal calls are counted together."""

    operator: str
    dtype: str
    flops: int
    bytes_read: int
    bytes_written: int
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensor arguments."""
    transposed: tuple[bool, ...] = ()
    """Matmuls: which operands are transposed in memory."""
    causal: bool = True
    """Attention: causal masking, which halves the work (`flops` counts the full matrix)."""
    group: tuple[int, int] | None = None
    """Collectives: size of the process group, and the stride between its ranks."""
    where: Place = "device"
    """Where it runs: on the device, on the host, or as a copy to the host (out) or to the device (back)."""
    alone: bool = False
    """Part of the optimizer update, when the device has nothing else to do."""

    @property
    def unmasked_flops(self) -> float:
        """FLOPs that the result needs: half of `flops` in a causal attention."""
        return self.flops / 2 if self.causal and "attention" in self.operator else self.flops

    def __hash__(self) -> int:
        return self._hash  # each call is counted by its kernel

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))


class Mark(NamedTuple):
    """Snapshot of the recorder's counts."""

    kernels: Counter[Kernel]
    recomputed: int
    sums: Counter[Kernel]


_DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}


def _find_argument(
    operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], name: str, default: object
) -> Any:
    """Returns an operator's argument by name; `default` if its schema has no such argument."""
    for n, declared in enumerate(operator._schema.arguments):
        if declared.name == name:
            return kwargs.get(name, args[n] if n < len(args) else declared.default_value)
    return default


def _is_shape_propagation() -> bool:
    """True during DTensor's shape propagation, which runs operators on global shapes and discards the result."""
    # The stack is the only sign of it: DTensor's propagation runs ordinary operators under the same modes.
    frame: FrameType | None = sys._getframe(2)
    # The propagation's frame is a few calls up; walking whole stacks in every operator would dominate the dry run.
    for _ in range(20):
        if frame is None:
            return False
        if frame.f_code.co_name.startswith("_propagate_tensor_meta"):
            return True
        frame = frame.f_back
    return False


class _Call(NamedTuple):
    """The cost of a call of an operator, apart from the tensors that it allocates: the same for equal layouts.

    Attributes:
        kernel: None if none runs.
        temporaries: bytes of each allocation that lives only while the operator runs.
    """

    kernel: Kernel | None
    temporaries: tuple[int, ...]


@functools.cache
def _is_wrapper(kind: type) -> bool:
    """True for a DTensor, a quantized tensor and other subclasses that consist of several tensors."""
    return bool(is_traceable_wrapper_subclass_type(kind))


def _find_storage(t: Tensor) -> torch.UntypedStorage:
    # Of a DTensor, the storage of this rank's shard.
    return (t if type(t) is FakeTensor else local(t)).untyped_storage()


@dataclass(frozen=True)
class _Operator:
    """Properties of an operator that hold for every call."""

    func: OpOverload  # held, so that its id stays its own
    name: str
    free: bool  # allocates nothing and moves nothing
    simple: bool  # neither collective nor a copy between device and host, and on the main stream
    written: tuple[tuple[int, str], ...]  # index and name of the arguments that it writes
    splits: bool
    stream: str | None
    collective: bool
    read: tuple[int, ...] | None  # indices of the arguments that it reads; None: all
    pointwise: bool  # elementwise, and promotes mixed dtypes
    formula: Formula | None


class Recorder(TorchDispatchMode):
    """Records the allocations, frees and kernels of all operators that run under it.

    Storages are tracked by weak reference; sizes are rounded up as the device's allocator does.

    Args:
        rounding: bytes to which the allocator rounds sizes.
        spread: True if the step is one rank of several devices.
        casts: True if pointwise operators materialize operands of another dtype before they run, as torch does on a
            CPU; on a GPU they cast on load.
    """

    def __init__(self, rounding: int, spread: bool = False, casts: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding, self.spread, self.casts = rounding, spread, casts
        # Id of a storage with gathered weights -> weakref, number, bytes.
        self._gathered: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._released: set[int] = set()  # ids of those that are resized to 0 now
        self._resized = False  # since the last look at them
        self.phase = Phase.LOAD
        # (number of the storage, bytes: positive when allocated, negative when freed, phase).
        self.log: list[tuple[int, int, Phase]] = []
        self.place = ""  # part of the model that runs
        self.places: list[str] = []  # place of each log entry
        self.kernels: Counter[Kernel] = Counter()
        self.recomputed = 0
        self.sums: Counter[Kernel] = Counter()  # the kernels that reduce gradients across devices
        self.summing = False
        # Kernels, without gradient reductions, and recomputed FLOPs of all micro-batches of a pipeline but the first.
        self.later: Counter[Kernel] = Counter()
        self.recomputed_later = 0
        self._start_of_pass: Mark | None = None
        self.tf32 = False  # fp32 matmuls run in TF32 (fake tensors do not show torch's switch)
        self._numbers: dict[int, int] = {}  # id of a living storage -> its number in the log
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # id of a living storage -> its callback
        self._made = 0
        self.groups: dict[tuple[int, int], list[int]] = {}  # key of a process group -> its ranks
        self.streams: dict[int, str] = {}  # number -> stream, for storages not allocated on the main stream
        self.rounded: dict[int, int] = {}  # number -> bytes added by rounding
        self.unrounded: dict[int, int] = {}  # number -> bytes before rounding
        self.gathered: set[int] = set()  # numbers of storages that held gathered weights
        self._host: set[int] = set()  # ids of living storages in host memory, which the device log ignores

    def mark(self) -> Mark:
        return Mark(Counter(self.kernels), self.recomputed, Counter(self.sums))

    def sum_gradients(self, now: bool) -> None:
        """Marks the kernels from now on as gradient reduction, or ends that."""
        self.summing = now

    def notice_pass(self, micro: int, what: str, starts: bool) -> None:
        """Notes that a pass of a micro-batch through a stage of a pipeline starts or ends; `what` as in `Span`."""
        if micro == 0 and what != "first":
            return
        if starts:
            self._start_of_pass = self.mark()
            return
        since = self._start_of_pass
        assert since is not None, "a pass ends after its start"
        if what == "first":  # which counts the tokens of experts (engine/moe_aux_loss.py)
            self.recomputed += sum(k.flops * n for k, n in (self.kernels - since.kernels).items())
        if micro == 0:
            return
        self.later += self.kernels - since.kernels - (self.sums - since.sums)
        self.recomputed_later += self.recomputed - since.recomputed

    def repeat_kernels(self, since: object, times: int, *, sums: bool = True) -> None:
        """Counts the kernels since a mark `times` more; `sums` includes the gradient reductions."""
        assert isinstance(since, Mark)
        # Counter subtraction drops zeros, so only kernels that ran since the mark are repeated.
        repeated = self.kernels - since.kernels
        if not sums:
            repeated -= self.sums - since.sums
        self.kernels.update({k: n * times for k, n in repeated.items()})
        self.recomputed += (self.recomputed - since.recomputed) * times

    def number(self, t: Tensor) -> int | None:
        """Returns the log number of a tensor's storage, if it was allocated under this recorder and is alive."""
        return self._numbers.get(id(_find_storage(t)))

    def follow(self, t: Tensor) -> int:
        """Logs a tensor's storage unless it is known; returns the newly allocated bytes."""
        storage = _find_storage(t)
        # Meta tensors have no memory on any device; the build makes them before it materializes parameters.
        if id(storage) in self._numbers or id(storage) in self._host or t.device.type == "meta":
            return 0
        # Rounded as the allocator rounds each block; the difference is reported as `rounding`.
        size = -(-storage.nbytes() // self.rounding) * self.rounding
        number = self._made
        self._made += 1
        self._numbers[id(storage)] = number
        self.rounded[number] = size - storage.nbytes()
        self.unrounded[number] = storage.nbytes()
        self._log_event(number, size)

        # Arguments by default value, because a closure over `storage` would keep it alive.
        def freed(_: object, key: int = id(storage), number: int = number, size: int = size) -> None:
            self._alive.pop(key, None)
            self._numbers.pop(key, None)
            self._gathered.pop(key, None)
            # FSDP resized it to 0 bytes: its free is in the log already.
            if key in self._released:
                self._released.discard(key)
                return
            self._log_event(number, -size)

        # Runs as soon as the last tensor of the storage dies, at the point of the step at which the real one is freed.
        self._alive[id(storage)] = weakref.ref(storage, freed)
        return int(size)

    def begin(self, phase: Phase) -> None:
        """Starts a phase; an empty entry makes the memory at its beginning count towards its peak."""
        self.phase = phase
        self._log_event(self._made, 0)
        self._made += 1

    def _log_temporary(self, size: int) -> None:
        """Logs a temporary that lives only while an operator runs."""
        number = self._made
        self._made += 1
        self.rounded[number], self.unrounded[number] = 0, size
        size = -(-size // self.rounding) * self.rounding
        self._log_event(number, size)
        self._log_event(number, -size)

    def _log_event(self, number: int, size: int) -> None:
        self.log.append((number, size, self._current_phase()))
        self.places.append(self.place)

    def notice_resize(self) -> None:
        """Makes the next operator log how gathered weights were resized before it."""
        self._resized = True

    def notice_gather_input(self, t: Tensor) -> None:
        """Notes that a tensor was allocated on the stream on which FSDP gathers weights."""
        if (number := self.number(t)) is not None:
            self.streams[number] = _GATHER

    def look_at_gathered(self, written: Iterable[Tensor] = ()) -> None:
        """Logs the frees and reallocations of FSDP's gathered weights, which resize storages without an operator.

        Args:
            written: buffers of gathered weights to track from now on.
        """
        self._resized = False
        for t in written:
            storage = _find_storage(t)
            # Each storage is registered once, with the size that it has while it is filled.
            if (number := self._numbers.get(id(storage))) is not None and id(storage) not in self._gathered:
                size = -(-storage.nbytes() // self.rounding) * self.rounding
                self._gathered[id(storage)] = (weakref.ref(storage), number, size)
                self.gathered.add(number)
        for key, (ref, number, size) in self._gathered.items():
            # A resize calls no operator, so it is noticed at the next operator, by comparing with the last known state.
            alive = ref()
            empty = alive is not None and alive.nbytes() == 0
            # The symmetric difference flips the membership: filled to empty, or empty to filled.
            if empty != (key in self._released):
                self._released ^= {key}
                self._log_event(number, -size if empty else size)

    def _group_key(self, operator: OpOverload, args: Sequence[object]) -> tuple[int, int] | None:
        """Returns the key of a collective's process group, which is an object in c10d and a name in functional ones."""
        import torch.distributed as dist

        if operator.namespace == "c10d":
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            group = dist.ProcessGroup.unbox(groups[0]) if groups else None
        elif operator.namespace == "_c10d_functional" and isinstance(args[-1], str):
            group = dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[arg-type]  # a name
        else:
            return None
        if group is None:
            return None
        # (size, stride) identifies a group for the cost of a collective: ranks of one host are neighbours.
        ranks = dist.get_process_group_ranks(group)
        key = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
        self.groups[key] = ranks
        return key

    def _move_to_host(self, t: Tensor) -> None:
        """Moves a storage that was logged as device memory to host memory."""
        storage = _find_storage(t)
        if (number := self._numbers.pop(id(storage), None)) is not None:
            self._released.add(id(storage))  # its finalizer must not log another free
            self._log_event(number, -(-(-storage.nbytes() // self.rounding) * self.rounding))
            self._track_on_host([t])

    def _track_on_host(self, outputs: list[Tensor]) -> None:
        """Tracks the storages of these tensors as host memory."""
        for storage in {id(s): s for s in map(_find_storage, outputs) if id(s) not in self._numbers}.values():
            if id(storage) not in self._host:
                self._host.add(id(storage))
                weakref.finalize(storage, self._host.discard, id(storage))

    def _current_phase(self) -> Phase:
        # Recomputation re-enters the forward slots, but runs inside of an autograd node: it belongs to backward.
        if self.phase in (Phase.FORWARD, Phase.HEAD_AND_LOSS) and torch._C._current_autograd_node() is not None:
            return Phase.BACKWARD
        return self.phase

    def _current_place(self, name: str, inputs: list[Tensor]) -> Place:
        if name in _LINK:
            return _LINK[name]
        if not self._host:
            return "device"
        # 0-dim tensors (step counters, flags) do not decide where an operator runs.
        on_host = [id(_find_storage(t)) in self._host for t in [t for t in inputs if t.ndim] or inputs]
        return "host" if on_host and all(on_host) else "device"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: torch would wrap every call in a function that switches the compiler off, which is not on."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return fake_device(args[0])  # more than half of all calls
        # Waiting for a collective returns its result itself; only torch's fake version makes a new tensor.
        if func is _WAIT and type(args[0]) is FakeTensor:
            return args[0]
        if func in _RANGES:  # without tensors: FSDP opens several in each pass of a layer
            if self._resized:
                self.look_at_gathered()
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        # Only plain tensors own storages.
        for kind in types:
            if kind is not FakeTensor and _is_wrapper(kind):
                return NotImplemented  # called again with the local shards of a DTensor, or a quantized tensor's parts
        inputs = collect_tensors(args) + collect_tensors(kwargs) if kwargs else collect_tensors(args)
        out, entry = run(func, args, kwargs, inputs)
        # Global shapes are no memory of this rank.
        if self.spread and _is_shape_propagation():
            return out
        # Before this operator's own allocations: a resize happened ahead of it.
        if self._resized:
            self.look_at_gathered()
        operator = _describe_operator(func)
        outputs = collect_tensors(out)
        # Without tensors nothing runs on the device: a question about dtypes.
        if operator.free or not (inputs or outputs):
            return out
        # Layouts alone decide what else follows, unless a storage is on the host.
        notes = None
        if entry is not None and operator.simple and not self._host:
            key = (self.tf32, self.casts, self.phase is Phase.UPDATE)
            call: _Call | None = entry.notes.get(key)
            if call is not None:
                for t in outputs:
                    self.follow(t)
                for size in call.temporaries:
                    self._log_temporary(size)
                if call.kernel is not None:
                    self._count(call.kernel)
                return out
            if all(map(_is_dense, (*inputs, *outputs))):
                notes = entry.notes
        where = self._current_place(operator.name, inputs)
        # Storages first: a copy over the link counts the bytes of those that are on the host.
        self._track_storages(operator.name, where, inputs, outputs)
        if operator.name in _UNINITIALIZED:  # memory without values: no kernel runs
            if notes is not None:
                notes[key] = _Call(None, ())
            return out
        # Without outputs (foreach and collective operators) the schema says which arguments are written.
        written = outputs or [
            t for n, name in operator.written for t in collect_tensors(args[n] if n < len(args) else kwargs.get(name))
        ]
        # FSDP2 copies the gathered bytes into one buffer per parameter: these are the ones it resizes later.
        if operator.splits:
            self.look_at_gathered(written)
        if operator.stream is not None:
            self.streams.update({n: operator.stream for t in written if (n := self.number(t)) is not None})
        temporaries, cast = self._find_temporaries(operator, where, inputs, written)
        for size in temporaries:
            self._log_temporary(size)
        flops = count_kernel_flops(operator.formula, args, out)
        if operator.name.endswith("::all_gather_copy_in"):
            # A rank copies its own shards into its part of the buffer; the buffer is an argument and a result too.
            written = outputs[:1]
        sources = (
            inputs if operator.read is None else collect_tensors([args[n] for n in operator.read if n < len(args)])
        )
        read, wrote = self._count_traffic(where, sources, outputs, written)
        kernel = Kernel(
            operator=operator.name.removeprefix("aten::"),
            dtype=self._compute_dtype(operator.name, flops, inputs, outputs),
            flops=flops,
            # A cast reads and writes its operand once more, so its bytes count on both sides.
            bytes_read=read + cast,
            bytes_written=wrote + cast,
            shapes=tuple(tuple(t.shape) for t in inputs[:4]),
            # Speed on a CPU depends on the layout: x @ W.T, g @ W and g.T @ x run at different rates.
            transposed=tuple(t.ndim >= 2 and t.stride(-1) != 1 for t in inputs[:3]) if flops else (),
            causal=_find_argument(func, args, kwargs, "is_causal", True) if flops else True,
            group=self._group_key(func, args) if operator.collective else None,
            where=where,
            alone=self.phase is Phase.UPDATE,
        )
        if notes is not None:
            notes[key] = _Call(kernel, temporaries)
        self._count(kernel)
        return out

    def _track_storages(self, name: str, where: Place, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Logs the storages that an operator allocated, on the device or on the host."""
        if name == "preheat::lies_on_host":
            self._move_to_host(inputs[0])
        elif name == "preheat::copy_to_device_" and id(_find_storage(inputs[0])) in self._host:
            self._host.discard(id(_find_storage(inputs[0])))  # allocated like a host tensor, but on the device
            self.follow(inputs[0])
        # Host tensors first: `follow` then skips them.
        if where == "host" or name in _TO_HOST:
            self._track_on_host(outputs)
        for t in outputs:
            self.follow(t)

    def _find_temporaries(
        self, operator: _Operator, where: Place, inputs: list[Tensor], written: list[Tensor]
    ) -> tuple[tuple[int, ...], int]:
        """Returns the sizes of memory that torch takes only while an operator runs, and the bytes of cast operands."""
        sizes: tuple[int, ...] = ()
        # One partial sum per chunk; every tensor gets as many as the largest.
        if operator.name == "aten::_foreach_norm" and not self.casts:
            sizes = (4 * len(inputs) * max(-(-t.numel() // _CHUNK) for t in inputs),)
        elif operator.name == "preheat::causal_attention_backward":
            sizes = (scratch_bytes(inputs[1]),)
        if self.casts and operator.pointwise and where == "device" and (cast := _cast_bytes(inputs, written)):
            return (*sizes, cast), cast
        return sizes, 0

    def _count_traffic(
        self, where: Place, inputs: list[Tensor], outputs: list[Tensor], written: list[Tensor]
    ) -> tuple[int, int]:
        """Returns the bytes that an operator reads and writes."""
        if where in ("out", "back"):  # the bytes of the host's side cross the link
            link = sum([_count_bytes_moved(t) for t in (*inputs, *outputs) if id(_find_storage(t)) in self._host])
            return link, link
        # Every operand is read once and every result written once: caches between kernels are not modelled.
        return sum([_count_bytes_moved(t) for t in inputs]), sum([_count_bytes_moved(t) for t in written])

    def _compute_dtype(self, name: str, flops: int, inputs: list[Tensor], outputs: list[Tensor]) -> str:
        """Returns the dtype in which an operator computes."""
        # The first argument of addmm may have a wider dtype.
        factors = inputs[1:] if flops and name in _ADDING else inputs
        floats = [t.dtype for t in factors if t.dtype in _DTYPES] or [t.dtype for t in outputs if t.dtype in _DTYPES]
        dtype = _DTYPES[floats[0]] if floats else "int"
        # Fake tensors do not show torch's switch for TF32, so it is applied here.
        return "tf32" if self.tf32 and flops and dtype == "fp32" and name in _BLAS else dtype

    def _count(self, kernel: Kernel) -> None:
        """Counts a call of a kernel."""
        self.kernels[kernel] += 1
        if self.summing:
            self.sums[kernel] += 1
        # Only FLOPs inside of an autograd node can be recomputation; MFU excludes them.
        if not kernel.flops or torch._C._current_autograd_node() is None:
            return
        # Backward runs without grad mode, so a kernel with grad mode under an autograd node is recomputation.
        if torch.is_grad_enabled() or kernel.operator in _FORWARD:
            self.recomputed += kernel.flops


def _describe_operator(func: OpOverload) -> _Operator:
    # By id, because torch computes the hash of an operator in Python.
    if (operator := _operators.get(id(func))) is None:
        operator = _operators[id(func)] = _describe(func)
    return operator


def _describe(func: OpOverload) -> _Operator:
    name, written = func._schema.name, enumerate(func._schema.arguments)
    simple = func.namespace in ("aten", "preheat") and name not in _LINK and name not in _TO_HOST
    return _Operator(
        func,
        name,
        func.is_view or name in _FREE,
        simple and not name.endswith("::split_with_sizes_copy"),
        tuple((n, declared.name) for n, declared in written if declared.alias_info and declared.alias_info.is_write),
        name.endswith("::split_with_sizes_copy"),
        _STREAMS.get(name.rpartition("::")[2]),
        func.namespace in ("c10d", "_c10d_functional"),
        _read(func),
        torch.Tag.pointwise in func.tags and name not in _CASTS,
        find_formula(func),
    )


def _read(func: OpOverload) -> tuple[int, ...] | None:
    """Returns the indices of the arguments that a collective, or a copy of FSDP2 around one, reads; None: all.

    c10d passes buffers for results first, and FSDP2 as `out`; FSDP2's copy into a gather reads the shards only.
    """
    operator = func._schema.name.rpartition("::")[2]
    if operator == "all_gather_copy_in":
        return (0,)
    if func.namespace != "c10d" and (func.namespace == "aten" or operator not in _COPIES):
        return None
    arguments = enumerate(func._schema.arguments)
    return tuple(n for n, a in arguments if not a.kwarg_only and not (n == 0 and a.name.startswith("output")))


_COPIES = ("split_with_sizes_copy", "chunk_cat")  # FSDP2's own, around its collectives
_operators: dict[int, _Operator] = {}  # by the id of the operator
_DEVICE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_RANGES = (  # of torch's profiler
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
_CHUNK = 1 << 16
"""Elements per block of torch's foreach kernels (kChunkSize of MultiTensorApply.cuh)."""
# FSDP2 operators whose outputs are allocated on a side stream.
_GATHER = "gather"
_STREAMS = {"all_gather_copy_in": _GATHER, "_reduce_scatter_base_": "reduce"}
_FREE = {
    "aten::_unsafe_view",
    "aten::detach",
    "aten::alias",
    "aten::_local_scalar_dense",
    "prim::device",
    "aten::set_data",
}
_BLAS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_"}
_ADDING = {"aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_"}
_CASTS = {"aten::copy_", "aten::_to_copy"}  # the output is the cast
# Forward-only custom operators, which torch always runs without grad mode.
_FORWARD = {"preheat::causal_attention", "preheat::grouped_linear", "preheat::varlen_attention"}
_LINK: dict[str, Place] = {
    "preheat::to_host": "out",
    "preheat::copy_to_host_": "out",
    "preheat::lies_on_host": "out",
    "preheat::copy_to_device_": "back",
}
_TO_HOST = {"preheat::to_host", "preheat::host_zeros"}
_UNINITIALIZED = {
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
    "aten::empty.memory_format",
}


def _cast_bytes(inputs: Iterable[Tensor], written: Iterable[Tensor]) -> int:
    """Returns the bytes of operands and results that are cast to or from the compute dtype; 0-dim tensors are free."""
    floats = [t for t in inputs if t.dtype.is_floating_point and t.ndim]
    if len({t.dtype for t in floats}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (t.dtype for t in floats))
    others = [t for t in (*floats, *written) if t.dtype.is_floating_point and t.dtype != common]
    # At most the elements of the storage, because a broadcast operand is cast before it is expanded.
    return sum(min(t.numel(), _find_storage(t).nbytes() // t.element_size()) * common.itemsize for t in others)


def _is_dense(t: Tensor) -> bool:
    """True if no two elements share memory, so that the size of the storage does not matter to `_count_bytes_moved`."""
    extent = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        extent += (size - 1) * stride
    # A smaller storage is that of gathered weights, resized to nothing while nobody reads them.
    return t.numel() <= extent and t.numel() * t.element_size() <= _find_storage(t).nbytes()


def _count_bytes_moved(t: Tensor) -> int:
    """Returns the bytes moved by reading or writing a tensor; a broadcast operand counts its own storage only."""
    return min(t.numel() * t.element_size(), int(_find_storage(t).nbytes()))
