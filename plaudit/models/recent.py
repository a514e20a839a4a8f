"""Token ids of recently encoded texts."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class RecentIds:
    """Limited in size, the characters of the texts plus their tokens; the least recently used are dropped first.
    Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> list[int] | None:
        return self.get_all([text]).get(text)

    def get_all(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Those that are known."""
        with self._lock:
            found = {text: ids for text in texts if (ids := self._ids.get(text)) is not None}
            for text in found:
                self._ids.move_to_end(text)
        return {text: ids.tolist() for text, ids in found.items()}

    def put_all(self, new: Mapping[str, Sequence[int]]) -> None:
        entries = [(text, array("i", ids)) for text, ids in new.items() if len(text) + len(ids) <= self.most]
        with self._lock:
            for text, ids in entries:
                if text not in self._ids:
                    self._ids[text] = ids
                    self.size += len(text) + len(ids)
            while self.size > self.most:
                text, dropped = self._ids.popitem(last=False)
                self.size -= len(text) + len(dropped)
