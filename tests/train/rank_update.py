"""One update of a policy and its critic, on any number of ranks. A test calls `update` for one rank, and runs this file
as a program on each of several: python -m tests.train.rank_update DATA CONTEXT TENSOR PIPELINE DIRECTORY"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, PreTrainedConfig, Qwen3Config

from plaudit.config.placement import ResourcesTable
from plaudit.core.model.decoder import Decoder
from plaudit.models import new_llama
from plaudit.models.fresh import seeded
from plaudit.models.heads.value_head import ValueModel
from plaudit.models.weights import read_stem
from plaudit.records import Batch
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.shard_files import Whole, of_all_stages
from plaudit.train.optim.sharded_optimizer import ShardedOptimizer
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy.critic import LocalCritic
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.policy.teachers import LocalTeacher, Teachers
from plaudit.train.run.clock import Clock
from plaudit.train.run.ranks import Ranks, join
from tests.train.rl_world import VOCABULARY, made_up, recipe, tiny

# A learning rate too small to change a weight: gradients and ratios stay those of the initial weights.
TRAIN = {"lr": 1e-30, "clip_norm": 1e9, "micro_batch_tokens": 24}
# One that changes weights. Adam's step has the size of the learning rate however small the gradient is: at 1e-3 a
# single weight whose gradient is 1e-9, all of it rounding, would differ by 1.4e-5.
MOVING = {**TRAIN, "lr": 1e-4}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "train": TRAIN},
    "ppo": {"algorithm": {"name": "ppo", "kl": {"coef": 0.1}}, "train": TRAIN, "critic": {"clip_norm": 1e9}},
    "ratio": {"algorithm": {"name": "gspo"}, "train": {**TRAIN, "minibatches": 2, "epochs": 2}},
    "norms": {"algorithm": {"name": "dapo"}, "train": MOVING},
    "one_key": {"algorithm": {"name": "dapo"}, "train": MOVING},
    "deepseek_v2": {"algorithm": {"name": "dapo"}, "train": MOVING},
    "deepseek_v3": {"algorithm": {"name": "dapo"}, "train": MOVING},
    "distill": {
        "algorithm": {"name": "distill", "entropy": 0.01, "teachers": {"one": {"path": "unread", "top_k": 5}}},
        "train": MOVING,
    },
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "first_k_dense_replace": 2,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "norms": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "one_key": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, attention_bias=True),
    "deepseek_v2": DeepseekV2Config(**LATENT, q_lora_rank=None, n_routed_experts=4),
    "deepseek_v3": DeepseekV3Config(**LATENT, q_lora_rank=10, n_routed_experts=4, attention_bias=True),
}


class Update(NamedTuple):
    tensors: dict[str, Tensor]
    """Gradients and Adam's state, whole; weights after the update."""
    metrics: dict[str, float]


def models(case: str) -> tuple[nn.Module, nn.Module | None]:
    """The policy and its reference or teacher, if any. Cases: tied embeddings, untied with a vocabulary that is not
    divisible, per-head norms, one key-value head that all heads share, latent attention."""
    if case in CONFIGS:
        with seeded(3):
            return AutoModelForCausalLM.from_config(CONFIGS[case]).float().eval(), None
    if case in ("ppo", "distill"):
        untied = [
            new_llama(
                "policy", vocab_size=VOCABULARY + 1, hidden_size=32, layers=2, heads=4, kv_heads=2,
                intermediate_size=64, max_positions=64, seed=seed, tie_embeddings=False,
            )
            for seed in (3, 4)
        ]  # fmt: skip
        return untied[0], untied[1]
    return tiny(), tiny(seed=4) if case == "grpo" else None


