"""Turns with an environment: exactly the sampled tokens, correct masks and rewards, and failures kept separate."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from plaudit.config import RlRecipe, load_recipe
from plaudit.config.prompting import SamplingTable
from plaudit.config.rl import EnvironmentTable
from plaudit.core import Engine, SamplingParams
from plaudit.core.proof.support import inspect
from plaudit.errors import ConfigError
from plaudit.models import encode, load_policy
from plaudit.records import Batch, ItemError, Prompt, Sample, Turn
from plaudit.train.agents.environment import load_environment
from plaudit.train.agents.episodes import Episodes
from plaudit.train.agents.observation import ObservationEncoder
from plaudit.train.agents.parallel_calls import Overdue, ParallelCalls
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.advantages import estimate, shaped, usable
from plaudit.train.policy.experience import Experience, flat, own_tokens
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.rollouts.batch_metrics import batch_metrics
from plaudit.train.rollouts.rollouts import Rollouts
from plaudit.train.rollouts.scorer import Scorer
from plaudit.train.rollouts.sources import open_prompts
from plaudit.train.run.clock import Clock
from plaudit.worlds.calculator import Calculator

SAMPLING = SamplingTable(max_tokens=64, stop=("=",))
TABLE = EnvironmentTable(name="calculator", max_turns=12, timeout=5.0)
LOADED = load_policy("sums-policy", "float32", "cpu")
TOKENIZER = LOADED.tokenizer
RECIPE = Path("sums-tool")


def prompt(text: str) -> Prompt:
    return Prompt(text, (TOKENIZER.bos_token_id, *encode(TOKENIZER, text)), "0")


POSITIONS = inspect(LOADED.module).max_positions
PROMPTS = [prompt(text) for text in ("7+8+4=", "1+2+3+4=", "9+9+9=", "5+6=", "8+1+7+2+3=")]


def engine(**options: Any) -> Engine:
    return Engine(LOADED.module, TOKENIZER, **options)


class ScriptedEngine:
    """An engine of another process that returns scripted turns and records their contexts."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns = list(turns)
        self.contexts: list[list[int]] = []
        self.version = 0

    def generate(self, prompts: Any, params: Any) -> list[Sample]:
        (context,), (param,) = prompts, params
        assert isinstance(param, SamplingParams)
        self.contexts.append(context)
        ids = tuple(encode(TOKENIZER, self.turns.pop(0)))[: param.max_tokens]
        logprobs = tuple(-0.1 * (i + 1) for i in range(len(ids)))
        reason: Any = "length" if len(ids) == param.max_tokens else "stop"
        return [
            Sample(tuple(context), ids, "", logprobs, logprobs, (self.version,) * len(ids), (1,) * len(ids), reason)
        ]


class Scripted:
    """An environment that returns scripted turns and records its inputs."""

    def __init__(self, *turns: Any) -> None:
        self.turns = list(turns)
        self.heard: list[str] = []

    def reset(self, prompt: Prompt) -> None:
        self.heard.append(prompt.text)

    def step(self, response: str) -> Turn:
        self.heard.append(response)
        turn = self.turns.pop(0)
        if isinstance(turn, BaseException):
            raise turn
        if callable(turn):
            turn = turn()
        return turn  # type: ignore[no-any-return]


def scripted(
    texts: Sequence[str], turns: Sequence[Any], sampling: SamplingTable = SAMPLING, table: EnvironmentTable = TABLE
) -> tuple[Sample, Scripted, ScriptedEngine]:
    world, scripted_engine = Scripted(*turns), ScriptedEngine(texts)
    (sample,) = Episodes(scripted_engine, TOKENIZER, POSITIONS, sampling, table, 1, make=lambda: world).play(
        [prompt("7+8=")], 1, "s"
    )
    return sample, world, scripted_engine


def ids(text: str) -> tuple[int, ...]:
    return tuple(encode(TOKENIZER, text))


# Contents of a sample


