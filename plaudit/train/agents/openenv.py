"""OpenEnv environments: a server with a session for each response, whose actions are the policy's turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit.errors import ConfigError
from plaudit.records import Prompt, Turn


class OpenEnv:
    """`environment.name = "openenv"`. The observation of its reset is not read: the task is the prompt.

    url          of the environment's server, which must allow as many sessions as a step has responses
    action       the field of an action for the policy's text
    observation  the field of an observation that the policy reads
    fields       other fields of every action
    reset        arguments of reset
    prompt       the argument of reset for the prompt's text; None: there is none
    role         of an observation's message in a conversation
    """

    def __init__(
        self, url: str, action: str, observation: str, fields: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None, prompt: str | None = None, role: str = "user",
    ) -> None:  # fmt: skip
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise ConfigError('environment.name = "openenv" needs its client: pip install openenv') from error
        if role not in ("user", "tool"):
            raise ConfigError(f"environment.options.role = {role!r} must be 'user' or 'tool'")
        self.client = GenericEnvClient(base_url=url).sync()
        self.action = action
        self.observation = observation
        self.fields = dict(fields or {})
        self.arguments = dict(reset or {})
        self.prompt = prompt
        self.role: Any = role

    def reset(self, prompt: Prompt) -> None:
        self.client.connect()
        given = {} if self.prompt is None else {self.prompt: prompt.text}
        if self.client.reset(**self.arguments, **given).done:
            raise ValueError("the environment is done before the first turn")

    def step(self, response: str) -> Turn:
        result = self.client.step({**self.fields, self.action: response})
        if self.observation not in result.observation:
            raise ValueError(
                f"the observation has no field {self.observation!r}, it has {sorted(result.observation)}: set "
                "environment.options.observation"
            )
        # In OpenEnv, no reward means that this step has none of its own.
        reward = 0.0 if result.reward is None else float(result.reward)
        return Turn(str(result.observation[self.observation]), reward, bool(result.done), self.role)

    def close(self) -> None:
        self.client.close()
