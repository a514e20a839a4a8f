"""RL training by its loop and its command: rising rewards, bit-identical resumption, failed rewards."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from plaudit.config import RlRecipe, to_toml
from plaudit.errors import ChannelError, ConfigError, DataError, RunError
from plaudit.events import WARNING, read_events
from plaudit.models import load_policy
from plaudit.records import Item, ItemError, Score
from plaudit.report.history import read_history
from plaudit.rl.loop import RlTraining
from plaudit.train.data.answered import prompt_of
from plaudit.train.rollouts.dump import Dump
from plaudit.train.run import overdue
from plaudit.train.run.run import Run
from plaudit.train.run.signals import Interrupted
from tests.command import plaudit_here
from tests.forked import ForkedCommand
from tests.serve.process import ServerProcess
from tests.serve.scripted import Answer, Asked, Scripted
from tests.train.rl_world import Silent, recipe, weights

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
PPO = {"name": "ppo", "kl": {"coef": 0.05}}


def train(directory: Path, tree: RlRecipe, **options: Any) -> tuple[dict[str, Any], Silent]:
    viewer = Silent()
    with Run(directory, tree, **options) as run:
        return RlTraining(tree, run, viewer).fit(), viewer


def metrics(directory: Path, *names: str) -> list[dict[str, float]]:
    steps = [e["values"] for e in read_events(directory) if e["kind"] == "metric" and "policy/loss" in e["values"]]
    return [
        {name: values[name] for name in names or values if not name.startswith(("time/", "perf/"))} for values in steps
    ]


@pytest.mark.slow
def test_grpo_raises_the_true_accuracy(tmp_path: Path) -> None:
    tree = recipe(
        train={"steps": 12, "prompts_per_step": 24, "samples_per_prompt": 8, "lr": 4e-4, "eval_every": 6},
        algorithm={"name": "grpo", "kl": {"coef": 0.0}}, data={"eval_items": 200},
    )  # fmt: skip
    summary, viewer = train(tmp_path / "run", tree)
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05
    assert summary["reward_after"] == summary["accuracy_after"]
    assert {"seconds", "samples_per_second", "reward_before"} <= summary.keys()
    assert all(values["mismatch/abs_mean"] < 1e-6 and values["mismatch/abs_max"] < 1e-4 for values in viewer.seen)
    assert all(values["policy/ratio_min"] == values["policy/ratio_max"] == 1.0 for values in viewer.seen)
    sample_events = [e for e in read_events(tmp_path / "run") if e["kind"] == "sample"]
    assert {e["step"] for e in sample_events} == {1, 6, 12}
    history = read_history(tmp_path / "run")
    assert (history.task, history.algorithm, history.planned_steps, history.finished) == ("rl", "grpo", 12, True)
    assert all(len(e["tokens"]) == len(e["advantages"]) == len(e["logprobs"]) for e in sample_events)


SMALL = {"steps": 20, "prompts_per_step": 4, "samples_per_prompt": 4, "checkpoint": {"every": 5}, "eval_every": 50}
RUNS = {
    "grpo": {"algorithm": {"name": "grpo"}},
    "ppo": {
        "algorithm": {**PPO, "kl": {"coef": 0.05, "target": 1.0, "horizon": 50}, "shaping": {"normalise": True}},
        "reward": {"path": "sums"}, "train": {"minibatches": 2, "epochs": 2},
    },
    "ppo-shared": {"algorithm": PPO, "critic": {"shared": True}, "reward": {"path": "sums"}},
    "lora": {"algorithm": {"name": "dapo"}, "model": {"lora": {"rank": 4}}},
    "tree": {"algorithm": {"name": "tree-grpo"}, "sampling": {"branch": [2, 2], "step": ";"}},
}  # fmt: skip


def recipe_of(name: str) -> RlRecipe:
    tables = RUNS[name]
    return recipe(**{**tables, "train": {**SMALL, **tables.get("train", {})}, "data": {"eval_items": 8}})


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_run_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    tree = recipe_of(name)
    summary, _ = train(tmp_path / "straight", tree)
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(tree))
    run = tmp_path / "broken"
    child = ForkedCommand(["train", str(file), "--out", str(run)], tmp_path / "output")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and child.poll() is None:
        if (run / "checkpoints" / "step-000010").exists():
            break
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    assert not (run / "summary.json").exists(), "the run ended before it could be stopped"
    resumed, _ = train(run, tree, resume=True)
    assert metrics(run) == metrics(tmp_path / "straight")
    expected, actual = weights(tmp_path / "straight"), weights(run)
    assert all(torch.equal(expected[n], actual[n]) for n in expected)
    changing = ("seconds", "samples_per_second", "peak_bytes")
    assert {k: v for k, v in resumed.items() if k not in changing} == {
        k: v for k, v in summary.items() if k not in changing
    }


def test_sigterm_saves_the_state(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe_of("grpo").model_copy(update={"seed": 2})))
    run = tmp_path / "run"
    words = ["train", str(file), "--out", str(run), "--set", "train.steps=100000"]
    child = ForkedCommand(words, tmp_path / "output")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not ((run / "events.jsonl").exists() and metrics(run)):
        time.sleep(0.01)
    child.terminate()
    assert child.wait(60) == 2
    assert "state saved: --resume continues" in (tmp_path / "output").read_text()
    assert (run / "checkpoints" / "latest").exists()


def test_lora_does_not_change_the_base_and_is_saved_merged(tmp_path: Path) -> None:
    tree = recipe(model={"lora": {"rank": 4}}, train={"steps": 3, "lr": 1e-2}, algorithm={"name": "grpo"})
    with Run(tmp_path / "run", tree) as run:
        training = RlTraining(tree, run, Silent())
        base = load_policy("sums-policy").module
        reference = training.learner.reference
        assert reference is not None
        samples = training.engine.generate(["7+8+4="])
        before = reference.logprobs(samples)
        training.fit()
        assert torch.equal(reference.logprobs(samples), before), "the reference moved"
        assert (training.policy.logprobs(samples) - before).abs().max() > 1e-4
        saved = load_policy(tmp_path / "run" / "final").module
        for name, parameter in base.named_parameters():
            moved = not torch.equal(parameter, saved.get_parameter(name))
            assert moved == ("proj" in name), name
        from tests.train.rl_world import policy

        merged = policy(saved, {"name": "grpo"}).logprobs(samples)
        assert torch.allclose(merged, training.policy.logprobs(samples), atol=1e-4)
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "final" / "adapter").merge_and_unload()
        for name, parameter in saved.named_parameters():
            assert torch.allclose(adapted.get_parameter(name), parameter, atol=1e-6), name


# Failed rewards


class Flaky:
    """A reward with correct scores, except for the items that `wrong` selects, which fail."""

    def __init__(self, wrong: Any) -> None:
        self.wrong = wrong
        self.calls = 0

    def score(self, items: list[Item]) -> list[Score]:
        self.calls += 1
        return [
            Score(error=ItemError("boom", "no score"))
            if self.wrong(self.calls, i)
            else Score(float(len(item.response or "")))
            for i, item in enumerate(items)
        ]

    def close(self) -> None: ...


def with_reward(directory: Path, tree: RlRecipe, reward: Any) -> dict[str, Any]:
    with Run(directory, tree) as run:
        training = RlTraining(tree, run, Silent())
        training.scorer.close()
        training.scorer.source = reward
        return training.fit()


def test_failed_rewards_are_left_out_and_counted(tmp_path: Path) -> None:
    """A quarter of the responses has no reward: these are not zeros, and groups with only one reward are dropped."""
    with_reward(tmp_path / "run", recipe(train={"steps": 2}), Flaky(lambda _, i: i % 4 == 0))
    for values in metrics(tmp_path / "run", "reward/errors", "dropped/samples", "dropped/length_mean", "reward/min"):
        assert values["reward/errors"] == 0.25
        assert values["dropped/samples"] == 4
        assert values["dropped/length_mean"] > 0
        assert values["reward/min"] > 0
    failed = [e for e in read_events(tmp_path / "run") if e["kind"] == "sample" and e["error"] is not None]
    assert {e["error"]["type"] for e in failed} == {"boom"}
    with_reward(
        tmp_path / "few", recipe(train={"steps": 1}, reward={**EXACT, "max_errors": 0.9}), Flaky(lambda _, i: i % 4)
    )
    assert (
        next(e for e in read_events(tmp_path / "few") if "dropped/samples" in e.get("values", {}))["values"][
            "dropped/samples"
        ]
        == 16
    )


EXACT = {"rule": "exact", "answer": r"#(\d+)$"}


@pytest.mark.parametrize(
    ("table", "wrong"),
    [({"max_errors": 0.2}, lambda n, i: n > 2 and i % 2), ({"on_error": "halt"}, lambda n, i: n > 2 and i == 3)],
)
def test_too_many_failed_rewards_end_the_run_with_its_state_saved(tmp_path: Path, table: dict, wrong: Any) -> None:
    tree = recipe(train={"steps": 4}, reward={**EXACT, **table})
    with pytest.raises(RunError, match=r"no score.*--resume"):
        with_reward(tmp_path / "run", tree, Flaky(wrong))
    assert (tmp_path / "run" / "checkpoints" / "step-000001").exists()
    summary, _ = train(tmp_path / "run", tree, resume=True)
    assert summary["samples"] == 4 * 16


@pytest.mark.slow
def test_failed_evaluation_loses_no_training(tmp_path: Path) -> None:
    """Calls of the reward: the first evaluation, steps 1 and 2, the second evaluation, steps 3 and 4, the last one."""
    second, last = 4, 7

    def tree(**reward: Any) -> RlRecipe:
        return recipe(train={"steps": 4, "eval_every": 2}, reward={**EXACT, **reward})

    def fail_at(run: Path, *calls: int, **reward: Any) -> dict[str, Any]:
        return with_reward(run, tree(**reward), Flaky(lambda call, _: call in calls))

    unfailed = fail_at(tmp_path / "whole")
    expected = weights(tmp_path / "whole")

    masked = fail_at(tmp_path / "masked", second, last)
    assert masked["samples"] == unfailed["samples"]
    assert "reward_after" in unfailed
    assert "reward_after" not in masked
    warnings = [e["message"] for e in read_events(tmp_path / "masked") if e.get("text") == WARNING]
    assert len(warnings) == 2
    assert warnings[0].startswith("step 2: the evaluation failed: 8 of 8 responses have no reward")
    assert warnings[0].endswith("training goes on")
    assert warnings[1].endswith(f"the model is in {tmp_path / 'masked' / 'final'}, and --resume evaluates it")
    assert "reward_after" in train(tmp_path / "masked", tree(), resume=True)[0]

    for call, step in ((second, 2), (last, 4)):
        run = tmp_path / f"halted-{call}"
        with pytest.raises(
            RunError, match=rf"step {step}: the evaluation failed: .*the state is saved: --resume continues"
        ):
            fail_at(run, call, on_error="halt")
        assert (run / "checkpoints" / f"step-00000{step}").exists()
        assert (run / "final").exists() == (call == last)
        with Run(run, tree(on_error="halt"), resume=True) as opened:
            training = RlTraining(tree(on_error="halt"), opened, Silent())
            training.scorer.close()
            training.scorer.source = Flaky(lambda *_: False)
            assert training.fit()["reward_after"] == unfailed["reward_after"]
    for name in ("masked", f"halted-{second}", f"halted-{last}"):
        assert weights(tmp_path / name).keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(tmp_path / name).items()), name


@pytest.mark.slow
def test_failed_first_evaluation_does_not_end_the_run_and_is_not_repeated(tmp_path: Path) -> None:
    """An evaluation by the resumed run would not measure the policy before training."""
    tree = recipe(train={"steps": 2, "checkpoint": {"every": 1}}, reward=EXACT)
    summary = with_reward(tmp_path / "run", tree, Flaky(lambda call, _: call == 1))
    assert (summary["samples"], summary["reward_before"]) == (32, None)
    words = ["train", str(tmp_path / "run" / "recipe.toml"), "--out", str(tmp_path / "run")]
    resumed = plaudit_here(*words, "--resume", "--set", "train.steps=3")
    assert resumed.returncode == 0, resumed.stderr
    assert "; reward ? -> 0." in resumed.stdout


class Hangs(Flaky):
    """A reward with correct scores until call `at`, which sends a signal and then blocks."""

    def __init__(self, at: int, over: threading.Event) -> None:
        super().__init__(lambda *_: False)
        self.at = at
        self.over = over

    def score(self, items: list[Item]) -> list[Score]:
        if self.calls + 1 == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            self.over.wait(60)
        return super().score(items)


@pytest.mark.parametrize(("at", "step"), [(1, 0), (3, 1), (4, 2), (6, 3)], ids=["first", "step", "evaluation", "last"])
def test_a_signal_ends_the_wait_for_a_reward_with_the_state_saved(tmp_path: Path, at: int, step: int) -> None:
    """Calls of the reward: the first evaluation, steps 1 and 2, an evaluation, step 3, the last evaluation."""
    tree, over = recipe(train={"steps": 3, "eval_every": 2}), threading.Event()
    with pytest.raises(Interrupted, match=f"stopped by SIGTERM at step {step} of 3, state saved: --resume continues"):
        with_reward(tmp_path / "run", tree, Hangs(at, over))
    over.set()
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{step:06}"
    state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{step:06}" / "state.json").read_text())
    assert state["drawn"] == 4 * step  # prompts that were not trained on are drawn again
    assert (tmp_path / "run" / "final").exists() == (at == 6)


def test_a_signal_ends_the_wait_for_an_unavailable_server(tmp_path: Path) -> None:
    def answer(number: int, request: Asked) -> Answer:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return Answer(lengths(request)) if number < 3 else Answer({}, 503)

    with Scripted(answer) as server:
        tree = recipe(train={"steps": 8}, reward={"url": server.url, "patience": 120.0})
        with pytest.raises(Interrupted, match="stopped by SIGTERM at step 2 of 8, state saved"):
            train(tmp_path / "run", tree)


def test_failed_publication_loses_no_step(tmp_path: Path) -> None:
    tree = recipe(train={"steps": 3})
    with Run(tmp_path / "run", tree) as run:
        training = RlTraining(tree, run, Silent())
        inner = training.placement.publish

        def publish(version: int) -> dict[str, float]:
            if version == 2:
                raise ChannelError("the disk is full")
            return inner(version)

        training.placement.publish = publish  # type: ignore[method-assign]
        with pytest.raises(RunError, match="step 2: the disk is full; the state is saved: --resume continues"):
            training.fit()
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-000002"
    assert train(tmp_path / "run", tree, resume=True)[0]["samples"] == 3 * 16
    assert len(metrics(tmp_path / "run")) == 3


BAD = """
import time
def score(prompt, response, truth):
    kind = sum(map(ord, prompt)) % 6
    if kind == 4 and len(prompt) == 6:
        time.sleep(60)
    if kind == 1:
        raise KeyError("answer")
    return {2: float("nan"), 3: "0.5", 4: [0.5, 0.5]}.get(kind, float(len(response)))
