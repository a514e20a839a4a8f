"""One conversation has one score: in every protocol and integration, equal to plain transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from plaudit.client.client import RewardClient
from plaudit.client.in_process import InProcess
from plaudit.integrations import openrlhf, slime, verl
from plaudit.integrations.trl import RemoteReward
from plaudit.records import Item
from plaudit.reward import load_reward
from tests.reward import tiny
from tests.reward.conversations import TEMPLATES, answered, tokenizer_of
from tests.rotation import mostly_slow
from tests.serve.mistakes import message_of, verify
from tests.serve.process import ServerProcess

PROMPT = [{"role": "user", "content": "hello? <b>"}]
ANSWER = "\nhell no"
BEGIN = {"gemma": "<bos>", "llama3": "<|begin_of_text|>", "mistral": "<s>"}


@dataclass(frozen=True)
class Served:
    """`score` is transformers' of `text`, the rendered conversation."""

    server: ServerProcess
    path: str
    module: Any
    tokenizer: Any
    text: str
    score: float

    @property
    def messages(self) -> list[dict[str, str]]:
        return answered(tuple(PROMPT), ANSWER)

    def post(self, path: str, body: Any) -> Any:
        reply = self.server.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def native(self, **item: Any) -> float:
        return float(self.post("/v1/rewards", {"model": "reward", "items": [item]})["items"][0]["scores"][0])


@pytest.fixture(scope="module", params=mostly_slow(sorted(TEMPLATES, key=lambda name: (name != "llama3", name))))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokenizer = tokenizer_of(request.param)
    module = tiny.model("outcome", tokenizer, ("reward",))
    path = tiny.write(tmp_path_factory.mktemp(request.param), module, tokenizer)
    text = tokenizer.apply_chat_template(answered(tuple(PROMPT), ANSWER), tokenize=False)
    score = float(tiny.plain_class(module, tokenizer.encode(text, add_special_tokens=False))[-1, 0])
    models = {"reward": {"path": path}, "apart": {"path": path, "answer": "apart"}}
    with ServerProcess({"models": models}) as server:
        yield Served(server, path, module, tokenizer, text, score)


def one_text(of: Served) -> dict[str, Any]:
    data = {"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": [of.text]}
    return {"inputs": [data, {"name": "add_EOS", "shape": [1, 1], "datatype": "BOOL", "data": [False]}]}


def remote(of: Served) -> RemoteReward:
    return RemoteReward(of.server.url, model="reward", failures="raise")


def in_process(of: Served) -> float:
    client = RewardClient("http://in-process", transport=InProcess(load_reward(of.path)))
    with client:
        return float(client.score([(PROMPT, [ANSWER])])[0].value or 0.0)


def directly(of: Served) -> float:
    (score,) = load_reward(of.path).score([Item(prompt=tuple(PROMPT), response=ANSWER)])
    return float(score.value or 0.0)  # type: ignore[union-attr]


def by_client(of: Served) -> float:
    with RewardClient(of.server.url, model="reward") as client:
        return float(client.score([Item(messages=tuple(of.messages))])[0].value or 0.0)


