"""The client returns a result for every item, in order, or raises: against real servers, including misbehaving ones."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from plaudit import AsyncRewardClient, RewardClient
from plaudit.client import client as client_module
from plaudit.client.in_process import InProcess
from plaudit.client.replicas import EJECT_AFTER, Replicas
from plaudit.errors import BadReply, ConfigError, RequestError, RequestRefused, RewardUnavailable, VersionChanged
from plaudit.records import Item, Score, StepScores
from plaudit.reward import load_reward
from plaudit.worlds import get_world
from tests.serve.process import ServerProcess, free_port
from tests.serve.scripted import Answer, Asked, Scripted, right


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


def chains(count: int) -> list[Item]:
    world = get_world("sums")
    drawn = (world.demonstration("heldout", i) for i in range(count))
    return [Item(prompt=problem.prompt, response=text) for problem, text in drawn]


def numbers(count: int) -> list[Item]:
    """For scripted servers: item i has the score i. Prompts differ, so that every item is a separate group."""
    return [Item(prompt=f"p{i}", response=str(i)) for i in range(count)]


def values(results: Sequence[Score | StepScores]) -> list[float | None]:
    return [r.value if isinstance(r, Score) else r.aggregate for r in results]


def fails_first(times: int, failure: Answer) -> Callable[[int, Asked], Answer]:
    return lambda number, request: failure if number < times else Answer(right(request))


# Real servers


def test_all_item_forms_give_the_scores_of_the_in_process_model(server: ServerProcess) -> None:
    items = chains(100)
    local = load_reward("sums").score(items)
    with RewardClient(server.url, model="sums") as client:
        results = client.score(items)
        assert np.allclose(values(results), values(local), atol=5e-5)  # type: ignore[arg-type]
        assert {r.version for r in results} == {local[0].version}
        prompt, responses = items[0].prompt, [item.response for item in items[:5]]
        group = client.score([(prompt, responses)])  # type: ignore[list-item]
        assert values(group) == values(client.score([{"prompt": prompt, "responses": responses}]))
        mixed = client.score([{"text": "1+2=#3"}, (str(prompt), str(responses[0])), {"tokens": [1, 12, 14]}, items[1]])
        assert np.allclose(values(mixed)[1::2], values(local)[:2], atol=5e-5)  # type: ignore[arg-type]
        assert client.submit(items[:3]).result(60) == client.score(items[:3])
        assert client.score([]) == []


def test_steps_truncation_and_failed_items(server: ServerProcess) -> None:
    with RewardClient(server.url, model="sums-steps") as client:
        right, empty, wrong = client.score(
            [("3+4+5=", ["3+4=7;7+5=12;#12", "", ["3+4=9;", "9+5=14;", "#14"]])], steps=True
        )
        assert isinstance(right, StepScores)
        assert isinstance(wrong, StepScores)
        assert min(right.values) > 0.5 > max(wrong.values)
        assert right.aggregate == right.values[-1]
        assert empty.error is not None
        assert (empty.error.type, empty.version) == ("no_steps", right.version)
    unknown = r"404 \(unknown_model: no model 'nix'"
    with RewardClient(server.url, model="nix") as client, pytest.raises(RequestRefused, match=unknown):
        client.score(chains(1))
    with RewardClient(server.url, model="sums") as client:
        long = "1+1=2;" * 400
        failed, cut = client.score([Item("1+1=", long), Item("1+1=", long, truncate="left")])
        assert failed.error is not None
        assert cut.error is None
        assert cut.truncated
        assert client.score([("1+1=", long)], truncate="right")[0].truncated
        with pytest.raises(RequestRefused, match="is not a process model") as caught:
            client.score(chains(1), steps=True)
        assert (caught.value.status, caught.value.type) == (422, "not_a_process_model")
        with pytest.raises(VersionChanged, match="but 7-x was requested"):
            client.score(chains(1), version="7-x")


@pytest.mark.slow
def test_async_calls_run_concurrently(server: ServerProcess) -> None:
    async def calls() -> list[list[Score | StepScores]]:
        async with AsyncRewardClient(server.url, model="sums") as client:
            return await asyncio.gather(*(client.score([item]) for item in chains(200)))

    alone = values([result for results in asyncio.run(calls()) for result in results])
    with RewardClient(server.url, model="sums") as client:
        assert np.allclose(alone, values(client.score(chains(200))), atol=5e-5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_no_item_or_order_is_lost_when_a_server_is_killed_under_load(server: ServerProcess) -> None:
    items = chains(4000)
    with (
        ServerProcess(None, "--model", "sums") as doomed,
        RewardClient([server.url, doomed.url], model="sums") as client,
    ):
        pending = client.submit(items)
        while doomed.metric("plaudit_items_total", model="sums") < 200:
            time.sleep(0.01)
        assert not pending.done()
        doomed.kill()
        results = values(pending.result(120))
        afterwards = values(client.score(items[:300]))
    with RewardClient(server.url, model="sums") as client:
        expected = values(client.score(items))
    assert np.allclose(results, expected, atol=5e-5)  # type: ignore[arg-type]
    assert np.allclose(afterwards, expected[:300], atol=5e-5)  # type: ignore[arg-type]


# Requests


def test_adjacent_items_with_one_prompt_form_one_group_and_requests_are_bounded() -> None:
    items = [Item(prompt=f"p{i // 8}", response=str(i)) for i in range(1000)]
    items += [Item(prompt="big", response=str(i)) for i in range(1000, 1200)]
    items += [Item(prompt="big", response=str(i), truth=i) for i in range(1200, 1204)]
    with Scripted() as scripted, RewardClient(scripted.url) as client:
        assert values(client.score(items)) == [float(i) for i in range(1204)]
        sent = [
            (item["prompt"], len(item["responses"])) for request in scripted.asked for item in request.body["items"]
        ]
        assert max(request.responses for request in scripted.asked) <= 64
    assert sorted(sent)[:4] == [("big", 1)] * 4  # items with different truths are separate groups
    assert sorted(sent)[4:8] == [("big", 8), ("big", 64), ("big", 64), ("big", 64)]
    assert all(size == 8 for prompt, size in sent if prompt != "big")
    assert len(sent) == 125 + 8


def test_order_is_kept_when_replies_arrive_out_of_order() -> None:
    def slow(number: int, request: Asked) -> Answer:
        time.sleep(random.Random(number).uniform(0, 0.05))
        return Answer(right(request))

    with Scripted(slow) as one, Scripted(slow) as other, RewardClient([one.url, other.url]) as client:
        assert values(client.score(numbers(2000))) == [float(i) for i in range(2000)]
        assert sum(request.responses for request in one.asked + other.asked) == 2000
        assert min(len(one.asked), len(other.asked)) >= 8


def test_connections_are_reused_and_environment_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with Scripted() as scripted, RewardClient(scripted.url, api_key="secret-key", timeout=50) as client:
        for _ in range(10):
            client.score(numbers(1), truncate="left", priority=3)
        assert scripted.connections == 1
        request = scripted.asked[0]
    assert request.headers["authorization"] == "Bearer secret-key"
    assert 40 < float(request.headers["x-deadline"]) <= 50
    assert (request.body["truncate"], request.body["priority"], request.body["steps"]) == ("left", 3, False)


def test_items_that_cannot_be_encoded_fail_individually() -> None:
    items = [*numbers(2), Item(prompt="p", response="\ud800"), Item(prompt="p", response="3", truth=object())]
    with Scripted() as scripted, RewardClient(scripted.url) as client:
        results = client.score(items)
    assert values(results) == [0.0, 1.0, None, None]
    assert [r.error.type for r in results if r.error] == ["invalid_item"] * 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("text", r"items\[0\]: expected an Item, \(prompt, responses\) or a mapping, got str"),
        ({"prompt": "p"}, "an Item with a prompt needs a response"),
        ({"prompt": "p", "responses": []}, "responses is empty"),
        ({"prompt": 5, "response": "r"}, r"got `int` - at `\$.prompt`"),
        ({"prompt": "p", "response": "r", "text": "t"}, "an Item has one of prompt"),
        ({"prompt": "p", "response": "r", "responses": ["r"]}, "both response and responses"),
    ],
)
def test_invalid_entries_are_rejected(entry: Any, message: str) -> None:
    with RewardClient() as client, pytest.raises(RequestError, match=message):
        client.score([entry])


@pytest.mark.parametrize("url", ["127.0.0.1:5555", "", "ftp://x", "http://", "http://me:secret@host", "http://a\nb"])
def test_invalid_urls_are_rejected(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RewardClient(url)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="urls is empty"):
        RewardClient([])


# Retries


@pytest.mark.parametrize(
    "failure",
    [
        Answer({}, 500),
        Answer(b"<html>", 502),
        Answer({}, 408),
        Answer({"error": {"type": "overloaded", "message": "m"}}, 429),
        Answer({}, 503, {"Retry-After": "0"}),
        Answer({}, 503, {"Retry-After": "soon"}),
        Answer({}, 200, missing=1000),
        Answer(b"", 200, missing=1000),
    ],
)
def test_a_failed_attempt_is_retried(failure: Answer) -> None:
    with Scripted(fails_first(2, failure)) as scripted, RewardClient(scripted.url) as client:
        assert values(client.score(numbers(3))) == [0.0, 1.0, 2.0]
        assert len(scripted.asked) == 3


def test_retry_after_is_honoured_by_all_requests() -> None:
    with Scripted(fails_first(1, Answer({}, 503, {"Retry-After": "1"}))) as scripted:
        with RewardClient(scripted.url) as client:
            began = time.monotonic()
            assert values(client.score(numbers(1))) == [0.0]
            assert time.monotonic() - began >= 1.0
        with RewardClient(scripted.url, timeout=20) as client:
            scripted.script = lambda *_: Answer({}, 503, {"Retry-After": "3600"})
            began = time.monotonic()
            with pytest.raises(RewardUnavailable, match=rf"no scores from {scripted.url} after 1 attempt\(s\).*503"):
                client.score(numbers(1))
            assert time.monotonic() - began < 15  # a retry could not succeed before the timeout


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
def test_a_rejected_request_is_not_retried(status: int) -> None:
    refusal = Answer({"error": {"type": "some_type", "message": "it is\n so"}}, status)
    with Scripted(lambda *_: refusal) as scripted, RewardClient(scripted.url) as client:
        with pytest.raises(
            RequestRefused, match=rf"{scripted.url} answered {status} \(some_type: it is so\)"
        ) as caught:
            client.score(numbers(1))
        assert (caught.value.status, caught.value.type) == (status, "some_type")
        assert len(scripted.asked) == 1


def test_attempts_are_bounded() -> None:
    with Scripted(lambda *_: Answer({}, 500)) as scripted, RewardClient(scripted.url, retries=3) as client:
        with pytest.raises(RewardUnavailable, match=r"after 4 attempt\(s\).*answered 500"):
            client.score(numbers(1))
        assert len(scripted.asked) == 4
    url = f"http://127.0.0.1:{free_port()}"
    refused = rf"{url} after 3 attempt\(s\).*cannot be reached \(ConnectError"
    with RewardClient(url, retries=2) as client, pytest.raises(RewardUnavailable, match=refused):
        client.score(numbers(1))


@pytest.mark.slow
def test_a_hanging_server_costs_only_the_timeout() -> None:
    with Scripted(lambda *_: Answer(hang=True)) as hung:
        with RewardClient(hung.url, timeout=0.5) as client:
            began = time.monotonic()
            with pytest.raises(RewardUnavailable, match=r"did not answer within 0\.5 s"):
                client.score(numbers(100))
            assert 0.5 <= time.monotonic() - began < 30
        with Scripted() as sound, RewardClient([hung.url, sound.url], timeout=8) as client:
            assert values(client.score(numbers(640))) == [float(i) for i in range(640)]


@pytest.mark.slow
def test_a_stopped_server_is_abandoned_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "PROBE_EVERY", 0.2)
    monkeypatch.setattr(client_module, "PROBE_SECONDS", 1.0)

    def slowly(number: int, request: Asked) -> Answer:
        time.sleep(1.0)
        return Answer(right(request))

    # Like a stopped process: the kernel accepts connections and requests, and nothing answers.
    with socket.create_server(("127.0.0.1", 0)) as stopped, Scripted(slowly) as slow:
        urls = [f"http://127.0.0.1:{stopped.getsockname()[1]}", slow.url]
        with RewardClient(urls, timeout=240) as client:
            for _ in range(2):
                assert values(client.score(numbers(100))) == [float(i) for i in range(100)]
        requests = len(slow.asked)
        with RewardClient(slow.url) as client:
            assert values(client.score(numbers(100))) == [float(i) for i in range(100)]
    assert requests == 2 * (len(slow.asked) - requests), "nothing was asked twice of the slow one"


def test_a_hanging_request_is_hedged_on_the_same_server() -> None:
    """The first attempt gets no answer, the second gets one at once; without the hedge the call would never end."""
    with Scripted(lambda number, request: Answer(right(request), hang=number == 0)) as scripted:
        with RewardClient(scripted.url, timeout=None, retries=0, hedge=0.05) as client:
            assert values(client.score(numbers(3))) == [0.0, 1.0, 2.0]
        assert [request.responses for request in scripted.asked] == [3, 3]
    refusal = Answer({"error": {"type": "overloaded", "message": "no"}}, 503)
    with Scripted(lambda number, request: refusal if number else Answer(right(request))) as scripted:
        with RewardClient(scripted.url, retries=0, hedge=60) as client:
            assert values(client.score(numbers(1))) == [0.0]
            with pytest.raises(RewardUnavailable, match="after 1 attempt"):
                client.score(numbers(1))
        assert len(scripted.asked) == 2, "what answers in time is asked once"
    with pytest.raises(ConfigError, match="hedge is 0"):
        RewardClient(hedge=0)


def test_a_hedge_goes_to_another_server_and_the_loser_is_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Scripted() as sound:
        urls = [f"http://127.0.0.1:{silent.getsockname()[1]}", sound.url]
        with RewardClient(urls, timeout=None, retries=0, hedge=0.05) as client:
            calls = 30
            for _ in range(calls):
                assert values(client.score(numbers(2))) == [0.0, 1.0]
            assert len(sound.asked) == calls, "each call has one answer"
            silent.settimeout(60)
            connection, _ = silent.accept()  # some of the 30 calls began on this server
            connection.settimeout(60)
            while connection.recv(65536):
                pass  # end of stream: the client has cancelled the request and is still open
            connection.close()


def test_the_client_waits_for_a_server_that_comes_back() -> None:
    port = free_port()
    with RewardClient(f"http://127.0.0.1:{port}", timeout=120) as client:
        scored = client.submit(numbers(200))
        time.sleep(0.5)
        assert not scored.done()
        with Scripted(port=port):
            assert values(scored.result(120)) == [float(i) for i in range(200)]


def test_a_failing_server_is_ejected_and_later_retried() -> None:
    replicas = Replicas(["bad", "good"])
    bad, good = replicas.all
    good.outstanding = 5
    for _ in range(EJECT_AFTER):
        assert replicas.choose() is bad
        bad.failed()
    assert replicas.choose() is good
    bad.out_until = 0.0  # the cool-down is over: one request shows whether it is back
    assert replicas.choose() is bad
    bad.outstanding = 1
    assert replicas.choose() is good
    bad.failed()
    bad.outstanding = 0
    assert replicas.choose() is good
    bad.out_until = 0.0
    bad.succeeded()
    bad.outstanding = 4
    assert replicas.choose() is bad
    good.rest(30)
    bad.rest(10)
    assert replicas.choose() is bad
    assert 5 < replicas.rest_left() <= 10
    bad.rest_until = 0.0
    bad.failures = EJECT_AFTER
    bad.out_until = time.monotonic() + 30
    assert replicas.choose() is bad  # no other replica is available


def test_a_server_that_only_fails_gets_few_requests() -> None:
    with Scripted(lambda *_: Answer({}, 500)) as bad, Scripted() as good:
        with RewardClient([bad.url, good.url]) as client:
            for _ in range(40):
                assert values(client.score(numbers(2))) == [0.0, 1.0]
        assert len(good.asked) == 40
        assert len(bad.asked) <= 10


# Invalid replies


def spoiled(change: Callable[[dict[str, Any]], Any]) -> Callable[[int, Asked], Answer]:
    def answer(_: int, request: Asked) -> Answer:
        reply = right(request)
        changed = change(reply)
        return Answer(reply if changed is None else changed)

    return answer


def first(reply: dict[str, Any]) -> dict[str, Any]:
    item: dict[str, Any] = reply["items"][0]
    return item


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["items"].pop(), "2 items were sent, but the reply has 1"),
        (lambda r: r["items"].reverse(), r"items\[0\] of its reply: 3 responses were sent, but the reply has 1 scores"),
        (lambda r: first(r)["scores"].append(1.0), "3 responses were sent, but the reply has 4 scores"),
        (lambda r: first(r).update(scores=[1.0, float("nan"), 2.0]), "does not match the request"),
        (lambda r: first(r).update(scores=[1.0, float("inf"), 2.0]), "does not match the request"),
        (lambda r: str(r).replace("'", '"').replace("1.0", "1e999").encode(), "does not match the request|not finite"),
        (lambda r: first(r).update(scores=[1.0, None, 2.0]), "response 1 has neither a score nor an error"),
        (lambda r: first(r).update(scores=[1.0, "2", 2.0]), "does not match the request"),
        (lambda r: first(r).update(scores=[1.0, True, 2.0]), "does not match the request"),
        (lambda r: first(r).update(errors=[{"type": "t"}] * 3), "both a score and an error"),
        (lambda r: first(r).update(error={"type": "t"}), "both scores and an error"),
        (lambda r: first(r).update(scores=None), "neither scores nor an error"),
        (lambda r: first(r).update(truncated=[True]), "3 responses were sent, but the reply has 1 truncated"),
        (lambda r: r.pop("version"), "missing required field `version`"),
        (lambda r: r.update(version=""), "its version is empty"),
        (lambda r: r.update(model="other"), "the request was for 'sums', but 'other' answered"),
        (lambda r: str(r).replace("'", '"').encode()[:-7], "does not match the request"),
        (lambda r: b"", "does not match the request"),
        (lambda r: [], "does not match the request"),
        (lambda r: b"[" * 100_000, "does not match the request"),
    ],
)
def test_an_invalid_reply_raises(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    def quiet(reply: dict[str, Any]) -> Any:
        changed = change(reply)
        return changed if isinstance(changed, bytes | list) else None

    with Scripted(spoiled(quiet)) as scripted, RewardClient(scripted.url, model="sums") as client:
        with pytest.raises(BadReply, match=message):
            client.score([("p", ["0", "1", "2"]), ("q", ["3"])])
        assert len(scripted.asked) == 1


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (None, "step scores were requested, but the reply has none"),
        ([[0.5], []], "response 1 has a score but no step scores"),
        ([[0.5], None], "response 1 has a score but no step scores"),
        ([[0.5]], "2 responses were sent, but the reply has 1 steps"),
    ],
)
def test_step_scores_are_validated(steps: Any, message: str) -> None:
    script = spoiled(lambda r: first(r).update(steps=steps))
    with Scripted(script) as scripted, RewardClient(scripted.url) as client, pytest.raises(BadReply, match=message):
        client.score([("p", ["0", "1"])], steps=True)


def test_item_errors_are_returned_as_results_without_a_value() -> None:
    def partly(_: int, request: Asked) -> Answer:
        reply = right(request)
        reply["items"][0] = {"scores": [0.0, None], "errors": [None, {"type": "worker_crash", "message": "died"}]}
        reply["items"][1] = {"error": {"type": "model_failed", "message": "gone"}}
        return Answer(reply)

    with Scripted(partly) as scripted, RewardClient(scripted.url) as client:
        results = client.score([("p", ["0", "1"]), ("q", ["2", "3"]), ("r", ["4"])])
        assert len(scripted.asked) == 1
    assert values(results) == [0.0, None, None, None, 4.0]
    assert [r.error.type if r.error else "" for r in results] == ["", "worker_crash", *["model_failed"] * 2, ""]


def test_redirects_are_not_followed() -> None:
    with Scripted() as target:
        away = Answer({}, 307, {"Location": f"{target.url}/v1/rewards"})
        with Scripted(lambda *_: away) as scripted, RewardClient(scripted.url) as client:
            with pytest.raises(BadReply, match="answered 307; expected 200"):
                client.score(numbers(1))
            assert len(scripted.asked) == 1
        assert target.asked == []


def test_a_call_is_scored_again_if_the_version_changes() -> None:
    def swapped(number: int, request: Asked) -> Answer:
        return Answer(right(request, "0-a" if number < 3 else "1-b"))

    with Scripted(swapped) as scripted, RewardClient(scripted.url) as client:
        results = client.score(numbers(640))
        assert values(results) == [float(i) for i in range(640)]
        assert {r.version for r in results} == {"1-b"}
        assert 13 <= len(scripted.asked) <= 30
        with pytest.raises(VersionChanged, match="serves version 1-b, but 0-a was requested"):
            client.score(numbers(1), version="0-a")


def test_disagreeing_versions_raise() -> None:
    changed = "scored parts of one call with versions 0-"
    with (
        Scripted(lambda number, request: Answer(right(request, f"0-{number}"))) as scripted,
        RewardClient(scripted.url) as client,
        pytest.raises(VersionChanged, match=changed),
    ):
        client.score(numbers(300))


# In-process rewards, and the lifecycle of a client


class Lengths:
    """A reward whose score is the length of the response."""

    version = "0-lengths"

    def __init__(self, unit: float = 1.0) -> None:
        self.unit = unit

    def score(self, items: Sequence[Item]) -> list[Score | StepScores]:
        return [Score(self.unit * len(str(item.response)), version=self.version) for item in items]

    def close(self) -> None:
        pass


def test_an_in_process_reward_gets_the_same_checks() -> None:
    with RewardClient(transport=InProcess(Lengths())) as client:
        results = client.score([("p", ["", "a", "bb"]), *(("q", "c" * i) for i in range(300))])
        assert values(results) == [0.0, 1.0, 2.0, *map(float, range(300))]
        assert {r.version for r in results} == {"0-lengths"}
        with pytest.raises(RequestRefused, match="not_a_process_model"):
            client.score([("p", "a")], steps=True)
    with RewardClient(transport=InProcess(Lengths(float("nan")))) as client, pytest.raises(BadReply):
        client.score([("p", "a")])


def test_an_asgi_application_needs_no_socket() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["method"], scope["path"]) == ("POST", "/v1/rewards")
        reply = b'{"model": "m", "version": "v", "items": [{"scores": [0.25]}]}'
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": reply})

    with RewardClient(transport=httpx.ASGITransport(app)) as client:
        assert client.score([("p", "a")]) == [Score(0.25, version="v")]


def test_cancel_and_close_end_pending_calls() -> None:
    with Scripted(lambda *_: Answer(hang=True)) as hung:
        client = RewardClient(hung.url)
        first, second = client.submit(numbers(1)), client.submit(numbers(1))
        while len(hung.asked) < 2:
            time.sleep(0.01)
        assert first.cancel()
        assert not second.done()
        client.close()
        assert second.cancelled()
        client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            client.score(numbers(1))


def test_a_call_that_fails_leaves_the_client_usable() -> None:
    with Scripted(fails_first(1, Answer(b"no"))) as scripted, RewardClient(scripted.url) as client:
        with pytest.raises(BadReply):
            client.score(numbers(1))
        assert values(client.score(numbers(1))) == [0.0]
