"""The model of a supervised run: a policy, or a reward model with its head; in this process, or sharded over ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from plaudit.config import NewModel, PreferenceRecipe, PrmRecipe, Regression, RewardRecipe, SftRecipe
from plaudit.config.supervised import PolicyModelTable
from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import ConfigError, ModelError
from plaudit.models import (
    Kind,
    Loaded,
    choose_device,
    load_policy,
    load_reward,
    load_steps,
    load_tokenizer,
    new_llama,
    resolve,
    save,
)
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.shard_files import save_shards
from plaudit.train.optim.sharded_optimizer import new_optimizer
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy import lora
from plaudit.train.policy.reference import adapters_off
from plaudit.train.policy.rl_models import (
    check_layout,
    check_module,
    prepare,
    put_adapter,
    split_model,
    without_dropout,
)
from plaudit.train.run.checkpoint import Checkpoint
from plaudit.train.run.ranks import Ranks, together
from plaudit.worlds.sums import STEP_END
from plaudit.worlds.tokenizer import sums_tokenizer

KINDS: dict[str, Kind] = {"sft": "policy", "preference": "policy", "reward": "reward", "prm": "steps"}
SupervisedRecipe = SftRecipe | RewardRecipe | PrmRecipe | PreferenceRecipe


class SupervisedModel:
    """The trained model. `module` is the whole model or, over several ranks, this rank's `shards` of it."""

    def __init__(self, recipe: SupervisedRecipe, ranks: Ranks, checkpoint: Checkpoint | None) -> None:
        self.recipe = recipe
        self.ranks = ranks
        self.shards: Shards | None = None
        self.adapter = recipe.model.lora if isinstance(recipe.model, PolicyModelTable) else None
        check_layout(recipe.resources, recipe.model)
        # With an adapter the base weights are the initial ones; a checkpoint's model has the adapter merged.
        source = checkpoint.model if checkpoint is not None and self.adapter is None else None

        def ready(module: nn.Module) -> None:
            if recipe.task == "preference":
                without_dropout(module)
            if isinstance(recipe.model, PolicyModelTable):
                prepare(module, recipe.model, recipe.seed, checkpoint)
            _name_labels(module, recipe)

        if ranks.mesh is None:
            loaded = load_model(recipe, source)
            ready(loaded.module)
            self.module, self.tokenizer = loaded.module, loaded.tokenizer
        else:
            self.shards, self.tokenizer = split_supervised(recipe, source, ranks, ready)
            self.module = self.shards.module
            if isinstance(recipe.model, PolicyModelTable):
                put_adapter(self.shards, recipe.model, recipe.seed, checkpoint)
        use_packed_attention(self.module)
        self.module.train()

    def new_optimizer(self) -> Optimizer:
        return new_optimizer(self.module, self.recipe.train, shards=self.shards)

    @property
    def parameters(self) -> int:
        whole = self.module if self.shards is None else self.shards.skeleton
        return sum(parameter.numel() for parameter in whole.parameters())

    @contextmanager
    def whole(self) -> Iterator[Loaded | None]:
        """The whole model, for an engine; over several ranks a copy on the main rank, and None on the others."""
        if self.shards is None:
            yield Loaded(self.module, self.tokenizer, Path(), KINDS[self.recipe.task])
            use_packed_attention(self.module)  # the engine has set its own attention
            return
        module = self.shards.gathered()
        device = choose_device(self.recipe.model.device)
        yield None if module is None else Loaded(module.to(device).eval(), self.tokenizer, Path(), "policy")

    @contextmanager
    def at_start(self, resumed: bool) -> Iterator[nn.Module]:
        """The reference policy of preference training: the policy itself before its first step or with its adapter off,
        or else loaded from its path again."""
        if self.adapter is not None:
            with adapters_off(self.module):
                yield self.module
        elif not resumed:
            yield self.module
        else:
            if self.shards is None:
                base = load_model(self.recipe, None).module
            else:
                base = split_supervised(self.recipe, None, self.ranks, lambda _: None)[0].module
            use_packed_attention(base)
            yield base

    def save(self, directory: Path) -> None:
        """Save the model, by all ranks if it is sharded; with an adapter by the main rank."""
        reward = reward_toml(self.recipe)
        if self.shards is not None and self.adapter is None:
            save_shards(self.shards, self.tokenizer, directory, reward=reward)
            return
        module = self._on_main()

        def write() -> None:
            assert module is not None
            save(module if self.adapter is None else lora.merged(module), self.tokenizer, directory, reward=reward)

        self._by_main(write)

    def save_final(self, directory: Path) -> None:
        """Save the model, and the adapter if one was trained."""
        # It may exist, from a finished run that was extended by more steps.
        self._by_main(lambda: shutil.rmtree(directory / "adapter", ignore_errors=True))
        self.save(directory)
        if self.adapter is not None:
            base, module = str(resolve(str(self.recipe.model.path))), self._on_main()
            self._by_main(lambda: lora.save_adapter(module, base, directory / "adapter"))

    def save_adapter(self, directory: Path) -> None:
        """Save the adapter of a checkpoint, if there is one."""
        if self.adapter is None:
            return
        tensors = lora.adapter_tensors(self.module) if self.shards is None else self.shards.learned()
        self._by_main(lambda: save_file(tensors, directory / "adapter.safetensors"))

    def _on_main(self) -> nn.Module | None:
        return self.module if self.shards is None else self.shards.gathered()

    def _by_main(self, write: Callable[[], object]) -> None:
        together(self.ranks.everyone, write if self.ranks.main else lambda: None)


