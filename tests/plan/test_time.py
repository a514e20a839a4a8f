"""Seconds computed by hand from the formulas of the reference."""

import math
from dataclasses import replace

import pytest

from plaudit.plan import Constants, GenerationLayout, ModelShape, TrainingLayout, cluster, predict
from plaudit.plan.cost.channel import find, transfer
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.links import Links
from plaudit.plan.cost.training import Trainer
from plaudit.plan.shape.hardware import accelerator
from plaudit.plan.shape.lengths import Lengths

FIXED = Constants()
LLAMA = ModelShape.named("llama-3.1-8b")


def replica(name: str = "llama-3.1-8b", hardware: str = "1x8xH100", tp: int = 1, **more: int) -> Replica:
    return Replica(ModelShape.named(name), cluster(hardware), GenerationLayout(tp, **more), "bf16", "bf16", FIXED)


def test_a_step_of_one_sequence_reads_all_weights_once() -> None:
    parts = replica().step_parts(1, 1000)
    bandwidth = 3350e9 * FIXED.bandwidth_share
    assert parts["dense weights"] == pytest.approx(2 * LLAMA.active_parameters / bandwidth)
    assert parts["cache"] == pytest.approx(131_072 * 1000 / bandwidth)
    assert parts["layers"] == pytest.approx(32 * FIXED.layer_seconds)


def test_a_large_batch_is_compute_bound() -> None:
    parts = replica().step_parts(4096, 1)
    assert parts["dense weights"] == pytest.approx(2 * LLAMA.active_parameters * 4096 / (989e12 * FIXED.gemm_share))


def test_fp32_takes_twice_as_long_to_move() -> None:
    wide, narrow = (Replica(LLAMA, cluster("1x8xH100"), GenerationLayout(1), t, t, FIXED) for t in ("fp32", "bf16"))
    for part in ("dense weights", "cache", "activations"):
        assert wide.step_parts(1, 1000)[part] == pytest.approx(2 * narrow.step_parts(1, 1000)[part])
    traffic = {}
    for dtype in ("fp32", "bf16", "fp8"):
        step = Trainer(LLAMA, cluster("1x8xH100"), TrainingLayout(), dtype, FIXED).step(8, 1000)
        traffic[dtype] = next(part.value for part in step.parts if part.name == "traffic")
    # The logits take the same time: they have four bytes for every weight dtype.
    logits = 3 * 8000 * LLAMA.vocab * 8 * FIXED.activation_passes / (3350e9 * FIXED.bandwidth_share)
    assert traffic["fp32"] - logits == pytest.approx(2 * (traffic["bf16"] - logits))
    assert traffic["fp8"] == traffic["bf16"]


def test_a_gathered_cache_is_moved_three_times() -> None:
    gathered = Replica(LLAMA, cluster("1x8xH100"), GenerationLayout(1), "bf16", "bf16", Constants(cache_passes=3.0))
    assert gathered.step_parts(4, 1000)["cache"] == pytest.approx(3 * replica().step_parts(4, 1000)["cache"])


def test_the_number_of_active_experts_grows_with_the_batch() -> None:
    few, many = (replica("qwen3-30b-a3b").step_parts(n, 1)["experts"] for n in (1, 100_000))
    one = 48 * 8 * 3 * 2048 * 768 * 2 / (3350e9 * FIXED.bandwidth_share)
    assert few == pytest.approx(one)
    assert many > 15 * few


def test_wide_expert_parallelism_overlaps_its_exchange_and_has_host_time_per_device() -> None:
    """LMSYS published 2785 tokens/s per GPU for DeepSeek-V3 on 72 H100, experts over all, 256 sequences per GPU."""
    model, constants = ModelShape.named("deepseek-v3"), Constants()
    wide = Replica(model, cluster("8x8xH100"), GenerationLayout(1, 1, 64), "fp8", "bf16", constants)
    parts = wide.step_parts(256 * 64, 2050)
    assert parts["step"] == pytest.approx(constants.step_seconds + 256 * 8 * constants.sequence_seconds)
    alone = wide._exchange(256 * 64)
    rest = sum(parts.values()) - parts["communication"]
    assert parts["communication"] == pytest.approx(
        alone - rest
    )  # the exchange takes longer, and the rest overlaps with it
    assert 256 / sum(parts.values()) == pytest.approx(2785, rel=0.3)
    assert wide.step_parts(64, 2050)["communication"] == wide._exchange(64)  # a small batch is not split in two


def test_collectives_by_hand() -> None:
    inside = Links.of(cluster("1x8xH100"), 8, FIXED)
    assert inside.all_reduce(1e9) == pytest.approx(2 * 1e9 * 7 / 8 / (450e9 * FIXED.bulk_link_share))
    across = Links.of(cluster("2x8xH100"), 16, FIXED)
    out = 1e9 / 8 / 2 / (50e9 * FIXED.bulk_link_share) + FIXED.hop_seconds
    assert across.all_gather(1e9) == pytest.approx(inside.all_gather(1e9) + out)
    assert Links.of(cluster("1x8xH100"), 1, FIXED).all_reduce(1e9) == 0


def test_a_training_step_takes_six_flops_per_parameter_and_token() -> None:
    one = Trainer(LLAMA, cluster("1x8xH100"), TrainingLayout(dp=8), "bf16", FIXED).step(64, 4096)
    products = next(part for part in one.parts if part.name == "products")
    assert products.value == pytest.approx(6 * LLAMA.active_parameters * 64 * 4096 / 8 / (989e12 * FIXED.gemm_share))


