"""Requests that are empty, malformed, too large, too slow or unusual: section A of docs/reliability.md."""

from __future__ import annotations

import gzip
import json
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plaudit.models import load_tokenizer
from tests.reward import tiny
from tests.serve.hostile import KNOWN, Target, clean_message, copied, read_answer
from tests.serve.process import ServerProcess

BODY_BYTES = 2 << 20
ITEMS = 64
POSITIONS = 4096
STEP_POSITIONS = 12288
SLOW_SECONDS = 2.0
MEGABYTE = 1 << 20
TWO = 6  # the token of the digit 2, which the check of loaded weights does not read
BINARY = "application/x-plaudit-tokens"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp("models")
    outcome = copied("sums", root / "sums", max_position_embeddings=POSITIONS)
    steps = copied("sums-steps", root / "sums-steps", max_position_embeddings=STEP_POSITIONS)
    broken = copied("sums", root / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][TWO] = np.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    tokenizer = tiny.sentence_piece()
    tagged = tiny.write(root / "tagged", tiny.model("causal", tokenizer), tokenizer)
    tree = {
        "models": {
            "sums": {"path": str(outcome), "budget": 64},
            "sums-steps": {"path": str(steps)},
            "broken": {"path": str(broken)},
            "tagged": {"path": tagged, "kind": "process", "format": "math-shepherd"},
        },
        "limits": {
            "body_bytes": BODY_BYTES, "items": ITEMS, "header_bytes": 16384, "headers": 50,
            "header_seconds": SLOW_SECONDS, "body_seconds": SLOW_SECONDS,
        },
    }  # fmt: skip
    with ServerProcess(tree) as server:
        yield Target(server)


def scores(target: Target, items: list[Any], model: str = "sums", **fields: Any) -> list[list[float]]:
    reply = target.server.rewards(items, model, **fields)
    assert reply.status_code == 200, reply.text
    return [item["scores"] for item in reply.json()["items"]]


# The body


def test_an_empty_body_is_400(target: Target) -> None:
    """A1: an empty body is 400."""
    target.refused(target.post(b""), 400, "empty_body")
    target.refused(target.raw(target.head() + b"\r\n"), 400, "empty_body")
    target.refused(target.post(b"", content_type=BINARY), 400, "invalid_binary")


@pytest.mark.parametrize(
    "body",
    [b"{", b'{"items": [{"text": "1', b"two", b'{"items": [NaN]}', b"\xef\xbb\xbf{}", b"\x00", b'{"items": []}{}'],
)
def test_malformed_json_is_400(target: Target, body: bytes) -> None:
    """A2: a body that is not JSON is 400."""
    target.refused(target.post(body), 400, "invalid_json")


