"""Turns each row of published measurements into a plan from what the source states; nothing is fitted to the row.

Where a source is silent the planner chooses (layout), or one default applies to all rows (a prompt of 256 tokens, four
updates where only a global batch is known). A row without a value that a plan requires is rejected with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from planner.row import (
    Answer,
    Row,
    Unplannable,
    copies,
    count,
    dtype,
    gpu_name,
    machine,
    number,
    price_of,
    required,
    shape,
)
from planner.serving import first_token, latency, rate_per_megawatt, serving_rate, token_cost, tpot

from plaudit.errors import PlauditError
from plaudit.plan import Constants, GenerationLayout, ModelShape, Plan, TrainingLayout, Workload, cluster
from plaudit.plan.cost import memory as bytes_of
from plaudit.plan.cost.channel import find, transfer
from plaudit.plan.cost.parts import Parts
from plaudit.plan.cost.prediction import Prediction, predict_plan
from plaudit.plan.cost.training import Trainer
from plaudit.plan.search import Search, training_layouts
from plaudit.plan.shape.hardware import Cluster, accelerator

PROMPT = 256.0

# Training


BRIDGE_CUT = re.compile(r"\[FSDP,TP,PP,CP,VP,EP\]=([\d,\-]+)")


def bridge(row: Row, constants: Constants) -> tuple[Trainer, float, float]:
    cut = BRIDGE_CUT.search(row["notes"])
    size = re.search(r"MBS (\d+)", row["notes"])
    where, model = machine(row), shape(row)
    length, batch = required(row, "response_len", "sequence length"), required(row, "batch", "batch")
    if not cut or not size or len(cut[1].split(",")) != 6:
        return fastest_trainer(row, where, model, batch, length, constants), batch, length
    fsdp, tp, pp, cp, vpp, ep = (int(part) if part.isdigit() else 1 for part in cut[1].split(","))
    layout = TrainingLayout(
        tp, pp, copies(where.devices, tp, pp, cp), ep, cp, vpp, 3 if fsdp else 1, int(size[1]) * int(length)
    )
    return Trainer(model, where, layout, dtype(row, model), constants), batch, length


def fastest_trainer(
    row: Row, where: Cluster, model: ModelShape, batch: float, length: float, constants: Constants
) -> Trainer:
    """For a run whose source names no layout: the fastest that fits, as the planner would choose."""
    workload = Workload(replace(model, max_context=0), prompt=0, response=length, max_response=length)
    found: dict[Trainer, float] = {}
    for cut in training_layouts(workload, where):
        for recompute in ("none", "full"):
            layout = replace(cut, recompute=recompute)
            trainer = Trainer(model, where, layout, dtype(row, model), constants)
            parts = (bytes_of.weights, bytes_of.gradients, bytes_of.optimizer)
            held = sum(part(trainer).value for part in parts) + bytes_of.activations(trainer, length).value
            held += bytes_of.logits(trainer, length).value + constants.reserve_bytes
            if batch >= layout.dp and held <= where.accelerator.memory:
                found[trainer] = trainer.step(batch, length).value
                break
    if not found:
        raise Unplannable(f"no training layout named, and none fits for {model.name} on {where.name}")
    return min(found, key=lambda trainer: found[trainer])


def train_rate(row: Row, constants: Constants) -> Answer:
    trainer, batch, length = bridge(row, constants)
    seconds = trainer.step(batch, length).value
    # The planner cannot say how well an unnamed layout was chosen: shown, not counted.
    target = "training" if BRIDGE_CUT.search(row["notes"]) else ""
    return Answer(batch * length / seconds / trainer.cluster.devices, float(row["value"]), target)


def train_tflops(row: Row, constants: Constants) -> Answer:
    trainer, batch, length = bridge(row, constants)
    model = trainer.model
    flops = batch * length * (6 * model.active_parameters + 3 * model.attention_flops(length / 2))
    seconds = trainer.step(batch, length).value
    # The same runs as the throughput rows in another metric: shown, not counted twice.
    return Answer(flops / seconds / trainer.cluster.devices / 1e12, float(row["value"]), "")


INTERLEAVED = {"gpt3-175b": 3, "turing-530b": 3}
"""arXiv 2205.05198, section 6: three interleaved stages in the 175B and 530B runs."""


def megatron(row: Row, constants: Constants) -> tuple[Trainer, float, float]:
    cuts = re.search(r"TP(\d+) PP(\d+)", row["notes"])
    if not cuts:
        raise Unplannable("no training layout")
    model, where = shape(row), machine(row)
    length, batch = required(row, "response_len", "sequence length"), required(row, "batch", "batch")
    tp, pp = int(cuts[1]), int(cuts[2])
    recompute = (
        "full" if "full recompute" in row["notes"] else "none" if "no_recompute" in row["metric"] else "selective"
    )
    micro = int(batch) if pp == 1 else 1
    layout = TrainingLayout(
        tp, pp, copies(where.devices, tp, pp), vpp=INTERLEAVED.get(model.name, 1), micro_tokens=micro * int(length),
        recompute=recompute,
    )  # fmt: skip
    return Trainer(model, where, layout, "bf16", constants), batch, length


def megatron_memory(row: Row, constants: Constants) -> Answer:
    trainer, _, length = megatron(row, constants)
    if row["metric"] == "memory_params_optimizer":
        found = bytes_of.weights(trainer).value + bytes_of.gradients(trainer).value + bytes_of.optimizer(trainer).value
    else:
        parallel = "seqpar" in row["metric"]
        found = bytes_of.activations(trainer, length, fused=False, sequence_parallel=parallel).value
    return Answer(found / 2**30, float(row["value"]), "memory")


# Whole steps of RL


def train_layout(row: Row, devices: int, length: float) -> TrainingLayout | None:
    parts = [part.strip() for part in row["train_layout"].split(",")] if row["train_layout"] else []
    if len(parts) < 5:
        return None
    cuts = (parts[0], parts[1], parts[2], parts[-2])
    if not all(part.isdigit() for part in cuts):
        raise Unplannable(f"train_layout = {row['train_layout']!r}: expected whole numbers, TP,CP,EP,PP,VPP or more")
    tp, cp, ep, pp = map(int, cuts)
    vpp = int(parts[-1]) if parts[-1].isdigit() else 1
    # NeMo RL's recipes sum gradients in bf16 (grad_reduce_in_fp32: false).
    return TrainingLayout(tp, pp, copies(devices, tp, cp, pp), ep, cp, vpp, 1, int(length), gradient_bytes=2)


@lru_cache(maxsize=256)
def _searched(workload: Workload, plan: str, where: Cluster, engines: Cluster | None) -> Plan:
    """The layouts that the planner itself would choose, with the shipped constants: a source may name none."""
    # Where phases that use the devices exclusively do not fit, the optimizer may stay on the host throughout.
    for placement in (plan, "hybrid") if plan == "swapped" else (plan,):
        found = Search(workload, where, placements=(placement,), generation_cluster=engines).run().plans
        if found:
            break
    else:
        raise Unplannable(f"no plan fits for {workload.model.name} on {where.name}")
    return found[0].plan


def reinforcement(row: Row, constants: Constants) -> Prediction:
    model = shape(row)
    response = required(row, "response_len", "mean response length")
    if row["response_kind"] == "max":
        raise Unplannable("only the longest response is known, not the mean")
    batch = int(required(row, "batch", "number of responses in a step"))
    prompt = number(row, "prompt_len") or PROMPT
    longest = re.search(r"max seq ([\d,]+)", row["notes"])
    room = model.max_context - prompt if model.max_context else 2 * response
    most = float(longest[1].replace(",", "")) - prompt if longest else min(2 * response, max(response, room))
    gbs = re.search(r"GBS (\d+)", row["notes"])
    updates = max(1, batch // int(gbs[1])) if gbs else 4
    kind = dtype(row, model)
    algorithm = "ppo" if row["algorithm"] == "PPO" and "no critic" not in row["algorithm"] else "grpo"
    aligner = row["system"] == "NeMo-Aligner"
    small = ModelShape.named("opt-350m") if row["system"].startswith("DeepSpeed-Chat") else None
    # NeMo-Aligner's critic and reward run beside the actor on their own nodes: the actor's side sets the step.
    workload = Workload(
        model, "grpo" if aligner else algorithm, prompt, response, max(most, response), batch, 1, updates, critic=small,
        reward=small, dtype=kind,
    )  # fmt: skip
    actor = re.search(r"actor (\d+) nodes", row["notes"])
    where = machine(row, int(actor[1]) * 8 if actor else None)
    return predict_plan(workload, plan_of(row, workload, where, prompt + most), constants)


def plan_of(row: Row, workload: Workload, where: Cluster, length: float) -> Plan:
    overlapped = "async" in row["architecture"] or "one-step-off" in row["architecture"]
    split = re.search(r"gen GPUs (\d+) / train GPUs (\d+)", row["notes"]) or re.search(
        r"(\d+)\s*:\s*(\d+)", row["architecture"]
    )
    ahead = re.search(r"(\d+)-step Off", row["architecture"])
    placement = "async" if overlapped else "disaggregated" if split else "swapped"
    engines = None
    if split:
        if int(split[1]) + int(split[2]) > where.devices:
            raise Unplannable(f"{split[1]} + {split[2]} devices are more than the {where.devices} there are")
        engines, where = where.part(int(split[1])), where.part(int(split[2]))
    elif overlapped:
        half = max(1, where.devices // 2)
        engines, where = where.part(half), where.part(half)
    layout = train_layout(row, where.devices, length)
    tp = number(row, "gen_tp")
    if layout is None or tp is None:
        return _searched(workload, placement, where, engines)
    generation = GenerationLayout(int(tp), int(number(row, "gen_pp") or 1))
    # NeMo RL packs tensors and gathers the next bucket while one is being sent.
    plan = Plan(placement, where, engines or where, generation, layout, "pipeline" if engines else "ipc",
                int(ahead[1]) if ahead else 1 if overlapped else 0)  # fmt: skip
    # Sources seldom state whether they recompute: assume they do where the step would not fit otherwise.
    for recompute, park in (("none", False), ("none", True), ("full", True)):
        plan = replace(plan, training=replace(layout, recompute=recompute, park=park))
        needed = Parts(workload, plan, Constants()).training_memory(0.0).value
        if needed <= where.accelerator.memory:
            break
    return plan


def step_time(row: Row, constants: Constants) -> Answer:
    if row["system"] == "Megatron-LM":
        trainer, batch, length = megatron(row, constants)
        return Answer(trainer.step(batch, length).value, float(row["value"]), "training")
    if row["architecture"].startswith("train"):
        raise Unplannable("a training run without a sequence length")
    return Answer(reinforcement(row, constants).step.value, float(row["value"]), "step time")


def step_rate(row: Row, constants: Constants) -> Answer:
    found = reinforcement(row, constants)
    tokens = found.workload.batch * found.workload.length
    return Answer(
        tokens / found.step.value / required(row, "n_gpus", "number of accelerators"), float(row["value"]), ""
    )


def phase(name: str, target: str = "") -> Callable[[Row, Constants], Answer]:
    def answer(row: Row, constants: Constants) -> Answer:
        return Answer(reinforcement(row, constants).phase(name).seconds.value, float(row["value"]), target)

    return answer


def one_score(row: Row, constants: Constants) -> Answer:
    found = reinforcement(row, constants).phase("scoring").seconds.parts[0]
    return Answer(found.value, float(row["value"]), "")


def epoch_time(row: Row, constants: Constants) -> Answer:
    queries = re.search(r"([\d.]+)k queries", row["notes"])
    if not queries:
        raise Unplannable("no number of queries in the epoch")
    found = reinforcement(row, constants)
    steps = float(queries[1]) * 1e3 / found.workload.batch
    return Answer(found.step.value * steps / 3600, float(row["value"]), "")


def epoch_cost(row: Row, constants: Constants) -> Answer:
    """At the highest on-demand price: the sources of such rows paid the list price of a large cloud."""
    hours, where = epoch_time(row, constants).predicted, machine(row)
    return Answer(hours * where.devices * price_of(where, "high"), float(row["value"]), "")


def run_time(row: Row, constants: Constants) -> Answer:
    steps = re.search(r"(\d+) PPO steps", row["notes"])
    if not steps:
        raise Unplannable("no number of steps")
    return Answer(reinforcement(row, constants).step.value * int(steps[1]) / 3600, float(row["value"]), "")


def generation_share(row: Row, constants: Constants) -> Answer:
    found = reinforcement(row, constants)
    return Answer(found.phase("generation").seconds.value / found.step.value, float(row["value"]), "")


def model_flops_share(row: Row, constants: Constants) -> Answer:
    """For training only: 6 FLOPs per parameter and token, over the data-sheet rate."""
    found = reinforcement(row, constants)
    work, where = found.workload, found.plan.cluster
    tokens = work.batch * work.length * work.epochs
    flops = tokens * (6 * work.model.active_parameters + 3 * work.model.attention_flops(work.length / 2))
    seconds = found.phase("training").seconds.value
    return Answer(flops / seconds / where.devices / where.accelerator.bf16, float(row["value"]), "")


# Weights


def channel_of(row: Row) -> str:
    text = f"{row['system']} {row['architecture']} {row['notes']}".lower()
    if "cpu serialize" in text or "cpu-serial" in text:
        return "host"
    if "before" in text or "checkpoint-engine=false" in text or "tensor by tensor" in text:
        return "tensors"
    if "mooncake" in text or "h2d" in text or row["system"].startswith("checkpoint-engine"):
        return "pipeline"
    if "reshard" in text or "xfer" in text or "nixl gpu rdma" in text or row["system"] == "NeMo RL checkpoint-engine":
        return "reshard"
    return "ipc" if "co-located" in text or "ipc" in text.split() else "broadcast"


def sync_seconds(row: Row) -> float:
    size = required(row, "params_b", "number of parameters")
    try:
        model, parameters = ModelShape.named(row["model"]), None
    except PlauditError:
        model, parameters = ModelShape.named("llama-3.1-8b"), size * 1e9
    try:
        chip = accelerator(gpu_name(row))
    except (PlauditError, Unplannable):
        chip = accelerator("H100")  # Only the network speed matters for a channel, and 50 GB/s is the common one.
    fp8 = "fp8" in row["model"].lower()
    to = "fp8" if row["dtype"] == "fp8" or "mxfp8" in row["notes"].lower() else None
    if "ipc" in channel_of(row) or "co-located sync" in row["architecture"]:
        to = None  # Cast in place, in the pass that copies them.
    senders = max(1, (count(row, "n_gpus") or 1) // 2) if to else 1
    return transfer(find(channel_of(row)), model, chip, "fp8" if fp8 else "bf16", to, parameters, senders).value


def weight_sync(row: Row, constants: Constants) -> Answer:
    # Casting has one constant, fitted on the only rows that have it: shown, not counted.
    cast = row["dtype"] == "fp8" and "fp8" not in row["model"].lower()
    return Answer(sync_seconds(row), float(row["value"]), "" if cast else "weight sync")


def weight_rate(row: Row, constants: Constants) -> Answer:
    size = required(row, "params_b", "number of parameters") * 2
    return Answer(size / sync_seconds(row), float(row["value"]), "")


def refit_total(row: Row, constants: Constants) -> Answer:
    return Answer(sync_seconds(row) + constants.switch_seconds, float(row["value"]), "weight sync")


# Memory


def verl_memory(row: Row, constants: Constants) -> Answer:
    cuts = re.search(r"TP(\d+) PP(\d+) EP(\d+)", row["notes"])
    if not cuts:
        raise Unplannable("no training layout")
    tp, pp, ep = map(int, cuts.groups())
    model, where = shape(row), machine(row)
    offloaded = "offload" in row["notes"]
    layout = TrainingLayout(tp, pp, copies(where.devices, tp, pp), ep, recompute="full", offload_optimizer=offloaded)
    workload = Workload(model, "grpo", PROMPT, required(row, "response_len", "mean response length"), 0, 512)
    # The engine's layout is not stated: the smallest that fits the weights.
    generation = GenerationLayout(32)
    plan = Plan("swapped", where, where, generation, layout, "ipc")
    found = predict_plan(workload, plan, constants)
    if row["metric"] == "cpu_memory":
        return Answer(found.host.value / 1e9, float(row["value"]), "memory")
    return Answer(found.peak.value / 1e9, float(row["value"]), "memory")


OPT = ("opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b")


def largest_fitting(row: Row, constants: Constants) -> Answer:
    size = re.search(r"(\d+)\s*G", row["gpu"])
    if not size:
        raise Unplannable(f"no memory size in {row['gpu']!r}")
    chip = replace(accelerator("A100-40G"), memory=float(size[1]) * 2**30)
    where = replace(cluster("1x1xA100-40G"), accelerator=chip)
    small = ModelShape.named("opt-350m")
    best = 0.0
    for name in OPT:
        model = ModelShape.named(name)
        layout = TrainingLayout(zero=3, micro_tokens=512, recompute="full", offload_optimizer=True)
        trainer, critic = (
            Trainer(model, where, layout, "bf16", constants),
            Trainer(small, where, layout, "bf16", constants),
        )
        # One copy to train and run, one as the reference, gradients layer by layer to the host.
        held = 2 * 2.0 * model.parameters + constants.reserve_bytes + 18.0 * small.parameters
        held += bytes_of.activations(trainer, 512).value + bytes_of.logits(trainer, 512).value + 2.0 * small.parameters
        held += bytes_of.activations(critic, 512).value
        if held <= chip.memory:
            best = model.parameters / 1e9
    named = float(row["value"])
    known = next(
        (ModelShape.named(n).parameters / 1e9 for n in OPT if abs(ModelShape.named(n).parameters / 1e9 - named) < 0.6),
        named,
    )
    return Answer(best, known, "memory")


PLANNERS: Mapping[str, Callable[[Row, Constants], Answer]] = {
    "tpot": tpot, "itl": tpot, "ttft": first_token, "request_latency": latency, "e2e_latency": latency,
    "generation_throughput": serving_rate,
    "train_throughput": train_rate, "train_model_tflops": train_tflops, "step_time": step_time, "throughput": step_rate,
    "generation_time": phase("generation"), "generate_sequences": phase("generation"),
    "train_time": phase("training", "training"),
    "old_logprob_time": one_score, "ref_logprob_time": one_score, "epoch_time": epoch_time,
    "weight_sync_time": weight_sync,
    "weight_sync_bandwidth": weight_rate, "refit_total_time": refit_total, "gpu_memory": verl_memory,
    "cpu_memory": verl_memory, "throughput_per_MW": rate_per_megawatt, "cost": token_cost, "epoch_cost": epoch_cost,
    "training_time": run_time, "time_per_1024_prompts": step_time, "generation_fraction": generation_share,
    "mfu": model_flops_share, "max_model_size_fits": largest_fitting, "memory_params_optimizer": megatron_memory,
    "memory_activation_no_recompute": megatron_memory, "memory_activation_seqpar_selective": megatron_memory,
}  # fmt: skip


def answer(row: Row, constants: Constants) -> Answer:
    """The prediction for a row. Raises Unplannable with the reason."""
    planner = PLANNERS.get(row["metric"])
    if planner is None:
        raise Unplannable(f"the planner says nothing about {row['metric']!r}")
    if not number(row, "value"):
        raise Unplannable(f"value = {row['value']!r}: expected a measurement of more than zero")
    try:
        return planner({**row, "value": row["value"].replace(",", "")}, constants)
    except PlauditError as error:
        raise Unplannable(str(error)) from None
