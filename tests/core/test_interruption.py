"""After an interruption at any line of a step, such as Ctrl-C, results equal those of a new engine."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import plaudit.core
from plaudit.core import Engine, SamplingParams, Update
from plaudit.core.device.cpu import CpuBackend
from plaudit.core.scheduler import Scheduler
from plaudit.core.sequence import Sequence
from plaudit.records import Sample
from tests.core import tiny
from tests.core.test_engine import letters

CORE = str(Path(plaudit.core.__file__).parent)
SOAK = os.environ.get("PLAUDIT_SOAK")  # `make soak`: 1,000 iterations of each
TIMES = [int(SOAK)] if SOAK else [4, pytest.param(60, marks=pytest.mark.slow)]
# Float64, so that rounding, which differs between batch shapes, cannot change a sampled token.
MODULE = tiny.model("mistral", dtype=torch.float64)
TOKENIZER = letters()
STEM = tiny.sequences(11, 1, 30, 30)[0]
PROMPTS = [STEM[: 8 * i] + own for i, own in enumerate(tiny.sequences(12, 4, 3, 30))]
PARAMS = SamplingParams(n=2, max_tokens=9, seed=3, temperature=0.8, stop=("ab",))
SCORED = tiny.sequences(13, 3, 30, 60)
PLACES = [[2, len(s) // 2, len(s) - 1] for s in SCORED]


def small(overlaps: bool = False) -> Engine:
    """So small that sequences preempt each other, and prefill and decode share steps. `overlaps`: as on a GPU."""
    width = LARGE.decoder.token_bytes()
    engine = Engine(MODULE, TOKENIZER, kv_bytes=9 * 16 * width, budget=24, max_running=6, look_every=3)
    engine.backend.overlaps = engine._runner.scheduler.overlaps = overlaps
    return engine


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


class Fault:
    """Raises at the n-th line executed in the core, or with `everywhere` in any code it calls, as a signal would; and
    again at the m-th call after that, while the first exception is being handled."""

    def __init__(self, error: BaseException, line: int, *, everywhere: bool = False, again: int = 0) -> None:
        self.error, self.line, self.everywhere, self.again = error, line, everywhere, again
        self.lines = self.calls = 0

    def __enter__(self) -> Fault:
        sys.settrace(self.first)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def first(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "whole":  # a transaction's own frame calls nothing that a signal could interrupt
            return None
        return self.each if name.startswith(CORE) or (self.everywhere and name != __file__) else None

    def each(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.line:
                sys.setprofile(self.second if self.again else None)
                raise self.error
        return self.each

    def second(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.calls += 1
            if self.calls == self.again:
                sys.setprofile(None)
                raise KeyboardInterrupt


class Listener:
    """Records the updates of two requests with two samples each, across interrupted calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.text: defaultdict[int, str] = defaultdict(str)
        self.ended: list[tuple[int, Sample]] = []
        self.first = [engine.submit(PROMPTS[0], PARAMS), engine.submit(PROMPTS[1], PARAMS)]

    def step(self) -> None:
        for update in self.engine.step():
            if update.request not in self.first:
                continue
            at = self.first.index(update.request) * PARAMS.n + update.index
            self.tokens[at] += update.token_ids
            self.text[at] += update.text
            self.ended += [(at, update.sample)] if update.sample is not None else []

    def right(self, failing: bool) -> None:
        """Each sample ended once and its updates add up to it. A failed step may have ended it early."""
        while self.engine.busy:
            self.step()
        self.step()
        assert sorted(at for at, _ in self.ended) == list(range(2 * PARAMS.n))
        for at, sample in self.ended:
            assert (tuple(self.tokens[at]), self.text[at]) == (sample.token_ids, sample.text)
            tokens, text, reason = SAMPLES[at]
            if failing and sample.finish_reason == "error":
                assert tokens[: len(sample.token_ids)] == sample.token_ids
            else:
                assert (sample.token_ids, sample.text, sample.finish_reason) == (tokens, text, reason)


def branched(engine: Engine) -> None:
    """A search: paths, their children, and freed paths."""
    branches, ids = engine.branches(), PROMPTS
    params = SamplingParams(n=2, max_tokens=6, stop_token_ids=(5, 6, 7))
    first = branches.sample(ids, [None] * len(ids), [params] * len(ids), range(len(ids)))
    paths = [[*path, *continuation.tokens] for path, own in zip(ids, first, strict=True) for continuation in own]
    ends = [continuation.place for own in first for continuation in own]
    second = branches.sample(paths, ends, [params] * len(paths), range(len(paths)))
    _, read = branches.read(paths, [None] * len(paths), [len(path) - 1 for path in paths], [5, 11], False)
    places = [*ends, *read, *(continuation.place for own in second for continuation in own)]
    branches.free_paths([place for place in places if place is not None])


