"""Searches on the embedded world: counters, decisions, and independence from batching."""

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


def searched(settings: SearchRecipe, engine: Engine, scorer: Scorer, concurrent: int = 64) -> list[Outcome]:
    settings = settings.model_copy(update={"concurrent": concurrent, "lanes": 1 if concurrent == 1 else 2})
    search = Search(settings, policy=CorePolicy(engine, settings.steps), scorer=scorer, tokenizer=engine.tokenizer)
    return sorted(search.run(search.questions()), key=lambda outcome: outcome.question.index)


def summary_of(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(n.parent, n.tokens, n.state, pytest.approx(n.value, abs=1e-4), n.twin) for n in outcome.tree.nodes]


@pytest.mark.parametrize("method", mostly_slow(get_args(Method), 2))
def test_every_method_gives_the_same_search_batched_and_alone(method: str, engine: Engine, scorer: Scorer) -> None:
    settings = recipe(method)
    together = searched(settings, engine, scorer)
    assert engine.stats().tokens_resident == 0, "everything was given back"
    assert isinstance(scorer, LocalScorer)
    assert scorer.engine.stats().tokens_resident == 0
    engine.check()
    alone = searched(settings, engine, scorer, concurrent=1)
    for batched, single in zip(together, alone, strict=True):
        assert summary_of(batched) == summary_of(single)
        assert batched.driver.costs.kv == single.driver.costs.kv
        assert batched.stopped == "done"
        costs = batched.driver.costs
        sampled = [node for node in batched.tree.nodes if node.parent >= 0]
        assert costs.calls == len(sampled)
        assert costs.generated == sum(len(node.tokens) for node in sampled)
        assert costs.kv[0] == len(batched.question.prompt_ids)
        assert {n.state for n in sampled} <= {"expanded", "pruned", "finished", "cut", "failed", "open"}
        assert all(n.score is not None or n.error for n in sampled), "a twin has its twin's score, and no node has none"
        for node in sampled:
            assert node.score == batched.tree.nodes[node.twin].score


@pytest.mark.slow
def test_level_methods_use_their_full_width(engine: Engine, scorer: Scorer) -> None:
    for method in ("best-of-n", "beam", "rebase", "ets"):
        for outcome in searched(recipe(method), engine, scorer):
            ended = [n for n in outcome.tree.nodes if n.state in ("finished", "cut", "failed")]
            assert len(ended) == 8, method


def test_the_same_path_has_the_same_children_in_every_method(engine: Engine, scorer: Scorer) -> None:
    """Methods are compared on the same tree: the first children of a node are the same in all methods."""
    rebase, ets = (searched(recipe(method), engine, scorer) for method in ("rebase", "ets"))
    for one, other in zip(rebase, ets, strict=True):
        firsts = [[n.tokens for n in o.tree.nodes if n.parent == 0] for o in (one, other)]
        assert firsts[0] == firsts[1]


def test_step_scores_equal_those_of_one_pass(engine: Engine, scorer: Scorer) -> None:
    from plaudit.records import Item, StepScores
    from plaudit.reward import load_reward

    reward = load_reward("sums-steps")
    for outcome in searched(recipe("rebase", questions=2), engine, scorer):
        for node in outcome.tree.having("finished"):
            item = Item(prompt=outcome.question.text, response=outcome.tree.response(node.id))
            (full,) = reward.score([item])
            assert isinstance(full, StepScores)
            assert outcome.tree.scores(node.id) == pytest.approx(full.values, abs=1e-5)


