"""The size of gRPC messages: what is counted before it is parsed, and how many may arrive at a time."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

if importlib.util.find_spec("google.protobuf") is None or importlib.util.find_spec("grpc") is None:
    pytest.skip("grpcio is not installed: pip install 'plaudit[grpc]'", allow_module_level=True)

from plaudit.serve.grpc.arrivals import Arrivals
from plaudit.serve.grpc.messages import MESSAGES
from plaudit.serve.grpc.reading import read_infer, read_whole, split
from plaudit.serve.http.app import Quota
from plaudit.serve.http.message import HttpError

MEBIBYTE = 1 << 20


def message(raw: list[bytes], **contents: list[int]) -> bytes:
    tensors = [{"name": f"t{n}", "datatype": "INT64", "shape": [2], "contents": contents} for n in range(2)]
    request = MESSAGES["ModelInferRequest"](model_name="m", model_version="1", inputs=tensors, raw_input_contents=raw)
    return bytes(request.SerializeToString())


def test_a_split_message_gives_the_same_body_as_a_whole_one() -> None:
    raw = message([b"a" * 16, b"b" * 16])
    rest, tensors = split(raw, 1000) or (b"", [])
    assert [bytes(each) for each in tensors] == [b"a" * 16, b"b" * 16]
    assert read_infer(rest, tensors) == read_whole(raw, 100, 100)
    typed = message([], int64_contents=[1, 300, -1])
    rest, tensors = split(typed, 1000) or (b"", [])
    assert (rest, tensors) == (typed, [])
    body = read_infer(rest, tensors)
    assert (body.model, body.version) == ("m", "1")
    numbers = b"".join(value.to_bytes(8, "little", signed=True) for value in (1, 300, -1))
    assert body.body[body.head :] == numbers * 2
    assert body == read_whole(typed, 100, 8)  # with the shapes


def test_only_messages_of_raw_tensors_are_small_whatever_their_size() -> None:
    assert split(message([b"a" * MEBIBYTE, b"b"]), 200) is not None
    assert split(message([], int64_contents=[1] * 1000), 200) is None
    assert split(b"\x3a\x00" * 1000, 200) is None  # 1000 empty raw tensors


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (b"\x2a\x00" * (8 * MEBIBYTE), "1000 fields"),  # 8 million empty inputs
        (b"\x2a\x02\x1a\x00" * MEBIBYTE, "1000 fields"),
        (message([], int64_contents=[1] * 1000), "1000 numbers"),
        (message([], fp32_contents=[1.0] * 1000), "1000 numbers"),
    ],
)
def test_what_would_take_gigabytes_is_refused_before_it_is_parsed(content: bytes, limit: str) -> None:
    with pytest.raises(HttpError, match=f"more than {limit}; split it") as refused:
        read_whole(content, 1000, 1000)
    assert refused.value.status == 413


@pytest.mark.parametrize("content", [b"\x3a\xff\xff\x03a", b"\xff" * 11, b"\x2b", b"\x3a", b"\x08", b"\x0d\x00"])
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(HttpError, match="is not a ModelInferRequest"):
        split(content, 1000)
    with pytest.raises(HttpError, match="is not a ModelInferRequest"):
        read_whole(content, 1000, 1000)


def test_messages_arrive_within_the_quota_and_no_tenant_takes_all_of_it() -> None:
    async def run() -> list[str]:
        arrivals, order, go = Arrivals(Quota(4, 2), 1), [], asyncio.Event()

        async def receive(tenant: str) -> None:
            async with arrivals.one(tenant):
                order.append(tenant)
                await go.wait()

        tasks = [asyncio.create_task(receive("a")) for _ in range(8)]
        await asyncio.sleep(0)
        assert order == ["a"] * 2
        tasks += [asyncio.create_task(receive("b")) for _ in range(3)]
        await asyncio.sleep(0)
        assert order == ["a", "a", "b", "b"]
        tasks[2].cancel()  # it waits
        tasks[0].cancel()  # it is arriving
        await asyncio.wait(tasks[:1])
        await asyncio.sleep(0)
        assert order == ["a", "a", "b", "b", "a"]
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not arrivals._waiting
        assert arrivals._quota.in_use == 0
        return order

    assert sorted(asyncio.run(run())) == ["a"] * 7 + ["b"] * 3
