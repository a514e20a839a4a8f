"""`method = "auto"`: the table, the pilot computed by hand, and the choice that a user sees."""

import json
from pathlib import Path

import pytest

import plaudit
from plaudit.config.search import GroundTable, SearchRecipe, StepsTable, load_search
from plaudit.errors import ConfigError
from plaudit.search.drivers.methods import new_driver
from plaudit.search.pilot import Ground, choose, measured
from plaudit.search.questions.questions import Question
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.record import read_results
from plaudit.search.runner import Outcome
from plaudit.search.tree.tree import Tree
from plaudit.search.when import advise, following, read_table
from tests.command import plaudit_here
from tests.search.single import run_search

PAGE = Path(__file__).parents[2] / "docs" / "search-when.md"
READING = AnswerReading(StepsTable(stop=";", answer=r"#(\d+)$"))


def ground(steps: float, accuracy: float, auc: float) -> GroundTable:
    return GroundTable(steps=steps, accuracy=accuracy, auc=auc)


def recipe(**flags: object) -> SearchRecipe:
    return load_search(None, {"search.method": "auto", "search.width": 4, "data.limit": 4, **flags})


def test_page_and_table_agree() -> None:
    text = PAGE.read_text()
    for cell in read_table()["cells"]:
        section = text.split(f"### {cell['steps']} steps, {cell['accuracy']:.0%} right, width {cell['width']}\n")[1]
        row = section.split(f"\n| {'exact labels' if cell['auc'] == 1 else format(cell['auc'], 'g')} |")[1]
        assert row.splitlines()[0].split(" | ")[-1].startswith(cell["use"]), cell


def test_advice_follows_the_cell_of_the_table() -> None:
    advice = advise(ground(24, 0.05, 0.8), 16)
    assert (advice.method, advice.cell) == ("rebase", "24 steps, 5% right, AUC 0.8, width 16")
    assert advice.why == (
        "the cell of the table (24 steps, 5% right, AUC 0.8, width 16) says rebase, +0.340 ± 0.030 right over best-of-n"
    )
    weak = advise(ground(8, 0.3, 0.55), 16)
    assert weak.method == "best-of-n"
    assert weak.why.endswith("says best-of-n: no tree was ahead there by more than its 95 % interval")


def test_advice_between_cells_uses_and_names_the_nearest_cell() -> None:
    advice = advise(ground(10, 0.24, 0.77), 20)
    assert advice.why.startswith("the nearest cell of the table (8 steps, 30% right, AUC 0.8, width 16) says")
    assert advise(ground(20, 0.08, 0.62), 10).cell == "24 steps, 5% right, AUC 0.6, width 16"


@pytest.mark.parametrize(
    ("steps", "accuracy", "auc", "width", "message"),
    [
        (3, 0.3, 0.8, 16, "steps 3"),
        (60, 0.3, 0.8, 16, "steps 60"),
        (8, 0.9, 0.8, 16, "accuracy 0.9"),
        (8, 0.0, 0.8, 16, "accuracy 0"),
        (8, 0.3, 0.4, 16, "auc 0.4"),
        (8, 0.3, 0.8, 1024, "width 1.02e+03"),
    ],
)
def test_advice_outside_of_the_table_is_best_of_n(
    steps: float, accuracy: float, auc: float, width: int, message: str
) -> None:
    advice = advise(ground(steps, accuracy, auc), width)
    assert (advice.method, advice.cell) == ("best-of-n", None)
    assert advice.why == f"the table has nothing near {message}: best-of-n, as without a table"


def test_chosen_method_uses_the_measured_options_and_those_of_the_recipe() -> None:
    beam = following(recipe(**{"search.keep": 3}), "beam").search
    assert (beam.method, beam.distinct, beam.keep, beam.width, beam.ground) == ("beam", True, 3, 4, None)
    served = recipe(**{"prm.url": "http://127.0.0.1:1", "prm.path": None})
    assert following(served, "ets").search.clusters == "text", "a server's states cannot be read"


def outcome(index: int, paths: list[tuple[str, float]], right: bool) -> Outcome:
    """A question whose answer is 1, with paths of one step each; "" is a truncated path."""
    tree = Tree("", (1,))
    table = following(recipe(), "best-of-n")
    driver = new_driver(tree, table.search, table.budget, READING, "1")
    for number, (answer, score) in enumerate(paths):
        node = tree.add(0, (number,), f"#{answer}", "finished" if answer else "cut", 1)
        node.score = node.value = score
    driver.costs.generated = 10 * len(paths)
    return Outcome(Question(index, "", "", (1,), "1"), tree, driver, driver.answers(), None, right, "done")


