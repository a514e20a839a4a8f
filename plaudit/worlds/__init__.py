"""Built-in tasks with known truth."""

from plaudit.config import SumsTable
from plaudit.config.world import WORLDS
from plaudit.errors import DataError, nearest
from plaudit.worlds.sums import HARD_OPERANDS, Sums


def get_world(name: str, seed: int = 1, sums: SumsTable | None = None) -> Sums:
    """A world by name: `sums`, or `sums-hard` with its longer chains."""
    if name not in WORLDS:
        raise DataError(f"unknown world {name!r}; {nearest(name, WORLDS)}")
    table = sums or SumsTable()
    if name == "sums-hard":
        table = table.model_copy(update={"operands": HARD_OPERANDS, "hard_share": 0.0})
    return Sums(table, seed)


__all__ = ["WORLDS", "Sums", "get_world"]
