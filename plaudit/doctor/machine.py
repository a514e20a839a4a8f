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
CLOCK_SECONDS = 2.0  # between this machine and a file server: a larger difference breaks comparisons of file times
BLOCK = os.urandom(2**20)


def versions() -> Iterator[Finding]:
    detail = f"plaudit {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] in PYTHONS:
        yield ok("versions", detail)
    else:
        named = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        yield failed("versions", detail, f"create an environment with Python {named}")
    if sys.platform != "linux":
        yield warning("versions", f"{platform.system()} is not Linux", "docs/platforms.md lists what runs here")
    try:
        yield from _packages(metadata.requires("plaudit") or [])
    except metadata.PackageNotFoundError:
        yield warning("versions", "plaudit is run from its source without being installed", "pip install -e .")
        project = Path(__file__).parents[2] / "pyproject.toml"
        if project.is_file():
            yield from _packages(tomllib.loads(project.read_text())["project"]["dependencies"])


def _packages(texts: Sequence[str]) -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield failed(
            "versions", "package versions cannot be checked: packaging is not installed", "pip install packaging"
        )
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
        yield warning("memory", detail, f"close other programs: the smallest recipes need {_size(LEAST_MEMORY)}")
    else:
        yield ok("memory", detail)


def _free_memory() -> tuple[int | None, str]:
    """Bytes of memory available to this process: of the machine, or of its control group if that has fewer."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None, ""  # not Linux
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free, ""
    if limit == "max" or int(limit) - used >= free:
        return free, ""
    return int(limit) - used, f" (of the {_size(int(limit))} that this container may use)"


def disk() -> Iterator[Finding]:
    """Checks the directories of runs, temporary files and shared memory: bytes written there can be read back."""
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
        # Shared memory has one copy of the weights, which is small for small models.
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
            raise OSError(errno.EIO, "the data read differs from the data written")


def _elsewhere(what: str) -> str:
    if what == "temporary files":
        return "set TMPDIR to a writable directory"
    if what == "shared memory":
        return 'set placement.channel = "disk" for rollouts in separate processes'
    return "change to a writable directory, or set train --out"


def ports() -> Iterator[Finding]:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=10),
            server.accept()[0],
        ):
            yield ok("ports", "connections on 127.0.0.1 work")
    except OSError as error:
        yield failed("ports", f"no connection on 127.0.0.1: {error}", "check the firewall and `ip link show lo`")
    uses = (
        (SERVE_PORT, "set another with plaudit serve --port"),
        (TORCHRUN_PORT, "set another with torchrun --master-port"),
    )
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
        yield warning("ports", f"this machine's name {name!r} has no address, but ranks connect to it", cure)


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
        yield failed(
            "clock", f"the clock shows {_date(now)}, before this file was created ({_date(made)})", "set the clock"
        )
        return
    try:
        with tempfile.NamedTemporaryFile(prefix=".plaudit-doctor-", dir=Path.cwd()) as file:
            before = time.time()
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            written, after = Path(file.name).stat().st_mtime, time.time()
    except OSError:
        yield ok("clock", f"{_date(now)} (not compared with the file server: this directory is not writable)")
        return
    # A file server's timestamp lies between the two if the clocks agree.
    off = max(before - written, written - after, 0.0)
    if off > CLOCK_SECONDS:
        yield warning(
            "clock",
            f"the clock of this directory's file server differs by {off:.0f} s",
            "synchronise both (chrony, NTP)",
        )
    else:
        yield ok("clock", f"{_date(now)}, and files of this directory agree")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _shown(directory: Path) -> str:
    """The path without the user's name, because reports are shared."""
    home = Path.home()
    return f"~/{directory.relative_to(home)}" if directory.is_relative_to(home) else str(directory)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
