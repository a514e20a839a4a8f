"""All ranks save two checkpoints, and the second one fails: python -m tests.train.rank_save DIRECTORY RANK FAULT

FAULT is the number of the fsync call at which the rank is killed, or `full`: no file may be larger than 4 KB."""

import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from plaudit.config.placement import ResourcesTable
from plaudit.errors import StorageError
from plaudit.models import load_tokenizer, new_llama, resolve
from plaudit.train.optim.shard_files import save_shards
from plaudit.train.optim.sharded_optimizer import ShardedOptimizer
from plaudit.train.optim.sharding import Shards
from plaudit.train.run.checkpoint import Checkpoints
from plaudit.train.run.ranks import join
from tests.train.rl_world import recipe


def tiny_of_sums() -> nn.Module:
    size = len(load_tokenizer(resolve("sums-policy")))
    return new_llama(
        "policy", vocab_size=size, hidden_size=32, layers=2, heads=4, intermediate_size=64, max_positions=64, seed=3
    )


def kill_at(call: int) -> None:
    fsync, calls = os.fsync, 0

    def counted(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    os.fsync = counted


def main() -> None:
    directory, rank, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(resolve("sums-policy"))
    with join(ResourcesTable(data_parallel=2, timeout=60.0), "cpu") as ranks:
        shards = Shards(tiny_of_sums(), ranks)
        optimizer = ShardedOptimizer(shards, recipe().train)
        checkpoints = Checkpoints(directory, 2, ranks.everyone)

        def write(step: int) -> None:
            for name, master in optimizer.masters.items():
                optimizer.adam.state[master] = {"exp_avg": torch.full_like(master, float(step))}
                if name.endswith("norm.weight"):
                    nn.init.constant_(master, float(step))
            checkpoints.save(step, lambda path: save_shards(shards, tokenizer, path), optimizer.save, {})

        write(1)
        if ranks.everyone.index == rank:
            if fault == "full":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            else:
                kill_at(int(fault))
        try:
            write(2)
        except StorageError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print(error, flush=True)


if __name__ == "__main__":
    main()
