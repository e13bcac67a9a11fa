"""Findings about torch builds, made of facts that no single machine has."""

from __future__ import annotations

import dataclasses

import pytest

from preheat.core.finding import Severity
from preheat.hardware.checks.torch_build import TorchCard, TorchFacts, describe_torch, read_torch

GIB = 2**30
H100 = TorchCard("NVIDIA H100", (9, 0), 80 * GIB)
CUDA = TorchFacts(
    "2.13.0+cu130",
    "/site-packages/torch",
    "13.0",
    cards=(H100,),
    architectures=("sm_80", "sm_90"),
    nccl="2.29",
    cpu="AVX512",
)
CPU = TorchFacts("2.13.0+cpu", "/site-packages/torch", cpu="AVX512", why_no_cuda="torch is built without CUDA")


@pytest.mark.parametrize(
    ("facts", "changes", "environment", "part", "severity", "said"),
    [
        (CUDA, {}, {}, "dtypes", Severity.OK, "bf16"),
        (CUDA, {"version": "2.10.1"}, {}, "torch", Severity.STOPS, "older than 2.11"),
        (CPU, {}, {}, "dtypes", Severity.OK, "AVX512"),
        (CPU, {"gpu_expected": True}, {}, "torch", Severity.STOPS, "built without CUDA"),
        (CUDA, {"cards": (), "why_no_cuda": "no driver"}, {}, "torch", Severity.NOTE, "runs take the CPU"),
        (CUDA, {"cards": (), "why_no_cuda": "too old", "gpu_expected": True}, {}, "torch", Severity.STOPS, "too old"),
        (CUDA, {"cards": (TorchCard("a B200", (10, 0), GIB),)}, {}, "torch", Severity.STOPS, "capability 10.0"),
        (CUDA, {"cards": (TorchCard("an L40S", (8, 9), GIB),)}, {}, "dtypes", Severity.OK, "bf16"),
        (
            CUDA,
            {"cards": (TorchCard("a B200", (10, 0), GIB),), "architectures": ("sm_90", "compute_90")},
            {},
            "dtypes",
            Severity.OK,
            "bf16",
        ),
        (
            CUDA,
            {"cards": (TorchCard("an MI300X", (9, 4), GIB),), "architectures": ("gfx90a", "gfx942")},
            {},
            "dtypes",
            Severity.OK,
            "bf16",
        ),
        (
            CUDA,
            {"cards": (TorchCard("a T4", (7, 5), GIB),), "architectures": ("sm_75",)},
            {},
            "dtypes",
            Severity.NOTE,
            "no bf16",
        ),
        (CUDA, {"cards": (H100, H100)}, {}, "links", Severity.OK, "NCCL 2.29"),
        (CUDA, {"cards": (H100, H100), "nccl": ""}, {}, "links", Severity.STOPS, "without NCCL"),
        (CUDA, {"cards": (H100, H100), "unlinked": ((0, 1),)}, {}, "links", Severity.SLOWS, "GPUs 0-1 cannot"),
        (CUDA, {"cards": (H100, H100)}, {"NCCL_P2P_DISABLE": "1"}, "links", Severity.SLOWS, "NCCL_P2P_DISABLE=1"),
        (CPU, {"cpu": "AVX2"}, {}, "dtypes", Severity.NOTE, "has no AVX512"),
        (
            CPU,
            {"cpu": "AVX2", "cpu_best": "AVX512"},
            {"ATEN_CPU_CAPABILITY": "avx2"},
            "dtypes",
            Severity.SLOWS,
            "torch uses AVX2 (ATEN_CPU_CAPABILITY=avx2)",
        ),
    ],
)
def test_each_state_of_a_build(
    facts: TorchFacts,
    changes: dict[str, object],
    environment: dict[str, str],
    part: str,
    severity: Severity,
    said: str,
) -> None:
    findings = describe_torch(dataclasses.replace(facts, **changes), environment)  # type: ignore[arg-type]
    worst = min(findings, key=lambda finding: list(Severity).index(finding.severity))
    assert worst.severity is severity, findings
    assert any(said in finding.message for finding in findings if (finding.part, finding.severity) == (part, severity))


def test_this_torch_is_read() -> None:
    import torch

    facts = read_torch()
    assert facts.version == torch.__version__
    assert len(facts.cards) == torch.cuda.device_count()
    assert facts.cpu == torch.backends.cpu.get_cpu_capability()
