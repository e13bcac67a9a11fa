"""Seconds of an observed step on an accelerator of the catalogue, which is not at hand: each kernel by what limits it.

A matrix product takes its FLOPs over the rate that the device sustains, less what the last wave of tiles leaves idle, or its bytes over the
memory's bandwidth, whichever is longer; attention a share of that rate by generation; everything else its bytes. Collectives take their bytes
over the link or the network and a latency. Those that share out rows of the batch (weights gathered, gradients summed) run beside the
computing, those within a layer (tensor, context, expert parallel) stand in its way. The host hands out kernels one by one, and where it
is slower than the device, it decides.

    Roofline.of("H100").seconds(observation).total
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from preheat.core import DATA, Axis, Device
from preheat.hardware.catalogue import Accelerator, accelerator
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.dry_run import Observation

__all__ = ["Roofline", "Seconds", "fused_share", "link_seconds"]

_BANDWIDTH = (
    0.85  # of the memory's, that kernels over large tensors reach (device copies on H100 and H200: 0.82 to 0.90)
)
_LINK = 0.8  # of a link's, that collectives of large buffers reach (8 H100s: 361 of 450 GB/s, nccl-tests in stas00/ml-engineering)
_NETWORK = (
    25e9  # bytes a second a device, where the catalogue has none: 200 Gbit/s, as of hosts with eight of them at 1,600
)
_HOST_LINK = 31.5e9  # bytes a second to the host's memory, where the catalogue has none: PCI Express 4.0 x16
# Bytes a second of an optimizer on the host: a billion parameters in 0.22 s (ZeRO-Offload, arXiv:2101.06840, CPU-Adam), 28 bytes each.
_HOST_MEMORY = 127e9
_LATENCY, _LATENCY_NETWORK = 20e-6, 40e-6  # of a collective within a host and across hosts
_LAUNCH = 3e-6  # between two kernels on the device
_HOST, _HOST_COMPILED = 9e-6, 3e-6  # Python, autograd and the launch of a kernel, with its views; of a compiled layer's
# Bytes of small operators that are left where a compiler fuses them: fp32 ones between half ones stay in registers.
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
_TILE = 128  # rows and columns of the result that one processor makes at a time
_ATTENTION: Mapping[
    str, tuple[float, float]
] = {  # share of the best matrix rate, forward and backward, causal work only
    # FlashAttention 2 (arXiv:2307.08691, figures 4 and 6: heads of 128 at 2k to 8k on an A100, H100), and 3 (2407.08608) not assumed
    "ampere": (0.62, 0.52),
    "ada": (0.62, 0.52),
    "hopper": (0.38, 0.33),
    "blackwell": (0.45, 0.38),
    "cdna": (0.45, 0.35),
}
_CAPABILITY = {  # CUDA's, the least of a generation
    "volta": (7, 0),
    "turing": (7, 5),
    "ampere": (8, 0),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}
_COLLECTIVES: Mapping[
    str, tuple[str, float]
] = {  # operator's ending -> (the larger side's bytes are its size, times they cross the link)
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
    """Where a step's time goes. Seconds.

    Attributes:
        products, attention, moved: matrix products, attention, and what moves more than it computes.
        waiting: for collectives that nothing hides.
        hidden: collectives beside the computing.
        link: for copies to and from the host's memory and for what the host computes, as far as nothing hides them.
        host: that the host takes longer to hand kernels out than the device to run them.
        idle: a pipeline's bubble.
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
    """An accelerator that is not at hand, in hosts of `per_host`.

    Example:
        >>> Roofline.of("H100").peak_matrix_rate["bf16"] / 1e12
        989.0
    """

    device: Accelerator
    per_host: int = 8
    contended = False
    pace = 1.0

    @classmethod
    def of(cls, name: str, per_host: int = 8) -> Roofline:
        """By its name in the catalogue.

        Raises:
            RecipeError: there is none; names the nearest.
        """
        return cls(accelerator(name), per_host)

    @property
    def as_device(self) -> Device:
        """What a build is planned for."""
        assert self.device.memory is not None
        capability = _CAPABILITY.get(self.device.generation)
        return Device("cuda", self.device.name, self.device.memory, capability, at_hand=False)

    @cached_property
    def peak_matrix_rate(self) -> Mapping[str, float]:
        """dtype -> FLOP/s of the data sheet: what MFU is a share of."""
        return self.device.peaks()

    @cached_property
    def _sustained(self) -> Mapping[str, float]:
        return self.device.sustained()

    def _rate(self, dtype: str) -> float:
        rates = self._sustained
        return rates.get(dtype) or rates.get("bf16") or rates["fp32"]

    def _moving(self, bytes: int) -> float:
        assert self.device.bandwidth is not None
        return bytes / (self.device.bandwidth * _BANDWIDTH)

    def _product(self, kernel: Kernel) -> float:
        full = _last_wave(kernel, self.device.units)
        return max(
            kernel.flops / (self._rate(kernel.dtype) * full),
            self._moving(kernel.bytes_read + kernel.bytes_written),
        )

    def _attention(self, kernel: Kernel) -> float:
        forward, backward = _ATTENTION.get(self.device.generation, (0.45, 0.38))
        share = backward if "backward" in kernel.operator else forward
        dtype = kernel.dtype if kernel.dtype in self.peak_matrix_rate else "bf16"
        done = kernel.flops / 2 if kernel.causal else kernel.flops
        return done / (self.peak_matrix_rate.get(dtype, self._rate("bf16")) * share)

    def collective(self, kernel: Kernel) -> float:
        """Seconds of a collective by itself."""
        assert kernel.group is not None
        devices, stride = kernel.group
        if devices == 1:
            return 0.0
        side, times = _COLLECTIVES.get(kernel.operator.rpartition("::")[2].removesuffix(".default"), ("in", 1.0))
        size = (
            max(kernel.bytes_read, kernel.bytes_written) if side == "out" else kernel.bytes_read or kernel.bytes_written
        )
        share = times * (devices - 1) / devices
        within = min(devices, max(self.per_host // stride, 1))  # of the group, on one host
        link = (self.device.link or _NETWORK) * (within - 1 if self.device.link_each else 1) * _LINK
        if within == devices:
            return _LATENCY + size * share / link
        network = (self.device.network or _NETWORK) * _LINK * within
        return _LATENCY_NETWORK * math.log2(max(devices / within, 2)) + size * share / min(network, link)

    def seconds(self, observation: Observation) -> Seconds:
        """Seconds of one optimizer step."""
        products = attention = moved = waiting = overlapped = 0.0
        launches = 0
        for kernel, count in observation.kernels.items():
            if kernel.where != "device":
                continue  # `_link` has them
            if kernel.group is not None:
                seconds = self.collective(kernel) * count
                axes = observation.groups[kernel.group]
                if "all_to_all" in kernel.operator or "alltoall" in kernel.operator:
                    waiting += seconds  # what is exchanged within a layer, also among devices that share out rows
                elif {*DATA, Axis.PIPELINE} & set(axes):
                    overlapped += seconds
                else:
                    waiting += seconds
                continue
            launches += count
            if kernel.flops and "attention" in kernel.operator:
                attention += (self._attention(kernel) + _LAUNCH) * count
            elif kernel.flops:
                products += (self._product(kernel) + _LAUNCH) * count
            else:
                fused = fused_share(kernel, observation)
                moved += (self._moving(kernel.bytes_read + kernel.bytes_written) + _LAUNCH) * fused * count
        computing = products + attention + moved
        host = max(launches * (_HOST_COMPILED if observation.compiled else _HOST) * observation.slowed - computing, 0.0)
        waiting += max(overlapped - computing, 0.0)
        working = computing + host + waiting
        idle, link = working * observation.idle, self._link(observation, computing)
        return Seconds(products, attention, moved, waiting, min(overlapped, computing), host, idle, link)

    def _link(self, observation: Observation, computing: float) -> float:
        link = (self.device.host or _HOST_LINK) * _LINK
        return link_seconds(observation, computing, to_host=link, to_device=link)


def fused_share(kernel: Kernel, observation: Observation) -> float:
    """The share of a small operator's time that is left if a compiler fuses it with its neighbours."""
    return _FUSED.get(kernel.dtype, 1.0) if observation.compiled and kernel.operator in _POINTWISE else 1.0


def link_seconds(observation: Observation, computing: float, *, to_host: float, to_device: float) -> float:
    """Seconds that copies between a GPU's memory and the host's add to a step, in both directions at once.

    Those of the forward pass run beside it, and those of the backward pass beside that, which takes twice as long. In the update the device
    waits: for gradients that arrive, for the host that computes with them, for weights that come back, one parameter behind the other.

    Args:
        computing: seconds that the device computes.
        to_host, to_device: bytes a second.
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
    exposed = max(times["out", False] - computing / 3, 0.0) + max(times["back", False] - computing * 2 / 3, 0.0)
    return update + exposed + times["host", False]


def _last_wave(kernel: Kernel, units: int | None) -> float:
    """The share of the processors' time that a product's tiles fill."""
    if units is None:
        return 1.0
    at = 1 if kernel.operator.startswith(("addmm", "baddbmm")) else 0  # behind what is added to
    a, b = kernel.shapes[at : at + 2]
    rows, columns, batch = a[-2] if len(a) > 1 else 1, b[-1], math.prod(a[:-2])
    tiles = -(-rows // _TILE) * -(-columns // _TILE) * batch
    work = rows * columns * batch / _TILE**2
    return max(work / (-(-tiles // units) * units), 1e-3) if tiles > units else max(work / units, 1e-3)
