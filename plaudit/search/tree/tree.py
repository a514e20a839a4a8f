"""The tree of one question: generated steps, their scores, states and costs.

A node is one step. Identical siblings are all kept, and all but the first are twins of it: they share its KV cache, its
score and, if they are expanded, its children.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

State = Literal["open", "expanded", "pruned", "finished", "cut", "failed"]
ROOT = 0


@dataclass(slots=True)
class Node:
    """state    open: may be expanded; expanded; pruned: the rule gave it no children; finished: has an answer;
             cut: reached the limit of tokens or levels before its answer; failed: `error` has the reason
    tokens   the step's token ids; if a server returns none, one -1 for each of them
    score    of this step; None until it is scored
    value    of the path to here, used by rules
    twin     the first sibling with the same tokens; itself if it is the first
    """

    id: int
    parent: int
    depth: int
    tokens: tuple[int, ...]
    text: str
    state: State
    twin: int
    round: int
    score: float | None = None
    value: float = 0.0
    cluster: int | None = None
    logprob: float | None = None
    error: str | None = None


class Tree:
    def __init__(self, prompt: str, prompt_ids: Sequence[int]) -> None:
        self.prompt = prompt
        self.prompt_ids = tuple(prompt_ids)
        self.nodes = [Node(ROOT, -1, 0, self.prompt_ids, "", "open", ROOT, 0, score=1.0, value=1.0)]
        self._firsts: dict[tuple[int, tuple[int, ...], str], int] = {}
        self._branches: list[tuple[int, ...]] = [()]
        self._drawn = [0]
        # children that were requested together, and their number of tokens
        self._distinct: dict[int, tuple[set[int], int]] = {}

    def add(self, parent: int, tokens: Sequence[int], text: str, state: State, round: int) -> Node:
        above = self.nodes[parent]
        if above.twin != parent:
            raise ValueError(f"node {parent} is a twin of {above.twin}: children belong to that one")
        id = len(self.nodes)
        twin = self._firsts.setdefault((parent, tuple(tokens), text), id)
        node = Node(id, parent, above.depth + 1, tuple(tokens), text, state, twin, round)
        self.nodes.append(node)
        self._branches.append((*self._branches[parent], parent))
        self._drawn.append(0)
        self._drawn[parent] += 1
        return node

    def drawn(self, id: int) -> int:
        """The number of children sampled for it so far."""
        return self._drawn[id]

    def branches(self, id: int) -> tuple[int, ...]:
        """The proper ancestors of a node, the root first."""
        return self._branches[id]

    def steps(self, id: int) -> list[Node]:
        """The nodes from the first step to this one."""
        nodes = self.nodes
        return [nodes[i] for i in (*self._branches[id], id)[1:]]

    def path_ids(self, id: int) -> tuple[int, ...]:
        """Prompt and steps as token ids."""
        return tuple(chain(self.prompt_ids, *(step.tokens for step in self.steps(id))))

    def response(self, id: int) -> str:
        return "".join(step.text for step in self.steps(id))

    def scores(self, id: int) -> list[float]:
        return [step.score for step in self.steps(id) if step.score is not None]

    def length(self, id: int) -> int:
        """Tokens of the steps to here, without the prompt's."""
        return sum(len(step.tokens) for step in self.steps(id))

    def having(self, state: State) -> Iterator[Node]:
        return (node for node in self.nodes if node.state == state)

    def kv_tokens(self, leaves: Iterable[int]) -> int:
        """Tokens in the KV cache of the paths to these nodes: every distinct prefix once, including the prompt."""
        nodes, seen, siblings = self.nodes, set[int](), dict[int, list[int]]()
        for leaf in leaves:
            id = nodes[leaf].twin
            while id >= 0 and id not in seen:
                seen.add(id)
                above = nodes[id].parent
                siblings.setdefault(above, []).append(id)
                id = above
        total = 0
        for parent, needed in siblings.items():
            if len(needed) == 1:
                total += len(nodes[needed[0]].tokens)
                continue
            # For most parents the same children are requested level after level.
            cached = self._distinct.get(parent)
            if cached is None or cached[0] != set(needed):
                cached = self._distinct[parent] = (set(needed), distinct_tokens(nodes[id].tokens for id in needed))
            total += cached[1]
        return total


def distinct_tokens(sequences: Iterable[Sequence[int]]) -> int:
    """The size of the trie of these sequences."""
    total = 0
    before: tuple[int, ...] = ()
    for sequence in sorted(map(tuple, sequences)):
        shared = 0
        for a, b in zip(before, sequence, strict=False):
            if a != b or a < 0:  # -1 stands for an unknown token
                break
            shared += 1
        total += len(sequence) - shared
        before = sequence
    return total
