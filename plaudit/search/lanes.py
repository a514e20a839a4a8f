"""Groups of questions side by side: while one lane's steps are generated, another's are scored, clustered or chosen.

Each lane is a runner in a thread of its own; engines take one call at a time, servers as many as come. Steps are drawn
by path, so that which lane a question is in decides nothing about it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

from plaudit.search.questions.questions import Question
from plaudit.search.runner import Outcome, Runner


class _Shared:
    """Questions that several lanes take from."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self._questions = iter(questions)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Question]:
        return self

    def __next__(self) -> Question:
        with self._lock:
            return next(self._questions)

    def end(self) -> None:
        """There are no more."""
        with self._lock:
            self._questions = iter(())


def run_lanes(lanes: Sequence[Runner], questions: Iterable[Question], stopped: threading.Event) -> Iterator[Outcome]:
    """Outcomes of all lanes as they come. After a lane's error no lane begins another question; the open ones come out
    with what they have, then the error is raised. Closing the iterator stops all lanes after their round."""
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
        except BaseException as error:  # it is raised where the outcomes are read
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
