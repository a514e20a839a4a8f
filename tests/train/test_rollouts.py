"""Rollouts: every sample gets its own reward, whatever else is requested, and comes from the newest weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from plaudit.config.prompting import SamplingTable
from plaudit.core import Engine
from plaudit.models import load_policy
from plaudit.records import Item, Score
from plaudit.rl.loop import RlTraining
from plaudit.train.policy.experience import flat
from plaudit.train.rollouts.batch_metrics import batch_metrics
from plaudit.train.rollouts.rollouts import Rollouts, SingleTurn
from plaudit.train.rollouts.scorer import Scorer
from plaudit.train.rollouts.sources import open_prompts
from plaudit.train.run.clock import Clock
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, made_up, recipe

LOADED = load_policy("sums-policy")


class ByText:
    """A reward that depends only on the prompt and the text of the response."""

    def score(self, items: Sequence[Item]) -> list[Score]:
        return [Score(reward_of(str(item.prompt), str(item.response))) for item in items]

    def close(self) -> None: ...


def reward_of(prompt: str, response: str) -> float:
    return float(sum(map(ord, prompt + response)) % 997)


def rollouts(**tables: object) -> Rollouts:
    tree = recipe(**tables)
    prompts = open_prompts(tree.data, LOADED.tokenizer, tree.seed)
    engine = Engine(LOADED.module, LOADED.tokenizer, seed=tree.seed)
    scorer = Scorer(tree.reward)
    scorer.close()
    scorer.source = ByText()  # type: ignore[assignment]
    return Rollouts(tree, SingleTurn(engine, tree.sampling, tree.seed), prompts, scorer, Clock())


def test_every_sample_has_its_own_reward_and_its_own_group() -> None:
    batch = rollouts(train={"prompts_per_step": 6, "samples_per_prompt": 4}).next(0, 0)
    assert [sample.group for sample in batch.samples] == [g for g in range(6) for _ in range(4)]
    for group in batch.groups().values():
        assert len({sample.prompt_ids for sample in group}) == 1
        assert [sample.index for sample in group] == [0, 1, 2, 3]
    for sample in batch.samples:
        prompt = sample.extra["prompt"]
        assert sample.prompt_ids[-len(prompt) :] == tuple(LOADED.tokenizer.encode(prompt, add_special_tokens=False))
        assert sample.reward == reward_of(prompt, sample.text)


def test_groups_stay_together_when_dynamic_sampling_reorders_them() -> None:
    source = rollouts(
        algorithm={"name": "dapo", "dynamic": {"rounds": 4}}, train={"prompts_per_step": 4, "samples_per_prompt": 2}
    )
    batch = source.next(0, 0)
    assert len(batch.samples) == 8
    for group in batch.groups().values():
        assert len({sample.extra["prompt"] for sample in group}) == 1
        assert len(group) == 2
    assert source.drawn % 4 == 0


def test_samples_of_a_prompt_do_not_depend_on_other_requests() -> None:
    engine = Engine(LOADED.module, LOADED.tokenizer)
    prompts = open_prompts(recipe().data, LOADED.tokenizer, 1).train(range(5))
    player = SingleTurn(engine, SamplingTable(max_tokens=48), 7)
    together = player.play(prompts, 3, "4 0")
    small_engine = Engine(LOADED.module, LOADED.tokenizer, max_running=2, budget=64)
    fewer = SingleTurn(small_engine, SamplingTable(max_tokens=48), 7).play(prompts[:2], 3, "4 0")
    assert [s.token_ids for s in fewer] == [s.token_ids for s in together[:6]]
    assert [s.token_ids for s in player.play(prompts, 3, "5 0")] != [s.token_ids for s in together]


@pytest.mark.slow
def test_after_an_update_the_engine_has_the_learners_weights(tmp_path: Path) -> None:
    """Also where the prompt's KV cache was computed with the old weights."""
    tree = recipe(train={"steps": 1, "lr": 5e-3})
    with Run(tmp_path / "run", tree) as run:
        training = RlTraining(tree, run, Silent())
        samples = training.engine.generate([list(p.token_ids or ()) for p in training.heldout])
        ids = [sample.prompt_ids + sample.token_ids for sample in samples]
        before = training.engine.logprobs(ids, cache=True)
        training.fit()
        after = training.engine.logprobs(ids, cache=True)
        learner = training.policy.logprobs(samples)
        tails = [a[len(s.prompt_ids) - 1 :] for a, s in zip(after, samples, strict=True)]
        assert np.abs(np.concatenate(tails) - learner.numpy()).max() < 1e-4
        assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 1e-2
        assert training.engine.version == training.version == 1
        fresh = training.engine.generate([ids[0][:4]])
        assert set(fresh[0].versions) == {1}


def test_metrics_of_a_batch_by_hand() -> None:
    samples = [
        replace(sample, reward=reward, finish_reason=reason, group=group, extra={"right": right})
        for sample, reward, reason, group, right in zip(
            made_up(), (1.0, 1.0, 0.0, 1.0, None, 0.0), ("stop", "stop", "length", "stop", "error", "stop"),
            (0, 0, 1, 1, 2, 2), (True, True, False, True, None, False), strict=True,
        )
    ]  # fmt: skip
    metrics = batch_metrics(samples)
    assert metrics["reward/mean"] == pytest.approx(0.6)
    assert metrics["reward/zero_std_groups"] == pytest.approx(2 / 3)
    assert metrics["accuracy"] == pytest.approx(0.6)
    assert metrics["pass_at_k"] == pytest.approx(2 / 3)
    assert metrics["length/truncated"] == pytest.approx(1 / 6)
    assert metrics["length/mean"] == pytest.approx((7 + 4 + 1 + 12 + 2 + 4) / 6)
    assert metrics["length/stopped_mean"] == pytest.approx((7 + 4 + 12 + 4) / 4)


def test_behaviour_logprobs_are_of_the_sampled_distribution() -> None:
    engine = Engine(LOADED.module, LOADED.tokenizer)
    prompts = open_prompts(recipe().data, LOADED.tokenizer, 1).train(range(3))
    samples = SingleTurn(engine, SamplingTable(max_tokens=32, temperature=0.5), 1).play(prompts, 2, "0 0")
    sampled, raw = flat(samples, "logprobs"), flat(samples, "raw_logprobs")
    assert (sampled >= raw - 1e-6).float().mean() > 0.5
    assert not torch.allclose(sampled, raw)
