"""KV transfer of a prompt to another engine with the same weights: one engine runs prefill, the other decodes.

The first engine exports what its prefix tree has of the prompt, with the state of recurrent layers after the last
token; the second inserts it in its tree under the same version. If only a part of the prompt is transferred (too few
blocks on either side), the second engine computes the rest: the result is the same.
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
    salt           as in SamplingParams: only requests with the same salt share the KV
    state          of recurrent layers, after the last token (StateBank.copy)
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
    """A copy of the tree's KV of the longest cached prefix of these tokens."""
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
    if backend.states is not None:  # a match always ends at a state
        slot = backend.states.find(backend.states.name(blocks, count))
        assert slot is not None
        state = _bank(backend).copy(slot)
    return Handover(tuple(tokens[:count]), version, keys, values, salt, state)


def import_kv(tree: PrefixTree, backend: Backend, key: Hashable, handover: Handover, reserve: int) -> int:
    """Insert the KV in the tree, as far as blocks are free beyond `reserve` ones; returns how many tokens it has
    then."""
    size, pool = tree.block_size, tree.pool
    present = tree.match((key, handover.salt), handover.tokens, len(handover.tokens))
    if len(present.nodes) * size + present.partial_tokens == len(handover.tokens):
        return len(handover.tokens)
    need = -(-len(handover.tokens) // size)
    if pool.free < need + reserve:
        tree.evict(need + reserve - pool.free)
    blocks = [pool.allocate() for _ in range(max(0, min(need, pool.free - reserve)))]
    count = min(len(handover.tokens), len(blocks) * size)
    if backend.states is not None and count < len(handover.tokens):
        count = 0  # there is no state for fewer tokens
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
    """Raise RequestError unless version, layers, shapes and dtypes are those of this engine."""
    if handover.version != version:
        raise RequestError(
            f"the KV was computed with weights of version {handover.version}, but the engine has version {version}: "
            "compute the prompt again"
        )
    decoder = backend.decoder
    if not (count := len(handover.tokens)):
        return
    expected = [(count, layer.kv_heads, layer.key_dim) for layer in decoder.layers]
    expected += [(count, layer.kv_heads, layer.value_dim) for layer in decoder.layers]
    tensors = [*handover.keys, *handover.values]
    if [tuple(tensor.shape) for tensor in tensors] != expected or {t.dtype for t in tensors} != {decoder.dtype}:
        raise RequestError(
            f"the KV of {count} tokens in {len(handover.keys)} layers does not fit {decoder.name}, which has "
            f"{len(decoder.layers)} layers in {decoder.dtype}: load the same model in both engines"
        )
    kept = [part for layer in decoder.states.values() for part in layer.values()]
    if [(tensor.shape, tensor.dtype) for tensor in handover.state] != kept:
        raise RequestError(
            f"a state of {len(handover.state)} tensors does not fit {decoder.name}, which has {len(kept)}: load the "
            "same model in both engines"
        )


def _bank(backend: Backend) -> StateBank:
    assert isinstance(backend, PagedBackend)
    return backend.bank


def _slots(blocks: Sequence[int], size: int, count: int) -> np.ndarray:
    return (np.array(blocks, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()[:count]
