"""Tokens/s of a search, compared with plain generation by the same policy, in less than two minutes on a GPU.

    python benchmarks/search_rate_gpu.py [--lengths 10 40] [--processes 4] [--seconds 110] [--name after] [--tiny]

Policy and process model have SmolLM2-135M's shape and random weights, because the rate does not depend on their output.
The policy's embeddings are constructed so that a token encodes its position in the step: steps have about the requested
length, with some variation, and hardly two are the same, so nearly every path is a separate request.

    plain     width x questions responses in one call of `generate`, as many tokens each as a path has
    search    REBASE and ETS (clusters by text) of `plaudit search`, 1,024 paths at a time, eight steps deep
    2 lanes   REBASE of twice as many questions, one half scored while the other is generated
    processes REBASE of that many times the questions, distributed by `processes` of the recipe; loading excluded
    loop      REBASE as a script over a policy server would do it: the PRM reads every whole path at every level

Each is run twice and the faster run counts. Cells are written when complete, the most informative first; none starts
after --seconds. --tiny: small models on the CPU. Writes benchmarks/results/search_rate_gpu.json, with --name as the
key.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "search_rate_gpu.json"
SHAPE = {"hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3, "intermediate_size": 1536, "max_positions": 1024}
TINY = {"hidden_size": 96, "layers": 2, "heads": 3, "kv_heads": 1, "intermediate_size": 160, "max_positions": 1024}
VOCABULARY = {False: 49_152, True: 2_048}
DEPTH, PATHS = 8, 1024
STOP, SPECIAL = ";", ("<pad>", "<bos>", "<eos>", "<unk>")
LOUD, SURE = 100.0, 24.0  # scale of an embedding relative to the layers' output, and of a logit relative to the others
METHODS: dict[str, dict[str, Any]] = {
    "rebase": {"method": "rebase"}, "ets": {"method": "ets", "clusters": "text"},
    "rebase, 2 lanes": {"method": "rebase"}, "rebase, loop": {"method": "rebase"},
}  # fmt: skip
BEGAN = time.time()


def say(text: str) -> None:
    print(f"[{time.time() - BEGAN:6.1f} s] {text}", flush=True)


def new_tokenizer(size: int) -> Any:
    """A tokenizer with one token per character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    symbols = [*SPECIAL, STOP, *(chr(0x10000 + i) for i in range(size - len(SPECIAL) - 1))]
    words = models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[], unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=1024, clean_up_tokenization_spaces=False, **names
    )


def let_step(module: Any, length: int) -> None:
    """Sets the step length to about this many tokens: the token at one position of a step is followed by one of the
    next position or the one after, with equal probability, and the last position by the step terminator."""
    import torch

    embeddings, head = module.model.embed_tokens.weight, module.lm_head.weight
    places = round(1.5 * (length - 1))
    stop, first = len(SPECIAL), len(SPECIAL) + 1
    numbers = torch.arange(first, len(head), device=head.device)
    at = (numbers - first) % places
    sure = SURE / embeddings.shape[1] ** 0.5  # the final norm scales the position's component to sqrt(width)
    with torch.no_grad():
        embeddings.normal_(0, 0.02, generator=torch.Generator(head.device).manual_seed(1))
        head.normal_(0, 0.002, generator=torch.Generator(head.device).manual_seed(2))
        embeddings[numbers, at] = LOUD
        embeddings[stop, places] = LOUD
        head[numbers[at < 2], places] = sure  # the column of a step's start
        for back in (1, 2):
            head[numbers[at >= back], at[at >= back] - back] = sure
        head[stop, places - 1] = sure


def models(args: argparse.Namespace) -> tuple[Any, Any]:
    """The policy's engine and the scorer."""
    from plaudit.config.search import PrmTable
    from plaudit.core import Engine
    from plaudit.models import new_llama, save
    from plaudit.search.backends.scoring import open_scorer

    size = VOCABULARY[args.tiny]
    tokenizer = new_tokenizer(size)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = TINY if args.tiny else SHAPE
    made = {
        kind: new_llama(kind, vocab_size=size, seed=seed, tie_embeddings=False, **ids, **shape)
        for seed, kind in enumerate(("policy", "steps"))
    }
    where: dict[str, Any] = {"device": args.device, "dtype": args.dtype}
    policy = save(made["policy"], tokenizer, args.work / "policy")
    reward = f'kind = "process"\n\n[format]\nsplit = "{STOP}"\n'
    steps = save(made["steps"], tokenizer, args.work / "steps", reward=reward)
    engine = Engine.load(policy, kv_bytes=args.kv_bytes, **where)
    return engine, open_scorer(PrmTable(path=str(steps), kv_bytes=args.kv_bytes, **where))


