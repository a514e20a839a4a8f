"""Is tree search worth it with a real policy? Trees against best-of-n at equal tokens and equal wall time, on one GPU.

    python benchmarks/search_policy_gpu.py [--ground chain|countdown] [--seconds 300] [--processes 8] [--tiny]

A Llama of 18 million parameters is trained from scratch on a task of many checkable steps
(benchmarks/search_grounds.py), and the level at which it is right about 15 % of the time is searched. One process model
of its size is trained on the exact labels of its responses' steps, another on how often completions from those steps
are right. Then

    timed    alone on the GPU: plain generation, best-of-n (whole responses in one call, scored once), and trees of the
             same number of paths; time of integer programs and clustering
    pool     responses to every question; best-of-n of any n is the mean over draws from them
    trees    beam, DVTS, REBASE and ETS at widths 4, 16 and 64 with the learned process model, with the other one, and
             with the exact labels themselves

run in several processes until the time is used up: first some questions in the cells of widths up to 16, then all
questions there, then the wide ones. --work keeps models, rows and times, each written when complete, and the next call
continues from there. Writes benchmarks/results/search_policy_gpu.json. 1,000 questions of the second ground:

    python benchmarks/search_policy_gpu.py --ground countdown --seconds 440 --valued 0 \
      --methods rebase "rebase, T 1" ets beam --wide rebase "rebase, T 1"
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from search_grounds import GROUNDS, STOP, SYMBOLS, demonstrations, new_tokenizer, questions, split
from search_policy_tables import kept_rows, show, tables
from stamp import processor, stamp

RESULTS = Path(__file__).parent / "results" / "search_policy_gpu.json"
WIDTHS = (4, 16, 64)
SHAPE = {"hidden_size": 512, "layers": 6, "heads": 8, "kv_heads": 4, "intermediate_size": 1408, "max_positions": 512}
TINY = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 160, "max_positions": 512}
AIMED = 0.15  # target accuracy of the policy
BEGAN = time.time()


def say(text: str) -> None:
    print(f"[{time.time() - BEGAN:6.1f} s] {text}", flush=True)


# Training


def trained(
    args: argparse.Namespace, name: str, recipe: dict[str, Any], rows: Sequence[dict[str, Any]], share: float
) -> Any:
    """Runs as many steps as fit into this share of the seconds, estimated from twenty trial steps; the learning rate
    then decays to its end in time."""
    import plaudit

    ticks: list[float] = []
    steps = args.steps
    common = {"data": rows, "fresh": True, "quiet": True}
    if steps is None:
        trial = args.work / f"{name}-trial"
        plaudit.train(recipe, out=trial, steps=40, on_step=lambda *_: ticks.append(time.perf_counter()), **common)
        each = (ticks[-1] - ticks[-21]) / 20
        most = min(args.most_steps, 8 * len(rows) // args.batch)  # the ninth epoch starts to memorize
        steps = max(60, min(most, int(share * args.seconds / each)))
        say(f"{name}: {1e3 * each:.1f} ms a step, so {steps} steps")
    run = plaudit.train(recipe, out=args.work / name, steps=steps, **common)
    say(f"{name}: {json.dumps({key: value for key, value in run.summary.items() if key != 'task'})}")
    return run


def recipe_of(args: argparse.Namespace, task: str, model: Path, lr: float) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "task": task, "seed": 1, "model": {"path": str(model), "dtype": args.dtype, "device": args.device},
        "data": {"path": "rows", "eval_items": 400},
        "train": {"steps": 1, "batch": args.batch, "optimizer": "muon", "lr": lr, "warmup": 20, "eval_every": 100_000,
                  "micro_batch_tokens": 65_536, "checkpoint": {"every": 100_000}},
    }  # fmt: skip
    return {**tree, "algorithm": {"split": STOP}} if task == "prm" else tree


def new_policy(args: argparse.Namespace) -> Path:
    from plaudit.models import new_llama, save

    tokenizer, shape = new_tokenizer(), TINY if args.tiny else SHAPE
    module = new_llama(
        "policy", vocab_size=len(tokenizer), seed=1, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **shape,
    )  # fmt: skip
    return save(module, tokenizer, args.work / "new")


def rates(args: argparse.Namespace, engine: Any) -> dict[int, float]:
    """Accuracy of a single sample, by level."""
    from plaudit.core import SamplingParams

    ground, found = GROUNDS[args.ground], {}
    for level in args.levels:
        prompts = questions(ground, level, args.probe, "probe")
        tokens = ground.steps(level) * ground.step_tokens + 8
        samples = engine.generate(prompts, [SamplingParams(max_tokens=tokens, seed=i) for i in range(len(prompts))])
        found[level] = fmean(ground.right(prompts[s.group], s.text) for s in samples)
    return found


def solutions(args: argparse.Namespace, engine: Any, level: int) -> list[Any]:
    """Distinct responses to questions that are not searched, in the form that `plaudit steps` takes."""
    from plaudit.core import SamplingParams

    ground = GROUNDS[args.ground]
    prompts = questions(ground, level, args.solved, "solved")
    tokens = ground.steps(level) * ground.step_tokens + 8
    params = [SamplingParams(n=4, max_tokens=tokens, seed=i) for i in range(len(prompts))]
    drawn = {}
    for sample in engine.generate(prompts, params):
        prompt = prompts[sample.group]
        reward = float(ground.right(prompt, sample.text))
        drawn[prompt, sample.text] = replace(sample, reward=reward, extra={"prompt": prompt, "truth": prompt})
    return list(drawn.values())


def labelled(args: argparse.Namespace, samples: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows for a process model, from exact labels."""
    ground, rows = GROUNDS[args.ground], []
    for sample in samples:
        prompt, steps = sample.extra["prompt"], split(sample.text)
        if steps:
            marks = [float(mark) for mark in ground.labels(prompt, steps)]
            finished = sample.finish_reason == "stop" and not steps[-1].endswith(STOP)
            rows.append({"prompt": prompt, "steps": steps, "labels": marks, "finished": finished})
    return [row for row in rows if row["finished"] or row["steps"][-1].endswith(STOP)]


