"""After any interruption of a step, results equal those of a new engine. Ctrl-C may come at any line."""

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
SOAK = os.environ.get("PLAUDIT_SOAK")  # `make soak`: 1,000 of each
TIMES = [int(SOAK)] if SOAK else [4, pytest.param(60, marks=pytest.mark.slow)]
# Float64, so that rounding (which differs between batches of different shapes) cannot tip a draw.
MODULE = tiny.model("mistral", dtype=torch.float64)
TOKENIZER = letters()
STEM = tiny.sequences(11, 1, 30, 30)[0]
PROMPTS = [STEM[: 8 * i] + own for i, own in enumerate(tiny.sequences(12, 4, 3, 30))]
PARAMS = SamplingParams(n=2, max_tokens=9, seed=3, temperature=0.8, stop=("ab",))
SCORED = tiny.sequences(13, 3, 30, 60)
PLACES = [[2, len(s) // 2, len(s) - 1] for s in SCORED]


def small(overlaps: bool = False) -> Engine:
    """So small that sequences throw each other out, and prompts and decodes share steps. `overlaps`: as on a GPU."""
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
    """Raises at the n-th line that the core runs, or any code that it calls, as a signal would; and once more at the
    m-th call after that, while the first is being dealt with."""

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
        if frame.f_code.co_name == "whole":  # a transaction's own frame has no call in which a signal could come
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
    """What two requests of two samples each have reported, beside the calls that are broken off."""

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
        """Every sample has ended once, and its updates were all of it. A step that failed may have ended it sooner."""
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
    """A level of a search: paths, their children, and what is given up."""
    branches, ids = engine.branches(), PROMPTS
    params = SamplingParams(n=2, max_tokens=6, stop_token_ids=(5, 6, 7))
    first = branches.sample(ids, [None] * len(ids), [params] * len(ids), range(len(ids)))
    paths = [[*path, *each.tokens] for path, own in zip(ids, first, strict=True) for each in own]
    ends = [each.place for own in first for each in own]
    below = branches.sample(paths, ends, [params] * len(paths), range(len(paths)))
    _, read = branches.read(paths, [None] * len(paths), [len(path) - 1 for path in paths], [5, 11], False)
    every = [*ends, *read, *(each.place for own in below for each in own)]
    branches.free_paths([place for place in every if place is not None])


def everything(engine: Engine, step: Callable[[], object]) -> None:
    """Every kind of call that changes blocks, tree or sequences. The weights stay, and so do the tokens."""
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
    """A fault in the middle of everything, and then all of it once more."""
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
def test_an_exception_anywhere_leaves_an_engine_that_is_right(everywhere: bool, overlaps: bool, times: int) -> None:
    """Every second one is followed by another while it is being dealt with."""
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
def test_real_signals_leave_an_engine_that_is_right(times: int, overlaps: bool) -> None:
    engine, random, reached = small(overlaps), np.random.default_rng(1), 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()
    both(engine)
    whole = time.monotonic() - begin
    try:
        for _ in range(3 * times):
            timer = threading.Timer(random.uniform(0, whole), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                both(engine)
                timer.join()
                time.sleep(0.2)  # the signal is on its way, and this is not the place where it ends the tests
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


def test_a_sample_interrupted_between_its_report_and_its_end_gives_its_blocks_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, end = small(), Scheduler.end

    def late(self: Scheduler, sequence: Sequence) -> None:
        monkeypatch.setattr(Scheduler, "end", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "end", late)
    with pytest.raises(KeyboardInterrupt):
        generated(engine)
    right(engine)


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


def test_an_engine_whose_sleep_was_interrupted_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, close = small(), CpuBackend.close

    def closing_late(self: CpuBackend) -> None:
        close(self)
        raise KeyboardInterrupt

    generated(engine)
    monkeypatch.setattr(CpuBackend, "close", closing_late)
    with pytest.raises(KeyboardInterrupt):
        engine.sleep()
    right(engine)


def test_a_finished_sample_stays_finished_when_a_callback_brings_new_weights() -> None:
    """Three samples end in the same step, and the first one's callback makes the others wait."""
    engine = small()
    ended: list[tuple[int, int]] = []

    def renew(update: Update) -> None:
        engine.new_version()

    engine.submit(PROMPTS[0], SamplingParams(n=3, max_tokens=3, ignore_eos=True), on_update=renew)
    while engine.busy:
        ended += [(u.index, len(u.sample.token_ids)) for u in engine.step() if u.sample is not None]
    assert sorted(ended) == [(0, 3), (1, 3), (2, 3)]
    right(engine)


def test_a_callback_cannot_ask_for_another_step() -> None:
    engine = small()
    engine.submit(PROMPTS[0], PARAMS, on_update=lambda update: engine.step() and None)
    ended = []
    while engine.busy:
        ended += [u.sample.error.message for u in engine.step() if u.sample is not None and u.sample.error is not None]
    message = "the callback failed: a callback has called step() during a step: return from the callback first"
    assert ended == [message] * 2
    right(engine)


def test_a_stop_test_that_aborts_is_not_asked_again() -> None:
    engine = small()
    asked: list[int] = []

    def act(tokens: list[int], text: str) -> bool:
        asked.append(len(tokens))
        if len(tokens) == 2:
            engine.abort(number)
        return False

    number = engine.submit(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True), stop_when=act)
    while engine.busy:
        engine.step()
    assert asked == [1, 2]
    right(engine)
