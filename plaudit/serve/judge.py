"""An LLM judge that our engine runs: turns items into prompts for a worker, and its answers into scores."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import JudgeTable
from plaudit.errors import ModelError, Refused, RequestError
from plaudit.models import render_chat
from plaudit.records import Item, ItemError, Score
from plaudit.reward.judges.judge import Judge, generated_answer
from plaudit.reward.work import ModelInfo
from plaudit.serve.workers.frames import Sampling
from plaudit.serve.workers.jobs import Continuation, GenerateJob


class JudgeReading:
    """The counterpart of OutcomeReading and ProcessReading for models that answer with text."""

    def __init__(self, table: JudgeTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> None:
        if not facts.causal:
            raise ModelError(f"{facts.name} cannot be a judge: it has no language model head and generates no text")
        self.facts = facts
        self.limit = facts.max_positions - table.max_tokens
        if self.limit < 1:
            raise ModelError(
                f"max_tokens = {table.max_tokens} leaves no space for a prompt in {facts.max_positions} "
                "positions; set it lower"
            )
        self._table = table
        self._judge = Judge(table)
        self._tokenizer = tokenizer

    def prepare(self, item: Item) -> GenerateJob:
        conversation = self._judge.messages(item)
        try:
            tokens = render_chat(self._tokenizer, conversation, add_generation_prompt=True)
        except (RequestError, ModelError) as error:
            raise Refused("bad_messages", str(error)) from None
        if len(tokens) > self.limit:
            raise Refused("too_long", f"the judge's prompt has {len(tokens)} tokens; at most {self.limit} fit")
        return GenerateJob(tokens, Sampling(self._table.max_tokens, self._table.temperature))

    def finish(self, job: GenerateJob, answer: Continuation) -> Score:
        text = generated_answer(
            self._tokenizer, job.tokens, answer.tokens, answer.text, answer.finish, self._table.max_tokens
        )
        return Score(error=text) if isinstance(text, ItemError) else self._judge.read(text)
