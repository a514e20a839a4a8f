"""Tiled attention with soft caps and sinks: the results of the full score matrix, with memory linear in the length."""

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
    """Attention of one sequence with the full score matrix."""
    count = len(query)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, k) * (DIM**-0.5 if rule.scale is None else rule.scale)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    position = torch.arange(count)
    visible = position[None] <= position[:, None]
    if rule.window is not None:
        visible &= position[None] > position[:, None] - rule.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks[:, None, None].expand(-1, count, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :count], v)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tile", [1, 10**9])
def test_tiled_attention_matches_the_full_score_matrix(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", tile)
    rule, lengths = RULES[name], [3, 50, 53, 130]
    query, key, value = rows(sum(lengths))
    layout = pack([list(range(n)) for n in lengths]).layout
    actual = layout.attend(0, query, key, value, rule)
    expected = [by_hand(*(x.split(lengths)[i] for x in (query, key, value)), rule) for i in range(len(lengths))]
    torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=1e-6)  # the softmax is in float32


@pytest.mark.parametrize("name", RULES)
def test_tiled_attention_of_sequences_with_a_shared_prefix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 1)
    rule, stem = RULES[name], list(range(60))
    tree = pack_tree([[*stem, *range(100, 140)], [*stem, *range(200, 225)]])
    query, key, value = rows(tree.tokens)
    actual = tree.packed.layout.attend(0, query, key, value, rule)
    for indices in tree.rows:
        sequence_rows = torch.from_numpy(indices)
        expected = by_hand(query[sequence_rows], key[sequence_rows], value[sequence_rows], rule)
        torch.testing.assert_close(actual[sequence_rows], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_gradients_of_tiled_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 1)
    rule = RULES[name]
    inputs, weights = rows(70, grad=True), rows(70)[0].flip(0)
    output = pack([list(range(70))]).layout.attend(0, *inputs, rule)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    expected = torch.autograd.grad((by_hand(*inputs, rule) * weights).sum(), inputs)
    for actual_gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient, rtol=0, atol=1e-5)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor created."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def largest(layout: Layout, count: int, rule: Rule, wanted: Tensor | None = None) -> int:
    query, key, value = (x.float() for x in rows(count))
    with Largest() as recorder, torch.inference_mode():
        if wanted is None:
            layout.attend(0, query, key, value, rule)
        else:
            layout.attend_wanted(0, wanted, query[wanted], key, value, rule)
    return recorder.bytes


@pytest.mark.parametrize("name", RULES)
def test_memory_of_tiled_attention_is_linear_in_the_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 2**16)
    rule = RULES[name]
    short, long = (largest(pack([list(range(n))]).layout, n, rule) for n in (256, 2048))
    assert long <= 8 * short
    assert long < 2048 * 2048


def test_selected_rows_gather_their_keys_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, wanted = pack([list(range(512))]).layout, torch.arange(0, 512, 4)
    query, key, value = rows(512)
    unchunked = layout.attend_wanted(0, wanted, query[wanted], key, value, RULES["sinks"])
    torch.testing.assert_close(unchunked, by_hand(query, key, value, RULES["sinks"])[wanted], rtol=0, atol=1e-6)
    monkeypatch.setattr(attention, "GATHERED", 2**20)
    assert torch.equal(layout.attend_wanted(0, wanted, query[wanted], key, value, RULES["sinks"]), unchunked)
    assert largest(layout, 512, RULES["sinks"], wanted) <= 2**20
