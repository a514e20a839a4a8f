"""Permissions, what model files may do, and what the server discloses: section D of docs/reliability.md."""

from __future__ import annotations

import http.server
import inspect
import os
import pickle
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from plaudit.serve.http.keys import Keys
from tests.forked import run_forked
from tests.serve.hostile import KNOWN, LEAK, Answer, Target, clean_error, clean_message, copied
from tests.serve.process import ServerProcess

ANN, BOB, ADMIN = "key-of-ann-1234", "key-of-bob-5678", "key-of-admin-9012"
# Routes that need no key: pages, health, the version. Every other route needs one, including future routes.
OPEN = re.compile(
    r"/|/docs|/openapi\.json|(/[a-z]+)?(/version|/ping|/health(/live|/ready|_generate)?|/v2/health/(live|ready))"
    r"|/v2/models/\w+(/versions/1)?/ready"
)
# Routes with Plaudit's error format; the others use the formats of other servers.
OURS = {"/v1/rewards", "/v1/models", "/admin/swap", "/metrics", "/stats"}
CANARY = "canary"
BINARY = "application/x-plaudit-tokens"
TEMPLATE_SECONDS = 5.0
REFUSING = "{% if messages[0]['content'] == '0' %}{{ raise_exception('no zeros here') }}{% endif %}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def target(root: Path) -> Iterator[Target]:
    for name, template in (
        ("escaping", REFUSING + "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        ("endless", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    ):
        (copied("sums", root / name) / "chat_template.jinja").write_text(template)
    tree = {
        "models": {
            "sums": {"path": "sums"},
            "escaping": {"path": str(root / "escaping")},
            "endless": {"path": str(root / "endless")},
        },
        "api_keys": {"ann": ANN, "bob": BOB},
        "admin_key": ADMIN,
        "model_root": str(root),
        "log": "requests",
    }
    with ServerProcess(tree) as server:
        yield Target(server, ANN)


def bare(target: Target) -> httpx.Client:
    """A client without a key."""
    return httpx.Client(base_url=target.server.url, timeout=60)


def swap(target: Target, path: str, model: str = "sums", key: str = ADMIN) -> httpx.Response:
    return target.server.http.post(
        "/admin/swap", json={"model": model, "path": path}, headers={"authorization": f"Bearer {key}"}
    )


def swap_refused(target: Target, path: str) -> str:
    """Check that the swap is rejected and changes nothing; return the error message."""
    version = target.server.rewards([KNOWN]).json()["version"]
    error = target.refused(swap(target, path), 400, "swap_failed")
    assert error["message"].endswith("nothing has changed")
    assert target.server.rewards([KNOWN]).json()["version"] == version
    message: str = error["message"]
    return message


# Keys and routes


def test_every_route_needs_a_key(target: Target) -> None:
    """D53: every route that is not public rejects requests without a valid key, whatever they send instead."""
    with bare(target) as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/health/live", "/docs", *OURS} <= set(paths)
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": ""},
            {"authorization": "Bearer"},
            {"authorization": "Bearer wrong-key-1234"},
            {"authorization": f"Basic {ANN}"},
            {"authorization": ANN},
            {"authorization": f"Bearer {ANN[:-1]}"},
            {"authorization": f"Bearer {ANN}x"},
            {"authorization": f"Bearer {ANN.upper()}"},
            {"authorization": f"Bearer {ANN} {ANN}"},
            {"x-api-key": "wrong-key-1234"},
            {"authorization": "Bearer wrong-key-1234", "x-api-key": ANN},
            {"triton-access-token": ANN[:-1]},
            {"cookie": f"key={ANN}"},
        ]
        for path, methods in paths.items():
            for method in methods:
                if method == "get" and OPEN.fullmatch(path):
                    assert client.request(method, path).status_code in (200, 503)
                    continue
                assert "security" in methods[method]
                for headers in wrong:
                    reply = client.request(method, path, headers=headers, json={})
                    answer = Answer(reply.status_code, reply.headers, reply.content)
                    closed = (401, 403) if path.startswith("/admin") else (401,)
                    assert answer.status in closed, (path, headers)
                    assert not LEAK.search(reply.text)
                    if path in OURS:
                        assert clean_error(answer)["type"] in ("unauthorized", "forbidden")
                    if answer.status == 401:
                        assert reply.headers["www-authenticate"] == "Bearer"
                for query in (f"?key={ANN}", f"?api_key={ANN}", f"?Authorization=Bearer%20{ANN}"):
                    assert client.request(method, path + query, json={}).status_code in (401, 403)
        assert client.get("/v1/models", headers={"authorization": f"bearer {BOB}"}).status_code == 200
    assert "compare_digest" in inspect.getsource(Keys)
    target.sound()


@pytest.mark.parametrize(
    "host", ["x/health/live", "127.0.0.1/health/live?", "a#/health/live", "", "/", "x:y", "@/docs"]
)
def test_the_host_header_does_not_bypass_the_key(target: Target, host: str) -> None:
    """D54: only the path selects the route."""
    for lines in ("", "X-Forwarded-Host: x/health/live\r\nX-Original-URL: /health/live\r\nX-Rewrite-URL: /docs\r\n"):
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n".encode()
        expected = (400, "bad_http") if host else (401, "unauthorized")
        target.refused(target.raw(request), *expected)
    absolute = b"GET http://x/v1/models HTTP/1.1\r\nHost: health\r\n\r\n"
    target.refused(target.raw(absolute), 401, "unauthorized")


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1//models", "/health/live/../../v1/models", "/docs/../metrics",
     "/health/%2e%2e/metrics", "/health/..%2fmetrics", "/%2fmetrics", "/metrics%00", "/metrics%20", "/metrics;x",
     "/METRICS", "/metrics\\", "/v1/models%3f", "/%ff", "/admin", "/admin/", "/.", "/..%5cmetrics"],
)  # fmt: skip
def test_paths_are_not_normalised(target: Target, path: str) -> None:
    """D55: only the exact path is a route; paths are not cleaned up or corrected."""
    answer = target.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    assert answer.status in (400, 404), answer
    clean_error(answer)


