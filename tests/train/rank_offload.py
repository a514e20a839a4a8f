"""Updates of a policy and its critic with the optimizer on the device and on the host, on the same ranks. A test runs
this on each rank: python -m tests.train.rank_offload DATA CONTEXT TENSOR PIPELINE EXPERT DIRECTORY"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.config.placement import ResourcesTable
from plaudit.core.model.decoder import Decoder
from plaudit.records import Batch
from plaudit.train.optim import host_optimizer
from plaudit.train.optim.host_memory import free_memory, gib, shortage
from plaudit.train.optim.optimizer import local
from plaudit.train.optim.sharded_optimizer import ShardedHostOptimizer, new_optimizer
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy.critic import SharedCritic
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.policy.rl_models import value_head
from plaudit.train.run.clock import Clock
from plaudit.train.run.ranks import Ranks, join
from tests.core.mixtures import mixture
from tests.train.rl_world import made_up, recipe, tiny

STEPS = 3


class Side:
    """A policy that learns; `beside` it, where there is one, a value head that every rank has whole."""

    def __init__(self, module: nn.Module, ranks: Ranks, offload: bool, shared: bool, device: str) -> None:
        module.to(device)
        tables: dict[str, Any] = {"algorithm": {"name": "ppo" if shared else "grpo"}}
        if shared:
            tables["critic"] = {"shared": True}
        train = {"lr": 1e-3, "weight_decay": 0.1, "clip_norm": 0.05, "micro_batch_tokens": 24}
        tree = recipe(**tables, train={**train, "offload_optimizer": offload})
        head = value_head(Decoder(module, "causal")) if shared else None
        self.shards = Shards(module, ranks)
        self.module = module

        def policy(of: nn.Module, head: nn.Linear | None = None) -> Policy:
            return Policy(
                Decoder(of, "causal"), tree.algorithm, temperature=0.9, max_tokens=16, micro_batch_tokens=24,
                value_head=head, value_coef=0.5, group=ranks.data, context=ranks.context,
            )  # fmt: skip

        learns, reference = policy(module, head), None
        if shared:
            frozen = tiny(seed=4).to(device).requires_grad_(False)
            Shards(frozen, ranks)
            reference = policy(frozen)
        beside = {} if head is None else {f"value_head.{name}": each for name, each in head.named_parameters()}
        self.optimizer = new_optimizer(module, tree.train, beside, self.shards)
        critic = SharedCritic(learns) if shared else None
        self.learner = RlLearner(tree, learns, self.optimizer, critic, reference, Clock())
        self.norms: list[float] = []

    def learn(self, steps: range) -> None:
        for step in steps:
            figures, _ = self.learner.update(Batch(tuple(made_up(seed=step + 1))), step)
            self.norms.append(figures["policy/grad_norm"])

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parts of weights and optimizer."""
        parts = {f"weight/{name}": local(p.detach()) for name, p in self.optimizer.parameters.items()}
        return parts | self.optimizer.state()


def same(one: Side, other: Side, name: str) -> None:
    here, there = one.tensors(), other.tensors()
    assert here.keys() == there.keys(), name
    for key, value in here.items():
        assert torch.equal(value, there[key]), (name, key, (value - there[key]).abs().max())
    assert one.norms == other.norms, name


def check(
    name: str, new: Callable[[], nn.Module], ranks: Ranks, directory: Path, shared: bool = False, device: str = "cpu"
) -> None:
    """The same bits after some updates, also where each goes on with the other's state as it comes from the disk."""
    plain, host = (Side(new(), ranks, offload, shared, device) for offload in (False, True))
    assert isinstance(host.optimizer, ShardedHostOptimizer)
    assert host.optimizer.copies() == host.optimizer.moments() == []
    for side in (plain, host):
        side.learn(range(STEPS))
    same(plain, host, name)
    assert min(plain.norms) > 0.05, "else nothing is clipped"
    for side, where in ((plain, "device"), (host, "host")):
        side.optimizer.save(directory / f"{name}-{where}.safetensors")
    again, back = (Side(new(), ranks, offload, shared, device) for offload in (False, True))
    for side, before, where in ((again, host, "host"), (back, plain, "device")):
        with torch.no_grad():
            for key, parameter in side.optimizer.parameters.items():
                local(parameter).copy_(local(before.optimizer.parameters[key]))
        side.norms = list(before.norms)
        side.optimizer.restore(directory / f"{name}-{where}.safetensors")
        same(side, before, name)
        side.learn(range(STEPS, STEPS + 1))
    plain.learn(range(STEPS, STEPS + 1))
    same(plain, again, name)
    same(plain, back, name)


def check_host(ranks: Ranks) -> None:
    """Each has the memory alone, and not all of them together."""
    free = free_memory()
    if free is None:
        return
    needed = ranks.everyone.from_main(round(0.6 * free), int)
    assert shortage(needed) == ""
    lack = shortage(needed, ranks.everyone)
    count = ranks.everyone.size
    assert lack.startswith(f"{count} × {gib(needed)} = {gib(count * needed)} GiB on "), lack


def main() -> None:
    data, context, tensor, stages, expert = map(int, sys.argv[1:6])
    directory = Path(sys.argv[6])
    torch.set_num_threads(1)
    host_optimizer.BUCKET = 512  # parts of matrices above it and below
    resources = ResourcesTable(
        data_parallel=data, context_parallel=context, tensor_parallel=tensor, pipeline_parallel=stages,
        expert_parallel=expert, timeout=60.0,
    )  # fmt: skip
    with join(resources, "cpu") as ranks:
        check_host(ranks)
        if expert > 1:
            check("mixture", lambda: mixture("qwen3_moe"), ranks, directory)
            return
        check("bf16", lambda: tiny().bfloat16(), ranks, directory)
        check("shared", tiny, ranks, directory, shared=True)


if __name__ == "__main__":
    main()
