"""Step times of a run from its log (ours, verl's or NeMo RL's), mapped to the phases of a plan."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plaudit.errors import ConfigError
from plaudit.events import read_events

Step = dict[str, float]
LEAST_STEPS = 4
"""The first step is warm-up, and a median needs at least three."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Metric names under which one project logs a step."""

    name: str
    step: str
    phases: Mapping[str, tuple[str, ...]]
    outside: tuple[str, ...] = ()
    """Time within the step that is not part of a plan: evaluation, checkpoints, tools."""
    waits: tuple[str, ...] = ()
    """Time in which the trainer waits for generation, logged in place of the overlapped generation time."""
    within: Mapping[str, str] = field(default_factory=dict)
    """Metric to the other metric that also includes its time."""
    prompt: str = ""
    response: str = ""
    longest: str = ""
    tokens: str = ""
    """Tokens of all sequences of a step."""
    throughput: str = ""
    """Tokens per second and device."""


PLAUDIT = Dialect(
    "plaudit", "time/step",
    {
        "generation": ("time/generate",),
        "scoring": ("time/prompts", "time/reward", "time/old", "time/reference", "time/values", "time/advantages"),
        "training": ("time/update", "time/critic"),
        "weights": ("time/publish", "time/mode_switch"),
        "transitions": ("time/swap",),
    },
    ("time/evaluate", "time/checkpoint", "time/dump", "time/tools"), ("time/wait",),
    prompt="length/prompt_mean", response="length/mean",
)  # fmt: skip
VERL = Dialect(
    "verl", "timing_s/step",
    {
        "generation": ("timing_s/gen",),
        "scoring": ("timing_s/reward", "timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv"),
        "training": ("timing_s/update_actor", "timing_s/update_critic"),
        "weights": ("timing_s/update_weights", "timing_s/sync_rollout_weights", "timing_s/param_sync"),
    },
    ("timing_s/testing", "timing_s/save_checkpoint", "timing_s/dump_rollout_generations", "timing_s/start_profile",
     "timing_s/stop_profile"),
    prompt="prompt_length/mean", response="response_length/mean", longest="response_length/max",
    tokens="perf/total_num_tokens", throughput="perf/throughput",
)  # fmt: skip
_NEMO = "timing/train/"
NEMO = Dialect(
    "NeMo RL", f"{_NEMO}total_step_time",
    {
        "generation": (f"{_NEMO}generation",),
        "scoring": (
            f"{_NEMO}data_processing", f"{_NEMO}reward_calculation", f"{_NEMO}logprob_inference_prep",
            f"{_NEMO}policy_and_reference_logprobs", f"{_NEMO}advantage_calculation",
        ),
        "training": (f"{_NEMO}training_prep", f"{_NEMO}policy_training"),
        "weights": (f"{_NEMO}prepare_for_generation/transfer_and_update_weights", f"{_NEMO}weight_sync"),
        "transitions": (f"{_NEMO}prepare_for_generation/total",),
    },
    (f"{_NEMO}checkpointing",), (f"{_NEMO}exposed_generation",),
    {f"{_NEMO}prepare_for_generation/transfer_and_update_weights": f"{_NEMO}prepare_for_generation/total"},
    "train/mean_prompt_length", "train/mean_gen_tokens_per_sample", "train/gen_tokens_per_sample/max",
    "train/total_num_tokens",
)  # fmt: skip
OTHERS = (VERL, NEMO)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over the steps after the first."""

    source: str
    steps: int
    """Steps taken into account."""
    phases: Mapping[str, float]
    """Seconds by phase of a plan, as far as logged."""
    step: float
    """Seconds of a step without the time that is not part of a plan."""
    outside: float
    waited: float
    """Seconds in which the trainer waited for responses."""
    prompt: float | None = None
    response: float | None = None
    longest: float | None = None
    batch: int | None = None
    devices: int | None = None

    def overlapped(self) -> Measured:
        """The same run with generation overlapping training: its logged generation time is the trainer's wait."""
        phases = {name: seconds for name, seconds in self.phases.items() if name != "generation"}
        return replace(self, phases=phases, waited=self.waited + self.phases.get("generation", 0.0))

    @property
    def rest(self) -> float:
        """Seconds of a step that belong to no phase."""
        return max(0.0, self.step - sum(self.phases.values()) - self.waited)


def our_run(directory: Path) -> Measured:
    events = read_events(directory)
    steps = [event["values"] for event in events if event["kind"] == "metric" and PLAUDIT.step in event["values"]]
    return _measured(PLAUDIT, steps, directory)


