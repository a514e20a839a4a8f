"""A module as the target of weights: its tensors are checked against the incoming ones, then overwritten or
replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from plaudit.errors import WeightsRefused, nearest
from plaudit.models.weights import Cut
from plaudit.place.channels.packing import as_bits, unpack
from plaudit.place.channels.reshard.routes import Box, kept_box, meeting, needed, whole_box
from plaudit.place.channels.weights import Entry, Layout, Weights, named_tensors


class ModuleTarget:
    """Its names may be tied differently from the sender's: one incoming tensor may go to several here, but two incoming
    ones never to one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._places: dict[str, list[Tensor]] = {}

    def check(self, layout: Layout) -> None:
        entries = {entry.name: layout.packed.get(entry.name, entry) for entry in layout.entries}
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
        """The memory of an entry, if writing there loads it."""
        memories = {tensor.data_ptr(): tensor for tensor in self._places[name]}
        only = next(iter(memories.values())).detach()
        return only if len(memories) == 1 and only.is_contiguous() else None

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            for place in {place.data_ptr(): place for place in self._places[name]}.values():
                place.detach().copy_(tensor)

    @torch.no_grad()
    def change(self, name: str, places: Tensor, numbers: Tensor, add: bool) -> None:
        """Change the bits of some values of an entry; `places` are indices into the flattened entry."""
        for place in {place.data_ptr(): place for place in self._places[name]}.values():
            _change(place, places, numbers, add)

    def needs(self, layout: Layout) -> dict[str, Box]:
        return needed(layout, named_tensors(self.module), {})

    def views(self, name: str, box: Box) -> list[Tensor]:
        """Its own memory of a part of an entry, in each tensor that contains it."""
        places = {place.data_ptr(): place.detach() for place in self._places[name]}.values()
        return [place[box.within(whole_box(place.shape))] for place in places]

    @property
    def devices(self) -> set[torch.device]:
        return {tensor.device for places in self._places.values() for tensor in places}

    def adopt(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the module's tensors with these, without a copy. Holders of the parameters see the change too."""
        for name, tensor in tensors:
            for place in self._places[name]:
                place.data = tensor


class PartTarget:
    """A rank's shard of a module as the target of the whole module's weights: it takes its slice of each tensor.

    whole   the module that it is a shard of, on the meta device
    cuts    the slices of the whole tensors that its smaller ones are
    """

    def __init__(self, part: nn.Module, whole: nn.Module, cuts: Mapping[str, Cut]) -> None:
        self.part = part
        self.cuts = cuts
        self._whole = ModuleTarget(whole)
        self._places: dict[str, list[tuple[Tensor, Cut | None]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, layout: Layout) -> None:
        self._whole.check(layout)
        self._places = {entry.name: [] for entry in layout.entries}
        self._shapes = {e.name: layout.packed.get(e.name, e).shape for e in layout.entries}
        seen: set[int] = set()
        for name, tensor in named_tensors(self.part).items():
            places = self._places.get(layout.aliases.get(name, name))  # none for a tensor that stays as it is
            if places is not None and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                places.append((tensor, self.cuts.get(name)))  # whose memory may be replaced

    def home(self, name: str) -> Tensor | None:
        match self._places[name]:
            case [(tensor, None)] if tensor.is_contiguous():
                return tensor.detach()
        return None

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            for place, cut in self._places[name]:
                place.detach().copy_(tensor if cut is None else cut.of(tensor))

    def needs(self, layout: Layout) -> dict[str, Box]:
        return needed(layout, named_tensors(self.part), self.cuts)

    def views(self, name: str, box: Box) -> list[Tensor]:
        whole = whole_box(self._shapes[name])
        boxes = [(place, whole if cut is None else kept_box(whole, cut)) for place, cut in self._places[name]]
        return [place.detach()[met.within(outer)] for place, outer in boxes if (met := meeting(box, outer)) is not None]

    @torch.no_grad()
    def change(self, name: str, places: Tensor, numbers: Tensor, add: bool) -> None:
        shape = self._shapes[name]
        for place, cut in self._places[name]:
            _change(place.detach(), *((places, numbers) if cut is None else _within(cut, shape, places, numbers)), add)


class DeltaTarget:
    """A target of changes, which are written over its current values."""

    def __init__(self, target: ModuleTarget | PartTarget, layout: Layout) -> None:
        self.target = target
        self.packed = layout.packed

    def check(self, layout: Layout) -> None:
        self.target.check(layout)

    def home(self, name: str) -> Tensor | None:
        return None if name in self.packed else self.target.home(name)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name in self.packed:
                for places, numbers, add in unpack(tensor, self.packed[name]):
                    self.target.change(name, places, numbers, add)
            else:
                self.target.load([(name, tensor)])


def _change(tensor: Tensor, places: Tensor, numbers: Tensor, add: bool) -> None:
    bits, places, numbers = as_bits(tensor), places.to(tensor.device), numbers.to(tensor.device)
    bits[places] = bits[places] + numbers if add else numbers


def _within(cut: Cut, shape: Sequence[int], places: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Those indices of a whole tensor that are in a slice of it, relative to the slice, and their values."""
    size, inner, kept = shape[cut.dim], prod(shape[cut.dim + 1 :]), cut.end - cut.start
    at = places // inner % size
    here = (at >= cut.start) & (at < cut.end)
    outer = places // (inner * size)
    return ((outer * kept + at - cut.start) * inner + places % inner)[here], numbers[here]


def _check_names(coming: Iterable[str], mine: Iterable[str]) -> None:
    coming, mine = set(coming), set(mine)
    if missing := sorted(mine - coming):
        raise WeightsRefused(f"the weights lack {missing[0]!r}{_others(missing)}, which the engine has")
    if unknown := sorted(coming - mine):
        raise WeightsRefused(
            f"the weights have {unknown[0]!r}{_others(unknown)}, which the engine lacks; {nearest(unknown[0], mine)}"
        )


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_kind(name: str, tensor: Tensor, entry: Entry) -> None:
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.torch_dtype:
        raise WeightsRefused(
            f"{name!r} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} in the engine and "
            f"{entry.dtype} {list(entry.shape)} in the weights"
        )
