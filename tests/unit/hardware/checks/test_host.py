"""Findings about memory, threads, huge pages and the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.core.finding import Severity
from preheat.hardware.checks.host import check_compiler, check_huge_pages, describe_memory, describe_threads
from preheat.hardware.cpp_build import find_compiler
from preheat.hardware.probe import read_cpu_quota

GIB = 2**30


@pytest.mark.parametrize(
    ("cores", "quota", "stated", "severity", "fix"),
    [
        (8, None, None, Severity.OK, None),
        (8, None, "8", Severity.OK, None),
        (8, None, "8,4", Severity.OK, None),
        (8, None, "2", Severity.SLOWS, "unset OMP_NUM_THREADS"),
        (8, None, "16", Severity.SLOWS, "export OMP_NUM_THREADS=8"),
        (8, 2.5, None, Severity.SLOWS, "export OMP_NUM_THREADS=2"),
        (8, 2.5, "2", Severity.OK, None),
        (8, 0.5, "1", Severity.OK, None),
        (8, None, "zero", Severity.SLOWS, "export OMP_NUM_THREADS=8"),
    ],
)
def test_threads_against_cores(
    cores: int, quota: float | None, stated: str | None, severity: Severity, fix: str | None
) -> None:
    (finding,) = describe_threads(cores, quota, {} if stated is None else {"OMP_NUM_THREADS": stated})
    assert (finding.severity, finding.fix and finding.fix.command) == (severity, fix)


def test_the_tightest_quota_of_all_control_groups_counts(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert read_cpu_quota(groups, tmp_path) is None
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert read_cpu_quota(groups, tmp_path) == 1.5
    groups.write_text("1:cpuset:/\n2:cpu,cpuacct:/job\n")
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("50000\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    assert read_cpu_quota(groups, tmp_path) is None
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("200000\n")
    assert read_cpu_quota(groups, tmp_path) == 4


def test_memory_below_what_torch_takes_stops() -> None:
    severities = [describe_memory(16 * GIB, int(free * GIB))[0].severity for free in (12, 6, 0.5)]
    assert severities == [Severity.OK, Severity.NOTE, Severity.STOPS]


def test_huge_pages(tmp_path: Path) -> None:
    file = tmp_path / "enabled"
    assert check_huge_pages(file) == []
    file.write_text("always [madvise] never\n")
    assert check_huge_pages(file)[0].severity is Severity.OK
    file.write_text("always madvise [never]\n")
    assert check_huge_pages(file)[0].severity is Severity.SLOWS


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_compiler_is_tried_and_not_only_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_compiler()[0].severity is Severity.OK
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file or directory' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    (finding,) = check_compiler()
    assert finding.severity is Severity.SLOWS
    assert finding.message == f"{broken} does not work: fatal error: omp.h: No such file or directory"
    broken.write_text("#!/bin/sh\nexit 3\n")
    assert check_compiler()[0].message.endswith("ended with exit code 3")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    (finding,) = check_compiler()
    assert finding.message == "no C++ compiler was found"
    assert "twice as long" in finding.cost
