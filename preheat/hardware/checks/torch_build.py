"""Checks of torch: release, build against the GPUs, dtypes, links between GPUs, and the stored calibration."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from preheat.core.finding import Finding, Fix, FixKind, Severity
from preheat.core.units import format_memory
from preheat.errors import RecipeError
from preheat.hardware.checks.packages import is_installed
from preheat.hardware.rates import Rates
from preheat.sanitize import shorten

__all__ = ["TorchCard", "TorchFacts", "check_torch", "describe_calibration", "describe_torch", "read_torch"]

_OLDEST = (2, 11)  # pyproject.toml
_BF16, _FP8 = (8, 0), (8, 9)  # lowest compute capabilities

_SMALL = {"DEFAULT": 0, "AVX2": 1}
"""Instruction sets without bf16, in their order."""
_CAPABILITY = "ATEN_CPU_CAPABILITY"


@dataclass(frozen=True)
class TorchCard:
    """A CUDA device as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class TorchFacts:
    """A torch build and what it finds on this machine.

    Attributes:
        cuda: version of CUDA that it is built for; None: none.
        why_no_cuda: why it finds no CUDA device, with the fix; "" if it does.
        gpu_expected: a GPU is here, so one should be found.
        architectures: of its kernels: sm_90, compute_90, ...
        nccl: its release; "" without.
        unlinked: pairs of devices that cannot read each other's memory.
        cpu: instruction set of its CPU kernels: DEFAULT, AVX2, AVX512, ...
        cpu_best: the largest one that the CPU has, if it is larger: the environment limits torch.
    """

    version: str
    folder: str
    cuda: str | None = None
    why_no_cuda: str = ""
    gpu_expected: bool = False
    cards: tuple[TorchCard, ...] = ()
    architectures: tuple[str, ...] = ()
    nccl: str = ""
    unlinked: tuple[tuple[int, int], ...] = ()
    cpu: str = ""
    cpu_best: str = ""


def check_torch() -> list[Finding]:
    """Imports torch and checks it."""
    try:
        import torch
    # OSError: a library of CUDA is missing. The others: files of two builds in one folder.
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        fix = Fix(FixKind.MANUAL, "pip install --force-reinstall 'torch>=2.11'")
        return [Finding("torch", Severity.STOPS, f"torch cannot be imported ({reason})", fix=fix)]
    findings = describe_torch(read_torch(), os.environ)
    from preheat.hardware.probe import probe
    from preheat.hardware.rates import calibration_path, describe_unusable_rates, load

    device, threads = probe(), torch.get_num_threads()
    try:
        rates = load(device.name, torch.__version__, threads, device.driver)
    except RecipeError as error:  # measured on another machine
        fix = Fix(FixKind.SAFE, f"rm {shlex.quote(str(calibration_path(device.name, torch.__version__, threads)))}")
        return [*findings, Finding("rates", Severity.STOPS, str(error), fix=fix)]
    other = describe_unusable_rates(device.name, torch.__version__, threads, device.driver) if rates is None else ""
    return [*findings, *describe_calibration(rates, device.name, threads, other)]


def read_torch() -> TorchFacts:
    """Reads what torch is built for and what it finds here."""
    import torch

    from preheat.hardware.cpp_build import read_cpu_flags
    from preheat.hardware.cuda_driver import has_cuda, why_no_cuda

    cpu = torch.backends.cpu.get_cpu_capability()
    flags = read_cpu_flags().split()
    best = "AVX512" if "avx512f" in flags else "AVX2" if "avx2" in flags else ""
    best = best if _SMALL.get(cpu, 2) < _SMALL.get(best, 2 if best else 0) else ""
    facts = TorchFacts(
        str(torch.__version__), os.path.dirname(torch.__file__), torch.version.cuda, cpu=cpu, cpu_best=best
    )
    if not has_cuda():
        reason, expected = why_no_cuda()
        return replace(facts, why_no_cuda=reason, gpu_expected=expected)
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return replace(
        facts,
        cards=tuple(TorchCard(card.name, (card.major, card.minor), card.total_memory) for card in cards),
        architectures=tuple(torch.cuda.get_arch_list()),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
        unlinked=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
    )


