"""Changes of a tensor as one row of bytes, without loss.

    32 bytes          the numbers of near and far changes, and the bytes of a step in each list
    near: steps, one byte each that is added to the bits of the old value
    far:  steps, the new values

A step is the distance from one change to the next. A small update moves a half-precision value to its neighbour: two
bytes per changed value instead of two for every value. Far changes are jumps: over zero, or between tiny values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plaudit.place.channels.weights import Entry

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STEPS = {1: (torch.uint8, 255), 2: (torch.int16, 2**15 - 1), 4: (torch.int32, 2**31 - 1)}  # and the longest of each
NEAR = 127
HEADER = 32


def pack(new: Tensor, old: Tensor) -> Tensor | None:
    """(bytes,) uint8, empty if nothing changed; None if that is not smaller than the tensor."""
    now, before = (as_bits(tensor.contiguous()) for tensor in (new, old.to(new.device)))
    places = (now != before).nonzero().view(-1)
    if not len(places):
        return torch.empty(0, dtype=torch.uint8, device=new.device)
    near = (now[places].long() - before[places].long()).abs() <= NEAR
    widths, columns = [], []
    for some, add in ((places[near], True), (places[~near], False)):
        width, at, steps = _steps(some, 1 if add else new.element_size())
        widths += [len(at), width]
        numbers = (now[at] - before[at]).to(torch.int8) if add else now[at]
        columns += [steps.view(torch.uint8), numbers.view(torch.uint8)]
    if HEADER + sum(map(len, columns)) >= new.nbytes:
        return None
    return torch.cat([torch.tensor(widths, device=new.device).view(torch.uint8), *columns])


def unpack(packed: Tensor, entry: Entry) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Indices into the flattened tensor; numbers of as many bits as its values; whether they are added to the existing
    bits or replace them."""
    near, near_width, far, far_width = packed[:HEADER].clone().view(torch.int64).tolist()
    size = entry.torch_dtype.itemsize
    sizes = [near * near_width, near, far * far_width, far * size]
    # Each in separate memory, where a number begins at a multiple of its size.
    near_steps, added, far_steps, values = (part.clone() for part in torch.split(packed[HEADER:], sizes))
    yield _places(near_steps, near_width), added.view(torch.int8).to(BITS[size]), True
    yield _places(far_steps, far_width), values.view(BITS[size]), False


def as_bits(tensor: Tensor) -> Tensor:
    """Its values as flat integers, in the same memory: so that -0 differs from 0, and NaN equals itself."""
    return tensor.detach().view(-1).view(BITS[tensor.element_size()])


def _steps(places: Tensor, size: int) -> tuple[int, Tensor, Tensor]:
    """Bytes of a step, the indices stepped on, and the steps to them. `size` is the bytes of a value at each. A step
    that is too long is split into several, over values that have not changed."""
    steps = torch.diff(places, prepend=places.new_tensor([-1]))
    counts = {width: len(places) + int(((steps - 1) // longest).sum()) for width, (_, longest) in STEPS.items()}
    width = min(STEPS, key=lambda each: counts[each] * (size + each))
    kind, longest = STEPS[width]
    more = (steps - 1) // longest
    made = steps.new_full((counts[width],), longest)
    made[torch.cumsum(more + 1, 0) - 1] = steps - more * longest
    return width, torch.cumsum(made, 0) - 1, made.to(kind)


def _places(steps: Tensor, width: int) -> Tensor:
    return torch.cumsum(steps.view(STEPS[width][0]).long(), 0) - 1
