"""Prefill in one pool and decode in another, with KV through shared memory, match the samples of one engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.errors import ConfigError, EngineLost
from plaudit.place.workers.kv_transfer import OpenedParcel, Parcel
from plaudit.place.workers.pool import EnginePool
from plaudit.place.workers.prefill_decode import DecodeEngine, PrefillDecode, PrefillEngine
from plaudit.records import Sample
from plaudit.rl.loop import RlTraining
from tests.core import tiny
from tests.core.test_recurrent import model
from tests.place.rollout_host import RolloutHost
from tests.place.runs import GRPO, samples, small, train
from tests.train.rl_world import recipe


def requests(count: int = 20) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = np.random.default_rng(2)
    prompts = [draw.integers(3, tiny.VOCAB, n).tolist() for n in draw.integers(1, 90, count)]
    return prompts, [SamplingParams(n=2, max_tokens=1 + i % 12, temperature=0.9, seed=i) for i in range(count)]


def prefill(name: str = "p") -> PrefillEngine:
    return PrefillEngine(name, Engine(tiny.model("llama")))


def decode(name: str = "d") -> DecodeEngine:
    return DecodeEngine(name, Engine(tiny.model("llama")))


def check_equal(actual: list[Sample], expected: list[Sample]) -> None:
    assert [(s.group, s.index, s.token_ids) for s in actual] == [(s.group, s.index, s.token_ids) for s in expected]
    assert [s.finish_reason for s in actual] == [s.finish_reason for s in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=5e-6, rtol=0)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_two_pools_match_the_samples_of_one_engine_and_leak_nothing() -> None:
    prompts, params = requests()
    alone = Engine(tiny.model("llama")).generate(prompts, params)
    prefillers, decoders = [prefill("p0"), prefill("p1")], [decode("d0"), decode("d1"), decode("d2")]
    before = open_files()
    actual = PrefillDecode(EnginePool(prefillers), EnginePool(decoders), piece=4).generate(prompts, params)
    check_equal(actual, alone)
    assert not any(sample.extra for sample in actual)
    assert open_files() == before
    assert not any(prefiller._parcels for prefiller in prefillers)
    # The decode engines computed no prompt tokens: at most one token for each generated token.
    drawn = sum(len(sample.token_ids) for sample in actual)
    assert sum(decoder.engine.stats().tokens_computed for decoder in decoders) <= drawn


def test_two_pools_transfer_the_recurrent_states_of_a_hybrid_model() -> None:
    def engine() -> Engine:
        return Engine(model("lfm2"), state_every=16)

    prompts, params = requests(8)
    alone = engine().generate(prompts, params)
    decoders = [DecodeEngine("d0", engine()), DecodeEngine("d1", engine())]
    actual = PrefillDecode(EnginePool([PrefillEngine("p", engine())]), EnginePool(decoders), piece=4).generate(
        prompts, params
    )
    check_equal(actual, alone)
    drawn = sum(len(sample.token_ids) for sample in actual)
    assert sum(decoder.engine.stats().tokens_computed for decoder in decoders) <= drawn


def test_one_chunk_on_one_engine_of_each_kind_matches_bit_for_bit() -> None:
    prompts, _ = requests(6)
    params = [SamplingParams(max_tokens=10, seed=i) for i in range(6)]
    alone = Engine(tiny.model("llama")).generate(prompts, params)
    actual = PrefillDecode(EnginePool([prefill()]), EnginePool([decode()])).generate(prompts, params)
    assert [(s.token_ids, s.logprobs, s.raw_logprobs) for s in actual] == [
        (s.token_ids, s.logprobs, s.raw_logprobs) for s in alone
    ]


def test_a_prompt_with_space_for_one_token_is_finished_by_the_prefill_engine() -> None:
    prompt = [5] * (tiny.SIZES["max_position_embeddings"] - 1)
    params = [SamplingParams(max_tokens=10, seed=1)]
    alone = Engine(tiny.model("llama")).generate([prompt], params)
    check_equal(PrefillDecode(EnginePool([prefill()]), EnginePool([decode()])).generate([prompt], params), alone)


class Dying(DecodeEngine):
    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], begun: list[list[Sample]] | None = None
    ) -> list[Sample]:
        super().generate(prompts, params, begun)
        raise EngineLost(f"{self.name} was killed")


def test_another_decode_engine_reuses_the_kv_of_a_dead_one() -> None:
    prompts, params = requests(8)
    alone = Engine(tiny.model("llama")).generate(prompts, params)
    spare = decode("spare")
    dying = Dying("dying", Engine(tiny.model("llama")))
    actual = PrefillDecode(EnginePool([prefill()]), EnginePool([dying, spare])).generate(prompts, params)
    check_equal(actual, alone)
    assert spare.engine.stats().tokens_computed <= sum(len(s.token_ids) for s in actual)


def test_kv_of_other_weights_is_not_used() -> None:
    prompts, _ = requests(4)
    prefiller, decoder = prefill(), decode()
    torch.nn.init.normal_(next(decoder.engine.decoder.module.parameters()), generator=torch.Generator().manual_seed(1))
    decoder.engine.new_version(1)
    begun = prefiller.generate(prompts, [SamplingParams(max_tokens=1, seed=i) for i in range(4)])
    unfinished = [[s] for s in begun if s.finish_reason == "length"]
    long = [SamplingParams(max_tokens=6, seed=s[0].group) for s in unfinished]
    decoder.generate([list(s[0].prompt_ids) for s in unfinished], long, unfinished)
    assert decoder.engine.stats().tokens_shared == 0


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_parcel_reaches_another_process(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    prompts, _ = requests(1)
    engine = Engine(tiny.model("llama").to(device))
    engine.generate(prompts, [SamplingParams(max_tokens=1, seed=0)])
    parcel = Parcel(engine.export_kv(prompts[0]))
    code = """
