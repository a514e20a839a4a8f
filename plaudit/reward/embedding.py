"""A sentence encoder that is read and gives no score. Torch-free: the HTTP process runs this, not the model."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import EmbeddingTable
from plaudit.reward.intake import Intake
from plaudit.reward.work import ModelInfo, Work


class EmbeddingReading:
    def __init__(self, table: EmbeddingTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> None:
        self.facts = facts
        self.intake = Intake(tokenizer, facts, table.max_tokens)

    @staticmethod
    def work(tokens: Sequence[int]) -> Work:
        return Work(list(tokens), (0,), None, steps=0, truncated=False)
