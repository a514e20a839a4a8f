"""Asynchronous rollouts: generation continues while the learner trains, at most `staleness` versions ahead.

New prompts are requested while there is capacity, in prompts:

    min(concurrency - running, (staleness + version + 1) × prompts_per_step - (accepted + running))

where `version` is the learner's when it last requested a batch (a step makes one), and `accepted` counts all groups
that were ever finished and kept. With dynamic sampling, groups whose rewards are all equal are not kept: others are
requested in their place. Weights that are published meanwhile reach sequences in flight, which keep their tokens; each
token has the version it was sampled with. A sample is as old as its oldest token, and no batch contains one that is
too old: the samples themselves are checked.

Prompts are identified by their number in the data. The sampling seed of a prompt depends on its number alone, as in
`train.rollouts`; with staleness 0 a step's prompts are requested together, and the samples are those of a synchronous
run, with dynamic sampling too, whose rounds are then requested whole.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from plaudit.config import RlRecipe
from plaudit.errors import RunError
from plaudit.records import Batch, Prompt, Sample
from plaudit.train.data.answered import with_prompt
from plaudit.train.data.prompts import Prompts
from plaudit.train.rollouts.batch_metrics import filtered
from plaudit.train.rollouts.dump import as_plain, from_plain
from plaudit.train.rollouts.rollouts import Player, SampleScorer, rewards_differ
from plaudit.train.run.clock import Clock

FILE = "rollouts.jsonl"
LOOK_SECONDS = 1.0  # interval at which a waiting thread checks, in case a notification was missed
CLOSE_SECONDS = 5.0  # for rewards in flight at close; their results are not needed any more
Group = list[Sample]


class Choice(NamedTuple):
    """The prompts of the next batch; and all that were examined for it, those whose rewards differ and the others."""

    numbers: list[int]
    kept: list[int]
    spare: list[int]


class AsyncRollouts:
    """`restart_lost` restarts lost engines; it is called while this waits, when no weights are being published.

    _order    prompts that were requested and not yet learned from, in the order of their first request
    _again    those of them that must be requested again
    _used     groups that were learned from: prompts_per_step in each step
    _equal    ready groups whose rewards do not differ, with dynamic sampling
    """

    def __init__(
        self, recipe: RlRecipe, player: Player, prompts: Prompts, scorer: SampleScorer, clock: Clock,
        restart_lost: Callable[[], None],
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.player = player
        self.prompts = prompts
        self.scorer = scorer
        self.clock = clock
        self.restart_lost = restart_lost
        self.size = recipe.train.prompts_per_step
        self.staleness = recipe.placement.staleness
        self.dynamic = recipe.algorithm.dynamic
        self.concurrency = recipe.placement.concurrency or (self.staleness + 1) * self.size
        self.version = 0
        self.step = 0
        self.drawn = 0
        self.dropped = 0
        self._used = 0
        self._order: deque[int] = deque()
        self._again: deque[int] = deque()
        self._running: set[int] = set()
        self._played: dict[int, Group] = {}  # to be scored
        self._ready: dict[int, Group] = {}  # scored, in order of completion
        self._equal: set[int] = set()
        self._failure: Exception | None = None
        self._closed = False
        self._news = threading.Condition()
        self.scoring = threading.Lock()  # acquired by whoever uses the scorer
        self._scorer: threading.Thread | None = None

    # Called by the training loop

    def next(self, step: int, version: int) -> Batch:
        """The samples of one step, none of them more than `staleness` versions old."""
        if self._scorer is None:
            self._scorer = threading.Thread(target=self._score, name="rewards", daemon=True)
            self._scorer.start()
        with self.clock("wait"):
            with self._news:
                self.step, self.version, self._used = step, version, step * self.size
                self._top_up()
            while (choice := self._complete()) is None:
                self.restart_lost()
        with self._news:
            kept, spare = ([self._ready[number] for number in part] for part in (choice.kept, choice.spare))
            groups = [self._ready[number] for number in choice.numbers]
        # Before the groups are forgotten: with too many failed rewards the run ends here, and a resumed run needs them.
        self.scorer.check([sample for group in (*kept, *spare) for sample in group])
        with self._news:
            self._forget({*choice.kept, *choice.spare})
            self._used += self.size
        metrics = {} if self.dynamic is None else filtered(kept, spare)
        batch = Batch(tuple(replace(s, group=i) for i, group in enumerate(groups) for s in group), version, metrics)
        if (oldest := max(_age(group, version) for group in groups)) > self.staleness:
            raise RunError(
                f"step {step}: a sample is {oldest} versions old, and placement.staleness = {self.staleness}"
            )
        return batch

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]:
        samples = self.player.play(prompts, n, seed, evaluate=True)
        with self.scoring:
            return self.scorer.score([prompts[sample.group] for sample in samples], samples)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._scorer is not None:
            self._scorer.join(CLOSE_SECONDS)

    # State for a checkpoint: requested prompts are not forgotten, scored ones are not requested again

    def save(self, directory: Path) -> None:
        with self._news:
            order, drawn, ready = self._pending()
            # With the current `drawn`: more may have been requested since the loop read it.
            head = {"order": order, "drawn": drawn, "dropped": self.dropped, "size": self.size}
            lines: list[object] = [head]
            for number, group in ready.items():
                lines += [{"number": number, **as_plain(sample)} for sample in group]
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        (directory / FILE).write_text(text)

    def _pending(self) -> tuple[list[int], int, dict[int, Group]]:
        """What a resumed run continues with: order, `drawn`, and the scored groups."""
        if self.staleness == 0:  # the step is repeated whole, as in a synchronous run
            return [], min(self._order, default=self.drawn), {}
        # Groups with an error are requested again: what failed may succeed then. They move to the end, because others
        # may have been requested in their place, which would be too old if they had to wait for them.
        failed = {n for n, group in self._ready.items() if any(sample.error is not None for sample in group)}
        order = [n for n in self._order if n not in failed] + [n for n in self._order if n in failed]
        return order, self.drawn, {n: group for n, group in self._ready.items() if n not in failed}

    def load(self, directory: Path) -> None:
        if not (directory / FILE).exists():  # of a run that was not async until now: no groups are pending
            return
        head, *rows = [json.loads(line) for line in (directory / FILE).read_text().splitlines()]
        if (size := head.get("size", self.size)) != self.size:  # the number of prompts ahead is counted in it
            raise RunError(
                f'placement.name = "async" counts in prompts_per_step, which was {size} and is {self.size}: '
                f"continue with --set train.prompts_per_step={size}"
            )
        self._order, self.dropped = deque(head["order"]), head["dropped"]
        self.drawn = head.get("drawn", self.drawn)
        for row in rows:
            self._ready.setdefault(row["number"], []).append(from_plain(row))
        self._equal = {number for number, group in self._ready.items() if self._rewards_equal(group)}
        self._again = deque(number for number in self._order if number not in self._ready)

    # Internal; all but the threads' own work under the lock

    def _capacity(self) -> int:
        running = len(self._running)
        accepted = self._used + len(self._played) + len(self._ready) - len(self._equal)
        free = min(self.concurrency - running, (self.staleness + self.step + 1) * self.size - (accepted + running))
        if self.dynamic is None:
            return free
        if self.staleness == 0 and free > 0:
            free = 0 if running or self._played else len(self._again) or self.size
        # If no group had differing rewards, prompts would be requested forever.
        return min(free, (self.staleness + 1) * self.dynamic.rounds * self.size - len(self._order) + len(self._again))

    def _top_up(self) -> None:
        """Request as many prompts as there is capacity for; without staleness those of one step in one call."""
        numbers: list[int] = []
        for _ in range(max(0, self._capacity())):
            if self._again:
                number = self._again.popleft()
            else:
                number, self.drawn = self.drawn, self.drawn + 1
                self._order.append(number)
            numbers.append(number)
        self._running |= set(numbers)
        while numbers:
            piece = [numbers.pop(0)]
            while self.staleness == 0 and numbers and numbers[0] == piece[-1] + 1 and numbers[0] % self.size:
                piece.append(numbers.pop(0))
            prompts = self.prompts.train(piece)
            threading.Thread(target=self._play, args=(piece, prompts), name="rollout", daemon=True).start()

    def _play(self, numbers: list[int], prompts: list[Prompt]) -> None:
        chunk, place = divmod(numbers[0], self.size)
        # As in a synchronous run, where a step may draw several times.
        step = self.step if self.dynamic is not None and self.staleness == 0 else chunk
        try:
            n = self.recipe.train.samples_per_prompt
            samples = self.player.play(prompts, n, f"{step} {chunk * self.size}", place)
        except Exception as error:
            self._fail(error)
            return
        groups: list[Group] = [[] for _ in numbers]
        for sample in samples:
            groups[sample.group].append(sample)
        with self._news:
            self._played |= dict(zip(numbers, groups, strict=True))
            self._running -= set(numbers)
            self._news.notify_all()

    def _score(self) -> None:
        """The thread of rewards: scores all groups finished meanwhile, in one call."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._played or self._closed)
                if self._closed:
                    return
                played = dict(sorted(self._played.items()))
            try:
                scored = self._scored(played)
            except Exception as error:
                self._fail(error)
                return
            with self._news:
                for number, group in scored.items():
                    del self._played[number]
                    self._ready[number] = group
                    if self._rewards_equal(group):
                        self._equal.add(number)
                self._top_up()
                self._news.notify_all()

    def _scored(self, played: dict[int, Group]) -> dict[int, Group]:
        prompts = dict(zip(played, self.prompts.train(list(played)), strict=True))
        flat = [(number, sample) for number, group in played.items() for sample in group]
        with self.scoring:
            scored = self.scorer.request_scores([prompts[number] for number, _ in flat], [sample for _, sample in flat])
        groups: dict[int, Group] = {number: [] for number in played}
        for (number, _), sample in zip(flat, scored, strict=True):
            groups[number].append(with_prompt(sample, prompts[number], self.prompts))
        return groups

    def _fail(self, error: Exception) -> None:
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()

    def _complete(self) -> Choice | None:
        """The prompts of the next batch, if they are all ready; otherwise None after an interval."""
        with self._news:
            self._news.wait_for(lambda: self._failure is not None or self._choose() is not None, LOOK_SECONDS)
            if self._failure is not None:
                raise self._failure
            return self._choose()

    def _choose(self) -> Choice | None:
        line: Iterable[int] = self._order
        if self.recipe.placement.stale == "drop":
            self._drop()
            line = self._ready
        # Otherwise in the order of their request, where none can be too old: the prompt that is requested with n others
        # ahead of it is requested at a version of at least n / prompts_per_step - staleness - 1, and used in step n /
        # B. Groups with equal rewards are not among the n: then it is used earlier.
        whole = self.dynamic is not None and self.staleness == 0
        if whole and (self._running or self._played):
            return None
        most = self.size * (1 if self.dynamic is None else self.dynamic.rounds)
        kept: list[int] = []
        spare: list[int] = []
        for number in line:
            if number not in self._ready:
                return None
            (spare if number in self._equal else kept).append(number)
            if not whole and (len(kept) == self.size or len(kept) + len(spare) == most):
                break
        if len(kept) < self.size and len(kept) + len(spare) < most:
            return None
        return Choice((kept + spare)[: self.size], kept, spare)

    def _rewards_equal(self, group: Group) -> bool:
        return self.dynamic is not None and not rewards_differ(group)

    def _forget(self, numbers: set[int]) -> None:
        """Groups that were learned from, or are dropped."""
        for number in numbers:
            del self._ready[number]
        self._order = deque(number for number in self._order if number not in numbers)
        self._equal -= numbers

    def _drop(self) -> None:
        """Request groups again that have become too old, except those with equal rewards."""
        old = [n for n, group in self._ready.items() if _age(group, self.version) > self.staleness]
        for number in old:
            self.dropped += len(self._ready[number])
            if number in self._equal:
                self._forget({number})
            else:
                del self._ready[number]
                self._again.append(number)
        if old:
            self._top_up()


def _age(group: Group, version: int) -> int:
    """Versions between the oldest token of a group and the learner."""
    return max((version - min(sample.versions) for sample in group if sample.versions), default=0)
