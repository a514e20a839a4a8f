"""What a check found: fine, worth a look, or in the way; with the cure where it is not fine.

Nothing but Python's own library here: packages that miss are what a check may find.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """host  the other machine that it is about; none for this one"""

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
