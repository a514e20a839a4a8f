"""`plaudit judge-check`: figures computed by hand, judges with known bias, and the command with real rewards."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plaudit.errors import ConfigError, DataError
from plaudit.judge_check.check import CheckResult, check_judge
from plaudit.judge_check.figures import JudgedPair, JudgedRow, pair_figures, row_figures
from plaudit.judge_check.judge import OpenJudge, PairJudge, ScoringJudge, Shown, open_judge
from plaudit.judge_check.rows import Labelled, Pair, read_labelled
from plaudit.judge_check.show import show
from plaudit.judge_check.statistics import kappa, share
from plaudit.records import Item, ItemError, Score, StepScores
from tests.command import plaudit_here
from tests.reward.test_judge import Server, reply_with
from tests.serve.scripted import Scripted


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_kappa_equals_values_computed_by_hand() -> None:
    """Cohen's textbook table: 20 both yes, 15 both no, 5 and 10 differ. p_o = 35/50, p_e = 1/2, so kappa = 0.4."""
    labels = [1] * 25 + [0] * 25
    verdicts = [1] * 20 + [0] * 5 + [1] * 10 + [0] * 15
    estimate = kappa(labels, verdicts, 50)
    assert estimate is not None
    assert estimate.value == pytest.approx(0.4)
    # The Wilson interval of 35 of 50 is 0.5625 to 0.8090, mapped by (x - 1/2) / (1/2).
    assert (estimate.low, estimate.high) == (pytest.approx(0.1250, abs=1e-3), pytest.approx(0.6179, abs=1e-3))
    # Three kinds of verdict: p_o = 2/4; labels half and half, verdicts 1/2, 1/4 and 1/4: p_e = 3/8.
    three = kappa(["a", "a", "b", "b"], ["a", "tie", "b", "a"], 4)
    assert three is not None
    assert three.value == pytest.approx((1 / 2 - 3 / 8) / (1 - 3 / 8))
    assert kappa([1, 1], [1, 1], 2) is None, "chance agreement is complete: nothing is beyond it"


def test_interval_equals_values_computed_by_hand() -> None:
    estimate = share([1.0] * 35 + [0.0] * 15)
    assert estimate is not None
    assert (estimate.value, estimate.count) == (0.7, 50)
    assert (estimate.low, estimate.high) == (pytest.approx(0.5625, abs=1e-4), pytest.approx(0.8090, abs=1e-4))
    sure = share([1.0] * 10)
    assert sure is not None
    assert (sure.low, sure.high) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert share([]) is None


def test_figures_of_four_pairs_equal_values_computed_by_hand() -> None:
    """In both orders: one verdict right, one for the first side, one for the wrong and longer text, one tie."""
    pairs = [
        JudgedPair(5, (2.0,), (-1.0,)), JudgedPair(3, (1.0,), (1.0,)),
        JudgedPair(-4, (-1.0,), (1.0,)), JudgedPair(2, (0.0,), (0.0,)),
    ]  # fmt: skip
    figures = pair_figures(pairs)
    assert figures.accuracy is not None
    assert figures.kappa is not None
    assert figures.flips is not None
    assert figures.ties is not None
    assert figures.longer_wins is not None
    assert figures.accuracy.value == 3 / 8
    # Labels: 4 first, 4 second. Verdicts: 4 first (+ + and + of the wrong one), 2 second, 2 ties. p_o = 3/8, p_e = 3/8.
    assert figures.kappa.value == pytest.approx(0.0)
    assert (figures.flips.value, figures.ties.value, figures.first_preferred) == (1 / 4, 1 / 4, (1, 1))
    # Wrong verdicts: the pair judged by position once (its chosen text is longer), the wrong one twice.
    assert (figures.longer_wins.value, figures.longer_wins.count) == (2 / 3, 3)
    assert figures.consistency is None


# Judges with a known bias and one without. A good text starts with "right"; the rest is padding of random length.


def made_up(count: int, seed: int = 0) -> list[Pair]:
    rng = random.Random(seed)

    def padded(word: str) -> str:
        return word + " x" * rng.randrange(40)

    return [
        Pair(Item(prompt=f"q{number}", response=padded("right")), Item(prompt=f"q{number}", response=padded("wrong")))
        for number in range(count)
    ]  # fmt: skip


