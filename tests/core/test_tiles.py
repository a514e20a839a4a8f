"""Soft caps and sinks in tiles: the results of the whole score matrix, in memory linear in the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plaudit.core.model import attention
from plaudit.core.model.attention import Layout, Rule
from plaudit.core.model.packing import pack, pack_tree

HEADS, KV_HEADS, DIM = 4, 2, 16
SINKS = torch.randn(HEADS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
RULES = {
    "sinks": Rule(sinks=SINKS), "cap": Rule(softcap=2.0), "both, scaled": Rule(scale=0.7, softcap=2.0, sinks=SINKS),
    "sinks in a window": Rule(window=9, sinks=SINKS), "cap in a window": Rule(window=40, softcap=2.0),
}  # fmt: skip


def rows(count: int, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    shapes = [(count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=grad) for s in shapes)
    return query, key, value


def by_hand(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """One sequence, the whole matrix at once."""
    count = len(query)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, k) * (DIM**-0.5 if rule.scale is None else rule.scale)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    at = torch.arange(count)
    seen = at[None] <= at[:, None]
    if rule.window is not None:
        seen &= at[None] > at[:, None] - rule.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks[:, None, None].expand(-1, count, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :count], v)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tile", [1, 10**9])
def test_tiles_give_what_the_whole_matrix_gives(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", tile)
    rule, lengths = RULES[name], [3, 50, 53, 130]
    query, key, value = rows(sum(lengths))
    layout = pack([list(range(n)) for n in lengths]).layout
    found = layout.attend(0, query, key, value, rule)
    expected = [by_hand(*(x.split(lengths)[i] for x in (query, key, value)), rule) for i in range(len(lengths))]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-6)  # the softmax is in float32


@pytest.mark.parametrize("name", RULES)
def test_tiles_of_sequences_that_share_a_beginning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 1)
    rule, stem = RULES[name], list(range(60))
    tree = pack_tree([[*stem, *range(100, 140)], [*stem, *range(200, 225)]])
    query, key, value = rows(tree.tokens)
    found = tree.packed.layout.attend(0, query, key, value, rule)
    for each in tree.rows:
        at = torch.from_numpy(each)
        expected = by_hand(query[at], key[at], value[at], rule)
        torch.testing.assert_close(found[at], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_gradients_through_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 1)
    rule = RULES[name]
    given, weights = rows(70, grad=True), rows(70)[0].flip(0)
    found = pack([list(range(70))]).layout.attend(0, *given, rule)
    gradients = torch.autograd.grad((found * weights).sum(), given)
    expected = torch.autograd.grad((by_hand(*given, rule) * weights).sum(), given)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return out


def largest(layout: Layout, count: int, rule: Rule, wanted: Tensor | None = None) -> int:
    query, key, value = (x.float() for x in rows(count))
    with Largest() as made, torch.inference_mode():
        if wanted is None:
            layout.attend(0, query, key, value, rule)
        else:
            layout.attend_wanted(0, wanted, query[wanted], key, value, rule)
    return made.bytes


@pytest.mark.parametrize("name", RULES)
def test_memory_grows_with_the_length_and_not_with_its_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 2**16)
    rule = RULES[name]
    short, long = (largest(pack([list(range(n))]).layout, n, rule) for n in (256, 2048))
    assert long <= 8 * short
    assert long < 2048 * 2048


def test_rows_that_are_read_one_by_one_gather_their_keys_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, wanted = pack([list(range(512))]).layout, torch.arange(0, 512, 4)
    query, key, value = rows(512)
    whole = layout.attend_wanted(0, wanted, query[wanted], key, value, RULES["sinks"])
    torch.testing.assert_close(whole, by_hand(query, key, value, RULES["sinks"])[wanted], rtol=0, atol=1e-6)
    monkeypatch.setattr(attention, "GATHERED", 2**20)
    assert torch.equal(layout.attend_wanted(0, wanted, query[wanted], key, value, RULES["sinks"]), whole)
    assert largest(layout, 512, RULES["sinks"], wanted) <= 2**20
