"""Peak memory of one policy update, by vocabulary and by length, compared with a plain transformers forward with full
logits.

    python benchmarks/update_memory.py [--quick]

A random Llama (2 layers, 128 wide, tied embeddings, float32, CPU), 8 samples with advantages. Plain: `model(ids)` and
cross-entropy of its logits, weighted and summed. Every figure comes from a separate process: peak resident memory
during the update minus that before it. It includes the gradient of the weights, which both must store and which is also
reported separately. Writes benchmarks/results/update_memory.json, except with --quick.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "update_memory.json"
SAMPLES, PROMPT = 8, 16
POINTS = [(v, 256) for v in (1_024, 8_192, 32_768, 131_072)] + [(32_768, n) for n in (128, 512, 1_024)]
QUICK = [(1_024, 128), (32_768, 128)]
SIDES = ("plaudit", "transformers")


def resident(field: str) -> int:
    """MiB of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) // 1024


def update(side: str, vocabulary: int, length: int) -> tuple[Callable[[], None], int]:
    """Runs the update; returns the MiB of its weights' gradients."""
    import torch

    from plaudit.config import RlAlgorithm
    from plaudit.core.proof.support import inspect
    from plaudit.models import new_llama
    from plaudit.records import Sample
    from plaudit.train.policy.experience import Experience, flat, own_tokens
    from plaudit.train.policy.policy import Policy

    module: Any = new_llama(
        "policy", vocab_size=vocabulary, hidden_size=128, layers=2, heads=4, intermediate_size=352,
        max_positions=PROMPT + length, seed=1,
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (SAMPLES, PROMPT + length), generator=torch.Generator().manual_seed(1))
    advantages = torch.randn(SAMPLES, length, generator=torch.Generator().manual_seed(2))
    size = sum(p.numel() for p in module.parameters()) * 4 >> 20
    if side == "transformers":

        def plain() -> None:
            logits = module(input_ids=ids).logits[:, PROMPT - 1 : -1]
            nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten(), reduction="none")
            (nll * advantages.flatten()).mean().backward()

        return plain, size
    zeros = (0.0,) * length
    samples = tuple(
        Sample(tuple(row[:PROMPT]), tuple(row[PROMPT:]), "", zeros, zeros, (0,) * length, (1,) * length, "stop", i, 0)
        for i, row in enumerate(ids.tolist())
    )
    policy = Policy(
        inspect(module), RlAlgorithm(name="grpo"), temperature=1.0, max_tokens=length, micro_batch_tokens=1 << 20
    )
    data = Experience(samples, own_tokens(samples), flat(samples, "logprobs"), advantages.flatten())
    return lambda: policy.gradient(data, 0.0) and None, size


def point(side: str, vocabulary: int, length: int) -> dict[str, int]:
    import torch

    torch.set_num_threads(1)
    update(side, 64, 8)[0]()  # exclude what the libraries load with their first update
    run, size = update(side, vocabulary, length)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = resident("VmRSS")
    run()
    return {"update_mib": resident("VmHWM") - before, "gradient_mib": size}


def ask(side: str, vocabulary: int, length: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--point", side, str(vocabulary), str(length)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def show(rows: list[dict[str, int]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("vocabulary", "response tokens", "logits MiB", "gradients MiB", "transformers MiB", "plaudit MiB")
    for row in rows:
        names = ("vocabulary", "length", "logits_mib", "gradient_mib", "transformers_mib", "plaudit_mib")
        numbers = [row[name] * (SAMPLES if name == "length" else 1) for name in names]
        table.add_row(*(f"{number:,}" for number in numbers))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small points; writes no results")
    parser.add_argument("--point", nargs=3, metavar=("SIDE", "VOCABULARY", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.point:
        side, vocabulary, length = options.point
        print(json.dumps(point(side, int(vocabulary), int(length))))
        return
    rows = []
    for vocabulary, length in QUICK if options.quick else POINTS:
        found = {side: ask(side, vocabulary, length) for side in SIDES}
        rows.append(
            {
                "vocabulary": vocabulary, "length": length, "logits_mib": SAMPLES * length * vocabulary * 4 >> 20,
                "gradient_mib": found["plaudit"]["gradient_mib"],
                **{f"{side}_mib": found[side]["update_mib"] for side in SIDES},
            }
        )  # fmt: skip
    show(rows)
    if options.quick:
        return
    from stamp import processor, stamp

    plain = version("transformers"), "its own forward with full logits, cross-entropy, float32"
    record = {**stamp(__file__, processor(), {"transformers": plain}), "samples": SAMPLES, "rows": rows}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
