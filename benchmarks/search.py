"""Accuracy against budget for every search method, paired, on the hard split of the embedded world.

    python benchmarks/search.py [--part main|variants|time] [--questions 2000] [--widths 4 16 64] [--minutes 12]
                                [--processes 16] [--rows DIR] [--shard 0/4] [--merge]

Steps are drawn by (seed, question, path), so every method searches the same trees. A step that one method has drawn and
scored is therefore the same for the next: results are cached per question, which changes no figure except the time. All
methods and widths run on a few questions at a time; when the minutes are used up, the figures cover the questions
completed so far, and with --rows DIR the next run continues from there. Rows of several shards are combined by writing
them to one directory; --merge computes the figures of all of them.

main      all methods at all widths, with 95 % intervals; differences to REBASE in pairs with their standard errors; the
          last three rows are the variants that performed best on other questions
variants  variants tried in addition to ETS, to be run on questions of another seed (--seed 2)
time      milliseconds of the integer program and of clustering per level, at widths 16, 64, 256, and of HiGHS alone
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_variants import Directions, Joint

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, dict[str, Any]] = {
    "best-of-n": {"method": "best-of-n"},
    "majority": {"method": "best-of-n", "vote": "majority"},
    "beam": {"method": "beam"},
    "dvts": {"method": "dvts"},
    "rebase": {"method": "rebase"},
    "ets": {"method": "ets"},
    "mcts": {"method": "mcts"},
    "particles": {"method": "particles"},
    "rebase, T 1": {"method": "rebase", "temperature": 1.0},
    "ets, T 1": {"method": "ets", "temperature": 1.0},
    "ets, T 1, KV budget": {"method": "ets", "temperature": 1.0, "kv_budget": "20 * sqrt(width)"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rebase": {"method": "rebase"},
    "ets": {"method": "ets"},
    "ets, no clusters": {"method": "ets", "cluster_weight": 0.0},
    "ets, token cost": {"method": "ets", "cost": "tokens"},
    "ets, KV budget 120": {"method": "ets", "kv_budget": 120},
    "ets, KV budget 80": {"method": "ets", "kv_budget": 80},
    "ets, T 1": {"method": "ets", "temperature": 1.0},
    "rebase, T 1": {"method": "rebase", "temperature": 1.0},
    "ets, T 1, no clusters": {"method": "ets", "temperature": 1.0, "cluster_weight": 0.0},
    "ets, T 5, no clusters": {"method": "ets", "temperature": 5.0, "cluster_weight": 0.0},
    "ets, T 1, KV budget 80": {"method": "ets", "temperature": 1.0, "kv_budget": 80},
    "ets, T 5, KV budget 80": {"method": "ets", "temperature": 5.0, "kv_budget": 80},
    "ets, T 5, weights 2 and 0": {"method": "ets", "temperature": 5.0, "branch_weight": 2.0, "cluster_weight": 0.0},
    "ets, T 5, weights 1/2 and 0": {"method": "ets", "temperature": 5.0, "branch_weight": 0.5, "cluster_weight": 0.0},
    "joint": {"method": "ets", "rule": Joint()},
    "directions": {"method": "ets", "rule": Directions()},
    "best-of-n": {"method": "best-of-n"},
}


class Remembering:
    """A policy and a scorer in one, which cache every result."""

    def __init__(self, policy: Any, scorer: Any) -> None:
        self.policy, self.scorer = policy, scorer
        self.steps: dict[Any, list[Any]] = {}
        self.scores: dict[Any, Any] = {}

    computed = 0

    def extend(self, requests: Sequence[Any]) -> list[list[Any]]:
        new = [
            request
            for request in requests
            if len(self.steps.get((request.prompt, request.response_ids, request.seed), ())) < request.count
        ]
        for request, steps in zip(new, self.policy.extend(new), strict=True):
            self.steps[request.prompt, request.response_ids, request.seed] = steps
        return [self.steps[request.prompt, request.response_ids, request.seed][: request.count] for request in requests]

    def score(self, paths: Sequence[Any], *, hidden: bool = False) -> list[Any]:
        new = list(dict.fromkeys(path for path in paths if path not in self.scores))
        self.scores.update(zip(new, self.scorer.score(new, hidden=True), strict=True))
        return [self.scores[path] for path in paths]

    def release(self, *_: Any, **__: Any) -> None:
        """Other methods may still need it."""

    def close(self) -> None:
        pass

    def forget(self) -> None:
        self.steps.clear()
        self.scores.clear()
        self.policy.engine.new_version()
        self.scorer.engine.new_version()


def with_rule(driver: Any, rule: Any) -> Any:
    driver.rule = rule
    return driver


class Worker:
    """The models, opened once per process; every method reuses what the others have drawn."""

    def __init__(self, table: dict[str, dict[str, Any]], widths: Sequence[int], seed: int, until: float) -> None:
        from plaudit.config.search import load_search
        from plaudit.search.search import Search

        # Many processes: do not use a GPU even where there is one.
        overrides = {"data.limit": 1, "search.width": 4, "model.device": "cpu", "prm.device": "cpu"}
        self.base = load_search(None, overrides, [f"seed={seed}", "lanes=1", "threads=1"])
        self.first = Search(self.base)
        self.remembering = Remembering(self.first.policy, self.first.scorer)
        self.table, self.widths, self.until = table, sorted(widths, reverse=True), until

    def work(self, batch: Sequence[Any], known: set[Any]) -> list[dict[str, Any]]:
        """Rows still missing for these questions, for every width and method; none when the time is used up."""
        if time.time() > self.until:
            return []
        found = []
        for width in self.widths:
            for name, keys in self.table.items():
                missing = [question for question in batch if (name, width, question.index) not in known]
                for outcome in self.search(keys, width).run(missing):
                    costs = outcome.driver.costs
                    found.append(
                        {"method": name, "width": width, "question": outcome.question.index, "right": outcome.right,
                         "kv_tokens": costs.kv_tokens, "kv_peak": costs.kv_peak, "generated": costs.generated,
                         "calls": costs.calls, "unsolved": costs.unsolved}
                    )  # fmt: skip
        self.remembering.forget()
        return found

    def search(self, keys: dict[str, Any], width: int) -> Any:
        from plaudit.search.search import Search

        rule = keys.get("rule")
        own = {key: value for key, value in keys.items() if key != "rule"}
        if own.get("kv_budget") == "20 * sqrt(width)":  # 80 at width 16, where it was tuned
            own["kv_budget"] = round(20 * math.sqrt(width))
        tree = {**self.base.search.model_dump(exclude_none=True), **own, "width": width}
        recipe = self.base.model_copy(update={"search": type(self.base.search).model_validate(tree)})
        search = Search(recipe, policy=self.remembering, scorer=self.remembering, tokenizer=self.first.tokenizer)
        if rule is not None:
            make = search.lanes[0].new_driver
            search.lanes[0].new_driver = lambda question, tree: with_rule(make(question, tree), rule)
        return search


worker: Worker


def begin(*args: Any) -> None:
    global worker
    worker = Worker(*args)


def work(task: tuple[Sequence[Any], set[Any]]) -> list[dict[str, Any]]:
    return worker.work(*task)


def measure(args: argparse.Namespace, table: dict[str, dict[str, Any]], until: float) -> list[dict[str, Any]]:
    """All rows: those on disk, and those of this shard's questions that could be measured in the given minutes."""
    from plaudit.config.search import load_search
    from plaudit.models import load_tokenizer, resolve
    from plaudit.search.questions.questions import open_questions

    rows = kept_rows(args.rows)
    if args.merge:
        return rows
    recipe = load_search(None, {"data.limit": args.questions}, [f"seed={args.seed}"])
    shard, shards = args.shard
    questions = open_questions(recipe.data, load_tokenizer(resolve(recipe.model.path)), args.seed)[shard::shards]
    known = {(row["method"], row["width"], row["question"]) for row in rows}
    wanted = {(name, width) for name in table for width in args.widths}
    questions = [q for q in questions if any((*each, q.index) not in known for each in wanted)]
    batches = [questions[at : at + args.batch] for at in range(0, len(questions), args.batch)]
    tasks = [(batch, {key for key in known if key[2] in {q.index for q in batch}}) for batch in batches]
    if args.rows is not None:
        args.rows.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes, begin, (table, args.widths, args.seed, until)) as pool:
        for found in pool.imap_unordered(work, tasks):
            rows.extend(found)
            if args.rows is not None and found:
                with (args.rows / f"shard-{shard}-of-{shards}.jsonl").open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    return rows


