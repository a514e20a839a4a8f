"""Rollouts by search: log-probs of the tokens, the chosen paths, token counts and rejected settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.core import Engine
from plaudit.errors import ConfigError
from plaudit.events import read_events
from plaudit.models import load_policy
from plaudit.records import Prompt, Sample
from plaudit.search.backends.scored import Path as StepPath
from plaudit.search.backends.scored import Scored
from plaudit.search.rollouts import SearchTurn
from plaudit.train.rollouts.batch_metrics import branching
from plaudit.train.rollouts.rollouts import SingleTurn
from tests.command import plaudit_here
from tests.train.rl_world import recipe

LOADED = load_policy("sums-policy")
PROMPTS = [
    Prompt(text, tuple(LOADED.tokenizer.encode(text, add_special_tokens=False)))
    for text in ("7+8+4+9+2+6=", "9+1=", "3+4+5+6+7=")
]
SEARCH = {"prm": {"path": "sums-steps"}}
SMALL = {
    "train.steps": 4, "train.prompts_per_step": 4, "train.eval_every": 50, "train.checkpoint.every": 2,
    "data.eval_items": 8, "sampling.max_tokens": 48,
}  # fmt: skip


class ByText:
    """A process model that scores steps with `likes` and counts one computed token per path."""

    whole = False

    def __init__(self, likes: Any) -> None:
        self.likes = likes
        self.computed = 0

    def score(self, paths: Sequence[StepPath], *, hidden: bool = False) -> list[Scored]:
        self.computed += len(paths)
        return [self.likes(path.steps) for path in paths]

    def release(self, places: Any) -> None: ...

    def close(self) -> None: ...


def turn(likes: Any = None, search: dict[str, Any] | None = None, **sampling: Any) -> SearchTurn:
    table = recipe(sampling={"step": ";", **sampling}, search={**SEARCH, **(search or {})})
    assert table.search is not None
    single = SingleTurn(Engine(LOADED.module, LOADED.tokenizer, seed=1), table.sampling, 1)
    search_turn = SearchTurn(single, LOADED.tokenizer, table.search, 4, 1)
    if likes is not None:
        search_turn.scorer = ByText(likes)
    return search_turn


def steps_of(sample: Sample) -> list[tuple[int, tuple[int, ...]]]:
    begin, steps = 0, []
    for node, end in sample.extra["branches"]:
        steps.append((node, sample.token_ids[begin:end]))
        begin = end
    assert begin == len(sample.token_ids)
    return steps


@pytest.mark.parametrize("method", ["rebase", "beam", "dvts"])
def test_tokens_have_the_policys_log_probs_and_all_sampled_tokens_are_counted(method: str) -> None:
    samples = turn(search={"method": method}).play(PROMPTS, 4, "0 0")
    assert [(s.group, s.index) for s in samples] == [(g, i) for g in range(3) for i in range(4)]
    module = LOADED.module
    module.set_attn_implementation("sdpa")
    parts: dict[tuple[int, int], tuple[int, ...]] = {}
    for sample in samples:
        for node, tokens in steps_of(sample):
            assert parts.setdefault((sample.group, node), tokens) == tokens, "a node is one step"
        assert all(LOADED.tokenizer.decode(tokens).endswith(";") for _, tokens in steps_of(sample)[:-1])
        assert sample.prompt_ids == PROMPTS[sample.group].token_ids
        assert sample.text == LOADED.tokenizer.decode(list(sample.token_ids), skip_special_tokens=True)
        assert sample.finish_reason in ("stop", "length")
        with torch.no_grad():
            logits = module(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0].log_softmax(-1)
        rows = range(len(sample.prompt_ids) - 1, len(sample.prompt_ids) + len(sample.token_ids) - 1)
        plain = [logits[row, token].item() for row, token in zip(rows, sample.token_ids, strict=True)]
        assert sample.logprobs == pytest.approx(plain, abs=1e-4)
    figures = branching(samples)
    spent = {s.group: s.extra["search"]["generated"] for s in samples}
    assert figures["tree/generated_tokens"] == sum(spent.values())
    assert figures["tree/discarded"] == pytest.approx(1 - sum(map(len, parts.values())) / sum(spent.values()))
    assert figures["tree/prm_tokens"] > 0


def test_process_model_selects_the_path() -> None:
    """The first step seen of each prompt scores 1 and its siblings 0: their weight is exp(-1 / 0.2) = 0.007, so it gets
    ceil(4 / (1 + 3 * 0.007)) = 4 children."""
    first: dict[str, Any] = {}

    def likes(steps: tuple[str, ...]) -> Scored:
        key = "".join(steps[:-1])
        return Scored(float(first.setdefault(key, steps[-1]) == steps[-1]))

    (selected,) = [turn(likes).play(PROMPTS[:1], 4, "0 0")]
    assert len({steps_of(sample)[0] for sample in selected}) == 1, "all went on from the step it likes"
    uniform = turn(lambda steps: Scored(0.5)).play(PROMPTS[:1], 4, "0 0")
    assert len({steps_of(sample)[0] for sample in uniform}) > 1, "where it likes all alike, several do"
    chosen_steps = {step for sample in selected for step in steps_of(sample)}
    discarded = selected[0].extra["search"]["generated"] - sum(len(tokens) for _, tokens in chosen_steps)
    assert discarded > 0
    assert branching(selected)["tree/discarded"] == pytest.approx(
        discarded / selected[0].extra["search"]["generated"]
    )  # fmt: skip


def test_search_of_a_prompt_is_the_same_alone_and_in_a_batch() -> None:
    together = turn().play(PROMPTS, 4, "3 0")
    (alone,) = [turn().play(PROMPTS[1:2], 4, "3 0", first=1)]
    in_batch = [sample for sample in together if sample.group == 1]
    assert [s.token_ids for s in in_batch] == [s.token_ids for s in alone]
    assert [s.extra["branches"] for s in in_batch] == [s.extra["branches"] for s in alone]
    assert turn().play(PROMPTS, 4, "4 0")[0].token_ids != together[0].token_ids


def test_heldout_prompts_are_answered_without_a_search() -> None:
    search_turn = turn()
    assert search_turn.play(PROMPTS, 2, "eval", evaluate=True) == search_turn.single.play(
        PROMPTS, 2, "eval", evaluate=True
    )


def test_truncated_and_unscored_paths() -> None:
    """Three tokens are fewer than the first step has. A path without a score is an error, never a number."""
    truncated = turn(max_tokens=3).play(PROMPTS[:1], 4, "0 0")
    assert all(s.finish_reason == "length" and len(s.token_ids) == 3 and s.error is None for s in truncated)
    failed = turn(lambda steps: Scored(error="too_long: 9 tokens")).play(PROMPTS[:1], 4, "0 0")
    assert len(failed) == 4
    for sample in failed:
        assert sample.finish_reason == "error"
        assert sample.error is not None
        assert (sample.error.type, sample.error.message) == ("too_long", "9 tokens")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"sampling": {"branch": [2, 2], "step": ";"}}, "sampling.branch builds trees without one"),
        ({"sampling": {"step": ";"}, "environment": {"name": "calculator"}}, "is multi-turn: remove one"),
        ({"sampling": {"step": ""}}, "must delimit steps"),
        ({"sampling": {"step": ";"}, "resources": {"data_parallel": 2}}, "set 2 ranks, not one"),
        ({"search": {"prm": {}}}, "either path or url"),
        ({"search": {**SEARCH, "method": "mcts"}}, "mcts"),
    ],
)
def test_unsupported_settings_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**{"search": SEARCH, **tables})


def test_outcome_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="chooses among steps"):
        turn(search={"prm": {"path": "sums"}})


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["expert-iteration", "tree-grpo"])
def test_run_is_reproduced_bit_for_bit(algorithm: str, tmp_path: Path) -> None:
    sets = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={value}")]
    name = ("--set", f'algorithm.name="{algorithm}"')
    result = plaudit_here("train", "sums-expert-search", "--out", str(tmp_path / "run"), *sets, *name)
    assert result.returncode == 0, result.stderr
    again = plaudit_here("verify", str(tmp_path / "run"))
    assert again.returncode == 0, again.stdout
    assert "equal to the bit: steps 3 to 4, recomputed from step-000002: samples, log-probs, rewards" in again.stdout
    steps = [e["values"] for e in read_events(tmp_path / "run") if e["kind"] == "metric" and "loss" in str(e["values"])]
    searched = [values for values in steps if "tree/discarded" in values]
    assert len(searched) == 4
    assert all(0 < values["tree/discarded"] < 1 for values in searched)


@pytest.mark.slow
def test_search_in_other_placements_gives_the_same_figures(tmp_path: Path) -> None:
    """Engines in other processes search the same trees: the first step's figures are those of one process."""
    sets = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={value}")]
    figures = []
    for name in ("colocated", "disaggregated", "async"):
        run = tmp_path / name
        placement = ("--set", f'placement.name="{name}"', "--set", "train.steps=1")
        result = plaudit_here("train", "sums-expert-search", "--out", str(run), *sets, *placement)
        assert result.returncode == 0, result.stderr
        (values,) = [e["values"] for e in read_events(run) if e["kind"] == "metric" and "tree/discarded" in e["values"]]
        figures.append([values[key] for key in ("tree/generated_tokens", "tree/discarded", "reward/mean")])
    assert figures[0] == figures[1] == figures[2]
