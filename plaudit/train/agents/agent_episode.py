"""The conversations of an agent with the policy in one episode, and which request continues which conversation.

Everything here runs on the endpoint's event loop, unless stated otherwise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.core.sequence import Update
from plaudit.errors import PlauditError
from plaudit.models import render_chat
from plaudit.records import ItemError, Likely, Prompt, Sample
from plaudit.serve.http.message import HttpError
from plaudit.serve.protocols.vllm.wire import FieldError
from plaudit.serve.workers.frames import TextPiece
from plaudit.train.agents.observation import ObservationEncoder
from plaudit.train.agents.transcript import Transcript
from plaudit.train.agents.turn_driver import PendingTurn

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """The content of a request.

    variables  what the chat template reads besides messages: tools
    ending     the fields that determine where the answer ends, or its format
    """

    messages: tuple[Message, ...]
    variables: Mapping[str, Any]
    ending: tuple[Any, ...]

    @classmethod
    def of(cls, messages: Sequence[Message], variables: Mapping[str, Any], ending: Sequence[Any]) -> ChatTurn:
        """Fields without a value, which clients send back, are left out; templates always read the content."""
        kept = [
            {name: value for name, value in message.items() if value is not None or name == "content"}
            for message in messages
        ]
        return cls(tuple(kept), variables, tuple(ending))

    def continues(self, other: ChatTurn, answer: str) -> bool:
        """Whether it begins with the other's messages and the answer to them. Whitespace around an answer is ignored:
        some clients strip it, and the policy continues from its own tokens anyway."""
        size = len(other.messages)
        if len(self.messages) <= size or self.messages[:size] != other.messages or self.variables != other.variables:
            return False
        reply = self.messages[size]
        return reply.get("role") == "assistant" and _text(reply).strip() == answer.strip() and not _calls(reply)


@dataclass(eq=False)
class AgentTurn:
    """A request and its answer, however many times it is sent.

    context  what the policy reads; known before the answer
    answer   the sample, or an HttpError
    clients  requests that wait for it: without one it is cancelled
    """

    request: ChatTurn
    transcript: Transcript
    before: AgentTurn | None
    answer: asyncio.Future[Sample]
    number: int
    context: list[int] = field(default_factory=list)
    read: tuple[int, ...] = ()
    clients: int = 0
    work: asyncio.Task[None] | None = None
    pending: PendingTurn | None = None
    end: int = 0  # of its answer, in the transcript's tokens
    pieces: list[TextPiece] = field(default_factory=list)  # of a stream, so far
    listeners: list[Callable[[TextPiece], None]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.answer.result().text

    def listen(self, listener: Callable[[TextPiece], None]) -> None:
        """Call the listener with all pieces so far and all later ones."""
        for piece in self.pieces:
            listener(piece)
        self.listeners.append(listener)

    def hear(self, update: Update) -> None:
        self._tell(list(update.token_ids), list(update.raw_logprobs), update.text, "", list(update.top_logprobs))

    def end_stream(self, sample: Sample) -> None:
        """Send what remains of the sample, or all of it."""
        at, begin = self._streamed
        self._tell(
            list(sample.token_ids[at:]), list(sample.raw_logprobs[at:]), sample.text[begin:], sample.finish_reason,
            list((sample.top_logprobs or ())[at:]), sample.stop,
        )  # fmt: skip

    @property
    def _streamed(self) -> tuple[int, int]:
        """The numbers of tokens and characters sent so far."""
        return sum(len(piece.tokens) for piece in self.pieces), sum(len(piece.text) for piece in self.pieces)

    def _tell(
        self, tokens: list[int], logprobs: list[float], text: str, finish: str, top: list[Likely], stop: str = ""
    ) -> None:
        at, begin = self._streamed
        self.pieces.append(TextPiece(0, 0, at, tokens, logprobs, begin, text, finish, top, stop=stop))
        for listener in self.listeners:
            listener(self.pieces[-1])


class AgentEpisode:
    """One call of the agent. Its requests have the API key `key`."""

    def __init__(self, prompt: Prompt, group: int, index: int, key: str, conversations: int) -> None:
        self.prompt = prompt
        self.group = group
        self.index = index
        self.key = key
        self.most = conversations
        self.transcripts: list[Transcript] = []
        self.turns: list[AgentTurn] = []  # answered or in progress
        self.over = False

    @property
    def name(self) -> str:
        return f"{self.group}-{self.index}"

    # A request

    def claim(self, request: ChatTurn) -> AgentTurn:
        """The turn that answers a request: the same for a repeated request, a new one for others."""
        for turn in self.turns:
            if turn.request == request:
                return turn
        before = self._before(request)
        if before is not None and self._last(before.transcript) is before:
            transcript = before.transcript
        else:  # a branch or another conversation: a prefix shared with one is only read here, and trained on there
            if len(self.transcripts) >= self.most:
                raise self._refused(request)
            transcript = Transcript()
            self.transcripts.append(transcript)
        number = 1 + max((t.number for t in self.turns if t.transcript is transcript), default=-1)
        answer: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        turn = AgentTurn(request, transcript, before, answer, number)
        self.turns.append(turn)
        return turn

    def tokenise(self, turn: AgentTurn, encoder: ObservationEncoder, positions: int, budget: int) -> None:
        """What the policy reads for this turn, tokenising only messages that it has not read. Runs in any thread."""
        request, before = turn.request, turn.before
        try:
            if before is None:
                new = render_chat(encoder.tokenizer, request.messages, True, variables=request.variables)
            else:
                messages = request.messages[len(before.request.messages) + 1 :]
                last = before.transcript.tokens[before.end - 1]
                new = list(encoder.messages(messages, last=last, variables=request.variables))
        except (PlauditError, RecursionError) as error:
            raise FieldError(str(error) or "a message is nested too deeply", "messages", "bad_messages") from None
        transcript = turn.transcript
        if before is not None and transcript is before.transcript:
            turn.read = tuple(new)
        else:
            shared = [] if before is None else [*before.transcript.prompt_ids, *before.transcript.tokens[: before.end]]
            transcript.prompt_ids = (*shared, *new)
            transcript.budget = min(budget, positions - len(transcript.prompt_ids))
        turn.context = [*transcript.context, *turn.read]
        if transcript.left <= len(turn.read):
            raise FieldError(
                f"This model's maximum context length is reached: the conversation may have {transcript.budget} tokens "
                f"after its first {len(transcript.prompt_ids)} (sampling.max_tokens = {budget}, and the model has "
                f"{positions} positions), and {len(transcript.tokens) + len(turn.read)} are used", "messages",
                "too_long",
            )  # fmt: skip

    def left(self, turn: AgentTurn) -> int:
        return turn.transcript.left - len(turn.read)

    def complete(self, turn: AgentTurn, sample: Sample) -> None:
        if turn not in self.turns or turn.answer.done():
            return  # no client waited any more
        if sample.finish_reason in ("abort", "error"):
            error = sample.error or ItemError("aborted", "the engine gave it up")
            self.drop(turn, HttpError(500, error.type, error.message))
            return
        turn.transcript.add(turn.read, sample)
        turn.end = len(turn.transcript.tokens)
        turn.end_stream(sample)
        turn.answer.set_result(sample)

    def drop(self, turn: AgentTurn, why: HttpError) -> None:
        """Remove a failed turn, as if it had not been requested."""
        self.turns.remove(turn)
        if turn.work is not None:
            turn.work.cancel()
        if not turn.transcript.turns:
            self.transcripts.remove(turn.transcript)
        if not turn.answer.done():
            turn.answer.set_exception(why)
            turn.answer.exception()  # marks the error as retrieved, even if no client waits

    # Inside

    def _before(self, request: ChatTurn) -> AgentTurn | None:
        """The turn that a request continues: of several the longest."""
        known = [turn for turn in self.turns if turn.answer.done() and request.continues(turn.request, turn.text)]
        return max(known, key=lambda turn: len(turn.request.messages), default=None)

    def _last(self, transcript: Transcript) -> AgentTurn:
        """The last turn, finished or in progress."""
        return max((turn for turn in self.turns if turn.transcript is transcript), key=lambda turn: turn.number)

    def _refused(self, request: ChatTurn) -> FieldError:
        open_ones = [turn for turn in self.turns if not turn.answer.done()]
        why = "while another is in progress" if open_ones else "which does not continue an earlier one"
        return FieldError(
            f"a request {why} would start conversation {len(self.transcripts) + 1} of this episode, and "
            f"agent.conversations = {self.most}: send all earlier messages as they were, with the answers and the same "
            "tools, or raise agent.conversations",
            "messages", "another_conversation",
        )  # fmt: skip


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _calls(message: Message) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call"))
