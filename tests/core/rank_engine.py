"""Runs the requests of a test on an engine, in one process or as one of several ranks:
`python -m tests.core.rank_engine RANK SIZE FILE OUT DEVICE CASES STAGES...`."""

from __future__ import annotations

import sys
from copy import deepcopy
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from transformers import LlamaModel

from plaudit.core import Engine, SamplingParams
from plaudit.core.device.choose import backend_of
from plaudit.core.device.lockstep import Leader, RankGroups, follow
from plaudit.core.model.packing import trunk
from plaudit.core.model.split import check_split, join, keep_part
from plaudit.core.model.stages import RankPosition, connect
from plaudit.core.proof.support import inspect
from plaudit.models import ValueModel
from plaudit.models.part import fill
from plaudit.models.weights import Cut
from tests.core.mixtures import CONFIGS as MIXTURES
from tests.core.mixtures import OTHERS, mixture
from tests.core.tiny import CONFIGS, model, sequences

CASES = {
    "llama-outcome": ("llama", "sequence"), "qwen2-steps": ("qwen2", "token"), "qwen3-causal": ("qwen3", "causal"),
    "gemma2-causal": ("gemma2", "causal"), "llama-values": ("llama", "value"),
    "one_key-causal": ("one_key", "causal"), "deepseek_v2-causal": ("deepseek_v2", "causal"),
    "deepseek_v3-causal": ("deepseek_v3", "causal"), "olmo2-causal": ("olmo2", "causal"),
}  # fmt: skip
UNSTAGED = {"nanochat-causal": ("nanochat", "causal")}  # without a pipeline plan
MIXED = {f"{family}-mixture": (family, "causal") for family in {**MIXTURES, **OTHERS}}


def module(case: str) -> Any:
    family, kind = {**CASES, **UNSTAGED, **MIXED}[case]
    if case in MIXED:
        return mixture(family)
    if kind != "value":
        return model(family, kind, labels=2, layers=3 if family == "llama" else 2)
    torch.manual_seed(7)
    value = ValueModel(LlamaModel(CONFIGS[family]))
    torch.nn.init.normal_(value.score.weight, std=0.25)
    return value.eval()


def scored(vocabulary: int) -> list[list[int]]:
    ids = [[token % vocabulary for token in sequence] for sequence in sequences(1, 5, 4, 40)]
    return [*ids, ids[0][:20] + ids[1], ids[0] + ids[2]]


def answers(engine: Engine, case: str) -> dict[str, np.ndarray]:
    """Scores with and without the cache of sequences that share prefixes; for a causal LM also samples."""
    kind = {**CASES, **UNSTAGED, **MIXED}[case][1]
    ids = scored(engine.decoder.vocab_size)
    positions = [[0, len(s) // 2, len(s) - 1] for s in ids]
    columns = [3, 5] if kind == "causal" else None
    results = {
        "plain": np.concatenate(engine.score(ids, positions=positions, columns=columns)),
        "cached": np.concatenate(engine.score(ids, positions=positions, columns=columns, cache=True)),
        "again": np.concatenate(engine.score([[*s, 7, 8] for s in ids], columns=columns, cache=True)),
    }
    if kind == "causal":
        results["logprobs"] = np.concatenate(engine.logprobs(ids))
        params = SamplingParams(n=2, temperature=1.0, max_tokens=24, seed=3)
        samples = engine.generate(ids[:3], params) + engine.generate(ids[3:], SamplingParams(temperature=0.0))
        token_ids = [s.token_ids for s in samples] + branched(engine, ids[:3])
        results["tokens"] = np.concatenate([np.array(tokens) for tokens in token_ids])
        results["drawn"] = np.concatenate([np.array(s.logprobs, dtype=np.float32) for s in samples])
    engine.check()
    return results


def branched(engine: Engine, ids: list[list[int]]) -> list[tuple[int, ...]]:
    """Two levels of a search: the second copies the blocks in which the paths of the first end."""
    params, branches = SamplingParams(n=2, max_tokens=5), engine.branches()
    first = [
        continuation for group in branches.sample(ids, [None] * 3, [params] * 3, [1, 2, 3]) for continuation in group
    ]
    paths = [[*ids[i // 2], *continuation.tokens] for i, continuation in enumerate(first)]
    second = branches.sample(paths, [continuation.place for continuation in first], [params] * 6, range(6))
    return [
        continuation.tokens for continuation in (*first, *(continuation for group in second for continuation in group))
    ]


def part_of(full: Any, position: RankPosition, device: str, channel: RankGroups) -> Any:
    """A rank's part of a module in memory, loaded the way it is from files."""
    state = full.state_dict()
    outline = deepcopy(full).to("meta")
    module = deepcopy(outline)
    cuts = keep_part(module, position)

    def read(name: str, cut: Cut | None) -> torch.Tensor:
        tensor: torch.Tensor = state[name] if cut is None else cut.of(state[name])
        return tensor.clone(memory_format=torch.contiguous_format)

    fill(module, read, cuts, device)
    check_split(outline, position, read, channel.tensors, device)
    join(module, channel.tensors)
    if channel.stages is not None:
        connect(trunk(module), position, channel.stages)
    return module


def main(rank: int, size: int, file: str, out: str, device: str, cases: str, worlds: list[int]) -> None:
    """Each entry of `worlds` is a number of stages; its results go to a folder of that name."""
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size, timeout=timeout)
    all_ranks, between_stages = (dist.new_group(list(range(size)), backend="gloo", timeout=timeout) for _ in range(2))
    for stages in worlds:
        position = RankPosition(rank, size // stages, stages)
        groups = [dist.new_group(position.peers(stage), backend="gloo", timeout=timeout) for stage in range(stages)]
        channel = RankGroups(
            rank, size, all_ranks, groups[position.stage], None, between_stages if stages > 1 else None, position.last
        )
        for case in cases.split():
            part = part_of(module(case), position, device, channel)
            if rank:
                follow(backend_of(inspect(part)), channel)
                continue
            engine = Engine(part, channel=channel, kv_bytes=4 << 20)
            save_file(answers(engine, case), f"{out}/{stages}/{case}.safetensors")
            assert isinstance(engine.backend, Leader)
            engine.backend.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7], list(map(int, sys.argv[7:])))
