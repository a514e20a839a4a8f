"""A transformers decoder as the engine uses it: a trunk that returns hidden rows, and the heads applied to them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plaudit.algo.tokens.logprobs import head_logits, kernel_logprobs, on_kernel, top_logprobs
from plaudit.core.model.attention import Layout, use_packed_attention
from plaudit.core.model.lean import LeanTrunk
from plaudit.core.model.mixers import StateShapes, layout_arguments
from plaudit.core.model.packing import trunk
from plaudit.errors import RequestError
from plaudit.models.positions import longest_sequence

Kind = Literal["causal", "sequence", "token"]

LOGIT_BYTES = 64 * 2**20  # log-probs of given tokens are computed in slices whose logits stay below this


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per token. Latents are keys of one head without separate values (latent.py)."""

    kv_heads: int
    key_dim: int
    value_dim: int


NOTHING = LayerShape(0, 0, 0)  # a layer of another stage


class Decoder:
    """Has no weights of its own: every call reads the module's current ones."""

    def __init__(
        self, module: nn.Module, kind: Kind, layers: Sequence[LayerShape] = (), states: StateShapes | None = None
    ) -> None:  # fmt: skip
        self.module = module
        self.kind = kind
        self.layers = tuple(layers)
        self.states: StateShapes = states or {}  # of its recurrent layers
        config: Any = module.config
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.trunk = trunk(module)
        self.name = type(module).__name__
        self.vocab_size: int = self.config.vocab_size
        self.record_bytes = 0  # what is stored beside a token's KV: its experts, where an engine records them
        self._lean: LeanTrunk | None = None
        self.max_positions = longest_sequence(self.config)

    @property
    def lean(self) -> LeanTrunk | None:
        """The trunk in few calls, as long as no hook is registered on the calls that it skips."""
        return None if self._lean is None or self._lean.hooked else self._lean

    @lean.setter
    def lean(self, lean: LeanTrunk | None) -> None:
        self._lean = lean

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.trunk.parameters()).dtype

    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        width = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return width * self.dtype.itemsize + self.record_bytes

    def state_bytes(self) -> int:
        """Bytes of one sequence's state over all recurrent layers."""
        parts = [part for layer in self.states.values() for part in layer.values()]
        return sum(shape.numel() * dtype.itemsize for shape, dtype in parts)

    def last_position(self, tokens: Sequence[int]) -> int:
        """The position at which a whole sequence is read: a transformers sequence classifier reads the last token that
        is not its padding, so with pad = eos it is the token before an end-of-text."""
        pad = getattr(self.config, "pad_token_id", None) if self.kind == "sequence" else None
        return next((i for i in reversed(range(len(tokens))) if tokens[i] != pad), 0)

    def adapter_state(self) -> tuple[Hashable, ...]:
        """Which peft adapters are active now, layer by layer; () without any. They may change while the engine
        exists."""
        if not hasattr(self.module, "peft_config"):  # set by peft; avoids walking a model of thousands of modules
            return ()
        layers: list[Any] = [
            # on adapter layers it is a list; every transformers model has a method of that name
            m
            for m in self.module.modules()
            if isinstance(getattr(m, "active_adapters", None), list)
        ]
        return tuple(
            (tuple(m.active_adapters), m.disable_adapters, tuple(getattr(m, "merged_adapters", ()))) for m in layers
        )

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """(1, T) tokens -> (T, hidden)."""
        lean = None if torch.is_grad_enabled() else self.lean
        if lean is not None:
            return lean.hidden(input_ids, position_ids, layout)
        use_packed_attention(self.module)
        out = self.trunk(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False,
            **layout_arguments(self.trunk, layout),
        )  # fmt: skip
        rows: Tensor = out.last_hidden_state[0]
        return rows

    def logits(self, rows: Tensor) -> Tensor:
        """(W, hidden) -> (W, vocabulary), float32 or wider, by the same product as the learner's."""
        head = self._vocabulary_head()
        if type(head) is not nn.Linear:  # an adapter's layer adds to its weight
            return self.finish(_wide(head(rows)))
        return self.finish(head_logits(rows, head.weight, head.bias))

    def columns(self, rows: Tensor, tokens: Sequence[int]) -> Tensor:
        """The logits of a few tokens only, in float32: (W, hidden) -> (W, len(tokens))."""
        head = self._vocabulary_head()
        at = torch.tensor(tokens, device=rows.device)
        if type(head) is not nn.Linear:  # an adapter's layer adds to its weight
            return self.logits(rows)[:, at]
        bias = None if head.bias is None else _wide(head.bias[at])
        return self.finish(F.linear(_wide(rows), _wide(head.weight[at]), bias))

    def head(self, rows: Tensor) -> Tensor:
        """Class logits in float32: (W, hidden) -> (W, labels)."""
        if self.kind == "causal":
            raise RequestError(f"{self.name} has no class head: pass the vocabulary columns to read")
        head: nn.Module = _class_head(self.module)
        if isinstance(head, nn.Linear):
            return F.linear(_wide(rows), _wide(head.weight), None if head.bias is None else _wide(head.bias))
        return _wide(head(rows))

    def logprobs(self, rows: Tensor, targets: Tensor) -> Tensor:
        """log p of each row's targets, (W, n). Computed in slices of rows, so that the logits of all rows never exist
        at once."""
        step = max(1, LOGIT_BYTES // (self.vocab_size * 4))
        parts = []
        for start in range(0, len(rows), step):
            logits, chosen = self.logits(rows[start : start + step]), targets[start : start + step]
            if on_kernel(logits):
                plain = torch.ones(len(logits), device=logits.device)
                columns = [kernel_logprobs(logits, each, plain)[0] for each in chosen.T]
                parts.append(torch.stack(columns, dim=1))
            else:
                parts.append(logits.gather(1, chosen) - torch.logsumexp(logits, dim=1, keepdim=True))
        return torch.cat(parts)

    def likeliest(self, rows: Tensor, count: int) -> Tensor:
        """(W, 2 * count): the most likely tokens of each row, as floats (which represent every id), and their
        log-probs."""
        step = max(1, LOGIT_BYTES // (self.vocab_size * 4))
        parts = [top_logprobs(self.logits(rows[at : at + step]), count) for at in range(0, len(rows), step)]
        return torch.cat([torch.cat([ids.to(values.dtype), values], dim=1) for ids, values in parts])

    def ranks(self, rows: Tensor, targets: Tensor) -> Tensor:
        """(W, 1): how many tokens of the vocabulary are at least as likely as each row's target; 1: none but itself."""
        step = max(1, LOGIT_BYTES // (self.vocab_size * 4))
        parts = []
        for start in range(0, len(rows), step):
            logits = self.logits(rows[start : start + step])
            chosen = logits.gather(1, targets[start : start + step, None])
            parts.append((logits >= chosen).sum(dim=1, keepdim=True).to(logits.dtype))
        return torch.cat(parts)

    def _vocabulary_head(self) -> nn.Linear:
        if self.kind != "causal":
            raise RequestError(f"{self.name} has no vocabulary head: it can score but not generate")
        return self.module.get_output_embeddings()  # type: ignore[no-any-return, operator]

    @property
    def plain_logits(self) -> bool:
        """Whether the logits are used as the head computes them."""
        names = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
        return all(getattr(self.config, name, None) is None for name in names)

    def finish(self, logits: Tensor) -> Tensor:
        """Postprocessing of the logits in some families; `support.inspect` compares the result with the module's
        own."""
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        for name in ("logit_scale", "lm_head_multiplier"):
            if (factor := getattr(self.config, name, None)) is not None:
                logits = logits * factor
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        return logits


def _wide(x: Tensor) -> Tensor:
    """Cast to at least float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _class_head(module: nn.Module) -> nn.Module:
    for name in ("score", "classifier"):
        head = getattr(module, name, None)
        if isinstance(head, nn.Module):
            return head
    raise RequestError(f"{type(module).__name__} has neither a `score` nor a `classifier` head")


def kind_of(module: nn.Module) -> Kind | None:
    name = type(module).__name__
    if name.endswith("ForSequenceClassification"):
        return "sequence"
    if name.endswith("ForTokenClassification"):
        return "token"
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if head is not None:
        return "causal"
    return "token" if any(isinstance(getattr(module, n, None), nn.Module) for n in ("score", "classifier")) else None
