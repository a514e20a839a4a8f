"""Process and outcome models behind vLLM's, SGLang's and OpenAI's routes, over real HTTP, against the same models in
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
    """A causal LM that is read as Math-Shepherd's is: "+" and "-" behind every tag."""
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


def test_a_class_head_by_vllms_pooling(server: ServerProcess) -> None:
    here = values(PrmTable(path="sums-steps"), SUMS)
    there = PrmTable(url=server.url, protocol="vllm", path="sums-steps", model="sums-steps")
    assert values(there, SUMS) == pytest.approx(here, abs=1e-5)
    assert here[0] > here[2]


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_a_causal_process_model(server: ServerProcess, shepherd: str, protocol: Any) -> None:
    here = values(PrmTable(path=shepherd, format="math-shepherd"), WORDS)
    there = PrmTable(url=server.url, protocol=protocol, path=shepherd, format="math-shepherd", model="shepherd")
    assert values(there, WORDS) == pytest.approx(here, abs=1e-5)


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_an_outcome_model(server: ServerProcess, protocol: Any) -> None:
    here = values(OrmTable(path="sums"), DONE, "best-of-n")
    there = OrmTable(url=server.url, protocol=protocol, path="sums", model="sums")
    assert values(there, DONE, "best-of-n") == pytest.approx(here, abs=1e-5)
    assert here[0] > here[1]


def test_pairs_go_as_they_are(server: ServerProcess) -> None:
    """To /score, which writes two texts as the tokenizer's template for pairs does."""
    found = values(OrmTable(url=server.url, protocol="vllm", model="sums", pairs=True), DONE, "best-of-n")
    tokenizer = load_tokenizer(resolve("sums"))
    ids = [tokenizer(str(path.prompt), "".join(path.steps))["input_ids"] for path in DONE]
    body = {"model": "sums", "input": ids, "use_activation": False}
    rows = server.http.post("/classify", json=body).json()["data"]
    assert found == pytest.approx([row["probs"][0] for row in rows], abs=1e-5)
    chat = StepPath(({"role": "user", "content": "7+8="},), ("#15",))
    scorer = open_scorer(OrmTable(url=server.url, protocol="vllm", model="sums", pairs=True), 1, "best-of-n")
    (refused,) = scorer.score([chat])
    scorer.close()
    assert refused == Scored(
        error="bad_messages: /score accepts a text and its answer, but the prompt is a conversation"
    )


class LogprobServer(CompletionServer):
    """The most likely next tokens, of a model that, as a trained process model, hardly says anything but + and -."""

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


def test_log_probs_of_the_next_token(shepherd: str) -> None:
    here = values(PrmTable(path=shepherd, format="math-shepherd"), WORDS)
    with LogprobServer(Engine.load("sums-policy", device="cpu")) as server:
        server.begin()
        there = PrmTable(url=server.url, protocol="openai", path=shepherd, format="math-shepherd")
        assert values(there, WORDS) == pytest.approx(here, abs=1e-5)
        LogprobServer.trained = False  # a language model, that has other things to say
        with pytest.raises(RequestRefused, match=r"instead of \['▁\+', '▁-'\]: check that it serves a process model"):
            values(there, WORDS)


def test_what_a_server_cannot_give_is_told(server: ServerProcess, shepherd: str) -> None:
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


def test_tables_that_cannot_be_are_refused() -> None:
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
def test_an_outcome_model_weighs_the_answers_of_a_tree() -> None:
    """The process model chooses the steps, the outcome model the answer: by hand from both, the tree being the same."""
    keys = {"search.method": "rebase", "search.width": 6, "data.limit": 2}
    searches = [Search(load_search(None, {**keys, **orm})) for orm in ({}, {"orm.path": "sums"})]
    plain, weighed = (sorted(s.run(s.questions()), key=lambda o: o.question.index) for s in searches)
    judge = open_scorer(OrmTable(path="sums"), 1, "best-of-n")
    compared = 0
    for one, other in zip(plain, weighed, strict=True):
        assert [n.text for n in one.tree.nodes] == [n.text for n in other.tree.nodes]
        assert [a.text for a in one.answers] == [a.text for a in other.answers]
        paths = [StepPath(one.question.prompt, tuple(s.text for s in one.tree.steps(a.node))) for a in one.answers]
        scores = [scored.value for scored in judge.score(paths)]
        best = max((s for s in scores if s is not None), default=0.0)
        assert [a.weight for a in other.answers] == pytest.approx([np.exp(s - best) for s in scores if s is not None])
        compared += len(scores)
    assert compared
    for search in searches:
        search.close()
