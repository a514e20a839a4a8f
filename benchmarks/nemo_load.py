"""The load of a NeMo-Aligner job on one reward model: latency of short requests while long ones run.

    python benchmarks/nemo_load.py [--only SERVER] [--seconds 20] [--short 120] [--long 8]

128 keep-alive connections, one row in each request, byte-identical for Plaudit's Triton endpoint and for PyTriton:
INT64 tokens padded to 1024, as NeMo-Aligner's clients pad to `pad_to_length`, and their length. Most send rows of 16-64
tokens, the others rows of 700-1000; each sends its next request when the previous one is answered. First the short ones
alone, then both. The model is that of serving.py. No row is sent twice. Writes benchmarks/results/nemo_load.json,
unless only one server ran or the load was another.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import PYTHONS, ROOT, Load, Setting, compact, http, rivals, running, save_models, send, triton, versions_of
from stamp import processor, stamp

RESULTS = ROOT / "benchmarks" / "results" / "nemo_load.json"
WIDTH = 1024
LENGTHS = {"short": (16, 64), "long": (700, 1000)}
MOST_PER_SECOND = {"short": 2000, "long": 60}  # more than any of these servers can answer
SETTINGS = {"plaudit": [Setting("")], "pytriton": [triton(1, 16, 2000), triton(2, 16, 2000), triton(2, 4, 2000)]}
DEFAULTS = {"seconds": 20.0, "short": 120, "long": 8}


def requests(kind: str, seconds: float, draw: random.Random) -> list[bytes]:
    made = []
    for _ in range(int(MOST_PER_SECOND[kind] * seconds)):
        length = draw.randint(*LENGTHS[kind])
        tokens = struct.pack(f"<{WIDTH}q", *draw.choices(range(5, 49000), k=length), *[0] * (WIDTH - length))
        lengths = struct.pack("<q", length)
        inputs = [
            {"name": name, "shape": shape, "datatype": "INT64", "parameters": {"binary_data_size": len(data)}}
            for name, shape, data in (("tokens", [1, WIDTH], tokens), ("sequence_lengths", [1, 1], lengths))
        ]
        head = compact({"inputs": inputs, "outputs": [{"name": "rewards", "parameters": {"binary_data": False}}]})
        extra = f"Inference-Header-Content-Length: {len(head)}\r\n"
        made.append(http("/v2/models/reward_model/infer", head + tokens + lengths, extra))
    return made


def sent(port: int, kind: str, connections: int, seconds: float, folder: Path, seed: int) -> dict[str, Any]:
    place = folder / kind
    place.mkdir(exist_ok=True)
    load = Load(kind, connections, "scorer", [], [])
    result, bodies = send(port, load, requests(kind, seconds, random.Random(seed)), place, seconds)
    scores = [json.loads(body)["outputs"][0]["data"][0] for body in bodies]
    if not scores or not all(map(math.isfinite, scores)):
        raise SystemExit(f"{kind}: {len(scores)} answers, or one that is not a number")
    latencies = sorted(result["latencies"])
    return {
        "rows/s": len(scores) / result["seconds"], "rows": len(scores),
        "p50 ms": 1000 * latencies[len(latencies) // 2], "p99 ms": 1000 * latencies[int(len(latencies) * 0.99)],
    }  # fmt: skip


def measure(name: str, setting: Setting, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with (
        running(name, setting, folder / "scorer", folder / "counts.json") as (port, _),
        ThreadPoolExecutor(2) as threads,
    ):
        sent(port, "short", options.short, 2, folder, 1)  # warm-up
        alone = sent(port, "short", options.short, options.seconds, folder, 2)
        long = threads.submit(sent, port, "long", options.long, options.seconds, folder, 3)
        short = threads.submit(sent, port, "short", options.short, options.seconds, folder, 4)
        return {
            "server": name, "setting": setting.label, "short alone": alone, "short": short.result(),
            "long": long.result(),
        }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("server", "setting", "load", "rows/s", "p50 ms", "p99 ms")
    for row in rows:
        for load in ("short alone", "short", "long"):
            figures = (f"{row[load][key]:.1f}" for key in ("rows/s", "p50 ms", "p99 ms"))
            table.add_row(row["server"], row["setting"], load, *figures)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS, help="run only this server")
    parser.add_argument("--seconds", type=float, default=DEFAULTS["seconds"], help="duration of each load")
    parser.add_argument("--short", type=int, default=DEFAULTS["short"], help="number of connections with short rows")
    parser.add_argument("--long", type=int, default=DEFAULTS["long"], help="number of connections with long rows")
    options = parser.parse_args()
    wanted = [options.only] if options.only else list(SETTINGS)
    for name in wanted:
        if not PYTHONS[name].exists():
            raise SystemExit(
                f"{name} is not installed; run: make {PYTHONS[name].relative_to(ROOT).parts[0]}/.installed"
            )
    rows = []
    with tempfile.TemporaryDirectory() as place:
        save_models(Path(place))
        for name in wanted:
            for setting in SETTINGS[name]:
                print(f"{name} {setting.label}", file=sys.stderr, flush=True)
                rows.append(measure(name, setting, options, Path(place)))
    show(rows)
    if options.only or any(getattr(options, name) != value for name, value in DEFAULTS.items()):
        return
    installed = versions_of(SETTINGS)
    record = {**stamp(__file__, processor(), rivals(installed)), "versions": installed, **DEFAULTS, "rows": rows}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
