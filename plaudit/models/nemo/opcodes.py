"""The index of a PyTorch distributed checkpoint (`.metadata`), read as data: it is a pickle, and none of it is run.

`pickletools` splits the file into opcodes. A class becomes its name, and an object a `Record` of its constructor
arguments, so that no file can call anything. Names that do not belong in such an index are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plaudit.errors import ModelError, UnsafeModel, one_line

PACKAGES = ("torch", "megatron", "collections", "pathlib")
MARK = object()
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "MARK": lambda: MARK,
}  # fmt: skip
VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(eq=False, slots=True)
class Record:
    """An object that was pickled: its class, what it is called with, and the state it is given."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = field(default=None)


def read_index(data: bytes, source: str) -> Any:
    """What the pickle `data` holds, with records in place of objects."""
    try:
        return _Reading(source).run(data)
    except UnsafeModel:
        raise
    except Exception as error:
        raise ModelError(f"{source} is not the index of a checkpoint ({one_line(error)}); copy it again") from error


class _Reading:
    def __init__(self, source: str) -> None:
        self.source = source
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, argument)
        raise ValueError("it ends too early")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in CONSTANTS:
            stack.append(CONSTANTS[name]())
        elif name in VALUES:
            stack.append(argument)
        elif name in SHORT_TUPLES:
            stack.append(tuple(self._pop(SHORT_TUPLES[name])))
        elif name == "TUPLE":
            items = self._since_mark()
            stack.append(tuple(items))
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        else:
            self._change(name, argument)

    def _change(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "GLOBAL":
            stack.append(self._named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(self._named(*self._pop(2)))
        elif name in ("NEWOBJ", "REDUCE"):
            made, args = self._pop(2)
            stack.append(Record(made.name, args))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._since_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._since_mark()
            stack[-1].extend(items)
        else:
            raise ValueError(f"it has the opcode {name}")

    def _named(self, module: str, name: str) -> Record:
        if module.split(".")[0] not in PACKAGES:
            raise UnsafeModel(f"{self.source} names {module}.{name}, which does not belong in a checkpoint's index")
        return Record(f"{module}.{name}")

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not MARK:
            at -= 1
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items
