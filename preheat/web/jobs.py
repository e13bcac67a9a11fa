"""Child processes of the dashboard: commands of preheat that answer, and a queue of one training.

An answer (a plan, a data preview, a chat) ends with the server. A training goes on without it: it holds a lock in the
cache, so that the next server knows that a training runs, which one, and how to stop it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

import psutil
from starlette.exceptions import HTTPException

from preheat.cache_folder import cache_folder, make_private
from preheat.core.run_records import Failed, Finished, Resumed, Started, Stopping
from preheat.errors import RunError
from preheat.files import lock_file, parse_json, read_bytes, read_record, to_json, write_atomic
from preheat.hardware.child_processes import describe_exit, tie_to_parent
from preheat.run.reader import Reader
from preheat.sanitize import escape_control_characters, shorten
from preheat.web.limits import LARGEST_FILE
from preheat.web.stop import send_request

__all__ = ["Job", "JobState", "Jobs", "Training", "TrainingRecord", "read_answer", "read_running_training"]

_MOST_OUTPUT = 64 << 20
"""Bytes of one output of an answer; a plan has 100 kB, and a data preview of long rows a few MB."""
_MOST_ANSWERS = 8
"""Commands that run at a time: each imports torch, which takes 300 MB."""
_RECENT = 30
"""Ended jobs whose output is kept."""
_MOST_WAITING = 50
"""Trainings in the queue."""
_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL of an answer."""
_MOST_UNREAD = 16 << 10
"""Bytes of messages that a process has not read. A pipe takes 64 KiB; then the thread that writes would wait for it."""
_EARLIER_S = 1.0
"""Seconds between two looks at a training that is no child of this server."""
_TAIL = 64 << 10
"""Bytes of a log that are looked through for its last line."""


