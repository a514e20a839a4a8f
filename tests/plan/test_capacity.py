"""A reward service sized for a load, compared with measured servers."""

import heapq
import json
import random
import statistics
from pathlib import Path

import pytest

from plaudit.errors import ConfigError
from plaudit.plan import Constants, GenerationLayout, ModelShape, cluster
from plaudit.plan.capacity import BUDGET, MOST_PER_SERVER, Scorer, demand
from plaudit.plan.cost.decode import Replica
from plaudit.plan.options import PlanOptions
from tests.command import plaudit_here

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def scorer(hardware: str = "H200") -> Scorer:
    """The classifier of benchmarks/serving_gpu.py."""
    model = ModelShape(vocab=49152, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=True)
    return Scorer(Replica(model, cluster(hardware), GenerationLayout(), "bf16", "bf16", Constants()))


def measured(file: str, load: str, server: str = "plaudit") -> dict[str, float]:
    """The row of the first run if there are several."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    (row,) = (r for r in rows if r["load"] == load and r["server"] == server and not r.get("run"))
    return row  # type: ignore[no-any-return]


def closed_loop(service: Scorer, clients: int, requests: list[list[float]]) -> tuple[float, float]:
    """Items per second and p50 of a request for clients that send their next request when the last is answered.
    The HTTP overhead between the two is the measured one of a model without cost."""
    http_seconds = measured("serving.json", "overhead-16")["p50 ms"] / 1e3
    ready = [(0.0, client) for client in range(clients)]
    heapq.heapify(ready)
    waiting = requests[::-1]
    now, latencies = 0.0, []
    while waiting or ready:
        now = max(now, ready[0][0]) if waiting else now
        batch, tokens = [], 0.0
        while waiting and ready and ready[0][0] <= now and (not batch or tokens < service.budget):
            arrived, client = heapq.heappop(ready)
            request = waiting.pop()
            tokens += sum(request)
            batch.append((arrived, client, request))
        if not batch:
            break
        now += service.step_seconds([length for _, _, request in batch for length in request])
        for arrived, client, _ in batch:
            latencies.append(now - arrived)
            heapq.heappush(ready, (now + http_seconds, client))
    items = sum(map(len, requests))
    return items / now, statistics.median(latencies)


def test_planned_throughput_and_latency_match_a_measured_gpu_server() -> None:
    draw = random.Random(3)
    ragged = [[min(4000.0, max(8.0, draw.lognormvariate(6.2, 0.6)))] for _ in range(512)]
    row = measured("serving_gpu.json", "ragged")
    rate, p50 = closed_loop(scorer(), 64, ragged)
    # The plan is conservative: the server answers one half of its batch while it computes the other.
    assert 0.7 * row["samples/s"] < rate < 1.1 * row["samples/s"]
    assert 0.9 * row["p50 ms"] / 1e3 < p50 < 1.35 * row["p50 ms"] / 1e3
    # Sixteen responses to one prompt of 1000 tokens, which is computed once.
    groups = [[1000 / 16 + min(2000.0, max(8.0, draw.lognormvariate(5.8, 0.6))) for _ in range(16)] for _ in range(32)]
    rate, _ = closed_loop(scorer(), 16, groups)
    assert rate == pytest.approx(measured("serving_gpu.json", "groups")["samples/s"], rel=0.35)


def test_the_limit_of_one_http_process_matches_the_measurement() -> None:
    assert pytest.approx(measured("serving.json", "overhead-64")["samples/s"], rel=0.001) == MOST_PER_SERVER
    source = (ROOT / "plaudit/core/device/cuda.py").read_text()
    assert f"budget = {BUDGET:.0f}\n" in source


def ask(**options: object):  # type: ignore[no-untyped-def]
    chosen = {"serve": "llama-3.1-8b", "rate": 100.0, "p99": 0.5, "compare": "H100,B200", **options}
    return demand(PlanOptions(**chosen))  # type: ignore[arg-type]


def test_the_plan_uses_the_fewest_replicas_within_the_p99_limit() -> None:
    question = ask()
    services, rejected = question.answer()
    assert not rejected
    for service in services:
        assert service.traffic.p99 <= 0.5
        assert service.traffic.busy < 1
        fewer = service.scorer.under(100.0 / (service.replicas - 1), question.lengths())
        assert fewer.p99 > 0.5
        # By hand: dollars per hour divided by scores per hour.
        assert service.per_million == pytest.approx(service.chip.price.mid * service.devices / 360_000 * 1e6)
    assert [s.hourly for s in services] == sorted(s.hourly for s in services)


def test_latency_of_an_idle_replica_is_one_item() -> None:
    alone = scorer().under(0.001, [600.0] * 200)
    assert [alone.p50, alone.p99] == pytest.approx(2 * [scorer().step_seconds([600.0])])
    assert alone.batch == 1


def test_higher_load_or_lower_latency_needs_more_replicas() -> None:
    def replicas(**options: object) -> int:
        return ask(compare="H100", **options).answer()[0][0].devices  # type: ignore[no-any-return]

    assert replicas() < replicas(rate=400.0)
    assert replicas() < replicas(p99=0.25)
    assert replicas(samples=8) < replicas()  # a prompt is computed once for its responses


def test_a_model_larger_than_a_device_uses_tensor_parallelism() -> None:
    (best,), _ = ask(serve="llama-3.1-70b", compare="H100", p99=5.0, rate=5.0).answer()
    assert best.scorer.replica.layout.tp == 2  # 141 GB of weights
    assert best.devices == 2 * best.replicas


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": None}, r"--serve needs the load and the limit: --rate 500"),
        ({"rate": 0.0}, r"--rate 0: expected more than zero"),
        ({"p99": -1.0}, r"--p99 -1: expected more than zero"),
        ({"p99": 0.001}, r"no accelerator answers 100 items/s .* one item of [\d,]+ tokens alone takes"),
        ({"hardware": "8xH100"}, r"--hardware 8xH100: --serve says how many devices it takes; .*--compare"),
        ({"budget": "60/h", "goal": "cost"}, r"to which --budget, --goal does not apply: remove it"),
        ({"model": "qwen2.5-7b"}, r"--model qwen2.5-7b plans a training run and --serve llama-3.1-8b a service"),
    ],
)
def test_invalid_options_are_rejected_with_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        ask(**options).answer()
    assert "\n" not in str(error.value)


def test_the_command_prints_a_table_or_data() -> None:
    words = ("--serve", "qwen2.5-7b", "--rate", "50", "--p99", "1", "--compare", "H100,GB200")
    run = plaudit_here("plan", *words, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "per million scores" in run.stdout
    assert "none is public for GB200" in run.stdout
    data = json.loads(plaudit_here("plan", *words, "--json", cwd=ROOT).stdout)
    assert data["batch_delay_seconds"] == 0
    assert [s["dollars_per_hour"] is None for s in data["services"]] == [False, True]
    lonely = plaudit_here("plan", "--model", "qwen2.5-7b", "--rate", "50", cwd=ROOT)
    assert "set its model with --serve" in lonely.stderr