def describe_torch(facts: TorchFacts, environment: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about a torch build.

    Args:
        environment: variables that limit torch and NCCL.
    """
    built = f"CUDA {facts.cuda}" if facts.cuda else "CPUs"
    findings = [Finding("torch", Severity.OK, f"torch {facts.version} for {built} ({facts.folder})")]
    release = tuple(int(part) for part in facts.version.split(".")[:2])
    if release < _OLDEST:
        fix = Fix(FixKind.MANUAL, "pip install 'torch>=2.11'")
        message = f"torch {facts.version} is older than {'.'.join(map(str, _OLDEST))}, the oldest that preheat supports"
        findings = [Finding("torch", Severity.STOPS, message, fix=fix)]
    if facts.why_no_cuda and facts.gpu_expected:
        # A build for CPUs beside a GPU, a driver that is too old, a device that does not answer.
        other = None if facts.cuda else Fix(FixKind.MANUAL, "pip install --force-reinstall torch  # a build with CUDA")
        findings.append(Finding("torch", Severity.STOPS, facts.why_no_cuda, "runs take the CPU", other))
    elif facts.cuda and facts.why_no_cuda:
        cost = "none: the build for CPUs is smaller by gigabytes and trains as fast here"
        findings.append(Finding("torch", Severity.NOTE, f"{facts.why_no_cuda}; runs take the CPU", cost))
    for index, card in enumerate(facts.cards):
        findings += _describe_card(index, card, facts.architectures)
    if len(facts.cards) > 1:
        findings += _describe_links(facts, environment)
    return [*findings, *(_describe_cpu(facts, environment) if not facts.cards else ())]


def _describe_card(index: int, card: TorchCard, architectures: Sequence[str]) -> list[Finding]:
    label, capability = f"GPU {index} ({card.name})", ".".join(map(str, card.capability))
    if architectures and not _has_kernels(card.capability, architectures):
        message = (
            f"{label} has compute capability {capability}, and torch has kernels for {', '.join(architectures)} only"
        )
        fix = Fix(FixKind.MANUAL, "pip install --upgrade torch  # or, for an old GPU, a torch for an older CUDA")
        return [Finding("torch", Severity.STOPS, message, "no kernel runs on it", fix)]
    if card.capability < _BF16:
        # Without half precision weights, gradients and activations take twice the memory.
        message = f"{label}, compute capability {capability}, has no bf16 and no fp8"
        cost = "train in fp16 (techniques.mixed_precision: {dtype: fp16}), which scales its loss"
        return [Finding("dtypes", Severity.NOTE, message, cost)]
    fp8 = card.capability >= _FP8
    usable = "bf16 and fp8" if fp8 and is_installed("torchao") else "bf16"
    rest = "" if usable != "bf16" else "; fp8 needs torchao" if fp8 else "; fp8 needs compute capability 8.9"
    message = f"{label}: {usable}{rest}; {format_memory(card.memory / 2**30)}"
    return [Finding("dtypes", Severity.OK, message)]


def _has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """True if a build has binary code for a device's generation, or code that the driver compiles for it."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        if kind not in ("sm", "compute"):  # of another vendor (gfx90a), whose generations have other numbers
            return True
        number = "".join(filter(str.isdigit, digits))
        major, minor = int(number[:-1] or 0), int(number[-1])
        # Binary code runs on later minor versions of its generation, PTX (compute_) on all later devices.
        if (kind == "sm" and major == capability[0] and minor <= capability[1]) or (
            kind == "compute" and (major, minor) <= capability
        ):
            return True
    return False


def _describe_links(facts: TorchFacts, environment: Mapping[str, str]) -> list[Finding]:
    findings = []
    if not facts.nccl:
        message = f"{len(facts.cards)} GPUs, and this torch is built without NCCL"
        findings.append(Finding("links", Severity.STOPS, message, "no run on several GPUs"))
    off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if environment.get(name) == "1"]
    for name in off:
        fix = Fix(FixKind.MANUAL, f"unset {name}  # preheat nettest --nproc {len(facts.cards)} measures both")
        cost = "collectives take a slower way (preheat nettest measures it)"
        findings.append(Finding("links", Severity.SLOWS, f"{name}=1 in the environment", cost, fix))
    if facts.unlinked:
        pairs = ", ".join(f"{one}-{other}" for one, other in facts.unlinked[:4])
        more = f" and {len(facts.unlinked) - 4} more pairs" if len(facts.unlinked) > 4 else ""
        message = f"GPUs {pairs}{more} cannot read each other's memory (P2P)"
        cost = "their collectives go through the host's memory (preheat nettest measures it)"
        fix = Fix(FixKind.MANUAL, "nvidia-smi topo -p2p r  # says why: a virtual machine's IOMMU or ACS, or GeForce")
        findings.append(Finding("links", Severity.SLOWS, message, cost, fix))
    return findings or [Finding("links", Severity.OK, f"{len(facts.cards)} GPUs with P2P and NCCL {facts.nccl}")]


