"""Routing replay: records the experts that a mixture's routers choose in the engine, and makes a learner's routers
choose the same ones for the same tokens.

Every model family chooses by `topk` inside its router, before or after normalizing. So a router is the innermost module
whose call contains the last `topk` over the rows of a pass, detected by a pass over a few tokens. When recorded experts
replace the router's own, only the result of that `topk` changes: the scores of these experts, with their gradients, go
through the module's own normalization. If a family first limits the choice to a few groups of experts, the groups of
the recorded experts are among them, as they were in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import pack
from plaudit.errors import DataError, ModelError

TOPK = (torch.topk, Tensor.topk)
PROBE = (3, 1, 4, 1, 5, 9, 2)  # tokens of the pass that detects the routers


class Chooser(Protocol):
    """Observes or replaces the routers' choices in a forward pass."""

    def experts(self, router: int, scores: Tensor, own: Any) -> Any:
        """The values and indices that the router uses. scores (T, experts); own: the router's topk of them."""

    def groups(self, router: int, scores: Tensor, own: Any, experts: int) -> Tensor:
        """The scores (T, groups) by which the router selects groups of experts; own: the router's topk of them."""


class Routing:
    """The routers of a module, in the order of a forward pass; each selects `k` experts per token."""

    def __init__(self, decoder: Decoder) -> None:
        routers = _routers(decoder)
        if not routers:
            raise ModelError(
                f"{decoder.name} ({decoder.config.model_type}) has no router that selects experts by topk, so there is "
                "no routing to replay: leave out train.routing_replay"
            )
        if len(taken := {k for _, k in routers.values()}) > 1:
            raise ModelError(
                f"{decoder.name} selects {sorted(taken)} experts per token in different layers, but routing can only "
                "be recorded for one number: leave out train.routing_replay"
            )
        self.name = decoder.name
        self.k = taken.pop()
        self.counts = [experts for experts, _ in routers.values()]
        self.dtype = np.dtype(np.uint8 if max(self.counts) <= 256 else np.int16)
        self._chooser: Chooser | None = None
        self._entered: list[_Choice] = []
        for number, router in enumerate(routers):
            self._listen(number, router)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a token's record: one row per router."""
        return len(self.counts), self.k

    @property
    def token_bytes(self) -> int:
        return len(self.counts) * self.k * self.dtype.itemsize

    @contextmanager
    def by(self, chooser: Chooser | None) -> Iterator[None]:
        """Forward passes in this context use the chooser."""
        before, self._chooser = self._chooser, chooser
        try:
            yield
        finally:
            self._chooser = before

    def rows(self, record: bytes, tokens: int) -> np.ndarray:
        """A sample's record as an array (N, routers, k), of its first N tokens."""
        if len(record) % self.token_bytes or len(record) > tokens * self.token_bytes:
            raise DataError(
                f"a sample of {tokens} tokens has {len(record)} bytes of recorded experts, but {self.name} has "
                f"{self.token_bytes} per token: it was recorded with another model"
            )
        rows = np.frombuffer(record, self.dtype).reshape(-1, *self.shape)
        most = rows.max(axis=(0, 2), initial=0)
        if (most >= self.counts).any():
            raise DataError(
                f"a sample has expert {int(most.max())}, but {self.name} has only {min(self.counts)} experts in a "
                "layer: it was recorded with another model"
            )
        return rows

    def _listen(self, number: int, router: nn.Module) -> None:
        def before(*_: Any) -> None:
            if self._chooser is not None:
                self._entered.append(mode := _Choice(self._chooser, number, self.counts[number]))
                mode.__enter__()  # type: ignore[no-untyped-call]

        def after(*_: Any) -> None:
            if self._entered and self._entered[-1].router == number:
                self._entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        router.register_forward_pre_hook(before)
        router.register_forward_hook(after, always_call=True)  # also if a recomputation stops early


