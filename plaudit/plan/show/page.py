"""A self-contained HTML page of a plan: memory, phases, cost."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from plaudit.plan.question import Outcome
from plaudit.plan.show.as_data import outcome_data

_TEMPLATE = Path(__file__).with_name("page.html")
_DATA, _POLICY = "{{data}}", "{{script-hash}}"
MOST_PLANS = 60


def _shown(outcome: Outcome, frontier: Sequence[int]) -> list[int]:
    """Plans on the page: of each cluster the fastest, ours and others, and all that nothing beats."""
    each = max(2, MOST_PLANS // len(outcome.results))
    wanted: set[int] = set()
    for result in outcome.results.values():
        ours, others = ([p for p in result.plans if p.runnable is runnable] for runnable in (True, False))
        kept = ours[: max(each // 2, each - len(others))]
        wanted |= {id(plan) for plan in kept + others[: each - len(kept)]}
    return sorted({*frontier, *(i for i, plan in enumerate(outcome.plans) if id(plan) in wanted)})


def render_page(outcome: Outcome) -> str:
    template = _TEMPLATE.read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = outcome_data(outcome)
    kept = _shown(outcome, data["frontier"])
    data["plans"] = [data["plans"][index] for index in kept]
    data["frontier"] = [kept.index(index) for index in data["frontier"]]
    # No character of a name can end the script element or begin another.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for plain, safe in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(plain, safe)
    return template.replace(_POLICY, own).replace(_DATA, text)