class JobState(StrEnum):
    """State of a command."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Job:
    """A command that answers; its methods may be called from any thread.

    Attributes:
        id: its name in URLs.
        title: the command in a few words, for people.
        folder: for the files that it writes; deleted with the job.
        key: the question that it answers; None: it is not asked twice.
        idle_s: seconds without `touch` after which it is ended.
        talks: it reads requests from its standard input.
        problem: why it failed, in one sentence; "" if it did not.
        exit_code: negative for a signal; None while it runs.
    """

    def __init__(self, title: str, folder: Path, limit_s: float, *, cwd: Path | None = None, key: str | None = None):
        self.id = secrets.token_urlsafe(9)
        self.title, self.folder, self.limit_s, self.key = title, folder, limit_s, key
        self._cwd = cwd or folder
        self.idle_s, self.talks = math.inf, False
        self._touched = time.monotonic()
        self.started = time.time()
        self.ended: float | None = None
        self.state = JobState.RUNNING
        self.problem = ""
        self.exit_code: int | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False

    @property
    def is_running(self) -> bool:
        return self.state is JobState.RUNNING

    @property
    def seconds(self) -> float:
        return (self.ended or time.time()) - self.started

    @property
    def output(self) -> Path:
        """The file of its standard output."""
        return self.folder / ".stdout"

    @property
    def progress(self) -> str:
        """The last line of its standard error."""
        return read_last_line(self.folder / ".stderr")

    def touch(self) -> None:
        """Says that a page still shows it."""
        self._touched = time.monotonic()

    def interrupt(self) -> None:
        """Sends Ctrl-C, which ends an answer of a chat."""
        with self._changed:
            process = self._process
        if process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)

    def cancel(self) -> None:
        """Ends the process and its children; does nothing after its end."""
        with self._changed:
            self._is_cancelled = True
            process = self._process
        if process is not None and self.is_running:
            _end_group(process)

    def send(self, line: str) -> None:
        """Writes a line to its standard input.

        Raises:
            RunError: the process has ended, or reads nothing.
        """
        assert "\n" not in line, "a request is one line"
        with self._changed:
            stream = self._process.stdin if self._process is not None else None
        try:
            if stream is None or not self.is_running:
                raise BrokenPipeError
            with self._sending:
                if _count_unread(stream) > _MOST_UNREAD:
                    raise RunError(f"{self.title}: has not read the last messages yet; wait for its answers")
                stream.write(line.encode() + b"\n")
                stream.flush()
        except (BrokenPipeError, ValueError):
            raise RunError(f"{self.title}: the process has ended; start it again") from None

    def read_lines(self, offset: int, timeout: float) -> tuple[list[str], int]:
        """Returns the complete lines of its output from an offset in bytes, and the offset behind them.

        Args:
            timeout: seconds to wait for a first line.
        """
        end = time.monotonic() + timeout
        while True:
            with self._changed:
                data = b""
                if self.output.exists():
                    with self.output.open("rb") as file:
                        file.seek(offset)
                        data = file.read()
                complete = data[: data.rfind(b"\n") + 1]
                if complete:
                    return complete.decode(errors="replace").splitlines(), offset + len(complete)
                if not self.is_running or (left := end - time.monotonic()) <= 0:
                    return [], offset
                self._changed.wait(left)

    def wait(self, timeout: float) -> bool:
        """Waits for its end; returns False if that does not come in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_running, timeout)

    def _run(self, command: Sequence[str]) -> None:
        """Runs the command to its end, in a thread of its own, with which Linux ends the process."""
        try:
            process = subprocess.Popen(
                tie_to_parent(command),
                cwd=self._cwd,
                env=_environment(),
                stdin=subprocess.PIPE if self.talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._finish(1, _explain_failed_start(error))
            return
        with self._changed:
            self._process = process
            is_cancelled = self._is_cancelled
        if is_cancelled:
            _end_group(process)
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._copy, args=(stream, self.folder / name), daemon=True)
            for stream, name in ((process.stdout, ".stdout"), (process.stderr, ".stderr"))
        ]
        for reader in readers:
            reader.start()
        problem = ""
        while process.poll() is None:
            if self.seconds > self.limit_s:
                problem = f"it took longer than {self.limit_s / 60:,.0f} minutes and was ended; ask for less"
            elif time.monotonic() - self._touched > self.idle_s:
                problem = f"the page was closed for {self.idle_s:,.0f} s, so it was ended; start it again"
            if problem:
                _end_group(process)
                process.wait()
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(1.0, max(0.0, self.limit_s - self.seconds) + 0.01))
        # Its children, which would hold the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join(_GRACE_S)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        self._finish(process.returncode, problem)

    def _copy(self, stream: IO[bytes], file: Path) -> None:
        """Copies an output to a file, up to the limit; then the process is ended."""
        size = 0
        try:
            with stream, file.open("wb", buffering=0) as out:
                while chunk := os.read(stream.fileno(), 1 << 16):
                    size += len(chunk)
                    if size > _MOST_OUTPUT:
                        self.problem = f"it wrote more than {_MOST_OUTPUT >> 20} MiB and was ended"
                        self.cancel()
                        return
                    out.write(chunk)
                    with self._changed:
                        self._changed.notify_all()
        except OSError as error:  # a full disk: without a reader, the process would wait for its time limit
            self.problem = f"its output cannot be stored ({error.strerror}); free space in {file.parent.parent}"
            self.cancel()

    def _finish(self, exit_code: int, problem: str) -> None:
        if not problem and not self.problem and exit_code != 0 and not self._is_cancelled:
            problem = read_error(self.folder / ".stderr", exit_code)
        with self._changed:
            self.problem = self.problem or problem
            self.exit_code = exit_code
            self.ended = time.time()
            if self.problem:
                self.state = JobState.FAILED
            else:
                self.state = JobState.CANCELLED if self._is_cancelled else JobState.DONE
            self._changed.notify_all()


@dataclass(frozen=True)
class TrainingRecord:
    """A training as the next server finds it, in the file whose lock it holds.

    Attributes:
        run: its run folder.
        log: file of its output.
        started: seconds since 1970; with `pid` it identifies the process.
    """

    title: str
    run: str
    log: str
    pid: int
    started: float


@dataclass(frozen=True)
class QueuedTraining:
    """A training in the file of the queue, from which the next server takes it."""

    id: str
    title: str
    arguments: tuple[str, ...]
    run: str
    cwd: str
    queued: float
    state: str
    problem: str
    pid: int | None = None
    exit_code: int | None = None
    log: str | None = None


