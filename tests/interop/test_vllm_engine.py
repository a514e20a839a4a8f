"""Real vLLM as a rollout engine: the core's tokens and log-probs, new weights by every channel, and failures.

Most tests use one server, with tied embeddings; a second one, without, is started by a training run itself.
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
    """Heads of 32, as vLLM's CPU attention needs them."""
    module = new_llama(
        "policy", vocab_size=len(TOKENIZER), hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=128,
        max_positions=512, seed=seed, tie_embeddings=tied, pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=TOKENIZER.bos_token_id, eos_token_id=TOKENIZER.eos_token_id,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # so that weights matter to what is likely
    return module


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".venv-vllm" / ".installed").exists():
        pytest.skip(".venv-vllm is not there: `make interop` makes it, and runs this")
    found = tmp_path_factory.mktemp("vllm")
    save(model(1, tied=True), TOKENIZER, found / "tied")
    save(model(1, tied=False), TOKENIZER, found / "untied")
    return found


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[VllmEngine]:
    options = (*OPTIONS, "--kv-cache-memory-bytes", str(64 << 20))
    server = VllmServer(
        str(PYTHON), directory / "tied", directory / "log", dtype="float32", options=options, environment=ENVIRONMENT
    )
    with server:
        server.wait_ready(START_SECONDS)
        with VllmEngine(server.url, stop_ids=[TOKENIZER.eos_token_id], server=server, timeout=300, raw=True) as made:
            yield made


def publish(engine: VllmEngine, channel: Channel, module: Any, version: int) -> None:
    with engine.paused():
        channel.publish(Weights.of(module), version, [engine.wire])
        engine.new_version(version)


def next_version(engine: VllmEngine) -> int:
    version = engine.state().version
    return 0 if version is None else version + 1


def prompts() -> list[list[int]]:
    """The last is longer than a block of vLLM's prefix cache on a CPU."""
    draw = np.random.default_rng(3)
    return [draw.integers(4, len(TOKENIZER), n).tolist() for n in (1, 5, 40, 300)]


def raw(core: Engine, sample: Sample) -> np.ndarray:
    return core.logprobs([[*sample.prompt_ids, *sample.token_ids]])[0][len(sample.prompt_ids) - 1 :]


def trainer(module: Any) -> Callable[[Sequence[int]], np.ndarray]:
    core = Engine(module, TOKENIZER)
    return lambda context: core.score([list(context)], columns=range(len(TOKENIZER)), logprobs=True)[0]


def check_equal(engine: VllmEngine, module: Any) -> None:
    """Greedy tokens and log-probs are those of the core on this module."""
    core = Engine(module, TOKENIZER)
    params = [SamplingParams(temperature=0, max_tokens=12)] * len(prompts())
    for ours, theirs in zip(core.generate(prompts(), params), engine.generate(prompts(), params), strict=True):
        assert theirs.token_ids == ours.token_ids
        assert theirs.finish_reason == ours.finish_reason
        assert theirs.text == ours.text
        assert np.allclose(theirs.raw_logprobs, ours.raw_logprobs, atol=TOLERANCE)
        assert theirs.logprobs == ours.logprobs


def test_it_is_stale_until_weights_have_come(engine: VllmEngine) -> None:
    assert engine.state().version is None
    with pytest.raises(StaleWeights, match="no weights yet"):
        engine.generate([[5]], [SamplingParams(max_tokens=1)])


@pytest.mark.parametrize("channel", ["disk", "shared", "collective"])
def test_every_channel_brings_weights_that_are_used(engine: VllmEngine, channel: str, tmp_path: Path) -> None:
    """The head is tied to the embedding: the trap in which the server says yes and uses the old one."""
    made: Channel = {
        "disk": lambda: DiskChannel(tmp_path), "shared": SharedChannel, "collective": CollectiveChannel,
    }[channel]()  # fmt: skip
    probe = Probe(probe_contexts(prompts(), 512), TOLERANCE)
    try:
        for seed in (1, 2, 3):
            new = model(seed, tied=True)
            publish(engine, made, new, version := next_version(engine))
            check_equal(engine, new)
            found = probe.check(engine, trainer(new), version)
        assert found["probe/follows"] == pytest.approx(1, abs=1e-3)
    finally:
        made.close()


