"""The training state of this process: policy and optimizer, critic, reference, teachers, and the learner."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from plaudit.config import RlRecipe
from plaudit.core.model.decoder import Decoder
from plaudit.core.proof.support import inspect
from plaudit.core.routing import Routing
from plaudit.models import Loaded, load_tokenizer, resolve, save
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.shard_files import save_shards
from plaudit.train.optim.sharded_optimizer import new_optimizer
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy import lora
from plaudit.train.policy.critic import LocalCritic
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.remote_critic import RemoteCritic
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.policy.rl_models import (
    load_trained,
    new_critic,
    new_reference,
    new_teachers,
    split_trained,
    value_head,
)
from plaudit.train.policy.teachers import Teachers
from plaudit.train.run.checkpoint import OPTIMIZER, Checkpoint
from plaudit.train.run.clock import Clock
from plaudit.train.run.overdue import Warn
from plaudit.train.run.ranks import Ranks, together


class Trainee:
    """`loaded` has the whole policy. Over several ranks the learner trains `shards` of it, and the whole one, which is
    for engines, is as they were at the last `make_whole`; on a rank whose engines need no whole one, or that has none
    to serve, it has no weights."""

    def __init__(self, recipe: RlRecipe, ranks: Ranks, checkpoint: Checkpoint | None, clock: Clock, warn: Warn) -> None:
        self.recipe = recipe
        self.ranks = ranks
        self.shards: Shards | None = None
        if ranks.mesh is not None:
            self.shards = split_trained(recipe.model, recipe.seed, checkpoint, ranks)
        serves = not recipe.engine_parts
        if recipe.rollout_processes:
            serves = ranks.main and recipe.placement.channel != "reshard"  # where all ranks serve their shards
        if self.shards is None or serves:
            self.loaded = load_trained(recipe.model, recipe.seed, checkpoint)
            self.decoder = inspect(self.loaded.module, self.loaded.tokenizer)
        else:
            assert recipe.model.path is not None
            path = resolve(recipe.model.path)
            skeleton = self.shards.skeleton
            if ranks.main and recipe.rollout_processes and recipe.model.lora is not None:
                skeleton = lora.with_adapter(skeleton, self.shards.device)  # engines get the adapter whole
            self.loaded = Loaded(skeleton, load_tokenizer(path), path, "policy")
            self.decoder = Decoder(self.shards.module, "causal")
        module = self.loaded.module
        if self.shards is not None and recipe.model.lora is None:
            module.requires_grad_(False)
        head = value_head(self.decoder) if recipe.critic is not None and recipe.critic.shared else None
        self.policy = Policy(
            self.decoder if self.shards is None else Decoder(self.shards.module, "causal"), recipe.algorithm,
            temperature=recipe.sampling.temperature, max_tokens=recipe.sampling.max_tokens,
            micro_batch_tokens=recipe.train.micro_batch_tokens, value_head=head,
            value_coef=0.0 if recipe.critic is None else recipe.critic.coef, group=ranks.data,
            context=ranks.context,
            routing=Routing(self.decoder) if recipe.train.routing_replay else None,
        )  # fmt: skip
        beside = {} if head is None else {f"value_head.{name}": p for name, p in head.named_parameters()}
        self.optimizer: Optimizer = new_optimizer(module, recipe.train, beside, self.shards)
        self.critic = new_critic(recipe, self.policy, len(self.loaded.tokenizer), ranks, checkpoint, warn)
        self.teachers: Teachers | None = None
        try:
            self.reference = new_reference(recipe, self.policy, ranks)
            self.teachers = new_teachers(recipe, self.loaded.tokenizer, ranks, warn)
            self.learner = RlLearner(
                recipe, self.policy, self.optimizer, self.critic, self.reference, clock, self.teachers
            )
            if checkpoint is not None:
                self._restore(checkpoint)
        except BaseException:
            self.close()
            raise

    @property
    def critic_module(self) -> nn.Module | None:
        """What is trained in this process to predict values: a model, or a head on the policy's trunk."""
        return self.critic.model if isinstance(self.critic, LocalCritic) else self.policy.value_head

    def make_whole(self) -> dict[str, float]:
        """Update the whole policy from the shards, one weight at a time; return metrics of the transfer."""
        if self.shards is None:
            return {}
        begin = time.monotonic()
        size = self.shards.publish(self.loaded.module)
        return {"publish/gather_seconds": time.monotonic() - begin, "publish/gather_bytes": float(size)}

    def save_model(self, directory: Path) -> None:
        """Save the model: on all ranks if the weights are sharded; with an adapter on the main rank."""
        if self.shards is not None and self.recipe.model.lora is None:
            save_shards(self.shards, self.loaded.tokenizer, directory)
            return

        module = self._on_main()

        def write() -> None:
            assert module is not None
            save(module if self.recipe.model.lora is None else lora.merged(module), self.loaded.tokenizer, directory)

        self._by_main(write)

    def save_final(self, directory: Path) -> None:
        """Save the model, and the adapter if one was trained."""
        # It exists if a finished run was extended with more steps.
        self._by_main(lambda: shutil.rmtree(directory / "adapter", ignore_errors=True))
        self.save_model(directory)
        if self.recipe.model.lora is not None:
            base, module = str(resolve(str(self.recipe.model.path))), self._on_main()
            self._by_main(lambda: lora.save_adapter(module, base, directory / "adapter"))

    def save(self, directory: Path) -> None:
        """Save the state of a checkpoint besides the model and the optimizer."""
        if self.critic is not None:
            self.critic.save(directory)
        if self.recipe.model.lora is not None:
            shards, file = self.shards, directory / "adapter.safetensors"
            tensors = lora.adapter_tensors(self.loaded.module) if shards is None else shards.learned()
            self._by_main(lambda: save_file(tensors, file))
        if (head := self.policy.value_head) is not None:
            self._by_main(lambda: save_file(dict(head.state_dict()), directory / "value_head.safetensors"))

    def _on_main(self) -> nn.Module | None:
        """Return the whole model; over several ranks on the main one, in host memory."""
        return self.loaded.module if self.shards is None else self.shards.gathered()

    def _by_main(self, write: Callable[[], object]) -> None:
        together(self.ranks.everyone, write if self.ranks.main else lambda: None)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.learner.load(checkpoint.state["learner"])
        self.optimizer.restore(checkpoint.path / OPTIMIZER)
        if self.critic is not None:
            self.critic.load(checkpoint.path)
        if self.policy.value_head is not None:
            self.policy.value_head.load_state_dict(load_file(checkpoint.path / "value_head.safetensors"))

    def close(self) -> None:
        if isinstance(self.critic, RemoteCritic):
            self.critic.close()
        if self.teachers is not None:
            self.teachers.close()
