"""Process and outcome models behind the routes of vLLM, SGLang and OpenAI over real HTTP, against the same models in
this process. The server is ours; tests/interop/test_vllm_parity.py compares its vLLM routes with vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from plaudit.config.search import OrmTable, PrmTable, load_search, parse_search
from plaudit.core import Engine
from plaudit.errors import BadReply, ConfigError, RequestRefused
from plaudit.models import load_tokenizer, resolve
from plaudit.search.backends.scored import Path as StepPath
from plaudit.search.backends.scored import Scored
from plaudit.search.backends.scoring import open_scorer
from plaudit.search.search import Search
from tests.reward import tiny
from tests.search.completions import CompletionServer
from tests.serve.process import ServerProcess

SUMS = [StepPath("7+8+4=", ("7+8=15;",)), StepPath("7+8+4=", ("7+8=15;", "15+4=19;")), StepPath("7+8+4=", ("7+8=1;",))]
WORDS = [StepPath(tiny.QUESTION, (f"{tiny.STEPS[0]}\n",)), StepPath(tiny.QUESTION, tuple(f"{s}\n" for s in tiny.STEPS))]
DONE = [StepPath("7+8+4=", ("7+8=15;", "15+4=19;", "#19")), StepPath("7+8+4=", ("7+8=15;", "15+4=11;", "#11"))]


@pytest.fixture(scope="module")
def shepherd(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A causal LM scored like Math-Shepherd: by "+" and "-" after every tag."""
    tokenizer = tiny.sentence_piece()
    return tiny.write(tmp_path_factory.mktemp("shepherd"), tiny.model("causal", tokenizer), tokenizer)


@pytest.fixture(scope="module")
def server(shepherd: str) -> Iterator[ServerProcess]:
    models = {
        "sums": {"path": "sums"},
        "sums-steps": {"path": "sums-steps"},
        "shepherd": {"path": shepherd, "kind": "process", "format": "math-shepherd"},
    }
    with ServerProcess({"models": models}) as server:
        yield server


def values(table: PrmTable, paths: list[StepPath], method: Any = "rebase") -> list[float]:
    scorer = open_scorer(table, 1, method)
    try:
        scored = scorer.score(paths)
    finally:
        scorer.close()
    assert [each.error for each in scored] == [None] * len(paths)
    return [each.value for each in scored if each.value is not None]


def test_classification_head_over_vllm_pooling(server: ServerProcess) -> None:
    local = values(PrmTable(path="sums-steps"), SUMS)
    remote = PrmTable(url=server.url, protocol="vllm", path="sums-steps", model="sums-steps")
    assert values(remote, SUMS) == pytest.approx(local, abs=1e-5)
    assert local[0] > local[2]


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_causal_process_model_over_vllm_and_sglang(server: ServerProcess, shepherd: str, protocol: Any) -> None:
    local = values(PrmTable(path=shepherd, format="math-shepherd"), WORDS)
    remote = PrmTable(url=server.url, protocol=protocol, path=shepherd, format="math-shepherd", model="shepherd")
    assert values(remote, WORDS) == pytest.approx(local, abs=1e-5)


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_outcome_model_over_vllm_and_sglang(server: ServerProcess, protocol: Any) -> None:
    local = values(OrmTable(path="sums"), DONE, "best-of-n")
    remote = OrmTable(url=server.url, protocol=protocol, path="sums", model="sums")
    assert values(remote, DONE, "best-of-n") == pytest.approx(local, abs=1e-5)
    assert local[0] > local[1]


def test_pairs_are_sent_as_two_texts(server: ServerProcess) -> None:
    """They go to /score, which joins two texts by the tokenizer's template for pairs."""
    scores = values(OrmTable(url=server.url, protocol="vllm", model="sums", pairs=True), DONE, "best-of-n")
    tokenizer = load_tokenizer(resolve("sums"))
    ids = [tokenizer(str(path.prompt), "".join(path.steps))["input_ids"] for path in DONE]
    body = {"model": "sums", "input": ids, "use_activation": False}
    rows = server.http.post("/classify", json=body).json()["data"]
    assert scores == pytest.approx([row["probs"][0] for row in rows], abs=1e-5)
    chat = StepPath(({"role": "user", "content": "7+8="},), ("#15",))
    scorer = open_scorer(OrmTable(url=server.url, protocol="vllm", model="sums", pairs=True), 1, "best-of-n")
    (refused,) = scorer.score([chat])
    scorer.close()
    assert refused == Scored(
        error="bad_messages: /score accepts a text and its answer, but the prompt is a conversation"
    )


