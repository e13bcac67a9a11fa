"""Limits on a Jinja template while it renders: somebody else wrote it, and a few characters of it can ask for hours or for all memory.

Jinja's sandbox keeps a template from the system, not from loops within loops, from texts a billion characters wide or from calling itself.
The limits cost some microseconds (in a thread beside the main one a few more), so that all rows are rendered under them, in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from preheat.errors import PreheatError
from preheat.sanitize import quoted

__all__ = ["TemplateLimit", "limited", "require_small", "require_template"]

SECONDS = 5.0
"""A conversation takes less than a millisecond, one of a megabyte some ten."""
MEMORY = 512 * 2**20
"""Bytes more than the process has when it begins."""
LARGEST = 2**20
"""Characters of a template; the longest of the models' have some ten thousand."""
TEXT, TIMES = 2**20, 16
"""Characters that a rendered text may always have, and how many times those of its messages."""


_MARKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""transformers' own blocks, which Jinja by itself does not know."""


class TemplateLimit(PreheatError):
    """A template that does not end, or takes all memory: no row can be read with it, so this is not the fault of one."""

    exit_code = 4


class _Late(BaseException):
    """Time is up. No `Exception`: Jinja catches those where it computes what is constant."""


@contextlib.contextmanager
def limited(name: str) -> Iterator[None]:
    """Renders within limits on time and memory.

    Args:
        name: of the template, for messages.

    Raises:
        TemplateLimit: it reaches one of them, or calls itself without end.
    """
    try:
        with _clock(), _memory_limit:
            yield
    except _Late:
        raise TemplateLimit(f"{name}: is not done after {SECONDS:g} s: it loops; use another template") from None
    except MemoryError:
        raise TemplateLimit(
            f"{name}: asks for more than {MEMORY // 2**20} MiB of memory; use another template"
        ) from None
    except RecursionError:
        raise TemplateLimit(
            f"{name}: calls itself without end, or is nested too deeply; use another template"
        ) from None


class _MemoryLimit:
    """The process's limit on its address space, lowered while any thread renders."""

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0
        self.before: tuple[int, int] | None = None

    def __enter__(self) -> None:
        with self.lock:
            self.threads += 1
            if self.threads == 1:
                self._lower()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.threads -= 1
            if self.threads == 0 and self.before is not None:
                resource.setrlimit(resource.RLIMIT_AS, self.before)
                self.before = None

    def _lower(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        try:
            with open("/proc/self/statm", "rb") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        except OSError:  # not Linux: there the limit is not kept either
            return
        if any(0 <= known <= limit for known in (soft, hard)):
            return  # there is one that is as low
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        self.before = soft, hard


_memory_limit = _MemoryLimit()


def _clock() -> contextlib.AbstractContextManager[None]:
    """Raises _Late in the block after `SECONDS`."""
    return _alarm() if threading.current_thread() is threading.main_thread() else _threads.watching()


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """As `_clock`, by a signal, which reaches the main thread alone; an alarm that was set before goes off when it would have."""
    begun, used = time.monotonic(), time.thread_time()

    def ring(*_: Any) -> None:
        if time.thread_time() - used < SECONDS / 2:  # the process was stopped, or the machine is busy with others
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        else:
            raise _Late

    handler = signal.signal(signal.SIGALRM, ring)
    left, every = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3), every)


@dataclass
class _Watched:
    """A thread that renders: its clock, what that showed when it began, and when to look again."""

    clock: int
    begun: float
    look: float


class _Watcher:
    """As `_clock`, in any thread: a thread of its own watches it, and has it raise the error at its next instruction."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.watched: dict[int, _Watched] = {}
        self.thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        ident = threading.get_ident()
        if ident in self.watched:
            yield  # a block within one that is watched
            return
        # Where a thread's own clock cannot be had (macOS), time that others take counts too.
        clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else time.CLOCK_MONOTONIC
        with self.changed:
            self.watched[ident] = _Watched(clock, time.clock_gettime(clock), time.monotonic() + SECONDS)
            if self.thread is None or not self.thread.is_alive():  # as after a fork
                self.thread = threading.Thread(target=self._watch, name="template-clock", daemon=True)
                self.thread.start()
            self.changed.notify()
        try:
            yield
        except _Late:
            raise
        except BaseException:
            self._leave(ident)
            raise
        else:
            self._leave(ident)

    def _leave(self, ident: int) -> None:
        """Ends the watch. Whoever takes the thread out of `watched` decides; the lock would stay closed if the error came here."""
        if self.watched.pop(ident, None) is None:
            for _ in range(100):  # the error is on its way
                time.sleep(0.01)
            raise _Late

    def _watch(self) -> None:
        with self.changed:
            while True:
                now = time.monotonic()
                for ident, watched in list(self.watched.items()):
                    if now < watched.look:
                        continue
                    watched.look = now + SECONDS
                    # As in `_alarm`.
                    late = time.clock_gettime(watched.clock) - watched.begun >= SECONDS / 2
                    if late and self.watched.pop(ident, None) is not None:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Late))
                looks = [watched.look for watched in list(self.watched.values())]
                self.changed.wait(max(min(looks) - now, 0.0) if looks else None)


_threads = _Watcher()


def require_small(name: str, text: str, messages: Any) -> None:
    """Raises TemplateLimit where a rendered text is out of all proportion to what was said."""
    if len(text) > TEXT and len(text) > TEXT + TIMES * len(repr(messages)):
        raise TemplateLimit(f"{name}: makes {len(text):,} characters of a conversation; use another template")


@functools.lru_cache(maxsize=16)
def require_template(name: str, text: str) -> None:
    """Raises TemplateLimit for a template that is too large, or has a power in it: its digits are computed where no clock stops them."""
    import jinja2
    from jinja2 import nodes

    if len(text) > LARGEST:
        raise TemplateLimit(f"{name}: has {len(text):,} characters, and no chat template more than {LARGEST:,}")
    if "**" not in text:
        return
    with limited(name):
        try:
            parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
        except jinja2.TemplateError:
            return  # told with its line when it is rendered
    if power := next(parsed.find_all(nodes.Pow), None):
        raise TemplateLimit(
            f"{name}, line {power.lineno}: computes a power ({quoted('**')}), which no chat template "
            "needs; write the number"
        )
