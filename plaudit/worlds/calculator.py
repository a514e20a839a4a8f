"""A tool for the sums world: it computes additions that the policy requests.

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
    """An environment that answers `a+b=`. Any other text of the policy is its answer and ends the episode."""

    def reset(self, prompt: Prompt) -> None:
        """Nothing to reset: it is stateless."""

    def step(self, response: str) -> Turn:
        call = _CALL.fullmatch(response)
        if call is None:
            return Turn(done=True)
        return Turn(f"{int(call[1]) + int(call[2])}{STEP_END}")
