"""Plausibility of a GPU's calibration: against its data sheet, and against itself. Does not import torch.

Events that time launches only give rates that no device has; another process or throttling gives a fraction of them. A
plan by such rates would be off by as much, so it takes the rates of the data sheet and says why. Without a data sheet,
only values that contradict each other can be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from preheat.errors import RecipeError
from preheat.hardware.catalogue import ATTENTION_SHARES, Accelerator, find_accelerator
from preheat.hardware.rates import MatrixRate, Rates

__all__ = ["contradicted_data_sheet", "doubt_of", "doubt_without_data_sheet", "find_data_sheet"]

_LARGE = 1024
"""Least size of each dimension of a matmul whose rate is near the best one; on an H100 9 in 10 reach 0.78 of it."""
_FASTEST = 1.25
"""Of the data sheet's peak: boosted clocks of GeForce reach 1.15."""
_SLOWEST = 0.6
"""Of what the data sheet's device sustains; large matmuls of an H100 reached 0.84 (tf32) to 0.96 (bf16), its copies
1.05. A lower power limit costs a third."""
_STEADY = 0.6
"""Of the fast tenth of large matmuls, reached by the slow tenth: 0.84 on an H100. Half the clock gives 0.5."""
_GROWS = 3.0
"""Least ratio of the longest time of a matmul to the shortest: at 100 times the FLOPs, 30 and more."""
_ATTENDS, _ATTENDS_AT_LEAST = 0.4, 0.15
"""Least rate of attention over the longest rows: of the generation's share of the data sheet's rate, which an H100
exceeded by 1.4 to 1.9 times; and of the calibrated matmuls' rate if the generation is not known."""
_HEAD, _HEADS = 64, 1 << 15
"""Least width of a head, and least heads times rows, of attention that fills a GPU."""
_UPDATES = (0.5, 4.0)
"""Time of AdamW over that of its bytes at the calibrated bandwidth; 1.3 to 1.6 on an H100."""
_ADAMW_BYTES = {"bf16": 14, "fp16": 14, "fp32": 28}
"""Bytes that AdamW reads and writes for each parameter."""
_HOST_RATIO = 8.0
"""Most host time of an operator in a step over that of a bare launch: 2.0 and 3.1 on two hosts."""
_UNSTEADY = ("bf16", "fp16", "fp32")
"""Dtypes whose large matmuls run at about one rate; those in TF32 depend on the layout."""


def find_data_sheet(rates: Rates) -> Accelerator | None:
    """Returns the data sheet of a calibrated GPU; None for a CPU, or if the catalogue lacks the GPU."""
    if not rates.of_gpu:
        return None
    try:
        return find_accelerator(rates.hardware)
    except RecipeError:
        return None


def contradicted_data_sheet(rates: Rates) -> tuple[Accelerator, str] | None:
    """Returns the data sheet of a GPU and how its calibration contradicts it; None if it does not, or there is none.

    Example:
        contradicted_data_sheet(rates) -> (accelerator("H100"), "calibrated matmuls in bf16 are 11 times ...")
    """
    sheet = find_data_sheet(rates)
    if sheet is None or sheet.memory is None or sheet.bandwidth is None or not sheet.peaks():
        return None
    why = _describe_contradiction(rates, sheet) or _describe_inconsistency(rates)
    return (sheet, f"{why}; the data sheet's rates are used ({_AGAIN})") if why else None


def doubt_without_data_sheet(rates: Rates) -> str | None:
    """Returns how a GPU's calibration contradicts itself; None if it does not."""
    why = _describe_inconsistency(rates) if rates.of_gpu else None
    return why and f"{why}; speeds are not reliable ({_AGAIN})"


def doubt_of(rates: Rates) -> str | None:
    """Returns how a calibration contradicts its data sheet or itself; None if it does not."""
    contradicted = contradicted_data_sheet(rates)
    return contradicted[1] if contradicted else doubt_without_data_sheet(rates)


_AGAIN = "measure again on an idle device: preheat calibrate --device cuda"
_BUSY = "another process or throttling"


def _describe_contradiction(rates: Rates, sheet: Accelerator) -> str | None:
    peaks, sustained = sheet.peaks(), sheet.sustained(alone=True)
    what = f"the data sheet of {sheet.name}"
    for dtype, peak in peaks.items():
        large = _largest_matmuls(rates, dtype)
        if not large:
            continue
        best, usual = max(row.flops for row in large), median(row.flops for row in large)
        if best > _FASTEST * peak:
            return f"calibrated matmuls in {dtype} are {_format_ratio(best / peak)} faster than {what} allows"
        if usual < _SLOWEST * sustained[dtype]:
            slower = _format_ratio(sustained[dtype] / usual)
            return f"calibrated matmuls in {dtype} are {slower} slower than {what}: {_BUSY}"
        share = ATTENTION_SHARES.get(sheet.generation)
        if share and (lag := _slowness_of_attention(rates, dtype, peak, min(share))) > 1 / _ATTENDS:
            return f"calibrated attention in {dtype} is {_format_ratio(lag)} slower than {what}: {_BUSY}"
    assert sheet.bandwidth is not None
    for name, bandwidth in (("copy", rates.bandwidth), *_largest_copies(rates)):
        if bandwidth > _FASTEST * sheet.bandwidth:
            return (
                f"calibrated memory bandwidth ({name}) is {_format_ratio(bandwidth / sheet.bandwidth)} that of {what}"
            )
        if bandwidth < _SLOWEST * _COPY * sheet.bandwidth:
            slower = _format_ratio(_COPY * sheet.bandwidth / bandwidth)
            return f"calibrated memory bandwidth ({name}) is {slower} lower than {what}: {_BUSY}"
    return None