def kept_rows(rows: Path | None) -> list[dict[str, Any]]:
    """Rows of earlier runs and other shards. An incomplete last line is measured again."""
    files = sorted(rows.glob("*.jsonl")) if rows is not None else []
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def shard_of(text: str) -> tuple[int, int]:
    """0/4 is the first of four shards."""
    shard, shards = (int(part) for part in text.split("/"))
    if not 0 <= shard < shards:
        raise ValueError(text)
    return shard, shards


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    average = math.fsum(values) / len(values)
    spread = math.fsum((v - average) ** 2 for v in values) / max(1, len(values) - 1)
    return average, math.sqrt(spread / len(values))


def table_of(rows: Sequence[dict[str, Any]], names: Sequence[str], widths: Sequence[int]) -> list[dict[str, Any]]:
    lines = []
    for width in widths:
        by = {n: {r["question"]: r for r in rows if r["method"] == n and r["width"] == width} for n in names}
        indices = sorted(set.intersection(*(set(found) for found in by.values())))
        if not indices:
            continue
        for name in names:
            accuracy, error = mean([by[name][q]["right"] for q in indices])
            apart, apart_error = mean([by[name][q]["right"] - by["rebase"][q]["right"] for q in indices])
            kv, base_kv = (sum(by[n][q]["kv_tokens"] for q in indices) for n in (name, "rebase"))
            lines.append(
                {"width": width, "method": name, "questions": len(indices), "accuracy": accuracy,
                 "interval": 1.96 * error, "to_rebase": apart, "to_rebase_se": apart_error,
                 "kv_tokens": kv / len(indices), "kv_reduction": base_kv / kv,
                 "kv_peak": sum(by[name][q]["kv_peak"] for q in indices) / len(indices),
                 "generated": sum(by[name][q]["generated"] for q in indices) / len(indices),
                 "calls": sum(by[name][q]["calls"] for q in indices) / len(indices),
                 "unsolved": sum(by[name][q]["unsolved"] for q in indices)}
            )  # fmt: skip
    return lines


