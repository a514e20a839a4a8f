"""NeMo RL's environment, called as NeMo RL calls it.

NeMo RL is installed from its repository with packages that need a GPU, so INTERFACE reproduces the interface that an
environment sees, from its source of 2026-08-22. Ray is the real package.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plaudit.errors import ConfigError, ServerError
from tests.serve.process import ServerProcess
from tests.serve.test_native import chains

ray = pytest.importorskip("ray", reason="ray is installed by `make slow`")
pytestmark = pytest.mark.slow
PAIRS = chains(6)
INTERFACE = {
    "environments/interfaces.py": """
        import abc
        from typing import Generic, NamedTuple, TypeVar
        MetadataT = TypeVar("MetadataT")

        class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
            observations: list
            metadata: list
            next_stop_strings: list
            rewards: object
            terminateds: object
            answers: list

        class EnvironmentInterface(abc.ABC, Generic[MetadataT]):
            @abc.abstractmethod
            def step(self, message_log_batch, metadata): ...
            @abc.abstractmethod
            def global_post_process_and_metrics(self, batch): ...
    """,
    "environments/utils.py": """
        ENV_REGISTRY = {}

        def register_env(env_name, actor_class_fqn):
            if env_name in ENV_REGISTRY:
                raise ValueError(f"Env name {env_name} already registered")
            ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}
    """,
    "distributed/ray_actor_environment_registry.py": "ACTOR_ENVIRONMENT_REGISTRY = {}",
    "distributed/virtual_cluster.py": """
        import sys

        class PY_EXECUTABLES:
            SYSTEM = sys.executable
    """,
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """plaudit.integrations.nemo_rl, imported with the package nemo_rl of INTERFACE."""
    root = tmp_path_factory.mktemp("interface")
    for name, code in INTERFACE.items():
        file = root / "nemo_rl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(code), encoding="utf-8")
    before = set(sys.modules)
    sys.path.insert(0, str(root))
    try:
        yield importlib.import_module("plaudit.integrations.nemo_rl")
    finally:
        sys.path.remove(str(root))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "nemo_rl" or name == "plaudit.integrations.nemo_rl":
                del sys.modules[name]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(None) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[float]:
    items = server.rewards([{"prompt": p, "responses": [r]} for p, r in PAIRS]).json()["items"]
    return [item["scores"][0] for item in items]


def logs(prefix: str = "") -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": prefix + p}, {"role": "assistant", "content": r}] for p, r in PAIRS]


def environment(package: Any, **config: Any) -> Any:
    """An instance of the class behind the Ray actor, without an actor."""
    return package.RewardEnvironment.__ray_metadata__.modified_class(config)


def test_rewards_equal_those_of_the_server(package: Any, server: ServerProcess, expected: list[float]) -> None:
    metadata = [{"ground_truth": "7", "question": p} for p, _ in PAIRS]
    environments = {
        "rendered": (environment(package, url=server.url, prompts="rendered", end="<eos>"), logs("<bos>")),
        "prompt_key": (environment(package, url=server.url, model="sums", prompt_key="question"), logs("changed")),
    }
    for name, (env, batch) in environments.items():
        returned = asyncio.run(env.step(batch, metadata))
        assert returned._fields == (
            "observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers",
        )  # fmt: skip
        assert returned.rewards.tolist() == pytest.approx(expected, abs=5e-5), name
        assert returned.rewards.shape == returned.terminateds.shape == (len(PAIRS),)
        assert returned.terminateds.all()
        assert returned.metadata == metadata
        assert returned.answers == [r for _, r in PAIRS]
        assert {entry["role"] for entry in returned.observations} == {"environment"}
    batch = {"total_reward": torch.tensor([1.0, 3.0])}
    assert env.global_post_process_and_metrics(batch) == (
        batch, {"plaudit/mean_reward": 2.0, "plaudit/min_reward": 1.0, "plaudit/max_reward": 3.0},
    )  # fmt: skip


def test_conversations_are_sent_as_messages(package: Any) -> None:
    truth = {"ground_truth": "7"}
    single = package._item({"prompts": "messages"}, logs()[0], truth)
    assert (single.prompt, single.response, single.truth) == ((logs()[0][0],), PAIRS[0][1], "7")
    turns = [
        *logs()[0],
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes", "token_ids": [1]},
    ]
    several = package._item({"prompts": "messages", "truth_key": "other"}, turns, {"other": 3})
    assert several.messages == (*logs()[0], turns[2], {"role": "assistant", "content": "Yes"})
    assert several.truth == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "prompts is None and prompt_key is None; set one"),
        ({"prompts": "text"}, "prompts is 'text'"),
        ({"prompts": "rendered", "prompt_key": "q"}, "set one"),
        ({"prompts": "rendered", "modle": "x"}, "has 'modle'; expected url, model"),
    ],
)
def test_invalid_configuration_is_rejected(package: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment(package, **config)


def test_conversation_without_a_reward_raises(package: Any, server: ServerProcess) -> None:
    env = environment(package, url=server.url, prompt_key="question")
    with pytest.raises(ConfigError, match=r"extra_env_info has no 'question'.*\['answer'\]"):
        asyncio.run(env.step(logs()[:1], [{"answer": 1}]))
    with pytest.raises(ServerError, match=r"no reward for conversation\[0\]: too_long"):
        asyncio.run(env.step(logs()[:1], [{"question": "1+" * 300}]))


def test_environment_is_registered_by_name(package: Any) -> None:
    utils = importlib.import_module("nemo_rl.environments.utils")
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    package.register()
    path = "plaudit.integrations.nemo_rl.RewardEnvironment"
    assert {"plaudit": {"actor_class_fqn": path}} == utils.ENV_REGISTRY
    assert {path: sys.executable} == registry.ACTOR_ENVIRONMENT_REGISTRY
    assert hasattr(package.RewardEnvironment, "options")  # NeMo RL creates an actor with .options(...).remote(config)
    with pytest.raises(ValueError, match="already registered"):
        package.register()
