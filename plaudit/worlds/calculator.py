"""A tool for the sums world: it does the additions, the policy decides which.

prompt       7+8+4=
policy       7+8=
calculator   15;
policy       15+4=
calculator   19;
policy       #19
"""

from __future__ import annotations

import re

from plaudit.records import Prompt, Turn
from plaudit.worlds.sums import STEP_END

_CALL = re.compile(r"(\d{1,9})\+(\d{1,9})=")


class Calculator:
    """An environment: answers `a+b=`. Whatever else the policy writes is its answer, and the end."""

    def reset(self, prompt: Prompt) -> None:
        """Nothing is remembered: a call says all."""

    def step(self, response: str) -> Turn:
        call = _CALL.fullmatch(response)
        if call is None:
            return Turn(done=True)
        return Turn(f"{int(call[1]) + int(call[2])}{STEP_END}")
