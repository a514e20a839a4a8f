"""Large bodies: parsed in another process, assembled in small pieces, and one key's do not delay another's."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from plaudit.serve.http.message import THREAD_BYTES, HttpError, Limits, Request, json_object
from plaudit.serve.http.reader import BodyReaders
from plaudit.serve.http.tree import PIECE, Assembler, TreeError, TreeSplitter
from plaudit.serve.protocols.native import wire as native
from plaudit.serve.protocols.triton import wire as triton

MOST = 100_000
SECONDS = 240.0


RUNNER = asyncio.Runner()  # one event loop: a reader's thread may return it during the next test


@pytest.fixture(scope="module")
def readers() -> Iterator[BodyReaders]:
    readers = BodyReaders()
    with RUNNER:
        yield readers
    readers.close()


def read(readers: BodyReaders, function: Any, body: bytes, *arguments: Any, tenant: str = "ann") -> Any:
    return RUNNER.run(readers.run(function, body, arguments, MOST, tenant, time.monotonic() + SECONDS))


def random_tree(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["list", "dict", "text", "number", "numbers"]) if depth else "text"
    if kind == "list":
        return [random_tree(rng, depth - 1) for _ in range(rng.randrange(8))]
    if kind == "dict":
        return {str(index): random_tree(rng, depth - 1) for index in range(rng.randrange(8))}
    if kind == "numbers":
        return list(range(rng.choice([0, 3, PIECE, 3 * PIECE + 1])))
    if kind == "number":
        return rng.choice([None, True, 1, -2.5, 2**63])
    return "ж😀a"[: rng.randrange(4)] * rng.choice([1, 50, 20 * PIECE])


@pytest.mark.parametrize("seed", range(20))
def test_pieces_reassemble_to_the_tree(seed: int) -> None:
    rng = random.Random(seed)
    tree = {"first": [random_tree(rng, 4) for _ in range(4)], "second": random_tree(rng, 4)}
    assembler = Assembler()
    for operation, value in TreeSplitter(MOST).cut(tree):
        assembler.add(*msgspec.msgpack.decode(msgspec.msgpack.encode((operation, value)), type=tuple[int, Any]))
    assert assembler.value == tree


def test_no_piece_is_large() -> None:
    tree = {
        "numbers": list(range(10 * PIECE)), "text": "a" * (100 * PIECE), "many": [{"a": [1, "b" * 40]}] * PIECE,
        "deep": [[[["x"] * 20] * 20] * 20] * 2, "keys": {str(n): n for n in range(3 * PIECE)},
    }  # fmt: skip
    sizes = [len(msgspec.msgpack.encode(frame)) for frame in TreeSplitter(MOST).cut(tree)]
    assert max(sizes) < 40 * PIECE


def test_the_number_of_json_values_and_the_depth_are_bounded() -> None:
    for tree in ([[]] * 11, ["a"] * 11, {str(n): 1 for n in range(11)}, [{"a": 1}] * 6):
        with pytest.raises(TreeError, match="more than 10 JSON values other than numbers"):
            list(TreeSplitter(10).cut(tree))
    deep: Any = 1
    for _ in range(102):
        deep = [deep]
    with pytest.raises(TreeError, match="deeper than 100 levels"):
        list(TreeSplitter(1000).cut(deep))


def test_a_reader_returns_what_the_function_returns_in_process(readers: BodyReaders) -> None:
    items = [
        {"prompt": [{"role": "user", "content": "7+8="}], "responses": ["#15", ["7+8=15;", "#15"]]},
        {"text": "ж" * 70_000}, {"tokens": list(range(30_000))}, {"prompt": "1+1="}, {"text": "a", "truth": {"a": [1]}},
    ]  # fmt: skip
    body = json.dumps({"model": "sums", "items": items, "priority": 3}).encode().replace(b'"a", "tr', b'"\\ud800", "tr')
    assert read(readers, native.read_json, body, 4096) == native.read_json(body, 4096)
    plain = json.dumps({"items": items}).encode()
    assert read(readers, json_object, plain) == json.loads(plain)
    inputs = [
        {"name": "tokens", "shape": [2, 9000], "datatype": "INT64", "data": list(range(18_000))},
        {"name": "sequence_lengths", "shape": [2, 1], "datatype": "INT64", "data": [9000, 4]},
    ]
    body = json.dumps({"inputs": inputs, "parameters": {"a": "b"}}).encode()
    there, here = read(readers, triton.read_infer, body, None, 64, triton.REWARD), triton.read_infer(body, None, 64)
    assert (there.id, there.outputs, there.parameters) == (here.id, here.outputs, here.parameters)
    for name, tensor in here.tensors.items():
        np.testing.assert_array_equal(there.tensors[name].values, tensor.values, strict=True)
        assert there.tensors[name].shape == tensor.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{" + b" " * 1000, 400, "the body is not JSON"),
        (b"[1]", 400, "the body is a JSON list"),
        (b'{"a": [' + b"[]," * MOST + b"1]}", 413, "JSON values other than numbers"),
        (b'{"a": 123456789012345678901234567890}', 422, "an integer of more than 64 bits"),
    ],
)
def test_a_reader_rejects_bodies_with_the_servers_errors(
    readers: BodyReaders, body: bytes, status: int, message: str
) -> None:
    with pytest.raises(HttpError, match=message) as caught:
        read(readers, json_object, body)
    assert caught.value.status == status


def test_only_small_bodies_are_decoded_in_the_server(readers: BodyReaders) -> None:
    """Where `read` runs: on the loop, in a thread, or in another process."""
    loop_thread = threading.get_ident()
    places: list[str] = []

    def here(body: bytes) -> int:
        places.append("loop" if threading.get_ident() == loop_thread else "thread")
        return len(body)

    async def elsewhere(function: Any, body: bytes, *_: Any) -> int:
        assert function is here
        places.append("process")
        return len(body)

    async def run(size: int, json_bytes: int | None = None) -> None:
        scope = {
            "connection": None, "method": "POST", "path": "/", "query_string": b"", "server": ("", 0), "headers": (),
        }  # fmt: skip
        request = Request(scope, lambda: None, Limits(1 << 30, 1, 1), "id", elsewhere)  # type: ignore[arg-type, return-value]
        request.content = b" " * size
        assert await request.aside(here, json_bytes=json_bytes) == size

    for size in (1000, THREAD_BYTES, THREAD_BYTES + 1):
        RUNNER.run(run(size))
    RUNNER.run(run(THREAD_BYTES + 1, json_bytes=1000))  # tensors after a little JSON
    assert places == ["loop", "thread", "process", "thread"]


def test_a_key_uses_one_reader_and_other_keys_take_turns(readers: BodyReaders) -> None:
    order: list[str] = []

    async def one(several: BodyReaders, tenant: str) -> None:
        await several.run(json_object, b"{}", (), MOST, tenant, time.monotonic() + SECONDS)
        order.append(tenant)

    async def all_of_them(several: BodyReaders, idle: int) -> None:
        tasks = [asyncio.create_task(one(several, tenant)) for tenant in ("ann",) * 6]
        await asyncio.sleep(0)
        assert len(several._idle) == idle
        await asyncio.gather(*tasks, one(several, "bob"))

    RUNNER.run(all_of_them(readers, 1))
    single = BodyReaders(1)
    order.clear()
    try:
        RUNNER.run(all_of_them(single, 0))
    finally:
        single.close()
    assert order == ["ann", "ann", "bob", "ann", "ann", "ann", "ann"]


def outcome(readers: BodyReaders) -> Any:
    try:
        return read(readers, json_object, b'{"a": 1}')
    except HttpError as error:
        return str(error)


def test_an_exited_reader_is_replaced_and_waiting_ends_at_the_deadline(readers: BodyReaders) -> None:
    read(readers, json_object, b"{}")
    for reader in readers._all:
        if reader._child is not None:
            reader._child.kill()
            reader._child.wait(60)
    outcomes = [outcome(readers) for _ in range(3)]
    assert "the process that parses large bodies has exited; send the request again in smaller parts" in outcomes
    assert outcomes[-1] == {"a": 1}
    with pytest.raises(HttpError, match="deadline expired before the body was read"):
        RUNNER.run(readers.run(json_object, b"{}", (), MOST, "ann", time.monotonic() - 1))
    assert read(readers, json_object, b'{"a": 1}') == {"a": 1}
