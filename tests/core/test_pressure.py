"""Random workloads give the same tokens with a pool that is too small as with a large one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.records import Sample
from tests.core import tiny

# Float64, so that rounding, which differs between batch shapes, cannot change a sampled token.
MODULE = tiny.model("mistral", dtype=torch.float64)
WORKLOADS = int(os.environ.get("PLAUDIT_SOAK", "40"))
LARGE = Engine(MODULE, max_running=64)


def workload(random: np.random.Generator) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with shared prefixes and varied lengths, each with different options."""
    stems = [random.integers(3, tiny.VOCAB, int(random.integers(1, 40))).tolist() for _ in range(2)]
    prompts, options = [], []
    for i in range(int(random.integers(1, 9))):
        own = random.integers(3, tiny.VOCAB, int(random.integers(1, 40))).tolist()
        stem = stems[int(random.integers(2))]
        prompts.append(stem[: int(random.integers(0, len(stem) + 1))] + own)
        options.append(
            SamplingParams(
                n=int(random.integers(1, 4)),
                temperature=float(random.choice([0.0, 0.7, 1.0])),
                seed=i,
                max_tokens=int(random.integers(1, 30)),
                priority=int(random.integers(0, 2)),
                stop_token_ids=tuple(random.integers(3, tiny.VOCAB, 2).tolist()),
                min_tokens=0,
            )
        )
    return prompts, options


def outcome(samples: list[Sample]) -> list[tuple[tuple[int, ...], str]]:
    return [(s.token_ids, s.finish_reason) for s in samples]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_small_pool_gives_the_same_tokens_as_a_large_one() -> None:
    preemptions = evictions = 0
    for seed in range(WORKLOADS):
        random = np.random.default_rng(seed)
        prompts, options = workload(random)
        expected = outcome(LARGE.generate(prompts, options))
        tokens = max(len(p) + (o.max_tokens or 0) for p, o in zip(prompts, options, strict=True))
        blocks = -(-tokens // 16) + int(random.integers(0, 4))
        small = Engine(
            MODULE, kv_bytes=blocks * 16 * LARGE.decoder.token_bytes(), max_running=int(random.integers(1, 12)),
            budget=int(random.integers(12, 64)), look_every=int(random.integers(1, 9)),
        )  # fmt: skip
        assert outcome(small.generate(prompts, options)) == expected, f"workload {seed}"
        small.check()
        assert small.stats().blocks_total == blocks
        preemptions += small.stats().preemptions
        evictions += small.stats().evictions
    assert preemptions > WORKLOADS // 4
    assert evictions > WORKLOADS // 4
    LARGE.check()


def test_random_requests_and_aborts_leave_no_blocks_or_sequences() -> None:
    """Submit, step, abort and change the version at random; `check()` must pass after every step."""
    for seed in range(max(10, WORKLOADS // 10)):
        random = np.random.default_rng(1000 + seed)
        engine = Engine(MODULE, kv_bytes=8 * 16 * LARGE.decoder.token_bytes(), budget=32, max_running=6, look_every=3)
        open_requests: set[int] = set()
        finished: set[tuple[int, int]] = set()
        expected = 0
        for _ in range(60):
            action = random.random()
            if action < 0.3:
                prompts, options = workload(random)
                open_requests.add(engine.submit(prompts[0], options[0]))
                expected += options[0].n
            elif action < 0.36 and open_requests:
                engine.abort(open_requests.pop())
            elif action < 0.40:
                engine.new_version(keep="continue" if random.random() < 0.5 else "recompute")
            elif action < 0.42:
                engine.sleep()
                engine.wake()
            finished |= {(u.request, u.index) for u in engine.step() if u.sample is not None}
            engine.check()
        while engine.busy:
            finished |= {(u.request, u.index) for u in engine.step() if u.sample is not None}
            engine.check()
        assert len(finished) == expected
        assert engine.stats().running == engine.stats().waiting == 0
