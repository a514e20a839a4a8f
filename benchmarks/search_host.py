"""Host time for one step of one path in a tree search: microseconds by phase, without the models.

    python benchmarks/search_host.py [--method rebase] [--width 64] [--questions 8] [--runs 3] [--name after]

On a GPU the models of a small policy take less time than the host, and the host's work is the same on any device: so it
is measured here with two-layer models on a CPU, whose time is counted separately. They are trained for a minute on the
task of benchmarks/search_policy_gpu.py, so that steps have its length; the CPU engine uses the block, batch and window
sizes of the CUDA back end, so that it is called as often as a GPU's. `digest` covers all trees, with every token and
every bit of a score: a change of the host's work must not change it. `calls` counts Python and C function calls outside
the models, which, unlike times, do not depend on other load on the machine; of the times the fastest run counts. --work
keeps the models; --name is the key of the figures in benchmarks/results/search_host.json.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import hashlib
import json
import os
import pstats
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESULTS = Path(__file__).parent / "results" / "search_host.json"
ENGINE = {"budget": 32768, "max_running": 1024, "look_every": 32}  # the CUDA back end's, except for its window of 256
BLOCK = 64


class Clock:
    """CPU seconds of this process by phase; a nested phase is counted only for itself."""

    def __init__(self) -> None:
        self.stack = ["rest"]
        self.profile: cProfile.Profile | None = None  # of everything except the models
        self.since = time.process_time()
        self.reset()

    def reset(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.since = time.process_time()

    def turn(self) -> None:
        now = time.process_time()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def enter(self, phase: str) -> None:
        self.turn()
        self.stack.append(phase)
        self.calls[phase] += 1
        if self.profile is not None and phase == "model":
            self.profile.disable()

    def leave(self) -> None:
        self.turn()
        if self.stack.pop() == "model" and self.profile is not None:
            self.profile.enable()

    def of(self, owner: Any, name: str, phase: str) -> None:
        """Counts this function's time for the phase from now on."""
        inner: Callable[..., Any] = getattr(owner, name)

        @wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                return inner(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, timed)

    def each(self, owner: Any, name: str, phase: str) -> None:
        """Same for a generator function."""
        inner: Callable[..., Iterator[Any]] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            pieces = inner(*args, **kwargs)
            while True:
                self.enter(phase)
                try:
                    piece = next(pieces, None)
                finally:
                    self.leave()
                if piece is None:
                    return
                yield piece

        setattr(owner, name, timed)


def watch(clock: Clock) -> None:
    from plaudit.core import branches
    from plaudit.core.branches import Branches
    from plaudit.core.device.cpu import CpuBackend
    from plaudit.core.model.readouts import PendingReadout
    from plaudit.core.sampling.sampler import Sampler
    from plaudit.search.backends.policy import CorePolicy
    from plaudit.search.backends.scoring import LocalScorer
    from plaudit.search.drivers.driver import Driver
    from plaudit.search.runner import Runner

    for owner, name, phase in (
        (CpuBackend, "forward", "model"), (Sampler, "draw", "model"), (branches, "take", "model"),
        (PendingReadout, "arrays", "model"), (CpuBackend, "copy", "model"), (CpuBackend, "arrange", "layout"),
        (Branches, "_admit", "admit"), (Branches, "_window", "blocks"), (Branches, "_columns", "columns"),
        (Branches, "_decode", "draws"), (Branches, "_ended", "ended"), (Branches, "sample", "engine: policy"),
        (Branches, "read", "engine: PRM"), (CorePolicy, "extend", "steps"), (LocalScorer, "score", "PRM texts"),
        (Runner, "_step_request", "asks"), (Runner, "_add", "nodes"), (Runner, "_score", "scores"),
        (Runner, "_cluster", "clusters"), (Runner, "_release", "release"), (Driver, "expansions", "choose"),
        (Runner, "_outcome", "outcome"),
    ):  # fmt: skip
        clock.of(owner, name, phase)
    clock.each(CpuBackend, "decode", "model")


def models(work: Path, device: str = "cpu") -> dict[str, Any]:
    import search_policy_gpu as tiny
    from search_grounds import GROUNDS

    args = SimpleNamespace(
        ground="chain", seconds=120.0, steps=400, work=work, tiny=True, batch=32, demonstrations=20_000,
        most_steps=400, probe=20, solved=64, valued=0, levels=GROUNDS["chain"].levels[1:2], device=device,
        dtype="float32", kv_bytes=2**28, rounds=1,
    )  # fmt: skip
    return tiny.prepare(args)