class Margins:
    """A judge of two texts, given as a function of both."""

    def __init__(self, margin: Any) -> None:
        self._margin = margin

    def margins(self, shown: Sequence[Shown]) -> list[float | ItemError]:
        return [self._margin(str(first.response), str(second.response)) for first, second in shown]


def good(first: str, second: str) -> float:
    return float(first.startswith("right")) - float(second.startswith("right"))


def longer(first: str, second: str) -> float:
    return len(first) - len(second)


def noisy(seed: int, error: float = 0.15) -> Any:
    """Right except for random errors, which depend only on the two texts, not on their order or length."""

    def margin(first: str, second: str) -> float:
        flip = random.Random(f"{seed} {sorted((first, second))}").random() < error
        return -good(first, second) if flip else good(first, second)

    return margin


def warning_names(judge: PairJudge, pairs: Sequence[Pair], **options: Any) -> list[str]:
    return [warning.name for warning in run_check(judge, pairs, **options).figures.warnings]


def run_check(judge: PairJudge, pairs: Sequence[Pair], **options: Any) -> CheckResult:
    return check_judge(OpenJudge(judge), list(pairs), **options)


def test_good_judge_gets_no_warning() -> None:
    assert warning_names(Margins(good), made_up(100)) == []
    result = run_check(Margins(noisy(0)), made_up(200), repeats=2)
    assert [result.figures.warnings, result.failed.total()] == [[], 0]
    assert result.figures.accuracy is not None
    assert 0.8 < result.figures.accuracy.value < 0.9
    assert result.figures.consistency is not None
    assert result.figures.consistency.value == 1.0


def test_false_alarms_are_rare() -> None:
    """Of 200 unbiased judges with 15 % errors, each on different data, at most one gets a warning."""
    alarms = [seed for seed in range(200) if warning_names(Margins(noisy(seed)), made_up(100, seed))]
    assert len(alarms) <= 1, alarms


