"""Step time of an observation on this machine, from its measured rates.

A device runs one kernel after the other, so their times add up. Matmuls and attention are measured in FLOP/s,
everything else in bytes/s (`hardware/rates.py`). On a CPU the launch overhead is added; a GPU computes while the host
launches, so the longer of the two counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

from preheat.core import Device
from preheat.core.plan import HostLaunches
from preheat.hardware.benchmark_rates import FULL, Grid, grid_of
from preheat.hardware.cpp_build import find_compiler
from preheat.hardware.rates import Layout, Rates
from preheat.ops.attention.causal_cpu import RATE, matmul_dtype
from preheat.ops.fused_norm_gate import BY_PIECES
from preheat.ops.rowwise_cpu import IN_CACHE
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.observation import Observation
from preheat.planning.speed.roofline import estimate_fused_share, estimate_link_seconds

__all__ = [
    "collect_grids",
    "estimate_host_seconds",
    "estimate_kernel_seconds",
    "find_limiting_host",
    "estimate_step_seconds",
]

# aten operator -> the operator of `hardware.rates.MOVERS` with a similar cost
_MOVERS = {
    "add": "add",
    "sub": "add",
    "rsub": "add",
    "div": "mul",
    "neg": "copy",
    "add_": "add_",
    "sub_": "add_",
    "mul_": "add_",
    "_foreach_mul_": "add_",
    "div_": "add_",
    "bitwise_and_": "add_",
    "clamp": "copy",
    "masked_fill": "masked_fill",
    "where": "where",
    "pow": "copy",
    "cos": "exp",
    "sin": "exp",
    "exp": "exp",
    "log": "exp",
    "tanh": "exp",
    "sigmoid": "exp",
    "rsqrt": "rsqrt",
    "sqrt": "rsqrt",
    "silu": "silu",
    "silu_backward": "silu_backward",
    "gelu": "gelu",
    "gelu_backward": "gelu_backward",
    "tanh_backward": "silu_backward",
    "mean": "mean",
    "amax": "amax",
    "linalg_vector_norm": "norm",
    "_foreach_norm": "norm",
    "_softmax": "softmax",
    "softmax": "softmax_",  # this overload is dispatched for softmax.out only
    "_softmax_backward_data": "log_softmax_backward",
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward",
    "native_layer_norm": "softmax",
    "native_layer_norm_backward": "log_softmax_backward",
    "embedding": "embedding",
    "embedding_dense_backward": "embedding_backward",
    "index_select": "embedding",
    "index_copy_": "index_copy_",
    "random_": "random_",
    "cat": "cat",
    "stack": "cat",
    "clone": "transpose",
    "copy_": "copy_",
    "zeros": "zero_",
    "zeros_like": "zero_",
    "new_zeros": "zero_",
    "zero_": "zero_",
    "fill_": "zero_",
    "slice_backward": "copy",
    "select_backward": "copy",
}
# Touch few elements of their operands.
_SPARSE = {
    "gather",
    "scatter_add_",
    "scatter_",
    "index",
    "index_put_",
    "nll_loss_forward",
    "nll_loss_backward",
}


_STEP_LIMIT = 15.0  # seconds after which a calibration for one step waits less for calls that are not preempted
_GPU_STEP_LIMIT = 3.0  # seconds for each dtype on a GPU; what is not reached is interpolated, and measured next time
_GPU_ROWS, _LEAST_ROWS = 16384, 256  # rows of a matmul, and tokens of attention: more are as fast a token
_GPU_ELEMENTS = (2**16, 2**20)  # bound by launches, and in the cache; the grid's largest are in memory
_GPU_TABLE = 1 << 29  # bytes of the largest table of embeddings
_CUSTOM = 40  # a call of our custom operators costs as much as 40 launches, mostly in Python


def _find_dtype(kernel: Kernel, rates: Rates) -> str:
    known = {row.dtype for row in rates.moved}
    return kernel.dtype if kernel.dtype in known else "fp32"


def _find_layer(kernel: Kernel) -> tuple[Layout, int, int, int]:
    """Returns which matmul of a linear layer a kernel is, and the layer's rows, inputs and outputs."""
    at = 1 if kernel.operator.startswith(("addmm", "baddbmm")) else 0  # skip the addend
    (a, b), (first, second) = kernel.shapes[at : at + 2], kernel.transposed[at : at + 2]
    # a: (n, k), b: (k, m).
    n, k, m = math.prod(a[:-1]), a[-1], b[-1]
    # Which operand is transposed in memory says which of the three products of a linear layer this is.
    layout: Layout = "forward" if second else "grad_weight" if first else "grad_input"
    if layout == "grad_weight":  # g.T [m, n] @ x [n, k]
        n, k, m = a[-1], b[-1], a[-2]
    elif layout == "grad_input":  # g [n, m] @ w [m, k]
        k, m = m, k
    return layout, n, k, m