def test_kv_tokens_equal_the_resident_tokens_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of one token the engine's count equals the tree's. The last token of a sample has no KV until
    the sample is continued, so leaves are counted without their last token."""
    monkeypatch.setattr(CpuBackend, "block_size", 1)
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=2**24)
    settings = recipe("ets", questions=1)
    scorer = open_scorer(settings.prm, 1)
    compared = []

    class Watched(CorePolicy):
        def extend(self, requests: Any) -> list[list[Step]]:
            steps = super().extend(requests)
            paths = [
                (*a.prompt, *a.response_ids, *s.tokens[:-1])
                for a, sampled in zip(requests, steps, strict=True)
                for s in sampled
            ]
            compared.append((self.engine.stats().tokens_resident, distinct_tokens(paths)))
            return steps

    search = Search(settings, policy=Watched(engine, settings.steps), scorer=scorer, tokenizer=engine.tokenizer)
    (outcome,) = search.run(search.questions())
    assert len(compared) > 5
    assert all(resident == counted for resident, counted in compared), compared
    # The summary's count at a level is the number of tokens that are resident before the next level is generated.
    assert outcome.driver.costs.kv_peak >= max(counted for _, counted in compared) - 8


@pytest.mark.slow
def test_lookahead_adds_calls_and_changes_values(engine: Engine, scorer: Scorer) -> None:
    plain = searched(recipe("dvts", questions=2), engine, scorer)
    ahead = searched(recipe("dvts", questions=2, **{"search.lookahead": 2}), engine, scorer)
    assert sum(o.driver.costs.calls for o in ahead) > sum(o.driver.costs.calls for o in plain)
    assert any(n.value != n.score for o in ahead for n in o.tree.nodes if n.score is not None)
    with pytest.raises(ConfigError, match="lookahead is for"):
        recipe("ets", **{"search.lookahead": 2})


@pytest.mark.parametrize(("name", "limit"), [("generated", 100), ("kv_tokens", 200), ("calls", 20)])
def test_exhausted_budget_stops_a_question(name: str, limit: int, engine: Engine, scorer: Scorer) -> None:
    for outcome in searched(recipe("rebase", questions=2, **{f"budget.{name}": limit}), engine, scorer):
        assert outcome.stopped == f"budget: {name}"
        assert getattr(outcome.driver.costs, name) >= limit


def test_search_stops_when_the_lead_cannot_be_overturned(engine: Engine, scorer: Scorer) -> None:
    full = searched(recipe("best-of-n", width=8), engine, scorer)
    short = searched(recipe("best-of-n", width=8, **{"budget.lead": True, "search.vote": "majority"}), engine, scorer)
    voted = searched(recipe("best-of-n", width=8, **{"search.vote": "majority"}), engine, scorer)
    assert [o.answer and o.answer.text for o in short] == [o.answer and o.answer.text for o in voted]
    assert sum(o.driver.costs.calls for o in short) <= sum(o.driver.costs.calls for o in full)


# Errors


class FailingPolicy(CorePolicy):
    """Fails as `how` says in round `at`."""

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


def test_step_without_a_delimiter_is_an_error_of_its_node(engine: Engine, scorer: Scorer) -> None:
    settings = recipe("rebase", questions=1, **{"steps.stop": "\n\n"})
    (outcome,) = searched(settings, engine, scorer)
    assert outcome.answer is None
    errors = {n.error for n in outcome.tree.nodes if n.state == "cut"}
    assert any("the step did not end with '\\n\\n' within 24 tokens" in str(error) for error in errors)


def test_step_count_mismatch_with_the_prm_is_an_error(engine: Engine) -> None:
    settings = recipe("rebase", questions=1)
    table = settings.prm.model_copy(update={"format": {"split": "="}})
    (outcome,) = searched(settings, engine, open_scorer(table, 1))
    failed = [n for n in outcome.tree.nodes if n.state == "failed"]
    assert len(failed) == 8
    assert all("step_mismatch: the PRM sees 2 step(s) but the search generated 1" in str(n.error) for n in failed)


ENDS_BEHIND_A_STEP = {"steps.stop": "9", "prm.format": {"split": "9"}, "steps.answer": r"#(\d+)$"}
"""The sums policy writes `6+2=8;8+1=9;#9` and ends: with "9" as a step's end, it ends behind a complete step."""


def nines(tmp_path: Path, **flags: Any) -> dict[str, Any]:
    (tmp_path / "nines.jsonl").write_text('{"prompt": "6+2+1=", "answer": "9"}\n')
    return {**ENDS_BEHIND_A_STEP, "data.path": str(tmp_path / "nines.jsonl"), "data.limit": 1, **flags}


