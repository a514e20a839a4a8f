"""Keys from a file against one real server: roles, expiry, quotas, and a file that changes while the server runs."""

from __future__ import annotations

import re
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit.client.client import RewardClient
from plaudit.serve.http.keys import Meter
from tests.command import plaudit_here

from .hostile import KNOWN
from .process import ServerProcess

FLAG_KEY = "key-of-the-flag-1"
SCORE = {"model": "sums", "items": [KNOWN]}


class KeyFile:
    """keys.toml and the keys that `plaudit keys add` printed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, str] = {}

    def add(self, name: str, *options: str) -> str:
        result = plaudit_here("keys", "add", name, "--file", str(self.path), *options)
        assert result.returncode == 0, result.stderr
        self.keys[name] = result.stdout.strip()
        return self.keys[name]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.toml")
    file.add("ann")
    file.add("ops", "--roles", "admin")
    file.add("prometheus", "--roles", "metrics")
    file.add("all", "--roles", "score,metrics,admin", "--expires", "90d")
    file.add("old", "--expires", "2020-01-01")
    file.add("slow", "--requests-per-minute", "2")
    file.add("thrifty", "--tokens-per-minute", "30")
    return file


@pytest.fixture(scope="module")
def server(file: KeyFile) -> Iterator[ServerProcess]:
    tree = {"models": {"sums": {"path": "sums", "threads": 1}}, "api_key_file": str(file.path), "log": "requests"}
    with ServerProcess(tree, "--api-key", f"flag={FLAG_KEY}") as server:
        yield server


def send(server: ServerProcess, key: str | None, method: str = "POST", path: str = "/v1/rewards") -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return server.http.request(method, path, headers=headers, json=SCORE if method == "POST" else None)


def until(what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} within {seconds} s"
        time.sleep(0.05)


def logged(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    return [each for each in server.events() if each["event"] == event]


def test_the_file_has_hashes_and_no_keys(file: KeyFile, tmp_path: Path) -> None:
    text = file.path.read_text()
    assert not [key for key in file.keys.values() if key in text]
    tables = tomllib.loads(text)
    assert tables["ops"]["roles"] == ["admin"]
    assert all(re.fullmatch("[0-9a-f]{64}", table["sha256"]) for table in tables.values())
    assert len({key for key in file.keys.values() if len(key) >= 43}) == 7
    listed = plaudit_here("keys", "list", "--file", str(file.path)).stdout
    assert re.search(r"^old +score +expired 2020-01-01", listed, re.M)
    assert not [key for key in file.keys.values() if key in listed]
    for arguments, message in (
        (["ann"], "already has a key named 'ann'"), (["a b"], "'a b'"), (["admin"], "'admin'"),
        (["new", "--roles", "scores"], "'scores'"), (["new", "--expires", "soon"], "'soon'"),
        (["new", "--tokens-per-minute", "0"], "0"),
    ):  # fmt: skip
        before = file.path.read_text()
        result = plaudit_here("keys", "add", *arguments, "--file", str(file.path))
        assert (result.returncode, result.stdout) == (2, ""), arguments
        assert message in result.stderr
        assert file.path.read_text() == before


def test_a_key_does_what_its_roles_allow(server: ServerProcess, file: KeyFile) -> None:
    statuses = {
        "ann": (200, 403, 403), "ops": (403, 403, 400), "prometheus": (403, 200, 403), "all": (200, 200, 400),
        "nobody": (401, 401, 401),
    }  # fmt: skip
    for name, expected in statuses.items():
        key = file.keys.get(name)
        replies = (send(server, key), send(server, key, "GET", "/metrics"), send(server, key, path="/admin/swap"))
        assert tuple(reply.status_code for reply in replies) == expected, name
        for reply in replies:
            if reply.status_code == 403:
                error = reply.json()["error"]
                assert error["type"] == "forbidden"
                assert f"'{name}'" in error["message"]
        assert send(server, key, "GET", "/v1/models").status_code == (401 if key is None else 200)
    assert send(server, FLAG_KEY).status_code == 200
    assert send(server, FLAG_KEY, "GET", "/metrics").status_code == 200
    for path in ("/health/live", "/health/ready", "/v2/health/ready"):
        assert send(server, None, "GET", path).status_code == 200


def test_a_missing_role_is_reported_in_each_protocols_error_format(server: ServerProcess, file: KeyFile) -> None:
    shapes: dict[str, Callable[[Any], str]] = {
        "/v1/rewards": lambda body: body["error"]["message"],
        "/v2/models/sums/infer": lambda body: body["error"],
        "/get_reward": lambda body: body["error"]["message"],
        "/worker_value_inference": lambda body: body["text"],
        "/v1/classify": lambda body: body["message"],
        "/classify": lambda body: body["error"]["message"],
        "/predict": lambda body: body["error"],
        "/tei/rerank": lambda body: body["error"],
        "/generate": lambda body: body["error"]["message"],
    }
    for path, message in shapes.items():
        reply = send(server, file.keys["prometheus"], path=path)
        assert reply.status_code == 403, (path, reply.text)
        assert "needs a key with the role score" in message(reply.json()), path


def test_an_expired_key_is_rejected(server: ServerProcess, file: KeyFile) -> None:
    reply = send(server, file.keys["old"])
    assert reply.status_code == 401
    assert "expired" in reply.json()["error"]["message"]
    assert "2020-01-01" in reply.json()["error"]["message"]


def test_requests_beyond_the_rate_get_429_with_retry_after(server: ServerProcess, file: KeyFile) -> None:
    replies = [send(server, file.keys["slow"], "GET", "/v1/models") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert 1 <= int(replies[-1].headers["retry-after"]) <= 30
    error = replies[-1].json()["error"]
    assert (error["type"], error["retryable"]) == ("quota", True)
    assert "2 requests per minute" in error["message"]
    assert send(server, None, "GET", "/health/ready").status_code == 200
    assert send(server, file.keys["ann"]).status_code == 200
    assert server_metric(server, file, "plaudit_rejected_total", reason="quota") == 1


def test_tokens_beyond_the_quota_delay_the_next_request(server: ServerProcess, file: KeyFile) -> None:
    key = file.keys["thrifty"]
    spent = 0
    while (reply := send(server, key)).status_code == 200:
        spent += reply.json()["usage"]["tokens"]
        assert spent <= 100
    assert spent >= 30
    assert reply.status_code == 429
    assert reply.json()["error"]["type"] == "quota"
    assert 1 <= int(reply.headers["retry-after"]) <= 2 * (spent - 30) + 3
    assert send(server, key, "GET", "/v1/models").status_code == 200, "which has no tokens"


def test_a_meter_limits_to_its_rate() -> None:
    meter = Meter(60, now=0.0)
    for _ in range(60):
        assert meter.wait(0.0) == 0
        meter.take(1)
    assert meter.wait(0.0) == pytest.approx(1.0)
    assert meter.wait(0.9) == pytest.approx(0.1)
    assert meter.wait(1.0) == 0
    meter.take(121)  # into debt: the number of tokens is not known in advance
    assert meter.wait(1.0) == pytest.approx(121)
    assert meter.wait(10_000) == 0
    meter.take(60)
    assert meter.wait(10_000) == pytest.approx(1), "however long it waited, it holds a minute's worth"


def test_the_client_waits_for_its_quota(server: ServerProcess, file: KeyFile) -> None:
    key = file.add("patient", "--requests-per-minute", "60")
    until("known", lambda: send(server, key, "GET", "/v1/models").status_code == 200)
    while send(server, key, "GET", "/v1/models").status_code == 200:
        pass
    with RewardClient(server.url, model="sums", api_key=key, timeout=60) as client:
        assert client.score([("3+4+5=", "3+4=7;7+5=12;#12")])[0].value is not None


def test_changes_of_the_key_file_are_applied(server: ServerProcess, file: KeyFile) -> None:
    """Added, removed, broken and repaired, read on its change and on SIGHUP; other keys keep working."""
    fresh = file.add("fresh")
    until("let in", lambda: send(server, fresh).status_code == 200)
    content = file.path.read_text()
    for broken in ("[ann]\nsha256 = 12\n", "[ann", "", "# nothing\n"):
        refused = len(logged(server, "keys_refused"))
        file.path.write_text(broken)
        if broken != "[ann":  # one is read by its change alone
            server.process.send_signal(signal.SIGHUP)
        until("refused", lambda before=refused: len(logged(server, "keys_refused")) > before)  # type: ignore[misc]
        assert send(server, fresh).status_code == 200
    file.path.unlink()
    refused = len(logged(server, "keys_refused"))
    server.process.send_signal(signal.SIGHUP)
    until("refused", lambda: len(logged(server, "keys_refused")) > refused)
    reason = logged(server, "keys_refused")[-1]["reason"]
    assert str(file.path) in reason
    assert "stay in use" in reason
    assert send(server, fresh).status_code == 200
    loaded = len(logged(server, "keys_loaded"))
    file.path.write_text(content[: content.index("[fresh]")])
    server.process.send_signal(signal.SIGHUP)
    until("read", lambda: len(logged(server, "keys_loaded")) > loaded)
    until("revoked", lambda: send(server, fresh).status_code == 401)
    assert send(server, file.keys["ann"]).status_code == 200
    assert send(server, FLAG_KEY).status_code == 200
    assert send(server, file.keys["slow"], "GET", "/v1/models").status_code in (200, 429)
    assert server.process.poll() is None


def test_the_log_has_key_names_but_no_keys(server: ServerProcess, file: KeyFile) -> None:
    send(server, file.keys["ann"])
    until("logged", lambda: any(each["tenant"] == "ann" for each in logged(server, "request")))
    log = server.log()
    assert not [key for key in (*file.keys.values(), FLAG_KEY) if key in log]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[ann]\nsha256 = 'abc'\n", "[ann]: sha256"),
        ("[ann]\nsha256 = '{hash}'\nroles = ['scores']\n", "[ann]: roles"),
        ("[ann]\nsha256 = '{hash}'\nrole = ['score']\n", "'roles'"),
        ("[admin]\nsha256 = '{hash}'\n", "'admin'"),
        ("[ann]\nsha256 = '{hash}'\n[bob]\nsha256 = '{hash}'\n", "the same key"),
        ("secret-of-ann\n", "not valid TOML"),
        ("", "plaudit keys add"),
        (None, "no key file"),
    ],
)
def test_a_bad_key_file_is_reported_in_one_line_at_startup(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "keys.toml"
    if text is not None:
        file.write_text(text.replace("{hash}", "ab" * 32))
    result = plaudit_here("serve", "--port", "0", "--api-key-file", str(file))
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("plaudit: ")
    assert str(file) in last
    assert message in last


def server_metric(server: ServerProcess, file: KeyFile, name: str, **labels: str) -> float:
    server.http.headers["authorization"] = f"Bearer {file.keys['prometheus']}"
    try:
        return server.metric(name, **labels)
    finally:
        del server.http.headers["authorization"]
