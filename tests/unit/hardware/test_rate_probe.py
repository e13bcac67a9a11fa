"""The probe that compares a CPU with its calibration before a plan of it."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
import torch

from preheat.core import Device, MachineUse
from preheat.hardware import rate_probe
from preheat.hardware.catalogue import find_accelerator
from preheat.hardware.rate_probe import measure_checked_rates, probe_rates
from preheat.hardware.rates import LAYOUTS, MatrixRate, Present, Rates
from preheat.planning.plan import plan
from preheat.planning.plan_request import choose_hardware
from preheat.planning.request import Request

from ...conftest import tiny
from .test_hardware import made_up

DEVICE = Device("cpu", "made up", 2**30)
QUIET, UNKNOWN, SHARED = (MachineUse(0.3, 1.0, others, 2, 2) for others in (0.0, None, 1.5))


def stored(**changes: object) -> Rates:
    made = dataclasses.replace(made_up(machine=QUIET, **changes), torch=torch.__version__, threads=1)
    made.store()
    return made


@pytest.mark.parametrize(
    ("share", "machine", "contended", "measured"),
    [
        (1.1, QUIET, False, "as it is"),
        (0.9, QUIET, False, "as it is"),
        (1.3, QUIET, False, "again"),
        (1.3, UNKNOWN, False, "again"),
        (1.3, SHARED, False, "as it is"),  # another calibration would be spoiled too
        (0.5, SHARED, False, "slower"),
        (0.5, QUIET, False, "slower"),
        (0.5, UNKNOWN, False, "slower"),
        (1.0, QUIET, True, "again"),
        (0.5, QUIET, True, "again"),
        (1.0, SHARED, True, "as it is"),
        (0.5, SHARED, True, "slower"),
    ],
)
def test_rates_are_checked_before_a_plan(
    share: float,
    machine: MachineUse,
    contended: bool,
    measured: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    known = stored(contended=contended)
    anew = dataclasses.replace(known, contended=False, bandwidth=7e10)
    probes: list[Rates] = []
    monkeypatch.setattr(rate_probe, "_last", None)
    monkeypatch.setattr(rate_probe, "probe_rates", lambda rates, _: probes.append(rates) or Present(share, machine))
    monkeypatch.setattr(rate_probe, "remeasure_rates", lambda *_: [anew, anew.store()][0])
    expected = {
        "as it is": known,
        "again": anew,
        "slower": dataclasses.replace(known, now=Present(share, machine)),
    }[measured]
    assert measure_checked_rates(DEVICE, 1) == expected
    assert bool(caplog.messages) == (measured == "again")
    assert measure_checked_rates(DEVICE, 1) == expected
    assert probes == [known]  # once in a minute
    assert ("30% faster" in caplog.text) == (measured == "again" and not contended)


def test_rates_that_somebody_gave_are_never_doubted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    given = dataclasses.replace(made_up(), torch=torch.__version__, threads=1)
    given.store()
    monkeypatch.setattr(rate_probe, "probe_rates", lambda *_: pytest.fail("probed"))
    assert measure_checked_rates(DEVICE, 1) == given
    gpu = dataclasses.replace(given, near=None, to_host=2e10, to_device=3e10, machine=QUIET)
    gpu.store()
    assert measure_checked_rates(DEVICE, 1) == gpu
    # A calibration that is known to be disturbed is measured again all the same.
    dataclasses.replace(gpu, contended=True).store()
    monkeypatch.setattr("preheat.hardware.benchmark_rates._is_quiet", lambda threads: True)
    monkeypatch.setattr("preheat.hardware.benchmark_rates._measure_in_process", lambda *_: given.store())
    assert measure_checked_rates(DEVICE, 1) == given


def test_a_plan_says_now_and_with_the_machine_to_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    rates = made_up(
        matrix=tuple(MatrixRate("fp32", layout, 100, 100, 100, 1e10) for layout in LAYOUTS),
        moved=tuple(dataclasses.replace(row, operator=name) for row in made_up().moved for name in rate_probe_movers()),
    )
    request = Request(tiny(), DEVICE, vocabulary=96, rates=rates)
    alone = plan(request)
    assert alone.now is None
    shared = plan(dataclasses.replace(request, rates=dataclasses.replace(rates, now=Present(0.25, SHARED))))
    now = shared.now
    assert now is not None
    assert dataclasses.replace(shared, now=None) == alone
    assert now.tokens_per_second == pytest.approx(alone.tokens_per_second / 4)
    assert now.seconds_per_step == pytest.approx(4 * alone.seconds_per_step)
    assert now.machine.alone is False


def rate_probe_movers() -> list[str]:
    from preheat.hardware.rates import MOVERS

    return [*MOVERS]


def test_plans_of_this_machine_are_probed_and_of_others_not(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Device] = []
    monkeypatch.setattr(rate_probe, "measure_checked_rates", lambda device, threads: probed.append(device) or made_up())
    choose_hardware(find_accelerator("H100"), tiny(), 1)
    assert probed == []
    choose_hardware(None, tiny(), 1)
    assert len(probed) == 1


SHAPES = ((1024, 288, 768), (256, 768, 768), (256, 768, 3072), (64, 64, 64), (4096, 4096, 4096))


def test_a_probe_finds_the_share_of_the_rates() -> None:
    """Only that of rates given as far too high and far too low: how busy this machine is now is not known."""
    threads, names = threading.active_count(), {t.name for t in threading.enumerate()}
    before = torch.get_num_threads()
    for flops, low, high in ((1e15, 0.0, 0.5), (1e6, 2.0, 1e12)):
        rates = made_up(matrix=tuple(MatrixRate("fp32", "forward", *shape, flops) for shape in SHAPES))
        start = time.perf_counter()
        present = probe_rates(rates, 1)
        taken = time.perf_counter() - start
        assert present is not None
        assert low < present.share < high
        assert present.machine.threads == 1
        # Of half a second at most, on a machine that is not busy; no test can have it to itself.
        assert present.machine.seconds <= taken < 10
    # Its threads end with it.
    assert threading.active_count() <= threads or {t.name for t in threading.enumerate()} == names
    assert torch.get_num_threads() == before


def test_matmuls_that_are_too_small_or_too_large_are_not_probed() -> None:
    small = made_up(matrix=tuple(MatrixRate("fp32", "forward", *shape, 1e11) for shape in SHAPES[3:]))
    assert probe_rates(small, 1) is None
    rows = tuple(MatrixRate(dtype, "forward", *shape, 1e11) for shape in SHAPES for dtype in ("fp32", "bf16"))
    chosen = rate_probe._choose_matmuls(made_up(matrix=rows))
    assert [(row.dtype, row.n, row.k, row.m) for row in chosen] == [
        ("fp32", 256, 768, 768),
        ("fp32", 1024, 288, 768),
        ("fp32", 256, 768, 3072),
    ]
