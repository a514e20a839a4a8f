"""Compares experts sharded over ranks with transformers' own forward pass, one sequence at a time. A test runs this on
each rank: python -m tests.train.rank_experts DATA CONTEXT EXPERT TENSOR"""

import copy
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from plaudit.config.placement import ResourcesTable
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import use_packed_attention
from plaudit.records import Batch, Sample
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.sharded_optimizer import ShardedOptimizer
from plaudit.train.optim.sharding import Shards, full
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.run.clock import Clock
from plaudit.train.run.ranks import ALONE, Ranks, join
from tests.core.mixtures import CONFIGS, SIZES, VOCAB, mixture, routers
from tests.train.rank_context import IDS, alike, by_itself, with_response
from tests.train.rl_world import made_up, recipe

UPDATES = 4


def samples() -> list[Sample]:
    return [
        replace(sample, **{name: tuple((t * 11 + 5) % VOCAB for t in getattr(sample, name)) for name in IDS})
        for sample in made_up()
    ]  # fmt: skip


def check(name: str, plain: Any, batch: list[Sample], ranks: Ranks, recompute: bool = False) -> None:
    """Every data rank computes the loss of its own samples."""
    sharded = copy.deepcopy(plain)
    use_packed_attention(sharded)
    if recompute:
        sharded.gradient_checkpointing_enable({"use_reentrant": False})
        sharded.train()
    shards = Shards(sharded, ranks)
    reference = by_itself(plain, batch)
    weights = torch.linspace(-1, 1, len(reference[0]))
    (reference[0] * weights + 0.1 * reference[1]).sum().backward()
    share = ranks.data.share(len(batch))
    first = sum(len(sample.token_ids) for sample in batch[: share.start])
    responses = pack_responses(batch[share.start : share.stop], torch.device("cpu"), context=ranks.context)
    rows = hidden_of(sharded, responses)
    outputs = logprobs_and_entropy(Decoder(sharded, "causal"), responses, rows, 1.0, entropy_grad=True)
    rows_of_rank = slice(first, first + len(outputs[0]))
    for value, expected in zip(outputs, reference, strict=True):
        torch.testing.assert_close(value, expected[rows_of_rank], rtol=1e-5, atol=2e-5, msg=name)
    (outputs[0] * weights[rows_of_rank] + 0.1 * outputs[1]).sum().backward()  # type: ignore[no-untyped-call]
    alike(sharded, plain, name)
    check_expert_shards(shards, ranks)


def check_expert_shards(shards: Shards, ranks: Ranks) -> None:
    """Each rank of a group stores its own experts: whole, or shards of them where the group is replicated."""
    assert ranks.experts is not None
    for name, parameter in shards.parameters.items():
        if ".experts." in name:
            limit = -(-parameter.shape[0] // ranks.expert.size // ranks.experts.size(0))
            assert parameter.to_local().shape[0] <= limit, name


def six_experts() -> nn.Module:
    """Six experts: three per rank, which are not divisible over two groups."""
    torch.manual_seed(5)
    config = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
    module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return module


def one_sided() -> nn.Module:
    """Tokens are routed to experts of the first half only: other ranks get no rows."""
    module = mixture("qwen3_moe")
    for router in routers(module, "qwen3_moe"):
        router.register_forward_hook(lambda _, __, out: (*out[:2], out[2] % 4))
    return module


def run_updates(ranks: Ranks) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights, Adam's state and metrics after a few updates of six experts, clipped, with a reference of eight."""
    tree = recipe(
        algorithm={"name": "grpo", "kl": {"coef": 0.1}}, train={"lr": 1e-4, "clip_norm": 0.5, "micro_batch_tokens": 24}
    )

    def policy(module: nn.Module) -> Policy:
        return Policy(
            Decoder(module, "causal"), tree.algorithm, temperature=0.9, max_tokens=16, micro_batch_tokens=24,
            group=ranks.data, context=ranks.context,
        )  # fmt: skip

    module, frozen = six_experts() if 6 % ranks.expert.size == 0 else mixture("qwen3_moe"), mixture("qwen3_moe", seed=9)
    frozen.requires_grad_(False)
    adam: Optimizer
    if ranks.mesh is None:
        adam = Optimizer(module, tree.train)
    else:
        adam = ShardedOptimizer(Shards(module, ranks), tree.train)
        Shards(frozen, ranks)
    learner = RlLearner(tree, policy(module), adam, None, policy(frozen), Clock())
    metrics = [learner.update(Batch(tuple(made_up(seed=step + 1))), step)[0] for step in range(UPDATES)]
    tensors = {name: full(parameter).detach().clone() for name, parameter in module.named_parameters()}
    for path, part in adam.state().items():
        name = path.split("/", 1)[1]
        replicated = part.ndim == 0 or not isinstance(adam, ShardedOptimizer)
        tensors[path] = part if replicated else adam.shards.whole(part, adam.shards.parameters[name])  # type: ignore[attr-defined]
    return tensors, metrics


def check_updates(ranks: Ranks) -> None:
    (actual, metrics), (expected, expected_metrics) = (
        run_updates(ranks),
        run_updates(replace(ALONE, expert=ranks.expert)),
    )
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = 2e-5 if name.startswith("exp_avg_sq") else 1e-5  # of squared gradients
        assert (actual[name] - tensor).norm() <= tolerance * tensor.norm().clamp_min(1e-12), name
    for values, references in zip(metrics, expected_metrics, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "kl/loss", "policy/ratio_max"):
            assert abs(values[name] - references[name]) <= 1e-5 * max(1.0, abs(references[name])), (
                name,
                values[name],
                references[name],
            )
    assert min(references["policy/grad_norm"] for references in expected_metrics) > 0.5, "else nothing is clipped"


def main() -> None:
    data, context, expert, tensor = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    resources = ResourcesTable(
        data_parallel=data, context_parallel=context, expert_parallel=expert, tensor_parallel=tensor, timeout=60.0
    )
    with join(resources, "cpu") as ranks:
        check_updates(ranks)
        if tensor > 1:  # the updates cover Qwen3's per-head norms, whose gradient on a rank is that of its own heads
            for family in ("mixtral", "deepseek_v3"):
                check(family, mixture(family), samples(), ranks)
            check("recomputed", mixture("mixtral"), samples(), ranks, recompute=True)
            check("few", mixture("mixtral"), [with_response(sample, (3,)) for sample in samples()[:data]], ranks)
            return
        for family in CONFIGS:
            check(family, mixture(family), samples(), ranks)
        check("recomputed", mixture("qwen3_moe"), samples(), ranks, recompute=True)
        if 6 % expert == 0:
            check("six", six_experts(), samples(), ranks)
        few = [with_response(sample, (3,)) for sample in samples()[:data]]
        check("few", mixture("qwen3_moe"), few, ranks)
        check("one-sided", one_sided(), samples(), ranks)


if __name__ == "__main__":
    main()
