"""Runs one Python program without access to the network, to other processes and to files: the process of `sandbox`.

    python -I -S sandbox_process.py REPORT PROGRAM SETTINGS

Standalone: it imports nothing of preheat, and is started once per program. It enters new user, mount, process, network,
IPC and host name namespaces, makes all file systems read-only without devices, hides those with other processes' state,
and drops its capabilities. Then it limits resources and system calls, and becomes the program. The file descriptor
REPORT receives a line if any of this fails; the program does not run then.

Sources: unshare(2), mount_setattr(2), seccomp(2), capabilities(7), setrlimit(2).
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

# unshare(2)
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
# mount(2), mount_setattr(2)
_MS_READ_ONLY, _MS_NOSUID, _MS_NODEV, _MS_RECURSIVE, _MS_PRIVATE = 1, 2, 4, 16384, 1 << 18
_ATTRIBUTES = 0x1 | 0x2 | 0x4  # read-only, no set-user-ID programs, no devices
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
# prctl(2)
_SET_PARENT_DEATH_SIGNAL, _SET_NO_NEW_PRIVILEGES, _DROP_BOUNDING, _SET_SECCOMP, _AMBIENT = 1, 38, 24, 22, 47
_CAPABILITY_VERSION = 0x20080522

HIDDEN = ("/proc", "/sys", "/run", "/dev/shm")
"""Folders of other processes' state and shared memory, over which an empty file system is mounted."""

# Numbers of system calls by machine: processes, sockets, namespaces, mounts, and others that reach around the limits.
_CALLS = {
    "x86_64": {
        "architecture": 0xC000003E,
        "clone": 56,
        "clone3": 435,
        "denied": (
            *(57, 58),  # fork, vfork
            *(41, 42, 43, 49, 50, 53, 288),  # socket, connect, accept, bind, listen, socketpair, accept4
            *(101, 310, 311, 434, 438),  # ptrace, process_vm_readv, process_vm_writev, pidfd_open, pidfd_getfd
            *(155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),  # mounts, roots, namespaces
            *(248, 249, 250, 298, 304, 321, 323, 425, 426, 427),  # keys, perf, file handles, bpf, userfaultfd, io_uring
            *(175, 176, 246, 313, 320),  # kernel modules, kexec
            # shmget, semget, msgget, memfd_create, memfd_secret: memory beside the address space
            *(29, 64, 68, 319, 447),
        ),
    },
    "aarch64": {
        "architecture": 0xC00000B7,
        "clone": 220,
        "clone3": 435,
        "denied": (
            *(198, 203, 202, 200, 201, 199, 242),
            *(117, 270, 271, 434, 438),
            *(41, 51, 40, 39, 97, 268, 428, 429, 430, 431, 432, 433, 442),
            *(217, 218, 219, 241, 265, 280, 282, 425, 426, 427),
            *(105, 106, 104, 273, 294),
            *(194, 190, 186, 279, 447),
        ),
    },
}
_THREAD = 0x00010000
"""CLONE_THREAD: clone(2) with it starts a thread of the process, and without it a process."""


class _SetupError(Exception):
    pass


def _check(result: int, what: str) -> None:
    if result != 0:
        raise _SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _enter_namespaces(libc: ctypes.CDLL) -> None:
    user, group = os.geteuid(), os.getegid()
    flags = _NEW_USER | _NEW_MOUNTS | _NEW_PID | _NEW_NETWORK | _NEW_IPC | _NEW_UTS
    _check(libc.unshare(flags), "user namespaces are not allowed")
    # The only user of the namespace; groups may be set by nobody in it.
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {user} 1")
    _write("/proc/self/gid_map", f"0 {group} 1")