def test_two_turns_by_hand() -> None:
    sample, world, scripted_engine = scripted(["7+8=", "#15"], [Turn("15;", 0.25), Turn("never read", 0.5, done=True)])
    assert world.heard == ["7+8=", "7+8=", "#15"]
    assert sample.token_ids == ids("7+8=") + ids("15;") + ids("#15")
    assert sample.text == "7+8=15;#15"
    assert sample.mask == (1, 1, 1, 1, 0, 0, 0, 1, 1, 1)
    assert sample.token_rewards == (0, 0, 0, 0.25, 0, 0, 0, 0, 0, 0.5)
    assert sample.logprobs == (-0.1, -0.2, -0.30000000000000004, -0.4, 0, 0, 0, -0.1, -0.2, -0.30000000000000004)
    assert sample.raw_logprobs == sample.logprobs
    assert sample.versions == (0,) * 10
    assert (sample.finish_reason, sample.extra["turns"], sample.extra["end"]) == ("stop", 2, "done")
    first = list(prompt("7+8=").token_ids or ())
    assert scripted_engine.contexts == [first, [*first, *sample.token_ids[:7]]], (
        "the tokens as they were, none written anew"
    )


class Hours:
    """A time module whose clock the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Marked(Clock):
    """A clock that signals while a caller waits for tools."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    @contextmanager
    def part(self, name: str, of: str) -> Iterator[None]:
        with super().part(name, of):
            self.waiting.set()
            yield
            self.waiting.clear()