def never(prompt, response, truth):
    return "0.5"
"""


@pytest.mark.slow
def test_reward_function_errors_are_reported_and_affect_only_their_responses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BAD)
    reward = {"rule": "function", "function": f"{tmp_path / 'mine.py'}:score", "timeout": 0.2, "max_errors": 1.0}
    tree = recipe(train={"steps": 1, "prompts_per_step": 12, "samples_per_prompt": 2, "show": 60}, reward=reward)
    summary, viewer = train(tmp_path / "run", tree)
    assert summary["samples"] == 24
    assert 0 < viewer.seen[0]["reward/errors"] < 1
    errors = [e["error"] for e in read_events(tmp_path / "run") if e["kind"] == "sample" and e["error"] is not None]
    reported = {(error["type"], error["message"]) for error in errors}
    assert reported <= {
        ("timeout", "the rule did not finish within 0.2 s and was killed"), ("rule_failed", "KeyError: 'answer'"),
        ("nonfinite_score", "the rule returned nan; expected a finite number"),
        ("rule_failed", "the rule returned str; expected a number"),
        ("rule_failed", "the rule returned list; expected a number"),
    }  # fmt: skip
    assert len(reported) >= 3
    every = {**reward, "function": f"{tmp_path / 'mine.py'}:never", "max_errors": 0.5}
    message = r"^step 0: 4 of 4 responses have no reward \(max_errors = 0.5\); 4 times: rule_failed: the rule returned"
    with pytest.raises(
        RunError, match=message + " str; expected a number; fix the reward; the state is saved: --resume"
    ):
        train(tmp_path / "every", recipe(train={"steps": 1, "prompts_per_step": 1}, reward=every))


GROUP = """
def longest(prompt, responses, truth, sum, level):
    assert sum == truth and level == len(prompt) and len(responses) == 3, (sum, truth, level, prompt, responses)
    most = max(map(len, responses))
    return [level + float(len(each) == most) for each in responses]
