from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from plaudit import models
from plaudit.errors import ModelError, UnsafeModel

from .builders import causal, same, write_plain

WATCHED = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")


class Watch:
    """Audit events inside the `with` block: unpickling, processes, connections, and opening code or pickles of
    `directory`."""

    def __init__(self) -> None:
        self.directory: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)  # audit hooks cannot be removed, so all tests share one, inactive between them

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.directory is None:
            return
        code = event == "open" and str(arguments[0]).startswith(self.directory)
        if event in WATCHED or (code and str(arguments[0]).endswith((".py", ".bin", ".pt"))):
            self.seen.append(f"{event} {arguments}")

    @contextmanager
    def __call__(self, directory: Path) -> Iterator[None]:
        self.directory, self.seen = str(directory), []
        try:
            yield
        finally:
            self.directory = None


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


class Canary:
    """Unpickling it creates the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("remote_code", [False, True])
def test_pickles_and_remote_code_are_rejected_without_execution(
    remote_code: bool, tmp_path: Path, watch: Watch
) -> None:
    directory, canary = tmp_path / "model", tmp_path / "canary"
    write_plain(causal(), directory)
    (directory / "model.safetensors").unlink()
    torch.save({"x": Canary(str(canary))}, directory / "pytorch_model.bin")
    (directory / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: ...\n")
    for file in [directory / "config.json", directory / "tokenizer_config.json"] if remote_code else []:
        auto = {"auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}}
        file.write_text(json.dumps({**json.loads(file.read_text()), **auto}))
    for load in (models.load_policy, models.load_any, models.load_tokenizer)[: 3 if remote_code else 2]:
        with watch(directory), pytest.raises(UnsafeModel) as caught:
            load(directory)
        assert watch.seen == []
        assert "\n" not in str(caught.value)
    assert not canary.exists()
    with watch(directory), suppress(pickle.UnpicklingError):
        torch.load(directory / "pytorch_model.bin", weights_only=True)
    assert watch.seen, "the watch sees what it is for"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "m.pt", "m.pth", "m.ckpt"])
def test_models_with_only_pickled_weights_are_rejected(name: str, tmp_path: Path) -> None:
    write_plain(causal(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(UnsafeModel, match=f"only pickled weights .{name}.*convert them to safetensors"):
        models.load_policy(tmp_path)


def test_pickle_next_to_safetensors_is_ignored(tmp_path: Path) -> None:
    module = causal()
    write_plain(module, tmp_path)
    torch.save({"x": Canary(str(tmp_path / "canary"))}, tmp_path / "pytorch_model.bin")
    assert same(models.load_policy(tmp_path).module, module)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "x.Y"}}, "requests custom code"),
        ("config.json", {"text_config": {"auto_map": {}}}, "requests custom code"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "requests custom code"),
        ("config.json", {"attn_implementation": "somebody/kernel"}, "requests downloaded kernels"),
    ],
)
def test_custom_code_is_rejected(file: str, change: dict[str, object], message: str, tmp_path: Path) -> None:
    write_plain(causal(), tmp_path)
    (tmp_path / file).write_text(json.dumps({**json.loads((tmp_path / file).read_text()), **change}))
    with pytest.raises(UnsafeModel, match=message):
        models.load_policy(tmp_path)
    with pytest.raises(UnsafeModel, match=message):
        models.load_tokenizer(tmp_path)


def test_adapters_are_rejected_as_models(tmp_path: Path) -> None:
    write_plain(causal(), tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/base"}')
    with pytest.raises(ModelError, match="merge it into its base model"):
        models.load_policy(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UnsafeModel, match=r"adapter_model.bin, a pickle"):
        models.load_policy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"no weights in .* looked for model.safetensors"):
        models.load_policy(tmp_path)
