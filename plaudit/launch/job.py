"""Distributes a recipe over machines: the number of processes on each, and the commands that start them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plaudit.config import RlRecipe, load_recipe, to_toml
from plaudit.errors import ConfigError

CORES = 8  # for a process with a GPU: its threads, tokenizers and rules


@dataclass(frozen=True)
class Job:
    """name   of the job, valid for both schedulers
    text      the whole recipe as TOML, with the changes of --set
    nodes     machines that train
    rollouts  additional machines that generate
    ranks     processes started by torchrun on each machine
    engines   the same for `rollouts`, started by plaudit rollouts
    gpus      of each machine; 0: the CPU
    cores     of each machine
    """

    name: str
    recipe: str
    sets: tuple[str, ...]
    text: str
    run: str
    nodes: int
    rollouts: int
    ranks: int
    engines: int
    gpus: int
    cores: int

    @classmethod
    def of(cls, recipe: Path, sets: Sequence[str], *, nodes: int, gpus: int | None, run: Path | None) -> Job:
        tree = load_recipe(recipe, list(sets))
        ranks, resources = tree.resources.ranks, tree.resources
        rollouts = beside = there = 0  # rollout machines, and rollout processes on rank 0's machine and on those
        if isinstance(tree, RlRecipe):
            if tree.resources.ray is not None:
                raise ConfigError(f'resources.ray = "{tree.resources.ray}" starts the processes with Ray: remove it')
            rollouts, beside = tree.resources.rollout.nodes, tree.rollout_processes * tree.resources.rollout.ranks
            if rollouts:
                beside, there = 0, beside // rollouts
        if ranks % nodes:
            names, sizes = resources.product
            raise ConfigError(
                f"resources.{names} = {sizes} = {ranks} ranks are not divisible by --nodes {nodes}: set "
                "resources.data_parallel to a multiple"
            )
        if nodes > 1 and beside:
            raise ConfigError(
                f"{beside} process(es) generate on rank 0's machine, but --nodes is {nodes}: give them "
                'their own machines with resources.rollout.nodes, or set placement.name = "colocated"'
            )
        ranks //= nodes
        processes = max(ranks + beside, there)
        if gpus is None:
            gpus = 0 if tree.model.device == "cpu" else processes
        if 0 < gpus < max(ranks, there):
            raise ConfigError(f"{max(ranks, there)} ranks on each machine need one GPU each, but --gpus is {gpus}")
        # A file's path becomes absolute; a name stays a name, as its recipe is in the package.
        named = str(recipe.resolve()) if recipe.exists() else str(recipe)
        return cls(
            re.sub(r"[^a-z0-9-]+", "-", recipe.stem.lower()).strip("-") or "plaudit", named, tuple(sets), to_toml(tree),
            str(run or Path("runs") / recipe.stem), nodes, rollouts, ranks, there, gpus, CORES * processes,
        )  # fmt: skip

    @property
    def summary(self) -> str:
        has = f"{self.gpus} GPU(s)" if self.gpus else "the CPU"
        apart = f" and {self.rollouts} that generate, with {self.engines} each," if self.rollouts else ""
        return f"{self.nodes} machine(s) with {self.ranks} rank(s) each{apart} on {has}"

    @property
    def machines(self) -> int:
        return self.nodes + self.rollouts

    @property
    def most(self) -> int:
        """The maximum number of ranks on a machine."""
        return max(self.ranks, self.engines)

    def train(self) -> list[str]:
        """The command of every rank. With --resume a restarted job continues where it was."""
        sets = [word for each in self.sets for word in ("--set", each)]
        return ["-m", "plaudit", "train", self.recipe, *sets, "--out", self.run, "--resume"]

    def generate(self) -> list[str]:
        """The command of the rollout machines."""
        return ["-m", "plaudit", "rollouts", self.run]


def quoted(words: Sequence[str]) -> str:
    """Quotes words for a shell. Those with a variable are already in double quotes."""
    return " ".join(word if word.startswith('"$') else shlex.quote(word) for word in words)
