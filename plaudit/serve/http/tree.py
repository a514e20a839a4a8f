"""Transfers a tree of values in small frames: one process decodes it, another assembles it without blocking its other
threads for long.

    frame = [operation, value]    small values as they are; large lists, dicts, texts and arrays are opened, filled and
    closed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import numpy as np

PIECE = 4096  # values per frame; 16 characters count as one value
MAX_DEPTH = 100
VALUE, LIST, DICT, TEXT, BYTES, ARRAY, FILL, KEY, END = range(9)
Frame = tuple[int, Any]
_PLAIN = {int, float, bool, type(None)}


class TreeError(Exception):
    """A tree that is too deep or has too many values."""


class TreeSplitter:
    """Splits a value into frames. `most`: the limit of lists, dicts, keys and texts. Numbers cost only their bytes;
    these also cost garbage collector time."""

    def __init__(self, most: int) -> None:
        self._left = self._most = most
        self._weights: dict[int, int] = {}
        self._plain: set[int] = set()  # lists of numbers

    def cut(self, value: Any) -> Iterator[Frame]:
        """Yields the frames. Records (dataclasses, Structs) become dicts, tuples become lists."""
        value = self._weighed(value, 0)
        yield from self._frames(value)

    def _weighed(self, value: Any, depth: int) -> Any:
        """The value as lists and dicts, with their weights recorded."""
        if type(value) in _PLAIN:
            return value
        self._left -= 1 + (len(value) if isinstance(value, dict) else 0)
        if self._left < 0:
            raise TreeError(f"the body has more than {self._most} JSON values other than numbers; split it")
        if depth > MAX_DEPTH:
            raise TreeError(f"the body is nested deeper than {MAX_DEPTH} levels; send it flat")
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, msgspec.Struct):
            value = {name: getattr(value, name) for name in value.__struct_fields__}
        elif is_dataclass(value):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, list):
            if set(map(type, value)) <= _PLAIN:
                self._plain.add(id(value))
                self._weights[id(value)] = 1 + len(value)
                return value
            value = [self._weighed(each, depth + 1) for each in value]
            return self._noted(value, value)
        if isinstance(value, dict):
            value = {key: self._weighed(each, depth + 1) for key, each in value.items()}
            return self._noted(value, value.values())
        return value

    def _noted(self, value: Any, parts: Iterable[Any]) -> Any:
        self._weights[id(value)] = 1 + sum(map(self._weight, parts))
        return value

    def _weight(self, value: Any) -> int:
        if type(value) in _PLAIN:
            return 1
        if isinstance(value, str | bytes):
            return 1 + len(value) // 16
        if isinstance(value, np.ndarray):
            return PIECE + 1  # always in separate frames
        return self._weights[id(value)]

    def _frames(self, value: Any) -> Iterator[Frame]:
        if self._weight(value) <= PIECE:
            yield VALUE, value
            return
        if isinstance(value, list):
            yield LIST, None
            yield from self._filled(value)
        elif isinstance(value, dict):
            yield DICT, None
            yield from self._filled_dict(value)
        else:
            array = isinstance(value, np.ndarray)
            yield (ARRAY, value.dtype.str) if array else (TEXT if isinstance(value, str) else BYTES, None)
            flat = value.tobytes() if array else value
            for start in range(0, len(flat), PIECE * 16):
                yield FILL, flat[start : start + PIECE * 16]
        yield END, None

    def _filled(self, values: list[Any]) -> Iterator[Frame]:
        if id(values) in self._plain:
            yield from ((FILL, values[start : start + PIECE]) for start in range(0, len(values), PIECE))
            return
        start = weight = 0
        for place, each in enumerate(values):
            mine = self._weight(each)
            if mine > PIECE or weight + mine > PIECE:
                yield FILL, values[start:place]
                start, weight = place, 0
            if mine > PIECE:
                yield from self._frames(each)
                start = place + 1
            else:
                weight += mine
        yield FILL, values[start:]

    def _filled_dict(self, values: dict[str, Any]) -> Iterator[Frame]:
        small: dict[str, Any] = {}
        weight = 0
        for key, each in values.items():
            if self._weight(each) > PIECE:
                yield KEY, key
                yield from self._frames(each)
                continue
            small[key] = each
            weight += self._weight(each) + self._weight(key)
            if weight > PIECE:
                yield FILL, small
                small, weight = {}, 0
        yield FILL, small


class Assembler:
    """Rebuilds the value from its frames."""

    def __init__(self) -> None:
        self.value: Any = None
        self._open: list[tuple[int, Any, Any]] = []  # kind, parts so far, dtype of an array
        self._keys: list[str] = []

    def add(self, operation: int, value: Any) -> None:
        if operation in (LIST, DICT, TEXT, BYTES, ARRAY):
            self._open.append((operation, {} if operation == DICT else [], value))
        elif operation == KEY:
            self._keys.append(value)
        elif operation == FILL:
            kind, parts, _ = self._open[-1]
            if kind == DICT:
                parts.update(value)
            elif kind == LIST:
                parts.extend(value)
            else:
                parts.append(value)
        elif operation == END:
            kind, parts, dtype = self._open.pop()
            if kind == TEXT:
                parts = "".join(parts)
            elif kind in (BYTES, ARRAY):
                parts = b"".join(parts)
            self._place(np.frombuffer(parts, dtype=dtype) if kind == ARRAY else parts)
        else:
            self._place(value)

    def _place(self, value: Any) -> None:
        if not self._open:
            self.value = value
        elif self._open[-1][0] == DICT:
            self._open[-1][1][self._keys.pop()] = value
        else:
            self._open[-1][1].append(value)