@pytest.mark.slow
def test_encoded_paths_and_other_methods_need_the_same_key(target: Target) -> None:
    """D55: a percent-encoded path is the same route and needs the same key; only the route's methods are accepted."""
    for path in ("/%6detrics", "/v1%2Fmodels", "/v1/%6D%6F%64els"):
        target.refused(target.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()), 401, "unauthorized")
    for path in ("/v1/models/", "/v1/%6dodels%2f", "/v1/models/.", "/v1/models/sums"):  # errors as OpenAI writes them
        assert target.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()).status == 401
    with bare(target) as client:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            for method in ("HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "TRACE", "PROPFIND"):
                reply = client.request(method, path)
                if method.lower() in methods:
                    assert reply.status_code == 401
                    continue
                if method == "HEAD" and OPEN.fullmatch(path):  # as load balancers request
                    assert (reply.status_code in (200, 503), reply.content) == (True, b""), path
                    continue
                assert reply.status_code == 405, (method, path)
                assert method not in reply.headers["allow"]
                assert not LEAK.search(reply.text)
        reply = client.post("/v1/rewards", json={}, headers={"x-http-method-override": "GET"})
        assert reply.status_code == 401
    assert target.raw(b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n").status in (400, 404, 405)
    websocket = target.head("Connection: Upgrade", "Upgrade: websocket", method="GET", path="/v1/models")
    assert target.raw(websocket.replace(ANN.encode(), b"wrong-key-1234") + b"\r\n").status == 401
    target.sound()


def test_admin_routes_need_the_admin_key(target: Target) -> None:
    """D56: 403 with another key, 401 without a key, and nothing is swapped."""
    before = target.server.rewards([KNOWN]).json()["version"]
    for key in (ANN, BOB, "wrong-key-1234"):
        target.refused(swap(target, "escaping", key=key), 403, "forbidden")
    with bare(target) as client:
        target.refused(client.post("/admin/swap", json={"model": "sums", "path": "escaping"}), 401, "unauthorized")
    assert target.server.rewards([KNOWN]).json()["version"] == before


def test_without_an_admin_key_admin_routes_are_closed() -> None:
    """D56, D66: by default there is no administrator, and no other machine can connect."""
    rule = {"models": {"rule": {"kind": "rule", "rule": "regex", "pattern": "#12$"}}}
    with ServerProcess(rule) as server:
        for headers in ({}, {"authorization": "Bearer None"}, {"authorization": "Bearer"}):
            reply = server.http.post("/admin/swap", json={"model": "rule", "path": "."}, headers=headers)
            assert reply.status_code == 403
            assert clean_error(Answer(403, reply.headers, reply.content))["type"] == "forbidden"
        assert server.rewards([KNOWN], "rule").json()["items"][0]["scores"] == [1.0]
        assert listening(psutil.Process(server.process.pid)) == {("127.0.0.1", server.port)}


def test_a_public_address_needs_a_key() -> None:
    """D53, D66: without a key the server does not start on such an address and never listens there."""
    for host in ("0.0.0.0", "127.0.0.1.example.org"):
        result = run_forked("serve", "--host", host, "--port", "0")
        assert result.returncode == 2
        assert "--api-key" in result.stderr
        loading, refusal = result.stderr.splitlines()
        assert loading.startswith("plaudit serve: loading")
        assert refusal.startswith("plaudit: ")


# Model files


def test_swaps_stay_under_the_root(target: Target, root: Path, tmp_path: Path) -> None:
    """D57: no path leads out of the root, not even through a symlink."""
    outside = copied("sums", tmp_path / "outside")
    (root / "link").symlink_to(outside, target_is_directory=True)
    (root / "deep").mkdir()
    (root / "deep" / "link").symlink_to("../..")
    linked = copied("sums", root / "linked")
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(outside / "model.safetensors")
    (root / "file").write_text("{}")
    for path in (
        "../../etc", "..", f"../{outside.name}", "/etc", "link", "deep/link", "linked", "http://127.0.0.1/x",
        "hf://evil/model", "file:///etc", "a\0b", "missing", "file", "escaping/../../..", "~", "$HOME", "x" * 5000,
        "../" * 2000,
    ):  # fmt: skip
        swap_refused(target, path)
    assert not target_opened(target, outside)
    error = target.refused(swap(target, "escaping", model="nobody"), 404, "unknown_model")
    assert "nobody" in error["message"]
    for body in (b"", b"[]", b'{"model": "sums"}', b'{"model": "sums", "path": "x", "trust_remote_code": true}'):
        reply = target.server.http.post("/admin/swap", content=body, headers={"authorization": f"Bearer {ADMIN}"})
        target.refused(reply, 400, "invalid_request")


def target_opened(target: Target, directory: Path) -> bool:
    """Whether a process of the server has a file of the directory open or mapped."""
    processes = target.tree()
    paths = [file.path for process in processes for file in process.open_files()]
    paths += [region.path for process in processes for region in process.memory_maps()]
    return any(path.startswith(str(directory)) for path in paths)


def test_code_in_a_model_directory_is_not_run(target: Target, root: Path) -> None:
    """D58: a model that needs its own code is rejected, and none of its modules is imported."""
    evil = copied("sums", root / "coded", auto_map={"AutoModelForSequenceClassification": "evil.Model"})
    canary = root / f"{CANARY}-code"
    (evil / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Model: pass\n")
    (evil / "__init__.py").write_text(f"open({str(canary)!r}, 'w')\n")
    assert "auto_map" in swap_refused(target, "coded")
    assert not canary.exists()


class Evil:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (self.canary,)


def test_pickles_are_not_opened(target: Target, root: Path) -> None:
    """D59: pickled weights are rejected, and their code does not run."""
    canary = root / f"{CANARY}-pickle"
    evil = copied("sums", root / "pickled")
    (evil / "model.safetensors").unlink()
    (evil / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(canary))))
    assert "pytorch_model.bin" in swap_refused(target, "pickled")
    assert not canary.exists()


def test_damaged_weights_are_refused(target: Target, root: Path) -> None:
    """D59: with a head of another shape or NaN weights, the old version keeps serving. test_faults.py has truncated
    weights."""
    shaped = copied("sums", root / "shaped")
    weights = load_file(shaped / "model.safetensors")
    save_file({**weights, "score.weight": weights["score.weight"][:, :40].copy()}, shaped / "model.safetensors")
    empty = copied("sums", root / "empty")
    save_file({k: np.full_like(v, np.nan) for k, v in weights.items()}, empty / "model.safetensors", {"format": "pt"})
    swap_refused(target, "shaped")
    assert "weights are damaged" in swap_refused(target, "empty")


@pytest.mark.slow
def test_a_malicious_chat_template_is_stopped(target: Target) -> None:
    """A24, D60: a chat template that raises, accesses Python or loops is an error of its items; others still work."""
    for model, prompt, words in (
        ("escaping", "0", "no zeros here"),
        ("escaping", "1+2=", "sandbox"),
        ("endless", "1+2=", "did not finish"),
    ):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "#3"}]
        error = target.item_refused({"messages": messages}, "bad_messages", model)
        assert words in error["message"]
    good = [{"role": "user", "content": "3+4+5="}, {"role": "assistant", "content": KNOWN["responses"][0]}]
    scores = target.server.rewards([{"messages": good}]).json()["items"][0]["scores"]
    assert scores == [pytest.approx(target.known, abs=5e-5)]


