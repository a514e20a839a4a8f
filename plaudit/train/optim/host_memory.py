"""Checks that the machines have the host memory that `train.offload_optimizer` needs. Ranks on a machine share it."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

from plaudit.models.memory import free_memory
from plaudit.train.run.ranks import ONE, Group

CURE = (
    "train with model.lora, or over more machines, or set train.offload_optimizer = false and share the model out over "
    "more GPUs"
)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def shortage(needed: int, everyone: Group = ONE) -> str:
    """The arithmetic of a machine whose ranks need more memory together than it has; empty if there is none. `needed`
    is what this rank needs. Collective: all ranks return the same."""
    # Containers on one machine have different names and share its memory; different machines may have the same name.
    boot = _BOOT.read_text() if _BOOT.exists() else platform.node()
    mine = (boot, platform.node(), needed, free_memory())
    machines: dict[str, list[tuple[str, int, int | None]]] = {}
    for machine, *rest in everyone.gather_values(mine, tuple[str, str, int, int | None]):
        machines.setdefault(machine, []).append(tuple(rest))
    for ranks in machines.values():
        total = sum(size for _, size, _ in ranks)
        free = min((each for *_, each in ranks if each is not None), default=None)
        if free is not None and total > free:
            sizes = Counter(gib(size) for _, size, _ in ranks)
            sums = " + ".join(f"{count} × {size}" for size, count in sizes.items())
            sums = f"{sums} = " if len(ranks) > 1 else ""
            return f"{sums}{gib(total)} GiB on {ranks[0][0]}, which has {gib(free)} GiB free"
    return ""


def gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