def _restrict_files(libc: ctypes.CDLL, program: str, size: int) -> None:
    """Makes all files read-only, except for an empty folder in memory: that of the program, which is copied into it."""
    with open(program, "rb") as file:
        source = file.read()
    folder = os.path.dirname(program)
    if any(folder.startswith(f"{hidden}/") for hidden in HIDDEN):
        raise _SetupError(f"the temporary folder {folder} is hidden from programs; set TMPDIR to another one")
    _check(libc.mount(None, b"/", None, _MS_RECURSIVE | _MS_PRIVATE, None), "mounts cannot be made private")
    # struct mount_attr: set, clear, propagation, namespace.
    attributes = struct.pack("QQQQ", _ATTRIBUTES, 0, 0, 0)
    result = libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    _check(result, "file systems cannot be made read-only (Linux 5.12 or newer)")
    flags = _MS_NOSUID | _MS_NODEV
    options = f"size={size},nr_inodes=1024,mode=700".encode()
    _check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options), f"{folder} cannot be hidden")
    for path in filter(os.path.isdir, HIDDEN):
        # Read-only: the program owns the mount, and could make its folder writable.
        hidden = libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags | _MS_READ_ONLY, b"mode=555")
        _check(hidden, f"{path} cannot be hidden")
    with open(program, "wb") as file:
        file.write(source)
    os.chdir(folder)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    # The bounding set, so that starting the program as the namespace's root gives none back.
    capability = 0
    while libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0) == 0:
        capability += 1
    if ctypes.get_errno() != errno.EINVAL:  # raised beyond the last capability
        raise _SetupError(f"capabilities cannot be dropped: {os.strerror(ctypes.get_errno())}")
    libc.prctl(_AMBIENT, 4, 0, 0, 0)
    header, data = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _check(libc.capset(header, data), "capabilities cannot be dropped")
    _check(libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "privileges cannot be given up")


def _build_filter(calls: dict) -> bytes:
    """Returns a seccomp filter: classic BPF over struct seccomp_data."""
    load, jump_if_equal, jump_if_above, jump_if_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000

    def fail(number: int) -> int:
        return 0x00050000 | number

    def code(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", operation, if_true, if_false, value)

    program = [
        code(load, 4),  # the architecture: numbers of another one would pass the tests below
        code(jump_if_equal, calls["architecture"], 1, 0),
        code(give, kill),
        code(load, 0),  # the number of the call
        code(jump_if_above, 0x40000000, 0, 1),  # x86-64's x32 calls have numbers of their own
        code(give, kill),
        # glibc falls back to clone, whose flags a filter can read.
        code(jump_if_equal, calls["clone3"], 0, 1),
        code(give, fail(errno.ENOSYS)),
        code(jump_if_equal, calls["clone"], 0, 4),
        code(load, 16),  # the lower half of its first argument
        code(jump_if_set, _THREAD, 0, 1),
        code(give, allow),
        code(give, fail(errno.EPERM)),
    ]
    for number in calls["denied"]:
        program += [code(jump_if_equal, number, 0, 1), code(give, fail(errno.EPERM))]
    return b"".join([*program, code(give, allow)])


def _restrict_calls(libc: ctypes.CDLL) -> None:
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise _SetupError(f"system calls of {platform.machine()} are not known")
    instructions = ctypes.create_string_buffer(program := _build_filter(calls), len(program))
    # struct sock_fprog: number of instructions, pointer.
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    _check(
        libc.prctl(_SET_SECCOMP, 2, ctypes.create_string_buffer(header, len(header)), 0, 0), "seccomp is not allowed"
    )


def _limit_resources(limits: dict) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_size"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
    ):
        # A user may have set a lower one, which cannot be raised.
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _become_program(libc: ctypes.CDLL, program: str, limits: dict) -> None:
    _limit_resources(limits)
    _drop_capabilities(libc)
    _restrict_calls(libc)
    # The only variables: secrets are in the environment.
    folder = os.path.dirname(program)
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-B", program], environment)


def _run(libc: ctypes.CDLL, program: str, limits: dict) -> int:
    """Runs the program in new namespaces and returns its wait status."""
    _enter_namespaces(libc)
    # The first process of the new process namespace: if it ends, the kernel ends all others.
    first = os.fork()
    if first:
        return os.waitpid(first, 0)[1]
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    _restrict_files(libc, program, limits["folder_size"])
    child = os.fork()
    if child == 0:
        _become_program(libc, program, limits)
    status = os.waitpid(child, 0)[1]
    # A signal as its number above 128, as shells do.
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def main() -> None:
    report, program, settings = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    os.set_inheritable(report, False)  # closed by the exec, so that the program cannot write to it
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        status = _run(libc, program, settings)
    except (_SetupError, OSError, ValueError) as error:
        os.write(report, f"{error}\n".encode())
        os._exit(1)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


if __name__ == "__main__":
    main()
