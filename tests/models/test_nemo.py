"""Reward models of NeMo-Aligner. `megatron.py` builds the archives and computes the results of megatron-core."""

from __future__ import annotations

import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from plaudit.config.reward import read_reward_toml
from plaudit.errors import ModelError
from plaudit.models import import_nemo, load_tokenizer
from plaudit.records import Item
from plaudit.reward import load_reward
from tests.command import plaudit_here
from tests.serve.process import ServerProcess

from . import megatron
from .builders import byte_tokenizer

ROWS = [[5, 9, 200, 17, 42], [7], list(range(40, 75)), [299, 3]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def served(directory: Path) -> list[float]:
    return [score.value for score in load_reward(directory).score([Item(tokens=row) for row in ROWS])]


def rounded(tensors: megatron.Tensors, layout: str) -> megatron.Tensors:
    """The zarr archives in these tests are in bfloat16, except for the head."""
    if layout != "zarr":
        return tensors
    return {name: t if "rm_head" in name else t.bfloat16().float() for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "torch_dist"), ("llama", "zarr"), ("llama", "ckpt"), ("gpt2", "torch_dist"), ("gpt2", "zarr")],
)
def test_imported_archive_gives_the_scores_of_its_model(
    family: str, layout: str, tokenizer: str, tmp_path: Path
) -> None:
    cfg = {**megatron.CONFIGS[family], "reward_standardization": {"enable": True, "mean": 0.3, "std": 1.7}}
    tensors = megatron.random_tensors(cfg)
    file = megatron.write_archive(tmp_path / "rm.nemo", cfg, tensors, layout)
    out = import_nemo(file, tmp_path / "out", tokenizer=tokenizer)
    expected = (megatron.rewards(cfg, rounded(tensors, layout), ROWS)[:, 0] - 0.3) / 1.7
    assert served(out) == pytest.approx(expected.tolist(), abs=1e-6)
    module = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float64)
    with torch.no_grad():
        plain = torch.cat([module(torch.tensor([row]), use_cache=False).logits for row in ROWS])
    bias = tensors["model.rm_head.bias"]
    torch.testing.assert_close((plain[:, 0] + bias - 0.3) / 1.7, expected, atol=1e-6, rtol=0)
    assert not list(tmp_path.glob(".plaudit-nemo-*"))


def test_several_attributes_and_mean_pooling(tokenizer: str, tmp_path: Path) -> None:
    weights = [0.5, -1.0, 2.0]
    cfg = {**megatron.CONFIGS["llama"], "use_avg_pool": True, "data": {"append_eod": True},
           "regression": {"num_attributes": 3, "merge_attributes": True, "attribute_weights": weights}}  # fmt: skip
    tensors = megatron.random_tensors(cfg, labels=3)
    file = megatron.write_archive(tmp_path / "rm.nemo", cfg, tensors, "ckpt")
    assert plaudit_here("import", str(file), str(tmp_path / "out"), "--tokenizer", tokenizer).returncode == 0
    attributes = megatron.rewards(cfg, tensors, ROWS)
    assert read_reward_toml(tmp_path / "out" / "reward.toml")["end"] is True
    scores = load_reward(tmp_path / "out").score([Item(tokens=row) for row in ROWS])
    assert [s.value for s in scores] == pytest.approx((attributes @ torch.tensor(weights).double()).tolist(), abs=1e-6)
    assert [list(s.attributes.values()) for s in scores] == [
        pytest.approx(row, abs=1e-6) for row in attributes.tolist()
    ]


