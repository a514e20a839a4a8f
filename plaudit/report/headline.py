"""The headline of a run: a sentence with its main figure, before and after training."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.report.curve import Curve
from plaudit.report.finding import number, percent
from plaudit.report.history import HELD_OUT, History

# Held-out figures that are shares: the subject and predicate of the sentence. The first one a run has is its headline.
_SHARES = {
    "accuracy": ("its answers to new problems", "right"),
    "accuracy/sums/sampled": ("its answers to new problems", "right"),
    "accuracy/sums/greedy": ("its answers to new problems", "right"),
    "pair_accuracy": ("new pairs of responses", "in the right order"),
    "label_auc": ("new pairs of a desirable and an undesirable response", "in the right order"),
    "step_auc": ("new pairs of a right and a wrong step", "in the right order"),
}
_NUMBERS = {
    "truth": "the true reward on new prompts",
    "reward": "the reward on new prompts",
    "heldout_loss": "the loss on new examples",
}
# Without held-out figures: the run's own metrics, at first and at the end.
_OWN = {"reward/mean": "the reward", "loss": "the loss"}

_KINDS = {
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "preference": "Learning from preferences",
    "reward": "Reward model",
    "prm": "Process reward model",
}
_METHODS = {
    "sft": "fine-tuning",
    "reinforce": "REINFORCE",
    "reinforce++": "REINFORCE++",
    "dr-grpo": "Dr. GRPO",
    "online-dpo": "online DPO",
    "simpo": "SimPO",
}


@dataclass(frozen=True, slots=True)
class Headline:
    """words  pieces of the sentence; figures are at odd indices      metric  the curve they come from"""

    words: tuple[str, ...]
    metric: str

    def __str__(self) -> str:
        return "".join(self.words)


def kind(run: History) -> str:
    """The kind of run, as a heading: only runs of the same kind are compared in one plot."""
    return _KINDS.get(run.task or ("rl" if run.reinforced else ""), "Learning from examples")


def method(run: History) -> str:
    """The training method, as used in "steps of ..."."""
    name = run.algorithm or run.task or ""
    return _METHODS.get(name, name.upper() if run.algorithm else "training")


def headline(run: History) -> Headline | None:
    words: tuple[str, ...]
    figures = {name: curve for name, curve in run.held_out().items() if curve.finite}
    for name, (counted, verb) in _SHARES.items():
        if curve := figures.get(name):
            after, now = _after(run, curve), percent(curve.finite[-1])
            if _began_at_0(curve):
                before = percent(curve.finite[0])
                words = ("Before training ", before, f" of {counted} were {verb}; {after} ", now, " are.")
            else:
                words = (f"{_capital(after)} ", now, f" of {counted} are {verb}.")
            return Headline(words, HELD_OUT + name)
    for name, called in _NUMBERS.items():
        if curve := figures.get(name):
            after, now = _after(run, curve), number(curve.finite[-1])
            if _began_at_0(curve):
                words = (f"Before training {called} was ", number(curve.finite[0]), f"; {after} it is ", now, ".")
            else:
                words = (f"{_capital(after)} {called} is ", now, ".")
            return Headline(words, HELD_OUT + name)
    for name, called in _OWN.items():
        if own := run.curve(name):
            first, now, after = number(own.early()), number(own.late()), _after(run, own)
            return Headline((f"At first {called} was ", first, f"; {after} it is ", now, "."), name)
    return None


def _began_at_0(curve: Curve) -> bool:
    """Whether it was measured before training, and again later."""
    return len(curve.finite) > 1 and curve.steps[0] == 0


def _after(run: History, curve: Curve) -> str:
    step = max(curve.steps[-1], 0)
    whole = run.planned_steps
    many = f"{step:,} of {whole:,}" if whole and step < whole else f"{step:,}"
    return f"after {many} {'step' if many == '1' else 'steps'} of {method(run)}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
