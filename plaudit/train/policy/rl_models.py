"""The models of an RL run: the policy, the reference model of its KL penalty, its teachers, the critic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from plaudit.config import RlRecipe
from plaudit.config.placement import RanksTable
from plaudit.config.supervised import ModelTable, PolicyModelTable, names_experts
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.fused import recompute_contexts
from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import ConfigError, ModelError
from plaudit.models import (
    Kind,
    Loaded,
    ValueModel,
    choose_device,
    load_policy,
    load_reward,
    load_steps,
    load_tokenizer,
    load_value,
    resolve,
)
from plaudit.models.fresh import LABELS, init_head
from plaudit.models.load import heads_of
from plaudit.models.part import compute_buffers, outline
from plaudit.train.optim.context import check_context
from plaudit.train.optim.experts import check_experts
from plaudit.train.optim.pipeline import check_stages, stage_of
from plaudit.train.optim.sharded_optimizer import new_optimizer
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


def check_models(recipe: RlRecipe) -> None:
    """Raise if a model cannot do what the recipe requires, before any weights are read."""
    check_routing(recipe)
    check_ranks(recipe)


def check_routing(recipe: RlRecipe) -> None:
    """Raise if the experts of the policy cannot be recorded and replayed, before any of its weights are read."""
    if not recipe.train.routing_replay:
        return
    assert recipe.model.path is not None
    devices = {choose_device(recipe.model.device), *(recipe.resources.rollout.devices or ())}
    if others := sorted(devices - {"cpu"}):
        raise ConfigError(
            f"train.routing_replay records experts on a CPU, and this run is on {', '.join(others)}: set model.device "
            '= "cpu", or remove it'
        )
    if "expert" not in (resolve(recipe.model.path) / "config.json").read_text(encoding="utf-8"):
        raise ConfigError(f"train.routing_replay is for mixtures, and {recipe.model.path} has no experts: remove it")


def check_ranks(recipe: RlRecipe) -> None:
    """Raise if ranks cannot split rows, experts or layers of one of the models, before any weights are read."""
    critic = None if recipe.critic is None else recipe.critic.path
    teachers = [table.path for table in recipe.algorithm.teachers.values()]
    check_layout(recipe.resources, recipe.model, [critic, *teachers])


def check_layout(resources: RanksTable, table: ModelTable, others: Sequence[str | None] = ()) -> None:
    """The same for the model of a table, given by its path, and for others beside it."""
    size, stages = resources.expert_parallel, resources.pipeline_parallel
    if resources.context_parallel == size == stages == 1:
        return
    adapter = table.lora if isinstance(table, PolicyModelTable) else None
    if size > 1 and adapter is not None and names_experts(adapter.targets):
        raise ConfigError(
            f"model.lora.targets names layers of experts, which resources.expert_parallel = {size} "
            "splits by whole experts: target attention layers, or set expert_parallel = 1"
        )
    for path in dict.fromkeys([table.path, *others]):
        if path is None:
            continue
        try:
            check_module(outline(path, table.dtype).module, resources, learns=path == table.path)
        except ModelError as error:
            raise ConfigError(f"{path}: {error}") from error


def check_module(module: nn.Module, resources: RanksTable, learns: bool = True) -> None:
    """The same for one module, which may be on the meta device. `learns`: it is trained, with its experts split."""
    size = resources.expert_parallel
    if resources.context_parallel > 1:
        check_context(module, resources.tensor_parallel, resources.context_parallel)
    if size > 1 and not check_experts(module, size) and learns:
        raise ModelError(f"it has no experts for expert_parallel = {size} ranks: remove resources.expert_parallel")
    if resources.pipeline_parallel > 1:
        check_stages(module, resources.pipeline_parallel)


def split_model(
    source: str | Path, kind: Kind, table: ModelTable, ranks: Ranks, prepare: Callable[[nn.Module], object],
    labels: int | None = None, seed: int = 0,
) -> Shards:  # fmt: skip
    """A model sharded over the ranks, of which each reads only its own part. `prepare` is called with the module before
    it is sharded, when it may have no weights yet. A head that is in no file is initialised from the seed; a value head
    is left to the caller."""
    device = choose_device(table.device)
    seen = outline(source, table.dtype, device, kind, labels)
    if seen.readable:
        compute_buffers(seen.module, device)
        prepare(seen.module)
        shards = Shards(seen.module, ranks)
        shards.fill(seen.stored, device)
        if kind in LABELS and seen.new:
            _draw_heads(shards, seed)
        return shards
    # transformers reads files whose tensors are stored in a form that only it knows.
    if kind == "policy":
        loaded = load_policy(source, table.dtype, device)
    elif kind == "value":
        loaded = load_value(source, table.dtype, device, fresh_head=True)
    else:
        load = load_reward if kind == "reward" else load_steps
        loaded = load(source, table.dtype, device, labels=labels or LABELS[kind], fresh_head=True, seed=seed)
    prepare(loaded.module)
    return Shards(loaded.module, ranks)


def _draw_heads(shards: Shards, seed: int) -> None:
    """Initialise heads as `models.load` does on one rank: they are small, so every rank makes them whole."""
    for name, blank in heads_of(shards.skeleton).items():
        head = copy.deepcopy(blank).to_empty(device="cpu")
        init_head(head, shards.skeleton.config, seed)
        for leaf, value in head.named_parameters():
            shards.put(f"{name}.{leaf}", value.detach().to(shards.device))


def load_trained(table: PolicyModelTable, seed: int, checkpoint: Checkpoint | None) -> Loaded:
    """The policy at the start of this run or, with a checkpoint, at the checkpoint."""
    loaded = load_policy(_source(table, checkpoint), table.dtype, choose_device(table.device))
    without_dropout(loaded.module)
    prepare(loaded.module, table, seed, checkpoint)
    return loaded


def split_trained(table: PolicyModelTable, seed: int, checkpoint: Checkpoint | None, ranks: Ranks) -> Shards:
    """The same, sharded over ranks."""

    def ready(module: nn.Module) -> None:
        without_dropout(module)
        prepare(module, table, seed, checkpoint)

    shards = split_model(_source(table, checkpoint), "policy", table, ranks, ready)
    put_adapter(shards, table, seed, checkpoint)
    return shards


def put_adapter(shards: Shards, table: PolicyModelTable, seed: int, checkpoint: Checkpoint | None) -> None:
    """Set the adapter of shards that have one: the checkpoint's or, without a checkpoint, the one that training starts
    with. Every rank has it whole and takes its part."""
    if table.lora is None:
        return
    if checkpoint is not None:
        values = load_file(checkpoint.path / "adapter.safetensors")
    else:
        values = lora.drawn(shards.skeleton, table.lora, seed)
    for name, value in values.items():
        shards.put(name, value.to(shards.device))


def _source(table: PolicyModelTable, checkpoint: Checkpoint | None) -> str | Path:
    assert table.path is not None
    return checkpoint.model if checkpoint is not None and table.lora is None else table.path


def prepare(module: nn.Module, table: PolicyModelTable, seed: int, checkpoint: Checkpoint | None) -> None:
    """Add the adapter, from the checkpoint if there is one, and activation checkpointing, as set in the recipe."""
    if table.lora is not None:
        lora.attach(module, table.lora, seed)
        if checkpoint is not None:
            lora.load_adapter(module, load_file(checkpoint.path / "adapter.safetensors"))
    if table.recompute:
        again = {"use_reentrant": False, "context_fn": recompute_contexts}
        module.gradient_checkpointing_enable(again)  # type: ignore[operator]
        module.train()  # transformers recomputes only in this mode, which without dropout changes nothing else


def new_reference(recipe: RlRecipe, policy: Policy, ranks: Ranks) -> Reference | None:
    """The reference model; None without a KL penalty, which saves its memory."""
    if recipe.algorithm.kl.coef == 0:
        return None
    if recipe.model.lora is not None:
        return WithoutAdapter(policy)
    assert recipe.model.path is not None
    return _frozen(recipe.model.path, recipe, ranks)


def new_teachers(recipe: RlRecipe, tokenizer: PreTrainedTokenizerFast, ranks: Ranks, warn: Warn) -> Teachers | None:
    """The teachers; None without any. `tokenizer` is the policy's."""
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
    check_vocabulary(name, path, load_tokenizer(resolve(path)), tokenizer)
    if top_k > len(tokenizer):
        raise ConfigError(
            f"algorithm.teachers.{name}.top_k = {top_k}, and the vocabulary has {len(tokenizer)} tokens: take fewer"
        )
    return LocalTeacher(_frozen(path, recipe, ranks), len(tokenizer))