def test_tokenizer_of_the_archive_is_imported(tmp_path: Path) -> None:
    vocabulary = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]
    vocabulary["vocab"]["<|endoftext|>"] = len(vocabulary["vocab"])
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in vocabulary["merges"]) + "\n"
    cfg = {**megatron.CONFIGS["gpt2"], "tokenizer": {
        "library": "megatron", "type": "GPT2BPETokenizer", "model": None,
        "vocab_file": "nemo:ab12_vocab.json", "merge_file": "nemo:ab12_merges.txt",
    }}  # fmt: skip
    files = {"ab12_vocab__json": json.dumps(vocabulary["vocab"]).encode(), "ab12_merges__txt": merges.encode()}
    file = megatron.write_archive(tmp_path / "rm.nemo", cfg, megatron.random_tensors(cfg), "ckpt", **files)
    imported = load_tokenizer(import_nemo(file, tmp_path / "out"))
    assert imported.encode("hello") == byte_tokenizer().encode("hello")
    assert imported.eos_token == "<|endoftext|>"


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["ckpt", "index", "piece"])
def test_code_in_an_archive_is_never_executed(where: str, tokenizer: str, tmp_path: Path) -> None:
    cfg = megatron.CONFIGS["llama"]
    tensors = megatron.random_tensors(cfg)
    evil = Evil(tmp_path / "ran")
    file = megatron.write_archive(tmp_path / "rm.nemo", cfg, tensors, "ckpt" if where == "ckpt" else "torch_dist")
    folder = tmp_path / "rm.folder"
    if where == "ckpt":
        torch.save({**tensors, "model.x": evil}, folder / "model_weights.ckpt")
    elif where == "index":
        (folder / "model_weights" / ".metadata").write_bytes(pickle.dumps({"a": evil}))
    else:
        for pieces in (folder / "model_weights").glob("*.distcp"):
            pieces.write_bytes(pickle.dumps(evil) + pieces.read_bytes()[50:])
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder, arcname="./")
    with pytest.raises(ModelError, match=r"posix\.mkdir|more than tensors|is not") as caught:
        import_nemo(file, tmp_path / "out", tokenizer=tokenizer)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_moe_experts": 8}, "num_moe_experts: 8, for which there is no conversion"),
        ({"activation": "geglu"}, "the archive has .* activation geglu, .* converted are the shapes of Llama"),
        ({"output_sequence": True}, "a critic with a value for every token"),
        ({"num_layers": 3}, "do not fit its model_config.yaml"),
        ({"hidden_size": "${.missing}"}, "hidden_size: None, expected a number"),
        ({"regression": {"num_attributes": 2}}, r"rm_head.weight with 2 rows, the archive \[1, 16\]"),
        (
            {"tokenizer": {"library": "huggingface", "type": "a/b"}},
            "not contain its files; .*--tokenizer DIRECTORY",
        ),
    ],
)
def test_unsupported_archives_are_rejected(
    change: dict[str, Any], message: str, tokenizer: str, tmp_path: Path
) -> None:
    cfg = megatron.CONFIGS["llama"]
    file = megatron.write_archive(tmp_path / "rm.nemo", {**cfg, **change}, megatron.random_tensors(cfg), "ckpt")
    with pytest.raises(ModelError, match=message) as caught:
        import_nemo(file, tmp_path / "out", tokenizer=None if "tokenizer" in change else tokenizer)
    assert "\n" not in str(caught.value)


def test_damaged_archives_are_rejected(tokenizer: str, tmp_path: Path) -> None:
    cfg = megatron.CONFIGS["llama"]
    file = megatron.write_archive(tmp_path / "rm.nemo", cfg, megatron.random_tensors(cfg), "zarr")
    folder = tmp_path / "rm.folder"
    chunk = folder / "model_weights" / "model.embedding.word_embeddings.weight" / "1.0"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    with pytest.raises(ModelError, match=r"1\.0 is missing or has not 4800 bytes"):
        import_nemo(folder, tmp_path / "out", tokenizer=tokenizer)
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(ModelError, match=r"cannot unpack|cannot read model_config\.yaml"):
        import_nemo(file, tmp_path / "out", tokenizer=tokenizer)
    process = plaudit_here("score", "x.jsonl", "--model", str(file))
    assert "import it first: plaudit import" in process.stderr


@pytest.mark.slow
def test_server_protocols_return_the_scores_of_an_imported_archive(tokenizer: str, tmp_path: Path) -> None:
    cfg = megatron.CONFIGS["llama"]
    tensors = megatron.random_tensors(cfg)
    file = megatron.write_archive(tmp_path / "rm.nemo", cfg, tensors, "zarr")
    out = import_nemo(file, tmp_path / "out", tokenizer=tokenizer)
    ids = byte_tokenizer().encode("hello world")
    expected = float(megatron.rewards(cfg, rounded(tensors, "zarr"), [ids])[0, 0])
    sentence = {"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": ["hello world"]}
    with ServerProcess({"models": {"reward_model": {"path": str(out)}}}) as server:
        triton = server.http.post("/v2/models/reward_model/infer", json={"inputs": [sentence]}).json()
        assert triton["outputs"][0]["data"][0] == pytest.approx(expected, abs=1e-6)
        raw = {"model": "reward_model", "input": "hello world", "use_activation": False}
        pooled = server.http.post("/pooling", json=raw).json()
        assert pooled["data"][0]["data"][0] == pytest.approx(expected, abs=1e-6)
