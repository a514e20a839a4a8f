"""Training from Python: `plaudit.train(...)` runs a recipe in this process and returns the run.

from plaudit import train

run = train("sums-grpo", steps=50, reward=lambda prompt, response, truth: float(response.endswith(f"#{truth}")))
print(run.summary, run.curve("reward/mean")[-1])
print(run.engine().generate("8+7+6=")[0].text)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from plaudit.config import Recipe, RlRecipe, parse_recipe
from plaudit.config.shipped.catalog import find_recipe
from plaudit.config.table import put, read_toml
from plaudit.core import Engine
from plaudit.errors import ConfigError, nearest
from plaudit.events import read_events
from plaudit.output import write_atomically
from plaudit.place.build import hosting
from plaudit.reward.rules.function import FunctionReward, name_of
from plaudit.rl.follower import Viewer, joined_run
from plaudit.rl.loop import RlTraining
from plaudit.train.run.progress import Progress
from plaudit.train.run.run import Run
from plaudit.train.supervised.supervised import SupervisedTraining

OnStep = Callable[[int, Mapping[str, float]], object]
SOURCES_OF_DATA = ("world", "path", "gym")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its directory, figures, curves and model.

    directory  recipe, events, checkpoints, the model; `plaudit report DIRECTORY` creates a page about it
    summary    the final figures, as in summary.json
    """

    directory: Path
    summary: Mapping[str, Any]

    @property
    def model(self) -> Path:
        """The trained model's directory, readable by `transformers`."""
        return self.directory / "final"

    @property
    def recipe(self) -> str:
        """The complete recipe of the run, as TOML: `plaudit train FILE` runs it again."""
        return (self.directory / "recipe.toml").read_text(encoding="utf-8")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names accepted by `curve`."""
        return tuple(sorted({name for _, values in self._logged() for name in values}))

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, in order."""
        points = [(step, float(values[name])) for step, values in self._logged() if name in values]
        if not points:
            raise ConfigError(f"the run has no metric {name!r}; {nearest(name, self.metrics)}")
        return points

    def engine(self, **options: Any) -> Engine:
        """The trained model, ready to generate or score. `options` are those of `Engine.load`."""
        return Engine.load(self.model, **options)

    def _logged(self) -> list[tuple[int, Mapping[str, Any]]]:
        events = read_events(self.directory)
        return [(event["step"], event["values"]) for event in events if event["kind"] == "metric" and "step" in event]


def train(
    recipe: str | Path | Mapping[str, Any], *, out: str | Path | None = None, steps: int | None = None,
    model: str | Path | None = None, data: str | Path | Iterable[Mapping[str, Any]] | None = None,
    reward: str | Mapping[str, Any] | Callable[..., Any] | None = None, options: Mapping[str, Any] | None = None,
    resume: bool = False, fresh: bool = False, on_step: OnStep | None = None, quiet: bool = False,
) -> TrainedRun:  # fmt: skip
    """Trains in this process: SFT, a reward or process model, preferences or RL, depending on the recipe.

    recipe   a name of `plaudit recipes`, a TOML file, or the tree of tables itself
    out      the run directory; default: runs/<name of the recipe>
    steps    train.steps
    model    model.path: a directory, a run, or the name of an embedded model
    data     data.path: a file; or rows as mappings, such as a `datasets.Dataset`, which are saved in the run directory
    reward   RL: a function (prompt, response, truth) -> float, or in TRL's or verl's form (docs/rewards.md); the URL of
             `plaudit serve`; a reward model's path or name; or the keys of a recipe's [reward] table
    options  further keys of the recipe by their dotted names: {"train.lr": 1e-5}
    resume   continue from the last checkpoint, if any; fresh: delete the directory's content and start over
    on_step  called after every step with its number and metrics
    quiet    show nothing; warnings are in the run's events
    """
    tree, name = _tree(recipe)
    directory = Path("runs") / name if out is None else Path(out)
    chosen = _choose(tree, directory, steps=steps, model=model, data=data, reward=reward, options=options or {})
    parsed = parse_recipe(tree, f"train({name!r})")
    _check_one_process(parsed)
    viewer = _Shown(directory.name, on_step, Console(stderr=True, quiet=quiet))
    if not isinstance(parsed, RlRecipe):
        with Run(directory, parsed, resume=resume, fresh=fresh, chosen=chosen) as run:
            return TrainedRun(directory, SupervisedTraining(parsed, run, viewer).fit())
    return _train_rl(parsed, directory, resume, fresh, chosen, viewer, reward)