@pytest.mark.parametrize("method", get_args(Method))
def test_path_that_ends_after_a_complete_step_is_finished(method: str, engine: Engine, tmp_path: Path) -> None:
    flags = {"search.method": method, "search.width": 4, "search.aggregate": "mean"}
    settings = load_search(None, nines(tmp_path, **flags))
    (outcome,) = searched(settings, engine, open_scorer(settings.prm, 1))
    assert outcome.right
    ends = [node for node in outcome.tree.having("finished") if not node.text]
    assert ends
    for node in ends:  # its value is that of its steps, and no score counts twice
        assert node.score is None
        assert node.value == AGGREGATES["mean"](outcome.tree.scores(node.parent))


def test_response_that_ends_before_its_first_step_fails(engine: Engine, scorer: Scorer) -> None:
    class Silent(CorePolicy):
        def extend(self, requests: Any) -> list[list[Step]]:
            return [[Step((2,), "", "end")] * request.count for request in requests]

    settings = recipe("rebase", questions=1)
    search = Search(settings, policy=Silent(engine, settings.steps), scorer=scorer, tokenizer=engine.tokenizer)
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
        settings = recipe("best-of-n", width=8, **{"prm.path": "sums", "search.vote": vote})
        outcomes = searched(settings, engine, outcome_model)
        for outcome in outcomes:
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


def test_odds_do_not_depend_on_the_offset_of_the_scores() -> None:
    answers = [Answer("19", -3.0, 1), Answer("18", -2.0, 2), Answer("19", -2.4, 3)]
    shifted = [Answer(a.text, a.weight + 700.0, a.node) for a in answers]
    for each in (answers, shifted):
        odds = as_odds(each)
        assert [a.weight for a in odds] == pytest.approx([math.exp(-1), 1.0, math.exp(-0.4)])
        same = cast(Any, lambda one, other: one == other)
        best, weighted = (winner(odds, vote, same) for vote in ("best", "weighted"))
        assert (best and best.node, weighted and weighted.node) == (2, 3), "0.37 + 0.67 against 1"
    assert as_odds([]) == []


def test_empty_step_is_a_failed_node(engine: Engine, scorer: Scorer) -> None:
    settings = recipe("rebase", questions=2).model_copy(update={"lanes": 1})
    policy = FailingPolicy(engine, settings.steps, "empty", 1)
    search = Search(settings, policy=policy, scorer=scorer, tokenizer=engine.tokenizer)
    for outcome in search.run(search.questions()):
        failed = list(outcome.tree.having("failed"))
        assert len(failed) == 8
        assert all("empty step" in str(node.error) for node in failed)
        assert outcome.stopped == "no answer: empty step: the policy generated only the step's end"


def test_outcomes_are_kept_when_the_server_is_lost(engine: Engine, scorer: Scorer) -> None:
    settings = recipe("best-of-n", questions=3)
    policy = FailingPolicy(engine, settings.steps, "lost", 12)
    search = Search(settings, policy=policy, scorer=scorer, tokenizer=engine.tokenizer)
    outcomes: list[Outcome] = []
    results = search.run(search.questions())
    with pytest.raises(ServerError, match="no steps from"):
        outcomes.extend(results)
    assert len(outcomes) == 3
    lost = [o for o in outcomes if o.stopped.startswith("failed: no steps")]
    assert lost
    assert any(o.answers for o in outcomes)


class NoScores:
    """A PRM that returns an error for every third path."""

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


def test_step_without_a_score_is_a_failed_node(engine: Engine, scorer: Scorer) -> None:
    for outcome in searched(recipe("ets", questions=2), engine, NoScores(scorer)):
        failed = list(outcome.tree.having("failed"))
        assert failed
        assert all(node.score is None and "scoring_failed" in str(node.error) for node in failed)


