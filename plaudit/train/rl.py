"""RL training: the one loop. Rollouts give scored samples, the learner updates, the channel publishes."""

from __future__ import annotations

import copy
import resource
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from plaudit.config import RlRecipe
from plaudit.core import Engine
from plaudit.core.decoder import Decoder
from plaudit.errors import BadReply, RequestRefused, RewardUnavailable, RunError, VersionChanged
from plaudit.events import RESUME
from plaudit.models import save
from plaudit.records import Batch
from plaudit.train import lora, randomness
from plaudit.train.advantages import Estimate
from plaudit.train.checkpoint import Checkpoint
from plaudit.train.clock import Clock
from plaudit.train.dump import Dump, DumpedRollouts
from plaudit.train.episodes import new_player
from plaudit.train.experience import Experience
from plaudit.train.optimizer import Optimizer
from plaudit.train.policy import Policy
from plaudit.train.prompts import Room, open_prompts
from plaudit.train.ranks import ALONE, Ranks
from plaudit.train.remote_critic import RemoteCritic
from plaudit.train.rl_learner import RlLearner
from plaudit.train.rl_models import load_trained, new_critic, new_reference, value_head
from plaudit.train.rollouts import Rollouts, SampleScorer, batch_metrics
from plaudit.train.run import Run
from plaudit.train.scorer import RewardFailed, Scorer
from plaudit.train.sharded_optimizer import ShardedOptimizer
from plaudit.train.sharding import Shards
from plaudit.train.sharing import SharedPlayer, SharedScorer
from plaudit.train.showing import failed_events, sample_events
from plaudit.train.signals import Interrupted, interruptible

NO_REWARDS = (RewardFailed, RewardUnavailable, BadReply, RequestRefused, VersionChanged)


