"""Checks of Python, preheat's dependencies, copies of torch on the import path, and optional kernel packages.

Nothing here imports torch but `check_package`, which imports the package that it is asked about.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.core.finding import Finding, Fix, FixKind, Severity
from preheat.hardware.cuda_driver import has_gpu
from preheat.sanitize import shorten

__all__ = [
    "KERNEL_PACKAGES",
    "KernelPackage",
    "check_dependencies",
    "check_missing_packages",
    "check_package",
    "check_python",
    "check_torch_copies",
    "install",
    "is_installed",
]


@dataclass(frozen=True)
class KernelPackage:
    """An optional package with kernels.

    Attributes:
        cost: of a GPU run without it, with figures of `benchmarks/results` where there are some.
        slows: a GPU run without it is slower, whatever the recipe.
        on_cpu: runs on CPUs use it too.
        options: of `pip install`.
    """

    distribution: str
    module: str
    cost: str
    slows: bool = False
    on_cpu: bool = False
    options: str = ""


_RECURRENT = "recurrent layers run by PyTorch's operators: slower, with several times their activations (not measured)"
KERNEL_PACKAGES: tuple[KernelPackage, ...] = (
    # 1B full fine-tuning on an H200 (gpu_check-ladder.md): 65,900 tokens/s compiled, 53,400 not.
    KernelPackage(
        "triton",
        "triton",
        "no torch.compile and no fused operators: 53,400 instead of 65,900 tokens/s (1B on an H200)",
        slows=True,
    ),
    # Milliseconds of attention forward and backward, 8,192 tokens, H100 (gpu_layer.md).
    KernelPackage(
        "flash-attn",
        "flash_attn",
        "nothing by default: attention runs in torch's own kernels (3.6 ms with cuDNN, 6.6 ms with flash, for 8,192 "
        "tokens on an H100); only kernel: flash2 needs it",
        options="--no-build-isolation",
    ),
    # gpu_check-ladder.md.
    KernelPackage(
        "liger-kernel",
        "liger_kernel",
        "nothing beside compile (64,700 tokens/s with it, 65,900 compiled, 53,400 with neither, 1B on an H200); only "
        "the technique liger needs it",
    ),
    # gpu_layer.md, 58.7M weights.
    KernelPackage(
        "bitsandbytes",
        "bitsandbytes",
        "nothing: preheat dequantizes NF4 by its own kernel (an MLP of 8B on an H100: 0.056 ms, bitsandbytes 0.079)",
    ),
    KernelPackage(
        "torchao",
        "torchao",
        "no fp8 training and no export to ExecuTorch",
        on_cpu=True,
    ),
    KernelPackage("causal-conv1d", "causal_conv1d", _RECURRENT, options="--no-build-isolation"),
    KernelPackage("mamba-ssm", "mamba_ssm", _RECURRENT, options="--no-build-isolation"),
    KernelPackage("flash-linear-attention", "fla", _RECURRENT),
    KernelPackage("deepspeed", "deepspeed", "only parallel.engine: deepspeed needs it"),
)
"""Optional packages with kernels, the most useful first."""


def install(*packages: str, options: str = "") -> Fix:
    """Returns the fix that installs packages into this environment.

    Example:
        >>> install("liger-kernel").command.endswith("pip install liger-kernel")
        True
    """
    # Environments that uv creates have no pip.
    uv = importlib.util.find_spec("pip") is None and shutil.which("uv") is not None
    command = f"uv pip install --python {shlex.quote(sys.executable)}" if uv else "pip install"
    quoted = [f"'{name}'" if re.search(r"[^\w.-]", name) else name for name in packages]
    return Fix(FixKind.INSTALL, " ".join(filter(None, (command, options, *quoted))))


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_python() -> list[Finding]:
    """Reports the Python that runs preheat; pip has refused unsupported ones."""
    return [Finding("python", Severity.OK, f"Python {platform.python_version()} ({sys.executable})")]


def check_dependencies() -> list[Finding]:
    """Compares installed packages with the releases that preheat requires."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("preheat") or ()]
    except importlib.metadata.PackageNotFoundError:
        return [
            Finding(
                "packages",
                Severity.NOTE,
                "preheat runs from its source folder and is not installed, so nothing says which releases it requires",
            )
        ]
    findings = []
    # Extras are optional: they are found at the techniques and commands that need them.
    own = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    for requirement in own:
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            message = f"{requirement.name} is not installed, and preheat needs it"
        else:
            if requirement.specifier.contains(version, prereleases=True):
                continue
            message = f"{requirement.name} {version} is installed, and preheat needs {wanted}"
        fix = install(wanted)
        # Another torch is gigabytes, and breaks packages that were built for the present one.
        fix = Fix(FixKind.MANUAL, fix.command) if requirement.name == "torch" else fix
        findings.append(Finding("packages", Severity.STOPS, message, fix=fix))
    return findings or [Finding("packages", Severity.OK, f"all {len(own)} packages that preheat requires")]