class Training:
    """A training that waits, runs or has ended.

    Attributes:
        run: its run folder.
        log: file of its output; default: beside the run.
        problem: why it failed, in one sentence; "" if it did not.
        is_earlier: an earlier server started it.
    """

    def __init__(
        self, title: str, arguments: Sequence[str], run: Path, cwd: Path | None = None, log: Path | None = None
    ):
        self.id = secrets.token_urlsafe(9)
        self.title, self.arguments, self.run = title, tuple(arguments), run
        self.cwd = cwd or run.parent
        self.log = log or run.with_name(f"{run.name}.log")
        self.queued = time.time()
        self.state = JobState.WAITING
        self.problem = ""
        self.exit_code: int | None = None
        self.pid: int | None = None
        self.is_cancelled = False
        self.is_earlier = False

    @property
    def is_unfinished(self) -> bool:
        """It waits or runs."""
        return self.state in (JobState.WAITING, JobState.RUNNING)

    @property
    def progress(self) -> str:
        """The last line of its log."""
        return read_last_line(self.log)

    def read_log(self) -> str:
        """Returns the end of its log."""
        return "\n".join(escape_control_characters(line) for line in _read_tail(self.log)[-60:])


class Jobs:
    """All commands that the server started, and the trainings of earlier servers that still run.

    Args:
        limit_s: seconds for which an answer may take.
    """

    def __init__(self, limit_s: float = 900.0):
        self._limit_s = limit_s
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._answers: dict[str, Job] = {}
        self._once: dict[tuple[str, ...], object] = {}
        self._trainings: list[Training] = []
        self._scratch: Path | None = None
        self._worker: threading.Thread | None = None
        self._is_closed = False
        self._queue_file: Path | None = None
        self._queue_lock: IO[str] | None = None

    def take_over(self, runs: Path) -> None:
        """Continues with the queue that an earlier server left for a folder of runs, and stores it from now on.

        Raises:
            RunError: its file is damaged.
        """
        self._queue_file, self._queue_lock = _claim_queue(runs)
        if self._queue_file is not None:
            self._trainings = _read_queue(self._queue_file)
            threading.Thread(target=self._follow_earlier, daemon=True).start()
            if any(training.state is JobState.WAITING for training in self._trainings):
                self._start_worker()

    @contextlib.contextmanager
    def create_folder(self) -> Iterator[Path]:
        """Yields a new private folder for a job, and removes it if an error prevents that the job starts."""
        folder = self._create_folder()
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _create_folder(self) -> Path:
        with self._lock:
            if self._scratch is None:
                self._scratch = Path(tempfile.mkdtemp(prefix="preheat-ui-"))
        return Path(tempfile.mkdtemp(dir=self._scratch))

    def start(
        self,
        title: str,
        arguments: Sequence[str],
        *,
        folder: Path | None = None,
        cwd: Path | None = None,
        limit_s: float | None = None,
        key: str | None = None,
        idle_s: float = math.inf,
        talks: bool = False,
    ) -> Job:
        """Starts `preheat ARGUMENTS` and returns at once.

        Args:
            folder: the folder of its files, of `create_folder`; default: a new one.
            cwd: its working folder; default: `folder`.
            key: the question that it answers: a job that answers the same one is returned instead.
            idle_s: seconds without `Job.touch` after which it is ended.
            talks: it reads requests from its standard input.

        Raises:
            RunError: too many commands run.
        """
        job = Job(title, folder or self._create_folder(), limit_s or self._limit_s, cwd=cwd, key=key)
        job.idle_s, job.talks = idle_s, talks
        with self._lock:
            for other in self._answers.values():
                if key is not None and other.key == key and (other.is_running or other.exit_code in (0, 3)):
                    shutil.rmtree(job.folder, ignore_errors=True)
                    return other
            running = [other for other in self._answers.values() if other.is_running]
            if len(running) >= _MOST_ANSWERS:
                shutil.rmtree(job.folder, ignore_errors=True)
                raise RunError(f"{len(running)} commands run already; cancel some of them or wait")
            self._answers[job.id] = job
            ended = [other for other in self._answers.values() if not other.is_running]
            for old in ended[: max(0, len(ended) - _RECENT)]:
                del self._answers[old.id]
                shutil.rmtree(old.folder, ignore_errors=True)
        threading.Thread(target=job._run, args=(_command(arguments),), daemon=True).start()
        return job

    def ask_once(self, arguments: Sequence[str]) -> object:
        """Returns the JSON that `preheat ARGUMENTS` prints; the command runs once in the life of the server.

        Raises:
            RunError: it failed.
        """
        key = tuple(arguments)
        with self._lock:
            if key in self._once:
                return self._once[key]
        title = " ".join(arguments)
        job = self.start(title, arguments, limit_s=60.0, key=title)
        job.wait(70.0)
        if job.state is not JobState.DONE:
            raise RunError(f"preheat {job.title}: {job.problem or 'was cancelled'}")
        answer = read_answer(job)
        with self._lock:
            self._once[key] = answer
        return answer

    def find(self, id: str) -> Job:
        """Returns an answer.

        Raises:
            HTTPException: 404, there is none; the server was restarted since, or it is an old one.
        """
        with self._lock:
            job = self._answers.get(id)
        if job is None:
            raise HTTPException(404, "The server does not have this result any more; ask again.")
        return job

    def queue_training(
        self, title: str, arguments: Sequence[str], run: Path, *, cwd: Path | None = None, log: Path | None = None
    ) -> Training:
        """Queues `preheat ARGUMENTS`, which trains the run folder `run`; it starts when no other training runs.

        Args:
            cwd: its working folder; default: that of the run folder.
            log: a new file for its output; default: beside the run folder.

        Raises:
            RunError: a training of this folder waits or runs already.
        """
        training = Training(title, arguments, run, cwd, log)
        with self._changed:
            if any(t.run == run for t in self._trainings if t.state in (JobState.WAITING, JobState.RUNNING)):
                raise RunError(f"{run.name}: this run waits or trains already")
            if sum(t.state is JobState.WAITING for t in self._trainings) >= _MOST_WAITING:
                raise RunError(f"{run.name}: {_MOST_WAITING} trainings wait already; cancel some of them")
            ended = [t for t in self._trainings if t.state not in (JobState.WAITING, JobState.RUNNING)]
            for old in ended[: max(0, len(ended) - _RECENT)]:
                self._trainings.remove(old)
            self._trainings.append(training)
            try:
                self._save_queue()
            except RunError:
                self._trainings.remove(training)
                raise
            self._start_worker()
            self._changed.notify_all()
        return training

    def _start_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._train_in_turn, daemon=True)
            self._worker.start()

    def _save_queue(self) -> None:
        """Writes the file of the queue; called with the lock held.

        Raises:
            RunError: it cannot be written.
        """
        if self._queue_file is None or self._is_closed:
            return
        records = [
            QueuedTraining(
                *(t.id, t.title, t.arguments, str(t.run), str(t.cwd), t.queued, t.state.value, t.problem),
                *(t.pid, t.exit_code, str(t.log)),
            )
            for t in self._trainings
        ]
        try:
            write_atomic(self._queue_file, to_json(records))
        except OSError as error:
            raise RunError(f"{self._queue_file}: the queue cannot be stored ({error.strerror})") from None

    def _save_or_note(self, training: Training) -> None:
        try:
            self._save_queue()
        except RunError as error:  # the training goes on, and its row says so
            training.problem = training.problem or str(error)

    def _follow_earlier(self) -> None:
        """Records the end of a training that an earlier server started."""
        while not self._is_closed:
            with self._lock:
                ours = [t for t in self._trainings if t.state is JobState.RUNNING and t.is_earlier]
            if not ours:
                return
            record = read_running_training()
            for training in ours:
                if record is None or record.pid != training.pid:
                    self._end(training, *_find_end(training), None)
            time.sleep(_EARLIER_S)

    def list_trainings(self) -> list[Training]:
        """Returns the trainings in the order of the queue, with one of an earlier or another server first."""
        with self._lock:
            ours = list(self._trainings)
        record = read_running_training()
        if record is not None and all(t.pid != record.pid for t in ours):
            other = Training(record.title, (), Path(record.run))
            other.id, other.log, other.pid = "running", Path(record.log), record.pid
            other.queued, other.state = record.started, JobState.RUNNING
            return [other, *ours]
        return ours

    def list_trainings_of(self, run: Path) -> list[Training]:
        """Returns the trainings of a run folder, which is resolved, in the order of the queue."""
        return [training for training in self.list_trainings() if training.run.resolve() == run]

    def find_unfinished(self, run: Path) -> Training | None:
        """Returns the training of a run folder that waits or runs."""
        return next((training for training in self.list_trainings_of(run) if training.is_unfinished), None)

    def find_training(self, id: str) -> Training:
        """Returns a training; "running" is the one of another server.

        Raises:
            HTTPException: 404, there is none.
        """
        for training in self.list_trainings():
            if training.id == id:
                return training
        raise HTTPException(404, "The server does not know this training any more; see the list of runs.")

    def cancel_training(self, id: str) -> None:
        """Takes a training out of the queue, or stops it: it finishes its step and saves a checkpoint.

        Raises:
            RunError: it is stopping already, or cannot be stopped from here.
        """
        training = self.find_training(id)
        with self._changed:
            if training.state is JobState.WAITING:
                training.state, training.is_cancelled = JobState.CANCELLED, True
                self._save_queue()
                self._changed.notify_all()
                return
            # A second SIGTERM would end it without saving.
            if training.state is not JobState.RUNNING or training.pid is None or training.is_cancelled:
                return
            training.is_cancelled = True
        if _has_begun(training):
            try:
                send_request(training.run, "stop")
            except RunError:
                training.is_cancelled = False
                raise
            return
        # It has not begun: there is nothing to save.
        try:
            os.killpg(training.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise RunError(f"{training.title}: belongs to another user, and only that user can stop it") from None

    def close(self) -> None:
        """Ends the answers; a training that runs goes on, and the queue's file keeps those that wait."""
        with self._changed:
            self._is_closed = True
            if self._queue_lock is not None:
                self._queue_lock.close()
            answers = list(self._answers.values())
            self._changed.notify_all()
        for job in answers:
            job.cancel()
        for job in answers:
            job.wait(_GRACE_S + 1)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _train_in_turn(self) -> None:
        """Starts the trainings one after the other, also after that of another server."""
        while True:
            with self._changed:
                waiting = next((t for t in self._trainings if t.state is JobState.WAITING), None)
                if self._is_closed:
                    return
                if waiting is None:
                    self._changed.wait()
                    continue
            lock = _open_lock()
            try:
                lock_file(lock)
            except BlockingIOError:
                lock.close()
                with self._changed:
                    self._changed.wait(1.0)
                continue
            with lock:
                process = self._start_training(waiting, lock)
            if process is not None:
                self._watch(waiting, process)

    def _start_training(self, training: Training, lock: IO[str]) -> subprocess.Popen[bytes] | None:
        """Starts a training that inherits the lock; returns None if it was cancelled or cannot be started."""
        with self._changed:
            if training.state is not JobState.WAITING or self._is_closed:
                return None
            training.state = JobState.RUNNING
        try:
            training.log.parent.mkdir(parents=True, exist_ok=True)
            # x: a file or link that appeared since the run was queued is not written to.
            log = training.log.open("xb")
        except OSError as error:
            self._end(training, JobState.FAILED, f"{training.log}: cannot be written ({error.strerror})", None)
            return None
        try:
            with log:
                process = subprocess.Popen(
                    _command(training.arguments),
                    cwd=training.cwd,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # Held for as long as the process lives, whatever becomes of this server.
                    pass_fds=(lock.fileno(),),
                )
        except OSError as error:
            self._end(training, JobState.FAILED, _explain_failed_start(error), None)
            return None
        record = TrainingRecord(training.title, str(training.run), str(training.log), process.pid, time.time())
        lock.seek(0)
        lock.truncate()
        lock.write(to_json(record))
        lock.flush()
        with self._changed:
            training.pid = process.pid
            self._save_or_note(training)
        return process

    def _watch(self, training: Training, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code == 0:
            self._end(training, JobState.DONE, "", code)
        elif training.is_cancelled:
            self._end(training, JobState.CANCELLED, "", code)
        else:
            self._end(training, JobState.FAILED, read_error(training.log, code), code)

    def _end(self, training: Training, state: JobState, problem: str, code: int | None) -> None:
        with self._changed:
            training.state, training.problem, training.exit_code = state, problem, code
            self._save_or_note(training)
            self._changed.notify_all()


def _count_unread(stream: IO[bytes]) -> int:
    """Returns the bytes in a pipe that its reader has not taken."""
    buffer = array("i", [0])
    fcntl.ioctl(stream.fileno(), termios.FIONREAD, buffer)
    return buffer[0]


def read_running_training() -> TrainingRecord | None:
    """Returns the training that a server on this machine started and that still runs, or None."""
    try:
        with _open_lock() as lock:
            try:
                lock_file(lock)
                return None
            except BlockingIOError:
                lock.seek(0)
                record = read_record(TrainingRecord, parse_json(lock.read()))
    except (OSError, ValueError):
        return None  # it is being written
    # A process of another user, or a number that another process has by now.
    try:
        created = psutil.Process(record.pid).create_time()
    except psutil.Error:
        return None
    return record if created <= record.started + 1 else None


def read_last_line(file: Path) -> str:
    """Returns the last line of a text file that is not empty, shortened and without control characters; or ""."""
    for line in reversed(_read_tail(file)):
        if line.strip():
            return shorten(escape_control_characters(line.strip()), 300)
    return ""


def read_error(file: Path, exit_code: int) -> str:
    """Returns the message of a failed command from its standard error, or the way it ended."""
    lines = _read_tail(file)
    for line in reversed(lines):
        if line.startswith("error: "):
            return shorten(escape_control_characters(line.removeprefix("error: ").strip()), 1000)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if exit_code == 3 and not last:
        return "it does not fit in the memory of the device"
    way = f"the command {describe_exit(exit_code)}"
    return shorten(escape_control_characters(f"{way}: {last}" if last else way), 1000)


def _read_tail(file: Path) -> list[str]:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def read_answer(job: Job) -> object:
    """Returns the JSON that a command printed; None if it printed nothing.

    Raises:
        RunError: it is not JSON.
    """
    try:
        data = read_bytes(job.output)
        return parse_json(data) if data.strip() else None
    except ValueError as error:
        raise RunError(f"{job.title}: its output cannot be read ({error})") from None


def _command(arguments: Sequence[str]) -> list[str]:
    # -P: a file named torch.py in the working folder would be imported otherwise.
    return [sys.executable, "-P", "-m", "preheat", *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "120"}


def _explain_failed_start(error: OSError) -> str:
    """Explains why a process could not be started. Popen names the program or the folder, if that is the cause."""
    if error.filename is None:
        return f"the command cannot be started ({error.strerror}); free memory or end other processes, then try again"
    return (
        f"the command cannot be started: {error.filename}: {error.strerror}; create or allow it, or start preheat ui "
        "from another folder"
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM to a process and its children, and SIGKILL to those that are left after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)

    def kill() -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(_GRACE_S, kill)
    timer.daemon = True
    timer.start()


def _claim_queue(runs: Path) -> tuple[Path | None, IO[str] | None]:
    """Returns the file of a folder's queue and its lock; None while another server has it, whose queue it is."""
    folder = cache_folder() / "ui"
    name = hashlib.blake2b(os.fsencode(runs.resolve()), digest_size=8).hexdigest()
    try:
        make_private(folder)
        lock = (folder / f"queue-{name}.lock").open("a+", encoding="utf-8")
    except OSError:  # a cache that cannot be written: the first page says so
        return None, None
    try:
        lock_file(lock)
    except BlockingIOError:
        lock.close()
        return None, None
    return folder / f"queue-{name}.json", lock


def _read_queue(file: Path) -> list[Training]:
    """Returns the trainings that an earlier server left.

    Raises:
        RunError: the file is damaged.
    """
    if not file.exists():
        return []
    try:
        items = parse_json(read_bytes(file))
        if not isinstance(items, list):
            raise ValueError("not a list")
        records = [read_record(QueuedTraining, item) for item in items]
        trainings = []
        for record in records:
            log = None if record.log is None else Path(record.log)
            training = Training(record.title, record.arguments, Path(record.run), Path(record.cwd), log)
            training.id, training.queued, training.pid = record.id, record.queued, record.pid
            training.state, training.problem = JobState(record.state), record.problem
            training.exit_code = record.exit_code
            training.is_earlier = training.state is JobState.RUNNING
            trainings.append(training)
    except ValueError as error:
        raise RunError(f"{file}: the queue of trainings is damaged ({error}); move the file away") from None
    return trainings


def _has_begun(training: Training) -> bool:
    """Returns True if a process of this training has written its status; an earlier session may have left one."""
    status = Reader(training.run, largest=LARGEST_FILE).status() if training.run.is_dir() else None
    try:
        return status is not None and status.started > psutil.Process(training.pid).create_time() - 1
    except psutil.Error:  # it has just ended
        return status is not None


def _find_end(training: Training) -> tuple[JobState, str]:
    """Returns the state and the problem of a training whose end no server saw, from the events of its run."""
    events = Reader(training.run, largest=LARGEST_FILE).events() if training.run.is_dir() else []
    for event in reversed(events):
        if isinstance(event, Started | Resumed):  # earlier events are of an earlier session
            break
        if isinstance(event, Finished):
            return JobState.DONE, ""
        if isinstance(event, Stopping):
            return JobState.CANCELLED, ""
        if isinstance(event, Failed):
            return JobState.FAILED, event.reason or "it failed; its output says why"
    return JobState.FAILED, "it ended while no server ran, and its run records no end; see its output"


def _open_lock() -> IO[str]:
    """Returns the file whose lock a training holds."""
    folder = cache_folder() / "ui"
    make_private(folder)
    return (folder / "training").open("a+", encoding="utf-8")
