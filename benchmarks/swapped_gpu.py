"""Swapped compared with colocated on one GPU: PPO with four 1B models (policy, reference, critic, reward), Adam in
float32.

    python benchmarks/swapped_gpu.py [--steps 4] [--out FILE] [--fast]

Random Llamas of 1.1 billion weights in bfloat16, created here; nothing is downloaded. Each placement runs in a separate
process. Reports the peak by phase and owner, seconds per step, the cost of the transfers, the ledger against the
allocator, and whether weights and optimizers are bit-identical: after the steps in both placements, and after a round
trip through host memory. Deterministic algorithms are on, so that two runs can be compared at all; --fast turns them
off. `--tiny --device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACEMENTS = ("colocated", "swapped")
BIG = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
       "num_key_value_heads": 4, "intermediate_size": 5632}  # fmt: skip
TINY = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128}  # fmt: skip
GIB = 1 << 30


def make_models(directory: Path, shape: dict[str, int], device: str) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    from plaudit.models import save

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, shape["vocab_size"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = LlamaConfig(
        **shape, max_position_embeddings=1024, tie_word_embeddings=False, pad_token_id=0, bos_token_id=None,
        eos_token_id=1, num_labels=1,
    )  # fmt: skip
    for seed, (name, kind) in enumerate({"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}.items()):
        torch.manual_seed(seed)
        with torch.device(device):
            module = kind(config).to(torch.bfloat16)
        save(module, tokenizer, directory / name)
        del module
    chance = random.Random(1)
    with (directory / "prompts.jsonl").open("w") as file:
        for _ in range(600):
            text = " ".join(f"w{chance.randrange(3, shape['vocab_size'])}" for _ in range(chance.randrange(48, 80)))
            file.write(json.dumps({"prompt": text}) + "\n")


def recipe_of(options: argparse.Namespace, placement: str) -> Any:
    from plaudit.config import parse_recipe

    work, tiny = Path(options.work), options.tiny
    tree = {
        "task": "rl", "seed": 1,
        "model": {"path": str(work / "policy"), "dtype": "bfloat16", "device": options.device},
        "data": {"path": str(work / "prompts.jsonl"), "eval_items": 2},
        "reward": {"path": str(work / "reward"), "dtype": "bfloat16", "device": options.device},
        "algorithm": {"name": "ppo", "kl": {"coef": 0.05}}, "critic": {},
        "train": {
            "steps": options.steps, "prompts_per_step": 4 if tiny else 64, "samples_per_prompt": 2 if tiny else 4,
            "lr": 1e-6, "eval_every": 1000, "checkpoint": {"every": 1000}, "show": 0, "micro_batch_tokens": 8192,
        },
        "sampling": {"max_tokens": 16 if tiny else 256},
        "engine": {"kv_bytes": (1 << 20) if tiny else 8 * GIB},
        "placement": {"name": placement},
    }  # fmt: skip
    return parse_recipe(tree, "benchmark")


class Quiet:
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def bar(self, done: int, total: int) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.seen.append(dict(metrics))
        print(f"  step {step}: {metrics['time/step']:.2f} s, swap {metrics.get('time/swap', 0):.2f} s", flush=True)

    def figures(self, step: int, figures: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None:
        print(message, file=sys.stderr)


def digest(tensors: Any) -> list[int]:
    """Two sums over the bits of every tensor, one weighted by position: equal bits, equal sums."""
    import torch

    sums = []
    for tensor in tensors:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.detach().reshape(-1).view(kind).to(torch.int64)
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        sums += [int(bits.sum()), int((bits * places).sum())]
    return sums


def held_by(training: Any) -> dict[str, list[Any]]:
    from plaudit.place.memory.owners import reward_engines

    trainee = training.trainee
    return {
        "policy weights": list(trainee.loaded.module.parameters()),
        "policy optimizer": [*trainee.optimizer.copies(), *trainee.optimizer.moments()],
        "critic weights": list(trainee.critic.model.parameters()),
        "critic optimizer": [*trainee.critic.optimizer.copies(), *trainee.critic.optimizer.moments()],
        "reference weights": list(trainee.reference.module.parameters()),
        "reward weights": [p for e in reward_engines(training.scorer) for p in e.decoder.module.parameters()],
    }


def child(options: argparse.Namespace) -> None:
    import torch

    if not options.fast:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    from plaudit.events import read_events
    from plaudit.rl.loop import RlTraining
    from plaudit.train.run.run import Run

    tree = recipe_of(options, options.child)
    directory, viewer = Path(options.work) / f"run-{options.child}", Quiet()
    begin = time.monotonic()
    with Run(directory, tree, fresh=True) as run:
        training = RlTraining(tree, run, viewer)
        loading = time.monotonic() - begin
        try:
            training._loop([])  # not fit(): offloaded state is inspected before its release; no model is saved
            peak = training.ledger.peak
            trip = None
            residency = getattr(training.placement, "residency", None)
            if residency is not None:
                residency.arrange(residency.residents)
            digests = {name: digest(tensors) for name, tensors in held_by(training).items()}
            if residency is not None:
                trip = round_trip(training, residency, digests)
        finally:
            training.close()
    events = [event for event in read_events(directory) if event["kind"] == "memory"]
    sizes = {name: sum(t.nbytes for t in tensors) for name, tensors in held_by(training).items()}
    result = {
        "placement": options.child, "peak": peak, "loading_seconds": loading, "digests": digests, "trip": trip,
        "sizes": sizes, "steps": viewer.seen, "events": events,
    }  # fmt: skip
    Path(options.out).write_text(json.dumps(result))


def round_trip(training: Any, residency: Any, before: dict[str, list[int]]) -> dict[str, Any]:
    import torch

    parked = [resident for resident in residency.residents.values() if hasattr(resident, "store")]

    def seconds(work: Any) -> float:
        begin = time.monotonic()
        for resident in parked:
            work(resident)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic() - begin

    out = seconds(lambda resident: resident.leave())
    back = seconds(lambda resident: resident.come())
    after = {name: digest(tensors) for name, tensors in held_by(training).items()}
    size = sum(resident.size for resident in parked)
    return {"equal": after == before, "bytes": size, "out_seconds": out, "back_seconds": back}


def compare(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The rows of the table, from the figures of both placements."""
    one, two = found["colocated"], found["swapped"]

    def seconds(result: dict[str, Any], name: str = "time/step") -> float:
        later = result["steps"][1:] or result["steps"]  # the first one captures, compiles and allocates host memory
        return sum(step.get(name, 0.0) for step in later) / len(later)

    def figures(result: dict[str, Any]) -> list[dict[str, float]]:
        return [{k: v for k, v in s.items() if not k.startswith(("time/", "perf/"))} for s in result["steps"]]

    fullest = max(two["events"], key=lambda event: sum(event["bytes"].values()))
    absent = {name: size for name, size in one["sizes"].items() if fullest["bytes"].get(name, 0) < size // 2}
    if "KV" not in fullest["bytes"]:
        absent["KV"] = max(event["bytes"].get("KV", 0) for event in one["events"])
    unaccounted = [
        abs({**event["bytes"], **event[end]}.get("unaccounted", 0)) / max(1, event["taken"][end])
        for result in (one, two)
        for event in result["events"]
        for end in ("start", "end")
    ]
    return {
        "peak_bytes": {name: result["peak"] for name, result in found.items()},
        "lower_by": one["peak"] - two["peak"], "offloaded_at_the_peak": absent,
        "lower_by_at_least_the_offloaded": one["peak"] - two["peak"] >= sum(absent.values()),
        "seconds_per_step": {name: seconds(result) for name, result in found.items()},
        "swap_seconds_per_step": seconds(two, "time/swap"),
        "round_trip": two["trip"],
        "equal_after_the_steps": {name: one["digests"][name] == two["digests"][name] for name in one["digests"]},
        "equal_figures": figures(one) == figures(two),
        "ledger_unaccounted_at_most": max(unaccounted),
    }  # fmt: skip


def show(found: dict[str, dict[str, Any]], compared: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=130)
    for name, result in found.items():
        last = max(event["step"] for event in result["events"])
        table = Table("phase", "seconds", "peak GiB", "reserved GiB", "held at the fullest, GiB", title=name)
        for event in result["events"]:
            if event["step"] == last:
                held = ", ".join(
                    f"{owner} {size / GIB:.1f}" for owner, size in event["bytes"].items() if size > GIB / 20
                )
                taken = event["taken"]
                reserved = f"{taken['reserved'] / GIB:.1f}" if taken.get("reserved") else "–"
                row = (f"{event['seconds']:.2f}", f"{(taken['peak'] or 0) / GIB:.1f}", reserved, held)
                table.add_row(event["phase"], *row)
        console.print(table)
    console.print_json(json.dumps(compared))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "swapped_gpu.json"))
    parser.add_argument("--fast", action="store_true", help="turn deterministic algorithms off")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="try the script itself; writes no file unless --out is given"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=PLACEMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.child:
        child(options)
        return
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with tempfile.TemporaryDirectory() as work:
        make_models(Path(work), TINY if options.tiny else BIG, options.device)
        print(f"models made in {time.monotonic() - begin:.0f} s", flush=True)
        found = {}
        for placement in PLACEMENTS:
            print(placement, flush=True)
            out = Path(work) / f"{placement}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--work", work, "--child", placement, "--out", str(out)]
            subprocess.run(command, env=environment, check=True)
            found[placement] = json.loads(out.read_text())
    compared = compare(found)
    show(found, compared)
    print(f"{time.monotonic() - begin:.0f} s in all")
    if options.tiny:
        return
    import torch

    record = {
        "script": "benchmarks/swapped_gpu.py", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": version("torch"),
        "transformers": version("transformers"), "deterministic": not options.fast, **compared,
        "runs": {
            name: {
                "loading_seconds": result["loading_seconds"], "sizes": result["sizes"],
                "memory": [event for event in result["events"] if event["step"] == options.steps],
                "times": [{k: v for k, v in s.items() if k.startswith("time/")} for s in result["steps"]],
            }
            for name, result in found.items()
        },
    }  # fmt: skip
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
