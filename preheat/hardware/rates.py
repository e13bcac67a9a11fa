"""Measured rates of a machine, which convert FLOPs and bytes into seconds. Does not import torch.

A measurement is valid for one processor, torch version, number of threads and, of a GPU, driver; it is stored under a
hash of the first three.
`preheat.hardware.benchmark_rates` measures it.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from preheat.cache_folder import cache_folder, store_json
from preheat.core import MachineUse
from preheat.errors import RecipeError, RunError
from preheat.hardware.link_rates import LinkRate, load_links, seconds_of
from preheat.hardware.machine_use import read_use
from preheat.hardware.stored_values import Damaged, read_json, read_number, read_numbers, read_row
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject


__all__ = [
    "LAYOUTS",
    "MOVERS",
    "AttentionRate",
    "Layout",
    "LinkRate",
    "MatrixRate",
    "MovedRate",
    "Present",
    "Rates",
    "load",
    "note_run",
    "parse",
    "calibration_path",
    "describe_unusable_rates",
]

Layout = Literal["forward", "grad_input", "grad_weight"]

LAYOUTS: dict[Layout, str] = {
    "forward": "x [n, k] @ w.T [k, m]",
    "grad_input": "g [n, m] @ w [m, k]",
    "grad_weight": "g.T [m, n] @ x [n, k]",
}
"""The three matmuls of a linear layer with n rows, k inputs and m outputs: 2 n k m FLOPs each."""

MOVERS: dict[str, str] = {
    "copy": "x.clone(): whole, in order",
    "copy_": "into a tensor that exists",
    "transpose": "x [rows, heads, length, dim] with heads and length exchanged, made contiguous",
    "cat": "two halves side by side along the last dimension",
    "zero_": "zeros into a tensor that exists",
    "to_bf16": "a cast from the dtype (fp32)",
    "to_fp32": "a cast from the dtype (bf16)",
    "add": "x + y",
    "add_": "x += y",
    "mul": "x * y",
    "mul_row": "x [n, width] * w [width]",
    "mul_column": "x [n, width] * s [n, 1]",
    "masked_fill": "x [n, width] with positions of each row set to a number",
    "exp": "x.exp()",
    "rsqrt": "x.rsqrt()",
    "silu": "silu(x)",
    "silu_backward": "its gradient",
    "gelu": "gelu(x), by tanh",
    "gelu_backward": "its gradient",
    "mean": "x [n, width] over width",
    "sum_rows": "x [n, width] over n: the gradient of a bias or of a norm's weight",
    "norm": "the 2-norm of the whole",
    "softmax": "rows of x [n, vocabulary]",
    "softmax_": "rows of x [n, vocabulary], in place",
    "amax": "the greatest of each row of x [n, vocabulary]",
    "log_softmax": "rows of x [n, vocabulary]",
    "log_softmax_backward": "its gradient",
    "embedding": "rows of a table [vocabulary, width] gathered in random order",
    "embedding_backward": "gradients of random rows summed into a table: the bytes of the gradient and of the table",
    "random_": "64 random bits an element, drawn one after the other on a CPU",
    "index_copy_": "rows written in random order into a tensor that exists",
    "look_up": "numbers of a table of 256 by their 32-bit indices: the bytes of the indices and of the result",
    "where": "x or y, whole, by one flag",
}
"""Memory-bound operators.