def opened(args: argparse.Namespace, facts: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Opens the search recipe, its policy and its scorer."""
    from search_policy_cells import Searcher, Setup

    from plaudit.core import Engine
    from plaudit.core.device.cpu import CpuBackend

    CpuBackend.block_size = BLOCK
    load = Engine.load
    Engine.load = classmethod(lambda cls, path, **keys: load(path, **keys, **ENGINE))  # type: ignore[method-assign,assignment]
    setup = Setup(args.work, facts["model"], "chain", facts["level"], 8, args.questions, "cpu", "float32", 2**30)
    searcher = Searcher(setup)
    scorer = searcher.scorer("steps")
    engine = scorer.engine  # type: ignore[attr-defined]
    scorer.engine = Engine(engine.decoder.module, engine.tokenizer, kv_bytes=2**30, **ENGINE)  # type: ignore[attr-defined]
    recipe = searcher.recipe(args.method, args.width).model_copy(update={"concurrent": args.at_once})
    return searcher, recipe, scorer


def digest(outcomes: list[Any]) -> str:
    """A hash of all trees, answers and counts."""
    hashed = hashlib.sha256()
    for outcome in sorted(outcomes, key=lambda each: each.question.index):
        costs = outcome.driver.costs
        hashed.update(repr((outcome.question.index, outcome.stopped, outcome.answers, costs.kv, costs.scored)).encode())
        for n in outcome.tree.nodes:
            numbers = [None if x is None else float(x).hex() for x in (n.score, n.value, n.logprob)]
            row = (n.parent, n.tokens, n.text, n.state, n.twin, n.round, n.cluster, n.error, numbers)
            hashed.update(repr(row).encode())
    return hashed.hexdigest()[:16]


def once(args: argparse.Namespace, clock: Clock, searcher: Any, recipe: Any, scorer: Any) -> dict[str, Any]:
    from plaudit.search.backends.policy import CorePolicy
    from plaudit.search.search import Search

    policy = CorePolicy(searcher.engine, recipe.steps)
    search = Search(recipe, policy=policy, scorer=scorer, tokenizer=searcher.engine.tokenizer)
    gc.collect()
    clock.reset()
    began, process = time.perf_counter(), time.process_time()
    outcomes = list(search.run(searcher.questions[: args.questions]))
    spent, busy = time.perf_counter() - began, time.process_time() - process
    clock.turn()
    for engine in (searcher.engine, scorer.engine):
        engine.check()
        engine.new_version()
    steps = sum(outcome.driver.costs.calls for outcome in outcomes)
    tokens = sum(outcome.driver.costs.generated for outcome in outcomes)
    each = {name: 1e6 * seconds / steps for name, seconds in sorted(clock.seconds.items(), key=lambda p: -p[1])}
    host = {name: micros for name, micros in each.items() if name != "model"}
    return {
        "steps": steps, "tokens": tokens, "tokens_per_step": tokens / steps, "seconds": spent, "process": busy,
        "asks": clock.calls["asks"], "scored": sum(outcome.driver.costs.scored for outcome in outcomes),
        "host_us": sum(host.values()), "model_us": each["model"], "phases_us": host, "digest": digest(outcomes),
    }  # fmt: skip


def profiled(clock: Clock, work: Callable[[], dict[str, Any]], top: int) -> float:
    """Calls per step outside the models."""
    clock.profile = profile = cProfile.Profile()
    profile.enable()
    steps = work()["steps"]
    profile.disable()
    clock.profile = None
    stats = pstats.Stats(profile)
    if top:
        stats.sort_stats("cumtime").print_stats(top)
    return stats.total_calls / steps  # type: ignore[attr-defined,no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="rebase")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--name", help="Key of the figures in the results file.")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="Number of profile lines to print.")
    parser.add_argument("--work", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / "search-host")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    facts = models(args.work)
    searcher, recipe, scorer = opened(args, facts)
    clock = Clock()
    watch(clock)
    runs = [once(args, clock, searcher, recipe, scorer) for _ in range(args.runs)]
    best = min(runs, key=lambda run: run["host_us"])
    calls = profiled(clock, lambda: once(args, clock, searcher, recipe, scorer), args.profile)
    hosts = [round(run["host_us"], 1) for run in runs]
    print(
        f"{best['steps']} steps of {best['tokens_per_step']:.1f} tokens, {best['asks']} asks, {best['scored']} scored"
    )
    print(f"host {best['host_us']:.1f} us a step (runs {hosts}), {calls:.0f} calls, models {best['model_us']:.1f} us")
    for name, micros in best["phases_us"].items():
        print(f"  {name:16} {micros:7.1f}")
    print(f"trees {best['digest']}")
    if args.name:
        from stamp import processor, stamp

        kept = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
        kept["runs"][f"{args.name}, {args.method}"] = {
            **stamp(__file__, processor(), {}), "width": args.width, "questions": args.questions,
            "at_once": args.at_once, "load": os.getloadavg()[0], "calls": calls, **best, "host_us_runs": hosts,
        }  # fmt: skip
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
