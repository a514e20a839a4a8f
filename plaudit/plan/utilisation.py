"""Effect of partial load on the cost of a token, in training and in serving.

Devices are paid for even when idle. Training at a utilisation of u: runs use a share u of the paid hours. Serving at u:
the request load is a share u of the engines' peak tokens per second with a full cache, so fewer sequences decode
together, each of them faster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plaudit.errors import ConfigError
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.parts import MOST_SEQUENCES, Parts
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.question import Outcome, Question
from plaudit.plan.search import generation_layouts
from plaudit.plan.shape.hardware import Cluster
from plaudit.plan.shape.layouts import GenerationLayout, TrainingLayout

POINTS = 5
"""Number of points of a range."""


@dataclass(frozen=True, slots=True)
class Server:
    """Engines on all devices of a cluster that serve independent requests of the workload's lengths."""

    replica: Replica
    replicas: int
    most: float
    """Most sequences that one replica decodes together."""
    prompt: float
    response: float

    def tokens_per_second(self, sequences: float) -> float:
        """Tokens per second of all replicas, with `sequences` in flight on each; every response has a prefill of its
        own."""
        reading = self.replica.prefill_seconds(self.prompt) / self.response
        return self.replicas * sequences / (self.token_seconds(sequences) + sequences * reading)

    def token_seconds(self, sequences: float) -> float:
        """Seconds per decode step: the time between two tokens of a sequence."""
        return self.replica.step_seconds(sequences, self.prompt + self.response / 2)

    def sequences_at(self, share: float) -> float:
        """Sequences in flight per replica at which this share of the peak rate is reached."""
        wanted, low, high = share * self.tokens_per_second(self.most), 0.0, self.most
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.tokens_per_second(middle) < wanted else (low, middle)
        return high


@dataclass(frozen=True, slots=True)
class Load:
    """One accelerator at one utilisation; costs in dollars per million tokens, if its price is known."""

    place: Cluster
    utilisation: float
    training: float | None
    serving: float | None
    tokens_per_second: float
    sequences: float
    """Mean sequences in flight per replica; below one, a replica is idle part of the time."""
    token_seconds: float


@dataclass(frozen=True, slots=True)
class Loads:
    question: Question
    trained: dict[str, Prediction]
    """The plan whose cost is used, by cluster: the fastest of our trainer, or else of any software."""
    served: dict[str, Server]
    loads: tuple[Load, ...]


def utilisations(text: str) -> tuple[float, ...]:
    """Parse `0.2..1.0` (five points), `0.3,0.5` or one number."""
    number = r"(\d*\.?\d+)"
    if ends := re.fullmatch(rf"\s*{number}\s*\.\.\s*{number}\s*", text):
        low, high = float(ends[1]), float(ends[2])
        shares = [low + (high - low) * i / (POINTS - 1) for i in range(POINTS)] if low < high else []
    else:
        shares = [float(part) for part in text.split(",")] if re.fullmatch(rf"{number}(,{number})*", text) else []
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise ConfigError(f"--utilisation {text}: expected shares above 0 and up to 1: 0.2..1.0, 0.3,0.5 or 0.4")
    return tuple(round(share, 6) for share in shares)


def loads(outcome: Outcome, shares: tuple[float, ...]) -> Loads:
    question, trained, served, rows = outcome.question, {}, {}, []
    for place in question.clusters:
        plans = outcome.results[place.name].plans
        ours = [p for p in plans if p.runnable]
        best = min(ours or plans, key=lambda p: p.step.value, default=None)
        server = _server(question, place)
        if best is None or server is None:
            continue
        trained[place.name], served[place.name] = best, server
        rows += [_load(question, place, best, server, share) for share in shares]
    return Loads(question, trained, served, tuple(rows))


def _load(question: Question, place: Cluster, best: Prediction, server: Server, share: float) -> Load:
    hourly, step = place.hourly(question.price), best.cost.million_tokens.get(question.price)
    rate, sequences = share * server.tokens_per_second(server.most), server.sequences_at(share)
    return Load(
        place, share, step.value / share if step else None, hourly / 3600 / rate * 1e6 if hourly is not None else None,
        rate, sequences, server.token_seconds(max(1.0, sequences)),
    )  # fmt: skip


def _server(question: Question, place: Cluster) -> Server | None:
    """The layout with the most tokens per second of all that fit."""
    fitting = [server for layout in generation_layouts(question.workload, place)
               if (server := _with_layout(question, place, layout))]  # fmt: skip
    return max(fitting, key=lambda server: server.tokens_per_second(server.most), default=None)


def _with_layout(question: Question, place: Cluster, layout: GenerationLayout) -> Server | None:
    work = question.workload
    # Only the engines' memory and cache matter here, on devices without a trainer.
    plan = Plan("disaggregated", place, place, layout, TrainingLayout(dp=place.devices, zero=3), "reshard")
    capacity = Parts(work, plan, question.constants).capacity()
    most = min(capacity.sequences, MOST_SEQUENCES * layout.attention_groups)
    if most < 1 or layout.devices > place.devices:
        return None
    replica = Replica(work.model, place, layout, work.engine_dtype, work.kv_dtype, question.constants)
    return Server(replica, plan.replicas, most, work.prompt, work.response)
