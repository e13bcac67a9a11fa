"""Calibration: measures the throughput of this machine at the operators of training, once, in about ten seconds.

A time is the median of repeated runs on random data, after a warm-up run. If other processes use the same cores
meanwhile, threads at a barrier wait whole time slices for one that is not scheduled: runs that waited do not count
(`Stopwatch`), but caches and memory are shared all the same, which `Rates.contended` records. So that this takes no
minutes, the sizes that are not reached in `Grid.limit` are left out: plans interpolate between those that are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from preheat.cache_folder import require_storable
from preheat.core import Device, MachineUse
from preheat.core.units import format_memory
from preheat.errors import DoesNotFit, RunError
from preheat.hardware.child_processes import describe_exit, last_error_line, tie_to_parent
from preheat.hardware.cpu_allocator import install_heap
from preheat.hardware.gpu_memory import OTHERS, other_processes_bytes
from preheat.hardware.host_time import HostTime, measure_host_time
from preheat.hardware.machine_use import UseMeter, join_uses
from preheat.hardware.plausibility import doubt_of
from preheat.hardware.rates import (
    MOVERS,
    AttentionRate,
    Layout,
    MatrixRate,
    MovedRate,
    Rates,
    calibration_path,
    describe_unusable_rates,
    load,
    parse,
)
from preheat.hardware.tf32 import allow_tf32, has_tf32
from preheat.hardware.timing import Random, Stopwatch, limit_threads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from preheat.core.json_types import JsonObject

__all__ = [
    "FULL",
    "GPU",
    "Grid",
    "Progress",
    "Rates",
    "calibrate",
    "grid_of",
    "rates",
    "remeasure_rates",
    "rates_for",
    "limit_to_free_memory",
]

_Result = TypeVar("_Result")

Progress = Callable[[str, float], None]
"""Called with the name of the next measurement and the progress (0 to 1)."""


@dataclass(frozen=True)
class Grid:
    """Sizes to measure at; the defaults cover the training of models of 5M to 1B parameters."""

    rows: tuple[int, ...] = (64, 256, 1024, 4096)
    """Rows of a matmul: tokens of a micro-batch, or of a chunk of the loss."""
    layers: tuple[tuple[int, int], ...] = (
        (128, 128),
        (256, 256),
        (288, 768),
        (768, 768),
        (768, 3072),
        (512, 4096),
        (288, 32000),
        (768, 32000),
        (512, 8),
        (8, 512),
    )
    """(inputs, outputs) of a linear layer; the last two are those of LoRA adapters."""
    products: tuple[int, ...] = (2048, 4096)
    """Sizes of the square matmuls for the peak rate."""
    elements: tuple[int, ...] = (2**16, 2**20, 2**22, 3 * 2**21, 2**24)
    """Elements of the tensors of memory-bound operators: in a core's cache, in the shared cache, and in memory."""
    width: int = 512
    vocabulary: int = 32000
    attention: tuple[tuple[int, int, int, int], ...] = ((8, 6, 256, 48), (2, 12, 1024, 64))
    """(rows, heads, length, head_dim)."""
    parameters: int = 2**23
    """Parameters of the AdamW step."""
    host: bool = True
    """Measure the host's time per operator (`host_time`)."""
    large: int = 2**27
    """Bytes of the copy for the bandwidth."""
    most: int = 5 * 2**29
    """Limit in bytes of a matmul's operands and result; larger ones are extrapolated from the layer with fewer rows."""
    dtypes: tuple[str, ...] = ("bf16", "fp32", "fp16", "tf32")
    """Dtypes to measure; fp16 on CUDA only, tf32 if the device has it, of which matmuls alone are measured."""
    operators: tuple[str, ...] = ()
    """Memory-bound operators to measure, of `MOVERS`; empty: all."""
    shapes: tuple[tuple[int, int, int], ...] = ()
    """(rows, inputs, outputs) of the matmuls; empty: all `rows` of all `layers`."""
    limit: float = 40.0
    """Seconds in which to measure all sizes beside other processes, split among the parts. A part that takes longer
    no longer waits for calls without preemption, and leaves out the sizes that can be interpolated."""
    strict: bool = False
    """Leave out what is not reached in `limit` also if no other process is the reason."""

    def find_missing(self, known: Rates) -> Grid | None:
        """Returns the sizes that `known` lacks; None if it has all.

        Sizes of memory-bound operators are those of `known` if it has as large ones.
        """
        dtypes, plain = self.dtypes, [dtype for dtype in self.dtypes if dtype != "tf32"]
        shapes = tuple(
            shape for shape in self.shapes if not all(known.holds(dtype, "forward", *shape) for dtype in dtypes)
        )
        lengths = {(row.dtype, row.length, row.heads, row.head_dim) for row in known.attention}
        attention = tuple(at for at in self.attention if any((d, at[2], at[1], at[3]) not in lengths for d in plain))
        moved: dict[tuple[str, str], int] = {}
        for row in known.moved:
            moved[row.dtype, row.operator] = max(row.bytes, moved.get((row.dtype, row.operator), 0))
        # A copy reads and writes each element; rows of another width round the number of elements.
        least = {dtype: 0.9 * 2 * max(self.elements, default=0) * _BYTES[dtype] for dtype in plain}
        reached = all(moved.get((dtype, "copy"), 0) >= least[dtype] for dtype in plain)
        operators = self.operators or tuple(operator for operator in MOVERS if not operator.startswith("to_"))
        lacking = tuple(o for o in operators if not reached or any((dtype, o) not in moved for dtype in plain))
        rest = dataclasses.replace(
            self,
            shapes=shapes,
            layers=() if self.shapes else self.layers,
            attention=attention,
            operators=lacking if self.operators else (),
            elements=self.elements if lacking else (),
            products=() if all(dtype in known.peak_matrix_rate for dtype in dtypes) else self.products,
            parameters=0 if all(dtype in known.adamw for dtype in plain) else self.parameters,
            host=self.host and known.host_operator is None,
        )
        lacks = shapes or attention or rest.elements or rest.products or rest.parameters or rest.host
        return rest if lacks else None

    def rows_by_layer(self) -> dict[tuple[int, int], list[int]]:
        """Returns the rows to measure for each (inputs, outputs)."""
        layers: dict[tuple[int, int], list[int]] = {}
        for n, k, m in self.shapes or [(n, k, m) for k, m in self.layers for n in self.rows]:
            layers.setdefault((k, m), []).append(n)
        return layers


