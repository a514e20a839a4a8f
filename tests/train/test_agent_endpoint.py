"""Agents that use an OpenAI endpoint of the policy: exactly the sampled tokens are trained on, once each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from plaudit.config import RlRecipe, load_recipe
from plaudit.config.prompting import SamplingTable
from plaudit.config.rl import AgentTable
from plaudit.core import Engine
from plaudit.core.sequence import Update
from plaudit.errors import ConfigError
from plaudit.models import load_policy, render_chat
from plaudit.records import Batch, ItemError, Prompt, Sample
from plaudit.rl.loop import RlTraining
from plaudit.train.agents.agent_player import AgentPlayer, load_agent
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.advantages import usable
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.rollouts.dump import Dump
from plaudit.train.rollouts.scorer import Scorer
from plaudit.train.run.clock import Clock
from plaudit.train.run.run import Run
from plaudit.worlds import sums_agent
from tests.models.builders import CHATML, byte_tokenizer, causal
from tests.train.rl_world import Silent, recipe

SECONDS = 60.0
LOADED = load_policy("sums-policy", "float32", "cpu")
TOKENIZER = LOADED.tokenizer
SAMPLING = SamplingTable(max_tokens=64)
TABLE = AgentTable(function="plaudit.worlds.sums_agent:play", timeout=SECONDS)
Message = dict[str, Any]


def prompt(text: str) -> Prompt:
    messages: list[Message] = [{"role": "user", "content": text}]
    truth = str(sum(map(int, text[:-1].split("+"))))
    return Prompt(text, tuple(render_chat(TOKENIZER, messages, True)), truth, {"messages": tuple(messages)})


PROMPTS = [prompt(text) for text in ("7+8+4=", "1+2+3+4=", "9+9+9=", "5+6=")]


class Watched(Engine):
    """An engine that records its samples and can be blocked before a step."""

    def __init__(self, module: Any = None, tokenizer: Any = None) -> None:
        super().__init__(module or LOADED.module, tokenizer or TOKENIZER)
        self.sampled: list[Sample] = []
        self.gate = threading.Event()
        self.gate.set()

    def step(self) -> list[Update]:
        assert self.gate.wait(SECONDS)
        updates = super().step()
        self.sampled += [update.sample for update in updates if update.sample is not None]
        return updates


class Client:
    """A client that sends requests as an SDK does, also disconnects and retries."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        # One connection per request, and no certificates, which are slow to load.
        self.options: dict[str, Any] = {
            "headers": {"authorization": f"Bearer {key}"}, "timeout": SECONDS, "verify": False
        }  # fmt: skip

    def post(self, messages: Sequence[Message], **fields: Any) -> httpx.Response:
        body = {"model": "any", "messages": messages, **fields}
        return httpx.post(f"{self.url}/chat/completions", json=body, **self.options)

    def say(self, messages: Sequence[Message], **fields: Any) -> Message:
        reply = self.post(messages, **fields)
        assert reply.status_code == 200, reply.text
        message: Message = reply.json()["choices"][0]["message"]
        return message

    def stream(self, messages: Sequence[Message], **fields: Any) -> str:
        return "".join(self.pieces(messages, **fields))

    def pieces(self, messages: Sequence[Message], **fields: Any) -> list[str]:
        body = {"model": "any", "messages": messages, "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/chat/completions", json=body, **self.options) as reply:
            assert reply.status_code == 200, reply.read()
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
        return [delta["content"] for delta in deltas if delta.get("content")]

    def abandon(self, messages: Sequence[Message], seconds: float = 0.0, **fields: Any) -> None:
        """Send a request and disconnect after `seconds`."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        body = json.dumps({"model": "any", "messages": messages, **fields}).encode()
        head = (
            f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {self.key}"
            f"\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with closing(socket.create_connection((parts.hostname, parts.port or 0), SECONDS)) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(seconds)


@contextmanager
def player(
    agent: Any, *, engine: Engine | None = None, sampling: SamplingTable = SAMPLING, **keys: Any
) -> Iterator[AgentPlayer]:
    table = TABLE.model_copy(update=keys)
    engine = engine or Watched()
    agent_player = AgentPlayer(
        engine, engine.tokenizer, engine.decoder.max_positions, sampling, table, 1, agent=agent
    )  # fmt: skip
    try:
        yield agent_player
    finally:
        agent_player.close()


def play(agent: Any, prompts: Sequence[Prompt] = PROMPTS[:1], n: int = 1, **keys: Any) -> list[Sample]:
    with player(agent, **keys) as agent_player:
        return agent_player.play(prompts, n, "s")


def turns_of(sample: Sample) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """The context, the tokens and the log-probs of each turn."""
    turns, start = [], 0
    while start < len(sample.mask):
        end = start
        while end < len(sample.mask) and sample.mask[end] == sample.mask[start]:
            end += 1
        if sample.mask[start]:
            turns.append(
                (sample.prompt_ids + sample.token_ids[:start], sample.token_ids[start:end], sample.logprobs[start:end])
            )
        start = end
    return turns


def check_learned_is_sampled(samples: Sequence[Sample], engine: Watched, *, given_up: bool = False) -> None:
    """The samples contain every turn that the engine finished exactly once, with its context, and no other turns.
    With `given_up`, turns may be missing that finished just after their client disconnected."""
    learned = Counter(turn for sample in samples for turn in turns_of(sample))
    sampled = Counter((s.prompt_ids, s.token_ids, s.logprobs) for s in engine.sampled if s.finish_reason != "abort")
    assert learned <= sampled if given_up else learned == sampled


# Contents of a sample


def test_trained_tokens_are_exactly_the_sampled_tokens() -> None:
    engine = Watched()
    samples = play(sums_agent.play, PROMPTS, 4, engine=engine)
    assert [(s.group, s.index) for s in samples] == [(g, i) for g in range(4) for i in range(4)]
    check_learned_is_sampled(samples, engine)
    assert len(engine.sampled) > 2 * len(samples), "several turns each"
    for sample in samples:
        assert (sample.error, sample.finish_reason) == (None, "stop")
        assert sample.reward == float(sample.text.endswith(f"#{PROMPTS[sample.group].truth}"))
        assert sample.prompt_ids == PROMPTS[sample.group].token_ids
        assert sample.extra["turns"] == len(turns_of(sample))
        (logprobs,) = Engine(LOADED.module, TOKENIZER).logprobs([[*sample.prompt_ids, *sample.token_ids]])
        response_logprobs = logprobs[len(sample.prompt_ids) - 1 :].tolist()
        expected = [value if own else 0.0 for value, own in zip(response_logprobs, sample.mask, strict=True)]
        assert sample.raw_logprobs == pytest.approx(expected, abs=1e-4)
    again = play(sums_agent.play, PROMPTS, 4)
    assert [s.token_ids for s in again] == [s.token_ids for s in samples], "seeds belong to a sample and its turn"


def test_update_trains_on_an_agents_turns() -> None:
    loaded = load_policy("sums-policy", "float32", "cpu")
    engine = Engine(loaded.module, loaded.tokenizer)
    samples = play(sums_agent.play, PROMPTS, 4, engine=engine)
    tree = recipe(sampling={"max_tokens": 64})
    policy = Policy(engine.decoder, tree.algorithm, temperature=1.0, max_tokens=64, micro_batch_tokens=4096)
    learner = RlLearner(tree, policy, Optimizer(loaded.module, tree.train), None, policy, Clock())
    rewarded = tuple(replace(sample, reward=float(i % 3)) for i, sample in enumerate(samples))
    metrics, experience = learner.update(Batch(rewarded), 0)
    assert experience is not None
    assert [s.token_ids for s in experience.samples] == [s.token_ids for s in samples]
    assert metrics["mismatch/abs_max"] < 1e-4


def test_agent_reward_is_kept_and_none_is_scored_by_the_recipe() -> None:
    def agent(prompt: Prompt, url: str, key: str) -> float | None:
        Client(url, key).say([{"role": "user", "content": prompt.text}])
        return 0.25 if prompt.text == "5+6=" else None

    samples = play(agent, PROMPTS[2:])
    assert [sample.reward for sample in samples] == [None, 0.25]
    scorer = Scorer(recipe().reward)
    try:
        scored = scorer.score(PROMPTS[2:], samples)
    finally:
        scorer.close()
    assert [sample.reward for sample in scored] == [float(scored[0].text.endswith("#27")), 0.25]


def test_async_agent_receives_its_options() -> None:
    async def agent(prompt: Prompt, url: str, key: str, bonus: float) -> float:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=SECONDS) as client:
            models = await client.get(f"{url}/models")
            assert [each["id"] for each in models.json()["data"]] == ["policy"]
            body = {"model": "policy", "messages": [{"role": "user", "content": prompt.text}]}
            assert (await client.post(f"{url}/chat/completions", json=body)).status_code == 200
        return bonus

    (sample,) = play(agent, options={"bonus": 0.5})
    assert (sample.reward, sample.error) == (0.5, None)


def test_streamed_and_plain_responses_are_the_same_turn() -> None:
    texts: list[str] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        texts.append(client.stream(messages, stop=["="]))
        texts.append(client.say(messages, stop=["="])["content"])
        messages += [{"role": "assistant", "content": texts[0]}, {"role": "tool", "content": "15;"}]
        texts.append(client.stream(messages, stop=["="], stream_options={"include_usage": False}))
        return 1.0

    engine = Watched()
    (sample,) = play(agent, engine=engine)
    assert texts[0] == texts[1]
    assert sample.text.startswith(f"{texts[0]}=15;{texts[2]}")
    check_learned_is_sampled([sample], engine)


def test_stream_sends_text_while_it_is_sampled() -> None:
    streams: list[list[str]] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        with ThreadPoolExecutor(2) as threads:
            streams.extend(threads.map(lambda _: client.pieces(messages), range(2)))
        streams.append(client.pieces(messages))
        return 1.0

    engine = Watched()
    engine.gate.clear()
    threading.Timer(0.2, engine.gate.set).start()
    (sample,) = play(agent, engine=engine)
    assert {"".join(pieces) for pieces in streams} == {sample.text}
    assert all(len(pieces) > 1 for pieces in streams), [len(pieces) for pieces in streams]
    check_learned_is_sampled([sample], engine)


def test_policy_context_is_the_chat_template_rendering_of_the_conversation() -> None:
    """With a template that has roles, the context of a later turn is the template's rendering of the conversation, with
    the policy's own tokens in it."""
    tokenizer = byte_tokenizer()
    engine = Watched(causal(vocab_size=len(tokenizer), max_position_embeddings=512, hidden_size=32), tokenizer)
    conversations: list[list[Message]] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), list(prompt.extra["messages"])
        for answer in ("<|im_end|> 15", "and 16"):
            messages.append(client.say(messages, max_tokens=5))
            messages.append({"role": "tool", "content": answer})
        conversations.append(messages)
        client.say(messages, max_tokens=5)
        return 1.0

    opening = [{"role": "system", "content": "add"}, {"role": "user", "content": "hello"}]
    first_prompt = Prompt("hello", tuple(render_chat(tokenizer, opening, True)), "0", {"messages": tuple(opening)})
    (sample,) = play(agent, [first_prompt], engine=engine, sampling=SamplingTable(max_tokens=256))
    assert sample.error is None
    check_learned_is_sampled([sample], engine)
    last = engine.sampled[-1]
    first, second, _ = (each.token_ids for each in engine.sampled)
    text = tokenizer.decode(last.prompt_ids)
    for token_ids in (first, second):
        assert tokenizer.decode(token_ids) in text
    frame = [
        *opening,
        {"role": "assistant", "content": "A"},
        conversations[0][3],
        {"role": "assistant", "content": "B"},
        conversations[0][5],
    ]
    head, middle, tail = tokenizer.decode(render_chat(tokenizer, frame, True)).replace("B", "A").split("A", 2)
    assert text == head + tokenizer.decode(first) + middle + tokenizer.decode(second) + tail
    assert sample.prompt_ids == first_prompt.token_ids


