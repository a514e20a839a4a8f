"""Latency (p50 and p99) of the reward server at given shares of its maximum throughput.

    python benchmarks/arrival_rates.py [--only SERVER] [--seconds 30] [--shares 0.2,0.5,0.8,0.95]

The model and the ragged sequences are those of serving.py (40-400 tokens, one sequence per request). First the server's
maximum throughput is measured: 64 clients, each sending its next request when the previous one is answered. Then
requests arrive as a Poisson process at shares of that rate, whether or not earlier ones have been answered, and the
time from arrival to answer is measured. PyTriton runs with three settings of its dynamic batcher (preferred batch size,
queue delay); Plaudit has no delay to set, and instead of a batch size it has the token budget of a step (`budget`),
left at its default. Writes benchmarks/results/arrival_rates.json, unless only some servers were run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rivals.load_client import write_records
from serving import (
    LONGEST,
    PYTHONS,
    RIVALS,
    ROOT,
    SERVERS,
    Load,
    Sequences,
    Setting,
    rivals,
    running,
    save_models,
    send,
    triton,
    versions_of,
)  # fmt: skip
from stamp import processor, stamp

RESULTS = ROOT / "benchmarks" / "results" / "arrival_rates.json"
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
DEFAULTS = {"seconds": 30.0, "shares": ",".join(map(str, SHARES))}
SETTINGS = {
    "plaudit": [Setting("")],
    "pytriton": [triton(2, 4, 0), triton(2, 4, 2000), triton(2, 16, 2000)],
}
CONNECTIONS = 64


def ragged(count: int, seed: int) -> list[Sequences]:
    draw = random.Random(seed)
    return [[draw.choices(range(5, 49000), k=draw.randint(40, LONGEST))] for _ in range(count)]


def requests(name: str, count: int, seed: int) -> list[bytes]:
    load = Load("ragged", CONNECTIONS, "scorer", [], [])
    return [SERVERS[name].request(sequences, load) for sequences in ragged(count, seed)]


def capacity(port: int, name: str, seconds: float, folder: Path) -> float:
    """Requests per second with 64 requests always in flight."""
    load = Load("ragged", CONNECTIONS, "scorer", [], [])
    send(port, load, requests(name, 2 * CONNECTIONS, 1), folder, None)  # warm-up
    measured, answered = send(port, load, requests(name, int(400 * seconds), 2), folder, seconds)
    return len(answered) / float(measured["seconds"])


def at_rate(port: int, name: str, rate: float, seconds: float, folder: Path, seed: int) -> dict[str, float]:
    write_records(folder / "arriving", requests(name, max(int(rate * seconds), 20), seed))
    command = [
        sys.executable,
        f"{RIVALS / 'open_client.py'}",
        f"{port}",
        f"{rate}",
        f"{seed}",
        f"{folder / 'arriving'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600 + 4 * seconds, check=True)
    result = json.loads(done.stdout)
    ordered = sorted(result["latencies"])
    return {
        "rows/s": len(ordered) / result["seconds"], "rows": len(ordered), "late ms": 1000 * result["late"],
        "p50 ms": 1000 * ordered[len(ordered) // 2], "p99 ms": 1000 * ordered[int(len(ordered) * 0.99)],
    }  # fmt: skip


def measure(name: str, setting: Setting, shares: list[float], seconds: float, folder: Path) -> list[dict[str, Any]]:
    with running(name, setting, folder / "scorer", folder / "counts.json") as (port, _):
        most = capacity(port, name, seconds, folder)
        return [
            {
                "server": name, "setting": setting.label, "capacity rows/s": most, "share": share,
                **at_rate(port, name, share * most, seconds, folder, 3 + number),
            }
            for number, share in enumerate(shares)
        ]  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("server", "setting", "share of capacity", "rows/s", "p50 ms", "p99 ms")
    for row in rows:
        figures = (f"{row[key]:.1f}" for key in ("rows/s", "p50 ms", "p99 ms"))
        table.add_row(row["server"], row["setting"], f"{row['share']:.2f}", *figures)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS, help="run only this server")
    parser.add_argument("--seconds", type=float, default=DEFAULTS["seconds"], help="duration of each arrival rate")
    parser.add_argument("--shares", default=DEFAULTS["shares"], help="shares of the maximum throughput")
    options = parser.parse_args()
    shares = [float(share) for share in options.shares.split(",")]
    wanted = [options.only] if options.only else list(SETTINGS)
    for name in wanted:
        if not PYTHONS[name].exists():
            raise SystemExit(
                f"{name} is not installed; run: make {PYTHONS[name].relative_to(ROOT).parts[0]}/.installed"
            )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        save_models(Path(place))
        for name in wanted:
            for setting in SETTINGS[name]:
                print(f"{name} {setting.label}", file=sys.stderr, flush=True)
                rows += measure(name, setting, shares, options.seconds, Path(place))
    show(rows)
    if options.only or options.shares != DEFAULTS["shares"]:
        return
    installed = versions_of(SETTINGS)
    record = {
        **stamp(__file__, processor(), rivals(installed)),
        "versions": installed,
        "seconds": options.seconds,
        "shares": shares,
        "rows": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
