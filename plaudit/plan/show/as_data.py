"""Plans as plain data, for `--json` and for the page."""

from __future__ import annotations

from typing import Any

from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.cost.term import Term
from plaudit.plan.question import Outcome
from plaudit.plan.residuals import ErrorBar, error_bars
from plaudit.plan.shape.hardware import Cluster

LEFT_OUT = {
    "tokens_per_second_per_megawatt": "the four published measurements are missed by more than 25 % (docs/planner.md)"
}
"""Metrics that no plan has, with the reason."""


def term_data(term: Term) -> dict[str, Any]:
    data: dict[str, Any] = {"name": term.name, "value": term.value, "unit": term.unit}
    if term.formula:
        data["formula"] = term.formula
    if term.inputs:
        data["inputs"] = dict(term.inputs)
    if term.parts:
        data["parts"] = [term_data(part) for part in term.parts]
    return data


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    return {"name": cluster.name, "accelerator": cluster.accelerator.name, "nodes": cluster.nodes,
            "devices": cluster.devices, "memory_bytes": cluster.accelerator.memory,
            "host_memory_bytes": cluster.host_memory}  # fmt: skip


def plan_data(prediction: Prediction) -> dict[str, Any]:
    plan, spent = prediction.plan, prediction.cost
    generation, training = plan.generation, plan.training
    return {
        "placement": plan.placement,
        "hardware": cluster_data(plan.cluster),
        "generation_hardware": cluster_data(plan.generation_cluster),
        "parallelism": {
            "generation": {"tp": generation.tp, "pp": generation.pp, "ep": generation.ep, "replicas": plan.replicas},
            "training": {"tp": training.tp, "pp": training.pp, "dp": training.dp, "ep": training.ep, "cp": training.cp,
                         "zero": training.zero, "recompute": training.recompute, "micro_tokens": training.micro_tokens,
                         "park_reference": training.park, "offload_optimizer": training.offload_optimizer},
        },
        "channel": plan.channel,
        "note": prediction.note,
        "staleness": plan.staleness,
        "runnable": prediction.runnable,
        "missing": list(prediction.missing),
        "phases": [
            {"name": phase.name, "pool": phase.pool, "start": phase.start, "seconds": phase.seconds.value,
             "bytes_per_gpu": phase.memory.value, "time": term_data(phase.seconds), "memory": term_data(phase.memory)}
            for phase in prediction.phases
        ],
        "host_bytes_per_node": prediction.host.value,
        "concurrency": prediction.concurrency,
        "waves": prediction.waves,
        "shortages": [{"what": s.what, "needed_bytes": s.needed, "available_bytes": s.available}
                      for s in prediction.shortages],
        "trainer_waits": prediction.trainer_waits,
        "step_seconds": prediction.step.value,
        "dollars_per_step": {level: term.value for level, term in spent.step.items()},
        "dollars_per_million_tokens": {level: term.value for level, term in spent.million_tokens.items()},
        "dollars_per_run": {level: term.value for level, term in spent.run.items()},
        "tokens_per_second_per_gpu": spent.tokens_per_device,
        "tokens_per_second_per_megawatt": None,
        "errors": {bar.kind: errors_data(bar) for bar in error_bars(prediction)},
    }  # fmt: skip


def errors_data(bar: ErrorBar) -> dict[str, Any]:
    return {"median": bar.median, "p90": bar.p90, "bias": bar.bias, "rows": bar.rows, "of": bar.of,
            "extrapolated": bar.extrapolated}  # fmt: skip


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    work, plans = outcome.question.workload, outcome.plans
    order = {id(prediction): index for index, prediction in enumerate(plans)}
    return {
        "model": {"name": work.model.name, "parameters": work.model.parameters, "active": work.model.active_parameters},
        "workload": {"algorithm": work.algorithm, "prompt": work.prompt, "response": work.response,
                     "longest": work.longest,
                     "batch": work.batch, "samples": work.group, "updates": work.updates, "steps": work.steps,
                     "dtype": work.dtype,
                     "generation_dtype": work.engine_dtype, "kv_dtype": work.kv_dtype},
        "price": outcome.question.price,
        "price_basis": outcome.question.price_basis,
        "left_out": LEFT_OUT,
        "headline": outcome.headline,
        "runnable": len(outcome.runnable),
        "plans": [plan_data(prediction) for prediction in plans],
        "nearest": plan_data(outcome.nearest) if outcome.nearest else None,
        "frontier": [order[id(prediction)] for prediction in outcome.frontier()],
        "rejected": [
            {"hardware": place, "placement": r.placement, "reason": r.reason, "factor": r.factor}
            for place, result in outcome.results.items()
            for r in result.rejected
        ],
        "tried": sum(result.tried for result in outcome.results.values()),
    }  # fmt: skip