def test_messages_dropped_by_the_chat_template_are_rejected() -> None:
    """Otherwise the policy would never see a tool's message."""
    template = CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
    )
    tokenizer = byte_tokenizer(chat_template=template)
    engine = Watched(causal(vocab_size=len(tokenizer), max_position_embeddings=512, hidden_size=32), tokenizer)
    errors: list[str] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": "hello"}]
        messages.append(client.say(messages, max_tokens=5))
        errors.append(client.post([*messages, {"role": "tool", "content": "15"}]).json()["error"]["message"])
        client.say([*messages, {"role": "user", "content": "15"}], max_tokens=5)
        return 1.0

    (sample,) = play(agent, [Prompt("hello", (1,))], engine=engine, sampling=SamplingTable(max_tokens=256))
    assert (sample.error, sample.extra["turns"]) == (None, 2)
    assert errors == ["the model's chat template drops tool messages: give them the role user"]


# Repeated requests, and requests that do not continue the conversation


def test_repeated_request_counts_once() -> None:
    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(lambda _: client.say(messages, stop=["="]), range(4)))
        assert all(each == together[0] for each in together)
        later = [*messages, together[0], {"role": "tool", "content": "15;"}]
        second = client.say(later, stop=["="])
        assert client.say(messages, stop=["="]) == together[0], "also when the conversation has gone on"
        assert client.say(later, stop=["="]) == second
        return 1.0

    engine = Watched()
    (sample,) = play(agent, engine=engine)
    assert (sample.error, sample.extra["turns"], len(engine.sampled)) == (None, 2, 2)
    check_learned_is_sampled([sample], engine)


