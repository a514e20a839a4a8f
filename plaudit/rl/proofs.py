"""Writes the proofs of a run to its log, and at the end its manifest, on the main rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plaudit.records import Sample
from plaudit.train.policy.trainee import Trainee
from plaudit.train.run.manifest import write_manifest
from plaudit.train.run.proof import Chain, chain_of, metrics_digest, shown_digest, start_proof, step_proof
from plaudit.train.run.ranks import Ranks
from plaudit.train.run.run import Run


class Proofs:
    def __init__(self, run: Run, ranks: Ranks, trainee: Trainee) -> None:
        self.run = run
        self.writes = ranks.main
        self.whole = ranks.everyone.size == 1
        """Whether this process has all weights."""
        self.trainee = trainee
        self.chain = Chain(run.events, chain_of(run.directory) if run.resume and self.writes else "")

    def start(self, step: int, *, fresh: bool, foreign: bool) -> None:
        """`fresh`: the weights are those of the source. `foreign`: it trains on the samples of another run."""
        if not self.writes:
            return
        hashes = start_proof(self.run.directory / "recipe.toml", self.trainee.loaded.module, fresh and self.whole)
        self.chain.add(step, {**hashes, **({"samples": "of another run"} if foreign else {})})

    def step(
        self, step: int, samples: Sequence[Sample], metrics: Mapping[str, float], dump: str,
        shown: Sequence[Mapping[str, Any]] | None,
    ) -> None:  # fmt: skip
        """`dump`: the hash of the step's dump; "" without one. `shown`: samples in the log, if it shows any."""
        if not self.writes:
            return
        trainee = self.trainee
        hashes = step_proof(samples, metrics, trainee.loaded.module, trainee.critic_module, whole=self.whole)
        if dump:
            hashes["dump"] = dump
        if shown is not None:
            hashes["shown"] = shown_digest(shown)
        self.chain.add(step, hashes)

    def evaluation(self, step: int, heldout: Mapping[str, float]) -> None:
        if self.writes:
            self.chain.add(step, {"heldout": metrics_digest(heldout)})

    def deliver(self, summary: Mapping[str, Any]) -> None:
        if self.writes:
            write_manifest(self.run, str(self.trainee.recipe.model.path), self.chain.last, summary)
