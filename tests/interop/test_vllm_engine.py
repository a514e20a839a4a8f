"""Real vLLM as a rollout engine: the same tokens and log-probs as the core, weight updates by every channel, failures.

Most tests share one server, with tied embeddings; a training run starts a second one, without tied embeddings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.errors import ProbeFailed, RequestError, RunError, StaleWeights, WeightsRefused
from plaudit.models import load_any, new_llama, save
from plaudit.place.channels.channel import Channel
from plaudit.place.channels.collective import CollectiveChannel
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights
from plaudit.place.engines.probe import Probe, probe_contexts
from plaudit.place.engines.vllm_engine import VllmEngine
from plaudit.place.engines.vllm_server import VllmServer
from plaudit.records import Sample
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from tests.interop.environments import ROOT
from tests.train.rl_world import Silent, recipe

pytestmark = pytest.mark.interop
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
OPTIONS = ("--enforce-eager", "--max-num-seqs", "32")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
START_SECONDS = 400.0
TOLERANCE = 1e-3
TOKENIZER = load_any("sums-policy").tokenizer


def model(seed: int, tied: bool) -> Any:
    """A model with heads of 32 dimensions, which vLLM's CPU attention requires."""
    module = new_llama(
        "policy", vocab_size=len(TOKENIZER), hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=128,
        max_positions=512, seed=seed, tie_embeddings=tied, pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=TOKENIZER.bos_token_id, eos_token_id=TOKENIZER.eos_token_id,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # so that the weights affect the probabilities
    return module


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".venv-vllm" / ".installed").exists():
        pytest.skip(".venv-vllm is not there: `make interop` makes it, and runs this")
    root = tmp_path_factory.mktemp("vllm")
    save(model(1, tied=True), TOKENIZER, root / "tied")
    save(model(1, tied=False), TOKENIZER, root / "untied")
    return root


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[VllmEngine]:
    options = (*OPTIONS, "--kv-cache-memory-bytes", str(64 << 20))
    server = VllmServer(
        str(PYTHON), directory / "tied", directory / "log", dtype="float32", options=options, environment=ENVIRONMENT
    )
    with server:
        server.wait_ready(START_SECONDS)
        with VllmEngine(server.url, stop_ids=[TOKENIZER.eos_token_id], server=server, timeout=300, raw=True) as client:
            yield client


def publish(engine: VllmEngine, channel: Channel, module: Any, version: int) -> None:
    with engine.paused():
        channel.publish(Weights.of(module), version, [engine.wire])
        engine.new_version(version)


def next_version(engine: VllmEngine) -> int:
    version = engine.state().version
    return 0 if version is None else version + 1


def prompts() -> list[list[int]]:
    """Four prompts; the last is longer than a block of vLLM's prefix cache on a CPU."""
    rng = np.random.default_rng(3)
    return [rng.integers(4, len(TOKENIZER), n).tolist() for n in (1, 5, 40, 300)]


def raw(core: Engine, sample: Sample) -> np.ndarray:
    return core.logprobs([[*sample.prompt_ids, *sample.token_ids]])[0][len(sample.prompt_ids) - 1 :]


def trainer(module: Any) -> Callable[[Sequence[int]], np.ndarray]:
    core = Engine(module, TOKENIZER)
    return lambda context: core.score([list(context)], columns=range(len(TOKENIZER)), logprobs=True)[0]


def check_equal(engine: VllmEngine, module: Any) -> None:
    """Greedy tokens and log-probs equal those of the core with this module."""
    core = Engine(module, TOKENIZER)
    params = [SamplingParams(temperature=0, max_tokens=12)] * len(prompts())
    for ours, theirs in zip(core.generate(prompts(), params), engine.generate(prompts(), params), strict=True):
        assert theirs.token_ids == ours.token_ids
        assert theirs.finish_reason == ours.finish_reason
        assert theirs.text == ours.text
        assert np.allclose(theirs.raw_logprobs, ours.raw_logprobs, atol=TOLERANCE)
        assert theirs.logprobs == ours.logprobs


def test_engine_is_stale_until_it_gets_weights(engine: VllmEngine) -> None:
    assert engine.state().version is None
    with pytest.raises(StaleWeights, match="no weights yet"):
        engine.generate([[5]], [SamplingParams(max_tokens=1)])


