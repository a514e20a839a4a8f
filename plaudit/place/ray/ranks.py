"""The driver of a run on Ray: `python -m plaudit.place.ray.ranks RECIPE plaudit's arguments`.

It creates the run's processes, and one actor per rank runs `plaudit train` with the environment of a rank. Every rank
connects back; its output is sent over this connection, and stop requests go to it. Exit code: 0, or 2 after an error
that a retry would hit again, or 75 if a rank was lost. Started by launch.py, which resumes a lost run.
"""

from __future__ import annotations

import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.config import RlRecipe, parse_recipe
from plaudit.errors import ConfigError, PlauditError, RankLost, one_line
from plaudit.place.ray.cluster import connected, in_bundle, place
from plaudit.place.workers.callback import CallbackListener, dial
from plaudit.process.guard import STOPPED, Guard, children

START_SECONDS = 120.0
CONNECT_SECONDS = 60.0
END_SECONDS = 10.0  # for Ray to report how a process ended that closed its connection
PATIENCE = 3.0  # in which the cause of a loss appears, if it is another rank's end
SHOWN = 4000  # bytes of another rank's last output
FAILED = 2
LOST = RankLost.exit_code


class RankActor:
    def address(self) -> tuple[str, int]:
        """Where the ranks connect, if this is the first of them."""
        from ray.util import get_node_ip_address

        with socket.socket() as probe:
            probe.bind(("", 0))
            return get_node_ip_address(), probe.getsockname()[1]

    def run(
        self, address: tuple[str, int], token: bytes, environment: dict[str, str], directory: str, arguments: list[str]
    ) -> int:
        """The command's exit code."""
        os.environ.update(environment)
        sock = dial(address, token)
        over = threading.Event()
        threading.Thread(target=_handle_stops, args=(sock, over), daemon=True).start()
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        for stream in (1, 2):
            os.dup2(sock.fileno(), stream)
        try:
            return _command(directory, arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            over.set()
            for stream, before in zip((1, 2), kept, strict=True):
                os.dup2(before, stream)
            sock.shutdown(socket.SHUT_RDWR)


def _command(directory: str, arguments: list[str]) -> int:
    try:
        os.chdir(directory)
    except OSError as error:
        print(f"plaudit: {directory} is not on this node ({error.strerror}): the nodes must share it", file=sys.stderr)
        return FAILED
    sys.argv = ["plaudit", *arguments]
    try:
        runpy.run_module("plaudit", run_name="__main__")  # as `python -m plaudit`
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _handle_stops(sock: socket.socket, over: threading.Event) -> None:
    """Each byte is a stop request. Without the driver the rank exits."""
    with suppress(OSError):
        while sock.recv(1):
            os.kill(os.getpid(), signal.SIGTERM)
    if not over.is_set():
        os._exit(LOST)


@dataclass(eq=False)
class Rank:
    number: int
    sock: socket.socket
    actor: Any
    result: Any
    words: bytes = b""
    code: int | None = None
    """LOST also for one that has died."""
    ended: bool = False
    died: bool = False


def drive(recipe: RlRecipe, arguments: Sequence[str]) -> int:
    where = recipe.resources.ray
    assert where is not None
    with connected(where) as ray:
        group = place(ray, recipe)
        ranks = _start(ray, group, recipe.resources.ranks, arguments)
        _forward_stops(ranks)
        _wait(ray, ranks)
        code = _exit_code(ranks)
        sys.stdout.flush()
        sys.stderr.flush()
        if code == LOST:
            os._exit(code)  # Ray may be what was lost, and would block; its processes end with this one
        # However Ray ends, the run is over.
        watch = threading.Timer(30.0, os._exit, (code,))
        watch.daemon = True
        watch.start()
    return code


def _start(ray: Any, group: Any, count: int, arguments: Sequence[str]) -> list[Rank]:
    try:
        actors = [ray.remote(RankActor).options(**in_bundle(group, i)).remote() for i in range(count)]
        host, port = ray.get(actors[0].address.remote(), timeout=START_SECONDS)
        ranks = []
        for number, actor in enumerate(actors):
            # Ray shows a process its own GPU alone, as number 0.
            environment = {
                "RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
            }  # fmt: skip
            listener = CallbackListener(ray.util.get_node_ip_address())
            result = actor.run.remote(listener.address, listener.token, environment, str(Path.cwd()), list(arguments))
            sock = listener.admit(f"rank {number}", START_SECONDS if number else CONNECT_SECONDS)
            ranks.append(Rank(number, sock, actor, result))
        return ranks
    except (ray.exceptions.RayError, PlauditError) as error:
        raise RankLost(f"Ray gave no process for a rank: {one_line(error, 200)}") from error


def _forward_stops(ranks: Sequence[Rank]) -> None:
    """Forwards SIGTERM as a stop request to every rank."""

    def forward(*_: object) -> None:
        for rank in ranks:
            with suppress(OSError):
                rank.sock.send(b"x")

    signal.signal(signal.SIGTERM, forward)


def _wait(ray: Any, ranks: Sequence[Rank]) -> None:
    """Until all have ended, or one has failed and its cause had time to appear."""
    with selectors.DefaultSelector() as ready:
        for rank in ranks:
            ready.register(rank.sock, selectors.EVENT_READ, rank)
        guard = Guard()
        until: float | None = None
        while any(not rank.ended for rank in ranks) and (until is None or time.monotonic() < until):
            for pid in guard.end_stopped(children()):
                print(f"plaudit: a process of the local Ray (pid {pid}) {STOPPED}", file=sys.stderr)
            for key, _ in ready.select(0.5):
                rank = key.data
                if _read(rank):
                    continue
                ready.unregister(rank.sock)
                _end(ray, rank)
                if rank.code != 0 and until is None:
                    until = time.monotonic() + PATIENCE


def _read(rank: Rank) -> bool:
    try:
        data = rank.sock.recv(1 << 16)
    except OSError:
        return False
    if rank.number == 0:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        rank.words = (rank.words + data)[-SHOWN:]
    return bool(data)


def _end(ray: Any, rank: Rank) -> None:
    rank.ended = True
    try:
        rank.code = ray.get(rank.result, timeout=END_SECONDS)
    except ray.exceptions.RayTaskError as error:
        rank.code, rank.words = FAILED, f"failed: {one_line(error.cause)}".encode()
    except ray.exceptions.RayError:
        rank.code, rank.died = LOST, True


def _exit_code(ranks: Sequence[Rank]) -> int:
    """The overall exit code; prints the cause of a failure."""
    failed = [rank for rank in ranks if rank.code]
    if not failed:
        return 0 if all(rank.ended for rank in ranks) else LOST
    causes = sorted(failed, key=lambda rank: (not rank.died, rank.code == LOST))
    cause = causes[0]
    if cause.died or cause.code == LOST:
        ended = STOPPED if STOPPED in cause.words.decode(errors="replace") else "has died"
        named = ended if cause.died else "lost another rank"
        print(f"plaudit: rank {cause.number} on Ray {named}", file=sys.stderr)
        return LOST
    if cause.number != 0:
        lines = cause.words.decode(errors="replace").strip().splitlines()
        last = lines[-1].removeprefix("plaudit: ") if lines else "no output"
        print(f"plaudit: rank {cause.number} ended with code {cause.code}: {last}", file=sys.stderr)
    return FAILED


def _end_with_launcher() -> None:
    """The launcher's end closes our standard input."""
    while os.read(0, 4096):
        pass
    os._exit(LOST)


def main() -> int:
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    recipe = parse_recipe(json.loads(sys.argv[1]), "the recipe")
    assert isinstance(recipe, RlRecipe)
    try:
        return drive(recipe, sys.argv[2:])
    except PlauditError as error:
        print(f"plaudit: {one_line(error, 1000)}", file=sys.stderr, flush=True)
        os._exit(FAILED if isinstance(error, ConfigError) else LOST)


if __name__ == "__main__":
    sys.exit(main())