def test_tool_time_is_measured_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an engine step takes 2 s, a tool call 5 s and a reset 7 s; an evaluation is one phase."""
    time_module, responses = Hours(), list[str]()
    monkeypatch.setattr("plaudit.train.run.clock.time", time_module)
    clock = Marked()

    def advance(seconds: float) -> None:
        assert clock.waiting.wait(30)
        time_module.now += seconds

    class Slow(Calculator):
        def reset(self, prompt: Prompt) -> None:
            advance(7)

        def step(self, response: str) -> Turn:
            responses.append(response)
            advance(5)
            return super().step(response)

    class Working(Engine):
        steps = 0

        def step(self) -> Any:
            time_module.now += 2
            self.steps += 1
            return super().step()

    recipe = load_recipe(RECIPE, ["train.prompts_per_step=1", "train.minibatches=1"])
    assert isinstance(recipe, RlRecipe)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"samples_per_prompt": 1})})
    working = Working(LOADED.module, TOKENIZER)
    player = Episodes(working, TOKENIZER, POSITIONS, SAMPLING, TABLE, 1, make=Slow, clock=clock)
    prompts = open_prompts(recipe.data, TOKENIZER, 1)
    scorer = Scorer(recipe.reward)
    try:
        rollouts = Rollouts(recipe, player, prompts, scorer, clock)
        rollouts.next(0, 0)
        split = clock.split()
        assert len(responses) > 2
        assert (split["time/generate"], split["time/tools"]) == (2 * working.steps, 7 + 5 * len(responses))
        assert split["time/step"] == time_module.now == split["time/generate"] + split["time/tools"]
        started = time_module.now
        with clock("evaluate"):
            rollouts.heldout(prompts.heldout()[:1], 1, "heldout")
        split = clock.split()
        assert split == {"time/evaluate": time_module.now - started, "time/step": time_module.now - started}
    finally:
        scorer.close()


def test_each_turn_records_its_weight_version() -> None:
    scripted_engine = ScriptedEngine(["7+8=", "#15"])

    def turn_after_publication() -> Turn:
        scripted_engine.version = 5
        return Turn("15;")

    world = Scripted(turn_after_publication, Turn(done=True))
    (sample,) = Episodes(scripted_engine, TOKENIZER, POSITIONS, SAMPLING, TABLE, 1, make=lambda: world).play(
        [prompt("7+8=")], 1, "s"
    )
    assert sample.versions == (0,) * 7 + (5,) * 3


def test_an_observation_never_becomes_control_tokens() -> None:
    sample, _, _ = scripted(["7+8=", "#1"], [Turn("<eos>"), Turn(done=True)])
    assert TOKENIZER.eos_token_id not in sample.token_ids


@pytest.mark.parametrize(
    ("max_tokens", "text", "turns", "end"),
    [
        (4, "7+8=", 1, "tokens"),  # the policy's turn uses all of it
        (7, "7+8=", 1, "tokens"),  # after the observation no token would be left
        (8, "7+8=15;#", 2, "tokens"),  # one token is left
        (64, "7+8=15;#15", 2, "done"),
    ],
)  # fmt: skip
def test_token_budget_covers_own_and_observed_tokens(max_tokens: int, text: str, turns: int, end: str) -> None:
    sampling = SAMPLING.model_copy(update={"max_tokens": max_tokens})
    sample, _, _ = scripted(["7+8=", "#15"], [Turn("15;", 0.5), Turn(done=True)], sampling)
    assert (sample.text, sample.extra["turns"], sample.extra["end"]) == (text, turns, end)
    assert sample.finish_reason == ("stop" if end == "done" else "length")
    assert len(sample.token_ids) <= max_tokens
    assert sample.token_rewards is not None
    assert sample.token_rewards[3] == (0.0 if max_tokens == 4 else 0.5), "a turn that was cut off is not answered"


def test_turn_rewards_count_in_the_spread_of_a_group() -> None:
    samples = [
        replace(scripted(["7+8=", "#15"], [Turn("15;", bonus), Turn(done=True)])[0], reward=1.0, group=0, index=i)
        for i, bonus in enumerate((0.0, 0.5))
    ]
    metrics = batch_metrics(samples)
    assert (metrics["turns/mean"], metrics["turns/reward"], metrics["reward/zero_std_groups"]) == (2.0, 0.25, 0.0)


def test_turns_are_limited() -> None:
    table = TABLE.model_copy(update={"max_turns": 2})
    sample, _, _ = scripted(["7+8=", "1+1=", "#2"], [Turn("15;"), Turn("2;", 1.0)], table=table)
    assert (sample.text, sample.finish_reason, sample.extra["end"]) == ("7+8=15;1+1=", "length", "turns")
    assert sample.token_rewards is not None
    assert sample.token_rewards[-1] == 1.0


@pytest.mark.parametrize(
    ("turn", "type", "message"),
    [
        (ValueError("no such tool\nat all"), "environment_failed", "ValueError: no such tool at all"),
        (None, "environment_failed", "TypeError: gave NoneType, expected a Turn"),
        (Turn(b"15;"), "environment_failed", "TypeError: the observation is of type bytes, expected str"),  # type: ignore[arg-type]
        (SystemExit(1), "environment_failed", "SystemExit: 1"),
        (Turn(reward=float("nan")), "environment_failed", "ValueError: the reward is nan, expected a finite number"),
        (Turn("\ud800"), "environment_failed", "RequestError: the text is not Unicode: lone surrogate '\\ud800' at 0"),
        (lambda: time.sleep(30), "timeout", "no response within 0.2 s"),
    ],
)
def test_failing_environment_fails_only_its_own_sample(turn: Any, type: str, message: str) -> None:
    table = TABLE.model_copy(update={"timeout": 0.2} if type == "timeout" else {})
    sample, _, _ = scripted(["7+8=", "#15"], [turn, Turn(done=True)], table=table)
    assert sample.finish_reason == "error"
    assert sample.error == ItemError(type, f"Scripted.step: {message}")
    assert sample.token_ids == ids("7+8="), "what it said until then is kept"
    assert usable([replace(sample, reward=1.0)], grouped=False) == ()
    assert batch_metrics([sample])["reward/errors"] == 1.0


def test_other_environments_continue_when_one_fails() -> None:
    resets: list[str] = []

    class Moody(Calculator):
        def reset(self, prompt: Prompt) -> None:
            resets.append(prompt.text)
            self.prompt = prompt.text

        def step(self, response: str) -> Turn:
            if self.prompt == PROMPTS[1].text:
                raise RuntimeError("not today")
            return super().step(response)

    expected = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS, 1, "s")
    samples = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1, make=Moody).play(PROMPTS, 1, "s")
    assert sorted(resets) == sorted(prompt.text for prompt in PROMPTS), "one environment for each sample"
    assert [sample.error is not None for sample in samples] == [False, True, False, False, False]
    assert comparable([*samples[:1], *samples[2:]]) == comparable([*expected[:1], *expected[2:]])


# Closing


class Door(Calculator):
    """Counts how often it is closed; `fails` names the call that raises, `hangs` the one that blocks."""

    opened: ClassVar[list[Door]]
    fails = hangs = ""

    def __init__(self) -> None:
        self.closes = 0
        self.opened.append(self)
        self._act("init")

    def _act(self, name: str) -> None:
        if name == self.fails:
            raise OSError("no space")
        if name == self.hangs:
            time.sleep(60)

    def reset(self, prompt: Prompt) -> None:
        self._act("reset")

    def step(self, response: str) -> Turn:
        self._act("step")
        return super().step(response)

    def close(self) -> None:
        self.closes += 1
        self._act("close")


@pytest.mark.parametrize(
    ("fails", "hangs", "error"),
    [
        ("", "", None),
        ("init", "", "environment.reset: OSError: no space"),
        ("reset", "", "Ajar.reset: OSError: no space"),
        ("step", "", "Ajar.step: OSError: no space"),
        ("close", "", "Ajar.close: OSError: no space"),
        ("", "step", "Ajar.step: no response within 0.2 s"),
        ("", "close", "Ajar.close: no response within 0.2 s"),
    ],
)
def test_every_environment_is_closed_once(fails: str, hangs: str, error: str | None) -> None:
    class Ajar(Door):
        opened: ClassVar[list[Door]] = []

    Ajar.fails, Ajar.hangs = fails, hangs
    table = TABLE.model_copy(update={"timeout": 0.2} if hangs else {})
    samples = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, table, 1, make=Ajar).play(PROMPTS, 2, "s")
    assert len(Ajar.opened) == len(samples) == 2 * len(PROMPTS)
    assert [each.closes for each in Ajar.opened] == [0 if fails == "init" else 1] * len(samples)
    assert {s.error.message if s.error else None for s in samples} == {error}


def test_environments_are_closed_when_a_rollout_is_interrupted() -> None:
    class Ajar(Door):
        opened: ClassVar[list[Door]] = []

    class Interrupted(Engine):
        def step(self) -> Any:
            if self.stats().steps == 5:
                raise KeyboardInterrupt
            return super().step()

    with pytest.raises(KeyboardInterrupt):
        Episodes(Interrupted(LOADED.module, TOKENIZER), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1, make=Ajar).play(
            PROMPTS, 2, "s"
        )
    assert [each.closes for each in Ajar.opened] == [1] * 2 * len(PROMPTS)


def test_episode_timeout_ends_a_response() -> None:
    class Ajar(Door):
        opened: ClassVar[list[Door]] = []

    class Late(Ajar):
        def step(self, response: str) -> Turn:
            time.sleep(0.3)
            return Turn("")

    used_engine = engine()
    table = TABLE.model_copy(update={"episode_timeout": 0.5, "max_turns": 1000})
    long_sampling = SAMPLING.model_copy(update={"max_tokens": 400})
    (sample,) = Episodes(used_engine, TOKENIZER, POSITIONS, long_sampling, table, 1, make=Late).play(
        PROMPTS[:1], 1, "s"
    )
    assert (sample.finish_reason, sample.extra["end"]) == ("error", "time")
    assert sample.error == ItemError("timeout", "the response took longer than environment.episode_timeout = 0.5 s")
    assert [each.closes for each in Ajar.opened] == [1]
    assert not used_engine.open_requests


def test_long_observation_is_truncated_with_a_notice() -> None:
    table = TABLE.model_copy(update={"max_observation": 3})
    sample, _, _ = scripted(["7+8=", "#15"], [Turn("15;" * 350_000), Turn(done=True)], table=table)
    assert sample.token_ids == (*ids("7+8="), *ids("15;\n[cut: 3 of 1050000 characters]\n"), *ids("#15"))
    assert EnvironmentTable(name="calculator").max_observation == 65536


# Samples do not depend on other episodes


def comparable(samples: Sequence[Sample]) -> list[tuple[Any, ...]]:
    return [(s.token_ids, s.mask, s.finish_reason, s.text, s.token_rewards) for s in samples]


def test_sample_does_not_depend_on_its_batch() -> None:
    together = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS, 4, "s")
    assert [(s.group, s.index) for s in together] == [(g, i) for g in range(len(PROMPTS)) for i in range(4)]
    assert len({s.token_ids for s in together[:4]}) > 1, "samples of a prompt differ"
    fewer = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS[:1], 2, "s")
    assert comparable(fewer) == comparable(together[:2])
    for one, other in zip(fewer, together, strict=False):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert comparable(Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 2).play(PROMPTS, 4, "s")) != comparable(
        together
    )


def test_slow_tool_neither_blocks_nor_changes_other_samples() -> None:
    """The first sample's tool returns only when all other samples are done."""
    finished, others_finished = set[str](), threading.Event()

    class Slow(Calculator):
        def reset(self, prompt: Prompt) -> None:
            self.prompt = prompt.text

        def step(self, response: str) -> Turn:
            if self.prompt == PROMPTS[0].text:
                assert others_finished.wait(30)
            turn = super().step(response)
            if turn.done:
                finished.add(self.prompt)
            if finished == {prompt.text for prompt in PROMPTS[1:]}:
                others_finished.set()
            return turn

    greedy = SAMPLING.model_copy(update={"temperature": 0.0})
    table = TABLE.model_copy(update={"timeout": 60.0})
    used_engine = engine()
    slow = Episodes(used_engine, TOKENIZER, POSITIONS, greedy, table, 1, make=Slow).play(PROMPTS, 1, "s")
    assert others_finished.is_set()
    assert [sample.error for sample in slow] == [None] * len(PROMPTS)
    lockstep = table.model_copy(update={"lockstep": True})
    rounds = Episodes(engine(), TOKENIZER, POSITIONS, greedy, lockstep, 1).play(PROMPTS, 1, "s")
    assert comparable(slow) == comparable(rounds)
    assert not used_engine.open_requests
    used_engine.check()


