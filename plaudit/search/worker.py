"""A process that searches some of a run's questions, with its own policy and process model.

    python -m plaudit.search.worker FD

It requests a question whenever it has capacity, so that workers finish at about the same time.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from plaudit.collector import frozen
from plaudit.config.search import SearchRecipe, parse_search
from plaudit.process.framing import FrameReader
from plaudit.process.worker import SocketWorker, run_worker
from plaudit.search import frames
from plaudit.search.backends.scoring import check_fits
from plaudit.search.questions.questions import Question
from plaudit.search.search import Search


class SearchWorker(SocketWorker[frames.ToWorker]):
    def __init__(
        self, sock: socket.socket, reader: FrameReader[frames.ToWorker], search: Search, start: frames.Start
    ) -> None:  # fmt: skip
        super().__init__(sock, reader)
        self._search = search
        self._start = start
        self._questions = {question.index: question for question in search.questions()}
        self._begun: SearchRecipe | None = None
        self._assigned: deque[int | None] = deque()

    @property
    def busy(self) -> bool:
        return self._begun is not None

    def take(self, frame: frames.ToWorker) -> None:
        if isinstance(frame, frames.Begin):
            self._begun = part(frame.recipe, self._start)
        elif isinstance(frame, frames.Assigned):
            self._assigned.append(frame.question)

    def run(self) -> None:
        with frozen():
            super().run()

    def step(self) -> None:
        """Searches all questions of a method."""
        if self._begun is None:
            return
        self._search.use_recipe(self._begun)
        for line in self._search.lines(self._questions_assigned()):
            self.send(frames.Result(line))
        self.send(frames.Done(self._search.phases, self._search.undecided))
        self._begun = None

    def _questions_assigned(self) -> Iterator[Question]:
        while True:
            self.send(frames.Ready())
            while not self._assigned:
                if not self._receive(block=True):
                    sys.exit(0)  # the search has ended
            index = self._assigned.popleft()
            if index is None:
                return
            yield self._questions[index]


def part(tree: dict[str, Any], start: frames.Start) -> SearchRecipe:
    """This worker's share of common resources: concurrent questions, KV cache, threads, and one of several GPUs."""
    import torch

    from plaudit.core.kv.memory import DEFAULT_PART

    recipe = parse_search(tree, "the recipe")
    devices = torch.cuda.device_count()
    sharing = -(-start.workers // max(1, devices))

    def here(table: Any) -> Any:
        device = table.device
        if device == "auto" and devices > 1:
            device = f"cuda:{start.number % devices}"
        return table.model_copy(update={"device": device})

    def less(table: Any, device: str) -> Any:
        size = table.kv_bytes
        if size is None and devices and device != "cpu":
            size = DEFAULT_PART
        if size is not None:
            size = size // start.workers if isinstance(size, int) else size / sharing
        return table.model_copy(update={"kv_bytes": size})

    update: dict[str, Any] = {
        "concurrent": -(-recipe.concurrent // start.workers),
        "model": here(recipe.model),
        "engine": less(recipe.engine, recipe.model.device),
    }
    for name in ("prm", "orm"):
        if (table := getattr(recipe, name)) is not None and table.url is None:
            update[name] = less(here(table), table.device)
    if recipe.threads is None and not devices:
        update["threads"] = max(1, torch.get_num_threads() // start.workers)
    return recipe.model_copy(update=update)


def _started(start: frames.Start, sock: socket.socket, reader: FrameReader[frames.ToWorker]) -> SearchWorker:
    recipes = [part(tree, start) for tree in start.recipes]
    search = Search(recipes[0])
    for recipe in recipes:
        check_fits(search.scorer, recipe)
    worker = SearchWorker(sock, reader, search, start)
    worker.send(frames.Loaded())
    return worker


def main(fd: int) -> None:
    run_worker(fd, frames.TO_WORKER, frames.Start, _started)


if __name__ == "__main__":
    main(int(sys.argv[1]))
