"""The models of an RL run: the policy, the reference it is held near, its teachers, the critic."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from plaudit.config import RlRecipe
from plaudit.config.supervised import PolicyModelTable
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.fused import recompute_contexts
from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import ConfigError
from plaudit.models import Loaded, ValueModel, choose_device, load_policy, load_value
from plaudit.train.optim.host_optimizer import new_optimizer
from plaudit.train.optim.sharded_optimizer import ShardedOptimizer
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy import lora
from plaudit.train.policy.critic import Critic, LocalCritic, SharedCritic
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.reference import Reference, WithoutAdapter
from plaudit.train.policy.remote_critic import RemoteCritic
from plaudit.train.policy.served_teacher import ServedTeacher
from plaudit.train.policy.teachers import LocalTeacher, Teacher, Teachers, check_vocabulary
from plaudit.train.run.checkpoint import Checkpoint
from plaudit.train.run.overdue import Warn
from plaudit.train.run.ranks import Ranks


def load_trained(table: PolicyModelTable, seed: int, checkpoint: Checkpoint | None) -> Loaded:
    """The policy as it is at the start of this run or, with a checkpoint, as it was there."""
    assert table.path is not None
    source = checkpoint.model if checkpoint is not None and table.lora is None else table.path
    loaded = load_policy(source, table.dtype, choose_device(table.device))
    without_dropout(loaded.module)
    prepare(loaded.module, table, seed, checkpoint)
    return loaded


def prepare(module: nn.Module, table: PolicyModelTable, seed: int, checkpoint: Checkpoint | None) -> None:
    """The adapter, as it was at the checkpoint if there is one, and recomputation, as the recipe says."""
    if table.lora is not None:
        lora.attach(module, table.lora, seed)
        if checkpoint is not None:
            lora.load_adapter(module, load_file(checkpoint.path / "adapter.safetensors"))
    if table.recompute:
        again = {"use_reentrant": False, "context_fn": recompute_contexts}
        module.gradient_checkpointing_enable(again)  # type: ignore[operator]
        module.train()  # transformers recomputes in this mode alone; without dropout it differs in nothing else


def new_reference(recipe: RlRecipe, policy: Policy, ranks: Ranks) -> Reference | None:
    """None without a KL: then no second model is held."""
    if recipe.algorithm.kl.coef == 0:
        return None
    if recipe.model.lora is not None:
        return WithoutAdapter(policy)
    assert recipe.model.path is not None
    loaded = load_policy(recipe.model.path, recipe.model.dtype, choose_device(recipe.model.device))
    return _frozen(loaded.module, recipe, ranks)


def new_teachers(recipe: RlRecipe, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, warn: Warn) -> Teachers | None:
    """None without any. `tokenizer` is the policy's."""
    tables = recipe.algorithm.teachers
    if not tables:
        return None
    found: dict[str, Teacher] = {}
    with ExitStack() as undo:
        for name, table in tables.items():
            if table.path is None:
                found[name] = ServedTeacher(name, table, tokenizer, warn)
            else:
                found[name] = _local_teacher(name, table.path, table.top_k, recipe, tokenizer, ranks)
            undo.callback(found[name].close)
        undo.pop_all()
    return Teachers(found, {name: table.top_k for name, table in tables.items()})


def _local_teacher(
    name: str, path: str, top_k: int, recipe: RlRecipe, tokenizer: PreTrainedTokenizerFast, ranks: Ranks
) -> LocalTeacher:
    loaded = load_policy(path, recipe.model.dtype, choose_device(recipe.model.device))
    check_vocabulary(name, path, loaded.tokenizer, tokenizer)
    if top_k > len(tokenizer):
        raise ConfigError(
            f"algorithm.teachers.{name}.top_k = {top_k}, and the vocabulary has {len(tokenizer)} tokens: take fewer"
        )
    return LocalTeacher(_frozen(loaded.module, recipe, ranks), len(tokenizer))


def _frozen(module: nn.Module, recipe: RlRecipe, ranks: Ranks) -> Policy:
    """A model that is read as the policy is, and learns nothing."""
    module.requires_grad_(False)
    use_packed_attention(module)
    if ranks.mesh is not None:
        Shards(module, ranks)
    return Policy(
        Decoder(module, "causal"), recipe.algorithm, temperature=recipe.sampling.temperature,
        max_tokens=recipe.sampling.max_tokens, micro_batch_tokens=recipe.train.micro_batch_tokens, group=ranks.data,
    )  # fmt: skip


def new_critic(
    recipe: RlRecipe, policy: Policy, vocabulary: int, ranks: Ranks, checkpoint: Checkpoint | None, warn: Warn
) -> Critic | None:
    table = recipe.critic
    if table is None:
        return None
    if table.shared:
        return SharedCritic(policy)
    if table.url is not None:
        return RemoteCritic(table, recipe.algorithm.clip.value, vocabulary, warn)
    source = checkpoint.path / "critic" if checkpoint is not None else table.path or recipe.model.path
    assert source is not None
    loaded = load_value(
        source, recipe.model.dtype, choose_device(recipe.model.device), fresh_head=checkpoint is None,
        seed=recipe.seed,
    )  # fmt: skip
    model = loaded.module
    assert isinstance(model, ValueModel)
    if len(loaded.tokenizer) != vocabulary:
        raise ConfigError(
            f"critic.path has a vocabulary of {len(loaded.tokenizer)} tokens and the policy one of {vocabulary}: "
            "the critic reads the policy's tokens, so they must be the same"
        )
    if checkpoint is None:
        nn.init.zeros_(model.score.weight)  # nothing is known yet, and nothing is claimed
    without_dropout(model)
    train = recipe.train.model_copy(update={"lr": table.lr, "clip_norm": table.clip_norm})
    shards = None if ranks.mesh is None else Shards(model, ranks)
    optimizer = new_optimizer(model, train) if shards is None else ShardedOptimizer(shards, train)
    optimizer.key = "critic.lr"
    return LocalCritic(
        model, loaded.tokenizer, optimizer, clip=recipe.algorithm.clip.value,
        micro_batch_tokens=recipe.train.micro_batch_tokens, shards=shards, group=ranks.data,
    )  # fmt: skip


def without_dropout(module: nn.Module) -> None:
    """Two forward passes on the same tokens must agree: the ratio of an update starts at 1."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0  # type: ignore[assignment]


def value_head(module: nn.Module) -> nn.Linear:
    """Of a critic that shares the policy's trunk."""
    config: Any = module.config
    device = next(module.parameters()).device
    head = nn.Linear(config.get_text_config().hidden_size, 1, bias=False, device=device)
    nn.init.zeros_(head.weight)
    return head
