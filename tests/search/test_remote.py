"""Steps and scores over HTTP, from real servers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import plaudit
from plaudit.config.search import SearchRecipe, load_search
from plaudit.core import Engine
from plaudit.errors import BadReply, ConfigError, RequestRefused, RewardUnavailable, ServerError
from plaudit.search.backends.embedding import ServedEncoder
from plaudit.search.record import read_results
from plaudit.search.runner import Outcome
from plaudit.search.search import Search
from tests.search.completions import CompletionServer
from tests.search.single import run_search
from tests.serve.process import ServerProcess, free_port


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("sums-policy", device="cpu")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(None, "--model", "sums-steps", "--model", "sums") as server:
        yield server


def recipe(questions: int = 2, **flags: Any) -> SearchRecipe:
    return load_search(None, {"search.method": "rebase", "search.width": 6, "data.limit": questions, **flags})


def remote(url: str, name: str = "openai", **flags: Any) -> SearchRecipe:
    return recipe(**{"engine.name": name, "engine.url": url, "engine.timeout": 20.0, **flags})


def searched(settings: SearchRecipe) -> list[Outcome]:
    search = Search(settings)
    try:
        return sorted(search.run(search.questions()), key=lambda outcome: outcome.question.index)
    finally:
        search.close()


def texts(outcomes: list[Outcome]) -> list[list[tuple[int, str, str]]]:
    return [[(n.parent, n.text, n.state) for n in outcome.tree.nodes] for outcome in outcomes]


@pytest.mark.slow
def test_every_server_protocol_gives_the_same_search(engine: Engine) -> None:
    with CompletionServer(engine) as server:
        by_ids = searched(remote(server.url))
        by_sglang = searched(remote(server.url, "sglang"))
        assert server.requests[0]["include_stop_str_in_output"] is True
    with CompletionServer(engine, token_ids=False) as server:
        by_text = searched(remote(server.url))
        assert any(isinstance(request["prompt"], str) for request in server.requests)
    assert any(outcome.answers for outcome in by_ids)
    assert texts(by_sglang) == texts(by_ids)
    # Without token ids a path is identified by its text, so the seeds differ below the first level, which is the same.
    first = [[node for node in tree if node[0] == 0] for tree in texts(by_ids)]
    assert [[node for node in tree if node[0] == 0] for tree in texts(by_text)] == first
    counted = [outcome.driver.costs.generated for outcome in by_text]
    assert counted == [sum(len(n.tokens) for n in o.tree.nodes[1:]) for o in by_text]


def test_greedy_steps_are_requested_once(engine: Engine) -> None:
    with CompletionServer(engine) as server:
        outcomes = searched(remote(server.url, **{"steps.temperature": 0.0}))
    assert texts(outcomes) == texts(searched(recipe(**{"steps.temperature": 0.0})))


def test_rejected_path_fails_without_affecting_others(engine: Engine) -> None:
    with CompletionServer(engine, longest=40) as server:
        (outcome,) = searched(remote(server.url, questions=1))
    failed = [node for node in outcome.tree.nodes if node.error is not None and "too long for this model" in node.error]
    assert failed
    assert all(node.state == "failed" and "it answered 400" in str(node.error) for node in failed)
    assert outcome.stopped.startswith(("done", "no answer: http://127.0.0.1"))
    # If no request succeeded, the recipe itself may be wrong, and the error is raised.
    with CompletionServer(engine, longest=4) as server, pytest.raises(RequestRefused, match="too long for this model"):
        searched(remote(server.url, questions=1))


@pytest.mark.slow
def test_lost_generation_server_ends_the_run_and_resume_completes_it(engine: Engine, tmp_path: Path) -> None:
    with CompletionServer(engine, fail_after=40) as failing:
        settings = remote(failing.url, questions=4, **{"engine.timeout": 1.5}).model_copy(update={"concurrent": 2})
        with pytest.raises(ServerError, match=r"no steps from http://127.0.0.1:\d+/v1/completions within 1.5 s"):
            run_search(settings, tmp_path / "run")
    lines = list(read_results(tmp_path / "run" / "results.jsonl"))
    assert any(line["stopped"].startswith("failed: no steps") for line in lines)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["failed"] >= 1
    with CompletionServer(engine) as restarted:
        again = remote(restarted.url, questions=4)
        figures = run_search(again, tmp_path / "run", resume=True)
    assert figures["questions"] == 4
    assert figures["failed"] == 0


def test_invalid_replies_of_a_server_are_errors(engine: Engine) -> None:
    class Wrong(CompletionServer):
        reply: tuple[int, Any] = (200, {"choices": []})

        def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return self.reply

    with Wrong(engine) as server:
        with pytest.raises(BadReply, match="returned 0 completions where 6 were requested"):
            searched(remote(server.url, questions=1))
        Wrong.reply = (200, {"error": "no"})
        with pytest.raises(BadReply, match="returned no completions"):
            searched(remote(server.url, questions=1))
        Wrong.reply = (404, {"error": "no such model"})
        with pytest.raises(RequestRefused, match="rejected the request: it answered 404"):
            searched(remote(server.url, questions=1))


@pytest.mark.slow
def test_served_prm_equals_a_local_one_and_computes_only_new_tokens(server: ServerProcess) -> None:
    local = searched(recipe(questions=3))
    before = server.http.get("/stats").json()["models"][0]
    served = searched(recipe(questions=3).model_copy(update={"prm": served_prm(server)}))
    after = server.http.get("/stats").json()["models"][0]
    for local_outcome, served_outcome in zip(local, served, strict=True):
        assert [n.tokens for n in local_outcome.tree.nodes] == [n.tokens for n in served_outcome.tree.nodes]
        scores = [n.score for n in local_outcome.tree.nodes if n.score is not None]
        assert scores == pytest.approx([n.score for n in served_outcome.tree.nodes if n.score is not None], abs=1e-5)
    # At depths of 6 and more: the computed tokens against the cost of prefilling every path in full.
    paths = [
        len(o.question.prompt_ids) + o.tree.length(n.id)
        for o in served
        for n in o.tree.nodes[1:]
        if n.twin == n.id and n.score is not None
    ]
    assert after["computed_tokens"] - before["computed_tokens"] < sum(paths) / 3


@pytest.mark.slow
def test_search_is_the_same_with_questions_run_independently_on_servers(engine: Engine, server: ServerProcess) -> None:
    with CompletionServer(engine) as generating:
        settings = remote(generating.url, questions=4).model_copy(update={"prm": served_prm(server)})
        assert (settings.groups, recipe().groups, settings.model_copy(update={"lanes": 2}).groups) == (64, 1, 2)
        assert texts(searched(settings)) == texts(searched(settings.model_copy(update={"lanes": 1})))


def served_prm(server: ServerProcess) -> Any:
    return load_search(None, {"search.method": "rebase"}, [f'prm={{url="{server.url}"}}']).prm


def prm_at(url: str) -> Any:
    return load_search(None, {"search.method": "rebase"}, [f'prm={{url="{url}", timeout=4.0}}']).prm


@pytest.mark.slow
def test_unreachable_prm_is_an_error_before_generation() -> None:
    prm = prm_at(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RewardUnavailable, match="no scores from"):
        Search(recipe(questions=1).model_copy(update={"prm": prm}))


def test_lost_prm_is_an_error_and_generated_steps_are_kept(engine: Engine) -> None:
    class Lost(CompletionServer):
        """Answers the first request with a score and all later ones with 503."""

        def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            self.requests.append(body)
            scored = {"model": "prm", "version": "1", "items": [{"scores": [0.5], "steps": [[0.5]]}]}
            return (200, scored) if len(self.requests) == 1 else (503, {"error": {"type": "lost", "message": "lost"}})

    with Lost(engine) as server:
        search = Search(recipe(questions=1).model_copy(update={"prm": prm_at(server.url)}))
        outcomes: list[Outcome] = []
        with pytest.raises(RewardUnavailable, match="no scores from"):
            outcomes.extend(search.run(search.questions()))
        search.close()
    assert len(outcomes) == 1
    assert outcomes[0].stopped.startswith("failed: no scores from")
    assert len(outcomes[0].tree.nodes) == 7, "what was generated is kept"


@pytest.mark.slow
def test_served_outcome_model_works_only_with_best_of_n(server: ServerProcess) -> None:
    prm = served_prm(server).model_copy(update={"model": "sums"})
    with pytest.raises(ConfigError, match=r"'rebase' chooses among steps, and sums at http.* is an outcome model"):
        Search(recipe(questions=1).model_copy(update={"prm": prm}))
    settings = recipe(questions=2, **{"search.method": "best-of-n"})
    served = searched(settings.model_copy(update={"prm": prm}))
    local = searched(settings.model_copy(update={"prm": settings.prm.model_copy(update={"path": "sums"})}))
    assert texts(served) == texts(local)
    for served_outcome, local_outcome in zip(served, local, strict=True):
        weights = [answer.weight for answer in local_outcome.answers]
        assert [answer.weight for answer in served_outcome.answers] == pytest.approx(weights, abs=1e-4)
        assert served_outcome.answer is not None


def test_search_from_python_with_a_served_outcome_model(server: ServerProcess) -> None:
    keys = {"engine": "sums-policy", "rule": "best-of-n", "width": 4, "stop": ";", "answer": r"#(\d+)$"}
    prm = {"url": server.url, "model": "sums"}
    local, served = (plaudit.search(["7+8+4="], prm=each, **keys) for each in ("sums", prm))
    assert local[0].answer is not None
    assert [o.answer and o.answer.text for o in served] == [local[0].answer.text]


@pytest.mark.slow
def test_embeddings_over_http(engine: Engine) -> None:
    class Embeddings(CompletionServer):
        def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            rows = [{"index": i, "embedding": [float(len(text)), 1.0]} for i, text in enumerate(body["input"])]
            return (200, {"data": rows[::-1]}) if path == "/v1/embeddings" else (404, {})

    with Embeddings(engine) as server:
        encoder = ServedEncoder(server.url)
        assert encoder.embed(["a", "bcd"]).tolist() == [[1.0, 1.0], [3.0, 1.0]]
        encoder.close()
        settings = recipe(
            questions=1, **{"search.method": "ets", "search.clusters": "served", "search.encoder": server.url}
        )
        (outcome,) = searched(settings)
        assert any(node.cluster is not None for node in outcome.tree.nodes)
    with pytest.raises(ServerError, match="no embeddings from"):
        ServedEncoder(f"http://127.0.0.1:{free_port()}").embed(["a"])
