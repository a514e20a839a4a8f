"""SGLang's HTTP API, as recorded, with a core engine behind it: samples, weights via disk, probes, faults."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.errors import EngineLost, ProbeFailed, RequestError, StaleWeights, WeightsRefused
from plaudit.models import load_any
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights
from plaudit.place.engines import http_engine
from plaudit.place.engines.engine_server import EngineServer, free_port
from plaudit.place.engines.probe import Probe, probe_contexts
from plaudit.place.engines.sglang_engine import SglangEngine

MODEL = "sums-policy"


def started(log: Path, fault: str = "") -> SglangEngine:
    port = free_port()
    server = EngineServer(
        "SGLang", [sys.executable, "-m", "tests.place.fake_sglang", str(port), MODEL], port, log,
        {"FAKE_SGLANG": fault, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    server.wait_ready(120)
    return SglangEngine(server.url, stop_ids=[eos()], server=server, timeout=60)


def eos() -> int:
    return int(load_any(MODEL).tokenizer.eos_token_id)


def other(seed: int = 1) -> Any:
    """The policy with slightly perturbed weights."""
    loaded = load_any(MODEL)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    return loaded


def publish(engine: SglangEngine, channel: DiskChannel, module: Any, version: int) -> None:
    with engine.paused():
        channel.publish(Weights.of(module), version, [engine.wire])
        engine.new_version(version)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    with started(tmp_path_factory.mktemp("sglang") / "log") as engine:
        yield engine


def trainer(loaded: Any) -> Any:
    core = Engine(loaded.module, loaded.tokenizer)
    return lambda context: core.score([list(context)], columns=range(len(loaded.tokenizer)), logprobs=True)[0]


def prompts() -> list[list[int]]:
    tokenizer = load_any(MODEL).tokenizer
    return [tokenizer.encode(text) for text in ("3+4+5=", "9+1=", "2+2+2+2=")]


def test_generation_needs_published_weights_and_then_matches_the_core_engine(
    engine: SglangEngine, tmp_path: Path
) -> None:
    prompt_ids = prompts()
    params = [SamplingParams(n=2, temperature=0.7, max_tokens=12, seed=7 + 10 * i) for i in range(3)]
    with pytest.raises(StaleWeights, match="no weights yet"):
        engine.generate(prompt_ids, params)
    new = other()
    publish(engine, DiskChannel(tmp_path / "weights"), new.module, 4)
    core = Engine(new.module, new.tokenizer)
    samples = engine.generate(prompt_ids, params)
    assert [(s.group, s.index, s.versions[0]) for s in samples] == [(g, i, 4) for g in range(3) for i in range(2)]
    for sample in samples:
        # A request for n samples is sent as n requests, each with its own seed.
        seed = 7 + 10 * sample.group + sample.index
        alone = core.generate([prompt_ids[sample.group]], [SamplingParams(temperature=0.7, max_tokens=12, seed=seed)])[
            0
        ]
        assert sample.token_ids == alone.token_ids
        assert sample.text == alone.text
        assert sample.finish_reason == alone.finish_reason
        assert np.allclose(sample.logprobs, alone.logprobs, atol=1e-5)
        assert np.isnan(sample.raw_logprobs).all()  # the API does not return them
    greedy = engine.generate(prompt_ids, [SamplingParams(temperature=0, max_tokens=12)] * 3)
    for sample, alone in zip(
        greedy, core.generate(prompt_ids, SamplingParams(temperature=0, max_tokens=12)), strict=True
    ):
        assert sample.token_ids == alone.token_ids
        assert sample.logprobs == alone.logprobs
        assert np.allclose(sample.raw_logprobs, alone.raw_logprobs, atol=1e-5)
    engine.sleep()
    engine.wake()
    assert engine.generate(prompt_ids, params)[0].token_ids == samples[0].token_ids
    assert engine.healthy()


def test_unsupported_sampling_tokens_and_channels_are_rejected(engine: SglangEngine) -> None:
    engine.new_version(engine.state().version)
    with pytest.raises(RequestError, match=r"top_p = 0.9.*before|before top_p = 0.9"):
        engine.generate(prompts()[:1], [SamplingParams(top_p=0.9)])
    with pytest.raises(RequestError, match="out of vocabulary"):
        engine.generate([[99999]], [SamplingParams(max_tokens=1)])
    with pytest.raises(WeightsRefused, match=r'placement\.channel = "disk"'):
        SharedChannel().publish(Weights.of(other().module), 9, [engine.wire])


def test_a_request_past_its_deadline_is_aborted(engine: SglangEngine) -> None:
    engine.new_version(engine.state().version)
    engine.pause()
    try:
        (sample,) = engine.generate(prompts()[:1], [SamplingParams(max_tokens=4, deadline=0.5)])
    finally:
        engine.resume()
    assert (sample.finish_reason, sample.token_ids) == ("abort", ())
    assert sample.error is not None


def test_the_probe_passes_after_an_update(engine: SglangEngine, tmp_path: Path) -> None:
    channel, probe = DiskChannel(tmp_path / "weights"), Probe(probe_contexts(prompts(), 128), 1e-3)
    for version in range(10, 13):
        new = other(version)
        publish(engine, channel, new.module, version)
        metrics = probe.check(engine, trainer(new), version)
        assert metrics["probe/abs_max"] < 1e-4
    assert metrics["probe/follows"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("fault", ["ignore-updates", pytest.param("old-kv", marks=pytest.mark.slow)])
def test_the_probe_fails_when_new_weights_are_not_used(fault: str, tmp_path: Path) -> None:
    """Even if they differ by less than the tolerance."""
    probe = Probe(probe_contexts(prompts(), 128), 10.0)
    with started(tmp_path / "log", fault) as engine:
        channel = DiskChannel(tmp_path / "weights")
        publish(engine, channel, load_any(MODEL).module, 0)
        probe.check(engine, trainer(load_any(MODEL)), 0)
        new = other()
        publish(engine, channel, new.module, 1)
        assert engine.state().version == 1  # the server claims the new version
        with pytest.raises(ProbeFailed, match="sent version 1"):
            probe.check(engine, trainer(new), 1)
        strict = Probe(probe_contexts(prompts(), 128), 1e-3)
        with pytest.raises(ProbeFailed, match=r"engine\.probe"):
            strict.check(engine, trainer(new), 1)


@pytest.mark.slow
def test_a_restarted_server_is_stale_and_a_dead_server_is_lost(tmp_path: Path) -> None:
    prompt_ids, params = prompts(), [SamplingParams(max_tokens=8, seed=1)] * 3
    with started(tmp_path / "log") as engine:
        publish(engine, DiskChannel(tmp_path / "weights"), other().module, 2)
        engine.generate(prompt_ids, params)
        # A server restarted at the same address does not have the published weights.
        port = int(engine.url.rpartition(":")[2])
        assert engine.server is not None
        engine.server.close()
        restarted = EngineServer(
            "SGLang", [sys.executable, "-m", "tests.place.fake_sglang", str(port), MODEL], port, tmp_path / "log2"
        )
        with restarted:
            restarted.wait_ready(120)
            engine.server = restarted
            with pytest.raises(StaleWeights, match="version None, expected 2"):
                engine.generate(prompt_ids, params)
        with pytest.raises(EngineLost, match="ended with exit"):
            engine.generate(prompt_ids, params)


@pytest.mark.slow
def test_a_stopped_server_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "BEAT_EVERY", 0.2)
    monkeypatch.setattr(http_engine, "BEAT_SECONDS", 1.0)
    with started(tmp_path / "log") as engine:
        publish(engine, DiskChannel(tmp_path / "weights"), other().module, 2)
        supervisor = psutil.Process(engine.server._process.pid)  # type: ignore[union-attr]
        (server,) = supervisor.children()
        engine.pause()
        threading.Timer(0.5, lambda: os.kill(server.pid, signal.SIGSTOP)).start()
        with pytest.raises(EngineLost, match="does not answer: ReadTimeout"):
            engine.generate(prompts(), [SamplingParams(max_tokens=4)] * 3)
        os.kill(server.pid, signal.SIGCONT)