_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FULL = Grid()
GPU = Grid(
    rows=(256, 1024, 4096, 8192, 16384),
    layers=(
        # Llama 3.2 1B: hidden size 2,048, 8,192 channels.
        (2048, 2048),
        (2048, 8192),
        (8192, 2048),
        # Llama 3 8B: key-value and other projections, 14,336 channels; heads of Llama 2 and 3; LoRA of rank 16.
        (4096, 1024),
        (4096, 4096),
        (4096, 14336),
        (14336, 4096),
        (4096, 32000),
        (4096, 128256),
        (4096, 16),
        (16, 4096),
    ),
    products=(4096, 8192),
    elements=(2**16, 2**20, 2**22, 2**24, 2**26),
    width=4096,
    vocabulary=128256,
    # 8,192 tokens each, except for the longest.
    attention=((8, 32, 1024, 128), (4, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 8192, 128), (1, 32, 16384, 128)),
    parameters=2**26,
    large=2**30,
)
"""Sizes of models of 1B to 8B parameters, with micro-batches and sequences of up to 16k tokens."""
_SMALL_GPU = 20 * 2**30
"""Bytes of GPU memory below which the largest tensors, about ten at a time, might not fit next to a desktop session."""
_TINY_GPU = 8 * 2**30
"""Bytes of GPU memory, of a slice or beside other processes, for the smallest sizes."""


def grid_of(device: Device) -> Grid:
    """Returns the sizes to measure on a device.

    Example:
        >>> grid_of(Device("cpu", "a processor", 2**34)) == FULL
        True
    """
    if device.kind == "cpu":
        return FULL
    if device.memory >= _SMALL_GPU:
        return GPU
    # The layers keep their shapes: `most` leaves out the matmuls whose operands are too large.
    small = dataclasses.replace(GPU, elements=GPU.elements[:-1], parameters=2**24, large=2**28, most=2**29)
    if device.memory >= _TINY_GPU:
        return small
    # A table of the whole vocabulary and its gradient would take 4 GiB.
    layers = tuple(layer for layer in GPU.layers if max(layer) <= 2**15)
    return dataclasses.replace(small, layers=layers, vocabulary=2**14, elements=GPU.elements[:-2], most=2**27)


