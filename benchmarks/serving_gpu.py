"""The reward server over HTTP on one GPU, compared with the core without HTTP and a FastAPI server, in one run.

    python benchmarks/serving_gpu.py [--requests 450] [--runs 3] [--servers plaudit,fastapi] [--tiny] [--out FILE]

One random bfloat16 Llama classifier of 1B parameters (core_gpu.py's) and the same token ids for every server:
    ragged    64 clients, a sequence of lognormal(6.2, 0.6) tokens, at most 4000, in each request
    groups    16 clients, 16 responses of lognormal(5.8, 0.6) tokens to one prompt of 1024 in each request
A client sends its next request when the previous one is answered, `requests` times; every run has new sequences, and
none is sent twice. "core" scores the first sequences of each run, a tenth but at least 512, in one call of the engine
in this process: the upper bound for a server. Scores are compared with the core's. 450 requests take Plaudit about a
minute for each load (and FastAPI 25). `--tiny` tries the script on any device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_cpu import word_tokenizer
from core_gpu import VOCABULARY, draw_lengths, model
from serving import PYTHONS, SERVERS, Load, Sequences, Setting, running, under_load
from stamp import processor, stamp
from transformers import AutoModelForSequenceClassification

from plaudit.core import Engine

RESULTS = Path(__file__).parent / "results" / "serving_gpu.json"
NAME = "scorer"


def loads(requests: int, longest: int, run: int) -> list[Load]:
    rng = np.random.default_rng([3, run])

    def ids(length: int) -> list[int]:
        drawn: list[int] = rng.integers(5, VOCABULARY - 5, length).tolist()
        return drawn

    def ragged(count: int) -> list[Sequences]:
        return [[ids(int(n))] for n in draw_lengths(count, 6.2, longest, rng)]

    def groups(count: int) -> list[Sequences]:
        prompts = [ids(longest // 4) for _ in range(count)]
        return [[prompt + ids(int(n)) for n in draw_lengths(16, 5.8, longest // 2, rng)] for prompt in prompts]

    return [
        Load("ragged", 64, NAME, ragged(128), ragged(64 * requests)),
        Load("groups", 16, NAME, groups(16), groups(4 * requests)),
    ]


def in_core(engine: Engine, load: Load) -> tuple[dict[str, Any], list[float]]:
    """Scores the first sequences of a load in one call."""
    sequences = [s for request in load.requests for s in request]
    sequences = sequences[: max(512, len(sequences) // 10)]
    engine.score([s for request in load.warmup for s in request])
    begin = time.perf_counter()
    scores = [float(v[0]) for v in engine.score(sequences)]
    seconds = time.perf_counter() - begin
    row = {"server": "core", "load": load.name, "samples/s": len(sequences) / seconds, "seconds": seconds}
    return row | {"tokens": sum(map(len, sequences))}, scores


def show(core: dict[str, Any], server: dict[str, Any]) -> None:
    print(
        f"{server['load']:7} core {core['samples/s']:.1f} samples/s, {server['server']} {server['samples/s']:.1f} in "
        f"{server['seconds']:.0f} s ({server['of the core']:.1%}), p50 {server['p50 ms']:.0f} ms, "
        f"p99 {server['p99 ms']:.0f} ms, largest difference {server['largest difference']:.2g}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=450)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--servers", default="plaudit,fastapi")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    dtype = "float32" if options.tiny else "bfloat16"
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device; benchmarks/serving.py measures the server on a CPU")
    if options.tiny:
        from core_cpu import models

        module: Any = models()[0]
    else:
        module = model(AutoModelForSequenceClassification, "1B")
        module.config.bos_token_id, module.config.eos_token_id = 1, 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as place:
        folder = Path(place)
        module.save_pretrained(folder / NAME)
        word_tokenizer(VOCABULARY).save_pretrained(folder / NAME)
        longest = 400 if options.tiny else 4000
        del module
        engine = Engine.load(folder / NAME, device=device, dtype=dtype, kv_bytes=2**28)  # the way the server loads it
        config = folder / "serve.toml"
        config.write_text(f'[models.{NAME}]\npath = "{folder / NAME}"\ndevice = "{device}"\ndtype = "{dtype}"\n')
        PYTHONS["fastapi"] = PYTHONS["plaudit"]
        ours = SERVERS["plaudit"]
        SERVERS["plaudit"] = type(ours)(
            lambda _, port, __: ["-m", "plaudit", "serve", "--config", f"{config}", "--port", f"{port}"],
            ours.ready, ours.request, ours.scores,
        )  # fmt: skip
        settings = {"plaudit": Setting(""), "fastapi": Setting("", ("--device", device, "--dtype", dtype))}
        for name in options.servers.split(","):
            setting = settings[name]
            with running(name, setting, folder / NAME, folder / "counts.json") as (port, process):
                for run in range(options.runs):
                    for load in loads(options.requests, longest, run):
                        core, expected = in_core(engine, load)
                        server = under_load(port, process, name, load, folder, expected)
                        server["of the core"] = server["samples/s"] / core["samples/s"]
                        rows += [row | {"run": run} for row in (core, server)]
                        show(core, server)
    rivals = {}
    if "fastapi" in options.servers:
        how = f"uvicorn {version('uvicorn')}, transformers {version('transformers')}, one forward a request, {dtype}"
        rivals["fastapi"] = version("fastapi"), how
    record = {
        **stamp(__file__, torch.cuda.get_device_name() if device == "cuda" else processor(), rivals),
        "requests": options.requests, "runs": options.runs, "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