def _time_product(kernel: Kernel, rates: Rates) -> float:
    layout, n, k, m = _find_layer(kernel)
    # A dtype that was not measured takes the fp32 rate.
    known = {row.dtype for row in rates.matrix}
    return kernel.flops / rates.matrix_rate(kernel.dtype if kernel.dtype in known else "fp32", layout, n, k, m)


_CAUSAL = "preheat::causal_attention"  # and its backward pass


def estimate_kernel_seconds(kernel: Kernel, rates: Rates) -> float:
    """Returns the seconds of one call: on a CPU including the launch, on a GPU the device time only."""
    return (0.0 if rates.of_gpu else _launch_seconds(kernel, rates)) + _time_device(kernel, rates)


def _launch_seconds(kernel: Kernel, rates: Rates) -> float:
    """Returns the launch overhead of a call on a CPU; measured times of matmuls and attention include it."""
    name, moves = kernel.operator, kernel.bytes_read + kernel.bytes_written > 0
    if kernel.flops or name == "_fused_adamw_":
        return 0.0
    if rates.host_custom is not None:  # `_host_seconds` has what custom operators take
        return rates.launch
    return rates.launch * (_CUSTOM if moves and (name in BY_PIECES or name in IN_CACHE) else 1)


def _time_device(kernel: Kernel, rates: Rates) -> float:
    name, moved = kernel.operator, kernel.bytes_read + kernel.bytes_written
    if kernel.flops and name.startswith(_CAUSAL):
        # FLOPs count the whole score matrix, of which half is computed.
        length, width = kernel.shapes[0][-2:]
        dtype = matmul_dtype(_find_dtype(kernel, rates))
        return kernel.flops / 2 / (RATE * rates.matrix_rate(dtype, "forward", length, width, length))
    if kernel.flops and "attention" in name:
        direction = "backward" if "backward" in name else "forward"
        return kernel.flops / rates.attention_rate(
            _find_dtype(kernel, rates),
            direction,  # type: ignore[arg-type]
            kernel.shapes[0][-2],
        )
    if kernel.flops:
        return _time_product(kernel, rates)
    if name == "_fused_adamw_":  # reads weights, gradients and two moments: 16 bytes per parameter
        return rates.adamw["fp32"] * kernel.bytes_read / 16
    if moved == 0:
        return 0.0
    # Our fused CPU operators work on blocks that stay in cache, so memory bandwidth does not bound them.
    if rates.near is not None and (size := _count_cached_bytes(name)) is not None:
        return size * math.prod(kernel.shapes[0]) / rates.near
    if name in _SPARSE:
        # Practically free: the operands' bytes say nothing about the few elements touched.
        return kernel.bytes_read / 1e12
    mover, dtype, moved = _find_mover(kernel, _find_dtype(kernel, rates))
    if rates.partial and not any((row.operator, row.dtype) == (mover, dtype) for row in rates.moved):
        mover = "copy"
    return moved / rates.moved_rate(mover, dtype, moved)


def _find_mover(kernel: Kernel, dtype: str) -> tuple[str, str, int]:
    """Returns the operator of `MOVERS` with a similar cost, its dtype, and the bytes that it moves."""
    name, moved = kernel.operator, kernel.bytes_read + kernel.bytes_written
    # Operators without a measurement count as a copy of their bytes.
    mover = _MOVERS.get(name, "copy")
    if name == "_to_copy":
        mover = (
            "to_bf16"
            if dtype == "fp32" and kernel.bytes_written < kernel.bytes_read
            else "to_fp32"
            if kernel.bytes_written > kernel.bytes_read
            else "copy"
        )
        # Only casts between fp32 and bf16 are measured.
        if mover == "to_fp32" and dtype != "bf16":
            mover = "copy"
    elif name in ("mul", "sum"):
        mover = _broadcast(kernel)
    elif name == "index_select" and len(kernel.shapes[0]) == 1:
        # A table lookup costs per element, not per byte.
        mover, dtype, moved = "look_up", "fp32", 8 * math.prod(kernel.shapes[1])
    elif name == "where":
        dtype, moved = "fp32", 12 * max(map(math.prod, kernel.shapes))
    return mover, dtype, moved


