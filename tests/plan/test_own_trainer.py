"""Plans that Plaudit's own trainer can run come first in every output; the others list what it lacks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.config.placement import ResourcesTable
from plaudit.config.recipe import load_recipe
from plaudit.config.rl import RlRecipe
from plaudit.config.supervised import PolicyModelTable
from plaudit.core.model.split import keep_part
from plaudit.core.model.stages import RankPosition
from plaudit.errors import ConfigError
from plaudit.plan import GenerationLayout, ModelShape, Plan, TrainingLayout, Workload, cluster, predict
from plaudit.plan.cost.plans import PLACEMENTS
from plaudit.plan.options import PlanOptions
from plaudit.plan.own_trainer import missing
from plaudit.plan.question import Outcome, ask
from plaudit.plan.recipes import layout_of, read_recipe, recipe_for, workload_of
from plaudit.plan.search import Search, SearchResult
from plaudit.plan.show.page import render_page
from tests.command import plaudit_here
from tests.core.tiny import CONFIGS, model

ROOT = Path(__file__).parent.parent.parent
OTHERS = "With other software: what Plaudit's own trainer does not run"


@pytest.fixture(scope="module")
def eight() -> Outcome:
    return ask(PlanOptions("llama-3.1-8b", "1x8xH100")).answer()


def tight(hardware: str) -> Outcome:
    """On eight H100 this fits only with reference and reward model offloaded to the host."""
    options = PlanOptions("llama-3.1-70b", hardware, reward="llama-3.1-8b", placement=["hybrid", "colocated"])
    return ask(options).answer()


@pytest.fixture(scope="module")
def none_runnable() -> Outcome:
    return tight("1x8xH100")


def plan(
    placement: str, devices: int, engine: GenerationLayout, training: TrainingLayout, channel: str = "", nodes: int = 1
) -> Plan:
    """`nodes` is the number of nodes of the engines."""
    place = cluster(f"1x{devices}xH100")
    return Plan(placement, place, cluster(f"{nodes}x{devices}xH100"), engine, training, channel)


FSDP = TrainingLayout(dp=8, zero=3)
HALF = TrainingLayout(dp=4, zero=3)


@pytest.mark.parametrize(
    ("lacking", "plan_of_run"),
    [
        ((), plan("hybrid", 8, GenerationLayout(), FSDP)),
        ((), plan("colocated", 8, GenerationLayout(), TrainingLayout(tp=2, dp=4, zero=3))),
        ((), plan("disaggregated", 8, GenerationLayout(), FSDP, "broadcast")),
        ((), plan("swapped", 1, GenerationLayout(), TrainingLayout())),
        ((), plan("hybrid", 8, GenerationLayout(2), FSDP)),
        ((), plan("colocated", 4, GenerationLayout(2, pp=2), TrainingLayout(tp=2, dp=2, zero=3))),
        (("engines over several devices that are not those that train",),
         plan("hybrid", 6, GenerationLayout(4), TrainingLayout(dp=6, zero=3))),
        ((), plan("swapped", 2, GenerationLayout(2), TrainingLayout(tp=2))),
        ((), plan("disaggregated", 4, GenerationLayout(2, pp=2), HALF, "broadcast")),
        ((), plan("disaggregated", 8, GenerationLayout(2), FSDP, "broadcast")),
        ((), plan("async", 8, GenerationLayout(4), FSDP, "reshard", nodes=4)),
        ((), plan("async", 8, GenerationLayout(4, pp=2), FSDP, "broadcast", nodes=2)),
        (("engine over several nodes that are not those that train",),
         plan("disaggregated", 8, GenerationLayout(8, pp=2), FSDP, "broadcast", nodes=2)),
        (("engine over several nodes that are not those that train",),
         plan("async", 3, GenerationLayout(2), FSDP, "broadcast", nodes=2)),
        (("engine that cuts key-value heads",), plan("disaggregated", 3, GenerationLayout(3), HALF, "broadcast")),
        ((), plan("async", 8, GenerationLayout(), FSDP, "disk")),
        ((), plan("swapped", 8, GenerationLayout(), FSDP)),
        ((), plan("disaggregated", 8, GenerationLayout(), FSDP, "reshard")),
        (("tensors channel",), plan("disaggregated", 8, GenerationLayout(), FSDP, "tensors")),
        (("data parallelism without FSDP",), plan("hybrid", 8, GenerationLayout(), TrainingLayout(dp=8))),
        ((), plan("hybrid", 2, GenerationLayout(), TrainingLayout(pp=2))),
        ((), plan("hybrid", 8, GenerationLayout(), TrainingLayout(pp=2, dp=4, zero=3))),
        (("data parallelism without FSDP",), plan("hybrid", 4, GenerationLayout(), TrainingLayout(pp=2, dp=2))),
        ((), plan("hybrid", 8, GenerationLayout(), TrainingLayout(cp=2, dp=4, zero=3))),
        ((), plan("hybrid", 16, GenerationLayout(), TrainingLayout(cp=16, zero=3))),
        (("data parallelism without FSDP",), plan("hybrid", 2, GenerationLayout(), TrainingLayout(cp=2))),
        (("context parallelism that cuts heads",), plan("hybrid", 3, GenerationLayout(), TrainingLayout(cp=3, zero=3))),
        ((), plan("hybrid", 8, GenerationLayout(), replace(FSDP, offload_optimizer=True))),
        (("reference on the host",),
         plan("hybrid", 8, GenerationLayout(), replace(FSDP, offload_optimizer=True, park=True))),
        (("tensor parallelism that cuts key-value heads",),
         plan("hybrid", 3, GenerationLayout(), TrainingLayout(tp=3))),
        ((), plan("hybrid", 16, GenerationLayout(16), TrainingLayout(tp=16))),
    ],
)  # fmt: skip
def test_unsupported_features_of_a_plan_are_listed(lacking: tuple[str, ...], plan_of_run: Plan) -> None:
    assert missing(Workload(ModelShape.named("llama-3.1-8b")), plan_of_run) == lacking


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["qwen3", "one_key", "deepseek_v2", "deepseek_v3"])
def test_parameters_replicated_on_tensor_ranks_are_counted(name: str, tp: int, tmp_path: Path) -> None:
    """Counts the matrices in the layers of a tiny model that a rank of an engine has."""
    CONFIGS[name].to_json_file(tmp_path / "config.json", use_diff=False)
    shape = ModelShape.from_config(tmp_path / "config.json")
    counts = []
    for size in (1, tp):
        part = model(name).to("meta")
        keep_part(part, RankPosition(0, size))
        counts.append(sum(p.numel() for n, p in part.named_parameters() if ".layers." in n and p.ndim == 2))
    norms = 2 * shape.layers * (shape.q_rank + shape.kv_rank)
    assert counts[1] - counts[0] / tp == pytest.approx(shape.copied_parameters(tp), abs=norms)


def test_tensor_parallelism_of_experts_is_unsupported() -> None:
    of = plan("hybrid", 2, GenerationLayout(), TrainingLayout(tp=2))
    assert missing(Workload(ModelShape.named("qwen3-30b-a3b")), of) == ("tensor parallelism of experts",)


@pytest.mark.parametrize(
    ("lacking", "engine", "training"),
    [
        ((), GenerationLayout(), TrainingLayout(dp=8, ep=4, zero=3)),
        ((), GenerationLayout(), TrainingLayout(dp=4, cp=2, ep=8, zero=3)),
        ((), GenerationLayout(pp=2), TrainingLayout(pp=2, dp=4, ep=4, zero=3)),
        ((), GenerationLayout(2), TrainingLayout(dp=8, ep=4, zero=3)),
        ((), GenerationLayout(4, pp=2), TrainingLayout(dp=8, ep=4, zero=3)),
        ((), GenerationLayout(4, ep=4), TrainingLayout(dp=8, ep=4, zero=3)),
        (("engine with more expert than tensor parallelism",), GenerationLayout(ep=8),
         TrainingLayout(dp=8, ep=4, zero=3)),
        ((), GenerationLayout(), TrainingLayout(tp=2, dp=4, ep=4, zero=3)),
        ((), GenerationLayout(pp=2), TrainingLayout(tp=2, dp=2, cp=2, ep=8, zero=3)),
        (("tensor parallelism of experts",), GenerationLayout(), TrainingLayout(tp=4, dp=2, ep=2, zero=3)),
    ],
)  # fmt: skip
def test_supported_expert_parallel_layouts_with_fsdp(
    lacking: tuple[str, ...], engine: GenerationLayout, training: TrainingLayout
) -> None:
    assert missing(Workload(ModelShape.named("qwen3-30b-a3b")), plan("hybrid", 8, engine, training)) == lacking


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")])
def test_adapters_of_experts_are_unsupported_where_ranks_split_the_experts(targets: tuple[str, ...]) -> None:
    work = Workload(ModelShape.named("qwen3-30b-a3b"), lora_rank=16, lora_targets=targets)
    lacking = ("adapter of experts that ranks split",) if "gate_proj" in targets else ()
    whole = TrainingLayout(dp=8, zero=3)
    assert missing(work, plan("hybrid", 8, GenerationLayout(pp=2), whole)) == ()
    assert missing(work, plan("hybrid", 8, GenerationLayout(2), whole)) == lacking
    assert missing(work, plan("hybrid", 8, GenerationLayout(), replace(whole, ep=4))) == lacking


def test_engine_tensor_ranks_that_do_not_divide_the_experts_are_unsupported() -> None:
    uneven = replace(ModelShape.named("qwen3-30b-a3b"), experts=66)
    of = plan("hybrid", 8, GenerationLayout(4), TrainingLayout(dp=8, ep=2, zero=3))
    assert missing(Workload(uneven), of) == ("engine whose tensor ranks do not divide the experts",)


def test_a_mixture_larger_than_a_device_is_planned_with_multi_rank_engines() -> None:
    outcome = ask(PlanOptions("qwen3-235b-a22b", "8x8xH200", placement=["disaggregated"], lora=16)).answer()
    assert outcome.runnable
    assert all(each.plan.generation.tp > 1 and each.plan.generation.ep == 1 for each in outcome.runnable)


def test_runnable_plans_come_first_and_the_others_list_what_is_missing(eight: Outcome) -> None:
    assert eight.runnable
    assert eight.others
    assert eight.plans == eight.runnable + eight.others
    assert eight.best is eight.runnable[0]
    assert not any(p.missing for p in eight.runnable)
    assert all(p.missing for p in eight.others)
    assert set(map(id, eight.frontier())) <= set(map(id, eight.runnable))
    assert {p.plan.placement for p in eight.runnable} >= {"colocated", "hybrid", "disaggregated", "async"}
    assert any(p.plan.cluster.devices > 1 for p in eight.runnable if p.plan.placement == "async")
    kinds = eight.kinds_of_others()
    assert sum(alike for _, alike in kinds) == len(eight.others)
    assert len({p.missing for p, _ in kinds}) == len(kinds)


def test_runnable_plans_model_plaudits_trainer(eight: Outcome) -> None:
    """Plain modules and no old log-probabilities for a single update, unlike published runs."""
    assert all(p.workload.plain and p.plan.training.plain for p in eight.runnable)
    assert not any(p.workload.plain for p in eight.others)
    scored = [part.name for part in eight.best.phase("scoring").seconds.parts]
    assert "old log-probabilities" not in scored
    assert "old log-probabilities" in [part.name for part in eight.others[0].phase("scoring").seconds.parts]


def test_every_output_lists_runnable_plans_first(tmp_path: Path) -> None:
    words = ("plan", "--model", "llama-3.1-8b", "--hardware", "1x8xH100")
    page = tmp_path / "plan.html"
    lines = plaudit_here(*words, "--page", str(page)).stdout.splitlines()
    assert lines[0].startswith("Plaudit's trainer takes ")
    (heading,) = (at for at, line in enumerate(lines) if line.startswith(OTHERS))
    assert "#  placement" in "".join(lines[1:heading])
    assert "missing" not in "".join(lines[1:heading])
    assert "against ours" in lines[heading + 1]
    assert "data parallelism without FSDP" in "".join(lines[heading:])

    data = json.loads(plaudit_here(*words, "--json").stdout)
    runnable = [p["runnable"] for p in data["plans"]]
    assert runnable == [True] * data["runnable"] + [False] * (len(runnable) - data["runnable"])
    assert [bool(p["missing"]) for p in data["plans"]] == [not flag for flag in runnable]
    assert all(data["plans"][index]["runnable"] for index in data["frontier"])
    assert lines[0] == data["headline"]

    text = page.read_text()
    page_data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert page_data["headline"] == data["headline"]
    assert page_data["plans"][0] == data["plans"][0]
    assert "Plans that Plaudit's trainer runs" in text
    assert "With other software" in text

    explained = plaudit_here(*words, "--explain", "step").stdout.splitlines()
    assert explained[0] == data["headline"]
    assert explained[2].startswith(f"step: {data['plans'][0]['step_seconds']:,.2f} s")


def test_a_page_of_many_plans_shows_both_kinds(eight: Outcome) -> None:
    """Four accelerators with fifteen plans each: neither runnable nor other plans crowd out the other kind."""
    outcome = replace(eight, results={name: next(iter(eight.results.values())) for name in "abcd"})
    text = render_page(outcome)
    page_plans = json.loads(text.split('type="application/json">')[1].split("</script>")[0])["plans"]
    assert {p["runnable"] for p in page_plans} == {True, False}
    assert page_plans[0]["runnable"]


def test_without_a_runnable_plan_the_headline_says_so_and_suggests_hardware(none_runnable: Outcome) -> None:
    assert not none_runnable.runnable
    assert none_runnable.best is none_runnable.others[0]
    headline = none_runnable.headline
    assert headline.startswith(
        "Plaudit's own trainer runs none of these plans; nearest: hybrid, training, per device: needs"
    )
    for suggested in headline.split("smallest change that it runs: ")[1].split(" or "):
        hardware = suggested.partition(" (")[0].removesuffix(" SXM")
        assert tight(hardware).runnable, hardware


def test_70b_on_one_node_offloads_its_optimizer(tmp_path: Path) -> None:
    outcome = ask(PlanOptions("llama-3.1-70b", "1x8xH100", placement=["hybrid"])).answer()
    assert outcome.runnable
    assert all(p.plan.training.offload_optimizer and not p.plan.training.park for p in outcome.runnable)
    assert outcome.runnable[0].host.value < 2048e9
    text, _ = recipe_for(read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml"), outcome)
    (tmp_path / "planned.toml").write_text(text)
    written = load_recipe(tmp_path / "planned.toml")
    assert written.train.offload_optimizer
    assert written.resources.ranks == 8


def test_70b_on_eight_nodes_is_runnable_in_every_placement() -> None:
    runnable = ask(PlanOptions("llama-3.1-70b", "8x8xH100")).answer().runnable
    assert {p.plan.placement for p in runnable} == set(PLACEMENTS)
    assert all(p.plan.generation.devices > 1 for p in runnable), "70B fits on no H100"
    separate = [p.plan for p in runnable if not p.plan.shared]
    assert all(8 % each.generation.devices == 0 for each in separate), "they are whole on a node"
    assert runnable[0].plan.placement == "async"


def test_pools_use_exactly_the_devices_of_the_cluster() -> None:
    runnable = ask(PlanOptions("smollm2-135m", "2x8xH100", placement=["async", "disaggregated"])).answer().runnable
    assert {p.plan.devices for p in runnable} == {16}


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({"generation_dtype": "fp8"}, "no rollouts in fp8 of a policy in bf16: remove --generation-dtype"),
        ({"dtype": "fp8"}, "no training in fp8: set --dtype bf16"),
        ({"kv_dtype": "fp8"}, "no cache in fp8: set --kv-dtype bf16"),
        ({"channel": "tensors", "placement": ["disaggregated"]}, "no tensors channel: take --channel broadcast"),
    ],
)  # fmt: skip
def test_options_that_the_trainer_does_not_support_are_named_with_the_alternative(
    options: dict[str, object], lacking: str
) -> None:
    options = {"placement": ["hybrid"], **options}
    assert lacking in ask(PlanOptions("llama-3.1-8b", "1x2xH100", **options)).answer().headline  # type: ignore[arg-type]


@pytest.mark.parametrize("hardware", ["1x1xH100", "1x8xH100", "2x8xH100"])
@pytest.mark.parametrize("recipe", ["sums-grpo", "sums-ppo"])
def test_every_runnable_plan_can_be_written_as_a_recipe(tmp_path: Path, recipe: str, hardware: str) -> None:
    own = read_recipe(ROOT / f"plaudit/recipes/{recipe}.toml")
    work = workload_of(own, lambda name: ROOT / "plaudit/embedded" / name)
    outcome = replace(ask(PlanOptions("smollm2-135m", hardware)), workload=work).answer()
    assert outcome.runnable
    planned = tmp_path / "planned.toml"
    for index, prediction in enumerate(outcome.runnable):
        only = {place: replace(result, plans=(prediction,)) for place, result in outcome.results.items()}
        text, _ = recipe_for(own, replace(outcome, results=only))
        planned.write_text(text)
        written = load_recipe(planned)
        assert isinstance(written, RlRecipe), index
        # async sets its own correction
        same = written.algorithm.model_copy(update={"correction": own.algorithm.correction})
        assert (same, written.sampling, written.data) == (own.algorithm, own.sampling, own.data)


def test_no_recipe_is_written_without_a_runnable_plan(none_runnable: Outcome) -> None:
    own = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    with pytest.raises(ConfigError, match=r"no recipe was written\. Plaudit's own trainer runs none of these plans"):
        recipe_for(own, none_runnable)


def test_the_recipe_of_an_engine_over_two_devices_is_valid(tmp_path: Path) -> None:
    text = engine_of_two()
    (tmp_path / "planned.toml").write_text(text)
    recipe = read_recipe(tmp_path / "planned.toml")
    rollout = recipe.resources.rollout
    assert (rollout.processes, rollout.tensor_parallel, rollout.pipeline_parallel) == (1, 2, 1)
    assert recipe.resources.ranks == 1


def test_the_recipe_of_engines_on_separate_nodes_is_valid(tmp_path: Path) -> None:
    """Ray is used only if the recipe asks for it; its engines have one device."""
    own = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    work = workload_of(own, lambda name: ROOT / "plaudit/embedded" / name)
    outcome = replace(ask(PlanOptions("smollm2-135m", "4x4xH100", placement=["async"])), workload=work).answer()
    engines = GenerationLayout(2)
    result = Search(work, cluster("4x4xH100"), placements=("async",), generation=engines, ours=True).run()
    only = next(p for p in result.plans if p.plan.generation_cluster.nodes == 3)
    outcome = replace(outcome, results={"async": replace(result, plans=(only,))})
    text, _ = recipe_for(own, outcome)
    (tmp_path / "planned.toml").write_text(text)
    recipe = read_recipe(tmp_path / "planned.toml")
    rollout = recipe.resources.rollout
    assert (rollout.nodes, rollout.processes, rollout.tensor_parallel, rollout.ranks) == (3, 6, 2, 2)
    assert (recipe.resources.ranks, recipe.resources.ray, recipe.placement.channel) == (4, None, "collective")
    assert "and by plaudit rollouts on 3 that generate: plaudit launch --nodes 1 writes the job" in text
    with pytest.raises(ConfigError, match=r"resources\.ray starts engines of one"):
        recipe_for(own.model_copy(update={"resources": ResourcesTable(ray="auto")}), outcome)


@pytest.mark.slow
def test_the_recipe_of_an_engine_over_two_devices_runs(tmp_path: Path) -> None:
    planned = tmp_path / "planned.toml"
    planned.write_text(engine_of_two())
    small = ("train.steps=1", "train.prompts_per_step=2", "train.samples_per_prompt=2", "data.eval_items=1")
    words = [word for item in small for word in ("--set", item)]
    done = plaudit_here("train", str(planned), *words, "--set", "model.device=cpu", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 1


def engine_of_two() -> str:
    own = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    work = workload_of(own, lambda name: ROOT / "plaudit/embedded" / name)
    question = ask(PlanOptions("smollm2-135m", "1x3xH100", placement=["disaggregated"]))
    outcome = replace(question, workload=work).answer()
    only = next(p for p in outcome.runnable if p.plan.generation.tp == 2)
    results = {place: replace(result, plans=(only,)) for place, result in outcome.results.items()}
    return recipe_for(own, replace(outcome, results=results))[0]


def test_the_recipe_of_context_parallelism_for_long_responses_is_valid(tmp_path: Path) -> None:
    own = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    work = workload_of(own, lambda name: ROOT / "plaudit/embedded" / name)
    work = replace(work, model=replace(work.model, max_context=32768), max_response=16384)
    outcome = replace(ask(PlanOptions("smollm2-135m", "1x4xH100", placement=["hybrid"])), workload=work).answer()
    only = next(p for p in outcome.runnable if p.plan.training.cp == 2)
    results = {place: replace(result, plans=(only,)) for place, result in outcome.results.items()}
    planned = tmp_path / "planned.toml"
    planned.write_text(recipe_for(own, replace(outcome, results=results))[0])
    recipe = read_recipe(planned)
    assert (recipe.resources.data_parallel, recipe.resources.context_parallel) == (2, 2)
    assert layout_of(recipe, work).cp == 2
    planned.write_text(recipe_for(recipe, replace(outcome, results=only_without_context_parallel(outcome)))[0])
    assert read_recipe(planned).resources.context_parallel == 1


def test_the_recipe_of_expert_parallelism_is_valid(tmp_path: Path) -> None:
    own = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    work = workload_of(own, lambda name: ROOT / "plaudit/embedded" / name)
    work = replace(work, model=ModelShape.named("qwen3-30b-a3b"), dtype="bf16", kv_dtype="bf16")
    outcome = replace(ask(PlanOptions("qwen3-30b-a3b", "1x8xH200", placement=["hybrid"])), workload=work).answer()
    only = next(p for p in outcome.runnable if p.plan.training.ep == 8 and p.plan.generation.tp == 4)
    results = {place: replace(result, plans=(only,)) for place, result in outcome.results.items()}
    planned = tmp_path / "planned.toml"
    planned.write_text(recipe_for(own, replace(outcome, results=results))[0])
    recipe = read_recipe(planned)
    assert (recipe.resources.data_parallel, recipe.resources.expert_parallel) == (8, 8)
    assert recipe.resources.rollout.tensor_parallel == 4, "engines, which deal them out to their ranks"
    assert layout_of(recipe, work).ep == 8


def test_the_recipe_of_engines_on_the_training_devices_is_valid(tmp_path: Path) -> None:
    own = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    work = workload_of(own, lambda name: ROOT / "plaudit/embedded" / name)
    outcome = replace(ask(PlanOptions("smollm2-135m", "1x4xH100", placement=["colocated"])), workload=work).answer()
    engines = GenerationLayout(2, pp=2)
    result = Search(work, cluster("1x4xH100"), placements=("colocated",), generation=engines, ours=True).run()
    planned = tmp_path / "planned.toml"
    planned.write_text(recipe_for(own, replace(outcome, results={"colocated": result}))[0])
    rollout = read_recipe(planned).resources.rollout
    assert (rollout.tensor_parallel, rollout.pipeline_parallel, rollout.processes) == (2, 2, None)


def test_the_recipe_of_pipeline_stages_is_valid(tmp_path: Path) -> None:
    own = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    work = workload_of(own, lambda name: ROOT / "plaudit/embedded" / name)
    outcome = replace(ask(PlanOptions("smollm2-135m", "1x4xH100", placement=["hybrid"])), workload=work).answer()
    stages = TrainingLayout(pp=2, dp=2, zero=3, plain=True)
    result = Search(work, cluster("1x4xH100"), placements=("hybrid",), training=stages, ours=True).run()
    planned = tmp_path / "planned.toml"
    planned.write_text(recipe_for(own, replace(outcome, results={"hybrid": result}))[0])
    recipe = read_recipe(planned)
    assert (recipe.resources.data_parallel, recipe.resources.pipeline_parallel) == (2, 2)
    assert layout_of(recipe, work).pp == 2


def only_without_context_parallel(outcome: Outcome) -> dict[str, SearchResult]:
    """The outcome's results with only the first plan without context parallelism."""
    only = next(p for p in outcome.runnable if p.plan.training.cp == 1)
    return {place: replace(result, plans=(only,)) for place, result in outcome.results.items()}