"""


@pytest.mark.parametrize("placement", [{}, {"name": "async", "staleness": 1}])
def test_reward_function_receives_the_row_columns_and_the_whole_group(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    (tmp_path / "mine.py").write_text(GROUP)
    rows = [{"prompt": f"{i}+{'1+' * (i % 3)}2=", "sum": i + 2 + i % 3} for i in range(1, 9)]
    lines = [json.dumps({**row, "level": len(str(row["prompt"]))}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    tree = recipe(
        data={"path": str(tmp_path / "rows.jsonl"), "truth": "sum", "world": None},
        reward={"rule": "function", "function": f"{tmp_path / 'mine.py'}:longest", "on_error": "halt"},
        train={"steps": 2, "prompts_per_step": 3, "samples_per_prompt": 3, "dump": True, "eval_samples": 3},
        placement=placement,
    )  # fmt: skip
    train(tmp_path / "run", tree)
    for step in (1, 2):
        samples, _ = Dump.find(tmp_path / "run").read(step)
        for group in (samples[i : i + 3] for i in range(0, 9, 3)):
            prompt, longest = prompt_of(group[0]), max(len(sample.text) for sample in group)
            assert prompt.columns["sum"] == prompt.truth
            assert [s.reward for s in group] == [len(prompt.text) + float(len(s.text) == longest) for s in group]


def lengths(request: Asked) -> dict[str, Any]:
    items = [{"scores": [float(len(r)) for r in item["responses"]]} for item in request.body["items"]]
    return {"model": "sums", "version": "0-a", "items": items}


@pytest.mark.slow
def test_run_waits_for_an_unavailable_reward_server(tmp_path: Path) -> None:
    failed_at: list[float] = []

    def answer(number: int, request: Asked) -> Answer:
        if number >= 3 and not failed_at:
            failed_at.append(time.monotonic())
        unavailable = failed_at and time.monotonic() - failed_at[0] < 2.0
        return Answer({}, 503) if unavailable else Answer(lengths(request))

    with Scripted(answer) as server:
        tree = recipe(train={"steps": 6}, reward={"url": server.url, "patience": 60.0})
        summary, viewer = train(tmp_path / "run", tree)
    assert failed_at
    assert len(viewer.seen) == 6
    assert all(values["reward/errors"] == 0 and values["reward/min"] > 0 for values in viewer.seen)
    assert summary["samples"] == 6 * 16


@pytest.mark.slow
def test_run_waits_until_a_killed_reward_server_is_restarted(tmp_path: Path) -> None:
    with ServerProcess(None, "--model", "sums") as server:
        port = server.url.rpartition(":")[2]
        tree = recipe(train={"steps": 12}, reward={"url": server.url, "patience": 240.0})
        restarted: list[ServerProcess] = []

        def kill_and_restart() -> None:
            while not ((tmp_path / "run" / "events.jsonl").exists() and metrics(tmp_path / "run")):
                time.sleep(0.01)
            server.kill()
            time.sleep(5)
            restarted.append(ServerProcess(None, "--model", "sums", "--port", port, wait=False))

        thread = threading.Thread(target=kill_and_restart)
        thread.start()
        summary, viewer = train(tmp_path / "run", tree)
        thread.join()
        restarted[0].__exit__(None, None, None)
    assert summary["samples"] == 12 * 16
    assert all(values["reward/errors"] == 0 for values in viewer.seen)


def test_slow_reward_server_is_distinguished_from_an_unavailable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue, "NOTICE_SECONDS", 0.2)
    viewer = Silent()

    def answer(number: int, request: Asked) -> Answer:
        while number == 2 and not viewer.warnings:
            time.sleep(0.01)
        return Answer(lengths(request))

    with Scripted(answer) as server:
        tree = recipe(train={"steps": 3}, reward={"url": server.url, "patience": 60.0})
        with Run(tmp_path / "run", tree) as run:
            RlTraining(tree, run, viewer).fit()
    first, second = viewer.warnings
    assert first.startswith(f"the reward server at {server.url} is alive and has not responded yet")
    assert "60 at most (reward.patience)" in first
    assert second.startswith("the reward server responded after ")
    logged = [e["message"] for e in read_events(tmp_path / "run") if e["kind"] == "note" and e["text"] == "warning"]
    assert logged == viewer.warnings


@pytest.mark.slow
def test_stopped_reward_server_is_reported_and_waited_for(tmp_path: Path) -> None:
    viewer, stopped = Silent(), 0.0
    with ServerProcess(None, "--model", "sums") as server:
        tree = recipe(train={"steps": 6}, reward={"url": server.url, "patience": 240.0})
        front = psutil.Process(server.process.pid)

        def stop_for_a_while() -> None:
            nonlocal stopped
            while not viewer.seen:
                time.sleep(0.01)
            front.suspend()
            stopped = time.monotonic()
            while not viewer.warnings:
                time.sleep(0.01)
            stopped = time.monotonic() - stopped
            front.resume()

        thread = threading.Thread(target=stop_for_a_while)
        thread.start()
        with Run(tmp_path / "run", tree) as run:
            summary = RlTraining(tree, run, viewer).fit()
        thread.join()
    assert 0 < stopped < 60  # 15 s until the liveness check, and 5 s for its answer
    assert f"{server.url} does not respond, nor does its /health/live: it is stopped or down" in viewer.warnings[0]
    assert summary["samples"] == 6 * 16
    assert all(values["reward/errors"] == 0 for values in viewer.seen)


@pytest.mark.slow
def test_run_ends_with_its_state_saved_after_the_patience(tmp_path: Path) -> None:
    with Scripted(lambda n, request: Answer(lengths(request)) if n < 3 else Answer({}, 503)) as server:
        tree = recipe(train={"steps": 8}, reward={"url": server.url, "patience": 2.0})
        with pytest.raises(RunError, match="the state is saved: --resume continues"):
            train(tmp_path / "run", tree)
        state = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").read_text())
        assert state["drawn"] == 8
        server.script = lambda _, request: Answer(lengths(request))
        summary, _ = train(tmp_path / "run", tree, resume=True)
    assert summary["samples"] == 8 * 16


@pytest.mark.parametrize("spoil", ["nan", "count", "version"])
def test_invalid_reward_reply_never_reaches_the_loss(tmp_path: Path, spoil: str) -> None:
    def answer(number: int, request: Asked) -> Answer:
        reply = lengths(request)
        if number >= 2 and spoil == "count":
            reply["items"] = reply["items"][:-1]
        if number >= 2 and spoil == "nan":
            reply["items"][0]["scores"][0] = float("nan")
        if number >= 2 and spoil == "version":
            del reply["version"]
        return Answer(reply)

    with Scripted(answer) as server:
        tree = recipe(train={"steps": 4}, reward={"url": server.url, "patience": 2.0})
        with pytest.raises(RunError, match="the state is saved"):
            train(tmp_path / "run", tree)


# Non-finite numbers


def run_with_non_finite_gradient(directory: Path, tree: RlRecipe, at: int) -> dict[str, Any]:
    """A run whose gradient is not finite at one step."""
    with Run(directory, tree) as run:
        training = RlTraining(tree, run, Silent())
        inner = training.policy.gradient

        def gradient(experience: Any, kl_coef: float) -> Any:
            result = inner(experience, kl_coef)
            if training.step == at:
                next(training.loaded.module.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
            return result

        training.policy.gradient = gradient  # type: ignore[method-assign]
        try:
            return training.fit()
        finally:
            assert all(p.isfinite().all() for p in training.loaded.module.parameters())


def test_non_finite_gradient_ends_the_run_and_changes_nothing(tmp_path: Path) -> None:
    tree = recipe(train={"steps": 4, "checkpoint": {"every": 1}})
    with pytest.raises(RunError, match=r"gradient norm is nan at step 2.*left as they were"):
        run_with_non_finite_gradient(tmp_path / "run", tree, 2)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-000002"


def test_non_finite_update_can_be_skipped_and_counted(tmp_path: Path) -> None:
    run_with_non_finite_gradient(tmp_path / "run", recipe(train={"steps": 4, "non_finite": "skip"}), 2)
    steps = [e["values"] for e in read_events(tmp_path / "run") if "dropped/samples" in e.get("values", {})]
    assert [values.get("dropped/updates", 0.0) for values in steps] == [0.0, 0.0, 1.0, 0.0]


# Invalid recipes


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"samples_per_prompt": 1}}, r"r - mean\(r\) = 0 in a group of one"),
        ({"train": {"minibatches": 3}}, r"4 × 4 = 16 responses are not a multiple of minibatches = 3"),
        ({"sampling": {"max_tokens": 0}}, "expected 1 or more"),
        ({"sampling": {"temperature": 0.0}}, "needs different ones"),
        ({"algorithm": {"name": "grop"}}, "unknown algorithm"),
        ({"algorithm": {"name": "grpo", "kl": {"coef": 0.0, "target": 1.0}}}, "coef = 0 stays 0"),
        ({"algorithm": {"name": "rloo", "advantage": {"scale": "group"}}}, "is for estimator"),
        ({"critic": {}}, "uses no critic"),
        ({"reward": {"url": "http://127.0.0.1:1", "rule": "exact"}}, "give one of url"),
        ({"reward": {"path": "sums", "pahts": 1}}, "unknown key 'pahts'"),
        ({"data": {"gym": "gcd"}}, "give one of data.world"),
        ({"algorithm": {"name": "dapo", "shaping": {"overlong": {"buffer": 99}}}}, "exceeds sampling.max_tokens"),
    ],
)
def test_invalid_recipes_are_rejected_with_the_reason(tables: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)


def test_response_budget_beyond_the_models_positions_is_rejected(tmp_path: Path) -> None:
    tree = recipe(sampling={"max_tokens": 250})
    with Run(tmp_path / "run", tree) as run, pytest.raises(DataError, match=r"256 - \d+ = \d+ are left"):
        RlTraining(tree, run, Silent())


def test_dynamic_sampling_keeps_the_batch_size_and_loses_no_prompt(tmp_path: Path) -> None:
    tree = recipe(train={"steps": 3, "prompts_per_step": 4}, algorithm={"name": "dapo", "dynamic": {"rounds": 3}})
    _, viewer = train(tmp_path / "run", tree)
    drawn = [values["progress/prompts"] for values in viewer.seen]
    assert all(later - earlier in (4, 8, 12) for earlier, later in zip([0, *drawn], drawn, strict=False))
    for values, earlier, later in zip(viewer.seen, [0, *drawn], drawn, strict=False):
        assert values["dynamic/drawn"] == later - earlier
        # Kept groups have correct and wrong responses; filtered groups have only one kind.
        assert 0 <= values["dynamic/filtered"] <= 1
        if values["dynamic/filtered"] == 0:
            assert values["reward/mean"] == values["dynamic/kept_reward"]
    assert all(values["progress/samples"] == 16 * (i + 1) for i, values in enumerate(viewer.seen))


def test_held_out_responses_are_also_scored_by_the_truth(tmp_path: Path) -> None:
    """The reward is a model whose scale is unrelated to that of the truth, which is the rule."""
    rule = {"rule": "exact", "answer": r"#(\d+)$"}
    tree = recipe(
        reward={"path": "sums"}, truth=rule, data={"eval_items": 20}, train={"steps": 2, "eval_every": 1},
    )  # fmt: skip
    with Run(tmp_path / "run", tree) as run:
        summary = RlTraining(tree, run, Silent()).fit()
    events = read_events(tmp_path / "run")
    evaluations = [event["values"] for event in events if "heldout/truth" in event.get("values", {})]
    assert len(evaluations) == 3
    for values in evaluations:
        accuracy = values["heldout/truth"]
        assert accuracy == values["heldout/accuracy"]  # the world's own check
        assert values["heldout/truth_se"] == pytest.approx((accuracy * (1 - accuracy) / 20) ** 0.5)
        assert values["heldout/reward"] != accuracy
    assert summary["truth_after"] == evaluations[-1]["heldout/truth"]
    assert not any("truth" in name for name in tree.reward.own)


def test_a_truth_must_fit_the_data() -> None:
    with pytest.raises(ConfigError, match=r"set data\.gym, or use another rule"):
        recipe(reward={"path": "sums"}, truth={"rule": "gym"})