def learner(case: str, ranks: Ranks, device: str = "cpu") -> tuple[RlLearner, LocalCritic | None]:
    tree = recipe(**CASES[case])

    def policy(module: nn.Module) -> Policy:
        return Policy(
            Decoder(module, "causal"), tree.algorithm, temperature=0.9, max_tokens=16, micro_batch_tokens=24,
            group=ranks.data, context=ranks.context,
        )  # fmt: skip

    def optimizer(module: nn.Module) -> tuple[Optimizer, Shards | None]:
        shards = None if ranks.mesh is None else Shards(module, ranks)
        return (
            (Optimizer(module, tree.train), None) if shards is None else (ShardedOptimizer(shards, tree.train), shards)
        )

    module, frozen = (None if each is None else each.to(device) for each in models(case))
    assert module is not None
    policy_optimizer = optimizer(module)[0]
    if frozen is not None:
        frozen.requires_grad_(False)
        if ranks.mesh is not None:
            Shards(frozen, ranks)
    frozen_policy = None if frozen is None else policy(frozen)
    critic = None
    if tree.critic is not None:
        model = tiny("value").to(device)
        assert isinstance(model, ValueModel)
        adam, shards = optimizer(model)
        critic = LocalCritic(
            model, None, adam, clip=0.2, micro_batch_tokens=24, shards=shards, group=ranks.data,  # type: ignore[arg-type]
            context=ranks.context,
        )  # fmt: skip
    if case == "distill":
        assert frozen_policy is not None
        teachers = Teachers({"one": LocalTeacher(frozen_policy, VOCABULARY)}, {"one": 5})
        return RlLearner(tree, policy(module), policy_optimizer, None, None, Clock(), teachers), None
    return RlLearner(tree, policy(module), policy_optimizer, critic, frozen_policy, Clock()), critic


def update(case: str, ranks: Ranks, directory: Path, device: str = "cpu") -> Update:
    trainer, critic = learner(case, ranks, device)
    parts = {"policy": trainer.optimizer} | ({} if critic is None else {"critic": critic.optimizer})
    for adam in parts.values():
        adam.drop = lambda: None  # type: ignore[method-assign] (gradients stay, to be looked at)
    metrics, _ = trainer.update(Batch(tuple(made_up())), 0)
    tensors: dict[str, Tensor] = {}
    for name, adam in parts.items():
        tensors |= {f"{name}/{key}": value for key, value in gathered_gradients(adam).items()}
        tensors |= {
            f"{name}-state/{key}": value for key, value in saved_state(adam, directory / f"{name}-adam").items()
        }
    for name, module in {
        "policy": trainer.policy.module,
        **({} if critic is None else {"critic": critic.model}),
    }.items():
        tensors |= {f"{name}-weights/{n}": tensor for n, tensor in weights_of(module, parts[name]).items()}
    return Update(tensors, metrics)


def saved_state(adam: Optimizer, path: Path) -> dict[str, Tensor]:
    """The optimizer's state, saved and read back."""
    adam.save(path.with_suffix(".safetensors"))
    return {name: at.read() for name, at in read_stem(path.with_suffix(".safetensors")).items()}


def gathered_gradients(adam: Optimizer) -> dict[str, Tensor]:
    """Unsharded gradients by parameter, as the optimizer used them in its step."""
    gradients: dict[str, Any] = {}
    for name in adam.parameters:
        gradient = adam.gradient(name)
        assert gradient is not None, name
        if not isinstance(adam, ShardedOptimizer):
            gradients[name] = gradient.clone()
            continue
        full = adam.shards.whole(gradient, adam.shards.parameters[name])
        gradients[name] = Whole(name, full.dtype, tuple(full.shape), full.clone)
    if not isinstance(adam, ShardedOptimizer):
        return gradients
    return {each.name: each.gather() for each in of_all_stages(list(gradients.values()), adam.shards.stage)}


def weights_of(module: nn.Module, adam: Optimizer) -> dict[str, Tensor]:
    if isinstance(adam, ShardedOptimizer):
        return {name: adam.shards.full(name).detach().clone() for name in adam.shards.learning}
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def main() -> None:
    data, context, tensor, stages, directory = *map(int, sys.argv[1:5]), Path(sys.argv[5])
    torch.set_num_threads(1)
    resources = ResourcesTable(
        data_parallel=data, context_parallel=context, tensor_parallel=tensor, pipeline_parallel=stages, timeout=60.0
    )
    with join(resources, "cpu") as ranks:
        for case in CASES:
            result = update(case, ranks, directory)
            if ranks.main:
                save_file({n: t.contiguous() for n, t in result.tensors.items()}, directory / f"{case}.safetensors")
            (directory / f"{case}-{ranks.everyone.index}.json").write_text(json.dumps(result.metrics))


if __name__ == "__main__":
    main()
