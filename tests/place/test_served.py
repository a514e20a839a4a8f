"""Training on third-party engines: runs on a fake SGLang server, probes, killed servers, invalid recipes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from plaudit.errors import ConfigError, RunError
from plaudit.place.engines import http_engine
from plaudit.place.engines.engine_server import EngineServer, free_port
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, recipe


def server(log: Path, fault: str = "") -> EngineServer:
    port = free_port()
    command = [sys.executable, "-m", "tests.place.fake_sglang", str(port), "sums-policy"]
    return EngineServer("SGLang", command, port, log, {"FAKE_SGLANG": fault, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(tmp_path_factory.mktemp("sglang") / "log") as made:
        made.wait_ready(120)
        yield made.url


def train(directory: Path, viewer: Silent, **tables: Any) -> None:
    tree = recipe(
        **{"placement": {"name": "disaggregated"}, "train": {"steps": 3}, "algorithm": {"name": "grpo"}, **tables}
    )
    with Run(directory, tree) as run:
        RlTraining(tree, run, viewer).fit()


def engine(*urls: str, **keys: Any) -> dict[str, Any]:
    return {"name": "sglang", "url": tuple(urls), **keys}


@pytest.mark.slow
def test_a_run_reports_the_mismatch_between_engine_and_learner(url: str, tmp_path: Path) -> None:
    viewer = Silent()
    train(tmp_path / "run", viewer, engine=engine(url, probe=1e-3))
    assert len(viewer.seen) == 3
    for metrics in viewer.seen:
        assert metrics["mismatch/abs_max"] < 1e-4
        assert metrics["probe/abs_max"] < 1e-4
        assert metrics["probe/follows"] == pytest.approx(1, abs=0.05)
        assert metrics["publish/bytes"] > 0
    assert not viewer.warnings


@pytest.mark.slow
def test_a_run_whose_engines_are_not_updated_fails(url: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="sent version 1 and its log-probs have moved by"):
        train(tmp_path / "run", Silent(), engine=engine(url, update=False))


@pytest.mark.slow
def test_a_run_on_an_engine_that_stays_stale_fails_without_a_gradient(url: str, tmp_path: Path) -> None:
    """Equal rewards give no gradient, so that the probe detects nothing; the server's version does."""
    with pytest.raises(RunError, match="restarted 3 times without any sample"):
        train(
            tmp_path / "run", Silent(), engine=engine(url, update=False), reward={"rule": "exact", "answer": "(never)"}
        )


@pytest.mark.slow
def test_a_killed_server_loses_nothing_and_is_stale_when_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_engine, "AWAY", 1.0)
    with server(tmp_path / "0") as first, server(tmp_path / "1") as second:
        first.wait_ready(120)
        second.wait_ready(120)
        port = int(second.url.rpartition(":")[2])

        class Killing(Silent):
            again: EngineServer | None = None

            def step(self, step: int, metrics: dict[str, float]) -> None:
                super().step(step, metrics)
                if step == 1:
                    (process,) = psutil.Process(second._process.pid).children()
                    threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
                if step == 3:
                    command = [sys.executable, "-m", "tests.place.fake_sglang", str(port), "sums-policy"]
                    self.again = EngineServer("SGLang", command, port, tmp_path / "2", {"OMP_NUM_THREADS": "1"})
                    self.again.wait_ready(120)

        viewer = Killing()
        try:
            train(tmp_path / "run", viewer, engine=engine(first.url, second.url), train={"steps": 6})
        finally:
            if viewer.again is not None:
                viewer.again.close()
    assert len(viewer.seen) == 6
    assert all(
        seen["mismatch/abs_max"] < 1e-4 for seen in viewer.seen
    )  # no sample is from the restarted server's initial weights
    assert any("answers again" in warning for warning in viewer.warnings)


@pytest.mark.slow
def test_async_training_works_with_a_server(url: str, tmp_path: Path) -> None:
    viewer = Silent()
    placement = {"name": "async", "staleness": 1}
    train(tmp_path / "run", viewer, engine=engine(url), placement=placement, train={"steps": 6})
    assert len(viewer.seen) == 6


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"engine": {"url": "http://127.0.0.1:1"}}, r'engine.url is for a server, and engine.name = "core"'),
        ({"engine": {"name": "vllm"}}, "needs exactly one of engine.url"),
        ({"engine": {"name": "vllm", "url": "http://h", "python": "python"}}, "needs exactly one of engine.url"),
        ({"engine": {"name": "sglang", "python": "python"}}, "start them and set engine.url"),
        (
            {"engine": engine("http://h"), "placement": {"name": "colocated"}},
            'set placement.name = "disaggregated" or "async"',
        ),
        (
            {"engine": engine("http://h"), "placement": {"name": "disaggregated", "channel": "shared"}},
            'placement.channel = "disk", not "shared"',
        ),
        (
            {
                "engine": engine("http://h"),
                "placement": {"name": "disaggregated"},
                "sampling": {"max_tokens": 8, "top_p": 0.9},
            },
            "top_p = 0.9",
        ),
    ],
)
def test_invalid_engine_settings_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)


def test_head_sizes_unsupported_by_vllm_are_rejected_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention heads of \[20\], and vLLM on a CPU supports 32"):
        train(tmp_path / "run", Silent(), engine={"name": "vllm", "python": "python"})