def _count_cached_bytes(name: str) -> int | None:
    """Returns the bytes per element that one of our CPU operators moves in the cache; None for all others."""
    return IN_CACHE.get(name) if name in IN_CACHE and find_compiler() is not None else BY_PIECES.get(name)


def _broadcast(kernel: Kernel) -> str:
    shapes = kernel.shapes
    if kernel.operator == "sum":  # over the last dimension, or over the rows (gradient of a norm's weight)
        # About one element per row is written: a reduction over the last dimension, which costs as much as a mean.
        return (
            "mean"
            if kernel.bytes_written * 4 > kernel.bytes_read // max(shapes[0][-1], 1)
            and shapes[0][-1] > 1
            and kernel.bytes_written != kernel.bytes_read
            else "sum_rows"
        )
    if len(shapes) > 1 and shapes[0] != shapes[1] and shapes[1]:
        # A broadcast factor of shape (..., 1) scales rows, one of shape (n,) scales columns.
        small = min(shapes[:2], key=math.prod)
        return "mul_column" if small and small[-1] == 1 else "mul_row"
    return "mul"


def collect_grids(observation: Observation, device: Device, *, width: int, vocabulary: int) -> list[Grid]:
    """Returns the sizes that decide the time of this step, for a calibration that measures nothing else.

    On a GPU there is one grid for each dtype, with the operators that the step runs in it.

    Args:
        width: hidden size of the model.
        vocabulary: number of its tokens.
    """
    if device.kind != "cpu":
        return _collect_gpu_grids(observation, device, width=width, vocabulary=vocabulary)
    attention, dtypes = set[tuple[int, int, int, int]](), {"fp32"}  # fp32: norms and the optimizer
    shapes = set[tuple[int, int, int]]()
    moved = 12  # two operands and a result in fp32
    for kernel in observation.kernels:
        if kernel.flops and "attention" in kernel.operator:
            rows, heads, length, head_dim = kernel.shapes[0]
            attention.add((rows, heads, length, head_dim))
            if kernel.operator.startswith(_CAUSAL):
                shapes.add((length, head_dim, length))  # its time follows from this matmul's
        elif kernel.flops:
            _, n, k, m = _find_layer(kernel)
            shapes.add((n, k, m))
            dtypes.add(kernel.dtype)
        elif kernel.operator in _MOVERS:
            moved = max(moved, kernel.bytes_read + kernel.bytes_written)
    grid = Grid(
        shapes=tuple(sorted(shapes)),
        products=FULL.products[:1],
        # In a core's cache, in the shared cache, and as many as the largest operands have.
        elements=(2**16, 2**18, max(2**20, 2 ** math.ceil(math.log2(moved / 12)))),
        width=width,
        vocabulary=vocabulary,
        attention=tuple(sorted(attention)) or FULL.attention[:1],
        parameters=2**20,
        dtypes=tuple(sorted(dtypes)),
        limit=_STEP_LIMIT,
    )
    return [grid]


_GPU_DTYPES = ("bf16", "fp16", "fp32")


