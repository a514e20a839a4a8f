"""`torchrun -m plaudit serve`: rank 0 is the server, every other process runs ranks that its workers request."""

from __future__ import annotations

import os
from collections.abc import Callable

from plaudit.config.reward import ReadByEngine
from plaudit.config.serve import ServeTable
from plaudit.errors import ConfigError


def serve_launched(table: ServeTable, serve: Callable[[], int]) -> int:
    """`serve` runs on rank 0."""
    _check(table)
    from plaudit.serve.workers.ranks import dismiss, host_board, subscribe

    if os.environ["RANK"] != "0":
        return subscribe()
    board = host_board()
    code = serve()
    dismiss()
    del board
    return code


def _check(table: ServeTable) -> None:
    """Runs on every rank before anything is loaded or opened."""
    world = int(os.environ["WORLD_SIZE"])
    models = [e for e in table.models.values() if isinstance(e, ReadByEngine) and e.ranks > 1]
    if not models:
        raise ConfigError(
            f"WORLD_SIZE is {world}, but no model uses ranks: set --tensor-parallel {world}, or start without torchrun"
        )
    for each in models:
        if each.ranks != world:
            raise ConfigError(
                f"WORLD_SIZE is {world}, but {each.shown_ranks}: make them equal, or start without torchrun"
            )
