"""Distributes the questions of a run over processes, each with its own models.

On a GPU a small model takes less time than the Python code that searches with it, and a process has one interpreter:
with several, one process computes on the host while the others use the GPU. A question's tree does not depend on the
process that searches it.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from plaudit.config.search import SearchRecipe
from plaudit.errors import PlauditError, RunError
from plaudit.models import load_tokenizer, resolve
from plaudit.process.framing import FrameReader, pack
from plaudit.process.spawn import Child, spawn
from plaudit.process.worker import Failed
from plaudit.search import frames
from plaudit.search.pilot import Chosen, choose
from plaudit.search.questions.questions import GymChecker, Question, open_questions
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.runner import Outcome
from plaudit.search.when import following

LOAD_SECONDS = 600.0
SILENCE_SECONDS = 60.0  # without a heartbeat, which is sent every second
END_SECONDS = 10.0


class _Worker:
    def __init__(self, number: int) -> None:
        self.name = f"search process {number + 1}"
        self.child: Child
        self.child, self.sock = spawn("plaudit.search.worker")
        self.reader: FrameReader[frames.FromWorker] = FrameReader(frames.FROM_WORKER)
        self.deadline = time.monotonic() + LOAD_SECONDS

    def send(self, frame: Any) -> None:
        try:
            self.sock.sendall(pack(frame))
        except OSError:
            raise RunError(self.ending()) from None

    def received(self) -> Iterator[frames.FromWorker]:
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionResetError:  # it exited before it had read everything
            data = b""
        if not data:
            raise RunError(self.ending())
        for frame in self.reader.feed(data):
            if isinstance(frame, Failed):
                raise RunError(f"{self.name}: {frame.message}")
            self.deadline = time.monotonic() + SILENCE_SECONDS
            yield frame

    def silent(self) -> Iterator[frames.FromWorker]:
        self.child.kill()
        raise RunError(f"{self.name} sent no heartbeat and was killed; --resume searches the missing questions")

    def ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self.child.wait(END_SECONDS)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"{self.name} {how}; --resume searches the missing questions"
        return f"{self.name} closed its connection; --resume searches the missing questions"

    def end(self) -> None:
        """It exits when its socket is closed."""
        try:
            self.child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


class SearchWorkers:
    """Replaces a Search of this process, for recipes that differ only in [search]."""

    def __init__(self, recipes: Sequence[SearchRecipe]) -> None:
        self.recipe = recipes[0]
        self.tokenizer = load_tokenizer(resolve(self.recipe.model.path))
        self.checker = GymChecker() if self.recipe.data.gym is not None else None
        self.phases: Counter[str] = Counter()
        self.undecided = 0
        self._workers: list[_Worker] = []
        trees = [recipe.model_dump(mode="json", exclude_unset=True) for recipe in recipes]
        try:
            for number in range(self.recipe.processes):
                self._workers.append(_Worker(number))
                self._workers[-1].send(frames.Start(trees, number, self.recipe.processes))
            deque(self._frames_of(list(self._workers)), maxlen=0)
        except BaseException:
            self.close()
            raise

    def use_recipe(self, recipe: SearchRecipe) -> None:
        self.recipe = recipe

    def choose_method(self, questions: Sequence[Question], before: str | None = None) -> Chosen:
        """As in Search, with a ground set in the recipe."""
        reading = AnswerReading(self.recipe.steps)
        try:
            choice = Chosen(before, "") if before is not None else choose(self.recipe, questions, _no_pilot, reading)
        finally:
            reading.close()
        self.use_recipe(following(self.recipe, choice.method))
        return choice

    def questions(self) -> list[Question]:
        return open_questions(self.recipe.data, self.tokenizer, self.recipe.seed, self.checker)

    def lines(self, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
        """Lines of results.jsonl as they finish. After a worker's error no more questions are assigned; assigned ones
        are finished, then the error is raised."""
        self.phases, self.undecided = Counter(), 0
        waiting, failure = deque(question.index for question in questions), None
        begin = frames.Begin(self.recipe.model_dump(mode="json", exclude_unset=True))
        going = list(self._workers)
        for worker in going:
            worker.send(begin)
            worker.deadline = time.monotonic() + SILENCE_SECONDS
        while going:
            try:
                for worker, frame in self._frames_of(going):
                    if isinstance(frame, frames.Ready):
                        worker.send(frames.Assigned(waiting.popleft() if waiting else None))
                    elif isinstance(frame, frames.Result):
                        yield frame.line
                    elif isinstance(frame, frames.Done):
                        self.phases.update(frame.phases)
                        self.undecided += frame.undecided
            except PlauditError as error:
                failure = failure or error
                waiting.clear()
        if failure is not None:
            raise failure

    def _frames_of(self, going: list[_Worker]) -> Iterator[tuple[_Worker, frames.FromWorker]]:
        """Frames as they arrive, until each worker is Loaded or Done, or has failed; it is then removed from
        `going`."""
        with selectors.DefaultSelector() as selector:
            for worker in going:
                selector.register(worker.sock, selectors.EVENT_READ, worker)
            while going:
                ready = [key.data for key, _ in selector.select(1.0)]
                late = [worker for worker in going if worker not in ready and time.monotonic() > worker.deadline]
                for worker in (*ready, *late):
                    over = False
                    try:
                        for frame in worker.silent() if worker in late else worker.received():
                            over = over or isinstance(frame, frames.Loaded | frames.Done)
                            yield worker, frame
                    except PlauditError:
                        over = True
                        raise
                    finally:
                        if over:
                            selector.unregister(worker.sock)
                            going.remove(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.sock.close()
        while self._workers:
            self._workers.pop().end()
        if self.checker is not None:
            self.checker.close()
            self.checker = None


def _no_pilot(recipe: SearchRecipe, questions: Sequence[Question]) -> list[Outcome]:
    raise RunError("a pilot is searched by one process")  # recipes that need one are rejected
