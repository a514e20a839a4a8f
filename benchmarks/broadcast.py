"""The cost of sending a step to another rank: two gloo ranks on this machine, a step of 16,384 tokens.

    python benchmarks/broadcast.py [--quick]

The message is that of a real step (64 sequences of 256 tokens, blocks of 16, one requested row each). Measured from
before it is packed on rank 0 until it is unpacked on rank 1, with the clock that both share. Target: under 2 ms. Writes
benchmarks/results/broadcast.json, except with --quick.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch.distributed as dist

from plaudit.core.device.backend import Span
from plaudit.core.device.lockstep import FORWARD, RankGroups, packed_spans, unpacked_spans

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "broadcast.json"
SEQUENCES, LENGTH, BLOCK = 64, 256, 16
LIMIT_MS = 2.0


def step() -> list[Span]:
    random = np.random.default_rng(1)
    blocks = random.permutation(SEQUENCES * LENGTH // BLOCK).reshape(SEQUENCES, -1).tolist()
    tokens = random.integers(0, 50_000, (SEQUENCES, LENGTH)).tolist()
    return [Span(ids, 0, own, [LENGTH - 1]) for ids, own in zip(tokens, blocks, strict=True)]


def rank(number: int, file: str, count: int) -> None:
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=60))
    channel = RankGroups(number, 2, dist.group.WORLD, dist.group.WORLD)
    spans = step()
    for i in range(count):
        channel.barrier()
        if number == 0:
            time.sleep(0.002)  # rank 1 waits here, as it does between two steps
            began = time.perf_counter_ns()
            channel.send(FORWARD, *packed_spans(spans, []))
            store.set(f"told/{i}", str(time.perf_counter_ns() - began))
            store.set(f"at/{i}", str(began))
        else:
            _, parts = channel.receive()
            found = unpacked_spans(parts)
            over = time.perf_counter_ns()
            assert [list(span.tokens) for span in found] == [span.tokens for span in spans]
            store.wait([f"at/{i}"])
            print(
                json.dumps({"ms": (over - int(store.get(f"at/{i}"))) / 1e6, "told": int(store.get(f"told/{i}")) / 1e6})
            )
    channel.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", nargs=2)
    options = parser.parse_args()
    count = 50 if options.quick else 300
    if options.rank is not None:
        rank(int(options.rank[0]), options.rank[1], count)
        return
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, *(["--quick"] if options.quick else []), "--rank"]
        lead = subprocess.Popen([*command, "0", f"{place}/store"])
        other = subprocess.run([*command, "1", f"{place}/store"], stdout=subprocess.PIPE, check=True, timeout=300)
        assert lead.wait(60) == 0
    lines = [json.loads(line) for line in other.stdout.splitlines()][10:]
    whole, notified = (np.array([line[name] for line in lines]) for name in ("ms", "told"))
    result = {
        "tokens": SEQUENCES * LENGTH, "ms_p50": round(float(np.median(whole)), 3),
        "ms_p90": round(float(np.percentile(whole, 90)), 3), "rank_0_ms_p50": round(float(np.median(notified)), 3),
        "limit_ms": LIMIT_MS, "machine": platform.processor() or platform.machine(), "torch": version("torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if not options.quick:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
