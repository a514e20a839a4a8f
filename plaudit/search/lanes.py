"""Groups of questions in parallel: while one lane's steps are generated, another's are scored, clustered or selected.

Each lane is a runner in its own thread; engines process one call at a time, servers many. Sampling is seeded by path,
so results do not depend on a question's lane.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

from plaudit.search.questions.questions import Question
from plaudit.search.runner import Outcome, Runner


class _Shared:
    """Questions shared by several lanes."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self._questions = iter(questions)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Question]:
        return self

    def __next__(self) -> Question:
        with self._lock:
            return next(self._questions)

    def end(self) -> None:
        """No more questions."""
        with self._lock:
            self._questions = iter(())


def run_lanes(lanes: Sequence[Runner], questions: Iterable[Question], stopped: threading.Event) -> Iterator[Outcome]:
    """Outcomes of all lanes as they finish. After a lane's error no lane begins another question; open questions
    return their partial results, then the error is raised. Closing the iterator stops all lanes after their round."""
    stopped.clear()
    if len(lanes) == 1:
        yield from lanes[0].run(questions)
        return
    shared, done = _Shared(questions), queue.Queue[Outcome | BaseException | None]()

    def work(lane: Runner) -> None:
        try:
            for outcome in lane.run(shared):
                done.put(outcome)
            done.put(None)
        except BaseException as error:  # raised where the outcomes are consumed
            done.put(error)

    threads = [threading.Thread(target=work, args=(lane,), name="search-lane", daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    failure: BaseException | None = None
    going = len(lanes)
    try:
        while going:
            event = done.get()
            if isinstance(event, Outcome):
                yield event
                continue
            going -= 1
            if event is not None:
                failure = failure or event
                shared.end()
    finally:
        if going:
            stopped.set()
        for thread in threads:
            thread.join()
    if failure is not None:
        raise failure
