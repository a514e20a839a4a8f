"""The memory forecast of a run: its numbers, and the report that compares it with measured memory."""

from pathlib import Path

from plaudit.config import RlRecipe, load_recipe
from plaudit.report.history import history_of
from plaudit.rl.forecast import forecast

ROOT = Path(__file__).parent.parent.parent


def recipe(*changes: str) -> RlRecipe:
    loaded = load_recipe(ROOT / "plaudit/recipes/sums-grpo.toml", list(changes))
    assert isinstance(loaded, RlRecipe)
    return loaded


def test_forecast_counts_weights_gradients_and_optimizer_state() -> None:
    phases = forecast(recipe(), program=1000)
    assert set(phases) == {"generate", "update"}  # one update without a KL needs no old and no reference log-probs
    update = phases["update"]
    weights = update["policy weights"]
    assert weights == 4 * 155_440  # float32
    assert update["policy optimizer"] == 2 * weights
    assert update["policy gradients"] == weights
    assert update["program"] == 1000
    assert "policy gradients" not in phases["generate"]


def test_bfloat16_weights_add_masters_and_a_kl_adds_a_reference() -> None:
    update = forecast(recipe("model.dtype=bfloat16", "algorithm.kl.coef=0.1"), program=0)["update"]
    weights = update["policy weights"]
    assert update["policy masters"] == 2 * weights
    assert update["policy optimizer"] == 4 * weights
    assert update["reference weights"] == weights


def test_activations_are_bounded_by_the_batch_and_kv_is_the_cache_size() -> None:
    many = recipe("train.micro_batch_tokens=1000000")
    lengths = {"prompt": 10.0, "response": 4.0}
    full = forecast(many, program=0, **lengths)["update"]  # type: ignore[arg-type]
    batch, group = many.train.prompts_per_step * many.train.samples_per_prompt, many.train.samples_per_prompt
    fits = recipe(f"train.micro_batch_tokens={batch * 14}")
    assert forecast(fits, program=0, **lengths)["update"] == full  # type: ignore[arg-type]
    half = recipe(f"train.micro_batch_tokens={batch * 7}")
    assert forecast(half, program=0, **lengths)["update"]["activations"] < full["activations"]  # type: ignore[arg-type]
    twice = forecast(many, program=0, prompt=20.0 + 4.0 * group, response=8.0)["update"]
    assert twice["activations"] > 2 * full["activations"]
    assert forecast(many, program=0, cache=12345, **lengths)["generate"]["KV"] == 12345  # type: ignore[arg-type]


def test_forecast_is_empty_for_an_unsupported_placement() -> None:
    assert forecast(recipe("placement.name=swapped"), program=0) == {}


def test_report_shows_the_forecast_next_to_measured_memory() -> None:
    events = [
        {"kind": "plan", "wall": 0.0, "steps": 1, "memory": {"update": {"policy weights": 90, "activations": 20}}},
        {"kind": "memory", "wall": 1.0, "step": 1, "phase": "update", "bytes": {"policy weights": 9}, "device": "cpu"},
        {"kind": "memory", "wall": 1.0, "step": 1, "phase": "generate", "bytes": {"KV": 5}, "device": "cpu",
         "role": "rollout", "rank": 0},
    ]  # fmt: skip
    planned = {line.name: line.planned for line in history_of("run", events).memory}
    assert planned == {"cpu": {"update": {"policy weights": 90, "activations": 20}}, "rollout 0, cpu": {}}