def _collect_gpu_grids(observation: Observation, device: Device, *, width: int, vocabulary: int) -> list[Grid]:
    whole = grid_of(device)
    shapes, attention, operators = (defaultdict[str, set[Any]](set) for _ in range(3))
    for kernel in observation.kernels:
        if kernel.where != "device":
            continue
        dtype = kernel.dtype if kernel.dtype in _GPU_DTYPES else "fp32"
        if kernel.flops and "attention" in kernel.operator:
            *rows, heads, length, head_dim = (1, *kernel.shapes[0])
            # More tokens take as long each.
            attention[dtype].add((max(1, min(math.prod(rows), _GPU_ROWS // length)), heads, length, head_dim))
        elif kernel.flops:
            _, n, k, m = _find_layer(kernel)
            n = min(n, _GPU_ROWS)
            while n > _LEAST_ROWS and 4 * (n * k + n * m + k * m) > whole.most:
                n //= 2
            shapes[kernel.dtype if kernel.dtype == "tf32" else dtype].add((n, k, m))
        elif kernel.bytes_read + kernel.bytes_written and kernel.operator not in _SPARSE:
            mover, dtype, _ = _find_mover(kernel, dtype)
            operators[dtype].add(mover)
    # fp32 always: norms and the optimizer. A dtype needs a rate of each kind, if only of one size.
    dtypes = sorted({"fp32", *operators, *shapes, *attention} - {"tf32"})
    smallest = min(set[Any]().union(*shapes.values()), default=(_LEAST_ROWS, width, width))
    shortest = min(set[Any]().union(*attention.values()), default=whole.attention[0])
    common = Grid(
        products=whole.products[:1],
        width=width,
        vocabulary=min(vocabulary, max(1, _GPU_TABLE // (4 * width))),
        large=whole.large,
        most=whole.most,
        parameters=2**22,
        limit=_GPU_STEP_LIMIT,
        strict=True,
        host=False,
    )
    grids = [
        replace(
            common,
            dtypes=(dtype,),
            shapes=tuple(sorted(shapes[dtype] or {smallest})),
            attention=tuple(sorted(attention[dtype] or {shortest})),
            elements=(*_GPU_ELEMENTS, whole.elements[-1]),
            operators=tuple(sorted({"copy", *operators[dtype]})),
        )
        for dtype in dtypes
    ]
    if shapes["tf32"]:
        tf32 = tuple(sorted(shapes["tf32"]))
        grids.append(replace(common, dtypes=("tf32",), shapes=tf32, attention=(), elements=(), parameters=0))
    return [replace(grids[0], host=True), *grids[1:]]


# Host time per operator of a step here over that of the tiny step that a calibration measures: 1.1 to 1.6 on a CPU, the
# most for Muon, LoRA and autocast (benchmarks/results/host_time.md).
_OF_STEP = 1.4
# The same over a bare call, for calibrations without that measurement. On a CPU, where a bare call takes 0.7 to 1.2
# microseconds, 11 to 16; with a GPU, where it takes 4.5 and 13.6 with its launch on two hosts, 2.0 and 3.1.
_HOST_SHARE, _GPU_SHARE = 8.0, 2.5
_COMPILED = 0.35  # of the host time that remains in compiled layers: 3 of 9 microseconds


def estimate_host_seconds(observation: Observation, rates: Rates) -> tuple[int, float]:
    """Returns the operators that the host launches in a step, and the seconds that it takes for them."""
    # Copies over the link are launched beside the computation.
    kernels = [(k, count) for k, count in observation.kernels.items() if k.where == "device" or not rates.of_gpu]
    operators = sum(count for _, count in kernels)
    slower = observation.slowed * (_COMPILED if rates.of_gpu and observation.compiled else 1.0)
    if rates.host_operator is None or rates.host_custom is None:
        return operators, operators * rates.launch * (_GPU_SHARE if rates.of_gpu else _HOST_SHARE) * slower
    # The dispatcher calls Python for our operators, which are custom ones of torch.
    custom = sum(count for kernel, count in kernels if kernel.operator.startswith("preheat::"))
    seconds = (operators - custom) * rates.host_operator * _OF_STEP * slower + custom * rates.host_custom
    return operators, seconds


def estimate_step_seconds(observation: Observation, rates: Rates) -> float:
    """Returns the seconds of one optimizer step."""
    if rates.of_gpu:
        return rates.pace * _estimate_gpu_seconds(observation, rates)
    # Less a launch each, because `estimate_kernel_seconds` includes it already.
    operators, host = estimate_host_seconds(observation, rates)
    kernels = sum(estimate_kernel_seconds(kernel, rates) * count for kernel, count in observation.kernels.items())
    return rates.pace * (kernels + host - operators * rates.launch)


def _estimate_gpu_seconds(observation: Observation, rates: Rates) -> float:
    """Returns the seconds of a step on a GPU: the slower of host and device, plus exposed copies over the link."""
    device = _estimate_kernel_seconds(observation, rates)
    # Launches are queued ahead of the device, so the slower of the two sets the pace.
    working = max(device, estimate_host_seconds(observation, rates)[1]) * (1 + observation.idle)
    if rates.to_host is None or rates.to_device is None:
        return working
    return working + estimate_link_seconds(observation, device, to_host=rates.to_host, to_device=rates.to_device)


def _estimate_kernel_seconds(observation: Observation, rates: Rates) -> float:
    """Returns the seconds of a GPU's kernels."""
    kernels = [(kernel, count) for kernel, count in observation.kernels.items() if kernel.where == "device"]
    return sum(
        estimate_kernel_seconds(kernel, rates) * estimate_fused_share(kernel, observation) * count
        for kernel, count in kernels
    )


def find_limiting_host(observation: Observation, rates: Rates) -> HostLaunches | None:
    """Returns what the host launches if it launches a GPU's kernels more slowly than they run, else None."""
    operators, seconds = estimate_host_seconds(observation, rates)
    if not rates.of_gpu or not operators or seconds <= _estimate_kernel_seconds(observation, rates):
        return None
    return HostLaunches(operators, seconds / operators)
