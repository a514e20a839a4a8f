"""The evidence of a run: its logged hashes, how closely engine and learner agreed, and the result of `plaudit
verify`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from plaudit.events import VERIFIED, Event
from plaudit.report.curve import Curve


def proof(events: Sequence[Event], apart: Curve | None) -> str:
    """The evidence as text; "" for a run without hashes. `apart` is the largest mismatch of each step."""
    hashed = [event for event in events if event["kind"] == "proof" and "weights" in event["hashes"]]
    if not hashed:
        return ""
    last = hashed[-1]
    count = len({event["step"] for event in hashed})
    words = f"Proof: {count:,} steps hashed; weights {last['hashes']['weights']} at step {last['step']:,}"
    if apart is not None:
        largest = max(apart.values)
        agreed = "bit-identical in every step" if largest == 0 else f"differ by at most {largest:.1e} per token"
        words += f"; log-probs of engine and learner {agreed}"
    return words


def verdict_of(run: Path) -> str:
    """The last result with its date; "" if the run was never verified."""
    path = run / VERIFIED
    if not path.is_file():
        return ""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return f"verified {kept['date'][:10]}: {kept['text']}"
    except (ValueError, TypeError, KeyError):
        return f"{VERIFIED} cannot be read; run `plaudit verify {run}` to write it again"
