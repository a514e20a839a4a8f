"""Plans a step: how many tokens of which sequences are computed, and their KV blocks.

A step has a token budget. Decoding sequences go first (one token each), then waiting and partly computed prompts in
order of submission, but each quarter of a budget in a prompt's length counts as one step of waiting less: short prompts
are not blocked by long ones, long ones do not starve, and of many requests the first finish while the last still wait.
When blocks run out, unused nodes of the prefix tree are evicted first, then sequences are preempted, last submitted
first; they keep their tokens, whose KV is recomputed. Decisions depend on the order of submission and the step count,
never on the clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from plaudit.core.device.backend import Copy, copies_into
from plaudit.core.kv.blocks import BlockPool
from plaudit.core.kv.prefix import Chain, Node, PrefixTree
from plaudit.core.sequence import Sequence

PRIORITY_STEPS = 64  # one level of priority is worth this many steps of waiting
WORTH_COPYING = 4  # tokens of a block: copying and masking fewer costs more than computing them
PATIENCE = 16  # after waiting this many steps for blocks, a sequence is no longer overtaken by later ones


@dataclass
class Chunk:
    sequence: Sequence
    tokens: int


@dataclass
class Plan:
    """The work of one step. `decode_steps` > 0: every chunk is the next token of a decoding sequence, and blocks for
    that many steps are allocated. `copies`: by target block. `pinned`: their source nodes, retained during the step."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    pinned: list[Node] = field(default_factory=list)
    decode_steps: int = 0


