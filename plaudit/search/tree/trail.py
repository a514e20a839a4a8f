"""The paths to the nodes that may be expanded, each built from its parent's instead of from the root."""

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
    key    hash state for seeds, updated with the steps' tokens
    """

    ids: tuple[int, ...]
    text: str
    key: Any

    def seed(self, drawn: int) -> int:
        """A 63-bit seed specific to the path: it gets the same steps in every method and every batch. When more
        children are sampled for a node later, they differ from the existing ones."""
        key = self.key.copy()
        key.update((f"{len(self.text)} {drawn}" if drawn else f"{len(self.text)}").encode())
        return int.from_bytes(key.digest(), "big") >> 1

    def on(self, node: Node) -> Trail:
        key = self.key.copy()
        key.update("".join([f"{token} " for token in node.tokens]).encode())
        return Trail(self.ids + node.tokens, self.text + node.text, key)


class Trails:
    """The trails of one question. `seed` is the run's."""

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
        """Prompt and steps of each node, without storing trails for them."""
        known, nodes = self._known, self.tree.nodes
        return [
            self.of(id).ids if id in known or nodes[id].parent < 0 else self.of(nodes[id].parent).ids + nodes[id].tokens
            for id in ids
        ]

    def forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            self._known.pop(id, None)
