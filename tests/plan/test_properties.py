"""Property tests over models, clusters and layouts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.errors import ConfigError
from plaudit.plan import Constants, GenerationLayout, ModelShape, Plan, TrainingLayout, Workload, cluster
from plaudit.plan.cost import memory
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.prediction import predict_plan
from plaudit.plan.cost.simulation import overlap
from plaudit.plan.cost.term import Term, total
from plaudit.plan.cost.training import Trainer
from plaudit.plan.search import Search, training_layouts
from plaudit.plan.shape.hardware import Cluster

models = st.sampled_from(
    ["llama-3.1-8b", "qwen3-30b-a3b", "qwen2.5-7b", "deepseek-v2-lite", "gpt-oss-20b", "llama-3.1-70b"]
)
chips = st.sampled_from(["A100", "H100", "H200", "B200", "MI300X", "L40S", "GB200"])
powers = st.sampled_from([1, 2, 4, 8])
placements = st.sampled_from(["colocated", "swapped", "hybrid", "disaggregated", "async"])
FIXED = Constants()


@st.composite
def plans(draw: st.DrawFn) -> tuple[Workload, Plan]:
    model = ModelShape.named(draw(models))
    where = cluster(f"{draw(st.sampled_from([1, 2, 4]))}x8x{draw(chips)}")
    tp, pp = draw(powers), draw(st.sampled_from([1, 2]))
    gen = draw(powers)
    tp, gen = (size if model.heads % size == 0 else 1 for size in (tp, gen))
    zero = 1 if pp > 1 else draw(st.sampled_from([0, 1, 2, 3]))
    if where.devices % (tp * pp):
        pp = 1
    dp = where.devices // (tp * pp)
    ep = draw(st.sampled_from([1, 2, 4])) if model.experts else 1
    ep = ep if (tp * dp) % ep == 0 else 1
    training = TrainingLayout(tp, pp, dp, ep, 1, 1, zero, 4096, draw(st.sampled_from(["none", "full"])))
    work = Workload(
        model, draw(st.sampled_from(["ppo", "grpo"])), draw(st.integers(1, 2000)), draw(st.integers(10, 2000)), 0,
        draw(st.integers(1, 3000)), updates=draw(st.integers(1, 4)),
    )  # fmt: skip
    placement = draw(placements)
    plan = Plan(placement, where, where, GenerationLayout(gen), training, "ipc" if placement != "async" else "reshard",
                draw(st.integers(0, 3)) if placement == "async" else 0)  # fmt: skip
    return work, plan


def on(plan: Plan, **changes: float) -> Plan:
    def better(place: Cluster) -> Cluster:
        chip = replace(place.accelerator, **{k: getattr(place.accelerator, k) * v for k, v in changes.items()})
        return replace(place, accelerator=chip)

    return replace(plan, cluster=better(plan.cluster), generation_cluster=better(plan.generation_cluster))


@settings(max_examples=40, deadline=None)
@given(plans(), st.floats(1.01, 4))
def test_more_memory_never_makes_a_plan_infeasible(case: tuple[Workload, Plan], factor: float) -> None:
    work, plan = case
    if predict_plan(work, plan, FIXED, simulate=False).fits:
        assert predict_plan(work, on(plan, memory=factor), FIXED, simulate=False).fits


@settings(max_examples=40, deadline=None)
@given(plans(), st.floats(1.01, 4), st.sampled_from(["bandwidth", "scale_up", "scale_out", "pcie", "bf16"]))
def test_a_faster_component_never_makes_a_step_slower(case: tuple[Workload, Plan], factor: float, part: str) -> None:
    work, plan = case
    if plan.placement == "async":  # its simulation has its own test below, with a tolerance
        plan = replace(plan, placement="disaggregated", staleness=0)
    before, after = (predict_plan(work, p, FIXED).step.value for p in (plan, on(plan, **{part: factor})))
    assert after <= before * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(plans(), st.floats(1.1, 4))
def test_more_bandwidth_never_slows_an_async_step_beyond_the_tolerance(
    case: tuple[Workload, Plan], factor: float
) -> None:
    work, plan = case
    plan = replace(plan, placement="async", staleness=max(1, plan.staleness), channel="reshard")
    before, after = (predict_plan(work, p, FIXED).step.value for p in (plan, on(plan, bandwidth=factor)))
    assert after <= before * 1.05  # the order of simulated events causes differences of a few percent


@settings(max_examples=40, deadline=None)
@given(plans())
def test_sharding_conserves_parameters_and_flops(case: tuple[Workload, Plan]) -> None:
    work, plan = case
    model, cut = work.model, plan.training
    trainer = Trainer(model, plan.cluster, cut, "bf16", FIXED)
    assert trainer.dense_parameters_here() * cut.tp * cut.pp + trainer.expert_parameters_here() * cut.ep * cut.pp == (
        pytest.approx(model.parameters)
    )
    if cut.zero:  # every parameter is updated by one device
        assert trainer.optimizer_parameters_here() * cut.devices == pytest.approx(model.parameters)
    step = trainer.step(work.batch, work.length)
    products = next(part.value for part in step.parts if part.name == "products")
    recompute_factor = 4 / 3 if cut.recompute == "full" else 1.0
    rate = plan.cluster.accelerator.bf16 * FIXED.gemm_share
    tokens = max(work.batch * work.length, cut.dp)
    assert products * cut.devices * rate == pytest.approx(6 * model.active_parameters * tokens * recompute_factor)


@settings(max_examples=40, deadline=None)
@given(models, powers, st.sampled_from([1, 2]))
def test_an_engine_stores_the_model_once_plus_replicated_parameters(name: str, tp: int, pp: int) -> None:
    model = ModelShape.named(name)
    tp = tp if model.heads % tp == 0 else 1
    one = Replica(model, cluster("2x8xH100"), GenerationLayout(tp, pp), "bf16", "bf16", FIXED)
    # Norms and biases are within the tolerance.
    copies = tp * model.copied_parameters(tp)
    assert (copies > 0) == (tp > (1 if model.latent else model.kv_heads))
    assert one.weight_bytes() * tp * pp == pytest.approx(2 * (model.parameters + copies), rel=1e-3)
    # Devices beyond the number of KV heads replicate the cache.
    cuts = 1 if model.latent else min(tp, model.kv_heads)
    assert memory.sequence_bytes(one, 1000) * cuts * pp == pytest.approx(2 * model.kv_numbers(1000))


@settings(max_examples=40, deadline=None)
@given(plans())
def test_every_term_is_the_sum_of_its_parts_and_has_a_unit(case: tuple[Workload, Plan]) -> None:
    work, plan = case

    def check(term: Term) -> None:
        assert term.value >= 0
        if term.formula == "sum of the parts":
            assert term.value == pytest.approx(sum(part.value for part in term.parts))
            assert all(part.unit == term.unit for part in term.parts)
        for part in term.parts:
            check(part)

    prediction = predict_plan(work, plan, FIXED)
    assert prediction.step.unit == "s"
    check(prediction.step)
    for phase in prediction.phases:
        assert phase.memory.unit == "B"
        check(phase.seconds)
        check(phase.memory)


def test_mixed_and_invalid_units_are_rejected() -> None:
    with pytest.raises(ValueError, match="is in s and its part weights in B"):
        total("step", [Term("weights", 1.0, "B")], "s")
    with pytest.raises(ValueError, match="none of"):
        Term("speed", 1.0, "m/s")
    with pytest.raises(ValueError, match="zero or more"):
        Term("time", -1.0, "s")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.floats(1, 200), st.floats(0, 20), st.integers(0, 4))
def test_staleness_0_is_sequential_and_staleness_never_slows_a_step(
    batch: int, train: float, sync: float, staleness: int
) -> None:
    one = Replica(ModelShape.named("llama-3.1-8b"), cluster("1x8xH100"), GenerationLayout(1), "bf16", "bf16", FIXED)
    lengths = Workload(one.model, response=500).lengths(FIXED)

    def seconds(stale: int) -> float:
        return overlap(one, 1, batch, 100, lengths, 256, train, sync, stale).step_seconds

    def in_turn(stale: int) -> float:
        return overlap(one, 1, batch, 100, lengths, 256, train, sync, stale, ahead=1).step_seconds

    turns = seconds(0)
    # With one batch at a time a step is the longer of generation and training plus the publication, as in published
    # one-step-off runs.
    alone = turns - train - sync
    assert in_turn(1) == pytest.approx(max(alone, train) + sync, rel=0.02)
    assert turns >= train + sync
    assert seconds(staleness) <= turns * 1.02
    assert seconds(staleness) >= (train + sync) * 0.999


@settings(max_examples=6, deadline=None)
@given(models, chips, st.sampled_from([2, 4, 8]))
def test_the_search_returns_only_plans_that_fit(name: str, chip: str, devices: int) -> None:
    work = Workload(ModelShape.named(name), "grpo", 200, 400, 0, 256)
    result = Search(work, cluster(f"1x{devices}x{chip}")).run()
    assert all(prediction.fits for prediction in result.plans)
    placed = {prediction.plan.placement for prediction in result.plans} | {r.placement for r in result.rejected}
    assert placed == {"colocated", "swapped", "hybrid", "disaggregated", "async"}


@settings(max_examples=20, deadline=None)
@given(models, st.sampled_from([1, 2, 4]))
def test_all_training_layouts_use_every_device(name: str, nodes: int) -> None:
    work, where = Workload(ModelShape.named(name)), cluster(f"{nodes}x8xH100")
    for cut in training_layouts(work, where):
        cut.check(work.model)
        assert cut.devices == where.devices


def test_a_plan_that_does_not_use_every_device_is_rejected() -> None:
    work, where = Workload(ModelShape.named("llama-3.1-8b")), cluster("1x8xH100")
    with pytest.raises(ConfigError, match="= 4 devices, and there are 8; set dp to 8"):
        predict_plan(work, Plan("hybrid", where, where, GenerationLayout(), TrainingLayout(dp=4), "ipc"), FIXED)
