"""Builds our C++ libraries: compiled once per torch version, cached, and loaded with ctypes."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

from preheat.cache_folder import cache_folder, create_own_folder, is_private
from preheat.errors import RunError
from preheat.hardware.child_processes import describe_exit, tie_to_parent

__all__ = [
    "NO_COMPILER",
    "compile_probe",
    "find_compiler",
    "is_built",
    "load_library",
    "load_native_library",
    "describe_missing_compiler",
    "read_cpu_flags",
]

NO_COMPILER = "no C++ compiler was found; install g++, or name one in CXX"
_log = logging.getLogger(__name__)
_FLAGS = ("-std=c++20", "-fPIC", "-shared")
# Without the last flag GCC 12 does not vectorize a choice between two results for AVX2.
_VECTOR = ("-O3", "-march=native", "-fopenmp", "-fno-trapping-math")


@functools.cache
def load_library(source: Path, *, vector: bool = False) -> ctypes.CDLL:
    """Loads the library of a C++ file, and builds it if it is not cached.

    Args:
        source: source file; it may include torch's headers and call c10.
        vector: optimize for this CPU's instructions, with OpenMP (torch's own runtime, so that both share threads).

    Raises:
        RunError: there is no compiler, it fails, or the cache is not writable.
    """
    import torch

    # The library links to c10 of this torch by path, so two installations of one version have separate files.
    home = Path(torch.__file__).parent
    # -march=native code crashes on other CPUs, and machines may share a home directory, so the key has the instruction
    # set.
    about = f"{torch.__version__} {home} {read_cpu_flags() if vector else platform.machine()}"
    flags: tuple[str, ...] = _VECTOR if vector else ("-O2",)
    # torch can be limited to AVX2 (ATEN_CPU_CAPABILITY), and our kernels then keep to it as well.
    if vector and "avx512f" in about and torch.backends.cpu.get_cpu_capability() == "AVX2":
        flags = (*flags, "-mno-avx512f")
        about += " without AVX512"
    key = hashlib.sha256(source.read_bytes() + about.encode()).hexdigest()
    built = _create_library_folder() / f"{source.stem}-{key[:16]}.so"
    if (reason := _reject_reason(built, key)) is not None:
        if built.exists() or built.is_symlink():
            _log.warning("%s: is not loaded (%s); it is built again", built, reason)
        _build(source, built, home, flags, key)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise RunError(f"{built}: cannot be loaded ({error})") from None


def _create_library_folder() -> Path:
    """Returns the folder of the libraries, which only this user can write to, because its files are executed.

    Raises:
        RunError: the folder cannot be created.
    """
    folder = cache_folder() / "native"
    try:
        if create_own_folder(folder):
            return folder
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be used ({error.strerror}); set PREHEAT_CACHE to a folder of your own"
        ) from None
    return _create_private_folder(folder)


@functools.cache
def _create_private_folder(other: Path) -> Path:
    """Creates a private temporary folder, used if others can write to the cache."""
    folder = Path(tempfile.mkdtemp(prefix="preheat-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _log.warning(
        "%s: others can write there, so nothing in it is loaded; set PREHEAT_CACHE to a folder of your own", other
    )
    return folder


def _compute_seal(key: str, binary: bytes) -> str:
    return hashlib.sha256(key.encode() + binary).hexdigest()


def _reject_reason(built: Path, key: str) -> str | None:
    """Returns why a cached library must not be loaded; None if it was built here from this source."""
    try:
        facts = built.lstat()
        if not stat.S_ISREG(facts.st_mode):
            return "is not a regular file"
        # Check the permissions before reading: a user who can write the library can also write a matching hash.
        if not is_private(facts):
            return "others can write to it"
        # The seal also detects a file that a full disk or a crash truncated.
        sealed = built.with_suffix(".sha256").read_text(encoding="utf-8", errors="replace").strip()
        return None if sealed == _compute_seal(key, built.read_bytes()) else "differs from what was built"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def load_native_library(source: Path, without: str) -> ctypes.CDLL | None:
    """Loads a library optimized for this CPU; if that fails, warns of the cost (`without`) and returns None."""
    try:
        return load_library(source, vector=True)
    except RunError as error:
        # The warning names the caller of the function that needs the library.
        warnings.warn(f"{without}: {error}", stacklevel=3)
        return None


def is_built(source: Path) -> bool:
    """True if the cache has the library, possibly for another torch version; does not import torch."""
    return any((cache_folder() / "native").glob(f"{source.stem}-*.so"))


def find_compiler() -> str | None:
    return _locate_compiler(os.environ.get("CXX") or "c++", os.environ.get("PATH"))


@functools.cache  # kernels ask in every call; `path` is a key only
def _locate_compiler(name: str, path: str | None) -> str | None:
    return next((cxx for n in (name, "g++", "clang++") if (cxx := shutil.which(n))), None)


def read_cpu_flags() -> str:
    """Returns the instruction set of this CPU, as the system writes it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(source: Path, out: Path, torch: Path, flags: tuple[str, ...], key: str) -> None:
    cxx = find_compiler()
    if cxx is None:
        raise RunError(NO_COMPILER)
    # Build in a temporary folder and move atomically, because several processes may build at once.
    try:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=out.parent, ignore_cleanup_errors=True) as folder:
            binary = Path(folder) / out.name
            # The rpath finds c10 without LD_LIBRARY_PATH.
            link = (f"-L{torch / 'lib'}", "-lc10", f"-Wl,-rpath,{torch / 'lib'}")
            command = [cxx, *_FLAGS, *flags, f"-I{torch / 'include'}", str(source), "-o", str(binary), *link]
            done = subprocess.run(tie_to_parent(command), capture_output=True, text=True, check=False)
            if done.returncode:
                raise RunError(f"{cxx} could not build {source.name}: {_find_compiler_error(done.stderr)}")
            # Owner only, whatever the umask is, or `_is_private` would reject it.
            binary.chmod(0o700)
            sealed = binary.with_suffix(".sha256")
            sealed.write_text(_compute_seal(key, binary.read_bytes()) + "\n", encoding="utf-8")
            # The seal first: a process that starts in between finds no library and builds it, without a warning.
            sealed.replace(out.with_suffix(".sha256"))
            binary.replace(out)
    except OSError as error:
        raise RunError(
            f"{out.parent}: cannot be written ({error.strerror}); set PREHEAT_CACHE to a folder with room"
        ) from None


def compile_probe(compiler: str) -> str:
    """Compiles a small program with the options of our kernels; returns why that failed, "" if it did not.

    Raises:
        OSError: there is no temporary folder that can be written.
    """
    with tempfile.TemporaryDirectory(prefix="preheat-") as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n", encoding="utf-8")
        command = [compiler, *_FLAGS, *_VECTOR, str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(tie_to_parent(command), capture_output=True, text=True, errors="replace", check=False)
        return _find_compiler_error(done.stderr) or describe_exit(done.returncode) if done.returncode else ""


def _find_compiler_error(output: str) -> str:
    return next((line for line in output.splitlines() if "error" in line), output.strip())


def describe_missing_compiler(kind: str) -> str:
    """Returns what torch.compile lacks for a kind of device and how to install it; "" if nothing."""
    # Inductor generates Triton kernels for CUDA and C++ for CPUs.
    if kind == "cuda":
        return (
            ""
            if importlib.util.find_spec("triton") is not None
            else "needs Triton on a CUDA device; pip install triton"
        )
    name = os.environ.get("CXX", "g++")
    return (
        ""
        if shutil.which(name) is not None
        else f"needs a C++ compiler on a CPU and found no '{name}'; install g++, or set CXX"
    )
