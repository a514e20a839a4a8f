"""Speedup when questions, or the paths of one question, do not wait for each other.

    python benchmarks/search_lanes.py [--questions 32] [--width 16] [--token-ms 10] [--score-ms 20]

The search is real, the time of the models is simulated: a step takes a fixed number of milliseconds per token
regardless of load, as on a GPU or server with spare capacity, and a scoring call takes its own time. Steps of the sums
world have nearly the same length; with a spread, their durations are multiplied by a lognormal factor, as prose would
have. Everything the search needs is drawn and scored beforehand, and every run must give the same result.

lanes    groups of questions that do not wait for each other (1: a round waits for all its steps)
bound    the gain if, in addition, every path of a question continued independently, which only best-of-n and, subtree
         by subtree, DVTS could use
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import platform
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search import Remembering

from plaudit.config.search import load_search
from plaudit.search.search import Search
from plaudit.search.tree.trail import Trails

OUT = Path(__file__).parent / "results" / "search-lanes.json"


class Timed:
    """Returns cached results after the simulated time."""

    computed = 0

    def __init__(self, remembering: Remembering, token: float, score: float, spread: float) -> None:
        self.remembering, self.token, self.score_seconds, self.spread = remembering, token, score, spread
        self._lock = threading.Lock()

    def seconds(self, seed: int, i: int, tokens: int) -> float:
        """Seconds of the i-th step drawn with this seed."""
        return self.token * tokens * math.exp(random.Random(f"{seed} {i}").gauss(0, self.spread))

    def extend(self, requests: Sequence[Any]) -> list[list[Any]]:
        with self._lock:
            found = self.remembering.extend(requests)
        pairs = list(zip(requests, found, strict=True))
        time.sleep(max(self.seconds(a.seed, i, len(s.tokens)) for a, steps in pairs for i, s in enumerate(steps)))
        return found

    def score(self, paths: Sequence[Any], *, hidden: bool = False) -> list[Any]:
        with self._lock:
            found = self.remembering.score(paths, hidden=hidden)
        time.sleep(self.score_seconds)
        return found

    def release(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        pass


def searched(recipe: Any, models: Any, tokenizer: Any) -> tuple[float, list[Any], Any]:
    search = Search(recipe, policy=models, scorer=models, tokenizer=tokenizer)
    questions = search.questions()
    began = time.perf_counter()
    outcomes = sorted(search.run(questions), key=lambda outcome: outcome.question.index)
    seconds = time.perf_counter() - began
    found = [(o.answer and o.answer.text, o.driver.costs.kv_tokens, o.driver.costs.generated) for o in outcomes]
    return seconds, found, outcomes


def bound(outcomes: Sequence[Any], models: Timed, recipe: Any) -> float:
    """The longest path of each question sets its time; a question starts when another has finished."""
    places = [0.0] * recipe.concurrent
    for outcome in outcomes:
        tree, ends, children = outcome.tree, {0: 0.0}, Counter[int]()
        trails = Trails(tree, recipe.seed, outcome.question.index)
        for node in tree.nodes[1:]:
            spent = (
                models.seconds(trails.of(node.parent).seed(0), children[node.parent], len(node.tokens))
                + models.score_seconds
            )
            ends[node.id] = ends[node.parent] + spent
            children[node.parent] += 1
        heapq.heapreplace(places, places[0] + max(ends.values()))
    return max(places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--token-ms", type=float, default=10.0)
    parser.add_argument("--score-ms", type=float, default=20.0)
    args = parser.parse_args()
    lines = []
    for method in ("best-of-n", "dvts", "rebase", "ets"):
        flags = {"search.method": method, "search.width": args.width, "data.limit": args.questions}
        base = load_search(None, flags, [f"concurrent={max(1, args.questions // 2)}"])
        first = Search(base)
        remembering = Remembering(first.policy, first.scorer)
        _, expected, outcomes = searched(base, remembering, first.tokenizer)
        for spread in (0.0, 0.6):
            models = Timed(remembering, args.token_ms / 1e3, args.score_ms / 1e3, spread)
            line: dict[str, Any] = {"method": method, "spread": spread, "seconds": {}}
            for lanes in (1, 2, 4, base.concurrent):
                seconds, found, _ = searched(base.model_copy(update={"lanes": lanes}), models, first.tokenizer)
                assert found == expected, "lanes decide nothing"
                line["seconds"][lanes] = round(seconds, 2)
            line["bound"] = round(bound(outcomes, models, base), 2)
            lines.append(line)
            print(json.dumps(line), flush=True)
    record = {
        "script": "benchmarks/search_lanes.py", "date": time.strftime("%Y-%m-%d"), "machine": platform.machine(),
        "questions": args.questions, "width": args.width, "concurrent": base.concurrent, "token_ms": args.token_ms,
        "score_ms": args.score_ms, "lines": lines,
    }  # fmt: skip
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
