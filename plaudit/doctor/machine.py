"""Checks of this machine that need no torch: versions, memory, disk, ports, clock."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from plaudit import __version__
from plaudit.doctor.finding import Finding, failed, ok, warning

PYTHONS = ((3, 11), (3, 12))
LEAST_MEMORY, LEAST_DISK = 2 * 2**30, 5 * 2**30
SERVE_PORT, TORCHRUN_PORT = 5555, 29500
CLOCK_SECONDS = 2.0  # between this machine and a file server: more confuses what is newer
BLOCK = os.urandom(2**20)


def versions() -> Iterator[Finding]:
    detail = f"plaudit {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] in PYTHONS:
        yield ok("versions", detail)
    else:
        named = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        yield failed("versions", detail, f"make an environment with Python {named}")
    if sys.platform != "linux":
        yield warning("versions", f"{platform.system()} is not Linux", "docs/platforms.md says what runs here")
    try:
        yield from _packages(metadata.requires("plaudit") or [])
    except metadata.PackageNotFoundError:
        yield warning("versions", "plaudit is used from its source and not installed", "pip install -e .")
        project = Path(__file__).parents[2] / "pyproject.toml"
        if project.is_file():
            yield from _packages(tomllib.loads(project.read_text())["project"]["dependencies"])


def _packages(texts: Sequence[str]) -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield failed("versions", "packages are not compared: packaging is not installed", "pip install packaging")
        return
    requirements = [Requirement(text) for text in texts]
    needed = [each for each in requirements if each.marker is None or "extra" not in str(each.marker)]
    installed = {each.name: _version(each.name) for each in needed}
    for each in needed:
        version = installed[each.name]
        if version is None:
            yield failed("versions", f"{each.name} is not installed", f"pip install '{each.name}{each.specifier}'")
        elif not each.specifier.contains(version, prereleases=True):
            wrong = f"{each.name} {version} is not {each.specifier}"
            yield failed("versions", wrong, f"pip install '{each.name}{each.specifier}'")
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in installed.items() if version))
    optional = sorted({each.name for each in requirements} - set(installed))
    there = [f"{name} {version}" for name in optional if (version := _version(name))]
    yield ok("versions", f"optional: {', '.join(there) or 'none'}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def memory() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free, why = _free_memory()
    detail = f"{cores} CPU core(s)" + ("" if free is None else f", {_size(free)} of memory free{why}")
    if free is not None and free < LEAST_MEMORY:
        yield warning("memory", detail, f"end other programs: the smallest recipes need {_size(LEAST_MEMORY)}")
    else:
        yield ok("memory", detail)


def _free_memory() -> tuple[int | None, str]:
    """Bytes that this process may still take: of the machine, or of its control group where that has fewer."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None, ""  # no Linux
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free, ""
    if limit == "max" or int(limit) - used >= free:
        return free, ""
    return int(limit) - used, f" (of the {_size(int(limit))} that this container may have)"


def disk() -> Iterator[Finding]:
    """Where runs, temporary files and weights in shared memory go: bytes written there come back."""
    named = {"this directory, for runs/": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if Path("/dev/shm").is_dir():
        named["shared memory"] = Path("/dev/shm")
    for what, directory in named.items():
        where = f"{what} ({_shown(directory)})"
        try:
            _write_and_read(directory)
        except OSError as error:
            cure = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else _elsewhere(what)
            yield failed("disk", f"{where}: {error.strerror or error}", cure)
            continue
        free = shutil.disk_usage(directory).free
        detail = f"{where}: written and read, {_size(free)} free"
        # Shared memory holds one copy of the weights, which is small for small models.
        if free < (LEAST_DISK if what != "shared memory" else 2**28):
            yield warning("disk", detail, "free some space: checkpoints and models are written there")
        else:
            yield ok("disk", detail)


def _write_and_read(directory: Path) -> None:
    with tempfile.NamedTemporaryFile(prefix=".plaudit-doctor-", dir=directory) as file:
        file.write(BLOCK)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        if file.read() != BLOCK:
            raise OSError(errno.EIO, "what was read is not what was written")


def _elsewhere(what: str) -> str:
    if what == "temporary files":
        return "set TMPDIR to a directory that can be written"
    if what == "shared memory":
        return 'set placement.channel = "disk" for rollouts in processes of their own'
    return "change to a directory that can be written, or give train --out"


def ports() -> Iterator[Finding]:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=10),
            server.accept()[0],
        ):
            yield ok("ports", "connections on 127.0.0.1 work")
    except OSError as error:
        yield failed("ports", f"no connection on 127.0.0.1: {error}", "look at the firewall and at `ip link show lo`")
    uses = ((SERVE_PORT, "plaudit serve --port takes another"), (TORCHRUN_PORT, "torchrun --master-port takes another"))
    for port, cure in uses:
        if _is_taken(port):
            yield warning("ports", f"port {port} is in use", cure)
        else:
            yield ok("ports", f"port {port} is free")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        cure = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface of `ip link`"
        yield warning("ports", f"this machine's name {name!r} has no address, and ranks are reached by it", cure)


def _is_taken(port: int) -> bool:
    try:
        # As servers bind: a port whose last connections linger is free.
        with socket.create_server(("127.0.0.1", port)):
            return False
    except OSError:
        return True


def clock() -> Iterator[Finding]:
    now = time.time()
    made = Path(__file__).stat().st_mtime
    if now + CLOCK_SECONDS < made:
        yield failed("clock", f"it is {_date(now)} here, before this file was made ({_date(made)})", "set the clock")
        return
    try:
        with tempfile.NamedTemporaryFile(prefix=".plaudit-doctor-", dir=Path.cwd()) as file:
            before = time.time()
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            written, after = Path(file.name).stat().st_mtime, time.time()
    except OSError:
        yield ok("clock", f"{_date(now)} (this directory cannot be written: not compared with its file server)")
        return
    # What a file server stamps lies between the two, if its clock goes with ours.
    off = max(before - written, written - after, 0.0)
    if off > CLOCK_SECONDS:
        yield warning(
            "clock", f"the file server of this directory is {off:.0f} s away", "synchronise both (chrony, NTP)"
        )
    else:
        yield ok("clock", f"{_date(now)}, and files of this directory agree")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _shown(directory: Path) -> str:
    """Without the user's name: reports are shown to others."""
    home = Path.home()
    return f"~/{directory.relative_to(home)}" if directory.is_relative_to(home) else str(directory)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
