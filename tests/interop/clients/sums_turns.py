"""A multi-turn environment for verifiers: the policy writes an addition, the environment replies with its sum, until
the policy gives an answer."""

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
            reply = (await chat.turn()).last_reply
            for _ in range(24):
                numbers = re.fullmatch(r"(\d+)\+(\d+)", reply)
                if numbers is None:
                    break
                reply = (await chat.turn(f"{int(numbers[1]) + int(numbers[2])};")).last_reply