def show(lines: Sequence[dict[str, Any]]) -> None:
    print("width  method               accuracy        to REBASE         KV tokens  KV less by  generated   calls")
    for x in lines:
        print(
            f"{x['width']:5}  {x['method']:19}  {x['accuracy']:.3f} ± {x['interval']:.3f}  {x['to_rebase']:+.3f} ± "
            f"{x['to_rebase_se']:.3f} (se)  {x['kv_tokens']:8.0f}  {x['kv_reduction']:8.2f}x  {x['generated']:9.0f}  "
            f"{x['calls']:7.0f}   n = {x['questions']}"
        )


def timing() -> list[dict[str, Any]]:
    """Integer programs as real searches pose them, and clusterings of as many steps as there are leaves."""
    import numpy as np

    import plaudit.search.rules.ets as rule
    from plaudit.config.search import load_search
    from plaudit.search.backends.cluster import by_vector
    from plaudit.search.search import Search
    from plaudit.search.tree.programme import solve

    lines = []
    for width, questions in ((16, 12), (64, 6), (256, 2)):
        posed: list[Any] = []

        class Posing(rule.Ets):
            def solve(self, programme: Any, posed: list[Any] = posed) -> Any:
                posed.append(programme)
                return super().solve(programme)

        import plaudit.search.drivers.methods as methods

        methods.Ets = Posing  # type: ignore[misc]
        search = Search(load_search(None, {"search.width": width, "data.limit": questions}))
        outcomes = list(search.run(search.questions()))
        methods.Ets = rule.Ets  # type: ignore[misc]
        generated = sum(o.driver.costs.generated for o in outcomes)
        model = search.phases["generate"] + search.phases["score"]
        ours, highs, gaps = [], [], []
        for programme in posed:
            began = time.process_time()
            found = rule.Ets().solve(programme)
            ours.append(1e3 * (time.process_time() - began))
            gaps.append(found.gap)
            began = time.process_time()
            solve(programme)
            highs.append(1e3 * (time.process_time() - began))
        clustering = []
        for _ in range(5):
            vectors = np.random.default_rng(1).normal(size=(width, 80))
            began = time.process_time()
            by_vector(vectors, 0.05)
            clustering.append(1e3 * (time.process_time() - began))
        lines.append(
            {"width": width, "levels": len(posed), "leaves": sum(len(p.values) for p in posed) / len(posed),
             "programme_ms": sum(ours) / len(ours), "programme_ms_worst": max(ours),
             "highs_ms": sum(highs) / len(highs), "highs_ms_worst": max(highs), "gap": max(gaps),
             "cluster_ms": min(clustering),
             "model_ms_per_level": 1e3 * model / len(posed),
             "tokens_per_level": generated / len(posed)}
        )  # fmt: skip
        print(json.dumps(lines[-1]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["main", "variants", "time"], default="main")
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--processes", type=int, default=2, help="Number of processes, each with one thread.")
    parser.add_argument("--shard", type=shard_of, default=(0, 1), help="I/N: every N-th question, from the I-th.")
    parser.add_argument("--merge", action="store_true", help="Report existing rows without measuring.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="Directory for measured rows; a run continues from the rows in it.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    began = time.time()
    if args.part == "time":
        lines = timing()
    else:
        table = METHODS if args.part == "main" else VARIANTS
        lines = table_of(measure(args, table, began + 60 * args.minutes), list(table), args.widths)
        show(lines)
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    record = {
        "script": "benchmarks/search.py", "part": args.part, "seed": args.seed, "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores", "commit": commit,
        "seconds": round(time.time() - began, 1), "lines": lines,
    }  # fmt: skip
    out = args.out or RESULTS / f"search-{args.part}.json"
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
