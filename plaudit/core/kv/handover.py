"""KV of a prompt on its way from one engine to another of the same weights: one reads prompts, the other goes on.

What travels is what the prefix tree of the first has of the tokens, with the state of recurrent layers behind the last
of them, and it is entered in the tree of the second under the same version. If less than the whole prompt comes through
(blocks were short on either side), the second engine computes the rest: the result is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from plaudit.core.device.backend import Backend
from plaudit.core.device.paged import PagedBackend
from plaudit.core.kv.prefix import Chain, PrefixTree
from plaudit.core.kv.stateful import StatefulTree
from plaudit.core.model.packing import send
from plaudit.core.states import StateBank
from plaudit.errors import RequestError


@dataclass(frozen=True)
class Handover:
    """keys, values   per layer, (tokens, kv heads, dim)
    salt           as in SamplingParams: who may share it
    state          of recurrent layers, after the last of the tokens (StateBank.copy)
    """

    tokens: tuple[int, ...]
    version: int
    keys: list[Tensor]
    values: list[Tensor]
    salt: str = ""
    state: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values, *self.state))


def export_kv(
    tree: PrefixTree, backend: Backend, key: Hashable, tokens: Sequence[int], version: int, salt: str
) -> Handover:
    """A copy of what the tree has of these tokens."""
    match = tree.match((key, salt), tokens, len(tokens))
    blocks = [node.block for node in match.nodes]
    count = len(blocks) * tree.block_size
    if match.partial is not None:
        blocks.append(match.partial.block)
        count += match.partial_tokens
    if count == 0:
        return Handover((), version, [], [], salt)
    keys, values = backend.read(send(_slots(blocks, tree.block_size, count), backend.decoder.device))
    state: list[Tensor] = []
    if backend.states is not None:  # the match ends where there is one
        slot = backend.states.find(backend.states.name(blocks, count))
        assert slot is not None
        state = _bank(backend).copy(slot)
    return Handover(tuple(tokens[:count]), version, keys, values, salt, state)


def import_kv(tree: PrefixTree, backend: Backend, key: Hashable, handover: Handover, reserve: int) -> int:
    """Enter the KV in the tree, as far as there are blocks beside `reserve` ones; how many tokens it has then."""
    size, pool = tree.block_size, tree.pool
    present = tree.match((key, handover.salt), handover.tokens, len(handover.tokens))
    if len(present.nodes) * size + present.partial_tokens == len(handover.tokens):
        return len(handover.tokens)
    need = -(-len(handover.tokens) // size)
    if pool.free < need + reserve:
        tree.evict(need + reserve - pool.free)
    blocks = [pool.take() for _ in range(max(0, min(need, pool.free - reserve)))]
    count = min(len(handover.tokens), len(blocks) * size)
    if backend.states is not None and count < len(handover.tokens):
        count = 0  # there is no state for less
    if count:
        slots = send(_slots(blocks, size, count), backend.decoder.device)
        backend.write(slots, [k[:count] for k in handover.keys], [v[:count] for v in handover.values])
    chain: Chain = Chain(blocks)  # type: ignore[type-arg]
    tree.extend((key, handover.salt), chain, handover.tokens, count, stored=True)
    if isinstance(tree, StatefulTree) and count and (name := tree.place((key, handover.salt), handover.tokens)):
        slot = tree.states.keep(name)
        if slot is not None:
            _bank(backend).restore(slot, handover.state)
    for block in chain.blocks:
        pool.release(block)
    tree.released(chain.nodes)
    return count


def check(handover: Handover, backend: Backend, version: int) -> None:
    """Raise unless this engine could have computed it."""
    if handover.version != version:
        raise RequestError(f"this KV is of weights of version {handover.version}, and the engine has {version}")
    decoder = backend.decoder
    if not (count := len(handover.tokens)):
        return
    expected = [(count, layer.kv_heads, layer.key_dim) for layer in decoder.layers]
    expected += [(count, layer.kv_heads, layer.value_dim) for layer in decoder.layers]
    tensors = [*handover.keys, *handover.values]
    if [tuple(tensor.shape) for tensor in tensors] != expected or {t.dtype for t in tensors} != {decoder.dtype}:
        raise RequestError(
            f"this KV of {count} tokens in {len(handover.keys)} layers is not {decoder.name}'s, which has "
            f"{len(decoder.layers)} layers in {decoder.dtype}: both engines must have the same model"
        )
    kept = [part for layer in decoder.states.values() for part in layer.values()]
    if [(tensor.shape, tensor.dtype) for tensor in handover.state] != kept:
        raise RequestError(
            f"a state of {len(handover.state)} tensors is not {decoder.name}'s, which has {len(kept)}: both engines "
            "must have the same model"
        )


def _bank(backend: Backend) -> StateBank:
    assert isinstance(backend, PagedBackend)
    return backend.bank


def _slots(blocks: Sequence[int], size: int, count: int) -> np.ndarray:
    return (np.array(blocks, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()[:count]