def test_both_log_probs_and_seeds_and_stops(engine: VllmEngine) -> None:
    new = model(2, tied=True)
    publish(engine, SharedChannel(), new, next_version(engine))
    core = Engine(new, TOKENIZER)
    cold = [SamplingParams(n=3, temperature=0.6, max_tokens=10, seed=11 + i) for i in range(4)]
    found = engine.generate(prompts(), cold)
    assert [(s.group, s.index) for s in found] == [(g, i) for g in range(4) for i in range(3)]
    for sample in found:
        assert np.allclose(sample.raw_logprobs, raw(core, sample), atol=TOLERANCE)
        context = [*sample.prompt_ids]
        for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
            logits = core.score([context], columns=range(len(TOKENIZER)))[0]
            sampled = torch.log_softmax(torch.from_numpy(logits).double() / 0.6, dim=0)
            assert logprob == pytest.approx(float(sampled[token]), abs=TOLERANCE)
            context.append(token)
    again = engine.generate(prompts(), cold)
    assert [s.token_ids for s in again] == [s.token_ids for s in found]
    assert len({s.token_ids for s in found[6:9]}) > 1  # samples of one prompt have seeds of their own
    stopping = SamplingParams(temperature=1.0, max_tokens=40, seed=5, n=8, stop=("+",))
    for sample in engine.generate([prompts()[1]], [stopping]):
        assert "+" not in sample.text
        if sample.finish_reason == "stop" and sample.token_ids[-1] != TOKENIZER.eos_token_id:
            assert "+" in TOKENIZER.decode(sample.token_ids)
    with pytest.raises(RequestError, match="out of vocabulary"):
        engine.generate([[999]], [SamplingParams(max_tokens=1)])


def updated_after(
    engine: VllmEngine, asked: list[list[int]], params: list[SamplingParams], first: Any, then: Any, seconds: float
) -> list[Sample]:
    """Samples begun with the first weights; after so many seconds the others come."""
    publish(engine, SharedChannel(), first, old := next_version(engine))
    found: list[Sample] = []
    call = threading.Thread(target=lambda: found.extend(engine.generate(asked, params)))
    call.start()
    time.sleep(seconds)
    publish(engine, SharedChannel(), then, old + 1)
    call.join(180)
    assert not call.is_alive()
    return found


def test_paused_requests_keep_their_tokens_and_go_on_with_new_weights(engine: VllmEngine) -> None:
    asked = [[5, 6 + i, 7] for i in range(8)]
    long = [SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)] * len(asked)
    first, new = model(1, tied=True), model(3, tied=True)
    before = Engine(first, TOKENIZER).generate(asked, long)
    for power in range(14):  # the server's own counts lag behind: later and later, until all are in the middle
        found = updated_after(engine, asked, long, first, new, 0.05 * 1.5**power)
        pairs = [(sample.token_ids, alone.token_ids) for sample, alone in zip(found, before, strict=True)]
        if all(ids != whole and ids[:2] == whole[:2] for ids, whole in pairs):
            break
    core = Engine(new, TOKENIZER)
    for sample, alone in zip(found, before, strict=True):
        assert len(sample.token_ids) == 480
        assert set(sample.versions) == {next_version(engine) - 2}, "as old as its oldest token"
        changed = [i for i, (a, b) in enumerate(zip(sample.token_ids, alone.token_ids, strict=True)) if a != b]
        assert changed, "it was not finished when new weights came"
        assert changed[0] > 0, "it keeps what the old weights wrote"
        # From there on it is the new weights' own continuation: its KV was computed again.
        rest = slice(changed[0] + 1, None)
        assert np.allclose(sample.raw_logprobs[rest], raw(core, sample)[rest], atol=TOLERANCE)
    check_equal(engine, new)