The time of a call is the bytes of operands read and results written over the rate. Each tensor counts once, a broadcast
operand at its own size, index tensors not at all.
"""


@dataclass(frozen=True)
class MatrixRate:
    """FLOP/s of one matmul of a linear layer."""

    dtype: str
    layout: Layout
    n: int
    k: int
    m: int
    flops: float


@dataclass(frozen=True)
class MovedRate:
    """Bytes/s (`rate`) of one of `MOVERS` when it moves `bytes`."""

    operator: str
    dtype: str
    bytes: int
    rate: float


@dataclass(frozen=True)
class AttentionRate:
    """FLOP/s of causal attention, counted without the mask: 4 (backward 10) rows heads length^2 head_dim."""

    dtype: str
    direction: Literal["forward", "backward"]
    length: int
    heads: int
    head_dim: int
    flops: float


@dataclass(frozen=True)
class Present:
    """The present speed of a machine: a share of its rates, and its use meanwhile."""

    share: float
    machine: MachineUse


_Row = TypeVar("_Row")
_log = logging.getLogger(__name__)


def _interpolate_nearest(points: Iterable[tuple[Sequence[float], float]], at: Sequence[float], count: int = 4) -> float:
    """Interpolates at `at`: geometric mean of the `count` nearest points, weighted by 1 / distance^2 in log space."""
    # Shapes span orders of magnitude, so distances are between logarithms: n, k and m count by their ratios.
    place = [math.log(value) for value in at]
    nearest = sorted((math.dist([math.log(value) for value in where], place), value) for where, value in points)[:count]
    # At a measured point the weight would be infinite.
    if nearest[0][0] < 1e-9:
        return nearest[0][1]
    # Geometric mean: exp(sum w_i log(rate_i) / sum w_i) with w_i = 1 / distance_i^2.
    weights = [distance**-2 for distance, _ in nearest]
    return math.exp(sum(w * math.log(value) for w, (_, value) in zip(weights, nearest, strict=True)) / sum(weights))


def _interpolate(points: Iterable[tuple[float, float]], at: float) -> float:
    """Interpolates linearly in log-log space between the neighbours of `at`; constant beyond the outermost points."""
    known = sorted(points)
    # (at,) sorts before (at, rate), so a measured size is the upper neighbour and gets its own rate.
    above = bisect.bisect_left(known, (at,))
    if above in (0, len(known)):
        return known[min(above, len(known) - 1)][1]
    (low, first), (high, last) = known[above - 1 : above + 1]
    share = math.log(at / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(first) + share * math.log(last))


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine, with all `threads` together."""

    hardware: str
    """Name of the processor or accelerator, as `probe` gives it."""
    torch: str
    """Version of torch."""
    threads: int
    """CPU threads used."""
    peak_matrix_rate: Mapping[str, float]
    """dtype -> FLOP/s of the best matmul, the denominator of MFU."""
    bandwidth: float
    """Bytes/s read and written by a copy far larger than the caches."""
    launch: float
    """Seconds of an operator on a tiny tensor: the launch overhead."""
    adamw: Mapping[str, float]
    """dtype of the parameters -> seconds per parameter of one step of fused AdamW."""
    matrix: tuple[MatrixRate, ...]
    moved: tuple[MovedRate, ...]
    attention: tuple[AttentionRate, ...]
    contended: bool
    """Other processes used the same cores, so the rates may be too low by a third; measure again on an idle machine."""
    seconds: float
    """Duration of the measurement."""
    near: float | None = None
    """Bytes/s read and written by an operator on 1 MiB in a CPU's cache; None on a GPU."""
    to_host: float | None = None
    """Bytes/s from GPU memory to pinned host memory; None on a CPU."""
    to_device: float | None = None
    """Bytes/s from pinned host memory to GPU memory; None on a CPU."""
    host_operator: float | None = None
    """Seconds of the host per operator of a training step (`host_time`); None: calibrated before it was measured."""
    host_custom: float | None = None
    """The same of a custom operator written in Python."""
    links: tuple[LinkRate, ...] = ()
    """Times of collectives between devices of this kind, measured by `nettest`; stored in a separate file."""
    driver: str = ""
    """Version of the GPU's driver, which brings the compiler of its kernels; "" on a CPU."""
    partial: bool = False
    """Only the sizes of some steps were measured (`rates_for`); others are interpolated from these."""
    pace: float = 1.0
    """Median ratio of measured to predicted step time of finished runs (`note_run`); stored in a separate file."""
    machine: MachineUse | None = None
    """CPU use during the measurement, or during the part of it with the most other work; None: not noted, so somebody
    gave these rates, and no probe doubts them."""
    now: Present | None = None
    """The present speed of the machine, if a probe found that it is less than these rates. Not stored."""

    @property
    def of_gpu(self) -> bool:
        """True if a GPU was measured, which computes while the host launches the next kernels."""
        return self.near is None

    def matrix_rate(self, dtype: str, layout: Layout, n: int, k: int, m: int) -> float:
        """Returns the FLOP/s of a matmul, interpolated between the measured shapes.

        Args:
            dtype: `bf16`, `fp32`, on CUDA also `fp16`.
            layout: one of `LAYOUTS`.
            n: rows.
            k: inputs of the layer.
            m: outputs of the layer.

        Raises:
            RunError: nothing was measured in that dtype.
        """
        # Layouts are not mixed: for one shape their rates differ, because each is another kernel.
        points = [((r.n, r.k, r.m), r.flops) for r in self.matrix if (r.dtype, r.layout) == (dtype, layout)]
        return _interpolate_nearest(self._require(points, f"matmuls in {dtype}"), (n, k, m))

    def moved_rate(self, operator: str, dtype: str, bytes: int) -> float:
        """Returns the bytes/s of one of `MOVERS` when it reads and writes `bytes` in total; `launch` is not included.

        Raises:
            RunError: it was not measured in that dtype.
        """
        points = [(r.bytes, r.rate) for r in self.moved if (r.operator, r.dtype) == (operator, dtype)]
        return _interpolate(self._require(points, f"'{operator}' in {dtype}"), max(bytes, 1))

    def attention_rate(self, dtype: str, direction: Literal["forward", "backward"], length: int) -> float:
        """Returns the FLOP/s of causal attention, with FLOPs counted as in `AttentionRate`.

        Raises:
            RunError: nothing was measured in that dtype.
        """
        points = [(r.length, r.flops) for r in self.attention if (r.dtype, r.direction) == (dtype, direction)]
        return _interpolate(self._require(points, f"attention in {dtype}"), length)

    def collective_seconds(self, collective: str, backend: str, bytes: int, devices: int, hosts: int = 1) -> float:
        """Returns the seconds of a collective of `bytes` (counted as in nccl-tests), as measured by `nettest`.

        Raises:
            RunError: it was not measured over that backend.
        """
        seconds = seconds_of(self.links, collective, backend, bytes, devices, hosts)
        if seconds is None:
            raise RunError(f"no {collective} over {backend} was measured on {self.hardware}; run: preheat nettest")
        return seconds

    def _require(self, points: list[Any], what: str) -> list[Any]:
        if not points:
            raise RunError(f"no rate of {what} was measured on {self.hardware}; plan with another dtype")
        return points

    def values(self) -> JsonObject:
        """Returns the measured values as JSON, which `parse` reads."""
        left_out = {*_APART, *(key for key in _OPTIONAL if getattr(self, key) in (None, "", False))}
        values = {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}
        return {"format": _FORMAT_GPU if self.of_gpu else _FORMAT, **values}

    def holds(self, dtype: str, layout: Layout, n: int, k: int, m: int) -> bool:
        """True if this matmul was measured itself."""
        at = (dtype, layout, n, k, m)
        return any((row.dtype, row.layout, row.n, row.k, row.m) == at for row in self.matrix)

    def join_rates(self, other: Rates) -> Rates:
        """Returns these rates of some sizes and those of others of the same machine; where both have one, `other`'s.

        Example:
            >>> one = Rates("a GPU", "2.11", 8, {}, 1e12, 5e-6, {}, (), (), (), False, 3.0, partial=True)
            >>> one.join_rates(dataclasses.replace(one, peak_matrix_rate={"bf16": 7e14}, seconds=2.0)).seconds
            5.0
        """

        def rows(name: str) -> tuple[Any, ...]:
            # The last field of each row is its rate.
            measured = {dataclasses.astuple(row)[:-1]: row for rates in (self, other) for row in getattr(rates, name)}
            return tuple(measured.values())

        dtypes = {**self.peak_matrix_rate, **other.peak_matrix_rate}
        return dataclasses.replace(
            other,
            peak_matrix_rate={d: max(r.peak_matrix_rate.get(d, 0.0) for r in (self, other)) for d in dtypes},
            adamw={**self.adamw, **other.adamw},
            matrix=rows("matrix"),
            moved=rows("moved"),
            attention=rows("attention"),
            contended=self.contended or other.contended,
            seconds=self.seconds + other.seconds,
            host_operator=other.host_operator or self.host_operator,
            host_custom=other.host_custom or self.host_custom,
            pace=self.pace,
            links=self.links,
        )

    def store(self, *, anew: bool = True) -> Path:
        """Writes the rates atomically to the file that `load` reads.

        Args:
            anew: they replace all earlier ones, to which the recorded ratios of runs were relative.

        Raises:
            RunError: the folder cannot be written.
        """
        path = calibration_path(self.hardware, self.torch, self.threads)
        store_json(path, self.values())
        if anew:
            _runs_path(path).unlink(missing_ok=True)
        return path