def questions(engine: Any, count: int) -> list[Any]:
    from plaudit.search.questions.questions import Question

    rng, first, last = random.Random(1), len(SPECIAL) + 1, engine.decoder.vocab_size - 1
    rows = [(1, *(rng.randint(first, last) for _ in range(62)), len(SPECIAL)) for _ in range(count)]
    texts = [engine.tokenizer.decode(row[1:]) for row in rows]
    return [Question(i, text, text, row) for i, (text, row) in enumerate(zip(texts, rows, strict=True))]


def plain(args: argparse.Namespace, engine: Any, batch: list[Any], tokens: int) -> dict[str, Any]:
    from plaudit.core import SamplingParams

    params = [SamplingParams(n=args.width, max_tokens=tokens, seed=each.index, ignore_eos=True) for each in batch]
    began = time.perf_counter()
    samples = engine.generate([list(each.prompt_ids) for each in batch], params, text=False)
    spent = time.perf_counter() - began
    engine.new_version()
    return {"seconds": spent, "tokens": sum(len(sample.token_ids) for sample in samples), "paths": len(samples)}


def recipe_of(args: argparse.Namespace, name: str, groups: int, **tables: Any) -> Any:
    from plaudit.config.search import parse_search

    return parse_search(
        {"task": "search", "concurrent": groups * max(1, args.paths // args.width),
         "model": {"path": "policy"}, "prm": {"path": "prm"}, "data": {"path": "questions"},
         "steps": {"stop": STOP, "answer": r"#(\d+)$", "max_step_tokens": 256, "max_tokens": 900},
         "search": {"width": args.width, "max_depth": DEPTH, **METHODS[name]}, **tables},
        "search_rate_gpu",
    )  # fmt: skip


def searched(args: argparse.Namespace, name: str, engine: Any, scorer: Any, batch: list[Any]) -> dict[str, Any]:
    from plaudit.search.backends.policy import CorePolicy
    from plaudit.search.search import Search

    lanes = 2 if "lanes" in name else 1
    recipe = recipe_of(args, name, lanes, lanes=lanes)
    chosen = whole_paths(scorer) if "loop" in name else scorer
    policy = CorePolicy(engine, recipe.steps)
    search = Search(recipe, policy=policy, scorer=chosen, tokenizer=engine.tokenizer)
    began, busy = time.perf_counter(), time.process_time()
    costs = [outcome.driver.costs for outcome in search.run(batch)]
    spent, busy = time.perf_counter() - began, time.process_time() - busy
    for each in (engine, scorer.engine):
        each.new_version()  # no run reuses another's cache
    steps, tokens = sum(cost.calls for cost in costs), sum(cost.generated for cost in costs)
    return {
        "seconds": spent, "process": busy, "tokens": tokens, "steps": steps, "tokens_per_step": tokens / steps,
        "phases": dict(search.phases), "programmes": sum(cost.solver + cost.clustering for cost in costs),
        "kv_tokens": sum(cost.kv_tokens for cost in costs), "prm_tokens": sum(cost.prm_tokens for cost in costs),
    }  # fmt: skip


def shared_out(args: argparse.Namespace, engine: Any, batch: list[Any], count: int) -> dict[str, Any]:
    """The faster of two runs with that many processes, after one that captures their graphs."""
    from plaudit.models import save
    from plaudit.search.workers import SearchWorkers

    policy = save(engine.decoder.module, engine.tokenizer, args.work / "stepping")
    file = args.work / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": each.text}) + "\n" for each in batch))
    where = {"device": args.device, "dtype": args.dtype}
    recipe = recipe_of(
        args, "rebase", count, processes=count, data={"path": str(file)}, model={"path": str(policy), **where},
        engine={"kv_bytes": count * args.kv_bytes // 2},
        prm={"path": str(args.work / "steps"), "kv_bytes": count * args.kv_bytes // 2, **where},
    )  # fmt: skip
    workers, runs = SearchWorkers([recipe]), []
    try:
        for _ in range(3):
            began = time.perf_counter()
            costs = [line["costs"] for line in workers.lines(workers.questions())]
            runs.append({"seconds": time.perf_counter() - began, "phases": dict(workers.phases), "costs": costs})
    finally:
        workers.close()
    best = min(runs[1:], key=lambda run: run["seconds"])
    costs = best.pop("costs")
    steps, tokens = sum(cost["calls"] for cost in costs), sum(cost["generated"] for cost in costs)
    programmes = sum(cost["solver"] + cost["clustering"] for cost in costs)
    return {**best, "tokens": tokens, "steps": steps, "tokens_per_step": tokens / steps, "programmes": programmes}


def whole_paths(scorer: Any) -> Any:
    """The same model without a cache of paths."""
    from search_policy_cells import whole_scores

    from plaudit.search.backends.scored import Scored
    from plaudit.search.backends.scoring import LocalScorer

    class WholePaths(LocalScorer):
        def score(self, paths: Any, *, hidden: bool = False) -> list[Scored]:
            return [Scored(value) for value in whole_scores(self, paths)]

        def release(self, places: Any) -> None:
            """Nothing to release."""

    return WholePaths(scorer.engine, scorer.reading)


def measure(args: argparse.Namespace) -> None:
    from plaudit.collector import frozen

    cells: dict[str, Any] = {}
    engine, scorer = models(args)
    say("models are there")
    few = max(1, args.paths // args.width)
    most = questions(engine, few * max(2, *args.processes))
    batch = most[:few]
    let_step(engine.decoder.module, args.lengths[0])
    searched(args, "rebase", engine, scorer, batch)  # capture graphs and kernels of the sizes used
    say("warm")
    with frozen():  # the order in which `plaudit search` runs
        measure_cells(args, cells, engine, scorer, most)


def measure_cells(args: argparse.Namespace, cells: dict[str, Any], engine: Any, scorer: Any, most: list[Any]) -> None:
    few = max(1, args.paths // args.width)
    batch = most[:few]
    first, *others = METHODS
    names = [first, *(f"rebase, {count} processes" for count in args.processes), *others]
    for name, length in itertools.product(names, args.lengths):
        if time.time() - BEGAN > args.seconds:
            say(f"not measured any more: {name}, steps of {length}")
            continue
        let_step(engine.decoder.module, length)
        engine.new_version()
        cell = cells.setdefault(str(length), {})
        if "plain" not in cell:
            runs = [plain(args, engine, batch, DEPTH * length) for _ in range(3)][1:]
            best = min(runs, key=lambda run: run["seconds"])
            cell["plain"] = {**best, "tokens_per_second": best["tokens"] / best["seconds"]}
            say(f"steps of {length}: plain {cell['plain']['tokens_per_second']:,.0f} tokens/s")
        groups = int(name.split()[1]) if name not in METHODS or "lanes" in name else 1
        chosen = most[: groups * few]
        if name in METHODS:
            runs = [searched(args, name, engine, scorer, chosen) for _ in range(2)]
            best = min(runs, key=lambda run: run["seconds"])
        else:
            best = shared_out(args, engine, chosen, groups)
        rate, limit = best["tokens"] / best["seconds"], cell["plain"]["tokens_per_second"]
        over = 1e6 * (best["seconds"] - best["tokens"] / limit) / best["steps"]
        share = best["programmes"] / best["seconds"]
        cell[name] = {
            **best, "questions": len(chosen), "tokens_per_second": rate, "share": rate / limit,
            "programme_share": share, "microseconds_over_plain": over,
            "seconds_per_question": best["seconds"] / len(chosen),
        }  # fmt: skip
        phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in best["phases"].items())
        say(
            f"steps of {best['tokens_per_step']:.1f}, {name}: {rate:,.0f} tokens/s, {rate / limit:.1%} of plain, "
            f"{over:.0f} us a step over it; {best['seconds']:.2f} s: {phases}, programmes {share:.1%}"
        )
        write(args, cells)


def write(args: argparse.Namespace, cells: dict[str, Any]) -> None:
    """Rewritten after every cell."""
    import torch
    from stamp import processor, stamp

    machine = processor() if args.tiny else f"one {torch.cuda.get_device_name()}, {processor()}"
    kept = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    kept["runs"][args.name] = {
        **stamp(__file__, machine, {}), "tiny": args.tiny, "width": args.width, "paths": args.paths, "depth": DEPTH,
        "shape": TINY if args.tiny else SHAPE, "steps_of": cells,
    }  # fmt: skip
    args.out.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 40], help="Tokens per step.")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--processes", type=int, nargs="*", default=[4])
    parser.add_argument("--seconds", type=float, default=110.0, help="No cell starts after this time.")
    parser.add_argument("--name", default="after")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / "search-rate")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch

    if args.tiny:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: --tiny runs on the CPU")
    args.device, args.dtype = ("cpu", "float32") if args.tiny else ("cuda", "bfloat16")
    args.kv_bytes, args.paths = (2**28, 128) if args.tiny else (12 * 2**30, PATHS)
    args.work.mkdir(parents=True, exist_ok=True)
    measure(args)
    say("done")


if __name__ == "__main__":
    main()
