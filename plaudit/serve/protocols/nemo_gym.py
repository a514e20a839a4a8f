"""NeMo Gym's resources server, limited to what an agent needs to get rewards.

POST /seed_session, /close_session   {} or {"resources_session_id", ...} -> {} or {"resources_session_id"}
POST /verify    {"responses_create_params": {"input": "..." or [messages]}, "response": {"output": [...]}, ...}
                -> the same fields and {"reward": 0.73}

A response's `output` is OpenAI's list of items: the model's messages, reasoning and calls, and the tools' outputs. The
server is stateless: a session is only a name. A response that cannot be scored is an error, never the reward 0.
"""

from __future__ import annotations

from typing import Any

import msgspec

from plaudit.records import Item
from plaudit.serve.http.message import HttpError, Reply, Request, Route, convert
from plaudit.serve.protocols.protocol import ProtocolRoutes
from plaudit.serve.scoring import REWARD_MODEL

TRUTHS = ("truth", "expected_answer", "ground_truth", "answer")  # fields of its data sets with the reference answer
TEXTS = ("input_text", "output_text", "text")


class _Params(msgspec.Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


class _Verify(msgspec.Struct):
    responses_create_params: _Params
    response: _Output


class NemoGymRoutes(ProtocolRoutes):
    name = "nemo-gym"

    def routes(self) -> list[Route]:
        return [
            self.work("/seed_session", self.session, "NeMo Gym: begin an episode; stores nothing"),
            self.work("/close_session", self.session, "NeMo Gym: end an episode"),
            self.work("/verify", self.verify, "NeMo Gym: the reward of a response"),
        ]

    @staticmethod
    def errors(error: HttpError, request_id: str) -> Reply:
        """FastAPI's shape."""
        status = 422 if error.type == "invalid_json" else error.status  # the status FastAPI uses
        return error.shaped({"detail": str(error)}, request_id, status)

    async def session(self, request: Request) -> Reply:
        name = request.fields().get("resources_session_id")
        return Reply.json({} if name is None else {"resources_session_id": name})

    async def verify(self, request: Request) -> Reply:
        fields = request.fields()
        item = read_item(fields)
        scored = await self.scoring.score(request, self.scoring.find(REWARD_MODEL), [item])
        (value,) = self.scoring.values(scored.results, "response")
        return Reply.json({**fields, "reward": value})


def read_item(fields: dict[str, Any]) -> Item:
    """Separates prompt and response if the response is one text, so that rules can read it and prompts are shared."""
    request = convert(fields, _Verify)
    params = request.responses_create_params
    prompt = [{"role": "system", "content": params.instructions}] if params.instructions else []
    if isinstance(params.input, str):
        prompt.append({"role": "user", "content": params.input})
    else:
        prompt += _messages(params.input, "responses_create_params.input")
    output = _messages(request.response.output, "response.output")
    truth = next((fields[name] for name in TRUTHS if fields.get(name) is not None), None)
    try:
        if len(output) == 1 and set(output[0]) == {"role", "content"} and output[0]["role"] == "assistant":
            return Item(prompt=tuple(prompt), response=output[0]["content"], truth=truth)
        return Item(messages=(*prompt, *output), truth=truth)
    except ValueError as error:
        raise HttpError(422, "invalid_request", str(error)) from None


def _messages(items: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Converts OpenAI's items to chat messages. Reasoning is not scored."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}[{place}]")})
            case "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments")}
                calls = [{"id": item.get("call_id"), "type": "function", "function": call}]
                if messages and "tool_calls" in messages[-1]:
                    messages[-1]["tool_calls"] += calls  # calls of one turn
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            case "function_call_output":
                text = _text(item.get("output"), f"{where}[{place}]")
                messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
            case "reasoning":
                pass
            case other:
                raise HttpError(
                    422, "unsupported_form", f"{where}[{place}] is a {str(other)[:40]!r}; expected messages, "
                    "function calls, their outputs or reasoning",
                )  # fmt: skip
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in TEXTS]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise HttpError(422, "unsupported_form", f"{where} has content that is not text; send only text")
    return "".join(map(str, texts))
