"""The prefix tree: maps token prefixes to the blocks with their KV.

A node is one block and its tokens, full or partly filled; only full nodes have children. Roots are keyed by (module,
adapter state, weight version), so a new version makes everything older unreachable. Children are sorted: the child with
the longest common prefix is next to the insertion point of the tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from plaudit.core.kv.blocks import BlockPool
from plaudit.prefix import common_prefix

ROOT = -1  # the block of a root, which has no tokens


@dataclass(eq=False, slots=True)
class Node:
    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    keys: list[tuple[int, ...]] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    used: int = 0
    paths: int = 0  # pinned paths that end in this node
    key: Hashable = None  # of a root

    def insert(self, child: Node) -> None:
        at = bisect_left(self.keys, child.tokens)
        self.keys.insert(at, child.tokens)
        self.children.insert(at, child)

    def remove(self, child: Node) -> None:
        at = bisect_left(self.keys, child.tokens)
        while self.children[at] is not child:
            at += 1
        del self.keys[at], self.children[at]


class Place(NamedTuple):
    """The end of a path: its last node. The node may have been evicted; the path is then computed again."""

    node: Node
    resets: int  # the tree's reset count when the node was in it
    tokens: int  # length of the path as far as it is cached


@dataclass(frozen=True)
class Match:
    nodes: list[Node]  # full blocks, which can be shared
    partial: Node | None = None  # a block whose first `partial_tokens` tokens can be copied
    partial_tokens: int = 0


class PrefixTree:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.evictions = 0
        self._clock = count(1)
        self._order = count()
        self._resets = 0
        self.reset()

    def reset(self) -> None:
        """Remove everything, whatever the tree's state. The pool must be reset with it."""
        self._resets += 1
        self.tokens = 0  # in all nodes
        self._roots: dict[Hashable, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of eviction candidates; stale entries are skipped

    def match(self, key: Hashable, tokens: Sequence[int], limit: int, place: Place | None = None) -> Match:
        """The longest cached prefix of tokens[:limit]. place: the end of a path that is a prefix of the tokens."""
        now = next(self._clock)
        node, nodes = self._start_node(key, place, now)
        if node is None:
            return Match(nodes)
        if place is not None and place.tokens == limit and place.node.parent is node:  # the path itself
            place.node.used, rest = now, limit - len(nodes) * self.block_size
            return Match(nodes, place.node, rest) if rest < self.block_size else Match([*nodes, place.node])
        while True:
            start = len(nodes) * self.block_size
            want = tuple(tokens[start : min(start + self.block_size, limit)])
            best, common = self._closest(node, want)
            if best is None or common == 0:
                return Match(nodes)
            best.used = now
            if common < self.block_size:
                return Match(nodes, best, common)
            nodes.append(best)
            node = best

    def _start_node(self, key: Hashable, place: Place | None, now: int) -> tuple[Node | None, list[Node]]:
        """The node to start matching from, and its ancestors: the last full node before a place, or the root."""
        nodes: list[Node] = []
        if place is not None and place.resets == self._resets and place.node.parent is not None:
            node = place.node.parent
            while node.parent is not None:
                node.used = now
                nodes.append(node)
                node = node.parent
            if node.key == key:
                return nodes[0] if nodes else node, nodes[::-1]
            nodes = []
        return self._roots.get(key), nodes

    @staticmethod
    def _closest(node: Node, want: tuple[int, ...]) -> tuple[Node | None, int]:
        keys = node.keys
        at = bisect_left(keys, want)
        if at < len(keys) and keys[at][: len(want)] == want:
            return node.children[at], len(want)
        best: Node | None = None
        common = 0
        for i in (at, at - 1):
            if 0 <= i < len(keys) and (shared := common_prefix(keys[i], want)) > common:
                best, common = node.children[i], shared
        return best, common

    def extend(self, key: Hashable, chain: Chain[Node], tokens: Sequence[int], upto: int, *, stored: bool) -> None:
        """Insert tokens[:upto] of a sequence. If the tree already has a full block with the same tokens, the sequence
        shares that block and releases its own, provided its own is `stored`, that is, already written."""
        size = self.block_size
        node = chain.nodes[-1] if chain.nodes else self._roots.get(key) or Node((), ROOT, None, key=key)
        if chain.nodes and len(node.tokens) < size:
            self._lengthen(node, tuple(tokens[(len(chain.nodes) - 1) * size : min(upto, len(chain.nodes) * size)]))
        while len(node.tokens) in (0, size) and (start := len(chain.nodes) * size) < upto:
            want = tuple(tokens[start : min(start + size, upto)])
            at = bisect_left(node.keys, want)
            if at < len(node.keys) and node.keys[at][: len(want)] == want:
                twin = node.children[at]
                if not stored or len(want) < size:
                    return
                self.pool.retain(twin.block)
                self.pool.release(chain.blocks[len(chain.nodes)])
                chain.blocks[len(chain.nodes)] = twin.block
            else:
                twin = Node(want, chain.blocks[len(chain.nodes)], node)
                self.pool.retain(twin.block)
                self.tokens += len(want)
                node.keys.insert(at, want)
                node.children.insert(at, twin)
                if node.block == ROOT:
                    self._roots[key] = node
            twin.used = next(self._clock)
            chain.nodes.append(twin)
            node = twin

    def _lengthen(self, node: Node, tokens: tuple[int, ...]) -> None:
        if len(tokens) > len(node.tokens) and node.parent is not None:
            node.parent.remove(node)
            self.tokens += len(tokens) - len(node.tokens)
            node.tokens = tokens
            node.parent.insert(node)

    def released(self, nodes: Sequence[Node]) -> None:
        """A sequence has released these nodes: those without other references become eviction candidates."""
        for node in nodes:
            self._add_candidate(node)

    def _add_candidate(self, node: Node) -> None:
        if node.parent is not None and not node.children and self.pool.refs[node.block] == 1:
            heapq.heappush(self._leaves, (node.used, next(self._order), node))
            if len(self._leaves) > 2 * self.pool.blocks + 64:  # most are stale
                latest = {id(entry[2]): entry for entry in self._leaves if entry[2].parent is not None}
                self._leaves = list(latest.values())
                heapq.heapify(self._leaves)

    def evict(self, blocks: int) -> int:
        """Free up to this many blocks, least recently used first; returns how many were freed."""
        freed = 0
        while freed < blocks and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.parent is None or node.children or self.pool.refs[node.block] != 1:
                continue
            if node.used != used:
                self._add_candidate(node)
                continue
            parent = node.parent
            self._unlink(node)
            freed += 1
            self._add_candidate(parent)
        self.evictions += freed
        return freed

    def pin_path(
        self, key: Hashable, tokens: Sequence[int], upto: int, chain: Chain[Node] | None = None
    ) -> Place | None:  # fmt: skip
        """Pin the end of the path tokens[:upto], as far as cached; `free_path` unpins it. chain: that inserted it."""
        nodes = chain.nodes if chain is not None else []
        if nodes and (len(nodes) - 1) * self.block_size + len(nodes[-1].tokens) >= upto:
            end: Node | None = nodes[-1]
        else:  # the end is in a node of another sequence
            near = Place(nodes[-1], self._resets, -1) if nodes else None
            match = PrefixTree.match(self, key, tokens, upto, near)
            end = match.partial or (match.nodes[-1] if match.nodes else None)
            upto = len(match.nodes) * self.block_size + match.partial_tokens
        if end is None:
            return None
        end.paths += 1
        return Place(end, self._resets, upto)

    def free_path(self, place: Place) -> int:
        """Unpin a path; free its nodes from the end up to one with children, other paths or references; returns how
        many blocks were freed."""
        node, freed = place.node, 0
        if place.resets != self._resets:
            return freed
        node.paths -= 1
        while node.parent is not None and not node.paths and not node.children and self.pool.refs[node.block] == 1:
            parent = node.parent
            self._unlink(node)
            freed += 1
            node = parent
        if freed:
            self._add_candidate(node)
        return freed

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.remove(node)
        if node.parent.block == ROOT and not node.parent.children:
            del self._roots[node.parent.key]
        node.parent = None
        self.tokens -= len(node.tokens)
        self.pool.release(node.block)

    def clear(self) -> None:
        """Remove every node. Sequences keep their references to blocks."""
        for node in list(self.nodes()):
            node.parent = None
            self.pool.release(node.block)
        self._roots.clear()
        self._leaves.clear()
        self.tokens = 0

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children)

    def check(self) -> None:
        """Raise unless order, fullness, parents, references and the token count are consistent."""
        total = 0
        if any(not root.children for root in self._roots.values()):
            raise RuntimeError("the tree has a root without children")
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.keys != sorted(node.keys) or node.keys != [child.tokens for child in node.children]:
                raise RuntimeError(f"the children of block {node.block} are out of order")
            for child in node.children:
                if child.parent is not node or not child.tokens or len(child.tokens) > self.block_size:
                    raise RuntimeError(f"block {child.block} has {len(child.tokens)} tokens or a wrong parent")
                if child.children and len(child.tokens) != self.block_size:
                    raise RuntimeError(f"block {child.block} has children and only {len(child.tokens)} tokens")
                if self.pool.refs[child.block] == 0:
                    raise RuntimeError(f"block {child.block} is in the tree and free")
                total += len(child.tokens)
            stack.extend(node.children)
        if total != self.tokens:
            raise RuntimeError(f"the tree counts {self.tokens} tokens, but its nodes have {total}")


N = TypeVar("N")


@dataclass
class Chain(Generic[N]):
    """The blocks of a sequence, in order, and the tree nodes of the first ones."""

    blocks: list[int] = field(default_factory=list)
    nodes: list[N] = field(default_factory=list)
