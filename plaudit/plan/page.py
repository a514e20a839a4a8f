"""One HTML page about a plan: what memory holds, when each phase runs, what time costs. Nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from plaudit.plan.as_data import outcome_data
from plaudit.plan.question import Outcome

_TEMPLATE = Path(__file__).with_name("page.html")
_DATA, _POLICY = "{{data}}", "{{script-hash}}"
MOST_PLANS = 60


def render_page(outcome: Outcome) -> str:
    template = _TEMPLATE.read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = outcome_data(outcome)
    data["plans"] = data["plans"][:MOST_PLANS]
    data["frontier"] = [index for index in data["frontier"] if index < MOST_PLANS]
    # No character of a name can end the script element or begin another.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for plain, safe in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(plain, safe)
    return template.replace(_POLICY, own).replace(_DATA, text)