def everything(engine: Engine, step: Callable[[], object]) -> None:
    """Every kind of call that changes blocks, prefix cache or sequences. Weights and tokens stay the same."""
    generated(engine)
    step()
    engine.new_version(keep="continue")
    step()
    scored(engine)
    engine.score(SCORED, columns=[5, 11], cache=True)
    engine.import_kv(engine.export_kv(SCORED[2]))
    engine.new_version()
    branched(engine)
    step()
    engine.sleep()
    engine.wake()
    engine.abort(engine.submit(PROMPTS[2], PARAMS))
    with closing(engine.stream(PROMPTS[3], PARAMS)) as stream:
        next(stream)


def broken_off(engine: Engine, fault: Fault) -> None:
    """Raises the fault during all kinds of calls, then checks that all results are still correct."""
    listener, caught = Listener(engine), None
    try:
        with fault:
            everything(engine, listener.step)
    except (KeyboardInterrupt, MemoryError, RuntimeError) as error:
        caught = error
    finally:
        sys.setprofile(None)
    assert caught in (None, fault.error) or (fault.again and isinstance(caught, KeyboardInterrupt))
    engine.wake()
    engine.check()
    listener.right(failing=isinstance(fault.error, Exception))
    right(engine)
    assert gc.isenabled()


ERRORS: list[Callable[[], BaseException]] = [
    KeyboardInterrupt, MemoryError, lambda: torch.OutOfMemoryError("out of memory"), lambda: RuntimeError("broken"),
]  # fmt: skip


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("everywhere", "overlaps"), [(False, False), (True, False), (False, True)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a fault while a generator is closed
@pytest.mark.timeout(7200)
def test_engine_is_correct_after_an_exception_at_any_line(everywhere: bool, overlaps: bool, times: int) -> None:
    """Every second exception is followed by another while it is being handled."""
    random, engine, reached = np.random.default_rng(everywhere), small(overlaps), 0
    with Fault(KeyboardInterrupt(), -1, everywhere=everywhere) as counting:
        everything(engine, Listener(engine).step)
    for i in range(-(-times // 2)):
        again = int(random.integers(1, 60)) if i % 2 else 0
        fault = Fault(ERRORS[i // 2 % 4](), int(random.integers(1, counting.lines)), everywhere=everywhere, again=again)
        try:
            broken_off(engine, fault)
        except BaseException as error:
            error.add_note(f"exception {i}: {fault.error!r} at line {fault.line} and call {again}")
            raise
        reached += fault.lines >= fault.line
    assert reached > times // 4


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.timeout(7200)
def test_engine_is_correct_after_real_signals(times: int, overlaps: bool) -> None:
    engine, random, reached = small(overlaps), np.random.default_rng(1), 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    both(engine)
    duration = time.monotonic() - start
    try:
        for _ in range(3 * times):
            timer = threading.Timer(random.uniform(0, duration), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                both(engine)
                timer.join()
                time.sleep(0.2)  # wait for the pending signal inside this try block
            except KeyboardInterrupt:
                reached += 1
                timer.join()
                engine.check()
                assert not engine.busy
                right(engine)
            if reached == times:
                break
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == times


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()])
def test_failed_call_removes_its_own_requests(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert engine.stats().tokens_computed - computed == 5  # the last sampled token is never fed back
    right(engine)


def test_submitted_requests_survive_the_failure_of_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODULE, TOKENIZER, budget=8, max_running=1)
    forward = CpuBackend.forward
    request = engine.submit(PROMPTS[1], PARAMS)

    def failing(self: CpuBackend, *args: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(CpuBackend, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(CpuBackend, "forward", forward)
    finished = []
    while engine.busy:
        finished += [(u.request, u.sample.token_ids) for u in engine.step() if u.sample is not None]
    assert sorted(finished) == sorted((request, SAMPLES[PARAMS.n + k][0]) for k in range(PARAMS.n))


def test_sample_interrupted_between_report_and_end_frees_its_blocks_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, end = small(), Scheduler.end

    def interrupted_end(self: Scheduler, sequence: Sequence) -> None:
        monkeypatch.setattr(Scheduler, "end", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "end", interrupted_end)
    with pytest.raises(KeyboardInterrupt):
        generated(engine)
    right(engine)


@pytest.mark.parametrize("callback", ["on_update", "stop_when"])
def test_a_request_aborted_by_its_own_callback_ends_once(callback: str) -> None:
    engine = small()
    requests: list[int] = []

    def act(*_: object) -> bool:
        engine.abort(requests[0])
        return False

    options: Any = {callback: act}
    requests.append(engine.submit(PROMPTS[1], SamplingParams(n=3, max_tokens=20, ignore_eos=True), **options))
    finished: list[tuple[int, str]] = []
    while engine.busy:
        finished += [(u.index, u.sample.finish_reason) for u in engine.step() if u.sample is not None]
    finished += [(u.index, u.sample.finish_reason) for u in engine.step() if u.sample is not None]
    assert sorted(finished) == [(0, "abort"), (1, "abort"), (2, "abort")]
    right(engine)


def rows(engine: Engine) -> dict[int, np.ndarray]:
    values: dict[int, np.ndarray] = {}
    while engine.busy:
        values |= {u.request: u.values for u in engine.step() if u.values is not None}
    return values


def test_scores_have_each_row_once_after_preemption_and_new_weights() -> None:
    """Generation and step scores in one pool that is too small for both; then new weights during scoring."""
    random, positions = np.random.default_rng(0), [0, 20, 50, 99]
    engine = Engine(MODULE, kv_bytes=9 * 16 * LARGE.decoder.token_bytes(), budget=16, max_running=6, look_every=2)
    for i in range(3):
        prompt = random.integers(3, tiny.VOCAB, 8).tolist()
        engine.submit(prompt, SamplingParams(max_tokens=60, seed=i, ignore_eos=True))
    ids = random.integers(3, tiny.VOCAB, (6, 100)).tolist()
    requests = [engine.submit_score(sequence, positions=positions, columns=[5, 11]) for sequence in ids]
    values = rows(engine)
    assert engine.stats().preemptions > 3
    requests.append(engine.submit_score(ids[0][::-1], positions=positions, columns=[5, 11]))
    for _ in range(3):
        engine.step()
    engine.new_version()
    values |= rows(engine)
    for request, sequence in zip(requests, [*ids, ids[0][::-1]], strict=True):
        expected = LARGE.score([sequence], positions=[positions], columns=[5, 11])[0]
        assert values[request].shape == expected.shape
        assert np.allclose(values[request], expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_engine_works_after_an_interrupted_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, close = small(), CpuBackend.close

    def interrupted_close(self: CpuBackend) -> None:
        close(self)
        raise KeyboardInterrupt

    generated(engine)
    monkeypatch.setattr(CpuBackend, "close", interrupted_close)
    with pytest.raises(KeyboardInterrupt):
        engine.sleep()
    right(engine)


def test_a_finished_sample_stays_finished_when_a_callback_brings_new_weights() -> None:
    """Three samples end in the same step, and the callback of the first one starts a new version."""
    engine = small()
    finished: list[tuple[int, int]] = []

    def renew(update: Update) -> None:
        engine.new_version()

    engine.submit(PROMPTS[0], SamplingParams(n=3, max_tokens=3, ignore_eos=True), on_update=renew)
    while engine.busy:
        finished += [(u.index, len(u.sample.token_ids)) for u in engine.step() if u.sample is not None]
    assert sorted(finished) == [(0, 3), (1, 3), (2, 3)]
    right(engine)


def test_callback_cannot_call_step() -> None:
    engine = small()
    engine.submit(PROMPTS[0], PARAMS, on_update=lambda update: engine.step() and None)
    errors = []
    while engine.busy:
        errors += [u.sample.error.message for u in engine.step() if u.sample is not None and u.sample.error is not None]
    message = "the callback failed: a callback has called step() during a step: return from the callback first"
    assert errors == [message] * 2
    right(engine)


def test_stop_test_that_aborts_is_not_called_again() -> None:
    engine = small()
    lengths: list[int] = []

    def act(tokens: list[int], text: str) -> bool:
        lengths.append(len(tokens))
        if len(tokens) == 2:
            engine.abort(request)
        return False

    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True), stop_when=act)
    while engine.busy:
        engine.step()
    assert lengths == [1, 2]
    right(engine)
