"""C++ of ours: built here once for each torch, kept in the cache, and called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from preheat.errors import RunError
from preheat.hardware.links import cache_folder
from preheat.hardware.processes import tethered

__all__ = ["NO_COMPILER", "compiler", "is_built", "library", "quick_library"]

NO_COMPILER = "no C++ compiler was found; install g++, or name one in CXX"
_FLAGS = ("-std=c++20", "-fPIC", "-shared")
_VECTOR = ("-O3", "-march=native", "-fopenmp")


@functools.cache
def library(source: Path, *, vector: bool = False) -> ctypes.CDLL:
    """What a file of C++ exports, built when it is not in the cache yet.

    Args:
        source: the file; it may include torch's headers and call c10.
        vector: for the instructions of this CPU alone, with OpenMP in the threads of torch (the very library that torch brings).

    Raises:
        RunError: there is no compiler, it fails, or the cache cannot be written.
    """
    import torch

    home = Path(torch.__file__).parent
    about = f"{torch.__version__} {home} {_cpu() if vector else platform.machine()}"
    key = hashlib.sha256(source.read_bytes() + about.encode()).hexdigest()[:16]
    built = cache_folder() / f"{source.stem}-{key}.so"
    if not built.is_file():
        _build(source, built, home, ("-O2",) if not vector else _VECTOR)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise RunError(f"{built}: cannot be loaded ({error})") from None


def quick_library(source: Path, without: str) -> ctypes.CDLL | None:
    """What a file of C++ exports for this CPU alone; None where it cannot be had, which a warning tells: `without` says what that costs."""
    try:
        return library(source, vector=True)
    except RunError as error:
        warnings.warn(f"{without}: {error}", stacklevel=3)
        return None


def is_built(source: Path) -> bool:
    """Whether the cache has it, maybe for another torch; without torch."""
    return any(cache_folder().glob(f"{source.stem}-*.so"))


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def _cpu() -> str:
    """This CPU's instructions: a cache may lie in a home that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(source: Path, out: Path, torch: Path, flags: tuple[str, ...]) -> None:
    found = compiler()
    if found is None:
        raise RunError(NO_COMPILER)
    # Into its place in one move: several processes may begin at once.
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=out.parent, ignore_cleanup_errors=True) as folder:
            made = Path(folder) / out.name
            link = (f"-L{torch / 'lib'}", "-lc10", f"-Wl,-rpath,{torch / 'lib'}")
            command = [found, *_FLAGS, *flags, f"-I{torch / 'include'}", str(source), "-o", str(made), *link]
            done = subprocess.run(tethered(command), capture_output=True, text=True, check=False)
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
                raise RunError(f"{found} could not build {source.name}: {said}")
            made.replace(out)
    except OSError as error:
        raise RunError(f"{out.parent}: cannot be written ({error.strerror}); set PREHEAT_CACHE to a folder with room") from None
