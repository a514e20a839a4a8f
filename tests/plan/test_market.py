"""What to rent: for a budget, a deadline or a goal."""

import json
import math
from pathlib import Path

import pytest

from plaudit.errors import ConfigError
from plaudit.plan.market import market
from plaudit.plan.options import PlanOptions
from plaudit.plan.question import ask
from tests.command import plaudit_here

ROOT = Path(__file__).parent.parent.parent
CHIPS = "A100,H100,H200"


def choose(model: str = "qwen2.5-7b", **options: object):  # type: ignore[no-untyped-def]
    chosen = {"compare": CHIPS, "placement": ["hybrid", "disaggregated"], **options}
    return market(PlanOptions(model, **chosen)).answer()  # type: ignore[arg-type]


def test_offers_are_within_the_budget_and_match_a_plain_plan() -> None:
    choice = choose(budget="60/h")
    assert {offer.chip.name for offer in choice.any_software} == {"A100-80G SXM", "H100 SXM", "H200 SXM"}
    for offer in (*choice.runnable, *choice.any_software):
        assert offer.hourly <= 60
    hours = [offer.hours for offer in choice.any_software]
    assert hours == sorted(hours)
    first = choice.runnable[0]
    # By hand: devices, dollars and seconds.
    assert first.dollars == pytest.approx(
        first.prediction.plan.devices * first.chip.price.mid * first.prediction.step.value * 1000 / 3600
    )
    place = first.place
    plain = ask(
        PlanOptions("qwen2.5-7b", f"{place.nodes}x{place.devices_per_node}x{place.accelerator.name}",
                    placement=["hybrid", "disaggregated"])
    ).answer()  # fmt: skip
    assert plain.best.step.value == first.prediction.step.value


def test_offers_meet_the_deadline_and_a_later_one_is_cheaper() -> None:
    late, early = choose(deadline="7d"), choose(deadline="12h")
    assert all(offer.hours <= 12 for offer in early.any_software)
    for offer in early.any_software:
        slow = next(other for other in late.any_software if other.chip == offer.chip)
        assert slow.dollars <= offer.dollars
        assert slow.prediction.plan.devices <= offer.prediction.plan.devices
    dollars = [offer.dollars for offer in early.any_software]
    assert dollars == sorted(dollars)


def test_energy_is_power_times_time_and_orders_the_offers() -> None:
    choice = choose(budget="60/h", goal="energy")
    for offer in choice.any_software:
        power = offer.chip.power * offer.prediction.plan.devices
        assert offer.kwh == pytest.approx(power / 1e3 * offer.hours)
    assert [o.kwh for o in choice.any_software] == sorted(o.kwh for o in choice.any_software)


def test_cost_ranges_follow_the_price_sources() -> None:
    h100 = next(offer for offer in choose(budget="60/h").any_software if offer.chip.name == "H100 SXM")
    low, high = h100.range or (0, 0)
    assert low / h100.dollars == pytest.approx(1.8 / 3.29)
    assert high / h100.dollars == pytest.approx(9.8 / 3.29)
    owned = next(o for o in choose(budget="60/h", price="owned", compare="H100").any_software)
    assert owned.range is not None
    assert owned.range[1] == pytest.approx(owned.dollars)
    assert choose(budget="60/h", price="3yr", compare="H100").first.range is None


def test_a_hardware_file_overrides_catalogue_prices(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[accelerator.H100]\nprice = 0.5\n")
    question = market(PlanOptions("qwen2.5-7b", budget="60/h", hardware_file=own))
    assert [chip.price.mid for chip in question.chips if chip.name == "H100 SXM"] == [0.5]


def test_power_cost_is_added_to_a_given_price() -> None:
    bare, paid = (choose(budget="60/h", compare="H100", price="1.0", power_price=p) for p in (None, 0.1))
    per_hour = [choice.first.hourly / choice.first.prediction.plan.devices for choice in (bare, paid)]
    assert per_hour == pytest.approx([1.0, 1.173])  # 1.73 kW per device in total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "0.2/h"}, r"buys nothing: one A100-80G SXM is the cheapest device at \$1.79/h .*raise --budget"),
        ({"budget": "60"}, r"--budget 60: expected dollars per hour, such as 60/h"),
        ({"budget": "0/h"}, r"--budget 0/h: expected dollars per hour"),
        ({"deadline": "soon"}, r"--deadline soon: expected minutes, hours or days"),
        ({"goal": "time"}, r"--goal time without --budget has no end"),
        ({"goal": "tim", "budget": "9/h"}, r"unknown goal 'tim'; did you mean 'time'"),
        ({"budget": "9/h", "hardware": "8xH100"}, r"--hardware is hardware that you have, and --budget"),
        ({"budget": "60/h", "compare": "H100,GB200"}, r"--price mid: no such price of GB200 .*--price 3yr or owned"),
        ({"budget": "60/h", "deadline": "1m"}, r"1000 steps take .* at least for \$60/h, on .*take --deadline \d+h"),
        ({"budget": "60/h", "power_price": 0.1}, r"--power-price 0.1 goes with a price of yours"),
    ],
)
def test_invalid_options_are_rejected_with_one_line_and_the_fix(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        choose(**options)
    assert "\n" not in str(error.value)


def test_a_budget_that_is_too_small_suggests_a_sufficient_one() -> None:
    with pytest.raises(ConfigError, match=r"fits on nothing that --budget 4/h buys") as error:
        choose("qwen3-32b", budget="4/h")
    raised = float(str(error.value).split("raise --budget to ")[1].removesuffix("/h"))
    assert choose("qwen3-32b", budget=f"{math.ceil(raised)}/h").any_software


def test_the_command_prints_a_table_or_data(tmp_path: Path) -> None:
    words = ("--model", "qwen2.5-7b", "--budget", "60/h", "--placement", "hybrid")
    run = plaudit_here("plan", *words, "--compare", CHIPS, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Fastest for at most $60/h: ")
    assert "on demand, the middle quote, 2026-08-22" in run.stdout
    page = tmp_path / "plan.html"
    data = json.loads(plaudit_here("plan", *words, "--json", "--page", str(page), cwd=ROOT).stdout)
    assert "Published step times were planned to" in page.read_text()
    assert "GB200 NVL72" in data["without_price"]  # left out, with a notice
    assert data["own_trainer"][0]["dollars_per_hour"] <= 60
    assert data["own_trainer"][0]["plan"]["runnable"] is True


def test_a_recipe_is_planned_on_the_rented_hardware() -> None:
    words = ("--for", "sums-grpo", "--budget", "4/h", "--compare", "H100,L40S", "--placement", "colocated")
    run = plaudit_here("plan", *words, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Fastest for at most $4/h: ")
    assert "[resources.rollout]" in run.stdout
    data = json.loads(plaudit_here("plan", *words, "--json", cwd=ROOT).stdout)
    assert data["budget_per_hour"] == 4
