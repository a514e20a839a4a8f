"""Computes the cutoffs of min-p, top-k and top-p, in this order, without sorting.

The kept tokens of a row are a prefix of its tokens in descending order, ties to the lower token id. So one number
describes them: the packed key (logit, then token id) of the last kept token. Three launches, in this order:

    _chunk_peaks  the largest logit of every chunk of tokens, and the chunk's share of the softmax
    _cut_by_best  takes the best tokens one by one, up to BEST: the next is in the chunk with the largest remaining
                  logit, and only that chunk is read again
    _cut_by_mass  rows with a lower cutoff: bisection over the logits, several thresholds in each pass

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
BEST = 64
DEEPER = tl.constexpr(-(2**63))  # a cutoff that `_cut_by_best` did not reach; below every key
EVERYTHING = -(2**63) + 1  # the cutoff of a row that keeps all tokens; below every key too


@triton.jit
def ordered(x):
    """float32 as int32 in the same order; -0.0 is 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def packed_key(x, token):
    """A number that is larger for a larger logit, and for equal logits larger for a lower token id."""
    return (ordered(x).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def key_logit(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def cut_logit(cut, EVERYTHING: tl.constexpr):
    """A cutoff as two numbers: the lowest kept logit, and the highest kept token id at that logit."""
    everything = cut == EVERYTHING
    lowest = tl.where(everything, float("-inf"), key_logit(cut))
    return lowest, tl.where(everything, 0xFFFFFFFF, 0xFFFFFFFF - (cut & 0xFFFFFFFF))


@triton.jit
def key_token(key):
    """The token of a packed key."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _chunk_peaks(logits, inverse, highest, sums, vocabulary, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = token < vocabulary
    x = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")) * tl.load(inverse + row)
    peak = tl.max(x, axis=1)
    total = tl.sum(tl.where(inside, tl.exp(x - tl.maximum(peak, -3.0e38)[:, None]), 0.0), axis=1)
    tl.store(highest + row * chunks + chunk, peak, mask=chunk < chunks)
    tl.store(sums + row * chunks + chunk, total, mask=chunk < chunks)


@triton.jit
def _cut_by_best(
    logits, inverse, top_k, top_p, min_p, highest, sums, best, counts, cuts, peaks, totals, vocabulary, chunks,
    CHUNK: tl.constexpr, BEST: tl.constexpr, CHUNKS: tl.constexpr, EVERYTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tl.store(counts + row, 0)
    k = tl.minimum(tl.load(top_k + row), vocabulary)
    p, least = tl.load(top_p + row), tl.load(min_p + row)
    if (k == vocabulary) & (p >= 1.0) & (least == 0.0):
        tl.store(cuts + row, EVERYTHING)
        return
    scale = tl.load(inverse + row)
    chunk = tl.arange(0, CHUNKS)
    high = tl.load(highest + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    share = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(high, axis=0)
    mass = tl.sum(tl.where(chunk < chunks, share * tl.exp(high - peak), 0.0), axis=0)
    # By the chunk's first token, which orders chunks of equal logits like their tokens.
    key = tl.where(chunk < chunks, packed_key(high, chunk * CHUNK), DEEPER)
    last = tl.full([], 2**63 - 1, tl.int64)
    count = tl.minimum(k, BEST)
    for rank in range(count):
        mine = (key_token(tl.max(key, axis=0)) // CHUNK).to(tl.int32)
        token = mine * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")) * scale
        left = tl.where(token < vocabulary, packed_key(x, token), DEEPER)
        left = tl.where(left < last, left, DEEPER)
        last = tl.max(left, axis=0)
        tl.store(best + row * BEST + rank, last)
        key = tl.where(chunk == mine, tl.max(tl.where(left < last, left, DEEPER), axis=0), key)
    tl.debug_barrier()  # one thread has stored the best, all threads read them
    rank = tl.arange(0, BEST)
    taken = rank < count
    ours = tl.load(best + row * BEST + rank, mask=taken, other=DEEPER)
    weight = tl.where(taken, tl.exp(key_logit(ours) - peak), 0.0)
    likely = taken & ((weight >= least) | (rank == 0))
    weight = tl.where(likely, weight, 0.0)
    complete = (k <= BEST) | (tl.sum(likely.to(tl.int32), axis=0) < count)  # they are all that min-p and top-k keep
    if complete:
        mass = tl.sum(weight, axis=0)
    before = tl.cumsum(weight, axis=0) - weight
    keep = likely & (before < p * mass) | (rank == 0)
    kept = tl.sum(keep.to(tl.int32), axis=0)
    cut = tl.max(tl.where(rank == kept - 1, ours, DEEPER), axis=0)
    tl.store(peaks + row, peak)
    if (complete == 0) & ((kept == BEST) | (((k < vocabulary) | (least > 0.0)) & (p < 1.0))):  # their mass is unknown
        tl.store(cuts + row, DEEPER)
        tl.store(totals + row, mass)
    else:
        tl.store(counts + row, kept)
        tl.store(cuts + row, cut)
        tl.store(totals + row, tl.sum(tl.where(keep, weight, 0.0), axis=0))


@triton.jit
def _above(logits, row, scale, peak, thresholds, vocabulary, WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens above each threshold (WAYS,), and their share of the softmax."""
    count, mass = tl.zeros([WAYS], tl.int32), tl.zeros([WAYS], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        x = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")) * scale
        over = (ordered(x).to(tl.int64)[None, :] > thresholds[:, None]) & inside[None, :]
        count += tl.sum(over.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(over, tl.exp(x - peak)[None, :], 0.0), axis=1)
    return count, mass


@triton.jit
def _lowest(
    logits, row, scale, peak, low, high, k, mass_limit, vocabulary, WAYS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The lowest logit, as an ordered number, with fewer than k tokens and less than this mass above it; `low` is below
    it, `high` is not below it."""
    way = tl.arange(0, WAYS)
    while high - low > 1:
        step = tl.maximum((high - low) // (WAYS + 1), 1)
        thresholds = tl.minimum(low + step * (way + 1), high)
        count, mass = _above(logits, row, scale, peak, thresholds, vocabulary, WAYS, BLOCK)
        fits = (count < k) & (mass < mass_limit) | (thresholds == high)
        low = tl.maximum(low, tl.max(tl.where(fits, low, thresholds), axis=0))
        high = tl.minimum(high, tl.min(tl.where(fits, thresholds, high), axis=0))
    return low, high


@triton.jit
def _cut_by_mass(
    logits, inverse, top_k, top_p, min_p, cuts, peaks, totals, vocabulary, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cuts + row) != DEEPER:
        return
    scale, peak, mass = tl.load(inverse + row), tl.load(peaks + row), tl.load(totals + row)
    k = tl.minimum(tl.load(top_k + row), vocabulary)
    p, least = tl.load(top_p + row), tl.load(min_p + row)
    top = ordered(peak).to(tl.int64)
    low = ordered(peak - 200.0).to(tl.int64)  # lower logits have no mass in float32
    if k < vocabulary:
        low = tl.full([], -(2**31), tl.int64)
        _, edge = _lowest(logits, row, scale, peak, low, top, k, float("inf"), vocabulary, WAYS, BLOCK)
        count, above = _at(logits, row, scale, peak, edge, vocabulary, WAYS, BLOCK)
        mass = above + (k - count).to(tl.float32) * tl.exp(key_logit(edge << 32) - peak)
        low = edge - 1
    floor = low
    if least > 0.0:
        unlikely = ordered(peak + tl.log(least)).to(tl.int64) - 1
        if unlikely > low:
            floor = unlikely
            _, mass = _at(logits, row, scale, peak, unlikely, vocabulary, WAYS, BLOCK)
    mass_limit = tl.where(p >= 1.0, float("inf"), p * mass)
    _, edge = _lowest(
        logits, row, scale, peak, floor, tl.maximum(top, floor + 1), k, mass_limit, vocabulary, WAYS, BLOCK
    )
    count, above = _at(logits, row, scale, peak, edge, vocabulary, WAYS, BLOCK)
    upto, _ = _at(logits, row, scale, peak, edge - 1, vocabulary, WAYS, BLOCK)
    each = tl.exp(key_logit(edge << 32) - peak)
    ties = upto - count
    room = tl.minimum(tl.maximum(tl.ceil((mass_limit - above) / each), 1.0), ties.to(tl.float32))
    allowed = tl.minimum(k - count, room.to(tl.int32))
    last = tl.full([], 0xFFFFFFFF, tl.int64)  # the highest kept token id at the cutoff logit
    if allowed < ties:
        first, last = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64) + vocabulary - 1
        while last - first > 1:
            middle = (first + last) // 2
            enough = _ties(logits, row, scale, edge, middle, vocabulary, BLOCK) >= allowed
            first, last = tl.where(enough, first, middle), tl.where(enough, middle, last)
    tl.store(cuts + row, (edge << 32) | (0xFFFFFFFF - last))
    tl.store(totals + row, above + allowed.to(tl.float32) * each)


@triton.jit
def _at(logits, row, scale, peak, threshold, vocabulary, WAYS: tl.constexpr, BLOCK: tl.constexpr):
    count, mass = _above(
        logits, row, scale, peak, tl.zeros([WAYS], tl.int64) + threshold, vocabulary, WAYS, BLOCK
    )  # fmt: skip
    return tl.max(count, axis=0), tl.max(mass, axis=0)


@triton.jit
def _ties(logits, row, scale, edge, upto, vocabulary, BLOCK: tl.constexpr):
    """The number of tokens at the cutoff logit with ids up to this one."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")) * scale
        count += ((ordered(x).to(tl.int64) == edge) & (token <= upto) & (token < vocabulary)).to(tl.int32)
    return tl.sum(count, axis=0)


class Truncation:
    """Buffers for the cutoffs of up to B rows, shared by a graph's launches.

    cuts    (B,) int64, the packed key of the last kept token
    peaks   (B,) the row's largest logit, after the temperature
    totals  (B,) the sum of exp(logit - peak) over the kept tokens
    best    (B, BEST) int64, packed keys in descending order; the first `counts` of them are all kept tokens
    counts  (B,) int32; 0: more tokens are kept than `best` has
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.chunks = -(-vocabulary // CHUNK)
        self.vocabulary = vocabulary
        self.top_k = torch.full((rows,), vocabulary, dtype=torch.int32, device=device)
        self.top_p, self.min_p = torch.ones(rows, device=device), torch.zeros(rows, device=device)
        self.cuts = torch.full((rows,), EVERYTHING, dtype=torch.int64, device=device)
        self.peaks, self.totals = torch.zeros(rows, device=device), torch.ones(rows, device=device)
        self.best = torch.empty(rows, BEST, dtype=torch.int64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._highest, self._sums = (torch.empty(rows, self.chunks, device=device) for _ in range(2))

    def load(self, rows: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
        """Set the options of these rows; the others keep all tokens."""
        for mine, theirs, off in ((self.top_k, top_k, self.vocabulary), (self.top_p, top_p, 1), (self.min_p, min_p, 0)):
            mine.fill_(off).index_copy_(0, rows, theirs.to(mine.dtype))

    def find(self, logits: Tensor, inverse: Tensor) -> None:
        """Compute the cutoffs. logits (B, V) float32, inverse temperatures (B,)."""
        rows, vocabulary = logits.shape
        _chunk_peaks[(rows, triton.cdiv(self.chunks, 64))](
            logits, inverse, self._highest, self._sums, vocabulary, self.chunks, CHUNK=CHUNK, BLOCK=64, num_warps=4
        )
        _cut_by_best[(rows,)](
            logits, inverse, self.top_k, self.top_p, self.min_p, self._highest, self._sums, self.best, self.counts,
            self.cuts, self.peaks, self.totals, vocabulary, self.chunks, CHUNK=CHUNK, BEST=BEST,
            CHUNKS=triton.next_power_of_2(self.chunks), EVERYTHING=EVERYTHING, num_warps=4,
        )  # fmt: skip
        _cut_by_mass[(rows,)](
            logits, inverse, self.top_k, self.top_p, self.min_p, self.cuts, self.peaks, self.totals, vocabulary,
            WAYS=16, BLOCK=min(1024, triton.next_power_of_2(vocabulary)), num_warps=8,
        )  # fmt: skip