def test_plaudits_trainer_computes_logits_twice_and_sums_head_gradients_in_chunks() -> None:
    layout = TrainingLayout(zero=0, plain=True, micro_tokens=8192)
    own = Trainer(LLAMA, cluster("1x1xH100"), layout, "bf16", FIXED)
    parts = {part.name: part.value for part in own.step(16, 1024).parts}
    chip, head = own.cluster.accelerator, 128256 * 4096
    products = 2 * 16 * 1024 * head / (chip.bf16 * FIXED.gemm_share)
    stretches = 2 * 63  # two micro-batches of 8192 tokens in chunks of 130
    summed = stretches * head * 12 / (chip.bandwidth * FIXED.bandwidth_share)
    assert parts["head again"] == pytest.approx(products + summed)
    fused = Trainer(LLAMA, own.cluster, TrainingLayout(zero=0, micro_tokens=8192), "bf16", FIXED)
    assert "head again" not in {part.name for part in fused.step(16, 1024).parts}


def test_context_parallelism_passes_keys_and_values_in_a_ring() -> None:
    """Over the network: 32 layers, 8,192 tokens of all devices, 2 · 8 · 128 numbers of two bytes; backward sends twice.
    Half of every sequence comes from the other device, and attention hides part of the transfer."""
    far = replace(cluster("2x1xH100"), host_memory=1e12)
    cut = TrainingLayout(cp=2, micro_tokens=8192)
    step = Trainer(LLAMA, far, cut, "bf16", FIXED).step(1, 8192)
    (exposed,) = (part for part in step.parts if part.name == "context parallel")
    (attention,) = (part for part in step.parts if part.name == "attention")
    passed = 3 * 32 * (8192 * 2 * 8 * 128 * 2 / 2 / (50e9 * FIXED.bulk_link_share) + FIXED.hop_seconds)
    assert exposed.value == pytest.approx(passed - attention.value)


def test_plaudits_context_parallelism_exchanges_tokens_for_heads() -> None:
    """32 layers and 4,096 tokens per device: queries and outputs of 32 heads, keys and values of 8, two bytes each;
    half of them stays local, and backward sends as much. With 16 devices every key-value head exists twice."""
    near = cluster("1x2xH100")
    cut = TrainingLayout(cp=2, zero=3, micro_tokens=8192, plain=True)
    step = Trainer(LLAMA, near, cut, "bf16", FIXED).step(1, 8192)
    (exchange,) = (part for part in step.parts if part.name == "context exchange")
    speed = near.accelerator.scale_up * FIXED.bulk_link_share
    assert exchange.value == pytest.approx(2 * 32 * 4096 * (2 * 32 + 2 * 8) * 128 * 2 / 2 / speed)
    assert Trainer(LLAMA, near, replace(cut, cp=16), "bf16", FIXED).key_copies == 2


def test_decode_time_is_split_into_parts() -> None:
    prediction = predict("llama-3.1-8b", "1x8xH100", "hybrid")
    (decode,) = (part for part in prediction.phase("generation").seconds.parts if part.name == "decode")
    assert {"dense weights", "cache", "layers", "step"} <= {part.name for part in decode.parts}
    assert sum(part.value for part in decode.parts) == pytest.approx(decode.value)


def test_recomputing_costs_a_forward_pass() -> None:
    def products(recompute: str) -> float:
        layout = TrainingLayout(dp=8, recompute=recompute)
        step = Trainer(LLAMA, cluster("1x8xH100"), layout, "bf16", FIXED).step(64, 4096)
        return next(part.value for part in step.parts if part.name == "products")

    assert products("full") == pytest.approx(products("none") * 4 / 3)


def test_sampled_lengths_keep_their_mean_and_limit() -> None:
    for mean, longest in ((1019, 3970), (3251, 3992), (100, 100_000)):
        drawn = Lengths(mean, longest, 0.8).quantiles(4000, 4000)
        assert math.fsum(drawn) / 4000 == pytest.approx(mean, rel=0.02)
        assert max(drawn) <= longest
        assert drawn == sorted(drawn)


def test_transfer_time_of_140_gigabytes_of_weights() -> None:
    model, chip = ModelShape.named("llama-3.1-70b"), accelerator("H100")
    assert transfer(find("broadcast"), model, chip).value == pytest.approx(0.5 + 723 * 1e-4 + 141.1e9 / 15e9, rel=0.01)
    assert transfer(find("reshard"), model, chip).value < 10 < transfer(find("disk"), model, chip).value
    assert transfer(find("shared"), model, chip).value == 0


def test_weights_are_cast_by_every_device_that_has_them() -> None:
    """Kimi-K2 from bf16 on 256 H200 to fp8 on 128: the published time is 1.3 s, with a link per device."""
    options = {"training": TrainingLayout(pp=16, dp=16, ep=16), "generation": GenerationLayout(16), "batch": 256}
    sent = {
        channel: predict("kimi-k2", "32x8xH200", "async", generation_hardware="16x8xH200", generation_dtype="fp8",
                         channel=channel, **options).phase("weights").seconds
        for channel in ("rdma", "reshard", "broadcast")
    }  # fmt: skip
    cast = {name: next(part.value for part in term.parts if part.name == "cast") for name, term in sent.items()}
    assert cast["rdma"] == cast["reshard"] == pytest.approx(cast["broadcast"] / 256)
    assert 0.65 < sent["rdma"].value < 2.6
    assert sent["reshard"].value < 15


def test_fp8_rollouts_shorten_a_step() -> None:
    options = {"training": TrainingLayout(pp=16, dp=16, ep=16), "generation": GenerationLayout(16), "batch": 512}
    plain, narrow = (
        predict(
            "deepseek-v3",
            "32x8xH100",
            "disaggregated",
            generation_hardware="32x8xH100",
            generation_dtype=kind,
            **options,
        )
        for kind in ("bf16", "fp8")
    )
    assert narrow.step.value < plain.step.value
