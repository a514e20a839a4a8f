"""`plaudit train` on Ray: starts the driver, and resumes the run when a rank, the driver or Ray is lost.

Needs neither Ray nor torch: a failure of Ray's processes does not affect this one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from plaudit.config import RlRecipe
from plaudit.process.guard import LOOK_SECONDS, STOPPED, Guard

ENDS = (0, 2)  # exit codes of a driver that are not retried
COMMAND = ("-m", "plaudit.place.ray.ranks")
MOST_LOSSES = 3  # consecutive attempts without a new checkpoint


def launch_on_ray(recipe: RlRecipe, arguments: Sequence[str], directory: Path) -> int:
    """Run `plaudit` with these arguments in Ray actors; returns the overall exit code. `directory` is the run's."""
    stopped: list[int] = []
    losses, newest = 0, _newest(directory)
    command = list(arguments)
    while True:
        code = _attempt(recipe, command, stopped)
        if code in ENDS or stopped:
            return max(code, 0) or int(code != 0)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        losses, newest = (1, latest) if (latest := _newest(directory)) != newest else (losses + 1, newest)
        if losses > MOST_LOSSES:
            print(
                f"plaudit: the run was lost {losses} times in a row without a new checkpoint (the driver {how}); "
                "--resume continues from the last one", file=sys.stderr,
            )  # fmt: skip
            return 1
        print(f"plaudit: the run on Ray was lost ({how}): it resumes from {newest or 'the start'}", file=sys.stderr)
        command = [*(each for each in command if each not in ("--fresh", "--resume")), "--resume"]


def _attempt(recipe: RlRecipe, arguments: Sequence[str], stopped: list[int]) -> int:
    tree = json.dumps(recipe.model_dump(mode="json", exclude_none=True))
    # A separate session: Ctrl-C reaches it once, from here. Its standard input closes when this process dies.
    driver = subprocess.Popen(
        [sys.executable, *COMMAND, tree, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        driver.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    guard = Guard()
    try:
        while True:
            try:
                return driver.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                if guard.end_stopped([driver.pid]):
                    print(f"plaudit: the driver (pid {driver.pid}) {STOPPED}", file=sys.stderr)
    finally:
        driver.kill()
        assert driver.stdin is not None
        driver.stdin.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _newest(directory: Path) -> str | None:
    """The name of the last checkpoint."""
    return max((path.name for path in (directory / "checkpoints").glob("step-*")), default=None)
