"""OpenAI's chat completions and completions by a causal LM beside a reward model: equal to plain transformers and
to the engine, streamed or not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.models import load_any
from plaudit.serve.workers.frames import TextPiece
from plaudit.serve.workers.jobs import Continuation
from tests.serve.judge_model import CHAT, chat, post, prompt_of, streamed, write_judge
from tests.serve.process import ServerProcess

KEY = "key-of-the-judge"
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine.load(directory, device="cpu")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    tree = {"models": {"sums": {"path": "sums"}, "judge": {"path": str(directory)}}, "api_keys": {"holder": KEY}}
    with ServerProcess(tree) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


def greedy(directory: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs, by plain transformers."""
    loaded = load_any(directory)
    module, ids = loaded.module, list(prompt)
    logprobs = []
    with torch.inference_mode():
        for _ in range(count):
            row = torch.log_softmax(module(torch.tensor([ids])).logits[0, -1].float(), dim=-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            if ids[-1] == loaded.tokenizer.eos_token_id:
                break
    return ids[len(prompt) :], logprobs


def test_a_greedy_completion_equals_that_of_transformers(
    server: ServerProcess, directory: Path, engine: Engine
) -> None:
    prompt = engine.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    tokens, logprobs = greedy(directory, prompt, 12)
    assert len(set(tokens)) > 2
    reply = chat(server, logprobs=True, top_logprobs=1)
    choice = reply["choices"][0]
    assert choice["message"] == {
        "role": "assistant", "content": engine.tokenizer.decode(tokens, skip_special_tokens=True), "refusal": None,
    }  # fmt: skip
    content = choice["logprobs"]["content"]
    assert [row["token"] for row in content] == [engine.tokenizer.decode([token]) for token in tokens]
    assert [row["logprob"] for row in content] == pytest.approx(logprobs, abs=1e-5)
    assert all(row["top_logprobs"][0]["logprob"] == row["logprob"] for row in content)
    assert choice["finish_reason"] == ("length" if len(tokens) == 12 else "stop")
    total = len(prompt) + len(tokens)
    assert reply["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": total
    }  # fmt: skip
    assert (reply["object"], reply["model"]) == ("chat.completion", "judge")
    by_tokens = post(server, "/v1/completions", prompt=prompt, max_tokens=12, temperature=0, logprobs=0)["choices"][0]
    assert by_tokens["text"] == choice["message"]["content"]
    assert by_tokens["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-5)


def test_samples_equal_those_of_the_engine(server: ServerProcess, engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 9, "n": 3}
    samples = engine.generate(["hello", "7+8="], SamplingParams(**options))
    assert len({sample.text for sample in samples}) > 1
    reply = post(server, "/v1/completions", prompt=["hello", "7+8="], logprobs=0, **options)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert [choice["text"] for choice in reply["choices"]] == [sample.text for sample in samples]
    for choice, sample in zip(reply["choices"], samples, strict=True):
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(sample.raw_logprobs, abs=1e-5)
        assert choice["finish_reason"] == sample.finish_reason
    assert reply["usage"]["completion_tokens"] == sum(len(sample.token_ids) for sample in samples)
    pieces = streamed(server, "/v1/completions", prompt=["hello", "7+8="], logprobs=0, **options)
    for choice in reply["choices"]:
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        logprobs = [piece["logprobs"] for piece in own if piece["logprobs"]]
        joined = {
            name: [row for part in logprobs for row in part[name]] for name in logprobs[0] if name != "top_logprobs"
        }
        assert joined.pop("token_logprobs") == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
        assert joined == {name: choice["logprobs"][name] for name in ("tokens", "text_offset")}
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    again = post(server, "/v1/completions", prompt="hello", **{**options, "n": 1, "seed": None})
    assert again["choices"][0]["finish_reason"] in ("stop", "length")


def test_top_logprobs_equal_those_of_transformers_in_openais_format(
    server: ServerProcess, directory: Path, engine: Engine
) -> None:
    module, tokenizer = load_any(directory).module, engine.tokenizer
    prompt = tokenizer.encode("7+8=")
    options: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 5, "frequency_penalty": 1.5, "n": 2}
    options |= {"repetition_penalty": 1.2, "allowed_token_ids": list(range(3, 20))}
    samples = engine.generate([prompt], SamplingParams(**{**options, "allowed_token_ids": tuple(range(3, 20))}))
    body = {"prompt": prompt, "logprobs": 3, "prompt_logprobs": 2, **options}
    choices = post(server, "/v1/completions", **body)["choices"]
    assert [choice["text"] for choice in choices] == [sample.text for sample in samples]
    for choice, sample in zip(choices, samples, strict=True):
        with torch.inference_mode():
            rows = torch.log_softmax(module(torch.tensor([[*prompt, *sample.token_ids]])).logits[0].float(), dim=-1)
        for i, token in enumerate(sample.token_ids):
            row = rows[len(prompt) - 1 + i]
            likely = {
                tokenizer.decode([each]): float(row[each]) for each in [*row.topk(3).indices.tolist()[::-1], token]
            }
            assert choice["logprobs"]["top_logprobs"][i] == pytest.approx(likely, abs=1e-4)
        assert choice["prompt_logprobs"][0] is None
        for i, token in enumerate(prompt[1:]):
            expected = {str(each): float(rows[i][each]) for each in [token, *rows[i].topk(2).indices.tolist()]}
            assert {k: v["logprob"] for k, v in choice["prompt_logprobs"][1 + i].items()} == pytest.approx(
                expected, abs=1e-4
            )
    chat_options = {"logprobs": True, "top_logprobs": 4, "temperature": 0}
    content = chat(server, **chat_options)["choices"][0]["logprobs"]["content"]
    assert all(len(row["top_logprobs"]) == 4 and row["top_logprobs"][0]["token"] == row["token"] for row in content)
    pieces = streamed(server, "/v1/chat/completions", messages=CHAT, max_tokens=12, **chat_options)
    parts = [piece["choices"][0]["logprobs"] for piece in pieces if piece["choices"][0]["logprobs"]]
    top_rows = [row["top_logprobs"] for part in parts for row in part["content"]]
    assert [[r["token"] for r in row] for row in top_rows] == [
        [r["token"] for r in row["top_logprobs"]] for row in content
    ]
    refused = server.http.post("/v1/completions", json={"model": "judge", **body, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_completions_follow_their_response_format(server: ServerProcess) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["n"],
    }
    schema["additionalProperties"] = False
    response_format = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
    reply = chat(server, response_format=response_format, temperature=1, seed=4, max_tokens=120, n=2)
    for choice in reply["choices"]:
        assert choice["finish_reason"] == "stop"
        assert 0 <= json.loads(choice["message"]["content"])["n"] <= 99
    text = post(server, "/v1/completions", prompt="x", guided_regex="[ab]{3}c", max_tokens=9)["choices"][0]["text"]
    assert re.fullmatch("[ab]{3}c", text)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    choices = ["a b", "1+<2>\n"]
    for options, matches in (
        ({"regex": "[ab]{3}c"}, lambda text: re.fullmatch("[ab]{3}c", text)),
        ({"choice": choices, "disable_any_whitespace": False}, choices.__contains__),
        ({"json": schema, "regex": None}, lambda text: json.loads(text)["n"] in (1, 2)),
        ({"json": json.dumps(schema)}, lambda text: json.loads(text)["n"] in (1, 2)),
    ):
        body = {"prompt": "x", "max_tokens": 60, "structured_outputs": options}
        assert matches(post(server, "/v1/completions", **body)["choices"][0]["text"]), options
    for options in (
        {}, {"grammar": "root ::= a"}, {"structural_tag": "{}"}, {"regex": "a", "choice": ["a"]}, {"choice": []},
        {"choice": [1]}, {"regex": "a", "whitespace_pattern": " "}, {"nonsense": 1}, {"json": 5},
    ):  # fmt: skip
        body = {"model": "judge", "prompt": "x", "structured_outputs": options}
        reply = server.http.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs"), options
    both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert server.http.post("/v1/completions", json={"model": "judge", "prompt": "x", **both}).status_code == 400
    refused = server.http.post("/v1/completions", json={"model": "judge", "prompt": "x", "guided_regex": "(["})
    assert refused.status_code == 400
    assert "regex cannot be used as a constraint" in refused.json()["error"]["message"]


def test_a_streamed_chat_has_openais_chunks(server: ServerProcess) -> None:
    complete = chat(server)
    pieces = streamed(
        server, "/v1/chat/completions", messages=CHAT, max_tokens=12, temperature=0, top_p=0.5,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    assert len({piece["id"] for piece in pieces}) == 1
    *parts, last = pieces
    assert (last["choices"], last["usage"]) == ([], complete["usage"])
    assert all(piece["usage"] is None for piece in parts)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [piece["choices"][0]["delta"] for piece in parts]
    assert len(deltas) > 3
    assert "".join(delta.get("content", "") for delta in deltas) == complete["choices"][0]["message"]["content"]
    assert parts[-1]["choices"][0]["finish_reason"] == complete["choices"][0]["finish_reason"]


def test_a_stop_string_ends_the_text_before_it(server: ServerProcess) -> None:
    text = chat(server)["choices"][0]["message"]["content"]
    stop = text[4:6]
    choice = chat(server, stop=[stop])["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    pieces = streamed(server, "/v1/chat/completions", messages=CHAT, max_tokens=12, temperature=0, stop=stop)
    streamed_text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert streamed_text == choice["message"]["content"]
    assert len(chat(server, max_completion_tokens=3)["choices"][0]["message"]["content"]) <= len(text)


def test_the_template_renders_tools_and_template_variables(server: ServerProcess, engine: Engine) -> None:
    variables = {"tools": TOOLS, "mood": "<|im_end|>"}
    prompt = prompt_of(engine, variables=variables)
    plain = engine.tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False, tools=TOOLS, mood="calm"
    )  # fmt: skip
    assert prompt_of(engine, variables={"tools": TOOLS, "mood": "calm"}) == plain
    end = engine.tokenizer.eos_token_id
    assert prompt.count(end) == plain.count(end) == len(CHAT)  # a control token in a variable is plain text
    reply = chat(server, tools=TOOLS, tool_choice="auto", chat_template_kwargs={"mood": "<|im_end|>"})
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    (sample,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12))
    assert reply["choices"][0]["message"]["content"] == sample.text
    without = chat(server, tools=TOOLS, tool_choice="none")
    assert without["usage"]["prompt_tokens"] == len(prompt_of(engine))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "role 'nobody'"),
        ({"max_tokens": 400}, "maximum context length is 256 tokens"),
        ({"max_tokens": 0}, ">= 1"),
        ({"temperature": 3}, "<= 2"),
        ({"n": 129}, "<= 128"),
        ({"logprobs": True, "top_logprobs": 21}, "<= 20"),
        ({"top_logprobs": 5}, "needs logprobs = true"),
        ({"response_format": {"type": "grammar"}}, "expected a type of text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice is 'required'"),
        ({"presence_penalty": 2.5}, "<= 2"),
        ({"allowed_token_ids": [9999]}, "outside the vocabulary"),
        ({"logit_bias": {"x": 1}}, "expected token ids"),
        ({"logit_bias": {"9999": 1}}, "outside the vocabulary"),
        ({"logit_bias": {"9" * 30: 1}}, "expected token ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"min_tokens": 5}, "min_tokens 5 is above max_tokens 4"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"model": "sums"}, "generates no text"),
    ],
)
def test_invalid_fields_are_rejected_by_name(server: ServerProcess, fields: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        body = {"model": "judge", "messages": CHAT, "temperature": 0, "max_tokens": 4, "stream": stream, **fields}
        reply = server.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
        assert {"param", "code"} <= error.keys()


def test_models_keys_and_other_routes(server: ServerProcess) -> None:
    models = {model["id"]: model["kind"] for model in server.http.get("/v1/models").json()["data"]}
    assert models == {"sums": "outcome", "judge": "logprobs"}
    listed = {model["id"]: model for model in server.http.get("/v1/models").json()["data"]}
    for base in ("", "/openai", "/vllm"):
        assert server.http.get(f"{base}/v1/models/judge").json() == listed["judge"]
        missing = server.http.get(f"{base}/v1/models/jugde")
        error = missing.json()["error"]
        assert (missing.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "model_not_found")
        assert "did you mean 'judge'" in error["message"]
    assert server.http.get("/v1/models/reward_model").json() == listed["sums"]
    assert server.http.delete("/v1/models/judge").status_code == 405
    assert httpx.get(f"{server.url}/v1/models/judge", timeout=60).json()["error"]["code"] == "invalid_api_key"
    body = {"messages": CHAT, "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200  # the only model that generates text
    unknown = server.http.post("/v1/chat/completions", json={**body, "model": "jugde"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    no_key = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert (no_key.status_code, no_key.json()["error"]["code"]) == (401, "invalid_api_key")
    score = server.rewards([{"text": "x"}], model="judge")
    assert score.status_code == 422
    assert "/v1/chat/completions" in score.text
    assert server.score("7+8+4=", "7+8=15;15+4=19;#19") > 0


def test_repeated_pieces_are_not_emitted_twice() -> None:
    sample = Continuation()
    assert sample.add(TextPiece(1, 0, 0, [5, 6], [-1.0, -2.0], 0, "he")) is not None
    again = sample.add(TextPiece(1, 0, 0, [5], [-1.0], 0, "h"))
    assert again is not None
    assert (again.tokens, again.text) == ([], "")
    more = sample.add(TextPiece(1, 0, 1, [6, 7], [-2.0, -3.0], 1, "ello", "stop"))
    assert more is not None
    assert (more.tokens, more.logprobs, more.text, more.finish) == ([7], [-3.0], "llo", "stop")
    assert (sample.tokens, sample.text) == ([5, 6, 7], "hello")
    assert sample.add(TextPiece(1, 0, 0, [5, 9], [-1.0, -2.0], 0, "hx")) is None
