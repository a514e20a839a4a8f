"""The same trajectory over layouts: ten steps over every kind of parallelism, alone and in pairs, have the samples of
one rank, and its losses within 1e-5. Some runs resume over other ranks, and in two each kind of process is killed and
stopped. With PLAUDIT_SOAK all of them run (benchmarks/layouts.py, which records the differences; `make soak`), and in
`make slow` a third, a different one every day."""

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from plaudit.config import to_toml
from plaudit.models import load_tokenizer, resolve, save
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from tests.core.mixtures import mixture
from tests.place.runs import samples
from tests.rotation import in_turn
from tests.train import held
from tests.train.rl_world import Silent, recipe, weights
from tests.train.strikes import HANG_SECONDS, Strikes
from tests.train.test_ranks import ENV, KINDS, PPO, Shape, check_ten, command, fork_ranks, steps

pytestmark = pytest.mark.slow

# A reward model's scores differ between responses, while a rule rejects every response of random weights.
GRPO: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"coef": 0.05}}, "reward": {"path": "sums"},
    "train": {"prompts_per_step": 4, "lr": 3e-5},
}  # fmt: skip
STRUCK = "grpo with strikes"
HELD = {"rule": "function", "function": f"{Path(held.__file__).resolve()}:score", "timeout": HANG_SECONDS}
ALGORITHMS = {
    "grpo": GRPO, "ppo": {**PPO, "train": {**PPO["train"], "prompts_per_step": 4}},
    STRUCK: {**GRPO, "reward": HELD},
}  # fmt: skip
APART, AHEAD = {"name": "disaggregated"}, {"name": "async", "staleness": 0}
TENSOR_ENGINE, STAGE_ENGINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


class Layout(NamedTuple):
    model: str
    shape: Shape
    placement: dict[str, Any] = {"name": "colocated"}  # noqa: RUF012 (never modified)
    expert: int = 1
    engine: dict[str, int] = {}  # noqa: RUF012
    algorithm: str = "grpo"
    resumed: tuple[Shape, int] | None = None  # the last five steps are repeated over these ranks

    def __str__(self) -> str:
        parts = [f"engine {name.removesuffix('_parallel')} {size}" for name, size in self.engine.items()]
        parts += [f"{value}" for name, value in self.placement.items() if name != "delta"]
        return ", ".join([self.model, self.algorithm, sizes(self.shape, self.expert), *parts])


def sizes(shape: Shape, expert: int) -> str:
    parts = [f"{name} {size}" for name, size in zip(KINDS, shape, strict=False) if size > 1]
    return ", ".join([*parts, *[f"expert {expert}"] * (expert > 1)])


