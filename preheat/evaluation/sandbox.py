"""Runs programs that a model generated, in a process without network, other processes and writable files. Linux only.

Each program is one process (`sandbox_process`) with limits on memory, CPU time, wall clock, file sizes and the size of
its only writable folder, which is in memory. Without any of the protections it does not run.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from preheat.errors import RecipeError, RunError
from preheat.hardware.probe import count_cores
from preheat.sanitize import shorten

__all__ = ["Limits", "Outcome", "require_sandbox", "run_program", "run_programs"]

_MEBI = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: of the wall clock; the CPU time is limited to the same, rounded up.
        memory, file_size, folder_size: bytes of its address space, of a file, and of its folder.
        processes: processes and threads of its user; further processes are refused in any case.
    """

    seconds: float = 10.0
    memory: int = 1024 * _MEBI
    file_size: int = 16 * _MEBI
    folder_size: int = 32 * _MEBI
    processes: int = 64


class Outcome(NamedTuple):
    """The end of a program: it ran to its last line, raised an error or was ended by a limit; and its last words."""

    kind: Literal["passed", "failed", "timed out"]
    message: str = ""


class _Unprotected(Exception):
    """The sandbox cannot be set up; no program ran."""


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Runs a Python program; it passes if its last line is reached and it ends without an error.

    Raises:
        RunError: the sandbox cannot be set up; the program does not run.

    Example:
        >>> run_program("assert 1 + 1 == 3").kind                                                   # doctest: +SKIP
        'failed'
    """
    try:
        return _run(source, limits or Limits())
    except _Unprotected as error:
        raise RunError(f"sandbox: {error}; the program did not run") from None


def run_programs(sources: Sequence[str], limits: Limits | None = None) -> list[Outcome]:
    """Runs programs, as many at a time as this process has cores, and returns their outcomes in order."""
    # The processes of a distributed run share the cores; with fewer for each program, it would exceed its time.
    workers = max(1, count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda source: run_program(source, limits), sources))


def require_sandbox(knob: str) -> None:
    """Raises RecipeError if programs cannot be run with all protections on this machine.

    Args:
        knob: the option or key that needs it, for the message.
    """
    try:
        outcome = _run("", Limits())
        problem = "" if outcome.kind == "passed" else f"an empty program {outcome.kind} ({outcome.message})"
    except _Unprotected as error:
        problem = str(error)
    if problem:
        raise RecipeError(
            f"{knob}: generated programs run only in a sandbox, and this machine gives none: {problem}; use Linux with "
            "user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a "
            "container: --security-opt seccomp=unconfined)"
        )


def _run(source: str, limits: Limits) -> Outcome:
    if sys.platform != "linux":
        raise _Unprotected(f"{sys.platform} has no namespaces")
    # Written by the last line, so that a program that ends early does not pass.
    token = secrets.token_hex(16)
    settings = {
        "memory": limits.memory,
        "cpu_seconds": -int(-limits.seconds // 1),
        "file_size": limits.file_size,
        "folder_size": limits.folder_size,
        "processes": limits.processes,
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        program = Path(folder) / "program.py"
        # Text of a model may have half of a surrogate pair, which no encoding has. A program may redefine `print`.
        last = f"import os; os.write(2, b'\\n{token}\\n')"
        program.write_bytes(f"{source}\n{last}\n".encode("utf-8", "replace"))
        reader, writer = os.pipe()
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_process.py"))]
        with os.fdopen(reader, "rb") as report:
            process = subprocess.Popen(
                [*command, str(writer), str(program), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[writer],
                start_new_session=True,
                cwd="/",
            )
            os.close(writer)
            try:
                code = process.wait(limits.seconds)
            except subprocess.TimeoutExpired:
                return Outcome("timed out", f"ran longer than {limits.seconds:g} s")
            finally:
                if process.poll() is None:
                    # The first process of the namespace ends with its parent, and all others with it.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if problem := report.read(1000).decode(errors="replace").strip():
                raise _Unprotected(problem)
        errors.seek(max(errors.seek(0, os.SEEK_END) - 2000, 0))
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if code == 0 and token in lines:
        return Outcome("passed")
    if code - 128 in (signal.SIGXCPU, signal.SIGKILL):
        return Outcome("timed out", f"used more than {limits.seconds:g} s of CPU time")
    if code == 0:
        return Outcome("failed", "ended before its last line")
    return Outcome("failed", shorten(lines[-1], 200) if lines else f"exit code {code}")
