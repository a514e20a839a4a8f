"""A module as the target of weights: what it has is checked against what comes, then copied to or put in its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plaudit.errors import WeightsRefused, nearest
from plaudit.place.channels.weights import Entry, Layout, Weights, named_tensors


class ModuleTarget:
    """Its names may be tied otherwise than the sender's: one tensor that comes may go to several here, but two that
    come never to one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._places: dict[str, list[Tensor]] = {}

    def check(self, layout: Layout) -> None:
        entries = {entry.name: entry for entry in layout.entries}
        tensors = named_tensors(self.module)
        coming = {**{name: name for name in entries}, **layout.aliases}
        if layout.part:
            tensors = {name: tensor for name, tensor in tensors.items() if name in coming}
        _check_names(coming, tensors)
        for name, tensor in tensors.items():
            _check_kind(name, tensor, entries[coming[name]])
        mine = Weights(tensors)
        for name, original in mine.layout.aliases.items():
            if coming[name] != coming[original]:
                raise WeightsRefused(
                    f"{name!r} and {original!r} are one tensor in the engine and two in the trainer: load both from "
                    "the same model directory"
                )
        self._places = {name: [] for name in entries}
        for name in tensors:
            self._places[coming[name]].append(tensors[name])

    def home(self, name: str) -> Tensor | None:
        """The memory of an entry, if to write there is to load it."""
        memories = {tensor.data_ptr(): tensor for tensor in self._places[name]}
        only = next(iter(memories.values())).detach()
        return only if len(memories) == 1 and only.is_contiguous() else None

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            for place in {place.data_ptr(): place for place in self._places[name]}.values():
                place.detach().copy_(tensor)

    @property
    def devices(self) -> set[torch.device]:
        return {tensor.device for places in self._places.values() for tensor in places}

    def adopt(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Let the module's tensors be these, without a copy. Whoever holds the parameters themselves sees it too."""
        for name, tensor in tensors:
            for place in self._places[name]:
                place.data = tensor


def _check_names(coming: Iterable[str], mine: Iterable[str]) -> None:
    coming, mine = set(coming), set(mine)
    if missing := sorted(mine - coming):
        raise WeightsRefused(f"the weights lack {missing[0]!r}{_more(missing)}, which the engine has")
    if unknown := sorted(coming - mine):
        raise WeightsRefused(
            f"the weights have {unknown[0]!r}{_more(unknown)}, which the engine has not; {nearest(unknown[0], mine)}"
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_kind(name: str, tensor: Tensor, entry: Entry) -> None:
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.torch_dtype:
        raise WeightsRefused(
            f"{name!r} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} in the engine and "
            f"{entry.dtype} {list(entry.shape)} in the weights"
        )
