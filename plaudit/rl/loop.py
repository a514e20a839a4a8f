"""The RL training loop: rollouts produce scored samples, the learner updates, the placement publishes weights."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NoReturn

import torch

from plaudit.config import RlRecipe
from plaudit.core import Engine
from plaudit.errors import (
    BadReply,
    ChannelError,
    EngineError,
    RequestRefused,
    RewardUnavailable,
    RunError,
    VersionChanged,
)
from plaudit.events import END, WARNING
from plaudit.models.positions import way_to_more
from plaudit.place.build import new_placement
from plaudit.place.memory.fit import check_fit
from plaudit.place.memory.ledger import new_ledger
from plaudit.place.placement import PlacementContext
from plaudit.place.ray.reward import RayReward
from plaudit.place.resources import pin_learner
from plaudit.place.workers.rank import check_engine_ranks
from plaudit.place.workers.remote_engine import Host, OwnProcess
from plaudit.records import Batch, Sample
from plaudit.rl.follower import Viewer
from plaudit.rl.forecast import forecast
from plaudit.rl.proofs import Proofs
from plaudit.rl.sample_events import failed_events, sample_events
from plaudit.train.data.encoder import LengthLimits
from plaudit.train.policy.experience import Experience
from plaudit.train.policy.rl_models import check_models
from plaudit.train.policy.trainee import Trainee
from plaudit.train.rollouts.batch_metrics import batch_metrics, reward_parts, staleness, totals
from plaudit.train.rollouts.dump import Dump, DumpedRollouts
from plaudit.train.rollouts.rollouts import RolloutSource, SampleScorer
from plaudit.train.rollouts.scorer import RewardFailed, Scorer, Source
from plaudit.train.rollouts.sharing import SharedScorer
from plaudit.train.rollouts.sources import open_prompts
from plaudit.train.run import randomness
from plaudit.train.run.checkpoint import Checkpoint
from plaudit.train.run.clock import Clock
from plaudit.train.run.pause import PAUSE
from plaudit.train.run.ranks import ALONE, Ranks, together
from plaudit.train.run.run import Run
from plaudit.train.run.signals import Interrupted, StopRequest, interruptible, leave_on_signal, stop_requested

REWARD_FAILURES = (RewardFailed, RewardUnavailable, BadReply, RequestRefused, VersionChanged)
# A step that ends with one of these has not updated the weights and can be repeated.
STEP_FAILURES = (*REWARD_FAILURES, EngineError, ChannelError)


class RlTraining:
    def __init__(
        self, recipe: RlRecipe, run: Run, viewer: Viewer, dumped: Dump | None = None, ranks: Ranks = ALONE,
        host: Host = OwnProcess, reward: Source | None = None,
    ) -> None:  # fmt: skip
        """`dumped`: samples of another run to train on instead of new ones. `host` starts the placement's rollout
        processes. `reward`: replaces the recipe's reward."""
        self.recipe = recipe
        self.run = run
        self.viewer = viewer
        self.dumped = dumped
        self.ranks = ranks
        self.host = host
        self.clock = Clock()
        self.cores = pin_learner(recipe)
        randomness.seed_everything(recipe.seed)
        if recipe.train.threads is not None:
            torch.set_num_threads(recipe.train.threads)
        checkpoint = run.checkpoints.load(self.warn) if run.resume else None
        check_fit(recipe, ranks.everyone)
        check_engine_ranks(recipe)
        check_models(recipe)
        if truncation := recipe.sampling.truncation:
            self.warn(
                f"{truncation} excludes tokens to which the loss assigns probability: rollout/truncated_mass is their "
                "share; set top_p = 1 and top_k = 0 to train on the sampling distribution"
            )
        # Rewards first, so that an unavailable one fails before a model is loaded.
        pooled = recipe.resources.reward.processes > 0
        actors = RayReward(recipe, ranks.main, self.warn) if pooled else None
        self.scorer: SampleScorer = Scorer(recipe.reward, actors or reward, self.warn)
        self.truth: SampleScorer | None = None
        try:
            if recipe.truth is not None:
                self.truth = Scorer(recipe.truth, warn=self.warn)
            if ranks.everyone.size > 1:
                self.scorer = SharedScorer(self.scorer, ranks.everyone, main_only=pooled)
                self.truth = None if self.truth is None else SharedScorer(self.truth, ranks.everyone)
            self._build(checkpoint)
        except BaseException:
            self._close_scorers()
            raise

    def _build(self, checkpoint: Checkpoint | None) -> None:
        recipe = self.recipe
        with ExitStack() as undo:
            self.trainee = Trainee(recipe, self.ranks, checkpoint, self.clock, self.warn)
            undo.callback(self.trainee.close)
            self.loaded, self.policy = self.trainee.loaded, self.trainee.policy
            positions, sampling = self.trainee.decoder.max_positions, recipe.sampling
            limits = LengthLimits(positions, sampling.max_tokens, way_to_more=way_to_more(self.trainee.decoder.config))
            if (longest := sampling.evaluating().max_tokens) > sampling.max_tokens:
                limits = replace(limits, response=longest, key="sampling.eval.max_tokens")
            self.prompts = open_prompts(recipe.data, self.loaded.tokenizer, recipe.seed, limits)
            self.heldout = self.prompts.heldout()
            self.placement = new_placement(
                PlacementContext(
                    recipe, self.ranks, self.clock, self.trainee, self.prompts, self.scorer, self.run.events,
                    self.run.directory, self.warn, self.cores, self.host,
                )
            )  # fmt: skip
            undo.callback(self.placement.close)
            self.engine, self.learner = self.placement.engine, self.placement.learner
            self.rollouts: RolloutSource = self.placement.rollouts
            if self.dumped is not None:
                self.rollouts = DumpedRollouts(self.dumped, self.rollouts, self.trainee.decoder.vocab_size)
            self.ledger = new_ledger(self.trainee, self.engine, self.scorer)
            self.clock.watchers.append(self.ledger)
            self.step = self.version = self.samples = self.tokens = 0
            self.seconds = 0.0
            self.before: dict[str, float] = {}
            if checkpoint is not None:
                self._restore(checkpoint)
            elif self.run.resume:  # the interrupted run has no checkpoint: its logged steps are repeated
                self.run.resumed(0)
            self.proofs = Proofs(self.run, self.ranks, self.trainee)
            self.proofs.start(self.step, fresh=checkpoint is None, foreign=self.dumped is not None)
            self.placement.publish(self.version)
            self.dump = Dump(self.run.directory / "rollouts") if recipe.train.dump and self.ranks.main else None
            if self.dump is not None:
                self.dump.discard_after(self.step)
            undo.pop_all()  # complete: `close` releases everything from here on

    def fit(self) -> dict[str, Any]:
        """Train to the last step, save the policy, and return the final figures."""
        try:
            with interruptible() as stop:
                with self.viewer.bar(self.step, self.recipe.train.steps):
                    self._loop(stop)
                return self._finish()
        finally:
            self.close()

    def warn(self, message: str) -> None:
        """Show a warning and write it to the event log. Thread-safe."""
        self.viewer.warn(message)
        self.run.events.note(WARNING, message=message)

    def close(self) -> None:
        gc.unfreeze()
        self.placement.close()
        self._close_scorers()
        self.trainee.close()

    def _close_scorers(self) -> None:
        self.scorer.close()
        if self.truth is not None:
            self.truth.close()

    def _expect(self) -> None:
        """Log the planned steps and their expected memory, as far as it is known."""
        lengths = [len(prompt.token_ids) for prompt in self.heldout if prompt.token_ids]
        # On a GPU the KV cache is preallocated.
        local = self.engine if isinstance(self.engine, Engine) else None
        memory = forecast(
            self.recipe, self.ledger.program, prompt=fmean(lengths) if lengths else None,
            response=max(1.0, self.before["length"]) if "length" in self.before else None,
            cache=local.stats().kv_bytes if local and local.decoder.device.type == "cuda" else 0,
        )  # fmt: skip
        self.run.events.write(
            "plan", task="rl", algorithm=self.recipe.algorithm.name, steps=self.recipe.train.steps,
            clip_norm=self.recipe.train.clip_norm, grouped=self.recipe.algorithm.grouped, memory=memory,
            evaluation=self._evaluation(),
        )  # fmt: skip

    def _evaluation(self) -> dict[str, Any]:
        """Return the sampling settings of the evaluation."""
        kept = ("temperature", "top_p", "top_k", "max_tokens")
        sampling = self.recipe.sampling.evaluating().model_dump(include={*kept})
        return {"prompts": len(self.heldout), "samples": self.recipe.train.eval_samples, **sampling}

    def _loop(self, stop: StopRequest) -> None:
        train = self.recipe.train
        self._expect()
        if self.step == 0 and not self.before:
            self.before = self._try_evaluate("training goes on")
            self._expect()
        # Long-lived objects are excluded from garbage collection: models have a million of them.
        gc.collect()
        gc.freeze()
        begin = time.monotonic() - self.seconds
        self.clock.split()
        while self.step < train.steps:
            try:
                with self._leave_on_signal():
                    batch = self.rollouts.next(self.step, self.version)
            except (*STEP_FAILURES, Interrupted) as error:
                self._end(error)
            dumped = ""
            if self.dump is not None:
                with self.clock("dump"):
                    dumped = self.dump.write(self.step + 1, batch, self.rollouts.drawn)
            try:
                metrics, experience = self.learner.update(batch, self.step)
            except Interrupted as error:  # while waiting for a critic server, whose state is now unknown
                raise Interrupted(
                    f"{error} in the middle of step {self.step + 1}: --resume continues from the last checkpoint"
                ) from error
            # The step is complete even if publishing fails: a resumed run publishes first.
            self.step, self.version = self.step + 1, self.version + 1
            failure: Exception | None = None
            try:
                with self._leave_on_signal(), self.clock("publish"):
                    metrics |= self.placement.publish(self.version)
            except (*STEP_FAILURES, Interrupted) as error:
                failure = error
            failure = self._failed_on_any_rank(failure)
            self.seconds = time.monotonic() - begin
            self._report(batch, metrics, experience, dumped)
            if failure is None and self.ranks.everyone.size == 1:  # other ranks would wait without knowing why
                paused = PAUSE.wait(stop)
                begin += paused
                self.clock.leave_out(paused)
            if failure is None and self.ranks.everyone.any(bool(stop)):
                failure = Interrupted(f"stopped by {stop.signal_name or 'another rank'}")
            if failure is not None:
                self._end(failure)
            if self.step % train.eval_every == 0 and self.step < train.steps:
                self._try_evaluate("training goes on")
            if self.step % train.checkpoint.every == 0:
                self.save_checkpoint()
            self.seconds = time.monotonic() - begin

    def _failed_on_any_rank(self, failure: Exception | None) -> Exception | None:
        """Return the main rank's publish failure on all ranks, so that none waits for it."""
        main_failure = self.ranks.everyone.from_main(None if failure is None else str(failure))
        return failure or (None if main_failure is None else ChannelError(f"rank 0: {main_failure}"))

    def _leave_on_signal(self) -> AbstractContextManager[None]:
        """Interrupt at once on a signal; over several ranks all end together after the step instead."""
        return leave_on_signal(self.ranks.everyone.size == 1)

    def _end(self, error: Exception) -> NoReturn:
        """Save the state, and raise the error that ends the run."""
        self.save_checkpoint()
        if isinstance(error, Interrupted):
            raise Interrupted(
                f"{error} at step {self.step} of {self.recipe.train.steps}, state saved: --resume continues"
            ) from error
        raise RunError(f"step {self.step}: {error}; the state is saved: --resume continues") from error

    def _report(self, batch: Batch, metrics: dict[str, float], experience: Experience | None, dumped: str) -> None:
        split = self.clock.split()
        tokens = sum(len(sample.token_ids) for sample in batch.samples)
        self.samples += len(batch.samples)
        self.tokens += tokens
        metrics = {
            **batch_metrics(batch.samples), **batch.metrics, **staleness(batch), **metrics, **split,
            "perf/samples_per_second": len(batch.samples) / split["time/step"],
            "perf/tokens_per_second": tokens / split["time/step"],
            "perf/peak_bytes": float(self.ledger.peak),
            "progress/samples": float(self.samples),
            "progress/tokens": float(self.tokens),
            "progress/prompts": float(self.rollouts.drawn),
        }  # fmt: skip
        self.run.events.metric(metrics, step=self.step, version=self.version)
        shown = self._show(batch, experience) if self._shows() else None
        self.proofs.step(self.step, batch.samples, metrics, dumped, shown)
        self.ledger.write(self.run.events, self.step, self.version)
        self.viewer.step(self.step, metrics)

    def _show(self, batch: Batch, experience: Experience | None) -> list[dict[str, Any]]:
        count, tokenizer = self.recipe.train.show, self.loaded.tokenizer
        events = list(failed_events(tokenizer, batch.samples, count // 2))
        if experience is not None:
            events += sample_events(tokenizer, experience, count)
        for event in events:
            self.run.events.write("sample", step=self.step, version=batch.version, **event)
        return events

    def _shows(self) -> bool:
        train = self.recipe.train
        return train.show > 0 and (self.step % train.eval_every == 0 or self.step in (1, train.steps))

    def _try_evaluate(self, then: str) -> dict[str, float]:
        """Evaluate; if the evaluation fails, save the state first. A failed reward gives no metrics, and ends the run
        if the recipe halts on errors."""
        try:
            with self._leave_on_signal():
                return self.evaluate()
        except Interrupted as error:
            self._end(error)
        except BaseException as error:
            if isinstance(error, STEP_FAILURES) or self.ranks.everyone.size == 1:  # other errors are local to a rank
                self.save_checkpoint()
            if not isinstance(error, STEP_FAILURES):
                raise
            if self.ranks.everyone.any(stop_requested()):
                self._end(error)
            halts = any(of is not None and of.on_error == "halt" for of in (self.recipe.reward, self.recipe.truth))
            what = f"step {self.step}: the evaluation failed: {error}"
            if halts or not isinstance(error, REWARD_FAILURES):
                raise RunError(f"{what}; the state is saved: --resume continues") from error
            self.warn(f"{what}; {then}")
            return {}

    def evaluate(self) -> dict[str, float]:
        """Return held-out metrics: the run's reward, and accuracy and truth where they are known."""
        with self.clock("evaluate"):
            samples = self.rollouts.heldout(self.heldout, self.recipe.train.eval_samples, "heldout")
            if isinstance(self.engine, Engine):  # training samples must not depend on KV cached by the evaluation
                self.engine.new_version(self.version)
            true = self._true_rewards(samples)
        scored = totals(samples)
        figures = {"reward": sum(scored) / len(scored)} if scored else {}
        figures |= reward_parts(samples)
        truth = [self.prompts.right(self.heldout[sample.group], sample) for sample in samples]
        verdicts = [right for right in truth if right is not None]
        if verdicts:
            figures["accuracy"] = sum(verdicts) / len(verdicts)
        if true:
            figures |= {"truth": fmean(true), "truth_se": pstdev(true) / math.sqrt(len(true))}
        figures["length"] = sum(len(sample.token_ids) for sample in samples) / len(samples)
        heldout = {f"heldout/{name}": value for name, value in figures.items()}
        self.run.events.metric(heldout, step=self.step)
        self.proofs.evaluation(self.step, heldout)
        self.viewer.figures(self.step, figures)
        return figures

    def _true_rewards(self, samples: Sequence[Sample]) -> list[float]:
        """Return the [truth] rewards of held-out samples, whether or not the run's reward has scored them."""
        if self.truth is None:
            return []
        unscored = [replace(sample, reward=None, error=None) for sample in samples]
        judged = self.truth.score([self.heldout[sample.group] for sample in samples], unscored)
        return [sample.reward for sample in judged if sample.reward is not None]

    def _finish(self) -> dict[str, Any]:
        # Save first, so that a failed evaluation cannot lose the model.
        self.trainee.save_final(self.run.final)
        after = self._try_evaluate(f"the model is in {self.run.final}, and --resume evaluates it")
        summary: dict[str, Any] = {
            "task": "rl", "algorithm": self.recipe.algorithm.name, "seed": self.recipe.seed,
            "steps": self.recipe.train.steps,
        }  # fmt: skip
        for name in after:
            summary |= {f"{name}_before": self.before.get(name), f"{name}_after": after[name]}
        summary |= {
            "seconds": round(self.seconds, 1),
            "samples": self.samples,
            "samples_per_second": round(self.samples / self.seconds, 1) if self.seconds else 0.0,
            "peak_bytes": self.ledger.peak,
            "parameters": sum(parameter.numel() for parameter in self.loaded.module.parameters()),
        }
        self.ledger.write(self.run.events, self.step, self.version)
        self.run.summarise(summary)
        self.proofs.deliver(summary)
        self.run.events.note(END)
        return summary

    # State

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
        with self.clock("checkpoint"), self.run.events.span("checkpoint", step=self.step):
            trainee = self.trainee
            self.run.checkpoints.save(self.step, trainee.save_model, trainee.optimizer.save, state, self._save_more)

    def _save_more(self, directory: Path) -> None:
        self.trainee.save(directory)
        together(self.ranks.everyone, lambda: self.placement.save(directory))

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.step, self.version, self.seconds = checkpoint.step, state["version"], state["seconds"]
        self.rollouts.drawn, self.samples, self.tokens = state["drawn"], state["samples"], state["tokens"]
        self.before = state["before"]
        self.placement.load(checkpoint.path)
        randomness.restore(state["random"])
        self.run.resumed(self.step)
