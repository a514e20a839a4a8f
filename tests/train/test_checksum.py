"""What the checksum of weights detects, and that it depends only on the bytes."""

import pytest
import torch

from plaudit.train.run import checksum
from plaudit.train.run.checksum import BLOCK_BYTES, ROW_BYTES, Checksum


def summed(*pieces: torch.Tensor) -> str:
    made = Checksum()
    for piece in pieces:
        made.update(piece)
    return made.hexdigest()


def data(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", [1, 7, 8, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
def test_any_changed_byte_is_noticed(size: int) -> None:
    whole = data(size)
    before = summed(whole)
    for at in {0, size // 2, size - 1}:
        changed = whole.clone()
        changed[at] ^= 1
        assert summed(changed) != before


def test_machines_that_add_in_another_way_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for x86 in (False, True):
        monkeypatch.setattr(checksum, "X86", x86)
        found.add(summed(data(2 * BLOCK_BYTES + 3 * ROW_BYTES + 5)))
    assert len(found) == 1


@pytest.mark.parametrize("piece", [1024, 4096, 65536])
def test_pieces_that_changed_places_are_noticed(piece: int) -> None:
    whole = data(4 * BLOCK_BYTES)
    before = summed(whole)
    count = len(whole) // piece
    for first, second in {(0, 1), (0, count - 1), (count // 3, count // 2)}:
        swapped = whole.clone()
        swapped[first * piece :][:piece] = whole[second * piece :][:piece]
        swapped[second * piece :][:piece] = whole[first * piece :][:piece]
        assert summed(swapped) != before


def test_lost_doubled_and_empty_pieces_are_noticed() -> None:
    one, two = data(BLOCK_BYTES), data(100)
    assert len({summed(one, two), summed(two, one), summed(one), summed(one, two, two), summed(one, two, two[:0])}) == 5


def test_dtype_shape_and_place_make_no_difference() -> None:
    numbers = torch.arange(40_000, dtype=torch.float32).view(200, 200)
    bytes_ = numbers.view(-1).view(torch.uint8)
    shifted = torch.cat((torch.zeros(3, dtype=torch.uint8), bytes_))[3:]  # begins at an odd address
    assert summed(numbers) == summed(bytes_) == summed(shifted) == summed(numbers.t().contiguous().t())
