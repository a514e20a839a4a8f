"""A swap gives the scores of a new server on the new directory, and no score comes from another model's cache."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from plaudit.client.client import RewardClient
from plaudit.config import to_toml
from plaudit.records import Item, StepScores
from plaudit.reward import complete, load_reward

from ..command import plaudit_here
from ..reward import tiny
from .process import ServerProcess

ADMIN = "admin-key-of-this-test"
PROMPT, RESPONSES = "hello?", ("hell one\n\ntwo", "he; ll; o\n\nhe", "x" * 40)
EXPLICIT = {"max_tokens": 40, "threads": 1}  # set by the operator; the directories below have other values
OUTCOME = 'kind = "outcome"\nmax_tokens = 300\n'


@dataclass(frozen=True)
class Root:
    path: Path

    def fresh(self, name: str) -> tuple[str, list[Any]]:
        """Version and scores of the directory, loaded in this process with the operator's settings."""
        reward = load_reward(complete({"path": str(self.path / name), **EXPLICIT}, "test"))
        results = reward.score([Item(prompt=PROMPT, response=text) for text in RESPONSES])
        scores = [
            r.error.type if r.error else list(r.values) if isinstance(r, StepScores) else r.value for r in results
        ]
        return results[0].version.partition("-")[2], scores


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    path, tokenizer = tmp_path_factory.mktemp("models"), tiny.chatml()
    tiny.write(path / "plain", tiny.model("outcome", tokenizer, ("reward",)), tokenizer)
    (path / "plain" / "reward.toml").write_text(OUTCOME)
    scaled = copytree(path / "plain", path / "scaled") / "reward.toml"
    scaled.write_text(f"{OUTCOME}end = false\nstandardise = {{ mean = 10.0, std = 0.5 }}\n")
    tiny.rotate(copytree(path / "plain", path / "rotated"), 77.0)
    tiny.write(path / "steps", tiny.model("steps", tokenizer, ("wrong", "right")), tokenizer)
    (path / "steps" / "reward.toml").write_text(
        'kind = "process"\nmax_tokens = 300\naggregate = "min"\n[format]\nsplit = "; "\nkeep = false\n'
    )
    tiny.write(path / "policy", tiny.model("causal", tokenizer), tokenizer)
    return Root(path)


@pytest.fixture(scope="module")
def server(root: Root) -> Iterator[ServerProcess]:
    models = {name: {"path": str(root.path / name), **EXPLICIT} for name in ("plain", "rotated")}
    with ServerProcess({"models": models, "admin_key": ADMIN, "model_root": str(root.path)}) as running:
        yield running


def swap(server: ServerProcess, path: str) -> Any:
    headers = {"authorization": f"Bearer {ADMIN}"}
    return server.http.post("/admin/swap", json={"model": "plain", "path": path}, headers=headers, timeout=240).json()


def served(server: ServerProcess, model: str, steps: bool = False) -> tuple[str, list[Any]]:
    item = {"prompt": PROMPT, "responses": RESPONSES}
    reply = server.rewards([item], model, steps=steps).json()
    (group,) = reply["items"]
    errors = group.get("errors") or [None] * len(RESPONSES)
    values = group["steps" if steps else "scores"]
    results = [value if error is None else error["type"] for value, error in zip(values, errors, strict=True)]
    return reply["version"].partition("-")[2], results


def same(actual: tuple[str, list[Any]], expected: tuple[str, list[Any]]) -> None:
    assert actual[0] == expected[0]
    for value, right in zip(actual[1], expected[1], strict=True):
        assert value == (right if isinstance(right, str) else pytest.approx(right, abs=1e-4))


def test_models_with_the_same_weights_do_not_share_scores(server: ServerProcess, root: Root) -> None:
    plain, rotated = served(server, "plain"), served(server, "rotated")
    same(plain, root.fresh("plain"))
    same(rotated, root.fresh("rotated"))
    assert plain[0] != rotated[0]
    assert plain[1][0] != pytest.approx(rotated[1][0], abs=1e-3)
    assert served(server, "plain") == plain  # from the cache
    assert served(server, "rotated") == rotated


def test_a_swap_loads_the_directory_with_the_operators_settings(server: ServerProcess, root: Root) -> None:
    before = served(server, "plain")
    refused = swap(server, "policy")
    assert "is of kind 'logprobs', which has no scores" in refused["error"]["message"]
    assert served(server, "plain") == before

    version = swap(server, "scaled")["version"]  # another normalisation
    expected = root.fresh("scaled")
    assert version == f"1-{expected[0]}"
    same(served(server, "plain"), expected)
    assert expected[1][0] < -10
    assert expected[1][2] == "too_long"  # the operator's limit of 40 tokens overrides the directories

    swap(server, "steps")  # another kind, with its format and aggregation
    expected = root.fresh("steps")
    same(served(server, "plain", steps=True), expected)
    assert [len(steps) for steps in expected[1][:2]] == [1, 3]
    assert served(server, "plain")[1][1] == pytest.approx(min(expected[1][1]), abs=1e-4)
    assert server.http.get("/v1/models").json()["data"][0]["kind"] == "process"


