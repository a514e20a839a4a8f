"""`plaudit verify`: recompute steps of a finished run from the last checkpoint before them, and compare every bit.

Samples are regenerated from their seeds; rewards come from the run's dump or, without one, are computed again; then
losses, gradient norms and weights follow. The run's log has a hash of each (`train/run/proof.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from plaudit.config import RlRecipe
from plaudit.config.recipe import parse_recipe
from plaudit.config.table import read_toml
from plaudit.errors import BadCheckpoint, PlauditError, RunError
from plaudit.events import VERIFIED, read_events
from plaudit.models import load_policy
from plaudit.models.part import outline
from plaudit.output import write_atomically
from plaudit.records import Item, Sample, Score
from plaudit.reward.reward import Result
from plaudit.rl.follower import NoViewer
from plaudit.rl.loop import RlTraining
from plaudit.rl.replay import Verdict, metrics_by_step
from plaudit.train.rollouts.dump import Dump
from plaudit.train.rollouts.scorer import Scorer
from plaudit.train.run.checkpoint import Checkpoint, Checkpoints
from plaudit.train.run.proof import PARTS, WORDS, batch_proof, weights_digest
from plaudit.train.run.run import Run

NEVER = 1_000_000_000


class Mismatch(Exception):
    """The first difference from the original run."""


class TargetReached(Exception):
    """The last step to verify is done."""


def verify(directory: Path, out: Path, step: int | None = None) -> Verdict:
    """Recompute up to `step` (default: the run's last one) in the working directory `out`, and compare."""
    recipe = _recipe(directory)
    metrics, proofs = metrics_by_step(directory), _proofs(directory)
    last = max((number for number, values in metrics.items() if "progress/samples" in values), default=0)
    target = last if step is None else step
    if not 1 <= target <= last:
        raise RunError(f"{directory} has steps 1 to {last}; there is no step {target} to verify")
    start = _checkpoint_before(directory, target)
    first = 1 if start is None else start.step + 1
    dump = Dump(directory / "rollouts")
    try:
        _check_files(directory, proofs, dump, start, target, last)
        computed_by = _recompute(recipe, out, start, dump, Expected(metrics, proofs, target))
    except Mismatch as difference:
        return Verdict(False, str(difference))
    parts = [WORDS[part].removeprefix("the ") for part in PARTS if part in proofs.get(target, {})]
    numbers = f"{sum(len(metrics.get(each, {})) for each in range(first, target + 1))} numbers"
    origin = "the start" if start is None else start.path.name
    span = f"step {target}" if first == target else f"steps {first} to {target}"
    return Verdict(
        True, f"equal to the bit: {span}, recomputed from {origin}: {', '.join([*parts, numbers])}; {computed_by}"
    )


def keep(verdict: Verdict, directory: Path) -> None:
    """Write the verdict to the run directory, for its report."""
    kept = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "text": verdict.text}
    write_atomically(directory / VERIFIED, json.dumps(kept, indent=1) + "\n")


def _recipe(directory: Path) -> RlRecipe:
    path = directory / "recipe.toml"
    recipe = parse_recipe(read_toml(path, "recipe of a run"), str(path))
    if not isinstance(recipe, RlRecipe):
        raise RunError(f"{directory} is a run of task = {recipe.task!r}; verify is for rl")
    why = (
        f"it is over {recipe.resources.ranks} ranks, whose summation order differs"
        if recipe.resources.ranks > 1
        else "its placement is async: which weights a sample saw depends on time"
        if recipe.placement.name == "async"
        else f"its engine is {recipe.engine.name}, whose summation order differs"
        if recipe.engine.name != "core"
        else "its critic is behind a URL"
        if recipe.critic is not None and recipe.critic.url is not None
        else None
    )
    if why:
        raise RunError(
            f"{directory} cannot be reproduced to the bit: {why}; `plaudit train --replay` trains on its dump"
        )
    quiet = recipe.train.model_copy(
        update={
            "dump": False, "eval_every": NEVER, "show": 0,
            "checkpoint": recipe.train.checkpoint.model_copy(update={"every": NEVER}),
        }
    )  # fmt: skip
    return recipe.model_copy(update={"train": quiet, "truth": None})


def _proofs(directory: Path) -> dict[int, dict[str, str]]:
    return {event["step"]: event["hashes"] for event in read_events(directory) if event["kind"] == "proof"}


def _checkpoint_before(directory: Path, step: int) -> Checkpoint | None:
    """Return the newest intact checkpoint before `step`."""
    checkpoints = Checkpoints(directory / "checkpoints", 1)
    for name in reversed(checkpoints.names()):
        if int(name.removeprefix("step-")) < step:
            with suppress(BadCheckpoint):
                return checkpoints.named(name)
    return None


def _check_files(
    directory: Path,
    proofs: Mapping[int, Mapping[str, str]],
    dump: Dump,
    start: Checkpoint | None,
    target: int,
    last: int,
) -> None:
    """Compare the files on disk with the hashes in the run's log."""
    for step in dump.steps():
        proof = proofs.get(step)
        if proof is not None and (0 if start is None else start.step) < step <= target:
            kept = batch_proof(dump.read(step)[0])
            for part, digest in kept.items():
                if digest != proof[part]:
                    raise Mismatch(f"{dump.path(step)}: {WORDS[part]} are not those that the run learned from")
    if start is not None and start.step in proofs:
        _check_weights(start.model, proofs[start.step], start.step)
    if target == last and last in proofs:
        _check_weights(directory / "final", proofs[last], last)


def _check_weights(model: Path, proof: Mapping[str, str], step: int) -> None:
    """Check the hash of the weights if all were trained and are in one file; adapters are checked by recomputing."""
    file = model / "model.safetensors"
    if "whole" not in proof or not file.exists():
        return
    stored = load_file(file)
    if weights_digest(stored.items()) == proof["weights"]:
        return
    # Files of most mixtures store experts separately, while the module stacks them.
    dtype = str(next(iter(stored.values())).dtype).removeprefix("torch.")
    if not outline(model, dtype).plain:
        module = load_policy(model, dtype).module
        if weights_digest(module.named_parameters()) == proof["weights"]:
            return
    raise Mismatch(f"{file}: the weights are not those after step {step}")


def _recompute(recipe: RlRecipe, out: Path, start: Checkpoint | None, dump: Dump, expected: Expected) -> str:
    with Run(out, recipe, fresh=True) as run:
        if start is not None:
            run.resume, run.checkpoints = True, FixedCheckpoint(start)
        reward = RecordedRewards(recipe, dump, 1 if start is None else start.step + 1)
        training = RlTraining(recipe, run, ComparingViewer(out, expected, reward), reward=reward)
        training.before = training.before or {"length": 1.0}  # nothing is evaluated
        with suppress(TargetReached):
            training.fit()
    then, now = (
        expected.proofs.get(expected.target, {}).get("by"),
        _proofs(out)[expected.target]["by"],
    )
    return now if then in (None, now) else f"made by {then}, verified by {now}"


class FixedCheckpoint(Checkpoints):
    """Loads one given checkpoint, and writes none."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path.parent, 1)
        self.checkpoint = checkpoint

    def load(self, warn: object) -> Checkpoint:
        return self.checkpoint

    def save(self, *_: Any, **__: Any) -> Path:
        return self.directory


class RecordedRewards:
    """The run's recorded rewards. A sample that is not in its dump is scored again."""

    def __init__(self, recipe: RlRecipe, dump: Dump, step: int) -> None:
        self.recipe = recipe
        self.dump = dump
        self.step = step
        self._known: dict[tuple[str, str], Sample] = {}
        self._read = 0
        self._scorer: Scorer | None = None

    def score(self, items: Sequence[Item]) -> list[Result]:
        if self._read != self.step:
            self._read = self.step
            samples = self.dump.read(self.step)[0] if self.step in self.dump.steps() else ()
            self._known = {(_prompt_key(sample.extra), sample.text): sample for sample in samples}
        recorded = [self._known.get((_item_key(item), str(item.response))) for item in items]
        again = iter(self._score_again([item for item, sample in zip(items, recorded, strict=True) if sample is None]))
        return [
            next(again) if sample is None else Score(sample.reward, error=sample.error, version="recorded")
            for sample in recorded
        ]

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()

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
            raise Mismatch(
                f"step {self.step}: {len(items)} samples are not in the run's dump, and cannot be scored again: {error}"
            ) from error


def _prompt_key(extra: Mapping[str, Any]) -> str:
    return json.dumps(extra.get("messages") or extra.get("prompt"))


def _item_key(item: Item) -> str:
    return json.dumps(item.prompt if isinstance(item.prompt, str) else list(item.prompt or ()))


class Expected:
    """The metrics and hashes in the run's log, by step."""

    def __init__(
        self, metrics: Mapping[int, Mapping[str, Any]], proofs: Mapping[int, Mapping[str, str]], target: int
    ) -> None:
        self.metrics = metrics
        self.proofs = proofs
        self.target = target

    def check(self, step: int, metrics: Mapping[str, Any], proof: Mapping[str, str]) -> None:
        then = self.proofs.get(step, {})
        for part in PARTS:
            if part in then and then[part] != proof[part]:
                raise Mismatch(f"step {step}: {WORDS[part]} differ; the log has {then[part]}, now {proof[part]}")
        logged = {name: value for name, value in self.metrics[step].items() if not name.startswith("heldout/")}
        for name in {**logged, **metrics}:
            if logged.get(name) != metrics.get(name):
                raise Mismatch(f"step {step}: {name} was {logged.get(name)!r} and is now {metrics.get(name)!r}")


class ComparingViewer(NoViewer):
    """Compares each step when it is done, and ends the run at the first difference or after the last step."""

    def __init__(self, out: Path, expected: Expected, reward: RecordedRewards) -> None:
        self.out = out
        self.expected = expected
        self.reward = reward

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.expected.check(step, metrics_by_step(self.out)[step], _proofs(self.out)[step])
        if step == self.expected.target:
            raise TargetReached
        self.reward.step = step + 1
