"""The critic server: NeMo-Aligner's three calls to a real process, compared with the same model in the test process."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from plaudit.algo.methods.ppo import value_loss
from plaudit.critic.server import critic_table, serve_critic
from plaudit.errors import ConfigError
from plaudit.models import load_tokenizer, load_value
from plaudit.records import Item
from plaudit.reward import load_reward
from tests.forked import run_forked
from tests.serve.critic_process import CriticProcess, lesson, padded
from tests.serve.test_native import chains

END = 2


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    tokenizer = load_tokenizer("sums-policy")
    return [[*tokenizer.encode(p + r), END] for p, r in chains(12)]


@pytest.fixture(scope="module")
def prompts() -> list[int]:
    tokenizer = load_tokenizer("sums-policy")
    return [len(tokenizer.encode(p)) for p, _ in chains(12)]


@pytest.fixture(scope="module")
def shared() -> Iterator[CriticProcess]:
    with CriticProcess({"keep": 100}) as process:
        process.save()
        yield process


@pytest.fixture
def critic(shared: CriticProcess) -> CriticProcess:
    """The critic, reset to its initial state."""
    assert shared.load("step-000001").json()["updates"] == 0
    return shared


@pytest.fixture(scope="module")
def shared_slow() -> Iterator[CriticProcess]:
    with CriticProcess({"micro_batch_tokens": 64}) as process:
        process.save()
        yield process


@pytest.fixture
def slow(shared_slow: CriticProcess) -> CriticProcess:
    """A critic whose updates on many rows take seconds."""
    assert shared_slow.load("step-000001").json()["updates"] == 0
    return shared_slow


class Posted(threading.Thread):
    """A running critic_train request; `status` is set when it ends."""

    def __init__(self, critic: CriticProcess, teach: dict[str, np.ndarray]) -> None:
        super().__init__(target=self._post)
        self.critic, self.teach, self.status = critic, teach, 0
        (worker,) = critic.workers()
        began = worker.cpu_times().user
        self.start()
        deadline = time.monotonic() + 200
        while worker.cpu_times().user < began + 0.3:
            assert self.is_alive(), "the update is too short for this test"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _post(self) -> None:
        self.status = self.critic.post("critic_train", self.teach).status_code


@pytest.fixture(scope="module")
def returns(rows: list[list[int]]) -> list[float]:
    return [1.0 if index % 2 else -1.0 for index in range(len(rows))]


def test_values_equal_a_plain_forward_of_the_saved_model(
    critic: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    before = critic.values(rows)
    assert before.shape == (12, 64)
    assert not before.any(), "a new head claims nothing"
    teach = lesson(rows, prompts, returns, before)
    for _ in range(5):
        critic.train(teach)
    values = critic.values(rows)
    model = load_value(critic.saves / critic.save() / "model").module
    for index, row in enumerate(rows):
        with torch.no_grad():
            expected = model(torch.tensor([row]))[0]
        assert values[index, : len(row)] == pytest.approx(expected.numpy(), abs=5e-5)
        assert not values[index, len(row) :].any()
    # The same with any width of padding, and for a row alone.
    wide = critic.values(rows, 100)
    assert wide[:, :64] == pytest.approx(values, abs=5e-5)
    assert critic.values(rows[:1])[0] == pytest.approx(values[0], abs=5e-5)


def test_the_loss_is_the_clipped_value_loss_and_decreases(
    critic: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    teach = lesson(rows, prompts, returns, critic.values(rows))
    losses = []
    for _ in range(8):
        now = critic.values(rows)[:, :-1]
        mask = torch.from_numpy(teach["mask"]).bool()
        parts = (torch.from_numpy(np.array(t)) for t in (now, teach["prev_values"], teach["returns"]))
        expected = value_loss(*parts, 0.2)[mask].mean().item()
        losses.append(critic.train(teach))
        assert losses[-1] == pytest.approx(expected, abs=5e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert critic.state()["updates"] == 8
    assert critic.metric("plaudit_critic_updates") == 8


def test_the_optimizer_matches_the_trainers(
    critic: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    """The same updates in this process, by ServedCritic's LocalCritic, give the same losses."""
    from plaudit.config.critic import parse_critic
    from plaudit.critic.worker import ServedCritic
    from plaudit.serve.protocols.critic import wire
    from plaudit.serve.protocols.triton import wire as triton
    from plaudit.serve.protocols.triton.request import HEADER, write_request
    from plaudit.serve.workers import frames

    here = ServedCritic(parse_critic({"model": "sums-policy", "lr": 1e-3, "save_dir": "unused"}, "test"))
    teach = lesson(rows, prompts, returns, critic.values(rows))
    body, headers = write_request(teach, {})
    read = wire.read_training_rows(triton.read_infer(body, headers[HEADER].encode(), 4096, wire.TRAIN))
    assert [row[prompt - 1 :] for row, prompt in zip(read.tokens, read.prompts, strict=True)] == [
        row[prompt - 1 :] for row, prompt in zip(rows, prompts, strict=True)
    ]
    for _ in range(4):
        call = frames.Learn(
            1, [len(row) for row in read.tokens], frames.as_bytes(read.tokens), read.prompts, read.mask.tobytes(),
            read.returns.tobytes(), read.values.tobytes(), "", None,
        )  # fmt: skip
        metrics = json.loads(here.learn(call).text)
        assert critic.train(teach) == pytest.approx(metrics["value/loss"], abs=1e-6)


