"""A causal LM that is read and gives no score. Torch-free: the HTTP process runs this, not the model."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import LogprobsTable
from plaudit.errors import ModelError
from plaudit.reward.intake import Intake
from plaudit.reward.work import ModelInfo


class LogprobsReading:
    def __init__(self, table: LogprobsTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> None:
        if not facts.causal:
            raise ModelError(f"{facts.name} has no vocabulary head, so no log-probs; it is an outcome or process model")
        self.facts = facts
        self.intake = Intake(tokenizer, facts, table.max_tokens)
