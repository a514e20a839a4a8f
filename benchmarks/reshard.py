"""Weight transfer by reshard from 2 x 2 gloo training ranks to an engine of 2 tensor-parallel ranks, compared with bare
gloo.

    python benchmarks/reshard.py [--quick]

A Llama of 58M float32 parameters (234 MB) on one machine, every process with one thread. The limit is the same bytes
between the same pairs of processes by gloo alone, from one buffer into another, measured in alternation with the
channel so that other load affects both. The fastest of all repetitions counts, and the median is reported too. The
engine's shards are compared bit for bit after the last publication. Writes benchmarks/results/reshard.json, except with
--quick.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median

from benchmarks.stamp import processor, stamp

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "reshard.json"
REPEATS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, two repetitions; writes no results")
    quick = parser.parse_args().quick
    os.environ["RESHARD_WIDTH"] = "256" if quick else "1024"  # read by the processes at start
    from tests.place.reshard_run import running

    seconds, limits, load = [], [], os.getloadavg()[0]
    with running((2, 2), 2) as (training, _):
        training.ask(version=1, seed=1, engines=[0])  # the first publication connects and plans
        training.ask(bare=True, engine=0)
        for version in range(2, 2 + (2 if quick else REPEATS)):
            bare = training.ask(bare=True, engine=0)
            done = training.ask(version=version, seed=version % 2, engines=[0])
            limits.append(bare["seconds"])
            seconds.append(done["seconds"])
        found = training.ask(engine=0, ask={"look": version % 2})["found"]
        assert [(each["version"], each["wrong"]) for each in found] == [(version, [])] * 2
        moved = sum(size for by in bare["sizes"].values() for size in by.values())
    result = {
        **stamp(sys.argv[0], processor(), {}), "training_ranks": "2 x 2", "engine_ranks": 2, "repeats": len(seconds),
        "load": round(load, 2), "weights_bytes": done["bytes"], "moved_bytes": moved, "extra_bytes": done["extra"],
        "seconds": min(seconds), "limit_seconds": min(limits), "share": min(limits) / min(seconds),
        "median_seconds": median(seconds), "median_limit_seconds": median(limits),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if not quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