def test_plaudits_trainer_keeps_the_full_reward_model_on_every_rank() -> None:
    """Llama 3.1 8B: 8.03 B parameters of two bytes; with FSDP a rank has an eighth and two gathered layers of 32."""
    gigabytes = {}
    for plain in (True, False):
        cut = TrainingLayout(dp=8, zero=3, plain=plain)
        work = Workload(ModelShape.named("llama-3.2-1b"), reward=ModelShape.named("llama-3.1-8b"), plain=plain)
        parts = predict(work, "1x8xH100", "hybrid", training=cut).phase("scoring").memory.parts
        gigabytes[plain] = next(part.value for part in parts if part.name == "reward model") / 1e9
    assert gigabytes[True] == pytest.approx(16.06, abs=0.01)
    assert gigabytes[False] == pytest.approx(16.06 * (1 / 8 + 2 / 32), rel=0.05)


LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip


def test_a_lora_recipe_of_8b_fits_on_one_device(tmp_path: Path) -> None:
    """Adapters of 21 M parameters have gradients and an optimizer; the frozen 8 B have neither, and are also the
    reference."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    recipe = read_recipe(ROOT / "plaudit/recipes/sums-grpo.toml")
    small = {"path": "model", "dtype": "bfloat16"}
    predictions = {}
    for name, lora in (("whole", None), ("adapters", {"rank": 8, "targets": ("q_proj", "v_proj", "up_proj")})):
        changed = recipe.model_copy(update={"model": PolicyModelTable.model_validate({**small, "lora": lora})})
        work = workload_of(changed, lambda model: tmp_path / model, 64, 48)
        predictions[name] = predict(
            work, "1x1xH100", "colocated", training=TrainingLayout(plain=True, recompute="full")
        )
    assert not predictions["whole"].fits
    assert predictions["adapters"].fits
    adapters = 8 * 32 * ((4096 + 4096) + (4096 + 1024) + (4096 + 14336))
    by_part = {part.name: part.value for part in predictions["adapters"].phase("training").memory.parts}
    assert by_part["optimizer"] == pytest.approx(12 * adapters)
    assert by_part["gradients"] == pytest.approx(4 * adapters)
    assert "reference" not in by_part
    # Backward computes gradients of activations only: with recomputation, three passes instead of four.
    times = [
        {p.name: p.value for p in predictions[kind].phase("training").seconds.parts[0].parts} for kind in predictions
    ]
    assert times[1]["products"] / times[0]["products"] == pytest.approx(3 / 4, rel=0.01)


def test_adapter_parameter_counts_match_peft() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    shape = ModelShape(64, 32, 3, 4, 2, 8, 48, False)
    for targets in ("all-linear", ("q_proj", "down_proj")):
        module = transformers.AutoModelForCausalLM.from_config(config)
        chosen = targets if isinstance(targets, str) else list(targets)
        made = peft.get_peft_model(module, peft.LoraConfig(r=4, target_modules=chosen, task_type="CAUSAL_LM"))
        count = sum(p.numel() for p in made.parameters() if p.requires_grad)
        assert shape.adapter_parameters(4, () if isinstance(targets, str) else targets) == count


def test_lora_plans_are_runnable_on_ranks_of_every_kind() -> None:
    answer = ask(PlanOptions("llama-3.1-8b", "1x2xH100", lora=16)).answer()
    assert any(p.plan.training.dp == 2 for p in answer.runnable)
    work = Workload(ModelShape.named("llama-3.1-8b"), lora_rank=16)
    for placement in ("hybrid", "swapped", "colocated"):
        assert missing(work, plan(placement, 2, GenerationLayout(2), TrainingLayout(tp=2))) == ()
    separate = plan("disaggregated", 2, GenerationLayout(2), TrainingLayout(tp=2), "reshard")
    assert missing(work, separate) == ()
    with pytest.raises(ConfigError, match="lora rank = -1: expected one or more"):
        ask(PlanOptions("llama-3.1-8b", lora=-1))