_FORMAT, _FORMAT_GPU = 9, 10
"""File format versions of CPU and GPU measurements; increase them when the measurements change."""
_OF_GPU = ("to_host", "to_device")
"""Fields measured on GPUs only."""
_OF_HOST = ("host_operator", "host_custom")
"""Fields that files written before they were measured do not have."""
_OPTIONAL = (*_OF_GPU, *_OF_HOST, "machine", "driver", "partial")
_APART = ("links", "pace", "now")
"""Fields that are not in the file: `nettest` and finished runs update files of their own, and a probe is not stored."""


_INSTRUCTION_SETS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Variables that limit the instructions of torch's kernels, and of oneDNN's."""


def calibration_path(hardware: str, torch: str, threads: int) -> Path:
    """Returns the path of the calibration, in $PREHEAT_CACHE or ~/.cache/preheat.

    Limits on the instruction set have files of their own: bf16 without AVX512 can be a thousand times as slow. So have
    formats, so that versions of preheat that share a folder do not overwrite each other's files.
    """
    limits = [f"{name}={os.environ[name]}" for name in _INSTRUCTION_SETS if os.environ.get(name)]
    parts = [hardware, torch, threads, *limits, f"formats={_FORMAT},{_FORMAT_GPU}"]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return cache_folder() / f"calibration-{key}.json"


def load(hardware: str, torch: str, threads: int, driver: str = "") -> Rates | None:
    """Loads the stored rates of this hardware, torch version, number of threads and driver; None if there are none.

    A damaged file is ignored with a warning, a file of an older format silently, because this is a cache.

    Raises:
        RecipeError: the file of this machine was measured on another one, so somebody copied it here.
    """
    path = calibration_path(hardware, torch, threads)
    expected = {"hardware": hardware, "torch": torch, "threads": threads, "driver": driver}
    try:
        values = read_json(path)
        if values is None:
            return None
        owner = values.get("hardware")
        # The file's name is a hash of the hardware, so a file of other hardware was copied here.
        if isinstance(owner, str) and owner != hardware:
            raise RecipeError(
                f"{path}: was measured on {shorten(owner)}, and this is {hardware}; "
                "delete it, and it is measured here (preheat calibrate)"
            )
        # A GPU's file has `near` as null; a file without the key is read as a CPU's and fails validation.
        current = _FORMAT_GPU if values.get("near", 0) is None else _FORMAT
        # A CPU's file has no driver.
        if {key: values.get(key, "") for key in expected} != expected or values.get("format") != current:
            return None
        rates = parse(values)
    except Damaged as error:
        _log.warning("%s: is damaged (%s); this machine is measured again", path, error)
        return None
    return dataclasses.replace(
        rates, links=load_links(hardware, torch), pace=_compute_pace(_read_runs(_runs_path(path)))
    )


def describe_unusable_rates(hardware: str, torch: str, threads: int, driver: str = "") -> str:
    """Returns how the stored rates of this hardware differ from what `load` accepts; "" if there are none.

    Args:
        hardware, torch, threads, driver: as for `load`, which found nothing.
    """
    own = calibration_path(hardware, torch, threads)
    for path in (own, *sorted(set(own.parent.glob("calibration-*.json")) - {own})):
        try:
            values = read_json(path) or {}
        except Damaged:  # `load` reports it
            continue
        if (values.get("hardware"), values.get("threads")) != (hardware, threads):
            continue
        for name, here in (("torch", torch), ("driver", driver)):
            if isinstance(other := values.get(name, ""), str) and other != here:
                stored = shorten(other, 40) or "none"
                return f"{hardware} was calibrated with {name} {stored}, and this is {here or 'none'}"
    return ""


def parse(values: JsonObject) -> Rates:
    """Validates the values of `Rates.values`: the expected keys, finite positive numbers, all rates for each dtype.

    Raises:
        Damaged: the validation failed.
    """
    stored = {field.name for field in dataclasses.fields(Rates)} - {*_APART}
    # Keys on one side only, except those that a file may leave out.
    if other := (values.keys() ^ stored ^ {"format"}) - ({*_OPTIONAL} - values.keys()):
        name = shorten(min(other), 40)
        raise Damaged(f"{name} is {'not known' if min(other) in values else 'missing'}")
    for name in ("contended", "partial"):
        if not isinstance(values.get(name, False), bool):
            raise Damaged(f"{name} is neither true nor false")

    def rows(cls: type[_Row], key: str) -> tuple[_Row, ...]:
        if not isinstance(values[key], list):
            raise Damaged(f"{key} is not a list")
        return tuple(read_row(cls, row) for row in values[key])

    matrix, moved, attention = rows(MatrixRate, "matrix"), rows(MovedRate, "moved"), rows(AttentionRate, "attention")
    peak, adamw = read_numbers(values["peak_matrix_rate"], "peak_matrix_rate"), read_numbers(values["adamw"], "adamw")
    # Every dtype with a peak needs every kind of rate; else a plan in that dtype fails later, at its first use.
    kinds: set[tuple[str, str]] = {(row.dtype, row.layout) for row in matrix} | {
        (row.dtype, row.direction) for row in attention
    }
    kinds |= {(row.dtype, "moved") for row in moved} | {(dtype, "adamw") for dtype in adamw}
    if not peak:
        raise Damaged("peak_matrix_rate is empty")
    for dtype in peak:
        # TF32 affects matmuls only; other operators use the fp32 rates.
        for kind in LAYOUTS if dtype == "tf32" else (*LAYOUTS, "forward", "backward", "moved", "adamw"):
            if (dtype, kind) not in kinds:
                raise Damaged(f"no rate of {kind} in {shorten(dtype, 20)}")
    numbers: dict[str, Any] = {key: read_number(values[key], key) for key in ("bandwidth", "launch", "seconds")}
    near = None if values["near"] is None else read_number(values["near"], "near")
    names = {key: values[key] for key in ("hardware", "torch", "threads", "contended")}
    names |= {key: values[key] for key in ("driver", "partial") if key in values}
    numbers |= {key: read_number(values[key], key) for key in (*_OF_GPU, *_OF_HOST) if key in values}
    return Rates(
        **names,
        **numbers,
        near=near,
        machine=read_use(values["machine"]) if "machine" in values else None,
        peak_matrix_rate=peak,
        adamw=adamw,
        matrix=matrix,
        moved=moved,
        attention=attention,
    )


_MAX_RUNS = 9
"""Number of most recent runs that count, because the load of a shared machine changes."""
_MIN_RUNS = 3
"""Fewer runs than this are not representative."""
_MAX_RATIO = 10.0
"""A run that is further from its plan shows wrong rates, not a slow machine, and corrects no later plan."""


def note_run(hardware: str, torch: str, threads: int, ratio: float, machine: MachineUse | None = None) -> None:
    """Records the ratio of measured to predicted step time of a finished run; later plans are scaled by the median.

    A run beside other work is left out: its ratio says nothing about this machine.

    Args:
        ratio: measured seconds over predicted seconds, without the pace of earlier runs.
        machine: CPU use during the run; None: unknown.

    Raises:
        RunError: the folder cannot be written.
    """
    if not 1 / _MAX_RATIO <= ratio <= _MAX_RATIO:
        _log.warning(
            "this run took %.3g times as long as planned: later plans ignore it; measure again with preheat calibrate",
            ratio,
        )
        return
    if machine is not None and machine.alone is False:
        return
    path = _runs_path(calibration_path(hardware, torch, threads))
    # A damaged file reads as empty, so the new run replaces it.
    runs = [*_read_runs(path), (ratio, machine)][-_MAX_RUNS:]
    store_json(path, {"runs": [{"ratio": ratio, "machine": use} for ratio, use in runs]})


def _runs_path(calibration: Path) -> Path:
    return calibration.with_name(calibration.name.replace("calibration", "runs"))


def _read_runs(path: Path) -> list[tuple[float, MachineUse | None]]:
    """Returns (ratio, CPU use) of the runs in a file; empty if it is missing or damaged, because it is a cache."""
    try:
        rows = (read_json(path) or {}).get("runs")
        runs = [_read_run(row) for row in rows] if isinstance(rows, list) else []
    except Damaged:
        return []
    return [
        (ratio, machine)
        for ratio, machine in runs
        if 1 / _MAX_RATIO <= ratio <= _MAX_RATIO and (machine is None or machine.alone is not False)
    ]


def _read_run(row: object) -> tuple[float, MachineUse | None]:
    if not isinstance(row, dict) or row.keys() != {"ratio", "machine"}:
        raise Damaged("a run is not its ratio and the machine's use")
    machine = None if row["machine"] is None else read_use(row["machine"])
    return read_number(row["ratio"], "ratio"), machine


def _compute_pace(runs: Sequence[tuple[float, MachineUse | None]]) -> float:
    # The median also ignores a run that was slowed down on a system that does not tell what other processes use.
    return median(ratio for ratio, _ in runs) if len(runs) >= _MIN_RUNS else 1.0
