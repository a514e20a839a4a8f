"""Memory against the tables of Korthikanti et al. (arXiv 2205.05198) and against hand-computed sums."""

from dataclasses import replace

import pytest

from plaudit.errors import ConfigError
from plaudit.plan import Constants, GenerationLayout, ModelShape, TrainingLayout, Workload, cluster, predict
from plaudit.plan.cost import memory
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.parts import Parts
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.training import Trainer
from plaudit.plan.options import PlanOptions
from plaudit.plan.question import ask
from plaudit.plan.search import Search

GIB = 2**30
# model: tp, pp, vpp, micro-batch, then GiB of states, of activations without recomputation, and of activations with
# sequence parallelism and selective recomputation
PAPER = {
    "megatron-22b": (8, 1, 1, 4, 45.5625, 59.25, 9.5625),
    "gpt3-175b": (8, 8, 3, 1, 45.5625, 66.84375, 12.3515625),
    "turing-530b": (8, 35, 3, 1, 31.640625, 114.0234375, 23.076171875),
    "megatron-1t": (8, 64, 1, 1, 32.958984375, 131.25, 26.5625),
}


def trainer(name: str, recompute: str) -> Trainer:
    tp, pp, vpp, micro, *_ = PAPER[name]
    layout = TrainingLayout(tp, pp, 1, 1, 1, vpp, 1, micro * 2048, recompute=recompute)
    return Trainer(ModelShape.named(name), cluster(f"{pp}x8xA100"), layout, "bf16", Constants())


@pytest.mark.parametrize("name", PAPER)
def test_states_and_activations_match_the_paper(name: str) -> None:
    *_, states, plain, selective = PAPER[name]
    full = trainer(name, "none")
    states_bytes = memory.weights(full).value + memory.gradients(full).value + memory.optimizer(full).value
    assert states_bytes / GIB == pytest.approx(states, rel=0.02)
    activations = memory.activations(full, 2048, fused=False, sequence_parallel=False).value
    assert activations / GIB == pytest.approx(plain, rel=0.001)
    lean = memory.activations(trainer(name, "selective"), 2048, fused=False).value
    assert lean / GIB == pytest.approx(selective, rel=0.001)


def test_zero_stages_shard_optimizer_gradients_and_weights() -> None:
    model, where = ModelShape.named("llama-3.1-8b"), cluster("1x8xH100")
    bytes_per_parameter = []
    for zero in range(4):
        one = Trainer(model, where, TrainingLayout(dp=8, zero=zero), "bf16", Constants())
        parts = (memory.weights(one).value, memory.gradients(one).value, memory.optimizer(one).value)
        bytes_per_parameter.append([round(part / model.parameters, 2) for part in parts])
    assert bytes_per_parameter[0] == [2.0, 4.0, 12.0]
    assert bytes_per_parameter[1] == [2.0, 4.0, 1.5]
    assert bytes_per_parameter[2] == [2.0, 0.5, 1.5]
    assert bytes_per_parameter[3][0] == pytest.approx(2 / 8 + 2 * 2 / 32, abs=0.01)  # and two gathered layers