def test_content_types_other_than_json_are_415(target: Target) -> None:
    """A3: a content type other than JSON is 415; without one the body is parsed as JSON."""
    body = json.dumps({"items": [KNOWN]}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a" * 5000):
        target.refused(target.post(body, content_type=kind), 415, "unsupported_type")
    assert target.post(body, content_type="application/json; charset=utf-8").status_code == 200
    unnamed = f"POST /v1/rewards HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    assert target.raw(unnamed).json()["items"][0]["scores"] == [pytest.approx(target.known, abs=5e-5)]


def test_deeply_nested_json_is_rejected(target: Target) -> None:
    """A4: 10,000 levels are 400 (422 if the body is a list); deep but valid JSON fails at most its item."""
    target.refused(target.post(b"[" * 10_000 + b"]" * 10_000), 422, "invalid_request")
    for deep in (b'{"items": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b'{"items": [' + b'{"truth":' * 100_000):
        target.refused(target.post(deep), 400, "invalid_json")
    for levels in (80, 300, 900):
        content = json.loads("[" * levels + "]" * levels)
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "#12"}]
        reply = target.server.rewards([{"messages": messages}, KNOWN])
        assert reply.status_code == 200, reply.text
        assert reply.json()["items"][1]["scores"] == [pytest.approx(target.known, abs=5e-5)]
        target.sound()


def test_a_content_length_over_the_limit_is_413(target: Target) -> None:
    """A5: a Content-Length over the limit is 413 before any byte of the body arrives."""
    target.refused(target.raw(target.head("Content-Length: 1000000000") + b"\r\n"), 413, "too_large")
    target.refused(target.raw(target.head(f"Content-Length: {BODY_BYTES + 1}") + b"\r\n"), 413, "too_large")


def test_a_client_that_sends_a_whole_large_body_still_gets_413(target: Target) -> None:
    """A5: the connection is not reset while the client is still sending."""
    for _ in range(3):
        target.refused(target.post(b" " * (16 * MEGABYTE)), 413, "too_large")


def test_chunked_bodies_are_limited_in_size_and_memory(target: Target) -> None:
    """A6: chunks are accepted up to the limit, without allocating memory beyond it."""
    body = json.dumps({"items": [KNOWN]}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:10], body[10:])) + b"0\r\n\r\n"
    answer = target.raw(target.head("Transfer-Encoding: chunked") + b"\r\n" + chunks)
    assert answer.json()["items"][0]["scores"] == [pytest.approx(target.known, abs=5e-5)]
    before = target.peak_bytes()
    endless = b"100000\r\n" + b" " * MEGABYTE + b"\r\n"
    target.refused(target.raw(target.head("Transfer-Encoding: chunked") + b"\r\n" + endless * 64), 413, "too_large")
    assert target.peak_bytes() - before < 40 * MEGABYTE
    for size in (b"zz", b"-1", b"1" * 40):
        target.refused(
            target.raw(target.head("Transfer-Encoding: chunked") + b"\r\n" + size + b"\r\nx\r\n"), 400, "bad_http"
        )


def test_conflicting_body_lengths_are_400(target: Target) -> None:
    """A6: a body with two lengths or an invalid one is rejected, because a proxy may read it differently."""
    for lines in (
        ("Content-Length: 2", "Content-Length: 3"),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Content-Length: -2",),
        ("Content-Length: 2x",),
        ("Content-Length: 99999999999999999999999",),
    ):
        target.refused(target.raw(target.head(*lines) + b"\r\n{}"), 400, "bad_http")


def test_compressed_bodies_are_limited_by_their_decompressed_size(target: Target) -> None:
    """A7: a gigabyte compressed into a megabyte is 413 and takes no memory; corrupt compression is 400, unknown 415."""
    body = json.dumps({"items": [KNOWN]}).encode()
    for packed, coding in ((gzip.compress(body), "gzip"), (zlib.compress(body), "deflate")):
        reply = target.post(packed, content_encoding=coding)
        assert reply.json()["items"][0]["scores"] == [pytest.approx(target.known, abs=5e-5)]
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(b" " * MEGABYTE) + packer.flush(zlib.Z_FULL_FLUSH)
    bomb = b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + block * 1024
    assert len(bomb) < 1.5 * MEGABYTE
    before = target.peak_bytes()
    target.refused(target.post(bomb, content_encoding="gzip"), 413, "too_large")
    assert target.peak_bytes() - before < 40 * MEGABYTE
    for broken in (b"no gzip", gzip.compress(body)[:-9], gzip.compress(body) + b"more", b""):
        target.refused(target.post(broken, content_encoding="gzip"), 400, "bad_encoding")
    target.refused(target.post(body, content_encoding="br"), 415, "unsupported_encoding")
    target.refused(target.post(body, content_encoding="gzip, gzip"), 415, "unsupported_encoding")


def test_large_headers_are_431(target: Target) -> None:
    """A8: 5 MB of one header, a thousand headers, an endless path: 431, without allocating memory."""
    before = target.peak_bytes()
    target.refused(target.raw(target.head("X: " + "a" * (5 * MEGABYTE))), 431, "headers_too_large")
    target.refused(target.raw(target.head(*(f"X-{i}: 1" for i in range(1000))) + b"\r\n"), 431, "headers_too_large")
    target.refused(target.raw(target.head("a" * (5 * MEGABYTE))), 431, "headers_too_large")
    target.refused(target.raw(target.head(path="/" + "a" * 100_000) + b"\r\n"), 431, "headers_too_large")
    assert target.peak_bytes() - before < 40 * MEGABYTE
    full = [f"X-{i}: 1" for i in range(46)]
    body = json.dumps({"items": [KNOWN]}).encode()
    assert target.raw(target.head(*full, f"Content-Length: {len(body)}") + b"\r\n" + body).status == 200


def test_slow_clients_are_disconnected_without_delaying_others(target: Target) -> None:
    """A9: 200 clients that send a byte now and then are disconnected in time and do not delay others."""
    heads = [target.connect() for _ in range(100)]
    bodies = [target.connect() for _ in range(100)]
    for sock in bodies:
        sock.sendall(target.head("Content-Length: 1000") + b"\r\n")
    rest = iter(target.head("X-Slow: " + "a" * 100))
    durations = []
    began = time.monotonic()
    while time.monotonic() - began < SLOW_SECONDS + 0.5:
        letter = bytes([next(rest)])
        for sock in (*heads, *bodies):
            with suppress(OSError):  # disconnected
                sock.sendall(letter)
        started = time.monotonic()
        target.sound()
        durations.append(time.monotonic() - started)
        time.sleep(0.1)
    assert statistics.median(durations) < 1.0
    for sock in heads:
        with sock, suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    for sock in bodies:
        with sock:
            target_error = read_answer(sock)
            assert target_error.status == 408
    target.refused(target_error, 408, "slow_body")


def test_a_get_request_with_an_endless_body_is_closed(target: Target) -> None:
    """A9: nor can a GET request keep its connection open with an endless body."""
    with target.connect() as sock:
        sock.sendall(target.head("Content-Length: 1000", method="GET", path="/health/live") + b"\r\n")
        answer = read_answer(sock)
        assert answer.status == 200
        assert answer.headers["connection"] == "close"
        assert sock.recv(100) == b""


def test_data_that_is_not_http_gets_a_readable_400(target: Target) -> None:
    """A8: data that is not HTTP gets a readable error."""
    for data in (
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 3 + b"X",
    ):
        target.refused(target.raw(data + b"\r\n\r\n"), 400, "bad_http")
    folded = target.head("X: a\r\n b") + b"\r\n"
    target.refused(target.raw(folded), 400, "bad_http")
    nul = target.head("X: a\0b") + b"\r\n"
    target.refused(target.raw(nul), 400, "bad_http")


# The items


def test_a_request_without_items_is_422(target: Target) -> None:
    """A10: an empty list of items is 422, an empty list of responses is the item's error."""
    target.refused(target.server.rewards([]), 422, "no_items")
    target.item_refused({"prompt": "1+2=", "responses": []}, "invalid_item")
    target.refused(target.post(struct.pack("<II", 0, 0), content_type=BINARY), 422, "no_items")


def test_empty_texts_are_scored_or_errors_of_their_item(target: Target) -> None:
    """A11: an empty prompt or response has a score, because begin and end tokens are added; an empty text has none."""
    items = [{"prompt": "1+2=", "responses": [""]}, {"prompt": "", "responses": ["#3", ""]}]
    assert np.isfinite(np.concatenate(scores(target, items))).all()
    target.item_refused({"text": ""}, "empty")
    target.item_refused({"tokens": []}, "empty")
    target.item_refused({"prompt": "1+2=", "responses": [""]}, "no_steps", "sums-steps")
    target.item_refused({"prompt": "1+2=", "responses": [["1+2=3;", ""]]}, "bad_steps", "sums-steps")


def test_the_number_of_items_is_limited(target: Target) -> None:
    """A12: as many responses as the limit are accepted, and not one more."""
    assert len(scores(target, [KNOWN] * ITEMS)) == ITEMS
    error = target.refused(target.server.rewards([KNOWN] * (ITEMS + 1)), 422, "too_many_items")
    assert str(ITEMS) in error["message"]
    grouped = [{"prompt": "1+2=", "responses": ["#3"] * (ITEMS // 2 + 1)}] * 2
    target.refused(target.server.rewards(grouped), 422, "too_many_items")
    target.refused(target.post(b'{"items": [' + b"0," * 900_000 + b"0]}"), 422, "too_many_items")


@pytest.mark.slow
def test_inputs_over_the_maximum_length_are_errors_or_truncated(target: Target) -> None:
    """A13: as many tokens as the model accepts are scored; one more is an error, or is truncated on request."""
    at_limit, over = {"tokens": [5] * POSITIONS}, {"tokens": [5] * (POSITIONS + 1)}
    assert np.isfinite(scores(target, [at_limit])).all()
    error = target.item_refused(over, "too_long")
    assert str(POSITIONS) in error["message"]
    text = {"prompt": "1+", "responses": ["1" * (POSITIONS - 4)]}  # with begin and end tokens exactly the limit
    assert target.server.rewards([text]).json()["usage"]["tokens"] == POSITIONS
    target.item_refused({**text, "responses": ["1" * (POSITIONS - 3)]}, "too_long")
    cut = target.server.rewards([over], truncate="left").json()["items"][0]
    assert cut["truncated"] == [True]
    assert cut["scores"] == [pytest.approx(scores(target, [at_limit])[0][0], abs=5e-5)]


def test_inputs_longer_than_the_step_budget_get_the_same_score(target: Target) -> None:
    """A14: the budget of a step is 64 tokens here; longer inputs are computed in chunks, and none waits forever."""
    from plaudit.records import Item
    from plaudit.reward import load_reward

    pairs = [("3+4+5=", "3+4=7;7+5=12;#12" * n) for n in (1, 4, 12)]
    expected = [s.value for s in load_reward("sums").score([Item(prompt=p, response=r) for p, r in pairs])]  # type: ignore[union-attr]
    actual = scores(target, [{"prompt": p, "responses": [r]} for p, r in pairs], cache=False)
    assert np.allclose(np.concatenate(actual), expected, atol=5e-5)


def test_one_bad_item_among_many_fails_alone(target: Target) -> None:
    """A15: 63 scores are those of a clean run, and only the bad item has an error."""
    good = [{"prompt": f"{n}+4=", "responses": [f"{n}+4={n + 4};#{n + 4}"]} for n in range(10, 10 + ITEMS - 1)]
    clean = scores(target, good, cache=False)
    for bad in ({"tokens": [10**6]}, {"texts": "1"}, 7, None, "1+2=3", {"prompt": 1, "responses": ["2"]}, {}):
        items = target.server.rewards([*good[:30], bad, *good[30:]], cache=False).json()["items"]
        assert set(items.pop(30)) == {"error"}
        assert np.allclose(np.concatenate([i["scores"] for i in items]), np.concatenate(clean), atol=5e-5)


def test_unusual_characters_are_scored_and_lone_surrogates_are_item_errors(target: Target) -> None:
    """A16: NUL, BOM and unusual characters have a score; a lone surrogate is an error of its item only."""
    odd = ["\0", "\ufeff#3", "#3\u202e", "\U0001f600", "\ufdd0", "\u0301" * 500, "\r\n\t\x1b[31m"]
    assert np.isfinite(np.concatenate(scores(target, [{"prompt": "1+2=", "responses": odd}]))).all()
    good = json.dumps(KNOWN)
    for lone in (r"\ud800", r"\udc00", r"a\ud83d\ud83d\ude00", r"\\\ud800", r"\ud800\ud800"):
        body = f'{{"items": [{good}, {{"text": "{lone}"}}, {good}]}}'
        reply = target.post(body.encode())
        assert reply.status_code == 200, reply.text
        first, bad, last = reply.json()["items"]
        assert bad["error"]["type"] == "invalid_item"
        assert "Unicode" in bad["error"]["message"]
        assert first["scores"] == last["scores"] == [pytest.approx(target.known, abs=5e-5)]
    pairs = '{"items": [{"prompt": "1+2=", "responses": ["\\ud83d\\ude00", "\\\\ud800"]}]}'
    assert len(target.post(pairs.encode()).json()["items"][0]["scores"]) == 2
    bytes_ = target.post(b'{"items": [' + good.encode() + b', {"text": "\xff\xfe"}]}').json()["items"]
    assert bytes_[1]["error"]["type"] == "invalid_item"
    target.refused(target.post(b'{"items": [], "model": "\\ud800"}'), 400, "invalid_json")
    target.item_refused({"text": "\u0301" * (MEGABYTE // 2)}, "too_long")  # a megabyte as UTF-8
    target.item_refused({"prompt": "1+2=", "responses": ["\0" * 300_000]}, "too_long")


def test_control_tokens_in_texts_are_plain_text(target: Target) -> None:
    """A17: text that looks like a control token is plain text; a step tag is that or an error of its item."""
    vocabulary = load_tokenizer("sums").get_vocab()
    reply = target.server.rewards([{"prompt": "1+2=", "responses": ["#3<eos>"]}]).json()
    assert reply["usage"]["tokens"] == 1 + len("1+2=#3<eos>") + 1
    rendered = target.server.rewards([{"text": "1+2=#3<eos>"}]).json()  # in `text` the caller's control tokens count
    assert rendered["usage"]["tokens"] == 1 + len("1+2=#3") + 1
    assert "<eos>" in vocabulary
    steps = [["1+2=3;4;5;<eos>", "#3<pad>"], ["<bos>", ";"], ["1+2=3;", "#3"]]
    item = target.server.rewards([{"prompt": "1+2=", "responses": steps}], "sums-steps", steps=True).json()["items"][0]
    assert [len(s) for s in item["steps"]] == [2, 2, 2]
    forged = {"prompt": "1+2", "responses": [["it is 3 ки", "so 3"]]}
    error = target.server.rewards([forged], "tagged").json()["items"][0]["error"]
    assert error["type"] == "bad_text"
    assert "ки" in error["message"]
    target.sound()


@pytest.mark.parametrize(
    "token",
    ["-1", "18", str(2**31), str(2**63), str(2**64), "9" * 5000, str(-(2**63)), "1.0", "1e300", "1e999", "true",
     "false", '"5"', "null", "[5]"],
    ids=lambda token: token[:20],
)  # fmt: skip
def test_invalid_tokens_are_item_errors(target: Target, token: str) -> None:
    """A18: an invalid token is an error of its item and never reaches the model."""
    body = json.dumps({"items": [{"tokens": [1, 5, 0]}, KNOWN]}).replace("0]", f"{token}]", 1)
    reply = target.post(body.encode())
    assert reply.status_code == 200, reply.text
    bad, good = reply.json()["items"]
    assert bad["error"]["type"] in ("bad_tokens", "invalid_item")
    clean_message(bad["error"]["message"])
    assert good["scores"] == [pytest.approx(target.known, abs=5e-5)]


def test_invalid_tokens_in_a_binary_body_are_item_errors(target: Target) -> None:
    """A18: the same in the binary form."""
    rows = [[1, 5, 6], [1, -5], [1, 2**31 - 1], [1, 18]]
    offsets = np.cumsum([0, *map(len, rows)]).astype("<u4")
    body = struct.pack("<I", len(rows)) + offsets.tobytes() + np.concatenate(rows).astype("<i4").tobytes()
    reply = target.post(body, content_type=BINARY)
    values = np.frombuffer(reply.content, "<f4", 4, 4)
    assert np.isfinite(values).tolist() == [True, False, False, False]
    errors = json.loads(reply.content[20:])["errors"]
    assert {index: error["type"] for index, error in errors.items()} == dict.fromkeys("123", "bad_tokens")
    target.sound()


@pytest.mark.slow
def test_every_step_has_a_score_or_its_item_has_an_error(target: Target) -> None:
    """A19: no step, one, thousands: as many scores as steps, or an error."""
    assert [len(s) for s in _steps(target, "1+2=", "#3", "1+2=3;#3", ";;;#3", ["1"] * 10_000)] == [1, 2, 4, 10_000]
    for response in ("", [], [""], ["1+2=3;", 3], ["1", None], "1" * STEP_POSITIONS, ["1;"] * STEP_POSITIONS):
        reply = target.server.rewards([{"prompt": "1+2=", "responses": [response]}, KNOWN], "sums-steps", steps=True)
        bad, good = reply.json()["items"]
        assert bad["error"]["type"] in ("no_steps", "bad_steps", "too_long", "invalid_item"), bad
        assert len(good["steps"][0]) == 3
    target.item_refused({"text": "1+2"}, "no_steps", "sums-steps", steps=True)
    target.item_refused({"tokens": [1, 5, 6]}, "no_steps", "sums-steps")
    target.refused(target.server.rewards([KNOWN], steps=True), 422, "not_a_process_model")


def test_steps_that_the_tokenizer_merges_have_one_score_each(target: Target) -> None:
    """A20: each step has its own score, also with a tokenizer that merges across step boundaries."""
    reply = target.server.rewards(
        [{"prompt": "1+2", "responses": [["Step", " Step", "к и"], "one\ntwo\nк", ["+", "-"]]}], "tagged", steps=True
    ).json()
    assert [len(s) for s in reply["items"][0]["steps"]] == [3, 3, 2]
    mid_number = _steps(target, "10+20=", ["1", "0+2", "0=3", "0", ";#30"])
    assert [len(s) for s in mid_number] == [5]


def _steps(target: Target, prompt: str, *responses: Any) -> list[list[float]]:
    reply = target.server.rewards([{"prompt": prompt, "responses": list(responses)}], "sums-steps", steps=True)
    assert reply.status_code == 200, reply.text
    steps: list[list[float]] = reply.json()["items"][0]["steps"]
    assert all(np.isfinite(np.array(s, dtype=float)).all() for s in steps)
    return steps


def test_nan_scores_are_item_errors(target: Target) -> None:
    """A21: a non-finite score is an error of its item, is counted, and never reaches JSON."""
    before = target.server.metric("plaudit_errors_total", type="nonfinite_score")
    reply = target.server.rewards(
        [{"text": "4+4=8"}, {"text": "4+5=2"}, {"prompt": "4+5=", "responses": ["#2", "#8"]}], "broken"
    )
    assert reply.status_code == 200
    assert b"NaN" not in reply.content
    good, bad, mixed = reply.json()["items"]
    assert np.isfinite(good["scores"]).all()
    assert bad["error"]["type"] == "nonfinite_score"
    assert mixed["scores"][0] is None
    assert np.isfinite(mixed["scores"][1])
    assert [error and error["type"] for error in mixed["errors"]] == ["nonfinite_score", None]
    assert target.server.metric("plaudit_errors_total", type="nonfinite_score") == before + 2
    target.sound()


def test_unknown_names_and_wrong_types_are_rejected(target: Target) -> None:
    """A22: an unknown model is 404, an unknown field or a wrong type 422; in an item it is the item's error."""
    error = target.refused(target.server.rewards([KNOWN], "sum"), 404, "unknown_model")
    assert "did you mean 'sums'" in error["message"]
    target.refused(target.server.rewards([KNOWN], "x" * 100_000), 404, "unknown_model")
    for fields in (
        {"stepz": True}, {"x" * 100_000: 1}, {"steps": 1}, {"cache": "no"}, {"priority": 1.5}, {"priority": 11},
        {"priority": 2**70}, {"truncate": "middle"}, {"model": 3}, {"items": {}}, {"items": "1+2=3"},
    ):  # fmt: skip
        body = {"items": [KNOWN], **fields}
        target.refused(target.post(json.dumps(body).encode()), 422, "invalid_request")
    for body in (b"[]", b"null", b"7", b'"a"', b"{}"):
        target.refused(target.post(body), 422, "invalid_request")
    for item in ({**KNOWN, "x" * 100_000: 1}, {"prompt": "1"}, {"responses": ["1"]}, {**KNOWN, "text": "1"}):
        target.item_refused(item, "invalid_item")
    for query in ("mode=sums", "model=sums&model=x", "&" * 20):
        body = struct.pack("<III", 1, 0, 1) + struct.pack("<i", 5)
        reply = target.server.http.post(f"/v1/rewards?{query}", content=body, headers={"content-type": BINARY})
        target.refused(reply, 422, "invalid_request")


def test_concurrent_requests_with_the_same_id_get_their_own_scores(target: Target) -> None:
    """A23: concurrent requests with one id each get their own scores."""
    items = [{"prompt": f"{n}+1=", "responses": [f"#{n + 1}"]} for n in range(24)]
    expected = np.concatenate(scores(target, items))

    def send(item: Any) -> Any:
        return target.server.http.post(
            "/v1/rewards", json={"items": [item], "cache": False}, headers={"x-request-id": "same"}
        ).json()

    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(send, items))
    assert {reply["request_id"] for reply in replies} == {"same"}
    assert np.allclose([reply["items"][0]["scores"][0] for reply in replies], expected, atol=5e-5)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "assistant", "content": "#3"}],
        [{"role": "user", "content": "1+2="}],
        [{"role": "wizard", "content": "1+2="}, {"role": "assistant", "content": "#3"}],
        [{"role": 7, "content": "1+2="}, {"role": "assistant", "content": "#3"}],
        [{"content": "1+2="}, {"role": "assistant", "content": "#3"}],
        [{"role": "user"}, {"role": "assistant", "content": "#3"}],
        [{"role": "user", "content": 5}, {"role": "assistant", "content": "#3"}],
        [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": ["#3"]}],
        [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": None}],
        ["1+2=", "#3"],
    ],
    ids=str,
)
def test_invalid_messages_are_item_errors(target: Target, messages: Any) -> None:
    """A24: invalid roles and contents, and messages that the template rejects, are errors of the item."""
    reply = target.server.rewards([{"messages": messages}, {"prompt": messages, "responses": ["#3"]}, KNOWN])
    assert reply.status_code == 200, reply.text
    conversation, opening, good = reply.json()["items"]
    if "error" in conversation:
        assert conversation["error"]["type"] in ("bad_messages", "invalid_item")
        clean_message(conversation["error"]["message"])
    else:
        assert messages[0].get("content", 5) == 5  # this model's template renders any content
    assert "error" in opening or np.isfinite(opening["scores"]).all()
    assert good["scores"] == [pytest.approx(target.known, abs=5e-5)]


def test_templates_in_requests_are_rejected(target: Target) -> None:
    """A25: a request cannot contain a template or template options."""
    loop = "{% for i in range(10**9) %}{% endfor %}"
    for name, value in (("chat_template", loop), ("chat_template_kwargs", {"chat_template": loop}), ("template", loop)):
        target.refused(target.server.rewards([KNOWN], **{name: value}), 422, "invalid_request")
        target.item_refused({**KNOWN, name: value}, "invalid_item")
    messages = [{"role": "user", "content": loop, "chat_template": loop}, {"role": "assistant", "content": "#3"}]
    assert len(scores(target, [{"messages": messages}])) == 1
    target.sound()


def test_long_texts_do_not_delay_health_checks(target: Target) -> None:
    """A26: a megabyte without a space is tokenised outside the event loop, and health checks answer meanwhile."""
    longest = "1" * (64 * POSITIONS - 100)  # longer texts are not tokenised at all
    slow = {"prompt": "1+2=", "responses": [longest] * 4}
    done = threading.Event()
    replies: list[Any] = []

    def send() -> None:
        replies.append(target.server.rewards([slow], cache=False))
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    durations = []
    while not done.is_set():
        began = time.monotonic()
        assert target.server.http.get("/health/live").status_code == 200
        durations.append(time.monotonic() - began)
    thread.join()
    assert replies[0].json()["items"][0]["error"]["type"] == "too_long"
    assert len(durations) >= 5, "health waited until the texts were read"
    assert statistics.median(durations) < 1.0
    target.item_refused({"prompt": "1+2=", "responses": ["1" * MEGABYTE]}, "too_long")
    target.item_refused({"prompt": "1+2=", "responses": [["1" * 1000] * 1000]}, "too_long", "sums-steps")
