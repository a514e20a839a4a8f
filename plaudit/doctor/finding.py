"""The finding of a check: ok, a warning, or a failure; with a fix unless it is ok.

Uses only the standard library, because a check may find that packages are missing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """host  the other machine that it is about; empty for this one"""

    check: str
    status: Status
    detail: str
    cure: str = ""
    host: str = ""

    @classmethod
    def of(cls, text: str | bytes) -> Finding:
        """From JSON."""
        return cls(**json.loads(text))

    def json(self) -> str:
        return json.dumps(asdict(self))

    def line(self) -> str:
        where = f"on {self.host}: " if self.host else ""
        cure = f"; {self.cure}" if self.cure else ""
        return f"{self.status:<8} {self.check:<9} {where}{self.detail}{cure}"


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warning(check: str, detail: str, cure: str) -> Finding:
    return Finding(check, "warning", detail, cure)


def failed(check: str, detail: str, cure: str) -> Finding:
    return Finding(check, "failed", detail, cure)
