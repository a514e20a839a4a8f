"""A sandbox that a process enters permanently before it runs untrusted code: Linux on x86-64 and ARM64.

seccomp    an allowlist of system calls: memory, time, reading files, and the given descriptors. No sockets, no new
           processes or threads, no signals to others, no changes on disk
Landlock   only files of Python and its libraries can be opened, for reading. If the kernel has no
           Landlock, seccomp rejects opening any file
also       no capabilities, no new privileges, no environment, a memory limit, first to be killed if memory runs out

The existence and size of files can still be seen. Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_DUMPABLE, PR_GET_SECCOMP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 21, 22, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every machine
LANDLOCK_VERSION, LANDLOCK_BENEATH = 1, 1
READ_FILE, READ_DIRECTORY = 1 << 2, 1 << 3
LANDLOCK_FILES = {1: 13, 2: 14, 3: 15, 5: 16}  # access rights known to each version of Landlock
CAPABILITY_VERSION = 0x20080522

# System call numbers on x86-64 and on ARM64; -1: not available.
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "lseek": (8, 62),
    "close": (3, 57), "dup": (32, 23), "fstat": (5, 80), "stat": (4, -1), "lstat": (6, -1), "newfstatat": (262, 79),
    "statx": (332, 291), "getdents64": (217, 61), "getcwd": (79, 17), "poll": (7, -1), "ppoll": (271, 73),
    "select": (23, -1), "pselect6": (270, 72), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214), "membarrier": (324, 283), "futex": (202, 98),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "setitimer": (38, 103), "alarm": (37, -1), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, -1),
    "times": (100, 153), "getrusage": (98, 165), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "getpid": (39, 172), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278),
    "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
OPENS = {"open": (2, -1), "openat": (257, 56)}  # restricted by Landlock
# Calls allowed for some values of their second argument. F_SETOWN would let a pipe send signals.
FCNTL, FCNTL_COMMANDS = (72, 25), (1, 2, 3, 1030)  # F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
IOCTL, IOCTL_COMMANDS = (16, 29), (0x5401, 0x5451)  # TCGETS, FIOCLEX
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the numbers, and the kernel's name
X32 = 0x40000000

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # of BPF
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x80000000
NUMBER_AT, MACHINE_AT, SECOND_ARGUMENT_AT = 0, 4, 24  # in struct seccomp_data


class NoSandbox(OSError):
    """This machine has no sandbox; the message has the reason."""


class Sandbox:
    """Created by a process that forks others, which from then on has no environment, can read only its libraries'
    files, and has `memory` bytes beyond what is loaded. Entered by each of these before it runs untrusted code: what
    can be done once for all of them is done here, because a process may enter for a single response."""

    def __init__(self, memory: int) -> None:
        if sys.platform != "linux" or platform.machine() not in MACHINES:
            raise NoSandbox(
                f"{sys.platform} on {platform.machine()} is not supported; expected Linux on x86-64 or ARM64"
            )
        self._libc = ctypes.CDLL(None, use_errno=True)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = {
            resource.RLIMIT_AS: pages * resource.getpagesize() + memory, resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
        }  # fmt: skip
        with suppress(OSError):  # read-only in some containers
            Path("/proc/self/oom_score_adj").write_text("1000")
        self._call("PR_SET_NO_NEW_PRIVS", self._libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        self._call("PR_SET_DUMPABLE", self._libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)  # no debugger, no core dump
        self._call("capset", self._libc.capset, struct.pack("<Ii", CAPABILITY_VERSION, 0), bytes(24))
        os.chdir("/")
        self._landlock = self._keep_to(_libraries())
        if self._libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
            raise NoSandbox("the kernel has no seccomp")
        program = _filter(opens=self._landlock)
        self._instructions = ctypes.create_string_buffer(program)
        self._program = struct.pack("@HP", len(program) // 8, ctypes.addressof(self._instructions))
        os.environ.clear()
        for what, most in limits.items():
            resource.setrlimit(what, (most, most))

    @property
    def mechanism(self) -> str:
        return "seccomp and Landlock" if self._landlock else "seccomp, without file access"

    def enter(self, keep: Iterable[int]) -> None:
        """Enter permanently. Descriptors other than `keep` and 0 to 2 are closed."""
        kept = sorted({2, *keep})
        for low, high in zip(kept, [*kept[1:], resource.getrlimit(resource.RLIMIT_NOFILE)[0]], strict=True):
            os.closerange(low + 1, high)
        self._call("seccomp", self._libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._program, 0, 0)

    def _keep_to(self, readable: Iterable[Path]) -> bool:
        """Restricts files by Landlock; returns False if the kernel has none."""
        version = self._libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION)
        if version < 1:
            return False
        rights = max(count for since, count in LANDLOCK_FILES.items() if since <= version)
        attributes = struct.pack("<Q", (1 << rights) - 1)
        rules = self._call(
            "Landlock", self._libc.syscall, LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0
        )
        for path in readable:
            with suppress(FileNotFoundError):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rule = struct.pack("<Qi", READ_FILE | READ_DIRECTORY, place)
                self._call("Landlock", self._libc.syscall, LANDLOCK_ADD, rules, LANDLOCK_BENEATH, rule, 0)
                os.close(place)
        self._call("Landlock", self._libc.syscall, LANDLOCK_RESTRICT, rules, 0)
        os.close(rules)
        return True

    def _call(self, name: str, function: Any, *arguments: Any) -> int:
        result: int = function(*arguments)
        if result < 0:
            raise NoSandbox(f"{name}: {os.strerror(ctypes.get_errno())}")
        return result


def _libraries() -> set[Path]:
    """The paths of lazily imported modules and of the shared libraries they need."""
    python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = Path(__file__).resolve().parent.parent
    return {ours, *map(Path, python), *map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"))}


def _filter(opens: bool) -> bytes:
    """A BPF program: the listed calls are allowed, others fail, those of another architecture end the process."""
    column, machine = MACHINES[platform.machine()]
    numbers = [pair[column] for pair in (ALLOWED | OPENS if opens else ALLOWED).values() if pair[column] >= 0]
    program = [
        _bpf(LOAD, MACHINE_AT), _bpf(EQUAL, machine, 1, 0), _bpf(RETURN, KILL), _bpf(LOAD, NUMBER_AT),
        _bpf(AT_LEAST, X32, 0, 1), _bpf(RETURN, KILL),
    ]  # fmt: skip
    for number in numbers:
        program += [_bpf(EQUAL, number, 0, 1), _bpf(RETURN, ALLOW)]
    for call, commands in ((FCNTL, FCNTL_COMMANDS), (IOCTL, IOCTL_COMMANDS)):
        checks = [step for command in commands for step in (_bpf(EQUAL, command, 0, 1), _bpf(RETURN, ALLOW))]
        block = [_bpf(LOAD, SECOND_ARGUMENT_AT), *checks, _bpf(RETURN, REFUSE)]
        program += [_bpf(EQUAL, call[column], 0, len(block)), *block]
    return b"".join([*program, _bpf(RETURN, REFUSE)])


def _bpf(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
