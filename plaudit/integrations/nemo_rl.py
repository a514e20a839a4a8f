"""NeMo RL: an environment with rewards from a server, `plaudit_client.integrations.nemo_rl.RewardEnvironment`.

It imports nemo_rl, ray and torch, like NeMo RL's own environments; `register()` registers it under a name. Its keys
are those of `env.NAME` in NeMo RL's configuration:

        url, model  the server and its model; by default PLAUDIT_URL and PLAUDIT_MODEL (others: `connection.py`)
        prompts     the form of prompts after the data's processor: `rendered`, text with a chat template's control
                    strings, as from NeMo RL's own processors; or `messages`, plain contents for the server's template
        end         rendered: text appended to a response, because NeMo RL strips the EOS token; e.g. `"<|im_end|>"`
        prompt_key  instead of `prompts`: the key of the prompt in extra_env_info, as text or messages
        truth_key   the key of the truth in extra_env_info, for rules; default: ground_truth
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import register_env

from plaudit.errors import ConfigError
from plaudit.integrations.connection import from_environment, values
from plaudit.records import Item

KEYS = ("url", "model", "prompts", "end", "prompt_key", "truth_key")
PROMPTS = ("rendered", "messages")


def register(name: str = "plaudit") -> None:
    """Call before NeMo RL builds its environments: `env.NAME` in its configuration then selects this one."""
    place = f"{__name__}.RewardEnvironment"
    ACTOR_ENVIRONMENT_REGISTRY[place] = PY_EXECUTABLES.SYSTEM
    register_env(name, place)


@ray.remote
class RewardEnvironment(EnvironmentInterface):  # type: ignore[misc]
    """One turn: the reward of each conversation's last answer ends its episode. Raises if a reward is missing, because
    NeMo RL would train on any number."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        _check(config)
        self.config = config
        self.connection = from_environment(config.get("url"), config.get("model"))

    async def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Mapping[str, Any] | None]
    ) -> Any:
        """A coroutine: Ray runs many concurrently, and the server batches concurrent requests."""
        items = [_item(self.config, log, about or {}) for log, about in zip(message_log_batch, metadata, strict=True)]
        rewards = values(await self.connection.scores_soon(items), "conversation")
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"Environment: {reward}"} for reward in rewards],
            metadata=list(metadata),
            next_stop_strings=[None] * len(rewards),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(len(rewards), dtype=torch.bool),
            answers=[str(log[-1]["content"]) for log in message_log_batch],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        rewards = batch["total_reward"] if "total_reward" in batch else batch.get("rewards")
        if rewards is None or not len(rewards):
            return batch, {}
        named = {"mean": rewards.mean(), "min": rewards.min(), "max": rewards.max()}
        return batch, {f"plaudit/{name}_reward": float(value) for name, value in named.items()}


def _check(config: Mapping[str, Any]) -> None:
    if unknown := sorted(set(config) - set(KEYS)):
        raise ConfigError(f"the environment's configuration has {unknown[0]!r}; expected {', '.join(KEYS)}")
    prompts = config.get("prompts")
    if (prompts is None) == (config.get("prompt_key") is None) or prompts not in (None, *PROMPTS):
        raise ConfigError(
            f"prompts is {prompts!r} and prompt_key is {config.get('prompt_key')!r}; set one: prompts to rendered or "
            "messages, the form that the data's processor produces, or prompt_key to a key of extra_env_info"
        )


def _item(config: Mapping[str, Any], log: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> Item:
    truth = about.get(config.get("truth_key") or "ground_truth")
    key = config.get("prompt_key")
    if key is not None:
        if key not in about:
            raise ConfigError(f"extra_env_info has no {key!r}, the prompt_key; it has {sorted(about)}")
        prompt = about[key] if isinstance(about[key], str) else tuple(dict(message) for message in about[key])
        return Item(prompt=prompt, response=str(log[-1]["content"]), truth=truth)
    if config["prompts"] == "rendered":
        return Item(text="".join(str(message["content"]) for message in log) + (config.get("end") or ""), truth=truth)
    plain = tuple({"role": message["role"], "content": message["content"]} for message in log)
    if len(plain) == 2 and plain[0]["role"] == "user" and plain[1]["role"] == "assistant":
        # separated, so that rules can read it
        return Item(prompt=plain[:1], response=str(plain[1]["content"]), truth=truth)
    return Item(messages=plain, truth=truth)
