"""Blocks and prefix tree for models with recurrent layers: a prefix matches up to its last stored state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from plaudit.core.kv.blocks import BlockPool
from plaudit.core.kv.prefix import Chain, Match, Node, Place, PrefixTree
from plaudit.core.states import Name, StateTable


class StatefulPool(BlockPool):
    """A pool that drops a block's states when the block is freed."""

    def __init__(self, blocks: int, states: StateTable) -> None:
        self.states = states
        super().__init__(blocks)

    def reset(self) -> None:
        super().reset()
        self.states.reset()

    def release(self, block: int) -> None:
        super().release(block)
        if self.refs[block] == 0:
            self.states.forget(block)


class StatefulTree(PrefixTree):
    def __init__(self, pool: StatefulPool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self.states = pool.states

    def match(self, key: Hashable, tokens: Sequence[int], limit: int, place: Place | None = None) -> Match:
        cached = super().match(key, tokens, limit, place)
        path = [(node, self.block_size) for node in cached.nodes]
        if cached.partial is not None:
            path.append((cached.partial, cached.partial_tokens))
        while path:
            node, tokens_here = path.pop()
            fill = self.states.longest(node.block, tokens_here)
            nodes = [each for each, _ in path]
            if fill == self.block_size:
                return Match([*nodes, node])
            if fill:
                return Match(nodes, node, fill)
        return Match([])

    def place(self, key: Hashable, tokens: Sequence[int]) -> Name | None:
        """The name of the state after these tokens, if the tree has all of them."""
        path = super().match(key, tokens, len(tokens))
        last = path.partial or (path.nodes[-1] if path.nodes else None)
        fill = path.partial_tokens or self.block_size
        before = len(path.nodes) - (path.partial is None)
        return (last.block, fill) if last is not None and before * self.block_size + fill == len(tokens) else None

    def extend(self, key: Hashable, chain: Chain[Node], tokens: Sequence[int], upto: int, *, stored: bool) -> None:
        own = list(chain.blocks)
        unshared = own[len(chain.nodes) :]  # may be replaced by shared blocks with the same tokens
        for block in unshared:
            self.pool.retain(block)
        super().extend(key, chain, tokens, upto, stored=stored)
        for before, after in zip(own, chain.blocks, strict=True):
            if before != after:
                self.states.move(before, after)
        for block in unshared:
            self.pool.release(block)

    def check(self) -> None:
        super().check()
        self.states.check(lambda block: self.pool.refs[block] > 0)
