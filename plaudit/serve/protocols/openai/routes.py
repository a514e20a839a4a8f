"""OpenAI's /v1/chat/completions and /v1/completions for a causal LM that is served beside reward models.

A request's prompts are queued like works, and the worker's scheduler batches them with all others. A stream is the
same request with a listener.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.errors import Refused
from plaudit.records import Item, ItemError
from plaudit.reward.reading import Intake, LogprobsReading
from plaudit.serve.http.message import HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.openai import wire
from plaudit.serve.protocols.openai.replies import PreparedRequest, reply, reply_head
from plaudit.serve.protocols.protocol import ProtocolRoutes
from plaudit.serve.protocols.vllm.wire import FieldError
from plaudit.serve.scoring import LOGPROBS_MODEL, ScoringService
from plaudit.serve.workers.jobs import Answer, GenerateJob


class OpenAIRoutes(ProtocolRoutes):
    name = "openai"
    errors = staticmethod(wire.write_error)

    def routes(self) -> list[Route]:
        return [
            self.work("/v1/chat/completions", self.chat, "OpenAI: chat completions of a causal LM"),
            self.work("/v1/completions", self.complete, "OpenAI: text completions of a causal LM"),
        ]

    async def chat(self, request: Request) -> Reply:
        parsed = wire.read_chat(request.fields())
        served, intake = find_writer(self.scoring, parsed.model)
        tokens = await chat_tokens(request, parsed, served, intake)
        remaining = intake.limit - len(tokens)
        return await reply(request, self._prepare(request, parsed, served, [tokens], parsed.most or max(1, remaining)))

    async def complete(self, request: Request) -> Reply:
        parsed = wire.read_completion(request.fields())
        served, intake = find_writer(self.scoring, parsed.model)
        self.scoring.check_count(len(parsed.prompt) * (parsed.n or 1))
        given = [each for each in parsed.prompt if isinstance(each, str)]
        texts = iter(await served.tokenise(given, special=parsed.add_special_tokens))
        rows = [next(texts) if isinstance(each, str) else _checked(intake, each) for each in parsed.prompt]
        for place, row in enumerate(rows):
            if isinstance(row, ItemError) or not row:
                problem = row.message if isinstance(row, ItemError) else "it has no tokens; expected at least one"
                raise FieldError(f"prompt {place}: {problem}", "prompt", getattr(row, "type", "empty"))
        tokens = [row for row in rows if isinstance(row, list)]
        most = wire.SHORT if parsed.max_tokens is None else max(1, parsed.max_tokens)
        decode = intake.tokenizer.decode
        echoes = [each if isinstance(each, str) else decode(each) for each in parsed.prompt] if parsed.echo else ()
        return await reply(request, self._prepare(request, parsed, served, tokens, most, echoes))

    def _prepare(
        self, request: Request, parsed: wire.ChatRequest | wire.CompletionRequest, served: ServedModel,
        prompts: Sequence[list[int]], most: int, echoes: Sequence[str] = (),
    ) -> PreparedRequest:  # fmt: skip
        chat, limit = isinstance(parsed, wire.ChatRequest), served.intake().limit
        for tokens in prompts:
            check_room(len(tokens), most, limit, "messages" if chat else "prompt")
        head = reply_head(request, parsed, model=served.name, version=served.deployment.version)
        sampling, tokenizer = parsed.sampling(most), served.intake().tokenizer
        priority, salt = parsed.queue_priority, parsed.cache_salt

        async def compute(jobs: Sequence[GenerateJob]) -> list[Answer]:
            return (await self.scoring.read(request, served, jobs, priority=priority, salt=salt))[1]

        jobs = [GenerateJob(tokens, sampling) for tokens in prompts]
        return PreparedRequest(parsed, jobs, head, tokenizer, echoes, compute)


def find_writer(scoring: ScoringService, name: str | None) -> tuple[ServedModel, Intake]:
    """Finds a causal LM by its name; the first one if None."""
    if not name and LOGPROBS_MODEL not in scoring.aliases:
        raise HttpError(
            404, "unknown_model", "no served model generates text: serve one with plaudit serve --model NAME=DIR"
        )
    served = scoring.find(name or LOGPROBS_MODEL)
    if not isinstance(served, ServedModel) or served.kind != "logprobs":
        raise HttpError(
            422, "wrong_kind", f"{served.name} is of kind {served.kind} and generates no text: name a causal LM "
            "served without a reward.toml (/v1/models lists it with kind logprobs)",
        )  # fmt: skip
    intake = served.intake()
    assert isinstance(served.reading, LogprobsReading)
    return served, intake


async def chat_tokens(
    request: Request, parsed: wire.ChatRequest, served: ServedModel, intake: Intake
) -> list[int]:  # fmt: skip
    (tokens,) = await served.in_turn(lambda _: [_templated(intake, parsed)], [request.content], len)
    return tokens


def check_room(prompt: int, most: int, limit: int, what: str) -> None:
    if prompt + most > limit:
        # Clients match this message to shorten a prompt and retry.
        raise FieldError(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + most} tokens "
            f"({prompt} in the {what}, {most} in the completion). Please reduce the length of the {what} or "
            "completion.", what, "too_long",
        )  # fmt: skip


def _templated(intake: Intake, parsed: wire.ChatRequest) -> list[int]:
    try:
        intake.refuse_huge(Item(messages=tuple(parsed.messages)))
        parsed.check_template(str(intake.tokenizer.chat_template))
        return intake.templated(parsed.messages, parsed.opening, parsed.variables, parsed.continue_final_message)
    except Refused as error:
        raise FieldError(str(error), "messages", error.type) from None


def _checked(intake: Intake, tokens: list[int]) -> list[int] | ItemError:
    try:
        return intake.tokens(tokens)
    except Refused as error:
        return ItemError(error.type, str(error))
