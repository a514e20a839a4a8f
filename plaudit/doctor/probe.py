"""Runs one check in a separate process: `python -m plaudit.doctor.probe disk` prints its findings as JSON lines.

A separate process, so that a check that hangs (a file server, a driver) can be abandoned at its deadline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from plaudit.doctor import machine
from plaudit.doctor.finding import Finding

LIGHT: dict[str, Callable[[], Iterator[Finding]]] = {
    "versions": machine.versions, "memory": machine.memory, "disk": machine.disk, "ports": machine.ports,
    "clock": machine.clock,
}  # fmt: skip


def main() -> None:
    name = sys.argv[1]
    if name == "devices":
        from plaudit.doctor.devices import devices as check
    else:
        check = LIGHT[name]
    for finding in check():
        print(finding.json(), flush=True)


if __name__ == "__main__":
    main()
