"""Runs the last layer on the requested rows only.

Every token's keys and values are needed in the last layer, but its output only at the rows that are read. The layer
runs twice: once on all rows up to its attention, which stores keys and values and aborts the call, then on the
requested rows alone. Nothing here depends on layer code; a trial at engine construction decides whether a model
supports it, and if not, all rows are computed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.core.model.attention import Layout, Rule
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import pack

WORTH = 4  # narrow if the requested rows are at most one in this many


class _LayerDone(Exception):
    """Keys and values of the last layer are stored; the rest of it is not needed."""


class _Narrow(Layout):
    """Wraps a layout while the last layer runs twice. Earlier layers pass through."""

    def __init__(self, inner: Layout, wanted: Tensor, last: int) -> None:
        super().__init__(inner.groups, inner.restore)
        self.inner = inner
        self.wanted = wanted
        self.last = last
        self.stored: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if layer != self.last:
            return self.inner.attend(layer, query, key, value, rule)
        if self.stored is None:
            self.stored = self.inner.context(layer, key, value)
            raise _LayerDone
        return self.inner.attend_wanted(layer, self.wanted, query, *self.stored, rule)


class WantedRows:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.last = len(decoder.layers) - 1
        # A recurrent layer's output at a row depends on the rows before it.
        self.layer = None if decoder.states else _last_layer(decoder)
        self._narrowing: _Narrow | None = None
        self._tried = decoder.lean is None
        with torch.inference_mode():
            if self.layer is not None and self._tried and not self._works():
                self.layer = None

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor) -> Tensor:
        """(W, hidden): the rows `wanted` of the packed row."""
        lean = self.decoder.lean
        checked = self.layer is not None and (self._tried or lean is not None)  # a hook may have been registered since
        if not checked or len(wanted) == 0 or len(wanted) * WORTH > input_ids.shape[1]:
            return self.decoder.hidden(input_ids, position_ids, layout)[wanted]
        if lean is not None:
            return lean.hidden(input_ids, position_ids, layout, wanted)
        return self._narrow(input_ids, position_ids, layout, wanted)

    def _narrow(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor) -> Tensor:
        assert self.layer is not None
        layer, tokens = self.layer, input_ids.shape[1]
        narrow = _Narrow(layout, wanted, self.last)
        handle = None

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self._narrowing is not narrow:  # an interrupt prevented its removal
                return args, kwargs
            with suppress(_LayerDone):
                layer.forward(*args, **kwargs)
            cut = _SelectRows(wanted, tokens)
            return tuple(cut(a) for a in args), {name: cut(value) for name, value in kwargs.items()}

        try:
            self._narrowing = narrow
            handle = layer.register_forward_pre_hook(before, with_kwargs=True)
            return self.decoder.hidden(input_ids, position_ids, narrow)
        finally:
            self._narrowing = None
            if handle is not None:
                handle.remove()

    def _works(self) -> bool:
        ids = [[t % self.decoder.vocab_size for t in part] for part in ([3, 1, 4, 1, 5, 9], [2, 6, 5])]
        packed = pack(ids, self.decoder.device)
        wanted = torch.tensor([5, 8], device=self.decoder.device)
        module = self.decoder.module
        training = module.training
        module.eval()
        try:
            whole = self.decoder.hidden(packed.input_ids, packed.position_ids, packed.layout)[wanted]
            part = self._narrow(packed.input_ids, packed.position_ids, packed.layout, wanted)
        except Exception:  # whatever error an unusual layer raises, it can still run on all rows
            return False
        finally:
            module.train(training)
        tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 5e-2
        return part.shape == whole.shape and bool((part - whole).abs().max() <= tolerance * whole.abs().max())


class _SelectRows:
    """Selects the requested rows of anything of shape (1, T, ...)."""

    def __init__(self, wanted: Tensor, tokens: int) -> None:
        self.wanted = wanted
        self.tokens = tokens

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape[:2] == (1, self.tokens):
            return value[:, self.wanted]
        if isinstance(value, tuple):
            return tuple(self(v) for v in value)
        return value


def _last_layer(decoder: Decoder) -> nn.Module | None:
    for module in decoder.trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(decoder.layers) > 1:
            return module[-1]
    return None
