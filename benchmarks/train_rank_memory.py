"""How much host memory a training rank takes to load its part of policy, reference and critic.

    python benchmarks/train_rank_memory.py

A Llama of 134M parameters in float32, in files of 64 MB, as the policy, reference and critic of a PPO run over gloo
ranks. The peak of resident memory, mapped files included, looked at every millisecond, above what the process had
before. In the colocated placement every rank has a whole copy of the policy for its engine, in the disaggregated one
rank 0 has, which sends it to engines elsewhere. Writes benchmarks/results/train_rank_memory.json.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rank_memory import resident_bytes, write_model

from plaudit.config import RlRecipe, parse_recipe
from plaudit.train.optim.optimizer import local
from plaudit.train.policy.critic import LocalCritic
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.trainee import Trainee
from plaudit.train.run.clock import Clock
from plaudit.train.run.ranks import join

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "train_rank_memory.json"
SHAPES = {"one process": (1, 1), "2 ranks": (2, 1), "2 tensor ranks": (1, 2), "4 ranks": (4, 1)}
PLACEMENTS = ("colocated", "disaggregated")


def measure(path: str, data: int, tensor: int, placement: str) -> None:
    def recipe(model: str) -> RlRecipe:
        tree = {
            "task": "rl", "model": {"path": model, "device": "cpu"}, "data": {"world": "sums"},
            "reward": {"rule": "exact", "answer": r"#(\d+)$"}, "critic": {}, "placement": {"name": placement},
            "algorithm": {"name": "ppo", "kl": {"coef": 0.05}}, "sampling": {"max_tokens": 48},
            "train": {"steps": 1, "lr": 1e-5, "threads": 1, "prompts_per_step": 4, "samples_per_prompt": 4},
            "resources": {"data_parallel": data, "tensor_parallel": tensor, "timeout": 120.0},
        }  # fmt: skip
        made = parse_recipe(tree, "benchmark")
        assert isinstance(made, RlRecipe)
        return made

    with join(recipe(path).resources, "cpu") as ranks:
        Trainee(recipe("sums-policy"), ranks, None, Clock(), print)  # what libraries keep is there
        before, peak, over = resident_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.is_set():
                peak = max(peak, resident_bytes())
                time.sleep(0.001)

        threading.Thread(target=watch, daemon=True).start()
        trainee = Trainee(recipe(path), ranks, None, Clock(), print)
        read_all(trainee)
        time.sleep(0.01)
        over.set()
        ranks.everyone.barrier()
        figures = {"peak_mb": round((peak - before) / 2**20, 1), "after_mb": round((resident_bytes() - before) / 2**20)}
        Path(os.environ["FIGURES"]).write_text(json.dumps(figures))
        trainee.close()
        ranks.everyone.barrier()


def read_all(trainee: Trainee) -> None:
    """Read every weight once, as a forward pass does: what is mapped is then there."""
    assert isinstance(trainee.reference, Policy)
    assert isinstance(trainee.critic, LocalCritic)
    for module in (trainee.loaded.module, trainee.policy.module, trainee.reference.module, trainee.critic.model):
        for parameter in module.parameters():
            if not parameter.is_meta:
                local(parameter).sum()


def run(path: str, data: int, tensor: int, placement: str) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = data * tensor
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, f"{rank}.json") for rank in range(world)]
        children = [
            subprocess.Popen(
                [sys.executable, __file__, path, str(data), str(tensor), placement],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "FIGURES": str(file)},
            )
            for rank, file in enumerate(files)
        ]
        try:
            for child in children:
                if child.wait(600):
                    raise SystemExit(f"a rank of {world} ended with {child.returncode}")
        finally:
            for child in children:
                child.kill()
        return [json.loads(file.read_text()) for file in files]


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        size = write_model(Path(place))
        for name, (data, tensor) in SHAPES.items():
            for placement in PLACEMENTS:
                figures.setdefault(placement, {})[name] = run(place, data, tensor, placement)
                print(placement, name, figures[placement][name], flush=True)
    result = {
        "model_mb": round(size / 2**20, 1), "placements": figures, "page_bytes": resource.getpagesize(),
        "machine": platform.processor() or platform.machine(), "torch": version("torch"),
        "transformers": version("transformers"), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