def load_model(recipe: SupervisedRecipe, checkpoint: Path | None) -> Loaded:
    """The checkpoint's model, else the recipe's, loaded from its path or new."""
    table, kind = recipe.model, KINDS[recipe.task]
    device = choose_device(table.device)
    labels = _labels(recipe)
    source = checkpoint or table.path
    if source is None:
        assert table.new is not None
        if recipe.data.world is None:
            raise ConfigError("[model.new] takes its tokenizer from data.world; with data.path give model.path")
        return _new_model(table.new, kind, recipe.seed, labels, device)
    if kind == "policy":
        return load_policy(source, table.dtype, device)
    fresh = checkpoint is None
    if kind == "reward":
        return load_reward(source, table.dtype, device, labels=labels or 1, fresh_head=fresh, seed=recipe.seed)
    return load_steps(source, table.dtype, device, fresh_head=fresh, seed=recipe.seed)


def _new_model(shape: NewModel, kind: Kind, seed: int, labels: int | None, device: str) -> Loaded:
    tokenizer = sums_tokenizer()
    module = new_llama(
        kind, vocab_size=len(tokenizer), hidden_size=shape.hidden, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, intermediate_size=shape.ffn, max_positions=shape.positions, seed=seed, labels=labels,
        tie_embeddings=shape.tie_embeddings, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Loaded(module.to(device), tokenizer, Path(), kind)


def split_supervised(
    recipe: SupervisedRecipe, checkpoint: Path | None, ranks: Ranks, ready: Callable[[nn.Module], None]
) -> tuple[Shards, PreTrainedTokenizerFast]:
    """The same, sharded over ranks. `ready` is called with the module before it is sharded."""
    table, kind = recipe.model, KINDS[recipe.task]
    source = checkpoint or table.path
    if source is None:  # every rank initialises it whole: new models are small
        loaded = load_model(recipe, None)
        try:
            check_module(loaded.module, recipe.resources)
        except ModelError as error:
            raise ConfigError(f"[model.new]: {error}") from error
        ready(loaded.module)
        return Shards(loaded.module, ranks), loaded.tokenizer
    shards = split_model(source, kind, table, ranks, ready, _labels(recipe), recipe.seed)
    return shards, load_tokenizer(resolve(source))


def _labels(recipe: SupervisedRecipe) -> int | None:
    """The number of outputs of a reward model that rates several attributes."""
    return len(recipe.algorithm.attributes) if isinstance(recipe.algorithm, Regression) else None


def _name_labels(module: nn.Module, recipe: SupervisedRecipe) -> None:
    config: Any = module.config
    if names := _label_names(recipe):
        config.id2label = dict(enumerate(names))
        config.label2id = {name: i for i, name in enumerate(names)}


def _label_names(recipe: SupervisedRecipe) -> tuple[str, ...]:
    """The names of the model's outputs, which are saved with it."""
    if KINDS[recipe.task] == "policy":
        return ()
    if recipe.task == "prm":
        return ("wrong", "right")
    return recipe.algorithm.attributes if isinstance(recipe.algorithm, Regression) else ("reward",)


def reward_toml(recipe: SupervisedRecipe) -> str | None:
    """The reward.toml of the trained model: how its scores are read; None for a policy."""
    if KINDS[recipe.task] == "policy":
        return None
    lines = ["# How this model's scores are read; `plaudit train` writes it."]
    if recipe.task == "prm":
        lines += ['kind = "process"']
        split = recipe.algorithm.split or (STEP_END if recipe.data.world is not None else None)
        if split is not None:
            lines += ["", "[format]", f"split = {json.dumps(split)}"]
    else:
        lines += ['kind = "outcome"', 'answer = "apart"']
        if isinstance(recipe.algorithm, Regression) and len(recipe.algorithm.attributes) > 1:
            names = recipe.algorithm.attributes
            lines += ["", "[weights]", *(f"{json.dumps(name)} = {1 / len(names)!r}" for name in names)]
    return "\n".join(lines) + "\n"