def test_request_of_a_disconnected_client_is_cancelled_and_not_trained_on() -> None:
    engine = Watched()

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        engine.gate.clear()
        client.abandon(messages, stop=["="])
        client.abandon(messages, stop=["="], stream=True)
        engine.gate.set()
        messages += [client.say(messages, stop=["="]), {"role": "tool", "content": "15;"}]
        client.abandon(messages, 0.01, stop=["="])
        client.say(messages, stop=["="])
        return 1.0

    (sample,) = play(agent, engine=engine)
    assert (sample.error, sample.extra["turns"]) == (None, 2)
    check_learned_is_sampled([sample], engine, given_up=True)
    assert not engine.busy


def test_changed_history_is_rejected_with_the_fix() -> None:
    replies: list[Message] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        first = client.say(messages, stop=["="])
        edited = [*messages, {"role": "assistant", "content": "1+1"}, {"role": "tool", "content": "2;"}]
        for body in (edited, [{"role": "user", "content": "1+1="}]):
            reply = client.post(body, stop=["="])
            assert reply.status_code == 400
            replies.append(reply.json()["error"])
        client.say([*messages, {**first, "content": f" {first['content']}\n"}, {"role": "tool", "content": "15;"}])
        return 1.0

    (sample,) = play(agent)
    assert (sample.error, sample.extra["turns"]) == (None, 2), "what was refused costs nothing"
    for error in replies:
        assert error["code"] == "another_conversation"
        assert "send all earlier messages as they were" in error["message"]
        assert "raise agent.conversations" in error["message"]


