"""Components of the server that need no process: frames, the score cache, the capacity limit, the log."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.config.keys import KeyTable, hashed
from plaudit.process import framing
from plaudit.serve.http.app import Admission, Quota
from plaudit.serve.http.keys import Keys
from plaudit.serve.http.message import NOBODY, Endpoint, HttpError, Reply, Request, Route
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers import frames
from plaudit.serve.workers.cache import OVERHEAD, ScoreCache, step_keys, work_key

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
ROWS = st.lists(IDS, max_size=8)


def works(rows: list[list[int]]) -> frames.Works:
    count = len(rows)
    return frames.Works(
        ids=list(range(count)),
        lengths=[len(row) for row in rows],
        tokens=frames.as_bytes(rows),
        counts=[1] * count,
        positions=frames.as_bytes([[0]] * count),
        columns=[None if n % 2 else (1, 2) for n in range(count)],
        logprobs=[n % 3 == 0 for n in range(count)],
        salts=[""] * count,
    )


@given(st.lists(ROWS, max_size=4), st.data())
def test_frames_are_decoded_however_the_stream_is_split(sent: list[list[list[int]]], data: st.DataObject) -> None:
    stream = b"".join(frames.pack(frame) for rows in sent for frame in (works(rows), frames.Cancel([1, 2])))
    cuts = sorted({0, len(stream), *data.draw(st.lists(st.integers(0, len(stream)), max_size=10))})
    unpacker = frames.Unpacker()
    received = [f for a, b in pairwise(cuts) for f in unpacker.feed(stream[a:b])]
    assert received == [frame for rows in sent for frame in (works(rows), frames.Cancel([1, 2]))]
    for frame, rows in zip(received[::2], sent, strict=True):
        assert isinstance(frame, frames.Works)
        assert list(frames.cut(frame.tokens, frame.lengths)) == rows


@given(st.binary(max_size=200))
def test_random_bytes_never_decode_to_an_invalid_frame(noise: bytes) -> None:
    """It raises ValueError or waits for more; it never hangs and never yields an object that is not a frame."""
    try:
        received = list(frames.Unpacker().feed(noise))
    except ValueError:  # includes msgspec's errors
        return
    assert all(isinstance(frame, frames.Frame) for frame in received)


def test_an_oversized_frame_is_rejected_by_its_length_alone() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        list(frames.Unpacker().feed((framing.LIMIT + 1).to_bytes(4, "little")))


def test_lengths_that_do_not_match_the_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="add up to 2; expected 3"):
        list(frames.cut(frames.as_bytes([[1, 2, 3]]), [2]))


def test_a_cache_key_covers_everything_a_score_depends_on() -> None:
    keys = {
        work_key(version, tokens, positions, columns, salt, logprobs)
        for version in ("0-a", "1-a")
        for tokens in ([1, 2, 3], [1, 2], [1, 2, 3, 0], [])
        for positions in ([0], [1], [0, 1], [])
        for columns in (None, (), (3,), (1, 2))
        for salt in ("", "alice")
        for logprobs in (False, True)
    }
    assert len(keys) == 2 * 4 * 4 * 4 * 2 * 2


def test_a_steps_cache_key_depends_on_everything_up_to_it_and_nothing_after() -> None:
    tokens = [5, 6, 7, 8, 9]
    original = step_keys("0-a", tokens, (1, 3, 4), (1, 2), "", False)
    assert original[:2] == step_keys("0-a", [*tokens[:4], 1], (1, 3), (1, 2), "", False)
    assert original[1:2] == step_keys("0-a", tokens, (3,), (1, 2), "", False)
    others = [
        step_keys(*other)
        for other in (
            ("1-a", tokens, (1, 3, 4), (1, 2), "", False), ("0-a", [4, *tokens[1:]], (1, 3, 4), (1, 2), "", False),
            ("0-a", tokens, (1, 3, 4), (12,), "", False), ("0-a", tokens, (1, 3, 4), None, "", False),
            ("0-a", tokens, (1, 3, 4), (1, 2), "alice", False), ("0-a", tokens, (1, 3, 4), (1, 2), "", True),
        )
    ]  # fmt: skip
    assert len({*original, *(key for keys in others for key in keys)}) == 3 * 7


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=80), st.integers(0, 2000))
def test_the_cache_stays_within_its_bytes_and_evicts_the_least_recently_used(
    puts: list[tuple[int, int]], limit: int
) -> None:
    cache = ScoreCache(limit)
    used: list[int] = []  # least recently used first
    size: dict[int, int] = {}
    for key, count in puts:
        cached = cache.get(bytes([key]))
        assert (cached is not None) == (key in used)
        if cached is not None:
            assert cached.size == size[key]
            used.remove(key)
            used.append(key)
            continue
        cache.put(bytes([key]), np.zeros(count, np.float32))
        if 4 * count + OVERHEAD <= limit:
            size[key] = count
            used.append(key)
            while sum(4 * size[k] + OVERHEAD for k in used) > limit:
                used.pop(0)
        assert len(cache) == len(used)
        assert cache.bytes == sum(4 * size[k] + OVERHEAD for k in used) <= limit


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 400), st.booleans()), max_size=60))
def test_a_key_below_its_share_is_always_admitted(keys: int, actions: list[tuple[int, int, bool]]) -> None:
    quota = Quota(1000, keys)
    admitted: dict[int, list[int]] = {n: [] for n in range(keys)}
    for tenant, count, leave in actions:
        tenant %= keys
        mine = admitted[tenant]
        if leave and mine:
            quota.take(str(tenant), -mine.pop())
            continue
        fits = quota.fits(str(tenant), count)
        if sum(mine) + count <= 1000 // keys and all(
            sum(admitted[other]) > 1000 // keys or other == tenant for other in admitted
        ):
            assert fits  # only this key is below its share
        if fits:
            quota.take(str(tenant), count)
            mine.append(count)
        assert quota.in_use == sum(map(sum, admitted.values())) <= 1000


def test_retry_after_follows_the_token_rate() -> None:
    admission = Admission(10_000, 10_000, 1, 503, Metrics())
    assert admission.retry_after() == 1
    with admission.tokens("a", 500):
        pass
    admission.tick(1.0)
    for _ in range(3600):
        admission.tick(1.0)  # an idle hour does not change the measured rate
    with admission.tokens("a", 10_000), pytest.raises(HttpError) as refused, admission.tokens("a", 1):
        pass
    assert refused.value.retry_after == 10
    with pytest.raises(HttpError) as never, admission.tokens("a", 10_001):
        pass
    assert (never.value.status, never.value.type) == (422, "too_many_tokens")


def test_an_unread_log_does_not_block_the_server() -> None:
    failures: list[None] = []
    reader, writer = os.pipe()
    try:
        log = Log(lambda: failures.append(None), writer)
        for number in range(12_000):
            log("event", text="x" * 100, number=number)
        log.close(0.1)
        assert failures
    finally:
        os.close(reader)  # ends the blocked write
        while not log._lines.empty():
            time.sleep(0.01)
        os.close(writer)


def test_a_shared_path_is_open_only_if_all_its_protocols_are() -> None:
    async def answer(request: Request) -> Reply:
        raise AssertionError("nobody asks")

    def endpoint(*protocols: str) -> Endpoint:
        return Endpoint([Route("POST", "/", "key", answer, name, claims=lambda _: False) for name in protocols])

    shared, tables = endpoint("openrlhf", "slime"), {"a": KeyTable(sha256=hashed("k"))}
    one, both = (Keys(tables, keyless=False, allow_open=frozenset(n)) for n in (["slime"], shared.protocols))
    assert both.admit(shared, None).name == NOBODY
    assert one.admit(endpoint("slime"), None).name == NOBODY
    assert one.admit(shared, b"Bearer k").name == "a"
    with pytest.raises(HttpError) as refused:
        one.admit(shared, None)
    assert refused.value.status == 401