import json, sys
import msgspec
from plaudit.core import Engine, SamplingParams
from plaudit.place.workers.kv_transfer import OpenedParcel
from tests.core import tiny
from tests.core.test_recurrent import model
given = OpenedParcel(msgspec.msgpack.decode(sys.stdin.buffer.read()))
engine = Engine(tiny.model("llama").to(sys.argv[1]))
print(engine.import_kv(given.handover))
given.close()
tokens = list(given.handover.tokens)
(sample,) = engine.generate([tokens], [SamplingParams(max_tokens=8, seed=0)])
print(json.dumps([engine.stats().tokens_shared, sample.token_ids, sample.logprobs]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, device],
        input=msgspec.msgpack.encode(parcel.message),
        capture_output=True,
        timeout=120,
    )
    parcel.close()
    assert done.returncode == 0, done.stderr[-2000:].decode()
    imported, result = done.stdout.decode().splitlines()[-2:]
    assert int(imported) == len(prompts[0])
    shared, tokens, logprobs = json.loads(result)
    (alone,) = engine.generate(prompts, [SamplingParams(max_tokens=8, seed=0)])
    assert shared == len(prompts[0]) - 1  # its last token gives the first row
    assert tokens == list(alone.token_ids)
    assert np.allclose(logprobs, alone.logprobs, atol=5e-6)


def test_an_opened_parcel_equals_the_packed_kv() -> None:
    prompts, _ = requests(1)
    engine = Engine(tiny.model("gpt_oss"))
    engine.generate(prompts, [SamplingParams(max_tokens=1, seed=0)])
    handover = engine.export_kv(prompts[0], "")
    parcel = Parcel(handover)
    # Opened as another process opens it, and as this process does.
    foreign_message = {**parcel.message, "id": "another's"}
    opened = OpenedParcel(msgspec.msgpack.decode(msgspec.msgpack.encode(foreign_message)))
    assert OpenedParcel(parcel.message).handover.keys[0].data_ptr() != opened.handover.keys[0].data_ptr()
    assert opened.handover.tokens == handover.tokens
    for mine, theirs in zip(
        (*handover.keys, *handover.values), (*opened.handover.keys, *opened.handover.values), strict=True
    ):
        assert torch.equal(mine, theirs)
    opened.close()
    parcel.close()


def split(processes: int, readers: int) -> dict[str, Any]:
    return {
        "placement": {"name": "disaggregated"},
        "resources": {"rollout": {"processes": processes, "prefill": readers}},
    }


@pytest.mark.slow
def test_a_run_with_a_prefill_and_a_decode_process_has_the_same_samples(
    tmp_path: Path, rollout_host: RolloutHost
) -> None:
    first = len(rollout_host.workers)
    tree = small(1, GRPO)
    train(tmp_path / "one", tree, rollout_host)

    def kill_prefiller(training: RlTraining, step: int) -> None:
        if step == 1:
            os.kill(rollout_host.workers[first].pid, signal.SIGKILL)  # the prefill process

    viewer = train(tmp_path / "two", small(2, GRPO, **split(2, 1)), rollout_host, kill_prefiller)
    (expected,), actual = samples(tmp_path / "one"), samples(tmp_path / "two")
    assert [s.token_ids for s in actual[0]] == [s.token_ids for s in expected]
    for ours, theirs in zip(actual[0], expected, strict=True):
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=5e-6)
        assert not {"kv"} & set(ours.extra)
    assert len(actual[1]) == len(expected)
    assert any("restarted" in warning for warning in viewer.warnings)


def test_invalid_prefill_counts_and_placements_are_rejected() -> None:
    for tables in (split(2, 2), {**split(2, 1), "placement": {"name": "hybrid"}}):
        with pytest.raises(ConfigError, match="others must decode"):
            recipe(**tables)