def test_the_deadline_holds_for_many_items_of_an_endless_template(target: Target) -> None:
    """D60: a request's deadline also applies while its items are rendered."""
    answer = {"role": "assistant", "content": "#3"}
    items = [{"messages": [{"role": "user", "content": f"{n}+2="}, answer]} for n in range(50)]
    reply = target.server.http.post(
        "/v1/rewards", json={"model": "endless", "items": items}, headers={"x-deadline": "2"}
    )
    assert reply.elapsed.total_seconds() < 10 * TEMPLATE_SECONDS, "and not the 50 items' time"
    target.refused(reply, 504, "deadline")


# Binary bodies, network and logs


@pytest.mark.parametrize(
    "body",
    [
        b"\x01",
        struct.pack("<I", 2**32 - 1),
        struct.pack("<II", 2**32 - 1, 0),
        struct.pack("<III", 1, 0, 2**32 - 1),
        struct.pack("<III", 1, 0, 2**31),
        struct.pack("<IIII", 2, 0, 2**32 - 1, 1) + struct.pack("<i", 5),
        struct.pack("<IIII", 2, 0, 2, 1) + struct.pack("<i", 5),
        struct.pack("<III", 1, 1, 1) + struct.pack("<i", 5),
        struct.pack("<III", 1, 0, 1) + struct.pack("<ii", 5, 5),
        struct.pack("<III", 1, 0, 1) + b"\x05\0\0",
        struct.pack("<III", 1, 0, 0) + b"\0",
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        pickle.dumps(Evil("canary-binary")),
    ],
    ids=range(13),
)
def test_inconsistent_binary_bodies_are_rejected(target: Target, body: bytes) -> None:
    """D61: a body must match the numbers in its header to the byte, and they are not trusted before that check."""
    before = target.peak_bytes()
    reply = target.server.http.post("/v1/rewards?model=sums", content=body, headers={"content-type": BINARY})
    target.refused(reply, 400, "invalid_binary")
    assert target.peak_bytes() - before < 20 << 20
    assert not Path("canary-binary").exists()


