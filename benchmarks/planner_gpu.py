"""Our own runs on one GPU against their plans: GRPO steps of three model sizes, memory and seconds by phase.

    python benchmarks/planner_gpu.py [--steps 4] [--sizes 135M,1B,3B] [--out FILE] [--machine FILE] [--tiny]
    python benchmarks/planner_gpu.py --again FILE [--out FILE]

Calibrates the machine (`plaudit plan --calibrate`), creates Llamas with random bfloat16 weights and a word tokenizer,
trains each for a few steps with `plaudit train` in a separate process, and compares with the plan for the observed
lengths: the allocator's peak (without contexts and kernels, so the plan's reserve is excluded) and the median step
after the first. Nothing is downloaded. A size that fails is reported and the others continue; results are saved after
each. `--machine` takes an earlier calibration. `--tiny` tries the script itself, on any device. `--again` runs nothing:
it plans the measurements in FILE again, with FILE's calibration and the current formulas.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, WORDS, TOKENS, PROMPTS, SAMPLES, MICRO = 49_152, 128, 256, 32, 8, 16_384
SIZES = {
    # hidden, layers, heads, key-value heads, ffn, tied embeddings, bytes of the cache
    "135M": (576, 30, 9, 3, 1536, True, 6 << 30), "1B": (2048, 16, 32, 8, 8192, True, 6 << 30),
    "3B": (3072, 28, 24, 8, 8192, True, 14 << 30),
}  # fmt: skip
TINY = {"tiny": (64, 2, 4, 2, 128, True, 8 << 20), "small": (128, 3, 4, 2, 256, True, 8 << 20)}
LIMITS = {"peak": 0.10, "step": 0.25}
SECONDS = 120.0
"""Most that a command may take."""
MEMORY_FILES, ROOM = Path("/dev/shm"), 32 << 30
"""Weights are written and read several times: in memory where that has room for them."""


HEADINGS = f"{'model':6} {'step s':>8} {'planned':>8} {'':6}   {'peak GB':>8} {'planned':>8} {'':6}   {'reserved':>8}"


class Failed(Exception):
    """A command failed; the message is the end of its output."""


def plaudit(*words: str) -> float:
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "plaudit", *words], capture_output=True, text=True, cwd=ROOT, timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failed(f"plaudit {' '.join(words)} took more than {SECONDS:g} s") from None
    if done.returncode:
        raise Failed(f"plaudit {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return time.monotonic() - began


def room_for_models() -> str | None:
    """Directory for temporary files; None for the default."""
    roomy = MEMORY_FILES.is_dir() and shutil.disk_usage(MEMORY_FILES).free > ROOM
    return str(MEMORY_FILES) if roomy else None


def config_of(shape: tuple[Any, ...], vocabulary: int) -> Any:
    from transformers import LlamaConfig

    hidden, layers, heads, kv_heads, ffn, tied, _ = shape
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=ffn, max_position_embeddings=1024, tie_word_embeddings=tied,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip


def make_model(directory: Path, shape: tuple[Any, ...], vocabulary: int, device: str) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from plaudit.models import save

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, vocabulary)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(1)
    with torch.device(device):
        module = LlamaForCausalLM(config_of(shape, vocabulary)).to(torch.bfloat16)
    save(module, tokenizer, directory)


def write_prompts(path: Path, count: int, words: int, vocabulary: int) -> None:
    """A word is a token. The answer is one that a random model does not generate."""
    chance = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(f"w{chance.randrange(3, vocabulary)}" for _ in range(words))
            file.write(json.dumps({"prompt": text, "answer": f"w{chance.randrange(3, vocabulary)}"}) + "\n")


def recipe(here: Path, name: str, shape: tuple[Any, ...], options: argparse.Namespace) -> str:
    from plaudit.config.table import to_toml

    prompts, samples, tokens = (4, 2, 16) if options.tiny else (PROMPTS, SAMPLES, TOKENS)
    return to_toml({
        "task": "rl", "seed": 1,
        "model": {"path": str(here / name), "dtype": "bfloat16", "device": options.device},
        "data": {"path": str(here / "prompts.jsonl"), "eval_items": 2},
        # A random model is never right, so gradients are zero, which takes as much work as any.
        "reward": {"rule": "exact", "answer": r"(w\d+)$"},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "train": {"steps": options.steps, "prompts_per_step": prompts, "samples_per_prompt": samples, "lr": 1e-6,
                  "eval_every": 1000, "checkpoint": {"every": 1000}, "show": 0,
                  "micro_batch_tokens": 256 if options.tiny else MICRO},
        "sampling": {"max_tokens": tokens}, "engine": {"kv_bytes": shape[-1]},
    })  # fmt: skip


def measured(run: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e["values"] for e in events if e["kind"] == "metric" and "time/step" in e["values"]][1:]
    names = {name for step in steps for name in step if name.startswith(("time/", "length/", "mismatch/"))}
    found: dict[str, Any] = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in sorted(names)}
    memory = [e for e in events if e["kind"] == "memory" and e.get("step")]
    fullest = max(memory, key=lambda e: sum(e["bytes"].values()))
    peaks: dict[str, int] = {}
    for event in memory:
        peaks[event["phase"]] = max(peaks.get(event["phase"], 0), (event.get("taken") or {}).get("peak") or 0)
    reserved = max((((e.get("taken") or {}).get("reserved")) or 0) for e in memory)
    return {**found, "peak": max(peaks.values()), "peaks": peaks, "reserved": reserved,
            "fullest": {"phase": fullest["phase"], "bytes": fullest["bytes"]}}  # fmt: skip


def planned(here: Path, name: str, found: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    from plaudit.plan import Constants, TrainingLayout
    from plaudit.plan.cost.prediction import predict
    from plaudit.plan.recipes import read_recipe, workload_of
    from plaudit.plan.shape.hardware import Overrides, cluster

    own = Overrides.read(here / "machine.toml")
    place, constants = cluster("1x1xthis-machine", own), Constants().changed(own.constants)
    response, prompt = found["length/mean"], found["length/prompt_mean"]
    work = workload_of(read_recipe(here / f"{name}.toml"), Path, prompt, response)
    cut = TrainingLayout(micro_tokens=work.micro_tokens, zero=0, plain=True)
    plan = predict(work, place, "colocated", training=cut, constants=constants)
    # The allocator counts tensors; the plan also counts the process.
    beside = constants.reserve_bytes if on_gpu else 0.0
    return {
        "step": plan.step.value, "peak": plan.peak.value - beside,
        "phases": {phase.name: phase.seconds.value for phase in plan.phases},
        "memory": {phase.name: {part.name: part.value for part in phase.memory.parts} for phase in plan.phases},
        "time": {phase.name: {part.name: part.value for part in phase.seconds.parts} for phase in plan.phases},
        "shortages": [str(shortage) for shortage in plan.shortages],
    }  # fmt: skip


def show(name: str, found: dict[str, Any], plan: dict[str, Any]) -> None:
    step, peak = found["time/step"], found["peak"]
    off = {"step": plan["step"] / step - 1, "peak": plan["peak"] / peak - 1}
    good = all(abs(off[what]) <= limit for what, limit in LIMITS.items())
    made, learned = plan["phases"]["generation"], plan["phases"]["training"] + plan["phases"]["scoring"]
    updates = sum(found.get(f"time/{phase}", 0.0) for phase in ("old", "reference", "update", "advantages", "reward"))
    print(f"{name:6} {step:8.2f} {plan['step']:8.2f} {off['step']:+6.0%}   {peak / 1e9:8.2f} {plan['peak'] / 1e9:8.2f} "
          f"{off['peak']:+6.0%}   {found['reserved'] / 1e9:8.2f}   generate {found['time/generate']:.2f} ({made:.2f}), "
          f"learn {updates:.2f} ({learned:.2f}){'' if good else '   MISSED'}", flush=True)  # fmt: skip


def calibrated(here: Path, given: Path | None) -> str:
    if given is not None:
        (here / "machine.toml").write_text(given.read_text())
    else:
        print(f"calibrated in {plaudit('plan', '--calibrate', str(here / 'machine.toml')):.0f} s")
    return (here / "machine.toml").read_text()


def one_size(
    here: Path, name: str, shape: tuple[Any, ...], vocabulary: int, options: argparse.Namespace
) -> dict[str, Any]:
    import torch

    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    make_model(here / name, shape, vocabulary, "cuda" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.empty_cache()
    (here / f"{name}.toml").write_text(recipe(here, name, shape, options))
    plaudit("train", str(here / f"{name}.toml"), "--out", str(here / f"{name}-run"))
    found = measured(here / f"{name}-run")
    plan = planned(here, name, found, on_gpu)
    show(name, found, plan)
    for done in (here / name, here / f"{name}-run"):
        shutil.rmtree(done)
    return {"measured": found, "planned": plan}


def plan_again(earlier: dict[str, Any], options: argparse.Namespace) -> None:
    """Plans the measurements of a results file again with the current formulas."""
    print(HEADINGS)
    with tempfile.TemporaryDirectory() as made:
        here = Path(made)
        (here / "machine.toml").write_text(earlier["machine"])
        for name, model in earlier["models"].items():
            config_of(SIZES[name], VOCABULARY).save_pretrained(here / name)
            (here / f"{name}.toml").write_text(recipe(here, name, SIZES[name], options))
            model["planned"] = planned(here, name, model["measured"], on_gpu=True)
            show(name, model["measured"], model["planned"])
    earlier["planned_again"] = datetime.now(UTC).isoformat(timespec="seconds")
    options.out.write_text(json.dumps(earlier, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--machine", type=Path, help="the file written by plaudit plan --calibrate on this machine")
    parser.add_argument("--again", type=Path, help="results of an earlier run to plan again")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "planner_gpu.json")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.again is not None:
        plan_again(json.loads(options.again.read_text()), options)
        return
    import torch

    sizes = TINY if options.tiny else {name: SIZES[name] for name in options.sizes.split(",")}
    vocabulary, words = (200, 12) if options.tiny else (VOCABULARY, WORDS)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    kept: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(), "models": {},
    }  # fmt: skip
    failed = []
    with tempfile.TemporaryDirectory(dir=room_for_models()) as made:
        here = Path(made)
        try:
            kept["machine"] = calibrated(here, options.machine)
        except Failed as error:
            sys.exit(str(error))
        print(kept["machine"], flush=True)
        write_prompts(here / "prompts.jsonl", 600, words, vocabulary)
        print(HEADINGS)
        for name, shape in sizes.items():
            began = time.monotonic()
            try:
                kept["models"][name] = one_size(here, name, shape, vocabulary, options)
            except Failed as error:
                failed.append(name)
                print(f"{name}: {error}", flush=True)
                continue
            options.out.write_text(json.dumps(kept, indent=2) + "\n")
            print(f"       in {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        sys.exit(f"no figures of {', '.join(failed)}")


if __name__ == "__main__":
    main()