_log = logging.getLogger(__name__)
_LONG_PART = 0.25
"""Seconds in which a part is judged by itself: a moment's work of another process is much of a shorter one, and the
kernel counts in ticks of 10 ms."""
_FIRST, _PATIENCE = 256, 4.0
"""Size of the first square matmul, and the seconds that the next one may take at its rate."""
_TOO_LONG = 0.06
"""Seconds: matmuls expected to take longer are extrapolated from the layer with fewer rows."""
_COLD_BYTES = 64 << 20
"""Bytes of operands and results that a measurement cycles through.

In a step, tensors are not in cache, as they would be if an operator were repeated on the same ones. On two cores with 4
MiB of own cache and a share of 105 MiB, matmuls take 1.3 times as long with cold operands, memory-bound operators twice
as long.
"""
_FILLING = 0.03
"""Seconds in which results are allocated before a measurement; 17 calls on operands of 4 MiB take 10 to 20 ms."""
_TURNS = 16
"""Limit of operand sets: small tensors of a step are in cache, because they were just produced."""


def calibrate(device: Device, threads: int, progress: Progress | None = None, *, grid: Grid | None = None) -> Rates:
    """Measures this machine in this process; restores the random generators and the number of threads.

    Args:
        device: device to measure, from `probe`.
        threads: CPU threads to use.
        progress: progress callback.
        grid: sizes to measure at; by default those of the device.
    """
    import torch

    grid = grid or grid_of(limit_to_free_memory(device))
    tell = progress or (lambda what, done: None)
    start = time.perf_counter()
    cuda = device.kind == "cuda"
    # A GPU is measured from one thread of the host.
    parts = _Parts(1 if cuda else threads)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32} | ({"fp16": torch.float16} if cuda else {})
    dtypes = {name: dtype for name, dtype in dtypes.items() if name in grid.dtypes}
    seconds = Stopwatch(cuda, strict=grid.strict)

    def start_worker(what: str, done: float, until: float) -> None:
        tell(what, done)
        seconds.end = start + grid.limit * until

    random = Random(device.kind)
    matrix: list[MatrixRate] = []
    moved: list[MovedRate] = []
    attention: list[AttentionRate] = []
    peak: dict[str, float] = {}
    adamw: dict[str, float] = {}
    # Progress: 5 % for the memory measurements, the rest in equal parts by dtype.
    share = 0.95 / max(len(dtypes), 1)
    with limit_threads(threads):
        start_worker("memory", 0.0, 0.05)
        # fp32, so a quarter as many elements as bytes; a copy reads and writes each byte, hence the factor 2 below.
        source = random((grid.large // 4,), torch.float32)
        target = torch.empty_like(source)
        # Eight elements cost nothing to add, so this is the overhead of any operator.
        tiny = random((8,), torch.float32)
        # 1 MiB in fp32. Multiplying by ones in place keeps the values finite; two reads and one write, hence the 3.
        piece, other = random((2**18,), torch.float32), torch.ones(2**18, device=device.kind)
        bandwidth, (to_host, to_device), launch, near = parts.measure(
            lambda: (
                2 * grid.large / seconds(lambda: target.copy_(source)),
                _measure_host_link(seconds, source) if cuda else (None, None),
                seconds(lambda: tiny + tiny),
                None if cuda else 3 * piece.nbytes / seconds(lambda: piece.mul_(other)),
            )
        )
        for index, (name, dtype) in enumerate(dtypes.items()):
            done = 0.05 + share * index
            start_worker(f"matmuls in {name}", done, done + share / 2)
            peak[name] = parts.measure(partial(_measure_peak, seconds, random, dtype, grid)) if grid.products else 0.0
            layers = parts.measure(partial(_measure_matmuls, seconds, random, name, dtype, grid))
            # A layer can be faster than the square matmuls, and MFU, which divides by the peak, must not exceed 1.
            peak[name] = max([peak[name], *(rate.flops for rate in layers)])
            matrix += layers
            start_worker(f"operators in {name}", done + share / 2, done + share)
            moved += parts.measure(partial(_measure_movers, seconds, random, name, dtype, grid))
            attention += parts.measure(partial(_measure_attention, seconds, random, name, dtype, grid))
            if grid.parameters:
                adamw[name] = parts.measure(partial(_measure_adamw, seconds, random, dtype, grid))
        host: HostTime | None = None
        if grid.host:
            # After AdamW, whose first step makes torch import a part of itself for seconds.
            tell("the host", 0.97)
            host = parts.measure(lambda: measure_host_time(device.kind))
        # TF32 is a mode of fp32 matmuls, so it needs no rates of other operators, attention or AdamW.
        if "tf32" in grid.dtypes and has_tf32(device):
            tell("matmuls in tf32", 0.98)
            # The stopwatch is only the owner: if a measurement raises, its end restores torch's setting.
            end = allow_tf32(seconds)
            peak["tf32"] = _measure_peak(seconds, random, torch.float32, grid) if grid.products else 0.0
            layers = _measure_matmuls(seconds, random, "tf32", torch.float32, grid)
            end()
            peak["tf32"] = max([peak["tf32"], *(rate.flops for rate in layers)])
            matrix += layers
    tell("done", 1.0)
    return Rates(
        hardware=device.name,
        torch=torch.__version__,
        threads=threads,
        peak_matrix_rate=peak,
        bandwidth=bandwidth,
        launch=launch,
        near=near,
        to_host=to_host,
        to_device=to_device,
        host_operator=host and host.operator,
        host_custom=host and host.custom,
        adamw=adamw,
        matrix=tuple(matrix),
        moved=tuple(moved),
        attention=tuple(attention),
        contended=parts.most_disturbed.alone is False or seconds.was_late,
        seconds=time.perf_counter() - start,
        machine=parts.most_disturbed,
        driver=device.driver,
    )


class _Parts:
    """Measures the parts of a calibration, and the use of the machine during each.

    Args:
        threads: threads that are measured.
    """

    def __init__(self, threads: int):
        self.threads, self._uses = threads, list[MachineUse]()

    def measure(self, part: Callable[[], _Result]) -> _Result:
        meter = UseMeter()
        result = part()
        self._uses.append(meter.use(self.threads))
        return result

    @property
    def most_disturbed(self) -> MachineUse:
        """The use of the machine during all parts, or during the part with the most other work."""
        long = [use for use in self._uses if use.seconds >= _LONG_PART]
        return max([join_uses(self._uses), *long], key=lambda use: use.other_cores or 0.0)


def _count_turns(bytes: int) -> int:
    return min(max(1, _COLD_BYTES // bytes), _TURNS)


class _Cycle:
    """Cycles through calls and keeps as many results alive, so that neither operands nor outputs are in cache."""

    def __init__(self, calls: Sequence[Callable[[], object]]):
        self._calls, self._kept = itertools.cycle(calls), deque[object](maxlen=len(calls))
        # Allocates all memory up front, with one more: a result is freed only after the next one exists. Calls that
        # take long, or that other processes interrupt, hide an allocation.
        end = time.perf_counter() + _FILLING
        for _ in range(len(calls) + 1):
            self()
            if time.perf_counter() > end:
                break

    def __call__(self) -> None:
        # A full deque drops its oldest result, whose memory the next call gets from the allocator, as in a step.
        self._kept.append(next(self._calls)())


def _is_quiet(threads: int, watch: float = 0.5) -> bool:
    """True unless other processes use more cores than these threads leave them, in the next `watch` seconds."""
    meter = UseMeter()
    time.sleep(watch)
    return meter.use(threads).alone is not False


def _measure_host_link(seconds: Stopwatch, source: Tensor) -> tuple[float, float]:
    """Returns the bytes/s from GPU memory to pinned host memory, and back."""
    import torch

    # 256 MiB. Only copies to and from pinned memory run at the link's rate; others pass through a staging buffer.
    piece = source[: 2**26]
    host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
    to_host = piece.nbytes / seconds(lambda: host.copy_(piece, non_blocking=True))
    return to_host, piece.nbytes / seconds(lambda: piece.copy_(host, non_blocking=True))


def _measure_square_matmul(seconds: Stopwatch, random: Random, dtype: torch.dtype, size: int) -> float:
    # A matmul of two size x size matrices takes 2 size^3 FLOPs.
    a, b = random((size, size), dtype), random((size, size), dtype)
    return 2 * size**3 / seconds(lambda: a @ b, budget=0.5)


def _measure_peak(seconds: Stopwatch, random: Random, dtype: torch.dtype, grid: Grid) -> float:
    """Returns the FLOP/s of the best square matmul.

    A small one decides first if a large one would take too long (a minute in bf16 on a CPU without AVX512).
    """
    best, longest = _measure_square_matmul(seconds, random, dtype, min(_FIRST, *grid.products)), _PATIENCE
    # The small matmul underestimates the rate of large ones, hence the patience; later sizes are judged by a real
    # one.
    for size in sorted(grid.products):
        if 2 * size**3 / best < longest and not seconds.is_late():
            best, longest = max(best, _measure_square_matmul(seconds, random, dtype, size)), 0.5
    return best


def _measure_matmuls(seconds: Stopwatch, random: Random, name: str, dtype: torch.dtype, grid: Grid) -> list[MatrixRate]:
    measured: list[MatrixRate] = []
    for layer, rows in grid.rows_by_layer().items():
        if measured and seconds.strict and seconds.is_late():
            break
        measured += _measure_layers(seconds, random, name, dtype, layer, rows, grid.most)
    return measured


def _measure_layers(
    seconds: Stopwatch,
    random: Random,
    name: str,
    dtype: torch.dtype,
    layer: tuple[int, int],
    rows: Sequence[int],
    most: int,
) -> list[MatrixRate]:
    import torch

    k, m = layer
    measured = []
    # Layout -> FLOP/s with the last measured number of rows.
    last: dict[Layout, float] = {}
    # In ascending order, so that the rate with fewer rows predicts the time with more.
    for n in sorted(rows):
        flops, bytes = 2 * n * k * m, (n * k + n * m + k * m) * dtype.itemsize
        # The smallest number of rows is always measured: every layer needs a rate in every layout.
        too_long = bytes > most or all(flops / rate >= _TOO_LONG for rate in last.values())
        if last and (too_long or seconds.is_late()):
            continue
        # Input (n, k), gradient of the output (n, m) and weight (m, k), in as many copies as leave the cache.
        sets = [
            (random((n, k), dtype), random((n, m), dtype), random((m, k), dtype)) for _ in range(_count_turns(bytes))
        ]
        # Transposed views, as autograd multiplies them: BLAS has another kernel for each layout.
        factors: dict[Layout, list[tuple[Tensor, Tensor]]] = {
            "forward": [(x, w.t()) for x, _, w in sets],
            "grad_input": [(g, w) for _, g, w in sets],
            "grad_weight": [(g.t(), x) for x, g, _ in sets],
        }
        for layout, pairs in factors.items():
            if layout not in last or flops / last[layout] < _TOO_LONG:
                last[layout] = flops / seconds(_Cycle([partial(torch.matmul, a, b) for a, b in pairs]))
                measured.append(MatrixRate(name, layout, n, k, m, last[layout]))
    return measured


def _measure_movers(seconds: Stopwatch, random: Random, name: str, dtype: torch.dtype, grid: Grid) -> list[MovedRate]:
    measured: list[MovedRate] = []
    if not grid.elements:
        return measured
    table = random((grid.vocabulary, grid.width), dtype)
    # The largest tensors first, whose rate is the bandwidth of the memory, then the smallest: if time runs out, the
    # sizes between are interpolated.
    for elements in (*grid.elements[-1:], *grid.elements[:-1]):
        if measured and seconds.is_late():
            break
        # Most operators move at least an operand and a result, so twice the elements bounds the number of sets.
        sets = [
            _build_movers(random, dtype, elements, grid, table)
            for _ in range(_count_turns(2 * elements * dtype.itemsize))
        ]
        for operator, (_, moved) in sets[0].items():
            # An operator that moves more bytes leaves the cache with fewer sets.
            turns = _Cycle([calls[operator][0] for calls in sets[: _count_turns(moved)]])
            measured.append(MovedRate(operator, name, moved, moved / seconds(turns)))
    return measured


def _build_movers(
    random: Random, dtype: torch.dtype, elements: int, grid: Grid, table: Tensor
) -> dict[str, tuple[Callable[[], object], int]]:
    """Returns the calls of `MOVERS` on tensors of the given size, with the bytes that each moves."""
    import torch
    from torch.nn import functional as F

    aten = torch.ops.aten
    size = dtype.itemsize
    n = max(1, elements // grid.width)
    # (n, width): all operands together have about `elements` elements each.
    x, y = random((n, grid.width), dtype), random((n, grid.width), dtype)
    # rsqrt of a negative number is NaN.
    positive = x.abs() + 1
    out = torch.empty_like(x)
    row, column = random((grid.width,), dtype), random((n, 1), dtype)
    # Causal, because branch prediction fails on a random mask.
    later = torch.arange(grid.width, device=x.device)[None] >= grid.width // 2
    # (1, n, heads, width of a head), as a projection's output before attention.
    heads = x.view(1, -1, 4, grid.width // 4)
    left, right = x.chunk(2, dim=-1)
    left, right = left.contiguous(), right.contiguous()
    one, many = x.numel() * size, y.numel() * size
    calls: dict[str, tuple[Callable[[], object], int]] = {
        # Bytes per call: each operand that is read and each result that is written, once.
        "copy": (x.clone, 2 * one),
        "copy_": (lambda: out.copy_(x), 2 * one),
        "transpose": (lambda: heads.transpose(1, 2).contiguous(), 2 * one),
        "cat": (lambda: torch.cat((left, right), dim=-1), 2 * one),
        "zero_": (out.zero_, one),
        "add": (lambda: x + y, one + 2 * many),
        "add_": (lambda: out.add_(y), one + 2 * many),
        "mul": (lambda: x * y, one + 2 * many),
        "mul_row": (lambda: x * row, 2 * one + row.numel() * size),
        "mul_column": (lambda: x * column, 2 * one + column.numel() * size),
        "masked_fill": (lambda: x.masked_fill(later, 0.0), 2 * one + grid.width),
        "exp": (x.exp, 2 * one),
        "rsqrt": (positive.rsqrt, 2 * one),
        "silu": (lambda: F.silu(x), 2 * one),
        "silu_backward": (lambda: aten.silu_backward(y, x), 3 * one),
        "gelu": (lambda: F.gelu(x, approximate="tanh"), 2 * one),
        "gelu_backward": (lambda: aten.gelu_backward(y, x, approximate="tanh"), 3 * one),
        "mean": (lambda: x.mean(dim=-1, keepdim=True), one + n * size),
        "sum_rows": (lambda: x.sum(dim=0), one + grid.width * size),
        "norm": (lambda: torch.linalg.vector_norm(x), one),
    }
    # A cast reads one dtype and writes the other, which has half or twice the bytes.
    if dtype is torch.float32:
        calls["to_bf16"] = (lambda: x.to(torch.bfloat16), one + one // 2)
    else:
        calls["to_fp32"] = (lambda: x.to(torch.float32), 3 * one)
    # (tokens, vocabulary): the loss works on few rows of this length.
    logits = random((max(1, elements // grid.vocabulary), grid.vocabulary), dtype)
    logs = logits.log_softmax(dim=-1)
    nbytes = logits.numel() * size
    calls["softmax"] = (lambda: logits.softmax(dim=-1), 2 * nbytes)
    # Repeated softmax of probabilities stays finite, and its time does not depend on the values.
    chances = logits.softmax(dim=-1)
    calls["softmax_"] = (lambda: torch.softmax(chances, dim=-1, out=chances), 2 * nbytes)
    calls["amax"] = (lambda: logits.amax(dim=-1), nbytes)
    calls["log_softmax"] = (lambda: logits.log_softmax(dim=-1), 2 * nbytes)
    calls["log_softmax_backward"] = (lambda: aten._log_softmax_backward_data(logits, logs, -1, dtype), 3 * nbytes)
    at = random.rows(n, grid.vocabulary)
    calls["embedding"] = (lambda: F.embedding(at, table), 2 * one)
    calls["embedding_backward"] = (
        # -1: no padding index; False: no scaling by frequency.
        lambda: aten.embedding_dense_backward(y, at, grid.vocabulary, -1, False),
        one + table.numel() * size,
    )
    # A permutation, because index_copy_ has no defined result for repeated rows.
    order = random.rows(n, n)
    bits = torch.empty(elements * size // 8, dtype=torch.int64, device=x.device)
    # A generator of its own leaves the caller's random state alone.
    own = torch.Generator(device=x.device)
    calls["random_"] = (lambda: bits.random_(-(2**63), None, generator=own), bits.numel() * 8)
    calls["index_copy_"] = (lambda: out.index_copy_(0, order, x), 2 * one)
    # 65,536 random indices, repeated: drawing every index would take longer than the measurement.
    few, places = random((256,), dtype), random.rows(2**16, 256).to(torch.int32).repeat(-(-n * grid.width // 2**16))
    calls["look_up"] = (lambda: few.index_select(0, places), places.numel() * (4 + size))
    flag = torch.ones((), dtype=torch.bool, device=x.device)
    calls["where"] = (lambda: torch.where(flag, x, y), 3 * one)
    return {name: call for name, call in calls.items() if name in grid.operators} if grid.operators else calls


def _measure_attention(
    seconds: Stopwatch, random: Random, name: str, dtype: torch.dtype, grid: Grid
) -> list[AttentionRate]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    measured: list[AttentionRate] = []
    for rows, heads, length, head_dim in grid.attention:
        if measured and seconds.is_late():
            break
        q, k, v = (random((rows, heads, length, head_dim), dtype).requires_grad_() for _ in range(3))
        gradient = random((rows, heads, length, head_dim), dtype)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        # Forward is 2 matmuls of 2 rows heads length^2 head_dim FLOPs, backward 5: it recomputes the scores.
        square = rows * heads * length**2 * head_dim
        forward = seconds(partial(scaled_dot_product_attention, q, k, v, is_causal=True))
        # The retained graph can run backward repeatedly.
        backward = seconds(partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True))
        measured.append(AttentionRate(name, "forward", length, heads, head_dim, 4 * square / forward))
        measured.append(AttentionRate(name, "backward", length, heads, head_dim, 10 * square / backward))
    return measured


def _measure_adamw(seconds: Stopwatch, random: Random, dtype: torch.dtype, grid: Grid) -> float:
    """Returns the seconds per parameter of one step, with gradients and both moments in the parameters' dtype."""
    import torch

    parameters = [torch.nn.Parameter(random((grid.parameters // 8,), dtype)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = random(tuple(parameter.shape), dtype)
    # Fused is the variant that the planner predicts with `Rates.adamw`.
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return seconds(optimizer.step, budget=0.1) / (grid.parameters // 8 * 8)


def rates(
    device: Device,
    threads: int,
    measure: bool = True,
    progress: Progress | None = None,
    *,
    grid: Grid | None = None,
    again: bool = True,
) -> Rates:
    """Returns the stored rates of this machine; measures and stores them first if there are none.

    Contended rates are measured again once the cores are free. A child process measures, so this one's memory,
    high-water mark and allocator stay as they are.

    Args:
        again: measure contended rates again.

    Raises:
        RunError: there are no rates and `measure` is False, or measuring failed, or the rates cannot be stored.
    """
    import torch

    stored = load(device.name, torch.__version__, threads, device.driver)
    if stored is None and measure:
        _warn_of_unusable(device, threads)
    if stored is not None and stored.partial:
        stored = None
    # With a progress callback, the caller shows what takes the time.
    if progress is None and measure and stored is None:
        _log.warning("measuring this machine, once: about a minute, and several on a slow or busy machine")
    # Stored rates of a busy machine are replaced only while the cores are free for half a second.
    if measure and (stored is None or (again and stored.contended and _is_quiet(threads))):
        return remeasure_rates(device, threads, progress, grid)
    if stored is None:
        raise RunError(
            f"the rates of {device.name} with {threads} threads are not measured yet; "
            f"run: preheat calibrate --threads {threads}"
        )
    return stored


def remeasure_rates(device: Device, threads: int, progress: Progress | None = None, grid: Grid | None = None) -> Rates:
    """Measures and stores the rates of this machine, whether there are some or not.

    Raises:
        RunError: measuring failed, or the rates cannot be stored.
    """
    import torch

    _measure_in_process(device, threads, progress, lambda: [grid or grid_of(limit_to_free_memory(device))])
    stored = load(device.name, torch.__version__, threads, device.driver)
    assert stored is not None, "the child stored rates for another machine"
    return stored


def rates_for(
    device: Device, threads: int, choose: Callable[[], Sequence[Grid]], progress: Progress | None = None
) -> tuple[Rates, bool]:
    """Returns the stored rates of this machine; measures only the sizes that they lack, which takes seconds.

    Other sizes are interpolated from these, so the rates are stored as partial ones: they serve other calls of this
    function, and commands that need all sizes measure those. Rates of a busy machine are not stored.

    Args:
        choose: returns the sizes that are needed; called only if there are no rates of all sizes.

    Returns:
        The rates, and whether some were measured now.

    Raises:
        DoesNotFit: other processes leave too little of a GPU's memory.
        RunError: measuring failed, or the rates cannot be stored.
    """
    import torch

    stored = load(device.name, torch.__version__, threads, device.driver)
    if stored is None:
        _warn_of_unusable(device, threads)
    if stored is not None and stored.contended:
        stored = None
    if stored is None:
        # The child imports torch while the sizes are chosen.
        return _measure_in_process(device, threads, progress, choose, partial=True), True
    if not stored.partial:
        return stored, False
    lacking = [rest for grid in choose() if (rest := grid.find_missing(stored)) is not None]
    if not lacking:
        return stored, False
    return _measure_in_process(device, threads, progress, lambda: lacking, partial=True, known=stored), True


def _warn_of_unusable(device: Device, threads: int) -> None:
    import torch

    if reason := describe_unusable_rates(device.name, torch.__version__, threads, device.driver):
        _log.warning("%s: it is measured again", reason)


_LEAST_ROOM = 2 << 30
"""Bytes of a GPU's memory with which its rates can be measured."""


def limit_to_free_memory(device: Device) -> Device:
    """Returns a GPU with the memory that other processes leave, and a CPU as it is.

    Raises:
        DoesNotFit: too little is left to measure rates.
    """
    if device.kind == "cpu":
        return device
    used_by_others = other_processes_bytes(device)
    left = dataclasses.replace(device, memory=device.memory - used_by_others)
    if left.memory < _LEAST_ROOM:
        raise DoesNotFit(
            f"hardware.device: {device.name}: {format_memory(max(left.memory, 0) / 2**30)} of "
            f"{format_memory(device.memory / 2**30)} are left, and measuring its rates takes "
            f"{format_memory(_LEAST_ROOM / 2**30)}: "
            f"other processes hold {format_memory(used_by_others / 2**30)}; {OTHERS}"
        )
    return left


def _measure_in_process(
    device: Device,
    threads: int,
    progress: Progress | None,
    choose: Callable[[], Sequence[Grid]],
    *,
    partial: bool = False,
    known: Rates | None = None,
) -> Rates:
    """Measures in a child process, which also stores the rates, except partial ones of a busy machine.

    Args:
        progress: progress callback; None: the progress is logged.
        partial: only some sizes are measured.
        known: rates of other sizes, which the result contains.

    Raises:
        DoesNotFit: other processes leave too little of a GPU's memory.
        RunError: measuring failed, or the rates could not be stored.
    """
    import torch

    limit_to_free_memory(device)
    require_storable(calibration_path(device.name, torch.__version__, threads))
    command = [sys.executable, "-c", "from preheat.hardware.benchmark_rates import _run_child; _run_child()"]
    measured: Rates | None = None
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    # A file for its stderr: a full pipe that is read only after the progress would block the child.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        subprocess.Popen(tie_to_parent(command), **pipes, stderr=stderr, text=True) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        # Progress arrives as JSON lines until the child ends.
        try:
            # The child imports torch while the sizes are chosen.
            task = {"device": dataclasses.asdict(device), "threads": threads, "partial": partial}
            task |= {"grids": [dataclasses.asdict(grid) for grid in choose()], "known": known and known.values()}
            text = json.dumps(task)
            with contextlib.suppress(BrokenPipeError), child.stdin:  # a child that has ended: its status says why
                child.stdin.write(text)
            for line in child.stdout:
                message = json.loads(line)
                if isinstance(message, dict):
                    measured = parse(message)
                else:
                    (progress or _log_progress)(*message)
        # Ctrl-C too must not leave a child behind that uses all cores.
        except BaseException:
            child.kill()  # Popen.__exit__ waits for it
            raise
        # A process ended by a signal leaves no message, so the signal is the reason.
        last = last_error_line(stderr) if child.wait() > 0 else ""
    if child.returncode != 0:
        last = last or f"its process {describe_exit(child.returncode)}"
        raise RunError(f"measuring the rates of this machine failed: {last}")
    assert measured is not None, "the child ended well and sent no rates"
    return measured


def _log_progress(what: str, done: float) -> None:
    _log.info("measuring this machine: %s (%.0f %%)", what, 100 * done, extra={"done": done})


def _run_child() -> None:
    import torch  # noqa: F401  # while the parent still chooses what to measure

    install_heap()  # as a run does
    task: JsonObject = json.loads(sys.stdin.read())

    def send(message: object) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    # JSON has no tuples, and capabilities are compared.
    capability = task["device"]["capability"]
    device = Device(**task["device"] | {"capability": capability and tuple(capability)})
    measured = measure_sizes(
        device,
        task["threads"],
        [Grid(**values) for values in task["grids"]],
        lambda *done: send(done),
        partial=task["partial"],
        known=parse(task["known"]) if task["known"] else None,
    )
    send(measured.values())


def measure_sizes(
    device: Device,
    threads: int,
    grids: Sequence[Grid],
    progress: Progress,
    *,
    partial: bool = False,
    known: Rates | None = None,
) -> Rates:
    """Measures in this process, joins the rates with `known` ones, and stores them; for arguments see `rates_for`.

    A GPU's rates that contradict its data sheet or themselves are measured once more. Partial rates of a busy machine
    are not stored.
    """
    measured = dataclasses.replace(_measure_grids(device, threads, grids, progress, known), partial=partial)
    if doubt_of(measured):
        again = _measure_grids(device, threads, grids, lambda part, done: progress(f"{part}, again", done), known)
        measured = dataclasses.replace(again, partial=partial)
    if not (partial and measured.contended):
        measured.store(anew=known is None)
    return measured


def _measure_grids(
    device: Device, threads: int, grids: Sequence[Grid], progress: Progress, known: Rates | None
) -> Rates:
    measured = known
    for number, grid in enumerate(grids):

        def tell(what: str, done: float, number: int = number) -> None:
            progress(what, (number + done) / len(grids))

        rates_of_grid = calibrate(device, threads, tell, grid=grid)
        measured = rates_of_grid if measured is None else measured.join_rates(rates_of_grid)
    assert measured is not None, "there is something to measure"
    return measured
