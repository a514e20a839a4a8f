"""Reference outputs of a model: plain transformers, with the model's own eager attention.

In half precision that attention rounds its scores, which is no reference: with large biases of the keys, as Qwen 2.5
has them, scores of hundreds differ by whole numbers. So there the same attention runs on float32 (OWN), and the true
values are those in which everything is computed in a wider dtype (Computed).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from plaudit.core.model.attention import HALVES
from plaudit.core.model.packing import trunk
from plaudit.errors import ModelError

OWN = "own-in-float32"
PICKS = (F.embedding, Tensor.__getitem__)  # read a few rows of a weight, which stay exact
CASTS = (Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double)
TOPK = (torch.topk, Tensor.topk)
WIDENED = 2**26  # numbers of a linear layer's weight that are widened at once


class Computed(TorchFunctionMode):
    """Inside, everything is computed in `dtype`, from weights in their own: each is converted where it is used, so that
    a model needs no second copy of its weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CASTS:
            return args[0].to(self.dtype)
        if func in PICKS:
            return self._cast(func(*args, **kwargs))
        if func is F.linear and args[1].numel() > WIDENED and args[1].dtype != self.dtype:
            return self._linear(*args, **kwargs)
        return self._cast(func(*map(self._cast, args), **{name: self._cast(value) for name, value in kwargs.items()}))

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            wrong = value.dtype.is_floating_point and value.dtype != self.dtype
            return value.to(self.dtype) if wrong else value
        if isinstance(value, torch.dtype):
            return self.dtype if value.is_floating_point else value
        if type(value) in (list, tuple):
            return type(value)(map(self._cast, value))
        if isinstance(value, tuple) and hasattr(value, "__match_args__"):  # torch.return_types
            return type(value)(tuple(map(self._cast, value)))
        return value

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = max(1, WIDENED // weight.shape[1])
        starts = range(0, weight.shape[0], rows)
        out = torch.cat([F.linear(x, self._cast(weight[start : start + rows])) for start in starts], dim=-1)
        return out if bias is None else out + self._cast(bias)


class Choices(TorchFunctionMode):
    """The results of `topk` in a pass over T rows, such as the experts of every row: recorded in one pass, and used in
    others in place of their own. Two nearly equal scores may round either way, and then a row is another row."""

    def __init__(self, recorded: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.recorded: list[Tensor] = [] if recorded is None else list(recorded)
        self.replays = recorded is not None
        self._used = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        if not self.replays:
            self.recorded.append(result[1])
            return result
        self._used += 1
        chosen = self.recorded[self._used - 1] if self._used <= len(self.recorded) else result[1]
        if chosen.shape != result[1].shape:
            return result
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))

    def of_rows(self, first: int, count: int, total: int) -> list[Tensor]:
        """What was recorded for some of the rows."""
        parts = []
        for indices in self.recorded:
            dim = next((i for i, size in enumerate(indices.shape[:-1]) if size == total), None)
            parts.append(indices if dim is None else indices.narrow(dim, first, count))
        return parts


def own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    """The eager attention of a module's family on float32 copies of its arguments."""
    kind: Any = type(module)
    eager = _eager_of(kind)
    out, weights = eager(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return out.to(query.dtype), weights


@functools.cache
def _eager_of(kind: Any) -> Any:
    """The function in the file of the attention's class; a few families have one for text and one for pictures."""
    for home in (vars(sys.modules[each.__module__]) for each in kind.__mro__):
        for name in sorted(home, key=len):
            if name.endswith("eager_attention_forward") and not name.startswith("vision"):
                return home[name]
    raise ModelError(f"{kind.__name__} has no eager attention in its file, so there is no reference to compare with")


AttentionInterface.register(OWN, own_attention)
AttentionMaskInterface.register(OWN, eager_mask)


@contextmanager
def eager(module: Any) -> Iterator[None]:
    """Use the module's own eager attention in this context, in half precision on float32, and its experts one by one:
    torch's product of all of them has no float64."""
    model: Any = getattr(module, "trunk", module)  # of a value model
    before = model.config._attn_implementation
    experts = model.get_experts_implementation() if model._can_set_experts_implementation() else None
    buffers = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    model.set_attn_implementation(OWN if next(module.parameters()).dtype in HALVES else "eager")
    if experts is not None:  # one by one they must be whole: a rank's share of them is computed in one product
        shared = any(getattr(part, "_is_expert_parallel", False) for part in module.modules())
        model.set_experts_implementation("batched_mm" if shared else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        if experts is not None:
            model.set_experts_implementation(experts)
        for part, values in buffers:  # a rotary embedding may replace its own, in the dtype of this context
            part._buffers.update(values)


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
