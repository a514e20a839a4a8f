import pytest

from plaudit.errors import ConfigError, PlauditError
from plaudit.plan import GenerationLayout, ModelShape, TrainingLayout, Workload, cluster, predict
from plaudit.plan.options import PlanOptions
from plaudit.plan.question import ask
from plaudit.plan.search import Search


@pytest.mark.parametrize(
    ("model", "hardware", "most"),
    [
        ("llama-3.1-70b", "8x8xH100", 1_000),
        ("qwen3-235b-a22b", "8x8xH100", 3_000),
        ("deepseek-v3", "128x8xH100", 8_000),
    ],
)
def test_a_full_search_evaluates_few_plans(model: str, hardware: str, most: int) -> None:
    """Generation and training layouts are searched separately: all pairs would be a hundred times as many. A plan takes
    about half a millisecond, and less if it does not fit in memory."""
    work = Workload(ModelShape.named(model), "ppo", 512, 1024, 0, 1024)
    progress = []
    result = Search(work, cluster(hardware), progress=lambda done, total: progress.append((done, total))).run()
    assert 0 < result.tried <= most
    assert result.plans
    assert progress[-1] == (5, 5)


def test_plans_are_ranked_and_no_plan_dominates_the_frontier() -> None:
    outcome = ask(PlanOptions("qwen2.5-7b", "1x8xH100", compare="H100,H200,A100")).answer()
    for ranked in (outcome.runnable, outcome.others):
        times = [p.step.value for p in ranked]
        assert times == sorted(times)
    assert {p.plan.cluster.accelerator.name for p in outcome.best_of_each()} == {"H100 SXM", "H200 SXM", "A100-80G SXM"}
    for plan in outcome.frontier():
        assert not [
            p
            for p in outcome.runnable
            if p.step.value < plan.step.value and p.cost.step["mid"].value < plan.cost.step["mid"].value
        ]


def test_a_70b_run_on_eight_devices_suggests_hardware_that_fits() -> None:
    with pytest.raises(ConfigError) as error:
        ask(PlanOptions("llama-3.1-70b", "1x8xH100", algorithm="ppo")).answer()
    message = str(error.value)
    assert "fits on 1x8xH100 SXM in no plan" in message
    assert "needs" in message
    assert "GB, has" in message
    assert "smallest change that fits: " in message
    assert "\n" not in message
    suggested = message.split("smallest change that fits: ")[1].split(" (")[0]
    nodes, devices, _ = suggested.split("x", 2)
    assert ask(PlanOptions("llama-3.1-70b", f"{nodes}x{devices}xH100", algorithm="ppo")).answer().plans


def test_inference_and_training_can_use_different_accelerators() -> None:
    outcome = ask(PlanOptions("qwen3-32b", "4x8xH100", generation_hardware="1x8xH200")).answer()
    best = outcome.best
    assert best.plan.generation_cluster.accelerator.name == "H200 SXM"
    hourly = 32 * 3.29 + 8 * 4.5
    assert best.cost.step["mid"].value == pytest.approx(hourly * best.step.value / 3600)
    with pytest.raises(ConfigError, match="goes with the placements disaggregated and async"):
        ask(PlanOptions("qwen3-32b", "4x8xH100", generation_hardware="1x8xH200", placement=["hybrid"])).answer()


def test_disaggregated_pools_scale_independently() -> None:
    """Twice the engines halve neither training nor its memory."""
    small, large = (
        predict("qwen2.5-7b", "1x8xH100", "disaggregated", generation_hardware=f"{n}x8xH100", batch=4096)
        for n in (1, 2)
    )
    assert large.phase("generation").seconds.value < small.phase("generation").seconds.value
    assert large.phase("training").seconds.value == small.phase("training").seconds.value


def test_default_group_size_is_eight_for_grpo_and_rloo_and_one_for_ppo() -> None:
    work = {name: ask(PlanOptions("llama-3.1-8b", algorithm=name)).workload for name in ("grpo", "rloo", "ppo")}
    assert {name: of.group for name, of in work.items()} == {"grpo": 8, "rloo": 8, "ppo": 1}
    assert ask(PlanOptions("llama-3.1-8b", samples=4)).workload.group == 4
    assert ask(PlanOptions("llama-3.1-8b", batch=2)).workload.group == 2


def test_devices_without_an_engine_are_reported() -> None:
    options = {"training": TrainingLayout(dp=48, zero=3), "batch": 256}
    some = predict("llama-3.1-70b", "6x8xH100", "hybrid", generation=GenerationLayout(32), **options)
    assert "16 of 48 devices generate nothing: engines take 1 × 32" in some.note
    assert predict("llama-3.1-70b", "6x8xH100", "hybrid", generation=GenerationLayout(8), **options).note == ""


def test_an_async_step_is_the_longer_side_and_a_shorter_one_has_a_note() -> None:
    """Plaudit starts the next batch while the last responses of one are generated; published runs of others do not."""
    options = {"generation_hardware": "1x2xH100", "batch": 2048, "response": 3000, "max_response": 4000}
    others, ours = (
        predict("llama-3.1-8b", "1x8xH100", "async", training=TrainingLayout(dp=8), plain=plain, **options)
        for plain in (False, True)
    )
    busy = others.phase("scoring").seconds.value + others.phase("training").seconds.value
    longer = max(others.phase("generation").seconds.value, busy)
    assert others.step.value == pytest.approx(longer + others.phase("weights").seconds.value, rel=0.03)
    assert others.note == ""
    assert ours.step.value < ours.phase("generation").seconds.value
    assert "several batches generate at the same time" in ours.note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch = 0: expected one or more"), ({"price": "-1"}, "price -1: expected zero or more dollars"),
        ({"price": "cheap"}, "expected dollars per device"), ({"algorithm": "pppo"}, "did you mean 'ppo'"),
        ({"response": 0}, "expected 0, 1 and 0"), ({"placement": ["colocate"]}, "did you mean 'colocated'"),
        ({"max_response": 10}, "raise it to at least 1024"), ({"dtype": "int4"}, "dtype = 'int4'"),
        ({"critic": "lama-3.1-8b"}, "did you mean 'llama-3.1-8b'"), ({"channel": "pigeon"}, "unknown weight channel"),
        ({"prompt": 200_000}, "has positions for 131072"), ({"response": float("nan")}, "response = nan tokens"),
        ({"price": "nan"}, "expected zero or more dollars"), ({"generation_dtype": "fp7"}, "did you mean 'fp8'"),
    ],
)  # fmt: skip
def test_invalid_options_are_rejected_with_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlauditError, match=message) as error:
        ask(PlanOptions("llama-3.1-8b", "1x8xH100", **options)).answer()  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
