"""Blended rewards against values computed by hand."""

import math
import re
from typing import Any

import pytest

from plaudit.config.reward import BlendTable, parse_reward
from plaudit.errors import ConfigError
from plaudit.records import Item, ItemError, Score, StepScores
from plaudit.reward import combine, load_reward


def blend(**keys: Any) -> BlendTable:
    table = parse_reward({"kind": "blend", **keys}, "test")
    assert isinstance(table, BlendTable)
    return table


RESULTS = {
    "a": Score(2.0, version="0-aa", tokens=5),
    "b": StepScores((0.1, 0.5), 0.5, version="0-bb", tokens=7, truncated=True),
    "c": Score(-1.0),
}


def test_blend_equals_values_computed_by_hand() -> None:
    weights = {"a": 1.0, "b": 4.0, "c": 3.0}
    total = combine(blend(members=weights), RESULTS)
    assert total.value == 2.0 + 4 * 0.5 - 3.0
    assert total.attributes == {"a": 2.0, "b": 0.5, "c": -1.0}
    assert (total.tokens, total.truncated) == (12, True)
    lighter = combine(blend(members={**weights, "b": 3.0}), RESULTS)
    swapped = combine(blend(members=weights), {**RESULTS, "a": Score(2.0, version="1-ab")})
    assert re.fullmatch("0-[0-9a-f]{12}", total.version)
    assert re.fullmatch("0-[0-9a-f]{12}", lighter.version)
    assert re.fullmatch("1-[0-9a-f]{12}", swapped.version)
    assert lighter.version != total.version
    assert combine(blend(members=weights, combine="min"), RESULTS).value == -3.0
    mean = (2.0 + 2.0 - 3.0) / 8
    deviation = math.sqrt((1 * (2 - mean) ** 2 + 4 * (0.5 - mean) ** 2 + 3 * (-1 - mean) ** 2) / 8)
    cautious = combine(blend(members=weights, combine="mean-minus-deviation", deviation=0.5), RESULTS)
    assert cautious.value == pytest.approx(mean - 0.5 * deviation)


def test_failed_member_fails_the_blend() -> None:
    for failed in (Score(error=ItemError("timeout", "too slow")), StepScores(error=ItemError("timeout", "too slow"))):
        score = combine(blend(members={"a": 1.0, "bad": 0.0}), {**RESULTS, "bad": failed})
        assert score.value is None
        assert score.error == ItemError("member_failed", "bad failed (timeout): too slow")
    overflow = combine(blend(members={"a": 1e308, "b": 1e308}), {"a": Score(1e10), "b": Score(1.0)})
    assert overflow.error is not None
    assert overflow.error.type == "nonfinite_score"


def test_blend_of_rules_models_and_blends_in_this_process() -> None:
    tables: dict[str, Any] = {
        "rule": parse_reward({"kind": "rule", "rule": "exact", "answer": r"#(\d+)"}, "test"),
        "inner": blend(members={"rule": 2.0}),
        "loop": blend(members={"loop": 1.0}),
        "round": blend(members={"about": 1.0}),
        "about": blend(members={"round": 1.0}),
    }
    from plaudit.reward import complete

    tables["model"] = complete({"path": "sums"}, "test")
    tables["steps"] = complete({"path": "sums-steps"}, "test")
    items = [
        Item(prompt="7+8+4=", response="7+8=15;15+4=19;#19", truth=19),
        Item(prompt="7+8+4=", response="7+8=5;5+4=9;#9", truth=19),
        Item(prompt="7+8+4=", response="#19"),
    ]
    reward = load_reward(blend(members={"model": 1.0, "steps": 1.0, "inner": 1.0}), tables)
    right, wrong, failed = reward.score(items)
    reward.close()
    assert isinstance(right, Score)
    assert isinstance(wrong, Score)
    assert right.value == pytest.approx(sum(right.attributes.values()))
    assert right.attributes["inner"] == 2.0
    assert (right.value or 0) > (wrong.value or 0) + 2
    assert failed.error is not None
    assert "no_truth" in failed.error.message
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        load_reward(blend(members={"modle": 1.0}), tables)
    for name in ("loop", "round"):
        with pytest.raises(ConfigError, match="does not exist"):
            load_reward(tables[name], tables)