def _describe_cpu(facts: TorchFacts, environment: Mapping[str, str]) -> list[Finding]:
    # inference_cpu.md, demo.md: two cores without and with AVX512.
    cost = (
        "matmuls in bf16 run at 0.3 to 8 GFLOP/s where fp32 has 70 to 175, so train in fp32 (the demo: 5,963 tokens/s; "
        "12,725 in bf16 with AVX512)"
    )
    if facts.cpu_best:
        setting = environment.get(_CAPABILITY)
        fix = Fix(FixKind.MANUAL, f"unset {_CAPABILITY}") if setting else None
        message = f"the CPU has {facts.cpu_best}, and torch uses {facts.cpu}"
        message += f" ({_CAPABILITY}={setting})" if setting else ""
        return [Finding("dtypes", Severity.SLOWS, message, cost, fix)]
    if facts.cpu in _SMALL:
        return [Finding("dtypes", Severity.NOTE, f"the CPU has no AVX512 (torch uses {facts.cpu})", cost)]
    return [Finding("dtypes", Severity.OK, f"CPU kernels for {facts.cpu}; bf16 is the fastest dtype")]


def describe_calibration(rates: Rates | None, name: str, threads: int, other: str = "") -> list[Finding]:
    """Returns the findings about the stored rates of this machine.

    Args:
        rates: None if it was not measured with this torch, driver and number of threads.
        other: how rates that are stored differ (`describe_unusable_rates`).
    """
    from preheat.hardware.plausibility import doubt_of

    calibrate, label = Fix(FixKind.MANUAL, "preheat calibrate"), f"{threads} thread{'s' if threads > 1 else ''}"
    if rates is None:
        cost = "the first plan or run measures it: about a minute, and several on a slow or busy machine"
        message = other or f"{name} is not calibrated with {label}"
        return [Finding("rates", Severity.NOTE, message, cost, calibrate)]
    if doubt := doubt_of(rates):
        return [Finding("rates", Severity.RISKS, doubt, fix=calibrate)]
    if rates.contended:
        message = f"{name} was calibrated while other processes used its cores"
        return [Finding("rates", Severity.NOTE, message, "planned speeds may be too low by a third", calibrate)]
    best = ", ".join(f"{dtype} {rate / 1e9:,.0f}" for dtype, rate in rates.peak_matrix_rate.items())
    return [Finding("rates", Severity.OK, f"{name} is calibrated: matmuls at {best} GFLOP/s with {label}")]
