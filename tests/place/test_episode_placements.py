"""Episodes with the engine in another process."""

import os
import signal
from typing import Any

from plaudit.config.prompting import SamplingTable
from plaudit.config.rl import EnvironmentTable
from plaudit.core import Engine
from plaudit.core.proof.support import inspect
from plaudit.models import encode, load_policy
from plaudit.records import Prompt, Sample, Turn
from plaudit.train.agents.episodes import Episodes
from plaudit.worlds.calculator import Calculator
from tests.place.rollout_host import RolloutHost
from tests.place.test_rollout_faults import remote

TOKENIZER = load_policy("sums-policy").tokenizer
SAMPLING = SamplingTable(max_tokens=64, stop=("=",))
PROMPTS = [
    Prompt(text, (TOKENIZER.bos_token_id, *encode(TOKENIZER, text)), "0") for text in ("7+8+4=", "1+2+3+4=", "5+6=")
]


def play(engine: Any, module: Any, make: Any = Calculator, **table: Any) -> list[Sample]:
    options = EnvironmentTable(name="calculator", max_turns=12, timeout=60.0, **table)
    positions = inspect(module).max_positions
    return Episodes(engine, TOKENIZER, positions, SAMPLING, options, 1, make=make).play(PROMPTS, 3, "s")


def test_episodes_with_a_remote_engine_match_a_local_engine(rollout_host: RolloutHost) -> None:
    engine, fleet, module = remote(rollout_host)
    try:
        fleet.publish(0)
        local = Engine(module, TOKENIZER)
        expected = play(local, module, lockstep=True)
        assert play(fleet, module, lockstep=True) == expected, "in lockstep to the bit"
        concurrent = play(fleet, module)
        assert [(s.token_ids, s.mask, s.text) for s in concurrent] == [(s.token_ids, s.mask, s.text) for s in expected]
        assert engine.outstanding == 0
    finally:
        fleet.close()


def test_a_worker_that_dies_during_episodes_is_replaced(rollout_host: RolloutHost) -> None:
    _, fleet, module = remote(rollout_host)
    killed: list[int] = []

    class Deadly(Calculator):
        def step(self, response: str) -> Turn:
            if not killed:
                killed.append(rollout_host.workers[-1].pid)
                os.kill(killed[0], signal.SIGKILL)
            return super().step(response)

    try:
        fleet.publish(0)
        actual = play(fleet, module, Deadly)
        assert fleet.restarts == 1
        expected = play(Engine(module, TOKENIZER), module)
        assert [(s.token_ids, s.mask) for s in actual] == [(s.token_ids, s.mask) for s in expected]
    finally:
        fleet.close()