def test_lockstep_rollouts_are_equal_bit_for_bit() -> None:
    class Uneven(Calculator):
        def step(self, response: str) -> Turn:
            time.sleep(random.random() / 100)
            return super().step(response)

    table = TABLE.model_copy(update={"lockstep": True})
    even, uneven = (
        Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, table, 1, make=kind).play(PROMPTS, 4, "s")
        for kind in (Calculator, Uneven)
    )
    assert even == uneven


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("the device is gone")])
def test_interrupted_rollout_leaves_no_requests_in_the_engine(stop: BaseException) -> None:
    class Failing(Engine):
        steps = 0

        def step(self) -> Any:
            self.steps += 1
            if self.steps == 5:
                raise stop
            return super().step()

    failing = Failing(LOADED.module, TOKENIZER)
    other = failing.submit("1+1=", SamplingParams(max_tokens=2))
    player = Episodes(failing, TOKENIZER, POSITIONS, SAMPLING, TABLE, 1)
    with pytest.raises(type(stop)):
        player.play(PROMPTS, 4, "s")
    assert failing.open_requests <= {other}, "only what was there before"
    failing.check()
    again = player.play(PROMPTS, 1, "s")
    expected = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS, 1, "s")
    assert comparable(again) == comparable(expected)


def test_neither_cache_nor_batching_changes_the_samples() -> None:
    large = engine()
    samples = Episodes(large, TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS, 4, "s")
    assert large.stats().tokens_shared > 0, "later turns find the earlier ones in the cache"
    small = engine(budget=16, max_running=2, kv_bytes=8 * large.backend.block_size * large.decoder.token_bytes())
    again = Episodes(small, TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS, 4, "s")
    assert small.stats().evictions > 0, "there was no room to keep them"
    assert comparable(again) == comparable(samples)
    large.check()
    small.check()


