"""Runs checks in child processes, each with a time limit: a crash or a hang of a library is a finding. No torch.

A broken driver blocks the process that asks it, and an extension of another torch build may end it with a signal. So
no check runs in the process of the command.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from preheat.core.finding import Finding, Severity
from preheat.files import BadJson, parse_json, read_record, to_json
from preheat.hardware.child_processes import describe_exit, tie_to_parent
from preheat.hardware.probe import count_cores
from preheat.sanitize import shorten

__all__ = ["Probe", "run_probes"]

_MOST_PROCESSES = 4  # at once; each may import torch, which takes a core for seconds
_LAST_WAIT = 2.0  # seconds for a killed child to end
_CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from preheat.hardware.checks.probing import _run_child; _run_child()"
)


@dataclass(frozen=True)
class Probe:
    """A check to run in a child process.

    Attributes:
        part: what it checks, as in `Finding.part`.
        function: `module:name` of a function that returns a list of findings.
        arguments: of the function.
        seconds: the time limit.
        failure: severity of the finding if the check itself crashes or takes too long.
    """

    part: str
    function: str
    arguments: tuple[str, ...] = ()
    seconds: float = 30.0
    failure: Severity = Severity.RISKS


def run_probes(probes: Sequence[Probe], tell: Callable[[str, int], None] = lambda part, done: None) -> list[Finding]:
    """Returns the findings of all probes in their order; a probe that fails or takes too long gives a finding.

    Args:
        tell: called with the part whose check has ended, and the number of checks that have.
    """
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(min(count_cores(), _MOST_PROCESSES)) as pool:
        waiting: dict[Future[list[Finding]], Probe] = {pool.submit(_run, probe, running): probe for probe in probes}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                tell(waiting[future].part, done)
        except BaseException:
            # Ctrl-C: the pool waits for its threads, which wait for their children.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in [*running]:
                _kill(child)
            raise
    return [finding for future in waiting for finding in future.result()]


def _run(probe: Probe, running: set[subprocess.Popen[bytes]]) -> list[Finding]:
    """Runs a probe in a process of its own, with this process's import path."""
    task = json.dumps({"function": probe.function, "arguments": probe.arguments})
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            tie_to_parent([sys.executable, "-c", _CHILD, json.dumps(sys.path)]),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # so that a compiler that it started ends with it
        )
    except OSError as error:
        return [_describe_failure(probe, f"no process could be started ({error.strerror})")]
    running.add(child)
    try:
        out, errors = child.communicate(task.encode(), timeout=probe.seconds)
    except subprocess.TimeoutExpired:
        return [_describe_failure(probe, f"took longer than {probe.seconds:g} s")]
    finally:
        _kill(child)
        # Not without a limit: a process that a broken driver blocks does not end when it is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_LAST_WAIT)
        running.discard(child)
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines and child.returncode > 0 else f"its process {describe_exit(child.returncode)}"
        return [_describe_failure(probe, reason)]
    try:
        return read_record(list[Finding], parse_json(out))
    except BadJson as error:
        return [_describe_failure(probe, f"its answer cannot be read ({error})")]


def _describe_failure(probe: Probe, reason: str) -> Finding:
    return Finding(probe.part, probe.failure, f"the check failed: {shorten(reason, 200)}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a child and all processes that it started; does nothing if they have ended."""
    if sys.platform == "win32":
        child.kill()
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS reports a group of ended processes as not permitted
        return


def _run_child() -> None:
    # Libraries print when they are imported; only the findings go to the standard output of this process.
    answer = os.dup(1)
    os.dup2(2, 1)
    task = json.load(sys.stdin)
    module, _, name = task["function"].partition(":")
    findings = getattr(importlib.import_module(module), name)(*task["arguments"])
    with os.fdopen(answer, "w", encoding="utf-8") as file:
        file.write(to_json(findings))
    # Without the exit handlers of half-broken libraries, which may crash or wait for a device.
    os._exit(0)