def test_branches_are_separate_samples_and_trained_on_once() -> None:
    engine = Watched()

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        messages.append(client.say(messages, stop=["="]))
        for tool in ("15;", "16;"):
            client.say([*messages, {"role": "tool", "content": tool}], stop=["="])
        client.say([{"role": "user", "content": "1+1="}])
        return 0.5

    samples = play(agent, engine=engine, conversations=3)
    assert [(s.group, s.index, s.reward, s.extra["turns"]) for s in samples] == [
        (0, 0, 0.5, 2), (0, 0, 0.5, 1), (0, 0, 0.5, 1)
    ]  # fmt: skip
    check_learned_is_sampled(samples, engine)
    first, branch, other = samples
    shared = first.prompt_ids + first.token_ids[: len(turns_of(first)[0][1])]
    assert branch.prompt_ids[: len(shared)] == shared, "what both have in common is read, and learned from in one"
    assert other.prompt_ids == prompt("1+1=").token_ids


# Options of a request


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.2}, "sampling.temperature = 1"), ({"top_p": 0.5}, "sampling.top_p = 1"),
        ({"top_k": 5}, "sampling.top_k = 0"), ({"seed": 1}, "agent.ignore_sampling"),
        ({"logit_bias": {"5": 3.0}}, "agent.ignore_sampling"), ({"n": 2}, "n is 2"),
        ({"min_tokens": 3}, "min_tokens is 3"), ({"tools": [{"type": "function"}]}, "does not render tools"),
    ],
)  # fmt: skip
def test_request_options_that_differ_from_the_recipe_are_rejected(fields: Message, named: str) -> None:
    responses: list[httpx.Response] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        responses.append(client.post(messages, **fields))
        client.say(messages, temperature=1.0, top_p=1, top_k=-1, max_tokens=9, logprobs=True, top_logprobs=2)
        return 1.0

    (sample,) = play(agent)
    assert sample.error is None
    assert responses[0].status_code == 400
    assert named in responses[0].json()["error"]["message"]


