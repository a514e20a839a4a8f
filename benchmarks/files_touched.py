"""Counts how many source files a reward item and a GRPO step pass through.

    python benchmarks/files_touched.py [--quick]

A profiler in the real processes records every Python call into a file of plaudit/. Measured are one item over HTTP
(`plaudit serve --model sums`, /v1/rewards, one response, nothing cached), in the HTTP process and in the model's
worker; and one step of the recipe sums-grpo (colocated, 4 prompts of 4 samples), from the end of one step to the end of
the next, both after a warm-up. A file change is a call into a different file than the previous call in the same thread.
Heartbeats sometimes fall into a request, so the request with the fewest changes out of five counts. Writes
benchmarks/results/files_touched.json, with the files in the order of their first call, unless --quick.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{ROOT}/plaudit/"
RESULTS = ROOT / "benchmarks" / "results" / "files_touched.json"
LIMITS = {"reward item, HTTP process": 12, "reward item, worker process": 10, "GRPO step": 35}
REQUESTS = 5
AFTERWARDS_S = 0.1  # time for a process to finish its work after the reply is sent


# In the measured processes


def install(folder: Path) -> None:
    """Records calls in this process, its threads and its forks while the first byte of `folder`/on is 1."""
    with (folder / "on").open("rb") as file:
        on = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    last: dict[int, str] = {}

    def called(frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        if not on[0]:
            last.clear()
            return
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            thread = threading.get_ident()
            if last.get(thread) != name:
                last[thread] = name
                with (folder / f"{os.getpid()}.calls").open("a") as calls:
                    calls.write(f"{thread} {name.removeprefix(PACKAGE)}\n")

    threading.setprofile(called)
    sys.setprofile(called)


# In the measuring process


class Recording:
    """The folder that the measured processes write to, and the on/off switch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "on").write_bytes(b"\0")
        hook = f"import sys\nsys.path.append({str(ROOT / 'benchmarks')!r})\nfrom pathlib import Path\n"
        hook += f"from files_touched import install\ninstall(Path({str(folder)!r}))\n"
        (folder / "sitecustomize.py").write_text(hook)  # Python runs this file at the start of every process.
        path = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}

    def switch(self, on: bool) -> None:
        with (self.folder / "on").open("r+b") as file:
            file.write(b"\1" if on else b"\0")

    def take(self) -> dict[int, list[tuple[str, str]]]:
        """(thread, file) of every file change since the previous call, by process."""
        taken = {}
        for file in self.folder.glob("*.calls"):
            lines = [line.split(" ", 1) for line in file.read_text().splitlines()]
            taken[int(file.stem)] = [(thread, name) for thread, name in lines]
            file.unlink()
        return taken


def counted(calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Each entry is a thread's first call or a file change."""
    threads = {thread for thread, _ in calls}
    orders = [[name for each, name in calls if each == thread] for thread in threads]
    between = Counter(pair for order in orders for pair in pairwise(order))
    return {
        "files": len({name for _, name in calls}), "changes": len(calls) - len(threads), "threads": len(threads),
        "in_order": list(dict.fromkeys(name for _, name in calls)),
        "most_frequent_changes": [[*pair, count] for pair, count in between.most_common(10)],
    }  # fmt: skip


def reward_item(recording: Recording) -> dict[str, dict[str, Any]]:
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "plaudit", "serve", "--model", "sums", "--port", str(port)]
    server = subprocess.Popen(command, env=recording.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            _wait_ready(server, http)
            seen = [_one_request(recording, http, number) for number in range(3, 3 + 2 + REQUESTS)][2:]
    finally:
        server.terminate()
        server.wait(60)
    main = [counted(taken.pop(server.pid)) for taken in seen]
    workers = [counted([call for calls in taken.values() for call in calls]) for taken in seen]
    fewest = [min(each, key=lambda count: count["changes"]) for each in (main, workers)]
    return {"reward item, HTTP process": fewest[0], "reward item, worker process": fewest[1]}


def _wait_ready(server: subprocess.Popen[bytes], http: Any) -> None:
    import httpx

    until = time.monotonic() + 240
    while time.monotonic() < until:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            if http.get("/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server was not ready within 240 s")


def _one_request(recording: Recording, http: Any, number: int) -> dict[int, list[tuple[str, str]]]:
    """Every number is a new item, so that none is answered from the score cache."""
    first, second = number + 8, number + 12
    response = f"{number}+8={first};{first}+4={second};#{second}"
    body = {"model": "sums", "items": [{"prompt": f"{number}+8+4=", "responses": [response]}]}
    recording.switch(True)
    reply = http.post("/v1/rewards", json=body)
    time.sleep(AFTERWARDS_S)
    recording.switch(False)
    assert reply.status_code == 200, reply.text
    return recording.take()


def train(folder: Path) -> None:
    """Runs four steps in this process and records the third: the first and the last also print samples."""
    from plaudit.config import RlRecipe, parse_recipe
    from plaudit.config.shipped.catalog import recipe_text
    from plaudit.rl.follower import NoViewer
    from plaudit.rl.loop import RlTraining
    from plaudit.train.run.run import Run

    tree = tomllib.loads(recipe_text("sums-grpo"))
    tree["train"] |= {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4, "eval_every": 100}
    tree["train"]["checkpoint"]["every"] = 100
    tree["data"]["eval_items"] = 4
    recipe = parse_recipe(tree, "sums-grpo, short")
    assert isinstance(recipe, RlRecipe)
    assert recipe.placement.name == "colocated"
    switch = (folder / "on").open("r+b", buffering=0)

    class Switch(NoViewer):
        def step(self, step: int, metrics: Any) -> None:
            os.pwrite(switch.fileno(), b"\1" if step == 2 else b"\0", 0)

    with tempfile.TemporaryDirectory() as place, Run(Path(place) / "run", recipe) as run:
        RlTraining(recipe, run, Switch()).fit()
    print(os.getpid())


def grpo_step(recording: Recording) -> dict[str, dict[str, Any]]:
    command = [sys.executable, __file__, "--train", str(recording.folder)]
    done = subprocess.run(command, env=recording.environment, stdout=subprocess.PIPE, check=True, timeout=600)
    taken = recording.take()
    found = {"GRPO step": counted(taken.pop(int(done.stdout.split()[-1])))}
    if taken:
        found["GRPO step, other processes"] = counted([call for calls in taken.values() for call in calls])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return
    with tempfile.TemporaryDirectory() as place:
        recording = Recording(Path(place))
        counts = {**reward_item(recording), **grpo_step(recording)}
    print(f"{'':32} files  target  changes of file")
    for name, count in counts.items():
        print(f"{name:32} {count['files']:5}  {LIMITS.get(name, ''):>6}  {count['changes']:15}")
    if not options.quick:
        from stamp import processor, stamp

        result = {**stamp(__file__, processor(), {}), "targets": LIMITS, "counts": counts}
        RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
