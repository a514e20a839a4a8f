"""Fields of requests: what vLLM's clients send works or is refused by name, and null is the same as absent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from plaudit.config.search import load_search
from plaudit.core import Engine
from plaudit.models import load_tokenizer
from plaudit.models.chat.chat import render_chat
from plaudit.search.search import Search
from tests.serve.process import ServerProcess

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
WRITER = "org/policy"
PROMPT, ANSWER = "7+8+4=", "7+8=15;15+4=19;#19"
GREEDY = {"model": WRITER, "temperature": 0, "max_tokens": 24}
MESSAGES = [{"role": "user", "content": "7+8+4="}, {"role": "assistant", "content": "7+8=1"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    models = ("--model", "sums", "--model", "sums-steps", "--model", f"{WRITER}=sums-policy")
    with ServerProcess(None, *models) as server:
        yield server


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("sums-policy", device="cpu")


def completed(server: ServerProcess, **fields: Any) -> Any:
    reply = server.http.post(COMPLETE, json={"prompt": PROMPT, **GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(reply: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_stop_strings_are_kept_on_request_and_the_reply_says_what_stopped(server: ServerProcess) -> None:
    (without,) = completed(server, stop=[";"])["choices"]
    assert (without["text"], without["finish_reason"], without["stop_reason"]) == ("7+8=15", "stop", ";")
    (kept,) = completed(server, stop=";", include_stop_str_in_output=True)["choices"]
    assert (kept["text"], kept["stop_reason"]) == ("7+8=15;", ";")
    (token,) = load_tokenizer("sums").encode(";", add_special_tokens=False)
    (by_token,) = completed(server, stop_token_ids=[token])["choices"]
    assert (by_token["text"], by_token["stop_reason"]) == ("7+8=15", token)
    (by_token,) = completed(server, stop_token_ids=[token], include_stop_str_in_output=True)["choices"]
    assert (by_token["text"], by_token["stop_reason"]) == ("7+8=15;", token)
    (ended,) = completed(server)["choices"]
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == (ANSWER, "stop", None)
    (cut,) = completed(server, max_tokens=3)["choices"]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", None)


def test_token_ids_are_returned_and_name_tokens(server: ServerProcess, engine: Engine) -> None:
    prompt = engine.tokenizer.encode(PROMPT)
    tokens = [*engine.tokenizer.encode(ANSWER, add_special_tokens=False), engine.tokenizer.eos_token_id]
    options = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = completed(server, **options, logprobs=1)["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (tokens, prompt)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    assert [[*row][-1] for row in choice["logprobs"]["top_logprobs"]] == choice["logprobs"]["tokens"]
    asked = {**GREEDY, **options, "messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
    chat = server.http.post(CHAT, json=asked).json()
    assert chat["prompt_token_ids"] == prompt
    assert chat["choices"][0]["token_ids"] == tokens
    assert [each["token"] for each in chat["choices"][0]["logprobs"]["content"]] == choice["logprobs"]["tokens"]
    assert "token_ids" not in completed(server)["choices"][0]


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_stream_has_token_ids_and_the_stop_reason(server: ServerProcess, engine: Engine, path: str) -> None:
    asked = {**GREEDY, "stream": True, "return_token_ids": True, "stop": ";", "include_stop_str_in_output": True}
    form = {"prompt": PROMPT} if path == COMPLETE else {"messages": [{"role": "user", "content": PROMPT}]}
    chunks = events(server.http.post(path, json={**asked, **form}))
    choices = [chunk["choices"][0] for chunk in chunks]
    tokens = [token for choice in choices for token in choice.get("token_ids", ())]
    assert tokens == engine.tokenizer.encode("7+8=15;", add_special_tokens=False)
    pieces = [choice["text"] if path == COMPLETE else choice["delta"].get("content", "") for choice in choices]
    assert "".join(pieces) == "7+8=15;"
    first = choices[0] if path == COMPLETE else chunks[0]
    assert first["prompt_token_ids"] == engine.tokenizer.encode(PROMPT)
    assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in chunks) == 1
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", ";")


@pytest.mark.parametrize("prompt", [PROMPT, "tokens"])
def test_echo_has_the_prompts_text_and_log_probs(server: ServerProcess, engine: Engine, prompt: str) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    form = {"prompt": PROMPT if prompt == PROMPT else ids}
    text = PROMPT if prompt == PROMPT else engine.tokenizer.decode(ids)
    (both,) = completed(server, **form, echo=True, logprobs=1, max_tokens=3)["choices"]
    (alone,) = completed(server, **form, echo=True, logprobs=1, max_tokens=0)["choices"]
    assert (both["text"], alone["text"]) == (f"{text}7+8", text)
    whole = [*ids, *engine.tokenizer.encode("7+8", add_special_tokens=False)]
    expected = engine.logprobs([whole])[0].tolist()
    for choice, count in ((both, len(whole)), (alone, len(ids))):
        rows = choice["logprobs"]
        assert rows["tokens"] == [engine.tokenizer.decode([token]) for token in whole[:count]]
        assert (rows["token_logprobs"][0], rows["top_logprobs"][0]) == (None, None)
        assert rows["token_logprobs"][1:] == pytest.approx(expected[: count - 1], abs=1e-5)
        tops = [max(top.values()) for top in rows["top_logprobs"][1:]]
        assert all(top >= own - 1e-6 for top, own in zip(tops, rows["token_logprobs"][1:], strict=True))
    (streamed,) = {"".join(c["choices"][0]["text"] for c in events(server.http.post(
        COMPLETE, json={**GREEDY, **form, "echo": True, "stream": True, "max_tokens": 3}
    )))}  # fmt: skip
    assert streamed == f"{text}7+8"


def test_prompt_log_probs_have_ranks_and_a_chats_are_beside_the_choices(server: ServerProcess, engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    rows = engine.score([ids], positions=[range(len(ids) - 1)], columns=list(range(len(engine.tokenizer))))[0]
    ranks = [int((row >= row[token]).sum()) for row, token in zip(rows, ids[1:], strict=True)]
    for count in (0, 2):
        (choice,) = completed(server, prompt_logprobs=count)["choices"]
        asked = {**GREEDY, "messages": [{"role": "user", "content": PROMPT}], "prompt_logprobs": count}
        chat = server.http.post(CHAT, json=asked).json()
        assert chat["prompt_logprobs"] == choice["prompt_logprobs"]
        assert "prompt_logprobs" not in chat["choices"][0]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [row[str(token)]["rank"] for row, token in zip(others, ids[1:], strict=True)] == ranks
        assert all(set(range(1, count + 1)) <= {each["rank"] for each in row.values()} for row in others)


def test_last_message_is_continued(server: ServerProcess, engine: Engine) -> None:
    expected = engine.tokenizer.encode(PROMPT + "7+8=1")
    asked = {**GREEDY, "messages": MESSAGES, "continue_final_message": True, "return_token_ids": True}
    for options in ({}, {"add_generation_prompt": False}, {"extra_body": {"continue_final_message": True}}):
        reply = server.http.post(CHAT, json={**asked, **options}).json()
        assert reply["prompt_token_ids"] == expected
        assert reply["choices"][0]["message"]["content"] == ANSWER.removeprefix("7+8=1")
    both = server.http.post(CHAT, json={**asked, "add_generation_prompt": True})
    assert both.status_code == 400
    assert "both" in both.json()["error"]["message"]
    tokens = {"model": WRITER, "messages": MESSAGES, "continue_final_message": True}
    assert server.http.post("/tokenize", json=tokens).json()["tokens"] == expected


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("content", ["So ", "So", "a <|im_end|> b", " ", "<|im_"])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("m['content']", "m['content'] | trim")])
def test_continued_message_is_rendered_as_transformers_does(content: str, template: str) -> None:
    tokenizer = load_tokenizer("sums")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_start|>"), AddedToken("<|im_end|>")]})
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": content}]
    ids = render_chat(tokenizer, messages, continue_final_message=True)
    if content not in (" ", "a <|im_end|> b"):
        (text,) = [tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)]
        assert ids == tokenizer.encode(text, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 1, "the last message is open, and its text is no control token"


@pytest.mark.parametrize(
    "field",
    [
        "lora_request", "documents", "logprob_token_ids", "thinking_token_budget", "guided_choice", "suffix",
        "nonsense", "truncate_prompt_tokens", "prompt_embeds", "repetition_detection", "use_beam_search",
        "vllm_xargs", "extra_body",
    ],
)  # fmt: skip
def test_field_without_effect_is_refused_by_name_unless_null(server: ServerProcess, field: str) -> None:
    asked = {"prompt": PROMPT, **GREEDY, "max_tokens": 1}
    value = {"other": 1} if field in ("extra_body", "vllm_xargs") else 5
    reply = server.http.post(COMPLETE, json={**asked, field: value})
    assert reply.status_code == 400
    assert field in reply.json()["error"]["message"]
    assert server.http.post(COMPLETE, json={**asked, field: None}).status_code == 200


def test_values_that_change_nothing_are_accepted(server: ServerProcess) -> None:
    completed(
        server, max_tokens=1, use_beam_search=False, length_penalty=1.0, skip_special_tokens=True, bad_words=[],
        spaces_between_special_tokens=True, user="a", metadata={"a": "b"}, thinking_token_budget=-1, suffix="",
        priority=0, session_id="s", request_id="mine", cache_salt="pepper",
    )  # fmt: skip
    assert completed(server, max_tokens=1, request_id="mine")["id"] == "cmpl-mine"
    chat = {**GREEDY, "messages": MESSAGES[:1], "parallel_tool_calls": True, "echo": False, "store": False}
    assert server.http.post(CHAT, json=chat).status_code == 200


def test_variable_that_the_template_does_not_use_is_refused(server: ServerProcess) -> None:
    for name, value in (("documents", [{"text": "a"}]), ("reasoning_effort", "low")):
        reply = server.http.post(CHAT, json={**GREEDY, "messages": MESSAGES[:1], name: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == name


ROUTES: dict[str, dict[str, Any]] = {
    "/classify": {"input": "7+8="}, "/pooling": {"input": "7+8="}, "/v1/embeddings": {"input": "7+8="},
    "/score": {"queries": "a", "documents": ["b"]}, "/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}, "/v1/rewards": {"items": [{"tokens": [5]}]},
    "/predict": {"inputs": "a"}, "/tei/rerank": {"query": "a", "texts": ["b"]},
    "/tei": {"inputs": "a", "parameters": {}},
    "/infinity/classify": {"input": ["a"]}, "/infinity/rerank": {"query": "a", "documents": ["b"]},
    "/sglang/classify": {"text": "a"}, "/sglang/v1/rerank": {"query": "a", "documents": ["b"]},
    COMPLETE: {"prompt": "7+8=", "max_tokens": 1, "seed": 1, "model": WRITER},
    CHAT: {"messages": MESSAGES, "max_tokens": 1, "seed": 1, "model": WRITER},
}  # fmt: skip
OPTIONAL = (
    "model", "user", "add_generation_prompt", "add_special_tokens", "continue_final_message", "chat_template",
    "encoding_format", "embed_dtype", "dimensions", "truncate_prompt_tokens", "truncation_side", "priority", "top_n",
    "max_tokens_per_doc", "max_tokens_per_query", "return_documents", "return_token_strs", "raw_scores", "truncate",
    "truncation_direction", "return_text", "n", "stop", "stream", "stream_options", "logprobs", "echo", "best_of",
    "steps", "cache", "include_stop_str_in_output", "return_token_ids", "structured_outputs", "tools", "search",
    "instruct", "apply_softmax",
)  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_null_is_the_same_as_absent(server: ServerProcess, path: str) -> None:
    strict = {"/v1/rewards": ("steps", "cache", "truncate", "priority"), "/tei": ()}
    names = strict.get(path, OPTIONAL)
    plain = server.http.post(path, json=ROUTES[path])
    with_nulls = server.http.post(path, json={**dict.fromkeys(names), **ROUTES[path]})
    assert plain.status_code == with_nulls.status_code == 200, with_nulls.text
    differ = ("id", "created", "request_id", "usage", "meta_info")
    replies = [
        [{k: v for k, v in each.items() if k not in differ} for each in (body if isinstance(body, list) else [body])]
        if not (isinstance(body, list) and body and isinstance(body[0], list)) else body
        for body in (plain.json(), with_nulls.json())
    ]  # fmt: skip
    assert replies[0] == replies[1]


@pytest.mark.parametrize("path", ["/remote_rm", "/get_reward"])
def test_query_selects_the_model_or_is_refused(path: str) -> None:
    body: dict[str, Any] = (
        {"prompt": "7+8=", "response": "#15"} if path == "/remote_rm" else {"query": ["<bos>7+8=#15<eos>"]}
    )
    with ServerProcess(None, "--model", "sums", "--model", "other=sums-steps") as server:
        plain, chosen = server.http.post(path, json=body), server.http.post(f"{path}?model=other", json=body)
        assert plain.status_code == chosen.status_code == 200, chosen.text
        assert plain.json() != chosen.json()
        assert server.http.post(f"{path}?model=sums", json=body).json() == plain.json()
        assert server.http.post(f"{path}?model=nobody", json=body).status_code == 404
        unknown = server.http.post(f"{path}?modle=other", json=body)
        assert unknown.status_code == 422
        assert "did you mean 'model'?" in unknown.text
        assert server.http.post("/classify?model=other", json={"input": "a"}).status_code in (400, 422)
        assert server.http.post("/v1/rewards?model=other", json={"items": [{"tokens": [5]}]}).status_code == 422


def test_names_with_slashes(server: ServerProcess) -> None:
    assert server.http.get(f"/v1/models/{WRITER}").json()["id"] == WRITER
    with ServerProcess(None, "--model", "hub/sums=sums") as other:
        assert other.http.post("/classify", json={"model": "hub/sums", "input": "a"}).json()["model"] == "hub/sums"
        assert other.http.get("/v2/models/hub/sums/ready").json() == {"name": "hub/sums", "ready": True}
        assert other.http.get("/v2/models/hub/sums").json()["name"] == "hub/sums"


def test_health_has_the_bodies_of_kserve(server: ServerProcess) -> None:
    assert server.http.get("/v2/health/live").json() == {"live": True}
    assert server.http.get("/v2/health/ready").json() == {"ready": True}
    assert server.http.get("/v2/models/sums/ready").json() == {"name": "sums", "ready": True}


def test_another_task_of_inference_clients_gets_no_classification(server: ServerProcess) -> None:
    for base in ("/tei", "/tei/", "/"):
        classes = server.http.post(base, json={"inputs": "7+8=", "parameters": {"function_to_apply": "none"}})
        assert classes.json()[0][0]["label"] == "reward"
        for body in (
            {"inputs": "7+8="}, {"inputs": "7+8=", "normalize": True},
            {"inputs": "7+8=", "parameters": {"max_new_tokens": 4}},
            {"inputs": "a", "parameters": {}, "stream": False},
            {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        ):  # fmt: skip
            assert server.http.post(base, json=body).status_code == 422, body


@pytest.mark.parametrize("method", ["best-of-n", "rebase"])
def test_search_over_the_server_finds_the_paths_of_a_local_search(server: ServerProcess, method: str) -> None:
    flags: dict[str, Any] = {"search.method": method, "search.width": 4, "data.limit": 3}
    remote = {"engine.name": "openai", "engine.url": server.url, "engine.model": WRITER}
    found = []
    for options in (flags, {**flags, **remote}):
        search = Search(load_search(None, options))
        outcomes = sorted(search.run(search.questions()), key=lambda outcome: outcome.question.index)
        found.append([[(n.parent, n.tokens, n.text, n.state) for n in outcome.tree.nodes] for outcome in outcomes])
        assert any(outcome.answer is not None for outcome in outcomes)
        search.close()
    assert found[0] == found[1]
