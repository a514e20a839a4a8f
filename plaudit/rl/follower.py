"""A run as its ranks see it: the main one holds the directory, the others read its checkpoints and write nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from plaudit.config import BaseRecipe, RlRecipe
from plaudit.events import EventLog, Kind
from plaudit.models import choose_device
from plaudit.train.run.checkpoint import Checkpoints
from plaudit.train.run.ranks import Ranks, join
from plaudit.train.run.run import Run


@contextmanager
def joined_run(
    directory: Path, recipe: RlRecipe, *, resume: bool, fresh: bool, chosen: Sequence[str] = ()
) -> Iterator[tuple[Run, Ranks]]:
    """The run directory and this process's place among the ranks."""
    with join(recipe.resources, choose_device(recipe.model.device)) as ranks:
        main = Run(directory, recipe, resume=resume, fresh=fresh, chosen=chosen)
        with main if ranks.main else Follower(directory, recipe, resume=resume) as run:
            ranks.everyone.barrier()  # the main rank has put the directory in order; now the others may read it
            yield run, ranks


class Follower(Run):
    def __init__(self, directory: Path, recipe: BaseRecipe, *, resume: bool = False) -> None:
        super().__init__(directory, recipe, resume=resume)
        self.checkpoints = Reading(directory / "checkpoints", recipe.train.checkpoint.keep)

    def __enter__(self) -> Self:
        self.events = NoEvents()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def summarise(self, figures: dict[str, Any]) -> None: ...


class Reading(Checkpoints):
    """Takes part where the main rank needs the others to put sharded tensors together."""

    def save(
        self, step: int, save_model: Callable[[Path], object], optimizer: dict[str, Tensor], state: dict[str, Any],
        more: Callable[[Path], object] | None = None,
    ) -> Path:  # fmt: skip
        if more is not None:
            more(self.directory)
        return self.directory


class NoEvents(EventLog):
    def __init__(self) -> None: ...

    def write(self, kind: Kind, *, step: int | None = None, version: int | None = None, **fields: Any) -> None: ...

    def close(self) -> None: ...


class Viewer(Protocol):
    """What a person sees of a run at work."""

    def bar(self, done: int, total: int) -> Any: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def figures(self, step: int, figures: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...


class NoViewer:
    def bar(self, done: int, total: int) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def figures(self, step: int, figures: Mapping[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...
