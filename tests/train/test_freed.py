"""Free memory that malloc keeps between live blocks is returned to the system."""

import sys

import pytest
import torch

from plaudit.train.optim.freed import LEAST_BYTES, give_back
from tests.forked import run_forked

SCRIPT = """
import resource, torch
from pathlib import Path
from plaudit.train.optim.freed import LEAST_BYTES, give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

blocks = [torch.ones(25_000) for _ in range(2_000)]  # below what malloc maps by itself
kept = blocks[::2]
freed = sum(block.nbytes for block in blocks[1::2])
del blocks
full = resident()
give_back(LEAST_BYTES - 1)
assert full - resident() < freed / 10, "little is left alone"
give_back(freed)
assert full - resident() > 0.8 * freed, (full, resident(), freed)
assert all(bool((block == 1).all()) for block in kept)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_free_blocks_between_live_ones_are_returned_to_the_system() -> None:
    done = run_forked("-c", SCRIPT)
    assert done.returncode == 0, done.stderr + done.stdout


def test_give_back_is_safe_when_nothing_was_freed() -> None:
    numbers = torch.arange(10)
    give_back(LEAST_BYTES)
    assert numbers.tolist() == list(range(10))
