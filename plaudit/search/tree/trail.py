"""The paths to the nodes that a search goes on from, each made from the one above it and not from the root."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plaudit.search.tree.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Trail:
    """ids    prompt and steps
    text   of the steps
    key    what seeds are made of, as far as the steps' tokens say it
    """

    ids: tuple[int, ...]
    text: str
    key: Any

    def seed(self, drawn: int) -> int:
        """A seed of 63 bits that is the path's own: it gets the same steps in every method and every batch. Where a
        search comes back to a node with children for more, they are not to be those it has."""
        key = self.key.copy()
        key.update((f"{len(self.text)} {drawn}" if drawn else f"{len(self.text)}").encode())
        return int.from_bytes(key.digest(), "big") >> 1

    def on(self, node: Node) -> Trail:
        key = self.key.copy()
        key.update("".join([f"{token} " for token in node.tokens]).encode())
        return Trail(self.ids + node.tokens, self.text + node.text, key)


class Trails:
    """Of one question. `seed` is the run's."""

    def __init__(self, tree: Tree, seed: int, question: int) -> None:
        self.tree = tree
        key = hashlib.blake2b(f"{seed} {question} ".encode(), digest_size=8)
        self._root = Trail(tree.prompt_ids, "", key)
        self._known: dict[int, Trail] = {}

    def of(self, id: int) -> Trail:
        nodes, below = self.tree.nodes, list[Node]()
        trail = self._known.get(id)
        while trail is None:
            node = nodes[id]
            if node.parent < 0:
                trail = self._root
                break
            below.append(node)
            id = node.parent
            trail = self._known.get(id)
        for node in reversed(below):
            trail = self._known[node.id] = trail.on(node)
        return trail

    def ids(self, ids: Iterable[int]) -> list[tuple[int, ...]]:
        """Prompt and steps of each, for nodes that need not be known afterwards."""
        known, nodes = self._known, self.tree.nodes
        return [
            self.of(id).ids if id in known or nodes[id].parent < 0 else self.of(nodes[id].parent).ids + nodes[id].tokens
            for id in ids
        ]

    def forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            self._known.pop(id, None)
