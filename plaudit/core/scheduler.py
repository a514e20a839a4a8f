"""Who computes how many tokens in the next step, and in which blocks.

Work is admitted by tokens. Sequences that decode go first (a token each), then waiting and half-read prompts in order
of submission, but a prompt stands one step further back for each quarter of a budget that it has: short ones are not
stuck behind long ones, long ones do not starve, and of many requests the first end while the last still wait. When
blocks run out, unused parts of the prefix tree go first, then whole sequences, the last come first; their tokens are
kept and computed again. Decisions depend on the order of submission and on the step count, never on the clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from plaudit.core.device.backend import Copy, copies_into
from plaudit.core.kv.blocks import BlockPool
from plaudit.core.kv.prefix import Chain, Node, PrefixTree
from plaudit.core.sequence import Sequence

PRIORITY_STEPS = 64  # one level of priority is worth this many steps of waiting
WORTH_COPYING = 4  # tokens of a block: to copy fewer, and to mask them, costs more than to compute them
PATIENCE = 16  # a sequence that has found no room for this many steps is no longer passed by


@dataclass
class Chunk:
    sequence: Sequence
    tokens: int


@dataclass
class Plan:
    """decode_steps > 0: every chunk is the one next token of a generating sequence, and there are blocks for that many
    steps. `copies` are by the block they fill; `pinned` are the nodes they come from, held until the step is done."""

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
        self.live: dict[Sequence, None] = {}  # all that have not ended: those that wait and those that run
        self.waiting: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.preemptions = 0
        self.tokens_shared = 0
        self.step = 0
        self.overlaps = False  # while a device computes one step of scoring, the host prepares the next
        self.ahead = 0  # tokens of such a step that is being computed

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        self.live[sequence] = None
        self._wait(sequence)

    def end(self, sequence: Sequence) -> None:
        """It comes no more."""
        self.release(sequence)
        self.live.pop(sequence, None)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Have these alone, all waiting, in whatever state the books are. Tree and pool must be reset with it."""
        for sequence in self.live:  # those too that have been reported and not yet released
            sequence.chain, sequence.computed = Chain(), 0
        self.live = dict.fromkeys(sequences)
        self.waiting, self.running = dict(self.live), {}
        for sequence in self.live:
            sequence.restart()

    def _wait(self, sequence: Sequence) -> None:
        sequence.since = self.step
        self.waiting[sequence] = None

    def plan(self, key: Hashable, alone: bool = False) -> Plan:
        """`alone`: nobody can come while the step runs."""
        self.step += 1
        plan = Plan()
        decoding = sorted((s for s in self.running if s.decoding), key=lambda s: s.order)
        for sequence in decoding[: self.budget]:
            if sequence in self.running and self._grow(sequence, len(sequence.tokens)):
                plan.chunks.append(Chunk(sequence, 1))
        decodes = len(plan.chunks)
        overlaps = self.overlaps and not decodes
        self._read_prompts(key, plan, self._half() if overlaps else self.budget - decodes, whole=overlaps)
        if not plan.chunks and self.running:
            self._force(key, plan)
        elif len(plan.chunks) == decodes and decodes:
            plan.decode_steps = self._window([c.sequence for c in plan.chunks], alone)
        return plan

    def done(self, plan: Plan) -> None:
        """The step was computed: let go of what only the step needed."""
        for node in plan.pinned:
            self._unpin(node)

    def release(self, sequence: Sequence) -> None:
        """Give back a sequence's blocks; those in the tree stay there until somebody needs the room."""
        self.running.pop(sequence, None)
        self.waiting.pop(sequence, None)
        chain, sequence.chain, sequence.computed = sequence.chain, Chain(), 0
        for block in chain.blocks:
            self.pool.release(block)
        self.tree.released(chain.nodes)

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting, tokens kept. It waits from now on: its turn comes by order, not by size. What scoring has
        read of it is read again."""
        self.release(sequence)
        sequence.values.clear()
        self.preemptions += 1
        self._wait(sequence)

    def _read_prompts(self, key: Hashable, plan: Plan, left: int, whole: bool) -> None:
        for sequence in self._queue():
            if left <= 0:
                return
            fresh = sequence in self.waiting
            if whole and sequence.request.read is not None and left < sequence.pending <= self.budget:
                # Not torn: where nothing was computed before, keys lie end to end, and a GPU reads them faster.
                if plan.chunks:
                    continue
                left = sequence.pending
            chunk = self._admit(sequence, left, key, plan) if fresh else self._read_on(sequence, left)
            if chunk is not None:
                plan.chunks.append(chunk)
                left -= chunk.tokens
                self._enter(key, chunk)
            elif self.step - sequence.since > PATIENCE:
                return

    def _half(self) -> int:
        """Tokens of a step where there is nothing but scoring: half of what there is, so that while one half is
        computed the answers of the other go out and new requests come in."""
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

    def _enter(self, key: Hashable, chunk: Chunk) -> None:
        """Enter a chunk in the tree before it is computed: what is planned behind it in this step can share it."""
        sequence = chunk.sequence
        if sequence.cacheable:
            upto = sequence.computed + chunk.tokens
            self.tree.extend((key, sequence.request.params.salt), sequence.chain, sequence.tokens, upto, stored=False)

    def _admit(self, sequence: Sequence, left: int, key: Hashable, plan: Plan) -> Chunk | None:
        """Start a waiting sequence, if its first chunk fits and leaves a block for each of those that run: to throw one
        out soon after costs its whole prompt."""
        if len(self.running) >= self.max_running:
            return None
        reserve = len(self.running)
        copied = self._share(sequence, key, plan, reserve)
        count = min(sequence.pending, left)
        if not self._cover(sequence, sequence.computed + count, reserve):
            room = (len(sequence.chain.blocks) + self.pool.free) * self.tree.block_size - sequence.computed
            count = 0 if self.running else min(count, room)
            if count <= 0 or not self._cover(sequence, sequence.computed + count, 0):
                self._unshare(sequence, plan, copied)
                return None
        self.tokens_shared += sequence.computed
        del self.waiting[sequence]
        self.running[sequence] = None
        return Chunk(sequence, count)

    def _share(self, sequence: Sequence, key: Hashable, plan: Plan, reserve: int) -> bool:
        """Take what the tree has of a sequence's beginning; True if the last block of it is a copy of its own."""
        match = self.tree.match((key, sequence.request.params.salt), sequence.tokens, sequence.shareable)
        for node in match.nodes:
            self.pool.retain(node.block)
        sequence.chain = Chain([n.block for n in match.nodes], list(match.nodes))
        sequence.computed = len(match.nodes) * self.tree.block_size
        if match.partial is None or (not match.nodes and match.partial_tokens < WORTH_COPYING):
            return False
        self.pool.retain(match.partial.block)  # so that making room for the copy does not evict its source
        if self._cover(sequence, sequence.computed + match.partial_tokens, reserve):
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

    def _unshare(self, sequence: Sequence, plan: Plan, copied: bool) -> None:
        if copied:
            del plan.copies[sequence.chain.blocks[-1]]
            self._unpin(plan.pinned.pop())
        since = sequence.since
        self.release(sequence)
        self._wait(sequence)
        sequence.since = since

    def _read_on(self, sequence: Sequence, left: int) -> Chunk | None:
        """Continue a half-read prompt by what the budget and the free blocks allow."""
        count = min(sequence.pending, left)
        if not self._cover(sequence, sequence.computed + count, 0):
            room = (len(sequence.chain.blocks) + self.pool.free) * self.tree.block_size - sequence.computed
            count = min(count, room)
            if count <= 0 or not self._cover(sequence, sequence.computed + count, 0):
                return None
        return Chunk(sequence, count)

    def _force(self, key: Hashable, plan: Plan) -> None:
        """Only half-read prompts run and none finds a block: the first takes what it needs from the last."""
        first = min(self.running, key=lambda s: s.order)
        if self._grow(first, first.computed + 1):
            chunk = self._read_on(first, self.budget)
            if chunk is not None:
                plan.chunks.append(chunk)
                self._enter(key, chunk)

    def _cover(self, sequence: Sequence, tokens: int, reserve: int) -> bool:
        """Give a sequence blocks for this many tokens, if that leaves `reserve` free ones."""
        need = -(-tokens // self.tree.block_size) - len(sequence.chain.blocks)
        if need <= 0:
            return True
        if self.pool.free < need + reserve:
            self.tree.evict(need + reserve - self.pool.free)
            if self.pool.free < need + reserve:
                return False
        for _ in range(need):
            sequence.chain.blocks.append(self.pool.take())
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for this many tokens, if need be from sequences that come later; else it is itself sent to wait."""
        while not self._cover(sequence, tokens, 0):
            last = max(self.running, key=lambda s: s.order)
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def _window(self, sequences: list[Sequence], alone: bool) -> int:
        """How many decode steps are taken before the host looks: many where nobody waits for it, one where there are
        not the blocks for more."""
        longest = max(s.remaining for s in sequences)
        if alone and not self.waiting and all(s.unwatched for s in sequences):
            steps = min(self.window, longest)
            while steps > self.look_every:
                if self._cover_steps(sequences, steps):
                    return steps
                steps //= 2
        steps = min(self.look_every, longest)
        return steps if self._cover_steps(sequences, steps) else 1

    def _cover_steps(self, sequences: list[Sequence], steps: int) -> bool:
        """Give all of them blocks for this many steps, or none of them."""
        ends = [s.computed + min(steps, s.remaining) for s in sequences]
        size = self.tree.block_size
        blocks = [-(-end // size) - len(s.chain.blocks) for s, end in zip(sequences, ends, strict=True)]
        need = sum(max(0, n) for n in blocks)
        if self.pool.free < need:
            self.tree.evict(need - self.pool.free)
        if self.pool.free < need:
            return False
        for sequence, end in zip(sequences, ends, strict=True):
            self._cover(sequence, end, 0)
        return True

    def check(self) -> None:
        """Every sequence has the blocks its tokens need, and its nodes are those of its first blocks."""
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
                raise RuntimeError("a waiting sequence holds blocks")
