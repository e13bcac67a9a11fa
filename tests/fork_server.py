"""Starts processes as forks of one that has imported torch, transformers and preheat: importing takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["Fork", "command", "script"]

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "preheat.cli",
    "preheat.cli.train",
    "preheat.engine.builder",
    "preheat.training.session",
    "preheat.training.loop",
    "preheat.report.run_page",
    "preheat.data.preparation",
    "preheat.planning.plan",
    "preheat.cli.views.console",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "rich.progress",
)
"""Imported before the first fork: most are imported late otherwise, by each process."""
_SERVE = "import sys; from tests.fork_server import _serve; _serve(int(sys.argv[1]))"


class Fork:
    """A process with the part of `subprocess.Popen`'s interface that the tests use.

    It calls a function of a module with strings, and ends as a script does that calls it.

    Args:
        function: "module:name", as "tests.fork_server:script"; `preheat` itself otherwise.
        said: what it reads from stdin.
        ignored: signals that it ignores, as under nohup.
        session: whether it gets a session of its own, so that its process group can be ended.
        errors: the file that gets its stderr; a temporary one otherwise.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        function: str = f"{__name__}:command",
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        said: str = "",
        ignored: Iterable[signal.Signals] = (),
        session: bool = False,
        errors: Path | None = None,
    ):
        self._printed = [self._file(None), self._file(errors)]
        reads, writes = os.pipe()
        self._status, status = os.pipe()
        os.write(writes, said.encode())
        os.close(writes)
        request = {
            "function": function,
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "ignored": [int(number) for number in ignored],
            "session": session,
        }
        task = self._file(None)  # of any length, where a message has a limit
        os.pwrite(task, json.dumps(request).encode(), 0)
        socket.send_fds(_server()[0], [b"fork"], [reads, *self._printed, task, status])
        os.close(reads)
        os.close(status)
        weakref.finalize(self, os.close, self._status)
        self.returncode: int | None = None
        self._rest = b""
        self.pid = int(self._line(300) or 0)  # the first also waits for the imports
        assert self.pid, "the fork server has ended"

    def _file(self, path: Path | None) -> int:
        """Opens a file, without a name if it has none, for as long as this object lives."""
        if path is None:
            descriptor, name = tempfile.mkstemp()
            Path(name).unlink()
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end and returns what it wrote to stdout and to stderr."""
        self.wait(timeout)
        out, error = (os.pread(file, os.fstat(file).st_size, 0).decode() for file in self._printed)
        return out, error

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and (line := self._line(timeout)) is not None:
            self.returncode = int(line)
        return self.returncode

    def _line(self, timeout: float | None) -> str | None:
        """The next line of its status: the process's id, then its exit code; None if none comes in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                return None
            more = os.read(self._status, 64)
            assert more, "the fork server has ended"
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    path = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
    server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return ours, server


def _serve(control: int) -> None:
    """Forks for each request until no more can come."""
    for noisy in ("torchao", "torch.utils._pytree"):  # as preheat.cli does before it imports them
        logging.getLogger(noisy).setLevel(logging.ERROR)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it looks at
    requests = socket.socket(fileno=control)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for the processes that wait
    while True:
        # One message at a time: the next comes once the process's id is known.
        message, descriptors, *_ = socket.recv_fds(requests, len(b"fork"), 5)
        if not message:
            os._exit(0)
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = descriptors.pop()
        if pid := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(BrokenPipeError):  # the test has ended
                os.write(status, f"{pid}\n".encode())
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, f"{code}\n".encode())
            os._exit(0)
        os.close(status)
        task = descriptors.pop()
        request = json.loads(os.pread(task, os.fstat(task).st_size, 0))
        os.close(task)
        code = 1
        try:
            _become(request, descriptors)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:  # noqa: BLE001  # as the interpreter does with what nobody caught
            traceback.print_exc()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            # Without freeing what it shares with its parent: to copy those pages takes longer than most commands.
            os._exit(code)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if request["session"]:
        os.setsid()
    _reset_signals()  # whatever this test process was started with
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    module, name = request["function"].split(":")
    sys.argv = [name, *request["arguments"]]
    getattr(importlib.import_module(module), name)(*request["arguments"])


def command(*arguments: str) -> None:
    """Runs `preheat`; the processes that `--nproc` starts are forks, too."""
    from preheat.cli import main
    from preheat.hardware import rank_processes

    rank_processes.subprocess = types.SimpleNamespace(Popen=_start)  # type: ignore[attr-defined]
    sys.argv = ["preheat", *arguments]
    main()


def script(path: str, *arguments: str) -> None:
    """Runs a script, as `python PATH ARGUMENTS` does in the present folder."""
    sys.argv = [path, *arguments]
    sys.path[:0] = [str(Path(path).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(path, run_name="__main__")


def _start(command: Sequence[str], **options: Any) -> Any:
    """Starts a command: preheat as a fork, all else as ever."""
    if "preheat" not in command:
        return subprocess.Popen(command, **options)
    assert not options.pop("stderr")
    assert not options.pop("pass_fds")
    return _Worker(command, **options)


class _Worker:
    """A fork of this process, with the part of `subprocess.Popen`'s interface that the launcher uses."""

    stdout = None  # what the launcher closes: it has the file

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes] | None, start_new_session: bool
    ):
        arguments = command[command.index("preheat") + 1 :]
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=_work, args=(arguments, env, stdout, os.getpid(), start_new_session))
        self._process.start()
        self.pid = self._process.pid
        self.poll = lambda: self._process.exitcode
        self.kill, self.terminate, self.wait = self._process.kill, self._process.terminate, self._process.join

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _work(arguments: list[str], env: Mapping[str, str], stdout: IO[bytes] | None, parent: int, session: bool) -> None:
    from preheat.hardware.child_processes import end_with_parent

    end_with_parent(parent)
    if session:
        os.setsid()
    if stdout is not None:
        os.dup2(stdout.fileno(), 1)
    os.closerange(3, 256)  # such as the launcher's socket
    _reset_signals()
    os.environ.clear()
    os.environ.update(env)
    command(*arguments)


def _reset_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
