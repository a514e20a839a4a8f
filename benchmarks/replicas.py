"""Samples per second of two replicas on two cores compared with one replica pinned to one core.

    python benchmarks/replicas.py [--quick]

A random Llama classifier of 17 million parameters (8 layers, 384 wide, float32), items of 64 to 256 tokens, 32 clients
that each keep a request of 4 items in flight, no score cache. The server's HTTP process shares the cores, as in
production. A third replica is then started under the same load: it must receive traffic, and no request may fail.
Target: two replicas reach at least 1.6 times one. Writes benchmarks/results/replicas.json, except with --quick.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "replicas.json"
CLIENTS, ITEMS = 32, 4


def make_model(directory: Path) -> int:
    """Saves the model to disk; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from plaudit.models import load_tokenizer

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=384, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=6,
        intermediate_size=1280, max_position_embeddings=512, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(directory)
    load_tokenizer("sums").save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


class Server:
    def __init__(self, directory: Path, replicas: int, cores: list[int]) -> None:
        config = directory / f"serve-{replicas}.toml"
        config.write_text(
            f'port = 0\nadmin_key = "benchmark-admin"\n[limits]\ncache_bytes = 0\n[models.model]\n'
            f'path = "{directory}"\n'
            f'kind = "outcome"\nreplicas = {replicas}\nthreads = 1\nbudget = 1024\n'
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "plaudit", "serve", "--config", str(config)], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.split(" on ")[1].split()[0]
        for number, worker in enumerate(self.workers()):
            worker.cpu_affinity([cores[number % len(cores)]])

    def workers(self) -> list[psutil.Process]:
        return sorted(psutil.Process(self.process.pid).children(), key=lambda p: p.pid)

    def metrics(self, name: str) -> dict[str, float]:
        """The metrics of each replica."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(name + "{"):
                found[line.split('replica="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Load:
    """Clients that send requests until the context exits."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.counts: Counter[str] = Counter()
        self.going = True
        self.threads = [threading.Thread(target=self.ask, args=(n,)) for n in range(CLIENTS)]

    def ask(self, client: int) -> None:
        chosen = random.Random(client)
        with httpx.Client(timeout=120) as http:
            while self.going:
                items = [
                    {"tokens": [chosen.randrange(4, 16) for _ in range(chosen.randrange(64, 257))]}
                    for _ in range(ITEMS)
                ]
                reply = http.post(f"{self.url}/v1/rewards", json={"items": items})
                good = reply.status_code == 200 and all("scores" in item for item in reply.json()["items"])
                self.counts["items" if good else "failed"] += ITEMS

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.going = False
        for thread in self.threads:
            thread.join()

    def pace(self, seconds: float) -> float:
        before, began = self.counts["items"], time.perf_counter()
        time.sleep(seconds)
        return (self.counts["items"] - before) / (time.perf_counter() - began)


def third_under_load(server: Server, load: Load, cores: list[int]) -> dict[str, Any]:
    reply = httpx.post(
        f"{server.url}/admin/scale", json={"model": "model", "replicas": 3},
        headers={"authorization": "Bearer benchmark-admin"},
    )  # fmt: skip
    reply.raise_for_status()
    began = time.perf_counter()
    while server.metrics("plaudit_replica_items_total").get("2", 0) == 0:
        if time.perf_counter() - began > 180:
            raise SystemExit("the third replica got nothing to do within 180 s")
        time.sleep(0.2)
    return {"first_item_after_seconds": round(time.perf_counter() - began, 1), "failed": load.counts["failed"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    seconds = 4.0 if options.quick else 20.0
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        parameters = make_model(directory)
        paces: dict[int, float] = {}
        for replicas in (1, 2):
            server = Server(directory, replicas, cores)
            try:
                with Load(server.url) as load:
                    load.pace(2.0)
                    paces[replicas] = load.pace(seconds)
                    if replicas == 2:
                        shares = server.metrics("plaudit_replica_items_total")
                        third = third_under_load(server, load, cores)
            finally:
                server.close()
    result = {
        "parameters": parameters, "one_replica_one_core": round(paces[1], 1),
        "two_replicas_two_cores": round(paces[2], 1),
        "times": round(paces[2] / paces[1], 2), "items_by_replica": shares, "third": third, "unit": "samples/s",
        "load_average": os.getloadavg()[0], "machine": platform.machine(), "torch": version("torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if not options.quick:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