def test_behaviour_logprobs_equal_those_of_one_forward_pass() -> None:
    samples = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS, 2, "s")
    for sample in samples:
        (logprobs,) = engine().logprobs([[*sample.prompt_ids, *sample.token_ids]])
        response_logprobs = logprobs[len(sample.prompt_ids) - 1 :].tolist()
        expected = [value if own else 0.0 for value, own in zip(response_logprobs, sample.mask, strict=True)]
        assert sample.raw_logprobs == pytest.approx(expected, abs=1e-4)


def test_the_calculator_adds() -> None:
    world = Calculator()
    assert world.step("7+8=") == Turn("15;")
    assert world.step("#19").done
    assert world.step("7+8=9=").done
    samples = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS, 4, "s")
    for sample in samples:
        for step in sample.text.split(";")[:-1]:
            left, _, result = step.partition("=")
            assert sum(map(int, left.split("+"))) == int(result), "every sum is the calculator's, so it is right"
    assert sum(sample.finish_reason == "stop" for sample in samples) > len(samples) // 2


# Training


def tool_recipe(**train: Any) -> RlRecipe:
    sets = [f"train.{name}={value}" for name, value in train.items()]
    recipe = load_recipe(
        RECIPE, [*sets, "algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3", "algorithm.aggregate=token"]
    )
    assert isinstance(recipe, RlRecipe)
    return recipe


