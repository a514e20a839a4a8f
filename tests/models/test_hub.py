"""`plaudit pull` against a local HTTP server that simulates the hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from plaudit.core import Engine
from plaudit.errors import ModelError
from plaudit.models.catalog import EMBEDDED, resolve
from plaudit.models.hub import is_hub_name, pull
from tests.command import plaudit_here

SHA = "c0ffee" + "0" * 34
MODEL = {file.name: file.read_bytes() for file in (EMBEDDED / "sums-policy").iterdir() if file.is_file()}
REPOSITORIES = {
    "org/tiny": {**MODEL, "pytorch_model.bin": b"a pickle", "README.md": b"words"},
    "org/pickled": {"config.json": MODEL["config.json"], "pytorch_model.bin": b"a pickle"},
}


class Hub:
    """The routes that `huggingface_hub` uses: the commit, tree and files of a revision."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                hub.paths.append(path)
                status, content, headers = hub.answer(path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository == "org/gated":
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if repository not in REPOSITORIES:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        files = REPOSITORIES[repository]
        match rest:
            case ["revision", "main" | "v1"]:
                info = {"id": repository, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
                return 200, json.dumps(info).encode(), {"Content-Type": "application/json"}
            case ["revision", _]:
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            case ["tree", commit] if commit == SHA:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
            case ["resolve", _, name]:
                etag = hashlib.sha1(files[name]).hexdigest()
                return 200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": SHA}
        return 404, b"{}", {}

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield hub
    hub.close()


def test_pulled_model_loads_by_name_without_further_requests(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"no model 'org/tiny': .*`plaudit pull org/tiny` fetches it"):
        resolve("org/tiny")
    assert not hub.paths, "a name alone opens no connection"
    process = plaudit_here("pull", "org/tiny")
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"org/tiny: {resolve('org/tiny')}\n"
    assert sorted(file.name for file in resolve("org/tiny").iterdir()) == sorted(MODEL)
    requests = len(hub.paths)
    pulled, embedded = Engine.load("org/tiny"), Engine.load("sums-policy")
    assert pulled.generate("8+7+6=")[0].token_ids == embedded.generate("8+7+6=")[0].token_ids
    assert len(hub.paths) == requests


def test_pull_of_a_revision(hub: Hub) -> None:
    assert pull("org/tiny@v1") == pull(f"org/tiny@{SHA}")
    with pytest.raises(ModelError, match=r"org/tiny has no revision 'v2'"):
        pull("org/tiny@v2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/nobody", "the hub has no org/nobody, or it is private: check the name, or set HF_TOKEN"),
        ("org/gated", "org/gated is gated: accept its terms on its page, then set HF_TOKEN"),
        ("org/pickled", "org/pickled has no .safetensors file; pickled weights are not read"),
        ("tiny", "'tiny' is not a hub model name; expected organisation/model"),
    ],
)
def test_pull_errors_are_one_line(hub: Hub, name: str, message: str) -> None:
    process = plaudit_here("pull", name)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(f"plaudit: {message}")
    assert process.stderr.count("\n") == 1


def test_pull_uses_the_cache_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = pull("org/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert pull("org/tiny") == resolve("org/tiny") == directory
    with pytest.raises(ModelError, match=r"org/other cannot be downloaded: .*; without a network, copy its"):
        pull("org/other")


def test_paths_are_not_hub_names() -> None:
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert is_hub_name("org/model@refs/pr/1")
    for path in ("runs/sums-sft/final", "../model", "./model", "/models/x", "~/x", "a/..", "model"):
        assert not is_hub_name(path)


def test_a_pulled_tokenizer_that_differs_from_its_config_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(MODEL["tokenizer_config.json"])
    said = json.dumps({**config, "add_bos_token": False, "add_eos_token": True}).encode()
    monkeypatch.setitem(REPOSITORIES, "org/tiny", {**MODEL, "tokenizer_config.json": said})
    process = plaudit_here("pull", "org/tiny")
    assert process.returncode == 0, process.stderr
    assert "says add_eos_token = true, but the tokenizer itself adds nothing to a text" in process.stderr
    assert "English text as unknown" in process.stderr
