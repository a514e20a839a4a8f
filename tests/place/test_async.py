"""Generation during training: the staleness recorded in samples, in-flight updates, no sample lost or duplicated."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plaudit.models import load_policy
from plaudit.place.async_rollouts import AsyncRollouts
from plaudit.records import Batch, Prompt, Sample
from plaudit.rl.loop import RlTraining
from plaudit.train.data.encoder import LengthLimits
from plaudit.train.rollouts.rollouts import Rollouts
from plaudit.train.rollouts.sources import open_prompts
from plaudit.train.run.clock import Clock
from tests.place.rollout_host import RolloutHost
from tests.place.runs import GRPO, Watched, samples, small, train
from tests.train.rl_world import recipe

ASYNC = {"placement": {"name": "async", "staleness": 2}}


def first_prompts(tree: Any, count: int) -> list[str]:
    """The first prompts of the data, in order."""
    loaded = load_policy("sums-policy")
    source = open_prompts(tree.data, loaded.tokenizer, tree.seed, LengthLimits(256, tree.sampling.max_tokens))
    return [prompt.text for prompt in source.train(range(count))]


def prompts_of(directory: Path) -> list[str]:
    """The prompt of every trained group, in order."""
    return [s.extra["prompt"] for step in samples(directory) for s in step if s.index == 0]


def ages(directory: Path) -> list[int]:
    return [step - min(s.versions) for step, batch in enumerate(samples(directory)) for s in batch]


@pytest.mark.slow
def test_staleness_is_bounded_and_each_prompt_is_used_once(tmp_path: Path, rollout_host: RolloutHost) -> None:
    tree = small(6, GRPO, **ASYNC)
    viewer = train(tmp_path / "run", tree, rollout_host)
    assert 0 < max(ages(tmp_path / "run")) <= 2
    assert max(metrics["staleness/max"] for metrics in viewer.seen) == max(ages(tmp_path / "run"))
    assert prompts_of(tmp_path / "run") == first_prompts(tree, 48), "in their order, none twice, none left out"
    for step in samples(tmp_path / "run"):
        for sample in step:
            assert list(sample.versions) == sorted(sample.versions), "weights only grow newer"


class Player:
    """Completes a prompt when its gate opens, with the versions at its start and end."""

    def __init__(self) -> None:
        self.version = 0
        self.gates: dict[tuple[int, ...], threading.Event] = {}

    def play(self, prompts: list[Prompt], n: int, seed: str, first: int = 0) -> list[Sample]:
        results = []
        for group, prompt in enumerate(prompts):
            ids = tuple(prompt.token_ids or ())
            begun = self.version
            self.gates.setdefault(ids, threading.Event()).wait(30)
            versions = (begun, self.version)
            for index in range(n):
                results.append(
                    Sample(ids, (1, 2), "", (0.0, 0.0), (0.0, 0.0), versions, (1, 1), "stop", group=group, index=index)
                )
        return results


class Scorer:
    def request_scores(self, prompts: list[Prompt], samples: list[Sample]) -> list[Sample]:
        return [replace(sample, reward=1.0) for sample in samples]

    def score(self, prompts: list[Prompt], samples: list[Sample]) -> list[Sample]:
        return self.request_scores(prompts, samples)

    def check(self, samples: list[Sample]) -> None: ...

    def close(self) -> None: ...


class Numbers:
    """Prompt i is the token i."""

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        return [Prompt(str(index), (index,)) for index in indices]

    def right(self, prompt: Prompt, sample: Sample) -> None: ...


def scheduled(player: Player, stale: str, staleness: int = 1, **more: Any) -> AsyncRollouts:
    tree = recipe(
        placement={"name": "async", "staleness": staleness, "stale": stale, **more},
        train={"prompts_per_step": 2, "samples_per_prompt": 2},
    )  # fmt: skip
    return AsyncRollouts(tree, player, Numbers(), Scorer(), Clock(), lambda: None)  # type: ignore[arg-type]


def open_gates(player: Player, *prompts: int) -> None:
    for prompt in prompts:
        player.gates.setdefault((prompt,), threading.Event()).set()


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def used(rollouts: AsyncRollouts, step: int) -> list[int]:
    batch = rollouts.next(step, step)
    return [s.prompt_ids[0] for s in batch.samples if s.index == 0]


def test_capacity_by_hand() -> None:
    """Steps of 2 prompts, staleness 1: at version v at most (1 + v + 1) × 2 prompts have been submitted."""
    player = Player()
    rollouts = scheduled(player, "wait")
    open_gates(player, 0, 1)
    assert used(rollouts, 0) == [0, 1]
    until(lambda: set(player.gates) == {(0,), (1,), (2,), (3,)})
    assert rollouts.drawn == 4, "(1 + 0 + 1) × 2, though two of them are used"
    open_gates(player, 2, 3)
    assert used(rollouts, 1) == [2, 3]
    until(lambda: len(player.gates) == 6)
    assert rollouts.drawn == 6
    open_gates(player, 4, 5, 6, 7, 8, 9)
    rollouts.close()


def test_concurrency_limits_the_requests_in_flight() -> None:
    player = Player()
    rollouts = scheduled(player, "wait", staleness=3, concurrency=3)
    open_gates(player, 0, 1)
    assert used(rollouts, 0) == [0, 1]
    until(lambda: len(player.gates) == 5)
    assert rollouts.drawn == 5, "3 at work and 2 done, though 8 are allowed"
    open_gates(player, *range(20))
    rollouts.close()


def test_wait_mode_waits_for_a_slow_prompt() -> None:
    player = Player()
    rollouts = scheduled(player, "wait")
    open_gates(player, 1, 2, 3)
    threading.Timer(0.2, lambda: open_gates(player, 0)).start()
    assert used(rollouts, 0) == [0, 1]
    rollouts.close()


def test_drop_mode_uses_finished_prompts_first_and_regenerates_stale_ones() -> None:
    player = Player()
    rollouts = scheduled(player, "drop")
    open_gates(player, *range(1, 40))
    used_prompts: list[int] = []
    for step in range(7):
        player.version = step
        if step == 3:
            assert 0 not in used_prompts, "it was begun at version 0 and is still at work"
            open_gates(player, 0)
            until(lambda: 0 in rollouts._ready)
        batch = rollouts.next(step, step)
        assert all(step - min(sample.versions) <= 1 for sample in batch.samples)
        used_prompts += [sample.prompt_ids[0] for sample in batch.samples if sample.index == 0]
    assert rollouts.dropped >= 2, "both samples of prompt 0 were three versions old"
    assert used_prompts.count(0) == 1, "asked again, and used once"
    assert len(set(used_prompts)) == len(used_prompts) == 14, "no prompt twice"
    rollouts.close()


def test_samples_in_a_checkpoint_are_neither_lost_nor_regenerated(tmp_path: Path) -> None:
    player = Player()
    rollouts = scheduled(player, "wait", staleness=2)
    open_gates(player, 0, 1, 3, 4)
    assert used(rollouts, 0) == [0, 1]
    until(lambda: set(rollouts._ready) == {3, 4})
    rollouts.save(tmp_path)
    open_gates(player, 2, 5)
    rollouts.close()

    player = Player()
    resumed = scheduled(player, "wait", staleness=2)
    resumed.load(tmp_path)
    open_gates(player, 2, 5, 6, 7, 8, 9)
    assert used(resumed, 1) == [2, 3]
    assert used(resumed, 2) == [4, 5]
    assert (3,) not in player.gates, "it was scored before"
    assert (4,) not in player.gates
    resumed.close()


class Drawn:
    """Responds at once, with tokens determined by the seed and the position in the step."""

    def play(self, prompts: list[Prompt], n: int, seed: str, first: int = 0) -> list[Sample]:
        return [
            Sample(
                tuple(prompt.token_ids or ()), (token, 2), "", (0.0, 0.0), (0.0, 0.0), (0, 0), (1, 1), "stop",
                group=group, index=index,
            )
            for group, prompt in enumerate(prompts)
            for index in range(n)
            for token in [random.Random(f"{seed} {first + group} {index}").randrange(100)]
        ]  # fmt: skip


class Uneven(Scorer):
    """About half of all groups of two have equal rewards."""

    def request_scores(self, prompts: list[Prompt], samples: list[Sample]) -> list[Sample]:
        return [replace(sample, reward=float(sample.token_ids[0] % 2)) for sample in samples]


def filtering(staleness: int, stale: str = "wait", rounds: int = 3) -> AsyncRollouts:
    tree = recipe(
        placement={"name": "async", "staleness": staleness, "stale": stale},
        train={"prompts_per_step": 4, "samples_per_prompt": 2},
        algorithm={"name": "dapo", "dynamic": {"rounds": rounds}},
    )  # fmt: skip
    return AsyncRollouts(tree, Drawn(), Numbers(), Uneven(), Clock(), lambda: None)  # type: ignore[arg-type]


def test_dynamic_sampling_at_staleness_0_matches_a_synchronous_run_also_after_resuming(
    tmp_path: Path,
) -> None:
    rollouts = filtering(0)
    synchronous = Rollouts(rollouts.recipe, Drawn(), Numbers(), Uneven(), Clock())  # type: ignore[arg-type]
    for step in range(12):
        expected = synchronous.next(step, 0)
        if step == 5:
            rollouts.save(tmp_path)
            rollouts.close()
            rollouts = filtering(0)
            rollouts.load(tmp_path)
        assert rollouts.next(step, 0) == expected
        assert rollouts.drawn == synchronous.drawn
    assert synchronous.drawn > 12 * 4, "some groups were replaced"
    rollouts.close()


@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_groups_with_equal_rewards_are_replaced_ahead_of_the_learner(tmp_path: Path, stale: str) -> None:
    rollouts = filtering(2, stale, rounds=8)
    batches: list[Batch] = []
    for step in range(12):
        if step == 6:
            rollouts.save(tmp_path)
            rollouts.close()
            rollouts = filtering(2, stale, rounds=8)
            rollouts.load(tmp_path)
        batches.append(rollouts.next(step, 0))
    rollouts.close()
    groups = [batch.samples[at : at + 2] for batch in batches for at in range(0, 8, 2)]
    assert all(a.reward != b.reward and a.prompt_ids == b.prompt_ids for a, b in groups)
    used = [group[0].prompt_ids[0] for group in groups]
    assert len({*used}) == len(used) == 48, "none twice"
    if stale == "wait":  # exactly the groups whose rewards differ, in order
        samples = Uneven().request_scores([], [s for n in range(max(used) + 1) for s in alone(n)])
        pairs = zip(samples[::2], samples[1::2], strict=True)
        assert used == [a.prompt_ids[0] for a, b in pairs if a.reward != b.reward]
        assert sum(batch.metrics["dynamic/drawn"] for batch in batches) == max(used) + 1


def alone(number: int) -> list[Sample]:
    """The samples of a prompt generated ahead of the learner, which depend only on its number."""
    chunk, place = divmod(number, 4)
    return Drawn().play([Prompt(str(number), (number,))], 2, f"{chunk} {chunk * 4}", place)


def test_replacement_stops_at_the_round_limit_when_all_rewards_are_equal() -> None:
    rollouts = filtering(1, rounds=2)
    rollouts.scorer = Scorer()  # type: ignore[assignment]
    batches = [rollouts.next(step, 0) for step in range(4)]
    assert [len(batch.samples) for batch in batches] == [8] * 4
    assert [batch.metrics["dynamic/filtered"] for batch in batches] == [1.0] * 4
    until(lambda: not rollouts._running and not rollouts._played)
    assert rollouts.drawn <= 4 * 8 + 2 * 2 * 4, "bounded ahead"
    rollouts.close()


def test_a_killed_async_run_resumes_with_its_pending_samples(tmp_path: Path, rollout_host: RolloutHost) -> None:
    class Killed(Exception):
        pass

    def kill(training: RlTraining, step: int) -> None:
        if step == 5:
            raise Killed

    tree = small(8, {"train": {"checkpoint": {"every": 2}}}, **ASYNC)
    with pytest.raises(Killed):
        train(tmp_path / "run", tree, rollout_host, kill)
    viewer: Watched = train(tmp_path / "run", tree, rollout_host, resume=True)
    assert len(viewer.seen) == 4, "from the checkpoint of step 4 on"
    assert prompts_of(tmp_path / "run") == first_prompts(tree, 64)
    assert max(ages(tmp_path / "run")) <= 2
