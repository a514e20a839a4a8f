"""Computes steps of a run again, in another directory, and compares everything that it writes with the run.

The recipe is the run's own: it samples, scores, trains, evaluates, dumps and saves at the same steps. The hashes and
metrics of a step are compared when it is done; checkpoints and the final model tensor by tensor, other files byte by
byte.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from plaudit.config import RlRecipe
from plaudit.config.reward import JudgeTable, RlRewardTable, RuleTable
from plaudit.errors import ModelError, PlauditError
from plaudit.events import EventLog, Kind, finite
from plaudit.metrics import of_machine
from plaudit.models.digest import difference
from plaudit.records import Batch, Item, Prompt, Sample, Score, StepScores
from plaudit.reward.reward import Result
from plaudit.rl.evidence import Different, Evidence
from plaudit.rl.follower import NoViewer
from plaudit.rl.loop import RlTraining
from plaudit.train.rollouts.dump import Dump, as_plain
from plaudit.train.rollouts.rollouts import RolloutSource
from plaudit.train.rollouts.scorer import Scorer, local_reward
from plaudit.train.run.checkpoint import STATE, Checkpoint, Checkpoints
from plaudit.train.run.proof import PARTS, WORDS
from plaudit.train.run.run import Run

_CHECKPOINT_FILES = (STATE, "manifest.json")  # compared by value, and by what it lists
CLOSE = 1e-4  # of scores of models, whose last bits depend on the batch
_MACHINE = {"seconds", "samples_per_second", "peak_bytes"}  # of state.json and summary.json


class TargetReached(Exception):
    """The last step to compute is done."""


def unscorable(recipe: RlRecipe) -> str | None:
    """Why rewards or truth cannot be computed again; None if they can."""
    for of, table in (("reward", recipe.reward), ("truth", recipe.truth)):
        if table is not None and (why := _unscorable(table)) is not None:
            return f"{of}: {why}"
    return None


def _unscorable(table: RlRewardTable) -> str | None:
    if table.url is not None:
        return f"a server computed it, {table.url if isinstance(table.url, str) else table.url[0]}"
    if any(isinstance(each, JudgeTable) for each in table.tables().values()):
        return "a judge computed it"
    if by_rules(table):
        try:
            local_reward(table).close()
        except PlauditError as error:
            return str(error)
    return None


def by_rules(table: RlRewardTable | None) -> bool:
    """Whether scores are equal to the bit when they are computed again: those of models depend on the batch."""
    return table is None or (table.url is None and all(isinstance(each, RuleTable) for each in table.tables().values()))


class Recomputation:
    def __init__(self, evidence: Evidence, recipe: RlRecipe, start: Checkpoint | None, target: int, out: Path) -> None:
        """From `start`, or the source model, to the step `target`, in `out`."""
        self.evidence = evidence
        self.recipe = recipe
        self.start = start
        self.target = target
        self.out = out
        self.first = 1 if start is None else start.step + 1
        self.finishes = evidence.finished and target == evidence.last
        self.recorded = unscorable(recipe) if evidence.dump.steps() else None
        """Why rewards are only read from the dump; None if they are computed again."""
        self.exact = by_rules(recipe.reward) and by_rules(recipe.truth)
        self.checkpoints: list[str] = []
        """Names of the checkpoints that were computed again."""
        self.log: Remembering

    def compute(self) -> None:
        """Raises Different at the first difference."""
        try:
            self._compute()
        except Different as difference:
            raise Different(f"{difference}{self._hint}") from None

    def _compute(self) -> None:
        recipe = self.recipe if self.recorded is None else self.recipe.model_copy(update={"truth": None})
        with Run(self.out, recipe, fresh=True) as run:
            run.events.close()
            run.events = self.log = Remembering(self.out)
            run.resume, run.checkpoints = self.start is not None, ComparedCheckpoints(self)
            reward = None
            if self.recorded is not None or (not by_rules(recipe.reward) and self.evidence.dump.steps()):
                reward = RecordedRewards(recipe, self.evidence.dump, self.first, again=self.recorded is None)
            viewer = Comparing(self, reward)
            viewer.training = training = _Training(recipe, run, viewer, reward=reward)
            training.work = self
            if self.recorded is not None:
                training.before = training.before or {"length": 1.0}
            training.rollouts = Until(training.rollouts, self.target, self.finishes)
            try:
                self._compare_source()
            except Different:
                training.close()
                raise
            with suppress(TargetReached):
                training.fit()  # closes it
        self._compare_evaluations()
        if self.finishes:
            self._compare(self.evidence.directory / "final", self.out / "final")
            self._compare_summary()

    @property
    def by(self) -> str:
        """Versions and hardware of the run and, if they differ, of this computation."""
        then, now = self.evidence.steps[self.target]["by"], self.log.by
        return now if then == now else f"made by {then}, verified by {now}"

    @property
    def numbers(self) -> int:
        """How many metrics were compared."""
        steps = range(self.first, self.target + 1)
        return sum(not of_machine(name) for step in steps for name in self.log.metrics[step]) + sum(
            len(self.log.heldout.get(step, {})) for step in steps
        )

    # Comparisons

    def compare_step(self, step: int) -> None:
        evidence = self.evidence
        then, now = evidence.steps[step], self.log.hashes[step]
        for part in PARTS:
            if then.get(part) != now.get(part):
                raise Different(f"step {step}: {WORDS[part]} differ; the log has {then.get(part)}, now {now.get(part)}")
        _compare_metrics(step, evidence.metrics[step], self.log.metrics[step])
        if evidence.shown.get(step, []) != self.log.shown.get(step, []):
            raise Different(f"step {step}: the samples shown in events.jsonl are not the recomputed ones")
        if step in evidence.dump.steps():
            _compare_dumps(evidence.dump, Dump(self.out / "rollouts"), step)

    def _compare_source(self) -> None:
        """Whether the model with which the run began is still the same."""
        if self.start is not None:
            return
        then, now = self.evidence.starts.get(0, {}).get("source"), self.log.source
        if then != now:
            raise Different(
                f"{self.recipe.model.path} is not the model with which the run began: its weights have the hash {now}, "
                f"the log {then}"
            )

    @property
    def _hint(self) -> str:
        """What may explain a difference."""
        then, now = self.evidence.steps[self.target].get("by"), self.log.by
        if then != now:
            return f" (the run was made by {then}, and this is {now})"
        recipes = {hashes["recipe"]: step for step, hashes in self.evidence.starts.items()}
        if len(recipes) > 1 and self.start is None:
            return f" (the recipe was changed when the run was resumed at step {max(recipes.values())})"
        return ""

    def _compare_evaluations(self) -> None:
        if self.recorded is not None:
            return
        begin = 0 if self.start is None else self.first
        for step in range(begin, self.target + 1 if self.finishes else self.target):
            then, now = self.evidence.heldout.get(step, {}), self.log.heldout.get(step, {})
            _compare_metrics(step, then, now, 0.0 if self.exact else CLOSE)

    def compare_checkpoint(self, name: str) -> None:
        then, now = self.evidence.checkpoints.directory / name, self.out / "checkpoints" / name
        self._compare(then, now, _CHECKPOINT_FILES)
        old, new = (json.loads((each / STATE).read_text()) for each in (then, now))
        for key in sorted({*old, *new} - _MACHINE - (set() if self.exact and not self.recorded else {"before"})):
            if old.get(key) != new.get(key):
                raise Different(f"{then / STATE}: {key} is not the recomputed one")
        self.checkpoints.append(name)

    def _compare(self, then: Path, now: Path, ignored: tuple[str, ...] = ()) -> None:
        try:
            found = difference(then, now, ignored)
        except (ModelError, OSError) as error:
            raise Different(str(error)) from None
        if found is not None:
            raise Different(found)

    def _compare_summary(self) -> None:
        path = self.evidence.directory / "summary.json"
        then, now = json.loads(path.read_text()), json.loads((self.out / "summary.json").read_text())
        for key in sorted({*then, *now} - _MACHINE):
            if self.recorded is not None and key.endswith(("_before", "_after")):
                continue
            if not _equal(then.get(key), now.get(key), 0.0 if self.exact else CLOSE):
                raise Different(f"{path}: {key} is {then.get(key)!r}, recomputed {now.get(key)!r}")


class _Training(RlTraining):
    """Shows, evaluates and saves also at steps at which the run did so for another reason than its recipe: it was
    stopped there, or ended there before it was continued."""

    work: Recomputation

    def evaluate(self) -> dict[str, float]:
        return {} if self.work.recorded is not None else super().evaluate()

    def _shows(self) -> bool:
        return super()._shows() or self.step in self.work.evidence.shown

    def after_step(self) -> None:
        train, last = self.recipe.train, self.step == self.recipe.train.steps
        if self.step in self.work.evidence.heldout and self.step % train.eval_every and not last:
            self.evaluate()
        if self.step % train.checkpoint.every:
            self.save_checkpoint()


class Until:
    """Rollouts up to a step."""

    def __init__(self, rollouts: RolloutSource, target: int, finishes: bool) -> None:
        self.rollouts = rollouts
        self.target = target
        self.finishes = finishes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollouts, name)

    def next(self, step: int, version: int) -> Batch:
        if step >= self.target and not self.finishes:
            raise TargetReached
        return self.rollouts.next(step, version)

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]:
        return self.rollouts.heldout(prompts, n, seed)


class Remembering(EventLog):
    """A log that keeps what is compared in memory, too."""

    def __init__(self, directory: Path) -> None:
        self.metrics: dict[int, dict[str, Any]] = {}
        self.heldout: dict[int, dict[str, Any]] = {}
        self.hashes: dict[int, dict[str, str]] = {}
        self.shown: dict[int, list[Any]] = {}
        self.source: str | None = None
        self.by = ""
        super().__init__(directory)

    def write(self, kind: Kind, *, step: int | None = None, version: int | None = None, **fields: Any) -> None:
        super().write(kind, step=step, version=version, **fields)
        if step is None:
            return
        if kind == "metric":
            values = _as_read(fields["values"])
            heldout = any(name.startswith("heldout/") for name in values)
            (self.heldout if heldout else self.metrics).setdefault(step, {}).update(values)
        elif kind == "sample":
            self.shown.setdefault(step, []).append(_as_read(fields))
        elif kind == "proof":
            hashes = fields["hashes"]
            self.by = hashes.get("by", self.by)
            self.source = hashes.get("source", self.source)
            if "metrics" in hashes:
                self.hashes[step] = hashes


class ComparedCheckpoints(Checkpoints):
    """Loads one given checkpoint. Writes those that the run has, compares them, and removes them."""

    def __init__(self, work: Recomputation) -> None:
        super().__init__(work.out / "checkpoints", 1)
        self.work = work

    def load(self, warn: object) -> Checkpoint | None:
        return self.work.start

    def save(
        self, step: int, save_model: Callable[[Path], object], save_optimizer: Callable[[Path], object],
        state: dict[str, Any], more: Callable[[Path], object] | None = None,
    ) -> Path:  # fmt: skip
        name = f"step-{step:06d}"
        if name in self.work.evidence.checkpoints.names():
            path = super().save(step, save_model, save_optimizer, state, more)
            self.work.compare_checkpoint(name)
            shutil.rmtree(path)
        return self.directory / name


class RecordedRewards:
    """The run's recorded rewards. `again`: they are also computed again, and must be close to the recorded ones. A
    sample that is not in its dump is always scored again."""

    def __init__(self, recipe: RlRecipe, dump: Dump, step: int, *, again: bool) -> None:
        self.recipe = recipe
        self.dump = dump
        self.step = step
        self.again = again
        self._known: dict[tuple[str, str], Sample] = {}
        self._read = 0
        self._scorer: Scorer | None = None

    def score(self, items: Sequence[Item]) -> list[Result]:
        if self._read != self.step:
            self._read = self.step
            samples = self.dump.read(self.step)[0] if self.step in self.dump.steps() else ()
            self._known = {(_prompt_key(sample.extra), sample.text): sample for sample in samples}
        recorded = [self._known.get((_item_key(item), str(item.response))) for item in items]
        asked = [i for i, sample in enumerate(recorded) if self.again or sample is None]
        computed = dict(zip(asked, self._score_again([items[i] for i in asked]), strict=True))
        return [
            computed[i] if sample is None else self._checked(sample, computed.get(i))
            for i, sample in enumerate(recorded)
        ]

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()

    def _checked(self, sample: Sample, computed: Result | None) -> Result:
        if computed is not None:
            value = computed.aggregate if isinstance(computed, StepScores) else computed.value
            if not _equal(sample.reward, value, CLOSE):
                raise Different(
                    f"{self.dump.path(self.step)}: a sample has the reward {sample.reward}, computed again {value}"
                )
        return Score(sample.reward, error=sample.error, version="recorded")

    def _score_again(self, items: Sequence[Item]) -> Sequence[Result]:
        if not items:
            return []
        try:
            if self._scorer is None:
                self._scorer = Scorer(self.recipe.reward)
            return self._scorer.source.score(items)
        except PlauditError as error:
            if not self._known:
                raise
            raise Different(
                f"step {self.step}: {len(items)} samples are not in the run's dump, and cannot be scored again: {error}"
            ) from error


class Comparing(NoViewer):
    """Compares each step when it is done."""

    training: _Training

    def __init__(self, work: Recomputation, reward: RecordedRewards | None) -> None:
        self.work = work
        self.reward = reward

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.work.compare_step(step)
        if self.reward is not None:
            self.reward.step = step + 1
        self.training.after_step()


def _compare_metrics(step: int, then: Mapping[str, Any], now: Mapping[str, Any], close: float = 0.0) -> None:
    for name in {**then, **now}:
        if not of_machine(name) and not _equal(then.get(name), now.get(name), close):
            raise Different(f"step {step}: {name} was {then.get(name)!r} and is now {now.get(name)!r}")


def _equal(then: Any, now: Any, close: float) -> bool:
    """`close`: the largest relative difference of two numbers."""
    if close and isinstance(then, int | float) and isinstance(now, int | float):
        return math.isclose(then, now, rel_tol=close, abs_tol=close)
    return bool(then == now)


def _compare_dumps(then: Dump, now: Dump, step: int) -> None:
    path = then.path(step)
    old, new = then.read(step)[0], now.read(step)[0]
    if len(old) != len(new):
        raise Different(f"{path} has {len(old)} samples, recomputed {len(new)}")
    for number, (one, other) in enumerate(zip(old, new, strict=True), 1):
        a, b = as_plain(one), as_plain(other)
        for name in a:
            if a[name] != b[name]:
                raise Different(f"{path}:{number}: {name} is not the recomputed one")
    if path.read_bytes() != now.path(step).read_bytes():
        raise Different(f"{path} has the recomputed samples, and besides them something else")


def _as_read(tree: Any) -> Any:
    """What a log gives back for it."""
    return json.loads(json.dumps(finite(tree)))


def _prompt_key(extra: Mapping[str, Any]) -> str:
    return json.dumps(extra.get("messages") or extra.get("prompt"))


def _item_key(item: Item) -> str:
    return json.dumps(item.prompt if isinstance(item.prompt, str) else list(item.prompt or ()))
