"""Environments of verifiers (0.4): their episodes use the run's own endpoint.

`agent.function = "plaudit.train.agents.verifiers:play"` needs the package `verifiers` besides Plaudit, and rows
that `rows` has made from the taskset. verifiers' harnesses start a program for every episode; the one here requests one
answer a turn in the process itself, which is enough for a taskset without tool servers.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.task import Task
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class

from plaudit.records import Prompt

__all__ = ["OneAnswer"]

HARNESS = "plaudit_one_answer"  # verifiers finds a harness by the name of a top-level module
sys.modules.setdefault(HARNESS, sys.modules[__name__])
INDEX = "verifiers_index"
_FREE: list[str] = []
_NUMBERS = itertools.count()


class OneAnswer(Harness[HarnessConfig]):  # type: ignore[misc]
    """Sends the conversation and returns the answer. Tool servers are not connected."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _wire(prompt or [])
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        async with httpx.AsyncClient(timeout=None) as client:  # the agent's own timeout ends it
            reply = await client.post(
                f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )  # fmt: skip
        return ProgramResult(0 if reply.is_success else 1, "", "" if reply.is_success else reply.text)


def _wire(messages: list[Any]) -> list[dict[str, Any]]:
    return [message_to_wire(message) for message in messages]


def rows(taskset: str, env: str = "", options: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The tasks as rows to train on: data for `plaudit.train(data=...)`, or lines of a .jsonl file."""
    for index, task in enumerate(_tasks(taskset, env, json.dumps(options or {}))):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else " ".join(str(each["content"]) for each in _wire(prompt or []))
        yield {"prompt": text or f"task {index}", INDEX: index}


async def play(
    prompt: Prompt, base_url: str, api_key: str, taskset: str, env: str = "", options: dict[str, Any] | None = None
) -> float:
    """One episode of the row's task; its reward is the mean over the agents that the policy played.

    taskset  the id by which verifiers finds it: a module that exports its Taskset, and its Env where it has one
    env      the id of the environment, unless it is the taskset's own or the one for a single agent
    options  further keys of the taskset's config
    """
    task = _tasks(taskset, env, json.dumps(options or {}))[prompt.extra[INDEX]]
    environment = _environment(taskset, env, options or {})
    # verifiers takes keys from the environment alone. Variables are used again, never deleted: another thread that
    # copies the environment meanwhile would miss them.
    variable = _FREE.pop() if _FREE else f"PLAUDIT_AGENT_{next(_NUMBERS)}"
    os.environ[variable] = api_key
    try:
        context = ModelContext("policy", EvalClientConfig(base_url=base_url, api_key_var=variable))
        async with environment.serving():
            episode = await environment.run_episode(task, context)
    finally:
        _FREE.append(variable)
    played = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok or not played:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "no agent has played")
    return sum(float(trace.reward) for trace in played) / len(played)


@cache
def _tasks(taskset: str, env: str, options: str) -> tuple[Task, ...]:
    return tuple(_environment(taskset, env, json.loads(options)).taskset)


def _environment(taskset: str, env: str, options: dict[str, Any]) -> Env[Any]:
    kind = environment_class(taskset, env)
    config: Any = concrete_type(kind, EnvConfig, origin=Env) or EnvConfig
    seat = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    seats = dict.fromkeys(agent_config_fields(config()), seat)
    return kind(config.model_validate({"id": env, "taskset": {"id": taskset, **options}, **seats}))
