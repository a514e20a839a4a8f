"""`--rollout-only`: generate and score a run's samples without training."""

from __future__ import annotations

from typing import Any

from plaudit.rl.loop import RlTraining
from plaudit.train.rollouts.batch_metrics import batch_metrics
from plaudit.train.rollouts.dump import Dump
from plaudit.train.run.signals import Interrupted, interruptible, leave_on_signal

SHOWN = {"reward": "reward/mean", "accuracy": "accuracy", "length": "length/mean", "errors": "reward/errors"}


def roll_out(training: RlTraining) -> dict[str, Any]:
    """Write every step's samples to rollouts/ and their metrics to the event log; weights do not change."""
    run, viewer, steps = training.run, training.viewer, training.recipe.train.steps
    dump = Dump(run.directory / "rollouts")
    dump.discard_after(0)
    seconds, total = 0.0, 0
    try:
        with interruptible() as stop, viewer.bar(0, steps):
            for step in range(1, steps + 1):
                with leave_on_signal():
                    batch = training.rollouts.next(step - 1, training.version)
                with training.clock("dump"):
                    dump.write(step, batch, training.rollouts.drawn)
                metrics = {**batch_metrics(batch.samples), **batch.metrics, **training.clock.split()}
                run.events.metric(metrics, step=step, version=training.version)
                training.ledger.write(run.events, step, training.version)
                viewer.step(step, metrics)
                viewer.figures(step, {name: metrics[key] for name, key in SHOWN.items() if key in metrics})
                seconds, total = seconds + metrics["time/step"], total + len(batch.samples)
                if stop:
                    raise Interrupted(f"stopped at step {step} of {steps}; the samples so far are in {dump.directory}")
    finally:
        training.close()
    return {"steps": steps, "seconds": round(seconds, 1), "samples": total, "rollouts": str(dump.directory)}
