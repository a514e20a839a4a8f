"""The tree against a model of it: a plain set of token lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.core.kv.blocks import BlockPool
from plaudit.core.kv.prefix import Chain, Node, PrefixTree
from plaudit.core.model.packing import pack_tree
from plaudit.prefix import common_prefix

SIZE = 4
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def enter(tree: PrefixTree, tokens: list[int], key: str = "v0") -> Chain[Node]:
    """What the scheduler and the runner do for one sequence: share, fill up, enter, let go."""
    match = tree.match(key, tokens, len(tokens))
    chain: Chain[Node] = Chain([n.block for n in match.nodes], list(match.nodes))
    for block in chain.blocks:
        tree.pool.retain(block)
    while len(chain.blocks) * SIZE < len(tokens):
        if tree.pool.free == 0:
            tree.evict(1)
        chain.blocks.append(tree.pool.take())
    tree.extend(key, chain, tokens, len(tokens), stored=True)
    return chain


def leave(tree: PrefixTree, chain: Chain[Node]) -> None:
    for block in chain.blocks:
        tree.pool.release(block)
    tree.released(chain.nodes)


def matched(tree: PrefixTree, tokens: list[int], key: str = "v0") -> int:
    match = tree.match(key, tokens, len(tokens))
    return len(match.nodes) * SIZE + match.partial_tokens


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12), TOKENS)
def test_a_match_is_exact_to_the_token(stored: list[list[int]], asked: list[int]) -> None:
    tree = PrefixTree(BlockPool(100), SIZE)
    for tokens in stored:
        leave(tree, enter(tree, tokens))
        tree.check()
        tree.pool.check([[n.block for n in tree.nodes()]])
    assert matched(tree, asked) == max(common_prefix(tokens, asked) for tokens in stored)
    assert matched(tree, asked, "v1") == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=20))
def test_eviction_frees_what_nobody_holds_and_nothing_else(stored: list[list[int]]) -> None:
    tree = PrefixTree(BlockPool(12), SIZE)
    held = enter(tree, [0, 1, 2, 0, 1])
    for tokens in stored:
        leave(tree, enter(tree, tokens))
        tree.check()
    tree.evict(100)
    assert matched(tree, [0, 1, 2, 0, 1]) == 5
    tree.pool.check([held.blocks, [n.block for n in tree.nodes()]])
    leave(tree, held)
    tree.evict(100)
    assert tree.pool.free == 12
    assert tree.tokens == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, max_size=12), TOKENS)
def test_what_is_given_up_goes_as_far_as_nothing_goes_on_from_it(stored: list[list[int]], asked: list[int]) -> None:
    tree = PrefixTree(BlockPool(200), SIZE)
    for tokens in stored:
        leave(tree, enter(tree, tokens))
    paths = {id(node): path_of(node) for node in tree.nodes()}
    beginnings = {number for number, path in paths.items() if asked[: len(path)] == path}
    going_on = [path for number, path in paths.items() if number not in beginnings]
    kept = {number for number, path in paths.items() if number not in beginnings or any(
        other[: len(path)] == path and len(path) % SIZE == 0 for other in going_on)}  # fmt: skip
    assert tree.drop("v0", [asked], []) == len(paths) - len(kept)
    assert {id(node) for node in tree.nodes()} == kept
    tree.check()


def path_of(node: Node) -> list[int]:
    return [*(path_of(node.parent) if node.parent is not None else []), *node.tokens]


def test_the_least_recently_used_goes_first() -> None:
    tree = PrefixTree(BlockPool(4), SIZE)
    for tokens in ([0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]):
        leave(tree, enter(tree, tokens))
    assert matched(tree, [0, 0, 0, 0]) == 4  # used again
    tree.evict(1)
    assert matched(tree, [1, 1, 1, 1]) == 0
    assert matched(tree, [0, 0, 0, 0]) == 4


def test_the_same_tokens_computed_twice_are_kept_once() -> None:
    tree = PrefixTree(BlockPool(10), SIZE)
    chains = []
    for _ in range(3):
        chain: Chain[Node] = Chain([tree.pool.take(), tree.pool.take()])
        tree.extend("v0", chain, [5, 6, 7, 8, 9], 5, stored=True)
        chains.append(chain)
    assert len({chain.blocks[0] for chain in chains}) == 1
    assert tree.tokens == 5


def test_books_that_do_not_balance_are_found() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.check([[block]])
    with pytest.raises(RuntimeError, match="block 0 counts 1 references and has 0 holders"):
        pool.check([])
    pool.release(block)
    with pytest.raises(RuntimeError, match="released twice"):
        pool.release(block)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.retain(block)


@settings(max_examples=100, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=10))
def test_a_packed_tree_holds_every_token_of_every_sequence(given_: list[list[int]]) -> None:
    ordered = sorted(given_)
    tree = pack_tree(ordered)
    row = tree.packed.input_ids[0].numpy()
    position = tree.packed.position_ids[0].numpy()
    for tokens, rows in zip(ordered, tree.rows, strict=True):
        assert row[rows].tolist() == tokens
        assert position[rows].tolist() == list(range(len(tokens)))


def test_a_key_that_holds_nothing_is_forgotten() -> None:
    """As many salts as there were requests would otherwise be kept for ever."""
    tree = PrefixTree(BlockPool(6), SIZE)
    for i in range(40):
        leave(tree, enter(tree, [0, 1, 2, 0, 1], f"salt {i}"))
        tree.check()
    assert len(tree._roots) == 3
    tree.drop("salt 39", [[0, 1, 2, 0, 1]], [])
    assert "salt 39" not in tree._roots
    tree.evict(6)
    assert not tree._roots


def test_what_was_released_often_is_offered_once() -> None:
    tree = PrefixTree(BlockPool(6), SIZE)
    for _ in range(1000):
        leave(tree, enter(tree, [0, 1, 2, 0, 1, 2, 0, 1]))
    assert len(tree._leaves) < 100
    assert tree.evict(6) == 2
    tree.check()