class Scheduler:
    def __init__(
        self, pool: BlockPool, tree: PrefixTree, *, budget: int, max_running: int, look_every: int, window: int
    ) -> None:  # fmt: skip
        self.pool = pool
        self.tree = tree
        self.budget = budget
        self.max_running = max_running
        self.look_every = look_every
        self.window = window
        self.live: dict[Sequence, None] = {}  # all unfinished sequences, waiting and running
        self.waiting: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.preemptions = 0
        self.tokens_shared = 0
        self.step = 0
        self.overlaps = False  # the host prepares a scoring step while the device computes the one before
        self.ahead = 0  # tokens of the scoring step that the device is computing

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        self.live[sequence] = None
        self._wait(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a finished sequence and release its blocks."""
        self.release(sequence)
        self.live.pop(sequence, None)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Queue exactly these sequences, whatever the current state. The tree and the pool must be reset with it."""
        for sequence in self.live:  # also those that are reported but not released yet
            sequence.chain, sequence.computed = Chain(), 0
        self.live = dict.fromkeys(sequences)
        self.waiting, self.running = dict(self.live), {}
        for sequence in self.live:
            sequence.restart()

    def _wait(self, sequence: Sequence) -> None:
        sequence.since = self.step
        self.waiting[sequence] = None

    def plan(self, key: Hashable, alone: bool = False) -> Plan:
        """The next step. alone: no request can arrive while it runs."""
        self.step += 1
        plan = Plan()
        decoding = sorted((s for s in self.running if s.decoding), key=lambda s: s.order)
        for sequence in decoding[: self.budget]:
            if sequence in self.running and self._allocate_or_preempt(sequence, len(sequence.tokens)):
                plan.chunks.append(Chunk(sequence, 1))
        decodes = len(plan.chunks)
        overlaps = self.overlaps and not decodes
        self._plan_prompts(key, plan, self._scoring_budget() if overlaps else self.budget - decodes, whole=overlaps)
        if not plan.chunks and self.running:
            self._force_progress(key, plan)
        elif len(plan.chunks) == decodes and decodes:
            plan.decode_steps = self._window([c.sequence for c in plan.chunks], alone)
        return plan

    def done(self, plan: Plan) -> None:
        """After the step: release the nodes that only its copies needed."""
        for node in plan.pinned:
            self._unpin(node)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's blocks; blocks in the tree stay there until they are evicted."""
        self.running.pop(sequence, None)
        self.waiting.pop(sequence, None)
        chain, sequence.chain, sequence.computed = sequence.chain, Chain(), 0
        for block in chain.blocks:
            self.pool.release(block)
        self.tree.released(chain.nodes)

    def preempt(self, sequence: Sequence) -> None:
        """Return a sequence to the queue with its tokens. Scores already read from it are read again."""
        self.release(sequence)
        sequence.values.clear()
        self.preemptions += 1
        self._wait(sequence)

    def _plan_prompts(self, key: Hashable, plan: Plan, left: int, whole: bool) -> None:
        for sequence in self._queue():
            if left <= 0:
                return
            fresh = sequence in self.waiting
            if whole and sequence.request.read is not None and left < sequence.pending <= self.budget:
                # Not split: keys of a prompt computed from its start are contiguous, which a GPU reads faster.
                if plan.chunks:
                    continue
                left = sequence.pending
            chunk = self._admit(sequence, left, key, plan) if fresh else self._continue_prompt(sequence, left)
            if chunk is not None:
                plan.chunks.append(chunk)
                left -= chunk.tokens
                self._insert(key, chunk)
            elif self.step - sequence.since > PATIENCE:
                return

    def _scoring_budget(self) -> int:
        """The token budget for scoring only: half of the queued tokens, so that the device computes one half while
        results of the other are sent and new requests arrive."""
        if not all(s.request.read is not None for s in self.live):
            return self.budget
        there = self.ahead + sum(s.pending for s in self.live)
        return min(self.budget, max(self.budget // 8, there // 2 + 1))

    def _queue(self) -> list[Sequence]:
        def rank(s: Sequence) -> tuple[int, tuple[int, int, int]]:
            waited = self.step - s.since + PRIORITY_STEPS * s.request.params.priority
            return s.pending // (self.budget // 4 + 1) - waited, s.order

        waiting = (s for s in self.waiting if s.ready)
        return sorted([*(s for s in self.running if not s.decoding), *waiting], key=rank)

    def _insert(self, key: Hashable, chunk: Chunk) -> None:
        """Insert a chunk in the tree before it is computed: chunks planned after it in this step can share it."""
        sequence = chunk.sequence
        if sequence.cacheable:
            upto = sequence.computed + chunk.tokens
            self.tree.extend((key, sequence.request.params.salt), sequence.chain, sequence.tokens, upto, stored=False)

    def _admit(self, sequence: Sequence, left: int, key: Hashable, plan: Plan) -> Chunk | None:
        """Start a waiting sequence if its first chunk fits and leaves a free block per running sequence, so that none
        is preempted soon, which would cost a whole prompt."""
        if len(self.running) >= self.max_running:
            return None
        reserve = len(self.running)
        copied = self._share_prefix(sequence, key, plan, reserve)
        count = min(sequence.pending, left)
        if not self._allocate(sequence, sequence.computed + count, reserve):
            room = (len(sequence.chain.blocks) + self.pool.free) * self.tree.block_size - sequence.computed
            count = 0 if self.running else min(count, room)
            if count <= 0 or not self._allocate(sequence, sequence.computed + count, 0):
                self._undo_share(sequence, plan, copied)
                return None
        self.tokens_shared += sequence.computed
        del self.waiting[sequence]
        self.running[sequence] = None
        return Chunk(sequence, count)

    def _share_prefix(self, sequence: Sequence, key: Hashable, plan: Plan, reserve: int) -> bool:
        """Share the blocks of the longest prefix in the tree; True if the last one is a private copy of a block."""
        match = self.tree.match((key, sequence.request.params.salt), sequence.tokens, sequence.shareable)
        for node in match.nodes:
            self.pool.retain(node.block)
        sequence.chain = Chain([n.block for n in match.nodes], list(match.nodes))
        sequence.computed = len(match.nodes) * self.tree.block_size
        if match.partial is None or (not match.nodes and match.partial_tokens < WORTH_COPYING):
            return False
        self.pool.retain(match.partial.block)  # allocating the copy must not evict its source
        if self._allocate(sequence, sequence.computed + match.partial_tokens, reserve):
            plan.pinned.append(match.partial)
            target = sequence.chain.blocks[-1]
            plan.copies[target] = copies_into(target, match.partial.block, match.partial_tokens, plan.copies)
            sequence.computed += match.partial_tokens
            return True
        self._unpin(match.partial)
        return False

    def _unpin(self, node: Node) -> None:
        self.pool.release(node.block)
        self.tree.released([node])

    def _undo_share(self, sequence: Sequence, plan: Plan, copied: bool) -> None:
        if copied:
            del plan.copies[sequence.chain.blocks[-1]]
            self._unpin(plan.pinned.pop())
        since = sequence.since
        self.release(sequence)
        self._wait(sequence)
        sequence.since = since

    def _continue_prompt(self, sequence: Sequence, left: int) -> Chunk | None:
        """The next chunk of a partly computed prompt, as long as the budget and the free blocks allow."""
        count = min(sequence.pending, left)
        if not self._allocate(sequence, sequence.computed + count, 0):
            room = (len(sequence.chain.blocks) + self.pool.free) * self.tree.block_size - sequence.computed
            count = min(count, room)
            if count <= 0 or not self._allocate(sequence, sequence.computed + count, 0):
                return None
        return Chunk(sequence, count)

    def _force_progress(self, key: Hashable, plan: Plan) -> None:
        """Only partly computed prompts run and none gets a block: the first preempts the last ones."""
        first = min(self.running, key=lambda s: s.order)
        if self._allocate_or_preempt(first, first.computed + 1):
            chunk = self._continue_prompt(first, self.budget)
            if chunk is not None:
                plan.chunks.append(chunk)
                self._insert(key, chunk)

    def _allocate(self, sequence: Sequence, tokens: int, reserve: int) -> bool:
        """Allocate a sequence's blocks for this many tokens if that leaves `reserve` free ones; False if not."""
        need = -(-tokens // self.tree.block_size) - len(sequence.chain.blocks)
        if need <= 0:
            return True
        if self.pool.free < need + reserve:
            self.tree.evict(need + reserve - self.pool.free)
            if self.pool.free < need + reserve:
                return False
        for _ in range(need):
            sequence.chain.blocks.append(self.pool.allocate())
        return True

    def _allocate_or_preempt(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate blocks for this many tokens, preempting later sequences if needed; False if it preempted itself."""
        while not self._allocate(sequence, tokens, 0):
            last = max(self.running, key=lambda s: s.order)
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def _window(self, sequences: list[Sequence], alone: bool) -> int:
        """Decode steps without the host: many if nothing waits for it, one if there are no blocks for more."""
        longest = max(s.remaining for s in sequences)
        if alone and not self.waiting and all(s.unobserved for s in sequences):
            steps = min(self.window, longest)
            while steps > self.look_every:
                if self._allocate_steps(sequences, steps):
                    return steps
                steps //= 2
        steps = min(self.look_every, longest)
        return steps if self._allocate_steps(sequences, steps) else 1

    def _allocate_steps(self, sequences: list[Sequence], steps: int) -> bool:
        """Allocate blocks for this many steps to all of them, or to none; False if to none."""
        ends = [s.computed + min(steps, s.remaining) for s in sequences]
        size = self.tree.block_size
        blocks = [-(-end // size) - len(s.chain.blocks) for s, end in zip(sequences, ends, strict=True)]
        need = sum(max(0, n) for n in blocks)
        if self.pool.free < need:
            self.tree.evict(need - self.pool.free)
        if self.pool.free < need:
            return False
        for sequence, end in zip(sequences, ends, strict=True):
            self._allocate(sequence, end, 0)
        return True

    def check(self) -> None:
        """Raise unless every sequence has the blocks its tokens need, and its nodes are those of its first blocks."""
        if self.live.keys() != self.waiting.keys() ^ self.running.keys():
            raise RuntimeError(f"{len(self.live)} sequences live, {len(self.waiting)} wait and {len(self.running)} run")
        for sequence in self.running:
            chain = sequence.chain
            if len(chain.blocks) * self.tree.block_size < sequence.computed:
                raise RuntimeError(f"{sequence.computed} tokens in {len(chain.blocks)} blocks")
            if [n.block for n in chain.nodes] != chain.blocks[: len(chain.nodes)]:
                raise RuntimeError("a sequence's blocks are not those of its nodes")
        for sequence in self.waiting:
            if sequence.chain.blocks or sequence.computed:
                raise RuntimeError("a waiting sequence has blocks")
