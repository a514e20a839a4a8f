"""Rendezvous of two pipeline stages through a file, with a slow second stage. A test runs this on each rank:
python -m tests.serve.rank_meet DIRECTORY"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from plaudit.config.reward import LogprobsTable
from plaudit.serve.workers.ranks import RankGroup

SECONDS = 0.5  # enough for a rank that leaves the rendezvous too early
JOIN_SECONDS = 60.0


def main(directory: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, meeting_file = int(os.environ["RANK"]), directory / "place"
    table = LogprobsTable(path="sums-policy", pipeline_parallel=2, device="cpu", join_seconds=JOIN_SECONDS)
    if rank == 0:
        meeting = tempfile.TemporaryDirectory(prefix="meeting-", dir=directory)
        meeting_file.with_suffix(".new").write_text(meeting.name)
        meeting_file.with_suffix(".new").rename(meeting_file)
        group = RankGroup(0, dist.FileStore(f"{meeting.name}/store", 2), table, 0, meeting=meeting)
        group.join()
        channel = group.led(lambda: group.meet({}))
        assert not Path(meeting.name).exists(), "all have met"
    else:
        deadline = time.monotonic() + JOIN_SECONDS
        while not meeting_file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        meeting_directory = Path(meeting_file.read_text())
        group = RankGroup(1, dist.FileStore(f"{meeting_directory}/store", 2), table, 0)
        group.join()
        linger(meeting_directory)
        channel = group.meet({})
    channel.barrier()
    dist.destroy_process_group()


def linger(directory: Path) -> None:
    """Slow down the creation of every group, as in a process without a free core: the files that it reads must stay."""
    new_group = dist.new_group

    def slow(*args: Any, **options: Any) -> Any:
        group = new_group(*args, **options)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            assert directory.exists(), "rank 0 has removed the place where they meet"
            time.sleep(0.05)
        return group

    dist.new_group = slow


if __name__ == "__main__":
    main(Path(sys.argv[1]))
