"""Paths, seeds and texts derived from the parent node equal those computed from the full path."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from plaudit.config.search import load_search
from plaudit.core import Engine
from plaudit.core.text import INCOMPLETE
from plaudit.models import load_tokenizer
from plaudit.models.text import decodes_apart
from plaudit.search.backends.policy import CorePolicy
from plaudit.search.backends.scored import Path, Scored
from plaudit.search.backends.scoring import LocalScorer, open_scorer
from plaudit.search.backends.step_text import StepText
from plaudit.search.runner import Outcome
from plaudit.search.search import Search
from plaudit.search.tree.trail import Trails
from plaudit.search.tree.tree import Tree
from tests.models.builders import byte_tokenizer
from tests.reward.tiny import sentence_piece
from tests.rotation import mostly_slow


def path_seed(seed: int, question: int, path: Sequence[int]) -> int:
    key = f"{seed} {question} {' '.join(map(str, path))}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def test_trail_equals_the_path_of_its_node() -> None:
    rng, tree = random.Random(1), Tree("1+2=", (7, 8, 9))
    for _ in range(60):
        firsts = [node for node in tree.nodes if node.twin == node.id]
        tokens = tuple(rng.choices(range(30), k=rng.randrange(1, 5)))
        tree.add(rng.choice(firsts).id, tokens, "".join(map(chr, tokens)), "open", 0)
    trails = Trails(tree, 5, 3)
    for _ in range(300):
        node = rng.choice(tree.nodes)
        assert trails.ids([node.id, 0]) == [tree.path_ids(node.id), tree.prompt_ids]
        trail = trails.of(node.id)
        assert (trail.ids, trail.text) == (tree.path_ids(node.id), tree.response(node.id))
        response_ids = trail.ids[len(tree.prompt_ids) :]
        for sampled in (0, 4):
            suffix = (sampled,) if sampled else ()
            assert trail.seed(sampled) == path_seed(5, 3, (*response_ids, len(trail.text), *suffix))
        trails.forget(rng.choices(range(len(tree.nodes)), k=5))


@pytest.mark.parametrize("kind", ["sums", "bytes", "sentence pieces"])
def test_step_text_is_what_the_step_adds_to_the_full_text(kind: str) -> None:
    makers: dict[str, Any] = {"sums": lambda: load_tokenizer("sums-policy"), "bytes": byte_tokenizer}
    tokenizer: Any = makers.get(kind, sentence_piece)()
    assert decodes_apart(tokenizer) == (kind != "sentence pieces")
    text_of, rng, half_count = StepText(tokenizer), random.Random(kind), 0
    letters = tokenizer.encode("1+2=3; ß€ab ", add_special_tokens=False)
    for _ in range(200):
        ids: list[int] = []
        text = ""
        for _ in range(5):
            candidates = rng.choice(
                (letters, range(len(tokenizer)))
            )  # any token: also parts of characters, and control tokens
            tokens = tuple(rng.choices(candidates, k=rng.randrange(1, 4)))
            full = tokenizer.decode([*ids, *tokens], skip_special_tokens=True)
            added = full[len(text) :] if full.startswith(text) else tokenizer.decode(list(tokens))
            assert text_of(ids, text, tokens) == added
            ids += tokens
            text += added
            half_count += INCOMPLETE in text
    assert (half_count > 0) == (kind != "sums")


def test_unknown_decoder_decodes_the_full_path() -> None:
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "##b": 1, "?": 2}, unk_token="?"))
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert not decodes_apart(tokenizer)
    assert StepText(tokenizer)([0], "a", (1, 0)) == "b a"
    backend.decoder = decoders.Fuse()
    assert decodes_apart(PreTrainedTokenizerFast(tokenizer_object=backend))
    tidy = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert not decodes_apart(tidy), "what is tidied up behind a beginning may be other text"


class Anew:
    """A scorer that assembles every path from scratch."""

    whole = False

    def __init__(self, inner: LocalScorer) -> None:
        self.inner = inner

    @property
    def computed(self) -> int:
        return self.inner.computed

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        return self.inner.score([Path(path.prompt, path.steps) for path in paths], hidden=hidden)

    def release(self, places: Any) -> None:
        self.inner.release(places)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("method", mostly_slow(["rebase", "best-first", "mcts", "ets"], 2))
def test_search_with_paths_assembled_from_scratch_is_identical(method: str) -> None:
    settings = load_search(None, {"search.method": method, "search.width": 8, "data.limit": 3})
    engine, scorer = Engine.load("sums-policy", device="cpu"), open_scorer(settings.prm, 1)
    assert isinstance(scorer, LocalScorer)
    results = []
    for path_scorer in (scorer, Anew(scorer)):
        policy = CorePolicy(engine, settings.steps)
        search = Search(settings, policy=policy, scorer=path_scorer, tokenizer=engine.tokenizer)
        results.append([summary_of(outcome) for outcome in search.run(search.questions())])
        scorer.engine.new_version()
        engine.new_version()
    assert results[0] == results[1]


def summary_of(outcome: Outcome) -> list[Any]:
    costs = outcome.driver.costs
    nodes = [
        (n.parent, n.tokens, n.text, n.state, n.score, n.value, n.logprob, n.twin, n.error) for n in outcome.tree.nodes
    ]
    return [outcome.question.index, outcome.answers, outcome.stopped, costs.kv, costs.prm_tokens, *nodes]