@pytest.mark.parametrize("channel", ["disk", "shared", "collective"])
def test_engine_uses_the_weights_from_every_channel(engine: VllmEngine, channel: str, tmp_path: Path) -> None:
    """The head is tied to the embedding: a server can accept such an update and still use the old head."""
    transport: Channel = {
        "disk": lambda: DiskChannel(tmp_path), "shared": SharedChannel, "collective": CollectiveChannel,
    }[channel]()  # fmt: skip
    probe = Probe(probe_contexts(prompts(), 512), TOLERANCE)
    try:
        for seed in (1, 2, 3):
            new = model(seed, tied=True)
            publish(engine, transport, new, version := next_version(engine))
            check_equal(engine, new)
            metrics = probe.check(engine, trainer(new), version)
        assert metrics["probe/follows"] == pytest.approx(1, abs=1e-3)
    finally:
        transport.close()


def test_raw_and_sampled_log_probs_seeds_and_stop_strings(engine: VllmEngine) -> None:
    new = model(2, tied=True)
    publish(engine, SharedChannel(), new, next_version(engine))
    core = Engine(new, TOKENIZER)
    params = [SamplingParams(n=3, temperature=0.6, max_tokens=10, seed=11 + i) for i in range(4)]
    samples = engine.generate(prompts(), params)
    assert [(s.group, s.index) for s in samples] == [(g, i) for g in range(4) for i in range(3)]
    for sample in samples:
        assert np.allclose(sample.raw_logprobs, raw(core, sample), atol=TOLERANCE)
        context = [*sample.prompt_ids]
        for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
            logits = core.score([context], columns=range(len(TOKENIZER)))[0]
            sampled = torch.log_softmax(torch.from_numpy(logits).double() / 0.6, dim=0)
            assert logprob == pytest.approx(float(sampled[token]), abs=TOLERANCE)
            context.append(token)
    again = engine.generate(prompts(), params)
    assert [s.token_ids for s in again] == [s.token_ids for s in samples]
    assert len({s.token_ids for s in samples[6:9]}) > 1  # samples of one prompt have different seeds
    stopping = SamplingParams(temperature=1.0, max_tokens=40, seed=5, n=8, stop=("+",))
    for sample in engine.generate([prompts()[1]], [stopping]):
        assert "+" not in sample.text
        if sample.finish_reason == "stop" and sample.token_ids[-1] != TOKENIZER.eos_token_id:
            assert "+" in TOKENIZER.decode(sample.token_ids)
    with pytest.raises(RequestError, match="out of vocabulary"):
        engine.generate([[999]], [SamplingParams(max_tokens=1)])


def updated_after(
    engine: VllmEngine, contexts: list[list[int]], params: list[SamplingParams], first: Any, then: Any, seconds: float
) -> list[Sample]:
    """Samples started with the weights `first`; the weights `then` are published after `seconds`."""
    publish(engine, SharedChannel(), first, version := next_version(engine))
    samples: list[Sample] = []
    call = threading.Thread(target=lambda: samples.extend(engine.generate(contexts, params)))
    call.start()
    time.sleep(seconds)
    publish(engine, SharedChannel(), then, version + 1)
    call.join(180)
    assert not call.is_alive()
    return samples


def test_paused_requests_keep_their_tokens_and_continue_with_new_weights(engine: VllmEngine) -> None:
    contexts = [[5, 6 + i, 7] for i in range(8)]
    long = [SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)] * len(contexts)
    first, new = model(1, tied=True), model(3, tied=True)
    references = Engine(first, TOKENIZER).generate(contexts, long)
    for power in range(14):  # the server's counters lag: update later and later until all are mid-generation
        samples = updated_after(engine, contexts, long, first, new, 0.05 * 1.5**power)
        pairs = [(sample.token_ids, reference.token_ids) for sample, reference in zip(samples, references, strict=True)]
        if all(ids != full and ids[:2] == full[:2] for ids, full in pairs):
            break
    core = Engine(new, TOKENIZER)
    for sample, reference in zip(samples, references, strict=True):
        assert len(sample.token_ids) == 480
        assert set(sample.versions) == {next_version(engine) - 2}, "as old as its oldest token"
        changed = [i for i, (a, b) in enumerate(zip(sample.token_ids, reference.token_ids, strict=True)) if a != b]
        assert changed, "it was not finished when new weights came"
        assert changed[0] > 0, "it keeps what the old weights wrote"
        # From there on the new weights continue it: its KV cache was recomputed.
        rest = slice(changed[0] + 1, None)
        assert np.allclose(sample.raw_logprobs[rest], raw(core, sample)[rest], atol=TOLERANCE)
    check_equal(engine, new)


