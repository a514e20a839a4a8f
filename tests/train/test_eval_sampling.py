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
def test_greedy_evaluations_are_those_of_plain_transformers_and_training_is_the_same(tmp_path: Path) -> None:
    trained(tmp_path / "plain")
    asked = trained(tmp_path / "greedy", sampling=GREEDY)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(tmp_path / "plain").values(), weights(tmp_path / "greedy").values(), strict=True)
    )
    before, after = figures(tmp_path / "plain"), figures(tmp_path / "greedy")
    learned = {name for name in before if not name.startswith("heldout/")}
    assert {name: before[name] for name in learned} == {name: after[name] for name in learned}

    policy = load_policy("sums-policy")
    right = []
    for prompt in asked.prompts.heldout():
        ids = torch.tensor([prompt.token_ids])
        model: Any = policy.module
        out = model.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0, ids.shape[1] :]
        text = policy.tokenizer.decode(out, skip_special_tokens=True)
        right.append(bool(judge(Problem.parse(prompt.text), text).right))
    assert after["heldout/accuracy"][0] == sum(right) / 30
    assert max(after["heldout/length"]) <= 24 < max(before["heldout/length"])

    told = "30 prompts, 1 response to each: greedy, at most 24 tokens"
    assert read_history(tmp_path / "greedy").evaluated() == told
    assert told in render_page([read_history(tmp_path / "greedy")])
    assert read_history(tmp_path / "plain").evaluated().endswith("1 response to each: temperature 1, at most 48 tokens")
    shown = plaudit_here("report", str(tmp_path / "greedy"), "--out", str(tmp_path / "page.html"))
    assert told in shown.stdout


@pytest.mark.slow
def test_a_resumed_run_may_evaluate_otherwise_and_says_so(tmp_path: Path) -> None:
    tree = recipe(train={"steps": 1, "checkpoint": {"every": 1}})
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(tree))
    words = ["train", str(file), "--out", str(tmp_path / "run")]
    assert plaudit_here(*words).returncode == 0
    file.write_text(to_toml(tree) + "\n[sampling.eval]\ntemperature = 0.5\ntop_k = 5\n")
    done = plaudit_here(*words, "--resume", "--set", "train.steps=2")
    assert done.returncode == 0, done.stderr
    noted = {e["key"]: (e["old"], e["new"]) for e in read_events(tmp_path / "run") if e.get("text") == CHANGED}
    assert noted == {"sampling.eval.temperature": (None, 0.5), "sampling.eval.top_k": (None, 5)}
    (finding,) = [f for f in diagnose(read_history(tmp_path / "run")) if f.rule == "settings changed on resumption"]
    assert finding.cure.endswith("Training is the same.")


def test_what_cannot_be_evaluated_is_refused() -> None:
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


def test_a_prompt_leaves_room_for_the_longer_of_both(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of which sampling\.eval\.max_tokens = 255 .* lower sampling\.eval\.max"):
        trained(tmp_path / "run", sampling={"eval": {"max_tokens": 255}})
