"""What a check found: fine, worth a look, or in the way; with the cure where it is not fine."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warning", "failed"]


class Finding(msgspec.Struct, frozen=True):
    """host  the other machine that it is about; none for this one"""

    check: str
    status: Status
    found: str
    cure: str = ""
    host: str = ""

    def line(self) -> str:
        where = f"on {self.host}: " if self.host else ""
        cure = f"; {self.cure}" if self.cure else ""
        return f"{self.status:<8} {self.check:<9} {where}{self.found}{cure}"


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, cure: str) -> Finding:
    return Finding(check, "warning", found, cure)


def failed(check: str, found: str, cure: str) -> Finding:
    return Finding(check, "failed", found, cure)
