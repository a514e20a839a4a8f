"""Memory against the tables of Korthikanti et al. (arXiv 2205.05198) and against sums by hand."""

from dataclasses import replace

import pytest

from plaudit.plan import Constants, GenerationLayout, ModelShape, TrainingLayout, Workload, cluster, memory, predict
from plaudit.plan.decode import Replica
from plaudit.plan.training import Trainer

GIB = 2**30
# model: tp, pp, vpp, micro-batch, then GiB of states, of activations without recomputation, with sequence parallelism
# and selective recomputation
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
def test_states_and_activations_are_those_of_the_paper(name: str) -> None:
    *_, states, plain, selective = PAPER[name]
    whole = trainer(name, "none")
    held = memory.weights(whole).value + memory.gradients(whole).value + memory.optimizer(whole).value
    assert held / GIB == pytest.approx(states, rel=0.02)
    found = memory.activations(whole, 2048, fused=False, sequence_parallel=False).value
    assert found / GIB == pytest.approx(plain, rel=0.001)
    lean = memory.activations(trainer(name, "selective"), 2048, fused=False).value
    assert lean / GIB == pytest.approx(selective, rel=0.001)


def test_zero_cuts_what_it_says() -> None:
    model, where = ModelShape.named("llama-3.1-8b"), cluster("1x8xH100")
    held = []
    for zero in range(4):
        one = Trainer(model, where, TrainingLayout(dp=8, zero=zero), "bf16", Constants())
        parts = (memory.weights(one).value, memory.gradients(one).value, memory.optimizer(one).value)
        held.append([round(part / model.parameters, 2) for part in parts])
    assert held[0] == [2.0, 4.0, 12.0]
    assert held[1] == [2.0, 4.0, 1.5]
    assert held[2] == [2.0, 0.5, 1.5]
    assert held[3][0] == pytest.approx(2 / 8 + 2 * 2 / 32, abs=0.01)  # and two gathered layers


def test_the_cache_of_one_sequence_by_hand() -> None:
    replica = Replica(
        ModelShape.named("llama-3.1-70b"), cluster("1x8xH100"), GenerationLayout(8), "bf16", "bf16", Constants()
    )
    assert memory.sequence_bytes(replica, 1000) == 327_680 * 1000 / 8
    assert memory.concurrency(replica, 327_680 * 1000, 1000) == 8


def test_offloading_moves_bytes_to_the_host() -> None:
    cut = TrainingLayout(tp=8, dp=8)
    here = predict("llama-3.1-70b", "8x8xH100", "hybrid", generation=GenerationLayout(8), training=cut)
    there = predict("llama-3.1-70b", "8x8xH100", "swapped", generation=GenerationLayout(8), training=cut)
    assert here.host.value == 0
    assert there.host.value > 0
    assert there.phase("generation").memory.value < here.phase("generation").memory.value


def test_our_own_trainer_packs_prompts_once_and_takes_no_log_probabilities_for_a_single_update() -> None:
    work = Workload(
        ModelShape.named("llama-3.2-1b"), "grpo", 128, 256, 0, 256, 8, reference=False, plain=True, micro_tokens=8192,
        cache_bytes=4e9,
    )  # fmt: skip
    assert work.trained_length == 128 / 8 + 256
    found = predict(work, "1x1xH200", "colocated", training=TrainingLayout(zero=0, plain=True, micro_tokens=8192))
    assert [part.name for part in found.phase("scoring").seconds.parts] == ["bookkeeping"]
    trained = {part.name: part.value for part in found.phase("training").memory.parts}
    assert trained["cache"] == 4e9
    assert trained["optimizer"] == pytest.approx(12 * work.model.parameters)
    several = replace(work, updates=4)
    assert several.trained_length == 384
    assert several.takes_old


def test_activations_are_what_a_pass_on_the_cpu_keeps() -> None:
    import torch

    from plaudit.core.packing import use_packed_attention
    from plaudit.heap import HIDDEN, LAYERS, mixed_samples, one_pass
    from plaudit.models import new_llama
    from plaudit.train.forward import pack_responses

    torch.set_num_threads(1)
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "layers": LAYERS, "heads": 4, "kv_heads": 2}
    module = new_llama("policy", **sizes, intermediate_size=3 * HIDDEN, max_positions=128, seed=1).train()
    use_packed_attention(module)
    samples = mixed_samples(320)
    tokens = pack_responses(samples, torch.device("cpu")).packed.input_ids.numel()
    whole = sum(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    model = ModelShape(64, HIDDEN, LAYERS, 4, 2, HIDDEN // 4, 3 * HIDDEN, True)
    length = tokens / len(samples)
    layout = TrainingLayout(zero=0, plain=True, micro_tokens=tokens)
    own = Trainer(model, cluster("1x1xH100"), layout, "fp32", Constants(), whole / tokens)
    planned = memory.activations(own, length).value + memory.workspace(own, length).value
    assert planned == pytest.approx(one_pass(module, samples), rel=0.04)


def test_what_malloc_keeps_in_pieces_is_told_by_itself() -> None:
    work = Workload(ModelShape.named("llama-3.2-1b"), plain=True, batch=64, micro_tokens=8192, dtype="fp32")
    cut = TrainingLayout(zero=0, plain=True, micro_tokens=8192)
    held = {}
    for factor in (1.0, 1.4):
        found = predict(work, "1x1xH200", "colocated", training=cut, constants=Constants(heap_factor=factor))
        held[factor] = {part.name: part.value for part in found.phase("training").memory.parts}
    assert "holes" not in held[1.0]
    comes_and_goes = sum(held[1.4][name] for name in ("activations", "workspace", "logits"))
    assert held[1.4]["holes"] == pytest.approx(0.4 * comes_and_goes)
