"""Host memory that a training rank needs to load its shards of policy, reference and critic, and to update them.

    python benchmarks/train_rank_memory.py [ppo | large | context]

A Llama of 134M parameters in float32, in files of 64 MB, as the policy, reference and critic of a PPO run over gloo
ranks. The figure is the peak of resident memory, mapped files included, sampled every millisecond, minus what the
process used before. In the colocated placement every rank has a whole copy of the policy for its engine; in the
disaggregated one only rank 0 has, which sends it to remote engines; with the reshard channel no rank has, and two
updates follow, of 8 samples of 40 tokens, compared with the peak that the planner gives for them. `ppo`: only those
updates. `large`: such updates of a Llama of 2 GB by GRPO without a reference. `context`: updates of two samples of
2,048 tokens, one at a time, by GRPO of a Llama of 44 MB: activations are most of the memory, and they are sharded over
the ranks. Writes benchmarks/results/train_rank_memory.json.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rank_memory import resident_bytes, write_model

from plaudit.config import RlRecipe, parse_recipe
from plaudit.heap import heap_factor
from plaudit.models import load_tokenizer, new_llama, resolve, save
from plaudit.plan.cost.prediction import predict
from plaudit.plan.recipes import layout_of, workload_of
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.layouts import GenerationLayout
from plaudit.records import Batch, Sample
from plaudit.train.optim.optimizer import local
from plaudit.train.policy.critic import LocalCritic
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.trainee import Trainee
from plaudit.train.run.clock import Clock
from plaudit.train.run.ranks import join

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "train_rank_memory.json"
Shape = tuple[int, int, int]
"""Data, context and tensor parallel."""
SHAPES: dict[str, Shape] = {
    "one process": (1, 1, 1), "2 ranks": (2, 1, 1), "2 tensor ranks": (1, 1, 2), "4 ranks": (4, 1, 1),
    "4 tensor ranks": (1, 1, 4), "2 x 2 ranks": (2, 1, 2),
}  # fmt: skip
UPDATED = {name: SHAPES[name] for name in ("one process", "4 ranks", "4 tensor ranks", "2 x 2 ranks")}
CONTEXT: dict[str, Shape] = {
    "one process": (1, 1, 1), "2 context ranks": (1, 2, 1), "4 context ranks": (1, 4, 1),
    "2 x 2 context ranks": (2, 2, 1),
}  # fmt: skip
RESHARD = "reshard"
PLACEMENTS = ("colocated", "disaggregated")
KINDS = ("ppo", "large", "context")
KIND = sys.argv[1] if sys.argv[1:] in [[kind] for kind in KINDS] else os.environ.get("KIND", "")  # passed to ranks
GRPO = KIND in ("large", "context")
SAMPLES, PROMPT, RESPONSE = (2, 8, 2040) if KIND == "context" else (8, 8, 32)


def recipe_of(model: str, shape: Shape, placement: str) -> RlRecipe:
    name = {"name": "disaggregated", "channel": RESHARD} if placement == RESHARD else {"name": placement}
    method: dict[str, Any] = {"critic": {}, "algorithm": {"name": "ppo", "kl": {"coef": 0.05}}}
    if GRPO:
        method = {"algorithm": {"name": "grpo"}}
    tree = {
        "task": "rl", "model": {"path": model, "device": "cpu"}, "data": {"world": "sums"},
        "reward": {"rule": "exact", "answer": r"#(\d+)$"}, "placement": name, **method,
        "sampling": {"max_tokens": RESPONSE},
        "train": {"steps": 1, "lr": 1e-5, "threads": 1, "prompts_per_step": SAMPLES // 2, "samples_per_prompt": 2,
                  "micro_batch_tokens": 2048},
        "resources": {
            "data_parallel": shape[0], "context_parallel": shape[1], "tensor_parallel": shape[2], "timeout": 300.0,
        },
    }  # fmt: skip
    made = parse_recipe(tree, "benchmark")
    assert isinstance(made, RlRecipe)
    return made


def planned_mb(path: str, shape: Shape, heap: float) -> float:
    """The planner's peak of a rank in training, with the constants of a CPU: no reserve, malloc fragmentation."""
    recipe = recipe_of(path, shape, RESHARD)
    work = workload_of(recipe, resolve, PROMPT, RESPONSE)
    constants = replace(Constants(), reserve_bytes=0.0, graph_bytes=0.0, heap_factor=heap)
    planned = predict(
        work, f"1x{math.prod(shape)}xH100", "disaggregated", generation=GenerationLayout(),
        training=layout_of(recipe, work), constants=constants,
    )  # fmt: skip
    return planned.phase("training").memory.value / 2**20


