"""Rollouts shared out among ranks: each plays and scores its part, and all have the whole in the same order.

What is sampled depends on the prompt's place in the step, not on the rank that plays it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from plaudit.errors import PlauditError, RankLost
from plaudit.records import Prompt, Sample
from plaudit.reward.reward import cuts
from plaudit.train.rollouts.rollouts import Player, SampleScorer
from plaudit.train.rollouts.scorer import RewardFailed
from plaudit.train.run.orders import Orders
from plaudit.train.run.ranks import Group
from plaudit.train.run.signals import Interrupted, leave_on_signal


@dataclass(frozen=True, slots=True)
class Share:
    samples: tuple[Sample, ...] = ()
    error: str | None = None
    interrupted: bool = False
    """A signal came to this rank: the error is not one of rewards."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    drawn: int = 0

    def check(self, rank: int) -> None:
        """Raises what went wrong at the rank whose share it is."""
        if self.error is not None:
            raise (Interrupted if self.interrupted else RewardFailed)(f"rank {rank}: {self.error}")


class SharedPlayer:
    def __init__(self, player: Player, group: Group, engines: Group | None = None) -> None:
        """engines: among which prompts are shared out, where one has several ranks: the first of these plays."""
        self.player = player
        self.group = group
        self.engines = engines or group

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        mine = self.engines.share(len(prompts))
        share = [prompts[i] for i in mine]
        played = self.player.play(share, n, seed, first + mine.start, evaluate) if mine else []
        placed = tuple(replace(sample, group=sample.group + mine.start) for sample in played)
        return _together(self.group, Share(placed))


class MainPlayer:
    """The main rank has the engines and plays all; the others hear what came of it."""

    def __init__(self, player: Player | None, orders: Orders) -> None:
        """`player` is the main rank's."""
        self.player = player
        self.orders = orders

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        player = self.player
        mine = Share() if player is None else share_of(lambda: player.play(prompts, n, seed, first, evaluate))
        share: Share = self.orders.value(mine, Share)
        share.check(0)
        return list(share.samples)


class SharedScorer:
    def __init__(self, scorer: SampleScorer, group: Group, main_only: bool = False) -> None:
        """`main_only`: the main rank scores all samples, because the rewards are outside of the ranks."""
        self.scorer = scorer
        self.group = group
        self.main_only = main_only

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        scored = self.request_scores(prompts, samples)
        self.check(scored)
        return scored

    def request_scores(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        # Responses to one prompt stay together: a reward may compare them.
        parts = cuts([id(prompt) for prompt in prompts], self.group.size)
        mine = range(*parts[self.group.index : self.group.index + 2])
        if self.main_only:
            mine = range(len(samples) if self.group.index == 0 else 0)
        own_prompts, own_samples = [prompts[i] for i in mine], [samples[i] for i in mine]
        return _together(self.group, share_of(lambda: self.scorer.request_scores(own_prompts, own_samples)))

    def check(self, samples: Sequence[Sample]) -> None:
        self.scorer.check(samples)  # the same samples on every rank, and the same verdict

    def close(self) -> None:
        self.scorer.close()


def share_of(work: Callable[[], Sequence[Sample]]) -> Share:
    """A rank that fails says so, and all end alike with their state saved; alone it would leave them waiting."""
    try:
        with leave_on_signal():
            return Share(tuple(work()))
    except RankLost:
        raise
    except Interrupted as error:
        return Share(error=str(error), interrupted=True)
    except PlauditError as error:
        return Share(error=str(error))


def _together(group: Group, mine: Share) -> list[Sample]:
    shares: list[Share] = group.gather_values(mine, Share)
    for rank, share in enumerate(shares):
        share.check(rank)
    return [sample for share in shares for sample in share.samples]
