"""The server side of tests/serve/faults.py: patches a few functions in processes forked for tests.

PLAUDIT_FAULT in the environment is the file that the test writes; without it nothing changes.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def install() -> None:
    """Patch modules that are already imported, and the others on import."""
    for name, change in CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, Finder)


def fault(*kinds: str) -> dict[str, Any] | None:
    if "PLAUDIT_FAULT" not in os.environ:
        return None
    try:
        injected: dict[str, Any] = json.loads(Path(os.environ["PLAUDIT_FAULT"]).read_text())
    except FileNotFoundError:
        return None
    return injected if injected["what"] in kinds else None


def meets(injected: dict[str, Any]) -> bool:
    if not injected.get("once"):
        return True
    try:
        Path(os.environ["PLAUDIT_FAULT"]).unlink()
    except FileNotFoundError:
        return False
    return True


def concerns(injected: dict[str, Any], tokens: list[int]) -> bool:
    begin = injected.get("begins", [])
    return tokens == injected.get("tokens", tokens) and tokens[: len(begin)] == begin


def change_runner(module: ModuleType) -> None:
    module.Runner._forward = with_faults(module.Runner._forward)
    module.Runner._decode = with_faults(module.Runner._decode)


def change_engine(module: ModuleType) -> None:
    read = module.read_rows  # of short works

    def faulty(backend: Any, sequences: Any, *rest: Any) -> Any:
        strike(sequences)
        return read(backend, sequences, *rest)

    module.read_rows = faulty  # type: ignore[attr-defined]


def with_faults(step: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(self: Any, plan: Any, *rest: Any) -> Any:
        strike([chunk.sequence.tokens for chunk in plan.chunks])
        return step(self, plan, *rest)

    return faulty


def strike(sequences: Sequence[list[int]]) -> None:
    """The injected fault, in a step that computes these sequences."""
    if "PLAUDIT_FAULT" not in os.environ:
        return
    with Path(os.environ["PLAUDIT_FAULT"] + ".steps").open("a") as file:
        file.write(".")
    injected = fault("raise", "memory", "sticky", "exit", "sleep", "hold")
    if injected and any(concerns(injected, tokens) for tokens in sequences) and meets(injected):
        time.sleep(injected.get("seconds", 0.0))
        while injected["what"] == "hold" and fault("hold"):
            time.sleep(0.005)
        if injected["what"] == "raise":
            raise RuntimeError("injected")
        if injected["what"] == "memory":
            raise MemoryError("injected")
        if injected["what"] == "sticky":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if injected["what"] == "exit":
            os._exit(9)


def change_models(module: ModuleType) -> None:
    tick = module.Models.tick

    def faulty(self: Any) -> Any:
        injected = fault("block")
        if injected and meets(injected):
            time.sleep(injected["seconds"])
        return tick(self)

    module.Models.tick = faulty


def change_worker(module: ModuleType) -> None:
    main = module.main

    def faulty(fd: int) -> None:
        if fault("start"):
            os._exit(7)
        main(fd)

    module.main = faulty  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "plaudit.core.engine": change_engine,
    "plaudit.core.runner": change_runner,
    "plaudit.serve.registry": change_models,
    "plaudit.serve.workers.worker": change_worker,
}


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in CHANGES:
            return None
        spec = super().find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            CHANGES[fullname](module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec
