"""What a run says of itself: its log with chained hashes, its recipe, dumps, checkpoints, and manifest.

Everything here only compares: files with hashes, hashes with the chain. Whoever changes a file can change the hashes as
well, so the rest of `plaudit verify` computes the run again (`recomputation.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from plaudit.config.recipe import Recipe, parse_recipe
from plaudit.config.table import read_toml
from plaudit.errors import BadCheckpoint, ConfigError, PlauditError, RunError
from plaudit.events import CHANGED, LOG, Event, read_valid
from plaudit.models import load_policy
from plaudit.models.part import outline
from plaudit.models.weights import read_stem
from plaudit.train.rollouts.dump import Dump
from plaudit.train.run.checkpoint import LATEST, Checkpoint, Checkpoints, sha256
from plaudit.train.run.manifest import NAME, first_change, read_manifest
from plaudit.train.run.proof import PARTS, WORDS, batch_proof, linked, metrics_digest, shown_digest, weights_digest

HELD_OUT = "heldout/"
_OF_EVENTS = {"t", "wall", "kind", "step", "version", "role", "rank"}


class Different(Exception):
    """The first thing that is not as the run, or its recomputation, has it."""


class Missing(Exception):
    """What the run lacks to be verified."""


class Evidence:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dump = Dump(directory / "rollouts")
        self.checkpoints = Checkpoints(directory / "checkpoints", 1)
        recipe, log = directory / "recipe.toml", directory / LOG
        if not recipe.is_file() and not log.is_file():
            raise RunError(f"{directory} is not the directory of a run: it has no recipe.toml")
        for path in (recipe, log):
            if not path.is_file():
                raise Missing(f"{path} does not exist")
        try:
            self.recipe: Recipe = parse_recipe(read_toml(recipe, "recipe of a run"), str(recipe))
        except ConfigError as error:
            raise Different(str(error)) from None
        try:
            events = read_valid(log)
            self.proofs = [event for event in events if event["kind"] == "proof"]
            self.steps: dict[int, dict[str, str]] = {}
            self.evaluations: dict[int, str] = {}
            self.starts: dict[int, dict[str, str]] = {}
            for event in self.proofs:
                hashes = event["hashes"]
                if "metrics" in hashes:
                    self.steps[event["step"]] = hashes
                elif "heldout" in hashes:
                    self.evaluations[event["step"]] = hashes["heldout"]
                elif "recipe" in hashes:
                    self.starts[event["step"]] = hashes
            self.metrics: dict[int, dict[str, Any]] = {}
            self.heldout: dict[int, dict[str, Any]] = {}
            self.shown: dict[int, list[Event]] = {}
            for event in events:
                self._add(event)
            self.changes = [(event["step"], event["key"]) for event in events if event.get("text") == CHANGED]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Different(f"{log} is damaged: {type(error).__name__} {error}") from error
        self.last = max((step for step, values in self.metrics.items() if "progress/samples" in values), default=0)

    def _add(self, event: Event) -> None:
        step = event.get("step", 0)
        if event["kind"] == "metric":
            for name, value in event["values"].items():
                (self.heldout if name.startswith(HELD_OUT) else self.metrics).setdefault(step, {})[name] = value
        if event["kind"] == "sample":
            self.shown.setdefault(step, []).append(
                {name: value for name, value in event.items() if name not in _OF_EVENTS}
            )

    @cached_property
    def finished(self) -> bool:
        return self.last >= self.recipe.train.steps

    @cached_property
    def manifest(self) -> dict[str, Any]:
        path = self.directory / NAME
        if not path.is_file():
            raise Missing(f"{path} does not exist")
        try:
            return read_manifest(path)
        except PlauditError as error:
            raise Different(str(error)) from None

    # The log

    def check_log(self, skipped: Collection[int] = ()) -> None:
        """Check the chain, and all logged values but those of the steps `skipped`, which will be computed again."""
        if self.last == 0:
            raise Missing(f"{self.directory / LOG} has no complete step")
        if not self.proofs:
            raise Missing(f"{self.directory / LOG} has no hashes of steps 1 to {self.last}")
        if not any("chain" in event["hashes"] for event in self.proofs):
            raise Missing(
                f"{self.directory} was written by an earlier version of plaudit, whose log has no chain of hashes"
            )
        self._check_chain()
        for step in range(1, self.last + 1):
            if "progress/samples" not in self.metrics.get(step, {}):
                raise Missing(f"{self.directory / LOG} has no metrics of step {step}")
            if step not in self.steps:
                raise Missing(f"{self.directory / LOG} has no hashes of step {step}")
        logged = {*self.metrics, *self.heldout, *self.shown, *self.steps}
        if max(logged) > self.last:
            raise Missing(f"{self.directory / LOG} ends within step {max(logged)}: its metrics are not there")
        for step in sorted(logged - {*skipped}):
            self._check_step(step)

    def _check_chain(self) -> None:
        before = ""
        for event in self.proofs:
            step, hashes = event["step"], event["hashes"]
            if linked(before, step, hashes) != hashes.get("chain"):
                raise Different(
                    f"{self.directory / LOG}: the chain of hashes breaks at step {step}: a hash there was "
                    "changed, or what precedes it was removed or changed"
                )
            before = hashes["chain"]

    def _check_step(self, step: int) -> None:
        place = f"{self.directory / LOG}: step {step}"
        hashes = self.steps.get(step, {})
        if step and self.metrics.get(step) and metrics_digest(self.metrics[step]) != hashes.get("metrics"):
            raise Different(f"{place}: the metrics are not those of its hash")
        if step in self.shown and shown_digest(self.shown[step]) != hashes.get("shown"):
            raise Different(f"{place}: the samples shown are not those of its hash")
        if "shown" in hashes and step not in self.shown and hashes["shown"] != shown_digest([]):
            raise Missing(f"{place}: the samples shown are not there")
        if (step in self.heldout) != (step in self.evaluations):
            raise Missing(f"{place}: the evaluation or its hash is not there")
        if step in self.heldout and metrics_digest(self.heldout[step]) != self.evaluations[step]:
            raise Different(f"{place}: the evaluation is not that of its hash")

    # Files

    def check_files(self, whole: bool) -> list[str]:
        """Check all files with the hashes in the log and, if `whole`, in the manifest of the finished run. Returns what
        is not there and not needed."""
        recipe = self.directory / "recipe.toml"
        if not self.starts:
            raise Missing(f"{self.directory / LOG} has no hash of the recipe")
        if sha256(recipe) != self.starts[max(self.starts)]["recipe"]:
            raise Different(f"{recipe} is not the recipe that the run was trained with")
        absent = self._check_dump()
        if whole:
            self._check_delivered()
        return absent + self._check_checkpoints(whole)

    def _check_dump(self) -> list[str]:
        there, logged = self.dump.steps(), {step for step, hashes in self.steps.items() if "dump" in hashes}
        if logged and not self.dump.directory.is_dir():
            return ["rollouts/"]
        for step in sorted({*there, *logged}):
            path = self.dump.path(step)
            if step not in there:
                raise Missing(f"{path} does not exist; without all of rollouts/, rewards are computed again")
            if step not in logged:
                raise Different(f"{path} is of no step of the run")
            hashes = self.steps[step]
            if sha256(path) == hashes["dump"]:
                continue
            for part, value in batch_proof(self.dump.read(step)[0]).items():
                if value != hashes[part]:
                    raise Different(f"{path}: {WORDS[part]} are not those that the run learned from")
            raise Different(f"{path}: texts or prompts are not those that the run wrote")
        return []

    def _check_delivered(self) -> None:
        if not (final := self.directory / "final").is_dir():
            raise Missing(f"{final} does not exist")
        manifest = self.manifest
        if change := first_change(manifest, final):
            raise Different(change)
        if manifest.get("chain") != self.proofs[-1]["hashes"]["chain"]:
            raise Different(f"{self.directory / NAME} is not of this log: it has another end of the chain of hashes")
        for name, key in (("recipe.toml", "recipe"), ("summary.json", "summary")):
            path = self.directory / name
            if not path.is_file():
                raise Missing(f"{path} does not exist")
            if sha256(path) != manifest.get(key):
                raise Different(f"{path} is not the file of {NAME}")

    def _check_checkpoints(self, whole: bool) -> list[str]:
        names = self.checkpoints.names()
        home = self.checkpoints.directory
        expected: Mapping[str, str] = self.manifest["checkpoints"] if whole else {}
        if expected and not home.is_dir():
            return ["checkpoints/"]
        for name in sorted({*names, *expected}):
            path = home / name
            if name not in names:
                raise Missing(f"{path} does not exist; without all of checkpoints/, all steps are computed again")
            try:
                checkpoint = self.checkpoints.named(name)
            except BadCheckpoint as error:
                raise Different(str(error).removesuffix(f": skipping {name}")) from None
            if whole and name not in expected:
                raise Different(f"{path} is no checkpoint of the run")
            if whole and sha256(path / "manifest.json") != expected[name]:
                raise Different(f"{path} is not the checkpoint that the run wrote: {self._changed_in(checkpoint)}")
            if changed := self._weights_changed(checkpoint):
                raise Different(changed)
        if names and (home / LATEST).read_text(encoding="utf-8").strip() != names[-1]:
            raise Different(f"{home / LATEST} does not name {names[-1]}, the newest checkpoint")
        return []

    def _changed_in(self, checkpoint: Checkpoint) -> str:
        return self._weights_changed(checkpoint) or "its manifest has another hash"

    def _weights_changed(self, checkpoint: Checkpoint) -> str | None:
        """Compare the weights of a checkpoint with the hashes of its step."""
        proof = self.steps.get(checkpoint.step, {})
        if "weights" not in proof:  # of step 0, or of several ranks
            return None
        adapter = checkpoint.path / "adapter.safetensors"
        where = adapter if adapter.is_file() else checkpoint.model / "model.safetensors"
        try:
            if adapter.is_file():
                equal = weights_digest(load_file(adapter).items()) == proof["weights"]
            else:
                equal = _whole_equal(checkpoint.model, proof["weights"])
        except PlauditError as error:
            return str(error)
        return None if equal else f"{where}: the weights are not those after step {checkpoint.step}"

    def checkpoint_before(self, step: int) -> int | None:
        """The step of the newest checkpoint before `step`."""
        return max((number for name in self.checkpoints.names() if (number := _step_of(name)) < step), default=None)


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def parts_of(hashes: Mapping[str, str]) -> list[str]:
    return [WORDS[part].removeprefix("the ") for part in PARTS if part in hashes]


def _whole_equal(model: Path, expected: str) -> bool:
    stored = {name: at.read() for name, at in read_stem(model / "model.safetensors").items()}
    if weights_digest(stored.items()) == expected:
        return True
    # Files of most mixtures store experts separately, while the module stacks them.
    dtype = str(next(iter(stored.values())).dtype).removeprefix("torch.")
    if outline(model, dtype).plain:
        return False
    return weights_digest(load_policy(model, dtype).module.named_parameters()) == expected
