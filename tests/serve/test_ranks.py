"""A model sharded over several ranks behind the server: the same scores, and recovery when a rank dies or stalls."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForSequenceClassification

import plaudit
from plaudit.core import Engine, SamplingParams
from plaudit.core.proof.stand_in import stir
from plaudit.errors import RankLost
from plaudit.models import load_tokenizer, resolve, save
from plaudit.records import Item
from plaudit.reward import load_reward
from plaudit.serve.workers.ranks import ranked_engine
from tests.core.mixtures import CONFIGS
from tests.forked import ForkedCommand
from tests.rotation import mostly_slow
from tests.serve.process import ServerProcess, free_port
from tests.serve.test_chaos import MALFORMED, content, until
from tests.train.test_ranks import fork_ranks

SOAK = bool(os.environ.get("PLAUDIT_SOAK"))
LONG = pytest.mark.skipif(not SOAK, reason="PLAUDIT_SOAK runs it")
CLIENTS = 64 if SOAK else 8
MODEL = {"path": "sums", "rank_seconds": 4.0, "kv_bytes": 4 << 20}
TREE = {"models": {"sums": {**MODEL, "tensor_parallel": 2}}}
STAGED = {"models": {"sums": {**MODEL, "pipeline_parallel": 2}}}
EMBEDDED = Path(plaudit.__path__[0]) / "embedded"


def ranks(server: ServerProcess) -> list[psutil.Process]:
    """The processes of its model's other ranks."""
    return server.workers("plaudit-ranks")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(TREE) as server:
        yield server


@pytest.fixture(scope="module")
def staged() -> Iterator[ServerProcess]:
    with ServerProcess(STAGED) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    reward = load_reward("sums")
    items = [[Item(tokens=tuple(entry["tokens"])) for entry in content(number)] for number in range(40)]
    return [[score.value for score in reward.score(some)] for some in items]  # type: ignore[union-attr, misc]


