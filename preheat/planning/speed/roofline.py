"""Roofline model: the step time of an observation on an accelerator of the catalogue.

A matmul takes the longer of FLOPs over the sustained rate (with wave quantization) and bytes over memory bandwidth.
Attention reaches a fraction of the matmul rate that depends on the generation. Everything else takes its bytes over
bandwidth: the cache's for what was just written. Collectives take a latency plus bytes over the link or network. Those
of data parallelism (weight all-gathers, gradient reductions) overlap with compute; those within a layer (tensor,
context, expert parallelism) and in the update are exposed. If the host launches kernels more slowly than the device
runs them, the host decides.

    Roofline.of("H100").seconds(observation).total
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from preheat.core import DATA, Axis, Device
from preheat.core.plan import HostLaunches
from preheat.hardware.catalogue import ATTENTION_SHARES, Accelerator, find_accelerator
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.observation import Observation
from preheat.planning.speed.flop_formulas import FUSED

__all__ = ["Roofline", "Seconds", "estimate_fused_share", "estimate_link_seconds", "parse_output"]

# Of memory bandwidth, reached by kernels over large tensors (device copies on H100 and H200: 0.82 to 0.90).
_BANDWIDTH = 0.85
# Of link bandwidth, reached by large collectives (8 H100s: 361 of 450 GB/s, nccl-tests in stas00/ml-engineering).
_LINK = 0.8
_NETWORK = 25e9  # bytes/s per device if the catalogue has none: 200 Gbit/s, as in hosts of 8 devices with 1,600 Gbit/s
_HOST_LINK = 31.5e9  # bytes/s to host memory if the catalogue has none: PCIe 4.0 x16
# Bytes/s of an optimizer on the host: a billion parameters in 0.22 s, 28 bytes each (CPU-Adam of ZeRO-Offload,
# arXiv:2101.06840).
_HOST_MEMORY = 127e9
_LATENCY = 20e-6  # seconds of a collective within a host
# Seconds of a collective across hosts beyond its bytes: of its start, and of each step within a host and between
# hosts, in a ring and in a tree (NCCL's tuning constants, src/graph/tuning.cc, of its LL128 protocol). All-reduces have
# a tree; gathers and reduce-scatters pass every device of the ring in turn: 35 ms for 16,384.
_START, _RING, _TREE = 14e-6, (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)
_LAUNCH = 3e-6  # seconds between two kernels on the device
# Seconds per kernel of Python, autograd and launch, views included; in compiled layers. Of an H200's host: hosts differ
# more than devices do, and one with an H100 took 42e-6 (benchmarks/results/host_time.md).
_HOST, _HOST_COMPILED = (
    9e-6,
    3e-6,
)
# Fraction of a pointwise operator's bytes that remains after fusion: fp32 intermediates stay in registers.
_FUSED = {"bf16": 0.4, "fp16": 0.4, "float8": 0.4, "fp32": 0.1}
_POINTWISE = frozenset(
    [
        "mul",
        "add",
        "sub",
        "rsub",
        "div",
        "neg",
        "abs",
        "clamp",
        "pow",
        "rsqrt",
        "sqrt",
        "exp",
        "log",
        "silu",
        "silu_backward",
        "gelu",
        "gelu_backward",
        "relu",
        "threshold_backward",
        "sigmoid",
        "tanh",
        "cos",
        "sin",
        "where",
        "_to_copy",
        "clone",
        "copy_",
        "mean",
        "max",
        "amax",
        "sum",
        "cat",
        "reciprocal",
        "maximum",
        "minimum",
        "slice_backward",
    ]
)
_TILE = 128  # rows and columns of the output tile of one SM
# The least side of a tile, and the least part of the inner dimension for one SM. With tiles of 128 and whole inner
# dimensions the adapters' fp32 matmuls on an H100 were planned 3.7 times too slow (benchmarks/results/published.md).
_NARROW, _SPLIT = 32, 256
# A row of a half-precision operand whose length is no multiple of 16 bytes needs kernels with narrow loads. Their share
# of the rate: 107 to 116 TFLOP/s for 2,055 to 2,073 against 156 for 2,040 on an RTX 4090 (pytorch/pytorch issue
# 181718), and 10 ms against 14 ms for a padded head (PaddlePaddle/models pull request 5134). Hopper's and later data
# center generations have other kernels, for which no such figure is known.
_ALIGNED, _UNALIGNED = 8, 0.71
_NARROW_LOADS = frozenset({"volta", "turing", "ampere", "ada", "blackwell-rtx"})
# Of the L2 cache, filled by what a kernel reads and writes: repeated kernels keep the cache's rate up to 0.77 (A40),
# 0.78 (A100), 0.84 (H200) and 0.88 (L40) of its size, by the source of the rates (hardware/catalogue.py).
_CACHED = 0.75
# `ATTENTION_SHARES` of cuDNN's attention: nearer to rows of 8,192 tokens (0.54 and 0.44 in steps on an H100), where
# attention takes a quarter of the time, than to rows of 2,048 (0.48 and 0.33; benchmarks/results/gpu_layer.md).
_CUDNN: dict[str, tuple[float, float]] = {"hopper": (0.52, 0.41)}
_CAPABILITY = {  # lowest CUDA compute capability of a generation
    "volta": (7, 0),
    "turing": (7, 5),
    "ampere": (8, 0),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
    "blackwell-rtx": (12, 0),
}
# Operator suffix -> (side with the full buffer, how often its bytes cross the link).
_COLLECTIVES: Mapping[str, tuple[str, float]] = {
    "all_gather_into_tensor": ("out", 1.0),
    "all_gather_into_tensor_out": ("out", 1.0),
    "_allgather_base_": ("out", 1.0),
    "allgather_": ("out", 1.0),
    "allgather_into_tensor_coalesced_": ("out", 1.0),
    "reduce_scatter_tensor": ("in", 1.0),
    "_reduce_scatter_base_": ("in", 1.0),
    "reduce_scatter_tensor_coalesced_": ("in", 1.0),
    "all_reduce": ("in", 2.0),
    "all_reduce_": ("in", 2.0),
    "allreduce_": ("in", 2.0),
    "allreduce_coalesced_": ("in", 2.0),
    "all_to_all_single": ("in", 1.0),
    "alltoall_base_": ("in", 1.0),
    "alltoall_": ("in", 1.0),
    "broadcast": ("in", 1.0),
    "broadcast_": ("in", 1.0),
}


@dataclass(frozen=True)
class Seconds:
    """Breakdown of a step's time, in seconds.

    Attributes:
        products, attention, moved: matmuls, attention, and memory-bound kernels.
        waiting: exposed communication.
        hidden: communication that overlaps with compute.
        link: exposed copies between device and host memory, and exposed compute on the host.
        host: time by which launching kernels on the host exceeds running them on the device.
        idle: pipeline bubble, and waiting for devices with more to compute.
    """

    products: float
    attention: float
    moved: float
    waiting: float
    hidden: float
    host: float
    idle: float
    link: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.moved + self.waiting + self.host + self.idle + self.link


@dataclass(frozen=True)
class Roofline:
    """An accelerator of the catalogue, in hosts of `per_host` devices.

    Attributes:
        alone: the run has one device: no collective slows its matmuls down.
        doubt: why the data sheet counts, though this device was calibrated.

    Example:
        >>> Roofline.of("H100").peak_matrix_rate["bf16"] / 1e12
        989.0
    """

    device: Accelerator
    per_host: int = 8
    alone: bool = False
    doubt: str | None = None
    contended = False
    pace = 1.0
    now = None

    @classmethod
    def of(cls, name: str, per_host: int = 8) -> Roofline:
        """Looks up an accelerator by name.

        Raises:
            RecipeError: the name is unknown; the message suggests the closest one.
        """
        return cls(find_accelerator(name), per_host)

    @property
    def as_device(self) -> Device:
        """The device to plan for."""
        assert self.device.memory is not None
        capability = _CAPABILITY.get(self.device.generation)
        return Device("cuda", self.device.name, self.device.memory, capability, at_hand=False)

    @cached_property
    def peak_matrix_rate(self) -> Mapping[str, float]:
        """dtype -> peak FLOP/s of the data sheet, the denominator of MFU."""
        return self.device.peaks()

    @cached_property
    def _sustained(self) -> Mapping[str, float]:
        return self.device.sustained(alone=self.alone)

    def _find_rate(self, dtype: str) -> float:
        rates = self._sustained
        return rates.get(dtype) or rates.get("bf16") or rates["fp32"]

    def moving(self, bytes: int) -> float:
        """Returns the seconds of a kernel that reads and writes so many bytes."""
        assert self.device.bandwidth is not None
        return bytes / (self.device.bandwidth * _BANDWIDTH)

    def _time_movement(self, kernel: Kernel) -> float:
        """Returns the seconds of a kernel's bytes, of which the largest operand was just written and is in the cache.

        Other operands, such as saved activations and the residual stream, come from memory, and what a kernel writes
        reaches it all the same. Weights and moments were last used a step ago.
        """
        size, cache, rate = kernel.bytes_read + kernel.bytes_written, self.device.cache, self.device.cache_rate
        if cache is None or rate is None or kernel.alone or size > _CACHED * cache:
            return self.moving(size)
        operands = [math.prod(shape) for shape in kernel.shapes] or [1]
        fresh = kernel.bytes_read * max(operands) // max(sum(operands), 1)
        return min(self.moving(size), max(size / rate, self.moving(size - fresh)))

    def _time_matmul(self, kernel: Kernel) -> float:
        # max(FLOPs / rate, bytes / bandwidth): the two overlap within a kernel.
        full = _estimate_utilization(kernel, self.device.units)
        if self.device.generation in _NARROW_LOADS and not _is_aligned(kernel):
            full *= _UNALIGNED
        computing = kernel.flops / (self._find_rate(kernel.dtype) * full)
        # The weights of an adapter are small beside its activations; others come from memory.
        if _is_narrow(kernel):
            return computing + self._time_movement(kernel)  # too short an inner loop, or too few columns, to overlap
        return max(computing, self.moving(kernel.bytes_read + kernel.bytes_written))

    def _time_attention(self, kernel: Kernel, cudnn: bool = False) -> float:
        shares = {**ATTENTION_SHARES, **_CUDNN} if cudnn else ATTENTION_SHARES
        forward, backward = shares.get(self.device.generation, (0.45, 0.38))
        share = backward if "backward" in kernel.operator else forward
        dtype = kernel.dtype if kernel.dtype in self.peak_matrix_rate else "bf16"
        # The fractions above count causal work only, i.e. half of the score matrix.
        return kernel.unmasked_flops / (self.peak_matrix_rate.get(dtype, self._find_rate("bf16")) * share)

    def _time_fused_kernel(self, kernel: Kernel) -> float:
        """Seconds of a recurrent layer's kernel: small matmuls in one pass, as attention is."""
        share, _ = ATTENTION_SHARES.get(self.device.generation, (0.45, 0.38))
        return max(
            kernel.flops / (self._find_rate(kernel.dtype) * share),
            self.moving(kernel.bytes_read + kernel.bytes_written),
        )

    def collective(self, kernel: Kernel) -> float:
        """Returns the seconds of a collective without overlap."""
        assert kernel.group is not None
        devices, stride = kernel.group
        if devices == 1:
            return 0.0
        name = kernel.operator.rpartition("::")[2].removesuffix(".default")
        # The full buffer is an all-gather's result or a reduce-scatter's argument; an all-reduce is both in turn (2.0).
        side, times = _COLLECTIVES.get(name, ("in", 1.0))
        size = (
            max(kernel.bytes_read, kernel.bytes_written) if side == "out" else kernel.bytes_read or kernel.bytes_written
        )
        # In a ring each device sends all of the buffer but its own part: (n - 1) / n of it.
        share = times * (devices - 1) / devices
        # Ranks of a group that are `stride` apart: per_host / stride of them share a host.
        within = min(devices, max(self.per_host // stride, 1))  # devices of the group on one host
        # `link_each`: the catalogue states the rate of a connection between two devices, not that of all together.
        link = (self.device.link or _NETWORK) * (within - 1 if self.device.link_each else 1) * _LINK
        if within == devices:
            return _LATENCY + size * share / link
        # The catalogue's rate is per device: the group's devices on a host use their network cards together.
        network = (self.device.network or _NETWORK) * _LINK * within
        return _estimate_latency(name, devices, within) + size * share / min(network, link)

    def kernel_seconds(self, kernel: Kernel, observation: Observation) -> float:
        """Returns the seconds of one call on the device; of no collective."""
        if kernel.flops and "attention" in kernel.operator:
            # cuDNN supports only rows of one document; packed rows use flash attention.
            return self._time_attention(kernel, observation.cudnn and "varlen" not in kernel.operator) + _LAUNCH
        if kernel.operator.startswith(FUSED):
            return self._time_fused_kernel(kernel) + _LAUNCH
        if kernel.flops:
            return self._time_matmul(kernel) + _LAUNCH
        return (self._time_movement(kernel) + _LAUNCH) * estimate_fused_share(kernel, observation)

    def seconds(self, observation: Observation) -> Seconds:
        """Returns the seconds of one optimizer step, by cause."""
        products = attention = moved = waiting = overlapped = 0.0
        launches = 0
        for kernel, count in observation.kernels.items():
            if kernel.where != "device":
                continue  # `_find_link` counts these
            if kernel.group is not None:
                seconds = self.collective(kernel) * count
                axes = observation.groups[kernel.group]
                # The layer needs the tokens before it can continue.
                if "all_to_all" in kernel.operator or "alltoall" in kernel.operator:
                    waiting += seconds  # expert parallelism, also along data-parallel axes
                # FSDP prefetches the next layer's weights and reduces gradients while the previous layer computes; the
                # update has nothing to compute while ZeRO-1 gathers the new weights.
                elif {*DATA, Axis.PIPELINE} & set(axes) and not kernel.alone:
                    overlapped += seconds
                else:
                    waiting += seconds
                continue
            launches += count
            seconds = self.kernel_seconds(kernel, observation) * count
            if (kernel.flops and "attention" in kernel.operator) or kernel.operator.startswith(FUSED):
                attention += seconds
            elif kernel.flops:
                products += seconds
            else:
                moved += seconds
        computing = products + attention + moved
        # The device waits only for the part by which the host is slower: launches are queued.
        host = max(launches * _launch_seconds(observation) - computing, 0.0)
        # Overlapped communication is hidden up to the time of the computation.
        waiting += max(overlapped - computing, 0.0)
        working = computing + host + waiting
        # The bubble of a pipeline is a fraction of the time in which the stage works.
        idle, link = working * observation.idle, self._find_link(observation, computing)
        return Seconds(products, attention, moved, waiting, min(overlapped, computing), host, idle, link)

    def limiting_host(self, observation: Observation) -> HostLaunches | None:
        """Returns what the host launches if it launches kernels more slowly than they run, else None."""
        operators = sum(n for kernel, n in observation.kernels.items() if kernel.where == "device" and not kernel.group)
        return HostLaunches(operators, _launch_seconds(observation)) if self.seconds(observation).host else None

    def _find_link(self, observation: Observation, computing: float) -> float:
        link = (self.device.host or _HOST_LINK) * _LINK
        return estimate_link_seconds(observation, computing, to_host=link, to_device=link)


def _launch_seconds(observation: Observation) -> float:
    """Returns the seconds per kernel of a host that is not known."""
    return (_HOST_COMPILED if observation.compiled else _HOST) * observation.slowed


def _estimate_latency(name: str, devices: int, within: int) -> float:
    """Returns the seconds of a collective across hosts, without those of its bytes; `within` devices share a host."""
    hosts = devices / within
    tree = 2 * ((within - 1) * _TREE[0] + math.log2(max(hosts, 2)) * _TREE[1])
    ring = (devices - hosts) * _RING[0] + (hosts - 1) * _RING[1]
    if name.startswith(("all_gather", "allgather", "_allgather", "reduce_scatter", "_reduce_scatter")):
        # One device of each host is a tree again (NCCL's PAT).
        return _START + (ring if within > 1 else min(ring, tree / 2))
    if name.startswith(("send", "recv")):
        return _START + _RING[1]
    # Also taken for exchanges among all and for broadcasts, whose messages go out together.
    return _START + tree


def estimate_fused_share(kernel: Kernel, observation: Observation) -> float:
    """Returns the fraction of a pointwise operator's time that remains after fusion with its neighbours."""
    return _FUSED.get(kernel.dtype, 1.0) if observation.compiled and kernel.operator in _POINTWISE else 1.0


def estimate_link_seconds(observation: Observation, computing: float, *, to_host: float, to_device: float) -> float:
    """Returns the exposed seconds of copies between GPU and host memory, with both directions in parallel.

    Copies of the forward pass overlap with it, and those of backward with backward, which takes twice as long. In the
    update the device waits for the slowest of gradient copies, host compute and weight copies, which are pipelined by
    parameter.

    Args:
        computing: seconds that the device computes.
        to_host, to_device: bandwidths in bytes/s.
    """
    times: dict[tuple[str, bool], float] = defaultdict(float)
    for kernel, count in observation.kernels.items():
        if kernel.where == "host":
            seconds = (kernel.bytes_read + kernel.bytes_written) / _HOST_MEMORY
        elif kernel.where != "device":
            seconds = kernel.bytes_written / (to_host if kernel.where == "out" else to_device)
        else:
            continue
        times[kernel.where, kernel.alone] += seconds * count
    update = max(times["out", True], times["back", True], times["host", True])
    # One third of a step is forward, during which activations leave; two thirds are backward, which brings them back.
    exposed = max(times["out", False] - computing / 3, 0.0) + max(times["back", False] - computing * 2 / 3, 0.0)
    return update + exposed + times["host", False]


def _estimate_utilization(kernel: Kernel, units: int | None) -> float:
    """Returns the SM utilization of a matmul under wave and tile quantization."""
    if units is None:
        return 1.0
    (rows, columns), inner, batch = parse_output(kernel)
    if _is_narrow(kernel):
        # Kernels for narrow results have narrow tiles, and split the inner dimension until all SMs have work.
        tile = _choose_tile_edge(rows) * _choose_tile_edge(columns)
        tiles = -(-rows // _choose_tile_edge(rows)) * -(-columns // _choose_tile_edge(columns)) * batch
        splits = max(1, min(units // tiles, inner // _SPLIT))
    else:
        tile, splits = _TILE**2, 1
        tiles = -(-rows // _TILE) * -(-columns // _TILE) * batch
    # Utilization = useful tiles / (waves * SMs). The last wave and the tiles at the edges are filled only in part.
    work = rows * columns * batch / tile * splits
    waves = -(-tiles * splits // units)
    return max(work / (waves * units), 1e-3)


def _is_aligned(kernel: Kernel) -> bool:
    """True if the rows of a matmul's operands and result begin at multiples of 16 bytes, or are not half precision."""
    if kernel.dtype not in ("bf16", "fp16"):
        return True
    (rows, columns), inner, _ = parse_output(kernel)
    first, second = kernel.transposed[-2:] or (False, False)  # after an addend
    # The dimension that is contiguous in memory, of both operands and the result.
    lengths = (rows if first else inner, inner if second else columns, columns)
    return not any(length % _ALIGNED for length in lengths)


def parse_output(kernel: Kernel) -> tuple[tuple[int, int], int, int]:
    """Returns the (rows, columns) of a matmul's result, its inner dimension and its batch."""
    at = 1 if kernel.operator.startswith(("addmm", "baddbmm")) else 0  # skip the addend
    # a: (..., rows, inner), b: (..., inner, columns).
    a, b = kernel.shapes[at : at + 2]
    return (a[-2] if len(a) > 1 else 1, b[-1]), a[-1], math.prod(a[:-2])


def _is_narrow(kernel: Kernel) -> bool:
    """True for the matmuls of an adapter, of which one side is narrower than a tile of the result."""
    (rows, columns), inner, _ = parse_output(kernel)
    return min(rows, columns, inner) < _TILE


def _choose_tile_edge(size: int) -> int:
    """Returns the side of a tile: powers of two from 32 to 128."""
    return min(_TILE, max(_NARROW, 1 << (size - 1).bit_length()))
