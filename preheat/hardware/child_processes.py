"""Child processes on this host, which end with their parent and rendezvous on the loopback interface. No torch import.

torch's store unpickles messages, so anybody who can connect to it can run code. By default it listens on all interfaces
(torch 2.13), and gloo on the interface that the host's name resolves to.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

__all__ = [
    "LOOPBACK",
    "catches_signal",
    "is_single_host",
    "end_with_parent",
    "describe_exit",
    "last_error_line",
    "connect_launched_store",
    "listen",
    "local_group",
    "create_local_store",
    "store_address",
    "tie_to_parent",
]

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1

# Runs in the child before exec, which preserves the death signal. The parent may have ended before prctl ran.
# prctl(1, 9) is prctl(PR_SET_PDEATHSIG, SIGKILL).
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


def tie_to_parent(command: Sequence[str]) -> list[str]:
    """Wraps a command so that Linux kills it when the starting thread ends, even by `kill -9`; unchanged elsewhere."""
    if sys.platform != "linux":
        return list(command)
    # -I and -S skip the user's paths and site-packages, so the wrapper starts fast and runs nothing else.
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Makes Linux kill this process, a fork of `parent`, when the parent ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the call, and then no signal comes.
        if os.getppid() != parent:
            os._exit(1)


def catches_signal(pid: int, number: signal.Signals) -> bool | None:
    """Returns True if a process has a handler for a signal, whose default action could end it; None: unknown."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), None)
    except OSError:  # not Linux, or the process has ended
        return None
    return None if caught is None else bool(int(caught, 16) >> (number - 1) & 1)


def describe_exit(code: int) -> str:
    """Describes how a process ended, from its return code.

    Example:
        >>> describe_exit(3), describe_exit(-15)
        ('ended with exit code 3', 'was ended by SIGTERM')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (perhaps by the kernel, out of memory)" if name == "SIGKILL" else "")


def last_error_line(errors: IO[str]) -> str:
    """Returns the last line of a file that holds a process's standard error, or '' without one."""
    errors.seek(0)
    return next((line.strip() for line in reversed(errors.read().splitlines()) if line.strip()), "")


def local_group() -> dict[str, str]:
    """Returns the environment that makes gloo and NCCL use the loopback interface, for processes on one host."""
    name = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def is_single_host() -> bool:
    """True if all ranks run on this host, according to the launcher's environment variables."""
    # Without torchrun's LOCAL_WORLD_SIZE, only a loopback address proves that all ranks are here.
    address, local = os.environ.get("MASTER_ADDR", ""), os.environ.get("LOCAL_WORLD_SIZE")
    if not local:
        return _is_loopback(address)
    return local == os.environ.get("WORLD_SIZE") and _is_here(address)


def store_address() -> str:
    """Returns the address of the store: MASTER_ADDR, or the loopback interface if rank 0 serves this host only."""
    return LOOPBACK if _is_served_here() else os.environ.get("MASTER_ADDR", "")


def connect_launched_store(timeout: float) -> Store:
    """Connects to the store of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, on one host by the loopback interface.

    Raises:
        OSError: the port is in use.
        ValueError: one of the variables is missing or not a number.
        DistNetworkError, DistStoreError: the store was not reached in time, or cannot be served (from torch).
    """
    from datetime import timedelta

    from torch.distributed import rendezvous

    rank, port = (os.environ.get(key, "") for key in ("RANK", "MASTER_PORT"))
    # torch's own rendezvous also reports missing and malformed variables.
    if not (_is_served_here() and rank.isdecimal() and port.isdecimal()):
        return next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))[0]
    # Detached, because the store owns the descriptor and closes it.
    return create_local_store(
        int(port), listening=listen(int(port)).detach() if int(rank) == 0 else None, timeout=timeout
    )


def _is_served_here() -> bool:
    """True if rank 0 serves the store (not torchrun's agent), and only this host needs to reach it."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return not agent and (_is_loopback(os.environ.get("MASTER_ADDR", "")) or is_single_host())


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_here(address: str) -> bool:
    """True if a name or address belongs to this host: only those can be bound."""
    try:
        # Port 0 is any free port: only the address is tested.
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(place)
    except (OSError, UnicodeError):
        return False
    return True


def listen(port: int = 0) -> socket.socket:
    """Opens a socket that listens on the loopback interface, which reserves the port; 0 picks a free one.

    Raises:
        OSError: the port is in use.
    """
    listening = socket.socket()
    try:
        # Allows the port of a run that has just ended, whose connections are in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        raise
    return listening


def create_local_store(port: int, *, listening: int | None = None, timeout: float = 300.0) -> TCPStore:
    """Creates the store of the processes of this host.

    Args:
        listening: file descriptor of the socket of `listen`, passed by the process that serves the store.
    """
    from datetime import timedelta

    from torch.distributed import TCPStore

    patience = timedelta(seconds=timeout)
    if listening is None:
        # No number of workers is given, so that the store does not wait for all of them to connect.
        return TCPStore(LOOPBACK, port, None, False, patience)
    return TCPStore(LOOPBACK, port, None, True, patience, wait_for_workers=False, master_listen_fd=listening)
