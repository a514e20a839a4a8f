"""SFT, preference, reward-model and process-model training: one loop, an objective for each."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from plaudit.config import NewModel, PreferenceRecipe, PrmRecipe, Regression, RewardRecipe, SftRecipe
from plaudit.config.supervised import PolicyModelTable
from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import ConfigError
from plaudit.events import END
from plaudit.models import Kind, Loaded, choose_device, load_policy, load_reward, load_steps, new_llama, save
from plaudit.models.catalog import resolve
from plaudit.train.data.rows import WorldRows, open_rows
from plaudit.train.optim.host_optimizer import new_optimizer
from plaudit.train.policy import lora
from plaudit.train.policy.reference import adapters_off
from plaudit.train.policy.rl_models import prepare, without_dropout
from plaudit.train.run import randomness
from plaudit.train.run.checkpoint import Checkpoint
from plaudit.train.run.pause import PAUSE
from plaudit.train.run.progress import Progress
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
from plaudit.train.supervised.objectives import Imitate, JudgeSteps, Objective, Prefer, Rate
from plaudit.train.supervised.preference_data import PreferenceExamples, write_samples
from plaudit.train.supervised.preferences import LearnPreferences
from plaudit.worlds.sums import STEP_END
from plaudit.worlds.tokenizer import sums_tokenizer

KINDS: dict[str, Kind] = {"sft": "policy", "preference": "policy", "reward": "reward", "prm": "steps"}
ACCURACY = "accuracy/sums/sampled"
ON_LONG_CHAINS = ("pair_accuracy", "step_auc", "first_wrong_f1")
SupervisedRecipe = SftRecipe | RewardRecipe | PrmRecipe | PreferenceRecipe


class SupervisedTraining:
    def __init__(self, recipe: SupervisedRecipe, run: Run, progress: Progress) -> None:
        self.recipe = recipe
        self.run = run
        self.progress = progress
        randomness.seed_everything(recipe.seed)
        if recipe.train.threads is not None:
            torch.set_num_threads(recipe.train.threads)
        checkpoint = run.checkpoints.load(progress.warn) if run.resume else None
        self.loaded = load_trained(recipe, checkpoint)
        use_packed_attention(self.loaded.module)
        self.loaded.module.train()
        self.optimizer = new_optimizer(self.loaded.module, recipe.train)
        table = recipe.train
        self.learner = Learner(
            self.loaded.module, _objective(recipe), self.optimizer, table.micro_batch_tokens, table.deterministic
        )
        config: Any = self.loaded.module.config
        if names := _label_names(recipe):
            config.id2label = dict(enumerate(names))
            config.label2id = {name: i for i, name in enumerate(names)}
        self.encode = Encoder(recipe, self.loaded.tokenizer, config.max_position_embeddings)
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
            self.optimizer.load(checkpoint.optimizer())
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
        without_dropout(self.loaded.module)
        directory = self.run.directory
        if recipe.data.world is not None and not resumed:
            self.progress.note(write_samples(recipe, directory, self.loaded))
            use_packed_attention(self.loaded.module)
        data = PreferenceExamples(recipe, directory, self.encode, lambda: at_start(recipe, self.loaded.module, resumed))
        self.example, self.heldout = data.train, data.heldout

    def fit(self) -> dict[str, Any]:
        """Train to the last step, save the model, and return the final figures."""
        steps = self.recipe.train.steps
        plan: dict[str, Any] = {"steps": steps, "clip_norm": self.recipe.train.clip_norm}
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
                begin += PAUSE.hold(interrupted)
                if interrupted:
                    self.save_checkpoint()
                    raise Interrupted(f"stopped at step {self.step} of {steps}, state saved: --resume goes on")
                if self.step % self.recipe.train.eval_every == 0 and self.step < steps:
                    self.evaluate(quick=True)
                if self.step % self.recipe.train.checkpoint.every == 0:
                    self.save_checkpoint()
        self.save_final()  # first: nothing that was learned depends on whether it can be measured
        figures = self.evaluate(quick=False)
        summary = {"task": self.recipe.task, "seed": self.recipe.seed, "steps": steps, **figures}
        if ACCURACY in self.before:
            summary |= {"accuracy_before": self.before[ACCURACY], "accuracy_after": figures[ACCURACY]}
        summary |= {"seconds": round(self.seconds, 1), "parameters": _parameters(self.loaded)}
        self.run.summarise(summary)
        self.run.events.note(END)
        return summary

    def evaluate(self, quick: bool, worlds: Sequence[str] = WORLDS) -> dict[str, float]:
        """Held-out figures. A quick look leaves out long chains and what needs generation."""
        module = self.loaded.module
        module.eval()
        with self.run.events.span("evaluate", step=self.step):
            figures = {"heldout_loss": self.learner.mean_loss(self.heldout), **self._judgement(self.heldout)}
            if self.hard and not quick:
                hard = self._judgement(self.hard)
                figures |= {f"sums-hard/{name}": hard[name] for name in ON_LONG_CHAINS if name in hard}
            if self.near and not quick:
                figures["near_misses"] = accepted_errors(module, self.near, self.recipe.train.micro_batch_tokens)
            if KINDS[self.recipe.task] == "policy" and self.recipe.data.world is not None and not quick:
                figures |= evaluate_policy(self.loaded, self.recipe.seed, self.recipe.data.eval_items, worlds)
                use_packed_attention(module)
        module.train()
        self.run.events.metric({f"heldout/{name}": value for name, value in figures.items()}, step=self.step)
        self.progress.figures(self.step, figures)
        return figures

    def _judgement(self, examples: Sequence[Example]) -> dict[str, float]:
        """How well a judge judges, or a policy as one: by what `learner.mean_loss` has just seen. Nothing for SFT."""
        module, budget = self.loaded.module, self.recipe.train.micro_batch_tokens
        if self.recipe.task == "preference":
            return self.learner.objective.figures()
        if self.recipe.task == "prm":
            return evaluate_steps(module, examples, budget)
        if isinstance(self.recipe.algorithm, Regression):
            return evaluate_ratings(module, examples, self.recipe.algorithm, budget)
        return evaluate_comparisons(module, examples, budget) if self.recipe.task == "reward" else {}

    @property
    def adapted(self) -> bool:
        return isinstance(self.recipe.model, PolicyModelTable) and self.recipe.model.lora is not None

    def save_model(self, directory: Path) -> Path:
        module = lora.merged(self.loaded.module) if self.adapted else self.loaded.module
        return save(module, self.loaded.tokenizer, directory, reward=reward_toml(self.recipe))

    def save_final(self) -> None:
        """The model, and the adapter where one was trained."""
        shutil.rmtree(self.run.final / "adapter", ignore_errors=True)  # of a finished run that was given more steps
        self.save_model(self.run.final)
        if self.adapted:
            assert self.recipe.model.path is not None
            lora.save_adapter(self.loaded.module, str(resolve(self.recipe.model.path)), self.run.final / "adapter")

    def _save_adapter(self, directory: Path) -> None:
        if self.adapted:
            save_file(lora.adapter_tensors(self.loaded.module), directory / "adapter.safetensors")

    def save_checkpoint(self) -> None:
        with self.run.events.span("checkpoint", step=self.step):
            self.run.checkpoints.save(
                self.step,
                self.save_model,
                self.optimizer.save,
                {
                    "seconds": self.seconds, "random": randomness.capture(), "threads": torch.get_num_threads(),
                    "before": self.before,
                },
                self._save_adapter,
            )  # fmt: skip

    def _batch(self, step: int) -> list[Example]:
        size = self.recipe.train.batch
        return [self.example(step * size + i) for i in range(size)]


def load_trained(recipe: SupervisedRecipe, checkpoint: Checkpoint | None) -> Loaded:
    """The model as it is at the start of this run or, with a checkpoint, as it was there."""
    table = recipe.model
    if not isinstance(table, PolicyModelTable):
        return load_model(recipe, checkpoint.model if checkpoint else None)
    loaded = load_model(recipe, checkpoint.model if checkpoint and table.lora is None else None)
    prepare(loaded.module, table, recipe.seed, checkpoint)
    return loaded


@contextmanager
def at_start(recipe: PreferenceRecipe, module: nn.Module, resumed: bool) -> Iterator[nn.Module]:
    """The policy that preferences are measured from: the one in training before its first step, with its adapter off,
    or read from its path again."""
    if recipe.model.lora is not None:
        with adapters_off(module):
            yield module
    elif not resumed:
        yield module
    else:
        base = load_model(recipe, None).module
        use_packed_attention(base)
        yield base


def load_model(recipe: SupervisedRecipe, checkpoint: Path | None) -> Loaded:
    """The checkpoint's model, else the recipe's: loaded from its path or new."""
    table, kind = recipe.model, KINDS[recipe.task]
    device = choose_device(table.device)
    labels = len(recipe.algorithm.attributes) if isinstance(recipe.algorithm, Regression) else None
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


def _objective(recipe: SupervisedRecipe) -> Objective:
    if recipe.task == "preference":
        return LearnPreferences(recipe.algorithm)
    if recipe.task == "sft":
        return Imitate()
    if recipe.task == "prm":
        return JudgeSteps()
    return Rate() if isinstance(recipe.algorithm, Regression) else Prefer(recipe.algorithm)


def _label_names(recipe: SupervisedRecipe) -> tuple[str, ...]:
    """What the outputs of the model mean; it is saved with the model."""
    if KINDS[recipe.task] == "policy":
        return ()
    if recipe.task == "prm":
        return ("wrong", "right")
    return recipe.algorithm.attributes if isinstance(recipe.algorithm, Regression) else ("reward",)


def reward_toml(recipe: SupervisedRecipe) -> str | None:
    """How the scores of the trained model are read; nothing for a policy."""
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


def _parameters(loaded: Loaded) -> int:
    return sum(parameter.numel() for parameter in loaded.module.parameters())