@pytest.mark.parametrize(("margin", "side"), [(1.0, "first"), (-1.0, "second")])
def test_position_bias_is_detected(margin: float, side: str) -> None:
    figures = run_check(Margins(lambda first, second: margin), made_up(60)).figures
    assert [warning.name for warning in figures.warnings] == ["chance", "order"]
    assert f"prefers the {side} side" in figures.warnings[1].message
    assert figures.flips is not None
    assert figures.kappa is not None
    assert (figures.flips.value, figures.kappa.value, figures.first_preferred) == (
        1.0,
        0.0,
        (60 if side == "first" else 0, 60),
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_length_bias_is_detected(sign: int) -> None:
    figures = run_check(Margins(lambda first, second: sign * longer(first, second)), made_up(100)).figures
    warning = figures.warnings[-1]
    assert warning.name == "length"
    assert f"prefers the {'longer' if sign > 0 else 'shorter'} side" in warning.message
    assert figures.longer_wins is not None
    assert figures.longer_wins.value == (sign > 0)
    assert figures.flips is not None
    assert figures.flips.value == 0


def test_length_effect_on_the_score_alone_is_detected() -> None:
    """Every verdict is right, but the score rises with the length."""
    figures = run_check(Margins(lambda a, b: 100 * good(a, b) + longer(a, b)), made_up(100)).figures
    assert figures.accuracy is not None
    assert figures.accuracy.value == 1.0
    assert [warning.name for warning in figures.warnings] == ["length"]
    assert "rises with the length" in figures.warnings[0].message


def test_random_judge_gets_warnings() -> None:
    rng = random.Random(3)
    figures = run_check(Margins(lambda first, second: rng.choice((-1.0, 1.0))), made_up(150), repeats=4).figures
    assert [warning.name for warning in figures.warnings] == ["chance", "flips", "inconsistent"]
    assert figures.consistency is not None
    assert figures.consistency.value == pytest.approx(0.5, abs=0.05)


def test_reversed_and_constant_judges_get_warnings() -> None:
    assert warning_names(Margins(lambda first, second: -good(first, second)), made_up(50)) == ["reversed"]
    assert warning_names(Margins(lambda first, second: 0.0), made_up(50)) == ["chance", "ties"]


def test_data_whose_labels_follow_length_gets_a_note() -> None:
    pairs = [Pair(Item(prompt="q", response="right" * (n + 2)), Item(prompt="q", response="wrong")) for n in range(50)]
    (note,) = run_check(Margins(longer), pairs).figures.notes
    assert "the chosen response is the longer one in 100% of the pairs" in note


# Labelled rows


def test_labelled_rows_equal_values_computed_by_hand() -> None:
    rows = [
        JudgedRow(4, True, (0.9,)),
        JudgedRow(4, True, (0.4,)),
        JudgedRow(4, False, (0.6,)),
        JudgedRow(4, False, (0.1,)),
    ]
    figures = row_figures(rows, 0.5)
    assert figures.accuracy is not None
    assert figures.kappa is not None
    # Good scores above bad in 3 of 4 pairs; half the verdicts are right, as by chance; all lengths are equal.
    assert (figures.accuracy.value, figures.kappa.value, figures.auc, figures.length) == (0.5, 0.0, 0.75, None)


def test_length_effect_in_labelled_rows_is_detected() -> None:
    rng = random.Random(1)
    lengths = [rng.randrange(1, 200) for _ in range(120)]
    by_length = [JudgedRow(n, bool(i % 2), (i % 2 + n / 150,)) for i, n in enumerate(lengths)]
    by_label = [JudgedRow(n, bool(i % 2), (i % 2 + rng.random() / 3,)) for i, n in enumerate(lengths)]
    assert [warning.name for warning in row_figures(by_length, 1.0).warnings] == ["length"]
    assert row_figures(by_label, 0.5).warnings == []


# Failures


class Failing:
    def __init__(self, fails: str) -> None:
        self.fails = fails

    def __call__(self, items: Sequence[Item]) -> list[Score | StepScores]:
        return [
            Score(error=ItemError("judge_failed", "away")) if item.prompt == self.fails or self.fails == "all"
            else Score(float(str(item.response).startswith("right")))
            for item in items
        ]  # fmt: skip


def test_row_without_a_verdict_is_excluded_and_counted() -> None:
    result = run_check(ScoringJudge(Failing("q3")), made_up(30), batch=8)
    assert (result.figures.rows, dict(result.failed), result.example) == (29, {"judge_failed": 1}, "away")
    assert result.figures.accuracy is not None
    assert result.figures.accuracy.value == 1.0
    with pytest.raises(DataError, match=r"no verdict on any of 30 rows \(30 judge_failed\): away"):
        run_check(ScoringJudge(Failing("all")), made_up(30))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "chosen": "a", "rejected": "a"}], "rows.jsonl:1: chosen and rejected are the same text"),
        ([{"prompt": "p", "chosen": "a"}], "rows.jsonl:1: needs a text 'rejected'"),
        ([{"prompt": "p", "response": "a"}], r"rows.jsonl:1: found \['prompt', 'response'\]; rows are"),
        ([{"prompt": "p", "response": "a", "label": "good"}], "rows.jsonl:1: found label = 'good'"),
        ([{"prompt": "p", "response": "a", "label": True}] * 3, "every label is True"),
        ([{"prompt": 3, "chosen": "a", "rejected": "b"}], "rows.jsonl:1: Expected"),
        (
            [{"prompt": "p", "response": "a", "label": 1}, {"prompt": "p", "chosen": "a", "rejected": "b"}],
            "rows.jsonl:2: found",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: Sequence[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_labelled(write(tmp_path / "rows.jsonl", rows))


def test_labelled_rows_need_a_threshold_and_a_scoring_judge() -> None:
    rows = [Labelled(Item(prompt="p", response="r"), label) for label in (True, False)]
    with pytest.raises(ConfigError, match="set --threshold NUMBER"):
        check_judge(OpenJudge(ScoringJudge(Failing(""))), rows)
    with pytest.raises(ConfigError, match="compares two responses"):
        check_judge(OpenJudge(Margins(good)), rows, threshold=0.5)
    with pytest.raises(ConfigError, match="the judge is missing: set --model"), open_judge(None):
        pass


def test_table_shows_every_figure() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    show(run_check(Margins(longer), made_up(60), repeats=2), console)
    text = console.export_text()
    for name in ("accuracy", "Cohen's κ", "flips", "for the first side", "longer side wins", "self-consistency"):
        assert name in text
    assert "length: prefers the longer side" in " ".join(text.split())


# The command


def sums_pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{a}+8+4=", "chosen": f"{a}+8={a + 8};{a + 8}+4={a + 12};#{a + 12}",
            "rejected": f"{a}+8={a + 8};{a + 8}+4={a + 11};#{a + 11}", "truth": str(a + 12),
        }
        for a in range(1, count + 1)
    ]  # fmt: skip


