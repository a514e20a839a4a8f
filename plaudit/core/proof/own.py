"""Reference outputs of a model: plain transformers, with the model's own eager attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.core.model.packing import trunk


@contextmanager
def eager(module: Any) -> Iterator[None]:
    """Use the module's own eager attention in this context."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(before)


def own_rows(module: nn.Module, ids: Sequence[int], first: int | None = None) -> Tensor:
    """The trunk's hidden rows of one sequence, (T, hidden). first: the position of its first token."""
    row = torch.tensor([list(ids)], device=next(module.parameters()).device)
    options = {} if first is None else {"position_ids": first + torch.arange(len(ids), device=row.device)[None]}
    with eager(module):
        out = trunk(module)(input_ids=row, use_cache=False, **options)
    rows: Tensor = out.last_hidden_state[0]
    return rows


def own_outputs(module: nn.Module, ids: Sequence[int]) -> Tensor:
    """The head's outputs: (T, vocabulary or labels), or (labels,) for a whole sequence."""
    row = torch.tensor([list(ids)], device=next(module.parameters()).device)
    with eager(module):
        out = module(input_ids=row, use_cache=False)
    values: Tensor = getattr(out, "logits", out)
    return values[0]


def own_steps(module: nn.Module, ids: Sequence[int], prompt: int) -> Tensor:
    """Hidden rows of the tokens after the prompt, (T - prompt, hidden), decoded one by one with the model's own cache.
    Positions are passed, as `generate` does: without them Bamba starts at position 0 in every step."""
    row = torch.tensor([list(ids)], device=next(module.parameters()).device)
    body, cache, rows = trunk(module), None, []
    takes = "position_ids" in inspect.signature(body.forward).parameters
    with eager(module):
        for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(ids)))]:
            where = {"position_ids": torch.arange(start, end, device=row.device)[None]} if takes else {}
            out = body(input_ids=row[:, start:end], past_key_values=cache, use_cache=True, **where)
            cache = out.past_key_values
            rows.append(out.last_hidden_state[0, -1])
    return torch.stack(rows[1:])