def test_a_prompt_in_the_prefix_cache_is_read_again_after_an_update(engine: VllmEngine) -> None:
    channel = SharedChannel()
    publish(engine, channel, model(1, tied=True), next_version(engine))
    check_equal(engine, model(1, tied=True))
    version = next_version(engine)
    new = model(2, tied=True)
    probe = Probe([prompts()[3]], TOLERANCE)
    channel.publish(Weights.of(new), version, [engine.wire])  # and the cache is left as it is
    engine.new_version(version)
    with pytest.raises(ProbeFailed, match="does not use these weights"):
        probe.check(engine, trainer(new), version)
    engine.forget()
    check_equal(engine, new)


def test_a_part_of_the_weights_is_refused_and_leaves_it_stale(engine: VllmEngine) -> None:
    tensors = {name: tensor for name, tensor in model(1, tied=True).state_dict().items() if "layers.1" not in name}
    with pytest.raises(WeightsRefused, match="another layout"):
        SharedChannel().publish(Weights(tensors), next_version(engine), [engine.wire])
    publish(engine, SharedChannel(), model(1, tied=True), next_version(engine))
    check_equal(engine, model(1, tied=True))


def test_it_sleeps_and_wakes_as_it_was(engine: VllmEngine) -> None:
    engine.sleep()
    engine.wake()
    check_equal(engine, model(1, tied=True))
    assert engine.healthy()


def train(directory: Path, viewer: Silent, **tables: Any) -> None:
    found = recipe(
        placement={"name": "disaggregated"},
        train={"steps": 3, "lr": 1e-3},
        sampling={"max_tokens": 12},
        **tables,
    )
    with Run(directory, found) as run:
        RlTraining(found, run, viewer).fit()


def test_a_run_on_it_reports_the_difference_and_one_without_updates_ends(
    engine: VllmEngine, directory: Path, tmp_path: Path
) -> None:
    viewer = Silent()
    # A reward that differs from answer to answer: without it nothing is learned, and nothing could be seen to move.
    common: dict[str, Any] = {"model": {"path": str(directory / "tied")}, "reward": {"path": "sums"}}
    train(tmp_path / "run", viewer, engine={"name": "vllm", "url": engine.url, "probe": TOLERANCE}, **common)
    assert len(viewer.seen) == 3
    for seen in viewer.seen:
        assert seen["mismatch/abs_max"] < TOLERANCE
        assert seen["probe/abs_max"] < TOLERANCE
    with pytest.raises(RunError, match="does not use these weights"):
        train(tmp_path / "off", Silent(), engine={"name": "vllm", "url": engine.url, "update": False}, **common)


def test_a_run_starts_its_own_server_and_ends_it(directory: Path, tmp_path: Path) -> None:
    """Without tied embeddings."""
    viewer = Silent()
    own = {
        "name": "vllm", "python": str(PYTHON), "options": OPTIONS, "environment": ENVIRONMENT, "probe": TOLERANCE,
        "kv_bytes": 64 << 20,
    }  # fmt: skip
    before = {p.pid for p in psutil.process_iter() if _is_vllm(p)}
    train(
        tmp_path / "run", viewer, engine=own, model={"path": str(directory / "untied")},
        reward={"path": "sums"},
    )  # fmt: skip
    assert all(seen["mismatch/abs_max"] < TOLERANCE for seen in viewer.seen)
    assert any(seen.get("probe/follows", 0) > 0.9 for seen in viewer.seen)
    assert (tmp_path / "run" / "vllm-0.log").exists()
    assert {p.pid for p in psutil.process_iter() if _is_vllm(p)} == before


def _is_vllm(process: psutil.Process) -> bool:
    try:
        return str(PYTHON) in process.cmdline()
    except psutil.Error:
        return False
