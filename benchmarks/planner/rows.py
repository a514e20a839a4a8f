"""Rows of published measurements, each turned into a plan: what the source says, and nothing fitted to the row.

Where a source is silent the planner chooses (layout), or one default holds for all rows (a prompt of 256 tokens, four
updates where only a global batch is known). A row that lacks what a plan cannot do without is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from plaudit.errors import PlauditError
from plaudit.plan import Constants, GenerationLayout, ModelShape, Plan, TrainingLayout, Workload, cluster
from plaudit.plan import memory as bytes_of
from plaudit.plan.channel import find, transfer
from plaudit.plan.decode import Replica
from plaudit.plan.hardware import Cluster, accelerator
from plaudit.plan.parts import OWN_ENGINE_SHARE, Parts
from plaudit.plan.prediction import Prediction, predict_plan
from plaudit.plan.search import Search
from plaudit.plan.training import Trainer

Row = Mapping[str, str]
PROMPT = 256.0
SATURATED = 2048.0
"""Sequences of a server under full load: trtllm-bench sends 1000 to 3000 requests."""


class Unplannable(Exception):
    """The row does not say what a plan needs."""


@dataclass(frozen=True, slots=True)
class Answer:
    predicted: float
    measured: float
    target: str
    """Which of the targets the row counts for; empty for none."""


def number(row: Row, key: str) -> float | None:
    text = row[key].strip()
    return float(text) if re.fullmatch(r"[\d.]+", text) else None


def required(row: Row, key: str, what: str) -> float:
    found = number(row, key)
    if found is None:
        raise Unplannable(f"no {what}" + (f" ({row[key]!r})" if row[key].strip() else ""))
    return found


def shape(row: Row) -> ModelShape:
    try:
        return ModelShape.named(row["model"])
    except PlauditError:
        raise Unplannable(f"no shape known for {row['model']!r}") from None


def gpu_name(row: Row) -> str:
    text = row["gpu"]
    named = re.search(r"\(?(H20|H100|H200|H800|A100|A800|B200|GB200|GB300|B300|MI3\d\dX|L40S|910C)\)?", text)
    known = {"96GB-class (H20)", "96GB-class (H20) per script name", "H100 (paper; doc does not name it)"}
    if text in known or "class" in text:
        if named is None:
            raise Unplannable(f"no accelerator named ({text!r})")
        return named[1]
    return text


def machine(row: Row, devices: int | None = None) -> Cluster:
    count = devices or int(required(row, "n_gpus", "number of accelerators"))
    try:
        chip = accelerator(gpu_name(row))
        whole = count if count < 8 else count // 8 * 8
        return cluster(f"{whole}x{chip.name}") if whole % 8 == 0 else cluster(f"1x{whole}x{chip.name}")
    except PlauditError as error:
        raise Unplannable(str(error)) from None


def dtype(row: Row, model: ModelShape) -> str:
    found = {"nvfp4": "fp4", "": "bf16"}.get(row["dtype"], row["dtype"])
    # Published in four bits; what a chip cannot multiply in is unpacked.
    return "fp4" if model.name.startswith("gpt-oss") and row["architecture"].startswith("serving") else found


# Serving


def replica(row: Row, constants: Constants) -> Replica:
    model = shape(row)
    where = machine(row)
    dealt = re.search(r"\bDEP(\d+)", row["notes"]) or re.search(r"_tp1_ep(\d\d*)_", row["notes"])
    together = re.search(r"_tp(\d+)_ep(\d+)_", row["notes"])
    tp = int(number(row, "gen_tp") or 0)
    if dealt and int(dealt[1]) > 1:
        layout = GenerationLayout(1, 1, int(dealt[1]))
    elif together and int(together[2]) > 1:
        layout = GenerationLayout(int(together[1]), 1, int(together[2]))
    elif tp:
        layout = GenerationLayout(tp)
    else:
        raise Unplannable("no layout of the engine")
    kind = dtype(row, model)
    cache = "fp8" if kind in ("fp8", "fp4") and row["system"] == "TensorRT-LLM" else "bf16"
    return Replica(model, where, layout, kind, cache, constants)


def per_token(engine: Replica, sequences: float, prompt: float, response: float) -> float:
    """Between two tokens of a response, with the prefills of those that follow in between."""
    step = engine.step_seconds(sequences, prompt + response / 2)
    return step + sequences * engine.prefill_seconds(prompt) / response


def lengths_of(row: Row) -> tuple[float, float]:
    return required(row, "prompt_len", "mean prompt length"), required(row, "response_len", "mean response length")


def tpot(row: Row, constants: Constants) -> Answer:
    engine = replica(row, constants)
    prompt, response = lengths_of(row)
    seconds = per_token(engine, required(row, "batch", "concurrency"), prompt, response)
    target = ("TPOT, experts" if engine.model.experts else "TPOT, dense") if row["metric"] == "tpot" else ""
    return Answer(seconds * 1e3, float(row["value"]), target)


def first_token(row: Row, constants: Constants) -> Answer:
    engine = replica(row, constants)
    return Answer(engine.prefill_seconds(lengths_of(row)[0]) * 1e3, float(row["value"]), "")


def serving_rate(row: Row, constants: Constants) -> Answer:
    engine = replica(row, constants)
    prompt, response = lengths_of(row)
    room = engine.cluster.accelerator.memory * OWN_ENGINE_SHARE - engine.weight_bytes() - constants.graph_bytes
    most = bytes_of.concurrency(engine, room, prompt + response)
    if most < 1:
        raise Unplannable(
            f"{engine.model.name} does not fit in {engine.layout.devices} × {engine.cluster.accelerator.name}"
        )
    sequences = min(most, number(row, "batch") or SATURATED)
    rate = sequences / per_token(engine, sequences, prompt, response)
    each = row["unit"].endswith("/GPU")
    replicas = engine.cluster.devices // engine.layout.devices
    return Answer(rate / engine.layout.devices if each else rate * replicas, float(row["value"]), "")


# Training


def bridge(row: Row, constants: Constants) -> tuple[Trainer, float, float]:
    cut = re.search(r"\[FSDP,TP,PP,CP,VP,EP\]=([\d,\-]+)", row["notes"])
    size = re.search(r"MBS (\d+)", row["notes"])
    if not cut or not size:
        raise Unplannable("no training layout")
    fsdp, tp, pp, cp, vpp, ep = (int(part) if part.isdigit() else 1 for part in cut[1].split(","))
    where, model = machine(row), shape(row)
    length, batch = required(row, "response_len", "sequence length"), required(row, "batch", "batch")
    layout = TrainingLayout(
        tp, pp, where.devices // (tp * pp * cp), ep, cp, vpp, 3 if fsdp else 1, int(size[1]) * int(length)
    )
    return Trainer(model, where, layout, dtype(row, model), constants), batch, length


def train_rate(row: Row, constants: Constants) -> Answer:
    trainer, batch, length = bridge(row, constants)
    seconds = trainer.step(batch, length).value
    return Answer(batch * length / seconds / trainer.cluster.devices, float(row["value"]), "training")


def train_tflops(row: Row, constants: Constants) -> Answer:
    trainer, batch, length = bridge(row, constants)
    model = trainer.model
    flops = batch * length * (6 * model.active_parameters + 3 * model.attention_flops(length / 2))
    seconds = trainer.step(batch, length).value
    # The same runs as the throughput rows, said in other words: shown, not counted twice.
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
        tp, pp, where.devices // (tp * pp), vpp=INTERLEAVED.get(model.name, 1), micro_tokens=micro * int(length),
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
    tp, cp, ep, pp = int(parts[0]), int(parts[1]), int(parts[2]), int(parts[-2])
    vpp = int(parts[-1]) if parts[-1].isdigit() else 1
    # NeMo RL's recipes sum gradients in bf16 (grad_reduce_in_fp32: false).
    return TrainingLayout(tp, pp, devices // (tp * cp * pp), ep, cp, vpp, 1, int(length), gradient_bytes=2)


@lru_cache(maxsize=256)
def _searched(workload: Workload, plan: str, where: Cluster, engines: Cluster | None) -> Plan:
    """The layouts that the planner itself would take, with the constants as shipped: a source may name none."""
    staleness = 1
    found = Search(workload, where, placements=(plan,), generation_cluster=engines, staleness=staleness).run().plans
    if not found:
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
    most = float(longest[1].replace(",", "")) - prompt if longest else 2 * response
    gbs = re.search(r"GBS (\d+)", row["notes"])
    updates = max(1, batch // int(gbs[1])) if gbs else 4
    kind = dtype(row, model)
    algorithm = "ppo" if row["algorithm"] == "PPO" and "no critic" not in row["algorithm"] else "grpo"
    aligner = row["system"] == "NeMo-Aligner"
    small = ModelShape.named("opt-350m") if row["system"].startswith("DeepSpeed-Chat") else None
    # NeMo-Aligner's critic and reward run beside the actor on nodes of their own: the actor's side is the step.
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
        engines, where = where.part(int(split[1])), where.part(int(split[2]))
    elif overlapped:
        half = max(1, where.devices // 2)
        engines, where = where.part(half), where.part(half)
    layout = train_layout(row, where.devices, length)
    tp = number(row, "gen_tp")
    if layout is None or tp is None:
        return _searched(workload, placement, where, engines)
    generation = GenerationLayout(int(tp), int(number(row, "gen_pp") or 1))
    # NeMo RL packs tensors and gathers the next bucket while one is sent.
    plan = Plan(placement, where, engines or where, generation, layout, "pipeline" if engines else "ipc",
                int(ahead[1]) if ahead else 1 if overlapped else 0)  # fmt: skip
    # Sources seldom say whether they recompute: they do where the step would not fit otherwise.
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


# Weights


def channel_of(row: Row) -> str:
    said = f"{row['system']} {row['architecture']} {row['notes']}".lower()
    if "cpu serialize" in said or "cpu-serial" in said:
        return "host"
    if "before" in said or "checkpoint-engine=false" in said or "tensor by tensor" in said:
        return "tensors"
    if "mooncake" in said or "h2d" in said or row["system"].startswith("checkpoint-engine"):
        return "pipeline"
    if "reshard" in said or "xfer" in said or "nixl gpu rdma" in said or row["system"] == "NeMo RL checkpoint-engine":
        return "reshard"
    return "ipc" if "co-located" in said or "ipc" in said.split() else "broadcast"


def sync_seconds(row: Row) -> float:
    size = required(row, "params_b", "number of parameters")
    try:
        model, parameters = ModelShape.named(row["model"]), None
    except PlauditError:
        model, parameters = ModelShape.named("llama-3.1-8b"), size * 1e9
    try:
        chip = accelerator(gpu_name(row))
    except (PlauditError, Unplannable):
        chip = accelerator("H100")  # Of the chip a channel asks for the network alone, and 50 GB/s is the common one.
    fp8 = "fp8" in row["model"].lower()
    to = "fp8" if row["dtype"] == "fp8" or "mxfp8" in row["notes"].lower() else None
    if "ipc" in channel_of(row) or "co-located sync" in row["architecture"]:
        to = None  # Cast where they lie, in the pass that copies them.
    return transfer(find(channel_of(row)), model, chip, "fp8" if fp8 else "bf16", to, parameters).value


def weight_sync(row: Row, constants: Constants) -> Answer:
    return Answer(sync_seconds(row), float(row["value"]), "weight sync")


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
    layout = TrainingLayout(tp, pp, where.devices // (tp * pp), ep, recompute="full", offload_optimizer=offloaded)
    workload = Workload(model, "grpo", PROMPT, float(row["response_len"]), 0, 512)
    # The engine's cut is not said: the smallest that holds the weights.
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
    chip = replace(accelerator("A100-40G"), memory=float(size[1]) * 1e9)
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
    "tpot": tpot, "itl": tpot, "ttft": first_token, "generation_throughput": serving_rate,
    "train_throughput": train_rate, "train_model_tflops": train_tflops, "step_time": step_time, "throughput": step_rate,
    "generation_time": phase("generation"), "generate_sequences": phase("generation"),
    "train_time": phase("training", "training"),
    "old_logprob_time": one_score, "ref_logprob_time": one_score, "epoch_time": epoch_time,
    "weight_sync_time": weight_sync,
    "weight_sync_bandwidth": weight_rate, "refit_total_time": refit_total, "gpu_memory": verl_memory,
    "cpu_memory": verl_memory, "max_model_size_fits": largest_fitting, "memory_params_optimizer": megatron_memory,
    "memory_activation_no_recompute": megatron_memory, "memory_activation_seqpar_selective": megatron_memory,
}  # fmt: skip


def answer(row: Row, constants: Constants) -> Answer:
    """The prediction of a row. Raises Unplannable with the reason."""
    planner = PLANNERS.get(row["metric"])
    if planner is None:
        raise Unplannable(f"the planner says nothing about {row['metric']!r}")
    try:
        return planner(row, constants)
    except PlauditError as error:
        raise Unplannable(str(error)) from None
