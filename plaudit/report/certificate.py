"""What proves a run: the hashes that it logged, how often engine and learner agreed, and what `plaudit verify` said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from plaudit.events import VERIFIED, Event
from plaudit.report.curve import Curve


def proof(events: Sequence[Event], apart: Curve | None) -> str:
    """In words; "" for a run without hashes. `apart` is the largest mismatch of each step."""
    hashed = [event for event in events if event["kind"] == "proof"]
    if not hashed:
        return ""
    last = hashed[-1]
    count = len({event["step"] for event in hashed})
    words = f"Proof: {count:,} steps hashed; weights {last['hashes']['weights']} at step {last['step']:,}"
    if apart is not None:
        largest = max(apart.values)
        agreed = "equal to the bit in every step" if largest == 0 else f"apart by at most {largest:.1e} a token"
        words += f"; log-probs of engine and learner {agreed}"
    return words


def verdict_of(run: Path) -> str:
    """The last one, with its date; "" where the run was never verified."""
    path = run / VERIFIED
    if not path.is_file():
        return ""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return f"verified {kept['date'][:10]}: {kept['text']}"
    except (ValueError, TypeError, KeyError):
        return f"{VERIFIED} cannot be read; `plaudit verify {run}` writes it anew"