def check_scores(
    server: ServerProcess, number: int, expected: list[list[float]], http: httpx.Client | None = None,
    items: list[dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    body = {"items": items or content(number % 40), "cache": False}
    reply = (http or server.http).post("/v1/rewards", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    scores = [item["scores"][0] for item in reply.json()["items"]]
    assert scores == pytest.approx(expected[number % 40], abs=5e-5)


def test_two_ranks_score_as_one_process_does(server: ServerProcess, expected: list[list[float]]) -> None:
    assert len(ranks(server)) == 1
    for number in range(20):
        check_scores(server, number, expected)


@pytest.mark.slow
def test_two_stages_score_as_one_process_does(staged: ServerProcess, expected: list[list[float]]) -> None:
    for number in range(20):
        check_scores(staged, number, expected)


@pytest.mark.parametrize("family", mostly_slow(["qwen3_moe", "mixtral"]))
def test_two_ranks_with_half_of_the_experts_each_score_as_one_process_does(family: str, tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS[family])
    config.num_labels = 1
    torch.manual_seed(0)
    module: Any = AutoModelForSequenceClassification.from_config(config).eval()
    stir(module, 0)
    path = str(save(module, load_tokenizer(resolve("sums")), tmp_path / "model"))
    reward = load_reward(path)
    with ServerProcess({"models": {"mixture": {**MODEL, "path": path, "tensor_parallel": 2}}}) as server:
        assert len(ranks(server)) == 1
        for number in range(5):
            items = [Item(tokens=tuple(entry["tokens"])) for entry in content(number)]
            scores = [score.value for score in reward.score(items)]  # type: ignore[union-attr]
            check_scores(server, 0, [scores], items=content(number))


def replaced(server: ServerProcess, pid: int) -> bool:
    if not server.ready():
        return False
    try:
        return [p.pid for p in ranks(server)] not in ([], [pid])
    except (ValueError, psutil.NoSuchProcess):  # no rank, or one that is exiting
        return False


class load:
    """Clients that check every score; every request must get exactly one correct answer."""

    def __init__(self, server: ServerProcess, expected: list[list[float]], clients: int) -> None:
        self.server, self.expected, self.clients = server, expected, clients
        self.answered: Counter[int] = Counter()
        self.going = True

    def __enter__(self) -> Counter[int]:
        self.threads = ThreadPoolExecutor(self.clients)
        self.tasks = [self.threads.submit(self.ask, client) for client in range(self.clients)]
        until("at work", lambda: sum(self.answered.values()) > self.clients)
        return self.answered

    def ask(self, client: int) -> None:
        number = client
        with httpx.Client(base_url=self.server.url) as http:
            while self.going:
                number += self.clients
                check_scores(self.server, number, self.expected, http)
                self.answered[client] += 1

    def __exit__(self, *_: object) -> None:
        self.going = False
        self.threads.shutdown()
        for task in self.tasks:
            task.result()


@pytest.mark.slow
def test_malformed_requests_against_a_group_under_load(server: ServerProcess, expected: list[list[float]]) -> None:
    """200 malformed requests among valid ones: no hang, no other request fails, the same scores at the end."""
    before = server.metric("plaudit_worker_restarts_total")
    with load(server, expected, 4):
        for number in range(200):
            data = MALFORMED[number % len(MALFORMED)]
            reply = server.http.post("/v1/rewards", content=data, headers={"content-type": "application/json"})
            failed = reply.status_code == 200 and "error" in reply.json()["items"][0]
            assert 400 <= reply.status_code < 500 or failed, reply.text
    for number in range(40):
        check_scores(server, number, expected)
    assert server.metric("plaudit_worker_restarts_total") == before


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rank", "blow"),
    [
        ("server", 1, signal.SIGKILL), ("server", 1, signal.SIGSTOP), ("staged", 1, signal.SIGKILL),
        pytest.param("server", 0, signal.SIGKILL, marks=LONG), pytest.param("server", 0, signal.SIGSTOP, marks=LONG),
        pytest.param("staged", 0, signal.SIGKILL, marks=LONG), pytest.param("staged", 0, signal.SIGSTOP, marks=LONG),
        pytest.param("staged", 1, signal.SIGSTOP, marks=LONG),
    ],
)  # fmt: skip
def test_each_rank_killed_and_stopped_under_load(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None], expected: list[list[float]],
    shape: str, rank: int, blow: signal.Signals,
) -> None:  # fmt: skip
    server: ServerProcess = request.getfixturevalue(shape)
    until("ready", server.ready)
    with load(server, expected, CLIENTS) as answered:
        (worker,), (other,) = server.workers(), ranks(server)
        began = time.monotonic()
        (worker if rank == 0 else other).send_signal(blow)
        until("replaced", lambda: replaced(server, other.pid), 240)
        record_property("ready_seconds", round(time.monotonic() - began, 1))
        done = sum(answered.values())
        until("at work", lambda: sum(answered.values()) > done + CLIENTS)
    record_property("clients", CLIENTS)
    record_property("answered", sum(answered.values()))
    exiting = [p for p in (worker, other) if p.is_running()]
    assert not psutil.wait_procs(exiting, timeout=60)[1]


def own_ranks() -> list[psutil.Process]:
    """The rank processes of this process; those of its servers are in other process groups."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if each.name() == "plaudit-ranks" and os.getpgid(each.pid) == os.getpgrp()]


@pytest.mark.slow
def test_a_ranked_engine_samples_like_one_process_and_raises_if_a_rank_dies() -> None:
    """The samples equal those of one process; a dead rank raises an error instead of hanging."""
    prompts, params = ["7+8+4=", "3+9="], SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=40)
    expected = Engine.load("sums-policy", device="cpu").generate(prompts, params)
    with ranked_engine("sums-policy", 2, device="cpu") as engine:
        samples = engine.generate(prompts, params)
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
        (other,) = own_ranks()
    assert not other.is_running()
    context = ranked_engine("sums-policy", 2, device="cpu")
    engine = context.__enter__()
    (other,) = own_ranks()
    other.kill()
    with pytest.raises(RankLost) as lost:
        engine.generate(prompts, params)
    assert not context.__exit__(RankLost, lost.value, None)


def start(directory: Path, port: int, rank: int, *arguments: str, world: int = 2) -> tuple[ForkedCommand, Path]:
    """Start one rank of `plaudit serve` as torchrun would; return it and its stderr file."""
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    output, errors = (directory / f"{name}-{rank}" for name in ("output", "errors"))
    environment = {**variables, "MASTER_PORT": str(port)}
    return ForkedCommand(["serve", *arguments], output, environment, errors, directory), errors


def ended(child: ForkedCommand, errors: Path, seconds: float = 120) -> tuple[int, str]:
    """Its exit code and its stderr, without log lines."""
    try:
        code = child.wait(seconds)
    finally:
        child.kill()
    text = errors.read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("{")]
    assert not any("Traceback" in line for line in lines), text
    return code, "\n".join(lines)


@pytest.mark.slow
def test_the_rendezvous_directory_stays_until_the_slowest_rank_has_joined(tmp_path: Path) -> None:
    fork_ranks(2, ["-m", "tests.serve.rank_meet", str(tmp_path)], tmp_path)


def test_a_wrong_world_size_is_rejected_on_every_rank(tmp_path: Path) -> None:
    children = [start(tmp_path, 1, rank, "--model", "sums", "--tensor-parallel", "2", world=3) for rank in (0, 1)]
    for child in children:
        code, line = ended(*child)
        assert code == 2
        assert "WORLD_SIZE is 3, but tensor_parallel = 2" in line


@pytest.mark.slow
def test_ranks_with_different_weights_exit_with_one_line_each(tmp_path: Path) -> None:
    for rank in (0, 1):
        copytree(EMBEDDED / "sums", tmp_path / str(rank) / "model")
    file = tmp_path / "1" / "model" / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    port = free_port()
    options = ("--model", "sums=model", "--tensor-parallel", "2", "--port", "0")
    children = [start(tmp_path / str(rank), port, rank, *options) for rank in (0, 1)]
    for rank, child in enumerate(children):
        code, line = ended(*child)
        assert code == 2 if rank == 0 else code != 0
        assert "the ranks have different weights in" in line
        assert "copy the same model to every node" in line


@pytest.mark.slow
def test_a_stage_with_damaged_weights_is_reported_with_its_rank(tmp_path: Path) -> None:
    """Only this stage can detect it; rank 0 sees a broken connection and receives the reason."""
    file = copytree(EMBEDDED / "sums", tmp_path / "model") / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][:] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    arguments = ("--model", f"sums={tmp_path / 'model'}", "--pipeline-parallel", "2")
    with ServerProcess(None, *arguments, wait=False) as failing:
        assert failing.process.wait(120) == 2
        assert (
            "cannot serve sums: rank 1 of 2: LlamaForSequenceClassification gives values that are not" in failing.log()
        )


@pytest.mark.slow
def test_a_missing_node_is_reported_with_its_rank(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('[models.sums]\npath = "sums"\ntensor_parallel = 2\njoin_seconds = 2.0\n')
    code, line = ended(*start(tmp_path, free_port(), 0, "--config", str(config), "--port", "0"))
    assert code == 2
    assert "rank 1 of 2 did not join within 2 s: check that its node is up" in line


@pytest.mark.slow
def test_torchrun_starts_and_stops_the_ranks(expected: list[list[float]]) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    with ServerProcess(None, "--model", "sums", "--tensor-parallel", "2", launcher=launcher) as server:
        for number in range(5):
            check_scores(server, number, expected)
        tree = psutil.Process(server.process.pid).children(recursive=True)
        (front,) = (p for p in tree if p.ppid() == server.process.pid and p.environ().get("RANK") == "0")
        front.terminate()
        assert server.process.wait(60) == 0
        assert not psutil.wait_procs(tree, timeout=60)[1]


@pytest.mark.slow
@LONG
def test_an_indivisible_model_shape_is_rejected_before_serving() -> None:
    with ServerProcess({"models": {"sums": {"path": "sums", "tensor_parallel": 3}}}, wait=False) as failing:
        assert failing.process.wait(120) == 2
        assert "/ 3 = " in failing.log()