_COPY = 0.85
"""Of the data sheet's bandwidth, reached by large copies."""


def _describe_inconsistency(rates: Rates) -> str | None:
    for dtype in rates.peak_matrix_rate:
        rows = [row for row in rates.matrix if row.dtype == dtype]
        times = [_count_flops(row) / row.flops for row in rows]
        work = [_count_flops(row) for row in rows]
        # Partial rates may be of a small model, all of whose matmuls take as long as the shortest kernel.
        grow = rates.partial or not rows or max(work) <= 100 * min(work) or max(times) >= _GROWS * min(times)
        if not grow:
            return f"calibrated times of matmuls in {dtype} do not grow with their work, as if only launches were timed"
        large = [row.flops for row in _largest_matmuls(rates, dtype)]
        if dtype in _UNSTEADY and len(large) > 9:
            tenths = quantiles(large, n=10)
            if tenths[0] < _STEADY * tenths[-1]:
                slower = _format_ratio(tenths[-1] / tenths[0])
                return f"some calibrated matmuls in {dtype} are {slower} slower than others: {_BUSY}"
        best = max((row.flops for row in rows), default=rates.peak_matrix_rate[dtype])
        lag = _slowness_of_attention(rates, dtype, best, 1.0)
        if lag > 1 / _ATTENDS_AT_LEAST:
            return f"calibrated attention in {dtype} is {_format_ratio(lag)} slower than matmuls: {_BUSY}"
        if lag and lag < 1 / _FASTEST:
            return f"calibrated attention in {dtype} is {_format_ratio(1 / lag)} faster than matmuls can be"
    for dtype, seconds in rates.adamw.items():
        ratio = seconds * rates.bandwidth / _ADAMW_BYTES.get(dtype, 28)
        if ratio > _UPDATES[1]:
            return f"calibrated AdamW in {dtype} takes {_format_ratio(ratio)} as long as its bytes: {_BUSY}"
        if ratio < _UPDATES[0] and not rates.partial:  # of few weights, which the cache may hold
            return f"calibrated AdamW in {dtype} is {_format_ratio(1 / ratio)} faster than its bytes can be"
    if rates.host_operator is not None and rates.host_operator > _HOST_RATIO * rates.launch:
        ratio = rates.host_operator / rates.launch
        return f"calibrated operators of a step take the host {_format_ratio(ratio)} as long as a launch: {_BUSY}"
    for name, bandwidth in _largest_copies(rates):
        if not _STEADY < bandwidth / rates.bandwidth < 1 / _STEADY:
            ratio = max(bandwidth / rates.bandwidth, rates.bandwidth / bandwidth)
            return f"two calibrated rates of large copies ({name}) differ by {_format_ratio(ratio)}: {_BUSY}"
    return None


def _largest_matmuls(rates: Rates, dtype: str) -> Sequence[MatrixRate]:
    return [row for row in rates.matrix if row.dtype == dtype and min(row.n, row.k, row.m) >= _LARGE]


def _slowness_of_attention(rates: Rates, dtype: str, peak: float, share: float) -> float:
    """Returns `share` of a rate over that of attention over the longest rows, causal work only; 0 without any.

    In half precision only: kernels in fp32 may use TF32.
    """
    large = [row for row in rates.attention if row.head_dim >= _HEAD and row.heads * row.length >= _HEADS]
    rows = [row for row in large if row.dtype == dtype != "fp32"]
    longest = max((row.length for row in rows), default=0)
    slowest = min((row.flops for row in rows if row.length == longest), default=0.0)
    # Rates count the whole score matrix, of which half is computed.
    return share * peak / (slowest / 2) if slowest else 0.0


def _count_flops(row: MatrixRate) -> int:
    return 2 * row.n * row.k * row.m


def _largest_copies(rates: Rates) -> list[tuple[str, float]]:
    """Returns (name, bytes/s) of the largest copies in each dtype."""
    copies = [row for row in rates.moved if row.operator == "copy" and row.bytes >= _FAR]
    dtypes = dict.fromkeys(row.dtype for row in copies)
    largest = [max((row for row in copies if row.dtype == dtype), key=lambda row: row.bytes) for dtype in dtypes]
    return [(f"in {row.dtype}", row.rate) for row in largest]


_FAR = 1 << 28
"""Bytes of a copy that no cache holds."""


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 9.5 else f"{ratio:.0f} times"
