"""Copies of torch on the import path, optional packages and required releases, as real folders on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from preheat.core.finding import FixKind, Severity
from preheat.hardware.checks import packages
from preheat.hardware.checks.packages import (
    check_dependencies,
    check_missing_packages,
    check_package,
    check_torch_copies,
)

# Of setuptools, if another test has imported distutils before; a real check has a process of its own.
pytestmark = pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")


def add_torch(folder: Path, version: str, *, code: bool = True) -> str:
    """Writes what an installation of torch has, without its libraries."""
    about = folder / f"torch-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    if code:
        (folder / "torch").mkdir(exist_ok=True)
        (folder / "torch" / "version.py").write_text(f"__version__ = '{version}+cu130'\ncuda: str | None = '13.0'\n")
    return str(folder)


def test_one_torch_is_no_finding_however_often_its_folder_is_on_the_path(tmp_path: Path) -> None:
    one = add_torch(tmp_path / "site", "2.13.0")
    (tmp_path / "link").symlink_to(one)
    assert check_torch_copies([one, str(tmp_path / "link"), one, str(tmp_path / "none")]) == []


def test_two_torch_builds_name_the_one_that_is_imported(tmp_path: Path) -> None:
    path = [add_torch(tmp_path / "a", "2.12.0"), add_torch(tmp_path / "b", "2.13.0")]
    (finding,) = check_torch_copies(path)
    assert finding.severity is Severity.RISKS
    assert f"2.12.0+cu130 in {path[0]} is imported and hides 2.13.0+cu130 in {path[1]}" in finding.message
    (finding,) = check_torch_copies(path[::-1])
    assert f"2.13.0+cu130 in {path[1]} is imported" in finding.message


def test_an_installation_that_was_cut_off_is_seen_in_one_folder(tmp_path: Path) -> None:
    add_torch(tmp_path, "2.12.0", code=False)
    (finding,) = check_torch_copies([add_torch(tmp_path, "2.13.0")])
    assert "2.13.0+cu130 and 2.12.0" in finding.message
    assert finding.fix is not None
    assert finding.fix.command == "pip install --force-reinstall --no-deps torch==2.13.0"


def test_a_kernel_package_that_cannot_be_imported_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "liger_kernel.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = check_package("liger-kernel")
    assert finding.severity is Severity.RISKS
    assert (
        "liger-kernel of unknown version is installed and cannot be imported (ImportError: undefined" in finding.message
    )
    assert finding.fix is not None
    assert finding.fix.kind is FixKind.INSTALL
    (tmp_path / "liger_kernel.py").write_text("")
    assert [finding.severity for finding in check_package("liger-kernel")] == [Severity.OK]
    # Without torch no package with kernels can be judged.
    sys.modules.pop("liger_kernel")
    (tmp_path / "liger_kernel.py").write_text("import absent_library\n")
    monkeypatch.setattr(packages, "_import", lambda module: ImportError(f"No module named {module}"))
    assert [finding.severity for finding in check_package("liger-kernel")] == [Severity.NOTE]


def test_fast_paths_of_gpus_are_missed_beside_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    monkeypatch.setattr(packages, "has_gpu", lambda: False)
    torchao, rest = check_missing_packages()
    assert torchao.message == "torchao is not installed"
    assert rest.severity is Severity.OK
    monkeypatch.setattr(packages, "has_gpu", lambda: True)
    findings = check_missing_packages()
    assert [finding.message.split()[0] for finding in findings] == [p.distribution for p in packages.KERNEL_PACKAGES]
    assert findings[0].severity is Severity.SLOWS
    assert "53,400 instead of 65,900 tokens/s" in findings[0].cost


def test_a_package_of_another_release_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["rich>=999", "torch<1", "preheat-is-not-there", "pytest", "wandb>=999; extra == 'wandb'"]
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: required)
    findings = check_dependencies()
    assert [(finding.severity, finding.fix.kind if finding.fix else None) for finding in findings] == [
        (Severity.STOPS, FixKind.INSTALL),
        (Severity.STOPS, FixKind.MANUAL),  # another torch is a decision
        (Severity.STOPS, FixKind.INSTALL),
    ]
    assert findings[0].message.endswith("preheat needs rich>=999")
    assert findings[0].fix is not None
    assert findings[0].fix.command.endswith("'rich>=999'")