def _frozen(path: str, recipe: RlRecipe, ranks: Ranks) -> Policy:
    """A model that is read as the policy is, and not trained."""

    def freeze(module: nn.Module) -> None:
        module.requires_grad_(False)
        use_packed_attention(module)

    if ranks.mesh is None:
        module = load_policy(path, recipe.model.dtype, choose_device(recipe.model.device)).module
        freeze(module)
    else:
        module = split_model(path, "policy", recipe.model, ranks, freeze).module
    return Policy(
        Decoder(module, "causal"), recipe.algorithm, temperature=recipe.sampling.temperature,
        max_tokens=recipe.sampling.max_tokens, micro_batch_tokens=recipe.train.micro_batch_tokens, group=ranks.data,
        context=ranks.context,
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
    if (tokens := len(tokenizer := load_tokenizer(resolve(source)))) != vocabulary:
        raise ConfigError(
            f"critic.path has a vocabulary of {tokens} tokens and the policy one of {vocabulary}: "
            "the critic reads the policy's tokens, so they must be the same"
        )
    shards = None
    if ranks.mesh is None:
        device, fresh = choose_device(recipe.model.device), checkpoint is None
        model = load_value(source, recipe.model.dtype, device, fresh_head=fresh, seed=recipe.seed).module
        without_dropout(model)
    else:
        shards = split_model(source, "value", recipe.model, ranks, without_dropout)
        model = shards.module
    assert isinstance(model, ValueModel)
    if checkpoint is None and stage_of(model).last:
        nn.init.zeros_(model.score.weight)  # the initial value is 0 everywhere
    train = recipe.train.model_copy(update={"lr": table.lr, "clip_norm": table.clip_norm})
    optimizer = new_optimizer(model, train, shards=shards)
    optimizer.key = "critic.lr"
    return LocalCritic(
        model, tokenizer, optimizer, clip=recipe.algorithm.clip.value,
        micro_batch_tokens=recipe.train.micro_batch_tokens, shards=shards, group=ranks.data,
        context=ranks.context,
    )  # fmt: skip


def without_dropout(module: nn.Module) -> None:
    """Turn dropout off: two forward passes on the same tokens must agree, so that an update's ratio starts at 1."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0  # type: ignore[assignment]


def value_head(decoder: Decoder) -> nn.Linear:
    """The value head of a critic that shares the policy's trunk."""
    head = nn.Linear(decoder.config.hidden_size, 1, bias=False, device=decoder.device)
    nn.init.zeros_(head.weight)
    return head