def test_batch_splits_a_call_into_updates(rows: list[list[int]], prompts: list[int], returns: list[float]) -> None:
    with CriticProcess({"batch": 5}) as critic:
        critic.train(lesson(rows, prompts, returns, critic.values(rows)))
        assert critic.state()["updates"] == 3


def test_rewards_are_returned_in_the_same_call(rows: list[list[int]]) -> None:
    with CriticProcess({"reward": "sums"}) as critic:
        reply = critic.ask("critic_infer", padded(rows))
        expected = [score.value for score in load_reward("sums").score([Item(tokens=tuple(row)) for row in rows])]
        assert reply.tensors["rewards"].shape == (12, 1)
        assert reply.tensors["rewards"].flatten().tolist() == pytest.approx(expected, abs=5e-5)
        assert reply.tensors["values"].shape == (12, 64)
        outputs = critic.http.get("/v2/models/critic_infer").json()["outputs"]
        assert [output["name"] for output in outputs] == ["values", "rewards"]


def test_invalid_requests_are_rejected_and_the_weights_stay_unchanged(
    critic: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    teach = lesson(rows, prompts, returns, critic.values(rows))
    critic.train(teach)
    before = critic.values(rows)
    invalid = {}
    for value in (np.nan, np.inf, -np.inf):
        for name in ("returns", "prev_values", "mask"):
            invalid[f"{name} {value}"] = {**teach, name: np.where(teach["mask"] > 0, np.float32(value), 0)}
    invalid |= {
        "half a mask": {**teach, "mask": teach["mask"] / 2},
        "no mask": {**teach, "mask": teach["mask"] * 0},
        "columns": {**teach, "returns": np.zeros((12, 64), np.float32)},
        "rows": {**teach, "mask": teach["mask"][:5]},
        "flat": {**teach, "tokens": teach["tokens"].flatten()},
        "vocabulary": {**teach, "tokens": teach["tokens"] + 999},
        "negative": {**teach, "tokens": teach["tokens"] - 5},
        "huge": {**teach, "tokens": teach["tokens"] + 2**40},
        "datatype": {**teach, "tokens": teach["tokens"].astype(np.float32)},
        "missing": {name: teach[name] for name in ("tokens", "returns", "mask")},
        "another": {**teach, "rewards": teach["mask"]},
        "empty": {name: tensor[:0] for name, tensor in teach.items()},
    }
    for case, tensors in invalid.items():
        reply = critic.post("critic_train", tensors)
        assert reply.status_code == 400, (case, reply.status_code, reply.text)
        assert reply.json()["error"], case
    long = np.ones((1, 400), np.int64)
    wide = {n: np.ones((1, 399), np.float32) for n in ("returns", "prev_values", "mask")}
    assert critic.post("critic_train", {"tokens": long, **wide}).status_code == 400
    assert critic.post("critic_train", teach, updates="1").status_code == 400
    assert critic.post("critic_train", teach, update_id=7).status_code == 400
    # Finite numbers with infinite squares: detected in the gradient, before the optimizer step.
    reply = critic.post("critic_train", {**teach, "returns": teach["returns"] * np.float32(1e30)})
    assert (reply.status_code, reply.json()["type"]) == (400, "not_finite")
    for tensors in (padded([[5, 999]]), {"tokens": padded(rows)["tokens"]}):
        assert critic.post("critic_infer", tensors).status_code == 400
    assert critic.post("critic_save", {}).status_code == 400
    assert np.array_equal(critic.values(rows), before)
    assert critic.state()["updates"] == 1
    assert critic.train(teach) > 0, "and it goes on"


def test_an_update_sent_twice_is_applied_once(
    critic: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    teach = lesson(rows, prompts, returns, critic.values(rows))
    first = critic.train(teach, update_id="run-1", updates=0)
    after = critic.values(rows)
    assert critic.train(teach, update_id="run-1", updates=0) == first
    assert np.array_equal(critic.values(rows), after)
    assert critic.state()["updates"] == 1
    refused = critic.post("critic_train", teach, update_id="run-2", updates=0)
    assert (refused.status_code, refused.json()["type"]) == (409, "conflict")
    assert critic.train(teach, update_id="run-2", updates=1) != first
    # Ten at once with one id: one update, ten equal answers.
    answers: list[float] = []
    threads = [
        threading.Thread(target=lambda: answers.append(critic.train(teach, update_id="run-3"))) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert len(answers) == 10
    assert critic.state()["updates"] == 3


@pytest.mark.slow
def test_values_requested_during_an_update_are_those_after_it(
    slow: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    many = rows * 40
    training = Posted(slow, lesson(many, prompts * 40, returns * 40, slow.values(many)))
    assert slow.state()["updates"] == 0
    during = slow.values(rows)
    training.join()
    assert training.status == 200
    assert slow.state()["updates"] == 1
    assert during.any(), "before the update all values were 0"
    assert np.array_equal(during, slow.values(rows))


def test_a_save_restores_model_and_optimizer_exactly(
    critic: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    teach = lesson(rows, prompts, returns, critic.values(rows))
    for _ in range(3):
        critic.train(teach)
    name = critic.save()
    values = critic.values(rows)
    losses = [critic.train(teach) for _ in range(3)]
    reply = critic.load(name)
    assert (reply.status_code, reply.json()["updates"]) == (200, 3)
    assert np.array_equal(critic.values(rows), values)
    assert [critic.train(teach) for _ in range(3)] == losses
    for wrong in ("../..", "/etc", "step-000099", "step-000001.tmp", "", "step-000001/model"):
        reply = critic.load(wrong)
        assert reply.status_code == 404, wrong
        assert str(critic.saves) not in reply.text
    assert critic.state()["updates"] == 6
    assert all(path.name == "latest" or path.name.startswith("step-") for path in critic.saves.iterdir())
    assert critic.save() > name, "a save is never written over another"


@pytest.mark.slow
def test_a_new_server_resumes_from_the_newest_save(
    rows: list[list[int]], prompts: list[int], returns: list[float], tmp_path: Path
) -> None:
    with CriticProcess(save_dir=tmp_path / "saves") as critic:
        teach = lesson(rows, prompts, returns, critic.values(rows))
        critic.train(teach, update_id="mine")
        critic.save()
        expected = critic.train(teach)
        assert critic.stop() == 0
    with CriticProcess(save_dir=tmp_path / "saves", wait=False) as without_resume:
        assert without_resume.process.wait(60) == 2
        assert "--resume" in without_resume.log()
    with CriticProcess(None, "--resume", save_dir=tmp_path / "saves") as resumed:
        assert resumed.state()["updates"] == 1
        resumed.train(teach, update_id="mine")
        assert resumed.state()["updates"] == 1, "it remembers what the first had done"
        assert resumed.train(teach) == expected


def test_a_failed_save_is_an_error_and_keeps_earlier_saves(critic: CriticProcess, rows: list[list[int]]) -> None:
    name = critic.save()
    blocked = critic.saves / f"step-{int(name.removeprefix('step-')) + 1:06d}.tmp"
    blocked.write_text("in the way")
    reply = critic.post("critic_save", {"dummy_var": np.zeros(1, dtype=np.int64)})
    assert (reply.status_code, reply.json()["type"]) == (500, "storage")
    assert str(critic.saves) not in reply.text
    blocked.unlink()
    assert critic.load(name).status_code == 200


@pytest.mark.slow
def test_a_worker_killed_in_an_update_is_an_error_and_lost_updates_are_reported(
    slow: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    critic = slow
    many = lesson(rows * 40, prompts * 40, returns * 40, critic.values(rows * 40))
    saved = critic.save()
    before = critic.values(rows)

    def killed() -> int:
        """The status of an update whose worker is killed while it runs."""
        training = Posted(critic, many)
        critic.workers()[0].kill()
        training.join(200)
        return training.status

    # Nothing was unsaved: the next worker restores everything.
    assert killed() == 503
    critic.wait_ready()
    assert critic.state()["save"] == saved
    assert np.array_equal(critic.values(rows), before)
    # Unsaved updates are lost, and every request fails with that reason until a save is loaded explicitly.
    critic.train(lesson(rows, prompts, returns, before))
    assert killed() == 503
    deadline = time.monotonic() + 200
    while critic.state()["state"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert critic.state()["updates_lost"] == 1
    for model, tensors in (("critic_infer", padded(rows)), ("critic_train", many)):
        reply = critic.post(model, tensors)
        assert (reply.status_code, reply.json()["type"]) == (409, "state_lost")
        assert saved in reply.json()["error"]
    assert critic.http.get("/health/ready").status_code == 503
    assert critic.load(saved).status_code == 200
    assert critic.ready()
    assert np.array_equal(critic.values(rows), before)


@pytest.mark.slow
def test_the_server_drains_on_sigterm(
    slow: CriticProcess, rows: list[list[int]], prompts: list[int], returns: list[float]
) -> None:
    training = Posted(slow, lesson(rows * 40, prompts * 40, returns * 40, slow.values(rows * 40)))
    assert slow.stop(signal.SIGTERM, 200) == 0
    training.join()
    assert training.status == 200


def test_save_and_load_need_the_admin_key(rows: list[list[int]]) -> None:
    key, admin = {"Authorization": "Bearer caller-key"}, {"Authorization": "Bearer admin-key-1"}
    tree = {"host": "0.0.0.0", "api_keys": {"caller": "caller-key"}, "admin_key": "admin-key-1"}
    dummy = {"dummy_var": np.zeros(1, dtype=np.int64)}
    with CriticProcess(tree) as critic:
        assert critic.post("critic_infer", padded(rows)).status_code == 401
        assert critic.post("critic_infer", padded(rows), key).status_code == 200
        assert critic.post("critic_save", dummy).status_code == 401
        assert critic.post("critic_save", dummy, key).status_code == 403
        assert critic.http.post("/v1/critic/load", json={"save": "x"}, headers=key).status_code == 403
        assert critic.post("critic_save", dummy, admin).status_code == 200


def test_invalid_options_are_reported_at_startup(tmp_path: Path) -> None:
    for table, word in (
        ({"host": "0.0.0.0"}, "--api-key"),
        ({"model": None}, "'model' is missing"),
        ({"allow_open": "tritonn"}, "'triton'"),
        ({"clipp": 0.1}, "'clip'"),
    ):
        with pytest.raises(ConfigError, match=word):
            serve_critic(critic_table(**{"model": "sums-policy", "save_dir": str(tmp_path), **table}))
    for arguments, word in (
        (["--model", "nobody"], "nobody"),
        (["--model", "sums-policy", "--reward", "sums-steps"], "outcome"),
    ):
        result = run_forked("critic", "--port", "0", "--save-dir", str(tmp_path), *arguments)
        assert result.returncode == 2, result.stderr
        assert word in result.stderr
