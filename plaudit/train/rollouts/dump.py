"""Samples on disk, for inspection and for training on them again.

rollouts/step-000001.jsonl  the samples of the first step: one JSON object each, with every field of a Sample and
                            `drawn`, the number of prompts used when the step's samples were complete

A file is complete or absent. Numbers are restored bit for bit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.errors import DataError, RunError, StorageError
from plaudit.output import write_atomically
from plaudit.records import Batch, ItemError, Prompt, Sample

if TYPE_CHECKING:
    from plaudit.train.rollouts.rollouts import (
        RolloutSource,  # loads torch, which those who only read a dump do without
    )

_NAME = re.compile(r"step-(\d{6,})\.jsonl")
_FIELDS = [field.name for field in fields(Sample)]
_MAY_LACK = (
    "tempered_logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "prompt_top_logprobs",
    "experts",
    "prompt_ranks",
)  # as older do


class DumpEnded(RunError):
    """The dump has no samples for the step."""


class Dump:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def find(cls, path: Path) -> Dump:
        """Open the dump of a run directory, or a directory of the files themselves."""
        dump = cls(path / "rollouts" if (path / "rollouts").is_dir() else path)
        if not dump.steps():
            raise RunError(f"{path} has no rollouts/step-000001.jsonl: train with train.dump = true to write them")
        return dump

    def steps(self) -> list[int]:
        matches = [match for path in self.directory.glob("step-*.jsonl") if (match := _NAME.fullmatch(path.name))]
        return sorted(int(match[1]) for match in matches)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}.jsonl"

    def write(self, step: int, batch: Batch, drawn: int) -> str:
        """Write the samples of a step, which counts from 1, and return the SHA-256 of the file."""
        # A truth that JSON cannot represent, such as a date of a parquet file, is written as text.
        lines = [
            json.dumps({"drawn": drawn, "metrics": batch.metrics, **as_plain(sample)}, ensure_ascii=False, default=str)
            for sample in batch.samples
        ]
        text = "\n".join(lines) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path(step), text)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path(step)}: {error.strerror}; free disk space, then --resume"
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, step: int) -> tuple[tuple[Sample, ...], int]:
        """Return the samples and `drawn`."""
        path = self.path(step)
        if not path.is_file():
            raise DumpEnded(f"{path} does not exist: the dump has steps {_span(self.steps())}")
        rows = list(_rows(path))
        if not rows:
            raise DataError(f"{path} is empty: it needs at least one sample")
        return tuple(sample for sample, _ in rows), rows[-1][1]

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's batch over everything sampled for it."""
        with self.path(step).open(encoding="utf-8") as file:
            return dict(json.loads(file.readline()).get("metrics", {}))

    def discard_after(self, step: int) -> None:
        """Delete the files after `step`: a run resumed there samples these steps again."""
        for later in self.steps():
            if later > step:
                self.path(later).unlink()


class DumpedRollouts:
    """The samples of a dump instead of new ones. Held-out prompts are still sampled by `live`."""

    def __init__(self, dump: Dump, live: RolloutSource, vocab_size: int) -> None:
        self.dump = dump
        self.live = live
        self.vocab_size = vocab_size
        self.drawn = 0

    def next(self, step: int, version: int) -> Batch:
        samples, self.drawn = self.dump.read(step + 1)
        highest = max(max((*sample.prompt_ids, *sample.token_ids), default=0) for sample in samples)
        if highest >= self.vocab_size:
            raise DataError(
                f"{self.dump.path(step + 1)} has the token id {highest}, and this model's vocabulary is "
                f"{self.vocab_size}: the dump is of another model"
            )
        return Batch(samples, version, self.dump.metrics(step + 1))

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]:
        return self.live.heldout(prompts, n, seed)


def as_plain(sample: Sample) -> dict[str, Any]:
    """Convert a sample to JSON types; numbers are restored bit for bit."""
    tree = {name: getattr(sample, name) for name in _FIELDS}
    if sample.error is not None:
        tree["error"] = {"type": sample.error.type, "message": sample.error.message}
    if sample.experts is not None:
        tree["experts"] = base64.b64encode(sample.experts).decode()
    return {**tree, "extra": dict(sample.extra)}


def from_plain(tree: dict[str, Any]) -> Sample:
    """Restore a sample; unknown keys are ignored."""
    tree = {**dict.fromkeys(_MAY_LACK), "stop": "", **tree}
    kept: dict[str, Any] = {name: tuple(v) if isinstance(v := tree[name], list) else v for name in _FIELDS}
    if kept["error"] is not None:
        kept["error"] = ItemError(**kept["error"])
    if kept["experts"] is not None:
        kept["experts"] = base64.b64decode(kept["experts"], validate=True)
    return Sample(**kept)


def _rows(path: Path) -> Iterator[tuple[Sample, int]]:
    for number, line in enumerate(path.read_bytes().rstrip(b"\n").split(b"\n"), 1):
        try:
            tree = json.loads(line)
            yield from_plain(tree), int(tree["drawn"])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path.name}:{number} is not a dumped sample: {type(error).__name__} {error}") from None


def _span(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"
