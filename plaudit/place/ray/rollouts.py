"""Rollout workers in Ray actors: the same worker loop, over TCP, in the bundles of the run's placement group.

A dead actor is replaced by another in its bundle; RemoteEngine marks it stale until it has received weights.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from plaudit.config import RlRecipe
from plaudit.errors import EngineLost, ReceiverLost, one_line
from plaudit.place.ray.cluster import bundles_of, import_ray, in_bundle, own_group
from plaudit.place.workers.callback import CallbackListener, dial
from plaudit.process.guard import guard_this_process

START_SECONDS = 120.0  # for Ray to start a process in a bundle of this run
CONNECT_SECONDS = 60.0
END_SECONDS = 1.0  # for a process that closed its socket to exit by itself


class RolloutActor:
    def pid(self) -> int:
        return os.getpid()

    def run(self, address: tuple[str, int], token: bytes, directory: str) -> None:
        guard_this_process("a rollout actor")
        os.chdir(directory)  # the recipe's paths are relative to the trainer's directory
        sock = dial(address, token)
        from plaudit.place.workers.worker import main

        main(sock.detach())


class RayRollouts:
    """A `Host`. `near`: the workers are on this machine, and can share its memory."""

    def __init__(self, recipe: RlRecipe) -> None:
        self.ray = import_ray()
        self.group = own_group(self.ray)
        self.free = list(bundles_of(recipe, "rollout"))
        nodes = self.ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        here = self.ray.get_runtime_context().get_node_id()
        self.near = all(nodes[index] == here for index in self.free)
        self.address: str = self.ray.util.get_node_ip_address()

    def __call__(self) -> RayHosted:
        return RayHosted(self, self.free.pop(0))


class RayHosted:
    def __init__(self, host: RayRollouts, bundle: int) -> None:
        self._host = host
        self._bundle: int | None = bundle
        ray = self._ray = host.ray
        self._actor = ray.remote(RolloutActor).options(**in_bundle(host.group, bundle)).remote()
        listener = CallbackListener(host.address)
        try:
            self._pid: int = ray.get(self._actor.pid.remote(), timeout=START_SECONDS)
            self._running: Any = self._actor.run.remote(listener.address, listener.token, str(Path.cwd()))
            self.sock: socket.socket = listener.admit(f"the rollout actor (pid {self._pid})", CONNECT_SECONDS)
        except (ray.exceptions.RayError, ReceiverLost) as error:
            listener.close()
            self._release()
            raise EngineLost(f"Ray gave no rollout process: {one_line(error, 200)}") from error

    def end(self) -> str:
        ray, words = self._ray, "ended by itself"
        try:
            ray.get(self._running, timeout=END_SECONDS)
        except ray.exceptions.GetTimeoutError:
            words = "was ended"
            if self._host.near:  # a stopped process does not react to Ray
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self._pid, signal.SIGKILL)
        except ray.exceptions.RayActorError:
            words = f"has died (actor process {self._pid})"
        except ray.exceptions.RayError as error:
            words = f"failed: {one_line(error, 200)}"
        self._release()
        return words

    def _release(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)
        if self._bundle is not None:
            self._host.free.append(self._bundle)
            self._bundle = None
