"""Atomic checkpoints: each is complete or absent.

    checkpoints/step-000200/  model/ (a plain HF directory), optimizer.safetensors, state.json, manifest.json,
                              and for PPO the critic and its optimizer
    checkpoints/latest        the name of the newest complete one

Over several ranks, weights are one file per rank and an index (optim/shard_files.py). Everything is written to a
temporary directory and synced; the manifest, with the SHA-256 of each file, comes last; then one rename, then the
pointer. A process killed at any point leaves the previous checkpoint in place. Loading verifies the hashes and, if a
file is damaged, falls back to the previous checkpoint with a warning.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from plaudit.errors import BadCheckpoint, RunError, StorageError, nearest
from plaudit.models.weights import read_stem
from plaudit.output import sync, write_atomically
from plaudit.train.run.ranks import ONE, Group, together

LATEST, OPTIMIZER, STATE = "latest", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_SHARD = re.compile(r"-(\d{5})-of-\d{5}\.safetensors$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    state: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.path / "model"

    def optimizer(self) -> dict[str, Tensor]:
        return {name: at.read() for name, at in read_stem(self.path / OPTIMIZER).items()}


class Checkpoints:
    def __init__(self, directory: Path, keep: int, group: Group = ONE) -> None:
        """`group`: the ranks that write a checkpoint together."""
        self.directory = directory
        self.keep = keep
        self.group = group

    def save(
        self, step: int, save_model: Callable[[Path], object], save_optimizer: Callable[[Path], object],
        state: dict[str, Any], more: Callable[[Path], object] | None = None,
    ) -> Path:  # fmt: skip
        """Write a checkpoint. `more` writes additional files into the directory it is given. A write error must be
        raised on every rank (`together`)."""
        final = self.directory / f"step-{step:06d}"
        temporary = self.directory / f"{final.name}.tmp"
        try:
            self._by_main(lambda: _make_anew(temporary))
            save_model(temporary / "model")
            save_optimizer(temporary / OPTIMIZER)
            if more is not None:
                more(temporary)
            hashes = self._hashes(temporary)
            self._by_main(lambda: self._name(temporary, final, hashes, {"step": step, **state}))
        except (OSError, StorageError) as error:
            if self.group.index == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise StorageError(
                f"cannot write the checkpoint {final}: {reason}; earlier checkpoints are intact: free disk space, then "
                "--resume"
            ) from error
        self._by_main(self._prune)
        return final

    def _by_main(self, write: Callable[[], object]) -> None:
        together(self.group, write if self.group.index == 0 else lambda: None)

    def _hashes(self, temporary: Path) -> dict[str, str]:
        """Return the SHA-256 of each file. A rank hashes the files that it wrote."""
        hashes: dict[str, str] = {}
        together(self.group, lambda: hashes.update(_manifest(temporary, self.group)))
        return {name: digest for part in self.group.gather_values(hashes) for name, digest in part.items()}

    def _name(self, temporary: Path, final: Path, hashes: dict[str, str], state: dict[str, Any]) -> None:
        """Complete the files of all ranks and rename them to a checkpoint."""
        _write(temporary / STATE, json.dumps(state))
        hashes[STATE] = sha256(temporary / STATE)
        _write(temporary / "manifest.json", json.dumps(dict(sorted(hashes.items())), indent=1))
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        sync(self.directory)
        write_atomically(self.directory / LATEST, final.name)

    def load(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there are no checkpoints; the same on all ranks."""
        newest = self._newest(warn)
        starts = set(self.group.gather_values(0 if newest is None else newest.step))
        if len(starts) > 1:
            raise RunError(
                f"the ranks would resume from different steps {sorted(starts)}: {self.directory} must be the same "
                "directory for all ranks"
            )
        return newest

    def _newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        names = self.names()
        for name in reversed(names):
            try:
                return _open(self.directory / name)
            except BadCheckpoint as error:
                warn(str(error))
        if names:
            raise BadCheckpoint(f"no checkpoint in {self.directory} is intact; start over with --fresh")
        return None

    def named(self, name: str) -> Checkpoint:
        """Load a checkpoint by name; BadCheckpoint if it is damaged or missing."""
        if name not in self.names():
            raise BadCheckpoint(f"no checkpoint {name[:40]!r}; {nearest(name[:40], self.names())}")
        return _open(self.directory / name)

    def next(self) -> int:
        """Return a number above that of every checkpoint here."""
        return max((int(name.removeprefix("step-")) for name in self.names()), default=0) + 1

    def names(self) -> list[str]:
        names = [path.name for path in self.directory.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted(names, key=lambda name: int(name.removeprefix("step-")))

    def _prune(self) -> None:
        for name in self.names()[: -self.keep]:
            shutil.rmtree(self.directory / name)
        for leftover in self.directory.glob("step-*.tmp"):
            shutil.rmtree(leftover)


def _open(path: Path) -> Checkpoint:
    try:
        manifest = _json(path / "manifest.json")
        for name, expected in manifest.items():
            digest = sha256(path / name)
            if digest != expected:
                hashes = f"SHA-256 {digest[:12]}, expected {expected[:12]}"
                raise BadCheckpoint(f"{path / name} is damaged ({hashes}): skipping {path.name}")
        state = _json(path / STATE)
    except OSError as error:
        raise BadCheckpoint(f"{error.filename} cannot be read ({error.strerror}): skipping {path.name}") from error
    return Checkpoint(path, state["step"], state)


def _json(path: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = json.loads(path.read_text())
        return tree
    except ValueError as error:
        raise BadCheckpoint(f"{path} is damaged ({error}): skipping {path.parent.name}") from error


def _make_anew(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _manifest(directory: Path, group: Group) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256(path) for path in files if _writer(path.name) == group.index}


def _writer(name: str) -> int:
    """Return the rank that wrote a file: files without a shard number are the main rank's."""
    shard = _SHARD.search(name)
    return 0 if shard is None else int(shard[1]) - 1


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
