"""The dry run: the recipe's own build and step under fake tensors, every allocation and operator written down.

Nothing is declared by techniques: what is seen here is what the program does. Tensors are fake (shapes without data), so a
model of any size is observed on any machine in seconds.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from preheat.data.kinds import examples_of
from preheat.engine.build import build, world_of
from preheat.engine.step import forward, gradients, transform, update
from preheat.recipe import Recipe
from preheat.technique import DATA, Batch, Build, Device, MaskSpec, Shape, Slot
from preheat.technique.mesh import pretended

__all__ = ["CATEGORIES", "Kernel", "Observation", "Recorder", "observe"]

Phase = Literal["load", "forward", "backward", "update", "evaluation"]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class Kernel:
    """One kind of operator call: what it computes and moves. Equal calls are counted, not listed."""

    operator: str
    dtype: str
    flops: int
    bytes_read: int
    bytes_written: int
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensor arguments."""
    fresh: int
    """Bytes of newly allocated results."""
    transposed: tuple[bool, ...] = ()
    """For matrix products: which operands are read across their rows."""


@dataclass
class Observation:
    """What one optimizer step was seen to need.

    Attributes:
        peak: {phase: bytes} the most that was alive in each phase.
        categories: {phase: {category: bytes}} at that phase's peak.
        kernels: how often each kernel runs in one optimizer step, all micro-batches included.
        flops: by dtype, of one optimizer step.
        model_flops: of one optimizer step without what activation checkpointing computes again.
        parameters, trained: number of elements.
        tokens: tokens of one optimizer step.
        log: every allocation and release, in order: (block, bytes made or -bytes freed, phase).
        slots: who owns what; changes: what each technique did.
    """

    peak: dict[str, int]
    categories: dict[str, dict[str, int]]
    kernels: Counter[Kernel]
    flops: dict[str, int]
    model_flops: int
    parameters: int
    trained: int
    tokens: int
    log: list[tuple[int, int, Phase]] = field(default_factory=list)
    slots: dict[str, str] = field(default_factory=dict)
    changes: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def peak_phase(self) -> str:
        return max(self.peak, key=lambda phase: self.peak[phase])


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def _attention_flops(q: Any, k: Any, v: Any) -> int:
    """Of one forward pass as if every token saw all others (as torch's own formulas count): 4 rows heads n m head_dim."""
    rows, heads, n, width = q
    return int(2 * rows * heads * n * k[2] * (width + v[3]))


def _flops(operator: Any, args: Any, out: Any) -> int:
    from torch.utils.flop_counter import flop_registry

    packet = operator._overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch has no formula for it
        return _attention_flops(args[0].shape, args[1].shape, args[2].shape)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_flops(args[1].shape, args[2].shape, args[3].shape) * 5 // 2
    # torch lists no in-place products
    packet = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}.get(packet, packet)
    formula = flop_registry.get(packet)
    return int(formula(*args, out_val=out)) if formula is not None else 0


def _storage(t: Tensor) -> Any:
    return t.untyped_storage()


