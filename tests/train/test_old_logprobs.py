"""π_old: engine log-probs that equal the learner's replace its forward pass, and the mismatch is still measured."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.events import WARNING, read_events
from plaudit.records import Batch, Sample
from plaudit.report.history import read_history
from plaudit.rl.loop import RlTraining
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.rollouts.dump import Dump
from plaudit.train.run.clock import Clock
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, made_up, policy, recipe, tiny


def learner(**algorithm: Any) -> RlLearner:
    keys = {"name": "grpo", "kl": {"coef": 0.0}, **algorithm}
    tree = recipe(algorithm=keys, train={"steps": 3, "minibatches": 2, "warmup": 0})
    module = tiny()
    return RlLearner(tree, policy(module, keys), Optimizer(module, tree.train), None, None, Clock())


def drawn(trainer: RlLearner) -> Batch:
    """Samples with the learner's own log-probs, as an exact engine gives them."""
    samples = [replace(s, reward=float(i % 2), versions=(0,) * len(s.token_ids)) for i, s in enumerate(made_up())]
    ends = iter(trainer.policy.logprobs(samples).split([len(s.token_ids) for s in samples]))
    return Batch(tuple(replace(s, logprobs=tuple(next(ends).tolist())) for s in samples), 0)


def weights(trainer: RlLearner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.policy.module.parameters()]


def test_exact_engine_skips_the_pass_and_changes_no_weight() -> None:
    passes, skips = learner(), learner()
    skips.old.exact = True
    batch = drawn(passes)
    expected_metrics, _ = passes.update(batch, 0)
    metrics, _ = skips.update(batch, 0)
    assert all(map(torch.equal, weights(passes), weights(skips)))
    assert skips.old.exact
    assert metrics["mismatch/abs_max"] == expected_metrics["mismatch/abs_max"] == 0
    assert "time/old" in passes.clock.split()
    assert "time/old" not in skips.clock.split()
    assert passes.old.exact  # compared and equal: the next step does not need the pass


def test_one_different_token_restores_the_pass() -> None:
    trainer = learner()
    trainer.old.exact = True
    batch = drawn(trainer)
    moved = [nudged(sample) for sample in batch.samples]
    metrics, _ = trainer.update(Batch(tuple(moved), 0), 0)
    assert metrics["mismatch/abs_max"] > 0
    assert not trainer.old.exact
    assert trainer.state()["exact"] is False
    assert trainer.state()["differed"]  # and it stays so, whatever the next pass without gradients shows


def test_samples_of_older_weights_are_never_treated_as_exact() -> None:
    trainer = learner()
    trainer.old.exact = True
    batch = drawn(trainer)
    trainer.update(Batch(batch.samples, 1), 0)
    assert not trainer.old.exact
    assert "time/old" in trainer.clock.split()


def test_ratio_from_engine_logprobs_still_reports_the_mismatch() -> None:
    trainer = learner(old_logprobs="engine")
    batch = drawn(trainer)
    metrics, _ = trainer.update(Batch(tuple(nudged(sample, 0.25) for sample in batch.samples), 0), 0)
    assert metrics["mismatch/abs_mean"] == pytest.approx(0.25, rel=1e-5)


def nudged(sample: Sample, shift: float = 1e-6) -> Sample:
    pairs = zip(sample.logprobs, sample.mask, strict=True)
    return replace(sample, logprobs=tuple(value - shift if own_token else value for value, own_token in pairs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    def fitted(name: str, steps: int, resume: bool = False) -> list[torch.Tensor]:
        tree = recipe(
            algorithm={"name": "grpo"}, model={"device": "cuda"}, engine={"kv_bytes": 1 << 25},
            train={"steps": steps, "minibatches": 2, "schedule": "constant", "checkpoint": {"every": 2}},
        )  # fmt: skip
        with Run(tmp_path / name, tree, resume=resume, chosen=["train.steps"] if resume else []) as run:
            training = RlTraining(tree, run, Silent())
            training.fit()
        return [p.detach().cpu() for p in training.loaded.module.parameters()]

    straight = fitted("straight", 4)
    fitted("resumed", 2)
    assert all(map(torch.equal, fitted("resumed", 4, resume=True), straight))


@pytest.mark.slow
def test_truncated_samples_are_trained_on_with_the_full_softmax(tmp_path: Path) -> None:
    """The learner reproduces the engine's log-probs, the truncated mass is a metric, and one warning reports it."""
    tree = recipe(
        train={"steps": 1, "prompts_per_step": 2, "dump": True}, data={"eval_items": 2},
        sampling={"max_tokens": 24, "top_p": 0.7, "temperature": 0.8},
    )  # fmt: skip
    with Run(tmp_path, tree) as run:
        RlTraining(tree, run, Silent()).fit()
    curves = read_history(tmp_path).curves
    samples, _ = Dump.find(tmp_path).read(1)
    truncated_mass = [
        1 - math.exp(p - q) for s in samples for p, q in zip(s.tempered_logprobs or (), s.logprobs, strict=True)
    ]
    assert curves["rollout/truncated_mass"].values == (
        pytest.approx(sum(truncated_mass) / len(truncated_mass), abs=1e-9),
    )
    assert 0.001 < sum(truncated_mass) / len(truncated_mass) < 0.3
    assert curves["mismatch/abs_max"].values[0] < 1e-4
    warnings = [event["message"] for event in read_events(tmp_path) if event.get("text") == WARNING]
    assert [text.partition(" excludes")[0] for text in warnings] == ["sampling.top_p = 0.7"]
