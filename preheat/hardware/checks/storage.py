"""Checks of the folders that a run writes to, and of the hub that it may read from. No torch."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from preheat.cache_folder import cache_folder, is_private
from preheat.core.finding import Finding, Fix, FixKind, Severity
from preheat.core.units import format_memory
from preheat.hardware.connectivity import is_hub_reachable

__all__ = ["Folder", "check_folder", "check_folders", "check_hub", "check_native_folder"]

_SAMPLE = 1 << 20
"""Bytes that are written to see that a folder takes them: a full disk still creates empty files."""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to.

    Attributes:
        label: what it is for.
        elsewhere: command that chooses another folder.
        cost: of a folder that cannot be written.
        room: bytes that ordinary use takes.
        room_for: that use.
        failure: severity if it cannot be written.
        must_exist: nothing creates it.
    """

    part: str
    label: str
    path: Path
    elsewhere: str
    cost: str
    room: int
    room_for: str
    failure: Severity = Severity.STOPS
    must_exist: bool = False


def check_folders() -> list[Finding]:
    """Checks preheat's cache, the hub's cache, the folder for temporary files, and the current folder."""
    return [finding for folder in _list_folders() for finding in check_folder(folder)]


def _list_folders() -> list[Folder]:
    from huggingface_hub import constants

    return [
        Folder(
            "cache",
            "preheat's cache",
            cache_folder(),
            "export PREHEAT_CACHE=/a/folder/of/yours",
            "plans cannot store what they measure, and stop",
            256 << 20,
            "calibrations, dry runs and tokenized data",
        ),
        Folder(
            "disk",
            "the hub's cache",
            Path(constants.HF_HUB_CACHE),
            "export HF_HOME=/a/folder/of/yours",
            "no model or data set is downloaded",
            20 << 30,
            "an 8B model (15 GiB in bf16)",
            Severity.RISKS,
        ),
        Folder(
            "disk",
            "temporary files",
            _find_temporary_folder(),
            "export TMPDIR=/a/folder/of/yours",
            "compilers and torch.compile fail",
            512 << 20,
            "compiled code",
            must_exist=True,
        ),
        Folder(
            "disk",
            "the current folder",
            Path.cwd(),
            "cd  # or choose the run's folder: preheat train ... --out /a/folder/of/yours",
            "runs are written to runs/ in it",
            2 << 30,
            "the checkpoints of a small model",
            Severity.RISKS,
        ),
    ]


def _find_temporary_folder() -> Path:
    # Not `tempfile.gettempdir()`, which falls through to the first folder of several that can be written.
    for name in ("TMPDIR", "TEMP", "TMP"):
        if os.environ.get(name):
            return Path(os.environ[name])
    return Path(tempfile.gettempdir() if sys.platform == "win32" else "/tmp")


def check_folder(folder: Folder) -> list[Finding]:
    """Writes a sample into a folder, or into the nearest one above it that exists, and reads the free space."""
    # Not `Path.exists`, which raises an error below a folder that this user may not enter.
    there = next((path for path in (folder.path, *folder.path.parents) if os.path.exists(path)), folder.path)
    label = f"{folder.label}, {folder.path},"
    if folder.must_exist and not os.path.exists(folder.path):
        fix = Fix(FixKind.SAFE, f"mkdir -p {shlex.quote(str(folder.path))}")
        return [Finding(folder.part, Severity.RISKS, f"{label} does not exist", folder.cost, fix)]
    if not os.path.isdir(there):
        fix = Fix(FixKind.MANUAL, folder.elsewhere)
        return [Finding(folder.part, folder.failure, f"{label} is no folder", folder.cost, fix)]
    try:
        with tempfile.TemporaryFile(dir=there) as sample:
            sample.write(bytes(_SAMPLE))
            sample.flush()
            os.fsync(sample.fileno())
    except OSError as error:
        message = f"{label} cannot be written: {error.strerror or error}"
        return [Finding(folder.part, folder.failure, message, folder.cost, _mend(folder, there, error))]
    free = shutil.disk_usage(there).free
    shown = f"{label} has {format_memory(free / 2**30)} free"
    if free < folder.room:
        fix = Fix(FixKind.MANUAL, f"du -xh {shlex.quote(str(there))} | sort -h | tail  # or: {folder.elsewhere}")
        message = f"{shown}; {folder.room_for} may take {format_memory(folder.room / 2**30)}"
        return [Finding(folder.part, Severity.RISKS, message, "a run that fills the disk stops", fix)]
    return [Finding(folder.part, Severity.OK, shown)]


def _mend(folder: Folder, there: Path, error: OSError) -> Fix:
    """Returns the fix for a folder that cannot be written."""
    # Only the owner may change a folder's mode; and only preheat's own is ours to change.
    own = sys.platform != "win32" and there.stat().st_uid == os.geteuid()
    if error.errno == errno.EACCES and own and there == folder.path and folder.part == "cache":
        return Fix(FixKind.SAFE, f"chmod u+rwx {shlex.quote(str(there))}")
    if error.errno == errno.ENOSPC:
        return Fix(FixKind.MANUAL, f"du -xh {shlex.quote(str(there))} | sort -h | tail  # or: {folder.elsewhere}")
    return Fix(FixKind.MANUAL, folder.elsewhere)


def check_native_folder() -> list[Finding]:
    """Checks that only this user can write the folder of compiled kernels, which runs execute."""
    folder = cache_folder() / "native"
    try:
        facts = folder.lstat()
    except OSError:  # not created yet, or in a folder that `check_folder` reports
        return []
    if sys.platform == "win32" or is_private(facts):
        return []
    cost = "nothing in it is loaded: each process compiles the kernels again"
    own = facts.st_uid == os.geteuid()
    return [
        Finding(
            "cache",
            Severity.SLOWS,
            f"{folder}: others can write to it",
            cost,
            Fix(FixKind.SAFE, f"chmod 700 {shlex.quote(str(folder))}")
            if own
            else Fix(FixKind.MANUAL, "export PREHEAT_CACHE=/a/folder/of/yours"),
        )
    ]


def check_hub() -> list[Finding]:
    """Checks that the hub can be reached, or that the offline mode is on."""
    import urllib.request

    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    cached = f"{len(list(folder.glob('models--*')))} models and {len(list(folder.glob('datasets--*')))} data sets"
    if constants.HF_HUB_OFFLINE:
        fix = Fix(FixKind.MANUAL, "unset HF_HUB_OFFLINE")
        message = f"offline (HF_HUB_OFFLINE): of the hub there are {cached} in {folder}"
        return [Finding("hub", Severity.NOTE, message, "other names are not found; folders and files are", fix)]
    if not is_hub_reachable():
        fix = Fix(FixKind.MANUAL, "export HF_HUB_OFFLINE=1  # or, of a mirror: export HF_ENDPOINT=https://...")
        message = f"{constants.ENDPOINT} cannot be reached: of the hub there are {cached} in {folder}"
        return [Finding("hub", Severity.RISKS, message, "other names are not found, after a wait of 5 s each", fix)]
    through = "through a proxy, which was not asked" if urllib.request.getproxies() else "reachable"
    return [Finding("hub", Severity.OK, f"{constants.ENDPOINT}: {through}")]