class Recorder:
    """Records the routers' choices."""

    def __init__(self) -> None:
        self._recorded: dict[int, Tensor] = {}

    def experts(self, router: int, scores: Tensor, own: Any) -> Any:
        self._recorded[router] = own[1]
        return own

    def groups(self, router: int, scores: Tensor, own: Any, experts: int) -> Tensor:
        return scores

    def rows(self) -> Tensor:
        """The choices of the last pass, (T, routers, k)."""
        return torch.stack([self._recorded[router] for router in sorted(self._recorded)], dim=1)


class Replay:
    """Makes the routers choose `chosen` (T, routers, k) for the tokens that are `recorded` (T,). Where they choose the
    same set anyway, in any order, nothing changes."""

    def __init__(self, chosen: Tensor, recorded: Tensor) -> None:
        self.chosen = chosen
        self.recorded = recorded
        self._differed: dict[int, Tensor] = {}
        self._left_out: dict[int, Tensor] = {}  # (T,) whether a router would have left out a needed group

    def experts(self, router: int, scores: Tensor, own: Any) -> Any:
        forced = self.chosen[:, router].long()
        same = (own[1].sort(dim=-1).values == forced.sort(dim=-1).values).all(dim=-1) | ~self.recorded
        self._differed[router] = ~same | self._left_out[router] if router in self._left_out else ~same
        taken = torch.where(same[:, None], own[1], forced)
        return torch.return_types.topk((scores.gather(-1, taken), taken))

    def groups(self, router: int, scores: Tensor, own: Any, experts: int) -> Tensor:
        none = torch.zeros_like(scores, dtype=torch.bool)
        of = self.chosen[:, router].long() // (experts // scores.shape[-1])
        needed = none.scatter(-1, of, True) & self.recorded[:, None]
        self._left_out[router] = (needed & ~none.scatter(-1, own[1], True)).any(dim=-1)
        return scores.masked_fill(needed, torch.inf)

    def differed(self) -> tuple[Tensor, Tensor]:
        """(T, routers) each: 1 where a router would have chosen other experts; and which tokens are recorded."""
        differed = torch.stack([self._differed[router] for router in sorted(self._differed)], dim=1)
        return differed.float(), self.recorded[:, None].expand_as(differed)


class _Choice(TorchFunctionMode):
    """Active during one call of a router: passes its topk results to the chooser."""

    def __init__(self, chooser: Chooser, router: int, experts: int) -> None:
        super().__init__()
        self.chooser = chooser
        self.router = router
        self.experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK or args[0].ndim != 2:
            return func(*args, **kwargs)
        scores, *rest = args
        own = func(*args, **kwargs)
        if scores.shape[-1] == self.experts:
            return self.chooser.experts(self.router, scores, own)
        if self.experts % scores.shape[-1]:
            return own
        return func(self.chooser.groups(self.router, scores, own, self.experts), *rest, **kwargs)


class _Watch(TorchFunctionMode):
    """Records the modules that call `topk` over the rows of a pass: (experts, k) of each router, by its last call."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.inside: list[nn.Module] = []
        self.routers: dict[nn.Module, tuple[int, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in TOPK and args[0].ndim == 2 and len(args[0]) == self.rows:
            self.routers[self.inside[-1]] = args[0].shape[-1], out[1].shape[-1]
        return out


def _routers(decoder: Decoder) -> dict[nn.Module, tuple[int, int]]:
    packed = pack([[token % decoder.vocab_size for token in PROBE]], decoder.device)
    module, watch, handles = decoder.module, _Watch(len(PROBE)), []
    for part in decoder.trunk.modules():
        handles.append(part.register_forward_pre_hook(lambda part, _: watch.inside.append(part)))
        handles.append(part.register_forward_hook(lambda *_: watch.inside.pop() and None))
    training = module.training
    try:
        module.eval()
        with torch.no_grad(), watch:
            decoder.hidden(packed.input_ids, packed.position_ids, packed.layout)
    finally:
        module.train(training)
        for handle in handles:
            handle.remove()
    return watch.routers
