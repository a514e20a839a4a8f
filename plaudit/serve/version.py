"""A version of a model: its deployment, its table, and the code that prepares texts and reads rows. A canary is a
second version, which gets a share of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import EmbeddingTable, JudgeTable, LogprobsTable, OutcomeTable, ProcessTable
from plaudit.reward.encoder_reading import outcome_reading
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import EmbeddingReading, LogprobsReading, OutcomeReading
from plaudit.reward.work import ModelInfo
from plaudit.serve.judge import JudgeReading
from plaudit.serve.workers.deployment import Deployment

Scoring = OutcomeReading | ProcessReading | JudgeReading
TextReading = OutcomeReading | ProcessReading | LogprobsReading | EmbeddingReading
Reading = TextReading | JudgeReading
Table = OutcomeTable | ProcessTable | LogprobsTable | EmbeddingTable | JudgeTable
SAMPLED_BYTES = 32 * 1024  # of each end of a body that is hashed for routing


@dataclass(slots=True)
class Version:
    """reading  None until it is loaded"""

    deployment: Deployment
    table: Table
    reading: Reading | None = None

    @property
    def name(self) -> str:
        return self.deployment.version

    async def open(self, threads: ThreadPoolExecutor) -> None:
        hello = await self.deployment.opened()
        facts = ModelInfo(**{**hello.facts, "labels": tuple(hello.facts["labels"])})
        # In a thread: building a large tokenizer takes a second, and during a swap other requests are being answered.
        tokenizer = await asyncio.get_running_loop().run_in_executor(
            threads, _tokenizer, hello.tokenizer, hello.tokenizer_options
        )
        self.reading = _reading(self.table, tokenizer, facts)


@dataclass(slots=True)
class Canary:
    """A version that gets `share` of the requests."""

    version: Version
    share: float

    def takes(self, key: bytes) -> bool:
        """Whether this request goes to the canary, decided only by its body or its route key: a retry gets the same
        version, on any server. When the share grows, requests of the canary stay with it."""
        if not key or self.version.deployment.state == "failed":
            return False
        ends = key if len(key) <= 2 * SAMPLED_BYTES else key[:SAMPLED_BYTES] + key[-SAMPLED_BYTES:]
        return int.from_bytes(blake2b(ends, digest_size=8).digest()) < self.share * 2**64

    def describe(self) -> dict[str, Any]:
        deployment = self.version.deployment
        return {
            "version": deployment.version, "share": self.share, "state": deployment.state, "reason": deployment.reason,
        }  # fmt: skip


def _reading(table: Table, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> Reading:
    if isinstance(table, OutcomeTable):
        return outcome_reading(table, tokenizer, facts, each_label=True)
    if isinstance(table, ProcessTable):
        return ProcessReading(table, tokenizer, facts)
    if isinstance(table, LogprobsTable):
        return LogprobsReading(table, tokenizer, facts)
    if isinstance(table, EmbeddingTable):
        return EmbeddingReading(table, tokenizer, facts)
    return JudgeReading(table, tokenizer, facts)


def _tokenizer(data: bytes, options: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Rebuilds the worker's tokenizer in the HTTP process, without torch and without the model's files."""
    options = {name: value for name, value in options.items() if value is not None}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(data.decode()), **options)