def played_and_scored() -> tuple[Sample, ...]:
    samples = Episodes(engine(), TOKENIZER, POSITIONS, SAMPLING, TABLE, 1).play(PROMPTS[:2], 4, "s")
    return tuple(replace(sample, reward=float(i * i % 5)) for i, sample in enumerate(samples))


def test_masked_tokens_are_excluded_from_advantages_loss_and_denominators() -> None:
    recipe, samples = tool_recipe(), played_and_scored()
    own = own_tokens(samples)
    assert 0 < int(own.sum()) < len(own)
    rewards = shaped(recipe.algorithm.shaping, samples, 64, None)
    policy = Policy(
        engine().decoder, recipe.algorithm, temperature=1.0, max_tokens=64, micro_batch_tokens=4096
    )  # fmt: skip
    old = policy.logprobs(samples)
    estimated = estimate(recipe.algorithm, samples, rewards, kl_coef=0.1, old=old, reference=old - 1)
    assert not estimated.advantages[~own].any()
    assert estimated.advantages[own].all()
    experience = Experience(samples, own, flat(samples, "logprobs"), estimated.advantages, old=old, reference=old - 0.5)

    def gradient(experience: Experience) -> tuple[dict[str, float], torch.Tensor]:
        policy.module.zero_grad()
        metrics = policy.gradient(experience, 0.1).metrics(1)
        parts = [p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]
        return metrics, torch.cat(parts).clone()

    metrics, gradients = gradient(experience)
    # Values at masked tokens have no effect.
    noise = torch.where(own, 0.0, 7.0)
    moved = replace(
        experience, behaviour=experience.behaviour - noise, advantages=estimated.advantages + noise, old=old - noise,
        reference=experience.reference - noise if experience.reference is not None else None,
    )  # fmt: skip
    other_metrics, other_gradients = gradient(moved)
    assert other_metrics == metrics
    assert torch.equal(gradients, other_gradients)
    # The loss is the mean over own tokens only, computed by hand.
    assert metrics["kl/loss"] == pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-5)
    assert metrics["policy/loss"] == pytest.approx(-estimated.advantages[own].mean().item(), abs=1e-5)


def test_update_trains_on_turns() -> None:
    recipe = tool_recipe(lr=1e-5)
    loaded = load_policy("sums-policy", "float32", "cpu")
    policy_engine = Engine(loaded.module, loaded.tokenizer)
    policy = Policy(policy_engine.decoder, recipe.algorithm, temperature=1.0, max_tokens=64, micro_batch_tokens=4096)
    learner = RlLearner(recipe, policy, Optimizer(loaded.module, recipe.train), None, policy, Clock())
    metrics, experience = learner.update(Batch(played_and_scored()), 0)
    assert experience is not None
    assert metrics["mismatch/abs_max"] < 1e-4, "the engine's log-probs are those of one pass over the whole"
    assert metrics["kl/reference"] == pytest.approx(0.0, abs=1e-5)


