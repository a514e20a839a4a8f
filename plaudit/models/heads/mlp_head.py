"""Qwen's reward models: a Qwen2 trunk with a two-layer head. This replaces the custom code in their directories.

Qwen2.5-Math-RM has one label, Qwen2.5-Math-PRM two, wrong and right.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput


class _WithMlpHead(Qwen2PreTrainedModel):  # type: ignore[misc]
    labels: int
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.model = Qwen2Model(config)
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.labels))
        self.post_init()

    def forward(self, input_ids: Tensor, **options: Any) -> TokenClassifierOutput:
        """input_ids (B, T) -> logits (B, T, labels)."""
        hidden: Tensor = self.model(input_ids=input_ids, **options).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden))


class Qwen2ForRewardModel(_WithMlpHead):
    labels = 1


class Qwen2ForProcessRewardModel(_WithMlpHead):
    labels = 2
