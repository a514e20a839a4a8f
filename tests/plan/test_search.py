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
def test_a_full_search_tries_few_plans(model: str, hardware: str, most: int) -> None:
    """Sides are cut alone: pairs of all cuts would be a hundred times as many. A try takes some half a millisecond,
    and less where memory refuses it."""
    work = Workload(ModelShape.named(model), "ppo", 512, 1024, 0, 1024)
    seen = []
    found = Search(work, cluster(hardware), progress=lambda done, total: seen.append((done, total))).run()
    assert 0 < found.tried <= most
    assert found.plans
    assert seen[-1] == (5, 5)


def test_plans_are_ranked_and_the_frontier_is_not_beaten() -> None:
    outcome = ask(PlanOptions("qwen2.5-7b", "1x8xH100", compare="H100,H200,A100")).answer()
    for ranked in (outcome.runnable, outcome.others):
        times = [p.step.value for p in ranked]
        assert times == sorted(times)
    assert {p.plan.cluster.accelerator.name for p in outcome.best_of_each()} == {"H100 SXM", "H200 SXM", "A100-80G SXM"}
    for kept in outcome.frontier():
        assert not [
            p
            for p in outcome.runnable
            if p.step.value < kept.step.value and p.cost.step["mid"].value < kept.cost.step["mid"].value
        ]


def test_a_70b_run_on_eight_devices_says_what_would_fit() -> None:
    with pytest.raises(ConfigError) as told:
        ask(PlanOptions("llama-3.1-70b", "1x8xH100", algorithm="ppo")).answer()
    message = str(told.value)
    assert "fits on 1x8xH100 SXM in no plan" in message
    assert "needs" in message
    assert "GB, has" in message
    assert "smallest change that fits: " in message
    assert "\n" not in message
    named = message.split("smallest change that fits: ")[1].split(" (")[0]
    nodes, devices, _ = named.split("x", 2)
    assert ask(PlanOptions("llama-3.1-70b", f"{nodes}x{devices}xH100", algorithm="ppo")).answer().plans


def test_inference_and_training_on_different_accelerators() -> None:
    outcome = ask(PlanOptions("qwen3-32b", "4x8xH100", generation_hardware="1x8xH200")).answer()
    best = outcome.best
    assert best.plan.generation_cluster.accelerator.name == "H200 SXM"
    hourly = 32 * 3.29 + 8 * 4.5
    assert best.cost.step["mid"].value == pytest.approx(hourly * best.step.value / 3600)
    with pytest.raises(ConfigError, match="goes with the placements disaggregated and async"):
        ask(PlanOptions("qwen3-32b", "4x8xH100", generation_hardware="1x8xH200", placement=["hybrid"])).answer()


def test_isolated_pools_scale_apart() -> None:
    """Twice the engines halve neither training nor its memory."""
    small, large = (
        predict("qwen2.5-7b", "1x8xH100", "disaggregated", generation_hardware=f"{n}x8xH100", batch=4096)
        for n in (1, 2)
    )
    assert large.phase("generation").seconds.value < small.phase("generation").seconds.value
    assert large.phase("training").seconds.value == small.phase("training").seconds.value


def test_grpo_compares_eight_responses_to_a_prompt_and_ppo_takes_one() -> None:
    work = {name: ask(PlanOptions("llama-3.1-8b", algorithm=name)).workload for name in ("grpo", "rloo", "ppo")}
    assert {name: of.group for name, of in work.items()} == {"grpo": 8, "rloo": 8, "ppo": 1}
    assert ask(PlanOptions("llama-3.1-8b", samples=4)).workload.group == 4
    assert ask(PlanOptions("llama-3.1-8b", batch=2)).workload.group == 2


def test_devices_that_no_engine_uses_are_told() -> None:
    given = {"training": TrainingLayout(dp=48, zero=3), "batch": 256}
    some = predict("llama-3.1-70b", "6x8xH100", "hybrid", generation=GenerationLayout(32), **given)
    assert "16 of 48 devices generate nothing: engines take 1 × 32" in some.note
    assert predict("llama-3.1-70b", "6x8xH100", "hybrid", generation=GenerationLayout(8), **given).note == ""


def test_a_step_off_is_the_longer_side_and_a_shorter_step_says_why() -> None:
    """Ours begins the next batch while the last responses of one run; others, as published, do not."""
    given = {"generation_hardware": "1x2xH100", "batch": 2048, "response": 3000, "max_response": 4000}
    others, ours = (
        predict("llama-3.1-8b", "1x8xH100", "async", training=TrainingLayout(dp=8), plain=plain, **given)
        for plain in (False, True)
    )
    busy = others.phase("scoring").seconds.value + others.phase("training").seconds.value
    longer = max(others.phase("generation").seconds.value, busy)
    assert others.step.value == pytest.approx(longer + others.phase("weights").seconds.value, rel=0.03)
    assert others.note == ""
    assert ours.step.value < ours.phase("generation").seconds.value
    assert "several batches generate at the same time" in ours.note


@pytest.mark.parametrize(
    ("given", "told"),
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
def test_bad_questions_are_answered_in_one_line(given: dict[str, object], told: str) -> None:
    with pytest.raises(PlauditError, match=told) as error:
        ask(PlanOptions("llama-3.1-8b", "1x8xH100", **given)).answer()  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