def other_run(path: Path) -> Measured:
    """Read a log of verl (its file logger, or the console) or NeMo RL (metrics.json, JSON lines, or the console)."""
    if not path.is_file():
        raise ConfigError(f"--from {path}: neither a run directory with events.jsonl nor a log file")
    text = path.read_text(encoding="utf-8", errors="replace")
    steps = list(_steps(text))
    for dialect in OTHERS:
        named = [step for step in steps if dialect.step in step]
        if named:
            return _measured(dialect, named, path)
    keys = " or ".join(dialect.step for dialect in OTHERS)
    raise ConfigError(f"--from {path}: no line has {keys}; give a log of verl's or NeMo RL's trainer, or a run of ours")


def _measured(dialect: Dialect, steps: list[Step], path: Path) -> Measured:
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"--from {path}: {len(steps)} steps, of which the first warms up; a comparison takes "
                          f"{LEAST_STEPS} or more: let the run go on")  # fmt: skip
    steps = steps[1:]

    def middle(names: Iterable[str]) -> float:
        return statistics.median(sum(_seconds(dialect, step, name) for name in names) for step in steps)

    def mean(name: str) -> float | None:
        values = [step[name] for step in steps if name in step]
        return statistics.fmean(values) if values else None

    known = {name for step in steps for name in step}
    phases = {phase: middle(names) for phase, names in dialect.phases.items() if known & {*names}}
    prompt, response, tokens = mean(dialect.prompt), mean(dialect.response), mean(dialect.tokens)
    longest = max((step[dialect.longest] for step in steps if dialect.longest in step), default=None)
    rates = [step[dialect.tokens] / step[dialect.throughput] / step[dialect.step] for step in steps
             if step.get(dialect.throughput) and dialect.tokens in step]  # fmt: skip
    step_seconds = statistics.median(
        step[dialect.step] - sum(step.get(name, 0.0) for name in dialect.outside) for step in steps
    )
    return Measured(
        dialect.name, len(steps), phases, step_seconds, middle(dialect.outside), middle(dialect.waits), prompt,
        response, longest,
        round(tokens / (prompt + response)) if tokens and prompt is not None and response else None,
        round(statistics.median(rates)) if rates else None,
    )  # fmt: skip


def _seconds(dialect: Dialect, step: Step, name: str) -> float:
    """Seconds of one metric without those that other metrics count too."""
    inner = (step.get(part, 0.0) for part, whole in dialect.within.items() if whole == name)
    return max(0.0, step.get(name, 0.0) - sum(inner))


def _steps(text: str) -> Iterator[Step]:
    """Metrics by step, from any of the supported formats."""
    whole = _json(text)
    if whole and all(isinstance(value, dict) for value in whole.values()):
        yield from _by_metric(whole)
        return
    lines = text.splitlines()
    objects = [_json(line) for line in lines if line.lstrip().startswith("{")]
    if any(objects):
        for read in filter(None, objects):  # verl's file logger nests the metrics, others write them at the top level
            yield _numbers(read["data"] if isinstance(read.get("data"), dict) else read)
        return
    yield from _verl_console(lines)
    yield from _nemo_console(lines)


def _json(text: str) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _numbers(figures: Mapping[str, Any]) -> Step:
    return {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}


def _by_metric(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[Step]:
    """Parse {metric: {step: value}}, the format in which NeMo RL's test suites export TensorBoard metrics."""
    steps: dict[int, Step] = {}
    for metric, values in figures.items():
        for step, value in values.items():
            if step.isdigit() and isinstance(value, int | float):
                steps.setdefault(int(step), {})[metric] = float(value)
    yield from (steps[step] for step in sorted(steps))


_PAIR = re.compile(r"(?:^|\s-\s)([\w/@.-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)\)?", re.IGNORECASE)


def _verl_console(lines: Iterable[str]) -> Iterator[Step]:
    """Parse `step:12 - timing_s/gen:31.9 - ...`, after any prefix that Ray adds."""
    for line in lines:
        begin = re.search(r"\bstep:\d+ - ", line)
        if begin and VERL.step in line:
            yield {key: float(value) for key, value in _PAIR.findall(line[begin.start() :])}


def _nemo_console(lines: Iterable[str]) -> Iterator[Step]:
    """Parse one bullet per metric: `• Total step time: 92.80s`, then `• generation: 50.10s (54.0%)`."""
    step: Step = {}
    length: float | None = None
    for line in lines:
        if found := re.search(r"• Mean Generation Length: ([\d.]+)", line):
            length = float(found[1])
        elif found := re.search(r"• Total step time: ([\d.]+)s", line):
            if step:
                yield step
            step = {NEMO.step: float(found[1])} | ({NEMO.response: length} if length else {})
        elif step and (found := re.search(r"• ([\w/]+): ([\d.]+)s \(", line)):
            step[_NEMO + found[1]] = float(found[2])
    if step:
        yield step
