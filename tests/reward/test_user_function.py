"""A user's function is called according to its signature, including the forms of TRL and verl."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plaudit.config.reward import RuleTable
from plaudit.errors import ConfigError
from plaudit.records import Item
from plaudit.reward import RuleReward
from plaudit.reward.reward import cuts

FUNCTIONS = """
import time

def by_name(prompt, response, truth, level, scale=10.0):
    return level * scale + len(response)

def whole_row(prompt, response, truth, row):
    return row["level"] + 10 * len(row)

def rest(prompt, response, truth, **columns):
    return sum(columns[name] for name in sorted(columns) if name in ("level", "bonus")) + 100 * len(columns)

def ranked(prompt, responses, truth, level=0):
    '''The longest of a group gets 1, and 10 times the level on top.'''
    if "sleep" in responses:
        time.sleep(1000)
    if "short" in responses:
        return [1.0]
    if "text" in responses:
        return "11"
    if "number" in responses:
        return 1.0
    if "mixed" in responses:
        return [1.0, float("nan"), None][: len(responses)]
    longest = max(map(len, responses))
    return [float(len(each) == longest) + 10 * level for each in responses]

def trl(completions, answer, prompts=None, **kwargs):
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    assert len(prompts) == len(completions) == len(answer) == len(kwargs["level"])
    assert isinstance(prompts[0], str) or completions[0][0]["role"] == "assistant"
    return [2.0 * (text == right) + level for text, right, level in zip(texts, answer, kwargs["level"])]