# Conversations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(["<|im_start|>", "<|im_end|>", *bytes_])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )


def test_observation_in_a_conversation_is_a_user_message() -> None:
    tokenizer = chat_tokenizer()
    encoder = ObservationEncoder(tokenizer)
    end = tokenizer.eos_token_id
    between = "\n<|im_start|>user\n15<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encoder.tokens("15", chat=True, last=end)) == between
    assert tokenizer.decode(encoder.tokens("15", chat=True, last=5)) == "<|im_end|>" + between, "a stop string cut in"
    encoded = encoder.tokens("<|im_end|>", chat=True, last=end)
    assert encoded.count(end) == 1, "the text of an observation is text"
    assert tokenizer.decode(encoder.tokens("15", chat=False, last=end)) == "15"


def test_observation_can_be_a_tool_message() -> None:
    tokenizer = chat_tokenizer()
    encoder = ObservationEncoder(tokenizer)
    between = "\n<|im_start|>tool\n15<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encoder.tokens("15", chat=True, last=tokenizer.eos_token_id, role="tool")) == between
    with pytest.raises(ConfigError, match="the prompt is plain text"):
        encoder.tokens("15", chat=False, last=5, role="tool")
    tokenizer.chat_template = CHATML.replace("in messages %}", "in messages if m['role'] != 'tool' %}")
    with pytest.raises(ConfigError, match="drops tool messages"):
        ObservationEncoder(tokenizer).tokens("15", chat=True, last=5, role="tool")


def test_template_that_rewrites_turns_is_rejected() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CHATML.replace("m['content']", "m['content'] | upper")
    with pytest.raises(ConfigError, match=r"set data.chat = false"):
        ObservationEncoder(tokenizer).tokens("15", chat=True, last=5)


# Loading an environment


def test_custom_environment_is_loaded_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "guess.py"
    file.write_text(
        "from plaudit.records import Turn\n"
        "class Guess:\n"
        "    def __init__(self, bonus=0.0): self.bonus = bonus\n"
        "    def reset(self, prompt): pass\n"
        "    def step(self, response): return Turn(reward=self.bonus, done=True)\n"
    )
    make = load_environment(EnvironmentTable(name=f"{file}:Guess", options={"bonus": 2.0}))
    assert make().step("x") == Turn(reward=2.0, done=True)
    assert make() is not make()
    assert isinstance(load_environment(EnvironmentTable(name="plaudit.worlds.calculator:Calculator"))(), Calculator)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("calculater", {}, "neither built in .*did you mean 'calculator'"),
        ("nowhere.py:Guess", {}, "no file nowhere.py"),
        ("plaudit.nowhere:Guess", {}, "No module named"),
        ("plaudit.records:Guess", {}, "has no attribute 'Guess'"),
        ("plaudit.records:Turn", {}, "no method 'reset'"),
        ("calculator", {"digits": 3}, r"Calculator\(\*\*\{'digits': 3\}\) fails"),
    ],
)  # fmt: skip
def test_invalid_environment_is_rejected_when_loaded(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvironmentTable(name=name, options=options))


# Time limits


def test_calls_run_in_parallel_and_late_ones_time_out() -> None:
    def slow(number: int, seconds: float) -> Callable[[], int]:
        def call() -> int:
            time.sleep(seconds)
            return number

        return call

    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    calls, results = ParallelCalls(4, 1.0, posted.put), dict[int, Any]()
    for i in range(20):
        calls.start(slow(i, 60.0 if i % 5 == 0 else 0.01), partial(results.__setitem__, i))
    begin = time.monotonic()
    while calls.busy and time.monotonic() - begin < 30.0:
        with suppress(queue.Empty):
            posted.get(timeout=calls.left() or 0.001)()
        calls.expire()
    assert [i for i in range(20) if isinstance(results[i], Overdue)] == [0, 5, 10, 15]
    assert [results[i] for i in range(20) if i % 5] == [i for i in range(20) if i % 5]
