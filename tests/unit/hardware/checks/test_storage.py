"""Folders that cannot be written, are full or missing, as a user who is not root; and the hub."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from preheat.core.finding import Finding, FixKind, Severity
from preheat.hardware.checks import storage
from preheat.hardware.checks.storage import Folder, check_folder, check_hub, check_native_folder

NOBODY = 65534


@contextlib.contextmanager
def as_a_user(*folders: Path) -> Iterator[None]:
    """Runs the block as a user who is not root, and who owns the folders: root may write everywhere."""
    if os.geteuid():
        yield
        return
    for folder in folders:
        os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def folder(path: Path, *, part: str = "cache", room: int = 1, must_exist: bool = False) -> Folder:
    return Folder(part, "a cache", path, "export X=Y", "nothing is stored", room, "a model", must_exist=must_exist)


def the_finding(folder: Folder) -> Finding:
    (finding,) = check_folder(folder)
    return finding


def test_a_folder_of_ones_own_without_permission_is_mended_by_its_mode(open_path: Path) -> None:
    locked = open_path / "locked"
    locked.mkdir()
    with as_a_user(locked):
        locked.chmod(0o500)
        finding = the_finding(folder(locked))
        assert finding.severity is Severity.STOPS
        assert finding.message == f"a cache, {locked}, cannot be written: Permission denied"
        assert finding.fix is not None
        assert finding.fix.kind is FixKind.SAFE
        subprocess.run(finding.fix.command.split(), check=True)
        assert the_finding(folder(locked)).severity is Severity.OK
        # A folder below it is created later: the nearest one that exists decides, and is not changed.
        locked.chmod(0o500)
        below = the_finding(folder(locked / "a" / "b"))
        assert below.severity is Severity.STOPS
        assert below.fix is not None
        assert below.fix.kind is FixKind.MANUAL
        # Not even entered: what is below it cannot be looked up.
        locked.chmod(0o000)
        assert the_finding(folder(locked / "a" / "b")).message.endswith("cannot be written: Permission denied")
        locked.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a file system")
def test_full_and_read_only_disks(open_path: Path) -> None:
    disk = open_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with contextlib.suppress(OSError), (disk / "fill").open("wb") as file:
            file.write(bytes(2 << 20))
        with as_a_user():
            finding = the_finding(folder(disk / "cache"))
        assert finding.message == f"a cache, {disk / 'cache'}, cannot be written: No space left on device"
        assert finding.fix is not None
        assert finding.fix.command.startswith(f"du -xh {disk} ")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with as_a_user():
            finding = the_finding(folder(disk))
        assert finding.message == f"a cache, {disk}, cannot be written: Read-only file system"
        assert finding.fix is not None
        assert finding.fix.command == "export X=Y"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_a_missing_folder_and_little_room(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is no folder" in the_finding(folder(tmp_path / "file" / "cache")).message
    missing = the_finding(folder(tmp_path / "none", must_exist=True))
    assert (missing.severity, missing.fix and missing.fix.command) == (Severity.RISKS, f"mkdir -p {tmp_path / 'none'}")
    assert not (tmp_path / "none").exists(), "a check creates nothing"
    assert the_finding(folder(tmp_path / "none")).severity is Severity.OK
    little = the_finding(folder(tmp_path, room=1 << 60))
    assert little.severity is Severity.RISKS
    assert "a model may take" in little.message


def test_compiled_kernels_that_others_can_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    assert check_native_folder() == []
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    (finding,) = check_native_folder()
    assert finding.fix is not None
    subprocess.run(finding.fix.command.split(), check=True)
    assert check_native_folder() == []


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "models--a--b").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (finding,) = check_hub()
    assert finding.severity is Severity.NOTE
    assert "there are 1 models and 0 data sets" in finding.message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert check_hub()[0].severity is Severity.OK
    (finding,) = check_hub()  # nobody listens any more
    assert finding.severity is Severity.RISKS
    assert "cannot be reached" in finding.message


def test_the_folders_are_those_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    assert [folder.path for folder in storage._list_folders()] == [
        tmp_path / "cache",
        Path(constants.HF_HUB_CACHE),
        tmp_path / "temporary",
        tmp_path,
    ]