def test_ignore_sampling_replaces_request_options_with_the_recipes() -> None:
    def agent(prompt: Prompt, url: str, key: str) -> float:
        Client(url, key).say([{"role": "user", "content": prompt.text}], temperature=0.0, seed=3, top_p=0.1)
        return 1.0

    engine = Watched()
    samples = play(agent, n=8, engine=engine, ignore_sampling=True)
    assert len({sample.token_ids for sample in samples}) > 1
    check_learned_is_sampled(samples, engine)


def test_conversation_has_a_token_budget() -> None:
    results: list[Any] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        reply = client.post(messages, max_tokens=400).json()["choices"][0]
        results.append(reply["finish_reason"])
        messages += [reply["message"], {"role": "tool", "content": "15;"}]
        results.append(client.post(messages).json()["error"])
        return 0.0

    (sample,) = play(agent, sampling=SAMPLING.model_copy(update={"max_tokens": 5}))
    assert (len(sample.token_ids), sample.finish_reason, sample.reward) == (5, "length", 0.0)
    assert results[0] == "length"
    assert results[1]["code"] == "context_length_exceeded"
    assert "sampling.max_tokens = 5" in results[1]["message"]


# Failures


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        (lambda *_: 1 / 0, ItemError("agent_failed", "ZeroDivisionError: division by zero")),
        (lambda *_: sys.exit("no more"), ItemError("agent_failed", "SystemExit: no more")),
        (lambda *_: 1.0, ItemError("agent_failed", "the agent returned without a response of the policy")),
        (lambda *_: time.sleep(SECONDS), ItemError("timeout", "the agent: no response within 0.3 s (agent.timeout)")),
    ],
)  # fmt: skip
def test_failing_agent_fails_only_its_own_sample(agent: Any, error: ItemError) -> None:
    def sometimes_failing(prompt: Prompt, url: str, key: str) -> Any:
        if prompt.text == "5+6=":
            return agent(prompt, url, key)
        return sums_agent.play(prompt, url, key)

    timeout: dict[str, Any] = {"timeout": 0.3} if error.type == "timeout" else {}
    samples = play(sometimes_failing, [PROMPTS[3]] if timeout else PROMPTS, **timeout)
    assert [sample.error for sample in samples[:-1]] == [None] * (len(samples) - 1)
    assert (samples[-1].error, samples[-1].finish_reason, samples[-1].reward) == (error, "error", None)
    assert samples[-1] not in usable([replace(samples[-1], reward=1.0)], grouped=False)


@pytest.mark.parametrize("value", [float("nan"), "1.0", [1.0]])
def test_invalid_reward_is_an_error_and_never_zero(value: Any) -> None:
    def agent(prompt: Prompt, url: str, key: str) -> Any:
        Client(url, key).say([{"role": "user", "content": prompt.text}])
        return value

    (sample,) = play(agent)
    assert sample.error is not None
    assert sample.error.message == f"the agent returned {value!r}, expected a finite number or None"
    assert (sample.reward, len(sample.token_ids) > 0) == (None, True), "what it said until then is kept"