def trl_few(completions, truth):
    return [float(text == right) for text, right in zip(completions, truth)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(solution_str == ground_truth) + extra_info["level"] / 10
    return {"score": score, "acc": True} if data_source == "gsm8k" else score

class Scorer:
    def __call__(self, prompt, response, truth, level):
        return level

scorer = Scorer()

def two(prompt, response): return 0.0
def unnamed(prompt, response, truth, level, /): return 0.0
async def later(prompt, response, truth): return 0.0
def of_a_trainer(completions, trainer_state): return [0.0]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "mine.py"
    file.write_text(FUNCTIONS)
    return file


@contextmanager
def rule(functions: Path, name: str, **keys: Any) -> Iterator[RuleReward]:
    reward = RuleReward(RuleTable(rule="function", function=f"{functions}:{name}", **keys))
    try:
        yield reward
    finally:
        reward.close()


def scores_of(reward: RuleReward, items: list[Item]) -> list[Any]:
    return [r.error.type if r.error else r.value for r in reward.score(items)]  # type: ignore[union-attr]


def item(response: str, group: int | None = None, /, truth: Any = "4", **columns: Any) -> Item:
    return Item(prompt="2+2=", response=response, truth=truth, columns=columns, group=group)


def test_columns_of_the_row_are_passed_by_name(functions: Path) -> None:
    with rule(functions, "by_name") as reward:
        items = [item("ab", level=3), item("", level=1, scale=2.0, other=object()), item("", other=1, more=2)]
        assert scores_of(reward, items) == [32.0, 2.0, "no_column"]
        (result,) = reward.score(items[2:])
        assert result.error is not None
        missing = "the rule reads the column 'level', which is missing"
        assert result.error.message == f"{missing}; the row's columns are: more, other"
        assert scores_of(reward, [item("", level=object())]) == ["bad_column"]
    with rule(functions, "scorer") as reward:
        assert scores_of(reward, [item("", level=7)]) == [7.0]


def test_row_and_remaining_columns_are_passed(functions: Path) -> None:
    with rule(functions, "whole_row") as reward:
        assert scores_of(reward, [item("x", level=3, answer="4", response="a column")]) == [33.0]
    with rule(functions, "rest") as reward:  # a column with the name of an argument is not passed twice
        assert scores_of(reward, [item("x", level=3, bonus=0.5, answer="4", response="a column")]) == [303.5]
        assert scores_of(reward, [item("x", level=3, day=object())]) == ["bad_column"]


def test_group_function_gets_all_responses_of_its_group(functions: Path) -> None:
    items = [item(each, 0, level=1) for each in ("a", "abc", "ab")] + [item(each, 1) for each in ("a", "a")]
    alone = [item("a"), item("abc")]
    for processes in (1, 3):
        with rule(functions, "ranked", processes=processes, sandbox=True) as reward:
            assert reward.batched
            assert scores_of(reward, items + alone) == [10.0, 11.0, 10.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.slow
def test_failed_group_does_not_affect_other_groups(functions: Path) -> None:
    groups = [
        ("fine", "ab"),
        ("short", "x"),
        ("text", "x"),
        ("number",),
        ("mixed", "x", "y"),
        ("sleep", "x"),
        ("a", "b"),
    ]
    items = [item(each, number) for number, group in enumerate(groups) for each in group]
    items.insert(1, Item(text="no prompt", group=0))
    expected: list[Any] = [1.0, "unsupported_form", 0.0, *["rule_failed"] * 5, 1.0, "nonfinite_score", "rule_failed"]
    with rule(functions, "ranked", timeout=4.0) as reward:
        assert scores_of(reward, items) == [*expected, "timeout", "timeout", 1.0, 1.0]
        (short, _) = reward.score([item("short", 0), item("x", 0)])
        assert short.error is not None
        expected = "expected a list of 2 numbers, one for each response"
        assert short.error.message == f"the rule returned 1 in a list; {expected}"


def test_functions_written_for_trl(functions: Path) -> None:
    with rule(functions, "trl") as reward:
        items = [item(each, 0, level=0.5, answer="4") for each in ("4", "5")]
        assert scores_of(reward, items) == [2.5, 0.5]
        chat = ({"role": "user", "content": "2+2="},)
        assert scores_of(reward, [Item(prompt=chat, response="4", columns={"level": 1, "answer": "4"})]) == [3.0]
        assert scores_of(reward, [item("4", level=1)]) == ["no_column"]
    with rule(functions, "trl_few") as reward:
        assert scores_of(reward, [item("4", 0), item("5", 0)]) == [1.0, 0.0]


def test_functions_written_for_verl(functions: Path) -> None:
    with rule(functions, "compute_score") as reward:
        own = item("4", data_source="gsm8k", extra_info={"level": 1})
        assert scores_of(reward, [own, item("4", level=2), item("5", extra_info={"level": 3})]) == [1.1, 1.2, 0.3]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("two", r"two\(prompt, response\) cannot be called; expected \(prompt, response, truth\)"),
        ("unnamed", r"unnamed\(prompt, response, truth, level\) cannot be called; expected"),
        ("later", "later is async; expected a regular function"),
        ("of_a_trainer", "of_a_trainer needs trainer_state, which only TRL provides; give it a default"),
    ],
)
def test_unsupported_signature_is_rejected_in_one_line(functions: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal, rule(functions, name):
        pass
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "what"), [("ranked", "all responses to a prompt"), ("by_name", "the columns level"), ("trl", "all resp")]
)
def test_function_of_columns_or_groups_is_rejected_on_a_server(functions: Path, name: str, what: str) -> None:
    table = RuleTable(rule="function", function=f"{functions}:{name}", sandbox=False)
    with pytest.raises(
        ConfigError, match=f"reads {what}.*which a server does not receive; set it in the recipe of the run itself"
    ):
        RuleReward(table, exposed=True)


def test_work_is_divided_without_splitting_groups() -> None:
    assert cuts([1, 1, 2, 2, 3, 3, 4, 4], 2) == [0, 4, 8]  # as even as without groups where the groups allow it
    assert cuts([1, 1, 1, 2, 2, 2, 3, 3, 3], 2) == [0, 6, 9]
    assert cuts([1, 1, 1, 1], 3) == [0, 4, 4, 4]
    assert cuts([], 2) == [0, 0, 0]
    assert cuts(range(7), 3) == [0, 2, 4, 7]
