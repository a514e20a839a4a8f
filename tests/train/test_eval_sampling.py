"""Evaluations have their own sampling settings: [sampling.eval]."""

from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.config import to_toml
from plaudit.errors import ConfigError, DataError
from plaudit.events import CHANGED, read_events
from plaudit.models import load_policy
from plaudit.report.diagnosis import diagnose
from plaudit.report.history import read_history
from plaudit.report.page import render_page
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from plaudit.worlds.sums import Problem, judge
from tests.command import plaudit_here
from tests.train.rl_world import Silent, recipe, weights

GREEDY = {"max_tokens": 48, "eval": {"temperature": 0.0, "max_tokens": 24}}


def trained(directory: Path, **tables: Any) -> RlTraining:
    tree = recipe(**{"train": {"steps": 2, "eval_every": 1}, "data": {"eval_items": 30}, **tables})
    with Run(directory, tree) as run:
        training = RlTraining(tree, run, Silent())
        training.fit()
    return training


def figures(run: Path) -> dict[str, tuple[float, ...]]:
    curves = read_history(run).curves
    return {name: curve.values for name, curve in curves.items() if not name.startswith(("time", "perf"))}


@pytest.mark.slow
def test_greedy_evaluation_equals_plain_transformers_and_training_is_unchanged(tmp_path: Path) -> None:
    trained(tmp_path / "plain")
    training = trained(tmp_path / "greedy", sampling=GREEDY)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(tmp_path / "plain").values(), weights(tmp_path / "greedy").values(), strict=True)
    )
    before, after = figures(tmp_path / "plain"), figures(tmp_path / "greedy")
    training_metrics = {name for name in before if not name.startswith("heldout/")}
    assert {name: before[name] for name in training_metrics} == {name: after[name] for name in training_metrics}

    policy = load_policy("sums-policy")
    correct = []
    for prompt in training.prompts.heldout():
        ids = torch.tensor([prompt.token_ids])
        model: Any = policy.module
        out = model.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0, ids.shape[1] :]
        text = policy.tokenizer.decode(out, skip_special_tokens=True)
        correct.append(bool(judge(Problem.parse(prompt.text), text).right))
    assert after["heldout/accuracy"][0] == sum(correct) / 30
    assert max(after["heldout/length"]) <= 24 < max(before["heldout/length"])

    description = "30 prompts, 1 response to each: greedy, at most 24 tokens"
    assert read_history(tmp_path / "greedy").evaluated() == description
    assert description in render_page([read_history(tmp_path / "greedy")])
    assert read_history(tmp_path / "plain").evaluated().endswith("1 response to each: temperature 1, at most 48 tokens")
    report = plaudit_here("report", str(tmp_path / "greedy"), "--out", str(tmp_path / "page.html"))
    assert description in report.stdout


@pytest.mark.slow
def test_resumed_run_can_change_evaluation_settings_and_records_it(tmp_path: Path) -> None:
    tree = recipe(train={"steps": 1, "checkpoint": {"every": 1}})
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(tree))
    words = ["train", str(file), "--out", str(tmp_path / "run")]
    assert plaudit_here(*words).returncode == 0
    file.write_text(to_toml(tree) + "\n[sampling.eval]\ntemperature = 0.5\ntop_k = 5\n")
    done = plaudit_here(*words, "--resume", "--set", "train.steps=2")
    assert done.returncode == 0, done.stderr
    changes = {e["key"]: (e["old"], e["new"]) for e in read_events(tmp_path / "run") if e.get("text") == CHANGED}
    assert changes == {"sampling.eval.temperature": (None, 0.5), "sampling.eval.top_k": (None, 5)}
    (finding,) = [f for f in diagnose(read_history(tmp_path / "run")) if f.rule == "settings changed on resumption"]
    assert finding.cure.endswith("Training is the same.")


def test_invalid_evaluation_settings_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"eval\.temperature = 0 gives the same .* train.eval_samples = 4: set one"):
        recipe(train={"eval_samples": 4}, sampling=GREEDY)
    with pytest.raises(ConfigError, match=r"temperature = 0 is greedy decoding, which ignores top_k = 5: remove top_k"):
        recipe(sampling={"eval": {"temperature": 0.0, "top_k": 5}})
    filtered = recipe(sampling={"top_p": 0.9, "eval": {"temperature": 0.0}}).sampling
    assert (filtered.top_p, filtered.evaluating().top_p) == (0.9, 1.0)
    with pytest.raises(ConfigError, match=r"before sampling\.eval\.top_p = 0\.5"):
        recipe(
            sampling={"eval": {"top_p": 0.5}}, engine={"name": "sglang", "url": "http://127.0.0.1:1"},
            placement={"name": "disaggregated"},
        )  # fmt: skip


def test_prompts_must_fit_with_the_larger_max_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of which sampling\.eval\.max_tokens = 255 .* lower sampling\.eval\.max"):
        trained(tmp_path / "run", sampling={"eval": {"max_tokens": 255}})