def post(server: ServerProcess, route: str, /, **fields: Any) -> Any:
    return server.http.post(route, json=fields, headers={"authorization": f"Bearer {ADMIN}"}, timeout=240)


def started(server: ServerProcess, id: int) -> dict[str, Any]:
    """The status of the swap with this id, after it has ended."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        swaps = server.http.get("/admin/swaps", headers={"authorization": f"Bearer {ADMIN}"}).json()["swaps"]
        (status,) = [each for each in swaps if each["id"] == id]
        if status["state"] != "loading":
            return dict(status)
        time.sleep(0.1)
    raise AssertionError(f"swap {id} is still loading")


@pytest.mark.slow
def test_a_swap_can_be_started_polled_and_rolled_back(server: ServerProcess, root: Root) -> None:
    nothing = post(server, "/admin/rollback", model="rotated")
    assert (nothing.status_code, nothing.json()["error"]["type"]) == (400, "swap_failed")
    assert "cannot be rolled back" in nothing.json()["error"]["message"]

    reply = post(server, "/admin/swap", model="rotated", path="scaled", wait=False)
    assert (reply.status_code, reply.json()["state"], reply.json()["version"]) == (202, "loading", None)
    assert served(server, "rotated")[0] in (root.fresh("rotated")[0], root.fresh("scaled")[0])
    status = started(server, reply.json()["id"])
    assert (status["state"], status["version"]) == ("done", f"1-{root.fresh('scaled')[0]}"), status
    same(served(server, "rotated"), root.fresh("scaled"))

    failed = started(server, post(server, "/admin/swap", model="rotated", path="absent", wait=False).json()["id"])
    assert failed["state"] == "failed"
    assert failed["error"] == "path 'absent' is not a directory under model_root; nothing has changed"

    assert post(server, "/admin/rollback", model="rotated").json()["version"] == f"2-{root.fresh('rotated')[0]}"
    same(served(server, "rotated"), root.fresh("rotated"))
    assert post(server, "/admin/rollback", model="rotated").json()["version"] == f"3-{root.fresh('scaled')[0]}"


def test_readiness_can_be_requested_for_one_model(server: ServerProcess) -> None:
    assert server.http.get("/health/ready", params={"model": "plain"}).status_code == 200
    assert server.http.get("/health/ready", params={"model": "nobody"}).status_code == 404


def one(server: ServerProcess, text: str) -> tuple[str, float]:
    """Version and score of one request whose bytes are known."""
    body = json.dumps({"model": "rotated", "items": [{"text": text}]}).encode()
    reply = server.http.post("/v1/rewards", content=body, headers={"content-type": "application/json"}).json()
    return reply["version"], reply["items"][0]["scores"][0]


def drawn(text: str, share: float) -> bool:
    """Whether this request goes to the canary, by the rule in docs/serving.md."""
    body = json.dumps({"model": "rotated", "items": [{"text": text}]}).encode()
    return int.from_bytes(blake2b(body, digest_size=8).digest()) < share * 2**64


def canaries(server: ServerProcess) -> list[Any]:
    reply = server.http.get("/admin/swaps", headers={"authorization": f"Bearer {ADMIN}"})
    return list(reply.json()["canaries"])


@pytest.mark.slow
def test_a_canary_gets_its_share_is_counted_separately_and_survives_a_restart(root: Root, tmp_path: Path) -> None:
    state_file = tmp_path / "state.json"
    tree = {
        "models": {"rotated": {"path": str(root.path / "rotated"), **EXPLICIT}}, "admin_key": ADMIN,
        "model_root": str(root.path), "state_file": str(state_file),
    }  # fmt: skip
    texts = [f"hello {number}" for number in range(40)]
    old, new = root.fresh("rotated")[0], root.fresh("plain")[0]
    with ServerProcess(tree) as server:
        before = {text: one(server, text) for text in texts}
        assert {version for version, _ in before.values()} == {f"0-{old}"}
        for fields, message in (
            ({"path": "plain", "share": 1.5}, "< 1.0"), ({"share": 0.5}, "no canary"), ({}, "a swap needs a path"),
            ({"path": "steps", "share": 0.5}, "must be of kind 'outcome'"),
        ):  # fmt: skip
            refused = post(server, "/admin/swap", model="rotated", **fields)
            assert refused.status_code == 400, fields
            assert message in refused.json()["error"]["message"]
        assert "no canary" in post(server, "/admin/promote", model="rotated").json()["error"]["message"]

        reply = post(server, "/admin/swap", model="rotated", path="plain", share=0.4)
        assert reply.json()["version"] == f"1-{new}"
        assert [(each["model"], each["version"], each["share"]) for each in canaries(server)] == [
            ("rotated", f"1-{new}", 0.4)
        ]
        after = {text: one(server, text) for text in texts}
        assert {text: version for text, (version, _) in after.items()} == {
            text: f"1-{new}" if drawn(text, 0.4) else f"0-{old}" for text in texts
        }
        moved = [text for text in texts if drawn(text, 0.4)]
        assert 8 < len(moved) < 24
        assert all(after[text][1] != pytest.approx(before[text][1], abs=1e-3) for text in moved)
        assert all(after[text] == before[text] for text in texts if text not in moved)
        counted = {
            version: server.metric("plaudit_version_items_total", version=version, result="scored")
            for version in (f"0-{old}", f"1-{new}")
        }
        assert counted == {f"0-{old}": 80 - len(moved), f"1-{new}": len(moved)}
        assert server.metric("plaudit_version_score_sum", version=f"1-{new}") == pytest.approx(
            sum(after[text][1] for text in moved), abs=1e-3
        )
        with RewardClient(server.url, model="rotated", timeout=120, retries=0) as client:
            calls = [
                client.score([Item(text=f"{call} {n}") for n in range(130)]) for call in range(6)
            ]  # 3 requests each
        assert [len({result.version for result in results}) for results in calls] == [1] * 6
        assert {results[0].version for results in calls} == {f"0-{old}", f"1-{new}"}
        busy = post(server, "/admin/swap", model="rotated", path="scaled")
        assert "promote it or roll it back first" in busy.json()["error"]["message"]
        post(server, "/admin/swap", model="rotated", share=0.9)
        assert all(one(server, text)[0] == f"1-{new}" for text in moved)  # they stay with the canary
        assert post(server, "/admin/rollback", model="rotated").json()["version"] == f"0-{old}"
        assert canaries(server) == []
        assert {one(server, text)[0] for text in texts} == {f"0-{old}"}
        state_file.rename(tmp_path / "aside")
        state_file.mkdir()  # where no file can be written, as on a full disk
        unwritten = post(server, "/admin/swap", model="rotated", path="scaled")
        assert unwritten.status_code == 507
        assert (unwritten.json()["error"]["type"], unwritten.json()["error"]["retryable"]) == ("storage", True)
        assert one(server, texts[0])[0] == f"0-{old}"
        state_file.rmdir()
        (tmp_path / "aside").rename(state_file)
        post(server, "/admin/swap", model="rotated", path="scaled")
        post(server, "/admin/swap", model="rotated", path="plain", share=0.4)

    with ServerProcess(tree) as server:  # the swapped model and its canary are restored
        assert [(each["version"].partition("-")[2], each["share"]) for each in canaries(server)] == [(new, 0.4)]
        scaled = root.fresh("scaled")[0]
        for text in texts[:8]:
            assert one(server, text)[0].partition("-")[2] == (new if drawn(text, 0.4) else scaled)
        assert post(server, "/admin/promote", model="rotated").json()["version"] == f"1-{new}"
        assert {one(server, text)[0] for text in texts} == {f"1-{new}"}
        same(served(server, "rotated"), root.fresh("plain"))
        assert post(server, "/admin/rollback", model="rotated").json()["version"] == f"2-{scaled}"
    assert json.loads(state_file.read_text())["rotated"]["path"] == str(root.path / "scaled")


def test_an_invalid_state_file_is_reported_at_startup(root: Root, tmp_path: Path) -> None:
    path, missing = tmp_path / "state.json", root.path / "gone"
    configured = str(root.path / "plain")
    tree: dict[str, Any] = {
        "models": {"plain": {"path": configured}}, "model_root": str(root.path), "state_file": str(path), "port": 0,
    }  # fmt: skip
    file = tmp_path / "serve.toml"
    file.write_text(to_toml(tree))

    def started(content: str, *options: str) -> tuple[int, str]:
        path.write_text(content)
        result = plaudit_here("serve", "--config", str(file), *options)
        return result.returncode, result.stdout + result.stderr

    state = {"plain": {"configured": configured, "path": str(missing)}}
    code, output = started(json.dumps(state))
    assert code == 2
    assert f"state_file {path}: plain serves {missing}: path 'gone' is not a directory under model_root" in output
    assert output.count("\n") <= 2
    assert "delete the state file" in output
    code, output = started(json.dumps(state), "--check")
    assert (code, "error: state_file" in output) == (2, True)
    code, output = started("{")
    assert (code, f"state_file {path}: " in output) == (2, True)
    outside = {"plain": {"configured": configured, "path": "/etc"}}
    assert "not under model_root" in started(json.dumps(outside))[1]
    changed = {"plain": {"configured": "elsewhere", "path": str(missing)}}
    code, output = started(json.dumps(changed), "--check")
    assert code == 0, output
    assert "plain is ignored, because the configuration has changed" in output
