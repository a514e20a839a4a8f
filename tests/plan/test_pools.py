"""Prefill, decode and training in separate pools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plaudit.errors import ConfigError
from plaudit.plan.options import PlanOptions
from plaudit.plan.pools import PoolPlan, PoolSearch, _fewest, plan_pools
from tests.command import plaudit_here


def planned(**options: Any) -> PoolPlan:
    chosen = {"model": "llama-3.1-8b", "compare": "H100,H200", "pools": 30.0, **options}
    return plan_pools(PlanOptions(**chosen), lambda of: of)


@pytest.fixture(scope="module")
def plan() -> PoolPlan:
    return planned()


def test_every_pool_meets_the_limit_with_the_fewest_devices(plan: PoolPlan) -> None:
    search = PoolSearch(plan.market, plan.limit)
    for arrangement in (plan.apart, plan.two):
        assert arrangement.step <= plan.limit
        for pool in arrangement.pools[:-1]:
            assert pool.layout is not None
            count = int(pool.cut.split(" × ")[0])
            replicas = [r for r in search._replicas(pool.place.accelerator) if r.layout == pool.layout]
            busy = search._busy(pool.work, replicas[0])
            assert busy is not None
            assert busy(count) == pytest.approx(pool.seconds)
            assert count == 1 or busy(count - 1) + arrangement.sync > 0.98 * plan.limit


def test_prefill_and_decode_add_up_to_generation(plan: PoolPlan) -> None:
    search = PoolSearch(plan.market, plan.limit)
    replica = next(search._replicas(plan.market.chips[0]))
    prefill, decode, both = (search._busy(work, replica) for work in ("prefill", "decode", "generation"))
    assert prefill
    assert decode
    assert both
    assert prefill(4) + decode(4) == pytest.approx(both(4))


def test_prices_are_the_sum_of_device_prices(plan: PoolPlan) -> None:
    for arrangement in (plan.apart, plan.two):
        prices = [pool.place.devices * (pool.place.accelerator.price.mid or 0.0) for pool in arrangement.pools]
        assert arrangement.hourly == pytest.approx(sum(prices))
        dollars = arrangement.hourly / 3600 * arrangement.step
        assert arrangement.per_million == pytest.approx(dollars / (1024 * 1024) * 1e6)


def test_kv_of_all_prompts_is_sent_once(plan: PoolPlan) -> None:
    decode = plan.apart.pools[1]
    # 32 layers, 8 heads of 128, keys and values in two bytes; 1,024 responses to 128 prompts of 512 tokens.
    size = 2 * 32 * 8 * 128 * 2 * 512 * 128
    assert plan.apart.kv_rate == pytest.approx(size / decode.place.devices / plan.apart.step)


def test_a_longer_limit_never_costs_more(plan: PoolPlan) -> None:
    slow = planned(pools=120.0)
    assert slow.apart.hourly <= plan.apart.hourly
    assert slow.two.hourly <= plan.two.hourly


def test_the_command_prints_a_table_and_data() -> None:
    words = ["plan", "--model", "llama-3.1-8b", "--pools", "30", "--compare", "H100,H200"]
    run = plaudit_here(*words)
    assert run.returncode == 0
    assert "three pools" in run.stdout
    assert "validated by no run" in run.stdout
    data = json.loads(plaudit_here(*words, "--json").stdout)
    assert [each["name"] for each in data["arrangements"]] == ["three pools", "two pools"]
    assert data["headline"] in " ".join(run.stdout.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pools": -1.0}, "--pools -1: expected the seconds of a step"),
        ({"pools": 0.5}, r"--pools 0.5: decode of llama-3.1-8b takes longer on any number of H100 SXM.*allow more"),
        ({"hardware": "8xH100"}, "remove --hardware"),
        ({"budget": "60/h"}, "remove --budget"),
    ],
)
def test_invalid_pool_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**options)


def test_fewest_finds_the_smallest_sufficient_count() -> None:
    assert [_fewest(lambda n, least=least: n >= least) for least in (1, 2, 3, 7, 64, 65)] == [1, 2, 3, 7, 64, 65]  # type: ignore[misc]
    assert _fewest(lambda n: False) is None
