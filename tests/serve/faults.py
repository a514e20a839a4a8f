"""Faults for a server under test, without a line in the product that could cause them.

A `sitecustomize.py` on the server's PYTHONPATH, which the worker inherits, changes a few functions when they are
imported. What they do is in a file that the test writes and removes while the server runs:

    what      in a step of the model: raise, memory, sticky (an error of a device that is lost), exit, sleep,
              hold (until the test takes the fault away)
              as soon as a worker begins: start (it exits); in the event loop of the HTTP process: block
    tokens    only in a step that computes the item of these token ids
    begins    only in a step that computes an item that begins with these
    once      the first that meets the fault removes it
    seconds   how long to sleep
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

SITE = """
import importlib.machinery
import json
import os
import sys
import time

FILE = os.environ["PLAUDIT_FAULT"]
FORKS = "plaudit.process.nursery" in sys.orig_argv  # the process whose forks are the workers


def fault(*kinds):
    try:
        with open(FILE) as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    return found if found["what"] in kinds else None


def meets(found):
    if not found.get("once"):
        return True
    try:
        os.unlink(FILE)
    except FileNotFoundError:
        return False
    return True


def concerns(found, tokens):
    begin = found.get("begins", [])
    return tokens == found.get("tokens", tokens) and tokens[: len(begin)] == begin


def change_runner(module):
    module.Runner._forward = with_faults(module.Runner._forward)
    module.Runner._decode = with_faults(module.Runner._decode)


def with_faults(step):
    def faulty(self, plan, *rest):
        with open(FILE + ".steps", "a") as file:
            file.write(".")
        found = fault("raise", "memory", "sticky", "exit", "sleep", "hold")
        if found and any(concerns(found, c.sequence.tokens) for c in plan.chunks) and meets(found):
            time.sleep(found.get("seconds", 0.0))
            while found["what"] == "hold" and fault("hold"):
                time.sleep(0.005)
            if found["what"] == "raise":
                raise RuntimeError("injected")
            if found["what"] == "memory":
                raise MemoryError("injected")
            if found["what"] == "sticky":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if found["what"] == "exit":
                os._exit(9)
        return step(self, plan, *rest)

    return faulty


def change_models(module):
    tick = module.Models.tick

    def faulty(self):
        found = fault("block")
        if found and meets(found):
            time.sleep(found["seconds"])
        return tick(self)

    module.Models.tick = faulty


class Finder(importlib.machinery.PathFinder):
    changes = {"plaudit.core.runner": change_runner, "plaudit.serve.registry": change_models}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in cls.changes:
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            cls.changes[name](module)

        spec.loader.exec_module = run_and_change
        return spec


sys.meta_path.insert(0, Finder)
if FORKS:
    os.register_at_fork(after_in_child=lambda: fault("start") and os._exit(7))
if not FORKS and os.environ.get("PLAUDIT_FULL_DISK"):
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
"""


class Faults:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._path = Path(self._directory.name)
        (self._path / "sitecustomize.py").write_text(SITE)
        self._file = self._path / "fault"
        self.environment = {"PYTHONPATH": str(self._path), "PLAUDIT_FAULT": str(self._file)}

    def set(self, what: str, **details: Any) -> None:
        fresh = self._path / "fresh"
        fresh.write_text(json.dumps({"what": what, **details}))
        fresh.replace(self._file)

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)

    @property
    def met(self) -> bool:
        """Whether a fault that happens once has happened."""
        return not self._file.exists()

    def steps(self) -> int:
        """Steps that models have computed, warm-up included."""
        try:
            return (self._path / "fault.steps").stat().st_size
        except FileNotFoundError:
            return 0

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()
