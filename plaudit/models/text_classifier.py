"""An encoder with a class head (BERT, RoBERTa, ModernBERT, DeBERTa ...): logits of whole texts, by transformers alone.

Such a model attends in both directions, so that nothing of a text can be kept for the next one: the inference core,
which runs decoders, is not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.errors import ModelError
from plaudit.models.load import Loaded

BUDGET = 4096
UNSET = 10**9  # what a tokenizer that has no limit gives as its limit is far above
LENGTHS = (3, 8, 5)  # of the texts that a model is tried with
PADDING, WORTH = 0.1, 256  # of a batch; tokens that are worth a batch of their own
ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest number


@torch.inference_mode()
def looks_ahead(module: nn.Module) -> bool:
    """Whether the first token's row changes with the last token, as in no decoder."""
    trunk: Any = module.base_model
    device = next(module.parameters()).device
    size = module.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    first, other = (torch.tensor([[*range(3, 10), last]], device=device) % size for last in (10, 11))
    rows = [trunk(input_ids=ids, attention_mask=torch.ones_like(ids))[0][0, 0].float() for ids in (first, other)]
    return bool((rows[0] - rows[1]).abs().max() > 1e-6 * rows[0].abs().max())


class TextClassifier:
    """typed   whether tokens come with a type, which says of which text of a pair they are
    limit   the most tokens of one text or pair, all that the tokenizer adds included
    budget  tokens of one batch, padding included
    """

    def __init__(self, loaded: Loaded, budget: int | None = None) -> None:
        self.loaded = loaded
        self.budget = budget or BUDGET
        self.module: Any = loaded.module
        self.config: Any = self.module.config
        self.name = type(self.module).__name__
        self.device = next(self.module.parameters()).device
        if getattr(self.config, "is_encoder_decoder", False):
            raise ModelError(f"{self.name} is an encoder with a decoder; classifiers that are served have one of them")
        takes = inspect.signature(self.module.forward).parameters
        self.typed = {"token_type_ids"} <= takes.keys() & {*loaded.tokenizer.model_input_names}
        self.limit = self._limit()
        self._check()

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(str(self.config.id2label[i]) for i in range(self.config.num_labels))

    @torch.inference_mode()
    def logits(self, rows: Sequence[Sequence[int]], types: Sequence[bytes]) -> np.ndarray:
        """(rows, labels) in float32, of token ids with everything in them that the tokenizer adds. Of a row without
        types all tokens are of type 0."""
        ids, mask = padded(rows, self.config.pad_token_id or 0)
        inputs = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        if self.typed:
            kinds, _ = padded([kind or bytes(len(row)) for kind, row in zip(types, rows, strict=True)], 0)
            inputs["token_type_ids"] = kinds.to(self.device)
        values: np.ndarray = self.module(**inputs).logits.float().cpu().numpy()
        return values

    def _limit(self) -> int:
        limits = [self.loaded.tokenizer.model_max_length]
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions:
            # RoBERTa's positions begin behind the pad token's.
            tables = [m for n, m in self.module.named_modules() if n.endswith("position_embeddings")]
            skipped = [t.padding_idx + 1 for t in tables if getattr(t, "padding_idx", None) is not None]
            limits.append(positions - max(skipped, default=0))
        if min(limits) > UNSET:
            raise ModelError(
                f"neither the config nor the tokenizer of {self.name} says how many tokens it takes; set "
                "model_max_length in tokenizer_config.json"
            )
        return int(min(limits))

    def _check(self) -> None:
        """Padding must not count, whatever the model is."""
        size = self.config.vocab_size
        lengths = [min(length, self.limit) for length in LENGTHS]
        rows = [[(7 * i + n + 3) % size for i in range(length)] for n, length in enumerate(lengths)]
        together = self.logits(rows, [b""] * len(rows))
        alone = np.concatenate([self.logits([row], [b""]) for row in rows])
        if not np.isfinite(alone).all():
            raise ModelError(f"{self.name} gives values that are not finite numbers; its weights are damaged")
        if np.abs(together - alone).max() > ROUNDING[self.module.dtype] * max(1.0, np.abs(alone).max()):
            raise ModelError(f"{self.name} gives other scores beside longer texts than alone, so that none is right")


def next_batch(lengths: Mapping[int, int], budget: int) -> list[int]:
    """Which of the rows that wait are computed next: the first, and those nearest to it in length, for all are padded
    to the longest. Within the budget, padding included, and no more padding than a batch of its own would cost."""
    first = next(iter(lengths.values()))
    chosen: list[int] = []
    longest = real = 0
    for row, length in sorted(lengths.items(), key=lambda item: abs(item[1] - first)):
        reach = max(longest, length)
        size = reach * (len(chosen) + 1)
        if chosen and (size > budget or (size - real - length > PADDING * size and real >= WORTH)):
            break
        chosen.append(row)
        longest, real = reach, real + length
    return chosen


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(rows, longest) on the right, and which of it is real."""
    shape = len(rows), max(map(len, rows))
    ids, mask = np.full(shape, pad, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = list(row)
        mask[place, : len(row)] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
