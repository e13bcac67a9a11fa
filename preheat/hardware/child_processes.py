"""Processes that this one starts on this host: they end when it ends, and meet where no other host reaches them. No torch.

torch's store unpickles what it is sent, so whoever reaches it runs code. Left to itself it listens on all interfaces
(torch 2.13), and gloo on the one that the host's name resolves to.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

__all__ = [
    "LOOPBACK",
    "all_here",
    "end_with_parent",
    "ended_by",
    "launched_store",
    "listen",
    "local_group",
    "local_store",
    "store_address",
    "tethered",
]

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1

# Runs before the command itself, in its process: the death signal outlives exec. The parent may be gone already.
_TETHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


def tethered(command: Sequence[str]) -> list[str]:
    """The command as one that Linux kills when the thread that starts it ends, by `kill -9` too; elsewhere as it is."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Ties this process, a fork of `parent` that has not become another program, to it in the same way."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def ended_by(code: int) -> str:
    """How a process ended, by its return code.

    Example:
        >>> ended_by(3), ended_by(-15)
        ('ended with exit code 3', 'was ended by SIGTERM')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (by the kernel for want of memory, perhaps)" if name == "SIGKILL" else "")


def local_group() -> dict[str, str]:
    """Environment of processes that all run on this host: gloo and NCCL use the loopback interface, whatever is set for several hosts."""
    name = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def all_here() -> bool:
    """Whether all processes that RANK and WORLD_SIZE number run on this host, by what their launcher set."""
    address, local = os.environ.get("MASTER_ADDR", ""), os.environ.get("LOCAL_WORLD_SIZE")
    if not local:
        return _is_loopback(address)
    return local == os.environ.get("WORLD_SIZE") and _is_here(address)


def store_address() -> str:
    """The address of the store of these processes: MASTER_ADDR, or the loopback interface if the first of them serves it to this host alone."""
    return LOOPBACK if _served_here() else os.environ.get("MASTER_ADDR", "")


def launched_store(timeout: float) -> Store:
    """torch's store of the processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name; on one host no other reaches it.

    Raises:
        OSError: the port is in use.
        ValueError: one of the variables is missing or no number.
        DistNetworkError, DistStoreError: of torch: the store was not reached in time, or cannot be served.
    """
    from datetime import timedelta

    from torch.distributed import rendezvous

    rank, port = (os.environ.get(key, "") for key in ("RANK", "MASTER_PORT"))
    if not (_served_here() and rank.isdecimal() and port.isdecimal()):
        return next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))[0]
    return local_store(int(port), listening=listen(int(port)).detach() if int(rank) == 0 else None, timeout=timeout)


def _served_here() -> bool:
    """Whether the first process serves the store, not an agent as torchrun has it, and only this host has to reach it."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return not agent and (_is_loopback(os.environ.get("MASTER_ADDR", "")) or all_here())


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_here(address: str) -> bool:
    """Whether a name or an address is one of this host's: only those can be bound."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(place)
    except (OSError, UnicodeError):
        return False
    return True


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback interface, on a free port where none is named: from now on nobody else gets that port.

    Raises:
        OSError: the port is in use.
    """
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        raise
    return listening


def local_store(port: int, *, listening: int | None = None, timeout: float = 300.0) -> TCPStore:
    """torch's store among processes of this host.

    Args:
        listening: descriptor of the socket of `listen`, which the process that serves the store takes over.
    """
    from datetime import timedelta

    from torch.distributed import TCPStore

    patience = timedelta(seconds=timeout)
    if listening is None:
        return TCPStore(LOOPBACK, port, None, False, patience)
    return TCPStore(LOOPBACK, port, None, True, patience, wait_for_workers=False, master_listen_fd=listening)
