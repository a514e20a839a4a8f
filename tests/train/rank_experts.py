"""Experts over ranks beside transformers' own forward pass, sequence by sequence. A test runs this on each rank:
python -m tests.train.rank_experts DATA CONTEXT EXPERT TENSOR"""

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
from tests.train.rank_context import IDS, alike, answered, by_itself
from tests.train.rl_world import made_up, recipe

UPDATES = 4


def samples() -> list[Sample]:
    return [
        replace(sample, **{name: tuple((t * 11 + 5) % VOCAB for t in getattr(sample, name)) for name in IDS})
        for sample in made_up()
    ]  # fmt: skip


def check(name: str, plain: Any, batch: list[Sample], ranks: Ranks, recompute: bool = False) -> None:
    """Every data rank has the loss of its own samples."""
    spread = copy.deepcopy(plain)
    use_packed_attention(spread)
    if recompute:
        spread.gradient_checkpointing_enable({"use_reentrant": False})
        spread.train()
    shards = Shards(spread, ranks)
    whole = by_itself(plain, batch)
    weights = torch.linspace(-1, 1, len(whole[0]))
    (whole[0] * weights + 0.1 * whole[1]).sum().backward()
    mine = ranks.data.share(len(batch))
    first = sum(len(sample.token_ids) for sample in batch[: mine.start])
    responses = pack_responses(batch[mine.start : mine.stop], torch.device("cpu"), context=ranks.context)
    rows = hidden_of(spread, responses)
    found = logprobs_and_entropy(Decoder(spread, "causal"), responses, rows, 1.0, entropy_grad=True)
    at = slice(first, first + len(found[0]))
    for value, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(value, expected[at], rtol=1e-5, atol=2e-5, msg=name)
    (found[0] * weights[at] + 0.1 * found[1]).sum().backward()  # type: ignore[no-untyped-call]
    alike(spread, plain, name)
    divided(shards, ranks)


def divided(shards: Shards, ranks: Ranks) -> None:
    """Each rank of a group has its own experts, whole or, with copies of the group, shards of them."""
    assert ranks.experts is not None
    for name, parameter in shards.parameters.items():
        if ".experts." in name:
            most = -(-parameter.shape[0] // ranks.expert.size // ranks.experts.size(0))
            assert parameter.to_local().shape[0] <= most, name


def six() -> nn.Module:
    """Three experts a rank, which do not divide over two groups."""
    torch.manual_seed(5)
    config = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
    module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return module


def one_sided() -> nn.Module:
    """Tokens take experts of the first half alone: other ranks get no rows."""
    module = mixture("qwen3_moe")
    for router in routers(module, "qwen3_moe"):
        router.register_forward_hook(lambda _, __, out: (*out[:2], out[2] % 4))
    return module


def learned(ranks: Ranks) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights, Adam's state and figures after a few updates of six experts, clipped, with a reference of eight."""
    tree = recipe(
        algorithm={"name": "grpo", "kl": {"coef": 0.1}}, train={"lr": 1e-4, "clip_norm": 0.5, "micro_batch_tokens": 24}
    )

    def policy(module: nn.Module) -> Policy:
        return Policy(
            Decoder(module, "causal"), tree.algorithm, temperature=0.9, max_tokens=16, micro_batch_tokens=24,
            group=ranks.data, context=ranks.context,
        )  # fmt: skip

    module, frozen = six() if 6 % ranks.expert.size == 0 else mixture("qwen3_moe"), mixture("qwen3_moe", seed=9)
    frozen.requires_grad_(False)
    adam: Optimizer
    if ranks.mesh is None:
        adam = Optimizer(module, tree.train)
    else:
        adam = ShardedOptimizer(Shards(module, ranks), tree.train)
        Shards(frozen, ranks)
    learner = RlLearner(tree, policy(module), adam, None, policy(frozen), Clock())
    figures = [learner.update(Batch(tuple(made_up(seed=step + 1))), step)[0] for step in range(UPDATES)]
    found = {name: full(parameter).detach().clone() for name, parameter in module.named_parameters()}
    for path, part in adam.state().items():
        name = path.split("/", 1)[1]
        whole = part.ndim == 0 or not isinstance(adam, ShardedOptimizer)
        found[path] = part if whole else adam.shards.whole(part, adam.shards.parameters[name])  # type: ignore[attr-defined]
    return found, figures


def check_updates(ranks: Ranks) -> None:
    (found, figures), (expected, wanted) = learned(ranks), learned(replace(ALONE, expert=ranks.expert))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        near = 2e-5 if name.startswith("exp_avg_sq") else 1e-5  # of squares
        assert (found[name] - tensor).norm() <= near * tensor.norm().clamp_min(1e-12), name
    for told, said in zip(figures, wanted, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "kl/loss", "policy/ratio_max"):
            assert abs(told[name] - said[name]) <= 1e-5 * max(1.0, abs(said[name])), (name, told[name], said[name])
    assert min(said["policy/grad_norm"] for said in wanted) > 0.5, "else nothing is clipped"


def main() -> None:
    data, context, expert, tensor = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    resources = ResourcesTable(
        data_parallel=data, context_parallel=context, expert_parallel=expert, tensor_parallel=tensor, timeout=60.0
    )
    with join(resources, "cpu") as ranks:
        check_updates(ranks)
        if tensor > 1:  # of Qwen3's norms in heads, which the updates have, a rank has the gradient of its own heads
            for family in ("mixtral", "deepseek_v3"):
                check(family, mixture(family), samples(), ranks)
            check("recomputed", mixture("mixtral"), samples(), ranks, recompute=True)
            check("few", mixture("mixtral"), [answered(sample, (3,)) for sample in samples()[:data]], ranks)
            return
        for family in CONFIGS:
            check(family, mixture(family), samples(), ranks)
        check("recomputed", mixture("qwen3_moe"), samples(), ranks, recompute=True)
        if 6 % expert == 0:
            check("six", six(), samples(), ranks)
        few = [answered(sample, (3,)) for sample in samples()[:data]]
        check("few", mixture("qwen3_moe"), few, ranks)
        check("one-sided", one_sided(), samples(), ranks)


if __name__ == "__main__":
    main()
