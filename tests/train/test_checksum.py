"""The checksum of weights detects any change of the bytes, and depends only on the bytes."""

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
def test_any_changed_byte_changes_the_checksum(size: int) -> None:
    original = data(size)
    before = summed(original)
    for at in {0, size // 2, size - 1}:
        changed = original.clone()
        changed[at] ^= 1
        assert summed(changed) != before


def test_checksum_is_the_same_with_and_without_the_x86_path(monkeypatch: pytest.MonkeyPatch) -> None:
    checksums = set()
    for x86 in (False, True):
        monkeypatch.setattr(checksum, "X86", x86)
        checksums.add(summed(data(2 * BLOCK_BYTES + 3 * ROW_BYTES + 5)))
    assert len(checksums) == 1


@pytest.mark.parametrize("piece", [1024, 4096, 65536])
def test_swapped_pieces_change_the_checksum(piece: int) -> None:
    original = data(4 * BLOCK_BYTES)
    before = summed(original)
    count = len(original) // piece
    for first, second in {(0, 1), (0, count - 1), (count // 3, count // 2)}:
        swapped = original.clone()
        swapped[first * piece :][:piece] = original[second * piece :][:piece]
        swapped[second * piece :][:piece] = original[first * piece :][:piece]
        assert summed(swapped) != before


def test_missing_repeated_and_empty_pieces_change_the_checksum() -> None:
    one, two = data(BLOCK_BYTES), data(100)
    assert len({summed(one, two), summed(two, one), summed(one), summed(one, two, two), summed(one, two, two[:0])}) == 5


def test_dtype_shape_and_memory_layout_do_not_change_the_checksum() -> None:
    numbers = torch.arange(40_000, dtype=torch.float32).view(200, 200)
    bytes_ = numbers.view(-1).view(torch.uint8)
    shifted = torch.cat((torch.zeros(3, dtype=torch.uint8), bytes_))[3:]  # begins at an odd address
    assert summed(numbers) == summed(bytes_) == summed(shifted) == summed(numbers.t().contiguous().t())
