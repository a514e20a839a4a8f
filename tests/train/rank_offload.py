"""Compares updates of a policy and its critic with the optimizer on the device and on the host. A test runs this on
each rank: python -m tests.train.rank_offload DATA CONTEXT TENSOR PIPELINE EXPERT DIRECTORY"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.config.placement import ResourcesTable
from plaudit.core.model.decoder import Decoder
from plaudit.models.memory import free_memory
from plaudit.records import Batch
from plaudit.train.optim import host_optimizer
from plaudit.train.optim.host_memory import gib, shortage
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
    """A policy that is trained, with `shared` also a value head, which is replicated on every rank."""

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

        def policy(model: nn.Module, head: nn.Linear | None = None) -> Policy:
            return Policy(
                Decoder(model, "causal"), tree.algorithm, temperature=0.9, max_tokens=16, micro_batch_tokens=24,
                value_head=head, value_coef=0.5, group=ranks.data, context=ranks.context,
            )  # fmt: skip

        trained, reference = policy(module, head), None
        if shared:
            frozen = tiny(seed=4).to(device).requires_grad_(False)
            Shards(frozen, ranks)
            reference = policy(frozen)
        head_parameters = {} if head is None else {f"value_head.{name}": each for name, each in head.named_parameters()}
        self.optimizer = new_optimizer(module, tree.train, head_parameters, self.shards)
        critic = SharedCritic(trained) if shared else None
        self.learner = RlLearner(tree, trained, self.optimizer, critic, reference, Clock())
        self.norms: list[float] = []

    def learn(self, steps: range) -> None:
        for step in steps:
            metrics, _ = self.learner.update(Batch(tuple(made_up(seed=step + 1))), step)
            self.norms.append(metrics["policy/grad_norm"])

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parts of the weights and of the optimizer state."""
        parts = {f"weight/{name}": local(p.detach()) for name, p in self.optimizer.parameters.items()}
        return parts | self.optimizer.state()


def same(one: Side, other: Side, name: str) -> None:
    tensors, others = one.tensors(), other.tensors()
    assert tensors.keys() == others.keys(), name
    for key, value in tensors.items():
        assert torch.equal(value, others[key]), (name, key, (value - others[key]).abs().max())
    assert one.norms == other.norms, name


def check(
    name: str, new: Callable[[], nn.Module], ranks: Ranks, directory: Path, shared: bool = False, device: str = "cpu"
) -> None:
    """Both are equal bit for bit after some updates, also after each resumes from the other's saved state."""
    plain, host = (Side(new(), ranks, offload, shared, device) for offload in (False, True))
    assert isinstance(host.optimizer, ShardedHostOptimizer)
    assert host.optimizer.copies() == host.optimizer.moments() == []
    for side in (plain, host):
        side.learn(range(STEPS))
    same(plain, host, name)
    assert min(plain.norms) > 0.05, "else nothing is clipped"
    for side, location in ((plain, "device"), (host, "host")):
        side.optimizer.save(directory / f"{name}-{location}.safetensors")
    resumed_plain, resumed_host = (Side(new(), ranks, offload, shared, device) for offload in (False, True))
    for side, source, location in ((resumed_plain, host, "host"), (resumed_host, plain, "device")):
        with torch.no_grad():
            for key, parameter in side.optimizer.parameters.items():
                local(parameter).copy_(local(source.optimizer.parameters[key]))
        side.norms = list(source.norms)
        side.optimizer.restore(directory / f"{name}-{location}.safetensors")
        same(side, source, name)
        side.learn(range(STEPS, STEPS + 1))
    plain.learn(range(STEPS, STEPS + 1))
    same(plain, resumed_plain, name)
    same(plain, resumed_host, name)


def check_host(ranks: Ranks) -> None:
    """The host has enough memory for one rank, and not for all ranks together."""
    free = free_memory()
    if free is None:
        return
    needed = ranks.everyone.from_main(round(0.6 * free), int)
    assert shortage(needed) == ""
    message = shortage(needed, ranks.everyone)
    count = ranks.everyone.size
    assert message.startswith(f"{count} × {gib(needed)} = {gib(count * needed)} GiB on "), message


def main() -> None:
    data, context, tensor, stages, expert = map(int, sys.argv[1:6])
    directory = Path(sys.argv[6])
    torch.set_num_threads(1)
    host_optimizer.BUCKET = 512  # some matrix shards are larger, some smaller
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
