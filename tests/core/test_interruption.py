"""Whatever ends a step, what is computed after it is what a new engine computes. Ctrl-C may come at any line."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import plaudit.core
from plaudit.core import Engine, SamplingParams
from plaudit.core.device.cpu import CpuBackend
from plaudit.records import Sample
from tests.core import tiny
from tests.core.test_engine import letters

CORE = str(Path(plaudit.core.__file__).parent)
TIMES = int(os.environ.get("PLAUDIT_SOAK", "10"))
# Float64, so that rounding (which differs between batches of different shapes) cannot tip a draw.
MODULE = tiny.model("mistral", dtype=torch.float64)
TOKENIZER = letters()
STEM = tiny.sequences(11, 1, 30, 30)[0]
PROMPTS = [STEM[: 4 * i] + own for i, own in enumerate(tiny.sequences(12, 6, 3, 30))]
PARAMS = SamplingParams(n=2, max_tokens=14, seed=3, temperature=0.8)
SCORED = tiny.sequences(13, 5, 30, 60)
PLACES = [[2, len(s) // 2, len(s) - 1] for s in SCORED]


def small() -> Engine:
    """So small that sequences throw each other out, and prompts and decodes share steps."""
    width = LARGE.decoder.token_bytes()
    return Engine(MODULE, TOKENIZER, kv_bytes=12 * 16 * width, budget=24, max_running=8, look_every=3)


def generated(engine: Engine) -> list[Any]:
    return [(s.token_ids, s.text, s.finish_reason) for s in engine.generate(PROMPTS, PARAMS)]


def scored(engine: Engine) -> list[np.ndarray]:
    return engine.score(SCORED, positions=PLACES, columns=[5, 11], cache=True)


LARGE = Engine(MODULE, TOKENIZER)
SAMPLES, SCORES = generated(LARGE), scored(LARGE)


def right(engine: Engine) -> None:
    engine.check()
    assert generated(engine) == SAMPLES
    for got, expected in zip(scored(engine), SCORES, strict=True):
        assert got.shape == expected.shape
        assert np.allclose(got, expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    engine.check()
    assert engine.stats().running == engine.stats().waiting == 0


def both(engine: Engine) -> None:
    generated(engine)
    scored(engine)


class AtLine:
    """Raises at the n-th line that the core runs, as a signal would."""

    def __init__(self, line: int, error: BaseException) -> None:
        self.line, self.error, self.seen = line, error, 0

    def __enter__(self) -> AtLine:
        sys.settrace(self.call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self.each if frame.f_code.co_filename.startswith(CORE) else None

    def each(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self.line:
                raise self.error
        return self.each


@pytest.mark.timeout(3600)
def test_an_interruption_anywhere_leaves_an_engine_that_is_right() -> None:
    with AtLine(-1, KeyboardInterrupt()) as counting:
        both(small())
    random, reached = np.random.default_rng(0), 0
    for i in range(TIMES):
        engine, finished = small(), list[Sample]()
        engine.submit(PROMPTS[0], PARAMS)
        streamed: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(i % 4):
            finished += stepped(engine, streamed)
        try:
            with AtLine(int(random.integers(1, counting.seen)), KeyboardInterrupt()):
                both(engine)
        except KeyboardInterrupt:
            reached += 1
        engine.check()
        assert engine.stats().running + engine.stats().waiting <= PARAMS.n  # of the call that was broken off, none
        while engine.busy:
            finished += stepped(engine, streamed)
        finished += stepped(engine, streamed)
        ended = sorted((s.index, s.token_ids, s.text) for s in finished)
        assert ended == [(k, *SAMPLES[k][:2]) for k in range(PARAMS.n)]
        assert [tuple(streamed[k]) for k in range(PARAMS.n)] == [SAMPLES[k][0] for k in range(PARAMS.n)]
        right(engine)
    assert reached > TIMES * 0.9


def stepped(engine: Engine, streamed: dict[int, list[int]]) -> list[Sample]:
    updates = engine.step()
    for update in updates:
        streamed[update.index] += update.token_ids
    return [update.sample for update in updates if update.sample is not None]


@pytest.mark.timeout(3600)
def test_real_signals_leave_an_engine_that_is_right() -> None:
    engine, random, reached = small(), np.random.default_rng(1), 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()
    both(engine)
    whole = time.monotonic() - begin
    try:
        for _ in range(max(3, TIMES // 2)):
            timer = threading.Timer(random.uniform(0, whole), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                both(engine)
                reached -= 1
                timer.join()
                time.sleep(1)  # the signal is on its way, and this is not the place where it ends the tests
            except KeyboardInterrupt:
                reached += 1
            timer.join()
            engine.check()
            assert not engine.busy
    finally:
        signal.signal(signal.SIGINT, before)
    right(engine)
    assert reached > 0


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()])
def test_the_requests_of_a_call_that_fails_are_gone_with_it(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, forward, calls = small(), CpuBackend.forward, [0]

    def failing(self: CpuBackend, *args: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise error
        return forward(self, *args)

    monkeypatch.setattr(CpuBackend, "forward", failing)
    for call in (generated, scored):
        calls[0] = 0
        with pytest.raises(type(error)):
            call(engine)
        assert not engine.busy
        assert engine.step() == []
        engine.check()
        computed = engine.stats().tokens_computed
        engine.generate([[3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert engine.stats().tokens_computed - computed == 5  # the last token drawn is read by nobody
    right(engine)


def test_what_was_submitted_survives_the_failure_of_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODULE, TOKENIZER, budget=8, max_running=1)
    forward = CpuBackend.forward
    number = engine.submit(PROMPTS[1], PARAMS)

    def failing(self: CpuBackend, *args: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(CpuBackend, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(CpuBackend, "forward", forward)
    finished = []
    while engine.busy:
        finished += [(u.request, u.sample.token_ids) for u in engine.step() if u.sample is not None]
    assert sorted(finished) == sorted((number, SAMPLES[PARAMS.n + k][0]) for k in range(PARAMS.n))


@pytest.mark.parametrize("callback", ["on_update", "stop_when"])
def test_a_request_aborted_by_its_own_callback_ends_once(callback: str) -> None:
    engine = small()
    numbers: list[int] = []

    def act(*_: object) -> bool:
        engine.abort(numbers[0])
        return False

    options: Any = {callback: act}
    numbers.append(engine.submit(PROMPTS[1], SamplingParams(n=3, max_tokens=20, ignore_eos=True), **options))
    ended: list[tuple[int, str]] = []
    while engine.busy:
        ended += [(u.index, u.sample.finish_reason) for u in engine.step() if u.sample is not None]
    ended += [(u.index, u.sample.finish_reason) for u in engine.step() if u.sample is not None]
    assert sorted(ended) == [(0, "abort"), (1, "abort"), (2, "abort")]
    right(engine)


def rows(engine: Engine) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    while engine.busy:
        found |= {u.request: u.values for u in engine.step() if u.values is not None}
    return found


def test_scores_have_each_row_once_after_preemption_and_new_weights() -> None:
    """Generation and step scores in one pool that is too small for both; then new weights in the middle of a score."""
    random, places = np.random.default_rng(0), [0, 20, 50, 99]
    engine = Engine(MODULE, kv_bytes=9 * 16 * LARGE.decoder.token_bytes(), budget=16, max_running=6, look_every=2)
    for i in range(3):
        begin = random.integers(3, tiny.VOCAB, 8).tolist()
        engine.submit(begin, SamplingParams(max_tokens=60, seed=i, ignore_eos=True))
    ids = random.integers(3, tiny.VOCAB, (6, 100)).tolist()
    numbers = [engine.submit_score(each, positions=places, columns=[5, 11]) for each in ids]
    found = rows(engine)
    assert engine.stats().preemptions > 3
    numbers.append(engine.submit_score(ids[0][::-1], positions=places, columns=[5, 11]))
    for _ in range(3):
        engine.step()
    engine.new_version()
    found |= rows(engine)
    for number, each in zip(numbers, [*ids, ids[0][::-1]], strict=True):
        expected = LARGE.score([each], positions=[places], columns=[5, 11])[0]
        assert found[number].shape == expected.shape
        assert np.allclose(found[number], expected, rtol=0, atol=1e-9 * np.abs(expected).max())
