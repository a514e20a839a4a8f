"""Searches many questions together: one batch of steps and one of scores per round, over all of them.

A question takes part in a round depending on the result of its own last round; when one is finished the next one takes
its slot. So questions are at different depths, and batches stay full until the last ones.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from plaudit.config.search import SearchRecipe
from plaudit.errors import PlauditError
from plaudit.search.backends import cluster
from plaudit.search.backends.embedding import Embedder
from plaudit.search.backends.policy import Policy, Step, StepRequest
from plaudit.search.backends.scored import Path, Scored, Scorer
from plaudit.search.drivers.driver import Driver, Expand
from plaudit.search.drivers.lookahead import look_ahead
from plaudit.search.questions.answers import Answer, as_odds, winner
from plaudit.search.questions.questions import Question
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.tree.trail import Trails
from plaudit.search.tree.tree import Node, Tree

if TYPE_CHECKING:
    from plaudit.core.kv.prefix import Place


@dataclass
class Outcome:
    """right     whether the answer equals the truth, if known
    stopped   why the search ended: done, lead, budget: ..., no answer: ..., failed: ..., interrupted"""

    question: Question
    tree: Tree
    driver: Driver
    answers: list[Answer]
    answer: Answer | None
    right: bool | None
    stopped: str


@dataclass(eq=False)
class _Open:
    """The state of a question that is being searched.

    trails          the paths to the nodes that may be continued
    scored_tokens   the nodes that may be continued, with the tokens the PRM read of each
    written, judged  the handles of their ends in the policy's and in the PRM's engine
    spare           handles to be released
    hidden          the PRM's hidden state at the end of each new node, until it is clustered
    """

    question: Question
    driver: Driver
    trails: Trails
    scored_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    written: dict[int, Place] = field(default_factory=dict)
    judged: dict[int, Place] = field(default_factory=dict)
    spare: list[Place] = field(default_factory=list)
    hidden: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def tree(self) -> Tree:
        return self.driver.tree


class Runner:
    def __init__(
        self, recipe: SearchRecipe, policy: Policy, scorer: Scorer, reading: AnswerReading,
        new_driver: Callable[[Question, Tree], Driver], embedder: Embedder | None = None,
        stopped: threading.Event | None = None, on_round: Callable[[Driver], None] | None = None,
        outcome: Scorer | None = None,
    ) -> None:  # fmt: skip
        """`stopped`: when set, work in progress is abandoned. `on_round` is called after every question's rounds.
        `outcome` scores finished responses for the vote, instead of `scorer`."""
        self.recipe = recipe
        self.policy = policy
        self.scorer = scorer
        self.outcome = outcome
        self.embedder = embedder
        self.new_driver = new_driver
        self.reading = reading
        self.phases = {"generate": 0.0, "score": 0.0, "cluster": 0.0, "choose": 0.0}
        self.most = max(1, recipe.concurrent // recipe.groups)
        self._stopped = stopped or threading.Event()
        self._on_round = on_round
        self._open: list[_Open] = []

    def run(self, questions: Iterable[Question]) -> Iterator[Outcome]:
        """Outcomes as they finish. If a server is lost, open questions return their partial results, then the error is
        raised; closing the iterator omits them."""
        waiting = iter(questions)
        more = True
        while (more or self._open) and not self._stopped.is_set():
            while more and len(self._open) < self.most:
                question = next(waiting, None)
                more = question is not None
                if question is not None:
                    tree = Tree(question.text, question.prompt_ids)
                    trails = Trails(tree, self.recipe.seed, question.index)
                    self._open.append(_Open(question, self.new_driver(question, tree), trails))
            over, going = self._choose()
            yield from [self._outcome(searched, searched.driver.stopped or "done") for searched in over]
            try:
                self._expand(going)
            except PlauditError as error:
                for searched in self._open:
                    yield self._outcome(searched, f"failed: {error}")
                self._open = []
                raise

    def _choose(self) -> tuple[list[_Open], list[tuple[_Open, list[Expand]]]]:
        """The finished questions, and the others with their expansions."""
        began = time.perf_counter()
        chosen = [(searched, searched.driver.expansions()) for searched in self._open]
        self.phases["choose"] += time.perf_counter() - began
        for searched, expansions in chosen:
            self._release(searched, expansions)
        going = [(searched, expansions) for searched, expansions in chosen if expansions]
        self._open = [searched for searched, _ in going]
        return [searched for searched, expansions in chosen if not expansions], going

    def _expand(self, going: Sequence[tuple[_Open, list[Expand]]]) -> None:
        if not going:
            return
        requests = [self._step_request(searched, e) for searched, expansions in going for e in expansions]
        began = time.perf_counter()
        steps = iter(self.policy.extend(requests))
        self.phases["generate"] += time.perf_counter() - began
        made = [(s, [node for e in expansions for node in self._add(s, e, next(steps))]) for s, expansions in going]
        self._score(made)
        if self.recipe.search.lookahead:
            self._look_ahead(made)
        self._cluster(made)
        for searched, nodes in made:
            searched.driver.take(nodes)
            if self._on_round is not None:
                self._on_round(searched.driver)

    def _step_request(self, searched: _Open, expand: Expand, greedy: bool = False) -> StepRequest:
        tree, trail = searched.tree, searched.trails.of(expand.node)
        response_ids = trail.ids[len(tree.prompt_ids) :]
        seed = trail.seed(tree.drawn(expand.node))
        place = searched.written.get(expand.node)
        return StepRequest(tree.prompt_ids, tree.prompt, response_ids, trail.text, expand.count, seed, greedy, place)

    def _add(self, searched: _Open, expand: Expand, steps: Sequence[Step]) -> list[Node]:
        tree, costs, nodes = searched.tree, searched.driver.costs, []
        before = searched.trails.of(expand.node).text
        for step in steps:
            node = tree.add(expand.node, step.tokens, step.text, "open", costs.rounds)
            node.logprob = step.logprob
            costs.calls += 1
            costs.generated += len(step.tokens)
            self._judge(tree, node, step, before)
            if node.twin == node.id:
                searched.scored_tokens[node.id] = ()
            if step.place is not None and node.twin == node.id:
                searched.written[node.id] = step.place
            elif step.place is not None:
                searched.spare.append(step.place)
            nodes.append(node)
        return nodes

    def _judge(self, tree: Tree, node: Node, step: Step, before: str) -> None:
        """Sets the state of a new node, before it is scored."""
        table = self.recipe.steps
        content = step.text.removesuffix(table.stop).strip()
        if step.error is not None:
            node.state, node.error = "failed", step.error
        elif step.ended == "length":
            left = table.max_tokens - tree.length(node.parent)
            limit = f"steps.max_tokens = {table.max_tokens}" if left <= table.max_step_tokens else "max_step_tokens"
            node.state = "cut"
            node.error = f"the step did not end with {table.stop!r} within {len(step.tokens)} tokens ({limit})"
        elif not content and step.ended == "end" and not before.strip():
            node.state, node.error = "failed", "empty response: the policy ended it before the first step"
        elif not content and step.ended != "end" and not self.scorer.whole:
            node.state, node.error = "failed", "empty step: the policy generated only the step's end"
        elif step.ended == "end" or self.reading.final(before + step.text):
            node.state = "finished"
            if self.reading.answer(before + step.text) is None:
                node.error = f"ended without an answer that matches {table.answer!r}"
        elif node.depth >= self.recipe.search.max_depth:
            node.state, node.error = "cut", f"no answer after max_depth = {node.depth} steps"

    def _score(self, made: Sequence[tuple[_Open, list[Node]]]) -> None:
        began, before = time.perf_counter(), self.scorer.computed
        hidden = self.recipe.search.clustered and self.recipe.search.clusters == "hidden"
        firsts = [(s, n) for s, nodes in made for n in nodes if n.twin == n.id]
        wanted = [(s, n) for s, n in firsts if self._has_score(n)]
        scored = self.scorer.score([self._path(s, n) for s, n in wanted], hidden=hidden) if wanted else []
        for (searched, node), result in zip(wanted, scored, strict=True):
            searched.driver.costs.scored += 1
            searched.scored_tokens[node.id] = result.tokens
            if result.place is not None:
                searched.judged[node.id] = result.place
            if result.hidden is not None:
                searched.hidden[node.id] = result.hidden
            _note(searched.driver, node, result)
        for searched, node in firsts:
            if node.state == "finished" and node.score is None:  # it has the score of the steps before it
                node.value = searched.driver.value(node)
        for searched, nodes in made:
            for node in nodes:
                first = searched.tree.nodes[node.twin]
                if node.twin != node.id:
                    node.score, node.value, node.state, node.error = first.score, first.value, first.state, first.error
        # The batch's computed tokens are attributed by each question's number of paths.
        spent = self.scorer.computed - before
        for searched, paths in Counter(searched for searched, _ in wanted).items():
            searched.driver.costs.prm_tokens += round(spent * (paths / len(wanted)))
        self.phases["score"] += time.perf_counter() - began

    def _has_score(self, node: Node) -> bool:
        """Whether a step is scored. A response that ends after a complete step has no further step to score."""
        if self.scorer.whole:
            return node.state == "finished"
        return node.state == "open" or (node.state == "finished" and bool(node.text.strip()))

    def _path(self, searched: _Open, node: Node) -> Path:
        steps = tuple([step.text for step in searched.tree.steps(node.id)])
        read, place = searched.scored_tokens.get(node.parent, ()), searched.judged.get(node.parent)
        return Path(searched.question.prompt, steps, read, place)

    def _look_ahead(self, made: Sequence[tuple[_Open, list[Node]]]) -> None:
        """Scores open leaves after a few greedy steps, which are discarded but count as cost."""
        leaves = [(s, n) for s, nodes in made for n in nodes if n.twin == n.id and n.state == "open"]
        requests = [self._step_request(searched, Expand(node.id, 1), greedy=True) for searched, node in leaves]
        paths = [self._path(searched, node) for searched, node in leaves]
        seen = look_ahead(self.policy, self.scorer, requests, paths, self.recipe.search.lookahead)
        for (searched, node), ahead in zip(leaves, seen, strict=True):
            costs = searched.driver.costs
            costs.calls += ahead.calls
            costs.generated += ahead.tokens
            costs.scored += ahead.value is not None
            self.policy.release(ahead.steps)
            self.scorer.release(ahead.read)
            for twin in searched.tree.nodes:
                if twin.twin == node.id and ahead.value is not None:
                    twin.value = ahead.value

    def _cluster(self, made: Sequence[tuple[_Open, list[Node]]]) -> None:
        if not self.recipe.search.clustered:
            return
        began = time.perf_counter()
        open_nodes = [(s, [n for n in nodes if n.twin == n.id and n.state == "open"]) for s, nodes in made]
        vectors: dict[str, np.ndarray] = {}
        if self.embedder is not None:
            texts = list(dict.fromkeys(n.text for _, nodes in open_nodes for n in nodes))
            vectors = dict(zip(texts, self.embedder.embed(texts), strict=True)) if texts else {}
        each = (time.perf_counter() - began) / max(1, sum(len(nodes) for _, nodes in open_nodes))
        for searched, nodes in open_nodes:
            began = time.perf_counter()
            if nodes and self.recipe.search.clusters == "text":
                labels = cluster.by_key([node.text for node in nodes])
            elif nodes:
                rows = [vectors[n.text] if self.embedder is not None else searched.hidden.pop(n.id) for n in nodes]
                labels = cluster.by_vector(np.stack(rows), self.recipe.search.cluster_distance)
            else:
                labels = []
            for node, number in zip(nodes, labels, strict=True):
                node.cluster = number
            spent = time.perf_counter() - began + each * len(nodes)
            searched.driver.costs.clustering += spent
            self.phases["cluster"] += spent
        for searched, nodes in made:
            for node in nodes:
                node.cluster = searched.tree.nodes[node.twin].cluster

    def _release(self, searched: _Open, expansions: Sequence[Expand]) -> None:
        """Release the KV cache of everything that can no longer be expanded: of all, once the search is over."""
        kept = {e.node for e in expansions} | set(searched.driver.live()) if expansions else set()
        closed = [id for id in searched.scored_tokens if id not in kept]
        if not closed:
            return
        written, judged = searched.written, searched.judged
        self.policy.release([*searched.spare, *(written.pop(id) for id in closed if id in written)])
        self.scorer.release([judged.pop(id) for id in closed if id in judged])
        searched.spare.clear()
        searched.trails.forget(closed)
        for id in closed:
            del searched.scored_tokens[id]

    def _outcome(self, searched: _Open, stopped: str) -> Outcome:
        driver, question = searched.driver, searched.question
        answers = driver.answers()
        if self.outcome is not None:
            answers = self._weighed(searched, answers, self.outcome)
        if self.scorer.whole or self.outcome is not None:
            answers = as_odds(answers)
        if not answers and stopped == "done":
            stopped = f"no answer: {_why_none(driver.tree)}"
        answer = winner(answers, self.recipe.search.vote, self.reading.alike)
        right = question.right(None if answer is None else answer.text, self.reading.alike)
        return Outcome(question, driver.tree, driver, answers, answer, right, stopped)

    def _weighed(self, searched: _Open, answers: Sequence[Answer], outcome: Scorer) -> list[Answer]:
        """Answers with the outcome model's scores; one without a score does not vote."""
        nodes = searched.tree.nodes
        firsts = list(dict.fromkeys(nodes[answer.node].twin for answer in answers))
        began = time.perf_counter()
        scored = outcome.score([self._path(searched, nodes[id]) for id in firsts]) if firsts else []
        self.phases["score"] += time.perf_counter() - began
        for id, result in zip(firsts, scored, strict=True):
            nodes[id].error = result.error
        values = {id: result.value for id, result in zip(firsts, scored, strict=True)}
        pairs = [(answer, values[nodes[answer.node].twin]) for answer in answers]
        return [replace(answer, weight=value) for answer, value in pairs if value is not None]


def _why_none(tree: Tree) -> str:
    """The most common reason why paths have no answer."""
    reasons = Counter(node.error for node in tree.nodes if node.error is not None)
    return reasons.most_common(1)[0][0] if reasons else "no path was finished"


def _note(driver: Driver, node: Node, result: Scored) -> None:
    if result.error is not None or result.value is None:
        node.state, node.error = "failed", result.error or "the PRM returned no score"
        return
    node.score = result.value
    node.value = driver.value(node)