def measure(path: str, shape: Shape, placement: str) -> None:
    def recipe(model: str) -> RlRecipe:
        return recipe_of(model, shape, placement)

    with join(recipe(path).resources, "cpu") as ranks:
        small = Trainee(recipe(f"{path}/small"), ranks, None, Clock(), print)  # warms up libraries
        if placement == RESHARD:
            update(small, 32)
        before, peak, over = resident_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.is_set():
                peak = max(peak, resident_bytes())
                time.sleep(0.001)

        threading.Thread(target=watch, daemon=True).start()
        trainee = Trainee(recipe(path), ranks, None, Clock(), print)
        read_all(trainee)
        if placement == RESHARD:
            update(trainee, RESPONSE)
        time.sleep(0.01)
        over.set()
        ranks.everyone.barrier()
        figures = {
            "peak_mb": round((peak - before) / 2**20, 1), "after_mb": round((resident_bytes() - before) / 2**20),
            "tensors_mb": round(tensor_bytes() / 2**20, 1),
        }  # fmt: skip
        Path(os.environ["FIGURES"]).write_text(json.dumps(figures))
        trainee.close()
        ranks.everyone.barrier()


def tensor_bytes() -> int:
    """Bytes of all live tensors; the rest of resident memory belongs to the allocator."""
    sizes = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def write_models(directory: Path) -> int:
    """Writes the model, and a small one that four ranks can shard, used to warm up libraries; returns the bytes of the
    first."""
    tokenizer = load_tokenizer(resolve("sums"))
    if KIND == "context":
        model = new_llama(
            "policy", vocab_size=len(tokenizer), hidden_size=320, layers=8, heads=8, kv_heads=4, intermediate_size=864,
            max_positions=PROMPT + RESPONSE, seed=1,
        )  # fmt: skip
        save(model, tokenizer, directory)
        size = sum(each.numel() * each.element_size() for each in model.parameters())
    else:
        size = write_model(directory, *((1536, 18) if GRPO else (1024, 10)))
    small = new_llama(
        "policy", vocab_size=len(tokenizer), hidden_size=64, layers=2, heads=4, intermediate_size=128,
        max_positions=PROMPT + RESPONSE, seed=1,
    )  # fmt: skip
    save(small, tokenizer, directory / "small")
    return size


def update(trainee: Trainee, response: int) -> None:
    """Two steps: from the second on, Adam's moments exist at the same time as gradients."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, len(trainee.loaded.tokenizer), (SAMPLES, PROMPT + response), generator=draw).tolist()
    zeros, ones = (-1.0,) * response, (1,) * response
    samples = [
        Sample(tuple(row[:PROMPT]), tuple(row[PROMPT:]), "", zeros, zeros, (0,) * response, ones, "stop", i // 2, i % 2)
        for i, row in enumerate(ids)
    ]
    rewarded = tuple(replace(sample, reward=float(i % 3)) for i, sample in enumerate(samples))
    for step in range(2):
        trainee.learner.update(Batch(rewarded, step), step)


def read_all(trainee: Trainee) -> None:
    """Reads every weight once, as a forward pass does, so that mapped pages are resident."""
    modules = [trainee.loaded.module, trainee.policy.module]
    if not GRPO:
        assert isinstance(trainee.reference, Policy)
        assert isinstance(trainee.critic, LocalCritic)
        modules += [trainee.reference.module, trainee.critic.model]
    for module in modules:
        for parameter in module.parameters():
            if not parameter.is_meta:
                local(parameter).sum()


def run(path: str, shape: Shape, placement: str) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = math.prod(shape)
    common = {**os.environ, "KIND": KIND, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, f"{rank}.json") for rank in range(world)]
        children = [
            subprocess.Popen(
                [sys.executable, __file__, path, *map(str, shape), placement],
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


def updated(place: str) -> dict[str, dict[str, Any]]:
    heap = heap_factor()
    updates: dict[str, dict[str, Any]] = {}
    for name, shape in (CONTEXT if KIND == "context" else UPDATED).items():
        planned = round(planned_mb(place, shape, heap), 1)
        updates[name] = {"planned_mb": planned, "ranks": run(place, shape, RESHARD)}
        print("update", name, updates[name], flush=True)
    return updates | {"heap_factor": {"value": round(heap, 3)}}


def main() -> None:
    if len(sys.argv) > 2:
        data, context, tensor = map(int, sys.argv[2:5])
        measure(sys.argv[1], (data, context, tensor), sys.argv[5])
        return
    with tempfile.TemporaryDirectory() as place:
        size = write_models(Path(place))
        figures: dict[str, dict[str, list[dict[str, float]]]] = {}
        for name, shape in () if KIND else SHAPES.items():
            for placement in PLACEMENTS:
                figures.setdefault(placement, {})[name] = run(place, shape, placement)
                print(placement, name, figures[placement][name], flush=True)
        updates = updated(place)
    part = {
        "model_mb": round(size / 2**20, 1), "placements": figures, "updates": updates,
        "heap_factor": updates.pop("heap_factor")["value"], "page_bytes": resource.getpagesize(),
        "machine": platform.processor() or platform.machine(), "torch": version("torch"),
        "transformers": version("transformers"), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept = {name: before[name] for name in KINDS if name in before}
    result = {**before, KIND: part} if KIND else {**part, **kept}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