def test_pilot_measurement_equals_values_computed_by_hand() -> None:
    """Only pairs within a question count: 0.9 > 0.5 and 0.5 = 0.5 of the first, 0.3 < 0.4 of the second."""
    first = outcome(0, [("1", 0.9), ("1", 0.5), ("2", 0.5), ("", 0.99)], True)
    second = outcome(1, [("1", 0.3), ("3", 0.4)], False)
    assert measured([first, second], READING) == Ground(2, 1.0, 0.5, 1.5 / 3, 3)


def test_pilot_decides_between_best_of_n_and_the_method_of_the_table() -> None:
    pilot_questions = [Question(i, "", "", (1,), "1") for i in range(2)]
    right = {"best-of-n": [False, True], "rebase": [True, True]}
    searches: list[str] = []

    def searched(by: SearchRecipe, questions: object) -> list[Outcome]:
        searches.append(by.search.method)
        outcomes = [
            outcome(i, [("1", 0.9), ("2", 0.5), ("2", 0.5)], each) for i, each in enumerate(right[by.search.method])
        ]
        for each in outcomes:
            for node in each.tree.nodes[1:]:
                node.depth = 8
        return outcomes

    tree = choose(
        recipe(), pilot_questions, searched, READING
    )  # 33 % right, AUC 1, width 4: the nearest cell says rebase
    assert (tree.method, searches) == ("rebase", ["best-of-n", "rebase"])
    assert "on the pilot's questions rebase has 2 right and best-of-n 1" in tree.why
    assert (tree.discarded["generated"], [each.right for each in tree.kept]) == (60, [True, True])
    right["rebase"] = [False, False]
    behind = choose(recipe(), pilot_questions, searched, READING)
    assert behind.method == "best-of-n"
    assert behind.why.endswith("rebase has 0 right and best-of-n 1, so best-of-n")
    assert [each.right for each in behind.kept] == [False, True]


def test_auto_without_answers_or_ground_is_rejected_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"none has one: set their key \(data.truth\), or set search.ground"):
        plaudit.search(["8+6+5="], engine="sums-policy", prm="sums-steps", rule="auto", width=4, stop=";")


def test_given_ground_needs_no_pilot() -> None:
    result = plaudit.search(
        ["8+6+5="], engine="sums-policy", prm="sums-steps", rule="auto", width=4, stop=";", answer=r"#(\d+)$",
        options={"ground": {"steps": 8, "accuracy": 0.3, "auc": 0.8}},
    )  # fmt: skip
    assert result.choice is not None
    assert (result.choice.method, result[0].driver.table.method, result.choice.discarded) == ("rebase", "rebase", {})


def test_ground_is_rejected_for_other_methods(tmp_path: Path) -> None:
    ground = "search.ground={steps=8,accuracy=0.3,auc=0.8}"
    result = plaudit_here("search", "--method", "ets", "--set", ground, cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "ground is for method = \"auto\", and method = 'ets'" in result.stderr


@pytest.mark.slow
def test_run_records_the_choice_and_resumes_with_it(tmp_path: Path) -> None:
    full_recipe = recipe(**{"search.pilot": 2})
    figures = run_search(full_recipe, tmp_path / "whole")
    choice = json.loads((tmp_path / "whole" / "choice.json").read_text())
    assert (figures["method"], figures["choice"]) == (choice["method"], choice)
    assert choice["ground"]["questions"] == 2
    lines = list(read_results(tmp_path / "whole" / "results.jsonl"))
    assert sorted(line["index"] for line in lines) == [0, 1, 2, 3], "the pilot's questions are results, once each"
    # as if killed after the pilot: the choice is kept, and only the remaining questions are searched
    partial = tmp_path / "part"
    run_search(full_recipe.model_copy(update={"data": full_recipe.data.model_copy(update={"limit": 2})}), partial)
    again = run_search(full_recipe, partial, resume=True)
    for name in ("method", "accuracy", "generated_tokens", "kv_tokens", "choice"):
        assert again[name] == figures[name]
