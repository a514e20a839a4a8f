"""SFT, preference, reward-model and process-model training: one loop, an objective for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from plaudit.config import PreferenceRecipe, PrmRecipe, Regression, RewardRecipe, SftRecipe
from plaudit.events import END
from plaudit.models.positions import longest_sequence, way_to_more
from plaudit.train.data.rows import WorldRows, open_rows
from plaudit.train.run import randomness
from plaudit.train.run.checkpoint import OPTIMIZER
from plaudit.train.run.pause import PAUSE
from plaudit.train.run.ranks import ALONE, Ranks
from plaudit.train.run.run import Run
from plaudit.train.run.signals import Interrupted, interruptible
from plaudit.train.supervised.encode import Encoder
from plaudit.train.supervised.evaluate import (
    WORLDS,
    accepted_errors,
    evaluate_comparisons,
    evaluate_policy,
    evaluate_ratings,
    evaluate_steps,
)
from plaudit.train.supervised.examples import Example
from plaudit.train.supervised.learner import Learner
from plaudit.train.supervised.model import KINDS, SupervisedModel, SupervisedRecipe
from plaudit.train.supervised.objectives import Imitate, JudgeSteps, Objective, Prefer, Rate
from plaudit.train.supervised.preference_data import PreferenceExamples, write_samples
from plaudit.train.supervised.preferences import LearnPreferences

ACCURACY = "accuracy/sums/sampled"
NARROW = 192  # hidden units
ON_LONG_CHAINS = ("pair_accuracy", "step_auc", "first_wrong_f1")


class Shown(Protocol):
    """Displays the progress of a run."""

    def bar(self, done: int, total: int) -> AbstractContextManager[None]: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def figures(self, step: int, figures: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, message: str) -> None: ...


class SupervisedTraining:
    def __init__(self, recipe: SupervisedRecipe, run: Run, progress: Shown, ranks: Ranks = ALONE) -> None:
        self.recipe = recipe
        self.run = run
        self.progress = progress
        self.ranks = ranks
        randomness.seed_everything(recipe.seed)
        checkpoint = run.checkpoints.load(progress.warn) if run.resume else None
        self.model = SupervisedModel(recipe, ranks, checkpoint)
        module, table = self.model.module, recipe.train
        self.optimizer = self.model.new_optimizer()
        lanes = _lanes(recipe, module)
        if table.threads is not None:
            torch.set_num_threads(table.threads if lanes == 1 else 1)
        self.learner = Learner(
            module, _objective(recipe), self.optimizer, table.micro_batch_tokens, table.deterministic, ranks, lanes
        )
        self.encode = Encoder(recipe, self.model.tokenizer, longest_sequence(module.config), way_to_more(module.config))
        self.hard: list[Example] = []
        self.near: list[Example] = []
        self.heldout: Sequence[Example]
        if isinstance(recipe, PreferenceRecipe):
            self._open_preferences(recipe, resumed=checkpoint is not None)
        else:
            self._open_rows(recipe)
        self.before: dict[str, float] = {}
        self.step = 0
        self.seconds = 0.0
        if checkpoint:
            self.step = checkpoint.step
            self.seconds = checkpoint.state["seconds"]
            self.before = checkpoint.state.get("before", {})
            self.optimizer.restore(checkpoint.path / OPTIMIZER)
            randomness.restore(checkpoint.state["random"])
            run.resumed(self.step)

    def _open_rows(self, recipe: SftRecipe | RewardRecipe | PrmRecipe) -> None:
        rows = open_rows(recipe.data, recipe.task, recipe.seed)
        self.example: Callable[[int], Example] = lambda index: self.encode(rows.train(index))
        self.heldout = [self.encode(row) for row in rows.heldout()]
        if isinstance(rows, WorldRows):
            self.hard = [self.encode(row) for row in rows.hard()]
            if recipe.task != "sft":
                self.near = [self.encode(row) for row in rows.near()]

    def _open_preferences(self, recipe: PreferenceRecipe, resumed: bool) -> None:
        directory = self.run.directory
        if recipe.data.world is not None and not resumed:
            with self.model.whole() as loaded:
                if loaded is not None:
                    self.progress.note(write_samples(recipe, directory, loaded))
            self.ranks.everyone.barrier()  # the main rank has written them, now the others may read
        data = PreferenceExamples(
            recipe, directory, self.encode, lambda: self.model.at_start(resumed), self.ranks
        )  # fmt: skip
        self.example, self.heldout = data.train, data.heldout

    def fit(self) -> dict[str, Any]:
        """Train to the last step, save the model, and return the final metrics."""
        steps = self.recipe.train.steps
        plan: dict[str, Any] = {
            "steps": steps, "clip_norm": self.recipe.train.clip_norm, "evaluation": {"items": len(self.heldout)},
        }  # fmt: skip
        if self.recipe.task == "preference":
            plan["algorithm"] = self.recipe.algorithm.name
        self.run.events.write("plan", task=self.recipe.task, **plan)
        if self.recipe.task == "preference" and self.step == 0:
            self.before = self.evaluate(quick=False, worlds=("sums",))
        begin = time.monotonic() - self.seconds
        with interruptible() as interrupted, self.progress.bar(self.step, steps):
            while self.step < steps:
                metrics = self.learner.update(self._batch(self.step), self.step)
                self.step += 1
                self.seconds = time.monotonic() - begin
                self.run.events.metric(metrics, step=self.step)
                self.progress.step(self.step, metrics)
                if self.ranks.everyone.size == 1:  # other ranks would wait without knowing why
                    begin += PAUSE.wait(interrupted)
                if self.ranks.everyone.any(bool(interrupted)):
                    self.save_checkpoint()
                    raise Interrupted(f"stopped at step {self.step} of {steps}, state saved: --resume continues")
                if self.step % self.recipe.train.eval_every == 0 and self.step < steps:
                    self.evaluate(quick=True)
                if self.step % self.recipe.train.checkpoint.every == 0:
                    self.save_checkpoint()
        self.model.save_final(self.run.final)  # first, so that a failed evaluation cannot lose it
        figures = self.evaluate(quick=False)
        summary = {"task": self.recipe.task, "seed": self.recipe.seed, "steps": steps, **figures}
        if ACCURACY in self.before:
            summary |= {"accuracy_before": self.before[ACCURACY], "accuracy_after": figures[ACCURACY]}
        summary |= {"seconds": round(self.seconds, 1), "parameters": self.model.parameters}
        self.run.summarise(summary)
        self.run.events.note(END)
        return summary

    def evaluate(self, quick: bool, worlds: Sequence[str] = WORLDS) -> dict[str, float]:
        """Return held-out metrics. `quick` skips long chains and generation."""
        module = self.model.module
        module.eval()
        with self.run.events.span("evaluate", step=self.step):
            figures = {"heldout_loss": self.learner.mean_loss(self.heldout), **self._judgement(self.heldout)}
            if self.hard and not quick:
                hard = self._judgement(self.hard)
                figures |= {f"sums-hard/{name}": hard[name] for name in ON_LONG_CHAINS if name in hard}
            if self.near and not quick:
                figures["near_misses"] = accepted_errors(self.learner.reader, self.near)
            if KINDS[self.recipe.task] == "policy" and self.recipe.data.world is not None and not quick:
                figures |= self._answer(worlds)
        module.train()
        self.run.events.metric({f"heldout/{name}": value for name, value in figures.items()}, step=self.step)
        self.progress.figures(self.step, figures)
        return figures

    def _judgement(self, examples: Sequence[Example]) -> dict[str, float]:
        """How well a judge judges, or a policy as one: by what `learner.mean_loss` has just seen. Nothing for SFT."""
        reader = self.learner.reader
        if self.recipe.task == "preference":
            return self.learner.figures()
        if self.recipe.task == "prm":
            return evaluate_steps(reader, examples)
        if isinstance(self.recipe.algorithm, Regression):
            return evaluate_ratings(reader, examples, self.recipe.algorithm)
        return evaluate_comparisons(reader, examples) if self.recipe.task == "reward" else {}

    def _answer(self, worlds: Sequence[str]) -> dict[str, float]:
        """How often a policy answers a world's problems right. The main rank generates, and the others wait."""
        figures: dict[str, float] = {}
        with self.model.whole() as loaded:
            if loaded is not None:
                figures = evaluate_policy(loaded, self.recipe.seed, self.recipe.data.eval_items, worlds)
        answered: dict[str, float] = self.ranks.everyone.from_main(figures, dict[str, float])
        return answered

    def save_checkpoint(self) -> None:
        with self.run.events.span("checkpoint", step=self.step):
            self.run.checkpoints.save(
                self.step,
                self.model.save,
                self.optimizer.save,
                {
                    "seconds": self.seconds, "random": randomness.capture(), "threads": torch.get_num_threads(),
                    "before": self.before,
                },
                self.model.save_adapter,
            )  # fmt: skip

    def _batch(self, step: int) -> list[Example]:
        size = self.recipe.train.batch
        return [self.example(step * size + i) for i in range(size)]


def _lanes(recipe: SupervisedRecipe, module: nn.Module) -> int:
    """Into how many parts a batch is split, for a thread each: products of a narrow model are too small to be shared
    out. Not where parts depend on one another, by what an objective notes or by draws of dropout."""
    config: Any = module.config
    weight, narrow = next(module.parameters()), config.hidden_size < NARROW
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not narrow or recipe.task == "preference":
        return 1
    drops = any(
        part.p if isinstance(part, nn.Dropout) else getattr(part, "attention_dropout", 0) for part in module.modules()
    )
    return 1 if drops or recipe.resources.ranks > 1 else recipe.train.threads or 1


def _objective(recipe: SupervisedRecipe) -> Objective:
    if recipe.task == "preference":
        return LearnPreferences(recipe.algorithm)
    if recipe.task == "sft":
        return Imitate()
    if recipe.task == "prm":
        return JudgeSteps()
    return Rate() if isinstance(recipe.algorithm, Regression) else Prefer(recipe.algorithm)
