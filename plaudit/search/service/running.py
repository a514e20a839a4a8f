"""A search of the server, in its own thread, as seen by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from plaudit.config.search import SearchRecipe
from plaudit.errors import PlauditError
from plaudit.search.backends.scoring import check_fits
from plaudit.search.drivers.driver import Driver
from plaudit.search.drivers.methods import new_driver
from plaudit.search.questions.answers import tally
from plaudit.search.questions.questions import Question
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.runner import Outcome, Runner
from plaudit.search.service.served_models import Interrupted, LoopCalls, ServedJudge, ServedPolicy
from plaudit.serve.http.message import HttpError


class RunningSearch:
    """calls   calls from its thread to the event loop; stopping them ends the search"""

    def __init__(
        self, recipe: SearchRecipe, question: Question, calls: LoopCalls, policy: ServedPolicy, judge: ServedJudge,
        reading: AnswerReading, threads: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        check_fits(judge, recipe)
        self.recipe = recipe
        self.calls = calls
        self.policy = policy
        self.reading = reading
        self._loop = asyncio.get_running_loop()
        self._question = question
        self._rounds: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._runner = Runner(
            recipe, policy, judge, reading,
            lambda q, tree: new_driver(tree, recipe.search, recipe.budget, reading, f"{recipe.seed} {q.index}"),
            stopped=calls.stopped, on_round=self._on_round,
        )  # fmt: skip
        self.future = threads.submit(self._run)
        self.future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._rounds.put_nowait, None))

    async def rounds(self) -> AsyncIterator[dict[str, Any]]:
        """Progress after every round, until the search is over."""
        while (progress := await self._rounds.get()) is not None:
            yield progress

    async def outcome(self) -> Outcome:
        """The outcome; HttpError if there is none. A search ended by its deadline has the answers found until then."""
        outcome, error = await asyncio.shield(asyncio.wrap_future(self.future))
        if error is None:
            assert outcome is not None, "only a cancelled search ends without an outcome"
            return outcome
        cause = error.cause if isinstance(error, Interrupted) else HttpError(500, "search_failed", str(error))
        if cause.type != "deadline" or outcome is None or outcome.answer is None:
            raise cause
        outcome.stopped = "deadline"
        return outcome

    def _run(self) -> tuple[Outcome | None, PlauditError | None]:
        outcomes: list[Outcome] = []
        try:
            outcomes.extend(self._runner.run([self._question]))
        except PlauditError as error:
            return next(iter(outcomes), None), error
        return next(iter(outcomes), None), None

    def _on_round(self, driver: Driver) -> None:
        answers = driver.answers()
        votes = tally(answers, self.recipe.search.vote, self.reading.alike)
        progress = {
            "round": driver.costs.rounds, "open": len(driver.live()), "finished": len(answers),
            "generated": driver.costs.generated, "leading": next(iter(votes), None),
        }  # fmt: skip
        self._loop.call_soon_threadsafe(self._rounds.put_nowait, progress)
