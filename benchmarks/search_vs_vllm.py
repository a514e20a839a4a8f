"""Seconds per question of a beam search: `plaudit search` compared with search-and-learn's loop over vLLM, on one CPU.

    python benchmarks/search_vs_vllm.py [--lengths 10 40] [--questions 4] [--width 16] [--repeats 2] [--tiny]

    vLLM     benchmarks/rivals/vllm_beam.py: a step of every beam in one call of vLLM with prefix caching, then a
             process model in transformers over every whole path, as search-and-learn's beam search does
    plaudit  `plaudit search`, method beam with `distinct`, the same width, number of kept beams, depth and models

Policy and process model have SmolLM2-135M's shape and the random weights of benchmarks/search_rate_gpu.py, whose steps
have about the length given by --lengths, float32, as many threads as there are cores on both sides. A workload runs
once to warm up, then --repeats times, and the fastest counts. Start-up is not counted. Writes
benchmarks/results/search_vs_vllm.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import search_rate_gpu as rate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "search_vs_vllm.json"
STEP_TOKENS, PRM_BATCH = 256, 16
SETTINGS = "prefix caching, float32, VLLM_CPU_OMP_THREADS_BIND=nobind; PRM in transformers, batches of 16 by length"


def recipe_of(args: argparse.Namespace) -> Any:
    from plaudit.config.search import parse_search

    beam = {"method": "beam", "distinct": True, "width": args.width, "keep": args.keep, "max_depth": rate.DEPTH}
    return parse_search(
        {"task": "search", "concurrent": args.questions, "model": {"path": "policy"}, "prm": {"path": "prm"},
         "data": {"path": "questions"},
         "steps": {"stop": rate.STOP, "answer": r"#(\d+)$", "max_step_tokens": STEP_TOKENS, "max_tokens": 900},
         "search": beam},
        "search_vs_vllm",
    )  # fmt: skip


def searched(recipe: Any, engine: Any, scorer: Any, questions: list[Any]) -> dict[str, Any]:
    from plaudit.search.backends.policy import CorePolicy
    from plaudit.search.search import Search

    search = Search(recipe, policy=CorePolicy(engine, recipe.steps), scorer=scorer, tokenizer=engine.tokenizer)
    began = time.perf_counter()
    costs = [outcome.driver.costs for outcome in search.run(questions)]
    spent = time.perf_counter() - began
    for each in (engine, scorer.engine):
        each.new_version()  # no run reuses another's cache
    return {
        "seconds": spent, "tokens": sum(cost.generated for cost in costs), "steps": sum(cost.calls for cost in costs),
        "phases": dict(search.phases),
    }  # fmt: skip


def ours(args: argparse.Namespace, works: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest run of each length; the models' files stay in the work directory."""
    from plaudit.models import save

    engine, scorer = rate.models(args)
    recipe, questions = recipe_of(args), rate.questions(engine, args.questions + 1)
    best: dict[str, dict[str, Any]] = {}
    for work in works:
        rate.let_step(engine.decoder.module, work["length"])
        engine.new_version()
        policy = save(engine.decoder.module, engine.tokenizer, args.work / f"stepping-{work['length']}")
        work |= {"policy": str(policy), "prm": str(args.work / "steps"), "warmup": [questions[-1].text]}
        work["questions"] = [each.text for each in questions[:-1]]
        searched(recipe, engine, scorer, questions[-1:])
        runs = [searched(recipe, engine, scorer, questions[:-1]) for _ in range(args.repeats)]
        best[work["name"]] = min(runs, key=lambda run: run["seconds"])
        rate.say(
            f"plaudit, steps of {work['length']}: {best[work['name']]['seconds'] / args.questions:.2f} s a question"
        )
    return best


def beside(args: argparse.Namespace, works: list[dict[str, Any]], plaudit: dict[str, Any]) -> None:
    """The rival's runs, added to ours."""
    options = {"dtype": "float32", "max_model_len": 1024, "enable_prefix_caching": True, "max_num_seqs": 256, "seed": 0}
    given = {
        "width": args.width, "keep": args.keep, "stop": rate.STOP, "depth": rate.DEPTH, "step_tokens": STEP_TOKENS,
        "prm_batch": PRM_BATCH, "threads": args.threads, "repeats": args.repeats, "options": options, "works": works,
    }  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    script, log = ROOT / "benchmarks" / "rivals" / "vllm_beam.py", args.work / "vllm.log"
    best: dict[str, dict[str, Any]] = {}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [args.vllm_python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, **environment},
        ) as child,
    ):  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(given))
        child.stdin.close()
        for line in child.stdout:
            if not line.startswith('{"work"'):
                continue
            run = json.loads(line)
            name = run.pop("work")
            best[name] = min(best.get(name, run), run, key=lambda each: each["seconds"])
            rate.say(f"search-and-learn's loop, {name}: {run['seconds'] / args.questions:.2f} s a question")
            write(args, works, plaudit, best)
    if child.returncode:
        raise SystemExit(f"{script} failed with {child.returncode}:\n{log.read_text()[-4000:]}")


def write(
    args: argparse.Namespace, works: list[dict[str, Any]], plaudit: dict[str, Any], rival: dict[str, Any]
) -> None:
    """Rewritten after every run of the rival, with the workloads that both have completed."""
    from stamp import processor, stamp, versions

    rows: dict[str, Any] = {}
    for name in (work["name"] for work in works if work["name"] in rival):
        per = {who: found[name]["seconds"] / args.questions for who, found in (("plaudit", plaudit), ("vllm", rival))}
        rows[name] = {"plaudit": plaudit[name], "vllm": rival[name], "seconds_per_question": per}
        rows[name]["ratio"] = per["vllm"] / per["plaudit"]
    number = versions(args.vllm_python, ["vllm-cpu"])["vllm-cpu"]
    record = {
        **stamp(__file__, processor(), {"vllm-cpu": (number, SETTINGS)}), "load": os.getloadavg()[0],
        "threads": args.threads, "questions": args.questions, "width": args.width, "keep": args.keep,
        "depth": rate.DEPTH, "shape": rate.TINY if args.tiny else rate.SHAPE, "works": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 40], help="Tokens per step.")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--keep", type=int, default=4, help="Number of beams that are kept.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="models of two layers")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--work", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / "search-vs-vllm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    args.device, args.dtype, args.kv_bytes = "cpu", "float32", 2**31
    args.work.mkdir(parents=True, exist_ok=True)
    works: list[dict[str, Any]] = [{"name": f"steps of {length}", "length": length} for length in args.lengths]
    beside(args, works, ours(args, works))


if __name__ == "__main__":
    main()