class LogprobServer(CompletionServer):
    """Returns top log-probs of a model that, like a trained process model, predicts almost only + and -."""

    trained = True

    def begin(self) -> None:
        tokenizer = tiny.sentence_piece()
        self.module, self.columns = tiny.model("causal", tokenizer), tokenizer.encode("+ -")[1:]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert (path, body["max_tokens"]) == ("/v1/completions", 1)
        logits = tiny.plain(self.module, body["prompt"])[-1].astype(np.float64)
        if self.trained:
            logits[self.columns] += 50
        logs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        top = {f"token_id:{i}": float(logs[i]) for i in np.argsort(-logs)[: body["logprobs"]]}
        return 200, {"choices": [{"index": 0, "text": "+", "logprobs": {"top_logprobs": [top]}}]}


def test_scores_from_next_token_log_probs_over_openai(shepherd: str) -> None:
    local = values(PrmTable(path=shepherd, format="math-shepherd"), WORDS)
    with LogprobServer(Engine.load("sums-policy", device="cpu")) as server:
        server.begin()
        remote = PrmTable(url=server.url, protocol="openai", path=shepherd, format="math-shepherd")
        assert values(remote, WORDS) == pytest.approx(local, abs=1e-5)
        LogprobServer.trained = False  # a plain language model predicts other tokens
        with pytest.raises(RequestRefused, match=r"instead of \['▁\+', '▁-'\]: check that it serves a process model"):
            values(remote, WORDS)


def test_unsupported_scoring_by_a_server_is_an_error(server: ServerProcess, shepherd: str) -> None:
    cases: list[tuple[type[Exception], str, PrmTable]] = [
        (ConfigError, "reads token probabilities, but sums-steps is not a causal",
         PrmTable(url=server.url, protocol="sglang", path="sums-steps")),
        (RequestRefused, "rejected the request: it answered 404",
         PrmTable(url=server.url, protocol="vllm", path="sums-steps", model="absent")),
        (BadReply, r"returned 0 rows for \d+ tokens and 1 steps: pool by ALL, or by STEP",
         PrmTable(url=server.url, protocol="vllm", path="sums-steps", model="shepherd")),
    ]  # fmt: skip
    for error, message, table in cases:
        with pytest.raises(error, match=message):
            values(table, SUMS)


def test_invalid_tables_are_rejected() -> None:
    base = {"model": {"path": "m"}, "data": {"path": "q"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, r"give \[prm\], which scores steps, or \[orm\]"),
        ({"orm": {"path": "o"}}, "selects steps by score and needs a"),
        ({"prm": {"protocol": "vllm", "path": "p"}}, 'protocol = "vllm" needs the url'),
        ({"prm": {"protocol": "vllm", "url": "http://h"}}, "needs path, a directory with the model's tokenizer"),
        ({"orm": {"protocol": "openai", "url": "http://h", "path": "o"}}, "an outcome model has a score head"),
        ({"orm": {"protocol": "sglang", "url": "http://h", "pairs": True}}, 'pairs needs protocol = "vllm"'),
    ]
    for tables, message in cases:
        with pytest.raises(ConfigError, match=message):
            parse_search({**base, **tables}, "test")


@pytest.mark.slow
def test_outcome_model_weights_the_answers_of_a_tree() -> None:
    """The process model selects the steps, the outcome model weights the answers: the tree is the same, and the weights
    equal those computed from the outcome model's scores."""
    keys = {"search.method": "rebase", "search.width": 6, "data.limit": 2}
    searches = [Search(load_search(None, {**keys, **orm})) for orm in ({}, {"orm.path": "sums"})]
    plain, weighted = (sorted(s.run(s.questions()), key=lambda o: o.question.index) for s in searches)
    scorer = open_scorer(OrmTable(path="sums"), 1, "best-of-n")
    compared = 0
    for plain_outcome, weighted_outcome in zip(plain, weighted, strict=True):
        assert [n.text for n in plain_outcome.tree.nodes] == [n.text for n in weighted_outcome.tree.nodes]
        assert [a.text for a in plain_outcome.answers] == [a.text for a in weighted_outcome.answers]
        paths = [
            StepPath(plain_outcome.question.prompt, tuple(s.text for s in plain_outcome.tree.steps(a.node)))
            for a in plain_outcome.answers
        ]
        scores = [scored.value for scored in scorer.score(paths)]
        best = max((s for s in scores if s is not None), default=0.0)
        assert [a.weight for a in weighted_outcome.answers] == pytest.approx(
            [np.exp(s - best) for s in scores if s is not None]
        )
        compared += len(scores)
    assert compared
    for search in searches:
        search.close()