CALL = {"tool_calls": None, "refusal": None}
WAYS: dict[str, Callable[[Served], float]] = {
    "native messages": lambda of: of.native(messages=of.messages),
    "native messages with null": lambda of: of.native(messages=[{**each, **CALL} for each in of.messages]),
    "native responses": lambda of: of.native(prompt=PROMPT, responses=[ANSWER]),
    "native steps": lambda of: of.native(prompt=PROMPT, responses=[[ANSWER[:3], ANSWER[3:]]]),
    "native text": lambda of: of.native(text=of.text),
    "vllm messages": lambda of: of.post(
        "/classify", {"model": "reward", "messages": of.messages, "use_activation": False}
    )["data"][0]["probs"][0],
    "vllm pooling": lambda of: of.post(
        "/pooling", {"model": "reward", "messages": of.messages, "task": "classify", "use_activation": False}
    )["data"][0]["data"][0],
    "vllm text": lambda of: of.post("/classify", {"model": "reward", "input": of.text, "use_activation": False})[
        "data"
    ][0]["probs"][0],
    "sglang": lambda of: of.post("/encode", {"text": of.text})["embedding"][0],
    "tei": lambda of: of.post("/predict", {"inputs": of.text, "raw_scores": True})[0]["score"],
    "infinity": lambda of: of.post("/infinity/classify", {"model": "reward", "input": [of.text], "raw_scores": True})[
        "data"
    ][0][0]["score"],
    "triton": lambda of: of.post("/v2/models/reward/infer", one_text(of))["outputs"][0]["data"][0],
    "openrlhf": lambda of: of.post("/get_reward", {"query": [of.text], "prompts": [""], "labels": [None]})["rewards"][
        0
    ],
    "nemo gym": lambda of: of.post("/verify", verify(PROMPT, message_of(ANSWER)))["reward"],
    "slime": lambda of: of.post("/remote_rm", {"prompt": PROMPT, "response": ANSWER, "label": None}),
    "slime rendered": lambda of: of.post("/remote_rm?rendered=true", {"prompt": "", "response": of.text}),
    "client": by_client,
    "in process": in_process,
    "load_reward": directly,
    "RemoteReward": lambda of: remote(of)([PROMPT], [of.messages[1:]])[0] or 0.0,
    "RemoteReward with null": lambda of: remote(of)([PROMPT], [[{**of.messages[1], **CALL}]])[0] or 0.0,
    "verl integration": lambda of: verl.compute_score_sync("data", ANSWER, None, {"prompt": PROMPT}, model="reward"),
    "slime integration": lambda of: asyncio.run(
        slime.custom_rm(None, SimpleNamespace(prompt=PROMPT, response=ANSWER, label=None))  # type: ignore[arg-type]
    ),
    "openrlhf integration": lambda of: openrlhf.reward_func([of.text], [""], [None])["rewards"].item(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_has_one_score(served: Served, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAUDIT_URL", served.server.url)
    monkeypatch.setenv("PLAUDIT_MODEL", "reward")
    assert WAYS[way](served) == pytest.approx(served.score, abs=5e-5)


def test_read_apart_a_conversation_has_one_score_too(served: Served) -> None:
    items = [{"messages": served.messages}, {"prompt": PROMPT, "responses": [ANSWER]}]
    native = [item["scores"][0] for item in served.server.rewards(items, "apart").json()["items"]]
    body = {"model": "apart", "messages": served.messages, "use_activation": False}
    tokens = served.tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    tokens += [*served.tokenizer.encode(ANSWER, add_special_tokens=False), served.tokenizer.eos_token_id]
    expected = float(tiny.plain_class(served.module, tokens)[-1, 0])
    assert [*native, served.post("/classify", body)["data"][0]["probs"][0]] == pytest.approx([expected] * 3, abs=5e-5)


def test_an_answer_cut_at_its_limit_has_one_score(served: Served) -> None:
    tokens = served.tokenizer.apply_chat_template(served.messages, continue_final_message=True, return_dict=False)
    expected = float(tiny.plain_class(served.module, tokens)[-1, 0])
    scores = [
        served.native(messages=served.messages, cut=True), served.native(prompt=PROMPT, responses=[ANSWER], cut=True)
    ]  # fmt: skip
    with RewardClient(served.server.url, model="reward") as client:
        items = [Item(prompt=tuple(PROMPT), response=ANSWER, cut=cut) for cut in (False, True, False)]
        finished, cut, again = [result.value for result in client.score(items)]
    assert [*scores, cut] == pytest.approx([expected] * 3, abs=5e-5)
    assert [finished, again] == pytest.approx([served.score] * 2, abs=5e-5)


@pytest.mark.parametrize("way", ["native text", "vllm text", "sglang", "tei", "infinity", "triton", "openrlhf"])
def test_a_begin_token_in_the_text_is_not_added_again(served: Served, way: str) -> None:
    """The text is not a conversation. To Triton's sentences and OpenRLHF's queries nothing is added."""
    begin = next((text for text in BEGIN.values() if served.text.startswith(text)), "")
    ids = served.tokenizer.encode("hello?", add_special_tokens=True)
    expected = float(tiny.plain_class(served.module, ids)[-1, 0])
    with_begin = WAYS[way](replace(served, text=f"{begin}hello?"))
    assert with_begin == pytest.approx(expected, abs=5e-5)
    if way not in ("triton", "openrlhf"):
        assert WAYS[way](replace(served, text="hello?")) == pytest.approx(expected, abs=5e-5)