class Viewer(Protocol):
    """What a person sees of a run at work."""

    def bar(self, done: int, total: int) -> Any: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def figures(self, step: int, figures: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...


class RlTraining:
    def __init__(
        self, recipe: RlRecipe, run: Run, viewer: Viewer, dumped: Dump | None = None, ranks: Ranks = ALONE
    ) -> None:
        """`dumped`: samples of another run to learn from, in place of new ones."""
        self.recipe = recipe
        self.run = run
        self.viewer = viewer
        self.dumped = dumped
        self.ranks = ranks
        self.clock = Clock()
        randomness.seed_everything(recipe.seed)
        if recipe.train.threads is not None:
            torch.set_num_threads(recipe.train.threads)
        checkpoint = run.checkpoints.load(viewer.warn) if run.resume else None
        starts = set(ranks.everyone.gather_values(0 if checkpoint is None else checkpoint.step))
        if len(starts) > 1:
            raise RunError(
                f"the ranks would go on from steps {sorted(starts)}: {run.directory} must be the same for all"
            )
        # Rewards first: what cannot be had is known before a model is loaded.
        self.scorer: SampleScorer = Scorer(recipe.reward)
        if ranks.everyone.size > 1:
            self.scorer = SharedScorer(self.scorer, ranks.everyone)
        try:
            self._build(checkpoint)
        except BaseException:
            self.scorer.close()
            raise

    def _build(self, checkpoint: Checkpoint | None) -> None:
        recipe = self.recipe
        self.loaded = load_trained(recipe, checkpoint)
        module = self.loaded.module
        # Over several ranks the learner has shards, and the module that was loaded stays whole for the engine.
        self.shards = None if self.ranks.mesh is None else Shards(copy.deepcopy(module), self.ranks)
        self.engine = Engine(module, self.loaded.tokenizer, kv_bytes=recipe.engine.kv_bytes, seed=recipe.seed)
        head = value_head(module) if recipe.critic is not None and recipe.critic.shared else None
        decoder = self.engine.decoder if self.shards is None else Decoder(self.shards.module, "causal")
        self.policy = Policy(
            decoder, recipe.algorithm, temperature=recipe.sampling.temperature,
            max_tokens=recipe.sampling.max_tokens, micro_batch_tokens=recipe.train.micro_batch_tokens, value_head=head,
            value_coef=0.0 if recipe.critic is None else recipe.critic.coef, group=self.ranks.data,
        )  # fmt: skip
        beside = {} if head is None else {f"value_head.{name}": p for name, p in head.named_parameters()}
        if self.shards is None:
            self.optimizer = Optimizer(module, recipe.train, beside)
        else:
            module.requires_grad_(False)
            self.optimizer = ShardedOptimizer(self.shards, recipe.train)
        self.critic = new_critic(recipe, self.policy, len(self.loaded.tokenizer), self.ranks, checkpoint)
        reference = new_reference(recipe, self.policy, self.ranks)
        self.learner = RlLearner(recipe, self.policy, self.optimizer, self.critic, reference, self.clock)
        room = Room(self.engine.decoder.max_positions, recipe.sampling.max_tokens)
        self.prompts = open_prompts(recipe.data, self.loaded.tokenizer, recipe.seed, room)
        self.heldout = self.prompts.heldout()
        player = new_player(recipe, self.engine)
        if self.ranks.everyone.size > 1:
            player = SharedPlayer(player, self.ranks.everyone)
        self.rollouts: Rollouts | DumpedRollouts = Rollouts(recipe, player, self.prompts, self.scorer, self.clock)
        if self.dumped is not None:
            self.rollouts = DumpedRollouts(self.dumped, self.rollouts, self.engine.decoder.vocab_size)
        self.step = self.version = self.samples = self.tokens = 0
        self.seconds = 0.0
        self.before: dict[str, float] = {}
        if checkpoint is not None:
            self._restore(checkpoint)
        self.dump = Dump(self.run.directory / "rollouts") if recipe.train.dump and self.ranks.main else None
        if self.dump is not None:
            self.dump.discard_after(self.step)

    def fit(self) -> dict[str, Any]:
        """Train to the last step, save the policy, and return the final figures."""
        try:
            with interruptible() as interrupted, self.viewer.bar(self.step, self.recipe.train.steps):
                self._loop(interrupted)
            return self._finish()
        finally:
            self.scorer.close()
            if isinstance(self.critic, RemoteCritic):
                self.critic.close()

    def _loop(self, interrupted: list[int]) -> None:
        train = self.recipe.train
        self.run.events.write("plan", steps=train.steps)
        if not self.before:
            self.before = self.evaluate()
        begin = time.monotonic() - self.seconds
        self.clock.split()
        while self.step < train.steps:
            drawn = self.rollouts.drawn
            try:
                batch = self.rollouts.next(self.step, self.version)
            except NO_REWARDS as error:
                self.rollouts.drawn = drawn
                self.save_checkpoint()
                raise RunError(f"step {self.step}: {error}; the state is saved: --resume goes on") from error
            if self.dump is not None:
                self.dump.write(self.step + 1, batch, self.rollouts.drawn)
            metrics, experience, advantage = self.learner.update(batch, self.step)
            with self.clock("publish"):
                if self.shards is not None:
                    self.shards.publish(self.loaded.module)
                self.version = self.engine.new_version(self.version + 1)
            self.step += 1
            self.seconds = time.monotonic() - begin
            self._report(batch, metrics, experience, advantage)
            if self.ranks.everyone.any(bool(interrupted)):
                self.save_checkpoint()
                raise Interrupted(f"stopped at step {self.step} of {train.steps}, state saved: --resume goes on")
            if self.step % train.eval_every == 0 and self.step < train.steps:
                with self.clock("evaluate"):
                    self.evaluate()
            if self.step % train.checkpoint.every == 0:
                with self.clock("checkpoint"):
                    self.save_checkpoint()
            self.seconds = time.monotonic() - begin

    def _report(
        self, batch: Batch, metrics: dict[str, float], experience: Experience | None, advantage: Estimate | None
    ) -> None:
        split = self.clock.split()
        tokens = sum(len(sample.token_ids) for sample in batch.samples)
        self.samples += len(batch.samples)
        self.tokens += tokens
        metrics = {
            **batch_metrics(batch.samples),
            **metrics,
            **split,
            "perf/samples_per_second": len(batch.samples) / split["time/step"],
            "perf/tokens_per_second": tokens / split["time/step"],
            "perf/peak_bytes": float(peak_bytes()),
            "progress/samples": float(self.samples),
            "progress/tokens": float(self.tokens),
            "progress/prompts": float(self.rollouts.drawn),
        }
        self.run.events.metric(metrics, step=self.step, version=self.version)
        if self._shows():
            self._show(batch, experience, advantage)
        self.viewer.step(self.step, metrics)

    def _show(self, batch: Batch, experience: Experience | None, advantage: Estimate | None) -> None:
        count, tokenizer = self.recipe.train.show, self.loaded.tokenizer
        events = list(failed_events(tokenizer, batch.samples, count // 2))
        if experience is not None and advantage is not None:
            events += sample_events(tokenizer, experience, advantage, count)
        for event in events:
            self.run.events.write("sample", step=self.step, version=batch.version, **event)

    def _shows(self) -> bool:
        train = self.recipe.train
        return train.show > 0 and (self.step % train.eval_every == 0 or self.step in (1, train.steps))

    def evaluate(self) -> dict[str, float]:
        """Held-out figures: the reward of the run and, where the world knows it, the truth."""
        samples = self.rollouts.heldout(self.heldout, self.recipe.train.eval_samples, "heldout")
        scored = [sample.reward for sample in samples if sample.reward is not None]
        figures = {"reward": sum(scored) / len(scored)} if scored else {}
        truth = [self.prompts.right(self.heldout[sample.group], sample) for sample in samples]
        known = [right for right in truth if right is not None]
        if known:
            figures["accuracy"] = sum(known) / len(known)
        figures["length"] = sum(len(sample.token_ids) for sample in samples) / len(samples)
        self.run.events.metric({f"heldout/{name}": value for name, value in figures.items()}, step=self.step)
        self.viewer.figures(self.step, figures)
        return figures

    def _finish(self) -> dict[str, Any]:
        after = self.evaluate()
        if self.ranks.main:
            self.save_model(self.run.final)
        summary: dict[str, Any] = {
            "task": "rl",
            "algorithm": self.recipe.algorithm.name,
            "seed": self.recipe.seed,
            "steps": self.recipe.train.steps,
        }
        for name in after:
            summary |= {f"{name}_before": self.before.get(name), f"{name}_after": after[name]}
        summary |= {
            "seconds": round(self.seconds, 1),
            "samples": self.samples,
            "samples_per_second": round(self.samples / self.seconds, 1) if self.seconds else 0.0,
            "peak_bytes": peak_bytes(),
            "parameters": sum(parameter.numel() for parameter in self.loaded.module.parameters()),
        }
        self.run.summarise(summary)
        self.run.events.note("end")
        return summary

    # State

    def save_model(self, directory: Path) -> Path:
        module = self.loaded.module if self.recipe.model.lora is None else lora.merged(self.loaded.module)
        return save(module, self.loaded.tokenizer, directory)

    def save_checkpoint(self) -> None:
        state = {
            "seconds": self.seconds,
            "random": randomness.capture(),
            "threads": torch.get_num_threads(),
            "version": self.version,
            "drawn": self.rollouts.drawn,
            "samples": self.samples,
            "tokens": self.tokens,
            "before": self.before,
            "learner": self.learner.state(),
        }
        with self.run.events.span("checkpoint", step=self.step):
            self.run.checkpoints.save(self.step, self.save_model, self.optimizer.state(), state, self._save_more)

    def _save_more(self, directory: Path) -> None:
        if self.critic is not None:
            self.critic.save(directory)
        if self.recipe.model.lora is not None:
            save_file(lora.adapter_tensors(self.loaded.module), directory / "adapter.safetensors")
        if self.policy.value_head is not None:
            save_file(dict(self.policy.value_head.state_dict()), directory / "value_head.safetensors")

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.step, self.version, self.seconds = checkpoint.step, state["version"], state["seconds"]
        self.rollouts.drawn, self.samples, self.tokens = state["drawn"], state["samples"], state["tokens"]
        self.before = state["before"]
        self.learner.load(state["learner"])
        self.optimizer.load(checkpoint.optimizer())
        if self.critic is not None:
            self.critic.load(checkpoint.path)
        if self.policy.value_head is not None:
            self.policy.value_head.load_state_dict(load_file(checkpoint.path / "value_head.safetensors"))
        randomness.restore(state["random"])
        self.engine.new_version(self.version)
        self.run.events.note(RESUME, step=self.step)


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
