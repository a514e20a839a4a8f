"""Trains in a verifiers environment at the run's own endpoint. In: a directory, the taskset with its options, the
number of steps. Out: the curves of the run."""

import json
import sys
from pathlib import Path

import plaudit
from plaudit.train.agents.verifiers import rows

arguments = json.load(sys.stdin)
named = {"taskset": arguments["taskset"], "options": arguments["options"]}
options = {
    "agent.function": "plaudit.train.agents.verifiers:play", "agent.options": named, "agent.ignore_sampling": True,
    "train.samples_per_prompt": 8, "train.warmup": 0, "train.lr": 5e-4,
    "data.eval_items": 4, "model.device": "cpu", **arguments["recipe"],
}  # fmt: skip
run = plaudit.train(
    "sums-agent", out=Path(arguments["directory"]) / "run", steps=arguments["steps"], data=list(rows(**named)),
    options=options, quiet=True,
)  # fmt: skip
names = ("reward/mean", "reward/errors", "turns/mean", "mismatch/abs_max", "policy/grad_norm")
print(json.dumps({name: [value for _, value in run.curve(name)] for name in names}))