def test_embedded_reward_model_as_the_judge(tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", sums_pairs(9))
    result = plaudit_here("judge-check", str(data), "--model", "sums", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["rows"], report["failed"], report["flips"]["value"]) == (9, {}, 0.0)
    assert report["accuracy"]["value"] > 0.8
    assert [warning["name"] for warning in report["warnings"]] == []


def test_group_reward_function_as_the_judge(tmp_path: Path) -> None:
    """A group reward function gets the responses in the order shown; one that favours the first gets a warning."""
    (tmp_path / "mine.py").write_text(
        "def first(prompt, responses, truth):\n    return [float(len(responses) - i) for i in range(len(responses))]\n"
    )
    judge = tmp_path / "judge.toml"
    judge.write_text(f'kind = "rule"\nrule = "function"\nfunction = "{tmp_path}/mine.py:first"\n')
    data = write(tmp_path / "pairs.jsonl", sums_pairs(9) * 3)
    result = plaudit_here("judge-check", str(data), "--model", str(judge))
    assert result.returncode == 0, result.stderr
    assert "order: prefers the first side" in result.stdout
    rows = [
        {"prompt": p["prompt"], "response": p[side], "label": side == "chosen", "truth": p["truth"]}
        for p in sums_pairs(5) for side in ("chosen", "rejected")
    ]  # fmt: skip
    judge.write_text('kind = "rule"\nrule = "exact"\nanswer = "#([0-9]+)$"\n')
    result = plaudit_here("judge-check", str(write(tmp_path / "rows.jsonl", rows)), "--model", str(judge), "--json")
    assert json.loads(result.stdout)["kappa"]["value"] == 1.0, result.stderr


COMPARISON = """
kind = "comparison"
template = "{{prompt}}|{{first}}|{{second}}"
url = "{url}"
model = "m"
"""


@pytest.mark.parametrize(("verdict", "warned"), [("[[A]]", ["chance", "order"]), ("right", [])])
def test_comparison_judge_over_http(tmp_path: Path, verdict: str, warned: list[str]) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        _, first, _ = body["messages"][-1]["content"].split("|")
        return reply_with(verdict if verdict != "right" else f"[[{'A' if first.endswith('2') else 'B'}]]")

    server = Server(answer)
    try:
        judge = tmp_path / "judge.toml"
        judge.write_text(COMPARISON.format(url=server.url))
        rows = [{"prompt": f"p{i}", "chosen": f"{i} 2", "rejected": f"{i} 3"} for i in range(20)]
        data = write(tmp_path / "pairs.jsonl", rows)
        result = plaudit_here("judge-check", str(data), "--model", str(judge), "--json")
        assert result.returncode == 0, result.stderr
        assert [warning["name"] for warning in json.loads(result.stdout)["warnings"]] == warned
        contents = {body["messages"][-1]["content"] for _, _, body in server.requests}
        assert {"p0|0 2|0 3", "p0|0 3|0 2"} <= contents
        judge.write_text(judge.read_text().replace("{second}", "second"))
        result = plaudit_here("judge-check", str(data), "--model", str(judge))
        assert (result.returncode, "template has no {second}" in result.stderr) == (2, True)
    finally:
        server.close()


def test_served_reward_model_as_the_judge(tmp_path: Path) -> None:
    data = write(
        tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": str(i + 1), "rejected": str(i)} for i in range(8)]
    )
    with Scripted() as scripted:
        result = plaudit_here("judge-check", str(data), "--url", scripted.url, "--model", "sums", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["accuracy"]["value"] == 1.0
    assert sum(request.responses for request in scripted.asked) == 8 * 4


@pytest.mark.parametrize("unreadable", [("both!", "stop"), ("[[A]]", "length"), ("<think>[[A]] or", "stop")])
def test_unreadable_verdict_is_excluded_and_counted(tmp_path: Path, unreadable: tuple[str, str]) -> None:
    server = Server(
        lambda body: reply_with(*(("[[A]]",) if body["messages"][-1]["content"].startswith("p1|") else unreadable))
    )
    try:
        judge = tmp_path / "judge.toml"
        judge.write_text(COMPARISON.format(url=server.url))
        data = write(tmp_path / "pairs.jsonl", [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(3)])
        result = plaudit_here("judge-check", str(data), "--model", str(judge))
        assert result.returncode == 1, result.stderr
        assert "2 rows without a verdict are left out: 2 judge_unreadable" in " ".join(result.stdout.split())
    finally:
        server.close()