def test_scorer_gives_the_same_scores_alone_and_batched_and_computes_only_new_tokens(scorer: Scorer) -> None:
    assert isinstance(scorer, LocalScorer)
    steps = ("7+8=15;", "15+4=19;", "19+2=21;")
    paths = [StepPath("7+8+4+2=", steps[:n]) for n in (1, 2, 3)]
    together = [scored.value for scored in scorer.score(paths)]
    scorer.engine.new_version()
    before = scorer.computed
    one_by_one = [scorer.score([path])[0].value for path in paths]
    assert together == pytest.approx(one_by_one, abs=1e-5)
    # The prompt's 9 tokens, the steps' 7, 8 and 8, and at most 4 recomputed tokens for each later step.
    assert scorer.computed - before <= 9 + 7 + 8 + 8 + 2 * 4
    (again,) = scorer.score([paths[2]])
    assert again.value == pytest.approx(together[2], abs=1e-5)


# The run directory


def test_run_is_written_and_resumed(tmp_path: Path) -> None:
    settings = recipe("rebase", width=4, questions=6)
    figures = run_search(settings, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == figures
    for name in ("accuracy", "kv_tokens", "generated_tokens", "calls", "seconds"):
        assert name in figures
    lines = list(read_results(tmp_path / "a" / "results.jsonl"))
    assert figures["calls"] == sum(line["costs"]["calls"] for line in lines)
    assert all(len(line["nodes"]) == 1 + line["costs"]["calls"] for line in lines)

    # As if killed after three questions and half of a fourth; one of the three has failed.
    directory = tmp_path / "b"
    run_search(settings, directory)
    saved = (directory / "results.jsonl").read_text().splitlines(keepends=True)
    failed = json.loads(saved[1]) | {"stopped": "failed: the server was lost"}
    (directory / "results.jsonl").write_text(saved[0] + json.dumps(failed) + "\n" + saved[2] + saved[3][:50])
    with pytest.raises(RunError, match="--resume continues"):
        run_search(settings, directory)
    with pytest.raises(RunError, match=r"started with search\.width = 4"):
        run_search(recipe("rebase", width=8, questions=6), directory, resume=True)
    again = run_search(settings, directory, resume=True)
    for name in ("accuracy", "kv_tokens", "generated_tokens", "calls", "questions"):
        assert again[name] == figures[name]


@pytest.mark.slow
def test_methods_that_share_models_give_the_same_results_as_alone(tmp_path: Path) -> None:
    def results(directory: Path) -> list[dict[str, Any]]:
        lines = list(read_results(directory / "results.jsonl"))
        for line in lines:
            line["costs"] = {name: cost for name, cost in line["costs"].items() if not isinstance(cost, float)}
        return lines

    recipes = {method: recipe(method, width=4, questions=6) for method in ("best-of-n", "rebase", "ets")}
    together = {tmp_path / method: tree for method, tree in recipes.items()}
    names = [directory.name for directory, _ in run_searches(together, lambda name: nullcontext(lambda done, of: None))]
    assert names == list(recipes)
    for method, tree in recipes.items():
        run_search(tree, tmp_path / "alone" / method)
        assert results(tmp_path / method) == results(tmp_path / "alone" / method)


def test_search_function_from_python() -> None:
    outcomes = plaudit.search(
        ["7+8+4=", {"prompt": "3+4+2=", "answer": "9"}], engine="sums-policy", prm="sums-steps", rule="ets", width=4,
        stop=";", answer=r"#(\d+)$", max_tokens=60, threads=1,
    )  # fmt: skip
    assert [outcome.question.text for outcome in outcomes] == ["7+8+4=", "3+4+2="]
    assert outcomes[0].right is None
    assert outcomes[1].right is (outcomes[1].answer is not None and outcomes[1].answer.text == "9")
    with pytest.raises(ConfigError, match="has no option 'stpo'"):
        plaudit.search(["7+8="], engine="sums-policy", prm="sums-steps", stpo=";")


def test_invalid_settings_are_rejected() -> None:
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
    settings = load_search(Path(__file__).parents[2] / "plaudit" / "recipes" / f"search-{method}.toml", {})
    assert settings.search.method == method
    assert settings.steps == recipe(method).steps
    assert parse_search(tomllib.loads(to_toml(settings)), "again") == settings