def test_other_binary_formats_are_rejected(target: Target) -> None:
    """D61: no pickle, .npy or torch file is opened, whatever its content type."""
    for kind in ("application/octet-stream", "application/x-npy", "application/python-pickle", "application/x-tensor"):
        reply = target.server.http.post("/v1/rewards", content=pickle.dumps([1]), headers={"content-type": kind})
        target.refused(reply, 415, "unsupported_type")


@pytest.mark.slow
def test_no_url_in_a_request_is_fetched(target: Target, root: Path) -> None:
    """D62: the server fetches no URL from a request."""
    hits: list[str] = []

    class Trap(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_error(404)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    trap = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trap)
    threading.Thread(target=trap.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{trap.server_port}/x"
    try:
        part = {"type": "image_url", "image_url": {"url": url}}
        items: list[Any] = [
            {"text": url}, {"prompt": url, "responses": [url, [url]]}, {"url": url}, {"text": url, "truth": url},
            {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": url}]},
            {"messages": [{"role": "user", "content": url, "image_url": url}, {"role": "assistant", "content": url}]},
        ]  # fmt: skip
        assert target.server.rewards(items).status_code == 200
        target.refused(target.server.rewards(items, url), 404, "unknown_model")
        for path in (url, url.replace("http", "file"), f"../{url}", f"\\\\127.0.0.1:{trap.server_port}\\x"):
            swap_refused(target, path)
        pointing = copied("sums", root / "pointing", _name_or_path=url, base_model_name_or_path=url)
        (pointing / "model.safetensors").unlink()
        swap_refused(target, "pointing")
        headers = {"referer": url, "origin": url, "x-forwarded-for": url, "x-wap-profile": url, "host": url[7:-2]}
        assert target.server.http.get("/v1/models", headers=headers).status_code == 200
        assert hits == []
    finally:
        trap.shutdown()
        trap.server_close()


def test_logs_contain_no_texts_and_no_keys(target: Target) -> None:
    """D64: the log has each event and the name of its key, in lines that no client can forge."""
    secret = "777+888+999="
    target.server.rewards([{"prompt": secret, "responses": [secret]}, {"text": secret}, {"texts": secret}])
    target.server.http.get("/nowhere", params={"key": ANN, "q": secret})
    target.post(b'{"' + secret.encode() + b'": 1}')
    for request_id in ("good-id.1:2/3", 'forged"}', "a b", "x" * 129, "\u00e9", "%0d%0aSet-Cookie:x"):
        reply = target.server.http.get("/v1/models", headers={"x-request-id": request_id.encode()})
        assert (reply.headers["x-request-id"] == request_id) == (request_id == "good-id.1:2/3")
    forged = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\rEvent: b\nSet-Cookie: c\r\n\r\n"
    assert target.raw(forged).status == 400
    assert target.raw(b"GET /a%0d%0a%7b%22event%22:%22forged%22%7d HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 404
    target.server.http.get("/v1/models", headers={"x-request-id": "the-last"})
    until(lambda: "the-last" in target.server.log())  # a separate thread writes the log
    log = target.server.log()
    for word in (secret, ANN, BOB, ADMIN, "wrong-key-1234", "#12", "Set-Cookie"):
        assert [line for line in log.splitlines() if word in line] == []
    requests = [event for event in target.server.events() if event["event"] == "request"]
    assert {"request_id", "method", "path", "status", "tenant", "ms"} <= set(requests[-1])
    assert {"ann"} <= {event["tenant"] for event in requests}
    assert "good-id.1:2/3" in {event["request_id"] for event in requests}
    assert "forged" not in {event["event"] for event in target.server.events()}
    assert [line for line in log.splitlines() if not line.startswith(("{", "plaudit serve:"))] == []


def test_one_key_cannot_learn_what_another_key_sent(target: Target) -> None:
    """D65: what one key has had scored is computed again for another, so that the duration discloses nothing."""
    item = {"prompt": "12+34+56=", "responses": ["12+34=46;46+56=102;#102"]}

    def token_counts(key: str) -> dict[str, float]:
        kinds = ("cached", "deduplicated", "prefix", "computed")
        before = {kind: target.server.metric("plaudit_tokens_total", model="sums", kind=kind) for kind in kinds}
        reply = target.server.http.post(
            "/v1/rewards", json={"model": "sums", "items": [item]}, headers={"authorization": f"Bearer {key}"}
        )
        assert reply.status_code == 200
        return {
            kind: target.server.metric("plaudit_tokens_total", model="sums", kind=kind) - before[kind] for kind in kinds
        }

    first, again, other = token_counts(ANN), token_counts(ANN), token_counts(BOB)
    assert again["cached"] > 0
    assert again["computed"] == 0
    assert other["cached"] == 0
    assert other["computed"] >= first["computed"]
    assert other["prefix"] <= 1 + first["prefix"]


def test_only_the_configured_port_is_open(target: Target) -> None:
    """D66: only one process of the server listens, at one address and port."""
    addresses = set().union(*(listening(process) for process in target.tree()))
    assert addresses == {("127.0.0.1", target.server.port)}


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    connections = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN or not c.raddr]
    return {(c.laddr.ip, c.laddr.port) for c in connections}


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def unready(target: Target) -> set[str]:
    models = target.server.http.get("/stats").json()["models"]
    return {model["name"] for model in models if model["state"] != "ready"}


def test_errors_of_a_failed_model_disclose_no_paths(target: Target, root: Path) -> None:
    """D63: the loader's error about a removed directory is in the log, not in replies."""
    shutil.rmtree(root / "endless")
    for worker in sorted(target.server.workers(), key=lambda worker: -worker.pid):  # the newest is probably the model's
        worker.kill()
        until(lambda: unready(target))
        if "endless" in unready(target):
            break
    until(lambda: target.server.rewards([KNOWN], "endless").status_code == 503)  # after some attempts to start it
    until(lambda: unready(target) == {"endless"})
    target.refused(target.server.rewards([KNOWN], "endless"), 503, "not_ready")
    with bare(target) as client:
        health = client.get("/health/ready")
    assert health.status_code == 503
    for reason in health.json()["reasons"]:
        clean_message(reason)
    assert not LEAK.search(target.server.http.get("/v1/models").text)
    assert str(root / "endless") in target.server.log()