def test_requests_to_a_finished_episode_are_rejected() -> None:
    late_statuses: list[int] = []
    engine = Watched()
    connections: list[tuple[str, str]] = []

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        if prompt.text == "5+6=":  # sends requests with the other agent's key, until its episode is over
            while not connections or late_statuses[-1:] != [410]:
                late_statuses.append(Client(url, connections[0][1]).post(messages).status_code if connections else 0)
            client.say(messages)
            return 0.0
        client.say(messages)
        connections.append((url, key))
        return 1.0

    with player(agent, engine=engine) as agent_player:
        samples = agent_player.play([PROMPTS[0], PROMPTS[3]], 1, "s")
        url, key = connections[0]
        reply = Client(url, key).post([{"role": "user", "content": "1+1="}])
    assert late_statuses[-1] == 410
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert [sample.error for sample in samples] == [None, None]
    assert len(turns_of(samples[0])) == 1


def test_running_request_is_cancelled_when_its_episode_ends() -> None:
    engine = Watched()

    def post(client: Client, messages: Sequence[Message]) -> None:
        with suppress(httpx.TransportError):  # the endpoint may have closed before the request was read
            client.post(messages)

    def agent(prompt: Prompt, url: str, key: str) -> float:
        engine.gate.clear()
        threading.Thread(target=post, args=(Client(url, key), [{"role": "user", "content": prompt.text}])).start()
        threading.Timer(0.2, engine.gate.set).start()
        raise RuntimeError("enough")

    (sample,) = play(agent, engine=engine)
    assert sample.error == ItemError("agent_failed", "RuntimeError: enough")
    assert not engine.busy


def test_interrupted_rollout_leaves_no_requests_behind() -> None:
    """An exception ends a rollout in the middle, as a signal does: agents get an error; the next rollout is correct."""
    engine = Watched()
    notified = threading.Event()

    class Left(Exception):
        pass

    def agent(prompt: Prompt, url: str, key: str) -> float:
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        reply = client.post(messages)
        if reply.status_code != 200:
            assert reply.json()["error"]["code"] == "episode_over"
            notified.set()
        return 1.0

    def broken() -> list[Update]:
        raise Left

    with player(agent, engine=engine) as agent_player:
        engine.step = broken  # type: ignore[method-assign]
        with pytest.raises(Left):
            agent_player.play(PROMPTS, 1, "s")
        del engine.step
        assert notified.wait(SECONDS)
        assert not engine.busy
        samples = agent_player.play(PROMPTS, 1, "s")
    assert [sample.error for sample in samples] == [None] * 4
    check_learned_is_sampled(samples, engine)


KILLED = """
import json, sys, time
from urllib.request import Request, urlopen
url, key, messages = json.loads(sys.argv[1])
body = json.dumps({"model": "any", "messages": messages, "stop": ["="]}).encode()
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
print(json.load(urlopen(Request(url + "/chat/completions", body, headers)))["choices"][0]["message"]["content"])
sys.stdout.flush()
time.sleep(60)
"""


