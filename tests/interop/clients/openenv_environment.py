"""Training in the environment that `openenv init` writes, served by its own app. In: a directory. Out: metrics by step,
a sample, and the error of a run that reads a missing field."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_app

import plaudit
from plaudit.errors import PlauditError

directory = Path(json.load(sys.stdin)["directory"])
subprocess.run(
    [sys.executable, "-m", "openenv.cli", "init", "echo_game"],
    cwd=directory,
    check=True,
    capture_output=True,
    timeout=120,
)
sys.path.insert(0, str(directory))
from echo_game.models import EchoGameAction, EchoGameObservation  # noqa: E402
from echo_game.server.echo_game_environment import EchoGameEnvironment  # noqa: E402

app = create_app(EchoGameEnvironment, EchoGameAction, EchoGameObservation, env_name="echo", max_concurrent_envs=64)
server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
socket = server.config.bind_socket()
threading.Thread(target=lambda: asyncio.run(server.serve([socket])), daemon=True).start()

options = {
    "environment.name": "openenv", "environment.max_turns": 2, "environment.timeout": 60.0,
    "environment.options": {
        "url": f"http://127.0.0.1:{socket.getsockname()[1]}", "action": "message", "observation": "echoed_message",
    },
    "reward": {"rule": "exact", "answer": r"#(\d+)$", "right": 0.0, "wrong": 0.0},
    "train.prompts_per_step": 4, "train.samples_per_prompt": 8, "train.warmup": 0, "train.lr": 1e-3, "train.dump": True,
    "data.eval_items": 2, "model.device": "cpu", "train.eval_every": 100,
}  # fmt: skip
run = plaudit.train("sums-tool", out=directory / "run", steps=4, options=options, quiet=True)
lines = [line for file in sorted((directory / "run" / "rollouts").iterdir()) for line in file.read_text().splitlines()]
sample = next(sample for sample in map(json.loads, lines) if "mask" in sample)
wrong = {**options, "environment.options": {**options["environment.options"], "observation": "said"}}
failed = ""
try:
    plaudit.train("sums-tool", out=directory / "wrong", steps=1, options=wrong, quiet=True)
except PlauditError as error:
    failed = str(error)
results = {name: [value for _, value in run.curve(name)] for name in ("turns/reward", "reward/errors")}
results["sample"] = {key: sample[key] for key in ("text", "mask", "token_rewards")}
print(json.dumps({**results, "failed": failed}))
