"""Step values by Monte Carlo: where responses are split, and values against completions generated one by one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plaudit.cli import app
from plaudit.config import PrmRecipe, parse_recipe
from plaudit.core import Engine, SamplingParams
from plaudit.errors import DataError, RunError
from plaudit.models import load_policy
from plaudit.records import Sample
from plaudit.rl.loop import RlTraining
from plaudit.rl.rollout_only import roll_out
from plaudit.train.rollouts.dump import Dump
from plaudit.train.rollouts.step_values import Cutter, write_step_values
from plaudit.train.run.progress import Progress
from plaudit.train.run.run import Run
from plaudit.train.supervised.supervised import SupervisedTraining
from tests.train.rl_world import Silent, recipe

COUNT = 12


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of the shipped policy, which answers some of the prompts wrong."""
    run = tmp_path_factory.mktemp("runs") / "made"
    roll(run, sampling={"max_tokens": 48})
    return run


def roll(directory: Path, **tables: Any) -> None:
    train = {"steps": 1, "prompts_per_step": COUNT, "samples_per_prompt": 4}
    tree = recipe(**{"train": train, **tables})
    with Run(directory, tree) as run:
        roll_out(RlTraining(tree, run, Silent()))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_solution_is_split_at_the_ends_of_its_steps() -> None:
    tokenizer = load_policy("sums-policy").tokenizer
    end = tokenizer.eos_token_id
    cutter = Cutter(tokenizer, frozenset({end}), ";")

    def cut(text: str, *, reward: float | None = 1.0, finish: Any = "stop") -> Any:
        ids = tuple(tokenizer.encode(text, add_special_tokens=False)) + ((end,) if finish == "stop" else ())
        blank = (0.0,) * len(ids)
        return cutter(Sample((1,), ids, text, blank, blank, (0,) * len(ids), (1,) * len(ids), finish, reward=reward))

    complete = cut("7+8=15;15+4=19;#19")
    assert complete.steps == ("7+8=15;", "15+4=19;", "#19")
    assert [tokenizer.decode(prefix) for _, prefix in complete.beginnings] == ["7+8=15;", "7+8=15;15+4=19;"]
    assert complete.finished
    truncated = cut("7+8=15;15+4=", finish="length")  # an unfinished step is dropped
    assert truncated.steps == ("7+8=15;",)
    assert not truncated.finished
    assert cut("#19").steps == ("#19",)
    assert cut("7+8=15;").steps == ("7+8=15;",)
    assert cut("7+8", finish="length") is None
    assert cut("7+8=15;#15", reward=None) is None


def test_solution_with_a_token_across_a_step_end_is_skipped() -> None:
    class Joined:
        """A tokenizer whose token 2 has the end of a step in its middle."""

        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            return "".join({1: "a", 2: "b;c", 3: ";"}[token] for token in ids)

    def sample(*ids: int) -> Sample:
        zeros = (0.0,) * len(ids)
        return Sample((1,), ids, "", zeros, zeros, (0,) * len(ids), (1,) * len(ids), "stop", reward=1.0)

    cutter = Cutter(Joined(), frozenset(), ";")
    assert cutter(sample(1, 2, 3)) is None
    assert cutter(sample(1, 2)) is None
    solution = cutter(sample(1, 3, 1))
    assert solution is not None
    assert solution.steps == ("a;", "a")


@pytest.mark.slow
def test_values_are_the_rewards_of_completions(tmp_path: Path) -> None:
    """With top_k = 1 every completion is the greedy one, which the test generates itself."""
    greedy = {"max_tokens": 48, "top_k": 1}
    roll(tmp_path / "made", sampling=greedy, train={"steps": 1, "prompts_per_step": COUNT, "samples_per_prompt": 2})
    out = tmp_path / "steps.jsonl"
    tally = write_step_values(tmp_path / "made", out, split=";", completions=3)
    loaded = load_policy("sums-policy")
    engine = Engine(loaded.module, loaded.tokenizer)
    rows = rows_of(out)
    assert len(rows) == tally.solutions == COUNT  # the two equal solutions of a prompt count once
    assert tally.completions == 3 * sum(len(row["labels"]) - 1 for row in rows)
    for row in rows:
        answer = str(sum(map(int, row["prompt"].rstrip("=").split("+"))))
        for count, label in enumerate(row["labels"][:-1], 1):
            prefix = "".join(row["steps"][:count])
            (rest,) = engine.generate([row["prompt"] + prefix], SamplingParams(temperature=0, max_tokens=48))
            assert label == float((prefix + rest.text).endswith(f"#{answer}"))
        assert row["labels"][-1] == float("".join(row["steps"]).endswith(f"#{answer}"))


def test_process_reward_model_trains_on_the_rows(
    tmp_path: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.jsonl"
    app(["steps", str(rollouts), str(out), "--split", ";", "--completions", "4"], standalone_mode=False)
    rows = rows_of(out)
    labels = [label for row in rows for label in row["labels"]]
    assert f"{len(labels)} steps of {len(rows)} solutions" in capsys.readouterr().out
    assert {0.0, 1.0} < set(labels) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    texts = {(s.extra["prompt"], s.text) for s in Dump.find(rollouts).read(1)[0] if s.finish_reason == "stop"}
    assert {(row["prompt"], "".join(row["steps"])) for row in rows if row.get("finished", True)} == texts
    values: dict[str, float] = {}
    for row in rows:  # a prefix has one value, whichever solution continues it
        for count, label in enumerate(row["labels"][:-1], 1):
            prefix = row["prompt"] + "".join(row["steps"][:count])
            assert values.setdefault(prefix, label) == label
    judge = parse_recipe(
        {"task": "prm", "model": {"path": "sums-steps"}, "data": {"path": str(out)}, "algorithm": {"split": ";"},
         "train": {"steps": 1, "batch": 4, "lr": 1e-4}}, "test",
    )  # fmt: skip
    assert isinstance(judge, PrmRecipe)
    with Run(tmp_path / "judge", judge) as run:
        SupervisedTraining(judge, run, Progress("judge")).fit()
    assert 'split = ";"' in (tmp_path / "judge" / "final" / "reward.toml").read_text()


def test_the_same_rollouts_give_the_same_values(tmp_path: Path, rollouts: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_step_values(rollouts, tmp_path / name, split=";", completions=2, limit=10)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_unsuitable_rollouts_are_rejected(tmp_path: Path, rollouts: Path) -> None:
    out = tmp_path / "steps.jsonl"
    with pytest.raises(DataError, match="the text that ends a step is empty"):
        write_step_values(rollouts, out, split="", completions=2)
    run = tmp_path / "learned"
    roll(run, reward={"path": "sums"})
    with pytest.raises(DataError, match="a process model learns chances: the run's reward must be between 0 and 1"):
        write_step_values(run, out, split=";", completions=2)
    dump = Dump.find(run)
    dump.write(1, truncated_sample(dump), 1)
    with pytest.raises(DataError, match=r"no solution of 1 has a step that ends with '\\n\\n'"):
        write_step_values(run, out, split="\n\n", completions=2)
    tools = recipe(environment={"name": "calculator"}, sampling={"stop": ("=",)})
    with Run(tmp_path / "tools", tools):
        pass
    with pytest.raises(RunError, match="step values need single-turn responses"):
        write_step_values(tmp_path / "tools", out, split=";", completions=2)
    assert not out.exists()


def truncated_sample(dump: Dump) -> Any:
    """The first sample, marked as truncated."""
    from plaudit.records import Batch

    return Batch((replace(dump.read(1)[0][0], finish_reason="length"),))
