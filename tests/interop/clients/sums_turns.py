"""An environment of verifiers in turns: the policy says what to add, the environment adds, until there is an answer."""

from __future__ import annotations

import re

import verifiers.v1 as vf
from sums_single import SumsTaskset

__all__ = ["CalculatorEnv", "SumsTaskset"]


class CalculatorEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class CalculatorEnv(vf.Env[CalculatorEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            said = (await chat.turn()).last_reply
            for _ in range(24):
                numbers = re.fullmatch(r"(\d+)\+(\d+)", said)
                if numbers is None:
                    break
                said = (await chat.turn(f"{int(numbers[1]) + int(numbers[2])};")).last_reply
