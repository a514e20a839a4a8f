"""A recipe shared out over machines: how many processes each has, and the commands that start them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plaudit.config import RlRecipe, load_recipe, to_toml
from plaudit.errors import ConfigError

CORES = 8  # for a process that has a GPU: its threads, tokenizers and rules


@dataclass(frozen=True)
class Job:
    """name   of the job, as both schedulers allow it
    text      the whole recipe as TOML, with what --set changed
    nodes     machines that train
    rollouts  machines that generate for them, beside those
    ranks     processes of each machine that torchrun starts
    engines   the same of `rollouts`, where plaudit rollouts starts them
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
        rollouts = beside = there = 0  # machines that generate, and processes for it on rank 0's and on theirs
        if isinstance(tree, RlRecipe):
            if tree.resources.ray is not None:
                raise ConfigError(f'resources.ray = "{tree.resources.ray}" has Ray start the processes: leave it out')
            rollouts, beside = tree.resources.rollout.nodes, tree.rollout_processes * tree.resources.rollout.ranks
            if rollouts:
                beside, there = 0, beside // rollouts
        if ranks % nodes:
            names, sizes = resources.product
            raise ConfigError(
                f"resources.{names} = {sizes} = {ranks} ranks do not divide over --nodes {nodes}: set "
                "resources.data_parallel to a multiple"
            )
        if nodes > 1 and beside:
            raise ConfigError(
                f"{beside} process(es) generate beside rank 0, on one machine, and --nodes is {nodes}: give them "
                'machines of their own with resources.rollout.nodes, or set placement.name = "colocated"'
            )
        ranks //= nodes
        processes = max(ranks + beside, there)
        if gpus is None:
            gpus = 0 if tree.model.device == "cpu" else processes
        if 0 < gpus < max(ranks, there):
            raise ConfigError(f"{max(ranks, there)} ranks on each machine take one GPU each, and --gpus is {gpus}")
        # A file is named from anywhere; a name stays one, and its recipe comes with the package.
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
        """Ranks of a machine, of either kind."""
        return max(self.ranks, self.engines)

    def train(self) -> list[str]:
        """What every rank runs. With --resume a job that is started again goes on where it was."""
        sets = [word for each in self.sets for word in ("--set", each)]
        return ["-m", "plaudit", "train", self.recipe, *sets, "--out", self.run, "--resume"]

    def generate(self) -> list[str]:
        """What the machines run that generate."""
        return ["-m", "plaudit", "rollouts", self.run]


def quoted(words: Sequence[str]) -> str:
    """A shell's words. Those with a variable are in double quotes already."""
    return " ".join(word if word.startswith('"$') else shlex.quote(word) for word in words)
