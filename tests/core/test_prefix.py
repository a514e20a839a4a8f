"""The prefix tree against a reference: a plain set of token lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.core.kv.blocks import BlockPool
from plaudit.core.kv.prefix import Chain, Match, Node, PrefixTree
from plaudit.core.model.packing import pack_tree
from plaudit.prefix import common_prefix

SIZE = 4
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def insert(tree: PrefixTree, tokens: list[int], key: str = "v0") -> Chain[Node]:
    """What the scheduler and the runner do for one sequence: share blocks, allocate the rest, insert into the tree."""
    match = tree.match(key, tokens, len(tokens))
    chain: Chain[Node] = Chain([n.block for n in match.nodes], list(match.nodes))
    for block in chain.blocks:
        tree.pool.retain(block)
    while len(chain.blocks) * SIZE < len(tokens):
        if tree.pool.free == 0:
            tree.evict(1)
        chain.blocks.append(tree.pool.allocate())
    tree.extend(key, chain, tokens, len(tokens), stored=True)
    return chain


def release(tree: PrefixTree, chain: Chain[Node]) -> None:
    for block in chain.blocks:
        tree.pool.release(block)
    tree.released(chain.nodes)


def matched(tree: PrefixTree, tokens: list[int], key: str = "v0") -> int:
    match = tree.match(key, tokens, len(tokens))
    return len(match.nodes) * SIZE + match.partial_tokens


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12), TOKENS)
def test_match_is_exact_to_the_token(stored: list[list[int]], asked: list[int]) -> None:
    tree = PrefixTree(BlockPool(100), SIZE)
    for tokens in stored:
        release(tree, insert(tree, tokens))
        tree.check()
        tree.pool.check([[n.block for n in tree.nodes()]])
    assert matched(tree, asked) == max(common_prefix(tokens, asked) for tokens in stored)
    assert matched(tree, asked, "v1") == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=20))
def test_eviction_frees_exactly_the_unreferenced_blocks(stored: list[list[int]]) -> None:
    tree = PrefixTree(BlockPool(12), SIZE)
    running = insert(tree, [0, 1, 2, 0, 1])
    for tokens in stored:
        release(tree, insert(tree, tokens))
        tree.check()
    tree.evict(100)
    assert matched(tree, [0, 1, 2, 0, 1]) == 5
    tree.pool.check([running.blocks, [n.block for n in tree.nodes()]])
    release(tree, running)
    tree.evict(100)
    assert tree.pool.free == 12
    assert tree.tokens == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12), st.data())
def test_free_path_keeps_blocks_shared_with_other_paths(stored: list[list[int]], data: st.DataObject) -> None:
    tree = PrefixTree(BlockPool(200), SIZE)
    places = []
    for tokens in stored:
        release(tree, insert(tree, tokens))
        place = tree.pin_path("v0", tokens, len(tokens))
        assert place is not None
        places.append(place)
    order = data.draw(st.permutations(range(len(stored))))
    for step, freed in enumerate(order):
        before = tree.pool.free
        assert tree.free_path(places[freed]) == tree.pool.free - before
        tree.check()
        tree.pool.check([[n.block for n in tree.nodes()]])
        for remaining in order[step + 1 :]:
            assert matched(tree, stored[remaining]) == len(stored[remaining])
    assert tree.tokens == 0
    assert tree.pool.free == 200


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12), TOKENS)
def test_match_from_a_place_equals_match_from_the_root(stored: list[list[int]], more: list[int]) -> None:
    tree = PrefixTree(BlockPool(200), SIZE)
    chains = [insert(tree, tokens) for tokens in stored]
    places = [tree.pin_path("v0", t, len(t), chain) for t, chain in zip(stored, chains, strict=True)]
    for tokens, chain, place in zip(stored, chains, places, strict=True):
        release(tree, chain)
        query = [*tokens, *more]
        assert tree.match("v0", query, len(query), place) == tree.match("v0", query, len(query))
        assert not tree.match("v1", query, len(query), place).nodes
    tree.evict(200)
    for tokens, place in zip(stored, places, strict=True):
        assert tree.match("v0", tokens, len(tokens), place) == Match([]), "its node has gone"
        assert place is not None
        tree.free_path(place)


def test_least_recently_used_is_evicted_first() -> None:
    tree = PrefixTree(BlockPool(4), SIZE)
    for tokens in ([0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]):
        release(tree, insert(tree, tokens))
    assert matched(tree, [0, 0, 0, 0]) == 4  # used again
    tree.evict(1)
    assert matched(tree, [1, 1, 1, 1]) == 0
    assert matched(tree, [0, 0, 0, 0]) == 4


def test_equal_tokens_computed_twice_are_stored_once() -> None:
    tree = PrefixTree(BlockPool(10), SIZE)
    chains = []
    for _ in range(3):
        chain: Chain[Node] = Chain([tree.pool.allocate(), tree.pool.allocate()])
        tree.extend("v0", chain, [5, 6, 7, 8, 9], 5, stored=True)
        chains.append(chain)
    assert len({chain.blocks[0] for chain in chains}) == 1
    assert tree.tokens == 5


def test_block_pool_detects_wrong_reference_counts() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
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
def test_packed_tree_contains_every_token_of_every_sequence(given_: list[list[int]]) -> None:
    ordered = sorted(given_)
    tree = pack_tree(ordered)
    row = tree.packed.input_ids[0].numpy()
    position = tree.packed.position_ids[0].numpy()
    for tokens, rows in zip(ordered, tree.rows, strict=True):
        assert row[rows].tolist() == tokens
        assert position[rows].tolist() == list(range(len(tokens)))


def test_keys_without_cached_tokens_are_removed() -> None:
    """Otherwise one root per request salt would be kept forever."""
    tree = PrefixTree(BlockPool(6), SIZE)
    for i in range(40):
        release(tree, insert(tree, [0, 1, 2, 0, 1], f"salt {i}"))
        tree.check()
    assert len(tree._roots) == 3
    place = tree.pin_path("salt 39", [0, 1, 2, 0, 1], 5)
    assert place is not None
    tree.free_path(place)
    assert "salt 39" not in tree._roots
    tree.evict(6)
    assert not tree._roots


def test_eviction_queue_stays_bounded_after_repeated_releases() -> None:
    tree = PrefixTree(BlockPool(6), SIZE)
    for _ in range(1000):
        release(tree, insert(tree, [0, 1, 2, 0, 1, 2, 0, 1]))
    assert len(tree._leaves) < 100
    assert tree.evict(6) == 2
    tree.check()
