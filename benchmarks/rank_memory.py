"""Host memory that a rank needs to load its shard of a model, compared with a process that loads the whole model.

    python benchmarks/rank_memory.py

A Llama of 134M parameters in float32, in shard files of 64 MB. The figure is the peak of resident memory, mapped files
included, sampled every millisecond, minus what the process used before; all weights are read once, as in a forward
pass. Writes benchmarks/results/rank_memory.json.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from copy import deepcopy
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "rank_memory.json"
SHAPES = {"one process": (1, 1), "2 ranks": (2, 1), "2 stages": (1, 2), "2 stages of 2 ranks": (2, 2)}


def write_model(directory: Path, hidden: int = 1024, layers: int = 10) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    from plaudit.models import load_tokenizer, resolve

    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="64MB")
    load_tokenizer(resolve("sums")).save_pretrained(directory)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(path: str, rank: int, ranks: int, stages: int) -> None:
    from plaudit.core.model.split import keep_part
    from plaudit.core.model.stages import RankPosition
    from plaudit.models import load_any
    from plaudit.models.part import fill, outline

    load_any("sums")  # allocates the memory that libraries keep
    before, peak, over = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, resident_bytes())
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()
    if ranks * stages == 1:
        module = load_any(path).module
    else:
        whole = outline(path, "float32")
        module = deepcopy(whole.module)
        fill(module, whole.read, keep_part(module, RankPosition(rank, ranks, stages)), "cpu")
    for parameter in module.parameters():
        parameter.sum()
    time.sleep(0.01)
    over.set()
    held = sum(tensor.numel() * tensor.element_size() for tensor in set(module.parameters()))
    print(json.dumps({"peak_mb": round((peak - before) / 2**20, 1), "weights_mb": round(held / 2**20, 1)}))


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1], *map(int, sys.argv[2:]))
        return
    ranks: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        size = write_model(Path(place))
        for name, shape in SHAPES.items():
            for rank in range(shape[0] * shape[1]):
                command = [sys.executable, __file__, place, str(rank), *map(str, shape)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
                ranks.setdefault(name, []).append(json.loads(done.stdout))
    result = {
        "model_mb": round(size / 2**20, 1), "ranks": ranks, "machine": platform.processor() or platform.machine(),
        "torch": version("torch"), "transformers": version("transformers"),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
