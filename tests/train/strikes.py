"""SIGKILL and SIGSTOP for each kind of process of one run: the main training rank, another training rank, and each rank
of an engine. An engine is restarted while the run continues; a failed training rank ends the command, and --resume
continues.

The run's reward is tests/train/held.py, which pauses the run while a process is signalled, so that it cannot end first.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from plaudit.events import read_events
from tests.train.held import finished_steps, is_step

Command = subprocess.Popen[bytes]

HANG_SECONDS = 600.0  # longer than on the busiest machine
FREE = 1 << 30  # an unlimited number of steps
WORKER, ENGINE_RANK = "rollout worker, rank 0 of the engine", "rank 1 of the engine"
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
OF_ENGINE = [(process, number) for process in (WORKER, ENGINE_RANK) for number in SIGNALS]
OF_TRAINING = [(rank, number) for rank in (0, 1) for number in SIGNALS]


@dataclass
class Strikes:
    """`place` is a directory with the run in `run`; `words` is the command that trains it, with `environment`."""

    place: Path
    words: list[str]
    environment: dict[str, str]
    done: list[dict[str, Any]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.place / "run"

    def strike_all(self) -> list[dict[str, Any]]:
        """Sends one signal per step; the run finishes after the last."""
        step = 1
        with self._attempt(step) as child:
            for count, (process, number) in enumerate(OF_ENGINE, 1):
                self._held_after(step, child)
                started = time.monotonic()
                self._engine_process(child, process).send_signal(number)
                step += 1
                self._held_after(step, child)  # this step's samples come from the restarted process
                restarts = [event["values"]["rollout/restarts"] for event in read_events(self.run) if is_step(event)]
                assert restarts[-1] >= count, (process, number, restarts)
                self._note(process, number, step - 1, started)
            self._end_by(child, step, *OF_TRAINING[0])
        for strike in OF_TRAINING[1:]:
            step += 1
            with self._attempt(step, "--resume") as child:
                self._end_by(child, step, *strike)
        with self._attempt(FREE, "--resume") as child:
            assert child.wait(HANG_SECONDS) == 0, self._said()
        return self.done

    def _end_by(self, child: Command, step: int, rank: int, number: signal.Signals) -> None:
        self._held_after(step, child)
        children = psutil.Process(child.pid).children(recursive=True)
        started = time.monotonic()
        self._rank(child, rank).send_signal(number)
        assert child.wait(HANG_SECONDS) != 0
        self._note(f"rank {rank} of training", number, step, started)
        how = "ended by SIGKILL" if number == signal.SIGKILL else "stopped (SIGSTOP) for 10 s and was ended"
        assert f"rank {rank} was {how}; --resume continues from the last checkpoint" in self._said()
        self._allow(FREE)  # the rule's process can end, too
        _, alive = psutil.wait_procs(children, timeout=HANG_SECONDS)
        assert not alive, "they end with the command"

    def _note(self, process: str, number: signal.Signals, step: int, started: float) -> None:
        seconds = round(time.monotonic() - started, 1)
        self.done.append({"process": process, "signal": number.name, "after_step": step, "seconds": seconds})

    @contextmanager
    def _attempt(self, allowed: int, *more: str) -> Iterator[Command]:
        self._allow(allowed)
        environment = {**self.environment, "PLAUDIT_HELD": str(self.place)}
        with (self.place / "said").open("wb") as log:
            child = subprocess.Popen([*self.words, *more], env=environment, stderr=log)
        try:
            yield child
        finally:
            child.kill()
            child.wait()

    def _said(self) -> str:
        """The stderr of the last attempt."""
        return (self.place / "said").read_text()

    def _allow(self, steps: int) -> None:
        temporary = self.place / "allowed.new"
        temporary.write_text(str(steps))
        temporary.rename(self.place / "allowed")

    def _held_after(self, step: int, child: Command) -> None:
        """Allow `step` steps, and wait until the run pauses after them."""
        self._allow(step)
        self._until(lambda: finished_steps(self.run) >= step, child)
        (self.place / "waiting").unlink(missing_ok=True)
        self._until((self.place / "waiting").exists, child)

    def _until(self, condition: Callable[[], bool], child: Command) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            assert child.poll() is None, self._said()
            assert time.monotonic() < deadline, f"it hangs after {finished_steps(self.run)} steps"
            time.sleep(0.05)

    def _rank(self, child: Command, rank: int) -> psutil.Process:
        processes = psutil.Process(child.pid).children()
        (process_of_rank,) = [each for each in processes if each.environ().get("RANK") == str(rank)]
        return process_of_rank

    def _engine_process(self, child: Command, process: str) -> psutil.Process:
        """The only such process, once those it replaced have exited."""
        name = "plaudit-worker" if process == WORKER else "plaudit-rank"
        main = self._rank(child, 0)
        self._until(lambda: len(processes_named(main, name)) == 1, child)
        return processes_named(main, name)[0]


def processes_named(parent: psutil.Process, name: str) -> list[psutil.Process]:
    processes = []
    for each in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each.name() == name and each.status() != psutil.STATUS_ZOMBIE:
                processes.append(each)
    return processes