def test_a_device_gathers_only_its_own_experts() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts of 3 x 2048 x 768 numbers, 29.0 B, and 1.54 B others. Each of 8 devices
    stores an eighth of all; of two gathered layers it also has the others and a quarter of the experts."""
    model = ModelShape.named("qwen3-30b-a3b")
    experts = 48 * 128 * 3 * 2048 * 768
    others = model.parameters - experts
    one = Trainer(model, cluster("1x8xH100"), TrainingLayout(dp=8, ep=4, zero=3), "bf16", Constants())
    assert memory.weights(one).value == pytest.approx(2 * (model.parameters / 8 + 2 / 48 * (others + experts / 4)))
    assert memory.optimizer(one).value == pytest.approx(12 * model.parameters / 8)


def test_pipeline_stages_of_plaudits_trainer_by_hand() -> None:
    """Llama 3.1 8B in two stages of 16 layers, untied: each stage has one table of 128,256 × 4,096. The first keeps
    two micro-batches and has no logits; with a batch of one micro-batch it keeps one."""
    model, table = ModelShape.named("llama-3.1-8b"), 128256 * 4096
    cut = TrainingLayout(pp=2, zero=3, plain=True, micro_tokens=4096)
    unstaged = Trainer(model, cluster("1x2xH100"), replace(cut, pp=1), "bf16", Constants())
    first, last = (Trainer(model, cluster("1x2xH100"), cut, "bf16", Constants(), stage=stage) for stage in (0, 1))
    half = (model.parameters - 2 * table) / 2
    assert first.parameters_here() == last.parameters_here() == pytest.approx(half + table)
    per_layer = memory.activation_bytes_per_token(first, 1024)
    assert memory.activations(first, 1024).value == pytest.approx(4096 * 2 * 16 * per_layer)
    assert memory.activations(replace(first, most_tokens=4096), 1024).value == pytest.approx(4096 * 16 * per_layer)
    assert 4096 * 16 * per_layer < memory.activations(last, 1024).value < 4096 * 17 * per_layer
    assert memory.logits(first, 1024).value == 0
    assert memory.logits(last, 1024).value == memory.logits(unstaged, 1024).value
    uneven = Trainer(replace(model, layers=33), cluster("1x2xH100"), cut, "bf16", Constants())
    assert [replace(uneven, stage=stage).layers_here for stage in (0, 1)] == [17, 16]


def test_the_cache_of_one_sequence_by_hand() -> None:
    replica = Replica(
        ModelShape.named("llama-3.1-70b"), cluster("1x8xH100"), GenerationLayout(8), "bf16", "bf16", Constants()
    )
    assert memory.sequence_bytes(replica, 1000) == 327_680 * 1000 / 8
    assert memory.concurrency(replica, 327_680 * 1000, 1000) == 8


def test_offloading_moves_bytes_to_the_host() -> None:
    cut = TrainingLayout(tp=8, dp=8)
    hybrid = predict("llama-3.1-70b", "8x8xH100", "hybrid", generation=GenerationLayout(8), training=cut)
    swapped = predict("llama-3.1-70b", "8x8xH100", "swapped", generation=GenerationLayout(8), training=cut)
    assert hybrid.host.value == 0
    assert swapped.host.value > 0
    assert swapped.phase("generation").memory.value < hybrid.phase("generation").memory.value


def test_ppo_offloads_both_optimizers_and_the_reference() -> None:
    """70.55 B parameters, 12 bytes each for policy and critic, the reference's 2 bytes with two gathered layers on each
    of 8 devices, times 1.5 for pinned copies: 2.8 TB, and a node of eight H200 has 2.0."""
    cut = TrainingLayout(dp=8, zero=3, recompute="full", park=True, offload_optimizer=True)
    prediction = predict(
        "llama-3.1-70b", "1x8xH200", "hybrid", generation=GenerationLayout(4), training=cut, algorithm="ppo"
    )
    gigabytes = {part.name: part.value / 1e9 for part in prediction.host.parts}
    assert gigabytes["optimizer"] == pytest.approx(1.5 * 12 * 70.55, rel=1e-3)
    assert gigabytes["critic optimizer"] == pytest.approx(1.5 * 12 * 70.55, rel=1e-3)
    assert gigabytes["reference"] == pytest.approx(1.5 * 2 * 70.55 * (1 + 8 * 2 / 80), rel=1e-3)
    assert prediction.host.value / 1e9 == pytest.approx(2794, abs=1)
    assert [shortage.what for shortage in prediction.shortages] == ["host memory, per node"]
    with pytest.raises(ConfigError, match="fits on 1x8xH200 SXM in no plan"):
        ask(PlanOptions("llama-3.1-70b", "1x8xH200", algorithm="ppo")).answer()


def test_a_colocated_cache_uses_the_memory_that_training_leaves() -> None:
    """GB of a device in training, 7.616 B parameters over 8 ranks: three models of 2 bytes with two of 28 layers
    gathered, two optimizers of 12 bytes, gradients of 4; the engine's half of the weights, graphs 1.0, reserve 3.9; for
    4,096 tokens, 28 inputs of 3,584 numbers, one layer, its gradients, and ten bytes for each of 152,064 logits."""
    cut = TrainingLayout(dp=8, zero=3, recompute="full")
    prediction = predict(
        "qwen2.5-7b", "1x8xH100", "colocated", generation=GenerationLayout(2), training=cut, algorithm="ppo", batch=4096
    )
    billions, tokens, layer = 7.6156, 4096 / 1e9, 165_888
    models = 3 * 2 * billions * (1 / 8 + 2 / 28) + 2 * 12 * billions / 8 + 4 * billions / 8
    peak = tokens * (2 * 3584 * 28 + 2 * layer + 10 * 152_064)
    left = 81_559 * 2**20 / 1e9 - (models + 2 * billions / 2 + 1.0 + 3.9 + peak)
    cache = {phase.name: next(p for p in phase.memory.parts if p.name == "cache") for phase in prediction.phases}
    for phase in ("generation", "scoring", "training"):
        assert cache[phase].value / 1e9 == pytest.approx(left, abs=0.02)
    assert prediction.phase("training").memory.value == pytest.approx(81_559 * 2**20, abs=1)
    assert prediction.fits


COLOCATED = (
    # model, algorithm, generation tp, training
    ("qwen2.5-7b", "ppo", 2, TrainingLayout(dp=8, zero=3)),
    ("qwen2.5-14b", "grpo", 4, TrainingLayout(tp=2, dp=4, zero=3)),
    ("qwen2.5-32b", "ppo", 4, TrainingLayout(dp=8, zero=3, recompute="full", park=True, offload_optimizer=True)),
    ("llama-3.1-70b", "grpo", 8, TrainingLayout(tp=8, recompute="full", park=True, offload_optimizer=True)),
    ("qwen3-30b-a3b", "grpo", 1, TrainingLayout(dp=8, zero=3, recompute="full")),
)


@pytest.mark.parametrize("placement", ["colocated", "hybrid", "swapped"])
@pytest.mark.parametrize(("model", "algorithm", "tp", "training"), COLOCATED, ids=[case[0] for case in COLOCATED])
def test_a_larger_device_never_makes_a_plan_infeasible(
    placement: str, model: str, algorithm: str, tp: int, training: TrainingLayout
) -> None:
    """The needed memory does not depend on the device; a plan that fits also fits on larger ones, with more cache."""
    here = replace(cluster("1x8xH100"), host_memory=1e15)
    needed, sequences, fitted = set(), 0.0, False
    for gigabytes in range(16, 400, 16):
        place = replace(here, accelerator=replace(here.accelerator, memory=gigabytes * 1e9))
        plan = Plan(placement, place, place, GenerationLayout(tp), training, "ipc")
        capacity = Parts(Workload(ModelShape.named(model), algorithm), plan, Constants()).capacity()
        assert capacity.sequences >= sequences
        assert not (fitted and capacity.shortages), f"{gigabytes} GB: {capacity.shortages[0]}"
        sequences, fitted = capacity.sequences, not capacity.shortages
        needed |= {round(s.needed) for s in capacity.shortages if s.what == "training, per device"}
    assert fitted
    assert len(needed) <= 1, needed


@pytest.mark.parametrize(("model", "algorithm"), [("qwen2.5-7b", "ppo"), ("qwen2.5-14b", "grpo"),
                                                  ("qwen2.5-32b", "ppo"), ("llama-3.1-70b", "grpo")])  # fmt: skip
def test_models_that_fit_colocated_on_eight_devices_fit_on_larger_ones(model: str, algorithm: str) -> None:
    """Even if a larger device could train without recomputation, which would leave no memory for the engine."""
    for gigabytes in (80, 96, 141, 192):
        place = cluster("1x8xH100")
        place = replace(place, accelerator=replace(place.accelerator, memory=gigabytes * 1e9))
        result = Search(Workload(ModelShape.named(model), algorithm), place, placements=("colocated",)).run()
        assert result.plans, f"{gigabytes} GB: {result.rejected[0].reason}"


def test_plaudits_trainer_packs_prompts_once_and_skips_old_logprobs_for_one_update() -> None:
    work = Workload(
        ModelShape.named("llama-3.2-1b"), "grpo", 128, 256, 0, 256, 8, reference=False, plain=True, micro_tokens=8192,
        cache_bytes=4e9,
    )  # fmt: skip
    assert work.trained_length == 128 / 8 + 256
    prediction = predict(work, "1x1xH200", "colocated", training=TrainingLayout(zero=0, plain=True, micro_tokens=8192))
    assert [part.name for part in prediction.phase("scoring").seconds.parts] == ["bookkeeping"]
    trained = {part.name: part.value for part in prediction.phase("training").memory.parts}
    assert trained["cache"] == 4e9
    assert trained["optimizer"] == pytest.approx(12 * work.model.parameters)
    several = replace(work, updates=4)
    assert several.trained_length == 384
    assert several.takes_old


def test_planned_attention_constants_equal_the_cores() -> None:
    from plaudit.core.model import attention

    assert (memory.LEAST_KEYS, memory.SCORES) == (attention.LEAST_KEYS, attention.SCORES)


def test_planned_activations_match_a_cpu_pass() -> None:
    import torch

    from plaudit.core.model.packing import use_packed_attention
    from plaudit.heap import HIDDEN, LAYERS, mixed_samples, one_pass
    from plaudit.models import new_llama
    from plaudit.train.policy.forward import pack_responses

    torch.set_num_threads(1)
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "layers": LAYERS, "heads": 4, "kv_heads": 2}
    module = new_llama("policy", **sizes, intermediate_size=3 * HIDDEN, max_positions=128, seed=1).train()
    use_packed_attention(module)
    samples = mixed_samples(320)
    tokens = pack_responses(samples, torch.device("cpu")).packed.input_ids.numel()
    sample_tokens = sum(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    model = ModelShape(64, HIDDEN, LAYERS, 4, 2, HIDDEN // 4, 3 * HIDDEN, True)
    length = tokens / len(samples)
    layout = TrainingLayout(zero=0, plain=True, micro_tokens=tokens)
    own = Trainer(model, cluster("1x1xH100"), layout, "fp32", Constants(), sample_tokens / tokens)
    planned = memory.activations(own, length).value + memory.workspace(own, length).value
    assert planned == pytest.approx(one_pass(module, samples), rel=0.04)


def test_malloc_fragmentation_is_listed_separately() -> None:
    work = Workload(ModelShape.named("llama-3.2-1b"), plain=True, batch=64, micro_tokens=8192, dtype="fp32")
    cut = TrainingLayout(zero=0, plain=True, micro_tokens=8192)
    by_part = {}
    for factor in (1.0, 1.4):
        prediction = predict(work, "1x1xH200", "colocated", training=cut, constants=Constants(heap_factor=factor))
        by_part[factor] = {part.name: part.value for part in prediction.phase("training").memory.parts}
    assert "holes" not in by_part[1.0]
    transient = sum(by_part[1.4][name] for name in ("activations", "workspace", "logits"))
    assert by_part[1.4]["holes"] == pytest.approx(0.4 * transient)


@pytest.mark.parametrize("placement", ["colocated", "swapped"])
def test_the_process_reward_model_of_a_search_needs_memory_and_time(placement: str) -> None:
    """A model of 1.24 billion parameters in bf16: 2 bytes each, and 2 · 16 layers · 8 heads · 64 numbers of KV a token,
    for 8 responses of 30 tokens. A swapped run has it in memory only for generation."""
    model = ModelShape.named("llama-3.2-1b")
    plain = Workload(model, "grpo", prompt=10, response=20, batch=8)
    place = cluster("1x1xH100")
    plan = Plan(placement, place, place, GenerationLayout(1), TrainingLayout(1, 1, 1, 1, plain=True), "ipc")
    without, with_process_model = (Parts(work, plan, Constants()) for work in (plain, replace(plain, process=model)))
    engine_bytes = {term.name: term.value for term in with_process_model.engine_memory()[1].parts}
    assert engine_bytes["process model"] == pytest.approx(2 * model.parameters)
    assert engine_bytes["process model's cache"] == pytest.approx(8 * 30 * 2 * 2 * 16 * 8 * 64)
    more = with_process_model.training_memory(0.0).value - without.training_memory(0.0).value
    kept = engine_bytes["process model"] + engine_bytes["process model's cache"]
    assert more == pytest.approx(0 if placement == "swapped" else kept)
    assert "process model" in {term.name for term in with_process_model.scores()}
