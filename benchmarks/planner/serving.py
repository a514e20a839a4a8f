"""Rows of serving engines: time per token, rate under load, rate at a given speed per user."""

from __future__ import annotations

import re
from collections.abc import Iterator

from planner.row import Answer, Row, Unplannable, count, dtype, machine, number, price_of, required, shape

from plaudit.plan import Constants, GenerationLayout, Workload
from plaudit.plan.cost import memory as bytes_of
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.parts import OWN_ENGINE_SHARE
from plaudit.plan.search import generation_layouts

SATURATED = 2048.0
"""Sequences of a server under full load: trtllm-bench sends 1000 to 3000 requests."""


def said_layout(row: Row) -> GenerationLayout | None:
    """The layout that the source names; None where it names none."""
    notes = row["notes"]
    dealt = re.search(r"\bDEP(\d+)", notes) or re.search(r"_tp1_ep(\d+)_", notes)
    together = re.search(r"_tp(\d+)_ep(\d+)_", notes) or re.search(r"\bTP(\d+)[ ,/;]*EP(\d+)\b", notes)
    tp = count(row, "gen_tp") or (int(found[1]) if (found := re.search(r"\bTP ?=? ?(\d+)\b", notes)) else None)
    if dealt and int(dealt[1]) > 1:
        return GenerationLayout(1, 1, int(dealt[1]))
    if together and int(together[2]) > 1:
        return GenerationLayout(int(together[1]), 1, int(together[2]))
    return GenerationLayout(tp, count(row, "gen_pp") or 1) if tp else None


def engines(row: Row, constants: Constants) -> Iterator[Replica]:
    """The replica with the source's layout, or the possible layouts where the source is silent."""
    model, where = shape(row), machine(row)
    kind, stated = dtype(row, model), said_layout(row)
    tensorrt = row["system"].lower().replace("-", "").startswith(("tensorrt", "trtllm"))
    cache = "fp8" if kind in ("fp8", "fp4") and tensorrt else "bf16"
    for layout in [stated] if stated else generation_layouts(Workload(model, response=1), where):
        layout.check(model)
        if layout.devices > where.devices:
            raise Unplannable(f"a replica of {layout} takes {layout.devices} devices, and there are {where.devices}")
        yield Replica(model, where, layout, kind, cache, constants)


def replica(row: Row, constants: Constants) -> Replica:
    found = list(engines(row, constants))
    if len(found) > 1:
        raise Unplannable("no layout of the engine")
    return found[0]


def replicas(engine: Replica) -> int:
    return max(1, engine.cluster.devices // engine.layout.devices)


def per_token(engine: Replica, sequences: float, prompt: float, response: float) -> float:
    """Time between two tokens of a response, including the prefills of later requests in between."""
    step = engine.step_seconds(sequences, prompt + response / 2)
    return step + sequences * engine.prefill_seconds(prompt) / response


def lengths_of(row: Row) -> tuple[float, float]:
    prompt, response = (
        required(row, "prompt_len", "mean prompt length"), required(row, "response_len", "mean response length")
    )  # fmt: skip
    if response < 1:
        raise Unplannable(f"a response of {response:g} tokens")
    return prompt, response


def room(engine: Replica, prompt: float, response: float) -> float:
    """Number of sequences whose caches fit in a replica."""
    free = engine.cluster.accelerator.memory * OWN_ENGINE_SHARE - engine.weight_bytes() - engine.constants.graph_bytes
    return bytes_of.concurrency(engine, free, prompt + response)


def tpot(row: Row, constants: Constants) -> Answer:
    engine = replica(row, constants)
    prompt, response = lengths_of(row)
    if response < 2:
        raise Unplannable(f"a response of {response:g} tokens has no time between tokens")
    # Concurrency is that of the whole server and is divided over its replicas.
    concurrency = required(row, "batch", "concurrency") / replicas(engine)
    # Sequences that do not fit in the cache queue; their waiting time is not inter-token latency.
    sequences = max(1.0, min(concurrency, room(engine, prompt, response)))
    seconds = per_token(engine, sequences, prompt, response)
    target = ("TPOT, experts" if engine.model.experts else "TPOT, dense") if row["metric"] == "tpot" else ""
    scale = 1.0 if row["unit"] == "s" else 1e3
    return Answer(seconds * scale, float(row["value"]), target)


def first_token(row: Row, constants: Constants) -> Answer:
    engine = replica(row, constants)
    scale = 1.0 if row["unit"] == "s" else 1e3
    return Answer(engine.prefill_seconds(lengths_of(row)[0]) * scale, float(row["value"]), "")


def latency(row: Row, constants: Constants) -> Answer:
    """Of a whole request: time to first token plus the decode steps."""
    token = tpot({**row, "metric": "tpot"}, constants)
    first, measured = first_token(row, constants).predicted, token.measured
    return Answer(first + (lengths_of(row)[1] - 1) * token.predicted, measured, "")


def rate(engine: Replica, sequences: float, prompt: float, response: float) -> float:
    """Tokens per second over all devices."""
    return replicas(engine) * sequences / per_token(engine, sequences, prompt, response)


def serving_rate(row: Row, constants: Constants) -> Answer:
    prompt, response = lengths_of(row)
    found = []
    for engine in engines(row, constants):
        most = room(engine, prompt, response)
        if most >= 1:
            batch = number(row, "batch")
            found.append(rate(engine, min(most, batch / replicas(engine) if batch else SATURATED), prompt, response))
    where = machine(row)
    if not found:
        raise Unplannable(f"{row['model']} does not fit in {where.name}")
    # A source that names no layout is assumed to have used the best one.
    each = where.devices if row["unit"].endswith("/GPU") else 1
    return Answer(max(found) / each, float(row["value"]), "")


def rate_for_users(row: Row, constants: Constants) -> tuple[float, int]:
    """(tokens per second, devices) of the layout and load with the highest rate at which each user gets the stated
    speed."""
    speed = re.search(r"([\d.]+) tok/s/user", row["notes"])
    if not speed:
        raise Unplannable("no speed for a user")
    if re.search(r"(?<!no )MTP", row["notes"]):
        raise Unplannable("predicts several tokens at once (MTP), which the planner does not know")
    prompt, response = lengths_of(row)
    best, where = 0.0, machine(row)
    for engine in engines(row, constants):
        most = room(engine, prompt, response)
        for sequences in (2.0**i for i in range(14)):
            if sequences <= most and per_token(engine, sequences, prompt, response) <= 1 / float(speed[1]):
                best = max(best, rate(engine, sequences, prompt, response))
    if not best:
        raise Unplannable(f"no cut of {row['model']} on {where.name} gives a user {speed[1]} tokens/s")
    return best, where.devices


def rate_per_megawatt(row: Row, constants: Constants) -> Answer:
    found, devices = rate_for_users(row, constants)
    return Answer(found / (devices * machine(row).accelerator.power / 1e6), float(row["value"]), "")


def token_cost(row: Row, constants: Constants) -> Answer:
    """Cost of a million tokens, on hardware that the operator owns (InferenceX's figures are of that kind)."""
    found, devices = rate_for_users(row, constants)
    price = price_of(machine(row), "owned")
    return Answer(price * devices / 3600 / found * 1e6, float(row["value"]), "")
