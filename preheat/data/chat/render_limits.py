"""Time and memory limits for rendering untrusted Jinja templates, which can loop for hours or use up all memory.

Jinja's sandbox protects the system, but does not stop nested loops, huge texts or recursion. The limits cost
microseconds (slightly more outside the main thread), so all rows are rendered under them, in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from preheat.errors import PreheatError
from preheat.sanitize import quote_value

__all__ = ["TemplateLimit", "limit_rendering", "require_small", "require_template"]

SECONDS = 5.0
"""Time limit. A conversation takes less than a millisecond, one of a megabyte about ten."""
MEMORY = 512 * 2**20
"""Bytes that rendering may add to the process."""
LARGEST = 2**20
"""Maximum characters of a template; the longest ones of published models have about ten thousand."""
TEXT, TIMES = 2**20, 16
"""Characters that a rendered text may always have, and the maximum ratio to its messages above that."""


_MARKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""The {% generation %} blocks of transformers, which Jinja does not know."""


class TemplateLimit(PreheatError):
    """A template that exceeds a limit. This is not the fault of a single row, since no row can be rendered with it."""

    exit_code = 4


class _TimeLimit(BaseException):
    """The time limit was reached. Not an `Exception`, since Jinja catches those in constant folding."""


@contextlib.contextmanager
def limit_rendering(name: str) -> Iterator[None]:
    """Limits time and memory within the block.

    Args:
        name: name of the template, for messages.

    Raises:
        TemplateLimit: the template reaches a limit or recurses too deeply.
    """
    try:
        with _limit_time(), _memory_limit:
            yield
    except _TimeLimit:
        raise TemplateLimit(f"{name}: is not finished after {SECONDS:g} s: it loops; use another template") from None
    except MemoryError:
        raise TemplateLimit(f"{name}: needs more than {MEMORY // 2**20} MiB of memory; use another template") from None
    except RecursionError:
        raise TemplateLimit(
            f"{name}: calls itself without end, or is nested too deeply; use another template"
        ) from None


class _MemoryLimit:
    """Lowers the process's limit on its address space while any thread renders."""

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0
        self.before: tuple[int, int] | None = None

    # The limit is the process's own: the first thread lowers it and the last one restores it.
    def __enter__(self) -> None:
        with self.lock:
            self.threads += 1
            if self.threads == 1:
                self._lower()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.threads -= 1
            if self.threads == 0 and self.before is not None:
                import resource

                resource.setrlimit(resource.RLIMIT_AS, self.before)
                self.before = None

    def _lower(self) -> None:
        try:
            with open("/proc/self/statm", "rb") as file:
                # The first number is the size of the address space in pages.
                pages = int(file.read().split()[0])
        except OSError:  # not Linux, which alone enforces the limit
            return
        import resource

        limit = pages * resource.getpagesize() + MEMORY
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        # RLIM_INFINITY is -1.
        if any(0 <= known <= limit for known in (soft, hard)):
            return  # the present limit is low enough
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        self.before = soft, hard


_memory_limit = _MemoryLimit()


def _limit_time() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that raises _TimeLimit in the block after `SECONDS`."""
    # Windows has no alarms.
    in_main = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    return _limit_by_alarm() if in_main else _threads.watching()


@contextlib.contextmanager
def _limit_by_alarm() -> Iterator[None]:
    """Implements `_limit_time` for the main thread by SIGALRM; an earlier alarm still rings at its time."""
    begun, used = time.monotonic(), time.thread_time()

    def raise_time_limit(*_: object) -> None:
        if time.thread_time() - used < SECONDS / 2:  # the process was stopped, or the machine is busy
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        else:
            raise _TimeLimit

    handler = signal.signal(signal.SIGALRM, raise_time_limit)
    # A process has one such timer: an earlier alarm, a test's time limit for example, is restored afterwards.
    left, every = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            # Without the time that has passed; at least 1 ms, since 0 would cancel it.
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3), every)


@dataclass
class _Watched:
    """A rendering thread: its CPU clock, the clock's time at the start, and the time of the next check."""

    clock: int | None
    begun: float
    deadline: float


def _read_clock(clock: int | None) -> float:
    # Without a clock of the thread (macOS, Windows), the time of others counts too.
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class _Watcher:
    """Implements `_limit_time` for any thread: a watchdog thread raises the error in it at its next instruction."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.watched: dict[int, _Watched] = {}
        self.thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        ident = threading.get_ident()
        if ident in self.watched:
            yield  # nested in a watched block
            return
        clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else None
        with self.changed:
            self.watched[ident] = _Watched(clock, _read_clock(clock), time.monotonic() + SECONDS)
            if self.thread is None or not self.thread.is_alive():  # for example after a fork
                self.thread = threading.Thread(target=self._watch, name="template-clock", daemon=True)
                self.thread.start()
            self.changed.notify()
        try:
            yield
        # The watchdog has removed the entry.
        except _TimeLimit:
            raise
        except BaseException:
            self._leave(ident)
            raise
        else:
            self._leave(ident)

    def _leave(self, ident: int) -> None:
        """Stops watching a thread, without the lock, which would stay locked if the error were raised here.

        The thread that removes the entry from `watched` decides if the error is raised.
        """
        if self.watched.pop(ident, None) is None:
            for _ in range(100):  # the watchdog is about to raise the error
                time.sleep(0.01)
            raise _TimeLimit

    def _watch(self) -> None:
        with self.changed:
            while True:
                now = time.monotonic()
                for ident, watched in list(self.watched.items()):
                    if now < watched.deadline:
                        continue
                    watched.deadline = now + SECONDS
                    # As in `_limit_by_alarm`, only if the thread itself used the time.
                    late = _read_clock(watched.clock) - watched.begun >= SECONDS / 2
                    if late and self.watched.pop(ident, None) is not None:
                        # Takes effect between two bytecodes of that thread, so a long call in C is not interrupted.
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_TimeLimit))
                looks = [watched.deadline for watched in list(self.watched.values())]
                self.changed.wait(max(min(looks) - now, 0.0) if looks else None)


_threads = _Watcher()


def require_small(name: str, text: str, messages: object) -> None:
    """Raises TemplateLimit if a rendered text is far longer than its messages."""
    # repr is slow for long messages, so it is taken only of long texts.
    if len(text) > TEXT and len(text) > TEXT + TIMES * len(repr(messages)):
        raise TemplateLimit(f"{name}: makes {len(text):,} characters of a conversation; use another template")


@functools.lru_cache(maxsize=16)
def require_template(name: str, text: str) -> None:
    """Raises TemplateLimit for a template that is too large or has a power, which no time limit can interrupt."""
    import jinja2
    from jinja2 import nodes

    if len(text) > LARGEST:
        raise TemplateLimit(f"{name}: has {len(text):,} characters, and no chat template more than {LARGEST:,}")
    # Nearly all templates lack the operator and need no parsing.
    if "**" not in text:
        return
    with limit_rendering(name):
        try:
            parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
        except jinja2.TemplateError:
            return  # reported with its line when it is rendered
    if power := next(parsed.find_all(nodes.Pow), None):
        raise TemplateLimit(
            f"{name}, line {power.lineno}: computes a power ({quote_value('**')}), which no chat template "
            "needs; write the number"
        )
