"""Runs the checks, each in separate processes with a deadline, and reports their findings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from plaudit.doctor.finding import Finding, failed
from plaudit.errors import ConfigError, nearest

CHECKS = ("versions", "memory", "disk", "ports", "clock", "devices", "ranks")
STORE, SECONDS, LOCAL = "PLAUDIT_DOCTOR_STORE", "PLAUDIT_DOCTOR_SECONDS", "PLAUDIT_DOCTOR_FINDINGS"
KILLED_SECONDS = 5.0  # a process that waits for a dead disk does not exit even when killed


@dataclass
class Probe:
    """A running check process, and the files with its output.

    lines, why   its complete output lines when it ended or was killed, and the reason in a few words
    """

    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    late: bool = False
    lines: tuple[bytes, ...] = ()
    why: str = ""

    @classmethod
    def start(cls, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Probe:
        stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the probe)
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            env={**os.environ, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
        return cls(process, stdout, stderr)

    def close(self) -> None:
        with self.stdout, self.stderr:
            self.stdout.seek(0)
            self.lines = tuple(line for line in self.stdout.read().splitlines(keepends=True) if line.endswith(b"\n"))
            self.stderr.seek(0)
            words = self.stderr.read().decode(errors="replace").strip().splitlines()
        self.why = words[-1] if words else f"ended with code {self.process.returncode}"


def finish(probes: Sequence[Probe], seconds: float) -> None:
    """Wait until all have exited; those still running at the deadline are killed and marked."""
    deadline = time.monotonic() + seconds
    for probe in probes:
        try:
            probe.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            probe.late = True
    for probe in probes:
        if probe.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(probe.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                probe.process.wait(KILLED_SECONDS)
        probe.close()


def examine(names: Sequence[str], seconds: float) -> Iterator[Finding]:
    """The findings of these checks (all by default), in order, as they arrive."""
    for name in names:
        if name not in CHECKS:
            raise ConfigError(f"unknown check {name!r}; {nearest(name, CHECKS)}")
    chosen = [name for name in CHECKS if not names or name in names]
    if os.environ.get("LOCAL_RANK", "0") != "0":
        chosen = [name for name in chosen if name == "ranks"]  # torchrun's first rank of a machine checks the machine
    local: list[Finding] = []
    for finding in _local([name for name in chosen if name != "ranks"], seconds):
        local.append(finding)
        yield finding
    if "ranks" in chosen:
        yield from _ranks(seconds, local)


def _local(names: Sequence[str], seconds: float) -> Iterator[Finding]:
    quick = {name: Probe.start("plaudit.doctor.probe", name) for name in names if name != "devices"}
    finish(list(quick.values()), seconds)
    for name, probe in quick.items():
        yield from _results(name, probe, seconds)
    if "devices" in names:  # torch takes seconds to import: the other findings are reported before
        probe = Probe.start("plaudit.doctor.probe", "devices")
        finish([probe], seconds)
        yield from _results("devices", probe, seconds)


def _results(name: str, probe: Probe, seconds: float) -> Iterator[Finding]:
    yield from (Finding.of(line) for line in probe.lines)
    if probe.late:
        yield failed(name, f"no answer within {seconds:g} s", "check what hangs there, or raise --timeout")
    elif probe.process.returncode:
        yield failed(name, f"the check itself failed: {probe.why}", "report this with `plaudit doctor --json`")


def _ranks(seconds: float, local: Sequence[Finding]) -> Iterator[Finding]:
    """Checks torchrun's ranks, of which this process is one; otherwise one rank per GPU, at least two."""
    settings = {SECONDS: str(seconds), LOCAL: json.dumps([asdict(each) for each in local])}
    with tempfile.TemporaryDirectory(prefix="plaudit-doctor-") as scratch:
        if "RANK" in os.environ:
            probes = {os.environ["RANK"]: Probe.start("plaudit.doctor.rank", environment=settings)}
        else:
            world = max(2, _gpus())
            place = {**settings, STORE: str(Path(scratch) / "store"), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
            probes = {
                rank: Probe.start("plaudit.doctor.rank", environment={**place, "RANK": rank, "LOCAL_RANK": rank})
                for rank in map(str, range(world))
            }  # fmt: skip
        finish(list(probes.values()), seconds)
    for rank, probe in probes.items():
        lines = [json.loads(line) for line in probe.lines]
        yield from (Finding(**finding) for each in lines for finding in each.get("findings", ()))
        stages = [each["stage"] for each in lines]
        done = stages[-1:] == ["done"]
        if probe.late and not done:
            cure = "check the machines' network (firewall, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or raise --timeout"
            yield failed("ranks", f"rank {rank} did not finish within {seconds:g} s: {_at(stages)}", cure)
        elif probe.process.returncode and not done:
            yield failed(
                "ranks", f"rank {rank} failed ({_at(stages)}): {probe.why}", "see the findings of the other ranks"
            )


def _at(stages: Sequence[str]) -> str:
    return f"its last stage was {stages[-1]!r}" if stages else "it did not start"


def _gpus() -> int:
    """The number of GPUs available to ranks, without torch: from the driver and CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return there if visible is None else min(there, len([each for each in visible.split(",") if each]))
