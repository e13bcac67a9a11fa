"""benchmarks/cpu_vs_peers.py: what runs on a CPU that is slow in bf16, and which product its rate is measured on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="installed without its sources")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "_peers"), str(ROOT / "benchmarks"), *sys.path])
    import cpu_vs_peers

    return cpu_vs_peers


def test_a_cpu_without_avx512_runs_what_computes_in_fp32_and_says_what_is_left_out(script: ModuleType) -> None:
    contenders, skipped = script.choose_contenders(None, {"bf16": 3e8, "fp32": 1.5e11})
    assert [c.name for c in contenders] == [
        "trainer",
        "trainer-compile",
        "litgpt",
        "preheat-fp32",
        "preheat-fp32-compile",
    ]
    assert skipped.keys() == {c.name for c in script.CONTENDERS if c.bf16} >= {"preheat", "preheat-compile"}
    assert skipped["preheat"] == "bf16 products run at 0.3 GFLOP/s on this CPU, fp32 at 150"
    assert script.choose_contenders(["preheat"], {"bf16": 3e8, "fp32": 1.5e11}) == ([script.CONTENDERS[-2]], {})
    assert script.choose_contenders(None, {"bf16": 2.6e11, "fp32": 1.5e11}) == (list(script.CONTENDERS), {})


def test_contenders_in_bf16_are_marked(script: ModuleType) -> None:
    assert {c.name for c in script.CONTENDERS if "bf16" in f"{c.what} {c.settings}"} == {
        c.name for c in script.CONTENDERS if c.bf16
    }


@pytest.mark.parametrize(("flops", "sizes"), [(3e8, [256]), (1e10, [256, 1024]), (3e11, [256, 1024, 4096])])
def test_the_matrix_rate_is_measured_on_the_largest_product_that_takes_seconds(
    flops: float, sizes: list[int], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matrix_rate
    import torch

    measured: list[int] = []
    monkeypatch.setattr(matrix_rate, "measure_rate", lambda dtype, size, seconds, **_: measured.append(size) or flops)
    assert matrix_rate.find_best_rate(torch.bfloat16, 4096) == (flops, sizes[-1])
    assert measured == sizes
