from __future__ import annotations

import errno
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from plaudit import models
from plaudit.errors import StorageError
from plaudit.models import saving

from .builders import byte_tokenizer, causal, same


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("limit", [0, 100, 3_000, 20_000])
def test_full_disk_keeps_the_previous_save_intact(limit: int, tmp_path: Path) -> None:
    old, tokenizer = causal(), byte_tokenizer()
    models.save(old, tokenizer, tmp_path / "m")
    before = files(tmp_path)
    assert max(map(len, before.values())) > 20_000
    new = causal()
    torch.nn.init.ones_(new.lm_head.weight)
    with file_size_limit(limit), pytest.raises(StorageError, match=r"cannot save .*File too large.*intact") as caught:
        models.save(new, tokenizer, tmp_path / "m")
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == before
    with file_size_limit(limit), pytest.raises(StorageError):
        models.save(new, tokenizer, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    models.save(new, tokenizer, tmp_path / "m")
    assert same(models.load_policy(tmp_path / "m").module, new)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_full_disk_while_writing_the_tokenizer_leaves_nothing(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra {i}>" for i in range(500)])
    small = causal(vocab_size=8, num_hidden_layers=1, hidden_size=4, intermediate_size=4)
    with file_size_limit(10_000), pytest.raises(StorageError, match="File too large"):
        models.save(small, tokenizer, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_second_save_replaces_the_first_completely(tmp_path: Path) -> None:
    module = causal()
    module.save_pretrained(tmp_path / "m", max_shard_size="8KB")
    models.save(module, byte_tokenizer(), tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").glob("*.safetensors*")) == ["model.safetensors"]
    assert same(models.load_policy(tmp_path / "m").module, module)


def test_save_works_without_rename_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RENAME_EXCHANGE", 1 << 20)
    module = causal()
    models.save(causal(tied=True), byte_tokenizer(), tmp_path / "m")
    models.save(module, byte_tokenizer(), tmp_path / "m")
    assert same(models.load_policy(tmp_path / "m").module, module)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_save_does_not_overwrite_unrelated_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match=r"holds 'thesis.tex', which is not part of a model"):
        models.save(causal(), byte_tokenizer(), tmp_path)
    with pytest.raises(StorageError, match="it is a file"):
        models.save(causal(), byte_tokenizer(), tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(StorageError, match=r"cannot save"):
        models.save(causal(), byte_tokenizer(), tmp_path / "thesis.tex" / "deeper")


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(torch.nn.Module):
        config = causal().config

        def get_input_embeddings(self) -> torch.nn.Module:
            return torch.nn.Embedding(1, 1)

        def save_pretrained(self, directory: Path) -> None:
            (directory / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.save(Interrupted(), byte_tokenizer(), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_attention_implementation_is_not_saved(tmp_path: Path) -> None:
    module = causal()
    module.set_attn_implementation("eager")
    models.save(module, byte_tokenizer(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert not [key for key in config if "attn_impl" in key]
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_storage_errors_are_recognised() -> None:
    assert saving._is_storage(OSError(errno.ENOSPC, "No space left on device"))
    assert saving._is_storage(Exception("No space left on device (os error 28)"))
    assert not saving._is_storage(ValueError("shape"))


def test_all_saved_files_have_the_same_permissions(tmp_path: Path) -> None:
    models.save(causal(), byte_tokenizer(), tmp_path / "a")
    modes = {file.stat().st_mode for file in (tmp_path / "a").iterdir() if file.is_file()}
    assert len(modes) == 1