DATA, CONTEXT, TENSOR, STAGES = (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1, 2)
LAYOUTS = [
    Layout("llama", DATA, resumed=(TENSOR, 1)),
    Layout("qwen3", DATA, {**APART, "channel": "collective"}),
    Layout("qwen3", TENSOR, algorithm="ppo"),
    Layout("llama", TENSOR, {**APART, "channel": "reshard"}),
    Layout("llama", STAGES, algorithm="ppo"),
    Layout("qwen3", STAGES, {**APART, "channel": "reshard"}),
    Layout("qwen3", CONTEXT, algorithm="ppo"),
    Layout("llama", CONTEXT, {**APART, "channel": "disk"}),
    Layout("mixture", DATA, expert=2, resumed=((4, 1, 1), 2)),
    Layout("mixture", DATA, {**APART, "channel": "reshard"}, expert=2),
    Layout("qwen3", (2, 1, 2)),
    Layout("llama", (2, 1, 1, 2), algorithm="ppo", resumed=(DATA, 1)),
    Layout("llama", (2, 2, 1)),
    Layout("mixture", (4, 1, 1), expert=2, algorithm="ppo"),
    Layout("llama", (1, 1, 2, 2)),
    Layout("qwen3", (1, 2, 2)),
    Layout("qwen3", (1, 2, 1, 2)),
    Layout("mixture", (2, 2, 1), expert=2),
    Layout("mixture", (2, 1, 1, 2), expert=2, resumed=(DATA, 2)),
    Layout("llama", DATA, {**APART, "channel": "disk"}, engine=TENSOR_ENGINE, algorithm=STRUCK, resumed=(CONTEXT, 1)),
    Layout("qwen3", TENSOR, {**AHEAD, "channel": "collective"}, engine=STAGE_ENGINE, algorithm=STRUCK),
    Layout("llama", DATA, {"name": "hybrid"}),
    Layout("llama", DATA, engine=TENSOR_ENGINE),
    Layout("qwen3", TENSOR, {"name": "hybrid"}, engine=STAGE_ENGINE, algorithm="ppo"),
    Layout("llama", DATA, {"name": "swapped"}, algorithm="ppo"),
    Layout("mixture", TENSOR, expert=2, resumed=(DATA, 2)),
    Layout("mixture", (2, 1, 2), {"name": "swapped"}, expert=2, engine=STAGE_ENGINE, algorithm="ppo"),
    Layout("qwen3", STAGES, {"name": "swapped"}, engine=TENSOR_ENGINE),
    Layout("mixture", DATA, {**APART, "channel": "reshard"}, expert=2, engine=TENSOR_ENGINE),
    Layout("mixture", TENSOR, {**AHEAD, "channel": "collective"}, expert=2, engine=TENSOR_ENGINE),
]
CHOSEN = [layout for number, layout in enumerate(LAYOUTS) if in_turn(number, 3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, tokenizer = tmp_path_factory.mktemp("models"), load_tokenizer(resolve("sums-policy"))
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    save(Qwen3ForCausalLM(config).float().eval(), tokenizer, root / "qwen3")
    save(mixture("qwen3_moe"), tokenizer, root / "mixture")
    return {"llama": "sums-policy", "qwen3": str(root / "qwen3"), "mixture": str(root / "mixture")}


def tables(layout: Layout, models: dict[str, str]) -> dict[str, Any]:
    base = ALGORITHMS[layout.algorithm]
    train = {**base["train"], "steps": 10, "eval_every": 50, "show": 4, "dump": True, "checkpoint": {"every": 5}}
    return {**base, "model": {"path": models[layout.model]}, "train": train}


@pytest.fixture(scope="module")
def of_one(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """Returns the one-rank run that a layout's run is compared with; each is trained once."""
    runs: dict[tuple[str, str], Path] = {}

    def run(layout: Layout) -> Path:
        key = layout.model, layout.algorithm
        if key not in runs:
            tree, runs[key] = recipe(**tables(layout, models)), tmp_path_factory.mktemp("one") / "run"
            with Run(runs[key], tree) as opened:
                RlTraining(tree, opened, Silent()).fit()
            assert min(values.get("policy/grad_norm", 1.0) for values in steps(runs[key])) > 0
        return runs[key]

    return run


@pytest.fixture(scope="module")
def rows() -> Iterator[list[dict[str, Any]]]:
    recorded: list[dict[str, Any]] = []
    yield recorded
    if file := os.environ.get("PLAUDIT_LAYOUTS"):
        Path(file).write_text(json.dumps(recorded))


def compared(actual: Path, expected: Path) -> dict[str, float]:
    """The number of equal samples, the largest loss difference of any step, and the largest final weight difference."""
    check_ten(actual, expected)
    tokens = [[sample.token_ids for step in samples(run) for sample in step] for run in (actual, expected)]
    assert tokens[0] == tokens[1]
    losses = [
        abs(own[name] - reference[name])
        for own, reference in zip(steps(actual), steps(expected), strict=True)
        for name in ("policy/loss", "value/loss", "kl/reference") if name in reference
    ]  # fmt: skip
    own = weights(actual)
    differences = [float((own[name] - reference).abs().max()) for name, reference in weights(expected).items()]
    return {"samples": len(tokens[0]), "loss": max(losses), "weight": max(differences)}


@pytest.mark.parametrize("layout", CHOSEN, ids=str)
def test_ten_steps_equal_those_of_one_rank(
    layout: Layout, models: dict[str, str], of_one: Callable[[Layout], Path], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected, run, file = of_one(layout), tmp_path / "run", tmp_path / "recipe.toml"
    tree = {**tables(layout, models), "placement": layout.placement}
    if layout.engine:
        ranks = {f"{name}_parallel": size for name, size in zip(KINDS, layout.shape, strict=False)}
        tree["resources"] = {**ranks, "rollout": layout.engine}
    file.write_text(to_toml(recipe(**tree)))
    words = command_words(layout.shape, layout.expert, file, run)
    row: dict[str, Any] = {"layout": str(layout), "ranks": math.prod(layout.shape)}
    if layout.algorithm == STRUCK:
        row["strikes"] = Strikes(tmp_path, words, ENV).strike_all()
    else:
        run_training(layout, words, math.prod(layout.shape), tmp_path)
    row |= compared(run, expected)
    if layout.resumed is not None:
        for late in (run / "checkpoints").glob("step-00001*"):
            late.rename(tmp_path / late.name)
        shape, expert = layout.resumed
        run_training(layout, command_words(shape, expert, file, run, "--resume"), math.prod(shape), tmp_path)
        row["resumed"] = {"ranks": sizes(shape, expert), **compared(run, expected)}
    rows.append(row)


def command_words(shape: Shape, expert: int, file: Path, run: Path, *more: str) -> list[str]:
    return command(file, run, shape, "--set", f"resources.expert_parallel={expert}", *more)


def run_training(layout: Layout, words: list[str], ranks: int, directory: Path) -> None:
    if layout.placement["name"] == "colocated":
        fork_ranks(ranks, words[3:], directory)
    else:
        done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert done.returncode == 0, done.stderr