class Rewards:
    """Rewards of completions, from the task's own check."""

    def __init__(self, ground: str) -> None:
        self.ground = GROUNDS[ground]

    def score(self, prompts: Sequence[Any], samples: Sequence[Any]) -> list[Any]:
        pairs = zip(prompts, samples, strict=True)
        return [replace(sample, reward=float(self.ground.right(prompt.text, sample.text))) for prompt, sample in pairs]


def valued(args: argparse.Namespace, engine: Any, samples: Sequence[Any], level: int) -> list[dict[str, Any]]:
    """Rows for a process model, from the share of right completions: what `plaudit steps` does."""
    from plaudit.config.prompting import SamplingTable
    from plaudit.train.rollouts.step_values import Cutter, beginning_values, row_of

    ground = GROUNDS[args.ground]
    cutter = Cutter(engine.tokenizer, engine.end_tokens, STOP)
    cut = [solution for sample in samples[: args.valued] if (solution := cutter(sample)) is not None]
    table = SamplingTable(max_tokens=ground.steps(level) * ground.step_tokens + 8)
    values = beginning_values(engine, Rewards(args.ground), table, 1, cut, 4)  # type: ignore[arg-type]
    return [row_of(solution, values) for solution in cut]


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """The policy, its level and its process models, saved in the work directory."""
    from plaudit.core import Engine

    done, facts = args.work / "facts.json", {}
    if done.exists():
        return dict(json.loads(done.read_text()))
    rows = demonstrations(GROUNDS[args.ground], args.demonstrations)
    model, rounds = new_policy(args), 0
    while True:  # a policy below the target accuracy trains further
        rounds += 1
        name = "policy" if rounds == 1 else f"policy-{rounds}"
        run = trained(args, name, recipe_of(args, "sft", model, 2e-3), rows, 0.14)
        engine = Engine.load(run.model, device=args.device, dtype=args.dtype, kv_bytes=args.kv_bytes)
        found = rates(args, engine)
        level = min(found, key=lambda each: abs(found[each] - AIMED))
        fits = 0.05 <= found[level] <= 0.3
        say(f"right by level: {found}; level {level}" + ("" if fits else ": OUTSIDE 5 to 30 %"))
        if max(found.values()) >= 0.05 or rounds == args.rounds:
            break
        model = run.model
    facts = {
        "level": level, "rates": found, "rounds": rounds, "policy": dict(run.summary), "model": str(run.model),
        "steps": GROUNDS[args.ground].steps(level),
    }  # fmt: skip
    samples = solutions(args, engine, level)
    say(f"{len(samples)} responses for process models")
    by = {"steps": labelled(args, samples)}
    if args.valued:
        by["values"] = valued(args, engine, samples, level)
    say(f"rows: { {name: len(rows) for name, rows in by.items()} }")
    del engine
    facts["prm"] = {}
    for (name, own), share in zip(by.items(), (0.07, 0.035), strict=False):
        prm = trained(args, f"prm-{name}", recipe_of(args, "prm", run.model, 1e-3), own, share)
        facts["prm"][name] = {**prm.summary, "rows": len(own)}
    done.write_text(json.dumps(facts))
    return facts


