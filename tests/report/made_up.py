"""The event log of a synthetic RL run: the events of a real run, with predefined curves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from plaudit.events import END, EventLog
from plaudit.report.curve import Curve
from plaudit.report.history import History

Shape = Callable[[float], float]  # a function of the completed share of the run

HOSTILE = "</script><img src=x onerror=\"document.title='run'\"><!--<script>\u2028&lt;b&gt;"

# A healthy GRPO run: reward and truth rise together, everything else is stable.
HEALTHY: Mapping[str, Shape] = {
    "reward/mean": lambda x: 0.3 + 0.45 * x,
    "reward/std": lambda x: 0.45 - 0.1 * x,
    "reward/min": lambda x: 0.0,
    "reward/max": lambda x: 1.0,
    "reward/zero_std_groups": lambda x: 0.2 + 0.15 * x,
    "reward/errors": lambda x: 0.0,
    "reward/sums": lambda x: 0.3 + 0.45 * x,
    "reward/brevity": lambda x: 0.1 + 0.05 * x,
    "shaped_reward/mean": lambda x: 0.28 + 0.4 * x,
    "accuracy": lambda x: 0.28 + 0.45 * x,
    "pass_at_k": lambda x: 0.6 + 0.35 * x,
    "length/mean": lambda x: 18 + 3 * x,
    "length/min": lambda x: 9,
    "length/max": lambda x: 31,
    "length/stopped_mean": lambda x: 17 + 3 * x,
    "length/prompt_mean": lambda x: 8,
    "length/truncated": lambda x: 0.04 * (1 - x),
    "length/aborted": lambda x: 0.0,
    "policy/loss": lambda x: 0.0,
    "policy/entropy": lambda x: 0.8 - 0.3 * x,
    "policy/ratio_mean": lambda x: 1.0,
    "policy/ratio_min": lambda x: 1.0,
    "policy/ratio_max": lambda x: 1.0,
    "policy/clip_low": lambda x: 0.0,
    "policy/clip_high": lambda x: 0.0,
    "policy/kl_old": lambda x: 0.0,
    "policy/grad_norm": lambda x: 0.5,
    "policy/lr": lambda x: 1e-4 * min(1, 0.02 + 10 * x),
    "kl/reference": lambda x: 0.02 + 0.08 * x,
    "kl/coef": lambda x: 0.01,
    "advantage/mean": lambda x: 0.0,
    "advantage/min": lambda x: -2.0,
    "advantage/max": lambda x: 2.0,
    "mismatch/abs_mean": lambda x: 2e-5,
    "mismatch/abs_max": lambda x: 4e-4,
    "mismatch/k3": lambda x: 1e-9,
    "mismatch/ess": lambda x: 0.999,
    "mismatch/correlation": lambda x: 0.99999,
    "time/generate": lambda x: 1.0 + 0.2 * x,
    "time/reward": lambda x: 0.3,
    "time/reference": lambda x: 0.2,
    "time/update": lambda x: 0.9,
    "time/publish": lambda x: 0.05,
    "time/step": lambda x: 2.6 + 0.2 * x,
    "perf/tokens_per_second": lambda x: 2300,
    "perf/samples_per_second": lambda x: 24,
    "progress/samples": lambda x: 6400 * x,
    "progress/prompts": lambda x: 800 * x,
}
# Metrics that are exact and get no noise.
EXACT = (
    "policy/loss", "policy/ratio", "policy/clip", "policy/kl_old", "policy/lr", "policy/updates", "lr", "reward/errors",
    "reward/min", "reward/max", "rollout/", "length/aborted", "progress/", "kl/coef", "advantage/mean",
)  # fmt: skip

# Metrics that reveal reward hacking.
HONEST: Mapping[str, Shape] = {
    "reward/length_correlation": lambda x: 0.15,
    "response/repetition": lambda x: 0.06,
    "response/common": lambda x: 0.05,
}
CRITIC: Mapping[str, Shape] = {
    "value/mean": lambda x: 0.3 + 0.4 * x,
    "value/loss": lambda x: 0.2 - 0.12 * x,
    "value/clip": lambda x: 0.02,
    "value/explained_variance": lambda x: 0.1 + 0.5 * x,
    "value/grad_norm": lambda x: 1.1,
    "return/mean": lambda x: 0.3 + 0.45 * x,
    "time/critic": lambda x: 0.4,
    "time/values": lambda x: 0.1,
}
ASYNCHRONOUS: Mapping[str, Shape] = {
    "staleness/mean": lambda x: 1.2,
    "staleness/max": lambda x: 2,
    "rollout/dropped": lambda x: 0,
    "rollout/staleness_bound": lambda x: 4,
}


def values_at(
    shapes: Mapping[str, Shape], share: float, chance: random.Random, noise: float = 0.03
) -> dict[str, float]:
    values = {}
    for name, shape in shapes.items():
        value = shape(share)
        values[name] = value if name.startswith(EXACT) else value * (1 + noise * chance.gauss(0, 1))
    return values


def history(
    shapes: Mapping[str, Shape] = HEALTHY, steps: int = 120, seed: int = 0, noise: float = 0.03, **changed: Shape
) -> History:
    """A run as the rules get it. Names in `changed` have __ for /."""
    shapes = {**shapes, **{name.replace("__", "/"): shape for name, shape in changed.items()}}
    chance = random.Random(seed)
    rows = [values_at(shapes, step / steps, chance, noise) for step in range(1, steps + 1)]
    numbers = tuple(range(1, steps + 1))
    return History("made-up", {name: Curve(numbers, tuple(row[name] for row in rows)) for name in shapes})


def write_run(
    directory: Path, shapes: Mapping[str, Shape] = HEALTHY, steps: int = 120, seed: int = 0, total: int | None = None,
    algorithm: str = "grpo",
) -> Path:  # fmt: skip
    """Writes the event log of such a run to the directory: metrics, held-out metrics, spans, memory and samples."""
    directory.mkdir(parents=True, exist_ok=True)
    log = EventLog(directory)
    log.write("plan", task="rl", algorithm=algorithm, steps=total or steps, clip_norm=1.0)
    chance = random.Random(seed)
    held_out(log, shapes, 0, 0.0)
    for step in range(1, steps + 1):
        values = values_at(shapes, step / steps, chance)
        log.metric(values, step=step)
        for name in ("generate", "update"):
            log.write("span", step=step, name=name, seconds=values[f"time/{name}"])
            log.write("memory", step=step, phase=name, bytes=memory_of(name, step))
        if step % 20 == 0 or step == steps:
            held_out(log, shapes, step, step / steps)
        if step % 10 == 1:
            for index in range(4):
                write_sample(log, step, index, chance)
    if total is None:
        log.note(END)
    log.close()
    return directory


def write_examples(directory: Path, task: str, steps: int, figure: str) -> Path:
    """Writes the event log of a supervised run: the loss of every step and two evaluations."""
    directory.mkdir(parents=True)
    log = EventLog(directory)
    log.write("plan", task=task, steps=steps, clip_norm=1.0)
    chance = random.Random(steps)
    for step in range(1, steps + 1):
        loss = 2 * math.exp(-4 * step / steps) * (1 + 0.05 * chance.gauss(0, 1))
        log.metric({"loss": loss, "grad_norm": 0.8 + 0.1 * chance.random(), "lr": 1e-3, "tokens": 900.0}, step=step)
        if step in (steps // 2, steps):
            log.metric({"heldout/heldout_loss": loss, f"heldout/{figure}": 0.5 + 0.4 * step / steps}, step=step)
            log.write("span", step=step, name="evaluate", seconds=1.5)
    log.note(END)
    log.close()
    return directory


def held_out(log: EventLog, shapes: Mapping[str, Shape], step: int, share: float) -> None:
    log.metric(
        {"heldout/accuracy": shapes["accuracy"](share), "heldout/reward": shapes["reward/mean"](share)}, step=step
    )


def memory_of(phase: str, step: int) -> dict[str, int]:
    weights = 9_000_000
    if phase == "generate":
        return {"weights": weights, "kv cache": 12_000_000 + 40_000 * (step % 5)}
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": 20_000_000}


def write_sample(log: EventLog, step: int, index: int, chance: random.Random) -> None:
    """Sample 3 of the first step contains hostile text, and sample 2 of every step has a scoring error."""
    tokens = ["7", "+", "8", "=", "15", ";", "15", "+", "4", "=", "19", ";", "#", "19", "\n", "<|end|>"]
    if step == 1 and index == 3:
        tokens = [HOSTILE, " and ", "\u2028", "more\n", "<b>bold</b>"]
    masked = index == 1
    right = index in (0, 3)
    failed = index == 2
    count = len(tokens)
    log.write(
        "sample",
        step=step,
        version=step - 1,
        group=0,
        index=index,
        prompt="7+8+4=" if step > 1 else f"7+8+4= {HOSTILE}",
        response="".join(tokens),
        tokens=tokens,
        mask=[0 if masked and i < 3 else 1 for i in range(count)],
        reward=None if failed else float(right),
        error={"type": "timeout", "message": f"no answer {HOSTILE}"} if failed else None,
        right=None if failed else right,
        finish_reason="stop" if index else "length",
        token_rewards=[0.0] * (count - 1) + [float(right)],
        kl=None if index == 1 else [abs(chance.gauss(0, 0.05)) for _ in tokens],
        logprobs=[-abs(chance.gauss(0, 0.6)) for _ in tokens],
        advantages=[(1.0 if right else -1.0) * (0.3 + 0.7 * math.exp(-i / 5)) for i in range(count)],
    )
