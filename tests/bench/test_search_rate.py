"""The policy of benchmarks/search_rate_gpu.py generates steps of the requested length."""

import sys
from pathlib import Path
from statistics import fmean

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from search_rate_gpu import SPECIAL, TINY, let_step, new_tokenizer

from plaudit.core import Engine, SamplingParams
from plaudit.models import new_llama


@pytest.mark.parametrize("length", [10, 40])
def test_steps_have_the_requested_length(length: int) -> None:
    shape = {**TINY, "vocab_size": 512, "seed": 1, "tie_embeddings": False, "eos_token_id": 2}
    module, stop = new_llama("policy", **shape), len(SPECIAL)  # type: ignore[arg-type]
    let_step(module, length)
    engine = Engine(module, new_tokenizer(512), kv_bytes=2**24)
    params = SamplingParams(n=32, seed=1, max_tokens=80, stop_token_ids=(stop,))
    samples = engine.generate([[1, 7, stop]], params)
    assert all(sample.token_ids[-1] == stop for sample in samples)
    assert len({sample.token_ids for sample in samples}) == 32
    lengths = [len(sample.token_ids) for sample in samples]
    assert 0.9 * length <= fmean(lengths) <= 1.15 * length
    assert 0.5 * length <= min(lengths) < max(lengths) <= 1.6 * length
