"""Methods are looked up by name; one file and one line add a method."""

import pytest
import torch

from plaudit.algo.method import Method
from plaudit.algo.methods import METHODS, estimators, losses
from plaudit.errors import ConfigError
from plaudit.records import Batch
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.run.clock import Clock
from tests.pages import ROOT, blocks_of
from tests.train.rl_world import made_up, policy, recipe, tiny


def documented() -> Method:
    """The custom method of docs/algorithms.md."""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (source,) = (b.text for b in blocks_of(page, "algorithms.md") if b.language == "python")
    names: dict[str, Method] = {}
    exec(source, names)
    return names["METHOD"]


def test_custom_method_trains_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'toy': unknown algorithm; expected one of ppo, reinforce, "):
        recipe(algorithm={"name": "toy"})
    monkeypatch.setitem(METHODS, "toy", documented())
    tree = recipe(algorithm={"name": "toy"})
    assert (tree.algorithm.loss, tree.algorithm.advantage.estimator) == ("log-likelihood", "best")
    assert (tree.algorithm.aggregate, tree.algorithm.clip.high, tree.algorithm.grouped) == ("sequence", 0.3, True)

    module, samples = tiny(), tuple(made_up())
    learner = policy(module, {"name": "toy"})
    best = [s for s in samples if s.reward == max(o.reward or 0.0 for o in samples if o.group == s.group)]
    before = learner.logprobs(best).sum()
    step = RlLearner(tree, learner, Optimizer(module, tree.train), None, None, Clock())
    metrics, experience = step.update(Batch(samples, version=0), step=0)
    assert experience is not None
    pairs = [(a.reward or 0.0, b.reward or 0.0) for a, b in zip(samples[::2], samples[1::2], strict=True)]
    halves = [max(x - y, 0.0) / 2 for a, b in pairs for x, y in ((a, b), (b, a))]
    starts = [0, *torch.tensor(experience.lengths).cumsum(0).tolist()]
    assert [experience.advantages[i].item() for i in starts[:-1]] == pytest.approx(halves)
    assert metrics["policy/loss"] > 0
    assert learner.logprobs(best).sum() > before


def test_unknown_loss_is_rejected_with_the_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'log-likelihood': input should be 'clip', 'plain', .*or"):
        recipe(algorithm={"name": "grpo", "loss": "log-likelihood"})
    monkeypatch.setitem(METHODS, "toy", documented())
    assert recipe(algorithm={"name": "grpo", "loss": "log-likelihood"}).algorithm.loss == "log-likelihood"


def test_methods_never_use_one_name_for_two_functions() -> None:
    for method in METHODS.values():
        assert estimators()[method.advantage.name] is method.advantage
        assert all(losses()[loss.name] is loss for loss in (method.loss, *method.more_losses))
