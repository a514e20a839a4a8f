"""Training rows from a data file or a built-in world, in the same form.

    sft     {"prompt", "response"} or {"messages": [..., {"role": "assistant", "content"}]}
    reward  {"prompt", "chosen", "rejected"[, "margin"]}, or rated: {"prompt", "response", <attribute>: number, ...}
    preference  {"prompt", "chosen", "rejected"}, or for KTO {"prompt", "response", "label": true or false}
    prm     {"prompt", "steps": [text, ...], "labels": [0 or 1, or a probability, ...][, "finished": false]}

The i-th training row is a pure function of (seed, i): a resumed run needs no reader state to see the same data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from plaudit.config import DataTable, SumsTable
from plaudit.config.rl import RlDataTable
from plaudit.errors import DataError
from plaudit.train.data.hub_rows import HUB, dataset_rows
from plaudit.worlds import Sums, get_world
from plaudit.worlds.sums import STEP_END, Problem, Split, Verdict, judge, split_steps

# How many problems a judge's near misses are made of.
NEAR_PROBLEMS = 300


@dataclass(frozen=True, slots=True)
class Row:
    fields: dict[str, Any]
    origin: str
    """Source of the row for error messages: `pairs.jsonl:17`."""

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if not isinstance(value, str) or not value:
            raise DataError(f"{self.origin}: needs a text {key!r}, got {value!r}; its keys are {sorted(self.fields)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{self.origin}: needs a number {key!r}, got {value!r}; its keys are {sorted(self.fields)}")
        return float(value)


class Rows(Protocol):
    def train(self, index: int) -> Row: ...

    def heldout(self) -> list[Row]: ...


def open_rows(data: DataTable, task: str, seed: int) -> Rows:
    if data.world is not None:
        return WorldRows(get_world(data.world, seed, data.sums), task, data)
    return FileRows(data, seed)


class WorldRows:
    def __init__(self, world: Sums, task: str, data: DataTable) -> None:
        self.world = world
        self.task = task
        self.data = data

    def train(self, index: int) -> Row:
        return self._row(self.world, "train", index % self.data.limit if self.data.limit else index)

    def heldout(self) -> list[Row]:
        """Return items of the world itself, even if part of the training uses longer chains and near misses."""
        return self._heldout(Sums(self._plain, self.world.seed))

    def hard(self) -> list[Row]:
        """Held-out items of the long chains."""
        return self._heldout(get_world("sums-hard", self.world.seed, self._plain))

    def near(self, back: int = 1) -> list[Row]:
        """Return short sums with one result off by one, up and down, for evaluating a reward model: that of the last
        addition, or `back` steps before the answer."""
        rows = []
        for problem in self.world.shortest(NEAR_PROBLEMS):
            for by in (1, -1):
                wrong = problem.near_miss(len(problem.operands) - back, by)
                fields = {"prompt": problem.prompt, "chosen": problem.solution, "rejected": wrong}
                if self.task == "prm":
                    fields = _judged(problem, wrong, judge(problem, wrong))
                rows.append(Row(fields, f"{self.data.world}[near, {problem.prompt}{wrong}]"))
        return rows

    @property
    def _plain(self) -> SumsTable:
        return self.world.table.model_copy(update={"hard_share": 0.0, "near": 0.0})

    def _heldout(self, world: Sums) -> list[Row]:
        return [self._row(world, "heldout", index) for index in range(self.data.eval_items)]

    def _row(self, world: Sums, split: Split, index: int) -> Row:
        origin = f"{self.data.world}[{split}, {index}]"
        if self.task == "sft":
            problem, response = world.demonstration(split, index)
            return Row({"prompt": problem.prompt, "response": response}, origin)
        if self.task == "reward":
            pair = world.pair(split, index)
            return Row({name: getattr(pair, name) for name in ("prompt", "chosen", "rejected", "margin")}, origin)
        return Row(_judged(*world.judged(split, index)), origin)


def _judged(problem: Problem, response: str, verdict: Verdict) -> dict[str, Any]:
    labels = [float(ok) for ok in verdict.sound]
    finished = not response.endswith(STEP_END)
    return {"prompt": problem.prompt, "steps": split_steps(response), "labels": labels, "finished": finished}


class FileRows:
    def __init__(self, data: DataTable | RlDataTable, seed: int) -> None:
        assert data.path is not None
        rows = read_rows(Path(data.path))[: data.limit]
        if data.eval_path is not None:
            self.rows, heldout = rows, read_rows(Path(data.eval_path))
        else:
            count = min(data.eval_items, max(1, len(rows) // 10))
            self.rows, heldout = rows[:-count], rows[-count:]
        if not self.rows:
            raise DataError(
                f"{data.path} has {len(rows)} item(s): too few for training and a held-out item; set data.eval_path"
            )
        self._heldout = heldout[: data.eval_items]
        self.seed = seed

    def train(self, index: int) -> Row:
        epoch, position = divmod(index, len(self.rows))
        return self.rows[shuffled(len(self.rows), f"{self.seed} {epoch}")[position]]

    def heldout(self) -> list[Row]:
        return self._heldout


@lru_cache(maxsize=2)
def shuffled(count: int, key: str) -> list[int]:
    order = list(range(count))
    random.Random(key).shuffle(order)
    return order


def read_rows(path: Path) -> list[Row]:
    return list(stream_rows(path))


def stream_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, which may exceed memory, or of a source that the package `datasets` reads."""
    if str(path).startswith(HUB) or Path(str(path).partition("?")[0]).is_dir():
        rows: Iterator[Row] = (Row(*each) for each in dataset_rows(str(path)))
    else:
        rows = _file_rows(path)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{path} is empty: it needs at least one item")


def _file_rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise DataError(f"no data file at {path}")
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise DataError(f"{path}: expected a .jsonl or .parquet file, not {path.suffix or 'a name without ending'!r}")
    return _parquet(path) if path.suffix == ".parquet" else _jsonl(path)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            origin = f"{path.name}:{number}"
            try:
                fields = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{origin}: not JSON ({error}); each line must be one JSON object") from None
            if not isinstance(fields, dict):
                raise DataError(f"{origin}: expected a JSON object, got {type(fields).__name__}")
            yield Row(fields, origin)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(fields, f"{path.name}[{number}]")
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file: {str(error).splitlines()[0]}") from None
