"""The memory forecast of a run, as an event, compared with what it measures."""

from pathlib import Path

from plaudit.config import RlRecipe, load_recipe
from plaudit.report.history import history_of
from plaudit.rl.forecast import forecast

ROOT = Path(__file__).parent.parent.parent


def recipe(*changes: str) -> RlRecipe:
    found = load_recipe(ROOT / "plaudit/recipes/sums-grpo.toml", list(changes))
    assert isinstance(found, RlRecipe)
    return found


def test_states_are_as_the_optimizer_has_them() -> None:
    found = forecast(recipe(), program=1000)
    assert set(found) == {"generate", "update"}  # one update without a KL: neither old nor reference
    update = found["update"]
    weights = update["policy weights"]
    assert weights == 4 * 155_440  # float32
    assert update["policy optimizer"] == 2 * weights
    assert update["policy gradients"] == weights
    assert update["program"] == 1000
    assert "policy gradients" not in found["generate"]


def test_narrow_weights_have_masters_and_a_kl_has_a_reference() -> None:
    update = forecast(recipe("model.dtype=bfloat16", "algorithm.kl.coef=0.1"), program=0)["update"]
    weights = update["policy weights"]
    assert update["policy masters"] == 2 * weights
    assert update["policy optimizer"] == 4 * weights
    assert update["reference weights"] == weights


def test_an_update_holds_no_more_tokens_than_there_are_and_a_cache_what_it_takes() -> None:
    many = recipe("train.micro_batch_tokens=1000000")
    lengths = {"prompt": 10.0, "response": 4.0}
    whole = forecast(many, program=0, **lengths)["update"]  # type: ignore[arg-type]
    batch, group = many.train.prompts_per_step * many.train.samples_per_prompt, many.train.samples_per_prompt
    fits = recipe(f"train.micro_batch_tokens={batch * 14}")
    assert forecast(fits, program=0, **lengths)["update"] == whole  # type: ignore[arg-type]
    half = recipe(f"train.micro_batch_tokens={batch * 7}")
    assert forecast(half, program=0, **lengths)["update"]["activations"] < whole["activations"]  # type: ignore[arg-type]
    twice = forecast(many, program=0, prompt=20.0 + 4.0 * group, response=8.0)["update"]
    assert twice["activations"] > 2 * whole["activations"]
    assert forecast(many, program=0, cache=12345, **lengths)["generate"]["KV"] == 12345  # type: ignore[arg-type]


def test_nothing_is_expected_of_what_the_formulas_do_not_cover() -> None:
    assert forecast(recipe("placement.name=swapped"), program=0) == {}


def test_the_report_has_it_beside_what_was_measured() -> None:
    events = [
        {"kind": "plan", "wall": 0.0, "steps": 1, "memory": {"update": {"policy weights": 90, "activations": 20}}},
        {"kind": "memory", "wall": 1.0, "step": 1, "phase": "update", "bytes": {"policy weights": 9}, "device": "cpu"},
        {"kind": "memory", "wall": 1.0, "step": 1, "phase": "generate", "bytes": {"KV": 5}, "device": "cpu",
         "role": "rollout", "rank": 0},
    ]  # fmt: skip
    planned = {line.name: line.planned for line in history_of("run", events).memory}
    assert planned == {"cpu": {"update": {"policy weights": 90, "activations": 20}}, "rollout 0, cpu": {}}