def test_cached_prefix_is_recomputed_after_a_weight_update(engine: VllmEngine) -> None:
    channel = SharedChannel()
    publish(engine, channel, model(1, tied=True), next_version(engine))
    check_equal(engine, model(1, tied=True))
    version = next_version(engine)
    new = model(2, tied=True)
    probe = Probe([prompts()[3]], TOLERANCE)
    channel.publish(Weights.of(new), version, [engine.wire])  # without clearing the cache
    engine.new_version(version)
    with pytest.raises(ProbeFailed, match="does not use these weights"):
        probe.check(engine, trainer(new), version)
    engine.forget()
    check_equal(engine, new)


def test_incomplete_weights_are_rejected(engine: VllmEngine) -> None:
    tensors = {name: tensor for name, tensor in model(1, tied=True).state_dict().items() if "layers.1" not in name}
    with pytest.raises(WeightsRefused, match="another layout"):
        SharedChannel().publish(Weights(tensors), next_version(engine), [engine.wire])
    publish(engine, SharedChannel(), model(1, tied=True), next_version(engine))
    check_equal(engine, model(1, tied=True))


def test_engine_is_unchanged_after_sleep_and_wake(engine: VllmEngine) -> None:
    engine.sleep()
    engine.wake()
    check_equal(engine, model(1, tied=True))
    assert engine.healthy()


def train(directory: Path, viewer: Silent, **tables: Any) -> None:
    config = recipe(
        placement={"name": "disaggregated"},
        train={"steps": 3, "lr": 1e-3},
        sampling={"max_tokens": 12},
        **tables,
    )
    with Run(directory, config) as run:
        RlTraining(config, run, viewer).fit()


def test_run_reports_the_log_prob_mismatch_and_fails_without_weight_updates(
    engine: VllmEngine, directory: Path, tmp_path: Path
) -> None:
    viewer = Silent()
    # The reward differs between answers: otherwise the weights would not change and updates could not be detected.
    common: dict[str, Any] = {"model": {"path": str(directory / "tied")}, "reward": {"path": "sums"}}
    train(tmp_path / "run", viewer, engine={"name": "vllm", "url": engine.url, "probe": TOLERANCE}, **common)
    assert len(viewer.seen) == 3
    for metrics in viewer.seen:
        assert metrics["mismatch/abs_max"] < TOLERANCE
        assert metrics["probe/abs_max"] < TOLERANCE
    with pytest.raises(RunError, match="does not use these weights"):
        train(tmp_path / "off", Silent(), engine={"name": "vllm", "url": engine.url, "update": False}, **common)


def test_run_starts_and_stops_its_own_vllm_server(directory: Path, tmp_path: Path) -> None:
    """The model has no tied embeddings."""
    viewer = Silent()
    table = {
        "name": "vllm", "python": str(PYTHON), "options": OPTIONS, "environment": ENVIRONMENT, "probe": TOLERANCE,
        "kv_bytes": 64 << 20,
    }  # fmt: skip
    before = {p.pid for p in psutil.process_iter() if _is_vllm(p)}
    train(
        tmp_path / "run", viewer, engine=table, model={"path": str(directory / "untied")},
        reward={"path": "sums"},
    )  # fmt: skip
    assert all(metrics["mismatch/abs_max"] < TOLERANCE for metrics in viewer.seen)
    assert any(metrics.get("probe/follows", 0) > 0.9 for metrics in viewer.seen)
    assert (tmp_path / "run" / "vllm-0.log").exists()
    assert {p.pid for p in psutil.process_iter() if _is_vllm(p)} == before


def _is_vllm(process: psutil.Process) -> bool:
    try:
        return str(PYTHON) in process.cmdline()
    except psutil.Error:
        return False
