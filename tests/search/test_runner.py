"""Searches on the embedded world: counters, decisions, and independence of batching."""

import json
import math
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast, get_args

import pytest

import plaudit
from plaudit.config import to_toml
from plaudit.config.search import Method, SearchRecipe, load_search, parse_search
from plaudit.core import Engine
from plaudit.core.device.cpu import CpuBackend
from plaudit.errors import ConfigError, RunError, ServerError
from plaudit.search.backends.policy import CorePolicy, Step
from plaudit.search.backends.scored import Path as StepPath
from plaudit.search.backends.scored import Scored, Scorer
from plaudit.search.backends.scoring import LocalScorer, open_scorer
from plaudit.search.questions.answers import AGGREGATES, Answer, as_odds, winner
from plaudit.search.record import read_results
from plaudit.search.runner import Outcome
from plaudit.search.search import Search, run_searches
from plaudit.search.tree.tree import distinct_tokens
from tests.rotation import mostly_slow
from tests.search.single import run_search


def recipe(method: str, width: int = 8, questions: int = 3, **flags: Any) -> SearchRecipe:
    return load_search(None, {"search.method": method, "search.width": width, "data.limit": questions, **flags})


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return open_scorer(recipe("ets").prm, 1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("sums-policy", device="cpu")


def searched(asked: SearchRecipe, engine: Engine, scorer: Scorer, concurrent: int = 64) -> list[Outcome]:
    asked = asked.model_copy(update={"concurrent": concurrent, "lanes": 1 if concurrent == 1 else 2})
    search = Search(asked, policy=CorePolicy(engine, asked.steps), scorer=scorer, tokenizer=engine.tokenizer)
    return sorted(search.run(search.questions()), key=lambda outcome: outcome.question.index)


def told(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(n.parent, n.tokens, n.state, pytest.approx(n.value, abs=1e-4), n.twin) for n in outcome.tree.nodes]


@pytest.mark.parametrize("method", mostly_slow(get_args(Method), 2))
def test_every_method_searches_and_batching_decides_nothing(method: str, engine: Engine, scorer: Scorer) -> None:
    asked = recipe(method)
    together = searched(asked, engine, scorer)
    assert engine.stats().tokens_resident == 0, "everything was given back"
    assert isinstance(scorer, LocalScorer)
    assert scorer.engine.stats().tokens_resident == 0
    engine.check()
    alone = searched(asked, engine, scorer, concurrent=1)
    for one, other in zip(together, alone, strict=True):
        assert told(one) == told(other)
        assert one.driver.costs.kv == other.driver.costs.kv
        assert one.stopped == "done"
        costs = one.driver.costs
        drawn = [node for node in one.tree.nodes if node.parent >= 0]
        assert costs.calls == len(drawn)
        assert costs.generated == sum(len(node.tokens) for node in drawn)
        assert costs.kv[0] == len(one.question.prompt_ids)
        assert {n.state for n in drawn} <= {"expanded", "pruned", "finished", "cut", "failed", "open"}
        assert all(n.score is not None or n.error for n in drawn), "a twin has its twin's score, and no node has none"
        for node in drawn:
            assert node.score == one.tree.nodes[node.twin].score


@pytest.mark.slow
def test_level_methods_use_the_width_they_have(engine: Engine, scorer: Scorer) -> None:
    for method in ("best-of-n", "beam", "rebase", "ets"):
        for outcome in searched(recipe(method), engine, scorer):
            over = [n for n in outcome.tree.nodes if n.state in ("finished", "cut", "failed")]
            assert len(over) == 8, method


def test_the_same_path_has_the_same_children_in_every_method(engine: Engine, scorer: Scorer) -> None:
    """So that methods are compared on the same tree: the first children of a node are its first in all of them."""
    rebase, ets = (searched(recipe(method), engine, scorer) for method in ("rebase", "ets"))
    for one, other in zip(rebase, ets, strict=True):
        firsts = [[n.tokens for n in o.tree.nodes if n.parent == 0] for o in (one, other)]
        assert firsts[0] == firsts[1]


def test_step_scores_are_those_of_one_pass(engine: Engine, scorer: Scorer) -> None:
    from plaudit.records import Item, StepScores
    from plaudit.reward import load_reward

    reward = load_reward("sums-steps")
    for outcome in searched(recipe("rebase", questions=2), engine, scorer):
        for node in outcome.tree.having("finished"):
            item = Item(prompt=outcome.question.text, response=outcome.tree.response(node.id))
            (whole,) = reward.score([item])
            assert isinstance(whole, StepScores)
            assert outcome.tree.scores(node.id) == pytest.approx(whole.values, abs=1e-5)


def test_kv_tokens_are_what_the_core_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of one token the engine's own count is that of the tree. The last token that a sample draws has no
    KV until the sample is continued: so leaves count without theirs."""
    monkeypatch.setattr(CpuBackend, "block_size", 1)
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=2**24)
    asked = recipe("ets", questions=1)
    scorer = open_scorer(asked.prm, 1)
    compared = []

    class Watched(CorePolicy):
        def extend(self, requests: Any) -> list[list[Step]]:
            steps = super().extend(requests)
            paths = [
                (*a.prompt, *a.response_ids, *s.tokens[:-1])
                for a, found in zip(requests, steps, strict=True)
                for s in found
            ]
            compared.append((self.engine.stats().tokens_resident, distinct_tokens(paths)))
            return steps

    search = Search(asked, policy=Watched(engine, asked.steps), scorer=scorer, tokenizer=engine.tokenizer)
    (outcome,) = search.run(search.questions())
    assert len(compared) > 5
    assert all(held == counted for held, counted in compared), compared
    # What the summary counts at a level is what the next level's engine holds before it generates.
    assert outcome.driver.costs.kv_peak >= max(counted for _, counted in compared) - 8


@pytest.mark.slow
def test_lookahead_costs_and_changes_values(engine: Engine, scorer: Scorer) -> None:
    plain = searched(recipe("dvts", questions=2), engine, scorer)
    ahead = searched(recipe("dvts", questions=2, **{"search.lookahead": 2}), engine, scorer)
    assert sum(o.driver.costs.calls for o in ahead) > sum(o.driver.costs.calls for o in plain)
    assert any(n.value != n.score for o in ahead for n in o.tree.nodes if n.score is not None)
    with pytest.raises(ConfigError, match="lookahead is for"):
        recipe("ets", **{"search.lookahead": 2})


@pytest.mark.parametrize(("name", "limit"), [("generated", 100), ("kv_tokens", 200), ("calls", 20)])
def test_budgets_end_a_question_with_the_answers_it_has(name: str, limit: int, engine: Engine, scorer: Scorer) -> None:
    for outcome in searched(recipe("rebase", questions=2, **{f"budget.{name}": limit}), engine, scorer):
        assert outcome.stopped == f"budget: {name}"
        assert getattr(outcome.driver.costs, name) >= limit


def test_a_lead_that_cannot_be_overturned_ends_the_search(engine: Engine, scorer: Scorer) -> None:
    whole = searched(recipe("best-of-n", width=8), engine, scorer)
    short = searched(recipe("best-of-n", width=8, **{"budget.lead": True, "search.vote": "majority"}), engine, scorer)
    voted = searched(recipe("best-of-n", width=8, **{"search.vote": "majority"}), engine, scorer)
    assert [o.answer and o.answer.text for o in short] == [o.answer and o.answer.text for o in voted]
    assert sum(o.driver.costs.calls for o in short) <= sum(o.driver.costs.calls for o in whole)


# What goes wrong is said


class FailingPolicy(CorePolicy):
    """Breaks in the way it is told to at a round."""

    def __init__(self, engine: Engine, steps: Any, how: str, at: int) -> None:
        super().__init__(engine, steps)
        self.how, self.at, self.round = how, at, 0

    def extend(self, requests: Any) -> list[list[Step]]:
        self.round += 1
        if self.round == self.at and self.how == "lost":
            raise ServerError("no steps from http://127.0.0.1:9 in 3 s; see whether it runs")
        steps = super().extend(requests)
        if self.round == self.at and self.how == "empty":
            return [[Step((16,), ";") for _ in found] for found in steps]
        return steps


def test_a_policy_that_never_ends_a_step_is_told(engine: Engine, scorer: Scorer) -> None:
    asked = recipe("rebase", questions=1, **{"steps.stop": "\n\n"})
    (outcome,) = searched(asked, engine, scorer)
    assert outcome.answer is None
    errors = {n.error for n in outcome.tree.nodes if n.state == "cut"}
    assert any("the step did not end with '\\n\\n' within 24 tokens" in str(error) for error in errors)


def test_a_prm_that_sees_other_steps_is_told(engine: Engine) -> None:
    asked = recipe("rebase", questions=1)
    table = asked.prm.model_copy(update={"format": {"split": "="}})
    (outcome,) = searched(asked, engine, open_scorer(table, 1))
    failed = [n for n in outcome.tree.nodes if n.state == "failed"]
    assert len(failed) == 8
    assert all("step_mismatch: the PRM sees 2 step(s) but the search generated 1" in str(n.error) for n in failed)


ENDS_BEHIND_A_STEP = {"steps.stop": "9", "prm.format": {"split": "9"}, "steps.answer": r"#(\d+)$"}
"""The sums policy writes `6+2=8;8+1=9;#9` and ends: with "9" as a step's end, it ends behind a complete step."""


def nines(tmp_path: Path, **flags: Any) -> dict[str, Any]:
    (tmp_path / "nines.jsonl").write_text('{"prompt": "6+2+1=", "answer": "9"}\n')
    return {**ENDS_BEHIND_A_STEP, "data.path": str(tmp_path / "nines.jsonl"), "data.limit": 1, **flags}


@pytest.mark.parametrize("method", get_args(Method))
def test_a_path_that_ends_behind_a_complete_step_is_finished(method: str, engine: Engine, tmp_path: Path) -> None:
    flags = {"search.method": method, "search.width": 4, "search.aggregate": "mean"}
    asked = load_search(None, nines(tmp_path, **flags))
    (outcome,) = searched(asked, engine, open_scorer(asked.prm, 1))
    assert outcome.right
    ends = [node for node in outcome.tree.having("finished") if not node.text]
    assert ends
    for node in ends:  # worth what its steps are worth, and nothing counts twice
        assert node.score is None
        assert node.value == AGGREGATES["mean"](outcome.tree.scores(node.parent))


def test_a_response_that_ends_before_its_first_step_has_failed(engine: Engine, scorer: Scorer) -> None:
    class Silent(CorePolicy):
        def extend(self, requests: Any) -> list[list[Step]]:
            return [[Step((2,), "", "end")] * request.count for request in requests]

    asked = recipe("rebase", questions=1)
    search = Search(asked, policy=Silent(engine, asked.steps), scorer=scorer, tokenizer=engine.tokenizer)
    (outcome,) = search.run(search.questions())
    assert {node.state for node in outcome.tree.nodes[1:]} == {"failed"}
    assert outcome.stopped == "no answer: empty response: the policy ended it before the first step"


# An outcome model


@pytest.fixture(scope="module")
def outcome_model() -> Scorer:
    return open_scorer(recipe("best-of-n", **{"prm.path": "sums"}).prm, 1, "best-of-n")


def test_best_of_n_scores_each_finished_response_once(engine: Engine, outcome_model: Scorer) -> None:
    from plaudit.records import Item, Score
    from plaudit.reward import load_reward

    reward = load_reward("sums")
    for vote in ("best", "weighted"):
        asked = recipe("best-of-n", width=8, **{"prm.path": "sums", "search.vote": vote})
        found = searched(asked, engine, outcome_model)
        for outcome in found:
            nodes = outcome.tree.nodes[1:]
            firsts = [node for node in nodes if node.twin == node.id]
            ends = [node for node in firsts if node.state == "finished"]
            assert outcome.driver.costs.scored == len(ends) > 1
            assert all((node.score is not None) == (node.state == "finished") for node in firsts)
            results = reward.score(
                [Item(prompt=outcome.question.text, response=outcome.tree.response(node.id)) for node in ends]
            )
            assert all(isinstance(result, Score) for result in results)
            assert [n.score for n in ends] == pytest.approx([getattr(r, "value", None) for r in results], abs=1e-4)
            assert outcome.answer is not None
            if vote == "best":
                assert outcome.tree.nodes[outcome.answer.node].score == max(node.score or 0.0 for node in ends)
            assert max(answer.weight for answer in outcome.answers) == 1.0


def test_odds_are_a_weight_whatever_the_zero_of_the_scores() -> None:
    answers = [Answer("19", -3.0, 1), Answer("18", -2.0, 2), Answer("19", -2.4, 3)]
    shifted = [Answer(a.text, a.weight + 700.0, a.node) for a in answers]
    for each in (answers, shifted):
        odds = as_odds(each)
        assert [a.weight for a in odds] == pytest.approx([math.exp(-1), 1.0, math.exp(-0.4)])
        same = cast(Any, lambda one, other: one == other)
        best, weighted = (winner(odds, vote, same) for vote in ("best", "weighted"))
        assert (best and best.node, weighted and weighted.node) == (2, 3), "0.37 + 0.67 against 1"
    assert as_odds([]) == []


def test_an_empty_step_is_a_failed_node_and_the_rest_goes_on(engine: Engine, scorer: Scorer) -> None:
    asked = recipe("rebase", questions=2).model_copy(update={"lanes": 1})
    policy = FailingPolicy(engine, asked.steps, "empty", 1)
    search = Search(asked, policy=policy, scorer=scorer, tokenizer=engine.tokenizer)
    for outcome in search.run(search.questions()):
        failed = list(outcome.tree.having("failed"))
        assert len(failed) == 8
        assert all("empty step" in str(node.error) for node in failed)
        assert outcome.stopped == "no answer: empty step: the policy generated only the step's end"


def test_a_server_lost_in_mid_search_keeps_what_was_found(engine: Engine, scorer: Scorer) -> None:
    asked = recipe("best-of-n", questions=3)
    policy = FailingPolicy(engine, asked.steps, "lost", 12)
    search = Search(asked, policy=policy, scorer=scorer, tokenizer=engine.tokenizer)
    found: list[Outcome] = []
    outcomes = search.run(search.questions())
    with pytest.raises(ServerError, match="no steps from"):
        found.extend(outcomes)
    assert len(found) == 3
    lost = [o for o in found if o.stopped.startswith("failed: no steps")]
    assert lost
    assert any(o.answers for o in found)


class NoScores:
    """A PRM that gives no score for every third path."""

    whole = False

    def __init__(self, inner: Scorer) -> None:
        self.inner = inner

    @property
    def computed(self) -> int:
        return self.inner.computed

    def score(self, paths: Any, *, hidden: bool = False) -> list[Scored]:
        return [
            Scored(error="scoring_failed: no") if i % 3 == 0 else scored
            for i, scored in enumerate(self.inner.score(paths, hidden=hidden))
        ]

    def release(self, places: Any) -> None:
        self.inner.release(places)

    def close(self) -> None:
        self.inner.close()


def test_a_step_without_a_score_is_a_failed_node_never_a_number(engine: Engine, scorer: Scorer) -> None:
    for outcome in searched(recipe("ets", questions=2), engine, NoScores(scorer)):
        failed = list(outcome.tree.having("failed"))
        assert failed
        assert all(node.score is None and "scoring_failed" in str(node.error) for node in failed)


def test_a_scorer_scores_paths_alone_as_together_and_reads_only_what_is_new(scorer: Scorer) -> None:
    assert isinstance(scorer, LocalScorer)
    steps = ("7+8=15;", "15+4=19;", "19+2=21;")
    paths = [StepPath("7+8+4+2=", steps[:n]) for n in (1, 2, 3)]
    together = [scored.value for scored in scorer.score(paths)]
    scorer.engine.new_version()
    before = scorer.computed
    one_by_one = [scorer.score([path])[0].value for path in paths]
    assert together == pytest.approx(one_by_one, abs=1e-5)
    # The prompt's 9 tokens and 7, 8 and 8 of the steps, and for every later step at most a few that are copied.
    assert scorer.computed - before <= 9 + 7 + 8 + 8 + 2 * 4
    (again,) = scorer.score([paths[2]])
    assert again.value == pytest.approx(together[2], abs=1e-5)


# The run directory


def test_a_run_is_written_and_resumed(tmp_path: Path) -> None:
    asked = recipe("rebase", width=4, questions=6)
    figures = run_search(asked, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == figures
    for name in ("accuracy", "kv_tokens", "generated_tokens", "calls", "seconds"):
        assert name in figures
    lines = list(read_results(tmp_path / "a" / "results.jsonl"))
    assert figures["calls"] == sum(line["costs"]["calls"] for line in lines)
    assert all(len(line["nodes"]) == 1 + line["costs"]["calls"] for line in lines)

    # Killed after three questions and half of a fourth; one of the three had failed.
    directory = tmp_path / "b"
    run_search(asked, directory)
    kept = (directory / "results.jsonl").read_text().splitlines(keepends=True)
    failed = json.loads(kept[1]) | {"stopped": "failed: the server was lost"}
    (directory / "results.jsonl").write_text(kept[0] + json.dumps(failed) + "\n" + kept[2] + kept[3][:50])
    with pytest.raises(RunError, match="--resume continues"):
        run_search(asked, directory)
    with pytest.raises(RunError, match=r"started with search\.width = 4"):
        run_search(recipe("rebase", width=8, questions=6), directory, resume=True)
    again = run_search(asked, directory, resume=True)
    for name in ("accuracy", "kv_tokens", "generated_tokens", "calls", "questions"):
        assert again[name] == figures[name]


@pytest.mark.slow
def test_methods_that_share_their_models_find_what_each_finds_alone(tmp_path: Path) -> None:
    def results(directory: Path) -> list[dict[str, Any]]:
        lines = list(read_results(directory / "results.jsonl"))
        for line in lines:
            line["costs"] = {name: cost for name, cost in line["costs"].items() if not isinstance(cost, float)}
        return lines

    asked = {method: recipe(method, width=4, questions=6) for method in ("best-of-n", "rebase", "ets")}
    together = {tmp_path / method: tree for method, tree in asked.items()}
    found = [directory.name for directory, _ in run_searches(together, lambda name: nullcontext(lambda done, of: None))]
    assert found == list(asked)
    for method, tree in asked.items():
        run_search(tree, tmp_path / "alone" / method)
        assert results(tmp_path / method) == results(tmp_path / "alone" / method)


def test_search_in_ten_lines() -> None:
    found = plaudit.search(
        ["7+8+4=", {"prompt": "3+4+2=", "answer": "9"}], engine="sums-policy", prm="sums-steps", rule="ets", width=4,
        stop=";", answer=r"#(\d+)$", max_tokens=60, threads=1,
    )  # fmt: skip
    assert [outcome.question.text for outcome in found] == ["7+8+4=", "3+4+2="]
    assert found[0].right is None
    assert found[1].right is (found[1].answer is not None and found[1].answer.text == "9")
    with pytest.raises(ConfigError, match="has no option 'stpo'"):
        plaudit.search(["7+8="], engine="sums-policy", prm="sums-steps", stpo=";")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'search\.widht'; did you mean 'width'"):
        load_search(None, {"search.widht": 4})
    with pytest.raises(ConfigError, match=r"search\.method = 'etz'"):
        load_search(None, {"search.method": "etz"})
    with pytest.raises(ConfigError, match="needs the PRM's hidden states"):
        load_search(None, {}, ['prm={url="http://127.0.0.1:5555"}'])
    with pytest.raises(ConfigError, match="has no group"):
        load_search(None, {"steps.answer": "#"})
    with pytest.raises(
        ConfigError, match=r"'ets' chooses among steps, and sums is an outcome model.*--method best-of-n"
    ):
        open_scorer(recipe("ets").prm.model_copy(update={"path": "sums"}), 1)
    with pytest.raises(ConfigError, match=r"budget\.lead: .*has no upper bound.*search\.vote = \"majority\""):
        Search(recipe("best-of-n", **{"prm.path": "sums", "budget.lead": True}))


@pytest.mark.parametrize("method", get_args(Method))
def test_every_method_has_a_recipe(method: str) -> None:
    found = load_search(Path(__file__).parents[2] / "plaudit" / "recipes" / f"search-{method}.toml", {})
    assert found.search.method == method
    assert found.steps == recipe(method).steps
    assert parse_search(tomllib.loads(to_toml(found)), "again") == found