def check_torch_copies(path: Sequence[str] | None = None) -> list[Finding]:
    """Looks for more than one torch on the import path. Does not import it.

    Args:
        path: folders in which modules are looked up; `sys.path` by default.
    """
    copies = _find_torch_copies(sys.path if path is None else path)
    if len(copies) < 2:
        return []  # none at all is a finding of the check that imports it
    (folder, version), *others = copies
    if all(other == folder for other, _ in others):
        versions = " and ".join(version for _, version in copies)
        command = f"pip install --force-reinstall --no-deps torch=={version.partition('+')[0]}"
        message = f"{folder} has the files of two torch builds ({versions}): an installation that was cut off"
        return [Finding("torch", Severity.RISKS, message, "imports fail or crash", Fix(FixKind.MANUAL, command))]
    hidden = ", ".join(f"{other_version} in {other}" for other, other_version in others if other != folder)
    return [
        Finding(
            "torch",
            Severity.RISKS,
            f"two torch builds are on the import path: {version} in {folder} is imported and hides {hidden}",
            "packages that were built for the hidden one crash or cannot be imported",
            Fix(
                FixKind.MANUAL,
                f"rm -r {folder}/torch {folder}/torch-*.dist-info  # or leave {folder} out of PYTHONPATH",
            ),
        )
    ]


def _find_torch_copies(path: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (folder, version) of each torch on a path, in the order of the path."""
    copies = []
    for folder in dict.fromkeys(Path(entry or ".").resolve() for entry in path):
        # torch itself without its metadata is a copy too: a source folder, or an archive that was unpacked.
        versions = [entry.version for entry in importlib.metadata.distributions(name="torch", path=[str(folder)])]
        code = folder / "torch" / "version.py"
        if code.is_file() and (match := re.search(r"__version__ = '([^']+)'", code.read_text(encoding="utf-8"))):
            versions = [match[1], *(v for v in versions if v.partition("+")[0] != match[1].partition("+")[0])]
        copies += [(str(folder), version) for version in versions]
    return copies


def check_missing_packages() -> list[Finding]:
    """Lists the optional kernel packages that are not installed, with what their absence costs on this machine."""
    gpu = has_gpu()
    missing = [package for package in KERNEL_PACKAGES if not is_installed(package.module)]
    # Fast paths of GPUs are nothing to miss without one.
    missed = [package for package in missing if gpu or package.on_cpu]
    findings = [
        Finding(
            "kernels",
            Severity.SLOWS if package.slows else Severity.NOTE,
            f"{package.distribution} is not installed",
            package.cost,
            install(package.distribution, options=package.options),
        )
        for package in missed
    ]
    if rest := [package.distribution for package in missing if package not in missed]:
        findings.append(
            Finding("kernels", Severity.OK, f"not installed, and of no use without a GPU: {', '.join(rest)}")
        )
    return findings


def check_package(distribution: str) -> list[Finding]:
    """Imports an optional kernel package that is installed.

    Args:
        distribution: of a `KernelPackage`.
    """
    package = _BY_NAME[distribution]
    if (error := _import(package.module)) is not None:
        if _import("torch") is not None:
            message = f"{distribution} {_find_version(distribution)} is not checked, since torch cannot be imported"
            return [Finding("kernels", Severity.NOTE, message)]
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        fix = install(package.distribution, options=f"--force-reinstall --no-deps {package.options}".strip())
        message = f"{distribution} {_find_version(distribution)} is installed and cannot be imported ({reason})"
        return [Finding("kernels", Severity.RISKS, message, "a run that uses it stops", fix)]
    return [Finding("kernels", Severity.OK, f"{distribution} {_find_version(distribution)}")]


def _import(module: str) -> Exception | None:
    """Imports a module; returns the error if that fails."""
    try:
        importlib.import_module(module)
    # OSError: a shared library is missing. AttributeError and RuntimeError: it expects another torch.
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return error
    return None


_BY_NAME: Mapping[str, KernelPackage] = {package.distribution: package for package in KERNEL_PACKAGES}


def _find_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