def test_32_agents_with_kills_and_disconnects_lose_and_repeat_no_turn() -> None:
    """Of every four agents one plays normally, one disconnects and retries, one sends each request also as a stream,
    and one is killed or raises in the middle. One of the killed agents runs in a separate process."""
    engine = Watched()
    numbers: dict[tuple[str, str], int] = {}
    lock = threading.Lock()

    def agent(prompt: Prompt, url: str, key: str) -> float:
        with lock:
            number = numbers[prompt.text, key] = len(numbers)
        client, messages = Client(url, key), [{"role": "user", "content": prompt.text}]
        if number == 3:
            arguments = json.dumps([url, key, messages])
            with subprocess.Popen([sys.executable, "-I", "-c", KILLED, arguments], stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline()
                os.kill(child.pid, signal.SIGKILL)
            raise RuntimeError(f"the agent's process ended with {child.returncode}")
        for turn in range(24):
            if number % 4 == 1:
                client.abandon(messages, 0.002 * turn, stop=["="], stream=bool(turn % 2))
            if number % 4 == 2:
                assert client.stream(messages, stop=["="]) == client.say(messages, stop=["="])["content"]
            reply = client.say(messages, stop=["="])
            if number % 4 == 3 and turn == 1:
                raise RuntimeError("killed")
            call = reply["content"].split("+")
            if len(call) != 2 or not all(part.isdigit() for part in call):
                break
            messages += [reply, {"role": "tool", "content": f"{sum(map(int, call))};"}]
        return float(reply["content"] == f"#{prompt.truth}")

    samples = play(agent, PROMPTS, 8, engine=engine, concurrency=32)
    assert len(samples) == len(numbers) == 32
    check_learned_is_sampled(samples, engine, given_up=True)
    failed = [sample for sample in samples if sample.error is not None]
    assert len(failed) == 8
    assert {sample.error.message for sample in failed if sample.error is not None} == {
        "RuntimeError: killed", "RuntimeError: the agent's process ended with -9"
    }  # fmt: skip
    undisturbed = {(s.group, s.index): s for s in play(sums_agent.play, PROMPTS, 8)}
    for sample in samples:
        if sample.error is None:
            assert sample.token_ids == undisturbed[sample.group, sample.index].token_ids, "as if nothing had happened"
            assert sample.reward == undisturbed[sample.group, sample.index].reward
        else:
            token_ids = undisturbed[sample.group, sample.index].token_ids
            assert token_ids[: len(sample.token_ids)] == sample.token_ids
    assert not engine.busy


# Recipes


def test_invalid_agent_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[agent\] runs whole episodes"):
        recipe(agent={"function": "a:b"}, environment={"name": "calculator"})
    with pytest.raises(ConfigError, match="resources set 2"):
        recipe(agent={"function": "a:b"}, resources={"data_parallel": 2})
    file = tmp_path / "mine.py"
    file.write_text("NUMBER = 1\ndef short(prompt): ...\ndef play(prompt, base_url, api_key, bonus=0.0): ...\n")
    for name, options, message in (
        ("nowhere.py:play", {}, "no file nowhere.py"), (f"{file}", {}, "not of the form"),
        (f"{file}:other", {}, "has no attribute 'other'"), (f"{file}:NUMBER", {}, "is a int, expected a function"),
        (f"{file}:short", {}, "cannot be called as"), (f"{file}:play", {"bonis": 1.0}, "unexpected.*'bonis'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            load_agent(AgentTable(function=name, options=options))
    assert load_agent(AgentTable(function=f"{file}:play", options={"bonus": 1.0})) is not None


SMALL: dict[str, Any] = {
    "data": {"world": "sums", "chat": True, "eval_items": 2}, "agent": {"function": "plaudit.worlds.sums_agent:play"},
    "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4, "dump": True},
}  # fmt: skip


def trained(directory: Path, **tables: Any) -> list[tuple[Sample, ...]]:
    """The samples that a run was trained on, by step."""
    tree = recipe(**SMALL, **tables)
    with Run(directory, tree, resume=False, fresh=True) as run:
        RlTraining(tree, run, Silent()).fit()
    dump = Dump(directory / "rollouts")
    return [dump.read(step)[0] for step in (1, 2)]


def test_run_trains_on_its_agents_episodes(tmp_path: Path) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    batches = trained(tmp_path / "run")
    assert [len(samples) for samples in batches] == [8, 8]
    for sample in (sample for samples in batches for sample in samples):
        assert sample.error is None
        assert sample.reward == float(sample.text.endswith(f"#{sample.extra['truth']}"))
        assert sample.extra["turns"] == len(turns_of(sample)) > 1
    assert {thread.name for thread in threading.enumerate()} - threads <= {"log"}, "the endpoint is closed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swapped", "hybrid", "disaggregated", "async"])
def test_every_placement_plays_the_same_episodes(name: str, tmp_path: Path) -> None:
    first, _ = trained(tmp_path / "other", placement={"name": name})
    colocated, _ = trained(tmp_path / "colocated")
    assert [s.token_ids for s in first] == [s.token_ids for s in colocated]
    assert [s.reward for s in first] == [s.reward for s in colocated]


def test_sums_agent_recipe_names_the_agent_of_its_world() -> None:
    loaded = load_recipe(Path("sums-agent"))
    assert isinstance(loaded, RlRecipe)
    assert loaded.agent is not None
    assert load_agent(loaded.agent).__code__ is sums_agent.play.__code__
    assert asyncio.iscoroutinefunction(load_agent(loaded.agent)) is False