# Searching


def plain(searcher: Any, questions: Sequence[Any], width: int, seed: int) -> dict[str, float]:
    """Best-of-n in its fastest form: whole responses in one call, each scored once."""
    began = time.perf_counter()
    samples = searcher.sampled(questions, width, seed)
    middle = time.perf_counter()
    searcher.judged(questions, samples, "steps")
    spent = time.perf_counter() - began
    searcher.engine.new_version()
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {"generate": middle - began, "all": spent, "tokens": tokens, "paths": len(samples)}


def timed(args: argparse.Namespace, searcher: Any, kept: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Alone on the device: plain generation and best-of-n, and trees with as many paths, except those that an earlier
    call has timed; no further trees once half of the time is used."""
    from search_policy_cells import Task

    widest = max(args.widths)
    questions = searcher.questions[: args.paths // widest]
    wide = sorted(args.widths, reverse=True)
    order = [(name, width, 1) for width in wide[:2] for name in chosen(args, width)]
    order += [("rebase", widest, 2), ("best-of-n", widest, 1)]
    order += [(name, width, 1) for width in wide[2:] for name in chosen(args, width)]
    over = {(each["method"], each["width"], each["lanes"]) for each in kept.get("trees", ())}
    order = [each for each in order if each not in over]
    if kept and not order:
        return [], kept
    runs = [plain(searcher, questions, widest, seed) for seed in (7, 8, 9)][1:]
    rate = max(each["tokens"] / each["generate"] for each in runs)
    figures: dict[str, Any] = {
        "plain": runs, "plain_tokens_per_second": rate, "trees": list(kept.get("trees", ())),
        "seconds_per_path": min(each["all"] / each["paths"] for each in runs),
    }  # fmt: skip
    say(f"plain: {json.dumps(figures)}")
    rows: list[Any] = []
    searcher.tree(Task("rebase", "steps", widest, 0, len(questions)))  # capture graphs of the sizes that trees have
    for name, width, lanes in order:
        if time.time() > BEGAN + 0.6 * args.seconds:
            say(f"not timed any more: {name} at width {width}")
            continue
        task = Task(name, "steps", width, 0, min(len(searcher.questions), args.paths // width))
        own, spent = searcher.tree(task, lanes)
        tokens = sum(row["generated"] for row in own)
        programme = sum(row["solver"] + row["clustering"] for row in own)
        line = {
            "method": name, "width": width, "lanes": lanes, "questions": len(own), "tokens": tokens, **spent,
            "tokens_per_second": tokens / spent["all"], "share": tokens / spent["all"] / rate,
            "seconds_per_question": spent["all"] / len(own), "programme_share": programme / spent["all"],
        }  # fmt: skip
        figures["trees"].append(line)
        say("timed: " + json.dumps({k: v if isinstance(v, str) else round(v, 4) for k, v in line.items()}))
        rows += own if lanes == 1 and name != "best-of-n" else []
    return rows, figures


def chosen(args: argparse.Namespace, width: int) -> list[str]:
    """The tree methods of a width."""
    from search_policy_cells import TREES

    wide = args.wide if width > 16 else None
    return list(wide or args.methods or TREES)


def cells(args: argparse.Namespace, facts: dict[str, Any]) -> Iterator[Any]:
    """The cells in order: the first questions at the cheap widths, all questions there, then the wide ones."""
    from search_policy_cells import PATHS, Task

    models = ",".join(facts["prm"])
    first, last = min(args.first, args.questions), args.questions

    def blocks(method: str, prm: str, width: int, begin: int, end: int, paths: int) -> Iterator[Any]:
        size = max(1, paths // width)
        for at in range(begin, end, size):
            yield Task(method, prm, width, at, min(at + size, end))

    def both(
        begin: int, end: int, prm: str, widths: Sequence[int], names: Sequence[str] | None = None
    ) -> Iterator[Any]:
        for width in widths:
            for name in names or chosen(args, width):
                yield from blocks(name, prm, width, begin, end, PATHS)

    def pool(begin: int, end: int) -> Iterator[Any]:
        return blocks("pool", models, args.pool, begin, end, 2 * PATHS)

    wide, narrow = [w for w in args.widths if w > 16], [w for w in args.widths if w <= 16]
    yield from pool(0, first)
    yield from both(0, first, "steps", narrow)
    yield from both(0, first, "labels", [w for w in args.widths if w == 16])
    for name in list(facts["prm"])[1:]:
        yield from both(0, first, name, [w for w in args.widths if w == 16])
    yield from pool(first, last)
    yield from both(first, last, "steps", narrow)
    yield from both(0, first, "steps", wide)
    yield from both(first, last, "steps", wide)
    yield from both(0, first, "labels", [w for w in args.widths if w != 16], ("rebase", "ets"))


worker: dict[str, Any] = {}


def begin_worker(until: float) -> None:
    """Imports early because it takes long; models are opened with the first task, once they are trained."""
    import torch

    torch.set_num_threads(1)
    import search_policy_cells  # noqa: F401

    worker["until"] = until


def work(setup: Any, task: Any) -> list[Any]:
    from search_policy_cells import Searcher

    if time.time() > worker["until"]:
        return []
    if "searcher" not in worker:
        worker["searcher"] = Searcher(setup)
    rows: list[Any] = worker["searcher"].run(task)
    return rows


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["method"], row["prm"], row["width"], row["question"]


def search_all(args: argparse.Namespace, pool: Any, setup: Any, facts: dict[str, Any], record: Record) -> None:
    """Runs all cells that fit into the time, each written when complete."""
    known = {key(row) for row in record.rows}
    waiting = [
        task for task in cells(args, facts)
        if any((task.method, task.prm, task.width, q) not in known for q in range(task.first, task.last))
    ]  # fmt: skip
    say(f"{len(waiting)} tasks for {args.processes} processes")
    running, done, reported = [], 0, time.time()
    queue = iter(waiting)
    while True:
        while len(running) < 2 * args.processes and (task := next(queue, None)) is not None:
            running.append(pool.apply_async(work, (setup, task)))
        if not running:
            return
        over = [each for each in running if each.ready()]
        for each in over:
            running.remove(each)
            try:
                found = each.get()
            except Exception as error:  # the other cells are still useful; the record lists what is missing
                say(f"FAILED: {type(error).__name__}: {error}")
                record.failed.append(f"{type(error).__name__}: {error}")
                continue
            done += bool(found)
            record.add([row for row in found if key(row) not in known])
        if time.time() - reported > 15:
            reported = time.time()
            say(f"{done} of {len(waiting)} tasks done")
            record.write()
        if time.time() > args.until + args.grace:
            say("the time is over, tasks that are still at work are left")
            return
        time.sleep(0.02)


# Figures


class Record:
    """Rows as they arrive, in a file of the work directory, and the results computed from them."""

    def __init__(self, args: argparse.Namespace, facts: dict[str, Any], machine: str) -> None:
        self.args, self.facts, self.machine = args, facts, machine
        self.path = args.work / "rows.jsonl"
        self.rows = kept_rows(self.path)
        self.times = args.work / "timed.json"
        self.figures: dict[str, Any] = json.loads(self.times.read_text()) if self.times.exists() else {}
        self.failed: list[str] = []

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows += rows
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def keep_times(self, figures: dict[str, Any]) -> None:
        self.figures = figures
        self.times.write_text(json.dumps(figures))

    def write(self) -> dict[str, Any]:
        result = {
            **stamp(__file__, self.machine, {}), "ground": self.args.ground, "tiny": self.args.tiny,
            **{name: fact for name, fact in self.facts.items() if name != "model"},
            "seconds": round(time.time() - BEGAN, 1), "failed": self.failed, "timed": self.figures,
            **tables(self.rows, self.figures, self.facts),
        }  # fmt: skip
        everything = {}
        if self.args.out.exists():
            everything = json.loads(self.args.out.read_text()).get("grounds", {})
        everything[self.args.ground] = result
        self.args.out.write_text(
            json.dumps({**stamp(__file__, self.machine, {}), "grounds": everything}, indent=1) + "\n"
        )
        return result


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ground", choices=list(GROUNDS), default="chain")
    parser.add_argument("--seconds", type=float, default=300.0, help="Time limit, start and training included.")
    parser.add_argument("--processes", type=int, default=8, help="Concurrent search processes on the GPU.")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--first", type=int, help="Questions that all narrow cells complete before any gets more.")
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="Tree methods; default: all.")
    parser.add_argument(
        "--wide", nargs="+", metavar="NAME", help="Tree methods at widths above 16; default: --methods."
    )
    parser.add_argument(
        "--valued", type=int, help="Responses whose steps train the other process model; 0: no such model."
    )
    parser.add_argument("--steps", type=int, help="Steps of each training; default: as many as fit its seconds.")
    parser.add_argument("--work", type=Path, help="Directory of models and rows; the next call continues from there.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="Smoke test on the CPU with a model that learns nothing.")
    args = parser.parse_args()
    ground = GROUNDS[args.ground]
    sizes = {
        False: {"batch": 128, "demonstrations": 100_000, "most_steps": 4000, "probe": 400, "solved": 4000,
                "valued": 2000, "pool": 192, "first": 250, "paths": 2048, "widths": WIDTHS, "levels": ground.levels,
                "device": "cuda", "dtype": "bfloat16", "kv_bytes": 3 * 2**30, "grace": 20.0, "rounds": 3},
        True: {"batch": 16, "demonstrations": 2000, "most_steps": 150, "probe": 20, "solved": 30, "valued": 10,
               "pool": 8, "first": 6, "paths": 64, "widths": (4, 16), "levels": ground.levels[:2], "device": "cpu",
               "dtype": "float32", "kv_bytes": 2**27, "grace": 20.0, "rounds": 1},
    }[args.tiny]  # fmt: skip
    for name, value in sizes.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.work = args.work or Path(os.environ.get("TMPDIR", "/tmp")) / f"search-policy-{args.ground}"
    args.until = BEGAN + args.seconds - args.grace
    return args


def main() -> None:
    args = parsed()
    args.work.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(args.processes, begin_worker, (args.until,))  # they import while the models train
    import torch

    if args.tiny:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: --tiny runs on the CPU")
    from search_policy_cells import TREES, Searcher, Setup

    unknown = {*(args.methods or ()), *(args.wide or ())} - set(TREES)
    if unknown:
        raise SystemExit(f"--methods and --wide take {', '.join(map(repr, TREES))}, not {unknown}")
    say(f"imported; {shutil.disk_usage(args.work).free / 2**30:.0f} GiB free, {len(SYMBOLS)} symbols")
    facts = prepare(args)
    setup = Setup(
        args.work,
        facts["model"],
        args.ground,
        facts["level"],
        args.pool,
        args.questions,
        args.device,
        args.dtype,
        args.kv_bytes,
    )
    record = Record(args, facts, processor() if args.tiny else f"one {torch.cuda.get_device_name()}")
    searcher = Searcher(setup)
    rows, figures = timed(args, searcher, record.figures)
    record.keep_times(figures)
    known = {key(row) for row in record.rows}
    record.add([row for row in rows if key(row) not in known])
    del searcher
    record.write()
    search_all(args, pool, setup, facts, record)
    show(record.write())
    say(f"done: {json.dumps({k: v for k, v in asdict(setup).items() if k not in ('directory', 'policy')})}")
    pool.terminate()


if __name__ == "__main__":
    main()