class Recorder(TorchDispatchMode):
    """Writes down allocations, frees and kernels of everything that runs under it.

    Storages are followed by weak reference and sizes are rounded up to what the device's allocator hands out.
    """

    def __init__(self, rounding: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = rounding
        self.phase: Phase = "load"
        self.log: list[tuple[int, int, Phase]] = []  # (storage's number, bytes: positive when made, negative when freed, phase)
        self.kernels: Counter[Kernel] = Counter()
        self.recomputed = 0
        self._numbers: dict[int, int] = {}  # id of a living storage -> its number in the log
        self._made = 0
        self._host: set[int] = set()  # ids of living storages in the host's memory, of which the device knows nothing

    def number(self, t: Tensor) -> int | None:
        """The log's number of a tensor's storage, if it was made under this recorder and lives."""
        return self._numbers.get(id(_storage(t)))

    def follow(self, t: Tensor) -> int:
        """Enters a tensor's storage into the log; returns the bytes that are new."""
        storage = _storage(t)
        if id(storage) in self._numbers or id(storage) in self._host or t.device.type == "meta":
            return 0
        size = -(-storage.nbytes() // self.rounding) * self.rounding
        number = self._made
        self._made += 1
        self._numbers[id(storage)] = number
        self.log.append((number, size, self._phase()))

        def freed(key: int = id(storage), number: int = number, size: int = size) -> None:
            self._numbers.pop(key, None)
            self.log.append((number, -size, self._phase()))

        weakref.finalize(storage, freed)
        return int(size)

    def _on_host(self, made: list[Tensor]) -> None:
        """What operators made on the host, or of tensors that all lie there."""
        for storage in {id(s): s for s in map(_storage, made) if id(s) not in self._numbers}.values():
            if id(storage) not in self._host:
                self._host.add(id(storage))
                weakref.finalize(storage, self._host.discard, id(storage))

    def _phase(self) -> Phase:
        if self.phase == "forward" and torch._C._current_autograd_node() is not None:
            return "backward"
        return self.phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func._schema.name in _FREE:
            return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if func._schema.name in _TO_HOST or (inputs and all(id(_storage(t)) in self._host for t in inputs)):
            self._on_host(outputs)
        fresh = sum(self.follow(t) for t in outputs)
        if func._schema.name in _EMPTY:
            return out
        written = outputs or [
            a
            for a, arg in zip(args, func._schema.arguments, strict=False)
            if isinstance(a, Tensor) and arg.alias_info and arg.alias_info.is_write
        ]
        if not outputs:  # foreach and fused operators write into lists
            written = [
                t
                for a, arg in zip(args, func._schema.arguments, strict=False)
                if arg.alias_info and arg.alias_info.is_write
                for t in tree_leaves(a)
                if isinstance(t, Tensor)
            ]
        flops = _flops(func, args, out)
        floats = [t.dtype for t in inputs if t.dtype in _DTYPES] or [t.dtype for t in outputs if t.dtype in _DTYPES]
        kernel = Kernel(
            operator=func._schema.name.removeprefix("aten::"),
            dtype=_DTYPES.get(floats[0], "int") if floats else "int",
            flops=flops,
            bytes_read=sum(_moved(t) for t in inputs),
            bytes_written=sum(_moved(t) for t in written),
            shapes=tuple(tuple(t.shape) for t in inputs[:4]),
            fresh=fresh,
            transposed=tuple(t.ndim >= 2 and t.stride(-1) != 1 for t in inputs[:3]) if flops else (),
        )
        self.kernels[kernel] += 1
        again = torch.is_grad_enabled() or func._schema.name in _FORWARD
        if flops and torch._C._current_autograd_node() is not None and again:
            self.recomputed += flops  # backward itself runs without grad mode: this is checkpointing's second forward
        return out


_FREE = {"aten::_unsafe_view", "aten::detach", "aten::alias", "aten::_local_scalar_dense", "prim::device", "aten::set_data"}
_FORWARD = {"preheat::grouped_linear"}  # operators of a forward pass alone, which torch runs without grad mode always
_TO_HOST = {"preheat::to_host", "preheat::host_zeros"}
_EMPTY = {
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
    "aten::empty.memory_format",
}


def _moved(t: Tensor) -> int:
    """Bytes that reading or writing a tensor moves; a broadcast operand counts its own storage only."""
    return min(t.numel() * t.element_size(), int(_storage(t).nbytes()))


def _fake_batch(recipe: Recipe, rows: int) -> Batch:
    """A micro-batch of the recipe's shape, each row one example; contents do not matter to a dry run."""
    length, kind = recipe.batch.length, examples_of(recipe).kind
    tokens, labels, positions = (torch.empty(rows, length, dtype=torch.int64) for _ in range(3))
    if kind == "pairs":
        mask = MaskSpec(documents=((length - length // 2, length // 2),) * rows)
        return Batch(tokens, labels, positions, mask, rows, tuple(range(rows)), group=2)
    if kind == "liked":
        mask = MaskSpec(documents=((length,),) * rows)
        return Batch(tokens, labels, positions, mask, rows, tuple(range(rows)), liked=((1,),) * rows)
    return Batch(tokens, labels, positions, MaskSpec(), rows * length, tuple(range(rows)))


def observe(recipe: Recipe, *, vocabulary: int | None, device: Device, world: int | None = None) -> Observation:
    """Dry-runs the recipe's build and one optimizer step, and an evaluation, as the first of its devices does them.

    Args:
        vocabulary: pieces of the tokenizer.
        device: what to observe for. Fake tensors live on the CPU whatever it is; only kernels' choices follow it.
        world: devices; as many as the recipe names when not given.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    with pretended(world or world_of(recipe)):
        return _observe(recipe, vocabulary, device)


def _observe(recipe: Recipe, vocabulary: int | None, device: Device) -> Observation:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(rounding=512 if device.kind == "cuda" else 64)
    # bodies of `with dry:` in build: allocations of parameters and optimizer state are seen too
    made = build(recipe, vocabulary=vocabulary, device=device, dry=_Both(mode, recorder))
    with mode, recorder:
        known = _known(made, recorder)
        shape: Shape = made.slot(Slot.BATCH_SHAPE)(1.0)  # of the end of the run: the one that needs the most memory
        rows = -(-shape.rows // made.mesh.size(*DATA))
        micros = [shape.micro] * (rows // shape.micro) + ([rows % shape.micro] if rows % shape.micro else [])
        # The first micro-batch makes the gradients, the second adds to them, and every later one is like the third.
        recorder.kernels.clear()
        recorder.phase = "forward"
        held = [_fake_batch(recipe, rows) for rows in micros]  # the host holds the whole global batch
        batches = held[:3]
        marks: list[tuple[Counter[Kernel], int]] = []
        looks: list[Counter[Kernel]] = []  # a first pass over all micro-batches takes them by number

        def marked(batches: list[Batch]) -> Iterator[Batch]:
            for batch in batches:
                marks.append((Counter(recorder.kernels), recorder.recomputed))
                yield batch

        gradients(made, _Sequence(marked, batches, looks, recorder.kernels))
        per_micro = recorder.kernels - marks[-1][0]
        per_recomputed = recorder.recomputed - marks[-1][1]
        recorder.kernels.update({k: n * (len(micros) - len(batches)) for k, n in per_micro.items()})
        recorder.recomputed += per_recomputed * (len(micros) - len(batches))
        if looks:  # what a first pass computes is computed again
            more = Counter({k: n * (len(micros) - len(batches)) for k, n in (looks[-1] - looks[-2]).items()})
            recorder.kernels.update(more)
            recorder.recomputed += sum(k.flops * n for k, n in (marks[0][0] - looks[0] + more).items())
        grads = {recorder.number(p.grad) for _, p in made.parameters() if p.grad is not None}
        recorder.phase = "update"
        update(made, 1e-3)
        kernels = Counter(recorder.kernels)
        del held
        recorder.phase = "evaluation"
        for part in made.trained:
            part.eval()
        with torch.no_grad():
            forward(made, transform(made, _fake_batch(recipe, shape.micro)))
    peak, categories = _replay(recorder.log, known, grads)
    flops: dict[str, int] = defaultdict(int)
    for kernel, count in kernels.items():
        flops[kernel.dtype] += kernel.flops * count
    return Observation(
        peak=peak,
        categories=categories,
        kernels=kernels,
        flops={k: v for k, v in flops.items() if v},
        model_flops=sum(flops.values()) - recorder.recomputed,
        parameters=sum(p.numel() for part in made.trained for p in part.parameters()),
        trained=sum(p.numel() for _, p in made.parameters()),
        tokens=shape.rows * shape.length,
        log=recorder.log,
        slots=made.slots(),
        changes=made.changes,
    )


class _Both:
    """Fake tensors, recorded: one context out of two."""

    def __init__(self, mode: Any, recorder: Recorder):
        self.mode, self.recorder = mode, recorder

    def __enter__(self) -> None:
        self.mode.__enter__()
        self.recorder.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self.recorder.__exit__(*error)  # type: ignore[no-untyped-call]
        self.mode.__exit__(*error)


class _Sequence(Sequence[Batch]):
    """Batches that tell when each is taken."""

    def __init__(
        self,
        taken: Callable[[list[Batch]], Iterator[Batch]],
        batches: list[Batch],
        looks: list[Counter[Kernel]],
        kernels: Counter[Kernel],
    ):
        self._taken, self._batches, self._looks, self._kernels = taken, batches, looks, kernels
        self._counted = False

    def __getitem__(self, index: Any) -> Any:
        self._looks.append(Counter(self._kernels))
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        if not self._counted:  # `gradients` first sums the weights
            self._counted = True
            return iter(self._batches)
        return self._taken(self._batches)


def _known(made: Build, recorder: Recorder) -> dict[int, str]:
    """Category of what stands before the first step: number of the storage -> category."""
    known: dict[int, str] = {}
    tensors: Iterable[tuple[str, Tensor]] = [
        *(("parameters", t) for parts in made.parts.values() for part in parts for t in (*part.parameters(), *part.buffers())),
        *(("optimizer", t) for state in made.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)),
    ]
    for category, t in tensors:
        number = recorder.number(t)
        if number is not None:
            known[number] = category
    return known


def _replay(
    log: list[tuple[int, int, Phase]], known: dict[int, str], grads: set[int | None]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Peak of each phase and the categories at that moment."""
    alive: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    category: dict[int, str] = {}
    peak: dict[str, int] = {}
    at_peak: dict[str, dict[str, int]] = {}
    for number, size, phase in log:
        if size >= 0:
            category[number] = known.get(number) or (
                "gradients" if number in grads else "activations" if phase in ("forward", "evaluation") else "temporary"
            )
        alive[category[number]] += size
        total = sum(alive.values())
        if total > peak.get(phase, -1):
            peak[phase] = total
            at_peak[phase] = dict(alive)
    return peak, at_peak
