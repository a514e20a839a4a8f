"""Weights as the changes since the last publication: indices and values, packed without loss.

An update with a small learning rate leaves most half-precision values unchanged. The trainer keeps a copy of what it
published; of each tensor only values whose bits differ are sent, as index steps and new values, and the receiver
writes them over its own. A tensor that would not be smaller this way is sent whole, an unchanged one not at all. The
data goes through another channel, with that channel's checks: a receiver that had the previous version, bit for bit,
and received these bytes has the next one, bit for bit. Any other receiver gets all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from plaudit.place.channels.channel import Channel, Publication, Wire
from plaudit.place.channels.packing import pack
from plaudit.place.channels.weights import Entry, Layout, Weights


class DeltaChannel:
    """whole    for all weights
    changes  for what has changed
    """

    def __init__(self, whole: Channel, changes: Channel) -> None:
        self.whole = whole
        self.changes = changes
        self._sent: dict[str, Tensor] = {}
        self._version: int | None = None
        self._holders: frozenset[str] = frozenset()

    def publish(self, weights: Weights, version: int, wires: Sequence[Wire]) -> Publication:
        names = frozenset(wire.name for wire in wires)  # a process that replaces a lost one gets another wire
        holders, self._holders = self._holders, frozenset()  # until all answer, no state is known
        if self._version is None or not names <= holders:
            done = self.whole.publish(weights, version, wires)
        else:
            changed = changes(weights, self._sent, self._version)
            done = self.changes.publish(changed, version, wires)
            done = replace(done, share=changed.nbytes / max(1, weights.nbytes))
        self._remember(weights)
        self._version, self._holders = version, names
        return replace(done, extra_bytes=done.extra_bytes + sum(tensor.nbytes for tensor in self._sent.values()))

    def close(self) -> None:
        self.whole.close()
        self.changes.close()

    def _remember(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name in self._sent:
                self._sent[name].copy_(tensor)
            else:
                self._sent[name] = tensor.detach().to("cpu", copy=True)


def changes(weights: Weights, before: dict[str, Tensor], since: int) -> Weights:
    """What a receiver of version `since`, which had the tensors `before`, needs of these weights."""
    travelling: dict[str, Tensor] = {}
    packed: dict[str, Entry] = {}
    for entry, (name, tensor) in zip(weights.layout.entries, weights, strict=True):
        changed = pack(tensor, before[name])
        if changed is None:
            travelling[name] = tensor
        elif len(changed):
            travelling[name], packed[name] = changed, entry
    made = Weights(travelling)
    aliases = {name: entry for name, entry in weights.layout.aliases.items() if entry in travelling}
    made.layout = Layout(made.layout.entries, aliases, part=True, since=since, packed=packed)
    return made