def _train_rl(
    recipe: RlRecipe, directory: Path, resume: bool, fresh: bool, chosen: Sequence[str], viewer: Viewer, reward: Any
) -> TrainedRun:
    source = FunctionReward(reward) if callable(reward) else None
    with (
        joined_run(directory, recipe, resume=resume, fresh=fresh, chosen=chosen) as (run, ranks),
        hosting(recipe, directory, ranks) as host,
    ):
        training = RlTraining(recipe, run, viewer, None, ranks, host, source)
        return TrainedRun(directory, training.fit())


def _tree(recipe: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(recipe, Mapping):
        copied: dict[str, Any] = json.loads(json.dumps(recipe, default=str))
        return copied, str(recipe.get("task", "recipe"))
    return read_toml(find_recipe(Path(recipe))), Path(recipe).stem


def _choose(
    tree: dict[str, Any], directory: Path, *, steps: int | None, model: str | Path | None, data: Any, reward: Any,
    options: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """Writes the caller's arguments into the tree, and returns the keys that were set."""
    chosen = dict(options)
    if steps is not None:
        chosen["train.steps"] = steps
    if model is not None:
        tree["model"] = {key: value for key, value in tree.get("model", {}).items() if key != "new"}
        chosen["model.path"] = str(model)
    if data is not None:
        kept = {key: value for key, value in tree.get("data", {}).items() if key not in SOURCES_OF_DATA}
        tree["data"] = {**kept, "path": str(data) if isinstance(data, str | Path) else str(_kept(data, directory))}
    if reward is not None:
        if tree.get("task") != "rl":
            raise ConfigError(f"reward needs an RL recipe, but the recipe has task = {tree.get('task')!r}")
        tree["reward"] = _reward_table(tree.get("reward", {}), reward)
    for key, value in chosen.items():
        put(tree, key, str(value) if isinstance(value, Path) else value, f"the option {key!r}")
    return [*chosen, *(name for name, value in (("data", data), ("reward", reward)) if value is not None)]


def _reward_table(before: Mapping[str, Any], reward: Any) -> dict[str, Any]:
    """Settings for failed rewards are kept from the recipe; the reward's source is replaced."""
    general = {key: before[key] for key in ("on_error", "max_errors", "patience") if key in before}
    if isinstance(reward, Mapping):
        return {**general, **reward}
    if isinstance(reward, str | Path):
        return {**general, "url" if "://" in str(reward) else "path": str(reward)}
    if callable(reward):
        return {**general, "rule": "function", "function": name_of(reward)}
    raise ConfigError(f"reward is a {type(reward).__name__}; expected a function, a URL, a model's path or a table")


def _kept(rows: Iterable[Mapping[str, Any]], directory: Path) -> Path:
    """Saves the rows as a file of the run, named by its hash: resuming with other rows is detected."""
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data: row {number} is not a mapping of JSON values: {error}") from None
    if not lines:
        raise ConfigError("data has no rows; expected at least one")
    text = "".join(lines)
    path = directory / f"data-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


def _check_one_process(recipe: Recipe) -> None:
    ray = isinstance(recipe, RlRecipe) and recipe.resources.ray is not None
    if recipe.resources.ranks > 1 or ray:
        what = "Ray" if ray else f"{recipe.resources.ranks} ranks"
        raise ConfigError(f"train() runs in one process, but resources set {what}: use `plaudit train FILE`")


class _Shown(Progress):
    def __init__(self, title: str, on_step: OnStep | None, console: Console) -> None:
        super().__init__(title, console)
        self._on_step = on_step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        if self._on_step is not None:
            self._on_step(step, metrics)
