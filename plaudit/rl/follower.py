"""A run over several ranks: the main rank owns the run directory, the others write their weight shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from plaudit.config import RlRecipe
from plaudit.config.supervised import SupervisedRecipe
from plaudit.events import EventLog, Kind
from plaudit.models import choose_device
from plaudit.train.run.ranks import Ranks, join
from plaudit.train.run.run import Run


@contextmanager
def joined_run(
    directory: Path, recipe: RlRecipe | SupervisedRecipe, *, resume: bool, fresh: bool, chosen: Sequence[str] = ()
) -> Iterator[tuple[Run, Ranks]]:
    """Open the run directory and join the ranks."""
    with join(recipe.resources, choose_device(recipe.model.device)) as ranks:
        main = Run(directory, recipe, resume=resume, fresh=fresh, chosen=chosen)
        with main if ranks.main else Follower(directory, recipe, resume=resume) as run:
            run.checkpoints.group = ranks.everyone
            ranks.everyone.barrier()  # the main rank has prepared the directory; now the others may read it
            yield run, ranks


class Follower(Run):
    """The run on ranks other than the main one: it writes no events and no summary."""

    def __enter__(self) -> Self:
        self.events = NoEvents()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def summarise(self, figures: dict[str, Any]) -> None: ...


class NoEvents(EventLog):
    def __init__(self) -> None: ...

    def write(self, kind: Kind, *, step: int | None = None, version: int | None = None, **fields: Any) -> None: ...

    def close(self) -> None: ...


class Viewer(Protocol):
    """Displays the progress of a run."""

    def bar(self, done: int, total: int) -> Any: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def figures(self, step: int, figures: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...


class NoViewer:
    def bar(self, done: int, total: int) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def figures(self, step: int, figures: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, message: str) -> None: ...
